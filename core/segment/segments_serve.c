#include "segment/segments_serve.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <utlist.h>

#include "account/budget.h"
#include "account/pressure.h"
#include "base/arith.h"
#include "base/attributes.h"
#include "base/counters.h"
#include "base/lock.h"
#include "base/metadata.h"
#include "base/size_class.h"
#include "cache/arena.h"
#include "cache/arenas.h"
#include "cache/ledger.h"
#include "cache/pool_kind.h"
#include "context/context.h"
#include "fence/fence.h"
#include "host/pinned.h"
#include "segment/expandable.h"
#include "segment/expandable_grow.h"
#include "segment/extent.h"
#include "segment/fit.h"
#include "segment/graph_segments.h"
#include "segment/range.h"
#include "segment/segments.h"
#include "segment/segments_state.h"
#include "segment/slack.h"

#define BARRIER_SHARE 64  /* 1/64 of the peak of live memory: if less waits, a barrier is not worth its cost */
#define SLIGHT_SHARE  256 /* 1/256 of it: a request for less is served by what needs no barrier */
#define BUSY_PAUSE_NS UINT64_C(20000) /* between two looks at whether threads are still in calls of the driver */
#define QUEUE_LOOK    64              /* waiting ranges looked at before a barrier is laid for one */
#define SEGMENT_TIMES 4               /* a segment that serves a request is at most four times as large */

void gr_segments_init(struct gr_context *context)
{
        struct gr_segments *segments = context->segments;

        memset(segments, 0, sizeof(*segments));
        gr_lock_init(&segments->lock, GR_RANK_SEGMENTS);
        atomic_init(&context->segments_least_bytes, context->core->config.pool == GR_POOL_AUTO
                                                            ? GR_SEGMENTS_LEAST_AUTO_BYTES
                                                            : GR_SEGMENTS_LEAST_BYTES);
}

void gr_segments_begin(struct gr_context *context)
{
        const struct gr_core *core = context->core;
        bool wanted = core->config.pool == GR_POOL_SPLIT;

        gr_assert_locked(&core->contexts_lock);
        if (core->config.pool == GR_POOL_AUTO)
                wanted = core->driver->mem_reserve; /* bins where no memory can be mapped */
        atomic_store(&context->segments_active, wanted);
}

void gr_segments_destroy(struct gr_context *context)
{
        struct gr_segments *segments = context->segments;

        for (size_t i = 0; i < segments->segment_count; i++)
                gr_segment_destroy(segments->by_address[i]);
        free(segments->by_address);
        gr_range_forget_kept(segments);
        gr_lock_destroy(&segments->lock);
}

/* Frees the ranges of a segment whose context has gone; used ones leave the ledger. */
static void forget_ranges(struct gr_context *context, struct gr_segment *segment)
{
        struct gr_range *range, *after;
        uint64_t end = segment->ptr;

        for (range = segment->first; range; range = after) {
                bool used = range->state == GR_RANGE_USED, gap = false;

                after = range->after;
                assert(range->block.ptr == end && range->segment == segment); /* they tile their segment */
                end = gr_range_end(range);
                if (range->state == GR_RANGE_FREE || range->state == GR_RANGE_WAITING) {
                        assert(context->segments->free_count > 0);
                        context->segments->free_count--;
                }
                if (segment->pages) {
                        gap = range->state != GR_RANGE_FREE && range->state != GR_RANGE_WAITING;
                        if (used || range->state == GR_RANGE_STUCK) /* its pages count both as used */
                                gr_extent_use(context, range, -1);
                }
                if (!used && !gap)
                        gr_budget_uncache(context->device, range->block.capacity_bytes);
                /* If another thread is just handing the range out or freeing it, that thread frees the structure. */
                if (used && gr_ledger_make_gone(context->core->ledger, &range->block) != GR_BLOCK_LIVE)
                        continue;
                if (used)
                        gr_trace_add(GR_ENTRY_FREE, GR_ENTRY_NO_DEVICE, 0, range->block.ptr, 0);
                gr_block_delete(range);
        }
        assert(end == segment->ptr + segment->bytes);
        (void)end;
}

