/*
 * Threads that are told to end in the midst of a call. A point is where one may end: here each call of the driver is
 * one, as it writes a line (GRSIM_TRACE=/dev/null), and where a file was opened. Each scene makes its call again and
 * again, each time in a thread that is told to end one point later. If the thread did end inside, another one makes the
 * call, which must work; then everything once more. At last as much must be charged as before, and as many files be
 * open. Every line must be the same natively and under the library.
 *
 *   cancelled_calls [stream|nvml]    nvml: only under the library, with a group's limit, and with a stand-in for NVML
 */
#include "gputest.h"
#include "peer_process.h"

#include <cuda.h>
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpureclaim.h"

#define BYTES           ((size_t)5 << 20)
#define PAGE_BYTES      ((size_t)2 << 20)
#define TOO_MUCH        ((size_t)1 << 39)  /* of the card, but not of what the pool serves */
#define PINNED          ((size_t)40 << 20) /* more than half of the library's limit */
#define PINNED_TOO_MUCH ((size_t)128 << 20)
#define LARGE           ((size_t)600 << 20) /* more than half of the library's limit */
#define LARGER          ((size_t)700 << 20)
#define HANG_S          20

static _Thread_local unsigned points_left; /* this thread is told to end at the last of them; 0: it is not */
static _Atomic bool told;

static ssize_t (*real_write)(int fd, const void *data, size_t bytes);
static FILE *(*real_fopen)(const char *path, const char *mode);
static int (*real_open)(const char *path, int flags, mode_t mode);

static void point(void)
{
        if (points_left > 0 && --points_left == 0) {
                told = true;
                pthread_cancel(pthread_self());
        }
}

/* A driver that is cancelled where it opens a file may keep a lock of its own. */
static void point_unless_in_driver(const void *caller)
{
        Dl_info info;

        if (points_left > 0 && dladdr(caller, &info) && !strstr(info.dli_fname, "libcuda"))
                point();
}

/* These stand before the C library's, for the driver and the library, by the names that they know. */
__attribute__((visibility("default"))) ssize_t point_and_write(int fd, const void *data, size_t bytes) __asm__("write");
ssize_t point_and_write(int fd, const void *data, size_t bytes)
{
        point();
        return real_write(fd, data, bytes);
}

__attribute__((visibility("default"))) FILE *fopen_and_point(const char *path, const char *mode) __asm__("fopen64");
FILE *fopen_and_point(const char *path, const char *mode)
{
        FILE *file = real_fopen(path, mode);

        point_unless_in_driver(__builtin_return_address(0));
        return file;
}

__attribute__((visibility("default"))) int open_and_point(const char *path, int flags, mode_t mode) __asm__("open64");
int open_and_point(const char *path, int flags, mode_t mode)
{
        int fd = real_open(path, flags, mode);

        point_unless_in_driver(__builtin_return_address(0));
        return fd;
}

__attribute__((constructor)) static void find_real(void)
{
        *(void **)&real_write = dlsym(RTLD_NEXT, "write");
        *(void **)&real_fopen = dlsym(RTLD_NEXT, "fopen64");
        *(void **)&real_open = dlsym(RTLD_NEXT, "open64");
}

/* What the scenes work with. */
static CUcontext context, second;
static CUdeviceptr block, base;
static CUmemGenericAllocationHandle mapped, again;
static CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                   .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                   .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
static void *pinned, *much;
static CUmemoryPool pool;
static CUarray array;
static CUmipmappedArray mipmapped;
static CUstream stream;
static CUgraph graph;
static CUgraphExec exec;
static CUexternalMemory external;
static CUipcMemHandle ipc, foreign;
static int exported = -1;

/* A refusal for lack of memory, or none. */
static CUresult short_of_memory(CUresult result)
{
        return result == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_SUCCESS : result ? result : CUDA_ERROR_UNKNOWN;
}

static CUresult ask_free(void)
{
        size_t free_bytes, total_bytes;

        return cuMemGetInfo(&free_bytes, &total_bytes);
}

/*
 * What the library has charged for memory that the program has, and has counted as imported; 0 without it. Where a free
 * did not wait, its memory goes back when the program asks what is free.
 */
static uint64_t charged(void)
{
        gpureclaim_status_function *function = (gpureclaim_status_function *)dlsym(RTLD_DEFAULT, "gpureclaim_status");
        struct gpureclaim_status status = {.struct_bytes = sizeof(status)};

        if (!function)
                return 0;
        GR_MUST(ask_free());
        GR_MUST(function(0, &status));
        return status.live_bytes + status.imported_bytes;
}

