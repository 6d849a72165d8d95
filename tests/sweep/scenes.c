/*
 * The scenes of the fault sweep: short programs, each of which frees all that it took. Every call that fails is tried
 * once more (TRY), so that a scene with a fault comes to the same end as one without.
 */
#include "sweep.h"

#include "gpureclaim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE        (2 * MIB)
#define PROBE_BYTES (8 * MIB)
#define PROBES_MOST 64
#define SMALL       ((size_t)4096)
#define LARGE       (3 * MIB)

static CUdevice device;
static CUcontext primary;
static CUmodule module;
static CUfunction fill_kernel, spin_kernel;

static void attach(void)
{
        TRY(cuCtxSetCurrent(primary));
}

static void open_device(void)
{
        TRY(cuInit(0));
        TRY(cuDeviceGet(&device, 0));
        TRY(cuDevicePrimaryCtxRetain(&primary, device));
        attach();
}

static void load_kernels(void)
{
        TRY(cuModuleLoadData(&module, "kernels"));
        TRY(cuModuleGetFunction(&fill_kernel, module, "gr_fill"));
        TRY(cuModuleGetFunction(&spin_kernel, module, "gr_spin"));
}

static void spin(CUstream stream, uint64_t us)
{
        uint64_t ns = us * 1000;
        void *args[] = {&ns};

        TRY(cuLaunchKernel(spin_kernel, 1, 1, 1, 1, 1, 1, 0, stream, args, NULL));
}

/* The end of a large block. */
static void fill(CUstream stream, CUdeviceptr p, uint32_t value)
{
        uint64_t words = SMALL / 4;

        void *args[] = {&p, &value, &words};

        p += LARGE - SMALL;
        TRY(cuLaunchKernel(fill_kernel, 1, 1, 1, 1, 1, 1, 0, stream, args, NULL));
}

static CUdeviceptr take(size_t bytes)
{
        CUdeviceptr p = 0;

        TRY(cuMemAlloc(&p, bytes));
        return p;
}

static void give(CUdeviceptr p)
{
        TRY(cuMemFree(p));
}

/* Whether the last word of memory is what was written. */
static void check(CUdeviceptr p, size_t bytes, uint32_t value)
{
        uint32_t found = 0;

        TRY(cuMemcpyDtoH(&found, p + bytes - 4, 4));
        if (found != value)
                sweep_wrong("memory holds %u, not %u", found, value);
}

static void use(CUdeviceptr p, size_t bytes, uint32_t value)
{
        size_t at_end = bytes < SMALL ? bytes : SMALL;

        TRY(cuMemsetD32(p + bytes - at_end, value, at_end / 4));
        check(p, bytes, value);
}

/* As much as can be had: to be out of memory twice in a row is the end, whatever else is an error. */
static unsigned take_all(CUdeviceptr *blocks)
{
        CUresult before = CUDA_SUCCESS;
        unsigned count = 0;

        while (count < PROBES_MOST) {
                CUresult result = cuMemAlloc(&blocks[count], PROBE_BYTES);
                bool short_of = result == CUDA_ERROR_OUT_OF_MEMORY;

                if (short_of && before == CUDA_ERROR_OUT_OF_MEMORY)
                        break;
                if (result == CUDA_SUCCESS) {
                        count++;
                        if (before == CUDA_ERROR_OUT_OF_MEMORY)
                                sweep_error("cuMemAlloc_v2", before, false);
                } else if (!short_of) {
                        sweep_error("cuMemAlloc_v2", result, before != CUDA_SUCCESS && before == result);
                }
                before = result;
        }
        return count;
}

static uint64_t live_bytes(void)
{
        struct gpureclaim_status status = {.struct_bytes = sizeof(status)};
        gpureclaim_status_function *ask;

        *(void **)&ask = dlsym(RTLD_DEFAULT, "gpureclaim_status");
        return ask && ask(0, &status) == 0 ? status.live_bytes : 0;
}

