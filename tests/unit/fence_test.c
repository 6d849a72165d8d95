#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "base/log.h"
#include "check.h"
#include "core.h"
#include "fence/fence.h"
#include "scripted.h"

#define DRIVER_700 gr_driver_error(700)

static struct gr_core core;
static struct gr_parts parts;
static struct gr_context *context;
static struct gr_fence *fence;

static void start_with(const struct gr_driver *driver)
{
        sg_reset(64 * MIB);
        gr_core_init(&core, &parts, driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        fence = context->fence;
}

int __real_gr_fence_wait_oldest(struct gr_fence *waiting, uint64_t deadline_ns);
int __wrap_gr_fence_wait_oldest(struct gr_fence *waiting, uint64_t deadline_ns);

static bool seen_beside;

/* Just before it another thread may see the last epoch pass. */
int __wrap_gr_fence_wait_oldest(struct gr_fence *waiting, uint64_t deadline_ns)
{
        if (seen_beside) {
                sg_advance(30 * SG_MS);
                GR_CHECK_EQ(gr_fence_poll(waiting), 0);
        }
        return __real_gr_fence_wait_oldest(waiting, deadline_ns);
}

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

static void start(void)
{
        start_with(&sg_driver);
}

static void finish(void)
{
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

/* Work that ends in ms milliseconds, then the free of a block of 1 MiB. Returns its epoch. */
static uint64_t freed_after(uint64_t ms)
{
        sg_work(context->handle, 0, 0, ms * SG_MS);
        return gr_fence_note_freed(fence, MIB);
}

static void test_poll(void)
{
        uint64_t first, second;

        start();
        GR_CHECK(gr_fence_usable(fence, 0) && gr_fence_idle(fence, 0)); /* epoch 0: nothing ever used it */
        GR_CHECK(!gr_fence_waiting(context->fence));
        GR_CHECK_EQ(gr_fence_close(context->fence), 0); /* nothing was freed */
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 0);

        first = freed_after(5);
        GR_CHECK(gr_fence_waiting(context->fence));
        GR_CHECK(!gr_fence_usable(fence, first));
        GR_CHECK_EQ(gr_fence_quarantine_bytes(fence), MIB);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 1);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0); /* nothing since */
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 1);

        second = freed_after(5);
        GR_CHECK(second > first);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(!gr_fence_usable(fence, first));
        GR_CHECK(gr_fence_waiting(context->fence));

        sg_advance(5 * SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(gr_fence_usable(fence, first) && gr_fence_idle(fence, first));
        GR_CHECK(!gr_fence_usable(fence, second));
        GR_CHECK_EQ(gr_fence_quarantine_bytes(fence), MIB);
        sg_advance(5 * SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(gr_fence_idle(fence, second));
        GR_CHECK(!gr_fence_waiting(context->fence));
        GR_CHECK_EQ(gr_fence_quarantine_bytes(fence), 0);

        /* What is freed after the close is not covered by it. */
        first = freed_after(0);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        second = gr_fence_note_freed(fence, 1);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(gr_fence_idle(fence, first) && !gr_fence_usable(fence, second));
        finish();
}

/* However many epochs are pending and have passed: what has passed is known, with few questions to the driver. */
static void test_poll_many(void)
{
        for (unsigned pending = 1; pending <= GR_EPOCHS_PENDING; pending++)
                for (unsigned passed = 0; passed <= pending; passed += 1 + passed / 4) {
                        uint64_t epochs[GR_EPOCHS_PENDING];
                        unsigned questions, most = 2;

                        start();
                        for (unsigned i = 0; i < pending; i++) {
                                epochs[i] = freed_after(i == 0 ? 5 : 10);
                                GR_CHECK_EQ(gr_fence_close(context->fence), 0);
                        }
                        sg_advance(passed * 10 * SG_MS);
                        questions = sg_calls(SG_EVENT_QUERY);
                        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                        for (unsigned i = 0; i < pending; i++) {
                                GR_CHECK_EQ(gr_fence_idle(fence, epochs[i]), i < passed);
                                GR_CHECK_EQ(gr_fence_usable(fence, epochs[i]), i < passed);
                        }
                        for (unsigned i = passed + 1; i > 1; i /= 2)
                                most += 2;
                        GR_CHECK(sg_calls(SG_EVENT_QUERY) - questions <= most);
                        sg_advance((pending - passed) * 10 * SG_MS);
                        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                        GR_CHECK(gr_fence_idle(fence, epochs[pending - 1]));
                        GR_CHECK(!gr_fence_waiting(context->fence));
                        finish();
                }
}

/* A small part of what is live, within bounds; where barriers close it soon enough, of the card. */
static void test_close_bytes(void)
{
        start();
        atomic_store(&context->device->total_bytes, 1024 * MIB);
        GR_CHECK_EQ(gr_fence_close_bytes(context->fence), 32 * MIB);
        atomic_store(&context->device->total_bytes, 131072 * MIB);
        GR_CHECK_EQ(gr_fence_close_bytes(context->fence), 2048 * MIB);
        atomic_store(&core.streams_overlap, true);
        GR_CHECK_EQ(gr_fence_close_bytes(context->fence), 32 * MIB);
        atomic_store(&context->device->reserved_bytes, 1024 * MIB);
        GR_CHECK_EQ(gr_fence_close_bytes(context->fence), 128 * MIB);
        atomic_store(&context->device->reserved_bytes, 65536 * MIB);
        GR_CHECK_EQ(gr_fence_close_bytes(context->fence), 256 * MIB);
        atomic_store(&context->device->reserved_bytes, 0);
        finish();
}

static void test_barrier(void)
{
        uint64_t epoch;

        start();
        epoch = freed_after(5);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK(gr_fence_usable(fence, epoch));
        GR_CHECK(!gr_fence_idle(fence, epoch)); /* the GPU is at it still */
        GR_CHECK_EQ(gr_fence_quarantine_bytes(fence), 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 1);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0); /* one is enough */
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 1);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), 0);
        sg_advance(5 * SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(gr_fence_idle(fence, epoch));

        /* A barrier also serves epochs that were closed before it. */
        epoch = freed_after(5);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        freed_after(5);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK(gr_fence_usable(fence, epoch + 1));
        finish();
}

