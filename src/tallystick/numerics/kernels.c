/* Rounding on the CPU, fused: one pass rounds, tests for ambiguity and collects the log entries.
 *
 * Bit-equal to reference.py, which is the definition; the tests run both on one body. Only IEEE binary64
 * + - *, comparison, floor and integer operations occur, and this file is compiled without contraction
 * (-ffp-contract=off) and without fast-math, so every compiler and processor gives the same bits. Work goes
 * over runs of RUN elements, which stay in the first-level cache and which compilers turn into vectors.
 *
 * Every function works on elements [begin, end) of a tensor and may run beside others on other ranges.
 * Element types: 0 is binary32, 1 is binary64. Flat arrays, native byte order.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "native.h"

enum { RUN = 256, LANES = 8 };

/* Raise with every change that a caller must know of; kernels.py has the same number. */
enum { VERSION = 10 };

#define T_FIXED (486260413.0 * 0x1p-30) /* spec/rounding.md 3: off every simple fraction, in the middle range */
#define MIN_EXPONENT (-149)             /* the smallest positive FP32 value is 2**-149 */
#define MAX_EXPONENT 1000               /* of a quantum, so that it and its reciprocal are normal numbers */
#define MIN_BAND (-1022)                /* no distance but zero is smaller */
#define CANCELLED 5                     /* relative bands: no quantum below 2**(e(old) + band + 5) */
#define MAX_FP64 0x1.fffffffffffffp+1023
#define MAX_FP32 0x1.fffffep+127

typedef struct {
    const void *x, *old;    /* old: NULL for absolute bands */
    void *out;              /* NULL where nothing is written */
    int32_t x_type, old_type, out_type;
    const int32_t *scales;  /* one per block of rows elements; NULL for relative bands */
    int64_t rows;
    int32_t precision, band, floor, dithered;
    uint64_t key0, key1;
    double limit;
} Site;

/* A run of elements placed on the grid. */
typedef struct {
    double value[RUN], before[RUN], t[RUN], quantum[RUN], cell[RUN], up[RUN], near[RUN], far[RUN], delta[RUN];
    uint32_t words[RUN + 8];
} Run;

INLINE int64_t bits_of(double x) {
    int64_t n;
    memcpy(&n, &x, sizeof n);
    return n;
}

INLINE double power_of_two(int64_t exponent) {
    int64_t n = (int64_t)((uint64_t)(exponent + 1023) << 52);
    double x;
    memcpy(&x, &n, sizeof x);
    return x;
}

INLINE int64_t exponent_of(double x) { return (int64_t)(((uint64_t)bits_of(x) >> 52) & 0x7FF) - 1023; }

INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE void load(double *to, const void *from, int type, int64_t at, int n) {
    if (type == 0) {
        const float *p = (const float *)from + at;
        for (int i = 0; i < n; i++) to[i] = (double)p[i];
    } else {
        memcpy(to, (const double *)from + at, (size_t)n * sizeof *to);
    }
}

INLINE void store(void *to, const double *from, int type, int64_t at, int n) {
    if (type == 0) {
        float *p = (float *)to + at;
        for (int i = 0; i < n; i++) p[i] = (float)from[i];
    } else {
        memcpy((double *)to + at, from, (size_t)n * sizeof *from);
    }
}

/* Salmon et al. 2011, table 2. Words 4 b .. 4 b + 3 belong to counter first + b. */
INLINE void philox(uint32_t *words, uint64_t first, int blocks, uint64_t key0, uint64_t key1) {
    for (int b = 0; b < blocks; b++) {
        uint64_t counter = first + (uint64_t)b;
        uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0;
        uint32_t k0 = (uint32_t)key0, k1 = (uint32_t)key1;
        for (int round = 0; round < 10; round++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
            c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)p1;
            c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)p0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        words[4 * b] = c0;
        words[4 * b + 1] = c1;
        words[4 * b + 2] = c2;
        words[4 * b + 3] = c3;
    }
}

