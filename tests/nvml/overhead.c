/*
 * What the driver takes by itself, on the simulated device with the stand-in of NVML, where a context takes 100 MiB and
 * a module 32 MiB:
 *
 *   overhead process      with GPURECLAIM_HARD_LIMIT=256MiB GPURECLAIM_LIMIT_INCLUDES=process: it counts
 *   overhead one RESULT   the same with another limit: what the load of one module returns
 *   overhead beside       likewise: what the driver takes beside all calls counts from the next allocation on
 *   overhead graph        where it counts it is measured when a graph is made executable, else NVML is left alone
 *   overhead executables  with GRSIM_EXECUTABLE=2MiB: what the driver takes for executable graphs is told
 *   overhead known NUMBER likewise, where NVML's answers take 20 ms or there are none: so many bytes are known of many
 *   overhead at once      where NVML's answers take 20 ms: of many threads one asks it
 *   overhead between      with GRSIM_EXECUTABLE=2MiB: code and contexts that come between two are no part of them
 *   overhead allocations  with the limit alone: it does not, and is told
 *   overhead little       where NVML says less than is charged by a little: the driver has nothing
 *   overhead asleep       memory that is asleep does not hide what the driver has
 *   overhead pool         what a pool gave back unnoticed is not the driver's either
 *   overhead unknown      where NVML does not list us: nothing is told, and a limit counts allocations
 */
#include "gpureclaim.h"

#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

#define LIMIT   (256 * MIB)
#define CONTEXT (100 * MIB)
#define MODULE  (32 * MIB)
#define BLOCK   (4 * MIB)

#define EXECUTABLE (2 * MIB)
#define STRANGER   4096 /* as in nvml.c */

enum { MOST = 128 };

static CUdeviceptr blocks[MOST];

static size_t used(void)
{
        void *found = dlsym(RTLD_DEFAULT, "grSimUsedBytes");
        size_t (*bytes)(int);

        memcpy(&bytes, &found, sizeof bytes);
        return bytes(0);
}

/* The driver takes so much without any call. */
static void take(size_t bytes)
{
        void *found = dlsym(RTLD_DEFAULT, "grSimTake");
        void (*taken)(int, size_t);

        memcpy(&taken, &found, sizeof taken);
        taken(0, bytes);
}

static size_t available(void)
{
        size_t free_bytes, total_bytes;

        GR_MUST(cuMemGetInfo(&free_bytes, &total_bytes));
        GR_CHECK_EQ(total_bytes, LIMIT);
        return free_bytes;
}

static struct gpureclaim_status status(void)
{
        struct gpureclaim_status status = {.struct_bytes = sizeof status};
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_status");
        gpureclaim_status_function *get;

        memcpy(&get, &found, sizeof get);
        GR_CHECK(get && get(0, &status) == 0);
        return status;
}

static uint64_t told(void)
{
        return status().driver_bytes;
}

/* Allocates blocks until one is refused, most at most, and frees them into the cache. Returns their bytes. */
static size_t fill(size_t most)
{
        size_t count = 0;

        while (count < most && cuMemAlloc(&blocks[count], BLOCK) == CUDA_SUCCESS)
                count++;
        GR_CHECK(count < MOST);
        if (getenv("OWN_COUNTED"))
                GR_CHECK(used() <= LIMIT);
        for (size_t i = 0; i < count; i++)
                GR_MUST(cuMemFree(blocks[i]));
        return count * BLOCK;
}

/* Each way to load code, and how it is unloaded. */
static CUresult load(int way, void **ret)
{
        CUmodule *module = (CUmodule *)ret;
        CUlibrary *library = (CUlibrary *)ret;

        switch (way) {
        case 0:
                return cuModuleLoad(module, "file");
        case 1:
                return cuModuleLoadDataEx(module, "image", 0, NULL, NULL);
        case 2:
                return cuModuleLoadFatBinary(module, "image");
        case 3:
                return cuLibraryLoadData(library, "image", NULL, NULL, 0, NULL, NULL, 0);
        default:
                return cuLibraryLoadFromFile(library, "file", NULL, NULL, 0, NULL, NULL, 0);
        }
}

static void loaders(void)
{
        enum { WAYS = 5 };
        void *loaded[8] = {0};

        for (int way = 0; way < WAYS; way++) {
                size_t count = 0;

                while (count < 8 && load(way, &loaded[count]) == CUDA_SUCCESS)
                        count++;
                GR_CHECK_EQ(count, (LIMIT - CONTEXT) / MODULE);
                GR_CHECK_EQ(used(), CONTEXT + count * MODULE);
                while (count-- > 0)
                        GR_MUST(way < 3 ? cuModuleUnload(loaded[count]) : cuLibraryUnload(loaded[count]));
        }
}

