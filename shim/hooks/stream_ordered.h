/* The driver's stream-ordered pools, and the memory of graphs. */
#ifndef GR_STREAM_ORDERED_H
#define GR_STREAM_ORDERED_H

#include "shim.h"

/* Corrects the charge for the driver's own pools and graph memory of the device. Does not wait for the GPU. */
void gr_stream_ordered_refresh(struct gr_device *device);

/* Trims all pools of the device, the default one and the program's, and refreshes. A context of device is current. */
void gr_stream_ordered_trim(struct gr_device *device);

/* Trims the pools of host memory, and corrects their charge. */
void gr_stream_ordered_trim_host(void);

/*
 * cuMemFree of memory that is neither the pool's nor managed. If it frees memory of a stream-ordered pool, the driver
 * counts that memory as used for ever (docs/measurements.md, pool-free-by-cumemfree); this library counts it as idle.
 */
CUresult gr_stream_ordered_free(CUdeviceptr ptr);

/*
 * A free in stream order that has begun. Only stream_ordered.c uses the fields. The structure belongs to the caller and
 * must live until gr_stream_ordered_free_end.
 */
struct gr_stream_ordered_free {
        struct gr_stream_ordered_free *prev, *next;
        CUdeviceptr ptr;
        /* The memory's size and device, if its pool has been destroyed; else 0. */
        uint64_t orphan_bytes;
        int device;
        /*
         * The same, noted just before the pool is destroyed, as the driver cannot tell afterwards. Copied to the fields
         * above once the driver has destroyed the pool.
         */
        uint64_t found_bytes;
        int found_device;
        bool noted; /* it is in the list of the frees that have begun */
};

/*
 * Called before and after the driver's cuMemFreeAsync for memory that is not the library's, outside of captures. Memory
 * that outlives its pool stays charged until its free, also where the pool is destroyed between the two calls.
 */
void gr_stream_ordered_free_begin(struct gr_stream_ordered_free *free, CUdeviceptr ptr);
void gr_stream_ordered_free_end(struct gr_stream_ordered_free *free, CUresult result);

#endif
