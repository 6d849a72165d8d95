#include "reclaim/proactive.h"

#include "core.h"

#define PRESSURE_BEGIN   0.50
#define PRESSURE_HIGH    0.90
#define PRESSURE_HIGHER  0.95
#define TIME_SHARE       0.05
#define COST_KEPT        0.75 /* of the old mean */
#define FRUIT            0.10 /* a fruitful run freed more than this part of the live memory */
#define FRUITLESS_MOST   6
#define HOOK_PATIENCE_NS UINT64_C(20000000) /* no request has failed: a slow reclaimable is not waited for */

/* The memory that counts against a limit, and the limit. */
struct hold {
        uint64_t reserved_bytes;
        uint64_t limit_bytes; /* 0: unknown */
};

static double fullness(struct hold hold, uint64_t less_bytes)
{
        uint64_t bytes = hold.reserved_bytes > less_bytes ? hold.reserved_bytes - less_bytes : 0;

        return hold.limit_bytes ? (double)bytes / (double)hold.limit_bytes : 0;
}

/* The nearest limit: the process's own, or the group's with what all members have. */
static struct hold nearest(struct gr_device *device)
{
        const struct gr_group *group = atomic_load_explicit(&device->group, memory_order_acquire);
        uint64_t soft = atomic_load_explicit(&device->soft_bytes, memory_order_relaxed);
        uint64_t total = atomic_load_explicit(&device->total_bytes, memory_order_relaxed);
        struct hold own = {atomic_load_explicit(&device->reserved_bytes, memory_order_relaxed),
                           atomic_load_explicit(&device->hard_bytes, memory_order_relaxed)};
        struct hold all = {0};

        if (soft && soft < own.limit_bytes)
                own.limit_bytes = soft;
        if (total && total < own.limit_bytes)
                own.limit_bytes = total;
        if (group && group->limit_bytes != GR_UNLIMITED) {
                uint64_t room = group->room(group->arg);

                all.limit_bytes = group->limit_bytes;
                all.reserved_bytes = room ? group->limit_bytes - room : group->limit_bytes + group->excess(group->arg);
        }
        return fullness(all, 0) > fullness(own, 0) ? all : own;
}

void gr_proactive_note(struct gr_context *context)
{
        struct gr_proactive *proactive = &context->core->proactive;

        if (context->core->config.proactive && !atomic_load_explicit(&proactive->pressed, memory_order_relaxed) &&
            fullness(nearest(context->device), 0) >= PRESSURE_BEGIN)
                atomic_store_explicit(&proactive->pressed, true, memory_order_relaxed);
}

struct idle {
        uint64_t now_ns, bytes;
};

static bool add_idle(struct gr_context *context, void *arg)
{
        struct idle *idle = arg;

        gr_decay_look(context, idle->now_ns);
        /* Cleared: what is returned now must not be counted again before the next step. */
        idle->bytes += atomic_exchange_explicit(&context->decay.idle_bytes, 0, memory_order_relaxed);
        return true;
}

static bool worth_it(struct gr_proactive *proactive, double pressure, uint64_t now_ns)
{
        double share = 2 * TIME_SHARE; /* about to block */

        if (proactive->fruitful)
                share *= 2;
        if (pressure > PRESSURE_HIGH)
                share *= 2;
        if (pressure > PRESSURE_HIGHER)
                share *= 2;
        share /= (double)(1u << proactive->fruitless);
        return proactive->cost_ns <= share * (double)(now_ns - proactive->ended_ns);
}

static uint64_t run(struct gr_context *context, struct hold hold, uint64_t live)
{
        struct gr_device *device = context->device;
        struct idle idle = {.now_ns = context->core->driver->now_ns()};
        uint64_t most = (uint64_t)((double)hold.limit_bytes * PRESSURE_HIGH), freed = 0, after;

        gr_reclaimables_run(context->core, false, device->ordinal, hold.limit_bytes - most, HOOK_PATIENCE_NS);
        after = gr_budget_live(device);
        if (after < live)
                freed = live - after;
        hold = nearest(device);
        most = (uint64_t)((double)hold.limit_bytes * PRESSURE_HIGH);
        if (hold.reserved_bytes > most) {
                uint64_t over = hold.reserved_bytes - most;

                gr_core_each_context(context->core, device->ordinal, add_idle, &idle);
                if (idle.bytes > 0)
                        freed += gr_reclaim(context, GR_LEVEL_TRIM, idle.bytes < over ? idle.bytes : over);
        }
        return freed;
}

void gr_proactive_run(struct gr_context *context)
{
        struct gr_core *core = context->core;
        struct gr_proactive *proactive = &core->proactive;
        struct hold hold = nearest(context->device);
        uint64_t live = gr_budget_live(context->device), now_ns, freed, end_ns;

        if (atomic_load(&core->gate.captures) > 0 || gr_reclaimable_inside() || atomic_exchange(&proactive->busy, true))
                return;
        now_ns = core->driver->now_ns();
        if (fullness(hold, 0) < PRESSURE_BEGIN) {
                atomic_store(&proactive->pressed, false);
                gr_proactive_note(context); /* another thread may have taken more meanwhile */
        } else if (worth_it(proactive, fullness(hold, gr_budget_cached(context->device)), now_ns)) {
                freed = run(context, hold, live);
                end_ns = core->driver->now_ns();
                proactive->cost_ns = COST_KEPT * proactive->cost_ns + (1 - COST_KEPT) * (double)(end_ns - now_ns);
                proactive->ended_ns = end_ns;
                proactive->fruitful = (double)freed > FRUIT * (double)live;
                if (freed > 0)
                        proactive->fruitless = 0;
                else if (proactive->fruitless < FRUITLESS_MOST)
                        proactive->fruitless++;
                gr_count(core, GR_STAT_proactive_runs, 1);
        }
        atomic_store(&proactive->busy, false);
}
