/* The ladder while other threads take memory, give it back, climb, or wait for the GPU. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "ladder_gpu.h"
#include "reclaim/trim.h"

/* A driver that takes its time to take memory back: until somebody else sleeps. */
static struct gr_driver slow_driver;
static _Atomic bool taking, slept;

static int slow_release(void *handle, const uint64_t *ptrs, size_t count, size_t *ret_done)
{
        atomic_store(&taking, true);
        while (!atomic_load(&slept))
                sched_yield();
        return sg_driver.mem_release(handle, ptrs, count, ret_done);
}

static void slow_sleep(uint64_t ns)
{
        atomic_store(&slept, true);
        sched_yield();
        sg_driver.sleep_ns(ns / 1000); /* of the clock, which counts by itself: the other thread needs real time */
}

static void *trim(void *arg)
{
        (void)arg;
        GR_CHECK_EQ(gr_trim(context, MIB), 20 * MIB);
        return NULL;
}

/* What another thread has taken out of the cache, and the driver not had yet, is waited for. */
static void test_returning(void)
{
        pthread_t thread;
        uint64_t ptr;

        slow_driver = sg_driver;
        slow_driver.mem_release = slow_release;
        slow_driver.sleep_ns = slow_sleep;
        start_with(&slow_driver, GR_REUSE_AUTO);
        gr_budget_set_limit(device, GR_LIMIT_HARD, 32 * MIB);
        cache(1, 20 * MIB, 0);
        gr_fence_poll(context->fence);
        atomic_store(&taking, false);
        atomic_store(&slept, false);
        if (pthread_create(&thread, NULL, trim, NULL))
                abort();
        while (!atomic_load(&taking))
                sched_yield();
        GR_CHECK_EQ(sg_alloc(context, 24 * MIB, &ptr), 0);
        atomic_store(&slept, true);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(TRIES(FAIL), 0);
        GR_CHECK_EQ(atomic_load(&device->returns_begun), atomic_load(&device->returns_ended));
        finish();
}

static _Atomic int queue; /* 1: somebody waits for the GPU, 2: and another thread was served, 3: or was not in time */

static void *climb_beside(void *arg)
{
        uint64_t ptr;

        (void)arg;
        sg_fail(SG_MEM_ALLOC, 1, 2, -ENOMEM); /* at first, and after PURGE; what it needs is there */
        GR_CHECK_EQ(sg_alloc(context, 10 * MIB, &ptr), 0);
        atomic_store(&queue, 2);
        return NULL;
}

/* The clock stands still while the GPU waits for what the other thread submits once it has its memory. */
static void waiting_sleep(uint64_t ns)
{
        static pthread_t thread;
        int none = 0;

        if (atomic_compare_exchange_strong(&queue, &none, 1)) {
                if (pthread_create(&thread, NULL, climb_beside, NULL))
                        abort();
                for (int i = 0; i < 2000 && atomic_load(&queue) == 1; i++)
                        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
                GR_CHECK_EQ(atomic_load(&queue), 2);
                pthread_detach(thread);
        }
        sg_advance(ns);
}

/* Whoever waits for the GPU is in nobody's way: another thread that needs a rung gets it meanwhile. */
static void test_waits_alone(void)
{
        struct gr_driver driver = sg_driver;
        uint64_t busy, ptr;

        driver.sleep_ns = waiting_sleep;
        start_with(&driver, GR_REUSE_AUTO);
        atomic_store(&core.streams_overlap, true);
        busy = alloc(40 * MIB);
        sg_work(context->handle, 0, busy, 50 * SG_MS);
        free_ok(busy);
        atomic_store(&queue, 0);
        GR_CHECK_EQ(sg_alloc(context, 50 * MIB, &ptr), 0);
        GR_CHECK_EQ(atomic_load(&queue), 2);
        finish();
}

enum { OVERTAKERS = 15 };

static struct {
        uint64_t ptrs[OVERTAKERS];
        unsigned rounds, begun;
        pthread_t threads[8];
        _Atomic bool holding;
} overtaker;

