/* Captures: what may be called beside them, and how they end. */
#include "facts.h"

#include "kernels.h"

#include <pthread.h>
#include <stdio.h>

typedef CUresult CUDAAPI context_event(CUcontext, CUevent);

/* What a call beside a capture works on; made anew for each call, and what it leaves is dropped after it. */
static struct {
        CUstream captured, other;
        CUdeviceptr block, pooled, managed, reserved;
        CUmemGenericAllocationHandle memory, spare;
        void *pinned, *registered;
        CUevent passed, spare_event;
        CUmemoryPool pool;
        CUstream spare_stream;
        CUgraph graph;
        CUgraphExec exec;
} on;

static char plain[2 * 4096] __attribute__((aligned(4096)));

static CUmemAllocationProp device_memory(void)
{
        return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                     .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
}

static CUresult map_access(void)
{
        CUmemAccessDesc access = {.location = device_memory().location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

        return cuMemSetAccess(on.reserved, GT_PAGE, &access, 1);
}

static void make(void)
{
        CUmemAllocationProp prop = device_memory();
        CUmemPoolProps pool = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = prop.location};

        on.captured = stream_of(0);
        on.other = stream_of(CU_STREAM_NON_BLOCKING);
        on.spare_stream = stream_of(CU_STREAM_NON_BLOCKING);
        on.block = block(4 * MIB);
        GR_MUST(cuMemAllocAsync(&on.pooled, MIB, on.other));
        GR_MUST(cuMemAllocManaged(&on.managed, MIB, CU_MEM_ATTACH_GLOBAL));
        GR_MUST(cuMemAllocHost(&on.pinned, 4096));
        GR_MUST(cuMemCreate(&on.memory, GT_PAGE, &prop, 0));
        GR_MUST(cuMemAddressReserve(&on.reserved, GT_PAGE, 0, 0, 0));
        GR_MUST(cuMemMap(on.reserved, GT_PAGE, 0, on.memory, 0));
        GR_MUST(cuMemPoolCreate(&on.pool, &pool));
        GR_MUST(cuEventCreate(&on.passed, CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuEventCreate(&on.spare_event, CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuEventRecord(on.passed, on.other));
        GR_MUST(cuGraphCreate(&on.graph, 0));
        GR_MUST(cuGraphInstantiate(&on.exec, on.graph, 0));
        GR_MUST(cuCtxSynchronize());
}

/* Handles only once: what the call took is 0 by now. */
static void drop(void)
{
        GR_MUST(cuCtxSynchronize());
        cuMemFree(on.block);
        cuMemFree(on.pooled);
        cuMemFree(on.managed);
        if (on.pinned)
                cuMemFreeHost(on.pinned);
        if (on.registered)
                cuMemHostUnregister(on.registered);
        if (on.spare)
                cuMemRelease(on.spare);
        cuMemUnmap(on.reserved, GT_PAGE);
        if (on.memory)
                cuMemRelease(on.memory);
        GR_MUST(cuMemAddressFree(on.reserved, GT_PAGE));
        if (on.pool)
                GR_MUST(cuMemPoolDestroy(on.pool));
        GR_MUST(cuEventDestroy(on.passed));
        if (on.spare_event)
                GR_MUST(cuEventDestroy(on.spare_event));
        if (on.exec)
                GR_MUST(cuGraphExecDestroy(on.exec));
        GR_MUST(cuGraphDestroy(on.graph));
        GR_MUST(cuStreamDestroy(on.captured));
        GR_MUST(cuStreamDestroy(on.other));
        if (on.spare_stream)
                GR_MUST(cuStreamDestroy(on.spare_stream));
        on.registered = NULL;
        on.spare = 0;
}

/* A handle that the call takes away: gone only if it says so. */
#define GONE(handle, call)                                                                                             \
        ({                                                                                                             \
                CUresult result_ = (call);                                                                             \
                if (result_ == CUDA_SUCCESS)                                                                           \
                        (handle) = 0;                                                                                  \
                result_;                                                                                               \
        })
/* A name that begins with ~ marks one that the library answers itself. */
#define CALLS(X)                                                                                                       \
        X("~cuMemAlloc", cuMemAlloc(&p, MIB))                                                                          \
        X("cuMemAlloc of 0 bytes", cuMemAlloc(&p, 0))                                                                  \
        X("~cuMemFree", GONE(on.block, cuMemFree(on.block)))                                                           \
        X("cuMemFree of 0", cuMemFree(0))                                                                              \
        X("~cuMemFree inside a block", cuMemFree(on.block + 512))                                                      \
        X("cuMemFree of a pool's memory", GONE(on.pooled, cuMemFree(on.pooled)))                                       \
        X("cuMemAllocManaged", cuMemAllocManaged(&p, MIB, CU_MEM_ATTACH_GLOBAL))                                       \
        X("cuMemFree of managed memory", GONE(on.managed, cuMemFree(on.managed)))                                      \
        X("cuMemHostAlloc", cuMemHostAlloc(&leaked, 4096, 0))                                                          \
        X("~cuMemFreeHost", GONE(on.pinned, cuMemFreeHost(on.pinned)))                                                 \
        X("cuMemHostRegister", register_plain())                                                                       \
        X("cuMemGetInfo", cuMemGetInfo(&bytes, &bytes))                                                                \
        X("cuMemGetAddressRange", cuMemGetAddressRange(&p, &bytes, on.block))                                          \
        X("cuPointerGetAttribute", cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, on.block))                \
        X("~cuIpcGetMemHandle", cuIpcGetMemHandle(&ipc, on.block))                                                     \
        X("cuMemCreate", cuMemCreate(&on.spare, GT_PAGE, &prop, 0))                                                    \
        X("cuMemAddressReserve", cuMemAddressReserve(&p, GT_PAGE, 0, 0, 0))                                            \
        X("cuMemSetAccess", map_access())                                                                              \
        X("cuMemUnmap", cuMemUnmap(on.reserved, GT_PAGE))                                                              \
        X("cuMemRelease", GONE(on.memory, cuMemRelease(on.memory)))                                                    \
        X("cuMemAllocAsync on another stream", cuMemAllocAsync(&p, MIB, on.other))                                     \
        X("cuMemFreeAsync on another stream", GONE(on.pooled, cuMemFreeAsync(on.pooled, on.other)))                    \
        X("~cuMemFreeAsync there of cuMemAlloc's memory", GONE(on.block, cuMemFreeAsync(on.block, on.other)))          \
        X("~cuMemFreeAsync there of freed memory", cuMemFreeAsync(freed, on.other))                                    \
        X("cuMemAllocAsync on the legacy stream", cuMemAllocAsync(&p, MIB, NULL))                                      \
        X("cuMemFreeAsync on the legacy stream", GONE(on.pooled, cuMemFreeAsync(on.pooled, NULL)))                     \
        X("cuMemPoolCreate", cuMemPoolCreate(&pool, &pool_props))                                                      \
        X("cuMemPoolDestroy", GONE(on.pool, cuMemPoolDestroy(on.pool)))                                                \
        X("cuMemPoolTrimTo", cuMemPoolTrimTo(on.pool, 0))                                                              \
        X("cuMemPoolGetAttribute", cuMemPoolGetAttribute(on.pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used))            \
        X("cuMemPoolSetAttribute", cuMemPoolSetAttribute(on.pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &used))           \
        X("cuDeviceGraphMemTrim", cuDeviceGraphMemTrim(gt.device))                                                     \
        X("cuCtxSynchronize", cuCtxSynchronize())                                                                      \
        X("cuStreamSynchronize of another stream", cuStreamSynchronize(on.other))                                      \
        X("cuStreamSynchronize of the captured stream", cuStreamSynchronize(on.captured))                              \
        X("cuStreamSynchronize of the legacy stream", cuStreamSynchronize(NULL))                                       \
        X("cuStreamQuery of another stream", cuStreamQuery(on.other))                                                  \
        X("cuStreamQuery of the captured stream", cuStreamQuery(on.captured))                                          \
        X("cuStreamIsCapturing of the captured stream", cuStreamIsCapturing(on.captured, &capturing))                  \
        X("cuStreamIsCapturing of the legacy stream", cuStreamIsCapturing(NULL, &capturing))                           \
        X("cuStreamIsCapturing of the per-thread stream", cuStreamIsCapturing(CU_STREAM_PER_THREAD, &capturing))       \
        X("cuEventQuery", cuEventQuery(on.passed))                                                                     \
        X("cuEventSynchronize", cuEventSynchronize(on.passed))                                                         \
        X("cuEventRecord on another stream", cuEventRecord(on.passed, on.other))                                       \
        X("cuEventRecord on the legacy stream", cuEventRecord(on.passed, NULL))                                        \
        X("cuStreamWaitEvent on another stream", cuStreamWaitEvent(on.other, on.passed, 0))                            \
        X("cuStreamWaitEvent on the legacy stream", cuStreamWaitEvent(NULL, on.passed, 0))                             \
        X("cuStreamWaitEvent of the captured stream", cuStreamWaitEvent(on.captured, on.passed, 0))                    \
        X("cuCtxRecordEvent", record ? record(gt.ctx, on.passed) : CUDA_SUCCESS)                                       \
        X("cuCtxWaitEvent", wait ? wait(gt.ctx, on.passed) : CUDA_SUCCESS)                                             \
        X("cuEventCreate", cuEventCreate(&event, 0))                                                                   \
        X("cuEventDestroy", GONE(on.spare_event, cuEventDestroy(on.spare_event)))                                      \
        X("cuStreamCreate", cuStreamCreate(&stream, 0))                                                                \
        X("cuStreamDestroy of another stream", GONE(on.spare_stream, cuStreamDestroy(on.spare_stream)))                \
        X("cuMemcpyDtoH", cuMemcpyDtoH(plain, on.block, 4))                                                            \
        X("cuMemcpyDtoHAsync on another stream", cuMemcpyDtoHAsync(on.pinned, on.block, 4, on.other))                  \
        X("cuMemcpyDtoHAsync on the legacy stream", cuMemcpyDtoHAsync(on.pinned, on.block, 4, NULL))                   \
        X("cuMemsetD8", cuMemsetD8(on.block, 0, 4))                                                                    \
        X("a kernel on another stream", gt_spin(&gt, on.other, 1))                                                     \
        X("a kernel on the legacy stream", gt_spin(&gt, NULL, 1))                                                      \
        X("a kernel on the per-thread stream", gt_spin(&gt, CU_STREAM_PER_THREAD, 1))                                  \
        X("cuGraphInstantiate", cuGraphInstantiate(&exec, on.graph, 0))                                                \
        X("cuGraphLaunch on another stream", cuGraphLaunch(on.exec, on.other))                                         \
        X("cuGraphLaunch on the legacy stream", cuGraphLaunch(on.exec, NULL))                                          \
        X("cuGraphExecDestroy", GONE(on.exec, cuGraphExecDestroy(on.exec)))                                            \
        X("cuModuleLoadData", cuModuleLoadData(&module, gr_test_ptx))                                                  \
        X("cuStreamBeginCapture of another stream", begin_other())

static CUresult begin_other(void)
{
        CUresult result = cuStreamBeginCapture(on.other, CU_STREAM_CAPTURE_MODE_RELAXED);
        CUgraph graph = NULL;

        if (result == CUDA_SUCCESS)
                result = cuStreamEndCapture(on.other, &graph);
        if (graph)
                cuGraphDestroy(graph);
        return result;
}

static CUresult register_plain(void)
{
        CUresult result = cuMemHostRegister(plain, 4096, 0);

        if (result == CUDA_SUCCESS)
                on.registered = plain;
        return result;
}

static CUdeviceptr freed;

static const char *const call_names[] = {
#define X(name, call) name,
        CALLS(X)
#undef X
};
enum { N_CALLS = sizeof call_names / sizeof call_names[0] };

static CUresult call(int which)
{
        context_event *record = EXPORTED(context_event, "cuCtxRecordEvent"),
                      *wait = EXPORTED(context_event, "cuCtxWaitEvent");
        CUmemAllocationProp prop = device_memory();
        CUmemPoolProps pool_props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = prop.location};
        CUstreamCaptureStatus capturing;
        cuuint64_t used = 0;
        CUmodule module;
        CUipcMemHandle ipc;
        CUmemoryPool pool;
        CUgraphExec exec;
        CUstream stream;
        CUdeviceptr p = 0;
        CUcontext ctx;
        CUevent event;
        size_t bytes;
        void *leaked;
        int i = 0;

#define X(name, call)                                                                                                  \
        if (which == i++)                                                                                              \
                return call;
        CALLS(X)
#undef X
        return CUDA_ERROR_UNKNOWN;
}

