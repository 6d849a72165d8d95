/*
 * Allocation beside and inside stream capture: one "name: code value" line per question, to be compared between a
 * native run and one under the shim, as with transparency.c. Lines that begin with "~" may differ: where the driver
 * refuses an allocation and loses the capture, a pool can serve it.
 * Ends with status 1 when memory has wrong contents.
 */
#include "gputest.h"
#include "newer.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WORDS = 64 * 1024, LATE_US = 3000, ROUNDS = 100 };
static const size_t large = 64 * MIB;

/* What programs call that are built for per-thread default streams. */
CUresult CUDAAPI cuMemAllocAsync_ptsz(CUdeviceptr *p, size_t bytes, CUstream stream);
CUresult CUDAAPI cuMemFreeAsync_ptsz(CUdeviceptr p, CUstream stream);
CUresult CUDAAPI cuStreamBeginCapture_v2_ptsz(CUstream stream, CUstreamCaptureMode mode);
CUresult CUDAAPI cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph);
CUresult CUDAAPI cuStreamIsCapturing_ptsz(CUstream stream, CUstreamCaptureStatus *status);
CUresult CUDAAPI cuStreamSynchronize_ptsz(CUstream stream);

static struct gt gt;
static CUstream stream;
static int wrong;

static const struct {
        CUstreamCaptureMode mode;
        const char *name;
} modes[] = {{CU_STREAM_CAPTURE_MODE_GLOBAL, "global"},
             {CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, "thread-local"},
             {CU_STREAM_CAPTURE_MODE_RELAXED, "relaxed"}};
enum { MODES = sizeof modes / sizeof modes[0] };

static void say(const char *name, const char *mode, CUresult code, CUresult end)
{
        printf("%s, %s capture: %d, the capture ended with %d\n", name, mode, (int)code, (int)end);
}

/* Ends the capture and throws its graph away. */
static CUresult end_capture(void)
{
        CUgraph graph = NULL;
        CUresult end = cuStreamEndCapture(stream, &graph);

        if (graph)
                GR_MUST(cuGraphDestroy(graph));
        return end;
}

/* Every word of P must be VALUE once the device is idle. */
static void expect(const char *what, CUdeviceptr p, uint32_t value)
{
        static uint32_t words[WORDS];
        size_t bad = 0;

        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuMemcpyDtoH(words, p, sizeof words));
        for (size_t i = 0; i < WORDS; i++)
                bad += words[i] != value;
        printf("%s: 0 wrong words %zu\n", what, bad);
        wrong += bad != 0;
}

static void expect_freed(const char *what, CUdeviceptr p)
{
        size_t bytes;

        printf("%s: range %d", what, (int)cuMemGetAddressRange(NULL, &bytes, p));
        printf(", freed once more %d\n", (int)cuMemFree(p));
}

static CUdeviceptr block(void)
{
        CUdeviceptr p;

        GR_MUST(cuMemAlloc(&p, WORDS * 4));
        return p;
}

/* What this thread itself may do while it captures. A cached block and a new one are different questions. */
static void inside(void)
{
        for (int m = 0; m < MODES; m++) {
                const char *sure = modes[m].mode == CU_STREAM_CAPTURE_MODE_RELAXED ? "" : "~ ";
                char name[64];
                CUdeviceptr p = 0, held = block();
                CUresult code;

                GR_MUST(cuMemFree(block()));
                GR_MUST(cuStreamBeginCapture(stream, modes[m].mode));
                code = cuMemAlloc(&p, WORDS * 4);
                snprintf(name, sizeof name, "%salloc inside", sure);
                say(name, modes[m].name, code, end_capture());
                if (code == CUDA_SUCCESS)
                        GR_MUST(cuMemFree(p));

                GR_MUST(cuStreamBeginCapture(stream, modes[m].mode));
                code = cuMemFree(held);
                snprintf(name, sizeof name, "%sfree inside", sure);
                say(name, modes[m].name, code, end_capture());
                if (code != CUDA_SUCCESS)
                        GR_MUST(cuMemFree(held));

                GR_MUST(cuStreamBeginCapture(stream, modes[m].mode));
                code = cuMemAlloc(&p, 77 * MIB);
                snprintf(name, sizeof name, "%salloc of a new size inside", sure);
                say(name, modes[m].name, code, end_capture());
                if (code == CUDA_SUCCESS)
                        GR_MUST(cuMemFree(p));
        }
}

