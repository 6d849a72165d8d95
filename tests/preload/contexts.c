/*
 * Contexts that come and go: memory freed elsewhere than where it was allocated, contexts that end with live and cached
 * blocks, primary contexts reset and released. Every line must be the same natively and under the library.
 *
 *   contexts             the lines
 *   contexts old         with the functions as they were before CUDA 4 and 11
 *   contexts ends        some end beside another one; under the library alone
 *   contexts devices     on two devices, with peer access switched on and off; skipped without two that have it
 *   contexts threads     threads that make, use and end contexts, and capture on streams, each for itself
 *   contexts untold      on two devices, of which the driver does not tell the second one's size at first
 *   contexts keys        where no key for data of a thread is left: a thread that captures has none at its end
 *   contexts wait        for which the driver has no room at first; under the library alone
 *   contexts told        on two devices, the third retain of a primary context tells of a kernel; under the library
 *   contexts limits      on two devices, with GPURECLAIM_HARD_LIMIT=0=64MiB,1=25% and 1 GiB each: what each may take
 */
#include "contexts.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "gputest.h"

#define MOST_RETAINED 4
#define MANY_ENDS     500
#define ENDS_S        10
static char trace_path[] = "/tmp/gr-contexts-XXXXXX";

CUcontext create(void)
{
        CUcontext context;

        GR_MUST(cuCtxCreate(&context, NULL, 0, 0));
        return context;
}

void work(const char *where)
{
        printf("%s: %u words wrong\n", where, use_blocks());
}

size_t used(void)
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

