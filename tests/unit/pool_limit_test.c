/* The threshold and the soft limit: what the pool keeps below them, who is told when it is more, and what goes then. */
#include "base/log.h"
#include "pool_start.h"
#include "reclaim/trim.h"

/* Above the threshold what was freed before a capture goes back beside it; what is freed in it, after it. */
static void test_capture_threshold(void)
{
        uint64_t blocks[2], other;

        start(GR_REUSE_AUTO);
        gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, 0);
        for (int i = 0; i < 2; i++) {
                blocks[i] = alloc((uint64_t)(4 + i) * MIB);
                sg_work(context->handle, 0, blocks[i], 10 * SG_MS);
        }
        free_ok(blocks[0]);
        GR_CHECK_EQ(gr_fence_close(context->fence), 0);
        sg_capture(1);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        free_ok(blocks[1]);
        GR_CHECK(gr_trim_excess(&core));
        GR_CHECK_EQ(cached(), 10 * MIB);
        sg_advance(20 * SG_MS);
        for (int i = 0; i < 100; i++)
                GR_CHECK(gr_trim_excess(&core)); /* who asks is to ask again */
        GR_CHECK_EQ(sg_used_bytes(0), 6 * MIB);
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC) + sg_calls(SG_CONTEXT_DRAIN), 0); /* nobody waits for it */
        other = alloc(1022 * MIB);
        GR_CHECK(other != 0); /* but who needs it */
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_DRAIN), 1);
        free_ok(other);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        GR_CHECK(!gr_trim_excess(&core));
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        finish();
}

static unsigned wakes;

static void wake(struct gr_core *woken)
{
        GR_CHECK(woken == &core);
        wakes++;
}

static void test_threshold(void)
{
        uint64_t blocks[25];

        start(GR_REUSE_AUTO);
        core.wake = wake;
        wakes = 0;
        gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, 64 * MIB);
        for (int i = 0; i < 25; i++)
                blocks[i] = alloc(4 * MIB);
        sg_work(context->handle, 0, blocks[24], 50 * SG_MS);
        for (int i = 0; i < 16; i++)
                free_ok(blocks[i]);
        GR_CHECK_EQ(wakes, 0);
        for (int i = 16; i < 25; i++)
                free_ok(blocks[i]);
        GR_CHECK(wakes > 0);

        /* The GPU works still: nothing goes, somebody should come again, and nobody waits. */
        GR_CHECK(gr_trim_excess(&core));
        GR_CHECK_EQ(cached(), 100 * MIB);
        GR_CHECK_EQ(sg_driver.now_ns(), SG_FIRST_NS);
        sg_advance(50 * SG_MS);
        GR_CHECK(!gr_trim_excess(&core));
        GR_CHECK_EQ(cached(), 64 * MIB);
        GR_CHECK_EQ(sg_used_bytes(0), 64 * MIB);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 0); /* all by the way that does not stall */
        finish();

        /* Threshold 0 keeps nothing. */
        start(GR_REUSE_AUTO);
        gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, 0);
        blocks[0] = alloc(512);
        blocks[1] = alloc(100 * MIB);
        free_ok(blocks[0]);
        free_ok(blocks[1]);
        GR_CHECK(!gr_trim_excess(&core));
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        finish();
}

/* Below the threshold a free looks at nothing that other threads write. A look ends in memory that cannot be read. */
static void test_threshold_unasked(enum gr_pool_kind pool)
{
        struct gr_cached *all;
        uint64_t live, ptr, usable;

        start_with(&sg_driver, GR_REUSE_AUTO, pool);
        gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, 64 * MIB);
        gr_budget_set_limit(device, GR_LIMIT_SOFT, 512 * MIB);
        live = alloc(100 * MIB); /* the charge alone says nothing then */
        ptr = alloc(65536);
        free_ok(ptr);
        settle();
        gr_arena_own(context)->note_at = UINT64_MAX; /* the peak of live memory is another question */
        all = atomic_load(&device->keepers);
        usable = atomic_load(&context->fence->usable_epoch);
        atomic_store(&device->keepers, gr_check_wall());
        for (int i = 0; i < 1000; i++) {
                GR_CHECK_EQ(alloc(65536), ptr);
                free_ok(ptr);
                GR_CHECK(!gr_pool_wants_wake(context));
                /* As if the epoch were closed and all work had ended. */
                atomic_store(&context->fence->usable_epoch, atomic_fetch_add(&context->fence->open_epoch, 1));
        }
        atomic_store(&device->keepers, all);
        atomic_store(&context->fence->usable_epoch, usable);
        free_ok(live);
        GR_CHECK(gr_pool_wants_wake(context)); /* 100 MiB are too much */
        finish();
}

