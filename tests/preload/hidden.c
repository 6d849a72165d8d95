/*
 * Contexts made behind the library, by a plug-in that calls the driver itself: whose memory is whose in them, what
 * becomes of it with them, and handles that come again as other contexts. Every line must be the same natively and under
 * the library.
 *
 *   hidden PLUGIN           the lines; with two devices
 *   hidden PLUGIN unasked   under the library, where it does not let go at once of what was looked at
 */
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

#define MIB    ((size_t)1 << 20)
#define BLOCK  (3 * MIB)
#define ROUNDS 20
#define KNOWN  40  /* more than the library has room for at first */
#define MANY   300 /* more than the library notes whose memory they use */
#define OK(call)                                                                                                       \
        do {                                                                                                           \
                int ok_result = (int)(call);                                                                           \
                                                                                                                       \
                if (ok_result != CUDA_SUCCESS) {                                                                       \
                        fprintf(stderr, "%s:%d: %s returned %d\n", __FILE__, __LINE__, #call, ok_result);              \
                        exit(EXIT_FAILURE);                                                                            \
                }                                                                                                      \
        } while (0)

static int (*behind_green)(CUgreenCtx *, CUcontext *, int);
static int (*behind_green_end)(CUgreenCtx);
static int (*behind_create)(CUcontext *, int);
static int (*behind_end)(CUcontext);
static int (*behind_release)(int);
static int (*behind_current)(CUcontext);
static unsigned long (*calls_of)(const char *);
static size_t (*used_bytes)(int);
static bool under_the_library;

struct green {
        CUgreenCtx handle;
        CUcontext context;
};

static CUdevResourceDesc half_of(int device)
{
        unsigned groups = 1;
        CUdevResource all, part;
        CUdevResourceDesc description;

        OK(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
        OK(cuDevSmResourceSplitByCount(&part, &groups, &all, NULL, 0, all.sm.smCount / 2));
        OK(cuDevResourceGenerateDesc(&description, &part, 1));
        return description;
}

/* hidden: made behind the library. */
static struct green make_green(int device, bool hidden)
{
        struct green green;

        if (hidden) {
                OK(behind_green(&green.handle, &green.context, device));
                return green;
        }
        OK(cuGreenCtxCreate(&green.handle, half_of(device), device, CU_GREEN_CTX_DEFAULT_STREAM));
        OK(cuCtxFromGreenCtx(&green.context, green.handle));
        return green;
}

static bool is_active(int device)
{
        unsigned flags;
        int active;

        OK(cuDevicePrimaryCtxGetState(device, &flags, &active));
        return active;
}

/* Two blocks of the current context, one in use and one freed. */
struct two {
        CUdeviceptr live, cached;
};

static struct two leave_two(uint32_t value)
{
        struct two two;

        OK(cuMemAlloc(&two.live, BLOCK));
        OK(cuMemAlloc(&two.cached, BLOCK));
        OK(cuMemsetD32(two.live, value, BLOCK / 4));
        OK(cuMemFree(two.cached));
        return two;
}

/* The other one's address may be another block's by now. */
static void free_lost(struct two two)
{
        printf("free of the lost block: %d\n", (int)cuMemFree(two.live));
}

static uint32_t last_word(CUdeviceptr block)
{
        uint32_t word = 0;

        OK(cuMemcpyDtoH(&word, block + BLOCK - 4, 4));
        return word;
}

/* Blocks come and go in context; whose they are. */
static void work(const char *where, CUcontext context)
{
        CUdeviceptr blocks[3];
        uint32_t wrong = 0;
        CUcontext owner;
        int ordinal;

        OK(cuCtxSetCurrent(context));
        for (uint32_t round = 0; round < 3; round++) {
                for (uint32_t i = 0; i < 3; i++) {
                        OK(cuMemAlloc(&blocks[i], BLOCK));
                        OK(cuMemsetD32(blocks[i], round * 3 + i, BLOCK / 4));
                }
                OK(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, blocks[round]));
                OK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, blocks[round]));
                for (uint32_t i = 0; i < 3; i++) {
                        wrong += last_word(blocks[i]) != round * 3 + i;
                        OK(cuMemFree(blocks[i]));
                }
        }
        printf("%s: %u words wrong, memory of device %d, its own: %d\n", where, wrong, ordinal, owner == context);
}

