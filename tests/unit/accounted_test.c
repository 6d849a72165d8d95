/* Memory that the pool does not serve: charged, refused, given room by the ladder, noted, and gone with its owner. */
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "base/log.h"
#include "check.h"
#include "core.h"
#include "scripted.h"

#define CARD (64 * MIB)

static struct gr_core core;
static struct gr_parts parts;
static struct gr_context *context;
static struct gr_device *device;

/* What the driver says to such an allocation, and how often it was asked. */
static struct {
        int rc;
        unsigned calls;
} elsewhere;

static int allocate(void *arg)
{
        (void)arg;
        elsewhere.calls++;
        return elsewhere.rc;
}

static void start(void)
{
        sg_reset(CARD);
        gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){.reuse = GR_REUSE_AUTO, .pool = GR_POOL_BINS});
        context = gr_core_context_add(&core, sg_context_new(0), 0);
        device = context->device;
        gr_budget_set_limit(device, GR_LIMIT_HARD, 32 * MIB);
        gr_log_set_level(GR_LOG_SILENT);
        elsewhere.rc = 0;
        elsewhere.calls = 0;
}

static void finish(uint64_t reserved_bytes)
{
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), reserved_bytes);
        GR_CHECK_EQ(sg_misuses(), 0);
        gr_core_destroy(&core);
}

static int charge(uint64_t bytes)
{
        return gr_charge_accounted(&core, device, context, GR_MEMORY_MAPPED, bytes, allocate, NULL);
}

static uint64_t kind_bytes(enum gr_memory_kind kind)
{
        return atomic_load(&device->kind_bytes[kind]);
}

static void test_limit(void)
{
        uint64_t free_bytes, total_bytes, ptr;

        start();
        GR_CHECK_EQ(charge(20 * MIB), 0);
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_MAPPED), 20 * MIB);
        GR_CHECK_EQ(charge(14 * MIB), -EDQUOT);
        GR_CHECK_EQ(elsewhere.calls, 1); /* the driver is not even asked */
        GR_CHECK_EQ(sg_alloc(context, 14 * MIB, &ptr), -EDQUOT);
        gr_budget_share(device, 0, CARD, CARD, &free_bytes, &total_bytes);
        GR_CHECK_EQ(free_bytes, 12 * MIB);
        GR_CHECK_EQ(total_bytes, 32 * MIB);
        GR_CHECK_EQ(charge(12 * MIB), 0);
        gr_budget_uncharge(device, GR_MEMORY_MAPPED, 32 * MIB);
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_MAPPED), 0);
        GR_CHECK(gr_charge_accounted(&core, core.host, NULL, GR_MEMORY_HOST, 5 * MIB, allocate, NULL) == 0);
        gr_budget_set_limit(core.host, GR_LIMIT_HARD, 6 * MIB);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_limit_hits), 2);
        GR_CHECK_EQ(gr_charge_accounted(&core, core.host, NULL, GR_MEMORY_HOST, 5 * MIB, allocate, NULL), -EDQUOT);
        GR_CHECK_EQ(sg_counter(&core, GR_COUNTER_limit_hits), 3);
        gr_budget_uncharge(core.host, GR_MEMORY_HOST, 5 * MIB);
        GR_CHECK_EQ(atomic_load(&core.host->reserved_bytes), 0);
        finish(0);
}

/* Others' memory is told beside the charge, takes no room, and meets no limit. */
static void test_imported(void)
{
        uint64_t free_bytes, total_bytes;
        int owner;

        start();
        GR_CHECK_EQ(charge(20 * MIB), 0);
        GR_CHECK_EQ(atomic_load(&device->peak_live_bytes), 20 * MIB);
        gr_budget_force(device, GR_MEMORY_IMPORTED, 64 * MIB);
        gr_accounted_add(core.accounted, device, GR_MEMORY_IMPORTED, 5, &owner, 64 * MIB);
        GR_CHECK_EQ(gr_budget_charge(device, GR_MEMORY_IMPORTED, 64 * MIB), 0);
        gr_accounted_add(core.accounted, device, GR_MEMORY_IMPORTED, 6, &owner, 64 * MIB);
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_IMPORTED), 128 * MIB);
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), 20 * MIB);
        GR_CHECK_EQ(atomic_load(&device->peak_reserved_bytes), 20 * MIB);
        gr_budget_share(device, 0, CARD, CARD, &free_bytes, &total_bytes);
        GR_CHECK_EQ(free_bytes, 12 * MIB);
        gr_accounted_free_end(core.accounted, gr_accounted_free_begin(core.accounted, GR_MEMORY_IMPORTED, 5), 1);
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_IMPORTED), 64 * MIB);
        gr_accounted_owner_gone(core.accounted, &owner);
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_IMPORTED), 0);
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), 20 * MIB);
        gr_budget_uncharge(device, GR_MEMORY_MAPPED, 20 * MIB);
        finish(0);
}

