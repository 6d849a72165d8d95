/* Events, recorded in streams or for all work of a context, and waiting for a context as a whole. */
#include "sim.h"

#include <stdlib.h>
#include <unistd.h>

/* Guarded by sim_lock(). In a list, so that the end of a context finds its events. */
static CUevent live_events, dead_events;

SIM_API cuEventCreate(CUevent *ret_event, unsigned flags)
{
        CUcontext ctx;
        CUevent e;
        CUresult rc;

        SIM_ENTER(cuEventCreate);
        if (!ret_event || (flags & ~7u) || ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)))
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS) {
                e = dead_events;
                if (e)
                        dead_events = e->next;
                else
                        e = calloc(1, sizeof *e);
                if (e) {
                        *e = (struct CUevent_st){
                                .magic = SIM_MAGIC_EVENT, .ctx = ctx, .flags = flags, .next = live_events};
                        live_events = e;
                        *ret_event = e;
                } else {
                        rc = CUDA_ERROR_OUT_OF_MEMORY;
                }
        }
        sim_unlock();
        return rc;
}

static void forget_event(CUevent *at)
{
        CUevent e = *at;

        *at = e->next;
        if (e->shared && e->file >= 0)
                close(e->file);
        e->magic = 0;
        sim_node_replace(&e->node, NULL);
        sim_frontier_clear(&e->frontier);
        e->next = dead_events;
        dead_events = e;
}

void sim_event_forget_context(CUcontext ctx)
{
        CUevent *at = &live_events;

        while (*at) {
                if ((*at)->ctx == ctx)
                        forget_event(at);
                else
                        at = &(*at)->next;
        }
}

SIM_API cuEventDestroy_v2(CUevent event)
{
        CUevent *at;

        SIM_ENTER(cuEventDestroy_v2);
        if (!event || event->magic != SIM_MAGIC_EVENT)
                return CUDA_ERROR_INVALID_HANDLE;
        sim_lock();
        for (at = &live_events; *at && *at != event;)
                at = &(*at)->next;
        if (*at)
                forget_event(at);
        sim_unlock();
        return CUDA_SUCCESS;
}

void sim_shared_event_value(CUevent event, uint64_t record, struct sim_op *op)
{
        op->u.value.addr = (uintptr_t)&event->shared->passed;
        op->u.value.value = record;
        op->u.value.bytes = sizeof event->shared->passed;
        op->u.value.flags = CU_STREAM_WAIT_VALUE_GEQ;
        op->u.value.of_event = true;
}

static CUresult record_event(CUevent event, CUstream handle, unsigned flags)
{
        struct sim_node *node;
        CUstream s;
        CUresult rc;

        if (flags & ~(unsigned)CU_EVENT_RECORD_EXTERNAL)
                return CUDA_ERROR_INVALID_VALUE;
        if (!event || event->magic != SIM_MAGIC_EVENT)
                return CUDA_ERROR_INVALID_HANDLE;
        sim_lock();
        rc = sim_stream_resolve(handle, &s);
        if (rc == CUDA_SUCCESS && s->ctx != event->ctx)
                rc = CUDA_ERROR_INVALID_HANDLE;
        if (rc == CUDA_SUCCESS && s->capture) {
                rc = sim_capture_record(s, event);
        } else if (rc == CUDA_SUCCESS) {
                if (s == s->ctx->legacy)
                        rc = sim_capture_legacy(s->ctx);
                if (rc == CUDA_SUCCESS) {
                        struct sim_op passed = {.kind = SIM_OP_WRITE_VALUE, .ctx = s->ctx};

                        if (event->shared)
                                sim_shared_event_value(event, atomic_fetch_add(&event->shared->recorded, 1) + 1,
                                                       &passed);
                        event->capture_id = 0;
                        sim_frontier_clear(&event->frontier);
                        node = sim_stream_node(s, event->shared ? &passed : NULL);
                        sim_node_start(node);
                        sim_node_replace(&event->node, sim_node_get(node));
                        event->stream = s->id;
                        sim_node_replace(&s->last, node);
                }
        }
        sim_unlock();
        return rc;
}

SIM_PTSZ(cuEventRecord, (CUevent event, CUstream stream), (event, stream))
{
        return record_event(event, stream, 0);
}

SIM_PTSZ(cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned flags), (event, stream, flags))
{
        return record_event(event, stream, flags);
}

/* The event's node, or NULL if it was never recorded. Lock held on success. */
static CUresult inspect_event(CUevent event)
{
        CUresult rc;

        if (!event || event->magic != SIM_MAGIC_EVENT)
                return CUDA_ERROR_INVALID_HANDLE;
        sim_lock();
        rc = sim_capture_ask(event);
        if (rc == CUDA_SUCCESS)
                rc = sim_capture_unsafe();
        if (rc != CUDA_SUCCESS)
                sim_unlock();
        return rc;
}

