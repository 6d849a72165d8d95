/* Executable graphs: what a graph becomes when it is instantiated, its launches, and the memory of its nodes. */
#include "sim.h"

#include <stdlib.h>
#include <string.h>

#define MAGIC_EXEC 0x65786563u

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
static CUgraphExec dead_execs;
static CUgraphExec made; /* all that were ever made, destroyed or not */

/* The memory of graphs on each device. That of destroyed graphs stays reserved until a trim. */
static struct graph_memory {
        size_t reserved, used, reserved_high, used_high;
} graph_memory[SIM_MAX_DEVICES];

/* Sets need, by going through the nodes in their order. */
static void measure_need(CUgraphExec exec)
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
                        struct sim_op *of = &graph->nodes[k]->op;

                        if (of->kind == SIM_OP_GRAPH_ALLOC && of->u.memory.base == op->u.memory.base)
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

/*
 * As driver 580 does now and then, it runs a graph with user objects and answers CUDA_ERROR_UNKNOWN all the same while
 * another thread waits for the stream: here always.
 */
static CUresult launch_graph(CUgraphExec exec, CUstream stream)
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
static CUresult instantiate_graph(CUgraphExec *ret_exec, CUgraph graph, unsigned long long flags)
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
                        measure_need(exec);
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
static CUgraphExecUpdateResult compare_graphs(CUgraph was, CUgraph now, size_t *ret_at)
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
static CUresult update_graph(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
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
                info->result = compare_graphs(exec->graph, now, &at);
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
        rc = update_graph(exec, graph, &info);
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
        return update_graph(exec, graph, info ? info : &unused);
}

/* Lock held. */
static void destroy_exec(CUgraphExec exec)
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
        CUresult rc = instantiate_graph(exec, graph, params->flags);

        if (rc == CUDA_SUCCESS && params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD) {
                rc = with_exec(*exec, stream, false);
                if (rc != CUDA_SUCCESS) {
                        sim_lock();
                        destroy_exec(*exec);
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
        return instantiate_graph(exec, graph, 0);
}

SIM_API cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
        SIM_ENTER(cuGraphInstantiateWithFlags);
        return instantiate_graph(exec, graph, flags);
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
        destroy_exec(exec);
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
                rc = launch_graph(exec, s);
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
