/*
 * Memory freed in stream order that no synchronisation has given back yet, where cudaMalloc needs it: the driver
 * refuses, and CuPy has a test that wants it so. Under the library the request is served, from what it trims off the
 * pool; the pool itself must look and work as before.
 *
 * Memory of cudaMalloc that is freed in a stream of another device, behind a copy that still reads it.
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

        GR_MUST(cuMemPoolGetAttribute(pool, which, &value));
        return (size_t)value;
}

static uint32_t different_words(const struct gt *gt, CUdeviceptr p, uint32_t value, size_t words)
{
        CUdeviceptr count;
        uint32_t different;

        GR_MUST(cuMemAlloc(&count, sizeof(different)));
        GR_MUST(cuMemsetD32(count, 0, 1));
        GR_MUST(gt_count_diff(gt, NULL, p, value, words, count));
        GR_MUST(cuMemcpyDtoH(&different, count, sizeof(different)));
        GR_MUST(cuMemFree(count));
        return different;
}

/* The copy needs no peer access, so only the order of the stream says that the free comes after it. */
static void free_in_stream_of_other(const struct gt *gt)
{
        const size_t words = 8 * MIB;
        struct gt other = *gt;
        CUdeviceptr from, to, next;
        CUstream stream, beside;
        CUmodule module;

        GR_MUST(cuMemAlloc(&from, words * 4));
        GR_MUST(gt_fill(gt, NULL, from, 1, words));
        GR_MUST(cuCtxSynchronize());
        beside = gt_stream();
        GR_MUST(cuDevicePrimaryCtxRetain(&other.ctx, 1));
        gt_attach(&other);
        gt_load_kernels(&module);
        GR_MUST(cuModuleGetFunction(&other.spin, module, "gr_spin"));
        GR_MUST(cuMemAlloc(&to, words * 4));
        stream = gt_stream();
        GR_MUST(gt_spin(&other, stream, 300000));
        GR_MUST(cuMemcpyPeerAsync(to, other.ctx, from, gt->ctx, words * 4, stream));
        GR_MUST(cuMemFreeAsync(from, stream));
        gt_attach(gt);
        GR_MUST(cuMemAlloc(&next, words * 4));
        GR_MUST(gt_fill(gt, beside, next, 2, words));
        GR_MUST(cuStreamSynchronize(beside));
        gt_attach(&other);
        GR_MUST(cuStreamSynchronize(stream));
        gt_check(gt_wrong_words(to, words * 4, 1) == 0, "freed in a stream of another device",
                 "%u words of three are wrong", gt_wrong_words(to, words * 4, 1));
        GR_MUST(cuMemFree(to));
        GR_MUST(cuStreamDestroy(stream));
        GR_MUST(cuModuleUnload(module));
        GR_MUST(cuDevicePrimaryCtxRelease(1));
        gt_attach(gt);
        GR_MUST(cuMemFree(next));
        GR_MUST(cuStreamDestroy(beside));
}

int main(int argc, char **argv)
{
        bool native = argc > 1 && strcmp(argv[1], "--native") == 0;
        size_t available, total, held, reserved;
        CUresult result, expected = native ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
        CUdeviceptr most, part = 0, kept, again;
        CUmemoryPool pool;
        CUstream stream;
        int devices = 0;
        struct gt gt;

        gt_open(&gt);
        GR_MUST(cuDeviceGetCount(&devices));
        GR_MUST(cuDeviceGetDefaultMemPool(&pool, gt.device));
        GR_MUST(cuMemGetInfo(&available, &total));
        stream = gt_stream();
        gt_check(attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) == 0, "a default pool keeps nothing",
                 "threshold 0");

        /* Something live in the pool, which no trimming may touch. */
        GR_MUST(cuMemAllocAsync(&kept, MIB, stream));
        GR_MUST(gt_fill(&gt, stream, kept, 11, MIB / 4));
        GR_MUST(cuMemAllocAsync(&most, total / 10 * 7, stream));
        GR_MUST(cuMemFreeAsync(most, stream));
        held = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        gt_check(held >= total / 10 * 7, "freed, not yet given back", "%.0f MiB reserved", gt_mib(held));
        result = cuMemAlloc(&part, total / 100 * 31);
        gt_check(result == expected, "a request that needs it", "%s", gt_result_name(result));
        if (native) {
                GR_MUST(cuStreamSynchronize(stream));
                GR_MUST(cuMemPoolTrimTo(pool, 0));
                result = cuMemAlloc(&part, total / 100 * 31);
                gt_check(result == CUDA_SUCCESS, "the same once synchronised", "%s", gt_result_name(result));
        }
        reserved = attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        gt_check(reserved < held && reserved >= attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) &&
                         attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT) >= MIB,
                 "the pool has its live memory", "%.0f MiB reserved", gt_mib(reserved));
        gt_check(attribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) == 0, "its threshold is as it was", "0");
        GR_MUST(cuMemAllocAsync(&again, 4 * MIB, stream));
        GR_MUST(gt_fill(&gt, stream, again, 12, MIB));
        GR_MUST(cuStreamSynchronize(stream));
        gt_check(different_words(&gt, kept, 11, MIB / 4) == 0 && different_words(&gt, again, 12, MIB) == 0,
                 "old and new memory of the pool", "as written");
        GR_MUST(cuMemFreeAsync(kept, stream));
        GR_MUST(cuMemFreeAsync(again, stream));
        GR_MUST(cuStreamSynchronize(stream));
        if (part)
                GR_MUST(cuMemFree(part));
        GR_MUST(cuStreamDestroy(stream));
        if (devices > 1)
                free_in_stream_of_other(&gt);
        gt_close(&gt);
        return GR_CHECK_RESULT();
}