static void counted(void)
{
        CUmodule modules[8] = {0};
        CUcontext second;
        size_t loaded = 0;

        GR_CHECK_EQ(available(), LIMIT - CONTEXT);
        GR_CHECK_EQ(fill(MOST), LIMIT - CONTEXT);
        usleep(300000); /* frees bypass the cache after a failure */
        GR_CHECK_EQ(fill((LIMIT - CONTEXT) / BLOCK), LIMIT - CONTEXT);
        /* What is cached makes room for code; then there is no more, and the limit holds. */
        while (loaded < 8 && cuModuleLoadData(&modules[loaded], "image") == CUDA_SUCCESS)
                loaded++;
        GR_CHECK_EQ(loaded, (LIMIT - CONTEXT) / MODULE);
        GR_CHECK_EQ(used(), CONTEXT + loaded * MODULE);
        /* What was unloaded is there again at once, though the figure of before was not asked for anew. */
        GR_CHECK(cuMemAlloc(&blocks[0], MODULE + BLOCK) == CUDA_ERROR_OUT_OF_MEMORY);
        GR_MUST(cuModuleUnload(modules[--loaded]));
        GR_MUST(cuMemAlloc(&blocks[0], MODULE + BLOCK));
        GR_MUST(cuMemFree(blocks[0]));
        while (loaded)
                GR_MUST(cuModuleUnload(modules[--loaded]));
        loaders();
        GR_MUST(cuCtxCreate(&second, NULL, 0, 0));
        GR_CHECK(fill(MOST) <= LIMIT - 2 * CONTEXT);
        GR_MUST(cuCtxDestroy(second));
}

static void graph(void)
{
        CUcontext context;
        CUgraphExec exec;
        CUgraph empty;

        available();
        GR_MUST(cuGraphCreate(&empty, 0));
        GR_MUST(cuCtxPopCurrent(&context));
        GR_MUST(cuGraphInstantiate(&exec, empty, 0)); /* without a context there is nothing to measure */
        GR_MUST(cuCtxPushCurrent(context));
        usleep(200000); /* measured a moment ago it is not measured again */
        setenv("GRNVML", "more", 1);
        GR_MUST(cuGraphInstantiate(&exec, empty, 0));
        unsetenv("GRNVML"); /* of two measurements the larger one counts */
        GR_CHECK_EQ(told(), CONTEXT + (getenv("GPURECLAIM_LIMIT_INCLUDES") ? MODULE : 0));
}

/*
 * Makes executables until so many times they were seen to take memory. How often NVML is asked depends on how long it
 * takes: those made meanwhile are counted together with the next one.
 */
static size_t make(CUgraphExec *execs, size_t count, size_t seen)
{
        size_t was = status().executables, made = 0, unseen = 0;
        CUgraph empty;

        GR_MUST(cuGraphCreate(&empty, 0));
        while (seen > 0 && made < count) {
                uint64_t before = status().executable_bytes, after;

                usleep(20000);
                GR_MUST(cuGraphInstantiate(&execs[made++], empty, 0));
                after = status().executable_bytes;
                GR_CHECK_EQ(status().executables, was + made);
                GR_CHECK(after >= before && (after - before) % EXECUTABLE == 0);
                GR_CHECK(after - before <= ++unseen * EXECUTABLE);
                if (after > before)
                        seen--, unseen = 0;
        }
        GR_CHECK_EQ(seen, 0);
        GR_MUST(cuGraphDestroy(empty));
        return made;
}

