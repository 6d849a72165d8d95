/*
 * The doors through which a program finds the driver's functions: the linked symbol, dlsym, cuGetProcAddress. Every
 * line must be the same natively and under the library, for the two export a function under the same name; under it the
 * program also checks whose function it was given.
 *
 *   lookup            everything, one line per question
 *   lookup threads    eight threads ask at the same moment, before anything else did
 *   lookup loading PLUGIN [context|stream]   the first call, or that of a context, while another thread loads a plugin
 *                     whose constructor asks, too, and makes a context, or waits for a thread that makes a stream
 *   lookup own        whether the driver answers with its own functions whatever is preloaded, as NVIDIA's does; a
 *                     stand-in that gave the preloaded ones would hide that the library does not
 */
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

#define THREADS 8

/* The names in question; what is hooked of them the library itself says. */
static const char *const symbols[] = {
#define GR_HOOK(symbol) #symbol,
#define GR_CALL(symbol) #symbol,
#define GR_NEED(symbol) #symbol,
#include "../../shim/driver/hooks.def"
#undef GR_HOOK
#undef GR_CALL
#undef GR_NEED
        "cuInit",         "cuMemAlloc",          "cuMemFree",         "cuMemAllocAsync",
        "cuLaunchKernel", "cuLaunchKernel_ptsz", "cuMemAllocHost_v2", "cuMemcpyHtoDAsync_v2_ptsz",
        "cuGetErrorName", "cuEventRecord",       "cuNoSuchFunction"};

static const char *const plain_names[] = {"cuGetProcAddress",
                                          "cuMemAlloc",
                                          "cuMemAllocPitch",
                                          "cuMemFree",
                                          "cuMemFreeAsync",
                                          "cuMemGetInfo",
                                          "cuDeviceTotalMem",
                                          "cuMemGetAddressRange",
                                          "cuPointerGetAttribute",
                                          "cuCtxCreate",
                                          "cuCtxDestroy",
                                          "cuDevicePrimaryCtxRelease",
                                          "cuStreamCreate",
                                          "cuStreamDestroy",
                                          "cuStreamBeginCapture",
                                          "cuStreamEndCapture",
                                          "cuStreamBeginCaptureToGraph",
                                          "cuIpcGetMemHandle",
                                          "cuLaunchKernel",
                                          "cuLaunchKernelEx",
                                          "cuGraphLaunch",
                                          "cuMemcpyHtoDAsync",
                                          "cuMemsetD8Async",
                                          "cuMemcpyHtoD",
                                          "cuMemAllocAsync",
                                          "cuCtxRecordEvent",
                                          "cuNoSuchFunction",
                                          ""};

static const int versions[] = {0,     1,     2000,  3010,  3020,  4000,  6000,  7000,  10000, 10010,
                               11000, 11020, 11030, 11040, 12000, 12030, 12050, 13000, 99000};

static const char *const *hooked; /* NULL natively */

static void ask_hooked(void)
{
        const char *const *(*names)(void) = NULL;
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_hooked_symbols");

        memcpy(&names, &found, sizeof(names));
        hooked = names ? names() : NULL;
}

static bool is_hooked(const char *symbol)
{
        for (const char *const *name = hooked; name && *name; name++)
                if (strcmp(*name, symbol) == 0)
                        return true;
        return false;
}

/* The symbol under which some library exports the function; counts a failure where it is the wrong one. */
static const char *name_of(void *function, const char *question)
{
        Dl_info info;
        const char *file;
        bool ours;

        if (!function)
                return "nothing";
        if (!dladdr(function, &info) || !info.dli_sname || info.dli_saddr != function)
                return "something without a name";
        file = strrchr(info.dli_fname, '/');
        file = file ? file + 1 : info.dli_fname;
        ours = strncmp(file, "libgpureclaim", 13) == 0;
        if (ours != is_hooked(info.dli_sname) || (!ours && strncmp(file, "libcuda.", 8) != 0)) {
                fprintf(stderr, "%s: %s comes from %s\n", question, info.dli_sname, file);
                gr_check_failures++;
        }
        return info.dli_sname;
}

static void say(const char *question, void *function)
{
        printf("%s: %s\n", question, name_of(function, question));
}

static void linked_symbols(void)
{
        say("linked cuMemAlloc_v2", (void *)cuMemAlloc);
        say("linked cuMemFree_v2", (void *)cuMemFree);
        say("linked cuCtxDestroy_v2", (void *)cuCtxDestroy);
        say("linked cuGetProcAddress_v2", (void *)cuGetProcAddress);
        say("linked cuGetErrorName", (void *)cuGetErrorName);
        say("linked cuLaunchKernel", (void *)cuLaunchKernel);
}

static void dlsym_of(const char *door, void *handle)
{
        char question[128];

        for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++) {
                snprintf(question, sizeof(question), "dlsym(%s, %s)", door, symbols[i]);
                say(question, dlsym(handle, symbols[i]));
        }
}

