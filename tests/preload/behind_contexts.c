/*
 * Contexts made behind the library, by a plug-in that calls the driver itself: whose memory is whose in them, what
 * becomes of it with them, and handles that come again as other contexts. Every line must be the same natively and
 * under the library.
 *
 *   behind_contexts PLUGIN           the lines; with two devices
 *   behind_contexts PLUGIN refused   under the library, on a driver that refuses what it asks first
 *   behind_contexts PLUGIN stream    a line of a stream whose context is the only one
 *   behind_contexts PLUGIN FUNCTION  a line of a context that is the second one and made current by it; two devices
 *   behind_contexts PLUGIN green     green contexts beside their primary one, while the driver does not tell once who
 *                                    owns their memory; under the library alone
 *   behind_contexts PLUGIN peers     lines of peer access that the plug-in has enabled; two devices
 *   behind_contexts PLUGIN released  lines of a primary context, on a driver that does not tell at once what is left
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
#include "gputest.h"
#include "use_blocks.h"

#define ROUNDS 20
#define KNOWN  40  /* more than the library has room for at first */
#define MANY   300 /* more than the library notes whose memory they use */

static int (*behind_green)(CUgreenCtx *, CUcontext *, int);
static int (*behind_green_end)(CUgreenCtx);
static int (*behind_create)(CUcontext *, int);
static int (*behind_end)(CUcontext);
static int (*behind_release)(int);
static int (*behind_current)(CUcontext);
static int (*behind_stream)(CUstream *);
static int (*behind_peer_access)(CUcontext);
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

        GR_MUST(cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
        GR_MUST(cuDevSmResourceSplitByCount(&part, &groups, &all, NULL, 0, all.sm.smCount / 2));
        GR_MUST(cuDevResourceGenerateDesc(&description, &part, 1));
        return description;
}

/* hidden: made behind the library. */
static struct green make_green(int device, bool hidden)
{
        struct green green;
        CUcontext again;

        if (hidden) {
                GR_MUST(behind_green(&green.handle, &green.context, device));
                GR_MUST(cuCtxFromGreenCtx(&again, green.handle)); /* of one that the library does not know */
                GR_CHECK(again == green.context);
                return green;
        }
        GR_MUST(cuGreenCtxCreate(&green.handle, half_of(device), device, CU_GREEN_CTX_DEFAULT_STREAM));
        GR_MUST(cuCtxFromGreenCtx(&green.context, green.handle));
        return green;
}

static bool is_active(int device)
{
        unsigned flags;
        int active;

        GR_MUST(cuDevicePrimaryCtxGetState(device, &flags, &active));
        return active;
}

/* Two blocks of the current context, one in use and one freed. */
struct two {
        CUdeviceptr live, cached;
};

static struct two leave_two(uint32_t value)
{
        struct two two;

        GR_MUST(cuMemAlloc(&two.live, BLOCK));
        GR_MUST(cuMemAlloc(&two.cached, BLOCK));
        GR_MUST(cuMemsetD32(two.live, value, BLOCK / 4));
        GR_MUST(cuMemFree(two.cached));
        return two;
}

/* The other one's address may be another block's by now. */
static void free_lost(struct two two)
{
        printf("free of the lost block: %d\n", (int)cuMemFree(two.live));
}

/* Blocks come and go in context; whose they are. */
static void work(const char *where, CUcontext context)
{
        CUdeviceptr blocks[3];
        uint32_t wrong = 0;
        CUcontext owner;
        int ordinal;

        GR_MUST(cuCtxSetCurrent(context));
        for (uint32_t round = 0; round < 3; round++) {
                for (uint32_t i = 0; i < 3; i++) {
                        GR_MUST(cuMemAlloc(&blocks[i], BLOCK));
                        GR_MUST(cuMemsetD32(blocks[i], round * 3 + i, BLOCK / 4));
                }
                GR_MUST(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, blocks[round]));
                GR_MUST(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, blocks[round]));
                for (uint32_t i = 0; i < 3; i++) {
                        wrong += last_word(blocks[i]) != round * 3 + i;
                        GR_MUST(cuMemFree(blocks[i]));
                }
        }
        printf("%s: %u words wrong, memory of device %d, its own: %d\n", where, wrong, ordinal, owner == context);
}

