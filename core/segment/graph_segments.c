#include "segment/graph_segments.h"

#include <stdatomic.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/lock.h"
#include "context/context.h"
#include "segment/extent.h"
#include "segment/range.h"
#include "segment/segments.h"
#include "segment/split_state.h"

#define BUSY_PAUSE_NS UINT64_C(20000)

static bool is_busy(const struct gr_segment *segment)
{
        const struct gr_range *range = segment->first;

        while (range && range->state != GR_RANGE_BUSY)
                range = range->after;
        return range;
}

/*
 * Waits for threads that map or unmap memory of the graph segments: what they do is counted as it was when they began.
 * Their calls of the driver do not wait for the GPU.
 */
GR_NOT_CHECKED static void wait_for_busy(struct gr_context *context, bool held)
{
        struct gr_split *split = context->split;

        for (int kind = GR_EXPANDABLE_GRAPH_LARGE; kind <= GR_EXPANDABLE_GRAPH_SMALL; kind++)
                while (split->expandable[kind] && split->expandable[kind]->held != held &&
                       is_busy(split->expandable[kind])) {
                        gr_unlock(&split->lock);
                        context->core->driver->sleep_ns(BUSY_PAUSE_NS);
                        gr_lock(&split->lock);
                }
}

/* Counts what is free as used, or no longer. */
static void recount(struct gr_context *context, struct gr_segment *segment, bool held)
{
        uint64_t free_bytes = 0;

        segment->held = false;
        for (struct gr_range *range = segment->first; range; range = range->after)
                if (range->state == GR_RANGE_FREE || range->state == GR_RANGE_WAITING) {
                        gr_segments_use(context, range, held ? 1 : -1);
                        free_bytes += range->block.capacity_bytes;
                } else if (range->state == GR_RANGE_STUCK && !held) {
                        context->split->stuck_epoch = gr_max(context->split->stuck_epoch, range->block.freed_epoch);
                }
        segment->held = held;
        gr_budget_add(&context->device->graph_bytes, held ? free_bytes : -free_bytes);
}

static void recount_all(struct gr_context *context, bool held)
{
        struct gr_split *split = context->split;

        for (int kind = GR_EXPANDABLE_GRAPH_LARGE; kind <= GR_EXPANDABLE_GRAPH_SMALL; kind++)
                if (split->expandable[kind] && split->expandable[kind]->held != held)
                        recount(context, split->expandable[kind], held);
}

void gr_graph_segments_hold(struct gr_context *context)
{
        gr_assert_locked(&context->split->lock);
        wait_for_busy(context, true);
        recount_all(context, true);
}

void gr_graph_segments_release(struct gr_context *context)
{
        gr_assert_locked(&context->split->lock);
        if (atomic_load(&context->core->graph_users) > 0)
                return;
        wait_for_busy(context, false);
        if (atomic_load(&context->core->graph_users) == 0)
                recount_all(context, false);
}

void gr_graph_segments_end(struct gr_context *context)
{
        gr_assert_locked(&context->split->lock);
        recount_all(context, false);
}
