/*
 * When the library takes a program's work for that of one stream, so that barriers cost nothing: until a stream is
 * made, but for those that cuBLAS makes for itself. Then a block that is freed behind a kernel that runs serves again
 * at once, behind a barrier; where work may overlap, fresh memory is better. Under the library only.
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
enum { SPIN_US = 100000, WORDS = 64 };

extern char **environ;

CUresult cublas_makes_stream(CUstream *stream, bool priority); /* of a library that is called like cuBLAS */

static struct gt gt;

static void nothing(void)
{
}

static void by_cublas(void)
{
        CUstream stream;

        GT_MUST(cublas_makes_stream(&stream, false));
        GT_MUST(cublas_makes_stream(&stream, true));
}

static void created(void)
{
        gt_stream();
}

static void with_priority(void)
{
        CUstream stream;

        GT_MUST(cuStreamCreateWithPriority(&stream, CU_STREAM_DEFAULT, 0));
}

static void CUDA_CB function(void *arg)
{
        (void)arg;
}

static void host_function(void)
{
        GT_MUST(cuLaunchHostFunc(NULL, function, NULL));
}

/* The functions whose stream 0 is the thread's own, as nvcc --default-stream per-thread has it. */
#define OWN(function) ((__typeof__(&(function)))own(#function))

static void (*own(const char *name))(void)
{
        void (*call)(void) = NULL;
        CUdriverProcAddressQueryResult status;
        void *found = NULL;

        GT_MUST(cuGetProcAddress(name, &found, CUDA_VERSION, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &status));
        memcpy(&call, &found, sizeof call);
        return call;
}

static CUdeviceptr words[2];
static uint64_t no_time;
static void *values[] = {&no_time};

static void launch(void)
{
        GT_MUST(OWN(cuLaunchKernel)(gt.spin, 1, 1, 1, 1, 1, 1, 0, NULL, values, NULL));
}

static void launch_by_handle(void)
{
        GT_MUST(gt_spin(&gt, CU_STREAM_PER_THREAD, 0));
}

static CUlaunchConfig config(CUstream stream)
{
        return (CUlaunchConfig){1, 1, 1, 1, 1, 1, 0, stream, NULL, 0};
}

static void launch_extended(void)
{
        CUlaunchConfig once = config(NULL);

        GT_MUST(OWN(cuLaunchKernelEx)(&once, gt.spin, values, NULL));
}

static void launch_extended_by_handle(void)
{
        CUlaunchConfig once = config(CU_STREAM_PER_THREAD);

        GT_MUST(cuLaunchKernelEx(&once, gt.spin, values, NULL));
}

static void launch_cooperative(void)
{
        GT_MUST(OWN(cuLaunchCooperativeKernel)(gt.spin, 1, 1, 1, 1, 1, 1, 0, NULL, values));
}

static void copy(void)
{
        GT_MUST(OWN(cuMemcpyDtoDAsync)(words[0], words[1], 4, NULL));
}

static void copy_by_handle(void)
{
        GT_MUST(cuMemcpyAsync(words[0], words[1], 4, CU_STREAM_PER_THREAD));
}

static void fill(void)
{
        GT_MUST(OWN(cuMemsetD32Async)(words[0], 0, 1, NULL));
}

static void launch_graph(void)
{
        CUgraphExec exec;
        CUgraph graph; /* an empty one is one, too */

        GT_MUST(cuGraphCreate(&graph, 0));
        GT_MUST(cuGraphInstantiate(&exec, graph, 0));
        GT_MUST(OWN(cuGraphLaunch)(exec, NULL));
        GT_MUST(cuGraphExecDestroy(exec));
        GT_MUST(cuGraphDestroy(graph));
}

static void *in_thread(void *arg)
{
        gt_attach(&gt);
        (*(void (**)(void))arg)();
        GT_MUST(cuCtxSynchronize());
        return NULL;
}

static void by_another(void (*act)(void))
{
        pthread_t thread;

        if (pthread_create(&thread, NULL, in_thread, &act))
                gt_die("no thread");
        pthread_join(thread, NULL);
}

/* What lies in order with the legacy stream, whose work waits for it. */
static void own_stream(void)
{
        launch();
        launch_by_handle();
        copy();
}

/* This thread's work may go to one of its own from now on. */
static void anothers_stream(void)
{
        by_another(own_stream);
}

#define BY_TWO(act)                                                                                                    \
        static void act##_by_two(void)                                                                                 \
        {                                                                                                              \
                by_another(act);                                                                                       \
                act();                                                                                                 \
        }
BY_TWO(launch)
BY_TWO(launch_by_handle)
BY_TWO(launch_extended)
BY_TWO(launch_extended_by_handle)
BY_TWO(launch_cooperative)
BY_TWO(launch_graph)
BY_TWO(copy)
BY_TWO(copy_by_handle)
BY_TWO(fill)

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
} ways[] = {
        {"the default stream alone", nothing, .overlaps = false},
        {"a stream of cuBLAS", by_cublas, .overlaps = false},
        {"a stream", created, .overlaps = true},
        {"one with priority", with_priority, .overlaps = true},
        {"a host function", host_function, .overlaps = true},
        {"a green context", green, .overlaps = true},
        {"the thread's own stream", own_stream, .overlaps = false},
        {"another thread's own stream", anothers_stream, .overlaps = true},
        {"two threads' own streams", launch_by_two, .overlaps = true},
        {"two threads' own streams, by handle", launch_by_handle_by_two, .overlaps = true},
        {"two threads' own streams, extended", launch_extended_by_two, .overlaps = true},
        {"two threads' own streams, extended, by handle", launch_extended_by_handle_by_two, .overlaps = true},
        {"two threads' own streams, cooperative", launch_cooperative_by_two, .overlaps = true},
        {"two threads' own streams, graphs", launch_graph_by_two, .overlaps = true},
        {"two threads' own streams, copies", copy_by_two, .overlaps = true},
        {"two threads' own streams, copies by handle", copy_by_handle_by_two, .overlaps = true},
        {"two threads' own streams, fills", fill_by_two, .overlaps = true},
};
enum { WAYS = sizeof ways / sizeof *ways };

static int try_way(const struct way *way)
{
        CUdeviceptr before, after;
        bool again;

        gt_open(&gt);
        GT_MUST(cuMemAlloc(&words[0], 4));
        GT_MUST(cuMemAlloc(&words[1], 4));
        GT_MUST(cuMemAlloc(&before, BYTES));
        GT_MUST(gt_fill(&gt, NULL, before, 1, WORDS));
        way->act();
        GT_MUST(cuCtxSynchronize());
        GT_MUST(gt_spin(&gt, NULL, SPIN_US));
        GT_MUST(gt_fill(&gt, NULL, before, 2, WORDS));
        GT_MUST(cuMemFree(before));
        GT_MUST(cuMemAlloc(&after, BYTES));
        again = before == after;
        gt_check(again == !way->overlaps, way->name, "%s", again ? "one stream" : "work may overlap");
        GT_MUST(cuMemFree(after));
        GT_MUST(cuMemFree(words[0]));
        GT_MUST(cuMemFree(words[1]));
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
                ended = gt_status(name, ended);
                if (ended == GT_SKIPPED)
                        return GT_SKIPPED;
                if (ended != EXIT_SUCCESS)
                        status = EXIT_FAILURE;
        }
        return status;
}
