#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/trace_file.h"
#include "fence_gpu.h"

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

static uint64_t traced_bytes; /* in quarantine, as the trace was told last */

static void note_traced(enum gr_entry what, int device, unsigned detail, uint64_t address, uint64_t bytes)
{
        if (what == GR_ENTRY_QUARANTINE) {
                GR_CHECK(device == context->ordinal && detail == 0 && address == 0);
                traced_bytes = bytes;
        }
}

static void test_poll(void)
{
        uint64_t first, second;

        start();
        atomic_store(&gr_trace_to, note_traced);
        traced_bytes = 1;
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
        GR_CHECK_EQ(traced_bytes, MIB);
        sg_advance(5 * SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        GR_CHECK(gr_fence_idle(fence, second));
        GR_CHECK(!gr_fence_waiting(context->fence));
        GR_CHECK_EQ(gr_fence_quarantine_bytes(fence), 0);
        GR_CHECK_EQ(traced_bytes, 0);
        atomic_store(&gr_trace_to, NULL);

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
        atomic_store(&gr_trace_to, note_traced);
        epoch = freed_after(5);
        traced_bytes = 1;
        GR_CHECK_EQ(gr_fence_barrier(context->fence), 0);
        GR_CHECK_EQ(traced_bytes, 0);
        traced_bytes = 1;
        sg_advance(5 * SG_MS);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0); /* it was usable before */
        GR_CHECK_EQ(traced_bytes, 1);
        atomic_store(&gr_trace_to, NULL);
        finish();

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

static void start_in_order(void)
{
        start_as(&sg_driver, GR_REUSE_AUTO, true);
        GR_CHECK(gr_fence_is_in_order(fence));
}

/* What is freed is usable at once, and idle when the GPU is done. When the order ends a barrier is laid, once. */
static void test_order(void)
{
        struct gr_context *other;
        struct gr_epoch waited;
        uint64_t epoch, later;

        start_in_order();
        epoch = freed_after(5);
        GR_CHECK(gr_fence_usable(fence, epoch));
        GR_CHECK(!gr_fence_usable(fence, UINT64_MAX));
        GR_CHECK_EQ(gr_fence_quarantine_bytes(fence), 0);
        atomic_store(&gr_trace_to, note_traced);
        traced_bytes = 1;
        GR_CHECK_EQ(gr_fence_close(fence), 0);
        GR_CHECK_EQ(traced_bytes, 0);
        atomic_store(&gr_trace_to, NULL);
        GR_CHECK(!gr_fence_idle(fence, epoch));
        epoch = freed_after(5);
        GR_CHECK(gr_fence_usable(fence, epoch));
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 0);
        gr_core_end_order(&core);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 1);
        GR_CHECK(gr_fence_usable(fence, epoch));
        GR_CHECK(!gr_fence_usable(fence, freed_after(5)));
        gr_core_end_order(&core);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 1);
        sg_advance(15 * SG_MS);
        GR_CHECK_EQ(gr_fence_poll(fence), 0);
        GR_CHECK(gr_fence_idle(fence, epoch));
        finish();

        start_in_order(); /* nothing was handed out before its time: nothing is called */
        epoch = freed_after(5);
        gr_core_note_overlap(&core);
        GR_CHECK(!gr_fence_usable(fence, epoch));
        GR_CHECK(!gr_fence_is_in_order(fence));
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD) + sg_calls(SG_CONTEXT_WAIT), 0);
        finish();

        start_in_order(); /* nor if the program has waited since */
        epoch = freed_after(5);
        GR_CHECK(gr_fence_usable(fence, epoch));
        GR_CHECK_EQ(gr_fence_begin_wait(fence, &waited), epoch);
        later = freed_after(5);
        gr_fence_waited(fence, &waited);
        GR_CHECK(gr_fence_idle(fence, epoch) && !gr_fence_idle(fence, later));
        gr_core_end_order(&core);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD) + sg_calls(SG_CONTEXT_WAIT), 0);
        GR_CHECK(!gr_fence_usable(fence, later));
        GR_CHECK_EQ(gr_fence_begin_wait(fence, &waited), 0);
        finish();

        /* Before all that no barrier may come behind, or can. */
        start_in_order();
        GR_CHECK(gr_fence_usable(fence, freed_after(5)));
        gr_core_will_wait(&core);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 1);
        finish();
        start_in_order();
        GR_CHECK(gr_fence_usable(fence, freed_after(5)));
        gr_core_will_capture(&core);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 1);
        finish();

        /* A second context ends it for both; one after the other does not. */
        start_in_order();
        GR_CHECK(gr_fence_usable(fence, freed_after(5)));
        other = gr_core_context_add(&core, sg_context_new(1), 1);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 1);
        GR_CHECK(!gr_fence_is_in_order(fence) && !gr_fence_is_in_order(other->fence));
        finish();
        start_in_order();
        gr_core_context_gone(context);
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK(gr_fence_is_in_order(other->fence));
        finish();

        /* Where no barrier can be laid the host waits. If that fails, too, nothing is handed out any more. */
        start_in_order();
        epoch = freed_after(5);
        GR_CHECK(gr_fence_usable(fence, epoch));
        sg_fail(SG_CONTEXT_WAIT, 1, 1, -ENOMEM);
        gr_core_end_order(&core);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), 1);
        GR_CHECK(gr_fence_idle(fence, epoch) && !gr_fence_is_broken(fence));
        finish();
        start_in_order();
        GR_CHECK(gr_fence_usable(fence, freed_after(5)));
        sg_fail(SG_CONTEXT_WAIT, 1, 1, -ENOMEM);
        sg_fail(SG_CONTEXT_SYNC, 1, 1, -ENOMEM);
        gr_core_end_order(&core);
        GR_CHECK(gr_fence_is_broken(fence) && !gr_fence_is_in_order(fence));
        finish();

        start_as(&sg_driver, GR_REUSE_POLL, true);
        GR_CHECK(!gr_fence_is_in_order(fence));
        finish();
        start_as(&sg_driver, GR_REUSE_BARRIER, true);
        GR_CHECK(!gr_fence_is_in_order(fence));
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
                while (i == 1 && atomic_load(&fence->broken)) /* until it is past the first lock */
                        usleep(1000);
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
        test_poll();
        test_poll_many();
        test_close_bytes();
        test_barrier();
        test_order();
        test_barrier_is_cheap();
        test_merge();
        test_wait_oldest();
        test_errors();
        test_merge_refused();
        test_old_driver();
        test_sync();
        test_wait_work();
        test_wait_all();
        test_sync_by();
        test_reset();
        test_reset_waits();
        return GR_CHECK_RESULT();
}
