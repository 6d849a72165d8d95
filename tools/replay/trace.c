#include "trace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/hash.h"

/* An allocation that lives in the trace. */
struct live {
        UT_hash_handle hh;
        uint64_t ptr; /* key */
        uint64_t bytes;
        uint32_t slot;
};

struct thread {
        UT_hash_handle hh;
        uint64_t id; /* key */
        uint32_t number;
};

enum column { THREAD, TIME, ACTION, POINTER, SIZE, COLUMNS };

struct reader {
        struct gr_trace trace;
        size_t room;
        struct live *live;
        struct thread *threads;
        uint32_t *spare_slots;
        size_t idle_event_count;
        uint64_t live_bytes, first_ns;
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

static int thread_number(struct reader *reader, uint64_t id, uint32_t *ret_number)
{
        struct thread *thread;

        HASH_FIND(hh, reader->threads, &id, sizeof(id), thread);
        if (!thread) {
                thread = calloc(1, sizeof(*thread));
                if (!thread)
                        return -ENOMEM;
                thread->id = id;
                thread->number = reader->trace.thread_count++;
                HASH_ADD(hh, reader->threads, id, sizeof(thread->id), thread);
        }
        *ret_number = thread->number;
        return 0;
}

static int allocated(struct reader *reader, struct gr_trace_op *op, uint64_t ptr)
{
        struct live *live = calloc(1, sizeof(*live));

        if (!live)
                return -ENOMEM;
        live->ptr = ptr;
        live->bytes = op->bytes;
        live->slot = reader->idle_event_count > 0 ? reader->spare_slots[--reader->idle_event_count]
                                                  : reader->trace.slot_count++;
        HASH_ADD(hh, reader->live, ptr, sizeof(live->ptr), live);
        op->slot = live->slot;
        reader->live_bytes += op->bytes;
        if (reader->live_bytes > reader->trace.peak_live_bytes)
                reader->trace.peak_live_bytes = reader->live_bytes;
        return 0;
}

static int read_line(struct reader *reader, char *line)
{
        struct gr_trace *trace = &reader->trace;
        char *rest = line, *word, *fields[COLUMNS] = {NULL};
        struct gr_trace_op op = {0};
        struct live *live;
        uint64_t ptr;
        int i = 0, rc;

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
                trace->skipped++; /* "allocate failure" and whatever else a logger notes */
                return 0;
        }
        ptr = strtoull(fields[POINTER], NULL, 16);
        op.bytes = strtoull(fields[SIZE], NULL, 10);
        if (fields[TIME] && !strchr(fields[TIME], ':'))
                op.time_ns = strtoull(fields[TIME], NULL, 10);
        rc = thread_number(reader, fields[THREAD] ? strtoull(fields[THREAD], NULL, 10) : 0, &op.thread);
        if (rc)
                return rc;
        HASH_FIND(hh, reader->live, &ptr, sizeof(ptr), live);
        if (op.is_free ? !live : live || op.bytes == 0) {
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
                reader->first_ns = op.time_ns;
        op.time_ns = op.time_ns > reader->first_ns ? op.time_ns - reader->first_ns : 0;
        if (op.is_free) {
                op.bytes = live->bytes;
                op.slot = live->slot;
                reader->spare_slots[reader->idle_event_count++] = live->slot;
                reader->live_bytes -= live->bytes;
                HASH_DELETE(hh, reader->live, live);
                free(live);
        } else {
                rc = allocated(reader, &op, ptr);
                if (rc)
                        return rc;
        }
        trace->ops[trace->count++] = op;
        return 0;
}

int gr_trace_read(const char *path, struct gr_trace *ret, size_t *ret_line)
{
        struct reader reader = {0};
        struct live *live, *next_live;
        struct thread *thread, *next_thread;
        FILE *file = fopen(path, "re");
        char line[512];
        bool header = false;
        int rc = 0;

        *ret_line = 0;
        if (!file)
                return -errno;
        while (!rc && fgets(line, sizeof(line), file)) {
                ++*ret_line;
                if (header && !strchr(line, '\n') && feof(file)) { /* its program ended in the middle of it */
                        reader.trace.skipped++;
                        break;
                }
                if (line[0] == '#' || line[0] == '\n')
                        continue;
                rc = header ? read_line(&reader, line) : read_header(&reader, line);
                header = true;
        }
        if (!rc && (ferror(file) || !header))
                rc = -EINVAL;
        fclose(file);
        HASH_ITER (hh, reader.live, live, next_live) {
                HASH_DELETE(hh, reader.live, live);
                free(live);
        }
        HASH_ITER (hh, reader.threads, thread, next_thread) {
                HASH_DELETE(hh, reader.threads, thread);
                free(thread);
        }
        free(reader.spare_slots);
        if (rc)
                free(reader.trace.ops);
        else
                *ret = reader.trace;
        return rc;
}
