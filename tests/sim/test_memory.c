/* Memory as the driver gives it: pages, slabs, sizes, codes, and frees that wait for the context's work. */
#include "simtest.h"

#include "grsim.h"

#include <dlfcn.h>
#include <string.h>

static size_t used(void)
{
        return grSimUsedBytes(0);
}

static void test_before_init_and_without_context(void)
{
        CUdeviceptr p;
        int n;

        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuMemAlloc(&p, 16));
        EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&n));
        OK(cuInit(0));
        OK(cuDeviceGetCount(&n));
        EXPECT(1, n);
        EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&p, 16));
        OK(cuMemFree(0));
}

static void test_pages(void)
{
        CUdeviceptr p, small[64];

        EXPECT(0, used());
        OK(cuMemAlloc(&p, MIB + 1));
        EXPECT(2 * MIB, used());
        OK(cuMemFree(p));
        OK(cuMemAlloc(&p, 2 * MIB + 1));
        EXPECT(4 * MIB, used());
        OK(cuMemFree(p));
        EXPECT(0, used());
        for (int i = 0; i < 64; i++) {
                OK(cuMemAlloc(&small[i], 1));
                EXPECT(0, small[i] % 512);
        }
        EXPECT(2 * MIB, used());
        for (int i = 0; i < 64; i++)
                OK(cuMemFree(small[i]));
        EXPECT(0, used());
}

static void test_ranges(void)
{
        const size_t sizes[] = {1, 1000, MIB, 3 * MIB + 5};
        CUdeviceptr p, base;
        size_t bytes;

        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                OK(cuMemAlloc(&p, sizes[i]));
                OK(cuMemGetAddressRange(&base, &bytes, p + sizes[i] - 1));
                EXPECT(p, base);
                EXPECT(sizes[i], bytes);
                OK(cuPointerGetAttribute(&bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p));
                EXPECT(sizes[i], bytes);
                OK(cuMemFree(p));
                EXPECT(CUDA_ERROR_NOT_FOUND, cuMemGetAddressRange(&base, &bytes, p));
        }
}

static void test_codes(void)
{
        CUdeviceptr p, q;
        size_t pitch;

        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(&p, 0));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(NULL, 1));
        OK(cuMemFree(0));
        OK(cuMemAlloc(&p, 4096));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(p + 16));
        OK(cuMemFree(p));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(p));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(0x1000));
        OK(cuMemAllocPitch(&p, &pitch, 1000, 100, 4));
        EXPECT(1024, pitch);
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAllocPitch(&q, &pitch, 1000, 100, 3));
        OK(cuMemFree(p));
}

static void test_capacity(void)
{
        CUdeviceptr p, q;
        size_t free_bytes, total;

        OK(cuMemGetInfo(&free_bytes, &total));
        EXPECT(total, free_bytes);
        EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&p, total + 1));
        EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&p, SIZE_MAX));
        OK(cuMemAlloc(&p, total - 2 * MIB));
        OK(cuMemAlloc(&q, 2 * MIB));
        OK(cuMemGetInfo(&free_bytes, &total));
        EXPECT(0, free_bytes);
        EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&p, 1));
        OK(cuMemFree(q));
        OK(cuMemAlloc(&q, 1));
        OK(cuMemFree(q));
        OK(cuMemFree(p));
}

/* Blocks until every stream of the context is idle, non-blocking ones too; the stream-ordered way waits for its own
 * stream only. */
static void test_free_waits(void)
{
        CUstream busy, mine;
        CUdeviceptr p, q;
        double t;

        OK(cuStreamCreate(&busy, CU_STREAM_NON_BLOCKING));
        OK(cuStreamCreate(&mine, CU_STREAM_NON_BLOCKING));
        OK(cuMemAlloc(&p, 64 * MIB));
        OK(cuMemAlloc(&q, 64));
        t = now_ms();
        OK(spin(busy, 400));
        OK(cuMemFreeAsync(p, mine));
        OK(cuStreamSynchronize(mine));
        CHECK(now_ms() - t < 380);
        EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(busy));
        EXPECT(2 * MIB, used());
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(p));
        OK(cuMemFree(q));
        CHECK(now_ms() - t >= 399);
        OK(cuStreamQuery(busy));
        OK(cuStreamDestroy(busy));
        OK(cuStreamDestroy(mine));
}

static void test_host_and_managed(void)
{
        CUdeviceptr managed, dptr;
        unsigned type;
        uint32_t *pinned;

        OK(cuMemAllocHost((void **)&pinned, 4096));
        OK(cuMemHostGetDevicePointer(&dptr, pinned, 0));
        OK(fill(NULL, dptr, 7, 1024));
        OK(cuCtxSynchronize());
        EXPECT(7, pinned[1023]);
        OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, dptr));
        EXPECT(CU_MEMORYTYPE_HOST, type);
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(dptr));
        OK(cuMemFreeHost(pinned));
        OK(cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
        OK(fill(NULL, managed, 9, 1024));
        OK(cuCtxSynchronize());
        EXPECT(9, *(uint32_t *)(uintptr_t)managed);
        OK(cuMemFree(managed));
        EXPECT(0, misuses());
}

/* Addresses come back; memory that is not the program's is noticed, not corrupted. */
static void test_misuse(void)
{
        CUdeviceptr p;

        EXPECT(0, misuses());
        OK(cuMemAlloc(&p, 4096));
        OK(fill(NULL, p, 1, 1024));
        OK(cuCtxSynchronize());
        EXPECT(0, misuses());
        OK(fill(NULL, p, 1, 1025));
        OK(cuCtxSynchronize());
        EXPECT(1, misuses());
        OK(cuMemFree(p));
        OK(fill(NULL, p, 1, 1));
        OK(cuCtxSynchronize());
        EXPECT(2, misuses());
}

static void test_context_takes_its_memory_along(void)
{
        CUcontext ctx;
        CUdeviceptr p, q;

        OK(cuCtxCreate_v4(&ctx, NULL, 0, 0));
        OK(cuMemAlloc(&p, 10 * MIB));
        OK(cuMemAlloc(&q, 10));
        EXPECT(12 * MIB, used());
        OK(cuCtxDestroy(ctx));
        EXPECT(0, used());
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(p));
}

/* Looked up, as the header calls them deprecated. Nothing of an ended context is left to the next one. */
static void test_attached(void)
{
        CUresult (*attach)(CUcontext *, unsigned), (*detach)(CUcontext);
        void *found = dlsym(RTLD_DEFAULT, "cuCtxAttach");
        CUcontext ctx;

        memcpy(&attach, &found, sizeof found);
        found = dlsym(RTLD_DEFAULT, "cuCtxDetach");
        memcpy(&detach, &found, sizeof found);
        OK(cuCtxCreate_v4(&ctx, NULL, 0, 0));
        OK(attach(&ctx, 0));
        OK(cuCtxDestroy(ctx));
        OK(cuCtxCreate_v4(&ctx, NULL, 0, 0));
        OK(detach(ctx));
        EXPECT(CUDA_ERROR_CONTEXT_IS_DESTROYED, detach(ctx));
}

int main(void)
{
        test_before_init_and_without_context();
        start();
        test_pages();
        test_ranges();
        test_codes();
        test_capacity();
        test_free_waits();
        test_host_and_managed();
        test_context_takes_its_memory_along();
        test_misuse();
        test_attached();
        return done("memory");
}
