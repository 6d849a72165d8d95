/*
 * Fastbins: freed ranges of pool kind `auto` that stay as they are, for the next request of exactly their size, as in
 * quick fit (C. B. Weinstock and W. A. Wulf, 1988). Nothing is merged or cut, and the block stays in the ledger, so
 * that a hit needs no lock but the arena's.
 *
 * Each arena has a set of its own: threads that allocate at the same time do not meet at the segments' lock. The pages
 * count as used meanwhile, so a set holds few ranges above 1 MiB (gr_arena_fastbins_have_room). When it is full half of
 * these are merged (coalesced) at once, and all ranges when a request fits nowhere else. All functions here are called
 * with the lock of the arena held, unless a comment says otherwise. No other file uses the fields.
 */
#ifndef GR_FASTBIN_H
#define GR_FASTBIN_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account/budget.h"
#include "base/address_table.h"
#include "base/lock.h"
#include "base/size_class.h"
#include "cache/block.h"

#define GR_FASTBIN_LISTS_LOG2 8
#define GR_FASTBIN_LISTS      (1u << GR_FASTBIN_LISTS_LOG2)
#define GR_FASTBIN_LOOK       8 /* most blocks of other sizes that a search skips */

/* The list keeps both ends, so that a block which enters touches no other block than the last. */
struct gr_fastbin_list {
        struct gr_block *first, *last; /* the oldest and the newest; linked by next and prev, NULL at the ends */
};

/* Zero bytes are empty lists. */
struct gr_fastbins {
        struct gr_cached cached;                        /* bytes of all of them; on the device's account */
        _Atomic uint64_t large_bytes;                   /* of those above 1 MiB; written with the arena's lock held */
        uint64_t count;                                 /* of all blocks */
        uint64_t hits, frees;                           /* blocks that the fast path handed out, and took back */
        struct gr_fastbin_list lists[GR_FASTBIN_LISTS]; /* by a hash of the size; the second half: above 1 MiB */
        uint64_t filled[GR_FASTBIN_LISTS / 64];         /* a bit for each list, set if it is not empty */
        unsigned next; /* the list of the second half that gr_fastbins_evict looks at first */
};

/* Makes the empty set a keeper of the device: its bytes count as cached. Lock not held. */
static inline void gr_fastbins_begin(struct gr_fastbins *fastbins, struct gr_device *device)
{
        gr_budget_keep(device, &fastbins->cached);
}

/* The bytes of all blocks, and of those above 1 MiB. With or without the lock. */
static inline uint64_t gr_fastbins_bytes(const struct gr_fastbins *fastbins)
{
        return atomic_load_explicit(&fastbins->cached.bytes, memory_order_relaxed);
}

static inline uint64_t gr_fastbins_large_bytes(const struct gr_fastbins *fastbins)
{
        return atomic_load_explicit(&fastbins->large_bytes, memory_order_relaxed);
}

/* As gr_budget_grown, after a block has entered. Lock not held. */
static inline bool gr_fastbins_have_grown(struct gr_fastbins *fastbins, struct gr_device *device)
{
        return gr_budget_grown(device, &fastbins->cached);
}

/*
 * Whether a block of so many bytes may be there. Without the lock, so that a large request, for which there is seldom
 * one, need not take it.
 */
static inline bool gr_fastbins_may_have(const struct gr_fastbins *fastbins, size_t bytes)
{
        return gr_is_small(bytes) || gr_fastbins_large_bytes(fastbins) >= bytes;
}

/* Adds the requests served, the blocks taken back, and the blocks there now. */
static inline void gr_fastbins_count(const struct gr_fastbins *fastbins, uint64_t *hits, uint64_t *frees,
                                     uint64_t *blocks)
{
        gr_lock_rank_assert_held(GR_RANK_ARENA);
        *hits += fastbins->hits;
        *frees += fastbins->frees;
        *blocks += fastbins->count;
}

