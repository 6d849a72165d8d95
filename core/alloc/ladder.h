/*
 * The reclamation ladder: when an allocation fails, one rung after the other gets some memory back, each one stronger
 * and more expensive than the one before. After each rung the request is tried again.
 *
 *   READY      a cached block that is somewhat larger than asked for
 *   FENCE      closes the epoch, asks which have passed, lays a barrier: quarantined blocks become usable
 *   PURGE      reclaimables give up what is idle
 *   TRIM       just enough idle cached blocks are returned to the driver, without a wait for the GPU
 *   DRIVER     the driver's own pools and graph memory are trimmed
 *   SYNC       the host waits for the GPU, epoch by epoch, and returns what becomes idle, until it is enough; where no
 *              event can be recorded, as during a capture, it waits as the driver's own free does
 *   DROP       reclaimables drop state that can be built again
 *   NEIGHBOUR  other processes on the device give back what they have cached, within a deadline; then idle ones sleep
 *   WAIT       where configured: until a thread frees memory, here or in another process, or its time is up
 *   SPILL      where configured: host memory (host/spill.h)
 *   FAIL       a report (alloc/oom_report.h). Frees of this thread go to the driver for a moment, as its framework
 *              now empties its own cache and tries again, and that must not refill the pool's cache
 *
 * DRIVER takes what the driver keeps without use and can return without harm: idle memory of memory pools (the default
 * one, the current one, those that the program made) and of graphs. It leaves the rest alone. Modules, libraries, graph
 * executables and streams have handles that the program holds. The device-side heap has the program's data. The sizes
 * of local memory and of the printf buffer are limits that the program may have set, and running kernels rely on them.
 */
#ifndef GR_LADDER_H
#define GR_LADDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_block;
struct gr_context;
struct gr_source_request;

/*
 * The ladder for a request that found neither a usable block nor fresh memory: all of it or, where request->optional,
 * up to SYNC and without FAIL. first_error: -ENOMEM of the driver or -EDQUOT of the budget. 0: the caller owns
 * *ret_block and hands it out. -ENOMEM or -EDQUOT after the last rung, or another error of the driver. May wait for the
 * GPU and call reclaimables: no lock of core/ is held.
 */
int gr_ladder_climb(struct gr_source_request *request, int first_error, struct gr_block **ret_block);

/*
 * The whole ladder for memory that is not a block: attempt charges and allocates it, and is called after each rung.
 * Cached blocks do not serve. 0 as soon as attempt returns 0; else as gr_ladder_climb.
 */
typedef int gr_ladder_attempt(void *arg);
int gr_ladder_climb_for(struct gr_context *context, size_t bytes, gr_ladder_attempt *attempt, void *arg,
                        int first_error);

/*
 * Before a call of the driver that fails badly on a full device: where the device has less than bytes and 64 MiB free,
 * reclaimables give up what is idle, and cached blocks are returned to the driver: first those that are idle, at last
 * all, after a wait for the GPU of up to GR_SYNC_NS. So no lock of core/ may be held.
 */
void gr_ladder_make_room(struct gr_context *context, uint64_t bytes);

#endif
