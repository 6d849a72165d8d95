/*
 * Graphs: the operations of a capture and their dependencies, to be run again. Nodes are kept in an order in which they
 * may run: that of their creation, unless a dependency that was added later contradicts it.
 */
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MAGIC_GRAPH 0x67727068u
#define MAGIC_EXEC  0x65786563u

struct CUgraphExec_st {
        uint32_t magic;
        CUgraph graph; /* its own copy */
        unsigned long long flags;
        struct sim_node *last; /* the end of the last launch: launches of one executable graph run one after another */
        CUgraphExec next;
        size_t need;   /* bytes that its nodes hold at their peak */
        int device;    /* of that memory */
        CUcontext ctx; /* whose memory for executable graphs it takes a part of; NULL: none */
        bool has_it;   /* need is reserved: from its first upload or launch until a trim */
        CUgraphExec made_before;
};

/* Guarded by sim_lock(). Destroyed structures are kept and used again, so that a stale handle is recognised. */
static CUgraph dead_graphs;
static CUgraphExec dead_execs;
static CUgraphExec made; /* all that were ever made, destroyed or not */

/* The memory of graphs on each device. That of destroyed graphs stays reserved until a trim. */
static struct graph_memory {
        size_t reserved, used, reserved_high, used_high;
} graph_memory[SIM_MAX_DEVICES];

static struct sim_op *memory_of(CUgraphNode node, enum sim_op_kind kind)
{
        return node && node->op.kind == kind ? &node->op : NULL;
}