/* In a thread without a context. */
static void *ask_without(void *block)
{
        CUdeviceptr base = 0, ptr = 0;
        size_t size = 0;
        void *host = block;
        const CUDA_ARRAY3D_DESCRIPTOR shape = {
                .Width = 1024, .Height = 1024, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        const CUDA_ARRAY_DESCRIPTOR flat = {
                .Width = 1024, .Height = 1024, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUmipmappedArray levels = NULL;
        CUarray array = NULL;

        printf("managed memory with none current: %d", (int)cuMemAllocManaged(&ptr, BLOCK, CU_MEM_ATTACH_GLOBAL));
        printf(", pitched %d", (int)cuMemAllocPitch(&ptr, &size, 1000, 1000, 4));
        printf(", layered %d", (int)cuMipmappedArrayCreate(&levels, &shape, 2));
        printf(", an array %d and %d", (int)cuArrayCreate(&array, &flat), (int)cuArray3DCreate(&array, &shape));
        printf(", of the host %d", (int)cuMemAllocHost(&host, BLOCK));
        printf(" and %d", (int)cuMemHostAlloc(&host, BLOCK, CU_MEMHOSTALLOC_PORTABLE));
        printf(", told %d\n", ptr != 0 || host != block);

        printf("its range with none current: %d",
               (int)cuMemGetAddressRange(&base, &size, *(CUdeviceptr *)block + BLOCK / 2));
        printf(", told %d\n", base != 0 || size != 0);
        return NULL;
}

static void freed_elsewhere(void)
{
        CUcontext a = create(), b = create(), popped;
        CUdeviceptr ptr, again;
        pthread_t thread;
        size_t size;

        GR_MUST(cuCtxSetCurrent(a));
        GR_MUST(cuMemAlloc(&ptr, BLOCK));
        GR_MUST(pthread_create(&thread, NULL, ask_without, &ptr));
        GR_MUST(pthread_join(thread, NULL));
        GR_MUST(cuCtxSetCurrent(b));
        printf("free in another context: %d", (int)cuMemFree(ptr));
        printf(", again %d", (int)cuMemFree(ptr));
        printf(", its range %d\n", (int)cuMemGetAddressRange(NULL, &size, ptr));
        work("the other context");
        GR_MUST(cuCtxPushCurrent(a));
        work("the first context");
        GR_MUST(cuMemAlloc(&again, BLOCK));
        GR_MUST(cuCtxPopCurrent(&popped));
        printf("with the other one current after a pop: %d\n", (int)cuMemFree(again));
        GR_MUST(cuCtxDestroy(a));
        work("after the first is gone");
        GR_MUST(cuCtxDestroy(b));
}

static void destroyed(void)
{
        CUcontext a = create(), b;
        CUdeviceptr live, cached, next;

        GR_MUST(cuMemAlloc(&live, BLOCK));
        GR_MUST(cuMemAlloc(&cached, BLOCK));
        GR_MUST(cuMemFree(cached));
        printf("destroy with live and cached blocks: %d\n", (int)cuCtxDestroy(a));
        printf("alloc with none current: %d\n", (int)cuMemAlloc(&next, BLOCK));
        b = create();
        printf("free of the lost live block: %d, of the cached one: %d\n", (int)cuMemFree(live),
               (int)cuMemFree(cached));
        work("the next context");
        GR_MUST(cuCtxDestroy(b));
}

static void many(void)
{
        size_t before = used();

        for (int i = 0; i < 50; i++) {
                CUcontext context = create();
                CUdeviceptr live, cached;

                GR_MUST(cuMemAlloc(&live, BLOCK));
                GR_MUST(cuMemAlloc(&cached, BLOCK));
                GR_MUST(cuMemFree(cached));
                GR_MUST(cuMemAlloc(&cached, BLOCK));
                GR_MUST(cuMemFree(cached));
                GR_MUST(cuCtxDestroy(context));
        }
        printf("fifty contexts: the device has all back: %d\n", used() == before);
}

void release_all(CUresult (*release)(CUdevice))
{
        for (int i = 0; i < MOST_RETAINED && release(0) == CUDA_SUCCESS; i++)
                ;
}

static void primary(void)
{
        CUcontext context, second;
        CUdeviceptr live, cached;

        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        work("the primary context");
        GR_MUST(cuMemAlloc(&live, BLOCK));
        GR_MUST(cuMemAlloc(&cached, BLOCK));
        GR_MUST(cuMemFree(cached));
        printf("reset: %d\n", (int)cuDevicePrimaryCtxReset(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        printf("free of a block from before: %d, of a cached one: %d\n", (int)cuMemFree(live), (int)cuMemFree(cached));
        work("after the reset");
        GR_MUST(cuDevicePrimaryCtxRetain(&second, 0));
        GR_MUST(cuDevicePrimaryCtxRelease(0));
        work("released by one of two");
        release_all(cuDevicePrimaryCtxRelease);
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        work("retained again");
        GR_MUST(cuDevicePrimaryCtxRelease(0));
}

/* Ordinals of no device: the first ones behind what any table of devices has, and one before. */
static void no_such_device(void)
{
        static const CUdevice ordinals[] = {-1, 64, 65, 128};
        CUcontext context;

        for (size_t i = 0; i < sizeof(ordinals) / sizeof(ordinals[0]); i++) {
                CUdevice dev = ordinals[i];
                size_t bytes;

                printf("device %d: retain %d, release %d, reset %d, its memory %d\n", dev,
                       (int)cuDevicePrimaryCtxRetain(&context, dev), (int)cuDevicePrimaryCtxRelease(dev),
                       (int)cuDevicePrimaryCtxReset(dev), (int)cuDeviceTotalMem(&bytes, dev));
        }
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

        GR_MUST(cuCtxSetCurrent(visitor->context));
        GR_MUST(cuMemAlloc(&visitor->ptr, BLOCK));
        GR_MUST(cuMemAlloc(&ptr, BLOCK));
        GR_MUST(cuMemFree(ptr));
        pthread_barrier_wait(&visitor->step);
        pthread_barrier_wait(&visitor->step); /* destroyed meanwhile */
        printf("alloc in a context that another thread has destroyed: %s\n",
               cuMemAlloc(&ptr, BLOCK) == CUDA_SUCCESS ? "works" : "fails");
        next = create();
        work("the visitor's next context");
        GR_MUST(cuCtxDestroy(next));
        return NULL;
}

static void under_a_thread(void)
{
        struct visitor visitor = {.context = create()};
        pthread_t thread;

        pthread_barrier_init(&visitor.step, NULL, 2);
        pthread_create(&thread, NULL, visit, &visitor);
        pthread_barrier_wait(&visitor.step);
        GR_MUST(cuCtxSetCurrent(visitor.context));
        printf("free of another thread's block: %d\n", (int)cuMemFree(visitor.ptr));
        GR_MUST(cuCtxDestroy(visitor.context));
        pthread_barrier_wait(&visitor.step);
        pthread_join(thread, NULL);
}

/* One block: written, read, and freed. */
static void use_block(uint32_t value)
{
        uint32_t read = ~value;
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, SMALL_BLOCK));
        GR_MUST(cuMemsetD32(ptr, value, SMALL_BLOCK / 4));
        GR_MUST(cuMemcpyDtoH(&read, ptr + SMALL_BLOCK - 4, 4));
        GR_CHECK_EQ(read, value);
        GR_MUST(cuMemFree(ptr));
}

static _Atomic time_t ends_late; /* a card takes a tenth of a second and more for a context */

/* As two libraries of one program do it, each of which believes that the primary context is its own. */
static void *retain_and_release(void *arg)
{
        CUcontext context;

        for (int i = 0; i < MANY_ENDS && time(NULL) < ends_late; i++) {
                GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
                GR_MUST(cuCtxSetCurrent(context));
                use_block((uint32_t)i);
                GR_MUST(cuCtxSetCurrent(NULL));
                GR_MUST(cuDevicePrimaryCtxRelease(0));
                usleep((useconds_t)(i * 7 % 300)); /* so that every order comes up */
        }
        return arg;
}

static void *create_and_destroy(void *arg)
{
        for (int i = 0; i < MANY_ENDS && time(NULL) < ends_late; i++) {
                CUcontext context = create();

                for (int k = 0; k < 3; k++)
                        use_block((uint32_t)i);
                GR_MUST(cuCtxDestroy(context));
        }
        return arg;
}

static _Atomic bool captured;

static void *streams_come_and_go(void *context)
{
        CUstream stream;

        GR_MUST(cuCtxSetCurrent(context));
        while (!captured) {
                GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
                GR_MUST(cuStreamDestroy(stream));
        }
        return context;
}

static void *blocks_come_and_go(void *context)
{
        GR_MUST(cuCtxSetCurrent(context));
        while (!captured)
                use_block(1);
        return context;
}

static void *capture(void *context)
{
        CUdeviceptr ptr;
        CUstream stream;
        CUgraph graph;

        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuMemAlloc(&ptr, SMALL_BLOCK));
        for (int i = 0; i < MANY_ENDS && time(NULL) < ends_late; i++) {
                GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
                GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
                for (int k = 0; k < 20; k++) {
                        GR_MUST(cuMemsetD32Async(ptr, 1, SMALL_BLOCK / 4, stream));
                        sched_yield();
                }
                GR_MUST(cuStreamEndCapture(stream, &graph));
                GR_MUST(cuGraphDestroy(graph));
                GR_MUST(cuStreamDestroy(stream));
        }
        captured = true;
        GR_MUST(cuMemFree(ptr));
        return context;
}

/* NULL: no third thread. */
static void side_by_side(const char *what, void *arg, void *(*first)(void *), void *(*second)(void *),
                         void *(*third)(void *))
{
        void *(*runs[])(void *) = {first, second, third};
        pthread_t threads[3];
        int count = third ? 3 : 2;

        ends_late = time(NULL) + ENDS_S;
        for (int i = 0; i < count; i++)
                GR_CHECK_EQ(pthread_create(&threads[i], NULL, runs[i], arg), 0);
        for (int i = 0; i < count; i++)
                pthread_join(threads[i], NULL);
        printf("%s: %d misuses\n", what, (int)misuses());
}

/* The driver gives a new context or stream the handle of one that another thread has just ended. */
static void of_threads(void)
{
        CUcontext context;

        side_by_side("primary context, retained and released", NULL, retain_and_release, retain_and_release, NULL);
        side_by_side("contexts, made and destroyed", NULL, create_and_destroy, create_and_destroy, create_and_destroy);
        context = create();
        side_by_side("a capture beside streams that come and go", context, capture, streams_come_and_go,
                     blocks_come_and_go);
        GR_MUST(cuCtxDestroy(context));
}

void alone(push_function *push, pop_function *pop)
{
        CUcontext context = create(), popped;
        CUdeviceptr ptr;

        for (int i = 0; i < 3; i++) {
                for (uint32_t k = 0; k < 4; k++) /* from the second one on it comes from the cache */
                        use_block(k);
                GR_MUST(pop(&popped));
                printf("popped the only one: %d, allocated then: %d", popped == context,
                       (int)cuMemAlloc(&ptr, SMALL_BLOCK));
                GR_MUST(push(context));
                use_block(2);
                GR_MUST(cuCtxSetCurrent(NULL));
                printf(", none destroyed: %d", (int)cuCtxDestroy(NULL));
                printf(", with none current: %d\n", (int)cuMemAlloc(&ptr, SMALL_BLOCK));
                GR_MUST(push(context));
                use_block(3);
        }
        GR_MUST(cuCtxDestroy(context));
        printf("destroyed, allocated then: %d\n", (int)cuMemAlloc(&ptr, SMALL_BLOCK));
}

/* What the second device sees of the first one's memory, after the first has written it. */
static void reach(const char *when, CUcontext first, CUcontext second)
{
        uint32_t value = 0, wrong = 0;
        CUdeviceptr here, there;

        for (uint32_t i = 1; i <= 10; i++) {
                GR_MUST(cuCtxSetCurrent(first));
                GR_MUST(cuMemAlloc(&here, BLOCK));
                GR_MUST(cuMemsetD32(here, i, BLOCK / 4));
                GR_MUST(cuCtxSynchronize());
                GR_MUST(cuCtxSetCurrent(second));
                GR_MUST(cuMemAlloc(&there, BLOCK));
                GR_MUST(cuMemcpyPeer(there, second, here, first, BLOCK));
                GR_MUST(cuMemcpyDtoH(&value, there + BLOCK - 4, 4));
                wrong += value != i;
                /* Both from the second device's side. */
                GR_MUST(cuMemFree(here));
                GR_MUST(cuMemFree(there));
        }
        printf("%s: %u copies wrong\n", when, wrong);
}

static void devices(void)
{
        CUcontext first, second;
        CUdeviceptr ptr;
        int count, can = 0, back = 0, ordinal = -1;

        GR_MUST(cuDeviceGetCount(&count));
        if (count > 1) {
                GR_MUST(cuDeviceCanAccessPeer(&can, 0, 1));
                GR_MUST(cuDeviceCanAccessPeer(&back, 1, 0));
        }
        if (!can || !back) {
                fprintf(stderr, "skipped: needs two devices that reach each other\n");
                exit(77);
        }
        GR_MUST(cuDevicePrimaryCtxRetain(&first, 0));
        GR_MUST(cuDevicePrimaryCtxRetain(&second, 1));
        reach("before peer access", first, second);
        for (int i = 0; i < 3; i++) {
                GR_MUST(cuCtxSetCurrent(second));
                printf("enable: %d\n", (int)cuCtxEnablePeerAccess(first, 0));
                printf("enable again: %d\n", (int)cuCtxEnablePeerAccess(first, 0));
                GR_MUST(cuCtxSetCurrent(first));
                printf("the other way: %d\n", (int)cuCtxEnablePeerAccess(second, 0));
                reach("with peer access", first, second);
                GR_MUST(cuCtxSetCurrent(first));
                GR_MUST(cuMemAlloc(&ptr, BLOCK));
                GR_MUST(cuCtxSetCurrent(second));
                /* The second device writes the first one's memory itself. */
                printf("memset from the other device: %d\n", (int)cuMemsetD32(ptr, 5, BLOCK / 4));
                /* The free would not wait for it, natively neither. */
                GR_MUST(cuCtxSynchronize());
                printf("free from there: %d\n", (int)cuMemFree(ptr));
                printf("free again: %d\n", (int)cuMemFree(ptr));
                printf("disable: %d\n", (int)cuCtxDisablePeerAccess(first));
                printf("disable again: %d\n", (int)cuCtxDisablePeerAccess(first));
                GR_MUST(cuCtxSetCurrent(first));
                printf("the other way: %d\n", (int)cuCtxDisablePeerAccess(second));
                reach("after peer access", first, second);
        }
        /* The second device goes while it can reach the first one's blocks. */
        GR_MUST(cuCtxSetCurrent(second));
        GR_MUST(cuCtxEnablePeerAccess(first, 0));
        work("the second device");
        printf("reset of the second device: %d\n", (int)cuDevicePrimaryCtxReset(1));
        GR_MUST(cuCtxSetCurrent(first));
        work("the first device after it");
        GR_MUST(cuDevicePrimaryCtxRetain(&second, 1));
        GR_MUST(cuCtxSetCurrent(second));
        work("the second device again");
        GR_MUST(cuMemAlloc(&ptr, BLOCK));
        GR_MUST(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr));
        printf("its memory is on device %d\n", ordinal);
        GR_MUST(cuMemFree(ptr));
}

