/*
 * The hard limit against graphs that allocate: what would take more than the limit is refused before it runs, what fits
 * is never refused, and the memory of graphs that are gone makes room for others.
 *
 *   GPURECLAIM_HARD_LIMIT=1GiB LD_PRELOAD=... limit_graphs --limit=1GiB
 *   ... limit_graphs --limit=1GiB --unordered     with a driver that does not tell the order of the nodes
 *   ... limit_graphs --limit=1GiB --two-devices   with a simulated device that has a neighbour
 *
 * One line per check; exit status 1 when one failed.
 */
#include "gputest.h"

#include "gpureclaim.h"

#include <dlfcn.h>
#include <malloc.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BYPASS_US = 300000, MOST_SPLIT = 64 }; /* after a failure the shim caches nothing for so long */

static const size_t slack_bytes = 64 * MIB;

CUresult CUDAAPI cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream);
CUresult CUDAAPI cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream);

static struct gt gt;
static size_t limit;
static CUstream stream;

/* Allocations of bytes each, each freed before the next one, or all of them at the end. */
static void capture(size_t bytes, int count, bool one_by_one, CUgraph *ret_graph)
{
        CUdeviceptr p[MOST_SPLIT];
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        for (int i = 0; i < count; i++) {
                GR_MUST(cuMemAllocAsync(&p[i], bytes, stream));
                GR_MUST(gt_fill(&gt, stream, p[i], 7, 1024));
                if (one_by_one)
                        GR_MUST(cuMemFreeAsync(p[i], stream));
        }
        for (int i = 0; i < count && !one_by_one; i++)
                GR_MUST(cuMemFreeAsync(p[i], stream));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        *ret_graph = graph;
}

static CUgraphExec build(size_t bytes, int count, bool one_by_one)
{
        CUgraphExec exec;
        CUgraph graph;

        capture(bytes, count, one_by_one, &graph);
        exec = gt_executable(graph);
        return exec;
}

/*
 * Two allocations of bytes each, without a capture. At once: the nodes are created one allocation after the other, but
 * the second one runs before the first is there, and is freed last. Else: both are created before the frees, but the
 * second one runs after the first was freed. So who takes the order of creation takes one for the other. NULL, after
 * a line that says so: the driver has no such graphs.
 */
static CUgraphExec build_against_creation(size_t bytes, bool at_once)
{
        __typeof__(&cuGraphAddDependencies_v2) add_dependencies;
        void *found = dlsym(RTLD_DEFAULT, "cuGraphAddDependencies_v2");
        CUDA_MEM_ALLOC_NODE_PARAMS params[2];
        CUgraphNode alloc[2], release[2], from[2], to[2];
        size_t edges = 0;
        CUgraphExec exec;
        CUgraph graph;
        CUresult result;

        memcpy(&add_dependencies, &found, sizeof add_dependencies);
        if (!add_dependencies) {
                printf("-      by hand: this driver adds no dependencies\n");
                return NULL;
        }
        GR_MUST(cuGraphCreate(&graph, 0));
        for (int i = 0; i < 2; i++) {
                params[i] = (CUDA_MEM_ALLOC_NODE_PARAMS){
                        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}},
                        .bytesize = bytes};
                GR_MUST(cuGraphAddMemAllocNode(&alloc[i], graph, NULL, 0, &params[i]));
                if (at_once)
                        GR_MUST(cuGraphAddMemFreeNode(&release[i], graph, &alloc[i], 1, params[i].dptr));
        }
        for (int i = 0; i < 2 && !at_once; i++)
                GR_MUST(cuGraphAddMemFreeNode(&release[i], graph, &alloc[i], 1, params[i].dptr));
        if (at_once) {
                from[edges] = alloc[1], to[edges++] = alloc[0];
                from[edges] = release[0], to[edges++] = release[1];
        } else {
                from[edges] = release[0], to[edges++] = alloc[1];
        }
        result = add_dependencies(graph, from, to, NULL, edges);
        if (result == CUDA_SUCCESS)
                result = cuGraphInstantiate(&exec, graph, 0);
        if (result != CUDA_SUCCESS)
                printf("-      by hand: this driver refuses such a graph (%s)\n", gt_result_name(result));
        GR_MUST(cuGraphDestroy(graph));
        return result == CUDA_SUCCESS ? exec : NULL;
}