/* An allocation gets an address of its own, which is never used again: clones of the node may outlive the graph. */
CUresult sim_graph_add_memory(CUgraph graph, struct sim_op *op, const struct sim_frontier *after, CUgraphNode *ret_node)
{
        if (op->kind == SIM_OP_GRAPH_ALLOC) {
                size_t bytes = (op->u.memory.bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
                void *at = sim_map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

                if (at == MAP_FAILED)
                        return CUDA_ERROR_OUT_OF_MEMORY;
                op->u.memory.base = (uintptr_t)at;
                if (!sim_range_add(SIM_ALLOC_GRAPH, (uintptr_t)at, bytes, op->ctx, op->u.memory.device, 0)) {
                        munmap(at, bytes);
                        return CUDA_ERROR_OUT_OF_MEMORY;
                }
        }
        *ret_node = sim_graph_add(graph, op, after);
        return *ret_node ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

bool sim_graph_may_free(CUgraph graph, uintptr_t base)
{
        struct sim_alloc *alloc = sim_find(base);

        for (size_t i = 0; i < graph->count; i++) {
                struct sim_op *op = memory_of(graph->nodes[i], SIM_OP_GRAPH_FREE);

                if (op && op->u.memory.base == base)
                        return false;
        }
        return alloc && alloc->base == base && alloc->kind == SIM_ALLOC_GRAPH;
}

/* Sets need, by going through the nodes in their order. */
static void measure(CUgraphExec exec)
{
        CUgraph graph = exec->graph;
        size_t now = 0;

        for (size_t i = 0; i < graph->count; i++) {
                struct sim_op *op = &graph->nodes[i]->op;

                if (op->kind == SIM_OP_GRAPH_ALLOC) {
                        now += (op->u.memory.bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
                        exec->device = op->u.memory.device;
                        exec->need = now > exec->need ? now : exec->need;
                }
                for (size_t k = 0; op->kind == SIM_OP_GRAPH_FREE && k < i; k++) {
                        struct sim_op *of = memory_of(graph->nodes[k], SIM_OP_GRAPH_ALLOC);

                        if (of && of->u.memory.base == op->u.memory.base)
                                now -= (of->u.memory.bytes + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
                }
        }
}

static bool take_memory(CUgraphExec exec)
{
        struct graph_memory *memory = &graph_memory[exec->device];
        size_t idle = memory->reserved - memory->used, more = exec->need > idle ? exec->need - idle : 0;

        if (!exec->need || exec->has_it)
                return true;
        if (!sim_heap_charge(exec->device, more))
                return false;
        memory->reserved += more;
        memory->used += exec->need;
        if (memory->reserved > memory->reserved_high)
                memory->reserved_high = memory->reserved;
        if (memory->used > memory->used_high)
                memory->used_high = memory->used;
        exec->has_it = true;
        return true;
}

static void drop_memory(CUgraphExec exec)
{
        if (exec->has_it)
                graph_memory[exec->device].used -= exec->need;
        exec->has_it = false;
}

/*
 * An instantiation takes memory of the current context, which keeps it for its next executable graphs (measured, driver
 * 580: docs/measurements.md, graph-executables).
 */
static bool take_part(CUgraphExec exec)
{
        size_t bytes = sim_config()->executable_bytes;

        if (sim_current(&exec->ctx) != CUDA_SUCCESS)
                exec->ctx = NULL;
        if (!exec->ctx || !bytes)
                return true;
        if (exec->ctx->executables == exec->ctx->executables_high) {
                if (!sim_heap_charge(exec->ctx->device, bytes))
                        return false;
                exec->ctx->executables_high++;
        }
        exec->ctx->executables++;
        return true;
}

void sim_graph_forget_context(CUcontext ctx)
{
        for (CUgraphExec exec = made; exec; exec = exec->made_before)
                if (exec->ctx == ctx)
                        exec->ctx = NULL;
        while (ctx->executables_high > 0) {
                ctx->executables_high--;
                sim_heap_uncharge(ctx->device, sim_config()->executable_bytes);
        }
        ctx->executables = 0;
}

CUgraph sim_graph_new(void)
{
        CUgraph graph = dead_graphs;

        if (graph)
                dead_graphs = (CUgraph)(void *)graph->nodes;
        else
                graph = malloc(sizeof *graph);
        if (graph)
                *graph = (struct CUgraph_st){.magic = MAGIC_GRAPH};
        return graph;
}

bool sim_is_graph(CUgraph graph)
{
        return graph && graph->magic == MAGIC_GRAPH;
}

void sim_graph_free(CUgraph graph)
{
        sim_holds_drop(&graph->holds);
        for (size_t i = 0; i < graph->count; i++) {
                if (graph->nodes[i]->child)
                        sim_graph_free(graph->nodes[i]->child);
                free(graph->nodes[i]->after);
                free(graph->nodes[i]);
        }
        free(graph->nodes);
        graph->magic = 0;
        graph->nodes = (CUgraphNode *)(void *)dead_graphs;
        dead_graphs = graph;
}

CUgraphNode sim_graph_add(CUgraph graph, const struct sim_op *op, const struct sim_frontier *after)
{
        CUgraphNode node = calloc(1, sizeof *node);
        CUgraphNode *more = realloc(graph->nodes, (graph->count + 1) * sizeof *more);

        if (more)
                graph->nodes = more;
        if (node && after->count)
                node->after = malloc(after->count * sizeof *node->after);
        if (!more || !node || (after->count && !node->after)) {
                free(node);
                return NULL;
        }
        for (size_t i = 0; i < after->count; i++)
                node->after[i] = after->index[i];
        node->n_after = after->count;
        node->graph = graph;
        node->index = node->created = graph->count;
        node->op = *op;
        graph->nodes[graph->count++] = node;
        return node;
}

CUgraphNode sim_graph_add_graph(CUgraph graph, CUgraph child, const struct sim_frontier *after,
                                struct sim_frontier *ret_all)
{
        struct sim_op join = {.kind = SIM_OP_JOIN};
        CUgraphNode root = sim_graph_add(graph, &join, after), node = root;

        ret_all->index = malloc((child->count + 1) * sizeof *ret_all->index);
        if (!sim_holds_add(&graph->holds, &child->holds))
                return NULL;
        for (size_t i = 0; node && i < child->count; i++) {
                CUgraphNode from = child->nodes[i];
                struct sim_frontier at_root = {&root->index, 1}, moved = {calloc(from->n_after + 1, sizeof(size_t)), 0};
                struct sim_frontier inner = {0};

                if (!moved.index || !ret_all->index) {
                        free(moved.index);
                        return NULL;
                }
                for (size_t k = 0; k < from->n_after; k++)
                        moved.index[moved.count++] = ret_all->index[from->after[k]];
                if (from->child)
                        node = sim_graph_add_graph(graph, from->child, moved.count ? &moved : &at_root, &inner);
                if (node)
                        node = sim_graph_add(graph, &from->op, inner.count ? &inner : moved.count ? &moved : &at_root);
                sim_frontier_clear(&inner);
                free(moved.index);
                if (node)
                        ret_all->index[ret_all->count++] = node->index;
        }
        return node;
}

/* A copy with nodes and references of its own. NULL when out of host memory. Lock held. */
static CUgraph copy_of(CUgraph graph)
{
        CUgraph copy = sim_graph_new();
        bool whole = copy && sim_holds_add(&copy->holds, &graph->holds);

        for (size_t i = 0; whole && i < graph->count; i++) {
                CUgraphNode from = graph->nodes[i];
                CUgraphNode to = sim_graph_add(copy, &from->op, &(struct sim_frontier){from->after, from->n_after});

                whole = to != NULL;
                if (to)
                        to->created = from->created;
                if (to && from->child) {
                        to->child = copy_of(from->child);
                        whole = to->child != NULL;
                }
        }
        if (!whole && copy)
                sim_graph_free(copy);
        return whole ? copy : NULL;
}

/* Nodes for memory forbid that a graph is copied, other than into an executable graph. */
static bool has_memory(CUgraph graph)
{
        for (size_t i = 0; i < graph->count; i++) {
                const struct CUgraphNode_st *node = graph->nodes[i];

                if (node->op.kind == SIM_OP_GRAPH_ALLOC || node->op.kind == SIM_OP_GRAPH_FREE ||
                    (node->child && has_memory(node->child)))
                        return true;
        }
        return false;
}

bool sim_graph_joined(CUgraph graph, const struct sim_frontier *frontier)
{
        bool *reached = calloc(graph->count + 1, sizeof *reached), all = reached != NULL;

        for (size_t i = 0; all && i < frontier->count; i++)
                reached[frontier->index[i]] = true;
        for (size_t i = graph->count; all && i-- > 0;) {
                all = reached[i];
                for (size_t k = 0; k < graph->nodes[i]->n_after; k++)
                        reached[graph->nodes[i]->after[k]] = true;
        }
        free(reached);
        return all;
}

/*
 * As driver 580 does now and then, it runs a graph with user objects and answers CUDA_ERROR_UNKNOWN all the same while
 * another thread waits for the stream: here always.
 */
static CUresult launch(CUgraphExec exec, CUstream stream)
{
        CUgraph graph = exec->graph;
        struct sim_op ending = {.kind = SIM_OP_GRAPH_END};
        struct sim_node **nodes, *start, *end;
        bool has_objects;

        if (stream->capture)
                return sim_capture_graph(stream, graph);
        if (!take_memory(exec))
                return CUDA_ERROR_OUT_OF_MEMORY;
        if (stream == stream->ctx->legacy) {
                CUresult rc = sim_capture_legacy(stream->ctx);

                if (rc != CUDA_SUCCESS)
                        return rc;
        }
        nodes = calloc(graph->count + 1, sizeof *nodes);
        if (!nodes || !sim_holds_add(&ending.u.holds, &graph->holds)) {
                sim_holds_drop(&ending.u.holds);
                free(nodes);
                return CUDA_ERROR_OUT_OF_MEMORY;
        }
        start = sim_stream_node(stream, NULL);
        sim_node_after(start, exec->last);
        sim_node_start(start);
        has_objects = ending.u.holds.count > 0;
        end = sim_node_new(has_objects ? &ending : NULL);
        sim_node_after(end, start);
        for (size_t i = 0; i < graph->count; i++) {
                nodes[i] = sim_node_new(&graph->nodes[i]->op);
                sim_node_after(nodes[i], start);
                for (size_t k = 0; k < graph->nodes[i]->n_after; k++)
                        sim_node_after(nodes[i], nodes[graph->nodes[i]->after[k]]);
                sim_node_after(end, nodes[i]);
        }
        for (size_t i = 0; i < graph->count; i++) {
                sim_node_start(nodes[i]);
                sim_node_put(nodes[i]);
        }
        free(nodes);
        sim_node_start(end);
        sim_node_replace(&exec->last, sim_node_get(end));
        sim_node_replace(&stream->last, end);
        sim_node_put(start);
        return has_objects && stream->waiting > 0 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

SIM_API cuGraphCreate(CUgraph *ret_graph, unsigned flags)
{
        SIM_ENTER(cuGraphCreate);
        if (!ret_graph || flags)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        *ret_graph = sim_graph_new();
        sim_unlock();
        return *ret_graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

SIM_API cuGraphDestroy(CUgraph graph)
{
        CUresult rc = CUDA_SUCCESS;

        SIM_ENTER(cuGraphDestroy);
        sim_lock();
        if (sim_is_graph(graph))
                sim_graph_free(graph);
        else
                rc = CUDA_ERROR_INVALID_VALUE;
        sim_unlock();
        return rc;
}

SIM_API cuGraphClone(CUgraph *ret_graph, CUgraph graph)
{
        CUresult rc = CUDA_SUCCESS;

        SIM_ENTER(cuGraphClone);
        if (!ret_graph)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        if (!sim_is_graph(graph)) {
                rc = CUDA_ERROR_INVALID_VALUE;
        } else if (has_memory(graph)) {
                rc = CUDA_ERROR_NOT_SUPPORTED;
        } else {
                CUgraph copy = copy_of(graph);

                if (copy)
                        *ret_graph = copy;
                else
                        rc = CUDA_ERROR_OUT_OF_MEMORY;
        }
        sim_unlock();
        return rc;
}

/* The driver promises no order, so nodes are returned in reverse, which shows programs that rely on one. */
SIM_API cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
        CUresult rc = CUDA_SUCCESS;

        SIM_ENTER(cuGraphGetNodes);
        if (!count)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        if (!sim_is_graph(graph)) {
                rc = CUDA_ERROR_INVALID_VALUE;
        } else if (!nodes) {
                *count = graph->count;
        } else {
                for (size_t i = graph->count; i < *count; i++)
                        nodes[i] = NULL;
                for (size_t i = 0; i < graph->count; i++)
                        if (graph->count - 1 - graph->nodes[i]->created < *count)
                                nodes[graph->count - 1 - graph->nodes[i]->created] = graph->nodes[i];
                *count = *count < graph->count ? *count : graph->count;
        }
        sim_unlock();
        return rc;
}

static bool is_programmatic(const struct sim_op *before, const struct sim_op *op)
{
        return before->kind == SIM_OP_KERNEL && op->kind == SIM_OP_KERNEL && op->u.launch.programmatic;
}

/* Only the edges to programmatic launches have data of their own. */
SIM_API cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count)
{
        CUresult rc = CUDA_SUCCESS;
        size_t found = 0;

        SIM_ENTER(cuGraphGetEdges_v2);
        if (!count || !from != !to || (data && !from))
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        if (!sim_is_graph(graph))
                rc = CUDA_ERROR_INVALID_VALUE;
        for (size_t i = 0; rc == CUDA_SUCCESS && i < graph->count; i++) {
                const struct CUgraphNode_st *node = graph->nodes[i];

                for (size_t k = 0; k < node->n_after; k++, found++) {
                        if (!from || found >= *count)
                                continue;
                        from[found] = graph->nodes[node->after[k]];
                        to[found] = graph->nodes[i];
                        if (data)
                                data[found] = (CUgraphEdgeData){0};
                        if (data && is_programmatic(&from[found]->op, &node->op)) {
                                data[found].from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
                                data[found].type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
                        }
                }
        }
        if (rc == CUDA_SUCCESS)
                *count = from && found > *count ? *count : found;
        sim_unlock();
        return rc;
}

SIM_API cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
        SIM_ENTER(cuGraphNodeGetType);
        if (!node || !type)
                return CUDA_ERROR_INVALID_VALUE;
        switch (node->op.kind) {
        case SIM_OP_KERNEL:
                *type = CU_GRAPH_NODE_TYPE_KERNEL;
                break;
        case SIM_OP_COPY:
                *type = CU_GRAPH_NODE_TYPE_MEMCPY;
                break;
        case SIM_OP_FILL:
                *type = CU_GRAPH_NODE_TYPE_MEMSET;
                break;
        case SIM_OP_GRAPH_ALLOC:
                *type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
                break;
        case SIM_OP_GRAPH_FREE:
                *type = CU_GRAPH_NODE_TYPE_MEM_FREE;
                break;
        case SIM_OP_HOST:
                *type = CU_GRAPH_NODE_TYPE_HOST;
                break;
        case SIM_OP_WRITE_VALUE:
        case SIM_OP_WAIT_VALUE:
                *type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
                break;
        default:
                *type = node->child ? CU_GRAPH_NODE_TYPE_GRAPH : CU_GRAPH_NODE_TYPE_EMPTY;
        }
        return CUDA_SUCCESS;
}

static CUgraphExec make_exec(void)
{
        CUgraphExec exec = calloc(1, sizeof *exec);

        if (exec) {
                exec->made_before = made;
                made = exec;
        }
        return exec;
}

/* The executable graph is a copy: the program may destroy or change the graph afterwards. */
static CUresult instantiate(CUgraphExec *ret_exec, CUgraph graph, unsigned long long flags)
{
        struct sim_frontier none = {0}, all = {0};
        CUgraphExec exec;
        CUresult rc = CUDA_SUCCESS;

        if (!ret_exec)
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        rc = sim_capture_unsafe();
        if (rc == CUDA_SUCCESS && (!sim_is_graph(graph)))
                rc = CUDA_ERROR_INVALID_VALUE;
        if (rc != CUDA_SUCCESS)
                goto out;
        exec = dead_execs;
        if (exec)
                dead_execs = exec->next;
        else
                exec = make_exec();
        if (exec) {
                CUgraphExec before = exec->made_before;

                *exec = (struct CUgraphExec_st){
                        .magic = MAGIC_EXEC, .graph = sim_graph_new(), .flags = flags, .made_before = before};
                if (exec->graph && sim_graph_add_graph(exec->graph, graph, &none, &all) && take_part(exec)) {
                        measure(exec);
                        *ret_exec = exec;
                } else {
                        if (exec->graph)
                                sim_graph_free(exec->graph);
                        exec->magic = 0;
                        exec->next = dead_execs;
                        dead_execs = exec;
                        rc = CUDA_ERROR_OUT_OF_MEMORY;
                }
        } else {
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        }
out:
        sim_unlock();
        sim_frontier_clear(&all);
        return rc;
}

static bool same_memory(const struct sim_op *a, const struct sim_op *b)
{
        if (a->kind != SIM_OP_GRAPH_ALLOC && a->kind != SIM_OP_GRAPH_FREE)
                return true;
        return a->u.memory.base == b->u.memory.base && a->u.memory.bytes == b->u.memory.bytes;
}

/* What forbids that `now` replaces `was`; *ret_at: at which node. Both are copies for an executable graph. */
static CUgraphExecUpdateResult compare(CUgraph was, CUgraph now, size_t *ret_at)
{
        *ret_at = SIZE_MAX;
        if (was->count != now->count)
                return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        for (size_t i = 0; i < was->count; i++) {
                size_t n = was->nodes[i]->n_after;

                if (n != now->nodes[i]->n_after ||
                    (n && memcmp(was->nodes[i]->after, now->nodes[i]->after, n * sizeof(size_t)) != 0))
                        return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
        }
        for (size_t i = 0; i < was->count; i++) {
                *ret_at = i;
                if (was->nodes[i]->op.kind != now->nodes[i]->op.kind)
                        return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
                if (!same_memory(&was->nodes[i]->op, &now->nodes[i]->op))
                        return CU_GRAPH_EXEC_UPDATE_ERROR_NOT_SUPPORTED;
        }
        return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

/* A copy of graph takes the place of the executable graph's own. Allowed beside captures (measured, driver 580). */
static CUresult update(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
        struct sim_frontier none = {0}, all = {0};
        CUgraph now = NULL;
        CUresult rc = CUDA_SUCCESS;
        size_t at;

        *info = (CUgraphExecUpdateResultInfo){.result = CU_GRAPH_EXEC_UPDATE_ERROR};
        sim_lock();
        if (!exec || exec->magic != MAGIC_EXEC || !sim_is_graph(graph))
                rc = CUDA_ERROR_INVALID_VALUE;
        else
                now = sim_graph_new();
        if (rc == CUDA_SUCCESS && (!now || !sim_graph_add_graph(now, graph, &none, &all)))
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        if (rc == CUDA_SUCCESS) {
                info->result = compare(exec->graph, now, &at);
                if (info->result != CU_GRAPH_EXEC_UPDATE_SUCCESS)
                        rc = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
        }
        if (rc == CUDA_SUCCESS) {
                CUgraph was = exec->graph;

                exec->graph = now;
                now = was;
        }
        for (size_t i = 0; rc == CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE && i < all.count; i++)
                if (all.index[i] == at)
                        info->errorNode = graph->nodes[i];
        if (now)
                sim_graph_free(now);
        sim_unlock();
        sim_frontier_clear(&all);
        return rc;
}

SIM_API cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error_node, CUgraphExecUpdateResult *result)
{
        CUgraphExecUpdateResultInfo info;
        CUresult rc;

        SIM_ENTER(cuGraphExecUpdate);
        rc = update(exec, graph, &info);
        if (error_node)
                *error_node = info.errorNode;
        if (result)
                *result = info.result;
        return rc;
}

SIM_API cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
        CUgraphExecUpdateResultInfo unused;

        SIM_ENTER(cuGraphExecUpdate_v2);
        return update(exec, graph, info ? info : &unused);
}

/* Lock held. */
static void destroy(CUgraphExec exec)
{
        exec->magic = 0;
        drop_memory(exec);
        if (exec->ctx && exec->ctx->executables > 0)
                exec->ctx->executables--;
        exec->ctx = NULL;
        sim_graph_free(exec->graph);
        sim_node_replace(&exec->last, NULL);
        exec->next = dead_execs;
        dead_execs = exec;
}

static CUresult with_exec(CUgraphExec exec, CUstream handle, bool run);

/* Instantiates and, if params ask for it, uploads. Without memory for the upload there is no executable graph. */
static CUresult instantiate_with(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params,
                                 bool null_is_own)
{
        CUstream stream = !params->hUploadStream && null_is_own ? CU_STREAM_PER_THREAD : params->hUploadStream;
        CUresult rc = instantiate(exec, graph, params->flags);

        if (rc == CUDA_SUCCESS && params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) {
                rc = with_exec(*exec, stream, false);
                if (rc != CUDA_SUCCESS) {
                        sim_lock();
                        destroy(*exec);
                        sim_unlock();
                }
        }
        params->result_out = rc == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
        return rc;
}

SIM_API cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes)
{
        SIM_ENTER(cuGraphInstantiate_v2);
        (void)error_node;
        if (log && log_bytes)
                *log = '\0';
        return instantiate(exec, graph, 0);
}

SIM_API cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
        SIM_ENTER(cuGraphInstantiateWithFlags);
        return instantiate(exec, graph, flags);
}

