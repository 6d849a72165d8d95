/*
 * When the library takes a program's work for that of one stream, so that barriers cost nothing: as long as all goes to
 * one default stream, whatever else is created. Then a block that is freed behind a kernel that runs serves again at
 * once, behind a barrier; where work may overlap, fresh memory is better. Under the library only.
 *
 *   overlap [WAY]     all ways, each in a process of its own as the library remembers what it saw; or this one
 *
 * One line per way; exit status 1 when one failed.
 */
#include "gputest.h"

#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#define BYTES (64 * GT_MIB) /* too much to be spared a fence */
enum { SPIN_US = 100000, WORDS = 64, WORD_BYTES = 4 * WORDS };

extern char **environ;

static struct gt gt;
static CUstream made;     /* created, and without work but for what the way gives it */
static CUdeviceptr words; /* what that works on, twice WORDS */
static uint32_t host[WORDS];

static void nothing(void)
{
}

static void by_name(void)
{
        GT_MUST(gt_fill(&gt, CU_STREAM_LEGACY, words, 1, WORDS));
        GT_MUST(cuMemsetD8Async(words, 0, WORDS, CU_STREAM_LEGACY));
}

static void *per_thread(const char *name)
{
        CUdriverProcAddressQueryResult status;
        void *found = NULL;

        GT_MUST(cuGetProcAddress(name, &found, CUDA_VERSION, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &status));
        return found;
}

/* Functions for which NULL is the thread's own stream. */
static void by_null(void)
{
        __typeof__(&cuMemsetD8Async) fill;
        void *found = per_thread("cuMemsetD8Async");

        memcpy(&fill, &found, sizeof fill);
        GT_MUST(fill(words, 0, WORDS, NULL));
        GT_MUST(fill(words, 0, WORDS, CU_STREAM_PER_THREAD));
}

static void own(void)
{
        GT_MUST(cuMemsetD8Async(words, 0, WORDS, CU_STREAM_PER_THREAD));
}

static void *own_thread(void *arg)
{
        (void)arg;
        gt_attach(&gt);
        own();
        GT_MUST(cuCtxSynchronize());
        return NULL;
}

static void other_thread(void)
{
        pthread_t thread;

        if (pthread_create(&thread, NULL, own_thread, NULL))
                gt_die("no thread");
        pthread_join(thread, NULL);
}

static CUlaunchConfig config(CUstream stream)
{
        return (CUlaunchConfig){.gridDimX = 1,
                                .gridDimY = 1,
                                .gridDimZ = 1,
                                .blockDimX = 1,
                                .blockDimY = 1,
                                .blockDimZ = 1,
                                .hStream = stream};
}

static void launch_ex(CUstream stream)
{
        uint64_t ns = 1;
        void *args[] = {&ns};
        CUlaunchConfig with = config(stream);

        GT_MUST(cuLaunchKernelEx(&with, gt.spin, args, NULL));
}

static void cooperative(void)
{
        uint64_t ns = 1;
        void *args[] = {&ns};

        GT_MUST(cuLaunchCooperativeKernel(gt.spin, 1, 1, 1, 1, 1, 1, 0, made, args));
}

static void kernel(void)
{
        GT_MUST(gt_fill(&gt, made, words, 1, WORDS));
}

static void kernel_ex(void)
{
        launch_ex(made);
}

static void kernel_ex_legacy(void)
{
        launch_ex(NULL);
}

static void copies_2d_3d(bool three)
{
        CUDA_MEMCPY2D flat = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                              .srcDevice = words,
                              .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                              .dstDevice = words + WORD_BYTES,
                              .WidthInBytes = WORD_BYTES,
                              .Height = 1};
        CUDA_MEMCPY3D deep = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                              .srcDevice = words,
                              .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                              .dstDevice = words + WORD_BYTES,
                              .WidthInBytes = WORD_BYTES,
                              .Height = 1,
                              .Depth = 1};

        if (three)
                GT_MUST(cuMemcpy3DAsync(&deep, made));
        else
                GT_MUST(cuMemcpy2DAsync(&flat, made));
}

static void copy_2d(void)
{
        copies_2d_3d(false);
}

static void copy_3d(void)
{
        copies_2d_3d(true);
}

#define ON_MADE(name, call)                                                                                            \
        static void name(void)                                                                                         \
        {                                                                                                              \
                GT_MUST(call);                                                                                         \
        }

