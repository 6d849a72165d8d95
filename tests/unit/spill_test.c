/* The rung SPILL: host memory in place of the device's, how much of it, and when it goes back. */
#include "host/spill.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <unistd.h>

#include "alloc/ladder.h"
#include "base/log.h"
#include "base/metadata.h"
#include "cache/block_life.h"
#include "pool_gpu.h"
#include "reclaim/trim.h"

#define ROOM_BYTES (64 * MIB)

static struct gr_driver driver; /* the scripted one with what a test puts on top */

/* Host memory, of which the scripted GPU knows nothing. */
static size_t host_bytes;
static unsigned host_blocks;

static int host_alloc(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        void *ptr = aligned_alloc(512, bytes);

        (void)handle;
        if (!ptr)
                return -ENOMEM;
        host_bytes += bytes;
        host_blocks++;
        *ret_ptr = (uintptr_t)ptr;
        return 0;
}

static int host_free(void *handle, uint64_t ptr)
{
        (void)handle;
        host_blocks--;
        free((void *)(uintptr_t)ptr);
        return 0;
}

static void start(struct gr_config config)
{
        driver = sg_driver;
        driver.sleep_ns = sleep_and_see;
        driver.host_alloc = host_alloc;
        driver.host_free = host_free;
        host_bytes = host_blocks = 0;
        config.pool = GR_POOL_BINS;
        pool_begin(&driver, ROOM_BYTES, &config);
}

static void test_spill(void)
{
        struct gr_block_info info;
        uint64_t ptr, other, block;

        start((struct gr_config){0});
        context->device->spill_bytes = 32 * MIB;
        GR_CHECK_EQ(sg_alloc(context, ROOM_BYTES - 4 * MIB, &block), 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), 0);
        GR_CHECK_EQ(host_bytes, 20 * MIB);
        GR_CHECK_EQ(context->device->spilled_bytes, 20 * MIB);
        GR_CHECK_EQ(gr_budget_live(context->device), ROOM_BYTES - 4 * MIB); /* not the device's */
        GR_CHECK_EQ(gr_ledger_find(core.ledger, ptr, &info), 0);
        GR_CHECK(info.live && info.spilled);

        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &other), -ENOMEM); /* more than is allowed */
        GR_CHECK_EQ(host_blocks, 1);

        /* Its free waits for the work that may use it, and nobody waits for that. */
        sg_work(context->handle, 0, 0, 10 * SG_MS);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), -EALREADY);
        GR_CHECK(gr_trim_excess(&core));
        GR_CHECK_EQ(host_blocks, 1);
        sg_advance(10 * SG_MS);
        GR_CHECK(!gr_trim_excess(&core));
        GR_CHECK_EQ(host_blocks, 0);
        GR_CHECK_EQ(context->device->spilled_bytes, 0);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), -ENOENT);

        /* With room again the device serves. */
        GR_CHECK_EQ(sg_free(&core, block), 0);
        GR_CHECK_EQ(sg_alloc(context, 20 * MIB, &ptr), 0);
        GR_CHECK_EQ(host_blocks, 0);
        pool_end();

        /* Live and freed ones go off the accounts with their context. */
        start((struct gr_config){0});
        context->device->spill_bytes = 64 * MIB;
        sg_hold(0, ROOM_BYTES, 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &other), 0);
        GR_CHECK_EQ(gr_pool_free(&core, other), 0);
        gr_core_context_gone(context);
        GR_CHECK_EQ(context->device->spilled_bytes, 0);
        free((void *)(uintptr_t)ptr);
        free((void *)(uintptr_t)other);
        pool_end();
}

/* The driver's free of host memory takes until somebody sleeps, and another thread is in it. */
static struct {
        pthread_t thread;
        sem_t inside, go_on;
} slow;

static int slow_host_free(void *handle, uint64_t ptr)
{
        sem_post(&slow.inside);
        sem_wait(&slow.go_on);
        return host_free(handle, ptr);
}

static void *maintain(void *arg)
{
        gr_trim_excess(&core);
        return arg;
}

