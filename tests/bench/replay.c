/*
 * Plays a recorded trace (GPURECLAIM_TRACE, RMM's replay logs) against the driver: cuMemAlloc and cuMemFree, which
 * under the library are its pools, or with --async the driver's own pool. Every new block is used by a kernel unless
 * --idle is given, in the default stream like all work of the recorded programs. Prints the peaks of live and of held
 * memory, and the time of an operation.
 *
 *   replay [--async] [--idle] TRACE.csv
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gputest.h"
#include "trace.h"

enum { SAMPLES = 300 }; /* of the footprint, which is slow to ask for */

static struct gt gt;
static bool async, idle;

static void one(const struct gr_trace_op *op, CUdeviceptr *p)
{
        if (op->is_free) {
                GR_MUST(async ? cuMemFreeAsync(*p, NULL) : cuMemFree(*p));
                return;
        }
        GR_MUST(async ? cuMemAllocAsync(p, op->bytes, NULL) : cuMemAlloc(p, op->bytes));
        if (!idle && op->bytes >= 4)
                GR_MUST(gt_fill(&gt, NULL, *p, 1, op->bytes / 4 < 16384 ? op->bytes / 4 : 16384));
}

int main(int argc, char **argv)
{
        struct gr_trace trace;
        size_t line, held, peak_held = 0, before = 0;
        uint64_t live = 0, sampled_live = 0, next_sample = 0;
        const char *path;
        int file;
        double begin, spent = 0;
        bool known, higher;
        CUdeviceptr *ptrs;
        int rc;

        file = GT_OPTIONS(argc, argv, "[--async] [--idle] TRACE.csv", GT_OPTION("async", async),
                          GT_OPTION("idle", idle));
        if (file + 1 != argc)
                gt_die("replay needs one trace");
        path = argv[file];
        rc = gr_trace_read(path, &trace, &line);
        if (rc) {
                fprintf(stderr, "%s, line %zu: %s\n", path, line, strerror(-rc));
                return 1;
        }
        gt_open(&gt);
        ptrs = calloc(trace.slot_count, sizeof(*ptrs));
        if (!ptrs)
                gt_die("out of memory");
        known = gt_footprint(&gt, &before);
        begin = gt_now_us();
        for (size_t i = 0; i < trace.count; i++) {
                const struct gr_trace_op *op = &trace.ops[i];

                one(op, &ptrs[op->slot]);
                live += op->is_free ? -op->bytes : op->bytes;
                /* Where the trace has more live than before, and now and then: some pools hold most long after. */
                higher = live > sampled_live + trace.peak_live_bytes / SAMPLES ||
                         (live == trace.peak_live_bytes && live > sampled_live);
                if (!known || !(i >= next_sample || higher))
                        continue;
                sampled_live = live > sampled_live ? live : sampled_live;
                next_sample = i + trace.count / SAMPLES + 1;
                spent += gt_now_us() - begin;
                if (gt_footprint(&gt, &held) && held > before && held - before > peak_held)
                        peak_held = held - before;
                begin = gt_now_us();
        }
        GR_MUST(cuCtxSynchronize());
        spent += gt_now_us() - begin;
        printf("operations %zu\nus_per_operation %.3f\npeak_live_mib %.1f\n", trace.count, spent / (double)trace.count,
               (double)trace.peak_live_bytes / (double)MIB);
        if (known)
                printf("peak_held_mib %.1f\nratio %.3f\n", (double)peak_held / (double)MIB,
                       (double)peak_held / (double)trace.peak_live_bytes);
        free(ptrs);
        gr_trace_free(&trace);
        gt_close(&gt);
        return 0;
}
