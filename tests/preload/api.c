/*
 * The public functions and what goes on by itself, in a whole program under the library. One mode per run; `modes`
 * below says with which settings. Exit status 1 when a check failed.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "check.h"
#include "gpureclaim.h"
#include "gputest.h"

CUresult CUDAAPI cuStreamSynchronize_ptsz(CUstream stream);
CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext context);

static gpureclaim_register_function *enlist;
static gpureclaim_unregister_function *unlist;
static gpureclaim_reclaim_function *reclaim;
static gpureclaim_status_function *status_of;

static struct gt gt;
static _Atomic unsigned purges;
static _Atomic CUdeviceptr held;
static pthread_t main_thread;

static struct gpureclaim_status status(void)
{
        struct gpureclaim_status status = {.struct_bytes = sizeof(status)};

        GR_CHECK_EQ(status_of(gt.device, &status), 0);
        return status;
}

static size_t footprint(void)
{
        size_t bytes = 0;

        if (!gt_footprint(&gt, &bytes))
                gt_die("the footprint cannot be known");
        return bytes;
}

static CUdeviceptr allocate(size_t bytes)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, bytes));
        return ptr;
}

static int purge(void *arg, int device, uint64_t want_bytes)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        CUdeviceptr ptr = atomic_exchange(&held, 0);

        (void)want_bytes;
        atomic_fetch_add(&purges, 1);
        /* Whatever a hook calls, it disturbs no capture. */
        GR_MUST(cuThreadExchangeStreamCaptureMode(&mode));
        GR_CHECK_EQ(mode, CU_STREAM_CAPTURE_MODE_RELAXED);
        if (arg != &purges || device != gt.device || pthread_equal(main_thread, pthread_self()))
                return EINVAL;
        return ptr ? (int)cuMemFree(ptr) : 0;
}

static uint64_t id;

static void enlist_purge(void)
{
        struct gpureclaim_reclaimable reclaimable = {
                .struct_bytes = sizeof(reclaimable), .name = "test", .purge = purge, .arg = &purges};

        GR_CHECK_EQ(enlist(&reclaimable, &id), 0);
}

/* Takes longer than a hook may by default. */
static int purge_slowly(void *arg, int device, uint64_t want_bytes)
{
        gt_sleep_us(1300000);
        return purge(arg, device, want_bytes);
}

#define DEVICES_MOST 64
#define LIST_MOST    32 /* reclaimables at a time */

/* As many as there may be, again and again: each that is taken off the list makes room. */
static void fill_list(void)
{
        struct gpureclaim_reclaimable reclaimable = {.struct_bytes = sizeof(reclaimable), .purge = purge};
        uint64_t ids[LIST_MOST], more = 4711;

        for (int round = 0; round < 2; round++) {
                for (int i = 0; i < LIST_MOST; i++)
                        GR_CHECK_EQ(enlist(&reclaimable, &ids[i]), 0);
                GR_CHECK_EQ(enlist(&reclaimable, &more), -ENOSPC);
                GR_CHECK_EQ(more, 4711);
                for (int i = 0; i < LIST_MOST; i++)
                        GR_CHECK_EQ(unlist(ids[i]), 0);
        }
}

/* What a hook gives up counts once it is with the driver, and each rung does all that comes before it. */
static void test_rungs(void)
{
        struct gpureclaim_reclaimable drops = {
                .struct_bytes = sizeof(drops), .name = "drops", .drop = purge, .arg = &purges};
        struct gpureclaim_reclaimable slow = {
                .struct_bytes = sizeof(slow), .name = "slow", .purge = purge_slowly, .arg = &purges, .limit_ms = 20000};
        CUdeviceptr ptr;

        GR_MUST(cuMemFree(allocate(16 * MIB)));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(reclaim(gt.device, "trim", 0), 16 * MIB);
        GR_MUST(cuMemFree(allocate(16 * MIB)));
        GR_MUST(cuMemFree(allocate(32 * MIB)));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(reclaim(gt.device, "trim", 16 * MIB), 16 * MIB); /* no more than that */
        GR_CHECK_EQ(reclaim(gt.device, "trim", 0), 32 * MIB);
        GR_CHECK_EQ(enlist(&drops, &id), 0);
        atomic_store(&held, allocate(100 * MIB));
        GR_CHECK_EQ(reclaim(gt.device, "sync", 0), 0);
        GR_CHECK_EQ(reclaim(gt.device, "drop", 0), 100 * MIB);
        GR_CHECK_EQ(held, 0);
        GR_CHECK_EQ(unlist(id), 0);

        GR_CHECK_EQ(enlist(&slow, &id), 0);
        atomic_store(&held, allocate(200 * MIB));
        ptr = allocate(200 * MIB); /* has the time that it asked for */
        GR_MUST(cuMemFree(ptr));
        GR_CHECK_EQ(unlist(id), 0);
}