static void let_go(void)
{
        sem_post(&slow.go_on);
        pthread_join(slow.thread, NULL);
}

/* Host memory that another thread is giving back, or whose fence has yet to pass, is no reason to refuse any. */
static void test_spill_returns(void)
{
        uint64_t ptr, begin_ns;

        for (int ends = 0; ends < 2; ends++) {
                start((struct gr_config){0});
                context->device->spill_bytes = 32 * MIB;
                sg_hold(0, ROOM_BYTES, 0);
                GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), 0);
                GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                sem_init(&slow.inside, 0, 0);
                sem_init(&slow.go_on, 0, 0);
                driver.host_free = slow_host_free;
                pthread_create(&slow.thread, NULL, maintain, NULL);
                sem_wait(&slow.inside);
                event.when_ns = 0;
                event.what = ends ? let_go : NULL;
                GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), ends ? 0 : -ENOMEM);
                GR_CHECK(sg_driver.now_ns() < SG_FIRST_NS + 2000 * SG_MS);
                if (!ends)
                        let_go();
                driver.host_free = host_free;
                if (ends)
                        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
                GR_CHECK_EQ(gr_fence_sync(context->fence), 0);
                GR_CHECK(!gr_trim_excess(&core));
                GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_spills), ends ? 2 : 1);
                /* All is back: there is nothing to wait for. */
                begin_ns = sg_driver.now_ns();
                GR_CHECK_EQ(gr_pool_alloc(context, 40 * MIB, &ptr), -ENOMEM);
                GR_CHECK(sg_driver.now_ns() - begin_ns < 10 * SG_MS);
                pool_end();
        }

        for (int other = 0; other < 3; other++) {
                struct gr_context *owner, *asker;
                struct gr_block *spilled;

                start((struct gr_config){0});
                context->device->spill_bytes = 32 * MIB;
                sg_hold(0, ROOM_BYTES, 0);
                asker = owner = context;
                if (other)
                        *(other == 1 ? &owner : &asker) = gr_core_context_add(&core, sg_context_new(0), 0);
                GR_CHECK_EQ(gr_pool_alloc(owner, 20 * MIB, &ptr), 0);
                sg_work(owner->handle, 0, 0, 10 * SG_MS);
                GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
                GR_CHECK_EQ(gr_spill_alloc(asker, 20 * MIB, &spilled), 0);
                GR_CHECK_EQ(sg_driver.now_ns() >= SG_FIRST_NS + 10 * SG_MS, 1);
                GR_CHECK_EQ(host_blocks, 1);
                GR_CHECK_EQ(gr_ledger_hand_out(spilled, 20 * MIB), 1);
                GR_CHECK_EQ(gr_pool_free(&core, spilled->ptr), 0);
                GR_CHECK_EQ(gr_fence_sync(asker->fence), 0);
                GR_CHECK(!gr_trim_excess(&core));
                pool_end();
        }
}

static int no_host_memory(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        (void)handle, (void)bytes, (void)ret_ptr;
        return -ENOMEM;
}

static int refused(void *arg)
{
        (void)arg;
        return -ENOMEM;
}

static uint64_t next_host_ptr;

static int host_alloc_there(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        (void)handle;
        (void)bytes;
        *ret_ptr = next_host_ptr;
        return 0;
}

/* Host memory at an address that the ledger still holds: what was there went unseen, and is charged no more. */
static void test_spill_stale(void)
{
        uint64_t ptr;

        start((struct gr_config){0});
        context->device->spill_bytes = 64 * MIB;
        sg_hold(0, ROOM_BYTES, 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &next_host_ptr), 0);
        driver.host_alloc = host_alloc_there;
        GR_CHECK_EQ(gr_pool_alloc(context, 24 * MIB, &ptr), 0);
        GR_CHECK_EQ(ptr, next_host_ptr);
        GR_CHECK_EQ(context->device->spilled_bytes, 24 * MIB);
        driver.host_alloc = host_alloc;
        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
        GR_CHECK(!gr_trim_excess(&core));
        GR_CHECK_EQ(context->device->spilled_bytes, 0);
        GR_CHECK_EQ(host_blocks, 0);
        pool_end();
}

