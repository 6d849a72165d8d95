/*
 * Stream-ordered memory: the driver's own pools. What a pool has reserved is charged. The driver is asked for that
 * figure without any synchronisation. It falls without a call that a hook could see (at any synchronisation of the
 * program), so each look corrects the charge. It grows only inside allocations; so under a limit these run one at a
 * time.
 */
#include "hooks/stream_ordered.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include <utlist.h>

#include "base/hash.h"
#include "base/no_cancel.h"
#include "device/device.h"
#include "device/neighbour.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/captures.h"
#include "hooks/context.h"
#include "hooks/graph_memory.h"

struct pool {
        UT_hash_handle hh;
        CUmemoryPool handle; /* key */
        uint64_t number;     /* tells it from a later pool with the same handle */
        struct gr_device *device;
        enum gr_memory_kind kind;
        struct gr_pooled pooled;
        uint64_t lost_bytes; /* freed by cuMemFree, but counted as used by the driver for ever */
};

/* Memory of destroyed pools that the program still has. */
struct orphans {
        uint64_t reserved_bytes, used_bytes;
};

struct request {
        CUdeviceptr ptr;
        size_t bytes;
        CUmemoryPool pool;
        CUstream stream;
        bool limited; /* the device has a limit: then pool is set, and the call must stay within the limit */
        CUresult (*from_pool)(CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream stream);
        CUresult (*from_current)(CUdeviceptr *ptr, size_t bytes, CUstream stream);
        CUresult (*give_back)(CUdeviceptr ptr, CUstream stream);
};

/* Guards what follows. Held while pools are read and, under a limit, during allocations. Taken before frees_lock. */
static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_POOLS);
static struct pool *pools GR_GUARDED_BY(lock);
static struct orphans GR_GUARDED_BY(lock) orphans[GR_DEVICES_MAX];
/* This driver has been seen to go on counting pool memory as used after cuMemFree has freed it. */
static bool frees_lost GR_GUARDED_BY(lock);

/*
 * Guards the frees in stream order that have begun. Held while a pool is destroyed: a free that begins later finds the
 * pool gone, and one that began before is found by cuMemPoolDestroy.
 */
static struct gr_lock frees_lock = GR_LOCK_INIT(GR_RANK_POOL_FREES);
static struct gr_stream_ordered_free *frees GR_GUARDED_BY(frees_lock);

static _Atomic bool pools_made;         /* the program has made a pool, which it may destroy */
static _Atomic uint64_t defaults_known; /* bit d: the default pool of device d is on the list */
static _Atomic unsigned orphan_devices; /* how many devices have orphans */
static _Atomic bool pools_seen;         /* some pool is in the table, so a charge may need correction */

static uint64_t whole_pages(uint64_t bytes)
{
        return (bytes + GR_PAGE_BYTES - 1) & ~(uint64_t)(GR_PAGE_BYTES - 1);
}

/* An attribute of the pool in bytes. The driver is asked again if it does not tell; then `otherwise` is returned. */
static uint64_t pool_attribute(const struct pool *pool, CUmemPool_attribute attribute, uint64_t otherwise)
{
        cuuint64_t bytes;

        return gr_real.cuMemPoolGetAttribute(pool->handle, attribute, &bytes) == CUDA_SUCCESS ||
                               gr_real.cuMemPoolGetAttribute(pool->handle, attribute, &bytes) == CUDA_SUCCESS
                       ? bytes
                       : otherwise;
}

/* What the program has of the pool, as the driver counts. */
static uint64_t amount_used(const struct pool *pool, uint64_t otherwise)
{
        return pool_attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, otherwise);
}

/* Lock held. As gr_budget_correct, for one pool. */
GR_HELD(lock) static bool correct_pool(struct pool *pool, uint64_t precharged_bytes)
{
        uint64_t now_bytes, used_bytes;

        gr_assert_locked(&lock);
        now_bytes = pool_attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                                   pool->pooled.reserved_bytes + precharged_bytes);
        used_bytes = amount_used(pool, now_bytes);
        pool->lost_bytes = frees_lost && now_bytes == 0 ? used_bytes : gr_min(pool->lost_bytes, used_bytes);
        assert(pool->lost_bytes <= used_bytes);
        used_bytes = gr_min(used_bytes - pool->lost_bytes, now_bytes);
        return gr_budget_correct(pool->device, pool->kind, &pool->pooled, precharged_bytes, now_bytes,
                                 now_bytes - used_bytes);
}