static void executables(void)
{
        static CUgraphExec execs[4096];
        size_t made, room = sizeof execs / sizeof execs[0];
        CUcontext first, second;
        CUmodule module;
        uint64_t known;
        CUgraph empty;

        GR_CHECK_EQ(status().executables, 0);
        GR_CHECK_EQ(status().executable_bytes, 0);
        made = make(execs, room, 2);
        GR_MUST(cuModuleLoadData(&module, "image")); /* no part of it */
        made += make(execs + made, room - made, 1);
        known = status().executable_bytes;
        GR_CHECK(known >= 3 * EXECUTABLE && known <= made * EXECUTABLE);
        GR_CHECK_EQ(used(), CONTEXT + MODULE + made * EXECUTABLE);
        /* A graph that stays executable, and one of an unknown handle. */
        GR_CHECK_EQ(cuGraphExecDestroy(execs[0]), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        GR_CHECK_EQ(status().executables, made);
        GR_CHECK(cuGraphExecDestroy(NULL) != CUDA_SUCCESS);
        GR_CHECK_EQ(status().executables, made);
        /* The driver keeps the memory for the next ones. */
        for (size_t i = 0; i < made; i++)
                GR_MUST(cuGraphExecDestroy(execs[i]));
        GR_CHECK_EQ(status().executables, 0);
        GR_CHECK_EQ(status().executable_bytes, known);
        GR_MUST(cuGraphCreate(&empty, 0));
        for (size_t i = 0; i < made; i++)
                GR_MUST(cuGraphInstantiate(&execs[i], empty, 0));
        GR_CHECK_EQ(status().executables, made);
        GR_CHECK_EQ(status().executable_bytes, known);
        /* One that could not be made is none, and one without a context is nowhere. */
        GR_CHECK(cuGraphInstantiate(&execs[made], NULL, 0) != CUDA_SUCCESS);
        GR_MUST(cuCtxPopCurrent(&first));
        GR_MUST(cuGraphInstantiate(&execs[made], empty, 0));
        GR_MUST(cuCtxPushCurrent(first));
        GR_CHECK_EQ(status().executables, made);
        GR_MUST(cuGraphExecDestroy(execs[made]));
        GR_CHECK_EQ(status().executables, made);
        /* With a context goes what it had, and nobody knows how much that was. */
        GR_MUST(cuCtxCreate(&second, NULL, 0, 0));
        GR_MUST(cuCtxDestroy(second));
        GR_CHECK_EQ(status().executable_bytes, 0);
        made += make(execs + made, room - made, 1);
        GR_CHECK(status().executable_bytes > 0);
        /* It is never more than all that the driver has: here what NVML says of the stranger. */
        setenv("GRNVML", "stranger", 1);
        for (int i = 0; status().executable_bytes > STRANGER && made < room && i < 2000; i++) {
                usleep(20000);
                GR_MUST(cuGraphInstantiate(&execs[made++], empty, 0));
        }
        GR_CHECK_EQ(status().executable_bytes, STRANGER);
}

/* How often NVML was asked for its list of processes. */
static unsigned listed(void)
{
        void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_NOLOAD);
        void *found = nvml ? dlsym(nvml, "grNvmlListed") : NULL;
        unsigned (*times)(void);

        if (!found)
                return 0;
        memcpy(&times, &found, sizeof times);
        return times();
}

/*
 * One right after the other, and NVML is slow or knows nothing. Where an answer takes 20 ms it is asked for at the
 * first of them alone: a hundredth of the time is less.
 */
static void known(uint64_t bytes)
{
        enum { EXECS = 50 };
        const char *mode = getenv("GRNVML") ? getenv("GRNVML") : "";
        CUgraphExec execs[EXECS + 1];
        unsigned before;
        CUgraph empty;

        GR_MUST(cuGraphCreate(&empty, 0));
        GR_MUST(cuGraphInstantiate(&execs[0], empty, 0)); /* makes a worker load NVML */
        usleep(300000);
        before = listed();
        for (int i = 1; i < EXECS; i++)
                GR_MUST(cuGraphInstantiate(&execs[i], empty, 0));
        if (strstr(mode, "slow"))
                GR_CHECK(listed() > before && listed() <= before + 2); /* a list that does not fit is asked for again */
        GR_CHECK_EQ(status().executables, EXECS);
        GR_CHECK_EQ(status().executable_bytes, bytes);
        GR_CHECK(bytes == UINT64_MAX || told() == CONTEXT + EXECS * EXECUTABLE);
        /* What else was taken since the last one, some time ago, is no part of the next one. */
        usleep(10000);
        take(MODULE);
        GR_MUST(cuGraphInstantiate(&execs[EXECS], empty, 0));
        for (int i = 0; i < 500 && status().executable_bytes == bytes && bytes != UINT64_MAX; i++)
                usleep(20000);
        GR_CHECK_EQ(status().executable_bytes, bytes == UINT64_MAX ? bytes : bytes + EXECUTABLE);
}

static CUcontext threads_context;

static void *make_one(void *empty)
{
        CUgraphExec exec;

        GR_MUST(cuCtxSetCurrent(threads_context));
        GR_MUST(cuGraphInstantiate(&exec, empty, 0));
        return NULL;
}

/* Threads that find at the same time that NVML may be asked again. */
static void at_once(void)
{
        enum { THREADS = 16 };
        pthread_t threads[THREADS];
        CUgraph empty;
        unsigned before;

        GR_MUST(cuCtxGetCurrent(&threads_context));
        GR_MUST(cuGraphCreate(&empty, 0));
        make_one(empty); /* makes a worker load NVML */
        usleep(300000);
        before = listed();
        for (int i = 0; i < THREADS; i++)
                GR_CHECK_EQ(pthread_create(&threads[i], NULL, make_one, empty), 0);
        for (int i = 0; i < THREADS; i++)
                GR_CHECK_EQ(pthread_join(threads[i], NULL), 0);
        GR_CHECK(listed() > before && listed() <= before + 2); /* a list that does not fit is asked for again */
}

