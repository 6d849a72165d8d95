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
#ifndef GR_SEGMENT_EXPORT_H
#define GR_SEGMENT_EXPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shim.h"

#define GR_SEGMENT_MAGIC UINT64_C(0x6d65726c75707267) /* no handle of the driver begins so */

/* What the 64 bytes of a handle hold. The same block has the same bytes whenever it is asked for. */
struct gr_segment_handle {
        uint64_t magic, service; /* service: the number in the name of the exporter's socket */
        uint64_t base, bytes;    /* of the block, in the exporter */
        uint64_t memory;         /* a number of the memory there: another one when the address is used again */
        uint64_t generation;     /* of the block */
        uint64_t none[2];
};
_Static_assert(sizeof(struct gr_segment_handle) == sizeof(CUipcMemHandle), "one is copied to the other");

/*
 * The exporter's answer to a handle. After it comes a message for each piece, its bytes with its descriptor; none where
 * the memory is an allocation of the driver, or there is no such block.
 */
struct gr_segment_reply {
        uint64_t good;            /* 0: there is no such block */
        uint64_t offset_bytes;    /* of the block in its first piece, or in the allocation */
        uint64_t all_bytes;       /* of all pieces; 0: it is an allocation */
        uint64_t memory;          /* as in struct gr_segment_handle */
        CUipcMemHandle driver;    /* of an allocation */
        unsigned char device[16]; /* its UUID; zeros: unknown */
};

/*
 * Writes a handle for the live block at base, which lies in a segment and is marked as exported. False: no thread or
 * socket can be had.
 */
bool gr_segment_export(CUdeviceptr base, const struct gr_block_info *info, CUipcMemHandle *ret_handle);

/* Whether this process made the handle. */
bool gr_segment_export_is_own(const struct gr_segment_handle *handle);

/* The process exits: tells the thread to end. */
void gr_segment_export_stop(void);

/* In a child after fork: closes the descriptors of all this, so that only the parent answers and holds memory. */
void gr_segment_export_forget(void);

#endif
