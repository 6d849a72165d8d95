/*
 * Pinned host memory.
 *
 *   pinned [--expect-reuse]   late work on freed memory must not meet its next owner; one line per check, exit status 1
 *                             when one failed. --expect-reuse: and freed memory does serve again
 *   pinned --facts            what the driver says of it; the lines must be the same natively and under the library
 *   pinned --bench            what a pair of allocation and free costs, as JSON
 *   pinned --stall            launches of one thread while the memory that another freed goes back
 */
#include "gputest.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/json.h"

enum { WORDS = 1 << 18, BYTES = 4 * WORDS, OLD = 0x0a0a0a0a, NEW = 0x05050505, SPIN_US = 20000, REPETITIONS = 7 };

static struct gt gt;
static CUstream stream;

static void set(uint32_t *p, uint32_t value)
{
        for (size_t i = 0; i < WORDS; i++)
                p[i] = value;
}

static size_t wrong(const uint32_t *p, uint32_t value)
{
        size_t n = 0;

        for (size_t i = 0; i < WORDS; i++)
                n += p[i] != value;
        return n;
}

static void *get(size_t bytes, unsigned flags)
{
        void *p;

        GR_MUST(cuMemHostAlloc(&p, bytes, flags));
        return p;
}

static CUdeviceptr of_device(void *p)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemHostGetDevicePointer(&ptr, p, 0));
        return ptr;
}

static void copy_by_engine(CUdeviceptr to, void *from)
{
        GR_MUST(cuMemcpyHtoDAsync(to, from, BYTES, stream));
}

static void copy_by_kernel(CUdeviceptr to, void *from)
{
        GR_MUST(gt_copy(&gt, stream, to, of_device(from), WORDS));
}

/* The GPU reads behind a kernel; meanwhile the memory is freed, and whoever gets it next writes to it. */
static void late_read(const char *name, unsigned flags, void (*copy)(CUdeviceptr to, void *from))
{
        uint32_t *p = get(BYTES, flags), *q, *seen = malloc(BYTES);
        CUdeviceptr to;

        if (!seen)
                gt_die("out of memory");
        GR_MUST(cuMemAlloc(&to, BYTES));
        set(p, OLD);
        GR_MUST(gt_spin(&gt, stream, SPIN_US));
        copy(to, p);
        GR_MUST(cuMemFreeHost(p));
        q = get(BYTES, flags);
        set(q, NEW);
        GR_MUST(cuStreamSynchronize(stream));
        GR_MUST(cuMemcpyDtoH(seen, to, BYTES));
        gt_check(wrong(seen, OLD) == 0, name, "%zu of %d words changed", wrong(seen, OLD), WORDS);
        GR_MUST(cuMemFreeHost(q));
        GR_MUST(cuMemFree(to));
        free(seen);
}

/* The GPU writes behind a kernel, where the next owner has written by then. */
static void late_write(unsigned flags)
{
        uint32_t *p = get(BYTES, flags), *q;

        GR_MUST(gt_late_fill(&gt, stream, of_device(p), OLD, WORDS, SPIN_US));
        GR_MUST(cuMemFreeHost(p));
        q = get(BYTES, flags);
        set(q, NEW);
        GR_MUST(cuStreamSynchronize(stream));
        gt_check(wrong(q, NEW) == 0, "late write by a kernel", "%zu of %d words changed", wrong(q, NEW), WORDS);
        GR_MUST(cuMemFreeHost(q));
}

