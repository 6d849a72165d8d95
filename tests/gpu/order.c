/*
 * Memory that is freed behind a kernel serves again before that kernel has ended, where later work of its device waits
 * for it. What does not wait by itself must come after the kernel all the same, else the kernel would write to memory
 * that is in use again: the first work that is not in the order of submission, another device's copy, which needs no
 * peer access, its kernel that has it, and another process. Once the program has waited for all work, what comes later
 * need wait for nothing, as a later kernel may wait for it. Under the library only.
 *
 *   order [WAY]     all ways to write, and to wait, each in a process of its own; or this one
 *
 * One line per way; exit status 1 when one failed. Where there is one device, only its own ways are tried.
 */
#include "gputest.h"
#include "newer.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES     (64 * MIB)
#define WORDS     (BYTES / 4)
#define FEW_BYTES (4 * MIB) /* their epoch stays open */
#define ROW       (64 * KIB)
enum { LATE_US = 700000, LONG_US = 10000000, OLD = 1, NEW = 2 };

CUresult cublas_makes_stream(CUstream *stream, bool priority); /* of a library that is called like cuBLAS */

static struct gt near;        /* of the memory */
static CUcontext far;         /* of another device */
static CUdeviceptr source;    /* full of NEW; far's, where that is there */
static CUstream stream;       /* far's */
static CUfunction far_fill;   /* far's, which has access to near's memory then */
static CUdeviceptr elsewhere; /* near's */

static void default_stream(CUdeviceptr p)
{
        GR_MUST(gt_fill(&near, NULL, p, NEW, WORDS));
}

static void made_stream(CUdeviceptr p)
{
        GR_MUST(gt_fill(&near, gt_stream(), p, NEW, WORDS));
}

/* A stream of cuBLAS counts as one that gets no work, until it gets some. */
static void cublas_stream(CUdeviceptr p)
{
        CUstream made;

        GR_MUST(cublas_makes_stream(&made, false));
        GR_MUST(gt_fill(&near, made, p, NEW, WORDS));
}

static void other_context(CUdeviceptr p)
{
        CUcontext context;

#if CUDA_VERSION >= 13000
        GR_MUST(cuCtxCreate(&context, NULL, 0, near.device));
#else
        GR_MUST(cuCtxCreate(&context, 0, near.device));
#endif
        GR_MUST(cuMemcpyDtoD(p, source, BYTES));
        GR_MUST(cuCtxSynchronize());
        gt_attach(&near);
}

static void green_context(CUdeviceptr p)
{
        struct gt_green part;

        if (!gt_green_open(near.device, &part)) {
                printf("-      green contexts are not to be had here\n");
                exit(GT_SKIPPED);
        }
        GR_MUST(cuMemsetD32Async(p, NEW, WORDS, part.stream));
        GR_MUST(cuStreamSynchronize(part.stream));
        gt_green_close(&part);
        gt_attach(&near);
}

static _Thread_local unsigned sleeps;

/* In place of the C library's, for the library as well: a call in which it sleeps must keep errno all the same. */
__attribute__((visibility("default"))) int nanosleep(const struct timespec *time, struct timespec *rest)
{
        int rc = (int)syscall(SYS_nanosleep, time, rest);

        sleeps++;
        errno = rc ? errno : EDOM;
        return rc;
}

/* The driver itself need not keep errno. */
#define MUST_KEEP_ERRNO(call)                                                                                          \
        do {                                                                                                           \
                errno = 0;                                                                                             \
                GR_MUST(call);                                                                                         \
                if (near.simulated)                                                                                    \
                        GR_CHECK_EQ(errno, 0);                                                                         \
        } while (0)

static void begin_far(void)
{
        GR_MUST(cuDevicePrimaryCtxRetain(&far, 1));
        GR_MUST(cuCtxSetCurrent(far));
        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuMemAlloc(&source, BYTES));
        GR_MUST(cuMemsetD32Async(source, NEW, WORDS, stream));
        GR_MUST(cuStreamSynchronize(stream));
}

/* reset: the primary context was retained and reset before, so the library does not know how often it is retained. */
static void begin_peer(bool reset)
{
        CUmodule module;

        if (reset) {
                GR_MUST(cuDevicePrimaryCtxRetain(&far, 1));
                GR_MUST(cuDevicePrimaryCtxReset(1));
        }
        begin_far();
        gt_load_kernels(&module);
        GR_MUST(cuModuleGetFunction(&far_fill, module, "gr_fill"));
        GR_MUST(cuCtxEnablePeerAccess(near.ctx, 0));
        if (reset)
                GR_MUST(cuDevicePrimaryCtxRelease(1));
}

