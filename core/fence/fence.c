#include "fence/fence.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "account/budget.h"
#include "base/arith.h"
#include "base/attributes.h"
#include "base/counters.h"
#include "base/driver.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/trace_file.h"
#include "context/capture_gate.h"
#include "context/context.h"
#include "fence/fence_epoch.h"

/*
 * A thread closes the epoch after it has freed an eighth of live memory (gr_fence_close_bytes), but at least
 * GR_FENCE_CLOSE_BYTES and at most CLOSE_MOST_BYTES. In all recorded traces that takes no more memory than if each
 * epoch were closed after 32 MiB, and half as many epochs are closed.
 */
#define CLOSE_LIVE_PART 8
#define CLOSE_DEVICE_PART                                                                                              \
        64 /* where barriers are cheap: this part of the device, as a barrier closes the epoch anyway */
#define CLOSE_MOST_BYTES (UINT64_C(256) << 20) /* a record for so much costs nothing beside the work on it */
#define POLL_FIRST_NS    UINT64_C(20000)
#define POLL_MOST_NS     UINT64_C(1000000)
/* an epoch that has not passed for so long may wait behind a kernel that does not end: no barrier is laid */
#define STUCK_NS     UINT64_C(50000000)
#define DRIVER_ENDED 4    /* CUDA's error once the driver has shut down, as it does while a process exits */
#define TURN_LOOKS   2000 /* about 0.1 ms of looks at another thread's turn to fence: most turns are shorter */

_Static_assert(CLOSE_MOST_BYTES >= GR_FENCE_CLOSE_BYTES, "the bounds do not cross");

/* The order of a new fence's work. */
static enum gr_order first_order(const struct gr_fence *fence)
{
        const struct gr_core *core = fence->core;

        return core->config.in_order && fence->owner && core->config.reuse == GR_REUSE_AUTO &&
                               core->driver->context_record && core->driver->context_wait &&
                               !atomic_load(&core->order_over)
                       ? GR_ORDER_KEPT
                       : GR_ORDER_OVER;
}

void gr_fence_init(struct gr_fence *fence, struct gr_core *core, struct gr_device *device, struct gr_context *owner)
{
        assert(!owner || owner->device == device);
        memset(fence, 0, sizeof(*fence));
        fence->core = core;
        fence->device = device;
        fence->owner = owner;
        atomic_init(&fence->open_epoch, 1);
        gr_lock_init(&fence->lock, GR_RANK_FENCE);
        gr_lock_init(&fence->events_lock, GR_RANK_EVENTS);
        fence->accessors[0] = owner;
        fence->accessor_count = owner != NULL;
        atomic_init(&fence->order, first_order(fence));
}

void gr_fence_destroy(struct gr_fence *fence)
{
        free(fence->idle_events);
        gr_lock_destroy(&fence->lock);
        gr_lock_destroy(&fence->events_lock);
}

/* An event of owner: an idle one, or a new one. */
static int event_take(struct gr_context *owner, void **ret_event)
{
        struct gr_fence *fence = owner->fence;
        void *event = NULL;

        gr_lock(&fence->events_lock);
        if (fence->idle_event_count > 0)
                event = fence->idle_events[--fence->idle_event_count];
        gr_unlock(&fence->events_lock);
        gr_assert_gate_entered(&fence->core->gate); /* it is recorded next: no capture may begin meanwhile */
        if (!event)
                return owner->core->driver->event_create(owner->handle, ret_event);
        *ret_event = event;
        return 0;
}

/* Keeps an event for later; one that finds no room is destroyed. */
static void event_give(struct gr_event *event)
{
        struct gr_fence *fence;
        bool kept = false;

        if (!event->context)
                return;
        fence = event->context->fence;
        gr_lock(&fence->events_lock);
        assert(fence->idle_event_count <= fence->idle_event_room);
        if (fence->idle_event_count == fence->idle_event_room) {
                unsigned room = fence->idle_event_room ? 2 * fence->idle_event_room : 16;
                void **grown = realloc(fence->idle_events, room * sizeof(*grown));

                if (grown) {
                        fence->idle_events = grown;
                        fence->idle_event_room = room;
                }
        }
        if (fence->idle_event_count < fence->idle_event_room) {
                fence->idle_events[fence->idle_event_count++] = event->handle;
                kept = true;
        }
        gr_unlock(&fence->events_lock);
        if (!kept)
                event->context->core->driver->event_destroy(event->context->handle, event->handle);
}