/* Lock held. NULL: not in the table. */
GR_HELD(lock) static struct pool *find_pool(CUmemoryPool handle)
{
        struct pool *pool;

        gr_assert_locked(&lock);
        HASH_FIND_PTR(pools, &handle, pool);
        return pool;
}

/* Lock held. Enters the pool into the table. NULL: out of memory, or the driver cannot tell what a pool reserves. */
GR_HELD(lock) static struct pool *remember_pool(CUmemoryPool handle, struct gr_device *device, enum gr_memory_kind kind)
{
        static uint64_t last_number;
        struct pool *pool = find_pool(handle);

        gr_assert_locked(&lock);
        assert(device && (device == gr_core.host) == (kind == GR_MEMORY_HOST));
        if (pool || !gr_real.cuMemPoolGetAttribute)
                return pool;
        pool = calloc(1, sizeof(*pool));
        if (!pool)
                return NULL;
        pool->handle = handle;
        pool->number = ++last_number;
        pool->device = device;
        pool->kind = kind;
        atomic_store_explicit(&pools_seen, true, memory_order_relaxed);
        HASH_ADD_PTR(pools, handle, pool);
        if (!pool->hh.tbl) {
                free(pool);
                return NULL;
        }
        return pool;
}

/* At its first use a default pool gets the library's release threshold, unless the program has set another one. */
static void remember_default(struct gr_device *device)
{
        uint64_t bit = UINT64_C(1) << device->ordinal;
        uint64_t threshold = atomic_load(&device->threshold_bytes);
        cuuint64_t before;
        CUstreamCaptureMode mode;
        CUmemoryPool handle;
        GR_NO_CANCEL;

        if (atomic_load_explicit(&defaults_known, memory_order_acquire) & bit || !gr_real.cuDeviceGetDefaultMemPool ||
            !gr_real.cuMemPoolGetAttribute)
                return;
        mode = gr_operations_relax_captures(); /* else the look at its threshold breaks a capture */
        gr_lock(&lock);
        if (!(atomic_load(&defaults_known) & bit) &&
            gr_real.cuDeviceGetDefaultMemPool(&handle, device->ordinal) == CUDA_SUCCESS &&
            remember_pool(handle, device, GR_MEMORY_STREAM_ORDERED)) {
                if (threshold != GR_UNLIMITED && gr_real.cuMemPoolSetAttribute &&
                    gr_real.cuMemPoolGetAttribute(handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &before) == CUDA_SUCCESS &&
                    before == 0)
                        gr_real.cuMemPoolSetAttribute(handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold);
                atomic_fetch_or(&defaults_known, bit);
        }
        gr_unlock(&lock);
        gr_operations_restore_captures(mode);
}

/* Whether the process sees one device only: then every stream is on that device. */
static bool one_device(void)
{
        static _Atomic int devices; /* 0: not asked */
        int count = atomic_load_explicit(&devices, memory_order_relaxed);

        if (count == 0 && gr_real.cuDeviceGetCount && gr_real.cuDeviceGetCount(&count) == CUDA_SUCCESS)
                atomic_store_explicit(&devices, count, memory_order_relaxed);
        return count == 1;
}

/* The device on which a stream's allocations are made. NULL: not known; the driver's own call will report the error. */
static struct gr_device *device_of_stream(CUstream stream)
{
        struct gr_context *context = gr_context_current();
        CUcontext handle;

        if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD || !gr_real.cuStreamGetCtx ||
            (context && one_device()))
                return context ? context->device : NULL;
        if (gr_real.cuStreamGetCtx(stream, &handle) != CUDA_SUCCESS)
                return NULL;
        /* A known context is not made current: a green context can be current on one thread only. */
        context = gr_context_known(handle);
        if (context)
                return context->device;
        context = gr_context_visit(handle);
        return context ? context->device : NULL;
}