struct job {
        CUstream stream; /* its own, made before any capture begins */
        int rounds;
        atomic_bool stop;
        CUresult code; /* the first that was not CUDA_SUCCESS */
};

/* A thread that allocates, launches and frees as any other part of a program would. */
static void *allocate(void *argument)
{
        struct job *job = argument;

        gt_attach(&gt);
        for (int i = 0; i < job->rounds && !atomic_load(&job->stop); i++) {
                CUdeviceptr p = 0;
                CUresult code = cuMemAlloc(&p, (size_t)(1 + i % 8) * 256 * KIB);

                if (code == CUDA_SUCCESS)
                        code = gt_fill(&gt, job->stream, p, 5, 64);
                if (p && code == CUDA_SUCCESS)
                        code = cuMemFree(p);
                if (code != CUDA_SUCCESS && job->code == CUDA_SUCCESS)
                        job->code = code;
        }
        return NULL;
}

static void beside(void)
{
        for (int m = 0; m < MODES; m++) {
                bool sure = modes[m].mode != CU_STREAM_CAPTURE_MODE_GLOBAL;
                struct job job = {.stream = gt_stream(), .rounds = 20};
                pthread_t thread;
                int lost = 0;

                GR_MUST(cuStreamBeginCapture(stream, modes[m].mode));
                if (pthread_create(&thread, NULL, allocate, &job) || pthread_join(thread, NULL))
                        gt_die("no thread");
                say(sure ? "another thread allocates beside" : "~ another thread allocates beside", modes[m].name,
                    job.code, end_capture());

                /* Many short captures, begun and ended while the other thread is in the midst of its calls. */
                if (!sure)
                        continue;
                job = (struct job){.stream = job.stream, .rounds = 1 << 30};
                if (pthread_create(&thread, NULL, allocate, &job))
                        gt_die("no thread");
                for (int i = 0; i < ROUNDS; i++) {
                        GR_MUST(cuStreamBeginCapture(stream, modes[m].mode));
                        lost += gt_spin(&gt, stream, 1) != CUDA_SUCCESS;
                        lost += end_capture() != CUDA_SUCCESS;
                }
                atomic_store(&job.stop, true);
                pthread_join(thread, NULL);
                printf("%d %s captures beside a thread that allocates: %d lost %d\n", ROUNDS, modes[m].name,
                       (int)job.code, lost);
        }
}

/* Captures a fill of P with VALUE. */
static CUgraphExec captured_fill(CUdeviceptr p, uint32_t value, CUstreamCaptureMode mode)
{
        CUgraph graph;
        CUgraphExec exec;

        GR_MUST(cuStreamBeginCapture(stream, mode));
        GR_MUST(gt_fill(&gt, stream, p, value, WORDS));
        GR_MUST(cuStreamEndCapture(stream, &graph));
        exec = gt_executable(graph);
        return exec;
}

static void replay(void)
{
        for (int m = 0; m < MODES; m++) {
                CUdeviceptr p, q, late = block();
                CUgraphExec exec;
                char name[80];

                /* Blocks that are freed a moment before must not make the capture fail. */
                for (int i = 0; i < 10; i++)
                        GR_MUST(cuMemFree(block()));
                p = block();
                exec = captured_fill(p, 3, modes[m].mode);
                GR_MUST(cuGraphLaunch(exec, stream));
                snprintf(name, sizeof name, "graph of a %s capture, first launch", modes[m].name);
                expect(name, p, 3);

                /* Launched behind memory that has just changed hands. */
                GR_MUST(gt_late_fill(&gt, stream, late, 1, WORDS, LATE_US));
                GR_MUST(cuMemFree(late));
                q = block();
                GR_MUST(cuGraphExecDestroy(exec));
                exec = captured_fill(q, 4, modes[m].mode);
                GR_MUST(cuGraphLaunch(exec, gt_stream()));
                snprintf(name, sizeof name, "graph of a %s capture, on a block freed under a late writer",
                         modes[m].name);
                expect(name, q, 4);
                GR_MUST(cuGraphExecDestroy(exec));
                GR_MUST(cuMemFree(p));
                GR_MUST(cuMemFree(q));
        }
}

