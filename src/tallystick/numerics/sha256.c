/* SHA-256 (FIPS 180-4) of the leaves of a Merkle tree, several at a time: one stream leaves most of the processor's hashing
 * unit idle, as every round waits for the one before it. Leaves of other lengths than the rest are hashed alone.
 */

#include "native.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#include <immintrin.h>

enum { STREAMS = 4, BLOCK = 64 };

static const uint32_t ROUND[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};
static const uint32_t START[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

#define HASHING __attribute__((target("sha,sse4.1,ssse3")))

/* The state of one stream in the order that the instructions want: words F E B A, and H G D C. */
typedef struct {
    __m128i abef, cdgh;
} State;

/* Take count blocks of each of the streams. */
HASHING static inline __attribute__((always_inline)) void take(State *state, const uint8_t **from, int64_t count, int streams) {
    const __m128i order = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    for (int64_t block = 0; block < count; block++) {
        __m128i a[STREAMS], c[STREAMS], words[STREAMS][4];
        for (int s = 0; s < streams; s++) {
            a[s] = state[s].abef, c[s] = state[s].cdgh;
            for (int i = 0; i < 4; i++)
                words[s][i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(from[s] + BLOCK * block + 16 * i)), order);
        }
#if defined(__clang__)
#pragma clang loop unroll(full)
#else
#pragma GCC unroll 16
#endif
        for (int r = 0; r < 16; r++) {
            const __m128i k = _mm_loadu_si128((const __m128i *)(ROUND + 4 * r));
            for (int s = 0; s < streams; s++) {
                __m128i w = _mm_add_epi32(words[s][r & 3], k);
                c[s] = _mm_sha256rnds2_epu32(c[s], a[s], w);
                a[s] = _mm_sha256rnds2_epu32(a[s], c[s], _mm_shuffle_epi32(w, 0x0e));
                if (r < 12) {
                    __m128i next = _mm_sha256msg1_epu32(words[s][r & 3], words[s][(r + 1) & 3]);
                    next = _mm_add_epi32(next, _mm_alignr_epi8(words[s][(r + 3) & 3], words[s][(r + 2) & 3], 4));
                    words[s][r & 3] = _mm_sha256msg2_epu32(next, words[s][(r + 3) & 3]);
                }
            }
        }
        for (int s = 0; s < streams; s++) {
            state[s].abef = _mm_add_epi32(a[s], state[s].abef);
            state[s].cdgh = _mm_add_epi32(c[s], state[s].cdgh);
        }
    }
}

/* Hash 00 | data of streams leaves of n bytes each, one after another in memory. */
HASHING static inline __attribute__((always_inline)) void leaves(const uint8_t *data, int64_t n, uint8_t *out, int streams) {
    State state[STREAMS];
    uint8_t edge[STREAMS][2 * BLOCK];
    const uint8_t *from[STREAMS];
    const int64_t first = smaller(n, BLOCK - 1), middle = (n - first) / BLOCK, rest = n - first - BLOCK * middle;
    for (int s = 0; s < streams; s++) {
        state[s].abef = _mm_set_epi32((int)START[0], (int)START[1], (int)START[4], (int)START[5]);
        state[s].cdgh = _mm_set_epi32((int)START[2], (int)START[3], (int)START[6], (int)START[7]);
        edge[s][0] = 0;
        memcpy(edge[s] + 1, data + s * n, (size_t)first);
        from[s] = edge[s];
    }
    if (first == BLOCK - 1) {
        take(state, from, 1, streams);
        for (int s = 0; s < streams; s++) from[s] = data + s * n + first;
        take(state, from, middle, streams);
    }
    /* What is left, one bit, zeros, and the length in bits. */
    const int64_t held = first == BLOCK - 1 ? rest : first + 1, blocks = held + 9 > BLOCK ? 2 : 1;
    for (int s = 0; s < streams; s++) {
        if (first == BLOCK - 1) memcpy(edge[s], data + s * n + first + BLOCK * middle, (size_t)rest);
        memset(edge[s] + held, 0, (size_t)(blocks * BLOCK - held));
        edge[s][held] = 0x80;
        for (int i = 0; i < 8; i++) edge[s][blocks * BLOCK - 1 - i] = (uint8_t)((uint64_t)(n + 1) * 8 >> 8 * i);
        from[s] = edge[s];
    }
    take(state, from, blocks, streams);
    for (int s = 0; s < streams; s++) {
        uint32_t ef[4], gh[4];
        _mm_storeu_si128((__m128i *)ef, state[s].abef);
        _mm_storeu_si128((__m128i *)gh, state[s].cdgh);
        const uint32_t words[8] = {ef[3], ef[2], gh[3], gh[2], ef[1], ef[0], gh[1], gh[0]};
        for (int i = 0; i < 32; i++) out[32 * s + i] = (uint8_t)(words[i / 4] >> (24 - 8 * (i % 4)));
    }
}

HASHING static void hash_all(const uint8_t *data, int64_t n, int64_t chunk, uint8_t *out) {
    int64_t at = 0;
    for (; at + STREAMS * chunk <= n; at += STREAMS * chunk, out += 32 * STREAMS) leaves(data + at, chunk, out, STREAMS);
    for (; at < n; at += chunk, out += 32) leaves(data + at, smaller(chunk, n - at), out, 1);
}

static int can_hash(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSSE3) || !(c & bit_SSE4_1)) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & (1u << 29));
}

/* Write SHA-256(00 | chunk) of each chunk of the n bytes at data, 32 bytes each. Returns 0 if this processor has no
 * instructions for it, and nothing was written. */
EXPORT int32_t tally_leaf_hashes(const uint8_t *data, int64_t n, int64_t chunk, uint8_t *out) {
    if (!can_hash()) return 0;
    hash_all(data, n, chunk, out);
    return 1;
}

#else

EXPORT int32_t tally_leaf_hashes(const uint8_t *data, int64_t n, int64_t chunk, uint8_t *out) {
    (void)data, (void)n, (void)chunk, (void)out;
    return 0;
}

#endif
