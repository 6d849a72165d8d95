/* Stream capture: which streams are in which capture, what a capture forbids, and what breaks it. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

struct sim_capture {
        unsigned long long id;
        CUcontext ctx;
        CUstreamCaptureMode mode;
        unsigned long owner; /* from this_thread() */
        CUstream origin;
        CUgraph graph;
        bool given_graph; /* cuStreamBeginCaptureToGraph: the graph is the program's */
        bool again;       /* cuStreamBeginRecaptureToGraph: its nodes are captured once more, one after the other */
        bool cig;         /* cuStreamBeginCaptureToCig: for a graphics interface, of which there is none here */
        size_t recaptured;
        bool invalid;
        struct sim_frontier dropped; /* taken out of the dependencies by the program: no stream needs to join it */
        struct sim_capture *next;
};

/* Guarded by sim_lock(). */
static struct sim_capture *captures;
static unsigned long long next_capture_id = 1;

static _Thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

/* A number for the calling thread that is never used again, unlike pthread_t. Lock held. */
static unsigned long this_thread(void)
{
        static unsigned long threads;
        static _Thread_local unsigned long number;

        if (number == 0)
                number = ++threads;
        return number;
}

void sim_frontier_clear(struct sim_frontier *frontier)
{
        free(frontier->index);
        *frontier = (struct sim_frontier){0};
}

static bool frontier_add(struct sim_frontier *to, const struct sim_frontier *from)
{
        size_t *more;

        if (from->count == 0)
                return true;
        more = realloc(to->index, (to->count + from->count) * sizeof *more);
        if (!more)
                return false;
        to->index = more;
        for (size_t i = 0; i < from->count; i++) {
                size_t k = 0;

                while (k < to->count && to->index[k] != from->index[i])
                        k++;
                if (k == to->count)
                        to->index[to->count++] = from->index[i];
        }
        return true;
}

static bool frontier_set(struct sim_frontier *to, size_t index)
{
        struct sim_frontier one = {&index, 1};

        sim_frontier_clear(to);
        return frontier_add(to, &one);
}

CUresult sim_frontier_of(CUgraph graph, const CUgraphNode *nodes, size_t count, struct sim_frontier *ret_frontier)
{
        *ret_frontier = (struct sim_frontier){calloc(count + 1, sizeof(size_t)), count};
        if (!ret_frontier->index)
                return CUDA_ERROR_OUT_OF_MEMORY;
        for (size_t i = 0; i < count; i++) {
                if (!nodes[i] || nodes[i]->graph != graph)
                        return CUDA_ERROR_INVALID_VALUE;
                ret_frontier->index[i] = nodes[i]->index;
        }
        return CUDA_SUCCESS;
}

static struct sim_capture *find_capture(unsigned long long id)
{
        struct sim_capture *c = captures;

        while (c && c->id != id)
                c = c->next;
        return c;
}

bool sim_capture_live(unsigned long long id)
{
        return id && find_capture(id);
}

