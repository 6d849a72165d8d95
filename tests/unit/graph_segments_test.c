/*
 * Graph segments: what is counted while graphs use them, that nothing of them goes back or is unmapped meanwhile, and
 * that all of it does afterwards.
 */
#include "segment/graph_segments.h"

#include <errno.h>
#include <pthread.h>
#include <unistd.h>

#include "graph_gpu.h"
#include "segment/range.h"
#include "short_of_memory.h"

/* Free memory of graphs is neither live nor cached, and stays, until the last graph has gone. */
static void test_accounts(void)
{
        struct gr_device *device;
        uint64_t large, small;

        begin();
        device = gpu_device();
        large = take(10 * MIB);
        small = take(10 * KIB);
        GR_CHECK(large && small && segment(false)->in_graphs && segment(true)->in_graphs);
        GR_CHECK_EQ(device->reserved_bytes, 12 * MIB);
        GR_CHECK_EQ(gr_budget_live_unfreed(device), 10 * MIB + 10 * KIB);
        GR_CHECK_EQ(device->graph_bytes, 2 * MIB - 10 * KIB);
        GR_CHECK_EQ(gr_budget_cached(device), 0);
        give(large, small);
        GR_CHECK_EQ(device->graph_bytes, 12 * MIB);
        GR_CHECK_EQ(gr_budget_live_unfreed(device), 0);
        GR_CHECK_EQ(gr_budget_cached(device), 0);
        gpu_sync();
        GR_CHECK_EQ(trim(), 0);
        GR_CHECK(gr_segments_trim_has_none(context));
        GR_CHECK_EQ(sg_used_bytes(0), 12 * MIB);

        last_graph_goes();
        GR_CHECK(!segment(false)->in_graphs && !segment(true)->in_graphs);
        GR_CHECK_EQ(device->graph_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(device), 12 * MIB);
        GR_CHECK_EQ(gr_budget_returnable(device), 12 * MIB);

        settle();
        hold = gr_graph_hold_new(&core, context); /* a graph again, with what is still there */
        GR_CHECK_EQ(take(10 * MIB), large);
        GR_CHECK_EQ(gr_budget_cached(device), 0);
        GR_CHECK_EQ(device->graph_bytes, 2 * MIB);
        last_graph_goes(); /* and the block outlives it */
        GR_CHECK_EQ(device->graph_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(device), 2 * MIB);
        GR_CHECK_EQ(gr_budget_live_unfreed(device), 10 * MIB);
        GR_CHECK_EQ(sg_free(&core, large), 0);
        end();
}

enum { CONTEXTS = GR_ACCESSORS_MAX + 1 };
static struct gr_context *newest; /* a wait for all begins with it */
static unsigned waits;

/*
 * Called before each wait for a context. A free of the program waits for all; before the last of a second such wait a
 * graph comes and goes, and other work uses its memory.
 */
static void use_meanwhile(void)
{
        uint64_t ptr;

        if (++waits < 2 * CONTEXTS)
                return;
        sg_before[SG_CONTEXT_SYNC] = NULL;
        hold = gr_graph_hold_new(&core, context);
        ptr = take(10 * MIB);
        sg_work(newest->handle, 1, ptr, SG_MS);
        give(ptr, 0);
        gr_graph_hold_release(hold);
}

/*
 * Where more contexts can use the memory than the fence covers, it is cached after a wait for all of them, by a free of
 * the program. Nothing else waits, as the GPU may wait for what the program does.
 */
