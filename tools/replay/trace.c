#include "trace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"
#include "base/log.h"

/* An allocation that lives in the trace. */
struct live {
        UT_hash_handle hh;
        uint64_t ptr; /* key */
        uint64_t bytes;
        size_t op; /* its number in the trace */
        uint32_t slot;
        uint8_t device;
};

struct thread {
        UT_hash_handle hh;
        uint64_t id; /* key */
        uint32_t number;
        struct {
                uint64_t address; /* 0: none */
                uint32_t stack;
                uint8_t sample_log2;
        } next; /* the stack of the next allocation */
};

enum column { THREAD, TIME, ACTION, POINTER, SIZE, COLUMNS };

struct reader {
        struct gr_trace trace;
        size_t room, event_room;
        struct live *live;
        struct thread *threads;
        uint32_t *spare_slots;
        size_t spare_count;
        uint64_t live_bytes, sure_from_ns;
        int columns[COLUMNS]; /* their places in a line; -1: not there */
};

static int read_header(struct reader *reader, char *line)
{
        static const char *const names[COLUMNS] = {"Thread", "Time", "Action", "Pointer", "Size"};
        char *rest = line, *word;
        int i = 0;

        memset(reader->columns, -1, sizeof(reader->columns));
        while ((word = strsep(&rest, ",\r\n"))) {
                for (int c = 0; c < COLUMNS; c++)
                        if (!strcmp(word, names[c]))
                                reader->columns[c] = i;
                i++;
        }
        return reader->columns[ACTION] < 0 || reader->columns[POINTER] < 0 || reader->columns[SIZE] < 0 ? -EINVAL : 0;
}

/* NULL: no memory. */
static struct thread *find_thread(struct reader *reader, uint64_t id)
{
        struct thread *thread;

        HASH_FIND(hh, reader->threads, &id, sizeof(id), thread);
        if (!thread) {
                thread = calloc(1, sizeof(*thread));
                if (!thread)
                        return NULL;
                thread->id = id;
                thread->number = reader->trace.thread_count++;
                HASH_ADD(hh, reader->threads, id, sizeof(thread->id), thread);
        }
        return thread;
}

static int add_live(struct reader *reader, struct gr_trace_op *op)
{
        struct live *live = calloc(1, sizeof(*live));

        if (!live)
                return -ENOMEM;
        live->ptr = op->ptr;
        live->bytes = op->bytes;
        live->device = op->device;
        live->op = reader->trace.count;
        live->slot = reader->spare_count > 0 ? reader->spare_slots[--reader->spare_count] : reader->trace.slot_count++;
        HASH_ADD(hh, reader->live, ptr, sizeof(live->ptr), live);
        op->slot = live->slot;
        reader->live_bytes += op->bytes;
        if (reader->live_bytes > reader->trace.peak_live_bytes)
                reader->trace.peak_live_bytes = reader->live_bytes;
        return 0;
}

/* Adds an operation of the file. thread: its thread's number there. */
static int add_operation(struct reader *reader, struct gr_trace_op op, uint64_t thread)
{
        struct gr_trace *trace = &reader->trace;
        struct thread *by = find_thread(reader, thread);
        struct live *live;
        int rc;

        if (!by)
                return -ENOMEM;
        op.thread = by->number;
        op.stack = GR_TRACE_NO_STACK;
        HASH_FIND(hh, reader->live, &op.ptr, sizeof(op.ptr), live);
        if (live && !op.is_free && op.bytes > 0) { /* what had the address was freed, though the file does not say so */
                struct gr_trace_op lost = op;

                lost.is_free = true;
                rc = add_operation(reader, lost, thread);
                if (rc)
                        return rc;
        }
        if (op.is_free ? !live : op.bytes == 0) {
                trace->skipped++;
                return 0;
        }
        if (trace->count == reader->room) {
                size_t room = reader->room ? 2 * reader->room : 4096;
                struct gr_trace_op *ops = realloc(trace->ops, room * sizeof(*ops));
                uint32_t *spares = realloc(reader->spare_slots, room * sizeof(*spares));

                trace->ops = ops ? ops : trace->ops;
                reader->spare_slots = spares ? spares : reader->spare_slots;
                if (!ops || !spares)
                        return -ENOMEM;
                reader->room = room;
        }
        if (trace->count == 0)
                reader->trace.first_ns = op.time_ns;
        op.time_ns = op.time_ns > reader->trace.first_ns ? op.time_ns - reader->trace.first_ns : 0;
        if (op.is_free) {
                op.bytes = live->bytes;
                op.device = live->device;
                op.slot = live->slot;
                reader->spare_slots[reader->spare_count++] = live->slot;
                reader->live_bytes -= live->bytes;
                HASH_DELETE(hh, reader->live, live);
                free(live);
        } else {
                if (by->next.address == op.ptr) {
                        op.stack = by->next.stack;
                        op.sample_log2 = by->next.sample_log2;
                        by->next.address = 0;
                }
                rc = add_live(reader, &op);
                if (rc)
                        return rc;
        }
        trace->ops[trace->count++] = op;
        return 0;
}

