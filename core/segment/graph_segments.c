#include "segment/graph_segments.h"

#include <assert.h>
#include <stdatomic.h>

#include <utlist.h>

#include "account/budget.h"
#include "account/pressure.h"
#include "base/arith.h"
#include "base/lock.h"
#include "base/size_class.h"
#include "cache/ledger.h"
#include "context/context.h"
#include "fence/fence.h"
#include "fence/fence_wait.h"
#include "segment/expandable_grow.h"
#include "segment/extent.h"
#include "segment/range.h"
#include "segment/segments.h"
#include "segment/segments_state.h"

#define BUSY_PAUSE_NS UINT64_C(20000)
#define RANGES_LOOK   64 /* most ranges that a request passes, as other threads wait for the lock */

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
static bool are_busy(const struct gr_segments *segments)
{
        for (int kind = GR_EXPANDABLE_GRAPH_LARGE; kind <= GR_EXPANDABLE_GRAPH_SMALL; kind++)
                if (segments->expandable[kind] && is_busy(segments->expandable[kind]))
                        return true;
        return false;
}

static bool any_differs(const struct gr_segments *segments, bool in_graphs)
{
        for (int kind = GR_EXPANDABLE_GRAPH_LARGE; kind <= GR_EXPANDABLE_GRAPH_SMALL; kind++)
                if (segments->expandable[kind] && segments->expandable[kind]->in_graphs != in_graphs)
                        return true;
        return false;
}

/*
 * Before in_graphs changes: waits until no thread maps or unmaps memory of the graph segments. That takes only as long
 * as a call of the driver, which does not wait for the GPU.
 */
GR_NOT_CHECKED static void wait_for_busy(struct gr_context *context, bool in_graphs)
{
        struct gr_segments *segments = context->segments;

        gr_assert_locked(&segments->lock);
        while (any_differs(segments, in_graphs) && are_busy(segments)) {
                gr_unlock(&segments->lock);
                context->core->driver->sleep_ns(BUSY_PAUSE_NS);
                gr_lock(&segments->lock);
        }
}

/* What becomes of the free memory of graph segments. */
enum turn {
        TO_GRAPHS, /* graphs use the segments from now on */
        /*
         * The last graph has gone, and what is free gets the open epoch. No fence covers it yet: captures have freed it
         * without one, and work that was submitted after the graphs may still read what they left there.
         */
        TO_CACHE,
        TO_NOBODY, /* the context has gone */
};

/* Sets in_graphs of the segment, and moves its free memory to the account that goes with it. */
static void recount_segment(struct gr_context *context, struct gr_segment *segment, enum turn turn)
{
        bool in_graphs = turn == TO_GRAPHS;
        uint64_t free_bytes = 0, epoch = 0;
        struct gr_range *range;

        segment->in_graphs = false;
        for (range = segment->first; range; range = range->after)
                if (range->state == GR_RANGE_FREE || range->state == GR_RANGE_WAITING)
                        free_bytes += range->block.capacity_bytes;
        if (in_graphs)
                gr_budget_add(&context->device->graph_bytes, free_bytes);
        else if (turn == TO_CACHE)
                epoch = gr_fence_note_freed(context->fence, free_bytes);
        for (range = segment->first; range; range = range->after) {
                if (epoch && range->state == GR_RANGE_WAITING) { /* the newest epoch, so it goes to the end */
                        struct gr_block *block = &range->block;

                        DL_DELETE(context->segments->queue, block);
                        DL_APPEND(context->segments->queue, block);
                }
                if (range->state == GR_RANGE_FREE || range->state == GR_RANGE_WAITING || range->state == GR_RANGE_STALE)
                        range->block.freed_epoch = gr_max(range->block.freed_epoch, epoch);
                if (range->state == GR_RANGE_FREE || range->state == GR_RANGE_WAITING)
                        gr_segments_use(context, range, in_graphs ? 1 : -1);
                else if (range->state == GR_RANGE_STUCK && !in_graphs)
                        context->segments->stuck_epoch =
                                gr_max(context->segments->stuck_epoch, range->block.freed_epoch);
        }
        if (!in_graphs)
                gr_budget_add(&context->device->graph_bytes, -free_bytes);
        segment->in_graphs = in_graphs;
}

