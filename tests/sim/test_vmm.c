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

        OK(cuMemGetAllocationGranularity(&step, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
        EXPECT(2 * MIB, step);
        OK(cuMemCreate(&a, step, &prop, 0));
        OK(cuMemCreate(&b, step, &prop, 0));
        EXPECT(2 * step, grSimUsedBytes(0));
        OK(cuMemAddressReserve(&va, 2 * step, 0, 0, 0));
        OK(cuMemAddressReserve(&twin, step, 0, 0, 0));
        OK(cuMemMap(va, step, 0, a, 0));
        OK(cuMemMap(va + step, step, 0, b, 0));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemMap(va, step, 0, b, 0));
        OK(cuMemSetAccess(va, 2 * step, &access, 1));
        OK(fill(NULL, va, 7, 2 * step / 4));
        EXPECT(7, word(va + 2 * step - 4));
        OK(cuMemMap(twin, step, 0, b, 0));
        OK(cuMemSetAccess(twin, step, &access, 1));
        EXPECT(7, word(twin));
        EXPECT(0, misuses());

        OK(cuMemRelease(a));
        OK(cuMemRelease(b));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(va, 2 * step));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(va, step / 2));
        OK(cuMemUnmap(va, 2 * step));
        EXPECT(step, grSimUsedBytes(0)); /* b is still mapped at its other place */
        EXPECT(7, word(twin + step - 4));
        OK(cuMemUnmap(twin, step));
        EXPECT(0, grSimUsedBytes(0));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemRelease(b));
        OK(cuMemAddressFree(va, 2 * step));
        OK(cuMemAddressFree(twin, step));
}

static void test_access_and_stall(void)
{
        CUmemGenericAllocationHandle a;
        CUdeviceptr va;
        CUstream busy;
        double t;

        OK(cuStreamCreate(&busy, CU_STREAM_NON_BLOCKING));
        OK(cuMemCreate(&a, 2 * MIB, &prop, 0));
        OK(cuMemAddressReserve(&va, 4 * MIB, 0, 0, 0));
        OK(cuMemMap(va, 2 * MIB, 0, a, 0));
        OK(fill(NULL, va, 1, 1));
        OK(cuCtxSynchronize());
        EXPECT(1, misuses()); /* no access yet */
        OK(cuMemsetD32(va + 2 * MIB, 1, 1));
        OK(cuCtxSynchronize());
        EXPECT(2, misuses()); /* reserved only */
        t = now_ms();
        OK(spin(busy, 400));
        OK(cuMemUnmap(va, 2 * MIB));
        OK(cuMemRelease(a));
        CHECK(now_ms() - t < 380);
        OK(cuCtxSynchronize());
        OK(cuMemAddressFree(va, 4 * MIB));
        OK(cuStreamDestroy(busy));
}

static void test_refused(void)
{
        CUmemGenericAllocationHandle a;
        CUdeviceptr va;

        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&a, MIB, &prop, 0));
        EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemCreate(&a, (size_t)1 << 40, &prop, 0));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(&va, MIB, 0, 0, 0));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemMap(0x200000, 2 * MIB, 0, 0, 0));
        EXPECT(0, grSimUsedBytes(0));
}

int main(void)
{
        start();
        test_two_handles_one_range();
        test_access_and_stall();
        test_refused();
        return done("vmm");
}
