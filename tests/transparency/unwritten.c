/*
 * A program that is not to be trusted: it says of memory that it has not written to whether it is zero. Natively it is,
 * in a process that has freed none; CUDA does not promise it. For the comparison of programs, which must see where such
 * a difference comes from.
 */
#include "gputest.h"

#include <stdio.h>
#include <stdlib.h>

static void look(const char *name, CUdeviceptr p, size_t bytes)
{
        unsigned char *host = malloc(bytes);
        size_t set = 0;

        if (!host)
                gt_die("out of memory");
        GR_MUST(cuMemcpyDtoH(host, p, bytes));
        for (size_t i = 0; i < bytes; i++)
                set += host[i] != 0;
        printf("%s: %s\n", name, set ? "not zero" : "zero");
        free(host);
}

static void plain(void)
{
        static const size_t sizes[] = {1000, 64 * KIB, MIB, 3 * MIB, 12 * MIB};
        CUdeviceptr blocks[sizeof sizes / sizeof sizes[0]];
        char name[32];

        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                GR_MUST(cuMemAlloc(&blocks[i], sizes[i]));
                snprintf(name, sizeof name, "%zu B", sizes[i]);
                look(name, blocks[i], sizes[i]);
        }
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
                GR_MUST(cuMemFree(blocks[i]));
}

/* Of each width the driver is asked once. */
static void pitched(void)
{
        CUdeviceptr first, second;
        size_t pitch;

        GR_MUST(cuMemAllocPitch(&first, &pitch, 1000, 64, 4));
        GR_MUST(cuMemAllocPitch(&second, &pitch, 1000, 64, 4));
        look("pitched", first, pitch * 64);
        look("pitched again", second, pitch * 64);
        GR_MUST(cuMemFree(first));
        GR_MUST(cuMemFree(second));
}

int main(int argc, char **argv)
{
        struct gt gt;

        (void)argv;
        gt_open(&gt);
        (argc > 1 ? pitched : plain)();
        gt_close(&gt);
        return EXIT_SUCCESS;
}
