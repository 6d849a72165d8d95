/*
 * Sleep (GPURECLAIM_SLEEP=demand), in a program that knows nothing of it: `sleep MODE`. The command gpureclaim
 * (GR_TEST_COMMAND) tells the process itself to sleep. What is on the device is asked of the simulated device, past the
 * library.
 */
#include "gputest.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MANY = 40, SMALL = 24 };

static struct gt gt;
static long processors; /* so many are online; 0: as many as there are */
static CUdeviceptr blocks[MANY];
static size_t sizes[MANY];

/* Stands before the C library's. */
__attribute__((visibility("default"))) long sysconf(int name)
{
        void *found = dlsym(RTLD_NEXT, "sysconf");
        long (*real)(int);

        memcpy(&real, &found, sizeof(real));
        return processors && name == _SC_NPROCESSORS_ONLN ? processors : real(name);
}

static size_t on_device(void)
{
        size_t bytes = 0;

        if (!gt_footprint(&gt, &bytes))
                gt_die("the footprint cannot be asked");
        return bytes;
}

/* The memory that the process has on the host. */
static size_t on_host(void)
{
        unsigned long pages = 0;
        FILE *file = fopen("/proc/self/statm", "r");

        if (!file || fscanf(file, "%*u %lu", &pages) != 1)
                gt_die("no /proc/self/statm");
        fclose(file);
        return pages * (size_t)sysconf(_SC_PAGESIZE);
}

static unsigned long call_count(const char *symbol)
{
        unsigned long (*count)(const char *);
        void *found = dlsym(RTLD_DEFAULT, "grSimCallCount");

        memcpy(&count, &found, sizeof(count));
        return count(symbol);
}

/* What the command says of this process; its exit status. */
static int command(const char *arguments, char *said, size_t bytes)
{
        char line[512];
        FILE *file;
        size_t length;
        int status;

        snprintf(line, sizeof(line), "env -u LD_PRELOAD \"$GR_TEST_COMMAND\" %s %d 2>&1", arguments, (int)getpid());
        file = popen(line, "r");
        if (!file)
                gt_die("no shell");
        length = fread(said, 1, bytes - 1, file);
        said[length] = '\0';
        status = pclose(file);
        return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static bool fall_asleep(const char *arguments)
{
        char said[512];

        return command(arguments, said, sizeof(said)) == 0 && strstr(said, "asleep in host memory");
}

/* Sizes of all kinds, from a few KiB to many pages. */
static void take_blocks(void)
{
        for (int i = 0; i < MANY; i++) {
                sizes[i] = i < SMALL ? (size_t)(i + 1) * 12 * KIB : (size_t)(i - SMALL + 1) * 3 * MIB / 2;
                GR_MUST(cuMemAlloc(&blocks[i], sizes[i]));
                GR_MUST(cuMemsetD32(blocks[i], 0x10000u + (unsigned)i, sizes[i] / 4));
        }
        GR_MUST(cuCtxSynchronize());
}

static void look_at_blocks(const char *when)
{
        size_t words = 0, wrong = 0;

        for (int i = 0; i < MANY; i++) {
                uint32_t *copy = malloc(sizes[i]);

                GR_MUST(cuMemcpyDtoH(copy, blocks[i], sizes[i]));
                for (size_t j = 0; j < sizes[i] / 4; j++)
                        wrong += copy[j] != 0x10000u + (unsigned)i;
                words += sizes[i] / 4;
                free(copy);
        }
        gt_check(wrong == 0, when, "%zu of %zu words are wrong", wrong, words);
}

static void free_blocks(void)
{
        for (int i = 0; i < MANY; i++)
                GR_MUST(cuMemFree(blocks[i]));
}

/* The same content before and after, several times; the device has the room meanwhile. */
static void mode_contents(void)
{
        size_t before;

        take_blocks();
        for (volatile int i = 0; i < 3; i++) {
                char said[4096];

                look_at_blocks("before");
                before = on_device();
                gt_check(fall_asleep("sleep"), "sleep", "asked");
                gt_check(on_device() + 190 * MIB < before, "room", "%.0f MiB before, %.0f MiB asleep", gt_mib(before),
                         gt_mib(on_device()));
                command("status --json;:", said, sizeof(said));
                gt_check(strstr(said, "\"asleep_bytes\": ") && !strstr(said, "\"asleep_bytes\": 0,"), "status", "told");
                gt_check(fall_asleep("sleep"), "sleep", "asked again while it sleeps");
                look_at_blocks("after");
                gt_check(on_device() == before, "back", "%.0f MiB before, %.0f MiB after", gt_mib(before),
                         gt_mib(on_device()));
        }
        free_blocks();
}

static CUdeviceptr extra;
static CUstream stream;
static CUevent event;
static uint32_t word;

static CUresult call_alloc(void)
{
        CUresult result = cuMemAlloc(&extra, 4 * MIB);

        return result ? result : cuMemFree(extra);
}

static CUresult call_free(void)
{
        return cuMemFree(extra);
}

static CUresult call_launch(void)
{
        return gt_fill(&gt, stream, blocks[MANY - 1], 7, 16);
}

static CUresult call_copy_to(void)
{
        return cuMemcpyHtoD(blocks[MANY - 1], &word, 4);
}

static CUresult call_copy_from(void)
{
        return cuMemcpyDtoH(&word, blocks[MANY - 1], 4);
}

static CUresult call_copy_async(void)
{
        return cuMemcpyDtoDAsync(blocks[MANY - 1], blocks[MANY - 2], 4 * KIB, stream);
}

static CUresult call_copy_2d(void)
{
        CUDA_MEMCPY2D copy = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
                              .srcDevice = blocks[MANY - 1],
                              .srcPitch = 4,
                              .dstMemoryType = CU_MEMORYTYPE_HOST,
                              .dstHost = &word,
                              .dstPitch = 4,
                              .WidthInBytes = 4,
                              .Height = 1};

        return cuMemcpy2D(&copy);
}

