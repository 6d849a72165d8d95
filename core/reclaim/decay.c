#include "reclaim/decay.h"

#include <assert.h>
#include <string.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/counters.h"
#include "base/size_class.h"
#include "cache/bins_trim.h"
#include "context/context.h"
#include "fence/fence.h"
#include "host/pinned.h"
#include "reclaim/trim.h"
#include "segment/segments_trim.h"

#define PACE_NS UINT64_C(1000000) /* between two batches, so that other threads get to call the driver */

double gr_decay_curve(double x)
{
        if (x <= 0)
                return 0;
        if (x >= 1)
                return 1;
        return x * x * x * (10 + x * (6 * x - 15));
}

static unsigned step_count(const struct gr_core *core)
{
        return (unsigned)gr_min(gr_max(core->config.decay_ns / GR_DECAY_STEP_MIN_NS, 1), GR_DECAY_STEPS);
}

uint64_t gr_decay_step_ns(const struct gr_core *core)
{
        uint64_t step_ns = core->config.decay_ns / step_count(core);

        return core->config.decay_ns ? gr_max(step_ns, GR_DECAY_STEP_MIN_NS) : 0;
}

/* What no request needed since the last call, of a size class or of the segments. */
static uint64_t unneeded_since_last(struct gr_context *context, unsigned kind)
{
        return kind == GR_DECAY_SEGMENTS ? gr_segments_trim_unneeded(context) : gr_bins_trim_unneeded(context, kind);
}

/* Returns idle memory of a size class or of the segments, at most most_bytes. Returns the bytes that left the cache. */
static uint64_t return_idle_of_kind(struct gr_context *context, unsigned kind, uint64_t most_bytes)
{
        return kind == GR_DECAY_SEGMENTS ? gr_segments_trim_most(context, most_bytes)
                                         : gr_bins_trim_class(context, kind, most_bytes);
}

/* Records the low water of a size class, or of the segments, for the `times` steps that have passed; times > 0. */
static void record_low_water(struct gr_decay *decay, unsigned kind, uint64_t low, unsigned steps, unsigned times)
{
        uint64_t *unused = decay->unused_bytes[kind];

        assert(kind < GR_DECAY_KINDS && steps > 0 && steps <= GR_DECAY_STEPS);
        assert(times > 0);
        for (unsigned j = steps; j-- > 0;) {
                uint64_t before = j >= times ? unused[j - times] : UINT64_MAX;

                unused[j] = gr_min(before, low);
        }
}

/* Which part of the memory that is left after j steps goes back in step j + 1, by the curve. j < steps. */
static double hazard_of_step(unsigned j, unsigned steps)
{
        double before = gr_decay_curve((double)j / steps);

        assert(j < steps && before < 1); /* the curve ends with the last step */
        return (gr_decay_curve((double)(j + 1) / steps) - before) / (1 - before);
}

/* The bytes that should have been returned by now and are still cached. */
static double due_by_now(struct gr_decay *decay, unsigned steps)
{
        double going = 0, all = 0, over = 0;

        for (unsigned kind = 0; kind < GR_DECAY_KINDS; kind++) {
                const uint64_t *unused = decay->unused_bytes[kind];

                all += (double)unused[0];
                over += (double)unused[steps - 1];
                for (unsigned j = 0; j < steps; j++) {
                        uint64_t longer = j + 1 < steps ? unused[j + 1] : 0;

                        assert(longer <= unused[j]); /* what went unused for longer went unused for j + 1 steps, too */
                        going += hazard_of_step(j, steps) * (double)(unused[j] - longer);
                }
        }
        atomic_store_explicit(&decay->unneeded_bytes, (uint64_t)all, memory_order_relaxed);
        if (decay->due_bytes > all) /* used again */
                decay->due_bytes = all;
        if (all > 0)
                decay->due_bytes += going * (1 - decay->due_bytes / all);
        return decay->due_bytes > over ? decay->due_bytes : over;
}

/* Gives back what is due, the longest unused first, and of that the largest. */
static void return_due(struct gr_context *context, unsigned steps)
{
        struct gr_core *core = context->core;
        struct gr_decay *decay = context->decay;
        double left = due_by_now(decay, steps);

        for (unsigned j = steps; j-- > 0 && left >= 512;)
                for (unsigned kind = GR_DECAY_KINDS; kind-- > 0 && left >= 512;) {
                        uint64_t *unused = decay->unused_bytes[kind], gone;

                        while (unused[j] > 0 && left >= 512) {
                                gone = return_idle_of_kind(context, kind,
                                                           (uint64_t)left < unused[j] ? (uint64_t)left : unused[j]);
                                if (gone == 0)
                                        break; /* the next block is larger than what is due, or waits for its fence */
                                assert((double)gone <= left && gone <= unused[j]);
                                gr_count(core, GR_COUNTER_decayed_bytes, gone);
                                left -= (double)gone;
                                for (unsigned k = 0; k < steps; k++)
                                        unused[k] -= gone < unused[k] ? gone : unused[k];
                                core->driver->sleep_ns(PACE_NS);
                                /* The excess is more urgent, and this thread returns it */
                                if (gr_budget_excess(context->device) > 0) {
                                        decay->due_bytes = left;
                                        return;
                                }
                        }
                }
        decay->due_bytes = left;
}

