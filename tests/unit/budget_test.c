#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "account/budget.h"
#include "account/pressure.h"
#include "base/size_class.h"
#include "check.h"

#define PAGE    GR_PAGE_BYTES
#define BASE    UINT64_C(0x7f0000000000)
#define THREADS 8
#define ROUNDS  20000

static struct gr_device device;

static uint64_t charged(void)
{
        return atomic_load(&device.reserved_bytes);
}

static void start(uint64_t hard_bytes)
{
        gr_budget_init(&device, 3);
        gr_budget_set_limit(&device, GR_LIMIT_HARD, hard_bytes);
}

static bool short_of_memory;

/* In place of the C library's. */
void *calloc(size_t count, size_t bytes)
{
        void *ptr = NULL;

        if (short_of_memory || posix_memalign(&ptr, 16, count * bytes))
                return NULL;
        return memset(ptr, 0, count * bytes);
}

/* A small block at ptr, all the way. */
static int take(uint64_t ptr, size_t bytes)
{
        uint64_t reserved;
        int rc = gr_budget_reserve(&device, bytes, &reserved);

        return rc ? rc : gr_budget_commit(&device, ptr, bytes, reserved);
}

/*
 * The driver gives out memory that has just been freed before the free is counted: two owners of one address for a
 * moment. The slab then has more blocks than room, which must not make its rest the largest number of all.
 */
static void test_slab_given_out_early(void)
{
        const size_t half = GR_SMALL_MAX_BYTES;
        uint64_t reserved;

        start(PAGE);
        GR_CHECK_EQ(take(BASE, half), 0);
        GR_CHECK_EQ(take(BASE + half, half), 0);
        GR_CHECK_EQ(gr_budget_live(&device), PAGE);
        GR_CHECK_EQ(gr_budget_commit(&device, BASE, half, 0), 0); /* its second owner */
        GR_CHECK_EQ(gr_budget_live(&device), PAGE);
        GR_CHECK_EQ(gr_budget_reserve(&device, 512, &reserved), -EDQUOT); /* the slab has no room to promise */
        GR_CHECK_EQ(gr_budget_uncharge_block(&device, BASE, half), 0);
        GR_CHECK_EQ(gr_budget_live(&device), PAGE);
        GR_CHECK_EQ(gr_budget_uncharge_block(&device, BASE, half), 0);
        GR_CHECK_EQ(gr_budget_uncharge_block(&device, BASE + half, half), PAGE);
        GR_CHECK_EQ(charged(), 0);
        GR_CHECK_EQ(atomic_load(&device.slab_rest_bytes), 0);
        gr_budget_destroy(&device);
}

/* A slab that cannot be noted is not charged. */
static void test_no_memory(void)
{
        start(GR_UNLIMITED);
        short_of_memory = true;
        GR_CHECK_EQ(take(BASE, 512), -ENOMEM);
        short_of_memory = false;
        GR_CHECK_EQ(charged(), 0);
        GR_CHECK_EQ(take(BASE, 512), 0);
        GR_CHECK_EQ(gr_budget_uncharge_block(&device, BASE, 512), PAGE);
        gr_budget_destroy(&device);
}