/* Names that look a little like the driver's. Nothing has them, so there must be an error. */
static void other_names(void *driver)
{
        static const char *const names[] = {"cu",          "c",    "",   "cudnnCreate",   "cublasCreate_v2",
                                            "cufftPlan1d", "cuda", "cU", "CuMemAlloc_v2", "cuMemAlloc_v2x",
                                            "cu_",         "cuA"};
        char question[128];

        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
                void *here = dlsym(driver, names[i]);
                bool said = dlerror() != NULL;

                snprintf(question, sizeof(question), "dlsym of \"%s\"", names[i]);
                printf("%s: %s, error %d, everywhere %s, error %d\n", question, name_of(here, question), said,
                       name_of(dlsym(RTLD_DEFAULT, names[i]), question), dlerror() != NULL);
        }
        printf("malloc: %d\n", dlsym(RTLD_DEFAULT, "malloc") == (void *)malloc);
        printf("malloc, next: %d\n", dlsym(RTLD_NEXT, "malloc") == (void *)malloc);
}

/* Which calls leave and which take away an error. */
static void error_state(void *driver)
{
        char *first;

        dlsym(driver, "no_such_symbol");
        first = dlerror();
        printf("after a miss: error %d, then %d\n", first && strstr(first, "no_such_symbol"), dlerror() != NULL);
        dlsym(driver, "no_such_symbol");
        printf("a find clears a pending error: %d", dlsym(driver, "cuMemAlloc_v2") != NULL);
        printf(", error %d\n", dlerror() != NULL);
        dlsym(driver, "no_such_symbol");
        printf("one that is not hooked: %d", dlsym(driver, "cuInit") != NULL);
        printf(", error %d\n", dlerror() != NULL);
        printf("a find everywhere: %d", dlsym(RTLD_DEFAULT, "cuMemFree_v2") != NULL);
        printf(", error %d\n", dlerror() != NULL);
        printf("a name that no library has: %d", dlsym(RTLD_DEFAULT, "cuNoSuchFunction") != NULL);
        first = dlerror();
        printf(", named %d\n", first && strstr(first, "cuNoSuchFunction"));
}

static void ask(CUresult (*get)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *),
                CUresult (*get_old)(const char *, void **, int, cuuint64_t), const char *name, int version,
                cuuint64_t flags)
{
        CUdriverProcAddressQueryResult status = (CUdriverProcAddressQueryResult)77;
        void *marker = &status, *function = marker;
        CUresult result;
        char question[160];

        if (get)
                result = get(name, &function, version, flags, &status);
        else
                result = get_old(name, &function, version, flags);
        snprintf(question, sizeof(question), "%s(%s, %d, %d)", get ? "cuGetProcAddress_v2" : "cuGetProcAddress", name,
                 version, (int)flags);
        printf("%s: %d, status %d, %s\n", question, (int)result, (int)status,
               function == marker ? "untouched" : name_of(function, question));
}

/* NVIDIA's driver does not look whether there is a place for the answer: whatever becomes of that, as natively. */
static void in_child(CUresult (*get)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *))
{
        int status = 0;
        pid_t pid;

        fflush(stdout);
        pid = fork();
        if (pid == 0) {
                struct rlimit none = {0, 0};

                setrlimit(RLIMIT_CORE, &none);
                _exit((int)get("cuMemAlloc", NULL, 12000, 0, NULL) & 127);
        }
        GR_CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
        printf("nowhere to put it: result %d, signal %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1,
               WIFSIGNALED(status) ? WTERMSIG(status) : 0);
}

static void proc_address(void *driver)
{
        CUresult (*get_old)(const char *, void **, int, cuuint64_t) = NULL;
        CUresult (*get)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *) = cuGetProcAddress_v2;
        void *found = dlsym(driver, "cuGetProcAddress");

        memcpy(&get_old, &found, sizeof(get_old));
        setvbuf(stdout, NULL, _IOLBF, 0); /* a driver may not survive what comes */
        for (size_t i = 0; i < sizeof(plain_names) / sizeof(plain_names[0]); i++)
                for (size_t k = 0; k < sizeof(versions) / sizeof(versions[0]); k++)
                        for (cuuint64_t flags = 0; flags <= 4; flags++) {
                                ask(get, NULL, plain_names[i], versions[k], flags);
                                if (get_old)
                                        ask(NULL, get_old, plain_names[i], versions[k], flags);
                        }
        /* Without a place for the status, and without one for the function. */
        printf("no status: %d %d\n", (int)get("cuMemAlloc", &found, 12000, 0, NULL),
               (int)get("cuNoSuchFunction", &found, 12000, 0, NULL));
        in_child(get);
        /* What was found this way must find the rest in turn, as the runtime does it. */
        printf("itself: %d", (int)get("cuGetProcAddress", &found, 12000, 0, NULL));
        memcpy(&get, &found, sizeof(get));
        printf(" %d %s\n", (int)get("cuMemAlloc", &found, 12000, 0, NULL), name_of(found, "through itself"));
}