static int read_line(struct reader *reader, char *line)
{
        char *rest = line, *word, *fields[COLUMNS] = {NULL};
        struct gr_trace_op op = {0};
        int i = 0;

        while ((word = strsep(&rest, ",\r\n"))) {
                for (int c = 0; c < COLUMNS; c++)
                        if (reader->columns[c] == i)
                                fields[c] = word;
                i++;
        }
        if (!fields[ACTION] || !fields[POINTER] || !fields[SIZE])
                return -EINVAL;
        op.is_free = !strcmp(fields[ACTION], "free");
        if (!op.is_free && strcmp(fields[ACTION], "allocate") != 0) {
                reader->trace.skipped++; /* "allocate failure" and whatever else a logger notes */
                return 0;
        }
        op.ptr = strtoull(fields[POINTER], NULL, 16);
        op.bytes = strtoull(fields[SIZE], NULL, 10);
        if (fields[TIME] && !strchr(fields[TIME], ':'))
                op.time_ns = strtoull(fields[TIME], NULL, 10);
        return add_operation(reader, op, fields[THREAD] ? strtoull(fields[THREAD], NULL, 10) : 0);
}

static int read_lines(struct reader *reader, FILE *file, size_t *ret_line)
{
        char line[512];
        bool header = false;
        int rc = 0;

        while (!rc && fgets(line, sizeof(line), file)) {
                ++*ret_line;
                if (header && !strchr(line, '\n') && feof(file)) { /* the program ended in the middle of this line */
                        reader->trace.skipped++;
                        break;
                }
                if (line[0] == '#' || line[0] == '\n')
                        continue;
                rc = header ? read_line(reader, line) : read_header(reader, line);
                header = true;
        }
        return !rc && (ferror(file) || !header) ? -EINVAL : rc;
}

/* An entry of a file, with its place there. */
struct entry {
        uint64_t time_ns, address, bytes, head;
        size_t at;
};

static int by_time(const void *a, const void *b)
{
        const struct entry *x = a, *y = b;

        return x->time_ns != y->time_ns ? (x->time_ns < y->time_ns ? -1 : 1) : (x->at > y->at) - (x->at < y->at);
}

static int add_event(struct reader *reader, struct gr_trace_event event)
{
        struct gr_trace *trace = &reader->trace;

        if (trace->event_count == reader->event_room) {
                size_t room = reader->event_room ? 2 * reader->event_room : 256;
                struct gr_trace_event *events = realloc(trace->events, room * sizeof(*events));

                if (!events)
                        return -ENOMEM;
                trace->events = events;
                reader->event_room = room;
        }
        trace->events[trace->event_count++] = event;
        return 0;
}

/* Keeps the stack of the allocation that the thread's next entry tells of. */
static int note_stack(struct reader *reader, const struct entry *entry, unsigned sample_log2)
{
        struct thread *thread = find_thread(reader, (uint32_t)entry->head);

        if (!thread)
                return -ENOMEM;
        thread->next.address = entry->address;
        thread->next.stack = (uint32_t)entry->bytes;
        thread->next.sample_log2 = sample_log2 < 64 ? (uint8_t)sample_log2 : 0;
        return 0;
}

