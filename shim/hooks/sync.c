/*
 * Calls that wait for the GPU, and so tell of kernels that failed. Meanwhile memory can be given back without costing
 * time (core/reclaim/proactive.h). As long as there is enough memory, such a call only reads a flag.
 */
#include <errno.h>

#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/context.h"

static void about_to_wait(void)
{
        struct gr_context *context;

        if (!gr_shim_ready() || !atomic_load_explicit(&gr_core.memory_is_short, memory_order_relaxed))
                return;
        GR_KEEP_ERRNO;
        context = gr_context_current();
        if (context)
                gr_proactive_run(context);
}

#define NOTED(call)                                                                                                    \
        ({                                                                                                             \
                CUresult result_ = (call);                                                                             \
                                                                                                                       \
                if (__builtin_expect(result_ != CUDA_SUCCESS, 0))                                                      \
                        gr_context_note_failure(result_, __func__);                                                    \
                result_;                                                                                               \
        })

/* As long as all work is in order, a wait for it shows that what was freed before is idle. */
static struct gr_context *begin_wait_for_all(struct gr_epoch *ret_epoch)
{
        struct gr_context *context;
        GR_KEEP_ERRNO;

        if (!gr_shim_ready() || atomic_load_explicit(&gr_core.order_over, memory_order_relaxed))
                return NULL;
        context = gr_context_current();
        return context && gr_fence_begin_wait(context->fence, ret_epoch) ? context : NULL;
}

static CUresult end_wait_for_all(CUresult result, struct gr_context *context, const struct gr_epoch *epoch)
{
        GR_KEEP_ERRNO;

        if (context && result == CUDA_SUCCESS)
                gr_fence_waited(context->fence, epoch);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuCtxSynchronize(void)
{
        GR_PASS_GATE;
        struct gr_epoch epoch;
        struct gr_context *context;

        about_to_wait();
        context = begin_wait_for_all(&epoch);
        return end_wait_for_all(NOTED(GR_REAL(cuCtxSynchronize)), context, &epoch);
}

GR_EXPORT CUresult CUDAAPI cuCtxSynchronize_v2(CUcontext ctx)
{
        GR_PASS_GATE;
        about_to_wait();
        return NOTED(GR_REAL(cuCtxSynchronize_v2, ctx));
}

GR_EXPORT CUresult CUDAAPI cuStreamSynchronize(CUstream stream)
{
        GR_PASS_GATE;
        struct gr_epoch epoch;
        struct gr_context *context = NULL;

        about_to_wait();
        if (!stream || stream == CU_STREAM_LEGACY)
                context = begin_wait_for_all(&epoch);
        return end_wait_for_all(NOTED(GR_REAL(cuStreamSynchronize, stream)), context, &epoch);
}

GR_EXPORT CUresult CUDAAPI cuStreamSynchronize_ptsz(CUstream stream)
{
        GR_PASS_GATE;
        about_to_wait();
        return NOTED(GR_REAL(cuStreamSynchronize_ptsz, stream));
}

GR_EXPORT CUresult CUDAAPI cuEventSynchronize(CUevent event)
{
        GR_PASS_GATE;
        about_to_wait();
        return NOTED(GR_REAL(cuEventSynchronize, event));
}
