/*
 * Fastbins: freed ranges of pool kind `auto` that stay as they are, for the next request of exactly their size, as in
 * quick fit (C. B. Weinstock and W. A. Wulf, 1988). Nothing is merged or cut, and the block stays in the ledger, so
 * that a hit needs no lock but the arena's.
 *
 * Each arena has a set of its own: threads that allocate at the same time do not meet at the split's lock. The pages
 * count as used meanwhile, so a set holds little: a share of the peak of live memory (gr_arena_fastbins_have_room). When
 * it is full, or a request fits nowhere else, all of its ranges are merged (coalesced) at once. All functions here are
 * called with the lock of the arena held.
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

#define GR_FASTBIN_LISTS_LOG2 6
#define GR_FASTBIN_LOOK       8 /* most blocks of other sizes that a search skips */

/* The list keeps both ends, so that a block which enters touches no other block than the last. */
struct gr_fastbin_list {
        struct gr_block *first, *last; /* the oldest; by next and prev, NULL at the ends */
};

/* Zero bytes are empty lists. */
struct gr_fastbins {
        struct gr_cached cached; /* bytes of all of them; on the device's account */
        uint64_t count;          /* of all blocks */
        uint64_t hits, frees;    /* blocks that the fast path handed out, and took back */
        struct gr_fastbin_list lists[1u << GR_FASTBIN_LISTS_LOG2]; /* by a hash of the size */
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

/* Appends a CACHED block to its list, and adds its bytes to `cached`. */
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

/* Takes block out of its list, and its bytes off `cached`. */
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
