#include "segment/expandable.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/counters.h"
#include "base/driver.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/metadata.h"
#include "base/size_class.h"
#include "cache/block.h"
#include "context/context.h"
#include "fence/fence.h"
#include "fence/fence_wait.h"
#include "segment/extent.h"
#include "segment/range.h"
#include "segment/remap.h"
#include "segment/segments.h"
#include "segment/segments_state.h"

/* Addresses are reserved for so many times the device's memory: holes cost nothing. */
#define ADDRESSES_SHARE 4
#define GRAPH_ADDRESSES_SHARE                                                                                          \
        16 /* or less, if refused: old addresses of moved memory stay until all graphs have gone */
#define TRIM_BATCH_BYTES (UINT64_C(256) << 20)
#define TRIM_BATCH       64

/* Below, the segments' lock is held unless a comment says otherwise. */

/*
 * Notes a new expandable segment for gr_pool_kind_in_expandable. While there is none of the other size, that entry gets
 * the same address, because with 0 low addresses would seem to lie in a segment.
 */
static void note_expandable(struct gr_core *core, bool small, uint64_t ptr, uint64_t bytes)
{
        gr_lock_rank_assert_held(GR_RANK_SEGMENTS);
        atomic_store(&core->expandable_ptrs[small], ptr);
        atomic_compare_exchange_strong(&core->expandable_ptrs[!small], &(uint64_t){0}, ptr);
        atomic_store(&core->expandable_pages, (uint32_t)(bytes >> GR_PAGE_SHIFT));
}

/* The structures of a segment of this kind at these addresses, which are one range. NULL: out of memory. */
static struct gr_segment *new_segment(struct gr_context *context, enum gr_expandable_kind kind, uint64_t ptr,
                                      uint64_t bytes)
{
        struct gr_segment *segment = gr_metadata_alloc(sizeof(*segment));
        struct gr_range *range = gr_block_new();

        assert((ptr | bytes) % GR_PAGE_BYTES == 0);
        if (segment) {
                segment->pages = calloc(bytes >> GR_PAGE_SHIFT, sizeof(*segment->pages));
                segment->begins = calloc(bytes >> GR_PAGE_SHIFT, sizeof(*segment->begins));
        }
        if (!segment || !range || !segment->pages || !segment->begins) {
                if (segment)
                        gr_segment_destroy(segment); /* with no ranges yet */
                gr_block_delete(range);
                return NULL;
        }
        segment->ptr = ptr;
        segment->bytes = bytes;
        segment->small = kind == GR_EXPANDABLE_SMALL || kind == GR_EXPANDABLE_GRAPH_SMALL;
        segment->graph = segment->in_graphs = gr_is_graph_kind(kind);
        segment->first = range;
        segment->begins[0] = range;
        range->segment = segment;
        range->block.ptr = ptr;
        range->block.capacity_bytes = bytes;
        range->block.context = context;
        range->block.flags = GR_BLOCK_RANGE;
        return segment;
}

