#include "segment/segments.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/attributes.h"
#include "base/metadata.h"
#include "base/size_class.h"
#include "cache/arena.h"
#include "cache/bins_trim.h"
#include "cache/block_life.h"
#include "cache/ledger.h"
#include "context/context.h"
#include "fence/fence.h"
#include "segment/extent.h"
#include "segment/range.h"
#include "segment/segments_state.h"

#define FIRST_EPOCH UINT64_C(1)

uint64_t gr_segment_stranded(const struct gr_segment *segment)
{
        gr_lock_rank_assert_held(GR_RANK_SEGMENTS);
        return segment->used_count > 0 ? segment->bytes - segment->used_bytes : 0;
}

/* Counts a range of a segment as used (+1), or as no longer used (-1; its freed_epoch is set). */
GR_HOT_CODE static void count_used(struct gr_context *context, struct gr_range *range, int sign)
{
        struct gr_segment *segment = range->segment;
        size_t bytes = range->block.capacity_bytes;
        uint64_t before = gr_segment_stranded(segment);
        bool surplus = segment->used_count == 0;

        gr_assert_locked(&context->segments->lock);
        if (segment->pages) {
                gr_extent_use(context, range, sign);
                return;
        }
        assert(sign > 0 || (segment->used_count > 0 && segment->used_bytes >= bytes));
        if (sign > 0) {
                segment->used_count++;
                segment->used_bytes += bytes;
        } else {
                segment->used_count--;
                segment->used_bytes -= bytes;
        }
        assert((segment->used_count == 0) == (segment->used_bytes == 0) && segment->used_bytes <= segment->bytes);
        if (surplus || segment->used_count == 0)
                gr_segments_surplus(context->segments, sign > 0 ? -(int64_t)segment->bytes : (int64_t)segment->bytes);
        gr_budget_add(&context->device->stranded_bytes, gr_segment_stranded(segment) - before);
}

GR_HOT_CODE void gr_segments_use(struct gr_context *context, struct gr_range *range, int sign)
{
        gr_assert_locked(&context->segments->lock);
        if (range->segment->in_graphs) {
                gr_budget_add(&context->device->graph_bytes, -(uint64_t)(sign * (int64_t)range->block.capacity_bytes));
                gr_extent_note(range, sign > 0 ? FIRST_EPOCH : range->block.freed_epoch);
                return;
        }
        if (sign > 0)
                gr_budget_uncache(context->device, range->block.capacity_bytes);
        else
                gr_budget_cache(context->device, range->block.capacity_bytes);
        count_used(context, range, sign);
}

bool gr_segments_serve_ahead(struct gr_context *context, const struct gr_range *range)
{
        const struct gr_segment *segment = range->segment;

        gr_assert_locked(&context->segments->lock);
        return gr_fence_usable(context->fence, range->block.freed_epoch) ||
               (!segment->small && !segment->graph && gr_fence_barrier_is_cheap(context->fence));
}

/* Counts a range as waiting, which the caller puts into the queue. */
static void count_waiting(struct gr_segments *segments, struct gr_range *range)
{
        gr_assert_locked(&segments->lock);
        gr_range_become(range, GR_RANGE_WAITING);
        segments->free_count++;
        gr_budget_add(&segments->waiting_bytes, range->block.capacity_bytes);
}

void gr_segments_wait(struct gr_segments *segments, struct gr_range *range)
{
        struct gr_block *block = &range->block;

        count_waiting(segments, range);
        DL_APPEND(segments->queue, block);
}

static int by_epoch(const struct gr_block *a, const struct gr_block *b)
{
        return (a->freed_epoch > b->freed_epoch) - (a->freed_epoch < b->freed_epoch);
}

/*
 * As gr_segments_wait, for a list (utlist's DL) of ranges that were freed before the last one in the queue: behind that
 * they would wait for work that has nothing to do with them.
 */
static void wait_among(struct gr_segments *segments, struct gr_block *early)
{
        struct gr_block *later = segments->queue, *block;

        DL_SORT(early, by_epoch);
        while ((block = early)) {
                DL_DELETE(early, block);
                while (later->freed_epoch <= block->freed_epoch)
                        later = later->next;
                count_waiting(segments, gr_range_of(block));
                DL_PREPEND_ELEM(segments->queue, later, block);
        }
}