/*
 * The threshold is kept to the byte all the same: whenever the cache holds more, whoever freed last has said so. One
 * thread plays many, each with its own bins, and those of two contexts; what it caches goes up and down among them.
 */
static void test_threshold_kept(bool moves)
{
        enum { BLOCKS = 400 };
        static struct {
                uint64_t ptr;
                unsigned context;
        } blocks[BLOCKS];
        struct gr_context *contexts[2];
        unsigned own = gr_thread.shard, count = 0, passed = 0;
        uint64_t seed = 7;

        while (atomic_load(&gr_shard_threads) < GR_SHARDS)
                gr_shard_assign();
        start(GR_REUSE_AUTO);
        contexts[0] = context;
        contexts[1] = gr_core_context_add(&core, sg_context_new(0), 0);
        core.wake = wake;
        gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, 24 * MIB);
        for (int i = 0; i < 20000; i++) {
                unsigned what, which;

                seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
                what = (unsigned)(seed >> 33) % 100;
                which = (unsigned)(seed >> 40) % 2;
                gr_thread.shard = (i / 100 % 2 ? (unsigned)(seed >> 42) % GR_SHARDS : 3) + 1;
                gr_thread.hit_arena = NULL;
                if (what < 49 && count < BLOCKS) {
                        size_t bytes = (size_t)4096 << (seed >> 50) % 10;

                        if (sg_alloc(contexts[which], bytes, &blocks[count].ptr) == 0)
                                blocks[count++].context = which;
                } else if (count > 0) {
                        unsigned k = (unsigned)(seed >> 44) % count;

                        if (gr_budget_excess(device) == 0)
                                wakes = 0;
                        free_ok(blocks[k].ptr);
                        blocks[k] = blocks[--count];
                        if (gr_budget_excess(device) > 0) {
                                passed++;
                                GR_CHECK(wakes > 0);
                                if (what % 2 == 0)
                                        gr_trim_excess(&core);
                        }
                }
                if (moves && what == 99)
                        gr_budget_set_limit(device, GR_LIMIT_THRESHOLD,
                                            (seed >> 56) % 4 ? (seed >> 50) % 4 * 8 * MIB : GR_UNLIMITED);
        }
        GR_CHECK(passed > 50);
        while (count > 0)
                free_ok(blocks[--count].ptr);
        sg_context_destroy(contexts[1]->handle);
        gr_core_context_gone(contexts[1]);
        gr_thread.shard = own;
        gr_thread.hit_arena = NULL;
        gr_fence_sync(context->fence);
        gr_trim_excess(&core);
        finish();
}

static void play(unsigned shard)
{
        gr_thread.shard = shard + 1;
        gr_thread.hit_arena = NULL;
}

