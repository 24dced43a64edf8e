/* The portable random stream, Philox 4x32-10 (spec/random.md), and what draws from it.
 *
 * Salmon et al. 2011, table 2. Integers alone, so every form below gives the same words. Compilers do not see that the
 * cipher's products are of 32 bits each and multiply 64 by 64, three times as slow; x86 is told by name.
 */

#include <float.h>
#include <math.h>

#include "native.h"

#define FACTOR0 0xD2511F53u
#define FACTOR1 0xCD9E8D57u
#define WEYL0 0x9E3779B9u
#define WEYL1 0xBB67AE85u
enum { ROUNDS = 10 };

/* Words 4 b .. 4 b + 3 belong to counter first + b. */
INLINE void words_plainly(uint32_t *words, uint64_t first, int blocks, uint64_t key0, uint64_t key1) {
    for (int b = 0; b < blocks; b++) {
        uint64_t counter = first + (uint64_t)b;
        uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0;
        uint32_t k0 = (uint32_t)key0, k1 = (uint32_t)key1;
        for (int round = 0; round < ROUNDS; round++) {
            uint64_t p0 = (uint64_t)FACTOR0 * c0, p1 = (uint64_t)FACTOR1 * c2;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)p1;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)p0;
            k0 += WEYL0;
            k1 += WEYL1;
        }
        words[4 * b] = c0;
        words[4 * b + 1] = c1;
        words[4 * b + 2] = c2;
        words[4 * b + 3] = c3;
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* Counters lie in lanes of 64 bits, whose upper halves hold what a product left there; no product reads them. ORDER puts
 * counters into lanes such that unpacking, which works within 128 bits, writes them in their order. GROUPS vectors are
 * worked on in turn, as each waits for its own products. */
#define WORDS_BY_VECTOR(name, features, V, LANES64, GROUPS, ORDER, P, S)                                                    \
    __attribute__((target(features))) static void name(uint32_t *words, uint64_t first, int blocks, uint64_t key0,         \
                                                       uint64_t key1) {                                                    \
        const V order = ORDER, factor0 = P##set1_epi64##S(FACTOR0), factor1 = P##set1_epi64##S(FACTOR1);                    \
        for (int b = 0; b < blocks; b += LANES64 * GROUPS) {                                                               \
            V c0[GROUPS], c1[GROUPS], c2[GROUPS], c3[GROUPS];                                                              \
            uint32_t k0 = (uint32_t)key0, k1 = (uint32_t)key1;                                                             \
            const int groups = blocks - b < LANES64 * GROUPS ? (blocks - b + LANES64 - 1) / LANES64 : GROUPS;              \
            for (int g = 0; g < GROUPS; g++) {                                                                             \
                c0[g] = P##add_epi64(order, P##set1_epi64##S((long long)(first + (uint64_t)(b + LANES64 * g))));           \
                c1[g] = P##srli_epi64(c0[g], 32);                                                                          \
                c2[g] = c3[g] = P##xor_##V(order, order);                                                                  \
            }                                                                                                              \
            for (int round = 0; round < ROUNDS; round++) {                                                                 \
                const V key_even = P##set1_epi64##S(k0), key_odd = P##set1_epi64##S(k1);                                   \
                for (int g = 0; g < GROUPS; g++) {                                                                         \
                    V p0 = P##mul_epu32(c0[g], factor0), p1 = P##mul_epu32(c2[g], factor1);                                \
                    c0[g] = P##xor_##V(P##xor_##V(P##srli_epi64(p1, 32), c1[g]), key_even);                                \
                    c1[g] = p1;                                                                                            \
                    c2[g] = P##xor_##V(P##xor_##V(P##srli_epi64(p0, 32), c3[g]), key_odd);                                 \
                    c3[g] = p0;                                                                                            \
                }                                                                                                          \
                k0 += WEYL0;                                                                                               \
                k1 += WEYL1;                                                                                               \
            }                                                                                                              \
            for (int g = 0; g < groups; g++) {                                                                             \
                V low = P##unpacklo_epi32(c0[g], c1[g]), high = P##unpackhi_epi32(c0[g], c1[g]);                           \
                V also_low = P##unpacklo_epi32(c2[g], c3[g]), also_high = P##unpackhi_epi32(c2[g], c3[g]);                 \
                uint32_t *to = words + 4 * (b + LANES64 * g);                                                              \
                P##storeu_##V((void *)to, P##unpacklo_epi64(low, also_low));                                               \
                P##storeu_##V((void *)(to + 2 * LANES64), P##unpacklo_epi64(high, also_high));                             \
            }                                                                                                              \
        }                                                                                                                  \
    }