void sweep_finish(void)
{
        size_t (*used)(int);
        unsigned long (*misuses)(void);
        CUdeviceptr blocks[PROBES_MOST], p;
        size_t free_bytes;

        TRY(cuCtxSynchronize());
        /*
         * What could not be asked for is told as it was before, and what goes back just now as neither free nor cached.
         */
        for (int i = 0; i < 10; i++) {
                TRY(cuMemGetInfo(&free_bytes, &sweep_report->total_bytes));
                if (sweep_report->free_bytes < free_bytes)
                        sweep_report->free_bytes = free_bytes;
                if (i > 0 && sweep_report->total_bytes - sweep_report->free_bytes < PAGE)
                        break;
                if (i > 0)
                        usleep(2000);
        }
        /* What goes back just now counts as live for a moment. */
        for (int i = 0; i < 10 && (sweep_report->live_bytes = live_bytes()) > 0; i++)
                usleep(2000);
        sweep_report->blocks = take_all(blocks);
        for (unsigned i = 0; i < sweep_report->blocks; i++)
                TRY(cuMemsetD8(blocks[i] + PROBE_BYTES - 1, 1, 1));
        for (unsigned i = 0; i < sweep_report->blocks; i++)
                give(blocks[i]);
        p = take(SMALL);
        use(p, SMALL, 7);
        give(p);
        TRY(cuDevicePrimaryCtxRelease(device));
        *(void **)&used = dlsym(RTLD_DEFAULT, "grSimUsedBytes");
        *(void **)&misuses = dlsym(RTLD_DEFAULT, "grSimMisuseCount");
        sweep_report->used_bytes = used ? used(0) : 0;
        if (misuses && misuses() > 0)
                sweep_wrong("%lu touches of memory that was not the program's", misuses());
}

/* ---- one context, the default stream ---- */

static void plain(void)
{
        const size_t sizes[] = {SMALL, 100, 600 << 10, LARGE, 5 * MIB, 12 * MIB};
        size_t free_bytes, total_bytes, bytes, pitch;
        CUdeviceptr blocks[6], base;
        CUmemorytype type = 0;

        open_device();
        TRY(cuMemGetInfo(&free_bytes, &total_bytes));
        for (uint32_t round = 0; round < 3; round++) {
                for (uint32_t i = 0; i < 6; i++) {
                        blocks[i] = take(sizes[i]);
                        use(blocks[i], sizes[i] & ~(size_t)3, round * 6 + i);
                }
                TRY(cuMemGetAddressRange(&base, &bytes, blocks[3] + 5));
                if (base != blocks[3] || bytes != sizes[3])
                        sweep_wrong("a block of %zu bytes is told as one of %zu", sizes[3], bytes);
                TRY(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, blocks[2]));
                if (type != CU_MEMORYTYPE_DEVICE)
                        sweep_wrong("a block's memory is of type %d", (int)type);
                for (uint32_t i = 0; i < 6; i++)
                        give(blocks[i]);
        }
        for (int i = 0; i < 2; i++) {
                TRY(cuMemAllocPitch(&base, &pitch, 1000, 300, 4));
                use(base, pitch * 300, 3);
                give(base);
        }
}

/* ---- streams and events ---- */

static void streams(void)
{
        CUstream stream[3];
        CUevent event[2];
        CUdeviceptr p, q;

        open_device();
        load_kernels();
        for (int i = 0; i < 3; i++)
                TRY(cuStreamCreate(&stream[i], i ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT));
        for (int i = 0; i < 2; i++)
                TRY(cuEventCreate(&event[i], CU_EVENT_DISABLE_TIMING));
        for (uint32_t round = 0; round < 4; round++) {
                p = take(LARGE);
                q = take(SMALL);
                spin(stream[0], 300);
                fill(stream[0], p, round);
                TRY(cuEventRecord(event[0], stream[0]));
                TRY(cuStreamWaitEvent(stream[1], event[0], 0));
                TRY(cuMemsetD32Async(q, 50 + round, SMALL / 4, stream[1]));
                TRY(cuEventRecord(event[1], stream[1]));
                TRY(cuStreamWaitEvent(stream[2], event[1], 0));
                if (round % 2) { /* freed while in use */
                        give(p);
                        give(q);
                        continue;
                }
                TRY(cuStreamSynchronize(stream[2]));
                TRY(cuEventSynchronize(event[1]));
                check(p, LARGE, round);
                check(q, SMALL, 50 + round);
                give(p);
                give(q);
        }
        for (int i = 0; i < 2; i++)
                TRY(cuEventDestroy(event[i]));
        for (int i = 0; i < 3; i++)
                TRY(cuStreamDestroy(stream[i]));
}

/* ---- captures, with blocks freed before and meanwhile ---- */