INLINE void grid_of_value(Run *run, int i, int precision, int64_t floor_exponent) {
    double x = run->value[i], t = run->t[i];
    int64_t exponent = floor_exponent;
    if (precision) exponent = smaller(larger(exponent_of(x) - (precision - 1), floor_exponent), MAX_EXPONENT);
    double z = x * power_of_two(-exponent);
    double k = floor(z), r = z - k;
    double low = r < t ? r : t, high = r < t ? t : r;
    run->quantum[i] = power_of_two(exponent);
    run->cell[i] = k;
    run->up[i] = r >= t ? 1.0 : 0.0;
    run->near[i] = high - low;         /* to the boundary of its own cell, in quanta */
    run->far[i] = (low + 1.0) - high;  /* to the one beyond it */
}

/* Load and place n elements from position at on, all of one block; return whether all of them can be rounded. */
INLINE int place(Run *run, const Site *site, int64_t at, int n) {
    load(run->value, site->x, site->x_type, at, n);
    if (site->dithered) {
        int skip = (int)(at & 3);
        philox(run->words, (uint64_t)(at >> 2), (skip + n + 3) >> 2, site->key0, site->key1);
        for (int i = 0; i < n; i++) run->t[i] = ((double)run->words[skip + i] + 0.5) * 0x1p-32;
    } else {
        for (int i = 0; i < n; i++) run->t[i] = T_FIXED;
    }
    int precision = site->precision;
    int64_t bad = 0;
    if (site->scales == NULL) {
        double scale = ldexp(1.0, site->band < MIN_BAND ? MIN_BAND : site->band);
        int64_t reach = (int64_t)site->band + CANCELLED;
        load(run->before, site->old, site->old_type, at, n);
        for (int i = 0; i < n; i++) {
            double now = fabs(run->value[i]), before = fabs(run->before[i]);
            bad |= !(before <= MAX_FP32);
            run->delta[i] = scale * (now > before ? now : before);
            grid_of_value(run, i, precision, larger(exponent_of(before) + reach, MIN_EXPONENT));
        }
    } else {
        int64_t scale = site->scales[at / site->rows];
        double delta = ldexp(1.0, (int)larger(scale + site->band, MIN_BAND));
        int64_t floor_exponent = larger(scale + site->floor, MIN_EXPONENT);
        for (int i = 0; i < n; i++) {
            run->delta[i] = delta;
            grid_of_value(run, i, precision, floor_exponent);
        }
    }
    for (int i = 0; i < n; i++) bad |= !(fabs(run->value[i]) <= MAX_FP64);
    return !bad;
}

/* Write (k + up) q over value; return whether every result is within the limit. */
INLINE int finish(Run *run, const Site *site, int n) {
    int64_t bad = 0;
    for (int i = 0; i < n; i++) {
        double result = (run->cell[i] + run->up[i]) * run->quantum[i];
        bad |= !(fabs(result) <= site->limit);
        run->value[i] = result + 0.0;
    }
    return !bad;
}

/* The first element of a run that cannot be rounded; near the end of a refusal, so it may be slow. */
static int64_t find_bad(Run *run, const Site *site, int64_t at, int n) {
    double result[RUN];
    memcpy(result, run->value, sizeof result);
    load(run->value, site->x, site->x_type, at, n);
    for (int i = 0; i < n; i++) {
        int good = fabs(run->value[i]) <= MAX_FP64 && fabs((run->cell[i] + run->up[i]) * run->quantum[i]) <= site->limit;
        if (site->scales == NULL) good = good && fabs(run->before[i]) <= MAX_FP32;
        if (!good) return at + i;
    }
    return -1;
}

INLINE int run_length(const Site *site, int64_t at, int64_t end) {
    int64_t last = end;
    if (site->scales != NULL) last = smaller(last, (at / site->rows + 1) * site->rows);
    return (int)smaller(last - at, RUN);
}

/* Round elements [begin, end). Writes the ambiguous elements' positions and sides to index and side, which hold
 * end - begin of them, and returns their number; or -1 - i, i being the first element that cannot be rounded: it is
 * not finite, becomes larger than limit, or was beyond FP32 before. */
