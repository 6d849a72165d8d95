#include "scripted.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

#define PAGE         ((uint64_t)2 << 20)
#define PAGES        (1u << 14)
#define BASE         SG_BASE
#define AREA_PAGES   (2 * PAGES) /* of addresses, in each reservation */
#define AREAS        8u
#define SLOT         512u
#define SLOTS        (unsigned)(PAGE / SLOT)
#define SMALL_MAX    (PAGE / 2)
#define CONTEXTS_MAX 256
#define LOG_BYTES    8192
#define INVALID      gr_driver_error(1)
#define LIVE         UINT64_MAX /* instead of a time: the program has it */

/*
 * Only watches. To order threads for ThreadSanitizer, and to look at each access, would take nine tenths of a test's
 * time there (measured with gcc 12).
 */
#if defined(__clang__) && __has_attribute(disable_sanitizer_instrumentation)
#define WATCH __attribute__((noinline, disable_sanitizer_instrumentation)) /* inlined it would be */
#else
#define WATCH __attribute__((no_sanitize("thread")))
#endif

struct context {
        bool alive;
        int device;
        uint64_t tail_ns[SG_STREAMS]; /* where the stream's work ends */
        uint64_t barrier_ns;          /* work submitted now starts no earlier */
};

struct event {
        struct context *context;
        struct event *next;
        uint64_t done_ns;
        bool alive;
};

struct allocation {
        UT_hash_handle hh;
        uint64_t ptr; /* key */
        size_t bytes;
        struct context *context;
};

/* What the program has. */
struct block {
        UT_hash_handle hh;
        uint64_t ptr; /* key */
        size_t bytes;
        uint64_t former_ns; /* when the work of all former owners has ended */
        uint64_t own_ns;    /* and that of this one */
};

/* When the last work on a page of memory ends, or LIVE: the later one of what is said of the page and of the slot. */
struct page_use {
        uint64_t last_ns;
        uint64_t *slots; /* NULL: blocks had it as a whole */
};

/* A page of addresses that memory can be mapped behind. */
struct address {
        unsigned page;    /* behind it, plus 1; 0: none */
        unsigned used;    /* blocks in it that the program has */
        uint64_t last_ns; /* when the last work on what was freed in it ends */
};

struct slab {
        unsigned used;
        int device;
        uint8_t slots[SLOTS];
};

struct fault {
        unsigned skip, count;
        int rc;
};

static struct {
        pthread_mutex_t lock;
        uint64_t now_ns, tick_ns;
        bool by_hand;
        uint64_t gpu_ns, lazy_ns; /* by hand: how far the GPU is, and how much further each question lets it get */
        uint64_t capacity_bytes;
        uint64_t used_bytes[SG_DEVICES], others_bytes[SG_DEVICES], cache_bytes[SG_DEVICES];
        struct context contexts[CONTEXTS_MAX];
        unsigned context_count;
        struct event *events;
        struct allocation *allocations;
        struct block *blocks;
        struct page_use uses[PAGES];
        uint8_t pages[PAGES]; /* 0 free, 1 the first one of an allocation, 2 a later one */
        uint8_t cards[PAGES]; /* of mapped memory: the device */
        uint8_t refs[PAGES];  /* how many mappings of the page there are, and one for its handle */
        struct address addresses[AREAS * AREA_PAGES];
        unsigned areas, reserved, handles;
        bool area_used[AREAS];
        struct slab *slabs[PAGES];
        struct fault faults[SG_OP_COUNT];
        unsigned calls[SG_OP_COUNT];
        int captures;
        uint64_t misuses;
        char log[LOG_BYTES];
        size_t log_bytes;
} sg = {.lock = PTHREAD_MUTEX_INITIALIZER};

__attribute__((format(printf, 1, 2))) static void misuse(const char *format, ...)
{
        va_list args;

        if (sg.misuses++ >= 10)
                return; /* the count says enough */
        va_start(args, format);
        fputs("misuse: ", stderr);
        vfprintf(stderr, format, args);
        fputc('\n', stderr);
        va_end(args);
}

void (*sg_before[SG_CALLS])(void);

static void before(unsigned call)
{
        if (sg_before[call])
                sg_before[call]();
}

