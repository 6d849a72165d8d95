/*
 * What succeeds natively succeeds under the shim: in each of many states of the process, blocks of changing sizes are
 * allocated, used and freed, in all many times what the card has. One line per state, "name: 0 of N refused", to be
 * compared between a native run and one under the shim. Lines that begin with "~" may differ.
 *
 *   rule [STATE...]
 *
 * Each state runs in a process of its own. Sizes are shares of the memory that is free at first, so that the program
 * fits any card, and any limit; of a large card one block takes most, as large ones take the driver long. Each block is
 * used to the end: the last kernel that writes to it is still to come when it is freed, and the next owner looks
 * whether it came too late. Ends with status 1 where one was refused, or has wrong contents.
 */
#include "gputest.h"
#include "kernels.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORDS = 64, LATE_US = 400, HELD = 3, PINNED = 8, STREAMS = 300, STATE_SECONDS = 60 };

#define ROOM (12 * GIB) /* of a larger card */

static struct gt gt;
static CUstream early, late; /* blocks are used on the one at first, on the other at last */
static CUdeviceptr counter;  /* of wrong words */
static uint32_t *counted;    /* the same, pinned */
static size_t room;          /* free at first, beside the ballast */

/* Sizes, as shares of what is free at first; several of the small ones are held at a time. */
static const unsigned small_parts[] = {5, 7, 4, 11, 6, 9, 5, 13, 4, 8};
static const unsigned large_percent[] = {50, 90, 33, 72, 55, 88, 41, 90};
enum { SMALL = sizeof small_parts / sizeof small_parts[0], LARGE = sizeof large_percent / sizeof large_percent[0] };

static void use_streams(void)
{
        void *host;

        early = gt_stream();
        late = gt_stream();
        GR_MUST(cuMemAlloc(&counter, 4));
        GR_MUST(cuMemHostAlloc(&host, 4, 0));
        counted = host;
}

static struct {
        int asked, refused, wrong;
        CUresult first;   /* refusal */
        const char *kind; /* of its memory */
} seen;

static bool came(CUresult code, const char *kind)
{
        seen.asked++;
        if (code == CUDA_SUCCESS)
                return true;
        if (!seen.refused++) {
                seen.first = code;
                seen.kind = kind;
        }
        return false;
}

/* The new owner's words stay as they are, and then its last kernel is on its way. */
static void use(CUdeviceptr p, size_t bytes)
{
        static uint32_t value = 1;
        CUdeviceptr rear = p + (bytes - WORDS * 4) / 256 * 256;

        value += 2;
        GR_MUST(cuMemsetD32Async(counter, 0, 1, early));
        GR_MUST(gt_fill(&gt, early, p, value, WORDS));
        GR_MUST(gt_fill(&gt, early, rear, value, WORDS));
        GR_MUST(cuStreamSynchronize(late)); /* whoever had the memory before is done by now */
        GR_MUST(gt_count_diff(&gt, early, p, value, WORDS, counter));
        GR_MUST(gt_count_diff(&gt, early, rear, value, WORDS, counter));
        GR_MUST(cuMemcpyDtoHAsync(counted, counter, 4, early));
        GR_MUST(cuStreamSynchronize(early));
        seen.wrong += *counted != 0;
        GR_MUST(gt_late_fill(&gt, late, p, value + 1, WORDS, LATE_US));
        GR_MUST(gt_late_fill(&gt, late, rear, value + 1, WORDS, LATE_US));
}

static void give(CUdeviceptr p)
{
        CUresult code;

        if (!p)
                return;
        code = cuMemFree(p);
        if (code != CUDA_SUCCESS)
                gt_die("a free said %d", (int)code);
}

