#include "segment/expandable_grow.h"

#include <assert.h>
#include <errno.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/driver.h"
#include "base/lock.h"
#include "base/size_class.h"
#include "cache/block.h"
#include "context/context.h"
#include "fence/fence.h"
#include "host/pinned.h"
#include "segment/expandable.h"
#include "segment/extent.h"
#include "segment/fit.h"
#include "segment/range.h"
#include "segment/remap.h"
#include "segment/segments.h"
#include "segment/segments_state.h"
#include "segment/slack.h"

/*
 * The bytes of an extent. Larger ones go back and move less often, smaller ones cost more calls (docs/measurements.md,
 * extent-size). reserved: of the device, before the request; total: the device, or its limit. The 96th and the 12th are
 * rounded up to whole pages.
 *
 *   usual:                              max((reserved + request) / 96, request / 12)
 *                                       at most max(reserved / 256, min(request / 32, 32 MiB), 16 MiB)
 *   extents stay small:                 request / 12, at most total / 512
 *   while a stream is captured, also:   request / 2, at most max(total / 512, 6 MiB)
 *   in graph segments, also:            request / 2, at most min(total / 512, 6 MiB)
 *   always:                             at most 256 MiB: to return more would keep the driver busy too long
 */
#define EXTENT_SHARE        96
#define EXTENT_MOST_SHARE   256
#define REQUEST_SHARE       12
#define REQUEST_MOST_SHARE  32
#define REQUEST_MOST_BYTES  (UINT64_C(32) << 20)
#define EXTENT_BOUND_BYTES  (UINT64_C(16) << 20)
#define SMALL_MOST_SHARE    512
#define CAPTURED_SHARE      2
#define CAPTURED_MOST_BYTES (UINT64_C(6) << 20)
#define EXTENT_MOST_BYTES   (UINT64_C(256) << 20)

#define EXTRA_SHARE      16                   /* a large request maps a 16th of what is reserved (least_to_map) */
#define EXTRA_MOST_BYTES (UINT64_C(32) << 20) /* the most that this may be */
#define EXTRA_ROOM_SHARE 8   /* beside that, limits must leave room for an eighth of what is reserved */
#define MOVE_TIMES       2   /* the time of a move counts twice: to unmap its old addresses takes as much */
#define HOLES_LOOKED     128 /* most holes that one request looks at: a microsecond or two */
/* After so long the driver is asked for memory although, by its own figure, it has too little. */
#define REFUSED_NS UINT64_C(100000000)
/* After so long extra memory is mapped again: what others cached may have decayed. */
#define EXTRA_AGAIN_NS UINT64_C(10000000000)

/* Below, the segments' lock is held unless a comment says otherwise. */

static bool is_hole_or_usable(const struct gr_range *range)
{
        gr_lock_rank_assert_held(GR_RANK_SEGMENTS);
        return range && (range->state == GR_RANGE_HOLE ||
                         (range->state == GR_RANGE_FREE &&
                          gr_fence_usable(range->block.context->fence, range->block.freed_epoch)));
}

static void unlist_range(struct gr_segments *segments, struct gr_range *range)
{
        gr_assert_range_locked(range);
        if (range->state == GR_RANGE_HOLE)
                gr_extent_hole_leave(range);
        else
                gr_range_leave(segments, range);
}

static void list_range(struct gr_segments *segments, struct gr_range *range)
{
        gr_assert_range_locked(range);
        if (range->state == GR_RANGE_HOLE)
                gr_extent_hole_enter(range);
        else
                gr_range_enter(segments, range);
}

/* A place for a request: it begins at `at`, which lies in range. */
struct place {
        struct gr_range *range;
        uint64_t at;
        uint64_t hole_bytes; /* how much must be mapped for it */
};

/* Makes [at, at + bytes) the best place if all of it is free or a hole, and less must be mapped than for best. */
static void weigh_place(struct gr_range *range, uint64_t at, size_t bytes, struct place *best)
{
        struct place place = {.range = range, .at = at};
        uint64_t end = at + bytes;

        for (; is_hole_or_usable(range); range = range->after) {
                uint64_t stop = gr_range_end(range);

                if (range->state == GR_RANGE_HOLE)
                        place.hole_bytes += gr_min(stop, gr_page_up(end)) - gr_page_down(gr_max(at, range->block.ptr));
                if (stop >= end) {
                        if (place.hole_bytes < best->hole_bytes && !gr_fit_opens_large(place.range, at, bytes))
                                *best = place;
                        return;
                }
        }
}

