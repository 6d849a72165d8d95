/*
 * A program with planted memory errors, which the debug aids find (debug_aids_test.sh). `debug_aids MODE`:
 *
 *   overrun    writes 4 bytes behind a block of 1000 bytes, and frees it
 *   far        writes the last byte that belongs to the red zone of a block of 3 MiB, and frees it
 *   at-exit    as overrun, but does not free the block
 *   at-end     as overrun, but destroys the context
 *   in-order   as overrun, but frees the block in stream order
 *   in-kernel  as overrun, by work on a stream that still runs when the block is freed
 *   after      frees a block of 4000 bytes, writes 8 bytes to it at +100, and allocates and frees others
 *   after-end  as after, but destroys the context at once
 *   after-exit as after, but exits at once
 *   beside-exit  as overrun, but another thread frees the block while the end of the process looks at it
 *   beside-capture  as beside-exit, but the block is freed in a capture, where the free waits for nothing
 *   beside-kept  as after, of 512 KiB; another thread fills the quarantine while the end of the process looks at it
 *   beside-destroy  as overrun, but the context is destroyed while another thread frees the block
 *   unwritten  prints bytes of blocks that it has not written: of fresh memory, of memory that served before, and of a
 *              pitched block
 *   clean      none of it: each pair of lines must be as natively, and nothing is reported
 *   full       fills the card, frees, and fills it again: what is kept out of use must come back
 *   neighbour  as full, in a child that waits then; this process needs what the child keeps out of use
 *   managed    as full; then needs it for a pool of managed memory, of which a full card would end the program
 *   pairs N    allocates and frees N blocks of 1 MiB, and prints the nanoseconds that a pair takes
 */
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static CUdevice device;
static CUcontext context;
static CUstream stream;

static void begin(void)
{
        GR_MUST(cuInit(0));
        GR_MUST(cuDeviceGet(&device, 0));
        GR_MUST(cuCtxCreate(&context, NULL, 0, device));
        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
}

static CUdeviceptr allocate(size_t bytes)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc(&ptr, bytes));
        return ptr;
}

__attribute__((noinline)) static CUdeviceptr culprit(size_t bytes)
{
        CUdeviceptr ptr = allocate(bytes);

        return ptr;
}

static void overrun(void)
{
        CUdeviceptr ptr = culprit(1000);

        GR_MUST(cuMemsetD8(ptr, 1, 1000));
        GR_MUST(cuMemsetD8(ptr + 1000, 7, 4));
        GR_MUST(cuCtxSynchronize());
}

static void overrun_and_free(bool in_order, bool running)
{
        CUdeviceptr before = allocate(5000), ptr = culprit(1000), behind = allocate(6000);

        GR_MUST(cuMemsetD8Async(ptr, 1, 1000, stream));
        GR_MUST(cuMemsetD8Async(ptr + 1000, 7, 4, stream));
        if (!running)
                GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(in_order ? cuMemFreeAsync(ptr, stream) : cuMemFree(ptr));
        GR_MUST(cuMemFree(before));
        GR_MUST(cuMemFree(behind));
}

static void far(void)
{
        CUdeviceptr ptr = culprit(3 * MIB);

        GR_MUST(cuMemsetD8(ptr + 3 * MIB + 511, 7, 1));
        GR_MUST(cuMemFree(ptr));
}

static void after(void)
{
        CUdeviceptr ptr = culprit(4000);

        GR_MUST(cuMemsetD8(ptr, 1, 4000));
        GR_MUST(cuMemFree(ptr));
        GR_MUST(cuMemsetD8(ptr + 100, 7, 8));
        GR_MUST(cuCtxSynchronize());
}

static pthread_t friend;
static CUdeviceptr in_doubt;
static unsigned long (*call_count)(const char *symbol);

static void await_look(void)
{
        while (call_count("cuMemcpyDtoHAsync_v2") == 0)
                usleep(1000);
}

/* At once, or once the library reads the block. */
static void *free_beside(void *at_once)
{
        GR_MUST(cuCtxSetCurrent(context));
        if (!at_once)
                await_look();
        GR_MUST(cuMemFree(in_doubt));
        return NULL;
}

static void join_friend(void)
{
        pthread_join(friend, NULL);
}

static void start_friend(bool at_once)
{
        *(void **)&call_count = dlsym(RTLD_DEFAULT, "grSimCallCount");
        GR_CHECK_EQ(pthread_create(&friend, NULL, free_beside, at_once ? &friend : NULL), 0);
}

static void beside(bool at_once)
{
        in_doubt = culprit(1000);
        GR_MUST(cuMemsetD8(in_doubt + 1000, 7, 4));
        GR_MUST(cuCtxSynchronize());
        start_friend(at_once);
}

static void beside_kept(void)
{
        CUdeviceptr ptr = allocate(MIB / 2);

        in_doubt = allocate(MIB);
        GR_MUST(cuMemFree(ptr));
        GR_MUST(cuMemsetD8(ptr + 100, 7, 8));
        GR_MUST(cuCtxSynchronize());
        start_friend(false);
}

