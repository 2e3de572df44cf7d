/* Preloaded: every write to a file that may be sought, and every wait for the disk, takes WK_SLOW_TIMES times as
   long as it took, a wait for the disk no less than WK_SLOW_SYNC_MS milliseconds. Nothing is lost or changed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

static double told(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text ? atof(text) : otherwise;
}

static void longer(double began, double least) {
    int kept = errno;
    double took = now() - began, more = took * (told("WK_SLOW_TIMES", 10.0) - 1.0);
    if (more < least - took) more = least - took;
    if (more > 0) {
        struct timespec rest = {(time_t)more, (long)((more - (time_t)more) * 1e9)};
        while (nanosleep(&rest, &rest) && errno == EINTR) {}
    }
    errno = kept;
}

#define SYNC(NAME)                                                        \
    int NAME(int file) {                                                  \
        static int (*real)(int);                                          \
        if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, #NAME);          \
        double began = now();                                             \
        int result = real(file);                                          \
        longer(began, told("WK_SLOW_SYNC_MS", 0.0) * 1e-3);               \
        return result;                                                    \
    }

#define WRITE(NAME, PLACE)                                                                          \
    ssize_t NAME(int file, const void *bytes, size_t size, PLACE at) {                              \
        static ssize_t (*real)(int, const void *, size_t, PLACE);                                   \
        if (!real) real = (ssize_t(*)(int, const void *, size_t, PLACE))dlsym(RTLD_NEXT, #NAME);    \
        double began = now();                                                                       \
        ssize_t result = real(file, bytes, size, at);                                               \
        longer(began, 0.0);                                                                         \
        return result;                                                                              \
    }

SYNC(fsync)
SYNC(fdatasync)
WRITE(pwrite, off_t)
WRITE(pwrite64, off64_t)
