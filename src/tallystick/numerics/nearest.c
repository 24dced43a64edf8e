/* Rounding to the nearest value of b_r bits, fused: round, test for the band, collect or follow the log's entries.
 *
 * Bit-equal to nearest.py, which is the definition (spec/rounding.md 9). Integers on the bits of binary64; the only
 * floating-point operations are a product with a power of two and the addition of +0.0. Every function works on
 * elements [begin, end) of a flat tensor and may run beside others on other ranges.
 */

#include <stdint.h>
#include <string.h>

#include "native.h"

enum { NEAREST_RUN = 256, WIDEST = 62, TIED = 6 };

#define MAX_FP32 0x1.fffffep+127
#define LARGEST_FP32 0x47EFFFFFE0000000 /* its bits as binary64 */
#define INFINITE 0x7FF0000000000000
#define IMPLICIT ((int64_t)1 << 52)

/* lowest: exponent of the smallest quantum. margin: far below zero where the band alone counts. */
typedef struct {
    const double *x;
    double *out;
    int32_t bits, lowest, band, margin;
} Nearest;

typedef struct {
    int64_t violations, violation, corrections, near, tied;
    double chance;
} FollowedNearest;

/* A run of elements on the grid: |x| = (cell + rest / 2^shift) quanta; gap is |rest - half|, reach the band's exponent
 * over that of a unit of rest. */
typedef struct {
    int64_t cell[NEAREST_RUN], up[NEAREST_RUN], gap[NEAREST_RUN], reach[NEAREST_RUN], quantum[NEAREST_RUN];
    int64_t negative[NEAREST_RUN], near[NEAREST_RUN], bad[NEAREST_RUN], shift[NEAREST_RUN], stored[NEAREST_RUN];
    int64_t one[NEAREST_RUN]; /* compilers make vectors of shifts of variables, not of a constant */
    double value[NEAREST_RUN];
} Places;

/* A whole number below 2^52 as binary64, by its bits: compilers make vectors of that. */
INLINE double from_whole(int64_t n) { return float_of(n | (int64_t)0x4330000000000000) - 0x1p52; }

INLINE double value_of(int64_t whole, int64_t quantum, int64_t negative) {
    double magnitude = from_whole(whole) * power_of_two(quantum);
    return float_of(bits_of(magnitude) | (int64_t)((uint64_t)negative << 63)) + 0.0;
}

/* Place n elements and write their rounded values; return how many cannot be rounded. */
INLINE int64_t place(Places *run, const Nearest *site, int64_t at, int n) {
    const int64_t drop = 61 - site->bits, lowest = site->lowest, band = site->band, margin = site->margin;
    int64_t bad = 0;
    memcpy(run->stored, site->x + at, (size_t)n * sizeof(double));
    for (int i = 0; i < n; i++) {
        int64_t field = (int64_t)((uint64_t)run->stored[i] >> 52) & 0x7FF;
        int64_t normal = field < 1 ? 0 : IMPLICIT;
        int64_t unit = larger(field, 1) - 1075;
        int64_t quantum = larger(unit + drop, lowest);
        run->cell[i] = (run->stored[i] & (IMPLICIT - 1)) | normal;
        run->quantum[i] = quantum;
        run->shift[i] = quantum - unit;
        run->negative[i] = (int64_t)((uint64_t)run->stored[i] >> 63);
        run->one[i] = 1;
    }
    for (int i = 0; i < n; i++) { /* nearly zero, and not zero, where the shift is too wide */
        int64_t significand = run->cell[i];
        run->cell[i] = run->shift[i] > WIDEST ? smaller(significand, 1) : significand;
        run->shift[i] = smaller(run->shift[i], WIDEST);
        run->reach[i] = larger(band, run->quantum[i] + margin) - run->quantum[i] + run->shift[i];
    }
    for (int i = 0; i < n; i++) {
        uint64_t significand = (uint64_t)run->cell[i], shift = (uint64_t)run->shift[i];
        uint64_t half = (uint64_t)run->one[i] << (shift - 1);
        int64_t cell = (int64_t)(significand >> shift);
        int64_t over = (int64_t)(significand & (2 * half - 1)) - (int64_t)half; /* beyond the half, in units */
        run->cell[i] = cell;
        run->up[i] = over + (cell & 1) > 0 ? 1 : 0; /* on the half only an odd cell goes up */
        run->gap[i] = larger(over, -over);
    }
    for (int i = 0; i < n; i++) {
        int64_t within = (int64_t)((uint64_t)run->one[i] << (uint64_t)larger(run->reach[i], 0));
        run->near[i] = run->gap[i] < within ? 1 : 0;
    }
    for (int i = 0; i < n; i++) run->value[i] = value_of(run->cell[i] + run->up[i], run->quantum[i], run->negative[i]);
    for (int i = 0; i < n; i++) {
        int64_t magnitude = bits_of(run->value[i]) & INT64_MAX;
        int64_t field = (run->stored[i] & INT64_MAX) >> 52;
        run->bad[i] = magnitude > LARGEST_FP32 || field == 0x7FF ? 1 : 0;
        bad += run->bad[i];
    }
    memcpy(site->out + at, run->value, (size_t)n * sizeof(double));
    return bad;
}

