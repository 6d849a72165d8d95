/*
 * The safety proof: memory that was freed and handed out again is never touched by work that was submitted before the
 * free, whichever way the program touches it. Each row of safety_access.c is tried as the later access (a slow kernel
 * writes late into the freed block, then the row writes) and, where it can be unfinished at the free, as the earlier
 * one. Readers are tried the other way round: a slow reader of a freed block must still see what was there.
 *
 *   safety [--sizes=4KiB,1MiB] [--spin-us=N] [--only=TEXT] [--expect-reuse]
 *   safety --seconds=N [--seed=S] [--threads=T] [--streams=K] [--may-refuse]   random traffic instead
 *
 * "unfenced" tells whether the row overtakes the slow kernel when nothing is freed between: a row that does not proves
 * little. --expect-reuse fails when fewer than nine in ten blocks came back at the freed address, for then the run has
 * not tried what it is for. Exit status 1 when a word was wrong.
 */
#include "safety_access.h"
#include "safety_soak.h"

#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_SIZES = 8, OLD = 5 };

struct settings {
        size_t sizes[MOST_SIZES];
        size_t size_count;
        uint64_t spin_us;
        const char *only;
        bool expect_reuse;
        struct soak soak;
};

struct row {
        int tried, reused, corrupted;
        bool missing, overtakes;
};

static struct scene scene;
static struct settings settings;
static uint32_t *words; /* the span, on the host */
static double longest_free_us;
static struct {
        int rows, corrupted, missing, blocks, reused, blind;
} totals;

static CUdeviceptr alloc(size_t size)
{
        CUdeviceptr p;

        GR_MUST(cuMemAlloc(&p, size));
        return p;
}

static void release(CUdeviceptr p)
{
        double begin = gt_now_us(), took;

        GR_MUST(cuMemFree(p));
        took = gt_now_us() - begin;
        if (took > longest_free_us)
                longest_free_us = took;
}

/* The part of a block that is written and looked at. */
static size_t span_of(size_t size)
{
        return size < scene.span ? size : scene.span;
}

static void settle(CUstream stream)
{
        GR_MUST(cuCtxSynchronize());
        /* A green context's stream is not the primary context's. */
        GR_MUST(cuStreamSynchronize(stream));
}

/* True when each word (or just the first and the last) is WANT. */
static bool holds(CUdeviceptr p, size_t bytes, uint32_t want, bool ends_only)
{
        size_t count = bytes / 4;

        GR_MUST(cuMemcpyDtoH(words, p, bytes));
        if (ends_only)
                return words[0] == want && words[count - 1] == want;
        for (size_t i = 0; i < count; i++)
                if (words[i] != want)
                        return false;
        return true;
}