static void test_large(void)
{
        uint64_t reserved = 42;

        start(10 * PAGE);
        GR_CHECK_EQ(device.ordinal, 3);
        GR_CHECK_EQ(gr_budget_reserve(&device, 10 * PAGE + 1, &reserved), -EDQUOT);
        GR_CHECK_EQ(reserved, 42); /* untouched */
        GR_CHECK_EQ(charged(), 0);
        GR_CHECK_EQ(gr_budget_reserve(&device, 9 * PAGE + 1, &reserved), 0); /* just fits: whole pages */
        GR_CHECK_EQ(charged(), 10 * PAGE);
        gr_budget_cancel(&device, reserved);
        GR_CHECK_EQ(charged(), 0);

        GR_CHECK_EQ(gr_budget_reserve(&device, MIB + 1, &reserved), 0);
        GR_CHECK_EQ(gr_budget_commit(&device, BASE, MIB + 1, reserved), 0);
        GR_CHECK_EQ(charged(), PAGE);
        GR_CHECK_EQ(gr_budget_uncharge_block(&device, BASE, MIB + 1), PAGE);
        GR_CHECK_EQ(charged(), 0);
        GR_CHECK_EQ(atomic_load(&device.peak_reserved_bytes), PAGE); /* what was cancelled was never held */
        gr_budget_destroy(&device);

        /* No limit is none, also for numbers that would wrap. */
        start(GR_UNLIMITED);
        GR_CHECK_EQ(gr_budget_reserve(&device, GR_BLOCK_MAX_BYTES, &reserved), 0);
        GR_CHECK_EQ(charged(), GR_BLOCK_MAX_BYTES);
        gr_budget_destroy(&device);

        /* A limit below what is taken already, as after a change: nothing more, nothing wraps. */
        start(10 * PAGE);
        GR_CHECK_EQ(gr_budget_reserve(&device, 8 * PAGE, &reserved), 0);
        gr_budget_set_limit(&device, GR_LIMIT_HARD, 4 * PAGE);
        GR_CHECK_EQ(gr_budget_reserve(&device, 2 * PAGE, &reserved), -EDQUOT);
        gr_budget_destroy(&device);
}

/* The block came out at another size than was reserved. */
static void test_other_size(void)
{
        uint64_t reserved;

        start(10 * PAGE);
        GR_CHECK_EQ(gr_budget_reserve(&device, 4 * PAGE, &reserved), 0);
        GR_CHECK_EQ(gr_budget_commit(&device, BASE, 2 * PAGE, reserved), 0);
        GR_CHECK_EQ(charged(), 2 * PAGE);
        GR_CHECK_EQ(gr_budget_reserve(&device, 4 * PAGE, &reserved), 0);
        GR_CHECK_EQ(gr_budget_commit(&device, BASE + 2 * PAGE, 6 * PAGE, reserved), 0);
        GR_CHECK_EQ(charged(), 8 * PAGE);
        GR_CHECK_EQ(gr_budget_reserve(&device, 2 * PAGE, &reserved), 0); /* large expected, small got */
        GR_CHECK_EQ(gr_budget_commit(&device, BASE + 8 * PAGE, 512, reserved), 0);
        GR_CHECK_EQ(charged(), 9 * PAGE);
        gr_budget_uncharge_block(&device, BASE, 2 * PAGE);
        gr_budget_uncharge_block(&device, BASE + 2 * PAGE, 6 * PAGE);
        GR_CHECK_EQ(gr_budget_uncharge_block(&device, BASE + 8 * PAGE, 512), PAGE);
        GR_CHECK_EQ(charged(), 0);

        /* Larger than there is room for: the limit stands, the block goes back. */
        GR_CHECK_EQ(gr_budget_reserve(&device, 2 * PAGE, &reserved), 0);
        GR_CHECK_EQ(gr_budget_commit(&device, BASE, 12 * PAGE, reserved), -EDQUOT);
        GR_CHECK_EQ(charged(), 0);
        gr_budget_destroy(&device);
}

