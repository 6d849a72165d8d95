/*
 * Pressure: how full the nearest limit is. That is the process's own limit or, if it is fuller, the group's, for which
 * the memory of all members counts. Any thread may call these functions. It may hold locks below GR_RANK_SLABS.
 */
#ifndef GR_PRESSURE_H
#define GR_PRESSURE_H

#include <stdint.h>

struct gr_context;
struct gr_device;

#define GR_PRESSURE_BEGIN 0.50 /* below it there is no proactive reclaim */

/* The memory that counts against a limit, and the limit. */
struct gr_pressure {
        uint64_t reserved_bytes;
        uint64_t limit_bytes; /* 0: unknown */
};

/* The nearest limit of the device. */
struct gr_pressure gr_pressure_nearest(struct gr_device *device);

/* The part of the limit that is reserved, not counting less_bytes. 0: no limit is known. */
double gr_pressure_of(struct gr_pressure pressure, uint64_t less_bytes);

/*
 * Called after memory was taken from the driver for context: sets core->memory_is_short if the limit is half full. It
 * does not notice what other members of the group take until the next call.
 */
void gr_pressure_note(struct gr_context *context);

#endif
