/* Contexts that come and go, and addresses that the driver gives out anew. */
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "check.h"
#include "core.h"
#include "reclaim/trim.h"
#include "scripted.h"

static struct gr_core core;
static struct gr_parts parts;

static void start(void)
{
        sg_reset(1024 * MIB);
        gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
}

static void check_accounts(void)
{
        GR_CHECK_EQ(atomic_load(&core.devices[0].reserved_bytes), sg_used_bytes(0));
        GR_CHECK(sg_cached_bytes(&core.devices[0]) <= atomic_load(&core.devices[0].reserved_bytes));
}

static void finish(void)
{
        check_accounts();
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

static uint64_t alloc(struct gr_context *context, size_t bytes)
{
        uint64_t ptr = 0;

        GR_CHECK_EQ(sg_alloc(context, bytes, &ptr), 0);
        return ptr;
}

static bool count_context(struct gr_context *context, void *arg)
{
        unsigned *count = arg;

        (void)context;
        ++*count;
        return true;
}

static bool first_only(struct gr_context *context, void *arg)
{
        count_context(context, arg);
        return false;
}

static unsigned contexts(int device)
{
        unsigned count = 0;

        gr_context_each(&core, device, count_context, &count);
        return count;
}

static void test_add_and_find(void)
{
        void *a, *b, *c;
        struct gr_context *context;
        unsigned count = 0;

        start();
        a = sg_context_new(0);
        b = sg_context_new(0);
        c = sg_context_new(1);
        GR_CHECK(gr_context_find(&core, a) == NULL);
        context = gr_core_context_add(&core, a, 0);
        GR_CHECK(context && context->device == &core.devices[0]);
        GR_CHECK(gr_core_context_add(&core, a, 0) == context);
        GR_CHECK(gr_context_find(&core, a) == context);
        GR_CHECK(gr_core_context_add(&core, b, 0) != context);
        GR_CHECK(gr_core_context_add(&core, c, 1)->device == &core.devices[1]);
        GR_CHECK_EQ(contexts(-1), 3);
        GR_CHECK_EQ(contexts(0), 2);
        GR_CHECK_EQ(contexts(1), 1);
        GR_CHECK_EQ(contexts(2), 0);
        gr_context_each(&core, -1, first_only, &count);
        GR_CHECK_EQ(count, 1);
        finish();
}

/* The driver destroys a context with everything in it, live and cached, busy and idle, small and large. */
static void test_drop(size_t bytes)
{
        struct gr_context *context, *other;
        uint64_t live, cached, kept;
        void *handle;

        start();
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        live = alloc(context, bytes);
        cached = alloc(context, bytes);
        kept = alloc(other, bytes);
        sg_work(context->handle, 0, cached, 1000 * SG_MS);
        GR_CHECK_EQ(sg_free(&core, cached), 0);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        GR_CHECK_EQ(sg_free(&core, kept), 0);
        GR_CHECK_EQ(gr_fence_close(other->fence), 0);
        check_accounts();

        handle = context->handle;
        sg_context_destroy(handle);
        sg_log_clear();
        gr_core_context_gone(context);
        GR_CHECK_STR(sg_log(), ""); /* without a call of the driver */
        check_accounts();
        GR_CHECK(gr_context_find(&core, handle) == NULL);
        GR_CHECK_EQ(contexts(0), 1);
        GR_CHECK_EQ(gr_pool_free(&core, live), -ENOENT);
        GR_CHECK_EQ(gr_pool_free(&core, cached), -ENOENT);

        /* The other one lost nothing, and waits for nothing of the one that went. */
        GR_CHECK_EQ(gr_fence_poll(other->fence), 0);
        GR_CHECK_EQ(alloc(other, bytes), kept);

        /* A new context may even have the old handle, on the memory of the old one. */
        handle = sg_context_new(0);
        context = gr_core_context_add(&core, handle, 0);
        GR_CHECK(context != NULL);
        live = alloc(context, bytes);
        sg_work(handle, 0, live, SG_MS);
        GR_CHECK_EQ(sg_free(&core, live), 0);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(alloc(context, bytes), live);
        finish();
}

/* The last context goes, with many blocks in many bins. */
static void test_drop_all(void)
{
        struct gr_context *context;
        uint64_t ptrs[200];

        start();
        for (int round = 0; round < 3; round++) {
                context = gr_core_context_add(&core, sg_context_new(0), 0);
                for (int i = 0; i < 200; i++)
                        ptrs[i] = alloc(context, (size_t)512 << (i % 14));
                for (int i = 0; i < 200; i += 2)
                        GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
                check_accounts();
                sg_context_destroy(context->handle);
                gr_core_context_gone(context);
                GR_CHECK_EQ(atomic_load(&core.devices[0].reserved_bytes), 0);
                GR_CHECK_EQ(sg_cached_bytes(&core.devices[0]), 0);
                GR_CHECK_EQ(core.devices[0].slab_count, 0);
                GR_CHECK_EQ(contexts(-1), 0);
        }
        finish();
}

/*
 * The driver ends a context and nobody says so; then its addresses come out again, in another one. What the core still
 * believes of them is stale: their new owner must not suffer.
 */
static void test_stale(size_t bytes, bool live)
{
        struct gr_context *old, *context;
        uint64_t before, after, second;

        start();
        old = gr_core_context_add(&core, sg_context_new(0), 0);
        before = alloc(old, bytes);
        if (!live) {
                GR_CHECK_EQ(sg_free(&core, before), 0);
                GR_CHECK_EQ(gr_fence_sync(old->fence), 0);
        }
        sg_context_destroy(old->handle);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        after = alloc(context, bytes);
        GR_CHECK_EQ(after, before); /* else this tests nothing */
        GR_CHECK(atomic_load(&core.devices[0].reserved_bytes) >=
                 sg_used_bytes(0)); /* too much rather than too little */

        /* Then the core learns of the end. */
        gr_core_context_gone(old);
        check_accounts();
        GR_CHECK_EQ(sg_size(after), gr_class_block_bytes(bytes));
        second = alloc(context, bytes);
        GR_CHECK(second != after);
        GR_CHECK_EQ(sg_free(&core, after), 0);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(alloc(context, bytes), after);
        finish();
}

/* A visit that ends the context it is in does not wait for itself. */
static bool end_inside(struct gr_context *context, void *arg)
{
        (void)arg;
        gr_core_context_ending(context);
        return false;
}

static void test_visitors(void)
{
        struct gr_context *context;

        start();
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gr_core_context_ending(context);
        GR_CHECK_EQ(contexts(-1), 0);
        gr_core_context_stays(context);
        GR_CHECK_EQ(contexts(-1), 1);
        gr_context_each(&core, -1, end_inside, NULL);
        GR_CHECK_EQ(contexts(-1), 0);
        gr_core_context_gone(context);
        GR_CHECK_EQ(contexts(-1), 0);
        finish();
}

/* A driver call that waits, as those do that stand behind a long kernel, until the test lets it go on. */
static struct gr_driver slow_driver;
static sem_t inside, go_on;
static _Atomic bool slow;

static void be_slow(void)
{
        if (atomic_exchange(&slow, false)) {
                sem_post(&inside);
                sem_wait(&go_on);
        }
}

static int slow_release(void *handle, const uint64_t *ptrs, size_t count, size_t *ret_done)
{
        be_slow();
        return sg_driver.mem_release(handle, ptrs, count, ret_done);
}

static int slow_wait(void *handle, void *event)
{
        be_slow();
        return sg_driver.context_wait(handle, event);
}

static void start_slow(enum gr_reuse reuse)
{
        sg_reset(1024 * MIB);
        slow_driver = sg_driver;
        slow_driver.mem_release = slow_release;
        slow_driver.context_wait = slow_wait;
        gr_core_init(&core, &parts, &slow_driver, &(struct gr_config){.reuse = reuse, .pool = GR_POOL_BINS});
        sem_init(&inside, 0, 0);
        sem_init(&go_on, 0, 0);
        slow = true;
}

static _Atomic bool done;

static void *maintain(void *arg)
{
        (void)arg;
        gr_trim_excess(&core);
        return NULL;
}

static void *end(void *context)
{
        gr_core_context_ending(context);
        done = true;
        return NULL;
}

/* Another thread gives memory back in the context that is to end: the driver must not end it before, however long. */
static void test_end_beside_release(void)
{
        pthread_t helper, ender;
        struct gr_context *context;
        uint64_t ptr, begin_ns;

        start_slow(GR_REUSE_AUTO);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        ptr = alloc(context, 8 * MIB);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        gr_budget_set_limit(context->device, GR_LIMIT_THRESHOLD, 0);
        pthread_create(&helper, NULL, maintain, NULL);
        sem_wait(&inside);
        done = false;
        pthread_create(&ender, NULL, end, context);
        /* By the scripted clock, which each look moves on. */
        for (begin_ns = sg_driver.now_ns(); sg_driver.now_ns() < begin_ns + 5000 * SG_MS && !done;)
                sched_yield();
        GR_CHECK(!done);
        sem_post(&go_on);
        pthread_join(helper, NULL);
        pthread_join(ender, NULL);
        sg_context_destroy(context->handle);
        gr_core_context_gone(context);
        GR_CHECK_EQ(atomic_load(&context->device->reserved_bytes), 0);
        finish();
}

/* Where the driver refuses to take memory back in a context that ends, nobody frees the address once more. */
static bool trim_ending(struct gr_context *context, void *arg)
{
        (void)arg;
        gr_core_context_ending(context);
        sg_context_destroy(context->handle);
        gr_trim(context, UINT64_MAX);
        return false;
}

static void test_trim_ending(void)
{
        struct gr_context *context;
        uint64_t ptr;

        start();
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        ptr = alloc(context, 8 * MIB);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        sg_fail(SG_MEM_RELEASE, 1, 1, gr_driver_error(709));
        gr_context_each(&core, -1, trim_ending, NULL);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 0);
        gr_core_context_gone(context);
        GR_CHECK_EQ(atomic_load(&context->device->reserved_bytes), 0);
        finish();
}

