/*
 * What a context is, and the list of all contexts of the process. The parts of core/ have structures of their own. This
 * file knows them as pointers only, in the context or in the core; core.c makes them.
 *
 * Contexts are added when first seen and removed when the program destroys them; their structures stay valid for the
 * life of the core, so that a thread that still uses one reads valid memory.
 */
#ifndef GR_CONTEXT_H
#define GR_CONTEXT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/attributes.h"
#include "base/counters.h"
#include "base/driver.h"
#include "base/lock.h"
#include "base/options.h"
#include "base/shard.h"
#include "base/trace_file.h"
#include "context/capture_gate.h"

#define GR_DEVICES_MAX         64
#define GR_DEVICE_BIT(ordinal) (UINT64_C(1) << (ordinal)) /* in a set of devices */
#define GR_ALL_DEVICES         UINT64_MAX

struct gr_accounted_ledger;
struct gr_arena;
struct gr_block;
struct gr_decay;
struct gr_device;
struct gr_fence;
struct gr_graph_hold;
struct gr_ledger;
struct gr_pinned;
struct gr_proactive;
struct gr_registry;
struct gr_spilled;
struct gr_segments;

struct gr_context {
        /* What every hit reads. Pointers to the parts are constant. */
        struct gr_core *core;
        struct gr_device *device;
        struct gr_fence *fence;
        _Atomic unsigned arenas_quiesced; /* calls of gr_arenas_quiesce without their resume */
        _Atomic bool segments_active;     /* new requests are served by segments */
        /* Bins serve requests up to this size all the same (gr_pool_kind_segments_serve); only grows. */
        _Atomic size_t segments_least_bytes;
        struct gr_arena *_Atomic arenas[GR_SHARDS]; /* NULL until used; the first is always there */
        struct gr_arena *first_arena;
        _Atomic unsigned arena_count; /* arenas that are not NULL */
        /*
         * Holds of graphs that share memory here (segment/graph_segments.h): their number and, from bit 32 on, that of
         * the contexts that had this structure before (`number`), whose graphs may still exist. Both are in one word so
         * that a hold leaves in one step, without a lock.
         */
        _Atomic uint64_t graph_users;

        struct gr_segments *segments;
        /*
         * Set once a range of the context was freed that must not be reused. From then on freed ranges are merged and
         * none goes into a fastbin, so that what is wholly free can go back. Written with the segments' lock held.
         */
        _Atomic bool fastbins_closed;
        _Atomic uint32_t generations; /* the arenas take the generations of ranges from here, some at a time */
        /*
         * Blocks that the program freed in stream order, given to the driver in the same way. They are charged as
         * cached until the stream has come to the free. Guarded by first_arena's lock.
         */
        struct gr_block *freed_in_order;
        struct gr_spilled *spilled;
        struct gr_decay *decay;
        _Atomic uint64_t preallocated_bytes; /* taken fresh to save fences (preallocate.h), and not given back */

        void *handle;            /* the driver's context; guarded by core->contexts_lock, constant while alive */
        int ordinal;             /* of its device; constant */
        _Atomic uint32_t number; /* how many contexts had this structure before */
        bool alive;              /* guarded by core->contexts_lock */
        bool joining; /* it is being added: not all fences cover its work yet; guarded by core->contexts_lock */
        /* Threads that are about to destroy it: no visit begins meanwhile. Changed with core->contexts_lock held. */
        _Atomic unsigned ending;
        unsigned visitors; /* threads in gr_context_each; guarded by core->contexts_lock */
        struct gr_context *next;
};

/* How the pool behaves; constant after gr_core_init. */
struct gr_config {
        enum gr_reuse reuse;
        enum gr_pool_kind pool;
        enum gr_graph_arena graph_arena;
        uint64_t decay_ns;         /* 0: off */
        uint64_t wait_ns;          /* 0: off */
        bool in_order;             /* work runs in the order of submission until gr_core_end_order is called */
        bool wait_for_others_only; /* not where they have too little, as only this process could free the rest */
        bool proactive;
        bool malloc_trim;
};

enum gr_let_first { GR_LET_FIRST_BEGIN, GR_LET_FIRST_LOOK, GR_LET_FIRST_END };

struct gr_core {
        /* One cache line, which every free reads. */
        struct gr_config config;
        _Atomic uint64_t expandable_ptrs[2]; /* the newest expandable segments, for gr_pool_kind_in_expandable */
        _Atomic uint32_t expandable_pages;   /* the size of each of these; 0: there is none */
        _Atomic bool decay_armed;            /* a call of gr_decay_run is scheduled */
        /*
         * Set for good once a stream may wait for a later action of the program (by a host function, a word in memory
         * or a semaphore), or of another process that shares memory or an event with this one. A barrier behind such a
         * wait would make other streams wait too, and the action may depend on them: a deadlock. So from then on no
         * barrier is laid, unless GR_REUSE_BARRIER asks for it, and no context is waited for without a deadline.
         */
        _Atomic bool waits_for_others;
        /*
         * Set for good, and for all contexts, once work may run on several streams: the program has made a stream, or
         * another context, or uses per-thread default streams. A barrier would then make work wait that could run
         * beside other work.
         */
        _Atomic bool streams_overlap;
        /*
         * Set for good, and for all contexts, once work may run beside work that was submitted before it
         * (gr_core_end_order): where streams overlap, and where launches or graphs do.
         */
        _Atomic bool order_over;
        _Atomic bool several_devices; /* set for good once contexts of more than one have been alive together */
        /* A bit for each device on which some graph may work, or to which it may write; set for good. */
        _Atomic uint64_t graph_devices;

