/*
 * Contexts that come and go: memory freed elsewhere than where it was allocated, contexts that end with live and cached
 * blocks, primary contexts reset and released. Every line must be the same natively and under the library.
 *
 *   contexts             the lines
 *   contexts limits      on two devices, with GPURECLAIM_HARD_LIMIT=0=64MiB,1=25% and 1 GiB each: what each may take
 */
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../unit/check.h"

#define MIB   ((size_t)1 << 20)
#define BLOCK (3 * MIB)
#define OK(call)                                                                                                       \
        do {                                                                                                           \
                CUresult ok_result = (call);                                                                           \
                                                                                                                       \
                if (ok_result != CUDA_SUCCESS) {                                                                       \
                        fprintf(stderr, "%s:%d: %s returned %d\n", __FILE__, __LINE__, #call, (int)ok_result);         \
                        exit(EXIT_FAILURE);                                                                            \
                }                                                                                                      \
        } while (0)

static CUcontext create(void)
{
        CUcontext context;

        OK(cuCtxCreate(&context, NULL, 0, 0));
        return context;
}

/* Allocates, writes, reads, frees, some of it several times: whether memory is what it should be in this context. */
static void work(const char *where)
{
        uint32_t value = 0, wrong = 0;
        CUdeviceptr blocks[4];

        for (uint32_t round = 0; round < 10; round++) {
                for (uint32_t i = 0; i < 4; i++) {
                        OK(cuMemAlloc(&blocks[i], BLOCK));
                        OK(cuMemsetD32(blocks[i], round * 4 + i, BLOCK / 4));
                }
                for (uint32_t i = 0; i < 4; i++) {
                        OK(cuMemcpyDtoH(&value, blocks[i] + BLOCK - 4, 4));
                        wrong += value != round * 4 + i;
                        OK(cuMemFree(blocks[i]));
                }
        }
        printf("%s: %u words wrong\n", where, wrong);
}

static size_t used(void)
{
        size_t (*bytes)(int) = NULL;
        void *found = dlsym(RTLD_DEFAULT, "grSimUsedBytes");

        memcpy(&bytes, &found, sizeof(bytes));
        return bytes ? bytes(0) : 0;
}

static unsigned long misuses(void)
{
        unsigned long (*count)(void) = NULL;
        void *found = dlsym(RTLD_DEFAULT, "grSimMisuseCount");

        memcpy(&count, &found, sizeof(count));
        return count ? count() : 0;
}

static void freed_elsewhere(void)
{
        CUcontext a = create(), b = create(), popped;
        CUdeviceptr ptr, again;
        size_t size;

        OK(cuCtxSetCurrent(a));
        OK(cuMemAlloc(&ptr, BLOCK));
        OK(cuCtxSetCurrent(b));
        printf("free in another context: %d", (int)cuMemFree(ptr));
        printf(", again %d", (int)cuMemFree(ptr));
        printf(", its range %d\n", (int)cuMemGetAddressRange(NULL, &size, ptr));
        work("the other context");
        OK(cuCtxPushCurrent(a));
        work("the first context");
        OK(cuMemAlloc(&again, BLOCK));
        OK(cuCtxPopCurrent(&popped));
        printf("with the other one current after a pop: %d\n", (int)cuMemFree(again));
        OK(cuCtxDestroy(a));
        work("after the first is gone");
        OK(cuCtxDestroy(b));
}

static void destroyed(void)
{
        CUcontext a = create(), b;
        CUdeviceptr live, cached, next;

        OK(cuMemAlloc(&live, BLOCK));
        OK(cuMemAlloc(&cached, BLOCK));
        OK(cuMemFree(cached));
        printf("destroy with live and cached blocks: %d\n", (int)cuCtxDestroy(a));
        printf("alloc with none current: %d\n", (int)cuMemAlloc(&next, BLOCK));
        b = create();
        printf("free of the lost live block: %d, of the cached one: %d\n", (int)cuMemFree(live),
               (int)cuMemFree(cached));
        work("the next context");
        OK(cuCtxDestroy(b));
}

static void many(void)
{
        size_t before = used();

        for (int i = 0; i < 50; i++) {
                CUcontext context = create();
                CUdeviceptr live, cached;

                OK(cuMemAlloc(&live, BLOCK));
                OK(cuMemAlloc(&cached, BLOCK));
                OK(cuMemFree(cached));
                OK(cuMemAlloc(&cached, BLOCK));
                OK(cuMemFree(cached));
                OK(cuCtxDestroy(context));
        }
        printf("fifty contexts: the device has all back: %d\n", used() == before);
}

static void primary(void)
{
        CUcontext context, second;
        CUdeviceptr live, cached;

        OK(cuDevicePrimaryCtxRetain(&context, 0));
        OK(cuCtxSetCurrent(context));
        work("the primary context");
        OK(cuMemAlloc(&live, BLOCK));
        OK(cuMemAlloc(&cached, BLOCK));
        OK(cuMemFree(cached));
        printf("reset: %d\n", (int)cuDevicePrimaryCtxReset(0));
        OK(cuDevicePrimaryCtxRetain(&context, 0));
        OK(cuCtxSetCurrent(context));
        printf("free of a block from before: %d, of a cached one: %d\n", (int)cuMemFree(live), (int)cuMemFree(cached));
        work("after the reset");
        OK(cuDevicePrimaryCtxRetain(&second, 0));
        OK(cuDevicePrimaryCtxRelease(0));
        work("released by one of two");
        while (cuDevicePrimaryCtxRelease(0) == CUDA_SUCCESS)
                ;
        OK(cuDevicePrimaryCtxRetain(&context, 0));
        OK(cuCtxSetCurrent(context));
        work("retained again");
        OK(cuDevicePrimaryCtxRelease(0));
}

struct visitor {
        pthread_barrier_t step;
        CUcontext context;
        CUdeviceptr ptr;
};

/* A thread whose context ends while it is current there. */
static void *visit(void *arg)
{
        struct visitor *visitor = arg;
        CUdeviceptr ptr;
        CUcontext next;

        OK(cuCtxSetCurrent(visitor->context));
        OK(cuMemAlloc(&visitor->ptr, BLOCK));
        OK(cuMemAlloc(&ptr, BLOCK));
        OK(cuMemFree(ptr));
        pthread_barrier_wait(&visitor->step);
        pthread_barrier_wait(&visitor->step); /* destroyed meanwhile */
        printf("alloc in a context that another thread has destroyed: %s\n",
               cuMemAlloc(&ptr, BLOCK) == CUDA_SUCCESS ? "works" : "fails");
        next = create();
        work("the visitor's next context");
        OK(cuCtxDestroy(next));
        return NULL;
}

static void under_a_thread(void)
{
        struct visitor visitor = {.context = create()};
        pthread_t thread;

        pthread_barrier_init(&visitor.step, NULL, 2);
        pthread_create(&thread, NULL, visit, &visitor);
        pthread_barrier_wait(&visitor.step);
        OK(cuCtxSetCurrent(visitor.context));
        printf("free of another thread's block: %d\n", (int)cuMemFree(visitor.ptr));
        OK(cuCtxDestroy(visitor.context));
        pthread_barrier_wait(&visitor.step);
        pthread_join(thread, NULL);
}

/* How many blocks of 16 MiB fit, and what the device says of itself. */
static void fill(int device, size_t share)
{
        CUdeviceptr blocks[256];
        size_t total, available;
        CUcontext context;
        CUresult result;
        int count = 0;

        OK(cuDeviceTotalMem(&total, device));
        GR_CHECK_EQ(total, share);
        OK(cuDevicePrimaryCtxRetain(&context, device));
        OK(cuCtxSetCurrent(context));
        OK(cuMemGetInfo(&available, &total));
        GR_CHECK_EQ(total, share);
        GR_CHECK_EQ(available, share);
        while ((result = cuMemAlloc(&blocks[count], 16 * MIB)) == CUDA_SUCCESS && count < 255)
                count++;
        GR_CHECK_EQ(result, CUDA_ERROR_OUT_OF_MEMORY);
        GR_CHECK_EQ((size_t)count * 16 * MIB, share);
        OK(cuMemGetInfo(&available, &total));
        GR_CHECK_EQ(available, 0);
        OK(cuMemFree(blocks[0]));
        OK(cuMemGetInfo(&available, &total));
        GR_CHECK_EQ(available, 16 * MIB); /* cached, and to be had */
        OK(cuMemAlloc(&blocks[0], 15 * MIB));
        for (int i = 0; i < count; i++)
                OK(cuMemFree(blocks[i]));
        OK(cuMemAlloc(&blocks[0], share)); /* as one block: what is cached has to go */
        OK(cuMemFree(blocks[0]));
        printf("device %d: %d blocks of 16 MiB\n", device, count);
}

int main(int argc, char **argv)
{
        int devices = 0;

        OK(cuInit(0));
        if (argc > 1 && strcmp(argv[1], "limits") == 0) {
                OK(cuDeviceGetCount(&devices));
                GR_CHECK_EQ(devices, 2);
                fill(0, 64 * MIB);
                fill(1, 256 * MIB);
                fill(0, 64 * MIB); /* the other device's use is not this one's */
        } else {
                freed_elsewhere();
                destroyed();
                many();
                under_a_thread();
                primary();
                primary();
        }
        GR_CHECK_EQ(misuses(), 0);
        return GR_CHECK_RESULT();
}
