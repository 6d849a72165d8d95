/*
 * facts [GROUP...]: prints every group of facts, or those named. Each group is a process of its own, with a bound on
 * its time, so that a driver that crashes or hangs in one of them leaves the others their lines.
 */
#include "facts.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { GROUP_SECONDS = 15, SOON_US = 60000, SOON_SIMULATED_US = 300000 };

struct gt gt;
static const char *group;
static bool changed;

/* Words that host and card share: what a held kernel waits for, and what a later one writes. */
static volatile uint32_t *words;
static uint32_t turn;

void fact_changed(bool now)
{
        changed = now;
}

void fact(const char *name, const char *format, ...)
{
        va_list args;

        printf("%s%s: %s: ", changed ? "~ " : "", group, name);
        va_start(args, format);
        vprintf(format, args);
        va_end(args);
        putchar('\n');
}

const char *code(CUresult result)
{
        const char *name = gt_result_name(result);

        return !strncmp(name, "CUDA_ERROR_", 11) ? name + 11 : !strncmp(name, "CUDA_", 5) ? name + 5 : name;
}

void fact_code(const char *name, CUresult result)
{
        fact(name, "%s", code(result));
}

void fact_end(const char *name, CUstream stream)
{
        CUgraph graph = NULL;
        CUresult result = cuStreamEndCapture(stream, &graph);

        fact_code(name, result);
        if (result == CUDA_SUCCESS && graph)
                GR_MUST(cuGraphDestroy(graph));
}

void fact_yes(const char *name, bool answer)
{
        fact(name, "%s", answer ? "yes" : "no");
}

static CUdeviceptr word_address(int i)
{
        return (CUdeviceptr)(uintptr_t)(words + i);
}

void hold(CUstream stream)
{
        GR_MUST(gt_await(&gt, stream, word_address(0), ++turn, HOLD_US));
}

void release(void)
{
        __atomic_store_n(words, turn, __ATOMIC_RELEASE);
}

void fact_waited(const char *name, CUstream busy, CUresult result)
{
        bool waited = cuStreamQuery(busy) == CUDA_SUCCESS;

        release();
        GR_MUST(cuStreamSynchronize(busy));
        fact(name, "%s, %s", code(result), waited ? "waits" : "does not wait");
}

bool follows(CUstream first, CUstream second)
{
        double until;
        bool after;

        GR_MUST(gt_await(&gt, first, word_address(0), ++turn, 2 * HOLD_US));
        GR_MUST(gt_fill(&gt, second, word_address(1), turn, 1));
        until = gt_now_us() + (gt.simulated ? SOON_SIMULATED_US : SOON_US);
        while (words[1] != turn && gt_now_us() < until)
                gt_sleep_us(100);
        after = words[1] != turn;
        release();
        GR_MUST(cuStreamSynchronize(first));
        GR_MUST(cuStreamSynchronize(second));
        return after;
}

CUdeviceptr block(size_t bytes)
{
        CUdeviceptr p;

        GR_MUST(cuMemAlloc(&p, bytes));
        return p;
}

CUstream stream_of(unsigned flags)
{
        CUstream stream;

        GR_MUST(cuStreamCreate(&stream, flags));
        return stream;
}

size_t pages_used(void)
{
        size_t available, total;

        GR_MUST(cuMemGetInfo(&available, &total));
        return (total - available) / GT_PAGE;
}

void (*exported(const char *name))(void)
{
        static void *driver;
        void (*function)(void) = NULL;
        void *found;

        if (!driver)
                driver = dlopen("libcuda.so.1", RTLD_NOW);
        found = driver ? dlsym(driver, name) : NULL;
        memcpy(&function, &found, sizeof function);
        return function;
}

static const struct {
        const char *name;
        void (*ask)(void);
} groups[] = {{"memory", facts_memory},
              {"host memory", facts_host},
              {"waits", facts_waits},
              {"order", facts_order},
              {"capture", facts_captures},
              {"capture's end", facts_capture_ends},
              {"pools", facts_pools},
              {"mapped", facts_mapped},
              {"graphs", facts_graphs},
              {"contexts", facts_contexts},
              {"ended", facts_ended},
              {"shared", facts_shared},
              {"ended with a capture", facts_ended_captures},
              {"reset", facts_reset},
              {"ended elsewhere", facts_ended_elsewhere}};

static void begin(const char *name)
{
        void *host;

        alarm(GROUP_SECONDS);
        group = name;
        gt_open(&gt);
        GR_MUST(cuMemHostAlloc(&host, 4096, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
        words = host;
        memset(host, 0, 4096);
        /* The kernels are loaded when they first run, which nothing is to be blamed for later. */
        hold(NULL);
        release();
        GR_MUST(gt_fill(&gt, NULL, word_address(1), 0, 1));
        GR_MUST(cuCtxSynchronize());
}

/* The exit status of a group. */
static int run(size_t i)
{
        int status;
        pid_t pid;

        fflush(stdout);
        pid = fork();
        if (pid == 0) {
                begin(groups[i].name);
                groups[i].ask();
                exit(EXIT_SUCCESS);
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid)
                gt_die("facts: no process");
        if (WIFSIGNALED(status))
                printf("%s: ended by signal %d\n", groups[i].name, WTERMSIG(status));
        else if (WEXITSTATUS(status) != 0 && WEXITSTATUS(status) != GT_SKIPPED)
                printf("%s: ended with status %d\n", groups[i].name, WEXITSTATUS(status));
        return WIFSIGNALED(status) ? EXIT_FAILURE : WEXITSTATUS(status);
}

/* Not by its own first call: what asks of CUDA before a fork is lost to the child. */
static void head(void)
{
        char date[32], name[128] = "?";
        int version = 0;
        time_t now = time(NULL);
        CUdevice device;

        strftime(date, sizeof date, "%Y-%m-%d", gmtime(&now));
        fflush(stdout);
        if (fork() == 0) {
                if (cuInit(0) == CUDA_SUCCESS && cuDeviceGet(&device, 0) == CUDA_SUCCESS) {
                        char module[64] = "";
                        FILE *file = fopen("/sys/module/nvidia/version", "re");

                        cuDriverGetVersion(&version);
                        cuDeviceGetName(name, sizeof name, device);
                        if (file && !gt_simulated() && fscanf(file, "%60s", module + 1) == 1)
                                module[0] = ' ';
                        printf("# %s, driver%s; CUDA %d.%d; %s\n", name, module, version / 1000, version % 1000 / 10,
                               date);
                        fflush(stdout);
                }
                _exit(0);
        }
        wait(NULL);
}

int main(int argc, char **argv)
{
        int status = EXIT_SUCCESS;

        if (argc == 3 && !strcmp(argv[1], "--open")) {
                begin("shared");
                facts_open(atoi(argv[2]));
                return EXIT_SUCCESS;
        }
        head();
        for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
                bool wanted = argc < 2;
                int got;

                for (int k = 1; k < argc; k++)
                        wanted |= !strcmp(argv[k], groups[i].name);
                if (!wanted)
                        continue;
                got = run(i);
                if (got == GT_SKIPPED)
                        return GT_SKIPPED;
                status = got ? EXIT_FAILURE : status;
        }
        return status;
}
