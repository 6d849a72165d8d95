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

        GR_CHECK_EQ(cuMemAlloc(&p, 16), CUDA_ERROR_NOT_INITIALIZED);
        GR_CHECK_EQ(cuDeviceGetCount(&n), CUDA_ERROR_NOT_INITIALIZED);
        GR_MUST(cuInit(0));
        GR_MUST(cuDeviceGetCount(&n));
        GR_CHECK_EQ(n, 1);
        GR_CHECK_EQ(cuMemAlloc(&p, 16), CUDA_ERROR_INVALID_CONTEXT);
        GR_MUST(cuMemFree(0));
}

static void test_pages(void)
{
        CUdeviceptr p, small[64];

        GR_CHECK_EQ(used(), 0);
        GR_MUST(cuMemAlloc(&p, MIB + 1));
        GR_CHECK_EQ(used(), 2 * MIB);
        GR_MUST(cuMemFree(p));
        GR_MUST(cuMemAlloc(&p, 2 * MIB + 1));
        GR_CHECK_EQ(used(), 4 * MIB);
        GR_MUST(cuMemFree(p));
        GR_CHECK_EQ(used(), 0);
        for (int i = 0; i < 64; i++) {
                GR_MUST(cuMemAlloc(&small[i], 1));
                GR_CHECK_EQ(small[i] % 512, 0);
        }
        GR_CHECK_EQ(used(), 2 * MIB);
        for (int i = 0; i < 64; i++)
                GR_MUST(cuMemFree(small[i]));
        GR_CHECK_EQ(used(), 0);
}

static void test_ranges(void)
{
        const size_t sizes[] = {1, 1000, MIB, 3 * MIB + 5};
        CUdeviceptr p, base;
        size_t bytes;

        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
                GR_MUST(cuMemAlloc(&p, sizes[i]));
                GR_MUST(cuMemGetAddressRange(&base, &bytes, p + sizes[i] - 1));
                GR_CHECK_EQ(base, p);
                GR_CHECK_EQ(bytes, sizes[i]);
                GR_MUST(cuPointerGetAttribute(&bytes, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p));
                GR_CHECK_EQ(bytes, sizes[i]);
                GR_MUST(cuMemFree(p));
                GR_CHECK_EQ(cuMemGetAddressRange(&base, &bytes, p), CUDA_ERROR_NOT_FOUND);
        }
}

static void test_codes(void)
{
        CUdeviceptr p, q;
        size_t pitch;

        GR_CHECK_EQ(cuMemAlloc(&p, 0), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuMemAlloc(NULL, 1), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemFree(0));
        GR_MUST(cuMemAlloc(&p, 4096));
        GR_CHECK_EQ(cuMemFree(p + 16), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemFree(p));
        GR_CHECK_EQ(cuMemFree(p), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuMemFree(0x1000), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemAllocPitch(&p, &pitch, 1000, 100, 4));
        GR_CHECK_EQ(pitch, 1024);
        GR_CHECK_EQ(cuMemAllocPitch(&q, &pitch, 1000, 100, 3), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemFree(p));
}

static void test_capacity(void)
{
        CUdeviceptr p, q;
        size_t free_bytes, total;

        GR_MUST(cuMemGetInfo(&free_bytes, &total));
        GR_CHECK_EQ(free_bytes, total);
        GR_CHECK_EQ(cuMemAlloc(&p, total + 1), CUDA_ERROR_OUT_OF_MEMORY);
        GR_CHECK_EQ(cuMemAlloc(&p, SIZE_MAX), CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuMemAlloc(&p, total - 2 * MIB));
        GR_MUST(cuMemAlloc(&q, 2 * MIB));
        GR_MUST(cuMemGetInfo(&free_bytes, &total));
        GR_CHECK_EQ(free_bytes, 0);
        GR_CHECK_EQ(cuMemAlloc(&p, 1), CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuMemFree(q));
        GR_MUST(cuMemAlloc(&q, 1));
        GR_MUST(cuMemFree(q));
        GR_MUST(cuMemFree(p));
}