/* The cache makes room, both where the limit and where the driver says no. */
static void test_ladder(void)
{
        struct gr_context *other;
        uint64_t ptr;

        start();
        GR_CHECK_EQ(sg_alloc(context, 24 * MIB, &ptr), 0);
        GR_CHECK_EQ(sg_free(&core, ptr), 0);
        GR_CHECK_EQ(sg_used_bytes(0), 24 * MIB);
        GR_CHECK_EQ(charge(30 * MIB), 0);
        GR_CHECK_EQ(sg_used_bytes(0), 0);
        gr_budget_uncharge(device, GR_MEMORY_MAPPED, 30 * MIB);

        /* The cache of the device that is short, whichever context asks. */
        other = gr_core_context_add(&core, sg_context_new(1), 1);
        for (int i = 0; i < 2; i++) {
                GR_CHECK_EQ(sg_alloc(context, 24 * MIB, &ptr), 0);
                GR_CHECK_EQ(sg_free(&core, ptr), 0);
                GR_CHECK_EQ(gr_charge_accounted(&core, device, i ? other : NULL, GR_MEMORY_MAPPED, 30 * MIB, allocate,
                                                NULL),
                            0);
                gr_budget_uncharge(device, GR_MEMORY_MAPPED, 30 * MIB);
        }
        GR_CHECK(gr_charge_climber(&core, device, other) == context &&
                 gr_charge_climber(&core, other->device, other) == other);
        GR_CHECK(!gr_charge_climber(&core, core.host, other));

        elsewhere.rc = -ENOMEM;
        elsewhere.calls = 0;
        GR_CHECK_EQ(charge(2 * MIB), -ENOMEM);
        GR_CHECK(elsewhere.calls > 3); /* again after each rung */
        GR_CHECK_EQ(atomic_load(&device->peak_reserved_bytes), 30 * MIB);
        elsewhere.rc = gr_driver_error(1);
        GR_CHECK_EQ(charge(31 * MIB), gr_driver_error(1));
        GR_CHECK_EQ(atomic_load(&device->peak_reserved_bytes), 30 * MIB); /* what the driver refused was never held */
        elsewhere.rc = gr_driver_error(1);
        elsewhere.calls = 0;
        GR_CHECK_EQ(charge(2 * MIB), gr_driver_error(1));
        GR_CHECK_EQ(elsewhere.calls, 1);
        finish(0);
}

static void test_ledger(void)
{
        struct gr_accounted *entry;
        int owner;

        start();
        GR_CHECK_EQ(charge(4 * MIB), 0);
        gr_accounted_add(core.accounted, device, GR_MEMORY_MAPPED, 77, &owner, 4 * MIB);
        GR_CHECK(gr_accounted_free_begin(core.accounted, GR_MEMORY_ARRAY, 77) ==
                 NULL); /* another memory kind's handle */
        entry = gr_accounted_free_begin(core.accounted, GR_MEMORY_MAPPED, 77);
        GR_CHECK(entry != NULL);
        GR_CHECK(gr_accounted_free_begin(core.accounted, GR_MEMORY_MAPPED, 77) == NULL);
        gr_accounted_free_end(core.accounted, entry, 0); /* the driver refused: still there */
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_MAPPED), 4 * MIB);
        gr_accounted_free_end(core.accounted, gr_accounted_free_begin(core.accounted, GR_MEMORY_MAPPED, 77), 1);
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_MAPPED), 0);

        /* A handle that comes back without a free in between: the old one is gone. */
        for (int i = 0; i < 2; i++) {
                GR_CHECK_EQ(charge(4 * MIB), 0);
                gr_accounted_add(core.accounted, device, GR_MEMORY_MAPPED, 78, &owner, 4 * MIB);
        }
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_MAPPED), 4 * MIB);

        /* While one is taken its handle is another's, or its owner ends: there is nothing to put back. */
        entry = gr_accounted_free_begin(core.accounted, GR_MEMORY_MAPPED, 78);
        GR_CHECK_EQ(charge(4 * MIB), 0);
        GR_CHECK_EQ(gr_accounted_add(core.accounted, device, GR_MEMORY_MAPPED, 78, &owner, 4 * MIB), 0);
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_MAPPED), 8 * MIB);
        gr_accounted_free_end(core.accounted, entry, 0);
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_MAPPED), 4 * MIB);
        entry = gr_accounted_free_begin(core.accounted, GR_MEMORY_MAPPED, 78);
        GR_CHECK(entry != NULL);
        gr_accounted_owner_gone(core.accounted, &owner);
        gr_accounted_free_end(core.accounted, entry, 0);
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_MAPPED), 0);

        GR_CHECK_EQ(charge(4 * MIB), 0);
        gr_accounted_add(core.accounted, device, GR_MEMORY_MAPPED, 80, &owner, 4 * MIB);
        GR_CHECK_EQ(charge(2 * MIB), 0);
        gr_accounted_add(core.accounted, device, GR_MEMORY_MAPPED, 79, NULL, 2 * MIB);
        gr_accounted_owner_gone(core.accounted, &owner);
        gr_accounted_owner_gone(core.accounted, NULL); /* no context: owns nothing */
        GR_CHECK_EQ(kind_bytes(GR_MEMORY_MAPPED), 2 * MIB);
        finish(2 * MIB);
}

