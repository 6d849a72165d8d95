/*
 * Spilled blocks: where an allocation would fail otherwise, and GPURECLAIM_SPILL allows it, it is served from host
 * memory that the device reaches under the same address.
 *
 * The memory is pinned, and every access of the GPU crosses the bus. It is not charged to the device. The driver
 * reports it as host memory (CU_POINTER_ATTRIBUTE_MEMORY_TYPE), and it cannot be exported (cuIpcGetMemHandle). A
 * spilled block stays in host memory until it is freed: its address is in kernels' arguments, graphs and the program's
 * own structures, and only mapped memory can be exchanged behind an address. Later allocations get device memory as
 * soon as there is room, so data moves to the device when the program frees and allocates again.
 *
 * Managed memory is not used for this: oversubscribed, it moves pages under running kernels and can hang the GPU, and
 * the program may make calls for its addresses (advice, attachment, prefetch) that leave a state which no free resets.
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

/*
 * Allocates host memory for bytes and adds it to the ledger; the caller owns the CACHED block. -EDQUOT: more than
 * GPURECLAIM_SPILL allows; -ENOTSUP: the driver cannot; -ENOMEM; or the driver's error.
 */
int gr_spill_alloc(struct gr_context *context, size_t bytes, struct gr_block **ret_block);

/* The program freed a spilled block, which the caller has claimed from the ledger: it is returned once it is idle. */
void gr_spill_free(struct gr_block *block);

/* Gives freed blocks that are idle back to the driver. True: others still wait for their fence. */
bool gr_spill_collect(struct gr_context *context);

/* The context's memory is gone: uncharges and frees the freed blocks, which have left the ledger. */
void gr_spill_context_gone(struct gr_context *context);

#endif