static void check_footprint(const char *name)
{
        size_t bytes;

        GR_MUST(cuStreamSynchronize(stream));
        if (!gt_footprint(&gt, &bytes))
                printf("-      %s: the card cannot be asked\n", name);
        else
                gt_check(bytes <= limit + gt.context_bytes + slack_bytes, name, "%.1f MiB held (%s)", gt_mib(bytes),
                         gt_footprint_source(&gt));
}

/* How often the driver was called; 0 where it does not count that. */
static unsigned long calls(const char *symbol)
{
        static unsigned long (*count)(const char *symbol);

        if (!count)
                *(void **)&count = dlsym(RTLD_DEFAULT, "grSimCallCount");
        return count ? count(symbol) : 0;
}

static size_t available(void)
{
        size_t bytes, total;

        GR_MUST(cuMemGetInfo(&bytes, &total));
        return bytes;
}

/* Another way to say it: code 2 or 0, nothing else. */
static void launch(const char *name, CUgraphExec exec, CUresult expected)
{
        CUresult result = cuGraphLaunch(exec, stream);

        gt_check(result == expected, name, "%d", (int)result);
        check_footprint(name);
}

/* The legacy stream cannot be asked whether it is captured then; the thread's own, also called 0, is not. */
static void beside_a_capture(CUgraphExec exec)
{
        CUstream blocking;
        CUgraph graph;

        GR_MUST(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
        GR_MUST(cuStreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
        gt_check(cuGraphUpload_ptsz(exec, NULL) == CUDA_ERROR_OUT_OF_MEMORY, "upload beside a capture", "refused");
        gt_check(cuGraphLaunch_ptsz(exec, NULL) == CUDA_ERROR_OUT_OF_MEMORY, "launch beside a capture", "refused");
        GR_MUST(cuStreamEndCapture(blocking, &graph));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuStreamDestroy(blocking));
}

/* An instantiation that uploads at once: what does not fit is refused, and what fits has its memory then. */
static void uploaded_at_once(size_t bytes, bool fits)
{
        CUDA_GRAPH_INSTANTIATE_PARAMS params = {.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD, .hUploadStream = stream};
        size_t before = available(), free_bytes;
        CUgraphExec exec = NULL;
        CUgraph graph;
        CUresult result;

        capture(bytes, 1, true, &graph);
        params.flags = 0;
        gt_check(cuGraphInstantiateWithParams(&exec, graph, &params) == CUDA_SUCCESS, "not uploaded at once", "made");
        gt_check(available() + slack_bytes >= before, "not uploaded at once", "%.1f MiB free of %.1f",
                 gt_mib(available()), gt_mib(before));
        GR_MUST(cuGraphExecDestroy(exec));
        params.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
        result = cuGraphInstantiateWithParams(&exec, graph, &params);
        check_footprint(fits ? "uploaded at once" : "uploaded at once, too large");
        gt_check(result == (fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY) &&
                         (params.result_out == CUDA_GRAPH_INSTANTIATE_SUCCESS) == fits,
                 fits ? "uploaded at once" : "uploaded at once, too large", "%s", gt_result_name(result));
        gt_check(params.flags == CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD, "its parameters", "as they were");
        free_bytes = available();
        if (fits)
                gt_check(free_bytes + bytes <= before + slack_bytes, "its memory counts", "%.1f MiB free of %.1f",
                         gt_mib(free_bytes), gt_mib(before));
        if (result == CUDA_SUCCESS) {
                launch("the one uploaded at once", exec, CUDA_SUCCESS);
                GR_MUST(cuGraphExecDestroy(exec));
        }
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
}

/* What was refused leaves nothing behind that a peak, or what the program has, would not count. */
static void check_peak(const char *name, size_t held)
{
        struct gpureclaim_status status = {.struct_bytes = sizeof status};
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_status");
        gpureclaim_status_function *get;

        memcpy(&get, &found, sizeof get);
        if (get && get(gt.device, &status) == 0)
                gt_check(status.peak_reserved_bytes >= status.reserved_bytes && status.live_bytes >= held, name,
                         "%.1f MiB taken, and %.1f at most; %.1f of it live, of %.1f", gt_mib(status.reserved_bytes),
                         gt_mib(status.peak_reserved_bytes), gt_mib(status.live_bytes), gt_mib(held));
}

static void *unused(size_t fraction_of_limit)
{
        CUdeviceptr p;

        GR_MUST(cuMemAlloc(&p, fraction_of_limit / GT_PAGE * GT_PAGE));
        return (void *)(uintptr_t)p;
}

static void give(void *p)
{
        GR_MUST(cuMemFree((CUdeviceptr)(uintptr_t)p));
}

/* A graph that runs has its memory, whatever else is in use by now, and keeps it where graph memory is trimmed. */
static void while_it_runs(CUgraphExec half)
{
        CUdeviceptr rest;

        GR_MUST(cuMemAlloc(&rest, limit / 16 * 7));
        for (int trimmed = 0; trimmed < 2; trimmed++) {
                GR_MUST(gt_spin(&gt, stream, 100000));
                gt_check(cuGraphLaunch(half, stream) == CUDA_SUCCESS, "with the rest in use", "launched");
                if (trimmed)
                        GR_MUST(cuDeviceGraphMemTrim(gt.device));
                gt_check(cuGraphLaunch(half, stream) == CUDA_SUCCESS, "while it runs", "launched, %d trims", trimmed);
                check_footprint("while it runs");
        }
        GR_MUST(cuMemFree(rest));
}

static void wait_for(void *gate)
{
        sem_wait(gate);
}

/*
 * Behind work that does not end. A graph that has its memory is launched again, trims or not; one that never had any
 * cannot have that of the other, which is in use. Only where nobody else's work waits for the end of this.
 */
static void while_it_is_held_up(CUgraphExec half)
{
        CUgraphExec other = build(limit / 2, 1, true); /* as much as the other one has */
        CUstream beside = gt_stream();
        CUdeviceptr rest;
        sem_t gate;

        if (!dlsym(RTLD_DEFAULT, "grSimVersion"))
                return;
        sem_init(&gate, 0, 0);
        GR_MUST(cuMemAlloc(&rest, limit / 16 * 7));
        GR_MUST(cuLaunchHostFunc(stream, wait_for, &gate));
        for (int trimmed = 0; trimmed < 2; trimmed++) {
                unsigned long before = calls("cuGraphLaunch");

                gt_check(cuGraphLaunch(half, stream) == CUDA_SUCCESS, "held up", "launched, %d trims", trimmed);
                gt_check(calls("cuGraphLaunch") <= before + 1, "held up", "the driver launches it once");
                gt_check(cuGraphLaunch(half, stream) == CUDA_SUCCESS, "held up", "launched again, %d trims", trimmed);
                GR_MUST(cuDeviceGraphMemTrim(gt.device));
        }
        gt_check(cuGraphLaunch(other, beside) == CUDA_ERROR_OUT_OF_MEMORY, "beside one that is held up", "refused");
        sem_post(&gate);
        check_footprint("when it goes on");
        GR_MUST(cuStreamSynchronize(beside));
        GR_MUST(cuMemFree(rest));
        GR_MUST(cuGraphExecDestroy(other));
        GR_MUST(cuStreamDestroy(beside));
        sem_destroy(&gate);
        gt_sleep_us(BYPASS_US);
}

/* A graph that finds its memory gone gets it again, and runs once. */
static void launched_once(CUgraphExec half)
{
        unsigned long before = calls("cuGraphLaunch");

        gt_check(cuGraphLaunch(half, stream) == CUDA_SUCCESS, "after a trim", "launched");
        gt_check(calls("cuGraphLaunch") <= before + 1, "after a trim", "the driver launches it once");
        GR_MUST(cuStreamSynchronize(stream));
        available(); /* looks at the card, which is no trim */
        before = calls("cuDeviceGetGraphMemAttribute");
        gt_check(cuGraphLaunch(half, stream) == CUDA_SUCCESS && calls("cuDeviceGetGraphMemAttribute") == before,
                 "after a look", "launched, and not checked again");
        GR_MUST(cuStreamSynchronize(stream));
}

/*
 * The memory of a graph that is gone is the next one's, without a trim and where all of the limit is in use. On the
 * simulated device only: an H100 did not tell that memory as free, so that `rest` was refused.
 */
static void after_one_that_is_gone(void)
{
        CUgraphExec first = build(limit / 4 * 3, 1, true), second = build(limit / 4 * 3, 1, true);
        unsigned long trims;
        CUdeviceptr rest;

        launch("one that goes", first, CUDA_SUCCESS);
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuGraphExecDestroy(first));
        GR_MUST(cuMemAlloc(&rest, available() / GT_PAGE * GT_PAGE - limit / 4 * 3));
        trims = calls("cuDeviceGraphMemTrim");
        launch("the next one", second, CUDA_SUCCESS);
        gt_check(calls("cuDeviceGraphMemTrim") == trims, "the next one", "without a trim");
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuMemFree(rest));
        GR_MUST(cuGraphExecDestroy(second));
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
}