/* Bytes that the C library has handed out, where it tells. */
static size_t reserved_bytes(void)
{
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
        return mallinfo2().uordblks;
#else
        return 0;
#endif
}

static void add(uint64_t handle)
{
        gr_budget_force(device, GR_MEMORY_MAPPED, MIB);
        gr_accounted_add(core.accounted, device, GR_MEMORY_MAPPED, handle, &core, MIB);
}

/* However an entry goes, its memory goes, too. None is none. */
static void test_nothing_is_lost(void)
{
        size_t before = 0;

        start();
        for (int i = 0; i < 40; i++) {
                add(1);
                gr_accounted_free_end(core.accounted, gr_accounted_free_begin(core.accounted, GR_MEMORY_MAPPED, 1), 1);
                add(1);
                add(1);
                add(2);
                gr_accounted_owner_gone(core.accounted, &core);
                gr_accounted_free_end(core.accounted, NULL, i % 2);
                if (i == 0)
                        before = reserved_bytes();
        }
        GR_CHECK_EQ(reserved_bytes(), before);
        finish(0);
        GR_CHECK(!kind_bytes(GR_MEMORY_MAPPED));

        /* Nor what is noted of small blocks, when all ends. */
        for (int i = 0; i < 40; i++) {
                uint64_t reserved;

                gr_core_init(&core, &parts, &sg_driver, &(struct gr_config){0});
                GR_CHECK_EQ(gr_budget_reserve(&core.devices[0], 4096, &reserved), 0);
                GR_CHECK_EQ(gr_budget_commit(&core.devices[0], MIB, 4096, reserved), 0);
                gr_core_destroy(&core);
                if (i == 19) /* the C library keeps some of each size */
                        before = reserved_bytes();
        }
        GR_CHECK_EQ(reserved_bytes(), before);
}

/* What the driver's pools hold for nobody is free to the program, and never more than there is. */
static void test_idle(void)
{
        uint64_t free_bytes, total_bytes;

        start();
        gr_budget_force(device, GR_MEMORY_STREAM_ORDERED, 40 * MIB); /* taken already, whatever the limit says */
        GR_CHECK_EQ(atomic_load(&device->reserved_bytes), 40 * MIB);
        gr_budget_share(device, 0, 24 * MIB, CARD, &free_bytes, &total_bytes);
        GR_CHECK_EQ(free_bytes, 0);
        atomic_store(&device->idle_bytes, 30 * MIB);
        gr_budget_share(device, 0, 24 * MIB, CARD, &free_bytes, &total_bytes);
        GR_CHECK_EQ(free_bytes, 22 * MIB);
        atomic_store(&device->idle_bytes, 100 * MIB); /* an old figure */
        gr_budget_share(device, 0, 24 * MIB, CARD, &free_bytes, &total_bytes);
        GR_CHECK_EQ(free_bytes, 32 * MIB);
        gr_budget_uncharge(device, GR_MEMORY_STREAM_ORDERED, 40 * MIB);
        finish(0);
}

static int owner_of_all;
static _Atomic unsigned done;

static void *add_one(void *arg)
{
        (void)arg;
        gr_accounted_add(core.accounted, device, GR_MEMORY_MAPPED, 2, &owner_of_all, MIB);
        atomic_fetch_add(&done, 1);
        return NULL;
}

static void *take_one(void *arg)
{
        struct gr_accounted *entry = gr_accounted_free_begin(core.accounted, GR_MEMORY_MAPPED, 1);

        (void)arg;
        atomic_fetch_add(&done, 1);
        gr_accounted_free_end(core.accounted, entry, 1);
        return NULL;
}

static void *drop_all(void *arg)
{
        (void)arg;
        gr_accounted_owner_gone(core.accounted, &owner_of_all);
        atomic_fetch_add(&done, 1);
        return NULL;
}

/* While one thread is at the entries the others wait. */
static void test_one_at_a_time(void)
{
        static void *(*const others[])(void *) = {add_one, take_one, drop_all};
        static const uint64_t left_bytes[] = {2 * MIB, MIB, 0};
        pthread_t thread;

        start();
        gr_budget_force(device, GR_MEMORY_MAPPED, 2 * MIB);
        gr_accounted_add(core.accounted, device, GR_MEMORY_MAPPED, 1, &owner_of_all, MIB);
        for (unsigned i = 0; i < 3; i++) {
                gr_lock(&core.accounted->lock);
                GR_CHECK_EQ(pthread_create(&thread, NULL, others[i], NULL), 0);
                usleep(50000);
                GR_CHECK_EQ(atomic_load(&done), i);
                gr_unlock(&core.accounted->lock);
                pthread_join(thread, NULL);
                GR_CHECK_EQ(atomic_load(&done), i + 1);
                GR_CHECK_EQ(kind_bytes(GR_MEMORY_MAPPED), left_bytes[i]);
        }
        finish(0);
}

int main(void)
{
        test_limit();
        test_imported();
        test_ladder();
        test_ledger();
        test_idle();
        test_nothing_is_lost();
        test_one_at_a_time();
        return GR_CHECK_RESULT();
}