struct meddling {
        int which;
        CUresult result;
};

static void *meddle(void *argument)
{
        struct meddling *meddling = argument;

        gt_attach(&gt);
        meddling->result = call(meddling->which);
        return NULL;
}

/* What the call answers beside a capture of that mode, and how the capture ends then. */
static void cell(int which, CUstreamCaptureMode mode, bool elsewhere, char *out, size_t room)
{
        struct meddling meddling = {which, CUDA_SUCCESS};
        CUgraph graph = NULL;
        CUresult end;

        make();
        freed = block(8 * MIB);
        GR_MUST(cuMemFree(freed));
        GR_MUST(cuStreamBeginCapture(on.captured, mode));
        if (elsewhere) {
                pthread_t thread;

                if (pthread_create(&thread, NULL, meddle, &meddling) != 0 || pthread_join(thread, NULL) != 0)
                        gt_die("facts: no thread");
        } else {
                meddling.result = call(which);
        }
        end = cuStreamEndCapture(on.captured, &graph);
        if (graph)
                GR_MUST(cuGraphDestroy(graph));
        snprintf(out, room, "%d/%d", (int)meddling.result, (int)end);
        drop();
}

void facts_captures(void)
{
        static const CUstreamCaptureMode modes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                                    CU_STREAM_CAPTURE_MODE_RELAXED};

        fact("result of each call and of the capture's end", "global, thread-local, relaxed; by another thread");
        for (int which = 0; which < N_CALLS; which++) {
                char cells[6][16];

                for (int i = 0; i < 6; i++)
                        cell(which, modes[i % 3], i >= 3, cells[i], sizeof cells[i]);
                fact_changed(call_names[which][0] == '~');
                fact(call_names[which] + (call_names[which][0] == '~'), "%s %s %s; %s %s %s", cells[0], cells[1],
                     cells[2], cells[3], cells[4], cells[5]);
        }
}

