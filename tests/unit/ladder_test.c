/* The ladder: what each rung does and gives, in which order they run, and when a climb ends. */
#include <errno.h>
#include <stdatomic.h>

#include "ladder_gpu.h"
#include "reclaim/trim.h"

static void test_ready(void)
{
        uint64_t beside, large, ptr;

        start();
        beside = alloc(10 * MIB);
        large = alloc(30 * MIB);
        free_ok(large);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        sg_log_clear();
        ptr = alloc(28 * MIB); /* too small for it by the rules of every day */
        GR_CHECK_EQ(ptr, large);
        check_tried_until(GR_RUNG_READY);
        GR_CHECK_EQ(BYTES(READY), 30 * MIB);
        GR_CHECK(strpbrk(sg_log(), "RFtsrw") == NULL);
        free_ok(ptr);
        free_ok(beside);
        finish();
}

/* Of small blocks one of twice the size will do. */
static void test_ready_small(void)
{
        uint64_t ptr;

        start();
        ptr = alloc(8192);
        free_ok(ptr);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        sg_fail(SG_MEM_ALLOC, 1, 1, -ENOMEM);
        GR_CHECK_EQ(alloc(5000), ptr);
        check_tried_until(GR_RUNG_READY);
        free_ok(ptr);
        sg_fail(SG_MEM_ALLOC, 1, 1, -ENOMEM);
        GR_CHECK(alloc(3000) != ptr); /* and none that is larger */
        finish();
}

static void test_fence(void)
{
        uint64_t beside, large, ptr;

        start();
        beside = alloc(10 * MIB);
        large = alloc(30 * MIB);
        sg_work(context->handle, 0, large, 10 * SG_MS);
        free_ok(large);
        ptr = alloc(28 * MIB);
        GR_CHECK_EQ(ptr, large);
        check_tried_until(GR_RUNG_FENCE);
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS); /* the GPU is ordered, the host does not wait */
        sg_work(context->handle, 1, ptr, SG_MS);
        free_ok(ptr);
        free_ok(beside);
        finish();

        /* Without barriers: once the epoch has passed. */
        start_with(&sg_driver, GR_REUSE_POLL);
        beside = alloc(10 * MIB);
        large = alloc(30 * MIB);
        sg_work(context->handle, 0, large, 10 * SG_MS);
        free_ok(large);
        sg_advance(10 * SG_MS);
        GR_CHECK_EQ(alloc(28 * MIB), large);
        check_tried_until(GR_RUNG_FENCE);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_WAIT), 0);
        free_ok(large);
        free_ok(beside);
        finish();
}

/* A block that is much larger goes back rather than to a program that asked for less: others want the rest. */
static void test_much_larger(void)
{
        uint64_t ptrs[8];

        for (int busy = 0; busy < 2; busy++) {
                start();
                for (int i = 0; i < 5; i++)
                        ptrs[i] = alloc(12 * MIB);
                for (int i = 0; i < 5; i++) {
                        if (busy)
                                sg_work(context->handle, 0, ptrs[i], 10 * SG_MS);
                        free_ok(ptrs[i]);
                }
                for (int i = 0; i < 8; i++)
                        ptrs[i] = alloc(8 * MIB);
                for (int i = 0; i < 8; i++)
                        free_ok(ptrs[i]);
                finish();
        }
}

static void test_purge_and_drop(void)
{
        for (int drop = 0; drop < 2; drop++) {
                struct holder holder = {.holds_bytes = 40 * MIB};
                struct gr_reclaimable reclaimable = {.name = "holder", .arg = &holder};

                start();
                *(drop ? &reclaimable.drop : &reclaimable.purge) = let_go;
                GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
                sg_hold(0, 40 * MIB, 0);
                alloc(40 * MIB);
                check_tried_until(drop ? GR_RUNG_DROP : GR_RUNG_PURGE);
                GR_CHECK_EQ(holder.calls, 1);
                GR_CHECK_EQ(holder.device, 0);
                GR_CHECK_EQ(holder.wanted_bytes, 16 * MIB); /* 24 are free */
                GR_CHECK_EQ(sg_calls(SG_TRIM_POOLS), drop ? 1 : 0);
                GR_CHECK_EQ(gr_reclaimable_unregister(&core, &reclaimable), 0);
                finish();
        }
}

