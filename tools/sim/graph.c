/*
 * Graphs: the operations of a capture and their dependencies, to be run again. Nodes are kept in an order in which they
 * may run: that of their creation, unless a dependency that was added later contradicts it.
 */
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MAGIC_GRAPH 0x67727068u

/* Guarded by sim_lock(). Destroyed structures are kept and used again, so that a stale handle is recognised. */
static CUgraph dead_graphs;

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

/* Adds a node for memory, a host function, a fill, or a graph, which the node owns then; no other kinds. */
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
        case CU_GRAPH_NODE_TYPE_MEMSET:
                op = (struct sim_op){.kind = SIM_OP_FILL,
                                     .ctx = params->memset.ctx,
                                     .u.fill = {.dst = params->memset.dst,
                                                .pitch = params->memset.pitch,
                                                .width = params->memset.width,
                                                .height = params->memset.height,
                                                .element = params->memset.elementSize,
                                                .value = params->memset.value}};
                if (!op.ctx || !op.u.fill.dst || !op.u.fill.element)
                        return CUDA_ERROR_INVALID_VALUE;
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

SIM_API cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *data,
                          size_t n_after, CUgraphNodeParams *params)
{
        SIM_ENTER(cuGraphAddNode_v3);
        (void)data;
        return add_any(node, graph, after, n_after, params);
}

SIM_API cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t n_after,
                             const CUDA_MEMSET_NODE_PARAMS *given, CUcontext ctx)
{
        CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_MEMSET};

        SIM_ENTER(cuGraphAddMemsetNode);
        if (!given)
                return CUDA_ERROR_INVALID_VALUE;
        params.memset = (CUDA_MEMSET_NODE_PARAMS_v2){given->dst,   given->pitch,  given->value, given->elementSize,
                                                     given->width, given->height, ctx};
        return add_any(node, graph, after, n_after, &params);
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
