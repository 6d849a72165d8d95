/*
 * gpureclaim report --pytorch: a snapshot for PyTorch's memory viewer (pytorch.org/memory_viz) and its _memory_viz.py:
 * a pickle of what happened on each GPU, and of the segments at the end. It has only opcodes that the viewer knows, and
 * lists get one element at a time, as the viewer cannot take very many at once.
 *
 * The trace does not tell which pages the process has reserved. What is known are extents: pages that a block lacked
 * when it was allocated. When the process has less reserved than these, the one that is unused for longest goes.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/log.h"
#include "base/size_class.h"
#include "command.h"
#include "leaks.h"
#include "report.h"

enum { APPEND = 'a', DICT = '}', LIST = ']', SETITEM = 's', STOP = '.', MEMOIZE = 0x94, PROTO = 0x80 };
enum { BINGET = 'h', LONG_BINGET = 'j', BINUNICODE = 'X', LONG1 = 0x8a };

struct memo {
        UT_hash_handle hh;
        const void *what; /* key */
        uint32_t place;
};

struct extent {
        uint64_t begin, end;
        uint64_t blocks; /* that live in it */
        const struct gr_trace_op *idle_since;
};

struct writer {
        const struct report *report;
        const struct origin **origins;          /* by number */
        const struct gr_trace_op **live;        /* the device's allocations that live, by slot */
        struct memo *memos;                     /* what the reader remembers */
        uint64_t device, bytes, reserved_bytes; /* bytes: of the extents */
        struct extent *extents;                 /* of the device, in ascending order */
        size_t count, room;
};

static void *enough_memory(void *memory)
{
        if (memory)
                return memory;
        complain("report: %s", strerror(ENOMEM));
        exit(EXIT_FAILURE);
}

static void put_bytes(uint64_t number, int bytes)
{
        for (int i = 0; i < bytes; i++)
                putchar((int)(number >> 8 * i & 0xff));
}

static void put_number(uint64_t number)
{
        int bytes = 1;

        number = number < INT64_MAX ? number : INT64_MAX;
        while (number >> (8 * bytes - 1))
                bytes++;
        putchar(LONG1);
        putchar(bytes);
        put_bytes(number, bytes);
}

static void put_text(const char *from)
{
        char text[4096];
        size_t bytes = (size_t)snprintf(text, sizeof(text), "%s", from);

        bytes = bytes < sizeof(text) ? bytes : sizeof(text) - 1;
        gr_log_clean(text, bytes);
        putchar(BINUNICODE);
        put_bytes(bytes, 4);
        fwrite(text, bytes, 1, stdout);
}

/* Puts what was put before. False: it was not; the caller puts it, and MEMOIZE at once. */
static bool put_again(struct writer *writer, const void *what)
{
        struct memo *memo;

        HASH_FIND_PTR(writer->memos, &what, memo);
        if (memo) {
                putchar(memo->place < 256 ? BINGET : LONG_BINGET);
                put_bytes(memo->place, memo->place < 256 ? 1 : 4);
                return true;
        }
        memo = enough_memory(calloc(1, sizeof(*memo)));
        memo->what = what;
        memo->place = HASH_COUNT(writer->memos);
        HASH_ADD_PTR(writer->memos, what, memo);
        return false;
}

/* word: a constant, or of the origins. */
static void put_word(struct writer *writer, const char *word)
{
        if (put_again(writer, word))
                return;
        put_text(word);
        putchar(MEMOIZE);
}

static void put_words(struct writer *writer, const char *name, const char *word)
{
        put_word(writer, name);
        put_word(writer, word);
        putchar(SETITEM);
}

static void put_figure(struct writer *writer, const char *name, uint64_t figure)
{
        put_word(writer, name);
        put_number(figure);
        putchar(SETITEM);
}

static void put_frame(void *arg, const struct frame *frame, const struct place *place)
{
        struct writer *writer = arg;
        char name[512];

        putchar(DICT);
        put_words(writer, "filename", place->file ? place->file : frame->module ? frame->module->path : "");
        put_figure(writer, "line", place->line);
        put_word(writer, "name");
        format_frame(frame, &(struct place){.function = place->function}, name, sizeof(name));
        put_text(place->file && place->function ? place->function : name);
        putchar(SETITEM);
        putchar(APPEND);
}

/* Ends what has the frames of this allocation; NULL: of none. */
static void put_frames(struct writer *writer, const struct gr_trace_op *op)
{
        const struct origin *origin = NULL;

        if (op && op->stack != GR_TRACE_NO_STACK && writer->report->has_origins)
                origin = writer->origins[origins_number(&writer->report->origins, op->stack)];
        put_word(writer, "frames");
        if (!origin || !put_again(writer, origin)) {
                putchar(LIST);
                if (origin) {
                        putchar(MEMOIZE);
                        each_shown_place(origin, put_frame, writer);
                }
        }
        putchar(SETITEM);
        putchar(APPEND);
}