/* GPURECLAIM_HARD_LIMIT=256MiB */
static void test_hooks(void)
{
        struct gpureclaim_reclaimable bad = {.struct_bytes = 8, .purge = purge};
        struct gpureclaim_reclaimable good = {.struct_bytes = sizeof(good), .purge = purge};
        struct gpureclaim_status small = {.struct_bytes = 4 * sizeof(uint64_t), .peak_live_bytes = 12345};
        struct {
                struct gpureclaim_status status;
                uint64_t more;
        } newer = {{.struct_bytes = sizeof(newer)}, 12345};
        CUdeviceptr ptr;
        CUresult result;

        GR_CHECK_EQ(enlist(&bad, &id), -EINVAL);
        GR_CHECK_EQ(enlist(&good, NULL), -EINVAL);
        GR_CHECK_EQ(unlist(4711), -ENOENT);
        GR_CHECK_EQ(reclaim(0, "trim", 0), -ENODEV);
        GR_CHECK_EQ(status_of(0, &small), -ENODEV);
        enlist_purge(); /* before the driver is there */
        gt_open(&gt);
        GR_CHECK_EQ(reclaim(-1, "trim", 0), -ENODEV);
        GR_CHECK_EQ(reclaim(DEVICES_MOST, "trim", 0), -ENODEV);
        GR_CHECK_EQ(reclaim(gt.device, NULL, 0), -EINVAL);
        GR_CHECK_EQ(reclaim(gt.device, "neighbour", 0), -EINVAL); /* no rung of this function */
        atomic_store(&held, allocate(200 * MIB));
        GR_CHECK_EQ(status().live_bytes, 200 * MIB);
        GR_CHECK_EQ(status().hard_limit_bytes, 256 * MIB);
        GR_CHECK(status().card_free_bytes > 0 && status().card_free_bytes < status().card_total_bytes);
        GR_CHECK_EQ(status_of(gt.device, &small), 0);
        GR_CHECK_EQ(status_of(-1, &small), -EINVAL);
        GR_CHECK_EQ(status_of(gt.device, NULL), -EINVAL);
        GR_CHECK_EQ(status_of(DEVICES_MOST, &small), -EINVAL);
        GR_CHECK_EQ(status_of(DEVICES_MOST - 1, &small), -ENODEV);
        GR_CHECK_EQ(small.live_bytes, 200 * MIB);
        GR_CHECK_EQ(small.peak_live_bytes, 12345); /* beyond what the caller knows */
        GR_CHECK_EQ(status_of(gt.device, &newer.status), 0);
        GR_CHECK_EQ(newer.status.struct_bytes, sizeof(newer.status));
        GR_CHECK_EQ(newer.more, 12345); /* beyond what the library knows */
        small.struct_bytes--;
        GR_CHECK_EQ(status_of(gt.device, &small), -EINVAL);

        ptr = allocate(200 * MIB); /* fails without the hook */
        GR_CHECK_EQ(purges, 1);
        GR_CHECK_EQ(held, 0);
        GR_MUST(cuMemFree(ptr));
        GR_CHECK_EQ(reclaim(gt.device, "no such thing", 0), -EINVAL);
        GR_CHECK_EQ(reclaim(gt.device, "sync", 0), 200 * MIB);
        GR_CHECK_EQ(status().cached_bytes, 0);

        GR_CHECK_EQ(unlist(id), 0);
        GR_CHECK_EQ(unlist(id), -ENOENT);
        purges = 0;
        result = cuMemAlloc(&ptr, 300 * MIB);
        GR_CHECK_EQ(result, CUDA_ERROR_OUT_OF_MEMORY);
        GR_CHECK_EQ(purges, 0);
        fill_list();
        gt_sleep_us(300000); /* frees bypass the cache after a failure */
        test_rungs();
}

