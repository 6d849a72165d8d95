/*
 * Pressure: how full the nearest limit is. The limit is the process's own, or the group's, with what all members have,
 * where that is fuller.
 */
#ifndef GR_PRESSURE_H
#define GR_PRESSURE_H

#include <stdint.h>

struct gr_context;
struct gr_device;

#define GR_PRESSURE_BEGIN 0.50 /* below it nothing has to be given back ahead of need */

/* The memory that counts against a limit, and the limit. */
struct gr_hold {
        uint64_t reserved_bytes;
        uint64_t limit_bytes; /* 0: unknown */
};

/* The nearest limit of the device. */
struct gr_hold gr_pressure_nearest(struct gr_device *device);

/* What part of the limit is held, not counting less_bytes of it. 0 where no limit is known. */
double gr_pressure_of(struct gr_hold hold, uint64_t less_bytes);

/* After memory was taken from the driver for context: sets pressed where the limit is half full. What other members of
 * the group take is noticed at the next call. */
void gr_pressure_note(struct gr_context *context);

#endif
