/*
 * Segments that split and merge, against a GPU that is only a clock: work is a number that grows, events remember it,
 * and a shadow of the memory knows for every 512 B who has it and which work used it last. A block handed out while
 * somebody has it, or before the work of its last owner is behind a fence, is a failure; so are addresses taken away
 * while somebody has a block there or work may still use them. All of it runs with mapped memory and without.
 */
#include "split.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "log.h"
#include "pool.h"

#define MIB      ((uint64_t)1 << 20)
#define UNIT     GR_SPLIT_UNIT_BYTES
#define BASE     (UINT64_C(1) << 40)
#define PAGES    2048u /* of the card */
#define UNITS    (PAGES * GR_PAGE_BYTES / UNIT)
#define VBASE    (UINT64_C(2) << 40) /* addresses that memory is mapped behind */
#define VPAGES   (4 * PAGES)
#define AREAS    (2 * THREADS) /* two heaps */
#define LIVE     UINT32_MAX
#define THREADS  4
#define CONTEXT  ((void *)0x10)
#define CONTEXT2 ((void *)0x20)

/* The GPU. Numbers of work start at 1. */
static struct {
        _Atomic uint32_t submitted, done; /* work up to here */
        _Atomic uint32_t covered;         /* later work waits for all work up to here */
        _Atomic uint64_t now_ns;
        _Atomic uint32_t bad;
        uint32_t lazy;          /* event_query lets so much work get done */
        size_t top;             /* pages below it were used at some time */
        uint8_t *owner;         /* of each page: 0 free, 1 first page of an allocation, 2 a later one, 3 small blocks */
        uint64_t slab_next;     /* where the next small block goes */
        _Atomic uint32_t *last; /* of each unit: LIVE, or the work that used it last */
        pthread_mutex_t lock;   /* guards owner, slab_next and what follows but vpages */
        unsigned handles, reserved, areas, moves;
        bool no_moves;
        uint8_t *refs; /* of each page: how many mappings it has, and one for its handle */
        int map_fails; /* so many calls from now on, and the next one fails; 0: none does */
        struct vpage {
                _Atomic uint32_t page;  /* behind it, plus 1; 0: none */
                _Atomic uint32_t used;  /* blocks in it that somebody has */
                _Atomic uint32_t freed; /* the last work on what was freed in it */
        } * vpages;
} gpu = {.lock = PTHREAD_MUTEX_INITIALIZER};

static struct gr_core core;
static struct gr_context *context;

static void bad(const char *what, uint64_t ptr)
{
        if (atomic_fetch_add(&gpu.bad, 1) < 10)
                fprintf(stderr, "%s at %#llx\n", what, (unsigned long long)ptr);
}

static struct vpage *vpage_of(uint64_t ptr)
{
        return &gpu.vpages[(ptr - VBASE) / GR_PAGE_BYTES];
}

/* The unit of memory behind ptr. */
static size_t unit_of(uint64_t ptr)
{
        uint32_t page;

        if (ptr < VBASE)
                return (size_t)((ptr - BASE) / UNIT);
        page = atomic_load(&vpage_of(ptr)->page);
        if (page == 0)
                bad("no memory", ptr);
        return (size_t)(((page ? page - 1 : 0) * GR_PAGE_BYTES + ptr % GR_PAGE_BYTES) / UNIT);
}

/* Somebody has, or no longer has, the block there. */
static void mark_addresses(uint64_t ptr, size_t bytes, uint32_t used, uint32_t work)
{
        for (uint64_t at = ptr / GR_PAGE_BYTES * GR_PAGE_BYTES; ptr >= VBASE && at < ptr + bytes; at += GR_PAGE_BYTES) {
                struct vpage *vpage = vpage_of(at);
                uint32_t seen = atomic_load(&vpage->freed);

                while (seen < work && !atomic_compare_exchange_weak(&vpage->freed, &seen, work))
                        ;
                atomic_fetch_add(&vpage->used, used);
        }
}

static int mem_alloc(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        size_t pages = (bytes + GR_PAGE_BYTES - 1) / GR_PAGE_BYTES, run = 0;
        int rc = -ENOMEM;

        (void)handle;
        pthread_mutex_lock(&gpu.lock);
        if (gr_is_small(bytes) && gpu.slab_next % GR_PAGE_BYTES &&
            gpu.slab_next % GR_PAGE_BYTES + bytes <= GR_PAGE_BYTES) {
                *ret_ptr = gpu.slab_next;
                gpu.slab_next += (bytes + UNIT - 1) / UNIT * UNIT;
                rc = 0;
        }
        for (size_t i = 0; i < PAGES && rc; i++) {
                run = gpu.owner[i] ? 0 : run + 1;
                if (run < pages)
                        continue;
                if (gpu.top < i + 1)
                        gpu.top = i + 1;
                i = i + 1 - pages;
                memset(&gpu.owner[i], 2, pages);
                gpu.owner[i] = gr_is_small(bytes) ? 3 : 1;
                *ret_ptr = BASE + i * GR_PAGE_BYTES;
                if (gr_is_small(bytes))
                        gpu.slab_next = *ret_ptr + (bytes + UNIT - 1) / UNIT * UNIT;
                rc = 0;
        }
        pthread_mutex_unlock(&gpu.lock);
        return rc;
}

