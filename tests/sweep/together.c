/*
 * Scenes of the sweep without a fault, many of them at once, each in a thread of its own, on a library made for
 * ThreadSanitizer: whatever a hook forgets to guard it reports. The scenes and the driver are not looked at.
 *
 *   together [SECONDS]
 */
#include "sweep.h"

#include "gpureclaim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { THREADS = 6 };

static struct sweep_report report;
struct sweep_report *sweep_report = &report;
struct sweep_plan sweep_plan;
bool sweep_beside = true;

/* Those that leave the card and the primary context to others, and never wait for all streams: some capture. */
static const char *const fit[] = {"plain",  "streams", "capture", "pools", "mapped",
                                  "pinned", "managed", "graphs",  "hosts", "green"};
enum { FIT = sizeof(fit) / sizeof(fit[0]) };

static atomic_uint runs[FIT], failed;
static double seconds = 8;
static struct timespec begin;
static pthread_barrier_t start;

struct nvml_memory;
int nvmlDeviceGetMemoryInfo(void *device, struct nvml_memory *ret); /* the library's */

void sweep_error(const char *call, CUresult result, bool twice)
{
        printf("%s returned %d%s\n", call, (int)result, twice ? " once more" : "");
        atomic_fetch_add(&failed, 1);
}

void sweep_wrong(const char *format, ...)
{
        va_list args;

        va_start(args, format);
        vprintf(format, args);
        va_end(args);
        putchar('\n');
        atomic_fetch_add(&failed, 1);
}

static const struct sweep_scene *scene(const char *name)
{
        for (size_t i = 0; i < sweep_scene_count; i++)
                if (strcmp(sweep_scenes[i].name, name) == 0)
                        return &sweep_scenes[i];
        abort();
}

static int nothing_idle(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)device;
        (void)want_bytes;
        return 0;
}

/* As a thread does that is not relaxed: what it allocates is its graph's. */
static void capture_memory(CUstream stream)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        CUgraph graph;
        CUstream other;
        CUevent event;
        CUdeviceptr ptr;
        void *host;

        TRY(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
        TRY(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        TRY(cuThreadExchangeStreamCaptureMode(&mode));
        TRY(cuMemHostAlloc(&host, 4096, 0)); /* others may be capturing */
        TRY(cuMemFreeHost(host));
        TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        for (int i = 0; i < 2; i++) {
                TRY(cuMemAlloc(&ptr, 4096));
                TRY(cuMemsetD32Async(ptr, 0, 1024, stream));
                TRY(cuMemFree(ptr));
        }
        TRY(cuMemAlloc(&ptr, 4096));
        TRY(cuMemsetD32Async(ptr, 0, 1024, other));
        TRY(cuEventRecord(event, stream));
        TRY(cuMemFree(ptr));
        TRY(cuStreamEndCapture(stream, &graph));
        TRY(cuThreadExchangeStreamCaptureMode(&mode));
        TRY(cuGraphDestroy(graph));
        TRY(cuEventDestroy(event));
        TRY(cuStreamDestroy(other));
}

/* What several threads may do at a time. */
static void besides(void)
{
        struct gpureclaim_reclaimable hooks = {.struct_bytes = sizeof(hooks), .purge = nothing_idle};
        struct gpureclaim_status status = {.struct_bytes = sizeof(status)};
        size_t bytes, pitch, total;
        CUcontext context, left;
        CUgraph graph;
        CUstream stream;
        CUdeviceptr ptr;
        uint64_t id;

        if (gpureclaim_register(&hooks, &id) == 0)
                gpureclaim_unregister(id);
        gpureclaim_status(0, &status);
        TRY(cuMemGetInfo(&bytes, &total));
        TRY(cuCtxCreate(&context, NULL, 0, 0));
        TRY(cuMemAllocPitch(&ptr, &pitch, 1000, 4, 4));
        TRY(cuMemFree(ptr));
        TRY(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        TRY(cuStreamEndCapture(stream, &graph));
        TRY(cuGraphDestroy(graph));
        capture_memory(stream);
        TRY(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        TRY(cuCtxPopCurrent(&left));
        TRY(cuCtxDestroy(context)); /* with the stream and its capture */
        TRY(cuDevicePrimaryCtxRetain(&context, 0));
        TRY(cuDevicePrimaryCtxRelease(0));
        gpureclaim_reclaim(0, "purge", 1);
}

static double elapsed(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return (double)(now.tv_sec - begin.tv_sec) + (double)(now.tv_nsec - begin.tv_nsec) * 1e-9;
}

/* What is set up by the first call of its kind, which any thread may make. */
static void first_calls(void)
{
        struct gpureclaim_reclaimable hooks = {.struct_bytes = sizeof(hooks), .purge = nothing_idle};
        void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *found, *device = NULL;
        int (*by_index)(unsigned index, void **ret_device);
        unsigned long long figures[3];
        uint64_t id;

        found = nvml ? dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2") : NULL;
        memcpy(&by_index, &found, sizeof(by_index));
        pthread_barrier_wait(&start);
        if (gpureclaim_register(&hooks, &id) == 0)
                gpureclaim_unregister(id);
        TRY(cuInit(0));
        if (found && by_index(0, &device) == 0)
                nvmlDeviceGetMemoryInfo(device, (struct nvml_memory *)figures);
}

/* Most threads run the same scene at a time, as they meet there; the first one goes its own way. */
static void *run(void *arg)
{
        unsigned number = *(unsigned *)arg, own = 0;
        CUdeviceptr ptr;
        size_t pitch;
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* not refused what others capture */
        CUcontext primary;

        first_calls();
        TRY(cuThreadExchangeStreamCaptureMode(&mode));
        TRY(cuDevicePrimaryCtxRetain(&primary, 0)); /* no scene ends it for the others */
        TRY(cuCtxSetCurrent(primary));
        pthread_barrier_wait(&start);
        for (size_t width = 4; width < 2000; width += 4) { /* each is remembered when it is first asked for */
                TRY(cuMemAllocPitch(&ptr, &pitch, width, 4, 4));
                TRY(cuMemFree(ptr));
        }
        for (double now; (now = elapsed()) < seconds && atomic_load(&failed) == 0;) {
                unsigned at = (number ? (unsigned)(now / seconds * FIT) : own++) % FIT;

                scene(fit[at])->run();
                atomic_fetch_add(&runs[at], 1);
                TRY(cuCtxSetCurrent(primary));
                besides();
                TRY(cuCtxSetCurrent(primary));
        }
        TRY(cuDevicePrimaryCtxRelease(0));
        return NULL;
}

int main(int argc, char **argv)
{
        pthread_t threads[THREADS];
        unsigned numbers[THREADS];

        setvbuf(stdout, NULL, _IOLBF, 0);
        if (argc > 1)
                seconds = strtod(argv[1], NULL);
        clock_gettime(CLOCK_MONOTONIC, &begin);
        pthread_barrier_init(&start, NULL, THREADS);
        for (unsigned i = 0; i < THREADS; i++) {
                numbers[i] = i;
                if (pthread_create(&threads[i], NULL, run, &numbers[i]))
                        abort();
        }
        for (unsigned i = 0; i < THREADS; i++)
                pthread_join(threads[i], NULL);
        for (unsigned i = 0; i < FIT; i++)
                printf("%s: %u times\n", fit[i], atomic_load(&runs[i]));
        return atomic_load(&failed) > 0;
}
