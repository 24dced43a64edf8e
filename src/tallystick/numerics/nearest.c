/* Rounding to the nearest value of b_r bits, fused: round, test for the band, collect or follow the log's entries.
 *
 * Bit-equal to nearest.py, which is the definition (spec/rounding.md 9). Every function works on elements [begin, end) of a
 * flat tensor and may run beside others on other ranges.
 *
 * A number as large as 1.5 * 2^52 quanta has whole quanta for its last place, so that adding it is what rounds: to the
 * nearest multiple, on a tie to the even one, which is the rule. Taking it away again is exact, and so is the distance to
 * the rounded value. The distance to the boundary beside it is exact, too, wherever it is below a quarter of a quantum, the
 * widest band; elsewhere rounding it does not take it there. All else is on the bits.
 */

#include <math.h>

#include "native.h"

enum { TIED = 6, SHARE = 8 /* elements whose marks are looked at together */, AHEAD = 512, LINE = 64 };

#define MAX_FP32 0x1.fffffep+127
#define INFINITE 0x7FF0000000000000
#define EXPONENT_BITS INFINITE

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

/* The site in numbers. An element's base is the power of two at or below it, but never below floor; in units of base: lift,
 * half a quantum, and the margin's band. band: the least. */
typedef struct {
    double lift, half, margin, band;
    int64_t floor, share, largest, lowest;
} Places;

INLINE Places places(const Nearest *site) {
    Places found;
    int64_t leading = site->bits - 9, margin = larger(site->margin, -900);
    found.lift = 1.5 * power_of_two(52 - leading);
    found.half = power_of_two(-1 - leading);
    found.margin = site->margin < -900 ? 0.0 : power_of_two(margin - leading);
    found.band = power_of_two(larger(site->band, -1022));
    found.floor = bits_of(power_of_two(site->lowest + leading));
    found.share = bits_of(1.0);
    found.largest = bits_of(MAX_FP32);
    found.lowest = bits_of(0x1p-1022);
    return found;
}

INLINE double base_of(double x, const Places p) { return float_of(larger(bits_of(x) & EXPONENT_BITS, p.floor)); }

INLINE double rounded(double x, double base, const Places p) { return (x + base * p.lift) - base * p.lift; }

/* The distance to the boundary beside x. */
INLINE double gap_of(double x, double value, double base, const Places p) { return base * p.half - fabs(x - value); }

INLINE double band_at(double base, const Places p) {
    double wide = base * p.margin;
    return wide > p.band ? wide : p.band;
}

/* Twice the band over the quantum, powers of two all of them; not below 2^-1022. */
INLINE double share_of(double base, const Places p) {
    return float_of(larger(bits_of(band_at(base, p)) - bits_of(base * p.half) + p.share, p.lowest));
}

INLINE void fetch_ahead(const Nearest *site, int64_t at) {
    uintptr_t x = (uintptr_t)(site->x + at) + AHEAD * sizeof(double), out = (uintptr_t)(site->out + at) + AHEAD * sizeof(double);
    for (uintptr_t i = 0; i < RUN * sizeof(double); i += LINE) {
        __builtin_prefetch((const void *)(x + i), 0);
        __builtin_prefetch((const void *)(out + i), 1);
    }
}

/* Write rounded values, and 1 to near where an element is within the band; return whether all can be rounded. */
INLINE int place(const double *restrict x, double *restrict out, uint8_t *restrict near, int n, const Places p) {
    int64_t most = 0;
    for (int i = 0; i < n; i++) {
        double base = base_of(x[i], p), value = rounded(x[i], base, p);
        near[i] = gap_of(x[i], value, base, p) < band_at(base, p);
        most = larger(most, bits_of(value) & INT64_MAX);
        out[i] = value;
    }
    return most <= p.largest;
}

/* Position of the first of n elements that cannot be rounded, or n. */
static int first_bad(const double *x, const double *out, int n) {
    for (int i = 0; i < n; i++)
        if (!(fabs(out[i]) <= MAX_FP32) || !(fabs(x[i]) < (double)INFINITY)) return i;
    return n;
}

/* Whether any of SHARE marks is set. */
INLINE int any_marked(const uint8_t *near) {
    uint64_t marks;
    memcpy(&marks, near, sizeof marks);
    return marks != 0;
}

/* Round; write positions and sides of the elements within the band (room for all of the range). Return their number,
 * or -1 - position of the first element that is not finite or beyond FP32. */
