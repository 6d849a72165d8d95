/*
 * The memory of each GPU over time, as so few points that a page can show a trace of any length (report.h).
 *
 * Fragmentation is cached memory that did not wait for the GPU, and still did not serve a request: the process took
 * more from the GPU for it, or it was refused. What was mapped for that request alone does not count. Nor does a small
 * request, which shares a page that large ones cannot have: for it the process takes one more, whatever is cached.
 * Until the next such request as much of the cached memory counts as fragmented.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/arith.h"
#include "base/size_class.h"
#include "report.h"

/* Of each part of the time: where least was live, where most was, where most was taken from the GPU, and the last. */
#define PARTS (POINTS_MOST / 4)

struct device {
        uint64_t live_bytes, reserved_bytes, kind_bytes[GR_MEMORY_KIND_COUNT];
        uint64_t freed_bytes;         /* since an epoch was last usable, with what was in quarantine then */
        uint64_t cached_before_bytes; /* as what is reserved grew, in a call of a thread that has not ended */
        uint64_t unserving_bytes;     /* cached, and did not serve the last miss */
        size_t part;
        bool grew, changed; /* changed: in this part */
        uint32_t grower;    /* that thread, as the file has it */
        struct point least, most, highest, now;
        double cached_area;
};

static uint64_t sum_point(const struct point *point)
{
        return point->live_bytes + point->cached_bytes + point->other_bytes;
}

static uint64_t other_bytes(const struct device *device)
{
        uint64_t bytes = 0;

        for (int kind = 0; kind < GR_MEMORY_KIND_COUNT; kind++)
                if (kind != GR_MEMORY_IMPORTED && kind != GR_MEMORY_HOST)
                        bytes += device->kind_bytes[kind];
        return bytes;
}

static uint64_t cached_bytes(const struct device *device)
{
        uint64_t used = device->live_bytes + other_bytes(device);

        return device->reserved_bytes > used ? device->reserved_bytes - used : 0;
}

static int by_number(const void *a, const void *b)
{
        const struct point *x = a, *y = b;

        return (x->number > y->number) - (x->number < y->number);
}

static void end_part(struct device *device, struct timeline *line)
{
        struct point points[] = {device->least, device->most, device->highest, device->now};

        if (!device->changed)
                return;
        device->changed = false;
        qsort(points, 4, sizeof(points[0]), by_number);
        for (int i = 0; i < 4 && line->count < POINTS_MOST; i++)
                if (i == 0 || points[i].number != points[i - 1].number)
                        line->points[line->count++] = points[i];
}

static void note_change(struct device *device, struct timeline *line, uint64_t at, uint64_t last)
{
        size_t part = (size_t)((double)at / ((double)last + 1) * PARTS);
        struct point now = {.at = at > device->now.at ? at : device->now.at,
                            .live_bytes = device->live_bytes,
                            .cached_bytes = cached_bytes(device),
                            .other_bytes = other_bytes(device),
                            .number = device->now.number + 1};

        now.quarantine_bytes = gr_min(device->freed_bytes, now.cached_bytes);
        now.fragmented_bytes = gr_min(device->unserving_bytes, now.cached_bytes - now.quarantine_bytes);
        if (now.fragmented_bytes > line->worst.fragmented_bytes)
                line->worst = now;
        device->cached_area += (double)device->now.cached_bytes * (double)(now.at - device->now.at);
        if (part > device->part) {
                end_part(device, line);
                device->part = part;
        }
        device->now = now;
        if (!device->changed || now.live_bytes < device->least.live_bytes)
                device->least = now;
        if (!device->changed || now.live_bytes > device->most.live_bytes)
                device->most = now;
        if (!device->changed || sum_point(&now) > sum_point(&device->highest))
                device->highest = now;
        device->changed = true;
}

/* Of the cached bytes these did not serve a request. */
static void note_unserving(struct device *device, uint64_t bytes)
{
        device->unserving_bytes = bytes - gr_min(bytes, device->freed_bytes);
}

static void take_operation(struct device *device, const struct gr_trace_op *op, uint64_t thread)
{
        device->live_bytes += op->is_free ? -op->bytes : op->bytes;
        device->freed_bytes += op->is_free ? op->bytes : 0;
        if (device->grew && device->grower == thread) {
                if (op->is_miss && !gr_is_small(op->bytes))
                        note_unserving(device, gr_min(device->cached_before_bytes, cached_bytes(device)));
                device->grew = false;
        }
}

/* Whether the event changes what a timeline shows. */
static bool take_event(struct device *device, const struct gr_trace_event *event)
{
        if (event->what == GR_ENTRY_RESERVED) {
                if (event->bytes > device->reserved_bytes && !(device->grew && device->grower == event->thread)) {
                        device->cached_before_bytes = cached_bytes(device);
                        device->grower = event->thread;
                        device->grew = true;
                }
                device->reserved_bytes = event->bytes;
        } else if (event->what == GR_ENTRY_REFUSED) {
                note_unserving(device, cached_bytes(device));
        } else if (event->what == GR_ENTRY_QUARANTINE) {
                device->freed_bytes = event->bytes;
        } else if (event->what == GR_ENTRY_KIND && event->detail < GR_MEMORY_KIND_COUNT) {
                device->kind_bytes[event->detail] = event->bytes;
        } else {
                return false;
        }
        return true;
}

int draw_timelines(struct report *report)
{
        const struct gr_trace *trace = &report->trace;
        struct device *devices = calloc(GR_TRACE_DEVICES, sizeof(*devices));
        size_t op = 0, event = 0;

        report->timelines = calloc(GR_TRACE_DEVICES, sizeof(*report->timelines));
        if (!devices || !report->timelines) {
                free(devices);
                return -ENOMEM;
        }
        report->at_is_ns = report->timed || trace->event_count > 0;
        report->last_at = report->at_is_ns ? report->end_ns : trace->count;
        if (trace->event_count > 0 && trace->events[trace->event_count - 1].time_ns > report->last_at)
                report->last_at = trace->events[trace->event_count - 1].time_ns;
        while (op < trace->count || event < trace->event_count) {
                bool is_event = event_is_next(trace, op, event);
                unsigned number = is_event ? trace->events[event].device : trace->ops[op].device;
                uint64_t at = is_event ? trace->events[event].time_ns : operation_at(report, op);
                bool shown = number < GR_TRACE_DEVICES;

                if (is_event)
                        shown = shown && take_event(&devices[number], &trace->events[event]);
                else if (shown)
                        take_operation(&devices[number], &trace->ops[op], trace->thread_ids[trace->ops[op].thread]);
                if (shown)
                        note_change(&devices[number], &report->timelines[number], at, report->last_at);
                op += !is_event;
                event += is_event;
        }
        for (int i = 0; i < GR_TRACE_DEVICES; i++) {
                struct device *device = &devices[i];

                device->cached_area += (double)device->now.cached_bytes * (double)(report->last_at - device->now.at);
                end_part(device, &report->timelines[i]);
                if (report->last_at > 0)
                        report->timelines[i].mean_cached_bytes =
                                (uint64_t)(device->cached_area / (double)report->last_at);
        }
        free(devices);
        return 0;
}