SIM_API cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
        SIM_ENTER(cuGraphInstantiateWithParams);
        if (!params)
                return CUDA_ERROR_INVALID_VALUE;
        return instantiate_with(exec, graph, params, false);
}

SIM_API cuGraphInstantiateWithParams_ptsz(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
        SIM_ENTER(cuGraphInstantiateWithParams_ptsz);
        if (!params)
                return CUDA_ERROR_INVALID_VALUE;
        return instantiate_with(exec, graph, params, true);
}

SIM_API cuGraphExecDestroy(CUgraphExec exec)
{
        CUresult rc;

        SIM_ENTER(cuGraphExecDestroy);
        sim_lock();
        rc = sim_capture_unsafe();
        if (rc == CUDA_SUCCESS && (!exec || exec->magic != MAGIC_EXEC))
                rc = CUDA_ERROR_INVALID_VALUE;
        if (rc != CUDA_SUCCESS) {
                sim_unlock();
                return rc;
        }
        destroy(exec);
        sim_unlock();
        return CUDA_SUCCESS;
}

static CUresult with_exec(CUgraphExec exec, CUstream handle, bool run)
{
        CUstream s;
        CUresult rc;

        sim_lock();
        if (!exec || exec->magic != MAGIC_EXEC)
                rc = CUDA_ERROR_INVALID_VALUE;
        else
                rc = sim_stream_resolve(handle, &s);
        if (rc == CUDA_SUCCESS && run)
                rc = launch(exec, s);
        else if (rc == CUDA_SUCCESS && !take_memory(exec))
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        sim_unlock();
        return rc;
}