int gr_expandable_open(struct gr_context *context, enum gr_expandable_kind kind)
{
        bool graph = gr_is_graph_kind(kind);
        struct gr_segments *segments = context->segments;
        const struct gr_driver *driver = context->core->driver;
        struct gr_segment *segment;
        uint64_t bytes = 0, total, ptr = 0;
        bool added = false;

        gr_lock_rank_assert_free_from(GR_RANK_SEGMENTS);
        if (!driver->mem_reserve || atomic_load(&segments->expandable_refused))
                return -ENOSPC;
        if (driver->mem_info(context->handle, &(uint64_t){0}, &total))
                goto refuse;
        for (unsigned share = graph ? GRAPH_ADDRESSES_SHARE : ADDRESSES_SHARE; share >= ADDRESSES_SHARE; share /= 2) {
                bytes = gr_page_down(share * total);
                if (bytes == 0 || driver->mem_reserve(context->handle, bytes, &ptr) == 0)
                        break;
        }
        if (!ptr)
                goto refuse;
        segment = new_segment(context, kind, ptr, bytes);
        if (!segment)
                goto refuse;
        gr_lock(&segments->lock);
        if (!segments->expandable[kind] && gr_segments_add(segments, segment)) {
                segments->expandable[kind] = segment;
                if (!graph)
                        note_expandable(context->core, segment->small, ptr, bytes);
                gr_extent_hole_enter(segment->first);
                added = true;
        }
        gr_unlock(&segments->lock);
        if (added)
                return 0;
        gr_block_delete(segment->first); /* another thread was faster */
        gr_expandable_close(context, segment);
        return segments->expandable[kind] ? 0 : -ENOSPC;
refuse:
        if (!graph && !atomic_exchange(&segments->expandable_refused, true))
                gr_log(GR_LOG_INFO, "no mapped memory here: pool kind %s",
                       context->core->config.pool == GR_POOL_AUTO ? "auto serves from bins instead"
                                                                  : "split takes segments from the driver's allocator");
        if (ptr)
                driver->mem_unreserve(ptr, bytes);
        return -ENOSPC;
}

/* Lock not held. */
void gr_expandable_close(struct gr_context *context, struct gr_segment *segment)
{
        struct gr_core *core = context->core;
        bool empty = true;

        for (uint64_t at = segment->ptr; at < segment->ptr + segment->bytes; at += GR_PAGE_BYTES) {
                struct gr_page *extent = gr_page_at(segment, at);
                uint64_t bytes = gr_extent_bytes(extent);

                if (extent->stale > 0)
                        core->driver->mem_unmap(NULL, at, (uint64_t)extent->stale << GR_PAGE_SHIFT, GR_NO_HANDLE);
                if (bytes == 0)
                        continue;
                /* What the driver refuses to take back stays charged: it still holds the memory. */
                if (gr_extent_unmap(core, NULL, segment, extent))
                        gr_budget_uncharge_block(context->device, at, bytes);
                else
                        empty = false;
                at += bytes - GR_PAGE_BYTES;
        }
        if (empty)
                core->driver->mem_unreserve(segment->ptr, segment->bytes);
        free(segment->pages);
        free(segment->begins);
        gr_metadata_free(segment, sizeof(*segment));
}

/*
 * Finds the first run of idle extents inside a free range; it begins at *ret_at. Returns its bytes; 0: there is none.
 */
static uint64_t idle_run(struct gr_context *context, const struct gr_range *range, uint64_t want_bytes,
                         uint64_t most_bytes, uint64_t *ret_at)
{
        const struct gr_segment *segment = range->segment;
        uint64_t at = gr_page_up(range->block.ptr), end = gr_range_end(range), bytes = 0;
        unsigned count = 0;

        gr_assert_range_locked(range);
        while (at < end && bytes < want_bytes && count < TRIM_BATCH && bytes < TRIM_BATCH_BYTES) {
                const struct gr_page *extent = gr_extent_at(segment, at);
                uint64_t begin = gr_extent_ptr(segment, extent), size = gr_extent_bytes(extent);

                if (begin < at || begin + size > end || size > most_bytes - bytes ||
                    !gr_fence_idle(context->fence, extent->freed_epoch)) {
                        if (bytes > 0)
                                break;
                } else {
                        if (bytes == 0)
                                *ret_at = begin;
                        bytes += size;
                        count++;
                }
                at = begin + size;
        }
        return bytes;
}

/* The smallest free range in which idle_run finds a run, and that run; NULL: there is none. */
static struct gr_range *idle_range(struct gr_context *context, uint64_t want_bytes, uint64_t most_bytes,
                                   uint64_t *ret_at, uint64_t *ret_bytes)
{
        gr_assert_locked(&context->segments->lock);
        for (int kind = GR_EXPANDABLE_KINDS; kind-- > 0;) { /* small requests' first */
                const struct gr_free_lists *lists = &context->segments->free[kind];
                struct gr_range *range = gr_range_first(lists, GR_PAGE_BYTES);

                for (; range && !range->segment->in_graphs; range = gr_range_next(lists, range)) {
                        *ret_bytes =
                                range->segment->pages ? idle_run(context, range, want_bytes, most_bytes, ret_at) : 0;
                        if (*ret_bytes > 0)
                                return range;
                }
        }
        return NULL;
}