static unsigned asked_again; /* how often the library may ask whose memory a context's is */

/* A block that is in the cache already: whether it came from there, and nobody asked the driver for memory. */
static void from_the_cache(CUcontext context)
{
        unsigned long before = calls_of("cuMemAlloc_v2") + asked_again;
        CUdeviceptr block;

        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuMemAlloc(&block, BLOCK));
        GR_MUST(cuMemFree(block));
        if (under_the_library)
                GR_CHECK_EQ(calls_of("cuMemAlloc_v2"), before);
}

/* What is known of a context that another one's coming and going has made doubtful. */
static void make_doubtful(void)
{
        CUcontext context;

        GR_MUST(cuCtxCreate(&context, NULL, 0, 0));
        GR_MUST(cuCtxDestroy(context));
}

static void *work_in_a_thread(void *arg)
{
        struct green *greens = arg;

        for (int i = 0; i < 2; i++)
                from_the_cache(greens[i].context);
        GR_MUST(cuCtxSetCurrent(NULL));
        return NULL;
}

/* Whether what is freed comes back to the next who asks: while fences are held off, each would get a new address. */
static void reuses(const char *after)
{
        CUdeviceptr seen_before[ROUNDS];
        int count = 0;

        for (int i = 0; i < ROUNDS; i++) {
                CUdeviceptr block;
                int at = 0;

                GR_MUST(cuMemAlloc(&block, BLOCK));
                GR_MUST(cuMemFree(block));
                GR_MUST(cuCtxSynchronize());
                while (at < count && seen_before[at] != block)
                        at++;
                seen_before[at] = block;
                count += at == count;
        }
        printf("after %s memory is used again: %d\n", after, count < ROUNDS / 2);
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
        GR_MUST(cuCtxSetCurrent(NULL));
        GR_MUST(pthread_create(&thread, NULL, work_in_a_thread, greens));
        GR_MUST(pthread_join(thread, NULL));
        for (int i = 0; i < 2; i++) {
                GR_MUST(behind_current(greens[i].context));
                blocks[i] = leave_two(7);
                GR_MUST(cuPointerGetAttribute(&again.context, CU_POINTER_ATTRIBUTE_CONTEXT, blocks[i].live));
                printf("current behind the library: its own memory %d\n", again.context == greens[i].context);
        }

        /* The first one ends with all there is on its device, the other one stays. */
        GR_MUST(cuGreenCtxDestroy(greens[0].handle));
        printf("active: %d %d, all back: %d\n", is_active(0), is_active(1), used_bytes(0) == before[0]);
        GR_MUST(cuCtxSetCurrent(greens[1].context));
        free_lost(blocks[0]);
        printf("the other one's: %u\n", last_word(blocks[1].live));
        asked_again = 1; /* as no such answer is trusted any more */
        from_the_cache(greens[1].context);
        asked_again = 0;
        again = make_green(1, true);
        printf("its handle comes again: %d\n", again.context == greens[0].context);
        work("one of the other device, under its handle", again.context);
        GR_MUST(cuGreenCtxDestroy(greens[1].handle));
        work("of two the one left", again.context);
        printf("what the first one left: %u\n", last_word(blocks[1].live));
        GR_MUST(cuMemFree(blocks[1].live));
        GR_MUST(cuGreenCtxDestroy(again.handle));
        printf("active: %d %d, all back: %d\n", is_active(0), is_active(1), used_bytes(1) == before[1]);
        GR_MUST(cuCtxSetCurrent(NULL));
}