static void test_not_covered(bool used_meanwhile)
{
        struct gr_context *last = NULL;
        uint64_t ptr, next, later;

        begin();
        for (int i = 1; i < CONTEXTS; i++)
                last = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK(gr_fence_overflow(context->fence));
        ptr = take(10 * MIB);
        sg_work(last->handle, 1, ptr, SG_MS);
        give(ptr, 0);
        next = gpu_take(4 * MIB);
        later = gpu_take(4 * MIB);
        last_graph_goes();
        gr_fence_close(context->fence);
        gr_fence_poll(context->fence);
        trim();
        GR_CHECK(sg_progress(last->handle).done_ns < sg_progress(last->handle).submitted_ns);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 10 * MIB);
        newest = last;
        if (used_meanwhile)
                sg_before[SG_CONTEXT_SYNC] = use_meanwhile;
        GR_CHECK_EQ(sg_free(&core, next), 0);
        GR_CHECK_EQ(gr_graph_holds_are_over(&core), used_meanwhile);
        GR_CHECK_EQ(gpu_device()->graph_bytes, used_meanwhile ? 10 * MIB : 0);
        GR_CHECK(!sg_before[SG_CONTEXT_SYNC]);
        GR_CHECK_EQ(sg_free(&core, later), 0);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        GR_CHECK(!gr_graph_holds_are_over(&core));
        settle();
        trim();
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        end();
}

/* Ordinary requests never get memory of graphs, and a capture none of theirs. */
static void test_apart(void)
{
        uint64_t ordinary, ours;

        begin();
        ours = take(10 * MIB);
        give(ours, 0);
        ordinary = gpu_take(10 * MIB);
        GR_CHECK(ordinary != ours && gr_budget_live_unfreed(gpu_device()) == 10 * MIB);
        gpu_give(ordinary, 10 * MIB);
        gpu_sync();
        GR_CHECK_EQ(take(10 * MIB), ours);
        GR_CHECK_EQ(sg_free(&core, ours), 0);
        last_graph_goes();
        end();
}

/* Graphs share memory within a context: those of another one neither have it nor keep it. */
static void test_other_context(void)
{
        struct gr_context *other;
        struct gr_graph_hold *its;
        uint64_t ptr;

        begin();
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        GR_CHECK(!gr_pool_alloc_in_hold(hold, other, true, 4 * MIB, &ptr));
        its = gr_graph_hold_new(&core, other);
        GR_CHECK(gr_pool_alloc_in_hold(its, other, true, 4 * MIB, &ptr));
        sg_own(ptr, 4 * MIB);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 4 * MIB);
        gr_graph_hold_release(its);
        gr_pool_collect(&core);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 4 * MIB);
        sg_context_destroy(other->handle);
        gr_core_context_gone(other);
        last_graph_goes();
        end();
}

/*
 * Where a request fits no free range, and a third more is mapped than graphs used, free pages get a second address.
 * Makes that so for half of *ret_moved. The memory of *ret_kept lies between it and the old address, which is returned.
 */
static uint64_t take_moved(uint64_t *ret_kept, uint64_t *ret_moved)
{
        uint64_t first = take(60 * MIB), second;

        *ret_kept = take(20 * MIB);
        second = take(60 * MIB);
        give(first, second);
        *ret_moved = take(120 * MIB);
        GR_CHECK_EQ(*ret_moved, second); /* and the addresses behind it */
        return first;
}

/* The first address stays mapped while graphs are there. What earlier graphs have used does not count. */
static void test_second_address(void)
{
        uint64_t kept, moved, more;

        begin();
        give(take(400 * MIB), 0);
        last_graph_goes();
        settle();
        trim();
        hold = gr_graph_hold_new(&core, context);
        take_moved(&kept, &moved);
        more = take(4 * KIB);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 142 * MIB);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_remapped_bytes), 60 * MIB);
        GR_CHECK(context->segments->stale_graph_pages);
        gpu_sync();
        trim();
        GR_CHECK(context->segments->stale_graph_pages);
        GR_CHECK_EQ(sg_free(&core, moved), 0);
        GR_CHECK_EQ(sg_free(&core, kept), 0);
        GR_CHECK_EQ(sg_free(&core, more), 0);
        last_graph_goes();
        settle();
        trim();
        GR_CHECK(!context->segments->stale_pages && !context->segments->stale_graph_pages);
        end();
}

static enum gr_range_state state_at(uint64_t ptr)
{
        enum gr_range_state state;

