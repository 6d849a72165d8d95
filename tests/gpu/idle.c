/*
 * A program that peaks and then pauses: what the card still holds of it over time, and how long launches take on
 * another stream while memory goes back.
 *
 *   idle [--peak=60GiB] [--seconds=13] [--csv=FILE]
 *
 * It allocates blocks of 2 MiB to 1 GiB up to the peak, frees them all, and from then on launches small kernels on a
 * second stream. Lines "# name value": launch_us is the call alone, round_us until the kernel was seen to be done;
 * free_max_us the longest free, beside a kernel of 50 ms. With --csv a thread of its own looks at the card 20 times a
 * second, which makes launches wait more often than what is looked for.
 * idle.py runs it natively and under the library.
 */
#include "gputest.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BLOCKS = 4096, MOST_SAMPLES = 2000000, LOOK_US = 50000, PAUSE_US = 150, SPIN_US = 50000 };

static struct gt gt;
static CUdeviceptr blocks[MOST_BLOCKS];
static double launch_us[MOST_SAMPLES], round_us[MOST_SAMPLES];
static size_t samples;
static double began_us;
static FILE *csv;
static _Atomic bool done;

static double held_mib(void)
{
        size_t bytes;

        if (!gt_footprint(&gt, &bytes)) {
                fprintf(stderr, "skipped: the card cannot be asked what the process holds\n");
                exit(GT_SKIPPED);
        }
        return (double)bytes / (double)MIB;
}

static void *watch(void *arg)
{
        (void)arg;
        while (!atomic_load(&done)) {
                fprintf(csv, "%.3f,%.1f\n", (gt_now_us() - began_us) / 1e6, held_mib());
                gt_sleep_us(LOOK_US);
        }
        return NULL;
}

static int by_size(const void *a, const void *b)
{
        double x = *(const double *)a, y = *(const double *)b;

        return (x > y) - (x < y);
}

static void tell(const char *name, double *values)
{
        qsort(values, samples, sizeof(*values), by_size);
        printf("# %s_p50 %.2f\n# %s_p99 %.2f\n# %s_p999 %.2f\n# %s_max %.1f\n", name, values[samples / 2], name,
               values[samples * 99 / 100], name, values[samples * 999 / 1000], name, values[samples - 1]);
}

static void launch_for(CUstream stream, CUdeviceptr p, double us)
{
        double end = gt_now_us() + us;

        while (gt_now_us() < end && samples < MOST_SAMPLES) {
                double begin = gt_now_us();
                CUresult result;

                GR_MUST(gt_fill(&gt, stream, p, 1, 64));
                launch_us[samples] = gt_now_us() - begin;
                while ((result = cuStreamQuery(stream)) == CUDA_ERROR_NOT_READY)
                        ;
                GR_MUST(result);
                round_us[samples++] = gt_now_us() - begin;
                gt_sleep_us(PAUSE_US);
        }
}

int main(int argc, char **argv)
{
        size_t peak = 60 * GIB, count = 0, available, total;
        double seconds = 13, free_us, longest_free_us = 0;
        uint64_t seed = 3;
        const char *csv_path = NULL;
        CUstream work, beside;
        CUdeviceptr small;
        pthread_t watcher;

        GT_OPTIONS(argc, argv, "[--peak=SIZE] [--seconds=N] [--csv=FILE]", GT_OPTION("peak", peak),
                   GT_OPTION("seconds", seconds), GT_OPTION("csv", csv_path));
        csv = csv_path ? fopen(csv_path, "w") : NULL;
        gt_open(&gt);
        work = gt_stream();
        beside = gt_stream();
        GR_MUST(cuMemAlloc(&small, 4096));
        GR_MUST(cuMemGetInfo(&available, &total));
        if (peak > available / 10 * 9)
                peak = available / 10 * 9;
        held_mib();
        launch_for(beside, small, 2e5); /* warm */
        samples = 0;
        began_us = gt_now_us();
        if (csv) {
                fprintf(csv, "seconds,mib\n");
                if (pthread_create(&watcher, NULL, watch, NULL))
                        gt_die("no thread");
        }
        gt_sleep_us(0.3e6);

        for (size_t held = 0; held < peak && count < MOST_BLOCKS; count++) {
                size_t bytes = 2 * MIB + gt_random(&seed) % GIB;

                if (bytes > peak - held)
                        bytes = peak - held;
                GR_MUST(cuMemAlloc(&blocks[count], bytes));
                GR_MUST(gt_fill(&gt, work, blocks[count], 1, 64));
                held += bytes;
        }
        GR_MUST(cuStreamSynchronize(work));
        printf("# peak_mib %.0f\n# blocks %zu\n", held_mib(), count);
        gt_sleep_us(0.3e6);
        GR_MUST(gt_spin(&gt, work, SPIN_US));
        free_us = gt_now_us();
        for (size_t i = 0; i < count; i++) {
                double begin = gt_now_us();

                GR_MUST(cuMemFree(blocks[i]));
                if (gt_now_us() - begin > longest_free_us)
                        longest_free_us = gt_now_us() - begin;
        }
        printf("# freed_at_s %.3f\n# free_all_ms %.2f\n# free_max_us %.0f\n", (free_us - began_us) / 1e6,
               (gt_now_us() - free_us) / 1e3, longest_free_us);
        launch_for(beside, small, seconds * 1e6);
        printf("# end_mib %.0f\n# context_mib %.0f\n# launches %zu\n", held_mib(),
               (double)gt.context_bytes / (double)MIB, samples);
        tell("launch_us", launch_us);
        tell("round_us", round_us);
        atomic_store(&done, true);
        if (csv && (pthread_join(watcher, NULL) || fclose(csv)))
                gt_die("the CSV file could not be written");
        GR_MUST(cuMemFree(small));
        gt_close(&gt);
        return EXIT_SUCCESS;
}
