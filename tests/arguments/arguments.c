/*
 * Calls every hooked function with NULL, zero, huge, freed, foreign and misaligned arguments, all combinations up to a
 * number, and prints the codes: run natively and under the shim, the lines must be equal. Each function has a process
 * of its own, so that what one leaves behind does not change the next; a crash is an answer, too.
 *
 * Made with the library's own objects (GR_LINKED), it calls the hooks where there is nothing behind them, which must
 * say so:
 *
 *   arguments-linked alone    without a driver
 *   arguments-linked hidden   with one that lacks just the function that is called
 *
 * where it is the process's first call, which must find the function; and those that the driver lacks with a stand-in
 * behind them, whose answer must arrive, and which must be known as what waits for others where they do:
 *
 *   arguments-linked first
 *   arguments-linked stand-in
 */
#include "arguments.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define HUGE_BYTES (1ull << 60)
#define LIVE_BYTES ((size_t)3 << 20)

enum { COMBINATIONS = 200, BUFFER_BYTES = 16384, SKIPPED = 77 };

static void *library;
static _Alignas(64) char buffer[BUFFER_BYTES];
static CUdeviceptr live, freed;
static int simulated;
#if GR_LINKED
static unsigned wrong;
#endif

static void *find(const char *name)
{
        return dlsym(library, name);
}

static CUresult call0(const char *name, uint64_t a, uint64_t b)
{
        CUresult (*function)(uint64_t, uint64_t) = (CUresult(*)(uint64_t, uint64_t))find(name);

        return function ? function(a, b) : CUDA_ERROR_NOT_FOUND;
}

/* How many values the parameter is tried with; the value numbered i. */
static unsigned choices(const struct function *function, unsigned parameter)
{
        switch (function->kinds[parameter]) {
        case KIND_POINTER:
                return 2;
        case KIND_TEXT:
                return 3;
        case KIND_ADDRESS:
                return 6;
        case KIND_SIZE:
                /* Managed memory beyond the card is never asked of a real one. */
                return strcmp(function->name, "cuMemAllocManaged") || simulated ? 4 : 3;
        case KIND_NUMBER:
                return 3;
        case KIND_ENUM:
                return 7;
        default:
                return 1;
        }
}

static union value choose(enum kind kind, unsigned i)
{
        union value value = {0};

        switch (kind) {
        case KIND_POINTER:
                value.pointer = i ? buffer : NULL;
                break;
        case KIND_RECORD:
                value.pointer = buffer;
                break;
        case KIND_TEXT:
                value.text = i == 0 ? NULL : i == 1 ? "" : "cuNothing";
                break;
        case KIND_ADDRESS:
                value.address =
                        (CUdeviceptr[]){0, freed, (uintptr_t)buffer, live + 1, live + LIVE_BYTES, ~(CUdeviceptr)0}[i];
                break;
        case KIND_SIZE:
                value.size = (unsigned long long[]){0, 1, 4097, HUGE_BYTES}[i];
                break;
        case KIND_NUMBER:
                value.number = (int[]){0, -1, 1 << 20}[i];
                break;
        case KIND_ENUM:
                value.enumeration = (int[]){0, 1, 2, 7, 11, 12, 99}[i];
                break;
        default:
                break;
        }
        return value;
}

static int open_device(void)
{
        CUcontext context;
        CUresult code;
        int count = 0;

        library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library)
                return 0;
        simulated = find("grSimVersion") != NULL;
        code = call0("cuInit", 0, 0);
        if (code == CUDA_SUCCESS)
                code = call0("cuDeviceGetCount", (uintptr_t)&count, 0);
        if (code != CUDA_SUCCESS || !count) {
                fprintf(stderr, "no device: code %d, %d devices\n", (int)code, count);
                return 0;
        }
        if (call0("cuDevicePrimaryCtxRetain", (uintptr_t)&context, 0) != CUDA_SUCCESS ||
            call0("cuCtxSetCurrent", (uintptr_t)context, 0) != CUDA_SUCCESS ||
            call0("cuMemAlloc_v2", (uintptr_t)&live, LIVE_BYTES) != CUDA_SUCCESS ||
            call0("cuMemAlloc_v2", (uintptr_t)&freed, LIVE_BYTES) != CUDA_SUCCESS ||
            call0("cuMemFree_v2", freed, 0) != CUDA_SUCCESS)
                exit(1);
        return 1;
}

