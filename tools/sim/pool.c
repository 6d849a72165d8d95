/* Stream-ordered memory: pools that keep freed memory and hand it out again in stream order, after its free. */
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MAGIC_POOL 0x706f6f6cu
#define FULL_BYTES ((size_t)6 << 20) /* a GPU with less free memory than this counts as full */

/* Guarded by sim_lock(). */
static struct CUmemPoolHandle_st default_pools[SIM_MAX_DEVICES];
static CUmemoryPool current_pools[SIM_MAX_DEVICES];
/* The default pools of managed memory, one for each device; then that of pinned and that of managed host memory. */
static struct CUmemPoolHandle_st host_pools[SIM_MAX_DEVICES + 2];
static CUmemoryPool pools;

static size_t footprint_of(size_t bytes)
{
        size_t step = bytes <= SIM_SMALL_BYTES ? SIM_UNIT_BYTES : SIM_PAGE_BYTES;

        return (bytes + step - 1) / step * step;
}

static void make_pool(CUmemoryPool pool, int device)
{
        pool->magic = MAGIC_POOL;
        pool->device = device;
        pool->reuse[0] = pool->reuse[1] = pool->reuse[2] = 1;
        pool->next = pools;
        pools = pool;
}

void sim_pool_setup(const struct sim_config *config)
{
        for (int d = 0; d < config->devices; d++) {
                make_pool(&default_pools[d], d);
                current_pools[d] = &default_pools[d];
        }
        for (int i = 0; i < SIM_MAX_DEVICES + 2; i++) {
                make_pool(&host_pools[i], i < config->devices ? i : 0);
                host_pools[i].host = true;
        }
}

bool sim_is_pool(CUmemoryPool pool)
{
        return pool && pool->magic == MAGIC_POOL && !pool->destroyed;
}

static size_t reserved_bytes(CUmemoryPool pool)
{
        size_t bytes;

        sim_memory_lock();
        bytes = pool->reserved;
        sim_memory_unlock();
        return bytes;
}