        gr_lock(&context->segments->lock);
        state = gr_range_at(segment(false), ptr)->state;
        gr_unlock(&context->segments->lock);
        return state;
}

/* Freed after its capture, a block waits for the fence as any other; freed inside, it need not. */
static void test_fence(void)
{
        uint64_t inside, after;

        begin();
        inside = take(6 * MIB);
        after = take(4 * MIB);
        sg_work(context->handle, 0, inside, 1000);
        sg_work(context->handle, 0, after, 1000);
        give(inside, 0);
        GR_CHECK_EQ(sg_free(&core, after), 0);
        GR_CHECK_EQ(state_at(after), GR_RANGE_WAITING);
        GR_CHECK_EQ(state_at(inside), GR_RANGE_FREE);
        next_graph();
        GR_CHECK(segment(false)->in_graphs);
        gpu_sync();
        gr_fence_close(context->fence);
        gpu_sync();
        GR_CHECK_EQ(take(10 * MIB), inside);
        GR_CHECK_EQ(sg_free(&core, inside), 0);
        last_graph_goes();
        end();
}

/* One that must not be reused goes back when the last graph has gone, and not before. */
static void test_exported(void)
{
        uint64_t ptr;

        begin();
        ptr = take(4 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptr), 0);
        gr_pool_end_capture(hold, true);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        gpu_sync();
        gr_segments_trim_collect(context);
        GR_CHECK_EQ(sg_used_bytes(0), 4 * MIB);
        last_graph_goes();
        gr_segments_trim_collect(context);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        end();
}

/* A context that ends takes all of it along, used or free. */
static void test_context_ends(void)
{
        uint64_t ptr;

        begin();
        ptr = take(4 * MIB);
        GR_CHECK(ptr && take(6 * MIB) && take(5 * KIB));
        give(ptr, 0);
        gpu_forget();
        gr_core_context_gone(context);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 0);
        GR_CHECK_EQ(gpu_device()->reserved_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        GR_CHECK_EQ(context->segments->graph_used_bytes, 0); /* another context may get the structure */
        GR_CHECK_EQ(context->segments->graph_peak_bytes, 0);
        gr_graph_hold_release(hold);
        gr_pool_collect(&core);
        gpu_end();
}

/* A graph that outlives its context does not count for the next one, which has the same structure. */
static void test_context_follows(bool older_stays)
{
        struct gr_graph_hold *older;
        uint64_t ptr;

        begin();
        GR_CHECK(take(4 * MIB));
        older = hold;
        gpu_forget();
        gr_core_context_gone(context);
        GR_CHECK(gr_core_context_add(&core, sg_context_new(0), 0) == context);
        GR_CHECK(!take(4 * MIB)); /* that would be memory of the next one */
        hold = gr_graph_hold_new(&core, context);
        ptr = take(4 * MIB);
        GR_CHECK(ptr);
        if (!older_stays) {
                gr_graph_hold_release(older);
                gr_pool_collect(&core);
        }
        GR_CHECK(segment(false)->in_graphs);
        give(ptr, 0);
        last_graph_goes();
        GR_CHECK(!segment(false)->in_graphs);
        if (older_stays)
                gr_graph_hold_release(older);
        end();
}

/* Work behind the last launch may use what graphs have left, also what the program has freed: it is behind a fence. */
static void test_work_behind_graphs(bool freed_after)
{
        uint64_t ptr;

        begin();
        gpu_give(gpu_take(10 * MIB), 10 * MIB);
        settle();
        ptr = take(6 * MIB);
        if (freed_after) {
                gr_pool_end_capture(hold, true);
                GR_CHECK_EQ(sg_free(&core, ptr), 0);
                settle();
        } else {
                give(ptr, 0);
        }
        sg_work(context->handle, 0, 0, 1000000);
        last_graph_goes();
        gr_fence_poll(context->fence);
        trim();
        GR_CHECK_EQ(gr_budget_returnable(gpu_device()), 6 * MIB);
        settle();
        GR_CHECK_EQ(trim(), 6 * MIB);
        end();
}

