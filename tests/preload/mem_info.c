/*
 * What the program is told of memory while what it freed goes back to the driver: never more than there is.
 *
 *   mem_info
 */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "check.h"

enum { BLOCKS = 12, ROUNDS = 6, LOOKS_MS = 80 };
static const size_t block_bytes = (size_t)16 << 20;

static size_t available_bytes(void)
{
        size_t available, total;

        GR_MUST(cuMemGetInfo(&available, &total));
        return available;
}

static long now_ms(void)
{
        struct timespec now;

        clock_gettime(CLOCK_MONOTONIC, &now);
        return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int main(void)
{
        CUdeviceptr blocks[BLOCKS], kept;
        CUcontext context;
        size_t whole, most, bytes;

        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        GR_MUST(cuMemAlloc(&kept, 2 * BLOCKS * block_bytes)); /* or too much would be more than the card has */
        most = whole = available_bytes();
        for (int round = 0; round < ROUNDS; round++) {
                long until;

                for (int i = 0; i < BLOCKS; i++)
                        GR_MUST(cuMemAlloc(&blocks[i], block_bytes));
                for (int i = 0; i < BLOCKS; i++)
                        GR_MUST(cuMemFree(blocks[i]));
                until = now_ms() + LOOKS_MS;
                while (now_ms() < until) {
                        bytes = available_bytes();
                        most = bytes > most ? bytes : most;
                }
        }
        printf("at most %zu MiB more than there is\n", (most - whole) >> 20);
        return EXIT_SUCCESS;
}
