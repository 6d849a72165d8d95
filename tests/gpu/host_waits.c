/*
 * Streams that wait for the program: for a word in memory, or for a function on the host that returns once other work
 * on the GPU is done. What one stream waits for must not hold up another, though memory is freed and allocated between
 * them: a barrier across all streams would stop the very work that the program waits for. Natively and under the shim
 * the same lines.
 *
 *   host_waits [threads]    with streams that it creates, or with those that each thread has
 *   host_waits first WAY    with the legacy stream, and one of its own that has had no work before
 *   host_waits short        memory that is freed before a stream begins to wait, and needed while it does
 *   host_waits kernel       a kernel on the stream that one thread has, which waits for another's first one on its own
 *
 * A stream that stands still is let go after some seconds, so that nothing hangs.
 */
#include "newer.h"
#include "stand_still.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SPIN_US = 20000 };

static CUdeviceptr word;
static _Atomic uint32_t *flag; /* where word is in the host's addresses */
static CUgraphExec graph;

static void CUDA_CB wait_for_flag(void *arg)
{
        (void)arg;
        while (!atomic_load(flag))
                gt_sleep_us(200);
}

static void CUDA_CB callback(CUstream stream, CUresult status, void *arg)
{
        (void)stream;
        (void)status;
        wait_for_flag(arg);
}

static CUresult by_word(CUstream stream)
{
        return cuStreamWaitValue32(stream, word, 1, CU_STREAM_WAIT_VALUE_GEQ);
}