/* It ends behind the library, too; what the program has of its primary context ends later. */
static void ends_unseen(void)
{
        size_t before = used_bytes(0);
        struct green green, again;
        struct two blocks;
        CUcontext primary;

        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        green = make_green(0, true);
        work("beside the primary context", green.context);
        from_the_cache(primary);
        from_the_cache(green.context);
        blocks = leave_two(9);
        GR_MUST(cuCtxSetCurrent(primary));
        GR_MUST(behind_green_end(green.handle));
        printf("it has ended: active %d, %u\n", is_active(0), last_word(blocks.live));
        from_the_cache(primary);
        GR_MUST(cuDevicePrimaryCtxRelease(0));
        printf("released: active %d, all back: %d\n", is_active(0), used_bytes(0) == before);
        again = make_green(1, true);
        work("one of the other device", again.context);
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 1));
        from_the_cache(primary);
        GR_MUST(cuDevicePrimaryCtxRelease(1));
        free_lost(blocks);
        GR_MUST(cuGreenCtxDestroy(again.handle));

        /* What looks like the last release is none. */
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        work("the primary context", primary);
        green = make_green(0, true);
        GR_MUST(cuDevicePrimaryCtxRelease(0));
        printf("held by a green context: active %d\n", is_active(0));
        asked_again = 1; /* for the first time */
        from_the_cache(green.context);
        asked_again = 0;
        reuses("a release that was not the last");
        GR_MUST(cuGreenCtxDestroy(green.handle));

        /* The program's own retain is let go of behind the library, and a green one holds the primary context. */
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        green = make_green(0, false);
        GR_MUST(cuCtxSetCurrent(green.context));
        blocks = leave_two(10);
        GR_MUST(behind_release(0));
        printf("let go of: active %d, %u\n", is_active(0), last_word(blocks.live));
        GR_MUST(cuGreenCtxDestroy(green.handle));
        printf("active: %d, all back: %d\n", is_active(0), used_bytes(0) == before);
        again = make_green(1, false);
        work("one of the other device", again.context);
        free_lost(blocks);
        GR_MUST(cuGreenCtxDestroy(again.handle));
        GR_MUST(cuCtxSetCurrent(NULL));
}

/* Those that the library sees: it asks nobody whose memory theirs is. */
static void seen(void)
{
        static const CUdevice no_devices[] = {-1, 64, 65, 128};
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
                GR_MUST(cuGreenCtxDestroy(greens[i].handle));
        for (int i = 0; i < KNOWN; i++)
                if (i % 3)
                        from_the_cache(greens[i].context);
        for (int i = 0; i < KNOWN; i += 3)
                greens[i] = make_green((i + 1) % 2, false);
        for (int i = 0; i < KNOWN; i++) {
                from_the_cache(greens[i].context);
                two = leave_two((uint32_t)i);
                GR_MUST(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, two.live));
                GR_MUST(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, two.live));
                wrong += ordinal != (i % 3 ? i % 2 : (i + 1) % 2);
                wrong += owner == greens[i].context;
                wrong += last_word(two.live) != (uint32_t)i;
                GR_MUST(cuMemFree(two.live));
        }
        printf("%d green contexts: %u wrong\n", KNOWN, wrong);

        /* One after the other under the same handle, each of another device. */
        for (int i = 0; i < 4; i++) {
                struct green next = make_green(i % 2, false);

                from_the_cache(next.context);
                GR_MUST(cuMemAlloc(&two.live, BLOCK));
                GR_MUST(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, two.live));
                printf("of device %d, ", ordinal);
                GR_MUST(cuMemFree(two.live));
                GR_MUST(cuCtxSetCurrent(NULL));
                GR_MUST(cuGreenCtxDestroy(next.handle));
                printf("ended again: %d\n", (int)cuGreenCtxDestroy(next.handle));
        }
        for (size_t i = 0; i < sizeof(no_devices) / sizeof(no_devices[0]); i++) {
                CUgreenCtx none = NULL;

                printf("on device %d: %d\n", no_devices[i],
                       (int)cuGreenCtxCreate(&none, half_of(0), no_devices[i], CU_GREEN_CTX_DEFAULT_STREAM));
        }
        for (int i = KNOWN; i-- > 0;) {
                printf("%d", is_active(0) + 2 * is_active(1));
                GR_MUST(cuGreenCtxDestroy(greens[i].handle));
        }
        printf(", all back: %d\n", used_bytes(0) == before[0] && used_bytes(1) == before[1]);
        GR_MUST(cuCtxSetCurrent(NULL));
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
                GR_MUST(cuCtxSetCurrent(greens[i % MANY].context));
                GR_MUST(cuMemAlloc(&block, 4096));
                GR_MUST(cuMemsetD32(block, (uint32_t)i, 1024));
                GR_MUST(cuMemcpyDtoH(&word, block + 4092, 4));
                wrong += word != (uint32_t)i;
                GR_MUST(cuMemFree(block));
        }
        printf("%d green contexts: %u words wrong\n", MANY, wrong);
        for (int i = 0; i < MANY; i++)
                GR_MUST(cuGreenCtxDestroy(greens[i].handle));
        printf("active: %d, all back: %d\n", is_active(0), used_bytes(0) == before);
        GR_MUST(cuCtxSetCurrent(NULL));
}

