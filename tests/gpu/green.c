/*
 * Green contexts alone: no program's retain of the primary context, which comes with the first of them and goes with
 * the last, and all memory with it. Every line must be the same natively and under the library, but those with ~.
 *
 *   green            the lines
 *   green --fence    under the library: a copy on a green stream into a block of another context, which is freed and
 *                    handed out again meanwhile. (Natively the copy would find no memory there.)
 *
 * Exit status 1 when a word was wrong.
 */
#include "gputest.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK (3 * MIB)

static struct gt gt; /* its device only: gt_open would retain the primary context */

static bool active(void)
{
        unsigned flags;
        int is = 0;

        GR_MUST(cuDevicePrimaryCtxGetState(gt.device, &flags, &is));
        return is;
}

static void enter(struct gt_green *green)
{
        if (!gt_green_open(gt.device, green)) {
                printf("skipped: no green contexts\n");
                exit(GT_SKIPPED);
        }
        GR_MUST(cuCtxPushCurrent(green->ctx));
}

static void leave(struct gt_green *green)
{
        CUcontext popped;

        GR_MUST(cuCtxPopCurrent(&popped));
        gt_green_close(green);
}

static uint32_t wrong_words(CUdeviceptr p, uint32_t value)
{
        static uint32_t words[BLOCK / 4];
        uint32_t wrong = 0;

        GR_MUST(cuMemcpyDtoH(words, p, BLOCK));
        for (size_t i = 0; i < BLOCK / 4; i++)
                wrong += words[i] != value;
        return wrong;
}

/* Blocks come and go, some of them several times. */
static void work(const char *where)
{
        CUdeviceptr blocks[4];
        uint32_t wrong = 0;

        for (uint32_t round = 0; round < 4; round++) {
                for (uint32_t i = 0; i < 4; i++) {
                        GR_MUST(cuMemAlloc(&blocks[i], BLOCK));
                        GR_MUST(cuMemsetD32(blocks[i], round * 4 + i, BLOCK / 4));
                }
                for (uint32_t i = 0; i < 4; i++) {
                        wrong += wrong_words(blocks[i], round * 4 + i);
                        GR_MUST(cuMemFree(blocks[i]));
                }
        }
        printf("%s: %u words wrong\n", where, wrong);
        gr_check_failures += wrong > 0;
}

static void alone(void)
{
        struct gt_green green, second;
        CUdeviceptr live = 0, cached = 0;
        CUcontext primary = NULL;
        CUresult result;

        printf("before: active %d\n", active());
        for (int i = 0; i < 3; i++) {
                enter(&green);
                printf("a green context: active %d\n", active());
                if (i) {
                        /* Of the one before, with which they went. */
                        printf("free of the lost live block: %d\n", (int)cuMemFree(live));
                        printf("free of the lost cached block: %d\n", (int)cuMemFree(cached));
                }
                work("a green context");
                GR_MUST(cuMemAlloc(&live, BLOCK));
                GR_MUST(cuMemAlloc(&cached, BLOCK));
                GR_MUST(cuMemFree(cached));
                GR_MUST(cuPointerGetAttribute(&primary, CU_POINTER_ATTRIBUTE_CONTEXT, live));
                printf("its memory is another context's: %d\n", primary != green.ctx);
                leave(&green);
                printf("it is gone: active %d\n", active());
        }

        /* The first of two: the other one holds all that is there. */
        enter(&green);
        enter(&second);
        GR_MUST(cuCtxSetCurrent(green.ctx));
        GR_MUST(cuMemAlloc(&live, BLOCK));
        GR_MUST(cuMemsetD32(live, 7, BLOCK / 4));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuCtxSetCurrent(second.ctx));
        gt_green_close(&green);
        printf("one of two is gone: active %d\n", active());
        printf("its memory: %u words wrong\n", wrong_words(live, 7));
        work("the other one");
        printf("free in the other one: %d\n", (int)cuMemFree(live));

        /* A retain of the program's own outlives both. */
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, gt.device));
        GR_MUST(cuMemAlloc(&live, BLOCK));
        GR_MUST(cuMemsetD32(live, 8, BLOCK / 4));
        GR_MUST(cuCtxSetCurrent(primary));
        gt_green_close(&second);
        printf("both are gone: active %d, %u words wrong\n", active(), wrong_words(live, 8));
        work("the primary context");
        enter(&green);
        result = cuDevicePrimaryCtxReset(gt.device);
        printf("reset beside a green context: %d\n", (int)result);
        if (result == CUDA_SUCCESS) /* then nothing is left of either */
                return;
        work("after it");
        printf("released: %d, active %d\n", (int)cuDevicePrimaryCtxRelease(gt.device), active());
        work("released, a green context left");
        leave(&green);
        printf("all gone: active %d\n", active());
}