/* Weighs the places at the front and at the end of a hole together with adjacent free ranges. */
static void weigh_hole(struct gr_range *hole, size_t bytes, struct place *best)
{
        struct gr_range *first = hole, *last = hole;
        uint64_t at;

        gr_assert_range_locked(hole);
        if (is_hole_or_usable(hole->before))
                first = hole->before;
        weigh_place(first, first->block.ptr, bytes, best);
        if (first != hole)
                weigh_place(hole, hole->block.ptr, bytes, best); /* in case the range before it must not be opened */
        if (!hole->after)
                return; /* the end of the segment */
        if (is_hole_or_usable(hole->after))
                last = hole->after;
        if (gr_range_end(last) - hole->segment->ptr < bytes)
                return;
        at = gr_range_end(last) - bytes;
        while (last->block.ptr > at) {
                last = last->before;
                if (!is_hole_or_usable(last)) /* asked once: another thread may make it usable at any moment */
                        return;
        }
        weigh_place(last, last->state == GR_RANGE_HOLE ? gr_page_down(at) : at, bytes, best);
}

/*
 * Chooses the place that lacks the fewest pages. Looks at HOLES_LOOKED holes only, as other threads wait for the lock;
 * after that the end of the segment serves or, if that is full, any hole.
 */
static bool find_place(const struct gr_segment *segment, size_t bytes, struct place *best)
{
        struct gr_block *block;
        unsigned looked = 0;

        gr_assert_range_locked(segment->first);
        *best = (struct place){.hole_bytes = UINT64_MAX};
        DL_FOREACH (segment->holes, block) {
                if (looked++ >= HOLES_LOOKED) {
                        if (segment->end && looked == HOLES_LOOKED + 1)
                                weigh_hole(segment->end, bytes, best);
                        if (best->range)
                                break;
                }
                weigh_hole(gr_range_of(block), bytes, best);
        }
        return best->range;
}

/* Cuts a free range or hole, in no list, after bytes. One part enters its list again, the other one is returned. */
static struct gr_range *cut_unlisted(struct gr_segments *segments, struct gr_range *range, uint64_t bytes,
                                     bool keep_front)
{
        struct gr_range *rest = gr_range_cut(range, bytes);

        if (rest)
                list_range(segments, keep_front ? rest : range);
        return !rest ? NULL : keep_front ? range : rest;
}

/* Makes the place one busy range. NULL: out of memory. */
static struct gr_range *claim_place(struct gr_segments *segments, const struct place *place, size_t bytes)
{
        struct gr_range *range = place->range, *after;
        uint64_t end = place->at + bytes, stop;
        enum gr_range_state state = range->state;

        gr_assert_range_locked(range);
        unlist_range(segments, range);
        if (range->block.ptr < place->at) {
                after = cut_unlisted(segments, range, place->at - range->block.ptr, false);
                if (!after) {
                        list_range(segments, range);
                        return NULL;
                }
                range = after;
        }
        gr_range_become(range, GR_RANGE_BUSY);
        while (gr_range_end(range) < end) {
                after = range->after;
                unlist_range(segments, after);
                state = after->state;
                gr_range_swallow(range, after);
        }
        assert(range->block.ptr == place->at);
        stop = state == GR_RANGE_HOLE ? gr_page_up(end) : end;
        if (stop < gr_range_end(range)) {
                after = gr_range_cut(range, stop - range->block.ptr);
                if (!after) {
                        gr_extent_settle(segments, range, GR_RANGE_FREE);
                        return NULL;
                }
                gr_range_become(after, state);
                list_range(segments, after);
        }
        return range;
}

/*
 * Widens the place until least_bytes are to be mapped for it, but not past the hole that it ends in. Returns its bytes.
 */
static size_t widen_place(struct place *place, size_t bytes, uint64_t least_bytes)
{
        uint64_t end = place->at + bytes, stop;
        const struct gr_range *last = place->range;

        gr_assert_range_locked(place->range);
        while (gr_range_end(last) < end)
                last = last->after;
        if (last->state != GR_RANGE_HOLE || place->hole_bytes >= least_bytes)
                return bytes;
        stop = gr_min(gr_page_up(end) + least_bytes - place->hole_bytes, gr_range_end(last));
        place->hole_bytes += stop - gr_page_up(end);
        return stop - place->at;
}

