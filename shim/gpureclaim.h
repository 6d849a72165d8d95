/*
 * gpureclaim for programs: give memory back when asked to, have cached memory given back, and see how much there is.
 *
 * Nothing needs to be linked. With libgpureclaim.so preloaded the functions are found at run time, without it they are
 * not there:
 *
 *   gpureclaim_status_function *status = (gpureclaim_status_function *)dlsym(RTLD_DEFAULT, "gpureclaim_status");
 *
 * All may be called from any thread at any time, before the first CUDA call and from inside a reclaimable, too. Sizes
 * are bytes, devices are CUDA's ordinals in this process. Functions that can fail return 0 (or what they say) or a
 * negative errno, and leave ret_ outputs untouched then. None changes errno. docs/api.md has an example.
 */
#ifndef GPURECLAIM_H
#define GPURECLAIM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Gives up device memory. Returns 0, or an errno (of either sign) that the log shows. */
typedef int gpureclaim_hook(void *arg, int device, uint64_t want_bytes);

/*
 * A part of the program that can give device memory back. The hooks are called on a thread of the library, when an
 * allocation finds no memory (purge first; drop where nothing else of this process helps) or memory gets short while
 * the program waits for the GPU (purge), and in gpureclaim_reclaim. No context is current there. They may take locks
 * that the allocating thread holds: after limit_ms the allocation goes on without them. A hook that fails or is late
 * three times in a row is named in the log and left out for a minute. A hook is not called again while it runs. It may
 * allocate and free memory and call these functions.
 */
struct gpureclaim_reclaimable {
        size_t struct_bytes; /* sizeof(struct gpureclaim_reclaimable), of the header that the caller was built with */
        const char *name;    /* for the log; copied */
        gpureclaim_hook *purge; /* give up what is idle; may be NULL */
        gpureclaim_hook *drop;  /* drop state that can be built again; may be NULL */
        void *arg;
        uint32_t limit_ms; /* 0: 1000 */
        /*
         * 1: the hooks need a lock that an allocating thread holds often, as that of a framework's allocator. That one
         * of them is late is then only logged with GPURECLAIM_LOG=debug. After it was late or failed, allocations wait
         * for it for a tenth of limit_ms, until it is back in time. 0: neither.
         */
        uint32_t needs_lock;
};

/*
 * Copies *reclaimable. Returns 0, with *ret_id above 0. -EINVAL: a pointer or both hooks are missing, or struct_bytes
 * is too small; -ENOSPC: 32 are registered already.
 */
int gpureclaim_register(const struct gpureclaim_reclaimable *reclaimable, uint64_t *ret_id);

/*
 * Unregisters: the hooks are not called any more. Waits until none of them runs, unless a hook unregisters itself.
 * -ENOENT: no such id. -EBUSY: a hook has been running for ten seconds; it is not called again, but what it uses must
 * stay valid.
 */
int gpureclaim_unregister(uint64_t id);

/*
 * Returns memory of device to the driver for others, up to want_bytes (0: as much as there is). rung says how far to
 * go, and each includes those before it:
 *
 *   "purge"   reclaimables give up what is idle, into the cache
 *   "trim"    cached blocks whose last work has finished are returned
 *   "driver"  idle memory of the driver's own pools and graphs is returned
 *   "sync"    waits for the GPU, and returns all cached blocks
 *   "drop"    reclaimables drop state that can be built again
 *
 * Returns the bytes that the driver got back. -EINVAL: no such rung; -ENODEV: this process has no memory there.
 */
int64_t gpureclaim_reclaim(int device, const char *rung, uint64_t want_bytes);

/*
 * Sets the hard limit of this process on device, as `gpureclaim limit` does; UINT64_MAX: none. It holds at once, and
 * what the cache has above it goes back soon. What the program has above it, it keeps. -EINVAL: below 2 MiB; -ENODEV:
 * there is no such device, or the driver is not initialised.
 */
int gpureclaim_set_limit(int device, uint64_t hard_limit_bytes);

struct gpureclaim_status {
        size_t struct_bytes;   /* set by the caller; the library fills no more than that */
        uint64_t live_bytes;   /* allocated by the program, not freed yet */
        uint64_t cached_bytes; /* freed by the program and kept for its next requests */
        /* From the driver: live, cached, graph_bytes, and the unused rest of small blocks; not what is asleep. */
        uint64_t reserved_bytes;
        uint64_t peak_live_bytes;
        uint64_t peak_reserved_bytes;
        uint64_t hard_limit_bytes;   /* UINT64_MAX: none */
        uint64_t soft_limit_bytes;   /* UINT64_MAX: none */
        uint64_t spilled_bytes;      /* allocated in host memory instead */
        uint64_t device_total_bytes; /* 0: not known yet */
        uint64_t device_free_bytes;  /* as the driver says now */
        uint64_t driver_bytes;       /* what the driver took by itself for contexts and code; UINT64_MAX: not known */
        uint64_t imported_bytes;     /* memory of other processes that this one has opened; not in reserved_bytes */
        uint64_t graph_bytes;        /* freed by the program, and kept for a capture or its graph */
        uint64_t executables;        /* how many instantiated graphs the program has not destroyed */
        uint64_t executable_bytes;   /* what the driver took for them, at least; UINT64_MAX: not known */
};

/*
 * Fills *ret_status with the present figures of device. -EINVAL: ret_status is NULL, there is no such device, or
 * struct_bytes is too small; -ENODEV: this process has not used the device.
 */
int gpureclaim_status(int device, struct gpureclaim_status *ret_status);

/* Such as "0.1.0"; owned by the library. */
const char *gpureclaim_version(void);

typedef __typeof__(gpureclaim_register) gpureclaim_register_function;
typedef __typeof__(gpureclaim_unregister) gpureclaim_unregister_function;
typedef __typeof__(gpureclaim_reclaim) gpureclaim_reclaim_function;
typedef __typeof__(gpureclaim_set_limit) gpureclaim_set_limit_function;
typedef __typeof__(gpureclaim_status) gpureclaim_status_function;
typedef __typeof__(gpureclaim_version) gpureclaim_version_function;

#ifdef __cplusplus
}
#endif

#endif
