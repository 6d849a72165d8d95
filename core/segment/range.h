/*
 * Ranges of the pool kind `split`: the pieces that a segment is cut into, in order of address, and the lists of those
 * that are free. Inside of split.c and expandable.c. The split's lock is held for everything here.
 */
#ifndef GR_RANGE_H
#define GR_RANGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cache/ledger.h"

struct gr_free_lists;
struct gr_page;
struct gr_split;

enum gr_range_state {
        GR_RANGE_USED,    /* a block in the ledger; also one that lies in a fastbin (fastbin.h) */
        GR_RANGE_WAITING, /* in the queue */
        GR_RANGE_FREE,    /* in a list by size */
        GR_RANGE_FREED,   /* in the list that gr_range_free_all goes through */
        GR_RANGE_STUCK,   /* freed, never to be reused */
        GR_RANGE_HOLE,    /* addresses without memory, whole pages, in the list of holes */
        GR_RANGE_STALE,   /* its memory was remapped elsewhere, but work may still use it here; in a list */
        GR_RANGE_BUSY,    /* a thread maps or returns its memory; no other thread may change it */
};

/* Guarded by the split's lock, except for the block's fields that the ledger guards. */
struct gr_range {
        struct gr_block block; /* first, so that one can be had from the other; prev and next are the queue's, the
                                  holes' or those of the free ranges of its size */
        struct gr_segment *segment;
        struct gr_range *before, *after; /* neighbours in the segment, by address */
        enum gr_range_state state;
};

struct gr_segment {
        uint64_t ptr;
        size_t bytes;
        struct gr_range *first;
        size_t used_count, used_bytes;
        struct gr_page *pages;    /* a heap of mapped memory (expandable.h); NULL: one allocation of the driver */
        struct gr_range **begins; /* of a heap: for each page the first range that begins in it, or NULL */
        struct gr_block *holes;   /* of a heap */
        struct gr_range *end;     /* of a heap: the hole at its end; NULL: there is none */
        bool small;
        bool stuck; /* has ranges that must not be reused: goes back as a whole with its last used range */
};

static inline struct gr_range *gr_range_of(struct gr_block *block)
{
        return (struct gr_range *)block;
}

static inline uint64_t gr_range_end(const struct gr_range *range)
{
        return range->block.ptr + range->block.capacity_bytes;
}

/* The range of the segment that ptr lies in. */
struct gr_range *gr_range_at(const struct gr_segment *segment, uint64_t ptr);

/*
 * The free ranges from those of about bytes on, the smallest first: of sizes within a sixteenth in no strict order.
 * None may enter or leave in between. NULL: no more.
 */
struct gr_range *gr_range_first(const struct gr_free_lists *lists, size_t bytes);
struct gr_range *gr_range_next(const struct gr_free_lists *lists, const struct gr_range *range);

/*
 * The first of them of at least bytes that was freed by the end of last_epoch, in a heap or a segment of at most
 * most_bytes; NULL.
 */
struct gr_range *gr_range_best(const struct gr_free_lists *lists, size_t bytes, uint64_t last_epoch,
                               uint64_t most_bytes);

/*
 * Of the smallest free ranges of at least bytes the one, and the place *ret_at in it, where a block opens the fewest
 * pages that are wholly free: those can be moved or given back, the rest of others cannot. In a heap for large blocks
 * one that opens a page begins with it where that takes no more of them, so that it shares fewer with others. Of equals
 * one that needs no barrier. Of those that gr_range_best would look at; NULL.
 */
struct gr_range *gr_range_fit(const struct gr_free_lists *lists, size_t bytes, uint64_t last_epoch, uint64_t most_bytes,
                              uint64_t *ret_at);

/* The same in less time, whatever pages it opens: the smallest, or one up to twice as large that needs no barrier. */
struct gr_range *gr_range_soon(const struct gr_free_lists *lists, size_t bytes, uint64_t last_epoch,
                               uint64_t most_bytes);

/* A range in state FREE enters its list as it is, or leaves it. */
void gr_range_enter(struct gr_split *split, struct gr_range *range);
void gr_range_leave(struct gr_split *split, struct gr_range *range);

/* The range, in no list, becomes free, one with its free neighbours: with the latest epoch of them. */
void gr_range_free(struct gr_split *split, struct gr_range *range);

/* The same for all of a list (utlist's DL), each in state FREED: what becomes one enters its list by size once. */
void gr_range_free_all(struct gr_split *split, struct gr_block *freed);

/*
 * Cuts range, which is in no list, after bytes. Returns the rest, of the same state and in none either; NULL:
 * out of memory, nothing changed.
 */
struct gr_range *gr_range_cut(struct gr_range *range, size_t bytes);

/* [at, at + bytes) of a range in state FREE as a BUSY one; what is left of it stays free. NULL: out of memory, and all
 * of it is free. */
struct gr_range *gr_range_isolate(struct gr_split *split, struct gr_range *range, uint64_t at, uint64_t bytes);

/* Takes after, the neighbour of range, into it; both are in no list. */
void gr_range_swallow(struct gr_range *range, struct gr_range *after);

/* Frees the structures that were kept for ranges to come. */
void gr_range_forget_kept(struct gr_split *split);

#endif