/*
 * The size of the extents for a large request, for which place_bytes are claimed; whole pages, or 0: one page. While a
 * stream is captured they are larger, so that a graph pins few of them; but not so large that the same request may
 * not open them later (fit.h), or that a small block keeps much. In graph segments a small block keeps its extent as
 * long as its graph. Lock not held.
 */
static uint64_t extent_bytes(struct gr_context *context, const struct gr_segment *segment, uint64_t place_bytes)
{
        struct gr_device *device = context->device;
        uint64_t charged = atomic_load(&device->reserved_bytes);
        uint64_t total = gr_budget_total(device, atomic_load(&device->total_bytes));
        uint64_t bytes = gr_page_up(place_bytes / REQUEST_SHARE), most = total / SMALL_MOST_SHARE;

        if (!gr_extents_stay_small(device, place_bytes)) {
                bytes = gr_max(gr_page_up((charged + place_bytes) / EXTENT_SHARE), bytes);
                most = gr_max(charged / EXTENT_MOST_SHARE, EXTENT_BOUND_BYTES);
                most = gr_max(most, gr_min(place_bytes / REQUEST_MOST_SHARE, REQUEST_MOST_BYTES));
        }
        if (segment->graph || gr_gate_is_open(&context->core->gate)) {
                bytes = gr_max(bytes, place_bytes / CAPTURED_SHARE);
                if (!segment->graph)
                        most = gr_max(most, total / SMALL_MOST_SHARE);
                most = gr_max(most, segment->graph && total > 0 ? gr_min(total / SMALL_MOST_SHARE, CAPTURED_MOST_BYTES)
                                                                : CAPTURED_MOST_BYTES);
        }
        return gr_page_down(gr_min(gr_min(bytes, most), EXTENT_MOST_BYTES));
}

/* The range at these addresses is busy. Lock not held. */
static uint64_t unmapped_bytes(const struct gr_segment *segment, uint64_t at, uint64_t end)
{
        uint64_t bytes = 0;

        for (; at < end; at += GR_PAGE_BYTES)
                bytes += gr_page_is_mapped(gr_page_at(segment, at)) ? 0 : GR_PAGE_BYTES;
        return bytes;
}

/*
 * Backs the holes of a busy range with memory, in extents of at least least_bytes where a hole is as large. All of it
 * is reserved at once: otherwise processes that wait for one limit would each take a part, fail and give it back, again
 * and again. *ret_bytes, also written on failure: how much was mapped. Lock not held.
 */
static int map_holes(struct gr_context *context, struct gr_range *range, uint64_t least_bytes, uint64_t *ret_bytes)
{
        struct gr_segment *segment = range->segment;
        uint64_t at = gr_page_down(range->block.ptr), end = gr_range_end(range);
        uint64_t step = segment->small
                                ? GR_PAGE_BYTES
                                : gr_max(extent_bytes(context, segment, end - at), gr_max(least_bytes, GR_PAGE_BYTES));
        uint64_t lack_bytes = unmapped_bytes(segment, at, end), reserved;
        int rc;

        *ret_bytes = 0;
        if (lack_bytes == 0)
                return 0;
        rc = gr_extent_reserve(context, lack_bytes, &reserved);
        if (rc)
                return rc;
        assert(reserved == lack_bytes);
        while (at < end) {
                uint64_t stop = at;

                while (stop < end && stop - at < step && !gr_page_is_mapped(gr_page_at(segment, stop)))
                        stop += GR_PAGE_BYTES;
                if (stop == at) {
                        at += GR_PAGE_BYTES;
                        continue;
                }
                rc = gr_extent_map(context, segment, at, stop - at);
                lack_bytes -= stop - at;
                if (rc) {
                        gr_extent_commit(context, 0, lack_bytes, lack_bytes, rc); /* cancels the charge of the rest */
                        return rc;
                }
                *ret_bytes += stop - at;
                at = stop;
        }
        assert(lack_bytes == 0);
        return 0;
}

/* Whether a request may map more than it lacks. Lock not held. */
static bool may_map_extra(struct gr_context *context, size_t bytes)
{
        uint64_t from_ns = atomic_load(&context->segments->extra_from_ns);

        return !gr_is_small(bytes) && (from_ns == 0 || context->core->driver->now_ns() >= from_ns);
}