/* The device that memory of a pool is charged to, and its memory kind. NULL: it is not counted. */
static struct gr_device *place_of(const CUmemLocation *location, CUmemAllocationType type,
                                  enum gr_memory_kind *ret_kind)
{
        struct gr_context *context;

        switch ((int)location->type) {
        case CU_MEM_LOCATION_TYPE_DEVICE:
                *ret_kind = type == CU_MEM_ALLOCATION_TYPE_PINNED ? GR_MEMORY_STREAM_ORDERED : GR_MEMORY_MANAGED;
                return gr_device_use(location->id);
        case CU_MEM_LOCATION_TYPE_HOST:
        case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
                *ret_kind = GR_MEMORY_HOST;
                if (type == CU_MEM_ALLOCATION_TYPE_PINNED)
                        return gr_core.host;
                break;
        default:
                break;
        }
        /* All pages of managed memory may move to the device at any time (managed.c). */
        *ret_kind = GR_MEMORY_MANAGED;
        context = gr_context_current();
        return context ? context->device : gr_device_use(0);
}

/* Whether an allocation on stream is captured into a graph. */
static bool into_graph(CUstream stream, enum gr_null_stream null_stream)
{
        if (!gr_capture_on(stream, null_stream))
                return false;
        gr_graph_memory_seen();
        return true;
}

static CUresult call_driver(struct request *request)
{
        assert(!request->from_pool != !request->from_current && request->bytes > 0);
        return request->from_pool ? request->from_pool(&request->ptr, request->bytes, request->pool, request->stream)
                                  : request->from_current(&request->ptr, request->bytes, request->stream);
}

/* Lock held. Charges bytes, for the worst case that the pool has to grow. False: the limit; nothing is charged. */
GR_HELD(lock) static bool charge_pool(struct pool *pool, uint64_t bytes)
{
        gr_assert_locked(&lock);
        assert(bytes % GR_PAGE_BYTES == 0);
        if (gr_budget_charge(pool->device, pool->kind, bytes) == 0)
                return true;
        if (pool->pooled.idle_bytes == 0 || !gr_real.cuMemPoolTrimTo)
                return false;
        /* Returning idle memory of the pool makes room under the limit. */
        gr_real.cuMemPoolTrimTo(pool->handle,
                                pool->pooled.reserved_bytes > bytes ? pool->pooled.reserved_bytes - bytes : 0);
        correct_pool(pool, 0);
        return gr_budget_charge(pool->device, pool->kind, bytes) == 0;
}

/* Lock held. Makes the call within the limit. -EDQUOT: it would exceed the limit, and nothing is allocated. */
GR_HELD(lock) static int call_limited(struct request *request, struct pool *pool)
{
        uint64_t reserved = whole_pages(request->bytes);
        CUresult result;
        bool within;

        gr_assert_locked(&lock);
        correct_pool(pool, 0);
        if (!charge_pool(pool, reserved)) {
                /*
                 * Idle memory that was freed behind running work may serve a request of the same stream, without a
                 * wait. Where it does not, the pool grows beyond the limit; no such attempt is made again while the
                 * device is above its limit.
                 */
                if (pool->pooled.idle_bytes < request->bytes || gr_budget_over(pool->device) > 0)
                        return -EDQUOT;
                reserved = 0;
        }
        result = call_driver(request);
        within = correct_pool(pool, reserved);
        if (result != CUDA_SUCCESS || within)
                return gr_errno_of(result);
        /* The pool has grown beyond the limit. */
        request->give_back(request->ptr, request->stream);
        correct_pool(pool, 0);
        return -EDQUOT;
}

/* Lock held. As call_limited, announced to the budget before and after. */
GR_HELD(lock) static int attempt_limited(struct request *request, struct pool *pool)
{
        uint64_t bytes = whole_pages(request->bytes);
        int rc;

        gr_assert_locked(&lock);
        gr_budget_ask(pool->device, bytes);
        rc = call_limited(request, pool);
        gr_budget_answered(pool->device, bytes);
        return rc;
}

