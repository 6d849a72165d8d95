/*
 * The ledger: the table of all blocks by address. Sharded; each shard has its own lock, held for a look-up only.
 */
#ifndef GR_LEDGER_H
#define GR_LEDGER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/address_table.h"
#include "base/attributes.h"
#include "base/lock.h"
#include "cache/block.h"

#define GR_LEDGER_SHARDS (1 << GR_ADDRESS_CHOICE_BITS)

struct gr_arena;
struct gr_context;

struct gr_ledger_shard {
        struct gr_spin lock; /* guards what follows, and which blocks exist; adding may call the C library's malloc */
        struct gr_address_table table; /* of struct gr_block */
} __attribute__((aligned(GR_LINE_BYTES)));

struct gr_ledger {
        struct gr_ledger_shard shards[GR_LEDGER_SHARDS];
};

/* What a block looked like at the time of the question. */
struct gr_block_info {
        struct gr_context *context; /* in which it was allocated; may have ended since */
        size_t requested_bytes;     /* what the program asked for last; may be less than capacity_bytes */
        size_t capacity_bytes;      /* what the block has */
        uint32_t generation;        /* a new number each time the block is handed out */
        bool live;                  /* the program has it; else it is cached */
        bool exported;              /* to another process or interface: its free goes to the driver */
        bool spilled;               /* host memory, in place of the device's */
        bool host;                  /* pinned host memory; kind: which (pinned.h) */
        bool is_range;              /* a range of a segment */
        bool sync;                  /* gr_ledger_set_sync */
        unsigned kind;
};

/* Makes ledger an empty one. */
void gr_ledger_init(struct gr_ledger *ledger);

/* Frees the blocks in it. No other thread may use the ledger meanwhile. */
void gr_ledger_destroy(struct gr_ledger *ledger);

/*
 * Adds block, which the ledger then owns. A block already listed at the same address is stale, as the driver gives out
 * no address twice: it leaves the ledger and becomes GONE. If it was LIVE the caller owns it, as *ret_stale, also on
 * failure. Otherwise *ret_stale is NULL; a CACHED one stays in its bin, and the code that takes it out sees that it is
 * GONE. -ENOMEM: block was not added.
 *
 * The stale block must not have a home or get one: the caller has quiesced the arenas of *quiesced (NULL: of none).
 * -EAGAIN: the stale block is of another context, which is now in *quiesced; nothing else has changed. gr_block_add
 * does this.
 */
int gr_ledger_add(struct gr_ledger *ledger, struct gr_block *block, struct gr_context **quiesced,
                  struct gr_block **ret_stale);

/*
 * The driver has given ptr to the program in a call that the pool does not serve: a block listed there is stale, and
 * leaves the ledger as in gr_ledger_add, also with *quiesced and -EAGAIN. If it was LIVE the caller owns it, as
 * *ret_stale; else that is NULL. A range stays, as its memory belongs to its segment. gr_block_forget does this.
 */
int gr_ledger_forget(struct gr_ledger *ledger, uint64_t ptr, struct gr_context **quiesced, struct gr_block **ret_stale);

/*
 * Takes block out of the ledger; the caller owns it then. block has no home. False: it is GONE and was out already; its
 * address may now be that of another block.
 */
bool gr_ledger_remove(struct gr_ledger *ledger, struct gr_block *block);

/* Takes block out and makes it GONE; its owner stays the same. Returns its state before; GONE: it was out already. */
enum gr_block_state gr_ledger_make_gone(struct gr_ledger *ledger, struct gr_block *block);

/*
 * The program frees ptr: *ret_block turns from LIVE to CACHED, and the caller owns it. A full memory barrier on x86-64.
 * -ENOENT: no block has this address; -EALREADY: one has, but it is not LIVE (freed twice); -EBUSY: *ret_home is its
 * home, which may change at once, and has to forget it first (gr_arena_forget). gr_block_claim does this.
 */
int gr_ledger_claim(struct gr_ledger *ledger, uint64_t ptr, struct gr_block **ret_block, struct gr_arena **ret_home);

/*
 * Hands block to the program: CACHED turns LIVE. The caller owns block until then, and it is in no bin. False: it is
 * GONE. Takes no lock.
 */
bool gr_ledger_hand_out(struct gr_block *block, size_t requested_bytes);

/* Describes the block whose first byte is at ptr; -ENOENT: there is none. */
int gr_ledger_find(struct gr_ledger *ledger, uint64_t ptr, struct gr_block_info *ret_info);

/* Adds the LIVE blocks of device, by class, to counts and their footprint to bytes (GR_CLASS_COUNT of each). */
void gr_ledger_count_live(struct gr_ledger *ledger, int device, uint64_t *counts, uint64_t *bytes);

/* Marks the LIVE block at ptr as exported, so that its free goes to the driver; -ENOENT: there is none. */
int gr_ledger_mark_exported(struct gr_ledger *ledger, uint64_t ptr);

/* Notes for the LIVE block at ptr what the program has set as SYNC_MEMOPS; -ENOENT: there is none. */
int gr_ledger_set_sync(struct gr_ledger *ledger, uint64_t ptr, bool sync);

/*
 * Takes all blocks of context out and makes them GONE. Calls gone for each that was LIVE, without a lock held; it
 * owns the block. CACHED ones stay in their bins. The context's arenas are quiesced.
 */
void gr_ledger_context_gone(struct gr_ledger *ledger, struct gr_context *context, void (*gone)(struct gr_block *block));

#endif
