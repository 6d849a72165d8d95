/*
 * Memory that is allocated while a stream captures, and freed before its graph is gone: no later work gets it, whatever
 * the graph has become meanwhile, and afterwards it comes back. Under the shim only: natively the driver refuses such
 * an allocation. Each row says what it saw, and the status is 1 if one is bad.
 *
 *   graphs [--relaxed | --short | --first-look] [--seconds=N [--seed=N] [--threads=N] [--in-turn]]
 *                           --short: the driver refuses memory for an executable or a launch, and cached memory goes
 *                           back first
 *                           --first-look: with a release threshold, an allocation in a capture climbs the ladder
 *                           --relaxed: in captures in which the driver allows it, so that the memory is the program's
 *                           own affair; then graphs must be seen to overwrite other memory
 *                           --seconds: random graphs for so long (graphs_random.c), by the seed or GR_TEST_SEED
 *                           --in-turn: no two of them run at once, as graphs that share memory must not
 */
#include "graphs_random.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

enum { OTHERS = 24, GRAPHS = 40 };

static struct gt gt;
static CUstream stream;
static CUevent event; /* of a row */
static int bad;
static unsigned overwritten;

static const size_t sizes[] = {4 * KIB, MIB, 9 * MIB};
enum { SIZES = sizeof sizes / sizeof sizes[0] };
static const CUstreamCaptureMode modes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                            CU_STREAM_CAPTURE_MODE_RELAXED};
static const char *const mode_names[] = {"global", "thread-local", "relaxed"};

static void row(bool good, const char *name)
{
        printf("%s: %s\n", name, good ? "ok" : "BAD");
        bad += !good;
}

/* Begins a capture and fills *ret_p in it, which is new. */
static void begin(CUstream in, CUstreamCaptureMode mode, size_t bytes, CUdeviceptr *ret_p)
{
        GR_MUST(cuStreamBeginCapture(in, mode));
        GR_MUST(cuMemAlloc(ret_p, bytes));
        GR_MUST(gt_fill(&gt, in, *ret_p, 7, bytes / 4));
}

static CUgraph finish(CUstream in)
{
        CUgraph graph;

        GR_MUST(cuStreamEndCapture(in, &graph));
        return graph;
}

/* A graph that fills *ret_p, which was allocated for it and may be freed by now. */
static CUgraph captured(CUstreamCaptureMode mode, size_t bytes, bool frees_inside, CUdeviceptr *ret_p)
{
        CUgraph graph;

        begin(stream, mode, bytes, ret_p);
        if (frees_inside)
                GR_MUST(cuMemFree(*ret_p));
        graph = finish(stream);
        if (!frees_inside)
                GR_MUST(cuMemFree(*ret_p));
        return graph;
}

/* Lets what is freed come back, as a program does that goes on. */
static void go_on(void)
{
        CUdeviceptr p;

        for (int i = 0; i < 3; i++) {
                GR_MUST(cuMemAlloc(&p, 64 * MIB));
                GR_MUST(cuMemFree(p));
                GR_MUST(cuCtxSynchronize());
        }
}

/* The executable, launched, changes no block that the program has; afterwards it is gone. */
static void must_harm_nobody(CUgraphExec exec, size_t bytes, const char *name)
{
        CUdeviceptr others[OTHERS];
        uint32_t wrong = 0;

        go_on();
        for (int i = 0; i < OTHERS; i++) {
                GR_MUST(cuMemAlloc(&others[i], bytes));
                GR_MUST(cuMemsetD32(others[i], 3, bytes / 4));
        }
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuGraphLaunch(exec, stream));
        GR_MUST(cuCtxSynchronize());
        for (int i = 0; i < OTHERS; i++) {
                wrong += gt_wrong_words(others[i], bytes, 3);
                GR_MUST(cuMemFree(others[i]));
        }
        GR_MUST(cuGraphExecDestroy(exec));
        overwritten += wrong > 0;
        row(wrong == 0, name);
}

static void nobody_elses(bool relaxed)
{
        char name[96];

        for (int m = relaxed ? 2 : 0; m < (relaxed ? 3 : 2); m++)
                for (int s = 0; s < SIZES; s++)
                        for (int inside = 0; inside < 2; inside++) {
                                CUdeviceptr p;

                                snprintf(name, sizeof name, "%s capture, %zu KiB freed %s it", mode_names[m],
                                         sizes[s] / KIB, inside ? "inside" : "after");
                                must_harm_nobody(gt_executable(captured(modes[m], sizes[s], inside, &p)), sizes[s],
                                                 name);
                        }
}