/* A graph that fills P, for the row that launches one captured before the free. */
static void prepare_graph(CUdeviceptr p, size_t bytes)
{
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(scene.non_blocking, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(gt_fill(&scene.gt, scene.non_blocking, p, LATER, bytes / 4));
        GR_MUST(cuStreamEndCapture(scene.non_blocking, &graph));
        GR_MUST(cuGraphInstantiate(&scene.ready_graph, graph, 0));
        GR_MUST(cuGraphDestroy(graph));
        scene.ready_at = p;
}

/* A slow kernel writes EARLIER; the row writes LATER into the block's successor, or (unfenced) into the block. */
static void try_later(const struct access *access, size_t size, bool fenced, struct row *row)
{
        size_t bytes = span_of(size);
        CUdeviceptr a = alloc(size), b = a;
        CUstream stream = NULL;
        CUresult result;
        bool good;

        prepare_graph(a, bytes);
        GR_MUST(cuMemsetD32(a, 0, bytes / 4));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(gt_late_fill(&scene.gt, scene.slow, a, EARLIER, bytes / 4, settings.spin_us));
        if (fenced) {
                release(a);
                b = alloc(size);
        }
        result = scene_stream(&scene, access->place, &stream);
        if (result == CUDA_SUCCESS)
                result = access_run(&scene, access, stream, b, bytes, LATER, 0);
        settle(stream);
        if (access_missing(result)) {
                row->missing = true;
        } else {
                if (result != CUDA_SUCCESS)
                        gt_die("%s: %d (%s)", access->name, (int)result, gt_result_name(result));
                good = holds(b, bytes, access_word(access, LATER), access->ends_only);
                if (fenced) {
                        row->tried++;
                        row->reused += a == b;
                        row->corrupted += !good;
                } else {
                        row->overtakes = !good;
                }
        }
        scene_stream_done(access->place, stream);
        GR_MUST(cuGraphExecDestroy(scene.ready_graph));
        scene.ready_graph = NULL;
        GR_MUST(cuMemFree(b));
}

/* The row writes EARLIER behind a slow kernel on its own stream; a kernel on another stream writes LATER. */
static void try_earlier(const struct access *access, size_t size, bool fenced, struct row *row)
{
        size_t bytes = span_of(size);
        CUdeviceptr a = alloc(size), b = a;
        CUstream stream = NULL;
        CUresult result;
        bool good;

        GR_MUST(cuMemsetD32(a, 0, bytes / 4));
        GR_MUST(cuCtxSynchronize());
        result = scene_stream(&scene, access->place, &stream);
        if (result == CUDA_SUCCESS)
                result = access_run(&scene, access, stream, a, bytes, EARLIER, settings.spin_us);
        /* A stream may go while its work is still to come. */
        if (access->place == FRESH || access->place == URGENT) {
                scene_stream_done(access->place, stream);
                stream = NULL;
        }
        if (fenced) {
                release(a);
                b = alloc(size);
        }
        GR_MUST(gt_fill(&scene.gt, scene.slow, b, LATER, bytes / 4));
        settle(stream);
        if (access_missing(result)) {
                row->missing = true;
        } else {
                if (result != CUDA_SUCCESS)
                        gt_die("%s: %d (%s)", access->name, (int)result, gt_result_name(result));
                good = holds(b, bytes, LATER, access->ends_only);
                if (fenced) {
                        row->tried++;
                        row->reused += a == b;
                        row->corrupted += !good;
                } else {
                        row->overtakes = !good;
                }
        }
        GR_MUST(cuMemFree(b));
}

enum reader { COPY_KERNEL, COPY_DEVICE, COPY_HOST, READERS };
static const char *const reader_names[READERS] = {"gr_copy", "DtoDAsync", "DtoHAsync pinned"};

/* A slow reader copies the block away; the row overwrites the successor at once; the copy must be the old contents. */
static void try_reader(enum reader reader, const struct access *access, size_t size, bool fenced, struct row *row)
{
        size_t bytes = span_of(size);
        CUdeviceptr a = alloc(size), b = a, copy = scene.source[0];
        CUstream stream = NULL;
        bool good = true;

        GR_MUST(cuMemsetD32(a, OLD, bytes / 4));
        GR_MUST(cuMemsetD32(copy, 0, bytes / 4));
        memset(scene.pinned[0], 0, bytes);
        GR_MUST(cuCtxSynchronize());
        GR_MUST(gt_spin(&scene.gt, scene.slow, settings.spin_us));
        if (reader == COPY_KERNEL)
                GR_MUST(gt_copy(&scene.gt, scene.slow, copy, a, bytes / 4));
        else if (reader == COPY_DEVICE)
                GR_MUST(cuMemcpyDtoDAsync(copy, a, bytes, scene.slow));
        else
                GR_MUST(cuMemcpyDtoHAsync(scene.pinned[0], a, bytes, scene.slow));
        if (fenced) {
                release(a);
                b = alloc(size);
        }
        GR_MUST(scene_stream(&scene, access->place, &stream));
        GR_MUST(access_run(&scene, access, stream, b, bytes, LATER, 0));
        settle(stream);
        if (reader == COPY_HOST) {
                for (size_t i = 0; i < bytes / 4; i++)
                        good = good && ((uint32_t *)scene.pinned[0])[i] == OLD;
        } else {
                good = holds(copy, bytes, OLD, false);
        }
        if (fenced) {
                row->tried++;
                row->reused += a == b;
                row->corrupted += !good;
        } else {
                row->overtakes = !good;
        }
        scene_stream_done(access->place, stream);
        GR_MUST(cuMemFree(b));
}

static void report(const char *side, const char *name, const struct row *row, bool ordered)
{
        const char *verdict = row->corrupted ? "CORRUPTED" : row->tried ? "ok" : "skipped: not available here";

        totals.rows++;
        totals.blocks += row->tried;
        totals.reused += row->reused;
        totals.corrupted += row->corrupted != 0;
        totals.missing += !row->tried;
        totals.blind += row->tried && !row->overtakes && !ordered;
        printf("%-8s %-46s %5d %7d  %-9s %s\n", side, name, row->tried, row->reused,
               !row->tried      ? "-"
               : row->overtakes ? "overtakes"
               : ordered        ? "ordered"
                                : "waits",
               verdict);
}

static bool wanted(const char *name)
{
        return !settings.only || strstr(name, settings.only);
}

/* The one size that the control and the narrower tables use. */
static size_t middle_size(void)
{
        return settings.sizes[settings.size_count > 1 ? 1 : 0];
}

static void all_rows(void)
{
        printf("%-8s %-46s %5s %7s  %-9s %s\n", "side", "access", "tried", "reused", "unfenced", "verdict");
        for (size_t i = 0; i < access_count; i++) {
                const struct access *access = &accesses[i];
                struct row row = {.tried = 0};

                if (!wanted(access->name))
                        continue;
                try_later(access, middle_size(), false, &row);
                for (size_t s = 0; s < settings.size_count && !row.missing; s++)
                        try_later(access, settings.sizes[s], true, &row);
                /* Behind the slow kernel on its own stream, only a programmatic launch could overtake it. */
                report("later", access->name, &row, access->place == SAME);
        }
        for (size_t i = 0; i < access_count; i++) {
                const struct access *access = &accesses[i];
                struct row row = {.tried = 0};

                if (access->later_only || access->place == NO_STREAM || !wanted(access->name))
                        continue;
                try_earlier(access, middle_size(), false, &row);
                if (!row.missing)
                        try_earlier(access, middle_size(), true, &row);
                report("earlier", access->name, &row, false);
        }
        for (int reader = 0; reader < READERS; reader++) {
                static const char *const overwriters[] = {"kernel, non-blocking stream", "HtoD pageable",
                                                          "cuMemsetD32Async"};

                for (size_t i = 0; i < access_count; i++) {
                        struct row row = {.tried = 0};
                        char name[96];
                        bool used = false;

                        for (size_t o = 0; o < sizeof overwriters / sizeof overwriters[0]; o++)
                                used = used || !strcmp(overwriters[o], accesses[i].name);
                        snprintf(name, sizeof name, "%s, then %s", reader_names[reader], accesses[i].name);
                        if (!used || !wanted(name))
                                continue;
                        try_reader((enum reader)reader, &accesses[i], middle_size(), false, &row);
                        for (size_t s = 0; s < settings.size_count; s++)
                                try_reader((enum reader)reader, &accesses[i], settings.sizes[s], true, &row);
                        report("reader", name, &row, false);
                }
        }
}

static void parse_sizes(char *list)
{
        settings.size_count = 0;
        for (char *size = strtok(list, ","); size; size = strtok(NULL, ",")) {
                size_t bytes = gt_parse_size(size);

                if (settings.size_count == MOST_SIZES || bytes < 4096 || bytes % 4096)
                        gt_die("at most %d sizes, each a multiple of 4096", MOST_SIZES);
                settings.sizes[settings.size_count++] = bytes;
        }
}

static void parse(int argc, char **argv)
{
        static const struct option options[] = {
                {"sizes", required_argument, NULL, 'z'},   {"spin-us", required_argument, NULL, 'u'},
                {"only", required_argument, NULL, 'o'},    {"expect-reuse", no_argument, NULL, 'r'},
                {"seconds", required_argument, NULL, 's'}, {"seed", required_argument, NULL, 'e'},
                {"threads", required_argument, NULL, 't'}, {"streams", required_argument, NULL, 'k'},
                {"may-refuse", no_argument, NULL, 'm'},    {NULL, 0, NULL, 0},
        };
        int option;

        settings.soak = (struct soak){.seed = 1, .threads = 4, .streams = 8};
        while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
                switch (option) {
                case 'z':
                        parse_sizes(optarg);
                        break;
                case 'u':
                        settings.spin_us = strtoull(optarg, NULL, 10);
                        break;
                case 'o':
                        settings.only = optarg;
                        break;
                case 'r':
                        settings.expect_reuse = true;
                        break;
                case 's':
                        settings.soak.seconds = strtod(optarg, NULL);
                        break;
                case 'e':
                        settings.soak.seed = strtoull(optarg, NULL, 10);
                        break;
                case 't':
                        settings.soak.threads = (int)strtol(optarg, NULL, 10);
                        break;
                case 'k':
                        settings.soak.streams = (int)strtol(optarg, NULL, 10);
                        break;
                case 'm':
                        settings.soak.may_refuse = true;
                        break;
                default:
                        exit(2);
                }
        }
}