GR_HOT_CODE bool gr_segments_merge(struct gr_context *context, struct gr_block *blocks)
{
        struct gr_segments *segments = context->segments;
        struct gr_block *block, *next, *freed = NULL, *early = NULL;

        gr_assert_locked(&segments->lock);
        if (!blocks)
                return false;
        for (block = blocks; block; block = next) {
                struct gr_range *range = gr_range_of(block);

                next = block->next;
                assert(range->state == GR_RANGE_USED);
                gr_ledger_make_gone(context->core->ledger, block);
                count_used(context, range, -1);
                if (!gr_segments_serve_ahead(context, range)) {
                        if (!segments->queue || segments->queue->prev->freed_epoch <= block->freed_epoch)
                                gr_segments_wait(segments, range);
                        else
                                DL_PREPEND(early, block);
                        continue;
                }
                gr_segments_note_ahead(segments, block->freed_epoch);
                gr_range_become(range, GR_RANGE_MERGING);
                DL_PREPEND(freed, block);
        }
        gr_range_free_all(segments, freed);
        wait_among(segments, early);
        return true;
}

bool gr_segments_merge_fastbins(struct gr_context *context)
{
        bool merged = false;

        gr_assert_locked(&context->segments->lock);
        for (struct gr_arena *arena = context->first_arena; arena; arena = gr_arena_next(arena, context->first_arena))
                merged |= gr_segments_merge(context, gr_arena_empty_fastbins(arena));
        return merged;
}

void gr_segment_destroy(struct gr_segment *segment)
{
        struct gr_range *range, *after;

        for (range = segment->first; range; range = after) {
                after = range->after;
                if (range->state != GR_RANGE_USED)
                        gr_block_delete(range);
        }
        free(segment->pages);
        free(segment->begins);
        gr_metadata_free(segment, sizeof(*segment));
}

GR_HOT_CODE void gr_segments_free_usable(struct gr_context *context)
{
        struct gr_segments *segments = context->segments;
        struct gr_block *block;

        gr_assert_locked(&segments->lock);
        while ((block = segments->queue) && gr_fence_usable(context->fence, block->freed_epoch)) {
                assert(gr_range_of(block)->state == GR_RANGE_WAITING && segments->free_count > 0);
                DL_DELETE(segments->queue, block);
                gr_budget_add(&segments->waiting_bytes, -(uint64_t)block->capacity_bytes);
                segments->free_count--;
                gr_range_free(segments, gr_range_of(block));
        }
}

GR_HOT_CODE bool gr_segments_list(struct gr_context *context, struct gr_block *block)
{
        struct gr_block *stale;

        gr_assert_locked(&context->segments->lock);
        if (gr_block_add(context->core, block, &stale))
                return false;
        if (stale && !(stale->flags & GR_BLOCK_RANGE)) {
                gr_budget_uncharge_block(stale->context->device, stale->ptr, stale->capacity_bytes);
                gr_block_delete(stale);
        }
        return true;
}

GR_HOT_CODE struct gr_block *gr_segments_carve(struct gr_context *context, struct gr_range *range, size_t bytes)
{
        struct gr_segments *segments = context->segments;
        struct gr_block *block = &range->block;
        struct gr_range *rest;

        gr_assert_locked(&segments->lock);
        assert(bytes > 0 && bytes <= block->capacity_bytes);
        assert((block->ptr | bytes) % gr_range_unit(range->segment->small) == 0);
        assert(range->segment->small == gr_is_small(bytes) || range->segment->graph);
        /* The report of a failed allocation adds up blocks by their class (oom_report.h). */
        gr_block_begin_cached(block, gr_class_of(bytes), GR_BLOCK_RANGE | (range->segment->graph ? GR_BLOCK_GRAPH : 0));
        if (!gr_segments_list(context, block)) {
                gr_range_free(segments, range);
                return NULL;
        }
        /* Without host memory for a second range the block keeps the rest. */
        rest = block->capacity_bytes > bytes ? gr_range_cut(range, bytes) : NULL;
        gr_range_become(range, GR_RANGE_USED);
        if (rest) /* nothing beside the rest of a free range is free */
                (rest->state == GR_RANGE_FREE ? gr_range_enter : gr_range_free)(segments, rest);
        gr_segments_use(context, range, 1);
        if (range->segment->graph) {
                segments->graph_used_bytes += block->capacity_bytes;
                segments->graph_peak_bytes = gr_max(segments->graph_peak_bytes, segments->graph_used_bytes);
        }
        return block;
}

