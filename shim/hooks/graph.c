/*
 * Graphs that allocate. Their memory is reserved at the upload or the first launch, not at the instantiation. It stays
 * reserved after the executable graph is destroyed, until the device's graph memory is trimmed (docs/measurements.md,
 * graph-memory). So an upload or launch that would reserve more than the limit allows climbs the ladder, and otherwise
 * fails with CUDA_ERROR_OUT_OF_MEMORY before anything is submitted. A graph that has its memory is not checked again.
 * Programs without such graphs pay for one look at a counter.
 *
 * Only the driver knows how much a graph will reserve, because allocations may share memory where one is freed before
 * the other is made. This library expects
 *
 *   the most that is allocated at a time if the nodes run one by one - the idle graph memory of the device
 *
 * So a launch that fits is never refused; if a graph takes more than that, the rest is charged after the launch. An
 * update of an executable graph changes no sizes, because the parameters of allocation nodes cannot be set (cuda.h,
 * cuGraphNodeSetParams).
 */
#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#include "base/hash.h"
#include "base/log.h"
#include "base/no_cancel.h"
#include "device/device.h"
#include "device/overhead.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/captures.h"
#include "hooks/context.h"
#include "hooks/graph_memory.h"
#include "hooks/stream.h"
#include "hooks/submit.h"

struct exec {
        UT_hash_handle hh;
        CUgraphExec handle;          /* key */
        struct gr_device *counts_on; /* NULL: none, as no context was current */
        struct gr_device *device;    /* of the memory that it needs; NULL: it does not allocate */
        uint64_t need_bytes;
        uint64_t trims; /* gr_graph_memory_trims when its memory was last reserved; 0: never */
};

#define UNKNOWN_BYTES (UINT64_C(32) << 20) /* what the ladder is asked for where the driver does not tell */

struct request {
        CUgraphExec exec;
        CUstream stream;
        CUresult (*real)(CUgraphExec exec, CUstream stream);
        bool launches; /* else it uploads */
        enum gr_null_stream null_stream;
        struct gr_device *device;
        uint64_t need_bytes;
        bool may_have_it; /* its memory may be in what is charged already */
        uint64_t trims;   /* gr_graph_memory_trims at the last attempt */
        CUresult result;
};

struct node {
        CUdeviceptr ptr;
        uint64_t bytes;
};

/* What a graph has allocated so far on the device of its first allocation. Others are charged after a launch only. */
struct walk {
        int device; /* -1: none yet */
        uint64_t bytes, peak_bytes;
        struct node *live;
        size_t count, room;
};

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_GRAPHS); /* no call of the driver under it */
static struct exec *execs GR_GUARDED_BY(lock);
static _Atomic unsigned exec_count; /* how many of them need memory */

