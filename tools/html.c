/*
 * gpureclaim report --html: the page of report.html with the data of a trace in it. However long the trace is, the data
 * stays small: points of the timelines, marks by part of the time, and the largest of the rest.
 *
 * The page draws with code of its own. Each page carries all that it needs, and a small library for charts (uPlot 1.6)
 * is nearly four times as long as this whole page, draws no flame graph, and would be one more thing to build with.
 */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/ladder_rungs.h"
#include "leaks.h"
#include "report.h"
#include "report_page.h" /* made of report.html */

#define SIZES_MOST   50
#define ORIGINS_MOST 60  /* of one snapshot */
#define MARK_PARTS   200 /* of the time: marks of one kind in one part are one mark */

#define RUNG_WORD(id, word, ...) "ladder: " word,
static const char *const mark_words[] = {GR_RUNGS(RUNG_WORD) "refused", "hard limit", "release threshold", "capture"};
#undef RUNG_WORD
enum { REFUSED = GR_RUNG_COUNT, HARD_LIMIT, RELEASE_THRESHOLD, CAPTURE, MARKS };

/* A sink for JSON inside of HTML: there "<" is in strings only, and could begin the tag that ends the data. */
static void put_data(const char *text, size_t length, void *arg)
{
        for (size_t i = 0; i < length; i++)
                if (text[i] == '<')
                        fputs("\\u003c", arg);
                else
                        fputc(text[i], arg);
}

/* An array of numbers, in the open array. */
static void add_row(struct gr_json *json, size_t count, const uint64_t *numbers)
{
        gr_json_array(json, NULL);
        for (size_t i = 0; i < count; i++)
                gr_json_count(json, NULL, numbers[i]);
        gr_json_close(json);
}

static void add_moment(struct gr_json *json, const char *name, const struct moment *moment)
{
        gr_json_object(json, name);
        gr_json_count(json, "at", moment->at_ns);
        gr_json_count(json, "bytes", moment->bytes);
        gr_json_count(json, "blocks", moment->count);
        gr_json_count(json, "sizes", moment->group_count);
        gr_json_array(json, "largest");
        for (size_t i = 0; i < moment->group_count && i < SIZES_MOST; i++) {
                const struct group *group = &moment->groups[i];

                add_row(json, 3, (uint64_t[]){group->bytes, group->count, group->oldest_ns});
        }
        gr_json_close(json);
        gr_json_close(json);
}

static void add_timelines(struct gr_json *json, const struct report *report)
{
        const struct gr_trace_header *header = report->trace.header;

        gr_json_array(json, "gpus");
        for (int i = 0; i < GR_TRACE_DEVICES; i++) {
                const struct timeline *line = &report->timelines[i];

                if (line->count == 0)
                        continue;
                gr_json_object(json, NULL);
                gr_json_count(json, "number", (uint64_t)i);
                gr_json_string(json, "name", header ? header->devices[i] : "");
                gr_json_count(json, "reserved", report->trace.peak_reserved_bytes[i]);
                gr_json_count(json, "fragmented", line->worst.fragmented_bytes);
                gr_json_count(json, "fragmented_at", line->worst.at);
                gr_json_array(json, "points");
                for (size_t p = 0; p < line->count; p++) {
                        const struct point *point = &line->points[p];

                        add_row(json, 6,
                                (uint64_t[]){point->at, point->live_bytes,
                                             point->cached_bytes - point->quarantine_bytes - point->fragmented_bytes,
                                             point->other_bytes, point->quarantine_bytes, point->fragmented_bytes});
                }
                gr_json_close(json);
                gr_json_close(json);
        }
        gr_json_close(json);
}

static int mark_of(const struct gr_trace_event *event)
{
        switch (event->what) {
        case GR_ENTRY_REFUSED:
                return REFUSED;
        case GR_ENTRY_RUNG:
                return event->detail < GR_RUNG_COUNT ? event->detail : -1;
        case GR_ENTRY_LIMIT:
                return event->detail ? RELEASE_THRESHOLD : HARD_LIMIT;
        case GR_ENTRY_CAPTURE_BEGIN:
                return CAPTURE;
        default:
                return -1;
        }
}

/* Events are in the order of time, so one part's marks are complete when the next one begins. */
static void add_marks(struct gr_json *json, const struct report *report)
{
        const struct gr_trace *trace = &report->trace;
        struct {
                uint64_t at, count, bytes;
        } marks[GR_TRACE_DEVICES + 1][MARKS] = {0}, *mark; /* those of no GPU last */
        size_t part = 0, next;

        gr_json_array(json, "marks");
        for (size_t i = 0; i <= trace->event_count; i++) {
                const struct gr_trace_event *event = i < trace->event_count ? &trace->events[i] : NULL;
                int kind = event ? mark_of(event) : -1;

                if (event && kind < 0)
                        continue;
                next = event ? (size_t)((double)event->time_ns / ((double)report->last_at + 1) * MARK_PARTS) : SIZE_MAX;
                for (int m = 0; next > part && m < (GR_TRACE_DEVICES + 1) * MARKS; m++) {
                        mark = &marks[m / MARKS][m % MARKS];
                        if (mark->count == 0)
                                continue;
                        gr_json_array(json, NULL);
                        gr_json_count(json, NULL, mark->at);
                        gr_json_string(json, NULL, mark_words[m % MARKS]);
                        gr_json_count(json, NULL, mark->count);
                        gr_json_bytes(json, NULL, mark->bytes);
                        if (m / MARKS < GR_TRACE_DEVICES)
                                gr_json_count(json, NULL, (uint64_t)(m / MARKS));
                        gr_json_close(json);
                        mark->count = mark->bytes = 0;
                }
                part = next;
                if (!event)
                        break;
                mark = &marks[event->device < GR_TRACE_DEVICES ? event->device : GR_TRACE_DEVICES][kind];
                if (mark->count++ == 0)
                        mark->at = event->time_ns;
                mark->bytes = event->what == GR_ENTRY_LIMIT ? event->bytes : mark->bytes + event->bytes;
        }
        gr_json_close(json);
}