/* The largest comes first and is gone when the last one comes: what counts is what there is at most at a time. */
static void largest_first(void)
{
        CUgraphExec exec;
        CUdeviceptr p;
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        for (int i = 0; i < 2; i++) {
                GR_MUST(cuMemAllocAsync(&p, i == 0 ? limit / 4 * 5 : GT_PAGE, stream));
                GR_MUST(cuMemFreeAsync(p, stream));
        }
        GR_MUST(cuStreamEndCapture(stream, &graph));
        exec = gt_executable(graph);
        launch("the largest first", exec, CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuGraphExecDestroy(exec));
        gt_sleep_us(BYPASS_US);
}

/* The first of two is freed first, so the next one has its memory; what was freed last would be another one's. */
static void first_freed_first(void)
{
        CUdeviceptr first, second;
        CUgraphExec exec;
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuMemAllocAsync(&first, limit / 4 * 3, stream));
        GR_MUST(cuMemAllocAsync(&second, GT_PAGE, stream));
        GR_MUST(cuMemFreeAsync(first, stream));
        GR_MUST(cuMemAllocAsync(&first, limit / 4 * 3, stream));
        GR_MUST(cuMemFreeAsync(first, stream));
        GR_MUST(cuMemFreeAsync(second, stream));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        exec = gt_executable(graph);
        gt_check(cuGraphLaunch(exec, stream) == CUDA_SUCCESS, "the first freed first", "launched");
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
}

