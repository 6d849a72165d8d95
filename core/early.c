#include "early.h"

#include "pool.h"

#define PRESSURE_BEGIN   0.50
#define PRESSURE_HIGH    0.90
#define PRESSURE_HIGHER  0.95
#define TIME_SHARE       0.05
#define COST_KEPT        0.75 /* of the old mean */
#define FRUIT            0.10 /* of the live memory, freed by a run that was worth it */
#define FRUITLESS_MOST   6
#define HOOK_PATIENCE_NS UINT64_C(20000000) /* nobody fails yet: a slow reclaimable goes on without us */

/* The least of what holds memory down; 0: unknown. */
static uint64_t limit_bytes(struct gr_device *device)
{
        uint64_t limit = atomic_load_explicit(&device->hard_bytes, memory_order_relaxed);
        uint64_t soft = atomic_load_explicit(&device->soft_bytes, memory_order_relaxed);
        uint64_t total = atomic_load_explicit(&device->total_bytes, memory_order_relaxed);

        if (soft && soft < limit)
                limit = soft;
        return total && total < limit ? total : limit;
}

void gr_early_note(struct gr_context *context)
{
        struct gr_early *early = &context->core->early;
        double charged = (double)atomic_load_explicit(&context->device->charged_bytes, memory_order_relaxed);

        if (context->core->config.early && !atomic_load_explicit(&early->pressed, memory_order_relaxed) &&
            charged >= PRESSURE_BEGIN * (double)limit_bytes(context->device))
                atomic_store_explicit(&early->pressed, true, memory_order_relaxed);
}

struct idle {
        uint64_t now_ns, bytes;
};

static bool add_idle(struct gr_context *context, void *arg)
{
        struct idle *idle = arg;

        gr_decay_look(context, idle->now_ns);
        /* Once only: what goes back now is not there to go back again before the next step. */
        idle->bytes += atomic_exchange_explicit(&context->decay.idle_bytes, 0, memory_order_relaxed);
        return true;
}

static bool worth_it(struct gr_early *early, double pressure, uint64_t now_ns)
{
        double share = 2 * TIME_SHARE; /* about to block */

        if (early->fruitful)
                share *= 2;
        if (pressure > PRESSURE_HIGH)
                share *= 2;
        if (pressure > PRESSURE_HIGHER)
                share *= 2;
        share /= (double)(1u << early->fruitless);
        return early->cost_ns <= share * (double)(now_ns - early->ended_ns);
}

static uint64_t run(struct gr_context *context, uint64_t live, uint64_t limit)
{
        struct gr_device *device = context->device;
        struct idle idle = {.now_ns = context->core->driver->now_ns()};
        uint64_t charged, room, freed = 0, after;

        gr_reclaimables_run(context->core, false, device->ordinal, (uint64_t)((double)limit * (1 - PRESSURE_HIGH)),
                            HOOK_PATIENCE_NS);
        after = gr_budget_live(device);
        if (after < live)
                freed = live - after;
        charged = atomic_load(&device->charged_bytes);
        room = (uint64_t)((double)limit * PRESSURE_HIGH);
        if (charged > room) {
                gr_core_each_context(context->core, device->ordinal, add_idle, &idle);
                if (idle.bytes > 0)
                        freed += gr_reclaim(context, GR_LEVEL_TRIM,
                                            idle.bytes < charged - room ? idle.bytes : charged - room);
        }
        return freed;
}

void gr_early_run(struct gr_context *context)
{
        struct gr_core *core = context->core;
        struct gr_early *early = &core->early;
        uint64_t limit = limit_bytes(context->device), live = gr_budget_live(context->device);
        uint64_t now_ns, freed, end_ns;
        double pressure;

        if (!limit || limit == GR_UNLIMITED || atomic_load(&core->gate.captures) > 0 || gr_reclaimable_inside() ||
            atomic_exchange(&early->busy, true))
                return;
        pressure = (double)live / (double)limit;
        now_ns = core->driver->now_ns();
        if ((double)atomic_load(&context->device->charged_bytes) < PRESSURE_BEGIN * (double)limit) {
                atomic_store(&early->pressed, false);
                gr_early_note(context); /* another thread may have taken more meanwhile */
        } else if (worth_it(early, pressure, now_ns)) {
                freed = run(context, live, limit);
                end_ns = core->driver->now_ns();
                early->cost_ns = COST_KEPT * early->cost_ns + (1 - COST_KEPT) * (double)(end_ns - now_ns);
                early->ended_ns = end_ns;
                early->fruitful = (double)freed > FRUIT * (double)live;
                if (freed > 0)
                        early->fruitless = 0;
                else if (early->fruitless < FRUITLESS_MOST)
                        early->fruitless++;
                gr_count(core, GR_STAT_early_runs, 1);
        }
        atomic_store(&early->busy, false);
}