static void add_frame(void *json, const struct frame *frame, const struct place *place)
{
        char text[512];

        format_frame(frame, place, text, sizeof(text));
        gr_json_string(json, NULL, text);
}

/* The time, all live bytes, how many origins they have, and of the largest: its place among the stacks, and bytes. */
static void add_snapshot(struct gr_json *json, const struct snapshot *snapshot, uint32_t *places,
                         const struct origin **stacks, uint32_t *stack_count)
{
        const struct origins *origins = &snapshot->origins;

        gr_json_array(json, NULL);
        gr_json_count(json, NULL, snapshot->at);
        gr_json_number(json, NULL, "%.0f", origins->whole.all_bytes);
        gr_json_count(json, NULL, origins->count);
        for (size_t i = 0; i < origins->count && i < ORIGINS_MOST; i++) {
                const struct origin *origin = &origins->list[i];

                if (!places[origin->number]) {
                        stacks[*stack_count] = origin;
                        places[origin->number] = ++*stack_count;
                }
                gr_json_count(json, NULL, places[origin->number] - 1);
                gr_json_number(json, NULL, "%.0f", origin->all_bytes);
        }
        gr_json_close(json);
}

/* What was live at the snapshots, by origin; where the trace has no stacks, only at the end. */
static void add_origins(struct gr_json *json, const struct report *report)
{
        const struct origins *origins = &report->origins;
        const struct snapshot end = {.at = report->last_at, .origins = *origins};
        uint32_t *places = calloc(origins->number_count + 1, sizeof(*places)), stack_count = 0; /* 0: not yet */
        const struct origin **stacks = calloc(origins->number_count + 1, sizeof(*stacks));

        gr_json_object(json, "origins");
        gr_json_count(json, "sample_bytes", origins->header.sample_bytes);
        gr_json_count(json, "peak", report->peak_snapshot ? (uint64_t)(report->peak_snapshot - report->snapshots) : 0);
        gr_json_array(json, "snapshots");
        for (size_t i = 0; places && stacks && i < report->snapshot_count; i++)
                add_snapshot(json, &report->snapshots[i], places, stacks, &stack_count);
        if (places && stacks && report->snapshot_count == 0)
                add_snapshot(json, &end, places, stacks, &stack_count);
        gr_json_close(json);
        gr_json_array(json, "stacks");
        for (uint32_t i = 0; i < stack_count; i++) {
                gr_json_array(json, NULL);
                each_shown_place(stacks[i], add_frame, json);
                gr_json_close(json);
        }
        gr_json_close(json);
        gr_json_close(json);
        free(places);
        free(stacks);
}

static void add_data(struct gr_json *json, const char *path, const struct report *report)
{
        const struct gr_trace *trace = &report->trace;
        char advice[ADVICE_MOST][ADVICE_BYTES];
        size_t count = advise(report, advice);

        gr_json_object(json, NULL);
        gr_json_string(json, "path", path);
        gr_json_string(json, "program", trace->header ? trace->header->command : "");
        gr_json_bool(json, "is_trace", trace->header);
        gr_json_bool(json, "begin_is_missing", trace->begin_is_missing);
        gr_json_count(json, "doubtful_blocks", trace->doubtful_count);
        gr_json_count(json, "doubtful_bytes", trace->doubtful_bytes);
        gr_json_bool(json, "timed", report->at_is_ns);
        gr_json_count(json, "last", report->last_at);
        gr_json_count(json, "operations", trace->count);
        gr_json_count(json, "threads", trace->thread_count);
        gr_json_count(json, "allocations", report->allocations);
        gr_json_count(json, "allocated", report->allocated_bytes);
        gr_json_count(json, "hits", trace->counts[GR_ENTRY_HIT]);
        gr_json_count(json, "misses", trace->counts[GR_ENTRY_MISS]);
        gr_json_count(json, "refused", trace->counts[GR_ENTRY_REFUSED]);
        gr_json_count(json, "half_ns", report->half_ns);
        gr_json_count(json, "tenth_ns", report->tenth_ns);
        gr_json_array(json, "advice");
        for (size_t i = 0; i < count; i++)
                gr_json_string(json, NULL, advice[i]);
        gr_json_close(json);
        add_timelines(json, report);
        add_marks(json, report);
        gr_json_array(json, "histogram");
        for (int i = 0; i < 64; i++)
                add_row(json, 2, (uint64_t[]){report->sizes[i].blocks, report->sizes[i].bytes});
        gr_json_close(json);
        add_moment(json, "peak", &report->peak);
        add_moment(json, "end", &report->end);
        if (report->has_origins)
                add_origins(json, report);
        gr_json_close(json);
}

void write_page(const char *path, const struct report *report)
{
        struct gr_json json;

        fputs(page_before, stdout);
        gr_json_begin(&json, put_data, stdout, 1);
        add_data(&json, path, report);
        gr_json_end(&json);
        fputs(page_after, stdout);
}
