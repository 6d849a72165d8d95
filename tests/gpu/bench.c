#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { REPETITIONS = 7, LIVE = 256, MOST_RESULTS = 40 };

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)

struct result {
        char name[48];
        double median, least, most; /* us per operation, over the repetitions */
};

struct bench {
        const struct bench_settings *settings;
        const struct bench_ops *ops;
        struct result results[MOST_RESULTS];
        size_t count;
};

/* One repetition: N operations of one scenario. P is a block that outlives it. */
typedef void (*scenario)(const struct bench *bench, size_t bytes, long n, void *p);

double bench_now_us(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

struct bench_settings bench_arguments(int argc, char **argv)
{
        const char *slash = strrchr(argv[0], '/');
        struct bench_settings settings = {.program = slash ? slash + 1 : argv[0]};

        for (int i = 1; i < argc; i++) {
                if (!strcmp(argv[i], "--json")) {
                        settings.json = true;
                } else if (!strcmp(argv[i], "--quick")) {
                        settings.quick = true;
                } else {
                        fprintf(stderr, "%s: unknown argument %s (known: --json --quick)\n", settings.program, argv[i]);
                        exit(2);
                }
        }
        return settings;
}

static void must(int error, const char *what)
{
        if (!error)
                return;
        fprintf(stderr, "bench: %s failed with CUDA error %d\n", what, error);
        exit(EXIT_FAILURE);
}

static void pairs(const struct bench *bench, size_t bytes, long n, void *p)
{
        for (long i = 0; i < n; i++) {
                must(bench->ops->alloc(&p, bytes), "alloc");
                must(bench->ops->release(p), "free");
        }
}

static void async_pairs(const struct bench *bench, size_t bytes, long n, void *p)
{
        for (long i = 0; i < n; i++) {
                must(bench->ops->alloc_async(&p, bytes), "alloc async");
                must(bench->ops->release_async(p), "free async");
        }
}

/* Many blocks of different sizes at once: N counts blocks. */
static void mixed(const struct bench *bench, size_t bytes, long n, void *p)
{
        void *live[LIVE];

        (void)p;
        for (long done = 0; done < n; done += LIVE) {
                for (size_t i = 0; i < LIVE; i++)
                        must(bench->ops->alloc(&live[i], (i + 1) * bytes), "alloc");
                for (size_t i = 0; i < LIVE; i++)
                        must(bench->ops->release(live[i]), "free");
        }
}

static void kernel_loop(const struct bench *bench, size_t bytes, long n, void *p, int streams, unsigned us, bool fresh)
{
        for (long i = 0; i < n; i++) {
                if (fresh)
                        must(bench->ops->alloc(&p, bytes), "alloc");
                must(bench->ops->work((int)(i % streams), p, us), "kernel");
                if (fresh)
                        must(bench->ops->release(p), "free");
        }
}

/* Scenarios with a kernel between, and the same kernels on one block for comparison. */
#define KERNEL_LOOP(name, streams, us, fresh)                                                                          \
        static void name(const struct bench *bench, size_t bytes, long n, void *p)                                     \
        {                                                                                                              \
                kernel_loop(bench, bytes, n, p, streams, us, fresh);                                                   \
        }
KERNEL_LOOP(short_kernel, 1, 0, true)
KERNEL_LOOP(short_kernel_alone, 1, 0, false)
KERNEL_LOOP(kernel_10us, 1, 10, true)
KERNEL_LOOP(kernel_10us_alone, 1, 10, false)
KERNEL_LOOP(one_stream_100us, 1, 100, true)
KERNEL_LOOP(one_stream_100us_alone, 1, 100, false)
KERNEL_LOOP(eight_streams_100us, BENCH_STREAMS, 100, true)
KERNEL_LOOP(eight_streams_100us_alone, BENCH_STREAMS, 100, false)

static double timed(const struct bench *bench, scenario run, size_t bytes, long n, void *p)
{
        double begin = bench_now_us();

        run(bench, bytes, n, p);
        must(bench->ops->synchronize(), "synchronize");
        return bench_now_us() - begin;
}

static int by_value(const void *a, const void *b)
{
        const double *x = a, *y = b;

        return (*x > *y) - (*x < *y);
}

static void measure(struct bench *bench, const char *name, scenario run, size_t bytes, long step)
{
        double enough_us = bench->settings->quick ? 4000 : 20000;
        double us[REPETITIONS];
        struct result *result = &bench->results[bench->count++];
        long n = step;
        void *p;

        must(bench->ops->alloc(&p, bytes), "alloc");
        /* Enough operations for the clock, few enough for the slowest driver; the first rounds also warm up. */
        while (timed(bench, run, bytes, n, p) < enough_us && n < 1000000)
                n *= 2;
        for (int i = 0; i < REPETITIONS; i++)
                us[i] = timed(bench, run, bytes, n, p) / (double)n;
        must(bench->ops->release(p), "free");
        qsort(us, REPETITIONS, sizeof us[0], by_value);
        snprintf(result->name, sizeof result->name, "%s", name);
        result->median = us[REPETITIONS / 2];
        result->least = us[0];
        result->most = us[REPETITIONS - 1];
}

static void print_table(const struct bench *bench)
{
        printf("%s: us per operation, median of %d repetitions (least .. most)\n", bench->settings->program,
               REPETITIONS);
        for (size_t i = 0; i < bench->count; i++)
                printf("  %-36s %10.3f  (%.3f .. %.3f)\n", bench->results[i].name, bench->results[i].median,
                       bench->results[i].least, bench->results[i].most);
}

static void print_json(const struct bench *bench)
{
        printf("{\"schema\": 1, \"program\": \"%s\", \"unit\": \"us\", \"repetitions\": %d, \"results\": {",
               bench->settings->program, REPETITIONS);
        for (size_t i = 0; i < bench->count; i++)
                printf("%s\n  \"%s\": {\"median\": %.4f, \"least\": %.4f, \"most\": %.4f}", i ? "," : "",
                       bench->results[i].name, bench->results[i].median, bench->results[i].least,
                       bench->results[i].most);
        printf("\n}}\n");
}

void bench_run(const struct bench_settings *settings, const struct bench_ops *ops)
{
        static const struct {
                const char *name;
                size_t bytes;
                bool slow;
        } sizes[] = {
                {"pair 4 KiB", 4 * KIB, false},    {"pair 64 KiB", 64 * KIB, false}, {"pair 1 MiB", MIB, false},
                {"pair 3 MiB", 3 * MIB, false},    {"pair 20 MiB", 20 * MIB, false}, {"pair 64 MiB", 64 * MIB, false},
                {"pair 256 MiB", 256 * MIB, true}, {"pair 1 GiB", 1024 * MIB, true},
        };
        static const struct {
                const char *name;
                scenario run;
                long step;
        } loops[] = {
                {"malloc + kernel + free", short_kernel, 64},
                {"kernel alone", short_kernel_alone, 64},
                {"malloc + 10 us kernel + free", kernel_10us, 64},
                {"10 us kernel alone", kernel_10us_alone, 64},
                {"1 stream, 100 us kernels, fresh", one_stream_100us, 64},
                {"1 stream, 100 us kernels alone", one_stream_100us_alone, 64},
                {"8 streams, 100 us kernels, fresh", eight_streams_100us, 512},
                {"8 streams, 100 us kernels alone", eight_streams_100us_alone, 512},
        };
        struct bench bench = {.settings = settings, .ops = ops};

        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
                if (!sizes[i].slow || !settings->quick)
                        measure(&bench, sizes[i].name, pairs, sizes[i].bytes, 8);
        measure(&bench, "256 live, 4 KiB to 1 MiB", mixed, 4 * KIB, LIVE);
        for (size_t i = 0; i < sizeof loops / sizeof loops[0]; i++)
                measure(&bench, loops[i].name, loops[i].run, MIB, loops[i].step);
        if (ops->alloc_async)
                measure(&bench, "async pair 1 MiB", async_pairs, MIB, 64);
        if (settings->json)
                print_json(&bench);
        else
                print_table(&bench);
}