/* Small blocks' pages stay: that only wastes. */
static void give_back(uint64_t ptr, uint32_t done)
{
        size_t page = (size_t)((ptr - BASE) / GR_PAGE_BYTES);

        pthread_mutex_lock(&gpu.lock);
        if (gpu.owner[page] == 0 || gpu.owner[page] == 2)
                bad("no allocation begins", ptr);
        if (gpu.owner[page] == 1)
                do {
                        for (size_t i = 0; i < GR_PAGE_BYTES / UNIT; i++) {
                                uint32_t last = atomic_load(&gpu.last[page * (GR_PAGE_BYTES / UNIT) + i]);

                                if (last == LIVE)
                                        bad("given back while somebody has it", BASE + page * GR_PAGE_BYTES + i * UNIT);
                                else if (last > done)
                                        bad("given back while in use", BASE + page * GR_PAGE_BYTES + i * UNIT);
                        }
                        gpu.owner[page++] = 0;
                } while (page < PAGES && gpu.owner[page] == 2);
        pthread_mutex_unlock(&gpu.lock);
}

static int mem_reserve(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        (void)handle;
        GR_CHECK(bytes <= VPAGES * GR_PAGE_BYTES);
        pthread_mutex_lock(&gpu.lock);
        /* Threads may open a heap at once; all but one give theirs up. */
        GR_CHECK(gpu.areas < AREAS);
        *ret_ptr = VBASE + gpu.areas++ * VPAGES * GR_PAGE_BYTES;
        gpu.reserved++;
        pthread_mutex_unlock(&gpu.lock);
        return 0;
}

static void mem_unreserve(uint64_t ptr, size_t bytes)
{
        pthread_mutex_lock(&gpu.lock);
        gpu.reserved--;
        pthread_mutex_unlock(&gpu.lock);
        for (uint64_t at = ptr; at < ptr + bytes; at += GR_PAGE_BYTES)
                if (atomic_load(&vpage_of(at)->page))
                        bad("addresses given up with memory behind them", at);
}

/* One reason less to keep the page of memory: a mapping or its handle. With the last it is free. */
static void page_drop(size_t page)
{
        pthread_mutex_lock(&gpu.lock);
        if (gpu.refs[page] == 0)
                bad("memory that nobody holds is given up", BASE + page * GR_PAGE_BYTES);
        else if (--gpu.refs[page] == 0)
                gpu.owner[page] = 0;
        pthread_mutex_unlock(&gpu.lock);
}

static int mem_map(void *handle, int ordinal, uint64_t ptr, size_t bytes, uint64_t *memory)
{
        bool fails, fresh = *memory == 0;

        (void)ordinal;
        if (bytes == 0 || (bytes | ptr) % GR_PAGE_BYTES)
                bad("no whole pages are mapped", ptr);
        pthread_mutex_lock(&gpu.lock);
        fails = gpu.map_fails > 0 && --gpu.map_fails == 0;
        fails |= gpu.no_moves && !fresh;
        gpu.moves += !fresh && !fails;
        pthread_mutex_unlock(&gpu.lock);
        if (fails || (fresh && mem_alloc(handle, bytes, memory)))
                return -ENOMEM;
        pthread_mutex_lock(&gpu.lock);
        gpu.handles += fresh;
        for (size_t i = 0; i < bytes / GR_PAGE_BYTES; i++) {
                size_t page = (*memory - BASE) / GR_PAGE_BYTES + i;

                if (gpu.owner[page] != (i == 0 ? 1 : 2))
                        bad("not the memory of a handle, or not all of it", ptr);
                gpu.refs[page] += fresh ? 2 : 1;
                if (atomic_exchange(&gpu.vpages[(ptr - VBASE) / GR_PAGE_BYTES + i].page, (uint32_t)page + 1))
                        bad("mapped twice", ptr + i * GR_PAGE_BYTES);
        }
        pthread_mutex_unlock(&gpu.lock);
        return 0;
}

