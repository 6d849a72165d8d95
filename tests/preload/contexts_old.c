/* The functions of contexts as they were before CUDA 4 and 11, which programs built then still call. */
#include "contexts.h"

#include "check.h"
#include "gputest.h"

#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

/* The function of this exported name, as a program built years ago has it; false where the driver has none. */
bool old_symbol(const char *name, void *ret_function)
{
        void *found = dlsym(RTLD_DEFAULT, name);

        memcpy(ret_function, &found, sizeof(found));
        return found;
}

/* Two blocks of the current context, one in use and one freed. */
static void leave_two(CUdeviceptr *ret_live, CUdeviceptr *ret_cached)
{
        GR_MUST(cuMemAlloc(ret_live, BLOCK));
        GR_MUST(cuMemAlloc(ret_cached, BLOCK));
        GR_MUST(cuMemFree(*ret_cached));
}

static void free_lost(CUdeviceptr live, CUdeviceptr cached)
{
        printf("free of the lost live block: %d\n", (int)cuMemFree(live));
        printf("free of the lost cached block: %d\n", (int)cuMemFree(cached));
}

static void old_alone(void)
{
        push_function *push;
        pop_function *pop;

        if (old_symbol("cuCtxPushCurrent", &push) && old_symbol("cuCtxPopCurrent", &pop))
                alone(push, pop);
}

static void old_context(void)
{
        CUresult (*ctx_create)(CUcontext *, unsigned int, CUdevice), (*ctx_destroy)(CUcontext);
        CUdeviceptr live, cached;
        CUcontext context;
        CUresult result;

        if (!old_symbol("cuCtxCreate", &ctx_create) || !old_symbol("cuCtxDestroy", &ctx_destroy)) {
                printf("no cuCtxCreate of old\n");
                return;
        }
        result = ctx_create(&context, 0, 0);
        printf("cuCtxCreate: %d\n", (int)result);
        if (result != CUDA_SUCCESS)
                return;
        /* Made with the 32-bit functions' version: NVIDIA's driver has no memory for today's functions in it. */
        result = cuMemAlloc(&live, BLOCK);
        printf("cuMemAlloc in it: %d\n", (int)result);
        if (result != CUDA_SUCCESS) {
                printf("cuCtxDestroy: %d\n", (int)ctx_destroy(context));
                return;
        }
        GR_MUST(cuMemFree(live));
        work("a context as of old");
        leave_two(&live, &cached);
        printf("cuCtxDestroy: %d\n", (int)ctx_destroy(context));
        free_lost(live, cached);
}

/*
 * One that was attached to outlives its first detach, with its blocks, live and cached, and a capture that is going on;
 * and ends with the second.
 */
static void attached(void)
{
        CUresult (*attach)(CUcontext *, unsigned int), (*detach)(CUcontext);
        CUdeviceptr live, cached, other;
        CUcontext beside, context, again;
        size_t before, after;
        CUstream stream;
        CUgraph graph;

        if (!old_symbol("cuCtxAttach", &attach) || !old_symbol("cuCtxDetach", &detach)) {
                printf("no cuCtxAttach\n");
                return;
        }
        beside = create();
        context = create();
        leave_two(&live, &cached);
        printf("attach: %d, the same: %d\n", (int)attach(&again, 0), again == context);
        before = used();
        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        printf("detach: %d\n", (int)detach(context));
        printf("end of the capture: %d\n", (int)cuStreamEndCapture(stream, &graph));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuMemAlloc(&other, BLOCK));
        GR_MUST(cuMemsetD32(live, 7, BLOCK / 4));
        GR_MUST(cuMemFree(other));
        after = used();
        GR_CHECK(after <= before + BLOCK);
        printf("free of the live block: %d\n", (int)cuMemFree(live));
        work("attached to");
        leave_two(&live, &cached);
        printf("detach once more: %d\n", (int)detach(context));
        free_lost(live, cached);
        GR_MUST(cuCtxDestroy(beside));
}

/*
 * OpenGL's way to make a context; what is allocated in it is its own. The library must not go on as if there was only
 * the one before, so nothing else runs here that makes contexts.
 */
void contexts_of_graphics(void)
{
        CUresult (*gl_create)(CUcontext *, unsigned int, CUdevice);
        CUcontext first = create(), context, owner = NULL;
        CUdeviceptr ptr;

        work("before a context of graphics");
        if (old_symbol("cuGLCtxCreate_v2", &gl_create) && gl_create(&context, 0, 0) == CUDA_SUCCESS) {
                GR_MUST(cuMemAlloc(&ptr, BLOCK));
                GR_MUST(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, ptr));
                printf("in a context of graphics its memory is its own: %d\n", owner == context);
                GR_MUST(cuMemFree(ptr));
                GR_MUST(cuCtxDestroy(context));
        }
        work("after a context of graphics");
        GR_MUST(cuCtxDestroy(first));
}

/*
 * The driver has no room for anything at first (GRSIM_FAULT), and some a moment later (GPURECLAIM_WAIT). That a call
 * waits only once it holds no lock is asserted in debug builds.
 */
void contexts_that_wait(void)
{
        CUresult (*v2)(CUcontext *, unsigned int, CUdevice) = NULL;
        CUresult (*v3)(CUcontext *, CUexecAffinityParam *, int, unsigned int, CUdevice) = NULL;
        CUresult (*v4)(CUcontext *, CUctxCreateParams *, unsigned int, CUdevice) = NULL;
        CUcontext context, primary;
        struct gt_green green;
        CUstream stream;
        CUmodule module;
        size_t total;
        int threads;

        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        GR_MUST(cuCtxSetCurrent(primary));
        GR_MUST(!old_symbol("cuCtxCreate_v2", &v2) || !old_symbol("cuCtxCreate_v3", &v3) ||
                !old_symbol("cuCtxCreate_v4", &v4));
        GR_MUST(v2(&context, 0, 0));
        GR_MUST(cuCtxDestroy(context));
        GR_MUST(v3(&context, NULL, 0, 0, 0));
        GR_MUST(cuCtxDestroy(context));
        GR_MUST(v4(&context, NULL, 0, 0));
        GR_MUST(cuCtxDestroy(context));
        GR_MUST(cuCtxSetCurrent(primary));
        GR_MUST(!gt_green_open(0, &green));
        gt_green_close(&green);
        GR_MUST(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, 0));
        gt_load_kernels(&module);
        GR_MUST(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));

        /* Stacks that take more than the device has are refused at once. */
        GR_MUST(cuDeviceTotalMem(&total, 0));
        GR_MUST(cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 0));
        GR_CHECK_EQ(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, total / (unsigned)threads * 2), CUDA_ERROR_OUT_OF_MEMORY);
}

static void old_primary(void)
{
        CUresult (*reset)(CUdevice), (*release)(CUdevice);
        CUdeviceptr live, cached;
        CUcontext context;

        if (!old_symbol("cuDevicePrimaryCtxReset", &reset) || !old_symbol("cuDevicePrimaryCtxRelease", &release)) {
                printf("no cuDevicePrimaryCtxReset of old\n");
                return;
        }
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        work("the primary context");
        leave_two(&live, &cached);
        printf("cuDevicePrimaryCtxReset: %d\n", (int)reset(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        free_lost(live, cached);
        work("after the reset");
        leave_two(&live, &cached);
        release_all(release);
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        free_lost(live, cached);
        work("retained again");
        release_all(release);
        GR_MUST(cuCtxSetCurrent(NULL));
}

void contexts_old(void)
{
        old_alone();
        for (int i = 0; i < 3; i++) {
                old_context();
                old_primary();
                attached();
        }
}
