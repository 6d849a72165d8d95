/* cuMemAlloc and its family: device, managed and pinned host memory. */
#include "grsim.h"
#include "sim.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static CUresult allocate_memory(CUdeviceptr *dptr, size_t bytes)
{
        struct sim_alloc *alloc;
        CUcontext ctx;
        CUresult rc;

        if (!dptr)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS)
                rc = sim_capture_unsafe();
        if (rc == CUDA_SUCCESS && bytes == 0)
                rc = CUDA_ERROR_INVALID_VALUE;
        if (rc == CUDA_SUCCESS) {
                alloc = sim_heap_alloc(ctx->device, bytes, NULL);
                if (alloc) {
                        alloc->ctx = ctx;
                        *dptr = alloc->base;
                } else {
                        rc = CUDA_ERROR_OUT_OF_MEMORY;
                }
        }
        sim_unlock();
        return rc;
}

SIM_API cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytes)
{
        SIM_ENTER(cuMemAlloc_v2);
        return allocate_memory(dptr, bytes);
}

SIM_API cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *ret_pitch, size_t width, size_t height, unsigned element)
{
        size_t step, pitch;
        CUresult rc;

        SIM_ENTER(cuMemAllocPitch_v2);
        step = sim_config()->pitch_bytes;
        if (!dptr || !ret_pitch || !width || !height || (element != 4 && element != 8 && element != 16))
                return CUDA_ERROR_INVALID_VALUE;
        if (width > SIZE_MAX - step)
                return CUDA_ERROR_OUT_OF_MEMORY;
        pitch = (width + step - 1) / step * step;
        if (height > SIZE_MAX / pitch)
                return CUDA_ERROR_OUT_OF_MEMORY;
        rc = allocate_memory(dptr, pitch * height);
        if (rc == CUDA_SUCCESS)
                *ret_pitch = pitch;
        return rc;
}

/* The kind of memory at address, or -1; *ret_flags: the flags with which it was allocated. */
static int kind_of(uintptr_t address, unsigned *ret_flags)
{
        struct sim_alloc *alloc;
        int kind = -1;

        sim_memory_lock();
        alloc = sim_find_locked(address);
        if (alloc) {
                kind = alloc->kind;
                *ret_flags = alloc->flags;
        }
        sim_memory_unlock();
        return kind;
}

static void free_host_range(struct sim_alloc *range)
{
        void *base = (void *)range->base;
        size_t bytes = range->footprint;

        sim_range_remove(range);
        sim_unmap(base, bytes);
}

/*
 * Waits for all work of the memory's context, as the driver does, then frees the memory. Memory of a pool is freed
 * without a wait (measured, driver 580).
 */
SIM_API cuMemFree_v2(CUdeviceptr dptr)
{
        struct sim_alloc *alloc;
        struct sim_node *all;
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuMemFree_v2);
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_ERROR_INVALID_CONTEXT)
                rc = CUDA_SUCCESS; /* the pointer says which context (measured, driver 580) */
        if (rc == CUDA_SUCCESS)
                rc = sim_capture_unsafe();
        if (rc != CUDA_SUCCESS || !dptr)
                goto out;
        alloc = sim_find(dptr);
        if (!alloc || alloc->base != dptr || alloc->freeing ||
            (alloc->kind > SIM_ALLOC_MANAGED && alloc->kind != SIM_ALLOC_EXTERNAL &&
             !(alloc->kind == SIM_ALLOC_IMPORTED && alloc->pool))) {
                rc = CUDA_ERROR_INVALID_VALUE;
                goto out;
        }
        alloc->freeing = true;
        if (alloc->kind != SIM_ALLOC_POOL || alloc->reuses) {
                all = sim_context_join(alloc->ctx);
                sim_node_wait(all);
                sim_node_put(all);
        }
        if (alloc->kind == SIM_ALLOC_POOL)
                sim_pool_free(alloc);
        else if (alloc->kind == SIM_ALLOC_IMPORTED)
                sim_ipc_free(alloc);
        else if (alloc->kind == SIM_ALLOC_MANAGED || alloc->kind == SIM_ALLOC_EXTERNAL)
                free_host_range(alloc);
        else
                sim_heap_free(alloc);
        sim_pool_synchronized(NULL, 0);