static void walk_allocation(struct walk *walk, const CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
        struct node *more;

        if (params->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
                return;
        if (walk->device < 0)
                walk->device = params->poolProps.location.id;
        if (params->poolProps.location.id != walk->device)
                return;
        if (walk->count == walk->room) {
                more = realloc(walk->live, (2 * walk->room + 16) * sizeof(*more));
                if (!more)
                        return; /* too little is expected; the rest is charged after the launch */
                walk->live = more;
                walk->room = 2 * walk->room + 16;
        }
        assert(walk->count < walk->room);
        walk->live[walk->count++] = (struct node){params->dptr, params->bytesize};
        walk->bytes += params->bytesize;
        if (walk->bytes > walk->peak_bytes)
                walk->peak_bytes = walk->bytes;
}

static void walk_free(struct walk *walk, CUdeviceptr ptr)
{
        for (size_t i = walk->count; i-- > 0;)
                if (walk->live[i].ptr == ptr) {
                        walk->bytes -= walk->live[i].bytes;
                        walk->live[i] = walk->live[--walk->count];
                        return;
                }
}

/* A node in the search for an order. */
struct place {
        CUgraphNode node;
        size_t waits;             /* number of nodes that must run before it */
        size_t first_edge, edges; /* edges that begin here: the first one, and how many */
};

struct edge {
        size_t from, to; /* indices of places */
};

static int by_node(const void *a, const void *b)
{
        uintptr_t x = (uintptr_t)((const struct place *)a)->node, y = (uintptr_t)((const struct place *)b)->node;

        return (x > y) - (x < y);
}

static int by_origin(const void *a, const void *b)
{
        size_t x = ((const struct edge *)a)->from, y = ((const struct edge *)b)->from;

        return (x > y) - (x < y);
}

/*
 * The edges between count places, which are sorted by node. The edges are sorted by origin, and the caller frees them.
 * NULL where the driver does not tell them, or without memory.
 */
static struct edge *edges_of(CUgraph graph, struct place *places, size_t count)
{
        size_t edge_count = 0;
        CUgraphNode *from = NULL, *to = NULL;
        CUgraphEdgeData *data = NULL;
        struct edge *edges = NULL;
        bool good = false;

        if (!gr_real.cuGraphGetEdges_v2 ||
            gr_real.cuGraphGetEdges_v2(graph, NULL, NULL, NULL, &edge_count) != CUDA_SUCCESS)
                return NULL;
        from = calloc(edge_count + 1, sizeof(CUgraphNode));
        to = calloc(edge_count + 1, sizeof(CUgraphNode));
        data = calloc(edge_count + 1, sizeof(*data)); /* without it graphs whose edges have data are refused */
        edges = calloc(edge_count + 1, sizeof(*edges));
        good = from && to && data && edges &&
               (edge_count == 0 || gr_real.cuGraphGetEdges_v2(graph, from, to, data, &edge_count) == CUDA_SUCCESS);
        for (size_t i = 0; good && i < edge_count; i++) {
                struct place *begin =
                        bsearch(&(struct place){.node = from[i]}, places, count, sizeof(*places), by_node);
                struct place *end = bsearch(&(struct place){.node = to[i]}, places, count, sizeof(*places), by_node);

                good = begin && end;
                if (!good)
                        break;
                edges[i] = (struct edge){(size_t)(begin - places), (size_t)(end - places)};
                begin->edges++;
                end->waits++;
        }
        free(from);
        free(to);
        free(data);
        if (!good) {
                free(edges);
                return NULL;
        }
        qsort(edges, edge_count, sizeof(*edges), by_origin);
        for (size_t i = edge_count; i-- > 0;)
                places[edges[i].from].first_edge = i;
        return edges;
}

/*
 * The driver lists nodes in no particular order: sorts them into an order in which they could run. Allocations that
 * exist at one time in such an order cannot share memory, as a graph may run in that order. False where that fails;
 * then the order means nothing.
 */
static bool put_in_order(CUgraph graph, CUgraphNode *nodes, size_t count)
{
        struct place *places = calloc(count, sizeof(*places));
        size_t *order = calloc(count, sizeof(*order)), ready = 0;
        struct edge *edges = NULL;

        if (places && order) {
                for (size_t i = 0; i < count; i++)
                        places[i].node = nodes[i];
                qsort(places, count, sizeof(*places), by_node);
                edges = edges_of(graph, places, count);
        }
        for (size_t i = 0; edges && i < count; i++)
                if (places[i].waits == 0)
                        order[ready++] = i;
        for (size_t i = 0; i < ready; i++) {
                const struct place *place = &places[order[i]];

                nodes[i] = place->node;
                for (size_t k = 0; k < place->edges; k++) {
                        const struct edge *edge = &edges[place->first_edge + k];

                        assert(edge->from == order[i] && places[edge->to].waits > 0 && ready < count);
                        if (--places[edge->to].waits == 0)
                                order[ready++] = edge->to;
                }
        }
        free(places);
        free(order);
        free(edges);
        return ready == count;
}

static void look_through(CUgraph graph, struct walk *walk)
{
        CUDA_MEM_ALLOC_NODE_PARAMS params;
        CUgraphNode *nodes = NULL;
        CUgraphNodeType type;
        CUdeviceptr ptr;
        CUgraph child;
        size_t count = 0;
        bool ordered;

        if (gr_real.cuGraphGetNodes(graph, NULL, &count) != CUDA_SUCCESS || count == 0)
                return;
        nodes = calloc(count, sizeof(CUgraphNode));
        if (!nodes || gr_real.cuGraphGetNodes(graph, nodes, &count) != CUDA_SUCCESS)
                count = 0;
        ordered = put_in_order(graph, nodes, count);
        for (size_t i = 0; i < count; i++) {
                if (gr_real.cuGraphNodeGetType(nodes[i], &type) != CUDA_SUCCESS)
                        continue;
                if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC &&
                    gr_real.cuGraphMemAllocNodeGetParams(nodes[i], &params) == CUDA_SUCCESS) {
                        walk_allocation(walk, &params);
                        if (!ordered) /* without an order, only the largest allocation is certain */
                                walk_free(walk, params.dptr);
                } else if (type == CU_GRAPH_NODE_TYPE_MEM_FREE &&
                           gr_real.cuGraphMemFreeNodeGetParams(nodes[i], &ptr) == CUDA_SUCCESS) {
                        walk_free(walk, ptr);
                } else if (type == CU_GRAPH_NODE_TYPE_GRAPH &&
                           gr_real.cuGraphChildGraphNodeGetGraph(nodes[i], &child) == CUDA_SUCCESS) {
                        look_through(child, walk);
                }
        }
        free(nodes);
}