/* What was not asked for: a simulated device has a slow memory and no spare time. */
static void fill_in(bool simulated)
{
        static const size_t real[] = {4 * KIB, MIB, 3 * MIB, 64 * MIB};
        static const size_t small[] = {4 * KIB, MIB, 3 * MIB};

        if (!settings.spin_us)
                settings.spin_us = simulated ? 4000 : 25000;
        if (settings.size_count)
                return;
        settings.size_count = simulated ? sizeof small / sizeof small[0] : sizeof real / sizeof real[0];
        memcpy(settings.sizes, simulated ? small : real, settings.size_count * sizeof settings.sizes[0]);
}

int main(int argc, char **argv)
{
        bool simulated = gt_simulated();

        parse(argc, argv);
        fill_in(simulated);
        scene_open(&scene, simulated ? 256 * KIB : 64 * MIB);
        if (settings.soak.seconds > 0) {
                settings.soak.touched = simulated ? 16 * KIB : MIB;
                return soak_run(&scene.gt, &settings.soak) ? EXIT_SUCCESS : EXIT_FAILURE;
        }
        words = malloc(scene.span);
        if (!words)
                gt_die("no host memory");
        all_rows();
        free(words);
        printf("%d rows: %d ok, %d corrupted, %d skipped; %d would not have overtaken anyway\n", totals.rows,
               totals.rows - totals.corrupted - totals.missing, totals.corrupted, totals.missing, totals.blind);
        printf("%d of %d blocks came back at the freed address; longest cuMemFree %.0f us\n", totals.reused,
               totals.blocks, longest_free_us);
        if (totals.corrupted)
                return EXIT_FAILURE;
        if (totals.blocks == 0 || (settings.expect_reuse && totals.reused * 10 < totals.blocks * 9)) {
                fprintf(stderr, "safety: too few blocks were reused for this run to prove anything\n");
                return EXIT_FAILURE;
        }
        return EXIT_SUCCESS;
}
