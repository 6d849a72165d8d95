/* Contexts, what is left of them when they end, and memory that two processes share. */
#include "facts.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static CUcontext context(void)
{
        CUcontext ctx;

        GR_MUST(cuCtxCreate(&ctx, NULL, 0, gt.device));
        return ctx;
}

static const char *current(void)
{
        CUcontext ctx = NULL;

        GR_MUST(cuCtxGetCurrent(&ctx));
        return !ctx ? "none" : ctx == gt.ctx ? "the primary one" : "another";
}

static void *without(void *unused)
{
        CUdeviceptr p, in_use = *(CUdeviceptr *)unused;
        size_t available, total;
        CUdevice device;
        CUcontext ctx;
        CUstream stream;

        fact_code("no context: cuMemAlloc", cuMemAlloc(&p, MIB));
        fact_code("no context: cuMemGetInfo", cuMemGetInfo(&available, &total));
        fact_code("no context: cuCtxGetDevice", cuCtxGetDevice(&device));
        fact_code("no context: cuCtxSynchronize", cuCtxSynchronize());
        fact_code("no context: cuCtxPopCurrent", cuCtxPopCurrent(&ctx));
        fact_code("no context: cuStreamCreate", cuStreamCreate(&stream, 0));
        fact_code("no context: cuMemAllocAsync", cuMemAllocAsync(&p, MIB, NULL));
        fact_code("no context: cuMemsetD8", cuMemsetD8(in_use, 0, 16));
        fact_code("no context: range", cuMemGetAddressRange(&p, &total, in_use));
        fact_code("no context: cuPointerGetAttribute",
                  cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, in_use));
        fact_code("no context: cuMemFree of 0", cuMemFree(0));
        fact_code("no context: cuMemFree", cuMemFree(in_use));
        fact_code("no context: cuMemFree of it once more", cuMemFree(in_use));
        return unused;
}