/* Lock held. */
GR_HELD(lock) static struct exec *find_exec(CUgraphExec handle)
{
        struct exec *exec;

        gr_assert_locked(&lock);
        HASH_FIND_PTR(execs, &handle, exec);
        return exec;
}

/* Adds or takes away one in all counts. Lock held. */
GR_HELD(lock) static void count_exec(const struct exec *exec, int sign)
{
        gr_assert_locked(&lock);
        if (exec->device)
                atomic_fetch_add(&exec_count, (unsigned)sign);
        if (exec->counts_on)
                gr_budget_add(&exec->counts_on->executables, (uint64_t)sign);
}

/* Takes the entry of this handle out of the table. NULL: there is none. */
static struct exec *take_exec(CUgraphExec handle)
{
        struct exec *exec;

        if (!gr_shim_ready())
                return NULL;
        gr_lock(&lock);
        exec = find_exec(handle);
        if (exec) {
                HASH_DEL(execs, exec);
                count_exec(exec, -1);
        }
        gr_unlock(&lock);
        return exec;
}

/* Enters it. Frees it instead if the table has no memory for it, or if another executable has its handle by now. */
static void put_exec(struct exec *exec)
{
        gr_lock(&lock);
        exec->hh.tbl = NULL;
        if (!find_exec(exec->handle))
                HASH_ADD_PTR(execs, handle, exec);
        if (exec->hh.tbl)
                count_exec(exec, 1);
        else
                free(exec);
        gr_unlock(&lock);
}

/*
 * Called after an instantiation. Where there is no memory for its entry, the executable is not counted; its launches
 * are not checked, but charged afterwards.
 */
static CUresult after_instantiation(CUresult result, CUgraphExec *handle, CUgraph graph)
{
        struct walk walk = {.device = -1};
        struct gr_context *context;
        GR_KEEP_ERRNO;
        struct exec *exec;

        if (result != CUDA_SUCCESS || !gr_shim_ready())
                return result;
        GR_NO_CANCEL;             /* the driver is asked about each node */
        free(take_exec(*handle)); /* left by an executable that was destroyed by a call that no hook has seen */
        context = gr_context_current();
        if (gr_overhead_counted() && context)
                gr_overhead_look(context->device, GR_OVERHEAD_AGE_NS);
        if (!gr_graph_memory_in_use() || !gr_real.cuGraphGetNodes || !gr_real.cuGraphNodeGetType ||
            !gr_real.cuGraphMemAllocNodeGetParams || !gr_real.cuGraphMemFreeNodeGetParams ||
            !gr_real.cuGraphChildGraphNodeGetGraph)
                goto looked;
        look_through(graph, &walk);
        free(walk.live);
looked:
        exec = calloc(1, sizeof(*exec));
        if (!exec)
                return result;
        exec->handle = *handle;
        exec->counts_on = context ? context->device : NULL;
        if (walk.peak_bytes && gr_device_use(walk.device)) {
                exec->device = gr_device_get(walk.device);
                exec->need_bytes = gr_footprint_bytes(walk.peak_bytes);
        }
        put_exec(exec);
        return result;
}

/*
 * A call for a graph failed for lack of memory, and the driver does not say how much it lacks: climbs the ladder, which
 * calls attempt after each rung.
 */
static void climb_for_graph(int (*attempt)(void *arg), void *arg)
{
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;
        struct gr_context *context = gr_shim_ready() ? gr_context_current() : NULL;

        if (context)
                gr_ladder_climb_for(context, UNKNOWN_BYTES, attempt, arg, -ENOMEM);
}

