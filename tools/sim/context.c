/*
 * Contexts: primary ones and those that the program creates, each thread's stack of contexts, and operations on all
 * work of a context.
 */
#include "sim.h"

#include <stdlib.h>

#define STACK_DEPTH 64

/* Guarded by sim_lock(). */
static struct CUctx_st primary[SIM_MAX_DEVICES];
static CUcontext live_contexts, dead_contexts;
static unsigned long long next_context_id = 1;

static _Thread_local struct {
        CUcontext stack[STACK_DEPTH];
        int depth;
} thread;

CUcontext sim_contexts(void)
{
        return live_contexts;
}

CUresult sim_context_check(CUcontext ctx)
{
        if (!ctx || ctx->magic != SIM_MAGIC_CONTEXT)
                return CUDA_ERROR_INVALID_CONTEXT;
        return ctx->live ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult sim_current_green(CUcontext *ret_ctx, CUcontext *ret_green)
{
        CUcontext ctx = thread.depth ? thread.stack[thread.depth - 1] : NULL;
        CUresult rc = sim_context_check(ctx);

        if (rc == CUDA_SUCCESS) {
                *ret_ctx = sim_context_owner(ctx);
                *ret_green = ctx->green_of ? ctx : NULL;
        }
        return rc;
}

CUresult sim_current(CUcontext *ret_ctx)
{
        CUcontext green;

        return sim_current_green(ret_ctx, &green);
}

enum { STACK_BYTES = 1024 }; /* of a thread, at the start */

/* What the stacks of all threads take beyond those that a context begins with. */
static size_t stack_memory(size_t stack_bytes)
{
        return stack_bytes > STACK_BYTES ? (stack_bytes - STACK_BYTES) * SIM_RESIDENT_THREADS : 0;
}

static void bring_up(CUcontext ctx, int device, unsigned flags, unsigned version)
{
        ctx->magic = SIM_MAGIC_CONTEXT;
        ctx->device = device;
        ctx->flags = flags;
        ctx->cig = false;
        ctx->api_version = version;
        ctx->peers = 0;
        ctx->id = next_context_id++;
        ctx->stack_bytes = STACK_BYTES;
        ctx->live = true;
        ctx->next = live_contexts;
        live_contexts = ctx;
        ctx->legacy = sim_stream_make(ctx, 0, 0);
}

/* Waits for the context's work, without the lock meanwhile, then destroys everything in it. */
static void tear_down(CUcontext ctx)
{
        struct sim_node *all = sim_context_join(ctx);
        CUcontext *at = &live_contexts;

        ctx->live = false;
        ctx->ending = true;
        sim_node_wait(all);
        sim_node_put(all);
        sim_pool_synchronized(ctx, 0);
        ctx->ending = false;
        /* While the context is in the list: a capture that ends with its stream looks there for its other streams. */
        while (ctx->streams)
                sim_stream_retire(ctx->streams);
        while (*at != ctx)
                at = &(*at)->next;
        *at = ctx->next;
        ctx->legacy = NULL;
        sim_node_replace(&ctx->barrier, NULL);
        sim_node_replace(&ctx->orphans[0], NULL);
        sim_node_replace(&ctx->orphans[1], NULL);
        sim_event_forget_context(ctx);
        sim_heap_free_context(ctx);
        sim_ipc_close_context(ctx);
        sim_heap_uncharge(ctx->device, sim_config()->context_bytes);
        sim_heap_uncharge(ctx->device, stack_memory(ctx->stack_bytes));
        sim_graph_forget_context(ctx);
        sim_arrays_forget_context(ctx);
}

struct sim_node *sim_context_join(CUcontext ctx)
{
        struct sim_node *all = sim_node_new(NULL);
        CUcontext owner = sim_context_owner(ctx);

        for (CUstream s = owner->streams; s; s = s->next)
                if (owner == ctx || s->green == ctx)
                        sim_node_after(all, s->last);
        sim_node_after(all, owner->orphans[0]);
        sim_node_after(all, owner->orphans[1]);
        sim_node_start(all);
        return all;
}

CUresult sim_primary_retain(CUdevice device, CUcontext *ret_ctx)
{
        if (!ret_ctx)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        sim_lock();
        if (!primary[device].live && !sim_heap_charge(device, sim_config()->context_bytes)) {
                sim_unlock();
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        if (!primary[device].live) {
                primary[device].primary = true;
                bring_up(&primary[device], device, primary[device].flags, SIM_DRIVER);
        }
        primary[device].retained++;
        *ret_ctx = &primary[device];
        sim_unlock();
        return CUDA_SUCCESS;
}

SIM_API cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice device)
{
        SIM_ENTER(cuDevicePrimaryCtxRetain);
        return sim_primary_retain(device, ctx);
}

CUresult sim_primary_release(CUdevice device)
{
        CUresult rc = CUDA_SUCCESS;

        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        sim_lock();
        if (primary[device].retained == 0)
                rc = CUDA_ERROR_INVALID_CONTEXT;
        else if (--primary[device].retained == 0 && primary[device].live)
                tear_down(&primary[device]);
        sim_unlock();
        return rc;
}

static CUresult primary_reset(CUdevice device)
{
        CUresult rc = CUDA_SUCCESS;

        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        sim_lock();
        if (primary[device].greens > 0) {
                rc = CUDA_ERROR_NOT_PERMITTED; /* measured, driver 580 */
        } else if (primary[device].live) {
                tear_down(&primary[device]); /* its count of retains stays as it was (measured, driver 580) */
        }
        sim_unlock();
        return rc;
}

static CUresult primary_set_flags(CUdevice device, unsigned flags)
{
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        if (flags & ~(unsigned)CU_CTX_FLAGS_MASK)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        primary[device].flags = flags;
        sim_unlock();
        return CUDA_SUCCESS;
}

SIM_API cuDevicePrimaryCtxRelease(CUdevice device)
{
        SIM_ENTER(cuDevicePrimaryCtxRelease);
        return sim_primary_release(device);
}

SIM_API cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
        SIM_ENTER(cuDevicePrimaryCtxRelease_v2);
        return sim_primary_release(device);
}

