/* The trace of GPURECLAIM_TRACE. */
#ifndef GR_TRACE_H
#define GR_TRACE_H

#include "base/trace_file.h"
#include "shim.h"

/*
 * Opens the file that GPURECLAIM_TRACE names, if any. Called once, in the process that uses CUDA. Returns whether there
 * is a trace.
 */
bool gr_trace_init(void);

/*
 * Called where there is a trace: before and after each allocation of the program, whose result is rc, and after each
 * free. before_ns: the time before the free.
 */
void gr_trace_begin_alloc(void);
void gr_trace_end_alloc(struct gr_context *context, CUdeviceptr ptr, size_t bytes, int rc);
void gr_trace_free(CUdeviceptr ptr, uint64_t before_ns);

#endif
