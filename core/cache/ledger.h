/*
 * The ledger: every block the pool owns, by address. Sharded; each shard has its own lock, held for a look-up only.
 *
 * A shard is a table of addresses beside their blocks, open addressing with linear probing: among a million blocks
 * nearly each look is a miss of the caches and of the TLB, and so it takes one for the address and one for the block.
 * (Chains took four and more: 0.60 us for a free and an allocation among a million blocks, 0.39 us so. November 2026,
 * a Xeon with 105 MiB of cache.)
 */
#ifndef GR_LEDGER_H
#define GR_LEDGER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/lock.h"
#include "base/metadata.h"
#include "base/shard.h"

#define GR_LEDGER_SHARDS 64

struct gr_context;

enum gr_block_state {
        GR_BLOCK_LIVE,   /* the program has it */
        GR_BLOCK_CACHED, /* freed by the program: in a bin, or on its way there or back to the driver */
        GR_BLOCK_GONE,   /* its memory went with its context */
};

enum gr_block_flags {
        GR_BLOCK_EXPORTED = 1, /* others may know it (IPC, RDMA, attributes set): its free goes to the driver */
        GR_BLOCK_SPILLED = 2,  /* host memory in place of the device's; constant */
        GR_BLOCK_HOST = 4,     /* pinned host memory (pinned.h); constant */
        GR_BLOCK_SPLIT = 8,    /* a range of a segment (split.h), not an allocation of its own; constant */
};

/* One driver allocation. Fields without a note are constant while the block is in the ledger. */
struct gr_block {
        /* What a hit needs, a cache line of it. */
        uint64_t ptr;                   /* key */
        size_t capacity_bytes;          /* what the driver was asked for */
        _Atomic size_t requested_bytes; /* what the program asked for; set before state turns LIVE */
        struct gr_context *context;     /* the owner */
        uint64_t freed_epoch;           /* open epoch when freed; guarded by the arena's lock while in a bin */
        struct gr_block *prev, *next;   /* guarded by the arena's lock */
        _Atomic uint32_t generation;    /* to the program */
        _Atomic uint16_t state;         /* below */
        uint8_t class;
        _Atomic uint8_t flags; /* changed with the shard's lock held */

        unsigned kind; /* of pinned memory: as gr_pinned_alloc was asked */
};

/* What a block takes, and what begins with one: a range of split's, or one of pinned memory. */
#define GR_BLOCK_ROOM (2 * (size_t)GR_LINE_BYTES)

/* Room for one, zero bytes; NULL: out of memory. */
static inline void *gr_block_new(void)
{
        return gr_metadata_alloc(GR_BLOCK_ROOM);
}

/* block may be NULL. */
static inline void gr_block_free(void *block)
{
        gr_metadata_free(block, GR_BLOCK_ROOM);
}

/*
 * A block's state: enum gr_block_state, and for one that is LIVE its home << GR_HOME_SHIFT: 1 + the number of the arena
 * of its context that has it among its recent blocks (arena.h), or 0. A state with a home changes only with that
 * arena's lock held, and so does that of a block in its bins, in fastbins or of whoever hands it out to one with a
 * home, in plain stores. All else that changes
 * it from LIVE or to GONE holds the shard's lock, and finds no home and no arena that could give it one.
 */
#define GR_HOME_SHIFT 8

static inline bool gr_block_is_live(const struct gr_block *block)
{
        return (atomic_load(&block->state) & ((1u << GR_HOME_SHIFT) - 1)) == GR_BLOCK_LIVE;
}

struct gr_ledger_slot {
        uint64_t ptr;
        struct gr_block *block; /* NULL: the slot is empty */
};

struct gr_ledger_shard {
        struct gr_spin lock; /* guards what follows, and the blocks' lives; adding may take memory from the C library */
        struct gr_ledger_slot *slots; /* NULL: none yet */
        size_t room, count;           /* slots, a power of two; those in use */
        unsigned shift;               /* of a hash without the shard's bits: 64 - log2 of room */
} __attribute__((aligned(GR_LINE_BYTES)));

