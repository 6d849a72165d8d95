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
};
enum { WAYS = sizeof ways / sizeof *ways };

static int try_way(const struct way *way)
{
        CUdeviceptr before, after;
        bool again;

        gt_open(&gt);
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