static int mem_unmap(void *handle, uint64_t ptr, size_t bytes, uint64_t memory)
{
        uint32_t done = atomic_load(&gpu.done);

        (void)handle;
        for (uint64_t at = ptr; at < ptr + bytes; at += GR_PAGE_BYTES) {
                struct vpage *vpage = vpage_of(at);
                uint32_t page = atomic_load(&vpage->page);

                if (page == 0 || (memory && page != (memory + (at - ptr) - BASE) / GR_PAGE_BYTES + 1))
                        bad("other memory is unmapped than was mapped", at);
                if (atomic_load(&vpage->used))
                        bad("unmapped while somebody has it", at);
                if (atomic_load(&vpage->freed) > done)
                        bad("unmapped while in use", at);
                for (size_t i = 0; memory && page && i < GR_PAGE_BYTES / UNIT; i++) {
                        uint32_t last = atomic_load(&gpu.last[(page - 1) * (GR_PAGE_BYTES / UNIT) + i]);

                        if (last == LIVE || last > done)
                                bad("given back while in use", at + i * UNIT);
                }
                atomic_store(&vpage->page, 0);
                if (page)
                        page_drop(page - 1);
                if (page && memory)
                        page_drop(page - 1);
        }
        pthread_mutex_lock(&gpu.lock);
        gpu.handles -= memory != 0;
        pthread_mutex_unlock(&gpu.lock);
        return 0;
}

static int mem_free(uint64_t ptr)
{
        atomic_store(&gpu.done, atomic_load(&gpu.submitted));
        give_back(ptr, atomic_load(&gpu.done));
        return 0;
}

static int mem_release(void *handle, const uint64_t *ptrs, size_t count, size_t *ret_done)
{
        uint32_t done = atomic_load(&gpu.done);

        (void)handle;
        for (size_t i = 0; i < count; i++)
                give_back(ptrs[i], done);
        *ret_done = count;
        return 0;
}

static int mem_info(void *handle, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
        (void)handle;
        *ret_free_bytes = 0;
        pthread_mutex_lock(&gpu.lock);
        for (size_t i = 0; i < PAGES; i++)
                *ret_free_bytes += gpu.owner[i] ? 0 : GR_PAGE_BYTES;
        pthread_mutex_unlock(&gpu.lock);
        *ret_total_bytes = PAGES * GR_PAGE_BYTES;
        return 0;
}

static int event_create(void *handle, void **ret_event)
{
        (void)handle;
        *ret_event = calloc(1, sizeof(uint32_t));
        return *ret_event ? 0 : -ENOMEM;
}

static void event_destroy(void *handle, void *event)
{
        (void)handle;
        free(event);
}

static void raise_to(_Atomic uint32_t *value, uint32_t to)
{
        uint32_t seen = atomic_load(value);

        while (seen < to && !atomic_compare_exchange_weak(value, &seen, to))
                ;
}

static int event_query(void *event)
{
        uint32_t upto = atomic_load(&gpu.done) + gpu.lazy, submitted = atomic_load(&gpu.submitted);

        raise_to(&gpu.done, upto < submitted ? upto : submitted);
        return *(uint32_t *)event <= atomic_load(&gpu.done) ? 0 : -EAGAIN;
}

static int context_record(void *handle, void *event)
{
        (void)handle;
        *(uint32_t *)event = atomic_load(&gpu.submitted);
        return 0;
}

static int context_wait(void *handle, void *event)
{
        (void)handle;
        raise_to(&gpu.covered, *(uint32_t *)event);
        return 0;
}

static int context_sync(void *handle)
{
        (void)handle;
        raise_to(&gpu.done, atomic_load(&gpu.submitted));
        return 0;
}

static int trim_pools(void *handle, int device)
{
        (void)handle, (void)device;
        return 0;
}

static uint64_t now_ns(void)
{
        return atomic_fetch_add(&gpu.now_ns, 1000);
}

static void sleep_ns(uint64_t ns)
{
        atomic_fetch_add(&gpu.now_ns, ns);
        context_sync(NULL); /* a long time for a GPU */
}

#define COMMON_OPERATIONS                                                                                              \
        .mem_alloc = mem_alloc, .mem_free = mem_free, .mem_release = mem_release, .mem_info = mem_info,                \
        .event_create = event_create, .event_destroy = event_destroy, .event_query = event_query,                      \
        .context_record = context_record, .context_wait = context_wait, .context_sync = context_sync,                  \
        .trim_pools = trim_pools, .now_ns = now_ns, .sleep_ns = sleep_ns

static const struct gr_driver plain_driver = {COMMON_OPERATIONS};
static const struct gr_driver mapping_driver = {COMMON_OPERATIONS, .mem_reserve = mem_reserve,
                                                .mem_unreserve = mem_unreserve, .mem_map = mem_map,
                                                .mem_unmap = mem_unmap};
static const struct gr_driver *driver = &plain_driver;

