/* Fences beside captures: the gate between the two, and how the host waits for the GPU meanwhile. */
#include <errno.h>
#include <pthread.h>
#include <unistd.h>

#include "fence_gpu.h"

static void (*at_gate)(void); /* called once */

/* In place of the C library's, with which a fence passes the gate. */
int pthread_rwlock_rdlock(pthread_rwlock_t *lock)
{
        void (*before)(void) = at_gate;

        at_gate = NULL;
        if (before)
                before();
        while (pthread_rwlock_tryrdlock(lock))
                sched_yield();
        return 0;
}

static void test_gate(void)
{
        uint64_t epoch;

        start();
        epoch = freed_after(5);
        sg_capture(1);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        GR_CHECK_EQ(gr_fence_close(context->fence), -EBUSY);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), -EBUSY);
        sg_fail(SG_CONTEXT_DRAIN, 1, 1, -ENOMEM);
        GR_CHECK_EQ(gr_fence_sync(context->fence), -EBUSY);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0); /* queries do no harm */
        GR_CHECK(!gr_fence_usable(fence, epoch));

        /* A second one begins and ends; the first goes on. */
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        gr_gate_end(&core.gate);
        GR_CHECK_EQ(gr_fence_close(context->fence), -EBUSY);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD) + sg_calls(SG_CONTEXT_WAIT) + sg_calls(SG_CONTEXT_SYNC), 0);
        GR_CHECK_EQ(atomic_load(&fence->broken), 0);
        gr_gate_end(&core.gate);
        sg_capture(-1);

        /* One whose begin failed is none. */
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, false);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK(gr_fence_usable(fence, epoch));
        finish();
}

static void *begin_capture(void *arg)
{
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        return arg;
}

static void begin_elsewhere(void)
{
        pthread_t thread;

        GR_CHECK_EQ(pthread_create(&thread, NULL, begin_capture, NULL), 0);
        pthread_join(thread, NULL);
}

/* A capture begins when a fence has seen none, and before it has passed the gate. */
static void test_gate_late(void)
{
        start();
        at_gate = begin_elsewhere;
        GR_CHECK(!gr_gate_enter(&core.gate));
        gr_gate_end(&core.gate);
        GR_CHECK(gr_gate_enter(&core.gate));
        gr_gate_leave(&core.gate);
        finish();
}

/* That a wait for the captures was vain holds until the last of them has ended; others that begin beside it change
 * nothing. */
static void test_gate_vain(void)
{
        start();
        GR_CHECK(!gr_gate_is_vain(&core.gate));
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        GR_CHECK(!gr_gate_is_vain(&core.gate));
        gr_gate_note_vain(&core.gate);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        GR_CHECK(gr_gate_is_vain(&core.gate));
        gr_gate_end(&core.gate);
        GR_CHECK(gr_gate_is_vain(&core.gate));
        gr_gate_end(&core.gate);
        GR_CHECK(!gr_gate_is_vain(&core.gate));
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        GR_CHECK(!gr_gate_is_vain(&core.gate));
        gr_gate_end(&core.gate);
        finish();
}

/* Beside a capture the host can still wait: in each context that reaches the blocks, and for what was freed before. */
static void test_drain(bool old_driver)
{
        struct gr_context *other;
        uint64_t before, closed, epoch;

        start_with(old_driver ? &sg_old_driver : &sg_driver);
        gr_core_context_add(&core, sg_context_new(1), 1); /* reaches none of them, and is not waited for */
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        before = freed_after(5);
        gr_fence_close(context->fence);
        closed = freed_after(10);
        gr_fence_close(context->fence);
        sg_work(other->handle, 0, 0, 40 * SG_MS);
        gr_gate_begin_enter(&core.gate);
        sg_capture(1);
        gr_gate_begin_leave(&core.gate, true);
        epoch = freed_after(20);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), 2);
        GR_CHECK_EQ(sg_driver.now_ns() - SG_FIRST_NS, 40 * SG_MS);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_syncs), 1);
        GR_CHECK(gr_fence_idle(fence, before) && gr_fence_idle(fence, closed) && gr_fence_idle(fence, epoch));
        GR_CHECK(!gr_fence_waiting(context->fence));
        GR_CHECK(!gr_fence_usable(fence, freed_after(1)));
        GR_CHECK(gr_fence_waiting(context->fence));

        /* One that is about to end is not waited for, so nothing is said of its work. */
        other->ending = true;
        GR_CHECK_EQ(gr_fence_sync(context->fence), -EBUSY);
        gr_fence_forget(context->fence, other);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);

        /* Nor is one that was forgotten, even if a new context has its place in memory. */
        other->ending = false;
        sg_work(context->handle, 0, 0, 20 * SG_MS);
        before = sg_driver.now_ns();
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(sg_driver.now_ns() - before, 20 * SG_MS);

        gr_core_context_add(&core, sg_context_new(0), 0); /* to wait for it makes good no error of another */
        sg_fail(SG_CONTEXT_DRAIN, 1, 1, DRIVER_700);
        GR_CHECK_EQ(gr_fence_sync(context->fence), DRIVER_700);
        GR_CHECK_EQ(atomic_load(&fence->broken), DRIVER_700);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        finish();
}