/* The same from a context that did not allocate the memory, of this device and of another. */
static void late_read_elsewhere(CUdevice device, const char *name, bool cached)
{
        struct gt there = gt;
        uint32_t *p = get(BYTES, CU_MEMHOSTALLOC_PORTABLE), *q, *seen = malloc(BYTES);
        CUstream other;
        CUdeviceptr to;

        if (!seen)
                gt_die("out of memory");
        set(p, OLD);
        if (device == gt.device)
                GR_MUST(cuCtxCreate(&there.ctx, NULL, 0, device));
        else
                GR_MUST(cuDevicePrimaryCtxRetain(&there.ctx, device));
        GR_MUST(cuCtxSetCurrent(there.ctx));
        gt_load_kernels(&there.module);
        GR_MUST(cuModuleGetFunction(&there.spin, there.module, "gr_spin"));
        other = gt_stream();
        GR_MUST(cuMemAlloc(&to, BYTES));
        GR_MUST(gt_spin(&there, other, SPIN_US));
        GR_MUST(cuMemcpyHtoDAsync(to, p, BYTES, other));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        GR_MUST(cuMemFreeHost(p));
        q = get(BYTES, CU_MEMHOSTALLOC_PORTABLE);
        set(q, NEW);
        GR_MUST(cuCtxSetCurrent(there.ctx));
        GR_MUST(cuStreamSynchronize(other));
        GR_MUST(cuMemcpyDtoH(seen, to, BYTES));
        if (cached)
                gt_check(wrong(seen, OLD) == 0, name, "%zu of %d words changed", wrong(seen, OLD), WORDS);
        else /* that the driver's own free waits for this is not known */
                printf("-      %s: %zu of %d words changed\n", name, wrong(seen, OLD), WORDS);
        GR_MUST(cuMemFree(to));
        GR_MUST(cuStreamDestroy(other));
        GR_MUST(cuModuleUnload(there.module));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        GR_MUST(device == gt.device ? cuCtxDestroy(there.ctx) : cuDevicePrimaryCtxRelease(device));
        GR_MUST(cuMemFreeHost(q));
        free(seen);
}

/* The thread is relaxed, or the capture is. */
static void captured(bool expect_reuse, CUstreamCaptureMode mode)
{
        CUstreamCaptureMode own = CU_STREAM_CAPTURE_MODE_RELAXED;
        CUgraph graph;
        void *p = get(BYTES, 0), *kept = get(2 * BYTES, 0), *q, *again;

        GR_MUST(cuMemFreeHost(kept));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuStreamBeginCapture(stream, mode));
        GR_MUST(cuThreadExchangeStreamCaptureMode(&own));
        GR_MUST(cuMemFreeHost(p));
        q = get(BYTES, 0);
        again = get(2 * BYTES, 0);
        GR_MUST(cuThreadExchangeStreamCaptureMode(&own));
        GR_MUST(gt_spin(&gt, stream, 10));
        gt_check(cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS, "free and allocation in a capture", "it goes on");
        GR_MUST(cuGraphDestroy(graph));
        if (expect_reuse)
                gt_check(again == kept, "a relaxed allocation in a capture", "not from the cache");
        GR_MUST(cuMemFreeHost(again));
        GR_MUST(cuMemFreeHost(q));
}