FAST EXPORT int64_t tally_record(const Site *site, int64_t begin, int64_t end, int64_t *index, uint8_t *side) {
    Run run;
    int64_t count = 0, hit[RUN];
    for (int64_t at = begin; at < end;) {
        int n = run_length(site, at, end);
        int good = place(&run, site, at, n);
        int64_t any = 0;
        for (int i = 0; i < n; i++) {
            double nearest = run.near[i] < run.far[i] ? run.near[i] : run.far[i];
            hit[i] = nearest * run.quantum[i] < run.delta[i];
            any |= hit[i];
        }
        if (!finish(&run, site, n) || !good) return -1 - find_bad(&run, site, at, n);
        store(site->out, run.value, site->out_type, at, n);
        if (any) {
            for (int i = 0; i < n; i++) {
                if (!hit[i]) continue;
                int up = run.up[i] == 1.0;
                index[count] = at + i;
                side[count++] = (uint8_t)(run.far[i] < run.near[i] ? 1 - up : up);
            }
        }
        at += n;
    }
    return count;
}

typedef struct {
    int64_t near, violations, violation, moved; /* violation: position of the first, or -1 */
    double steer, energy, shifted, largest;
} Followed;

INLINE void add_squares(double *lanes, const double *values, int n) {
    int whole = n - n % LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += values[i + lane] * values[i + lane];
    for (int i = whole; i < n; i++) lanes[i - whole] += values[i] * values[i];
}

