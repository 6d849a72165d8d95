/* Driver overhead: the memory of a device that the driver takes for itself. */
#ifndef GR_OVERHEAD_H
#define GR_OVERHEAD_H

#include "shim.h"
#include "system/environment.h"

/* How old the figure of driver overhead may be where the program asks often, as by cuMemGetInfo. NVML is slow. */
#define GR_OVERHEAD_AGE_NS UINT64_C(100000000)

/* Whether the limit counts driver overhead. */
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
 * Called before and after the driver makes a graph executable. What driver overhead grows by in between is added to
 * device->executable_bytes, at the latest when driver overhead is measured next. gr_overhead_before returns the
 * before_bytes for gr_overhead_made; 0: the overhead is not known, and gr_overhead_made must not be called. The rules
 * for locks are those of gr_overhead_look.
 */
uint64_t gr_overhead_before(struct gr_context *context);
void gr_overhead_made(struct gr_context *context, uint64_t before_bytes);

/* The driver has just taken memory for code or a context. It is not counted as part of the next executable. */
void gr_overhead_took_else(void);

/* A context has ended on device, and with it what the driver took for its executables. */
void gr_overhead_context_ended(struct gr_device *device);

#endif
