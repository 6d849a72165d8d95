/*
 * Fences: when a freed block may be handed out again.
 *
 * Frees are grouped into epochs. A freed block remembers the epoch that was open; closing an epoch records an event
 * that covers all work submitted to the context so far (cuCtxRecordEvent), and so everything that may still use the
 * epoch's blocks. The blocks of an epoch are
 *
 *   usable  once the event has passed, or a barrier (cuCtxWaitEvent) makes all later work of the context wait for it:
 *           they may be handed out again
 *   idle    once the event has passed: they may go back to the driver, without a wait
 *
 *   freed in epoch 7 --(barrier, or event)--> usable_epoch >= 7 --(event)--> idle_epoch >= 7
 *
 * As long as all work of the context is in order (gr_fence_is_in_order), all blocks are usable.
 *
 * Events pass in the order they were recorded, so two counters say all of it, and a block in a bin never moves to
 * another list because its epoch has passed.
 *
 * What the driver does (docs/measurements.md, fence-events): record and wait cover every stream of the context, those
 * of green contexts and streams made later included. Both destroy every capture that is open in the context, whatever
 * its mode, while event queries and frees do no harm in a thread whose own capture mode is relaxed. An event belongs to
 * the context it was created in. Work of another device that reaches a block through peer access is covered only by an
 * event of that other context: a fence therefore records in every context that can reach the block.
 */
#ifndef GR_FENCE_H
#define GR_FENCE_H

#include <assert.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/driver.h"
#include "base/lock.h"
#include "base/shard.h"

struct gr_context;
struct gr_core;
struct gr_device;

#define GR_EPOCHS_PENDING    64 /* closed epochs whose events have not passed; when full, the newest two merge */
#define GR_FENCE_CLOSE_BYTES (UINT64_C(32) << 20) /* an epoch is never closed for less than this */
#define GR_ACCESSORS_MAX     16                   /* contexts that can reach a context's blocks, itself included */

/* Whether all work of the context runs in the order of submission. */
enum gr_order {
        GR_ORDER_OVER,
        GR_ORDER_ENDS, /* it may not, from now on, and a barrier is being laid behind what was submitted before */
        GR_ORDER_KEPT,
};

struct gr_event {
        struct gr_context *context; /* where it was created; NULL: destroyed since, so the work is done */
        void *handle;
};

struct gr_epoch {
        uint64_t number;
        uint64_t freed_bytes; /* gr_fence_freed_bytes when it was closed */
        uint64_t waits;       /* core->waits_given before it was closed */
        uint64_t closed_ns;
        unsigned event_count;
        struct gr_event events[GR_ACCESSORS_MAX];
};

/* Only fence.c and the functions of this header write its fields; other files call these functions. */
struct gr_fence {
        /*
         * Every hit reads these fields. They have a cache line of their own, which changes only when an epoch closes or
         * passes.
         */
        _Atomic uint64_t open_epoch;     /* blocks freed now belong to it; starts at 1 */
        _Atomic uint64_t usable_epoch;   /* blocks of this and earlier epochs may be handed out */
        _Atomic uint64_t idle_epoch;     /* nothing uses blocks of this and earlier epochs; <= usable_epoch */
        _Atomic int broken;              /* the driver's error (negative) after which no fence can be trusted */
        _Atomic unsigned accessor_count; /* of accessors below; changed with the lock held */
        _Atomic bool accessor_overflow;  /* more than fit: freed blocks go to the driver; changed with the lock held */
        _Atomic uint8_t order;           /* enum gr_order; changed with the lock held, unless the fence is new */
        _Atomic uint64_t ahead_epoch;    /* in order, blocks of up to this epoch may have been handed out */
        struct gr_core *core;            /* constant */
        /* the context whose fence it is, constant; NULL: this is core->process_fence */
        struct gr_context *owner;

        struct gr_sharded freed_bytes;       /* all bytes ever freed in this context, except those into its bins */
        struct gr_sharded arena_freed_bytes; /* those into its bins; part i is written with the lock of arena i held */

        _Atomic uint64_t usable_bytes; /* gr_fence_freed_bytes at the newest usable epoch */
        _Atomic uint64_t closed_bytes; /* gr_fence_freed_bytes at the newest closed epoch */
        _Atomic uint64_t closed_waits; /* core->waits_given before the newest closed epoch */
        _Atomic uint64_t waits_over;   /* core->waits_given before the newest idle epoch: so many waits are over */

