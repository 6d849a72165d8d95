#include "reclaim/rung.h"

#include <assert.h>
#include <errno.h>

#include "account/budget.h"
#include "base/counters.h"
#include "base/driver.h"
#include "base/lock.h"
#include "context/capture_gate.h"
#include "context/context.h"
#include "fence/fence.h"
#include "fence/fence_wait.h"
#include "host/pinned.h"
#include "reclaim/reclaimable.h"
#include "reclaim/trim.h"

#define SYNC_PEERS_NS UINT64_C(1000000000) /* as GR_SYNC_NS, where work may wait for later work of the program */
#define GATE_NS       UINT64_C(100000000)  /* longest wait for captures of other threads to end */
#define GATE_PAUSE_NS UINT64_C(50000)

struct reclaim {
        uint64_t want_bytes;
        uint64_t back_bytes;
        bool (*visit)(struct gr_context *, void *);
        struct gr_context *first; /* visited before the others */
        bool overtaken;           /* other threads freed during the wait for the GPU: their blocks may be idle now */
        bool locked;              /* the caller has the device's ladder_lock */
};

static bool trim_one(struct gr_context *context, void *arg)
{
        struct reclaim *reclaim = arg;

        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        assert(reclaim->back_bytes <= reclaim->want_bytes); /* else the visits have ended */
        reclaim->back_bytes += gr_trim(context, reclaim->want_bytes - reclaim->back_bytes);
        return reclaim->back_bytes < reclaim->want_bytes;
}

/* Around a wait of the host: releases the ladder's lock, as the GPU may wait for a thread that needs it. */
GR_NOT_CHECKED static void unlock_ladder(struct gr_context *context, const struct reclaim *reclaim)
{
        if (reclaim->locked)
                gr_unlock(&context->device->ladder_lock);
}

GR_NOT_CHECKED static void relock_ladder(struct gr_context *context, const struct reclaim *reclaim)
{
        if (reclaim->locked)
                gr_lock(&context->device->ladder_lock);
}

static int sync_unlocked(struct gr_context *context, const struct reclaim *reclaim, uint64_t deadline_ns)
{
        int rc;

        unlock_ladder(context, reclaim);
        rc = gr_fence_sync_by(context->fence, deadline_ns);
        relock_ladder(context, reclaim);
        return rc;
}

static int wait_oldest_unlocked(struct gr_context *context, const struct reclaim *reclaim, uint64_t deadline_ns)
{
        int rc;

        unlock_ladder(context, reclaim);
        rc = gr_fence_wait_oldest(context->fence, deadline_ns);
        relock_ladder(context, reclaim);
        return rc;
}

/*
 * As gr_fence_close, but waits up to GATE_NS for open captures to end. Once such a wait was in vain, no other follows
 * until all captures have ended.
 */
static int close_soon(struct gr_context *context)
{
        struct gr_gate *gate = &context->core->gate;
        const struct gr_driver *driver = context->core->driver;
        uint64_t deadline_ns = driver->now_ns() + GATE_NS;
        int rc = gr_fence_close(context->fence);

        if (rc != -EBUSY || gr_gate_is_vain(gate))
                return rc;
        gr_gate_await_begin(gate);
        while (rc == -EBUSY && !gr_gate_is_vain(gate)) {
                if (driver->now_ns() >= deadline_ns) {
                        gr_gate_note_vain(gate);
                        break;
                }
                driver->sleep_ns(GATE_PAUSE_NS);
                gr_fence_poll(context->fence);
                rc = gr_fence_close(context->fence);
        }
        gr_gate_await_end(gate);
        return rc;
}

/* Whether no work waits for later work of the program, so that all of it ends by itself. */
static bool is_patient(struct gr_context *context)
{
        return !gr_fence_has_peer(context->fence) && !atomic_load(&context->core->waits_for_others);
}

/*
 * Waits epoch by epoch, up to the newest that is closed by now, as other threads close new ones all the time. Blocks
 * freed in an epoch that cannot be closed, as during a capture, need more: the host waits for all work of the context,
 * as the driver's own free does. Where work may wait for later work of the program (not `patient`), that could hang.
 * Then open captures are given time to end, and the host waits only once all work that waits for others is known to be
 * done.
 */
