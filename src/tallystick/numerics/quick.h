/* Runs in which no element lies near a boundary, nearly all of them: rounded without asking how near, on wider vectors.
 *
 * Each function rounds n elements into out and returns whether that is the rule's result for all of them: every element is
 * in range and farther from its boundaries than `reach` bands and a margin, which is larger than what the shorter
 * arithmetic here loses. Where it returns 0 the caller does the run again by the rule itself (kernels.c), so no bit
 * depends on which of the two did it. There is no branch in a loop.
 */

#include "native.h"

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

enum {
    SPAN = 128,           /* elements of a run */
    FRACTION = 18,        /* bits after the point where binary32 values are placed as whole numbers */
    SURE = 3,             /* units of 2**-FRACTION lost there, at most */
    MANY_OPEN = SPAN / 8, /* elements of a run that are better placed one by one, at most */
    DENSE_RUNS = 7,       /* that follow one with more */
    AHEAD = 512,
    LINE = 64, /* bytes of the cache's lines, or fewer */
    WIDEST_PRECISION = 30 /* placing a value in binary64 then loses less than 2**-22 of a quantum */
};
#define UNSURE 0x1p-20 /* quanta around a boundary where the arithmetic in binary64 does not decide */
#define EXPONENT_BITS 0x7FF0000000000000
#define HIGHEST 0x1p+127 /* values below it round to finite binary32 values */

/* -- binary32 on an absolute grid: whole numbers of 32 bits ------------------------------------------------------- */

/* A value is `unit` counts of 2**-FRACTION quanta, plus 1 - t; the whole part is the multiple, and what is left says how
 * far the next boundary is. bound: of a value's bits. */
typedef struct {
    float scale, quantum;
    uint32_t margin, bound, offset, near;
} Grid32;

/* Return whether the block with that scale can be placed so; reach 0 is for residues. */
INLINE int grid32(Grid32 *grid, const Site *site, int64_t scale, int64_t reach) {
    int64_t exponent = larger(scale + site->floor, MIN_EXPONENT), shift = larger(scale + site->band, MIN_BAND) - exponent;
    if (exponent < -100 || exponent > 100 || shift > (reach ? -3 : 0) || site->limit < MAX_FP32) return 0;
    float bound = (float)power_of_two(exponent + 30 - FRACTION);
    grid->scale = (float)power_of_two(FRACTION - exponent);
    grid->quantum = (float)power_of_two(exponent);
    grid->margin = (uint32_t)(shift + FRACTION < 0 ? reach : reach << (shift + FRACTION)) + SURE;
    grid->offset = (uint32_t)((1.0 - T_FIXED) * (1 << FRACTION));
    grid->near = shift + FRACTION < 0 ? 0 : 1u << (shift + FRACTION);
    memcpy(&grid->bound, &bound, sizeof grid->bound);
    return 1;
}

INLINE int are_below(const float *x, int n, uint32_t bound) {
    int32_t most = 0;
    for (int i = 0; i < n; i++) {
        int32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= INT32_MAX;
        most = bits > most ? bits : most;
    }
    return (uint32_t)most < bound;
}

INLINE int32_t counts32(float x, uint32_t word, const Grid32 *grid, int dithered) {
    /* 1 - t = (2**32 - 1 - word + 1/2) * 2**-32 */
    return (int32_t)(x * grid->scale) + (int32_t)(dithered ? ~word >> (32 - FRACTION) : grid->offset);
}

#define QUICK32(name, OUT)                                                                                                \
    INLINE int name(const float *restrict x, OUT *restrict out, const uint32_t *restrict words, int n, const Grid32 grid, \
                    int dithered) {                                                                                       \
        uint32_t least = UINT32_MAX;                                                                                      \
        if (!are_below(x, n, grid.bound)) return 0;                                                                       \
        for (int i = 0; i < n; i++) {                                                                                     \
            int32_t place = counts32(x[i], dithered ? words[i] : 0, &grid, dithered);                                     \
            uint32_t past = ((uint32_t)place + grid.margin) & ((1u << FRACTION) - 1);                                     \
            least = past < least ? past : least;                                                                          \
            out[i] = (OUT)((float)(place >> FRACTION) * grid.quantum);                                                    \
        }                                                                                                                 \
        return least > 2 * grid.margin;                                                                                   \
    }