static size_t whole_pages(size_t bytes)
{
        return (bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
}

/* New memory for the pool; NULL where there is none. */
static struct sim_alloc *grow_pool(CUmemoryPool pool, size_t bytes)
{
        struct sim_alloc *alloc;
        void *at;

        if (!pool->host)
                return sim_heap_alloc(pool->device, bytes, pool);
        if (bytes > SIZE_MAX / 2)
                return NULL;
        at = sim_map(whole_pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED)
                return NULL;
        alloc = sim_range_add(SIM_ALLOC_POOL, (uintptr_t)at, bytes, NULL, pool->device, 0);
        if (!alloc) {
                munmap(at, whole_pages(bytes));
                return NULL;
        }
        sim_memory_lock();
        alloc->footprint = footprint_of(bytes);
        alloc->pool = pool;
        pool->reserved += whole_pages(bytes);
        if (pool->reserved > pool->reserved_high)
                pool->reserved_high = pool->reserved;
        sim_memory_unlock();
        return alloc;
}

static void give_back(struct sim_alloc *alloc)
{
        CUmemoryPool pool = alloc->pool;
        void *at = (void *)alloc->base;
        size_t bytes = whole_pages(alloc->footprint);

        if (!pool->host) {
                sim_heap_free(alloc);
                return;
        }
        sim_memory_lock();
        pool->reserved -= bytes;
        sim_memory_unlock();
        sim_range_remove(alloc);
        sim_unmap(at, bytes);
}

/*
 * Gives cached memory whose free was waited for back to the device, oldest first, while the pool holds more than keep.
 */
static void trim_pool(CUmemoryPool pool, size_t keep)
{
        while (reserved_bytes(pool) > keep) {
                struct sim_alloc **oldest = NULL, *alloc;

                for (struct sim_alloc **at = &pool->cache; *at; at = &(*at)->next_cached) {
                        if ((*at)->waited)
                                oldest = at;
                }
                if (!oldest)
                        return;
                alloc = *oldest;
                *oldest = alloc->next_cached;
                sim_node_put(alloc->freed);
                give_back(alloc);
        }
}

void sim_pool_synchronized(CUcontext ctx, unsigned long long stream)
{
        for (CUmemoryPool pool = pools; pool; pool = pool->next) {
                for (struct sim_alloc *alloc = pool->cache; alloc; alloc = alloc->next_cached)
                        alloc->waited |= alloc->freed && alloc->freed->done &&
                                         (stream ? alloc->freed_in == stream : ctx && alloc->freed_ctx == ctx->id);
                trim_pool(pool, pool->destroyed ? 0 : pool->threshold);
        }
}

/* freed: the node of its free in the stream; NULL: the free waited for all work. */
static void into_cache(struct sim_alloc *alloc, struct sim_node *freed, CUstream stream)
{
        alloc->freeing = true;
        alloc->waited = !freed;
        alloc->freed_in = freed ? stream->id : 0;
        alloc->freed_ctx = freed ? stream->ctx->id : 0;
        sim_node_replace(&alloc->freed, sim_node_get(freed));
        alloc->next_cached = alloc->pool->cache;
        alloc->pool->cache = alloc;
}

void sim_pool_reached_free(struct sim_alloc *alloc)
{
        if (alloc->reuses)
                alloc->reuses--;
        else
                sim_heap_set_idle(alloc, true);
}

/* The memory stays counted as used by the pool (measured, driver 580). */
void sim_pool_free(struct sim_alloc *alloc)
{
        sim_heap_set_idle(alloc, true);
        into_cache(alloc, NULL, NULL);
}

/* Takes cached memory of the same footprint. If its free has not run yet, the stream waits for it. */
static struct sim_alloc *from_cache(CUmemoryPool pool, size_t bytes, CUstream stream)
{
        size_t footprint = footprint_of(bytes);

        for (struct sim_alloc **at = &pool->cache; *at; at = &(*at)->next_cached) {
                struct sim_alloc *alloc = *at;

                if (alloc->footprint != footprint)
                        continue;
                /* Work before the free may still access the old size, so another size has to wait for the free. */
                if (alloc->bytes != bytes && alloc->freed && !alloc->freed->done)
                        continue;
                *at = alloc->next_cached;
                if (alloc->freed && !alloc->freed->done) {
                        struct sim_node *node = sim_stream_node(stream, NULL);

                        sim_node_after(node, alloc->freed);
                        sim_node_start(node);
                        sim_node_replace(&stream->last, node);
                }
                sim_node_replace(&alloc->freed, NULL);
                sim_memory_lock();
                alloc->bytes = bytes;
                /* idle says whether the free has run. Its node is no guide, as it is marked done a moment later. */
                if (alloc->idle)
                        alloc->idle = false;
                else
                        alloc->reuses++;
                sim_memory_unlock();
                return alloc;
        }
        return NULL;
}

static CUresult pool_alloc(CUdeviceptr *dptr, size_t bytes, CUmemoryPool pool, CUstream stream)
{
        struct sim_alloc *alloc;
        CUresult rc;

        if (stream->capture) {
                struct sim_op op = {.kind = SIM_OP_GRAPH_ALLOC, .u.memory = {.bytes = bytes, .device = pool->device}};
                rc = sim_capture_memory(stream, &op);
                if (rc == CUDA_SUCCESS)
                        *dptr = op.u.memory.base;
                return rc;
        }
        if (stream == stream->ctx->legacy) {
                rc = sim_capture_legacy(stream->ctx);
                if (rc != CUDA_SUCCESS)
                        return rc;
        }
        rc = sim_capture_unsafe();
        if (rc != CUDA_SUCCESS)
                return rc;
        if (bytes == 0) {
                *dptr = 0;
                return CUDA_SUCCESS;
        }
        /* As driver 580 does: an allocation from the default pool of managed memory ends the program on a full GPU. */
        if (pool >= host_pools && pool < host_pools + SIM_MAX_DEVICES &&
            sim_heap_free_bytes(pool->device) < FULL_BYTES) {
                fprintf(stderr, "cuMemAllocFromPoolAsync: managed memory, and the device is full\n");
                abort();
        }
        if (pool->most && (bytes > pool->most || pool->used > pool->most - bytes))
                return CUDA_ERROR_OUT_OF_MEMORY;
        alloc = from_cache(pool, bytes, stream);
        if (!alloc)
                alloc = grow_pool(pool, bytes);
        if (!alloc && !pool->host) {
                for (CUmemoryPool p = pools; p; p = p->next) {
                        if (p->device == pool->device)
                                trim_pool(p, 0);
                }
                alloc = grow_pool(pool, bytes);
        }
        if (!alloc)
                return CUDA_ERROR_OUT_OF_MEMORY;
        alloc->ctx = stream->ctx;
        alloc->freeing = false;
        pool->used += bytes;
        if (pool->used > pool->used_high)
                pool->used_high = pool->used;
        *dptr = alloc->base;
        return CUDA_SUCCESS;
}

SIM_PTSZ(cuMemAllocAsync, (CUdeviceptr * dptr, size_t bytes, CUstream stream), (dptr, bytes, stream))
{
        CUstream s;
        CUresult rc;

        if (!dptr)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_stream_resolve(stream, &s);
        if (rc == CUDA_SUCCESS)
                rc = pool_alloc(dptr, bytes, current_pools[s->ctx->device], s);
        sim_unlock();
        return rc;
}

SIM_PTSZ(cuMemAllocFromPoolAsync, (CUdeviceptr * dptr, size_t bytes, CUmemoryPool pool, CUstream stream),
         (dptr, bytes, pool, stream))
{
        CUstream s;
        CUresult rc;

        if (!dptr || !sim_is_pool(pool) || pool->imported)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_stream_resolve(stream, &s);
        if (rc == CUDA_SUCCESS)
                rc = pool_alloc(dptr, bytes, pool, s);
        sim_unlock();
        return rc;
}

/*
 * Also frees memory of cuMemAlloc: it goes back to the device when the stream gets there, without waiting for others.
 */
SIM_PTSZ(cuMemFreeAsync, (CUdeviceptr dptr, CUstream stream), (dptr, stream))
{
        struct sim_op op = {.kind = SIM_OP_FREE};
        struct sim_node *node = NULL;
        struct sim_alloc *alloc = NULL;
        CUstream s;
        CUresult rc;

        sim_lock();
        rc = sim_stream_resolve(stream, &s);
        if (rc == CUDA_SUCCESS && s->capture) {
                struct sim_op gone = {.kind = SIM_OP_GRAPH_FREE, .u.memory = {.base = dptr}};

                rc = sim_capture_memory(s, &gone);
                sim_unlock();
                return rc;
        }
        if (rc == CUDA_SUCCESS && s == s->ctx->legacy)
                rc = sim_capture_legacy(s->ctx);
        if (rc == CUDA_SUCCESS)
                rc = sim_capture_unsafe();
        if (rc == CUDA_SUCCESS && dptr) {
                alloc = sim_find(dptr);
                if (alloc && alloc->kind == SIM_ALLOC_MANAGED)
                        rc = CUDA_ERROR_NOT_SUPPORTED;
                else if (!alloc || alloc->base != dptr || alloc->freeing || alloc->kind > SIM_ALLOC_POOL)
                        rc = CUDA_ERROR_INVALID_VALUE;
                else {
                        op.u.victim = alloc;
                        rc = sim_stream_push(s, &op, &node);
                }
        }
        if (rc == CUDA_SUCCESS && alloc) {
                /* The free takes the lock before it removes alloc, so alloc is still valid here. */
                alloc->freeing = true;
                if (alloc->kind == SIM_ALLOC_POOL) {
                        alloc->pool->used -= alloc->bytes;
                        into_cache(alloc, node, s);
                }
        }
        sim_node_put(node);
        sim_unlock();
        return rc;
}

static bool on_device(const CUmemLocation *location, CUmemAllocationType type)
{
        return location->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED;
}

/* Whether there may be pools of such memory there. */
static bool is_place(const CUmemLocation *location, CUmemAllocationType type)
{
        if (type != CU_MEM_ALLOCATION_TYPE_PINNED && type != CU_MEM_ALLOCATION_TYPE_MANAGED)
                return false;
        switch (location->type) {
        case CU_MEM_LOCATION_TYPE_DEVICE:
                return sim_device_check(location->id) == CUDA_SUCCESS;
        case CU_MEM_LOCATION_TYPE_HOST:
        case CU_MEM_LOCATION_TYPE_HOST_NUMA:
                return true;
        case CU_MEM_LOCATION_TYPE_NONE:
                return type == CU_MEM_ALLOCATION_TYPE_MANAGED;
        default:
                return false;
        }
}

/* The handle of a destroyed pool without memory is the next one's. Lock held. NULL: there is none. */
static CUmemoryPool find_vacant(void)
{
        for (CUmemoryPool *at = &pools; *at; at = &(*at)->next) {
                CUmemoryPool pool = *at;

                if (pool->destroyed && reserved_bytes(pool) == 0) {
                        *at = pool->next;
                        memset(pool, 0, sizeof *pool);
                        return pool;
                }
        }
        return NULL;
}

SIM_API cuMemPoolCreate(CUmemoryPool *ret_pool, const CUmemPoolProps *props)
{
        CUmemoryPool pool;
        CUresult rc;
        bool host;

        SIM_ENTER(cuMemPoolCreate);
        if (!ret_pool || !props || !is_place(&props->location, props->allocType) ||
            (props->handleTypes && props->handleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
                return CUDA_ERROR_INVALID_VALUE;
        host = !on_device(&props->location, props->allocType);
        if (host && props->handleTypes)
                return CUDA_ERROR_NOT_SUPPORTED;
        sim_lock();
        rc = sim_capture_unsafe();
        sim_unlock();
        if (rc != CUDA_SUCCESS)
                return rc;
        sim_lock();
        pool = find_vacant();
        if (!pool)
                pool = calloc(1, sizeof *pool);
        if (!pool) {
                sim_unlock();
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        pool->most = props->maxSize;
        pool->shareable = props->handleTypes != 0;
        make_pool(pool, props->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? props->location.id : 0);
        pool->host = host;
        sim_unlock();
        *ret_pool = pool;
        return CUDA_SUCCESS;
}

CUmemoryPool sim_pool_imported(int device)
{
        CUmemoryPool pool = calloc(1, sizeof *pool);

        if (pool) {
                pool->imported = true;
                sim_lock();
                make_pool(pool, device);
                sim_unlock();
        }
        return pool;
}

static bool is_default(CUmemoryPool pool)
{
        return (pool >= default_pools && pool < default_pools + SIM_MAX_DEVICES) ||
               (pool >= host_pools && pool < host_pools + SIM_MAX_DEVICES + 2);
}

SIM_API cuMemPoolDestroy(CUmemoryPool pool)
{
        CUresult rc;

        SIM_ENTER(cuMemPoolDestroy);
        sim_lock();
        rc = sim_capture_unsafe();
        if (rc != CUDA_SUCCESS)
                goto out;
        if (!sim_is_pool(pool) || is_default(pool)) {
                rc = CUDA_ERROR_INVALID_VALUE;
        } else {
                /* Memory that the program still has stays valid, and goes back to the device once it is freed. */
                pool->destroyed = true;
                if (current_pools[pool->device] == pool)
                        current_pools[pool->device] = &default_pools[pool->device];
                trim_pool(pool, 0);
        }
out:
        sim_unlock();
        return rc;
}

SIM_API cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
        CUresult rc;

        SIM_ENTER(cuMemPoolTrimTo);
        sim_lock();
        rc = sim_capture_unsafe();
        if (rc == CUDA_SUCCESS && !sim_is_pool(pool))
                rc = CUDA_ERROR_INVALID_VALUE;
        if (rc == CUDA_SUCCESS)
                trim_pool(pool, keep);
        sim_unlock();
        return rc;
}

SIM_API cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
        CUresult rc;

        SIM_ENTER(cuMemPoolGetAttribute);
        if (!value)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_capture_unsafe();
        if (rc == CUDA_SUCCESS && !sim_is_pool(pool))
                rc = CUDA_ERROR_INVALID_VALUE;
        if (rc != CUDA_SUCCESS) {
                sim_unlock();
                return rc;
        }
        switch (attribute) {
        case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
                *(int *)value = pool->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES];
                break;
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
                *(cuuint64_t *)value = pool->threshold;
                break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
                *(cuuint64_t *)value = reserved_bytes(pool);
                break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
                sim_memory_lock();
                *(cuuint64_t *)value = pool->reserved_high;
                sim_memory_unlock();
                break;
        case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
                *(cuuint64_t *)value = pool->used;
                break;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
                *(cuuint64_t *)value = pool->used_high;
                break;
        default:
                rc = CUDA_ERROR_INVALID_VALUE;
        }
        sim_unlock();
        return rc;
}

SIM_API cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
        CUresult rc;

        SIM_ENTER(cuMemPoolSetAttribute);
        if (!value)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_capture_unsafe();
        if (rc == CUDA_SUCCESS && !sim_is_pool(pool))
                rc = CUDA_ERROR_INVALID_VALUE;
        if (rc != CUDA_SUCCESS) {
                sim_unlock();
                return rc;
        }
        switch (attribute) {
        case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
        case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
                pool->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = *(const int *)value;
                break;
        case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
                pool->threshold = *(const cuuint64_t *)value;
                break;
        case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
                sim_memory_lock();
                if (*(const cuuint64_t *)value == 0)
                        pool->reserved_high = pool->reserved;
                else
                        rc = CUDA_ERROR_INVALID_VALUE;
                sim_memory_unlock();
                break;
        case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
                if (*(const cuuint64_t *)value == 0)
                        pool->used_high = pool->used;
                else
                        rc = CUDA_ERROR_INVALID_VALUE;
                break;
        default:
                rc = CUDA_ERROR_INVALID_VALUE;
        }
        sim_unlock();
        return rc;
}

