/*
 * The programs of the demonstration of scripts/run. Each does one thing that programs on a GPU do:
 *
 *   demo device         which GPU there is: its name, and after that how many bytes of it are free
 *   demo loop ROUNDS    allocates in its loop; prints the microseconds of a round
 *   demo keep BYTES     needs so much no more, but keeps it, as a framework's cache does; gpureclaim may ask for it
 *   demo take BYTES     needs so much in one piece, and prints the driver's answer
 *   demo fill BYTES     takes blocks of this size until it is refused, and frees them
 *
 * keep and fill print one line when they have come so far, and end when standard input ends.
 */
#include "gpureclaim.h"
#include "gputest.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { KEPT_BLOCKS = 8, FILL_BLOCKS = 64 };

static struct gt gt;

static void show_device(void)
{
        char name[256];
        size_t free_bytes, total_bytes;

        GR_MUST(cuDeviceGetName(name, sizeof(name), gt.device));
        GR_MUST(cuMemGetInfo(&free_bytes, &total_bytes));
        printf("%s\n%zu\n", gt.simulated ? "" : name, free_bytes);
}

/* The loop that docs/benchmarks.md calls "malloc, 10 us kernel, free". */
static void loop(long rounds)
{
        uint64_t words = 32, ns = 10000;
        uint32_t value = 1;
        CUdeviceptr p;
        void *args[] = {&p, &value, &words, &ns};
        double begin = 0;

        /* The first round does not count: the driver loads the kernel in it. */
        for (long i = -1; i < rounds; i++) {
                GR_MUST(cuMemAlloc(&p, MIB));
                GR_MUST(cuLaunchKernel(gt.late_fill, 1, 1, 1, 32, 1, 1, 0, NULL, args, NULL));
                GR_MUST(cuMemFree(p));
                if (i >= 0)
                        continue;
                GR_MUST(cuCtxSynchronize());
                begin = gt_now_us();
        }
        GR_MUST(cuCtxSynchronize());
        printf("%.1f\n", (gt_now_us() - begin) / (double)rounds);
}

static void wait_for_end(const char *line)
{
        puts(line);
        fflush(stdout);
        while (getchar() != EOF)
                continue;
}

static CUdeviceptr kept[KEPT_BLOCKS];

/* Runs on a thread of the library. */
static int give_up_kept(void *arg, int device, uint64_t want_bytes)
{
        (void)arg, (void)device, (void)want_bytes;
        for (int i = 0; i < KEPT_BLOCKS; kept[i++] = 0)
                if (kept[i] && cuMemFree(kept[i]) != CUDA_SUCCESS)
                        return EIO;
        return 0;
}

static void keep(size_t bytes)
{
        struct gpureclaim_reclaimable offer = {.struct_bytes = sizeof(offer), .name = "demo", .purge = give_up_kept};
        gpureclaim_register_function *enlist =
                (gpureclaim_register_function *)dlsym(RTLD_DEFAULT, "gpureclaim_register");
        uint64_t id;

        for (int i = 0; i < KEPT_BLOCKS; i++)
                GR_MUST(cuMemAlloc(&kept[i], bytes / KEPT_BLOCKS));
        if (enlist && enlist(&offer, &id))
                gt_die("gpureclaim_register failed");
        wait_for_end("kept");
}

static void take(size_t bytes)
{
        CUdeviceptr p;
        CUresult result = cuMemAlloc(&p, bytes);

        puts(result == CUDA_SUCCESS ? "allocated" : gt_result_name(result));
        if (result == CUDA_SUCCESS)
                GR_MUST(cuMemFree(p));
}

static void fill(size_t bytes)
{
        CUdeviceptr blocks[FILL_BLOCKS];
        int count = 0;

        while (count < FILL_BLOCKS && cuMemAlloc(&blocks[count], bytes) == CUDA_SUCCESS)
                count++;
        while (count > 0)
                GR_MUST(cuMemFree(blocks[--count]));
        wait_for_end("freed");
}

int main(int argc, char **argv)
{
        const char *what = argc > 1 ? argv[1] : "";
        size_t amount = argc > 2 ? gt_parse_size(argv[2]) : 0;

        gt_open(&gt);
        if (!strcmp(what, "device"))
                show_device();
        else if (!strcmp(what, "loop") && amount > 0)
                loop((long)amount);
        else if (!strcmp(what, "keep"))
                keep(amount);
        else if (!strcmp(what, "take"))
                take(amount);
        else if (!strcmp(what, "fill"))
                fill(amount);
        else
                gt_die("demo: device, loop, keep, take or fill, with an amount");
        gt_close(&gt);
        return EXIT_SUCCESS;
}