/* In the driver's trace of its calls: each end of a context, with a + where one was waited for since the one before. */
static void waited(char *ret, size_t bytes)
{
        FILE *trace = fopen(trace_path, "r");
        char line[128];
        const char *sign = "";

        GR_CHECK(trace != NULL);
        ret[0] = '\0';
        while (trace && fgets(line, sizeof(line), trace)) {
                line[strcspn(line, "\n")] = '\0';
                if (strcmp(line, "cuCtxSynchronize") == 0)
                        sign = "+";
                if (strcmp(line, "cuCtxDestroy_v2") != 0 && strcmp(line, "cuDevicePrimaryCtxRelease_v2") != 0 &&
                    strcmp(line, "cuGreenCtxDestroy") != 0)
                        continue;
                snprintf(ret + strlen(ret), bytes - strlen(ret), "%s%s ", sign, line);
                sign = "";
        }
        if (trace)
                fclose(trace);
        unlink(trace_path);
}

static CUgreenCtx create_green(void)
{
        CUdevResourceDesc description;
        CUdevResource all;
        CUgreenCtx green;

        GR_MUST(cuDeviceGetDevResource(0, &all, CU_DEV_RESOURCE_TYPE_SM));
        GR_MUST(cuDevResourceGenerateDesc(&description, &all, 1));
        GR_MUST(cuGreenCtxCreate(&green, description, 0, CU_GREEN_CTX_DEFAULT_STREAM));
        return green;
}

