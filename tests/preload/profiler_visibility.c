/*
 * How much of what a program asks the shared runtime for the runtime sees under the library, on the simulated device.
 * The argument:
 *
 *   none      of a hundred pairs of cudaMalloc and cudaFree nothing, once it has served the thread in the context
 *   all       each: something in the environment is the reason
 *   cupti     none, until CUPTI has been asked for calls, then each
 *   dlsym     none, until one of CUPTI's functions for that was looked up, then each
 *   refused   under a limit of 16 MiB: what fails is known to the runtime, and the ladder is climbed for it as often as
 *             where the runtime sees all
 *   failing   with a driver that fails in one free: the program is told, and the driver asked once
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../shim/gpureclaim.h"
#include "check.h"

#define BYTES ((size_t)3 << 20)
#define PAIRS 100

uint64_t cuptiEnableCallback(uint64_t enable, uint64_t subscriber, uint64_t domain, uint64_t id); /* cupti.c */

static unsigned long (*runtime_count)(void);

static unsigned long seen_of_pairs(unsigned pairs)
{
        unsigned long before = runtime_count();
        void *ptr;

        for (unsigned i = 0; i < pairs; i++) {
                GR_CHECK_EQ(cudaMalloc(&ptr, BYTES), cudaSuccess);
                GR_CHECK_EQ(cudaFree(ptr), cudaSuccess);
        }
        return runtime_count() - before;
}

static void in_another_context(void)
{
        CUcontext context;

        GR_CHECK_EQ(cuCtxCreate(&context, NULL, 0, 0), CUDA_SUCCESS);
        for (int i = 0; i < 2; i++) {
                GR_CHECK_EQ(seen_of_pairs(PAIRS), 1);
                GR_CHECK_EQ(cuCtxPopCurrent(&context), CUDA_SUCCESS);
                GR_CHECK_EQ(seen_of_pairs(PAIRS), 1);
                GR_CHECK_EQ(cuCtxPushCurrent(context), CUDA_SUCCESS);
        }
}

/* The library has these functions for each version that there is, also for one that the process has not loaded. */
static void not_loaded(void)
{
        void *found[] = {dlvsym(RTLD_DEFAULT, "cudaMalloc", "libcudart.so.12"),
                         dlvsym(RTLD_DEFAULT, "cudaFree", "libcudart.so.12"),
                         dlvsym(RTLD_DEFAULT, "cudaSetDevice", "libcudart.so.12")};
        void *cupti = dlvsym(RTLD_DEFAULT, "cuptiEnableCallback", "libcupti.so.12");
        cudaError_t (*allocate)(void **, size_t), (*give_back)(void *), (*choose)(int);
        __typeof__(&cuptiEnableCallback) enable;
        void *ptr = &ptr;

        GR_CHECK(found[0] && found[1] && found[2] && cupti);
        if (!found[0] || !found[1] || !found[2] || !cupti)
                return;
        memcpy(&enable, &cupti, sizeof(enable));
        memcpy(&allocate, &found[0], sizeof(allocate));
        memcpy(&give_back, &found[1], sizeof(give_back));
        memcpy(&choose, &found[2], sizeof(choose));
        GR_CHECK_EQ(allocate(&ptr, BYTES), cudaErrorInitializationError);
        GR_CHECK_EQ(give_back(ptr), cudaErrorInitializationError);
        GR_CHECK_EQ(choose(0), cudaErrorInitializationError);
        GR_CHECK_EQ(enable(1, 2, 3, 4), 999); /* CUPTI's for an error that it does not know */
        GR_CHECK(dlerror() == NULL);          /* the library's own searches are none of the program's */
}

static int count_purge(void *arg, int device, uint64_t want_bytes)
{
        (void)device;
        (void)want_bytes;
        ++*(unsigned *)arg;
        return 0;
}