static void *allocate_elsewhere(void *ret_p)
{
        gt_attach(&gt);
        GR_MUST(cuMemAlloc(ret_p, MIB));
        return NULL;
}

static void allocate_in_thread(CUdeviceptr *ret_p)
{
        pthread_t thread;

        pthread_create(&thread, NULL, allocate_elsewhere, ret_p);
        pthread_join(thread, NULL);
}

/* In a global capture the driver refuses other threads, too: what they allocate may be for the graph. */
static void of_another_thread(void)
{
        CUdeviceptr p;
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        allocate_in_thread(&p);
        GR_MUST(gt_fill(&gt, stream, p, 7, MIB / 4));
        graph = finish(stream);
        GR_MUST(cuMemFree(p));
        must_harm_nobody(gt_executable(graph), MIB, "allocated by another thread");
}

/* But one that takes no part in the capture may keep data of its own in what it allocates. */
static void for_another_thread(void)
{
        CUgraphExec exec;
        CUdeviceptr p;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(cuMemAlloc(&p, MIB));
        GR_MUST(gt_fill(&gt, stream, p, 7, MIB / 4));
        GR_MUST(cuMemFree(p));
        allocate_in_thread(&p);
        exec = gt_executable(finish(stream));
        GR_MUST(cuMemsetD32(p, 3, MIB / 4));
        GR_MUST(cuGraphLaunch(exec, stream));
        GR_MUST(cuCtxSynchronize());
        row(gt_wrong_words(p, MIB, 3) == 0, "allocated by another thread for itself");
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuMemFree(p));
}

/*
 * Work that is not captured uses what the capture was given, and still runs when the graph is launched. ends: that
 * of the next capture, with which graphs may share memory.
 */
static void beside_the_capture(bool ends)
{
        CUstream other = gt_stream();
        CUdeviceptr result, p, q;
        CUgraph before = NULL;
        CUgraphExec exec;

        GR_MUST(cuMemAlloc(&result, MIB));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(cuMemAlloc(&p, MIB));
        GR_MUST(gt_fill(&gt, other, p, 1, MIB / 4));
        GR_MUST(gt_spin(&gt, other, 100000));
        GR_MUST(gt_copy(&gt, other, result, p, MIB / 4));
        GR_MUST(cuMemFree(p));
        if (ends) {
                before = finish(stream);
                GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        }
        GR_MUST(cuMemAlloc(&q, MIB));
        GR_MUST(gt_fill(&gt, stream, q, 2, MIB / 4));
        GR_MUST(cuMemFree(q));
        exec = gt_executable(finish(stream));
        GR_MUST(cuGraphLaunch(exec, stream));
        GR_MUST(cuCtxSynchronize());
        row(gt_wrong_words(result, MIB, 1) == 0,
            ends ? "other work beside the capture before" : "other work beside a capture");
        GR_MUST(cuGraphExecDestroy(exec));
        if (ends)
                GR_MUST(cuGraphDestroy(before));
        GR_MUST(cuMemFree(result));
        GR_MUST(cuStreamDestroy(other));
}

static CUgraph other_graph;

/* Fills 1 MiB and 2 MiB. The thread ends while the other capture is open, and that is no end of a capture. */
static void *capture_elsewhere(void *ret_ptrs)
{
        const CUstream other = CU_STREAM_PER_THREAD;
        CUdeviceptr *ptrs = ret_ptrs;

        gt_attach(&gt);
        begin(other, CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, &ptrs[0]);
        GR_MUST(cuMemAlloc(&ptrs[1], 2 * MIB));
        GR_MUST(gt_fill(&gt, other, ptrs[1], 7, 2 * MIB / 4));
        GR_MUST(cuMemFree(ptrs[0]));
        GR_MUST(cuMemFree(ptrs[1]));
        other_graph = finish(other);
        return NULL;
}

