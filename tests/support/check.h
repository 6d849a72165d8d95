/*
 * Checks for test programs, without and with CUDA. GR_CHECK prints where it failed and goes on; main ends with
 * `return GR_CHECK_RESULT();`, 1 where any failed, in whichever file of the program. From one thread at a time. GR_MUST
 * ends the process with status 99, without its exit handlers, where a call did not return 0.
 */
#ifndef GR_CHECK_H
#define GR_CHECK_H

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

__attribute__((weak)) int gr_check_failures; /* one for all files of a program */

#define GR_CHECK(expr)                                                                                                 \
        do {                                                                                                           \
                if (!(expr)) {                                                                                         \
                        fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #expr);                             \
                        gr_check_failures++;                                                                           \
                }                                                                                                      \
        } while (0)

/* Integers of at most 64 bits, compared as such: do not mix a negative number with an unsigned one. */
#define GR_CHECK_EQ(a, b)                                                                                              \
        do {                                                                                                           \
                const long long gr_a = (long long)(a), gr_b = (long long)(b);                                          \
                if (gr_a != gr_b) {                                                                                    \
                        fprintf(stderr, "%s:%d: failed: %s == %s (%lld, %lld)\n", __FILE__, __LINE__, #a, #b, gr_a,    \
                                gr_b);                                                                                 \
                        gr_check_failures++;                                                                           \
                }                                                                                                      \
        } while (0)

#define GR_CHECK_STR(a, b)                                                                                             \
        do {                                                                                                           \
                const char *gr_a = (a), *gr_b = (b);                                                                   \
                if (strcmp(gr_a, gr_b) != 0) {                                                                         \
                        fprintf(stderr, "%s:%d: failed: %s is \"%s\", not \"%s\"\n", __FILE__, __LINE__, #a, gr_a,     \
                                gr_b);                                                                                 \
                        gr_check_failures++;                                                                           \
                }                                                                                                      \
        } while (0)

/* Whether a limit on addresses that is passed is kept: an emulator lets the process take all memory there is. */
static inline int gr_check_addresses_limited(void)
{
        return mmap(NULL, MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED;
}

/* For calls that return 0, or the code of what failed. */
#define GR_MUST(...) gr_check_must((int)(__VA_ARGS__), #__VA_ARGS__, __FILE__, __LINE__)

static inline void gr_check_must(int result, const char *call, const char *file, int line)
{
        if (result == 0)
                return;
        fflush(stdout);
        fprintf(stderr, "%s:%d: %s returned %d\n", file, line, call, result);
        _Exit(99);
}

#define GR_CHECK_RESULT() (gr_check_failures != 0)

/* Memory that nothing can read or write: behind the last element that a walk along a list may touch. */
static inline void *gr_check_wall(void)
{
        static void *wall;

        if (!wall)
                wall = mmap(NULL, 1 << 16, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return wall;
}

#endif