/* Of a request that less would do for: no state is dropped, and nothing is reported or counted. */
static void test_optional(void)
{
        struct holder holder = {.holds_bytes = 40 * MIB};
        struct gr_reclaimable reclaimable = {.name = "holder", .drop = let_go, .arg = &holder};
        uint64_t ptr = 42;

        start();
        GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
        sg_hold(0, 40 * MIB, 0);
        GR_CHECK_EQ(gr_pool_alloc_optional(context, 40 * MIB, &ptr), -ENOMEM);
        GR_CHECK_EQ(ptr, 42);
        check_tried_until(GR_RUNG_SYNC);
        GR_CHECK_EQ(holder.calls, 0);
        gr_budget_set_limit(device, GR_LIMIT_HARD, 20 * MIB);
        GR_CHECK_EQ(gr_pool_alloc_optional(context, 40 * MIB, &ptr), -EDQUOT);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_limit_hits), 0);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_failures), 0);
        for (int i = 0; i < 2; i++) { /* fresh, and from the cache */
                GR_CHECK_EQ(gr_pool_alloc_optional(context, 4 * MIB, &ptr), 0);
                sg_own(ptr, 4 * MIB);
                free_ok(ptr);
        }
        sg_hold(0, 0, 0);
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &reclaimable), 0);
        finish();
}

/* What is idle makes room for the driver, also where nothing is cached. */
static void test_make_room(void)
{
        struct holder holder = {.holds_bytes = 40 * MIB};
        struct gr_reclaimable reclaimable = {.name = "holder", .purge = let_go, .arg = &holder};

        start();
        GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
        sg_hold(0, 40 * MIB, 0);
        gr_ladder_make_room(context, MIB);
        GR_CHECK_EQ(holder.calls, 1);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &reclaimable), 0);
        finish();
}

static uint64_t to_give;

static int give_ready(void *arg, int of_device, uint64_t want_bytes)
{
        (void)arg, (void)of_device, (void)want_bytes;
        if (to_give)
                free_ok(to_give);
        to_give = 0;
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        return 0;
}

/* What a rung brought into the cache, and is ready there, is handed out, without the driver. */
static void test_purged_block(void)
{
        struct gr_reclaimable reclaimable = {.name = "holder", .purge = give_ready};
        uint64_t given;

        start();
        GR_CHECK_EQ(gr_reclaimable_register(&core, &reclaimable), 0);
        given = to_give = alloc(40 * MIB);
        GR_CHECK_EQ(alloc(40 * MIB), given);
        check_tried_until(GR_RUNG_PURGE);
        GR_CHECK_EQ(sg_calls(SG_MEM_RELEASE) + sg_calls(SG_MEM_FREE), 0);
        GR_CHECK_EQ(gr_reclaimable_unregister(&core, &reclaimable), 0);
        finish();
}

static void test_trim(void)
{
        start();
        cache(15, 4 * MIB, 0);
        GR_CHECK_EQ(gr_fence_poll(context->fence), 0);
        sg_log_clear();
        alloc(34 * MIB); /* 4 are free, 30 are missing: 8 blocks */
        check_tried_until(GR_RUNG_TRIM);
        GR_CHECK_EQ(BYTES(TRIM), 32 * MIB);
        GR_CHECK_EQ(sg_cached_bytes(device), 28 * MIB);
        GR_CHECK(strchr(sg_log(), 'F') == NULL);
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS);
        finish();

        /* The card is shared: another context's cache serves, too, after the own. */
        start();
        cache(5, 4 * MIB, 0);
        {
                struct gr_context *own = context;

                context = gr_core_context_add(&core, sg_context_new(0), 0);
                cache(10, 4 * MIB, 0);
                context = own;
        }
        alloc(34 * MIB);
        check_tried_until(GR_RUNG_TRIM);
        GR_CHECK_EQ(sg_cached_bytes(device), 28 * MIB);
        finish();

        /* But not that of another device. */
        start();
        {
                struct gr_context *own = context, *far = gr_core_context_add(&core, sg_context_new(1), 1);

                context = far;
                cache(10, 4 * MIB, 0);
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                context = own;
        }
        GR_CHECK_EQ(gr_rung_run(context, GR_RUNG_TRIM, 8 * MIB), 0);
        GR_CHECK_EQ(sg_used_bytes(1), 40 * MIB);
        finish();

        /* What is above a threshold goes back with an older driver, too, which is waited for. */
        start_with(&sg_old_driver, GR_REUSE_POLL);
        cache(3, 4 * MIB, 10 * SG_MS);
        gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, 4 * MIB);
        GR_CHECK(!gr_trim_excess(&core));
        GR_CHECK_EQ(sg_cached_bytes(device), 4 * MIB);
        finish();
}