static uint64_t unmap_range(struct gr_context *context, struct gr_range *range, bool fresh)
{
        struct gr_segment *segment = range->segment;
        uint64_t at = gr_page_up(range->block.ptr), end = gr_range_end(range), gone = 0;
        unsigned count = 0;

        assert(range->state == GR_RANGE_BUSY);
        while (at < end) {
                struct gr_page *extent = gr_extent_at(segment, at);
                uint64_t begin = gr_extent_ptr(segment, extent), size = gr_max(gr_extent_bytes(extent), GR_PAGE_BYTES);

                if (gr_page_is_mapped(extent) && begin >= at && begin + size <= end && /* else others use it, too */
                    !(fresh && extent->freed_epoch)) {
                        uint64_t cached = size - extent->used_bytes, stranded = gr_extent_stranded(extent);
                        uint64_t parked = segment->in_graphs ? size : 0;

                        if (gr_extent_unmap(context->core, context->handle, segment, extent)) {
                                gr_budget_add(&context->device->stranded_bytes, -stranded);
                                gr_budget_uncache(context->device, cached);
                                gr_budget_add(&context->device->graph_bytes, -parked);
                                gr_budget_uncharge_block(context->device, begin, size);
                                gone += size;
                                count++;
                        }
                }
                at = begin + size;
        }
        gr_count(context->core, GR_COUNTER_released_blocks, count);
        gr_count(context->core, GR_COUNTER_released_bytes, gone);
        return gone;
}

uint64_t gr_expandable_unmap_fresh(struct gr_context *context, struct gr_range *range)
{
        return unmap_range(context, range, true);
}

/* Lock not held. */
uint64_t gr_expandable_trim(struct gr_context *context, uint64_t want_bytes, uint64_t most_bytes)
{
        struct gr_segments *segments = context->segments;
        uint64_t gone = 0, last = 1, at, bytes;
        struct gr_range *range;

        gr_lock(&segments->lock);
        while (gone < want_bytes && gone < most_bytes && last > 0) {
                gr_remap_collect(context);
                gr_segments_free_usable(context);
                range = idle_range(context, want_bytes - gone, most_bytes - gone, &at, &bytes);
                range = range ? gr_range_isolate(segments, range, at, bytes) : NULL;
                if (!range)
                        break;
                segments->busy++;
                gr_unlock(&segments->lock);
                last = unmap_range(context, range, false);
                gone += last;
                gr_lock(&segments->lock);
                assert(segments->busy > 0);
                segments->busy--;
                gr_segments_surplus(segments, -(int64_t)last);
                gr_extent_settle(segments, range, GR_RANGE_FREE);
        }
        gr_unlock(&segments->lock);
        return gone;
}

/*
 * Whether nothing of the extent is used. With `later`, ranges that wait for their fence or that a thread is working on
 * count as unused, too: they may soon be free.
 */
static bool is_unused(const struct gr_segment *segment, const struct gr_page *extent, bool later)
{
        uint64_t begin = gr_extent_ptr(segment, extent), end = begin + gr_extent_bytes(extent);
        const struct gr_range *range = gr_range_at(segment, begin);

        for (; range && range->block.ptr < end; range = range->after)
                if (range->state != GR_RANGE_FREE && range->state != GR_RANGE_STUCK &&
                    !(later && (range->state == GR_RANGE_WAITING || range->state == GR_RANGE_BUSY)))
                        return false;
        return true;
}

