/*
 * An allocation-heavy program whose dead objects only a collection can free, as in a language with a garbage collector,
 * under a limit.
 *
 *   gc_program [--limit=4GiB] [--steps=4000] [--mark-us=3000] [--work-us=1000]
 *
 * Each step allocates a few arrays, launches a kernel on each, drops those of some steps before, and now and then waits
 * for the GPU. A collection costs its thread mark_us and frees all that was dropped. Under the library it is a
 * registered purge hook; natively, or where the library refuses, the program collects by itself as its allocations meet
 * the limit. Lines "# name value": total_ms, the longest step and the longest single call, and how often it collected.
 * Exit status 1 when memory was lost or used by two.
 */
#include "gpureclaim.h"
#include "gputest.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LIVE_STEPS = 8, ARRAYS = 4, WAIT_EVERY = 8, MOST_DEAD = 1 << 16, WORDS = 64 };

struct array {
        CUdeviceptr at;
        size_t bytes;
        uint32_t value;
};

static struct gt gt;
static CUstream stream;
static CUdeviceptr counter;
static struct array live[LIVE_STEPS][ARRAYS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static struct array dead[MOST_DEAD];
static size_t dead_count, held_bytes;
static unsigned collections;
static double mark_us = 3000;

static void busy(double us)
{
        double end = gt_now_us() + us;

        while (gt_now_us() < end)
                ;
}

static int collect(void *arg, int device, uint64_t want_bytes)
{
        int rc = 0;

        (void)arg;
        (void)device;
        (void)want_bytes;
        pthread_mutex_lock(&lock);
        busy(mark_us);
        collections++;
        while (dead_count > 0 && rc == 0) {
                held_bytes -= dead[--dead_count].bytes;
                rc = (int)cuMemFree(dead[dead_count].at);
        }
        pthread_mutex_unlock(&lock);
        return rc;
}

/* The longest of a kind, and which it was. */
struct longest {
        double us;
        const char *what;
};

static struct longest longest_call, longest_step;

static void note(struct longest *longest, double us, const char *what)
{
        if (us > longest->us)
                *longest = (struct longest){.us = us, .what = what};
}

#define TIMED(call)                                                                                                    \
        do {                                                                                                           \
                double begin_ = gt_now_us();                                                                           \
                GR_MUST(call);                                                                                         \
                note(&longest_call, gt_now_us() - begin_, #call);                                                      \
        } while (0)

static void allocate(struct array *array, size_t limit, bool by_itself)
{
        double begin = gt_now_us();
        CUresult result;
        bool full;

        pthread_mutex_lock(&lock);
        full = by_itself && held_bytes + array->bytes > limit;
        pthread_mutex_unlock(&lock);
        if (full)
                collect(NULL, 0, 0);
        result = cuMemAlloc(&array->at, array->bytes);
        if (result == CUDA_ERROR_OUT_OF_MEMORY) {
                collect(NULL, 0, 0);
                result = cuMemAlloc(&array->at, array->bytes);
        }
        GR_MUST(result);
        note(&longest_call, gt_now_us() - begin, "cuMemAlloc");
        pthread_mutex_lock(&lock);
        held_bytes += array->bytes;
        pthread_mutex_unlock(&lock);
}

static void drop(struct array *array)
{
        if (!array->at)
                return;
        GR_MUST(gt_count_diff(&gt, stream, array->at, array->value, WORDS, counter));
        pthread_mutex_lock(&lock);
        if (dead_count == MOST_DEAD)
                gt_die("too many dead arrays");
        dead[dead_count++] = *array;
        pthread_mutex_unlock(&lock);
        array->at = 0;
}

int main(int argc, char **argv)
{
        gpureclaim_register_function *enlist;
        struct gpureclaim_reclaimable hook = {.struct_bytes = sizeof(hook), .name = "collector", .purge = collect};
        size_t limit = 4 * GIB, most;
        unsigned steps = 4000;
        double work_us = 1000, begin_us;
        uint64_t seed = 11, id;
        uint32_t wrong;

        GT_OPTIONS(argc, argv, "[--limit=SIZE] [--steps=N] [--mark-us=US] [--work-us=US]", GT_OPTION("limit", limit),
                   GT_OPTION("steps", steps), GT_OPTION("mark-us", mark_us), GT_OPTION("work-us", work_us));
        gt_open(&gt);
        enlist = (gpureclaim_register_function *)dlsym(RTLD_DEFAULT, "gpureclaim_register");
        if (enlist && enlist(&hook, &id))
                gt_die("the hook was not taken");
        stream = gt_stream();
        GR_MUST(cuMemAlloc(&counter, sizeof(wrong)));
        GR_MUST(cuMemsetD8(counter, 0, sizeof(wrong)));
        most = limit / 256; /* live arrays take at most an eighth */
        begin_us = gt_now_us();
        for (unsigned step = 0; step < steps; step++) {
                struct array *arrays = live[step % LIVE_STEPS];
                double step_us = gt_now_us();

                for (int i = 0; i < ARRAYS; i++) {
                        drop(&arrays[i]);
                        arrays[i] = (struct array){.bytes = 4096 + gt_random(&seed) % most, .value = step * ARRAYS + i};
                        allocate(&arrays[i], limit, !enlist);
                        TIMED(gt_fill(&gt, stream, arrays[i].at, arrays[i].value, WORDS));
                }
                TIMED(gt_spin(&gt, stream, (uint64_t)work_us));
                if (step % WAIT_EVERY == WAIT_EVERY - 1)
                        GR_MUST(cuStreamSynchronize(stream));
                note(&longest_step, gt_now_us() - step_us, "step");
        }
        GR_MUST(cuStreamSynchronize(stream));
        printf("# total_ms %.1f\n# gpu_ms %.1f\n", (gt_now_us() - begin_us) / 1e3, steps * work_us / 1e3);
        printf("# call_max_us %.0f\n# step_max_us %.0f\n# collections %u\n", longest_call.us, longest_step.us,
               collections);
        printf("longest call: %s\n", longest_call.what);
        for (int i = 0; i < LIVE_STEPS * ARRAYS; i++)
                drop(&live[i / ARRAYS][i % ARRAYS]);
        GR_MUST(cuMemcpyDtoH(&wrong, counter, sizeof(wrong)));
        if (collect(NULL, 0, 0) || held_bytes)
                gt_die("%zu bytes were lost", held_bytes);
        if (wrong)
                gt_die("%u words are not what was written", wrong);
        gt_close(&gt);
        return EXIT_SUCCESS;
}