static int attempt_from_pool(void *arg)
{
        struct request *request = arg;
        struct pool *pool;
        int rc;
        GR_NO_CANCEL;

        gr_lock_rank_assert_free_from(GR_RANK_POOLS);
        if (!request->limited)
                return gr_errno_of(call_driver(request));
        gr_lock(&lock);
        pool = find_pool(request->pool);
        rc = pool ? attempt_limited(request, pool) : gr_errno_of(call_driver(request));
        gr_unlock(&lock);
        return rc;
}

/*
 * Makes the call, and climbs the ladder if it fails for lack of memory. The caller has checked bytes and dptr. device:
 * the one whose ladder is climbed, or the host; NULL: no ladder.
 */
static CUresult allocate_with_ladder(struct request *request, struct gr_device *device, CUdeviceptr *dptr)
{
        bool host = device == gr_core.host;
        struct gr_context *context = NULL;
        GR_KEEP_ERRNO;
        int rc;

        gr_neighbour_retry();
        rc = attempt_from_pool(request);
        if (gr_is_out_of_memory(rc) && device && !host)
                context = gr_charge_climber(&gr_core, device, gr_context_current());
        if (rc == -EDQUOT && !context)
                gr_count(&gr_core, GR_COUNTER_limit_hits, 1);
        if (context)
                rc = gr_ladder_climb_for(context, request->bytes, attempt_from_pool, request, rc);
        else if (gr_is_out_of_memory(rc) && host)
                rc = gr_pinned_retry(&gr_core, request->bytes, attempt_from_pool, request, rc);
        if (rc == 0)
                *dptr = request->ptr;
        return gr_result(rc);
}

static CUresult alloc_async(CUdeviceptr *dptr, size_t bytes, CUstream stream, enum gr_null_stream null_stream,
                            __typeof__(cuMemAllocAsync) *real, __typeof__(cuMemFreeAsync) *give_back)
{
        struct request request = {.bytes = bytes, .stream = stream, .from_current = real, .give_back = give_back};
        struct gr_device *device;

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        if (!gr_shim_ready() || !dptr || bytes == 0 || bytes > GR_BLOCK_MAX_BYTES || !give_back ||
            !gr_real.cuDeviceGetMemPool || into_graph(stream, null_stream))
                return real(dptr, bytes, stream);
        device = device_of_stream(stream);
        if (!device)
                return real(dptr, bytes, stream);
        remember_default(device);
        request.limited =
                gr_budget_limited(device) && gr_real.cuDeviceGetMemPool(&request.pool, device->ordinal) == CUDA_SUCCESS;
        return allocate_with_ladder(&request, device, dptr);
}

/*
 * Returns cached memory before an allocation from a pool of managed memory: the driver ends the program if a default
 * pool of managed memory is asked on a full device (docs/measurements.md, managed-pool-full).
 */
static void make_room(struct gr_device *device, size_t bytes)
{
        struct gr_context *context = gr_charge_climber(&gr_core, device, gr_context_current());
        GR_KEEP_ERRNO;

        if (context)
                gr_ladder_make_room(context, bytes);
}

static CUresult alloc_from_pool(CUdeviceptr *dptr, size_t bytes, CUmemoryPool pool, CUstream stream,
                                enum gr_null_stream null_stream, __typeof__(cuMemAllocFromPoolAsync) *real,
                                __typeof__(cuMemFreeAsync) *give_back)
{
        struct request request = {
                .bytes = bytes, .pool = pool, .stream = stream, .from_pool = real, .give_back = give_back};
        struct gr_device *device;
        struct pool *found;
        bool managed;
        GR_NO_CANCEL;

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        if (!gr_shim_ready() || !dptr || bytes == 0 || bytes > GR_BLOCK_MAX_BYTES || !give_back ||
            into_graph(stream, null_stream))
                return real(dptr, bytes, pool, stream);
        device = device_of_stream(stream);
        if (device)
                remember_default(device); /* the program may pass the handle of the default pool */
        gr_lock(&lock);
        found = find_pool(pool);
        request.limited = found && gr_budget_limited(found->device);
        device = found ? found->device : NULL;
        managed = found && found->kind == GR_MEMORY_MANAGED;
        gr_unlock(&lock);
        if (managed)
                make_room(device, bytes);
        return found ? allocate_with_ladder(&request, device, dptr) : real(dptr, bytes, pool, stream);
}

