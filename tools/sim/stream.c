/* Streams. A stream keeps its last node; order between streams is made by edges between nodes. */
#include "sim.h"

#include <stdlib.h>

/* Guarded by sim_lock(). */
static CUstream dead_streams;
static unsigned long long next_stream_id = 1;

/* The per-thread streams of this thread, one per context used. Retired when the thread ends. */
static _Thread_local CUstream thread_streams;
static pthread_key_t thread_key;
static pthread_once_t thread_once = PTHREAD_ONCE_INIT;

#define PER_THREAD 0x80000000u /* in stream->flags, besides the program's own */

static void thread_ends(void *first)
{
        CUstream s = first;

        sim_lock();
        while (s) {
                CUstream next = s->thread_next;

                /* The stream may have been destroyed with its context already. */
                if (s->magic == SIM_MAGIC_STREAM)
                        sim_stream_retire(s);
                s->next = dead_streams;
                dead_streams = s;
                s = next;
        }
        sim_unlock();
}

static void make_thread_key(void)
{
        if (pthread_key_create(&thread_key, thread_ends) != 0)
                abort();
}

CUstream sim_stream_make(CUcontext ctx, unsigned flags, int priority)
{
        CUstream s = dead_streams;

        if (s)
                dead_streams = s->next;
        else
                s = calloc(1, sizeof *s);
        if (!s)
                return NULL;
        *s = (struct CUstream_st){
                .magic = SIM_MAGIC_STREAM, .ctx = ctx, .flags = flags, .priority = priority, .id = next_stream_id++};
        s->next = ctx->streams;
        ctx->streams = s;
        return s;
}

void sim_stream_retire(CUstream stream)
{
        CUcontext ctx = stream->ctx;
        CUstream *at = &ctx->streams;

        sim_capture_stream_gone(stream);
        while (*at != stream)
                at = &(*at)->next;
        *at = stream->next;
        if (stream->last && !stream->last->done) {
                struct sim_node **orphans = &ctx->orphans[stream->flags & CU_STREAM_NON_BLOCKING];
                struct sim_node *both = sim_node_new(NULL);

                sim_node_after(both, *orphans);
                sim_node_after(both, stream->last);
                sim_node_start(both);
                sim_node_replace(orphans, both);
        }
        sim_node_replace(&stream->last, NULL);
        stream->magic = 0;
        /* A per-thread stream is still in the list of its thread, so it can be used again only when the thread ends. */
        if (!(stream->flags & PER_THREAD)) {
                stream->next = dead_streams;
                dead_streams = stream;
        }
}

static CUresult per_thread_stream(CUcontext ctx, CUstream *ret_stream)
{
        CUstream s;

        for (s = thread_streams; s; s = s->thread_next) {
                if (s->magic == SIM_MAGIC_STREAM && s->ctx == ctx) {
                        *ret_stream = s;
                        return CUDA_SUCCESS;
                }
        }
        s = sim_stream_make(ctx, PER_THREAD, 0);
        if (!s)
                return CUDA_ERROR_OUT_OF_MEMORY;
        pthread_once(&thread_once, make_thread_key);
        s->thread_next = thread_streams;
        thread_streams = s;
        pthread_setspecific(thread_key, thread_streams);
        *ret_stream = s;
        return CUDA_SUCCESS;
}

CUresult sim_stream_resolve(CUstream handle, CUstream *ret_stream)
{
        CUcontext ctx;
        CUresult rc;

        if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
                rc = sim_current(&ctx);
                if (rc != CUDA_SUCCESS)
                        return rc;
                if (handle == CU_STREAM_PER_THREAD)
                        return per_thread_stream(ctx, ret_stream);
                *ret_stream = ctx->legacy;
                return CUDA_SUCCESS;
        }
        if (handle->magic != SIM_MAGIC_STREAM)
                return CUDA_ERROR_INVALID_HANDLE;
        *ret_stream = handle;
        return sim_context_check(handle->green ? handle->green : handle->ctx);
}

static bool is_blocking(CUstream s)
{
        return !(s->flags & CU_STREAM_NON_BLOCKING);
}

struct sim_node *sim_stream_node(CUstream stream, const struct sim_op *op)
{
        CUcontext ctx = stream->ctx;
        struct sim_node *node = sim_node_new(op);