/* Not beside other work, not where a stream waits for others, not where others reach the blocks. */
static void test_barrier_is_cheap(void)
{
        struct gr_context *other;

        start();
        GR_CHECK(gr_fence_barrier_is_cheap(context->fence));
        atomic_store(&core.streams_overlap, true);
        GR_CHECK(!gr_fence_barrier_is_cheap(context->fence));
        GR_CHECK(gr_fence_barrier_is_safe(context->fence));
        other = gr_core_context_add(&core, sg_context_new(1), 1); /* all contexts, those that come later, too */
        GR_CHECK(!gr_fence_barrier_is_cheap(other->fence));
        gr_core_context_gone(context);
        GR_CHECK(!gr_fence_barrier_is_cheap(gr_core_context_add(&core, sg_context_new(0), 0)->fence));
        core.config.reuse = GR_REUSE_BARRIER; /* the program asked for them */
        GR_CHECK(gr_fence_barrier_is_cheap(other->fence));
        finish();

        start();
        atomic_store(&core.waits_for_others, true);
        GR_CHECK(!gr_fence_barrier_is_cheap(context->fence));
        GR_CHECK(!gr_fence_barrier_is_safe(context->fence));
        finish();

        start();
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK(!gr_fence_barrier_is_cheap(context->fence) && !gr_fence_barrier_is_cheap(other->fence));
        finish();
}