/* As gr_real_given. The driver accepts a request for 0 bytes, and gives none (docs/measurements.md, zero-bytes). */
static CUresult given_bytes(CUresult result, const CUdeviceptr *dptr, size_t bytes)
{
        return bytes > 0 ? gr_real_given(result, dptr) : result;
}

GR_EXPORT CUresult CUDAAPI cuMemAllocAsync(CUdeviceptr *dptr, size_t bytes, CUstream stream)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return given_bytes(
                alloc_async(dptr, bytes, stream, GR_NULL_LEGACY, gr_real.cuMemAllocAsync, gr_real.cuMemFreeAsync), dptr,
                bytes);
}

GR_EXPORT CUresult CUDAAPI cuMemAllocAsync_ptsz(CUdeviceptr *dptr, size_t bytes, CUstream stream)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return given_bytes(alloc_async(dptr, bytes, stream, GR_NULL_PER_THREAD, gr_real.cuMemAllocAsync_ptsz,
                                       gr_real.cuMemFreeAsync_ptsz),
                           dptr, bytes);
}

GR_EXPORT CUresult CUDAAPI cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytes, CUmemoryPool pool, CUstream stream)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return given_bytes(alloc_from_pool(dptr, bytes, pool, stream, GR_NULL_LEGACY, gr_real.cuMemAllocFromPoolAsync,
                                           gr_real.cuMemFreeAsync),
                           dptr, bytes);
}

GR_EXPORT CUresult CUDAAPI cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *dptr, size_t bytes, CUmemoryPool pool,
                                                        CUstream stream)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return given_bytes(alloc_from_pool(dptr, bytes, pool, stream, GR_NULL_PER_THREAD,
                                           gr_real.cuMemAllocFromPoolAsync_ptsz, gr_real.cuMemFreeAsync_ptsz),
                           dptr, bytes);
}

/* Enters a pool that the program has made or asked for into the table. */
static void remember_seen(CUmemoryPool pool, const CUmemLocation *location, CUmemAllocationType type)
{
        GR_NO_CANCEL;
        GR_KEEP_ERRNO;
        enum gr_memory_kind kind;
        struct gr_device *device = place_of(location, type, &kind);

        if (device) {
                if (kind == GR_MEMORY_STREAM_ORDERED)
                        remember_default(device); /* pool may be the default pool, which must get its threshold */
                gr_lock(&lock);
                remember_pool(pool, device, kind);
                gr_unlock(&lock);
        }
}

GR_EXPORT CUresult CUDAAPI cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
        GR_PASS_DEEP;
        CUresult result;
        GR_NO_CANCEL; /* a pool that is not in the table would not be counted */

        atomic_store_explicit(&pools_made, true, memory_order_relaxed); /* before the program can free memory of it */
        result = GR_REAL(cuMemPoolCreate, pool, props);
        if (result == CUDA_SUCCESS && gr_shim_ready())
                remember_seen(*pool, &props->location, props->allocType);
        return result;
}

/* A program must ask for these default pools before it can use them, so this call sees them first. */
static CUresult asked_for(CUresult result, const CUmemoryPool *pool, const CUmemLocation *location,
                          CUmemAllocationType type)
{
        if (result == CUDA_SUCCESS && gr_shim_ready())
                remember_seen(*pool, location, type);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
        GR_PASS_DEEP;
        return asked_for(GR_REAL(cuMemGetDefaultMemPool, pool, location, type), pool, location, type);
}

