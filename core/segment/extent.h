/*
 * The pages of split's heaps and the memory behind them: what is mapped where, in extents, and how much of it is in
 * use. Inside of expandable.c and split.c. The split's lock is held unless a comment says otherwise.
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

/* One page of the segment's addresses. The first page of an extent also describes the extent. */
struct gr_page {
        uint64_t handle;      /* constant while mapped */
        uint64_t freed_epoch; /* the latest of what was freed in it */
        size_t used_bytes;
        uint32_t pages; /* of the extent; 0: not the first of one */
        uint32_t back;  /* so many pages before this one is the first of its extent */
        uint32_t stale; /* of so many pages from here on the memory has moved, but it is still mapped here, too */
        bool stuck;     /* of the extent: part of it must not be reused, so it goes back with the last that is used */
};

static inline uint64_t gr_page_down(uint64_t ptr)
{
        return ptr & ~(uint64_t)(GR_PAGE_BYTES - 1);
}

static inline uint64_t gr_page_up(uint64_t ptr)
{
        return gr_page_down(ptr + GR_PAGE_BYTES - 1);
}

static inline struct gr_page *gr_page_at(const struct gr_segment *heap, uint64_t ptr)
{
        return &heap->pages[(ptr - heap->ptr) >> GR_PAGE_SHIFT];
}

static inline bool gr_page_is_mapped(const struct gr_page *page)
{
        return page->pages > 0 || page->back > 0;
}

static inline struct gr_page *gr_extent_at(const struct gr_segment *heap, uint64_t ptr)
{
        struct gr_page *page = gr_page_at(heap, ptr);

        return page - page->back;
}

static inline uint64_t gr_extent_ptr(const struct gr_segment *heap, const struct gr_page *extent)
{
        return heap->ptr + ((uint64_t)(extent - heap->pages) << GR_PAGE_SHIFT);
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

/* A range of an expandable segment becomes used (+1), or is freed (-1; its freed_epoch is set). */
void gr_pages_use(struct gr_context *context, struct gr_range *range, int sign);

/* The handle to hand to mem_unmap where only the addresses go. */
#define GR_NO_HANDLE 0

/*
 * Around the driver's call for fresh memory, whole pages: charged, and cached from the start, so that the peak of live
 * memory never sees the part that nobody asked for. -EDQUOT: the hard limit, and no commit follows. rc is what the
 * driver said; ptr counts where it is 0. No lock held.
 */
int gr_pages_reserve(struct gr_context *context, uint64_t bytes, uint64_t *ret_reserved_bytes);
void gr_pages_commit(struct gr_context *context, uint64_t ptr, uint64_t bytes, uint64_t reserved_bytes, int rc);

/*
 * The driver's memory behind [ptr, ptr + bytes), whole pages without any that belong to the caller: charged and counted
 * as cached. -EDQUOT, -ENOMEM, or the driver's error, and nothing has happened. Calls the driver; no lock held.
 */
int gr_extent_map(struct gr_context *context, struct gr_segment *heap, uint64_t ptr, uint64_t bytes);

/* Back to the driver, where it takes it; the extent is the caller's, and so are its accounts. No lock held. */
bool gr_extent_unmap(struct gr_core *core, void *handle, struct gr_segment *heap, struct gr_page *extent);

/* A range without memory enters the list of its segment's holes, or leaves it. */
void gr_hole_enter(struct gr_range *range);
void gr_hole_leave(struct gr_range *hole);

/*
 * A busy range turns into what the pages below it say: holes, and where there is memory FREE or STUCK as rest says.
 * Where memory for the pieces is lacking, the rest of it stays busy: lost, never handed out.
 */
void gr_pages_settle(struct gr_split *split, struct gr_range *range, enum gr_range_state rest);

#endif