void gr_segments_context_gone(struct gr_context *context)
{
        struct gr_segments *segments = context->segments;
        struct gr_device *device = context->device;
        struct gr_segment *expandable[GR_EXPANDABLE_KINDS];

        gr_lock(&segments->lock);
        while (segments->busy > 0) { /* threads in calls of the driver, which do not wait for the GPU */
                gr_unlock(&segments->lock);
                context->core->driver->sleep_ns(BUSY_PAUSE_NS);
                gr_lock(&segments->lock);
        }
        gr_segments_merge_fastbins(context);
        gr_graph_segments_context_gone(context);
        for (size_t i = 0; i < segments->segment_count; i++) {
                struct gr_segment *segment = segments->by_address[i];

                forget_ranges(context, segment);
                if (segment->pages)
                        continue;
                gr_budget_add(&device->stranded_bytes, -gr_segment_stranded(segment));
                gr_budget_uncharge_block(device, segment->ptr, segment->bytes);
                gr_metadata_free(segment, sizeof(*segment));
        }
        memcpy(expandable, segments->expandable, sizeof(expandable));
        memset(segments->expandable, 0, sizeof(segments->expandable));
        segments->stale_pages = segments->stale_graph_pages = NULL;
        segments->segment_count = 0;
        memset(segments->free, 0, sizeof(segments->free));
        segments->changes++; /* a thread in gr_segments_take must look for a range again */
        segments->queue = NULL;
        atomic_store(&context->fastbins_closed, false);
        assert(segments->free_count == 0); /* each of them was a range of a segment */
        segments->surplus_bytes = segments->surplus_low_bytes = 0;
        atomic_store(&segments->waiting_bytes, 0);
        atomic_store(&segments->ahead_epoch, 0);
        segments->stuck_epoch = 0;
        segments->graph_used_bytes = segments->graph_peak_bytes = 0;
        gr_unlock(&segments->lock);
        for (int kind = 0; kind < GR_EXPANDABLE_KINDS; kind++)
                if (expandable[kind])
                        gr_expandable_close(context, expandable[kind]);
}

/* Below, the segments' lock is held unless a comment says otherwise; it is never held across a call of the driver. */

/* Whether freed ranges may go into fastbins at all. Any lock may be held. */
static bool has_fastbins(struct gr_context *context)
{
        return context->core->config.pool == GR_POOL_AUTO && !atomic_load(&context->fastbins_closed);
}

/* The largest segment for a request: one small block in it would keep all of it from the driver. */
static uint64_t most_segment_bytes(size_t bytes)
{
        return gr_round_up(SEGMENT_TIMES * bytes, GR_PAGE_BYTES);
}

/*
 * A free range for the request, freed by the end of last_epoch; NULL: there is none. *ret_at: the address in it at
 * which the block is to begin; 0: its beginning.
 */
GR_HOT_CODE static struct gr_range *find_fit(struct gr_context *context, size_t bytes, enum gr_segments_from from,
                                             uint64_t last_epoch, uint64_t *ret_at)
{
        struct gr_segments *segments = context->segments;
        bool small = gr_is_small(bytes);
        const struct gr_free_lists *lists = &segments->free[gr_expandable_kind(small)];
        uint64_t most = from >= GR_SEGMENTS_FROM_USED ? UINT64_MAX : most_segment_bytes(bytes);
        struct gr_range *range;

        gr_assert_locked(&segments->lock);
        *ret_at = 0;
        range = gr_fit_find(lists, bytes, last_epoch, most, ret_at);
        if (!range && !small && from != GR_SEGMENTS_FROM_USED) {
                range = gr_range_best(&segments->free[GR_FREE_WHOLE], bytes, last_epoch, UINT64_MAX);
                if (range &&
                    (range->segment->bytes > most || (from == GR_SEGMENTS_FROM_CLOSE &&
                                                      range->segment->bytes > gr_slack_worth_opening(context, bytes))))
                        range = NULL;
        }
        return range;
}

/*
 * Whether a request is so small, beside the peak of live memory, that a worse fit that is usable now is better than a
 * barrier. Any lock may be held.
 */
static bool is_slight(struct gr_context *context, size_t bytes)
{
        return bytes <= atomic_load_explicit(&context->device->peak_live_bytes, memory_order_relaxed) / SLIGHT_SHARE;
}

