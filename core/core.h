/*
 * The core: everything of one process, and its contexts. Contexts are added when first seen and dropped when the
 * program destroys them; their structures stay valid for the life of the core, so that a thread that still holds one
 * cannot fall.
 */
#ifndef GR_CORE_H
#define GR_CORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account/accounted.h"
#include "account/budget.h"
#include "account/pressure.h"
#include "base/driver.h"
#include "base/lock.h"
#include "base/options.h"
#include "base/shard.h"
#include "base/size_class.h"
#include "cache/arena.h"
#include "cache/ledger.h"
#include "cache/preallocate.h"
#include "fence/capture_gate.h"
#include "fence/fence.h"
#include "host/pinned.h"
#include "host/pinned_alloc.h"
#include "host/spill.h"
#include "reclaim/charge.h"
#include "reclaim/decay.h"
#include "reclaim/ladder.h"
#include "reclaim/proactive.h"
#include "reclaim/reclaimable.h"
#include "segment/fastbin.h"
#include "segment/split.h"
#include "segment/split_trim.h"
#include "stats.h"

#define GR_DEVICES_MAX 64

struct gr_context {
        /* What every hit reads. */
        struct gr_core *core;
        struct gr_device *device;
        _Atomic unsigned arenas_quiesced;           /* how many want it so: gr_arenas_quiesce */
        _Atomic bool split_active;                  /* new requests are served by split */
        size_t split_least_bytes;                   /* ... except those up to here, for gr_split_serves; constant */
        struct gr_arena *_Atomic arenas[GR_SHARDS]; /* NULL until used; the first is always there */

        void *handle;            /* of the driver; guarded by core->contexts_lock, constant while alive */
        bool alive;              /* guarded by core->contexts_lock */
        bool coming;             /* the fences of the others do not know it yet; guarded likewise */
        _Atomic unsigned ending; /* threads that may end it: it may be gone in the driver, so no new visit; set with
                                    the lock held */
        unsigned visitors;       /* gr_core_each_context in it; guarded likewise */
        struct gr_context *next;
        struct gr_fence fence;
        struct gr_split split;
        _Atomic unsigned arena_count; /* that there are */
        struct gr_arena first_arena;
        struct gr_fastbins fastbins; /* guarded by the first arena's lock, as is ... */
        struct gr_block *leaving; /* ... what the driver has once a stream gets there: charged until then, as cached */
        struct gr_spilled spilled;
        struct gr_decay decay;
        _Atomic uint64_t preallocated_bytes; /* taken fresh to save fences (preallocate.h), and not given back */
};

/* How the pool behaves; constant after gr_core_init. */
struct gr_config {
        enum gr_reuse reuse;
        enum gr_pool_kind pool;
        uint64_t decay_ns; /* 0: off */
        uint64_t wait_ns;  /* 0: off */
        bool proactive;
        bool trim_malloc;
};

struct gr_core {
        /* What every free reads, a cache line of it. */
        struct gr_config config;
        _Atomic uint64_t heap_ptrs[2]; /* where the latest heaps of split begin, and ... */
        _Atomic uint32_t heap_pages;   /* ... how large each is; 0: there is none. For gr_core_in_heap */
        _Atomic bool decay_armed;      /* somebody calls gr_core_decay in time */
        /*
         * A stream may wait for what the program does later, by a function on the host, a word in memory or a
         * semaphore, or for what another process does, whose memory this one has opened. A barrier behind that would
         * have other streams wait as well, on which those may depend: none is laid from then on where GR_REUSE_BARRIER
         * does not ask for it, nor a context waited for without end.
         */
        _Atomic bool waits_for_others;
        /*
         * The program has made a stream, or a context with one of its own, or uses those that threads have by
         * themselves: from now on work may run beside other work, and a barrier would have it wait. For good, and for
         * all contexts.
         */
        _Atomic bool overlaps;

        const struct gr_driver *driver;
        struct gr_ledger ledger;
        struct gr_accounted_ledger accounted;
        struct gr_gate gate;
        struct gr_device devices[GR_DEVICES_MAX];
        struct gr_device host; /* no device: what is pinned of the host's memory, and its limits */
        struct gr_pinned pinned;
        struct gr_fence process_fence; /* all contexts are its accessors: for pinned memory, which all can reach */
        struct gr_stats stats;
        struct gr_registry registry;
        struct gr_proactive proactive;
        _Atomic unsigned barriers_begun; /* of those that no waits_for_others has stopped; gr_core_will_wait */
        /* How often streams were given work that waits for others: about to be, and were. */
        _Atomic uint64_t waits_begun, waits_given;
        _Atomic bool split_barred;    /* gr_split_bar */
        struct gr_lock contexts_lock; /* guards the list and alive; contexts are never freed before the core */
        struct gr_context *contexts;

        /* Asked for when the cache holds more than it may: somebody must soon call gr_core_maintain. May be NULL. */
        void (*wake)(struct gr_core *core);