/* A block that is in the cache already: whether it came from there, and nobody asked the driver for a piece of memory. */
static void from_the_cache(CUcontext context)
{
        unsigned long before = calls_of("cuMemAlloc_v2");
        CUdeviceptr block;

        OK(cuCtxSetCurrent(context));
        OK(cuMemAlloc(&block, BLOCK));
        OK(cuMemFree(block));
        if (under_the_library)
                GR_CHECK_EQ(calls_of("cuMemAlloc_v2"), before);
}

/* What is known of a context that another one's coming and going has made doubtful. */
static void make_doubtful(void)
{
        CUcontext context;

        OK(cuCtxCreate(&context, NULL, 0, 0));
        OK(cuCtxDestroy(context));
}

static void *work_in_a_thread(void *arg)
{
        struct green *greens = arg;

        for (int i = 0; i < 2; i++)
                from_the_cache(greens[i].context);
        OK(cuCtxSetCurrent(NULL));
        return NULL;
}

/* Each is alone on its device and holds its primary context. */
static void greens_alone(void)
{
        size_t before[2] = {used_bytes(0), used_bytes(1)};
        struct green greens[2], again;
        struct two blocks[2];
        pthread_t thread;

        for (int i = 0; i < 2; i++) {
                greens[i] = make_green(i, true);
                printf("device %d: active %d\n", i, is_active(i));
                work("a green context", greens[i].context);
        }
        for (int i = 0; i < 4; i++) {
                make_doubtful();
                from_the_cache(greens[i % 2].context);
        }
        OK(cuCtxSetCurrent(NULL));
        OK(pthread_create(&thread, NULL, work_in_a_thread, greens));
        OK(pthread_join(thread, NULL));
        for (int i = 0; i < 2; i++) {
                OK(behind_current(greens[i].context));
                blocks[i] = leave_two(7);
                OK(cuPointerGetAttribute(&again.context, CU_POINTER_ATTRIBUTE_CONTEXT, blocks[i].live));
                printf("current behind the library: its own memory %d\n", again.context == greens[i].context);
        }

        /* The first one ends with all there is on its device, the other one stays. */
        OK(cuGreenCtxDestroy(greens[0].handle));
        printf("active: %d %d, all back: %d\n", is_active(0), is_active(1), used_bytes(0) == before[0]);
        OK(cuCtxSetCurrent(greens[1].context));
        free_lost(blocks[0]);
        printf("the other one's: %u\n", last_word(blocks[1].live));
        again = make_green(1, true);
        printf("its handle comes again: %d\n", again.context == greens[0].context);
        work("one of the other device, under its handle", again.context);
        OK(cuGreenCtxDestroy(greens[1].handle));
        work("of two the one left", again.context);
        printf("what the first one left: %u\n", last_word(blocks[1].live));
        OK(cuMemFree(blocks[1].live));
        OK(cuGreenCtxDestroy(again.handle));
        printf("active: %d %d, all back: %d\n", is_active(0), is_active(1), used_bytes(1) == before[1]);
        OK(cuCtxSetCurrent(NULL));
}