EXPORT FAST int64_t tally_nearest_record(const Nearest *site, int64_t begin, int64_t end, int64_t *index, uint8_t *side) {
    const Places p = places(site);
    uint8_t near[RUN + SHARE];
    int64_t count = 0;
    for (int64_t at = begin; at < end; at += RUN) {
        int n = (int)smaller(RUN, end - at);
        const double *x = site->x + at;
        double *out = site->out + at;
        fetch_ahead(site, at);
        if (!place(x, out, near, n, p)) return -1 - (at + first_bad(x, out, n));
        memset(near + n, 0, SHARE);
        for (int first = 0; first < n; first += SHARE) {
            if (!any_marked(near + first)) continue;
            int last = n - first < SHARE ? n : first + SHARE;
            for (int i = first; i < last; i++) {
                index[count] = at + i;
                side[count] = out[i] > x[i];
                count += near[i];
            }
        }
    }
    return count;
}

/* Count the elements within the band and those whose boundary is nearer than 2^TIED of their own last places; add up, over
 * all, twice the band in quanta. */
INLINE void weigh(const double *restrict x, const double *restrict out, const uint8_t *restrict near, int n, const Places p,
                  FollowedNearest *found) {
    int64_t inside = 0, tied = 0;
    double chance[LANES] = {0}, total;
    int whole = n - n % LANES;
    for (int i = 0; i < n; i++) {
        double last = float_of(bits_of(x[i]) & EXPONENT_BITS) * power_of_two(TIED - 52);
        inside += near[i];
        tied += gap_of(x[i], out[i], base_of(x[i], p), p) < last ? 1 : 0;
    }
    for (int i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) chance[lane] += share_of(base_of(x[i + lane], p), p);
    for (int i = whole; i < n; i++) chance[i - whole] += share_of(base_of(x[i], p), p);
    total = sum_of_lanes(chance);
    found->near += inside;
    found->tied += tied;
    found->chance += total;
}

/* Round, obeying the entries within the band. Return 0, or -1 - position as above. */
EXPORT FAST int64_t tally_nearest_follow(const Nearest *site, int64_t begin, int64_t end, const int64_t *index,
                                         const uint8_t *side, int64_t entries, FollowedNearest *found) {
    const Places p = places(site);
    uint8_t near[RUN + SHARE];
    int64_t cursor = 0;
    found->violations = found->corrections = found->near = found->tied = 0;
    found->violation = -1;
    found->chance = 0.0;
    for (int64_t at = begin; at < end; at += RUN) {
        int n = (int)smaller(RUN, end - at), good;
        const double *x = site->x + at;
        double *out = site->out + at;
        fetch_ahead(site, at);
        good = place(x, out, near, n, p);
        weigh(x, out, near, n, p, found);
        for (; cursor < entries && index[cursor] < at + n; cursor++) {
            int i = (int)(index[cursor] - at);
            double base = base_of(x[i], p), half = base * p.half, quantum = 2.0 * half, reach = 2.0 * band_at(base, p);
            /* Half a quantum is farther than the distance of any element but those on the grid, however it is rounded. */
            int outside = reach >= half ? out[i] == x[i] : !(gap_of(x[i], out[i], base, p) < reach);
            if (near[i]) {
                int up = out[i] > x[i];
                if (side[cursor] != up) {
                    out[i] = (out[i] + (up ? -quantum : quantum)) + 0.0;
                    found->corrections++;
                    good &= fabs(out[i]) <= MAX_FP32;
                }
            } else if (outside) {
                found->violation = found->violations ? found->violation : at + i;
                found->violations++;
            }
        }
        int bad = good ? n : first_bad(x, out, n);
        if (bad < n) return -1 - (at + bad);
    }
    return 0;
}

/* Round alone, on FP32's own grid: what is not finite stays, what is beyond FP32 becomes infinite. */
EXPORT FAST void tally_nearest_round(const Nearest *site, int64_t begin, int64_t end) {
    const Places p = places(site);
    uint8_t near[RUN];
    for (int64_t at = begin; at < end; at += RUN) {
        int n = (int)smaller(RUN, end - at);
        const double *x = site->x + at;
        double *out = site->out + at;
        if (place(x, out, near, n, p)) continue;
        for (int i = 0; i < n; i++) {
            if (!(fabs(x[i]) < (double)INFINITY))
                out[i] = x[i];
            else if (!(fabs(out[i]) <= MAX_FP32))
                out[i] = x[i] < 0.0 ? -(double)INFINITY : (double)INFINITY;
        }
    }
}
