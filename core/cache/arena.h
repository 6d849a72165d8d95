/*
 * An arena: the bins of one shard of a context. A thread looks for blocks in the arena of its own shard first, then in
 * the others. A freed block goes back into the arena that remembers it, whichever thread frees it, else into the arena
 * of the thread that frees it. With pool kind auto an arena also has fastbins (cache/fastbin.h); the blocks in them are
 * ranges, which their segments count as in use.
 *
 * A hit takes one lock, for a free as for an allocation: an arena remembers the blocks that it handed out recently, so
 * that their free needs no look-up in the ledger, and its lock guards all that a hit changes, counters included. The
 * state of a recent block names its home, the arena that remembers it (block.h). Code that takes the block from the
 * program in another way (a free by the driver, the end of a context) first makes that arena forget it.
 *
 *     bins[class]    oldest                  newest
 *                    [e 5] - [e 5] - [e 6] - [e 9]      e: the epoch in which the block was freed
 *                      ^ handed out next       ^ freed last
 *                    usable_epoch 6: three of these are usable, the last one waits for its fence
 *
 *     recent[hash]   the live blocks that this arena handed out, by address; their free finds them here
 *
 *   gr_arena_alloc  bin ------> program, and recent[]
 *   gr_arena_free   recent[] -> bin                      (or fastbin, for a range)
 *   gr_arena_put    ledger ---> bin                      (what is not in recent[])
 */
#ifndef GR_ARENA_H
#define GR_ARENA_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account/budget.h"
#include "base/lock.h"
#include "base/shard.h"
#include "base/size_class.h"
#include "cache/block.h"
#include "cache/fastbin.h"
#include "context/context.h"

#define GR_RECENT_LOG2 10

struct gr_context;
struct gr_core;

/*
 * Freed blocks of one class, oldest first. The arena's lock guards all fields. arena.c writes them, but fences and
 * cooldown are written by preallocate.c; arenas.c empties the bin when the context has gone.
 */
struct gr_bin {
        struct gr_block *blocks;
        _Atomic uint32_t count; /* also read without the lock, to skip empty bins */
        uint32_t low_water;     /* least count since decay last looked: so many blocks were not needed */
        uint64_t hits;          /* requests served */
        uint64_t frees;         /* blocks put in */
        uint64_t fences;        /* laid or waited for because this bin had nothing usable */
        uint32_t cooldown;      /* looks without a usable block until the bin asks for preallocated blocks again */
} __attribute__((aligned(GR_LINE_BYTES)));

struct gr_arena {
        struct gr_spin lock;        /* rank GR_RANK_ARENA; guards what follows */
        unsigned shard;             /* constant */
        struct gr_context *context; /* constant */
        uint64_t open_bytes;        /* freed into this arena in open_epoch */
        uint64_t open_epoch;
        uint64_t hits;
        uint64_t note_at;        /* the count of hits at which the peak of live memory is updated next */
        struct gr_cached cached; /* footprint of the blocks in the bins */
        struct gr_bin bins[GR_CLASS_COUNT];
        struct gr_fastbins fastbins;
        uint32_t generation; /* of the range that it handed out last; see gr_arena_generation */
        /* LIVE blocks whose home is this arena, each at the hash of its address; or NULL. */
        struct gr_block *recent[1u << GR_RECENT_LOG2];
} __attribute__((aligned(GR_LINE_BYTES)));

/* Makes zeroed memory an arena for shard of context. It lives as long as the memory: nothing undoes this. */
void gr_arena_init(struct gr_arena *arena, struct gr_context *context, unsigned shard);

/* The calling thread's arena in context, made where it is not there yet; the context's first one if out of memory. */
struct gr_arena *gr_arena_own(struct gr_context *context);

/* The arena of shard, or NULL where it has none yet. */
static inline struct gr_arena *gr_arena_at(struct gr_context *context, unsigned shard)
{
        return atomic_load_explicit(&context->arenas[shard], memory_order_acquire);
}

/* For a walk through all arenas of a context, beginning with first: the one after arena; NULL: arena was the last. */
static inline struct gr_arena *gr_arena_next(const struct gr_arena *arena, const struct gr_arena *first)
{
        struct gr_arena *next = NULL;

        for (unsigned shard = arena->shard; !next;) {
                shard = (shard + 1) % GR_SHARDS;
                next = gr_arena_at(arena->context, shard);
        }
        return next == first ? NULL : next;
}

static inline void gr_arena_lock(struct gr_arena *arena)
{
        gr_spin_lock(&arena->lock, GR_RANK_ARENA);
}

static inline void gr_arena_unlock(struct gr_arena *arena)
{
        gr_spin_unlock(&arena->lock, GR_RANK_ARENA);
}

/* The number of blocks in the bin; exact with the arena's lock held. */
static inline uint32_t gr_bin_count(struct gr_bin *bin)
{
        return atomic_load_explicit(&bin->count, memory_order_relaxed);
}

/* The low water, which then starts anew. Arena lock held. */
static inline uint32_t gr_bin_restart_low_water(struct gr_bin *bin)
{
        uint32_t low_water = bin->low_water;

        gr_lock_rank_assert_held(GR_RANK_ARENA);
        assert(low_water <= gr_bin_count(bin)); /* the least that it held since, now included */
        bin->low_water = gr_bin_count(bin);
        return low_water;
}

/* Takes a block out of its bin. Arena lock held. */
void gr_arena_bin_remove(struct gr_arena *arena, struct gr_bin *bin, struct gr_block *block);

/* Below, no lock from GR_RANK_ARENA up is held unless a comment says otherwise. */