static struct gr_epoch *pending_at(struct gr_fence *fence, unsigned i)
{
        gr_assert_locked(&fence->lock);
        assert(i <= fence->pending_count && i < GR_EPOCHS_PENDING); /* the last one is for an epoch that is closing */
        return &fence->pending[(fence->first_pending + i) % GR_EPOCHS_PENDING];
}

static void epoch_recycle(struct gr_epoch *epoch)
{
        assert(epoch->event_count <= GR_ACCESSORS_MAX);
        for (unsigned i = 0; i < epoch->event_count; i++)
                event_give(&epoch->events[i]);
        epoch->event_count = 0;
}

/* Raises counter to `to`; it never falls. Fence lock held. */
static void raise_counter(_Atomic uint64_t *counter, uint64_t to)
{
        gr_lock_rank_assert_held(GR_RANK_FENCE);
        if (atomic_load_explicit(counter, memory_order_relaxed) < to)
                atomic_store_explicit(counter, to, memory_order_release);
}

/* Fence lock held. */
static void set_usable(struct gr_fence *fence, const struct gr_epoch *epoch)
{
        gr_assert_locked(&fence->lock);
        assert(epoch->number < atomic_load(&fence->open_epoch));
        assert(epoch->freed_bytes <= gr_fence_freed_bytes(fence));
        raise_counter(&fence->usable_bytes, epoch->freed_bytes);
        if (epoch->number > atomic_load(&fence->usable_epoch))
                gr_trace_add(GR_ENTRY_QUARANTINE, fence->device->ordinal, 0, 0, gr_fence_quarantine_bytes(fence));
        raise_counter(&fence->usable_epoch, epoch->number);
}

/* Fence lock held. */
static void set_idle(struct gr_fence *fence, const struct gr_epoch *epoch)
{
        set_usable(fence, epoch);
        raise_counter(&fence->idle_epoch, epoch->number);
        raise_counter(&fence->waits_over, epoch->waits);
        assert(atomic_load(&fence->idle_epoch) <= atomic_load(&fence->usable_epoch));
}

int gr_fence_failed(struct gr_fence *fence, int rc)
{
        static _Atomic bool told;
        int code = gr_driver_code(rc);

        if (rc == -EBUSY || rc == -ENOMEM)
                return -EBUSY;
        atomic_store(&fence->broken, rc);
        if (code != DRIVER_ENDED && !atomic_exchange(&told, true))
                gr_log(code < GR_KERNEL_FAILED ? GR_LOG_WARN : GR_LOG_INFO,
                       "the driver's fences fail (CUDA error %d): from now on freed memory goes straight back to it",
                       code);
        return rc;
}

/* Closes the open epoch; with always even if nothing was freed in it. Fence lock and gate held. */
static int close_locked(struct gr_fence *fence, bool always)
{
        const struct gr_driver *driver = fence->core->driver;
        uint64_t freed_bytes = gr_fence_freed_bytes(fence);
        uint64_t waits = atomic_load(&fence->core->waits_given);
        struct gr_epoch *epoch;
        int rc = 0;

        gr_assert_locked(&fence->lock);
        gr_assert_gate_entered(&fence->core->gate);
        assert(freed_bytes >= atomic_load(&fence->closed_bytes)); /* what was freed only grows */
        assert(fence->accessor_count <= GR_ACCESSORS_MAX);
        if (!driver->context_record)
                return -ENOTSUP;
        if (freed_bytes == atomic_load(&fence->closed_bytes) && !always)
                return 0;
        if (fence->pending_count == GR_EPOCHS_PENDING) {
                /* Make room: the event recorded below covers the newest pending epoch as well. */
                fence->pending_count--;
                epoch_recycle(pending_at(fence, fence->pending_count));
        }
        epoch = pending_at(fence, fence->pending_count);

        /*
         * From here on frees go into the next epoch. All uses of blocks in this one were submitted before the records.
         */
        epoch->number = atomic_fetch_add(&fence->open_epoch, 1);
        assert(epoch->event_count == 0); /* else events of an epoch before are lost */
        assert(epoch->number > atomic_load(&fence->usable_epoch));
        assert(fence->pending_count == 0 || epoch->number > pending_at(fence, fence->pending_count - 1)->number);
        epoch->freed_bytes = freed_bytes;
        epoch->waits = waits;
        epoch->closed_ns = driver->now_ns();
        for (unsigned i = 0; i < fence->accessor_count && !rc; i++) {
                struct gr_event *event = &epoch->events[i];

                rc = event_take(fence->accessors[i], &event->handle);
                if (rc)
                        break;
                event->context = fence->accessors[i];
                epoch->event_count++;
                rc = driver->context_record(event->context->handle, event->handle);
        }
        if (rc) {
                epoch_recycle(epoch);
                return gr_fence_failed(fence, rc);
        }
        gr_count(fence->core, GR_COUNTER_epochs, 1);
        if (gr_fence_is_in_order(fence)) /* all blocks are usable, and the trace hears it before the epoch has passed */
                gr_trace_add(GR_ENTRY_QUARANTINE, fence->device->ordinal, 0, 0, 0);
        fence->pending_count++;
        atomic_store(&fence->closed_bytes, freed_bytes);
        atomic_store(&fence->closed_waits, waits);
        return 0;
}

