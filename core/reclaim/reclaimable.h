/*
 * Reclaimables: parts of the program that hold device memory and can give some of it back when asked (gpureclaim.h).
 *
 * Each caller runs them one after the other. A reclaimable that fails, or does not return by its deadline, is named in
 * the log; after several failures in a row it is not called for a while. One with `on_worker` set runs on a worker
 * (gr_registry.call_worker), because it may need a lock that the allocating thread holds. The caller waits for it only
 * until the deadline, and it may run on after that. A running reclaimable may free, allocate, reclaim, register and
 * unregister, also itself. It is never called a second time while it runs. Its own allocations call no reclaimables and
 * ask no neighbours: two processes that ask each other would each wait for a reclaimable that waits for the other
 * process.
 */
#ifndef GR_RECLAIMABLE_H
#define GR_RECLAIMABLE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/ladder_rungs.h"
#include "base/lock.h"

struct gr_core;

#define GR_RECLAIMABLES_MAX        32
#define GR_RECLAIMABLE_NAME        64
#define GR_RECLAIMABLE_LIMIT_NS    UINT64_C(1000000000)  /* deadline of a reclaimable that names none */
#define GR_RECLAIMABLE_LEAVE_NS    UINT64_C(10000000000) /* longest that unregister waits for one that runs */
#define GR_RECLAIMABLE_LATE_SHARE  10                    /* of its deadline for one that needs a lock and was late */
#define GR_RECLAIMABLE_PATIENCE    3                     /* failures in a row before a reclaimable is left out */
#define GR_RECLAIMABLE_LEFT_OUT_NS UINT64_C(60000000000)

typedef int gr_reclaimable_function(void *arg, int device, uint64_t want_bytes);

/* Owned by the caller, valid until it is unregistered; name is copied. */
struct gr_reclaimable {
        const char *name;
        gr_reclaimable_function *purge; /* give up what is idle; NULL for nothing. Returns 0 or -errno */
        gr_reclaimable_function *drop;  /* drop state that can be built again; NULL for nothing. Returns 0 or -errno */
        void *arg;
        uint64_t limit_ns; /* deadline of one run where on_worker; 0: GR_RECLAIMABLE_LIMIT_NS */
        bool on_worker;
        bool needs_lock; /* that an allocating thread may hold, so it is often late: nobody is warned of that */
};

struct gr_reclaimable_slot {
        struct gr_core *core;
        struct gr_reclaimable *entry; /* NULL: the slot is free, unless running is true */
        char name[GR_RECLAIMABLE_NAME];
        unsigned failures; /* in a row */
        uint64_t left_out_until_ns;
        uint64_t runs; /* how many have ended */

        bool running; /* a run is on; the fields below describe it */
        bool started; /* runner is set, to the thread of the run */
        bool late;    /* its caller has given up waiting */
        bool is_drop;
        pthread_t runner;
        gr_reclaimable_function *function;
        void *arg;
        int device, rc;
        uint64_t want_bytes;
};

struct gr_registry {
        struct gr_lock lock; /* guards the slots; not held while a reclaimable runs */
        struct gr_reclaimable_slot slots[GR_RECLAIMABLES_MAX];

        /*
         * Has a worker call work(arg) soon; false: no worker could be started. NULL: all reclaimables run on the
         * calling thread. Set before the first reclaimable is registered.
         */
        bool (*call_worker)(void (*work)(void *arg), void *arg);
};

void gr_reclaimables_init(struct gr_registry *registry);
void gr_reclaimables_destroy(struct gr_registry *registry);

/* Registers the caller's reclaimable. -ENOSPC: all slots are in use; -EEXIST: it is registered already. */
int gr_reclaimable_register(struct gr_core *core, struct gr_reclaimable *reclaimable);

/*
 * Waits until the reclaimable no longer runs, unless it unregisters itself. -ENOENT: not registered. -EBUSY: it still
 * runs after GR_RECLAIMABLE_LEAVE_NS; it is unregistered, but what it uses must stay.
 */
int gr_reclaimable_unregister(struct gr_core *core, struct gr_reclaimable *reclaimable);

/*
 * Calls all reclaimables for want_bytes of device: rung PURGE their purge, rung DROP their drop. If another thread is
 * running one already, that run is waited for instead. patience_ns > 0 shortens the deadlines; a reclaimable that
 * misses such a deadline has not failed. Does nothing inside a reclaimable. No lock of core/ is held.
 */
void gr_reclaimables_run(struct gr_core *core, enum gr_rung rung, int device, uint64_t want_bytes,
                         uint64_t patience_ns);

/* Whether the calling thread is inside a reclaimable. */
bool gr_reclaimable_inside(void);

#endif