static void test_driver(void)
{
        start();
        sg_hold(0, 0, 40 * MIB);
        alloc(40 * MIB);
        check_tried_until(GR_RUNG_DRIVER);
        GR_CHECK_EQ(BYTES(DRIVER), 40 * MIB);
        finish();

        /* Also where the driver does not say how much is free: then nothing is told of it. */
        for (unsigned nth = 1; nth <= 3; nth++) {
                start();
                sg_hold(0, 0, 40 * MIB);
                sg_fail(SG_MEM_INFO, nth, 8, -EIO);
                alloc(40 * MIB);
                GR_CHECK_EQ(BYTES(DRIVER), 0);
                finish();
        }
}

static void test_sync(void)
{
        uint64_t waited_ns;

        start();
        cache(15, 4 * MIB, 10 * SG_MS); /* the i-th is idle after i * 10 ms */
        alloc(34 * MIB);
        check_tried_until(GR_RUNG_SYNC);
        waited_ns = sg_driver.now_ns() - SG_FIRST_NS;
        GR_CHECK(waited_ns >= 80 * SG_MS); /* eight of them were enough... */
        GR_CHECK(waited_ns < 95 * SG_MS);  /* ...and it waited for no more */
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), 0);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 0);
        GR_CHECK_EQ(sg_cached_bytes(device), 28 * MIB);
        finish();

        /* Without fences the context as a whole is waited for. */
        start_with(&sg_old_driver, GR_REUSE_POLL);
        cache(15, 4 * MIB, 10 * SG_MS);
        alloc(34 * MIB);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), 1);
        finish();

        /* That may fail once. */
        start_with(&sg_old_driver, GR_REUSE_POLL);
        cache(15, 4 * MIB, 10 * SG_MS);
        sg_fail(SG_CONTEXT_SYNC, 1, 1, gr_driver_error(1));
        alloc(34 * MIB);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), 2);
        finish();

        /* Work that does not end: a failure in the end, not a hang. */
        start();
        cache(15, 4 * MIB, UINT64_C(3600) * 1000 * SG_MS);
        {
                uint64_t ptr;

                GR_CHECK_EQ(sg_alloc(context, 34 * MIB, &ptr), -ENOMEM);
        }
        check_tried_until(GR_RUNG_FAIL);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 70000 * SG_MS); /* one wait, of a minute */
        finish();
}

/*
 * The device's own work is waited for as the driver's free would, however many contexts the device has; work of another
 * device may wait for what the program does later, so that wait is short.
 */
static void test_sync_contexts(unsigned own, bool peer)
{
        uint64_t blocks[14], ptr = 0;

        start();
        for (unsigned i = 0; i < own; i++)
                gr_core_context_add(&core, sg_context_new(0), 0);
        if (peer)
                gr_fence_add_accessor(context->fence, gr_core_context_add(&core, sg_context_new(1), 1));
        for (unsigned i = 0; i < 14; i++)
                blocks[i] = alloc(4 * MIB);
        for (unsigned i = 0; i < 14; i++)
                sg_work(context->handle, 0, blocks[i], i == 0 ? 3000 * SG_MS : SG_MS);
        for (unsigned i = 0; i < 14; i++)
                free_ok(blocks[i]);
        GR_CHECK_EQ(sg_alloc(context, 32 * MIB, &ptr), peer ? -ENOMEM : 0);
        GR_CHECK(peer == (sg_driver.now_ns() - SG_FIRST_NS < 3000 * SG_MS));
        finish();
}