static void begin(enum gr_pool_kind pool, enum gr_reuse reuse)
{
        struct gr_config config = {.pool = pool, .reuse = reuse};

        gpu.submitted = gpu.done = gpu.covered = 0;
        gpu.now_ns = 1;
        gpu.lazy = 0;
        gpu.slab_next = BASE;
        gpu.handles = gpu.reserved = gpu.areas = gpu.moves = 0;
        gpu.map_fails = 0;
        gpu.no_moves = false;
        memset(gpu.refs, 0, PAGES);
        memset(gpu.vpages, 0, AREAS * VPAGES * sizeof(*gpu.vpages));
        memset(gpu.owner, 0, PAGES);
        for (size_t i = 0; i < gpu.top * (GR_PAGE_BYTES / UNIT); i++)
                atomic_store_explicit(&gpu.last[i], 0, memory_order_relaxed);
        gr_core_init(&core, driver, &config);
        context = gr_context_add(&core, CONTEXT, 0);
}

static void end(void)
{
        GR_CHECK_EQ(atomic_exchange(&gpu.bad, 0), 0);
        for (struct gr_context *c = core.contexts; c; c = c->next)
                for (unsigned i = 0; i < c->fence.spare_count; i++)
                        free(c->fence.spare_events[i]);
        for (struct gr_context *c = core.contexts; c; c = c->next)
                for (unsigned i = 0; i < c->fence.pending_count; i++)
                        free(c->fence.pending[(c->fence.first_pending + i) % GR_EPOCHS_PENDING].events[0].handle);
        gr_core_destroy(&core);
}

/* The program allocates, and uses the memory at once. 0 where it is refused. */
static uint64_t take(size_t bytes)
{
        uint64_t ptr;
        uint32_t ready;

        if (gr_pool_alloc(context, bytes, &ptr))
                return 0;
        ready = atomic_load(&gpu.done) > atomic_load(&gpu.covered) ? atomic_load(&gpu.done) : atomic_load(&gpu.covered);
        if (ptr % UNIT)
                bad("not aligned", ptr);
        for (uint64_t at = ptr; at < ptr + bytes; at += UNIT) {
                uint32_t last = atomic_exchange(&gpu.last[unit_of(at)], LIVE);

                if (last == LIVE)
                        bad("handed out twice", at);
                else if (last > ready)
                        bad("handed out before its fence", at);
        }
        mark_addresses(ptr, bytes, 1, 0);
        return ptr;
}

static void give(uint64_t ptr, size_t bytes)
{
        uint32_t work = atomic_fetch_add(&gpu.submitted, 1) + 1;

        for (uint64_t at = ptr; at < ptr + bytes; at += UNIT)
                atomic_store(&gpu.last[unit_of(at)], work);
        mark_addresses(ptr, bytes, UINT32_MAX, work);
        GR_CHECK_EQ(gr_pool_free(&core, ptr), 0);
}

static struct gr_device *device(void)
{
        return context->device;
}

static void test_cut_and_merge(void)
{
        uint64_t a, b, c, d, small;

        begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = take(12 * MIB);
        GR_CHECK_EQ(device()->charged_bytes, 12 * MIB);
        give(a, 12 * MIB);
        GR_CHECK_EQ(gr_budget_cached(device()), 12 * MIB);
        GR_CHECK_EQ(take(12 * MIB), a); /* behind a barrier */
        give(a, 12 * MIB);
        /* Cut where the piece is large enough, and the rest serves too. */
        GR_CHECK_EQ(take(11 * MIB), a);
        GR_CHECK_EQ(device()->pinned_bytes, MIB);
        give(a, 11 * MIB);
        b = take(11 * MIB - 700 * 1024);
        GR_CHECK_EQ(b, a);
        c = take(MIB + 512);
        GR_CHECK_EQ(c, a + 11 * MIB - 700 * 1024);
        GR_CHECK_EQ(device()->charged_bytes, 12 * MIB);
        /* Small ones have a segment of their own. */
        small = take(1);
        d = take(600);
        GR_CHECK_EQ(d, small + 512);
        GR_CHECK_EQ(device()->charged_bytes, 14 * MIB);
        GR_CHECK_EQ(gr_budget_live(device()), 11 * MIB - 700 * 1024 + MIB + 512 + 512 + 1024);
        /* Whatever the order of frees, one range is left. */
        give(c, MIB + 512);
        give(b, 11 * MIB - 700 * 1024);
        GR_CHECK_EQ(take(12 * MIB), a);
        give(small, 1);
        give(d, 600);
        give(a, 12 * MIB);
        GR_CHECK_EQ(gr_budget_cached(device()), 14 * MIB);
        GR_CHECK_EQ(device()->pinned_bytes, 0);
        end();
}

