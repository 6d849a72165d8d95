/*
 * Legacy IPC (cuIpcGetMemHandle) of blocks that lie in segments. The driver makes handles of whole allocations only,
 * and none of mapped memory. So the library makes a handle of its own. The importer, a process under the library, sends
 * it to the exporter and receives one descriptor for each piece that the block lies in. It maps the pieces side by side
 * and closes the descriptors. Where the segment is an ordinary allocation of the driver, the importer receives the
 * driver's handle instead. As with the driver, a handle stands for the whole block, whatever offset it was asked for,
 * until the block is freed. An open mapping and its content survive that the exporter frees the block, or ends.
 *
 * The exporter listens on a Unix socket with a random abstract name, in a thread, from its first export on. Workers
 * answer; where too many processes ask at once, the thread itself does. If the program closes the socket, handles
 * cannot be opened until the next export. The exporter answers processes of its own user and of root. A process without
 * the library cannot open such a handle: the driver refuses it (docs/measurements.md, mapped-export).
 *
 * Any thread may call these functions; they may change errno. No lock is held across waits for the other process or the
 * GPU, so that an open or close that waits delays only those of the same memory.
 */
#ifndef GR_SEGMENT_EXPORT_H
#define GR_SEGMENT_EXPORT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "shim.h"

#define GR_SEGMENT_MAGIC UINT64_C(0x6d65726c75707267) /* no handle of the driver begins so */

/*
 * What the 64 bytes of a handle hold. All handles of one block are equal, as long as the exporter's socket has one
 * name.
 */
struct gr_segment_handle {
        uint64_t magic, service; /* service: the number in the name of the exporter's socket */
        uint64_t base, bytes;    /* of the block, in the exporter */
        uint64_t memory;         /* identifies the physical memory there: it differs if other memory is there later */
        uint64_t generation;     /* of the block */
        uint64_t reserved[2];    /* 0 */
};
_Static_assert(sizeof(struct gr_segment_handle) == sizeof(CUipcMemHandle), "one is copied to the other");

/*
 * The exporter's answer to a handle. One message follows for each piece, which holds its size and comes with its
 * descriptor; none where the memory is an allocation of the driver, or there is no such block.
 */
struct gr_segment_reply {
        uint64_t good;            /* 0: there is no such block */
        uint64_t offset_bytes;    /* of the block in its first piece, or in the allocation */
        uint64_t all_bytes;       /* the sum of the pieces; 0: the memory is one allocation of the driver */
        uint64_t memory;          /* as in struct gr_segment_handle */
        CUipcMemHandle driver;    /* the driver's handle, of an allocation */
        unsigned char device[16]; /* its UUID; zeros: unknown */
};

/*
 * Writes a handle for the live block at base, which lies in a segment and is marked as exported. False: no thread or
 * socket can be had, or the driver refuses a handle of its own.
 */
bool gr_segment_export(CUdeviceptr base, const struct gr_block_info *info, CUipcMemHandle *ret_handle);

/* Whether this process made the handle. */
bool gr_segment_export_is_own(const struct gr_segment_handle *handle);

/* The process exits: tells the thread to end. */
void gr_segment_export_stop(void);

/*
 * In a child after fork: closes the socket and the descriptors in transit, so that only the parent answers, and the
 * child keeps no memory.
 */
void gr_segment_export_forget(void);

#endif