static void beside_destroy(void)
{
        CUcontext other;

        GR_MUST(cuCtxCreate(&other, NULL, 0, device));
        GR_MUST(cuCtxSetCurrent(context));
        beside(true);
        await_look();
        GR_MUST(cuCtxDestroy(context));
        join_friend();
}

static void churn(size_t bytes, unsigned rounds)
{
        for (unsigned i = 0; i < rounds; i++) {
                CUdeviceptr ptr = allocate(bytes);

                GR_MUST(cuMemsetD8(ptr, 3, bytes));
                GR_MUST(cuMemFree(ptr));
        }
}

static void print_bytes(const char *what, CUdeviceptr ptr, size_t bytes)
{
        unsigned char begin[2], end[2];

        GR_MUST(cuMemcpyDtoH(begin, ptr, sizeof(begin)));
        GR_MUST(cuMemcpyDtoH(end, ptr + bytes - sizeof(end), sizeof(end)));
        printf("%s: %02x %02x .. %02x %02x\n", what, begin[0], begin[1], end[0], end[1]);
}

static void unwritten(void)
{
        CUdeviceptr ptr = allocate(100000);
        size_t pitch;

        print_bytes("fresh", ptr, 100000);
        GR_MUST(cuMemsetD8(ptr, 1, 100000));
        GR_MUST(cuMemFree(ptr));
        for (unsigned i = 0; i < 4; i++) { /* one of them gets the memory */
                ptr = allocate(100000);
                print_bytes("again", ptr, 100000);
                GR_MUST(cuMemsetD8(ptr, 1, 100000));
                GR_MUST(cuMemFree(ptr));
        }
        for (unsigned i = 0; i < 2; i++) {
                GR_MUST(cuMemAllocPitch(&ptr, &pitch, 1000, 10, 4));
                print_bytes("pitched", ptr, pitch * 10);
                GR_MUST(cuMemFree(ptr));
        }
}

static void describe(const char *what, CUdeviceptr ptr, CUdeviceptr at)
{
        CUdeviceptr base = 0, start = 0;
        size_t size = 0, range = 0;
        CUresult results[] = {cuMemGetAddressRange(&base, &size, at),
                              cuPointerGetAttribute(&range, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at),
                              cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at)};

        printf("%s: %d %d %d, %zu %zu %d %d\n", what, results[0], results[1], results[2], size, range,
               results[0] == CUDA_SUCCESS && base == ptr, results[2] == CUDA_SUCCESS && start == ptr);
}

/* Memory that a graph uses, allocated and freed while its stream captures. */
static void capture(void)
{
        CUdeviceptr ptr, outside = allocate(MIB);
        CUgraphExec runs;
        CUgraph graph;
        unsigned char byte;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        ptr = allocate(MIB);
        GR_MUST(cuMemsetD8Async(ptr, 5, MIB, stream));
        GR_MUST(cuMemcpyDtoDAsync(outside, ptr, MIB, stream));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        GR_MUST(cuGraphInstantiate(&runs, graph, 0));
        for (unsigned i = 0; i < 3; i++) {
                GR_MUST(cuGraphLaunch(runs, stream));
                GR_MUST(cuStreamSynchronize(stream));
                GR_MUST(cuMemcpyDtoH(&byte, outside + MIB - 1, 1));
                printf("graph: %d\n", byte);
        }
        GR_MUST(cuGraphExecDestroy(runs));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuMemFree(ptr));
        GR_MUST(cuMemFree(outside));
}

static void clean(void)
{
        static const size_t sizes[] = {1, 511, 512, 513, 1000, 4096, 65536, 1000001, 2 * MIB, 5 * MIB + 3};
        CUdeviceptr ptr, next;
        size_t pitch;

        for (unsigned i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
                ptr = allocate(sizes[i]);
                GR_MUST(cuMemsetD8(ptr, 1, sizes[i]));
                describe("whole", ptr, ptr);
                describe("inside", ptr, ptr + sizes[i] / 2);
                printf("wrong: %d\n", cuMemFree(ptr + 256));
                GR_MUST(cuMemFree(ptr));
                describe("freed", ptr, ptr);
                printf("twice: %d\n", cuMemFree(ptr));
        }
        for (unsigned i = 0; i < 3; i++) {
                GR_MUST(cuMemAllocPitch(&ptr, &pitch, 1000, 10, 4));
                GR_MUST(cuMemsetD8(ptr, 1, pitch * 10));
                describe("pitched", ptr, ptr);
                GR_MUST(cuMemFree(ptr));
        }
        ptr = allocate(1000);
        GR_MUST(cuMemsetD8Async(ptr, 1, 1000, stream));
        GR_MUST(cuMemFreeAsync(ptr, stream));
        GR_MUST(cuStreamSynchronize(stream));
        capture();
        churn(3 * MIB, 40);
        /* Written by work that still runs when it is freed, and then by the next owner. */
        for (unsigned i = 0; i < 20; i++) {
                ptr = allocate(MIB);
                GR_MUST(cuMemsetD8Async(ptr, 1, MIB, stream));
                GR_MUST(cuMemFree(ptr));
                next = allocate(MIB);
                GR_MUST(cuMemsetD8Async(next, 2, MIB, NULL));
                print_bytes("next", next, MIB);
                GR_MUST(cuMemFree(next));
        }
}