/*
 * How much to map for a large request that lacks less: extra memory for the next requests, as a large extent costs
 * hardly more time than a small one. Not so much that the footprint would exceed its bound or come near a limit.
 * 0: only what it lacks. Lock not held.
 */
static uint64_t least_to_map(struct gr_context *context, size_t bytes)
{
        uint64_t reserved = atomic_load(&context->device->reserved_bytes);
        uint64_t least_bytes = gr_page_down(gr_min(reserved / EXTRA_SHARE, EXTRA_MOST_BYTES));

        if (!may_map_extra(context, bytes) || gr_extents_stay_small(context->device, bytes))
                return 0;
        while (least_bytes > 0 && (gr_slack_is_exceeded_recently(context, bytes, least_bytes) ||
                                   gr_budget_cache_room(context->device) < least_bytes + reserved / EXTRA_ROOM_SHARE))
                least_bytes = gr_page_down(least_bytes / 2);
        return least_bytes;
}

/*
 * How much to map in graph segments for a request that lacks less. A graph of the next size soon uses the rest, so
 * hardly more memory is held, and there are fewer calls of the driver (docs/measurements.md, graph-moves). 0: only what
 * it lacks. Lock not held.
 */
static uint64_t least_to_map_for_graph(struct gr_context *context, size_t bytes)
{
        uint64_t reserved = atomic_load(&context->device->reserved_bytes), least_bytes;

        if (!may_map_extra(context, bytes))
                return 0;
        gr_lock(&context->segments->lock);
        least_bytes = gr_page_down(gr_min(gr_slack_ahead_for_graph(context, bytes), EXTRA_MOST_BYTES));
        gr_unlock(&context->segments->lock);
        return gr_budget_cache_room(context->device) < least_bytes + reserved / EXTRA_ROOM_SHARE ? 0 : least_bytes;
}

/*
 * Whether the driver has refused memory a moment ago and, by its own figure, has less than bytes: then a part of them
 * would be mapped in vain, on a full device for nearly every request. Lock not held.
 */
static bool is_refused(struct gr_context *context, uint64_t bytes)
{
        const struct gr_driver *driver = context->core->driver;
        uint64_t refused_ns = atomic_load(&context->segments->refused_ns), free_bytes, total;

        return refused_ns > 0 && driver->now_ns() < refused_ns + REFUSED_NS &&
               driver->mem_info(context->handle, &free_bytes, &total) == 0 && free_bytes < bytes;
}

/*
 * Maps memory behind all holes of a busy range, lack_bytes together, as map_holes does. If not all can be mapped, the
 * rest is unmapped at once: cached, it would mislead the ladder, which would try to use it at each rung. *ret_bytes,
 * always written: how much more is mapped now, modulo 2^64. Lock not held.
 */
static int map_all_holes(struct gr_context *context, struct gr_range *range, uint64_t lack_bytes, uint64_t *ret_bytes)
{
        struct gr_segments *segments = context->segments;
        uint64_t gone = 0;
        int rc;

        *ret_bytes = 0;
        if (gr_budget_room(context->device) < lack_bytes)
                return -EDQUOT;
        if (is_refused(context, lack_bytes))
                return -ENOMEM;
        gr_budget_returns_begin(context->device); /* other threads must know that some of this may go back */
        rc = map_holes(context, range, GR_PAGE_BYTES, ret_bytes);
        if (rc) {
                gr_lock(&segments->lock);
                gr_remap_collect(
                        context); /* memory that moved here is freed only when its old addresses are unmapped, too */
                gr_unlock(&segments->lock);
                gone = gr_expandable_unmap_fresh(context, range);
                *ret_bytes -= gone;
        }
        gr_budget_returns_end(context->device, gone);
        if (rc == -ENOMEM)
                atomic_store(&segments->refused_ns, context->core->driver->now_ns());
        return rc;
}

/* The place that a request gets. */
struct growth {
        struct gr_range *range; /* busy */
        uint64_t lack_bytes;    /* how much is still to be mapped for it */
        uint64_t ahead_bytes;   /* of these, how much the request does not need, at the end */
        bool graph;             /* in a graph segment: memory in graphs can only move, some of it at a time */
        bool room;              /* graph: the slack has room, so memory need not move */
};

/* Chooses the place; least_bytes > 0: one so wide that as much is mapped. -ENOSPC or -ENOMEM. Lock not held. */
static int choose_place(struct gr_context *context, enum gr_expandable_kind kind, size_t bytes, uint64_t least_bytes,
                        struct growth *growth)
{
        struct gr_segments *segments = context->segments;
        struct place place;
        int rc = 0;