QUICK32(quick_single, float)
QUICK32(quick_widened, double)

/* Mark with 1 the elements whose result or whose distance the shorter arithmetic leaves open; of those not marked
 * QUICK32 gives what the rule gives. Return 0 where none is sure, or so many are open that the rule for all is faster. */
INLINE int mark_open(const float *restrict x, uint8_t *restrict mark, const uint32_t *restrict words, int n, const Grid32 grid,
                     int dithered) {
    int32_t open = 0;
    if (!are_below(x, n, grid.bound)) return 0;
    for (int i = 0; i < n; i++) {
        int32_t place = counts32(x[i], dithered ? words[i] : 0, &grid, dithered);
        int32_t near = (((uint32_t)place + grid.margin) & ((1u << FRACTION) - 1)) <= 2 * grid.margin;
        mark[i] = (uint8_t)near;
        open += near;
    }
    return open <= MANY_OPEN;
}

/* The same with residues: rest receives the multiple modulo 2**bits. */
INLINE int quick_residue(const float *restrict x, float *restrict out, uint8_t *restrict rest, const uint32_t *restrict words,
                         int n, const Grid32 grid, int dithered, int bits) {
    const int32_t mask = (1 << bits) - 1;
    uint32_t least = UINT32_MAX;
    if (!are_below(x, n, grid.bound)) return 0;
    for (int i = 0; i < n; i++) {
        int32_t place = counts32(x[i], dithered ? words[i] : 0, &grid, dithered), multiple = place >> FRACTION;
        uint32_t past = ((uint32_t)place + SURE) & ((1u << FRACTION) - 1);
        least = past < least ? past : least;
        rest[i] = (uint8_t)(multiple & mask);
        out[i] = (float)multiple * grid.quantum;
    }
    return least > 2 * SURE;
}

/* Residues followed: to the nearest multiple that has the one stated, half of all of them away across the nearest boundary.
 * Counts the elements within `grid.near` of a boundary, those moved, and the squares of how many quanta. */
INLINE int quick_restore(const float *restrict x, float *restrict out, const uint8_t *restrict stated,
                         const uint32_t *restrict words, int n, const Grid32 grid, int dithered, int bits, int64_t *near,
                         int64_t *moved, int64_t *squares) {
    const int32_t one = 1 << FRACTION, half = one / 2, band = (int32_t)grid.near, mask = (1 << bits) - 1, most = 1 << (bits - 1);
    int32_t doubt = 0, inside = 0, across = 0, sum = 0;
    if (!are_below(x, n, grid.bound)) return 0;
    for (int i = 0; i < n; i++) {
        int32_t place = counts32(x[i], dithered ? words[i] : 0, &grid, dithered), multiple = place >> FRACTION;
        int32_t past = place & (one - 1), below = past < half ? 1 : 0, gap = past < half ? past : one - past;
        int32_t within = gap < band ? 1 : 0, steps = (stated[i] - multiple) & mask, off = gap - band;
        steps -= steps + below > most ? 2 * most : 0;
        int32_t differs = steps != 0;
        off = off < 0 ? -off : off;
        doubt |= (gap - SURE - 1) | (off - SURE - 1) | ((within - differs) & (within - 1)); /* negative where in doubt */
        inside += within;
        across += differs;
        sum += steps * steps;
        out[i] = (float)(multiple + steps) * grid.quantum;
    }
    *near = inside;
    *moved = across;
    *squares = sum;
    return doubt >= 0;
}

/* -- any format, in binary64 -------------------------------------------------------------------------------------- */

