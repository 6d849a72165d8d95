/* The operations: what a worker thread does when it runs one of each kind. */
#include "sim.h"

#include <stdlib.h>
#include <time.h>

const char *sim_op_name(const struct sim_op *op)
{
        switch (op->kind) {
        case SIM_OP_KERNEL:
                return sim_kernel_name(op->u.launch.kernel);
        case SIM_OP_COPY:
                return "copy";
        case SIM_OP_FILL:
                return "memset";
        case SIM_OP_WRITE_VALUE:
                return "write value";
        case SIM_OP_WAIT_VALUE:
                return "wait value";
        case SIM_OP_JOIN:
        case SIM_OP_GRAPH_ALLOC:
        case SIM_OP_GRAPH_FREE:
        case SIM_OP_GRAPH_END:
        case SIM_OP_HOST:
        case SIM_OP_CALLBACK:
        case SIM_OP_FREE:
                break;
        }
        return "operation";
}

static void run_copy(const struct sim_op *op)
{
        struct sim_access access = {op, true};

        for (size_t z = 0; z < op->u.copy.depth; z++) {
                for (size_t y = 0; y < op->u.copy.height; y++) {
                        uintptr_t dst = op->u.copy.dst + z * op->u.copy.dst_slice + y * op->u.copy.dst_pitch;
                        uintptr_t src = op->u.copy.src + z * op->u.copy.src_slice + y * op->u.copy.src_pitch;

                        if (!sim_touch_copy(&access, dst, src, op->u.copy.width))
                                return;
                }
        }
}

static void run_fill(const struct sim_op *op)
{
        struct sim_access access = {op, false};

        for (size_t y = 0; y < op->u.fill.height; y++) {
                if (!sim_touch_fill(&access, op->u.fill.dst + y * op->u.fill.pitch, op->u.fill.width,
                                    op->u.fill.element, op->u.fill.value))
                        return;
        }
}

static bool is_satisfied(uint64_t seen, uint64_t wanted, unsigned flags, unsigned bytes)
{
        switch (flags & 3) {
        case CU_STREAM_WAIT_VALUE_GEQ:
                return bytes == 4 ? (int32_t)(uint32_t)(seen - wanted) >= 0 : (int64_t)(seen - wanted) >= 0;
        case CU_STREAM_WAIT_VALUE_EQ:
                return seen == wanted;
        case CU_STREAM_WAIT_VALUE_AND:
                return (seen & wanted) != 0;
        default:
                return ((seen | wanted) ^ (bytes == 4 ? UINT32_MAX : UINT64_MAX)) != 0;
        }
}

static void run_wait_value(const struct sim_op *op)
{
        const struct timespec pause = {0, 20000};
        struct sim_access access = {op, op->u.value.of_event};
        uint64_t seen;

        while (sim_touch_load(&access, op->u.value.addr, op->u.value.bytes, &seen) &&
               !is_satisfied(seen, op->u.value.value, op->u.value.flags, op->u.value.bytes))
                nanosleep(&pause, NULL);
}

static void run_host(const struct sim_op *op)
{
        sim_in_callback = true;
        if (op->kind == SIM_OP_HOST)
                op->u.host.fn(op->u.host.arg);
        else
                op->u.host.callback(op->u.host.stream, CUDA_SUCCESS, op->u.host.arg);
        sim_in_callback = false;
}

void sim_op_run(const struct sim_op *op)
{
        struct sim_access access = {op, false};
        struct sim_holds holds;

        switch (op->kind) {
        case SIM_OP_GRAPH_ALLOC:
        case SIM_OP_GRAPH_FREE:
        case SIM_OP_JOIN:
                break;
        case SIM_OP_KERNEL:
                sim_kernel_run(op);
                break;
        case SIM_OP_COPY:
                run_copy(op);
                break;
        case SIM_OP_FILL:
                run_fill(op);
                break;
        case SIM_OP_WRITE_VALUE:
                access.host_ok = op->u.value.of_event;
                sim_touch_store(&access, op->u.value.addr, op->u.value.bytes, op->u.value.value);
                break;
        case SIM_OP_WAIT_VALUE:
                run_wait_value(op);
                break;
        case SIM_OP_HOST:
        case SIM_OP_CALLBACK:
                run_host(op);
                break;
        case SIM_OP_GRAPH_END:
                /* Before the node is done: who waits for the launch finds the objects gone. */
                sim_lock();
                holds = op->u.holds;
                sim_holds_drop(&holds);
                sim_unlock();
                break;
        case SIM_OP_FREE:
                /* With the lock held: a thread that has it may look at any allocation. */
                sim_lock();
                if (op->u.victim->kind == SIM_ALLOC_POOL)
                        sim_pool_reached_free(op->u.victim);
                else
                        sim_heap_free(op->u.victim);
                sim_unlock();
                break;
        }
}

void sim_op_drop(struct sim_op *op)
{
        if (op->kind == SIM_OP_COPY)
                free(op->u.copy.staged);
}