/* As the driver does it, whatever is cached. */
static void refused_in_a_capture(void)
{
        CUgraph graph = NULL;
        void *p = get(BYTES, 0), *q;

        GR_MUST(cuMemFreeHost(p));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        gt_check(cuMemHostAlloc(&q, BYTES, 0) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "an allocation in a capture",
                 "not refused");
        gt_check(cuStreamEndCapture(stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "the capture", "goes on");
}

static void reuse(void)
{
        static const unsigned kinds[] = {0, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP,
                                         CU_MEMHOSTALLOC_WRITECOMBINED};
        enum { KINDS = sizeof kinds / sizeof kinds[0] };
        void *first[KINDS];
        unsigned again = 0, mixed = 0;

        GR_MUST(cuCtxSynchronize());
        for (unsigned i = 0; i < KINDS; i++) {
                first[i] = get(2 * BYTES, kinds[i]);
                GR_MUST(cuMemFreeHost(first[i]));
        }
        for (unsigned i = 0; i < KINDS; i++) {
                void *p = get(2 * BYTES, kinds[i]);

                again += p == first[i];
                for (unsigned j = 0; j < KINDS; j++)
                        mixed += j != i && p == first[j];
                GR_MUST(cuMemFreeHost(p));
        }
        /* Write-combined memory that the device knows by another address is never kept. */
        gt_check(again >= KINDS - 1 && mixed == 0, "reuse", "%u of %d kinds came back, %u mixed up", again, KINDS,
                 mixed);
}

static void safety(bool expect_reuse)
{
        int devices;

        for (int i = 0; i < 3; i++) {
                late_read("late copy", 0, copy_by_engine);
                late_read("late copy, portable", CU_MEMHOSTALLOC_PORTABLE, copy_by_engine);
                late_read("late read by a kernel", CU_MEMHOSTALLOC_DEVICEMAP, copy_by_kernel);
                late_write(CU_MEMHOSTALLOC_DEVICEMAP);
        }
        late_read_elsewhere(gt.device, "late copy of another context", expect_reuse);
        GR_MUST(cuDeviceGetCount(&devices));
        if (devices > 1)
                late_read_elsewhere(1, "late copy of another device", expect_reuse);
        captured(expect_reuse, CU_STREAM_CAPTURE_MODE_RELAXED);
        captured(expect_reuse, CU_STREAM_CAPTURE_MODE_GLOBAL);
        refused_in_a_capture();
        if (expect_reuse)
                reuse();
}

static void tell(const char *what, void *p)
{
        unsigned flags = 99, type = 99;
        size_t range = 0;
        CUdeviceptr ptr = 0, base = 0, start = 0;
        CUcontext owner = NULL;
        CUresult r[6];

        r[0] = cuMemHostGetFlags(&flags, p);
        r[1] = cuMemHostGetDevicePointer(&ptr, p, 0);
        r[2] = cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)p);
        r[3] = cuPointerGetAttribute(&range, CU_POINTER_ATTRIBUTE_RANGE_SIZE, (CUdeviceptr)p);
        r[4] = cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, (CUdeviceptr)p);
        r[5] = cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, (CUdeviceptr)p);
        printf("%s: flags %d %x, device pointer %d %s, type %d %u, range %d %zu, owner %d %s, start %d %s\n", what,
               (int)r[0], r[0] ? 0 : flags, (int)r[1], r[1] || ptr != (CUdeviceptr)p ? "other" : "same", (int)r[2],
               r[2] ? 0 : type, (int)r[3], r[3] ? 0 : range, (int)r[4], !r[4] && owner == gt.ctx ? "ours" : "none",
               (int)r[5], !r[5] && start == (CUdeviceptr)p ? "it" : "other");
        range = 0;
        r[0] = cuMemGetAddressRange(&base, &range, (CUdeviceptr)p);
        printf("%s: address range %d %s %zu\n", what, (int)r[0], !r[0] && base == (CUdeviceptr)p ? "it" : "other",
               r[0] ? 0 : range);
}

/* Whether pinned memory is still there once its context is not. For those who want to know: nothing depends on it. */
static void end_of_context(unsigned flags)
{
        unsigned char there;
        CUcontext context;
        void *p;

        GR_MUST(cuCtxCreate(&context, NULL, 0, gt.device));
        p = get(MIB, flags);
        GR_MUST(cuCtxDestroy(context));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        printf("~ flags %u, context destroyed: memory %s\n", flags,
               mincore(p, 4096, &there) == 0 ? "still mapped" : "unmapped");
}

