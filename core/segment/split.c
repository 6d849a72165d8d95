#include "segment/split.h"

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
#include "segment/slack.h"
#include "segment/split_state.h"

#define BARRIER_SHARE 64  /* 1/64 of the peak of live memory: if less waits, a barrier is not worth its cost */
#define SLIGHT_SHARE  256 /* 1/256 of it: a request for less is served by what needs no barrier */
#define BUSY_PAUSE_NS UINT64_C(20000)
#define QUEUE_LOOK    64 /* waiting ranges looked at before a barrier is laid for one */
#define SEGMENT_TIMES 4  /* a segment that serves a request is at most four times as large */

void gr_split_init(struct gr_context *context)
{
        struct gr_split *split = context->split;

        memset(split, 0, sizeof(*split));
        gr_lock_init(&split->lock, GR_RANK_SPLIT);
        atomic_init(&context->split_least_bytes,
                    context->core->config.pool == GR_POOL_AUTO ? GR_SPLIT_LEAST_AUTO_BYTES : GR_SPLIT_LEAST_BYTES);
}

void gr_split_begin(struct gr_context *context)
{
        const struct gr_core *core = context->core;
        bool wanted = core->config.pool == GR_POOL_SPLIT;

        gr_assert_locked(&core->contexts_lock);
        if (core->config.pool == GR_POOL_AUTO)
                wanted = core->driver->mem_reserve; /* bins where no memory can be mapped */
        atomic_store(&context->split_active, wanted);
}