/* base: 2**(p - 1) quanta, or one where p is 0. The other numbers are in units of base: offset is 1/2 - t quanta, lift so
 * large that adding it leaves whole quanta, edge half a quantum less what is unsure. In quanta of an absolute grid: half
 * and word make the dithered 1/2 - t. For relative bands: factor of the band, and high of the floor under a value that
 * cancelled. */
typedef struct {
    double base, offset, lift, edge, delta, half, word, factor, high, reach;
    int64_t bound;
} Grid64;

/* Return whether the run can be placed so; scale is that of its block, if it has one. */
INLINE int grid64(Grid64 *grid, const Site *site, int64_t scale, int64_t reach) {
    int relative = site->scales == NULL, leading = site->precision ? site->precision - 1 : 0;
    int64_t exponent = relative ? MIN_EXPONENT : larger(scale + site->floor, MIN_EXPONENT);
    if (site->precision > (site->out_type ? WIDEST_PRECISION : 24) || exponent > 100 || site->limit < MAX_FP32) return 0;
    if (relative && (site->band < -200 || site->band > -2 || !site->precision || site->dithered)) return 0;
    if (site->dithered && site->precision) return 0;
    double unit = power_of_two(-leading), quantum = power_of_two(exponent);
    grid->base = quantum * power_of_two(leading);
    grid->offset = (0.5 - T_FIXED) * unit;
    grid->lift = 0x1.8p+52 * unit;
    grid->edge = (0.5 - UNSURE) * unit;
    grid->reach = (double)reach;
    grid->delta = relative ? 0.0 : (double)reach * power_of_two(larger(scale + site->band, MIN_BAND));
    grid->half = quantum * (0.5 - 0x1p-33);
    grid->word = quantum * 0x1p-32;
    grid->factor = relative ? (double)reach * power_of_two(site->band) : 0.0;
    grid->high = relative ? power_of_two(site->band + CANCELLED + leading) : 0.0;
    double bound = quantum * 0x1p+20;
    grid->bound = bits_of(site->precision || bound > HIGHEST ? HIGHEST : bound);
    return 1;
}

#define QUICK64(name, X, OLD, OUT)                                                                                         \
    INLINE int name(const X *restrict x, const OLD *restrict old, OUT *restrict out, const uint32_t *restrict words, int n, \
                    const Grid64 grid, int precise, int relative, int dithered) {                                          \
        int64_t most = 0, unsure = 0;                                                                                      \
        for (int i = 0; i < n; i++) {                                                                                      \
            double value = (double)x[i], delta = grid.delta;                                                               \
            int64_t size = bits_of(value) & INT64_MAX, base = bits_of(grid.base);                                          \
            most = larger(most, size);                                                                                     \
            if (relative) {                                                                                                \
                int64_t before = bits_of((double)old[i]) & INT64_MAX;                                                      \
                most = larger(most, before);                                                                               \
                delta = grid.factor * float_of(larger(size, before));                                                      \
                base = larger(base, bits_of(float_of(before & EXPONENT_BITS) * grid.high));                                \
            }                                                                                                              \
            if (precise) base = larger(base, size & EXPONENT_BITS);                                                        \
            double unit = float_of(base);                                                                                  \
            double moved = value + (dithered ? grid.half - (double)words[i] * grid.word : unit * grid.offset);             \
            double lift = unit * grid.lift, whole = (moved + lift) - lift, gap = fabs(moved - whole);                      \
            unsure |= bits_of(unit * grid.edge - delta - gap);                                                             \
            out[i] = (OUT)whole;                                                                                           \
        }                                                                                                                  \
        return unsure >= 0 && most < grid.bound;                                                                           \
    }
QUICK64(quick_ff, float, float, float)
QUICK64(quick_dd, double, double, double)
QUICK64(quick_df, double, double, float)
QUICK64(quick_dfd, double, float, double)
QUICK64(quick_dff, double, float, float)