static int read_entry(struct reader *reader, const struct entry *entry)
{
        struct gr_trace *trace = &reader->trace;
        unsigned what = entry->head >> 32 & 0xff, device = entry->head >> 40 & 0xff;
        unsigned detail = (unsigned)(entry->head >> 48);
        struct gr_trace_op op = {.time_ns = entry->time_ns,
                                 .ptr = entry->address,
                                 .bytes = entry->bytes,
                                 .device = (uint8_t)device,
                                 .is_free = what == GR_ENTRY_FREE,
                                 .is_miss = what == GR_ENTRY_MISS};

        if (what == GR_ENTRY_NONE || what >= GR_ENTRY_COUNT) {
                trace->skipped++;
                return 0;
        }
        trace->counts[what]++;
        if (what == GR_ENTRY_HIT || what == GR_ENTRY_MISS || what == GR_ENTRY_FREE)
                return add_operation(reader, op, (uint32_t)entry->head);
        if (what == GR_ENTRY_STACK)
                return note_stack(reader, entry, detail);
        if (what == GR_ENTRY_RESERVED && device < GR_TRACE_DEVICES && trace->peak_reserved_bytes[device] < entry->bytes)
                trace->peak_reserved_bytes[device] = entry->bytes;
        if (what == GR_ENTRY_KIND && detail < GR_MEMORY_KIND_COUNT &&
            (device < GR_TRACE_DEVICES || device == GR_ENTRY_NO_DEVICE)) {
                struct gr_trace_kind *kind =
                        &trace->kinds[device < GR_TRACE_DEVICES ? device : GR_TRACE_DEVICES][detail];

                kind->end_bytes = entry->bytes;
                if (kind->peak_bytes < entry->bytes)
                        kind->peak_bytes = entry->bytes;
        }
        if (what == GR_ENTRY_COUNTER && detail < GR_COUNTER_COUNT)
                trace->counters.counts[detail] += entry->bytes;
        if (what == GR_ENTRY_RUNG && detail < GR_RUNG_COUNT) {
                trace->counters.rungs[detail].tries++;
                trace->counters.rungs[detail].bytes += entry->bytes;
                trace->counters.rungs[detail].ns += entry->address;
        }
        if (what == GR_ENTRY_COUNTER)
                return 0;
        return add_event(reader, (struct gr_trace_event){.time_ns = entry->time_ns,
                                                         .address = entry->address,
                                                         .bytes = entry->bytes,
                                                         .thread = (uint32_t)entry->head,
                                                         .detail = (uint16_t)detail,
                                                         .what = (uint8_t)what,
                                                         .device = (uint8_t)device});
}

/*
 * Of a file whose oldest batches were used again: looks at one of its batches, at its place in the file, for the time
 * from which on no entry is lost. A thread goes on to another batch once half of the ring is ahead of its own. So a
 * batch of the newer half was begun after the last entry of any batch that is lost, and its last entry came later.
 */
static void look_for_sure_time(struct reader *reader, size_t place, const struct gr_trace_entry *batch, size_t count)
{
        const struct gr_trace_header *header = reader->trace.header;
        uint64_t ring = header->ring, newest = 0;

        if (!reader->trace.begin_is_missing || place >= ring ||
            (place - header->claimed % ring + ring) % ring < ring / 2)
                return;
        for (size_t i = 0; i < count; i++)
                if (batch[i].head != 0 && batch[i].time_ns > newest)
                        newest = batch[i].time_ns;
        if (newest > 0 && newest < reader->sure_from_ns)
                reader->sure_from_ns = newest;
}

/*
 * Takes out the blocks that were allocated before that time and have no free in the file: the free may be among what is
 * lost.
 */
static void forget_doubtful(struct reader *reader)
{
        struct gr_trace *trace = &reader->trace;
        struct live *live, *next;
        size_t kept = 0;

        HASH_ITER (hh, reader->live, live, next) {
                struct gr_trace_op *op = &trace->ops[live->op];

                if (op->time_ns + trace->first_ns >= reader->sure_from_ns)
                        continue;
                trace->doubtful_count++;
                trace->doubtful_bytes += op->bytes;
                op->bytes = 0;
        }
        reader->live_bytes = trace->peak_live_bytes = 0;
        for (size_t i = 0; i < trace->count; i++) {
                if (trace->ops[i].bytes == 0)
                        continue;
                trace->ops[kept++] = trace->ops[i];
                reader->live_bytes += trace->ops[i].is_free ? -trace->ops[i].bytes : trace->ops[i].bytes;
                if (reader->live_bytes > trace->peak_live_bytes)
                        trace->peak_live_bytes = reader->live_bytes;
        }
        trace->count = kept;
}