        sim_node_after(node, stream->last);
        sim_node_after(node, ctx->barrier);
        if (stream->green)
                sim_node_after(node, stream->green->barrier);
        if (stream == ctx->legacy) {
                sim_node_after(node, ctx->orphans[0]);
                for (CUstream s = ctx->streams; s; s = s->next) {
                        if (is_blocking(s))
                                sim_node_after(node, s->last);
                }
        } else if (is_blocking(stream)) {
                sim_node_after(node, ctx->legacy->last);
        }
        return node;
}

CUresult sim_stream_push(CUstream stream, struct sim_op *op, struct sim_node **ret_node)
{
        struct sim_node *node;
        CUresult rc = CUDA_SUCCESS;

        if (ret_node)
                *ret_node = NULL;
        if (stream->capture) {
                rc = sim_capture_push(stream, op);
                if (rc != CUDA_SUCCESS)
                        sim_op_drop(op);
                return rc;
        }
        if (stream == stream->ctx->legacy)
                rc = sim_capture_legacy(stream->ctx);
        if (rc != CUDA_SUCCESS) {
                sim_op_drop(op);
                return rc;
        }
        op->ctx = stream->ctx;
        node = sim_stream_node(stream, op);
        sim_node_start(node);
        if (ret_node)
                *ret_node = sim_node_get(node);
        sim_node_replace(&stream->last, node);
        return CUDA_SUCCESS;
}

CUresult sim_submit(CUstream handle, struct sim_op *op, bool wait)
{
        struct sim_node *node = NULL;
        CUcontext ctx;
        CUstream stream;
        CUresult rc;

        sim_lock();
        rc = sim_current(&ctx);
        if (rc == CUDA_SUCCESS)
                rc = sim_stream_resolve(handle, &stream);
        if (rc == CUDA_SUCCESS)
                rc = sim_stream_push(stream, op, wait ? &node : NULL);
        else
                sim_op_drop(op);
        if (node) {
                sim_node_wait(node);
                sim_node_put(node);
        }
        sim_unlock();
        return rc;
}

static CUresult create_stream(CUstream *ret_stream, unsigned flags, int priority)
{
        CUcontext ctx, green;
        CUresult rc;

        if (!ret_stream || (flags & ~(unsigned)CU_STREAM_NON_BLOCKING))
                return CUDA_ERROR_INVALID_VALUE;
        priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
        sim_lock();
        rc = sim_current_green(&ctx, &green);
        if (rc == CUDA_SUCCESS) {
                *ret_stream = sim_stream_make(ctx, flags, priority);
                rc = *ret_stream ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        }
        if (rc == CUDA_SUCCESS)
                (*ret_stream)->green = green;
        sim_unlock();
        return rc;
}

SIM_API cuStreamCreate(CUstream *stream, unsigned flags)
{
        SIM_ENTER(cuStreamCreate);
        return create_stream(stream, flags, 0);
}

SIM_API cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
        SIM_ENTER(cuStreamCreateWithPriority);
        return create_stream(stream, flags, priority);
}

SIM_API cuStreamDestroy_v2(CUstream stream)
{
        CUstream s;
        CUresult rc;

        SIM_ENTER(cuStreamDestroy_v2);
        if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
                return CUDA_ERROR_INVALID_HANDLE;
        sim_lock();
        rc = sim_stream_resolve(stream, &s);
        if (rc == CUDA_SUCCESS && (s == s->ctx->legacy || (s->flags & PER_THREAD)))
                rc = CUDA_ERROR_INVALID_HANDLE;
        if (rc == CUDA_SUCCESS)
                sim_stream_retire(s);
        sim_unlock();
        return rc;
}

/* Without a join: a program that polls would add one to the pending work with each call. */
static bool is_idle(CUstream stream)
{
        bool idle = !stream->last || stream->last->done;

        for (CUstream s = stream->ctx->streams; s && idle && stream == stream->ctx->legacy; s = s->next)
                idle = !is_blocking(s) || !s->last || s->last->done;
        return idle;
}

SIM_PTSZ(cuStreamQuery, (CUstream stream), (stream))
{
        CUstream s;
        CUresult rc;

        sim_lock();
        rc = sim_stream_resolve(stream, &s);
        if (rc == CUDA_SUCCESS)
                rc = sim_capture_in_stream(s);
        if (rc == CUDA_SUCCESS)
                rc = is_idle(s) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
        sim_unlock();
        return rc;
}

