#include "split_gpu.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utlist.h>

#include "check.h"
#include "reclaim/trim.h"

#define UNITS_OF_PAGE (GR_PAGE_BYTES / GPU_UNIT)
#define UNITS         (GPU_PAGES * UNITS_OF_PAGE)
#define VPAGES        (4 * GPU_PAGES)
#define AREAS         (2 * GPU_THREADS) /* two heaps */
#define GPU_LIVE      UINT32_MAX

/*
 * Only watches. Its atomics, one for each unit, would order threads for ThreadSanitizer that nothing else orders, and
 * take nine tenths of the test's time there (measured with gcc 12).
 */
#if defined(__clang__) && __has_attribute(disable_sanitizer_instrumentation)
#define WATCH __attribute__((noinline, disable_sanitizer_instrumentation)) /* inlined it would be */
#else
#define WATCH __attribute__((no_sanitize("thread")))
#endif

struct split_gpu_vpage {
        _Atomic uint32_t page;  /* behind it, plus 1; 0: none */
        _Atomic uint32_t used;  /* blocks in it that somebody has */
        _Atomic uint32_t freed; /* the last work on what was freed in it */
};

struct split_gpu gpu = {.lock = PTHREAD_MUTEX_INITIALIZER};
struct gr_core core;
struct gr_context *context;

static void bad(const char *what, uint64_t ptr)
{
        if (atomic_fetch_add(&gpu.bad, 1) < 10)
                fprintf(stderr, "%s at %#llx\n", what, (unsigned long long)ptr);
}

WATCH static struct split_gpu_vpage *vpage_of(uint64_t ptr)
{
        return &gpu.vpages[(ptr - GPU_VBASE) / GR_PAGE_BYTES];
}

/* The unit of memory behind ptr. */
WATCH static size_t unit_of(uint64_t ptr)
{
        uint32_t page;

        if (ptr < GPU_VBASE)
                return (size_t)((ptr - GPU_BASE) / GPU_UNIT);
        page = atomic_load(&vpage_of(ptr)->page);
        if (page == 0)
                bad("no memory", ptr);
        return (size_t)(((page ? page - 1 : 0) * GR_PAGE_BYTES + ptr % GR_PAGE_BYTES) / GPU_UNIT);
}

/* Somebody has, or no longer has, the block there. */
WATCH static void mark_addresses(uint64_t ptr, size_t bytes, uint32_t used, uint32_t work)
{
        for (uint64_t at = ptr / GR_PAGE_BYTES * GR_PAGE_BYTES; ptr >= GPU_VBASE && at < ptr + bytes;
             at += GR_PAGE_BYTES) {
                struct split_gpu_vpage *vpage = vpage_of(at);
                uint32_t seen = atomic_load(&vpage->freed);

                while (seen < work && !atomic_compare_exchange_weak(&vpage->freed, &seen, work))
                        ;
                atomic_fetch_add(&vpage->used, used);
        }
}

/* Nobody has a unit of the page of memory, which is or was at ptr, and the work on it is done. */
WATCH static void check_idle(size_t page, uint32_t done, uint64_t ptr)
{
        for (size_t i = 0; i < UNITS_OF_PAGE; i++) {
                uint32_t last = atomic_load(&gpu.last[page * UNITS_OF_PAGE + i]);

                if (last == GPU_LIVE)
                        bad("given back while somebody has it", ptr + i * GPU_UNIT);
                else if (last > done)
                        bad("given back while in use", ptr + i * GPU_UNIT);
        }
}

WATCH static void mark_taken(uint64_t ptr, size_t bytes, uint32_t ready)
{
        for (uint64_t at = ptr; at < ptr + bytes; at += GPU_UNIT) {
                uint32_t last = atomic_exchange(&gpu.last[unit_of(at)], GPU_LIVE);

                if (last == GPU_LIVE)
                        bad("handed out twice", at);
                else if (last > ready)
                        bad("handed out before its fence", at);
        }
        mark_addresses(ptr, bytes, 1, 0);
}

WATCH static void mark_given(uint64_t ptr, size_t bytes, uint32_t work)
{
        for (uint64_t at = ptr; at < ptr + bytes; at += GPU_UNIT)
                atomic_store(&gpu.last[unit_of(at)], work);
        mark_addresses(ptr, bytes, UINT32_MAX, work);
}

WATCH static void mark_unused(size_t units)
{
        for (size_t i = 0; i < units; i++)
                atomic_store_explicit(&gpu.last[i], 0, memory_order_relaxed);
}

