/* Operators on rows that cancel inside, evaluated in binary64 and rounded once (spec/policies.md 8).
 *
 * Additions have a fixed order, and exp, expm1 and log1p are polynomials of this file: the bits depend neither on the
 * processor nor on how rows are dealt out to threads. Rows are contiguous; type 0 is binary32, 1 is binary64.
 */

#include <math.h>

#include "native.h"

#define SHIFT 0x1.8p+52            /* adding it leaves the nearest whole number in the low bits */
#define LOG2_E 0x1.71547652b82fep+0
#define LN2_HIGH 0x1.62e42feep-1   /* 32 bits: a product with an exponent is exact */
#define LN2_LOW 0x1.a39ef35793c76p-33
#define LOWEST (-746.0)            /* exp of it is 0 */
#define HIGHEST 710.0              /* exp of it is infinite */
#define LN2 0x1.62e42fefa39efp-1
#define LOWEST_NORMAL (-708.0)     /* exp of it is 2**-1021, as good as 0 in a sum that is rounded to binary32 */
#define HIGHEST_NORMAL 709.0
#define SURE_FROM (-0.35)          /* log-probabilities above it are those of a sure choice: 1 - p has a form of its own */

enum { SOFTMAX = 0, SAFE_SOFTMAX = 1, LOG_SOFTMAX = 2 };

/* The sum of r**(i + 2) / (i + 2)! from i = 0 on, for |r| <= 0.35: what is left out is below 2**-58 of exp(r). */
INLINE double tail_of(double r) {
    double p = 1.0 / 6227020800.0;
    p = p * r + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    return (p * r + 0.5) * (r * r);
}

/* exp(x) to one unit in the last place; no branch, so that it is done on vectors. */
INLINE double exp_of(double x) {
    x = x < LOWEST ? LOWEST : x;
    x = x > HIGHEST ? HIGHEST : x;
    double lifted = x * LOG2_E + SHIFT, whole = lifted - SHIFT;
    double r = (x - whole * LN2_HIGH) - whole * LN2_LOW;
    /* In two factors: the result may be subnormal. */
    uint64_t k = (uint64_t)(bits_of(lifted) - bits_of(SHIFT)) + 2048, half = k >> 1;
    return (1.0 + (r + tail_of(r))) * float_of((int64_t)((half - 1) << 52)) * float_of((int64_t)((k - half - 1) << 52));
}

/* exp(x) to 2**-41, for sums and products that are rounded to binary32: exp(r / 8)**8 needs half the terms. */
INLINE double quick_exp_of(double x) {
    x = x < LOWEST_NORMAL ? LOWEST_NORMAL : x;
    x = x > HIGHEST_NORMAL ? HIGHEST_NORMAL : x;
    double lifted = x * LOG2_E + SHIFT, r = (x - (lifted - SHIFT) * LN2) * 0.125, r2 = r * r;
    double p = (1.0 + r) + r2 * ((0.5 + r * (1.0 / 6.0)) + r2 * ((1.0 / 24.0 + r * (1.0 / 120.0)) + r2 * (1.0 / 720.0)));
    p *= p;
    p *= p;
    p *= p;
    return float_of((int64_t)((uint64_t)bits_of(p) + ((uint64_t)bits_of(lifted) << 52))); /* SHIFT's own low bits are 0 */
}

/* exp(x) - 1 for |x| <= 0.35. */
INLINE double expm1_of(double x) { return x + tail_of(x); }

/* log(1 + s) for s >= 0, to some units in the last place however small s is. */
INLINE double log1p_of(double s) {
    double u = 1.0 + s;
    if (!(u <= 0x1.fffffffffffffp+1023)) return u;
    double lost = s < 1.0 ? s - (u - 1.0) : 1.0 - (u - s);
    int64_t k = exponent_of(u);
    double m = float_of(bits_of(u) - (int64_t)((uint64_t)k << 52));
    if (m > 0x1.6a09e667f3bcdp+0) {
        m *= 0.5;
        k += 1;
    }
    double t = (m - 1.0) / (m + 1.0), z = t * t, p = 1.0 / 21.0;
    for (int i = 19; i >= 3; i -= 2) p = p * z + 1.0 / i;
    return (double)k * LN2_HIGH + ((double)k * LN2_LOW + (lost / u + (2.0 * t + 2.0 * t * z * p)));
}

