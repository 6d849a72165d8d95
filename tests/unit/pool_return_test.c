/* What goes back to the driver: blocks that are not cached, those freed in the order of a stream, and idle ones. */
#include <errno.h>
#include <pthread.h>
#include <unistd.h>

#include "base/log.h"
#include "cache/block_life.h"
#include "pool_start.h"
#include "reclaim/trim.h"

static void test_straight_to_driver(void)
{
        uint64_t a, b, c;

        /* Exported: others may know the block. */
        start(GR_REUSE_AUTO);
        a = alloc(4 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        free_ok(a);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 1);
        GR_CHECK_EQ(cached(), 0);
        GR_CHECK_EQ(sg_size(a), 0);

        /* A free that the driver refuses: the program still has the block. */
        b = alloc(4 * MIB);
        gr_ledger_mark_exported(core.ledger, b);
        sg_fail(SG_MEM_FREE, 1, 1, gr_driver_error(719));
        GR_CHECK_EQ(sg_free(&core, b), gr_driver_error(719));
        check_accounts();
        free_ok(b);
        GR_CHECK_EQ(sg_used_bytes(0), 0);

        /* A broken fence: no reuse any more, of what the GPU was done with before neither. */
        a = alloc(4 * MIB);
        b = alloc(4 * MIB);
        c = alloc(8 * MIB);
        free_ok(c);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(alloc(8 * MIB), c);
        free_ok(c);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        free_ok(b);
        sg_fail(SG_CONTEXT_RECORD, 1, 1, gr_driver_error(700));
        GR_CHECK_EQ(gr_fence_close(context->fence), gr_driver_error(700));
        free_ok(a);
        GR_CHECK_EQ(sg_size(a), 0);
        GR_CHECK(alloc(4 * MIB) != b);
        GR_CHECK(alloc(8 * MIB) != c);
        finish();

        /* More contexts reach the blocks than a fence can cover. */
        start(GR_REUSE_AUTO);
        for (int i = 0; i < GR_ACCESSORS_MAX; i++)
                gr_core_context_add(&core, sg_context_new(0), 0);
        a = alloc(4 * MIB);
        free_ok(a);
        GR_CHECK_EQ(sg_size(a), 0);
        finish();

        /* Nor is what was in the cache by then put in front of work that no barrier orders. */
        start(GR_REUSE_BARRIER);
        a = alloc(4 * MIB);
        sg_work(context->handle, 0, a, 100 * SG_MS);
        free_ok(a);
        {
                struct gr_context *last = NULL;

                for (int i = 0; i < GR_ACCESSORS_MAX; i++)
                        last = gr_core_context_add(&core, sg_context_new(0), 0);
                b = alloc(4 * MIB);
                sg_work(last->handle, 0, b, SG_MS);
        }
        finish();

        start_with(&sg_driver, GR_REUSE_AUTO, GR_POOL_NONE);
        for (int i = 0; i < 10; i++) {
                a = alloc(4 * MIB);
                free_ok(a);
        }
        GR_CHECK_EQ(sg_calls(SG_MEM_ALLOC), 10);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 10);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), 0);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        finish();
}

/* The driver takes the block, and has it once a stream has got there. */
static int take_in_order(void *arg, uint64_t ptr)
{
        *(uint64_t *)arg = ptr;
        return 0;
}

static void *leave(void *ptr)
{
        uint64_t gone;

        GR_CHECK_EQ(gr_pool_free_in_order(&core, *(uint64_t *)ptr, take_in_order, &gone), 0);
        return NULL;
}

static void *drop_leaving(void *arg)
{
        gr_blocks_context_gone(context);
        return arg;
}

static void *collect_left(void *arg)
{
        GR_CHECK_EQ(gr_blocks_collect(context), 20 * MIB);
        return arg;
}

/* The list of what is on its way back stays as it is while somebody else has the lock. */
static void change_leaving(void *(*change)(void *), void *arg)
{
        struct gr_block *before = context->freed_in_order;
        pthread_t thread;

        gr_arena_lock(context->first_arena);
        pthread_create(&thread, NULL, change, arg);
        for (int n = 0; n < 20 && context->freed_in_order == before; n++)
                usleep(500);
        GR_CHECK(context->freed_in_order == before);
        gr_arena_unlock(context->first_arena);
        pthread_join(thread, NULL);
        GR_CHECK(context->freed_in_order != before);
}