out:
        sim_unlock();
        return rc;
}

SIM_API cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuMemGetInfo_v2);
        if (!free_bytes || !total_bytes)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS) {
                *free_bytes = sim_heap_free_bytes(ctx->device);
                *total_bytes = sim_config()->memory_bytes;
        }
        sim_unlock();
        return rc;
}

/* Host memory that the device may touch too: the same address on both sides. */
static CUresult host_memory(enum sim_alloc_kind kind, size_t bytes, unsigned flags, uintptr_t *ret_base)
{
        size_t page = (size_t)sysconf(_SC_PAGESIZE), mapped = (bytes + page - 1) / page * page;
        struct sim_alloc *range;
        CUcontext ctx;
        CUresult rc;
        void *base;

        if (!ret_base || (bytes == 0 && kind != SIM_ALLOC_HOST))
                return CUDA_ERROR_INVALID_VALUE;
        if (bytes > SIZE_MAX - page)
                return CUDA_ERROR_OUT_OF_MEMORY;
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS)
                rc = sim_capture_unsafe();
        if (rc == CUDA_SUCCESS && bytes == 0) {
                *ret_base = 0;
        } else if (rc == CUDA_SUCCESS) {
                rc = CUDA_ERROR_OUT_OF_MEMORY;
                base = sim_map(mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                if (base != MAP_FAILED) {
                        range = sim_range_add(kind, (uintptr_t)base, bytes, ctx, ctx->device, flags);
                        if (range) {
                                *ret_base = range->base;
                                rc = CUDA_SUCCESS;
                        } else {
                                munmap(base, mapped);
                        }
                }
        }
        sim_unlock();
        return rc;
}

SIM_API cuMemAllocManaged(CUdeviceptr *dptr, size_t bytes, unsigned flags)
{
        uintptr_t base;
        CUresult rc;

        SIM_ENTER(cuMemAllocManaged);
        if (!dptr || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
                return CUDA_ERROR_INVALID_VALUE;
        rc = host_memory(SIM_ALLOC_MANAGED, bytes, flags, &base);
        if (rc == CUDA_SUCCESS)
                *dptr = base;
        return rc;
}

SIM_API cuMemAllocHost_v2(void **pp, size_t bytes)
{
        SIM_ENTER(cuMemAllocHost_v2);
        if (pp)
                *pp = NULL; /* as a driver does, which then refuses */
        return host_memory(SIM_ALLOC_HOST, bytes, 0, (uintptr_t *)pp);
}

SIM_API cuMemHostAlloc(void **pp, size_t bytes, unsigned flags)
{
        SIM_ENTER(cuMemHostAlloc);
        if (flags & ~7u)
                return CUDA_ERROR_INVALID_VALUE;
        if (pp)
                *pp = NULL;
        return host_memory(SIM_ALLOC_HOST, bytes, flags, (uintptr_t *)pp);
}

SIM_API cuMemFreeHost(void *p)
{
        struct sim_alloc *range;
        CUresult rc;

        SIM_ENTER(cuMemFreeHost);
        sim_lock();
        range = sim_find((uintptr_t)p);
        rc = sim_capture_unsafe();
        if (rc == CUDA_SUCCESS && p) {
                if (range && range->base == (uintptr_t)p && range->kind == SIM_ALLOC_HOST && !range->freeing) {
                        struct sim_node *all = sim_context_join(range->ctx);

                        range->freeing = true;
                        sim_node_wait(all);
                        sim_node_put(all);
                        free_host_range(range);
                } else {
                        rc = CUDA_ERROR_INVALID_VALUE;
                }
        }
        sim_unlock();
        return rc;
}

SIM_API cuMemHostRegister_v2(void *p, size_t bytes, unsigned flags)
{
        struct sim_alloc *known;
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuMemHostRegister_v2);
        if (!p || !bytes)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS)
                rc = sim_capture_unsafe();
        known = sim_find((uintptr_t)p);
        if (rc == CUDA_SUCCESS && known)
                rc = known->kind == SIM_ALLOC_REGISTERED ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                                                         : CUDA_ERROR_INVALID_VALUE;
        if (rc == CUDA_SUCCESS && !sim_range_add(SIM_ALLOC_REGISTERED, (uintptr_t)p, bytes, ctx, ctx->device, flags))
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        sim_unlock();
        return rc;
}

