/* Adam, AdamW and SGD, fused: one pass reads gradient and state and writes the state (spec/optimizers.md).
 *
 * Bit-equal to reference.py. IEEE binary64 + - * / and square root in the order written, compiled without contraction
 * and without fast-math. State and gradient hold binary32 values; types are 0 for binary32, 1 for binary64, and the
 * optimizer's own tensors are binary32. Every function works on elements [begin, end) and may run beside others.
 * They return 1 if every result is finite as binary32, else 0.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 11
#define FAST __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define FAST
#endif
#define INLINE static inline __attribute__((always_inline))

enum { RUN = 256 };
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

INLINE void load(double *to, const void *from, int type, int64_t at, int n) {
    if (type == 0) {
        const float *p = (const float *)from + at;
        for (int i = 0; i < n; i++) to[i] = (double)p[i];
    } else {
        memcpy(to, (const double *)from + at, (size_t)n * sizeof *to);
    }
}

/* Write the nearest binary32 values, -0.0 as +0.0; return how many are not finite. */
INLINE int store(void *to, const double *from, int type, int64_t at, int n) {
    float narrow[RUN];
    int bad = 0;
    for (int i = 0; i < n; i++) {
        narrow[i] = (float)from[i] + 0.0f;
        bad += !(fabsf(narrow[i]) <= MAX_FP32);
    }
    if (type == 0) {
        memcpy((float *)to + at, narrow, (size_t)n * sizeof *narrow);
    } else {
        double *p = (double *)to + at;
        for (int i = 0; i < n; i++) p[i] = (double)narrow[i];
    }
    return bad;
}

FAST EXPORT int32_t tally_adam(void *p, int32_t p_type, const void *g, int32_t g_type, float *m, float *v,
                               const Adam *numbers, int64_t begin, int64_t end) {
    const Adam a = *numbers;
    double x[RUN], y[RUN], mean[RUN], square[RUN];
    int64_t bad = 0;
    for (int64_t at = begin; at < end; at += RUN) {
        int n = end - at < RUN ? (int)(end - at) : RUN;
        load(x, p, p_type, at, n);
        load(y, g, g_type, at, n);
        load(mean, m, 0, at, n);
        load(square, v, 0, at, n);
        for (int i = 0; i < n; i++) {
            double fresh = y[i] + a.decay * x[i];
            mean[i] = a.beta1 * mean[i] + a.fresh1 * fresh;
            square[i] = a.beta2 * square[i] + a.fresh2 * (fresh * fresh);
            x[i] = x[i] * a.keep - (a.rate * mean[i]) / (sqrt(square[i]) * a.unbias + a.eps);
        }
        bad += store(p, x, p_type, at, n) + store(m, mean, 0, at, n) + store(v, square, 0, at, n);
    }
    return bad == 0;
}

/* b: the momentum, or NULL without momentum. */
FAST EXPORT int32_t tally_sgd(void *p, int32_t p_type, const void *g, int32_t g_type, float *b, const Sgd *numbers,
                              int64_t begin, int64_t end) {
    const Sgd s = *numbers;
    double x[RUN], y[RUN], held[RUN];
    int64_t bad = 0;
    for (int64_t at = begin; at < end; at += RUN) {
        int n = end - at < RUN ? (int)(end - at) : RUN;
        load(x, p, p_type, at, n);
        load(y, g, g_type, at, n);
        for (int i = 0; i < n; i++) y[i] = y[i] + s.decay * x[i];
        if (b) {
            load(held, b, 0, at, n);
            for (int i = 0; i < n; i++) held[i] = s.momentum * held[i] + s.fresh * y[i];
            if (s.nesterov) {
                for (int i = 0; i < n; i++) y[i] = y[i] + s.ahead * held[i];
            } else {
                memcpy(y, held, (size_t)n * sizeof *y);
            }
            bad += store(b, held, 0, at, n);
        }
        for (int i = 0; i < n; i++) x[i] = x[i] - s.lr * y[i];
        bad += store(p, x, p_type, at, n);
    }
    return bad == 0;
}