/* What one of two captures has freed does not serve the other one. */
static void of_two_captures(void)
{
        CUdeviceptr others[2], before, after;
        pthread_t thread;

        begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, 2 * MIB, &before);
        GR_MUST(cuMemFree(before));
        pthread_create(&thread, NULL, capture_elsewhere, others);
        pthread_join(thread, NULL);
        GR_MUST(cuMemAlloc(&after, MIB));
        GR_MUST(gt_fill(&gt, stream, after, 7, MIB / 4));
        GR_MUST(cuMemFree(after));
        GR_MUST(cuGraphDestroy(finish(stream)));
        row(others[0] != after && others[1] != before, "two captures at once");
        GR_MUST(cuGraphDestroy(other_graph));
}

/* The memory of a graph outlives copies of it, and what they are part of. */
static void what_it_becomes(void)
{
        CUgraphExecUpdateResultInfo info;
        CUgraph graph, other;
        CUgraphExec exec;
        CUgraphNode node;
        CUdeviceptr p;

        graph = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, true, &p);
        GR_MUST(cuGraphClone(&other, graph));
        GR_MUST(cuGraphDestroy(graph));
        must_harm_nobody(gt_executable(other), MIB, "a clone");

        graph = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, true, &p);
        GR_MUST(cuGraphCreate(&other, 0));
        GR_MUST(cuGraphAddChildGraphNode(&node, other, NULL, 0, graph));
        GR_MUST(cuGraphDestroy(graph));
        must_harm_nobody(gt_executable(other), MIB, "a node of another graph");

        other = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, true, &p);
        GR_MUST(cuGraphInstantiate(&exec, other, 0));
        graph = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, true, &p);
        GR_MUST(cuGraphExecUpdate(exec, graph, &info));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuGraphDestroy(other));
        must_harm_nobody(exec, MIB, "an executable that was updated");

        graph = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, true, &p);
        if (cuGraphInstantiate(&exec, graph, CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH) == CUDA_SUCCESS) {
                GR_MUST(cuGraphUpload(exec, stream));
                GR_MUST(cuStreamSynchronize(stream));
                GR_MUST(cuGraphDestroy(graph));
                must_harm_nobody(exec, MIB, "an executable that kernels can launch");
        } else {
                GR_MUST(cuGraphDestroy(graph)); /* not with this device */
        }
}

/* Captured into the body of a conditional node. The simulated device has none. */
static void a_conditional_body(void)
{
        __typeof__(cuGraphConditionalHandleCreate) *create = GT_OPTIONAL(cuGraphConditionalHandleCreate);
        __typeof__(cuStreamBeginCaptureToGraph) *begin_to = GT_OPTIONAL(cuStreamBeginCaptureToGraph);
        __typeof__(cuGraphAddNode) *add = GT_OPTIONAL(cuGraphAddNode);
        CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_CONDITIONAL};
        CUgraphConditionalHandle handle;
        CUgraph graph, body;
        CUgraphNode node;
        CUdeviceptr p;

        if (!create || !begin_to || !add)
                return;
        GR_MUST(cuGraphCreate(&graph, 0));
        GR_MUST(create(&handle, graph, gt.ctx, 1, CU_GRAPH_COND_ASSIGN_DEFAULT));
        params.conditional.handle = handle;
        params.conditional.type = CU_GRAPH_COND_TYPE_IF;
        params.conditional.size = 1;
        params.conditional.ctx = gt.ctx;
        GR_MUST(add(&node, graph, NULL, NULL, 0, &params));
        GR_MUST(begin_to(stream, params.conditional.phGraph_out[0], NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(cuMemAlloc(&p, MIB));
        GR_MUST(gt_fill(&gt, stream, p, 7, MIB / 4));
        GR_MUST(cuMemFree(p));
        GR_MUST(cuStreamEndCapture(stream, &body));
        must_harm_nobody(gt_executable(graph), MIB, "the body of a conditional node");
}

enum { LINKS = 40 };

/* In a capture of one stream memory serves again: a chain of as many blocks needs the memory of few, and is right. */
static void a_chain(void)
{
        const size_t bytes = 9 * MIB;
        CUdeviceptr results, p, seen[LINKS];
        unsigned different = 0, wrong = 0;
        uint32_t words[LINKS];
        CUgraphExec exec;

        GR_MUST(cuMemAlloc(&results, LINKS * 4));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        for (unsigned i = 0; i < LINKS; i++) {
                bool before = false;

                GR_MUST(cuMemAlloc(&p, bytes - i % 3 * 64 * KIB));
                GR_MUST(gt_fill(&gt, stream, p, 100 + i, 64));
                GR_MUST(gt_copy(&gt, stream, results + i * 4, p, 1));
                GR_MUST(cuMemFree(p));
                for (unsigned k = 0; k < i; k++)
                        before |= seen[k] == p;
                seen[i] = p;
                different += !before;
        }
        exec = gt_executable(finish(stream));
        for (int turn = 0; turn < 3; turn++) {
                GR_MUST(cuMemsetD32(results, 0, LINKS));
                GR_MUST(cuCtxSynchronize());
                GR_MUST(cuGraphLaunch(exec, stream));
                GR_MUST(cuCtxSynchronize());
                GR_MUST(cuMemcpyDtoH(words, results, sizeof words));
                for (unsigned i = 0; i < LINKS; i++)
                        wrong += words[i] != 100 + i;
        }
        row(different <= LINKS / 2, "a chain uses its memory again");
        row(wrong == 0, "and each link sees its own");
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuMemFree(results));
}