/* It ends behind the library, too; what the program has of its primary context ends later. */
static void ends_unseen(void)
{
        size_t before = used_bytes(0);
        struct green green, again;
        struct two blocks;
        CUcontext primary;

        OK(cuDevicePrimaryCtxRetain(&primary, 0));
        green = make_green(0, true);
        work("beside the primary context", green.context);
        from_the_cache(primary);
        from_the_cache(green.context);
        blocks = leave_two(9);
        OK(cuCtxSetCurrent(primary));
        OK(behind_green_end(green.handle));
        printf("it has ended: active %d, %u\n", is_active(0), last_word(blocks.live));
        from_the_cache(primary);
        OK(cuDevicePrimaryCtxRelease(0));
        printf("released: active %d, all back: %d\n", is_active(0), used_bytes(0) == before);
        again = make_green(1, true);
        work("one of the other device", again.context);
        free_lost(blocks);
        OK(cuGreenCtxDestroy(again.handle));

        /* The program's own retain is let go of behind the library, and a green one holds the primary context. */
        OK(cuDevicePrimaryCtxRetain(&primary, 0));
        green = make_green(0, false);
        OK(cuCtxSetCurrent(green.context));
        blocks = leave_two(10);
        OK(behind_release(0));
        printf("let go of: active %d, %u\n", is_active(0), last_word(blocks.live));
        OK(cuGreenCtxDestroy(green.handle));
        printf("active: %d, all back: %d\n", is_active(0), used_bytes(0) == before);
        again = make_green(1, false);
        work("one of the other device", again.context);
        free_lost(blocks);
        OK(cuGreenCtxDestroy(again.handle));
        OK(cuCtxSetCurrent(NULL));
}

/* Those that the library sees: it asks nobody whose memory theirs is. */
static void seen(void)
{
        size_t before[2] = {used_bytes(0), used_bytes(1)};
        struct green greens[KNOWN];
        uint32_t wrong = 0;
        CUcontext owner;
        struct two two;
        int ordinal;

        for (int i = 0; i < KNOWN; i++) {
                greens[i] = make_green(i % 2, false);
                if (i < 2)
                        work("the first", greens[i].context);
                from_the_cache(greens[i].context);
        }
        for (int i = 0; i < KNOWN; i += 3)
                OK(cuGreenCtxDestroy(greens[i].handle));
        for (int i = 0; i < KNOWN; i++)
                if (i % 3)
                        from_the_cache(greens[i].context);
        for (int i = 0; i < KNOWN; i += 3)
                greens[i] = make_green((i + 1) % 2, false);
        for (int i = 0; i < KNOWN; i++) {
                from_the_cache(greens[i].context);
                two = leave_two((uint32_t)i);
                OK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, two.live));
                OK(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, two.live));
                wrong += ordinal != (i % 3 ? i % 2 : (i + 1) % 2);
                wrong += owner == greens[i].context;
                wrong += last_word(two.live) != (uint32_t)i;
                OK(cuMemFree(two.live));
        }
        printf("%d green contexts: %u wrong\n", KNOWN, wrong);
        for (int i = KNOWN; i-- > 0;) {
                printf("%d", is_active(0) + 2 * is_active(1));
                OK(cuGreenCtxDestroy(greens[i].handle));
        }
        printf(", all back: %d\n", used_bytes(0) == before[0] && used_bytes(1) == before[1]);
        OK(cuCtxSetCurrent(NULL));
}

/* More of them than the library has room for. */
static void many(void)
{
        static struct green greens[MANY];
        size_t before = used_bytes(0);
        uint32_t wrong = 0;
        CUdeviceptr block;
        uint32_t word;

        for (int i = 0; i < MANY; i++)
                greens[i] = make_green(0, true);
        for (int i = 0; i < 2 * MANY; i++) {
                OK(cuCtxSetCurrent(greens[i % MANY].context));
                OK(cuMemAlloc(&block, 4096));
                OK(cuMemsetD32(block, (uint32_t)i, 1024));
                OK(cuMemcpyDtoH(&word, block + 4092, 4));
                wrong += word != (uint32_t)i;
                OK(cuMemFree(block));
        }
        printf("%d green contexts: %u words wrong\n", MANY, wrong);
        for (int i = 0; i < MANY; i++)
                OK(cuGreenCtxDestroy(greens[i].handle));
        printf("active: %d, all back: %d\n", is_active(0), used_bytes(0) == before);
        OK(cuCtxSetCurrent(NULL));
}