size_t gr_segments_above(const struct gr_segments *segments, uint64_t ptr)
{
        size_t low = 0, high = segments->segment_count;

        gr_assert_locked(&segments->lock);
        while (low < high) {
                size_t middle = (low + high) / 2;

                if (segments->by_address[middle]->ptr <= ptr)
                        low = middle + 1;
                else
                        high = middle;
        }
        return low;
}

bool gr_segments_add(struct gr_segments *segments, struct gr_segment *segment)
{
        size_t at;

        if (segments->segment_count == segments->segment_room) {
                size_t room = segments->segment_room ? 2 * segments->segment_room : 64;
                struct gr_segment **grown = realloc(segments->by_address, room * sizeof(struct gr_segment *));

                if (!grown)
                        return false;
                segments->by_address = grown;
                segments->segment_room = room;
        }
        gr_assert_locked(&segments->lock);
        at = gr_segments_above(segments, segment->ptr);
        assert(at == 0 || segments->by_address[at - 1]->ptr + segments->by_address[at - 1]->bytes <= segment->ptr);
        assert(at == segments->segment_count || segment->ptr + segment->bytes <= segments->by_address[at]->ptr);
        memmove(&segments->by_address[at + 1], &segments->by_address[at],
                (segments->segment_count - at) * sizeof(struct gr_segment *));
        segments->by_address[at] = segment;
        segments->segment_count++;
        return true;
}

void gr_segments_remove(struct gr_context *context, size_t index)
{
        struct gr_segments *segments = context->segments;
        struct gr_segment *segment = segments->by_address[index];

        gr_assert_locked(&segments->lock);
        assert(index < segments->segment_count && segment->used_count == 0 && !segment->pages);
        for (struct gr_range *range = segment->first; range; range = range->after) {
                if (range->state == GR_RANGE_FREE) {
                        gr_range_leave(segments, range);
                } else if (range->state == GR_RANGE_WAITING) {
                        struct gr_block *block = &range->block;

                        DL_DELETE(segments->queue, block);
                        gr_budget_add(&segments->waiting_bytes, -(uint64_t)block->capacity_bytes);
                        segments->free_count--;
                }
        }
        gr_budget_uncache(context->device, segment->bytes);
        gr_segments_surplus(segments, -(int64_t)segment->bytes);
        segments->segment_count--;
        memmove(&segments->by_address[index], &segments->by_address[index + 1],
                (segments->segment_count - index) * sizeof(struct gr_segment *));
}

int gr_segment_take(struct gr_context *context, size_t bytes, struct gr_segment **ret_segment)
{
        struct gr_segment *segment = gr_metadata_alloc(sizeof(*segment));
        struct gr_range *range = gr_block_new();
        uint64_t reserved, ptr = 0;
        int rc = -ENOMEM;

        if (!segment || !range)
                goto fail;
        rc = gr_extent_reserve(context, bytes, &reserved);
        if (rc)
                goto fail;
        rc = context->core->driver->mem_alloc(context->handle, bytes, &ptr);
        gr_extent_commit(context, ptr, bytes, reserved, rc);
        if (rc)
                goto fail;
        segment->ptr = ptr;
        segment->bytes = bytes;
        segment->first = range;
        range->segment = segment;
        range->block.ptr = ptr;
        range->block.capacity_bytes = bytes;
        range->block.context = context;
        range->block.flags = GR_BLOCK_RANGE;
        *ret_segment = segment;
        return 0;
fail:
        gr_block_delete(range);
        gr_metadata_free(segment, sizeof(*segment));
        return rc;
}

uint64_t gr_segments_return(struct gr_context *context, struct gr_segment **segments, size_t count)
{
        uint64_t ptrs[GR_TRIM_BATCH] = {0}, sizes[GR_TRIM_BATCH] = {0}, bytes;

        assert(count <= GR_TRIM_BATCH);
        for (size_t i = 0; i < count; i++) {
                ptrs[i] = segments[i]->ptr;
                sizes[i] = segments[i]->bytes;
        }
        bytes = gr_bins_trim_ptrs(context, ptrs, sizes, count);
        for (size_t i = 0; i < count; i++)
                gr_segment_destroy(segments[i]);
        return bytes;
}
