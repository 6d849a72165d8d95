/*
 * first_call [fork]
 *
 * Any function of the driver may be the first that a program calls. Each is that in a process of its own, with and
 * without cuInit before, and must answer as it does natively.
 */
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static CUdeviceptr ptr;
static CUcontext context;
static CUstream stream;
static CUgraph graph;
static CUipcMemHandle handle;
static CUpointer_attribute attribute = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
static size_t bytes, more_bytes;
static unsigned int value;
static void *values[] = {&value};
static void *found;

/* Functions that the stand-in for the driver has: a program that links one that the driver lacks does not start. */
#define CALLS(CALL)                                                                                                    \
        CALL(cuGetProcAddress_v2("cuMemAlloc", &found, 12000, 0, NULL))                                                \
        CALL(cuGetProcAddress_v2("cuMemAlloc", NULL, 12000, 0, NULL))                                                  \
        CALL(cuMemAlloc_v2(&ptr, 4096))                                                                                \
        CALL(cuMemAlloc_v2(NULL, 4096))                                                                                \
        CALL(cuMemAllocPitch_v2(&ptr, &bytes, 100, 100, 4))                                                            \
        CALL(cuMemFree_v2(0))                                                                                          \
        CALL(cuMemAllocAsync(&ptr, 4096, NULL))                                                                        \
        CALL(cuMemAllocAsync_ptsz(&ptr, 4096, NULL))                                                                   \
        CALL(cuMemAllocFromPoolAsync(&ptr, 4096, NULL, NULL))                                                          \
        CALL(cuMemFreeAsync(0, NULL))                                                                                  \
        CALL(cuMemFreeAsync_ptsz(0, NULL))                                                                             \
        CALL(cuMemFreeAsync(4096, NULL))                                                                               \
        CALL(cuMemGetInfo_v2(&bytes, &more_bytes))                                                                     \
        CALL(cuDeviceTotalMem_v2(&bytes, 0))                                                                           \
        CALL(cuDeviceTotalMem_v2(&bytes, 99))                                                                          \
        CALL(cuMemGetAddressRange_v2(&ptr, &bytes, 4096))                                                              \
        CALL(cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 4096))                                    \
        CALL(cuPointerGetAttributes(1, &attribute, values, 4096))                                                      \
        CALL(cuPointerSetAttribute(&value, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, 4096))                                    \
        CALL(cuIpcGetMemHandle(&handle, 4096))                                                                         \
        CALL(cuIpcCloseMemHandle(4096))                                                                                \
        CALL(cuMemGetHandleForAddressRange(&value, 4096, 4096, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0))                \
        CALL(cuCtxCreate_v2(&context, 0, 0))                                                                           \
        CALL(cuCtxCreate_v3(&context, NULL, 0, 0, 0))                                                                  \
        CALL(cuCtxCreate_v4(&context, NULL, 0, 0))                                                                     \
        CALL(cuCtxCreate_v2(&context, 0, 99))                                                                          \
        CALL(cuCtxDestroy_v2(NULL))                                                                                    \
        CALL(cuDevicePrimaryCtxRetain(&context, 0))                                                                    \
        CALL(cuDevicePrimaryCtxRetain(&context, -1))                                                                   \
        CALL(cuDevicePrimaryCtxRelease_v2(0))                                                                          \
        CALL(cuDevicePrimaryCtxReset_v2(0))                                                                            \
        CALL(cuDevicePrimaryCtxReset_v2(99))                                                                           \
        CALL(cuCtxEnablePeerAccess(NULL, 0))                                                                           \
        CALL(cuStreamCreate(&stream, 0))                                                                               \
        CALL(cuStreamCreateWithPriority(&stream, 0, 0))                                                                \
        CALL(cuStreamDestroy_v2(NULL))                                                                                 \
        CALL(cuStreamBeginCapture_v2(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL))                                             \
        CALL(cuStreamBeginCapture_v2_ptsz(NULL, CU_STREAM_CAPTURE_MODE_RELAXED))                                       \
        CALL(cuStreamBeginCaptureToGraph(NULL, NULL, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL))                    \
        CALL(cuStreamEndCapture(NULL, &graph))                                                                         \
        CALL(cuStreamEndCapture_ptsz(NULL, &graph))

static int number;

static void *first(void *ret_result)
{
        *(CUresult *)ret_result = cuMemFree_v2(0);
        return NULL;
}

/*
 * Forks while another thread is in its first call: standard error is a pipe that nobody reads, so that a debug line of
 * the library's set-up waits there for a second. The driver is not in use yet, so the child may use all of it.
 */
static int fork_beside(void)
{
        static const char filler[4096];
        int ends[2], error = dup(STDERR_FILENO), status = 1;
        CUresult result = CUDA_ERROR_UNKNOWN;
        pthread_t thread;

        if (error < 0 || pipe2(ends, O_NONBLOCK) != 0 || dup2(ends[1], STDERR_FILENO) < 0)
                return EXIT_FAILURE;
        while (write(ends[1], filler, sizeof(filler)) > 0)
                ;
        if (pthread_create(&thread, NULL, first, &result) != 0)
                return EXIT_FAILURE;
        usleep(200000);
        if (fork() == 0) {
                alarm(20);
                dup2(error, STDERR_FILENO);
                printf("cuInit: %d\n", (int)cuInit(0));
                printf("retain: %d\n", (int)cuDevicePrimaryCtxRetain(&context, 0));
                printf("current: %d\n", (int)cuCtxSetCurrent(context));
                printf("allocate: %d\n", (int)cuMemAlloc_v2(&ptr, 4096));
                printf("free: %d\n", (int)cuMemFree_v2(ptr));
                exit(EXIT_SUCCESS);
        }
        pthread_join(thread, NULL);
        wait(&status);
        printf("child: %d, first call: %d\n", status, (int)result);
        return EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
        setvbuf(stdout, NULL, _IONBF, 0);
        if (argc > 1 && strcmp(argv[1], "fork") == 0)
                return fork_beside();
        for (int with_init = 0; with_init <= 1; with_init++) {
#define CALL(call)                                                                                                     \
        if (fork() == 0) {                                                                                             \
                if (with_init && cuInit(0) != CUDA_SUCCESS)                                                            \
                        _exit(EXIT_FAILURE);                                                                           \
                printf("%s%s: %d\n", with_init ? "after cuInit, " : "", #call, (int)(call));                           \
                exit(EXIT_SUCCESS);                                                                                    \
        } else {                                                                                                       \
                int status = 1;                                                                                        \
                                                                                                                       \
                wait(&status);                                                                                         \
                if (status) /* not every driver survives NULL */                                                       \
                        printf("%s%s: status %d\n", with_init ? "after cuInit, " : "", #call, status);                 \
                number++;                                                                                              \
        }
                CALLS(CALL)
        }
        printf("%d calls\n", number);
        return EXIT_SUCCESS;
}
