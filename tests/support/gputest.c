#include "gputest.h"

#include "kernels.h"

#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

extern char **environ;

int gt_status(const char *name, int ended)
{
        if (!WIFEXITED(ended))
                gt_die("%s: ended by signal %d", name, WTERMSIG(ended));
        return WEXITSTATUS(ended);
}

const char *gt_result_name(CUresult result)
{
        const char *name = NULL;

        if (cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
                return "?";
        return name;
}

void gt_die(const char *format, ...)
{
        va_list args;

        fflush(stdout);
        va_start(args, format);
        vfprintf(stderr, format, args);
        va_end(args);
        fputc('\n', stderr);
        exit(EXIT_FAILURE);
}

void gt_check(bool good, const char *name, const char *format, ...)
{
        va_list args;

        printf("%-6s %s: ", good ? "ok" : "FAILED", name);
        va_start(args, format);
        vprintf(format, args);
        va_end(args);
        putchar('\n');
        gr_check_failures += !good;
}

double gt_mib(size_t bytes)
{
        return (double)bytes / (double)MIB;
}

double gt_now_us(void)
{
        struct timespec t;

        clock_gettime(CLOCK_MONOTONIC, &t);
        return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

void gt_sleep_us(double us)
{
        struct timespec t = {.tv_sec = (time_t)(us / 1e6)};

        t.tv_nsec = (long)((us - (double)t.tv_sec * 1e6) * 1e3);
        while (nanosleep(&t, &t) && errno == EINTR)
                ;
}

void (*gt_lookup_of(const char *name, int version))(void)
{
        void (*function)(void) = NULL;
        void *found = NULL;
        CUdriverProcAddressQueryResult status;

        if (cuGetProcAddress(name, &found, version, CU_GET_PROC_ADDRESS_DEFAULT, &status) != CUDA_SUCCESS)
                return NULL;
        memcpy(&function, &found, sizeof function);
        return function;
}

void (*gt_lookup(const char *name))(void)
{
        return gt_lookup_of(name, CUDA_VERSION); /* the header's, so it has the type that the header declares */
}

static CUfunction kernel(const struct gt *gt, const char *name)
{
        CUfunction function;

        GR_MUST(cuModuleGetFunction(&function, gt->module, name));
        return function;
}

bool gt_simulated(void)
{
        return dlsym(RTLD_DEFAULT, "grSimVersion") != NULL;
}

void gt_open(struct gt *ret)
{
        struct gt gt = {.simulated = gt_simulated()};
        CUresult result = cuInit(0);
        int devices = 0;

        setvbuf(stdout, NULL, _IOLBF, 0); /* so that a log says how far a program came */
        if (result == CUDA_SUCCESS)
                result = cuDeviceGetCount(&devices);
        if (result != CUDA_SUCCESS || devices == 0) {
                fprintf(stderr, "skipped: no CUDA device (%s)\n", gt_result_name(result));
                exit(GT_SKIPPED);
        }
        GR_MUST(cuDeviceGet(&gt.device, 0));
        gt_footprint_open(&gt);
        GR_MUST(cuDevicePrimaryCtxRetain(&gt.ctx, gt.device));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        gt_load_kernels(&gt.module);
        gt.fill = kernel(&gt, "gr_fill");
        gt.spin = kernel(&gt, "gr_spin");
        gt.late_fill = kernel(&gt, "gr_late_fill");
        gt.copy = kernel(&gt, "gr_copy");
        gt.count_diff = kernel(&gt, "gr_count_diff");
        gt.await = kernel(&gt, "gr_await");
        GR_MUST(gt_spin(&gt, NULL, 1));
        GR_MUST(cuCtxSynchronize());
        if (!gt_footprint(&gt, &gt.context_bytes))
                gt.context_bytes = 0;
        *ret = gt;
}

void gt_load_kernels(CUmodule *ret)
{
        GR_MUST(cuModuleLoadData(ret, gr_test_ptx));
}

void gt_attach(const struct gt *gt)
{
        GR_MUST(cuCtxSetCurrent(gt->ctx));
}

void gt_close(struct gt *gt)
{
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuModuleUnload(gt->module));
        GR_MUST(cuDevicePrimaryCtxRelease(gt->device));
}

static CUresult launch(CUfunction function, unsigned grid, unsigned block, CUstream stream, void **args)
{
        return cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, args, NULL);
}