/* Cuts a block out of a free range, from `at` on. NULL: out of memory. */
GR_HOT_CODE static struct gr_block *take_from(struct gr_context *context, struct gr_range *range, uint64_t at,
                                              size_t bytes)
{
        struct gr_segments *segments = context->segments;
        struct gr_block *block;

        gr_range_leave(segments, range);
        if (at > range->block.ptr) {
                struct gr_range *rest = gr_range_cut(range, at - range->block.ptr);

                if (rest) {
                        gr_range_enter(segments, range);
                        range = rest;
                }
        }
        block = gr_segments_carve(context, range, bytes);
        if (block)
                gr_segments_hit(context);
        return block;
}

/* Lock not held. */
struct gr_block *gr_segments_take_usable(struct gr_context *context, size_t bytes)
{
        struct gr_segments *segments = context->segments;
        struct gr_block *block = NULL;
        struct gr_range *range;
        uint64_t at;

        if (!gr_is_small(bytes) && !is_slight(context, bytes))
                return NULL;
        gr_lock(&segments->lock);
        gr_segments_free_usable(context);
        range = find_fit(context, gr_range_bytes(bytes), GR_SEGMENTS_FROM_CLOSE, gr_fence_usable_epoch(context->fence),
                         &at);
        if (range)
                block = take_from(context, range, at, gr_range_bytes(bytes));
        gr_unlock(&segments->lock);
        return block;
}

/* Lock not held. */
GR_HOT_CODE struct gr_block *gr_segments_take(struct gr_context *context, size_t bytes, enum gr_segments_from from)
{
        struct gr_segments *segments = context->segments;
        struct gr_fence *fence = context->fence;
        struct gr_block *block = NULL;
        struct gr_range *range = NULL;
        uint64_t at = 0;

        bytes = gr_range_bytes(bytes);
        gr_lock(&segments->lock);
        gr_segments_free_usable(context);
        if (is_slight(context, bytes))
                range = find_fit(context, bytes, from, gr_fence_usable_epoch(fence), &at);
        if (!range)
                range = find_fit(context, bytes, from, UINT64_MAX, &at);
        if (!range && gr_segments_merge_fastbins(context))
                range = find_fit(context, bytes, from, UINT64_MAX, &at);
        if (range && !gr_fence_usable(fence, range->block.freed_epoch)) {
                uint64_t epoch = range->block.freed_epoch, changes = segments->changes;

                if (gr_fence_barrier_is_cheap(context->fence)) {
                        gr_unlock(&segments->lock);
                        gr_fence_barrier_for(context->fence, epoch);
                        gr_lock(&segments->lock);
                }
                if (segments->changes != changes ||
                    !gr_fence_usable(fence, epoch)) /* else the range found first serves */
                        range = find_fit(context, bytes, from, gr_fence_usable_epoch(fence), &at);
        }
        if (range)
                block = take_from(context, range, at, bytes);
        gr_unlock(&segments->lock);
        return block;
}

/* Lock not held. */
bool gr_segments_have_waiting(struct gr_context *context)
{
        struct gr_segments *segments = context->segments;

        return atomic_load_explicit(&segments->waiting_bytes, memory_order_relaxed) > 0 ||
               !gr_fence_usable(context->fence, atomic_load_explicit(&segments->ahead_epoch, memory_order_relaxed));
}

/* Lock not held. */
bool gr_segments_would_help(struct gr_context *context, size_t bytes)
{
        struct gr_segments *segments = context->segments;
        bool small = gr_is_small(bytes), helps = false;
        unsigned looked_at = 0;
        struct gr_block *block;

        gr_lock(&segments->lock);
        DL_FOREACH (segments->queue, block) {
                struct gr_segment *segment = gr_range_of(block)->segment;

                helps = segment->small == small && block->capacity_bytes >= bytes &&
                        (small || segment->pages ||
                         (segment->bytes <= most_segment_bytes(bytes) &&
                          (segment->used_count > 0 || segment->bytes <= gr_slack_worth_opening(context, bytes))));
                if (helps || ++looked_at == QUEUE_LOOK)
                        break;
        }
        gr_unlock(&segments->lock);
        return helps;
}