/*
 * While another thread waits for the stream, the driver may launch a graph that has user objects and answer
 * CUDA_ERROR_UNKNOWN all the same (docs/measurements.md, user-object-launch). The user objects are the library's, and
 * without them the program would have got CUDA_SUCCESS: so that is returned. If the context is broken, the next call in
 * it says so. An error of a launch that is captured is passed on: the program's graph lacks that launch.
 */
static int submit_to_driver(struct request *request)
{
        request->result = request->real(request->exec, request->stream);
        if (request->result == CUDA_ERROR_UNKNOWN && request->launches && gr_captures_have_objects() &&
            !gr_capture_on(request->stream, request->null_stream)) {
                gr_log(GR_LOG_INFO, "the driver has launched a graph, and says that it failed: that is not passed on");
                request->result = CUDA_SUCCESS;
        }
        return gr_errno_of(request->result);
}

/* An attempt for a graph whose need of memory is not known. */
static int attempt_unknown(void *arg)
{
        return submit_to_driver(arg);
}

static CUresult submit_unknown(struct request *request)
{
        if (attempt_unknown(request) == -ENOMEM)
                climb_for_graph(attempt_unknown, request);
        return request->result;
}

static int attempt_known(void *arg)
{
        struct request *request = arg;
        uint64_t reserved;
        int rc;

        assert(request->device && request->need_bytes > 0 && request->real);
        request->trims =
                atomic_load(&gr_graph_memory_trims); /* read first, so that a trim during the attempt is not missed */
        if (gr_graph_memory_reserve(request->device, request->need_bytes, request->may_have_it, &reserved) != 0) {
                request->result = CUDA_ERROR_OUT_OF_MEMORY;
                return -EDQUOT;
        }
        rc = submit_to_driver(request);
        gr_graph_memory_correct(request->device, reserved);
        return rc;
}

static CUresult submit_graph(struct request request)
{
        struct gr_context *context;
        uint64_t now = atomic_load(&gr_graph_memory_trims);
        struct exec *exec;
        int rc;
        bool had_it = false;

        if (!request.real)
                return CUDA_ERROR_NOT_FOUND;
        if (atomic_load_explicit(&exec_count, memory_order_relaxed) == 0 || !gr_shim_ready())
                return submit_unknown(&request);
        gr_lock(&lock);
        exec = find_exec(request.exec);
        if (exec && exec->trims != now) {
                request.device = exec->device;
                request.need_bytes = exec->need_bytes;
                had_it = exec->trims > 0;
        }
        gr_unlock(&lock);
        /* A launch that is captured reserves nothing: it becomes part of another graph. */
        if (!request.device || gr_capture_on(request.stream, request.null_stream))
                return submit_unknown(&request);
        GR_NO_CANCEL; /* attempt_known charges, and then calls the driver */
        GR_KEEP_ERRNO;
        rc = attempt_known(&request);
        if (gr_is_out_of_memory(rc)) {
                context = gr_charge_climber(&gr_core, request.device, gr_context_current());
                if (context)
                        rc = gr_ladder_climb_for(context, request.need_bytes, attempt_known, &request, rc);
                else if (rc == -EDQUOT)
                        gr_count(&gr_core, GR_COUNTER_limit_hits, 1);
        }
        /* A trim takes no memory from a running graph: this one may still have all that it needs. */
        if (gr_is_out_of_memory(rc) && had_it) {
                request.may_have_it = true;
                rc = attempt_known(&request);
        }
        if (rc == 0) {
                gr_lock(&lock);
                exec = find_exec(request.exec);
                if (exec)
                        exec->trims = request.trims;
                gr_unlock(&lock);
        }
        return request.result;
}

static CUresult launch_graph(CUgraphExec exec, CUstream stream, enum gr_null_stream null_stream,
                             __typeof__(cuGraphLaunch) *real)
{
        GR_PASS_GATE;
        const struct request request = {
                .exec = exec, .stream = stream, .real = real, .launches = true, .null_stream = null_stream};

        if (!gr_submit_begin(stream, null_stream) && gr_submit_may_be_far())
                gr_submit_graph(stream);
        if (!gr_stream_graph_begins())
                return submit_graph(request);
        GR_NO_CANCEL; /* gr_stream_graph_began must follow */
        return gr_stream_graph_began(submit_graph(request));
}

