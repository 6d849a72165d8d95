#include "fence/fence_wait.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "account/budget.h"
#include "base/counters.h"
#include "base/driver.h"
#include "base/lock.h"
#include "context/capture_gate.h"
#include "context/context.h"
#include "fence/fence.h"
#include "fence/fence_epoch.h"

#define SYNC_LOOKS         100
#define KERNEL_FAILED_LAST 719

/* The contexts to wait for, and the number of those that have been waited for. */
struct drain {
        struct gr_context *accessors[GR_ACCESSORS_MAX];
        unsigned accessor_count, drained;
        uint64_t deadline_ns;
        int rc;
};

static bool is_accessor(const struct drain *drain, const struct gr_context *context)
{
        bool wanted = false;

        for (unsigned i = 0; i < drain->accessor_count; i++)
                wanted |= drain->accessors[i] == context;
        return wanted;
}

static bool drain_one(struct gr_context *context, void *arg)
{
        struct drain *drain = arg;

        if (is_accessor(drain, context)) {
                drain->rc = context->core->driver->context_drain(context->handle);
                drain->drained += drain->rc == 0;
        }
        return drain->rc == 0 && drain->drained < drain->accessor_count;
}

static bool wait_one(struct gr_context *context, void *arg)
{
        struct drain *drain = arg;
        struct gr_fence *fence = context->fence;
        uint64_t last_epoch = gr_fence_closed_epoch(fence);

        drain->rc = 0;
        if (is_accessor(drain, context))
                while (drain->rc == 0 && !gr_fence_idle(fence, last_epoch))
                        drain->rc = gr_fence_wait_oldest(fence, drain->deadline_ns);
        return drain->rc != -ETIMEDOUT;
}

/* Copies the accessors, so that the wait for them needs no lock. Lock held. */
static void copy_accessors(struct gr_fence *fence, struct drain *drain)
{
        gr_assert_locked(&fence->lock);
        _Static_assert(sizeof(drain->accessors) == sizeof(fence->accessors), "all are copied");
        memcpy(drain->accessors, fence->accessors, sizeof(drain->accessors));
        drain->accessor_count = fence->accessor_count;
}

/*
 * As gr_fence_sync_by_driver, but works while captures are open, too. The fence's lock is not held during the wait:
 * other threads may need it to submit work that the GPU waits for. What is freed meanwhile belongs to a later epoch.
 */
static int drain_contexts(struct gr_fence *fence)
{
        struct drain drain = {0};
        struct gr_epoch all;

        if (!fence->core->driver->context_drain)
                return -EBUSY;
        gr_lock(&fence->lock);
        copy_accessors(fence, &drain);
        all = gr_fence_end_epoch(fence);
        gr_unlock(&fence->lock);
        gr_context_each(fence->core, -1, drain_one, &drain);
        assert(drain.drained <= drain.accessor_count); /* each context once */
        if (drain.rc)
                return gr_fence_failed(fence, drain.rc);
        if (drain.drained < drain.accessor_count)
                return -EBUSY;
        gr_count(fence->core, GR_COUNTER_syncs, 1);
        gr_lock(&fence->lock);
        gr_fence_all_passed(fence, &all);
        gr_unlock(&fence->lock);
        return 0;
}

/*
 * Records an event and waits until it has passed. No lock is held during the wait, so captures may begin, and other
 * threads may submit work that the GPU waits for. -EBUSY, -ENOTSUP: no event could be recorded; -ETIMEDOUT.
 */
static int wait_behind_record(struct gr_fence *fence, uint64_t deadline_ns)
{
        uint64_t epoch;
        int rc = gr_fence_is_broken(fence) ? -ENOTSUP : gr_fence_close_always(fence, &epoch);

        /* Spin first: the work may be nearly done, and a sleep takes longer. */
        for (unsigned n = 1; !rc && !gr_fence_idle(fence, epoch) && n <= SYNC_LOOKS; n++) {
                rc = gr_fence_poll(fence);
                gr_lock_pause(n);
        }
        while (!rc && !gr_fence_idle(fence, epoch)) {
                rc = gr_fence_wait_oldest(fence, deadline_ns);
                if (rc == -ENOENT) /* another thread has seen it pass */
                        rc = 0;
        }
        if (!rc)
                gr_count(fence->core, GR_COUNTER_syncs, 1);
        return rc;
}

/* Waits by the driver's own calls, which have no deadline. */
static int wait_without_record(struct gr_fence *fence)
{
        int rc = gr_fence_sync_by_driver(fence);

        return rc == -EBUSY ? drain_contexts(fence) : rc;
}

int gr_fence_sync(struct gr_fence *fence)
{
        int rc;

        gr_lock_rank_assert_free_from(GR_RANK_LADDER + 1);
        rc = wait_behind_record(fence, UINT64_MAX);
        return rc == -EBUSY || rc == -ENOTSUP ? wait_without_record(fence) : rc;
}

/* Whether streams may still wait for a later action of the program. A wait before an epoch that has passed is over. */
static bool may_wait(struct gr_fence *fence)
{
        return atomic_load(&fence->core->waits_begun) != atomic_load(&fence->waits_over);
}

int gr_fence_wait_driver(struct gr_fence *fence)
{
        int rc;

        if (!gr_gate_enter(&fence->core->gate))
                return -EBUSY;
        rc = fence->core->driver->context_sync(fence->owner->handle);
        gr_gate_leave(&fence->core->gate);
        return rc;
}

int gr_fence_wait_work(struct gr_fence *fence)
{
        const struct gr_driver *driver = fence->core->driver;
        int rc = gr_fence_wait_driver(fence);

        if (rc && driver->context_drain)
                rc = driver->context_drain(fence->owner->handle);
        /* This may break a capture. Not to wait would be worse: memory could be used again while work uses it. */
        return rc ? driver->context_sync(fence->owner->handle) : 0;
}

static bool wait_for_context(struct gr_context *context, void *arg)
{
        int *rc = arg;

        for (int tries = 0; tries < 2; tries++) { /* the driver may have failed only this once */
                *rc = gr_fence_wait_work(context->fence);
                if (gr_driver_code(*rc) >= GR_KERNEL_FAILED && gr_driver_code(*rc) <= KERNEL_FAILED_LAST)
                        *rc = 0; /* no work of it runs any more */
                if (!*rc)
                        return true;
        }
        return false;
}

int gr_fence_wait_all(struct gr_fence *fence)
{
        int rc = 0;

        gr_context_each(fence->core, gr_fence_has_peer(fence) ? -1 : fence->device->ordinal, wait_for_context, &rc);
        return rc;
}

int gr_fence_sync_by(struct gr_fence *fence, uint64_t deadline_ns)
{
        struct drain drain = {.deadline_ns = deadline_ns};
        int rc;

        gr_lock(&fence->lock);
        copy_accessors(fence, &drain);
        gr_unlock(&fence->lock);
        gr_context_each(fence->core, -1, wait_one, &drain);
        if (drain.rc == -ETIMEDOUT)
                return drain.rc;
        rc = wait_behind_record(fence, deadline_ns);
        if (rc != -EBUSY && rc != -ENOTSUP)
                return rc;
        return rc == -EBUSY && may_wait(fence) ? rc : wait_without_record(fence);
}