/*
 * Contexts end beside another one. A driver crashes where its contexts are asked for beside their end, and their work
 * may use any memory: under the library each is waited for and left alone before, but not where it goes on.
 */
static void ends(void)
{
#define LOOKED_AT "cuDevicePrimaryCtxRelease_v2 " /* where a green context was made, by the library */
        CUcontext kept = create(), primary;
        CUgreenCtx green;
        char order[512];
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, BLOCK));
        GR_MUST(cuCtxDestroy(create()));
        for (int i = 0; i < 3; i++)
                GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        for (int i = 0; i < 3; i++) /* the others hold it: nothing to wait for but with the last */
                GR_MUST(cuDevicePrimaryCtxRelease(0));
        /* A green context holds it, too. */
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        green = create_green();
        GR_MUST(cuDevicePrimaryCtxRelease(0));
        GR_MUST(cuGreenCtxDestroy(green));
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        GR_MUST(cuGreenCtxDestroy(create_green()));
        GR_MUST(cuDevicePrimaryCtxRelease(0));
        GR_MUST(cuMemFree(ptr));
        GR_MUST(cuCtxDestroy(kept));
        waited(order, sizeof(order));
        GR_CHECK_STR(
                order,
                "+cuCtxDestroy_v2 "
                "cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRelease_v2 +cuDevicePrimaryCtxRelease_v2 " LOOKED_AT
                "cuDevicePrimaryCtxRelease_v2 +cuGreenCtxDestroy " LOOKED_AT
                "cuGreenCtxDestroy +cuDevicePrimaryCtxRelease_v2 "
                "cuCtxDestroy_v2 ");
}