/* What is on its way back is looked at by one thread at a time; once it is there it counts as given back. */
static void test_leaving(void)
{
        enum { TRIM, DROP, COLLECT, ENDS };
        uint64_t ptr;

        start_with(&sg_driver, GR_REUSE_AUTO, GR_POOL_NONE);
        gr_budget_set_limit(device, GR_LIMIT_HARD, 64 * MIB);
        for (int end = TRIM; end < ENDS; end++) {
                ptr = alloc(20 * MIB);
                GR_CHECK(sg_disown(ptr));
                sg_work(context->handle, 0, 0, 10 * SG_MS);
                change_leaving(leave, &ptr);
                if (end == DROP)
                        change_leaving(drop_leaving, NULL);
                sg_advance(20 * SG_MS);
                GR_CHECK_EQ(sg_driver.mem_free(ptr), 0);
                GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
                if (end == COLLECT)
                        change_leaving(collect_left, NULL);
                GR_CHECK_EQ(gr_trim(context, MIB), end == TRIM ? 20 * MIB : 0);
        }
        finish();
}

static int refuse(void *arg, uint64_t ptr)
{
        (void)arg, (void)ptr;
        return gr_driver_error(1);
}

/* What is not cached goes to the driver in the order of its stream, waits for nothing, and counts until it is there. */
static void test_free_in_order(void)
{
        uint64_t a, b, gone = 0, other = 0;
        void *next[4];

        start_with(&sg_driver, GR_REUSE_AUTO, GR_POOL_NONE);
        gr_budget_set_limit(device, GR_LIMIT_HARD, 32 * MIB);
        a = alloc(20 * MIB);
        sg_work(context->handle, 0, a, 10 * SG_MS);
        GR_CHECK_EQ(gr_pool_free_in_order(&core, a, refuse, NULL), gr_driver_error(1));
        GR_CHECK_EQ(gr_budget_live(device), 20 * MIB); /* still the program's */
        GR_CHECK(sg_disown(a));
        GR_CHECK_EQ(gr_pool_free_in_order(&core, a, take_in_order, &gone), 0);
        GR_CHECK_EQ(gone, a);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 0);
        GR_CHECK_EQ(gr_pool_free_in_order(&core, a, take_in_order, &other), -ENOENT);
        GR_CHECK_EQ(other, 0);
        GR_CHECK_EQ(gr_budget_live(device), 0);
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), 20 * MIB);
        GR_CHECK_EQ(gr_trim(context, UINT64_MAX / 2), 0);
        sg_advance(20 * SG_MS);
        GR_CHECK_EQ(sg_driver.mem_free(a), 0); /* the stream has got there */
        b = alloc(20 * MIB);
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), 20 * MIB);
        GR_CHECK_EQ(cached(), 0);

        /* One that is on its way when its context ends goes with it. */
        GR_CHECK(sg_disown(b));
        GR_CHECK_EQ(gr_pool_free_in_order(&core, b, take_in_order, &gone), 0);
        GR_CHECK_EQ(sg_driver.mem_free(b), 0);
        gr_core_context_ending(context);
        sg_context_destroy(context->handle);
        gr_core_context_gone(context);
        GR_CHECK_EQ(cached(), 0);

        /* Without a limit nobody asks when it is there. */
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gr_budget_set_limit(device, GR_LIMIT_HARD, GR_UNLIMITED);
        for (int i = 0; i < 4; i++) {
                a = alloc(20 * MIB);
                GR_CHECK(sg_disown(a));
                GR_CHECK_EQ(gr_pool_free_in_order(&core, a, take_in_order, &gone), 0);
                GR_CHECK_EQ(sg_driver.mem_free(a), 0);
                next[i] = gr_block_new(); /* what was freed last */
                gr_block_delete(next[i]);
                GR_CHECK(!GR_METADATA_IN_CHUNKS || next[i] == next[0]); /* so each went back */
        }
        finish();
}

static void test_trim(void)
{
        uint64_t b8, b16, b64, busy;

        start(GR_REUSE_AUTO);
        b8 = alloc(8 * MIB);
        b16 = alloc(16 * MIB);
        b64 = alloc(64 * MIB);
        busy = alloc(32 * MIB);
        free_ok(b64);
        free_ok(b16);
        free_ok(b8);
        settle();
        sg_work(context->handle, 0, busy, 10 * SG_MS);
        free_ok(busy);
        sg_log_clear();
        GR_CHECK_EQ(gr_trim(context, 0), 0);
        GR_CHECK_EQ(gr_trim(context, 9 * MIB), 16 * MIB); /* one that suffices, and not far too large */
        GR_CHECK_EQ(sg_size(b64), 64 * MIB);
        GR_CHECK_EQ(gr_trim(context, 70 * MIB), 72 * MIB);
        GR_CHECK_EQ(gr_trim(context, 1), 0); /* the busy one is not idle */
        GR_CHECK_EQ(sg_size(busy), 32 * MIB);
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS);
        GR_CHECK(strspn(sg_log(), "R") == strlen(sg_log()));
        finish();
}

int main(void)
{
        gr_log_set_level(GR_LOG_SILENT);
        test_straight_to_driver();
        test_free_in_order();
        test_leaving();
        test_trim();
        return GR_CHECK_RESULT();
}