SIM_PTSZ(cuStreamSynchronize, (CUstream stream), (stream))
{
        struct sim_node *node;
        unsigned long long id;
        CUstream s;
        CUresult rc;

        sim_lock();
        rc = sim_stream_resolve(stream, &s);
        if (rc == CUDA_SUCCESS)
                rc = sim_capture_in_stream(s);
        if (rc == CUDA_SUCCESS) {
                node = sim_stream_node(s, NULL);
                sim_node_start(node);
                id = s->id;
                s->waiting++;
                sim_node_wait(node);
                if (s->id == id) /* else another stream has taken the place of a destroyed one */
                        s->waiting--;
                sim_node_put(node);
                sim_pool_synchronized(NULL, id);
        }
        sim_unlock();
        return rc;
}

/* The beginning of every call that only reads from a stream. Lock held on success. */
static CUresult inspect_stream(CUstream handle, const void *out, CUstream *ret_stream)
{
        CUresult rc;

        if (!out)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_stream_resolve(handle, ret_stream);
        if (rc != CUDA_SUCCESS)
                sim_unlock();
        return rc;
}

SIM_PTSZ(cuStreamGetCtx, (CUstream stream, CUcontext *ctx), (stream, ctx))
{
        CUstream s;
        CUresult rc = inspect_stream(stream, ctx, &s);

        if (rc == CUDA_SUCCESS) {
                *ctx = s->green ? s->green : s->ctx;
                sim_unlock();
        }
        return rc;
}

SIM_PTSZ(cuStreamGetFlags, (CUstream stream, unsigned *flags), (stream, flags))
{
        CUstream s;
        CUresult rc = inspect_stream(stream, flags, &s);

        if (rc == CUDA_SUCCESS) {
                *flags = s->flags & ~PER_THREAD;
                sim_unlock();
        }
        return rc;
}

SIM_PTSZ(cuStreamGetPriority, (CUstream stream, int *priority), (stream, priority))
{
        CUstream s;
        CUresult rc = inspect_stream(stream, priority, &s);

        if (rc == CUDA_SUCCESS) {
                *priority = s->priority;
                sim_unlock();
        }
        return rc;
}

SIM_PTSZ(cuStreamGetId, (CUstream stream, unsigned long long *id), (stream, id))
{
        CUstream s;
        CUresult rc = inspect_stream(stream, id, &s);

        if (rc == CUDA_SUCCESS) {
                *id = s->id;
                sim_unlock();
        }
        return rc;
}

SIM_PTSZ(cuStreamGetDevice, (CUstream stream, CUdevice *device), (stream, device))
{
        CUstream s;
        CUresult rc = inspect_stream(stream, device, &s);

        if (rc == CUDA_SUCCESS) {
                *device = s->ctx->device;
                sim_unlock();
        }
        return rc;
}

SIM_PTSZ(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags), (stream, event, flags))
{
        struct sim_node *node;
        CUstream s;
        CUresult rc;

        if (flags & ~(unsigned)CU_EVENT_WAIT_EXTERNAL)
                return CUDA_ERROR_INVALID_VALUE;
        if (!event || event->magic != SIM_MAGIC_EVENT)
                return CUDA_ERROR_INVALID_HANDLE;
        sim_lock();
        rc = sim_stream_resolve(stream, &s);
        if (rc == CUDA_SUCCESS && (s->capture || sim_capture_live(event->capture_id))) {
                rc = sim_capture_wait(s, event);
        } else if (rc == CUDA_SUCCESS) {
                if (s == s->ctx->legacy)
                        rc = sim_capture_legacy(s->ctx);
                if (rc == CUDA_SUCCESS) {
                        struct sim_op wait = {.kind = SIM_OP_WAIT_VALUE, .ctx = s->ctx};

                        if (event->shared)
                                sim_shared_event_value(event, atomic_load(&event->shared->recorded), &wait);
                        node = sim_stream_node(s, event->shared ? &wait : NULL);
                        sim_node_after(node, event->node);
                        sim_node_start(node);
                        sim_node_replace(&s->last, node);
                }
        }
        sim_unlock();
        return rc;
}

SIM_PTSZ(cuLaunchHostFunc, (CUstream stream, CUhostFn fn, void *arg), (stream, fn, arg))
{
        struct sim_op op = {.kind = SIM_OP_HOST, .u.host = {.fn = fn, .arg = arg}};

        return fn ? sim_submit(stream, &op, false) : CUDA_ERROR_INVALID_VALUE;
}

