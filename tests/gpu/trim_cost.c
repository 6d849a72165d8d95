/*
 * What getting memory back costs where a large request meets a cache that holds it all: natively cuMemFree of the same
 * blocks and then the request, under the library the request alone, which climbs the ladder.
 *
 *   trim_cost [--cache=64GiB] [--block=64MiB] [--rounds=5]
 *
 * The rest of the card is taken first, so that the request needs every block back; under a hard limit the card ends
 * there. Lines "# name value" in ms: free_ms all frees, alloc_ms the request, sum_ms both, medians of all rounds but
 * the first; first_ms the request of the first round, in which the process gives back through a stream for the first
 * time (4 to 8 ms by itself on an H200). Exit status 1 when the request fails or memory was not what it should be.
 */
#include "gputest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BLOCKS = 65536, MOST_ROUNDS = 99, WORDS = 256 };

static struct gt gt;
static CUdeviceptr blocks[MOST_BLOCKS];
static double free_ms[MOST_ROUNDS], alloc_ms[MOST_ROUNDS], sum_ms[MOST_ROUNDS];

static int by_size(const void *a, const void *b)
{
        double x = *(const double *)a, y = *(const double *)b;

        return (x > y) - (x < y);
}

static double median(double *values, unsigned count)
{
        qsort(values, count, sizeof(*values), by_size);
        return values[count / 2];
}

static size_t available_bytes(void)
{
        size_t available, total;

        GR_MUST(cuMemGetInfo(&available, &total));
        return available;
}

/* Takes what is left above slack_bytes. A refusal only means that the figure was too good. */
static void fill_up(size_t slack_bytes)
{
        CUdeviceptr p;

        for (size_t piece = available_bytes(); piece > slack_bytes; piece -= piece / 16) {
                size_t bytes = (piece - slack_bytes) / GT_PAGE * GT_PAGE;

                if (bytes == 0 || cuMemAlloc(&p, bytes) == CUDA_SUCCESS)
                        return;
        }
}

int main(int argc, char **argv)
{
        size_t cache = 64 * GIB, block = 64 * MIB, slack = 256 * MIB, count;
        unsigned rounds = 5;
        CUdeviceptr large, counter;
        uint32_t wrong;
        double first;

        GT_OPTIONS(argc, argv, "[--cache=SIZE] [--block=SIZE] [--rounds=N]", GT_OPTION("cache", cache),
                   GT_OPTION("block", block), GT_OPTION("rounds", rounds));
        gt_open(&gt);
        if (cache > available_bytes() / 10 * 8)
                cache = available_bytes() / 10 * 8;
        if (slack > cache / 8)
                slack = cache / 8;
        count = cache / gt_pages(block);
        if (count == 0 || count > MOST_BLOCKS || rounds < 2 || rounds > MOST_ROUNDS)
                gt_die("too many blocks or rounds, or too few");
        cache = count * gt_pages(block);
        GR_MUST(cuMemAlloc(&counter, sizeof(wrong)));
        for (unsigned round = 0; round < rounds; round++) {
                double begin;

                for (size_t i = 0; i < count; i++) {
                        GR_MUST(cuMemAlloc(&blocks[i], block));
                        GR_MUST(gt_fill(&gt, NULL, blocks[i], round, WORDS));
                }
                if (round == 0)
                        fill_up(slack);
                GR_MUST(cuCtxSynchronize());
                if (available_bytes() >= cache)
                        gt_die("the card is not full: the request would need nothing back");
                begin = gt_now_us();
                for (size_t i = 0; i < count; i++)
                        GR_MUST(cuMemFree(blocks[i]));
                free_ms[round] = (gt_now_us() - begin) / 1e3;
                begin = gt_now_us();
                GR_MUST(cuMemAlloc(&large, cache));
                alloc_ms[round] = (gt_now_us() - begin) / 1e3;
                sum_ms[round] = free_ms[round] + alloc_ms[round];
                GR_MUST(cuMemsetD8(counter, 0, sizeof(wrong)));
                GR_MUST(gt_fill(&gt, NULL, large, 7, cache / 4));
                GR_MUST(gt_count_diff(&gt, NULL, large, 7, cache / 4, counter));
                GR_MUST(cuMemcpyDtoH(&wrong, counter, sizeof(wrong)));
                if (wrong)
                        gt_die("%u words are not what was written", wrong);
                GR_MUST(cuMemFree(large));
        }
        first = alloc_ms[0];
        printf("# blocks %zu\n# cache_mib %zu\n# free_ms %.3f\n# first_ms %.3f\n# alloc_ms %.3f\n# sum_ms %.3f\n",
               count, cache / MIB, median(free_ms + 1, rounds - 1), first, median(alloc_ms + 1, rounds - 1),
               median(sum_ms + 1, rounds - 1));
        gt_close(&gt);
        return EXIT_SUCCESS;
}