        gr_lock(&segments->lock);
        if (!segments->expandable[kind]) {
                gr_unlock(&segments->lock);
                rc = gr_expandable_open(context, kind);
                if (rc)
                        return rc;
                gr_lock(&segments->lock);
        }
        gr_segments_free_usable(context);
        gr_remap_collect(context);
        if (!segments->expandable[kind] || !find_place(segments->expandable[kind], bytes, &place)) {
                rc = -ENOSPC;
        } else {
                uint64_t needed_bytes = place.hole_bytes;
                size_t place_bytes = least_bytes > 0 ? widen_place(&place, bytes, least_bytes) : bytes;

                growth->range = claim_place(segments, &place, place_bytes);
                growth->lack_bytes = place.hole_bytes;
                growth->graph = gr_is_graph_kind(kind);
                growth->ahead_bytes = place.hole_bytes - needed_bytes;
                growth->room = growth->graph && gr_slack_has_room_for_graph(context, bytes, place.hole_bytes);
                if (growth->range)
                        segments->busy++;
                else
                        rc = -ENOMEM;
        }
        gr_unlock(&segments->lock);
        return rc;
}

/* Makes what is not mapped at the end of a busy range a hole again. False: out of memory, and nothing has changed. */
static bool give_end(struct gr_segments *segments, struct gr_range *range)
{
        uint64_t at = gr_page_up(gr_range_end(range));
        struct gr_range *rest = NULL;

        gr_assert_range_locked(range);
        while (at > range->block.ptr && !gr_page_is_mapped(gr_page_at(range->segment, at - GR_PAGE_BYTES)))
                at -= GR_PAGE_BYTES;
        if (at > range->block.ptr && at < gr_range_end(range)) {
                rest = gr_range_cut(range, at - range->block.ptr);
                if (!rest)
                        return false;
                gr_extent_settle(segments, rest, GR_RANGE_FREE);
        }
        return true;
}

/*
 * Moves free memory to the place, where the footprint should not grow. To move memory costs less in the driver than to
 * return some and map some, and need not wait for work. Lock not held.
 */
static void move_memory(struct gr_context *context, size_t bytes, struct growth *growth)
{
        struct gr_segments *segments = context->segments;

        if (growth->graph) {
                growth->lack_bytes =
                        gr_remap_fill(context, growth->range, growth->lack_bytes - growth->ahead_bytes, !growth->room);
                gr_lock(&segments->lock);
                if (growth->lack_bytes == 0 && growth->ahead_bytes > 0 && give_end(segments, growth->range))
                        growth->ahead_bytes = 0;
                gr_unlock(&segments->lock);
                growth->lack_bytes += growth->ahead_bytes;
        } else if (!gr_slack_has_room(context, bytes, growth->lack_bytes)) {
                uint64_t begin_ns = context->core->driver->now_ns();

                growth->lack_bytes = gr_remap_fill(context, growth->range, growth->lack_bytes, false);
                gr_slack_spend(context, MOVE_TIMES * (context->core->driver->now_ns() - begin_ns));
                if (growth->lack_bytes > 0)
                        gr_slack_make_room(context, bytes, growth->lack_bytes);
        }
}

/* Maps what the place lacks. Returns as map_all_holes, with *ret_bytes of its last call. Lock not held. */
static int map_memory(struct gr_context *context, uint64_t least_bytes, struct growth *growth, uint64_t *ret_bytes)
{
        struct gr_range *range = growth->range;
        int rc = growth->ahead_bytes > 0 ? map_holes(context, range, least_bytes, ret_bytes)
                                         : map_all_holes(context, range, growth->lack_bytes, ret_bytes);

        while (growth->graph && growth->ahead_bytes == 0 && gr_is_out_of_memory(rc)) {
                uint64_t left_bytes;

                growth->lack_bytes -= *ret_bytes; /* what had moved here may have gone back, too */
                left_bytes = gr_remap_fill(context, range, growth->lack_bytes, true);
                if (left_bytes == growth->lack_bytes)
                        break;
                growth->lack_bytes = left_bytes;
                rc = map_all_holes(context, range, left_bytes, ret_bytes);
        }
        return rc;
}