INLINE void add_all(double *lanes, const double *values, int n) {
    int whole = n - n % LANES;
    for (int i = 0; i < whole; i += LANES)
        for (int lane = 0; lane < LANES; lane++) lanes[lane] += values[i + lane];
    for (int i = whole; i < n; i++) lanes[i - whole] += values[i];
}

/* -- softmax and its logarithm ------------------------------------------------------------------------------------- */

#define SOFTMAX_ROW(name, T, EXP)                                                                                           \
    INLINE void name(const T *restrict x, T *restrict out, int64_t n, int form) {                                         \
        T top = x[0], tops[LANES];                                                                                        \
        int64_t whole = n - n % LANES;                                                                                    \
        for (int lane = 0; lane < LANES; lane++) tops[lane] = top;                                                        \
        for (int64_t i = 0; i < whole; i += LANES)                                                                        \
            for (int lane = 0; lane < LANES; lane++) tops[lane] = x[i + lane] > tops[lane] ? x[i + lane] : tops[lane];    \
        for (int64_t i = whole; i < n; i++) top = x[i] > top ? x[i] : top;                                                \
        for (int lane = 0; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top;                               \
        if (top - top != 0) { /* infinite, or the first element is not a number */                                        \
            int nan = !(form == SAFE_SOFTMAX && top < 0);                                                                 \
            for (int64_t i = 0; i < n; i++) nan |= x[i] != x[i];                                                          \
            for (int64_t i = 0; i < n; i++) out[i] = nan ? (T)NAN : (T)0;                                                 \
            return;                                                                                                       \
        }                                                                                                                 \
        double others[LANES] = {0}, e[RUN];                                                                           \
        int64_t ties = 0;                                                                                             \
        for (int64_t at = 0; at < n; at += RUN) {                                                                     \
            int run = (int)smaller(n - at, RUN), here = 0;                                                            \
            for (int i = 0; i < run; i++) e[i] = EXP((double)x[at + i] - (double)top);                                \
            if (form == LOG_SOFTMAX) { /* small beside 1, and exact there */                                          \
                for (int i = 0; i < run; i++) here += x[at + i] == top ? 1 : 0;                                       \
                for (int i = 0; i < run; i++) e[i] = x[at + i] == top ? 0.0 : e[i];                                   \
                ties += here;                                                                                         \
            }                                                                                                         \
            add_all(others, e, run);                                                                                  \
        }                                                                                                             \
        double total = sum_of_lanes(others);                                                                          \
        if (form == LOG_SOFTMAX) {                                                                                    \
            double log_total = log1p_of(total + (double)(ties - 1));                                                  \
            for (int64_t i = 0; i < n; i++) out[i] = (T)(((double)x[i] - (double)top) - log_total);                   \
        } else {                                                                                                      \
            double share = 1.0 / total;                                                                               \
            if (n <= RUN)                                                                                             \
                for (int i = 0; i < (int)n; i++) out[i] = (T)(e[i] * share);                                          \
            else                                                                                                      \
                for (int64_t i = 0; i < n; i++) out[i] = (T)(EXP((double)x[i] - (double)top) * share);                \
        }                                                                                                             \
    }
SOFTMAX_ROW(softmax_narrow, float, quick_exp_of)
SOFTMAX_ROW(softmax_wide, double, exp_of)

/* Rows [begin, end) of n elements; form is one of the enumeration above. */
EXPORT FAST void tally_softmax(const void *x, void *out, int32_t type, int32_t form, int64_t n, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        if (type == 0) softmax_narrow((const float *)x + row * n, (float *)out + row * n, n, form);
        else softmax_wide((const double *)x + row * n, (double *)out + row * n, n, form);
    }
}

/* g - exp(y) * sum(g); where exp(y) is nearly 1, (g - sum(g)) - expm1(y) * sum(g). */
#define LOG_SOFTMAX_BACKWARD_ROW(name, T, EXP)                                                                              \
    INLINE void name(const T *restrict g, const T *restrict y, T *restrict out, int64_t n) {                              \
        double lanes[LANES] = {0}, wide[RUN];                                                                             \
        for (int64_t at = 0; at < n; at += RUN) {                                                                         \
            int run = (int)smaller(n - at, RUN);                                                                          \
            for (int i = 0; i < run; i++) wide[i] = (double)g[at + i];                                                    \
            add_all(lanes, wide, run);                                                                                    \
        }                                                                                                                 \
        double total = sum_of_lanes(lanes);                                                                               \
        for (int64_t at = 0; at < n; at += RUN) {                                                                         \
            int run = (int)smaller(n - at, RUN), sure = 0;                                                                \
            for (int i = 0; i < run; i++) sure += y[at + i] > (T)SURE_FROM ? 1 : 0;                                       \
            for (int i = 0; i < run; i++) out[at + i] = (T)((double)g[at + i] - EXP((double)y[at + i]) * total);          \
            if (!sure) continue;                                                                                          \
            for (int i = 0; i < run; i++) {                                                                               \
                double log_p = (double)y[at + i];                                                                         \
                if (log_p > SURE_FROM && log_p < -SURE_FROM)                                                              \
                    out[at + i] = (T)(((double)g[at + i] - total) - expm1_of(log_p) * total);                             \
            }                                                                                                             \
        }                                                                                                                 \
    }