GR_EXPORT CUresult CUDAAPI cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
        GR_PASS_DEEP;
        return asked_for(GR_REAL(cuMemGetMemPool, pool, location, type), pool, location, type);
}

/*
 * Asks the driver for an attribute of the address; a second time if it does not tell, as a wrong charge would not be
 * corrected later.
 */
static bool ask_driver(void *ret, CUpointer_attribute attribute, CUdeviceptr ptr)
{
        return gr_real.cuPointerGetAttribute(ret, attribute, ptr) == CUDA_SUCCESS ||
               gr_real.cuPointerGetAttribute(ret, attribute, ptr) == CUDA_SUCCESS;
}

/* The pool (perhaps destroyed already), device and size of the memory at ptr. False: it is not of a pool. */
static bool is_pooled(CUdeviceptr ptr, CUmemoryPool *ret_pool, int *ret_device, uint64_t *ret_bytes)
{
        CUmemoryPool handle = NULL;
        size_t bytes = 0;

        if (!ask_driver(&handle, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, ptr) || !handle ||
            !ask_driver(&bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, ptr) ||
            !ask_driver(ret_device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr) || *ret_device < 0 ||
            *ret_device >= GR_DEVICES_MAX)
                return false;
        *ret_pool = handle;
        *ret_bytes = bytes;
        return true;
}

/* frees_lock held. Notes the device and size of each free that has begun, if its memory is of the pool and in use. */
GR_HELD(frees_lock) static void find_frees(CUmemoryPool handle)
{
        gr_assert_locked(&frees_lock);
        for (struct gr_stream_ordered_free *free = frees; free; free = free->next) {
                CUmemoryPool its = NULL;

                if (!is_pooled(free->ptr, &its, &free->found_device, &free->found_bytes) || its != handle)
                        free->found_bytes = 0;
        }
}

/* frees_lock held. What is being freed counts as orphaned memory of the device. */
GR_HELD(frees_lock) static void orphan_free(struct gr_stream_ordered_free *free, int device, uint64_t bytes)
{
        gr_assert_locked(&frees_lock);
        free->device = device;
        free->orphan_bytes = bytes;
}

/* frees_lock held. The pool was destroyed: what find_frees has noted is orphaned until it is freed. */
GR_HELD(frees_lock) static void orphan_frees(void)
{
        gr_assert_locked(&frees_lock);
        for (struct gr_stream_ordered_free *free = frees; free; free = free->next)
                if (free->found_bytes > 0)
                        orphan_free(free, free->found_device, free->found_bytes);
}

GR_EXPORT CUresult CUDAAPI cuMemPoolDestroy(CUmemoryPool handle)
{
        GR_PASS_DEEP;
        CUstreamCaptureMode mode;
        uint64_t used_bytes;
        struct pool *pool;
        CUresult result;
        GR_NO_CANCEL;

        if (!gr_shim_ready())
                return GR_REAL(cuMemPoolDestroy, handle);
        /* Locked during the call: as soon as it returns, a new pool may get the same handle. */
        gr_lock(&lock);
        pool = find_pool(handle);
        gr_lock(&frees_lock);
        if (pool) {
                /* After the trim, what is reserved is what the program has, whatever the driver counts as used. */
                mode = gr_operations_relax_captures();
                if (gr_real.cuMemPoolTrimTo)
                        gr_real.cuMemPoolTrimTo(handle, 0);
                /*
                 * Repeated if the driver has carried out a free in between: that memory must either count as used
                 * and be found, or neither.
                 */
                do {
                        used_bytes = amount_used(pool, 0);
                        correct_pool(pool, 0);
                        find_frees(handle);
                } while (amount_used(pool, 0) != used_bytes);
                gr_operations_restore_captures(mode);
        }
        result = GR_REAL(cuMemPoolDestroy, handle);
        if (pool && result == CUDA_SUCCESS) {
                uint64_t left;

                assert(pool->pooled.idle_bytes <= pool->pooled.reserved_bytes);
                used_bytes = pool->pooled.reserved_bytes - pool->pooled.idle_bytes;
                left = whole_pages(used_bytes);
                if (pool->kind == GR_MEMORY_HOST)
                        left = 0;
                else if (left > pool->pooled.reserved_bytes)
                        left = pool->pooled.reserved_bytes;
                gr_budget_correct(pool->device, pool->kind, &pool->pooled, 0, left, 0);
                if (left > 0) {
                        struct orphans *orphan = &orphans[pool->device->ordinal];

                        assert(pool->device != gr_core.host);         /* which has no entry there, and nothing left */
                        if (pool->kind != GR_MEMORY_STREAM_ORDERED) { /* orphans are all charged as stream-ordered */
                                gr_budget_uncharge(pool->device, pool->kind, left);
                                gr_budget_force(pool->device, GR_MEMORY_STREAM_ORDERED, left);
                        }
                        if (orphan->used_bytes == 0)
                                atomic_fetch_add(&orphan_devices, 1);
                        orphan->reserved_bytes += left;
                        orphan->used_bytes += used_bytes;
                        orphan_frees();
                }
                HASH_DEL(pools, pool);
                free(pool);
        }
        gr_unlock(&frees_lock);
        gr_unlock(&lock);
        return result;
}

