/* Stream-ordered memory: reuse behind the free, what a pool holds, when it gives back. */
#include "simtest.h"

#include "grsim.h"

static CUmemoryPool pool;
static CUstream s, t;

static cuuint64_t get(CUmemPool_attribute attribute)
{
        cuuint64_t value = 0;

        OK(cuMemPoolGetAttribute(pool, attribute, &value));
        return value;
}

static void test_reuse_and_threshold(void)
{
        cuuint64_t keep = 64 * MIB, zero = 0;
        CUdeviceptr p, q;

        OK(cuMemAllocAsync(&p, 8 * MIB, s));
        EXPECT(8 * MIB, get(CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
        EXPECT(8 * MIB, get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
        OK(cuMemFreeAsync(p, s));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFreeAsync(p, s));
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(p));
        EXPECT(0, get(CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
        OK(cuMemAllocAsync(&q, 8 * MIB, s));
        EXPECT(p, q);
        OK(cuMemFreeAsync(q, s));
        OK(cuStreamSynchronize(s));
        EXPECT(0, get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)); /* threshold 0: all of it goes at a synchronisation */
        EXPECT(0, grSimUsedBytes(0));
        EXPECT(8 * MIB, get(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH));
        OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &zero));
        EXPECT(0, get(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH));

        OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
        OK(cuMemAllocAsync(&p, 8 * MIB, s));
        OK(cuMemAllocAsync(&q, 80 * MIB, s));
        OK(cuMemFreeAsync(p, s));
        OK(cuMemFreeAsync(q, s));
        OK(cuStreamSynchronize(s));
        CHECK(get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) <= keep);
        OK(cuMemAllocAsync(&p, 30 * MIB, s));
        OK(cuMemFreeAsync(p, s));
        OK(cuStreamSynchronize(s));
        EXPECT(30 * MIB, grSimUsedBytes(0));
        OK(cuMemPoolTrimTo(pool, 0));
        EXPECT(0, grSimUsedBytes(0));
        OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &zero));
}

/* Memory freed behind a slow kernel on one stream and taken on another: the new user waits for the old one. */
static void test_other_stream_waits(void)
{
        CUdeviceptr p, q;

        OK(cuMemAllocAsync(&p, 4 * MIB, s));
        OK(late_fill(s, p, 1, 4, 50));
        OK(cuMemFreeAsync(p, s));
        OK(cuMemAllocAsync(&q, 4 * MIB, t));
        EXPECT(p, q);
        OK(fill(t, q, 2, 4));
        EXPECT(2, word(q));
        EXPECT(0, misuses());
        OK(cuMemFree(q));
        OK(cuCtxSynchronize());
        EXPECT(0, grSimUsedBytes(0));
}

static void test_stale_use(void)
{
        CUdeviceptr p;

        OK(cuMemAllocAsync(&p, 4 * MIB, s));
        OK(cuMemFreeAsync(p, s));
        OK(fill(s, p, 1, 4));
        OK(cuStreamSynchronize(s));
        EXPECT(1, misuses());
}

static void test_own_pool(void)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                                .maxSize = 8 * MIB};
        CUmemoryPool mine, now;
        CUdeviceptr p, q;

        OK(cuMemPoolCreate(&mine, &props));
        OK(cuMemAllocFromPoolAsync(&p, 6 * MIB, mine, s));
        EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAllocFromPoolAsync(&q, 4 * MIB, mine, s));
        OK(cuDeviceSetMemPool(0, mine));
        OK(cuDeviceGetMemPool(&now, 0));
        CHECK(now == mine);
        OK(cuMemPoolDestroy(mine));
        OK(cuDeviceGetMemPool(&now, 0));
        CHECK(now == pool);
        EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemPoolTrimTo(mine, 0));
        OK(fill(s, p, 1, 4));
        OK(cuMemFreeAsync(p, s));
        OK(cuStreamSynchronize(s));
        EXPECT(0, grSimUsedBytes(0));
}

/* What pools hold is not there for cuMemAlloc until it is trimmed. */
static void test_pool_starves_alloc(void)
{
        cuuint64_t all = UINT64_MAX;
        size_t total, free_bytes;
        CUdeviceptr p;

        OK(cuMemGetInfo(&free_bytes, &total));
        OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
        OK(cuMemAllocAsync(&p, free_bytes, s));
        OK(cuMemFreeAsync(p, s));
        OK(cuStreamSynchronize(s));
        EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&p, MIB));
        OK(cuMemPoolTrimTo(pool, 0));
        OK(cuMemAlloc(&p, MIB));
        OK(cuMemFree(p));
}

int main(void)
{
        start();
        OK(cuDeviceGetDefaultMemPool(&pool, 0));
        OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(cuStreamCreate(&t, CU_STREAM_NON_BLOCKING));
        test_reuse_and_threshold();
        test_other_stream_waits();
        test_own_pool();
        test_pool_starves_alloc();
        OK(cuDeviceGraphMemTrim(0));
        EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGraphMemTrim(1));
        EXPECT(0, misuses());
        test_stale_use();
        return done("pool");
}