/* With the lock held: the planned error, or 0. */
static int count(enum sg_op op)
{
        static const char letters[] = {
#define SG_OP_LETTER(id, letter) letter,
                SG_OPS(SG_OP_LETTER)
#undef SG_OP_LETTER
        };
        struct fault *fault = &sg.faults[op];

        sg.calls[op]++;
        if (sg.log_bytes < LOG_BYTES - 1)
                sg.log[sg.log_bytes++] = letters[op];
        if (fault->skip > 0) {
                fault->skip--;
                return 0;
        }
        if (fault->count > 0) {
                fault->count--;
                return fault->rc;
        }
        return 0;
}

/* Enters the operation with the lock held; the planned error, or 0. */
static int enter(enum sg_op op)
{
        before(op);
        pthread_mutex_lock(&sg.lock);
        sg.now_ns += sg.tick_ns;
        return count(op);
}

static int leave(int rc)
{
        pthread_mutex_unlock(&sg.lock);
        return rc;
}

static uint64_t later(uint64_t a, uint64_t b)
{
        return a > b ? a : b;
}

static uint64_t work_end(const struct context *context)
{
        uint64_t end = 0;

        for (unsigned i = 0; i < SG_STREAMS; i++)
                end = later(end, context->tail_ns[i]);
        return end;
}

/* How far the GPU is, and that it gets as far. */
static uint64_t gpu_ns(void)
{
        return sg.by_hand ? sg.gpu_ns : sg.now_ns;
}

static void gpu_reach(uint64_t ns)
{
        uint64_t *clock = sg.by_hand ? &sg.gpu_ns : &sg.now_ns;

        *clock = later(*clock, ns);
}

static uint64_t all_work_end(void)
{
        uint64_t end = 0;

        for (unsigned i = 0; i < sg.context_count; i++)
                end = later(end, work_end(&sg.contexts[i]));
        return end;
}

static struct block *find_block(uint64_t ptr)
{
        struct block *block;

        HASH_FIND(hh, sg.blocks, &ptr, sizeof(ptr), block);
        return block;
}

static void block_drop(struct block *block)
{
        HASH_DELETE(hh, sg.blocks, block);
        free(block);
}

static struct address *address_of(uint64_t ptr)
{
        return &sg.addresses[(ptr - SG_VBASE) / PAGE];
}

/* The page of memory at an address; PAGES where there is none. */
WATCH static unsigned page_at(uint64_t ptr)
{
        unsigned page = ptr >= SG_VBASE ? address_of(ptr)->page - 1 : (unsigned)((ptr - BASE) / PAGE);

        if (page < PAGES && sg.pages[page])
                return page;
        misuse("no memory at 0x%" PRIx64, ptr);
        return PAGES;
}

/* When the last work on a part of the page ends, from offset up to end; LIVE where the program has some of it. */
WATCH static uint64_t page_last(unsigned page, uint64_t offset, uint64_t end)
{
        const struct page_use *use = &sg.uses[page];
        uint64_t last = use->last_ns;

        for (uint64_t i = offset / SLOT; use->slots && i < (end + SLOT - 1) / SLOT; i++)
                last = later(last, use->slots[i]);
        return last;
}

WATCH static uint64_t last_use(uint64_t ptr, size_t bytes)
{
        uint64_t last = 0;

        for (uint64_t at = ptr, next; at < ptr + bytes; at = next) {
                unsigned page = page_at(at);

                next = at - at % PAGE + PAGE < ptr + bytes ? at - at % PAGE + PAGE : ptr + bytes;
                if (page < PAGES)
                        last = later(last, page_last(page, at % PAGE, at % PAGE + next - at));
        }
        return last;
}

/* The program has the block from now on (LIVE), or has it no longer, and work on it ends then. */
WATCH static void mark_use(uint64_t ptr, size_t bytes, uint64_t last_ns)
{
        for (uint64_t at = ptr, next; at < ptr + bytes; at = next) {
                unsigned page = page_at(at);
                struct page_use *use = &sg.uses[page % PAGES];

                next = at - at % PAGE + PAGE < ptr + bytes ? at - at % PAGE + PAGE : ptr + bytes;
                if (page < PAGES && next - at == PAGE) {
                        use->last_ns = last_ns;
                        if (use->slots)
                                memset(use->slots, 0, SLOTS * sizeof(*use->slots));
                } else if (page < PAGES) {
                        if (!use->slots)
                                use->slots = calloc(SLOTS, sizeof(*use->slots));
                        for (uint64_t i = at % PAGE / SLOT; i <= (next - 1) % PAGE / SLOT; i++)
                                use->slots[i] = last_ns;
                }
                if (at >= SG_VBASE) {
                        address_of(at)->used += last_ns == LIVE ? 1 : UINT_MAX;
                        if (last_ns != LIVE)
                                address_of(at)->last_ns = later(address_of(at)->last_ns, last_ns);
                }
        }
}