/* Whole contexts with memory of their own, beside a green one. */
static void whole(void)
{
        size_t before = used_bytes(0);
        struct green green = make_green(0, true);
        CUcontext a, b, c, again;
        struct two in_a, in_b;

        work("a green context", green.context);
        OK(behind_create(&a, 0));
        OK(behind_create(&b, 0));
        OK(behind_create(&c, 1));
        work("a", a);
        work("b", b);
        work("c", c);
        OK(cuCtxSetCurrent(a));
        in_a = leave_two(1);
        OK(cuCtxSetCurrent(b));
        in_b = leave_two(2);
        OK(cuCtxDestroy(a));
        OK(cuCtxSetCurrent(c));
        free_lost(in_a);
        OK(cuCtxSetCurrent(b));
        printf("the other one's: %u\n", last_word(in_b.live));
        OK(cuCtxSetCurrent(c));
        OK(behind_end(b));

        /* The driver gives the handle of one that has ended to the next. */
        OK(cuCtxCreate(&again, NULL, 0, 0));
        printf("its handle comes again: %d\n", again == b);
        free_lost(in_b);
        work("b again", again);
        work("c", c);
        OK(cuCtxDestroy(again));
        OK(cuCtxDestroy(c));
        work("the green context", green.context);
        OK(cuCtxSetCurrent(NULL));
        OK(cuGreenCtxDestroy(green.handle));
        printf("active: %d, all back: %d\n", is_active(0), used_bytes(0) == before);
}

/* Whether what is freed comes back to the next who asks: while fences are held off, each would get a new address. */
static void reuses(const char *after)
{
        CUdeviceptr seen_before[ROUNDS];
        int count = 0;

        for (int i = 0; i < ROUNDS; i++) {
                CUdeviceptr block;
                int at = 0;

                OK(cuMemAlloc(&block, BLOCK));
                OK(cuMemFree(block));
                OK(cuCtxSynchronize());
                while (at < count && seen_before[at] != block)
                        at++;
                seen_before[at] = block;
                count += at == count;
        }
        printf("after %s memory is used again: %d\n", after, count < ROUNDS / 2);
}

/* A capture on its stream goes with the primary context, on whose device nobody captures from then on. */
static void capture(void)
{
        struct green green = make_green(0, true);
        CUcontext other;
        CUstream stream;

        work("before a capture", green.context);
        OK(cuGreenCtxStreamCreate(&stream, green.handle, CU_STREAM_NON_BLOCKING, 0));
        OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        OK(cuCtxSetCurrent(NULL));
        OK(cuGreenCtxDestroy(green.handle));
        OK(cuCtxCreate(&other, NULL, 0, 0));
        reuses("a capture in a green context");
        OK(cuCtxDestroy(other));
}

/* The library looks at a primary context, and whoever holds it is the last one to do so. */
static void unasked(void)
{
        struct green green = make_green(0, true);

        work("a green context", green.context);
        OK(cuCtxSetCurrent(NULL));
        OK(cuGreenCtxDestroy(green.handle));
        GR_CHECK(!is_active(0));
}

static void find(void *where, const char *name, void *ret_function)
{
        void *found = dlsym(where, name);

        if (!found) {
                fprintf(stderr, "hidden: no %s\n", name);
                exit(EXIT_FAILURE);
        }
        memcpy(ret_function, &found, sizeof(found));
}

int main(int argc, char **argv)
{
        void *plugin = argc == 2 || argc == 3 ? dlopen(argv[1], RTLD_NOW | RTLD_DEEPBIND) : NULL;

        if (!plugin) {
                fprintf(stderr, "usage: hidden PLUGIN [unasked]\n");
                return 2;
        }
        find(plugin, "behind_green", &behind_green);
        find(plugin, "behind_green_end", &behind_green_end);
        find(plugin, "behind_create", &behind_create);
        find(plugin, "behind_end", &behind_end);
        find(plugin, "behind_release", &behind_release);
        find(plugin, "behind_current", &behind_current);
        find(RTLD_DEFAULT, "grSimCallCount", &calls_of);
        find(RTLD_DEFAULT, "grSimUsedBytes", &used_bytes);
        under_the_library = dlsym(RTLD_DEFAULT, "gpureclaim_status") != NULL;
        OK(cuInit(0));
        if (argc == 3) {
                unasked();
                return GR_CHECK_RESULT();
        }
        greens_alone();
        ends_unseen();
        seen();
        many();
        whole();
        capture();
        return GR_CHECK_RESULT();
}