CUresult gt_fill(const struct gt *gt, CUstream stream, CUdeviceptr p, uint32_t value, uint64_t words)
{
        void *args[] = {&p, &value, &words};

        return launch(gt->fill, GT_GRID, GT_BLOCK, stream, args);
}

CUresult gt_spin(const struct gt *gt, CUstream stream, uint64_t us)
{
        uint64_t ns = us * 1000;
        void *args[] = {&ns};

        return launch(gt->spin, 1, 1, stream, args);
}

CUresult gt_late_fill(const struct gt *gt, CUstream stream, CUdeviceptr p, uint32_t value, uint64_t words, uint64_t us)
{
        uint64_t ns = us * 1000;
        void *args[] = {&p, &value, &words, &ns};

        return launch(gt->late_fill, GT_GRID, GT_BLOCK, stream, args);
}

CUresult gt_copy(const struct gt *gt, CUstream stream, CUdeviceptr dst, CUdeviceptr src, uint64_t words)
{
        void *args[] = {&dst, &src, &words};

        return launch(gt->copy, GT_GRID, GT_BLOCK, stream, args);
}

CUresult gt_count_diff(const struct gt *gt, CUstream stream, CUdeviceptr p, uint32_t value, uint64_t words,
                       CUdeviceptr count)
{
        void *args[] = {&p, &value, &words, &count};

        return launch(gt->count_diff, GT_GRID, GT_BLOCK, stream, args);
}

CUresult gt_await(const struct gt *gt, CUstream stream, CUdeviceptr p, uint32_t value, uint64_t us)
{
        uint64_t ns = us * 1000;
        void *args[] = {&p, &value, &ns};

        return launch(gt->await, 1, 1, stream, args);
}

uint32_t gt_wrong_words(CUdeviceptr p, size_t bytes, uint32_t value)
{
        const size_t at[] = {0, bytes / 8 * 4, bytes - 4};
        uint32_t wrong = 0, word;

        for (int i = 0; i < 3; i++) {
                GR_MUST(cuMemcpyDtoH(&word, p + at[i], 4));
                wrong += word != value;
        }
        return wrong;
}