SIM_API cuDevicePrimaryCtxReset(CUdevice device)
{
        SIM_ENTER(cuDevicePrimaryCtxReset);
        return primary_reset(device);
}

SIM_API cuDevicePrimaryCtxReset_v2(CUdevice device)
{
        SIM_ENTER(cuDevicePrimaryCtxReset_v2);
        return primary_reset(device);
}

SIM_API cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned flags)
{
        SIM_ENTER(cuDevicePrimaryCtxSetFlags);
        return primary_set_flags(device, flags);
}

SIM_API cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags)
{
        SIM_ENTER(cuDevicePrimaryCtxSetFlags_v2);
        return primary_set_flags(device, flags);
}

SIM_API cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
        SIM_ENTER(cuDevicePrimaryCtxGetState);
        if (!flags || !active)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        sim_lock();
        *flags = primary[device].flags;
        *active = primary[device].live;
        sim_unlock();
        return CUDA_SUCCESS;
}

static CUresult create_context(CUcontext *ret_ctx, unsigned flags, CUdevice device, unsigned version)
{
        CUcontext ctx;

        if (!ret_ctx || (flags & ~(unsigned)CU_CTX_FLAGS_MASK))
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        if (thread.depth == STACK_DEPTH)
                return CUDA_ERROR_OUT_OF_MEMORY;
        sim_lock();
        if (!sim_heap_charge(device, sim_config()->context_bytes)) {
                sim_unlock();
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        ctx = dead_contexts;
        if (ctx)
                dead_contexts = ctx->next;
        else
                ctx = calloc(1, sizeof *ctx);
        if (!ctx)
                sim_heap_uncharge(device, sim_config()->context_bytes);
        if (ctx) {
                bring_up(ctx, device, flags, version);
                thread.stack[thread.depth++] = ctx;
                *ret_ctx = ctx;
        }
        sim_unlock();
        return ctx ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

SIM_API cuCtxCreate(CUcontext *ctx, unsigned flags, CUdevice device)
{
        SIM_ENTER(cuCtxCreate);
        return create_context(ctx, flags, device, 3010);
}

SIM_API cuCtxCreate_v2(CUcontext *ctx, unsigned flags, CUdevice device)
{
        SIM_ENTER(cuCtxCreate_v2);
        return create_context(ctx, flags, device, 3020);
}

SIM_API cuCtxCreate_v3(CUcontext *ctx, CUexecAffinityParam *affinity, int n, unsigned flags, CUdevice device)
{
        SIM_ENTER(cuCtxCreate_v3);
        if (affinity || n)
                return CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY;
        return create_context(ctx, flags, device, 3020);
}

SIM_API cuCtxCreate_v4(CUcontext *ctx, CUctxCreateParams *params, unsigned flags, CUdevice device)
{
        CUresult rc;

        SIM_ENTER(cuCtxCreate_v4);
        if (params && (!params->cigParams || params->execAffinityParams))
                return CUDA_ERROR_NOT_SUPPORTED;
        rc = create_context(ctx, flags, device, 3020);
        if (rc == CUDA_SUCCESS)
                (*ctx)->cig = params != NULL;
        return rc;
}

SIM_API cuGLCtxCreate_v2(CUcontext *ctx, unsigned flags, CUdevice device)
{
        SIM_ENTER(cuGLCtxCreate_v2);
        return create_context(ctx, flags, device, 3020);
}

SIM_API cuCtxAttach(CUcontext *ret_ctx, unsigned flags)
{
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuCtxAttach);
        if (!ret_ctx || flags)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_context_given(NULL, &ctx);
        if (rc == CUDA_SUCCESS && (ctx->primary || ctx->green_of))
                rc = CUDA_ERROR_INVALID_CONTEXT;
        if (rc == CUDA_SUCCESS) {
                ctx->retained++;
                *ret_ctx = ctx;
        }
        sim_unlock();
        return rc;
}

/* counted: each attach makes one call without effect; only the last call destroys. */
static CUresult destroy_context(CUcontext ctx, bool counted)
{
        CUresult rc;

        sim_lock();
        rc = sim_context_check(ctx);
        if (rc == CUDA_SUCCESS && (ctx->primary || ctx->green_of))
                rc = CUDA_ERROR_INVALID_CONTEXT;
        if (rc == CUDA_SUCCESS && counted && ctx->retained > 0) {
                ctx->retained--;
        } else if (rc == CUDA_SUCCESS) {
                tear_down(ctx);
                ctx->retained = 0;
                if (thread.depth && thread.stack[thread.depth - 1] == ctx)
                        thread.depth--;
                ctx->next = dead_contexts;
                dead_contexts = ctx;
        }
        sim_unlock();
        return rc;
}

SIM_API cuCtxDestroy(CUcontext ctx)
{
        SIM_ENTER(cuCtxDestroy);
        return destroy_context(ctx, false);
}

SIM_API cuCtxDestroy_v2(CUcontext ctx)
{
        SIM_ENTER(cuCtxDestroy_v2);
        return destroy_context(ctx, false);
}

SIM_API cuCtxDetach(CUcontext ctx)
{
        SIM_ENTER(cuCtxDetach);
        return destroy_context(ctx, true);
}

static CUresult push_context(CUcontext ctx)
{
        CUresult rc;

        if (!ctx)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_context_check(ctx);
        if (rc == CUDA_SUCCESS && thread.depth == STACK_DEPTH)
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        if (rc == CUDA_SUCCESS)
                thread.stack[thread.depth++] = ctx;
        sim_unlock();
        return rc;
}

SIM_API cuCtxPushCurrent(CUcontext ctx)
{
        SIM_ENTER(cuCtxPushCurrent);
        return push_context(ctx);
}

SIM_API cuCtxPushCurrent_v2(CUcontext ctx)
{
        SIM_ENTER(cuCtxPushCurrent_v2);
        return push_context(ctx);
}

static CUresult pop_context(CUcontext *ret_ctx)
{
        if (thread.depth == 0)
                return CUDA_ERROR_INVALID_CONTEXT;
        thread.depth--;
        if (ret_ctx)
                *ret_ctx = thread.stack[thread.depth];
        return CUDA_SUCCESS;
}

SIM_API cuCtxPopCurrent(CUcontext *ret_ctx)
{
        SIM_ENTER(cuCtxPopCurrent);
        return pop_context(ret_ctx);
}

SIM_API cuCtxPopCurrent_v2(CUcontext *ret_ctx)
{
        SIM_ENTER(cuCtxPopCurrent_v2);
        return pop_context(ret_ctx);
}

SIM_API cuCtxSetCurrent(CUcontext ctx)
{
        CUresult rc = CUDA_SUCCESS;

        SIM_ENTER(cuCtxSetCurrent);
        if (!ctx) {
                thread.depth -= thread.depth > 0;
                return CUDA_SUCCESS;
        }
        sim_lock();
        rc = sim_context_check(ctx);
        sim_unlock();
        if (rc != CUDA_SUCCESS)
                return rc;
        if (thread.depth == 0)
                thread.depth = 1;
        thread.stack[thread.depth - 1] = ctx;
        return CUDA_SUCCESS;
}

SIM_API cuCtxGetCurrent(CUcontext *ret_ctx)
{
        SIM_ENTER(cuCtxGetCurrent);
        if (!ret_ctx)
                return CUDA_ERROR_INVALID_VALUE;
        *ret_ctx = thread.depth ? thread.stack[thread.depth - 1] : NULL;
        return CUDA_SUCCESS;
}

CUresult sim_context_given(CUcontext given, CUcontext *ret_ctx)
{
        CUresult rc;

        if (!given)
                given = thread.depth ? thread.stack[thread.depth - 1] : NULL;
        rc = sim_context_check(given);
        if (rc == CUDA_SUCCESS)
                *ret_ctx = given;
        else if (rc == CUDA_ERROR_CONTEXT_IS_DESTROYED && given->ending)
                sim_misuse("a call about a context beside its end, which crashes a driver");
        return rc;
}

static CUresult get_device(CUdevice *device, CUcontext given)
{
        CUcontext ctx;
        CUresult rc;

        if (!device)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_context_given(given, &ctx);
        if (rc == CUDA_SUCCESS)
                *device = ctx->device;
        sim_unlock();
        return rc;
}

SIM_API cuCtxGetDevice(CUdevice *device)
{
        SIM_ENTER(cuCtxGetDevice);
        return get_device(device, NULL);
}

SIM_API cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx)
{
        SIM_ENTER(cuCtxGetDevice_v2);
        return get_device(device, ctx);
}