static _Atomic bool hook_inside, hook_may_end;

static int purge_without_end(void *arg, int device, uint64_t want_bytes)
{
        (void)arg, (void)device, (void)want_bytes;
        atomic_store(&hook_inside, true);
        while (!atomic_load(&hook_may_end))
                gt_sleep_us(1000);
        return 0;
}

/*
 * GPURECLAIM_HARD_LIMIT=256MiB. Who takes a hook that does not come back off the list is told that it still runs. The
 * process ends even where the hook does not.
 */
static void test_busy(bool ends)
{
        struct gpureclaim_reclaimable endless = {
                .struct_bytes = sizeof(endless), .name = "endless", .purge = purge_without_end, .limit_ms = 1};
        CUdeviceptr ptr;

        gt_open(&gt);
        GR_CHECK_EQ(enlist(&endless, &id), 0);
        GR_CHECK_EQ(cuMemAlloc(&ptr, 300 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
        while (!atomic_load(&hook_inside))
                gt_sleep_us(1000);
        GR_CHECK_EQ(unlist(id), -EBUSY);
        GR_CHECK_EQ(unlist(id), -ENOENT);
        GR_CHECK_EQ(unlist(UINT64_MAX), -ENOENT); /* no number frees its place */
        for (int i = 1; i < LIST_MOST; i++)       /* its place is not given to others: it still runs */
                GR_CHECK_EQ(enlist(&endless, &id), 0);
        GR_CHECK_EQ(enlist(&endless, &id), -ENOSPC);
        atomic_store(&hook_may_end, ends);
        for (int i = 0; ends && i < 100; i++) { /* nor after it has come back */
                GR_CHECK_EQ(enlist(&endless, &id), -ENOSPC);
                gt_sleep_us(1000);
        }
}

/* GPURECLAIM_HARD_LIMIT=256MiB. A hook for which no thread can be made does not run; it runs the next time. */
static void test_no_worker(void)
{
        struct rlimit before, none;
        CUdeviceptr ptr;
        CUresult result;

        gt_open(&gt);
        enlist_purge();
        atomic_store(&held, allocate(200 * MIB));
        GR_CHECK_EQ(getrlimit(RLIMIT_AS, &before), 0);
        none = before;
        none.rlim_cur = 0;
        GR_CHECK_EQ(setrlimit(RLIMIT_AS, &none), 0);
        result = cuMemAlloc(&ptr, 200 * MIB);
        GR_CHECK_EQ(setrlimit(RLIMIT_AS, &before), 0);
        GR_CHECK_EQ(result, CUDA_ERROR_OUT_OF_MEMORY);
        GR_CHECK_EQ(purges, 0);
        ptr = allocate(200 * MIB);
        GR_CHECK_EQ(purges, 1);
        GR_MUST(cuMemFree(ptr));
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
static void test_decay(void)
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
static void test_no_decay(void)
{
        gt_open(&gt);
        GR_MUST(cuMemFree(allocate(16 * MIB)));
        gt_sleep_us(700000);
        GR_CHECK_EQ(status().cached_bytes, 16 * MIB);
}

static unsigned long (*call_count)(const char *symbol); /* of the driver's functions */

static void find_call_count(void)
{
        *(void **)&call_count = dlsym(RTLD_DEFAULT, "grSimCallCount");
        if (!call_count)
                gt_die("not the simulated device");
}

/* Whoever only asks about a block leaves it to be cached; of what is cached, ranges of a segment too, nobody is told.
 */
static void test_questions(void)
{
        static const size_t bytes = 4 * MIB;
        CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
        CUmemorytype type;
        unsigned rdma = 2;
        int device_rdma;
        size_t range;
        void *values[] = {&type, &range};
        CUmemGenericAllocationHandle handle;
        CUdeviceptr live, freed, base;
        unsigned long calls;
        CUcontext context;

        find_call_count();
        gt_open(&gt);
        live = allocate(bytes);
        freed = allocate(bytes);
        GR_MUST(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, freed));
        GR_MUST(cuPointerGetAttributes(2, attributes, values, freed + 1));
        GR_CHECK_EQ(range, bytes);
        GR_CHECK(cuPointerGetAttribute(&context, (CUpointer_attribute)4711, live) != CUDA_SUCCESS);
        GR_MUST(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, live));
        GR_CHECK(context == gt.ctx);
        GR_CHECK_EQ(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)live), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuDeviceGetAttribute(&device_rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                                     gt.device));
        GR_MUST(cuPointerGetAttribute(&rdma, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, live));
        GR_CHECK_EQ(rdma, (unsigned)device_rdma);
        GR_MUST(cuMemFree(freed));
        GR_CHECK_EQ(status().cached_bytes, bytes);
        for (size_t at = 0; at < bytes; at += bytes / 4) {
                GR_MUST(cuMemGetAddressRange(&base, &range, live + at));
                GR_CHECK_EQ(base, live);
                GR_CHECK_EQ(cuMemGetAddressRange(&base, &range, freed + at), CUDA_ERROR_NOT_FOUND);
                GR_MUST(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, live + at));
                GR_CHECK_EQ(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, freed + at),
                            CUDA_ERROR_INVALID_VALUE);
                /* Of an address that it does not know the driver says nothing here, and no error. */
                range = 1;
                GR_MUST(cuPointerGetAttributes(2, attributes, values, freed + at));
                GR_CHECK_EQ(range, 0);
        }
        /* About a first byte, which most questions are about, the driver is asked once. */
        calls = call_count("cuPointerGetAttribute");
        GR_MUST(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, live));
        GR_CHECK_EQ(call_count("cuPointerGetAttribute"), calls + 1);
        GR_CHECK(cuIpcGetMemHandle(NULL, live) != CUDA_SUCCESS); /* nobody has got one */
        attributes[1] = (CUpointer_attribute)4711;
        GR_CHECK(cuPointerGetAttributes(2, attributes, values, live) != CUDA_SUCCESS);
        GR_MUST(cuMemFree(live));
        GR_CHECK_EQ(status().cached_bytes, 2 * bytes);
}

