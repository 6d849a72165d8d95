#include "segment/extent.h"

#include <assert.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/attributes.h"
#include "base/counters.h"
#include "base/size_class.h"
#include "cache/block.h"
#include "context/context.h"
#include "segment/range.h"
#include "segment/segments_state.h"

#define SMALL_BEYOND_SHARE 8 /* extents stay small once this share of the device or the limit is reserved */

GR_HOT_CODE void gr_extent_use(struct gr_context *context, struct gr_range *range, int sign)
{
        struct gr_segment *segment = range->segment;
        uint64_t left = range->block.capacity_bytes, surplus = 0, unused = sign > 0 ? -left : left, part;
        struct gr_page *extent = gr_extent_at(segment, range->block.ptr);
        uint64_t room = gr_extent_ptr(segment, extent) + gr_extent_bytes(extent) - range->block.ptr;

        gr_assert_locked(&context->segments->lock);
        /* Memory is mapped behind all of a used range, so its extents are adjacent. */
        for (;; extent += extent->pages, room = gr_extent_bytes(extent)) {
                part = gr_min(left, room);
                assert(extent->pages > 0 && extent->back == 0);
                assert(sign > 0 || extent->used_bytes >= part);
                if (sign > 0) {
                        surplus -= extent->used_bytes == 0 ? gr_extent_bytes(extent) : 0;
                        extent->used_bytes += part;
                } else {
                        extent->used_bytes -= part;
                        extent->freed_epoch = gr_max(extent->freed_epoch, range->block.freed_epoch);
                        surplus += extent->used_bytes == 0 ? gr_extent_bytes(extent) : 0;
                }
                assert(extent->used_bytes <= gr_extent_bytes(extent));
                left -= part;
                if (left == 0)
                        break;
        }
        /* What is not used of an extent is surplus if that is all of it, else stranded. */
        if (unused != surplus)
                gr_budget_add(&context->device->stranded_bytes, unused - surplus);
        if (surplus != 0)
                gr_segments_surplus(context->segments, (int64_t)surplus);
}

int gr_extent_reserve(struct gr_context *context, uint64_t bytes, uint64_t *ret_reserved_bytes)
{
        int rc = gr_budget_reserve(context->device, bytes, ret_reserved_bytes);

        if (!rc)
                gr_budget_end_grants(context->device); /* no keeper counts what segments have cached */
        return rc;
}

void gr_extent_commit(struct gr_context *context, uint64_t ptr, uint64_t bytes, uint64_t reserved_bytes, int rc)
{
        if (rc) {
                gr_budget_cancel(context->device, reserved_bytes);
                return;
        }
        gr_budget_cache(context->device, bytes);                       /* first, so that it is never live */
        gr_budget_commit(context->device, ptr, bytes, reserved_bytes); /* cannot fail: whole pages */
        gr_count(context->core, GR_COUNTER_driver_allocs, 1);
}

GR_HOT_CODE bool gr_extents_stay_small(struct gr_device *device, uint64_t more_bytes)
{
        uint64_t device_total_bytes = atomic_load_explicit(&device->total_bytes, memory_order_relaxed);
        uint64_t total_bytes = gr_budget_total(device, device_total_bytes > 0 ? device_total_bytes : UINT64_MAX);

        return atomic_load_explicit(&device->reserved_bytes, memory_order_relaxed) + more_bytes >
               total_bytes / SMALL_BEYOND_SHARE;
}

int gr_extent_map(struct gr_context *context, struct gr_segment *segment, uint64_t ptr, uint64_t bytes)
{
        struct gr_page *extent = gr_page_at(segment, ptr);
        uint64_t handle = GR_NO_HANDLE;
        int rc;

        assert(bytes > 0 && (ptr | bytes) % GR_PAGE_BYTES == 0);
        assert(ptr >= segment->ptr && ptr + bytes <= segment->ptr + segment->bytes);
        assert(!gr_page_is_mapped(extent) && extent->stale == 0);
        rc = context->core->driver->mem_map(context->handle, context->device->ordinal, ptr, bytes, &handle);
        gr_extent_commit(context, ptr, bytes, bytes, rc);
        if (rc)
                return rc;
        *extent = (struct gr_page){.handle = handle, .pages = (uint32_t)(bytes >> GR_PAGE_SHIFT)};
        for (uint32_t i = 1; i < extent->pages; i++)
                extent[i].back = i;
        gr_budget_add(&segment->mapped_bytes, bytes);
        if (segment->in_graphs) {
                extent->used_bytes = bytes;
                gr_budget_add(&context->device->graph_bytes, bytes);
                gr_budget_uncache(context->device, bytes);
        }
        return 0;
}

