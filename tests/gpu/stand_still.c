/* Blocks that a stream uses before and after they are freed, and whether it goes on or stands still. */
#include "stand_still.h"

#define LAST_BYTES (MIB / 2)

struct gt gt;
CUdeviceptr blocks[COUNT];

void allocate(void)
{
        for (int i = 0; i < COUNT; i++)
                GR_MUST(cuMemAlloc(&blocks[i], i < COUNT - 1 ? BYTES : LAST_BYTES));
}

void release(void)
{
        for (int i = 0; i < COUNT; i++)
                GR_MUST(cuMemFree(blocks[i]));
}

void fill(CUstream stream)
{
        for (int i = 0; i < COUNT; i++)
                GR_MUST(gt_fill(&gt, stream, blocks[i], 1, 64));
}

bool ends(CUstream stream)
{
        double end = gt_now_us() + PATIENCE_US;
        CUresult result;

        while ((result = cuStreamQuery(stream)) == CUDA_ERROR_NOT_READY && gt_now_us() < end)
                gt_sleep_us(500);
        if (result != CUDA_ERROR_NOT_READY)
                GR_MUST(result);
        return result == CUDA_SUCCESS;
}
