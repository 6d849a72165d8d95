#include "segment/range.h"

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <utlist.h>

#include "base/arith.h"
#include "base/attributes.h"
#include "base/lock.h"
#include "base/size_class.h"
#include "cache/block.h"
#include "context/context.h"
#include "fence/fence.h"
#include "segment/segments_state.h"

#define UNIT_LOG2  9   /* of GR_SEGMENTS_UNIT_BYTES */
#define ORDER_LOOK 16  /* most ranges of a free list that are passed to insert one in order */
#define CLASS_LOOK 32  /* most too small ranges that a search passes before it tries the next list */
#define KEPT_MOST  256 /* structures kept for new ranges */

_Static_assert(sizeof(struct gr_range) <= GR_BLOCK_ROOM, "a range is freed as a block");
_Static_assert(GR_SEGMENTS_UNIT_BYTES == (size_t)1 << UNIT_LOG2, "ranges are multiples of it");

static size_t page_of(const struct gr_segment *segment, uint64_t ptr)
{
        return (ptr - segment->ptr) >> GR_PAGE_SHIFT;
}

struct gr_range *gr_range_at(const struct gr_segment *segment, uint64_t ptr)
{
        struct gr_range *range = segment->first;

        gr_assert_range_locked(segment->first);
        assert(ptr - segment->ptr < segment->bytes);
        if (segment->begins) {
                size_t page = page_of(segment, ptr);

                while (!segment->begins[page] || segment->begins[page]->block.ptr > ptr)
                        page--; /* the first range begins with the first page */
                range = segment->begins[page];
        }
        while (ptr >= gr_range_end(range))
                range = range->after;
        return range;
}

/* Sixteen classes per doubling. All ranges of the next one are larger than bytes. */
static unsigned free_class(size_t bytes)
{
        unsigned log2 = 63u - (unsigned)__builtin_clzll(bytes), class;

        assert(bytes >= GR_SEGMENTS_UNIT_BYTES);
        class = (log2 - UNIT_LOG2) * 16 + (unsigned)((bytes >> (log2 - 4)) & 15);
        assert(class < GR_FREE_CLASSES);
        return class;
}

static bool comes_before(const struct gr_block *a, const struct gr_block *b)
{
        return a->capacity_bytes != b->capacity_bytes ? a->capacity_bytes < b->capacity_bytes : a->ptr < b->ptr;
}

static void lists_insert(struct gr_free_lists *lists, struct gr_range *range)
{
        unsigned class = free_class(range->block.capacity_bytes), looked_at = 0;
        struct gr_block *block = &range->block, *after = lists->blocks[class];

        while (after && looked_at++ < ORDER_LOOK && comes_before(after, block))
                after = after->next;
        if (after)
                DL_PREPEND_ELEM(lists->blocks[class], after, block);
        else
                DL_APPEND(lists->blocks[class], block);
        range->free_class = class;
        lists->filled[class / 64] |= UINT64_C(1) << class % 64;
}

static void lists_remove(struct gr_free_lists *lists, struct gr_range *range)
{
        unsigned class = range->free_class;
        struct gr_block *block = &range->block;

        assert(class == free_class(block->capacity_bytes));  /* its size has not changed since it entered */
        assert(lists->filled[class / 64] >> class % 64 & 1); /* nor its segment */
        DL_DELETE(lists->blocks[class], block);
        if (!lists->blocks[class])
                lists->filled[class / 64] &= ~(UINT64_C(1) << class % 64);
}

/* The first range of this class and those above. */
static __attribute__((noinline)) struct gr_range *first_from(const struct gr_free_lists *lists, unsigned class)
{
        unsigned word = class / 64;
        uint64_t filled;

        gr_lock_rank_assert_held(GR_RANK_SEGMENTS);
        if (class == GR_FREE_CLASSES)
                return NULL;
        filled = lists->filled[word] & UINT64_MAX << class % 64;
        while (!filled) {
                if (++word == GR_FREE_CLASSES / 64)
                        return NULL;
                filled = lists->filled[word];
        }
        return gr_range_of(lists->blocks[word * 64 + (unsigned)__builtin_ctzll(filled)]);
}