/* More closed epochs than fit: none is forgotten, and none passes before its own work has ended. */
static void test_merge(void)
{
        uint64_t epochs[GR_EPOCHS_PENDING + 20];
        unsigned count = GR_EPOCHS_PENDING + 20;

        start();
        for (unsigned i = 0; i < count; i++) {
                epochs[i] = freed_after(1); /* the i-th work ends at i + 1 ms */
                GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        }
        for (unsigned i = 0; i < count; i++) {
                GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                for (unsigned j = i; j < count; j++)
                        GR_CHECK(!gr_fence_usable(fence, epochs[j]));
                sg_advance(SG_MS);
        }
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(gr_fence_idle(fence, epochs[count - 1]));
        GR_CHECK(!gr_fence_waiting(context->fence));
        GR_CHECK_EQ(gr_fence_quarantine_bytes(fence), 0);
        /* Events are used again: each pending epoch has at most one. */
        GR_CHECK(sg_calls(SG_EVENT_CREATE) <= GR_EPOCHS_PENDING + 1);
        finish();
}

static void test_wait_oldest(void)
{
        uint64_t first, second, begin_ns;

        start();
        GR_CHECK_EQ(gr_fence_wait_oldest(context->fence, UINT64_MAX), -ENOENT);
        GR_CHECK_EQ(gr_fence_stuck_ns(context->fence), 0);
        first = freed_after(5);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        second = freed_after(200);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        sg_advance(SG_MS);
        GR_CHECK_EQ(gr_fence_stuck_ns(context->fence), SG_MS);

        begin_ns = sg_driver.now_ns();
        GR_CHECK_EQ(gr_fence_wait_oldest(context->fence, begin_ns + 100 * SG_MS), 0);
        GR_CHECK(gr_fence_idle(fence, first) && !gr_fence_idle(fence, second));
        GR_CHECK(sg_driver.now_ns() - begin_ns >= 4 * SG_MS);
        GR_CHECK(sg_driver.now_ns() - begin_ns < 8 * SG_MS); /* it asked often enough */

        begin_ns = sg_driver.now_ns();
        GR_CHECK_EQ(gr_fence_wait_oldest(context->fence, begin_ns + 20 * SG_MS), -ETIMEDOUT);
        GR_CHECK(sg_driver.now_ns() - begin_ns >= 20 * SG_MS);
        GR_CHECK(sg_driver.now_ns() - begin_ns < 25 * SG_MS);
        GR_CHECK(!gr_fence_idle(fence, second));
        GR_CHECK_EQ(gr_fence_stuck_ns(context->fence), sg_driver.now_ns() - begin_ns); /* since the first passed */
        sg_fail(SG_EVENT_QUERY, 1, 1, DRIVER_700);
        GR_CHECK_EQ(gr_fence_wait_oldest(context->fence, UINT64_MAX), DRIVER_700);
        finish();
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

static void test_errors(void)
{
        static const enum sg_op ops[] = {SG_EVENT_CREATE, SG_CONTEXT_RECORD, SG_CONTEXT_WAIT};
        uint64_t epoch;

        /* Any error of the driver: no fence can be trusted, and nothing becomes usable by it. */
        for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
                start();
                epoch = freed_after(5);
                sg_fail(ops[i], 1, 1, DRIVER_700);
                GR_CHECK_EQ(gr_fence_barrier(context->fence), DRIVER_700);
                GR_CHECK_EQ(atomic_load(&fence->broken), DRIVER_700);
                GR_CHECK(!gr_fence_usable(fence, epoch));
                finish();
        }
        start();
        epoch = freed_after(5);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        sg_fail(SG_EVENT_QUERY, 1, 1, DRIVER_700);
        GR_CHECK_EQ(gr_fence_poll(context->fence), DRIVER_700);
        GR_CHECK_EQ(atomic_load(&fence->broken), DRIVER_700);
        GR_CHECK(!gr_fence_usable(fence, epoch));
        sg_fail(SG_CONTEXT_SYNC, 1, 1, DRIVER_700);
        GR_CHECK_EQ(gr_fence_sync(context->fence), DRIVER_700);
        GR_CHECK(!gr_fence_usable(fence, epoch));
        finish();

        /* A capture that nobody announced, or no memory: later it works, and covers what was freed before. */
        for (unsigned nth = 1; nth <= 4; nth++) {
                start();
                if (nth == 2)
                        gr_core_context_add(&core, sg_context_new(0), 0); /* its record is the second */
                epoch = freed_after(5);
                sg_fail(nth == 3 ? SG_EVENT_CREATE : SG_CONTEXT_RECORD, nth == 2 ? 2 : 1, 1,
                        nth <= 2 ? -EBUSY : -ENOMEM);
                GR_CHECK_EQ(gr_fence_close(context->fence), -EBUSY);
                GR_CHECK_EQ(atomic_load(&fence->broken), 0);
                GR_CHECK(gr_fence_waiting(context->fence));
                sg_advance(10 * SG_MS);
                GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                GR_CHECK(!gr_fence_usable(fence, epoch));
                GR_CHECK_EQ(gr_fence_close(context->fence), 0);
                GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                GR_CHECK(gr_fence_idle(fence, epoch));
                finish();
        }
        start();
        epoch = freed_after(5);
        sg_fail(SG_CONTEXT_WAIT, 1, 1, -EBUSY);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), -EBUSY);
        GR_CHECK_EQ(atomic_load(&fence->broken), 0);
        GR_CHECK(!gr_fence_usable(fence, epoch));
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK(gr_fence_usable(fence, epoch));
        finish();
}