void gr_split_destroy(struct gr_context *context)
{
        struct gr_split *split = context->split;

        for (size_t i = 0; i < split->segment_count; i++)
                gr_segment_destroy(split->segments[i]);
        free(split->segments);
        gr_range_forget_kept(split);
        gr_lock_destroy(&split->lock);
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
                        assert(context->split->free_count > 0);
                        context->split->free_count--;
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

void gr_split_context_gone(struct gr_context *context)
{
        struct gr_split *split = context->split;
        struct gr_device *device = context->device;
        struct gr_segment *expandable[GR_EXPANDABLE_KINDS];

        gr_lock(&split->lock);
        while (split->busy > 0) { /* threads in calls of the driver, which do not wait for the GPU */
                gr_unlock(&split->lock);
                context->core->driver->sleep_ns(BUSY_PAUSE_NS);
                gr_lock(&split->lock);
        }
        gr_segments_merge_fastbins(context);
        gr_graph_segments_context_gone(context);
        for (size_t i = 0; i < split->segment_count; i++) {
                struct gr_segment *segment = split->segments[i];

                forget_ranges(context, segment);
                if (segment->pages)
                        continue;
                gr_budget_add(&device->stranded_bytes, -gr_segment_stranded(segment));
                gr_budget_uncharge_block(device, segment->ptr, segment->bytes);
                gr_metadata_free(segment, sizeof(*segment));
        }
        memcpy(expandable, split->expandable, sizeof(expandable));
        memset(split->expandable, 0, sizeof(split->expandable));
        split->stale_pages = split->stale_graph_pages = NULL;
        split->segment_count = 0;
        memset(split->free, 0, sizeof(split->free));
        split->changes++; /* a thread in gr_split_take must look for a range again */
        split->queue = NULL;
        atomic_store(&context->fastbins_closed, false);
        assert(split->free_count == 0); /* each of them was a range of a segment */
        split->surplus_bytes = split->surplus_low_bytes = 0;
        atomic_store(&split->waiting_bytes, 0);
        atomic_store(&split->ahead_epoch, 0);
        split->stuck_epoch = 0;
        split->graph_used_bytes = split->graph_peak_bytes = 0;
        gr_unlock(&split->lock);
        for (int kind = 0; kind < GR_EXPANDABLE_KINDS; kind++)
                if (expandable[kind])
                        gr_expandable_close(context, expandable[kind]);
}

/* Below, the split's lock is held unless a comment says otherwise; it is never held across a call of the driver. */

static size_t range_bytes(size_t bytes)
{
        return gr_round_up(bytes, GR_SPLIT_UNIT_BYTES);
}

/* Whether freed ranges may go into fastbins. Any lock may be held. */
static bool fits_fastbin(struct gr_context *context)
{
        return context->core->config.pool == GR_POOL_AUTO && !atomic_load(&context->fastbins_closed);
}

/* The largest segment for a request: one small block in it would keep all of it from the driver. */
static uint64_t most_segment_bytes(size_t bytes)
{
        return gr_round_up(SEGMENT_TIMES * bytes, GR_PAGE_BYTES);
}

/* A free range for the request, from *ret_at on, freed by the end of last_epoch; NULL: there is none. */
GR_HOT_CODE static struct gr_range *fit(struct gr_context *context, size_t bytes, enum gr_split_from from,
                                        uint64_t last_epoch, uint64_t *ret_at)
{
        struct gr_split *split = context->split;
        bool small = gr_is_small(bytes);
        const struct gr_free_lists *lists = &split->free[gr_expandable_kind(small)];
        uint64_t most = from >= GR_SPLIT_FROM_USED ? UINT64_MAX : most_segment_bytes(bytes);
        struct gr_range *range;

        gr_assert_locked(&split->lock);
        *ret_at = 0; /* the beginning of the range */
        range = gr_fit_find(lists, bytes, last_epoch, most, ret_at);
        if (!range && !small && from != GR_SPLIT_FROM_USED) {
                range = gr_range_best(&split->free[GR_FREE_WHOLE], bytes, last_epoch, UINT64_MAX);
                if (range &&
                    (range->segment->bytes > most ||
                     (from == GR_SPLIT_FROM_CLOSE && range->segment->bytes > gr_slack_worth_opening(context, bytes))))
                        range = NULL;
        }
        return range;
}

/* Whether a request is so small that a worse fit that is usable now is better than a barrier. Any lock may be held. */
static bool is_slight(struct gr_context *context, size_t bytes)
{
        return bytes <= atomic_load_explicit(&context->device->peak_live_bytes, memory_order_relaxed) / SLIGHT_SHARE;
}

/* Cuts a block out of a free range, from `at` on. NULL: out of memory. */
GR_HOT_CODE static struct gr_block *take_from(struct gr_context *context, struct gr_range *range, uint64_t at,
                                              size_t bytes)
{
        struct gr_split *split = context->split;
        struct gr_block *block;

        gr_range_leave(split, range);
        if (at > range->block.ptr) {
                struct gr_range *rest = gr_range_cut(range, at - range->block.ptr);

                if (rest) {
                        gr_range_enter(split, range);
                        range = rest;
                }
        }
        block = gr_segments_carve(context, range, bytes);
        if (block)
                gr_segments_hit(context);
        return block;
}

/* Lock not held. */
struct gr_block *gr_split_take_usable(struct gr_context *context, size_t bytes)
{
        struct gr_split *split = context->split;
        struct gr_block *block = NULL;
        struct gr_range *range;
        uint64_t at;

        if (!gr_is_small(bytes) && !is_slight(context, bytes))
                return NULL;
        gr_lock(&split->lock);
        gr_segments_free_usable(context);
        range = fit(context, range_bytes(bytes), GR_SPLIT_FROM_CLOSE, gr_fence_usable_epoch(context->fence), &at);
        if (range)
                block = take_from(context, range, at, range_bytes(bytes));
        gr_unlock(&split->lock);
        return block;
}

/* Lock not held. */
GR_HOT_CODE struct gr_block *gr_split_take(struct gr_context *context, size_t bytes, enum gr_split_from from)
{
        struct gr_split *split = context->split;
        struct gr_fence *fence = context->fence;
        struct gr_block *block = NULL;
        struct gr_range *range = NULL;
        uint64_t at = 0;

        bytes = range_bytes(bytes);
        gr_lock(&split->lock);
        gr_segments_free_usable(context);
        if (is_slight(context, bytes))
                range = fit(context, bytes, from, gr_fence_usable_epoch(fence), &at);
        if (!range)
                range = fit(context, bytes, from, UINT64_MAX, &at);
        if (!range && gr_segments_merge_fastbins(context))
                range = fit(context, bytes, from, UINT64_MAX, &at);
        if (range && !gr_fence_usable(fence, range->block.freed_epoch)) {
                uint64_t epoch = range->block.freed_epoch, changes = split->changes;

                if (gr_fence_barrier_is_cheap(context->fence)) {
                        gr_unlock(&split->lock);
                        gr_fence_barrier_for(context->fence, epoch);
                        gr_lock(&split->lock);
                }
                if (split->changes != changes || !gr_fence_usable(fence, epoch)) /* else the range found first serves */
                        range = fit(context, bytes, from, gr_fence_usable_epoch(fence), &at);
        }
        if (range)
                block = take_from(context, range, at, bytes);
        gr_unlock(&split->lock);
        return block;
}

/* Lock not held. */
bool gr_split_has_waiting(struct gr_context *context)
{
        struct gr_split *split = context->split;

        return atomic_load_explicit(&split->waiting_bytes, memory_order_relaxed) > 0 ||
               !gr_fence_usable(context->fence, atomic_load_explicit(&split->ahead_epoch, memory_order_relaxed));
}

/* Lock not held. */
bool gr_split_would_help(struct gr_context *context, size_t bytes)
{
        struct gr_split *split = context->split;
        bool small = gr_is_small(bytes), helps = false;
        unsigned looked_at = 0;
        struct gr_block *block;

        gr_lock(&split->lock);
        DL_FOREACH (split->queue, block) {
                struct gr_segment *segment = gr_range_of(block)->segment;

                helps = segment->small == small && block->capacity_bytes >= bytes &&
                        (small || segment->pages ||
                         (segment->bytes <= most_segment_bytes(bytes) &&
                          (segment->used_count > 0 || segment->bytes <= gr_slack_worth_opening(context, bytes))));
                if (helps || ++looked_at == QUEUE_LOOK)
                        break;
        }
        gr_unlock(&split->lock);
        return helps;
}

/*
 * If the footprint would pass its bound while freed memory waits, a barrier makes that usable: it is taken at once, or
 * moved to where the request needs it. A barrier costs streams their overlap, so a share of the peak must be waiting.
 * And at least GR_FENCE_CLOSE_BYTES: with less, the epoch may still be open. The barrier would close it behind a kernel
 * that was launched after the frees, and that may wait for what the program launches next. Lock not held.
 */
static struct gr_block *take_behind_barrier(struct gr_context *context, size_t bytes)
{
        struct gr_split *split = context->split;
        uint64_t least = gr_max(atomic_load(&context->device->peak_live_bytes) / BARRIER_SHARE, GR_FENCE_CLOSE_BYTES);

        if (atomic_load_explicit(&split->waiting_bytes, memory_order_relaxed) < least ||
            !gr_slack_is_exceeded(context, bytes, gr_round_up(bytes, GR_PAGE_BYTES)) ||
            !gr_fence_barrier_is_safe(context->fence) || gr_fence_barrier(context->fence))
                return NULL;
        return gr_split_take(context, bytes, GR_SPLIT_FROM_CLOSE);
}

/* Lock not held. */
static bool has_expandable(struct gr_split *split)
{
        bool has;

        gr_lock(&split->lock);
        has = split->expandable[GR_EXPANDABLE_LARGE] || split->expandable[GR_EXPANDABLE_SMALL];
        gr_unlock(&split->lock);
        return has;
}

/* Lock not held. */
int gr_split_grow(struct gr_context *context, size_t bytes, struct gr_block **ret_block)
{
        struct gr_split *split = context->split;
        uint64_t segment_bytes = gr_round_up(bytes, GR_PAGE_BYTES), begin_ns;
        struct gr_segment *segment;
        struct gr_block *block = take_behind_barrier(context, bytes);
        bool room;
        int rc;

        if (block)
                goto found;
        rc = gr_expandable_grow(context, gr_expandable_kind(gr_is_small(bytes)), range_bytes(bytes), ret_block);
        if (rc == -ENOSPC && context->core->config.pool == GR_POOL_AUTO && atomic_load(&split->expandable_refused)) {
                if (!has_expandable(split))
                        atomic_store(&context->split_active, false);
                return -ENOTSUP;
        }
        if (rc == -ENOMEM) {
                block = gr_split_take(context, bytes, GR_SPLIT_FROM_CLOSE);
                if (block)
                        goto found;
        }
        /* Any other error concerns mapped memory only: the driver's own allocation may still succeed. */
        if (!rc || gr_is_out_of_memory(rc))
                goto out;
        room = gr_slack_make_room(context, bytes, segment_bytes);
        /* No room as free memory is not idle yet: a bad fit is better than more memory, unless there is excess. */
        if (!room && gr_budget_excess(context->device) == 0) {
                block = gr_split_take(context, bytes, GR_SPLIT_FROM_ALL);
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
        gr_lock(&split->lock);
        if (!gr_segments_add(split, segment)) {
                gr_unlock(&split->lock);
                gr_budget_uncache(context->device, segment->bytes);
                gr_segments_return(context, &segment, 1);
                return -ENOMEM;
        }
        gr_split_surplus(split, (int64_t)segment->bytes);
        block = gr_segments_carve(context, segment->first, range_bytes(bytes));
        gr_unlock(&split->lock);
        rc = block ? 0 : -ENOMEM;
        if (block)
                *ret_block = block;
out:
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
        struct gr_split *split = context->split;

        gr_assert_locked(&split->lock);
        split->open_bytes += bytes;
        if (split->open_bytes < split->close_bytes)
                return false;
        split->open_bytes = 0;
        split->close_bytes = gr_fence_close_bytes(context->fence);
        return true;
}

/*
 * Gives a freed range, which no longer counts as used, its next state: STUCK if it must not be reused; free at once if
 * it is idle, or with `ahead`, ahead of its fence; else it waits in the queue. A free one may have merged into another.
 */
static void set_aside(struct gr_split *split, struct gr_range *range, bool ahead)
{
        struct gr_block *block = &range->block;

        gr_assert_locked(&split->lock);
        if (block->freed_epoch == GR_SPLIT_NEVER) {
                gr_range_become(range, GR_RANGE_STUCK);
                range->segment->stuck = true;
        } else if (ahead || block->freed_epoch == GR_SPLIT_IDLE) {
                atomic_store(&split->ahead_epoch, gr_max(atomic_load(&split->ahead_epoch), block->freed_epoch));
                gr_range_free(split, range);
        } else {
                gr_segments_wait(split, range);
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
        gr_assert_locked(&context->split->lock);
        if (waits)
                context->split->busy++;
        else
                gr_expandable_leave(context, segment, ptr, last);
        return waits;
}

/* From now on no freed range goes into a fastbin, and none lies in one. Lock not held. */
static void end_fastbins(struct gr_context *context)
{
        bool ends = fits_fastbin(context);

        if (ends)
                gr_arenas_quiesce(context); /* blocks handed out before must not go into fastbins any more */
        gr_lock(&context->split->lock);
        atomic_store(&context->fastbins_closed, true);
        gr_segments_merge_fastbins(context);
        gr_unlock(&context->split->lock);
        if (ends)
                gr_arenas_resume(context);
}

/* Whether a freed block goes into a fastbin of arena. Where they are full, they are emptied. */
static bool goes_into_fastbin(struct gr_arena *arena, struct gr_block *block)
{
        gr_assert_locked(&arena->context->split->lock);
        if (block->flags & GR_BLOCK_GRAPH || gr_block_state(block) == GR_BLOCK_GONE || !fits_fastbin(block->context))
                return false;
        if (gr_arena_fastbins_have_room(arena, block->capacity_bytes))
                return true;
        gr_segments_merge_fastbins_of(arena); /* all of them at once, so that it happens seldom */
        return false;
}

/*
 * Frees a range that left the ledger. Returns its segment if that is no longer in the list and has to go back, by
 * free_segment; else NULL. *ret_at_once: as begin_unstick returns.
 */
static struct gr_segment *free_range(struct gr_context *context, struct gr_range *range, unsigned flags,
                                     bool *ret_at_once)
{
        struct gr_segment *segment = range->segment;
        uint64_t ptr = range->block.ptr, last = gr_range_end(range) - 1;

        gr_segments_use(context, range, -1);
        set_aside(context->split, range, gr_segments_serve_ahead(context, segment));
        if (segment->pages) {
                *ret_at_once = gr_expandable_ends_stuck(segment, ptr, last) &&
                               begin_unstick(context, segment, ptr, last, flags & GR_SPLIT_PUT_WAITS);
                return NULL;
        }
        if (segment->used_count > 0 || !(flags & GR_SPLIT_PUT_BY_DRIVER || segment->stuck))
                return NULL;
        gr_segments_remove(context, gr_segments_above(context->split, segment->ptr) - 1);
        return segment;
}

/* Lock not held. */
GR_HOT_CODE int gr_split_put(struct gr_block *block, uint64_t epoch, unsigned flags, bool *ret_should_close)
{
        struct gr_range *range = gr_range_of(block);
        struct gr_context *context = block->context;
        struct gr_split *split = context->split;
        struct gr_arena *arena = gr_arena_own(context);
        struct gr_segment *segment, *gone = NULL;
        uint64_t ptr = block->ptr, last = gr_range_end(range) - 1;
        bool fastbin, at_once = false;

        assert(block->flags & GR_BLOCK_RANGE && !gr_block_has_home(block));
        if (epoch == GR_SPLIT_NEVER)
                end_fastbins(context);
        gr_lock(&split->lock);
        fastbin = !(flags & GR_SPLIT_PUT_BY_DRIVER) && goes_into_fastbin(arena, block);
        if (!fastbin && gr_ledger_make_gone(context->core->ledger, block) == GR_BLOCK_GONE) {
                gr_unlock(&split->lock);
                gr_block_delete(range);
                return 0;
        }
        segment = range->segment;
        assert(range->state == GR_RANGE_USED);
        split->frees++;
        if (segment->graph)
                split->graph_used_bytes -= block->capacity_bytes;
        if (segment->pages && epoch == GR_SPLIT_NEVER) {
                gr_expandable_discard(context, range);
                at_once = begin_unstick(context, segment, ptr, last, flags & GR_SPLIT_PUT_WAITS);
        } else {
                block->freed_epoch = epoch;
                *ret_should_close = count_freed(context, block->capacity_bytes);
                if (fastbin)
                        gr_arena_enter_fastbin(arena, block);
                else
                        gone = free_range(context, range, flags, &at_once);
        }
        gr_unlock(&split->lock);
        if (at_once)
                gr_expandable_unstick(context, segment, ptr, last);
        return gone ? free_segment(context, gone) : 0;
}

struct find {
        uint64_t ptr;
        struct gr_split_place place;
        bool found;
};

/* Lock not held. */
static bool find_in(struct gr_context *context, void *arg)
{
        struct gr_split *split = context->split;
        struct find *find = arg;
        size_t at;

        gr_lock(&split->lock);
        at = gr_segments_above(split, find->ptr);
        if (at > 0 && find->ptr - split->segments[at - 1]->ptr < split->segments[at - 1]->bytes) {
                struct gr_range *range = gr_range_at(split->segments[at - 1], find->ptr);

                find->place.base_ptr = range->block.ptr;
                find->place.live = range->state == GR_RANGE_USED && gr_block_is_live(&range->block);
                find->found = true;
        }
        gr_unlock(&split->lock);
        return !find->found;
}

/* Lock not held. */
int gr_split_find(struct gr_core *core, uint64_t ptr, struct gr_split_place *ret_place)
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
void gr_split_count(struct gr_context *context, struct gr_cache_counts *counts)
{
        struct gr_split *split = context->split;

        gr_lock(&split->lock);
        counts->hits += split->hits;
        counts->frees += split->frees;
        counts->blocks += split->free_count;
        gr_unlock(&split->lock);
}
