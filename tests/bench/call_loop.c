/*
 * N times a call or a pair of calls and nothing else, for tools that count: N [BYTES [CALL]]. CALL is a name of
 * the table below; "list" prints them.
 */
#include <cuda.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIVE 20000 /* blocks, for the calls that want many */

static size_t bytes = (size_t)1 << 20;
static CUcontext contexts[2];
static CUstream stream;
static CUdeviceptr block, blocks[LIVE];

static int pair(long i)
{
        CUdeviceptr p;

        (void)i;
        return cuMemAlloc(&p, bytes) || cuMemFree(p);
}

/* Begins with many live blocks, of which the oldest goes each time. */
static int live(long i)
{
        CUdeviceptr *p = &blocks[i % LIVE];

        return (*p && cuMemFree(*p)) || cuMemAlloc(p, 4096);
}

static int two_contexts(long i)
{
        CUdeviceptr p;

        return cuCtxSetCurrent(contexts[i % 2]) || cuMemAlloc(&p, bytes) || cuMemFree(p);
}

/* What one thread allocates the other frees; they take turns, so that no wait is counted. */
static void *free_all(void *arg)
{
        for (long i = 0; i < *(long *)arg; i++)
                if (cuMemFree(blocks[i]))
                        return (void *)1;
        return NULL;
}

static int passed_on(long i)
{
        static long count;
        pthread_t thread;
        void *failed;

        if (cuMemAlloc(&blocks[count], 4096))
                return 1;
        if (++count < 1000)
                return 0;
        (void)i;
        if (pthread_create(&thread, NULL, free_all, &count))
                return 1;
        pthread_join(thread, &failed);
        count = 0;
        return failed != NULL;
}

static int info(long i)
{
        size_t available, total;

        (void)i;
        return cuMemGetInfo(&available, &total);
}

static int attribute(long i)
{
        CUmemorytype type;

        (void)i;
        return cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block);
}

static int attribute_inside(long i)
{
        CUmemorytype type;

        (void)i;
        return cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, block + 4096);
}

static int attribute_of_nothing(long i)
{
        CUmemorytype type;

        (void)i;
        return cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)&type) !=
               CUDA_ERROR_INVALID_VALUE;
}

static int attributes(long i)
{
        CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
        CUmemorytype type;
        int ordinal;
        void *data[] = {&type, &ordinal};

        (void)i;
        return cuPointerGetAttributes(2, which, data, block);
}

static int range(long i)
{
        CUdeviceptr base;
        size_t size;

        (void)i;
        return cuMemGetAddressRange(&base, &size, block);
}

static int stream_pair(long i)
{
        CUstream made;

        (void)i;
        return cuStreamCreate(&made, CU_STREAM_NON_BLOCKING) || cuStreamDestroy(made);
}

static int stream_wait(long i)
{
        (void)i;
        return cuStreamSynchronize(stream);
}

static int event_wait(long i)
{
        static CUevent event;

        (void)i;
        return (!event && cuEventCreate(&event, CU_EVENT_DISABLE_TIMING)) || cuEventSynchronize(event);
}

static int context_wait(long i)
{
        (void)i;
        return cuCtxSynchronize();
}

static int async_pair(long i)
{
        CUdeviceptr p;

        (void)i;
        return cuMemAllocAsync(&p, bytes, stream) || cuMemFreeAsync(p, stream);
}

static int async_default(long i)
{
        CUdeviceptr p;

        (void)i;
        return cuMemAllocAsync(&p, bytes, NULL) || cuMemFreeAsync(p, NULL);
}

static int pinned(long i)
{
        void *p;

        (void)i;
        return cuMemHostAlloc(&p, 65536, 0) || cuMemFreeHost(p);
}

static int managed(long i)
{
        CUdeviceptr p;

        (void)i;
        return cuMemAllocManaged(&p, 65536, CU_MEM_ATTACH_GLOBAL) || cuMemFree(p);
}

