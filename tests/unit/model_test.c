/*
 * A random program against the scripted GPU, in every mode: it allocates, frees while work goes on, works with its
 * blocks from several streams and contexts, captures, and runs out of memory. Never may a block be used by two owners'
 * work at once, given back under its user, or counted wrongly.
 *
 * GR_TEST_SEED changes the program. With --expect-misuse, for a core built without fences, the test passes only where
 * the misuse was noticed in every mode that fences make safe.
 */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "alloc/pool.h"
#include "base/log.h"
#include "check.h"
#include "core.h"
#include "reclaim/trim.h"
#include "scripted.h"

#define HELD_MAX 96
#define STEPS    12000

struct held {
        uint64_t ptr;
        struct gr_context *context;
        size_t bytes;
};

struct plan {
        const char *name;
        const struct gr_driver *driver;
        enum gr_reuse reuse;
        enum gr_pool_kind pool;
        bool overlaps;     /* so the core believes */
        unsigned contexts; /* of the device */
        bool peer;         /* a context of another device reaches the blocks */
        uint64_t hard_bytes;
        uint64_t threshold_bytes;
};

#define NEW &sg_driver
#define OLD &sg_old_driver
#define ALL GR_UNLIMITED

static const struct plan plans[] = {
        {"auto, one stream", NEW, GR_REUSE_AUTO, GR_POOL_BINS, false, 1, false, ALL, ALL},
        {"auto, streams", NEW, GR_REUSE_AUTO, GR_POOL_BINS, true, 1, false, ALL, ALL},
        {"auto, contexts", NEW, GR_REUSE_AUTO, GR_POOL_BINS, true, 3, false, ALL, ALL},
        {"auto, peer", NEW, GR_REUSE_AUTO, GR_POOL_BINS, true, 2, true, ALL, ALL},
        {"auto, limit", NEW, GR_REUSE_AUTO, GR_POOL_BINS, false, 1, false, 96 * MIB, ALL},
        {"auto, limit and threshold", NEW, GR_REUSE_AUTO, GR_POOL_BINS, true, 2, false, 150 * MIB, 32 * MIB},
        {"barrier", NEW, GR_REUSE_BARRIER, GR_POOL_BINS, false, 1, false, ALL, ALL},
        {"barrier, contexts", NEW, GR_REUSE_BARRIER, GR_POOL_BINS, true, 2, false, ALL, 64 * MIB},
        {"barrier, peer", NEW, GR_REUSE_BARRIER, GR_POOL_BINS, true, 1, true, ALL, ALL},
        {"poll", NEW, GR_REUSE_POLL, GR_POOL_BINS, true, 1, false, ALL, ALL},
        {"poll, peer", NEW, GR_REUSE_POLL, GR_POOL_BINS, true, 2, true, ALL, 64 * MIB},
        {"sync", NEW, GR_REUSE_SYNC, GR_POOL_BINS, true, 1, false, ALL, ALL},
        {"sync, contexts", NEW, GR_REUSE_SYNC, GR_POOL_BINS, true, 2, false, 100 * MIB, ALL},
        {"old driver, auto", OLD, GR_REUSE_AUTO, GR_POOL_BINS, true, 2, false, ALL, ALL},
        {"old driver, barrier", OLD, GR_REUSE_BARRIER, GR_POOL_BINS, false, 1, false, ALL, 32 * MIB},
        {"old driver, poll", OLD, GR_REUSE_POLL, GR_POOL_BINS, false, 1, false, ALL, ALL},
        {"no pool", NEW, GR_REUSE_AUTO, GR_POOL_NONE, true, 2, false, 100 * MIB, ALL},
};

static struct gr_core core;
static struct gr_parts parts;
static struct gr_context *contexts[4];
static unsigned context_count; /* of device 0; behind them the peer */
static struct held held[HELD_MAX];
static unsigned held_count;
static uint64_t seed;
static bool capturing;

static unsigned draw(unsigned below)
{
        seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        return (unsigned)(seed >> 33) % below;
}

/* Few sizes of each kind, so that blocks meet again. */
static size_t draw_size(void)
{
        static const size_t sizes[] = {1,       512,     3000,          100000,   700 * 1024, 1 << 20,  (1 << 20) + 1,
                                       3 << 20, 8 << 20, (8 << 20) + 5, 20 << 20, 33 << 20,   38 << 20, 45 << 20};
        unsigned i = draw(sizeof(sizes) / sizeof(sizes[0]));

        return sizes[draw(2) ? i : i / 2];
}

static void use(const struct held *block, bool peer)
{
        unsigned i = draw(context_count + peer);
        struct gr_context *context = draw(2) ? block->context : contexts[i];

        sg_work(context->handle, gr_fence_is_in_order(context->fence) ? 0 : draw(SG_STREAMS), block->ptr,
                draw(5) * SG_MS / 2);
}

static void step_alloc(const struct plan *plan)
{
        struct held *block = &held[held_count];
        int rc;

        if (held_count == HELD_MAX)
                return;
        block->context = contexts[draw(context_count)];
        block->bytes = draw_size();
        rc = sg_alloc(block->context, block->bytes, &block->ptr);
        GR_CHECK(rc == 0 || rc == -ENOMEM || rc == -EDQUOT);
        if (rc)
                return;
        held_count++;
        if (draw(4) > 0)
                use(block, plan->peer);
        if (draw(200) == 0)
                GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, block->ptr), 0);
}