static void test_fence(void)
{
        uint64_t a, b, c;

        begin(GR_POOL_SPLIT, GR_REUSE_POLL);
        a = take(4 * MIB);
        b = take(4 * MIB);
        give(a, 4 * MIB);
        c = take(4 * MIB);
        GR_CHECK(c != a); /* its work is not done */
        context_sync(NULL);
        GR_CHECK_EQ(gr_fence_poll(context), 0);
        GR_CHECK_EQ(take(4 * MIB), a);
        give(a, 4 * MIB);
        give(b, 4 * MIB);
        give(c, 4 * MIB);
        gr_fence_close(context);
        gr_fence_poll(context);
        GR_CHECK_EQ(gr_pool_trim(context, UINT64_MAX / 2), 0); /* usable or not: nothing is idle */
        context_sync(NULL);
        gr_fence_poll(context);
        GR_CHECK_EQ(gr_pool_trim(context, 3 * MIB), 4 * MIB);
        GR_CHECK_EQ(gr_pool_trim(context, UINT64_MAX / 2), 8 * MIB);
        GR_CHECK_EQ(device()->charged_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(device()), 0);
        end();
}

static void test_misuse(void)
{
        struct gr_split_place place;
        uint64_t a, b;

        begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = take(100 * 1024);
        b = take(100 * 1024);
        GR_CHECK_EQ(gr_pool_free(&core, a + 512), -EALREADY);
        GR_CHECK_EQ(gr_pool_free(&core, BASE - 512), -ENOENT);
        give(a, 100 * 1024);
        GR_CHECK_EQ(gr_pool_free(&core, a), -EALREADY); /* and not the driver's free of the whole segment */
        GR_CHECK_EQ(gr_split_find(&core, b + 1000, &place), 0);
        GR_CHECK_EQ(place.base_ptr, b);
        GR_CHECK(place.live);
        GR_CHECK_EQ(gr_split_find(&core, a + 1000, &place), 0);
        GR_CHECK(!place.live);
        /* Nobody's, or addresses of ours without memory. */
        GR_CHECK(gr_split_find(&core, a + GR_PAGE_BYTES, &place) == -ENOENT || !place.live);
        GR_CHECK_EQ(gr_split_find(&core, a - 1, &place), -ENOENT);
        end();
}

static void test_exported(void)
{
        uint64_t a, b;

        begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        a = take(512 * 1024);
        b = take(512 * 1024);
        GR_CHECK_EQ(gr_ledger_mark_exported(&core.ledger, a), 0);
        give(a, 512 * 1024);
        GR_CHECK(take(512 * 1024) != a);
        give(b + 512 * 1024, 512 * 1024);
        GR_CHECK_EQ(device()->charged_bytes, GR_PAGE_BYTES);
        give(b, 512 * 1024); /* the last of the segment: all of it goes, exported block included */
        GR_CHECK_EQ(device()->charged_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(device()), 0);
        end();
}

static void test_drop(void)
{
        struct gr_context *first;
        uint64_t a, b;

        begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        first = context;
        a = take(3 * MIB);
        b = take(1000);
        take(5 * MIB);
        give(a, 3 * MIB);
        /* The driver ends the context: its work is done, and nobody has its memory any more. */
        context_sync(NULL);
        for (size_t i = 0; i < UNITS; i++)
                atomic_store(&gpu.last[i], 0);
        for (size_t i = 0; i < AREAS * VPAGES; i++)
                atomic_store(&gpu.vpages[i].used, 0);
        gr_context_drop(first);
        GR_CHECK_EQ(gpu.handles, 0);
        GR_CHECK_EQ(gpu.reserved, 0);
        GR_CHECK_EQ(device()->charged_bytes, 0);
        GR_CHECK_EQ(gr_budget_cached(device()), 0);
        GR_CHECK_EQ(device()->pinned_bytes, 0);
        GR_CHECK_EQ(gr_pool_free(&core, b), -ENOENT);
        memset(gpu.owner, 0, PAGES);
        context = gr_context_add(&core, CONTEXT2, 0);
        GR_CHECK(context == first); /* used again, and it works */
        a = take(3 * MIB);
        GR_CHECK(a != 0);
        give(a, 3 * MIB);
        end();
}

/* A larger segment is not opened for a small piece; it goes back, so that the footprint stays near what is live. */
static void test_growth(void)
{
        uint64_t a, pieces[20];

        begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = take(400 * MIB);
        give(a, 400 * MIB);
        context_sync(NULL);
        for (int i = 0; i < 20; i++) {
                pieces[i] = take(20 * MIB);
                context_sync(NULL);
        }
        GR_CHECK(device()->peak_charged_bytes <= 420 * MIB);
        GR_CHECK_EQ(device()->charged_bytes, 400 * MIB);
        for (int i = 0; i < 20; i++)
                give(pieces[i], 20 * MIB);
        end();
}

