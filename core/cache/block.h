/*
 * A block: its structure, its state and home, and who may change them. The ledger finds it by its address.
 */
#ifndef GR_BLOCK_H
#define GR_BLOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/attributes.h"
#include "base/metadata.h"
#include "base/shard.h"

struct gr_context;

enum gr_block_state {
        GR_BLOCK_LIVE,   /* the program has it */
        GR_BLOCK_CACHED, /* the library has it: new, in a bin or fastbin, parked, or on its way */
        GR_BLOCK_GONE,   /* its memory went with its context, or it is out of the ledger */
};

enum gr_block_flags {
        GR_BLOCK_EXPORTED = 1, /* known outside (IPC, RDMA, attributes set): its free goes to the driver */
        GR_BLOCK_SPILLED = 2,  /* host memory in place of the device's; constant */
        GR_BLOCK_HOST = 4,     /* pinned host memory (pinned.h); constant */
        GR_BLOCK_RANGE = 8,    /* a range of a segment (segments_serve.h), not an allocation of its own; constant */
        GR_BLOCK_SYNC = 16,    /* what the program has set as SYNC_MEMOPS, where the driver does not keep it */
        GR_BLOCK_GRAPH = 32,   /* with GR_BLOCK_RANGE: of a graph segment (segment/graph_segments.h); constant */
};

/*
 * One block. Fields without a note are constant while it is in the ledger; gr_block_begin sets them, and for a range
 * the files of segment/. The others name what writes them.
 */
struct gr_block {
        /* What a hit needs, in one cache line. */
        uint64_t ptr;                   /* key */
        size_t capacity_bytes;          /* what the driver was asked for */
        _Atomic size_t requested_bytes; /* what the program asked for; set before state turns LIVE: arena.c, ledger.c */
        struct gr_context *context;     /* the owner */
        /* The open epoch when it was freed; guarded by the arena's lock while in a bin; written where it is cached. */
        uint64_t freed_epoch;
        struct gr_block *prev, *next; /* in the list that the block is in, whose lock guards them */
        _Atomic uint32_t generation;  /* a new number each time it is handed out: gr_block_set_generation */
        _Atomic uint16_t state;       /* and its home, see GR_HOME_SHIFT: arena.c, ledger.c, gr_block_restore */
        uint8_t class;
        _Atomic uint8_t flags; /* changed with the shard's lock held, by ledger.c */

        unsigned kind; /* of pinned memory: the kind that gr_pinned_alloc was called with */
        /* A graph uses it: the number of its hold (alloc/graph_hold.h), else 0; written by its owner. */
        _Atomic unsigned hold;
};

/* Bytes of a block's structure, also where the block is the first field of a larger one (a range, pinned memory). */
#define GR_BLOCK_ROOM (2 * (size_t)GR_LINE_BYTES)

/* GR_BLOCK_ROOM zero bytes; NULL: out of memory. */
static inline void *gr_block_new(void)
{
        return gr_metadata_alloc(GR_BLOCK_ROOM);
}

/* block may be NULL. */
static inline void gr_block_delete(void *block)
{
        gr_metadata_free(block, GR_BLOCK_ROOM);
}

/*
 * A block's state is enum gr_block_state in the low bits and its home above GR_HOME_SHIFT: 0 for none, or 1 + the
 * shard of the arena that has it among its recent blocks (arena.h). Only a LIVE block has a home.
 *
 * Who may change it:
 * - With an arena's lock held, by a plain store: the state of a block whose home this arena is, and that of a CACHED
 *   block that it hands out (from its bins or fastbins, or for the owner of the block), as it becomes the home.
 * - With the ledger shard's lock held: any other change from LIVE, and any change to GONE. The block then has no home,
 *   and no arena can become its home meanwhile (gr_arenas_quiesce, gr_arena_forget).
 */
#define GR_HOME_SHIFT 8

_Static_assert(GR_BLOCK_GONE < 1u << GR_HOME_SHIFT, "the state is in the bits below the home");
_Static_assert((GR_SHARDS + 1) << GR_HOME_SHIFT <= UINT16_MAX, "and both have 16 bits");
_Static_assert((GR_BLOCK_EXPORTED | GR_BLOCK_SPILLED | GR_BLOCK_HOST | GR_BLOCK_RANGE | GR_BLOCK_SYNC |
                GR_BLOCK_GRAPH) <= UINT8_MAX,
               "a byte of flags");
_Static_assert(sizeof(struct gr_block) <= GR_BLOCK_ROOM, "each block is allocated with so much");

/* The state without the home. */
static inline enum gr_block_state gr_block_state(const struct gr_block *block)
{
        return (enum gr_block_state)(atomic_load(&block->state) & ((1u << GR_HOME_SHIFT) - 1));
}

/* Whether the program has the block; may change at once unless a lock of those above is held. */
static inline bool gr_block_is_live(const struct gr_block *block)
{
        return gr_block_state(block) == GR_BLOCK_LIVE;
}

static inline bool gr_block_has_home(const struct gr_block *block)
{
        return atomic_load(&block->state) >> GR_HOME_SHIFT != 0;
}

/*
 * Makes a new block, or a range that is about to enter the ledger, CACHED. The caller owns it: the lock under which
 * others find it later orders these stores.
 */
static inline void gr_block_begin_cached(struct gr_block *block, unsigned size_class, unsigned flags)
{
        atomic_store_explicit(&block->state, GR_BLOCK_CACHED, memory_order_relaxed);
        block->class = (uint8_t)size_class;
        atomic_store_explicit(&block->flags, (uint8_t)flags, memory_order_relaxed);
}

/* Fills a new block, which becomes CACHED. size_class: by gr_class_of or gr_class_of_block; flags: gr_block_flags. */
static inline void gr_block_begin(struct gr_block *block, struct gr_context *context, uint64_t ptr,
                                  size_t capacity_bytes, size_t requested_bytes, unsigned size_class, unsigned flags)
{
        block->ptr = ptr;
        block->capacity_bytes = capacity_bytes;
        block->requested_bytes = requested_bytes;
        block->context = context;
        gr_block_begin_cached(block, size_class, flags);
}

/* The generation of its next owner. The caller owns the block or has its list locked: no other thread hands it out. */
static inline uint32_t gr_block_next_generation(const struct gr_block *block)
{
        return atomic_load_explicit(&block->generation, memory_order_relaxed) + 1;
}

/* Before gr_ledger_hand_out, by the owner. */
static inline void gr_block_set_generation(struct gr_block *block, uint32_t generation)
{
        atomic_store_explicit(&block->generation, generation, memory_order_relaxed);
}

#endif