static void *end_elsewhere(void *stream)
{
        static CUresult result;
        CUgraph graph = NULL;

        gt_attach(&gt);
        result = cuStreamEndCapture(stream, &graph);
        if (graph)
                GR_MUST(cuGraphDestroy(graph));
        return &result;
}

static void *leave_captured(void *unused)
{
        gt_attach(&gt);
        fact_code("cuStreamBeginCapture of the per-thread stream",
                  cuStreamBeginCapture(CU_STREAM_PER_THREAD, CU_STREAM_CAPTURE_MODE_RELAXED));
        return unused;
}

/* Captures that end in other ways than by themselves. */
void facts_capture_ends(void)
{
        CUstream a = stream_of(CU_STREAM_NON_BLOCKING), b = stream_of(CU_STREAM_NON_BLOCKING), gone;
        CUstreamCaptureStatus status = 7;
        CUevent event, outside;
        CUdeviceptr p, q, inside;
        pthread_t thread;
        void *result, *pinned;

        GR_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuEventCreate(&outside, CU_EVENT_DISABLE_TIMING));
        fact_end("end without a begin", a);
        fact_code("begin of the legacy stream", cuStreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
        fact_code("begin twice", cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_GLOBAL));
        fact_end("end then", a);
        for (int mode = 0; mode < 3; mode++) {
                static const char *const names[] = {"end of a global one by another thread",
                                                    "end of a thread-local one by another thread",
                                                    "end of a relaxed one by another thread"};
                CUresult other;

                GR_MUST(cuStreamBeginCapture(a, (CUstreamCaptureMode)mode));
                if (pthread_create(&thread, NULL, end_elsewhere, a) != 0 || pthread_join(thread, &result) != 0)
                        gt_die("facts: no thread");
                other = *(CUresult *)result;
                fact_code(names[mode], other);
                if (other != CUDA_SUCCESS)
                        fact_end("end by its own thread then", a);
        }
        GR_MUST(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuEventRecord(event, a));
        fact_code("cuEventQuery of an event recorded in it", cuEventQuery(event));
        fact_end("end then", a);
        GR_MUST(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuEventRecord(event, a));
        fact_code("cuEventSynchronize of an event recorded in it", cuEventSynchronize(event));
        fact_end("end then", a);
        fact_code("cuEventQuery of it after the end", cuEventQuery(event));
        GR_MUST(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuEventRecord(event, a));
        fact_code("another stream joins", cuStreamWaitEvent(b, event, 0));
        GR_MUST(cuStreamIsCapturing(b, &status));
        fact("then it is", "%d", (int)status);
        GR_MUST(gt_spin(&gt, b, 1));
        fact_end("end of it", b);
        GR_MUST(cuStreamIsCapturing(a, &status));
        fact("the first is", "%d", (int)status);
        fact_end("end of the first with the other not joined", a);
        GR_MUST(cuStreamIsCapturing(b, &status));
        fact("the other is", "%d", (int)status);
        GR_MUST(cuEventRecord(outside, b));
        GR_MUST(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        fact_code("waits for an event from outside", cuStreamWaitEvent(a, outside, 0));
        fact_end("end then", a);
        GR_MUST(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuEventRecord(event, a));
        GR_MUST(cuStreamBeginCapture(b, CU_STREAM_CAPTURE_MODE_RELAXED));
        fact_code("waits for an event of another capture", cuStreamWaitEvent(b, event, 0));
        fact_end("end then", b);
        fact_end("end of the other", a);
        GR_MUST(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuEventRecord(event, a));
        GR_MUST(cuStreamWaitEvent(b, event, 0));
        fact_code("the legacy stream waits for an event of it", cuStreamWaitEvent(NULL, event, 0));
        fact_end("end then", a);

        gone = stream_of(CU_STREAM_NON_BLOCKING);
        GR_MUST(cuStreamBeginCapture(gone, CU_STREAM_CAPTURE_MODE_GLOBAL));
        fact_code("cuStreamDestroy of the captured stream", cuStreamDestroy(gone));
        fact_code("cuMemAlloc then", cuMemAlloc(&p, MIB));
        fact_code("cuCtxSynchronize then", cuCtxSynchronize());
        GR_MUST(cuMemFree(p));
        gone = stream_of(CU_STREAM_NON_BLOCKING);
        GR_MUST(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuEventRecord(event, a));
        GR_MUST(cuStreamWaitEvent(gone, event, 0));
        GR_MUST(gt_spin(&gt, gone, 1));
        fact_code("cuStreamDestroy of one that joined", cuStreamDestroy(gone));
        GR_MUST(cuStreamIsCapturing(a, &status));
        fact("the first is", "%d", (int)status);
        fact_end("end of the first", a);

        p = block(MIB);
        GR_MUST(cuMemAllocAsync(&q, MIB, a));
        GR_MUST(cuStreamSynchronize(a));
        GR_MUST(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        fact_code("captured: cuMemFreeAsync of cuMemAlloc's memory", cuMemFreeAsync(p, a));
        GR_MUST(cuStreamIsCapturing(a, &status));
        fact("captured: then it is", "%d", (int)status);
        fact_code("captured: cuMemFreeAsync of a pool's memory", cuMemFreeAsync(q, a));
        fact_code("captured: cuMemAllocAsync", cuMemAllocAsync(&inside, MIB, a));
        fact_code("captured: cuMemFree of that", cuMemFree(inside));
        fact_code("captured: cuMemFreeAsync of that, elsewhere", cuMemFreeAsync(inside, b));
        fact_code("captured: cuMemFreeAsync of that", cuMemFreeAsync(inside, a));
        fact_code("captured: cuMemFreeAsync of that once more", cuMemFreeAsync(inside, a));
        fact_code("captured: cuStreamAddCallback", cuStreamAddCallback(a, NULL, NULL, 0));
        fact_end("captured: end", a);
        fact_code("cuMemFree of cuMemAlloc's memory then", cuMemFree(p));
        fact_code("cuMemFreeAsync of a pool's memory then", cuMemFreeAsync(q, a));
        GR_MUST(cuCtxSynchronize());

        GR_MUST(cuMemHostAlloc(&pinned, 4096, 0));
        p = block(4096);
        GR_MUST(cuStreamBeginCapture(a, CU_STREAM_CAPTURE_MODE_RELAXED));
        fact_changed(true);
        FACT_WAITS("cuMemFree beside it", b, cuMemFree(p));
        FACT_WAITS("cuMemFreeHost beside it", b, cuMemFreeHost(pinned));
        fact_changed(false);
        fact_end("end then", a);

        if (pthread_create(&thread, NULL, leave_captured, NULL) != 0 || pthread_join(thread, NULL) != 0)
                gt_die("facts: no thread");
        for (int i = 0; i < 20; i++) {
                p = block(64 * MIB);
                GR_MUST(cuMemFree(p));
        }
        fact_code("cuMemAlloc after the thread is gone", cuMemAlloc(&p, 64 * MIB));
        GR_MUST(cuMemFree(p));
        fact_code("cuCtxSynchronize after the thread is gone", cuCtxSynchronize());
}
