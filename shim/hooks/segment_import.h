/*
 * Memory of other processes that this one opens by the handles of segment_export.h. Any thread may call these
 * functions.
 */
#ifndef GR_SEGMENT_IMPORT_H
#define GR_SEGMENT_IMPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shim.h"

/* Memory of another process that is open here. */
struct gr_segment_import {
        CUcontext context; /* in which it was opened */
        CUdeviceptr base;  /* the block's first byte */
        size_t bytes;      /* what the other process asked for */
        int ordinal;       /* of the device that the memory lies on; -1: this process does not see that device */
};

/* Whether a handle was made by gr_segment_export, in any process. */
bool gr_segment_import_made(const CUipcMemHandle *handle);

/*
 * Opens a handle in context, which is current and of device dev. The first open maps the memory and counts it as
 * imported; further ones return the same address and increase a count. May wait for the exporter. On failure nothing is
 * written. CUDA_ERROR_INVALID_CONTEXT: the handle is this process's own; CUDA_ERROR_INVALID_HANDLE: another context of
 * the process has it open; CUDA_ERROR_INVALID_VALUE: the block or its process is gone, or that process is of a user
 * whom this one does not trust; CUDA_ERROR_MAP_FAILED: no answer; or the driver's error.
 */
CUresult gr_segment_import_open(CUcontext context, CUdevice dev, const CUipcMemHandle *handle, CUdeviceptr *ret_ptr);

/*
 * Counts memory of another process as imported, and enters it in the accounts under key, until the end of context. Also
 * for memory that was opened in another way.
 */
void gr_segment_import_count(struct gr_device *device, CUcontext context, uint64_t key, uint64_t bytes);

/* Describes the open memory that ptr lies in. -ENOENT: there is none. */
int gr_segment_import_find(CUdeviceptr ptr, struct gr_segment_import *ret_import);

/*
 * Decreases the count of what is open at base; at 0 it waits for the context's work and unmaps the memory. -ENOENT:
 * nothing is open there, and nothing was written.
 */
int gr_segment_import_close(CUdeviceptr base, CUresult *ret_result);

/* The context has gone: unmaps what was open in it. */
void gr_segment_import_context_gone(CUcontext context);

#endif
