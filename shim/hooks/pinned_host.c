/*
 * Pinned host memory, allocated or registered. It belongs to no device, so it has a limit of its own. Allocated memory
 * comes from a cache (core/host/pinned.h). Registered memory is the program's own, and is only counted.
 */
#include <assert.h>
#include <errno.h>

#include "base/no_cancel.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/captures.h"
#include "hooks/context.h"
#include "hooks/query.h"

#define PAGE_BYTES ((uint64_t)4 << 10)
#define FLAGS      (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED)
#define PLAIN      (~0u) /* stands for cuMemAllocHost, which takes no flags: its blocks serve only its own requests */

struct request {
        void *ptr;
        size_t bytes;
        unsigned int flags;
        CUresult (*plain)(void **ptr, size_t bytes);
        CUresult (*flagged)(void **ptr, size_t bytes, unsigned int flags);
        CUresult (*registering)(void *ptr, size_t bytes, unsigned int flags);
        bool two_addresses; /* the device has another address for it, which the ledger does not know */
};

static int allocate_accounted(void *arg)
{
        struct request *request = arg;

        assert(!!request->registering + !!request->flagged + !!request->plain == 1);
        if (request->registering)
                return gr_errno_of(request->registering(request->ptr, request->bytes, request->flags));
        if (request->flagged)
                return gr_errno_of(request->flagged(&request->ptr, request->bytes, request->flags));
        return gr_errno_of(request->plain(&request->ptr, request->bytes));
}

static bool is_charged(size_t bytes)
{
        return gr_shim_ready() && bytes > 0 && bytes <= GR_BLOCK_MAX_BYTES && !gr_captures_refuse();
}

static CUresult allocate_charged(struct request *request)
{
        uint64_t footprint = (request->bytes + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1);
        struct gr_context *context = gr_context_current();
        GR_KEEP_ERRNO;
        int rc;
        GR_NO_CANCEL;

        rc = gr_charge_accounted(&gr_core, gr_core.host, NULL, GR_MEMORY_HOST, footprint, allocate_accounted, request);
        if (rc == 0) {
                gr_pool_given(&gr_core, (uint64_t)(uintptr_t)request->ptr);
                rc = gr_accounted_add(gr_core.accounted, gr_core.host, GR_MEMORY_HOST,
                                      (uint64_t)(uintptr_t)request->ptr, context ? context->handle : NULL, footprint);
                if (rc && request->registering)
                        GR_REAL(cuMemHostUnregister, request->ptr);
                else if (rc)
                        GR_REAL(cuMemFreeHost, request->ptr);
        }
        return gr_result(rc);
}

static int allocate_pinned(void *arg, size_t bytes, uint64_t *ret_ptr)
{
        struct request *request = arg;
        CUdeviceptr device_ptr;
        int rc;

        request->bytes = bytes;
        rc = allocate_accounted(request);
        if (rc)
                return rc;
        request->two_addresses = !gr_real.cuMemHostGetDevicePointer_v2 ||
                                 gr_real.cuMemHostGetDevicePointer_v2(&device_ptr, request->ptr, 0) != CUDA_SUCCESS ||
                                 device_ptr != (CUdeviceptr)(uintptr_t)request->ptr;
        *ret_ptr = (uint64_t)(uintptr_t)request->ptr;
        return 0;
}

/* As pin_memory, but the result is only in request->ptr. */
static CUresult take_pinned(struct request *request, unsigned int kind)
{
        struct gr_context *context = gr_context_current();
        GR_KEEP_ERRNO;
        int rc;
        uint64_t ptr;

        if (!context || (request->flagged && request->flags & ~FLAGS) || !gr_real.cuMemFreeHost ||
            atomic_load_explicit(&gr_core.host->threshold_bytes, memory_order_relaxed) == 0)
                return allocate_charged(request);
        assert(request->flagged ? kind == request->flags : kind == PLAIN);
        rc = gr_pinned_alloc(context, request->bytes, kind, allocate_pinned, request, &ptr);
        if (rc == 0) {
                if (request->two_addresses)
                        gr_ledger_mark_exported(gr_core.ledger, ptr);
                request->ptr = (void *)(uintptr_t)ptr;
        }
        return gr_result(rc);
}

/*
 * Allocates pinned memory, from the cache where it may serve this request. kind: the flags, or PLAIN. Where the driver
 * fails and sets the pointer to NULL, the program gets that NULL.
 */