/* How often the library says what while act is called. */
static unsigned said(void (*act)(void), const char *what)
{
        char text[4096];
        int ends[2], shown = dup(STDERR_FILENO);
        unsigned count = 0;
        ssize_t bytes;

        GR_CHECK_EQ(pipe(ends), 0);
        dup2(ends[1], STDERR_FILENO);
        act();
        if (write(ends[1], ".", 1) != 1)
                gt_die("the pipe takes nothing");
        dup2(shown, STDERR_FILENO);
        bytes = read(ends[0], text, sizeof(text) - 1);
        text[bytes > 0 ? bytes : 0] = '\0';
        for (const char *at = strstr(text, what); at; at = strstr(at + 1, what))
                count++;
        return count;
}

static int purge_and_fail(void *arg, int device, uint64_t want_bytes)
{
        (void)device, (void)want_bytes;
        return *(int *)arg;
}

static void purge_all(void)
{
        GR_CHECK_EQ(reclaim(gt.device, "purge", MIB), 0);
}

/* Hooks fail by the number of an error or by its negative, which is told alike. */
static void test_failing_hooks(void)
{
        static int errors[] = {EPERM, -EPERM};
        uint64_t ids[2];

        gt_open(&gt);
        for (int i = 0; i < 2; i++) {
                struct gpureclaim_reclaimable failing = {
                        .struct_bytes = sizeof(failing), .purge = purge_and_fail, .arg = &errors[i]};

                GR_CHECK_EQ(enlist(&failing, &ids[i]), 0);
        }
        GR_CHECK_EQ(said(purge_all, strerror(EPERM)), 2);
        for (int i = 0; i < 2; i++)
                GR_CHECK_EQ(unlist(ids[i]), 0);
}

