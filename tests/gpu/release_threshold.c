/*
 * The release threshold as the card sees it: after a peak, memory comes back while a kernel keeps running, and nothing
 * the program calls has to wait for that kernel. Natively the same program shows what cuMemFree does instead.
 *
 *   GPURECLAIM_RELEASE_THRESHOLD=64MiB LD_PRELOAD=... release_threshold --threshold=64MiB [--peak=16GiB]
 *
 * Exit status 1 when memory did not come back in time or a call waited.
 */
#include "gputest.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BLOCKS = 512, LIVE_BLOCKS = 4, PAUSE_US = 5000, WATCH_US = 2000, STALL_US = 50000 };

static struct gt gt;
static size_t threshold, peak;
static CUstream slow, work;
static CUdeviceptr blocks[MOST_BLOCKS];
static size_t block_count;
static double longest_us;
static const char *longest_call = "none";

static _Atomic uint64_t stalled_us; /* the machine stood still, as it does under some hosts, and no call waited */

static void *watch(void *arg)
{
        (void)arg;
        for (double last = gt_now_us(), now;; last = now) {
                gt_sleep_us(WATCH_US);
                now = gt_now_us();
                if (now - last > STALL_US)
                        stalled_us += (uint64_t)(now - last);
        }
        return NULL;
}

/* A call that the program must not have to wait in. */
#define TIMED(call)                                                                                                    \
        do {                                                                                                           \
                uint64_t stalled_ = stalled_us;                                                                        \
                double begin_ = gt_now_us();                                                                           \
                GR_MUST(call);                                                                                         \
                note(#call, gt_now_us() - begin_, stalled_);                                                           \
        } while (0)

static void note(const char *call, double us, uint64_t stalled_before_us)
{
        if (us > STALL_US) {
                gt_sleep_us(STALL_US); /* whoever watches sees it, too */
                us -= (double)(stalled_us - stalled_before_us);
        }
        if (us <= longest_us)
                return;
        longest_us = us;
        longest_call = call;
}

static size_t footprint(void)
{
        size_t bytes;

        if (!gt_footprint(&gt, &bytes)) {
                fprintf(stderr, "skipped: the card cannot be asked what the process holds\n");
                exit(GT_SKIPPED);
        }
        return bytes > gt.context_bytes ? bytes - gt.context_bytes : 0;
}

/* Blocks from 2 MiB to an eighth of the peak, each written to. */
static void climb(void)
{
        uint64_t seed = 3;

        for (size_t held = 0; held < peak && block_count < MOST_BLOCKS; block_count++) {
                size_t bytes = 2 * MIB + gt_random(&seed) % (peak / 8);

                if (bytes > peak - held)
                        bytes = peak - held;
                GR_MUST(cuMemAlloc(&blocks[block_count], bytes));
                GR_MUST(gt_fill(&gt, work, blocks[block_count], 1, 256 < bytes / 4 ? 256 : bytes / 4));
                held += bytes;
        }
}

static void descend(void)
{
        while (block_count)
                TIMED(cuMemFree(blocks[--block_count]));
}

/* A program that goes on with little. */
static void step(uint64_t *seed)
{
        CUdeviceptr p;

        TIMED(cuMemAlloc(&p, 4096 + gt_random(seed) % (4 * MIB)));
        TIMED(gt_fill(&gt, work, p, 1, 1024));
        TIMED(cuMemFree(p));
        gt_sleep_us(PAUSE_US);
}

/*
 * Whether the footprint fell to the target before the slow stream was done, or (with AFTERWARDS) within a second of it.
 */
static bool comes_back(const char *name, size_t target, bool afterwards)
{
        double begin = gt_now_us(), back_us = -1;
        uint64_t seed = 5;
        size_t least = SIZE_MAX;
        bool running = true;

        for (int after = 0; back_us < 0 && after < 200;) {
                size_t now;

                step(&seed);
                now = footprint();
                running = cuStreamQuery(slow) == CUDA_ERROR_NOT_READY;
                after += !running;
                least = now < least ? now : least;
                if (now <= target && (running || afterwards))
                        back_us = gt_now_us() - begin;
                if (!running && !afterwards)
                        break;
        }
        if (back_us < 0)
                printf("FAILED %s: did not fall to %.1f MiB%s; least %.1f MiB\n", name, gt_mib(target),
                       afterwards ? "" : " while the kernel ran", gt_mib(least));
        else
                printf("ok     %s: %.1f MiB after %.1f ms, kernel %s\n", name, gt_mib(least), back_us / 1e3,
                       running ? "still running" : "done");
        return back_us >= 0;
}

int main(int argc, char **argv)
{
        const size_t live_bytes = 16 * MIB, slack_bytes = 48 * MIB;
        CUdeviceptr live[LIVE_BLOCKS];
        size_t available, total, before, target;
        double slow_us, most_us;
        pthread_t watcher;
        bool good = true;

        GT_OPTIONS(argc, argv, "[--threshold=SIZE] [--peak=SIZE]", GT_OPTION("threshold", threshold),
                   GT_OPTION("peak", peak));
        gt_open(&gt);
        if (pthread_create(&watcher, NULL, watch, NULL))
                gt_die("no thread");
        slow = gt_stream();
        work = gt_stream();
        GR_MUST(cuMemGetInfo(&available, &total));
        if (!peak)
                peak = available / 2 < 16 * GIB ? available / 2 : 16 * GIB;
        slow_us = gt.simulated ? 1.2e6 : 3e6;
        /* A call that waits for the kernel takes its time many times over; this only has to be far from both. */
        most_us = slow_us / 2;
        for (int i = 0; i < LIVE_BLOCKS; i++)
                GR_MUST(cuMemAlloc(&live[i], live_bytes));
        target = LIVE_BLOCKS * live_bytes + threshold + slack_bytes;

        climb();
        before = footprint();
        printf("peak %.1f MiB on the card (%s), live set %.1f MiB, threshold %.1f MiB\n", gt_mib(before),
               gt_footprint_source(&gt), gt_mib(LIVE_BLOCKS * live_bytes), gt_mib(threshold));
        descend();
        GR_MUST(gt_spin(&gt, slow, (uint64_t)slow_us));
        good = comes_back("freed before the kernel began", target, false) && good;
        GR_MUST(cuCtxSynchronize());

        climb();
        GR_MUST(cuStreamSynchronize(work));
        GR_MUST(gt_spin(&gt, slow, (uint64_t)slow_us));
        /* The kernel might use them, for all anybody knows: they can only come back once it is done. */
        descend();
        good = comes_back("freed while the kernel runs", target, true) && good;

        printf("%-6s longest call: %.0f us in %s; the kernel took %.0f us\n", longest_us < most_us ? "ok" : "FAILED",
               longest_us, longest_call, slow_us);
        good = good && longest_us < most_us;
        for (int i = 0; i < LIVE_BLOCKS; i++)
                GR_MUST(cuMemFree(live[i]));
        gt_close(&gt);
        return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