/* The driver does not bear this on a full card, and the card is full only of what the program holds. */
static void managed_pool(void)
{
#if CUDA_VERSION >= 13000
        CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device};
        __typeof__(&cuMemGetDefaultMemPool) get = GT_OPTIONAL(cuMemGetDefaultMemPool);
        CUmemoryPool pool;
        CUdeviceptr p;

        if (!get || get(&pool, &location, CU_MEM_ALLOCATION_TYPE_MANAGED) != CUDA_SUCCESS)
                return;
        if (came(cuMemAllocFromPoolAsync(&p, 64 * MIB, pool, early), "a managed pool's")) {
                GR_MUST(cuMemFreeAsync(p, early));
                GR_MUST(cuStreamSynchronize(early));
        }
#endif
}

static void created(size_t bytes)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
        CUmemGenericAllocationHandle handle;

        if (came(cuMemCreate(&handle, bytes, &prop, 0), "created"))
                GR_MUST(cuMemRelease(handle));
}

/* What is freed may still be copied to. */
static void pinned(void)
{
        for (size_t i = 0; i < PINNED; i++) {
                size_t bytes = (20 + i * 17 % 30) * MIB;
                CUdeviceptr p;
                void *host;

                if (!came(cuMemHostAlloc(&host, bytes, 0), "pinned"))
                        continue;
                if (came(cuMemAlloc(&p, MIB), "plain")) {
                        GR_MUST(gt_late_fill(&gt, late, p, 1, WORDS, LATE_US));
                        GR_MUST(cuMemcpyDtoHAsync(host, p, MIB, late));
                        give(p);
                }
                GR_MUST(cuMemFreeHost(host));
        }
}

/* What the pool does not serve must find room beside what it keeps. */
static void other_kinds(size_t bytes)
{
        CUdeviceptr p;

        if (came(cuMemAllocAsync(&p, bytes, early), "stream-ordered")) {
                GR_MUST(gt_fill(&gt, early, p, 1, WORDS));
                GR_MUST(cuMemFreeAsync(p, early));
                GR_MUST(cuStreamSynchronize(early)); /* so that the driver has it back */
        }
        if (came(cuMemAllocManaged(&p, bytes, CU_MEM_ATTACH_GLOBAL), "managed"))
                give(p);
        managed_pool();
        created(bytes / GT_PAGE * GT_PAGE);
        if (came(cuMemAllocPitch(&p, &(size_t){0}, bytes / 1024, 1024, 4), "pitched")) {
                use(p, bytes / 2);
                give(p);
        }
}

static void rounds(void)
{
        CUdeviceptr held[HELD] = {0};

        for (int i = 0; i < 2 * SMALL; i++) {
                size_t bytes = room / small_parts[i % SMALL] + (size_t)i * 1000;
                CUdeviceptr *p = &held[i % HELD];

                give(*p);
                *p = 0;
                if (came(cuMemAlloc(p, bytes), "plain"))
                        use(*p, bytes);
                else
                        *p = 0;
        }
        for (int i = 0; i < HELD; i++)
                give(held[i]);
        for (int i = 0; i < LARGE; i++) {
                size_t bytes = room / 100 * large_percent[i];
                CUdeviceptr p;

                if (!came(cuMemAlloc(&p, bytes), "plain"))
                        continue;
                use(p, bytes);
                give(p);
                if (i % 3 == 1)
                        other_kinds(room / 100 * (20 + 7 * (size_t)i));
        }
        pinned();
}

static void open_card(void)
{
        CUdeviceptr ballast;
        size_t total;

        gt_open(&gt);
        use_streams();
        GR_MUST(cuMemGetInfo(&room, &total));
        if (room < 2 * ROOM)
                return;
        GR_MUST(cuMemAlloc(&ballast, (room - ROOM) / GT_PAGE * GT_PAGE));
        GR_MUST(cuMemGetInfo(&room, &total));
}

/* Nothing beside. */
static void plain(void)
{
        open_card();
        rounds();
}

static CUstream capture_in(CUcontext ctx, CUstreamCaptureMode mode)
{
        CUstream stream;

        GR_MUST(cuCtxSetCurrent(ctx));
        stream = gt_stream();
        GR_MUST(cuStreamBeginCapture(stream, mode));
        return stream;
}