        /* A thread has the turn to fence: it lays a barrier or closes an epoch, and the others may use the result. */
        _Atomic bool turn_taken __attribute__((aligned(GR_LINE_BYTES)));

        struct gr_lock lock __attribute__((aligned(GR_LINE_BYTES))); /* guards what follows */
        struct gr_epoch pending[GR_EPOCHS_PENDING];                  /* ring, oldest at first_pending */
        unsigned first_pending, pending_count;
        uint64_t passed_ns;                             /* when an epoch was last seen to have passed */
        struct gr_context *accessors[GR_ACCESSORS_MAX]; /* accessors[0] is the owner, if there is one */
        struct gr_device *device;                       /* of the owner; constant */
        bool overflow_peer;                             /* an accessor that did not fit is of another device */
        unsigned joining; /* threads that make a new accessor wait for what was handed out before it */

        struct gr_lock events_lock; /* guards what follows */
        void **idle_events;         /* created in this context */
        unsigned idle_event_count, idle_event_room;
};

_Static_assert(offsetof(struct gr_fence, freed_bytes) == GR_LINE_BYTES, "a hit reads one cache line of it");
_Static_assert(GR_EPOCHS_PENDING >= 2, "the newest two can merge");

/*
 * Initialises the fence of owner, a context of device. With owner NULL the fence has no context of its own, and covers
 * the contexts that become its accessors (core->process_fence).
 */
void gr_fence_init(struct gr_fence *fence, struct gr_core *core, struct gr_device *device, struct gr_context *owner);

/* No lock of a fence may be held when the functions below are called. */

/* Frees the fence's memory without a call of the driver, as the context and its events may be gone already. */
void gr_fence_destroy(struct gr_fence *fence);

/*
 * Adds other as an accessor: its work can now reach the owner's blocks. Barriers laid before do not hold back the work
 * of other, so it is made to wait as well. While a capture is open, the host waits instead: a wait of the context could
 * destroy the capture, and it is not known whether a single stream can wait for an event that a context has recorded.
 */
void gr_fence_add_accessor(struct gr_fence *fence, struct gr_context *other);

/*
 * Waits until no work that is submitted uses a block that has been handed out, but not beyond deadline_ns: something
 * will use one that no barrier holds back.
 */
void gr_fence_wait_handed_out(struct gr_fence *fence, uint64_t deadline_ns);

/* other has been destroyed: it is no accessor any more, and its events count as passed. */
void gr_fence_forget(struct gr_fence *fence, struct gr_context *other);

/* The owner has been destroyed, with its work and events. */
void gr_fence_reset(struct gr_fence *fence);

/* Whether any freed bytes are not known to be idle yet. */
bool gr_fence_waiting(struct gr_fence *fence);

/* Whether the fence is broken: the driver's events have failed, so no block may be handed out again. */
static inline bool gr_fence_is_broken(const struct gr_fence *fence)
{
        return atomic_load_explicit(&fence->broken, memory_order_relaxed) != 0;
}

/* Whether more contexts can reach the blocks than the fence covers: what is freed goes to the driver. */
static inline bool gr_fence_overflow(struct gr_fence *fence)
{
        return atomic_load_explicit(&fence->accessor_overflow, memory_order_relaxed);
}

/* Whether no epoch says when all work that may use freed blocks is done: only a wait for that work does. */
static inline bool gr_fence_is_blind(struct gr_fence *fence)
{
        return gr_fence_is_broken(fence) || gr_fence_overflow(fence);
}

/*
 * Whether all work of the context runs in the order in which it is submitted, as it has one stream only. Then what is
 * submitted after a free runs after all that may use the freed block: it is usable at once, and needs no barrier
 * (docs/measurements.md, order).
 */
static inline bool gr_fence_is_in_order(const struct gr_fence *fence)
{
        return atomic_load_explicit(&fence->order, memory_order_acquire) == GR_ORDER_KEPT;
}

/*
 * From now on the work of the context may not be in order. If blocks were handed out that work may still use, a barrier
 * is laid: work that is submitted after this call waits for all work before it. Cheap the second time.
 */
void gr_fence_end_order(struct gr_fence *fence);

/*
 * Called before the program waits for all work of a context that is in order, and after it did so without an error:
 * then what was freed before is idle. The number is that of the epoch that ends; 0: there is nothing to note.
 */