INLINE int64_t first_bad(const Places *run, int n) {
    for (int i = 0; i < n; i++)
        if (run->bad[i]) return i;
    return n;
}

/* Round; write positions and sides of the elements within the band (room for all of the range). Return their number,
 * or -1 - position of the first element that is not finite or beyond FP32. */
EXPORT FAST int64_t tally_nearest_record(const Nearest *site, int64_t begin, int64_t end, int64_t *index, uint8_t *side) {
    Places run;
    int64_t count = 0;
    for (int64_t at = begin; at < end; at += NEAREST_RUN) {
        int n = (int)smaller(NEAREST_RUN, end - at);
        if (place(&run, site, at, n)) return -1 - (at + first_bad(&run, n));
        int64_t any = 0;
        for (int i = 0; i < n; i++) any += run.near[i];
        if (!any) continue;
        for (int i = 0; i < n; i++) {
            index[count] = at + i;
            side[count] = (uint8_t)(run.up[i] ^ run.negative[i]);
            count += run.near[i];
        }
    }
    return count;
}

/* Round, obeying the entries within the band. Return 0, or -1 - position as above. */
EXPORT FAST int64_t tally_nearest_follow(const Nearest *site, int64_t begin, int64_t end, const int64_t *index,
                                         const uint8_t *side, int64_t entries, FollowedNearest *found) {
    Places run;
    int64_t cursor = 0;
    found->violations = found->corrections = found->near = found->tied = 0;
    found->violation = -1;
    found->chance = 0.0;
    for (int64_t at = begin; at < end; at += NEAREST_RUN) {
        int n = (int)smaller(NEAREST_RUN, end - at);
        int64_t bad = 0, near = 0, tied = 0;
        double chance = 0.0;
        place(&run, site, at, n);
        for (int i = 0; i < n; i++) {
            near += run.near[i];
            tied += run.gap[i] < (1 << TIED);
            chance += power_of_two(larger(run.reach[i] + 1 - run.shift[i], -1022));
        }
        found->near += near;
        found->tied += tied;
        found->chance += chance;
        for (; cursor < entries && index[cursor] < at + n; cursor++) {
            int i = (int)(index[cursor] - at);
            if (run.near[i]) {
                int64_t up = side[cursor] ^ run.negative[i];
                if (up != run.up[i]) {
                    double value = value_of(run.cell[i] + up, run.quantum[i], run.negative[i]);
                    found->corrections++;
                    site->out[at + i] = value;
                    run.bad[i] = (value > MAX_FP32) | (value < -MAX_FP32);
                }
            } else if (run.gap[i] >= (int64_t)((uint64_t)1 << larger(run.reach[i] + 1, 0))) {
                found->violation = found->violations ? found->violation : at + i;
                found->violations++;
            }
        }
        bad = first_bad(&run, n);
        if (bad < n) return -1 - (at + bad);
    }
    return 0;
}

/* Round alone, on FP32's own grid: what is not finite stays, what is beyond FP32 becomes infinite. */
EXPORT FAST void tally_nearest_round(const Nearest *site, int64_t begin, int64_t end) {
    Places run;
    for (int64_t at = begin; at < end; at += NEAREST_RUN) {
        int n = (int)smaller(NEAREST_RUN, end - at);
        if (!place(&run, site, at, n)) continue;
        for (int i = 0; i < n; i++) {
            double x = site->x[at + i];
            int64_t field = (int64_t)((uint64_t)bits_of(x) >> 52) & 0x7FF;
            if (run.bad[i]) site->out[at + i] = field == 0x7FF ? x : x < 0.0 ? -float_of(INFINITE) : float_of(INFINITE);
        }
    }
}