/* The full ring loses nothing where the record that would merge fails. */
static void test_merge_refused(void)
{
        uint64_t epoch = 0;

        start();
        for (unsigned i = 0; i < GR_EPOCHS_PENDING; i++) {
                epoch = freed_after(1);
                GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        }
        gr_fence_note_freed(fence, 1);
        sg_fail(SG_CONTEXT_RECORD, 1, 1, -EBUSY);
        GR_CHECK_EQ(gr_fence_close(context->fence), -EBUSY);
        sg_advance(100 * SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(gr_fence_idle(fence, epoch + 1));
        GR_CHECK(!gr_fence_waiting(context->fence));
        finish();
}

static void test_old_driver(void)
{
        uint64_t epoch;

        start_with(&sg_old_driver);
        epoch = freed_after(5);
        GR_CHECK_EQ(gr_fence_close(context->fence), -ENOTSUP);
        GR_CHECK_EQ(atomic_load(&fence->broken), 0);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(!gr_fence_usable(fence, epoch));
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0); /* by waiting on the host */
        GR_CHECK(gr_fence_idle(fence, epoch));
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS + 5 * SG_MS);
        epoch = freed_after(5);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK(gr_fence_idle(fence, epoch));
        GR_CHECK(!gr_fence_usable(fence, freed_after(5))); /* it is behind the wait */
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        sg_capture(1);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        gr_fence_note_freed(fence, 1);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), -EBUSY);
        gr_gate_end(&core.gate);
        finish();
}

static void test_sync(void)
{
        struct gr_context *other;
        uint64_t first, second;

        start();
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        first = freed_after(5);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        second = freed_after(5);
        sg_work(other->handle, 1, 0, 30 * SG_MS);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK(sg_driver.now_ns() >= SG_FIRST_NS + 30 * SG_MS); /* the other's work could use the blocks, too */
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 32 * SG_MS);
        GR_CHECK(gr_fence_idle(fence, first) && gr_fence_idle(fence, second));
        GR_CHECK_EQ(gr_fence_quarantine_bytes(fence), 0);
        GR_CHECK(!gr_fence_waiting(context->fence));
        GR_CHECK(!gr_fence_usable(fence, gr_fence_note_freed(fence, 1)));

        freed_after(30);
        seen_beside = true;
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        seen_beside = false;
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_syncs), 2);
        finish();
}