void gr_decay_look(struct gr_context *context, uint64_t now_ns)
{
        struct gr_decay *decay = context->decay;
        uint64_t unneeded_bytes = 0;
        bool first;

        if (context->core->config.decay_ns) /* decay is on: only the background thread may call what follows */
                return;
        first = !decay->stepped_ns;
        if (!first && now_ns < decay->stepped_ns + GR_DECAY_LOOK_NS)
                return;
        for (unsigned kind = 0; kind < GR_DECAY_KINDS; kind++)
                unneeded_bytes += unneeded_since_last(context, kind);
        /* At the first look it is not known for how long the memory has been idle. */
        atomic_store_explicit(&decay->unneeded_bytes, first ? 0 : unneeded_bytes, memory_order_relaxed);
        decay->stepped_ns = now_ns;
}

struct round {
        uint64_t now_ns, next_ns;
};

static bool decay_one(struct gr_context *context, void *arg)
{
        struct round *round = arg;
        struct gr_decay *decay = context->decay;
        uint64_t step_ns = gr_decay_step_ns(context->core), passed;
        unsigned steps = step_count(context->core);

        assert(step_ns > 0 && steps > 0); /* decay is on */
        if (gr_fence_is_broken(context->fence))
                return true;
        if (gr_trim_has_none(context)) {
                decay->stepped_ns = 0;
                decay->due_bytes = 0;
                atomic_store_explicit(&decay->unneeded_bytes, 0, memory_order_relaxed);
                return true;
        }
        passed = decay->stepped_ns && round->now_ns > decay->stepped_ns ? (round->now_ns - decay->stepped_ns) / step_ns
                                                                        : 0;
        if (!decay->stepped_ns) {
                /* The first step starts now: what came before is not known to be unused. */
                for (unsigned kind = 0; kind < GR_DECAY_KINDS; kind++)
                        unneeded_since_last(context, kind);
                memset(decay->unused_bytes, 0, sizeof(decay->unused_bytes));
                decay->stepped_ns = round->now_ns;
        } else if (passed > 0) {
                for (unsigned kind = 0; kind < GR_DECAY_KINDS; kind++)
                        record_low_water(decay, kind, unneeded_since_last(context, kind), steps,
                                         passed < steps ? (unsigned)passed : steps);
                decay->stepped_ns += passed * step_ns;
                gr_fence_close(context->fence);
                gr_fence_poll(context->fence);
                gr_segments_trim_collect(context);
                return_due(context, steps);
        }
        if (!round->next_ns || decay->stepped_ns + step_ns < round->next_ns)
                round->next_ns = decay->stepped_ns + step_ns;
        return true;
}

uint64_t gr_decay_run(struct gr_core *core, uint64_t now_ns)
{
        struct round round = {.now_ns = now_ns};
        uint64_t pinned_ns;
        bool armed;

        if (!core->config.decay_ns)
                return 0;
        /* Cleared before the bins are looked at: a thread that caches a block later sees false and wakes this one. */
        armed = atomic_exchange(&core->decay_armed, false);
        gr_context_each(core, -1, decay_one, &round);
        pinned_ns = gr_pinned_decay(core, now_ns, gr_decay_step_ns(core));
        if (armed && !pinned_ns && !round.next_ns) {
                /* A thread may have read the old flag, while its store of the block was not visible here yet. */
                core->driver->sleep_ns(PACE_NS);
                gr_context_each(core, -1, decay_one, &round);
                pinned_ns = gr_pinned_decay(core, now_ns, gr_decay_step_ns(core));
        }
        if (pinned_ns && (!round.next_ns || pinned_ns < round.next_ns))
                round.next_ns = pinned_ns;
        if (round.next_ns)
                atomic_store(&core->decay_armed, true);
        else if (armed && core->config.malloc_trim && core->driver->malloc_trim)
                core->driver->malloc_trim(); /* the cache is empty: once in each idle time of the program */
        return round.next_ns;
}