static CUresult by_words(CUstream stream)
{
        __typeof__(&cuStreamBatchMemOp) batch = GT_OPTIONAL(cuStreamBatchMemOp_v2);
        CUstreamBatchMemOpParams wait = {
                .waitValue = {.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32,
                              .address = word,
                              .value = 1,
                              .flags = CU_STREAM_WAIT_VALUE_GEQ},
        };

        return batch ? batch(stream, 1, &wait, 0) : CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult by_function(CUstream stream)
{
        return cuLaunchHostFunc(stream, wait_for_flag, NULL);
}

static CUresult by_newer_function(CUstream stream)
{
        __typeof__(&cuLaunchHostFunc_v2) call = (__typeof__(call))gt_lookup_of("cuLaunchHostFunc", 13020);

        return call ? call(stream, wait_for_flag, NULL, 0) : CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult by_callback(CUstream stream)
{
        return cuStreamAddCallback(stream, callback, NULL, 0);
}

static CUresult launched(CUgraph made, CUresult added, CUstream stream)
{
        GR_MUST(added);
        graph = gt_executable(made);
        return cuGraphLaunch(graph, stream);
}

static CUresult by_graph(CUstream stream)
{
        const CUDA_HOST_NODE_PARAMS node = {.fn = wait_for_flag};
        __typeof__(&cuGraphAddHostNode) add = GT_OPTIONAL(cuGraphAddHostNode);
        CUgraph made;
        CUgraphNode one;

        if (!add)
                return CUDA_ERROR_NOT_SUPPORTED;
        GR_MUST(cuGraphCreate(&made, 0));
        return launched(made, add(&one, made, NULL, 0, &node), stream);
}

static CUresult by_captured_function(CUstream stream)
{
        CUgraph made;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(by_function(stream));
        GR_MUST(cuStreamEndCapture(stream, &made));
        return launched(made, CUDA_SUCCESS, stream);
}

static CUresult by_node(CUstream stream)
{
        typedef CUresult CUDAAPI add_node(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUgraphNodeParams *);
        CUgraphNodeParams node = {.type = CU_GRAPH_NODE_TYPE_HOST, .host = {.fn = wait_for_flag}};
        add_node *add = (add_node *)gt_lookup_of("cuGraphAddNode", 12020);
        CUgraph made;
        CUgraphNode one;

        if (!add)
                return CUDA_ERROR_NOT_SUPPORTED;
        GR_MUST(cuGraphCreate(&made, 0));
        return launched(made, add(&one, made, NULL, 0, &node), stream);
}

static CUresult by_node_of(int version, CUstream stream)
{
        typedef CUresult CUDAAPI add_node(CUgraphNode *, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, size_t,
                                          CUgraphNodeParams *);
        CUgraphNodeParams node = {.type = CU_GRAPH_NODE_TYPE_HOST, .host = {.fn = wait_for_flag}};
        add_node *add = (add_node *)gt_lookup_of("cuGraphAddNode", version);
        CUgraph made;
        CUgraphNode one;

        if (!add)
                return CUDA_ERROR_NOT_SUPPORTED;
        GR_MUST(cuGraphCreate(&made, 0));
        return launched(made, add(&one, made, NULL, NULL, 0, &node), stream);
}

static CUresult by_newer_node(CUstream stream)
{
        return by_node_of(12030, stream);
}

static CUresult by_newest_node(CUstream stream)
{
        return by_node_of(13040, stream);
}

/* Another thread that holds its own stream, and lives until it is let go. */
struct holder {
        CUresult (*hold)(CUstream);
        CUresult result;
        _Atomic bool held;
};

static void *hold_own(void *arg)
{
        struct holder *holder = arg;

        gt_attach(&gt);
        holder->result = holder->hold(CU_STREAM_PER_THREAD);
        atomic_store(&holder->held, true);
        wait_for_flag(NULL);
        return NULL;
}

/* Up to the second allocation the work is on stream before, from then on on busy. Without a stream to be held, another
 * thread's own is. */
static void try_way(const char *name, CUresult (*hold)(CUstream), CUstream before, CUstream busy, CUstream held)
{
        struct holder holder = {.hold = hold};
        pthread_t thread;

        atomic_store(flag, 0);
        allocate();
        fill(before);
        GR_MUST(cuStreamSynchronize(before));
        GR_MUST(gt_spin(&gt, before, SPIN_US));
        fill(before);
        release();
        if (held)
                holder.result = hold(held);
        else if (pthread_create(&thread, NULL, hold_own, &holder))
                gt_die("no thread");
        while (!held && !atomic_load(&holder.held))
                gt_sleep_us(50);
        allocate();
        fill(busy);
        printf("%s: %s, the other stream %s\n", name, gt_result_name(holder.result),
               ends(busy) ? "went on" : "stood still");
        atomic_store(flag, 1);
        if (!held)
                pthread_join(thread, NULL);
        GR_MUST(cuCtxSynchronize());
        release();
        if (graph)
                GR_MUST(cuGraphExecDestroy(graph));
        graph = NULL;
}

static CUresult by_graph_again(CUstream stream)
{
        return cuGraphLaunch(graph, stream);
}

static CUresult by_kernel(CUstream stream)
{
        return gt_await(&gt, stream, word, 1, 2 * PATIENCE_US);
}

/* On a small card no fence is laid for what is freed here before it is needed. */
static void try_short(const char *name, CUresult (*hold)(CUstream), CUstream busy, CUstream held, bool beside_capture)
{
        CUresult holds, allocates;
        size_t available, total;
        CUdeviceptr block;
        CUgraph captured;

        atomic_store(flag, 0);
        GR_MUST(cuMemGetInfo(&available, &total));
        GR_MUST(cuMemAlloc(&block, available / 5 * 2));
        GR_MUST(gt_fill(&gt, busy, block, 1, 64));
        GR_MUST(cuStreamSynchronize(busy));
        GR_MUST(cuMemFree(block));
        if (beside_capture)
                GR_MUST(cuStreamBeginCapture(busy, CU_STREAM_CAPTURE_MODE_RELAXED));
        holds = hold(held);
        allocates = cuMemAlloc(&block, available / 5 * 4);
        printf("%s%s: %s, memory freed before: %s\n", name, beside_capture ? " beside a capture" : "",
               gt_result_name(holds), gt_result_name(allocates));
        atomic_store(flag, 1);
        GR_MUST(cuStreamSynchronize(held));
        if (beside_capture) {
                GR_MUST(cuStreamEndCapture(busy, &captured));
                GR_MUST(cuGraphDestroy(captured));
        }
        if (allocates == CUDA_SUCCESS)
                GR_MUST(cuMemFree(block));
}

struct waiter {
        CUresult result;
        _Atomic bool launched;
};

static void *launch_waiter(void *arg)
{
        struct waiter *waiter = arg;
        CUdeviceptr block;

        gt_attach(&gt);
        GR_MUST(cuMemAlloc(&block, 16 * MIB)); /* what nobody else asks for */
        GR_MUST(cuMemFree(block));
        waiter->result = gt_await(&gt, CU_STREAM_PER_THREAD, word, 1, 2 * PATIENCE_US);
        GR_MUST(cuMemAlloc(&block, 16 * MIB));
        atomic_store(&waiter->launched, true);
        GR_MUST(cuStreamSynchronize(CU_STREAM_PER_THREAD));
        GR_MUST(cuMemFree(block));
        return NULL;
}

static void kernel_waits(void)
{
        struct waiter waiter = {0};
        CUdeviceptr block;
        pthread_t thread;

        GR_MUST(cuMemAlloc(&word, 4096));
        GR_MUST(cuMemsetD32(word, 0, 1024));
        for (int i = 0; i < COUNT; i++) {
                GR_MUST(cuMemAlloc(&block, 8 * MIB)); /* too much to be spared a fence */
                GR_MUST(cuMemFree(block));
        }
        if (pthread_create(&thread, NULL, launch_waiter, &waiter))
                gt_die("no thread");
        while (!atomic_load(&waiter.launched))
                gt_sleep_us(50);
        GR_MUST(cuMemAlloc(&block, 8 * MIB)); /* too much to be spared a fence */
        GR_MUST(gt_fill(&gt, CU_STREAM_PER_THREAD, word, 1, 1));
        printf("a kernel that waits: %s, the other thread's %s\n", gt_result_name(waiter.result),
               ends(CU_STREAM_PER_THREAD) ? "went on" : "stood still");
        pthread_join(thread, NULL);
        GR_MUST(cuMemFree(block));
        GR_MUST(cuMemFree(word));
}

int main(int argc, char **argv)
{
        const bool threads = argc > 1 && !strcmp(argv[1], "threads"), first = argc > 2 && !strcmp(argv[1], "first");
        const bool is_short = argc > 1 && !strcmp(argv[1], "short");
        static const struct {
                const char *name;
                CUresult (*hold)(CUstream);
        } ways[] = {
                {"a function that was captured", by_captured_function}, /* first, before other graphs with such nodes */
                {"a word in memory", by_word},
                {"a batch of words", by_words},
                {"a function", by_function},
                {"a newer function", by_newer_function},
                {"a callback", by_callback},
                {"a function in a graph", by_graph},
                {"a function as a node", by_node},
                {"a function as a newer node", by_newer_node},
                {"a function as the newest node", by_newest_node},
        };
        CUstream before = CU_STREAM_PER_THREAD, busy = before, held = NULL;
        void *host;

        gt_open(&gt);
        if (argc > 1 && !strcmp(argv[1], "kernel")) {
                kernel_waits();
                gt_close(&gt);
                return EXIT_SUCCESS;
        }
        if (!threads) {
                busy = gt_stream();
                held = first ? CU_STREAM_LEGACY : gt_stream();
                before = first ? CU_STREAM_LEGACY : busy;
        }
        GR_MUST(cuMemHostAlloc(&host, 4096, CU_MEMHOSTALLOC_DEVICEMAP));
        GR_MUST(cuMemHostGetDevicePointer(&word, host, 0));
        flag = host;
        for (size_t i = 0; i < 2 * sizeof(ways) / sizeof(ways[0]) && is_short; i++) {
                try_short(ways[i / 2].name, ways[i / 2].hold, busy, held, i % 2);
                if (graph) {
                        try_short("the graph again", by_graph_again, busy, held, i % 2);
                        GR_MUST(cuGraphExecDestroy(graph));
                        graph = NULL;
                }
        }
        if (is_short)
                try_short("a kernel", by_kernel, busy, held, true);
        for (size_t i = 0; i < sizeof(ways) / sizeof(ways[0]) && !is_short; i++)
                if (!first || !strcmp(argv[2], ways[i].name))
                        try_way(ways[i].name, ways[i].hold, before, busy, held);
        GR_MUST(cuMemFreeHost(host));
        gt_close(&gt);
        return EXIT_SUCCESS;
}
