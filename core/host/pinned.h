/*
 * Pinned host memory: what the program frees is kept for its next request of the same kind and about the same size.
 *
 * Facts (H200, driver 580, November 2026): 64 KiB take 1.8 ms to allocate and 0.5 ms to free, 64 MiB 37 and 8.7 ms.
 * cuMemFreeHost waits for every running kernel, and while it works no other thread can launch (1 GiB: 82 ms). There is
 * no way back without that, so what is cached goes back only while the GPU has no work, one block at a time; where it
 * always has some, only for a request that fails otherwise.
 *
 * Freed memory may still be read or written by the GPU, and every context of the process reaches it, whatever its flags
 * (unified addressing). Its next owner is the processor, which writes at once, so a barrier on the GPU is no help: a
 * block is handed out again only once an event of every context, recorded after the free, has passed. While none has,
 * fresh memory is taken. One fence (core->everyone) does this: its reach is all contexts, and no barrier is ever laid.
 * Without events each free waits, as the driver's own does.
 *
 * Blocks are the ledger's, with GR_BLOCK_HOST, and belong to the context in which they were allocated, as for the
 * driver. They are charged to core->host as GR_MEMORY_HOST, cached ones included; core->host.threshold_bytes is the
 * most that is kept, 0 for none. What finds no room goes to the driver.
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

/* Freed blocks of a class, oldest first; those that wait for their fence apart, so that none is looked at twice. */
struct gr_pinned_bin {
        struct gr_block *ready, *waiting;
};

#define GR_PINNED_SORTS_LOG2 3

struct gr_pinned {
        struct gr_lock unpin_lock; /* who gives memory back, or must wait for whoever does; held across host_free */

        struct gr_lock lock; /* guards what follows */
        /* By class of the capacity, and by a hash of context and kind, as one must not be passed by for another. */
        struct gr_pinned_bin bins[GR_CLASS_COUNT][1u << GR_PINNED_SORTS_LOG2];
};

void gr_pinned_init(struct gr_core *core);
void gr_pinned_destroy(struct gr_core *core);

/* Asks the driver for bytes, the context being current: 0 with *ret_ptr, -ENOMEM, or its error. May be called again. */
typedef int gr_pinned_allocate(void *arg, size_t bytes, uint64_t *ret_ptr);

/*
 * bytes > 0 of pinned memory for the program, of a kind: requests of different kinds never share a block. From the
 * cache, or by allocate. -ENOMEM; -EDQUOT: the host limit, with nothing cached left that could go; -E2BIG: ask the
 * driver itself; or the driver's error.
 */
int gr_pinned_alloc(struct gr_context *context, size_t bytes, unsigned kind, gr_pinned_allocate *allocate, void *arg,
                    uint64_t *ret_ptr);

/*
 * The program frees ptr. -ENOENT: not from here, ask the driver; -EALREADY: freed before; else what the driver said
 * where the block went straight back to it, and then the program still has it.
 */
int gr_pinned_free(struct gr_core *core, uint64_t ptr);

/*
 * Tries attempt again after an attempt that failed for want of memory with rc, as long as cached memory can go in its
 * favour; for that the host waits for the GPU, as the driver's own free would have done. Returns what attempt said
 * last.
 */
int gr_pinned_retry(struct gr_core *core, uint64_t bytes, int (*attempt)(void *arg), void *arg, int rc);

/* Gives back what is cached, oldest first, until it is want_bytes or the GPU has work. Returns the bytes. */
uint64_t gr_pinned_reclaim(struct gr_core *core, uint64_t want_bytes);

/*
 * Gives back what has been cached for the decay time at now_ns. Returns when to call again; 0: nothing is cached. One
 * thread at a time.
 */
uint64_t gr_pinned_decay(struct gr_core *core, uint64_t now_ns);

/* The context can reach pinned memory from now on. */
void gr_pinned_join(struct gr_context *context);

/* The context is about to be destroyed, and its work has been waited for: gives back what is cached of its memory. */
void gr_pinned_ending(struct gr_context *context);

/* It has been, and its memory with it: forgets both. */
void gr_pinned_drop(struct gr_context *context);

/* The block's memory is no longer the process's; it is not cached. */
void gr_pinned_uncharge(struct gr_block *block);

#endif
