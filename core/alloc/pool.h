/*
 * The pool: what an allocation and a free of the program do. Freed blocks of a context wait in bins by size class,
 * where one block is one allocation of the driver, or as ranges in segments (segment/segments_serve.h).
 *
 * Functions return 0 or -errno, and leave ret_ outputs untouched on failure; errors of the driver (gr_driver_error) are
 * returned as they are. Any thread may call them, without a lock of core/, unless a comment says otherwise.
 */
#ifndef GR_POOL_H
#define GR_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account/budget.h"
#include "alloc/source.h"
#include "cache/arena.h"
#include "context/context.h"

/*
 * Allocates bytes > 0 for the program, in its current context: from the cache, from the driver, or through the ladder.
 * -ENOMEM: no memory; -EDQUOT: the hard limit; -E2BIG: above GR_BLOCK_MAX_BYTES, ask the driver itself.
 */
int gr_pool_alloc(struct gr_context *context, size_t bytes, uint64_t *ret_ptr);

/* As gr_pool_alloc, where less would do: the ladder ends before DROP, and a failure is neither reported nor counted. */
int gr_pool_alloc_optional(struct gr_context *context, size_t bytes, uint64_t *ret_ptr);

/* The fast path of gr_pool_alloc; 0 < bytes <= GR_BLOCK_MAX_BYTES. 0: gr_pool_alloc_slow has to go on. */
static inline uint64_t gr_pool_alloc_fast(struct gr_context *context, size_t bytes)
{
        return gr_arena_alloc(context, bytes);
}

/*
 * The slow path of gr_pool_alloc, for a request for which gr_pool_alloc_fast returned 0. Its steps; the first that has
 * a block ends it, and the block is handed out:
 *
 *   1 own bin or fastbin      if blocks wait in that of the thread, and a barrier is cheap: the barrier, then one of
 *                             them. 2 and 3 are left out then; sometimes 4 comes first (prefer_fresh_block)
 *   2 gr_source_take          a usable block of any bin, or a usable range (alloc/source.h)
 *   3 a barrier or a look     as 2, after a barrier. Where that is not cheap: after a look at the events, and after a
 *                             barrier only where much waits. If a range waits in the fastbin, the look comes before 2
 *   4 gr_source_fresh         fresh memory of the driver, within the budget
 *   5 gr_ladder_climb         what each rung of the ladder gets back (alloc/ladder.h)
 *
 * take_cached in pool.c is 1 to 3. Returns as gr_pool_alloc.
 */
int gr_pool_alloc_slow(struct gr_context *context, size_t bytes, uint64_t *ret_ptr);

/*
 * As gr_pool_alloc, but always fresh memory, by another call of the driver, which also chooses the size (pitched
 * memory): allocate makes the call and sets *ret_ptr and *ret_bytes. expected_bytes: what it will most likely take.
 */
int gr_pool_alloc_by(struct gr_context *context, size_t expected_bytes, gr_source_allocate *allocate, void *arg,
                     uint64_t *ret_ptr);

/*
 * The program frees ptr. -ENOENT: no block of the pool, ask the driver; -EALREADY: a block of the pool, but the program
 * does not have it (freed twice). Any other error comes from the driver, which refused a block that could not be
 * cached; the program then still has it.
 */
int gr_pool_free(struct gr_core *core, uint64_t ptr);

/* What gr_arena_free has done of a free. */
struct gr_begun_free {
        struct gr_context *context; /* NULL: nothing */
        bool should_close;
};

/* After the calling thread put a block into the cache: whether the cache now holds more than it may. */
bool gr_pool_holds_too_much(struct gr_context *context);

/* After a block was cached: the background thread has to give back what is too much, or to begin with decay. */
static inline bool gr_pool_wants_wake(struct gr_context *context)
{
        struct gr_core *core = context->core;

        return (!gr_budget_is_free(context->device) && gr_pool_holds_too_much(context)) ||
               (__builtin_expect(!atomic_load(&core->decay_armed), 0) && core->config.decay_ns);
}

/* The fast path of gr_pool_free. False: gr_pool_free_slow has to go on from *freed, which this sets. */
static inline bool gr_pool_free_fast(struct gr_core *core, uint64_t ptr, struct gr_begun_free *freed)
{
        freed->should_close = false;
        freed->context = gr_arena_free(core, ptr, &freed->should_close);
        return __builtin_expect(freed->context && !freed->should_close && !gr_pool_wants_wake(freed->context), 1);
}

/* The slow path of gr_pool_free, after gr_pool_free_fast; freed: all zero if that was skipped. */
int gr_pool_free_slow(struct gr_core *core, uint64_t ptr, struct gr_begun_free freed);

/* As gr_pool_free, for a block that no work uses any more: does not wait, and the next owner need not either. */
int gr_pool_free_idle(struct gr_core *core, uint64_t ptr);

/*
 * As gr_pool_free, in the order of a stream: a block that is not cached is given to the driver by give_back, which does
 * not wait; its error is returned. Ranges and host memory do not go to the driver this way.
 */
typedef int gr_pool_give_back(void *arg, uint64_t ptr);
int gr_pool_free_in_order(struct gr_core *core, uint64_t ptr, gr_pool_give_back *give_back, void *arg);

/*
 * The driver has given ptr to the program in a call that the pool does not serve. A block that the pool lists there was
 * freed without the pool's knowledge, as the driver gives out no address twice. It is removed; otherwise the free of
 * the new memory would cache it under the old block's size. No lock of core/ is held.
 */
void gr_pool_given(struct gr_core *core, uint64_t ptr);

struct gr_graph_hold;

/* Gives the program a block for a capture, by gr_graph_hold_take. False: there is none. No lock of core/ is held. */
bool gr_pool_alloc_in_hold(struct gr_graph_hold *hold, struct gr_context *context, bool single_stream, size_t bytes,
                           uint64_t *ret_ptr);

/* gr_graph_hold_end. No lock of core/ is held. */
void gr_pool_end_capture(struct gr_graph_hold *hold, bool single_stream);

/* Frees what was parked for holds that have no users any more. Allocations do so, too. No lock of core/ is held. */
void gr_pool_collect(struct gr_core *core);

/*
 * The same for a context whose fence is blind (gr_fence_is_blind): waits for the GPU, as the driver's own free does. No
 * lock is held.
 */
void gr_pool_collect_blind(struct gr_context *context);

/*
 * The bytes of the device's slabs that no block takes, if all blocks in slabs are cached, so that all could be returned
 * to the driver; else 0.
 */
uint64_t gr_pool_slab_bytes(struct gr_core *core, struct gr_device *device);

#endif