static void end_capture(CUstream stream)
{
        CUgraph graph = NULL;
        CUresult end = cuStreamEndCapture(stream, &graph);

        printf("the capture ended with %d\n", (int)end);
        if (graph)
                GR_MUST(cuGraphDestroy(graph));
}

/* A context that was destroyed with a capture in it. */
static void context_gone(void)
{
        CUcontext ctx;

        open_card();
#if CUDA_VERSION >= 13000
        GR_MUST(cuCtxCreate(&ctx, NULL, 0, gt.device));
#else
        GR_MUST(cuCtxCreate(&ctx, 0, gt.device));
#endif
        capture_in(ctx, CU_STREAM_CAPTURE_MODE_RELAXED);
        GR_MUST(cuCtxDestroy(ctx));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        rounds();
}

/* The device was reset with a capture going on. */
static void reset(void)
{
        open_card();
        capture_in(gt.ctx, CU_STREAM_CAPTURE_MODE_RELAXED);
        GR_MUST(cuDevicePrimaryCtxReset(gt.device));
        open_card();
        rounds();
}

static void *leave_capture(void *unused)
{
        (void)unused;
        gt_attach(&gt);
        GR_MUST(cuStreamBeginCapture(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED));
        return NULL;
}

/* A thread that ended with a capture of its stream. */
static void thread_gone(void)
{
        pthread_t thread;

        open_card();
        if (pthread_create(&thread, NULL, leave_capture, NULL) || pthread_join(thread, NULL))
                gt_die("no thread");
        rounds();
}

/* A stream that was destroyed with its capture. */
static void stream_gone(void)
{
        open_card();
        GR_MUST(cuStreamDestroy(capture_in(gt.ctx, CU_STREAM_CAPTURE_MODE_RELAXED)));
        rounds();
}

struct capture {
        CUstreamCaptureMode mode;
        atomic_bool on, enough;
};

static void *hold_capture(void *argument)
{
        struct capture *capture = argument;
        CUstream stream;

        stream = capture_in(gt.ctx, capture->mode);
        atomic_store(&capture->on, true);
        while (!atomic_load(&capture->enough))
                gt_sleep_us(500);
        end_capture(stream);
        return NULL;
}

/* Another thread captures all the time. */
static void beside(CUstreamCaptureMode mode)
{
        CUstreamCaptureMode own = CU_STREAM_CAPTURE_MODE_RELAXED;
        struct capture capture = {.mode = mode};
        pthread_t thread;

        open_card();
        if (pthread_create(&thread, NULL, hold_capture, &capture))
                gt_die("no thread");
        while (!atomic_load(&capture.on))
                gt_sleep_us(100);
        GR_MUST(cuThreadExchangeStreamCaptureMode(&own)); /* or an allocation beside a global one would end it */
        rounds();
        atomic_store(&capture.enough, true);
        pthread_join(thread, NULL);
}

