/* Exported extents of expandable segments are not handed out again: when they go back, and what is kept beside them. */
#include <errno.h>
#include <pthread.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "check.h"
#include "core.h"
#include "reclaim/decay.h"
#include "reclaim/trim.h"
#include "segment/expandable.h"
#include "segment/segments_trim.h"
#include "segments_gpu.h"

/* Exported memory is not reused; of it goes back what no other block shares, the rest with the last that does. */
static void test_exported(bool captured)
{
        uint64_t a, b, c;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        a = gpu_take(7 * MIB);
        b = gpu_take(3 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        if (captured)
                gpu_capture(true);
        gpu_give(a, 7 * MIB);
        if (captured)
                gpu_capture(false);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        c = gpu_take(2 * MIB);
        GR_CHECK(c < a || c >= a + 6 * MIB);
        gpu_give(c, 2 * MIB);
        GR_CHECK_EQ(gr_budget_live(gpu_device()), 4 * MIB);
        gpu_give(b, 3 * MIB);
        GR_CHECK_EQ(gr_budget_live(gpu_device()), 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 4 * MIB);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        gpu_end();
}

static uint64_t given;

static void *give_last(void *arg)
{
        gpu_give(given, 3 * MIB);
        return arg;
}

/* However much of it is never to be handed out again in the course of time. */
static void test_exported_often(void)
{
        enum { TIMES = 600 };
        const size_t bytes = 32 * MIB;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        gpu_give(gpu_take(bytes), bytes);
        GR_CHECK(TIMES * bytes > context->segments->expandable[false]->bytes);
        for (int i = 0; i < TIMES; i++) {
                uint64_t ptr = gpu_take(bytes);

                GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptr), 0);
                gpu_give(ptr, bytes);
        }
        gpu_settle();
        gpu_end();
}

/* What must not be reused goes back with the last block beside it: not while another thread is at work there. */
static void test_exported_alone(bool at_unmap)
{
        struct gr_segments *segments;
        pthread_t thread;
        uint64_t a;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        segments = context->segments;
        a = gpu_take(7 * MIB);
        given = gpu_take(3 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        gpu_give(a, 7 * MIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 4 * MIB);
        sem_init(&gpu_inside, 0, 0);
        sem_init(&gpu_go_on, 0, 0);
        if (at_unmap)
                sg_before[SG_MEM_UNMAP] = gpu_stop;
        else
                sg_before[SG_CONTEXT_RECORD] = gpu_stop;
        pthread_create(&thread, NULL, give_last, NULL);
        sem_wait(&gpu_inside);
        gr_lock(&segments->lock);
        GR_CHECK_EQ(segments->busy, 1);
        sem_post(&gpu_go_on);
        for (int n = 0; n < 20 && segments->busy && (at_unmap || gpu_device()->reserved_bytes == 4 * MIB); n++)
                usleep(1000);
        GR_CHECK_EQ(segments->busy, 1);
        GR_CHECK(at_unmap || gpu_device()->reserved_bytes == 4 * MIB);
        gr_unlock(&segments->lock);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(segments->busy, 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 2 * MIB);
        gpu_end();
}

static uint64_t exported;

static void free_exported(void)
{
        sg_before[SG_MEM_MAP] = NULL;
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, exported), 0);
        gpu_give(exported, 7 * MIB);
        gpu_refuse(SG_MEM_MAP, true);
        gpu_refuse(SG_MEM_ALLOC, true);
}

/*
 * Its last page, or its first, is part of a place that another thread maps memory for. That is refused, and later the
 * page goes back, too.
 */
static void test_exported_beside_busy(bool first)
{
        uint64_t a = 0, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        if (first)
                a = gpu_take(5 * MIB);
        exported = gpu_take(7 * MIB);
        if (first) {
                b = gpu_take(8 * MIB);
                gpu_give(a, 5 * MIB);
                gpu_sync();
                gr_fence_sync(context->fence);
                gr_trim(context, UINT64_MAX / 2);
                GR_CHECK_EQ(gpu_device()->reserved_bytes, 16 * MIB);
        }
        sg_before[SG_MEM_MAP] = free_exported;
        GR_CHECK_EQ(gpu_take(5 * MIB), 0);
        GR_CHECK(!sg_before[SG_MEM_MAP]);
        for (int i = 0; i < SG_OP_COUNT; i++)
                gpu_refuse((enum sg_op)i, false);
        if (first)
                gpu_give(b, 8 * MIB);
        gpu_settle();
        gpu_end();
}

static int not_asked(void *arg, uint64_t ptr)
{
        (void)arg, (void)ptr;
        return -EINVAL;
}

/*
 * Freed in stream order, it waits for nothing, nor does what is freed beside it; both go back when the work is done.
 */
static void test_exported_in_order(bool decays)
{
        uint64_t a, b;

        gpu_begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = gpu_take(7 * MIB);
        b = gpu_take(3 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, a), 0);
        sg_work(context->handle, 0, a, 1);
        GR_CHECK_EQ(sg_free_in_order(&core, a, not_asked), 0);
        sg_work(context->handle, 0, b, 1);
        GR_CHECK_EQ(sg_free_in_order(&core, b, not_asked), 0);
        GR_CHECK(gpu_progress().done_ns < gpu_progress().submitted_ns);
        gr_segments_trim_collect(context);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 10 * MIB);
        GR_CHECK(!gr_trim_has_none(context));
        gpu_sync();
        if (decays) {
                core.config.decay_ns = 1000 * SG_MS;
                for (int i = 0; i < 3; i++) {
                        gr_decay_run(&core, sg_now_ns());
                        sg_advance(gr_decay_step_ns(&core));
                }
        } else {
                gr_segments_trim_merge_and_collect(&core, gpu_device()); /* as when the program asks what is free */
        }
        GR_CHECK(gpu_device()->reserved_bytes <= 2 * MIB);
        gpu_settle();
        gpu_end();
}

int main(void)
{
        gpu_mapping = true;
        test_exported(false);
        test_exported(true);
        test_exported_often();
        test_exported_alone(false);
        test_exported_alone(true);
        test_exported_beside_busy(false);
        test_exported_beside_busy(true);
        test_exported_in_order(false);
        test_exported_in_order(true);
        return GR_CHECK_RESULT();
}
