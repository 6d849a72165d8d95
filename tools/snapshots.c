/* Which origins had the live memory, at up to SNAPSHOTS_MOST times (report.h). */
#include <errno.h>
#include <stdlib.h>

#include "report.h"

/* The time is cut into parts. There is a snapshot of each, where most was live, so also of the peak; and of the end. */
#define PARTS (SNAPSHOTS_MOST - 1)

/* Finds after how many operations the snapshots are, in ascending order. Returns how many there are. */
static size_t choose_snapshots(const struct report *report, size_t ret[SNAPSHOTS_MOST])
{
        const struct gr_trace *trace = &report->trace;
        uint64_t live = 0, most = 0;
        size_t count = 0, part = SIZE_MAX;

        for (size_t i = 0; i < trace->count; i++) {
                size_t at_part = (size_t)((double)operation_at(report, i) / ((double)report->last_at + 1) * PARTS);

                live += trace->ops[i].is_free ? -trace->ops[i].bytes : trace->ops[i].bytes;
                count += at_part != part;
                if (at_part != part || live > most) {
                        most = live;
                        ret[count - 1] = i + 1;
                }
                part = at_part;
        }
        if (count > 0 && ret[count - 1] < trace->count)
                ret[count++] = trace->count;
        return count;
}

/* What the file of origins would say of the block. No address: it is freed, or was not noted, and does not count. */
static struct gr_origins_block block_of(const struct report *report, const struct gr_trace_op *op)
{
        return (struct gr_origins_block){
                .address = op->is_free || op->stack == GR_TRACE_NO_STACK ? 0 : op->ptr,
                .bytes = op->bytes,
                .time_ns = op->time_ns,
                .thread = (uint32_t)report->trace.thread_ids[op->thread],
                .stack = op->stack,
                .sample_bytes = op->sample_log2 ? UINT64_C(1) << op->sample_log2 : 0,
        };
}

int take_snapshots(struct report *report)
{
        const struct gr_trace *trace = &report->trace;
        struct gr_origins_block *blocks = calloc(trace->slot_count + 1, sizeof(*blocks)); /* by slot */
        size_t counts[SNAPSHOTS_MOST], count = choose_snapshots(report, counts);
        int rc;

        report->snapshots = calloc(count + 1, sizeof(*report->snapshots));
        rc = blocks && report->snapshots ? 0 : -ENOMEM;
        for (size_t i = 0; !rc && report->snapshot_count < count; i++) {
                struct snapshot *snapshot = &report->snapshots[report->snapshot_count];

                blocks[trace->ops[i].slot] = block_of(report, &trace->ops[i]);
                if (i + 1 < counts[report->snapshot_count])
                        continue;
                snapshot->at = i + 1 < trace->count ? operation_at(report, i) : report->last_at;
                rc = origins_of_blocks(&report->origins, blocks, trace->slot_count, &snapshot->origins);
                if (i + 1 == report->peak.operations)
                        report->peak_snapshot = snapshot;
                report->snapshot_count += !rc;
        }
        free(blocks);
        return rc;
}

uint64_t peak_without(const struct report *report, const struct origin *origin)
{
        const struct gr_trace *trace = &report->trace;
        double *others = calloc(trace->slot_count + 1, sizeof(*others)); /* bytes of others, by slot */
        double live = 0, most = 0;

        for (size_t i = 0; others && i < trace->count; i++) {
                const struct gr_trace_op *op = &trace->ops[i];
                struct gr_origins_block block = block_of(report, op);
                double bytes = (double)op->bytes;

                /* A block that is noted stands for others as well. Without these, too, the sum may fall below 0. */
                if (block.address && origins_number(&report->origins, op->stack) == origin->number)
                        bytes -= bytes * gr_origins_weight(block.bytes, block.sample_bytes);
                if (op->is_free)
                        bytes = -others[op->slot];
                else
                        others[op->slot] = bytes;
                live += bytes;
                most = live > most ? live : most;
        }
        free(others);
        return (uint64_t)most;
}
