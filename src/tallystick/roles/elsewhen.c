/* Another calendar for a process and all that it starts (spec/dispute.md 14): preloaded, it lies before the C library, so that
 * compiled code reads the same moment as Python does. Linux with glibc. The variable TALLYSTICK_ELSEWHEN says by how many seconds
 * the calendar is ahead. What waits until a moment of the calendar waits as long as it would; nothing else is changed: times of
 * files are the machine's.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/futex.h>
#include <mqueue.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

static time_t ahead;

__attribute__((constructor)) static void begin(void)
{
    const char *text = getenv("TALLYSTICK_ELSEWHEN");
    if (text != NULL)
        ahead = (time_t)strtoll(text, NULL, 10);
}

static int is_calendar(clockid_t clock)
{
    return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI;
}

static void *own(const char *name);

/* The C library's own function of that name, looked up once. */
#define OWN(name)                                                                                                                  \
    ({                                                                                                                             \
        static __typeof__(&name) found;                                                                                            \
        if (found == NULL)                                                                                                         \
            found = (__typeof__(&name))own(#name);                                                                                 \
        found;                                                                                                                     \
    })

static void *own(const char *name)
{
#if defined(__x86_64__)
    /* The oldest of its two versions knows other conditions. */
    void *found = name[0] == 'p' && name[8] == 'c' ? dlvsym(RTLD_NEXT, name, "GLIBC_2.3.2") : NULL;
    if (found != NULL)
        return found;
#endif
    return dlsym(RTLD_NEXT, name);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = OWN(clock_gettime)(clock, now);
    if (!failed && is_calendar(clock))
        now->tv_sec += ahead;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    int failed = OWN(gettimeofday)(now, zone);
    if (!failed)
        now->tv_sec += ahead;
    return failed;
}

time_t time(time_t *now)
{
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now != NULL)
        *now = found.tv_sec;
    return found.tv_sec;
}

int timespec_get(struct timespec *now, int base)
{
    if (base != TIME_UTC)
        return OWN(timespec_get)(now, base);
    return clock_gettime(CLOCK_REALTIME, now) ? 0 : base;
}

/* Until when somebody waits, by the machine's own calendar. A moment of another clock, of how long the machine runs, is none of
 * the calendar's: it lies decades before. */
static const struct timespec *until(const struct timespec *when, struct timespec *kept)
{
    struct timespec now;
    if (ahead == 0 || when == NULL || OWN(clock_gettime)(CLOCK_REALTIME, &now))
        return when;
    if (when->tv_sec < now.tv_sec + ahead / 2)
        return when;
    *kept = *when;
    kept->tv_sec -= ahead;
    return kept;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict when)
{
    struct timespec kept;
    return OWN(pthread_cond_timedwait)(condition, mutex, until(when, &kept));
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict when)
{
    struct timespec kept;
    return OWN(pthread_mutex_timedlock)(mutex, until(when, &kept));
}

int pthread_rwlock_timedrdlock(pthread_rwlock_t *restrict lock, const struct timespec *restrict when)
{
    struct timespec kept;
    return OWN(pthread_rwlock_timedrdlock)(lock, until(when, &kept));
}

int pthread_rwlock_timedwrlock(pthread_rwlock_t *restrict lock, const struct timespec *restrict when)
{
    struct timespec kept;
    return OWN(pthread_rwlock_timedwrlock)(lock, until(when, &kept));
}

int cnd_timedwait(cnd_t *restrict condition, mtx_t *restrict mutex, const struct timespec *restrict when)
{
    struct timespec kept;
    return OWN(cnd_timedwait)(condition, mutex, until(when, &kept));
}

int mtx_timedlock(mtx_t *restrict mutex, const struct timespec *restrict when)
{
    struct timespec kept;
    return OWN(mtx_timedlock)(mutex, until(when, &kept));
}

ssize_t mq_timedreceive(mqd_t queue, char *restrict text, size_t size, unsigned *restrict priority,
                        const struct timespec *restrict when)
{
    struct timespec kept;
    return OWN(mq_timedreceive)(queue, text, size, priority, until(when, &kept));
}

int mq_timedsend(mqd_t queue, const char *text, size_t size, unsigned priority, const struct timespec *when)
{
    struct timespec kept;
    return OWN(mq_timedsend)(queue, text, size, priority, until(when, &kept));
}

/* A timer that goes off at a moment, and then in steps of its own. */
static const struct itimerspec *moment(int is_moment, const struct itimerspec *when, struct itimerspec *kept)
{
    if (!is_moment || when == NULL || until(&when->it_value, &kept->it_value) == &when->it_value)
        return when;
    kept->it_interval = when->it_interval;
    return kept;
}

int timer_settime(timer_t timer, int flags, const struct itimerspec *restrict when, struct itimerspec *restrict old)
{
    struct itimerspec kept;
    return OWN(timer_settime)(timer, flags, moment(flags & TIMER_ABSTIME, when, &kept), old);
}

int timerfd_settime(int timer, int flags, const struct itimerspec *when, struct itimerspec *old)
{
    struct itimerspec kept;
    return OWN(timerfd_settime)(timer, flags, moment(flags & TFD_TIMER_ABSTIME, when, &kept), old);
}

/* C++ and others wait by the kernel's own call. */
long syscall(long number, ...)
{
    long given[6];
    struct timespec kept;
    __builtin_va_list list;
    __builtin_va_start(list, number);
    for (int at = 0; at < 6; at++)
        given[at] = __builtin_va_arg(list, long);
    __builtin_va_end(list);
    if (number == SYS_futex && (given[1] & FUTEX_CLOCK_REALTIME))
        given[3] = (long)until((const struct timespec *)given[3], &kept);
    return OWN(syscall)(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict when)
{
    struct timespec kept;
    return OWN(sem_timedwait)(semaphore, until(when, &kept));
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *when, struct timespec *left)
{
    struct timespec kept;
    int is_moment = is_calendar(clock) && (flags & TIMER_ABSTIME);
    return OWN(clock_nanosleep)(clock, flags, is_moment ? until(when, &kept) : when, left);
}

#if __GLIBC_PREREQ(2, 30)
int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict when)
{
    struct timespec kept;
    return OWN(pthread_cond_clockwait)(condition, mutex, clock, is_calendar(clock) ? until(when, &kept) : when);
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict when)
{
    struct timespec kept;
    return OWN(sem_clockwait)(semaphore, clock, is_calendar(clock) ? until(when, &kept) : when);
}
#endif