void facts_contexts(void)
{
        typedef CUresult CUDAAPI attach(CUcontext *, unsigned);
        typedef CUresult CUDAAPI detach(CUcontext);
        typedef CUresult CUDAAPI context_event(CUcontext, CUevent);
        attach *ctx_attach = EXPORTED(attach, "cuCtxAttach");
        detach *ctx_detach = EXPORTED(detach, "cuCtxDetach");
        context_event *record = EXPORTED(context_event, "cuCtxRecordEvent"),
                      *wait = EXPORTED(context_event, "cuCtxWaitEvent");
        CUstream busy = stream_of(CU_STREAM_NON_BLOCKING), theirs;
        CUcontext ctx, two, popped = NULL;
        CUdeviceptr p = block(4 * MIB), q;
        CUevent event, their_event;
        unsigned version = 0;
        pthread_t thread;

        if (pthread_create(&thread, NULL, without, &p) != 0 || pthread_join(thread, NULL) != 0)
                gt_die("facts: no thread");
        GR_MUST(cuDevicePrimaryCtxRetain(&ctx, gt.device));
        fact_yes("the primary context retained twice is one", ctx == gt.ctx);
        GR_MUST(cuDevicePrimaryCtxRelease(gt.device));
        fact_code("cuCtxDestroy of the primary context", cuCtxDestroy(gt.ctx));
        GR_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        p = block(4 * MIB);

        two = context();
        fact("then current is", "%s", current());
        GR_MUST(cuEventCreate(&their_event, CU_EVENT_DISABLE_TIMING));
        theirs = stream_of(CU_STREAM_NON_BLOCKING);
        q = block(4 * MIB);
        GR_MUST(cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, p));
        fact_yes("the first one's memory is still the first one's", ctx == gt.ctx);
        fact_code("cuMemsetD8 of the first one's memory", cuMemsetD8(p, 1, 4096));
        fact_code("cuMemsetD8Async on the first one's stream", cuMemsetD8Async(p, 1, 4096, busy));
        fact_code("a kernel of the first one on its own stream", gt_spin(&gt, busy, 1));
        fact_code("a kernel of the first one on the second's stream", gt_spin(&gt, theirs, 1));
        fact_code("cuMemAllocAsync on the first one's stream", cuMemAllocAsync(&q, MIB, busy));
        GR_MUST(cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, q));
        fact("that is memory of", "%s", ctx == gt.ctx ? "the first one" : ctx ? "the second" : "none");
        GR_MUST(cuMemFreeAsync(q, theirs));
        fact_code("cuEventRecord of the first one's event on the second's stream", cuEventRecord(event, theirs));
        fact_code("cuEventRecord of the first one's event on its stream", cuEventRecord(event, busy));
        fact_code("cuStreamWaitEvent of the second's stream", cuStreamWaitEvent(theirs, event, 0));
        fact_code("cuEventRecord of the second's event on the legacy stream", cuEventRecord(their_event, NULL));
        fact_code("cuEventRecord of the first one's event on the legacy stream", cuEventRecord(event, NULL));
        if (record && wait) {
                fact_code("cuCtxRecordEvent of the first, the first one's event", record(gt.ctx, event));
                fact_code("cuCtxRecordEvent of the first, the second's event", record(gt.ctx, their_event));
                fact_code("cuCtxWaitEvent of the second, the first one's event", wait(two, event));
        }
        fact_changed(true);
        FACT_WAITS("cuMemFree of the first one's memory, with its stream at work", busy, cuMemFree(p));
        fact_changed(false);
        GR_MUST(cuMemAlloc(&q, 4 * MIB));
        FACT_WAITS("cuMemFree of the second's memory, with the first one's stream at work", busy, cuMemFree(q));
        FACT_WAITS("cuCtxSynchronize of the second, with the first one's stream at work", busy, cuCtxSynchronize());
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        q = block(4 * MIB);
        GR_MUST(cuCtxSetCurrent(two));
        fact_code("cuCtxPopCurrent", cuCtxPopCurrent(&popped));
        fact_yes("that was the second one", popped == two);
        fact("then current is", "%s", current());
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        FACT_WAITS("cuCtxDestroy of the second, with the first one's stream at work", busy, cuCtxDestroy(two));
        fact("then current is", "%s", current());
        fact_code("cuMemFree of the first one's", cuMemFree(q));
        if (ctx_attach && ctx_detach) {
                two = context();
                fact_code("cuCtxAttach", ctx_attach(&ctx, 0));
                fact_code("cuCtxDetach", ctx_detach(two));
                fact_code("it is alive", cuCtxGetApiVersion(two, &version));
                q = block(4 * MIB);
                fact_code("cuCtxDetach once more", ctx_detach(two));
                fact("then current is", "%s", current());
                fact_code("cuMemFree of its memory", cuMemFree(q));
        }
}

void facts_ended(void)
{
        CUcontext two = context();
        CUdeviceptr p, ours = block(64 * MIB);
        size_t total;

        fact_code("cuCtxDestroy of the current one", cuCtxDestroy(two));
        fact("then current is", "%s", current());
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        fact_code("range of its memory", cuMemGetAddressRange(&p, &total, ours));
        fact_code("cuMemFree of its memory", cuMemFree(ours));
}

