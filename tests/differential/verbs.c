/* The verbs of contexts, streams, events, captures and pools. */
#include "program.h"

/* ---- verbs: contexts ---- */

void run_context(struct op *op)
{
        CUcontext handle;
        CUresult result;

        result = cuCtxCreate(&handle, NULL, 0, (CUdevice)op->arg[1]);
        if (result == CUDA_SUCCESS)
                new_context((int)op->arg[0], handle, (int)op->arg[1]);
        say_code(op, result);
}

void run_use(struct op *op)
{
        say_code(op, cuCtxSetCurrent(contexts[op->arg[0]].handle));
}

void run_destroy(struct op *op)
{
        struct context *c = &contexts[op->arg[0]];
        unsigned different = 0;
        CUresult result;

        if (op->arg[1])
                different = different_in((int)op->arg[0]);
        result = cuCtxDestroy(c->handle);
        if (result == CUDA_SUCCESS)
                lose_context((int)op->arg[0]);
        say(op, "%d, %u different", (int)result, different);
}

void run_attach(struct op *op)
{
        struct context *c = &contexts[op->arg[0]];
        CUcontext handle = NULL;
        CUresult result;

        if (!enter((int)op->arg[0])) {
                say(op, "skip");
                return;
        }
        result = ctx_attach(&handle, 0);
        leave();
        c->attached += result == CUDA_SUCCESS;
        say(op, "%d, that one %d", (int)result, handle == c->handle);
}

void run_detach(struct op *op)
{
        struct context *c = &contexts[op->arg[0]];
        CUresult result = ctx_detach(c->handle);

        if (result == CUDA_SUCCESS && c->attached-- == 0)
                lose_context((int)op->arg[0]);
        say_code(op, result);
}

void run_retain(struct op *op)
{
        CUcontext handle;
        CUresult result = cuDevicePrimaryCtxRetain(&handle, 0);

        contexts[0].retained += result == CUDA_SUCCESS;
        if (result == CUDA_SUCCESS && !contexts[0].live)
                new_context(0, handle, 0);
        say_code(op, result);
}

void run_release(struct op *op)
{
        CUresult result = cuDevicePrimaryCtxRelease(0);

        if (result == CUDA_SUCCESS && --contexts[0].retained == 0)
                lose_context(0);
        say_code(op, result);
}

void run_reset(struct op *op)
{
        CUresult result = cuDevicePrimaryCtxReset(0);

        if (result == CUDA_SUCCESS)
                lose_context(0);
        say_code(op, result);
}

void run_sync(struct op *op)
{
        CUresult result = cuCtxSynchronize();

        if (result == CUDA_SUCCESS)
                late_bytes = 0;
        say_code(op, result);
}

/* ---- verbs: streams, events, captures ---- */

void run_stream(struct op *op)
{
        struct stream *s = &streams[op->arg[0]];
        CUresult result;

        *s = (struct stream){.context = current(), .made = ++n_made};
        result = cuStreamCreate(&s->handle, (unsigned)op->arg[1]);
        s->live = result == CUDA_SUCCESS;
        say_code(op, result);
}

void run_stream_destroy(struct op *op)
{
        struct stream *s = &streams[op->arg[0]];
        int capture = s->capture;
        CUresult result = cuStreamDestroy(s->handle);

        if (result == CUDA_SUCCESS) {
                s->live = false;
                s->capture = 0;
                if (capture && captures[capture].stream == op->arg[0])
                        lose_capture(capture);
        }
        say_code(op, result);
}

void run_stream_sync(struct op *op)
{
        say_code(op, cuStreamSynchronize(handle_of((int)op->arg[0])));
}

void run_stream_query(struct op *op)
{
        say_code(op, cuStreamQuery(handle_of((int)op->arg[0])));
}

void run_spin(struct op *op)
{
        int s = (int)op->arg[0];
        bool elsewhere = s > OWN && enter(streams[s].context);

        say_code(op, gt_spin(&gt, handle_of(s), (uint64_t)op->arg[1]));
        if (elsewhere)
                leave();
}

void run_capturing(struct op *op)
{
        CUstreamCaptureStatus status = 7;
        CUresult result = cuStreamIsCapturing(handle_of((int)op->arg[0]), &status);

        say(op, "%d %d", (int)result, (int)status);
}

void run_event(struct op *op)
{
        struct event *e = &events[op->arg[0]];
        CUresult result;

        *e = (struct event){.context = current()};
        result = cuEventCreate(&e->handle, CU_EVENT_DISABLE_TIMING);
        e->live = result == CUDA_SUCCESS;
        say_code(op, result);
}

void run_event_destroy(struct op *op)
{
        CUresult result = cuEventDestroy(events[op->arg[0]].handle);

        events[op->arg[0]].live = result != CUDA_SUCCESS;
        say_code(op, result);
}

void run_record(struct op *op)
{
        CUresult result = cuEventRecord(events[op->arg[0]].handle, handle_of((int)op->arg[1]));

        if (result == CUDA_SUCCESS)
                events[op->arg[0]].capture = capture_of((int)op->arg[1]);
        say_code(op, result);
}

void run_wait(struct op *op)
{
        int s = (int)op->arg[0], capture = events[op->arg[1]].capture;
        CUresult result = cuStreamWaitEvent(handle_of(s), events[op->arg[1]].handle, 0);

        if (result == CUDA_SUCCESS && s > OWN && captures[capture].open && !streams[s].capture)
                streams[s].capture = capture;
        say_code(op, result);
}

void run_event_sync(struct op *op)
{
        say_code(op, cuEventSynchronize(events[op->arg[0]].handle));
}