static void test_auto(void)
{
        uint64_t ptr;

        begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        for (unsigned i = 1; i < 60 && !gr_split_active(&context->split); i++) {
                ptr = take(i * 3 * MIB);
                give(ptr, i * 3 * MIB);
        }
        GR_CHECK(gr_split_active(&context->split));
        GR_CHECK(take(50 * MIB) != 0);
        gr_split_bar(&core);
        GR_CHECK(!gr_split_active(&context->split));
        end();

        begin(GR_POOL_AUTO, GR_REUSE_AUTO);
        for (unsigned i = 1; i < 200; i++) { /* what bins are good at: they stay */
                ptr = take(i % 4 * 8 * MIB + 2 * MIB);
                give(ptr, i % 4 * 8 * MIB + 2 * MIB);
        }
        GR_CHECK(!gr_split_active(&context->split));
        end();
}

static uint64_t next_random(uint64_t *seed)
{
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        return *seed;
}

static size_t random_bytes(uint64_t *seed)
{
        unsigned bits = 1 + (unsigned)(next_random(seed) % 24);

        return 1 + (size_t)(next_random(seed) & ((UINT64_C(1) << bits) - 1));
}

struct walk {
        uint64_t seed;
        unsigned steps;
};

static void *walk(void *arg)
{
        enum { MOST = 64 };
        struct walk *walk = arg;
        uint64_t ptrs[MOST];
        size_t sizes[MOST], count = 0;

        for (unsigned i = 0; i < walk->steps; i++) {
                uint64_t dice = next_random(&walk->seed) % 100;

                if (dice < 50 && count < MOST) {
                        sizes[count] = random_bytes(&walk->seed);
                        ptrs[count] = take(sizes[count]);
                        count += ptrs[count] != 0;
                } else if (dice < 96 && count > 0) {
                        size_t k = next_random(&walk->seed) % count;

                        give(ptrs[k], sizes[k]);
                        ptrs[k] = ptrs[--count];
                        sizes[k] = sizes[count];
                } else if (dice < 97) {
                        gr_pool_trim(context, random_bytes(&walk->seed));
                } else if (dice < 98) {
                        gr_fence_close(context);
                        gr_fence_poll(context);
                } else {
                        gr_core_maintain(&core);
                }
        }
        while (count > 0) {
                count--;
                give(ptrs[count], sizes[count]);
        }
        return NULL;
}

/* Each page that the driver gave is charged, and nothing is left after the last trim. */
static void settle(void)
{
        uint64_t free_bytes, total_bytes, left;

        context_sync(NULL);
        gr_fence_sync(context);
        gr_pool_trim(context, UINT64_MAX / 2);
        left = device()->charged_bytes;
        mem_info(NULL, &free_bytes, &total_bytes);
        if (core.config.pool == GR_POOL_SPLIT) {
                GR_CHECK_EQ(left, 0);
                GR_CHECK_EQ(free_bytes, total_bytes);
        }
        GR_CHECK_EQ(gr_budget_cached(device()), 0);
        GR_CHECK_EQ(device()->pinned_bytes, 0);
        GR_CHECK_EQ(gpu.handles, 0);
        GR_CHECK_EQ(context->split.spare_bytes, 0);
        GR_CHECK_EQ(context->split.free_count, 0);
}

/* What a gap lacks is mapped, and only that; memory that nobody needs goes elsewhere before there is more. */
static void test_heap(void)
{
        uint64_t a, b, c, d;

        begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = take(40 * MIB);
        b = take(10 * MIB);
        GR_CHECK(a >= VBASE);
        GR_CHECK_EQ(b, a + 40 * MIB);
        GR_CHECK_EQ(device()->charged_bytes, 50 * MIB);
        give(a, 40 * MIB);
        context_sync(NULL);
        c = take(48 * MIB); /* too large for the gap */
        GR_CHECK(c > b);
        GR_CHECK(device()->peak_charged_bytes <= 76 * MIB);
        GR_CHECK(device()->charged_bytes <= 76 * MIB);
        give(b, 10 * MIB);
        context_sync(NULL);
        gr_fence_close(context);
        gr_fence_poll(context);
        GR_CHECK_EQ(device()->pinned_bytes, 0);
        /* In the middle of what is free a part stays mapped, and the place is used with the rest mapped again. */
        d = take(50 * MIB);
        GR_CHECK_EQ(d, a);
        GR_CHECK_EQ(device()->charged_bytes, 98 * MIB);
        give(c, 48 * MIB);
        give(d, 50 * MIB);
        settle();
        end();
}

/* Partly mapped when the driver has no more: what came is cached, what was free stays usable, nothing is lost. */
static void test_heap_fails(void)
{
        uint64_t a, b;

        for (int fails = 1; fails < 20; fails++) {
                begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
                a = take(6 * MIB);
                b = take(6 * MIB);
                give(a, 6 * MIB);
                context_sync(NULL);
                gpu.map_fails = fails;
                a = take(24 * MIB);
                GR_CHECK(a != 0); /* the ladder tries again */
                GR_CHECK_EQ(gr_budget_live(device()), 30 * MIB);
                give(a, 24 * MIB);
                give(b, 6 * MIB);
                settle();
                end();
        }
}

