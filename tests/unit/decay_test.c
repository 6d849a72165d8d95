/* Decay against a scripted GPU: the clock is the test's own. */
#include <errno.h>

#include "alloc/pool.h"
#include "check.h"
#include "core.h"
#include "reclaim/decay.h"
#include "scripted.h"

#define DECAY_NS   (10000 * SG_MS)
#define BLOCKS     100
#define BLOCK      (2 * MIB)
#define ROOM_BYTES (1024 * MIB)

static struct gr_core core;
static struct gr_parts parts;
static struct gr_context *context;
static uint64_t clock_ns; /* the scripted clock also moves with each pause between batches */
static int wakes;

static void wake(struct gr_core *of)
{
        (void)of;
        wakes++;
}

static void start(uint64_t decay_ns)
{
        sg_reset(ROOM_BYTES);
        gr_core_init(&core, &parts, &sg_driver,
                     &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS, .decay_ns = decay_ns});
        core.wake = wake;
        wakes = 0;
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        clock_ns = SG_FIRST_NS;
}

static void finish(void)
{
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

static uint64_t cached(void)
{
        return gr_budget_cached(&core.devices[0]);
}

static uint64_t tick(uint64_t passed_ns)
{
        clock_ns += passed_ns;
        return gr_decay_run(&core, clock_ns);
}

static void cache_blocks(unsigned count, size_t bytes)
{
        uint64_t ptrs[BLOCKS];

        for (unsigned i = 0; i < count; i++)
                GR_CHECK_EQ(sg_alloc(context, bytes, &ptrs[i]), 0);
        for (unsigned i = 0; i < count; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
}

static void test_curve(void)
{
        double before = 0;

        GR_CHECK(gr_decay_curve(0) == 0 && gr_decay_curve(1) == 1 && gr_decay_curve(2) == 1 && gr_decay_curve(-1) == 0);
        GR_CHECK(gr_decay_curve(0.5) > 0.499 && gr_decay_curve(0.5) < 0.501);
        for (double x = 0.05; x < 1; x += 0.05) {
                GR_CHECK(gr_decay_curve(x) > before);
                before = gr_decay_curve(x);
        }
        GR_CHECK(gr_decay_curve(0.05) < 0.002); /* it begins and ends gently */
        GR_CHECK(gr_decay_curve(0.95) > 0.998);
}

/* Left alone, the cache follows the curve, to within one block, and is empty after the decay time and one step. */
static void test_idle(void)
{
        uint64_t step_ns, next, before;

        start(DECAY_NS);
        step_ns = gr_decay_step_ns(&core);
        GR_CHECK_EQ(step_ns, DECAY_NS / GR_DECAY_STEPS);
        cache_blocks(BLOCKS, BLOCK);
        GR_CHECK(wakes > 0);
        next = tick(0);
        GR_CHECK_EQ(next, clock_ns + step_ns);
        GR_CHECK(core.decay_armed);
        before = cached();
        GR_CHECK_EQ(before, BLOCKS * BLOCK);
        for (unsigned i = 1; i <= GR_DECAY_STEPS; i++) {
                double gone = gr_decay_curve((double)i / GR_DECAY_STEPS) * BLOCKS;
                uint64_t left;

                next = tick(step_ns);
                left = cached() / BLOCK;
                GR_CHECK(cached() <= before);
                GR_CHECK((double)left >= BLOCKS - gone - 0.001);
                GR_CHECK((double)left <= BLOCKS - gone + 1.001);
                before = cached();
        }
        GR_CHECK_EQ(cached(), 0);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 0); /* never the way that may stall */
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_SYNC), 0);
        GR_CHECK_EQ(tick(step_ns), 0);
        GR_CHECK(!core.decay_armed);

        /* And it begins again with the next free. */
        wakes = 0;
        cache_blocks(1, BLOCK);
        GR_CHECK_EQ(wakes, 1);
        finish();
}

