#include "scripted.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

#define PAGE         ((uint64_t)2 << 20)
#define PAGES        (1u << 14)
#define BASE         UINT64_C(0x7f0000000000)
#define SLOT         512u
#define SLOTS        (unsigned)(PAGE / SLOT)
#define SMALL_MAX    (PAGE / 2)
#define CONTEXTS_MAX 256
#define LOG_BYTES    8192
#define INVALID      gr_driver_error(1)

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
        uint64_t former_ns; /* when the work of all former owners has ended */
        uint64_t own_ns;    /* and that of the present or last one */
        bool owned;         /* the program has it */
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
        uint64_t capacity_bytes;
        uint64_t used_bytes[SG_DEVICES], others_bytes[SG_DEVICES], cache_bytes[SG_DEVICES];
        struct context contexts[CONTEXTS_MAX];
        unsigned context_count;
        struct event *events;
        struct allocation *allocations;
        uint8_t pages[PAGES];
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

/* Enters the operation with the lock held; the planned error, or 0. */
static int enter(enum sg_op op)
{
        static const char letters[] = {
#define SG_OP_LETTER(id, letter) letter,
                SG_OPS(SG_OP_LETTER)
#undef SG_OP_LETTER
        };
        struct fault *fault = &sg.faults[op];

        pthread_mutex_lock(&sg.lock);
        sg.calls[op]++;
        sg.now_ns += sg.tick_ns;
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
        memset(&sg.pages[first], 1, count);
        sg.used_bytes[device] += count * PAGE;
        return BASE + first * PAGE;
}

static void pages_give(int device, uint64_t ptr, unsigned count)
{
        memset(&sg.pages[(ptr - BASE) / PAGE], 0, count);
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
        unsigned count;

        HASH_DELETE(hh, sg.allocations, allocation);
        if (slab) {
                count = (unsigned)((allocation->bytes + SLOT - 1) / SLOT);
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
        if (allocation->owned)
                misuse("free of 0x%" PRIx64 ", which the program has", ptr);
        sg.now_ns = later(sg.now_ns, work_end(allocation->context)); /* blocks, as the driver's own does */
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
                if (allocation->owned)
                        misuse("release of 0x%" PRIx64 ", which the program has", ptrs[i]);
                if (later(allocation->former_ns, allocation->own_ns) > sg.now_ns)
                        misuse("release of 0x%" PRIx64 ", which work still uses", ptrs[i]);
                memory_give(allocation);
                ++*ret_done;
        }
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
        return leave(rc ? rc : event->done_ns <= sg.now_ns ? 0 : -EAGAIN);
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
                sg.now_ns = later(sg.now_ns, work_end(handle));
        return leave(rc);
}

static int context_drain(void *handle)
{
        int rc = enter(SG_CONTEXT_DRAIN);

        check_context(handle, "a drain");
        if (!rc)
                sg.now_ns = later(sg.now_ns, work_end(handle));
        return leave(rc);
}

static int trim_pools(void *handle, int device)
{
        int rc = enter(SG_TRIM_POOLS);

        check_context(handle, "a trim");
        if (!rc)
                sg.cache_bytes[device] = 0;
        return leave(rc);
}

static uint64_t now_ns(void)
{
        uint64_t now;

        pthread_mutex_lock(&sg.lock);
        now = sg.now_ns;
        pthread_mutex_unlock(&sg.lock);
        return now;
}

#define COMMON_OPERATIONS                                                                                              \
        .mem_alloc = mem_alloc, .mem_free = mem_free, .mem_release = mem_release, .mem_info = mem_info,                \
        .event_create = event_create, .event_destroy = event_destroy, .event_query = event_query,                      \
        .context_sync = context_sync, .context_drain = context_drain, .trim_pools = trim_pools, .now_ns = now_ns,      \
        .sleep_ns = sg_advance

const struct gr_driver sg_driver = {COMMON_OPERATIONS, .context_record = context_record, .context_wait = context_wait};
const struct gr_driver sg_old_driver = {COMMON_OPERATIONS};

void sg_reset(uint64_t capacity_bytes)
{
        struct allocation *allocation, *tmp;
        struct event *event;

        HASH_ITER (hh, sg.allocations, allocation, tmp) {
                memory_give(allocation);
        }
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

void sg_work(void *handle, unsigned stream, uint64_t ptr, uint64_t ns)
{
        struct context *context = handle;
        struct allocation *allocation;
        uint64_t start;

        pthread_mutex_lock(&sg.lock);
        check_context(context, "work");
        start = later(sg.now_ns, later(context->barrier_ns, context->tail_ns[stream]));
        context->tail_ns[stream] = start + ns;
        if (ptr) {
                allocation = find(ptr);
                if (!allocation || !allocation->owned)
                        misuse("work on 0x%" PRIx64 ", which the program has not", ptr);
                else if (start < allocation->former_ns)
                        misuse("work on 0x%" PRIx64 " begins %" PRIu64 " ns before that of the former owner ends", ptr,
                               allocation->former_ns - start);
                if (allocation)
                        allocation->own_ns = later(allocation->own_ns, start + ns);
        }
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

uint64_t sg_counter(struct gr_core *core, enum gr_stat stat)
{
        return atomic_load(&core->stats.counters[stat]);
}

void sg_own(uint64_t ptr, size_t bytes)
{
        struct allocation *allocation;

        pthread_mutex_lock(&sg.lock);
        allocation = find(ptr);
        if (!allocation) {
                misuse("0x%" PRIx64 " was handed out and is no allocation", ptr);
        } else {
                if (allocation->owned)
                        misuse("0x%" PRIx64 " was handed out twice", ptr);
                if (allocation->bytes < bytes)
                        misuse("0x%" PRIx64 " has %zu bytes, not %zu", ptr, allocation->bytes, bytes);
                allocation->owned = true;
                allocation->former_ns = later(allocation->former_ns, allocation->own_ns);
                allocation->own_ns = 0;
        }
        pthread_mutex_unlock(&sg.lock);
}

bool sg_disown(uint64_t ptr)
{
        struct allocation *allocation;
        bool had;

        pthread_mutex_lock(&sg.lock);
        allocation = find(ptr);
        had = allocation && allocation->owned;
        if (had)
                allocation->owned = false;
        pthread_mutex_unlock(&sg.lock);
        return had;
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

int sg_free(struct gr_core *core, uint64_t ptr)
{
        bool had = sg_disown(ptr);
        int rc = gr_pool_free(core, ptr);
        struct allocation *allocation;

        pthread_mutex_lock(&sg.lock);
        if (!had && !rc)
                misuse("0x%" PRIx64 ", which the program had not, was freed", ptr);
        if (had && rc) {
                allocation = find(ptr);
                if (allocation)
                        allocation->owned = true;
                else
                        misuse("the free of 0x%" PRIx64 " failed, but the block is gone", ptr);
        }
        pthread_mutex_unlock(&sg.lock);
        return rc;
}
