/* Adam, AdamW and SGD, fused: one pass reads gradient and state and writes the state (spec/optimizers.md).
 *
 * Bit-equal to reference.py. IEEE binary64 + - * / and square root in the order written, compiled without contraction
 * and without fast-math. All tensors hold binary32 values: parameter and gradient as binary32 (type 0) or binary64
 * (type 1), the optimizer's own as binary32; none overlap. Every function works on elements [begin, end) and may run
 * beside others.
 * They return 1 if every result is finite as binary32, else 0.
 */

#include <math.h>
#include <stdint.h>

#include "native.h"

#define MAX_FP32 0x1.fffffep+127f

/* numbers: keep, decay, beta1, fresh1, beta2, fresh2, rate, unbias, eps. */
typedef struct {
    double keep, decay, beta1, fresh1, beta2, fresh2, rate, unbias, eps;
} Adam;

/* ahead is Nesterov's momentum. A first step with momentum has momentum 0 and fresh 1. */
typedef struct {
    double lr, decay, momentum, fresh, ahead;
    int32_t nesterov;
} Sgd;

/* One body for parameters and gradients of either type; a result is the nearest binary32 value, -0.0 made +0.0. */
#define ADAM(name, T)                                                                                                    \
    INLINE int name(T *restrict p, const T *restrict g, float *restrict m, float *restrict v, const Adam a, int64_t n) { \
        int bad = 0;                                                                                                     \
        for (int64_t i = 0; i < n; i++) {                                                                                \
            double x = (double)p[i], y = (double)g[i] + a.decay * x;                                                     \
            double mean = a.beta1 * (double)m[i] + a.fresh1 * y;                                                         \
            double square = a.beta2 * (double)v[i] + a.fresh2 * (y * y);                                                 \
            x = x * a.keep - (a.rate * mean) / (sqrt(square) * a.unbias + a.eps);                                        \
            float p32 = (float)x + 0.0f, m32 = (float)mean + 0.0f, v32 = (float)square + 0.0f;                           \
            bad |= !(fabsf(p32) <= MAX_FP32) | !(fabsf(m32) <= MAX_FP32) | !(fabsf(v32) <= MAX_FP32);                    \
            p[i] = (T)p32;                                                                                               \
            m[i] = m32;                                                                                                  \
            v[i] = v32;                                                                                                  \
        }                                                                                                                \
        return bad;                                                                                                      \
    }

#define SGD(name, T)                                                                                                     \
    INLINE int name(T *restrict p, const T *restrict g, const Sgd s, int64_t n) {                                        \
        int bad = 0;                                                                                                     \
        for (int64_t i = 0; i < n; i++) {                                                                                \
            double x = (double)p[i], y = (double)g[i] + s.decay * x;                                                     \
            float p32 = (float)(x - s.lr * y) + 0.0f;                                                                    \
            bad |= !(fabsf(p32) <= MAX_FP32);                                                                            \
            p[i] = (T)p32;                                                                                               \
        }                                                                                                                \
        return bad;                                                                                                      \
    }

#define SGD_MOMENTUM(name, T, nesterov)                                                                                  \
    INLINE int name(T *restrict p, const T *restrict g, float *restrict b, const Sgd s, int64_t n) {                     \
        int bad = 0;                                                                                                     \
        for (int64_t i = 0; i < n; i++) {                                                                                \
            double x = (double)p[i], y = (double)g[i] + s.decay * x;                                                     \
            double held = s.momentum * (double)b[i] + s.fresh * y;                                                       \
            y = (nesterov) ? y + s.ahead * held : held;                                                                  \
            float p32 = (float)(x - s.lr * y) + 0.0f, b32 = (float)held + 0.0f;                                          \
            bad |= !(fabsf(p32) <= MAX_FP32) | !(fabsf(b32) <= MAX_FP32);                                                \
            p[i] = (T)p32;                                                                                               \
            b[i] = b32;                                                                                                  \
        }                                                                                                                \
        return bad;                                                                                                      \
    }

ADAM(adam32, float)
ADAM(adam64, double)
SGD(sgd32, float)
SGD(sgd64, double)
SGD_MOMENTUM(heavy32, float, 0)
SGD_MOMENTUM(heavy64, double, 0)
SGD_MOMENTUM(nesterov32, float, 1)
SGD_MOMENTUM(nesterov64, double, 1)

/* What is taken of the results while they are in the cache: the sum of the fingerprints of parameter and state, whose
 * weights start at base. */
typedef struct {
    uint64_t base[3], sum;
} Marks;

enum { BLOCK = 2048 }; /* elements */

/* marks may be NULL. */
FAST EXPORT int32_t tally_adam(void *p, const void *g, int32_t type, float *m, float *v, const Adam *numbers,
                               int64_t begin, int64_t end, Marks *marks) {
    int bad = 0;
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t n = smaller(end - at, BLOCK);
        if (type == 0)
            bad |= adam32((float *)p + at, (const float *)g + at, m + at, v + at, *numbers, n);
        else
            bad |= adam64((double *)p + at, (const double *)g + at, m + at, v + at, *numbers, n);
        if (!marks) continue;
        marks->sum += fingerprint_of(p, type, at, at + n, marks->base[0]);
        marks->sum += fingerprint_of(m, 0, at, at + n, marks->base[1]) + fingerprint_of(v, 0, at, at + n, marks->base[2]);
    }
    return !bad;
}

INLINE int sgd_block(void *p, const void *g, int32_t type, float *b, const Sgd *numbers, int64_t at, int64_t n) {
    if (type == 0) {
        float *x = (float *)p + at;
        const float *y = (const float *)g + at;
        if (!b) return sgd32(x, y, *numbers, n);
        return numbers->nesterov ? nesterov32(x, y, b + at, *numbers, n) : heavy32(x, y, b + at, *numbers, n);
    }
    double *x = (double *)p + at;
    const double *y = (const double *)g + at;
    if (!b) return sgd64(x, y, *numbers, n);
    return numbers->nesterov ? nesterov64(x, y, b + at, *numbers, n) : heavy64(x, y, b + at, *numbers, n);
}

/* b: the momentum, or NULL without momentum; marks may be NULL. */
FAST EXPORT int32_t tally_sgd(void *p, const void *g, int32_t type, float *b, const Sgd *numbers, int64_t begin,
                              int64_t end, Marks *marks) {
    int bad = 0;
    for (int64_t at = begin; at < end; at += BLOCK) {
        int64_t n = smaller(end - at, BLOCK);
        bad |= sgd_block(p, g, type, b, numbers, at, n);
        if (!marks) continue;
        marks->sum += fingerprint_of(p, type, at, at + n, marks->base[0]);
        if (b) marks->sum += fingerprint_of(b, 0, at, at + n, marks->base[1]);
    }
    return !bad;
}