LOG_SOFTMAX_BACKWARD_ROW(log_softmax_backward_narrow, float, quick_exp_of)
LOG_SOFTMAX_BACKWARD_ROW(log_softmax_backward_wide, double, exp_of)

/* p * sum of (g - g_j) p_j, which is p * (g - sum of g_j p_j) where probabilities add up to 1. Differences are taken from the
 * gradient at the largest probability, so that what is nearly 1 is never subtracted from 1. */
#define SOFTMAX_BACKWARD_ROW(name, T)                                                                                     \
    INLINE void name(const T *restrict g, const T *restrict p, T *restrict out, int64_t n) {                              \
        T top = p[0], tops[LANES];                                                                                        \
        int64_t most = 0, whole = n - n % LANES;                                                                          \
        for (int lane = 0; lane < LANES; lane++) tops[lane] = top;                                                        \
        for (int64_t i = 0; i < whole; i += LANES)                                                                        \
            for (int lane = 0; lane < LANES; lane++) tops[lane] = p[i + lane] > tops[lane] ? p[i + lane] : tops[lane];    \
        for (int64_t i = whole; i < n; i++) top = p[i] > top ? p[i] : top;                                                \
        for (int lane = 0; lane < LANES; lane++) top = tops[lane] > top ? tops[lane] : top;                               \
        while (most + 1 < n && p[most] < top) most++;                                                                     \
        double lanes[LANES] = {0}, wide[RUN], from = (double)g[most];                                                     \
        for (int64_t at = 0; at < n; at += RUN) {                                                                         \
            int run = (int)smaller(n - at, RUN);                                                                          \
            for (int i = 0; i < run; i++) wide[i] = ((double)g[at + i] - from) * (double)p[at + i];                       \
            add_all(lanes, wide, run);                                                                                    \
        }                                                                                                                 \
        double mean = sum_of_lanes(lanes);                                                                                \
        for (int64_t i = 0; i < n; i++) out[i] = (T)((double)p[i] * (((double)g[i] - from) - mean));                      \
    }
SOFTMAX_BACKWARD_ROW(softmax_backward_narrow, float)
SOFTMAX_BACKWARD_ROW(softmax_backward_wide, double)

/* Of rows [begin, end): y are the results of the forward pass, of the form it had. */
EXPORT FAST void tally_softmax_backward(const void *g, const void *y, void *out, int32_t type, int32_t form, int64_t n,
                                        int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        int64_t at = row * n;
        if (type == 0) {
            const float *dy = (const float *)g + at, *result = (const float *)y + at;
            if (form == LOG_SOFTMAX) log_softmax_backward_narrow(dy, result, (float *)out + at, n);
            else softmax_backward_narrow(dy, result, (float *)out + at, n);
        } else {
            const double *dy = (const double *)g + at, *result = (const double *)y + at;
            if (form == LOG_SOFTMAX) log_softmax_backward_wide(dy, result, (double *)out + at, n);
            else softmax_backward_wide(dy, result, (double *)out + at, n);
        }
    }
}

/* -- layer norm ---------------------------------------------------------------------------------------------------- */

INLINE double mean_of(const float *restrict x, int64_t n) {
    double lanes[LANES] = {0}, wide[RUN];
    for (int64_t at = 0; at < n; at += RUN) {
        int run = (int)smaller(n - at, RUN);
        for (int i = 0; i < run; i++) wide[i] = (double)x[at + i];
        add_all(lanes, wide, run);
    }
    return sum_of_lanes(lanes) / (double)n;
}

