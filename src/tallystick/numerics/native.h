/* What every C source of the kernels needs. */

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

/* One body, compiled for several instruction sets and chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 11
#define FAST __attribute__((target_clones("default", "avx2", "arch=x86-64-v4")))
#else
#define FAST
#endif
#define INLINE static inline __attribute__((always_inline))
