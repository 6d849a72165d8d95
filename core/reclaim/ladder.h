/*
 * The reclamation ladder: when an allocation fails, one rung after the other gets some memory back, each stronger and
 * dearer than the one before, with a new try after each.
 *
 *   READY      a cached block that is somewhat larger than asked for
 *   FENCE      closes the epoch, asks which have passed, lays a barrier: quarantined blocks become usable
 *   PURGE      reclaimables give up what is idle
 *   TRIM       just enough idle cached blocks go back to the driver, without a stall
 *   DRIVER     the driver's own pools and graph memory are trimmed
 *   SYNC       the host waits for the GPU, epoch by epoch, and gives back what that frees, until it is enough; where no
 *              fence can be had, as during a capture, the way the driver's own free waits
 *   DROP       reclaimables drop state that can be built again
 *   NEIGHBOUR  other processes on the card give back what they have cached, within a deadline
 *   WAIT       where asked for: until somebody frees, here or in another process, or its time is up
 *   SPILL      where asked for: host memory (spill.h)
 *   FAIL       a report of what each rung gave; frees go straight to the driver for a moment, because the framework
 *              above now runs its own release-and-retry and must not merely refill the cache
 *
 * Of what the driver keeps for itself, DRIVER takes what nobody uses and nobody has to be asked for: idle memory of
 * pools (the default one, the current one, those that the program made) and of graphs. tests/gpu/caches prints what
 * the rest holds and which call would give it back. It is not ours to call: modules, libraries, graph executables and
 * streams go with handles that the program has, the device-side heap with the program's data, and the sizes of local
 * memory and of the printf buffer are limits that the program may have set, which running kernels rely on.
 */
#ifndef GR_LADDER_H
#define GR_LADDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "reclaim/ladder_levels.h"

struct gr_block;
struct gr_context;
struct gr_core;

/*
 * Runs one rung, PURGE to NEIGHBOUR, for want_bytes on the context's device, on all of its contexts. Returns the bytes
 * that the device got back; for PURGE and DROP those that the program no longer holds, which lie in the cache at first;
 * for NEIGHBOUR what the others say.
 * Re-entrant: a reclaimable may free, allocate and reclaim.
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

/*
 * Ahead of a call of the driver that does not bear a full card: where the card has less than bytes, and somewhat more,
 * to spare, what is only cached goes back.
 */
void gr_ladder_make_room(struct gr_context *context, uint64_t bytes);

#endif
