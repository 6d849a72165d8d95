/*
 * Spilled blocks: where an allocation would fail otherwise, and GPURECLAIM_SPILL allows it, host memory that the device
 * reaches under the same address takes its place.
 *
 * It is pinned, and every access crosses the bus. It is not charged to the device. The driver says of it that it is
 * host memory (CU_POINTER_ATTRIBUTE_MEMORY_TYPE), and it cannot be exported (cuIpcGetMemHandle). It stays where it is
 * until it is freed: its address is in kernels' arguments, graphs and the program's own structures, and could only be
 * moved under them by memory mapping, which legacy allocations do not have. So later allocations get the device's
 * memory as soon as there is room, and what was spilled moves there when the program frees and allocates it.
 *
 * Managed memory is no rung: oversubscribed, it moves pages under running kernels and can hang the card, and its
 * addresses are found by other calls (advice, attachment, prefetch) that leave a state which no free resets.
 */
#ifndef GR_SPILL_H
#define GR_SPILL_H

#include <stdbool.h>
#include <stddef.h>

#include "base/lock.h"

struct gr_block;
struct gr_context;

/* Freed blocks of host memory, oldest first, which wait for their fence. */
struct gr_spilled {
        struct gr_lock lock; /* rank GR_RANK_SPILLED; guards what follows */
        struct gr_block *blocks;
};

/* Host memory for bytes, in the ledger. -EDQUOT: more than allowed; -ENOTSUP; or the driver's error. */
int gr_spill_alloc(struct gr_context *context, size_t bytes, struct gr_block **ret_block);

/* The program freed a spilled block, claimed in the ledger: it goes back once nothing uses it any more. */
void gr_spill_free(struct gr_block *block);

/* Gives back the freed ones that are idle. Returns whether others still wait for their fence. */
bool gr_spill_collect(struct gr_context *context);

/* The context's memory is gone: forgets the freed ones, which are in no ledger any more. */
void gr_spill_drop(struct gr_context *context);

#endif