/* A context that the library cannot manage yet is no reason to serve the thread from the one before. */
static void untold(void)
{
        CUcontext first, second;

        GR_MUST(cuCtxCreate(&first, NULL, 0, 0));
        work("the first device");
        GR_MUST(cuCtxCreate(&second, NULL, 0, 1));
        for (int i = 0; i < 3; i++) {
                CUdeviceptr ptr;
                int ordinal = -1;

                GR_MUST(cuMemAlloc(&ptr, BLOCK));
                GR_MUST(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr));
                printf("memory of the second device is on device %d\n", ordinal);
                GR_MUST(cuMemFree(ptr));
        }
        work("the second device");
        GR_MUST(cuCtxDestroy(second));
        GR_MUST(cuCtxDestroy(first));
}

/* How many blocks of 16 MiB fit, and what the device says of itself. */
static void fill(int device, size_t share)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
        CUresult (*total_mem)(unsigned *bytes, CUdevice device);
        CUmemGenericAllocationHandle handle;
        CUdeviceptr blocks[256];
        size_t total, available;
        CUcontext context;
        CUresult result;
        unsigned bytes;
        int count = 0;

        GR_MUST(cuDeviceTotalMem(&total, device));
        GR_CHECK_EQ(total, share);
        if (old_symbol("cuDeviceTotalMem", &total_mem)) {
                GR_MUST(total_mem(&bytes, device));
                GR_CHECK_EQ(bytes, share);
        }
        GR_MUST(cuDevicePrimaryCtxRetain(&context, device));
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuMemGetInfo(&available, &total));
        GR_CHECK_EQ(total, share);
        GR_CHECK_EQ(available, share);
        while ((result = cuMemAlloc(&blocks[count], 16 * MIB)) == CUDA_SUCCESS && count < 255)
                count++;
        GR_CHECK_EQ(result, CUDA_ERROR_OUT_OF_MEMORY);
        GR_CHECK_EQ((size_t)count * 16 * MIB, share);
        GR_MUST(cuMemGetInfo(&available, &total));
        GR_CHECK_EQ(available, 0);
        GR_MUST(cuMemFree(blocks[0]));
        GR_MUST(cuMemGetInfo(&available, &total));
        GR_CHECK_EQ(available, 16 * MIB); /* cached, and to be had */
        GR_MUST(cuMemAlloc(&blocks[0], 15 * MIB));
        for (int i = 0; i < count; i++)
                GR_MUST(cuMemFree(blocks[i]));
        GR_MUST(cuMemAlloc(&blocks[0], share)); /* as one block: what is cached has to go */
        GR_MUST(cuMemFree(blocks[0]));
        /* With the other device's context current it goes, too. */
        GR_MUST(cuDevicePrimaryCtxRetain(&context, !device));
        GR_MUST(cuCtxSetCurrent(context));
        prop.location.id = device;
        GR_MUST(cuMemCreate(&handle, share, &prop, 0));
        GR_MUST(cuMemRelease(handle));
        printf("device %d: %d blocks of 16 MiB\n", device, count);
}

