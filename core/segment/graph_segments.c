#include "segment/graph_segments.h"

#include <stdatomic.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/lock.h"
#include "context/context.h"
#include "fence/fence.h"
#include "segment/extent.h"
#include "segment/range.h"
#include "segment/segments.h"
#include "segment/split_state.h"

#define BUSY_PAUSE_NS UINT64_C(20000)
#define SLACK_SHARE   6                    /* how much may be mapped above the most that was used: this share of it, */
#define SLACK_BYTES   (UINT64_C(16) << 20) /* and at least so much, until memory moves */

static bool is_busy(const struct gr_segment *segment)
{
        const struct gr_range *range = segment->first;

        while (range && range->state != GR_RANGE_BUSY)
                range = range->after;
        return range;
}

/*
 * Whether a thread is mapping or unmapping memory of the graph segments. It counts that memory by in_graphs, which must
 * not change meanwhile.
 */
static bool are_busy(const struct gr_split *split)
{
        for (int kind = GR_EXPANDABLE_GRAPH_LARGE; kind <= GR_EXPANDABLE_GRAPH_SMALL; kind++)
                if (split->expandable[kind] && is_busy(split->expandable[kind]))
                        return true;
        return false;
}

static bool differs(const struct gr_split *split, bool in_graphs)
{
        for (int kind = GR_EXPANDABLE_GRAPH_LARGE; kind <= GR_EXPANDABLE_GRAPH_SMALL; kind++)
                if (split->expandable[kind] && split->expandable[kind]->in_graphs != in_graphs)
                        return true;
        return false;
}

/*
 * Before in_graphs changes: waits until no thread maps or unmaps memory of the graph segments. That takes only as long
 * as a call of the driver, which does not wait for the GPU.
 */
GR_NOT_CHECKED static void wait_for_busy(struct gr_context *context, bool in_graphs)
{
        struct gr_split *split = context->split;

        gr_assert_locked(&split->lock);
        while (differs(split, in_graphs) && are_busy(split)) {
                gr_unlock(&split->lock);
                context->core->driver->sleep_ns(BUSY_PAUSE_NS);
                gr_lock(&split->lock);
        }
}

/*
 * Sets in_graphs of the segment, and moves its free memory to the account that goes with it. fenced: what is free gets
 * the open epoch. No fence covers it yet: captures have freed it without one, and work that was submitted after the
 * graphs may still read what they left there.
 */
static void recount(struct gr_context *context, struct gr_segment *segment, bool in_graphs, bool fenced)
{
        uint64_t free_bytes = 0, epoch = 0;
        struct gr_range *range;

        segment->in_graphs = false;
        for (range = segment->first; range; range = range->after)
                if (range->state == GR_RANGE_FREE || range->state == GR_RANGE_WAITING)
                        free_bytes += range->block.capacity_bytes;
        if (in_graphs)
                gr_budget_add(&context->device->graph_bytes, free_bytes);
        else if (fenced)
                epoch = gr_fence_freed(context->fence, free_bytes);
        for (range = segment->first; range; range = range->after) {
                if (epoch && range->state == GR_RANGE_WAITING) { /* the newest epoch, so it goes to the end */
                        struct gr_block *block = &range->block;

                        DL_DELETE(context->split->queue, block);
                        DL_APPEND(context->split->queue, block);
                }
                if (range->state == GR_RANGE_FREE || range->state == GR_RANGE_WAITING || range->state == GR_RANGE_STALE)
                        range->block.freed_epoch = gr_max(range->block.freed_epoch, epoch);
                if (range->state == GR_RANGE_FREE || range->state == GR_RANGE_WAITING)
                        gr_segments_use(context, range, in_graphs ? 1 : -1);
                else if (range->state == GR_RANGE_STUCK && !in_graphs)
                        context->split->stuck_epoch = gr_max(context->split->stuck_epoch, range->block.freed_epoch);
        }
        if (!in_graphs)
                gr_budget_add(&context->device->graph_bytes, -free_bytes);
        segment->in_graphs = in_graphs;
}

static void recount_all(struct gr_context *context, bool in_graphs, bool fenced)
{
        struct gr_split *split = context->split;

        gr_assert_locked(&split->lock);
        for (int kind = GR_EXPANDABLE_GRAPH_LARGE; kind <= GR_EXPANDABLE_GRAPH_SMALL; kind++)
                if (split->expandable[kind] && split->expandable[kind]->in_graphs != in_graphs)
                        recount(context, split->expandable[kind], in_graphs, fenced);
        if (!in_graphs) {
                split->graph_peak_bytes = split->graph_used_bytes;
                DL_CONCAT(split->stale_pages, split->stale_graph_pages);
                split->stale_graph_pages = NULL;
        }
}

void gr_graph_segments_begin_use(struct gr_context *context)
{
        gr_assert_locked(&context->split->lock);
        wait_for_busy(context, true);
        recount_all(context, true, false);
}

static bool has_users(struct gr_context *context)
{
        return atomic_load(&context->graph_users) > 0;
}

void gr_graph_segments_end_use(struct gr_context *context)
{
        gr_assert_locked(&context->split->lock);
        if (!has_users(context))
                wait_for_busy(context, false);
        if (!has_users(context))
                recount_all(context, false, true);
}

void gr_graph_segments_drop(struct gr_context *context)
{
        gr_assert_locked(&context->split->lock);
        recount_all(context, false, false);
}

bool gr_graph_segments_have_room(struct gr_context *context, size_t request_bytes, uint64_t growth_bytes)
{
        const struct gr_split *split = context->split;
        uint64_t free_bytes = atomic_load(&context->device->graph_bytes);
        uint64_t peak = gr_max(split->graph_peak_bytes, split->graph_used_bytes + request_bytes);

        gr_assert_locked(&split->lock);
        return split->graph_used_bytes + free_bytes + growth_bytes <= peak + gr_max(peak / SLACK_SHARE, SLACK_BYTES);
}
