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

#endif