/* Two allocations that the graph leaves, one after the other: it has one edge. */
static void with_one_edge(void)
{
        CUgraphNode node = NULL;
        CUgraphExec exec;
        CUgraph graph;

        GR_MUST(cuGraphCreate(&graph, 0));
        for (size_t i = 0; i < 2; i++) {
                CUDA_MEM_ALLOC_NODE_PARAMS params = {
                        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}},
                        .bytesize = limit / 4 * 3};

                GR_MUST(cuGraphAddMemAllocNode(&node, graph, &node, i, &params));
        }
        exec = gt_executable(graph);
        launch("two that are left", exec, CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuGraphExecDestroy(exec));
        gt_sleep_us(BYPASS_US);
}

/* A graph in a graph, which drivers have since CUDA 12.9 where it allocates. */
static void within_another(size_t bytes, CUresult expected)
{
#if CUDA_VERSION >= 12090
        __typeof__(&cuGraphAddNode_v2) add_node;
        void *found = dlsym(RTLD_DEFAULT, "cuGraphAddNode_v2");
        CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_GRAPH,
                                    .graph = {.ownership = CU_GRAPH_CHILD_GRAPH_OWNERSHIP_MOVE}};
        CUgraphExec exec;
        CUgraphNode node;
        CUgraph graph;

        memcpy(&add_node, &found, sizeof add_node);
        GR_MUST(cuGraphCreate(&graph, 0));
        capture(bytes, 1, true, &params.graph.graph);
        if (!add_node || add_node(&node, graph, NULL, NULL, 0, &params) != CUDA_SUCCESS) {
                printf("-      a graph in a graph: this driver refuses it\n");
                GR_MUST(cuGraphDestroy(params.graph.graph));
                GR_MUST(cuGraphDestroy(graph));
                return;
        }
        exec = gt_executable(graph);
        launch("a graph in a graph", exec, expected);
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
        gt_sleep_us(BYPASS_US);
#else
        (void)bytes, (void)expected;