/* Whole contexts with memory of their own, beside a green one. */
static void whole(void)
{
        size_t before = used_bytes(0);
        struct green green = make_green(0, true);
        unsigned long retains;
        CUcontext a, b, c, again;
        struct two in_a, in_b;
        CUdeviceptr block;
        size_t used;

        work("a green context", green.context);
        GR_MUST(behind_create(&a, 0));
        GR_MUST(cuCtxDestroy(a)); /* and nobody has used it */
        GR_MUST(behind_create(&a, 0));
        GR_MUST(behind_create(&b, 0));
        GR_MUST(behind_create(&c, 1));
        used = used_bytes(0);
        GR_MUST(cuCtxSetCurrent(a));
        GR_MUST(cuMemAlloc(&block, BLOCK));
        printf("its first block takes %zu MiB\n", (used_bytes(0) - used) / MIB);
        GR_MUST(cuMemFree(block));
        work("a", a);
        work("b", b);
        retains = calls_of("cuDevicePrimaryCtxRetain");
        work("c", c);
        GR_CHECK_EQ(calls_of("cuDevicePrimaryCtxRetain"), retains); /* its device's primary context is not made */
        GR_MUST(cuCtxSetCurrent(a));
        in_a = leave_two(1);
        GR_MUST(cuCtxSetCurrent(b));
        in_b = leave_two(2);
        GR_MUST(cuCtxDestroy(a));
        GR_MUST(cuCtxSetCurrent(c));
        free_lost(in_a);
        GR_MUST(cuCtxSetCurrent(b));
        printf("the other one's: %u\n", last_word(in_b.live));
        GR_MUST(cuCtxSetCurrent(c));
        GR_MUST(behind_end(b));

        /* The driver gives the handle of one that has ended to the next. */
        GR_MUST(cuCtxCreate(&again, NULL, 0, 0));
        printf("its handle comes again: %d\n", again == b);
        free_lost(in_b);
        work("b again", again);
        work("c", c);
        GR_MUST(cuCtxDestroy(again));
        GR_MUST(cuCtxDestroy(c));
        work("the green context", green.context);
        GR_MUST(cuCtxSetCurrent(NULL));
        GR_MUST(cuGreenCtxDestroy(green.handle));
        printf("active: %d, all back: %d\n", is_active(0), used_bytes(0) == before);
}

