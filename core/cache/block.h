/*
 * The end of a block: its memory leaves the process, and the accounts. A block that the program freed in the order of a
 * stream goes to the driver at once, but its memory comes back only when the stream gets there.
 */
#ifndef GR_BLOCK_H
#define GR_BLOCK_H

#include <stdint.h>

#include "cache/ledger.h"

/* The process has the block's memory no longer: takes it off the accounts. A range is charged with its segment. */
void gr_block_uncharge(struct gr_block *block);

/* gr_block_uncharge, and frees the structure. */
void gr_block_drop(struct gr_block *block);

/*
 * block, which is out of the ledger, was freed in the order of a stream: it stays charged, as cached, until its epoch
 * is idle. Without a limit it is uncharged at once, as no request depends on when. No lock is held.
 */
void gr_block_leave(struct gr_block *block);

/*
 * Uncharges what was freed in the order of a stream, as far as the streams have come to those frees. Returns the bytes
 * that the device got back. Waits for nothing; no lock is held.
 */
uint64_t gr_blocks_left(struct gr_context *context);

/* The context has gone: uncharges all of them. */
void gr_blocks_drop_leaving(struct gr_context *context);

#endif