/* Free memory whose last work has not passed serves elsewhere at once, under new addresses, and nothing is waited for.
 */
static void test_heap_moves(bool possible)
{
        uint64_t a, b, c, d;

        begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        gpu.no_moves = !possible;
        context->split.credit_at_ns = 1; /* no time for waits */
        context->split.credit_ns = -1;
        a = take(100 * MIB);
        b = take(2 * MIB);
        give(a, 100 * MIB);
        c = take(120 * MIB); /* too large for the gap; its memory moves there, and some is new */
        GR_CHECK(c > b);
        if (possible) {
                GR_CHECK(gpu.moves > 0);
                GR_CHECK(device()->peak_charged_bytes <= 140 * MIB);
        }
        GR_CHECK_EQ(gpu.done, 0);
        d = take(40 * MIB); /* not at the old addresses, which work may still use */
        GR_CHECK(!possible || d > c);
        give(c, 120 * MIB);
        give(d, 40 * MIB);
        context_sync(NULL);
        gr_fence_close(context);
        gr_fence_poll(context);
        c = take(200 * MIB); /* now they are free */
        give(c, 200 * MIB);
        give(b, 2 * MIB);
        settle();
        GR_CHECK(!context->split.ghosts);
        end();
}

/*
 * A program with streams whose GPU falls behind, with sizes that keep changing: what it frees serves again behind
 * barriers instead of more memory. Where a kernel runs on there are none.
 */
static void test_behind(bool stuck)
{
        const uint64_t ms = 1000000;

        begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        atomic_store(&context->streams, 4);
        for (uint64_t i = 0; i < 40; i++) {
                uint32_t behind = i < 24 ? (uint32_t)i / 2 : 12, submitted = gpu.submitted;

                if (!stuck && submitted > gpu.done + behind)
                        gpu.done = submitted - behind;
                context->split.credit_at_ns = gpu.now_ns; /* no time for waits */
                context->split.credit_ns = -1;
                give(take((20 + i % 7) * MIB), (20 + i % 7) * MIB);
                gr_fence_close(context); /* its age says that nothing passes */
                gpu.now_ns += stuck ? 60 * ms : 10 * ms;
        }
        if (stuck)
                GR_CHECK_EQ(gpu.covered, 0);
        else
                GR_CHECK(device()->peak_charged_bytes <= 60 * MIB);
        context_sync(NULL);
        settle();
        end();
}

/* An extent goes back by itself; one that a block touches does not. */
static void test_heap_trim(void)
{
        uint64_t a, b;

        begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = take(7 * MIB);
        b = take(3 * MIB);
        give(a, 7 * MIB);
        GR_CHECK_EQ(device()->pinned_bytes, MIB);
        gr_fence_close(context);
        GR_CHECK_EQ(gr_pool_trim(context, UINT64_MAX / 2), 0); /* its work is not done */
        context_sync(NULL);
        gr_fence_poll(context);
        GR_CHECK_EQ(gr_pool_trim(context, 1), 2 * MIB);
        GR_CHECK_EQ(gr_pool_trim(context, UINT64_MAX / 2), 4 * MIB);
        GR_CHECK_EQ(device()->charged_bytes, 4 * MIB);
        GR_CHECK_EQ(gr_budget_cached(device()), MIB);
        give(b, 3 * MIB);
        settle();
        end();
}

/* Exported memory is not reused; of it goes back what no other block shares, the rest with the last that does. */
static void test_heap_exported(void)
{
        uint64_t a, b, c;

        begin(GR_POOL_SPLIT, GR_REUSE_BARRIER);
        a = take(7 * MIB);
        b = take(3 * MIB);
        GR_CHECK_EQ(gr_ledger_mark_exported(&core.ledger, a), 0);
        give(a, 7 * MIB);
        GR_CHECK_EQ(device()->charged_bytes, 4 * MIB);
        c = take(2 * MIB);
        GR_CHECK(c < a || c >= a + 6 * MIB);
        give(c, 2 * MIB);
        GR_CHECK_EQ(gr_budget_live(device()), 4 * MIB);
        give(b, 3 * MIB);
        GR_CHECK_EQ(gr_budget_live(device()), 0);
        GR_CHECK_EQ(device()->charged_bytes, 2 * MIB);
        GR_CHECK_EQ(gr_budget_cached(device()), 2 * MIB);
        GR_CHECK_EQ(device()->pinned_bytes, 0);
        end();
}