/* Rows [begin, end) of n elements; weight and bias may be NULL. */
EXPORT FAST void tally_layer_norm(const float *restrict x, const float *restrict weight, const float *restrict bias,
                                  float *restrict out, float *restrict mean, float *restrict rstd, double eps, int64_t n,
                                  int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const float *restrict from = x + row * n;
        float *restrict to = out + row * n;
        double middle = mean_of(from, n), lanes[LANES] = {0}, wide[RUN];
        for (int64_t at = 0; at < n; at += RUN) {
            int run = (int)smaller(n - at, RUN);
            for (int i = 0; i < run; i++) wide[i] = (double)from[at + i] - middle;
            add_squares(lanes, wide, run);
        }
        double inverse = 1.0 / sqrt(sum_of_lanes(lanes) / (double)n + eps);
        mean[row] = (float)middle;
        rstd[row] = (float)inverse;
        for (int64_t at = 0; at < n; at += RUN) {
            int run = (int)smaller(n - at, RUN);
            for (int i = 0; i < run; i++) wide[i] = ((double)from[at + i] - middle) * inverse;
            if (weight != NULL)
                for (int i = 0; i < run; i++) wide[i] *= (double)weight[at + i];
            if (bias != NULL)
                for (int i = 0; i < run; i++) wide[i] += (double)bias[at + i];
            for (int i = 0; i < run; i++) to[at + i] = (float)wide[i];
        }
    }
}

/* Of rows [begin, end): the gradient of x into dx, if it is not NULL; dy * (x - mean) * rstd and dy are added to n sums each
 * of the chunk of `chunk` rows that begins at begin, if sums is not NULL. The mean is taken from x anew: rounded to binary32
 * it is coarse beside a small spread. */
EXPORT FAST void tally_layer_norm_backward(const float *restrict dy, const float *restrict x, const float *restrict rstd,
                                           const float *restrict weight, float *restrict dx, double *restrict sums,
                                           int64_t chunk, int64_t n, int64_t begin, int64_t end) {
    if (sums != NULL) sums += begin / chunk * 2 * n;
    for (int64_t row = begin; row < end; row++) {
        const float *restrict from = x + row * n, *restrict g = dy + row * n;
        double middle = mean_of(from, n), inverse = (double)rstd[row];
        double plain[LANES] = {0}, along[LANES] = {0}, slope[RUN], unit[RUN], both[RUN];
        for (int64_t at = 0; at < n; at += RUN) {
            int run = (int)smaller(n - at, RUN);
            for (int i = 0; i < run; i++) {
                slope[i] = (double)g[at + i];
                unit[i] = ((double)from[at + i] - middle) * inverse;
            }
            if (sums != NULL)
                for (int i = 0; i < run; i++) {
                    sums[at + i] += slope[i] * unit[i];
                    sums[n + at + i] += slope[i];
                }
            if (dx == NULL) continue;
            if (weight != NULL)
                for (int i = 0; i < run; i++) slope[i] *= (double)weight[at + i];
            for (int i = 0; i < run; i++) both[i] = slope[i] * unit[i];
            add_all(plain, slope, run);
            add_all(along, both, run);
        }
        if (dx == NULL) continue;
        double first = sum_of_lanes(plain) / (double)n, second = sum_of_lanes(along) / (double)n;
        for (int64_t at = 0; at < n; at += RUN) {
            int run = (int)smaller(n - at, RUN);
            if (n > RUN) { /* else both are those of the pass before */
                for (int i = 0; i < run; i++) {
                    slope[i] = (double)g[at + i];
                    unit[i] = ((double)from[at + i] - middle) * inverse;
                }
                if (weight != NULL)
                    for (int i = 0; i < run; i++) slope[i] *= (double)weight[at + i];
            }
            for (int i = 0; i < run; i++) dx[row * n + at + i] = (float)(inverse * ((slope[i] - first) - unit[i] * second));
        }
    }
}

/* -- batch and group norm: rows are the elements of one channel of one example -------------------------------------- */

/* Which rows a group has: members from first * g on, each step rows after the one before. A row's channel is its number
 * modulo channels. */
typedef struct {
    int64_t first, step, members, channels;
} Groups;

/* The sum over a group of x - mean, or of its square. */
INLINE double group_sum(const float *restrict x, const Groups *groups, int64_t group, int64_t n, double mean, int squared) {
    double total = 0.0, wide[RUN];
    for (int64_t k = 0; k < groups->members; k++) {
        const float *restrict from = x + (group * groups->first + k * groups->step) * n;
        double lanes[LANES] = {0};
        for (int64_t at = 0; at < n; at += RUN) {
            int run = (int)smaller(n - at, RUN);
            for (int i = 0; i < run; i++) wide[i] = (double)from[at + i] - mean;
            if (squared) add_squares(lanes, wide, run);
            else add_all(lanes, wide, run);
        }
        total += sum_of_lanes(lanes);
    }
    return total;
}

