#include "segment/fit.h"

#include <stdatomic.h>

#include "base/arith.h"
#include "base/attributes.h"
#include "base/size_class.h"
#include "context/context.h"
#include "fence/fence.h"
#include "segment/extent.h"
#include "segment/segments_state.h"

#define FIT_LOOK    3 /* ranges compared for a request */
#define LARGE_SHARE 2 /* an extent of more than this share of the request is large for it */

struct fit {
        struct gr_range *range;
        uint64_t at;
        size_t opened; /* pages of the place that are wholly free */
        bool usable;   /* without a barrier */
};

/* A request, and the best place so far. */
struct search {
        size_t bytes, least; /* no place opens fewer pages than least */
        uint64_t usable_epoch;
        bool stay_small; /* gr_extents_stay_small */
        struct fit best;
};

/* Fewer opened pages are better; of equals the usable one, unless it is more than twice as large. */
static bool is_better(const struct fit *fit, const struct fit *best)
{
        if (fit->opened != best->opened)
                return fit->opened < best->opened;
        return fit->usable && !best->usable &&
               fit->range->block.capacity_bytes / 2 <= best->range->block.capacity_bytes;
}

/* Whether ptr lies in an extent of which nothing is used, and which is large for the request. */
static bool is_large_extent(const struct gr_segment *segment, uint64_t ptr, size_t bytes)
{
        const struct gr_page *extent = gr_extent_at(segment, ptr);

        return extent->used_bytes == 0 && gr_extent_bytes(extent) > gr_max(bytes / LARGE_SHARE, GR_PAGE_BYTES);
}

/* As gr_fit_opens_large, where extents are to stay small. */
static bool opens_large(const struct gr_range *range, uint64_t at, size_t bytes)
{
        const struct gr_segment *segment = range->segment;

        return segment->pages &&
               (is_large_extent(segment, at, bytes) || is_large_extent(segment, at + bytes - 1, bytes));
}

bool gr_fit_opens_large(const struct gr_range *range, uint64_t at, size_t bytes)
{
        gr_assert_range_locked(range);
        return gr_extents_stay_small(range->block.context->device, 0) && opens_large(range, at, bytes);
}

/* Makes the place at `at`, in the range of *fit, that of *fit if it opens fewer pages. */
static inline void weigh_place(const struct search *search, uint64_t at, struct fit *fit)
{
        const struct gr_range *range = fit->range;
        uint64_t from = gr_max(gr_page_down(at), gr_page_up(range->block.ptr)),
                 to = gr_min(gr_page_up(at + search->bytes), gr_page_down(gr_range_end(range)));
        size_t opened = to > from ? (to - from) >> GR_PAGE_SHIFT : 0;

        if (opened < fit->opened && !(search->stay_small && opened > 0 && opens_large(range, at, search->bytes))) {
                fit->at = at;
                fit->opened = opened;
        }
}

/* Compares the places in a range with the best so far. True: no better one is possible. */
static inline bool weigh_range(struct search *search, struct gr_range *range)
{
        uint64_t ptr = range->block.ptr, page = gr_page_up(ptr), last = gr_range_end(range) - search->bytes;
        struct fit fit = {
                .range = range, .opened = SIZE_MAX, .usable = range->block.freed_epoch <= search->usable_epoch};

        if (range->block.capacity_bytes < search->bytes) /* a long list is not in order throughout */
                return false;
        if (page != ptr && page <= last && range->segment->pages && !range->segment->small)
                weigh_place(search, page, &fit);
        if (fit.opened > search->least)
                weigh_place(search, ptr, &fit);
        if (fit.opened > search->least)
                weigh_place(search, last, &fit);
        if (fit.opened < SIZE_MAX && (!search->best.range || is_better(&fit, &search->best)))
                search->best = fit;
        return search->best.range && search->best.opened <= search->least && search->best.usable;
}

GR_HOT_CODE struct gr_range *gr_fit_find(const struct gr_free_lists *lists, size_t bytes, uint64_t last_epoch,
                                         uint64_t most_bytes, uint64_t *ret_at)
{
        struct gr_range *range = gr_range_best(lists, bytes, last_epoch, most_bytes);
        size_t pages = bytes >> GR_PAGE_SHIFT;
        struct search search = {.bytes = bytes, .least = pages > 0 ? pages - 1 : 0}; /* its end pages may be shared */

        if (range) {
                search.usable_epoch = gr_fence_usable_epoch(range->block.context->fence);
                search.stay_small = gr_extents_stay_small(range->block.context->device, 0);
        }
        for (unsigned looked_at = 0; range && looked_at < FIT_LOOK && !weigh_range(&search, range); looked_at++) {
                do
                        range = gr_range_next(lists, range);
                while (range && !gr_range_may_serve(range, last_epoch, most_bytes));
        }
        *ret_at = search.best.at;
        return search.best.range;
}
