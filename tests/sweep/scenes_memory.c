/* Scenes of memory: each kind of it, as much as there is, and who gives it back when. */
#include "scenes.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

/* ---- one context, the default stream ---- */

void plain(void)
{
        const size_t sizes[] = {SMALL, 100, 600 << 10, LARGE, 5 * MIB, 12 * MIB};
        size_t free_bytes, total_bytes, bytes, pitch;
        CUdeviceptr blocks[6], base;
        CUmemorytype type = 0;

        open_device();
        TRY(cuMemGetInfo(&free_bytes, &total_bytes));
        for (uint32_t round = 0; round < 3; round++) {
                for (uint32_t i = 0; i < 6; i++) {
                        blocks[i] = take(sizes[i]);
                        use(blocks[i], sizes[i] & ~(size_t)3, round * 6 + i);
                }
                TRY(cuMemGetAddressRange(&base, &bytes, blocks[3] + 5));
                if (base != blocks[3] || bytes != sizes[3])
                        sweep_wrong("a block of %zu bytes is told as one of %zu", sizes[3], bytes);
                TRY(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, blocks[2]));
                if (type != CU_MEMORYTYPE_DEVICE)
                        sweep_wrong("a block's memory is of type %d", (int)type);
                for (uint32_t i = 0; i < 6; i++)
                        give(blocks[i]);
        }
        for (int i = 0; i < 2; i++) {
                TRY(cuMemAllocPitch(&base, &pitch, 1000, 300, 4));
                use(base, pitch * 300, 3);
                give(base);
        }
}

/* ---- stream-ordered memory ---- */

void pools(void)
{
        CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
        cuuint64_t most = UINT64_MAX, reserved;
        CUdeviceptr p, q, block;
        CUmemoryPool pool, usual;
        CUstream stream;

        open_device();
        TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        TRY(cuDeviceGetDefaultMemPool(&usual, device));
        TRY(cuMemPoolCreate(&pool, &properties));
        TRY(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &most));
        for (uint32_t round = 0; round < 2; round++) {
                TRY(cuMemAllocAsync(&p, LARGE, stream));
                TRY(cuMemAllocFromPoolAsync(&q, LARGE, pool, stream));
                TRY(cuMemsetD32Async(p, 20 + round, LARGE / 4, stream));
                TRY(cuMemsetD32Async(q, 30 + round, LARGE / 4, stream));
                TRY(cuStreamSynchronize(stream));
                check(p, LARGE, 20 + round);
                check(q, LARGE, 30 + round);
                TRY(cuMemFreeAsync(p, stream));
                TRY(cuMemFreeAsync(q, stream));
                block = take(LARGE);
                TRY(cuMemFreeAsync(block, stream)); /* of cuMemAlloc, by a stream */
                TRY(cuMemAllocAsync(&p, SMALL, stream));
                TRY(cuStreamSynchronize(stream));
                give(p); /* and the other way round */
        }
        TRY(cuStreamSynchronize(stream));
        TRY(cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved));
        TRY(cuMemPoolTrimTo(usual, 0));
        TRY(cuMemPoolTrimTo(pool, 0));
        TRY(cuMemAllocFromPoolAsync(&q, LARGE, pool, stream));
        TRY(cuMemPoolDestroy(pool)); /* with memory out */
        TRY(cuMemFreeAsync(q, stream));
        TRY(cuStreamSynchronize(stream));
        TRY(cuStreamDestroy(stream));
}

/* ---- mapped memory ---- */

/* What can be had; by the second look where, by a fault, the first one is told of the whole card. */
static size_t free_now(void)
{
        size_t looks[2] = {0}, total_bytes = 0;

        for (int i = 0; i < 2; i++)
                TRY(cuMemGetInfo(&looks[i], &total_bytes));
        return looks[0] < looks[1] ? looks[0] : looks[1];
}