/* Runs the graph once, and destroys it. */
static void run_once(CUgraph graph, CUstream stream)
{
        CUgraphExec exec;

        TRY(cuGraphInstantiate(&exec, graph, 0));
        TRY(cuGraphDestroy(graph));
        TRY(cuGraphLaunch(exec, stream));
        TRY(cuStreamSynchronize(stream));
        TRY(cuGraphExecDestroy(exec));
}

static void capture(void)
{
        CUdeviceptr kept, before, during;
        CUstream stream;
        CUgraph graph;

        open_device();
        load_kernels();
        TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        kept = take(LARGE);
        for (uint32_t round = 0; round < 2; round++) {
                before = take(LARGE);
                during = take(SMALL);
                give(before);
                TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
                fill(stream, kept, 70 + round);
                give(during);
                during = take(LARGE);
                TRY(cuStreamEndCapture(stream, &graph));
                run_once(graph, stream);
                check(kept, LARGE, 70 + round);
                use(during, LARGE, 5);
                give(during);
        }
        give(kept);
        TRY(cuStreamDestroy(stream));
}

/* ---- memory of captures, freed in them; natively they could not have any ---- */

static void graph_memory(void)
{
        CUdeviceptr inside, others[4];
        CUstream stream;
        CUgraph graph;

        open_device();
        load_kernels();
        TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        for (uint32_t round = 0; dlsym(RTLD_DEFAULT, "gpureclaim_status") && round < 2; round++) {
                TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
                for (int i = 0; i < 2; i++) {
                        inside = take(LARGE);
                        fill(stream, inside, 7);
                        give(inside);
                }
                TRY(cuStreamEndCapture(stream, &graph));
                for (uint32_t i = 0; i < 4; i++) {
                        others[i] = take(LARGE);
                        use(others[i], LARGE, 80 + i);
                }
                run_once(graph, stream);
                for (uint32_t i = 0; i < 4; i++) {
                        check(others[i], LARGE, 80 + i);
                        give(others[i]);
                }
        }
        TRY(cuStreamDestroy(stream));
}

/* ---- several contexts; one ends with live and cached memory, the primary one is reset ---- */

static void contexts(void)
{
        CUcontext own, left;
        CUdeviceptr here, there;

        open_device();
        here = take(LARGE);
        for (uint32_t round = 0; round < 2; round++) {
                TRY(cuCtxCreate(&own, NULL, 0, device));
                there = take(LARGE);
                use(there, LARGE, 1 + round);
                give(take(5 * MIB));
                give(take(SMALL));
                TRY(cuCtxPopCurrent(&left));
                give(there); /* from another context */
                TRY(cuCtxPushCurrent(own));
                there = take(LARGE);
                TRY(cuCtxDestroy(own));
                attach();
                use(here, LARGE, 3 + round);
        }
        give(here);
        here = take(LARGE);
        TRY(cuDevicePrimaryCtxReset(device));
        TRY(cuDevicePrimaryCtxRetain(&primary, device));
        attach();
        here = take(LARGE);
        use(here, LARGE, 9);
        give(here);
        TRY(cuDevicePrimaryCtxRelease(device)); /* a reset keeps how often it is retained: now it ends with the scene */
}

/* ---- two devices that reach each other's memory ---- */

static void peers(void)
{
        CUcontext other;
        CUdeviceptr here, there;
        CUdevice second;

        open_device();
        TRY(cuDeviceGet(&second, 1));
        TRY(cuDevicePrimaryCtxRetain(&other, second));
        TRY(cuCtxEnablePeerAccess(other, 0));
        TRY(cuCtxSetCurrent(other));
        TRY(cuCtxEnablePeerAccess(primary, 0));
        for (uint32_t round = 0; round < 3; round++) {
                TRY(cuCtxSetCurrent(other));
                there = take(LARGE);
                use(there, LARGE, round);
                attach();
                here = take(LARGE);
                TRY(cuMemcpyDtoDAsync(here, there, LARGE, 0));
                TRY(cuCtxSynchronize());
                check(here, LARGE, round);
                give(here);
                give(there);
        }
        TRY(cuDevicePrimaryCtxRelease(second));
        attach();
}

/* ---- stream-ordered memory ---- */