SIM_API cuMemHostUnregister(void *p)
{
        struct sim_alloc *range;
        CUresult rc = CUDA_SUCCESS;

        SIM_ENTER(cuMemHostUnregister);
        sim_lock();
        range = sim_find((uintptr_t)p);
        if (range && range->base == (uintptr_t)p && range->kind == SIM_ALLOC_REGISTERED && !range->freeing) {
                struct sim_node *all = sim_context_join(range->ctx);

                range->freeing = true;
                sim_node_wait(all);
                sim_node_put(all);
                sim_range_remove(range);
        } else {
                rc = range ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
        }
        sim_unlock();
        return rc;
}

SIM_API cuMemHostGetDevicePointer_v2(CUdeviceptr *dptr, void *p, unsigned flags)
{
        unsigned made_with;
        int kind;

        SIM_ENTER(cuMemHostGetDevicePointer_v2);
        kind = kind_of((uintptr_t)p, &made_with);
        if (!dptr || flags || (kind != SIM_ALLOC_HOST && kind != SIM_ALLOC_REGISTERED))
                return CUDA_ERROR_INVALID_VALUE;
        *dptr = (CUdeviceptr)(uintptr_t)p;
        return CUDA_SUCCESS;
}

static _Atomic unsigned slab_flags = ~0u; /* a driver answers with those of the first block of a slab; ~0: none */

__attribute__((visibility("default"))) void grSimHostFlags(unsigned flags)
{
        atomic_store(&slab_flags, flags);
}

SIM_API cuMemHostGetFlags(unsigned *flags, void *p)
{
        unsigned made_with;
        int kind;

        SIM_ENTER(cuMemHostGetFlags);
        kind = kind_of((uintptr_t)p, &made_with);
        if (!flags || (kind != SIM_ALLOC_HOST && kind != SIM_ALLOC_MAPPED))
                return CUDA_ERROR_INVALID_VALUE;
        if (kind == SIM_ALLOC_MAPPED) { /* a driver knows flags of mapped memory, too */
                *flags = 0;
                return CUDA_SUCCESS;
        }
        if (atomic_load(&slab_flags) != ~0u)
                made_with = atomic_load(&slab_flags);
        *flags = made_with | CU_MEMHOSTALLOC_DEVICEMAP; /* unified addressing maps all of it */
        return CUDA_SUCCESS;
}

/* Advice changes nothing here; a prefetch takes its place in the stream and moves nothing. */
SIM_API cuMemAdvise_v2(CUdeviceptr dptr, size_t bytes, CUmem_advise advice, CUmemLocation location)
{
        unsigned made_with;

        SIM_ENTER(cuMemAdvise_v2);
        (void)advice, (void)location;
        return bytes && kind_of(dptr, &made_with) == SIM_ALLOC_MANAGED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIM_PTSZ(cuMemPrefetchAsync_v2,
         (CUdeviceptr dptr, size_t bytes, CUmemLocation location, unsigned flags, CUstream stream),
         (dptr, bytes, location, flags, stream))
{
        struct sim_op op = {.kind = SIM_OP_JOIN};
        unsigned made_with;

        (void)location;
        if (!bytes || flags || kind_of(dptr, &made_with) != SIM_ALLOC_MANAGED)
                return CUDA_ERROR_INVALID_VALUE;
        return sim_submit(stream, &op, false);
}