#endif
}

/* Where the order of the nodes is not known, what might fit is not refused, and what cannot is. */
static void without_an_order(void)
{
        CUgraphExec serial = build(limit / 4 * 3, 2, true), large = build(limit / 4 * 5, 1, true);
        CUgraphExec by_hand = build_against_creation(limit / 4 * 3, false);

        launch("one after the other, in an order that is not told", serial, CUDA_SUCCESS);
        GR_MUST(cuStreamSynchronize(stream));
        launch("too large in any order", large, CUDA_ERROR_OUT_OF_MEMORY);
        gt_check(available() >= limit / 4 - slack_bytes && available() <= limit, "then", "%.1f MiB are free",
                 gt_mib(available()));
        GR_MUST(cuGraphExecDestroy(serial));
        GR_MUST(cuGraphExecDestroy(large));
        if (!by_hand)
                return;
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
        gt_check(cuGraphLaunch(by_hand, stream) == CUDA_SUCCESS, "one after the other, created otherwise", "launched");
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuGraphExecDestroy(by_hand));
}

/* An allocation of so many bytes on each device, of which both are there at a time; 0: none there. */
static CUgraphExec build_on_two(const size_t bytes[2])
{
        CUgraphNode last = NULL, release;
        CUdeviceptr ptrs[2] = {0};
        CUgraphExec exec;
        CUgraph graph;

        GR_MUST(cuGraphCreate(&graph, 0));
        for (int device = 0; device < 2; device++) {
                CUDA_MEM_ALLOC_NODE_PARAMS params = {
                        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}},
                        .bytesize = bytes[device]};

                if (!bytes[device])
                        continue;
                GR_MUST(cuGraphAddMemAllocNode(&last, graph, &last, last ? 1 : 0, &params));
                ptrs[device] = params.dptr;
        }
        for (int device = 0; device < 2; device++)
                if (ptrs[device])
                        GR_MUST(cuGraphAddMemFreeNode(&release, graph, &last, 1, ptrs[device]));
        exec = gt_executable(graph);
        return exec;
}

/* Each device has a limit of its own; what is on the device of the first allocation is known beforehand. */
static void on_two_devices(void)
{
        const size_t on_both[2] = {limit / 2, limit / 4 * 3}, on_second[2] = {0, limit / 4 * 5};
        CUgraphExec both = build_on_two(on_both), second = build_on_two(on_second);
        CUcontext popped, context;

        GR_MUST(cuDevicePrimaryCtxRetain(&context, 1)); /* the other device is in use */
        GR_MUST(cuCtxPushCurrent(context));
        available();
        GR_MUST(cuCtxPopCurrent(&popped));
        gt_check(cuGraphLaunch(second, stream) == CUDA_ERROR_OUT_OF_MEMORY, "too large on the second device",
                 "refused");
        gt_check(cuGraphLaunch(both, stream) == CUDA_SUCCESS, "on each device what fits there", "launched");
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuGraphExecDestroy(both));
        GR_MUST(cuGraphExecDestroy(second));
        GR_MUST(cuDevicePrimaryCtxRelease(1));
}

/* Graphs that allocate nothing are not taken for one that does not fit, whose handle one of them may have now. */
static void after_another(void)
{
        enum { GRAPHS = 64 };
        CUgraphExec large = build(limit / 4 * 3, 2, false), execs[GRAPHS];
        CUdeviceptr p;
        CUgraph graph;

        GR_MUST(cuMemAlloc(&p, GT_PAGE));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(gt_fill(&gt, stream, p, 7, 1024));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        launch("before its handle is another's", large, CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuGraphExecDestroy(large));
        for (int i = 0; i < GRAPHS; i++) {
                GR_MUST(cuGraphInstantiate(&execs[i], graph, 0));
                if (cuGraphLaunch(execs[i], stream) != CUDA_SUCCESS)
                        gt_check(false, "a graph that allocates nothing", "refused");
        }
        GR_MUST(cuStreamSynchronize(stream));
        for (int i = 0; i < GRAPHS; i++)
                GR_MUST(cuGraphExecDestroy(execs[i]));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuMemFree(p));
        gt_sleep_us(BYPASS_US);
}