/* Work that nobody else will wait for is waited for even beside a capture, and by a driver that cannot drain. */
static void test_wait_work(void)
{
        struct gr_driver driver = sg_driver;

        driver.context_drain = NULL;
        start_with(&driver);
        sg_work(context->handle, 0, 0, 5 * SG_MS);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        GR_CHECK_EQ(gr_fence_wait_work(context->fence), 0);
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS + 5 * SG_MS);
        gr_gate_end(&core.gate);
        finish();
}

static int answer_code;
static unsigned answers_left, answers; /* how often the driver fails from now on, and how often it was asked */

static int answer(void *handle)
{
        answers++;
        if (answers_left == 0)
                return sg_driver.context_sync(handle);
        answers_left--;
        return gr_driver_error(answer_code);
}

/* All contexts of the device are waited for, twice where the driver fails; others where they reach its blocks. */
static void test_wait_all(void)
{
        static const struct {
                int code;
                unsigned times; /* the driver fails, twice in each try */
                unsigned asked;
                bool good;
        } rows[] = {
                {699, 4, 4, false}, {700, 8, 4, true}, {719, 8, 4, true}, {720, 4, 4, false},
                {1, 2, 4, true},    {1, 3, 5, true},   {1, 4, 4, false},  {1, 1, 3, true},
        };
        struct gr_driver driver = sg_driver;
        struct gr_context *other, *far;

        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
                driver.context_drain = NULL;
                driver.context_sync = answer;
                start_with(&driver);
                other = gr_core_context_add(&core, sg_context_new(0), 0);
                far = gr_core_context_add(&core, sg_context_new(1), 1);
                sg_work(context->handle, 0, 0, 5 * SG_MS);
                sg_work(other->handle, 0, 0, 20 * SG_MS);
                sg_work(far->handle, 0, 0, 40 * SG_MS);
                answers = 0;
                answer_code = rows[i].code;
                answers_left = rows[i].times;
                GR_CHECK_EQ(gr_fence_wait_all(fence), rows[i].good ? 0 : gr_driver_error(rows[i].code));
                GR_CHECK_EQ(answers, rows[i].asked);
                answers_left = 0;
                GR_CHECK_EQ(gr_fence_wait_all(fence), 0);
                GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS + 20 * SG_MS);
                gr_fence_add_accessor(fence, far);
                GR_CHECK_EQ(gr_fence_wait_all(fence), 0);
                GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS + 40 * SG_MS);
                finish();
        }
}

/* With a deadline: for the epochs of those that reach the blocks, and of no others. */
static void test_sync_by(void)
{
        struct gr_context *other, *far;

        start();
        far = gr_core_context_add(&core, sg_context_new(1), 1);
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        sg_work(other->handle, 0, 0, 40 * SG_MS);
        gr_fence_note_freed(other->fence, MIB);
        GR_CHECK_EQ(gr_fence_close(other->fence), 0);
        sg_work(far->handle, 0, 0, 1000 * SG_MS);
        gr_fence_note_freed(far->fence, MIB);
        GR_CHECK_EQ(gr_fence_close(far->fence), 0);
        GR_CHECK_EQ(gr_fence_sync_by(fence, sg_driver.now_ns() + 10 * SG_MS), -ETIMEDOUT);
        GR_CHECK_EQ(gr_fence_sync_by(fence, sg_driver.now_ns() + 100 * SG_MS), 0);
        GR_CHECK(sg_driver.now_ns() >= SG_FIRST_NS + 40 * SG_MS);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 100 * SG_MS);
        finish();
}