static int array(long i)
{
        CUDA_ARRAY_DESCRIPTOR shape = {.Width = 64, .Height = 64, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
        CUarray made;

        (void)i;
        return cuArrayCreate(&made, &shape) || cuArrayDestroy(made);
}

static int mapped(long i)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
        static CUdeviceptr at;
        CUmemGenericAllocationHandle memory;

        (void)i;
        return (!at && cuMemAddressReserve(&at, 2 << 20, 2 << 20, 0, 0)) || cuMemCreate(&memory, 2 << 20, &prop, 0) ||
               cuMemMap(at, 2 << 20, 0, memory, 0) || cuMemUnmap(at, 2 << 20) || cuMemRelease(memory);
}

static int capture(long i)
{
        CUgraph graph;

        (void)i;
        return cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED) || cuStreamEndCapture(stream, &graph) ||
               cuGraphDestroy(graph);
}

static int launch(long i)
{
        static CUgraphExec exec;
        CUgraph graph;

        (void)i;
        if (!exec && (cuGraphCreate(&graph, 0) || cuGraphInstantiate(&exec, graph, 0)))
                return 1;
        return cuGraphLaunch(exec, stream);
}

static const struct {
        const char *name;
        int (*run)(long i);
} calls[] = {
        {"pair", pair},
        {"live", live},
        {"two-contexts", two_contexts},
        {"passed-on", passed_on},
        {"cuMemGetInfo", info},
        {"cuPointerGetAttribute", attribute},
        {"cuPointerGetAttribute-inside", attribute_inside},
        {"cuPointerGetAttribute-of-nothing", attribute_of_nothing},
        {"cuPointerGetAttributes", attributes},
        {"cuMemGetAddressRange", range},
        {"cuStreamCreate+Destroy", stream_pair},
        {"cuStreamSynchronize", stream_wait},
        {"cuEventSynchronize", event_wait},
        {"cuCtxSynchronize", context_wait},
        {"cuMemAllocAsync+FreeAsync", async_pair},
        {"cuMemAllocAsync+FreeAsync-default", async_default},
        {"cuMemHostAlloc+FreeHost", pinned},
        {"cuMemAllocManaged+Free", managed},
        {"cuArrayCreate+Destroy", array},
        {"cuMemCreate+Map+Unmap+Release", mapped},
        {"cuStreamBeginCapture+EndCapture", capture},
        {"cuGraphLaunch", launch},
};

#define CALLS (sizeof(calls) / sizeof(calls[0]))

int main(int argc, char **argv)
{
        long n = argc > 1 ? strtol(argv[1], NULL, 10) : 1000;
        const char *name = argc > 3 ? argv[3] : "pair";
        size_t call = 0;
        CUdevice device;

        if (argc > 1 && !strcmp(argv[1], "list")) {
                for (size_t i = 0; i < CALLS; i++)
                        puts(calls[i].name);
                return EXIT_SUCCESS;
        }
        if (argc > 2)
                bytes = strtoul(argv[2], NULL, 10);
        while (call < CALLS && strcmp(calls[call].name, name) != 0)
                call++;
        if (call == CALLS || cuInit(0) || cuDeviceGet(&device, 0) || cuDevicePrimaryCtxRetain(&contexts[0], device) ||
            cuCtxSetCurrent(contexts[0]))
                return EXIT_FAILURE;
        /* For the pairs, which are compared down to the single instruction, nothing else is there. */
        if (call > 0 && (cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) || cuMemAlloc(&block, bytes)))
                return EXIT_FAILURE;
        if (calls[call].run == two_contexts &&
            (cuDevicePrimaryCtxRetain(&contexts[1], 1) || contexts[1] == contexts[0]))
                return EXIT_FAILURE;
        for (long i = 0; i < LIVE && calls[call].run == live; i++)
                if (live(i))
                        return EXIT_FAILURE;
        for (long i = 0; i < n; i++)
                if (calls[call].run(i))
                        return EXIT_FAILURE;
        return EXIT_SUCCESS;
}
