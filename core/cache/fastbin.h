/*
 * Fastbins: freed ranges of pool kind `split` that stay as they are, for the next request of exactly their size, as in
 * quick fit (C. B. Weinstock and W. A. Wulf, 1988). Nothing is merged or cut, and the block stays in the ledger; the
 * pages count as used until a request fits nowhere else and the footprint may not grow for it (gr_expandable_may_grow):
 * then all of them are coalesced. A small request takes another usable range before a barrier is laid for a block of
 * its exact size (docs/measurements.md, fastbins).
 *
 * A context has one set of fastbins for all threads, as a block that one thread frees is often needed by another next:
 * PyTorch's forward pass and its backward pass are two threads that take turns. All functions here are called with the
 * lock of the context's first arena held; that arena is the home of the blocks that they hand out.
 */
#ifndef GR_FASTBIN_H
#define GR_FASTBIN_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account/budget.h"
#include "base/lock.h"
#include "base/size_class.h"
#include "cache/ledger.h"

#define GR_FASTBIN_LISTS_LOG2 8
#define GR_FASTBIN_LOOK       8 /* blocks of other sizes that are passed */

/* The list keeps both ends, so that a block which enters touches no other block than the last. */
struct gr_fastbin_list {
        struct gr_block *first, *last; /* the oldest; by next and prev, NULL at the ends */
};

/* Zero bytes are empty lists. */
struct gr_fastbins {
        struct gr_fastbin_list lists[1u << GR_FASTBIN_LISTS_LOG2]; /* by a hash of the size */
        struct gr_cached cached;                                   /* bytes of all of them; on the device's account */
        uint64_t count;                                            /* of all blocks */
        _Atomic bool closed;  /* a range was stuck: from then on ranges are merged as they are freed, and none goes into
                                a fastbin. Written with the split's lock held */
        uint32_t generation;  /* of blocks of split's: the driver has one BUFFER_ID for a segment, this tells them apart
                               */
        uint64_t hits, frees; /* blocks that the fast path handed out, and took back */
};

static inline struct gr_fastbin_list *gr_fastbin_list_of(struct gr_fastbins *fastbins, size_t bytes)
{
        return &fastbins->lists[gr_ledger_mix(bytes) >> (64 - GR_FASTBIN_LISTS_LOG2)];
}

/*
 * The oldest block of so many bytes; NULL: none among the first GR_FASTBIN_LOOK. This and the next two are part of a
 * hit.
 */
static inline struct gr_block *gr_fastbin_find(struct gr_fastbins *fastbins, size_t bytes)
{
        struct gr_block *block = gr_fastbin_list_of(fastbins, bytes)->first;

        for (unsigned passed = 0; block && __builtin_expect(block->capacity_bytes != bytes, 0); block = block->next)
                if (++passed == GR_FASTBIN_LOOK)
                        return NULL;
        return block;
}

static inline void gr_fastbin_enter(struct gr_fastbins *fastbins, struct gr_block *block)
{
        struct gr_fastbin_list *list = gr_fastbin_list_of(fastbins, block->capacity_bytes);

        gr_lock_rank_assert_held(GR_RANK_ARENA);
        assert(block->flags & GR_BLOCK_SPLIT && !gr_is_small(block->capacity_bytes));
        assert(!gr_block_is_live(block)); /* CACHED, or GONE by now */
        block->prev = list->last;
        block->next = NULL;
        *(list->last ? &list->last->next : &list->first) = block;
        list->last = block;
        fastbins->count++;
        gr_cached_add(&fastbins->cached, (int64_t)block->capacity_bytes);
}

static inline void gr_fastbin_leave(struct gr_fastbins *fastbins, struct gr_block *block)
{
        struct gr_fastbin_list *list = gr_fastbin_list_of(fastbins, block->capacity_bytes);

        gr_lock_rank_assert_held(GR_RANK_ARENA);
        assert(fastbins->count > 0 && (block->prev || list->first == block) && (block->next || list->last == block));
        *(block->prev ? &block->prev->next : &list->first) = block->next;
        *(block->next ? &block->next->prev : &list->last) = block->prev;
        fastbins->count--;
        gr_cached_add(&fastbins->cached, -(int64_t)block->capacity_bytes);
}

/* Takes all blocks out, in a list by next. The caller has to take their bytes off `cached`. */
struct gr_block *gr_fastbin_empty(struct gr_fastbins *fastbins);

#endif
