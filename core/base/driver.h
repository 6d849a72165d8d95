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

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GR_DRIVER_ERROR_BASE 65536

/* The error of core/ for a code of the driver; negative. */
static inline int gr_driver_error(int code)
{
        return -(GR_DRIVER_ERROR_BASE + code);
}

/* The driver's code that gr_driver_error wrapped in rc; 0: rc is another kind of result. */
static inline int gr_driver_code(int rc)
{
        return rc <= -GR_DRIVER_ERROR_BASE ? -rc - GR_DRIVER_ERROR_BASE : 0;
}

/* Whether a request failed for memory: the device is full, or a limit is reached (-EDQUOT). */
static inline bool gr_is_out_of_memory(int rc)
{
        return rc == -ENOMEM || rc == -EDQUOT;
}

struct gr_driver {
        /* The driver's own allocation; context is current on the calling thread. */
        int (*mem_alloc)(void *context, size_t bytes, uint64_t *ret_ptr);

        /* The driver's own free: may block until every stream of the context is idle. */
        int (*mem_free)(uint64_t ptr);

        /*
         * Frees count blocks of context without waiting for any work of the program; on return their memory is free.
         * Only for blocks that no work uses any more. *ret_done is always written: how many were freed before an error.
         */
        int (*mem_release)(void *context, const uint64_t *ptrs, size_t count, size_t *ret_done);

        /*
         * Reserves addresses without memory, aligned to pages of 2 MiB, for the memory of one device. This and the
         * three below are NULL where the driver lacks them, or where such memory lacks something that a program may do
         * with memory of mem_alloc.
         */
        int (*mem_reserve)(void *context, size_t bytes, uint64_t *ret_ptr);
        void (*mem_unreserve)(uint64_t ptr, size_t bytes); /* a whole reservation in which nothing is mapped */

        /*
         * Maps memory of device, whole pages, at reserved addresses; context is current. Where *handle is 0 the memory
         * is new, and *handle is set. Else it is all the memory of that handle, which also stays mapped where it was:
         * the caller keeps work on one address in order with work on the other. On failure nothing is mapped.
         */
        int (*mem_map)(void *context, int device, uint64_t ptr, size_t bytes, uint64_t *handle);

        /*
         * Unmaps what one mem_map mapped at ptr, without waiting: only for addresses that no work uses any more. A
         * handle other than 0 is released, too: its memory is freed as soon as it is mapped nowhere. With 0 the memory
         * is kept. context is NULL where it has been destroyed.
         */
        int (*mem_unmap)(void *context, uint64_t ptr, size_t bytes, uint64_t handle);

        /* The driver's figures for the device of context. */
        int (*mem_info)(void *context, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes);

        int (*event_create)(void *context, void **ret_event);
        void (*event_destroy)(void *context, void *event);
        int (*event_query)(void *event);

        /* Records event behind all work submitted to context so far. NULL: the driver lacks it (before CUDA 12.5). */
        int (*context_record)(void *context, void *event);

        /* Makes all work that is submitted to context later wait for event on the GPU; the host does not wait. */
        int (*context_wait)(void *context, void *event);

        /* Blocks until all work submitted to context is done. */
        int (*context_sync)(void *context);

        /*
         * As context_sync, by one of the driver's frees, which waits by itself. It needs no device memory, and captures
         * survive it. -ENOMEM: the host has no memory for it. NULL: the driver has no such free.
         */
        int (*context_drain)(void *context);

        /*
         * Corrects the charge for the driver's own pools, which release memory without telling the library. Does not
         * wait. NULL: there are none.
         */
        void (*refresh_pools)(int device);

        /* Trims the driver's own caches of the device: memory pools and graph memory. */
        void (*trim_pools)(void *context, int device);

        /* Trims the driver's own pools of host memory. NULL: there are none. */
        void (*trim_host_pools)(void);

        /* Allocates host memory that the device reaches at *ret_ptr; context is current. NULL: the driver cannot. */
        int (*host_alloc)(void *context, size_t bytes, uint64_t *ret_ptr);
        int (*host_free)(void *context, uint64_t ptr); /* of host memory allocated in context; may wait for the GPU */

        /* Gives the C library's free memory back to the system. NULL: the C library cannot. */
        void (*malloc_trim)(void);

        /* Monotonic. */
        uint64_t (*now_ns)(void);
        void (*sleep_ns)(uint64_t ns);
};

#endif