static void recount_all(struct gr_context *context, enum turn turn)
{
        bool in_graphs = turn == TO_GRAPHS;
        struct gr_segments *segments = context->segments;

        gr_assert_locked(&segments->lock);
        for (int kind = GR_EXPANDABLE_GRAPH_LARGE; kind <= GR_EXPANDABLE_GRAPH_SMALL; kind++)
                if (segments->expandable[kind] && segments->expandable[kind]->in_graphs != in_graphs)
                        recount_segment(context, segments->expandable[kind], turn);
        if (!in_graphs) {
                segments->graph_peak_bytes = segments->graph_used_bytes;
                DL_CONCAT(segments->stale_pages, segments->stale_graph_pages);
                segments->stale_graph_pages = NULL;
        }
}

/* Whether nothing is mapped behind range in its segment. */
static bool is_last(const struct gr_range *range)
{
        return !range->after || range->after == range->segment->end;
}

/* The best fit; the last range of a segment only where nothing else serves (docs/measurements.md, graph-moves). */
static struct gr_range *best_fit(const struct gr_free_lists *lists, size_t bytes, uint64_t usable_epoch)
{
        struct gr_range *first = gr_range_best(lists, bytes, usable_epoch, UINT64_MAX), *range = first;
        unsigned looked_at = 0;

        if (!first || !is_last(first))
                return first;
        while ((range = gr_range_next(lists, range)) && ++looked_at <= RANGES_LOOK)
                if (!is_last(range) && range->block.capacity_bytes >= bytes &&
                    gr_range_may_serve(range, usable_epoch, UINT64_MAX))
                        return range;
        return first;
}

struct gr_block *gr_graph_segments_take(struct gr_context *context, size_t bytes)
{
        struct gr_segments *segments = context->segments;
        const struct gr_free_lists *lists = &segments->free[gr_expandable_graph_kind(gr_is_small(bytes))];
        struct gr_block *block = NULL;
        struct gr_range *range;

        bytes = gr_range_bytes(bytes);
        gr_fence_poll(context->fence); /* no barrier may be laid while a capture is open */
        gr_lock(&segments->lock);
        wait_for_busy(context, true);
        recount_all(context, TO_GRAPHS);
        gr_segments_free_usable(context);
        range = best_fit(lists, bytes, gr_fence_usable_epoch(context->fence));
        if (range) {
                gr_range_leave(segments, range);
                block = gr_segments_carve(context, range, bytes);
                if (block)
                        gr_segments_hit(context);
        }
        gr_unlock(&segments->lock);
        return block;
}

int gr_graph_segments_grow(struct gr_context *context, size_t bytes, struct gr_block **ret_block)
{
        int rc = gr_expandable_grow(context, gr_expandable_graph_kind(gr_is_small(bytes)), gr_range_bytes(bytes),
                                    ret_block);

        if (!rc)
                gr_count(context->core, GR_COUNTER_fresh_allocs, 1);
        gr_budget_update_peak(context->device);
        gr_pressure_note(context);
        return rc;
}

#define NUMBER_SHIFT 32

uint32_t gr_graph_segments_join(struct gr_context *context)
{
        return (uint32_t)(atomic_fetch_add(&context->graph_users, 1) >> NUMBER_SHIFT);
}

bool gr_graph_segments_joined(struct gr_context *context, uint32_t number)
{
        return atomic_load(&context->graph_users) >> NUMBER_SHIFT == number;
}

void gr_graph_segments_leave(struct gr_context *context, uint32_t number)
{
        uint64_t users = atomic_load(&context->graph_users);

        while (users >> NUMBER_SHIFT == number &&
               !atomic_compare_exchange_weak(&context->graph_users, &users, users - 1))
                ;
}

static bool has_users(struct gr_context *context)
{
        return (uint32_t)atomic_load(&context->graph_users) > 0;
}