/* A block freed during a capture, with work on it still to come: it may not be handed out unfenced afterwards. */
static void freed_during(void)
{
        CUstream slow = gt_stream(), other = gt_stream();
        CUdeviceptr p = block(), q;

        GR_MUST(gt_late_fill(&gt, slow, p, 1, WORDS, LATE_US));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuMemFree(p));
        q = block();
        GR_MUST(gt_fill(&gt, other, q, 2, WORDS));
        say("free and alloc with a late writer", "relaxed", CUDA_SUCCESS, end_capture());
        expect("block allocated in the same capture", q, 2);

        p = q;
        GR_MUST(gt_late_fill(&gt, slow, p, 1, WORDS, LATE_US));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuMemFree(p));
        say("free with a late writer", "relaxed", CUDA_SUCCESS, end_capture());
        q = block();
        GR_MUST(gt_fill(&gt, other, q, 2, WORDS));
        expect("block allocated after the capture", q, 2);
        GR_MUST(cuMemFree(q));
        GR_MUST(cuStreamDestroy(slow));
        GR_MUST(cuStreamDestroy(other));
}

/* Captures that end in some other way than by a successful end. */
static void irregular(void)
{
        CUstream lost = gt_stream();
        CUresult code;

        say("begin on the legacy stream", "global", cuStreamBeginCapture(NULL, CU_STREAM_CAPTURE_MODE_GLOBAL),
            CUDA_SUCCESS);
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        code = cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED);
        say("begin twice", "relaxed", code, end_capture());
        say("end without a begin", "no", end_capture(), CUDA_SUCCESS);

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        code = cuCtxSynchronize();
        say("cuCtxSynchronize inside", "global", code, end_capture());

        GR_MUST(cuStreamBeginCapture(lost, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(gt_spin(&gt, lost, 1));
        say("stream destroyed", "relaxed", cuStreamDestroy(lost), CUDA_SUCCESS);
        GR_MUST(cuMemFree(block()));
        printf("allocation after all that: %d\n", (int)cuCtxSynchronize());
}

/* An end without a place for the graph ends the capture all the same. */
static void end_without_place(CUresult CUDAAPI end(CUstream stream, CUgraph *graph))
{
        CUdeviceptr p = block(), q = 0;
        CUstream blocking;
        CUgraph graph = NULL;
        CUresult code;

        GR_MUST(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
        GR_MUST(cuStreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
        code = end(blocking, NULL);
        printf("end without a place for the graph: %d\n", (int)code);
        code = cuMemFree(p);
        printf("free after that: %d", (int)code);
        code = CUDA_SUCCESS;
        for (int i = 0; i < ROUNDS && code == CUDA_SUCCESS; i++) {
                q = 0;
                code = cuMemAlloc(&q, large);
                if (code == CUDA_SUCCESS && i + 1 < ROUNDS)
                        code = cuMemFree(q);
        }
        printf(", then %d", (int)code);
        code = end(blocking, &graph);
        printf(", the capture ended with %d\n", (int)code);
        if (graph)
                GR_MUST(cuGraphDestroy(graph));
        if (q)
                GR_MUST(cuMemFree(q));
        GR_MUST(cuStreamDestroy(blocking));
}

/*
 * Calls for the thread's own stream while a blocking stream of the context is captured: that one is not, though the
 * legacy stream, also called 0, may not even be asked. What is freed so is freed once, for everybody.
 */
static void per_thread(void)
{
        CUstreamCaptureStatus status;
        CUstream blocking;
        CUdeviceptr p, q, again, small[32];
        CUgraph graph;
        size_t bytes;

        GR_MUST(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
        GR_MUST(cuMemAlloc(&p, large));
        GR_MUST(cuStreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
        printf("the legacy stream, asked: %d\n", (int)cuStreamIsCapturing(NULL, &status));
        printf("the thread's own, asked: %d\n", (int)cuStreamIsCapturing_ptsz(NULL, &status));
        printf("allocated in it: %d\n", (int)cuMemAllocAsync_ptsz(&q, WORDS * 4, NULL));
        printf("freed in it: %d\n", (int)cuMemFreeAsync_ptsz(p, NULL));
        GR_MUST(cuStreamEndCapture(blocking, &graph));
        GR_MUST(cuGraphDestroy(graph));
        GR_MUST(cuStreamSynchronize_ptsz(NULL));
        expect_freed("after the capture", p);
        /* Memory of other kinds, which may come to lie there. */
        for (int i = 0; i < 32; i++)
                GR_MUST(cuMemAllocAsync_ptsz(&small[i], GT_PAGE, NULL));
        GR_MUST(cuStreamSynchronize_ptsz(NULL));
        for (int i = 0; i < 32; i++)
                GR_MUST(cuMemFree(small[i]));
        GR_MUST(cuMemAlloc(&p, large));
        GR_MUST(cuMemAlloc(&again, large));
        GR_MUST(cuMemsetD32(p, 7, large / 4));
        GR_MUST(cuMemsetD32(again, 8, large / 4));
        expect("allocated after that", p + large - WORDS * 4, 7);
        GR_MUST(cuMemFree(again));
        GR_MUST(cuMemFree(p));
        GR_MUST(cuMemFree(q));

        /* The thread's own stream is captured, and the legacy one with it. */
        p = block();
        GR_MUST(cuMemGetAddressRange(NULL, &bytes, p));
        GR_MUST(cuStreamBeginCapture_v2_ptsz(NULL, CU_STREAM_CAPTURE_MODE_RELAXED));
        printf("freed in the thread's own stream, captured: %d", (int)cuMemFreeAsync_ptsz(p, NULL));
        status = CU_STREAM_CAPTURE_STATUS_NONE;
        printf(", asked %d", (int)cuStreamIsCapturing_ptsz(NULL, &status));
        printf(" status %d", (int)status);
        printf(", it ended with %d\n", (int)cuStreamEndCapture_ptsz(NULL, &graph));
        printf("still there: %d\n", (int)cuMemGetAddressRange(NULL, &bytes, p));
        printf("then freed: %d\n", (int)cuMemFree(p));

        /* Another stream is captured, and named in a call for the thread's own. */
        p = block();
        GR_MUST(cuStreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
        printf("freed in a stream that is captured, by its name: %d", (int)cuMemFreeAsync_ptsz(p, blocking));
        printf(", it ended with %d\n", (int)cuStreamEndCapture(blocking, &graph));
        printf("still there: %d\n", (int)cuMemGetAddressRange(NULL, &bytes, p));
        printf("then freed: %d\n", (int)cuMemFree(p));
        GR_MUST(cuStreamDestroy(blocking));
}

/* While memory is short and a capture is open: what is freed serves the next request once its last work is done. */
static void short_of_memory(void)
{
        enum { ROOM_MIB = 40 };
        CUstream slow = gt_stream(), other = gt_stream();
        CUdeviceptr p, q;

        GR_MUST(cuMemAlloc(&p, ROOM_MIB * MIB));
        GR_MUST(gt_late_fill(&gt, slow, p, 1, WORDS, 100 * LATE_US));
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuMemFree(p));
        GR_MUST(cuMemAlloc(&q, ROOM_MIB * MIB));
        GR_MUST(gt_fill(&gt, other, q, 2, WORDS));
        say("short of memory, free and alloc with a late writer", "relaxed", CUDA_SUCCESS, end_capture());
        expect("all of the memory, while a capture is open", q, 2);
        GR_MUST(cuMemFree(q));
        GR_MUST(cuStreamDestroy(slow));
        GR_MUST(cuStreamDestroy(other));
}

static CUgraph recaptured;

static CUresult begin_again(CUstream on)
{
        __typeof__(&cuStreamBeginRecaptureToGraph) begin =
                (__typeof__(begin))gt_lookup_of("cuStreamBeginRecaptureToGraph", 13030);

        return begin ? begin(on, CU_STREAM_CAPTURE_MODE_RELAXED, recaptured, NULL, NULL) : CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult end_again(CUstream on)
{
        CUgraph same;

        return cuStreamEndCapture(on, &same);
}

static CUresult begin_to_cig(CUstream on)
{
        __typeof__(&cuStreamBeginCaptureToCig) begin =
                (__typeof__(begin))gt_lookup_of("cuStreamBeginCaptureToCig", 13020);
        void *list[2] = {NULL, NULL}; /* in place of the parameters, which older headers do not declare */

        return begin ? begin(on, (CUstreamCigCaptureParams *)list) : CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult end_to_cig(CUstream on)
{
        return ((__typeof__(&cuStreamEndCaptureToCig))gt_lookup_of("cuStreamEndCaptureToCig", 13020))(on);
}

/* Captures of newer drivers, beside memory that comes and goes. */
static void newer(const char *name, CUstream on, CUresult begin(CUstream on), CUresult end(CUstream on))
{
        CUdeviceptr p = block(), q;
        CUresult begun = CUDA_SUCCESS;
        int lost = 0;

        GR_MUST(cuMemsetD32(p, 0, WORDS));
        for (int i = 0; i < 10 && begun == CUDA_SUCCESS; i++) {
                begun = begin(on);
                for (int k = 0; k < 8; k++) {
                        GR_MUST(cuMemAlloc(&q, large));
                        GR_MUST(cuMemFree(q));
                }
                if (begun == CUDA_SUCCESS) {
                        GR_MUST(cuMemsetD32Async(p, 7, WORDS, on));
                        lost += end(on) != CUDA_SUCCESS;
                }
        }
        printf("%s: %d, lost %d\n", name, (int)begun, lost);
        expect(name, p, 0);
        GR_MUST(cuMemFree(p));
}

static void newer_captures(void)
{
        CUctxCigParam graphics = {.sharedDataType = CIG_DATA_TYPE_NV_BLOB, .sharedData = &graphics};
        CUctxCreateParams parameters = {.cigParams = &graphics};
        CUdeviceptr p = block();
        CUcontext context;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuMemsetD32Async(p, 7, WORDS, stream));
        GR_MUST(cuStreamEndCapture(stream, &recaptured));
        newer("a graph that is captured again", stream, begin_again, end_again);
        GR_MUST(cuGraphDestroy(recaptured));
        GR_MUST(cuMemFree(p));
        if (!gt.simulated || !gt_lookup_of("cuCtxCreate", 12050))
                return; /* no graphics interface lends its blob */
        GR_MUST(cuCtxCreate_v4(&context, &parameters, 0, gt.device));
        newer("commands for a graphics interface", gt_stream(), begin_to_cig, end_to_cig);
        GR_MUST(cuCtxDestroy(context));
}

/* Whatever else was called, a thread's captures are as strict as it has set them. */
static void own_mode(void)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;

        GR_MUST(cuThreadExchangeStreamCaptureMode(&mode));
        printf("the thread's mode: %d\n", (int)mode);
}

int main(int argc, char **argv)
{
        gt_open(&gt);
        stream = gt_stream();
        if (argc > 1 && strcmp(argv[1], "short") == 0) {
                short_of_memory();
                own_mode();
                return wrong ? 1 : 0;
        }
        inside();
        beside();
        replay();
        freed_during();
        per_thread();
        irregular();
        end_without_place(cuStreamEndCapture);
        end_without_place(cuStreamEndCapture_ptsz);
        newer_captures();
        own_mode();
        return wrong ? 1 : 0;
}