/* What a thread in relaxed mode does to a capture of the strictest mode. */
static void beside_capture(void)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        void *p = get(MIB, 0), *q;
        CUgraph graph = NULL;
        CUresult freed, taken, ended;

        GR_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
        GR_MUST(cuThreadExchangeStreamCaptureMode(&mode));
        freed = cuMemFreeHost(p);
        taken = cuMemHostAlloc(&q, MIB, 0);
        GR_MUST(cuThreadExchangeStreamCaptureMode(&mode));
        ended = cuStreamEndCapture(stream, &graph);
        printf("~ beside a global capture, in relaxed mode: free %d, allocation %d, end of capture %d\n", (int)freed,
               (int)taken, (int)ended);
        if (ended == CUDA_SUCCESS)
                GR_MUST(cuGraphDestroy(graph));
        if (freed != CUDA_SUCCESS)
                GR_MUST(cuMemFreeHost(p));
        if (taken == CUDA_SUCCESS)
                GR_MUST(cuMemFreeHost(q));
}

static void facts(void)
{
        static const size_t sizes[] = {1000, 300000, 3 * MIB + 5};
        unsigned long long ids[8] = {0};
        bool unique = true;
        void *p;

        for (unsigned flags = 0; flags < 8; flags++)
                for (unsigned i = 0; i < 3; i++)
                        for (int turn = 0; turn < 2; turn++) {
                                char name[64];

                                snprintf(name, sizeof name, "flags %u, %zu bytes, turn %d", flags, sizes[i], turn);
                                p = get(sizes[i], flags);
                                tell(name, p);
                                GR_MUST(cuMemFreeHost(p));
                        }
        GR_MUST(cuMemAllocHost(&p, 1000));
        tell("plain", p);
        GR_MUST(cuMemFreeHost(p));
        for (int i = 0; i < 8; i++) {
                p = get(MIB, 0);
                GR_MUST(cuPointerGetAttribute(&ids[i], CU_POINTER_ATTRIBUTE_BUFFER_ID, (CUdeviceptr)p));
                for (int j = 0; j < i; j++)
                        unique = unique && ids[i] != ids[j];
                GR_MUST(cuMemFreeHost(p));
        }
        printf("buffer ids unique: %d\n", unique);
        p = get(MIB, 0);
        printf("other frees of it: %d, unregister %d\n", (int)cuMemFree((CUdeviceptr)p), (int)cuMemHostUnregister(p));
        printf("registered again: %d\n", (int)cuMemHostRegister(p, MIB, 0));
        printf("freed: %d\n", (int)cuMemFreeHost(p));
        tell("freed", p);
        printf("freed twice: %d\n", (int)cuMemFreeHost(p));
        printf("flags that are none: %d\n", (int)cuMemHostAlloc(&p, MIB, 64));
        printf("nothing: %d\n", (int)cuMemHostAlloc(&p, 0, 0));
        end_of_context(0);
        end_of_context(CU_MEMHOSTALLOC_PORTABLE);
        beside_capture();
}

static int by_value(const void *a, const void *b)
{
        const double *x = a, *y = b;

        return (*x > *y) - (*x < *y);
}

static double pair(size_t bytes, long n)
{
        double begin = gt_now_us();

        for (long i = 0; i < n; i++) {
                void *p = get(bytes, 0);

                GR_MUST(cuMemFreeHost(p));
        }
        return (gt_now_us() - begin) / (double)n;
}

static void bench(void)
{
        static const struct {
                const char *name;
                size_t bytes;
        } rows[] = {{"64 KiB", 64 * KIB}, {"64 MiB", 64 * MIB}, {"1 GiB", GIB}};
        struct gr_json json;

        gr_json_begin(&json, gr_sink_file, stdout, 2);
        gr_json_object(&json, NULL);
        gr_json_number(&json, "schema", "1");
        gr_json_string(&json, "program", "pinned");
        gr_json_string(&json, "unit", "us");
        gr_json_number(&json, "repetitions", "%d", REPETITIONS);
        gr_json_object(&json, "results");
        for (unsigned i = 0; i < sizeof rows / sizeof rows[0]; i++) {
                double us[REPETITIONS];
                long n = 1;

                if (gt.simulated && rows[i].bytes > 64 * MIB)
                        continue;
                /* Enough pairs for the clock, one where the driver takes long; the first ones also warm up. */
                while (pair(rows[i].bytes, n) * (double)n < 5000 && n < 100000)
                        n *= 2;
                for (int k = 0; k < REPETITIONS; k++)
                        us[k] = pair(rows[i].bytes, n);
                qsort(us, REPETITIONS, sizeof us[0], by_value);
                gr_json_object(&json, rows[i].name);
                gr_json_number(&json, "median", "%.4f", us[REPETITIONS / 2]);
                gr_json_number(&json, "least", "%.4f", us[0]);
                gr_json_number(&json, "most", "%.4f", us[REPETITIONS - 1]);
                gr_json_close(&json);
        }
        gr_json_close(&json);
        gr_json_close(&json);
        gr_json_end(&json);
}