static pthread_barrier_t together;

static void *thread_main(void *arg)
{
        void *handle, *found;

        pthread_barrier_wait(&together);
        handle = *(int *)arg % 2 ? RTLD_DEFAULT : dlopen("libcuda.so.1", RTLD_NOW);
        found = dlsym(handle, "cuMemAlloc_v2");
        return found;
}

static void threads(void)
{
        pthread_t all[THREADS];
        int numbers[THREADS];
        void *found[THREADS];

        pthread_barrier_init(&together, NULL, THREADS);
        for (int i = 0; i < THREADS; i++) {
                numbers[i] = i;
                GR_CHECK_EQ(pthread_create(&all[i], NULL, thread_main, &numbers[i]), 0);
        }
        for (int i = 0; i < THREADS; i++)
                pthread_join(all[i], &found[i]);
        ask_hooked();
        for (int i = 0; i < THREADS; i++)
                say("a thread of eight", found[i]);
}

static void own(void)
{
        void *found = NULL;
        Dl_info info;

        GR_CHECK_EQ(cuGetProcAddress_v2("cuMemAlloc", &found, 12000, 0, NULL), CUDA_SUCCESS);
        GR_CHECK(found && dladdr(found, &info) && strstr(info.dli_fname, "libcuda."));
        GR_CHECK(found != (void *)cuMemAlloc); /* that one is the preloaded one's */
}

static void *load(void *plugin)
{
        return dlopen(plugin, RTLD_NOW | RTLD_LOCAL);
}

static CUcontext context;

static void make_context(void)
{
        CUcontext made;

        GR_CHECK_EQ(cuCtxCreate(&made, NULL, 0, 0), CUDA_SUCCESS);
}

static void *make_stream(void *arg)
{
        CUstream stream;

        GR_CHECK_EQ(cuCtxSetCurrent(context), CUDA_SUCCESS);
        GR_CHECK_EQ(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
        return arg;
}

static void wait_for_stream(void)
{
        pthread_t thread;

        GR_CHECK_EQ(pthread_create(&thread, NULL, make_stream, NULL), 0);
        pthread_join(thread, NULL);
}

/*
 * The loader's lock is held while a plugin's constructors run: no call may wait for them with a lock that they need.
 * What "context": both make one; "stream": the constructor waits for a thread that makes one.
 */
static void loading(char *plugin, const char *what)
{
        bool makes_context = what && strcmp(what, "context") == 0, makes_stream = what && strcmp(what, "stream") == 0;
        char address[32];
        size_t total;
        char number[16], byte;
        void *handle = NULL;
        pthread_t thread;
        int ends[2];

        alarm(20);
        GR_CHECK_EQ(pipe(ends), 0);
        snprintf(number, sizeof(number), "%d", ends[1]);
        setenv("GR_TEST_LOADING", number, 1);
        snprintf(address, sizeof(address), "%p", makes_stream ? (void *)wait_for_stream : (void *)make_context);
        if (what)
                setenv("GR_TEST_LOADING_CALL", address, 1);
        if (what) {
                GR_CHECK_EQ(cuInit(0), CUDA_SUCCESS);
                GR_CHECK_EQ(cuDeviceTotalMem(&total, 0), CUDA_SUCCESS);
        }
        if (makes_stream)
                GR_CHECK_EQ(cuCtxCreate(&context, NULL, 0, 0), CUDA_SUCCESS);
        GR_CHECK_EQ(pthread_create(&thread, NULL, load, plugin), 0);
        GR_CHECK_EQ(read(ends[0], &byte, 1), 1);
        if (makes_context)
                make_context();
        else
                printf("call: %d\n", (int)cuCtxSynchronize());
        pthread_join(thread, &handle);
        GR_CHECK(handle != NULL);
        GR_CHECK_EQ(read(ends[0], &byte, 1), 1);
        printf("found by the constructor: %d\n", byte);
}

int main(int argc, char **argv)
{
        void *driver;

        if (argc > 2 && strcmp(argv[1], "loading") == 0) {
                loading(argv[2], argc > 3 ? argv[3] : NULL);
                return GR_CHECK_RESULT();
        }

        if (argc > 1 && strcmp(argv[1], "threads") == 0) {
                threads();
                return GR_CHECK_RESULT();
        }
        if (argc > 1 && strcmp(argv[1], "own") == 0) {
                own();
                return GR_CHECK_RESULT();
        }
        ask_hooked();
        driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        if (!driver) {
                fprintf(stderr, "the driver is linked, but dlopen does not find it: %s\n", dlerror());
                return EXIT_FAILURE;
        }
        linked_symbols();
        dlsym_of("driver", driver);
        dlsym_of("everywhere", RTLD_DEFAULT);
        other_names(driver);
        error_state(driver);
        proc_address(driver);
        return GR_CHECK_RESULT();
}