/* Once an event was recorded another stream of the capture may use the memory at any time: it does not serve again. */
static void a_fork(void)
{
        CUstream other = gt_stream();
        CUdeviceptr result, p, q;
        CUgraphExec exec;
        uint32_t word = 0, wrong = 0;

        GR_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuMemAlloc(&result, 4));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(cuMemAlloc(&p, MIB));
        GR_MUST(cuEventRecord(event, stream));
        GR_MUST(cuStreamWaitEvent(other, event, 0));
        GR_MUST(gt_late_fill(&gt, other, p, 1, 1, 20000));
        GR_MUST(gt_copy(&gt, other, result, p, 1));
        GR_MUST(cuMemFree(p));
        GR_MUST(cuMemAlloc(&q, MIB));
        GR_MUST(gt_fill(&gt, stream, q, 2, MIB / 4));
        GR_MUST(cuEventRecord(event, other));
        GR_MUST(cuStreamWaitEvent(stream, event, 0));
        GR_MUST(cuMemFree(q));
        exec = gt_executable(finish(stream));
        for (int turn = 0; turn < 3; turn++) {
                GR_MUST(cuGraphLaunch(exec, stream));
                GR_MUST(cuCtxSynchronize());
                GR_MUST(cuMemcpyDtoH(&word, result, 4));
                wrong += word != 1;
        }
        row(p != q && wrong == 0, "two streams in one capture");
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuStreamDestroy(other));
        GR_MUST(cuEventDestroy(event));
        GR_MUST(cuMemFree(result));
}

/* Whether memory that a capture has filled, and that `let_go` frees, serves the capture's next request. */
static bool serves_again(void (*let_go)(CUdeviceptr p, void *argument), void *argument)
{
        CUdeviceptr p, q;

        begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, &p);
        let_go(p, argument);
        GR_MUST(cuMemAlloc(&q, MIB));
        GR_MUST(gt_fill(&gt, stream, q, 2, MIB / 4));
        GR_MUST(cuMemFree(q));
        GR_MUST(cuGraphDestroy(finish(stream)));
        return p < q + MIB && q < p + MIB;
}

static void launch_and_free(CUdeviceptr p, void *attribute)
{
        CUlaunchConfig config = {1, 1, 1, 1, 1, 1, 0, stream, attribute, attribute != NULL};
        uint32_t value = 2;
        uint64_t words = 1;
        void *arguments[] = {&p, &value, &words};

        GR_MUST(GT_OPTIONAL(cuLaunchKernelEx)(&config, gt.fill, arguments, NULL));
        GR_MUST(cuMemFree(p));
}

static void look_and_free(CUdeviceptr p, void *argument)
{
        CUstreamCaptureStatus status;
        const CUgraphEdgeData *edges;
        const CUgraphNode *nodes;
        CUgraph graph;
        cuuint64_t id;
        size_t count;

        (void)argument;
        GR_MUST(cuStreamGetCaptureInfo(stream, &status, &id, &graph, &nodes, &edges, &count));
        GR_MUST(cuMemFree(p));
}

/* Work that waits for the event need not wait for the fill behind it. */
static void record_and_free(CUdeviceptr p, void *function)
{
        GR_MUST(((CUresult(CUDAAPI *)(CUevent, CUstream))function)(event, stream));
        GR_MUST(gt_fill(&gt, stream, p, 8, MIB / 4));
        GR_MUST(cuMemFree(p));
}

