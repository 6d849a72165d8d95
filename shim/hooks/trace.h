/* The trace of allocations and frees, and files for reports. */
#ifndef GR_TRACE_H
#define GR_TRACE_H

#include "shim.h"

/*
 * Opens and empties the file that an option names for a report. Non-blocking, because a FIFO without a reader must not
 * stop the program. Never the number of a standard stream. -1: failed, and the log has said why.
 */
int gr_trace_open_report(const char *option, const char *path);

extern _Atomic bool gr_trace_on GR_HIDDEN;

/* Opens the file that GPURECLAIM_TRACE names, if any; once, in the process that uses CUDA. */
void gr_trace_init(void);
void gr_trace_end(void);

/* Called where gr_trace_on is set. A free is noted before it happens, because its address may be reused at once. */
void gr_trace_alloc(CUdeviceptr ptr, size_t bytes);
void gr_trace_free(CUdeviceptr ptr);

static inline bool gr_trace_is_on(void)
{
        return __builtin_expect(atomic_load_explicit(&gr_trace_on, memory_order_relaxed), 0);
}

#endif
