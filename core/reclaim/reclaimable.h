/*
 * Reclaimables: others in the process who hold device memory and can give some of it back.
 *
 * Each runs in isolation. One that fails, or is not back by its deadline, is named in the log; after several failures
 * in a row it is left out for a while. One marked apart runs on a thread of its own (gr_registry.apart), because it may
 * need a lock that the allocating thread holds; the caller waits for it no longer than the deadline, and it may go on
 * after that. While a reclaimable runs it may free, allocate, reclaim, register and unregister, itself too; it is never
 * entered a second time, and reclaimables do not run inside one another.
 */
#ifndef GR_RECLAIMABLE_H
#define GR_RECLAIMABLE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/lock.h"

struct gr_core;

#define GR_RECLAIMABLES_MAX        32
#define GR_RECLAIMABLE_NAME        64
#define GR_RECLAIMABLE_LIMIT_NS    UINT64_C(1000000000)  /* deadline of one that names none */
#define GR_RECLAIMABLE_LEAVE_NS    UINT64_C(10000000000) /* longest that unregister waits for one that runs */
#define GR_RECLAIMABLE_PATIENCE    3                     /* failures in a row before one is left out */
#define GR_RECLAIMABLE_LEFT_OUT_NS UINT64_C(60000000000)

typedef int gr_reclaimable_hook(void *arg, int device, uint64_t want_bytes);

/* Owned by the caller, valid until it is unregistered; name is copied. */
struct gr_reclaimable {
        const char *name;
        gr_reclaimable_hook *purge; /* give up what is idle; NULL for nothing. Returns 0 or -errno */
        gr_reclaimable_hook *drop;  /* drop state that can be built again; NULL for nothing. Returns 0 or -errno */
        void *arg;
        uint64_t limit_ns; /* deadline of one run where apart; 0: GR_RECLAIMABLE_LIMIT_NS */
        bool apart;
};

struct gr_reclaimable_slot {
        struct gr_core *core;
        struct gr_reclaimable *entry; /* NULL: free, once running is false, too */
        char name[GR_RECLAIMABLE_NAME];
        unsigned failures; /* in a row */
        uint64_t left_out_until_ns;
        uint64_t runs; /* ended */

        bool running; /* and for that run: */
        bool started; /* then runner is the thread */
        bool late;    /* its caller has given up waiting */
        bool is_drop;
        pthread_t runner;
        gr_reclaimable_hook *hook;
        void *arg;
        int device, rc;
        uint64_t want_bytes;
};

struct gr_registry {
        struct gr_lock lock; /* guards the slots; not held while a reclaimable runs */
        struct gr_reclaimable_slot slots[GR_RECLAIMABLES_MAX];

        /*
         * Has another thread call work(arg), soon; false where there is none to be had. NULL: everything runs on the
         * calling thread. Set before the first reclaimable is registered.
         */
        bool (*apart)(void (*work)(void *arg), void *arg);
};

void gr_registry_init(struct gr_registry *registry);
void gr_registry_destroy(struct gr_registry *registry);

/* -ENOSPC, or -EEXIST where it is registered already. */
int gr_reclaimable_register(struct gr_core *core, struct gr_reclaimable *reclaimable);

/*
 * Waits until it no longer runs, unless it is the caller. -ENOENT: not registered. -EBUSY: it has been running for
 * longer than GR_RECLAIMABLE_LEAVE_NS; it is not called again, but what it uses must stay.
 */
int gr_reclaimable_unregister(struct gr_core *core, struct gr_reclaimable *reclaimable);

/*
 * Calls purge or drop of all, for want_bytes of device. One that another thread has running is waited for instead.
 * patience_ns shortens the deadline where above 0, and then being late is no failure. Does nothing inside a
 * reclaimable. Returns how many ran.
 */
unsigned gr_reclaimables_run(struct gr_core *core, bool drop, int device, uint64_t want_bytes, uint64_t patience_ns);

/* Whether the calling thread is inside a reclaimable. */
bool gr_reclaimable_inside(void);

#endif