/*
 * If the footprint would pass its bound while freed memory waits, a barrier makes that usable: it is taken at once, or
 * moved to where the request needs it. A barrier costs streams their overlap, so a share of the peak must be waiting.
 * And at least GR_FENCE_CLOSE_BYTES: with less, the epoch may still be open. The barrier would close it behind a kernel
 * that was launched after the frees, and that may wait for what the program launches next. Lock not held.
 */
static struct gr_block *take_instead_of_growing(struct gr_context *context, size_t bytes)
{
        struct gr_segments *segments = context->segments;
        uint64_t least = gr_max(atomic_load(&context->device->peak_live_bytes) / BARRIER_SHARE, GR_FENCE_CLOSE_BYTES);

        if (atomic_load_explicit(&segments->waiting_bytes, memory_order_relaxed) < least ||
            !gr_slack_is_exceeded(context, bytes, gr_round_up(bytes, GR_PAGE_BYTES)) ||
            !gr_fence_barrier_is_safe(context->fence) || gr_fence_barrier(context->fence))
                return NULL;
        return gr_segments_take(context, bytes, GR_SEGMENTS_FROM_CLOSE);
}

/* Lock not held. */
static bool has_expandable(struct gr_segments *segments)
{
        bool has;

        gr_lock(&segments->lock);
        has = segments->expandable[GR_EXPANDABLE_LARGE] || segments->expandable[GR_EXPANDABLE_SMALL];
        gr_unlock(&segments->lock);
        return has;
}

/* Lock not held. */
int gr_segments_grow(struct gr_context *context, size_t bytes, struct gr_block **ret_block)
{
        struct gr_segments *segments = context->segments;
        uint64_t segment_bytes = gr_round_up(bytes, GR_PAGE_BYTES), begin_ns;
        struct gr_segment *segment;
        struct gr_block *block = take_instead_of_growing(context, bytes);
        bool room;
        int rc;

        if (block)
                goto found;
        rc = gr_expandable_grow(context, gr_expandable_kind(gr_is_small(bytes)), gr_range_bytes(bytes), ret_block);
        if (rc == -ENOSPC && context->core->config.pool == GR_POOL_AUTO && atomic_load(&segments->expandable_refused)) {
                if (!has_expandable(segments))
                        atomic_store(&context->segments_active, false);
                return -ENOTSUP;
        }
        if (rc == -ENOMEM) {
                block = gr_segments_take(context, bytes, GR_SEGMENTS_FROM_CLOSE);
                if (block)
                        goto found;
        }
        /* Any other error concerns mapped memory only: the driver's own allocation may still succeed. */
        if (!rc || gr_is_out_of_memory(rc))
                goto out;
        room = gr_slack_make_room(context, bytes, segment_bytes);
        /* No room as free memory is not idle yet: a bad fit is better than more memory, unless there is excess. */
        if (!room && gr_budget_excess(context->device) == 0) {
                block = gr_segments_take(context, bytes, GR_SEGMENTS_FROM_ALL);
                if (block)
                        goto found;
        }
        begin_ns = context->core->driver->now_ns();
        rc = gr_segment_take(context, segment_bytes, &segment);
        if (!room)
                gr_slack_spend(context, context->core->driver->now_ns() - begin_ns);
        if (rc)
                return rc;
        segment->small = gr_is_small(bytes);
        gr_lock(&segments->lock);
        if (!gr_segments_add(segments, segment)) {
                gr_unlock(&segments->lock);
                gr_budget_uncache(context->device, segment->bytes);
                gr_segments_return(context, &segment, 1);
                return -ENOMEM;
        }
        gr_segments_surplus(segments, (int64_t)segment->bytes);
        block = gr_segments_carve(context, segment->first, gr_range_bytes(bytes));
        gr_unlock(&segments->lock);
        rc = block ? 0 : -ENOMEM;
        if (block)
                *ret_block = block;
out:
        if (!rc)
                gr_count(context->core, GR_COUNTER_fresh_allocs, 1);
        gr_budget_update_peak(context->device);
        gr_pressure_note(context);
        return rc;

found:
        *ret_block = block;
        return 0;
}

