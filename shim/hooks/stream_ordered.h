/* The driver's stream-ordered pools, and the memory of graphs. */
#ifndef GR_STREAM_ORDERED_H
#define GR_STREAM_ORDERED_H

#include "shim.h"

/* Corrects the charge for the driver's own pools and graph memory of the device. Does not wait for the GPU. */
void gr_async_refresh(struct gr_device *device);

/* The same after trimming all pools: the default one and the program's. A context of device is current. */
void gr_async_trim(struct gr_device *device);

/* The same for pools of host memory. */
void gr_async_trim_host(void);

/*
 * cuMemFree of memory that is neither the pool's nor managed. The driver counts memory of a stream-ordered pool that
 * was freed so as used for ever (docs/measurements.md, pool-free-by-cumemfree); this library counts it as idle.
 */
CUresult gr_async_free(CUdeviceptr ptr);

/*
 * A free in stream order that has begun. Only stream_ordered.c uses the fields. The structure belongs to the caller and
 * must live until gr_async_free_end.
 */
struct gr_async_free {
        struct gr_async_free *prev, *next;
        CUdeviceptr ptr;
        uint64_t orphan_bytes; /* size, where its pool was destroyed before the driver freed it; else 0 */
        uint64_t found_bytes;  /* the same while its pool is being destroyed */
        int device, found_device;
        bool noted; /* in the list of those that have begun */
};

/*
 * Called before and after the driver's cuMemFreeAsync, outside of captures, of memory that is not this library's.
 * Memory that outlived its pool stays charged until then, also where the pool is destroyed between the two calls.
 */
void gr_async_free_begin(struct gr_async_free *free, CUdeviceptr ptr);
void gr_async_free_end(struct gr_async_free *free, CUresult result);

/*
 * Whether the stream is being captured, or cannot be asked because another one is. Costs nothing while there is no
 * capture. null_is_own: the caller is a function whose stream 0 is the thread's own. For cuStreamIsCapturing 0 is the
 * legacy stream, which cannot be asked while any blocking stream is captured.
 */
bool gr_async_captured(CUstream stream, bool null_is_own);

/*
 * A graph is about to reserve memory. Charges need_bytes less the idle graph memory, and stores that in
 * *ret_reserved_bytes. may_have_it: the graph had its memory before a trim, which may have left it; then all reserved
 * graph memory is deducted, not only the idle part. -EDQUOT: the limit; nothing is charged. After a success the caller
 * must call settle, also where the launch fails: it corrects the charge to what the driver has reserved.
 */
int gr_async_graph_reserve(struct gr_device *device, uint64_t need_bytes, bool may_have_it,
                           uint64_t *ret_reserved_bytes);
void gr_async_graph_settle(struct gr_device *device, uint64_t reserved_bytes);

/* Some graph may allocate: graphs that are instantiated later are searched for allocations. */
void gr_graph_memory_seen(void);

bool gr_graph_memory(void);  /* whether any graph may have allocated */
void gr_graph_trimmed(void); /* idle graph memory was returned to the driver */

/* How often that happened, by the program or the library, plus 1. */
extern _Atomic uint64_t gr_graph_trims GR_HIDDEN;

#endif
