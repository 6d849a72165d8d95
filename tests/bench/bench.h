/*
 * What allocating costs, measured the same way for every door into the driver: pair.cu (static and shared cudart) and
 * pair_driver.c hand over their calls, bench.c runs the scenarios and prints them. scripts/bench runs them all.
 */
#ifndef GR_TEST_BENCH_H
#define GR_TEST_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Streams 1 to 64 are non-blocking ones, made when they are first used; 0 is the default stream. */
enum { BENCH_STREAMS = 64, BENCH_GROUPS = 16 };

/* The calls under test, from any thread after attach. All return 0 or the CUDA error, which ends the program. */
struct bench_ops {
        int (*attach)(void);
        /* STREAM counts only where --async asks for stream-ordered memory. */
        int (*alloc)(void **ret, size_t bytes, int stream);
        int (*release)(void *p, int stream);
        int (*alloc_pinned)(void **ret, size_t bytes);
        int (*release_pinned)(void *p);
        /* One kernel that is busy for US microseconds and then writes a few words at P. */
        int (*work)(int stream, void *p, unsigned us);
        int (*synchronize)(void);
};

struct bench_settings {
        const char *program;
        const char *groups[BENCH_GROUPS + 1]; /* those asked for, ends with NULL; none: the usual ones */
        bool json;
        /* Stream-ordered memory of the driver's own pool, which keeps all it gets. */
        bool async;
        /* Shorter repetitions, without the dearest scenarios: for a simulated device or a quick look. */
        bool quick;
        /* Says "ready" once CUDA is there, and waits for a line of input: for several of them at the same time. */
        bool gate;
};

/* Reads --json, --async, --quick, --gate and --group=NAME; anything else ends the program with status 2. */
struct bench_settings bench_arguments(int argc, char **argv);
/* Runs the groups of scenarios and prints them. */
void bench_run(const struct bench_settings *settings, const struct bench_ops *ops);
double bench_now_us(void);

#ifdef __cplusplus
}
#endif
#endif
