/*
 * What allocating costs, measured the same way for every door into the driver: pair.cu (static and shared cudart) and
 * pair_driver.c hand over their calls, bench.c runs the scenarios and prints them.
 */
#ifndef GR_TEST_BENCH_H
#define GR_TEST_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { BENCH_STREAMS = 8 };

/* The calls under test. All return 0 or the CUDA error, which ends the program with status 1. */
struct bench_ops {
        int (*alloc)(void **ret, size_t bytes);
        int (*release)(void *p);
        /* Stream-ordered allocation on stream 0, or NULL where there is none. */
        int (*alloc_async)(void **ret, size_t bytes);
        int (*release_async)(void *p);
        /* One kernel that is busy for US microseconds and then writes a few words at P. STREAM counts from 0. */
        int (*work)(int stream, void *p, unsigned us);
        int (*synchronize)(void);
};

struct bench_settings {
        const char *program;
        bool json;
        /* Shorter repetitions, sizes up to 64 MiB: for a simulated device or a quick look. */
        bool quick;
};

/* Reads --json and --quick; anything else ends the program with status 2. */
struct bench_settings bench_arguments(int argc, char **argv);
/* Runs all scenarios and prints them. */
void bench_run(const struct bench_settings *settings, const struct bench_ops *ops);
double bench_now_us(void);

#ifdef __cplusplus
}
#endif
#endif