static bool sync_one(struct gr_context *context, void *arg)
{
        struct reclaim *reclaim = arg;
        bool patient = is_patient(context);
        uint64_t deadline_ns = context->core->driver->now_ns() + (patient ? GR_SYNC_NS : SYNC_PEERS_NS);
        uint64_t freed_bytes = gr_fence_freed_bytes(context->fence), last_epoch;
        int closed = 0, rc;

        assert(reclaim->back_bytes <= reclaim->want_bytes); /* else the visits have ended */
        if (gr_fence_waiting(context->fence))
                closed = patient ? gr_fence_close(context->fence) : close_soon(context);
        last_epoch = gr_fence_closed_epoch(context->fence);
        do {
                bool all_idle = gr_fence_idle(context->fence, last_epoch);

                reclaim->back_bytes += gr_trim(context, reclaim->want_bytes - reclaim->back_bytes);
                rc = -ENOENT;
                if (reclaim->back_bytes < reclaim->want_bytes && !all_idle)
                        rc = wait_oldest_unlocked(context, reclaim, deadline_ns);
        } while (rc == 0);
        if (reclaim->back_bytes < reclaim->want_bytes && rc != -ETIMEDOUT) {
                if ((closed || rc != -ENOENT) && gr_fence_waiting(context->fence))
                        rc = sync_unlocked(context, reclaim, deadline_ns);
                if (gr_driver_code(rc)) /* the driver may have failed only this once: try again */
                        rc = sync_unlocked(context, reclaim, deadline_ns);
                /* Also where another thread has seen the last epoch pass meanwhile. */
                reclaim->back_bytes += gr_trim(context, reclaim->want_bytes - reclaim->back_bytes);
        }
        if ((rc == 0 || rc == -ENOENT) && gr_fence_freed_bytes(context->fence) != freed_bytes)
                reclaim->overtaken = true;
        return reclaim->back_bytes < reclaim->want_bytes;
}

static bool visit_other(struct gr_context *context, void *arg)
{
        struct reclaim *reclaim = arg;

        return context == reclaim->first || reclaim->visit(context, reclaim);
}

static uint64_t trim_driver(struct gr_context *context)
{
        const struct gr_driver *driver = context->core->driver;
        uint64_t before, after, total;
        bool known = driver->mem_info(context->handle, &before, &total) == 0;

        driver->trim_pools(context->handle, context->device->ordinal);
        if (!known || driver->mem_info(context->handle, &after, &total))
                return 0;
        return after > before ? after - before : 0;
}

static bool wait_driver(struct gr_context *context, void *deadline_ns)
{
        if (gr_fence_sync_by(context->fence, *(uint64_t *)deadline_ns) == 0)
                gr_fence_wait_driver(context->fence);
        return true;
}

/*
 * Memory freed in stream order, or of a graph, goes back to the driver once the host has waited for the stream or its
 * context, by a call of the driver: that an event has passed is not enough (docs/measurements.md,
 * stream-ordered-return). That call has no deadline, so a wait with a deadline comes first. That wait may be
 * long only where all work ends by itself.
 *
 * After it, only work that another thread submits in between can hold the call up. It hangs only if that work waits for
 * something that this thread does after its allocation, which no event could show beforehand. Such a program takes the
 * same risk natively: the driver itself may wait for the context where it allocates or frees memory.
 */
static uint64_t trim_in_order(struct gr_context *context, const struct reclaim *reclaim, uint64_t begin_ns)
{
        struct gr_device *device = context->device;
        uint64_t deadline_ns =
                is_patient(context) ? begin_ns + GR_SYNC_NS : context->core->driver->now_ns() + SYNC_PEERS_NS;

        if (atomic_load(&device->kind_bytes[GR_MEMORY_STREAM_ORDERED]) == 0 &&
            atomic_load(&device->kind_bytes[GR_MEMORY_GRAPH]) == 0)
                return 0;
        unlock_ladder(context, reclaim);
        gr_context_each(context->core, device->ordinal, wait_driver, &deadline_ns);
        relock_ladder(context, reclaim);
        return trim_driver(context);
}

static bool collect_one_blind(struct gr_context *context, void *arg)
{
        (void)arg;
        if (gr_fence_is_blind(context->fence) && is_patient(context))
                context->core->collect_blind(context);
        return true;
}

/* Memory of graphs that are gone, where no fence says when other work is done with it: the driver's free waits. */
static uint64_t collect_blind(struct gr_context *context, const struct reclaim *reclaim)
{
        struct gr_device *device = context->device;
        uint64_t before = atomic_load(&device->reserved_bytes), after;

        unlock_ladder(context, reclaim);
        gr_context_each(context->core, device->ordinal, collect_one_blind, NULL);
        relock_ladder(context, reclaim);
        after = atomic_load(&device->reserved_bytes);
        return before > after ? before - after : 0;
}

