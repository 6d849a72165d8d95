/* Memory that is not cuMemAlloc's: pools, mapped memory, graphs. */
#include "facts.h"

#include <stdio.h>
#include <unistd.h>

static CUmemLocation here(void)
{
        return (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device};
}

static CUmemoryPool pool_of(size_t most)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = here(), .maxSize = most};
        CUmemoryPool pool;

        GR_MUST(cuMemPoolCreate(&pool, &props));
        return pool;
}

static void pool_is(const char *name, CUmemoryPool pool)
{
        cuuint64_t reserved = 0, used = 0;

        GR_MUST(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
        GR_MUST(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used));
        fact(name, "%llu KiB used of %llu", (unsigned long long)(used >> 10), (unsigned long long)(reserved >> 10));
}

static void kinds_of_pools(void)
{
        typedef CUresult CUDAAPI get_pool(CUmemoryPool *, CUmemLocation *, CUmemAllocationType);
        get_pool *get_default = EXPORTED(get_pool, "cuMemGetDefaultMemPool");
        static const struct {
                const char *name;
                CUmemPoolProps props;
        } kinds[] = {
                {"pool of nothing", {0}},
                {"pool of host memory",
                 {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_HOST}}},
                {"pool of a NUMA node's memory",
                 {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA}}},
                {"pool of managed memory",
                 {.allocType = CU_MEM_ALLOCATION_TYPE_MANAGED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}}},
                {"pool of managed memory of no place",
                 {.allocType = CU_MEM_ALLOCATION_TYPE_MANAGED, .location = {.type = CU_MEM_LOCATION_TYPE_NONE}}},
                {"pool of a device that is not there",
                 {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                  .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 77}}},
                {"pool to be exported by fabric",
                 {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                  .handleTypes = (CUmemAllocationHandleType)2,
                  .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}}},
        };

        for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
                CUmemoryPool pool = NULL;
                CUdeviceptr p = 0;
                CUresult result = cuMemPoolCreate(&pool, &kinds[i].props);

                if (result != CUDA_SUCCESS) {
                        fact_code(kinds[i].name, result);
                        continue;
                }
                result = cuMemAllocFromPoolAsync(&p, MIB, pool, NULL);
                fact(kinds[i].name, "made, 1 MiB from it %s", code(result));
                if (result == CUDA_SUCCESS)
                        GR_MUST(cuMemFreeAsync(p, NULL));
                GR_MUST(cuCtxSynchronize());
                GR_MUST(cuMemPoolDestroy(pool));
        }
        for (int i = 0; get_default && i < 4; i++) {
                static const char *const names[] = {"default pool of the device",
                                                    "default pool of managed memory there", "default pool of the host",
                                                    "default pool of managed memory, host"};
                CUmemLocation where = i < 2 ? here() : (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_HOST};
                CUmemoryPool pool = NULL, usual;
                CUdeviceptr p = 0;
                CUresult result = get_default(&pool, &where,
                                              i % 2 ? CU_MEM_ALLOCATION_TYPE_MANAGED : CU_MEM_ALLOCATION_TYPE_PINNED);

                if (result != CUDA_SUCCESS) {
                        fact_code(names[i], result);
                        continue;
                }
                GR_MUST(cuDeviceGetDefaultMemPool(&usual, gt.device));
                result = cuMemAllocFromPoolAsync(&p, MIB, pool, NULL);
                fact(names[i], "%s, 1 MiB from it %s", pool == usual ? "the usual one" : "another", code(result));
                if (result == CUDA_SUCCESS)
                        GR_MUST(cuMemFreeAsync(p, NULL));
                GR_MUST(cuCtxSynchronize());
        }
}