static void limits(void)
{
        int count = 0;

        GR_MUST(cuDeviceGetCount(&count));
        GR_CHECK_EQ(count, 2);
        fill(0, 64 * MIB);
        fill(1, 256 * MIB);
        fill(0, 64 * MIB); /* the other device's use is not this one's */
}

static void come_and_go(void)
{
        alone(cuCtxPushCurrent, cuCtxPopCurrent);
        freed_elsewhere();
        destroyed();
        many();
        under_a_thread();
        no_such_device();
        primary();
        primary();
        contexts_captures();
}

static void *retain_other(void *green)
{
        CUcontext context;

        GR_MUST(cuCtxSetCurrent(green));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0) != CUDA_ERROR_ILLEGAL_ADDRESS);
        return NULL;
}

/*
 * A call that makes a context tells of a kernel that failed (GRSIM_FAULT), in a thread whose own context, on another
 * device, is not looked up yet. That no two primary contexts are locked at once is asserted in debug builds.
 */
static void told_by_other(void)
{
        struct gt_green green;
        CUcontext context;
        pthread_t thread;

        GR_MUST(cuDevicePrimaryCtxRetain(&context, 1));
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(!gt_green_open(1, &green));
        GR_MUST(cuCtxFromGreenCtx(&context, green.green));
        GR_MUST(pthread_create(&thread, NULL, retain_other, context));
        GR_MUST(pthread_join(thread, NULL));
        gt_green_close(&green);
}

int main(int argc, char **argv)
{
        static const struct {
                const char *name;
                void (*run)(void);
        } modes[] = {
                {"", come_and_go},
                {"old", contexts_old},
                {"ends", ends},
                {"devices", devices},
                {"threads", of_threads},
                {"untold", untold},
                {"keys", contexts_keys},
                {"limits", limits},
                {"graphics", contexts_of_graphics},
                {"wait", contexts_that_wait},
                {"told", told_by_other},
        };
        const char *mode = argc > 1 ? argv[1] : "";

        setvbuf(stdout, NULL, _IOLBF, 0);
        if (strcmp(mode, "ends") == 0) {
                GR_MUST(mkstemp(trace_path) < 0);
                setenv("GRSIM_TRACE", trace_path, 1); /* read at the first call */
        }
        GR_MUST(cuInit(0));
        for (size_t i = 0; i < sizeof(modes) / sizeof(modes[0]); i++)
                if (strcmp(mode, modes[i].name) == 0) {
                        modes[i].run();
                        GR_CHECK_EQ(misuses(), 0);
                        return GR_CHECK_RESULT();
                }
        fprintf(stderr, "usage: contexts [MODE]\n");
        return 2;
}