static CUresult call_set(void)
{
        return cuMemsetD8(blocks[MANY - 1], 1, 4);
}

static CUresult call_set_async(void)
{
        return cuMemsetD32Async(blocks[MANY - 1], 1, 4, stream);
}

static CUresult call_wait_value(void)
{
        return cuStreamWaitValue32(stream, blocks[MANY - 1], 0, CU_STREAM_WAIT_VALUE_GEQ);
}

static CUresult call_write_value(void)
{
        return cuStreamWriteValue32(stream, blocks[MANY - 1], 0, 0);
}

static CUresult call_stream_sync(void)
{
        return cuStreamSynchronize(stream);
}

static CUresult call_event_sync(void)
{
        return cuEventSynchronize(event);
}

static CUresult call_info(void)
{
        size_t free_bytes, total_bytes;

        return cuMemGetInfo(&free_bytes, &total_bytes);
}

static CUresult call_attribute(void)
{
        unsigned type;

        return cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, blocks[MANY - 1]);
}

static CUresult call_range(void)
{
        CUdeviceptr base;
        size_t bytes;

        return cuMemGetAddressRange(&base, &bytes, blocks[MANY - 1] + 1);
}

static CUresult call_capture(void)
{
        CUresult result = cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
        CUgraph empty = NULL;

        if (!result)
                result = cuStreamEndCapture(stream, &empty);
        return result ? result : cuGraphDestroy(empty);
}

static CUgraph graph;
static CUgraphExec executable;

static CUresult call_instantiate(void)
{
        CUgraphExec another;
        CUresult result = cuGraphInstantiate(&another, graph, 0);

        return result ? result : cuGraphExecDestroy(another);
}

static CUresult call_graph_launch(void)
{
        return cuGraphLaunch(executable, stream);
}

static CUresult call_graph_upload(void)
{
        return cuGraphUpload(executable, stream);
}