SIM_PTSZ(cuGraphLaunch, (CUgraphExec exec, CUstream stream), (exec, stream))
{
        return with_exec(exec, stream, true);
}

/* An upload only reserves the graph's memory. */
SIM_PTSZ(cuGraphUpload, (CUgraphExec exec, CUstream stream), (exec, stream))
{
        return with_exec(exec, stream, false);
}

/* The node owns child, if there is one. */
static CUresult add_node(CUgraphNode *ret_node, CUgraph graph, const CUgraphNode *after, size_t n_after,
                         struct sim_op *op, CUgraph child)
{
        struct sim_frontier given = {0};
        CUresult rc;

        sim_lock();
        rc = sim_is_graph(graph) ? sim_frontier_of(graph, after, n_after, &given) : CUDA_ERROR_INVALID_VALUE;
        if (rc == CUDA_SUCCESS)
                rc = sim_graph_add_memory(graph, op, &given, ret_node);
        if (rc == CUDA_SUCCESS)
                (*ret_node)->child = child;
        sim_unlock();
        sim_frontier_clear(&given);
        return rc;
}

/* Sorts the nodes by their dependencies. CUDA_ERROR_INVALID_VALUE for a cycle; then nothing is changed. */
static CUresult put_in_order(CUgraph graph)
{
        CUgraphNode *nodes = calloc(graph->count + 1, sizeof(CUgraphNode));
        size_t *moved = calloc(graph->count + 1, sizeof *moved), placed = 0; /* where each went, plus 1 */
        CUresult rc = nodes && moved ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

        while (rc == CUDA_SUCCESS && placed < graph->count) {
                rc = CUDA_ERROR_INVALID_VALUE;
                for (size_t i = 0; i < graph->count && rc != CUDA_SUCCESS; i++) {
                        CUgraphNode node = graph->nodes[i];
                        bool ready = !moved[i];

                        for (size_t k = 0; ready && k < node->n_after; k++)
                                ready = moved[node->after[k]];
                        if (!ready)
                                continue;
                        nodes[placed++] = node;
                        moved[i] = placed;
                        rc = CUDA_SUCCESS;
                }
        }
        for (size_t i = 0; rc == CUDA_SUCCESS && i < graph->count; i++) {
                nodes[i]->index = i;
                for (size_t k = 0; k < nodes[i]->n_after; k++)
                        nodes[i]->after[k] = moved[nodes[i]->after[k]] - 1;
        }
        if (rc == CUDA_SUCCESS)
                memcpy(graph->nodes, nodes, graph->count * sizeof(CUgraphNode));
        free(nodes);
        free(moved);
        return rc;
}