/*
 * As gr_expandable_grow. least_bytes > 0: the place is made so wide that as much is mapped for it. -EAGAIN: that could
 * not be mapped. Lock not held.
 */
static int grow_at(struct gr_context *context, enum gr_expandable_kind kind, size_t bytes, uint64_t least_bytes,
                   struct gr_block **ret_block)
{
        struct gr_segments *segments = context->segments;
        struct gr_block *block;
        struct growth growth;
        uint64_t come;
        int rc = choose_place(context, kind, bytes, least_bytes, &growth);

        if (rc)
                return rc;
        move_memory(context, bytes, &growth);
        rc = map_memory(context, least_bytes, &growth, &come);
        gr_lock(&segments->lock);
        assert(segments->busy > 0 && growth.range->state == GR_RANGE_BUSY);
        segments->busy--;
        if (!growth.range->segment->in_graphs)
                gr_segments_surplus(segments, (int64_t)come);
        if (rc == 0) {
                block = gr_segments_carve(context, growth.range, bytes);
                if (block)
                        *ret_block = block;
                else
                        rc = -ENOMEM;
        } else {
                gr_extent_settle(segments, growth.range, GR_RANGE_FREE);
                rc = growth.ahead_bytes > 0 ? -EAGAIN : rc;
        }
        gr_unlock(&segments->lock);
        return rc;
}

/*
 * For a request in graph segments for which memory is short, although enough is free: extents may be too large for what
 * its place lacks. Moves as much as it needs to the end of the segment, where extents of any size fit. Where as much is
 * cached, that goes back first, which is cheaper: the caller does that and tries again. Lock not held.
 */
static int grow_by_moves(struct gr_context *context, enum gr_expandable_kind kind, size_t bytes,
                         struct gr_block **ret_block)
{
        struct gr_segments *segments = context->segments;
        uint64_t lack_bytes = gr_page_up(bytes), left_bytes = lack_bytes, before_bytes;
        const struct gr_segment *segment;
        struct gr_range *range = NULL;
        int rc = -ENOMEM;

        gr_lock(&segments->lock);
        gr_segments_free_usable(context);
        segment = segments->expandable[kind];
        if (segment && segment->end && segment->end->block.capacity_bytes >= lack_bytes + EXTENT_MOST_BYTES &&
            gr_remap_has(context, lack_bytes)) {
                struct place place = {.range = segment->end, .at = segment->end->block.ptr};

                range = claim_place(segments, &place, lack_bytes + EXTENT_MOST_BYTES);
        }
        segments->busy += range ? 1 : 0;
        gr_unlock(&segments->lock);
        if (!range)
                return rc;
        do {
                before_bytes = left_bytes;
                left_bytes = gr_remap_fill(context, range, before_bytes, true);
        } while (left_bytes > 0 && left_bytes < before_bytes);
        gr_lock(&segments->lock);
        assert(segments->busy > 0 && range->state == GR_RANGE_BUSY);
        segments->busy--;
        if (left_bytes == 0 && give_end(segments, range)) {
                *ret_block = gr_segments_carve(context, range, bytes);
                rc = *ret_block ? 0 : -ENOMEM;
        } else {
                gr_extent_settle(segments, range, GR_RANGE_FREE);
        }
        gr_unlock(&segments->lock);
        return rc;
}

/* Lock not held. */
int gr_expandable_grow(struct gr_context *context, enum gr_expandable_kind kind, size_t bytes,
                       struct gr_block **ret_block)
{
        uint64_t least_bytes =
                gr_is_graph_kind(kind) ? least_to_map_for_graph(context, bytes) : least_to_map(context, bytes);
        int rc = grow_at(context, kind, bytes, least_bytes, ret_block);
        bool little = bytes <= atomic_load(&context->device->reserved_bytes) / EXTRA_ROOM_SHARE;

        /* Where a large request fails for lack of memory, there may still be enough for a little more. */
        if (rc == -EAGAIN || (rc == -ENOMEM && little))
                atomic_store(&context->segments->extra_from_ns, context->core->driver->now_ns() + EXTRA_AGAIN_NS);
        if (rc == -EAGAIN)
                rc = grow_at(context, kind, bytes, 0, ret_block);
        if (gr_is_graph_kind(kind) && gr_is_out_of_memory(rc) && gr_budget_returnable(context->device) < bytes &&
            grow_by_moves(context, kind, bytes, ret_block) == 0)
                rc = 0;
        return rc;
}