static int close_epoch(struct gr_fence *fence, bool always, uint64_t *ret_epoch)
{
        int rc;

        if (!gr_gate_enter(&fence->core->gate))
                return -EBUSY;
        gr_lock(&fence->lock);
        *ret_epoch = atomic_load(&fence->open_epoch);
        rc = close_locked(fence, always);
        gr_unlock(&fence->lock);
        gr_gate_leave(&fence->core->gate);
        return rc;
}

int gr_fence_close(struct gr_fence *fence)
{
        uint64_t epoch;

        return close_epoch(fence, false, &epoch);
}

int gr_fence_close_always(struct gr_fence *fence, uint64_t *ret_epoch)
{
        return close_epoch(fence, true, ret_epoch);
}

void gr_fence_close_before_wait(struct gr_fence *fence)
{
        if (gr_fence_is_open(fence))
                gr_fence_close(fence);
}

void gr_fence_close_before_capture(struct gr_fence *fence)
{
        uint64_t epoch;
        bool waits = atomic_load(&fence->closed_waits) != atomic_load(&fence->core->waits_given);

        if (waits || gr_fence_is_open(fence))
                close_epoch(fence, waits, &epoch);
}

/* Takes the turn to fence (turn_taken) if no thread has it. False: another thread has it. */
static bool turn_try(struct gr_fence *fence)
{
        return !atomic_load_explicit(&fence->turn_taken, memory_order_relaxed) &&
               !atomic_exchange_explicit(&fence->turn_taken, true, memory_order_acquire);
}

static void turn_end(struct gr_fence *fence)
{
        assert(atomic_load(&fence->turn_taken)); /* by this thread */
        atomic_store_explicit(&fence->turn_taken, false, memory_order_release);
}

uint64_t gr_fence_close_bytes(struct gr_fence *fence)
{
        uint64_t bytes;

        /*
         * A part of the device, not of live memory: adding up live memory reads a cache line of each arena, which its
         * threads write at every hit.
         */
        if (gr_fence_barrier_is_cheap(fence) && !gr_fence_is_in_order(fence))
                return gr_max(atomic_load_explicit(&fence->device->total_bytes, memory_order_relaxed) /
                                      CLOSE_DEVICE_PART,
                              GR_FENCE_CLOSE_BYTES);
        bytes = gr_budget_not_cached(fence->device) / CLOSE_LIVE_PART;
        return gr_min(gr_max(bytes, GR_FENCE_CLOSE_BYTES), CLOSE_MOST_BYTES);
}

void gr_fence_close_soon(struct gr_fence *fence)
{
        if (!turn_try(fence))
                return;
        gr_fence_close(fence);
        turn_end(fence);
}

/* Asks the driver for the epoch's events. 0: all have passed; -EAGAIN: not yet; else the driver's error. */
static int epoch_query(const struct gr_driver *driver, struct gr_epoch *epoch)
{
        for (unsigned i = 0; i < epoch->event_count; i++) {
                int rc = epoch->events[i].context ? driver->event_query(epoch->events[i].handle) : 0;

                if (rc)
                        return rc;
        }
        return 0;
}