/* Captures and contexts that begin and end beside them. */
void facts_ended_captures(void)
{
        CUcontext two;
        CUstream own;
        CUdeviceptr p;

        two = context();
        own = stream_of(CU_STREAM_NON_BLOCKING);
        GR_MUST(cuStreamBeginCapture(own, CU_STREAM_CAPTURE_MODE_GLOBAL));
        fact_code("cuCtxDestroy with a capture open", cuCtxDestroy(two));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        fact_code("cuMemAlloc then", cuMemAlloc(&p, 64 * MIB));
        fact_code("cuMemFree then", cuMemFree(p));
        two = context();
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        own = stream_of(CU_STREAM_NON_BLOCKING);
        GR_MUST(cuStreamBeginCapture(own, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(cuCtxSetCurrent(two));
        fact_code("cuCtxSynchronize beside a capture of another", cuCtxSynchronize());
        fact_changed(true);
        fact_code("cuMemAlloc beside a capture of another", cuMemAlloc(&p, MIB));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        fact_end("then the capture ends", own);
        fact_changed(false);
        GR_MUST(cuStreamBeginCapture(own, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuCtxSetCurrent(two));
        fact_code("cuCtxSynchronize beside a relaxed capture of another", cuCtxSynchronize());
        fact_code("cuMemAlloc beside a relaxed capture of another", cuMemAlloc(&p, MIB));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        fact_end("then the capture ends", own);
        GR_MUST(cuStreamBeginCapture(own, CU_STREAM_CAPTURE_MODE_GLOBAL));
        fact_code("cuCtxDestroy beside a capture of another", cuCtxDestroy(two));
        fact_end("then the capture ends", own);
        GR_MUST(cuStreamBeginCapture(own, CU_STREAM_CAPTURE_MODE_GLOBAL));
        fact_code("cuCtxCreate beside a capture", cuCtxCreate(&two, NULL, 0, gt.device));
        fact_end("then the capture ends", own);
        GR_MUST(cuCtxSetCurrent(gt.ctx));
}

/* The primary context, with a capture open in it. */
void facts_reset(void)
{
        CUdeviceptr p, of_first = block(4 * MIB);
        CUstream busy = stream_of(CU_STREAM_NON_BLOCKING), own;
        size_t available, total;
        unsigned flags = 0;
        CUcontext again;
        CUdevice device;
        int active = 7;

        fact_code("cuDevicePrimaryCtxGetState", cuDevicePrimaryCtxGetState(gt.device, &flags, &active));
        fact("primary context is active", "%d", active);
        GR_MUST(cuStreamBeginCapture(busy, CU_STREAM_CAPTURE_MODE_RELAXED));
        fact_code("cuDevicePrimaryCtxReset with a capture open", cuDevicePrimaryCtxReset(gt.device));
        GR_MUST(cuDevicePrimaryCtxGetState(gt.device, &flags, &active));
        fact("then it is active", "%d", active);
        fact("then current is", "%s", current());
        fact_code("then cuMemAlloc", cuMemAlloc(&p, MIB));
        fact_code("then cuMemFree of its memory", cuMemFree(of_first));
        fact_code("then cuMemFree of 0", cuMemFree(0));
        fact_code("then cuMemGetInfo", cuMemGetInfo(&available, &total));
        fact_code("then cuCtxGetDevice", cuCtxGetDevice(&device));
        fact_code("then cuCtxSynchronize", cuCtxSynchronize());
        fact_code("then cuStreamCreate", cuStreamCreate(&own, 0));
        fact_code("then cuMemAllocAsync", cuMemAllocAsync(&p, MIB, NULL));
        fact_code("then cuMemHostAlloc", cuMemHostAlloc(&(void *){NULL}, 4096, 0));
        fact_code("then cuMemAllocManaged", cuMemAllocManaged(&p, MIB, CU_MEM_ATTACH_GLOBAL));
        fact_code("then cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease(gt.device));
        GR_MUST(cuDevicePrimaryCtxRetain(&again, gt.device));
        fact_yes("retained again it is the same", again == gt.ctx);
        fact("then current is", "%s", current());
        fact_code("then cuMemAlloc", cuMemAlloc(&p, MIB));
        GR_MUST(cuCtxSetCurrent(again));
        fact_code("then cuMemAlloc, made current again", cuMemAlloc(&p, 64 * MIB));
        fact_code("then cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease(gt.device));
        fact_code("then cuMemFree of its memory", cuMemFree(p));
        fact_code("then cuDevicePrimaryCtxRelease once more", cuDevicePrimaryCtxRelease(gt.device));
}

struct seat {
        CUcontext ctx;
        int to[2], back[2];
};

static void *sit(void *argument)
{
        struct seat *seat = argument;
        CUdeviceptr p;
        char c = 0;

        GR_MUST(cuCtxSetCurrent(seat->ctx));
        if (write(seat->back[1], &c, 1) != 1 || read(seat->to[0], &c, 1) != 1)
                gt_die("facts: no pipe");
        fact_code("destroyed elsewhere: cuMemAlloc", cuMemAlloc(&p, MIB));
        fact_code("destroyed elsewhere: cuCtxSynchronize", cuCtxSynchronize());
        return NULL;
}

/* A context that ends under a thread in which it is current. */
void facts_ended_elsewhere(void)
{
        struct seat seat = {.ctx = context()};
        unsigned version = 0;
        pthread_t thread;
        char c = 0;

        GR_MUST(cuCtxSetCurrent(gt.ctx));
        if (pipe(seat.to) != 0 || pipe(seat.back) != 0 || pthread_create(&thread, NULL, sit, &seat) != 0 ||
            read(seat.back[0], &c, 1) != 1)
                gt_die("facts: no thread");
        fact_code("cuCtxDestroy of one that is current in another thread", cuCtxDestroy(seat.ctx));
        if (write(seat.to[1], &c, 1) != 1 || pthread_join(thread, NULL) != 0)
                gt_die("facts: no thread");
        fact_code("cuCtxGetApiVersion of it", cuCtxGetApiVersion(seat.ctx, &version));
}

static void open_handle(const CUipcMemHandle *handle)
{
        CUdeviceptr p = 0, again = 0, base = 0;
        size_t bytes = 0;

        fact_code("opened elsewhere", cuIpcOpenMemHandle(&p, *handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        fact_code("opened elsewhere twice", cuIpcOpenMemHandle(&again, *handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        fact_yes("at the same address", p == again);
        fact_code("range of it there", cuMemGetAddressRange(&base, &bytes, p));
        fact("range of it there is", "%s, %zu KiB", base == p ? "there" : "elsewhere", bytes >> 10);
        fact_code("cuMemFree of it there", cuMemFree(p));
        fact_code("cuMemFreeAsync of it there", cuMemFreeAsync(p, NULL));
        fact_code("cuIpcGetMemHandle of it there", cuIpcGetMemHandle(&(CUipcMemHandle){{0}}, p));
        fact_code("closed inside", cuIpcCloseMemHandle(p + MIB));
        fact_code("closed", cuIpcCloseMemHandle(p));
        fact_code("closed twice", cuIpcCloseMemHandle(p));
        fact_code("closed thrice", cuIpcCloseMemHandle(p));
}

void facts_shared(void)
{
        CUdeviceptr p, q, managed, pooled;
        CUipcMemHandle handle, other;
        int to[2];
        pid_t pid;

        p = block(4 * MIB);
        fact_code("cuIpcGetMemHandle", cuIpcGetMemHandle(&handle, p));
        fact_code("cuIpcGetMemHandle inside", cuIpcGetMemHandle(&other, p + MIB));
        fact_yes("it is the same handle", !memcmp(&handle, &other, sizeof handle));
        fact_code("cuIpcOpenMemHandle in the same process",
                  cuIpcOpenMemHandle(&q, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        fact_code("cuIpcOpenMemHandle with no flags", cuIpcOpenMemHandle(&q, handle, 0));
        fact_code("cuIpcCloseMemHandle of cuMemAlloc's memory", cuIpcCloseMemHandle(p));
        GR_MUST(cuMemAllocManaged(&managed, MIB, CU_MEM_ATTACH_GLOBAL));
        fact_code("cuIpcGetMemHandle of managed memory", cuIpcGetMemHandle(&other, managed));
        GR_MUST(cuMemFree(managed));
        GR_MUST(cuMemAllocAsync(&pooled, 4 * MIB, NULL));
        fact_code("cuIpcGetMemHandle of a pool's memory", cuIpcGetMemHandle(&other, pooled));
        GR_MUST(cuMemFreeAsync(pooled, NULL));
        fact_code("cuIpcGetMemHandle of a nonsense address", cuIpcGetMemHandle(&other, 0x1234));
        fflush(stdout);
        if (pipe(to) != 0)
                gt_die("facts: no pipe");
        pid = fork();
        if (pid == 0) {
                char fd[16];

                snprintf(fd, sizeof fd, "%d", to[0]);
                execl("/proc/self/exe", "facts", "--open", fd, (char *)NULL);
                _exit(127);
        }
        if (pid < 0 || write(to[1], &handle, sizeof handle) != (ssize_t)sizeof handle || waitpid(pid, NULL, 0) != pid)
                gt_die("facts: no second process");
        GR_MUST(cuMemFree(p));
}

void facts_open(int fd)
{
        CUipcMemHandle handle;

        if (read(fd, &handle, sizeof handle) != (ssize_t)sizeof handle)
                gt_die("facts: no handle");
        open_handle(&handle);
}
