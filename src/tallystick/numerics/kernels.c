/* Rounding on the CPU, fused: one pass rounds, tests for ambiguity and collects the log entries.
 *
 * Bit-equal to reference.py, which is the definition; the tests run both on one body. Only IEEE + - *, comparison, floor
 * and integer operations occur, and this file is compiled without contraction (-ffp-contract=off) and without fast-math,
 * so every compiler and processor gives the same bits. Work goes over runs of SPAN elements, which stay in the
 * first-level cache and which compilers turn into vectors. A run without an element near a boundary is rounded by the
 * short loops of quick.h; here stands the rule for the others.
 *
 * Every function works on elements [begin, end) of a tensor and may run beside others on other ranges.
 * Element types: 0 is binary32, 1 is binary64. Flat arrays, native byte order.
 */

#include <math.h>

#include "quick.h"

/* A run of elements placed on the grid. */
typedef struct {
    double value[SPAN], before[SPAN], t[SPAN], quantum[SPAN], cell[SPAN], up[SPAN], near[SPAN], far[SPAN], delta[SPAN];
    uint32_t words[WORDS(SPAN)];
} Run;

INLINE void store(void *to, const double *from, int type, int64_t at, int n) {
    if (type == 0) {
        float *p = (float *)to + at;
        for (int i = 0; i < n; i++) p[i] = (float)from[i];
    } else {
        memcpy((double *)to + at, from, (size_t)n * sizeof *from);
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
        tally_words(run->words, (uint64_t)(at >> 2), (skip + n + 3) >> 2, site->key0, site->key1);
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

/* Place element i of a run on an absolute grid of binary32 values, precision 0; quick holds its word. */
INLINE void place_marked(Run *run, const Quick *quick, const Site *site, int64_t at, int i) {
    run->value[i] = (double)((const float *)site->x)[at + i];
    run->t[i] = site->dithered ? ((double)quick->words[(at & 3) + i] + 0.5) * 0x1p-32 : T_FIXED;
    grid_of_value(run, i, 0, larger((int64_t)site->scales[at / site->rows] + site->floor, MIN_EXPONENT));
}

INLINE double block_band(const Site *site, int64_t at) {
    return ldexp(1.0, (int)larger((int64_t)site->scales[at / site->rows] + site->band, MIN_BAND));
}

INLINE void put_result(Result *result, const Site *site, const Run *run, int i) {
    double value = (run->cell[i] + run->up[i]) * run->quantum[i] + 0.0;
    if (site->out_type)
        result->wide[i] = value;
    else
        result->narrow[i] = (float)value;
}

/* Round the marked elements of a run by the rule, the others being rounded; collect the ambiguous ones. Return their number. */
INLINE int64_t record_marked(Run *run, const Quick *quick, const Site *site, int64_t at, int n, const uint8_t *mark,
                             Result *result, int64_t *index, uint8_t *side) {
    double delta = block_band(site, at);
    int64_t count = 0;
    for (int first = 0; first < n; first += 8) {
        for (uint64_t left = marks_of(mark + first); left; left &= left - 1) {
            int i = first + place_of(left);
            place_marked(run, quick, site, at, i);
            put_result(result, site, run, i);
            int up = run->up[i] == 1.0, beyond = run->far[i] < run->near[i];
            index[count] = at + i;
            side[count] = (uint8_t)(up ^ beyond);
            count += (beyond ? run->far[i] : run->near[i]) * run->quantum[i] < delta;
        }
    }
    return count;
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

INLINE void add_result(double *lanes, const Site *site, const Result *result, int n) {
    if (site->out_type)
        add_squares(lanes, result->wide, n);
    else
        add_narrow_squares(lanes, result->narrow, n);
}

/* Set bits at to at + n of packed, which are zero, where set is 1. */
INLINE void pack_bits(uint8_t *packed, int64_t at, const uint8_t *set, int n) {
    int i = 0;
    for (; i < n && (at + i) & 7; i++) packed[(at + i) >> 3] |= (uint8_t)(set[i] << ((at + i) & 7));
    for (; i + 8 <= n; i += 8) {
        uint64_t bytes = 0;
        for (int bit = 0; bit < 8; bit++) bytes |= (uint64_t)set[i + bit] << 8 * bit; /* one load, where bytes lie so */
        packed[(at + i) >> 3] = (uint8_t)(bytes * 0x0102040810204080u >> 56);
    }
    for (; i < n; i++) packed[(at + i) >> 3] |= (uint8_t)(set[i] << ((at + i) & 7));
}

/* Write bits at to at + n of packed to stated, 0 or 1 each. */
INLINE void unpack_bits(uint8_t *stated, const uint8_t *packed, int64_t at, int n) {
    int i = 0;
    for (; i < n && (at + i) & 7; i++) stated[i] = packed[(at + i) >> 3] >> ((at + i) & 7) & 1;
    for (; i + 8 <= n; i += 8) {
        uint64_t bytes = (packed[(at + i) >> 3] * 0x0101010101010101u) & 0x8040201008040201u;
        bytes = (bytes + 0x7F7F7F7F7F7F7F7Fu) >> 7 & 0x0101010101010101u;
        for (int bit = 0; bit < 8; bit++) stated[i + bit] = (uint8_t)(bytes >> 8 * bit);
    }
    for (; i < n; i++) stated[i] = packed[(at + i) >> 3] >> ((at + i) & 7) & 1;
}

/* The first element of a run that cannot be rounded; near the end of a refusal, so it may be slow. */
static int64_t find_bad(Run *run, const Site *site, int64_t at, int n) {
    double result[SPAN];
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
    return (int)smaller(last - at, SPAN);
}

/* Round elements [begin, end). Writes the ambiguous elements' positions and sides to index and side, which hold
 * end - begin of them, and returns their number; or -1 - i, i being the first element that cannot be rounded: it is
 * not finite, becomes larger than limit, or was beyond FP32 before. */
FAST EXPORT int64_t tally_record(const Site *site, int64_t begin, int64_t end, int64_t *index, uint8_t *side) {
    Run run;
    Result result;
    Quick quick;
    int64_t count = 0, hit[SPAN];
    quick_start(&quick, 1);
    for (int64_t at = begin; at < end;) {
        int n = run_length(site, at, end);
        if (quick_run(&quick, site, at, n, &result)) {
            write_result(site, at, n, &result);
            at += n;
            continue;
        }
        uint8_t mark[SPAN] = {0};
        if (quick_marks(&quick, site, at, n, mark)) {
            count += record_marked(&run, &quick, site, at, n, mark, &result, index + count, side + count);
            write_result(site, at, n, &result);
            at += n;
            continue;
        }
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

/* Take the logged side of the element that entries[cursor] names, which lies within reach or not. */
INLINE void take_side(Run *run, int i, int within, int64_t at, uint8_t side, Followed *found) {
    if (!within) {
        if (found->violation < 0) found->violation = at + i;
        found->violations++;
        return;
    }
    double boundary = run->near[i] <= run->far[i] ? 0.0 : 2.0 * run->up[i] - 1.0;
    double chosen = boundary + (double)side;
    if (chosen != run->up[i]) {
        found->moved++;
        found->shifted += run->quantum[i] * run->quantum[i];
    }
    run->up[i] = chosen;
}

/* Round the marked elements of a run by the rule and the log, the others being rounded; return the next entry. */
INLINE int64_t follow_marked(Run *run, const Quick *quick, const Site *site, int64_t at, int n, const uint8_t *mark,
                             Result *result, const int64_t *index, const uint8_t *side, int64_t cursor, int64_t entries,
                             double *steer, Followed *found) {
    double reach = 2.0 * block_band(site, at);
    for (int first = 0; first < n; first += 8) {
        for (uint64_t left = marks_of(mark + first); left; left &= left - 1) {
            int i = first + place_of(left);
            place_marked(run, quick, site, at, i);
            double nearest = run->near[i] < run->far[i] ? run->near[i] : run->far[i];
            int within = nearest * run->quantum[i] < reach;
            found->near += within;
            steer[i % LANES] += within ? run->quantum[i] * run->quantum[i] : 0.0;
            for (; cursor < entries && index[cursor] <= at + i; cursor++)
                take_side(run, (int)(index[cursor] - at), within && index[cursor] == at + i, at, side[cursor], found);
            put_result(result, site, run, i);
        }
    }
    for (; cursor < entries && index[cursor] < at + n; cursor++) take_side(run, (int)(index[cursor] - at), 0, at, side[cursor], found);
    return cursor;
}

/* Round elements [begin, end), taking the logged side for the elements in index (ascending, all within the range).
 *
 * found receives: elements within twice the band of a boundary, entries out of reach and the first of them, the sum of
 * the near elements' squared quanta, the sum of squares of the results, and how many elements an entry moved from their
 * own rounding, with the sum of their squared quanta. Returns 0, or -1 - i as tally_record. */
FAST EXPORT int64_t tally_follow(const Site *site, int64_t begin, int64_t end, const int64_t *index, const uint8_t *side,
                                 int64_t entries, Followed *found) {
    Run run;
    Result result;
    Quick quick;
    int64_t cursor = 0, within[SPAN];
    double steer[LANES] = {0}, energy[LANES] = {0};
    memset(found, 0, sizeof *found);
    found->violation = -1;
    quick_start(&quick, 2);
    for (int64_t at = begin; at < end;) {
        int n = run_length(site, at, end);
        int sure = quick_run(&quick, site, at, n, &result), marked = 0;
        uint8_t mark[SPAN] = {0};
        if (!sure || (cursor < entries && index[cursor] < at + n)) {
            sure = marked = quick_marks(&quick, site, at, n, mark);
        }
        if (marked) cursor = follow_marked(&run, &quick, site, at, n, mark, &result, index, side, cursor, entries, steer, found);
        if (sure) {
            add_result(energy, site, &result, n);
            write_result(site, at, n, &result);
            at += n;
            continue;
        }
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
            take_side(&run, i, within[i] != 0, at, side[cursor], found);
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

/* Each multiple of a run modulo 2**bits; from 2**53 on all multiples are even. */
INLINE void find_rest(uint8_t *rest, const Run *run, int n, int bits) {
    double period = power_of_two(bits), share = power_of_two(-bits);
    for (int i = 0; i < n; i++) {
        double multiple = run->cell[i] + run->up[i];
        rest[i] = (uint8_t)(multiple - floor(multiple * share) * period);
    }
}

/* Round elements [begin, end), begin a multiple of 8; write each multiple modulo 2**bits, 1 <= bits <= 8, into the `bits`
 * planes of packed, zeroed and `plane` bytes each: bit j of element i in bit i % 8 of byte i / 8 of plane j. The site has
 * scales and precision 0. Returns 0, or -1 - i as tally_record. */
FAST EXPORT int64_t tally_record_residues(const Site *site, int64_t begin, int64_t end, int64_t bits, uint8_t *packed,
                                          int64_t plane) {
    Run run;
    Result result;
    Quick quick;
    uint8_t rest[SPAN + 8], set[SPAN + 8];
    quick_start(&quick, 0);
    for (int64_t at = begin; at < end;) {
        int n = run_length(site, at, end);
        if (quick_rest(&quick, site, at, n, (int)bits, rest, &result)) {
            write_result(site, at, n, &result);
        } else {
            int good = place(&run, site, at, n);
            find_rest(rest, &run, n, (int)bits);
            if (!finish(&run, site, n) || !good) return -1 - find_bad(&run, site, at, n);
            store(site->out, run.value, site->out_type, at, n);
        }
        if (bits == 1) {
            pack_bits(packed, at, rest, n);
        } else {
            for (int j = 0; j < bits; j++) {
                for (int i = 0; i < n; i++) set[i] = rest[i] >> j & 1;
                pack_bits(packed + j * plane, at, set, n);
            }
        }
        at += n;
    }
    return 0;
}

/* Round elements [begin, end) to the nearest multiple of the residue that packed states, as tally_record_residues writes it;
 * of two that are as near to the one across the nearest boundary.
 *
 * found receives: elements within the band of a boundary, residues of one bit whose boundary is out of reach and the first
 * of them, the sum of the near elements' squared quanta, the sum of squares of the results, how many elements were moved,
 * the sum of the squares of how far, and the largest squared quantum. Returns 0, or -1 - i as tally_record. */
FAST EXPORT int64_t tally_follow_residues(const Site *site, int64_t begin, int64_t end, int64_t bits, const uint8_t *packed,
                                          int64_t plane, Followed *found) {
    Run run;
    Result result;
    Quick quick;
    uint8_t rest[SPAN], stated[SPAN + 16], set[SPAN + 16];
    int64_t within[SPAN], near, moved, squares;
    const int all = 1 << bits, most = all / 2;
    double steer[LANES] = {0}, energy[LANES] = {0};
    memset(found, 0, sizeof *found);
    found->violation = -1;
    quick_start(&quick, 0);
    for (int64_t at = begin; at < end;) {
        int n = run_length(site, at, end);
        unpack_bits(stated, packed, at, n);
        for (int j = 1; j < bits; j++) {
            unpack_bits(set, packed + j * plane, at, n);
            for (int i = 0; i < n; i++) stated[i] |= (uint8_t)(set[i] << j);
        }
        if (quick_follow_rest(&quick, site, at, n, (int)bits, stated, &result, &near, &moved, &squares)) {
            double square = (double)quick.grid32.quantum * (double)quick.grid32.quantum;
            found->near += near;
            found->moved += moved;
            found->shifted += (double)squares * square;
            steer[0] += (double)near * square;
            found->largest = square > found->largest ? square : found->largest;
            add_result(energy, site, &result, n);
            write_result(site, at, n, &result);
            at += n;
            continue;
        }
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
        find_rest(rest, &run, n, (int)bits);
        for (int i = 0; i < n; i++) {
            int steps = (stated[i] - rest[i]) & (all - 1);
            if (!steps) continue;
            /* The nearest boundary is the own one, below what is up, or the other one, beyond. */
            int below = (run.near[i] <= run.far[i]) == (run.up[i] == 1.0);
            if (bits > 1 || within[i]) {
                steps -= steps + below > most ? all : 0;
                run.up[i] += steps;
                found->moved++;
                found->shifted += (double)(steps * steps) * run.quantum[i] * run.quantum[i];
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

/* How many elements of [begin, end) lie in runs that the short loops decide, with that many bands for a reach; for tests. */
EXPORT int64_t tally_quick(const Site *site, int64_t begin, int64_t end, int64_t reach) {
    Quick quick;
    Result result;
    int64_t found = 0;
    quick_start(&quick, reach);
    for (int64_t at = begin; at < end;) {
        int n = run_length(site, at, end);
        found += quick_run(&quick, site, at, n, &result) ? n : 0;
        at += n;
    }
    return found;
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