/*
 * Sets *ret_count to the number of pending epochs that have passed. They pass in order, so this is a search: steps
 * double while epochs have passed, then halve. 0, or the driver's error. Fence lock held.
 */
static int count_passed(struct gr_fence *fence, unsigned *ret_count)
{
        unsigned passed = 0, running = fence->pending_count, step = 1;
        bool found = false;

        gr_assert_locked(&fence->lock);
        while (passed < running) {
                unsigned asked = passed + step <= running ? passed + step - 1 : running - 1;
                int rc;

                if (found) /* an epoch that has not passed */
                        asked = passed + (running - passed) / 2;
                rc = epoch_query(fence->core->driver, pending_at(fence, asked));
                gr_count(fence->core, GR_COUNTER_polls, 1);
                if (rc == -EAGAIN) {
                        running = asked;
                        found = true;
                } else if (rc) {
                        return rc;
                } else {
                        passed = asked + 1;
                        step *= 2;
                }
        }
        *ret_count = passed;
        return 0;
}

int gr_fence_poll(struct gr_fence *fence)
{
        unsigned passed = 0;
        int rc;

        gr_lock(&fence->lock);
        rc = count_passed(fence, &passed);
        assert(passed <= fence->pending_count);
        if (passed > 0) {
                struct gr_epoch *newest = pending_at(fence, passed - 1);

                assert(newest->number > atomic_load(&fence->idle_epoch)); /* what is idle is pending no more */
                set_idle(fence, newest);
                fence->passed_ns = fence->core->driver->now_ns();
        }
        for (unsigned i = 0; i < passed; i++)
                epoch_recycle(pending_at(fence, i));
        fence->first_pending = (fence->first_pending + passed) % GR_EPOCHS_PENDING;
        fence->pending_count -= passed;
        if (rc)
                gr_fence_failed(fence, rc);
        gr_unlock(&fence->lock);
        return rc;
}

struct gr_epoch gr_fence_end_epoch(struct gr_fence *fence)
{
        struct gr_epoch all = {.freed_bytes = gr_fence_freed_bytes(fence),
                               .waits = atomic_load(&fence->core->waits_given)};

        gr_assert_locked(&fence->lock);
        all.number = atomic_fetch_add(&fence->open_epoch, 1);
        return all;
}

void gr_fence_all_passed(struct gr_fence *fence, const struct gr_epoch *all)
{
        gr_assert_locked(&fence->lock);
        while (fence->pending_count > 0 && pending_at(fence, 0)->number <= all->number) {
                epoch_recycle(pending_at(fence, 0));
                fence->first_pending = (fence->first_pending + 1) % GR_EPOCHS_PENDING;
                fence->pending_count--;
        }
        raise_counter(&fence->closed_bytes, all->freed_bytes);
        set_idle(fence, all);
}

/* Waits on the host for all accessors. Gate held, and fence lock held, so that no epoch closes meanwhile. */
static int sync_locked(struct gr_fence *fence)
{
        struct gr_epoch all = gr_fence_end_epoch(fence);
        int rc = 0;

        gr_assert_gate_entered(&fence->core->gate);
        gr_assert_locked(&fence->lock);
        for (unsigned i = 0; i < fence->accessor_count && !rc; i++)
                rc = fence->core->driver->context_sync(fence->accessors[i]->handle);
        if (rc)
                return gr_fence_failed(fence, rc);
        gr_count(fence->core, GR_COUNTER_syncs, 1);
        gr_fence_all_passed(fence, &all);
        return 0;
}

int gr_fence_sync_by_driver(struct gr_fence *fence)
{
        int rc;

        if (!gr_gate_enter(&fence->core->gate))
                return -EBUSY;
        gr_lock(&fence->lock);
        rc = sync_locked(fence);
        gr_unlock(&fence->lock);
        gr_gate_leave(&fence->core->gate);
        return rc;
}

GR_HOT_CODE bool gr_fence_barrier_is_cheap(struct gr_fence *fence)
{
        const struct gr_core *core = fence->core;

        return core->config.reuse == GR_REUSE_BARRIER ||
               (core->config.reuse == GR_REUSE_AUTO && gr_fence_accessors(fence) == 1 &&
                !atomic_load_explicit(&core->streams_overlap, memory_order_relaxed) &&
                !atomic_load_explicit(&core->waits_for_others, memory_order_relaxed));
}