/* Two that are about to end at once, of which one stays: what has gone is in no fence of it. */
static void test_two_end(void)
{
        struct gr_context *goes, *stays;

        start();
        goes = gr_core_context_add(&core, sg_context_new(0), 0);
        stays = gr_core_context_add(&core, sg_context_new(0), 0);
        gr_core_context_ending(stays);
        gr_core_context_ending(goes);
        sg_context_destroy(goes->handle);
        gr_core_context_gone(goes);
        gr_core_context_stays(stays);
        GR_CHECK_EQ(gr_fence_accessors(stays->fence), 1);
        GR_CHECK_EQ(sg_free(&core, alloc(stays, 4 * MIB)), 0);
        GR_CHECK_EQ(gr_fence_barrier(stays->fence), 0);
        finish();
}

/* One that was not destroyed after all is covered by the other's fence again, and the other by its own. */
static void test_covered_again(void)
{
        struct gr_context *other, *stays, *far;

        start();
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        stays = gr_core_context_add(&core, sg_context_new(0), 0);
        gr_core_context_ending(stays);
        GR_CHECK_EQ(gr_fence_accessors(other->fence), 1);
        gr_core_context_stays(stays);
        GR_CHECK_EQ(gr_fence_accessors(other->fence), 2);
        GR_CHECK_EQ(gr_fence_accessors(stays->fence), 2);
        far = gr_core_context_add(&core, sg_context_new(1), 1);
        gr_fence_add_accessor(far->fence, stays); /* as with peer access, which the driver does not take back */
        gr_core_context_ending(stays);
        GR_CHECK_EQ(gr_fence_accessors(far->fence), 1);
        gr_core_context_stays(stays);
        GR_CHECK_EQ(gr_fence_accessors(far->fence), 2);
        GR_CHECK_EQ(gr_fence_accessors(stays->fence), 2); /* not what far's work can reach */
        finish();
}