        const struct gr_driver *driver;
        struct gr_gate gate;
        struct gr_counters counters;
        /* The parts of core/; constant. */
        struct gr_ledger *ledger;
        struct gr_accounted_ledger *accounted;
        struct gr_device *devices; /* GR_DEVICES_MAX of them, by ordinal */
        struct gr_device *host;    /* not a device: pinned host memory, and its limits */
        struct gr_pinned *pinned;
        struct gr_fence *process_fence; /* all contexts are its accessors: for pinned memory, which all can reach */
        struct gr_registry *registry;
        struct gr_proactive *proactive;

        _Atomic bool memory_is_short; /* or may soon be: then proactive reclaim looks for memory */
        /* Barriers being laid by threads that may not have seen waits_for_others: gr_core_will_wait waits for them. */
        _Atomic unsigned barriers_being_laid;
        /* How often a stream got work that waits for others: counted before the driver gets it, and after. */
        _Atomic uint64_t waits_begun, waits_given;
        struct gr_lock contexts_lock; /* guards the list and alive; contexts are never freed before the core */
        struct gr_context *contexts;

        /* The graph holds (alloc/graph_hold.h); holds_lock guards the table and holds_made, the newest one's number. */
        struct gr_lock holds_lock;
        struct gr_graph_hold *holds;
        unsigned holds_made;
        _Atomic bool holds_over; /* a hold may have lost its last user */
        /* gr_pool_collect, which frees parked blocks, for files below pool.c that need the memory. Constant. */
        void (*collect)(struct gr_core *core);
        /* gr_pool_collect_blind, in the same way. */
        void (*collect_blind)(struct gr_context *context);

        /* Called when the cache holds more than it may: gr_trim_excess must be called soon. May be NULL. */
        void (*wake)(struct gr_core *core);

        /*
         * Asks other processes on the device for want_bytes and waits for a bounded time. Returns the bytes that they
         * gave. May be NULL. No lock is held.
         */
        uint64_t (*ask_neighbours)(struct gr_core *core, struct gr_device *device, uint64_t want_bytes);
        /*
         * An allocation of bytes begins to wait for memory of other processes, which are asked again and again
         * meanwhile; -bytes: it stops waiting. May be NULL.
         */
        void (*wait_for_neighbours)(struct gr_device *device, int64_t bytes);
        /* Whether the other processes together have that much. May be NULL. */
        bool (*may_give)(struct gr_device *device, uint64_t bytes);
        /*
         * Waits for ns, as such an allocation does between two tries. The memory of this process may go to sleep
         * meanwhile. False: it is asleep and could not be had again; then the calling thread must not use any. May be
         * NULL. No lock is held.
         */
        bool (*pause)(uint64_t ns);
        /*
         * The process gives up memory to have it back later. How many other processes come first, as they waited for
         * some of the device when that began, and have ever since. Until the end those do not see what this one waits
         * for. May be NULL.
         */
        unsigned (*let_first)(struct gr_device *device, enum gr_let_first what);
        /* Such an allocation has its memory, to which other processes gave some. May be NULL. */
        void (*served)(void);
};

_Static_assert(offsetof(struct gr_core, order_over) < GR_LINE_BYTES, "a free reads one cache line of it");

/* Adds n to a counter. */
static inline void gr_count(struct gr_core *core, enum gr_counter counter, uint64_t n)
{
        atomic_fetch_add_explicit(&core->counters.counts[counter], n, memory_order_relaxed);
        gr_trace_add(GR_ENTRY_COUNTER, GR_ENTRY_NO_DEVICE, counter, 0, n);
}

/* Counts a run of a rung for a device: it began at begin_ns and gave bytes. */
void gr_count_rung(struct gr_core *core, int device, enum gr_rung rung, uint64_t begin_ns, uint64_t bytes);

/* Below, no lock of core/ is held unless a comment says otherwise. */

/* The context of this handle, or NULL. */
struct gr_context *gr_context_find(struct gr_core *core, void *handle);

/*
 * gr_context_find with contexts_lock held. If another thread is adding the context, the lock is released until it has:
 * the context's work may touch any block of its device at once, so all fences must cover it before it is used.
 */
struct gr_context *gr_context_find_locked(struct gr_core *core, void *handle);

/*
 * Calls visit for each alive context of device (-1: of all); the list may grow meanwhile. Stops where visit returns
 * false. No lock is held during the call.
 */
void gr_context_each(struct gr_core *core, int device, bool (*visit)(struct gr_context *context, void *arg), void *arg);

/* Whether a context is about to end, so that gr_context_each leaves it out. Its work may go on. */
bool gr_context_one_ends(struct gr_core *core);

/*
 * Keeps new visitors out and waits until those inside have left. A call of the driver while its context ends would
 * crash in the driver, and a block that a visitor gives back then may already have another owner. Visits of the calling
 * thread itself are not waited for: they end only after this returns.
 */
void gr_context_close_visits(struct gr_context *context);

#endif
