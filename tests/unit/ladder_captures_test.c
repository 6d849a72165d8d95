/*
 * The ladder beside captures, in which no fence covers what is freed, and beside work that waits for what the program
 * does later: what is waited for, for how long, and what is not.
 */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "ladder_gpu.h"

static void test_capture(void)
{
        uint64_t ptr;

        start();
        cache(15, 4 * MIB, 10 * SG_MS);
        sg_capture(1);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        free_ok(alloc(MIB)); /* in an epoch that cannot be closed */
        sg_log_clear();
        GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
        GR_CHECK(strpbrk(sg_log(), "rws") == NULL);
        GR_CHECK_EQ(atomic_load(&context->fence->broken), 0);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        finish();
}

/* The card is full of what was freed during a capture, which no fence will ever cover while that goes on. */
static void test_capture_waits(const struct gr_driver *driver)
{
        struct gr_context *other;
        uint64_t ptr;

        start_with(driver, GR_REUSE_AUTO);
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        sg_capture(1);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        for (int i = 0; i < 2; i++) {
                uint64_t blocks[4];

                for (int n = 0; n < 4; n++) {
                        blocks[n] = alloc(16 * MIB - (uint64_t)i * 4 * MIB);
                        sg_work(context->handle, 0, blocks[n], 2 * SG_MS);
                        sg_work(other->handle, 0, 0, 3 * SG_MS);
                }
                for (int n = 0; n < 4; n++)
                        free_ok(blocks[n]);
        }
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), 2); /* one wait for both contexts readied all that was freed */
        ptr = alloc(CARD);
        free_ok(ptr);
        GR_CHECK_EQ(atomic_load(&context->fence->broken), 0);
        GR_CHECK_EQ(TRIES(FAIL), 0);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        finish();
}

/*
 * The same where work may wait for what the program does later: not behind a kernel that does not end, but behind one
 * that only takes long. of_other: another context's memory is what could go back; in_other: the kernel is of another.
 */
static void test_capture_stuck(uint64_t ms, bool ends, bool of_other, bool in_other)
{
        struct gr_context *other, *owner, *busy;
        uint64_t blocks[3], ptr = 0;

        start();
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        owner = of_other ? other : context;
        busy = in_other ? other : context;
        atomic_store(&core.waits_for_others, true);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(sg_alloc(i < 2 ? busy : owner, i < 2 ? 1000 : 32 * MIB, &blocks[i]), 0);
        sg_work(busy->handle, 0, blocks[0], ms * SG_MS);
        free_ok(blocks[0]); /* which gives nothing back by itself */
        gr_fence_close(busy->fence);
        sg_capture(1);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        free_ok(blocks[2]);
        GR_CHECK_EQ(sg_alloc(context, 48 * MIB, &ptr), ends ? 0 : -ENOMEM);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), ends ? 2 : 0); /* both can reach it */
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 10000 * SG_MS);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        finish();
}

static void begin_capture(void)
{
        gr_core_will_capture(&core);
        gr_gate_begin_enter(&core.gate);
        sg_capture(1);
        gr_gate_begin_leave(&core.gate, true);
}

static void end_capture(void)
{
        sg_capture(-1);
        gr_gate_end(&core.gate);
}

static void wait_for_others(uint64_t ms)
{
        gr_core_stream_will_wait(&core);
        sg_work(context->handle, 1, 0, ms * SG_MS);
        gr_core_stream_waits(&core);
}

/* What is freed before work that waits for the program, or before a capture, is not fenced behind that. */
static void test_freed_before(bool waits, bool captures)
{
        uint64_t ptr;

        start();
        atomic_store(&core.streams_overlap, true);
        ptr = alloc(20 * MIB);
        sg_work(context->handle, 0, ptr, 2 * SG_MS);
        free_ok(ptr);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 0);
        if (captures)
                begin_capture();
        if (waits)
                wait_for_others(3600000);
        else
                sg_work(context->handle, 1, 0, UINT64_C(3600000) * SG_MS);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 1);
        ptr = alloc(50 * MIB);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), 0);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 1000 * SG_MS);
        if (waits) /* nothing was freed since */
                wait_for_others(1);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 1);
        if (captures)
                end_capture();
        finish();
}

/*
 * What is freed in a capture is waited for without end only where streams are known to wait for the program no more:
 * an event came behind the last wait, before the capture, and has passed.
 */