/* The driver takes the memory, which is or was at ptr. */
static void check_idle(uint64_t last_ns, const char *what, uint64_t ptr)
{
        if (last_ns == LIVE)
                misuse("%s of 0x%" PRIx64 ", which the program has", what, ptr);
        else if (last_ns > gpu_ns())
                misuse("%s of 0x%" PRIx64 ", which work still uses", what, ptr);
}

static void forget_use(unsigned page)
{
        free(sg.uses[page].slots);
        sg.uses[page] = (struct page_use){0};
}

static struct allocation *find(uint64_t ptr)
{
        struct allocation *allocation;

        HASH_FIND(hh, sg.allocations, &ptr, sizeof(ptr), allocation);
        return allocation;
}

static void check_context(const struct context *context, const char *what)
{
        if (!context || !context->alive)
                misuse("%s in a context that is gone", what);
}

static void check_captures(const char *what)
{
        if (sg.captures > 0)
                misuse("%s during a capture", what);
}

/* The first of count free pages in a row; PAGES where there are none. Addresses are reused as soon as they can be. */
static unsigned pages_find(unsigned count)
{
        unsigned run = 0;

        for (unsigned i = 0; i < PAGES; i++) {
                run = sg.pages[i] ? 0 : run + 1;
                if (run == count)
                        return i + 1 - count;
        }
        return PAGES;
}

static uint64_t free_bytes(int device)
{
        uint64_t taken = sg.used_bytes[device] + sg.others_bytes[device] + sg.cache_bytes[device];

        return sg.capacity_bytes > taken ? sg.capacity_bytes - taken : 0;
}

static uint64_t pages_take(int device, unsigned count)
{
        unsigned first;

        if (count * PAGE > free_bytes(device))
                return 0;
        first = pages_find(count);
        if (first == PAGES)
                return 0;
        memset(&sg.pages[first], 2, count);
        sg.pages[first] = 1;
        sg.used_bytes[device] += count * PAGE;
        return BASE + first * PAGE;
}

static void pages_give(int device, uint64_t ptr, unsigned count)
{
        for (unsigned page = (unsigned)((ptr - BASE) / PAGE), i = 0; i < count; i++) {
                sg.pages[page + i] = 0;
                forget_use(page + i);
        }
        sg.used_bytes[device] -= count * PAGE;
}

static uint64_t slab_fit(unsigned page, unsigned count)
{
        struct slab *slab = sg.slabs[page];
        unsigned run = 0;

        for (unsigned i = 0; i < SLOTS; i++) {
                run = slab->slots[i] ? 0 : run + 1;
                if (run == count) {
                        memset(&slab->slots[i + 1 - count], 1, count);
                        slab->used += count;
                        return BASE + page * PAGE + (uint64_t)(i + 1 - count) * SLOT;
                }
        }
        return 0;
}

static uint64_t small_take(int device, size_t bytes)
{
        unsigned count = (unsigned)((bytes + SLOT - 1) / SLOT), page;
        uint64_t ptr = 0;

        for (page = 0; page < PAGES && !ptr; page++)
                if (sg.slabs[page] && sg.slabs[page]->device == device)
                        ptr = slab_fit(page, count);
        if (ptr)
                return ptr;
        ptr = pages_take(device, 1);
        if (!ptr)
                return 0;
        page = (unsigned)((ptr - BASE) / PAGE);
        sg.slabs[page] = calloc(1, sizeof(struct slab));
        sg.slabs[page]->device = device;
        return slab_fit(page, count);
}