CUresult sim_capture_ask(const struct CUevent_st *event)
{
        struct sim_capture *c = event->capture_id ? find_capture(event->capture_id) : NULL;

        if (c) {
                c->invalid = true;
                return CUDA_ERROR_CAPTURED_EVENT;
        }
        return event->capture_id ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult sim_capture_unsafe(void)
{
        CUresult rc = CUDA_SUCCESS;

        for (struct sim_capture *c = captures; c; c = c->next) {
                bool own = c->owner == this_thread() && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
                bool global = c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL;

                if ((own && thread_mode != CU_STREAM_CAPTURE_MODE_RELAXED) ||
                    (global && thread_mode == CU_STREAM_CAPTURE_MODE_GLOBAL)) {
                        c->invalid = true;
                        rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
                }
        }
        return rc;
}

CUresult sim_capture_in_context(CUcontext ctx)
{
        CUresult rc = CUDA_SUCCESS;

        for (struct sim_capture *c = captures; c; c = c->next) {
                if (c->ctx == ctx) {
                        c->invalid = true;
                        rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
                }
        }
        return rc;
}

CUresult sim_capture_in_stream(CUstream stream)
{
        if (stream->capture) {
                stream->capture->invalid = true;
                return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        if (stream == stream->ctx->legacy) {
                CUresult rc = sim_capture_legacy(stream->ctx);

                if (rc != CUDA_SUCCESS)
                        return rc;
        }
        return sim_capture_unsafe();
}

CUresult sim_capture_legacy(CUcontext ctx)
{
        CUresult rc = CUDA_SUCCESS;

        for (CUstream s = ctx->streams; s; s = s->next) {
                if (s->capture && !(s->flags & CU_STREAM_NON_BLOCKING)) {
                        s->capture->invalid = true;
                        rc = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
                }
        }
        return rc;
}

/* The next node of a graph that is captured again takes the operation. NULL: it is of another kind or place. */
static CUgraphNode recapture(struct sim_capture *c, const struct sim_op *op, const struct sim_frontier *after)
{
        CUgraphNode node = c->recaptured < c->graph->count ? c->graph->nodes[c->recaptured] : NULL;

        if (!node || node->op.kind != op->kind || node->n_after != after->count ||
            (after->count && memcmp(node->after, after->index, after->count * sizeof *node->after) != 0))
                return NULL;
        node->op = *op;
        c->recaptured++;
        return node;
}

CUresult sim_capture_push(CUstream stream, const struct sim_op *op)
{
        struct sim_capture *c = stream->capture;
        struct sim_op copy = *op;
        CUgraphNode node;

        if (c->invalid)
                return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (op->kind == SIM_OP_CALLBACK || (c->cig && op->kind == SIM_OP_HOST)) {
                c->invalid = true;
                return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
        copy.ctx = stream->ctx;
        node = c->again ? recapture(c, &copy, &stream->frontier) : sim_graph_add(c->graph, &copy, &stream->frontier);
        if (!node || !frontier_set(&stream->frontier, node->index)) {
                c->invalid = true;
                return c->again ? SIM_RECAPTURE_FAILURE : CUDA_ERROR_OUT_OF_MEMORY;
        }
        return CUDA_SUCCESS;
}

/* Captures of these two kinds take neither memory nor graphs on the simulated device. */
static CUresult not_recorded(struct sim_capture *c)
{
        c->invalid = true;
        return CUDA_ERROR_NOT_SUPPORTED;
}

CUresult sim_capture_memory(CUstream stream, struct sim_op *op)
{
        struct sim_capture *c = stream->capture;
        CUgraphNode node;
        CUresult rc;

        if (c->invalid)
                return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (c->again || c->cig)
                return not_recorded(c);
        if (op->kind == SIM_OP_GRAPH_FREE && !sim_graph_may_free(c->graph, op->u.memory.base))
                return CUDA_ERROR_INVALID_VALUE;
        op->ctx = stream->ctx;
        rc = sim_graph_add_memory(c->graph, op, &stream->frontier, &node);
        if (rc == CUDA_SUCCESS && !frontier_set(&stream->frontier, node->index))
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        return rc;
}

CUresult sim_capture_graph(CUstream stream, CUgraph child)
{
        struct sim_capture *c = stream->capture;
        struct sim_op join = {.kind = SIM_OP_JOIN, .ctx = stream->ctx};
        struct sim_frontier all = {0};
        CUgraphNode node;

        if (c->invalid)
                return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (c->again || c->cig)
                return not_recorded(c);
        node = sim_graph_add_graph(c->graph, child, &stream->frontier, &all);
        if (node && all.count)
                node = sim_graph_add(c->graph, &join, &all);
        sim_frontier_clear(&all);
        if (!node || !frontier_set(&stream->frontier, node->index)) {
                c->invalid = true;
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        return CUDA_SUCCESS;
}

CUresult sim_capture_record(CUstream stream, CUevent event)
{
        if (stream->capture->invalid)
                return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        sim_frontier_clear(&event->frontier);
        if (!frontier_add(&event->frontier, &stream->frontier))
                return CUDA_ERROR_OUT_OF_MEMORY;
        event->capture_id = stream->capture->id;
        return CUDA_SUCCESS;
}

CUresult sim_capture_wait(CUstream stream, CUevent event)
{
        struct sim_capture *c = find_capture(event->capture_id);

        if (stream->capture && stream->capture->invalid)
                return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (!event->capture_id && !event->node)
                return CUDA_SUCCESS; /* never recorded: nothing to wait for */
        if (!c) {
                stream->capture->invalid = true;
                return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
        }
        if (stream->capture && stream->capture != c) {
                stream->capture->invalid = c->invalid = true;
                return CUDA_ERROR_STREAM_CAPTURE_MERGE;
        }
        if (stream == stream->ctx->legacy) {
                c->invalid = true;
                return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        if (c->invalid)
                return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        stream->capture = c;
        return frontier_add(&stream->frontier, &event->frontier) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Takes every stream out of the capture and forgets it. */
static void disband_capture(struct sim_capture *c)
{
        struct sim_capture **at = &captures;

        for (CUcontext ctx = sim_contexts(); ctx; ctx = ctx->next) {
                for (CUstream s = ctx->streams; s; s = s->next) {
                        if (s->capture == c) {
                                s->capture = NULL;
                                sim_frontier_clear(&s->frontier);
                        }
                }
        }
        while (*at != c)
                at = &(*at)->next;
        *at = c->next;
        sim_frontier_clear(&c->dropped);
        free(c);
}

void sim_capture_stream_gone(CUstream stream)
{
        struct sim_capture *c = stream->capture;

        if (!c)
                return;
        if (stream == c->origin) {
                if (!c->given_graph)
                        sim_graph_free(c->graph);
                disband_capture(c);
        } else {
                /* Its captured work is now joined by no stream, so the end of the capture reports it as unjoined. */
                stream->capture = NULL;
                sim_frontier_clear(&stream->frontier);
        }
}

enum target { INTO_GRAPH, GRAPH_AGAIN, TO_CIG };

/* graph and after: NULL for a graph of its own. */
static CUresult begin_capture(CUstream handle, CUstreamCaptureMode mode, enum target target, CUgraph graph,
                              const struct sim_frontier *after)
{
        struct sim_capture *c;
        CUstream s;
        CUresult rc;

        if (mode != CU_STREAM_CAPTURE_MODE_GLOBAL && mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL &&
            mode != CU_STREAM_CAPTURE_MODE_RELAXED)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_stream_resolve(handle, &s);
        if (rc == CUDA_SUCCESS && s == s->ctx->legacy)
                rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        if (rc == CUDA_SUCCESS && s->capture)
                rc = CUDA_ERROR_ILLEGAL_STATE;
        if (rc == CUDA_SUCCESS && graph && !sim_is_graph(graph))
                rc = CUDA_ERROR_INVALID_VALUE;
        if (rc == CUDA_SUCCESS && target == TO_CIG && !s->ctx->cig)
                rc = CUDA_ERROR_INVALID_CONTEXT;
        if (rc == CUDA_SUCCESS) {
                c = calloc(1, sizeof *c);
                if (c) {
                        *c = (struct sim_capture){.id = next_capture_id++,
                                                  .ctx = s->ctx,
                                                  .mode = mode,
                                                  .owner = this_thread(),
                                                  .origin = s,
                                                  .graph = graph ? graph : sim_graph_new(),
                                                  .given_graph = graph != NULL,
                                                  .again = target == GRAPH_AGAIN,
                                                  .cig = target == TO_CIG,
                                                  .next = captures};
                        if (c->graph && (!after || frontier_add(&s->frontier, after))) {
                                captures = c;
                                s->capture = c;
                                if (c->again)
                                        sim_holds_drop(&graph->holds);
                        } else {
                                if (c->graph && !graph)
                                        sim_graph_free(c->graph);
                                free(c);
                                c = NULL;
                        }
                }
                rc = c ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        }
        sim_unlock();
        return rc;
}

SIM_PTSZ(cuStreamBeginCapture, (CUstream stream), (stream))
{
        return begin_capture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, INTO_GRAPH, NULL, NULL);
}

SIM_PTSZ(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode), (stream, mode))
{
        return begin_capture(stream, mode, INTO_GRAPH, NULL, NULL);
}

SIM_PTSZ(cuStreamBeginCaptureToGraph,
         (CUstream stream, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *data, size_t n,
          CUstreamCaptureMode mode),
         (stream, graph, after, data, n, mode))
{
        struct sim_frontier given;
        CUresult rc;

        (void)data;
        if (!graph || (n && !after))
                return CUDA_ERROR_INVALID_VALUE;
        rc = sim_frontier_of(graph, after, n, &given);
        if (rc == CUDA_SUCCESS)
                rc = begin_capture(stream, mode, INTO_GRAPH, graph, &given);
        sim_frontier_clear(&given);
        return rc;
}

/*
 * This and the captures for a graphics interface are as NVIDIA's pages on CUDA 13.3 describe them, not as a driver was
 * seen to do. Parameters are not compared, so the callback for those that differ is not simulated.
 */
SIM_PTSZ(cuStreamBeginRecaptureToGraph,
         (CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback callback, void *arg),
         (stream, mode, graph, callback, arg))
{
        (void)arg;
        if (!graph)
                return CUDA_ERROR_INVALID_VALUE;
        return callback ? CUDA_ERROR_NOT_SUPPORTED : begin_capture(stream, mode, GRAPH_AGAIN, graph, NULL);
}

SIM_PTSZ(cuStreamBeginCaptureToCig, (CUstream stream, CUstreamCigCaptureParams *parameters), (stream, parameters))
{
        if (!parameters)
                return CUDA_ERROR_INVALID_VALUE;
        return begin_capture(stream, CU_STREAM_CAPTURE_MODE_RELAXED, TO_CIG, NULL, NULL);
}

static CUresult end_capture(CUstream stream, CUgraph *ret_graph, bool cig)
{
        struct sim_capture *c;
        CUstream s;
        CUresult rc;

        sim_lock();
        rc = sim_stream_resolve(stream, &s);
        if (rc != CUDA_SUCCESS)
                goto out;
        c = s->capture;
        if (!c || c->cig != cig)
                rc = CUDA_ERROR_ILLEGAL_STATE;
        else if (c->origin != s)
                rc = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
        if (rc != CUDA_SUCCESS) {
                if (c)
                        c->invalid = true;
                goto out;
        }
        /* The capture ends even if this is the wrong thread (measured, driver 580). */
        if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && c->owner != this_thread())
                rc = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
        else if (c->invalid)
                rc = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        else if (c->again && c->recaptured < c->graph->count)
                rc = SIM_RECAPTURE_FAILURE;
        else if (!frontier_add(&c->dropped, &s->frontier) || !sim_graph_joined(c->graph, &c->dropped))
                rc = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        if (ret_graph)
                *ret_graph = rc == CUDA_SUCCESS ? c->graph : NULL;
        /* Without a place for it the graph is lost, and the end succeeds (measured, driver 580). */
        if ((rc != CUDA_SUCCESS || !ret_graph) && !c->given_graph)
                sim_graph_free(c->graph);
        disband_capture(c);
out:
        sim_unlock();
        return rc;
}

SIM_PTSZ(cuStreamEndCapture, (CUstream stream, CUgraph *ret_graph), (stream, ret_graph))
{
        return end_capture(stream, ret_graph, false);
}

SIM_PTSZ(cuStreamEndCaptureToCig, (CUstream stream), (stream))
{
        return end_capture(stream, NULL, true);
}

static CUstreamCaptureStatus status_of(const struct sim_capture *c)
{
        if (!c)
                return CU_STREAM_CAPTURE_STATUS_NONE;
        return c->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

/* The array of dependencies that was returned last; valid until the thread asks again. */
static _Thread_local CUgraphNode *told;

static CUresult get_info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph,
                         const CUgraphNode **after, size_t *n_after)
{
        CUstream s;
        CUresult rc;

        if (!status)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_stream_resolve(handle, &s);
        if (rc == CUDA_SUCCESS && s == s->ctx->legacy) {
                for (CUstream o = s->ctx->streams; o; o = o->next) {
                        if (o->capture && !(o->flags & CU_STREAM_NON_BLOCKING))
                                rc = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
                }
        }
        if (rc == CUDA_SUCCESS) {
                struct sim_capture *c = s->capture;
                bool active = c && !c->invalid;

                *status = status_of(c);
                if (id && active)
                        *id = c->id;
                if (graph && active)
                        *graph = c->graph;
                if (n_after && active)
                        *n_after = s->frontier.count;
                if (after && active) {
                        CUgraphNode *more = realloc(told, (s->frontier.count + 1) * sizeof *more);

                        if (more) {
                                told = more;
                                for (size_t i = 0; i < s->frontier.count; i++)
                                        told[i] = c->graph->nodes[s->frontier.index[i]];
                                *after = told;
                        } else {
                                rc = CUDA_ERROR_OUT_OF_MEMORY;
                        }
                }
        }
        sim_unlock();
        return rc;
}

SIM_PTSZ(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status), (stream, status))
{
        return get_info(stream, status, NULL, NULL, NULL, NULL);
}

SIM_PTSZ(cuStreamGetCaptureInfo, (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id), (stream, status, id))
{
        return get_info(stream, status, id, NULL, NULL, NULL);
}

SIM_PTSZ(cuStreamGetCaptureInfo_v2,
         (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **after,
          size_t *n),
         (stream, status, id, graph, after, n))
{
        return get_info(stream, status, id, graph, after, n);
}

SIM_PTSZ(cuStreamGetCaptureInfo_v3,
         (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **after,
          const CUgraphEdgeData **data, size_t *n),
         (stream, status, id, graph, after, data, n))
{
        if (data)
                *data = NULL;
        return get_info(stream, status, id, graph, after, n);
}

static CUresult update_dependencies(CUstream handle, const CUgraphNode *nodes, size_t count, unsigned flags)
{
        const bool set = flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES;
        struct sim_frontier given = {0};
        CUstream s;
        CUresult rc;

        if ((flags != CU_STREAM_ADD_CAPTURE_DEPENDENCIES && !set) || (count && !nodes))
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_stream_resolve(handle, &s);
        if (rc == CUDA_SUCCESS && !s->capture)
                rc = CUDA_ERROR_ILLEGAL_STATE;
        if (rc == CUDA_SUCCESS && s->capture->invalid)
                rc = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        if (rc == CUDA_SUCCESS)
                rc = sim_frontier_of(s->capture->graph, nodes, count, &given);
        if (rc == CUDA_SUCCESS && set) {
                rc = frontier_add(&s->capture->dropped, &s->frontier) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
                sim_frontier_clear(&s->frontier);
        }
        if (rc == CUDA_SUCCESS && !frontier_add(&s->frontier, &given))
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        sim_unlock();
        sim_frontier_clear(&given);
        return rc;
}

SIM_PTSZ(cuStreamUpdateCaptureDependencies, (CUstream stream, CUgraphNode *nodes, size_t count, unsigned flags),
         (stream, nodes, count, flags))
{
        return update_dependencies(stream, nodes, count, flags);
}

SIM_PTSZ(cuStreamUpdateCaptureDependencies_v2,
         (CUstream stream, CUgraphNode *nodes, const CUgraphEdgeData *data, size_t count, unsigned flags),
         (stream, nodes, data, count, flags))
{
        (void)data;
        return update_dependencies(stream, nodes, count, flags);
}

SIM_API cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
        CUstreamCaptureMode old = thread_mode;

        SIM_ENTER(cuThreadExchangeStreamCaptureMode);
        if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
                return CUDA_ERROR_INVALID_VALUE;
        thread_mode = *mode;
        *mode = old;
        return CUDA_SUCCESS;
}
