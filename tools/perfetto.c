/*
 * gpureclaim report --perfetto: a trace in the JSON format of Chrome's trace viewer, which ui.perfetto.dev opens too.
 * Memory is drawn as counters, rungs of the ladder and captures as slices, refused requests and limits as marks. Times
 * are in microseconds.
 */
#include <inttypes.h>
#include <stdlib.h>

#include "base/json.h"
#include "base/ladder_rungs.h"
#include "report.h"
#include "trace.h"

static const char *const kind_words[] = {
#define WORDS(id, name, words) words,
        GR_MEMORY_KINDS(WORDS)
#undef WORDS
};

#define RUNG_WORD(id, word, ...) word,
static const char *const rung_words[] = {GR_RUNGS(RUNG_WORD)};
#undef RUNG_WORD

struct writer {
        struct gr_json json;
        uint64_t pid;
};

/* Begins an event; the caller closes it. phase: C counter, X slice, b and e begin and end of a slice, i mark. */
static void begin_event(struct writer *writer, const char *name, const char *phase, uint64_t time_ns)
{
        gr_json_object(&writer->json, NULL);
        gr_json_string(&writer->json, "name", name);
        gr_json_string(&writer->json, "ph", phase);
        gr_json_number(&writer->json, "ts", "%" PRIu64 ".%03u", time_ns / 1000, (unsigned)(time_ns % 1000));
        gr_json_count(&writer->json, "pid", writer->pid);
}

static void add_bytes(struct writer *writer, const char *name, uint64_t bytes)
{
        gr_json_object(&writer->json, "args");
        gr_json_bytes(&writer->json, name, bytes);
        gr_json_close(&writer->json);
}

static void write_counter(struct writer *writer, const char *name, uint64_t time_ns, uint64_t bytes)
{
        begin_event(writer, name, "C", time_ns);
        add_bytes(writer, "bytes", bytes);
        gr_json_close(&writer->json);
}

/* Draws a mark on the line of the event's thread. */
static void write_mark(struct writer *writer, const char *name, const struct gr_trace_event *event)
{
        begin_event(writer, name, "i", event->time_ns);
        gr_json_string(&writer->json, "s", "t");
        gr_json_count(&writer->json, "tid", event->thread);
        add_bytes(writer, "bytes", event->bytes);
        gr_json_close(&writer->json);
}

static void kind_changed(struct writer *writer, const struct gr_trace_event *event)
{
        char name[96];

        if (event->detail >= GR_MEMORY_KIND_COUNT)
                return;
        if (event->device < GR_TRACE_DEVICES)
                snprintf(name, sizeof(name), "%s, GPU %u", kind_words[event->detail], event->device);
        else
                snprintf(name, sizeof(name), "%s", kind_words[event->detail]);
        write_counter(writer, name, event->time_ns, event->bytes);
}

static void reserved_changed(struct writer *writer, const struct gr_trace_event *event)
{
        char name[32];

        if (event->device >= GR_TRACE_DEVICES) /* of the host: the kinds of memory tell it as well */
                return;
        snprintf(name, sizeof(name), "reserved, GPU %u", event->device);
        write_counter(writer, name, event->time_ns, event->bytes);
}

/* The entry was written when the rung had ended; its address field is how long the rung took. */
static void rung_ran(struct writer *writer, const struct gr_trace_event *event)
{
        uint64_t ns = event->address < event->time_ns ? event->address : event->time_ns;
        char name[64];

        if (event->detail >= GR_RUNG_COUNT)
                return;
        snprintf(name, sizeof(name), "ladder: %s", rung_words[event->detail]);
        begin_event(writer, name, "X", event->time_ns - ns);
        gr_json_number(&writer->json, "dur", "%" PRIu64 ".%03u", ns / 1000, (unsigned)(ns % 1000));
        gr_json_count(&writer->json, "tid", event->thread);
        add_bytes(writer, "gave_bytes", event->bytes);
        gr_json_close(&writer->json);
}

static void capture_changed(struct writer *writer, const struct gr_trace_event *event)
{
        begin_event(writer, "capture", event->what == GR_ENTRY_CAPTURE_BEGIN ? "b" : "e", event->time_ns);
        gr_json_string(&writer->json, "cat", "capture");
        gr_json_count(&writer->json, "id", event->address);
        gr_json_close(&writer->json);
}

static void write_event(struct writer *writer, const struct gr_trace_event *event)
{
        switch (event->what) {
        case GR_ENTRY_REFUSED:
                write_mark(writer, "refused", event);
                break;
        case GR_ENTRY_RUNG:
                rung_ran(writer, event);
                break;
        case GR_ENTRY_RESERVED:
                reserved_changed(writer, event);
                break;
        case GR_ENTRY_KIND:
                kind_changed(writer, event);
                break;
        case GR_ENTRY_LIMIT:
                write_mark(writer, event->detail ? "release threshold" : "hard limit", event);
                break;
        case GR_ENTRY_CAPTURE_BEGIN:
        case GR_ENTRY_CAPTURE_END:
                capture_changed(writer, event);
                break;
        default:
                break;
        }
}

void write_perfetto(const struct gr_trace *trace)
{
        struct writer writer = {.pid = trace->header ? trace->header->pid : 1};
        uint64_t live_bytes = 0;

        gr_json_begin(&writer.json, gr_sink_file, stdout, 2);
        gr_json_object(&writer.json, NULL);
        gr_json_array(&writer.json, "traceEvents");
        begin_event(&writer, "process_name", "M", 0);
        gr_json_object(&writer.json, "args");
        gr_json_string(&writer.json, "name", trace->header ? trace->header->command : "");
        gr_json_close(&writer.json);
        gr_json_close(&writer.json);
        for (size_t i = 0; i < trace->count; i++) {
                const struct gr_trace_op *op = &trace->ops[i];

                live_bytes += op->is_free ? -op->bytes : op->bytes;
                write_counter(&writer, "live", op->time_ns, live_bytes);
        }
        for (size_t i = 0; i < trace->event_count; i++)
                write_event(&writer, &trace->events[i]);
        gr_json_close(&writer.json);
        gr_json_close(&writer.json);
        gr_json_end(&writer.json);
}