static CUresult pin_memory(struct request *request, unsigned int kind, void **pp)
{
        CUresult result;

        request->ptr = *pp;
        result = take_pinned(request, kind);
        if (result == CUDA_SUCCESS || !request->ptr)
                *pp = request->ptr;
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemAllocHost_v2(void **pp, size_t bytesize)
{
        GR_PASS_DEEP;
        struct request request = {.bytes = bytesize};

        if (!is_charged(bytesize) || !pp || !gr_real.cuMemAllocHost_v2)
                return GR_REAL(cuMemAllocHost_v2, pp, bytesize);
        request.plain = gr_real.cuMemAllocHost_v2;
        return pin_memory(&request, PLAIN, pp);
}

GR_EXPORT CUresult CUDAAPI cuMemHostAlloc(void **pp, size_t bytesize, unsigned int flags)
{
        GR_PASS_DEEP;
        struct request request = {.bytes = bytesize, .flags = flags};

        if (!is_charged(bytesize) || !pp || !gr_real.cuMemHostAlloc)
                return GR_REAL(cuMemHostAlloc, pp, bytesize, flags);
        request.flagged = gr_real.cuMemHostAlloc;
        return pin_memory(&request, flags, pp);
}

static CUresult register_host(void *p, size_t bytesize, unsigned int flags, __typeof__(cuMemHostRegister_v2) *real)
{
        struct request request = {.ptr = p, .bytes = bytesize, .flags = flags, .registering = real};

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        return is_charged(bytesize) && p ? allocate_charged(&request) : real(p, bytesize, flags);
}

GR_EXPORT CUresult CUDAAPI cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int flags)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return register_host(p, bytesize, flags, gr_real.cuMemHostRegister_v2);
}

GR_EXPORT CUresult CUDAAPI cuMemHostRegister(void *p, size_t bytesize, unsigned int flags)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return register_host(p, bytesize, flags, gr_real.cuMemHostRegister);
}

static CUresult free_charged(void *p, CUresult (*real)(void *))
{
        struct gr_accounted *entry = NULL;
        CUresult result;

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        GR_NO_CANCEL;
        if (gr_shim_ready() && p)
                entry = gr_accounted_free_begin(gr_core.accounted, GR_MEMORY_HOST, (uint64_t)(uintptr_t)p);
        result = real(p);
        gr_accounted_free_end(gr_core.accounted, entry, result == CUDA_SUCCESS);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemFreeHost(void *p)
{
        GR_PASS_DEEP;
        GR_KEEP_ERRNO;
        int rc;

        if (gr_shim_ready() && p) {
                rc = gr_pinned_free(&gr_core, (uint64_t)(uintptr_t)p);
                if (rc != -ENOENT)
                        return gr_result(rc);
        }
        return free_charged(p, gr_real.cuMemFreeHost);
}

GR_EXPORT CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr *dptr, void *p, unsigned int flags)
{
        GR_PASS_DEEP;
        return GR_REAL(cuMemHostGetDevicePointer_v2, dptr, (void *)gr_query_unless_cached((CUdeviceptr)p), flags);
}

/*
 * The driver cuts small blocks from slabs, and answers with the flags of the first block of the slab
 * (docs/measurements.md, pinned-flags). The cache keeps slabs alive that would be gone without it. So for blocks of the
 * cache this hook answers itself.
 */
GR_EXPORT CUresult CUDAAPI cuMemHostGetFlags(unsigned int *flags, void *p)
{
        GR_PASS_DEEP;
        struct gr_block_info info;
        CUdeviceptr at = (CUdeviceptr)p, base;
        bool known = gr_shim_ready() && gr_query_block_at(at, &base, &info) == 0;
        CUresult result;

        /* The driver knows no flags of memory from cuMemAlloc, but of mapped memory. */
        at = known && info.is_range ? GR_NO_POINTER : gr_query_unless_cached(at);
        result = GR_REAL(cuMemHostGetFlags, flags, (void *)at);
        if (result == CUDA_SUCCESS && known && info.host && info.kind != PLAIN)
                *flags = (*flags & ~FLAGS) | (info.kind & FLAGS) | CU_MEMHOSTALLOC_DEVICEMAP;
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemHostUnregister(void *p)
{
        GR_PASS_DEEP;
        gr_shim_ready();
        return free_charged((void *)gr_query_unless_cached((CUdeviceptr)p), gr_real.cuMemHostUnregister);
}
