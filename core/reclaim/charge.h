/*
 * A request for memory that the pool does not serve: it is charged before the driver is asked, and where either refuses
 * for want of memory, cached memory goes back. Any thread may call these functions, holding no lock of core/.
 */
#ifndef GR_CHARGE_H
#define GR_CHARGE_H

#include <stdint.h>

#include "account/memory_kind.h"

struct gr_context;
struct gr_core;
struct gr_device;

/* Asks the driver; 0, -ENOMEM, -EDQUOT (it took more than was charged: taken back) or its error. May be called again.
 */
typedef int gr_accounted_allocate(void *arg);

/*
 * Charges bytes to device as kind, then calls allocate; where either refuses for want of memory, the ladder runs, and
 * both are tried again after each rung. context: whose ladder; NULL: one of device, or no ladder where it has none. For
 * core->host cached pinned memory goes instead.
 * On failure nothing is charged.
 */
int gr_accounted_charge(struct gr_core *core, struct gr_device *device, struct gr_context *context,
                        enum gr_memory_kind kind, uint64_t bytes, gr_accounted_allocate *allocate, void *arg);

/* The context whose ladder serves device: wanted where it is of that device, else any; NULL: it has none. */
struct gr_context *gr_climber(struct gr_core *core, struct gr_device *device, struct gr_context *wanted);

#endif
