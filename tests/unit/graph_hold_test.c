/* Memory that graphs use, and the ends of graphs and contexts. */
#include <limits.h>
#include <malloc.h>
#include <pthread.h>
#include <unistd.h>

#include "alloc/graph_hold.h"
#include "alloc/pool.h"
#include "check.h"
#include "core.h"
#include "fence/fence_epoch.h"
#include "scripted.h"

static struct gr_core core;
static struct gr_parts parts;
static struct gr_context *context, *other;
static _Atomic bool ended;
static bool ended_early;
static pthread_t ending;

static void start_with(enum gr_pool_kind pool)
{
        sg_reset(1024 * MIB);
        gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = pool});
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        ended = ended_early = false;
}

static void start(void)
{
        start_with(GR_POOL_BINS);
}

static uint64_t parked_bytes(void)
{
        return atomic_load(&core.devices[0].graph_bytes);
}

static void finish(void)
{
        GR_CHECK_EQ(atomic_load(&core.devices[0].reserved_bytes), sg_used_bytes(0));
        GR_CHECK_EQ(sg_misuses(), 0);
        GR_CHECK_EQ(parked_bytes(), 0);
        gr_core_destroy(&core);
}

/* A block that belongs to hold. */
static uint64_t held(struct gr_context *of, struct gr_graph_hold *hold, size_t bytes)
{
        uint64_t ptr;

        GR_CHECK_EQ(sg_alloc(of, bytes, &ptr), 0);
        gr_graph_hold_add(hold, ptr);
        return ptr;
}

/* A block of the other context that is parked in a hold, which has no users any more. */
static uint64_t left_over(bool exported)
{
        struct gr_graph_hold *hold = gr_graph_hold_new(&core, NULL);
        uint64_t ptr = held(other, hold, 4 * MIB);

        if (exported)
                GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptr), 0);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        gr_pool_collect(&core);
        GR_CHECK_EQ(atomic_load(&core.devices[0].reserved_bytes), 4 * MIB);
        GR_CHECK_EQ(sg_cached_bytes(&core.devices[0]), 0);
        gr_graph_hold_release(hold);
        return ptr;
}

static void *end_other(void *arg)
{
        void *handle = other->handle;

        (void)arg;
        gr_core_context_ending(other);
        sg_context_destroy(handle);
        gr_core_context_gone(other);
        ended = true;
        return NULL;
}

static void end_beside(void)
{
        sg_before[SG_MEM_RELEASE] = NULL;
        pthread_create(&ending, NULL, end_other, NULL);
        usleep(20000);
        ended_early = ended;
}

/* A context that another thread ends meanwhile waits until its blocks are back at the driver. */
static void test_end_beside_collect(void)
{
        start();
        left_over(true);
        sg_before[SG_MEM_RELEASE] = end_beside;
        gr_pool_collect(&core);
        pthread_join(ending, NULL);
        GR_CHECK(ended && !ended_early);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        finish();
}

/* Where it is about to end its blocks stay: it may be gone in the driver. */
static void test_about_to_end(bool stays)
{
        start();
        left_over(true);
        gr_core_context_ending(other);
        gr_pool_collect(&core);
        GR_CHECK_EQ(sg_calls(SG_MEM_RELEASE), 0);
        if (stays) {
                gr_core_context_stays(other);
                GR_CHECK(gr_graph_holds_are_over(&core));
                gr_pool_collect(&core);
                GR_CHECK_EQ(sg_calls(SG_MEM_RELEASE), 1);
                GR_CHECK(!gr_graph_holds_are_over(&core));
        } else {
                sg_context_destroy(other->handle);
                gr_core_context_gone(other);
                gr_pool_collect(&core);
        }
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        GR_CHECK(!core.holds);
        finish();
}

/* The driver gets a block without a wait, so not while other work of the program than the graph still uses it. */
static void test_still_used(enum gr_pool_kind pool)
{
        struct gr_graph_hold *hold;
        uint64_t ptr;

        start_with(pool);
        hold = gr_graph_hold_new(&core, NULL);
        ptr = held(context, hold, 4 * MIB);
        if (pool != GR_POOL_NONE) /* which has no cache */
                GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptr), 0);
        sg_work(context->handle, 0, ptr, 1000);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        gr_graph_hold_release(hold);
        gr_pool_collect(&core);
        GR_CHECK_EQ(sg_calls(SG_MEM_RELEASE), 0);
        GR_CHECK(gr_graph_holds_are_over(&core));
        sg_advance(1000);
        gr_pool_collect(&core);
        GR_CHECK_EQ(sg_calls(SG_MEM_RELEASE), 1);
        GR_CHECK(!core.holds);
        finish();
}