/* The index of the list for blocks of so many bytes. */
static inline unsigned gr_fastbin_index(size_t bytes)
{
        return (gr_is_small(bytes) ? 0 : GR_FASTBIN_LISTS / 2) +
               (unsigned)(gr_address_hash(bytes) >> (64 - GR_FASTBIN_LISTS_LOG2 + 1));
}

/*
 * The oldest block of so many bytes; NULL: none among the first GR_FASTBIN_LOOK. This and the next two are part of a
 * hit.
 */
static inline struct gr_block *gr_fastbin_find(struct gr_fastbins *fastbins, size_t bytes)
{
        struct gr_block *block = fastbins->lists[gr_fastbin_index(bytes)].first;

        gr_lock_rank_assert_held(GR_RANK_ARENA);
        for (unsigned passed = 0; block && __builtin_expect(block->capacity_bytes != bytes, 0); block = block->next)
                if (++passed == GR_FASTBIN_LOOK)
                        return NULL;
        return block;
}

/* Adds a block to the bytes of large ones, or takes it off. */
static inline void gr_fastbin_count_large(struct gr_fastbins *fastbins, const struct gr_block *block, int sign)
{
        uint64_t bytes = atomic_load_explicit(&fastbins->large_bytes, memory_order_relaxed);

        if (gr_is_small(block->capacity_bytes))
                return;
        assert(sign > 0 || bytes >= block->capacity_bytes);
        bytes = sign > 0 ? bytes + block->capacity_bytes : bytes - block->capacity_bytes;
        atomic_store_explicit(&fastbins->large_bytes, bytes, memory_order_relaxed);
}

/* Appends a CACHED block to its list, and adds its bytes to `cached`. */
static inline void gr_fastbin_enter(struct gr_fastbins *fastbins, struct gr_block *block)
{
        unsigned index = gr_fastbin_index(block->capacity_bytes);
        struct gr_fastbin_list *list = &fastbins->lists[index];

        gr_lock_rank_assert_held(GR_RANK_ARENA);
        assert(block->flags & GR_BLOCK_RANGE);
        assert(!gr_block_is_live(block)); /* CACHED, or GONE by now */
        block->prev = list->last;
        block->next = NULL;
        *(list->last ? &list->last->next : &list->first) = block;
        list->last = block;
        fastbins->filled[index / 64] |= UINT64_C(1) << index % 64;
        fastbins->count++;
        gr_fastbin_count_large(fastbins, block, 1);
        gr_cached_add(&fastbins->cached, (int64_t)block->capacity_bytes);
}

/* As gr_fastbin_enter, on the fast path of a free, which this counts. */
static inline void gr_fastbin_take_back(struct gr_fastbins *fastbins, struct gr_block *block)
{
        gr_fastbin_enter(fastbins, block);
        fastbins->frees++;
}

/* Takes block out of its list for a request, which this counts, and its bytes off `cached`. */
static inline void gr_fastbin_leave(struct gr_fastbins *fastbins, struct gr_block *block)
{
        unsigned index = gr_fastbin_index(block->capacity_bytes);
        struct gr_fastbin_list *list = &fastbins->lists[index];

        gr_lock_rank_assert_held(GR_RANK_ARENA);
        assert(fastbins->count > 0 && (block->prev || list->first == block) && (block->next || list->last == block));
        *(block->prev ? &block->prev->next : &list->first) = block->next;
        *(block->next ? &block->next->prev : &list->last) = block->prev;
        if (!list->first)
                fastbins->filled[index / 64] &= ~(UINT64_C(1) << index % 64);
        fastbins->count--;
        gr_fastbin_count_large(fastbins, block, -1);
        gr_cached_add(&fastbins->cached, -(int64_t)block->capacity_bytes);
        fastbins->hits++;
}

/*
 * Takes all blocks out, in a list by next; gr_fastbins_evict those above 1 MiB, from one list after the other its
 * oldest, until at most keep_bytes of them are left. They stay cached, on the device's own account.
 */
struct gr_block *gr_fastbins_empty(struct gr_fastbins *fastbins, struct gr_device *device);
struct gr_block *gr_fastbins_evict(struct gr_fastbins *fastbins, struct gr_device *device, uint64_t keep_bytes);

#endif