bool gt_green_open(CUdevice device, struct gt_green *ret)
{
        __typeof__(&cuDeviceGetDevResource) resource = GT_OPTIONAL(cuDeviceGetDevResource);
        __typeof__(&cuDevSmResourceSplitByCount) split = GT_OPTIONAL(cuDevSmResourceSplitByCount);
        __typeof__(&cuDevResourceGenerateDesc) describe = GT_OPTIONAL(cuDevResourceGenerateDesc);
        __typeof__(&cuGreenCtxCreate) create = GT_OPTIONAL(cuGreenCtxCreate);
        __typeof__(&cuGreenCtxStreamCreate) stream_create = GT_OPTIONAL(cuGreenCtxStreamCreate);
        __typeof__(&cuCtxFromGreenCtx) convert = GT_OPTIONAL(cuCtxFromGreenCtx);
        CUdevResource all, part;
        CUdevResourceDesc description;
        struct gt_green green = {0};
        unsigned groups = 1;

        *ret = green;
        if (!resource || !split || !describe || !create || !stream_create || !convert ||
            resource(device, &all, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS ||
            split(&part, &groups, &all, NULL, 0, 16) != CUDA_SUCCESS ||
            describe(&description, &part, 1) != CUDA_SUCCESS ||
            create(&green.green, description, device, CU_GREEN_CTX_DEFAULT_STREAM) != CUDA_SUCCESS)
                return false;
        GR_MUST(convert(&green.ctx, green.green));
        GR_MUST(stream_create(&green.stream, green.green, CU_STREAM_NON_BLOCKING, 0));
        *ret = green;
        return true;
}

void gt_green_close(struct gt_green *green)
{
        __typeof__(&cuGreenCtxDestroy) destroy = GT_OPTIONAL(cuGreenCtxDestroy);

        GR_MUST(cuStreamDestroy(green->stream));
        GR_MUST(destroy(green->green));
        *green = (struct gt_green){0};
}

CUstream gt_stream(void)
{
        CUstream stream;

        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        return stream;
}

CUgraphExec gt_executable(CUgraph graph)
{
        CUgraphExec exec;

        GR_MUST(cuGraphInstantiate(&exec, graph, 0));
        GR_MUST(cuGraphDestroy(graph));
        return exec;
}

size_t gt_parse_size(const char *text)
{
        static const struct {
                const char *unit;
                size_t bytes;
        } units[] = {{"", 1}, {"KiB", KIB}, {"MiB", MIB}, {"GiB", GIB}};
        char *end;
        unsigned long long number = strtoull(text, &end, 10);

        for (size_t i = 0; end != text && i < sizeof units / sizeof units[0]; i++)
                if (!strcmp(end, units[i].unit))
                        return (size_t)number * units[i].bytes;
        gt_die("not a size: %s (write 4096, 64KiB, 64MiB or 2GiB)", text);
}

size_t gt_pages(size_t size)
{
        return (size + GT_PAGE - 1) / GT_PAGE * GT_PAGE;
}

uint64_t gt_random(uint64_t *state)
{
        uint64_t x = *state;

        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        return *state = x;
}

static void set_option(const struct gt_option *option, const char *text)
{
        switch (option->type) {
        case GT_FLAG:
                *(bool *)option->variable = true;
                break;
        case GT_SIZE:
                *(size_t *)option->variable = gt_parse_size(text);
                break;
        case GT_INT:
        case GT_UNSIGNED: /* the same bytes */
                *(int *)option->variable = atoi(text);
                break;
        case GT_DOUBLE:
                *(double *)option->variable = atof(text);
                break;
        case GT_TEXT:
                *(const char **)option->variable = text;
        }
}

int gt_options(int argc, char **argv, const char *usage, const struct gt_option *options)
{
        struct option longs[16] = {0};
        int which, found;

        for (int i = 0; options[i].name; i++)
                longs[i] = (struct option){options[i].name, options[i].type != GT_FLAG, NULL, 0};
        while ((found = getopt_long(argc, argv, "", longs, &which)) == 0)
                set_option(&options[which], optarg);
        if (found != -1)
                gt_die("usage: %s %s", argv[0], usage);
        return optind;
}

int gt_ways(int argc, char **argv, size_t count, const char *(*name)(size_t way), int (*attempt)(size_t way))
{
        int status = EXIT_SUCCESS;
        size_t skipped = 0;

        for (size_t i = 0; argc == 2 && i < count; i++)
                if (!strcmp(argv[1], name(i)))
                        return attempt(i);
        if (argc > 1)
                gt_die("no such way: %s", argv[1]);
        for (size_t i = 0; i < count; i++) {
                char way[64];
                char *arguments[] = {argv[0], way, NULL};
                int ended;
                pid_t pid;

                snprintf(way, sizeof way, "%s", name(i));
                if (posix_spawn(&pid, argv[0], NULL, NULL, arguments, environ) || waitpid(pid, &ended, 0) != pid)
                        gt_die("%s: no process", way);
                ended = gt_status(way, ended);
                if (ended == GT_SKIPPED)
                        skipped++;
                else if (ended != EXIT_SUCCESS)
                        status = EXIT_FAILURE;
        }
        return skipped == count ? GT_SKIPPED : status;
}
