/* What goes on by itself: memory that goes back, moves, is spilled or waited for without a call of the program's. */
#include "api.h"

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>

CUresult CUDAAPI cuStreamSynchronize_ptsz(CUstream stream);
CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext context);

static size_t footprint(void)
{
        size_t bytes = 0;

        if (!gt_footprint(&gt, &bytes))
                gt_die("the footprint cannot be known");
        return bytes;
}

static int threads(void)
{
        DIR *tasks = opendir("/proc/self/task");
        int count = -2; /* . and .. */

        while (tasks && readdir(tasks))
                count++;
        if (tasks)
                closedir(tasks);
        return count;
}

/* GPURECLAIM_DECAY=1s */
void test_decay(void)
{
        CUdeviceptr ptrs[8];
        int most_threads = 0;
        size_t before, cached;

        gt_open(&gt);
        before = footprint();
        for (int i = 0; i < 8; i++)
                ptrs[i] = allocate(16 * MIB);
        for (int i = 0; i < 8; i++)
                GR_MUST(cuMemFree(ptrs[i]));
        cached = status().cached_bytes;
        GR_CHECK_EQ(cached, 128 * MIB);
        GR_MUST(gt_spin(&gt, NULL, 2500000)); /* nothing waits for it */
        gt_sleep_us(200000);
        GR_CHECK(status().cached_bytes > 0); /* not at once */
        gt_sleep_us(1500000);
        GR_CHECK_EQ(status().cached_bytes, 0);
        GR_CHECK_EQ(footprint(), before);
        GR_CHECK_EQ(cuStreamQuery(NULL), CUDA_ERROR_NOT_READY);
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuMemFree(allocate(16 * MIB))); /* and again */
        for (int i = 0; i < 17; i++) {
                gt_sleep_us(100000);
                if (threads() > most_threads)
                        most_threads = threads();
        }
        GR_CHECK_EQ(status().cached_bytes, 0);
        GR_CHECK(threads() < most_threads); /* with nothing left to do, the background thread has ended */
}

/* GPURECLAIM_DECAY=0 */
void test_no_decay(void)
{
        gt_open(&gt);
        GR_MUST(cuMemFree(allocate(16 * MIB)));
        gt_sleep_us(700000);
        GR_CHECK_EQ(status().cached_bytes, 16 * MIB);
}

/*
 * GPURECLAIM_POOL=split GPURECLAIM_HARD_LIMIT=256MiB. What is free between blocks in use serves a request that fits
 * into no part of it, as its memory is mapped elsewhere.
 */
void test_moves(void)
{
        enum { COUNT = 80, KEPT = 4 };
        CUdeviceptr blocks[COUNT], large;

        gt_open(&gt);
        for (int i = 0; i < COUNT; i++)
                blocks[i] = allocate(3 * MIB);
        for (int i = 0; i < COUNT; i++)
                if (i % KEPT)
                        GR_MUST(cuMemFree(blocks[i]));
        large = allocate(100 * MIB);
        GR_MUST(cuMemFree(large));
        for (int i = 0; i < COUNT; i += KEPT)
                GR_MUST(cuMemFree(blocks[i]));
}

/*
 * GPURECLAIM_RELEASE_THRESHOLD=64MiB GPURECLAIM_DECAY=0, on a card so large that no epoch is closed for what is freed:
 * the frees that pass the threshold go the fast path, and nothing else happens that could wake the helper.
 */