enum blind { BROKEN, BREAKS, NOT_COVERED }; /* BREAKS: when the last graph has gone */

/*
 * Where no fence tells when other work has passed, the driver gets a block only as it would have got it from the
 * program: by a free of the program, which waits. Nothing else waits, as the GPU may wait for what the program does.
 */
static void test_blind(enum blind blind, enum gr_pool_kind pool, bool exported)
{
        struct gr_graph_hold *hold;
        struct gr_context *last;
        uint64_t ptr, next, before_ns;

        start_with(pool);
        last = context;
        for (int i = 0; blind == NOT_COVERED && i < GR_ACCESSORS_MAX; i++)
                last = gr_core_context_add(&core, sg_context_new(0), 0);
        hold = gr_graph_hold_new(&core, NULL);
        ptr = held(context, hold, 4 * MIB);
        GR_CHECK_EQ(sg_alloc(context, MIB, &next), 0);
        if (exported)
                GR_CHECK_EQ(gr_ledger_mark_exported(core.ledger, ptr), 0);
        sg_work(last->handle, 0, ptr, SG_MS);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        if (blind != NOT_COVERED)
                sg_fail(SG_CONTEXT_RECORD, 1, 1000, gr_driver_error(999)); /* from now on there are no events */
        if (blind == BROKEN)
                GR_CHECK(gr_fence_close_always(context->fence, &before_ns));
        GR_CHECK_EQ(gr_fence_is_broken(context->fence), blind == BROKEN);
        GR_CHECK_EQ(gr_fence_overflow(context->fence), blind == NOT_COVERED);
        gr_graph_hold_release(hold);
        before_ns = sg_now_ns();
        gr_pool_collect(&core);
        GR_CHECK_EQ(sg_now_ns(), before_ns);
        GR_CHECK_EQ(parked_bytes(), 4 * MIB);
        GR_CHECK_EQ(sg_free(&core, next), 0);
        GR_CHECK_EQ(parked_bytes(), 0);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        GR_CHECK(!core.holds && !gr_graph_holds_are_over(&core));
        finish();
}

/* The fence breaks while parked blocks go into the cache: those that go to the driver instead are waited for. */
static void test_breaks_between(void)
{
        struct gr_graph_hold *hold;
        uint64_t ptrs[3];

        start();
        hold = gr_graph_hold_new(&core, NULL);
        for (int i = 0; i < 3; i++) {
                ptrs[i] = held(context, hold, 2 * GR_FENCE_CLOSE_BYTES);
                sg_work(context->handle, 0, ptrs[i], SG_MS);
        }
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
        sg_fail(SG_CONTEXT_RECORD, 1, 1000, gr_driver_error(999));
        gr_graph_hold_release(hold);
        gr_pool_collect(&core);
        GR_CHECK(gr_fence_is_broken(context->fence));
        GR_CHECK(!core.holds);
        finish();
}

/* What is parked serves its capture for about the same size only, and for none that is larger. */
static void test_sizes(void)
{
        struct gr_graph_hold *hold;
        uint64_t ptr, again;

        start();
        hold = gr_graph_hold_new(&core, NULL);
        ptr = held(context, hold, 8 * MIB);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK(gr_pool_alloc_in_hold(hold, context, true, 8 * MIB, &again) && again == ptr);
        GR_CHECK_EQ(parked_bytes(), 0);
        sg_own(ptr, 8 * MIB);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK(!gr_pool_alloc_in_hold(hold, context, true, 10 * MIB, &again));
        GR_CHECK(!gr_pool_alloc_in_hold(hold, context, true, 4 * MIB, &again));
        GR_CHECK(!gr_pool_alloc_in_hold(hold, other, true, 8 * MIB, &again));
        GR_CHECK(gr_pool_alloc_in_hold(hold, context, true, 8 * MIB - 4096, &again) && again == ptr);
        sg_own(ptr, 8 * MIB - 4096);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        gr_graph_hold_release(hold);
        gr_pool_collect(&core);
        finish();
}

/* A block that is larger than its request, as the driver gives it, serves the same request again. */
static void test_rounded(size_t bytes)
{
        struct gr_graph_hold *hold;
        uint64_t ptr, again;

        start();
        hold = gr_graph_hold_new(&core, NULL);
        ptr = held(context, hold, bytes);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK(gr_pool_alloc_in_hold(hold, context, true, bytes, &again) && again == ptr);
        sg_own(ptr, bytes);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        gr_graph_hold_release(hold);
        gr_pool_collect(&core);
        finish();
}

