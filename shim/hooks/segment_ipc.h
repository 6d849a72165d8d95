/*
 * Legacy IPC (cuIpcGetMemHandle) of blocks that lie in segments. The driver's handle stands for a whole allocation, and
 * there is none for mapped memory; so the library makes a handle of its own. A process under the library that opens it
 * asks the exporter for the memory, and gets one descriptor for each piece that the block lies in; it maps these side by
 * side. Where the segment is an allocation of the driver it gets the driver's handle for that. No descriptor of memory
 * stays open. Like the driver's, a handle stands for the whole block, whatever the offset that it was asked for, until
 * the block is freed. What is open stays, whatever the exporter does.
 *
 * The exporter listens on a Unix socket with a random abstract name, in a thread, from its first export on; workers
 * answer. It answers processes of its own user and of root. A process without the library cannot open such a handle: the
 * driver refuses it (docs/measurements.md, mapped-export).
 *
 * Any thread may call these functions; errno is not kept. No lock is held across waits for the other process or the GPU,
 * so that an open or close that waits delays only those of the same memory.
 */
#ifndef GR_SEGMENT_IPC_H
#define GR_SEGMENT_IPC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shim.h"

/* Memory of another process that is open here. */
struct gr_segment_import {
        CUcontext context; /* it was opened in */
        CUdeviceptr base;  /* of the block */
        size_t bytes;      /* that the other process asked for */
        int ordinal;       /* of the device that it lies on; -1: this process does not see that device */
};

/*
 * Writes a handle for the live block at base, which lies in a segment and is marked as exported. False: no thread or
 * socket can be had.
 */
bool gr_segment_ipc_export(CUdeviceptr base, const struct gr_block_info *info, CUipcMemHandle *ret_handle);

/* Whether a handle was made by gr_segment_ipc_export, in any process. */
bool gr_segment_ipc_made(const CUipcMemHandle *handle);

/*
 * Opens a handle in context, of device dev, which is current, and counts it as imported. A context opens memory once,
 * and counts how often. May wait for the exporter's answer. On failure nothing is written: CUDA_ERROR_INVALID_CONTEXT:
 * it is this process's own; CUDA_ERROR_INVALID_VALUE: the block or its process is gone, or of another user;
 * CUDA_ERROR_MAP_FAILED: no answer; or the driver's error.
 */
CUresult gr_segment_ipc_open(CUcontext context, CUdevice dev, const CUipcMemHandle *handle, CUdeviceptr *ret_ptr);

/* What is open at ptr; -ENOENT. */
int gr_segment_ipc_find(CUdeviceptr ptr, struct gr_segment_import *ret_import);

/*
 * Closes what is open at base once; the last time it waits for the context's work and unmaps the memory. -ENOENT:
 * nothing is open there, and nothing was written.
 */
int gr_segment_ipc_close(CUdeviceptr base, CUresult *ret_result);

/* The context has been destroyed: unmaps what was open in it. */
void gr_segment_ipc_end(CUcontext context);

/* The process exits: tells the thread to end. */
void gr_segment_ipc_stop(void);

/* In a child after fork: closes the descriptors of all this, so that only the parent answers and holds memory. */
void gr_segment_ipc_forget(void);

#endif
