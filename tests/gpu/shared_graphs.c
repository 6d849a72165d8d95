/*
 * GPURECLAIM_GRAPH_ARENA=shared: a graph for each of many sizes, captured in any order, takes little more memory than
 * the largest alone, all of them give the right results one after the other, and other memory is never theirs. When the
 * graphs have gone, the memory goes back. Under the shim only. Each row says what it saw, and the status is 1 if one is
 * bad.
 *
 *   shared_graphs [--private]   --private: without that setting; then memory for many sizes must be seen to pile up
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpureclaim.h"
#include "gputest.h"

enum { SIZES = 64, STEPS = 4, EAGER = 8, ROUNDS = 2, BATCHES = 128 };
enum order { ASCENDING, DESCENDING, SHUFFLED, ORDERS };
enum use { FREED_INSIDE, FREED_AFTER, FORKED, USES };

static const char *const order_names[] = {"ascending", "descending", "shuffled"};
static const char *const use_names[] = {"freed inside", "freed after", "with a fork"};

static struct gt gt;
static CUstream stream, side;
static CUevent event;
static CUdeviceptr results;         /* a word for each step of the graph that ran last */
static int bad, size_count = SIZES; /* fewer on the simulated device, which is slow */
static uint64_t seed = 1;
static CUgraphExec execs[SIZES];
static CUdeviceptr outputs[SIZES];

static void row(bool good, const char *name)
{
        printf("%s: %s\n", name, good ? "ok" : "BAD");
        bad += !good;
}

static struct gpureclaim_status status(void)
{
        struct gpureclaim_status status = {.struct_bytes = sizeof status};
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_status");
        gpureclaim_status_function *get;

        memcpy(&get, &found, sizeof get);
        if (!get || get(0, &status))
                gt_die("no library, or no figures");
        return status;
}

static void reclaim(void)
{
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_reclaim");
        gpureclaim_reclaim_function *call;

        memcpy(&call, &found, sizeof call);
        GR_MUST(cuCtxSynchronize());
        if (call(0, "sync", 0) < 0)
                gt_die("gpureclaim_reclaim");
}

static void join(CUstream follower, CUstream leader)
{
        GR_MUST(cuEventRecord(event, leader));
        GR_MUST(cuStreamWaitEvent(follower, event, 0));
}

/* A step of the graph of size n: a large block and a smaller one, of which two words are left in the results. */
static void step(int n, int i, CUdeviceptr small, CUstream to)
{
        size_t large_bytes = (size_t)n * MIB, bytes = (size_t)n * 300 * KIB;
        CUdeviceptr large, p;

        GR_MUST(cuMemAlloc(&large, large_bytes));
        GR_MUST(gt_fill(&gt, to, large, (uint32_t)(n * STEPS + i), large_bytes / 4));
        GR_MUST(cuMemAlloc(&p, bytes));
        GR_MUST(gt_copy(&gt, to, p, large, bytes / 4));
        GR_MUST(cuMemFree(large));
        GR_MUST(gt_copy(&gt, to, small + (CUdeviceptr)i * 4, p + bytes - 4, 1));
        GR_MUST(cuMemFree(p));
}

/* Captures the graph of size n, 1 and more. Its output, the words of all steps, goes to outputs[n - 1]. */
static void capture(int n, enum use use)
{
        CUdeviceptr small, output = 0;
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemAlloc(&small, STEPS * 4 + (size_t)n * 100));
        GR_MUST(cuMemAlloc(&output, (size_t)n * 40 * KIB));
        for (int i = 0; i < STEPS; i++) {
                bool aside = use == FORKED && i % 2;

                if (aside)
                        join(side, stream);
                step(n, i, small, aside ? side : stream);
                if (aside)
                        join(stream, side);
        }
        GR_MUST(gt_copy(&gt, stream, output, small, STEPS));
        GR_MUST(gt_copy(&gt, stream, results, output, STEPS));
        GR_MUST(cuMemFree(small));
        if (use != FREED_AFTER)
                GR_MUST(cuMemFree(output));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        if (use == FREED_AFTER)
                GR_MUST(cuMemFree(output));
        outputs[n - 1] = output;
        GR_MUST(cuGraphInstantiate(&execs[n - 1], graph, 0));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuCtxSynchronize());
}

static void forget(int n)
{
        GR_MUST(cuGraphExecDestroy(execs[n - 1]));
}

/* What the graph of size n says: its results, and that no other memory has changed. */
static unsigned wrong_words(int n)
{
        uint32_t words[STEPS] = {0};
        CUdeviceptr others[EAGER];
        size_t bytes[EAGER];
        unsigned wrong = 0;

        for (int i = 0; i < EAGER; i++) {
                bytes[i] = (1 + gt_random(&seed) % (4 * MIB)) / 4 * 4 + 4;
                GR_MUST(cuMemAlloc(&others[i], bytes[i]));
                GR_MUST(cuMemsetD32(others[i], (unsigned)i, bytes[i] / 4));
        }
        GR_MUST(cuMemsetD32Async(results, 0, STEPS, stream));
        GR_MUST(cuGraphLaunch(execs[n - 1], stream));
        GR_MUST(cuMemcpyDtoHAsync(words, results, sizeof words, stream));
        GR_MUST(cuStreamSynchronize(stream));
        for (int i = 0; i < STEPS; i++)
                wrong += words[i] != (uint32_t)(n * STEPS + i);
        for (int i = 0; i < EAGER; i++) {
                wrong += gt_wrong_words(others[i], bytes[i], (uint32_t)i);
                GR_MUST(cuMemFree(others[i]));
        }
        return wrong;
}