static void park_small(struct gr_graph_hold *hold, int count)
{
        uint64_t ptrs[256];

        for (int i = 0; i < count; i++)
                ptrs[i] = held(context, hold, 4 * KIB);
        for (int i = 0; i < count; i++)
                GR_CHECK_EQ(sg_free(&core, ptrs[i]), 0);
}

/* A request looks at the newest 256 blocks. */
static void test_look(void)
{
        struct gr_graph_hold *hold;
        uint64_t ptr, again;

        start();
        hold = gr_graph_hold_new(&core, NULL);
        ptr = held(context, hold, 8 * MIB);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        park_small(hold, 255);
        GR_CHECK(gr_pool_alloc_in_hold(hold, context, true, 8 * MIB, &again) && again == ptr);
        sg_own(ptr, 8 * MIB);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        park_small(hold, 256);
        GR_CHECK(!gr_pool_alloc_in_hold(hold, context, true, 8 * MIB, &again));
        gr_graph_hold_release(hold);
        gr_pool_collect(&core);
        finish();
}

/* Holds are told apart, also when their numbers begin anew, and only shared ones share memory. */
static void test_numbers(void)
{
        struct gr_graph_hold *holds[3];

        start();
        core.holds_made = UINT_MAX - 1;
        for (int i = 0; i < 3; i++)
                holds[i] = gr_graph_hold_new(&core, i == 1 ? context : NULL);
        for (int i = 0; i < 3; i++)
                GR_CHECK_EQ(sg_free(&core, held(context, holds[i], (1 << i) * MIB)), 0);
        GR_CHECK_EQ(parked_bytes(), 7 * MIB);
        GR_CHECK_EQ(atomic_load(&context->graph_users), 1);
        gr_graph_hold_release(holds[0]);
        GR_CHECK_EQ(atomic_load(&context->graph_users), 1);
        gr_pool_collect(&core);
        GR_CHECK_EQ(parked_bytes(), 6 * MIB);
        gr_graph_hold_retain(holds[1]);
        gr_graph_hold_release(holds[1]);
        GR_CHECK(!gr_graph_holds_are_over(&core));
        GR_CHECK_EQ(atomic_load(&context->graph_users), 1);
        gr_graph_hold_release(holds[1]);
        GR_CHECK_EQ(atomic_load(&context->graph_users), 0);
        gr_pool_collect(&core);
        GR_CHECK_EQ(parked_bytes(), 4 * MIB);
        gr_graph_hold_release(holds[2]);
        gr_pool_collect(&core);
        GR_CHECK(!core.holds);
        finish();
}

/* Allocates what was freed at ptr, and frees it again. */
static void use_again(uint64_t ptr, size_t bytes)
{
        uint64_t again;

        GR_CHECK(sg_alloc(context, bytes, &again) == 0 && again == ptr);
        GR_CHECK_EQ(sg_free(&core, again), 0);
}

/* Where one graph goes, and one context ends, only what was theirs comes back, and is no graph's any more. */
static void test_others_stay(void)
{
        struct gr_graph_hold *stays, *goes;
        uint64_t first, last, later;

        start();
        stays = gr_graph_hold_new(&core, NULL);
        goes = gr_graph_hold_new(&core, NULL);
        GR_CHECK_EQ(sg_free(&core, held(context, stays, 4 * MIB)), 0);
        GR_CHECK_EQ(sg_free(&core, held(other, stays, 4 * MIB)), 0);
        GR_CHECK_EQ(sg_free(&core, held(other, goes, 8 * MIB)), 0);
        later = held(context, goes, 12 * MIB);
        first = held(context, goes, 8 * MIB);
        last = held(context, goes, 16 * MIB);
        GR_CHECK_EQ(sg_free(&core, first), 0);
        GR_CHECK_EQ(parked_bytes(), 24 * MIB);
        gr_graph_hold_release(goes);
        GR_CHECK_EQ(sg_free(&core, last), 0);
        GR_CHECK_EQ(parked_bytes(), 24 * MIB);
        gr_pool_collect(&core);
        GR_CHECK(!gr_graph_holds_are_over(&core));
        GR_CHECK_EQ(parked_bytes(), 8 * MIB);
        use_again(first, 8 * MIB);
        GR_CHECK_EQ(sg_free(&core, later), 0);
        use_again(later, 12 * MIB);
        GR_CHECK_EQ(parked_bytes(), 8 * MIB);
        end_other(NULL);
        GR_CHECK_EQ(parked_bytes(), 4 * MIB);
        gr_graph_hold_release(stays);
        gr_pool_collect(&core);
        finish();
}