static void check_charged(size_t free_before, size_t bytes)
{
        size_t taken = free_before - free_now();

        if (taken != bytes && !sweep_beside)
                sweep_wrong("%zu bytes are taken for %zu", taken, bytes);
}

void mapped(void)
{
        CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                          .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0},
                                          .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
        CUmemAccessDesc access = {.location = properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUmemGenericAllocationHandle handle, again;
        size_t granularity = 0, free_bytes;
        CUdeviceptr p, other;
        int fd = -1;

        open_device();
        TRY(cuMemGetAllocationGranularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
        for (uint32_t round = 0; round < 2; round++) {
                free_bytes = free_now();
                other = take(LARGE);
                TRY(cuMemCreate(&handle, 4 * MIB, &properties, 0));
                TRY(cuMemAddressReserve(&p, 4 * MIB, 0, 0, 0));
                TRY(cuMemMap(p, 4 * MIB, 0, handle, 0));
                TRY(cuMemSetAccess(p, 4 * MIB, &access, 1));
                use(p, 4 * MIB, 40 + round);
                TRY(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)p));
                TRY(cuMemRelease(again));
                if (round == 0) {
                        TRY(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
                        TRY(cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd,
                                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
                        close(fd);
                        TRY(cuMemRelease(again));
                }
                give(other);
                check_charged(free_bytes, 4 * MIB);
                if (round == 0) /* either may be the last that holds the memory */
                        TRY(cuMemUnmap(p, 4 * MIB));
                else
                        TRY(cuMemRelease(handle));
                check_charged(free_bytes, 4 * MIB);
                if (round == 0)
                        TRY(cuMemRelease(handle));
                else
                        TRY(cuMemUnmap(p, 4 * MIB));
                check_charged(free_bytes, 0);
                TRY(cuMemAddressFree(p, 4 * MIB));
        }
}

/* ---- host memory ---- */

void pinned(void)
{
        static _Thread_local char own[64 << 10] __attribute__((aligned(4096)));
        const size_t sizes[] = {SMALL, LARGE, 600 << 10};
        CUdeviceptr p, seen;
        void *blocks[3], *plain_block;

        open_device();
        p = take(LARGE);
        for (int round = 0; round < 3; round++) {
                for (int i = 0; i < 3; i++) {
                        TRY(cuMemHostAlloc(&blocks[i], sizes[i], CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
                        memset(blocks[i], round + 1, sizes[i]);
                }
                TRY(cuMemAllocHost(&plain_block, LARGE));
                memset(plain_block, 9 + round, LARGE);
                TRY(cuMemcpyHtoDAsync(p, plain_block, LARGE, 0));
                TRY(cuStreamSynchronize(0));
                check(p, LARGE, 0x01010101u * (9u + (unsigned)round));
                TRY(cuMemHostGetDevicePointer(&seen, blocks[0], 0));
                TRY(cuMemHostRegister(own, sizeof(own), 0));
                for (int i = 0; i < 3; i++)
                        TRY(cuMemFreeHost(blocks[i]));
                TRY(cuMemFreeHost(plain_block));
                TRY(cuMemHostUnregister(own));
        }
        give(p);
}

/* ---- managed memory and arrays ---- */

void managed(void)
{
        CUDA_ARRAY_DESCRIPTOR shape = {.Width = 1024, .Height = 512, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUDA_ARRAY3D_DESCRIPTOR deep = {
                .Width = 256, .Height = 256, .Depth = 8, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUmipmappedArray levels;
        CUdeviceptr p, block;
        CUarray array, cube;
        size_t free_bytes, taken[2];

        open_device();
        for (int round = 0; round < 2; round++) {
                free_bytes = free_now();
                block = take(LARGE);
                TRY(cuMemAllocManaged(&p, LARGE, CU_MEM_ATTACH_GLOBAL));
                use(p, LARGE, 4);
                TRY(cuArrayCreate(&array, &shape));
                TRY(cuArray3DCreate(&cube, &deep));
                TRY(cuMipmappedArrayCreate(&levels, &deep, 2));
                give(block);
                taken[round] = free_bytes - free_now();
                TRY(cuMipmappedArrayDestroy(levels));
                TRY(cuArrayDestroy(cube));
                TRY(cuArrayDestroy(array));
                give(p);
                check_charged(free_bytes, 0);
        }
        if (taken[0] != taken[1] && !sweep_beside)
                sweep_wrong("%zu bytes are taken, then %zu for the same", taken[0], taken[1]);
}

/* ---- the helper thread: a threshold, and memory that is idle ---- */

void decay(void)
{
        CUdeviceptr blocks[5];

        open_device();
        for (uint32_t round = 0; round < 3; round++) {
                for (uint32_t i = 0; i < 5; i++) {
                        blocks[i] = take(i % 2 ? SMALL : LARGE);
                        use(blocks[i], SMALL, round * 5 + i);
                }
                for (uint32_t i = 0; i < 5; i++)
                        give(blocks[i]);
                TRY(cuCtxSynchronize());
                usleep(8000);
        }
}

/* ---- as much as there is, of one size and then of another; twice ---- */

void fullness(void)
{
        CUdeviceptr blocks[PROBES_MOST], p;
        unsigned count, found[2];

        open_device();
        p = take(LARGE);
        for (int round = 0; round < 2; round++) {
                for (int i = 0; i < 6; i++)
                        blocks[i] = take(5 * MIB + (size_t)i * 512);
                for (int i = 0; i < 6; i++)
                        give(blocks[i]);
                found[round] = count = take_all(blocks);
                while (count > 0)
                        give(blocks[--count]);
        }
        if (found[0] != found[1])
                sweep_wrong("%u blocks could be had, then %u", found[0], found[1]);
        give(p);
}

/* ---- sizes that keep changing, until auto serves them from mapped memory ---- */

void changing(void)
{
        CUdeviceptr kept, blocks[4], p;

        open_device();
        kept = take(LARGE);
        for (uint32_t i = 0; i < 12; i++) {
                size_t bytes = (10 + 2 * i) * MIB;

                p = take(bytes);
                use(p, bytes, i);
                give(p);
        }
        for (uint32_t round = 0; round < 2; round++) {
                for (uint32_t i = 0; i < 4; i++) {
                        blocks[i] = take((9 + 2 * i + round) * MIB);
                        use(blocks[i], 9 * MIB, 100 + i);
                }
                for (uint32_t i = 0; i < 4; i++) {
                        check(blocks[i], 9 * MIB, 100 + i);
                        give(blocks[i]);
                }
        }
        use(kept, LARGE, 7);
        give(kept);
}

/* ---- threads that allocate for each other ---- */

static struct {
        pthread_mutex_t lock;
        CUdeviceptr blocks[64];
        unsigned count;
} basket = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void *exchange(void *arg)
{
        attach();
        for (uint32_t i = 0; i < 8; i++) {
                CUdeviceptr p = take((i + *(unsigned *)arg) % 3 ? SMALL : LARGE), other = 0;

                use(p, SMALL, i);
                pthread_mutex_lock(&basket.lock);
                if (basket.count > 1)
                        other = basket.blocks[--basket.count];
                basket.blocks[basket.count++] = p;
                pthread_mutex_unlock(&basket.lock);
                if (other)
                        give(other);
        }
        return NULL;
}

void threads(void)
{
        unsigned numbers[3] = {0, 1, 2};
        pthread_t thread[3];

        open_device();
        for (int i = 0; i < 3; i++)
                pthread_create(&thread[i], NULL, exchange, &numbers[i]);
        for (int i = 0; i < 3; i++)
                pthread_join(thread[i], NULL);
        while (basket.count > 0)
                give(basket.blocks[--basket.count]);
}