static void put_entry(struct writer *writer, const char *action, uint64_t time_ns, uint64_t address, uint64_t bytes,
                      uint64_t stream, const struct gr_trace_op *op)
{
        const struct gr_trace *trace = &writer->report->trace;
        uint64_t began_ns = trace->header ? trace->header->began_ns + trace->first_ns : 0;

        putchar(DICT);
        put_words(writer, "action", action);
        put_figure(writer, strcmp(action, "oom") ? "addr" : "device_free", address);
        put_figure(writer, "size", bytes);
        put_figure(writer, "stream", stream);
        put_figure(writer, "time_us", (began_ns + time_ns) / 1000);
        put_frames(writer, op);
}

/*
 * The viewer draws each block within one segment, which only map and unmap let grow; but its timeline of segments knows
 * only alloc and free. So an extent comes as a segment of stream 1, and then is mapped in stream 0, beside others.
 */
static void put_extent(struct writer *writer, bool is_new, const struct extent *extent, uint64_t time_ns)
{
        const char *const actions[] = {"segment_alloc", "segment_unmap", "segment_map", "segment_free"};

        for (int i = 0; i < 3; i++)
                put_entry(writer, actions[is_new ? i : i + 1], time_ns, extent->begin, extent->end - extent->begin,
                          is_new ? i < 2 : i > 0, NULL);
}

/* The first extent that ends behind the address. */
static size_t find_extent(const struct writer *writer, uint64_t address)
{
        size_t from = 0, to = writer->count;

        while (from < to) {
                size_t middle = (from + to) / 2;

                if (writer->extents[middle].end > address)
                        to = middle;
                else
                        from = middle + 1;
        }
        return from;
}

static void add_extent(struct writer *writer, size_t at, struct extent extent, uint64_t time_ns)
{
        if (writer->count == writer->room) {
                writer->room = writer->room ? 2 * writer->room : 64;
                writer->extents = enough_memory(realloc(writer->extents, writer->room * sizeof(extent)));
        }
        memmove(&writer->extents[at + 1], &writer->extents[at], (writer->count++ - at) * sizeof(extent));
        writer->extents[at] = extent;
        writer->bytes += extent.end - extent.begin;
        put_extent(writer, true, &extent, time_ns);
}

/* Takes away what the process cannot have any more. */
static void fit_extents(struct writer *writer, uint64_t time_ns)
{
        while (writer->bytes > writer->reserved_bytes) {
                struct extent *end = writer->extents + writer->count, *oldest = NULL;

                for (struct extent *extent = writer->extents; extent < end; extent++)
                        if (extent->blocks == 0 && (!oldest || extent->idle_since < oldest->idle_since))
                                oldest = extent;
                if (!oldest)
                        return;
                put_extent(writer, false, oldest, time_ns);
                writer->bytes -= oldest->end - oldest->begin;
                memmove(oldest, oldest + 1, (size_t)(end - oldest - 1) * sizeof(*oldest));
                writer->count--;
        }
}

static void write_operation(struct writer *writer, const struct gr_trace_op *op)
{
        const uint64_t in_page = GR_PAGE_BYTES - 1;
        uint64_t at = op->ptr & ~in_page, end = (op->ptr + op->bytes + in_page) & ~in_page; /* 0 in a bad file */
        const struct gr_trace_op **live = &writer->live[op->slot];
        size_t i = find_extent(writer, at);

        if (op->is_free) { /* told with the frames of the allocation */
                put_entry(writer, "free_requested", op->time_ns, op->ptr, op->bytes, 0, *live);
                put_entry(writer, "free_completed", op->time_ns, op->ptr, op->bytes, 0, *live);
                for (; i < writer->count && writer->extents[i].begin < end; i++) {
                        writer->extents[i].blocks--;
                        writer->extents[i].idle_since = op;
                }
                *live = NULL;
                return;
        }
        for (; at < end; at = writer->extents[i++].end) {
                uint64_t next = i < writer->count && writer->extents[i].begin < end ? writer->extents[i].begin : end;

                if (at < next)
                        add_extent(writer, i, (struct extent){.begin = at, .end = next}, op->time_ns);
                writer->extents[i].blocks++;
        }
        fit_extents(writer, op->time_ns);
        put_entry(writer, "alloc", op->time_ns, op->ptr, op->bytes, 0, op);
        *live = op;
}

static void write_event(struct writer *writer, const struct gr_trace_event *event)
{
        if (event->what == GR_ENTRY_REFUSED)
                put_entry(writer, "oom", event->time_ns, 0, event->bytes, 0, NULL);
        else if (event->what == GR_ENTRY_RESERVED)
                writer->reserved_bytes = event->bytes;
        fit_extents(writer, event->time_ns);
}