static void memory_give(struct allocation *allocation)
{
        unsigned page = (unsigned)((allocation->ptr - BASE) / PAGE);
        int device = allocation->context->device;
        struct slab *slab = sg.slabs[page];
        struct block *block = find_block(allocation->ptr);
        unsigned count;

        if (block)
                block_drop(block);
        HASH_DELETE(hh, sg.allocations, allocation);
        if (slab) {
                count = (unsigned)((allocation->bytes + SLOT - 1) / SLOT);
                mark_use(allocation->ptr, allocation->bytes, 0);
                memset(&slab->slots[(allocation->ptr - BASE) % PAGE / SLOT], 0, count);
                slab->used -= count;
                if (slab->used == 0) {
                        free(slab);
                        sg.slabs[page] = NULL;
                        pages_give(device, allocation->ptr & ~(PAGE - 1), 1);
                }
        } else {
                pages_give(device, allocation->ptr, (unsigned)((allocation->bytes + PAGE - 1) / PAGE));
        }
        free(allocation);
}

static int mem_alloc(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        struct context *context = handle;
        struct allocation *allocation;
        int rc = enter(SG_MEM_ALLOC);
        uint64_t ptr;

        if (rc)
                return leave(rc);
        check_context(context, "an allocation");
        if (bytes == 0)
                return leave(INVALID);
        if (bytes > (uint64_t)PAGES * PAGE)
                return leave(-ENOMEM);
        ptr = bytes <= SMALL_MAX ? small_take(context->device, bytes)
                                 : pages_take(context->device, (unsigned)((bytes + PAGE - 1) / PAGE));
        if (!ptr)
                return leave(-ENOMEM);
        allocation = calloc(1, sizeof(*allocation));
        if (!allocation)
                return leave(-ENOMEM);
        allocation->ptr = ptr;
        allocation->bytes = bytes;
        allocation->context = context;
        HASH_ADD(hh, sg.allocations, ptr, sizeof(allocation->ptr), allocation);
        *ret_ptr = ptr;
        return leave(0);
}

static int mem_free(uint64_t ptr)
{
        struct allocation *allocation;
        int rc = enter(SG_MEM_FREE);

        if (rc)
                return leave(rc);
        allocation = find(ptr);
        if (!allocation) {
                misuse("free of 0x%" PRIx64 ", which is no allocation", ptr);
                return leave(INVALID);
        }
        gpu_reach(work_end(allocation->context)); /* blocks, as the driver's own does */
        if (last_use(ptr, allocation->bytes) == LIVE)
                misuse("free of 0x%" PRIx64 ", which the program has", ptr);
        memory_give(allocation);
        return leave(0);
}

static int mem_release(void *handle, const uint64_t *ptrs, size_t count, size_t *ret_done)
{
        int rc = enter(SG_MEM_RELEASE);

        *ret_done = 0;
        if (rc)
                return leave(rc);
        check_context(handle, "a release");
        for (size_t i = 0; i < count; i++) {
                struct allocation *allocation = find(ptrs[i]);

                if (!allocation) {
                        misuse("release of 0x%" PRIx64 ", which is no allocation", ptrs[i]);
                        return leave(INVALID);
                }
                if (allocation->context != handle)
                        misuse("release of 0x%" PRIx64 " in a foreign context", ptrs[i]);
                check_idle(last_use(ptrs[i], allocation->bytes), "release", ptrs[i]);
                memory_give(allocation);
                ++*ret_done;
        }
        return leave(0);
}

static int mem_reserve(void *handle, size_t bytes, uint64_t *ret_ptr)
{
        size_t area = 0;
        int rc = enter(SG_MEM_RESERVE);

        if (rc)
                return leave(rc);
        check_context(handle, "a reservation");
        /* Given up ones come again only when all others are used: threads may open an expandable segment at once */
        if (sg.areas < AREAS) {
                area = sg.areas++;
        } else {
                while (area < AREAS && sg.area_used[area])
                        area++;
        }
        if (bytes > AREA_PAGES * PAGE || area == AREAS) {
                misuse("more addresses than there are: %zu", bytes);
                return leave(-ENOMEM);
        }
        sg.area_used[area] = true;
        *ret_ptr = SG_VBASE + area * AREA_PAGES * PAGE;
        sg.reserved++;
        return leave(0);
}