static void test_limit_full_of_slabs(void)
{
        uint64_t ptrs[2 * 4 + 1], reserved;

        /* Two slabs are all there may be; they hold eight blocks of 512 KiB. */
        start(2 * PAGE);
        for (unsigned i = 0; i < 8; i++) {
                ptrs[i] = BASE + i * (MIB / 2);
                GR_CHECK_EQ(take(ptrs[i], MIB / 2), 0);
                GR_CHECK(charged() <= 2 * PAGE);
        }
        GR_CHECK_EQ(charged(), 2 * PAGE);
        GR_CHECK_EQ(gr_budget_reserve(&device, MIB / 2, &reserved), -EDQUOT);
        GR_CHECK_EQ(gr_budget_uncharge_block(&device, ptrs[3], MIB / 2), 0); /* its slab stays with the others */

        /* Room in a slab only: the driver may use it, but not open another slab. */
        GR_CHECK_EQ(gr_budget_reserve(&device, MIB / 2, &reserved), 0);
        GR_CHECK_EQ(reserved, 0);
        GR_CHECK_EQ(gr_budget_commit(&device, BASE + 100 * PAGE, MIB / 2, reserved), -EDQUOT);
        GR_CHECK_EQ(charged(), 2 * PAGE);
        GR_CHECK_EQ(gr_budget_commit(&device, ptrs[3], MIB / 2, reserved), 0);
        GR_CHECK_EQ(charged(), 2 * PAGE);
        for (unsigned i = 0; i < 8; i++)
                gr_budget_uncharge_block(&device, ptrs[i], MIB / 2);
        GR_CHECK_EQ(charged(), 0);
        GR_CHECK_EQ(device.slab_count, 0);
        GR_CHECK_EQ(atomic_load(&device.slab_rest_bytes), 0);
        gr_budget_destroy(&device);
}

static void *ask_for_little(void *arg)
{
        uint64_t reserved;

        (void)arg;
        return (void *)(intptr_t)gr_budget_reserve(&device, 512, &reserved);
}

/* Room in a slab that is about to go, as it is between two figures, is none. */
static void test_slab_between(void)
{
        pthread_t thread;
        void *rc;

        start(PAGE);
        GR_CHECK_EQ(take(BASE, MIB), 0);
        GR_CHECK_EQ(take(BASE + MIB, MIB), 0);
        gr_lock(&device.slabs_lock);
        atomic_fetch_add(&device.slab_rest_bytes, MIB);
        GR_CHECK_EQ(pthread_create(&thread, NULL, ask_for_little, NULL), 0);
        usleep(50000);
        atomic_fetch_sub(&device.slab_rest_bytes, MIB);
        gr_unlock(&device.slabs_lock);
        pthread_join(thread, &rc);
        GR_CHECK_EQ((intptr_t)rc, -EDQUOT);
        gr_budget_uncharge_block(&device, BASE, MIB);
        gr_budget_uncharge_block(&device, BASE + MIB, MIB);
        GR_CHECK_EQ(charged(), 0);
        gr_budget_destroy(&device);
}

/* Random small blocks against a plain count of blocks per page. */
static void test_slab_model(void)
{
        enum { PAGES = 32, BLOCKS = PAGES * 16, STEP = PAGE / 16 };
        static unsigned in_page[PAGES], pages;
        static bool taken[BLOCKS];

        start(GR_UNLIMITED);
        srand(7);
        for (unsigned i = 0; i < ROUNDS; i++) {
                unsigned b = (unsigned)rand() % BLOCKS, page = b / 16;
                uint64_t ptr = BASE + (uint64_t)b * STEP, back;

                if (!taken[b]) {
                        GR_CHECK_EQ(take(ptr, STEP), 0);
                        pages += in_page[page]++ == 0;
                } else {
                        back = gr_budget_uncharge_block(&device, ptr, STEP);
                        GR_CHECK_EQ(back, in_page[page] == 1 ? PAGE : 0);
                        pages -= --in_page[page] == 0;
                }
                taken[b] = !taken[b];
                GR_CHECK_EQ(charged(), pages * PAGE);
                GR_CHECK_EQ(device.slab_count, pages);
        }
        gr_budget_destroy(&device);
}

static _Atomic bool over, wrong;
static _Atomic uint64_t next_page;