bool gr_graph_segments_end_use(struct gr_context *context, bool waits)
{
        struct gr_segments *segments = context->segments;
        bool covered = true;
        uint64_t frees;

        gr_lock(&segments->lock);
        frees = segments->frees;
        if (!has_users(context) && any_differs(segments, false) && gr_fence_overflow(context->fence)) {
                gr_unlock(&segments->lock);
                covered = waits && gr_fence_wait_all(context->fence) == 0;
                gr_lock(&segments->lock);
        }
        if (!has_users(context))
                wait_for_busy(context, false);
        /* What was freed during a wait was not waited for. */
        covered = covered && (!gr_fence_overflow(context->fence) || segments->frees == frees);
        if (!has_users(context) && covered)
                recount_all(context, TO_CACHE);
        gr_unlock(&segments->lock);
        return covered;
}

void gr_graph_segments_context_gone(struct gr_context *context)
{
        uint64_t users = atomic_load(&context->graph_users);

        gr_assert_locked(&context->segments->lock);
        while (!atomic_compare_exchange_weak(&context->graph_users, &users,
                                             ((users >> NUMBER_SHIFT) + 1) << NUMBER_SHIFT))
                ;
        recount_all(context, TO_NOBODY);
}

/* Counts that one used range has become two (1), or two have become one (-1). */
static void count_cut(struct gr_segment *segment, int sign)
{
        if (!segment->pages) /* else its extents count bytes */
                segment->used_count += (size_t)sign;
}

struct gr_block *gr_graph_range_cut(struct gr_block *block, size_t bytes)
{
        struct gr_range *range = gr_range_of(block), *rest = NULL;
        struct gr_context *context = block->context;

        assert(block->flags == GR_BLOCK_RANGE && block->capacity_bytes >= bytes);
        gr_lock(&context->segments->lock);
        if (gr_block_state(block) != GR_BLOCK_GONE) { /* else its segment has gone, too */
                bytes = gr_round_up(bytes, gr_range_unit(range->segment->small));
                if (block->capacity_bytes > bytes)
                        rest = gr_range_cut(range, bytes);
        }
        if (rest) {
                gr_block_begin_cached(&rest->block, gr_class_of(rest->block.capacity_bytes), GR_BLOCK_RANGE);
                if (gr_segments_list(context, &rest->block)) {
                        block->class = (uint8_t)gr_class_of(bytes);
                        count_cut(range->segment, 1);
                } else {
                        gr_range_swallow(range, rest);
                        rest = NULL;
                }
        }
        gr_unlock(&context->segments->lock);
        return rest ? &rest->block : NULL;
}

static bool may_leave(struct gr_range *adjacent, gr_graph_range_leaves *leaves, void *arg)
{
        return adjacent && adjacent->state == GR_RANGE_USED && leaves(&adjacent->block, arg);
}

static void join_ranges(struct gr_range *range, struct gr_range *after)
{
        struct gr_block *block = &range->block;
        const struct gr_context *context = block->context;

        gr_assert_locked(&context->segments->lock);
        gr_ledger_make_gone(context->core->ledger, &after->block);
        gr_range_swallow(range, after);
        block->class = (uint8_t)gr_class_of(block->capacity_bytes);
        count_cut(range->segment, -1);
}

struct gr_block *gr_graph_range_join(struct gr_block *block, gr_graph_range_leaves *leaves, void *arg)
{
        struct gr_range *range = gr_range_of(block);
        struct gr_segments *segments = block->context->segments;

        assert(block->flags == GR_BLOCK_RANGE);
        gr_lock(&segments->lock);
        if (gr_block_state(block) != GR_BLOCK_GONE) { /* else its segment has gone, too */
                if (may_leave(range->after, leaves, arg))
                        join_ranges(range, range->after);
                if (may_leave(range->before, leaves, arg)) {
                        range = range->before;
                        join_ranges(range, range->after);
                }
        }
        gr_unlock(&segments->lock);
        return &range->block;
}

bool gr_graph_range_is_small(struct gr_block *block)
{
        struct gr_segments *segments = block->context->segments;
        bool small;

        assert(block->flags & GR_BLOCK_RANGE);
        gr_lock(&segments->lock);
        small = gr_block_state(block) != GR_BLOCK_GONE && gr_range_of(block)->segment->small;
        gr_unlock(&segments->lock);
        return small;
}
