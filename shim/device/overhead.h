/* What the driver takes of a device by itself. */
#ifndef GR_OVERHEAD_H
#define GR_OVERHEAD_H

#include "shim.h"
#include "system/environment.h"

/* How old the figure of driver overhead may be where the program asks often, as by cuMemGetInfo. NVML is slow. */
#define GR_OVERHEAD_AGE_NS UINT64_C(100000000)

/* Whether the limit counts what the driver takes by itself. */
static inline bool gr_overhead_counted(void)
{
        return gr_options.limit_includes == GR_INCLUDES_PROCESS;
}

/*
 * Measures driver overhead, unless that was done less than most_age_ns ago: into device->driver_bytes and, where the
 * limit counts it, into the charge. Takes locks of its own and asks NVML, so the caller must hold no lock of core/ that
 * ranks above the ladder's. Keeps errno.
 */
void gr_overhead_look(struct gr_device *device, uint64_t most_age_ns);

/*
 * Called before and after the driver makes a graph executable: what driver overhead has grown by in between is added to
 * device->executable_bytes, some time later, at the latest when the overhead is measured. before returns a figure to
 * pass to made; 0: it is not known, and made is not to be called. For callers as of gr_overhead_look.
 */
uint64_t gr_overhead_before(struct gr_context *context);
void gr_overhead_made(struct gr_context *context, uint64_t before_bytes);

/* The driver has just taken memory for something else, code or a context: that is no part of the next executable. */
void gr_overhead_took_else(void);

/* A context has ended on device, and with it what the driver took for its executables. */
void gr_overhead_context_ended(struct gr_device *device);

#endif