static void record_with_flags_and_free(CUdeviceptr p, void *function)
{
        GR_MUST(((CUresult(CUDAAPI *)(CUevent, CUstream, unsigned))function)(event, stream, 0));
        GR_MUST(gt_fill(&gt, stream, p, 8, MIB / 4));
        GR_MUST(cuMemFree(p));
}

/* Of no capture: nothing that is captured can wait for it. */
static void record_elsewhere_and_free(CUdeviceptr p, void *other)
{
        GR_MUST(cuEventRecord(event, other));
        GR_MUST(cuMemFree(p));
}

static void free_and_update(CUdeviceptr p, void *function)
{
        GR_MUST(cuMemFree(p));
        GR_MUST(((CUresult(CUDAAPI *)(CUstream, CUgraphNode *, size_t, unsigned))function)(
                stream, NULL, 0, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
}

static void free_and_update_with_edges(CUdeviceptr p, void *function)
{
        GR_MUST(cuMemFree(p));
        GR_MUST(((CUresult(CUDAAPI *)(CUstream, CUgraphNode *, const CUgraphEdgeData *, size_t, unsigned))function)(
                stream, NULL, NULL, 0, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
}

/* Memory serves a capture again only where all later nodes surely wait for the earlier ones. */
static void what_later_work_waits_for(void)
{
        static const struct {
                const char *name, *function;
                int version;
                void (*let_go)(CUdeviceptr p, void *function);
        } orders[] = {{"an event", "cuEventRecord", 7000, record_and_free},
                      {"an event with flags", "cuEventRecordWithFlags", 11010, record_with_flags_and_free},
                      {"other dependencies", "cuStreamUpdateCaptureDependencies", 11030, free_and_update},
                      {"other dependencies, with edges", "cuStreamUpdateCaptureDependencies", 12030,
                       free_and_update_with_edges}};
        CUlaunchAttribute priority = {.id = CU_LAUNCH_ATTRIBUTE_PRIORITY},
                          programmatic = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                          .value.programmaticStreamSerializationAllowed = 1},
                          middle = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT},
                          all_begun = {.id = CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT};
        CUstream other;

        if (GT_OPTIONAL(cuLaunchKernelEx)) {
                row(serves_again(launch_and_free, NULL), "a plain launch");
                row(serves_again(launch_and_free, &priority), "a launch with a priority");
                row(!serves_again(launch_and_free, &programmatic), "a programmatic launch");
        }
        if (gt.simulated) { /* which records no such event; some cards refuse them */
                row(!serves_again(launch_and_free, &middle), "a launch with an event in its middle");
                row(!serves_again(launch_and_free, &all_begun), "a launch with an event once all of it has begun");
        }
        row(!serves_again(look_and_free, NULL), "a graph that can have nodes by hand");
        GR_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        other = gt_stream();
        row(serves_again(record_elsewhere_and_free, other), "an event on another stream");
        GR_MUST(cuStreamDestroy(other));
        for (unsigned i = 0; i < 2 * sizeof orders / sizeof orders[0]; i++) {
                CUdriverProcAddressQueryResult status;
                void *function = NULL;
                char name[96];

                GR_MUST(cuGetProcAddress(orders[i / 2].function, &function, orders[i / 2].version,
                                         i % 2 ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
                                               : CU_GET_PROC_ADDRESS_LEGACY_STREAM,
                                         &status));
                snprintf(name, sizeof name, "%s%s", orders[i / 2].name, i % 2 ? ", per thread" : "");
                if (function) /* older drivers lack some */
                        row(!serves_again(orders[i / 2].let_go, function), name);
        }
        GR_MUST(cuEventDestroy(event));
}

/* How many launches of the graph need not wait for the end of the kernel in front. */
static size_t programmatic_edges(CUgraph graph)
{
        CUgraphEdgeData data[8];
        CUgraphNode from[8], to[8];
        size_t count = 8, found = 0;

        GR_MUST(GT_OPTIONAL(cuGraphGetEdges)(graph, from, to, data, &count));
        for (size_t i = 0; i < count; i++)
                found += data[i].type == CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
        return found;
}

static CUresult launch_with(CUdeviceptr p, CUlaunchAttribute *attributes, unsigned count)
{
        CUlaunchConfig config = {1, 1, 1, 1, 1, 1, 0, stream, attributes, count};
        uint64_t words = 1;
        uint32_t value = 2;
        void *arguments[] = {&p, &value, &words};

        return GT_OPTIONAL(cuLaunchKernelEx)(&config, gt.fill, arguments, NULL);
}

static void launch_fill(CUdeviceptr p, bool programmatic)
{
        CUlaunchAttribute attribute = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                       .value.programmaticStreamSerializationAllowed = 1};

        GR_MUST(launch_with(p, &attribute, programmatic));
}

/* A grid of one block is no whole cluster of two. */
static void other_attributes_stay(void)
{
        CUlaunchAttribute attributes[] = {{.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, .value.clusterDim = {2, 1, 1}},
                                          {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                           .value.programmaticStreamSerializationAllowed = 1}};
        CUdeviceptr p;

        if (!gt.simulated) /* a card may end the capture */
                return;
        begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, &p);
        row(launch_with(p, attributes, 2) == CUDA_ERROR_INVALID_CLUSTER_SIZE, "another attribute in front");
        GR_MUST(cuMemFree(p));
        GR_MUST(cuGraphDestroy(finish(stream)));
}

