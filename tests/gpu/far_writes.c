/*
 * Memory that is freed behind a kernel serves again before that kernel has ended, as all work of its device waits for
 * it. What does not wait by itself and writes there is another device's copy, which needs no peer access, and another
 * process. Both must come after the kernel all the same. Under the library only.
 *
 *   far_writes [WAY]     all ways to write, each in a process of its own; or this one
 *
 * One line per way; exit status 1 when one failed. By pool kind not all memory serves again at once.
 */
#include "gputest.h"
#include "newer.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES (64 * MIB)
#define WORDS (BYTES / 4)
#define ROW   (64 * KIB)
enum { LATE_US = 700000, OLD = 1, NEW = 2 };

static struct gt near;     /* of the memory */
static CUcontext far;      /* of another device */
static CUdeviceptr source; /* far's, full of NEW */
static CUstream stream;    /* far's */

static void begin_far(void)
{
        GR_MUST(cuDevicePrimaryCtxRetain(&far, 1));
        GR_MUST(cuCtxSetCurrent(far));
        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuMemAlloc(&source, BYTES));
        GR_MUST(cuMemsetD32Async(source, NEW, WORDS, stream));
        GR_MUST(cuStreamSynchronize(stream));
}

static void unified(CUdeviceptr p)
{
        GR_MUST(cuMemcpyAsync(p, source, BYTES, stream));
}

static void unified_late(CUdeviceptr p)
{
        begin_far();
        unified(p);
}

static void device_to_device(CUdeviceptr p)
{
        GR_MUST(cuMemcpyDtoDAsync(p, source, BYTES, stream));
}

static void peer(CUdeviceptr p)
{
        GR_MUST(cuMemcpyPeerAsync(p, near.ctx, source, far, BYTES, stream));
}

static void peer_waits(CUdeviceptr p)
{
        GR_MUST(cuMemcpyPeer(p, near.ctx, source, far, BYTES));
}

static void from_host(CUdeviceptr p)
{
        uint32_t *words = malloc(BYTES);

        for (size_t i = 0; i < WORDS; i++)
                words[i] = NEW;
        GR_MUST(cuMemcpyHtoD(p, words, BYTES));
        free(words);
}

static void rows(CUdeviceptr p)
{
        CUDA_MEMCPY2D copy = {.srcMemoryType = CU_MEMORYTYPE_UNIFIED,
                              .srcDevice = source,
                              .srcPitch = ROW,
                              .dstMemoryType = CU_MEMORYTYPE_UNIFIED,
                              .dstDevice = p,
                              .dstPitch = ROW,
                              .WidthInBytes = ROW,
                              .Height = BYTES / ROW};

        GR_MUST(cuMemcpy2DAsync(&copy, stream));
}

/* A function of CUDA 13.2. Where the driver has none, the way ends here. */
static void (*newer(const char *name))(void)
{
        void (*call)(void) = gt_lookup_of(name, 13020);

        if (call)
                return call;
        printf("-      %s is not to be had here\n", name);
        exit(GT_SKIPPED);
}

static void with_attributes(CUdeviceptr p)
{
        CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};

        GR_MUST(((__typeof__(&cuMemcpyWithAttributesAsync))newer("cuMemcpyWithAttributesAsync"))(p, source, BYTES,
                                                                                                 &attributes, stream));
}

static void box_with_attributes(CUdeviceptr p)
{
        CUDA_MEMCPY3D_BATCH_OP box = {
                .src = {.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .op.ptr.ptr = source},
                .dst = {.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .op.ptr.ptr = p},
                .extent = {BYTES, 1, 1},
                .srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        };

        GR_MUST(((__typeof__(&cuMemcpy3DWithAttributesAsync))newer("cuMemcpy3DWithAttributesAsync"))(&box, 0, stream));
}

/* Launches what the graph becomes in far's stream, and destroys both. */
static void launch(CUgraph graph)
{
        CUgraphExec exec = gt_executable(graph);

        GR_MUST(cuGraphLaunch(exec, stream));
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuGraphExecDestroy(exec));
}

static CUgraph end_capture(CUstream captured)
{
        CUgraph graph;

        GR_MUST(cuStreamEndCapture(captured, &graph));
        return graph;
}

