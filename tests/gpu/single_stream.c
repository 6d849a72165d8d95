/*
 * When the library takes a program's work for that of one stream, so that barriers cost nothing: until a stream is
 * made, but for those that cuBLAS makes for itself. Then a block that is freed behind a kernel that runs serves again
 * at once, behind a barrier; where work may overlap, fresh memory is better. Under the library only.
 *
 *   single_stream [WAY]     all ways, each in a process of its own as the library remembers what it saw; or this one
 *
 * One line per way; exit status 1 when one failed.
 */
#include "gputest.h"
#include "newer.h"
#include "peer_process.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define BYTES (64 * MIB) /* too much to be spared a fence */
enum { SPIN_US = 100000, WORDS = 64 };

CUresult cublas_makes_stream(CUstream *stream, bool priority); /* of a library that is called like cuBLAS */

static struct gt gt;

static void nothing(void)
{
}

static void by_cublas(void)
{
        CUstream stream;

        GR_MUST(cublas_makes_stream(&stream, false));
        GR_MUST(cublas_makes_stream(&stream, true));
}

/* The library looks up who makes the stream, and leaves no file open. */
static void created(void)
{
        int before = open("/dev/null", O_RDONLY | O_CLOEXEC), after;

        gt_stream();
        after = dup(before);
        GR_CHECK_EQ(after, before + 1);
        close(after);
        close(before);
}

/* What the driver refuses to make is no stream. */
static void refused_stream(void)
{
        CUstream stream;

        if (cuStreamCreate(&stream, ~0u) == CUDA_SUCCESS || cuStreamCreateWithPriority(&stream, ~0u, 0) == CUDA_SUCCESS)
                gt_die("a stream was made with flags that are none");
}

