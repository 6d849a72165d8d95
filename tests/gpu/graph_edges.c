/*
 * Memory of graphs at the edges: captures that outlive their threads, whose end fails, or that go into a graph of the
 * program's; memory that was exported, or that lies in host memory; and graphs of another device. Under the shim only.
 * Each row says what it saw, and the status is 1 if one is bad.
 *
 *   graph_edges [--refused] [--no-memory] [--again]
 *
 * The first two are for a driver that answers the launch of a graph with CUDA_ERROR_UNKNOWN: a launch that is captured,
 * or one of a graph that allocates nothing. With the third the first memory that a graph lets go of is that of one that
 * is captured again. Nothing else is done then.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpureclaim.h"
#include "gputest.h"
#include "newer.h"

enum { BYTES = 4 * MIB };

static struct gt gt;
static CUstream stream;
static bool shared; /* graphs share their memory */
static int bad;

static void row(bool good, const char *name)
{
        printf("%s: %s\n", name, good ? "ok" : "BAD");
        bad += !good;
}

static struct gpureclaim_status status(int device)
{
        struct gpureclaim_status status = {.struct_bytes = sizeof status};
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_status");
        gpureclaim_status_function *get;

        memcpy(&get, &found, sizeof get);
        if (!get || get(device, &status))
                gt_die("no library, or no figures");
        return status;
}

/* Whether the figure of graphs falls to bytes. The driver tells a moment later that a graph has gone. */
static bool falls_to(int device, uint64_t bytes)
{
        CUdeviceptr p;

        for (int i = 0; i < 100 && status(device).graph_bytes > bytes; i++) {
                gt_sleep_us(10000);
                GR_MUST(cuMemAlloc(&p, KIB));
                GR_MUST(cuMemFree(p));
        }
        return status(device).graph_bytes <= bytes;
}

static bool overlap(CUdeviceptr p, CUdeviceptr q)
{
        return p < q + BYTES && q < p + BYTES;
}

/* Frees p in a capture and ends that: whether another block of the same capture lay where p did. */
static bool serves_again(CUstream captured, CUdeviceptr p)
{
        CUgraph graph;
        CUdeviceptr q;

        GR_MUST(cuMemFree(p));
        GR_MUST(cuMemAlloc(&q, BYTES));
        GR_MUST(cuMemFree(q));
        GR_MUST(cuStreamEndCapture(captured, &graph));
        GR_MUST(cuGraphDestroy(graph));
        return overlap(p, q);
}

/* Whether other requests get the memory of p, which a graph may use. */
static bool serves_others(CUdeviceptr p)
{
        bool again = false;
        CUdeviceptr q;

        for (int i = 0; i < 10; i++) {
                GR_MUST(cuMemAlloc(&q, BYTES));
                again |= overlap(p, q);
                GR_MUST(cuMemFree(q));
                GR_MUST(cuCtxSynchronize());
        }
        return again;
}

static void in_a_thread(void *(*run)(void *), void *argument)
{
        pthread_t thread;

        if (pthread_create(&thread, NULL, run, argument) || pthread_join(thread, NULL))
                gt_die("no thread");
}