bool gr_fence_barrier_is_safe(struct gr_fence *fence)
{
        return fence->core->config.reuse == GR_REUSE_AUTO && gr_fence_accessors(fence) == 1 &&
               !atomic_load_explicit(&fence->core->waits_for_others, memory_order_relaxed) &&
               gr_fence_stuck_ns(fence) < STUCK_NS;
}

/* Makes all later work of the context wait for the event of epoch. Fence lock and gate held. */
static int lay_barrier(struct gr_fence *fence, const struct gr_epoch *epoch)
{
        struct gr_core *core = fence->core;
        int rc = 0;

        gr_assert_locked(&fence->lock);
        gr_assert_gate_entered(&fence->core->gate);
        /* Read again: a stream that began to wait for others meanwhile must not come before this barrier. */
        atomic_fetch_add(&core->barriers_being_laid, 1);
        if (atomic_load(&core->waits_for_others) && core->config.reuse != GR_REUSE_BARRIER)
                rc = -EBUSY;
        for (unsigned i = 0; i < fence->accessor_count && !rc; i++)
                for (unsigned j = 0; j < epoch->event_count && !rc; j++)
                        if (epoch->events[j].context)
                                rc = core->driver->context_wait(fence->accessors[i]->handle, epoch->events[j].handle);
        atomic_fetch_sub(&core->barriers_being_laid, 1);
        return rc;
}

/* As gr_fence_barrier. Fence lock and gate held. */
static int barrier_locked(struct gr_fence *fence)
{
        struct gr_epoch *newest;
        int rc;

        gr_assert_locked(&fence->lock);
        if (!fence->core->driver->context_record || !fence->core->driver->context_wait)
                return sync_locked(fence);
        rc = close_locked(fence, false);
        if (rc || fence->pending_count == 0)
                return rc;
        newest = pending_at(fence, fence->pending_count - 1);
        if (newest->number <= atomic_load(&fence->usable_epoch))
                return 0;
        rc = lay_barrier(fence, newest);
        if (rc)
                return gr_fence_failed(fence, rc);
        gr_count(fence->core, GR_COUNTER_barriers, 1);
        set_usable(fence, newest);
        return 0;
}

/* Lays a barrier behind all that was freed so far, unless epoch is usable by then. */
static int barrier_for(struct gr_fence *fence, uint64_t epoch)
{
        int rc = 0;

        if (gr_fence_usable(fence, epoch))
                return 0;
        if (!gr_gate_enter(&fence->core->gate))
                return -EBUSY;
        gr_lock(&fence->lock);
        if (!gr_fence_usable(fence, epoch))
                rc = barrier_locked(fence);
        gr_unlock(&fence->lock);
        gr_gate_leave(&fence->core->gate);
        return rc;
}

bool gr_fence_go_ahead(struct gr_fence *fence, uint64_t epoch)
{
        uint64_t ahead = atomic_load(&fence->ahead_epoch);

        while (ahead < epoch && !atomic_compare_exchange_weak(&fence->ahead_epoch, &ahead, epoch))
                ;
        return atomic_load(&fence->order) == GR_ORDER_KEPT;
}

uint64_t gr_fence_begin_wait(struct gr_fence *fence, struct gr_epoch *ret_epoch)
{
        ret_epoch->number = 0;
        if (!gr_fence_is_in_order(fence) || !gr_fence_is_open(fence))
                return 0;
        gr_lock(&fence->lock);
        *ret_epoch = gr_fence_end_epoch(fence);
        gr_unlock(&fence->lock);
        return ret_epoch->number;
}

void gr_fence_waited(struct gr_fence *fence, const struct gr_epoch *epoch)
{
        gr_lock(&fence->lock);
        if (gr_fence_is_in_order(fence)) /* else work of other streams was not waited for */
                gr_fence_all_passed(fence, epoch);
        gr_unlock(&fence->lock);
}