/* What does not come leaves all that is allowed for the next one, and other memory kinds than the device's get none. */
static void test_spill_refused(void)
{
        struct gr_block *next[2];
        uint64_t ptr;

        start((struct gr_config){0});
        context->device->spill_bytes = 32 * MIB;
        sg_hold(0, ROOM_BYTES, 0);
        driver.host_alloc = no_host_memory;
        for (int i = 0; i < 2; i++) {
                GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), -ENOMEM);
                GR_CHECK_EQ(context->device->spilled_bytes, 0);
                next[i] = gr_block_new();
                gr_block_delete(next[i]);
        }
        GR_CHECK(!GR_METADATA_IN_CHUNKS || next[1] == next[0]); /* otherwise whoever looks for leaks says so */
        driver.host_alloc = host_alloc;
        GR_CHECK_EQ(gr_ladder_climb_for(context, 20 * MIB, refused, NULL, -ENOMEM), -ENOMEM);
        GR_CHECK_EQ(host_blocks, 0);
        GR_CHECK_EQ(context->device->spilled_bytes, 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 32 * MIB, &ptr), 0);
        GR_CHECK_EQ(host_blocks, 1);

        /* Where no fence can be had the driver's free waits, which it must not for what the program may do later. */
        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
        atomic_store(&context->fence->broken, -EIO);
        atomic_store(&core.waits_for_others, true);
        GR_CHECK(!gr_spill_collect(context));
        GR_CHECK_EQ(host_blocks, 1);
        atomic_store(&core.waits_for_others, false);
        GR_CHECK(!gr_spill_collect(context));
        GR_CHECK_EQ(host_blocks, 0);
        GR_CHECK_EQ(context->device->spilled_bytes, 0);
        atomic_store(&context->fence->broken, 0);
        pool_end();
}

static void *hold_freed(void *arg)
{
        gr_lock(&context->spilled->lock);
        sem_post(&slow.inside);
        sem_wait(&slow.go_on);
        gr_unlock(&context->spilled->lock);
        return arg;
}

static _Atomic bool holding;

/* Another thread is at the list of what was freed from here on. */
static int query_and_hold(void *handle)
{
        if (holding)
                return sg_driver.event_query(handle);
        pthread_create(&slow.thread, NULL, hold_freed, NULL);
        sem_wait(&slow.inside);
        atomic_store(&holding, true);
        return sg_driver.event_query(handle);
}

static _Atomic bool collected;

static void *collect(void *arg)
{
        gr_spill_collect(context);
        atomic_store(&collected, true);
        return arg;
}

/* Two threads that took one block off the list would both give it back. */
static void test_spill_in_turn(void)
{
        pthread_t thread;
        uint64_t ptr;

        start((struct gr_config){0});
        context->device->spill_bytes = 32 * MIB;
        sg_hold(0, ROOM_BYTES, 0);
        GR_CHECK_EQ(gr_pool_alloc(context, 20 * MIB, &ptr), 0);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
        sem_init(&slow.inside, 0, 0);
        sem_init(&slow.go_on, 0, 0);
        atomic_store(&collected, false);
        atomic_store(&holding, false);
        driver.event_query = query_and_hold;
        pthread_create(&thread, NULL, collect, NULL);
        while (!holding && !collected)
                usleep(1000);
        for (int n = 0; n < 50 && !collected; n++)
                usleep(1000);
        GR_CHECK(!collected);
        GR_CHECK(context->spilled->blocks);
        sem_post(&slow.go_on);
        pthread_join(slow.thread, NULL);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(host_blocks, 0);
        pool_end();
}

int main(void)
{
        gr_log_set_level(GR_LOG_SILENT);
        test_spill();
        test_spill_returns();
        test_spill_stale();
        test_spill_refused();
        test_spill_in_turn();
        return GR_CHECK_RESULT();
}
