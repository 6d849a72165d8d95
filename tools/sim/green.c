/*
 * Green contexts: a part of a GPU's processors, with streams of its own. Memory, kernels and events belong to the
 * primary context, which each green one retains. Converted to a context, its handle stands for the primary one, except
 * that recording and waiting for a whole context concern its own streams only (cuda.h says so, and driver 580 does so).
 * Unlike a real one it uses the default stream of the primary context.
 */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

#define PROCESSORS 16

static CUcontext greens; /* all that were ever made, so that stale handles stay readable. Guarded by sim_lock() */
static struct CUctx_st gone = {.magic = SIM_MAGIC_CONTEXT}; /* the green context of streams whose own was destroyed */
static char description_of[1]; /* every CUdevResourceDesc points here: all resources are equal */

SIM_API cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type)
{
        SIM_ENTER(cuDeviceGetDevResource);
        if (!resource || type != CU_DEV_RESOURCE_TYPE_SM)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        memset(resource, 0, sizeof *resource);
        resource->type = type;
        resource->sm.smCount = PROCESSORS;
        return CUDA_SUCCESS;
}

/* Makes at most one group. */
SIM_API cuDevSmResourceSplitByCount(CUdevResource *result, unsigned *groups, const CUdevResource *input,
                                    CUdevResource *remaining, unsigned flags, unsigned least)
{
        SIM_ENTER(cuDevSmResourceSplitByCount);
        if (!groups || !input || input->type != CU_DEV_RESOURCE_TYPE_SM || flags || least > input->sm.smCount)
                return CUDA_ERROR_INVALID_VALUE;
        *groups = 1;
        if (result) {
                *result = *input;
                result->sm.smCount = least ? least : input->sm.smCount;
        }
        if (remaining) {
                *remaining = *input;
                remaining->sm.smCount = input->sm.smCount - (least ? least : input->sm.smCount);
        }
        return CUDA_SUCCESS;
}

SIM_API cuDevResourceGenerateDesc(CUdevResourceDesc *description, CUdevResource *resources, unsigned count)
{
        SIM_ENTER(cuDevResourceGenerateDesc);
        if (!description || !resources || !count)
                return CUDA_ERROR_INVALID_VALUE;
        *description = (CUdevResourceDesc)(void *)description_of;
        return CUDA_SUCCESS;
}

static CUcontext context_of(CUgreenCtx green)
{
        return (CUcontext)(void *)green;
}

static CUresult check_green(CUgreenCtx green)
{
        CUresult rc = sim_context_check(context_of(green));

        return rc == CUDA_SUCCESS && !context_of(green)->green_of ? CUDA_ERROR_INVALID_CONTEXT : rc;
}

/* A green context that has ended, whose handle is used again; else a new one. Lock held; NULL: no memory. */
static CUcontext find_ended(void)
{
        CUcontext ctx = greens;

        while (ctx && ctx->live)
                ctx = ctx->next;
        if (!ctx) {
                ctx = calloc(1, sizeof *ctx);
                if (!ctx)
                        return NULL;
                *ctx = (struct CUctx_st){.magic = SIM_MAGIC_CONTEXT, .next = greens};
                greens = ctx;
        }
        return ctx;
}

SIM_API cuGreenCtxCreate(CUgreenCtx *ret_green, CUdevResourceDesc description, CUdevice device, unsigned flags)
{
        CUcontext ctx, primary;
        CUresult rc;

        SIM_ENTER(cuGreenCtxCreate);
        if (!ret_green || !description || flags != CU_GREEN_CTX_DEFAULT_STREAM)
                return CUDA_ERROR_INVALID_VALUE;
        rc = sim_primary_retain(device, &primary);
        if (rc != CUDA_SUCCESS)
                return rc;
        sim_lock();
        ctx = find_ended();
        if (ctx) {
                primary->greens++;
                ctx->device = device;
                ctx->api_version = primary->api_version;
                ctx->green_of = primary;
                ctx->live = true;
        }
        sim_unlock();
        if (!ctx) {
                sim_primary_release(device);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        *ret_green = (CUgreenCtx)(void *)ctx;
        return CUDA_SUCCESS;
}

/* Its streams become unusable; work that was submitted to them goes on. */
SIM_API cuGreenCtxDestroy(CUgreenCtx green)
{
        CUcontext ctx = context_of(green);
        CUresult rc;

        SIM_ENTER(cuGreenCtxDestroy);
        sim_lock();
        rc = check_green(green);
        if (rc == CUDA_SUCCESS) {
                ctx->live = false;
                ctx->green_of->greens--;
                for (CUstream stream = ctx->green_of->streams; stream; stream = stream->next)
                        if (stream->green == ctx)
                                stream->green = &gone;
        }
        sim_unlock();
        return rc == CUDA_SUCCESS ? sim_primary_release(ctx->device) : rc;
}

SIM_API cuCtxFromGreenCtx(CUcontext *ret_ctx, CUgreenCtx green)
{
        CUresult rc;

        SIM_ENTER(cuCtxFromGreenCtx);
        if (!ret_ctx)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = check_green(green);
        sim_unlock();
        if (rc == CUDA_SUCCESS)
                *ret_ctx = context_of(green);
        return rc;
}

SIM_API cuGreenCtxStreamCreate(CUstream *ret_stream, CUgreenCtx green, unsigned flags, int priority)
{
        CUresult rc;

        SIM_ENTER(cuGreenCtxStreamCreate);
        if (!ret_stream || flags != CU_STREAM_NON_BLOCKING)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = check_green(green);
        if (rc == CUDA_SUCCESS) {
                *ret_stream = sim_stream_make(context_of(green)->green_of, flags, priority);
                rc = *ret_stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        }
        if (rc == CUDA_SUCCESS)
                (*ret_stream)->green = context_of(green);
        sim_unlock();
        return rc;
}