/* One large block goes at the end of the decay time, not before. */
static void test_one_block(void)
{
        start(DECAY_NS);
        cache_blocks(1, 512 * MIB);
        tick(0);
        for (unsigned i = 1; i < GR_DECAY_STEPS; i++) {
                tick(gr_decay_step_ns(&core));
                GR_CHECK_EQ(cached(), 512 * MIB);
        }
        tick(gr_decay_step_ns(&core));
        GR_CHECK_EQ(cached(), 0);
        finish();
}

/* Of each size, the smallest and the largest. */
static void test_each_class(void)
{
        static const size_t sizes[] = {1, 512, 1024, MIB, 2 * MIB, 1000 * MIB};

        for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
                start(DECAY_NS);
                cache_blocks(1, sizes[i]);
                for (unsigned passed = 0; passed <= GR_DECAY_STEPS; passed++)
                        tick(passed ? gr_decay_step_ns(&core) : 0);
                GR_CHECK_EQ(cached(), 0);
                finish();
        }
}

/* What is used again and again stays, all of it and nothing more; blocks that take turns are no reason to keep more. */
static void test_recent_use(void)
{
        uint64_t ptrs[10];

        start(DECAY_NS);
        cache_blocks(40, BLOCK);
        tick(0);
        for (unsigned step = 0; step < 3 * GR_DECAY_STEPS; step++) {
                for (unsigned i = 0; i < 10; i++)
                        GR_CHECK_EQ(sg_alloc(context, BLOCK, &ptrs[i]), 0);
                for (unsigned i = 0; i < 10; i++)
                        GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
                tick(gr_decay_step_ns(&core));
        }
        GR_CHECK_EQ(cached(), 10 * BLOCK);
        GR_CHECK_EQ(sg_calls(SG_MEM_ALLOC), 40);
        finish();
}

/* Blocks that work still uses stay until it is done, and nothing waits for it. */
static void test_busy(void)
{
        uint64_t ptr;

        start(DECAY_NS);
        GR_CHECK_EQ(sg_alloc(context, BLOCK, &ptr), 0);
        sg_work(context->handle, 0, ptr, 100 * DECAY_NS);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        tick(0);
        for (unsigned i = 0; i < 2 * GR_DECAY_STEPS; i++)
                tick(gr_decay_step_ns(&core));
        GR_CHECK_EQ(cached(), BLOCK);
        sg_advance(101 * DECAY_NS);
        tick(gr_decay_step_ns(&core));
        GR_CHECK_EQ(cached(), 0);
        finish();
}

/* During a capture no event is recorded; what was idle before may go. */
static void test_capture(void)
{
        unsigned records;

        start(DECAY_NS);
        cache_blocks(4, BLOCK);
        tick(0);
        gr_gate_begin_enter(&core.gate);
        gr_gate_begin_leave(&core.gate, true);
        sg_capture(1);
        records = sg_calls(SG_CONTEXT_RECORD);
        for (unsigned i = 0; i < 2 * GR_DECAY_STEPS; i++)
                tick(gr_decay_step_ns(&core));
        GR_CHECK_EQ(sg_calls(SG_CONTEXT_RECORD), records);
        GR_CHECK_EQ(cached(), 4 * BLOCK);
        sg_capture(-1);
        gr_gate_end(&core.gate);
        tick(gr_decay_step_ns(&core));
        GR_CHECK_EQ(cached(), 0);
        finish();
}

static void test_settings(void)
{
        start(0);
        GR_CHECK_EQ(gr_decay_step_ns(&core), 0);
        cache_blocks(4, BLOCK);
        GR_CHECK_EQ(wakes, 0);
        GR_CHECK_EQ(tick(100 * DECAY_NS), 0);
        GR_CHECK_EQ(cached(), 4 * BLOCK);
        finish();

        start(50 * SG_MS); /* shorter than a step */
        cache_blocks(4, BLOCK);
        tick(0);
        GR_CHECK_EQ(gr_decay_step_ns(&core), GR_DECAY_STEP_MIN_NS);
        tick(GR_DECAY_STEP_MIN_NS);
        GR_CHECK_EQ(cached(), 0);
        finish();

        /* A helper that comes very late takes all steps at once. */
        start(DECAY_NS);
        cache_blocks(4, BLOCK);
        tick(0);
        tick(10 * DECAY_NS);
        GR_CHECK_EQ(cached(), 0);
        finish();
}

