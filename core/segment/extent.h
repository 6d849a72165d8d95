/*
 * The pages of expandable segments and the memory behind them: what is mapped where, in extents, and how much of it is
 * used. For the files of core/segment only. The segments' lock is held unless a comment says otherwise.
 */
#ifndef GR_EXTENT_H
#define GR_EXTENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/size_class.h"
#include "segment/range.h"

struct gr_context;
struct gr_core;
struct gr_device;

/* One page of the segment's addresses. The first page of an extent also describes the extent. */
struct gr_page {
        uint64_t handle;      /* constant while mapped */
        uint64_t freed_epoch; /* the latest epoch in which a range of the extent was freed */
        size_t used_bytes;
        uint32_t pages; /* in the first page of an extent: how many it has; else 0 */
        uint32_t back;  /* how many pages before this one the extent begins */
        /* In the first page of the addresses that an extent was moved from: how many still map its memory; else 0. */
        uint32_t stale;
        bool stuck; /* it has stuck ranges, so it goes back when its last used range is freed and it is idle */
};

static inline uint64_t gr_page_down(uint64_t ptr)
{
        return ptr & ~(uint64_t)(GR_PAGE_BYTES - 1);
}

static inline uint64_t gr_page_up(uint64_t ptr)
{
        return gr_page_down(ptr + GR_PAGE_BYTES - 1);
}

static inline struct gr_page *gr_page_at(const struct gr_segment *segment, uint64_t ptr)
{
        return &segment->pages[(ptr - segment->ptr) >> GR_PAGE_SHIFT];
}

static inline bool gr_page_is_mapped(const struct gr_page *page)
{
        return page->pages > 0 || page->back > 0;
}

static inline struct gr_page *gr_extent_at(const struct gr_segment *segment, uint64_t ptr)
{
        struct gr_page *page = gr_page_at(segment, ptr);

        return page - page->back;
}

static inline uint64_t gr_extent_ptr(const struct gr_segment *segment, const struct gr_page *extent)
{
        return segment->ptr + ((uint64_t)(extent - segment->pages) << GR_PAGE_SHIFT);
}

static inline uint64_t gr_extent_bytes(const struct gr_page *extent)
{
        return (uint64_t)extent->pages << GR_PAGE_SHIFT;
}

/* The cached part of an extent that cannot go back, as the rest is used. */
static inline uint64_t gr_extent_stranded(const struct gr_page *extent)
{
        return extent->used_bytes > 0 ? gr_extent_bytes(extent) - extent->used_bytes : 0;
}

/*
 * Whether extents are to be small once more_bytes more are reserved: then that is more than an eighth of the device or
 * the limit, and fragmentation could make a large request fail (expandable.h). Takes no lock.
 */
bool gr_extents_stay_small(struct gr_device *device, uint64_t more_bytes);

/* A range of an expandable segment becomes used (+1), or is freed (-1; its freed_epoch is set). */
void gr_extent_use(struct gr_context *context, struct gr_range *range, int sign);

/*
 * Notes that work of the epoch or earlier ones may use the extents of a range. From then on they are not fresh
 * (gr_expandable_unmap_fresh).
 */
void gr_extent_note(const struct gr_range *range, uint64_t epoch);

/* For mem_unmap: only the addresses are unmapped, the memory stays. */
#define GR_NO_HANDLE 0

/*
 * Called before and after the driver maps fresh pages. reserve charges them; -EDQUOT: nothing was charged, and no
 * commit follows. commit takes the driver's result rc for all of these pages or a part, and ptr if rc is 0. Pages
 * that are mapped then count as cached, so that those which no request needs are never in the peak of live memory; else
 * their charge is cancelled. No lock held.
 */
int gr_extent_reserve(struct gr_context *context, uint64_t bytes, uint64_t *ret_reserved_bytes);
void gr_extent_commit(struct gr_context *context, uint64_t ptr, uint64_t bytes, uint64_t reserved_bytes, int rc);

/*
 * Maps new memory at [ptr, ptr + bytes), whole pages of a busy range of the caller, for which as much is reserved; it
 * is charged and counts as cached. On failure, -ENOMEM or the driver's error, the reservation is cancelled, and nothing
 * else has happened. Calls the driver; no lock held.
 */
int gr_extent_map(struct gr_context *context, struct gr_segment *segment, uint64_t ptr, uint64_t bytes);

/* Returns the caller's extent to the driver. False: it refused. The caller corrects the accounts. No lock held. */
bool gr_extent_unmap(struct gr_core *core, void *handle, struct gr_segment *segment, struct gr_page *extent);

/* A range without memory enters the list of its segment's holes, or leaves it. */
void gr_extent_hole_enter(struct gr_range *range);
void gr_extent_hole_leave(struct gr_range *hole);

/* Makes a freed range STUCK, as it must not be reused. Its freed_epoch is set, and it stays counted as used. */
void gr_extent_stick(struct gr_range *range);

/*
 * Cuts a busy range into holes, where nothing is mapped, and ranges in the state `rest` (FREE or STUCK), where memory
 * is. Without host memory for the pieces the remainder is LOST.
 */
void gr_extent_settle(struct gr_segments *segments, struct gr_range *range, enum gr_range_state rest);

#endif