/*
 * The fast path of an allocation: hands the oldest block of the request's class in the calling thread's arena to the
 * program if it is usable; for a request that segments serve, one of exactly its size from the fastbins. Returns its
 * address, or 0: ask the slow path.
 */
uint64_t gr_arena_alloc(struct gr_context *context, size_t bytes);

/*
 * Hands a CACHED block, which the caller owns and which is in no list, to the program. arena, the calling thread's own,
 * becomes its home, so that its free may take the fast path into a fastbin. Only ranges of pool kind auto. Returns its
 * address; 0: it was not handed out and is unchanged.
 */
uint64_t gr_arena_adopt(struct gr_arena *arena, struct gr_block *block, size_t bytes);

/*
 * The generation of the next range that is handed out in context: it tells the ranges of a segment apart, for which the
 * driver has a single BUFFER_ID.
 */
uint32_t gr_arena_generation(struct gr_context *context);

/*
 * Whether the fastbins of the arena may take a range of so many bytes: up to 1 MiB always, and a larger one
 *   - as long as the larger ones of this arena are at most gr_arena_fastbins_most: its part of a 64th of the peak of
 *     live memory, or 2 MiB,
 *   - or as the arena's only large one, if it is at least half the peak: the program then has little else,
 *   - or as its only large one, if several threads allocate and it is at most a 16th of the peak.
 * The arena's lock may be held.
 */
bool gr_arena_fastbins_have_room(struct gr_arena *arena, uint64_t bytes);
uint64_t gr_arena_fastbins_most(struct gr_arena *arena);

/*
 * gr_arena_enter_fastbin puts a block that the program freed on the slow path into a fastbin. gr_arena_empty_fastbins
 * takes all blocks out of the fastbins, linked by next; NULL: they are empty. gr_arena_evict_fastbins takes those above
 * 1 MiB out until at most keep_bytes of them are left (gr_fastbins_evict). The blocks stay cached, on the device's own
 * account.
 */
void gr_arena_enter_fastbin(struct gr_arena *arena, struct gr_block *block);
struct gr_block *gr_arena_empty_fastbins(struct gr_arena *arena);
struct gr_block *gr_arena_evict_fastbins(struct gr_arena *arena, uint64_t keep_bytes);

/*
 * As gr_arena_free, for a block whose home is mostly the arena of another thread: it goes back there, where the next
 * request of the thread that allocates finds it, and not into an arena from which nothing is asked. False: nothing has
 * changed.
 */
bool gr_arena_free_at_home(struct gr_core *core, struct gr_arena *home, uint64_t ptr, bool *ret_should_close);

/*
 * The fast path of a free, for the context in which the calling thread last allocated: takes back a block that the
 * thread's arena remembers. Returns the context; NULL: it remembers no such block, and nothing has changed.
 * *ret_should_close, set where it took one: so much was freed into this arena in the open epoch that the epoch should
 * be closed.
 */
struct gr_context *gr_arena_free(struct gr_core *core, uint64_t ptr, bool *ret_should_close);

/*
 * Puts a block that the caller has claimed from the ledger into the calling thread's bins. synced: the GPU has done all
 * work since its free, so it is usable and idle at once, and *ret_should_close stays as it was.
 */
void gr_arena_put(struct gr_context *context, struct gr_block *block, bool synced, bool *ret_should_close);

/*
 * Takes a usable block with at_least to at_most bytes of capacity out of the bins of class to last: the smallest of the
 * first class that has one. NULL: none has.
 */
struct gr_block *gr_arena_take(struct gr_arena *arena, unsigned class, unsigned last, size_t at_least, size_t at_most);

/* The epoch in which the oldest block of a class below GR_CLASS_EXACT was freed; 0: the bin is empty. */
uint64_t gr_arena_oldest_epoch(struct gr_arena *arena, unsigned class);

/*
 * The oldest range in the fastbins that has exactly the size for a request of bytes. gr_arena_take_fastbin takes it out
 * if it is usable, else returns NULL. gr_arena_fastbin_epoch returns the epoch in which it was freed, for a request
 * that gr_arena_alloc did not serve; 0: there is none, or all work is in order, so that it would have been taken.
 */
struct gr_block *gr_arena_take_fastbin(struct gr_arena *arena, size_t bytes);
uint64_t gr_arena_fastbin_epoch(struct gr_arena *arena, size_t bytes);

/*
 * Moves up to count blocks of a class below GR_CLASS_EXACT, the oldest first, to another arena of the same context, if
 * even the newest of the bin was freed in last_epoch or before. The moved blocks must be usable and those in the other
 * bin must not be, as the moved ones are put in front of them. Returns how many were moved. No lock from GR_RANK_ARENA
 * up is held.
 */
size_t gr_arena_move(struct gr_arena *from, struct gr_arena *to, unsigned class, size_t count, uint64_t last_epoch);

/*
 * Claims the range at ptr, as gr_ledger_claim does, if its home is the arena of the thread's last hit, which takes one
 * lock. NULL: it is no range of that arena.
 */
struct gr_block *gr_arena_claim(struct gr_core *core, uint64_t ptr);

/* If this arena is the home of the block at ptr, the block has none afterwards. */
void gr_arena_forget(struct gr_arena *arena, uint64_t ptr);

/*
 * Between quiesce and resume no block of context has a home or gets one, so that the ledger's lock alone guards the
 * changes of its state; all allocations and frees take the slow path. May be nested. No lock from GR_RANK_ARENA up is
 * held at quiesce.
 */
void gr_arenas_quiesce(struct gr_context *context);
void gr_arenas_resume(struct gr_context *context);

#endif