/* The driver may not tell at once whether a release was the last. */
static void released(void)
{
        CUcontext primary;
        struct two blocks;

        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        work("the primary context", primary);
        blocks = leave_two(3);
        GR_MUST(cuDevicePrimaryCtxRelease(0));
        printf("released by one of two: %u\n", last_word(blocks.live));
        from_the_cache(primary);
        GR_MUST(cuCtxSetCurrent(NULL));
        GR_MUST(cuDevicePrimaryCtxRelease(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        GR_MUST(cuCtxSetCurrent(primary));
        free_lost(blocks);
        work("retained again", primary);
        GR_MUST(cuDevicePrimaryCtxRelease(0));
        GR_MUST(cuCtxSetCurrent(NULL));
}

/* A capture on its stream goes with the primary context, on whose device nobody captures from then on. */
static void capture(void)
{
        struct green green = make_green(0, true);
        CUcontext other;
        CUstream stream;

        work("before a capture", green.context);
        GR_MUST(cuGreenCtxStreamCreate(&stream, green.handle, CU_STREAM_NON_BLOCKING, 0));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuCtxSetCurrent(NULL));
        GR_MUST(cuGreenCtxDestroy(green.handle));
        GR_MUST(cuCtxCreate(&other, NULL, 0, 0));
        reuses("a capture in a green context");
        GR_MUST(cuCtxDestroy(other));
}

/*
 * The second device has access to the first one's memory before the program asks for it. Its kernel comes after the one
 * behind which the memory was freed.
 */
static void peers(void)
{
        enum { WORDS = 16 << 20, LATE_US = 300000 };
        struct gt near, far;
        CUdeviceptr ptr;

        GR_MUST(cuDevicePrimaryCtxRetain(&far.ctx, 1));
        GR_MUST(cuCtxSetCurrent(far.ctx));
        gt_load_kernels(&far.module);
        GR_MUST(cuModuleGetFunction(&far.fill, far.module, "gr_fill"));
        gt_open(&near);
        GR_MUST(cuCtxSetCurrent(far.ctx));
        GR_MUST(behind_peer_access(near.ctx));
        printf("peer access that a plug-in has enabled: %d\n", (int)cuCtxEnablePeerAccess(near.ctx, 0));
        GR_MUST(cuCtxSetCurrent(near.ctx));
        GR_MUST(cuMemAlloc(&ptr, 4ul * WORDS));
        GR_MUST(gt_late_fill(&near, NULL, ptr, 1, WORDS, LATE_US));
        GR_MUST(cuMemFree(ptr));
        GR_MUST(cuMemAlloc(&ptr, 4ul * WORDS));
        GR_MUST(cuCtxSetCurrent(far.ctx));
        GR_MUST(gt_fill(&far, NULL, ptr, 2, WORDS));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuCtxSetCurrent(near.ctx));
        GR_MUST(cuCtxSynchronize());
        printf("filled by the second device: %u words wrong\n", gt_wrong_words(ptr, 4ul * WORDS, 2));
        GR_MUST(cuMemFree(ptr));
}

/*
 * Whatever the library is refused at first, afterwards it serves the context from its cache and asks the driver
 * nothing: not even which context is current, as there is one only. And it holds nothing on to what it looked at.
 */
static void refused(void)
{
        struct green green = make_green(0, true);
        unsigned long before;

        work("a green context", green.context);
        work("once more", green.context);
        GR_CHECK_EQ(calls_of("cuMemFreeAsync"), 1); /* what was allocated to learn whose it is */
        from_the_cache(green.context);
        before = calls_of("cuCtxGetCurrent");
        for (int i = 0; i < ROUNDS; i++) {
                GR_MUST(cuCtxSetCurrent(green.context));
                GR_MUST(cuMemFree(leave_two(1).live));
        }
        GR_CHECK_EQ(calls_of("cuCtxGetCurrent"), before);
        GR_MUST(cuCtxSetCurrent(NULL));
        GR_MUST(cuGreenCtxDestroy(green.handle));
        GR_CHECK(!is_active(0));
}

static void find(void *where, const char *name, void *ret_function)
{
        void *found = dlsym(where, name);

        if (!found) {
                fprintf(stderr, "behind_contexts: no %s\n", name);
                exit(EXIT_FAILURE);
        }
        memcpy(ret_function, &found, sizeof(found));
}

/*
 * Memory that is allocated in a green context is the primary context's, and so are its fences. Were the green one taken
 * for a context of its own, its end would break the fences of the other: nothing would be served from the cache.
 */
static void green_beside_primary(void)
{
        unsigned long (*misuses)(void), allocs;
        struct green green;
        CUcontext primary;
        CUdeviceptr block;

        find(RTLD_DEFAULT, "grSimMisuseCount", &misuses);
        GR_MUST(cuDevicePrimaryCtxRetain(&primary, 0));
        GR_MUST(cuCtxSetCurrent(primary));
        GR_CHECK_EQ(use_blocks(), 0);
        for (int round = 0; round < 3; round++) {
                green = make_green(0, true);
                GR_MUST(cuCtxSetCurrent(green.context));
                GR_MUST(cuMemAlloc(&block, BLOCK));
                GR_MUST(cuMemsetD32(block, 1, BLOCK / 4));
                GR_MUST(cuMemFree(block));
                GR_CHECK_EQ(use_blocks(), 0);
                GR_MUST(behind_green_end(green.handle));
                GR_MUST(cuCtxSetCurrent(primary));
                allocs = calls_of("cuMemAlloc_v2");
                for (int i = 0; i < 10; i++)
                        GR_CHECK_EQ(use_blocks(), 0);
                GR_CHECK(calls_of("cuMemAlloc_v2") - allocs < 20); /* of 400 requests */
        }
        GR_MUST(cuDevicePrimaryCtxRelease(0));
        GR_CHECK_EQ(misuses(), 0);
}