/* Where the order ends while one is about to end, and that one stays, it is over there, too. */
static void test_order_over(void)
{
        struct gr_context *stays;

        start();
        core.config.in_order = true;
        stays = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK(gr_fence_is_in_order(stays->fence));
        gr_core_context_ending(stays);
        gr_core_end_order(&core);
        gr_core_context_stays(stays);
        GR_CHECK(!gr_fence_is_in_order(stays->fence));
        finish();
}

static void fail_within(void)
{
        errno = EIO;
}

/* The order ends by a barrier, in a call that natively is a launch or a copy: errno stays what it was. */
static void test_order_ends(void)
{
        struct gr_context *context;

        start();
        core.config.in_order = true;
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(sg_free(&core, alloc(context, MIB)), 0);
        alloc(context, MIB); /* handed out again while work may still use it */
        sg_before[SG_CONTEXT_RECORD] = fail_within;
        errno = 0;
        gr_core_end_order(&core);
        GR_CHECK_EQ(errno, 0);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_barriers), 1);
        finish();
}

/* Two that may end it, of which the first did not: nobody visits it beside the second. */
static void test_may_end_twice(void)
{
        struct gr_context *context;

        start();
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gr_core_context_ending(context);
        gr_core_context_ending(context);
        gr_core_context_stays(context);
        GR_CHECK_EQ(contexts(-1), 0);
        gr_core_context_stays(context);
        GR_CHECK_EQ(contexts(-1), 1);
        finish();
}