/* Each of these calls finds the process awake. */
static void mode_calls(void)
{
        static const struct {
                const char *name;
                CUresult (*call)(void);
        } calls[] = {
                {"cuMemAlloc", call_alloc},
                {"cuMemFree", call_free},
                {"a launch", call_launch},
                {"cuMemcpyHtoD", call_copy_to},
                {"cuMemcpyDtoH", call_copy_from},
                {"cuMemcpyDtoDAsync", call_copy_async},
                {"cuMemcpy2D", call_copy_2d},
                {"cuMemsetD8", call_set},
                {"cuMemsetD32Async", call_set_async},
                {"cuStreamWaitValue32", call_wait_value},
                {"cuStreamWriteValue32", call_write_value},
                {"cuStreamSynchronize", call_stream_sync},
                {"cuEventSynchronize", call_event_sync},
                {"cuMemGetInfo", call_info},
                {"cuPointerGetAttribute", call_attribute},
                {"cuMemGetAddressRange", call_range},
                {"cuStreamBeginCapture", call_capture},
                {"cuGraphInstantiate", call_instantiate},
                {"cuGraphLaunch", call_graph_launch},
                {"cuGraphUpload", call_graph_upload},
                {"cuCtxSynchronize", cuCtxSynchronize},
        };
        size_t awake;

        take_blocks();
        stream = gt_stream();
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(call_set_async());
        GR_MUST(cuStreamEndCapture(stream, &graph));
        GR_MUST(cuGraphInstantiate(&executable, graph, 0));
        GR_MUST(cuEventCreate(&event, 0));
        GR_MUST(cuEventRecord(event, stream));
        GR_MUST(cuMemAlloc(&extra, 64 * KIB));
        for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
                CUresult result;

                if (i == 1)
                        GR_MUST(cuMemAlloc(&extra, 4 * MIB));
                awake = on_device();
                if (!fall_asleep("sleep"))
                        gt_die("it does not sleep before %s", calls[i].name);
                result = calls[i].call();
                gt_check(result == CUDA_SUCCESS && on_device() + 190 * MIB > awake, calls[i].name,
                         "%s, %.0f MiB of %.0f", gt_result_name(result), gt_mib(on_device()), gt_mib(awake));
        }
}

/* While the GPU works nothing leaves; afterwards it does. */
static void mode_busy(void)
{
        char line[512];
        size_t before;

        take_blocks();
        before = on_device();
        stream = gt_stream();
        GR_MUST(gt_spin(&gt, stream, 1500000));
        gt_check(!fall_asleep("sleep --timeout 200ms"), "sleep", "refused beside a kernel");
        gt_check(on_device() == before, "memory", "all of it is there");
        snprintf(line, sizeof(line), "timeout -s KILL 0.1 env -u LD_PRELOAD \"$GR_TEST_COMMAND\" sleep %d",
                 (int)getpid());
        gt_check(system(line) != 0, "the command", "killed while it asks");
        gt_check(fall_asleep("sleep --timeout 30s"), "sleep", "when the kernel has ended");
        look_at_blocks("after");
}

/* It takes seconds to fall asleep (GRSIM_LATENCY): the one request for it is answered. */
static void mode_slowly(void)
{
        take_blocks();
        gt_check(fall_asleep("sleep --timeout 0"), "sleep", "asked once");
        look_at_blocks("after");
}

static void *ask_slowly(void *arg)
{
        gt_attach(&gt);
        atomic_store((_Atomic bool *)arg, true);
        GR_MUST(cuPointerGetAttribute(&word, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, blocks[MANY - 1]));
        return NULL;
}

/* Nothing leaves while a thread is in a call, although the GPU has no work (GRSIM_LATENCY). */
static void mode_inside(void)
{
        _Atomic bool begun = false;
        pthread_t thread;

        take_blocks();
        pthread_create(&thread, NULL, ask_slowly, &begun);
        while (!atomic_load(&begun))
                gt_sleep_us(1000);
        gt_check(!fall_asleep("sleep --timeout 100ms"), "sleep", "refused beside a call");
        pthread_join(thread, NULL);
        gt_check(fall_asleep("sleep"), "sleep", "when the call has ended");
}