void run_event_query(struct op *op)
{
        say_code(op, cuEventQuery(events[op->arg[0]].handle));
}

void run_begin(struct op *op)
{
        int s = (int)op->arg[0];
        CUresult result = cuStreamBeginCapture(handle_of(s), (CUstreamCaptureMode)op->arg[1]);

        if (result == CUDA_SUCCESS) {
                int capture = n_captures++;

                captures[capture].open = true;
                captures[capture].stream = s;
                captures[capture].context = streams[s].context;
                captures[capture].strict = op->arg[1] != CU_STREAM_CAPTURE_MODE_RELAXED;
                strict_captures += captures[capture].strict;
                open_captures++;
                streams[s].capture = capture;
        }
        say_code(op, result);
}

void run_end(struct op *op)
{
        struct stream *s = &streams[op->arg[0]];
        struct graph *g = &graphs[op->arg[1]];
        int capture = s->capture;
        CUgraph handle = NULL;
        CUresult result;

        /* What the graph allocated it frees: the first stream has to know of it all, and a fork may not. */
        for (int i = 0; capture && i < SLOTS; i++)
                if (memories[i].live && memories[i].kind == OF_GRAPH && memories[i].capture == capture) {
                        cuMemFreeAsync(memories[i].at, handle_of(memories[i].home));
                        memories[i].live = false;
                }
        result = cuStreamEndCapture(s->handle, &handle);
        if (g->live)
                GR_MUST(cuGraphDestroy(g->handle));
        *g = (struct graph){.handle = handle, .live = handle != NULL, .stream = (int)op->arg[0], .context = s->context};
        if (capture)
                g->fills = captures[capture].fills;
        if (result != CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
                lose_capture(capture);
        say(op, "%d%s", (int)result, handle ? ", a graph" : "");
}

void run_mode(struct op *op)
{
        CUstreamCaptureMode mode = (CUstreamCaptureMode)op->arg[0];
        CUresult result = cuThreadExchangeStreamCaptureMode(&mode);

        say(op, "%d %d", (int)result, (int)mode);
}

void run_instantiate(struct op *op)
{
        struct graph *x = &execs[op->arg[0]], *g = &graphs[op->arg[1]];
        CUresult result;

        if (x->live)
                GR_MUST(cuGraphExecDestroy(x->exec));
        *x = *g;
        result = cuGraphInstantiate(&x->exec, g->handle, (unsigned long long)op->arg[2]);
        x->live = result == CUDA_SUCCESS;
        say_code(op, result);
}

void run_launch(struct op *op)
{
        struct graph *x = &execs[op->arg[0]];
        CUresult result;

        for (int i = 0; i < x->fills.count; i++)
                if (!memories[x->fills.memory[i]].live || memories[x->fills.memory[i]].made != x->fills.made[i])
                        x->live = false;
        if (!x->live || !streams[x->stream].live || streams[x->stream].context != x->context || capture_of(x->stream) ||
            !enter(x->context)) {
                say(op, "skip");
                return;
        }
        result = cuGraphLaunch(x->exec, handle_of(x->stream));
        leave();
        for (int i = 0; result == CUDA_SUCCESS && i < x->fills.count; i++) {
                memories[x->fills.memory[i]].known = x->fills.last[i];
                memories[x->fills.memory[i]].value = x->fills.value[i];
        }
        say_code(op, result);
}

void run_graph_destroy(struct op *op)
{
        CUresult result = cuGraphDestroy(graphs[op->arg[0]].handle);

        graphs[op->arg[0]].live = result != CUDA_SUCCESS;
        say_code(op, result);
}

void run_exec_destroy(struct op *op)
{
        CUresult result = cuGraphExecDestroy(execs[op->arg[0]].exec);

        execs[op->arg[0]].live = result != CUDA_SUCCESS;
        say_code(op, result);
}

/* Only what has no launch going on is trimmed, so that all must have ended. */
void run_graph_trim(struct op *op)
{
        if (open_captures) {
                say(op, "skip");
                return;
        }
        for (int c = 0; c < SLOTS; c++)
                if (enter(c)) {
                        cuCtxSynchronize();
                        leave();
                }
        say_code(op, cuDeviceGraphMemTrim(0));
}

/* ---- verbs: pools ---- */

void run_pool(struct op *op)
{
        struct pool *p = &pools[op->arg[0]];
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                                .maxSize = (size_t)op->arg[1]};
        CUresult result = cuMemPoolCreate(&p->handle, &props);

        p->live = result == CUDA_SUCCESS;
        say_code(op, result);
}

void run_pool_destroy(struct op *op)
{
        CUresult result = cuMemPoolDestroy(pools[op->arg[0]].handle);

        pools[op->arg[0]].live = result != CUDA_SUCCESS;
        say_code(op, result);
}

void run_pool_trim(struct op *op)
{
        say_code(op, cuMemPoolTrimTo(pools[op->arg[0]].handle, (size_t)op->arg[1]));
}

void run_pool_keep(struct op *op)
{
        cuuint64_t threshold = (cuuint64_t)op->arg[1];

        say_code(op, cuMemPoolSetAttribute(pools[op->arg[0]].handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
}

void run_pool_used(struct op *op)
{
        cuuint64_t used = 0;
        CUresult result = cuMemPoolGetAttribute(pools[op->arg[0]].handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used);

        say(op, "%d %llu", (int)result, (unsigned long long)used);
}

void run_pool_current(struct op *op)
{
        CUmemoryPool pool = pools[op->arg[0]].handle;

        if (op->arg[0] == 0)
                GR_MUST(cuDeviceGetDefaultMemPool(&pool, 0));
        say_code(op, cuDeviceSetMemPool(0, pool));
}