/* Old addresses that cannot be unmapped are lost, and nobody waits for them. */
static void test_lost_addresses(void)
{
        uint64_t first, kept, second;

        begin();
        first = take_moved(&kept, &second);
        GR_CHECK_EQ(sg_free(&core, second), 0);
        GR_CHECK_EQ(sg_free(&core, kept), 0);
        last_graph_goes();
        settle();
        sg_fail(SG_MEM_UNMAP, 1, 1, -EIO);
        trim();
        GR_CHECK_EQ(state_at(first), GR_RANGE_LOST);
        hold = gr_graph_hold_new(&core, context);
        second = take(60 * MIB);
        GR_CHECK(second != 0);
        GR_CHECK_EQ(sg_free(&core, second), 0);
        last_graph_goes();
        settle();
        end();
}

static void no_memory(void)
{
        sg_before[SG_MEM_MAP] = NULL;
        memory_runs_out(sizeof(struct gr_range));
}

/* So is a place that cannot be mapped whole, where there is no structure for the part without memory. */
static void test_lost_place(void)
{
        uint64_t first;

        begin();
        first = take(4 * MIB);
        give(first, 0);
        next_graph();
        sg_before[SG_MEM_MAP] = no_memory;
        gpu_refuse(SG_MEM_MAP, true);
        GR_CHECK_EQ(take(8 * MIB), 0);
        gpu_refuse(SG_MEM_MAP, false);
        memory_is_back();
        GR_CHECK_EQ(state_at(first), GR_RANGE_LOST);
        last_graph_goes();
        gpu_end();
}

/* Memory that was cached for others serves graphs, before fresh memory does. */
static void test_from_others(void)
{
        struct gr_device *device;
        uint64_t ordinary, ours;

        begin();
        device = gpu_device();
        ordinary = gpu_take(8 * MIB);
        gpu_give(ordinary, 8 * MIB);
        gpu_sync();
        gr_segments_trim_merge_fastbins(context);
        settle();
        ours = take(8 * MIB);
        GR_CHECK_EQ(device->reserved_bytes, 8 * MIB);
        GR_CHECK_EQ(gr_budget_cached(device), 0);
        GR_CHECK_EQ(device->graph_bytes, 0);
        GR_CHECK_EQ(gr_budget_live_unfreed(device), 8 * MIB);
        GR_CHECK_EQ(context->segments->surplus_bytes, 0);
        GR_CHECK_EQ(sg_free(&core, ours), 0);
        last_graph_goes();
        end();
}

/* What a capture had from elsewhere stays with its graph alone. */
static void test_from_elsewhere(void)
{
        uint64_t ours, ordinary;

        begin();
        ordinary = gpu_take(4 * MIB);
        gr_graph_hold_add(hold, ordinary);
        ours = take(6 * MIB);
        gpu_give(ordinary, 4 * MIB);
        give(ours, 0);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 10 * MIB);
        GR_CHECK_EQ(take(8 * MIB), ours);
        GR_CHECK_EQ(gpu_device()->graph_bytes, 4 * MIB);
        GR_CHECK_EQ(sg_free(&core, ours), 0);
        last_graph_goes();
        end();
}

/* What waits for the fence keeps its turn, so that nothing waits longer than it has to. */
static void test_turns(void)
{
        uint64_t ordinary, ours;

        begin_with(GR_POOL_SPLIT, GR_REUSE_POLL);
        ordinary = gpu_take(4 * MIB);
        ours = take(6 * MIB);
        gr_pool_end_capture(hold, true);
        sg_work(context->handle, 0, ours, 1000);
        GR_CHECK_EQ(sg_free(&core, ours), 0);
        gpu_give(ordinary, 4 * MIB);
        gr_fence_close(context->fence);
        last_graph_goes(); /* ours waits for a later epoch now */
        gpu_sync();
        gr_fence_poll(context->fence);
        sg_work(context->handle, 0, 0, 1000000);
        GR_CHECK_EQ(gpu_take(4 * MIB), ordinary);
        gr_fence_close(context->fence);
        gpu_give(ordinary, 4 * MIB);
        gpu_sync();
        hold = gr_graph_hold_new(&core, context);
        GR_CHECK_EQ(take(6 * MIB), ours);
        GR_CHECK_EQ(sg_free(&core, ours), 0);
        last_graph_goes();
        end();
}