static void beside_local(void)
{
        beside(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
}

static void beside_global(void)
{
        beside(CU_STREAM_CAPTURE_MODE_GLOBAL);
}

static void beside_relaxed(void)
{
        beside(CU_STREAM_CAPTURE_MODE_RELAXED);
}

/* The thread itself captures, in a mode in which it may allocate. */
static void inside(void)
{
        CUstream stream;

        open_card();
        stream = capture_in(gt.ctx, CU_STREAM_CAPTURE_MODE_RELAXED);
        rounds();
        end_capture(stream);
}

/* More captures at a time than anybody counts, and then none. */
static void many(void)
{
        CUstream streams[STREAMS];
        CUgraph graph;

        open_card();
        for (int i = 0; i < STREAMS; i++)
                streams[i] = capture_in(gt.ctx, CU_STREAM_CAPTURE_MODE_RELAXED);
        rounds();
        for (int i = 0; i < STREAMS; i++) {
                GR_MUST(cuStreamEndCapture(streams[i], &graph));
                GR_MUST(cuGraphDestroy(graph));
        }
        rounds();
}

/*
 * Blocks that others may know by now were freed during a capture. The driver refuses the attribute for mapped memory,
 * of which the shim's blocks may be made: then nobody knows them.
 */
static void exported(void)
{
        CUdeviceptr blocks[4];
        unsigned int yes = 1;
        CUstream stream;
        CUresult code;

        open_card();
        for (int i = 0; i < 4; i++) {
                GR_MUST(cuMemAlloc(&blocks[i], room / 6));
                code = cuPointerSetAttribute(&yes, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, blocks[i]);
                if (code != CUDA_SUCCESS && code != CUDA_ERROR_NOT_SUPPORTED)
                        gt_die("SYNC_MEMOPS: %d", (int)code);
                if (code != CUDA_SUCCESS)
                        printf("~ SYNC_MEMOPS: %d\n", (int)code);
        }
        stream = capture_in(gt.ctx, CU_STREAM_CAPTURE_MODE_RELAXED);
        for (int i = 0; i < 4; i++)
                give(blocks[i]);
        rounds();
        end_capture(stream);
        rounds();
}

/* Small blocks of all sizes are in the way. */
static void crumbs(void)
{
        enum { COUNT = 4000 };
        static CUdeviceptr blocks[COUNT];
        CUstream stream;

        open_card();
        for (int i = 0; i < COUNT; i++)
                GR_MUST(cuMemAlloc(&blocks[i], (size_t)(i % 37 + 1) * 1111));
        stream = capture_in(gt.ctx, CU_STREAM_CAPTURE_MODE_RELAXED);
        for (int i = 0; i < COUNT; i++)
                give(blocks[i]);
        rounds();
        end_capture(stream);
}

/*
 * All that the card has was the program's, and is free. Natively, too, the driver refuses some processes the last
 * memory that it calls free (docs/measurements.md, last-memory).
 */
static void fill_and_free(void)
{
        size_t left, total, last = gt.simulated ? 0 : 64 * MIB;
        CUdeviceptr blocks[64];
        int count = 0;

        GR_MUST(cuMemGetInfo(&left, &total));
        while (left > 3 * GT_PAGE && count < 64) {
                if (cuMemAlloc(&blocks[count], left / 2 / GT_PAGE * GT_PAGE) != CUDA_SUCCESS) {
                        if (left <= last)
                                break;
                        gt_die("half of %zu bytes that are free was refused, after %d blocks", left, count);
                }
                count++;
                GR_MUST(cuMemGetInfo(&left, &total));
        }
        while (count > 0)
                give(blocks[--count]);
}

static void managed(void)
{
        CUstream stream;

        open_card();
        fill_and_free();
        managed_pool();
        stream = capture_in(gt.ctx, CU_STREAM_CAPTURE_MODE_RELAXED);
        fill_and_free();
        managed_pool();
        end_capture(stream);
        fill_and_free();
        rounds();
}

/* What the driver takes for code, contexts and streams must find room beside what the pool keeps. */
static void code_and_contexts(void)
{
        CUstream streams[STREAMS / 10];
        struct gt_green green;
        char log[4096];
        CUjit_option options[] = {CU_JIT_INFO_LOG_BUFFER, CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES};
        CUmodule module;
        CUcontext ctx;
        bool has_green;

        open_card();
        has_green = gt_green_open(gt.device, &green);
        if (has_green)
                gt_green_close(&green);
        for (int i = 0; i < 3; i++) {
                fill_and_free();
                if (came(cuModuleLoadData(&module, gr_test_ptx), "module"))
                        GR_MUST(cuModuleUnload(module));
                fill_and_free();
                if (came(cuModuleLoadDataEx(&module, gr_test_ptx, 2, options, (void *[]){log, (void *)sizeof(log)}),
                         "module with a log"))
                        GR_MUST(cuModuleUnload(module));
                fill_and_free();
#if CUDA_VERSION >= 13000
                if (came(cuCtxCreate(&ctx, NULL, 0, gt.device), "context")) {
#else
                if (came(cuCtxCreate(&ctx, 0, gt.device), "context")) {
#endif
                        GR_MUST(cuCtxDestroy(ctx));
                        GR_MUST(cuCtxSetCurrent(gt.ctx));
                }
                fill_and_free();
                if (has_green &&
                    came(gt_green_open(gt.device, &green) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY, "green"))
                        gt_green_close(&green);
                fill_and_free();
                for (int j = 0; j < STREAMS / 10; j++)
                        if (!came(cuStreamCreate(&streams[j], CU_STREAM_NON_BLOCKING), "stream"))
                                streams[j] = NULL;
                for (int j = 0; j < STREAMS / 10; j++)
                        if (streams[j])
                                GR_MUST(cuStreamDestroy(streams[j]));
        }
        rounds();
}

/* So must the stacks of a kernel's threads. */
static void stacks(void)
{
        size_t bytes, left, total;
        int processors, threads;

        open_card();
        GR_MUST(cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, gt.device));
        GR_MUST(cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, gt.device));
        GR_MUST(cuMemGetInfo(&left, &total));
        bytes = left / 2 / (unsigned)processors / (unsigned)threads / 1024 * 1024;
        GR_MUST(cuCtxGetLimit(&total, CU_LIMIT_STACK_SIZE));
        for (int i = 0; i < 3; i++) {
                CUdeviceptr p;

                fill_and_free();
                came(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, bytes), "stacks'");
                if (came(cuMemAlloc(&p, left / 4), "plain")) {
                        came(gt_fill(&gt, early, p, 1, WORDS), "a launch's");
                        GR_MUST(cuStreamSynchronize(early));
                        give(p);
                }
                GR_MUST(cuCtxSetLimit(CU_LIMIT_STACK_SIZE, total));
        }
        rounds();
}

