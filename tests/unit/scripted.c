#include "scripted_gpu.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct scripted_gpu sg = {.lock = PTHREAD_MUTEX_INITIALIZER};

void misuse(const char *format, ...)
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

int count(enum sg_op op)
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

int enter(enum sg_op op)
{
        before(op);
        pthread_mutex_lock(&sg.lock);
        sg.now_ns += sg.tick_ns;
        return count(op);
}

int leave(int rc)
{
        pthread_mutex_unlock(&sg.lock);
        return rc;
}

static uint64_t all_work_end(void)
{
        uint64_t end = 0;

        for (unsigned i = 0; i < sg.context_count; i++)
                end = later(end, work_end(&sg.contexts[i]));
        return end;
}

void check_context(const struct context *context, const char *what)
{
        if (!context || !context->alive)
                misuse("%s in a context that is gone", what);
}

static void check_captures(const char *what)
{
        if (sg.captures > 0)
                misuse("%s during a capture", what);
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
        struct event *event;

        memory_forget();
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

        pthread_mutex_lock(&sg.lock);
        context->alive = false;
        if (sg.by_hand)
                sg.gpu_ns = later(sg.gpu_ns, work_end(context));
        memory_context_gone(context);
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