/* Reserves, and then commits or cancels; at no time may all of them together be above the limit. */
static void *race(void *arg)
{
        unsigned seed = *(unsigned *)arg;
        struct {
                uint64_t ptr;
                size_t bytes;
        } held[8] = {{0}};

        for (unsigned i = 0; i < ROUNDS; i++) {
                unsigned slot = (unsigned)rand_r(&seed) % 8;
                uint64_t reserved;

                if (charged() > 40 * PAGE)
                        over = true;
                if (held[slot].bytes) {
                        if (gr_budget_uncharge_block(&device, held[slot].ptr, held[slot].bytes) == 0)
                                wrong = true; /* each block has pages of its own here */
                        held[slot].bytes = 0;
                        continue;
                }
                held[slot].bytes = rand_r(&seed) % 2 ? 4096 : (size_t)(1 + rand_r(&seed) % 8) * PAGE;
                if (gr_budget_reserve(&device, held[slot].bytes, &reserved)) {
                        held[slot].bytes = 0;
                } else if (rand_r(&seed) % 4 == 0) {
                        gr_budget_cancel(&device, reserved);
                        held[slot].bytes = 0;
                } else {
                        held[slot].ptr = BASE + atomic_fetch_add(&next_page, 8) * PAGE;
                        if (gr_budget_commit(&device, held[slot].ptr, held[slot].bytes, reserved))
                                held[slot].bytes = 0; /* room in others' slabs was all it had */
                        gr_budget_update_peak(&device);
                }
        }
        for (unsigned slot = 0; slot < 8; slot++)
                if (held[slot].bytes)
                        gr_budget_uncharge_block(&device, held[slot].ptr, held[slot].bytes);
        return NULL;
}

static void test_threads(void)
{
        pthread_t threads[THREADS];
        unsigned seeds[THREADS];

        start(40 * PAGE);
        for (unsigned i = 0; i < THREADS; i++) {
                seeds[i] = i + 1;
                pthread_create(&threads[i], NULL, race, &seeds[i]);
        }
        for (unsigned i = 0; i < THREADS; i++)
                pthread_join(threads[i], NULL);
        GR_CHECK(!over);
        GR_CHECK(!wrong);
        GR_CHECK_EQ(charged(), 0);
        GR_CHECK_EQ(device.slab_count, 0);
        GR_CHECK(atomic_load(&device.peak_reserved_bytes) <= 40 * PAGE);
        GR_CHECK(atomic_load(&device.peak_reserved_bytes) > 30 * PAGE); /* the limit was fought for */
        GR_CHECK(atomic_load(&device.peak_live_bytes) <= atomic_load(&device.peak_reserved_bytes));
        gr_budget_destroy(&device);
}

enum { KEPT = 20000 };
static struct gr_cached kept[THREADS][KEPT];
static pthread_barrier_t together;
static _Atomic uint64_t account, got;

static void *reserve(void *most)
{
        uint64_t had = 0;

        pthread_barrier_wait(&together);
        for (uint64_t i = 0; i < 2 * *(uint64_t *)most / THREADS; i++)
                had += gr_budget_add_up_to(&account, 1, *(uint64_t *)most);
        atomic_fetch_add(&got, had);
        return NULL;
}

/* Threads that reserve at once get no more than there is, and all that there is. */
static void test_reserve(void)
{
        uint64_t most = UINT64_C(4000000);
        pthread_t threads[THREADS];

        pthread_barrier_init(&together, NULL, THREADS);
        for (int i = 0; i < THREADS; i++)
                pthread_create(&threads[i], NULL, reserve, &most);
        for (int i = 0; i < THREADS; i++)
                pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&together);
        GR_CHECK_EQ(account, most);
        GR_CHECK_EQ(got, most);
        GR_CHECK(gr_budget_add_up_to(&account, 0, most) && !gr_budget_add_up_to(&account, 1, most));
}

static void *keep(void *arg)
{
        struct gr_cached *own = arg;

        pthread_barrier_wait(&together);
        for (int i = 0; i < KEPT; i++)
                gr_budget_keep(&device, &own[i]);
        return NULL;
}