static void refused(void)
{
        unsigned purges = 0, once;
        const struct gpureclaim_reclaimable reclaimable = {
                .struct_bytes = sizeof(reclaimable), .name = "counted", .purge = count_purge, .arg = &purges};
        gpureclaim_register_function *enlist;
        uint64_t id;
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_register"), *ptr, *held;

        memcpy(&enlist, &found, sizeof(found));
        GR_CHECK_EQ(enlist(&reclaimable, &id), 0);
        /* The thread's device was chosen again, so the runtime is asked. */
        GR_CHECK_EQ(cudaSetDevice(0), cudaSuccess);
        GR_CHECK_EQ(cudaMalloc(&ptr, 8 * BYTES), cudaErrorMemoryAllocation);
        once = purges;
        GR_CHECK(once > 0);
        GR_CHECK_EQ(cudaMalloc(&held, BYTES), cudaSuccess);
        GR_CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
        purges = 0;
        GR_CHECK_EQ(cudaMalloc(&ptr, 8 * BYTES), cudaErrorMemoryAllocation);
        GR_CHECK_EQ(purges, once);
        GR_CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
        GR_CHECK_EQ(cudaFree(held), cudaSuccess);
        GR_CHECK_EQ(cudaGetLastError(), cudaSuccess);
        GR_CHECK_EQ(cudaFree(held), cudaErrorInvalidValue);
        GR_CHECK_EQ(cudaGetLastError(), cudaErrorInvalidValue);
        GR_CHECK_EQ(seen_of_pairs(PAIRS), 0);
}

static void failing(void)
{
        unsigned failures = 0;
        void *ptr;

        for (int i = 0; i < 10; i++) {
                GR_CHECK_EQ(cudaMalloc(&ptr, BYTES), cudaSuccess);
                if (cudaFree(ptr) == cudaSuccess)
                        continue;
                failures++;
                GR_CHECK_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
        }
        GR_CHECK_EQ(failures, 1);
}

int main(int argc, char **argv)
{
        /* None of these lets a program observe calls. */
        static const char *const others[] = {"cuptiGetTimestamp", "cuptiEnabl", "cuptiActivityEnabl"};
        const char *mode = argc > 1 ? argv[1] : "none";
        void *found = dlsym(RTLD_DEFAULT, "grSimRuntimeCount");

        memcpy(&runtime_count, &found, sizeof(found));
        GR_CHECK(found != NULL);
        if (!found)
                return GR_CHECK_RESULT();
        GR_CHECK(seen_of_pairs(3) > 0); /* the first goes through it in any case */
        if (strcmp(mode, "failing") == 0)
                return failing(), GR_CHECK_RESULT();
        if (strcmp(mode, "all") == 0) {
                GR_CHECK_EQ(seen_of_pairs(PAIRS), 2 * PAIRS);
                return GR_CHECK_RESULT();
        }
        for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
                GR_CHECK(dlsym(RTLD_DEFAULT, others[i]) == NULL);
        GR_CHECK_EQ(seen_of_pairs(PAIRS), 0);
        GR_CHECK_EQ(cudaSetDevice(0), cudaSuccess);
        GR_CHECK_EQ(seen_of_pairs(PAIRS), 1); /* it might have been another one */
        if (strcmp(mode, "cupti") == 0)
                GR_CHECK_EQ(cuptiEnableCallback(1, UINT64_C(1) << 40, 3, 4), 1 + (UINT64_C(2) << 40) + 9 + 16);
        else if (strcmp(mode, "dlsym") == 0)
                GR_CHECK(dlsym(RTLD_DEFAULT, "cuptiActivityEnable") == NULL);
        else if (strcmp(mode, "refused") == 0)
                return refused(), GR_CHECK_RESULT();
        else
                return in_another_context(), not_loaded(), GR_CHECK_RESULT();
        GR_CHECK_EQ(seen_of_pairs(PAIRS), 2 * PAIRS);
        return GR_CHECK_RESULT();
}