/* The first one waits where its memory may have served the kernel in front. The next one has memory of its own. */
static void what_programmatic_launches_wait_for(void)
{
        CUdeviceptr own, p;
        size_t edges;
        CUgraph graph;

        if (!GT_OPTIONAL(cuLaunchKernelEx) || !GT_OPTIONAL(cuGraphGetEdges))
                return;
        GR_MUST(cuMemAlloc(&own, MIB));
        for (int launches = 0; launches < 3; launches++) {
                if (launches > 0)
                        begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, &p);
                else
                        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
                launch_fill(own, false);
                for (int i = 0; i < (launches ? launches : 1); i++)
                        launch_fill(launches > 0 ? p : own, true);
                if (launches > 0)
                        GR_MUST(cuMemFree(p));
                graph = finish(stream);
                edges = programmatic_edges(graph);
                if (launches == 0)
                        row(edges == 1, "a programmatic launch in a capture without memory");
                else
                        row(edges + 1 == (size_t)launches, launches == 1 ? "one in a capture with memory" : "two");
                GR_MUST(cuGraphDestroy(graph));
        }
        GR_MUST(cuMemFree(own));
}

static void *wait_for_stream(void *unused)
{
        (void)unused;
        gt_attach(&gt);
        GR_MUST(cuStreamSynchronize(stream));
        return NULL;
}

/* The simulated device then always answers CUDA_ERROR_UNKNOWN to the launch of a graph that has user objects. */
static void launched_while_another_waits(void)
{
        CUdeviceptr p, result;
        CUgraphExec exec;
        pthread_t thread;
        uint32_t word;

        GR_MUST(cuMemAlloc(&result, 4));
        GR_MUST(cuMemsetD32(result, 0, 1));
        begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, &p);
        GR_MUST(gt_copy(&gt, stream, result, p, 1));
        GR_MUST(cuMemFree(p));
        exec = gt_executable(finish(stream));
        GR_MUST(gt_spin(&gt, stream, 50000));
        pthread_create(&thread, NULL, wait_for_stream, NULL);
        gt_sleep_us(20000); /* then it waits */
        row(cuGraphLaunch(exec, stream) == CUDA_SUCCESS, "launched while another thread waits for the stream");
        pthread_join(thread, NULL);
        GR_MUST(cuMemcpyDtoHAsync(&word, result, 4, stream));
        GR_MUST(cuStreamSynchronize(stream));
        row(word == 7, "and it has run");
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuMemFree(result));
}

/* Memory of a width whose pitch is not known yet, in a capture; and pinned memory, cached or not, is refused there. */
static void other_kinds(void)
{
        CUresult pinned, ended;
        CUgraph graph = NULL;
        CUdeviceptr p;
        size_t pitch;
        void *host;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        row(cuMemAllocPitch(&p, &pitch, 3000, 64, 4) == CUDA_SUCCESS, "a new pitch in a capture");
        GR_MUST(cuMemFree(p));
        row(cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS, "and the capture goes on");
        GR_MUST(cuGraphDestroy(graph));

        GR_MUST(cuMemHostAlloc(&host, MIB, 0));
        GR_MUST(cuMemFreeHost(host));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        pinned = cuMemHostAlloc(&host, MIB, 0);
        ended = cuStreamEndCapture(stream, &graph);
        row(pinned == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && ended == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
            "pinned memory is refused");
}