/* Refused for a graph that a capture adds to: the capture knows nodes by index, and sorting changes these. */
SIM_API cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                  const CUgraphEdgeData *data, size_t count)
{
        CUresult rc = CUDA_SUCCESS;
        size_t added = 0;

        SIM_ENTER(cuGraphAddDependencies_v2);
        (void)data;
        if (count && (!from || !to))
                return CUDA_ERROR_INVALID_VALUE;
        sim_lock();
        if (!sim_is_graph(graph))
                rc = CUDA_ERROR_INVALID_VALUE;
        for (; rc == CUDA_SUCCESS && added < count; added++) {
                CUgraphNode end = to[added];
                size_t *more;

                if (!from[added] || !end || from[added]->graph != graph || end->graph != graph) {
                        rc = CUDA_ERROR_INVALID_VALUE;
                        break;
                }
                more = realloc(end->after, (end->n_after + 1) * sizeof *more);
                if (!more) {
                        rc = CUDA_ERROR_OUT_OF_MEMORY;
                        break;
                }
                end->after = more;
                end->after[end->n_after++] = from[added]->index;
        }
        if (rc == CUDA_SUCCESS)
                rc = put_in_order(graph);
        while (rc != CUDA_SUCCESS && added > 0)
                to[--added]->n_after--;
        sim_unlock();
        return rc;
}

