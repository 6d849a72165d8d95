/* The memory of each GPU over time, as so few points that a page can show a trace of any length (report.h). */
#include <errno.h>
#include <stdlib.h>

#include "report.h"

/* Of each part of the time: where least was live, where most was, where most was taken from the GPU, and the last. */
#define PARTS (POINTS_MOST / 4)

struct device {
        uint64_t live_bytes, reserved_bytes, kind_bytes[GR_MEMORY_KIND_COUNT];
        uint64_t freed_bytes; /* since an epoch was last usable, with what was in quarantine then */
        size_t part;
        bool changed; /* in this part */
        struct point least, most, highest, now;
        double cached_area;
};

static uint64_t sum_point(const struct point *point)
{
        return point->live_bytes + point->cached_bytes + point->other_bytes;
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
                            .number = device->now.number + 1};

        for (int kind = 0; kind < GR_MEMORY_KIND_COUNT; kind++)
                if (kind != GR_MEMORY_IMPORTED && kind != GR_MEMORY_HOST)
                        now.other_bytes += device->kind_bytes[kind];
        if (device->reserved_bytes > now.live_bytes + now.other_bytes)
                now.cached_bytes = device->reserved_bytes - now.live_bytes - now.other_bytes;
        now.quarantine_bytes = device->freed_bytes < now.cached_bytes ? device->freed_bytes : now.cached_bytes;
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

static void take_operation(struct device *device, const struct gr_trace_op *op)
{
        device->live_bytes += op->is_free ? -op->bytes : op->bytes;
        device->freed_bytes += op->is_free ? op->bytes : 0;
}

/* Whether the event changes what a timeline shows. */
static bool take_event(struct device *device, const struct gr_trace_event *event)
{
        if (event->what == GR_ENTRY_RESERVED)
                device->reserved_bytes = event->bytes;
        else if (event->what == GR_ENTRY_QUARANTINE)
                device->freed_bytes = event->bytes;
        else if (event->what == GR_ENTRY_KIND && event->detail < GR_MEMORY_KIND_COUNT)
                device->kind_bytes[event->detail] = event->bytes;
        else
                return false;
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
                        take_operation(&devices[number], &trace->ops[op]);
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