/* Of memory alone, without the kernels of the others. */
static void capture_memory(size_t bytes, int count, CUgraph *ret_graph)
{
        CUdeviceptr p;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        for (int i = 0; i < count; i++) {
                GR_MUST(cuMemAllocAsync(&p, bytes, stream));
                GR_MUST(cuMemFreeAsync(p, stream));
        }
        GR_MUST(cuStreamEndCapture(stream, ret_graph));
}

/* Graphs that are made and gone leave nothing in the heap, nor do refused ones. A real driver keeps its own. */
static void keeps_nothing(void)
{
        enum { ROUNDS = 100, LEAST_BYTES = 64 };
        CUDA_GRAPH_INSTANTIATE_PARAMS params = {.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD, .hUploadStream = stream};
        CUgraph fits, large;
        size_t before = 0, after;
        CUgraphExec exec;

        if (!dlsym(RTLD_DEFAULT, "grSimVersion"))
                return;
        capture_memory(GT_PAGE, 8, &fits);
        capture_memory(limit / 4 * 5, 1, &large);
        for (int round = 0; round < 2 * ROUNDS; round++) {
                if (round == ROUNDS)
                        before = mallinfo2().uordblks;
                GR_MUST(cuGraphInstantiate(&exec, fits, 0));
                GR_MUST(cuGraphExecDestroy(exec));
                if (cuGraphInstantiateWithParams(&exec, large, &params) != CUDA_ERROR_OUT_OF_MEMORY)
                        gt_check(false, "uploaded at once, too large", "not refused");
        }
        after = mallinfo2().uordblks;
        gt_check(after < before + ROUNDS * LEAST_BYTES, "the heap", "%zu bytes after %d graphs, and %zu after %d",
                 before, 2 * ROUNDS, after, 4 * ROUNDS);
        GR_MUST(cuGraphDestroy(fits));
        GR_MUST(cuGraphDestroy(large));
        gt_sleep_us(BYPASS_US);
}

/* With nothing else of the limit in use but what is only cached. */
static void against_creation(void)
{
        CUgraphExec exec = build_against_creation(limit / 4 * 3, true);
        size_t bytes;

        if (!exec)
                return;
        launch("by hand, two at once", exec, CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuGraphExecDestroy(exec));
        gt_sleep_us(BYPASS_US);

        /* Whether the two then share memory is the driver's to say, so what it holds is told and not judged. */
        exec = build_against_creation(limit / 4 * 3, false);
        if (!exec)
                return;
        gt_check(cuGraphLaunch(exec, stream) == CUDA_SUCCESS, "by hand, one after the other", "launched");
        GR_MUST(cuStreamSynchronize(stream));
        if (gt_footprint(&gt, &bytes))
                printf("-      by hand, one after the other: %.1f MiB held (%s)\n", gt_mib(bytes),
                       gt_footprint_source(&gt));
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
}

/* A graph that fits is launched, and its memory counts. Returns it. */
static CUgraphExec one_that_fits(void)
{
        size_t before = available();
        CUgraphExec half;
        CUdeviceptr p;

        GR_MUST(cuMemAllocAsync(&p, limit / 8, stream));
        GR_MUST(cuMemFreeAsync(p, stream));
        check_peak("in stream order", 0);
        half = build(limit / 2, 1, true);
        launch("a graph that fits", half, CUDA_SUCCESS);
        check_peak("with a graph", 0);
        gt_check(before - available() + slack_bytes >= limit / 2, "its memory counts", "%.1f MiB free of %.1f",
                 gt_mib(available()), gt_mib(before));
        for (int i = 0; i < 10; i++)
                GR_MUST(cuGraphLaunch(half, stream));
        GR_MUST(cuStreamSynchronize(stream));
        return half;
}

/* One that does not fit is refused however it is asked for, and leaves room for one that does. Returns it. */
static CUgraphExec one_that_does_not_fit(CUgraphExec half)
{
        CUgraphExec both = build(limit / 4 * 3, 2, false), many;
        void *block;

        gt_check(cuGraphUpload(both, stream) == CUDA_ERROR_OUT_OF_MEMORY, "upload of one that does not fit", "refused");
        launch("launch of one that does not fit", both, CUDA_ERROR_OUT_OF_MEMORY);
        many = build(limit / 32, MOST_SPLIT, false);
        launch("launch of one with many allocations", many, CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuGraphExecDestroy(many));
        block = unused(limit / 4);
        check_peak("with what was refused", limit / 4);
        give(block);
        beside_a_capture(both);
        launch("the first one after that", half, CUDA_SUCCESS);
        gt_sleep_us(BYPASS_US);
        return both;
}