/* How a graph ends. */
enum ending { AT_ONCE, WITH_EXECUTABLE, LAUNCHED, BROKEN, WITH_STREAM, ENDINGS };
static const char *const endings[] = {"destroyed at once", "destroyed with its executable", "launched, and destroyed",
                                      "broken", "ended with its stream"};

static void end(enum ending ending)
{
        CUgraphExec exec;
        CUgraph graph;
        CUdeviceptr p;

        if (ending == BROKEN || ending == WITH_STREAM) {
                CUstream other = gt_stream();

                begin(other, CU_STREAM_CAPTURE_MODE_GLOBAL, 64 * MIB, &p);
                GR_MUST(cuMemFree(p));
                if (ending == BROKEN) {
                        cuCtxSynchronize(); /* forbidden, which breaks the capture */
                        if (cuStreamEndCapture(other, &graph) == CUDA_SUCCESS)
                                gt_die("the capture is not broken");
                }
                GR_MUST(cuStreamDestroy(other));
                return;
        }
        graph = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, 64 * MIB, true, &p);
        if (ending != AT_ONCE) {
                GR_MUST(cuGraphInstantiate(&exec, graph, 0));
                if (ending == LAUNCHED)
                        GR_MUST(cuGraphLaunch(exec, stream));
                GR_MUST(cuGraphExecDestroy(exec));
        }
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuCtxSynchronize());
}

/* Each graph has 64 MiB of its own: of all of them together no more than a few may be left. */
static void comes_back(void)
{
        size_t before, after, total;
        char name[96];

        for (enum ending ending = 0; ending < ENDINGS; ending++) {
                end(ending);
                go_on();
                GR_MUST(cuMemGetInfo(&before, &total));
                for (int i = 0; i < GRAPHS; i++) {
                        end(ending);
                        go_on();
                }
                GR_MUST(cuMemGetInfo(&after, &total));
                snprintf(name, sizeof name, "memory of %d graphs that were %s", GRAPHS, endings[ending]);
                row(after + 256 * MIB > before, name);
        }
}

/* The driver tells a moment later that a graph has gone. */
static bool soon(bool (*is_so)(size_t bytes), size_t bytes)
{
        bool so = is_so(bytes);

        for (int i = 0; i < 100 && !so; i++) {
                gt_sleep_us(10000);
                so = is_so(bytes);
        }
        return so;
}

static bool is_free(size_t bytes)
{
        size_t now, total;

        GR_MUST(cuMemGetInfo(&now, &total));
        return now >= bytes;
}

static bool can_be_created(size_t bytes)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
        CUmemGenericAllocationHandle handle;
        CUresult result = cuMemCreate(&handle, bytes / GT_PAGE * GT_PAGE, &prop, 0);

        if (result == CUDA_SUCCESS)
                GR_MUST(cuMemRelease(handle));
        return result == CUDA_SUCCESS;
}

static bool went_back(size_t bytes)
{
        size_t now;

        return gt_footprint(&gt, &now) && now <= bytes;
}

/* What a graph had is there for the program once it has gone, also for what the pool does not serve, and decays. */
static void is_there_again(void)
{
        size_t before, total, least;
        CUgraph graph;
        CUdeviceptr p;

        GR_MUST(cuMemGetInfo(&before, &total));
        graph = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, before / 4 * 3, true, &p);
        GR_MUST(cuGraphDestroy(graph));
        row(soon(can_be_created, before / 2), "memory of a graph that has gone, as another kind");
        graph = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, before / 4 * 3, true, &p);
        GR_MUST(cuGraphDestroy(graph));
        row(soon(is_free, before / 2), "memory of a graph that has gone, as free memory");
        if (!gt.simulated || !gt_footprint(&gt, &least))
                return; /* elsewhere the decay takes ten seconds */
        graph = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, before / 4 * 3, true, &p);
        GR_MUST(cuGraphDestroy(graph));
        row(soon(went_back, before / 2), "memory of a graph that has gone decays");
}