struct gr_ledger {
        struct gr_ledger_shard shards[GR_LEDGER_SHARDS];
};

/* What a block looked like at the time of the question. */
struct gr_block_info {
        struct gr_context *context;
        size_t requested_bytes;
        size_t capacity_bytes;
        uint32_t generation;
        bool live;
        bool exported;
        bool spilled;
        bool host;
        bool split;
        unsigned kind;
};

/* Fibonacci hashing: addresses are multiples of 512, so the low bits say little; the product's high bits mix all. */
static inline uint64_t gr_ledger_mix(uint64_t ptr)
{
        return (ptr >> 9) * UINT64_C(0x9E3779B97F4A7C15);
}

void gr_ledger_init(struct gr_ledger *ledger);

/* Frees the blocks still in it. No other thread may use the ledger. */
void gr_ledger_destroy(struct gr_ledger *ledger);

/*
 * Adds block, which the ledger owns from now on. A block already there at the same address is stale (the driver would
 * not give out an address twice): it leaves the ledger and becomes GONE. One that was LIVE is the caller's then, in
 * *ret_stale, which is NULL otherwise: whoever finds a CACHED one in its bin sees what became of it. -ENOMEM: not
 * added. No lock from GR_RANK_ARENA up is held.
 */
int gr_ledger_add(struct gr_ledger *ledger, struct gr_block *block, struct gr_block **ret_stale);

/*
 * The driver has given ptr to the program in a way of its own: what is known there is stale, and leaves the ledger as
 * by gr_ledger_add. One that was LIVE is returned, and the caller's; else NULL. A range of a segment stays, as its
 * memory is the segment's. No lock from GR_RANK_ARENA up is held.
 */
struct gr_block *gr_ledger_forget(struct gr_ledger *ledger, uint64_t ptr);

/* Takes block, which has no home, out; the caller owns it again. False: it was out already, GONE, and its address may
 * be another block's.
 */
bool gr_ledger_remove(struct gr_ledger *ledger, struct gr_block *block);

/* Takes block out, as GONE; the caller knows who owns it. Returns its state before, GONE where it was out already. */
enum gr_block_state gr_ledger_drop(struct gr_ledger *ledger, struct gr_block *block);

/*
 * The program frees ptr: *ret_block turns from LIVE to CACHED and belongs to the caller; a full barrier on x86-64.
 * -ENOENT: not a block of ours; -EALREADY: a block of ours that the program does not hold.
 */
int gr_ledger_claim(struct gr_ledger *ledger, uint64_t ptr, struct gr_block **ret_block);

/* The other way: block, in no bin, is handed to the program. False where its memory is GONE. Takes no lock. */
bool gr_ledger_hand_out(struct gr_block *block, size_t requested_bytes);

/* Says what ptr, the first byte of a block, is; -ENOENT. */
int gr_ledger_find(struct gr_ledger *ledger, uint64_t ptr, struct gr_block_info *ret_info);

/* Adds what the program holds on device, by class, to the counts and bytes (GR_CLASS_COUNT of each). */
void gr_ledger_count_live(struct gr_ledger *ledger, int device, uint64_t *counts, uint64_t *bytes);

/* Marks a live block so that its free goes to the driver; -ENOENT where ptr is no live block of ours. */
int gr_ledger_mark_exported(struct gr_ledger *ledger, uint64_t ptr);

/*
 * Takes all blocks of context out. LIVE ones are handed to dropped one by one, which owns them, without a lock held;
 * CACHED ones, still in their bins, become GONE. The context's arenas are shut.
 */
void gr_ledger_drop_context(struct gr_ledger *ledger, struct gr_context *context,
                            void (*dropped)(struct gr_block *block));

#endif