/* Where decay is off, who looks now and then learns what went unneeded between two looks; too soon nothing new. */
static void test_looks(void)
{
        const struct gr_decay *decay;

        start(0);
        decay = context->decay;
        cache_blocks(4, BLOCK);
        gr_decay_look(context, clock_ns);
        GR_CHECK_EQ(decay->unneeded_bytes, 0); /* in no known time */
        GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
        cache_blocks(1, BLOCK);
        gr_decay_look(context, clock_ns + GR_DECAY_LOOK_NS - 1);
        GR_CHECK_EQ(decay->unneeded_bytes, 0);
        gr_decay_look(context, clock_ns + GR_DECAY_LOOK_NS);
        GR_CHECK_EQ(decay->unneeded_bytes, 3 * BLOCK);
        gr_decay_look(context, clock_ns + 2 * GR_DECAY_LOOK_NS - 1);
        GR_CHECK_EQ(decay->unneeded_bytes, 3 * BLOCK);
        gr_decay_look(context, clock_ns + 2 * GR_DECAY_LOOK_NS);
        GR_CHECK_EQ(decay->unneeded_bytes, 4 * BLOCK);
        finish();

        start(DECAY_NS); /* then it is the helper's */
        cache_blocks(4, BLOCK);
        gr_decay_look(context, clock_ns);
        gr_decay_look(context, clock_ns + GR_DECAY_LOOK_NS);
        GR_CHECK_EQ(context->decay->unneeded_bytes, 0);
        GR_CHECK_EQ(context->decay->stepped_ns, 0);
        finish();
}

/* Each context decays, also beside one that has nothing and one whose fence is broken. */
static void test_contexts(void)
{
        struct gr_context *contexts[4];
        uint64_t ptr;

        start(DECAY_NS);
        contexts[0] = context;
        for (int i = 1; i < 4; i++)
                contexts[i] = gr_core_context_add(&core, sg_context_new(i), i);
        for (int i = 0; i < 4; i++)
                if (i != 1) {
                        GR_CHECK_EQ(sg_alloc(contexts[i], BLOCK, &ptr), 0);
                        GR_CHECK_EQ(sg_free(&core, ptr), 0);
                }
        atomic_store(&contexts[2]->fence->broken, -EIO);
        tick(0);
        tick(2 * DECAY_NS);
        for (int i = 0; i < 4; i++)
                GR_CHECK_EQ(gr_budget_cached(contexts[i]->device), i == 2 ? BLOCK : 0);
        finish();
}

static uint64_t block_freed_late;

static void free_meanwhile(uint64_t ns)
{
        (void)ns;
        GR_CHECK_EQ(sg_free(&core, block_freed_late), 0);
}

/* Whoever frees may have seen that decay is armed and wakes nobody, but only now is the block seen in the cache. */
static void test_freed_meanwhile(void)
{
        struct gr_driver driver;

        start(DECAY_NS);
        cache_blocks(1, BLOCK);
        GR_CHECK(tick(0) > 0);
        GR_CHECK_EQ(sg_alloc(context, BLOCK, &block_freed_late), 0);
        GR_CHECK_EQ(cached(), 0);
        driver = sg_driver;
        driver.sleep_ns = free_meanwhile;
        core.driver = &driver;
        GR_CHECK(tick(SG_MS) > 0 && core.decay_armed);
        core.driver = &sg_driver;
        GR_CHECK_EQ(cached(), BLOCK);
        finish();
}

int main(void)
{
        test_curve();
        test_idle();
        test_one_block();
        test_each_class();
        test_recent_use();
        test_busy();
        test_capture();
        test_settings();
        test_contexts();
        test_looks();
        test_freed_meanwhile();
        return GR_CHECK_RESULT();
}