/* Size and device of memory at ptr, where its pool is destroyed already; else 0. */
static uint64_t orphan_of(CUdeviceptr ptr, int *ret_device)
{
        CUmemoryPool handle;
        uint64_t bytes;
        GR_NO_CANCEL;

        if (atomic_load_explicit(&orphan_devices, memory_order_relaxed) == 0 ||
            !is_pooled(ptr, &handle, ret_device, &bytes))
                return 0;
        gr_lock(&lock);
        if (find_pool(handle))
                bytes = 0;
        gr_unlock(&lock);
        return bytes;
}

/*
 * Uncharges orphaned memory that was freed, with its share of what its pool had reserved beyond it: each pool has pages
 * of its own, and which one the memory was of is not noted.
 */
static void orphan_freed(int device, uint64_t bytes)
{
        struct orphans *orphan;
        uint64_t used, keep;
        GR_NO_CANCEL;

        if (bytes == 0)
                return;
        assert(device >= 0 && device < GR_DEVICES_MAX);
        bytes = (bytes + 511) & ~UINT64_C(511);
        gr_lock(&lock);
        orphan = &orphans[device];
        if (orphan->used_bytes > 0) {
                used = orphan->used_bytes - gr_min(bytes, orphan->used_bytes);
                keep = whole_pages((uint64_t)((unsigned __int128)orphan->reserved_bytes * used / orphan->used_bytes));
                keep = gr_min(keep, orphan->reserved_bytes);
                gr_budget_uncharge(&gr_core.devices[device], GR_MEMORY_STREAM_ORDERED, orphan->reserved_bytes - keep);
                *orphan = (struct orphans){.reserved_bytes = keep, .used_bytes = used};
                assert(atomic_load(&orphan_devices) > 0); /* this one was among them */
                if (used == 0)
                        atomic_fetch_sub(&orphan_devices, 1);
        }
        gr_unlock(&lock);
}

void gr_stream_ordered_free_begin(struct gr_stream_ordered_free *free, CUdeviceptr ptr)
{
        uint64_t bytes;
        int device;

        *free = (struct gr_stream_ordered_free){.ptr = ptr};
        free->noted = atomic_load_explicit(&pools_made, memory_order_relaxed);
        if (!free->noted)
                return;
        gr_lock(&frees_lock);
        DL_APPEND(frees, free);
        gr_unlock(&frees_lock);
        bytes = orphan_of(ptr, &device);
        if (bytes == 0)
                return;
        gr_lock(&frees_lock);
        orphan_free(free, device, bytes);
        gr_unlock(&frees_lock);
}

void gr_stream_ordered_free_end(struct gr_stream_ordered_free *free, CUresult result)
{
        if (!free->noted)
                return;
        gr_lock(&frees_lock);
        assert(frees); /* this free is among them */
        DL_DELETE(frees, free);
        gr_unlock(&frees_lock);
        if (result == CUDA_SUCCESS)
                orphan_freed(free->device, free->orphan_bytes);
}

