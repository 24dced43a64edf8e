/* What every C source of the kernels needs. */

#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* One body, compiled for several instruction sets and chosen when the library is loaded. -DFAST= compiles one alone. */
#if defined(FAST)
#elif defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 11
#define FAST __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define FAST
#endif
#define INLINE static inline __attribute__((always_inline))

enum { RUN = 256, LANES = 8 };

/* Raise with every change that a caller must know of; kernels/native.py has the same number. */
enum { VERSION = 21 };

INLINE int64_t bits_of(double x) {
    int64_t n;
    memcpy(&n, &x, sizeof n);
    return n;
}

INLINE double float_of(int64_t n) {
    double x;
    memcpy(&x, &n, sizeof x);
    return x;
}

INLINE double power_of_two(int64_t exponent) { return float_of((int64_t)((uint64_t)(exponent + 1023) << 52)); }

INLINE int64_t exponent_of(double x) { return (int64_t)(((uint64_t)bits_of(x) >> 52) & 0x7FF) - 1023; }

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Eight marks in one word, the first in its lowest byte. */
INLINE uint64_t marks_of(const uint8_t *mark) {
    uint64_t word = 0;
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    memcpy(&word, mark, sizeof word);
#else
    for (int i = 0; i < 8; i++) word |= (uint64_t)mark[i] << 8 * i;
#endif
    return word;
}

/* The number of the first of them that is set. */
INLINE int place_of(uint64_t marks) { return __builtin_ctzll(marks) >> 3; }

/* Type 0 is binary32, 1 is binary64. */
INLINE void load(double *to, const void *from, int type, int64_t at, int n) {
    if (type == 0) {
        const float *p = (const float *)from + at;
        for (int i = 0; i < n; i++) to[i] = (double)p[i];
    } else {
        memcpy(to, (const double *)from + at, (size_t)n * sizeof *to);
    }
}

/* Sum over [begin, end) of (bits + 1) * odd(base + i) modulo 2**64, bits those of the value as binary32 (spec/transcript.md). */
INLINE uint64_t fingerprint_of(const void *x, int32_t type, int64_t begin, int64_t end, uint64_t base) {
    const uint64_t step = 0x9E3779B97F4A7C15u;
    uint64_t total = 0;
    for (int64_t at = begin; at < end; at += RUN) {
        int n = (int)smaller(end - at, RUN);
        uint32_t bits[RUN];
        if (type == 0) {
            memcpy(bits, (const float *)x + at, (size_t)n * sizeof *bits);
        } else {
            float narrow[RUN];
            const double *p = (const double *)x + at;
            for (int i = 0; i < n; i++) narrow[i] = (float)p[i];
            memcpy(bits, narrow, (size_t)n * sizeof *bits);
        }
        uint64_t first = (base + (uint64_t)at) * step;
        for (int i = 0; i < n; i++) total += ((uint64_t)bits[i] + 1) * ((first + (uint64_t)i * step) | 1);
    }
    return total;
}

INLINE void add_squares(double *lanes, const double *values, int n) {
    int whole = n - n % LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += values[i + lane] * values[i + lane];
    for (int i = whole; i < n; i++) lanes[i - whole] += values[i] * values[i];
}

/* The same of binary32 values, in the same order. */
INLINE void add_narrow_squares(double *lanes, const float *values, int n) {
    int whole = n - n % LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += (double)values[i + lane] * (double)values[i + lane];
    for (int i = whole; i < n; i++) lanes[i - whole] += (double)values[i] * (double)values[i];
}

INLINE double sum_of_lanes(const double *lanes) {
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/* Room that tally_words needs to write the words of n elements from any of the first counter's four on. */
#define WORDS(n) ((n) + 36)

/* Write the Philox words of counters first and following, four each, blocks of them and up to seven more (philox.c). */
void tally_words(uint32_t *words, uint64_t first, int blocks, uint64_t key0, uint64_t key1);
