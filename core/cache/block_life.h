/*
 * What ledger and arenas do together for a block, and the end of a block: its memory leaves the process and is
 * uncharged. A block that the program freed in the order of a stream goes to the driver at once, but its memory comes
 * back only when the stream gets there.
 */
#ifndef GR_BLOCK_LIFE_H
#define GR_BLOCK_LIFE_H

#include <errno.h>
#include <stdint.h>

#include "cache/arena.h"
#include "cache/ledger.h"
#include "context/context.h"

/*
 * These call gr_ledger_add, gr_ledger_forget (whose *ret_stale is returned) and gr_ledger_claim. Before that they make
 * the home of the block at that address forget it. No lock from GR_RANK_ARENA up is held.
 */
int gr_block_add(struct gr_core *core, struct gr_block *block, struct gr_block **ret_stale);
struct gr_block *gr_block_forget(struct gr_core *core, uint64_t ptr);

static inline int gr_block_claim(struct gr_core *core, uint64_t ptr, struct gr_block **ret_block)
{
        struct gr_arena *home;
        int rc;

        while ((rc = gr_ledger_claim(core->ledger, ptr, ret_block, &home)) == -EBUSY)
                gr_arena_forget(home, ptr);
        return rc;
}

/*
 * The driver refused to free block, which the caller took out of the ledger: it is the program's again. Where it cannot
 * be listed (out of memory) it is forgotten, and stays charged. No lock from GR_RANK_ARENA up is held.
 */
void gr_block_restore(struct gr_core *core, struct gr_block *block);

/* The process no longer has the block's memory: takes it off the accounts. A range is charged with its segment. */
void gr_block_uncharge(struct gr_block *block);

/* As gr_block_uncharge, and frees the structure. */
void gr_block_uncharge_and_delete(struct gr_block *block);

/*
 * block was freed in the order of a stream, and is out of the ledger: keeps it charged, as cached, until its epoch is
 * idle. Without a limit it is uncharged at once, as then no request depends on the charge. No lock is held.
 */
void gr_block_keep_charged(struct gr_block *block);

/*
 * Uncharges what was freed in the order of a stream, as far as the streams have come to those frees. Returns the bytes
 * that the device got back. Waits for nothing; no lock is held.
 */
uint64_t gr_blocks_collect(struct gr_context *context);

/* The context has gone: uncharges all that gr_block_keep_charged has kept charged. */
void gr_blocks_context_gone(struct gr_context *context);

#endif