/* -- a run -------------------------------------------------------------------------------------------------------- */

typedef union {
    double wide[SPAN];
    float narrow[SPAN];
} Result;

typedef struct {
    int form; /* which loop does it; 0: none */
    int64_t reach, block;
    int skip, tried; /* runs that go by the rule at once, after one with too many open elements; whether the last was tried */
    Grid32 grid32;
    Grid64 grid64;
    uint32_t words[WORDS(SPAN)]; /* of the last run, if it is dithered; from (at & 3) on */
} Quick;

enum { NONE, SINGLE, WIDENED, PRECISE_F, PRECISE_D, PRECISE_DF, WHOLE_D, WHOLE_DF, STATE_D, STATE_DF, STATE_FD, STATE_FF };

INLINE int find_form(const Site *site) {
    int x = site->x_type, out = site->out_type, old = site->old_type;
    if (site->scales == NULL) {
        if (!site->precision || x == 0) return NONE;
        return old ? (out ? STATE_D : STATE_DF) : (out ? STATE_FD : STATE_FF);
    }
    if (site->precision) return x ? (out ? PRECISE_D : PRECISE_DF) : out ? NONE : PRECISE_F;
    return x ? (out ? WHOLE_D : WHOLE_DF) : (out ? WIDENED : SINGLE);
}

INLINE void quick_start(Quick *quick, int64_t reach) {
    quick->form = NONE;
    quick->skip = 0;
    quick->reach = reach;
    quick->block = -1;
}

/* Make ready for the block that position at lies in. */
INLINE void quick_enter(Quick *quick, const Site *site, int64_t at) {
    int64_t block = site->scales == NULL ? 0 : at / site->rows;
    if (block == quick->block) return;
    int64_t scale = site->scales == NULL ? 0 : site->scales[block];
    int form = find_form(site), narrow = form == SINGLE || form == WIDENED;
    quick->block = block;
    if (narrow ? !grid32(&quick->grid32, site, scale, quick->reach) : !grid64(&quick->grid64, site, scale, quick->reach)) form = NONE;
    quick->form = form;
}

INLINE void quick_words(const Site *site, int64_t at, int n, uint32_t *words) {
    if (site->dithered) tally_words(words, (uint64_t)(at >> 2), (int)((at & 3) + n + 3) >> 2, site->key0, site->key1);
}

/* Fetch what the run AHEAD elements on will read and write: while a run is computed the processor asks for no memory. */
INLINE void fetch_ahead(const Site *site, int64_t at, int n) {
    uintptr_t ahead = (uintptr_t)(at + AHEAD), x = (uintptr_t)site->x + (ahead << (2 + site->x_type));
    uintptr_t old = (uintptr_t)site->old + (ahead << (2 + site->old_type));
    uintptr_t out = (uintptr_t)site->out + (ahead << (2 + site->out_type));
    for (int i = 0; i < n << (2 + site->x_type); i += LINE) __builtin_prefetch((const void *)(x + (uintptr_t)i), 0);
    if (site->old && site->old != site->out)
        for (int i = 0; i < n << (2 + site->old_type); i += LINE) __builtin_prefetch((const void *)(old + (uintptr_t)i), 0);
    if (site->out != site->x)
        for (int i = 0; i < n << (2 + site->out_type); i += LINE) __builtin_prefetch((const void *)(out + (uintptr_t)i), 1);
}