SIM_API cuCtxGetId(CUcontext given, unsigned long long *id)
{
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuCtxGetId);
        if (!id)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_context_given(given, &ctx);
        if (rc == CUDA_SUCCESS)
                *id = ctx->id;
        sim_unlock();
        return rc;
}

SIM_API cuCtxGetApiVersion(CUcontext given, unsigned *version)
{
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuCtxGetApiVersion);
        if (!version)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_context_given(given, &ctx);
        if (rc == CUDA_SUCCESS)
                *version = ctx->api_version;
        sim_unlock();
        return rc;
}

SIM_API cuCtxGetFlags(unsigned *flags)
{
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuCtxGetFlags);
        if (!flags)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS)
                *flags = ctx->flags;
        sim_unlock();
        return rc;
}

SIM_API cuCtxSetFlags(unsigned flags)
{
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuCtxSetFlags);
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS)
                ctx->flags = flags;
        sim_unlock();
        return rc;
}

static CUresult peer_access(CUcontext peer, bool enable)
{
        CUcontext ctx;
        CUresult rc;

        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS)
                rc = sim_context_check(peer);
        if (rc == CUDA_SUCCESS) {
                unsigned bit = 1u << peer->device;

                if (peer->device == ctx->device)
                        rc = enable ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
                else if (enable && (ctx->peers & bit))
                        rc = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
                else if (!enable && !(ctx->peers & bit))
                        rc = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
                else
                        ctx->peers ^= bit;
        }
        sim_unlock();
        return rc;
}