static void *reset_second(void *arg)
{
        (void)arg;
        GR_MUST(cuDevicePrimaryCtxReset(1));
        return NULL;
}

static void *reset_in_vain(void *arg)
{
        CUresult result = cuDevicePrimaryCtxReset(gt.device);

        gt_check(result == CUDA_ERROR_NOT_PERMITTED, "the reset", "%s", gt_result_name(result));
        return arg;
}

/* The driver refuses to end the context, and takes long to say so (GRSIM_LATENCY). A call waits for the answer. */
static void mode_stays(void)
{
        pthread_t ender;

        take_blocks();
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        pthread_create(&ender, NULL, reset_in_vain, NULL);
        while (call_count("cuDevicePrimaryCtxReset_v2") == 0)
                gt_sleep_us(1000);
        look_at_blocks("meanwhile");
        pthread_join(ender, NULL);
        look_at_blocks("after");
}

/* Likewise, with another context: nothing leaves beside work that was submitted meanwhile. */
static void mode_stays_busy(void)
{
        CUcontext second;
        pthread_t ender;

        GR_MUST(cuCtxCreate(&second, NULL, 0, gt.device));
        gt_attach(&gt);
        take_blocks();
        stream = gt_stream();
        pthread_create(&ender, NULL, reset_in_vain, NULL);
        while (call_count("cuDevicePrimaryCtxReset_v2") == 0)
                gt_sleep_us(1000);
        GR_MUST(gt_spin(&gt, stream, 4000000));
        GR_MUST(gt_fill(&gt, stream, blocks[MANY - 1], 7, 16));
        gt_check(!fall_asleep("sleep --timeout 0"), "sleep", "refused");
        pthread_join(ender, NULL);
        GR_MUST(cuStreamSynchronize(stream));
}

/*
 * GRSIM_DEVICES=2. While one device's context ends, which takes long (GRSIM_LATENCY), the other device's memory comes
 * back, and does not leave beside a call. (GPURECLAIM_WAIT=0: the calls do not wait for that end.)
 */
static void mode_ending(void)
{
        pthread_t ender, asker;
        _Atomic bool begun = false;
        CUdeviceptr there;
        CUcontext second;

        take_blocks();
        GR_MUST(cuDevicePrimaryCtxRetain(&second, 1));
        GR_MUST(cuCtxSetCurrent(second));
        GR_MUST(cuMemAlloc(&there, 8 * MIB));
        gt_attach(&gt);
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        pthread_create(&ender, NULL, reset_second, NULL);
        while (call_count("cuDevicePrimaryCtxReset_v2") == 0)
                gt_sleep_us(1000);
        GR_MUST(cuMemcpyDtoH(&word, blocks[MANY - 1], 4));
        pthread_create(&asker, NULL, ask_slowly, &begun);
        while (!atomic_load(&begun) || call_count("cuPointerGetAttribute") == 0)
                gt_sleep_us(1000);
        pthread_join(ender, NULL);
        gt_check(!fall_asleep("sleep --timeout 100ms"), "sleep", "refused beside a call");
        pthread_join(asker, NULL);
        look_at_blocks("after");
        gt_check(fall_asleep("sleep"), "sleep", "when the call has ended");
        look_at_blocks("after that");
}

/* Looks at the blocks, which wakes the process. */
static void *look_in(void *context)
{
        GR_MUST(cuCtxSetCurrent(context));
        look_at_blocks("after");
        return NULL;
}

/* Begins to wake, which takes long (GRSIM_LATENCY); returns after so many pieces have come. */
static pthread_t begin_to_wake(CUcontext context, unsigned long pieces)
{
        unsigned long before = call_count("cuMemcpyHtoDAsync_v2");
        pthread_t thread;

        pthread_create(&thread, NULL, look_in, context);
        while (call_count("cuMemcpyHtoDAsync_v2") < before + pieces)
                gt_sleep_us(1000);
        return thread;
}

