/*
 * Pinned host memory: a block that the program frees is cached for its next request of the same kind and about the same
 * size.
 *
 * The driver takes milliseconds to allocate or free it. cuMemFreeHost waits for every running kernel, and no other
 * thread can launch meanwhile (docs/measurements.md, pinned-memory). No other call frees it. So cached blocks are
 * returned to the driver one at a time and only while the GPU has no work. If it always has work, they are returned
 * only for a request that would fail otherwise.
 *
 * The GPU may still read or write freed memory, and every context of the process reaches it, whatever its flags
 * (unified addressing). The next user is the processor, which may write at once, so a barrier on the GPU does not help:
 * a block is handed out again only when events of all contexts, recorded after its free, have passed. Until then fresh
 * memory is taken. One fence does this (core->process_fence): all contexts are its accessors, and no barrier is laid on
 * it. Where an older driver cannot record such events each free waits, as the driver's own does.
 *
 * Blocks are in the ledger with GR_BLOCK_HOST, and belong to the context in which they were allocated, as for the
 * driver. They are charged to core->host as GR_MEMORY_HOST, also while cached. At most core->host->threshold_bytes stay
 * cached, 0 for none; a block beyond that goes to the driver.
 *
 * Any thread may call these functions. It holds no lock of core/ except, at most, a ladder_lock.
 */
#ifndef GR_PINNED_H
#define GR_PINNED_H

#include <stddef.h>
#include <stdint.h>

#include "base/lock.h"
#include "base/size_class.h"

struct gr_block;
struct gr_context;
struct gr_core;

/*
 * Freed blocks, oldest first. Those that wait for their fence have a list of their own, so that a look for a usable
 * block does not pass them.
 */
struct gr_pinned_bin {
        struct gr_block *usable, *waiting;
};

#define GR_PINNED_SORTS_LOG2 3

struct gr_pinned {
        struct gr_lock unpin_lock; /* of threads that return memory, or wait for one that does; held across host_free */

        struct gr_lock lock; /* guards what follows */
        /* By class of the capacity and hash of context and kind, as a block serves only its own context and kind. */
        struct gr_pinned_bin bins[GR_CLASS_COUNT][1u << GR_PINNED_SORTS_LOG2];
};

/* The bytes to ask the driver for. */
static inline size_t gr_pinned_capacity(size_t bytes)
{
        return gr_is_small(bytes) ? gr_class_block_bytes(bytes) : gr_pinned_footprint(bytes);
}

/* Makes core->pinned an empty cache. */
void gr_pinned_init(struct gr_core *core);
void gr_pinned_destroy(struct gr_core *core);

/*
 * A cached block for a request of bytes > 0, in the ledger as CACHED; the caller owns it. A block serves its own
 * context and requests of one kind only. NULL: none is idle.
 */
struct gr_block *gr_pinned_take(struct gr_context *context, size_t bytes, unsigned kind);

/*
 * The program frees ptr. -ENOENT: no pinned block, ask the driver; -EALREADY: freed twice. Any other error is the
 * driver's, to which the block was to go at once; the program then still has it.
 */
int gr_pinned_free(struct gr_core *core, uint64_t ptr);

/*
 * After attempt failed with rc: if that was for lack of memory, returns cached memory to the driver and tries again,
 * until attempt does not lack memory or nothing more can be returned. The host waits for the GPU for that, as in the
 * driver's own free. Returns the last result of attempt.
 */
int gr_pinned_retry(struct gr_core *core, uint64_t bytes, int (*attempt)(void *arg), void *arg, int rc);

/*
 * Returns cached blocks to the driver, oldest first, until they are want_bytes or the GPU has work. Returns the bytes.
 */
uint64_t gr_pinned_reclaim(struct gr_core *core, uint64_t want_bytes);

/*
 * Returns to the driver what has been cached for the decay time at now_ns, as far as the GPU has no work. Returns when
 * to call again, at the earliest after step_ns; 0: nothing is cached. One thread at a time.
 */
uint64_t gr_pinned_decay(struct gr_core *core, uint64_t now_ns, uint64_t step_ns);

/* A new context: it can reach all pinned memory, so frees have to wait for its work, too. */
void gr_pinned_join(struct gr_context *context);

/* The context is about to be destroyed, and its work is done: returns its cached memory to the driver. */
void gr_pinned_ending(struct gr_context *context);

/* The context has been destroyed, and its memory with it: frees the structures, and waits for its work no longer. */
void gr_pinned_context_gone(struct gr_context *context);

#endif