/* Calls it with one combination of arguments after the other; told: of each the code. */
static void combine(const struct function *function, void *real, void (*told)(CUresult code))
{
        union value values[PARAMETERS_MAX] = {{0}};
        unsigned at[PARAMETERS_MAX] = {0};

        for (unsigned n = 0; n < COMBINATIONS; n++) {
                unsigned i = 0;

                for (unsigned k = 0; k < function->parameters; k++)
                        values[k] = choose(function->kinds[k], at[k]);
                memset(buffer, 0, sizeof buffer);
                told(function->call(real, values));
                while (i < function->parameters && ++at[i] == choices(function, i))
                        at[i++] = 0;
                if (i == function->parameters)
                        break;
        }
}

static void print(CUresult code)
{
        printf(" %d", (int)code);
        fflush(stdout);
}

#if GR_LINKED
static void must_be_not_found(CUresult code)
{
        wrong += code != CUDA_ERROR_NOT_FOUND;
        if (code != CUDA_ERROR_NOT_FOUND)
                print(code);
}

static void must_be_found(CUresult code)
{
        wrong += code == CUDA_ERROR_NOT_FOUND;
}

static void try_first(const struct function *function)
{
        library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library)
                _exit(SKIPPED);
        combine(function, function->hook, must_be_found);
        if (gr_shim_ready() && function->real && !*function->real)
                wrong = 0; /* the driver has none */
        printf("%s:%s\n", function->name, wrong ? " not found" : "");
        fflush(stdout);
        _exit(wrong > 0);
}

#define NO_CODE ((CUresult)12345)

static CUresult stand_in(void)
{
        return NO_CODE;
}

static void must_arrive(CUresult code)
{
        wrong += code != NO_CODE;
}

static void try_stand_in(const struct function *function)
{
        bool waits = strstr(function->name, "BatchMemOp") || strstr(function->name, "ExternalSemaphores");

        if (!open_device())
                _exit(SKIPPED);
        if (!function->real || *function->real)
                _exit(0);
        *function->real = (void *)stand_in;
        combine(function, function->hook, must_arrive);
        wrong += waits != atomic_load(&gr_core.waits_for_others);
        printf("%s:%s\n", function->name, wrong ? " lost" : "");
        fflush(stdout);
        _exit(wrong > 0);
}

/* With nothing behind the hook. */
static void try_hollow(const struct function *function, bool hidden)
{
        if (hidden) {
                if (!function->real)
                        _exit(0);
                if (!open_device())
                        _exit(SKIPPED);
                *function->real = NULL;
        }
        printf("%s:", function->name);
        combine(function, function->hook, must_be_not_found);
        putchar('\n');
        fflush(stdout);
        _exit(wrong > 0);
}
#else
static void try_one(const struct function *function)
{
        void *real;

        if (!open_device())
                exit(SKIPPED);
        real = find(function->name);
        printf("%s:", function->name);
        if (!real) {
                printf(" absent\n");
                exit(0);
        }
        combine(function, real, print);
        putchar('\n');
        fflush(stdout);
        _exit(0);
}
#endif

static void begin(const struct function *function, const char *mode)
{
#if GR_LINKED
        if (strcmp(mode, "first") == 0)
                try_first(function);
        else if (strcmp(mode, "stand-in") == 0)
                try_stand_in(function);
        else
                try_hollow(function, strcmp(mode, "hidden") == 0);
#else
        (void)mode;
        try_one(function);
#endif
}

int main(int argc, char **argv)
{
        unsigned skipped = 0, failed = 0;

        for (unsigned i = 0; i < function_count; i++) {
                pid_t child;
                int status;

                fflush(stdout);
                child = fork();
                if (child == 0)
                        begin(&functions[i], argc > 1 ? argv[1] : "");
                if (child < 0 || waitpid(child, &status, 0) != child)
                        return 1;
                if (WIFSIGNALED(status))
                        printf(" signal %d\n", WTERMSIG(status));
                if (GR_LINKED && status && status != SKIPPED << 8)
                        failed++;
                else if (WEXITSTATUS(status) == SKIPPED)
                        skipped++;
                else if (WEXITSTATUS(status) != 0)
                        return 1;
        }
        if (failed)
                return 1;
        return skipped == function_count ? SKIPPED : 0;
}
