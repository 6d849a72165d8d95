/*
 * A kernel that fails, and what calls answer then, which is the same natively. The library tells of it once.
 *
 *   failing_kernel [launch|fill|stream|event]      which call is the first; else cuCtxSynchronize
 *
 * On the simulated device no kernel fails: there GRSIM_FAULT has to say what these calls answer.
 */
#include "gputest.h"

#include <stdio.h>
#include <string.h>

static void tell(const char *call, CUresult result)
{
        printf("%s: %s\n", call, gt_result_name(result));
}

int main(int argc, char **argv)
{
        const char *first = argc > 1 ? argv[1] : "";
        CUdeviceptr kept, freed;
        CUevent event;
        struct gt gt;

        gt_open(&gt);
        GR_MUST(cuEventCreate(&event, CU_EVENT_DEFAULT));
        GR_MUST(cuMemAlloc(&kept, 8 * MIB));
        for (volatile int i = 0; i < 80; i++) { /* more than the library tells of */
                GR_MUST(cuMemAlloc(&freed, MIB));
                GR_MUST(cuMemFree(freed));
        }
        GR_MUST(cuMemAlloc(&freed, 4 * MIB));
        GR_MUST(cuMemFree(freed));
        GR_MUST(gt_fill(&gt, NULL, gt.simulated ? kept : 16, 1, 64));
        gt_sleep_us(gt.simulated ? 0 : 500000); /* until the driver knows */
        if (!strcmp(first, "launch"))
                tell("cuLaunchKernel", gt_fill(&gt, NULL, kept, 1, 64));
        if (!strcmp(first, "fill"))
                tell("cuMemsetD8Async", cuMemsetD8Async(kept, 1, 64, NULL));
        if (!strcmp(first, "stream"))
                tell("cuStreamSynchronize", cuStreamSynchronize(NULL));
        if (!strcmp(first, "event"))
                tell("cuEventSynchronize", cuEventSynchronize(event));
        for (int i = 0; i < 2; i++)
                tell("cuCtxSynchronize", cuCtxSynchronize());
        return GR_CHECK_RESULT();
}