static void *come_and_go(void *context)
{
        GR_MUST(cuCtxSetCurrent(context));
        leave_two(1);
        return NULL;
}

/*
 * Memory for a stream whose context the library has not seen yet, by a thread that has none: it has none after that,
 * whatever another thread has left in the cache.
 */
static void of_a_stream(void)
{
        CUdeviceptr ptr, other;
        pthread_t thread;
        CUcontext context;
        CUstream stream;

        GR_MUST(behind_create(&context, 0));
        GR_MUST(behind_current(context));
        GR_MUST(behind_stream(&stream));
        GR_MUST(behind_current(NULL));
        printf("with none current, from a stream: %d, ", (int)cuMemAllocAsync(&ptr, BLOCK, stream));
        GR_CHECK_EQ(pthread_create(&thread, NULL, come_and_go, context), 0);
        pthread_join(thread, NULL);
        printf("of none: %d\n", (int)cuMemAlloc(&other, BLOCK));
        GR_MUST(cuMemFreeAsync(ptr, stream));
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(behind_end(context));
}

/* The library knows one context, in which the thread's memory comes from the cache, when this one becomes current. */
static void pushed(const char *function)
{
        CUresult (*push)(CUcontext);
        CUcontext context, hidden;
        CUdeviceptr block;
        int ordinal;

        find(RTLD_DEFAULT, function, &push);
        GR_MUST(cuCtxCreate(&context, NULL, 0, 0));
        for (int i = 0; i < ROUNDS; i++)
                GR_MUST(cuMemFree(leave_two(1).live));
        GR_MUST(behind_create(&hidden, 1));
        GR_MUST(push(hidden));
        GR_MUST(cuMemAlloc(&block, BLOCK));
        GR_MUST(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, block));
        printf("%s: memory of device %d\n", function, ordinal);
        GR_MUST(cuMemFree(block));
        GR_MUST(cuCtxDestroy(hidden));
        GR_MUST(cuCtxDestroy(context));
}

int main(int argc, char **argv)
{
        void *plugin = argc == 2 || argc == 3 ? dlopen(argv[1], RTLD_NOW | RTLD_DEEPBIND) : NULL;

        if (!plugin) {
                fprintf(stderr,
                        "usage: behind_contexts PLUGIN [green | peers | refused | released | stream | FUNCTION]\n");
                return 2;
        }
        find(plugin, "behind_green", &behind_green);
        find(plugin, "behind_green_end", &behind_green_end);
        find(plugin, "behind_create", &behind_create);
        find(plugin, "behind_end", &behind_end);
        find(plugin, "behind_release", &behind_release);
        find(plugin, "behind_current", &behind_current);
        find(plugin, "behind_stream", &behind_stream);
        find(plugin, "behind_peer_access", &behind_peer_access);
        find(RTLD_DEFAULT, "grSimCallCount", &calls_of);
        find(RTLD_DEFAULT, "grSimUsedBytes", &used_bytes);
        under_the_library = dlsym(RTLD_DEFAULT, "gpureclaim_status") != NULL;
        GR_MUST(cuInit(0));
        if (argc == 3) {
                if (strcmp(argv[2], "released") == 0)
                        released();
                else if (strcmp(argv[2], "stream") == 0)
                        of_a_stream();
                else if (strcmp(argv[2], "refused") == 0)
                        refused();
                else if (strcmp(argv[2], "peers") == 0)
                        peers();
                else if (strcmp(argv[2], "green") == 0)
                        green_beside_primary();
                else
                        pushed(argv[2]);
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