uint64_t gr_fence_begin_wait(struct gr_fence *fence, struct gr_epoch *ret_epoch);
void gr_fence_waited(struct gr_fence *fence, const struct gr_epoch *epoch);

/*
 * Whether a block freed in this epoch, which no barrier or event has made usable, may be handed out as all work is in
 * order. It is noted before the order is looked at; who ends that does it the other way round.
 */
bool gr_fence_go_ahead(struct gr_fence *fence, uint64_t epoch);

static inline bool gr_fence_usable_in_order(struct gr_fence *fence, uint64_t epoch)
{
        /* Not relaxed: where another thread has noted the epoch, the order must not be an older one than its note. */
        if (__builtin_expect(epoch > atomic_load_explicit(&fence->ahead_epoch, memory_order_acquire), 0))
                return gr_fence_go_ahead(fence, epoch);
        return atomic_load(&fence->order) == GR_ORDER_KEPT;
}

/* Blocks freed in this and earlier epochs may be handed out, also where the work of the context is not in order. */
static inline uint64_t gr_fence_usable_always(struct gr_fence *fence)
{
        if (gr_fence_overflow(fence)) /* a barrier does not reach the contexts that did not fit */
                return atomic_load_explicit(&fence->idle_epoch, memory_order_acquire);
        return atomic_load_explicit(&fence->usable_epoch, memory_order_acquire);
}

/* Blocks freed in this and earlier epochs may be handed out. */
static inline uint64_t gr_fence_usable_epoch(struct gr_fence *fence)
{
#ifdef GR_TEST_NO_FENCE /* the library without fences: tests must fail with it */
        (void)fence;
        return UINT64_MAX;
#else
        uint64_t open;

        if (gr_fence_is_in_order(fence)) {
                open = atomic_load(&fence->open_epoch); /* no block was freed in a later one */
                if (gr_fence_usable_in_order(fence, open))
                        return open;
        }
        return gr_fence_usable_always(fence);
#endif
}

/* Whether a block freed in this epoch may be handed out. */
static inline bool gr_fence_usable(struct gr_fence *fence, uint64_t epoch)
{
#ifdef GR_TEST_NO_FENCE
        (void)fence;
        (void)epoch;
        return true;
#else
        return epoch <= gr_fence_usable_always(fence) ||
               (gr_fence_is_in_order(fence) && epoch <= atomic_load(&fence->open_epoch) &&
                gr_fence_usable_in_order(fence, epoch));
#endif
}

/* Whether a block freed in this epoch may go back to the driver. */
static inline bool gr_fence_idle(struct gr_fence *fence, uint64_t epoch)
{
        return epoch <= atomic_load_explicit(&fence->idle_epoch, memory_order_acquire);
}

/* The newest closed epoch; 0: none. */
static inline uint64_t gr_fence_closed_epoch(struct gr_fence *fence)
{
        return atomic_load(&fence->open_epoch) - 1;
}

/*
 * The epoch for a block that is being freed. The order matters. All uses of the block were submitted before this load;
 * a record of the epoch comes after open_epoch moved on, so a block with the old number is covered by the event. And
 * the bytes are counted after the load, so an epoch that counts as closed has no block that came later.
 */
static inline uint64_t gr_fence_note_freed(struct gr_fence *fence, uint64_t bytes)
{
        uint64_t epoch;

        /* The load must not come before the program's submissions. On x86-64 the claim before was a full barrier. */
#ifndef __x86_64__
        atomic_thread_fence(memory_order_seq_cst);
#endif
        epoch = atomic_load(&fence->open_epoch);
        gr_sharded_add(&fence->freed_bytes, bytes);
        return epoch;
}

/*
 * As gr_fence_note_freed, for a block that goes into a bin of arena shard. To take its lock was the full barrier.
 */
static inline uint64_t gr_fence_note_freed_into(struct gr_fence *fence, unsigned shard, uint64_t bytes)
{
        _Atomic uint64_t *part = &fence->arena_freed_bytes.shards[shard].part;
        uint64_t epoch;

        gr_lock_rank_assert_held(GR_RANK_ARENA);
        assert(shard < GR_SHARDS);
#ifndef __x86_64__
        atomic_thread_fence(memory_order_seq_cst);
#endif
        epoch = atomic_load(&fence->open_epoch);
        atomic_store_explicit(part, atomic_load_explicit(part, memory_order_relaxed) + bytes, memory_order_release);
        return epoch;
}