struct gr_range *gr_range_first(const struct gr_free_lists *lists, size_t bytes)
{
        return first_from(lists, free_class(bytes));
}

struct gr_range *gr_range_next(const struct gr_free_lists *lists, const struct gr_range *range)
{
        gr_assert_range_locked(range);
        if (range->block.next)
                return gr_range_of(range->block.next);
        return first_from(lists, range->free_class + 1);
}

static bool is_usable(const struct gr_range *range, size_t bytes, uint64_t last_epoch, uint64_t most_bytes)
{
        return range->block.capacity_bytes >= bytes && gr_range_may_serve(range, last_epoch, most_bytes);
}

GR_HOT_CODE struct gr_range *gr_range_best(const struct gr_free_lists *lists, size_t bytes, uint64_t last_epoch,
                                           uint64_t most_bytes)
{
        struct gr_range *range = gr_range_first(lists, bytes);

        for (unsigned looked_at = 0; range && !is_usable(range, bytes, last_epoch, most_bytes);)
                range = ++looked_at == CLASS_LOOK ? first_from(lists, free_class(bytes) + 1)
                                                  : gr_range_next(lists, range);
        return range;
}

static struct gr_free_lists *lists_of(struct gr_segments *segments, const struct gr_range *range)
{
        const struct gr_segment *segment = range->segment;

        if (!segment->small && !segment->pages && range->block.capacity_bytes == segment->bytes)
                return &segments->free[GR_FREE_WHOLE];
        return &segments->free[segment->graph ? gr_expandable_graph_kind(segment->small)
                                              : gr_expandable_kind(segment->small)];
}

GR_HOT_CODE void gr_range_enter(struct gr_segments *segments, struct gr_range *range)
{
        gr_assert_locked(&segments->lock);
        gr_range_become(range, GR_RANGE_FREE);
        assert((range->block.ptr | range->block.capacity_bytes) % GR_SEGMENTS_UNIT_BYTES == 0);
        assert(!range->after || gr_range_end(range) == range->after->block.ptr);
        assert(range->before ? gr_range_end(range->before) == range->block.ptr : range->segment->first == range);
        lists_insert(lists_of(segments, range), range);
        segments->free_count++;
        segments->changes++;
}

GR_HOT_CODE void gr_range_leave(struct gr_segments *segments, struct gr_range *range)
{
        gr_assert_locked(&segments->lock);
        assert(range->state == GR_RANGE_FREE && segments->free_count > 0);
        lists_remove(lists_of(segments, range), range);
        segments->free_count--;
        segments->changes++;
}

/* A zeroed structure for a range, a kept one or a new one; NULL: out of memory. */
static struct gr_range *structure_take(struct gr_segments *segments)
{
        struct gr_range *range = segments->kept;

        if (!range)
                return gr_block_new();
        assert(segments->kept_count > 0);
        segments->kept = range->after;
        segments->kept_count--;
        return memset(range, 0, sizeof(*range));
}

static void structure_give(struct gr_segments *segments, struct gr_range *range)
{
        if (segments->kept_count >= KEPT_MOST) {
                gr_block_delete(range);
                return;
        }
        range->after = segments->kept;
        segments->kept = range;
        segments->kept_count++;
}

void gr_range_forget_kept(struct gr_segments *segments)
{
        struct gr_range *range;

        while ((range = segments->kept)) {
                segments->kept = range->after;
                gr_block_delete(range);
        }
        segments->kept_count = 0;
}

GR_HOT_CODE void gr_range_swallow(struct gr_range *range, struct gr_range *after)
{
        gr_assert_range_locked(range);
        assert(range->after == after && after->before == range && gr_range_end(range) == after->block.ptr);
        assert(range->segment == after->segment);
        if (after->segment->begins) {
                size_t page = page_of(after->segment, after->block.ptr);
                struct gr_range *next = after->after;

                if (after->segment->begins[page] == after)
                        after->segment->begins[page] =
                                next && page_of(after->segment, next->block.ptr) == page ? next : NULL;
        }
        range->block.capacity_bytes += after->block.capacity_bytes;
        if (after->block.freed_epoch > range->block.freed_epoch)
                range->block.freed_epoch = after->block.freed_epoch;
        range->after = after->after;
        if (range->after)
                range->after->before = range;
        structure_give(range->block.context->segments, after);
}

