/* Contexts that come and go, and addresses that the driver gives out anew. */
#include <errno.h>

#include "check.h"
#include "pool.h"
#include "scripted.h"

#define MIB SG_MIB

static struct gr_core core;

static void start(void)
{
        sg_reset(1024 * MIB);
        gr_core_init(&core, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
}

static void check_accounts(void)
{
        GR_CHECK_EQ(atomic_load(&core.devices[0].charged_bytes), sg_used_bytes(0));
        GR_CHECK(sg_cached_bytes(&core.devices[0]) <= atomic_load(&core.devices[0].charged_bytes));
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

        gr_core_each_context(&core, device, count_context, &count);
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
        context = gr_context_add(&core, a, 0);
        GR_CHECK(context && context->device == &core.devices[0]);
        GR_CHECK(gr_context_add(&core, a, 0) == context);
        GR_CHECK(gr_context_find(&core, a) == context);
        GR_CHECK(gr_context_add(&core, b, 0) != context);
        GR_CHECK(gr_context_add(&core, c, 1)->device == &core.devices[1]);
        GR_CHECK_EQ(contexts(-1), 3);
        GR_CHECK_EQ(contexts(0), 2);
        GR_CHECK_EQ(contexts(1), 1);
        GR_CHECK_EQ(contexts(2), 0);
        gr_core_each_context(&core, -1, first_only, &count);
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
        context = gr_context_add(&core, sg_context_new(0), 0);
        other = gr_context_add(&core, sg_context_new(0), 0);
        live = alloc(context, bytes);
        cached = alloc(context, bytes);
        kept = alloc(other, bytes);
        sg_work(context->handle, 0, cached, 1000 * SG_MS);
        GR_CHECK_EQ(sg_free(&core, cached), 0);
        GR_CHECK_EQ(gr_fence_close(context), 0);
        GR_CHECK_EQ(sg_free(&core, kept), 0);
        GR_CHECK_EQ(gr_fence_close(other), 0);
        check_accounts();

        handle = context->handle;
        sg_context_destroy(handle);
        sg_log_clear();
        gr_context_drop(context);
        GR_CHECK_STR(sg_log(), ""); /* without a call of the driver */
        check_accounts();
        GR_CHECK(gr_context_find(&core, handle) == NULL);
        GR_CHECK_EQ(contexts(0), 1);
        GR_CHECK_EQ(gr_pool_free(&core, live), -ENOENT);
        GR_CHECK_EQ(gr_pool_free(&core, cached), -ENOENT);

        /* The other one lost nothing, and waits for nothing of the one that went. */
        GR_CHECK_EQ(gr_fence_poll(other), 0);
        GR_CHECK_EQ(alloc(other, bytes), kept);

        /* A new context may even have the old handle, on the memory of the old one. */
        handle = sg_context_new(0);
        context = gr_context_add(&core, handle, 0);
        GR_CHECK(context != NULL);
        live = alloc(context, bytes);
        sg_work(handle, 0, live, SG_MS);
        GR_CHECK_EQ(sg_free(&core, live), 0);
        GR_CHECK_EQ(gr_fence_sync(context), 0);
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
                context = gr_context_add(&core, sg_context_new(0), 0);
                for (int i = 0; i < 200; i++)
                        ptrs[i] = alloc(context, (size_t)512 << (i % 14));
                for (int i = 0; i < 200; i += 2)
                        GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
                check_accounts();
                sg_context_destroy(context->handle);
                gr_context_drop(context);
                GR_CHECK_EQ(atomic_load(&core.devices[0].charged_bytes), 0);
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
        old = gr_context_add(&core, sg_context_new(0), 0);
        before = alloc(old, bytes);
        if (!live) {
                GR_CHECK_EQ(sg_free(&core, before), 0);
                GR_CHECK_EQ(gr_fence_sync(old), 0);
        }
        sg_context_destroy(old->handle);
        context = gr_context_add(&core, sg_context_new(0), 0);
        after = alloc(context, bytes);
        GR_CHECK_EQ(after, before);                                                /* else this tests nothing */
        GR_CHECK(atomic_load(&core.devices[0].charged_bytes) >= sg_used_bytes(0)); /* too much rather than too little */

        /* Then the core learns of the end. */
        gr_context_drop(old);
        check_accounts();
        GR_CHECK_EQ(sg_size(after), gr_class_block_bytes(bytes));
        second = alloc(context, bytes);
        GR_CHECK(second != after);
        GR_CHECK_EQ(sg_free(&core, after), 0);
        GR_CHECK_EQ(gr_fence_sync(context), 0);
        GR_CHECK_EQ(alloc(context, bytes), after);
        finish();
}

/* As a thread that gives memory back in the context would: no end of the context beside it. */
static bool end_beside(struct gr_context *context, void *arg)
{
        uint64_t *waited_ns = arg, begin_ns = sg_driver.now_ns();

        gr_context_ending(context);
        *waited_ns = sg_driver.now_ns() - begin_ns;
        return false;
}

static void test_visitors(void)
{
        struct gr_context *context;
        uint64_t waited_ns = 0;

        start();
        context = gr_context_add(&core, sg_context_new(0), 0);
        gr_context_ending(context);
        GR_CHECK_EQ(contexts(-1), 0);
        gr_context_stays(context);
        GR_CHECK_EQ(contexts(-1), 1);
        /* A visitor that waits for the end itself is waited for, but not for ever. */
        gr_core_each_context(&core, -1, end_beside, &waited_ns);
        GR_CHECK(waited_ns >= 500 * SG_MS && waited_ns < 5000 * SG_MS);
        gr_context_drop(context);
        GR_CHECK_EQ(contexts(-1), 0);
        finish();
}

int main(void)
{
        test_visitors();
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