/* Another thread that keeps the GPU busy, and frees, whenever the host sleeps. */
static unsigned work_share; /* of the time that the host sleeps; above 1 the GPU falls behind */

static void sleep_at_work(uint64_t ns)
{
        static bool inside; /* it may have to wait itself */
        uint64_t block = 0;

        sg_driver.sleep_ns(ns);
        if (inside)
                return;
        inside = true;
        if (sg_alloc(context, MIB, &block) == 0) {
                sg_work(context->handle, 1, block, work_share * ns);
                free_ok(block);
                gr_fence_close(context->fence);
        }
        inside = false;
}

/* What others free while the host waits for the GPU is not waited for without end. */
static void test_sync_at_work(bool peers, unsigned share)
{
        struct gr_driver driver = sg_driver;
        uint64_t ptr;

        driver.sleep_ns = sleep_at_work;
        work_share = share;
        start_with(&driver, GR_REUSE_AUTO);
        if (peers)
                gr_core_context_add(&core, sg_context_new(0), 0);
        cache(4, 4 * MIB, 5 * SG_MS);
        GR_CHECK_EQ(sg_alloc(context, CARD + MIB, &ptr), -ENOMEM);
        check_tried_until(GR_RUNG_FAIL);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 500 * SG_MS);
        finish();
}

static void test_sync_by_at_work(void)
{
        struct gr_driver driver = sg_driver;

        driver.sleep_ns = sleep_at_work;
        work_share = 1;
        start_with(&driver, GR_REUSE_AUTO);
        cache(4, 4 * MIB, 5 * SG_MS);
        GR_CHECK_EQ(gr_fence_sync_by(context->fence, sg_driver.now_ns() + 60000 * SG_MS), 0);
        GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 500 * SG_MS);
        finish();
}

/*
 * What the driver frees in the order of a stream comes back once the driver has waited: where any is held, and the work
 * ends in time, which is a second where work may wait for what the program does later.
 */
static void test_in_order(void)
{
        static const struct {
                bool held, graph, waits_for_others;
                uint64_t work_ms;
                unsigned syncs;
        } cases[] = {{.held = true, .syncs = 1},
                     {.held = true, .graph = true, .syncs = 1},
                     {.held = true, .work_ms = 3000, .syncs = 1},
                     {.held = true, .waits_for_others = true, .syncs = 1},
                     {.held = true, .waits_for_others = true, .work_ms = 500, .syncs = 1},
                     {.held = true, .waits_for_others = true, .work_ms = 3600000},
                     {.held = false}};
        uint64_t ptr;

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                enum gr_memory_kind kind = cases[i].graph ? GR_MEMORY_GRAPH : GR_MEMORY_STREAM_ORDERED;

                start();
                if (cases[i].held)
                        gr_budget_force(device, kind, MIB);
                if (cases[i].work_ms)
                        sg_work(context->handle, 0, 0, cases[i].work_ms * SG_MS);
                atomic_store(&core.waits_for_others, cases[i].waits_for_others);
                GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM);
                GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), cases[i].syncs);
                GR_CHECK_EQ(sg_calls(SG_TRIM_POOLS), 1 + cases[i].held);
                GR_CHECK(sg_driver.now_ns() - SG_FIRST_NS < (cases[i].waits_for_others ? 2000 : 4000) * SG_MS);
                if (cases[i].held)
                        gr_budget_uncharge(device, kind, MIB);
                finish();
        }
}