static void test_capture_and_waits(uint64_t before_ms, bool inside, bool ends)
{
        uint64_t ptr, block;

        start();
        wait_for_others(before_ms);
        begin_capture();
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 2); /* pinned memory has fences of its own */
        block = alloc(32 * MIB);
        free_ok(block);
        if (inside)
                wait_for_others(2);
        GR_CHECK_EQ(sg_alloc(context, 48 * MIB, &ptr), ends ? 0 : -ENOMEM);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), ends);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 3000 * SG_MS);
        end_capture();

        /* The next one is behind all that, once more. */
        if (!ends && before_ms < 1000) {
                sg_advance(1000 * SG_MS); /* in which the thread's frees went to the driver */
                begin_capture();
                ptr = alloc(48 * MIB);
                end_capture();
        }
        finish();
}

/* There a capture that may end soon is waited for; one that was waited for in vain is not, but the next one. */
static void test_capture_long(void)
{
        enum { ROUNDS = 10 };
        uint64_t waited_ns[2];

        start();
        atomic_store(&core.waits_for_others, true);
        for (int i = 0; i < 2; i++) {
                uint64_t begin_ns = sg_driver.now_ns();

                sg_capture(1);
                gr_gate_begin_enter(&core.gate);
                gr_gate_begin_leave(&core.gate, true);
                for (int n = 0; n < ROUNDS; n++) {
                        uint64_t ptr = alloc((n % 2 ? 40 : 48) * MIB);

                        sg_work(context->handle, 0, ptr, SG_MS);
                        free_ok(ptr);
                }
                waited_ns[i] = sg_driver.now_ns() - begin_ns;
                sg_capture(-1);
                gr_gate_end(&core.gate);
        }
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), 2 * ROUNDS - 1);
        for (int i = 0; i < 2; i++) {
                GR_CHECK(waited_ns[i] > 50 * SG_MS);
                GR_CHECK(waited_ns[i] < 150 * SG_MS);
        }
        finish();
}

static _Atomic unsigned captures_begun;
static _Atomic bool captures_stop;

/* Ends its capture when the other thread has begun the next one, or does not come to it. */
static void *capture_in_turn(void *arg)
{
        (void)arg;
        while (!atomic_load(&captures_stop)) {
                unsigned mine;

                gr_gate_begin_enter(&core.gate);
                gr_gate_begin_leave(&core.gate, true);
                mine = atomic_fetch_add(&captures_begun, 1) + 1;
                for (int i = 0; i < 20 && atomic_load(&captures_begun) == mine && !atomic_load(&captures_stop); i++)
                        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
                gr_gate_end(&core.gate);
        }
        return NULL;
}

static void sleep_for_all(uint64_t ns)
{
        sg_advance(ns);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

/* Where threads capture in turn, and one is always capturing, new ones hold off for whoever is out of memory. */
static void test_captures_in_turn(void)
{
        struct gr_driver driver = sg_driver;
        pthread_t threads[2];
        uint64_t ptr = 0;

        driver.sleep_ns = sleep_for_all;
        start_with(&driver, GR_REUSE_AUTO);
        gr_core_stream_will_wait(&core); /* somewhere, and for long */
        ptr = alloc(40 * MIB);
        for (int i = 0; i < 2; i++)
                GR_CHECK_EQ(pthread_create(&threads[i], NULL, capture_in_turn, NULL), 0);
        while (atomic_load(&captures_begun) < 4)
                sched_yield();
        free_ok(ptr);
        GR_CHECK_EQ(sg_alloc(context, 48 * MIB, &ptr), 0);
        atomic_store(&captures_stop, true);
        for (int i = 0; i < 2; i++)
                pthread_join(threads[i], NULL);
        finish();
}

int main(void)
{
        test_capture();
        test_capture_waits(&sg_driver);
        test_capture_waits(&sg_old_driver);
        for (int i = 0; i < 4; i++) {
                test_capture_stuck(2, true, i & 1, i & 2);
                test_capture_stuck(200, true, i & 1, i & 2);
                test_capture_stuck(3600000, false, i & 1, i & 2);
        }
        test_freed_before(true, false);
        test_freed_before(false, true);
        test_freed_before(true, true);
        test_capture_and_waits(2, false, true);
        test_capture_and_waits(200, false, true);
        test_capture_and_waits(3600000, false, false);
        test_capture_and_waits(2, true, false);
        test_capture_long();
        test_captures_in_turn();
        return GR_CHECK_RESULT();
}
