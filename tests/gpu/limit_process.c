/*
 * The hard limit over the whole process: with contexts and code counted, what the card gave this process stays below
 * the limit, and reaches it.
 *
 *   GPURECLAIM_HARD_LIMIT=2GiB GPURECLAIM_LIMIT_INCLUDES=process LD_PRELOAD=... limit_process --limit=2GiB
 *
 * Skipped where neither NVML nor the simulated device tells what the process holds. Exit status 1 when a check failed.
 */
#include "gputest.h"

#include "gpureclaim.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 8192 };

/* NVML counts in steps of its own, and the figure is up to 100 ms old. */
static const size_t slack_bytes = 16 * MIB, step_bytes = 16 * MIB;

static CUdeviceptr blocks[MOST];

int main(int argc, char **argv)
{
        struct gpureclaim_status status = {.struct_bytes = sizeof status};
        gpureclaim_status_function *get;
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_status");
        size_t limit = 0, bytes, free_bytes, total_bytes, count = 0;
        double begin;
        struct gt gt;

        GT_OPTIONS(argc, argv, "--limit=SIZE", GT_OPTION("limit", limit));
        if (!limit || !found)
                gt_die("limit_process needs --limit=SIZE and the library");
        memcpy(&get, &found, sizeof get);
        gt_open(&gt);
        GR_MUST(cuMemAlloc(&blocks[count++], step_bytes));
        begin = gt_now_us();
        if (get(gt.device, &status) != 0 || status.driver_bytes == UINT64_MAX || !gt_footprint(&gt, &bytes)) {
                printf("skipped: nobody tells what this process holds\n");
                return GT_SKIPPED;
        }
        printf("# gpureclaim_status: %.1f us\n", gt_now_us() - begin);
        gt_check(bytes <= status.driver_bytes + step_bytes + slack_bytes &&
                         status.driver_bytes + step_bytes <= bytes + slack_bytes,
                 "what the driver took", "%.1f MiB of %.1f MiB held (%s)", gt_mib(status.driver_bytes), gt_mib(bytes),
                 gt_footprint_source(&gt));
        GR_MUST(cuMemGetInfo(&free_bytes, &total_bytes));
        gt_check(total_bytes == limit && free_bytes + bytes <= limit + slack_bytes, "cuMemGetInfo",
                 "%.1f MiB free of %.1f MiB", gt_mib(free_bytes), gt_mib(total_bytes));
        while (count < MOST && cuMemAlloc(&blocks[count], step_bytes) == CUDA_SUCCESS)
                count++;
        if (!gt_footprint(&gt, &bytes))
                bytes = 0;
        gt_check(bytes <= limit + slack_bytes && bytes + step_bytes + slack_bytes >= limit, "refused at the limit",
                 "%.1f MiB held, %.1f MiB of it allocated, limit %.1f MiB (%s)", gt_mib(bytes),
                 gt_mib(count * step_bytes), gt_mib(limit), gt_footprint_source(&gt));
        while (count)
                GR_MUST(cuMemFree(blocks[--count]));
        gt_close(&gt);
        return GR_CHECK_RESULT();
}