GR_EXPORT CUresult CUDAAPI cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
        gr_shim_ready();
        return launch_graph(exec, stream, GR_NULL_LEGACY, gr_real.cuGraphLaunch);
}

GR_EXPORT CUresult CUDAAPI cuGraphLaunch_ptsz(CUgraphExec exec, CUstream stream)
{
        gr_shim_ready();
        return launch_graph(exec, stream, GR_NULL_PER_THREAD, gr_real.cuGraphLaunch_ptsz);
}

static CUresult upload_graph(CUgraphExec exec, CUstream stream, enum gr_null_stream null_stream,
                             __typeof__(cuGraphUpload) *real)
{
        GR_PASS_GATE;
        return submit_graph((struct request){.exec = exec, .stream = stream, .real = real, .null_stream = null_stream});
}

GR_EXPORT CUresult CUDAAPI cuGraphUpload(CUgraphExec exec, CUstream stream)
{
        gr_shim_ready();
        return upload_graph(exec, stream, GR_NULL_LEGACY, gr_real.cuGraphUpload);
}

GR_EXPORT CUresult CUDAAPI cuGraphUpload_ptsz(CUgraphExec exec, CUstream stream)
{
        gr_shim_ready();
        return upload_graph(exec, stream, GR_NULL_PER_THREAD, gr_real.cuGraphUpload_ptsz);
}

/* An instantiation, by the one of the first three fields that is not NULL. */
struct instantiation {
        __typeof__(cuGraphInstantiate) *first;
        __typeof__(cuGraphInstantiateWithFlags) *with_flags;
        __typeof__(cuGraphInstantiateWithParams) *with_params;
        CUgraphExec *exec;
        CUgraph graph;
        CUgraphNode *error;
        char *log;
        size_t log_bytes;
        unsigned long long flags;
        CUDA_GRAPH_INSTANTIATE_PARAMS *params;
        CUresult result;
};

static int attempt_instantiation(void *arg)
{
        struct instantiation *of = arg;

        of->result = of->first        ? of->first(of->exec, of->graph, of->error, of->log, of->log_bytes)
                     : of->with_flags ? of->with_flags(of->exec, of->graph, of->flags)
                                      : of->with_params(of->exec, of->graph, of->params);
        return gr_errno_of(of->result);
}

static CUresult instantiate_graph(struct instantiation *of)
{
        GR_PASS_GATE;
        struct gr_context *context = NULL;
        uint64_t before_bytes = 0;

        if (!of->first && !of->with_flags && !of->with_params)
                return CUDA_ERROR_NOT_FOUND;
        if (gr_shim_ready()) {
                GR_KEEP_ERRNO;
                GR_NO_CANCEL;

                gr_core_end_order(&gr_core); /* a graph that is launched on the device may outlive its launch there */
                context = gr_context_current();
                before_bytes = context ? gr_overhead_before(context) : 0;
        }
        if (attempt_instantiation(of) == -ENOMEM)
                climb_for_graph(attempt_instantiation, of);
        if (before_bytes) {
                GR_KEEP_ERRNO;
                GR_NO_CANCEL;

                gr_overhead_made(context, before_bytes);
        }
        return after_instantiation(of->result, of->exec, of->graph);
}

GR_EXPORT CUresult CUDAAPI cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log,
                                              size_t bytes)
{
        gr_shim_ready();
        return instantiate_graph(&(struct instantiation){.first = gr_real.cuGraphInstantiate,
                                                         .exec = exec,
                                                         .graph = graph,
                                                         .error = error,
                                                         .log = log,
                                                         .log_bytes = bytes});
}

GR_EXPORT CUresult CUDAAPI cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log,
                                                 size_t bytes)
{
        gr_shim_ready();
        return instantiate_graph(&(struct instantiation){.first = gr_real.cuGraphInstantiate_v2,
                                                         .exec = exec,
                                                         .graph = graph,
                                                         .error = error,
                                                         .log = log,
                                                         .log_bytes = bytes});
}

GR_EXPORT CUresult CUDAAPI cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
        gr_shim_ready();
        return instantiate_graph(&(struct instantiation){
                .with_flags = gr_real.cuGraphInstantiateWithFlags, .exec = exec, .graph = graph, .flags = flags});
}