        /* Asks other processes on the card for want_bytes, for a bounded time; what they gave. May be NULL. No lock is
         * held. */
        uint64_t (*ask_neighbours)(struct gr_core *core, struct gr_device *device, uint64_t want_bytes);
        /* An allocation begins (bytes) or ends (-bytes) to wait for others, whom it keeps asking; may be NULL. */
        void (*wait_for_neighbours)(struct gr_device *device, int64_t bytes);
};

_Static_assert(offsetof(struct gr_core, overlaps) < GR_LINE_BYTES, "a free reads one cache line of it");

static inline void gr_count(struct gr_core *core, enum gr_stat stat, uint64_t n)
{
        atomic_fetch_add_explicit(&core->stats.counters[stat], n, memory_order_relaxed);
}

/* context.c: the list of contexts, and visits of them. It calls nothing of core/ but locks. */

/* The context of this handle, or NULL. */
struct gr_context *gr_context_find(struct gr_core *core, void *handle);

/*
 * The same with contexts_lock held, which is released meanwhile where another thread is adding it: its work may touch
 * any block of its device at once, so the fences of the others must know it first.
 */
struct gr_context *gr_context_find_locked(struct gr_core *core, void *handle);

/*
 * Calls each alive context of device (-1: of all) in turn; the list may grow meanwhile. Stops where visit returns
 * false. No lock is held during the call.
 */
void gr_core_each_context(struct gr_core *core, int device, bool (*visit)(struct gr_context *context, void *arg),
                          void *arg);

/*
 * Keeps visitors out and waits for those inside: a call of the driver beside the context's end is a crash in it, and a
 * block that one gives back then may be somebody else's. Not for visits of the calling thread, which wait for this.
 */
void gr_context_close_visits(struct gr_context *context);

/* core.c: the whole. */

void gr_core_init(struct gr_core *core, const struct gr_driver *driver, const struct gr_config *config);

/* Frees what the core allocated, not the driver's memory. No other thread that has used it may use any from then on. */
void gr_core_destroy(struct gr_core *core);

/*
 * As gr_context_find, adding it where it is new; device is its device's ordinal. Contexts of one device can reach each
 * other's blocks by copies, so the fences of each cover all. NULL: out of memory.
 */
struct gr_context *gr_context_add(struct gr_core *core, void *handle, int device);

/*
 * The context is about to be destroyed: waits for the threads that give back or look at its memory (a driver call of
 * theirs beside its end is a crash in the driver; seen on an H200, driver 580, November 2026) and for its work, and
 * takes it out of all fences, so that none asks the driver about what is gone. Other contexts' frees in between are
 * covered by the wait as long as the program submits nothing more. gr_context_drop or gr_context_stays follows.
 */
void gr_context_ending(struct gr_context *context);

/* It was not destroyed: the other contexts of its device fence it again, its peers on other devices do not. */
void gr_context_stays(struct gr_context *context);

/* The driver has destroyed the context and its memory: forgets both, without a call of the driver. */
void gr_context_drop(struct gr_context *context);

/*
 * Sets waits_for_others, before the driver has the work that waits: returns once no barrier is being laid that did not
 * know of it. What is freed by now is fenced, or the fence would come behind that work.
 */
void gr_core_will_wait(struct gr_core *core);

/* The same of work that a stream is given by the program itself, and once the driver has it. */
void gr_core_stream_will_wait(struct gr_core *core);
void gr_core_stream_waits(struct gr_core *core);

/* Before a capture begins, as what is freed by now could not be fenced until it ends. */
void gr_core_will_capture(struct gr_core *core);

/* Whether ptr is most likely a block of split's, and not one that the bins of its shard handed out. */
static inline bool gr_core_in_heap(struct gr_core *core, uint64_t ptr)
{
        uint64_t bytes = (uint64_t)atomic_load_explicit(&core->heap_pages, memory_order_relaxed) << GR_PAGE_SHIFT;

        return __builtin_expect(bytes > 0, 0) &&
               (ptr - atomic_load_explicit(&core->heap_ptrs[0], memory_order_relaxed) < bytes ||
                ptr - atomic_load_explicit(&core->heap_ptrs[1], memory_order_relaxed) < bytes);
}

/* The bins that shard uses, or NULL where it has none yet. */
static inline struct gr_arena *gr_arena_at(struct gr_context *context, unsigned shard)
{
        return atomic_load_explicit(&context->arenas[shard], memory_order_acquire);
}

/* Whether new requests are served by split. */
static inline bool gr_split_active(struct gr_context *context)
{
        return __builtin_expect(atomic_load_explicit(&context->split_active, memory_order_relaxed), 0);
}

/*
 * Whether a request of so many bytes is split's, and not the bins', to serve. Those need cheap barriers: without them
 * they would take fresh memory while freed blocks wait, which for small ones is many calls of the driver.
 */
static inline bool gr_split_serves(struct gr_context *context, size_t bytes)
{
        return gr_split_active(context) &&
               (bytes > context->split_least_bytes || !gr_fence_barrier_is_cheap(&context->fence));
}

#endif