/* One after the other in the same memory, so it fits, and what our cache holds makes room. Returns the graph. */
static CUgraphExec with_a_full_cache(void)
{
        void *block = unused(limit / 8 * 7);
        CUgraphExec serial;

        check_peak("after what was refused", limit / 8 * 7);
        give(block);
        serial = build(limit / 4 * 3, 2, true);
        launch("one after the other, with a full cache", serial, CUDA_SUCCESS);
        launch("again", serial, CUDA_SUCCESS);
        return serial;
}

/* Beside memory that is in use there is no room; once it is freed there is. Returns the graph. */
static CUgraphExec beside_memory_in_use(void)
{
        void *block = unused(limit / 2);
        CUgraphExec exec = build(limit / 4 * 3, 1, true);

        launch("beside memory in use", exec, CUDA_ERROR_OUT_OF_MEMORY);
        give(block);
        launch("when that is freed", exec, CUDA_SUCCESS);
        return exec;
}

/* Two that fit one at a time, in one stream: the memory of the one makes room for the other. */
static void turn_by_turn(CUgraphExec one)
{
        CUgraphExec other = build(limit / 4 * 3, 1, true);

        for (int i = 0; i < 2; i++) {
                gt_check(cuGraphLaunch(one, stream) == CUDA_SUCCESS, "turn by turn, the one", "launched");
                gt_check(cuGraphLaunch(other, stream) == CUDA_SUCCESS, "turn by turn, the other", "launched");
        }
        check_footprint("turn by turn");
        GR_MUST(cuGraphExecDestroy(one));
        GR_MUST(cuGraphExecDestroy(other));
}

static void when_all_are_gone(void)
{
        CUdeviceptr p;

        gt_check(cuMemAlloc(&p, limit / 4 * 3) == CUDA_SUCCESS, "memory of graphs that are gone",
                 "%.1f MiB got by cuMemAlloc", gt_mib(limit / 4 * 3));
        GR_MUST(cuMemFree(p));
}

/* The order matters: each finds what those before it have left in the cache and with the driver. */
static void all_in_turn(void)
{
        CUgraphExec half = one_that_fits(), both, serial;

        while_it_is_held_up(half); /* before any trim, which a refusal leads to */
        both = one_that_does_not_fit(half);
        while_it_runs(half);
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
        launched_once(half);
        after_another();
        keeps_nothing();
        GR_MUST(cuGraphExecDestroy(half));
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
        serial = with_a_full_cache();
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
        turn_by_turn(beside_memory_in_use());
        GR_MUST(cuGraphExecDestroy(serial));
        GR_MUST(cuGraphExecDestroy(both));
        when_all_are_gone();
        uploaded_at_once(limit / 4 * 5, false);
        gt_sleep_us(BYPASS_US);
        uploaded_at_once(limit / 4 * 3, true);
        against_creation();
        largest_first();
        first_freed_first();
        with_one_edge();
        if (gt.simulated)
                after_one_that_is_gone();
        within_another(limit / 2, CUDA_SUCCESS);
        within_another(limit / 4 * 5, CUDA_ERROR_OUT_OF_MEMORY);
        check_footprint("in the end");
}

int main(int argc, char **argv)
{
        bool unordered = false, two_devices = false;

        GT_OPTIONS(argc, argv, "--limit=SIZE [--unordered|--two-devices]", GT_OPTION("limit", limit),
                   GT_OPTION("unordered", unordered), GT_OPTION("two-devices", two_devices));
        if (!limit)
                gt_die("limit_graphs needs --limit=SIZE");
        gt_open(&gt);
        stream = gt_stream();
        if (unordered)
                without_an_order();
        else if (two_devices)
                on_two_devices();
        else
                all_in_turn();
        GR_MUST(cuStreamDestroy(stream));
        gt_close(&gt);
        return GR_CHECK_RESULT();
}