ON_MADE(copy, cuMemcpyAsync(words, words + WORD_BYTES, WORD_BYTES, made))
ON_MADE(copy_up, cuMemcpyHtoDAsync(words, host, WORD_BYTES, made))
ON_MADE(copy_down, cuMemcpyDtoHAsync(host, words, WORD_BYTES, made))
ON_MADE(copy_within, cuMemcpyDtoDAsync(words, words + WORD_BYTES, WORD_BYTES, made))
ON_MADE(copy_peer, cuMemcpyPeerAsync(words, gt.ctx, words + WORD_BYTES, gt.ctx, WORD_BYTES, made))
ON_MADE(fill_8, cuMemsetD8Async(words, 1, WORDS, made))
ON_MADE(fill_16, cuMemsetD16Async(words, 1, WORDS, made))
ON_MADE(fill_32, cuMemsetD32Async(words, 1, WORDS, made))
ON_MADE(fill_2d_8, cuMemsetD2D8Async(words, WORD_BYTES, 1, WORDS, 1, made))
ON_MADE(fill_2d_16, cuMemsetD2D16Async(words, WORD_BYTES, 1, WORDS, 1, made))
ON_MADE(fill_2d_32, cuMemsetD2D32Async(words, WORD_BYTES, 1, WORDS, 1, made))
ON_MADE(write_32, cuStreamWriteValue32(made, words, 1, 0))
ON_MADE(write_64, cuStreamWriteValue64(made, words, 1, 0))

static void wait_event(void)
{
        CUevent event;

        GT_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        GT_MUST(cuEventRecord(event, NULL));
        GT_MUST(cuStreamWaitEvent(made, event, 0));
        GT_MUST(cuEventDestroy(event));
}

static void graph(CUstream stream)
{
        CUgraph empty;
        CUgraphExec exec;

        GT_MUST(cuGraphCreate(&empty, 0));
        GT_MUST(cuGraphInstantiate(&exec, empty, 0));
        GT_MUST(cuGraphDestroy(empty));
        GT_MUST(cuGraphLaunch(exec, stream));
        GT_MUST(cuCtxSynchronize());
        GT_MUST(cuGraphExecDestroy(exec));
}

static void graph_made(void)
{
        graph(made);
}

static void graph_legacy(void)
{
        graph(NULL);
}

static void unused(void)
{
        CUstream priority;
        CUgraph empty;

        GT_MUST(cuStreamCreateWithPriority(&priority, CU_STREAM_DEFAULT, 0));
        GT_MUST(cuStreamSynchronize(priority));
        GT_MUST(cuStreamDestroy(priority));
        GT_MUST(cuStreamBeginCapture(made, CU_STREAM_CAPTURE_MODE_RELAXED));
        GT_MUST(cuStreamEndCapture(made, &empty));
        GT_MUST(cuGraphDestroy(empty));
}

static void CUDA_CB function(void *arg)
{
        (void)arg;
}

static void host_function(void)
{
        GT_MUST(cuLaunchHostFunc(NULL, function, NULL));
}

static void green(void)
{
        struct gt_green part;

        if (!gt_green_open(gt.device, &part)) {
                printf("-      green contexts are not to be had here\n");
                exit(EXIT_SUCCESS);
        }
        gt_green_close(&part);
        gt_attach(&gt);
}

static const struct way {
        const char *name;
        void (*act)(void);
        bool overlaps;
        bool own;    /* the work is on the thread's own stream, not the legacy one ... */
        bool thread; /* ... and the thread is none that has worked before */
} ways[] = {
        {"a stream that is created", nothing, .overlaps = false},
        {"streams that come and go", unused, .overlaps = false},
        {"the legacy stream by its name", by_name, .overlaps = false},
        {"cuLaunchKernelEx on the legacy stream", kernel_ex_legacy, .overlaps = false},
        {"a graph on the legacy stream", graph_legacy, .overlaps = false},
        {"a thread's own stream", nothing, .overlaps = false, .own = true},
        {"a thread's own stream as NULL", by_null, .overlaps = false, .own = true},
        {"another thread's own stream alone", nothing, .overlaps = false, .own = true, .thread = true},
        {"the legacy and a thread's own stream", own, .overlaps = true},
        {"a thread's own stream as NULL, and the legacy one", by_null, .overlaps = true},
        {"two threads' own streams", other_thread, .overlaps = true, .own = true},
        {"own streams of one thread after another", other_thread, .overlaps = true, .own = true, .thread = true},
        {"a host function", host_function, .overlaps = true},
        {"a green context", green, .overlaps = true},
#define CREATED(function)                                                                                              \
        {                                                                                                              \
                "created stream: " #function, function, .overlaps = true                                               \
        }
        CREATED(kernel),
        CREATED(kernel_ex),
        CREATED(cooperative),
        CREATED(graph_made),
        CREATED(wait_event),
        CREATED(copy),
        CREATED(copy_up),
        CREATED(copy_down),
        CREATED(copy_within),
        CREATED(copy_peer),
        CREATED(copy_2d),
        CREATED(copy_3d),
        CREATED(fill_8),
        CREATED(fill_16),
        CREATED(fill_32),
        CREATED(fill_2d_8),
        CREATED(fill_2d_16),
        CREATED(fill_2d_32),
        CREATED(write_32),
        CREATED(write_64),
};
enum { WAYS = sizeof ways / sizeof *ways };