/* Counts bytes as freed into the open epoch. True: that is so much that the epoch should be closed. */
static bool count_freed(struct gr_context *context, uint64_t bytes)
{
        struct gr_segments *segments = context->segments;

        gr_assert_locked(&segments->lock);
        segments->open_bytes += bytes;
        if (segments->open_bytes < segments->close_bytes)
                return false;
        segments->open_bytes = 0;
        segments->close_bytes = gr_fence_close_bytes(context->fence);
        return true;
}

/*
 * Gives a freed range, which no longer counts as used, its next state: STUCK if it must not be reused; free at once if
 * it is idle, or with `ahead`, ahead of its fence; else it waits in the queue. A free one may have merged into another.
 */
static void set_aside(struct gr_segments *segments, struct gr_range *range, bool ahead)
{
        struct gr_block *block = &range->block;

        gr_assert_locked(&segments->lock);
        if (block->freed_epoch == GR_SEGMENTS_NEVER) {
                gr_range_become(range, GR_RANGE_STUCK);
                range->segment->stuck = true;
        } else if (ahead || block->freed_epoch == GR_SEGMENTS_IDLE) {
                gr_segments_note_ahead(segments, block->freed_epoch);
                gr_range_free(segments, range);
        } else {
                gr_segments_wait(segments, range);
        }
}

/* Returns a segment that is in no list by the driver's own free, which waits for the GPU. Lock not held. */
static int free_segment(struct gr_context *context, struct gr_segment *segment)
{
        int rc = context->core->driver->mem_free(segment->ptr);

        if (rc == 0) {
                gr_count(context->core, GR_COUNTER_driver_frees, 1);
                gr_budget_uncharge_block(context->device, segment->ptr, segment->bytes);
        }
        gr_segment_destroy(segment);
        return rc;
}

/*
 * Memory from ptr to last is to go back and not to be reused. True: gr_expandable_unstick must follow, which waits for
 * the context. False, where the free must not wait: it is left for later.
 */
static bool begin_unstick(struct gr_context *context, struct gr_segment *segment, uint64_t ptr, uint64_t last,
                          bool waits)
{
        gr_assert_locked(&context->segments->lock);
        if (waits)
                context->segments->busy++;
        else
                gr_expandable_leave(context, segment, ptr, last);
        return waits;
}

/* From now on no freed range goes into a fastbin, and none lies in one. Lock not held. */
static void close_fastbins(struct gr_context *context)
{
        bool closes = has_fastbins(context);

        if (closes)
                gr_arenas_quiesce(context); /* blocks handed out before must not go into fastbins any more */
        gr_lock(&context->segments->lock);
        atomic_store(&context->fastbins_closed, true);
        gr_segments_merge_fastbins(context);
        gr_unlock(&context->segments->lock);
        if (closes)
                gr_arenas_resume(context);
}

/*
 * Whether a freed block may go into a fastbin of arena. Where these are full half of the larger blocks leaves, so that
 * it happens seldom.
 */
static bool make_room_in_fastbin(struct gr_arena *arena, struct gr_block *block)
{
        uint64_t bytes = block->capacity_bytes, most;

        gr_assert_locked(&arena->context->segments->lock);
        if (block->flags & GR_BLOCK_GRAPH || gr_block_state(block) == GR_BLOCK_GONE || !has_fastbins(block->context))
                return false;
        if (gr_arena_fastbins_have_room(arena, bytes))
                return true;
        most = gr_arena_fastbins_most(arena);
        if (bytes > most)
                return false;
        gr_segments_merge(block->context, gr_arena_evict_fastbins(arena, gr_min(most - bytes, most / 2)));
        return true;
}

/*
 * Frees a range that left the ledger. Returns its segment if that is no longer in the list and has to go back, by
 * free_segment; else NULL. *ret_at_once: as begin_unstick returns.
 */