/* All that was ever freed into the context's pool. */
static inline uint64_t gr_fence_freed_bytes(const struct gr_fence *fence)
{
        return gr_sharded_sum(&fence->freed_bytes) + gr_sharded_sum(&fence->arena_freed_bytes);
}

/* Whether anything was freed since the newest closed epoch. */
static inline bool gr_fence_is_open(const struct gr_fence *fence)
{
        return gr_fence_freed_bytes(fence) != atomic_load(&fence->closed_bytes);
}

/* Bytes freed since the newest usable epoch: the quarantine. */
static inline uint64_t gr_fence_quarantine_bytes(struct gr_fence *fence)
{
        uint64_t usable = atomic_load_explicit(&fence->usable_bytes, memory_order_relaxed);
        uint64_t freed = gr_fence_freed_bytes(fence);

        return gr_fence_is_in_order(fence) ? 0 : freed > usable ? freed - usable : 0;
}

/*
 * Closes the open epoch if anything was freed in it. 0: closed, or nothing to close. -EBUSY: a capture is open.
 * -ENOTSUP: the driver cannot record. Else the driver's error, and the fence is broken.
 */
int gr_fence_close(struct gr_fence *fence);

/* As gr_fence_close, but not while another thread has the turn to fence: for callers in no hurry, which call again. */
void gr_fence_close_soon(struct gr_fence *fence);

/*
 * Closes the open epoch before the program submits work that may never end, or behind which no event can be recorded:
 * an event that is recorded later would wait for that work. gr_fence_close_before_capture also closes it if nothing was
 * freed but a stream began to wait for others: the event then shows when that wait is over. Cheap if there is nothing
 * to close.
 */
void gr_fence_close_before_wait(struct gr_fence *fence);
void gr_fence_close_before_capture(struct gr_fence *fence);

/*
 * How many bytes a thread frees into an epoch before it closes it. An open epoch also covers work that starts later,
 * which delays its blocks; but each epoch costs a record and a query. So this is a small part of live memory or, where
 * barriers are cheap and close the epoch anyway, of the device. At least GR_FENCE_CLOSE_BYTES.
 */
uint64_t gr_fence_close_bytes(struct gr_fence *fence);

/* Asks the driver which closed epochs have passed. 0, or the driver's error, and the fence is broken. */
int gr_fence_poll(struct gr_fence *fence);

/* Closes and polls. If another thread is doing that, waits briefly for it, and returns if it has made epoch usable. */
void gr_fence_look_for(struct gr_fence *fence, uint64_t epoch);

/*
 * Whether a barrier costs nothing but its call: all work goes to the default stream, so there is no overlap to lose; no
 * stream waits for others; and no other context can reach the blocks. Also true where the program asked for barriers
 * (GPURECLAIM_REUSE=barrier).
 */
bool gr_fence_barrier_is_cheap(struct gr_fence *fence);

/*
 * Whether a barrier that costs overlap may be laid. Not behind a kernel that does not end, as it may wait for later
 * work, and not where streams wait for others.
 */
bool gr_fence_barrier_is_safe(struct gr_fence *fence);

/*
 * Makes all blocks freed so far usable: closes the epoch and makes all later work wait for it on the GPU. Without
 * cuCtxRecordEvent the host waits instead. -EBUSY: a capture is open. Else the driver's error, and the fence is broken.
 */
int gr_fence_barrier(struct gr_fence *fence);

/*
 * As gr_fence_barrier, for blocks of this and earlier epochs only: a barrier of another thread, waited for briefly, may
 * serve as well.
 */
int gr_fence_barrier_for(struct gr_fence *fence, uint64_t epoch);

/*
 * Waits on the host until the oldest pending epoch has passed, polling gently, at most until deadline_ns. 0: one more
 * has passed; -ENOENT: none is pending; -ETIMEDOUT; or as gr_fence_poll.
 */
int gr_fence_wait_oldest(struct gr_fence *fence, uint64_t deadline_ns);

/*
 * How long the oldest closed epoch has been the oldest, in ns; 0 where none is. A GPU that is behind the host keeps
 * passing epochs, however old; one that passes none runs a kernel that does not end.
 */
uint64_t gr_fence_stuck_ns(struct gr_fence *fence);

/* How many contexts can reach the blocks, 1 for the owner alone. Takes no lock. */
unsigned gr_fence_accessors(struct gr_fence *fence);

/* Whether a context of another device can reach the blocks. */
bool gr_fence_has_peer(struct gr_fence *fence);

#endif
