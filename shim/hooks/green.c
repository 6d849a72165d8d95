/*
 * Green contexts. Each retains the device's primary context, which owns its memory and whose fences cover its streams.
 * So the primary context is added to the core: copies on a green stream may access blocks of any context of the device.
 */
#include "base/keep_errno.h"
#include "base/no_cancel.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/captures.h"
#include "hooks/context.h"
#include "hooks/green_table.h"

/* Without host memory for the entry, the end of the primary context is noticed only after the driver's call. */
GR_EXPORT CUresult CUDAAPI cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc description, CUdevice dev,
                                            unsigned int flags)
{
        GR_PASS_DEEP;
        GR_KEEP_ERRNO;
        CUresult result;
        GR_NO_CANCEL;

        if (!gr_shim_ready() || dev < 0 || dev >= GR_DEVICES_MAX)
                return GR_REAL(cuGreenCtxCreate, green, description, dev, flags);
        return GR_WAIT_FOR_ROOM(
                dev, ({
                        gr_lock(&gr_primary_locks[dev]);
                        result = GR_WITH_ROOM_NOW(dev, GR_REAL(cuGreenCtxCreate, green, description, dev, flags));
                        if (result == CUDA_SUCCESS) {
                                gr_core_note_overlap(&gr_core); /* its stream runs beside that of the primary context */
                                gr_context_green_made(dev, gr_green_add(*green, dev));
                        }
                        gr_unlock(&gr_primary_locks[dev]);
                        result;
                }));
}

/* Remembers the conversion, so that no allocation is needed to find the owner of the memory. */
GR_EXPORT CUresult CUDAAPI cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx handle)
{
        GR_PASS_DEEP;
        CUresult result = GR_REAL(cuCtxFromGreenCtx, context, handle);

        if (result == CUDA_SUCCESS && gr_shim_ready())
                gr_green_name(handle, *context);
        return result;
}

/* Destroys the green context. The driver may give its handle to another context. */
static CUresult destroy_green(CUgreenCtx handle)
{
        CUresult result = GR_REAL(cuGreenCtxDestroy, handle);

        if (result == CUDA_SUCCESS) {
                gr_green_remove(handle);
                gr_context_distrust_aliases();
        }
        return result;
}

/* The driver also releases the primary context, which ends if nothing else retains it. */
GR_EXPORT CUresult CUDAAPI cuGreenCtxDestroy(CUgreenCtx handle)
{
        GR_PASS_DEEP;
        GR_KEEP_ERRNO;
        struct gr_release release;
        CUresult result;
        CUdevice dev;
        GR_NO_CANCEL;

        if (!gr_shim_ready())
                return GR_REAL(cuGreenCtxDestroy, handle);
        dev = gr_green_device(handle);
        if (dev >= 0) {
                gr_lock(&gr_primary_locks[dev]);
                release = gr_context_before_release(dev, false);
                result = destroy_green(handle);
                gr_context_after_release(dev, &release, result);
                gr_unlock(&gr_primary_locks[dev]);
        } else {
                result = destroy_green(handle);
                if (result == CUDA_SUCCESS)
                        gr_context_end_inactive(); /* the device of the green context is not known: checks all */
        }
        return result;
}