SIM_API cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t n_after,
                               CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
        struct sim_op op = {.kind = SIM_OP_GRAPH_ALLOC};
        CUresult rc;

        SIM_ENTER(cuGraphAddMemAllocNode);
        if (!node || !graph || !params || (n_after && !after) || !params->bytesize ||
            params->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
            sim_device_check(params->poolProps.location.id) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_VALUE;
        op.u.memory.bytes = params->bytesize;
        op.u.memory.device = params->poolProps.location.id;
        rc = add_node(node, graph, after, n_after, &op, NULL);
        if (rc == CUDA_SUCCESS)
                params->dptr = op.u.memory.base;
        return rc;
}

SIM_API cuGraphAddHostNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t n_after,
                           const CUDA_HOST_NODE_PARAMS *params)
{
        struct sim_op op = {.kind = SIM_OP_HOST};

        SIM_ENTER(cuGraphAddHostNode);
        if (!node || !graph || !params || !params->fn || (n_after && !after))
                return CUDA_ERROR_INVALID_VALUE;
        op.u.host.fn = params->fn;
        op.u.host.arg = params->userData;
        return add_node(node, graph, after, n_after, &op, NULL);
}

SIM_API cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t n_after,
                                 CUgraph child)
{
        struct sim_op op = {.kind = SIM_OP_JOIN};
        CUgraph copy = NULL;
        CUresult rc;

        SIM_ENTER(cuGraphAddChildGraphNode);
        if (!node || !graph || !child || (n_after && !after))
                return CUDA_ERROR_INVALID_VALUE;
        if (graph == child) {
                sim_misuse("a graph is added to itself, which crashes a driver");
                return CUDA_ERROR_INVALID_VALUE;
        }
        sim_lock();
        if (!sim_is_graph(child)) {
                rc = CUDA_ERROR_INVALID_VALUE;
        } else if (has_memory(child)) {
                rc = CUDA_ERROR_NOT_SUPPORTED;
        } else {
                copy = copy_of(child);
                rc = copy ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        }
        sim_unlock();
        if (rc == CUDA_SUCCESS)
                rc = add_node(node, graph, after, n_after, &op, copy);
        if (rc != CUDA_SUCCESS && copy) {
                sim_lock();
                sim_graph_free(copy);
                sim_unlock();
        }
        return rc;
}