/* Accepted and ignored: here peers access a pool's memory through cuCtxEnablePeerAccess. */
SIM_API cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
        SIM_ENTER(cuMemPoolSetAccess);
        return sim_is_pool(pool) && (map || !count) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIM_API cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)
{
        SIM_ENTER(cuMemPoolGetAccess);
        if (!flags || !sim_is_pool(pool) || !location)
                return CUDA_ERROR_INVALID_VALUE;
        *flags = location->id == pool->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
        return CUDA_SUCCESS;
}

static CUresult get_pool(CUmemoryPool *ret_pool, CUdevice device, bool of_default)
{
        if (!ret_pool)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        sim_lock();
        *ret_pool = of_default ? &default_pools[device] : current_pools[device];
        sim_unlock();
        return CUDA_SUCCESS;
}

static CUresult set_pool(CUdevice device, CUmemoryPool pool)
{
        CUresult rc = CUDA_SUCCESS;

        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        sim_lock();
        if (sim_is_pool(pool) && pool->device == device && !pool->host)
                current_pools[device] = pool;
        else
                rc = CUDA_ERROR_INVALID_VALUE;
        sim_unlock();
        return rc;
}

SIM_API cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
        SIM_ENTER(cuDeviceGetDefaultMemPool);
        return get_pool(pool, device, true);
}