/* An upload within the instantiation would reserve memory without a check, so it becomes a call of its own. */
static CUresult instantiate_with(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params,
                                 enum gr_null_stream null_stream, __typeof__(cuGraphInstantiateWithParams) *real,
                                 __typeof__(cuGraphUpload) *real_upload)
{
        struct instantiation of = {.with_params = real, .exec = exec, .graph = graph, .params = params};
        CUDA_GRAPH_INSTANTIATE_PARAMS without;
        CUresult result;

        if (!gr_shim_ready() || !gr_graph_memory_in_use() || !params || !real_upload ||
            !(params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD))
                return instantiate_graph(&of);
        without = *params;
        without.flags &= ~(cuuint64_t)CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD;
        of.params = &without;
        result = instantiate_graph(&of);
        params->hErrNode_out = without.hErrNode_out;
        params->result_out = without.result_out;
        if (result != CUDA_SUCCESS)
                return result;
        result = upload_graph(*exec, params->hUploadStream, null_stream, real_upload);
        if (result != CUDA_SUCCESS) {
                cuGraphExecDestroy(*exec);
                params->result_out = CUDA_GRAPH_INSTANTIATE_ERROR;
        }
        return result;
}

GR_EXPORT CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph,
                                                        CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
        gr_shim_ready();
        return instantiate_with(exec, graph, params, GR_NULL_LEGACY, gr_real.cuGraphInstantiateWithParams,
                                gr_real.cuGraphUpload);
}

GR_EXPORT CUresult CUDAAPI cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph,
                                                             CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
        gr_shim_ready();
        return instantiate_with(exec, graph, params, GR_NULL_PER_THREAD, gr_real.cuGraphInstantiateWithParams_ptsz,
                                gr_real.cuGraphUpload_ptsz);
}

/* The entry is taken out first: as soon as the executable is destroyed, another one may get the same handle. */
GR_EXPORT CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec handle)
{
        GR_PASS_DEEP;
        struct exec *exec;
        CUresult result;
        GR_KEEP_ERRNO;
        GR_NO_CANCEL; /* what was taken is put back or freed */

        exec = take_exec(handle);
        result = GR_REAL(cuGraphExecDestroy, handle);
        if (exec && result != CUDA_SUCCESS)
                put_exec(exec);
        else
                free(exec);
        if (gr_shim_ready() && gr_graph_holds_are_over(&gr_core))
                gr_pool_collect(&gr_core);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                                  size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
        GR_PASS_DEEP;
        gr_graph_memory_seen();
        return gr_real_given(GR_REAL(cuGraphAddMemAllocNode, node, graph, dependencies, count, params), &params->dptr);
}

static CUresult node_added(CUresult result, const CUgraphNodeParams *params)
{
        if (result != CUDA_SUCCESS || params->type != CU_GRAPH_NODE_TYPE_MEM_ALLOC)
                return result;
        gr_graph_memory_seen();
        return gr_real_given(result, &params->alloc.dptr);
}

GR_EXPORT CUresult CUDAAPI cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,
                                          size_t count, CUgraphNodeParams *params)
{
        GR_PASS_GATE;
        CUresult result;

        if (params)
                gr_stream_graph_node(params->type);
        result = GR_REAL(cuGraphAddNode, node, graph, dependencies, count, params);
        return node_added(result, params);
}

#define ADD_NODE(symbol)                                                                                               \
        GR_EXPORT CUresult CUDAAPI symbol(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies,           \
                                          const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *params)       \
        {                                                                                                              \
                GR_PASS_GATE;                                                                                          \
                CUresult result;                                                                                       \
                                                                                                                       \
                if (params)                                                                                            \
                        gr_stream_graph_node(params->type);                                                            \
                result = GR_REAL(symbol, node, graph, dependencies, edges, count, params);                             \
                return node_added(result, params);                                                                     \
        }
ADD_NODE(cuGraphAddNode_v2)
ADD_NODE(cuGraphAddNode_v3)

GR_EXPORT CUresult CUDAAPI cuDeviceGraphMemTrim(CUdevice dev)
{
        GR_PASS_DEEP;
        CUresult result = GR_REAL(cuDeviceGraphMemTrim, dev);

        if (result == CUDA_SUCCESS)
                gr_graph_memory_trimmed();
        return result;
}
