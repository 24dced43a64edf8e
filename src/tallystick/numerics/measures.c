/* What is measured of tensors: fingerprints, sums of squares, largest differences, and which elements lie near a point.
 *
 * Every function works on elements [begin, end) of a flat tensor and may run beside others on other ranges.
 */

#include <math.h>

#include "native.h"

EXPORT int32_t tally_version(void) { return VERSION; }

FAST EXPORT uint64_t tally_fingerprint(const void *x, int32_t type, int64_t begin, int64_t end, uint64_t base) {
    return fingerprint_of(x, type, begin, end, base);
}

/* Write the positions of the marked elements of a run of n from at on, padded with zeros to a multiple of 8. */
INLINE int64_t collect(const uint8_t *mark, int n, int64_t at, int64_t *index) {
    int64_t count = 0;
    for (int first = 0; first < n; first += 8)
        for (uint64_t left = marks_of(mark + first); left; left &= left - 1) index[count++] = at + first + place_of(left);
    return count;
}

/* Write the positions of the elements of [begin, end) less than band away from point, in the elements' own precision;
 * index holds end - begin. Returns their number. Where there is out, it becomes max(x, 0), NaN and -0.0 as they are. */
#define NEAR(name, T, absolute)                                                                                \
    INLINE int64_t name(const T *x, T *out, T point, double band, int64_t begin, int64_t end, int64_t *index) { \
        uint8_t mark[RUN] = {0};                                                                               \
        int64_t count = 0;                                                                                     \
        for (int64_t at = begin; at < end; at += RUN) {                                                        \
            int n = (int)smaller(end - at, RUN), any = 0;                                                      \
            for (int i = 0; i < n; i++) {                                                                      \
                uint8_t near = (double)absolute(x[at + i] - point) < band;                                     \
                mark[i] = near;                                                                                \
                any |= near;                                                                                   \
                if (out) out[at + i] = x[at + i] < 0 ? 0 : x[at + i];                                          \
            }                                                                                                  \
            for (int i = n; i < RUN && i % 8; i++) mark[i] = 0;                                                \
            if (any) count += collect(mark, n, at, index + count);                                             \
        }                                                                                                      \
        return count;                                                                                          \
    }
NEAR(near32, float, fabsf)
NEAR(near64, double, fabs)

FAST EXPORT int64_t tally_near(const void *x, int32_t type, double point, double band, int64_t begin, int64_t end,
                               int64_t *index) {
    if (type == 0) return near32((const float *)x, NULL, (float)point, band, begin, end, index);
    return near64((const double *)x, NULL, point, band, begin, end, index);
}

FAST EXPORT int64_t tally_relu(const void *x, void *out, int32_t type, double band, int64_t begin, int64_t end,
                               int64_t *index) {
    if (type == 0) return near32((const float *)x, (float *)out, 0.0f, band, begin, end, index);
    return near64((const double *)x, (double *)out, 0.0, band, begin, end, index);
}

/* One tensor: n elements at x, its weights starting at base. */
typedef struct {
    const void *x;
    int64_t n;
    uint64_t base;
    int64_t type;
} Marked;

/* Write the fingerprints of several tensors to out. */
EXPORT void tally_fingerprints(const Marked *tensors, int64_t count, uint64_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = tally_fingerprint(tensors[i].x, (int32_t)tensors[i].type, 0, tensors[i].n, tensors[i].base);
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

/* Return the sum of squares of elements 0, stride, 2 stride and so on, n of them, added as tally_square_sum adds n in a row. */
enum { SOON = 24 }; /* elements ahead: each of them waits for memory on its own */
#define SAMPLED(name, T)                                                                                             \
    INLINE double name(const T *x, int64_t stride, int64_t n) {                                                      \
        double values[RUN], lanes[LANES] = {0};                                                                      \
        for (int64_t at = 0; at < n; at += RUN) {                                                                    \
            int length = (int)smaller(n - at, RUN);                                                                  \
            const T *from = x + at * stride;                                                                         \
            for (int i = 0; i < length; i++) {                                                                       \
                __builtin_prefetch((const void *)((uintptr_t)from + (uintptr_t)((i + SOON) * stride) * sizeof *x), 0); \
                values[i] = from[i * stride];                                                                        \
            }                                                                                                        \
            add_squares(lanes, values, length);                                                                      \
        }                                                                                                            \
        return sum_of_lanes(lanes);                                                                                  \
    }
SAMPLED(sampled32, float)
SAMPLED(sampled64, double)

/* One tensor: n elements at x, every stride-th of it. */
typedef struct {
    const void *x;
    int64_t n, stride, type;
} Sample;

/* Write the sums of squares of several samples to out. */
EXPORT void tally_sampled_square_sums(const Sample *samples, int64_t count, double *out) {
    for (int64_t i = 0; i < count; i++) {
        const Sample *one = samples + i;
        out[i] = one->type == 0 ? sampled32((const float *)one->x, one->stride, one->n)
                                : sampled64((const double *)one->x, one->stride, one->n);
    }
}

/* Write the sums of squares of blocks [first, last) of rows elements each. */
EXPORT void tally_square_sums(const void *x, int32_t type, int64_t rows, int64_t first, int64_t last, double *out) {
    for (int64_t block = first; block < last; block++)
        out[block] = tally_square_sum(x, type, block * rows, (block + 1) * rows);
}

/* Write the largest |x - y| of elements [begin, end) and the sum of all to found; both infinite if a difference is not a
 * number. */
FAST EXPORT void tally_difference(const void *x, int32_t x_type, const void *y, int32_t y_type, int64_t begin, int64_t end,
                                  double *found) {
    double a[RUN], b[RUN], largest[LANES] = {0}, total[LANES] = {0};
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
                total[lane] += difference;
            }
        }
    }
    found[0] = found[1] = 0.0;
    for (int lane = 0; lane < LANES; lane++) {
        if (unordered[lane]) {
            found[0] = found[1] = HUGE_VAL;
            return;
        }
        if (largest[lane] > found[0]) found[0] = largest[lane];
        found[1] += total[lane];
    }
}

/* Write the largest difference and the sum of all of blocks [first, last) of rows elements each. */
EXPORT void tally_differences(const void *x, int32_t x_type, const void *y, int32_t y_type, int64_t rows, int64_t first,
                              int64_t last, double *largest, double *total) {
    for (int64_t block = first; block < last; block++) {
        double found[2];
        tally_difference(x, x_type, y, y_type, block * rows, (block + 1) * rows, found);
        largest[block] = found[0];
        total[block] = found[1];
    }
}