/* Its work may use what others free and have handed out again: it is waited for, once, in a way that captures bear. */
static void test_end_waits(bool capturing)
{
        struct gr_context *goes, *stays;

        start();
        goes = gr_core_context_add(&core, sg_context_new(0), 0);
        stays = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(gr_budget_charge(core.host, GR_MEMORY_HOST, MIB), 0);
        sg_work(goes->handle, 0, 0, 5 * SG_MS);
        sg_work(stays->handle, 0, 0, 50 * SG_MS);
        if (capturing) {
                sg_capture(1);
                gr_gate_begin_enter(&core.gate);
                gr_gate_begin_leave(&core.gate, true);
        }
        gr_core_context_ending(goes);
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS + 5 * SG_MS);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), !capturing);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), capturing);
        if (capturing) {
                gr_gate_end(&core.gate);
                sg_capture(-1);
        }
        sg_context_destroy(goes->handle);
        gr_core_context_gone(goes);
        gr_budget_uncharge(core.host, GR_MEMORY_HOST, MIB);
        finish();
}

/* One that is alone has nobody's blocks in use: the driver waits for its work itself. */
static void test_end_alone(void)
{
        struct gr_context *goes, *gone;

        start();
        gone = gr_core_context_add(&core, sg_context_new(0), 0);
        goes = gr_core_context_add(&core, sg_context_new(1), 1);
        sg_context_destroy(gone->handle);
        gr_core_context_gone(gone);
        sg_work(goes->handle, 0, 0, 5 * SG_MS);
        gr_core_context_ending(goes);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC) + sg_calls(SG_CONTEXT_DRAIN), 0);
        sg_context_destroy(goes->handle);
        gr_core_context_gone(goes);
        finish();
}

static void *find_other(void *handle)
{
        return gr_context_find(&core, handle);
}

