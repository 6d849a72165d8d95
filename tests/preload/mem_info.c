/*
 * What the program is told of memory while what it freed goes back to the driver: never more than there is.
 *
 *   mem_info
 */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { BLOCKS = 12, ROUNDS = 6, LOOKS_MS = 80 };
static const size_t block_bytes = (size_t)16 << 20;

#define OK(call)                                                                                                       \
        do {                                                                                                           \
                CUresult ok_result = (call);                                                                           \
                                                                                                                       \
                if (ok_result != CUDA_SUCCESS) {                                                                       \
                        fprintf(stderr, "%s:%d: %s returned %d\n", __FILE__, __LINE__, #call, (int)ok_result);         \
                        exit(EXIT_FAILURE);                                                                            \
                }                                                                                                      \
        } while (0)

static size_t available_bytes(void)
{
        size_t available, total;

        OK(cuMemGetInfo(&available, &total));
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

        OK(cuInit(0));
        OK(cuDevicePrimaryCtxRetain(&context, 0));
        OK(cuCtxSetCurrent(context));
        OK(cuMemAlloc(&kept, 2 * BLOCKS * block_bytes)); /* or too much would be more than the card has */
        most = whole = available_bytes();
        for (int round = 0; round < ROUNDS; round++) {
                long until;

                for (int i = 0; i < BLOCKS; i++)
                        OK(cuMemAlloc(&blocks[i], block_bytes));
                for (int i = 0; i < BLOCKS; i++)
                        OK(cuMemFree(blocks[i]));
                until = now_ms() + LOOKS_MS;
                while (now_ms() < until) {
                        bytes = available_bytes();
                        most = bytes > most ? bytes : most;
                }
        }
        printf("at most %zu MiB more than there is\n", (most - whole) >> 20);
        return EXIT_SUCCESS;
}