#define _mm512_xor___m512i _mm512_xor_si512
#define _mm256_xor___m256i _mm256_xor_si256
#define _mm_xor___m128i _mm_xor_si128
#define _mm512_storeu___m512i _mm512_storeu_si512
#define _mm256_storeu___m256i _mm256_storeu_si256
#define _mm_storeu___m128i _mm_storeu_si128
WORDS_BY_VECTOR(words_by_8, "avx512f", __m512i, 8, 4, _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0), _mm512_, )
WORDS_BY_VECTOR(words_by_4, "avx2", __m256i, 4, 3, _mm256_set_epi64x(3, 1, 2, 0), _mm256_, x)
WORDS_BY_VECTOR(words_by_2, "sse2", __m128i, 2, 2, _mm_set_epi64x(1, 0), _mm_, x)

typedef void Words(uint32_t *, uint64_t, int, uint64_t, uint64_t);

static Words *find_words(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return words_by_8;
    return __builtin_cpu_supports("avx2") ? words_by_4 : words_by_2;
}

static Words *chosen; /* set once, and to the same by every thread */

void tally_words(uint32_t *words, uint64_t first, int blocks, uint64_t key0, uint64_t key1) {
    Words *found = __atomic_load_n(&chosen, __ATOMIC_RELAXED);
    if (!found) __atomic_store_n(&chosen, found = find_words(), __ATOMIC_RELAXED);
    found(words, first, blocks, key0, key1);
}

/* The forms this processor has, 0 being the plain one; for tests. Returns 0 where it has no such form. */
EXPORT int32_t tally_words_in_form(int32_t form, uint32_t *words, uint64_t first, int32_t blocks, uint64_t key0,
                                   uint64_t key1) {
    __builtin_cpu_init();
    if (form == 3 && __builtin_cpu_supports("avx512f")) return words_by_8(words, first, blocks, key0, key1), 1;
    if (form == 2 && __builtin_cpu_supports("avx2")) return words_by_4(words, first, blocks, key0, key1), 1;
    if (form == 1) return words_by_2(words, first, blocks, key0, key1), 1;
    if (form == 0) return words_plainly(words, first, blocks, key0, key1), 1;
    return 0;
}
#else
FAST void tally_words(uint32_t *words, uint64_t first, int blocks, uint64_t key0, uint64_t key1) {
    words_plainly(words, first, blocks, key0, key1);
}

EXPORT int32_t tally_words_in_form(int32_t form, uint32_t *words, uint64_t first, int32_t blocks, uint64_t key0,
                                   uint64_t key1) {
    if (form == 0) words_plainly(words, first, blocks, key0, key1);
    return form == 0;
}
#endif

/* Fill out with the words of elements start and following, n of them. */
EXPORT void tally_philox(uint64_t key0, uint64_t key1, int64_t start, int64_t n, uint32_t *out) {
    uint32_t words[WORDS(RUN)];
    for (int64_t at = 0; at < n; at += RUN) {
        int64_t element = start + at;
        int skip = (int)(element & 3), length = (int)smaller(n - at, RUN);
        tally_words(words, (uint64_t)(element >> 2), (skip + length + 3) >> 2, key0, key1);
        memcpy(out + at, words + skip, (size_t)length * sizeof *out);
    }
}

/* Write 1 where the word of elements start and following is below threshold (at most 2**32), else 0; n elements of out, each
 * of type 0 a binary32 number, else a byte. */
