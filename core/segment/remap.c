#include "segment/remap.h"

#include <assert.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/counters.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/size_class.h"
#include "cache/block.h"
#include "context/context.h"
#include "fence/fence.h"
#include "segment/extent.h"
#include "segment/range.h"
#include "segment/segments.h"
#include "segment/segments_state.h"

#define MOVE_BATCH   64
#define EXTENTS_LOOK 512 /* extents looked at before one is chosen: some microseconds; a move takes 37 us and more */

/*
 * The memory of range has a new place, but work up to epoch may still use it here. in_graphs: graphs have recorded the
 * address.
 */
static void stale_enter(struct gr_segments *segments, struct gr_range *range, uint64_t epoch, bool in_graphs)
{
        struct gr_block *block = &range->block;

        gr_assert_locked(&segments->lock);
        gr_range_become(range, GR_RANGE_STALE);
        assert(!gr_page_is_mapped(gr_page_at(range->segment, block->ptr))); /* only its new place counts it */
        block->freed_epoch = epoch;
        if (in_graphs)
                DL_APPEND(segments->stale_graph_pages, block);
        else
                DL_APPEND(segments->stale_pages, block);
}

/* An extent inside a free range. */
struct found {
        struct gr_range *range; /* NULL: none yet */
        uint64_t at, bytes;
};

/* Finds a larger extent than *found, of at most most_bytes, in the segments that graphs use, or in the others. */
static void look_for_movable(const struct gr_segments *segments, bool in_graphs, uint64_t most_bytes,
                             struct found *found)
{
        unsigned looked_at = 0;

        for (int kind = GR_EXPANDABLE_KINDS; kind-- > 0;) {
                const struct gr_free_lists *lists = &segments->free[kind];
                struct gr_range *range = gr_range_first(lists, GR_PAGE_BYTES);

                for (; range && range->segment->in_graphs == in_graphs; range = gr_range_next(lists, range)) {
                        uint64_t at = gr_page_up(range->block.ptr), end = gr_range_end(range);

                        if (!gr_fence_usable(range->block.context->fence, range->block.freed_epoch))
                                continue;
                        while (range->segment->pages && at < end) {
                                const struct gr_page *extent = gr_extent_at(range->segment, at);
                                uint64_t begin = gr_extent_ptr(range->segment, extent), bytes = gr_extent_bytes(extent);

                                if (looked_at++ == EXTENTS_LOOK || found->bytes == most_bytes)
                                        return;
                                if (begin >= at && begin + bytes <= end && bytes <= most_bytes && bytes > found->bytes)
                                        *found = (struct found){.range = range, .at = begin, .bytes = bytes};
                                at = begin + bytes;
                        }
                }
        }
}

/*
 * The largest extent of at most most_bytes, as every move costs the same; of equals the one in the smallest free range.
 * Looks at EXTENTS_LOOK of them at most. from_graphs: memory of the segments that graphs use comes first.
 */
static struct found find_movable(const struct gr_segments *segments, bool from_graphs, uint64_t most_bytes)
{
        struct found found = {0};

        if (from_graphs)
                look_for_movable(segments, true, most_bytes, &found);
        if (!found.range)
                look_for_movable(segments, false, most_bytes, &found);
        return found;
}

bool gr_remap_has(struct gr_context *context, uint64_t bytes)
{
        const struct gr_segments *segments = context->segments;
        uint64_t sum = 0;

        gr_assert_locked(&segments->lock);
        for (int kind = 0; kind < GR_EXPANDABLE_KINDS && !atomic_load(&segments->moves_refused); kind++) {
                const struct gr_range *range = gr_range_first(&segments->free[kind], GR_PAGE_BYTES);

                for (; range && sum < bytes; range = gr_range_next(&segments->free[kind], range)) {
                        uint64_t at = gr_page_up(range->block.ptr), end = gr_range_end(range);

                        while (range->segment->pages && gr_fence_usable(context->fence, range->block.freed_epoch) &&
                               at < end) {
                                const struct gr_page *extent = gr_extent_at(range->segment, at);
                                uint64_t begin = gr_extent_ptr(range->segment, extent),
                                         bytes_of = gr_extent_bytes(extent);

                                if (begin >= at && begin + bytes_of <= end)
                                        sum += bytes_of;
                                at = begin + bytes_of;
                        }
                }
        }
        return sum >= bytes;
}

struct move {
        struct gr_range *from; /* busy, one extent */
        uint64_t to;
};

/*
 * Chooses extents to move into the holes of a busy range. Their memory is usable, so work that is submitted later runs
 * after the work that may still use it, whatever address it uses.
 */
static unsigned moves_choose(struct gr_segments *segments, const struct gr_range *range, uint64_t hole_bytes,
                             bool from_graphs, struct move *moves)
{
        const struct gr_segment *segment = range->segment;
        uint64_t at = gr_page_down(range->block.ptr), end = gr_range_end(range), stop = at, chosen = 0;
        unsigned count = 0;

        gr_assert_locked(&segments->lock);
        while (at < end && count < MOVE_BATCH && chosen < hole_bytes) {
                struct gr_range *from;
                struct found found;
                uint64_t most;

                while (stop < end && !gr_page_is_mapped(gr_page_at(segment, stop)))
                        stop += GR_PAGE_BYTES;
                most = gr_min(stop - at, hole_bytes - chosen);
                found = find_movable(segments, from_graphs, most);
                if (!found.range && most < stop - at)
                        found = find_movable(segments, from_graphs, stop - at);
                from = found.range ? gr_range_isolate(segments, found.range, found.at, found.bytes) : NULL;
                if (from) {
                        moves[count++] = (struct move){.from = from, .to = at};
                        at += found.bytes;
                        chosen += found.bytes;
                        continue;
                }
                while (stop < end && gr_page_is_mapped(gr_page_at(segment, stop)))
                        stop += GR_PAGE_BYTES;
                at = stop;
        }
        return count;
}