/*
 * A width of rows is remembered once the driver has told its pitch, and not when it was refused; for elements of another
 * size the driver is asked anew.
 */
static void test_widths(void)
{
        unsigned long calls;
        size_t pitch, told;
        CUdeviceptr ptr;

        enum { KNOWN = 2 * 3, REMEMBERED = 4096, WIDTHS = REMEMBERED + 100 };

        find_call_count();
        gt_open(&gt);
        GR_CHECK_EQ(cuMemAllocPitch(&ptr, &pitch, 1000, (size_t)1 << 29, 4), CUDA_ERROR_OUT_OF_MEMORY);
        for (unsigned k = 0; k < KNOWN; k++) {
                size_t width = k % 2 ? 1000 : 1;
                unsigned element = 4u << k / 2;

                calls = call_count("cuMemAllocPitch_v2");
                for (int i = 0; i < 3; i++) {
                        GR_MUST(cuMemAllocPitch(&ptr, &told, width, 4096, element));
                        pitch = i ? pitch : told;
                        GR_CHECK_EQ(told, pitch);
                        GR_CHECK_EQ(status().cached_bytes, 0); /* from the second one on it is the cached block */
                        GR_MUST(cuMemFree(ptr));
                        GR_MUST(cuCtxSynchronize());
                        GR_CHECK(status().cached_bytes > 0);
                }
                GR_CHECK_EQ(call_count("cuMemAllocPitch_v2"), calls + 1);
                reclaim(gt.device, "trim", 0);
        }
        /* No more of them than that are remembered; for the rest the driver is asked each time. */
        for (int round = 0; round < 2; round++) {
                calls = call_count("cuMemAllocPitch_v2");
                for (size_t width = 1001; width <= 1000 + WIDTHS; width++) {
                        GR_MUST(cuMemAllocPitch(&ptr, &pitch, width, 1, 4));
                        GR_CHECK_EQ(pitch, (width + 511) / 512 * 512);
                        GR_MUST(cuMemFree(ptr));
                }
                calls = call_count("cuMemAllocPitch_v2") - calls;
                GR_CHECK_EQ(calls, round ? WIDTHS - (REMEMBERED - KNOWN) : WIDTHS);
        }
}

/*
 * Of pinned memory that the cache serves the flags are those of the request, whatever the driver says of the slab that
 * it lies in. Of other memory they are the driver's.
 */
static void test_flags(void)
{
        static const unsigned asked[] = {0, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_WRITECOMBINED,
                                         CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_WRITECOMBINED};
        const unsigned mapped = CU_MEMHOSTALLOC_DEVICEMAP, slab = CU_MEMHOSTALLOC_WRITECOMBINED;
        static _Alignas(4096) char own[4096];
        void (*tell)(unsigned) = NULL;
        unsigned flags = 0;
        CUdeviceptr ptr;
        char *block;

        *(void **)&tell = dlsym(RTLD_DEFAULT, "grSimHostFlags");
        if (!tell)
                gt_die("not the simulated device");
        gt_open(&gt);
        tell(slab);
        for (int round = 0; round < 2; round++) /* new, and out of the cache */
                for (unsigned i = 0; i < sizeof(asked) / sizeof(asked[0]); i++) {
                        GR_MUST(cuMemHostAlloc((void **)&block, 64 * KIB, asked[i]));
                        GR_MUST(cuMemHostGetFlags(&flags, block));
                        GR_CHECK_EQ(flags, asked[i] | mapped);
                        GR_MUST(cuMemHostGetFlags(&flags, block + 4096));
                        GR_CHECK_EQ(flags, asked[i] | mapped);
                        GR_MUST(cuMemFreeHost(block));
                        flags = 4711;
                        GR_CHECK_EQ(cuMemHostGetFlags(&flags, block), CUDA_ERROR_INVALID_VALUE);
                        GR_CHECK_EQ(flags, 4711);
                }
        GR_MUST(cuMemAllocHost((void **)&block, 64 * KIB));
        GR_MUST(cuMemHostGetFlags(&flags, block));
        GR_CHECK_EQ(flags, slab | mapped);
        GR_MUST(cuMemFreeHost(block));
        ptr = allocate(64 * KIB);
        GR_CHECK_EQ(cuMemHostGetFlags(&flags, (void *)(uintptr_t)ptr), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemFree(ptr));
        GR_CHECK_EQ(cuMemHostGetFlags(&flags, own), CUDA_ERROR_INVALID_VALUE);
}