/* Cuts a free or stuck range at ptr; both parts keep the state. Returns the rest; NULL: out of memory. */
static struct gr_range *cut_at(struct gr_segments *segments, struct gr_range *range, uint64_t ptr)
{
        bool is_free = range->state == GR_RANGE_FREE;
        struct gr_range *rest;

        if (is_free)
                gr_range_leave(segments, range);
        rest = gr_range_cut(range, ptr - range->block.ptr);
        if (is_free) {
                gr_range_enter(segments, range);
                if (rest)
                        gr_range_enter(segments, rest);
        }
        return rest;
}

/* Makes the extent one busy range; nothing in it is used or waits. NULL: out of memory, and nothing has changed. */
static struct gr_range *take_extent(struct gr_segments *segments, struct gr_segment *segment,
                                    const struct gr_page *extent)
{
        uint64_t begin = gr_extent_ptr(segment, extent), end = begin + gr_extent_bytes(extent);
        struct gr_range *range = gr_range_at(segment, begin), *last = gr_range_at(segment, end - 1);

        if (gr_range_end(last) > end && !cut_at(segments, last, end))
                return NULL;
        if (range->block.ptr < begin)
                range = cut_at(segments, range, begin);
        if (!range)
                return NULL;
        if (range->state == GR_RANGE_FREE)
                gr_range_leave(segments, range);
        gr_range_become(range, GR_RANGE_BUSY);
        while (gr_range_end(range) < end) {
                if (range->after->state == GR_RANGE_FREE)
                        gr_range_leave(segments, range->after);
                gr_range_swallow(range, range->after);
        }
        return range;
}

/*
 * Whether only stuck ranges keep the extent from going back. later: as in is_unused.
 */
static bool is_stuck(const struct gr_segment *segment, const struct gr_page *extent, bool later)
{
        return extent->stuck && !segment->in_graphs && is_unused(segment, extent, later);
}

bool gr_expandable_ends_stuck(const struct gr_segment *segment, uint64_t ptr, uint64_t last)
{
        gr_assert_range_locked(segment->first);
        return is_stuck(segment, gr_extent_at(segment, ptr), true) ||
               is_stuck(segment, gr_extent_at(segment, last), true);
}

/* Whether memory is mapped at range and no thread is mapping or returning it. */
static bool is_settled(const struct gr_range *range)
{
        gr_assert_range_locked(range);
        return range->state != GR_RANGE_BUSY && range->state != GR_RANGE_HOLE && range->state != GR_RANGE_STALE &&
               range->state != GR_RANGE_LOST;
}

/*
 * The driver has refused to take the caller's extent back. None of it is handed out any more, so all of it counts as
 * used and not as cached. Lock not held.
 */
static void keep_stuck(struct gr_context *context, struct gr_page *extent)
{
        uint64_t stranded = gr_extent_stranded(extent);

        gr_budget_add(&context->device->stranded_bytes, -stranded);
        gr_budget_uncache(context->device, stranded);
        extent->used_bytes = gr_extent_bytes(extent);
}

/*
 * The first extent from *at to end that only stuck ranges keep, as one busy range, if it is idle; NULL: none. Moves *at
 * behind it. Those that are not idle yet are left for gr_expandable_collect.
 */
static struct gr_range *take_stuck(struct gr_context *context, struct gr_segment *segment, uint64_t *at, uint64_t end)
{
        struct gr_segments *segments = context->segments;
        struct gr_range *taken = NULL;

        gr_assert_locked(&segments->lock);
        while (!taken && *at < end) {
                const struct gr_range *range = gr_range_at(segment, *at);
                const struct gr_page *extent;

                if (!is_settled(range)) {
                        *at = gr_range_end(range); /* this may lie inside an extent */
                        continue;
                }
                extent = gr_extent_at(segment, *at);
                *at = gr_extent_ptr(segment, extent) + gr_extent_bytes(extent);
                if (!is_stuck(segment, extent, true))
                        continue;
                if (is_stuck(segment, extent, false) && gr_fence_idle(context->fence, extent->freed_epoch))
                        taken = take_extent(segments, segment, extent);
                if (!taken)
                        segments->stuck_epoch = gr_max(segments->stuck_epoch, extent->freed_epoch);
        }
        return taken;
}