/* GRSIM_DEVICES=2. The context that the first sleep was in goes while the other device's memory comes back. */
static void mode_first(void)
{
        unsigned long pieces;
        CUdeviceptr there;
        pthread_t thread;
        CUcontext second;

        GR_MUST(cuMemAlloc(&there, 8 * MIB));
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        pieces = call_count("cuMemcpyHtoDAsync_v2");
        GR_MUST(cuMemcpyDtoH(&word, there, 4));
        pieces = call_count("cuMemcpyHtoDAsync_v2") - pieces;
        GR_MUST(cuDevicePrimaryCtxRetain(&second, 1));
        GR_MUST(cuCtxSetCurrent(second));
        take_blocks();
        gt_check(fall_asleep("sleep"), "sleep", "asked with two devices");
        thread = begin_to_wake(second, pieces + 4);
        GR_MUST(cuDevicePrimaryCtxReset(gt.device));
        pieces = call_count("cuMemcpyHtoDAsync_v2");
        pthread_join(thread, NULL);
        pieces = call_count("cuMemcpyHtoDAsync_v2") - pieces;
        gt_check(pieces == 0, "copies", "%lu after the end of the context that has the pinned memory", pieces);
        gt_check(fall_asleep("sleep"), "sleep", "asked without the first context");
        look_at_blocks("after that");
}

/* GRSIM_DEVICES=2. The second device is used for the first time while memory comes back: it can reach all of it. */
static void mode_joins(void)
{
        CUdeviceptr there;
        pthread_t thread;
        CUcontext second;

        take_blocks();
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        thread = begin_to_wake(gt.ctx, 2);
        GR_MUST(cuDevicePrimaryCtxRetain(&second, 1));
        GR_MUST(cuCtxSetCurrent(second));
        pthread_join(thread, NULL);
        GR_MUST(cuMemAlloc(&there, sizes[MANY - 1]));
        for (int i = 0; i < MANY; i++) {
                CUresult result = cuMemcpyDtoD(there, blocks[i], sizes[i]);

                gt_check(result == CUDA_SUCCESS, "a copy by the second device", "%s", gt_result_name(result));
        }
}

static void *end_inside(void *arg)
{
        gt_attach(&gt);
        pthread_cancel(pthread_self());
        GR_MUST(cuMemcpyDtoH(&word, blocks[MANY - 1], 4));
        pthread_testcancel();
        return arg;
}

/* A thread ends in a call (GRSIM_TRACE: each call of the driver writes a line). That keeps nobody awake. */
static void mode_cancelled(void)
{
        pthread_t thread;
        void *ended;

        take_blocks();
        pthread_create(&thread, NULL, end_inside, NULL);
        pthread_join(thread, &ended);
        gt_check(ended == PTHREAD_CANCELED, "thread", "cancelled");
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        look_at_blocks("after");
}

/* More processors come online after the first sleep. */
static void mode_processors(void)
{
        processors = 1;
        take_blocks();
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        look_at_blocks("after");
        processors = 64;
        gt_check(fall_asleep("sleep"), "sleep", "asked with more processors");
        look_at_blocks("after that");
}

static void *ask_to_sleep(void *arg)
{
        (void)arg;
        fall_asleep("sleep --timeout 0");
        return NULL;
}

/* Returns when memory has begun to leave, which takes long (GRSIM_LATENCY). */
static pthread_t begin_to_leave(void)
{
        unsigned long before = call_count("cuMemcpyDtoHAsync_v2");
        pthread_t thread;

        take_blocks();
        pthread_create(&thread, NULL, ask_to_sleep, NULL);
        while (call_count("cuMemcpyDtoHAsync_v2") == before)
                gt_sleep_us(1000);
        return thread;
}

/* A call that comes while memory leaves need not wait until all has left. */
static void mode_turned(void)
{
        pthread_t thread = begin_to_leave();
        unsigned long copies;

        look_at_blocks("after");
        pthread_join(thread, NULL);
        copies = call_count("cuMemcpyDtoHAsync_v2");
        gt_check(copies < 20, "turned round", "after %lu copies", copies);
}

