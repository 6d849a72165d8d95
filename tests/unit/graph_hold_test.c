/* Memory that graphs use, and the ends of graphs and contexts. */
#include <pthread.h>
#include <unistd.h>

#include "alloc/graph_hold.h"
#include "alloc/pool.h"
#include "check.h"
#include "core.h"
#include "scripted.h"

static struct gr_core core;
static struct gr_parts parts;
static struct gr_context *context, *other;
static _Atomic bool ended;
static bool ended_early;
static pthread_t ending;

static void start(void)
{
        sg_reset(1024 * MIB);
        gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        other = gr_core_context_add(&core, sg_context_new(0), 0);
        ended = ended_early = false;
}

static void finish(void)
{
        GR_CHECK_EQ(atomic_load(&core.devices[0].reserved_bytes), sg_used_bytes(0));
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

/* A block of the other context that is parked in a hold, which has no users any more. */
static uint64_t left_over(bool exported)
{
        struct gr_graph_hold *hold = gr_graph_hold_new(&core, NULL);
        uint64_t ptr;

        GR_CHECK_EQ(sg_alloc(other, 4 * MIB, &ptr), 0);
        gr_pool_hold(hold, ptr);
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
        gr_core_context_drop(other);
        ended = true;
        return NULL;
}

static void end_beside(void)
{
        sg_before[SG_MEM_FREE] = NULL;
        pthread_create(&ending, NULL, end_other, NULL);
        usleep(20000);
        ended_early = ended;
}

/* A context that another thread ends meanwhile waits until its blocks are back at the driver. */
static void test_end_beside_collect(void)
{
        start();
        left_over(true);
        sg_before[SG_MEM_FREE] = end_beside;
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
        GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 0);
        if (stays) {
                gr_core_context_stays(other);
                GR_CHECK(gr_graph_holds_are_over(&core));
                gr_pool_collect(&core);
                GR_CHECK_EQ(sg_calls(SG_MEM_FREE), 1);
                GR_CHECK(!gr_graph_holds_are_over(&core));
        } else {
                sg_context_destroy(other->handle);
                gr_core_context_drop(other);
                gr_pool_collect(&core);
        }
        GR_CHECK_EQ(sg_used_bytes(0), 0);
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
        GR_CHECK_EQ(sg_alloc(context, 8 * MIB, &ptr), 0);
        gr_pool_hold(hold, ptr);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK(!gr_pool_alloc_held(hold, context, true, 10 * MIB, &again));
        GR_CHECK(!gr_pool_alloc_held(hold, context, true, 4 * MIB, &again));
        GR_CHECK(!gr_pool_alloc_held(hold, other, true, 8 * MIB, &again));
        GR_CHECK(gr_pool_alloc_held(hold, context, true, 8 * MIB - 4096, &again) && again == ptr);
        sg_own(ptr, 8 * MIB - 4096);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        gr_graph_hold_release(hold);
        gr_pool_collect(&core);
        finish();
}

int main(void)
{
        test_end_beside_collect();
        test_about_to_end(true);
        test_about_to_end(false);
        test_sizes();
        return GR_CHECK_RESULT();
}