static void before(enum gpu_call call)
{
        if (gpu_before[call])
                gpu_before[call]();
}

static int mem_alloc(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        size_t pages = (bytes + GR_PAGE_BYTES - 1) / GR_PAGE_BYTES, run = 0;
        int rc = -ENOMEM;

        (void)handle;
        before(GPU_ALLOC);
        pthread_mutex_lock(&gpu.lock);
        if (gr_is_small(bytes) && gpu.slab_next % GR_PAGE_BYTES &&
            gpu.slab_next % GR_PAGE_BYTES + bytes <= GR_PAGE_BYTES) {
                *ret_ptr = gpu.slab_next;
                gpu.slab_next += (bytes + GPU_UNIT - 1) / GPU_UNIT * GPU_UNIT;
                rc = 0;
        }
        for (size_t i = 0; i < GPU_PAGES && rc; i++) {
                run = gpu.owner[i] ? 0 : run + 1;
                if (run < pages)
                        continue;
                if (gpu.top < i + 1)
                        gpu.top = i + 1;
                i = i + 1 - pages;
                memset(&gpu.owner[i], 2, pages);
                gpu.owner[i] = gr_is_small(bytes) ? 3 : 1;
                *ret_ptr = GPU_BASE + i * GR_PAGE_BYTES;
                if (gr_is_small(bytes))
                        gpu.slab_next = *ret_ptr + (bytes + GPU_UNIT - 1) / GPU_UNIT * GPU_UNIT;
                rc = 0;
        }
        pthread_mutex_unlock(&gpu.lock);
        return rc;
}

/* Small blocks' pages stay: that only wastes. */
static void give_back(uint64_t ptr, uint32_t done)
{
        size_t page = (size_t)((ptr - GPU_BASE) / GR_PAGE_BYTES);

        pthread_mutex_lock(&gpu.lock);
        if (gpu.owner[page] == 0 || gpu.owner[page] == 2)
                bad("no allocation begins", ptr);
        if (gpu.owner[page] == 1)
                do {
                        check_idle(page, done, GPU_BASE + page * GR_PAGE_BYTES);
                        gpu.owner[page++] = 0;
                } while (page < GPU_PAGES && gpu.owner[page] == 2);
        pthread_mutex_unlock(&gpu.lock);
}

static int mem_reserve(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        (void)handle;
        before(GPU_RESERVE);
        if (gpu.reserve_refused)
                return -ENOMEM;
        pthread_mutex_lock(&gpu.lock);
        /* Threads may open a heap at once; all but one give theirs up. */
        if (bytes > VPAGES * GR_PAGE_BYTES || gpu.areas == AREAS) {
                bad("more addresses than there are", bytes);
                pthread_mutex_unlock(&gpu.lock);
                return -ENOMEM;
        }
        *ret_ptr = GPU_VBASE + gpu.areas++ * VPAGES * GR_PAGE_BYTES;
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
                bad("memory that nobody holds is given up", GPU_BASE + page * GR_PAGE_BYTES);
        else if (--gpu.refs[page] == 0)
                gpu.owner[page] = 0;
        pthread_mutex_unlock(&gpu.lock);
}

static int mem_map(void *handle, int ordinal, uint64_t ptr, size_t bytes, uint64_t *memory)
{
        bool fails, fresh = *memory == 0;

        (void)ordinal;
        before(GPU_MAP);
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
                size_t page = (*memory - GPU_BASE) / GR_PAGE_BYTES + i;

                if (gpu.owner[page] != (i == 0 ? 1 : 2))
                        bad("not the memory of a handle, or not all of it", ptr);
                gpu.refs[page] += fresh ? 2 : 1;
                if (atomic_exchange(&gpu.vpages[(ptr - GPU_VBASE) / GR_PAGE_BYTES + i].page, (uint32_t)page + 1))
                        bad("mapped twice", ptr + i * GR_PAGE_BYTES);
        }
        pthread_mutex_unlock(&gpu.lock);
        return 0;
}