CUresult gr_stream_ordered_free(CUdeviceptr ptr)
{
        uint64_t bytes = 0, before = 0, number = 0;
        CUmemoryPool handle = NULL;
        struct pool *pool;
        CUresult result;
        int device = 0;
        GR_NO_CANCEL;

        if (!atomic_load_explicit(&pools_seen, memory_order_relaxed) || !is_pooled(ptr, &handle, &device, &bytes))
                return GR_REAL(cuMemFree_v2, ptr);
        gr_lock(&lock);
        pool = find_pool(handle);
        if (pool) {
                before = amount_used(pool, 0);
                number = pool->number;
        }
        gr_unlock(&lock);
        result = GR_REAL(cuMemFree_v2, ptr);
        if (result != CUDA_SUCCESS)
                return result;
        gr_lock(&lock);
        pool = find_pool(handle);
        if (pool && pool->number != number) /* the pool has been destroyed, and another one has its handle */
                pool = NULL;
        /* Allocations and frees of other threads may hide this, so one observation is enough for all later frees. */
        frees_lost |= pool && before >= bytes && amount_used(pool, 0) == before;
        if (pool && frees_lost)
                pool->lost_bytes += bytes;
        gr_unlock(&lock);
        if (!pool)
                orphan_freed(device, bytes);
        return result;
}

/* The library's threshold must be set first, so that the program's threshold replaces it. */
GR_EXPORT CUresult CUDAAPI cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
        GR_PASS_DEEP;
        struct gr_context *context;

        if (gr_shim_ready() && attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
                GR_KEEP_ERRNO;

                context = gr_context_current();
                if (context)
                        remember_default(context->device);
        }
        return GR_REAL(cuMemPoolSetAttribute, pool, attribute, value);
}

GR_EXPORT CUresult CUDAAPI cuMemPoolTrimTo(CUmemoryPool handle, size_t keep_bytes)
{
        GR_PASS_DEEP;
        struct pool *pool;
        CUresult result;
        GR_NO_CANCEL;

        result = GR_REAL(cuMemPoolTrimTo, handle, keep_bytes);
        if (result == CUDA_SUCCESS && gr_shim_ready()) {
                gr_lock(&lock);
                pool = find_pool(handle);
                if (pool)
                        correct_pool(pool, 0);
                gr_unlock(&lock);
        }
        return result;
}

/* Lock held. Corrects the charge of all pools of the device; trim: returns their idle memory before. */
GR_HELD(lock) static void correct_pools(struct gr_device *device, bool trim)
{
        gr_assert_locked(&lock);
        for (struct pool *pool = pools; pool; pool = pool->hh.next) {
                if (pool->device != device)
                        continue;
                if (trim && gr_real.cuMemPoolTrimTo)
                        gr_real.cuMemPoolTrimTo(pool->handle, 0);
                correct_pool(pool, 0);
        }
}

static void correct_device_pools(struct gr_device *device, bool trim)
{
        GR_NO_CANCEL;
        CUstreamCaptureMode mode = gr_operations_relax_captures();

        gr_lock(&lock);
        correct_pools(device, trim);
        gr_unlock(&lock);
        gr_graph_memory_refresh(device, trim);
        gr_operations_restore_captures(mode);
}

void gr_stream_ordered_refresh(struct gr_device *device)
{
        if (atomic_load_explicit(&pools_seen, memory_order_relaxed) || gr_graph_memory_in_use())
                correct_device_pools(device, false);
}

void gr_stream_ordered_trim(struct gr_device *device)
{
        remember_default(device);
        correct_device_pools(device, true);
}

void gr_stream_ordered_trim_host(void)
{
        CUstreamCaptureMode mode;
        GR_NO_CANCEL;

        if (!atomic_load_explicit(&pools_seen, memory_order_relaxed))
                return;
        mode = gr_operations_relax_captures();
        gr_lock(&lock);
        correct_pools(gr_core.host, true);
        gr_unlock(&lock);
        gr_operations_restore_captures(mode);
}