/* Adds a node for memory, a host function, or a graph, which the node owns then; other kinds are not supported. */
static CUresult add_any(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t n_after,
                        CUgraphNodeParams *params)
{
        struct sim_op op;
        CUgraph child = NULL;
        CUresult rc;

        if (!node || !graph || !params || (n_after && !after))
                return CUDA_ERROR_INVALID_VALUE;
        switch (params->type) {
        case CU_GRAPH_NODE_TYPE_HOST:
                op = (struct sim_op){.kind = SIM_OP_HOST,
                                     .u.host = {.fn = params->host.fn, .arg = params->host.userData}};
                break;
        case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
                op = (struct sim_op){
                        .kind = SIM_OP_GRAPH_ALLOC,
                        .u.memory = {.bytes = params->alloc.bytesize, .device = params->alloc.poolProps.location.id}};
                if (!params->alloc.bytesize || params->alloc.poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
                    sim_device_check(op.u.memory.device) != CUDA_SUCCESS)
                        return CUDA_ERROR_INVALID_VALUE;
                break;
        case CU_GRAPH_NODE_TYPE_GRAPH:
                if (!params->graph.graph || params->graph.graph->magic != MAGIC_GRAPH || params->graph.graph == graph)
                        return CUDA_ERROR_INVALID_VALUE;
                op = (struct sim_op){.kind = SIM_OP_JOIN};
                child = params->graph.graph;
                break;
        default:
                return CUDA_ERROR_NOT_SUPPORTED;
        }
        rc = add_node(node, graph, after, n_after, &op, child);
        if (rc == CUDA_SUCCESS && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
                params->alloc.dptr = op.u.memory.base;
        return rc;
}

SIM_API cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t n_after,
                       CUgraphNodeParams *params)
{
        SIM_ENTER(cuGraphAddNode);
        return add_any(node, graph, after, n_after, params);
}

