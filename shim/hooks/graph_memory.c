#include "hooks/graph_memory.h"

#include <assert.h>
#include <pthread.h>

#include "base/no_cancel.h"
#include "driver/real.h"

_Atomic uint64_t gr_graph_memory_trims = 1;

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_GRAPH_MEMORY);
static struct gr_pooled pooled[GR_DEVICES_MAX] GR_GUARDED_BY(lock);

static _Atomic bool memory_seen; /* some graph may allocate */

void gr_graph_memory_seen(void)
{
        atomic_store_explicit(&memory_seen, true, memory_order_relaxed);
}

bool gr_graph_memory_in_use(void)
{
        return atomic_load_explicit(&memory_seen, memory_order_relaxed);
}

void gr_graph_memory_trimmed(void)
{
        atomic_fetch_add(&gr_graph_memory_trims, 1);
}

/* Lock held. As gr_budget_correct, for the device's graph memory, which grows when a graph is launched. */
GR_HELD(lock) static void correct_device(struct gr_device *device, uint64_t precharged_bytes)
{
        int i = device->ordinal;
        cuuint64_t reserved, used;

        gr_assert_locked(&lock);
        assert(i >= 0 && i < GR_DEVICES_MAX);
        if (!gr_real.cuDeviceGetGraphMemAttribute ||
            gr_real.cuDeviceGetGraphMemAttribute(i, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved) !=
                    CUDA_SUCCESS) {
                gr_budget_uncharge(device, GR_MEMORY_GRAPH, precharged_bytes);
                return;
        }
        if (gr_real.cuDeviceGetGraphMemAttribute(i, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &used) != CUDA_SUCCESS ||
            used > reserved)
                used = reserved;
        gr_budget_correct(device, GR_MEMORY_GRAPH, &pooled[i], precharged_bytes, reserved, reserved - used);
}

int gr_graph_memory_reserve(struct gr_device *device, uint64_t need_bytes, bool may_have_it,
                            uint64_t *ret_reserved_bytes)
{
        uint64_t idle;
        int rc;
        GR_NO_CANCEL;

        gr_lock(&lock);
        correct_device(device, 0);
        assert(pooled[device->ordinal].idle_bytes <= pooled[device->ordinal].reserved_bytes);
        idle = may_have_it ? pooled[device->ordinal].reserved_bytes : pooled[device->ordinal].idle_bytes;
        need_bytes = need_bytes > idle ? need_bytes - idle : 0;
        gr_budget_ask(device, need_bytes);
        rc = gr_budget_charge(device, GR_MEMORY_GRAPH, need_bytes);
        gr_unlock(&lock);
        if (rc)
                gr_budget_answered(device, need_bytes);
        else
                *ret_reserved_bytes = need_bytes;
        return rc;
}

void gr_graph_memory_correct(struct gr_device *device, uint64_t reserved_bytes)
{
        GR_NO_CANCEL;

        gr_lock(&lock);
        correct_device(device, reserved_bytes);
        gr_unlock(&lock);
        gr_budget_answered(device, reserved_bytes);
}

void gr_graph_memory_refresh(struct gr_device *device, bool trim)
{
        GR_NO_CANCEL;

        gr_lock(&lock);
        if (trim && gr_real.cuDeviceGraphMemTrim && gr_real.cuDeviceGraphMemTrim(device->ordinal) == CUDA_SUCCESS)
                gr_graph_memory_trimmed();
        correct_device(device, 0);
        gr_unlock(&lock);
}