/* Two contexts reach each other's blocks: the work of both counts, and both wait. */
static void test_reach(void)
{
        struct gr_context *other, *far;
        uint64_t epoch;
        uint64_t ptr;

        start();
        far = gr_core_context_add(&core, sg_context_new(1), 1);
        GR_CHECK_EQ(gr_fence_accessors(context->fence), 1); /* of another device */
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(gr_fence_accessors(context->fence), 2);
        GR_CHECK_EQ(gr_fence_accessors(other->fence), 2);
        GR_CHECK_EQ(gr_fence_accessors(far->fence), 1);
        gr_fence_add_accessor(context->fence, far);
        gr_fence_add_accessor(context->fence, far); /* twice is once */
        GR_CHECK_EQ(gr_fence_accessors(context->fence), 3);

        sg_work(far->handle, 2, 0, 9 * SG_MS);
        epoch = freed_after(1);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        sg_advance(5 * SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(!gr_fence_usable(fence, epoch)); /* the far one's work is not done */
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK(gr_fence_usable(fence, epoch) && !gr_fence_idle(fence, epoch));

        /* The scripted GPU would tell if any of the three started before the end of the far one's work. */
        GR_CHECK_EQ(sg_driver.mem_alloc(context->handle, 4096, &ptr), 0);
        sg_own(ptr, 4096);
        sg_work(far->handle, 3, ptr, 40 * SG_MS);
        sg_disown(ptr);
        epoch = gr_fence_note_freed(fence, 4096);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK(gr_fence_usable(fence, epoch));
        sg_own(ptr, 4096);
        sg_work(context->handle, 0, ptr, SG_MS);
        sg_work(other->handle, 0, ptr, SG_MS);
        sg_work(far->handle, 0, ptr, SG_MS);
        GR_CHECK_EQ(sg_misuses(), 0);

        /* The far one goes: its work is done, its events are not asked any more. */
        epoch = freed_after(1);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        sg_context_destroy(far->handle);
        gr_fence_forget(context->fence, far);
        GR_CHECK_EQ(gr_fence_accessors(context->fence), 2);
        sg_advance(100 * SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(gr_fence_idle(fence, epoch));
        finish();
}

/* A context that joins after a barrier was laid: its work, too, must find the former owner's done. */
static void test_reach_joined_late(void)
{
        for (int first = 0; first < 2; first++) { /* handed out again before or after */
                bool handed_out = first;
                struct gr_context *late;
                uint64_t ptr, epoch;

                start();
                GR_CHECK_EQ(sg_driver.mem_alloc(context->handle, 4096, &ptr), 0);
                sg_own(ptr, 4096);
                sg_work(context->handle, 0, ptr, 50 * SG_MS);
                sg_disown(ptr);
                epoch = gr_fence_note_freed(fence, 4096);
                GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
                if (handed_out)
                        sg_own(ptr, 4096);
                late = gr_core_context_add(&core, sg_context_new(0), 0);
                if (!handed_out && gr_fence_usable(fence, epoch)) {
                        sg_own(ptr, 4096);
                        handed_out = true;
                }
                if (handed_out)
                        sg_work(late->handle, 0, ptr, SG_MS);
                finish();
        }
}

/* One that comes once all that a barrier readied has passed waits for nothing, whatever was freed since. */
static void test_reach_joined_idle(void)
{
        unsigned waits;

        start();
        freed_after(1);
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        sg_advance(SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        freed_after(50);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        waits = sg_calls(SG_CONTEXT_WAIT);
        gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), waits);
        finish();
}

/* One of several leaves: the work of all others still holds the blocks back. */
static void test_reach_left(void)
{
        for (int leaves = 0; leaves < 3; leaves++) {
                struct gr_context *others[3];

                start();
                for (int i = 0; i < 3; i++)
                        others[i] = gr_core_context_add(&core, sg_context_new(0), 0);
                gr_core_context_ending(others[leaves]);
                sg_context_destroy(others[leaves]->handle);
                gr_core_context_gone(others[leaves]);
                for (int i = 0; i < 3; i++) {
                        uint64_t epoch;

                        if (i == leaves)
                                continue;
                        sg_work(others[i]->handle, 0, 0, 50 * SG_MS);
                        epoch = gr_fence_note_freed(fence, MIB);
                        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
                        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                        GR_CHECK(!gr_fence_usable(fence, epoch));
                        sg_advance(60 * SG_MS);
                        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                        GR_CHECK(gr_fence_usable(fence, epoch));
                }
                finish();
        }
}

/* Epochs of a context that has gone leave nothing for those that come after them in the ring. */
static void test_reach_left_ring(void)
{
        struct gr_context *other;

        start();
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        for (int i = 0; i < 2 * GR_EPOCHS_PENDING; i++) {
                freed_after(1);
                GR_CHECK_EQ(gr_fence_close(context->fence), 0);
                if (i % 2) {
                        sg_advance(2 * SG_MS);
                        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                }
        }
        gr_core_context_ending(other);
        sg_context_destroy(other->handle);
        gr_core_context_gone(other);
        for (int i = 0; i < 2 * GR_EPOCHS_PENDING; i++) {
                freed_after(1);
                GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
                sg_advance(2 * SG_MS);
                GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        }
        finish();
}

/* With several epochs behind one barrier, and some beyond it: who joins late waits for all that the barrier covered. */
static void test_reach_joined_epochs(void)
{
        for (int beyond = 0; beyond < 3; beyond++) {
                uint64_t ptrs[3], epochs[3];
                struct gr_context *late;
                unsigned waits;

                start();
                for (int i = 0; i < 3; i++) {
                        GR_CHECK_EQ(sg_driver.mem_alloc(context->handle, 4096, &ptrs[i]), 0);
                        sg_own(ptrs[i], 4096);
                        sg_work(context->handle, 0, ptrs[i], 20 * SG_MS);
                        sg_disown(ptrs[i]);
                        epochs[i] = gr_fence_note_freed(fence, 4096);
                        GR_CHECK_EQ(i < 2 ? gr_fence_close(context->fence) : gr_fence_barrier(context->fence), 0);
                }
                for (int i = 0; i < beyond; i++) {
                        freed_after(50);
                        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
                }
                waits = sg_calls(SG_CONTEXT_WAIT);
                late = gr_core_context_add(&core, sg_context_new(0), 0);
                GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), waits + 1); /* for the newest that the barrier covers */
                for (int i = 0; i < 3; i++) {
                        GR_CHECK(gr_fence_usable(fence, epochs[i]));
                        sg_own(ptrs[i], 4096);
                        sg_work(late->handle, 0, ptrs[i], SG_MS);
                }
                finish();
        }
}