void test_threshold(void)
{
        enum { CLASSES = 3 };
        CUdeviceptr first[CLASSES], second[CLASSES];
        unsigned long asked;

        find_call_count();
        gt_open(&gt);
        for (int i = 0; i < CLASSES; i++) {
                size_t bytes = (size_t)(16 + 2 * i) * MIB;

                first[i] = allocate(bytes);
                second[i] = allocate(bytes);
                GR_MUST(cuMemFree(first[i]));
                GR_MUST(cuMemFree(second[i]));
                first[i] = allocate(bytes);  /* pays for the fence that makes both usable ... */
                second[i] = allocate(bytes); /* ... so that this goes the fast path, and so does its free */
        }
        for (int i = 0; i < CLASSES; i++)
                GR_MUST(cuMemFree(first[i]));
        GR_CHECK_EQ(status().cached_bytes, 54 * MIB);
        for (int i = 0; i < CLASSES; i++)
                GR_MUST(cuMemFree(second[i]));
        for (int i = 0; i < 200 && status().cached_bytes > 64 * MIB; i++)
                gt_sleep_us(10000);
        GR_CHECK(status().cached_bytes <= 64 * MIB);

        /* What the GPU still uses goes back once it is done, though nothing is called any more. */
        for (int i = 0; i < CLASSES; i++)
                first[i] = allocate(64 * MIB);
        GR_MUST(gt_spin(&gt, NULL, 500000));
        asked = call_count("cuEventQuery");
        for (int i = 0; i < CLASSES; i++)
                GR_MUST(cuMemFree(first[i]));
        GR_CHECK(status().cached_bytes > 64 * MIB);
        for (int i = 0; i < 1000 && status().cached_bytes > 64 * MIB; i++)
                gt_sleep_us(10000);
        GR_CHECK(status().cached_bytes <= 64 * MIB);
        GR_CHECK(call_count("cuEventQuery") - asked < 200); /* it is asked for ever more rarely */
        /* The driver's own free would have waited for the GPU. */
        GR_CHECK(call_count("cuMemFreeAsync") > 0);
        GR_CHECK_EQ(call_count("cuMemFree_v2"), 0);
}

/* GPURECLAIM_SOFT_LIMIT=64MiB GPURECLAIM_DECAY=0: above it nothing is cached, and all of it may be in use. */
void test_soft_limit(void)
{
        CUdeviceptr blocks[3];

        gt_open(&gt);
        GR_CHECK_EQ(status().soft_limit_bytes, 64 * MIB);
        for (int i = 0; i < 3; i++)
                blocks[i] = allocate(48 * MIB);
        for (int i = 0; i < 3; i++)
                GR_MUST(cuMemFree(blocks[i]));
        for (int i = 0; i < 1000 && status().reserved_bytes > 64 * MIB; i++)
                gt_sleep_us(10000);
        GR_CHECK(status().reserved_bytes <= 64 * MIB);
}

/*
 * GPURECLAIM_HARD_LIMIT=64MiB. Pinned memory is none of the card's: where what is cached there and what the driver's
 * pools keep is enough, it stays.
 */
void test_pinned_stays(void)
{
        cuuint64_t keep_all = UINT64_MAX;
        unsigned long calls;
        CUdeviceptr ptr;
        CUmemoryPool pool;
        void *pinned;

        find_call_count();
        gt_open(&gt);
        GR_MUST(cuMemAllocHost(&pinned, 16 * MIB));
        GR_MUST(cuMemFreeHost(pinned));
        GR_MUST(cuDeviceGetDefaultMemPool(&pool, gt.device));
        GR_MUST(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all));
        GR_MUST(cuMemAllocAsync(&ptr, 32 * MIB, NULL));
        GR_MUST(cuMemFreeAsync(ptr, NULL));
        GR_MUST(cuMemFree(allocate(16 * MIB)));
        GR_MUST(cuCtxSynchronize());
        calls = call_count("cuMemFreeHost");
        ptr = allocate(56 * MIB);
        GR_CHECK_EQ(call_count("cuMemFreeHost"), calls);
        GR_MUST(cuMemFree(ptr));
}