/* Takes and frees again what a wait has readied, before the climber who waited has its lock back. */
static void *overtake(void *arg)
{
        uint64_t idle = atomic_load(&context->fence->idle_epoch);

        gr_lock(&device->ladder_lock);
        atomic_store(&overtaker.holding, true);
        while (atomic_load(&context->fence->idle_epoch) == idle)
                sched_yield();
        for (unsigned i = 0; i < OVERTAKERS; i++)
                overtaker.ptrs[i] = alloc(4 * MIB);
        for (unsigned i = 0; i < OVERTAKERS; i++)
                free_ok(overtaker.ptrs[i]);
        gr_unlock(&device->ladder_lock);
        return arg;
}

static int overtaken_drain(void *handle)
{
        if (overtaker.rounds > 0) {
                overtaker.rounds--;
                atomic_store(&overtaker.holding, false);
                if (pthread_create(&overtaker.threads[overtaker.begun++], NULL, overtake, NULL))
                        abort();
                while (!atomic_load(&overtaker.holding))
                        sched_yield();
        }
        return sg_driver.context_drain(handle);
}

/* Beside a capture only a wait readies what is freed: that others reuse it first is no reason to fail. */
static void test_overtaken(unsigned rounds)
{
        struct gr_driver driver = sg_driver;
        uint64_t ptr;

        driver.context_drain = overtaken_drain;
        start_with(&driver, GR_REUSE_AUTO);
        sg_capture(1);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        for (unsigned i = 0; i < OVERTAKERS; i++)
                overtaker.ptrs[i] = alloc(4 * MIB);
        for (unsigned i = 0; i < OVERTAKERS; i++)
                free_ok(overtaker.ptrs[i]);
        overtaker.rounds = rounds;
        overtaker.begun = 0;
        GR_CHECK_EQ(sg_alloc(context, 16 * MIB, &ptr), 0);
        GR_CHECK_EQ(overtaker.rounds, 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), rounds + 1);
        while (overtaker.begun > 0)
                pthread_join(overtaker.threads[--overtaker.begun], NULL);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        finish();
}

static void *trim_all(void *arg)
{
        (void)arg;
        gr_trim(context, UINT64_MAX / 2);
        return NULL;
}

/* Only what another thread has really given back is a reason to try again. */
static void test_others_returns(void)
{
        uint64_t seen;

        start();
        for (int cached = 0; cached < 2; cached++) {
                pthread_t thread;

                if (cached)
                        cache(1, 20 * MIB, 0);
                gr_fence_poll(context->fence);
                seen = gr_budget_returns_of_others(device);
                if (pthread_create(&thread, NULL, trim_all, NULL))
                        abort();
                pthread_join(thread, NULL);
                GR_CHECK_EQ(gr_budget_returns_of_others(device) != seen, cached);
                GR_CHECK(!gr_budget_returns_in_flight(device));
        }
        cache(1, 20 * MIB, 0);
        gr_fence_poll(context->fence);
        seen = gr_budget_returns_of_others(device);
        GR_CHECK(gr_trim(context, UINT64_MAX / 2) > 0);
        GR_CHECK_EQ(gr_budget_returns_of_others(device), seen);
        finish();
}

static struct gr_context *polled; /* by another thread, while memory of it goes back */

static int polled_release(void *handle, const uint64_t *ptrs, size_t count, size_t *ret_done)
{
        if (polled) {
                sg_advance(10 * SG_MS);
                GR_CHECK_EQ(gr_fence_poll(polled->fence), 0);
                polled = NULL;
        }
        return sg_driver.mem_release(handle, ptrs, count, ret_done);
}

/* What another thread has seen to have passed goes back as well, where nothing is left to wait for. */
static void test_sync_polled(void)
{
        struct gr_driver driver = sg_driver;
        struct gr_context *other;
        uint64_t blocks[3], ptr = 0;

        driver.mem_release = polled_release;
        start_with(&driver, GR_REUSE_AUTO);
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(sg_alloc(other, i < 2 ? 1000 : 32 * MIB, &blocks[i]), 0);
        for (int i = 1; i < 3; i++) {
                sg_work(other->handle, 0, blocks[i], 2 * SG_MS);
                free_ok(blocks[i]); /* the first gives nothing back by itself */
                gr_fence_close(other->fence);
        }
        polled = other;
        GR_CHECK_EQ(sg_alloc(context, 48 * MIB, &ptr), 0);
        GR_CHECK(!polled);
        finish();
}

int main(void)
{
        test_returning();
        test_waits_alone();
        test_overtaken(0);
        test_overtaken(1);
        test_overtaken(8);
        test_others_returns();
        test_sync_polled();
        return GR_CHECK_RESULT();
}