static struct gr_segment *free_past_fastbins(struct gr_context *context, struct gr_range *range, unsigned flags,
                                             bool *ret_at_once)
{
        struct gr_segment *segment = range->segment;
        uint64_t ptr = range->block.ptr, last = gr_range_end(range) - 1;

        gr_segments_use(context, range, -1);
        set_aside(context->segments, range, gr_segments_serve_ahead(context, range));
        if (segment->pages) {
                *ret_at_once = gr_expandable_ends_stuck(segment, ptr, last) &&
                               begin_unstick(context, segment, ptr, last, flags & GR_SEGMENTS_PUT_WAITS);
                return NULL;
        }
        if (segment->used_count > 0 || !(flags & GR_SEGMENTS_PUT_BY_DRIVER || segment->stuck))
                return NULL;
        gr_segments_remove(context, gr_segments_above(context->segments, segment->ptr) - 1);
        return segment;
}

/* Lock not held. */
GR_HOT_CODE int gr_segments_put(struct gr_block *block, uint64_t epoch, unsigned flags, bool *ret_should_close)
{
        struct gr_range *range = gr_range_of(block);
        struct gr_context *context = block->context;
        struct gr_segments *segments = context->segments;
        struct gr_arena *arena = gr_arena_own(context);
        struct gr_segment *segment, *gone = NULL;
        uint64_t ptr = block->ptr, last = gr_range_end(range) - 1;
        bool fastbin, at_once = false;

        assert(block->flags & GR_BLOCK_RANGE && !gr_block_has_home(block));
        if (epoch == GR_SEGMENTS_NEVER)
                close_fastbins(context);
        gr_lock(&segments->lock);
        fastbin = !(flags & GR_SEGMENTS_PUT_BY_DRIVER) && make_room_in_fastbin(arena, block);
        if (!fastbin && gr_ledger_make_gone(context->core->ledger, block) == GR_BLOCK_GONE) {
                gr_unlock(&segments->lock);
                gr_block_delete(range);
                return 0;
        }
        segment = range->segment;
        assert(range->state == GR_RANGE_USED);
        segments->frees++;
        if (segment->graph)
                segments->graph_used_bytes -= block->capacity_bytes;
        if (segment->pages && epoch == GR_SEGMENTS_NEVER) {
                gr_expandable_discard(context, range);
                at_once = begin_unstick(context, segment, ptr, last, flags & GR_SEGMENTS_PUT_WAITS);
        } else {
                block->freed_epoch = epoch;
                *ret_should_close = count_freed(context, block->capacity_bytes);
                if (fastbin)
                        gr_arena_enter_fastbin(arena, block);
                else
                        gone = free_past_fastbins(context, range, flags, &at_once);
        }
        gr_unlock(&segments->lock);
        if (at_once)
                gr_expandable_unstick(context, segment, ptr, last);
        return gone ? free_segment(context, gone) : 0;
}

struct find {
        uint64_t ptr;
        struct gr_segments_place place;
        bool found;
};

/* Lock not held. */
static bool find_in(struct gr_context *context, void *arg)
{
        struct gr_segments *segments = context->segments;
        struct find *find = arg;
        size_t at;

        gr_lock(&segments->lock);
        at = gr_segments_above(segments, find->ptr);
        if (at > 0 && find->ptr - segments->by_address[at - 1]->ptr < segments->by_address[at - 1]->bytes) {
                struct gr_range *range = gr_range_at(segments->by_address[at - 1], find->ptr);

                find->place.base_ptr = range->block.ptr;
                find->place.live = range->state == GR_RANGE_USED && gr_block_is_live(&range->block);
                find->found = true;
        }
        gr_unlock(&segments->lock);
        return !find->found;
}

/* Lock not held. */
int gr_segments_find(struct gr_core *core, uint64_t ptr, struct gr_segments_place *ret_place)
{
        struct find find = {.ptr = ptr};

        if (core->config.pool != GR_POOL_SPLIT && core->config.pool != GR_POOL_AUTO)
                return -ENOENT;
        gr_context_each(core, -1, find_in, &find);
        if (!find.found)
                return -ENOENT;
        *ret_place = find.place;
        return 0;
}

/* Lock not held. */
void gr_segments_count(struct gr_context *context, struct gr_cache_counts *counts)
{
        struct gr_segments *segments = context->segments;

        gr_lock(&segments->lock);
        counts->hits += segments->hits;
        counts->frees += segments->frees;
        counts->blocks += segments->free_count;
        gr_unlock(&segments->lock);
}