FAST EXPORT void tally_keep(uint64_t key0, uint64_t key1, int64_t start, int64_t n, uint64_t threshold, void *out, int32_t type) {
    uint32_t words[WORDS(RUN)];
    for (int64_t at = 0; at < n; at += RUN) {
        int64_t element = start + at;
        int skip = (int)(element & 3), length = (int)smaller(n - at, RUN);
        tally_words(words, (uint64_t)(element >> 2), (skip + length + 3) >> 2, key0, key1);
        if (type == 0)
            for (int i = 0; i < length; i++) ((float *)out)[at + i] = words[skip + i] < threshold ? 1.0f : 0.0f;
        else
            for (int i = 0; i < length; i++) ((uint8_t *)out)[at + i] = (uint8_t)(words[skip + i] < threshold);
    }
}

/* log(x) of a positive normal number and the normal number of u in (0, 1): spec/random.md 4, operation by operation. */
INLINE double plain_log(double x) {
    int exponent;
    double fraction = frexp(x, &exponent);
    if (fraction < 0x1.6a09e667f3bcdp-1) fraction *= 2.0, exponent--;
    double e = (double)exponent, s = (fraction - 1.0) / (fraction + 1.0), s2 = s * s, series = 1.0 / 25.0;
    for (int term = 23; term > 1; term -= 2) series = series * s2 + 1.0 / term;
    double small = e * 0x1.a39ef35793c76p-33 + 2.0 * s * s2 * series;
    return e * 0x1.62e42feep-1 + (2.0 * s + small);
}

INLINE double ratio(double x, const double *parts) {
    double above = parts[7], below = parts[15];
    for (int i = 6; i >= 0; i--) above = above * x + parts[i], below = below * x + parts[8 + i];
    return above / below;
}

/* Write the normal number of each word below 2**32; parts are the coefficients of the three ratios, lowest first. */
EXPORT void tally_normal(const int64_t *words, int64_t n, const double *parts, double *out) {
    for (int64_t at = 0; at < n; at++) {
        double u = ((double)words[at] + 0.5) * 0x1p-32, q = u - 0.5;
        if (fabs(q) <= 0.425) {
            out[at] = q * ratio(0.180625 - q * q, parts);
            continue;
        }
        double r = sqrt(-plain_log(u < 1.0 - u ? u : 1.0 - u));
        double size = r <= 5.0 ? ratio(r - 1.6, parts + 16) : ratio(r - 5.0, parts + 32);
        out[at] = q < 0.0 ? -size : size;
    }
}

/* Write x + d x size over [begin, end), d being -1 or 1 by byte (start + i) of the stream. Infinities and NaN stay, and
 * so do whole numbers up to whole, which is negative where they move too. out may be x. start, and begin where the work is
 * cut, are multiples of 16: the bytes of one counter. */
#define JITTER(name, T, round_to_whole, absolute, greatest)                                               \
    INLINE void name(const T *x, T *out, const uint8_t *byte, int n, T size, T whole) {                   \
        for (int i = 0; i < n; i++) {                                                                     \
            T way = (T)((byte[i] & 2) - 1), far = absolute(x[i]), moved = x[i] + x[i] * (way * size); \
            int stays = !(far <= (T)(greatest)) | ((far <= whole) & (x[i] == round_to_whole(x[i])));      \
            out[i] = stays ? x[i] : moved;                                                                \
        }                                                                                                 \
    }
JITTER(jitter32, float, rintf, fabsf, FLT_MAX)
JITTER(jitter64, double, rint, fabs, DBL_MAX)

FAST EXPORT void tally_jitter(const void *x, void *out, int32_t type, int64_t begin, int64_t end, uint64_t start,
                              uint64_t key0, uint64_t key1, double size, double whole) {
    uint32_t words[WORDS(RUN / 4)];
    for (int64_t at = begin; at < end; at += RUN) {
        int n = (int)smaller(end - at, RUN);
        tally_words(words, (start + (uint64_t)at) >> 4, (n + 15) >> 4, key0, key1);
        const uint8_t *byte = (const uint8_t *)words;
        if (type == 0)
            jitter32((const float *)x + at, (float *)out + at, byte, n, (float)size, (float)whole);
        else
            jitter64((const double *)x + at, (double *)out + at, byte, n, size, whole);
    }
}