static void far_kernel(CUdeviceptr p)
{
        struct gt gt = {.fill = far_fill};

        GR_MUST(gt_fill(&gt, stream, p, NEW, WORDS));
}

static void unified(CUdeviceptr p)
{
        MUST_KEEP_ERRNO(cuMemcpyAsync(p, source, BYTES, stream));
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

        MUST_KEEP_ERRNO(cuGraphLaunch(exec, stream));
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuGraphExecDestroy(exec));
}

static CUgraph end_capture(CUstream captured)
{
        CUgraph graph;

        GR_MUST(cuStreamEndCapture(captured, &graph));
        return graph;
}

/* What is captured waits when the graph is launched, and not here: the copy, or the graph instead. */
static CUgraph capture_copy(CUdeviceptr p, CUgraphExec instead)
{
        unsigned before;
        CUresult result;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        before = sleeps;
        result = instead ? cuGraphLaunch(instead, stream) : cuMemcpyAsync(p, source, BYTES, stream);
        if (instead && result == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && !near.simulated) {
                printf("-      launches of such a graph cannot be captured here\n");
                exit(GT_SKIPPED);
        }
        GR_MUST(result);
        GR_CHECK(!near.simulated || sleeps == before);
        return end_capture(stream);
}

static void graph(CUdeviceptr p)
{
        launch(capture_copy(p, NULL));
}

static void graph_in_graph(CUdeviceptr p)
{
        launch(capture_copy(p, gt_executable(capture_copy(p, NULL))));
}

/* Captures work of the near device on p in a graph of far's stream. */
static CUgraph capture_of_both(CUdeviceptr p, void (*work)(CUdeviceptr p, CUstream own))
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
        work(p, own);
        GR_MUST(cuEventRecord(join, own));
        GR_MUST(cuStreamWaitEvent(stream, join, 0));
        GR_MUST(cuCtxSetCurrent(far));
        return end_capture(stream);
}

static void fill_by_kernel(CUdeviceptr p, CUstream own)
{
        GR_MUST(gt_fill(&near, own, p, NEW, WORDS));
}

/* The near device's own work waits for what far's stream waits for. */
static void graph_of_both(CUdeviceptr p)
{
        launch(capture_of_both(p, fill_by_kernel));
}