/* Takes this adjacent range out of its list if one that becomes free is merged with it. False: it is not. */
static inline bool leave_to_merge(struct gr_segments *segments, struct gr_range *adjacent, struct gr_block **freed)
{
        if (!adjacent)
                return false;
        if (adjacent->state == GR_RANGE_FREE)
                gr_range_leave(segments, adjacent);
        else if (adjacent->state == GR_RANGE_MERGING)
                DL_DELETE(*freed, &adjacent->block);
        else
                return false;
        return true;
}

/* Frees range and merges it with adjacent ones; freed: the list of other ranges that are becoming free. */
static void free_among(struct gr_segments *segments, struct gr_range *range, struct gr_block **freed)
{
        while (leave_to_merge(segments, range->after, freed))
                gr_range_swallow(range, range->after);
        while (leave_to_merge(segments, range->before, freed)) {
                range = range->before;
                gr_range_swallow(range, range->after);
        }
        gr_range_enter(segments, range);
}

GR_HOT_CODE void gr_range_free(struct gr_segments *segments, struct gr_range *range)
{
        free_among(segments, range, &(struct gr_block *){NULL});
}

GR_HOT_CODE void gr_range_free_all(struct gr_segments *segments, struct gr_block *freed)
{
        struct gr_block *block;

        gr_assert_locked(&segments->lock);
        while ((block = freed)) {
                DL_DELETE(freed, block);
                assert(gr_range_of(block)->state == GR_RANGE_MERGING);
                free_among(segments, gr_range_of(block), &freed);
        }
}

GR_HOT_CODE struct gr_range *gr_range_cut(struct gr_range *range, size_t bytes)
{
        struct gr_range *rest;

        assert(bytes > 0 && bytes < range->block.capacity_bytes && bytes % GR_SEGMENTS_UNIT_BYTES == 0);
        gr_assert_locked(&range->block.context->segments->lock);
        rest = structure_take(range->block.context->segments);
        if (!rest)
                return NULL;
        rest->block.ptr = range->block.ptr + bytes;
        rest->block.capacity_bytes = range->block.capacity_bytes - bytes;
        rest->block.freed_epoch = range->block.freed_epoch;
        rest->block.context = range->block.context;
        atomic_init(&rest->block.flags, GR_BLOCK_RANGE);
        rest->segment = range->segment;
        rest->state = range->state;
        rest->before = range;
        rest->after = range->after;
        if (rest->after)
                rest->after->before = rest;
        range->after = rest;
        range->block.capacity_bytes = bytes;
        if (rest->segment->begins) {
                struct gr_range **begins = &rest->segment->begins[page_of(rest->segment, rest->block.ptr)];

                if (!*begins || (*begins)->block.ptr > rest->block.ptr)
                        *begins = rest;
        }
        return rest;
}

struct gr_range *gr_range_isolate(struct gr_segments *segments, struct gr_range *range, uint64_t at, uint64_t bytes)
{
        struct gr_range *rest;

        assert(bytes > 0 && at >= range->block.ptr && at + bytes <= gr_range_end(range));
        gr_range_leave(segments, range);
        if (at > range->block.ptr) {
                rest = gr_range_cut(range, at - range->block.ptr);
                gr_range_enter(segments, range);
                if (!rest)
                        return NULL;
                range = rest;
        }
        if (gr_range_end(range) > at + bytes) {
                rest = gr_range_cut(range, bytes);
                if (!rest) {
                        gr_range_free(segments, range);
                        return NULL;
                }
                gr_range_enter(segments, rest);
        }
        gr_range_become(range, GR_RANGE_BUSY);
        return range;
}