/* It ends while memory leaves. */
static void mode_leaving(void)
{
        begin_to_leave();
}

/* What another process could open stays. */
static void mode_exported(void)
{
        CUipcMemHandle handle;
        size_t before;

        take_blocks();
        GR_MUST(cuIpcGetMemHandle(&handle, blocks[MANY - 1]));
        before = on_device();
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        gt_check(on_device() >= sizes[MANY - 1] + gt.context_bytes && on_device() < before, "exported",
                 "%.0f MiB stay of %.0f", gt_mib(on_device()), gt_mib(before));
        look_at_blocks("after");
}

/* It ends asleep; so does a child, which cannot use the driver. */
static void mode_exit(void)
{
        pid_t child;
        int status;

        take_blocks();
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        child = fork();
        if (child == 0) {
                CUdeviceptr ptr;

                _exit(cuMemAlloc(&ptr, MIB) == CUDA_SUCCESS);
        }
        waitpid(child, &status, 0);
        gt_check(status == 0, "child", "status %d", status);
}

/* The context goes with its memory, wherever that is. */
static void mode_reset(void)
{
        size_t asleep;

        take_blocks();
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        asleep = on_host();
        GR_MUST(cuDevicePrimaryCtxReset(gt.device));
        gt_check(on_host() + 190 * MIB < asleep, "host", "%.0f MiB less", gt_mib(asleep - on_host()));
        GR_MUST(cuDevicePrimaryCtxRetain(&gt.ctx, gt.device));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        take_blocks();
        gt_check(fall_asleep("sleep"), "sleep", "asked in the next context");
        look_at_blocks("after");
        free_blocks();
}

/* Another process, without the library, takes most of the device; it ends when told. */
struct taker {
        pid_t pid;
        int to, from;
};

static void take_most(int in, int out)
{
        CUdeviceptr ptrs[1024];
        CUcontext context;
        size_t count = 0;
        char byte;

        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        while (count < 1024 && cuMemAlloc(&ptrs[count], 2 * MIB) == CUDA_SUCCESS)
                count++;
        for (int i = 0; i < 50 && count > 0; i++) /* what is left is not enough */
                GR_MUST(cuMemFree(ptrs[--count]));
        if (write(out, &count, sizeof(count)) == sizeof(count) && read(in, &byte, 1) == 1)
                cuDevicePrimaryCtxReset(0);
        _exit(0);
}

static struct taker start_taker(char *program, size_t *ret_blocks)
{
        struct taker taker;
        int to[2], from[2];

        if (pipe(to) || pipe(from) || (taker.pid = fork()) < 0)
                gt_die("no process");
        if (taker.pid == 0) {
                char in[16], out[16];

                snprintf(in, sizeof(in), "%d", to[0]);
                snprintf(out, sizeof(out), "%d", from[1]);
                unsetenv("LD_PRELOAD");
                execl(program, program, "take", in, out, NULL);
                _exit(1);
        }
        taker.to = to[1];
        taker.from = from[0];
        if (read(taker.from, ret_blocks, sizeof(*ret_blocks)) != sizeof(*ret_blocks))
                gt_die("the other process takes nothing");
        return taker;
}

static void end_taker(struct taker taker)
{
        if (write(taker.to, "", 1) != 1 || waitpid(taker.pid, NULL, 0) != taker.pid)
                gt_die("the other process does not end");
}

static void *end_taker_late(void *arg)
{
        gt_sleep_us(300000);
        end_taker(*(struct taker *)arg);
        return NULL;
}