void gr_fence_end_order(struct gr_fence *fence)
{
        bool entered;
        int rc = 0;

        if (atomic_load(&fence->order) == GR_ORDER_OVER)
                return;
        entered = gr_gate_enter(&fence->core->gate);
        gr_lock(&fence->lock); /* until it is over: another thread may have come first */
        if (atomic_load(&fence->order) == GR_ORDER_KEPT) {
                atomic_store(&fence->order, GR_ORDER_ENDS);
                if (atomic_load(&fence->ahead_epoch) > atomic_load(&fence->usable_epoch)) {
                        rc = entered ? barrier_locked(fence) : -EBUSY;
                        if (rc && entered)
                                rc = sync_locked(fence);
                }
                if (rc) /* blocks that work still uses may have been handed out: at least no more are */
                        atomic_store(&fence->broken, rc);
                atomic_store(&fence->order, GR_ORDER_OVER);
        }
        gr_unlock(&fence->lock);
        if (entered)
                gr_gate_leave(&fence->core->gate);
}

int gr_fence_barrier(struct gr_fence *fence)
{
        return barrier_for(fence, UINT64_MAX);
}

/*
 * Waits for the turn to fence, but not for long: a thread whose turn takes long may be waiting for the driver, and the
 * others then go on without the turn. *ret_mine: the caller has it, and turn_end must follow. True: another thread has
 * made epoch usable meanwhile.
 */
static bool turn_wait(struct gr_fence *fence, uint64_t epoch, bool *ret_mine)
{
        unsigned looks = 0;

        /* Many threads need a fence at the same moment, when a class runs out. On a lock each would wait for all. */
        while (!(*ret_mine = turn_try(fence)) && looks < TURN_LOOKS) {
                do
                        gr_lock_pause(++looks);
                while (atomic_load_explicit(&fence->turn_taken, memory_order_relaxed) && looks < TURN_LOOKS);
                if (gr_fence_usable(fence, epoch))
                        return true;
        }
        return false;
}

int gr_fence_barrier_for(struct gr_fence *fence, uint64_t epoch)
{
        bool mine;
        int rc;

        if (turn_wait(fence, epoch, &mine))
                return 0;
        rc = barrier_for(fence, epoch);
        if (mine)
                turn_end(fence);
        return rc;
}

void gr_fence_look_for(struct gr_fence *fence, uint64_t epoch)
{
        bool mine;

        if (turn_wait(fence, epoch, &mine))
                return;
        if (!gr_fence_usable(fence, epoch)) {
                gr_fence_close(fence);
                gr_fence_poll(fence);
        }
        if (mine)
                turn_end(fence);
}

int gr_fence_wait_oldest(struct gr_fence *fence, uint64_t deadline_ns)
{
        const struct gr_driver *driver = fence->core->driver;
        uint64_t before = atomic_load(&fence->idle_epoch);
        uint64_t pause_ns = POLL_FIRST_NS;

        for (;;) {
                bool pending;
                int rc = gr_fence_poll(fence);

                if (rc)
                        return rc;
                if (atomic_load(&fence->idle_epoch) > before)
                        return 0;
                gr_lock(&fence->lock);
                pending = fence->pending_count > 0;
                gr_unlock(&fence->lock);
                if (!pending)
                        return -ENOENT;
                if (driver->now_ns() >= deadline_ns)
                        return -ETIMEDOUT;
                driver->sleep_ns(pause_ns);
                if (pause_ns < POLL_MOST_NS)
                        pause_ns *= 2;
        }
}

uint64_t gr_fence_stuck_ns(struct gr_fence *fence)
{
        uint64_t since_ns = UINT64_MAX, now_ns;

        gr_lock(&fence->lock);
        if (fence->pending_count > 0) {
                since_ns = pending_at(fence, 0)->closed_ns;
                if (since_ns < fence->passed_ns)
                        since_ns = fence->passed_ns;
        }
        gr_unlock(&fence->lock);
        now_ns = fence->core->driver->now_ns();
        return now_ns > since_ns ? now_ns - since_ns : 0;
}

unsigned gr_fence_accessors(struct gr_fence *fence)
{
        return gr_fence_overflow(fence) ? GR_ACCESSORS_MAX + 1
                                        : atomic_load_explicit(&fence->accessor_count, memory_order_relaxed);
}

bool gr_fence_has_peer(struct gr_fence *fence)
{
        bool has;

        gr_lock(&fence->lock);
        has = fence->overflow_peer;
        for (unsigned i = 0; i < fence->accessor_count; i++)
                has |= fence->accessors[i]->device != fence->device;
        gr_unlock(&fence->lock);
        return has;
}