SIM_API cuEventQuery(CUevent event)
{
        CUresult rc;

        SIM_ENTER(cuEventQuery);
        rc = inspect_event(event);
        if (rc == CUDA_SUCCESS) {
                rc = !event->node || event->node->done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
                sim_unlock();
        }
        return rc;
}

SIM_API cuEventSynchronize(CUevent event)
{
        CUresult rc;

        SIM_ENTER(cuEventSynchronize);
        rc = inspect_event(event);
        if (rc == CUDA_SUCCESS) {
                if (event->node)
                        sim_node_wait(event->node);
                sim_pool_synchronized(NULL, event->stream);
                sim_unlock();
        }
        return rc;
}

static CUresult elapsed_ms(float *ms, CUevent start, CUevent end)
{
        CUresult rc = CUDA_SUCCESS;

        if (!ms)
                return CUDA_ERROR_INVALID_VALUE;
        if (!start || !end || start->magic != SIM_MAGIC_EVENT || end->magic != SIM_MAGIC_EVENT)
                return CUDA_ERROR_INVALID_HANDLE;
        sim_lock();
        if (!start->node || !end->node || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING))
                rc = CUDA_ERROR_INVALID_HANDLE;
        else if (!start->node->done || !end->node->done)
                rc = CUDA_ERROR_NOT_READY;
        else
                *ms = (float)((double)((int64_t)(end->node->done_ns - start->node->done_ns)) / 1e6);
        sim_unlock();
        return rc;
}

SIM_API cuEventElapsedTime(float *ms, CUevent start, CUevent end)
{
        SIM_ENTER(cuEventElapsedTime);
        return elapsed_ms(ms, start, end);
}

SIM_API cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end)
{
        SIM_ENTER(cuEventElapsedTime_v2);
        return elapsed_ms(ms, start, end);
}

static CUresult synchronize_context(CUcontext given)
{
        CUcontext ctx;
        CUresult rc;

        sim_lock();
        rc = sim_context_given(given, &ctx);
        if (rc == CUDA_SUCCESS)
                rc = sim_capture_in_context(sim_context_owner(ctx));
        if (rc == CUDA_SUCCESS) {
                struct sim_node *all = sim_context_join(ctx);

                sim_node_wait(all);
                sim_node_put(all);
                sim_pool_synchronized(sim_context_owner(ctx), 0);
        }
        sim_unlock();
        return rc;
}

SIM_API cuCtxSynchronize(void)
{
        SIM_ENTER(cuCtxSynchronize);
        return synchronize_context(NULL);
}

SIM_API cuCtxSynchronize_v2(CUcontext ctx)
{
        SIM_ENTER(cuCtxSynchronize_v2);
        return synchronize_context(ctx);
}

SIM_API cuCtxRecordEvent(CUcontext given, CUevent event)
{
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuCtxRecordEvent);
        if (!event || event->magic != SIM_MAGIC_EVENT)
                return CUDA_ERROR_INVALID_HANDLE;
        sim_lock();
        rc = given ? sim_context_given(given, &ctx) : CUDA_ERROR_INVALID_CONTEXT;
        if (rc == CUDA_SUCCESS && event->ctx != sim_context_owner(ctx))
                rc = CUDA_ERROR_INVALID_HANDLE;
        if (rc == CUDA_SUCCESS)
                rc = sim_capture_in_context(sim_context_owner(ctx));
        if (rc == CUDA_SUCCESS) {
                sim_frontier_clear(&event->frontier);
                event->capture_id = 0;
                sim_node_replace(&event->node, sim_context_join(ctx));
                event->stream = 0;
        }
        sim_unlock();
        return rc;
}

SIM_API cuCtxWaitEvent(CUcontext given, CUevent event)
{
        CUcontext ctx;
        CUresult rc;

        SIM_ENTER(cuCtxWaitEvent);
        if (!event || event->magic != SIM_MAGIC_EVENT)
                return CUDA_ERROR_INVALID_HANDLE;
        sim_lock();
        rc = sim_context_given(given, &ctx);
        if (rc == CUDA_SUCCESS)
                rc = sim_capture_in_context(sim_context_owner(ctx));
        if (rc == CUDA_SUCCESS && sim_capture_live(event->capture_id))
                rc = sim_capture_in_context(event->ctx);
        if (rc == CUDA_SUCCESS) {
                struct sim_node *barrier = sim_node_new(NULL);

                sim_node_after(barrier, ctx->barrier);
                sim_node_after(barrier, event->node);
                sim_node_start(barrier);
                sim_node_replace(&ctx->barrier, barrier);
        }
        sim_unlock();
        return rc;
}