/* Threads that make known what holds cached memory, at once: all of it is known. */
static void test_keep(void)
{
        pthread_t threads[THREADS];
        unsigned known = 0;

        start(GR_UNLIMITED);
        pthread_barrier_init(&together, NULL, THREADS);
        for (int i = 0; i < THREADS; i++)
                pthread_create(&threads[i], NULL, keep, kept[i]);
        for (int i = 0; i < THREADS; i++)
                pthread_join(threads[i], NULL);
        pthread_barrier_destroy(&together);
        for (struct gr_cached *each = device.keepers; each; each = each->next)
                known++;
        GR_CHECK_EQ(known, THREADS * KEPT);
        gr_budget_destroy(&device);
}

static void check_share(uint64_t card_free, uint64_t card_total, uint64_t wanted_free, uint64_t wanted_total)
{
        uint64_t free_bytes, total;

        gr_budget_share(&device, 0, card_free, card_total, &free_bytes, &total);
        GR_CHECK_EQ(free_bytes, wanted_free);
        GR_CHECK_EQ(total, wanted_total);
}

static void test_share_and_excess(void)
{
        uint64_t reserved;

        start(GR_UNLIMITED);
        check_share(70 * PAGE, 100 * PAGE, 70 * PAGE, 100 * PAGE);
        GR_CHECK_EQ(gr_budget_reserve(&device, 30 * PAGE, &reserved), 0);
        GR_CHECK_EQ(gr_budget_live(&device), 0); /* the driver may still refuse it */
        gr_budget_answered(&device, reserved);
        GR_CHECK_EQ(gr_budget_live(&device), 30 * PAGE);
        gr_budget_cache(&device, 10 * PAGE);
        GR_CHECK_EQ(gr_budget_live(&device), 20 * PAGE);
        check_share(70 * PAGE, 100 * PAGE, 80 * PAGE, 100 * PAGE);  /* the cache counts as free */
        check_share(95 * PAGE, 100 * PAGE, 100 * PAGE, 100 * PAGE); /* but there is no more than the card */
        gr_budget_set_limit(&device, GR_LIMIT_HARD, 50 * PAGE);
        check_share(70 * PAGE, 100 * PAGE, 30 * PAGE, 50 * PAGE);
        check_share(5 * PAGE, 100 * PAGE, 15 * PAGE, 50 * PAGE); /* others hold the rest of the card */
        gr_budget_set_limit(&device, GR_LIMIT_HARD, 200 * PAGE);
        check_share(70 * PAGE, 100 * PAGE, 80 * PAGE, 100 * PAGE);
        gr_budget_set_limit(&device, GR_LIMIT_HARD, 12 * PAGE); /* less than is live */
        check_share(70 * PAGE, 100 * PAGE, 0, 12 * PAGE);

        /* A moment of another thread's work: cached counted already, charged no more. */
        gr_budget_cache(&device, 25 * PAGE);
        GR_CHECK_EQ(gr_budget_live(&device), 0);
        check_share(70 * PAGE, 100 * PAGE, 12 * PAGE, 12 * PAGE);
        gr_budget_uncache(&device, 25 * PAGE);

        GR_CHECK_EQ(gr_budget_excess(&device), 10 * PAGE); /* under a limit that came down nothing stays cached */
        gr_budget_set_limit(&device, GR_LIMIT_HARD, 27 * PAGE);
        GR_CHECK_EQ(gr_budget_excess(&device), 3 * PAGE);
        gr_budget_set_limit(&device, GR_LIMIT_HARD, GR_UNLIMITED);
        GR_CHECK_EQ(gr_budget_excess(&device), 0);
        GR_CHECK_EQ(gr_budget_cache_room(&device), GR_UNLIMITED - 10 * PAGE);
        gr_budget_set_limit(&device, GR_LIMIT_THRESHOLD, 4 * PAGE);
        GR_CHECK_EQ(gr_budget_excess(&device), 6 * PAGE);
        GR_CHECK_EQ(gr_budget_cache_room(&device), 0);
        gr_budget_set_limit(&device, GR_LIMIT_THRESHOLD, 12 * PAGE);
        GR_CHECK_EQ(gr_budget_cache_room(&device), 2 * PAGE);
        gr_budget_set_limit(&device, GR_LIMIT_THRESHOLD, 10 * PAGE);
        GR_CHECK_EQ(gr_budget_excess(&device), 0);
        GR_CHECK_EQ(gr_budget_cache_room(&device), 0);
        gr_budget_set_limit(&device, GR_LIMIT_SOFT, 23 * PAGE); /* live is 20: 3 may be cached */
        GR_CHECK_EQ(gr_budget_excess(&device), 7 * PAGE);
        gr_budget_set_limit(&device, GR_LIMIT_SOFT, 5 * PAGE);
        GR_CHECK_EQ(gr_budget_excess(&device), 10 * PAGE);
        gr_budget_update_peak(&device);
        GR_CHECK_EQ(atomic_load(&device.peak_live_bytes), 20 * PAGE);
        gr_budget_destroy(&device);
}

