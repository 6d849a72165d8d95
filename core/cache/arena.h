/*
 * The bins of one shard of a context: a thread puts what it frees into those of its own shard and looks there first,
 * then in those of the others. The first arena also guards the context's fastbins (fastbin.h), for what is split's:
 * the blocks in them are ranges of its segments, and as such in use.
 *
 * A hit is one lock and some loads and stores, for a free as for an allocation: an arena remembers the blocks that it
 * handed out lately, so that their free needs no look into the ledger, and all that a hit changes is guarded by the
 * arena's lock, counters included. A block among the recent ones says so in its state (ledger.h); whoever else wants
 * to take it from the program, another thread that frees it or a context that ends, has the arena forget it first.
 */
#ifndef GR_ARENA_H
#define GR_ARENA_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account/budget.h"
#include "base/lock.h"
#include "base/shard.h"
#include "base/size_class.h"
#include "cache/ledger.h"

#define GR_RECENT_LOG2 10

struct gr_context;
struct gr_core;

/* Freed blocks of one class, oldest first. All guarded by the arena's lock. */
struct gr_bin {
        struct gr_block *blocks;
        _Atomic uint32_t count; /* also read without the lock, to pass empty bins by */
        uint32_t low_water;     /* least of it since decay last looked: what nobody needed */
        uint64_t hits;          /* requests served */
        uint64_t frees;         /* blocks put in */
        uint64_t fences;        /* paid for because this bin had nothing usable */
        uint32_t cooldown; /* so many more fences are paid for without asking for preallocated blocks (preallocate.h) */
} __attribute__((aligned(GR_LINE_BYTES)));

struct gr_arena {
        struct gr_spin lock;        /* rank GR_RANK_ARENA; guards what follows */
        unsigned shard;             /* constant */
        struct gr_context *context; /* constant */
        uint64_t open_bytes;        /* freed here into open_epoch */
        uint64_t open_epoch;
        uint64_t hits;
        uint64_t note_at;        /* hits at the next look at the peak of live memory */
        struct gr_cached cached; /* footprint of what lies in the bins */
        struct gr_bin bins[GR_CLASS_COUNT];
        struct gr_block
                *recent[1u << GR_RECENT_LOG2]; /* LIVE and with this arena as home, each in its place; or NULL */
} __attribute__((aligned(GR_LINE_BYTES)));

/* An arena in zeroed memory, for shard of context; there is no way back. */
void gr_arena_init(struct gr_arena *arena, struct gr_context *context, unsigned shard);

/* The calling thread's arena in context; where memory is out, another one. */
struct gr_arena *gr_arena_own(struct gr_context *context);

static inline void gr_arena_lock(struct gr_arena *arena)
{
        gr_spin_lock(&arena->lock, GR_RANK_ARENA);
}

static inline void gr_arena_unlock(struct gr_arena *arena)
{
        gr_spin_unlock(&arena->lock, GR_RANK_ARENA);
}

static inline uint32_t gr_bin_count(struct gr_bin *bin)
{
        return atomic_load_explicit(&bin->count, memory_order_relaxed);
}

/* The footprint of what lies in the bins of all shards. */
uint64_t gr_arenas_cached(struct gr_context *context);

/* Takes a block out of its bin. Arena lock held. */
void gr_bin_remove(struct gr_arena *arena, struct gr_bin *bin, struct gr_block *block);

/*
 * The way of most allocations: hands the oldest block of the request's class to the program, if it is usable and lies
 * in the calling thread's arena; where split serves it, of its size, from the fastbins. Its address; 0 where that is
 * not so, or only the slow path may say.
 */
uint64_t gr_arena_alloc(struct gr_context *context, size_t bytes);

/*
 * Hands a block that is CACHED and the caller's, in no list, to the program, so that its free may go into a fastbin
 * the fast path. Its address; 0 where that is not so, and nothing has happened. No lock from GR_RANK_ARENA up is held.
 */
uint64_t gr_arena_adopt(struct gr_block *block, size_t bytes);

/* The number of the next block of split's that goes to the program. No lock from GR_RANK_ARENA up is held. */
uint32_t gr_arena_generation(struct gr_context *context);

/*
 * The way of most frees: takes back a block that the calling thread's arena, or the first for what is split's, handed
 * out lately, in the context that the thread last allocated in. The context; NULL where it is no such block,
 * and nothing has happened. *ret_much: so much was freed that the epoch should be closed.
 */
struct gr_context *gr_arena_free(struct gr_core *core, uint64_t ptr, bool *ret_much);

/* As gr_arena_free goes on, for a block that was claimed from the ledger: into the calling thread's bins. */
void gr_arena_put(struct gr_context *context, struct gr_block *block, bool synced, bool *ret_much);

/* The best usable block of the arena from class to last, taken out of its bin; NULL. */
struct gr_block *gr_arena_take(struct gr_arena *arena, unsigned class, unsigned last, size_t at_least, size_t at_most);

/* The epoch of the oldest block of a class below GR_CLASS_EXACT; 0 where there is none. */
uint64_t gr_arena_oldest_epoch(struct gr_arena *arena, unsigned class);

/*
 * Moves blocks of a class below GR_CLASS_EXACT, count at most and the oldest first, to another arena of the context,
 * before those there: none of which is usable, while those that move are. Only where the newest was freed in
 * last_epoch or before. Returns how many. No lock from GR_RANK_ARENA up is held.
 */
size_t gr_arena_move(struct gr_arena *from, struct gr_arena *to, unsigned class, size_t count, uint64_t last_epoch);

/* Makes the block at ptr one without a home, if this arena is it. No lock from GR_RANK_ARENA up is held. */
void gr_arena_forget(struct gr_arena *arena, uint64_t ptr);

/*
 * From shut to open no block of context has a home or is given one, so that its state can be changed by the ledger's
 * rules alone; hits take the slow path. May be nested. No lock from GR_RANK_ARENA up is held at shut.
 */
void gr_arenas_quiesce(struct gr_context *context);
void gr_arenas_resume(struct gr_context *context);

/* The context is gone: what lies in the bins is freed. The arenas are shut. */
void gr_arenas_drop(struct gr_context *context);

#endif
