#include "account/pressure.h"

#include "account/budget.h"
#include "context/context.h"

double gr_pressure_of(struct gr_pressure pressure, uint64_t less_bytes)
{
        uint64_t bytes = pressure.reserved_bytes > less_bytes ? pressure.reserved_bytes - less_bytes : 0;

        return pressure.limit_bytes ? (double)bytes / (double)pressure.limit_bytes : 0;
}

struct gr_pressure gr_pressure_nearest(struct gr_device *device)
{
        const struct gr_group *group = atomic_load_explicit(&device->group, memory_order_acquire);
        uint64_t soft = atomic_load_explicit(&device->soft_bytes, memory_order_relaxed);
        uint64_t total = atomic_load_explicit(&device->total_bytes, memory_order_relaxed);
        struct gr_pressure own = {atomic_load_explicit(&device->reserved_bytes, memory_order_relaxed),
                                  atomic_load_explicit(&device->hard_bytes, memory_order_relaxed)};
        struct gr_pressure all = {0};

        if (soft && soft < own.limit_bytes)
                own.limit_bytes = soft;
        if (total && total < own.limit_bytes)
                own.limit_bytes = total;
        if (group && group->limit_bytes != GR_UNLIMITED) {
                uint64_t room = group->room(group->arg);

                all.limit_bytes = group->limit_bytes;
                all.reserved_bytes = room ? group->limit_bytes - room : group->limit_bytes + group->excess(group->arg);
        }
        return gr_pressure_of(all, 0) > gr_pressure_of(own, 0) ? all : own;
}

void gr_pressure_note(struct gr_context *context)
{
        struct gr_core *core = context->core;

        if (core->config.proactive && !atomic_load_explicit(&core->memory_is_short, memory_order_relaxed) &&
            gr_pressure_of(gr_pressure_nearest(context->device), 0) >= GR_PRESSURE_BEGIN)
                atomic_store_explicit(&core->memory_is_short, true, memory_order_relaxed);
}