SIM_API cuCtxEnablePeerAccess(CUcontext peer, unsigned flags)
{
        SIM_ENTER(cuCtxEnablePeerAccess);
        return flags ? CUDA_ERROR_INVALID_VALUE : peer_access(peer, true);
}

SIM_API cuCtxDisablePeerAccess(CUcontext peer)
{
        SIM_ENTER(cuCtxDisablePeerAccess);
        return peer_access(peer, false);
}

SIM_API cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
        SIM_ENTER(cuCtxGetStreamPriorityRange);
        if (least)
                *least = 0;
        if (greatest)
                *greatest = -5;
        return CUDA_SUCCESS;
}

SIM_API cuCtxGetLimit(size_t *value, CUlimit limit)
{
        SIM_ENTER(cuCtxGetLimit);
        CUcontext ctx;
        CUresult rc;

        if (!value)
                return CUDA_ERROR_INVALID_VALUE;
        if (limit < 0 || limit >= CU_LIMIT_MAX)
                return CUDA_ERROR_UNSUPPORTED_LIMIT;
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS)
                *value = limit == CU_LIMIT_STACK_SIZE         ? ctx->stack_bytes
                         : limit == CU_LIMIT_MALLOC_HEAP_SIZE ? (size_t)8 << 20
                                                              : 0;
        sim_unlock();
        return rc;
}

SIM_API cuCtxSetLimit(CUlimit limit, size_t value)
{
        SIM_ENTER(cuCtxSetLimit);
        CUcontext ctx;
        CUresult rc;

        if (limit < 0 || limit >= CU_LIMIT_MAX)
                return CUDA_ERROR_UNSUPPORTED_LIMIT;
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS && limit == CU_LIMIT_STACK_SIZE) {
                sim_heap_uncharge(ctx->device, stack_memory(ctx->stack_bytes));
                if (!sim_heap_charge(ctx->device, stack_memory(value))) {
                        rc = CUDA_ERROR_OUT_OF_MEMORY;
                        value = STACK_BYTES; /* as the driver, which has given the old ones back by then */
                }
                ctx->stack_bytes = value;
        }
        sim_unlock();
        return rc;
}

SIM_API cuCtxGetCacheConfig(CUfunc_cache *config)
{
        SIM_ENTER(cuCtxGetCacheConfig);
        if (!config)
                return CUDA_ERROR_INVALID_VALUE;
        *config = CU_FUNC_CACHE_PREFER_NONE;
        return CUDA_SUCCESS;
}

SIM_API cuCtxSetCacheConfig(CUfunc_cache config)
{
        SIM_ENTER(cuCtxSetCacheConfig);
        (void)config;
        return CUDA_SUCCESS;
}