static void full(void)
{
        static CUdeviceptr all[4096];
        unsigned count[2];

        for (unsigned round = 0; round < 2; round++) {
                unsigned n = 0;

                while (n < 4096 && cuMemAlloc(&all[n], 2 * MIB) == CUDA_SUCCESS)
                        n++;
                count[round] = n;
                while (n > 0)
                        GR_MUST(cuMemFree(all[--n]));
        }
        /* Red zones leave gaps, which differ from round to round. */
        if (count[0] > 8 && count[0] < 4096 && count[0] - count[0] / 10 <= count[1])
                puts("full: about as often again");
        else
                printf("full: %u times, then %u\n", count[0], count[1]);
}

/* Before there is a context. */
static int neighbour(void)
{
        int freed[2], done[2], rc = 0;
        char byte = 0;
        pid_t child;

        if (pipe(freed) != 0 || pipe(done) != 0)
                return 1;
        child = fork();
        if (child == 0) {
                close(done[1]);
                begin();
                full();
                rc |= write(freed[1], &byte, 1) != 1 || read(done[0], &byte, 1) != 0;
                return rc | GR_CHECK_RESULT();
        }
        close(freed[1]);
        if (read(freed[0], &byte, 1) != 1)
                return 1;
        begin();
        allocate(40 * MIB);
        close(done[1]);
        return waitpid(child, &rc, 0) != child || rc != 0 || GR_CHECK_RESULT();
}

static void managed(void)
{
#if CUDA_VERSION >= 13000
        CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE};
        CUmemoryPool pool;
        CUdeviceptr ptr;

        full();
        GR_MUST(cuMemGetDefaultMemPool(&pool, &location, CU_MEM_ALLOCATION_TYPE_MANAGED));
        GR_MUST(cuMemAllocFromPoolAsync(&ptr, 24 * MIB, pool, stream));
        GR_MUST(cuMemFreeAsync(ptr, stream));
#else
        full();
#endif
}

static void pairs(unsigned count)
{
        struct timespec begin, end;

        churn(MIB, 100);
        clock_gettime(CLOCK_MONOTONIC, &begin);
        for (unsigned i = 0; i < count; i++)
                GR_MUST(cuMemFree(allocate(MIB)));
        clock_gettime(CLOCK_MONOTONIC, &end);
        printf("%.0f ns\n",
               ((double)(end.tv_sec - begin.tv_sec) * 1e9 + (double)(end.tv_nsec - begin.tv_nsec)) / count);
}

int main(int argc, char **argv)
{
        const char *mode = argc > 1 ? argv[1] : "";

        if (strcmp(mode, "neighbour") == 0)
                return neighbour();
        if (strncmp(mode, "beside-", 7) == 0 && strcmp(mode, "beside-destroy") != 0) {
                GR_MUST(cuInit(0));
                atexit(join_friend); /* after the library, and before the driver */
        }
        begin();
        if (strcmp(mode, "overrun") == 0)
                overrun_and_free(false, false);
        else if (strcmp(mode, "in-order") == 0)
                overrun_and_free(true, false);
        else if (strcmp(mode, "in-kernel") == 0)
                overrun_and_free(false, true);
        else if (strcmp(mode, "far") == 0)
                far();
        else if (strcmp(mode, "at-exit") == 0 || strcmp(mode, "at-end") == 0)
                overrun();
        else if (strcmp(mode, "beside-capture") == 0) {
                beside(false);
                GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        } else if (strcmp(mode, "beside-exit") == 0)
                beside(false);
        else if (strcmp(mode, "beside-kept") == 0)
                beside_kept();
        else if (strcmp(mode, "beside-destroy") == 0)
                beside_destroy();
        else if (strncmp(mode, "after", 5) == 0)
                after();
        else if (strcmp(mode, "unwritten") == 0)
                unwritten();
        else if (strcmp(mode, "clean") == 0)
                clean();
        else if (strcmp(mode, "full") == 0)
                full();
        else if (strcmp(mode, "managed") == 0)
                managed();
        else if (strcmp(mode, "pairs") == 0 && argc > 2)
                pairs((unsigned)atoi(argv[2]));
        else
                return 2;
        if (strcmp(mode, "after") == 0)
                churn(MIB, 40);
        if (strstr(mode, "-end"))
                GR_MUST(cuCtxDestroy(context));
        return GR_CHECK_RESULT();
}