static const struct {
        const char *name;
        void (*run)(void);
} states[] = {
        {"plain", plain},
        {"a capture ended with its context", context_gone},
        {"a capture ended with a reset", reset},
        {"a capture ended with its thread", thread_gone},
        {"a capture ended with its stream", stream_gone},
        {"beside a thread-local capture", beside_local},
        {"beside a global capture", beside_global},
        {"beside a relaxed capture", beside_relaxed},
        {"inside a relaxed capture", inside},
        {"many captures", many},
        {"exported blocks freed in a capture", exported},
        {"small blocks freed in a capture", crumbs},
        {"a managed pool beside freed memory", managed},
        {"code and contexts beside freed memory", code_and_contexts},
        {"stacks beside freed memory", stacks},
};
enum { STATES = sizeof states / sizeof states[0] };

static int run(int i)
{
        double begin_us = gt_now_us();

        alarm(STATE_SECONDS);
        states[i].run();
        printf("%s: %d of %d refused", states[i].name, seen.refused, seen.asked);
        if (seen.refused)
                printf(", first %s memory: %d", seen.kind, (int)seen.first);
        printf("; %d blocks with wrong words\n", seen.wrong);
        printf("~ %s: %.1f s\n", states[i].name, (gt_now_us() - begin_us) / 1e6);
        return seen.wrong || seen.refused;
}

int main(int argc, char **argv)
{
        int status = 0;

        setvbuf(stdout, NULL, _IOLBF, 0);
        for (int i = 0; i < STATES; i++) {
                bool wanted = argc == 1;
                int ended;
                pid_t child;

                for (int j = 1; j < argc; j++)
                        wanted |= strcmp(argv[j], states[i].name) == 0;
                if (!wanted)
                        continue;
                child = fork();
                if (child == 0)
                        exit(run(i));
                if (child < 0 || waitpid(child, &ended, 0) < 0)
                        gt_die("no process");
                if (WIFSIGNALED(ended)) {
                        printf("%s: ended by signal %d\n", states[i].name, WTERMSIG(ended));
                        status = 1;
                } else if (WEXITSTATUS(ended) == GT_SKIPPED) {
                        return GT_SKIPPED;
                } else if (WEXITSTATUS(ended)) {
                        printf("%s: status %d\n", states[i].name, WEXITSTATUS(ended));
                        status = 1;
                }
        }
        return status;
}