static void test_reach_overflow(void)
{
        start();
        for (int i = 1; i < GR_ACCESSORS_MAX; i++)
                gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(gr_fence_accessors(context->fence), GR_ACCESSORS_MAX);
        GR_CHECK(!fence->accessor_overflow);
        gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK(fence->accessor_overflow);
        GR_CHECK(gr_fence_accessors(context->fence) > GR_ACCESSORS_MAX);

        /* Who comes after it in its place is reached by few again. */
        sg_context_destroy(context->handle);
        gr_fence_reset(context->fence);
        GR_CHECK(!fence->accessor_overflow);
        GR_CHECK_EQ(gr_fence_accessors(context->fence), 1);
        finish();
}

static void test_reset(void)
{
        struct gr_context *other;
        uint64_t epoch;

        start();
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        epoch = freed_after(1000);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        gr_fence_note_freed(other->fence, 1);
        GR_CHECK_EQ(gr_fence_close(other->fence), 0);
        sg_fail(SG_EVENT_QUERY, 1, 1, DRIVER_700);
        GR_CHECK_EQ(gr_fence_poll(context->fence), DRIVER_700);

        sg_context_destroy(context->handle);
        gr_fence_forget(other->fence, context);
        sg_log_clear();
        gr_fence_reset(context->fence);
        GR_CHECK_STR(sg_log(), ""); /* the driver is not asked: the events are gone */
        GR_CHECK_EQ(atomic_load(&fence->broken), 0);
        GR_CHECK_EQ(gr_fence_accessors(context->fence), 1);
        GR_CHECK_EQ(gr_fence_accessors(other->fence), 1);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(gr_fence_idle(fence, epoch));
        GR_CHECK_EQ(gr_fence_poll(other->fence), 0);
        GR_CHECK(!gr_fence_waiting(other->fence)); /* its own part had passed */
        finish();
}

