#include "reclaim/proactive.h"

#include <assert.h>

#include "account/budget.h"
#include "account/pressure.h"
#include "base/counters.h"
#include "context/capture_gate.h"
#include "context/context.h"
#include "reclaim/decay.h"
#include "reclaim/reclaimable.h"
#include "reclaim/rung.h"

#define PRESSURE_HIGH   0.90
#define PRESSURE_HIGHER 0.95
#define TIME_SHARE      0.05
#define COST_KEPT       0.75 /* of the old mean */
#define FRUIT           0.10 /* a run that freed more than this part of live memory is fruitful */
#define FRUITLESS_MOST  6
#define PATIENCE_NS     UINT64_C(20000000) /* for a slow reclaimable: short, as no request has failed */

struct idle {
        uint64_t now_ns, bytes;
};

static bool add_idle(struct gr_context *context, void *arg)
{
        struct idle *idle = arg;

        gr_decay_look(context, idle->now_ns);
        /* Cleared: what is returned now must not be counted again before the next step. */
        idle->bytes += atomic_exchange_explicit(&context->decay->unneeded_bytes, 0, memory_order_relaxed);
        return true;
}

static bool worth_it(struct gr_proactive *proactive, double pressure, uint64_t now_ns)
{
        double share = 2 * TIME_SHARE; /* 2, as the caller is about to wait */

        assert(atomic_load(&proactive->busy)); /* by this thread */
        assert(proactive->fruitless <= FRUITLESS_MOST && proactive->cost_ns >= 0);
        if (proactive->fruitful)
                share *= 2;
        if (pressure > PRESSURE_HIGH)
                share *= 2;
        if (pressure > PRESSURE_HIGHER)
                share *= 2;
        share /= (double)(1u << proactive->fruitless);
        return proactive->cost_ns <= share * (double)(now_ns - proactive->ended_ns);
}

static uint64_t run_purge(struct gr_context *context, struct gr_pressure pressure, uint64_t live)
{
        struct gr_device *device = context->device;
        struct idle idle = {.now_ns = context->core->driver->now_ns()};
        uint64_t most = (uint64_t)((double)pressure.limit_bytes * PRESSURE_HIGH), freed = 0, after;

        assert(pressure.limit_bytes > 0 && most <= pressure.limit_bytes); /* without a limit there is no pressure */
        gr_reclaimables_run(context->core, GR_RUNG_PURGE, device->ordinal, pressure.limit_bytes - most, PATIENCE_NS);
        after = gr_budget_live(device);
        if (after < live)
                freed = live - after;
        pressure = gr_pressure_nearest(device);
        most = (uint64_t)((double)pressure.limit_bytes * PRESSURE_HIGH);
        if (pressure.reserved_bytes > most) {
                uint64_t over = pressure.reserved_bytes - most;

                gr_context_each(context->core, device->ordinal, add_idle, &idle);
                if (idle.bytes > 0)
                        freed += gr_rung_run(context, GR_RUNG_TRIM, idle.bytes < over ? idle.bytes : over);
        }
        return freed;
}

void gr_proactive_run(struct gr_context *context)
{
        struct gr_core *core = context->core;
        struct gr_proactive *proactive = core->proactive;
        struct gr_pressure pressure = gr_pressure_nearest(context->device);
        uint64_t live = gr_budget_live(context->device), now_ns, freed, end_ns;

        if (gr_gate_is_open(&core->gate) || gr_reclaimable_inside() || atomic_exchange(&proactive->busy, true))
                return;
        now_ns = core->driver->now_ns();
        if (gr_pressure_of(pressure, 0) < GR_PRESSURE_BEGIN) {
                atomic_store(&core->memory_is_short, false);
                gr_pressure_note(context); /* another thread may have taken more meanwhile */
        } else if (worth_it(proactive, gr_pressure_of(pressure, gr_budget_cached(context->device)), now_ns)) {
                freed = run_purge(context, pressure, live);
                end_ns = core->driver->now_ns();
                proactive->cost_ns = COST_KEPT * proactive->cost_ns + (1 - COST_KEPT) * (double)(end_ns - now_ns);
                proactive->ended_ns = end_ns;
                proactive->fruitful = (double)freed > FRUIT * (double)live;
                if (freed > 0)
                        proactive->fruitless = 0;
                else if (proactive->fruitless < FRUITLESS_MOST)
                        proactive->fruitless++;
                gr_count(core, GR_COUNTER_proactive_runs, 1);
        }
        atomic_store(&proactive->busy, false);
}