SIM_PTSZ(cuLaunchHostFunc_v2, (CUstream stream, CUhostFn fn, void *arg, unsigned mode), (stream, fn, arg, mode))
{
        return mode <= 1 ? cuLaunchHostFunc_on(stream, fn, arg) : CUDA_ERROR_INVALID_VALUE; /* wait or spin */
}

SIM_PTSZ(cuStreamAddCallback, (CUstream stream, CUstreamCallback callback, void *arg, unsigned flags),
         (stream, callback, arg, flags))
{
        struct sim_op op = {.kind = SIM_OP_CALLBACK, .u.host = {.callback = callback, .stream = stream, .arg = arg}};

        return callback && !flags ? sim_submit(stream, &op, false) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult value_op(CUstream stream, CUdeviceptr addr, uint64_t value, unsigned bytes, unsigned flags,
                         enum sim_op_kind kind)
{
        struct sim_op op = {.kind = kind, .u.value = {.addr = addr, .value = value, .bytes = bytes, .flags = flags}};

        const struct sim_alloc *alloc;

        if (!addr || addr % bytes)
                return CUDA_ERROR_INVALID_VALUE;
        sim_memory_lock();
        alloc = sim_find_locked(addr);
        sim_memory_unlock();
        return alloc ? sim_submit(stream, &op, false) : CUDA_ERROR_INVALID_VALUE;
}

#define VALUE_API(symbol, type, kind)                                                                                  \
        SIM_PTSZ(symbol, (CUstream stream, CUdeviceptr addr, type value, unsigned flags),                              \
                 (stream, addr, value, flags))                                                                         \
        {                                                                                                              \
                return value_op(stream, addr, value, sizeof value, flags, kind);                                       \
        }

VALUE_API(cuStreamWriteValue32, cuuint32_t, SIM_OP_WRITE_VALUE)
VALUE_API(cuStreamWriteValue32_v2, cuuint32_t, SIM_OP_WRITE_VALUE)
VALUE_API(cuStreamWriteValue64, cuuint64_t, SIM_OP_WRITE_VALUE)
VALUE_API(cuStreamWriteValue64_v2, cuuint64_t, SIM_OP_WRITE_VALUE)
VALUE_API(cuStreamWaitValue32, cuuint32_t, SIM_OP_WAIT_VALUE)
VALUE_API(cuStreamWaitValue32_v2, cuuint32_t, SIM_OP_WAIT_VALUE)
VALUE_API(cuStreamWaitValue64, cuuint64_t, SIM_OP_WAIT_VALUE)
VALUE_API(cuStreamWaitValue64_v2, cuuint64_t, SIM_OP_WAIT_VALUE)

/* Waits and writes only. */
SIM_PTSZ(cuStreamBatchMemOp_v2, (CUstream stream, unsigned count, CUstreamBatchMemOpParams *operations, unsigned flags),
         (stream, count, operations, flags))
{
        CUresult rc = count && operations && !flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;

        for (unsigned i = 0; i < count && rc == CUDA_SUCCESS; i++) {
                const CUstreamBatchMemOpParams *of = &operations[i];
                bool wide = of->operation == CU_STREAM_MEM_OP_WAIT_VALUE_64 ||
                            of->operation == CU_STREAM_MEM_OP_WRITE_VALUE_64;

                switch (of->operation) {
                case CU_STREAM_MEM_OP_WAIT_VALUE_32:
                case CU_STREAM_MEM_OP_WAIT_VALUE_64:
                        rc = value_op(stream, of->waitValue.address, wide ? of->waitValue.value64 : of->waitValue.value,
                                      wide ? 8 : 4, of->waitValue.flags, SIM_OP_WAIT_VALUE);
                        break;
                case CU_STREAM_MEM_OP_WRITE_VALUE_32:
                case CU_STREAM_MEM_OP_WRITE_VALUE_64:
                        rc = value_op(stream, of->writeValue.address,
                                      wide ? of->writeValue.value64 : of->writeValue.value, wide ? 8 : 4,
                                      of->writeValue.flags, SIM_OP_WRITE_VALUE);
                        break;
                default:
                        rc = CUDA_ERROR_NOT_SUPPORTED;
                }
        }
        return rc;
}