/* 1 to count. */
static void make_order(enum order order, int *ns, int count)
{
        for (int i = 0; i < count; i++)
                ns[i] = order == DESCENDING ? count - i : i + 1;
        for (int i = count - 1; order == SHUFFLED && i > 0; i--) {
                int k = (int)(gt_random(&seed) % (uint64_t)(i + 1)), n = ns[i];

                ns[i] = ns[k];
                ns[k] = n;
        }
}

static double mib(uint64_t bytes)
{
        return (double)bytes / MIB;
}

static void check_order(enum use use, enum order order, uint64_t largest_bytes, bool is_private)
{
        uint64_t before = status().reserved_bytes, all;
        unsigned wrong = 0, returns = 0;
        int ns[SIZES];
        char name[160];

        make_order(order, ns, size_count);
        for (int i = 0; i < size_count; i++)
                capture(ns[i], use);
        all = status().reserved_bytes - before;
        snprintf(name, sizeof name, "%s, %s: %d sizes take %.0f MiB, the largest alone %.0f MiB", use_names[use],
                 order_names[order], size_count, mib(all), mib(largest_bytes));
        row((all <= largest_bytes + largest_bytes / 20 + 6 * MIB) == !is_private, name);
        for (int round = 0; round < ROUNDS; round++) {
                make_order(SHUFFLED, ns, size_count);
                for (int i = 0; i < size_count; i++)
                        wrong += wrong_words(ns[i]);
                reclaim(); /* what graphs use must stay */
                returns += status().graph_bytes == 0;
        }
        snprintf(name, sizeof name, "%s, %s: %u words wrong", use_names[use], order_names[order], wrong);
        row(wrong == 0 && returns == 0, name);
        for (int i = 0; i < size_count; i++)
                forget(ns[i]);
        for (int i = 0; i < 200 && status().reserved_bytes > before + 4 * MIB; i++) {
                gt_sleep_us(10000); /* the driver tells a moment later that a graph has gone */
                GR_MUST(cuMemAlloc(&outputs[0], KIB));
                GR_MUST(cuMemFree(outputs[0]));
                reclaim();
        }
        snprintf(name, sizeof name, "%s, %s: all but %.0f MiB goes back, %.0f MiB of graphs", use_names[use],
                 order_names[order], mib(status().reserved_bytes) - mib(before), mib(status().graph_bytes));
        row(status().reserved_bytes <= before + 4 * MIB && status().graph_bytes == 0, name);
}

/* The tensors of a layer of a transformer. 3: one of 3 units. -1: the first one is freed. 0: the layer's input is. */
static const int layer[] = {3, 3,   -1, 1,   1, 1,   1, -3, 1,   2, -6, -7,  -4, 2,   -8, 1,   -9,  -5, -2,
                            1, -10, 1,  -11, 1, -12, 0, 1,  -13, 4, 4,  -15, 1,  -16, 1,  -17, -14, 1,  -18};

/* Two layers for a batch of n, without any work: only what memory they take is of interest. */
static CUgraph capture_layers(int n)
{
        CUdeviceptr input, tensors[sizeof layer / sizeof layer[0]];
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemAlloc(&input, (size_t)n * MIB));
        for (int round = 0; round < 2; round++) {
                int count = 0;

                for (size_t i = 0; i < sizeof layer / sizeof layer[0]; i++) {
                        if (layer[i] > 0)
                                GR_MUST(cuMemAlloc(&tensors[count++], (size_t)(layer[i] * n) * MIB));
                        else
                                GR_MUST(cuMemFree(layer[i] ? tensors[-layer[i] - 1] : input));
                }
                input = tensors[count - 1];
        }
        GR_MUST(cuMemFree(input));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        return graph;
}

/* Captures batches of 1 to count in some order, or count alone; returns what they hold together. */
static uint64_t hold_layers(enum order order, int count, bool alone)
{
        CUgraph graphs[BATCHES];
        uint64_t before, bytes;
        int ns[BATCHES];

        reclaim();
        before = status().reserved_bytes;
        make_order(order, ns, count);
        for (int i = 0; i < count; i++)
                graphs[i] = alone && ns[i] < count ? NULL : capture_layers(ns[i]);
        bytes = status().reserved_bytes - before;
        for (int i = 0; i < count; i++)
                if (graphs[i])
                        GR_MUST(cuGraphDestroy(graphs[i]));
        for (int i = 0; i < 100 && status().graph_bytes > 0; i++)
                gt_sleep_us(10000);
        return bytes;
}

