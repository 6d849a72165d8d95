/*
 * How long a sleep and a wake take (GPURECLAIM_SLEEP=demand), and whether the content is right after it:
 *
 *   sleep_times [--size=4GiB] [--rounds=3]
 *
 * Blocks of 2 MiB to 1 GiB are filled. In each round the command gpureclaim (GR_TEST_COMMAND) puts the process to
 * sleep, and a copy of one word wakes it; then a 16th of each block is compared. One line for a round, and at the end
 * the least times of all, "# out_s" and "# in_s" in seconds. Ends with status 1 where a word is wrong, or where less
 * than nine tenths have left the device.
 */
#include "gputest.h"

#include "base/arith.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MOST = 4096, SAMPLE = 1 << 20, STEP = 16 << 20 };

static struct gt gt;
static struct {
        CUdeviceptr ptr;
        size_t bytes;
        uint32_t value;
} blocks[MOST];
static unsigned count;

static void fill(size_t left)
{
        uint64_t random = 1;

        while (left >= GT_PAGE && count < MOST) {
                size_t bytes = gr_min((uint64_t)GT_PAGE << gt_random(&random) % 10, left / GT_PAGE * GT_PAGE);

                blocks[count].bytes = bytes;
                blocks[count].value = count * 77 + 1;
                GR_MUST(cuMemAlloc(&blocks[count].ptr, bytes));
                GR_MUST(cuMemsetD32(blocks[count].ptr, blocks[count].value, bytes / 4));
                count++;
                left -= bytes;
        }
        GR_MUST(cuCtxSynchronize());
}

static size_t wrong_words(void)
{
        uint32_t *sample = malloc(SAMPLE);
        size_t wrong = 0;

        for (unsigned i = 0; i < count; i++)
                for (size_t at = 0; at < blocks[i].bytes; at += STEP) {
                        size_t bytes = gr_min(blocks[i].bytes - at, SAMPLE);

                        GR_MUST(cuMemcpyDtoH(sample, blocks[i].ptr + at, bytes));
                        for (size_t word = 0; word < bytes / 4; word++)
                                wrong += sample[word] != blocks[i].value;
                }
        free(sample);
        return wrong;
}

/* The seconds that it takes. */
static double order_sleep(void)
{
        char line[256];
        double begin_us = gt_now_us();

        snprintf(line, sizeof(line), "env -u LD_PRELOAD \"$GR_TEST_COMMAND\" sleep --timeout 60s %d >&2",
                 (int)getpid());
        if (system(line) != 0)
                gt_die("it did not sleep");
        return (gt_now_us() - begin_us) / 1e6;
}

int main(int argc, char **argv)
{
        size_t size = 4 * GIB, before = 0, after = 0, wrong = 0;
        double out = 0, in = 0;
        int rounds = 3;

        GT_OPTIONS(argc, argv, "[--size=SIZE] [--rounds=N]", GT_OPTION("size", size), GT_OPTION("rounds", rounds));
        gt_open(&gt);
        fill(size);
        for (volatile int round = 0; round < rounds; round++) {
                double begin_us, out_now, in_now;
                uint32_t word;

                if (!gt_footprint(&gt, &before))
                        gt_die("the footprint cannot be asked");
                out_now = order_sleep();
                gt_footprint(&gt, &after);
                begin_us = gt_now_us();
                GR_MUST(cuMemcpyDtoH(&word, blocks[0].ptr, sizeof(word)));
                in_now = (gt_now_us() - begin_us) / 1e6;
                wrong += wrong_words();
                out = round && out < out_now ? out : out_now;
                in = round && in < in_now ? in : in_now;
                printf("%.0f MiB of %.0f went to host memory in %.3f s, and were back in %.3f s\n",
                       gt_mib(before - after), gt_mib(size), out_now, in_now);
                if (before < after || before - after < size / 10 * 9)
                        gt_die("too little has left the device");
        }
        printf("# out_s %.3f\n# in_s %.3f\n# wrong %zu\n", out, in, wrong);
        gt_close(&gt);
        return wrong > 0;
}