/* Round n elements from position at on into result; return whether it holds what the rule gives. */
INLINE int quick_run(Quick *quick, const Site *site, int64_t at, int n, Result *result) {
    uint32_t *own = quick->words + (at & 3);
    quick->tried = quick->skip == 0;
    if (quick->skip) {
        quick->skip--;
        return 0;
    }
    quick_enter(quick, site, at);
    if (quick->form == NONE) return 0;
    fetch_ahead(site, at, n);
    quick_words(site, at, n, quick->words);
    const float *xf = (const float *)site->x + at, *oldf = site->old ? (const float *)site->old + at : xf;
    const double *xd = (const double *)site->x + at, *oldd = site->old ? (const double *)site->old + at : xd;
    const Grid64 g = quick->grid64;
    float *f = result->narrow;
    double *d = result->wide;
    int dithered = site->dithered;
    switch (quick->form) {
        case SINGLE: return dithered ? quick_single(xf, f, own, n, quick->grid32, 1) : quick_single(xf, f, own, n, quick->grid32, 0);
        case WIDENED: return quick_widened(xf, d, own, n, quick->grid32, dithered);
        case PRECISE_F: return quick_ff(xf, xf, f, own, n, g, 1, 0, 0);
        case PRECISE_D: return quick_dd(xd, xd, d, own, n, g, 1, 0, 0);
        case PRECISE_DF: return quick_df(xd, xd, f, own, n, g, 1, 0, 0);
        case WHOLE_D: return dithered ? quick_dd(xd, xd, d, own, n, g, 0, 0, 1) : quick_dd(xd, xd, d, own, n, g, 0, 0, 0);
        case WHOLE_DF: return dithered ? quick_df(xd, xd, f, own, n, g, 0, 0, 1) : quick_df(xd, xd, f, own, n, g, 0, 0, 0);
        case STATE_D: return quick_dd(xd, oldd, d, own, n, g, 1, 1, 0);
        case STATE_DF: return quick_df(xd, oldd, f, own, n, g, 1, 1, 0);
        case STATE_FD: return quick_dfd(xd, oldf, d, own, n, g, 1, 1, 0);
        case STATE_FF: return quick_dff(xd, oldf, f, own, n, g, 1, 1, 0);
        default: return 0;
    }
}

/* After a quick_run that returned 0: mark the elements whose result is not that of the rule, or may lie near a boundary, in
 * SPAN zeroed bytes. Return 0 where the whole run is to be rounded by the rule. */
INLINE int quick_marks(Quick *quick, const Site *site, int64_t at, int n, uint8_t *mark) {
    const float *x = (const float *)site->x + at;
    const uint32_t *own = quick->words + (at & 3);
    if (!quick->tried || (quick->form != SINGLE && quick->form != WIDENED)) return 0;
    int few = site->dithered ? mark_open(x, mark, own, n, quick->grid32, 1) : mark_open(x, mark, own, n, quick->grid32, 0);
    if (!few) quick->skip = DENSE_RUNS;
    return few;
}

/* As quick_run, for residues of binary32 values. */
INLINE int quick_rest(Quick *quick, const Site *site, int64_t at, int n, int bits, uint8_t *rest, Result *result) {
    uint32_t words[WORDS(SPAN)];
    quick_enter(quick, site, at);
    if (quick->form != SINGLE) return 0;
    fetch_ahead(site, at, n);
    quick_words(site, at, n, words);
    return quick_residue((const float *)site->x + at, result->narrow, rest, words + (at & 3), n, quick->grid32, site->dithered,
                         bits);
}

INLINE int quick_follow_rest(Quick *quick, const Site *site, int64_t at, int n, int bits, const uint8_t *stated, Result *result,
                             int64_t *near, int64_t *moved, int64_t *squares) {
    uint32_t words[WORDS(SPAN)];
    quick_enter(quick, site, at);
    if (quick->form != SINGLE) return 0;
    fetch_ahead(site, at, n);
    quick_words(site, at, n, words);
    return quick_restore((const float *)site->x + at, result->narrow, stated, words + (at & 3), n, quick->grid32,
                         site->dithered, bits, near, moved, squares);
}

INLINE void write_result(const Site *site, int64_t at, int n, const Result *result) {
    if (site->out_type)
        memcpy((double *)site->out + at, result->wide, (size_t)n * sizeof(double));
    else
        memcpy((float *)site->out + at, result->narrow, (size_t)n * sizeof(float));
}