static void test_decay(void)
{
        struct gr_config config = {.pool = GR_POOL_SPLIT, .reuse = GR_REUSE_AUTO, .decay_ns = UINT64_C(1000000000)};
        uint64_t a, kept;

        begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        core.config = config;
        a = take(60 * MIB);
        kept = take(3 * MIB);
        give(take(5000), 5000);
        give(a, 60 * MIB);
        for (int i = 0; i < 14; i++) {
                gr_core_decay(&core, gpu.now_ns);
                sleep_ns(config.decay_ns / 10);
        }
        GR_CHECK_EQ(device()->charged_bytes, 4 * MIB);
        give(kept, 3 * MIB);
        settle();
        end();
}

static void test_random(enum gr_pool_kind pool, enum gr_reuse reuse, uint64_t hard_bytes, unsigned streams)
{
        for (uint64_t seed = 1; seed <= 6; seed++) {
                struct walk one = {.seed = seed * 7919, .steps = 3000};

                begin(pool, reuse);
                gpu.lazy = seed % 3 ? (uint32_t)seed : 1000;
                atomic_store(&device()->hard_bytes, hard_bytes);
                atomic_store(&context->streams, streams);
                if (seed % 2)
                        atomic_store(&device()->threshold_bytes, 16 * MIB);
                walk(&one);
                GR_CHECK(device()->peak_charged_bytes <= hard_bytes);
                settle();
                end();
        }
}

/* Much is held, so extents have two pages, and blocks lie across their ends: none of those goes back. */
static void test_large_extents(void)
{
        uint64_t a, b;

        begin(GR_POOL_SPLIT, GR_REUSE_AUTO);
        a = take(1200 * MIB);
        give(a, 1200 * MIB);
        GR_CHECK_EQ(take(6 * MIB), a);
        b = take(4 * MIB);
        GR_CHECK_EQ(b, a + 6 * MIB);
        give(a, 6 * MIB);
        context_sync(NULL);
        gr_fence_close(context);
        gr_fence_poll(context);
        gr_pool_trim(context, UINT64_MAX / 2);
        GR_CHECK_EQ(device()->charged_bytes, 8 * MIB);
        GR_CHECK_EQ(device()->pinned_bytes, 4 * MIB);
        give(b, 4 * MIB);
        settle();
        end();
}

static void test_threads(enum gr_pool_kind pool, enum gr_reuse reuse)
{
        struct walk walks[THREADS];
        pthread_t threads[THREADS];

        begin(pool, reuse);
        gpu.lazy = 3;
        atomic_store(&context->streams, 4);
        atomic_store(&device()->hard_bytes, 512 * MIB);
        for (unsigned i = 0; i < THREADS; i++) {
                walks[i] = (struct walk){.seed = 77 + i, .steps = 1500};
                GR_CHECK_EQ(pthread_create(&threads[i], NULL, walk, &walks[i]), 0);
        }
        for (unsigned i = 0; i < THREADS; i++)
                pthread_join(threads[i], NULL);
        settle();
        end();
}

static void test_all(void)
{
        test_fence();
        test_misuse();
        test_exported();
        test_drop();
        test_decay();
        test_auto();
        for (unsigned streams = 0; streams < 3; streams += 2) {
                test_random(GR_POOL_SPLIT, GR_REUSE_AUTO, GR_UNLIMITED, streams);
                test_random(GR_POOL_SPLIT, GR_REUSE_POLL, 200 * MIB, streams);
                test_random(GR_POOL_SPLIT, GR_REUSE_BARRIER, 100 * MIB, streams);
                test_random(GR_POOL_AUTO, GR_REUSE_AUTO, 300 * MIB, streams);
        }
        test_random(GR_POOL_SPLIT, GR_REUSE_SYNC, GR_UNLIMITED, 0);
        test_threads(GR_POOL_SPLIT, GR_REUSE_AUTO);
        test_threads(GR_POOL_SPLIT, GR_REUSE_POLL);
        test_threads(GR_POOL_AUTO, GR_REUSE_BARRIER);
}

int main(void)
{
        gpu.owner = calloc(PAGES, 1);
        gpu.last = calloc(UNITS, sizeof(*gpu.last));
        gpu.refs = calloc(PAGES, 1);
        gpu.vpages = calloc(AREAS * VPAGES, sizeof(*gpu.vpages));
        if (!gpu.owner || !gpu.last || !gpu.refs || !gpu.vpages)
                return 1;
        gr_log_set_level(GR_LOG_SILENT); /* the limit is met on purpose */
        test_cut_and_merge();
        test_growth();
        test_all();
        driver = &mapping_driver;
        test_heap();
        test_heap_fails();
        test_heap_moves(true);
        test_heap_moves(false);
        test_behind(false);
        test_behind(true);
        test_heap_trim();
        test_heap_exported();
        test_all();
        test_large_extents(); /* last: what it touches is cleared for every test after it */
        free(gpu.owner);
        free((void *)gpu.last);
        free(gpu.refs);
        free(gpu.vpages);
        return GR_CHECK_RESULT();
}