/* Blocks until every stream of the context is idle, non-blocking ones too; the stream-ordered way waits for its own
 * stream only. */
static void test_free_waits(void)
{
        CUstream busy, mine;
        CUdeviceptr p, q;
        double t;

        GR_MUST(cuStreamCreate(&busy, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamCreate(&mine, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuMemAlloc(&p, 64 * MIB));
        GR_MUST(cuMemAlloc(&q, 64));
        t = now_ms();
        GR_MUST(spin(busy, 400));
        GR_MUST(cuMemFreeAsync(p, mine));
        GR_MUST(cuStreamSynchronize(mine));
        GR_CHECK(now_ms() - t < 380);
        GR_CHECK_EQ(cuStreamQuery(busy), CUDA_ERROR_NOT_READY);
        GR_CHECK_EQ(used(), 2 * MIB);
        GR_CHECK_EQ(cuMemFree(p), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemFree(q));
        GR_CHECK(now_ms() - t >= 399);
        GR_MUST(cuStreamQuery(busy));
        GR_MUST(cuStreamDestroy(busy));
        GR_MUST(cuStreamDestroy(mine));
}

static void test_host_and_managed(void)
{
        CUdeviceptr managed, dptr;
        unsigned type;
        uint32_t *pinned;

        GR_MUST(cuMemAllocHost((void **)&pinned, 4096));
        GR_MUST(cuMemHostGetDevicePointer(&dptr, pinned, 0));
        GR_MUST(fill(NULL, dptr, 7, 1024));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(pinned[1023], 7);
        GR_MUST(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, dptr));
        GR_CHECK_EQ(type, CU_MEMORYTYPE_HOST);
        GR_CHECK_EQ(cuMemFree(dptr), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemFreeHost(pinned));
        GR_MUST(cuMemAllocManaged(&managed, 4096, CU_MEM_ATTACH_GLOBAL));
        GR_MUST(fill(NULL, managed, 9, 1024));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(*(uint32_t *)(uintptr_t)managed, 9);
        GR_MUST(cuMemFree(managed));
        GR_CHECK_EQ(misuses(), 0);
}

/* Addresses come back; memory that is not the program's is noticed, not corrupted. */
static void test_misuse(void)
{
        CUdeviceptr p;

        GR_CHECK_EQ(misuses(), 0);
        GR_MUST(cuMemAlloc(&p, 4096));
        GR_MUST(fill(NULL, p, 1, 1024));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(misuses(), 0);
        GR_MUST(fill(NULL, p, 1, 1025));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(misuses(), 1);
        GR_MUST(cuMemFree(p));
        GR_MUST(fill(NULL, p, 1, 1));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(misuses(), 2);
}

static void test_context_takes_its_memory_along(void)
{
        CUcontext ctx;
        CUdeviceptr p, q;

        GR_MUST(cuCtxCreate_v4(&ctx, NULL, 0, 0));
        GR_MUST(cuMemAlloc(&p, 10 * MIB));
        GR_MUST(cuMemAlloc(&q, 10));
        GR_CHECK_EQ(used(), 12 * MIB);
        GR_MUST(cuCtxDestroy(ctx));
        GR_CHECK_EQ(used(), 0);
        GR_CHECK_EQ(cuMemFree(p), CUDA_ERROR_INVALID_VALUE);
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
        GR_MUST(cuCtxCreate_v4(&ctx, NULL, 0, 0));
        GR_MUST(attach(&ctx, 0));
        GR_MUST(cuCtxDestroy(ctx));
        GR_MUST(cuCtxCreate_v4(&ctx, NULL, 0, 0));
        GR_MUST(detach(ctx));
        GR_CHECK_EQ(detach(ctx), CUDA_ERROR_CONTEXT_IS_DESTROYED);
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
        return GR_CHECK_RESULT();
}