/* Freed once more it is refused, as any freed memory; and a context that ends takes all with it. */
static void edges(void)
{
        CUdeviceptr p;
        CUgraph graph = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, true, &p);
        CUcontext context;
        CUmodule module;
        struct gt before = gt;

        row(cuMemFree(p) == CUDA_ERROR_INVALID_VALUE, "freed twice");
        GR_MUST(cuGraphDestroy(graph));
        go_on();
        row(cuMemFree(p) == CUDA_ERROR_INVALID_VALUE, "freed twice, later");

        GR_MUST(cuCtxCreate(&context, NULL, 0, gt.device));
        gt_load_kernels(&module);
        GR_MUST(cuModuleGetFunction(&gt.fill, module, "gr_fill"));
        stream = gt_stream();
        graph = captured(CU_STREAM_CAPTURE_MODE_GLOBAL, MIB, true, &p);
        GR_MUST(cuCtxDestroy(context));
        cuGraphDestroy(graph);
        GR_MUST(cuCtxSetCurrent(before.ctx));
        gt = before;
        go_on();
        row(true, "its context has ended");
}

/*
 * The driver refuses memory for an executable, or for its first launch, while the cache has much: under the simulated
 * device, which is told to refuse.
 */
static int short_of_memory(void)
{
        CUdeviceptr ptrs[8], p;
        CUresult made, launched;
        CUgraphExec exec;
        CUgraph graph;

        GR_MUST(cuMemAlloc(&p, MIB));
        for (int i = 0; i < 8; i++)
                GR_MUST(cuMemAlloc(&ptrs[i], 32 * MIB));
        for (int i = 0; i < 8; i++)
                GR_MUST(cuMemFree(ptrs[i]));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(gt_fill(&gt, stream, p, 7, MIB / 4));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        made = cuGraphInstantiate(&exec, graph, 0);
        launched = made ? made : cuGraphLaunch(exec, stream);
        GR_MUST(cuCtxSynchronize());
        printf("instantiated %d, launched %d, %u words wrong\n", (int)made, (int)launched, gt_wrong_words(p, MIB, 7));
        return made || launched || gt_wrong_words(p, MIB, 7) > 0;
}

/* With a release threshold, the first look at the device's default pool is in a capture, which must not break by it. */
static void first_look(void)
{
        CUgraph graph = NULL;
        size_t free_bytes, total;
        CUdeviceptr p;

        GR_MUST(cuMemGetInfo(&free_bytes, &total));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        row(cuMemAlloc(&p, 2 * total) == CUDA_ERROR_OUT_OF_MEMORY, "more than the card has");
        row(cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS, "its capture");
        if (graph)
                GR_MUST(cuGraphDestroy(graph));
}

int main(int argc, char **argv)
{
        const char *seed_text = getenv("GR_TEST_SEED");
        unsigned seed = seed_text ? (unsigned)strtoul(seed_text, NULL, 10) : 1;
        bool relaxed = false, is_short = false, is_first = false, in_turn = false;
        double seconds = 0;
        int threads = 3;

        GT_OPTIONS(argc, argv,
                   "[--relaxed | --short | --first-look] [--seconds=N [--seed=N] [--threads=N] [--in-turn]]",
                   GT_OPTION("relaxed", relaxed), GT_OPTION("in-turn", in_turn), GT_OPTION("short", is_short),
                   GT_OPTION("first-look", is_first), GT_OPTION("seconds", seconds), GT_OPTION("seed", seed),
                   GT_OPTION("threads", threads));
        gt_open(&gt);
        if (seconds > 0)
                return (graphs_random(&gt, seconds, seed, threads, relaxed, in_turn) > 0) != relaxed;
        stream = gt_stream();
        if (is_short)
                return short_of_memory();
        if (is_first) {
                first_look();
                return bad > 0;
        }
        nobody_elses(relaxed);
        if (!relaxed) {
                of_another_thread();
                for_another_thread();
                beside_the_capture(false);
                beside_the_capture(true);
                of_two_captures();
                what_it_becomes();
                a_conditional_body();
                a_chain();
                a_fork();
                what_later_work_waits_for();
                what_programmatic_launches_wait_for();
                other_attributes_stay();
                launched_while_another_waits();
                other_kinds();
                comes_back();
                is_there_again();
                edges();
        }
        printf("%d rows bad, %u graphs overwrote other memory\n", bad, overwritten);
        return relaxed ? overwritten == 0 : bad > 0;
}