/* As gr_rung_run, or with `locked` as gr_rung_run_locked. */
static uint64_t run_maybe_locked(struct gr_context *context, enum gr_rung rung, uint64_t want_bytes, bool locked,
                                 bool *ret_overtaken)
{
        struct gr_core *core = context->core;
        struct gr_device *device = context->device;
        struct reclaim reclaim = {.want_bytes = want_bytes, .locked = locked};
        uint64_t begin_ns = core->driver->now_ns();

        *ret_overtaken = false;
        switch (rung) {
        case GR_RUNG_PURGE:
        case GR_RUNG_DROP: {
                uint64_t before = gr_budget_live(device), after;

                gr_lock_rank_assert_free_from(GR_RANK_LADDER); /* reclaimables may wait for other threads */
                gr_reclaimables_run(core, rung, device->ordinal, want_bytes, 0);
                after = gr_budget_live(device);
                reclaim.back_bytes = before > after ? before - after : 0;
                break;
        }
        case GR_RUNG_TRIM:
        case GR_RUNG_SYNC:
                /* The request's context first; then the others of the device. */
                reclaim.visit = rung == GR_RUNG_TRIM ? trim_one : sync_one;
                reclaim.first = context;
                if (reclaim.visit(context, &reclaim))
                        gr_context_each(core, device->ordinal, visit_other, &reclaim);
                if (rung == GR_RUNG_SYNC && reclaim.back_bytes < want_bytes)
                        reclaim.back_bytes += collect_blind(context, &reclaim);
                if (rung == GR_RUNG_SYNC && reclaim.back_bytes < want_bytes)
                        reclaim.back_bytes += trim_in_order(context, &reclaim, begin_ns);
                /* On integrated devices pinned memory is device memory, too. */
                if (device->integrated)
                        reclaim.back_bytes += gr_pinned_reclaim(
                                core, reclaim.back_bytes < want_bytes ? want_bytes - reclaim.back_bytes : 0);
                else if (rung == GR_RUNG_SYNC && reclaim.back_bytes < want_bytes)
                        gr_pinned_reclaim(core, UINT64_MAX);
                if (core->driver->malloc_trim &&
                    (device->integrated || (core->config.malloc_trim && rung == GR_RUNG_SYNC)))
                        core->driver->malloc_trim();
                break;
        case GR_RUNG_DRIVER:
                reclaim.back_bytes = trim_driver(context);
                break;
        case GR_RUNG_NEIGHBOUR:
                /*
                 * Not inside a reclaimable: a neighbour that asks this process meanwhile waits until that reclaimable
                 * has ended.
                 */
                if (!core->ask_neighbours || gr_reclaimable_inside())
                        return 0;
                gr_lock_rank_assert_free_from(GR_RANK_LADDER);
                reclaim.back_bytes = core->ask_neighbours(core, device, want_bytes);
                break;
        default: /* part of the climb itself */
                return 0;
        }
        gr_count_rung(core, device->ordinal, rung, begin_ns, reclaim.back_bytes);
        *ret_overtaken = reclaim.overtaken;
        return reclaim.back_bytes;
}

uint64_t gr_rung_run(struct gr_context *context, enum gr_rung rung, uint64_t want_bytes)
{
        bool overtaken;

        return run_maybe_locked(context, rung, want_bytes, false, &overtaken);
}

struct run_on {
        enum gr_rung rung;
        uint64_t want_bytes, back_bytes;
};

/* One context suffices: a rung covers the whole device. */
static bool run_on_first(struct gr_context *context, void *arg)
{
        struct run_on *run = arg;

        run->back_bytes = gr_rung_run(context, run->rung, run->want_bytes);
        return false;
}

uint64_t gr_rung_run_on(struct gr_core *core, int device, enum gr_rung rung, uint64_t want_bytes)
{
        struct run_on run = {.rung = rung, .want_bytes = want_bytes};

        assert(rung == GR_RUNG_TRIM || rung == GR_RUNG_DRIVER || rung == GR_RUNG_SYNC);
        gr_context_each(core, device, run_on_first, &run);
        return run.back_bytes;
}

uint64_t gr_rung_run_locked(struct gr_context *context, enum gr_rung rung, uint64_t want_bytes, bool *ret_overtaken)
{
        gr_assert_locked(&context->device->ladder_lock);
        assert(rung == GR_RUNG_TRIM || rung == GR_RUNG_DRIVER || rung == GR_RUNG_SYNC);
        return run_maybe_locked(context, rung, want_bytes, true, ret_overtaken);
}
