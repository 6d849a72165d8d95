/*
 * Memory freed in stream order that no synchronisation has given back yet, where cudaMalloc needs it: the driver
 * refuses, and CuPy has a test that wants it so. Under the library the request is served, from what it trims off the
 * pool; the pool itself must look and work as before.
 *
 *   stream_ordered_free [--native]
 *
 * One line per check; exit status 1 when one failed.
 */
#include "gputest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t attribute(CUmemoryPool pool, CUmemPool_attribute which)
{
        cuuint64_t value;

        GT_MUST(cuMemPoolGetAttribute(pool, which, &value));
        return (size_t)value;
}

static uint32_t different_words(const struct gt *gt, CUdeviceptr p, uint32_t value, size_t words)
{
        CUdeviceptr count;
        uint32_t different;

        GT_MUST(cuMemAlloc(&count, sizeof(different)));
        GT_MUST(cuMemsetD32(count, 0, 1));
        GT_MUST(gt_count_diff(gt, NULL, p, value, words, count));
        GT_MUST(cuMemcpyDtoH(&different, count, sizeof(different)));
        GT_MUST(cuMemFree(count));
        return different;
}

int main(int argc, char **argv)
{
        bool native = argc > 1 && strcmp(argv[1], "--native") == 0;
        size_t available, total, held, reserved;
        CUresult result, expected = native ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
        CUdeviceptr most, part = 0, kept, again;
        CUmemoryPool pool;
        CUstream stream;
        struct gt gt;

        gt_open(&gt);
        GT_MUST(cuDeviceGetDefaultMemPool(&pool, gt.device));
        GT_MUST(cuMemGetInfo(&available, &total));
        stream = gt_stream();
        gt_check(attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) == 0, "a default pool keeps nothing",
                 "threshold 0");

        /* Something live in the pool, which no trimming may touch. */
        GT_MUST(cuMemAllocAsync(&kept, GT_MIB, stream));
        GT_MUST(gt_fill(&gt, stream, kept, 11, GT_MIB / 4));
        GT_MUST(cuMemAllocAsync(&most, total / 10 * 7, stream));
        GT_MUST(cuMemFreeAsync(most, stream));
        held = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        gt_check(held >= total / 10 * 7, "freed, not yet given back", "%.0f MiB reserved", gt_mib(held));
        result = cuMemAlloc(&part, total / 100 * 31);
        gt_check(result == expected, "a request that needs it", "%s", gt_result_name(result));
        if (native) {
                GT_MUST(cuStreamSynchronize(stream));
                GT_MUST(cuMemPoolTrimTo(pool, 0));
                result = cuMemAlloc(&part, total / 100 * 31);
                gt_check(result == CUDA_SUCCESS, "the same once synchronised", "%s", gt_result_name(result));
        }
        reserved = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        gt_check(reserved < held && reserved >= attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) &&
                         attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) >= GT_MIB,
                 "the pool has its live memory", "%.0f MiB reserved", gt_mib(reserved));
        gt_check(attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) == 0, "its threshold is as it was", "0");
        GT_MUST(cuMemAllocAsync(&again, 4 * GT_MIB, stream));
        GT_MUST(gt_fill(&gt, stream, again, 12, GT_MIB));
        GT_MUST(cuStreamSynchronize(stream));
        gt_check(different_words(&gt, kept, 11, GT_MIB / 4) == 0 && different_words(&gt, again, 12, GT_MIB) == 0,
                 "old and new memory of the pool", "as written");
        GT_MUST(cuMemFreeAsync(kept, stream));
        GT_MUST(cuMemFreeAsync(again, stream));
        GT_MUST(cuStreamSynchronize(stream));
        if (part)
                GT_MUST(cuMemFree(part));
        GT_MUST(cuStreamDestroy(stream));
        gt_close(&gt);
        return gt_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}