/* Reads the entries of a file, as far as they go, after its header has been read. */
static int read_entries(struct reader *reader, FILE *file)
{
        struct entry *entries = NULL;
        struct gr_trace_entry batch[GR_TRACE_BATCH];
        size_t count = 0, room = 0, at = 0, got;
        int rc = 0;

        while (!rc && (got = fread(batch, sizeof(batch[0]), GR_TRACE_BATCH, file)) > 0) {
                look_for_sure_time(reader, at / GR_TRACE_BATCH, batch, got);
                for (size_t i = 0; !rc && i < got; i++, at++) {
                        if (batch[i].head == 0)
                                continue;
                        if (count == room) {
                                struct entry *more = realloc(entries, (room ? 2 * room : 4096) * sizeof(*more));

                                if (!more) {
                                        rc = -ENOMEM;
                                        break;
                                }
                                entries = more;
                                room = room ? 2 * room : 4096;
                        }
                        entries[count++] =
                                (struct entry){batch[i].time_ns, batch[i].address, batch[i].bytes, batch[i].head, at};
                }
        }
        if (!rc && ferror(file))
                rc = -EIO;
        if (!rc && count > 0)
                qsort(entries, count, sizeof(*entries), by_time);
        for (size_t i = 0; !rc && i < count; i++)
                rc = read_entry(reader, &entries[i]);
        if (!rc && reader->trace.begin_is_missing)
                forget_doubtful(reader);
        for (size_t i = 0; i < reader->trace.event_count; i++) {
                uint64_t *time_ns = &reader->trace.events[i].time_ns;

                *time_ns = *time_ns > reader->trace.first_ns ? *time_ns - reader->trace.first_ns : 0;
        }
        free(entries);
        return rc;
}

void gr_trace_make_text(char *text, size_t bytes)
{
        text[--bytes] = '\0';
        while (bytes > 0 && text[bytes - 1] == '\0')
                bytes--;
        gr_log_clean(text, bytes);
}

static int read_file(struct reader *reader, FILE *file, size_t *ret_line)
{
        struct gr_trace_header *header = reader->trace.header = calloc(1, sizeof(*header));

        if (!header)
                return -ENOMEM;
        if (fread(header, sizeof(*header), 1, file) != 1 ||
            memcmp(header->magic, GR_TRACE_MAGIC, sizeof(header->magic)) != 0) {
                free(header);
                reader->trace.header = NULL;
                rewind(file);
                return read_lines(reader, file, ret_line);
        }
        if (header->version != GR_TRACE_VERSION || header->header_bytes != sizeof(*header) ||
            header->entry_bytes != sizeof(struct gr_trace_entry) || header->batch_entries != GR_TRACE_BATCH)
                return -EPROTONOSUPPORT;
        gr_trace_make_text(header->command, sizeof(header->command));
        for (int i = 0; i < GR_TRACE_DEVICES; i++)
                gr_trace_make_text(header->devices[i], sizeof(header->devices[i]));
        reader->trace.begin_is_missing = header->ring > 0 && header->claimed > header->ring;
        reader->sure_from_ns = UINT64_MAX;
        return read_entries(reader, file);
}

int gr_trace_read(const char *path, struct gr_trace *ret, size_t *ret_line)
{
        struct reader reader = {0};
        struct live *live, *next_live;
        struct thread *thread, *next_thread;
        FILE *file = fopen(path, "re");
        int rc;

        *ret_line = 0;
        if (!file)
                return -errno;
        rc = read_file(&reader, file, ret_line);
        fclose(file);
        if (!rc) {
                reader.trace.thread_ids = calloc(reader.trace.thread_count + 1, sizeof(*reader.trace.thread_ids));
                rc = reader.trace.thread_ids ? 0 : -ENOMEM;
        }
        HASH_ITER (hh, reader.live, live, next_live) {
                HASH_DELETE(hh, reader.live, live);
                free(live);
        }
        HASH_ITER (hh, reader.threads, thread, next_thread) {
                if (!rc)
                        reader.trace.thread_ids[thread->number] = thread->id;
                HASH_DELETE(hh, reader.threads, thread);
                free(thread);
        }
        free(reader.spare_slots);
        if (rc)
                gr_trace_free(&reader.trace);
        else
                *ret = reader.trace;
        return rc;
}

void gr_trace_free(struct gr_trace *trace)
{
        free(trace->ops);
        free(trace->events);
        free(trace->thread_ids);
        free(trace->header);
        *trace = (struct gr_trace){0};
}