static _Atomic int stage;

static void *barrier_in_thread(void *arg)
{
        (void)arg;
        stage = 1;
        gr_fence_barrier(context->fence); /* waits for the gate, or finds the capture */
        stage = 2;
        return NULL;
}

/* Between enter and leave, while the driver begins the capture, another thread's record must wait. */
static void test_gate_threads(void)
{
        pthread_t thread;

        for (int i = 0; i < 200; i++) {
                start();
                freed_after(5);
                stage = 0;
                gr_gate_begin_enter(&core.gate);
                sg_capture(1); /* as far as the driver is concerned it is on from here */
                pthread_create(&thread, NULL, barrier_in_thread, NULL);
                while (stage == 0)
                        ;
                for (int spin = 0; spin < i * 10; spin++)
                        sg_driver.now_ns();
                GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD) + sg_calls(SG_CONTEXT_WAIT), 0);
                gr_gate_begin_leave(&core.gate, true);
                pthread_join(thread, NULL);
                GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD) + sg_calls(SG_CONTEXT_WAIT), 0);
                sg_capture(-1);
                gr_gate_end(&core.gate);
                finish();
        }
}

static void *begin_in_thread(void *arg)
{
        (void)arg;
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, false);
        return NULL;
}

/* A capture that waits to begin keeps new fences out, so that it waits for those inside only. */
static void test_gate_turn(void)
{
        pthread_t thread;
        int rc = 0;

        start();
        pthread_rwlock_rdlock(&core.gate.lock); /* a fence inside */
        pthread_create(&thread, NULL, begin_in_thread, NULL);
        for (int i = 0; i < 2000 && rc != -EBUSY; i++) {
                usleep(1000);
                freed_after(1);
                rc = gr_fence_close(context->fence);
        }
        GR_CHECK_EQ(rc, -EBUSY);
        pthread_rwlock_unlock(&core.gate.lock);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        finish();
}

static pthread_t capturer;
static _Atomic int captured; /* 1: it is about to begin, 2: it has */

static void *capture(void *arg)
{
        gr_gate_begin_enter(&core.gate);
        sg_capture(1);
        gr_gate_begin_leave(&core.gate, true);
        captured = 2;
        return arg;
}

/* Somebody waits for the GPU: in the meantime another thread begins a capture, and submits. */
static void capture_beside(void)
{
        if (captured)
                return;
        captured = 1;
        if (pthread_create(&capturer, NULL, capture, NULL))
                abort();
        for (int i = 0; i < 2000 && captured < 2; i++)
                usleep(1000);
        GR_CHECK_EQ(captured, 2);
        GR_CHECK_EQ(pthread_mutex_trylock(&fence->lock.mutex), 0);
        pthread_mutex_unlock(&fence->lock.mutex);
}

static int capture_beside_sync(void *handle)
{
        capture_beside();
        return sg_driver.context_sync(handle);
}

static void capture_beside_sleep(uint64_t ns)
{
        capture_beside();
        sg_advance(ns);
}

/* Who waits for the GPU as the driver's own free does is in the way of no capture, nor of another thread's frees. */
static void test_sync_alone(void)
{
        struct gr_driver driver = sg_driver;
        uint64_t epoch;

        driver.context_sync = capture_beside_sync;
        driver.sleep_ns = capture_beside_sleep;
        start_with(&driver);
        captured = 0;
        epoch = freed_after(30);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK(gr_fence_idle(fence, epoch));
        GR_CHECK(sg_driver.now_ns() >= SG_FIRST_NS + 30 * SG_MS);
        pthread_join(capturer, NULL);
        GR_CHECK_EQ(captured, 2);
        sg_capture(-1);
        gr_gate_end(&core.gate);

        /* Also for what the pool has not seen: work that no free is behind. */
        sg_work(context->handle, 0, 0, 10 * SG_MS);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK(sg_driver.now_ns() >= SG_FIRST_NS + 40 * SG_MS);
        finish();
}

int main(void)
{
        test_sync_alone();
        test_gate();
        test_gate_vain();
        test_gate_late();
        test_gate_threads();
        test_gate_turn();
        test_drain(false);
        test_drain(true);
        return GR_CHECK_RESULT();
}