/* A thread that launches, either without a pause or with a wait after every launch, and takes the time of each. */
enum { MOST_LAUNCHES = 2000000 };
enum { QUEUE = 1000 }; /* of a device, which is full then; the simulated one's never is */

static struct launches {
        bool waits;
        _Atomic bool stop;
        size_t count;
        float us[MOST_LAUNCHES];
} launches;

static void *launch(void *arg)
{
        CUstream own;

        (void)arg;
        gt_attach(&gt);
        own = gt_stream();
        while (!launches.stop && launches.count < MOST_LAUNCHES) {
                double begin = gt_now_us();

                GR_MUST(gt_spin(&gt, own, 5));
                launches.us[launches.count++] = (float)(gt_now_us() - begin);
                if (launches.waits || (gt.simulated && launches.count % QUEUE == 0))
                        GR_MUST(cuStreamSynchronize(own));
        }
        GR_MUST(cuStreamDestroy(own));
        return NULL;
}

static int by_float(const void *a, const void *b)
{
        const float *x = a, *y = b;

        return (*x > *y) - (*x < *y);
}

static void stall(bool waits, size_t piece, double seconds)
{
        size_t total = gt.simulated ? 64 * MIB : GIB, count = total / piece;
        void **pieces = calloc(count, sizeof *pieces);
        double begin, free_us;
        pthread_t thread;

        if (!pieces)
                gt_die("out of memory");
        for (size_t i = 0; i < count; i++)
                pieces[i] = get(piece, 0);
        launches.waits = waits;
        launches.stop = false;
        launches.count = 0;
        if (pthread_create(&thread, NULL, launch, NULL))
                gt_die("no thread");
        gt_sleep_us(50000);
        begin = gt_now_us();
        for (size_t i = 0; i < count; i++)
                GR_MUST(cuMemFreeHost(pieces[i]));
        free_us = gt_now_us() - begin;
        gt_sleep_us(seconds * 1e6);
        launches.stop = true;
        pthread_join(thread, NULL);
        qsort(launches.us, launches.count, sizeof launches.us[0], by_float);
        printf("%4zu MiB pieces, %s: %zu MiB freed in %.1f ms; %zu launches, p50 %.1f p99 %.1f max %.1f us\n",
               piece / MIB, waits ? "launch and wait" : "launches", total / MIB, free_us / 1e3, launches.count,
               launches.us[launches.count / 2], launches.us[launches.count / 100 * 99],
               launches.us[launches.count - 1]);
        free(pieces);
}

int main(int argc, char **argv)
{
        const char *mode = argc > 1 ? argv[1] : "";

        gt_open(&gt);
        stream = gt_stream();
        if (!strcmp(mode, "--facts"))
                facts();
        else if (!strcmp(mode, "--bench"))
                bench();
        else if (!strcmp(mode, "--stall"))
                for (int i = 0; i < 4; i++)
                        stall(i / 2, (i % 2 ? 64 : 4) * MIB, gt.simulated ? 0.2 : 3);
        else
                safety(!strcmp(mode, "--expect-reuse"));
        gt_close(&gt);
        return GR_CHECK_RESULT();
}