static void mem_unreserve(uint64_t ptr, size_t bytes)
{
        pthread_mutex_lock(&sg.lock);
        sg.reserved--;
        sg.area_used[(ptr - SG_VBASE) / (AREA_PAGES * PAGE)] = false;
        for (uint64_t at = ptr; at < ptr + bytes; at += PAGE)
                if (address_of(at)->page)
                        misuse("addresses given up with memory behind them: 0x%" PRIx64, at);
        pthread_mutex_unlock(&sg.lock);
}

static int mem_map(void *handle, int device, uint64_t ptr, size_t bytes, uint64_t *memory)
{
        bool fresh = *memory == 0;
        int rc = enter(SG_MEM_MAP);

        if (!rc && !fresh)
                rc = count(SG_MEM_REMAP);
        if (!rc && fresh && !(*memory = pages_take(device, (unsigned)(bytes / PAGE))))
                rc = -ENOMEM;
        if (rc)
                return leave(rc);
        check_context(handle, "a mapping");
        if (bytes == 0 || (bytes | ptr) % PAGE)
                misuse("no whole pages are mapped at 0x%" PRIx64, ptr);
        sg.handles += fresh;
        for (unsigned i = 0, page = (unsigned)((*memory - BASE) / PAGE); i < bytes / PAGE; i++, page++) {
                if (sg.pages[page] != (i == 0 ? 1 : 2))
                        misuse("not the memory of a handle, or not all of it: 0x%" PRIx64, ptr);
                sg.cards[page] = (uint8_t)device;
                sg.refs[page] += fresh ? 2 : 1;
                if (address_of(ptr + i * PAGE)->page)
                        misuse("0x%" PRIx64 " mapped twice", ptr + i * PAGE);
                *address_of(ptr + i * PAGE) = (struct address){.page = page + 1};
        }
        return leave(0);
}

/* One reason less to keep the page of memory: a mapping or its handle. With the last it is free. */
static void page_drop(unsigned page)
{
        if (sg.refs[page] == 0)
                misuse("memory that nobody holds is given up: page %u", page);
        else if (--sg.refs[page] == 0)
                pages_give(sg.cards[page], BASE + page * PAGE, 1);
}

static int mem_unmap(void *handle, uint64_t ptr, size_t bytes, uint64_t memory)
{
        int rc = enter(SG_MEM_UNMAP);

        (void)handle; /* NULL once the context is gone */
        if (rc)
                return leave(rc);
        for (uint64_t at = ptr; at < ptr + bytes; at += PAGE) {
                struct address address = *address_of(at);
                unsigned page = address.page - 1;

                if (!address.page || (memory && page != (memory + (at - ptr) - BASE) / PAGE)) {
                        misuse("other memory is unmapped than was mapped at 0x%" PRIx64, at);
                        continue;
                }
                check_idle(address.used ? LIVE : address.last_ns, "unmapping", at);
                if (memory)
                        check_idle(page_last(page, 0, PAGE), "unmapping", at);
                *address_of(at) = (struct address){0};
                page_drop(page);
                if (memory)
                        page_drop(page);
        }
        sg.handles -= memory != 0;
        return leave(0);
}

static int mem_info(void *handle, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
        struct context *context = handle;
        int rc = enter(SG_MEM_INFO);

        if (rc)
                return leave(rc);
        check_context(context, "a question");
        *ret_free_bytes = free_bytes(context->device);
        *ret_total_bytes = sg.capacity_bytes;
        return leave(0);
}

static int event_create(void *handle, void **ret_event)
{
        struct event *event;
        int rc = enter(SG_EVENT_CREATE);

        if (rc)
                return leave(rc);
        check_context(handle, "an event's creation");
        event = calloc(1, sizeof(*event));
        event->context = handle;
        event->alive = true;
        event->next = sg.events;
        sg.events = event;
        *ret_event = event;
        return leave(0);
}

static void check_event(const struct event *event, const char *what)
{
        if (!event->alive || !event->context->alive)
                misuse("%s of an event that is gone", what);
}

static void event_destroy(void *handle, void *handle_of_event)
{
        struct event *event = handle_of_event;

        enter(SG_EVENT_DESTROY);
        check_event(event, "destruction");
        if (event->context != handle)
                misuse("destruction of an event in a foreign context");
        event->alive = false;
        leave(0);
}

