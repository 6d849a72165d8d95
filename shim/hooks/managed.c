/*
 * Managed memory. All of it is charged to the device that was current at its allocation, wherever its pages are. The
 * driver has no query for where they are (CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION says where the program last
 * wanted them), and all of them may move to the device at any time.
 *
 * It is not cached. A block that is handed out again would have to be like a new one: read-mostly, preferred location
 * and accessed-by unset for every processor, attachment global (which no query tells), no page left where the last
 * owner had it (which no call undoes). A cache would gain little (docs/measurements.md, managed-cost).
 */
#include "hooks/managed.h"

#include <assert.h>
#include <errno.h>

#include "base/no_cancel.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/context.h"
#include "hooks/stream_ordered.h"

#define STEP_BYTES ((uint64_t)64 << 10) /* small allocations take a multiple of it, not whole pages */

struct request {
        CUdeviceptr ptr;
        size_t bytes;
        unsigned int flags;
};

static int allocate_managed(void *arg)
{
        struct request *request = arg;

        return gr_errno_of(gr_real.cuMemAllocManaged(&request->ptr, request->bytes, request->flags));
}

GR_EXPORT CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
        GR_PASS_DEEP;
        struct request request = {.bytes = bytesize, .flags = flags};
        struct gr_context *context;
        uint64_t footprint;
        GR_KEEP_ERRNO;
        int rc;

        if (!gr_shim_ready() || !gr_real.cuMemAllocManaged || !dptr || bytesize == 0 || bytesize > GR_BLOCK_MAX_BYTES ||
            (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
                return gr_real_given(GR_REAL(cuMemAllocManaged, dptr, bytesize, flags), dptr);
        context = gr_context_current();
        if (!context)
                return gr_real_given(GR_REAL(cuMemAllocManaged, dptr, bytesize, flags), dptr);
        GR_NO_CANCEL;
        footprint =
                gr_is_small(bytesize) ? (bytesize + STEP_BYTES - 1) & ~(STEP_BYTES - 1) : gr_footprint_bytes(bytesize);
        assert(footprint >= bytesize);
        rc = gr_charge_accounted(&gr_core, context->device, context, GR_MEMORY_MANAGED, footprint, allocate_managed,
                                 &request);
        if (rc == 0) {
                rc = gr_accounted_add(gr_core.accounted, context->device, GR_MEMORY_MANAGED, request.ptr,
                                      context->handle, footprint);
                if (rc)
                        gr_real.cuMemFree_v2(request.ptr);
                else
                        *dptr = request.ptr;
        }
        return gr_real_given(gr_result(rc), dptr);
}

CUresult gr_managed_free_accounted(CUdeviceptr ptr)
{
        struct gr_accounted *entry = gr_accounted_free_begin(gr_core.accounted, GR_MEMORY_MANAGED, ptr);
        CUresult result;

        if (!entry)
                entry = gr_accounted_free_begin(gr_core.accounted, GR_MEMORY_IMPORTED, ptr);
        if (!entry)
                return gr_stream_ordered_free(ptr);
        GR_NO_CANCEL; /* the entry is taken */
        result = GR_REAL(cuMemFree_v2, ptr);
        gr_accounted_free_end(gr_core.accounted, entry, result == CUDA_SUCCESS);
        return result;
}
