/*
 * The pool: per context, bins of freed blocks by size class, where one block is one driver allocation; or segments that
 * split (split.h).
 *
 * Functions return 0 or -errno, and leave ret_ outputs untouched on failure; the driver's own errors (gr_driver_error)
 * travel through. Any thread may call them unless a comment says otherwise.
 */
#ifndef GR_POOL_H
#define GR_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core.h"

/*
 * An allocation for the program, in its current context: from the cache, from the driver, or through the ladder.
 * -ENOMEM: no memory; -EDQUOT: the hard limit; -E2BIG: above GR_BLOCK_MAX_BYTES, ask the driver itself. bytes > 0.
 */
int gr_pool_alloc(struct gr_context *context, size_t bytes, uint64_t *ret_ptr);

/* As gr_pool_alloc goes on where gr_arena_alloc had nothing; bytes are no more than GR_BLOCK_MAX_BYTES. */
int gr_pool_alloc_slow(struct gr_context *context, size_t bytes, uint64_t *ret_ptr);

/*
 * As gr_pool_alloc, for memory that only another call of the driver can size: allocate is called where the cache cannot
 * serve, and sets *ret_ptr and *ret_bytes. expected_bytes is what it will most likely take.
 */
typedef int gr_pool_allocate(void *arg, uint64_t *ret_ptr, size_t *ret_bytes);
int gr_pool_alloc_by(struct gr_context *context, size_t expected_bytes, gr_pool_allocate *allocate, void *arg,
                     uint64_t *ret_ptr);

/*
 * The program frees ptr. -ENOENT: not ours, ask the driver; -EALREADY: ours, but not the program's (freed twice); else
 * what the driver said where the block went straight back to it, and then the program still has it.
 */
int gr_pool_free(struct gr_core *core, uint64_t ptr);

/* As gr_pool_free goes on where gr_arena_free has no such block. */
int gr_pool_free_slow(struct gr_core *core, uint64_t ptr);

/*
 * As gr_pool_free, in the order of a stream: what goes to the driver goes there by give_back, which does not wait, and
 * whose error is returned where it is not 0.
 */
typedef int gr_pool_give_back(void *arg, uint64_t ptr);
int gr_pool_free_in_order(struct gr_core *core, uint64_t ptr, gr_pool_give_back *give_back, void *arg);

/* Where it had one: what is left to do after much was freed (of gr_arena_free), or where gr_pool_wants_wake. */
void gr_pool_freed(struct gr_context *context, bool much);

/* After the calling thread cached something: whether there is excess. */
bool gr_pool_holds_too_much(struct gr_context *context);

/* After something was cached: the helper has excess to give back, or must begin to count the time. */
static inline bool gr_pool_wants_wake(struct gr_context *context)
{
        struct gr_core *core = context->core;

        return (!gr_budget_is_free(context->device) && gr_pool_holds_too_much(context)) ||
               (__builtin_expect(!atomic_load(&core->decay_armed), 0) && core->config.decay_ns);
}

/*
 * The driver has given ptr to the program in a way that the pool does not serve. A block of ours there went behind our
 * back, as the driver gives no address out twice: were it to stay, the free of what lies there now would hand out its
 * address again, at another size. No lock of core/ is held.
 */
void gr_pool_given(struct gr_core *core, uint64_t ptr);

/* The rest of the device's slabs, where all that lies in them is cached and would go back with it; else 0. */
uint64_t gr_pool_slab_bytes(struct gr_core *core, struct gr_device *device);

/* Whether the context has no cached block. */
bool gr_pool_empty(struct gr_context *context);

/* The block's memory is no longer the process's: off the device's accounts with it. */
void gr_block_uncharge(struct gr_block *block);

/* That, and the structure is freed. */
void gr_block_drop(struct gr_block *block);

/* What streams have got to leaves the accounts. Returns the bytes that the device got back. Waits for nothing. */
uint64_t gr_pool_left(struct gr_context *context);

/* For the ladder. */

/* The cached block that serves a request best, taken from its bin; NULL. may_be_larger: look at larger classes, too. */
struct gr_block *gr_pool_take(struct gr_context *context, size_t bytes, bool may_be_larger);

/* A block from the driver, charged and in the ledger. -EDQUOT, -ENOMEM, or the driver's error. */
int gr_pool_fresh(struct gr_context *context, size_t bytes, gr_pool_allocate *allocate, void *arg,
                  struct gr_block **ret_block);

#endif