/* While it sleeps another process has its room. With GPURECLAIM_WAIT the call that wakes it waits for that one. */
static void mode_full(char *program)
{
        const char *wait = getenv("GPURECLAIM_WAIT");
        struct taker taker;
        pthread_t thread;
        CUresult result;
        size_t count, before;

        take_blocks();
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        taker = start_taker(program, &count);
        gt_check(count > 190, "the other process", "%zu MiB", 2 * count);
        before = on_device();
        if (strcmp(wait, "0") == 0) {
                result = cuMemcpyDtoH(&word, blocks[MANY - 1], 4);
                gt_check(result == CUDA_ERROR_OUT_OF_MEMORY, "a copy", "%s", gt_result_name(result));
                result = gt_fill(&gt, NULL, blocks[0], 7, 16);
                gt_check(result == CUDA_ERROR_OUT_OF_MEMORY, "a launch", "%s", gt_result_name(result));
                gt_check(fall_asleep("sleep"), "sleep", "goes on");
                gt_check(on_device() == before, "the device", "no part is kept: %.0f MiB, then %.0f", gt_mib(before),
                         gt_mib(on_device()));
                end_taker(taker);
        } else {
                pthread_create(&thread, NULL, end_taker_late, &taker);
                result = cuMemcpyDtoH(&word, blocks[MANY - 1], 4);
                gt_check(result == CUDA_SUCCESS, "a copy", "%s", gt_result_name(result));
                pthread_join(thread, NULL);
        }
        look_at_blocks("after");
}

/*
 * A call fails once, while memory leaves or comes back. In a first run the program counts the calls before that, and
 * then runs anew.
 */
static void mode_failing(char **argv)
{
        const char *symbol = argv[2];
        bool leaves = strcmp(symbol, "cuMemUnmap") == 0 || strcmp(symbol, "cuMemcpyDtoHAsync_v2") == 0;
        CUresult result;
        char fault[96];

        take_blocks();
        if (!getenv("GRSIM_FAULT")) {
                GR_CHECK(leaves || fall_asleep("sleep"));
                snprintf(fault, sizeof(fault), "%s:%lu=1", symbol, call_count(symbol) + 3);
                setenv("GRSIM_FAULT", fault, 1);
                execv(argv[0], argv);
        }
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        result = cuMemcpyDtoH(&word, blocks[MANY - 1], 4);
        gt_check(result == CUDA_SUCCESS, "the first call", "%s", gt_result_name(result));
        look_at_blocks("after");
        gt_check(fall_asleep("sleep"), "sleep", "asked again");
        look_at_blocks("after that");
}

/* GRSIM_DEVICES=2. The first call, on either, wakes both; then one of the contexts goes while it sleeps. */
static void mode_devices(void)
{
        CUcontext second;
        CUdeviceptr there;

        take_blocks();
        GR_MUST(cuDevicePrimaryCtxRetain(&second, 1));
        GR_MUST(cuCtxSetCurrent(second));
        GR_MUST(cuMemAlloc(&there, 8 * MIB));
        GR_MUST(cuMemsetD32(there, 5, 2 * MIB));
        for (volatile int i = 0; i < 2; i++) {
                gt_check(fall_asleep("sleep"), "sleep", "asked");
                GR_MUST(cuMemcpyDtoH(&word, there, 4));
                gt_check(word == 5, "the second device", "%u", word);
                look_at_blocks("after");
        }
        gt_check(fall_asleep("sleep"), "sleep", "asked");
        GR_MUST(cuDevicePrimaryCtxReset(1));
        gt_attach(&gt);
        look_at_blocks("after the end of the other context");
        gt_check(fall_asleep("sleep"), "sleep", "asked with one device that has nothing");
}

static _Atomic bool stop_work;
static _Atomic unsigned rounds;

