/*
 * The shared runtime's cudaMalloc and cudaFree, which the library serves without it where that cannot be told. Every
 * line must be the same natively and under it.
 *
 *   runtime              the lines
 *   runtime late         the driver is used first; a pair, when the process ends, after the runtime's end
 *   runtime devices      on two devices; skipped without two
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define BLOCK (3 * MIB)
static void *kept; /* freed when the process ends */

static bool has_context(void)
{
        CUcontext context = NULL;

        GR_MUST(cuCtxGetCurrent(&context));
        return context;
}

static void pairs(unsigned count)
{
        void *ptr;

        for (unsigned i = 0; i < count; i++) {
                GR_MUST(cudaMalloc(&ptr, BLOCK));
                GR_MUST(cudaFree(ptr));
        }
}

/* Allocates, writes, reads and frees, again and again. */
static void work(const char *where)
{
        unsigned char value = 0;
        unsigned wrong = 0;
        void *blocks[4];

        for (int round = 0; round < 10; round++) {
                for (int i = 0; i < 4; i++) {
                        GR_MUST(cudaMalloc(&blocks[i], BLOCK));
                        GR_MUST(cudaMemset(blocks[i], round * 4 + i, BLOCK));
                }
                for (int i = 0; i < 4; i++) {
                        GR_MUST(cudaMemcpy(&value, (char *)blocks[i] + BLOCK - 1, 1, cudaMemcpyDeviceToHost));
                        wrong += value != round * 4 + i;
                        GR_MUST(cudaFree(blocks[i]));
                }
        }
        printf("%s: %u bytes wrong, last error %d\n", where, wrong, (int)cudaPeekAtLastError());
}

/* The runtime may be gone by now. */
static void at_end(void)
{
        void *ptr;

        printf("at the end: free %d", (int)cudaFree(kept));
        printf(", alloc %d\n", (int)cudaMalloc(&ptr, BLOCK));
}

static int late(void)
{
        CUcontext context;
        CUdeviceptr ptr;

        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuMemAlloc(&ptr, BLOCK));
        GR_MUST(cuMemFree(ptr));
        atexit(at_end);
        pairs(3);
        GR_MUST(cudaMalloc(&kept, BLOCK));
        return 0;
}

/* A new thread's first call gives it a context. */
static void *frees_first(void *ptr)
{
        bool before = has_context();
        int result = cudaFree(ptr);

        printf("a new thread has a context: %d, frees: %d, has one: %d\n", before, result, has_context());
        pairs(3);
        return NULL;
}

static void *allocates_first(void *arg)
{
        bool before = has_context();
        void *ptr;
        int result = cudaMalloc(&ptr, BLOCK);

        (void)arg;
        printf("a new thread has a context: %d, allocates: %d, has one: %d\n", before, result, has_context());
        GR_MUST(cudaFree(ptr));
        pairs(3);
        return NULL;
}

static void in_a_thread(void *(*function)(void *), void *arg)
{
        pthread_t thread;

        pthread_create(&thread, NULL, function, arg);
        pthread_join(thread, NULL);
}

static void threads(void)
{
        void *ptr;

        GR_MUST(cudaMalloc(&ptr, BLOCK));
        in_a_thread(frees_first, ptr);
        in_a_thread(allocates_first, NULL);
}

static void errors(void)
{
        void *ptr = &ptr;
        int result;

        result = cudaMalloc(&ptr, (size_t)1 << 45);
        printf("too much: %d, NULL %d", result, ptr == NULL);
        pairs(2);
        printf(", last error after a pair %d", (int)cudaPeekAtLastError());
        printf(", taken %d", (int)cudaGetLastError());
        printf(", then %d\n", (int)cudaGetLastError());
        printf("nowhere to put it: %d\n", (int)cudaMalloc(NULL, BLOCK));
        result = cudaMalloc(&ptr, 0);
        printf("nothing: %d, NULL %d\n", result, ptr == NULL);
        printf("NULL freed: %d\n", (int)cudaFree(NULL));
        GR_MUST(cudaMalloc(&ptr, BLOCK));
        GR_MUST(cudaFree(ptr));
        (void)cudaGetLastError();
        result = cudaFree(ptr);
        printf("freed twice: %d, last error %d\n", result, (int)cudaGetLastError());
        result = cudaFree((char *)ptr + 512);
        printf("inside: %d, last error %d\n", result, (int)cudaGetLastError());
        result = cudaFree(&result);
        printf("the host's: %d, last error %d\n", result, (int)cudaGetLastError());
        GR_MUST(cudaMallocManaged(&ptr, BLOCK, cudaMemAttachGlobal));
        printf("managed memory freed: %d\n", (int)cudaFree(ptr));
        work("after errors");
}

static bool is_in(const void *ptr, CUcontext context)
{
        CUcontext owner = NULL;

        GR_MUST(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, (CUdeviceptr)(uintptr_t)ptr));
        return owner == context;
}