static void graph(CUdeviceptr p)
{
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemcpyAsync(p, source, BYTES, stream));
        launch(end_capture(stream));
}

/* Its work on the memory is the near device's own, which waits for what far's stream waits for. */
static void graph_of_both(CUdeviceptr p)
{
        CUstream own;
        CUevent fork, join;

        GR_MUST(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
        gt_attach(&near);
        GR_MUST(cuStreamCreate(&own, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuEventRecord(fork, stream));
        GR_MUST(cuStreamWaitEvent(own, fork, 0));
        GR_MUST(gt_fill(&near, own, p, NEW, WORDS));
        GR_MUST(cuEventRecord(join, own));
        GR_MUST(cuStreamWaitEvent(stream, join, 0));
        GR_MUST(cuCtxSetCurrent(far));
        launch(end_capture(stream));
}

static void graph_of_near(CUdeviceptr p)
{
        CUgraph graph;
        CUstream own;

        GR_MUST(cuStreamCreate(&own, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamBeginCapture(own, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(gt_fill(&near, own, p, NEW, WORDS));
        graph = end_capture(own);
        begin_far();
        launch(graph);
}

static void graph_by_hand(CUdeviceptr p)
{
        CUDA_MEMSET_NODE_PARAMS fill = {.dst = p, .value = NEW, .elementSize = 4, .width = WORDS, .height = 1};
        CUgraphNode node;
        CUgraph graph;

        GR_MUST(cuGraphCreate(&graph, 0));
        GR_MUST(cuGraphAddMemsetNode(&node, graph, NULL, 0, &fill, near.ctx));
        launch(graph);
}

static void graph_by_new_hand(CUdeviceptr p)
{
        CUgraphNodeParams fill = {
                .type = CU_GRAPH_NODE_TYPE_MEMSET,
                .memset = {.dst = p, .value = NEW, .elementSize = 4, .width = WORDS, .height = 1, .ctx = near.ctx}};
        CUgraphNode node;
        CUgraph graph;

        GR_MUST(cuGraphCreate(&graph, 0));
        GR_MUST(cuGraphAddNode(&node, graph, NULL, NULL, 0, &fill));
        launch(graph);
}

static CUdeviceptr elsewhere; /* near's */

static void *copy_elsewhere(void *arg)
{
        GR_MUST(cuCtxSetCurrent(far));
        GR_MUST(cuMemcpyAsync(elsewhere, source, KIB, stream));
        return arg;
}

/* Beside a capture the context cannot be made to wait on the GPU: the first copy's call does so, and not it alone. */
static void two_at_once(CUdeviceptr p)
{
        pthread_t thread;
        CUstream captured;

        GR_MUST(cuStreamCreate(&captured, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamBeginCapture(captured, CU_STREAM_CAPTURE_MODE_RELAXED));
        pthread_create(&thread, NULL, copy_elsewhere, NULL);
        gt_sleep_us(100000);
        unified(p);
        GR_MUST(cuStreamSynchronize(stream));
        pthread_join(thread, NULL);
        GR_MUST(cuGraphDestroy(end_capture(captured)));
}

/*
 * A graph of far's own memory. After it, what the near device has done with is free for new use, though far's stream
 * waits.
 */
static void reuse_beside_graph(CUdeviceptr p)
{
        CUdeviceptr word, freed = 0, next;
        bool again = false;

        GR_MUST(cuMemAlloc(&word, 4));
        GR_MUST(cuMemsetD32(word, OLD, 1));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemsetD32Async(source, OLD, WORDS, stream));
        launch(end_capture(stream));
        GR_MUST(cuStreamWaitValue32(stream, word, NEW, CU_STREAM_WAIT_VALUE_EQ));
        gt_attach(&near);
        for (int tries = 0; tries < 300 && !again; tries++) {
                GR_MUST(cuMemAlloc(&next, 4 * MIB));
                again = next == freed;
                freed = next;
                GR_MUST(gt_fill(&near, NULL, next, OLD, 1));
                GR_MUST(cuCtxSynchronize());
                GR_MUST(cuMemFree(next));
                gt_sleep_us(10000);
        }
        GR_CHECK(again);
        GR_MUST(gt_fill(&near, NULL, p, NEW, WORDS));
        GR_MUST(cuCtxSetCurrent(far));
        GR_MUST(cuMemsetD32(word, NEW, 1));
}

static const struct way {
        const char *name;
        void (*write)(CUdeviceptr p); /* NULL: another process does, of the same device */
        bool begins_late;             /* write begins with the other device, when the memory serves again already */
} ways[] = {
        {"another process", NULL, false},
        {"cuMemcpyAsync", unified, false},
        {"cuMemcpyAsync of a context made later", unified_late, true},
        {"cuMemcpyDtoDAsync", device_to_device, false},
        {"cuMemcpyPeerAsync", peer, false},
        {"cuMemcpyPeer", peer_waits, false},
        {"cuMemcpyHtoD", from_host, false},
        {"cuMemcpy2DAsync", rows, false},
        {"cuMemcpyWithAttributesAsync", with_attributes, false},
        {"cuMemcpy3DWithAttributesAsync", box_with_attributes, false},
        {"a graph", graph, false},
        {"a graph of both devices", graph_of_both, false},
        {"a graph of the memory's device", graph_of_near, true},
        {"a graph made by hand", graph_by_hand, false},
        {"a graph made by hand, newer", graph_by_new_hand, false},
        {"reuse beside a graph", reuse_beside_graph, false},
        {"two copies at once", two_at_once, false},
};
enum { WAYS = sizeof ways / sizeof *ways };

static const char *name_of(size_t way)
{
        return ways[way].name;
}

/* Fills what it is told of. */
static void other_process(int from, int to)
{
        CUipcMemHandle handle;
        struct gt gt;
        CUdeviceptr p;

        gt_open(&gt);
        if (write(to, "", 1) != 1 || read(from, &handle, sizeof(handle)) != sizeof(handle))
                _exit(1);
        GR_MUST(cuIpcOpenMemHandle(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        GR_MUST(gt_fill(&gt, NULL, p, NEW, WORDS));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuIpcCloseMemHandle(p));
        _exit(write(to, "", 1) != 1);
}

static int try_way(size_t i)
{
        const struct way *way = &ways[i];
        int there[2], back[2], devices = 0;
        CUdeviceptr before, after;
        CUipcMemHandle handle;
        char word;
        pid_t pid = -1;

        if (!way->write) {
                if (pipe(there) || pipe(back) || (pid = fork()) < 0)
                        gt_die("no other process");
                if (pid == 0)
                        other_process(there[0], back[1]);
                if (read(back[0], &word, 1) != 1)
                        gt_die("the other process ends");
        }
        gt_open(&near);
        GR_MUST(cuDeviceGetCount(&devices));
        if (way->write && devices < 2) {
                printf("-      there is one device only\n");
                return GT_SKIPPED;
        }
        if (way->write && !way->begins_late)
                begin_far();
        gt_attach(&near);
        GR_MUST(cuMemAlloc(&elsewhere, 4 * MIB));
        GR_MUST(cuMemAlloc(&before, BYTES));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(gt_late_fill(&near, NULL, before, OLD, WORDS, LATE_US));
        GR_MUST(cuMemFree(before));
        GR_MUST(cuMemAlloc(&after, BYTES));
        if (after != before) /* as where a barrier would make other work wait */
                printf("-      %s: the memory does not serve again at once\n", way->name);
        if (!way->write) {
                GR_MUST(cuIpcGetMemHandle(&handle, after));
                if (write(there[1], &handle, sizeof(handle)) != sizeof(handle) || read(back[0], &word, 1) != 1 ||
                    waitpid(pid, NULL, 0) != pid)
                        gt_die("the other process ends");
        } else {
                if (!way->begins_late)
                        GR_MUST(cuCtxSetCurrent(far));
                way->write(after);
                GR_MUST(cuCtxSynchronize()); /* even cuMemcpyPeer returns before */
                gt_attach(&near);
        }
        GR_MUST(cuCtxSynchronize());
        gt_check(gt_wrong_words(after, BYTES, NEW) == 0, way->name, "%u words of three are wrong",
                 gt_wrong_words(after, BYTES, NEW));
        return GR_CHECK_RESULT();
}

int main(int argc, char **argv)
{
        return gt_ways(argc, argv, WAYS, name_of, try_way);
}
