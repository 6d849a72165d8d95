#include "segment/segments_trim.h"

#include "account/budget.h"
#include "base/lock.h"
#include "cache/arenas.h"
#include "cache/bins_trim.h"
#include "context/context.h"
#include "fence/fence.h"
#include "segment/expandable.h"
#include "segment/range.h"
#include "segment/segments.h"
#include "segment/segments_state.h"

#define IDLE_BATCH_BYTES (UINT64_C(64) << 20) /* for decay, which has time: the driver is busy for 0.1 ms */

/* An idle segment that is wholly free. */
static bool segment_idle(struct gr_context *context, const struct gr_segment *segment)
{
        const struct gr_range *range = segment->first;

        gr_assert_locked(&context->segments->lock);
        return !segment->pages && range->state == GR_RANGE_FREE && !range->after &&
               gr_fence_idle(context->fence, range->block.freed_epoch);
}

/* Takes idle segments out, until want_bytes or room of them: one that suffices, else large ones before small ones. */
static size_t take_idle(struct gr_context *context, uint64_t want_bytes, struct gr_segment **idle, size_t room)
{
        struct gr_segments *segments = context->segments;
        size_t count = 0, best = SIZE_MAX;
        uint64_t bytes = 0;

        for (size_t i = 0; i < segments->segment_count; i++) {
                size_t size = segments->by_address[i]->bytes;

                if (size >= want_bytes && (best == SIZE_MAX || size < segments->by_address[best]->bytes) &&
                    segment_idle(context, segments->by_address[i]))
                        best = i;
        }
        if (best != SIZE_MAX) {
                idle[count++] = segments->by_address[best];
                gr_segments_remove(context, best);
                return count;
        }
        for (int small = 0; small < 2; small++)
                for (size_t i = segments->segment_count; i-- > 0 && count < room && bytes < want_bytes;) {
                        struct gr_segment *segment = segments->by_address[i];

                        if (segment->small != (small == 1) || !segment_idle(context, segment))
                                continue;
                        idle[count++] = segment;
                        bytes += segment->bytes;
                        gr_segments_remove(context, i);
                }
        return count;
}

uint64_t gr_segments_trim(struct gr_context *context, uint64_t want_bytes)
{
        struct gr_segment *idle[GR_TRIM_BATCH];
        size_t count = 1;
        uint64_t back;

        gr_lock_rank_assert_free_from(GR_RANK_SEGMENTS);
        gr_budget_returns_begin(context->device);
        gr_lock(&context->segments->lock);
        gr_segments_merge_fastbins(context);
        gr_unlock(&context->segments->lock);
        back = gr_expandable_collect(context);
        if (back < want_bytes)
                back += gr_expandable_trim(context, want_bytes - back, UINT64_MAX);
        while (count > 0 && back < want_bytes) {
                gr_lock(&context->segments->lock);
                gr_segments_free_usable(context);
                count = take_idle(context, want_bytes - back, idle, GR_TRIM_BATCH);
                gr_unlock(&context->segments->lock);
                if (count > 0)
                        back += gr_segments_return(context, idle, count);
        }
        gr_budget_returns_end(context->device, back);
        return back;
}

uint64_t gr_segments_trim_most(struct gr_context *context, uint64_t most_bytes)
{
        struct gr_segments *segments = context->segments;
        uint64_t batch_bytes = most_bytes < IDLE_BATCH_BYTES ? most_bytes : IDLE_BATCH_BYTES;
        struct gr_segment *segment = NULL;
        uint64_t gone;

        gr_budget_returns_begin(context->device);
        gr_expandable_collect(context); /* not part of the result: what this returns was not cached any more */
        gone = gr_expandable_trim(context, batch_bytes, most_bytes);
        gr_lock(&segments->lock); /* ranges whose epoch is usable have just left the queue */
        for (size_t i = 0; i < segments->segment_count && gone == 0; i++) {
                if (segments->by_address[i]->bytes > most_bytes || !segment_idle(context, segments->by_address[i]))
                        continue;
                segment = segments->by_address[i];
                gone = segment->bytes;
                gr_segments_remove(context, i);
        }
        gr_unlock(&segments->lock);
        if (segment)
                gr_segments_return(context, &segment, 1);
        gr_budget_returns_end(context->device, gone);
        return gone;
}

uint64_t gr_segments_trim_unneeded(struct gr_context *context)
{
        struct gr_segments *segments = context->segments;
        uint64_t bytes;

        gr_budget_rotate_peak(context->device);
        gr_lock(&segments->lock);
        bytes = segments->surplus_low_bytes;
        /* Ranges in fastbins count as used. Merged, they count as surplus until a request takes them. */
        gr_segments_merge_fastbins(context);
        segments->surplus_low_bytes = segments->surplus_bytes;
        gr_unlock(&segments->lock);
        return bytes;
}

void gr_segments_trim_merge_fastbins(struct gr_context *context)
{
        if (gr_arenas_fastbins(context) == 0)
                return;
        gr_lock(&context->segments->lock);
        gr_segments_merge_fastbins(context);
        gr_unlock(&context->segments->lock);
}

void gr_segments_trim_collect(struct gr_context *context)
{
        struct gr_segments *segments = context->segments;
        bool left;

        gr_lock(&segments->lock);
        left = segments->stuck_epoch > 0;
        gr_unlock(&segments->lock);
        if (!left)
                return;
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        gr_expandable_collect(context);
}

static bool merge_and_collect_one(struct gr_context *context, void *arg)
{
        (void)arg;
        gr_segments_trim_merge_fastbins(context);
        gr_segments_trim_collect(context);
        return true;
}

void gr_segments_trim_merge_and_collect(struct gr_core *core, struct gr_device *device)
{
        gr_context_each(core, device->ordinal, merge_and_collect_one, NULL);
}

bool gr_segments_trim_has_none(struct gr_context *context)
{
        struct gr_segments *segments = context->segments;
        bool empty;

        gr_lock(&segments->lock);
        empty = segments->surplus_bytes == 0 && segments->stuck_epoch == 0 && gr_arenas_fastbins(context) == 0;
        gr_unlock(&segments->lock);
        return empty;
}
