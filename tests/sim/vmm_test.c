/* Virtual memory management: memory mapped side by side and twice, what it takes, and what is refused. */
#include "simtest.h"

#include "grsim.h"

static const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                         .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
static const CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                                       .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

static void test_two_handles_one_range(void)
{
        CUmemGenericAllocationHandle a, b;
        CUdeviceptr va, twin;
        size_t step;

        GR_MUST(cuMemGetAllocationGranularity(&step, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
        GR_CHECK_EQ(step, 2 * MIB);
        GR_MUST(cuMemCreate(&a, step, &prop, 0));
        GR_MUST(cuMemCreate(&b, step, &prop, 0));
        GR_CHECK_EQ(grSimUsedBytes(0), 2 * step);
        GR_MUST(cuMemAddressReserve(&va, 2 * step, 0, 0, 0));
        GR_MUST(cuMemAddressReserve(&twin, step, 0, 0, 0));
        GR_MUST(cuMemMap(va, step, 0, a, 0));
        GR_MUST(cuMemMap(va + step, step, 0, b, 0));
        GR_CHECK_EQ(cuMemMap(va, step, 0, b, 0), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemSetAccess(va, 2 * step, &access, 1));
        GR_MUST(fill(NULL, va, 7, 2 * step / 4));
        GR_CHECK_EQ(word(va + 2 * step - 4), 7);
        GR_MUST(cuMemMap(twin, step, 0, b, 0));
        GR_MUST(cuMemSetAccess(twin, step, &access, 1));
        GR_CHECK_EQ(word(twin), 7);
        GR_CHECK_EQ(misuses(), 0);

        GR_MUST(cuMemRelease(a));
        GR_MUST(cuMemRelease(b));
        GR_CHECK_EQ(cuMemAddressFree(va, 2 * step), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuMemUnmap(va, step / 2), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemUnmap(va, 2 * step));
        GR_CHECK_EQ(grSimUsedBytes(0), step); /* b is still mapped at its other place */
        GR_CHECK_EQ(word(twin + step - 4), 7);
        GR_MUST(cuMemUnmap(twin, step));
        GR_CHECK_EQ(grSimUsedBytes(0), 0);
        GR_CHECK_EQ(cuMemRelease(b), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemAddressFree(va, 2 * step));
        GR_MUST(cuMemAddressFree(twin, step));
}

static void test_access_and_stall(void)
{
        CUmemGenericAllocationHandle a;
        CUdeviceptr va;
        CUstream busy;
        double t;

        GR_MUST(cuStreamCreate(&busy, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuMemCreate(&a, 2 * MIB, &prop, 0));
        GR_MUST(cuMemAddressReserve(&va, 4 * MIB, 0, 0, 0));
        GR_MUST(cuMemMap(va, 2 * MIB, 0, a, 0));
        GR_MUST(fill(NULL, va, 1, 1));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(misuses(), 1); /* no access yet */
        GR_MUST(cuMemsetD32(va + 2 * MIB, 1, 1));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(misuses(), 2); /* reserved only */
        t = now_ms();
        GR_MUST(spin(busy, 400));
        GR_MUST(cuMemUnmap(va, 2 * MIB));
        GR_MUST(cuMemRelease(a));
        GR_CHECK(now_ms() - t < 380);
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuMemAddressFree(va, 4 * MIB));
        GR_MUST(cuStreamDestroy(busy));
}

static void test_refused(void)
{
        CUmemGenericAllocationHandle a;
        CUdeviceptr va;

        GR_CHECK_EQ(cuMemCreate(&a, MIB, &prop, 0), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuMemCreate(&a, (size_t)1 << 40, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
        GR_CHECK_EQ(cuMemAddressReserve(&va, MIB, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuMemMap(0x200000, 2 * MIB, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(grSimUsedBytes(0), 0);
}

int main(void)
{
        start();
        test_two_handles_one_range();
        test_access_and_stall();
        test_refused();
        return GR_CHECK_RESULT();
}