/* What is current is changed behind the runtime's back. */
static void contexts(void)
{
        CUcontext primary, other, popped;
        void *first, *second;

        GR_MUST(cuCtxGetCurrent(&primary));
        GR_MUST(cudaMalloc(&first, BLOCK));
        GR_MUST(cuCtxSetCurrent(NULL));
        printf("freed with no context: %d", (int)cudaFree(first));
        printf(", has one: %d\n", has_context());
        GR_MUST(cuCtxSetCurrent(NULL));
        printf("allocated with no context: %d", (int)cudaMalloc(&first, BLOCK));
        printf(", in the primary one: %d\n", is_in(first, primary));
        GR_MUST(cuCtxCreate(&other, NULL, 0, 0));
        for (int i = 0; i < 3; i++) {
                GR_MUST(cudaMalloc(&second, BLOCK));
                printf("allocated in another context: %d\n", is_in(second, other));
                GR_MUST(cudaFree(second));
        }
        printf("freed from there: %d\n", (int)cudaFree(first));
        work("the other context");
        GR_MUST(cuCtxPopCurrent(&popped));
        GR_MUST(cudaMalloc(&first, BLOCK));
        printf("after a pop in the primary one: %d\n", is_in(first, primary));
        GR_MUST(cudaFree(first));
        GR_MUST(cuCtxDestroy(other));
        work("after the other context");
}

static void reset(void)
{
        void *live, *cached, *ptr;

        GR_MUST(cudaMalloc(&live, BLOCK));
        GR_MUST(cudaMalloc(&cached, BLOCK));
        GR_MUST(cudaFree(cached));
        printf("reset: %d\n", (int)cudaDeviceReset());
        printf("allocated after it: %d\n", (int)cudaMalloc(&ptr, BLOCK));
        (void)cudaFree(ptr);
        work("after the reset");
}

/* What the parent has is none of a child's. */
static void in_a_child(void)
{
        void *ptr = NULL, *mine;
        pid_t child;

        GR_MUST(cudaMalloc(&ptr, BLOCK));
        pairs(2);
        child = fork();
        if (child == 0) {
                int result = cudaMalloc(&mine, BLOCK);

                printf("in a child: alloc %d, free %d\n", result, (int)cudaFree(ptr));
                _exit(0);
        }
        waitpid(child, NULL, 0);
        printf("afterwards: free %d\n", (int)cudaFree(ptr));
}

/* Only who asks for the runtime's version of the symbol is given ours. */
static void looked_up(void)
{
        void *found = dlsym(RTLD_DEFAULT, "cudaMalloc");
        Dl_info info = {0};

        printf("dlsym finds it in the runtime: %d\n",
               found && dladdr(found, &info) && info.dli_fname && strstr(info.dli_fname, "libcudart.so"));
}

static int device_of(const void *ptr)
{
        int device = -1;

        GR_MUST(cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (CUdeviceptr)(uintptr_t)ptr));
        return device;
}

static void *on_the_second(void *arg)
{
        void *ptr;

        (void)arg;
        for (int i = 0; i < 3; i++) {
                GR_MUST(cudaSetDevice(1));
                GR_MUST(cudaMalloc(&ptr, BLOCK));
                printf("a thread's block is on device %d\n", device_of(ptr));
                GR_MUST(cudaFree(ptr));
        }
        return NULL;
}

static int devices(void)
{
        CUcontext first, second;
        void *blocks[2];
        int count;

        GR_MUST(cudaGetDeviceCount(&count));
        if (count < 2) {
                fprintf(stderr, "skipped: needs two devices\n");
                return 77;
        }
        for (int i = 0; i < 4; i++) {
                for (int device = 0; device < 2; device++) {
                        GR_MUST(cudaSetDevice(device));
                        pairs(3);
                        GR_MUST(cudaMalloc(&blocks[device], BLOCK));
                        printf("device %d was chosen: the block is on %d\n", device, device_of(blocks[device]));
                }
                for (int device = 0; device < 2; device++)
                        printf("freed from device 1: %d\n", (int)cudaFree(blocks[device]));
                in_a_thread(on_the_second, NULL);
        }
        GR_MUST(cuDevicePrimaryCtxRetain(&first, 0));
        GR_MUST(cuDevicePrimaryCtxRetain(&second, 1));
        for (int i = 0; i < 4; i++) {
                GR_MUST(cuCtxSetCurrent(i % 2 ? first : second));
                GR_MUST(cudaMalloc(&blocks[0], BLOCK));
                printf("made current by the driver: the block is on %d\n", device_of(blocks[0]));
                GR_MUST(cudaFree(blocks[0]));
        }
        printf("a device that is not there: %d", (int)cudaSetDevice(count));
        GR_MUST(cudaMalloc(&blocks[0], BLOCK));
        printf(", the block is on %d\n", device_of(blocks[0]));
        GR_MUST(cudaFree(blocks[0]));
        return 0;
}

int main(int argc, char **argv)
{
        setvbuf(stdout, NULL, _IOLBF, 0);
        if (argc > 1 && strcmp(argv[1], "devices") == 0)
                return devices();
        if (argc > 1 && strcmp(argv[1], "late") == 0)
                return late();
        atexit(at_end);
        GR_MUST(cudaMalloc(&kept, BLOCK));
        work("the first device");
        threads();
        errors();
        in_a_child();
        contexts();
        looked_up();
        reset();
        GR_MUST(cudaMalloc(&kept, BLOCK));
        return 0;
}