static int event_query(void *handle)
{
        struct event *event = handle;
        int rc = enter(SG_EVENT_QUERY);

        check_event(event, "query");
        if (sg.lazy_ns)
                gpu_reach(sg.gpu_ns + sg.lazy_ns < all_work_end() ? sg.gpu_ns + sg.lazy_ns : all_work_end());
        return leave(rc ? rc : event->done_ns <= gpu_ns() ? 0 : -EAGAIN);
}

static int context_record(void *handle, void *handle_of_event)
{
        struct event *event = handle_of_event;
        int rc = enter(SG_CONTEXT_RECORD);

        check_event(event, "record");
        check_context(handle, "a record");
        check_captures("record");
        if (event->context != handle)
                misuse("record of an event in a foreign context");
        if (!rc)
                event->done_ns = work_end(handle);
        return leave(rc);
}

static int context_wait(void *handle, void *handle_of_event)
{
        struct context *context = handle;
        struct event *event = handle_of_event;
        int rc = enter(SG_CONTEXT_WAIT);

        check_event(event, "wait");
        check_context(context, "a wait");
        check_captures("wait");
        if (!rc)
                context->barrier_ns = later(context->barrier_ns, event->done_ns);
        return leave(rc);
}

static int context_sync(void *handle)
{
        int rc = enter(SG_CONTEXT_SYNC);

        check_context(handle, "a sync");
        check_captures("sync");
        if (!rc)
                gpu_reach(work_end(handle));
        return leave(rc);
}

static int context_drain(void *handle)
{
        int rc = enter(SG_CONTEXT_DRAIN);

        check_context(handle, "a drain");
        if (!rc)
                gpu_reach(work_end(handle));
        return leave(rc);
}

static void trim_pools(void *handle, int device)
{
        int rc = enter(SG_TRIM_POOLS);

        check_context(handle, "a trim");
        if (!rc)
                sg.cache_bytes[device] = 0;
        leave(rc);
}

static uint64_t now_ns(void)
{
        before(SG_CLOCK);
        if (sg.by_hand)
                sg_advance(1000);
        return sg_now_ns();
}

/* A long time for a GPU. */
static void sleep_ns(uint64_t ns)
{
        sg_advance(ns);
        if (sg.by_hand)
                sg_gpu_reach(UINT64_MAX);
}

#define COMMON_OPERATIONS                                                                                              \
        .mem_alloc = mem_alloc, .mem_free = mem_free, .mem_release = mem_release, .mem_info = mem_info,                \
        .event_create = event_create, .event_destroy = event_destroy, .event_query = event_query,                      \
        .context_sync = context_sync, .context_drain = context_drain, .trim_pools = trim_pools, .now_ns = now_ns,      \
        .sleep_ns = sleep_ns

const struct gr_driver sg_driver = {COMMON_OPERATIONS, .context_record = context_record, .context_wait = context_wait};
const struct gr_driver sg_old_driver = {COMMON_OPERATIONS};
const struct gr_driver sg_mapping_driver = {
        COMMON_OPERATIONS,          .context_record = context_record, .context_wait = context_wait,
        .mem_reserve = mem_reserve, .mem_unreserve = mem_unreserve,   .mem_map = mem_map,
        .mem_unmap = mem_unmap};

void sg_reset(uint64_t capacity_bytes)
{
        struct allocation *allocation, *tmp;
        struct event *event;

        while (sg.blocks)
                block_drop(sg.blocks);
        HASH_ITER (hh, sg.allocations, allocation, tmp) {
                memory_give(allocation);
        }
        for (unsigned page = 0; page < PAGES; page++)
                free(sg.uses[page].slots);
        memset(sg_before, 0, sizeof(sg_before));
        while ((event = sg.events)) {
                sg.events = event->next;
                free(event);
        }
        memset((char *)&sg + sizeof(sg.lock), 0, sizeof(sg) - sizeof(sg.lock));
        sg.now_ns = SG_FIRST_NS;
        sg.capacity_bytes = capacity_bytes;
}

void *sg_context_new(int device)
{
        struct context *context = NULL;

        pthread_mutex_lock(&sg.lock);
        if (sg.context_count < CONTEXTS_MAX) {
                context = &sg.contexts[sg.context_count++];
                context->alive = true;
                context->device = device;
        }
        if (!context)
                misuse("more than %d contexts", CONTEXTS_MAX);
        pthread_mutex_unlock(&sg.lock);
        return context;
}