/* Without the library nothing is. */
static bool are_charged(uint64_t before)
{
        return !dlsym(RTLD_DEFAULT, "gpureclaim_status") || charged() > before;
}

static CUresult alloc(void)
{
        return cuMemAlloc(&block, BYTES);
}

static CUresult release(void)
{
        return cuMemFree(block);
}

static CUresult alloc_too_much(void)
{
        CUdeviceptr large;

        return short_of_memory(cuMemAlloc(&large, TOO_MUCH));
}

static CUresult alloc_pitched(void)
{
        static size_t asked = 1 << 20;
        size_t width = asked += 512, pitch; /* one that nobody has asked for: the driver chooses its pitch */

        return cuMemAllocPitch(&block, &pitch, width, 5, 4);
}

static CUresult pitched_too_much(void)
{
        size_t pitch;

        return short_of_memory(cuMemAllocPitch(&block, &pitch, TOO_MUCH >> 20, 1 << 20, 4));
}

static CUresult alloc_pinned(void)
{
        return cuMemAllocHost(&pinned, PINNED);
}

static CUresult release_pinned(void)
{
        return cuMemFreeHost(pinned);
}

/* More than the library's limit, if that is there; else `after` gives it back. */
static CUresult pin_too_much(void)
{
        CUresult result;

        pinned = NULL;
        result = cuMemAllocHost(&pinned, PINNED_TOO_MUCH);
        return pinned ? result : short_of_memory(result);
}

static CUresult unpin_if_there(void)
{
        return pinned ? cuMemFreeHost(pinned) : CUDA_SUCCESS;
}

static bool registered;

static CUresult register_too_much(void)
{
        CUresult result = cuMemHostRegister(much, PINNED_TOO_MUCH, 0);

        registered = result == CUDA_SUCCESS;
        return registered ? CUDA_SUCCESS : short_of_memory(result);
}

static CUresult unregister_if_there(void)
{
        return registered ? cuMemHostUnregister(much) : CUDA_SUCCESS;
}

static CUresult register_much(void)
{
        return cuMemHostRegister(much, PINNED, 0);
}

static CUresult unregister_much(void)
{
        return cuMemHostUnregister(much);
}

static CUresult alloc_managed(void)
{
        return cuMemAllocManaged(&block, BYTES, CU_MEM_ATTACH_GLOBAL);
}

static CUresult make_array(void)
{
        CUDA_ARRAY_DESCRIPTOR shape = {
                .Width = 1024, .Height = 1024, .Format = CU_AD_FORMAT_UNSIGNED_INT32, .NumChannels = 1};

        return cuArrayCreate(&array, &shape);
}

static CUresult end_array(void)
{
        return cuArrayDestroy(array);
}

static CUresult make_mipmapped(void)
{
        CUDA_ARRAY3D_DESCRIPTOR shape = {
                .Width = 1024, .Height = 1024, .Format = CU_AD_FORMAT_UNSIGNED_INT32, .NumChannels = 1};

        return cuMipmappedArrayCreate(&mipmapped, &shape, 2);
}

static CUresult end_mipmapped(void)
{
        return cuMipmappedArrayDestroy(mipmapped);
}

static CUresult create(void)
{
        return cuMemCreate(&mapped, PAGE_BYTES, &prop, 0);
}

static CUresult release_created(void)
{
        return cuMemRelease(mapped);
}

static CUresult map(void)
{
        return cuMemMap(base, PAGE_BYTES, 0, mapped, 0);
}

static CUresult unmap(void)
{
        return cuMemUnmap(base, PAGE_BYTES);
}

static CUresult retain(void)
{
        return cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)base);
}

static CUresult release_again(void)
{
        return cuMemRelease(again);
}

