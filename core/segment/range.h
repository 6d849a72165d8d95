/*
 * Ranges: the pieces that a segment is cut into, in order of address, and their free lists. segments_serve.h has a
 * picture. For the files of core/segment only. The segments' lock is held for everything here.
 */
#ifndef GR_RANGE_H
#define GR_RANGE_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/lock.h"
#include "cache/block.h"
#include "context/context.h"
#include "segment/segments_state.h"

struct gr_page;

enum gr_range_state {
        GR_RANGE_USED,    /* a block in the ledger; also one that lies in a fastbin (fastbin.h) */
        GR_RANGE_WAITING, /* in the queue */
        GR_RANGE_FREE,    /* in a free list */
        GR_RANGE_MERGING, /* in the list that gr_range_free_all goes through */
        GR_RANGE_STUCK,   /* freed, never to be reused */
        GR_RANGE_HOLE,    /* addresses without memory, whole pages, in the list of holes */
        GR_RANGE_STALE,   /* its memory was remapped elsewhere, but work may still use it here; in a list */
        GR_RANGE_LOST, /* the driver did not unmap it, or host memory for a structure was missing: never used again */
        GR_RANGE_BUSY, /* a thread maps or returns its memory; no other thread may change it */
};

/* Guarded by the segments' lock, except for the block's fields that the ledger guards. */
struct gr_range {
        /*
         * The first field, so that a pointer to it is one to the range. prev and next link the queue, the holes, or the
         * free ranges of about its size.
         */
        struct gr_block block;
        struct gr_segment *segment;
        struct gr_range *before, *after; /* the adjacent ranges of the segment, by address */
        enum gr_range_state state;
        unsigned free_class; /* of a FREE range: its free list; range.c */
};

struct gr_segment {
        uint64_t ptr;
        size_t bytes;
        struct gr_range *first;
        size_t used_count, used_bytes; /* of a segment that is not expandable; in others the extents count */
        struct gr_page *pages; /* of an expandable segment (expandable.h); NULL: this is one allocation of the driver */
        /* The next four are of expandable segments only. */
        struct gr_range **begins; /* for each page the first range that begins in it, or NULL */
        struct gr_block *holes;
        struct gr_range *end; /* the hole at its end, or NULL */
        _Atomic uint64_t mapped_bytes;
        bool small;     /* for requests up to 1 MiB */
        bool graph;     /* for graphs; constant (graph_segments.h) */
        bool in_graphs; /* graphs use it now: all of it counts as used, and nothing goes back or is unmapped */
        bool stuck;     /* it has stuck ranges: goes back as a whole when its last used range is freed */
};

static inline struct gr_range *gr_range_of(struct gr_block *block)
{
        return (struct gr_range *)block;
}

/* For functions that are called with the lock of the range's segments held; nothing in release builds. */
static inline void gr_assert_range_locked(const struct gr_range *range)
{
        gr_assert_locked(&range->block.context->segments->lock);
}

/* Whether a range may go from one state to the other. A new range is USED; a FREE one leaves its free list first. */
static inline bool gr_range_may_become(enum gr_range_state from, enum gr_range_state to)
{
#define GR_FROM(state) (1u << GR_RANGE_##state)
        static const unsigned may_be_from[] = {
                [GR_RANGE_USED] = GR_FROM(USED) | GR_FROM(FREE) | GR_FROM(BUSY),
                [GR_RANGE_WAITING] = GR_FROM(USED),
                [GR_RANGE_FREE] = GR_FROM(USED) | GR_FROM(WAITING) | GR_FROM(FREE) | GR_FROM(MERGING) | GR_FROM(BUSY),
                [GR_RANGE_MERGING] = GR_FROM(USED),
                [GR_RANGE_STUCK] = GR_FROM(USED) | GR_FROM(BUSY),
                [GR_RANGE_HOLE] = GR_FROM(USED) | GR_FROM(HOLE) | GR_FROM(BUSY),
                [GR_RANGE_STALE] = GR_FROM(BUSY),
                [GR_RANGE_LOST] = GR_FROM(BUSY),
                [GR_RANGE_BUSY] = GR_FROM(USED) | GR_FROM(FREE) | GR_FROM(STUCK) | GR_FROM(HOLE) | GR_FROM(STALE),
        };
#undef GR_FROM

        return may_be_from[to] >> from & 1;
}

/* Changes the state of range; asserts that gr_range_may_become allows that. */
static inline void gr_range_become(struct gr_range *range, enum gr_range_state state)
{
        assert(gr_range_may_become(range->state, state));
        range->state = state;
}

_Static_assert(offsetof(struct gr_range, block) == 0, "gr_range_of casts");

static inline uint64_t gr_range_end(const struct gr_range *range)
{
        return range->block.ptr + range->block.capacity_bytes;
}

/* The range of the segment that ptr lies in. */
struct gr_range *gr_range_at(const struct gr_segment *segment, uint64_t ptr);

/*
 * Goes through the free ranges of about bytes and more, the smallest first; sizes within a sixteenth are in no strict
 * order. No range may enter or leave meanwhile. NULL: no more.
 */
struct gr_range *gr_range_first(const struct gr_free_lists *lists, size_t bytes);
struct gr_range *gr_range_next(const struct gr_free_lists *lists, const struct gr_range *range);

/* Whether range was freed by the end of last_epoch, and lies in an expandable segment or one of at most most_bytes. */
static inline bool gr_range_may_serve(const struct gr_range *range, uint64_t last_epoch, uint64_t most_bytes)
{
        return range->block.freed_epoch <= last_epoch && (range->segment->pages || range->segment->bytes <= most_bytes);
}

/* The first range, in the order of gr_range_next, of at least bytes that may serve (gr_range_may_serve); NULL: none. */
struct gr_range *gr_range_best(const struct gr_free_lists *lists, size_t bytes, uint64_t last_epoch,
                               uint64_t most_bytes);

/* Puts a range in state FREE into its free list without merging it, or takes it out. */
void gr_range_enter(struct gr_segments *segments, struct gr_range *range);
void gr_range_leave(struct gr_segments *segments, struct gr_range *range);

/* Frees a range that is in no list: it is merged with adjacent free ranges, and gets the latest epoch of all. */
void gr_range_free(struct gr_segments *segments, struct gr_range *range);

/* As gr_range_free, for a list (utlist's DL) of ranges in state MERGING; what merges enters its free list only once. */
void gr_range_free_all(struct gr_segments *segments, struct gr_block *freed);

/*
 * Cuts range after bytes; it is in no list. Returns the rest, in the same state and in no list either; NULL: out of
 * memory, nothing changed.
 */
struct gr_range *gr_range_cut(struct gr_range *range, size_t bytes);

/*
 * Makes [at, at + bytes) of a range in state FREE a BUSY range; the rest stays free. NULL: out of memory, and all of it
 * is free.
 */
struct gr_range *gr_range_isolate(struct gr_segments *segments, struct gr_range *range, uint64_t at, uint64_t bytes);

/* Merges `after`, the adjacent range behind range, into range; both are in no list. */
void gr_range_swallow(struct gr_range *range, struct gr_range *after);

/*
 * Frees the unused structures in segments->kept, which were there for new ranges. No thread uses the segments any more.
 */
void gr_range_forget_kept(struct gr_segments *segments);

#endif