/* Blocks of a context of its own, touched from a green one whose primary context nothing was ever allocated in. */
static void fence(void)
{
        __typeof__(&cuCtxCreate) create = GT_OPTIONAL(cuCtxCreate);
        int reused = 0, corrupted = 0, rounds = 8;
        CUstream stream;
        CUdeviceptr source, before, after;
        struct gt_green green;
        CUcontext ctx, popped;

        enter(&green);
        gt_load_kernels(&gt.module);
        GR_MUST(cuModuleGetFunction(&gt.spin, gt.module, "gr_spin"));
        if (!create || create(&ctx, NULL, 0, gt.device) != CUDA_SUCCESS) {
                printf("skipped: no second context\n");
                exit(GT_SKIPPED);
        }
        stream = gt_stream();
        GR_MUST(cuMemAlloc(&source, BLOCK));
        GR_MUST(cuMemsetD32(source, 1, BLOCK / 4));
        GR_MUST(cuCtxSynchronize());
        for (int i = 0; i < rounds; i++) {
                GR_MUST(cuMemAlloc(&before, BLOCK));
                GR_MUST(cuCtxPushCurrent(green.ctx));
                GR_MUST(gt_spin(&gt, green.stream, 20000));
                GR_MUST(cuMemcpyDtoDAsync(before, source, BLOCK, green.stream));
                GR_MUST(cuCtxPopCurrent(&popped));
                GR_MUST(cuMemFree(before));
                GR_MUST(cuMemAlloc(&after, BLOCK));
                GR_MUST(cuMemsetD32Async(after, 2, BLOCK / 4, stream));
                GR_MUST(cuStreamSynchronize(stream));
                GR_MUST(cuCtxPushCurrent(green.ctx));
                GR_MUST(cuStreamSynchronize(green.stream));
                GR_MUST(cuCtxPopCurrent(&popped));
                reused += after == before;
                corrupted += wrong_words(after, 2) > 0;
                GR_MUST(cuMemFree(after));
        }
        gt_check(corrupted == 0, "copies of a green stream", "%d of %d blocks corrupted, %d came back at their address",
                 corrupted, rounds, reused);
        GR_MUST(cuCtxDestroy(ctx));
        GR_MUST(cuCtxSetCurrent(green.ctx));
        leave(&green);
}

int main(int argc, char **argv)
{
        unsigned long (*misuses)(void) = NULL;
        void *found = dlsym(RTLD_DEFAULT, "grSimMisuseCount");
        int devices = 0;

        if (argc > 1 && (argc > 2 || strcmp(argv[1], "--fence"))) {
                fprintf(stderr, "usage: green [--fence]\n");
                return 2;
        }
        if (cuInit(0) != CUDA_SUCCESS || cuDeviceGetCount(&devices) != CUDA_SUCCESS || !devices) {
                fprintf(stderr, "skipped: no device\n");
                return GT_SKIPPED;
        }
        GR_MUST(cuDeviceGet(&gt.device, 0));
        if (argc > 1)
                fence();
        else
                alone();
        memcpy(&misuses, &found, sizeof misuses);
        if (misuses && misuses())
                gt_die("green: the simulated device saw %lu misuses", misuses());
        return GR_CHECK_RESULT();
}