void gr_extent_note(const struct gr_range *range, uint64_t epoch)
{
        const struct gr_segment *segment = range->segment;

        gr_assert_range_locked(range);
        for (uint64_t at = range->block.ptr; at < gr_range_end(range);) {
                struct gr_page *extent = gr_extent_at(segment, at);

                extent->freed_epoch = gr_max(extent->freed_epoch, epoch);
                at = gr_extent_ptr(segment, extent) + gr_extent_bytes(extent);
        }
}

bool gr_extent_unmap(struct gr_core *core, void *handle, struct gr_segment *segment, struct gr_page *extent)
{
        gr_lock_rank_assert_free_from(GR_RANK_SEGMENTS);
        assert(extent->pages > 0 && extent->back == 0 && extent->stale == 0);
        if (core->driver->mem_unmap(handle, gr_extent_ptr(segment, extent), gr_extent_bytes(extent), extent->handle))
                return false;
        gr_budget_add(&segment->mapped_bytes, -gr_extent_bytes(extent));
        for (uint32_t i = extent->pages; i-- > 0;)
                extent[i] = (struct gr_page){0};
        return true;
}

void gr_extent_hole_leave(struct gr_range *hole)
{
        gr_assert_range_locked(hole);
        assert(hole->state == GR_RANGE_HOLE);
        assert(!hole->after == (hole->segment->end == hole)); /* the last range, if it is a hole */
        DL_DELETE(hole->segment->holes, &hole->block);
        if (hole->segment->end == hole)
                hole->segment->end = NULL;
}

void gr_extent_hole_enter(struct gr_range *range)
{
        struct gr_block *block = &range->block;

        gr_assert_range_locked(range);
        gr_range_become(range, GR_RANGE_HOLE);
        assert((block->ptr | block->capacity_bytes) % GR_PAGE_BYTES == 0);
        assert(!gr_page_is_mapped(gr_page_at(range->segment, block->ptr)));
        block->freed_epoch = 0;
        DL_APPEND(range->segment->holes, block);
        if (!range->after)
                range->segment->end = range;
}

static void hole_make(struct gr_range *range)
{
        if (range->after && range->after->state == GR_RANGE_HOLE) {
                gr_extent_hole_leave(range->after);
                gr_range_swallow(range, range->after);
        }
        if (range->before && range->before->state == GR_RANGE_HOLE) {
                range = range->before;
                gr_extent_hole_leave(range);
                gr_range_swallow(range, range->after);
        }
        gr_extent_hole_enter(range);
}

void gr_extent_stick(struct gr_range *range)
{
        struct gr_segment *segment = range->segment;

        gr_assert_range_locked(range);
        for (uint64_t at = range->block.ptr; at < gr_range_end(range);) {
                struct gr_page *extent = gr_extent_at(segment, at);

                extent->stuck = true;
                extent->freed_epoch = gr_max(extent->freed_epoch, range->block.freed_epoch);
                at = gr_extent_ptr(segment, extent) + gr_extent_bytes(extent);
        }
        gr_range_become(range, GR_RANGE_STUCK);
}

void gr_extent_settle(struct gr_segments *segments, struct gr_range *range, enum gr_range_state rest)
{
        struct gr_segment *segment = range->segment;

        gr_assert_locked(&segments->lock);
        assert(range->state == GR_RANGE_BUSY && (rest == GR_RANGE_FREE || rest == GR_RANGE_STUCK));
        while (range) {
                bool mapped = gr_page_is_mapped(gr_page_at(segment, range->block.ptr));
                uint64_t end = gr_range_end(range), at = gr_page_down(range->block.ptr) + GR_PAGE_BYTES;
                struct gr_range *next = NULL;

                while (at < end && gr_page_is_mapped(gr_page_at(segment, at)) == mapped)
                        at += GR_PAGE_BYTES;
                if (at < end) {
                        next = gr_range_cut(range, at - range->block.ptr);
                        if (!next) {
                                gr_range_become(range, GR_RANGE_LOST);
                                return;
                        }
                }
                if (!mapped)
                        hole_make(range);
                else if (rest == GR_RANGE_FREE)
                        gr_range_free(segments, range);
                else
                        gr_extent_stick(range);
                range = next;
        }
}