/* GPURECLAIM_HARD_LIMIT=64MiB GPURECLAIM_SPILL=64MiB */
void test_spill(void)
{
        CUdeviceptr own, spilled, count, more, base;
        CUmemorytype type = 0;
        uint32_t wrong = 1;
        size_t size = 0;
        CUstream stream;
        CUgraph graph;

        gt_open(&gt);
        own = allocate(48 * MIB);
        count = allocate(sizeof(wrong));
        spilled = allocate(40 * MIB);
        GR_CHECK_EQ(status().spilled_bytes, 40 * MIB);
        GR_MUST(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, spilled));
        GR_CHECK_EQ(type, CU_MEMORYTYPE_HOST);
        GR_MUST(cuMemGetAddressRange(&base, &size, spilled));
        GR_CHECK_EQ(base, spilled);
        GR_CHECK_EQ(size, 40 * MIB);
        GR_MUST(cuMemsetD8(count, 0, sizeof(wrong)));
        GR_MUST(gt_fill(&gt, NULL, spilled, 42, 10 * MIB));
        GR_MUST(gt_count_diff(&gt, NULL, spilled, 42, 10 * MIB, count));
        GR_MUST(cuMemcpyDtoH(&wrong, count, sizeof(wrong)));
        GR_CHECK_EQ(wrong, 0);
        GR_CHECK_EQ(cuMemAlloc(&more, 40 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)); /* memory is spilled during a capture, too */
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        more = allocate(20 * MIB);
        GR_CHECK_EQ(status().spilled_bytes, 60 * MIB);
        GR_MUST(cuStreamEndCapture(stream, &graph));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuMemFree(more));
        GR_MUST(cuMemFree(spilled));
        for (int i = 0; i < 100 && status().spilled_bytes > 0; i++)
                gt_sleep_us(10000);
        GR_CHECK_EQ(status().spilled_bytes, 0);
        GR_CHECK_EQ(cuMemFree(spilled), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemFree(own));
        own = allocate(40 * MIB); /* there is room again */
        GR_CHECK_EQ(status().spilled_bytes, 0);
}

static void *free_later(void *arg)
{
        gt_attach(&gt);
        gt_sleep_us(300000);
        GR_MUST(cuMemFree(*(CUdeviceptr *)arg));
        return NULL;
}

