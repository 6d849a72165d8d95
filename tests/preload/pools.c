/*
 * Stream-ordered pools that keep what is freed, and are destroyed. Every line must be the same natively and under the
 * library, also where its limit has room for a few of the pools: a charge that one leaves behind is refused to a later
 * one.
 *
 *   pools         When all is freed: one thread frees by cuMemFree while another one frees in stream order. As a rule
 *                 with GRSIM_LATENCY=cuMemFree_v2=...: the other thread is done while memory is freed.
 *   pools inside  While another thread is inside cuMemFreeAsync, of which the driver has done nothing yet. With
 *                 GRSIM_LATENCY=cuMemFreeAsync=...: as long as the pool needs to be destroyed.
 *   pools again   While another thread is inside cuMemFree, and a new pool has the handle at once. With
 *                 GRSIM_LATENCY=cuMemFree_v2=...,cuMemPoolDestroy=... of which the second one is longer.
 */
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

enum { ROUNDS = 24, APART_US = 1000 };
static const size_t piece_bytes = (size_t)4 << 20;

static CUcontext context;
static CUstream stream;
static pthread_barrier_t begin;

static void *free_in_order(void *arg)
{
        GR_MUST(cuCtxSetCurrent(context));
        pthread_barrier_wait(&begin);
        usleep(APART_US);
        GR_MUST(cuMemFreeAsync(*(CUdeviceptr *)arg, stream));
        return NULL;
}

static unsigned long (*call_count)(const char *symbol);

static void *free_inside(void *arg)
{
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuMemFreeAsync(*(CUdeviceptr *)arg, stream));
        return NULL;
}

/* One piece is freed as the pool ends, one later, in stream order or not. */
static void one_inside(bool in_order)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
        unsigned long calls = call_count("cuMemFreeAsync");
        CUdeviceptr meanwhile, later;
        CUmemoryPool pool;
        pthread_t thread;

        GR_MUST(cuMemPoolCreate(&pool, &props));
        GR_MUST(cuMemAllocFromPoolAsync(&meanwhile, piece_bytes, pool, stream));
        GR_MUST(cuMemAllocFromPoolAsync(&later, piece_bytes, pool, stream));
        GR_MUST(cuStreamSynchronize(stream));
        if (pthread_create(&thread, NULL, free_inside, &meanwhile) != 0)
                exit(EXIT_FAILURE);
        while (call_count("cuMemFreeAsync") == calls)
                sched_yield();
        GR_MUST(cuMemPoolDestroy(pool));
        pthread_join(thread, NULL);
        GR_MUST(in_order ? cuMemFreeAsync(later, stream) : cuMemFree(later));
        GR_MUST(cuStreamSynchronize(stream));
}

static void *free_at_once(void *arg)
{
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuMemFree(*(CUdeviceptr *)arg));
        return NULL;
}

static void one_again(void)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
        unsigned long calls = call_count("cuMemFree_v2");
        CUmemoryPool pool, next;
        CUdeviceptr ptr;
        pthread_t thread;

        GR_MUST(cuMemPoolCreate(&pool, &props));
        GR_MUST(cuMemAllocFromPoolAsync(&ptr, piece_bytes, pool, stream));
        GR_MUST(cuStreamSynchronize(stream));
        if (pthread_create(&thread, NULL, free_at_once, &ptr) != 0)
                exit(EXIT_FAILURE);
        while (call_count("cuMemFree_v2") == calls)
                sched_yield();
        GR_MUST(cuMemPoolDestroy(pool));
        GR_MUST(cuMemPoolCreate(&next, &props));
        pthread_join(thread, NULL);
        GR_MUST(cuMemPoolDestroy(next));
}

static void one_round(void)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
        cuuint64_t keep_all = UINT64_MAX;
        CUdeviceptr at_once, in_order;
        CUmemoryPool pool;
        pthread_t thread;

        GR_MUST(cuMemPoolCreate(&pool, &props));
        GR_MUST(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all));
        GR_MUST(cuMemAllocFromPoolAsync(&at_once, piece_bytes, pool, stream));
        GR_MUST(cuMemAllocFromPoolAsync(&in_order, piece_bytes, pool, stream));
        GR_MUST(cuStreamSynchronize(stream));
        if (pthread_create(&thread, NULL, free_in_order, &in_order) != 0)
                exit(EXIT_FAILURE);
        pthread_barrier_wait(&begin);
        GR_MUST(cuMemFree(at_once));
        pthread_join(thread, NULL);
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuMemPoolDestroy(pool));
}

int main(int argc, char **argv)
{
        const bool inside = argc > 1 && !strcmp(argv[1], "inside"), again = argc > 1 && !strcmp(argv[1], "again");
        size_t before, after, total;

        *(void **)&call_count = dlsym(RTLD_DEFAULT, "grSimCallCount");
        if (!call_count)
                exit(EXIT_FAILURE);

        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        pthread_barrier_init(&begin, NULL, 2);
        GR_MUST(cuMemGetInfo(&before, &total));
        for (int i = 0; i < ROUNDS; i++)
                inside ? one_inside(i % 4 == 0) : again ? one_again() : one_round();
        GR_MUST(cuMemGetInfo(&after, &total));
        printf("%d pools, %zu MiB left\n", ROUNDS, (before - after) >> 20);
        return EXIT_SUCCESS;
}