/* Allocates, fills by a kernel or a memset, copies, checks and frees, at random. */
static void *work(void *arg)
{
        unsigned seed = (unsigned)(uintptr_t)arg;
        uintptr_t wrong = 0;
        CUstream mine;

        gt_attach(&gt);
        mine = gt_stream();
        while (!atomic_load(&stop_work)) {
                size_t bytes = (size_t)(rand_r(&seed) % 64 + 1) * (rand_r(&seed) % 2 ? 32 * KIB : 256 * KIB);
                uint32_t value = (uint32_t)rand_r(&seed), *copy = malloc(bytes);
                CUdeviceptr from, to;

                GR_MUST(cuMemAlloc(&from, bytes));
                GR_MUST(cuMemAlloc(&to, bytes));
                GR_MUST(gt_fill(&gt, mine, from, value, bytes / 4));
                if (rand_r(&seed) % 2)
                        gt_sleep_us(rand_r(&seed) % 3000);
                GR_MUST(cuMemcpyDtoDAsync(to, from, bytes, mine));
                GR_MUST(cuStreamSynchronize(mine));
                gt_sleep_us(rand_r(&seed) % 60000);
                GR_MUST(cuMemcpyDtoH(copy, to, bytes));
                for (size_t i = 0; i < bytes / 4; i++)
                        wrong += copy[i] != value;
                GR_MUST(cuMemFree(from));
                GR_MUST(cuMemFree(to));
                free(copy);
                atomic_fetch_add(&rounds, 1);
        }
        return (void *)wrong;
}

static void mode_random(void)
{
        pthread_t threads[4];
        unsigned slept = 0;
        void *wrong;

        take_blocks();
        for (uintptr_t i = 0; i < 4; i++)
                pthread_create(&threads[i], NULL, work, (void *)(i + 1));
        for (volatile int i = 0; i < 25; i++)
                slept += fall_asleep("sleep --timeout 1s");
        atomic_store(&stop_work, true);
        for (int i = 0; i < 4; i++) {
                pthread_join(threads[i], &wrong);
                gt_check(!wrong, "thread", "%zu words are wrong", (size_t)(uintptr_t)wrong);
        }
        gt_check(slept > 0, "slept", "%s", slept > 0 ? "some of 25 times" : "never");
        printf("~ slept %u of 25 times, %u rounds\n", slept, atomic_load(&rounds));
        look_at_blocks("after");
}

/* No call touched memory that was not there. The exit status. */
static int no_misuse(void)
{
        unsigned long (*count)(void);
        void *found = dlsym(RTLD_DEFAULT, "grSimMisuseCount");

        memcpy(&count, &found, sizeof(count));
        gt_check(count() == 0, "misuse", "%lu accesses", count());
        return GR_CHECK_RESULT();
}

int main(int argc, char **argv)
{
        static const struct {
                const char *name;
                void (*run)(void);
        } modes[] = {
                {"contents", mode_contents},     {"calls", mode_calls},     {"busy", mode_busy},
                {"exported", mode_exported},     {"inside", mode_inside},   {"turned", mode_turned},
                {"leaving", mode_leaving},       {"devices", mode_devices}, {"exit", mode_exit},
                {"reset", mode_reset},           {"random", mode_random},   {"ending", mode_ending},
                {"stays-busy", mode_stays_busy}, {"stays", mode_stays},     {"slowly", mode_slowly},
                {"first", mode_first},           {"joins", mode_joins},     {"processors", mode_processors},
                {"cancelled", mode_cancelled},
        };

        if (argc > 3 && strcmp(argv[1], "take") == 0)
                take_most(atoi(argv[2]), atoi(argv[3]));
        if (argc > 1 && strcmp(argv[1], "full") == 0) {
                char device[] = "/tmp/gr-sleep-XXXXXX";

                GR_CHECK(mkstemp(device) >= 0);
                setenv("GRSIM_SHARED", device, 1);
                gt_open(&gt);
                mode_full(argv[0]);
                unlink(device);
                return no_misuse();
        }
        if (argc > 1 && strcmp(argv[1], "cancelled") == 0)
                setenv("GRSIM_TRACE", "/dev/null", 1);
        gt_open(&gt);
        if (argc > 2 && strcmp(argv[1], "failing") == 0) {
                mode_failing(argv);
                return no_misuse();
        }
        for (size_t i = 0; argc > 1 && i < sizeof(modes) / sizeof(modes[0]); i++)
                if (strcmp(argv[1], modes[i].name) == 0) {
                        modes[i].run();
                        return no_misuse();
                }
        return 2;
}