void sg_context_destroy(void *handle)
{
        struct context *context = handle;
        struct allocation *allocation, *tmp;

        pthread_mutex_lock(&sg.lock);
        context->alive = false;
        if (sg.by_hand) { /* its ranges are no allocations, and no work uses them any more */
                sg.gpu_ns = later(sg.gpu_ns, work_end(context));
                while (sg.blocks)
                        block_drop(sg.blocks);
                for (unsigned page = 0; page < PAGES; page++)
                        forget_use(page);
                for (unsigned i = 0; i < AREAS * AREA_PAGES; i++)
                        sg.addresses[i].used = 0;
        }
        HASH_ITER (hh, sg.allocations, allocation, tmp) {
                if (allocation->context == context)
                        memory_give(allocation);
        }
        pthread_mutex_unlock(&sg.lock);
}

void sg_advance(uint64_t ns)
{
        pthread_mutex_lock(&sg.lock);
        sg.now_ns += ns;
        pthread_mutex_unlock(&sg.lock);
}

void sg_set_tick(uint64_t ns)
{
        pthread_mutex_lock(&sg.lock);
        sg.tick_ns = ns;
        pthread_mutex_unlock(&sg.lock);
}

void sg_by_hand(uint64_t lazy_ns)
{
        pthread_mutex_lock(&sg.lock);
        sg.by_hand = true;
        sg.lazy_ns = lazy_ns;
        pthread_mutex_unlock(&sg.lock);
}

void sg_gpu_reach(uint64_t ns)
{
        pthread_mutex_lock(&sg.lock);
        gpu_reach(ns < all_work_end() ? ns : all_work_end());
        pthread_mutex_unlock(&sg.lock);
}

struct sg_progress sg_progress(void *handle)
{
        struct sg_progress progress;

        pthread_mutex_lock(&sg.lock);
        progress = (struct sg_progress){gpu_ns(), work_end(handle), ((struct context *)handle)->barrier_ns};
        pthread_mutex_unlock(&sg.lock);
        return progress;
}

uint64_t sg_now_ns(void)
{
        uint64_t now;

        pthread_mutex_lock(&sg.lock);
        now = sg.now_ns;
        pthread_mutex_unlock(&sg.lock);
        return now;
}

void sg_work(void *handle, unsigned stream, uint64_t ptr, uint64_t ns)
{
        struct context *context = handle;
        struct block *block;
        uint64_t start;

        pthread_mutex_lock(&sg.lock);
        check_context(context, "work");
        start = later(gpu_ns(), later(context->barrier_ns, context->tail_ns[stream]));
        context->tail_ns[stream] = start + ns;
        block = ptr ? find_block(ptr) : NULL;
        if (ptr && !block)
                misuse("work on 0x%" PRIx64 ", which the program has not", ptr);
        if (block && start < block->former_ns)
                misuse("work on 0x%" PRIx64 " begins %" PRIu64 " ns before that of the former owner ends", ptr,
                       block->former_ns - start);
        if (block)
                block->own_ns = later(block->own_ns, start + ns);
        pthread_mutex_unlock(&sg.lock);
}

void sg_capture(int n)
{
        pthread_mutex_lock(&sg.lock);
        sg.captures += n;
        pthread_mutex_unlock(&sg.lock);
}

void sg_fail(enum sg_op op, unsigned nth, unsigned count, int rc)
{
        pthread_mutex_lock(&sg.lock);
        sg.faults[op] = (struct fault){.skip = nth - 1, .count = count, .rc = rc};
        pthread_mutex_unlock(&sg.lock);
}

bool sg_planned(enum sg_op op)
{
        return sg.faults[op].count > 0;
}

void sg_hold(int device, uint64_t others_bytes, uint64_t driver_cache_bytes)
{
        pthread_mutex_lock(&sg.lock);
        sg.others_bytes[device] = others_bytes;
        sg.cache_bytes[device] = driver_cache_bytes;
        pthread_mutex_unlock(&sg.lock);
}

unsigned sg_calls(enum sg_op op)
{
        unsigned calls;

        pthread_mutex_lock(&sg.lock);
        calls = sg.calls[op];
        pthread_mutex_unlock(&sg.lock);
        return calls;
}

const char *sg_log(void)
{
        return sg.log;
}