static void use_of_pools(CUstream stream)
{
        CUmemoryPool standard, now, next, pool = pool_of(0), small = pool_of(64 * MIB);
        CUdeviceptr p, q, r, first;
        cuuint64_t keep = UINT64_MAX;
        CUmemPoolPtrExportData exported_pointer;
        CUipcMemHandle ipc;
        unsigned capable = 7;
        CUmemAccess_flags flags = 0;
        CUmemLocation where = here();
        CUcontext ctx = NULL;
        CUdeviceptr base = 0;
        size_t bytes = 0;

        GR_MUST(cuDeviceGetDefaultMemPool(&standard, gt.device));
        GR_MUST(cuDeviceGetMemPool(&now, gt.device));
        fact_yes("the default pool is the current one", now == standard);
        fact_code("cuMemAllocAsync of 0 bytes", cuMemAllocAsync(&p, 0, stream));
        fact_code("cuMemAllocAsync into NULL", cuMemAllocAsync(NULL, 1, stream));
        fact_code("cuMemAllocAsync of 2^50 bytes", cuMemAllocAsync(&p, (size_t)1 << 50, stream));
        fact_code("cuMemAllocFromPoolAsync from NULL", cuMemAllocFromPoolAsync(&p, 1, NULL, stream));
        pool_is("a new pool", pool);
        GR_MUST(cuMemAllocFromPoolAsync(&p, 1000, pool, stream));
        pool_is("with 1000 bytes", pool);
        GR_MUST(cuMemAllocFromPoolAsync(&q, MIB + 1, pool, stream));
        pool_is("with 1 MiB and 1 byte more", pool);
        GR_MUST(cuMemAllocFromPoolAsync(&r, 40 * MIB, pool, stream));
        pool_is("with 40 MiB more", pool);
        fact_code("range", cuMemGetAddressRange(&base, &bytes, p + 1));
        fact("range of 1000 bytes", "begins %s, %zu B", base == p ? "there" : "elsewhere", bytes);
        fact_code("its context", cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, p));
        fact("its context is", "%s", ctx == gt.ctx ? "the stream's" : ctx ? "another" : "none");
        fact_code("its pool", cuPointerGetAttribute(&now, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, p));
        fact_yes("its pool is the pool", now == pool);
        GR_MUST(cuPointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, p));
        fact_yes("can be shared by legacy IPC", capable);
        fact_code("cuIpcGetMemHandle of a pool's memory", cuIpcGetMemHandle(&ipc, q));
        fact_code("cuMemPoolExportPointer of a pool not to be shared", cuMemPoolExportPointer(&exported_pointer, q));
        fact_code("cuMemPoolGetAccess", cuMemPoolGetAccess(&flags, pool, &where));
        fact("its access is", "%d", (int)flags);
        fact_code("cuMemFreeAsync inside", cuMemFreeAsync(q + 512, stream));
        hold(stream);
        GR_MUST(cuMemFreeAsync(q, stream));
        fact_code("cuMemFreeAsync once more", cuMemFreeAsync(q, stream));
        fact_code("range of memory that the stream will free", cuMemGetAddressRange(&base, &bytes, q));
        fact_code("cuPointerGetAttribute of it", cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, q));
        fact_code("cuMemFree of it", cuMemFree(q));
        pool_is("with 1 MiB and 1 byte that the stream will free", pool);
        release();
        while (cuStreamQuery(stream) == CUDA_ERROR_NOT_READY)
                gt_sleep_us(100);
        fact_code("range of memory freed in stream order", cuMemGetAddressRange(&base, &bytes, q));
        fact_code("cuMemFree of it", cuMemFree(q));
        GR_MUST(cuStreamSynchronize(stream));
        pool_is("synchronised", pool);
        fact_code("cuMemFreeAsync after that", cuMemFreeAsync(q, stream));
        fact_code("cuMemFree of a pool's memory", cuMemFree(r));
        pool_is("with 40 MiB freed by cuMemFree", pool);
        fact_code("cuMemFree once more", cuMemFree(r));
        GR_MUST(cuMemFreeAsync(p, stream));
        GR_MUST(cuStreamSynchronize(stream));
        pool_is("with all freed", pool);
        GR_MUST(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
        GR_MUST(cuMemAllocFromPoolAsync(&first, 40 * MIB, pool, stream));
        GR_MUST(cuMemFreeAsync(first, stream));
        GR_MUST(cuMemAllocFromPoolAsync(&p, 40 * MIB, pool, stream));
        fact_yes("the stream gets its memory again at once", p == first);
        GR_MUST(cuMemFreeAsync(p, stream));
        GR_MUST(cuStreamSynchronize(stream));
        pool_is("that keeps, with all freed", pool);
        fact_code("cuMemPoolTrimTo 0", cuMemPoolTrimTo(pool, 0));
        pool_is("trimmed", pool);
        GR_MUST(cuMemAllocFromPoolAsync(&p, 4096, pool, stream));
        fact_code("cuMemPoolDestroy with memory out", cuMemPoolDestroy(pool));
        next = pool_of(0);
        fact_yes("a new pool then has its handle", next == pool);
        GR_MUST(cuMemPoolDestroy(next));
        fact_code("cuMemsetD8Async of that memory", cuMemsetD8Async(p, 1, 4096, stream));
        fact_code("its pool, asked of that memory",
                  cuPointerGetAttribute(&now, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, p));
        fact_yes("that is the destroyed pool", now == pool);
        fact_code("cuMemFreeAsync of that memory", cuMemFreeAsync(p, stream));
        GR_MUST(cuStreamSynchronize(stream));
        next = pool_of(0);
        fact_yes("a new pool after that has its handle", next == pool);
        GR_MUST(cuMemPoolDestroy(next));
        fact_code("cuMemAllocFromPoolAsync of more than maxSize", cuMemAllocFromPoolAsync(&p, 65 * MIB, small, stream));
        fact_code("cuDeviceSetMemPool", cuDeviceSetMemPool(gt.device, small));
        fact_code("cuMemPoolDestroy of the current pool", cuMemPoolDestroy(small));
        GR_MUST(cuDeviceGetMemPool(&now, gt.device));
        fact_yes("then the default pool is the current one", now == standard);
        fact_code("cuMemPoolDestroy of the default pool", cuMemPoolDestroy(standard));
        fact_code("cuMemPoolDestroy of NULL", cuMemPoolDestroy(NULL));
        p = block(4 * MIB);
        fact_code("cuMemFreeAsync of cuMemAlloc's memory", cuMemFreeAsync(p, stream));
        /* Not once more before that has run: the driver takes it, and then waits for ever. */
        GR_MUST(cuStreamSynchronize(stream));
        fact_code("cuMemFreeAsync of it once more", cuMemFreeAsync(p, stream));
        fact_code("cuMemFree of it", cuMemFree(p));
        fact_code("cuMemFreeAsync of 0", cuMemFreeAsync(0, stream));
        fact_code("cuMemFreeAsync of a nonsense address", cuMemFreeAsync(0x1234, stream));
}

