/* Pinned host memory, allocated or registered: no device's, so it has a limit of its own. There is no ladder for it. */
#include <errno.h>

#include "shim.h"

#define PAGE_BYTES ((uint64_t)4 << 10)

struct request {
        void *ptr;
        size_t bytes;
        unsigned int flags;
        CUresult (*plain)(void **ptr, size_t bytes);
        CUresult (*flagged)(void **ptr, size_t bytes, unsigned int flags);
        CUresult (*registering)(void *ptr, size_t bytes, unsigned int flags);
};

static int allocate(void *arg)
{
        struct request *request = arg;

        if (request->registering)
                return gr_errno(request->registering(request->ptr, request->bytes, request->flags));
        if (request->flagged)
                return gr_errno(request->flagged(&request->ptr, request->bytes, request->flags));
        return gr_errno(request->plain(&request->ptr, request->bytes));
}

static bool counts(size_t bytes)
{
        return gr_shim_ready() && bytes > 0 && bytes <= GR_BLOCK_MAX_BYTES;
}

static CUresult charge(struct request *request)
{
        uint64_t footprint = (request->bytes + PAGE_BYTES - 1) & ~(PAGE_BYTES - 1);
        struct gr_context *context = gr_current_context();
        int saved_errno = errno, rc;

        rc = gr_foreign_charge(&gr_core, &gr_core.host, NULL, GR_FAMILY_HOST, footprint, allocate, request);
        if (rc == 0)
                gr_foreign_add(&gr_core, &gr_core.host, GR_FAMILY_HOST, (uint64_t)(uintptr_t)request->ptr,
                               context ? context->handle : NULL, footprint);
        errno = saved_errno;
        return gr_result(rc);
}

GR_EXPORT CUresult CUDAAPI cuMemAllocHost_v2(void **pp, size_t bytesize)
{
        struct request request = {.bytes = bytesize};
        CUresult result;

        if (!counts(bytesize) || !pp || !gr_real.cuMemAllocHost_v2)
                return GR_REAL(cuMemAllocHost_v2, pp, bytesize);
        request.plain = gr_real.cuMemAllocHost_v2;
        result = charge(&request);
        if (result == CUDA_SUCCESS)
                *pp = request.ptr;
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemHostAlloc(void **pp, size_t bytesize, unsigned int flags)
{
        struct request request = {.bytes = bytesize, .flags = flags};
        CUresult result;

        if (!counts(bytesize) || !pp || !gr_real.cuMemHostAlloc)
                return GR_REAL(cuMemHostAlloc, pp, bytesize, flags);
        request.flagged = gr_real.cuMemHostAlloc;
        result = charge(&request);
        if (result == CUDA_SUCCESS)
                *pp = request.ptr;
        return result;
}

static CUresult register_host(void *p, size_t bytesize, unsigned int flags, __typeof__(cuMemHostRegister_v2) *real)
{
        struct request request = {.ptr = p, .bytes = bytesize, .flags = flags, .registering = real};

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        return counts(bytesize) && p ? charge(&request) : real(p, bytesize, flags);
}

GR_EXPORT CUresult CUDAAPI cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int flags)
{
        gr_shim_ready();
        return register_host(p, bytesize, flags, gr_real.cuMemHostRegister_v2);
}

GR_EXPORT CUresult CUDAAPI cuMemHostRegister(void *p, size_t bytesize, unsigned int flags)
{
        gr_shim_ready();
        return register_host(p, bytesize, flags, gr_real.cuMemHostRegister);
}

static CUresult give_back(void *p, CUresult (*real)(void *))
{
        struct gr_foreign *entry = NULL;
        CUresult result;

        if (!real)
                return CUDA_ERROR_NOT_FOUND;
        if (gr_shim_ready() && p)
                entry = gr_foreign_take(&gr_core, GR_FAMILY_HOST, (uint64_t)(uintptr_t)p);
        result = real(p);
        gr_foreign_settle(&gr_core, entry, result == CUDA_SUCCESS);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMemFreeHost(void *p)
{
        gr_shim_ready();
        return give_back(p, gr_real.cuMemFreeHost);
}

GR_EXPORT CUresult CUDAAPI cuMemHostUnregister(void *p)
{
        gr_shim_ready();
        return give_back(p, gr_real.cuMemHostUnregister);
}