void sg_log_clear(void)
{
        memset(sg.log, 0, sizeof(sg.log));
        sg.log_bytes = 0;
}

uint64_t sg_used_bytes(int device)
{
        uint64_t bytes;

        pthread_mutex_lock(&sg.lock);
        bytes = sg.used_bytes[device];
        pthread_mutex_unlock(&sg.lock);
        return bytes;
}

size_t sg_size(uint64_t ptr)
{
        struct allocation *allocation;
        size_t bytes;

        pthread_mutex_lock(&sg.lock);
        allocation = find(ptr);
        bytes = allocation ? allocation->bytes : 0;
        pthread_mutex_unlock(&sg.lock);
        return bytes;
}

uint64_t sg_misuses(void)
{
        uint64_t misuses;

        pthread_mutex_lock(&sg.lock);
        misuses = sg.misuses;
        pthread_mutex_unlock(&sg.lock);
        return misuses;
}

uint64_t sg_cached_bytes(struct gr_device *device)
{
        return gr_budget_cached(device);
}

uint64_t sg_counter(struct gr_core *core, enum gr_counter counter)
{
        return atomic_load(&core->counters.counts[counter]);
}

unsigned sg_reserved(void)
{
        return sg.reserved;
}

unsigned sg_handles(void)
{
        return sg.handles;
}

/* With the lock held. */
static void own(uint64_t ptr, size_t bytes)
{
        struct allocation *allocation = find(ptr);
        struct block *block = find_block(ptr);
        uint64_t last_ns;

        if (!allocation && !sg.by_hand) {
                misuse("0x%" PRIx64 " was handed out and is no allocation", ptr);
                return;
        }
        if (allocation && allocation->bytes < bytes)
                misuse("0x%" PRIx64 " has %zu bytes, not %zu", ptr, allocation->bytes, bytes);
        last_ns = last_use(ptr, bytes);
        if (last_ns == LIVE)
                misuse("0x%" PRIx64 " was handed out twice", ptr);
        if (block)
                block_drop(block);
        block = calloc(1, sizeof(*block));
        *block = (struct block){.ptr = ptr, .bytes = bytes, .former_ns = last_ns == LIVE ? 0 : last_ns};
        HASH_ADD(hh, sg.blocks, ptr, sizeof(block->ptr), block);
        mark_use(ptr, bytes, LIVE);
}

void sg_own(uint64_t ptr, size_t bytes)
{
        pthread_mutex_lock(&sg.lock);
        own(ptr, bytes);
        pthread_mutex_unlock(&sg.lock);
}

/* As sg_disown, and what there was to know of the block. */
static bool disown(uint64_t ptr, struct block *ret_block)
{
        struct block *block;

        pthread_mutex_lock(&sg.lock);
        block = find_block(ptr);
        if (block) {
                *ret_block = *block;
                mark_use(ptr, block->bytes, later(block->former_ns, block->own_ns));
                block_drop(block);
        }
        pthread_mutex_unlock(&sg.lock);
        return block != NULL;
}

bool sg_disown(uint64_t ptr)
{
        struct block block;

        return disown(ptr, &block);
}

int sg_alloc(struct gr_context *context, size_t bytes, uint64_t *ret_ptr)
{
        uint64_t ptr;
        int rc = gr_pool_alloc(context, bytes, &ptr);

        if (rc)
                return rc;
        sg_own(ptr, bytes);
        *ret_ptr = ptr;
        return 0;
}

int sg_free_in_order(struct gr_core *core, uint64_t ptr, gr_pool_give_back *give_back)
{
        struct block block;
        bool had = disown(ptr, &block);
        int rc = give_back ? gr_pool_free_in_order(core, ptr, give_back, NULL) : gr_pool_free(core, ptr);

        pthread_mutex_lock(&sg.lock);
        if (!had && !rc)
                misuse("0x%" PRIx64 ", which the program had not, was freed", ptr);
        if (had && rc) {
                if (!find(ptr) && !sg.by_hand)
                        misuse("the free of 0x%" PRIx64 " failed, but the block is gone", ptr);
                else
                        own(ptr, block.bytes);
        }
        pthread_mutex_unlock(&sg.lock);
        return rc;
}

int sg_free(struct gr_core *core, uint64_t ptr)
{
        return sg_free_in_order(core, ptr, NULL);
}