/* Of groups [begin, end), of rows of n elements: out = (x - mean) * inverse * weight + bias; weight and bias may be NULL.
 * Unless given, mean and variance are those of the group, variance the biased one, and are written; inverse always is. */
EXPORT FAST void tally_group_norm(const float *restrict x, const float *restrict weight, const float *restrict bias,
                                  float *restrict out, double *restrict mean, double *restrict variance,
                                  double *restrict inverse, const Groups *groups, double eps, int32_t given, int64_t n,
                                  int64_t begin, int64_t end) {
    double size = (double)groups->members * (double)n;
    for (int64_t group = begin; group < end; group++) {
        if (!given) {
            mean[group] = group_sum(x, groups, group, n, 0.0, 0) / size;
            variance[group] = group_sum(x, groups, group, n, mean[group], 1) / size;
        }
        double middle = mean[group], scale = 1.0 / sqrt(variance[group] + eps);
        inverse[group] = scale;
        for (int64_t k = 0; k < groups->members; k++) {
            int64_t row = group * groups->first + k * groups->step, channel = row % groups->channels;
            const float *restrict from = x + row * n;
            float *restrict to = out + row * n;
            double factor = weight != NULL ? scale * (double)weight[channel] : scale;
            double shift = bias != NULL ? (double)bias[channel] : 0.0;
            for (int64_t i = 0; i < n; i++) to[i] = (float)(((double)from[i] - middle) * factor + shift);
        }
    }
}

/* Of groups [begin, end): the gradient of x into dx, if it is not NULL; for each row, where a group is one channel for each
 * group, the sum of dy * (x - mean) * inverse into sums[2 * i], that of dy into sums[2 * i + 1]. Unless given, which says that they do not depend on x, the mean is
 * taken from x anew, as for layer norm. */
EXPORT FAST void tally_group_norm_backward(const float *restrict dy, const float *restrict x, const float *restrict weight,
                                           const double *restrict mean, const double *restrict inverse, float *restrict dx,
                                           double *restrict sums, const Groups *groups, int32_t given, int64_t n,
                                           int64_t begin, int64_t end) {
    double size = (double)groups->members * (double)n;
    for (int64_t group = begin; group < end; group++) {
        double middle = given ? mean[group] : group_sum(x, groups, group, n, 0.0, 0) / size;
        double scale = inverse[group], first = 0.0, second = 0.0, all_along = 0.0, all_plain = 0.0;
        for (int64_t k = 0; k < groups->members; k++) {
            int64_t row = group * groups->first + k * groups->step;
            const float *restrict from = x + row * n, *restrict g = dy + row * n;
            double plain[LANES] = {0}, along[LANES] = {0}, a[RUN], b[RUN];
            for (int64_t at = 0; at < n; at += RUN) {
                int run = (int)smaller(n - at, RUN);
                for (int i = 0; i < run; i++) {
                    a[i] = (double)g[at + i];
                    b[i] = a[i] * ((double)from[at + i] - middle);
                }
                add_all(plain, a, run);
                add_all(along, b, run);
            }
            double slope = weight != NULL ? (double)weight[row % groups->channels] : 1.0;
            double row_along = sum_of_lanes(along) * scale, row_plain = sum_of_lanes(plain);
            first += slope * row_plain;
            second += slope * row_along;
            all_plain += row_plain;
            all_along += row_along;
            if (groups->first != 1) {
                sums[2 * row] = row_along;
                sums[2 * row + 1] = row_plain;
            }
        }
        if (groups->first == 1) {
            sums[2 * group] = all_along;
            sums[2 * group + 1] = all_plain;
        }
        if (dx == NULL) continue;
        double shift = given ? 0.0 : first / size, factor = given ? 0.0 : scale * (second / size);
        for (int64_t k = 0; k < groups->members; k++) {
            int64_t row = group * groups->first + k * groups->step;
            const float *restrict from = x + row * n, *restrict g = dy + row * n;
            float *restrict to = dx + row * n;
            double slope = weight != NULL ? (double)weight[row % groups->channels] : 1.0;
            for (int64_t i = 0; i < n; i++)
                to[i] = (float)(scale * (((double)g[i] * slope - shift) - ((double)from[i] - middle) * factor));
        }
    }
}