static int mem_unmap(void *handle, uint64_t ptr, size_t bytes, uint64_t memory)
{
        uint32_t done = atomic_load(&gpu.done);

        (void)handle;
        before(GPU_UNMAP);
        if (gpu.unmap_refused)
                return -EIO;
        for (uint64_t at = ptr; at < ptr + bytes; at += GR_PAGE_BYTES) {
                struct split_gpu_vpage *vpage = vpage_of(at);
                uint32_t page = atomic_load(&vpage->page);

                if (page == 0 || (memory && page != (memory + (at - ptr) - GPU_BASE) / GR_PAGE_BYTES + 1))
                        bad("other memory is unmapped than was mapped", at);
                if (atomic_load(&vpage->used))
                        bad("unmapped while somebody has it", at);
                if (atomic_load(&vpage->freed) > done)
                        bad("unmapped while in use", at);
                if (memory && page)
                        check_idle(page - 1, done, at);
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
        gr_budget_update_peak(gpu_device()); /* as another thread may while the driver is at it */
        *ret_done = count;
        return 0;
}

static int mem_info(void *handle, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
        (void)handle;
        before(GPU_INFO);
        if (gpu.info_refused)
                return -EIO;
        *ret_free_bytes = 0;
        pthread_mutex_lock(&gpu.lock);
        for (size_t i = 0; i < GPU_PAGES; i++)
                *ret_free_bytes += gpu.owner[i] ? 0 : GR_PAGE_BYTES;
        pthread_mutex_unlock(&gpu.lock);
        *ret_total_bytes = GPU_PAGES * GR_PAGE_BYTES;
        return 0;
}

struct event {
        uint32_t submitted; /* first: who asks has a pointer to it */
        struct event *prev, *next;
};

static struct event *events; /* all that there are: some end with their context; guarded by gpu.lock */

static int event_create(void *handle, void **ret_event)
{
        struct event *event = calloc(1, sizeof(*event));

        (void)handle;
        if (!event)
                return -ENOMEM;
        pthread_mutex_lock(&gpu.lock);
        DL_APPEND(events, event);
        pthread_mutex_unlock(&gpu.lock);
        *ret_event = event;
        return 0;
}

static void event_destroy(void *handle, void *event)
{
        (void)handle;
        pthread_mutex_lock(&gpu.lock);
        DL_DELETE(events, (struct event *)event);
        pthread_mutex_unlock(&gpu.lock);
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

void gpu_capture(bool begins)
{
        if (begins) {
                gr_gate_begin_enter(&core.gate);
                atomic_fetch_add(&gpu.captures, 1);
                gr_gate_begin_leave(&core.gate, true);
        } else {
                atomic_fetch_sub(&gpu.captures, 1);
                gr_gate_end(&core.gate);
        }
}

/* A record, wait or sync would destroy a capture. */
static void check_capture(void)
{
        if (atomic_load(&gpu.captures) > 0)
                bad("a capture destroyed", 0);
}

static int context_record(void *handle, void *event)
{
        (void)handle;
        before(GPU_RECORD);
        check_capture();
        *(uint32_t *)event = atomic_load(&gpu.submitted);
        return 0;
}

static int context_wait(void *handle, void *event)
{
        (void)handle;
        check_capture();
        raise_to(&gpu.covered, *(uint32_t *)event);
        return 0;
}

static int context_sync(void *handle)
{
        (void)handle;
        check_capture();
        gpu_sync();
        return 0;
}

static int context_drain(void *handle)
{
        (void)handle;
        gpu_sync();
        return 0;
}

static int trim_pools(void *handle, int device)
{
        (void)handle, (void)device;
        return 0;
}

static uint64_t now_ns(void)
{
        before(GPU_CLOCK);
        return atomic_fetch_add(&gpu.now_ns, 1000);
}

void gpu_sync(void)
{
        raise_to(&gpu.done, atomic_load(&gpu.submitted));
}

void gpu_sleep(uint64_t ns)
{
        atomic_fetch_add(&gpu.now_ns, ns);
        gpu_sync(); /* a long time for a GPU */
}

#define COMMON_OPERATIONS                                                                                              \
        .mem_alloc = mem_alloc, .mem_free = mem_free, .mem_release = mem_release, .mem_info = mem_info,                \
        .event_create = event_create, .event_destroy = event_destroy, .event_query = event_query,                      \
        .context_record = context_record, .context_wait = context_wait, .context_sync = context_sync,                  \
        .context_drain = context_drain, .trim_pools = trim_pools, .now_ns = now_ns, .sleep_ns = gpu_sleep

static const struct gr_driver plain_driver = {COMMON_OPERATIONS};
static const struct gr_driver mapping_driver = {COMMON_OPERATIONS, .mem_reserve = mem_reserve,
                                                .mem_unreserve = mem_unreserve, .mem_map = mem_map,
                                                .mem_unmap = mem_unmap};
static const struct gr_driver *driver;

bool gpu_open(bool mapping)
{
        driver = mapping ? &mapping_driver : &plain_driver;
        gpu.owner = calloc(GPU_PAGES, 1);
        gpu.last = calloc(UNITS, sizeof(*gpu.last));
        gpu.refs = calloc(GPU_PAGES, 1);
        gpu.vpages = calloc(AREAS * VPAGES, sizeof(*gpu.vpages));
        return gpu.owner && gpu.last && gpu.refs && gpu.vpages;
}

void gpu_close(void)
{
        free(gpu.owner);
        free((void *)gpu.last);
        free(gpu.refs);
        free(gpu.vpages);
}

void gpu_begin(enum gr_pool_kind pool, enum gr_reuse reuse)
{
        struct gr_config config = {.pool = pool, .reuse = reuse};

        gpu.submitted = gpu.done = gpu.covered = 0;
        gpu.now_ns = 1;
        gpu.lazy = 0;
        gpu.slab_next = GPU_BASE;
        gpu.handles = gpu.reserved = gpu.areas = gpu.moves = 0;
        gpu.map_fails = 0;
        gpu.no_moves = gpu.unmap_refused = gpu.reserve_refused = gpu.info_refused = false;
        memset(gpu.refs, 0, GPU_PAGES);
        memset(gpu.vpages, 0, AREAS * VPAGES * sizeof(*gpu.vpages));
        memset(gpu.owner, 0, GPU_PAGES);
        mark_unused(gpu.top * UNITS_OF_PAGE);
        gr_core_init(&core, driver, &config);
        context = gr_context_add(&core, GPU_CONTEXT, 0);
}

void gpu_end(void)
{
        gr_core_destroy(&core);
        while (events)
                event_destroy(NULL, events);
        GR_CHECK_EQ(atomic_exchange(&gpu.bad, 0), 0);
}

void gpu_settle(void)
{
        uint64_t left;

        gpu_sync();
        gr_fence_sync(&context->fence);
        gr_trim(context, UINT64_MAX / 2);
        left = gpu_device()->reserved_bytes;
        if (core.config.pool == GR_POOL_SPLIT) {
                GR_CHECK_EQ(left, 0);
                GR_CHECK_EQ(gpu_free_bytes(), GPU_PAGES * GR_PAGE_BYTES);
        }
        GR_CHECK_EQ(gr_budget_cached(gpu_device()), 0);
        GR_CHECK_EQ(gpu_device()->stranded_bytes, 0);
        GR_CHECK_EQ(gpu.handles, 0);
        GR_CHECK_EQ(context->split.surplus_bytes, 0);
        GR_CHECK_EQ(context->split.free_count, 0);
}

struct gr_device *gpu_device(void)
{
        return context->device;
}

uint64_t gpu_take(size_t bytes)
{
        uint64_t ptr;
        uint32_t ready;

        if (gr_pool_alloc(context, bytes, &ptr))
                return 0;
        ready = atomic_load(&gpu.done) > atomic_load(&gpu.covered) ? atomic_load(&gpu.done) : atomic_load(&gpu.covered);
        if (ptr % GPU_UNIT)
                bad("not aligned", ptr);
        mark_taken(ptr, bytes, ready);
        return ptr;
}

void gpu_give(uint64_t ptr, size_t bytes)
{
        uint32_t work = atomic_fetch_add(&gpu.submitted, 1) + 1;

        mark_given(ptr, bytes, work);
        if (gr_pool_free(&core, ptr))
                bad("not freed", ptr);
}

void gpu_forget(void)
{
        gpu_sync();
        mark_unused(UNITS);
        for (size_t i = 0; i < AREAS * VPAGES; i++)
                atomic_store(&gpu.vpages[i].used, 0);
}

uint64_t gpu_free_bytes(void)
{
        uint64_t free_bytes = 0, total_bytes;

        mem_info(NULL, &free_bytes, &total_bytes);
        for (size_t i = 0; i < GPU_PAGES; i++)
                free_bytes += gpu.owner[i] == 3 ? GR_PAGE_BYTES : 0;
        return free_bytes;
}

uint64_t gpu_random(uint64_t *seed)
{
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        return *seed;
}

unsigned gpu_wakes;
void (*gpu_before[GPU_CALLS])(void);

void gpu_wake(struct gr_core *woken)
{
        (void)woken;
        gpu_wakes++;
}