/* All rungs run, in their order, and each sees what those before it left. */
static void test_order(void)
{
        struct holder purged = {0}, dropped = {0};
        struct gr_reclaimable first = {.name = "first", .purge = let_go, .arg = &purged};
        struct gr_reclaimable second = {.name = "second", .drop = let_go, .arg = &dropped};
        uint64_t ptr = 42, busy;

        start();
        gr_reclaimable_register(&core, &first);
        gr_reclaimable_register(&core, &second);
        cache(4, 4 * MIB, 0);
        busy = alloc(8 * MIB);
        sg_work(context->handle, 0, busy, 50 * SG_MS);
        free_ok(busy);
        GR_CHECK_EQ(sg_alloc(context, 65 * MIB, &ptr), -ENOMEM); /* more than the card */
        GR_CHECK_EQ(ptr, 42);
        check_tried_until(GR_RUNG_FAIL);
        GR_CHECK_EQ(purged.calls, 1);
        GR_CHECK_EQ(purged.releases + purged.trims, 0); /* before TRIM and DRIVER */
        GR_CHECK_EQ(dropped.calls, 1);
        GR_CHECK(dropped.releases > 0);
        GR_CHECK_EQ(dropped.trims, 1);
        GR_CHECK(dropped.seen_ns >= SG_FIRST_NS + 50 * SG_MS); /* after SYNC */
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        GR_CHECK_EQ(TRIES(FAIL), 1);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_failures), 1);
        for (enum gr_rung rung = GR_RUNG_NEIGHBOUR; rung <= GR_RUNG_SPILL; rung++)
                GR_CHECK_EQ(gr_rung_run(context, rung, MIB), 0);
        finish();
}

static unsigned asked;

static uint64_t ask(struct gr_core *asker, struct gr_device *of, uint64_t want_bytes)
{
        (void)asker, (void)of, (void)want_bytes;
        asked++;
        return 0;
}

/* Other processes can help where the card or the group's limit is what refuses, not where it is the process's own. */
static void test_asks_neighbours(void)
{
        static const struct {
                uint64_t hard_bytes;
                size_t bytes;
                const struct gr_group *group;
                int error;
                bool helps;
        } cases[] = {
                {GR_UNLIMITED, 65 * MIB, NULL, -ENOMEM, true},
                {32 * MIB, 33 * MIB, NULL, -EDQUOT, false},
                {80 * MIB, 65 * MIB, NULL, -ENOMEM, true},
                {80 * MIB, 33 * MIB, &full_group, -EDQUOT, true},
        };
        uint64_t ptr;

        for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
                start();
                core.ask_neighbours = ask;
                gr_budget_set_limit(device, GR_LIMIT_HARD, cases[i].hard_bytes);
                atomic_store(&device->group, cases[i].group);
                asked = 0;
                GR_CHECK_EQ(sg_alloc(context, cases[i].bytes, &ptr), cases[i].error);
                GR_CHECK_EQ(asked > 0, cases[i].helps);
                GR_CHECK_EQ(TRIES(NEIGHBOUR) > 0, cases[i].helps);
                finish();
        }
}

static void test_hard_limit(void)
{
        uint64_t ptrs[4], ptr = 42;

        start();
        gr_budget_set_limit(device, GR_LIMIT_HARD, 32 * MIB);
        for (int i = 0; i < 4; i++)
                ptrs[i] = alloc(8 * MIB); /* exactly full */
        GR_CHECK_EQ(sg_alloc(context, 1, &ptr), -EDQUOT);
        GR_CHECK_EQ(sg_alloc(context, 2 * MIB, &ptr), -EDQUOT);
        GR_CHECK_EQ(ptr, 42);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_limit_hits), 2); /* one for each request, however often it was tried */
        GR_CHECK_EQ(sg_used_bytes(0), 32 * MIB);
        sg_advance(1000 * SG_MS);
        free_ok(ptrs[0]);
        alloc(3 * MIB); /* what is cached makes room: 4 of 8 */
        alloc(2 * MIB);
        alloc(2 * MIB);
        GR_CHECK_EQ(sg_alloc(context, 1, &ptr), -EDQUOT);

        /* A cache behind running work makes room as well. */
        sg_advance(1000 * SG_MS);
        sg_work(context->handle, 0, ptrs[1], 20 * SG_MS);
        free_ok(ptrs[1]);
        alloc(4096);
        GR_CHECK(atomic_load(&device->peak_reserved_bytes) <= 32 * MIB);
        finish();
}

