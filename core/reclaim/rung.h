/*
 * The rungs of the ladder (alloc/ladder.h) that get memory back from elsewhere, each by itself. The ladder runs them
 * for a request. Proactive reclaim, neighbours and the program itself run them although no request waits.
 */
#ifndef GR_RUNG_H
#define GR_RUNG_H

#include <stdbool.h>
#include <stdint.h>

#include "base/ladder_rungs.h"

struct gr_context;
struct gr_core;

#define GR_SYNC_NS UINT64_C(60000000000) /* longest wait for the GPU; the driver's own free waits for ever */

/*
 * Runs one rung, PURGE to NEIGHBOUR, for want_bytes on the context's device, on all contexts of that device. Returns
 * the bytes that the device got back; for PURGE and DROP the bytes that the program has freed, which may be in the
 * cache; for NEIGHBOUR what the neighbours report. May wait for the GPU and call reclaimables, so no lock of core/ is
 * held. May be nested: a reclaimable may free, allocate and reclaim.
 */
uint64_t gr_rung_run(struct gr_context *context, enum gr_rung rung, uint64_t want_bytes);

/*
 * As gr_rung_run, where no context is at hand, for TRIM, DRIVER and SYNC: visits one of the device's contexts
 * meanwhile. 0 where there is none.
 */
uint64_t gr_rung_run_on(struct gr_core *core, int device, enum gr_rung rung, uint64_t want_bytes);

/*
 * As gr_rung_run, for TRIM, DRIVER and SYNC with the device's ladder_lock held, which is released while the host waits.
 * *ret_overtaken: whether other threads freed memory during such a wait, so that another run may give more.
 */
uint64_t gr_rung_run_locked(struct gr_context *context, enum gr_rung rung, uint64_t want_bytes, bool *ret_overtaken);

#endif