static uint64_t group_used, group_limit = 10 * PAGE;

static int group_reserve(void *arg, uint64_t bytes)
{
        (void)arg;
        if (bytes > group_limit - group_used)
                return -EDQUOT;
        group_used += bytes;
        return 0;
}

static void group_adjust(void *arg, int64_t bytes)
{
        (void)arg;
        group_used += (uint64_t)bytes;
}

static uint64_t group_room(void *arg)
{
        (void)arg;
        return group_limit - group_used;
}

static uint64_t group_excess(void *arg)
{
        (void)arg;
        return group_used > group_limit ? group_used - group_limit : 0;
}

/* Other processes count as well; every way of giving back reaches them. */
static void test_group(void)
{
        static const struct gr_group group = {10 * PAGE, group_reserve, group_adjust, group_room, group_excess, NULL};
        uint64_t reserved;

        start(GR_UNLIMITED);
        atomic_store(&device.group, &group);
        GR_CHECK_EQ(gr_budget_reserve(&device, 4 * PAGE, &reserved), 0);
        GR_CHECK_EQ(gr_budget_commit(&device, 64 * PAGE, 4 * PAGE, reserved), 0);
        GR_CHECK_EQ(group_used, 4 * PAGE);
        group_used += 5 * PAGE; /* somebody else */
        GR_CHECK_EQ(gr_budget_room(&device), PAGE);
        GR_CHECK_EQ(gr_budget_cache_room(&device), PAGE);
        GR_CHECK(!gr_budget_own_limit(&device, 2 * PAGE));
        GR_CHECK_EQ(gr_budget_reserve(&device, 2 * PAGE, &reserved), -EDQUOT);
        GR_CHECK_EQ(atomic_load(&device.reserved_bytes), 4 * PAGE);
        GR_CHECK_EQ(gr_budget_reserve(&device, 512, &reserved), 0);
        GR_CHECK_EQ(gr_budget_commit(&device, 80 * PAGE, 512, reserved), 0);
        GR_CHECK_EQ(group_used, 10 * PAGE);
        GR_CHECK_EQ(gr_budget_over(&device), 0);
        gr_budget_force(&device, GR_MEMORY_DRIVER, 3 * PAGE); /* nobody asked */
        GR_CHECK_EQ(gr_budget_over(&device), 3 * PAGE);
        gr_budget_set_limit(&device, GR_LIMIT_HARD, 4 * PAGE);
        GR_CHECK_EQ(gr_budget_over(&device), 4 * PAGE);
        gr_budget_set_limit(&device, GR_LIMIT_HARD, GR_UNLIMITED);
        gr_budget_uncharge(&device, GR_MEMORY_DRIVER, 3 * PAGE);
        check_share(70 * PAGE, 100 * PAGE, 0, 10 * PAGE);
        GR_CHECK_EQ(gr_budget_uncharge_block(&device, 80 * PAGE, 512), PAGE);
        GR_CHECK_EQ(gr_budget_uncharge_block(&device, 64 * PAGE, 4 * PAGE), 4 * PAGE);
        GR_CHECK_EQ(group_used, 5 * PAGE);
        gr_budget_set_limit(&device, GR_LIMIT_HARD, PAGE);
        GR_CHECK(gr_budget_own_limit(&device, 2 * PAGE));
        GR_CHECK_EQ(gr_budget_reserve(&device, 2 * PAGE, &reserved), -EDQUOT);
        GR_CHECK_EQ(group_used, 5 * PAGE);
        gr_budget_destroy(&device);
}

