/* Stream-ordered memory: reuse behind the free, what a pool holds, when it gives back. */
#include "simtest.h"

#include "grsim.h"

static CUmemoryPool pool;
static CUstream s, t;

static cuuint64_t get(CUmemPool_attribute attribute)
{
        cuuint64_t value = 0;

        GR_MUST(cuMemPoolGetAttribute(pool, attribute, &value));
        return value;
}

static void test_reuse_and_threshold(void)
{
        cuuint64_t keep = 64 * MIB, zero = 0;
        CUdeviceptr p, q;

        GR_MUST(cuMemAllocAsync(&p, 8 * MIB, s));
        GR_CHECK_EQ(get(CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 8 * MIB);
        GR_CHECK_EQ(get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 8 * MIB);
        GR_MUST(cuMemFreeAsync(p, s));
        GR_CHECK_EQ(cuMemFreeAsync(p, s), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuMemFree(p), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(get(CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 0);
        GR_MUST(cuMemAllocAsync(&q, 8 * MIB, s));
        GR_CHECK_EQ(q, p);
        GR_MUST(cuMemFreeAsync(q, s));
        GR_MUST(cuStreamSynchronize(s));
        GR_CHECK_EQ(get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT),
                    0); /* threshold 0: all of it goes at a synchronisation */
        GR_CHECK_EQ(grSimUsedBytes(0), 0);
        GR_CHECK_EQ(get(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 8 * MIB);
        GR_MUST(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &zero));
        GR_CHECK_EQ(get(CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 0);

        GR_MUST(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
        GR_MUST(cuMemAllocAsync(&p, 8 * MIB, s));
        GR_MUST(cuMemAllocAsync(&q, 80 * MIB, s));
        GR_MUST(cuMemFreeAsync(p, s));
        GR_MUST(cuMemFreeAsync(q, s));
        GR_MUST(cuStreamSynchronize(s));
        GR_CHECK(get(CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) <= keep);
        GR_MUST(cuMemAllocAsync(&p, 30 * MIB, s));
        GR_MUST(cuMemFreeAsync(p, s));
        GR_MUST(cuStreamSynchronize(s));
        GR_CHECK_EQ(grSimUsedBytes(0), 30 * MIB);
        GR_MUST(cuMemPoolTrimTo(pool, 0));
        GR_CHECK_EQ(grSimUsedBytes(0), 0);
        GR_MUST(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &zero));
}

/* Memory freed behind a slow kernel on one stream and taken on another: the new user waits for the old one. */
static void test_other_stream_waits(void)
{
        CUdeviceptr p, q;

        GR_MUST(cuMemAllocAsync(&p, 4 * MIB, s));
        GR_MUST(late_fill(s, p, 1, 4, 50));
        GR_MUST(cuMemFreeAsync(p, s));
        GR_MUST(cuMemAllocAsync(&q, 4 * MIB, t));
        GR_CHECK_EQ(q, p);
        GR_MUST(fill(t, q, 2, 4));
        GR_CHECK_EQ(word(q), 2);
        GR_CHECK_EQ(misuses(), 0);
        GR_MUST(cuMemFree(q));
        GR_MUST(cuCtxSynchronize());
        GR_CHECK_EQ(grSimUsedBytes(0), 0);
}

static void test_stale_use(void)
{
        CUdeviceptr p;

        GR_MUST(cuMemAllocAsync(&p, 4 * MIB, s));
        GR_MUST(cuMemFreeAsync(p, s));
        GR_MUST(fill(s, p, 1, 4));
        GR_MUST(cuStreamSynchronize(s));
        GR_CHECK_EQ(misuses(), 1);
}

static void test_own_pool(void)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                                .maxSize = 8 * MIB};
        CUmemoryPool mine, now;
        CUdeviceptr p, q;

        GR_MUST(cuMemPoolCreate(&mine, &props));
        GR_MUST(cuMemAllocFromPoolAsync(&p, 6 * MIB, mine, s));
        GR_CHECK_EQ(cuMemAllocFromPoolAsync(&q, 4 * MIB, mine, s), CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuDeviceSetMemPool(0, mine));
        GR_MUST(cuDeviceGetMemPool(&now, 0));
        GR_CHECK(now == mine);
        GR_MUST(cuMemPoolDestroy(mine));
        GR_MUST(cuDeviceGetMemPool(&now, 0));
        GR_CHECK(now == pool);
        GR_CHECK_EQ(cuMemPoolTrimTo(mine, 0), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(fill(s, p, 1, 4));
        GR_MUST(cuMemFreeAsync(p, s));
        GR_MUST(cuStreamSynchronize(s));
        GR_CHECK_EQ(grSimUsedBytes(0), 0);
}

/* What pools hold is not there for cuMemAlloc until it is trimmed. */
static void test_pool_starves_alloc(void)
{
        cuuint64_t all = UINT64_MAX;
        size_t total, free_bytes;
        CUdeviceptr p;

        GR_MUST(cuMemGetInfo(&free_bytes, &total));
        GR_MUST(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
        GR_MUST(cuMemAllocAsync(&p, free_bytes, s));
        GR_MUST(cuMemFreeAsync(p, s));
        GR_MUST(cuStreamSynchronize(s));
        GR_CHECK_EQ(cuMemAlloc(&p, MIB), CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuMemPoolTrimTo(pool, 0));
        GR_MUST(cuMemAlloc(&p, MIB));
        GR_MUST(cuMemFree(p));
}

int main(void)
{
        start();
        GR_MUST(cuDeviceGetDefaultMemPool(&pool, 0));
        GR_MUST(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamCreate(&t, CU_STREAM_NON_BLOCKING));
        test_reuse_and_threshold();
        test_other_stream_waits();
        test_own_pool();
        test_pool_starves_alloc();
        GR_MUST(cuDeviceGraphMemTrim(0));
        GR_CHECK_EQ(cuDeviceGraphMemTrim(1), CUDA_ERROR_INVALID_DEVICE);
        GR_CHECK_EQ(misuses(), 0);
        test_stale_use();
        return GR_CHECK_RESULT();
}