/* Fills memory that it has allocated and frees again. */
static CUgraph captured(CUstream in, bool exports)
{
        CUipcMemHandle handle;
        CUgraph graph;
        CUdeviceptr p;

        GR_MUST(cuStreamBeginCapture(in, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemAlloc(&p, BYTES));
        GR_MUST(cuMemsetD32Async(p, 1, BYTES / 4, in));
        if (exports)
                GR_MUST(cuIpcGetMemHandle(&handle, p));
        GR_MUST(cuMemFree(p));
        GR_MUST(cuStreamEndCapture(in, &graph));
        return graph;
}

static void *begin_capture(void *captured_stream)
{
        gt_attach(&gt);
        GR_MUST(cuStreamBeginCapture(captured_stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        return NULL;
}

/* Uses memory, while a graph runs that may not have it. Most likely this thread has the stack of the one before. */
static void *use_memory(void *exec)
{
        CUstream own;
        uint32_t word = 0;
        CUdeviceptr p;

        gt_attach(&gt);
        own = gt_stream();
        GR_MUST(cuMemAlloc(&p, BYTES));
        GR_MUST(cuMemsetD32Async(p, 7, BYTES / 4, own));
        GR_MUST(cuGraphLaunch(exec, own));
        GR_MUST(cuMemcpyDtoHAsync(&word, p, 4, own));
        GR_MUST(cuStreamSynchronize(own));
        row(word == 7, "a graph beside memory of a later thread");
        GR_MUST(cuMemFree(p));
        GR_MUST(cuStreamDestroy(own));
        return NULL;
}

/* A capture stays open when the thread that began it ends, but what later threads allocate is not for its graph. */
static void after_its_thread(void)
{
        CUstream other = gt_stream();
        CUgraphExec exec = gt_executable(captured(stream, false));
        uint64_t before = status(0).graph_bytes;

        in_a_thread(begin_capture, other);
        in_a_thread(use_memory, exec);
        row(status(0).graph_bytes <= before, "what a later thread frees is not kept");
        GR_MUST(cuStreamDestroy(other));
        GR_MUST(cuGraphExecDestroy(exec));
}

/* The capture stays open, and ends later: what it was given is its graph's. */
static void end_without_a_context(void)
{
        CUgraph graph = NULL;
        CUcontext context;
        CUdeviceptr p;
        CUresult result;

        GR_MUST(cuStreamBeginCapture(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemAlloc(&p, BYTES));
        GR_MUST(gt_fill(&gt, CU_STREAM_PER_THREAD, p, 1, BYTES / 4));
        GR_MUST(cuMemFree(p));
        GR_MUST(cuCtxPopCurrent(&context));
        result = cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph);
        GR_MUST(cuCtxPushCurrent(context));
        if (result != CUDA_SUCCESS)
                GR_MUST(cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph));
        row(!serves_others(p), "an end that fails for want of a context");
        GR_MUST(cuGraphDestroy(graph));
}

/* The program may add nodes to it at any time, which may run beside the capture's. */
static void into_a_graph(void)
{
        __typeof__(cuStreamBeginCaptureToGraph) *begin = GT_OPTIONAL(cuStreamBeginCaptureToGraph);
        CUgraph graph, same;
        CUdeviceptr p, q;

        if (!begin)
                return;
        GR_MUST(cuGraphCreate(&graph, 0));
        GR_MUST(begin(stream, graph, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(cuMemAlloc(&p, BYTES));
        GR_MUST(gt_fill(&gt, stream, p, 1, BYTES / 4));
        GR_MUST(cuMemFree(p));
        GR_MUST(cuMemAlloc(&q, BYTES));
        GR_MUST(gt_fill(&gt, stream, q, 2, BYTES / 4));
        GR_MUST(cuMemFree(q));
        GR_MUST(cuStreamEndCapture(stream, &same));
        row(!overlap(p, q), "memory of a capture into the program's graph");
        GR_MUST(cuGraphDestroy(graph));
}

/* The driver lets go of what kept the first capture's memory; that of the second one is kept in its place. */
static void into_a_graph_again(void)
{
        __typeof__(&cuStreamBeginRecaptureToGraph) begin =
                (__typeof__(begin))gt_lookup_of("cuStreamBeginRecaptureToGraph", 13030);
        CUgraph graph, same;
        CUdeviceptr p = 0;

        if (!begin)
                return;
        for (int i = 0; i < 2; i++) {
                GR_MUST(i == 0 ? cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL)
                               : begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, graph, NULL, NULL));
                GR_MUST(cuMemAlloc(&p, BYTES));
                GR_MUST(gt_fill(&gt, stream, p, 1, BYTES / 4));
                GR_MUST(cuMemFree(p));
                GR_MUST(cuStreamEndCapture(stream, i == 0 ? &graph : &same));
        }
        row(same == graph && !serves_others(p), "memory of a graph that was captured again");
        GR_MUST(cuGraphDestroy(graph));
}

/* Commands for a graphics interface, which only the simulated device records without one: they end, too. */
static void after_commands_for_graphics(void)
{
        CUctxCigParam graphics = {.sharedDataType = CIG_DATA_TYPE_NV_BLOB, .sharedData = &graphics};
        CUctxCreateParams parameters = {.cigParams = &graphics};
        CUcontext made;
        CUdeviceptr p;
        CUstream own;

        GR_MUST(cuCtxCreate_v4(&made, &parameters, 0, gt.device));
        own = gt_stream();
        for (int i = 0; i < 2; i++) {
                GR_MUST(((__typeof__(&cuStreamBeginCaptureToCig))gt_lookup_of("cuStreamBeginCaptureToCig", 13020))(
                        own, (CUstreamCigCaptureParams *)&graphics));
                if (i == 1) /* one that fails */
                        GR_CHECK(cuStreamSynchronize(own) != CUDA_SUCCESS);
                GR_CHECK((((__typeof__(&cuStreamEndCaptureToCig))gt_lookup_of("cuStreamEndCaptureToCig", 13020))(own) ==
                          CUDA_SUCCESS) == (i == 0));
                GR_MUST(cuMemAlloc(&p, BYTES));
                GR_MUST(cuMemsetD32Async(p, 1, BYTES / 4, own));
                GR_MUST(cuMemFree(p));
                GR_MUST(cuCtxSynchronize());
                row(serves_others(p), "memory after commands for a graphics interface");
        }
        GR_MUST(cuCtxDestroy(made));
}

static void fill_rows(CUdeviceptr p, CUstream in)
{
        GR_MUST(cuMemsetD2D32Async(p, 64, 1, 8, 8, in));
}

static void write_word(CUdeviceptr p, CUstream in)
{
        GR_MUST(cuStreamWriteValue32(in, p, 1, 0));
}

static void write_long(CUdeviceptr p, CUstream in)
{
        GR_MUST(cuStreamWriteValue64(in, p, 1, 0));
}

static void wait_for_word(CUdeviceptr p, CUstream in)
{
        GR_MUST(cuStreamWaitValue32(in, p, 0, CU_STREAM_WAIT_VALUE_GEQ));
}

/* Work that is not captured uses what a capture was given: nothing may then be given twice, as the work may be late. */
static void used_beside(void (*use)(CUdeviceptr p, CUstream in), const char *name)
{
        CUstream other = gt_stream();
        CUdeviceptr p;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemAlloc(&p, BYTES));
        use(p, other);
        row(!serves_again(stream, p), name);
        GR_MUST(cuStreamSynchronize(other));
        GR_MUST(cuStreamDestroy(other));
}

/* The stream had a capture of its own, which is over. */
static void used_on_a_stream_that_captured(void)
{
        CUstream other = gt_stream();
        CUgraph ended;
        CUdeviceptr p;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuStreamBeginCapture(other, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuStreamEndCapture(other, &ended));
        GR_MUST(cuMemAlloc(&p, BYTES));
        GR_MUST(cuMemsetD32Async(p, 1, BYTES / 4, other));
        row(!serves_again(stream, p), "work on a stream that captured before");
        GR_MUST(cuGraphDestroy(ended));
        GR_MUST(cuStreamDestroy(other));
}

struct use {
        CUdeviceptr p;
        CUstream in;
};

static void *fill_elsewhere(void *argument)
{
        const struct use *use = argument;

        gt_attach(&gt);
        GR_MUST(cuMemsetD32Async(use->p, 1, BYTES / 4, use->in));
        return NULL;
}

/*
 * A capture in global mode is one of all threads, whose work ends that its memory serves again. In thread-local mode
 * others go on as ever, and take nothing from the capture.
 */
static void used_by_another_thread(CUstreamCaptureMode mode, bool again, const char *name)
{
        struct use use = {.in = gt_stream()};
        bool served;

        GR_MUST(cuStreamBeginCapture(stream, mode));
        GR_MUST(cuMemAlloc(&use.p, BYTES));
        in_a_thread(fill_elsewhere, &use);
        served = serves_again(stream, use.p);
        if (!again || !shared) /* else another place may suit as well */
                row(served == again, name);
        GR_MUST(cuStreamDestroy(use.in));
}

static void *fill_and_take(void *argument)
{
        struct use *use = argument;

        fill_elsewhere(argument);
        GR_MUST(cuMemFree(use->p));
        GR_MUST(cuMemAlloc(&use->p, BYTES));
        return NULL;
}

/* One that works for the capture, as the backward pass of a framework does, is served from its memory. */
static void taken_by_another_thread(void)
{
        struct use use = {.in = stream};
        CUdeviceptr p;
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(cuMemAlloc(&p, BYTES));
        use.p = p;
        in_a_thread(fill_and_take, &use);
        row(overlap(use.p, p), "taken by a thread that works for the capture");
        GR_MUST(cuStreamEndCapture(stream, &graph));
        GR_MUST(cuMemFree(use.p));
        GR_MUST(cuGraphDestroy(graph));
}

static void *capture_at_once(void *argument)
{
        gt_attach(&gt);
        GR_MUST(cuGraphDestroy(captured(((const struct use *)argument)->in, false)));
        return NULL;
}

/* Another thread captures and ends meanwhile. What this one allocates is still its own capture's. */
static void beside_a_thread_that_ends(void)
{
        struct use use = {.in = gt_stream()};
        CUdeviceptr p;
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        in_a_thread(capture_at_once, &use);
        GR_MUST(cuMemAlloc(&p, BYTES));
        GR_MUST(gt_fill(&gt, stream, p, 1, BYTES / 4));
        GR_MUST(cuMemFree(p));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        row(!serves_others(p), "a capture beside a thread that captured and ended");
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuStreamDestroy(use.in));
}