INLINE double sum_of_lanes(const double *lanes) {
    return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

/* Round elements [begin, end), taking the logged side for the elements in index (ascending, all within the range).
 *
 * found receives: elements within twice the band of a boundary, entries out of reach and the first of them, the sum of
 * the near elements' squared quanta, the sum of squares of the results, and how many elements an entry moved from their
 * own rounding, with the sum of their squared quanta. Returns 0, or -1 - i as tally_record. */
FAST EXPORT int64_t tally_follow(const Site *site, int64_t begin, int64_t end, const int64_t *index, const uint8_t *side,
                                 int64_t entries, Followed *found) {
    Run run;
    int64_t cursor = 0, within[RUN];
    double steer[LANES] = {0}, energy[LANES] = {0};
    memset(found, 0, sizeof *found);
    found->violation = -1;
    for (int64_t at = begin; at < end;) {
        int n = run_length(site, at, end);
        int good = place(&run, site, at, n);
        int64_t any = 0;
        for (int i = 0; i < n; i++) {
            double nearest = run.near[i] < run.far[i] ? run.near[i] : run.far[i];
            within[i] = nearest * run.quantum[i] < 2.0 * run.delta[i];
            any += within[i];
        }
        if (any) {
            found->near += any;
            for (int i = 0; i < n; i++)
                if (within[i]) steer[i % LANES] += run.quantum[i] * run.quantum[i];
        }
        for (; cursor < entries && index[cursor] < at + n; cursor++) {
            if (index[cursor] < at) continue; /* not ascending: no such entry */
            int i = (int)(index[cursor] - at);
            if (within[i]) {
                double boundary = run.near[i] <= run.far[i] ? 0.0 : 2.0 * run.up[i] - 1.0;
                double chosen = boundary + (double)side[cursor];
                if (chosen != run.up[i]) {
                    found->moved++;
                    found->shifted += run.quantum[i] * run.quantum[i];
                }
                run.up[i] = chosen;
            } else {
                if (found->violation < 0) found->violation = at + i;
                found->violations++;
            }
        }
        if (!finish(&run, site, n) || !good) return -1 - find_bad(&run, site, at, n);
        add_squares(energy, run.value, n);
        store(site->out, run.value, site->out_type, at, n);
        at += n;
    }
    found->steer = sum_of_lanes(steer);
    found->energy = sum_of_lanes(energy);
    return 0;
}

/* Whether each multiple of a run is odd; from 2**53 on all are even. */
INLINE void find_odd(uint8_t *odd, const Run *run, int n) {
    for (int i = 0; i < n; i++) {
        double half = (run->cell[i] + run->up[i]) * 0.5;
        odd[i] = half != floor(half);
    }
}

/* Round elements [begin, end), begin a multiple of 8; set bit i % 8 of byte i / 8 of packed, which is zeroed, where the
 * multiple is odd. The site has scales and precision 0. Returns 0, or -1 - i as tally_record. */
FAST EXPORT int64_t tally_record_parity(const Site *site, int64_t begin, int64_t end, uint8_t *packed) {
    Run run;
    uint8_t odd[RUN];
    for (int64_t at = begin; at < end;) {
        int n = run_length(site, at, end);
        int good = place(&run, site, at, n);
        find_odd(odd, &run, n);
        if (!finish(&run, site, n) || !good) return -1 - find_bad(&run, site, at, n);
        store(site->out, run.value, site->out_type, at, n);
        for (int i = 0; i < n; i++) packed[(at + i) >> 3] |= (uint8_t)(odd[i] << ((at + i) & 7));
        at += n;
    }
    return 0;
}

/* Round elements [begin, end), across the nearest boundary where packed states the other parity.
 *
 * found receives: elements within the band of a boundary, parities whose boundary is out of reach and the first of
 * them, the sum of the near elements' squared quanta, the sum of squares of the results, how many elements were moved,
 * the sum of their squared quanta, and the largest squared quantum. Returns 0, or -1 - i as tally_record. */
FAST EXPORT int64_t tally_follow_parity(const Site *site, int64_t begin, int64_t end, const uint8_t *packed,
                                        Followed *found) {
    Run run;
    uint8_t odd[RUN];
    int64_t within[RUN];
    double steer[LANES] = {0}, energy[LANES] = {0};
    memset(found, 0, sizeof *found);
    found->violation = -1;
    for (int64_t at = begin; at < end;) {
        int n = run_length(site, at, end);
        int good = place(&run, site, at, n);
        int64_t any = 0;
        for (int i = 0; i < n; i++) {
            double nearest = run.near[i] < run.far[i] ? run.near[i] : run.far[i];
            within[i] = nearest * run.quantum[i] < run.delta[i];
            any += within[i];
        }
        found->near += any;
        for (int i = 0; i < n; i++) {
            double square = run.quantum[i] * run.quantum[i];
            if (within[i]) steer[i % LANES] += square;
            if (square > found->largest) found->largest = square;
        }
        find_odd(odd, &run, n);
        for (int i = 0; i < n; i++) {
            if (odd[i] == (packed[(at + i) >> 3] >> ((at + i) & 7) & 1)) continue;
            if (within[i]) {
                /* Across the own boundary up becomes 1 - up; across the other one it goes the other way. */
                run.up[i] = run.near[i] <= run.far[i] ? 1.0 - run.up[i] : 3.0 * run.up[i] - 1.0;
                found->moved++;
                found->shifted += run.quantum[i] * run.quantum[i];
            } else {
                if (found->violation < 0) found->violation = at + i;
                found->violations++;
            }
        }
        if (!finish(&run, site, n) || !good) return -1 - find_bad(&run, site, at, n);
        add_squares(energy, run.value, n);
        store(site->out, run.value, site->out_type, at, n);
        at += n;
    }
    found->steer = sum_of_lanes(steer);
    found->energy = sum_of_lanes(energy);
    return 0;
}

/* Write both values an honest rounding may take, for elements within the band of a boundary: the lower and the upper
 * cell's. Returns the number found; those past room are counted, not written. */
EXPORT int64_t tally_candidates(const Site *site, int64_t begin, int64_t end, int64_t *index, double *pairs, int64_t room) {
    Run run;
    int64_t count = 0;
    for (int64_t at = begin; at < end;) {
        int n = run_length(site, at, end);
        place(&run, site, at, n);
        for (int i = 0; i < n; i++) {
            double nearest = run.near[i], boundary = 0.0;
            if (run.far[i] < run.near[i]) {
                nearest = run.far[i];
                boundary = 2.0 * run.up[i] - 1.0;
            }
            if (!(nearest * run.quantum[i] < run.delta[i])) continue;
            if (count < room) {
                index[count] = at + i;
                pairs[2 * count] = (run.cell[i] + boundary) * run.quantum[i] + 0.0;
                pairs[2 * count + 1] = (run.cell[i] + (boundary + 1.0)) * run.quantum[i] + 0.0;
            }
            count++;
        }
        at += n;
    }
    return count;
}

EXPORT int32_t tally_version(void) { return VERSION; }

/* Fill out with the words of elements start and following, n of them. */
FAST EXPORT void tally_philox(uint64_t key0, uint64_t key1, int64_t start, int64_t n, uint32_t *out) {
    uint32_t words[RUN + 8];
    for (int64_t at = 0; at < n; at += RUN) {
        int64_t element = start + at;
        int skip = (int)(element & 3), length = (int)smaller(n - at, RUN);
        philox(words, (uint64_t)(element >> 2), (skip + length + 3) >> 2, key0, key1);
        memcpy(out + at, words + skip, (size_t)length * sizeof *out);
    }
}

/* Write 1 where the word of elements start and following is below threshold (at most 2**32), else 0; n bytes. */
FAST EXPORT void tally_keep(uint64_t key0, uint64_t key1, int64_t start, int64_t n, uint64_t threshold, uint8_t *out) {
    uint32_t words[RUN + 8];
    for (int64_t at = 0; at < n; at += RUN) {
        int64_t element = start + at;
        int skip = (int)(element & 3), length = (int)smaller(n - at, RUN);
        philox(words, (uint64_t)(element >> 2), (skip + length + 3) >> 2, key0, key1);
        for (int i = 0; i < length; i++) out[at + i] = (uint8_t)(words[skip + i] < threshold);
    }
}

/* Write x + d x eps over [begin, end), d one of -1, 0, 1 from byte (start + i) of the stream; whole numbers, infinities and NaN
 * stay. out may be x. start, and begin where the work is cut, are multiples of 16: the bytes of one counter. */
#define JITTER(name, T, round_to_whole, eps)                                                              \
    INLINE void name(const T *x, T *out, const uint8_t *byte, int n) {                                    \
        for (int i = 0; i < n; i++) {                                                                     \
            T way = (T)(((int)byte[i] * 3 >> 8) - 1), whole = round_to_whole(x[i]);                       \
            T moved = x[i] + x[i] * (way * (T)(eps));                                                     \
            out[i] = x[i] == whole ? x[i] : moved;                                                        \
        }                                                                                                 \
    }
JITTER(jitter32, float, rintf, 0x1p-23)
JITTER(jitter64, double, rint, 0x1p-52)

FAST EXPORT void tally_jitter(const void *x, void *out, int32_t type, int64_t begin, int64_t end, uint64_t start,
                              uint64_t key0, uint64_t key1) {
    uint32_t words[RUN / 4];
    for (int64_t at = begin; at < end; at += RUN) {
        int n = (int)smaller(end - at, RUN);
        philox(words, (start + (uint64_t)at) >> 4, (n + 15) >> 4, key0, key1);
        if (type == 0)
            jitter32((const float *)x + at, (float *)out + at, (const uint8_t *)words, n);
        else
            jitter64((const double *)x + at, (double *)out + at, (const uint8_t *)words, n);
    }
}

/* Sum over [begin, end) of (bits + 1) * odd(base + i) modulo 2**64, bits those of the value as binary32 (spec/transcript.md). */
FAST EXPORT uint64_t tally_fingerprint(const void *x, int32_t type, int64_t begin, int64_t end, uint64_t base) {
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

/* Write the positions of the elements of [begin, end) less than band away from point, in the elements' own precision;
 * index holds end - begin. Returns their number. */
#define NEAR(name, T, absolute)                                                                        \
    INLINE int64_t name(const T *x, T point, double band, int64_t begin, int64_t end, int64_t *index) { \
        int64_t count = 0;                                                                             \
        for (int64_t at = begin; at < end; at += RUN) {                                                \
            int n = (int)smaller(end - at, RUN), any = 0;                                              \
            for (int i = 0; i < n; i++) any |= (double)absolute(x[at + i] - point) < band;             \
            for (int i = 0; any && i < n; i++)                                                         \
                if ((double)absolute(x[at + i] - point) < band) index[count++] = at + i;               \
        }                                                                                              \
        return count;                                                                                  \
    }
NEAR(near32, float, fabsf)
NEAR(near64, double, fabs)

FAST EXPORT int64_t tally_near(const void *x, int32_t type, double point, double band, int64_t begin, int64_t end,
                               int64_t *index) {
    if (type == 0) return near32((const float *)x, (float)point, band, begin, end, index);
    return near64((const double *)x, point, band, begin, end, index);
}

/* One tensor: n elements at x, its weights starting at base. */
typedef struct {
    const void *x;
    int64_t n;
    uint64_t base;
    int64_t type;
} Marked;

/* The sum of the fingerprints of several tensors. */
EXPORT uint64_t tally_fingerprints(const Marked *tensors, int64_t count) {
    uint64_t total = 0;
    for (int64_t i = 0; i < count; i++)
        total += tally_fingerprint(tensors[i].x, (int32_t)tensors[i].type, 0, tensors[i].n, tensors[i].base);
    return total;
}

/* Return the binary64 sum of squares of elements [begin, end), added in LANES interleaved sums. */
FAST EXPORT double tally_square_sum(const void *x, int32_t type, int64_t begin, int64_t end) {
    double values[RUN], lanes[LANES] = {0};
    for (int64_t at = begin; at < end; at += RUN) {
        int n = (int)smaller(end - at, RUN);
        load(values, x, type, at, n);
        add_squares(lanes, values, n);
    }
    return sum_of_lanes(lanes);
}

/* Write the sums of squares of blocks [first, last) of rows elements each. */
EXPORT void tally_square_sums(const void *x, int32_t type, int64_t rows, int64_t first, int64_t last, double *out) {
    for (int64_t block = first; block < last; block++)
        out[block] = tally_square_sum(x, type, block * rows, (block + 1) * rows);
}

/* Return the largest |x - y| of elements [begin, end); infinity if a difference is not a number. */
FAST EXPORT double tally_max_difference(const void *x, int32_t x_type, const void *y, int32_t y_type, int64_t begin,
                                        int64_t end) {
    double a[RUN], b[RUN], largest[LANES] = {0};
    int64_t unordered[LANES] = {0};
    for (int64_t at = begin; at < end; at += RUN) {
        int n = (int)smaller(end - at, RUN);
        load(a, x, x_type, at, n);
        load(b, y, y_type, at, n);
        for (int i = n; i % LANES; i++) a[i] = b[i] = 0.0;
        for (int i = 0; i < n; i += LANES) {
            for (int lane = 0; lane < LANES; lane++) {
                double difference = fabs(a[i + lane] - b[i + lane]);
                unordered[lane] |= !(difference <= HUGE_VAL);
                largest[lane] = difference > largest[lane] ? difference : largest[lane];
            }
        }
    }
    double found = 0.0;
    for (int lane = 0; lane < LANES; lane++) {
        if (unordered[lane]) return HUGE_VAL;
        if (largest[lane] > found) found = largest[lane];
    }
    return found;
}

/* Raise out[block] to the largest difference of blocks [first, last) of rows elements each. */
EXPORT void tally_max_differences(const void *x, int32_t x_type, const void *y, int32_t y_type, int64_t rows, int64_t first,
                                  int64_t last, double *out) {
    for (int64_t block = first; block < last; block++) {
        double largest = tally_max_difference(x, x_type, y, y_type, block * rows, (block + 1) * rows);
        if (largest > out[block]) out[block] = largest;
    }
}