static struct gr_graph_hold *hold_of_deed, *made;
static uint64_t freed_ptr;

static void *make(void *arg)
{
        made = gr_graph_hold_new(&core, NULL);
        ended = true;
        return arg;
}

static void *park(void *arg)
{
        GR_CHECK_EQ(sg_free(&core, freed_ptr), 0);
        ended = true;
        return arg;
}

static void *take(void *arg)
{
        GR_CHECK(!gr_pool_alloc_in_hold(hold_of_deed, context, true, 16 * MIB, &freed_ptr));
        ended = true;
        return arg;
}

static void *unpark(void *arg)
{
        gr_pool_end_capture(hold_of_deed, true);
        ended = true;
        return arg;
}

static void *collect(void *arg)
{
        gr_pool_collect(&core);
        ended = true;
        return arg;
}

static void *drop(void *arg)
{
        gr_graph_holds_context_gone(other);
        ended = true;
        return arg;
}

/* Whoever looks at holds waits for whoever changes them. */
static void test_one_at_a_time(void)
{
        static void *(*const deeds[])(void *) = {make, park, take, unpark, collect, drop};

        for (size_t i = 0; i < sizeof(deeds) / sizeof(deeds[0]); i++) {
                pthread_t thread;

                start();
                made = NULL;
                hold_of_deed = gr_graph_hold_new(&core, context);
                freed_ptr = held(context, hold_of_deed, 4 * MIB);
                gr_graph_hold_release(gr_graph_hold_new(&core, NULL)); /* so that there is something to collect */
                gr_lock(&core.holds_lock);
                pthread_create(&thread, NULL, deeds[i], NULL);
                usleep(5000);
                GR_CHECK(!ended);
                gr_unlock(&core.holds_lock);
                pthread_join(thread, NULL);
                if (deeds[i] != park)
                        GR_CHECK_EQ(sg_free(&core, freed_ptr), 0);
                gr_graph_hold_release(hold_of_deed);
                if (made)
                        gr_graph_hold_release(made);
                gr_pool_collect(&core);
                finish();
        }
}

#define LEAST_HOLD_BYTES 64 /* a hold takes more than this */

/* A hold that is over takes no memory. */
static void test_freed(void)
{
        size_t before;

        start();
        before = mallinfo2().uordblks;
        for (int i = 0; i < 100; i++) {
                gr_graph_hold_release(gr_graph_hold_new(&core, NULL));
                gr_pool_collect(&core);
        }
        GR_CHECK(mallinfo2().uordblks < before + 100 * LEAST_HOLD_BYTES);
        finish();
}

/* Where more contexts can use the block than a fence covers, its memory is had back when an allocation needs it. */
static void test_short_of_memory(bool over)
{
        struct gr_graph_hold *hold;
        uint64_t ptr;
        struct gr_context *last;

        start();
        last = context;
        for (int i = 0; over && i < GR_ACCESSORS_MAX; i++)
                last = gr_core_context_add(&core, sg_context_new(0), 0);
        hold = gr_graph_hold_new(&core, NULL);
        ptr = held(context, hold, 700 * MIB);
        sg_work(last->handle, 0, ptr, SG_MS);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        gr_graph_hold_release(hold);
        GR_CHECK_EQ(sg_alloc(context, 600 * MIB, &ptr), 0);
        if (ptr)
                sg_free(&core, ptr);
        finish();
}

int main(void)
{
        test_short_of_memory(false);
        test_short_of_memory(true);
        test_end_beside_collect();
        test_about_to_end(true);
        test_about_to_end(false);
        test_still_used(GR_POOL_BINS);
        test_still_used(GR_POOL_NONE);
        for (int exported = 0; exported < 2; exported++) {
                test_blind(BROKEN, GR_POOL_BINS, exported);
                test_blind(BROKEN, GR_POOL_SPLIT, exported);
                test_blind(NOT_COVERED, GR_POOL_BINS, exported);
                test_blind(NOT_COVERED, GR_POOL_SPLIT, exported);
        }
        test_blind(BREAKS, GR_POOL_BINS, true);
        test_blind(BREAKS, GR_POOL_NONE, false);
        test_breaks_between();
        test_sizes();
        test_rounded(3 * MIB);
        test_rounded(260 * KIB);
        test_rounded(33 * MIB);
        test_look();
        test_numbers();
        test_others_stay();
        test_one_at_a_time();
        test_freed();
        return GR_CHECK_RESULT();
}