/* The same program with other sizes: the largest one alone says how much they need. */
static void check_layers(void)
{
        uint64_t largest_bytes = hold_layers(ASCENDING, BATCHES, true), bytes;
        char name[160];

        for (enum order order = 0; order < ORDERS; order++) {
                bytes = hold_layers(order, BATCHES, false);
                snprintf(name, sizeof name, "layers, %s: %d batches take %.0f MiB, the largest alone %.0f MiB",
                         order_names[order], BATCHES, mib(bytes), mib(largest_bytes));
                row(bytes <= largest_bytes + largest_bytes / 20, name);
        }
}

static CUdeviceptr part_of(CUgraph graph, __typeof__(cuStreamBeginCaptureToGraph) *begin)
{
        CUdeviceptr p;

        GR_MUST(begin(stream, graph, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemAlloc(&p, 4 * MIB));
        GR_MUST(gt_fill(&gt, stream, p, 1, MIB));
        GR_MUST(cuMemFree(p));
        cuStreamEndCapture(stream, &graph); /* the simulated device refuses the second one */
        return p;
}

/* Nothing orders two captures into one graph: both may run at once. */
static void check_parts(bool is_private)
{
        __typeof__(cuStreamBeginCaptureToGraph) *begin = GT_OPTIONAL(cuStreamBeginCaptureToGraph);
        CUdeviceptr p, q;
        CUgraph graph;

        if (!begin || is_private)
                return;
        GR_MUST(cuGraphCreate(&graph, 0));
        p = part_of(graph, begin);
        q = part_of(graph, begin);
        row(p + 4 * MIB <= q || q + 4 * MIB <= p, "two captures into one graph");
        GR_MUST(cuGraphDestroy(graph));
}

/* From when on nodes can be added by hand, a capture gets nothing again that it had and freed before. */
static void check_by_hand(bool asks)
{
        CUdeviceptr p, other, q;
        CUstreamCaptureStatus state;
        const CUgraphEdgeData *edges;
        const CUgraphNode *nodes;
        CUgraph graph;
        cuuint64_t id;
        size_t count;

        reclaim();
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemAlloc(&p, 4 * MIB));
        GR_MUST(gt_fill(&gt, stream, p, 1, MIB));
        GR_MUST(cuMemFree(p));
        GR_MUST(cuMemAlloc(&other, 4 * KIB)); /* makes what is freed ready */
        if (asks)
                GR_MUST(cuStreamGetCaptureInfo(stream, &state, &id, &graph, &nodes, &edges, &count));
        GR_MUST(cuMemAlloc(&q, 4 * MIB));
        GR_MUST(gt_fill(&gt, stream, q, 2, MIB));
        GR_MUST(cuMemFree(other));
        GR_MUST(cuMemFree(q));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        GR_MUST(cuGraphDestroy(graph));
        row((p + 4 * MIB <= q || q + 4 * MIB <= p) == asks, asks ? "nodes by hand" : "no nodes by hand");
}

/* The library has to ask the driver for the first block of a width: captures that begin with one share memory, too. */
static void check_pitched(void)
{
        enum { COUNT = 4 };
        CUgraph graphs[COUNT];
        uint64_t before;
        CUdeviceptr p;
        size_t pitch;

        reclaim();
        before = status().reserved_bytes;
        for (int i = 0; i < COUNT; i++) {
                GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
                GR_MUST(cuMemAllocPitch(&p, &pitch, 10 * KIB + (size_t)i * KIB, 4, 4));
                GR_MUST(cuMemFree(p));
                GR_MUST(cuMemAlloc(&p, 16 * MIB));
                GR_MUST(gt_fill(&gt, stream, p, 1, 4 * MIB));
                GR_MUST(cuMemFree(p));
                GR_MUST(cuStreamEndCapture(stream, &graphs[i]));
        }
        row(status().reserved_bytes - before < 32 * MIB, "captures that begin with a pitched block");
        for (int i = 0; i < COUNT; i++)
                GR_MUST(cuGraphDestroy(graphs[i]));
}

int main(int argc, char **argv)
{
        bool is_private = false;
        uint64_t before, largest;
        CUdeviceptr p;

        GT_OPTIONS(argc, argv, "[--private]", GT_OPTION("private", is_private));
        gt_open(&gt);
        if (gt.simulated)
                size_count = SIZES / 4;
        stream = gt_stream();
        side = gt_stream();
        GR_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuMemAlloc(&results, STEPS * 4));
        for (enum use use = 0; use < USES; use++) {
                reclaim();
                before = status().reserved_bytes;
                capture(size_count, use);
                largest = status().reserved_bytes - before;
                forget(size_count);
                GR_MUST(cuMemAlloc(&p, KIB));
                GR_MUST(cuMemFree(p));
                for (int i = 0; i < 100 && status().graph_bytes > 0; i++)
                        gt_sleep_us(10000);
                reclaim();
                for (enum order order = 0; order < ORDERS; order++)
                        check_order(use, order, largest, is_private);
        }
        check_parts(is_private);
        if (!is_private) {
                check_layers();
                check_by_hand(false);
                check_by_hand(true);
                check_pitched();
        }
        printf("%d rows bad\n", bad);
        return bad > 0;
}