/* The charge of a pool of the driver follows what the driver says, up and down, also beyond the limit. */
static void test_correct(void)
{
        struct gr_pooled pooled = {0};

        start(10 * PAGE);
        GR_CHECK_EQ(gr_budget_charge(&device, GR_MEMORY_STREAM_ORDERED, 4 * PAGE), 0); /* ahead of a call */
        GR_CHECK(gr_budget_correct(&device, GR_MEMORY_STREAM_ORDERED, &pooled, 4 * PAGE, 6 * PAGE, PAGE));
        GR_CHECK_EQ(charged(), 6 * PAGE);
        GR_CHECK_EQ(atomic_load(&device.idle_bytes), PAGE);
        GR_CHECK(gr_budget_correct(&device, GR_MEMORY_STREAM_ORDERED, &pooled, 0, 3 * PAGE, 3 * PAGE));
        GR_CHECK_EQ(charged(), 3 * PAGE);
        GR_CHECK_EQ(atomic_load(&device.idle_bytes), 3 * PAGE);
        GR_CHECK(!gr_budget_correct(&device, GR_MEMORY_STREAM_ORDERED, &pooled, 0, 11 * PAGE, 0));
        GR_CHECK_EQ(charged(), 11 * PAGE);
        GR_CHECK_EQ(atomic_load(&device.kind_bytes[GR_MEMORY_STREAM_ORDERED]), 11 * PAGE);
        GR_CHECK_EQ(gr_budget_over(&device), PAGE);
        GR_CHECK(gr_budget_correct(&device, GR_MEMORY_STREAM_ORDERED, &pooled, 0, 0, 0));
        GR_CHECK_EQ(charged(), 0);
        GR_CHECK_EQ(atomic_load(&device.idle_bytes), 0);
        gr_budget_destroy(&device);
}

/* What comes nearest to its limit: the card's size, the process's own limits or the group's. */
static void test_pressure(void)
{
        static const struct gr_group group = {10 * PAGE, group_reserve, group_adjust, group_room, group_excess, NULL};
        struct gr_pressure pressure;
        uint64_t reserved;

        group_used = 0;
        start(GR_UNLIMITED);
        atomic_store(&device.total_bytes, 100 * PAGE);
        GR_CHECK_EQ(gr_budget_reserve(&device, 8 * PAGE, &reserved), 0);
        GR_CHECK_EQ(gr_budget_commit(&device, 64 * PAGE, 8 * PAGE, reserved), 0);
        pressure = gr_pressure_nearest(&device);
        GR_CHECK_EQ(pressure.reserved_bytes, 8 * PAGE);
        GR_CHECK_EQ(pressure.limit_bytes, 100 * PAGE);
        GR_CHECK(gr_pressure_of(pressure, 3 * PAGE) == 0.05);
        GR_CHECK(gr_pressure_of(pressure, 9 * PAGE) == 0);
        gr_budget_set_limit(&device, GR_LIMIT_HARD, 50 * PAGE);
        GR_CHECK_EQ(gr_pressure_nearest(&device).limit_bytes, 50 * PAGE);
        gr_budget_set_limit(&device, GR_LIMIT_SOFT, 20 * PAGE);
        GR_CHECK_EQ(gr_pressure_nearest(&device).limit_bytes, 20 * PAGE);
        atomic_store(&device.total_bytes, 16 * PAGE);
        GR_CHECK_EQ(gr_pressure_nearest(&device).limit_bytes, 16 * PAGE);
        atomic_store(&device.group, &group);
        group_used = 4 * PAGE; /* 0.4 of the group's limit, 0.5 of the card */
        GR_CHECK_EQ(gr_pressure_nearest(&device).limit_bytes, 16 * PAGE);
        group_used = 6 * PAGE;
        pressure = gr_pressure_nearest(&device);
        GR_CHECK_EQ(pressure.limit_bytes, 10 * PAGE);
        GR_CHECK_EQ(pressure.reserved_bytes, 6 * PAGE);
        group_limit = 10 * PAGE;
        group_used = 12 * PAGE;
        atomic_store(&device.group, NULL);
        gr_budget_uncharge_block(&device, 64 * PAGE, 8 * PAGE);
        gr_budget_destroy(&device);
}