static CUresult export_created(void)
{
        return cuMemExportToShareableHandle(&exported, mapped, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

static CUresult end_exported(void)
{
        close(exported);
        return release_created();
}

static CUresult import_created(void)
{
        return cuMemImportFromShareableHandle(&again, (void *)(intptr_t)exported,
                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

/* Unless a thread that has ended inside has made it. */
static CUresult make_pool(void)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};

        return pool ? CUDA_SUCCESS : cuMemPoolCreate(&pool, &props);
}

static CUresult end_pool(void)
{
        CUresult result = cuMemPoolDestroy(pool);

        if (result == CUDA_SUCCESS)
                pool = NULL;
        return result;
}

static CUresult alloc_in_order(void)
{
        return cuMemAllocAsync(&block, BYTES, NULL);
}

static CUresult alloc_from_pool(void)
{
        return cuMemAllocFromPoolAsync(&block, BYTES, pool, NULL);
}

static CUresult release_in_order(void)
{
        return cuMemFreeAsync(block, NULL);
}

static CUresult synchronize(void)
{
        return cuCtxSynchronize();
}

/* Memory of the pool is counted. */
static CUresult use_pool(void)
{
        uint64_t before = charged();

        GR_MUST(alloc_from_pool());
        GR_MUST(!are_charged(before));
        return CUDA_SUCCESS;
}

static CUresult in_order_too_much(void)
{
        return short_of_memory(cuMemAllocAsync(&block, TOO_MUCH, NULL));
}

static CUresult trim_pool(void)
{
        return cuMemPoolTrimTo(pool, 0);
}

static CUresult get_handle(void)
{
        return cuIpcGetMemHandle(&ipc, block);
}

static CUresult make_stream(void)
{
        return cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
}

static CUresult end_stream(void)
{
        return cuStreamDestroy(stream);
}

static CUresult begin_capture(void)
{
        return cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
}

static CUresult end_capture(void)
{
        return cuStreamEndCapture(stream, &graph);
}

static CUresult end_graph(void)
{
        return cuGraphDestroy(graph);
}

static void nothing(void *arg)
{
        (void)arg;
}

static CUresult call_host(void)
{
        return cuLaunchHostFunc(NULL, nothing, NULL);
}

/*
 * The limit has no room for both blocks. While a stream captures, the memory of the first one comes back only where
 * nothing may wait for the program any more.
 */
static CUresult alloc_in_capture(void)
{
        GR_MUST(synchronize());
        GR_MUST(make_stream());
        GR_MUST(begin_capture());
        GR_MUST(cuMemAlloc(&block, LARGE));
        GR_MUST(release());
        GR_MUST(cuMemAlloc(&block, LARGER));
        GR_MUST(release());
        GR_MUST(end_capture());
        GR_MUST(end_graph());
        return end_stream();
}

/* A graph that allocates and frees. */
static CUresult make_graph(void)
{
        CUDA_MEM_ALLOC_NODE_PARAMS params = {
                .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}},
                .bytesize = BYTES};
        CUgraphNode made, freed;

        GR_MUST(cuGraphCreate(&graph, 0));
        GR_MUST(cuGraphAddMemAllocNode(&made, graph, NULL, 0, &params));
        return cuGraphAddMemFreeNode(&freed, graph, &made, 1, params.dptr);
}

static CUresult instantiate(void)
{
        return cuGraphInstantiate(&exec, graph, 0);
}

static CUresult launch(void)
{
        return cuGraphLaunch(exec, NULL);
}

static CUresult end_exec(void)
{
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuDeviceGraphMemTrim(0));
        return end_graph();
}

/* One with a node that waits for the host. */
static CUresult make_host_exec(void)
{
        CUDA_HOST_NODE_PARAMS params = {.fn = nothing};
        CUgraphNode node;

        GR_MUST(cuGraphCreate(&graph, 0));
        GR_MUST(cuGraphAddHostNode(&node, graph, NULL, 0, &params));
        return instantiate();
}

static CUresult trim_graphs(void)
{
        return cuDeviceGraphMemTrim(0);
}

static CUresult make_context(void)
{
        return cuCtxCreate(&second, NULL, 0, 0);
}

static CUresult pop_context(void)
{
        CUcontext popped;

        return cuCtxPopCurrent(&popped);
}

static CUresult end_context(void)
{
        return cuCtxDestroy(second);
}

static CUresult retain_primary(void)
{
        CUcontext primary;

        return cuDevicePrimaryCtxRetain(&primary, 0);
}

static CUresult release_primary(void)
{
        return cuDevicePrimaryCtxRelease(0);
}