/* Where no file can be opened, nothing is known of who makes it. */
static void created_without_files(void)
{
        struct rlimit limit, none;

        GR_CHECK_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
        none = (struct rlimit){0, limit.rlim_max};
        GR_CHECK_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
        gt_stream();
        GR_CHECK_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

static void with_priority(void)
{
        CUstream stream;

        GR_MUST(cuStreamCreateWithPriority(&stream, CU_STREAM_DEFAULT, 0));
}

static void CUDA_CB function(void *arg)
{
        (void)arg;
}

static void host_function(void)
{
        GR_MUST(cuLaunchHostFunc(NULL, function, NULL));
}

/* What the driver refuses to share is known to nobody else. */
static void refused_share(void)
{
        __typeof__(&cuMemPoolExportToShareableHandle) export = GT_OPTIONAL(cuMemPoolExportToShareableHandle);
        const CUmemPoolProps own = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
        CUmemoryPool pool;
        int file;

        if (!export)
                return;
        GR_MUST(cuMemPoolCreate(&pool, &own));
        if (export(&file, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS)
                gt_die("a pool that is not to be shared was exported");
        GR_MUST(cuMemPoolDestroy(pool));
}

static void refused_import(void)
{
        __typeof__(&cuMemPoolImportFromShareableHandle) import = GT_OPTIONAL(cuMemPoolImportFromShareableHandle);
        CUmemoryPool pool;

        if (import &&
            import(&pool, (void *)(uintptr_t)STDIN_FILENO, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == CUDA_SUCCESS)
                gt_die("a pool was imported that nobody had exported");
}

static char as_other[] = "as-other";

static void shared_event(CUipcEventHandle *ret_handle)
{
        CUevent event;

        GR_MUST(cuEventCreate(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuIpcGetEventHandle(ret_handle, event));
}

/* A stream that waits for an event of two processes may wait for the other one. */
static void exported_event(void)
{
        CUipcEventHandle handle;

        shared_event(&handle);
}

static void opened_event(void)
{
        CUipcEventHandle handle;
        CUevent event;
        int other, none;

        peer_start(program_invocation_name, as_other, true, &other);
        if (!peer_receive(other, &handle, sizeof handle, &none))
                gt_die("the other process is gone");
        GR_MUST(cuIpcOpenEventHandle(&event, handle));
        GR_MUST(cuEventDestroy(event));
        close(other);
}

/* Exports an event, and stays until it has been opened. */
static int work_as_other(int other)
{
        CUipcEventHandle handle;
        int none;

        gt_open(&gt);
        shared_event(&handle);
        peer_send(other, &handle, sizeof handle, -1);
        peer_receive(other, &handle, sizeof handle, &none);
        return EXIT_SUCCESS;
}

/*
 * Work on the stream that a thread has by itself: by the functions whose stream 0 it is, as nvcc's --default-stream
 * per-thread has them, or by its handle.
 */
static bool by_handle;
static CUdeviceptr words[2];
static uint32_t here;
static uint64_t no_time;
static void *values[] = {&no_time};

static void (*own_of(const char *name, int version))(void)
{
        void (*call)(void) = NULL;
        CUdriverProcAddressQueryResult status;
        void *found = NULL;

        GR_MUST(cuGetProcAddress(name, &found, version, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &status));
        memcpy(&call, &found, sizeof call);
        return call;
}

static void (*own(const char *name))(void)
{
        return own_of(name, CUDA_VERSION);
}

#define SUBMIT(symbol) (by_handle ? (symbol) : (__typeof__(&(symbol)))own(#symbol))

/* A function of CUDA 13.2. Where the driver has none, the way ends here. */
#define SUBMIT_NEWER(symbol)                                                                                           \
        ({                                                                                                             \
                __typeof__(&(symbol)) call_ = (__typeof__(call_))gt_lookup_of(#symbol, 13020);                         \
                                                                                                                       \
                if (!call_) {                                                                                          \
                        printf("-      " #symbol " is not to be had here\n");                                          \
                        exit(EXIT_SUCCESS);                                                                            \
                }                                                                                                      \
                by_handle ? call_ : (__typeof__(call_))own_of(#symbol, 13020);                                         \
        })

static CUstream stream_of(void)
{
        return by_handle ? CU_STREAM_PER_THREAD : NULL;
}

static void launch(void)
{
        GR_MUST(SUBMIT(cuLaunchKernel)(gt.spin, 1, 1, 1, 1, 1, 1, 0, stream_of(), values, NULL));
}

static void launch_extended(void)
{
        const CUlaunchConfig config = {1, 1, 1, 1, 1, 1, 0, stream_of(), NULL, 0};

        GR_MUST(SUBMIT(cuLaunchKernelEx)(&config, gt.spin, values, NULL));
}

static void launch_cooperative(void)
{
        GR_MUST(SUBMIT(cuLaunchCooperativeKernel)(gt.spin, 1, 1, 1, 1, 1, 1, 0, stream_of(), values));
}

static void launch_graph_by(CUresult CUDAAPI launch_it(CUgraphExec exec, CUstream stream), CUstream stream)
{
        CUgraphExec exec;
        CUgraph graph; /* an empty one is one, too */

        GR_MUST(cuGraphCreate(&graph, 0));
        GR_MUST(cuGraphInstantiate(&exec, graph, 0));
        GR_MUST(launch_it(exec, stream));
        GR_MUST(cuGraphExecDestroy(exec));
        GR_MUST(cuGraphDestroy(graph));
}

static void launch_graph(void)
{
        launch_graph_by(SUBMIT(cuGraphLaunch), stream_of());
}

static void graph_alone(void)
{
        launch_graph_by(cuGraphLaunch, NULL);
}

static void copy(void)
{
        GR_MUST(SUBMIT(cuMemcpyAsync)(words[1], words[0], 4, stream_of()));
}

static void copy_in(void)
{
        GR_MUST(SUBMIT(cuMemcpyHtoDAsync)(words[0], &here, 4, stream_of()));
}

static void copy_out(void)
{
        GR_MUST(SUBMIT(cuMemcpyDtoHAsync)(&here, words[1], 4, stream_of()));
}

static void copy_there(void)
{
        GR_MUST(SUBMIT(cuMemcpyDtoDAsync)(words[1], words[0], 4, stream_of()));
}

static void copy_to_peer(void)
{
        GR_MUST(SUBMIT(cuMemcpyPeerAsync)(words[1], gt.ctx, words[0], gt.ctx, 4, stream_of()));
}

static void copy_2d(void)
{
        const CUDA_MEMCPY2D rows = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                                    .srcDevice = words[0],
                                    .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                                    .dstDevice = words[1],
                                    .WidthInBytes = 4,
                                    .Height = 1};

        GR_MUST(SUBMIT(cuMemcpy2DAsync)(&rows, stream_of()));
}

static void copy_3d(void)
{
        const CUDA_MEMCPY3D box = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                                   .srcDevice = words[0],
                                   .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                                   .dstDevice = words[1],
                                   .WidthInBytes = 4,
                                   .Height = 1,
                                   .Depth = 1};

        GR_MUST(SUBMIT(cuMemcpy3DAsync)(&box, stream_of()));
}

static void copy_with_attributes(void)
{
        CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};

        GR_MUST(SUBMIT_NEWER(cuMemcpyWithAttributesAsync)(words[1], words[0], 4, &attributes, stream_of()));
}

static void copy_3d_with_attributes(void)
{
        CUDA_MEMCPY3D_BATCH_OP box = {
                .src = {.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .op.ptr.ptr = words[0]},
                .dst = {.type = CU_MEMCPY_OPERAND_TYPE_POINTER, .op.ptr.ptr = words[1]},
                .extent = {4, 1, 1},
                .srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
        };

        GR_MUST(SUBMIT_NEWER(cuMemcpy3DWithAttributesAsync)(&box, 0, stream_of()));
}

static void fill_bytes(void)
{
        GR_MUST(SUBMIT(cuMemsetD8Async)(words[0], 0x11, 4, stream_of()));
}

static void fill_halves(void)
{
        GR_MUST(SUBMIT(cuMemsetD16Async)(words[0], 0x2222, 2, stream_of()));
}

static void fill_words(void)
{
        GR_MUST(SUBMIT(cuMemsetD32Async)(words[0], 0x33333333, 1, stream_of()));
}

/* Functions without a parameter for the stream. */
static void fill_own(void)
{
        GR_MUST(((__typeof__(&cuMemsetD32))own("cuMemsetD32"))(words[0], 0x33333333, 1));
}

static void copy_own(void)
{
        GR_MUST(((__typeof__(&cuMemcpyDtoD))own("cuMemcpyDtoD"))(words[1], words[0], 4));
}

/* What lies in order with the legacy stream, whose work waits for it; and all of it arrives. */
static void own_stream(void)
{
        static void (*const fills[])(void) = {copy_in, fill_bytes, fill_halves, fill_words};
        static void (*const copies[])(void) = {copy, copy_there, copy_to_peer, copy_2d, copy_3d};
        static const uint32_t filled[] = {0x44444444, 0x11111111, 0x22222222, 0x33333333};

        for (int form = 0; form < 2; form++) {
                by_handle = form;
                launch();
                launch_extended();
                launch_cooperative();
                launch_graph();
                for (int i = 0; i < 4; i++)
                        for (int k = 0; k < 5; k++) {
                                GR_MUST(cuMemsetD32(words[1], 0, 1));
                                here = filled[0];
                                fills[i]();
                                copies[k]();
                                GR_MUST(cuStreamSynchronize(CU_STREAM_PER_THREAD));
                                here = 0;
                                copy_out();
                                GR_MUST(cuStreamSynchronize(CU_STREAM_PER_THREAD));
                                if (here != filled[i])
                                        gt_die("fill %d, copy %d: %x arrived", i, k, here);
                        }
        }
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

#define OWN(act)                                                                                                       \
        {"the thread's own stream, " #act, act, .overlaps = true},                                                     \
        {                                                                                                              \
                "the thread's own stream, " #act ", by handle", act, .overlaps = true, .by_handle = true               \
        }

static const struct way {
        const char *name;
        void (*act)(void);
        bool overlaps, by_handle;
} ways[] = {
        {"the default stream alone", nothing, .overlaps = false},
        {"a stream of cuBLAS", by_cublas, .overlaps = false},
        {"a graph in the default stream", graph_alone, .overlaps = false},
        {"a pool that is not to be shared", refused_share, .overlaps = false},
        {"a pool that nobody shares", refused_import, .overlaps = false},
        {"a stream", created, .overlaps = true},
        {"a stream that is refused", refused_stream, .overlaps = false},
        {"a stream, made without a file", created_without_files, .overlaps = true},
        {"one with priority", with_priority, .overlaps = true},
        {"a host function", host_function, .overlaps = true},
        {"a green context", green, .overlaps = true},
        {"an event for another process", exported_event, .overlaps = true},
        {"another process's event", opened_event, .overlaps = true},
        {"the thread's own stream, a fill without one", fill_own, .overlaps = true},
        {"the thread's own stream, a copy without one", copy_own, .overlaps = true},
        {"all that goes to the thread's own stream", own_stream, .overlaps = true},
        OWN(launch),
        OWN(launch_extended),
        OWN(launch_cooperative),
        OWN(launch_graph),
        OWN(copy),
        OWN(copy_in),
        OWN(copy_out),
        OWN(copy_there),
        OWN(copy_to_peer),
        OWN(copy_2d),
        OWN(copy_3d),
        OWN(copy_with_attributes),
        OWN(copy_3d_with_attributes),
        OWN(fill_bytes),
        OWN(fill_halves),
        OWN(fill_words),
};
enum { WAYS = sizeof ways / sizeof *ways };

static const char *name_of(size_t way)
{
        return ways[way].name;
}

static int try_way(size_t i)
{
        const struct way *way = &ways[i];
        CUdeviceptr before, after;
        bool again;

        gt_open(&gt);
        GR_MUST(cuMemAlloc(&words[0], 4));
        GR_MUST(cuMemAlloc(&words[1], 4));
        GR_MUST(cuMemAlloc(&before, BYTES));
        GR_MUST(gt_fill(&gt, NULL, before, 1, WORDS));
        by_handle = way->by_handle;
        way->act();
        GR_MUST(cuCtxSynchronize());
        GR_MUST(gt_spin(&gt, NULL, SPIN_US));
        GR_MUST(gt_fill(&gt, NULL, before, 2, WORDS));
        GR_MUST(cuMemFree(before));
        GR_MUST(cuMemAlloc(&after, BYTES));
        again = before == after;
        gt_check(again == !way->overlaps, way->name, "%s", again ? "one stream" : "work may overlap");
        GR_MUST(cuMemFree(after));
        GR_MUST(cuMemFree(words[0]));
        GR_MUST(cuMemFree(words[1]));
        gt_close(&gt);
        return GR_CHECK_RESULT();
}

int main(int argc, char **argv)
{
        if (argc == 3 && !strcmp(argv[1], as_other))
                return work_as_other(atoi(argv[2]));
        return gt_ways(argc, argv, WAYS, name_of, try_way);
}