/* Work on the stream that is captured is no other work. Where graphs share memory another place may suit as well. */
static void on_the_own_stream(void)
{
        CUdeviceptr p;
        bool served;

        GR_MUST(cuStreamBeginCapture(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemAlloc(&p, BYTES));
        GR_MUST(gt_fill(&gt, CU_STREAM_PER_THREAD, p, 1, BYTES / 4));
        served = serves_again(CU_STREAM_PER_THREAD, p);
        if (!shared)
                row(served, "a capture of the thread's own stream");
}

/* In each context the thread's own stream is another one: such work is not captured, and its copy may be late. */
static void copied_in_another_context(void)
{
        CUdeviceptr p, copy;
        CUcontext context;

        GR_MUST(cuCtxCreate(&context, NULL, 0, gt.device));
        GR_MUST(cuMemAlloc(&copy, BYTES));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        GR_MUST(cuStreamBeginCapture(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemAlloc(&p, BYTES));
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuMemcpyDtoDAsync(copy, p, BYTES, CU_STREAM_PER_THREAD));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        row(!serves_again(CU_STREAM_PER_THREAD, p), "a copy on another context's own stream beside a capture");
        GR_MUST(cuCtxDestroy(context));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
}

/* The graph that keeps the memory is that of the context whose capture ends, whichever began first. */
static void of_own_streams(bool newest_first)
{
        CUcontext contexts[2] = {gt.ctx};
        CUgraph graphs[2];
        CUdeviceptr p;

        GR_MUST(cuCtxCreate(&contexts[1], NULL, 0, gt.device));
        for (int i = 0; i < 2; i++) {
                GR_MUST(cuCtxSetCurrent(contexts[i]));
                GR_MUST(cuStreamBeginCapture(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
                if (i == 0) {
                        GR_MUST(cuMemAlloc(&p, BYTES));
                        GR_MUST(gt_fill(&gt, CU_STREAM_PER_THREAD, p, 1, BYTES / 4));
                        GR_MUST(cuMemFree(p));
                }
        }
        for (int i = 0; i < 2; i++) {
                int ends = newest_first ? 1 - i : i;

                GR_MUST(cuCtxSetCurrent(contexts[ends]));
                GR_MUST(cuStreamEndCapture(CU_STREAM_PER_THREAD, &graphs[ends]));
        }
        GR_MUST(cuGraphDestroy(graphs[1]));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        row(!serves_others(p),
            newest_first ? "captures in two contexts, the newest ends first" : "captures in two contexts");
        GR_MUST(cuGraphDestroy(graphs[0]));
        GR_MUST(cuCtxDestroy(contexts[1]));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
}

/* While two captures are open that may both use a block, it is kept for both of their graphs, and for no longer. */
static void of_two_captures(bool newest_first)
{
        CUstream streams[2] = {stream, gt_stream()};
        CUgraph graphs[2];
        CUdeviceptr p;

        row(falls_to(0, 0), "nothing is kept before two captures overlap");
        for (int i = 0; i < 2; i++)
                GR_MUST(cuStreamBeginCapture(streams[i], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemAlloc(&p, BYTES));
        for (int i = 0; i < 2; i++)
                GR_MUST(gt_fill(&gt, streams[i], p, 1, BYTES / 4));
        GR_MUST(cuMemFree(p));
        for (int i = 0; i < 2; i++)
                GR_MUST(cuStreamEndCapture(streams[i], &graphs[i]));
        GR_MUST(cuGraphDestroy(graphs[newest_first]));
        gt_sleep_us(50000); /* the driver tells a moment later */
        row(!serves_others(p) && status(0).graph_bytes >= BYTES,
            newest_first ? "of two captures at once, the newer one's graph goes first"
                         : "of two captures at once, the older one's graph goes first");
        GR_MUST(cuGraphDestroy(graphs[!newest_first]));
        row(falls_to(0, 0), "and their memory goes after both");
        GR_MUST(cuStreamDestroy(streams[1]));
}

static unsigned threads(void)
{
        DIR *tasks = opendir("/proc/self/task");
        unsigned count = 0;

        while (tasks && readdir(tasks))
                count++;
        if (tasks)
                closedir(tasks);
        return count;
}

/* Captures one after the other need the host memory of one, and no thread. Not on a card: its driver may keep more. */
static void many_captures(void)
{
        enum { WARM = 4, MANY = 256 };
        struct mallinfo2 before = {0}, after;
        unsigned first = threads();
        CUgraph graph;

        for (int i = 0; i < WARM + MANY; i++) {
                if (i == WARM)
                        before = mallinfo2();
                GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
                GR_MUST(cuStreamEndCapture(stream, &graph));
                GR_MUST(cuGraphDestroy(graph));
        }
        after = mallinfo2();
        row(after.uordblks + after.hblkhd < before.uordblks + before.hblkhd + 8 * KIB, "many captures");
        row(threads() == first, "captures without memory start no thread");
}

/* Where spilling is on. Host memory is not part of what is live on the device. */
static void in_host_memory(void)
{
        CUdeviceptr most, p;
        size_t free_bytes, total;
        uint64_t live;
        CUgraph graph;

        GR_MUST(cuMemGetInfo(&free_bytes, &total));
        GR_MUST(cuMemAlloc(&most, free_bytes - 2 * BYTES));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        if (cuMemAlloc(&p, 4 * BYTES) == CUDA_SUCCESS) {
                live = status(0).live_bytes;
                GR_MUST(cuMemFree(p));
                if (status(0).spilled_bytes > 0)
                        row(status(0).live_bytes == live, "memory of a graph that is host memory");
        }
        GR_MUST(cuStreamEndCapture(stream, &graph));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuMemFree(most));
}

/* The program freed its memory before. A kernel that runs meanwhile waits for what the program does next. */
static void its_end_does_not_wait(bool exports)
{
        CUgraphExec exec = gt_executable(captured(stream, exports));
        CUstream other = gt_stream();
        CUdeviceptr word, p;

        GR_MUST(cuMemAlloc(&word, 4));
        GR_MUST(cuMemsetD32(word, 0, 1));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(gt_await(&gt, other, word, 1, 3000000));
        GR_MUST(cuGraphExecDestroy(exec));
        gt_sleep_us(50000);
        GR_MUST(cuMemAlloc(&p, 16 * BYTES));
        row(cuStreamQuery(other) == CUDA_ERROR_NOT_READY,
            exports ? "the end of a graph whose memory was exported does not wait"
                    : "the end of a graph does not wait");
        GR_MUST(cuMemsetD32Async(word, 1, 1, stream));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuMemFree(p));
        GR_MUST(cuMemFree(word));
        GR_MUST(cuStreamDestroy(other));
        row(falls_to(0, 0), "and its memory goes");
}

/*
 * When the last graph has gone, other work still uses memory that the program has freed: nobody else gets it before.
 * The cache does not get it if it was exported, and might not if an allocation has just failed.
 */
static void used_at_its_end(bool exports)
{
        CUstream other = gt_stream();
        CUdeviceptr p, q[4];
        CUipcMemHandle handle;
        CUgraphExec exec;
        unsigned wrong = 0;
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuMemAlloc(&p, BYTES));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        exec = gt_executable(graph);
        if (exports)
                GR_MUST(cuIpcGetMemHandle(&handle, p));
        else /* before the work, for which it would wait */
                GR_CHECK_EQ(cuMemAlloc(&q[0], 512 * GIB), CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(gt_late_fill(&gt, other, p, 1, BYTES / 4, 200000));
        GR_MUST(cuMemFree(p));
        GR_MUST(cuGraphExecDestroy(exec));
        for (int i = 0; i < 4; i++) {
                GR_MUST(cuMemAlloc(&q[i], BYTES));
                GR_MUST(cuMemsetD32Async(q[i], 2, BYTES / 4, stream));
        }
        GR_MUST(cuCtxSynchronize());
        for (int i = 0; i < 4; i++) {
                wrong += gt_wrong_words(q[i], BYTES, 2);
                GR_MUST(cuMemFree(q[i]));
        }
        row(wrong == 0, exports ? "exported, used when its graph ends" : "used when its graph ends, with memory short");
        GR_MUST(cuStreamDestroy(other));
        row(falls_to(0, 0), "and it goes afterwards");
}

/* What graphs of one device have had comes back while there are graphs of another one. */
static void on_two_devices(void)
{
        CUgraph first = captured(stream, false);
        CUcontext context;
        CUdevice device;
        int count;

        GR_MUST(cuDeviceGetCount(&count));
        if (count > 1) {
                GR_MUST(cuDeviceGet(&device, 1));
                GR_MUST(cuDevicePrimaryCtxRetain(&context, device));
                GR_MUST(cuCtxSetCurrent(context));
                GR_MUST(cuGraphDestroy(captured(gt_stream(), false)));
                row(falls_to(1, 0), "graphs of another device");
                GR_MUST(cuCtxSetCurrent(gt.ctx));
        }
        GR_MUST(cuGraphDestroy(first));
}

/* GRSIM_FAULT makes the driver refuse a launch in a capture. The captured graph lacks it, so the program is told. */
static void refused_in_a_capture(void)
{
        CUgraphExec exec = gt_executable(captured(stream, false));
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        row(cuGraphLaunch(exec, stream) == CUDA_ERROR_UNKNOWN, "a launch in a capture that the driver refuses");
        GR_MUST(cuStreamEndCapture(stream, &graph));
        GR_MUST(cuGraphDestroy(graph));
        row(cuGraphLaunch(exec, stream) == CUDA_SUCCESS, "and one outside");
        GR_MUST(cuGraphExecDestroy(exec));
}

/* The graph has nothing of the library's to which the driver's answer could be due. */
static void refused_without_memory(void)
{
        CUgraphExec exec;
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        exec = gt_executable(graph);
        row(cuGraphLaunch(exec, stream) == CUDA_ERROR_UNKNOWN, "a launch of a graph without memory that is refused");
        GR_MUST(cuGraphExecDestroy(exec));
}

int main(int argc, char **argv)
{
        const char *arena = getenv("GPURECLAIM_GRAPH_ARENA");
        bool refused = false, no_memory = false, again = false;

        GT_OPTIONS(argc, argv, "[--refused] [--no-memory] [--again]", GT_OPTION("refused", refused),
                   GT_OPTION("no-memory", no_memory), GT_OPTION("again", again));
        shared = arena && strcmp(arena, "shared") == 0;
        gt_open(&gt);
        stream = gt_stream();
        if (refused || no_memory || again) {
                if (again)
                        into_a_graph_again();
                if (refused)
                        refused_in_a_capture();
                if (no_memory)
                        refused_without_memory();
                return bad > 0;
        }
        if (gt.simulated)
                many_captures(); /* the process's first ones */
        after_its_thread();
        end_without_a_context();
        into_a_graph();
        into_a_graph_again();
        used_beside(fill_rows, "a fill of rows beside a capture");
        used_beside(write_word, "a word written beside a capture");
        used_beside(write_long, "a longer one");
        used_beside(wait_for_word, "a word waited for beside a capture");
        used_on_a_stream_that_captured();
        used_by_another_thread(CU_STREAM_CAPTURE_MODE_GLOBAL, false, "another thread's work beside a global capture");
        used_by_another_thread(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, true, "and beside one that is not its own");
        if (!shared) /* else another place may suit as well */
                taken_by_another_thread();
        beside_a_thread_that_ends();
        on_the_own_stream();
        copied_in_another_context();
        of_own_streams(false);
        of_own_streams(true);
        of_two_captures(false);
        of_two_captures(true);
        its_end_does_not_wait(false);
        its_end_does_not_wait(true);
        used_at_its_end(false);
        used_at_its_end(true);
        on_two_devices();
        if (gt.simulated) {
                after_commands_for_graphics();
                in_host_memory();
        }
        printf("%d rows bad\n", bad);
        return bad > 0;
}