static void step_free(void)
{
        unsigned i;

        if (held_count == 0)
                return;
        i = draw(held_count);
        GR_CHECK_EQ(sg_free(&core, held[i].ptr), 0);
        if (draw(50) == 0) /* and again: refused, whatever became of the block (-ENOENT: the driver has it) */
                GR_CHECK(sg_free(&core, held[i].ptr) != 0);
        held[i] = held[--held_count];
}

static void step_capture(void)
{
        if (!capturing) {
                gr_core_will_capture(&core);
                gr_gate_begin_enter(&core.gate);
                sg_capture(1);
                gr_gate_begin_leave(&core.gate, true);
        } else {
                sg_capture(-1);
                gr_gate_end(&core.gate);
        }
        capturing = !capturing;
}

static void check_accounts(const struct plan *plan)
{
        struct gr_device *device = &core.devices[0];

        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), sg_used_bytes(0));
        GR_CHECK(sg_used_bytes(0) <= plan->hard_bytes);
        GR_CHECK(sg_cached_bytes(device) <= atomic_load(&device->reserved_bytes));
}

static void step(const struct plan *plan)
{
        unsigned kind = draw(1000);

        if (kind < 400)
                step_alloc(plan);
        else if (kind < 740)
                step_free();
        else if (kind < 880 && held_count > 0)
                use(&held[draw(held_count)], plan->peer);
        else if (kind < 950)
                sg_advance(draw(4) * SG_MS);
        else if (kind < 960)
                gr_trim_excess(&core);
        else if (kind < 965)
                gr_trim(contexts[draw(context_count)], draw(40) * MIB);
        else if (kind < 970)
                gr_rung_run(contexts[0], GR_RUNG_TRIM + draw(3), draw(40) * MIB);
        else if (kind < 975)
                gr_fence_close(contexts[draw(context_count)]->fence);
        else if (kind < (capturing ? 990 : 977))
                step_capture();
        else if (kind < 992) /* a capture that nobody announced */
                sg_fail(draw(2) ? SG_CONTEXT_RECORD : SG_CONTEXT_WAIT, 1 + draw(3), 1, -EBUSY);
        else if (kind < 995)
                sg_fail(SG_MEM_ALLOC, 1 + draw(3), 1 + draw(4), -ENOMEM);
        else if (kind < 997)
                sg_fail(SG_MEM_RELEASE, 1 + draw(3), 1, gr_driver_error(801));
        else
                sg_hold(0, draw(100) * MIB, draw(20) * MIB);
}

static uint64_t run(const struct plan *plan, bool strict)
{
        int failures = gr_check_failures;
        uint64_t misuses;

        sg_reset(256 * MIB);
        gr_core_init(&core, &parts, plan->driver,
                     &(struct gr_config){.reuse = plan->reuse, .pool = plan->pool, .in_order = !plan->overlaps});
        gr_budget_set_limit(&core.devices[0], GR_LIMIT_HARD, plan->hard_bytes);
        gr_budget_set_limit(&core.devices[0], GR_LIMIT_THRESHOLD, plan->threshold_bytes);
        context_count = plan->contexts;
        atomic_store(&core.streams_overlap, plan->overlaps);
        for (unsigned i = 0; i < context_count; i++)
                contexts[i] = gr_core_context_add(&core, sg_context_new(0), 0);
        if (plan->peer) {
                contexts[context_count] = gr_core_context_add(&core, sg_context_new(1), 1);
                for (unsigned i = 0; i < context_count; i++)
                        gr_fence_add_accessor(contexts[i]->fence, contexts[context_count]);
        }
        held_count = 0;
        capturing = false;
        for (unsigned i = 0; i < STEPS && !sg_misuses() && gr_check_failures == failures; i++) {
                step(plan);
                if (strict)
                        check_accounts(plan);
        }

        /* Everything can be had back in the end. */
        if (capturing)
                step_capture();
        for (enum sg_op op = 0; op < SG_OP_COUNT; op++)
                sg_fail(op, 1, 0, 0);
        while (held_count > 0 && strict)
                step_free();
        for (unsigned i = 0; i < context_count && strict; i++) {
                GR_CHECK_EQ(gr_fence_sync(contexts[i]->fence), 0);
                gr_trim(contexts[i], UINT64_MAX);
        }
        if (strict) {
                check_accounts(plan);
                GR_CHECK_EQ(sg_used_bytes(0), 0);
                GR_CHECK_EQ(sg_misuses(), 0);
        }
        if (gr_check_failures != failures)
                fprintf(stderr, "  in plan \"%s\"\n", plan->name);
        misuses = sg_misuses();
        gr_core_destroy(&core);
        return misuses;
}

int main(int argc, char **argv)
{
        const char *text = getenv("GR_TEST_SEED");
        uint64_t first = text ? strtoull(text, NULL, 10) : 1;
        bool expect_misuse = argc > 1 && strcmp(argv[1], "--expect-misuse") == 0;

        printf("seed %" PRIu64 "\n", first);
        gr_log_set_level(GR_LOG_SILENT);
        for (size_t i = 0; i < sizeof(plans) / sizeof(plans[0]); i++) {
                const struct plan *plan = &plans[i];
                uint64_t misuses;

                seed = first;
                misuses = run(plan, !expect_misuse);
                printf("%s: %" PRIu64 " misuses\n", plan->name, misuses);
                if (expect_misuse && plan->reuse != GR_REUSE_SYNC && plan->pool != GR_POOL_NONE)
                        GR_CHECK(misuses > 0);
        }
        return GR_CHECK_RESULT();
}