/* Makes other wait on the GPU for all blocks that a barrier has made usable and that work may still use. */
static int join_barrier(struct gr_fence *fence, struct gr_context *other)
{
        uint64_t usable = atomic_load(&fence->usable_epoch);
        int rc = 0;

        if (usable <= atomic_load(&fence->idle_epoch) || !fence->core->driver->context_wait)
                return 0;
        if (!gr_gate_enter(&fence->core->gate))
                return -EBUSY;
        gr_lock(&fence->lock);
        for (unsigned i = fence->pending_count; i-- > 0;) {
                struct gr_epoch *epoch = pending_at(fence, i);

                /* Only the newest epoch that the barrier covers is waited for: its events cover all before it. */
                if (i > 0 && pending_at(fence, i - 1)->number >= usable)
                        continue;
                for (unsigned j = 0; j < epoch->event_count && !rc; j++)
                        if (epoch->events[j].context)
                                rc = fence->core->driver->context_wait(other->handle, epoch->events[j].handle);
                break;
        }
        gr_unlock(&fence->lock);
        gr_gate_leave(&fence->core->gate);
        return rc;
}

void gr_fence_wait_handed_out(struct gr_fence *fence, uint64_t deadline_ns)
{
        uint64_t usable_epoch;

        gr_fence_end_order(fence);
        usable_epoch = atomic_load(&fence->usable_epoch);
        while (!gr_fence_idle(fence, usable_epoch) && gr_fence_wait_oldest(fence, deadline_ns) == 0)
                ;
}

void gr_fence_add_accessor(struct gr_fence *fence, struct gr_context *other)
{
        bool known = false, joined;

        assert(other && other != fence->owner); /* which is an accessor from the beginning */
        gr_fence_end_order(fence);
        gr_lock(&fence->lock);
        for (unsigned i = 0; i < fence->accessor_count; i++)
                known |= fence->accessors[i] == other;
        if (!known && fence->accessor_count < GR_ACCESSORS_MAX) {
                fence->accessors[fence->accessor_count++] = other;
        } else if (!known) {
                atomic_store(&fence->accessor_overflow, true);
                fence->overflow_peer |= other->device != fence->device;
        }
        joined = known && fence->joining == 0; /* else another thread may not have waited yet */
        fence->joining += !joined;
        gr_unlock(&fence->lock);
        if (joined)
                return;
        if (join_barrier(fence, other) != 0)
                gr_fence_wait_handed_out(fence, UINT64_MAX);
        gr_lock(&fence->lock);
        fence->joining--;
        gr_unlock(&fence->lock);
}

/* Lock held. */
static void forget_accessor(struct gr_fence *fence, struct gr_context *other)
{
        gr_assert_locked(&fence->lock);
        assert(!fence->owner || (fence->accessor_count > 0 && fence->accessors[0] == fence->owner));
        for (unsigned i = 0; i < fence->accessor_count; i++)
                if (fence->accessors[i] == other && other != fence->owner) {
                        fence->accessors[i] = fence->accessors[--fence->accessor_count];
                        break;
                }
        for (unsigned i = 0; i < fence->pending_count; i++) {
                struct gr_epoch *epoch = pending_at(fence, i);

                for (unsigned j = 0; j < epoch->event_count; j++)
                        if (epoch->events[j].context == other)
                                epoch->events[j].context = NULL;
        }
}

void gr_fence_forget(struct gr_fence *fence, struct gr_context *other)
{
        gr_lock(&fence->lock);
        forget_accessor(fence, other);
        gr_unlock(&fence->lock);
}

void gr_fence_reset(struct gr_fence *fence)
{
        assert(fence->owner); /* core->process_fence is never reset */
        gr_lock(&fence->lock);
        forget_accessor(fence, fence->owner);
        fence->accessor_count = 1;
        atomic_store(&fence->accessor_overflow, false);
        fence->overflow_peer = false;
        atomic_store(&fence->broken, 0);
        atomic_store(&fence->order, first_order(fence));
        gr_unlock(&fence->lock);
        gr_lock(&fence->events_lock);
        fence->idle_event_count = 0;
        gr_unlock(&fence->events_lock);
}

bool gr_fence_waiting(struct gr_fence *fence)
{
        bool waiting;

        gr_lock(&fence->lock);
        waiting = fence->pending_count > 0 || gr_fence_is_open(fence);
        gr_unlock(&fence->lock);
        return waiting;
}