/* GPURECLAIM_HARD_LIMIT=64MiB GPURECLAIM_WAIT=1s */
void test_wait(void)
{
        CUdeviceptr block, more;
        pthread_t thread;
        double begin_us, waited_us;

        gt_open(&gt);
        block = allocate(48 * MIB);
        pthread_create(&thread, NULL, free_later, &block);
        begin_us = gt_now_us();
        more = allocate(40 * MIB);
        waited_us = gt_now_us() - begin_us;
        pthread_join(thread, NULL);
        GR_CHECK(waited_us > 250000 && waited_us < 900000);

        begin_us = gt_now_us(); /* all of the program's threads wait */
        GR_CHECK_EQ(cuMemAlloc(&block, 40 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
        waited_us = gt_now_us() - begin_us;
        GR_CHECK(waited_us > 950000 && waited_us < 3000000);
        GR_MUST(cuMemFree(more));
}

/* GPURECLAIM_HARD_LIMIT=64MiB; PROACTIVE: whether it is on. */
static void test_waits(bool proactive)
{
        CUcontext context;
        CUstream stream;
        CUevent event;

        enlist_purge();
        gt_open(&gt);
        stream = gt_stream();
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(purges, 0); /* plenty */
        atomic_store(&held, allocate(48 * MIB));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(purges, proactive ? 1 : 0);
        GR_CHECK_EQ(status().live_bytes, proactive ? 0 : 48 * MIB);
        if (!proactive)
                return;
        atomic_store(&held, allocate(48 * MIB));
        gt_sleep_us(100000);
        GR_MUST(cuCtxPopCurrent(&context));
        GR_CHECK_EQ(cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT); /* without a context there is none to look at */
        GR_CHECK_EQ(cuCtxSynchronize_v2(NULL), CUDA_ERROR_INVALID_CONTEXT);
        GR_MUST(cuCtxPushCurrent(context));
        GR_CHECK_EQ(purges, 1);
        GR_MUST(cuStreamSynchronize(stream));
        GR_CHECK_EQ(purges, 2);
        atomic_store(&held, allocate(48 * MIB));
        gt_sleep_us(100000);
        GR_MUST(cuStreamSynchronize_ptsz(stream));
        GR_CHECK_EQ(purges, 3);
        GR_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuEventRecord(event, stream));
        atomic_store(&held, allocate(48 * MIB));
        gt_sleep_us(100000);
        GR_MUST(cuEventSynchronize(event));
        GR_CHECK_EQ(purges, 4);
        atomic_store(&held, allocate(48 * MIB));
        gt_sleep_us(100000);
        GR_MUST(cuCtxSynchronize_v2(context));
        GR_CHECK_EQ(purges, 5);
}

void test_proactive(void)
{
        test_waits(true);
}

void test_no_proactive(void)
{
        test_waits(false);
}

/* What was kept for a graph, or for a capture that became none, is cached without a further call of the program. */
static void comes_by_itself(CUstream stream, bool breaks)
{
        CUgraph graph;
        CUdeviceptr p;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        p = allocate(16 * MIB);
        GR_MUST(cuMemFree(p));
        GR_CHECK_EQ(status().graph_bytes, 16 * MIB);
        if (breaks)
                GR_CHECK(cuCtxSynchronize() != CUDA_SUCCESS);
        GR_CHECK_EQ(cuStreamEndCapture(stream, &graph) != CUDA_SUCCESS, breaks);
        if (!breaks)
                GR_MUST(cuGraphDestroy(graph));
        for (int i = 0; i < 500 && status().graph_bytes > 0; i++)
                gt_sleep_us(10000);
        GR_CHECK_EQ(status().graph_bytes, 0);
}

/* With GRSIM_FAULT=cuGraphLaunch:1=999. While the library has no user object on a graph, that is passed on. */
static void is_told(CUstream stream)
{
        CUgraphExec exec;
        CUgraph graph;

        GR_MUST(cuGraphCreate(&graph, 0));
        GR_MUST(cuGraphInstantiate(&exec, graph, 0));
        GR_CHECK_EQ(cuGraphLaunch(exec, stream), CUDA_ERROR_UNKNOWN);
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuGraphDestroy(graph));
}

/* What the program has freed and a graph still uses is neither live nor cached. */
void test_graph_memory(void)
{
        CUstream stream;
        uint64_t live;
        CUdeviceptr p;
        CUgraphExec exec;
        CUgraph graph;

        gt_open(&gt);
        stream = gt_stream();
        live = status().live_bytes;
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        p = allocate(16 * MIB);
        GR_MUST(gt_fill(&gt, stream, p, 1, 4 * MIB));
        GR_CHECK_EQ(status().live_bytes, live + 16 * MIB);
        GR_CHECK_EQ(status().graph_bytes, 0);
        GR_MUST(cuMemFree(p));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        GR_CHECK_EQ(status().executables, 0);
        GR_MUST(cuGraphInstantiate(&exec, graph, 0));
        GR_CHECK_EQ(status().executables, 1);
        GR_MUST(cuGraphExecDestroy(exec));
        GR_CHECK_EQ(status().executables, 0);
        GR_CHECK_EQ(status().live_bytes, live);
        GR_CHECK_EQ(status().graph_bytes, 16 * MIB);
        GR_CHECK_EQ(status().cached_bytes, 0);
        GR_MUST(cuGraphDestroy(graph));
        p = allocate(32 * MIB); /* finds out */
        GR_CHECK_EQ(status().graph_bytes, 0);
        GR_MUST(cuMemFree(p));
        GR_CHECK(status().cached_bytes >= 48 * MIB);
        comes_by_itself(stream, false);
        comes_by_itself(stream, true);
        is_told(stream);
        gt_close(&gt);
}