static void pools(void)
{
        CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
        cuuint64_t most = UINT64_MAX, reserved;
        CUdeviceptr p, q, block;
        CUmemoryPool pool, usual;
        CUstream stream;

        open_device();
        TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        TRY(cuDeviceGetDefaultMemPool(&usual, device));
        TRY(cuMemPoolCreate(&pool, &properties));
        TRY(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &most));
        for (uint32_t round = 0; round < 2; round++) {
                TRY(cuMemAllocAsync(&p, LARGE, stream));
                TRY(cuMemAllocFromPoolAsync(&q, LARGE, pool, stream));
                TRY(cuMemsetD32Async(p, 20 + round, LARGE / 4, stream));
                TRY(cuMemsetD32Async(q, 30 + round, LARGE / 4, stream));
                TRY(cuStreamSynchronize(stream));
                check(p, LARGE, 20 + round);
                check(q, LARGE, 30 + round);
                TRY(cuMemFreeAsync(p, stream));
                TRY(cuMemFreeAsync(q, stream));
                block = take(LARGE);
                TRY(cuMemFreeAsync(block, stream)); /* of cuMemAlloc, by a stream */
                TRY(cuMemAllocAsync(&p, SMALL, stream));
                TRY(cuStreamSynchronize(stream));
                give(p); /* and the other way round */
        }
        TRY(cuStreamSynchronize(stream));
        TRY(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
        TRY(cuMemPoolTrimTo(usual, 0));
        TRY(cuMemPoolTrimTo(pool, 0));
        TRY(cuMemAllocFromPoolAsync(&q, LARGE, pool, stream));
        TRY(cuMemPoolDestroy(pool)); /* with memory out */
        TRY(cuMemFreeAsync(q, stream));
        TRY(cuStreamSynchronize(stream));
        TRY(cuStreamDestroy(stream));
}

/* ---- mapped memory ---- */

/* What can be had; by the second look where, by a fault, the first one is told of the whole card. */
static size_t free_now(void)
{
        size_t looks[2] = {0}, total_bytes = 0;

        for (int i = 0; i < 2; i++)
                TRY(cuMemGetInfo(&looks[i], &total_bytes));
        return looks[0] < looks[1] ? looks[0] : looks[1];
}

static void check_charged(size_t free_before, size_t bytes)
{
        size_t taken = free_before - free_now();

        if (taken != bytes && !sweep_beside)
                sweep_wrong("%zu bytes are taken for %zu", taken, bytes);
}