/* What has to happen, once the free has run, before the pool lets go of what was freed in the order of a stream. */
enum returned_by {
        NOTHING,
        QUERY,
        EVENT,
        CONTEXT_EVENT,
        CONTEXT_EVENT_BESIDE_CAPTURE,
        OTHER_STREAM,
        DEFAULT_STREAM,
        FREE,
        FREE_HOST,
        FREE_HOST_BESIDE_CAPTURE,
        STREAM_BESIDE_CAPTURE,
        STREAM,
        CONTEXT,
        RETURNED_BYS
};

static void ask_for_return(enum returned_by by, CUstream stream, CUstream other, CUevent event, CUevent of_context)
{
        CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
        bool beside =
                by == FREE_HOST_BESIDE_CAPTURE || by == STREAM_BESIDE_CAPTURE || by == CONTEXT_EVENT_BESIDE_CAPTURE;
        void *page = NULL;
        CUdeviceptr p;

        if (beside) {
                GR_MUST(cuThreadExchangeStreamCaptureMode(&relaxed));
                GR_MUST(cuStreamBeginCapture(other, CU_STREAM_CAPTURE_MODE_GLOBAL));
        }
        switch (by) {
        case QUERY:
                GR_MUST(cuStreamQuery(stream));
                break;
        case EVENT:
                GR_MUST(cuEventSynchronize(event));
                break;
        case CONTEXT_EVENT:
        case CONTEXT_EVENT_BESIDE_CAPTURE:
                GR_MUST(cuEventSynchronize(of_context));
                break;
        case OTHER_STREAM:
                GR_MUST(cuStreamSynchronize(other));
                break;
        case DEFAULT_STREAM:
                GR_MUST(cuStreamSynchronize(NULL));
                break;
        case FREE:
                p = block(MIB);
                GR_MUST(cuMemFree(p));
                break;
        case FREE_HOST:
        case FREE_HOST_BESIDE_CAPTURE:
                GR_MUST(cuMemHostAlloc(&page, 4096, 0));
                GR_MUST(cuMemFreeHost(page));
                break;
        case STREAM:
        case STREAM_BESIDE_CAPTURE:
                GR_MUST(cuStreamSynchronize(stream));
                break;
        case CONTEXT:
                GR_MUST(cuCtxSynchronize());
                break;
        default:
                break;
        }
        if (beside) {
                fact_end("the capture ends", other);
                GR_MUST(cuThreadExchangeStreamCaptureMode(&relaxed));
        }
}

