// SPDX-License-Identifier: Apache-2.0
// Preloaded into each process of a soak: the wall clock is off by the seconds in a file, which may change at any time.
// Monotonic clocks stay, as they do on a machine whose clock is set.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

// Twenty years: more than a machine runs, and less than the wall clock shows.
#define SINCE_1970 (20L * 365 * 24 * 3600)

static const volatile double *offset;

__attribute__((constructor)) static void map_file(void) {
    const char *path = getenv("ASYNC_PIPELINE_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED)
        offset = mapped;
    close(file);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, now);
    if (!status && offset && id == CLOCK_REALTIME)
        now->tv_sec += (time_t)*offset;
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return status;
}

// The kernel's clock is not stepped: deadlines of this one are converted. Otherwise a loop that waits would wait for an
// hour, or not at all and take a whole core.
static struct timespec converted(const struct timespec *until) {
    struct timespec exact = *until;
    if (offset)
        exact.tv_sec -= (time_t)*offset;
    return exact;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real)
        real = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec exact = converted(until);
    return real(semaphore, &exact);
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!real) {
        // On x86-64, an older function has the same name.
        void *found = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
        if (!found)
            found = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
        real = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))found;
    }
    // A condition may be for the monotonic clock, which counts from the start of the machine.
    struct timespec exact = until->tv_sec < SINCE_1970 ? *until : converted(until);
    return real(condition, mutex, &exact);
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now)
        *now = exact.tv_sec;
    return exact.tv_sec;
}
