/*
 * Mapped memory that two threads let go of at once: of its handle and its mapping, of two references to it, and of two
 * mappings. Every line must be the same natively and under the library, also where its limit has room for little more
 * than one piece: what went wrong in counting one round is refused in a later one. Then managed memory near that limit,
 * and an export that the driver refuses.
 *
 *   mapped     as a rule with GRSIM_LATENCY=cuMemRelease=...: the other thread is done while a handle is given back
 *   mapped gone
 *              what is left of memory that is gone, with GRSIM_FAULT=cuMemRetainAllocationHandle:*=1
 *   mapped beside
 *              one thread maps and unmaps its memory, while another one takes blocks that the library finds only by
 *              mapping free memory a second time, with GPURECLAIM_POOL=split
 */
#include <cuda.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

enum { ROUNDS = 8, MANAGED = 150, BLOCKS = 32, BESIDE_ROUNDS = 100 };
static const size_t piece_bytes = (size_t)16 << 20;

struct work {
        CUresult (*act)(const struct work *work);
        CUmemGenericAllocationHandle handle;
        CUdeviceptr base;
        CUresult result;
        pthread_barrier_t *begin;
};

static CUcontext context;
static CUdeviceptr range; /* room for two mappings */

static CUresult release(const struct work *work)
{
        return cuMemRelease(work->handle);
}

static CUresult unmap(const struct work *work)
{
        return cuMemUnmap(work->base, piece_bytes);
}

static void *run(void *arg)
{
        struct work *work = arg;

        GR_MUST(cuCtxSetCurrent(context));
        pthread_barrier_wait(work->begin);
        work->result = work->act(work);
        return NULL;
}

/* At the same time, each in a thread of its own. */
static void both(struct work first, struct work second)
{
        pthread_barrier_t begin;
        pthread_t thread;

        pthread_barrier_init(&begin, NULL, 2);
        first.begin = second.begin = &begin;
        if (pthread_create(&thread, NULL, run, &second) != 0)
                exit(EXIT_FAILURE);
        run(&first);
        pthread_join(thread, NULL);
        pthread_barrier_destroy(&begin);
        printf(" %d %d", (int)first.result, (int)second.result);
        if (first.result != CUDA_SUCCESS)
                printf(" again %d", (int)first.act(&first));
}

static CUmemGenericAllocationHandle create(void)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
        CUmemGenericAllocationHandle handle;

        GR_MUST(cuMemCreate(&handle, piece_bytes, &prop, 0));
        return handle;
}

static void handle_and_mapping(void)
{
        CUmemGenericAllocationHandle handle = create();

        GR_MUST(cuMemMap(range, piece_bytes, 0, handle, 0));
        both((struct work){.act = release, .handle = handle}, (struct work){.act = unmap, .base = range});
}

static void two_references(void)
{
        CUmemGenericAllocationHandle handle = create(), again;

        GR_MUST(cuMemMap(range, piece_bytes, 0, handle, 0));
        GR_MUST(cuMemRetainAllocationHandle(&again, (void *)range)); /* NOLINT: an address of the device's */
        GR_MUST(cuMemUnmap(range, piece_bytes));
        both((struct work){.act = release, .handle = handle}, (struct work){.act = release, .handle = again});
}

/* Natively one after the other: the driver itself does not survive it (docs/measurements.md, unmap-race). */
static void two_mappings(void)
{
        struct work first = {.act = unmap, .base = range}, second = {.act = unmap, .base = range + piece_bytes};
        CUmemGenericAllocationHandle handle = create();

        GR_MUST(cuMemMap(range, piece_bytes, 0, handle, 0));
        GR_MUST(cuMemMap(range + piece_bytes, piece_bytes, 0, handle, 0));
        GR_MUST(cuMemRelease(handle));
        if (getenv("LD_PRELOAD"))
                both(first, second);
        else
                printf(" %d %d", (int)unmap(&first), (int)unmap(&second));
}

static void rounds(const char *name, void (*round)(void))
{
        printf("%s:", name);
        for (int i = 0; i < ROUNDS; i++)
                round();
        printf("\n");
}

/*
 * Memory of the host that was exported and comes back under another handle, which nobody counts, in front of the
 * device's: both go with one call.
 */