/* What this process exported and imports again is in its account already, under each name that descriptors have. */
static void test_own_import(void)
{
        static const int types[] = {CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, 9 /* a dma-buf, of newer toolkits */};
        CUexternalMemory memory;
        CUdeviceptr ptr;

        gt_open(&gt);
        for (int i = 0; i < 2; i++) {
                CUDA_EXTERNAL_MEMORY_HANDLE_DESC descriptor = {.type = (CUexternalMemoryHandleType)types[i],
                                                               .size = 4 * MIB};

                ptr = allocate(4 * MIB);
                GR_MUST(cuMemGetHandleForAddressRange(&descriptor.handle.fd, ptr, 4 * MIB,
                                                      CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
                GR_MUST(cuImportExternalMemory(&memory, &descriptor));
                GR_CHECK_EQ(status().imported_bytes, 0);
                GR_MUST(cuDestroyExternalMemory(memory));
                GR_MUST(cuMemFree(ptr));
                GR_CHECK_EQ(status().cached_bytes, 0); /* somebody may have it still */
        }
}

/*
 * GPURECLAIM_POOL=split GPURECLAIM_HARD_LIMIT=256MiB. What is free between blocks in use serves a request that fits into
 * no part of it, as its memory is mapped elsewhere.
 */
static void test_moves(void)
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

/* GPURECLAIM_RELEASE_THRESHOLD=64MiB GPURECLAIM_DECAY=0, on a card so large that no epoch is closed for what is freed:
 * the frees that pass the threshold go the fast path, and nothing else happens that could wake the helper. */
static void test_threshold(void)
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
static void test_soft_limit(void)
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
static void test_pinned_stays(void)
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

/*
 * With a driver that tells no attributes, or knows no allocation where the library has one: the size of a block is the
 * one that was asked for, inside of it, too. Any other error is the program's to see.
 */
static void test_range(CUresult expected)
{
        CUdeviceptr ptr, base = 0;
        size_t size = 0;

        gt_open(&gt);
        ptr = allocate(3 * MIB + 512);
        for (size_t at = 0; at <= MIB; at += MIB) {
                GR_CHECK_EQ(cuMemGetAddressRange(&base, &size, ptr + at), expected);
                GR_CHECK_EQ(base, expected == CUDA_SUCCESS ? ptr : 0);
                GR_CHECK_EQ(size, expected == CUDA_SUCCESS ? 3 * MIB + 512 : 0);
        }
        GR_MUST(cuMemFree(ptr));
}

/* GPURECLAIM_HARD_LIMIT=64MiB GPURECLAIM_SPILL=64MiB */
static void test_spill(void)
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
static void test_wait(void)
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

/* GPURECLAIM_HARD_LIMIT=64MiB; early: whether it is on. */
static void test_early(bool proactive)
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

static _Atomic bool hook_started, hook_ended, late_hook_ended;

static int purge_while_exiting(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)device;
        (void)want_bytes;
        atomic_store(&hook_started, true);
        while (!atomic_load(&late_hook_ended))
                gt_sleep_us(1000);
        gt_sleep_us(30000);
        GR_CHECK_EQ(cuMemFree(atomic_exchange(&held, 0)), CUDA_SUCCESS);
        atomic_store(&hook_ended, true);
        return 0;
}

/* Nobody waits for it any more when the other one begins, and it is back before that one. */
static int purge_too_late(void *arg, int device, uint64_t want_bytes)
{
        (void)arg, (void)device, (void)want_bytes;
        while (!atomic_load(&hook_started))
                gt_sleep_us(1000);
        gt_sleep_us(30000);
        atomic_store(&late_hook_ended, true);
        return 0;
}

static void *need_more(void *arg)
{
        CUdeviceptr ptr;

        gt_attach(&gt);
        cuMemAlloc(&ptr, 200 * MIB);
        return arg;
}

/* Runs after the library's own: registered before it. */
static void look_at_exit(void)
{
        if (hook_ended && !GR_CHECK_RESULT())
                return;
        fprintf(stderr, "a hook that has begun is not waited for\n");
        _exit(1);
}

/* GPURECLAIM_HARD_LIMIT=256MiB. The program ends while two hooks are at work, one of which calls the driver. */
static void test_exit(void)
{
        struct gpureclaim_reclaimable late = {
                .struct_bytes = sizeof(late), .name = "late", .purge = purge_too_late, .limit_ms = 1};
        struct gpureclaim_reclaimable reclaimable = {
                .struct_bytes = sizeof(reclaimable), .name = "test", .purge = purge_while_exiting};
        pthread_t thread;

        atexit(look_at_exit);
        gt_open(&gt);
        GR_CHECK_EQ(enlist(&late, &id), 0);
        GR_CHECK_EQ(enlist(&reclaimable, &id), 0);
        atomic_store(&held, allocate(200 * MIB));
        pthread_create(&thread, NULL, need_more, NULL);
        while (!atomic_load(&hook_started))
                gt_sleep_us(100);
}

int main(int argc, char **argv)
{
        const char *mode = argc > 1 ? argv[1] : "";

        main_thread = pthread_self();
        enlist = (gpureclaim_register_function *)dlsym(RTLD_DEFAULT, "gpureclaim_register");
        unlist = (gpureclaim_unregister_function *)dlsym(RTLD_DEFAULT, "gpureclaim_unregister");
        reclaim = (gpureclaim_reclaim_function *)dlsym(RTLD_DEFAULT, "gpureclaim_reclaim");
        status_of = (gpureclaim_status_function *)dlsym(RTLD_DEFAULT, "gpureclaim_status");
        if (!enlist || !unlist || !reclaim || !status_of) {
                fprintf(stderr, "the library is not there\n");
                return 1;
        }
        if (strcmp(mode, "hooks") == 0)
                test_hooks();
        else if (strcmp(mode, "busy") == 0)
                test_busy(true);
        else if (strcmp(mode, "endless") == 0)
                test_busy(false);
        else if (strcmp(mode, "no-worker") == 0)
                test_no_worker();
        else if (strcmp(mode, "decay") == 0)
                test_decay();
        else if (strcmp(mode, "no-decay") == 0)
                test_no_decay();
        else if (strcmp(mode, "questions") == 0)
                test_questions();
        else if (strcmp(mode, "widths") == 0)
                test_widths();
        else if (strcmp(mode, "flags") == 0)
                test_flags();
        else if (strcmp(mode, "failing") == 0)
                test_failing_hooks();
        else if (strcmp(mode, "own-import") == 0)
                test_own_import();
        else if (strcmp(mode, "moves") == 0)
                test_moves();
        else if (strcmp(mode, "threshold") == 0)
                test_threshold();
        else if (strcmp(mode, "soft-limit") == 0)
                test_soft_limit();
        else if (strcmp(mode, "pinned-stays") == 0)
                test_pinned_stays();
        else if (strcmp(mode, "range") == 0)
                test_range(CUDA_SUCCESS);
        else if (strcmp(mode, "range-error") == 0)
                test_range(CUDA_ERROR_UNKNOWN);
        else if (strcmp(mode, "spill") == 0)
                test_spill();
        else if (strcmp(mode, "exit") == 0)
                test_exit();
        else if (strcmp(mode, "wait") == 0)
                test_wait();
        else if (strcmp(mode, "proactive") == 0 || strcmp(mode, "no-proactive") == 0)
                test_early(strcmp(mode, "proactive") == 0);
        else
                return 2;
        return GR_CHECK_RESULT();
}