/* Who looks for a context waits for whoever is changing the list. */
static void test_find_waits(void)
{
        struct gr_context *context;
        void *handle, *found;
        pthread_t thread;

        start();
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        handle = context->handle;
        gr_lock(&core.contexts_lock);
        context->alive = false;
        GR_CHECK_EQ(pthread_create(&thread, NULL, find_other, handle), 0);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
        context->alive = true;
        gr_unlock(&core.contexts_lock);
        pthread_join(thread, &found);
        GR_CHECK(found == context);
        finish();
}

static void *new_handle;

static void *add_new(void *arg)
{
        gr_core_context_add(&core, new_handle, 0);
        done = true;
        return arg;
}

/* A context is there for others only when all fences of its device cover its work. */
static void test_add_at_once(void)
{
        struct gr_context *first, *second;
        pthread_t adders[2];
        uint64_t ptr;

        start_slow(GR_REUSE_BARRIER);
        slow = false;
        second = gr_core_context_add(&core, sg_context_new(0), 0);
        first = gr_core_context_add(&core, sg_context_new(0), 0);
        new_handle = sg_context_new(0);
        /* The first has laid a barrier behind which work goes on: the new one has to wait for it as well. */
        ptr = alloc(first, 4 * MIB);
        sg_work(first->handle, 0, ptr, 10 * SG_MS);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(gr_fence_barrier(first->fence), 0);
        slow = true;
        pthread_create(&adders[0], NULL, add_new, NULL);
        sem_wait(&inside);
        done = false;
        pthread_create(&adders[1], NULL, add_new, NULL);
        for (int i = 0; i < 1000; i++)
                sched_yield();
        GR_CHECK(!done || gr_fence_accessors(second->fence) == 3);
        sem_post(&go_on);
        pthread_join(adders[0], NULL);
        pthread_join(adders[1], NULL);
        GR_CHECK_EQ(gr_fence_accessors(first->fence), 3);
        GR_CHECK_EQ(gr_fence_accessors(second->fence), 3);
        finish();
}

static void *will_wait(void *arg)
{
        gr_core_will_wait(&core);
        done = true;
        return arg;
}

static void *barrier(void *arg)
{
        struct gr_context *context = arg;

        gr_fence_barrier(context->fence);
        return NULL;
}

/* No barrier lies in front of work that waits for others, not even one that somebody was about to lay. */
static void test_will_wait(void)
{
        struct gr_context *context;
        pthread_t layer, waiters[2];

        start_slow(GR_REUSE_AUTO);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK_EQ(sg_free(&core, alloc(context, 4 * MIB)), 0);
        pthread_create(&layer, NULL, barrier, context);
        sem_wait(&inside);
        done = false;
        for (int n = 0; n < 2; n++) { /* the second one, too */
                pthread_create(&waiters[n], NULL, will_wait, NULL);
                while (!atomic_load(&core.waits_for_others))
                        sched_yield();
                for (int i = 0; i < 20 && !done; i++)
                        usleep(500);
                GR_CHECK(!done);
        }
        sem_post(&go_on);
        pthread_join(layer, NULL);
        for (int n = 0; n < 2; n++)
                pthread_join(waiters[n], NULL);
        GR_CHECK_EQ(sg_free(&core, alloc(context, 8 * MIB)), 0);
        sg_log_clear();
        GR_CHECK_EQ(gr_fence_barrier(context->fence), -EBUSY);
        GR_CHECK(strchr(sg_log(), 'w') == NULL);
        finish();
}

int main(void)
{
        test_visitors();
        test_end_beside_release();
        test_trim_ending();
        test_two_end();
        test_order_over();
        test_order_ends();
        test_covered_again();
        test_may_end_twice();
        test_end_waits(false);
        test_end_waits(true);
        test_end_alone();
        test_find_waits();
        test_add_at_once();
        test_will_wait();
        test_add_and_find();
        test_drop(4 * MIB);
        test_stale(4 * MIB, true);
        test_stale(4 * MIB, false);
        test_stale(4096, true);
        test_stale(4096, false);
        test_drop(4096);
        test_drop_all();
        return GR_CHECK_RESULT();
}