SIM_API cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device)
{
        SIM_ENTER(cuDeviceGetMemPool);
        return get_pool(pool, device, false);
}

SIM_API cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
        SIM_ENTER(cuDeviceSetMemPool);
        return set_pool(device, pool);
}

/* The default pool for memory that is not plain device memory; it is also the current one. */
static CUresult host_pool(CUmemoryPool *ret_pool, const CUmemLocation *location, CUmemAllocationType type)
{
        if (!ret_pool || !location || !is_place(location, type) || location->type == CU_MEM_LOCATION_TYPE_NONE)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_pool = location->type == CU_MEM_LOCATION_TYPE_DEVICE
                            ? &host_pools[location->id]
                            : &host_pools[SIM_MAX_DEVICES + (type == CU_MEM_ALLOCATION_TYPE_MANAGED)];
        return CUDA_SUCCESS;
}

SIM_API cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
        SIM_ENTER(cuMemGetDefaultMemPool);
        return location && on_device(location, type) ? get_pool(pool, location->id, true)
                                                     : host_pool(pool, location, type);
}

SIM_API cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
        SIM_ENTER(cuMemGetMemPool);
        return location && on_device(location, type) ? get_pool(pool, location->id, false)
                                                     : host_pool(pool, location, type);
}

SIM_API cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
        SIM_ENTER(cuMemSetMemPool);
        return location && on_device(location, type) ? set_pool(location->id, pool) : CUDA_ERROR_NOT_SUPPORTED;
}