/* What a thread's bins have been given by another's, or got while there was no threshold, counts against all. */
static void test_threshold_counts(bool moved)
{
        enum { COUNT = 20 };
        unsigned own = gr_thread.shard;
        uint64_t first[COUNT], then[COUNT];

        start(GR_REUSE_AUTO);
        core.wake = wake;
        wakes = 0;
        gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, 24 * MIB);
        play(0);
        for (int i = 0; i < COUNT; i++) {
                first[i] = alloc(MIB);
                then[i] = alloc(MIB);
        }
        for (int i = 0; i < COUNT; i++)
                free_ok(first[i]);
        settle();
        play(1);
        if (moved) {
                GR_CHECK_EQ(gr_arena_move(gr_arena_at(context, 0), gr_arena_own(context), gr_class_of(MIB), COUNT,
                                          UINT64_MAX),
                            COUNT);
        } else {
                for (int i = 0; i < COUNT; i++)
                        first[i] = alloc(MIB);
                gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, GR_UNLIMITED);
                for (int i = 0; i < COUNT; i++)
                        free_ok(first[i]);
                gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, 24 * MIB);
        }
        play(0);
        for (int i = 0; i < COUNT; i++) {
                GR_CHECK(wakes == 0 || gr_budget_excess(device) > 0);
                free_ok(then[i]);
                GR_CHECK((wakes > 0) == (gr_budget_excess(device) > 0));
        }
        GR_CHECK(wakes > 0);
        play(own ? own - 1 : 0);
        settle();
        gr_trim_excess(&core);
        finish();
}

static void test_soft_limit(void)
{
        uint64_t live, blocks[10];

        start(GR_REUSE_AUTO);
        core.wake = wake;
        wakes = 0;
        gr_budget_set_limit(device, GR_LIMIT_SOFT, 100 * MIB);
        live = alloc(80 * MIB);
        for (int i = 0; i < 10; i++)
                blocks[i] = alloc(4 * MIB);
        for (int i = 0; i < 10; i++)
                free_ok(blocks[i]);
        GR_CHECK(wakes > 0);
        gr_trim_excess(&core);
        GR_CHECK_EQ(sg_used_bytes(0), 100 * MIB); /* 80 live, so 20 may be kept */
        blocks[0] = alloc(90 * MIB);
        gr_trim_excess(&core);
        GR_CHECK_EQ(cached(), 0);
        GR_CHECK_EQ(sg_used_bytes(0), 170 * MIB); /* live memory may pass it */
        free_ok(blocks[0]);
        free_ok(live);
        finish();
}

/* What is too much goes back in each context, as far as it is idle; where nothing is, the driver is asked nothing. */
static void test_maintain(void)
{
        struct gr_context *other;
        uint64_t a, b, c = 0;

        start(GR_REUSE_AUTO);
        gr_core_context_add(&core, sg_context_new(2), 2); /* between the two, with nothing */
        other = gr_core_context_add(&core, sg_context_new(1), 1);
        a = alloc(8 * MIB);
        b = alloc(2 * MIB);
        free_ok(a);
        settle();
        sg_work(context->handle, 0, b, 10 * SG_MS);
        free_ok(b);
        sg_log_clear();
        GR_CHECK(!gr_trim_excess(&core));
        GR_CHECK_STR(sg_log(), "");
        gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, 4 * MIB);
        GR_CHECK(!gr_trim_excess(&core)); /* what waits may stay */
        GR_CHECK_EQ(cached(), 2 * MIB);
        gr_budget_set_limit(device, GR_LIMIT_THRESHOLD, 0);
        GR_CHECK(gr_trim_excess(&core));
        GR_CHECK_EQ(cached(), 2 * MIB);
        GR_CHECK_EQ(sg_alloc(other, 4 * MIB, &c), 0);
        free_ok(c);
        sg_advance(20 * SG_MS);
        gr_budget_set_limit(other->device, GR_LIMIT_THRESHOLD, 0);
        GR_CHECK(!gr_trim_excess(&core));
        GR_CHECK_EQ(cached(), 0);
        GR_CHECK_EQ(sg_cached_bytes(other->device), 0);
        finish();
}

int main(void)
{
        gr_log_set_level(GR_LOG_SILENT);
        test_capture_threshold();
        test_threshold();
        test_threshold_unasked(GR_POOL_BINS);
        test_threshold_unasked(GR_POOL_AUTO);
        test_threshold_kept(false);
        test_threshold_kept(true);
        test_threshold_counts(false);
        test_threshold_counts(true);
        test_soft_limit();
        test_maintain();
        return GR_CHECK_RESULT();
}
