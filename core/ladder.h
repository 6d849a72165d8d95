/*
 * The reclamation ladder: when an allocation fails, one rung after the other gets some memory back, each stronger and
 * dearer than the one before, with a new try after each.
 *
 *   READY      a cached block that is somewhat larger than asked for
 *   FENCE      closes the epoch, asks which have passed, lays a barrier: quarantined blocks become usable
 *   PURGE      reclaimables give up what is idle
 *   TRIM       just enough idle cached blocks go back to the driver, without a stall
 *   DRIVER     the driver's own pools and graph memory are trimmed
 *   SYNC       the host waits for the GPU, epoch by epoch, and gives back what that frees, until it is enough
 *   DROP       reclaimables drop state that can be built again
 *   NEIGHBOUR, WAIT, SPILL: other processes, time, host memory; nothing is registered for them yet
 *   FAIL       a report of what each rung gave; frees go straight to the driver for a moment, because the framework
 * above now runs its own release-and-retry and must not merely refill the cache
 */
#ifndef GR_LADDER_H
#define GR_LADDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ladder_levels.h"
#include "lock.h"

struct gr_block;
struct gr_context;
struct gr_core;

#define GR_RECLAIMABLES_MAX 32

/* Somebody who holds device memory that can be had back. Owned by the caller, valid until unregistered. */
struct gr_reclaimable {
        const char *name;
        /* Give up what is idle. NULL for nothing. Returns 0 or -errno. */
        int (*purge)(void *arg, int device, uint64_t want_bytes);
        /* Drop state that can be built again. NULL for nothing. Returns 0 or -errno. */
        int (*drop)(void *arg, int device, uint64_t want_bytes);
        void *arg;
};

struct gr_registry {
        struct gr_lock lock; /* guards what follows; not held while a reclaimable runs */
        struct gr_reclaimable *entries[GR_RECLAIMABLES_MAX];
        unsigned failures[GR_RECLAIMABLES_MAX]; /* in a row; an entry that fails too often is skipped */
};

void gr_registry_init(struct gr_registry *registry);
void gr_registry_destroy(struct gr_registry *registry);

/* -ENOSPC, or -EEXIST where it is registered already. */
int gr_reclaimable_register(struct gr_core *core, struct gr_reclaimable *reclaimable);

/* -ENOENT. A call that is under way in another thread may still be running afterwards. */
int gr_reclaimable_unregister(struct gr_core *core, struct gr_reclaimable *reclaimable);

/*
 * Runs one rung, PURGE to DROP, for want_bytes on the context's device, on all of its contexts. Returns the bytes that
 * the device got back (for PURGE and DROP: as far as our own accounts can tell). Re-entrant: a reclaimable may free,
 * allocate and reclaim.
 */
uint64_t gr_reclaim(struct gr_context *context, enum gr_level level, uint64_t want_bytes);

/*
 * The whole ladder for a request that found neither a usable block nor fresh memory. first_error is what the driver or
 * the budget said. 0 with a block that is the caller's to hand out; -ENOMEM or -EDQUOT after FAIL; or another error of
 * the driver. allocate and arg as in gr_pool_fresh; with allocate set cached blocks do not serve.
 */
int gr_ladder_climb(struct gr_context *context, size_t bytes,
                    int (*allocate)(void *arg, uint64_t *ret_ptr, size_t *ret_bytes), void *arg, int first_error,
                    struct gr_block **ret_block);

/*
 * The same for memory that is no block: attempt charges and allocates it, and is called after each rung. Cached blocks
 * do not serve. 0 as soon as attempt says 0; else as above.
 */
int gr_ladder_climb_for(struct gr_context *context, size_t bytes, int (*attempt)(void *arg), void *arg,
                        int first_error);

#endif