static void returns_of_pools(void)
{
        static const char *const names[RETURNED_BYS] = {"nothing",
                                                        "cuStreamQuery",
                                                        "cuEventSynchronize",
                                                        "cuEventSynchronize of the context's event",
                                                        "cuEventSynchronize of that beside a capture",
                                                        "cuStreamSynchronize of another stream",
                                                        "cuStreamSynchronize of the default stream",
                                                        "cuMemFree",
                                                        "cuMemFreeHost",
                                                        "cuMemFreeHost beside a capture",
                                                        "cuStreamSynchronize beside a capture",
                                                        "cuStreamSynchronize",
                                                        "cuCtxSynchronize"};

        for (enum returned_by by = 0; by < RETURNED_BYS; by++) {
                CUstream stream = stream_of(CU_STREAM_NON_BLOCKING), other = stream_of(CU_STREAM_NON_BLOCKING);
                CUmemoryPool pool = pool_of(0);
                char name[100];
                CUdeviceptr p;
                CUevent event, of_context;

                GR_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
                GR_MUST(cuEventCreate(&of_context, CU_EVENT_DISABLE_TIMING));
                GR_MUST(cuMemAllocFromPoolAsync(&p, 64 * MIB, pool, stream));
                GR_MUST(cuMemsetD8Async(p, 1, MIB, stream));
                GR_MUST(cuMemFreeAsync(p, stream));
                GR_MUST(cuEventRecord(event, stream));
                GR_MUST(cuCtxRecordEvent(gt.ctx, of_context));
                while (cuEventQuery(event) == CUDA_ERROR_NOT_READY || cuEventQuery(of_context) == CUDA_ERROR_NOT_READY)
                        gt_sleep_us(100);
                ask_for_return(by, stream, other, event, of_context);
                GR_MUST(cuMemPoolTrimTo(pool, 0));
                snprintf(name, sizeof name, "freed in stream order, after %s", names[by]);
                pool_is(name, pool);
                GR_MUST(cuStreamSynchronize(stream));
                GR_MUST(cuEventDestroy(event));
                GR_MUST(cuEventDestroy(of_context));
                GR_MUST(cuMemPoolDestroy(pool));
                GR_MUST(cuStreamDestroy(stream));
                GR_MUST(cuStreamDestroy(other));
        }
}

void facts_pools(void)
{
        kinds_of_pools();
        use_of_pools(stream_of(CU_STREAM_NON_BLOCKING));
        returns_of_pools();
}