/* Puts what happened on the device as a list, and leaves the extents as they are at the end. */
static void write_device(struct writer *writer)
{
        const struct gr_trace *trace = &writer->report->trace;

        writer->reserved_bytes = UINT64_MAX; /* not known yet */
        writer->bytes = writer->count = 0;
        putchar(LIST);
        for (size_t op = 0, event = 0; op < trace->count || event < trace->event_count;) {
                if (!event_is_next(trace, op, event)) {
                        if (trace->ops[op].device == writer->device)
                                write_operation(writer, &trace->ops[op]);
                        op++;
                } else {
                        if (trace->events[event].device == writer->device)
                                write_event(writer, &trace->events[event]);
                        event++;
                }
        }
        putchar(APPEND);
}

static void put_block(struct writer *writer, uint64_t address, uint64_t bytes, const struct gr_trace_op *op)
{
        putchar(DICT);
        put_figure(writer, "address", address);
        put_figure(writer, "size", bytes);
        put_figure(writer, "requested_size", op ? bytes : 0);
        put_words(writer, "state", op ? "active_allocated" : "inactive");
        put_frames(writer, op);
}

static int by_address(const void *a, const void *b)
{
        const struct gr_trace_op *x = *(const struct gr_trace_op *const *)a, *y = *(const struct gr_trace_op *const *)b;

        return (x->ptr > y->ptr) - (x->ptr < y->ptr);
}

/* Puts the segments of the device at the end: extents that lie side by side are one. In live are only its blocks. */
static void write_segments(struct writer *writer, size_t live_count)
{
        const struct gr_trace_op **live = writer->live;
        size_t next = 0;

        qsort(live, live_count, sizeof(*live), by_address);
        for (size_t from = 0, to; from < writer->count; from = to) {
                uint64_t begin = writer->extents[from].begin, end, at = begin, live_bytes = 0;

                for (to = from, end = begin; to < writer->count && writer->extents[to].begin == end; to++)
                        end = writer->extents[to].end;
                putchar(DICT);
                put_word(writer, "blocks");
                putchar(LIST);
                for (; next < live_count && live[next]->ptr < end; next++) {
                        if (live[next]->ptr < at) /* only where the trace is not true */
                                continue;
                        if (live[next]->ptr > at)
                                put_block(writer, at, live[next]->ptr - at, NULL);
                        put_block(writer, live[next]->ptr, live[next]->bytes, live[next]);
                        at = live[next]->ptr + live[next]->bytes;
                        live_bytes += live[next]->bytes;
                }
                if (at < end)
                        put_block(writer, at, end - at, NULL);
                putchar(SETITEM);
                put_figure(writer, "device", writer->device);
                put_figure(writer, "address", begin);
                put_figure(writer, "total_size", end - begin);
                put_figure(writer, "allocated_size", live_bytes);
                put_figure(writer, "stream", 0);
                put_frames(writer, NULL);
        }
}

/* Goes on with a list of the snapshot, until SETITEM puts it there, again. */
static void put_list(struct writer *writer, const char *name, const void *list)
{
        put_word(writer, name);
        if (put_again(writer, list))
                return;
        putchar(LIST);
        putchar(MEMOIZE);
}

void write_pytorch(const struct report *report)
{
        const struct origins *origins = &report->origins;
        struct writer writer = {.report = report};
        uint32_t slots = report->trace.slot_count;
        struct memo *memo, *next;

        writer.origins = enough_memory(calloc(origins->number_count + 1, sizeof(*writer.origins)));
        writer.live = enough_memory(calloc(slots + 1, sizeof(*writer.live)));
        for (size_t i = 0; i < origins->named_count; i++)
                writer.origins[origins->list[i].number] = &origins->list[i];
        putchar(PROTO);
        putchar(4);
        putchar(DICT);
        for (; writer.device < GR_TRACE_DEVICES; writer.device++) {
                size_t count = 0;

                put_list(&writer, "device_traces", &writer.live);
                write_device(&writer);
                putchar(SETITEM);
                for (uint32_t slot = 0; slot < slots; slot++)
                        if (writer.live[slot])
                                writer.live[count++] = writer.live[slot];
                put_list(&writer, "segments", &writer.extents);
                write_segments(&writer, count);
                putchar(SETITEM);
                memset(writer.live, 0, slots * sizeof(*writer.live));
        }
        putchar(STOP);
        HASH_ITER (hh, writer.memos, memo, next) {
                HASH_DELETE(hh, writer.memos, memo);
                free(memo);
        }
        free(writer.origins);
        free(writer.live);
        free(writer.extents);
}