/* A peak is what was held, and not what another thread asks the driver for meanwhile, who may refuse it. */
static void test_peak(void)
{
        uint64_t refused, had;

        gr_budget_init(&device, 0);
        GR_CHECK_EQ(gr_budget_reserve(&device, 30 * PAGE, &refused), 0);
        GR_CHECK_EQ(gr_budget_reserve(&device, 2 * PAGE, &had), 0);
        GR_CHECK_EQ(gr_budget_commit(&device, 64 * PAGE, 2 * PAGE, had), 0);
        GR_CHECK_EQ(atomic_load(&device.peak_reserved_bytes), 2 * PAGE);
        gr_budget_cancel(&device, refused);
        GR_CHECK_EQ(gr_budget_reserve(&device, 512, &refused), 0);
        GR_CHECK_EQ(gr_budget_reserve(&device, 512, &had), 0);
        GR_CHECK_EQ(gr_budget_commit(&device, 32 * PAGE, 512, had), 0);
        gr_budget_cancel(&device, refused);
        GR_CHECK_EQ(atomic_load(&device.peak_reserved_bytes), 3 * PAGE);

        gr_budget_ask(&device, 30 * PAGE);
        GR_CHECK_EQ(gr_budget_charge(&device, GR_MEMORY_MAPPED, 30 * PAGE), 0);
        GR_CHECK_EQ(gr_budget_charge(&device, GR_MEMORY_MANAGED, 4 * PAGE), 0);
        GR_CHECK_EQ(atomic_load(&device.peak_reserved_bytes), 7 * PAGE);
        gr_budget_uncharge(&device, GR_MEMORY_MAPPED, 30 * PAGE);
        gr_budget_answered(&device, 30 * PAGE);
        GR_CHECK_EQ(atomic_load(&device.peak_reserved_bytes), 7 * PAGE);
        gr_budget_ask(&device, PAGE);
        GR_CHECK_EQ(gr_budget_charge(&device, GR_MEMORY_MAPPED, PAGE), 0);
        gr_budget_answered(&device, PAGE);
        GR_CHECK_EQ(atomic_load(&device.peak_reserved_bytes), 8 * PAGE);
        gr_budget_uncharge(&device, GR_MEMORY_MAPPED, PAGE);
        gr_budget_uncharge(&device, GR_MEMORY_MANAGED, 4 * PAGE);
        gr_budget_uncharge_block(&device, 32 * PAGE, 512);
        gr_budget_uncharge_block(&device, 64 * PAGE, 2 * PAGE);
        GR_CHECK_EQ(atomic_load(&device.reserved_bytes), 0);
        gr_budget_destroy(&device);
}

int main(void)
{
        test_group();
        test_no_memory();
        test_slab_given_out_early();
        test_correct();
        test_large();
        test_other_size();
        test_limit_full_of_slabs();
        test_slab_between();
        test_slab_model();
        test_threads();
        test_keep();
        test_reserve();
        test_share_and_excess();
        test_peak();
        test_pressure();
        return GR_CHECK_RESULT();
}