/* Right after one executable is made, so that what was seen then would serve for the next one. */
static void between(void)
{
        enum { ROUNDS = 10 };
        CUgraphExec exec;
        CUcontext first, second;
        CUmodule module;
        CUgraph empty;

        GR_MUST(cuCtxGetCurrent(&first));
        GR_MUST(cuGraphCreate(&empty, 0));
        GR_MUST(cuGraphInstantiate(&exec, empty, 0)); /* makes a worker load NVML */
        usleep(300000);
        for (int i = 0; i < ROUNDS; i++) {
                GR_MUST(cuGraphInstantiate(&exec, empty, 0));
                GR_MUST(cuModuleLoadData(&module, "image"));
                GR_MUST(cuGraphInstantiate(&exec, empty, 0));
                GR_MUST(cuCtxCreate(&second, NULL, 0, 0));
                GR_MUST(cuCtxSetCurrent(first));
        }
        GR_MUST(cuGraphInstantiate(&exec, empty, 0));
        usleep(100000);
        GR_CHECK_EQ(status().executable_bytes, (2 * ROUNDS + 1) * EXECUTABLE);
}

static void asleep(void)
{
        GR_MUST(cuMemAlloc(&blocks[0], LIMIT / 2));
        GR_CHECK_EQ(told(), CONTEXT);
        GR_CHECK_EQ(system("env -u LD_PRELOAD \"$GR_TEST_COMMAND\" sleep $PPID"), 0);
        GR_CHECK(used() < LIMIT / 2);
        for (volatile int i = 0; i < 3; i++) { /* the larger of the last two counts */
                usleep(1100000);               /* a younger one is told again */
                GR_CHECK_EQ(told(), CONTEXT);
        }
}

int main(int argc, char **argv)
{
        const char *mode = argc > 1 ? argv[1] : "";
        CUmodule modules[8];
        CUcontext context;
        void *library;

        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        if (strcmp(mode, "process") == 0) {
                setenv("OWN_COUNTED", "1", 1);
                counted();
                return GR_CHECK_RESULT();
        }
        if (strcmp(mode, "beside") == 0) {
                GR_CHECK_EQ(available(), LIMIT - CONTEXT);
                setenv("GRNVML", "more", 1);
                usleep(200000); /* measured a moment ago it is not measured again */
                GR_CHECK_EQ(fill(MOST), LIMIT - CONTEXT - MODULE);
                return GR_CHECK_RESULT();
        }
        if (strcmp(mode, "graph") == 0) {
                graph();
                return GR_CHECK_RESULT();
        }
        if (strcmp(mode, "executables") == 0) {
                executables();
                return GR_CHECK_RESULT();
        }
        if (strcmp(mode, "at once") == 0) {
                at_once();
                return GR_CHECK_RESULT();
        }
        if (strcmp(mode, "between") == 0) {
                between();
                return GR_CHECK_RESULT();
        }
        if (strcmp(mode, "known") == 0) {
                known(argc > 2 ? strtoull(argv[2], NULL, 10) : UINT64_MAX);
                return GR_CHECK_RESULT();
        }
        if (strcmp(mode, "one") == 0) {
                GR_CHECK_EQ(cuModuleLoadData(&modules[0], "image"), argc > 2 ? atoi(argv[2]) : 0);
                GR_MUST(cuCtxPopCurrent(&context)); /* a library needs none, and takes no memory before there is one */
                GR_CHECK_EQ(load(3, &library), CUDA_SUCCESS);
                return GR_CHECK_RESULT();
        }
        if (strcmp(mode, "asleep") == 0) {
                asleep();
                return GR_CHECK_RESULT();
        }
        if (strcmp(mode, "little") == 0) {
                GR_MUST(cuMemAlloc(&blocks[0], BLOCK));
                GR_CHECK_EQ(told(), 0);
                return GR_CHECK_RESULT();
        }
        if (strcmp(mode, "pool") == 0) {
                GR_MUST(cuMemAllocAsync(&blocks[0], MODULE, NULL));
                GR_MUST(cuMemFreeAsync(blocks[0], NULL));
                GR_MUST(cuStreamSynchronize(NULL)); /* the driver takes it back */
                GR_CHECK_EQ(used(), CONTEXT);
                GR_CHECK_EQ(told(), CONTEXT);
                return GR_CHECK_RESULT();
        }
        GR_CHECK_EQ(available(), LIMIT);
        GR_CHECK_EQ(fill(MOST), LIMIT);
        for (int i = 0; i < 8; i++)
                GR_MUST(cuModuleLoadData(&modules[i], "image"));
        /* An entry that is smaller than what we know to hold is not ours. */
        GR_MUST(cuMemAlloc(&blocks[0], LIMIT / 2));
        GR_CHECK_EQ(told(), strcmp(mode, "unknown") == 0 ? UINT64_MAX : CONTEXT + 8 * MODULE);
        return GR_CHECK_RESULT();
}
