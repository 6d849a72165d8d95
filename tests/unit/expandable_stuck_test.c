/* Extents that stay although nobody needs them, as work may still use them or the driver refuses: until when. */
#include <errno.h>

#include "alloc/pool.h"
#include "check.h"
#include "core.h"
#include "reclaim/rung.h"
#include "reclaim/trim.h"
#include "segment/segments_trim.h"
#include "segments_gpu.h"

/* Frees a block that must not be reused while nothing says when the work on it ends. */
static void give_unquiet(uint64_t ptr, size_t bytes)
{
        static const enum sg_op waits[] = {SG_CONTEXT_RECORD, SG_CONTEXT_SYNC, SG_CONTEXT_DRAIN};

        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptr), 0);
        for (int i = 0; i < 3; i++)
                gpu_refuse(waits[i], true);
        gpu_give(ptr, bytes);
        for (int i = 0; i < 3; i++)
                gpu_refuse(waits[i], false);
}

enum occasion { TRIM, DECAY, LADDER, FREE, END, OCCASIONS };

/* Then it keeps its memory, until something says that, and it goes back at the next occasion. */
static void test_not_quiet(enum occasion occasion)
{
        uint64_t a, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(7 * MIB);
        b = gpu_take(3 * MIB);
        give_unquiet(a, 7 * MIB);
        gr_trim(context, UINT64_MAX / 2);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 10 * MIB);
        GR_CHECK(gpu_take(7 * MIB) != a);
        if (occasion == TRIM || occasion == DECAY) {
                gpu_sync();
                gr_fence_close(context->fence);
                gr_fence_poll(context->fence);
        }
        if (occasion == TRIM)
                GR_CHECK_EQ(gr_trim(context, 2 * MIB), 6 * MIB);
        else if (occasion == DECAY)
                GR_CHECK_EQ(gr_segments_trim_most(context, 2 * MIB), 0); /* it was not cached */
        else if (occasion == LADDER)
                GR_CHECK_EQ(gr_rung_run(context, GR_RUNG_SYNC, MIB), 6 * MIB);
        if (occasion == FREE)
                GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, b), 0);
        if (occasion == FREE)
                gpu_give(b, 3 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, occasion == FREE ? 8 * MIB : occasion == END ? 18 * MIB : 12 * MIB);
        if (occasion == TRIM || occasion == DECAY || occasion == LADDER) {
                gpu_give(b, 3 * MIB); /* and the page between them */
                GR_CHECK_EQ(gpu_device()->reserved_bytes, 10 * MIB);
        }
        gpu_end();
}

/* The driver fails to say so, but only once: then what must not be reused goes back at once. */
static void test_not_quiet_once(enum sg_op op)
{
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(7 * MIB);
        if (op == SG_CONTEXT_SYNC)
                sg_fail(SG_CONTEXT_RECORD, 1, 1, gr_driver_error(999));
        if (op == SG_CONTEXT_SYNC)
                GR_CHECK(gr_fence_sync(context->fence)); /* from now on there are no events */
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        sg_fail(op, 1, 1, gr_driver_error(999));
        gpu_give(a, 7 * MIB);
        GR_CHECK(!sg_planned(op));
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        gpu_end();
}

/*
 * Where more contexts can use a block than its fence covers, all of them are waited for before its memory goes, but not
 * one of another device, which cannot. If that is refused, the program still has it.
 */
static void test_not_covered(bool refused, bool peer)
{
        static const enum sg_op waits[] = {SG_CONTEXT_SYNC, SG_CONTEXT_DRAIN};
        struct gr_context *last = NULL, *other;
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        other = gr_core_context_add(&core, sg_context_new(1), 1);
        sg_work(other->handle, 1, 0, 9000000);
        for (int i = 0; i < GR_ACCESSORS_MAX; i++)
                last = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK(gr_fence_overflow(context->fence));
        if (peer)
                gr_fence_add_accessor(context->fence, other);
        a = gpu_take(6 * MIB);
        sg_work(last->handle, 1, a, 1000000);
        if (refused) {
                for (int i = 0; i < 2; i++)
                        gpu_refuse(waits[i], true);
                GR_CHECK_EQ(gr_pool_free(&core, a), -ENOMEM);
                for (int i = 0; i < 2; i++)
                        gpu_refuse(waits[i], false);
                GR_CHECK_EQ(gpu_device()->reserved_bytes, 6 * MIB);
        }
        GR_CHECK_EQ(sg_free(&core, a), 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(sg_progress(other->handle).done_ns == sg_progress(other->handle).submitted_ns, peer);
        gpu_end();
}

/* The driver does not take back what nobody uses any more and must not be reused: then the accounts are right as well,
 * and a free beside it waits for nothing. */
static void test_stuck_refused(bool again)
{
        uint64_t a, b, charged;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(7 * MIB);
        b = gpu_take(2 * MIB);
        GR_CHECK_EQ(b, a + 7 * MIB); /* the last MiB of its second page is free */
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        gpu_give(a, 7 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        gpu_refuse(SG_MEM_UNMAP, true);
        gpu_give(b, 2 * MIB);
        gpu_refuse(SG_MEM_UNMAP, false);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0); /* nothing of the page can be handed out */
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 2 * MIB);
        gpu_take(2 * MIB);
        gpu_take(6 * MIB); /* at the end */
        GR_CHECK_EQ(gpu_take(6 * MIB), a);
        GR_CHECK_EQ(gpu_progress().done_ns, gpu_progress().submitted_ns);
        charged = gpu_device()->reserved_bytes;
        if (again)
                GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        gpu_give(a, 6 * MIB); /* up to that page */
        GR_CHECK_EQ(gpu_device()->reserved_bytes, again ? charged - 6 * MIB : charged);
        GR_CHECK_EQ(gpu_progress().done_ns == gpu_progress().submitted_ns, again);
        gr_core_context_ending(context);
        gpu_forget();
        gr_core_context_gone(context);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gpu_end();
}

/* Where the driver takes no memory back at a context's end, its addresses stay too, and what it holds is charged. */
static void test_refused_end(void)
{
        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gpu_take(3 * MIB);
        gr_core_context_ending(context);
        gpu_forget();
        gpu_refuse(SG_MEM_UNMAP, true);
        gr_core_context_gone(context);
        gpu_refuse(SG_MEM_UNMAP, false);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        GR_CHECK_EQ(sg_reserved(), 1);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gpu_end();
}

/* What must not be reused shares its last page with a block: its account goes with the context. */
static void test_stuck_end(void)
{
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(3 * MIB);
        gpu_take(64 * MIB + 512);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        gpu_give(a, 3 * MIB);
        gr_core_context_ending(context);
        gpu_forget();
        gr_core_context_gone(context);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        gpu_end();
}

int main(void)
{
        gpu_mapping = true;
        for (int occasion = 0; occasion < OCCASIONS; occasion++)
                test_not_quiet((enum occasion)occasion);
        test_not_quiet_once(SG_CONTEXT_RECORD);
        test_not_quiet_once(SG_CONTEXT_SYNC);
        test_not_covered(false, false);
        test_not_covered(false, true);
        test_not_covered(true, false);
        test_stuck_refused(false);
        test_stuck_refused(true);
        test_stuck_end();
        test_refused_end();
        return GR_CHECK_RESULT();
}