static void mapped(void)
{
        CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                          .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                                          .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
        CUmemAccessDesc access = {.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUmemGenericAllocationHandle handle, again;
        size_t granularity = 0, free_bytes;
        CUdeviceptr p, other;
        int fd = -1;

        open_device();
        TRY(cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
        for (uint32_t round = 0; round < 2; round++) {
                free_bytes = free_now();
                other = take(LARGE);
                TRY(cuMemCreate(&handle, 4 * MIB, &properties, 0));
                TRY(cuMemAddressReserve(&p, 4 * MIB, 0, 0, 0));
                TRY(cuMemMap(p, 4 * MIB, 0, handle, 0));
                TRY(cuMemSetAccess(p, 4 * MIB, &access, 1));
                use(p, 4 * MIB, 40 + round);
                TRY(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)p));
                TRY(cuMemRelease(again));
                if (round == 0) {
                        TRY(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
                        TRY(cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd,
                                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
                        close(fd);
                        TRY(cuMemRelease(again));
                }
                give(other);
                check_charged(free_bytes, 4 * MIB);
                if (round == 0) /* either may be the last that holds the memory */
                        TRY(cuMemUnmap(p, 4 * MIB));
                else
                        TRY(cuMemRelease(handle));
                check_charged(free_bytes, 4 * MIB);
                if (round == 0)
                        TRY(cuMemRelease(handle));
                else
                        TRY(cuMemUnmap(p, 4 * MIB));
                check_charged(free_bytes, 0);
                TRY(cuMemAddressFree(p, 4 * MIB));
        }
}

/* ---- host memory ---- */

static void pinned(void)
{
        static _Thread_local char own[64 << 10] __attribute__((aligned(4096)));
        const size_t sizes[] = {SMALL, LARGE, 600 << 10};
        CUdeviceptr p, seen;
        void *blocks[3], *plain_block;

        open_device();
        p = take(LARGE);
        for (int round = 0; round < 3; round++) {
                for (int i = 0; i < 3; i++) {
                        TRY(cuMemHostAlloc(&blocks[i], sizes[i], CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
                        memset(blocks[i], round + 1, sizes[i]);
                }
                TRY(cuMemAllocHost(&plain_block, LARGE));
                memset(plain_block, 9 + round, LARGE);
                TRY(cuMemcpyHtoDAsync(p, plain_block, LARGE, 0));
                TRY(cuStreamSynchronize(0));
                check(p, LARGE, 0x01010101u * (9u + (unsigned)round));
                TRY(cuMemHostGetDevicePointer(&seen, blocks[0], 0));
                TRY(cuMemHostRegister(own, sizeof(own), 0));
                for (int i = 0; i < 3; i++)
                        TRY(cuMemFreeHost(blocks[i]));
                TRY(cuMemFreeHost(plain_block));
                TRY(cuMemHostUnregister(own));
        }
        give(p);
}

/* ---- managed memory and arrays ---- */

static void managed(void)
{
        CUDA_ARRAY_DESCRIPTOR shape = {.Width = 1024, .Height = 512, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUDA_ARRAY3D_DESCRIPTOR deep = {
                .Width = 256, .Height = 256, .Depth = 8, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUmipmappedArray levels;
        CUdeviceptr p, block;
        CUarray array, cube;
        size_t free_bytes, taken[2];

        open_device();
        for (int round = 0; round < 2; round++) {
                free_bytes = free_now();
                block = take(LARGE);
                TRY(cuMemAllocManaged(&p, LARGE, CU_MEM_ATTACH_GLOBAL));
                use(p, LARGE, 4);
                TRY(cuArrayCreate(&array, &shape));
                TRY(cuArray3DCreate(&cube, &deep));
                TRY(cuMipmappedArrayCreate(&levels, &deep, 2));
                give(block);
                taken[round] = free_bytes - free_now();
                TRY(cuMipmappedArrayDestroy(levels));
                TRY(cuArrayDestroy(cube));
                TRY(cuArrayDestroy(array));
                give(p);
                check_charged(free_bytes, 0);
        }
        if (taken[0] != taken[1] && !sweep_beside)
                sweep_wrong("%zu bytes are taken, then %zu for the same", taken[0], taken[1]);
}

/* ---- graphs that allocate ---- */

static void graphs(void)
{
        CUdeviceptr p, kept, block;
        CUstream stream;
        CUgraphExec exec;
        CUgraph graph;

        open_device();
        load_kernels();
        TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        kept = take(LARGE);
        for (uint32_t round = 0; round < 2; round++) {
                CUDA_MEM_ALLOC_NODE_PARAMS params = {
                        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}},
                        .bytesize = LARGE};
                CUgraphNode alloc, release;

                if (round == 0) {
                        TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
                        TRY(cuMemAllocAsync(&p, LARGE, stream));
                        fill(stream, p, 80);
                        TRY(cuMemcpyDtoDAsync(kept, p, LARGE, stream));
                        TRY(cuMemFreeAsync(p, stream));
                        TRY(cuStreamEndCapture(stream, &graph));
                } else {
                        TRY(cuGraphCreate(&graph, 0));
                        TRY(cuGraphAddMemAllocNode(&alloc, graph, NULL, 0, &params));
                        TRY(cuGraphAddMemFreeNode(&release, graph, &alloc, 1, params.dptr));
                }
                TRY(cuGraphInstantiate(&exec, graph, 0));
                TRY(cuGraphUpload(exec, stream));
                for (int i = 0; i < 2; i++)
                        TRY(cuGraphLaunch(exec, stream));
                block = take(LARGE);
                TRY(cuStreamSynchronize(stream));
                check(kept, LARGE, 80);
                give(block);
                TRY(cuGraphExecDestroy(exec));
                TRY(cuGraphDestroy(graph));
                TRY(cuDeviceGraphMemTrim(device));
        }
        give(kept);
        TRY(cuStreamDestroy(stream));
}

/* ---- the helper thread: a threshold, and memory that is idle ---- */

static void decay(void)
{
        CUdeviceptr blocks[5];

        open_device();
        for (uint32_t round = 0; round < 3; round++) {
                for (uint32_t i = 0; i < 5; i++) {
                        blocks[i] = take(i % 2 ? SMALL : LARGE);
                        use(blocks[i], SMALL, round * 5 + i);
                }
                for (uint32_t i = 0; i < 5; i++)
                        give(blocks[i]);
                TRY(cuCtxSynchronize());
                usleep(8000);
        }
}

/* ---- as much as there is, of one size and then of another; twice ---- */

static void fullness(void)
{
        CUdeviceptr blocks[PROBES_MOST], p;
        unsigned count, found[2];

        open_device();
        p = take(LARGE);
        for (int round = 0; round < 2; round++) {
                for (int i = 0; i < 6; i++)
                        blocks[i] = take(5 * MIB + (size_t)i * 512);
                for (int i = 0; i < 6; i++)
                        give(blocks[i]);
                found[round] = count = take_all(blocks);
                while (count > 0)
                        give(blocks[--count]);
        }
        if (found[0] != found[1])
                sweep_wrong("%u blocks could be had, then %u", found[0], found[1]);
        give(p);
}

/* ---- sizes that keep changing, until auto serves them from mapped memory ---- */

static void changing(void)
{
        CUdeviceptr kept, blocks[4], p;

        open_device();
        kept = take(LARGE);
        for (uint32_t i = 0; i < 12; i++) {
                size_t bytes = (10 + 2 * i) * MIB;

                p = take(bytes);
                use(p, bytes, i);
                give(p);
        }
        for (uint32_t round = 0; round < 2; round++) {
                for (uint32_t i = 0; i < 4; i++) {
                        blocks[i] = take((9 + 2 * i + round) * MIB);
                        use(blocks[i], 9 * MIB, 100 + i);
                }
                for (uint32_t i = 0; i < 4; i++) {
                        check(blocks[i], 9 * MIB, 100 + i);
                        give(blocks[i]);
                }
        }
        use(kept, LARGE, 7);
        give(kept);
}

/* ---- threads that allocate for each other ---- */

static struct {
        pthread_mutex_t lock;
        CUdeviceptr blocks[64];
        unsigned count;
} basket = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *exchange(void *arg)
{
        attach();
        for (uint32_t i = 0; i < 8; i++) {
                CUdeviceptr p = take((i + *(unsigned *)arg) % 3 ? SMALL : LARGE), other = 0;

                use(p, SMALL, i);
                pthread_mutex_lock(&basket.lock);
                if (basket.count > 1)
                        other = basket.blocks[--basket.count];
                basket.blocks[basket.count++] = p;
                pthread_mutex_unlock(&basket.lock);
                if (other)
                        give(other);
        }
        return NULL;
}

static void threads(void)
{
        unsigned numbers[3] = {0, 1, 2};
        pthread_t thread[3];

        open_device();
        for (int i = 0; i < 3; i++)
                pthread_create(&thread[i], NULL, exchange, &numbers[i]);
        for (int i = 0; i < 3; i++)
                pthread_join(thread[i], NULL);
        while (basket.count > 0)
                give(basket.blocks[--basket.count]);
}

/* ---- two processes on one card; the other one has no fault ---- */

static int to_other, from_other;
static pid_t other_process;

static void other_begin(void (*run)(int in, int out))
{
        int to[2], from[2];

        if (pipe(to) || pipe(from))
                abort();
        other_process = fork();
        if (other_process == 0) {
                static struct sweep_report unseen, *seen_by;

                prctl(PR_SET_PDEATHSIG, SIGKILL);
                close(to[1]);
                close(from[0]);
                unsetenv("GRSIM_FAULT");
                unsetenv("GPURECLAIM_TRACE");
                unsetenv("GPURECLAIM_STATS_FILE");
                sweep_plan.nth = 0;
                seen_by = sweep_report;
                sweep_report = &unseen;
                open_device();
                run(to[0], from[1]);
                seen_by->unhelped |= unseen.unhelped;
                for (unsigned i = 0; i < unseen.error_count && i < SWEEP_ERRORS; i++)
                        if (unseen.errors[i].code != CUDA_ERROR_OUT_OF_MEMORY)
                                sweep_wrong("%s of the other process", unseen.errors[i].call);
                exit(unseen.wrong[0] != 0);
        }
        close(to[0]);
        close(from[1]);
        to_other = to[1];
        from_other = from[0];
}

static char other_says(void)
{
        char word = 0;

        if (read(from_other, &word, 1) != 1)
                sweep_wrong("the other process has gone");
        return word;
}

static void other_end(void)
{
        int status = -1;

        close(to_other);
        if (waitpid(other_process, &status, 0) != other_process || status != 0)
                sweep_wrong("the other process ended with %#x", (unsigned)status);
}

static void say(int out, char word)
{
        if (write(out, &word, 1) != 1)
                abort();
}

static void give_40(void)
{
        CUdeviceptr blocks[5];

        for (int i = 0; i < 5; i++)
                blocks[i] = take(8 * MIB);
        for (int i = 0; i < 5; i++)
                give(blocks[i]);
}

/* More than is free beside what the other process keeps: who cannot ask for it gets what there is. */
static void take_40(void)
{
        CUdeviceptr blocks[PROBES_MOST];
        unsigned count = take_all(blocks);

        sweep_report->unhelped = count < 5;
        while (count > 0) {
                use(blocks[--count], PROBE_BYTES, 6);
                give(blocks[count]);
        }
}

/* Leaves memory in its cache and waits. */
static void giver(int in, int out)
{
        char word;

        give_40();
        say(out, 'g');
        if (read(in, &word, 1) < 0)
                abort();
        TRY(cuDevicePrimaryCtxRelease(device));
}

static void asking(void)
{
        other_begin(giver);
        other_says();
        open_device();
        take_40();
        other_end();
}

/* Waits until there is memory to ask for. */
static void asker(int in, int out)
{
        char word;

        if (read(in, &word, 1) == 1) {
                take_40();
                say(out, 't');
        }
        TRY(cuDevicePrimaryCtxRelease(device));
}

static void giving(void)
{
        other_begin(asker);
        open_device();
        give_40();
        say(to_other, 'a');
        other_says();
        other_end();
}

/* ---- memory that another process opens, and the other way round ---- */

static void partner(int in, int out)
{
        CUipcMemHandle handle;
        CUdeviceptr p;
        char word;

        if (read(in, &handle, sizeof(handle)) == (ssize_t)sizeof(handle)) {
                TRY(cuIpcOpenMemHandle(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
                check(p, LARGE, 17);
                TRY(cuMemsetD32(p + LARGE - SMALL, 18, SMALL / 4));
                TRY(cuCtxSynchronize());
                TRY(cuIpcCloseMemHandle(p));
                say(out, 'c');
        }
        p = take(LARGE);
        use(p, LARGE, 19);
        TRY(cuIpcGetMemHandle(&handle, p));
        if (write(out, &handle, sizeof(handle)) != (ssize_t)sizeof(handle) || read(in, &word, 1) != 1)
                abort();
        give(p);
}

static void shared(void)
{
        CUipcMemHandle handle;
        CUdeviceptr p;

        other_begin(partner);
        open_device();
        p = take(LARGE);
        use(p, LARGE, 17);
        TRY(cuIpcGetMemHandle(&handle, p));
        if (write(to_other, &handle, sizeof(handle)) != (ssize_t)sizeof(handle))
                abort();
        other_says();
        check(p, LARGE, 18);
        give(p);
        give(take(LARGE));
        if (read(from_other, &handle, sizeof(handle)) != (ssize_t)sizeof(handle))
                abort();
        TRY(cuIpcOpenMemHandle(&p, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        check(p, LARGE, 19);
        TRY(cuIpcCloseMemHandle(p));
        say(to_other, 'd');
        other_end();
}

/* ---- streams that wait for the host ---- */

static void host_function(void *arg)
{
        ++*(unsigned *)arg;
}

static void hosts(void)
{
        unsigned count = 0;
        CUdeviceptr word, p;
        CUstream stream;

        open_device();
        TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        word = take(SMALL);
        TRY(cuMemsetD32(word, 0, SMALL / 4));
        for (uint32_t round = 1; round <= 3; round++) {
                p = take(LARGE);
                TRY(cuStreamWaitValue32(stream, word, round, CU_STREAM_WAIT_VALUE_GEQ));
                TRY(cuMemsetD32Async(p + LARGE - SMALL, round, SMALL / 4, stream));
                TRY(cuLaunchHostFunc(stream, host_function, &count));
                TRY(cuMemsetD32(word, round, 1));
                TRY(cuStreamSynchronize(stream));
                check(p, LARGE, round);
                give(p);
                if (count != round)
                        sweep_wrong("%u functions of the host ran, not %u", count, round);
        }
        give(word);
        TRY(cuStreamDestroy(stream));
}

/* ---- a context with a part of the device ---- */

static void green(void)
{
        CUdevResourceDesc description;
        CUdevResource all, part;
        unsigned groups = 1;
        CUgreenCtx handle;
        CUcontext context;
        CUstream stream;
        CUdeviceptr p, q;

        open_device();
        p = take(LARGE);
        TRY(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
        TRY(cuDevSmResourceSplitByCount(&part, &groups, &all, NULL, 0, 16));
        TRY(cuDevResourceGenerateDesc(&description, &part, 1));
        TRY(cuGreenCtxCreate(&handle, description, device, CU_GREEN_CTX_DEFAULT_STREAM));
        TRY(cuCtxFromGreenCtx(&context, handle));
        TRY(cuGreenCtxStreamCreate(&stream, handle, CU_STREAM_NON_BLOCKING, 0));
        TRY(cuCtxSetCurrent(context));
        for (uint32_t round = 0; round < 2; round++) {
                q = take(LARGE);
                TRY(cuMemsetD32Async(q + LARGE - SMALL, 90 + round, SMALL / 4, stream));
                TRY(cuStreamSynchronize(stream));
                check(q, LARGE, 90 + round);
                give(q);
        }
        give(p);
        TRY(cuStreamDestroy(stream));
        attach();
        TRY(cuGreenCtxDestroy(handle));
}

/* ---- without a line of its own: the scenes above under other settings ---- */

#define CARD "GRSIM_MEMORY=64MiB"

const struct sweep_scene sweep_scenes[] = {
        {"plain", plain, {CARD}, true},
        {"streams", streams, {CARD}, true},
        {"streams-barrier", streams, {CARD, "GPURECLAIM_REUSE=barrier"}, true},
        {"streams-poll", streams, {CARD, "GPURECLAIM_REUSE=poll"}, false},
        {"streams-sync", streams, {CARD, "GPURECLAIM_REUSE=sync"}, true},
        {"streams-old", streams, {CARD, "GRSIM_MISSING=cuCtxRecordEvent,cuCtxWaitEvent"}, false},
        {"capture", capture, {CARD}, true},
        {"graph-memory", graph_memory, {CARD}, true, .keeps = true},
        {"graph-memory-shared", graph_memory, {CARD, "GPURECLAIM_GRAPH_ARENA=shared"}, true, .keeps = true},
        {"contexts", contexts, {CARD}, true},
        {"peers", peers, {CARD, "GRSIM_DEVICES=2"}, false},
        {"pools", pools, {CARD}, true},
        {"pools-limit", pools, {CARD, "GPURECLAIM_HARD_LIMIT=32MiB"}, false},
        {"mapped", mapped, {CARD}, true},
        {"mapped-limit", mapped, {CARD, "GPURECLAIM_HARD_LIMIT=32MiB"}, false},
        {"pinned", pinned, {CARD, "GPURECLAIM_PINNED_LIMIT=64MiB"}, false},
        {"managed", managed, {CARD}, true},
        {"managed-limit", managed, {CARD, "GPURECLAIM_HARD_LIMIT=32MiB"}, false},
        {"graphs", graphs, {CARD}, true},
        {"graphs-limit", graphs, {CARD, "GPURECLAIM_HARD_LIMIT=32MiB"}, false},
        {"decay", decay, {CARD, "GPURECLAIM_DECAY=20ms"}, true},
        {"threshold", decay, {CARD, "GPURECLAIM_RELEASE_THRESHOLD=0"}, true},
        {"full", fullness, {CARD}, true},
        {"full-limit", fullness, {CARD, "GPURECLAIM_HARD_LIMIT=40MiB"}, true},
        {"full-ladder",
         fullness,
         {CARD, "GPURECLAIM_HARD_LIMIT=40MiB", "GPURECLAIM_SOFT_LIMIT=20MiB", "GPURECLAIM_WAIT=3ms",
          "GPURECLAIM_SPILL=16MiB", "GPURECLAIM_MALLOC_TRIM=1"},
         true},
        {"changing", changing, {"GRSIM_MEMORY=320MiB"}, true},
        {"threads", threads, {CARD}, true},
        {"trace",
         plain,
         {CARD, "GPURECLAIM_TRACE=FOLDER/trace", "GPURECLAIM_STATS_FILE=FOLDER/stats", "GPURECLAIM_STATS=1"},
         false},
        {"group", plain, {CARD, "GPURECLAIM_GROUP_LIMIT=48MiB"}, false},
        {"asking", asking, {CARD, "GRSIM_SHARED=FOLDER/card", "GPURECLAIM_NEIGHBOUR_WAIT=2s"}, true, true},
        {"shared", shared, {CARD}, true},
        {"hosts", hosts, {CARD}, true},
        {"green", green, {CARD}, true},
        {"giving", giving, {CARD, "GRSIM_SHARED=FOLDER/card", "GPURECLAIM_NEIGHBOUR_WAIT=2s"}, true, true},
};
const size_t sweep_scene_count = sizeof(sweep_scenes) / sizeof(*sweep_scenes);