static _Atomic bool done;

static void *reset(void *arg)
{
        gr_fence_reset(context->fence);
        done = true;
        return arg;
}

/* While another thread is at what a lock guards the reset waits, as a count that both change would be wrong. */
static void test_reset_waits(void)
{
        struct gr_lock *locks[2];

        start();
        locks[0] = &fence->lock;
        locks[1] = &fence->events_lock;
        for (int i = 0; i < 2; i++) {
                pthread_t thread;

                gr_core_context_add(&core, sg_context_new(0), 0);
                GR_CHECK_EQ(gr_fence_accessors(context->fence), 2);
                atomic_store(&fence->broken, -EIO);
                fence->idle_event_count = 0;
                done = false;
                gr_lock(locks[i]);
                pthread_create(&thread, NULL, reset, NULL);
                for (int n = 0; n < 20 && !done; n++)
                        usleep(1000);
                GR_CHECK(!done);
                GR_CHECK_EQ(gr_fence_accessors(context->fence), i == 0 ? 2 : 1);
                GR_CHECK_EQ(atomic_load(&fence->broken), i == 0 ? -EIO : 0);
                gr_unlock(locks[i]);
                pthread_join(thread, NULL);
                GR_CHECK_EQ(gr_fence_accessors(context->fence), 1);
        }
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

static char said[256];

static void hear(const char *line, size_t bytes, void *arg)
{
        (void)arg;
        snprintf(said, sizeof(said), "%.*s", (int)bytes, line);
}

/* While a process exits the driver shuts down. A thread that is still at work may see it here: that is no warning. */
static void test_driver_ended(void)
{
        start();
        gr_log_set_sink(hear, NULL);
        gr_log_set_level(GR_LOG_WARN);
        freed_after(1);
        sg_fail(SG_CONTEXT_RECORD, 1, 1, gr_driver_error(4));
        GR_CHECK_EQ(gr_fence_close(fence), gr_driver_error(4));
        GR_CHECK(gr_fence_is_broken(fence));
        GR_CHECK_STR(said, "");
        finish();

        /* Another error is one, afterwards, too. */
        start();
        freed_after(1);
        sg_fail(SG_CONTEXT_RECORD, 1, 1, gr_driver_error(1));
        GR_CHECK_EQ(gr_fence_close(fence), gr_driver_error(1));
        GR_CHECK(strstr(said, "the driver's fences fail (CUDA error 1)") != NULL);
        gr_log_set_level(GR_LOG_SILENT);
        gr_log_set_sink(NULL, NULL);
        finish();
}

int main(void)
{
        test_driver_ended(); /* first: it is said once */
        test_sync_alone();
        test_poll();
        test_poll_many();
        test_close_bytes();
        test_barrier();
        test_barrier_is_cheap();
        test_merge();
        test_wait_oldest();
        test_gate();
        test_gate_vain();
        test_gate_late();
        test_gate_threads();
        test_gate_turn();
        test_drain(false);
        test_drain(true);
        test_errors();
        test_merge_refused();
        test_old_driver();
        test_sync();
        test_wait_work();
        test_wait_all();
        test_sync_by();
        test_reach();
        test_reach_joined_late();
        test_reach_joined_idle();
        test_reach_left();
        test_reach_left_ring();
        test_reach_joined_epochs();
        test_reach_overflow();
        test_reset();
        test_reset_waits();
        return GR_CHECK_RESULT();
}