SIM_API cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *data,
                          size_t n_after, CUgraphNodeParams *params)
{
        SIM_ENTER(cuGraphAddNode_v2);
        (void)data;
        return add_any(node, graph, after, n_after, params);
}

SIM_API cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t n_after,
                              CUdeviceptr dptr)
{
        struct sim_op op = {.kind = SIM_OP_GRAPH_FREE, .u.memory = {.base = dptr}};

        SIM_ENTER(cuGraphAddMemFreeNode);
        if (!node || !graph || !dptr || (n_after && !after))
                return CUDA_ERROR_INVALID_VALUE;
        return add_node(node, graph, after, n_after, &op, NULL);
}

SIM_API cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
        struct sim_op *op;

        SIM_ENTER(cuGraphMemAllocNodeGetParams);
        op = memory_of(node, SIM_OP_GRAPH_ALLOC);
        if (!op || !params)
                return CUDA_ERROR_INVALID_VALUE;
        *params = (CUDA_MEM_ALLOC_NODE_PARAMS){
                .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                              .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = op->u.memory.device}},
                .bytesize = op->u.memory.bytes,
                .dptr = op->u.memory.base};
        return CUDA_SUCCESS;
}

SIM_API cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *dptr)
{
        struct sim_op *op;

        SIM_ENTER(cuGraphMemFreeNodeGetParams);
        op = memory_of(node, SIM_OP_GRAPH_FREE);
        if (!op || !dptr)
                return CUDA_ERROR_INVALID_VALUE;
        *dptr = op->u.memory.base;
        return CUDA_SUCCESS;
}

/* A graph whose launch was captured is no child: its nodes were added to the graph itself. */
SIM_API cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph)
{
        SIM_ENTER(cuGraphChildGraphNodeGetGraph);
        if (!node || !graph || !node->child)
                return CUDA_ERROR_INVALID_VALUE;
        *graph = node->child;
        return CUDA_SUCCESS;
}

/* Also trims memory of live graphs that do not run: their next launch reserves it again. */
SIM_API cuDeviceGraphMemTrim(CUdevice device)
{
        struct graph_memory *memory;

        SIM_ENTER(cuDeviceGraphMemTrim);
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        memory = &graph_memory[device];
        sim_lock();
        for (CUgraphExec exec = made; exec; exec = exec->made_before)
                if (exec->magic == MAGIC_EXEC && exec->device == device && (!exec->last || exec->last->done))
                        drop_memory(exec);
        sim_heap_uncharge(device, memory->reserved - memory->used);
        memory->reserved = memory->used;
        sim_unlock();
        return CUDA_SUCCESS;
}

SIM_API cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value)
{
        struct graph_memory memory;

        SIM_ENTER(cuDeviceGetGraphMemAttribute);
        if (!value)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        sim_lock();
        memory = graph_memory[device];
        sim_unlock();
        switch (attribute) {
        case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
                *(cuuint64_t *)value = memory.used;
                break;
        case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH:
                *(cuuint64_t *)value = memory.used_high;
                break;
        case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT:
                *(cuuint64_t *)value = memory.reserved;
                break;
        case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH:
                *(cuuint64_t *)value = memory.reserved_high;
                break;
        default:
                return CUDA_ERROR_INVALID_VALUE;
        }
        return CUDA_SUCCESS;
}

SIM_API cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value)
{
        SIM_ENTER(cuDeviceSetGraphMemAttribute);
        if (!value || *(const cuuint64_t *)value != 0 || sim_device_check(device) != CUDA_SUCCESS)
                return !value || sim_device_check(device) == CUDA_SUCCESS ? CUDA_ERROR_INVALID_VALUE
                                                                          : CUDA_ERROR_INVALID_DEVICE;
        sim_lock();
        if (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
                graph_memory[device].used_high = graph_memory[device].used;
        else if (attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
                graph_memory[device].reserved_high = graph_memory[device].reserved;
        sim_unlock();
        return CUDA_SUCCESS;
}