/* The words that gt_wrong_words looks at. */
static void write_words(CUdeviceptr p, CUstream own)
{
        const CUdeviceptr at[] = {p, p + BYTES / 8 * 4, p + BYTES - 4};
        CUstreamBatchMemOpParams writes[3] = {0};

        for (size_t i = 0; i < 3; i++) {
                writes[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
                writes[i].writeValue.address = at[i];
                writes[i].writeValue.value = NEW;
        }
        GR_MUST(cuStreamBatchMemOp(own, 3, writes, 0));
}

static void graph_of_words(CUdeviceptr p)
{
        launch(capture_of_both(p, write_words));
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

/* A kernel of far's, in a graph that a third device launches. */
static void graph_of_peer(CUdeviceptr p)
{
        CUcontext third;
        CUgraph graph;
        int devices;

        GR_MUST(cuDeviceGetCount(&devices));
        if (devices < 3) {
                printf("-      there are two devices only\n");
                exit(GT_SKIPPED);
        }
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        far_kernel(p);
        graph = end_capture(stream);
        GR_MUST(cuDevicePrimaryCtxRetain(&third, 2));
        GR_MUST(cuCtxSetCurrent(third));
        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        launch(graph);
        GR_MUST(cuCtxSetCurrent(far));
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

static void *copy_elsewhere(void *arg)
{
        GR_MUST(cuCtxSetCurrent(far));
        GR_MUST(cuMemcpyAsync(elsewhere, source, KIB, stream));
        return arg;
}

static CUstream begin_capture(void)
{
        CUstream captured;

        GR_MUST(cuStreamCreate(&captured, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamBeginCapture(captured, CU_STREAM_CAPTURE_MODE_RELAXED));
        return captured;
}

/* Beside a capture the context cannot be made to wait on the GPU: the first copy's call does so, and not it alone. */
static void two_at_once(CUdeviceptr p)
{
        CUstream captured = begin_capture();
        pthread_t thread;

        pthread_create(&thread, NULL, copy_elsewhere, NULL);
        gt_sleep_us(100000);
        unified(p);
        GR_MUST(cuStreamSynchronize(stream));
        pthread_join(thread, NULL);
        GR_MUST(cuGraphDestroy(end_capture(captured)));
}

static void graph_beside_capture(CUdeviceptr p)
{
        CUgraph copy = capture_copy(p, NULL);
        CUstream captured = begin_capture();

        launch(copy);
        GR_MUST(cuGraphDestroy(end_capture(captured)));
}

static void CUDA_CB nothing(void *arg)
{
        (void)arg;
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
        GR_MUST(cuLaunchHostFunc(gt_stream(), nothing, NULL)); /* beside it */
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

/* The driver refuses the wait (GRSIM_FAULT), so the stream still has something to come after. */
static void failed_wait(CUdeviceptr p)
{
        if (!getenv("GRSIM_FAULT")) {
                printf("-      no wait fails here\n");
                exit(GT_SKIPPED);
        }
        GR_CHECK_EQ(cuCtxSynchronize(), CUDA_ERROR_NOT_READY);
        GR_MUST(gt_fill(&near, gt_stream(), p, NEW, FEW_BYTES / 4));
}

static CUresult wait_for_stream(void)
{
        return cuStreamSynchronize(NULL);
}

static CUresult wait_for_legacy_stream(void)
{
        return cuStreamSynchronize(CU_STREAM_LEGACY);
}

enum by {
        NEAR,
        PROCESS,
        FAR_LATER, /* write begins with the other device */
        FAR,       /* from here on it begins before */
        FAR_PEER,  /* and has access to the memory */
        FAR_KEPT,  /* and the library has prepared for the end of its context, which then did not end */
};

static const struct way {
        const char *name;
        enum by by;
        void (*write)(CUdeviceptr p);
        CUresult (*wait)(void);
} ways[] = {
        {"the default stream", NEAR, default_stream, NULL},
        {"a stream", NEAR, made_stream, NULL},
        {"a stream of cuBLAS", NEAR, cublas_stream, NULL},
        {"another context", NEAR, other_context, NULL},
        {"a green context", NEAR, green_context, NULL},
        {"a wait that fails", NEAR, failed_wait, NULL},
        {"a wait for the context", NEAR, NULL, cuCtxSynchronize},
        {"a wait for the default stream", NEAR, NULL, wait_for_stream},
        {"a wait for the legacy stream", NEAR, NULL, wait_for_legacy_stream},
        {"another process", PROCESS, NULL, NULL},
        {"cuMemcpyAsync", FAR, unified, NULL},
        {"cuMemcpyAsync of a context made later", FAR_LATER, unified_late, NULL},
        {"cuMemcpyDtoDAsync", FAR, device_to_device, NULL},
        {"cuMemcpyPeerAsync", FAR, peer, NULL},
        {"cuMemcpyPeer", FAR, peer_waits, NULL},
        {"cuMemcpyHtoD", FAR, from_host, NULL},
        {"cuMemcpy2DAsync", FAR, rows, NULL},
        {"cuMemcpyWithAttributesAsync", FAR, with_attributes, NULL},
        {"cuMemcpy3DWithAttributesAsync", FAR, box_with_attributes, NULL},
        {"a graph", FAR, graph, NULL},
        {"a graph in a graph", FAR, graph_in_graph, NULL},
        {"a graph of both devices", FAR, graph_of_both, NULL},
        {"a graph that writes words", FAR, graph_of_words, NULL},
        {"a graph of the memory's device", FAR_LATER, graph_of_near, NULL},
        {"a graph made by hand", FAR, graph_by_hand, NULL},
        {"a graph made by hand, newer", FAR, graph_by_new_hand, NULL},
        {"reuse beside a graph", FAR, reuse_beside_graph, NULL},
        {"two copies at once", FAR, two_at_once, NULL},
        {"a graph beside a capture", FAR, graph_beside_capture, NULL},
        {"a kernel with peer access", FAR_PEER, far_kernel, NULL},
        {"a graph of a peer, launched by a third device", FAR_PEER, graph_of_peer, NULL},
        {"the same after a release that does not end its context", FAR_KEPT, far_kernel, NULL},
};
enum { WAYS = sizeof ways / sizeof *ways };

static const char *name_of(size_t way)
{
        return ways[way].name;
}

static void await_and_copy(CUdeviceptr word, uint32_t value)
{
        GR_MUST(gt_await(&near, NULL, word, value, LONG_US));
        GR_MUST(gt_copy(&near, NULL, word + 4, word, 1));
}

/* A block is handed out ahead of its fence. After the wait nothing uses it that a stream would have to wait for. */
static void try_wait(const struct way *way)
{
        CUdeviceptr word, before, after;

        GR_MUST(cuMemAlloc(&word, 8));
        GR_MUST(gt_fill(&near, NULL, word, OLD, 2));
        await_and_copy(word, OLD); /* the driver may load a kernel at its first launch, and wait for the GPU then */
        GR_MUST(cuMemAlloc(&before, FEW_BYTES));
        GR_MUST(gt_fill(&near, NULL, before, OLD, 1));
        GR_MUST(cuMemFree(before));
        GR_MUST(cuMemAlloc(&after, FEW_BYTES));
        GR_CHECK_EQ(after, before);
        GR_MUST(way->wait());
        await_and_copy(word, NEW);
        GR_MUST(gt_fill(&near, gt_stream(), word, NEW, 1));
        GR_MUST(cuCtxSynchronize());
        gt_check(gt_wrong_words(word + 4, 4, NEW) == 0, way->name, "a later kernel saw what the stream wrote");
        GR_MUST(cuMemFree(after));
        GR_MUST(cuMemFree(word));
}

static int to_other, from_other; /* pipes */

static void hear_other(void)
{
        char word;

        if (read(from_other, &word, 1) != 1)
                gt_die("the other process ends");
}

/* Fills what it is told of. */
static void work_as_other(int from, int to)
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

/* Before this one opens the device. */
static void begin_other(void)
{
        int there[2], back[2];
        pid_t pid;

        if (pipe(there) || pipe(back) || (pid = fork()) < 0)
                gt_die("no other process");
        if (pid == 0)
                work_as_other(there[0], back[1]);
        to_other = there[1];
        from_other = back[0];
        close(back[1]);
        hear_other();
}

static void tell_other(CUdeviceptr p)
{
        CUipcMemHandle handle;

        GR_MUST(cuIpcGetMemHandle(&handle, p));
        if (write(to_other, &handle, sizeof(handle)) != sizeof(handle))
                gt_die("the other process ends");
        hear_other();
}

static void try_write(const struct way *way)
{
        size_t bytes = way->write == failed_wait ? FEW_BYTES : BYTES;
        CUdeviceptr before, after;

        if (way->by == FAR)
                begin_far();
        else if (way->by > FAR)
                begin_peer(way->by == FAR_KEPT);
        gt_attach(&near);
        if (way->by == NEAR) {
                GR_MUST(cuMemAlloc(&source, BYTES));
                GR_MUST(gt_fill(&near, NULL, source, NEW, WORDS));
        }
        GR_MUST(cuMemAlloc(&elsewhere, 4 * MIB));
        GR_MUST(cuMemAlloc(&before, bytes));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(gt_late_fill(&near, NULL, before, OLD, bytes / 4, LATE_US));
        GR_MUST(cuMemFree(before));
        GR_MUST(cuMemAlloc(&after, bytes));
        if (way->by >= FAR && after != before) /* pool kind bins: a barrier would make other work wait */
                printf("-      %s: the memory does not serve again at once\n", way->name);
        else
                GR_CHECK_EQ(after, before);
        if (way->by >= FAR)
                GR_MUST(cuCtxSetCurrent(far));
        if (way->by == PROCESS)
                tell_other(after);
        else
                way->write(after);
        GR_MUST(cuCtxSynchronize()); /* even cuMemcpyPeer returns before */
        gt_attach(&near);
        GR_MUST(cuCtxSynchronize());
        gt_check(gt_wrong_words(after, bytes, NEW) == 0, way->name, "%u words of three are wrong",
                 gt_wrong_words(after, bytes, NEW));
}

static int try_way(size_t i)
{
        int devices = 0;

        if (ways[i].by == PROCESS)
                begin_other();
        gt_open(&near);
        GR_MUST(cuDeviceGetCount(&devices));
        if (devices < 2 && ways[i].by >= FAR_LATER) {
                printf("-      %s: there is one device only\n", ways[i].name);
                return GT_SKIPPED;
        }
        if (ways[i].wait)
                try_wait(&ways[i]);
        else
                try_write(&ways[i]);
        return GR_CHECK_RESULT();
}

int main(int argc, char **argv)
{
        return gt_ways(argc, argv, WAYS, name_of, try_way);
}