/*
 * Gives back the idle extents from at to end that only stuck ranges keep. The caller is counted in segments->busy.
 * Returns their bytes. Lock not held.
 */
static uint64_t return_stuck(struct gr_context *context, struct gr_segment *segment, uint64_t at, uint64_t end)
{
        struct gr_segments *segments = context->segments;
        struct gr_range *range;
        uint64_t gone = 0;

        gr_lock(&segments->lock);
        assert(segments->busy > 0);
        /* Memory that is still mapped at a stale address would stay on the device, and not be charged. */
        gr_remap_collect(context);
        gr_segments_free_usable(context);
        while ((range = take_stuck(context, segment, &at, end))) {
                uint64_t bytes;

                gr_unlock(&segments->lock);
                bytes = unmap_range(context, range, false);
                if (bytes == 0)
                        keep_stuck(context, gr_extent_at(segment, range->block.ptr));
                gone += bytes;
                gr_lock(&segments->lock);
                gr_extent_settle(segments, range, GR_RANGE_STUCK);
        }
        gr_unlock(&segments->lock);
        return gone;
}

/* The caller is no longer counted in segments->busy. Lock not held. */
static void end_busy(struct gr_segments *segments)
{
        gr_lock(&segments->lock);
        assert(segments->busy > 0);
        segments->busy--;
        gr_unlock(&segments->lock);
}

void gr_expandable_leave(struct gr_context *context, struct gr_segment *segment, uint64_t ptr, uint64_t last)
{
        struct gr_segments *segments = context->segments;

        gr_assert_locked(&segments->lock);
        for (uint64_t at = ptr; at <= last;) {
                const struct gr_page *extent = gr_extent_at(segment, at);

                segments->stuck_epoch = gr_max(segments->stuck_epoch, extent->freed_epoch);
                at = gr_extent_ptr(segment, extent) + gr_extent_bytes(extent);
        }
}

/* Lock not held. */
uint64_t gr_expandable_collect(struct gr_context *context)
{
        struct gr_segments *segments = context->segments;
        struct gr_segment *expandable[GR_EXPANDABLE_KINDS];
        uint64_t gone = 0;
        bool idle;

        gr_lock(&segments->lock);
        idle = segments->stuck_epoch > 0 && gr_fence_idle(context->fence, segments->stuck_epoch);
        if (idle) {
                segments->stuck_epoch = 0; /* return_stuck raises it again for what is not idle yet */
                segments->busy++;
        }
        memcpy(expandable, segments->expandable, sizeof(expandable));
        gr_unlock(&segments->lock);
        if (!idle)
                return 0;
        gr_budget_returns_begin(context->device);
        for (int kind = 0; kind < GR_EXPANDABLE_KINDS; kind++)
                if (expandable[kind])
                        gone += return_stuck(context, expandable[kind], expandable[kind]->ptr,
                                             expandable[kind]->ptr + expandable[kind]->bytes);
        gr_budget_returns_end(context->device, gone);
        end_busy(segments);
        return gone;
}

void gr_expandable_discard(struct gr_context *context, struct gr_range *range)
{
        gr_assert_locked(&context->segments->lock);
        range->block.freed_epoch = gr_fence_note_freed(context->fence, range->block.capacity_bytes);
        gr_extent_stick(range);
}

/* Lock not held. */
void gr_expandable_unstick(struct gr_context *context, struct gr_segment *segment, uint64_t ptr, uint64_t last)
{
        /* The driver may have failed only this once. If it fails again, nothing is idle, and all is left for later. */
        if (gr_driver_code(gr_fence_sync(context->fence)))
                gr_fence_sync(context->fence);
        return_stuck(context, segment, ptr, last + 1);
        gr_expandable_collect(context);
        end_busy(context->segments);
}