static _Atomic bool done;

static void *trim_aside(void *arg)
{
        trim();
        return arg;
}

static void *take_aside(void *bytes)
{
        *(uint64_t *)bytes = take(*(uint64_t *)bytes);
        done = true;
        return NULL;
}

static void *collect_aside(void *arg)
{
        gr_pool_collect(&core);
        done = true;
        return arg;
}

/* Does the deed beside a thread that unmaps memory: it has to wait. renewed: meanwhile there is a graph again. */
static void beside_trim(void *(*deed)(void *), void *arg, bool renewed)
{
        pthread_t trimming, waiting;

        sem_init(&gpu_inside, 0, 0);
        sem_init(&gpu_go_on, 0, 0);
        sg_before[SG_MEM_UNMAP] = gpu_stop;
        done = false;
        pthread_create(&trimming, NULL, trim_aside, NULL);
        sem_wait(&gpu_inside);
        pthread_create(&waiting, NULL, deed, arg);
        usleep(20000);
        GR_CHECK(!done);
        if (renewed)
                hold = gr_graph_hold_new(&core, context);
        sem_post(&gpu_go_on);
        pthread_join(trimming, NULL);
        pthread_join(waiting, NULL);
        GR_CHECK(done);
        sem_destroy(&gpu_inside);
        sem_destroy(&gpu_go_on);
}

/* A graph begins while a thread gives free memory back. other_bytes: 0 for no other memory of graphs. */
static void test_begins_beside_trim(uint64_t bytes, uint64_t other_bytes)
{
        uint64_t ptr = bytes;

        begin();
        give(take(bytes), other_bytes ? take(other_bytes) : 0);
        last_graph_goes();
        settle();
        hold = gr_graph_hold_new(&core, context);
        beside_trim(take_aside, &ptr, false);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        last_graph_goes();
        end();
}

/* The last graph goes while a thread unmaps old addresses, of graphs that were there before. */
static void test_ends_beside_trim(bool renewed)
{
        uint64_t kept, second;

        begin();
        take_moved(&kept, &second);
        GR_CHECK_EQ(sg_free(&core, second), 0);
        last_graph_goes();
        hold = gr_graph_hold_new(&core, context);
        second = take(2 * MIB);
        settle();
        gr_graph_hold_release(hold);
        beside_trim(collect_aside, NULL, renewed);
        GR_CHECK_EQ(segment(false)->in_graphs, renewed);
        GR_CHECK_EQ(sg_free(&core, second), 0);
        GR_CHECK_EQ(sg_free(&core, kept), 0);
        if (renewed)
                last_graph_goes();
        end();
}

int main(void)
{
        gpu_mapping = true;
        test_accounts();
        test_not_covered(false);
        test_not_covered(true);
        test_apart();
        test_other_context();
        test_second_address();
        test_fence();
        test_exported();
        test_context_ends();
        test_context_follows(true);
        test_context_follows(false);
        test_work_behind_graphs(false);
        test_work_behind_graphs(true);
        test_lost_addresses();
        test_lost_place();
        test_from_others();
        test_from_elsewhere();
        test_turns();
        test_begins_beside_trim(6 * MIB, 0);
        test_begins_beside_trim(10 * KIB, 0);
        test_begins_beside_trim(10 * KIB, 6 * MIB);
        test_ends_beside_trim(false);
        test_ends_beside_trim(true);
        return GR_CHECK_RESULT();
}