/*
 * Maps the extent a second time, in this segment. Its old addresses stay mapped until the last work there has passed.
 * Lock not held.
 */
static bool move_one(struct gr_context *context, struct gr_segment *segment, const struct move *move)
{
        struct gr_page *old = gr_page_at(move->from->segment, move->from->block.ptr),
                       *extent = gr_page_at(segment, move->to);
        uint64_t handle = old->handle;
        uint32_t pages = old->pages;

        assert(old->used_bytes == (move->from->segment->in_graphs ? gr_extent_bytes(old) : 0));
        assert(!gr_page_is_mapped(extent) && extent->stale == 0);
        if (context->core->driver->mem_map(context->handle, context->device->ordinal, move->to, gr_extent_bytes(old),
                                           &handle))
                return false;
        *extent = (struct gr_page){
                .handle = handle,
                .freed_epoch = old->freed_epoch,
                .used_bytes = segment->in_graphs ? gr_extent_bytes(old) : 0,
                .pages = pages,
        };
        for (uint32_t i = 1; i < pages; i++)
                extent[i].back = i;
        gr_budget_add(&segment->mapped_bytes, gr_extent_bytes(extent));
        gr_budget_add(&move->from->segment->mapped_bytes, -gr_extent_bytes(extent));
        for (uint32_t i = 0; i < pages; i++)
                old[i] = (struct gr_page){0};
        old->stale = pages;
        return true;
}

uint64_t gr_remap_fill(struct gr_context *context, struct gr_range *range, uint64_t hole_bytes, bool from_graphs)
{
        struct gr_segments *segments = context->segments;
        struct move moves[MOVE_BATCH];
        unsigned count, done = 0;

        if (atomic_load(&segments->moves_refused))
                return hole_bytes;
        gr_lock(&segments->lock);
        gr_segments_free_usable(context);
        count = moves_choose(segments, range, hole_bytes, from_graphs && range->segment->in_graphs, moves);
        gr_unlock(&segments->lock);
        while (done < count && move_one(context, range->segment, &moves[done]))
                done++;
        if (done < count && !atomic_exchange(&segments->moves_refused, true))
                gr_log(GR_LOG_INFO, "the driver refuses to map memory at a second address: free memory is not moved");
        gr_lock(&segments->lock);
        for (unsigned i = 0; i < count; i++) {
                struct gr_range *from = moves[i].from;

                if (i < done) {
                        hole_bytes -= gr_min(hole_bytes, from->block.capacity_bytes);
                        if (range->segment->in_graphs && !from->segment->in_graphs) {
                                gr_segments_surplus(segments, -(int64_t)from->block.capacity_bytes);
                                gr_budget_add(&context->device->graph_bytes, from->block.capacity_bytes);
                                gr_budget_uncache(context->device, from->block.capacity_bytes);
                        }
                        gr_count(context->core, GR_COUNTER_remapped_bytes, from->block.capacity_bytes);
                        stale_enter(segments, from, gr_page_at(range->segment, moves[i].to)->freed_epoch,
                                    from->segment->in_graphs);
                } else {
                        gr_extent_settle(segments, from, GR_RANGE_FREE);
                }
        }
        gr_unlock(&segments->lock);
        return hole_bytes;
}

GR_NOT_CHECKED void gr_remap_collect(struct gr_context *context)
{
        struct gr_segments *segments = context->segments;
        struct gr_block *block, *next, *idle = NULL;

        gr_assert_locked(&segments->lock);
        /*
         * The whole list is searched, as an idle range may stand behind one that is not idle. Memory that is idle at
         * its new address may be returned and uncharged at any time, and a stale address left behind would keep it on
         * the device.
         */
        DL_FOREACH_SAFE (segments->stale_pages, block, next)
                if (gr_fence_idle(context->fence, block->freed_epoch)) {
                        DL_DELETE(segments->stale_pages, block);
                        gr_range_become(gr_range_of(block), GR_RANGE_BUSY);
                        DL_APPEND(idle, block);
                }
        while ((block = idle)) {
                struct gr_range *range = gr_range_of(block);
                int rc;

                DL_DELETE(idle, block);
                segments->busy++;
                gr_unlock(&segments->lock);
                rc = context->core->driver->mem_unmap(context->handle, block->ptr, block->capacity_bytes, GR_NO_HANDLE);
                gr_lock(&segments->lock);
                segments->busy--;
                if (rc) { /* these addresses are lost */
                        gr_range_become(range, GR_RANGE_LOST);
                        continue;
                }
                gr_page_at(range->segment, block->ptr)->stale = 0;
                gr_extent_settle(segments, range, GR_RANGE_FREE);
        }
}
