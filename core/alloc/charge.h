/*
 * Allocation of memory that the pool does not serve. It is charged before the driver is asked. If the budget or the
 * driver refuses for lack of memory, cached memory is given back. Any thread may call these functions, holding no lock
 * of core/.
 */
#ifndef GR_CHARGE_H
#define GR_CHARGE_H

#include <stdint.h>

#include "account/memory_kind.h"

struct gr_context;
struct gr_core;
struct gr_device;

/*
 * Asks the driver. 0, -ENOMEM, -EDQUOT (the driver took more than was charged, and it was freed again) or the driver's
 * error. May be called again.
 */
typedef int gr_charge_allocate(void *arg);

/*
 * Charges bytes to device as kind, then calls allocate. If either fails for lack of memory, the ladder runs, and both
 * are tried again after each rung. The ladder is that of context if it is one of device, else that of any context of
 * device; without a context there is no ladder. For core->host, cached pinned memory is freed in place of a ladder.
 * Both may wait for the GPU. On failure nothing is charged.
 */
int gr_charge_accounted(struct gr_core *core, struct gr_device *device, struct gr_context *context,
                        enum gr_memory_kind kind, uint64_t bytes, gr_charge_allocate *allocate, void *arg);

/*
 * The context whose ladder serves device: wanted, if that is a context of device, else any one; NULL: device has none.
 */
struct gr_context *gr_charge_climber(struct gr_core *core, struct gr_device *device, struct gr_context *wanted);

#endif