static CUresult reclaim(void)
{
        gpureclaim_reclaim_function *function =
                (gpureclaim_reclaim_function *)dlsym(RTLD_DEFAULT, "gpureclaim_reclaim");

        return function && function(0, "drop", 0) < 0 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

/* Any file can be mapped. The driver takes the descriptor over. */
static CUresult import_external(void)
{
        CUDA_EXTERNAL_MEMORY_HANDLE_DESC descriptor = {
                .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .handle.fd = exported, .size = PAGE_BYTES};

        /* Unless a thread that has ended inside has imported it. */
        return external ? CUDA_SUCCESS : cuImportExternalMemory(&external, &descriptor);
}

static uint64_t uncharged; /* what was charged before */

static CUresult make_external(void)
{
        external = NULL;
        uncharged = charged();
        exported = memfd_create("external", MFD_CLOEXEC);
        return exported < 0 || ftruncate(exported, (off_t)PAGE_BYTES) != 0 ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

static CUresult end_external(void)
{
        return cuDestroyExternalMemory(external);
}

static CUresult count_external(void)
{
        return are_charged(uncharged) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

static CUresult open_foreign(void)
{
        return cuIpcOpenMemHandle(&block, foreign, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

static CUresult close_foreign(void)
{
        return cuIpcCloseMemHandle(block);
}

enum { STEPS = 4 };

/* What comes before and after is made in the first thread. */
struct scene {
        const char *name;
        CUresult (*before[STEPS])(void), (*call)(void), (*after[STEPS])(void);
};

static const struct scene scenes[] = {
        {"cuMemAlloc", {NULL}, alloc, {release}},
        {"cuMemFree", {alloc}, release, {NULL}},
        {"cuMemAlloc, too much", {NULL}, alloc_too_much, {NULL}},
        {"cuMemAllocPitch", {NULL}, alloc_pitched, {release}},
        {"cuMemAllocPitch, too much", {NULL}, pitched_too_much, {NULL}},
        {"cuMemAllocHost", {NULL}, alloc_pinned, {release_pinned}},
        {"cuMemFreeHost", {alloc_pinned}, release_pinned, {NULL}},
        {"cuMemAllocHost, too much", {NULL}, pin_too_much, {unpin_if_there}},
        /* So that none is cached, too much is asked for. */
        {"cuMemAllocHost, none cached", {NULL}, alloc_pinned, {release_pinned, pin_too_much, unpin_if_there}},
        {"cuMemHostRegister", {NULL}, register_much, {unregister_much}},
        {"cuMemHostUnregister", {register_much}, unregister_much, {NULL}},
        {"cuMemHostRegister, too much", {NULL}, register_too_much, {unregister_if_there}},
        {"cuMemAllocManaged", {NULL}, alloc_managed, {release}},
        {"cuMemFree, managed", {alloc_managed}, release, {NULL}},
        {"cuArrayCreate", {NULL}, make_array, {end_array}},
        {"cuArrayDestroy", {make_array}, end_array, {NULL}},
        {"cuMipmappedArrayCreate", {NULL}, make_mipmapped, {end_mipmapped}},
        {"cuMipmappedArrayDestroy", {make_mipmapped}, end_mipmapped, {NULL}},
        {"cuMemCreate", {NULL}, create, {release_created}},
        {"cuMemRelease", {create}, release_created, {NULL}},
        {"cuMemMap", {create}, map, {unmap, release_created}},
        {"cuMemUnmap", {create, map}, unmap, {release_created}},
        {"cuMemRetainAllocationHandle", {create, map}, retain, {release_again, unmap, release_created}},
        {"cuMemExportToShareableHandle", {create}, export_created, {end_exported}},
        {"cuMemImportFromShareableHandle", {create, export_created}, import_created, {release_again, end_exported}},
        {"cuMemPoolCreate", {NULL}, make_pool, {use_pool, release_in_order, synchronize, end_pool}},
        {"cuMemPoolDestroy", {make_pool}, end_pool, {NULL}},
        {"cuMemAllocAsync", {NULL}, alloc_in_order, {release_in_order, synchronize}},
        {"cuMemAllocAsync, too much", {NULL}, in_order_too_much, {NULL}},
        {"cuMemAllocFromPoolAsync", {make_pool}, alloc_from_pool, {release_in_order, synchronize, end_pool}},
        {"cuMemFreeAsync", {make_pool, alloc_from_pool}, release_in_order, {synchronize, end_pool}},
        {"cuMemFree, of a pool", {make_pool, alloc_from_pool}, release, {end_pool}},
        {"cuMemPoolTrimTo", {make_pool}, trim_pool, {end_pool}},
        {"cuStreamBeginCapture", {make_stream}, begin_capture, {end_capture, end_graph, end_stream}},
        {"cuStreamEndCapture", {make_stream, begin_capture}, end_capture, {end_graph, end_stream}},
        {"cuStreamDestroy", {make_stream, begin_capture}, end_stream, {NULL}},
        {"cuGraphInstantiate", {make_graph}, instantiate, {end_exec}},
        {"cuGraphLaunch", {make_graph, instantiate}, launch, {end_exec}},
        {"cuDeviceGraphMemTrim", {NULL}, trim_graphs, {NULL}},
        {"cuDevicePrimaryCtxRetain", {NULL}, retain_primary, {release_primary}},
        {"cuDevicePrimaryCtxRelease", {retain_primary}, release_primary, {NULL}},
        {"cuCtxCreate", {NULL}, make_context, {end_context}},
        {"cuCtxDestroy", {make_context, pop_context}, end_context, {NULL}},
        {"cuMemGetInfo", {NULL}, ask_free, {NULL}},
        {"gpureclaim_reclaim", {NULL}, reclaim, {NULL}},
        {"cuImportExternalMemory", {make_external}, import_external, {count_external, end_external}},
        {"cuDestroyExternalMemory", {make_external, import_external}, end_external, {NULL}},
        {"cuIpcOpenMemHandle", {NULL}, open_foreign, {close_foreign}},
        {"cuIpcCloseMemHandle", {open_foreign}, close_foreign, {NULL}},
        {"cuIpcGetMemHandle", {alloc}, get_handle, {release}},
        /* A block of the pool that was exported goes to the driver. */
        {"cuMemFreeAsync, exported", {alloc, get_handle}, release_in_order, {synchronize}},
        {"cuLaunchHostFunc", {NULL}, call_host, {alloc_in_capture}},
        {"cuGraphLaunch, waits", {make_host_exec}, launch, {end_exec, alloc_in_capture}},
};
#define SCENES (sizeof(scenes) / sizeof(*scenes))

static const char *_Atomic current = "start"; /* the scene that a hang is in */

static void hung(int signal)
{
        const char *name = current;

        (void)signal;
        real_write(STDERR_FILENO, "a call does not return: ", 24);
        real_write(STDERR_FILENO, name, strlen(name));
        real_write(STDERR_FILENO, "\n", 1);
        _exit(98);
}

struct attempt {
        const struct scene *scene;
        unsigned points; /* as points_left */
        CUresult result;
        bool worked;
};

static void *run(void *arg)
{
        struct attempt *attempt = arg;

        if (context)
                GR_MUST(cuCtxSetCurrent(context));
        points_left = attempt->points;
        attempt->result = attempt->scene->call();
        attempt->worked = true;
        points_left = 0;
        pthread_testcancel();
        return NULL;
}

/* In a thread of its own, which is told to end at that point (0: not). True: it made the call. */
static bool in_thread(const struct scene *scene, unsigned points)
{
        struct attempt attempt = {.scene = scene, .points = points};
        pthread_t thread;

        GR_MUST(pthread_create(&thread, NULL, run, &attempt));
        GR_MUST(pthread_join(thread, NULL));
        if (attempt.worked && attempt.result != CUDA_SUCCESS) {
                fprintf(stderr, "%s, point %u: %d\n", scene->name, points, (int)attempt.result);
                _Exit(99);
        }
        return attempt.worked;
}

static void take_steps(CUresult (*const steps[STEPS])(void))
{
        for (int i = 0; i < STEPS && steps[i]; i++)
                GR_MUST(steps[i]());
}

/* True: the thread was told to end. */
static bool cycle(const struct scene *scene, unsigned points)
{
        take_steps(scene->before);
        told = false;
        if (!in_thread(scene, points))
                GR_MUST(!in_thread(scene, 0));
        take_steps(scene->after);
        return told;
}

static unsigned count_files(void)
{
        DIR *list = opendir("/proc/self/fd");
        unsigned count = 0;

        GR_MUST(!list);
        while (readdir(list))
                count++;
        closedir(list);
        return count;
}

/* Whether more files are open than *most, which becomes less if it was too much: the library's threads open files. */
static bool more_files(unsigned *most)
{
        unsigned count = count_files();

        for (int looks = 0; count > *most && looks < 1000; looks++) {
                usleep(1000);
                count = count_files();
        }
        if (count > *most)
                return true;
        *most = count;
        return false;
}

static void play(const struct scene *scene)
{
        unsigned points = 0, files;
        uint64_t bytes;
        bool more;

        current = scene->name;
        alarm(HANG_S);
        cycle(scene, 0);
        bytes = charged();
        files = count_files();
        do {
                more = cycle(scene, ++points);
                cycle(scene, 0);
                if (charged() != bytes || more_files(&files)) {
                        fprintf(stderr, "%s, point %u: %lld bytes are charged still, %u files are open, not %u\n",
                                scene->name, points, (long long)(charged() - bytes), count_files(), files);
                        _Exit(99);
                }
        } while (more);
        printf("%s\n~%u points\n", scene->name, points - 1);
        fflush(stdout);
}

static void open_device(void)
{
        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
}

/* A process that keeps memory for others. */
static int exporter(int to)
{
        CUipcMemHandle handle;

        open_device();
        GR_MUST(alloc());
        GR_MUST(cuIpcGetMemHandle(&handle, block));
        peer_send(to, &handle, sizeof(handle), -1);
        alarm(0);
        peer_receive(to, &handle, sizeof(handle), &(int){0}); /* until it ends */
        return 0;
}

/* The first stream of a process: the library looks into a file to see who makes it. */
static int first_stream(void)
{
        static const struct scene scene = {"cuStreamCreate", {NULL}, make_stream, {end_stream}};
        unsigned files;

        open_device();
        current = scene.name;
        files = count_files();
        cycle(&scene, 2);
        GR_MUST(more_files(&files));
        cycle(&scene, 0);
        printf("%s\n", scene.name);
        return 0;
}

/* Asks NVML for memory in a process without CUDA; the library looks into the files of the group. */
static int (*nvml_info)(void *card, unsigned long long memory[3]);
static void *card;

static CUresult ask_nvml(void)
{
        unsigned long long memory[3];

        return (CUresult)nvml_info(card, memory);
}

static int nvml_asker(void)
{
        static const struct scene scene = {"nvmlDeviceGetMemoryInfo", {NULL}, ask_nvml, {NULL}};
        void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        int (*init)(void), (*by_index)(unsigned index, void **ret_card);
        unsigned points = 0, files;
        bool more;

        GR_MUST(!library);
        *(void **)&init = dlsym(library, "nvmlInit_v2");
        *(void **)&by_index = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
        *(void **)&nvml_info = dlsym(library, "nvmlDeviceGetMemoryInfo");
        GR_MUST(init());
        GR_MUST(by_index(0, &card));
        current = scene.name;
        cycle(&scene, 0);
        files = count_files();
        do {
                more = cycle(&scene, ++points);
                GR_MUST(more_files(&files));
        } while (more);
        GR_MUST(points < 2);
        printf("%s\n", scene.name);
        return 0;
}

static int finish(pid_t peer, int socket)
{
        int status = 0;

        close(socket);
        waitpid(peer, &status, 0);
        return status;
}

int main(int argc, char **argv)
{
        static char export_mode[] = "export", ask_mode[] = "ask";
        const char *mode = argc > 1 ? argv[1] : "";
        pid_t peer;
        int socket, none;

        signal(SIGALRM, hung);
        alarm(HANG_S);
        if (strcmp(mode, "export") == 0)
                return exporter(atoi(argv[2]));
        if (strcmp(mode, "stream") == 0)
                return first_stream();
        if (strcmp(mode, "ask") == 0)
                return nvml_asker();
        if (strcmp(mode, "nvml") == 0) {
                open_device();
                GR_MUST(alloc());
                peer = peer_start(argv[0], ask_mode, false, &socket);
                return finish(peer, socket) != 0;
        }
        peer = peer_start(argv[0], export_mode, true, &socket);
        GR_MUST(!peer_receive(socket, &foreign, sizeof(foreign), &none));
        open_device();
        GR_MUST(cuMemAddressReserve(&base, PAGE_BYTES, 0, 0, 0));
        much = mmap(NULL, PINNED_TOO_MUCH, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        GR_MUST(much == MAP_FAILED);
        for (size_t i = 0; i < SCENES; i++)
                play(&scenes[i]);
        GR_MUST(finish(peer, socket));
        /* Waits until nobody visits the context. */
        current = "the end";
        GR_MUST(cuDevicePrimaryCtxReset(0));
        open_device();
        GR_MUST(alloc());
        GR_MUST(release());
        printf("then worked\n");
        return 0;
}