void facts_mapped(void)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    .location = here()},
                            other = prop;
        CUmemAccessDesc access = {.location = here(), .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUmemGenericAllocationHandle a, b, again;
        CUdeviceptr at, base = 0, p;
        unsigned long long flags = 7;
        unsigned value = 7;
        size_t granularity = 0, bytes = 0, before;
        CUcontext ctx = NULL;
        CUipcMemHandle ipc;
        int fd = -1;

        GR_MUST(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
        fact("granularity, minimum", "%zu KiB", granularity >> 10);
        GR_MUST(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
        fact("granularity, recommended", "%zu KiB", granularity >> 10);
        fact_code("cuMemCreate of 0 bytes", cuMemCreate(&a, 0, &prop, 0));
        fact_code("cuMemCreate of half a page", cuMemCreate(&a, MIB, &prop, 0));
        fact_code("cuMemCreate of 2^50 bytes", cuMemCreate(&a, (size_t)1 << 50, &prop, 0));
        fact_code("cuMemCreate with flags", cuMemCreate(&a, GT_PAGE, &prop, 1));
        other.location.id = 77;
        fact_code("cuMemCreate on a device that is not there", cuMemCreate(&a, GT_PAGE, &other, 0));
        fact_code("cuMemAddressReserve of half a page", cuMemAddressReserve(&at, MIB, 0, 0, 0));
        before = pages_used();
        GR_MUST(cuMemAddressReserve(&at, 8 * GT_PAGE, 0, 0, 0));
        fact("reserved addresses take", "%zu pages", pages_used() - before);
        GR_MUST(cuMemCreate(&a, 2 * GT_PAGE, &prop, 0));
        GR_MUST(cuMemCreate(&b, 2 * GT_PAGE, &prop, 0));
        fact("two handles of two pages take", "%zu pages", pages_used() - before);
        fact_code("range of reserved addresses", cuMemGetAddressRange(&base, &bytes, at));
        fact_code("cuMemMap of a part", cuMemMap(at, GT_PAGE, 0, a, 0));
        fact_code("cuMemMap from the middle", cuMemMap(at, GT_PAGE, GT_PAGE, a, 0));
        fact_code("cuMemMap off the granularity", cuMemMap(at + MIB, 2 * GT_PAGE, 0, a, 0));
        fact_code("cuMemMap beyond the handle", cuMemMap(at, 3 * GT_PAGE, 0, a, 0));
        cuMemUnmap(at, GT_PAGE);
        cuMemUnmap(at, 2 * GT_PAGE);
        fact_code("cuMemMap", cuMemMap(at, 2 * GT_PAGE, 0, a, 0));
        fact_code("cuMemMap over it", cuMemMap(at + GT_PAGE, 2 * GT_PAGE, 0, b, 0));
        fact_code("cuMemMap of the same handle beside it", cuMemMap(at + 4 * GT_PAGE, 2 * GT_PAGE, 0, a, 0));
        cuMemUnmap(at + 4 * GT_PAGE, 2 * GT_PAGE);
        GR_MUST(cuMemMap(at + 2 * GT_PAGE, 2 * GT_PAGE, 0, b, 0));
        fact_code("access before any was set", cuMemGetAccess(&flags, &access.location, at));
        fact("that is", "%llu", flags);
        fact_code("cuMemSetAccess over two mappings", cuMemSetAccess(at, 4 * GT_PAGE, &access, 1));
        fact_code("cuMemSetAccess where nothing is mapped", cuMemSetAccess(at + 4 * GT_PAGE, GT_PAGE, &access, 1));
        fact_code("cuMemSetAccess of a part of a mapping", cuMemSetAccess(at, GT_PAGE, &access, 1));
        fact_code("cuMemsetD8 over two mappings", cuMemsetD8(at + GT_PAGE, 1, 2 * GT_PAGE));
        GR_MUST(cuCtxSynchronize());
        fact_code("range of a mapping", cuMemGetAddressRange(&base, &bytes, at + 2 * GT_PAGE + 5));
        fact("range of the second mapping", "begins at page %zu, %zu pages", (size_t)(base - at) / GT_PAGE,
             bytes / GT_PAGE);
        fact_code("context of mapped memory", cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, at));
        fact("context of mapped memory is", "%s", ctx == gt.ctx ? "the current one" : ctx ? "another" : "none");
        GR_MUST(cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, at));
        fact_yes("mapped memory can be shared by legacy IPC", value);
        fact_code("cuIpcGetMemHandle of mapped memory", cuIpcGetMemHandle(&ipc, at));
        fact_code("SYNC_MEMOPS of mapped memory",
                  cuPointerSetAttribute(&(unsigned){1}, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, at));
        fact_code("cuMemFree of mapped memory", cuMemFree(at));
        fact_code("cuMemFreeAsync of mapped memory", cuMemFreeAsync(at, NULL));
        fact_code("cuMemRetainAllocationHandle", cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(at + 5)));
        fact_yes("it is the same handle", again == a);
        GR_MUST(cuMemRelease(again));
        p = block(4 * MIB);
        fact_code("cuMemRetainAllocationHandle of cuMemAlloc's memory",
                  cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)p));
        fact_code("cuMemUnmap of cuMemAlloc's memory", cuMemUnmap(p, GT_PAGE));
        GR_MUST(cuMemFree(p));
        fact_code("cuMemExportToShareableHandle",
                  cuMemExportToShareableHandle(&fd, a, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        fact_code(
                "cuMemImportFromShareableHandle in the same process",
                cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        fact_yes("it is the same handle, imported", again == a);
        GR_MUST(cuMemRelease(again));
        close(fd);
        fact_code("cuMemUnmap of a part of a mapping", cuMemUnmap(at, GT_PAGE));
        fact_code("cuMemAddressFree with memory mapped", cuMemAddressFree(at, 8 * GT_PAGE));
        GR_MUST(cuMemRelease(a));
        GR_MUST(cuMemRelease(b));
        fact("released but mapped, they take", "%zu pages", pages_used() - before);
        fact_code("cuMemUnmap of two mappings at once", cuMemUnmap(at, 4 * GT_PAGE));
        fact("unmapped, they take", "%zu pages", pages_used() - before);
        fact_code("cuMemUnmap once more", cuMemUnmap(at, 4 * GT_PAGE));
        fact_code("cuMemAddressFree of a part", cuMemAddressFree(at, GT_PAGE));
        fact_code("cuMemAddressFree", cuMemAddressFree(at, 8 * GT_PAGE));
        fact_code("cuMemAddressFree once more", cuMemAddressFree(at, 8 * GT_PAGE));
}

static void graph_memory_is(const char *name)
{
        cuuint64_t reserved = 0, used = 0;

        GR_MUST(cuDeviceGetGraphMemAttribute(gt.device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved));
        GR_MUST(cuDeviceGetGraphMemAttribute(gt.device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used));
        fact(name, "%llu MiB used of %llu", (unsigned long long)(used >> 20), (unsigned long long)(reserved >> 20));
}

/* A graph that allocates 64 MiB, and with a stream also frees them; captured, as programs do it. */
static CUgraph graph_of(CUstream stream, bool frees, CUdeviceptr *ret_inside)
{
        CUgraph graph;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuMemAllocAsync(ret_inside, 64 * MIB, stream));
        GR_MUST(cuMemsetD8Async(*ret_inside, 1, 64 * MIB, stream));
        if (frees)
                GR_MUST(cuMemFreeAsync(*ret_inside, stream));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        return graph;
}

void facts_graphs(void)
{
        CUstream stream = stream_of(CU_STREAM_NON_BLOCKING), other = stream_of(CU_STREAM_NON_BLOCKING);
        CUDA_GRAPH_INSTANTIATE_PARAMS upload = {.flags = CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD, .hUploadStream = stream};
        CUgraphExec exec = NULL, second = NULL;
        CUdeviceptr p, base = 0;
        size_t bytes = 0;
        CUgraph graph = graph_of(stream, true, &p);
        CUresult result;

        graph_memory_is("captured");
        fact_code("range of a graph's memory", cuMemGetAddressRange(&base, &bytes, p));
        fact_code("cuMemFree of a graph's memory before it runs", cuMemFree(p));
        GR_MUST(cuGraphInstantiate(&exec, graph, 0));
        graph_memory_is("instantiated");
        result = cuGraphInstantiate(&second, graph, 0);
        fact_code("instantiated once more", result);
        if (result == CUDA_SUCCESS)
                GR_MUST(cuGraphExecDestroy(second));
        fact_code("launch", cuGraphLaunch(exec, stream));
        GR_MUST(cuStreamSynchronize(stream));
        graph_memory_is("launched");
        fact_code("range of memory that the graph freed", cuMemGetAddressRange(&base, &bytes, p));
        fact_code("cuMemFree of memory that the graph freed", cuMemFree(p));
        fact_code("launch once more", cuGraphLaunch(exec, other));
        GR_MUST(cuStreamSynchronize(other));
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
        graph_memory_is("trimmed");
        fact_code("launch after that", cuGraphLaunch(exec, other));
        GR_MUST(cuStreamSynchronize(other));
        GR_MUST(cuGraphExecDestroy(exec));
        graph_memory_is("destroyed");
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
        graph_memory_is("destroyed and trimmed");
        GR_MUST(cuGraphInstantiateWithParams(&exec, graph, &upload));
        GR_MUST(cuStreamSynchronize(stream));
        graph_memory_is("instantiated with its upload");
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuGraphInstantiate(&exec, graph, 0));
        fact_code("cuGraphUpload", cuGraphUpload(exec, stream));
        GR_MUST(cuStreamSynchronize(stream));
        graph_memory_is("uploaded");
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuDeviceGraphMemTrim(gt.device));

        graph = graph_of(stream, false, &p);
        GR_MUST(cuGraphInstantiate(&exec, graph, 0));
        GR_MUST(cuGraphLaunch(exec, stream));
        GR_MUST(cuStreamSynchronize(stream));
        graph_memory_is("a graph that leaves its memory");
        fact_code("range of that memory", cuMemGetAddressRange(&base, &bytes, p + 1));
        fact("range of that memory is", "%s, %zu MiB", base == p ? "there" : "elsewhere", bytes >> 20);
        fact_code("launch again with the memory left", cuGraphLaunch(exec, stream));
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
        graph_memory_is("trimmed with the memory left");
        fact_code("cuMemFree of the memory left", cuMemFree(p));
        graph_memory_is("after that");
        fact_code("cuMemFree of it once more", cuMemFree(p));
        fact_code("launch", cuGraphLaunch(exec, stream));
        fact_code("cuMemFreeAsync of the memory left", cuMemFreeAsync(p, stream));
        GR_MUST(cuStreamSynchronize(stream));
        graph_memory_is("after cuMemFreeAsync");
        fact_code("cuMemFreeAsync of it once more", cuMemFreeAsync(p, stream));
        fact_code("launch", cuGraphLaunch(exec, stream));
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuGraphExecDestroy(exec));
        graph_memory_is("destroyed with the memory left");
        fact_code("cuMemsetD8 of the memory left", cuMemsetD8(p, 2, 64 * MIB));
        GR_MUST(cuCtxSynchronize()); /* the free does not wait for it */
        fact_code("cuMemFree of the memory left", cuMemFree(p));
        GR_MUST(cuDeviceGraphMemTrim(gt.device));
        graph_memory_is("trimmed in the end");
        GR_MUST(cuGraphDestroy(graph));

        graph = graph_of(stream, false, &p);
        GR_MUST(cuGraphInstantiate(&exec, graph, CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH));
        GR_MUST(cuGraphLaunch(exec, stream));
        GR_MUST(cuStreamSynchronize(stream));
        fact_code("with AUTO_FREE_ON_LAUNCH, launch again with the memory left", cuGraphLaunch(exec, stream));
        fact_code("with AUTO_FREE_ON_LAUNCH, synchronised", cuStreamSynchronize(stream));
        graph_memory_is("with AUTO_FREE_ON_LAUNCH");
        fact_code("with AUTO_FREE_ON_LAUNCH, cuMemFree", cuMemFree(p));
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuGraphDestroy(graph));
}