/* As gt_open, which gives the legacy stream work. */
static void open_idle(void)
{
        int devices = 0;

        if (cuInit(0) != CUDA_SUCCESS || cuDeviceGetCount(&devices) != CUDA_SUCCESS || devices == 0) {
                fprintf(stderr, "skipped: no CUDA device\n");
                exit(GT_SKIPPED);
        }
        GT_MUST(cuDeviceGet(&gt.device, 0));
        GT_MUST(cuDevicePrimaryCtxRetain(&gt.ctx, gt.device));
        gt_attach(&gt);
        gt_load_kernels(&gt.module);
        GT_MUST(cuModuleGetFunction(&gt.fill, gt.module, "gr_fill"));
        GT_MUST(cuModuleGetFunction(&gt.spin, gt.module, "gr_spin"));
        GT_MUST(cuMemAlloc(&words, 2 * WORD_BYTES));
        made = gt_stream();
}

static void *served_again(void *arg)
{
        const struct way *way = arg;
        CUstream home = way->own ? CU_STREAM_PER_THREAD : NULL;
        CUdeviceptr before, after;
        bool again;

        gt_attach(&gt);
        GT_MUST(cuMemAlloc(&before, BYTES));
        GT_MUST(gt_fill(&gt, home, before, 1, WORDS));
        GT_MUST(cuCtxSynchronize());
        if (!way->thread) {
                way->act();
                GT_MUST(cuCtxSynchronize());
        }
        GT_MUST(gt_spin(&gt, home, SPIN_US));
        GT_MUST(gt_fill(&gt, home, before, 2, WORDS));
        GT_MUST(cuMemFree(before));
        GT_MUST(cuMemAlloc(&after, BYTES));
        again = before == after;
        gt_check(again == !way->overlaps, way->name, "%s", again ? "one stream" : "work may overlap");
        GT_MUST(cuMemFree(after));
        return NULL;
}

static int try_way(const struct way *way)
{
        pthread_t thread;

        open_idle();
        if (!way->thread) {
                served_again((void *)(uintptr_t)way);
        } else {
                way->act();
                if (pthread_create(&thread, NULL, served_again, (void *)(uintptr_t)way))
                        gt_die("no thread");
                pthread_join(thread, NULL);
        }
        gt_close(&gt);
        return gt_failed ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(int argc, char **argv)
{
        int status = EXIT_SUCCESS;

        for (int i = 0; argc == 2 && i < WAYS; i++)
                if (!strcmp(argv[1], ways[i].name))
                        return try_way(&ways[i]);
        if (argc > 1)
                gt_die("no such way: %s", argv[1]);
        for (int i = 0; i < WAYS; i++) {
                char name[64];
                char *arguments[] = {argv[0], name, NULL};
                int ended;
                pid_t pid;

                snprintf(name, sizeof name, "%s", ways[i].name);
                if (posix_spawn(&pid, argv[0], NULL, NULL, arguments, environ) || waitpid(pid, &ended, 0) != pid)
                        gt_die("%s: no process", name);
                if (!WIFEXITED(ended))
                        gt_die("%s: ended by signal %d", name, WTERMSIG(ended));
                if (WEXITSTATUS(ended) == GT_SKIPPED)
                        return GT_SKIPPED;
                if (WEXITSTATUS(ended) != EXIT_SUCCESS)
                        status = EXIT_FAILURE;
        }
        return status;
}