/* A slab has room for a small request, but not for all of its class: the request is served, and its block again. */
static void test_exact(bool by_limit)
{
        uint64_t ptr;

        start();
        if (by_limit)
                gr_budget_set_limit(device, GR_LIMIT_HARD, 8 * MIB);
        alloc(by_limit ? 6 * MIB : CARD - 2 * MIB);
        alloc(MIB);
        alloc(512 * KIB);
        alloc(80 * KIB);
        ptr = alloc(400 * KIB);
        check_tried_until(GR_RUNG_DROP);
        free_ok(ptr);
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        GR_CHECK_EQ(alloc(384 * KIB), ptr);
        free_ok(ptr);
        finish();
}

static int (*attempt_next)(void);

static int attempt(void *arg)
{
        (void)arg;
        return attempt_next();
}

static int refused_by_limit(void)
{
        return gr_budget_charge(device, GR_MEMORY_MANAGED, 8 * MIB);
}

static int refused_by_card(void)
{
        uint64_t free_bytes = 0, total;

        sg_driver.mem_info(context->handle, &free_bytes, &total);
        return free_bytes < 8 * MIB ? -ENOMEM : 0;
}

/* As much is given back as lacks by whoever refused last: the limit, or the card. */
static void test_what_lacks(bool by_limit)
{
        start();
        cache(7, 4 * MIB, 0);
        gr_fence_poll(context->fence);
        if (by_limit)
                gr_budget_set_limit(device, GR_LIMIT_HARD, 32 * MIB);
        else
                sg_hold(0, 32 * MIB, 0);
        attempt_next = by_limit ? refused_by_limit : refused_by_card;
        GR_CHECK_EQ(gr_ladder_climb_for(context, 8 * MIB, attempt, NULL, by_limit ? -ENOMEM : -EDQUOT), 0);
        GR_CHECK_EQ(sg_cached_bytes(device), 24 * MIB);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_limit_hits), 1);
        if (by_limit)
                gr_budget_uncharge(device, GR_MEMORY_MANAGED, 8 * MIB);
        finish();
}

/* A request that the pool does not serve takes no block of the driver's on the way. */
static void test_no_block(void)
{
        pool_begin(&sg_driver, CARD, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_SPLIT});
        device = context->device;
        GR_CHECK(gr_pool_kind_segments_serve(context, 8 * MIB));
        sg_hold(0, CARD - 4 * MIB, 0);
        attempt_next = refused_by_card;
        GR_CHECK_EQ(gr_ladder_climb_for(context, 8 * MIB, attempt, NULL, -ENOMEM), -ENOMEM);
        GR_CHECK_EQ(sg_calls(SG_MEM_ALLOC), 0);
        finish();
}

/* Another error of the driver on the way up is the answer. */
static void test_other_error(void)
{
        uint64_t ptr;

        start();
        alloc(40 * MIB);
        sg_fail(SG_MEM_ALLOC, 2, 1, gr_driver_error(700));
        GR_CHECK_EQ(sg_alloc(context, 40 * MIB, &ptr), gr_driver_error(700));
        GR_CHECK_EQ(TRIES(FAIL), 0);
        finish();
}

int main(void)
{
        test_ready();
        test_ready_small();
        test_fence();
        test_much_larger();
        test_purge_and_drop();
        test_optional();
        test_make_room();
        test_purged_block();
        test_trim();
        test_driver();
        test_sync();
        test_sync_contexts(0, false);
        test_sync_contexts(1, false);
        test_sync_contexts(GR_ACCESSORS_MAX - 1, false);
        test_sync_contexts(GR_ACCESSORS_MAX, false);
        test_sync_contexts(0, true);
        test_sync_contexts(1, true);
        for (unsigned share = 1; share <= 3; share += 2) {
                test_sync_at_work(false, share);
                test_sync_at_work(true, share);
        }
        test_sync_by_at_work();
        test_asks_neighbours();
        test_in_order();
        test_order();
        test_hard_limit();
        test_exact(true);
        test_exact(false);
        test_what_lacks(true);
        test_what_lacks(false);
        test_no_block();
        test_other_error();
        return GR_CHECK_RESULT();
}