static void host_memory_in_front(void)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    .location = {CU_MEM_LOCATION_TYPE_HOST_NUMA, 0}};
        CUmemGenericAllocationHandle host, again, handle = create();
        int fd;

        GR_MUST(cuMemCreate(&host, piece_bytes, &prop, 0));
        GR_MUST(cuMemExportToShareableHandle(&fd, host, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        GR_MUST(cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        close(fd);
        GR_MUST(cuMemMap(range, piece_bytes, 0, again, 0));
        GR_MUST(cuMemMap(range + piece_bytes, piece_bytes, 0, handle, 0));
        GR_MUST(cuMemRelease(host));
        GR_MUST(cuMemRelease(again));
        GR_MUST(cuMemRelease(handle));
        GR_MUST(cuMemRetainAllocationHandle(&again, (void *)range)); /* NOLINT: an address of the device's */
        GR_MUST(cuMemRelease(again));
        printf(" %d", (int)cuMemUnmap(range, 2 * piece_bytes));
}

/* The mapping alone holds the memory, and the driver gives no handle of it again. */
static void not_retained(void)
{
        CUmemGenericAllocationHandle handle = create(), again;

        GR_MUST(cuMemMap(range, piece_bytes, 0, handle, 0));
        GR_MUST(cuMemRelease(handle));
        printf(" %d", (int)cuMemRetainAllocationHandle(&again, (void *)range)); /* NOLINT: an address of the device's */
        GR_MUST(cuMemUnmap(range, piece_bytes));
}

/* Memory that is gone, or was refused, leaves nothing in the heap. */
static void keeps_nothing(void)
{
        enum { MANY = 200, LEAST_BYTES = 32 };
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
        CUmemGenericAllocationHandle handle;
        size_t before = 0;

        for (int i = 0; i < 2 * MANY; i++) {
                if (i == MANY)
                        before = mallinfo2().uordblks;
                handle = create();
                GR_MUST(cuMemMap(range, piece_bytes, 0, handle, 0));
                GR_MUST(cuMemRelease(handle));
                GR_MUST(cuMemUnmap(range, piece_bytes));
                if (cuMemCreate(&handle, (size_t)1 << 40, &prop, 0) != CUDA_ERROR_OUT_OF_MEMORY)
                        printf("a TiB is not refused\n");
        }
        printf("2^63 bytes: %d\n", cuMemCreate(&handle, (size_t)1 << 63, &prop, 0));
        printf("the heap keeps something of it: %d\n", mallinfo2().uordblks >= before + MANY * LEAST_BYTES);
}

/* Under the limit there is room for them as long as each counts as what it is: whole steps of 64 KiB. */
static void managed(void)
{
        CUdeviceptr blocks[MANAGED];
        CUresult result;

        for (int i = 0; i < MANAGED; i++)
                GR_MUST(cuMemAllocManaged(&blocks[i], (size_t)128 << 10, CU_MEM_ATTACH_GLOBAL));
        for (int i = 0; i < MANAGED; i++) {
                result = cuMemFree(blocks[i]);
                if (result != CUDA_SUCCESS) {
                        printf("free %d of managed memory: %d\n", i, (int)result);
                        GR_MUST(cuMemFree(blocks[i]));
                }
        }
}

/* This one was not made to be exported. */
static void export_refused(void)
{
        CUmemGenericAllocationHandle handle = create(), none = 4711;
        int ends[2], fd;

        if (pipe(ends) != 0)
                exit(EXIT_FAILURE);
        fd = ends[0]; /* a descriptor of the program's that has nothing to do with it */
        printf("export: %d\n",
               (int)cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        printf("that descriptor is as it was: %d %d\n", fd == ends[0], fcntl(fd, F_GETOWN));
        GR_MUST(cuMemRelease(handle));
        printf("retained where nothing is mapped: %d",
               (int)cuMemRetainAllocationHandle(&none, (void *)range)); /* NOLINT */
        printf(", the handle is as it was: %d\n", none == 4711);
}

static void *map_and_unmap(void *arg)
{
        atomic_bool *over = arg;
        CUmemGenericAllocationHandle handle;

        GR_MUST(cuCtxSetCurrent(context));
        while (!atomic_load(over)) {
                handle = create();
                GR_MUST(cuMemMap(range, piece_bytes, 0, handle, 0));
                GR_MUST(cuMemRelease(handle));
                GR_MUST(cuMemUnmap(range, piece_bytes));
        }
        return NULL;
}

/* Blocks with a free one on each side: only the free memory together is enough for one of twice their size. */
static void beside(void)
{
        CUdeviceptr blocks[BLOCKS], twice[BLOCKS / 4];
        atomic_bool over = false;
        pthread_t thread;

        if (pthread_create(&thread, NULL, map_and_unmap, &over) != 0)
                exit(EXIT_FAILURE);
        for (int round = 0; round < BESIDE_ROUNDS; round++) {
                for (int i = 0; i < BLOCKS; i++)
                        GR_MUST(cuMemAlloc(&blocks[i], piece_bytes));
                for (int i = 0; i < BLOCKS; i += 2)
                        GR_MUST(cuMemFree(blocks[i]));
                for (int i = 0; i < BLOCKS / 4; i++)
                        GR_MUST(cuMemAlloc(&twice[i], 2 * piece_bytes));
                for (int i = 1; i < BLOCKS; i += 2)
                        GR_MUST(cuMemFree(blocks[i]));
                for (int i = 0; i < BLOCKS / 4; i++)
                        GR_MUST(cuMemFree(twice[i]));
        }
        atomic_store(&over, true);
        pthread_join(thread, NULL);
        printf("over\n");
}

int main(int argc, char **argv)
{
        CUmemAllocationProp there = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
        CUmemGenericAllocationHandle nowhere;
        size_t before, after, total;

        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuMemAddressReserve(&range, 2 * piece_bytes, 0, 0, 0));
        if (argc > 1 && strcmp(argv[1], "beside") == 0) {
                beside();
                return EXIT_SUCCESS;
        }
        for (int id = -1; id <= 64; id += 65) {
                there.location.id = id;
                printf("on device %d: %d\n", id, (int)cuMemCreate(&nowhere, piece_bytes, &there, 0));
        }
        if (argc > 1 && strcmp(argv[1], "gone") == 0) {
                rounds("a handle again", not_retained);
                keeps_nothing();
                return EXIT_SUCCESS;
        }
        GR_MUST(cuMemGetInfo(&before, &total));
        rounds("handle and mapping", handle_and_mapping);
        rounds("two references", two_references);
        rounds("two mappings", two_mappings);
        rounds("memory of the host in front", host_memory_in_front);
        managed();
        export_refused();
        GR_MUST(cuMemGetInfo(&after, &total));
        printf("%zu MiB left\n", (before - after) >> 20);
        return EXIT_SUCCESS;
}
