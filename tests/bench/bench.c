#include "bench.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/json.h"
#include "check.h"

enum { REPETITIONS = 7, MIXED = 256, MOST_RESULTS = 64, MOST_THREADS = 16, WARM_PAIRS = 100, ON_THE_WAY = 64 };
/* Of two that are compared, and differ by hundredths where a processor's pace changes by tenths: more, and shorter. */
enum { TWINS = 2, TWIN_REPETITIONS = 31 };

#define TOO_LONG_US 15e6

struct result {
        const char *name;
        double median, least, most; /* us per operation, over the repetitions */
};

struct bench {
        const struct bench_settings *settings;
        const struct bench_ops *ops;
        struct result results[MOST_RESULTS];
        size_t count;
        void **live; /* of the scenarios that keep many blocks */
        long live_count;
        uint64_t seed;
};

struct scenario {
        const char *group, *name;
        /* Does N operations; P is a block of BYTES that outlives them. Returns the microseconds they took. */
        double (*run)(struct bench *bench, const struct scenario *scenario, long n, void *p);
        size_t bytes;
        long width;  /* how many streams, threads or blocks */
        long step;   /* N is a multiple of it */
        unsigned us; /* of each kernel */
        bool fresh;  /* a new block for each kernel; the next scenario is the same without, and they take turns */
        bool slow;   /* left out of a quick run */
        bool alone;  /* what is handed on is no memory: the price of handing on */
        bool settle; /* longer repetitions, as what each begins with is not what is measured: new threads */
};

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
        int groups = 0;

        for (int i = 1; i < argc; i++) {
                if (!strcmp(argv[i], "--json")) {
                        settings.json = true;
                } else if (!strcmp(argv[i], "--async")) {
                        settings.async = true;
                } else if (!strcmp(argv[i], "--quick")) {
                        settings.quick = true;
                } else if (!strcmp(argv[i], "--gate")) {
                        settings.gate = true;
                } else if (!strncmp(argv[i], "--group=", 8) && groups < BENCH_GROUPS) {
                        settings.groups[groups++] = argv[i] + 8;
                } else {
                        fprintf(stderr, "%s: unknown argument %s (known: --json --async --quick --gate --group=NAME)\n",
                                settings.program, argv[i]);
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

static double since(const struct bench *bench, double begin)
{
        must(bench->ops->synchronize(), "synchronize");
        return bench_now_us() - begin;
}

static double pairs(struct bench *bench, const struct scenario *scenario, long n, void *p)
{
        double begin = bench_now_us();

        for (long i = 0; i < n; i++) {
                must(bench->ops->alloc(&p, scenario->bytes, 0), "alloc");
                must(bench->ops->release(p, 0), "free");
        }
        return since(bench, begin);
}

static double pinned(struct bench *bench, const struct scenario *scenario, long n, void *p)
{
        double begin = bench_now_us();

        for (long i = 0; i < n; i++) {
                must(bench->ops->alloc_pinned(&p, scenario->bytes), "alloc pinned");
                must(bench->ops->release_pinned(p), "free pinned");
        }
        return since(bench, begin);
}

/* Many blocks of different sizes at once: N counts blocks. */
static double mixed(struct bench *bench, const struct scenario *scenario, long n, void *p)
{
        double begin = bench_now_us();
        void *live[MIXED];

        (void)p;
        for (long done = 0; done < n; done += MIXED) {
                for (size_t i = 0; i < MIXED; i++)
                        must(bench->ops->alloc(&live[i], (i + 1) * scenario->bytes, 0), "alloc");
                for (size_t i = 0; i < MIXED; i++)
                        must(bench->ops->release(live[i], 0), "free");
        }
        return since(bench, begin);
}

static double kernels(struct bench *bench, const struct scenario *scenario, long n, void *p)
{
        double begin = bench_now_us();

        for (long i = 0; i < n; i++) {
                int stream = scenario->width > 1 ? 1 + (int)(i % scenario->width) : 0;

                if (scenario->fresh)
                        must(bench->ops->alloc(&p, scenario->bytes, stream), "alloc");
                must(bench->ops->work(stream, p, scenario->us), "kernel");
                if (scenario->fresh)
                        must(bench->ops->release(p, stream), "free");
        }
        return since(bench, begin);
}

/* Short kernels on one stream while another always has a longer one to do. */
static double beside_work(struct bench *bench, const struct scenario *scenario, long n, void *p)
{
        double begin = bench_now_us();
        void *kept = p;

        for (long i = 0; i < n; i++) {
                if (i % 16 == 0)
                        must(bench->ops->work(2, kept, scenario->us), "kernel");
                if (scenario->fresh)
                        must(bench->ops->alloc(&p, scenario->bytes, 1), "alloc");
                must(bench->ops->work(1, p, 0), "kernel");
                if (scenario->fresh)
                        must(bench->ops->release(p, 1), "free");
        }
        return since(bench, begin);
}

/* Blocks on their way from the thread that allocates them to the one that frees them. */
struct passage {
        _Alignas(64) _Atomic long put;
        _Alignas(64) _Atomic long taken;
        void *blocks[ON_THE_WAY];
};

struct worker {
        struct bench *bench;
        struct passage *in, *out; /* NULL: it frees what it allocates */
        pthread_barrier_t *start;
        size_t bytes;
        int stream;
        bool alone;
        long n;
        double begin_us, end_us;
};

/* Hands p on to the next thread, and takes a block from the one before. */
static void *exchange(struct worker *worker, void *p)
{
        long put = atomic_load(&worker->out->put), taken = atomic_load(&worker->in->taken);

        while (put - atomic_load_explicit(&worker->out->taken, memory_order_acquire) == ON_THE_WAY)
                sched_yield();
        worker->out->blocks[put % ON_THE_WAY] = p;
        atomic_store_explicit(&worker->out->put, put + 1, memory_order_release);
        while (atomic_load_explicit(&worker->in->put, memory_order_acquire) == taken)
                sched_yield();
        p = worker->in->blocks[taken % ON_THE_WAY];
        atomic_store_explicit(&worker->in->taken, taken + 1, memory_order_release);
        return p;
}

static void *worker_run(void *data)
{
        struct worker *worker = data;
        const struct bench_ops *ops = worker->bench->ops;
        void *p = worker;

        must(ops->attach(), "attach");
        for (long i = -WARM_PAIRS; i < worker->n; i++) {
                if (i == 0) {
                        pthread_barrier_wait(worker->start);
                        worker->begin_us = bench_now_us();
                }
                if (!worker->alone)
                        must(ops->alloc(&p, worker->bytes, worker->stream), "alloc");
                if (worker->out)
                        p = exchange(worker, p);
                if (!worker->alone)
                        must(ops->release(p, worker->stream), "free");
        }
        worker->end_us = bench_now_us();
        return NULL;
}

/* N counts the pairs of each thread, each of its own size and stream. The time is what a thread took on average. */
static double run_threads(struct bench *bench, const struct scenario *scenario, long n, struct passage *passages)
{
        struct worker workers[MOST_THREADS];
        pthread_t ids[MOST_THREADS];
        pthread_barrier_t start;
        double sum_us = 0;

        pthread_barrier_init(&start, NULL, (unsigned)scenario->width);
        for (int i = 0; i < scenario->width; i++) {
                workers[i] = (struct worker){
                        .bench = bench, .start = &start, .n = n, .stream = i + 1, .alone = scenario->alone};
                workers[i].bytes = scenario->bytes * (size_t)(i + 1);
                if (passages) {
                        workers[i].in = &passages[i];
                        workers[i].out = &passages[(i + 1) % scenario->width];
                }
                if (pthread_create(&ids[i], NULL, worker_run, &workers[i])) {
                        fprintf(stderr, "bench: no thread\n");
                        exit(EXIT_FAILURE);
                }
        }
        for (int i = 0; i < scenario->width; i++)
                pthread_join(ids[i], NULL);
        pthread_barrier_destroy(&start);
        for (int i = 0; i < scenario->width; i++)
                sum_us += workers[i].end_us - workers[i].begin_us;
        return sum_us / (double)scenario->width;
}

static double threads(struct bench *bench, const struct scenario *scenario, long n, void *p)
{
        (void)p;
        return run_threads(bench, scenario, n, NULL);
}

/* Each thread frees what the one before it allocated. */
static double handed_on(struct bench *bench, const struct scenario *scenario, long n, void *p)
{
        struct passage passages[MOST_THREADS] = {0};

        (void)p;
        return run_threads(bench, scenario, n, passages);
}

static uint64_t random_number(struct bench *bench)
{
        bench->seed ^= bench->seed << 13;
        bench->seed ^= bench->seed >> 7;
        bench->seed ^= bench->seed << 17;
        return bench->seed;
}

/*
 * Random ones of width live blocks replaced: N counts the frees, each with an allocation after it. Below 0: to have so
 * many takes this allocator too long.
 */
static double among_live(struct bench *bench, const struct scenario *scenario, long n, void *p)
{
        double begin = bench_now_us();

        (void)p;
        if (bench->live_count < scenario->width) {
                bench->live = realloc(bench->live, (size_t)scenario->width * sizeof *bench->live);
                must(!bench->live, "realloc");
        }
        while (bench->live_count < scenario->width) {
                must(bench->ops->alloc(&bench->live[bench->live_count++],
                                       scenario->bytes * (1 + random_number(bench) % 8), 0),
                     "alloc");
                if (bench_now_us() - begin > TOO_LONG_US)
                        return -1;
        }
        begin = bench_now_us();
        for (long i = 0; i < n; i++) {
                void **place = &bench->live[random_number(bench) % (uint64_t)scenario->width];

                must(bench->ops->release(*place, 0), "free");
                must(bench->ops->alloc(place, scenario->bytes * (1 + random_number(bench) % 8), 0), "alloc");
        }
        return since(bench, begin);
}

static const struct scenario scenarios[] = {
        {"pairs", "pair 4 KiB", pairs, 4 * KIB, .step = 8},
        {"pairs", "pair 64 KiB", pairs, 64 * KIB, .step = 8},
        {"pairs", "pair 1 MiB", pairs, MIB, .step = 8},
        {"pairs", "pair 3 MiB", pairs, 3 * MIB, .step = 8},
        {"pairs", "pair 20 MiB", pairs, 20 * MIB, .step = 8},
        {"pairs", "pair 64 MiB", pairs, 64 * MIB, .step = 8},
        {"pairs", "pair 256 MiB", pairs, 256 * MIB, .step = 8, .slow = true},
        {"pairs", "pair 1 GiB", pairs, 1024 * MIB, .step = 8, .slow = true},
        {"mixed", "256 live, 4 KiB to 1 MiB", mixed, 4 * KIB, .step = MIXED},
        /* On the default stream, in a program that made no other so far. */
        {"loops", "malloc + kernel + free", kernels, MIB, 1, 64, 0, true},
        {"loops", "kernel alone", kernels, MIB, 1, 64, 0, false},
        {"loops", "malloc + 10 us kernel + free", kernels, MIB, 1, 64, 10, true},
        {"loops", "10 us kernel alone", kernels, MIB, 1, 64, 10, false},
        {"loops", "1 stream, 100 us kernels, fresh", kernels, MIB, 1, 64, 100, true},
        {"loops", "1 stream, 100 us kernels alone", kernels, MIB, 1, 64, 100, false},
        {"overlap", "8 streams, 100 us kernels, fresh", kernels, MIB, 8, 512, 100, true},
        {"overlap", "8 streams, 100 us kernels alone", kernels, MIB, 8, 512, 100, false},
        {"overlap", "beside 100 us kernels, fresh", beside_work, MIB, 1, 64, 100, true},
        {"overlap", "beside 100 us kernels, kernel alone", beside_work, MIB, 1, 64, 100, false},
        {"live", "10 live blocks", among_live, 512, 10, 64},
        {"live", "100 live blocks", among_live, 512, 100, 64},
        {"live", "1000 live blocks", among_live, 512, 1000, 64},
        {"live", "10000 live blocks", among_live, 512, 10000, 64},
        {"live", "100000 live blocks", among_live, 512, 100000, 64},
        {"live", "1000000 live blocks", among_live, 512, 1000000, 64, .slow = true},
        {"threads", "1 thread", threads, 64 * KIB, 1, 64, .settle = true},
        {"threads", "2 threads", threads, 64 * KIB, 2, 64, .settle = true},
        {"threads", "4 threads", threads, 64 * KIB, 4, 64, .settle = true},
        {"threads", "8 threads", threads, 64 * KIB, 8, 64, .settle = true},
        {"threads", "16 threads", threads, 64 * KIB, 16, 64, .settle = true},
        {"handed", "handed on, 1 thread", handed_on, 64 * KIB, 1, 64, .settle = true},
        {"handed", "handed on, 2 threads", handed_on, 64 * KIB, 2, 64, .settle = true},
        {"handed", "handing on alone, 2 threads", handed_on, 64 * KIB, 2, 64, .settle = true, .alone = true},
        {"handed", "handed on, 4 threads", handed_on, 64 * KIB, 4, 64, .settle = true},
        {"handed", "handing on alone, 4 threads", handed_on, 64 * KIB, 4, 64, .settle = true, .alone = true},
        {"handed", "handed on, 8 threads", handed_on, 64 * KIB, 8, 64, .settle = true},
        {"handed", "handing on alone, 8 threads", handed_on, 64 * KIB, 8, 64, .settle = true, .alone = true},
        {"handed", "handed on, 16 threads", handed_on, 64 * KIB, 16, 64, .settle = true},
        {"handed", "handing on alone, 16 threads", handed_on, 64 * KIB, 16, 64, .settle = true, .alone = true},
        {"alone", "one thread", threads, 64 * KIB, 1, 64, .settle = true},
        {"streams", "2 streams, fresh", kernels, MIB, 2, 64, 0, true},
        {"streams", "2 streams alone", kernels, MIB, 2, 64, 0, false},
        {"streams", "4 streams, fresh", kernels, MIB, 4, 64, 0, true},
        {"streams", "4 streams alone", kernels, MIB, 4, 64, 0, false},
        {"streams", "8 streams, fresh", kernels, MIB, 8, 64, 0, true},
        {"streams", "8 streams alone", kernels, MIB, 8, 64, 0, false},
        {"streams", "16 streams, fresh", kernels, MIB, 16, 64, 0, true},
        {"streams", "16 streams alone", kernels, MIB, 16, 64, 0, false},
        {"streams", "32 streams, fresh", kernels, MIB, 32, 64, 0, true},
        {"streams", "32 streams alone", kernels, MIB, 32, 64, 0, false},
        {"streams", "64 streams, fresh", kernels, MIB, 64, 64, 0, true},
        {"streams", "64 streams alone", kernels, MIB, 64, 64, 0, false},
        {"pinned", "pinned 64 KiB", pinned, 64 * KIB, .step = 1},
        {"pinned", "pinned 1 MiB", pinned, MIB, .step = 1},
        {"pinned", "pinned 64 MiB", pinned, 64 * MIB, .step = 1},
};

_Static_assert(sizeof scenarios / sizeof scenarios[0] <= MOST_RESULTS, "there is room for all results");

static bool wanted(const struct bench_settings *settings, const struct scenario *scenario)
{
        static const char *const usual[] = {"pairs", "mixed", "loops", "overlap", NULL};

        for (const char *const *group = settings->groups[0] ? settings->groups : usual; *group; group++)
                if (!strcmp(*group, scenario->group))
                        return !scenario->slow || !settings->quick;
        return false;
}

static int by_value(const void *a, const void *b)
{
        const double *x = a, *y = b;

        return (*x > *y) - (*x < *y);
}

/* How many operations make one repetition; 0: it takes this allocator too long. */
static long enough(struct bench *bench, const struct scenario *scenario, bool twin, void *p)
{
        double enough_us = bench->settings->quick || twin ? 4000 : scenario->settle ? 100000 : 10000;
        long n = scenario->step;
        double took;

        /* The first round may take what no later one does, and says nothing of how many are enough for the clock. */
        took = scenario->run(bench, scenario, n, p);
        while (took >= 0 && (took = scenario->run(bench, scenario, n, p)) >= 0 && took < enough_us && n < 10000000)
                n *= 2;
        return took < 0 ? 0 : n;
}

/* Count scenarios, whose repetitions take turns: a processor that changes its pace does so for all of them. */
static void measure(struct bench *bench, const struct scenario *scenario, size_t count)
{
        int repetitions = count > 1 && !bench->settings->quick ? TWIN_REPETITIONS : REPETITIONS;
        double us[TWINS][TWIN_REPETITIONS];
        long n[TWINS];
        void *p[TWINS];

        for (size_t i = 0; i < count; i++) {
                must(bench->ops->alloc(&p[i], scenario[i].bytes, 0), "alloc");
                n[i] = enough(bench, &scenario[i], count > 1, p[i]);
        }
        for (int repetition = 0; repetition < repetitions; repetition++)
                for (size_t i = 0; i < count; i++)
                        if (n[i] > 0)
                                us[i][repetition] = scenario[i].run(bench, &scenario[i], n[i], p[i]) / (double)n[i];
        for (size_t i = 0; i < count; i++) {
                must(bench->ops->release(p[i], 0), "free");
                if (n[i] == 0)
                        continue;
                qsort(us[i], (size_t)repetitions, sizeof us[i][0], by_value);
                bench->results[bench->count++] =
                        (struct result){scenario[i].name, us[i][repetitions / 2], us[i][0], us[i][repetitions - 1]};
        }
}

static void print_table(const struct bench *bench)
{
        printf("%s: us per operation, median of the repetitions (least .. most)\n", bench->settings->program);
        for (size_t i = 0; i < bench->count; i++)
                printf("  %-36s %10.3f  (%.3f .. %.3f)\n", bench->results[i].name, bench->results[i].median,
                       bench->results[i].least, bench->results[i].most);
}

static void print_json(const struct bench *bench)
{
        struct gr_json json;

        gr_json_begin(&json, gr_sink_file, stdout, 2);
        gr_json_object(&json, NULL);
        gr_json_number(&json, "schema", "1");
        gr_json_string(&json, "program", bench->settings->program);
        gr_json_string(&json, "unit", "us");
        gr_json_object(&json, "results");
        for (size_t i = 0; i < bench->count; i++) {
                gr_json_object(&json, bench->results[i].name);
                gr_json_number(&json, "median", "%.4f", bench->results[i].median);
                gr_json_number(&json, "least", "%.4f", bench->results[i].least);
                gr_json_number(&json, "most", "%.4f", bench->results[i].most);
                gr_json_close(&json);
        }
        gr_json_close(&json);
        gr_json_close(&json);
        gr_json_end(&json);
}

void bench_run(const struct bench_settings *settings, const struct bench_ops *ops)
{
        struct bench bench = {.settings = settings, .ops = ops, .seed = 1};
        void *p;

        if (settings->gate) {
                must(ops->alloc(&p, MIB, 0), "alloc");
                must(ops->release(p, 0), "free");
                puts("ready");
                fflush(stdout);
                getchar();
        }
        for (size_t i = 0, count; i < sizeof scenarios / sizeof scenarios[0]; i += count) {
                count = scenarios[i].fresh ? TWINS : 1;
                if (wanted(settings, &scenarios[i]))
                        measure(&bench, &scenarios[i], count);
        }
        for (long i = 0; i < bench.live_count; i++)
                must(ops->release(bench.live[i], 0), "free");
        free(bench.live);
        must(ops->synchronize(), "synchronize");
        if (bench.count == 0) {
                fprintf(stderr, "bench: no such group\n");
                exit(2);
        }
        if (settings->json)
                print_json(&bench);
        else
                print_table(&bench);
}
