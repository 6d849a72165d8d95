/*
 * What core/ needs from a CUDA driver, as a table of operations: shim/ fills it with the real driver, tests with a
 * scripted one. core/ itself knows neither CUDA nor a clock.
 *
 * Contexts and events are opaque handles. Every operation may be called from any thread, with any context current or
 * none. Operations return 0, -ENOMEM (the device is full), -EAGAIN (event_query: not passed yet), or
 * gr_driver_error(code) for any other code of the driver, which travels through core/ unchanged. ret_ outputs are
 * touched only on success.
 */
#ifndef GR_DRIVER_H
#define GR_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#define GR_DRIVER_ERROR_BASE 65536

static inline int gr_driver_error(int code)
{
        return -(GR_DRIVER_ERROR_BASE + code);
}

/* The driver's code inside an error of gr_driver_error, or 0 where rc is none. */
static inline int gr_driver_code(int rc)
{
        return rc <= -GR_DRIVER_ERROR_BASE ? -rc - GR_DRIVER_ERROR_BASE : 0;
}

struct gr_driver {
        /* The driver's own allocation; context is current on the calling thread. */
        int (*mem_alloc)(void *context, size_t bytes, uint64_t *ret_ptr);

        /* The driver's own free: may block until every stream of the context is idle. */
        int (*mem_free)(uint64_t ptr);

        /*
         * Gives count blocks of context back to the system, waiting for no work of the program; on return the memory is
         * free. Only for blocks that nothing uses any more. *ret_done, always written: how many went before an error.
         */
        int (*mem_release)(void *context, const uint64_t *ptrs, size_t count, size_t *ret_done);

        /*
         * Addresses without memory, aligned to pages of 2 MiB, for the memory of one device. NULL, with the three
         * below: not to be had, or not for every use that the program may make of memory.
         */
        int (*mem_reserve)(void *context, size_t bytes, uint64_t *ret_ptr);
        void (*mem_unreserve)(uint64_t ptr, size_t bytes); /* all of a reservation, and nothing is mapped in it */

        /*
         * Memory of device behind reserved addresses, whole pages; context is current. New memory where *handle is 0,
         * and its handle comes back; else that of the handle, all of it, which stays mapped where it was as well: work
         * that uses both addresses must be in order. On failure nothing is mapped.
         */
        int (*mem_map)(void *context, int device, uint64_t ptr, size_t bytes, uint64_t *handle);

        /*
         * Takes what one mem_map put there away, waiting for nothing: only for addresses that no work uses any more.
         * The memory of the handle goes back with the last of its addresses; 0: it lives on. context is NULL where it
         * has gone.
         */
        int (*mem_unmap)(void *context, uint64_t ptr, size_t bytes, uint64_t handle);

        /* What the driver says of the device under context. */
        int (*mem_info)(void *context, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes);

        int (*event_create)(void *context, void **ret_event);
        void (*event_destroy)(void *context, void *event);
        int (*event_query)(void *event);

        /* Marks all work submitted to context so far. NULL where the driver lacks it (before CUDA 12.5). */
        int (*context_record)(void *context, void *event);

        /* All work submitted to context from now on waits for event on the GPU; the host does not. */
        int (*context_wait)(void *context, void *event);

        /* Blocks until all work submitted to context is done. */
        int (*context_sync)(void *context);

        /*
         * The same by a free of the driver's, which waits by itself: it takes no memory of the device and does no harm
         * to captures, which go on. -ENOMEM: the host has no memory for it. NULL: not to be had.
         */
        int (*context_drain)(void *context);

        /*
         * Corrects the charge for the driver's own pools, which give memory back unseen. NULL: there are none. Waits
         * for nothing.
         */
        void (*refresh_pools)(int device);

        /* Trims the driver's own caches of the device: memory pools and graph memory. */
        int (*trim_pools)(void *context, int device);

        /* The same for pools of host memory. NULL: there are none. */
        void (*trim_host_pools)(void);

        /* Host memory that the device reaches at *ret_ptr; context is current. NULL: not to be had. */
        int (*host_alloc)(void *context, size_t bytes, uint64_t *ret_ptr);
        int (*host_free)(void *context, uint64_t ptr); /* of host memory allocated in context; may wait for the GPU */

        /* Gives the C library's free memory back to the system. NULL: not to be had. */
        void (*trim_malloc)(void);

        /* Monotonic. */
        uint64_t (*now_ns)(void);
        void (*sleep_ns)(uint64_t ns);
};

#endif
