/* What the library accounts of a size or shape, held against what the card gives: arrays and managed memory. */
#include "limit_kinds_memory.h"

#include "gpureclaim.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

size_t available(void)
{
        size_t bytes, total;

        GR_MUST(cuMemGetInfo(&bytes, &total));
        return bytes;
}

static bool ask(struct gpureclaim_status *ret)
{
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_status");
        gpureclaim_status_function *get;

        memcpy(&get, &found, sizeof get);
        ret->struct_bytes = sizeof *ret;
        return get && get(gt.device, ret) == 0;
}

bool look(struct figures *ret)
{
        struct gpureclaim_status status;
        size_t bytes;

        GR_MUST(cuCtxSynchronize());
        available(); /* pools are looked at anew */
        if (!ask(&status) || !gt_footprint(&gt, &bytes))
                return false;
        *ret = (struct figures){(double)bytes - (double)status.cached_bytes,
                                (double)status.reserved_bytes - (double)status.cached_bytes};
        return true;
}

bool own_figure(void)
{
        return gt.simulated || strstr(gt_footprint_source(&gt), "this process");
}

/* What an array takes is computed; shapes that fill no tile, block or page. What it takes on the card is not more. */
void odd_arrays(void)
{
        static const CUDA_ARRAY3D_DESCRIPTOR shapes[] = {
                {.Width = 8192, .Height = 1032, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1},
                {.Width = 1000, .Height = 5001, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1},
                {.Width = 8200, .Height = 129, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4},
                {.Width = 1 << 17, .Height = 9, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4},
                {.Width = 300, .Height = 130, .Depth = 65, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1},
        };
        /*
         * Larger than the driver makes any, and beyond the limit, all of which is in use: the error is the driver's, as
         * nothing is charged for them. The last two are for the simulated device only: of a height or depth of more
         * than 32 bits an H100 looks at the lower 32, and makes the array.
         */
        static const CUDA_ARRAY3D_DESCRIPTOR refused[] = {
                {.Width = 1 << 20, .Height = 1 << 20, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4},
                {.Width = 1ull << 33, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1},
                {.Width = 1 << 30, .Height = 1 << 30, .Depth = 1 << 30, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1},
                {.Width = 1 << 17, .Height = 1 << 13, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 5},
                {.Width = 1, .Height = 1ull << 33, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1},
                {.Width = 1, .Height = 1, .Depth = 1ull << 33, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1},
        };
        enum { EACH_SHAPE = 8, SIMULATED_ONLY = 2 };
        size_t rows = sizeof refused / sizeof *refused - (gt.simulated ? 0 : SIMULATED_ONLY);
        CUdeviceptr rest;
        CUarray none;

        GR_MUST(cuMemAlloc(&rest, available() / GT_PAGE * GT_PAGE));
        for (size_t i = 0; i < rows; i++) {
                CUresult result = cuArray3DCreate(&none, &refused[i]);

                gt_check(result == CUDA_ERROR_INVALID_VALUE, "an array larger than the driver makes",
                         "no. %zu: error %d", i, (int)result);
        }
        GR_MUST(cuMemFree(rest));
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
                CUarray arrays[EACH_SHAPE];
                struct figures before, now;
                bool told = look(&before);
                int got = 0;

                while (got < EACH_SHAPE && cuArray3DCreate(&arrays[got], &shapes[i]) == CUDA_SUCCESS)
                        got++;
                if (told && look(&now) && own_figure())
                        gt_check(now.accounted - before.accounted >= now.on_card - before.on_card,
                                 "arrays of odd shapes",
                                 "%d of %zu x %zu x %zu, %u channels: %+.1f MiB on the card, %+.1f accounted", got,
                                 shapes[i].Width, shapes[i].Height, shapes[i].Depth, shapes[i].NumChannels,
                                 (now.on_card - before.on_card) / MIB, (now.accounted - before.accounted) / MIB);
                while (got)
                        GR_MUST(cuArrayDestroy(arrays[--got]));
        }
}

/* Of each what is accounted: rows of whole tiles and slices of whole blocks, of each level, in whole pages. */
void even_arrays(void)
{
        enum { PLAIN = -1 }; /* no mipmapped array */
        static const struct {
                CUDA_ARRAY3D_DESCRIPTOR shape;
                int levels;
                unsigned mib;
        } arrays[] = {
                {{.Width = 1 << 17, .Height = 16, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4}, PLAIN, 32},
                {{.Width = 1 << 17, .Height = 1, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4}, PLAIN, 2},
                {{.Width = 1 << 17, .Height = 0, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4}, PLAIN, 2},
                {{.Width = 1 << 17, .Height = 2, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4}, PLAIN, 16},
                {{.Width = 1 << 17, .Height = 64, .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 1}, PLAIN, 8},
                {{.Width = 1 << 17, .Height = 64, .Format = CU_AD_FORMAT_SIGNED_INT8, .NumChannels = 1}, PLAIN, 8},
                {{.Width = 1 << 17, .Height = 64, .Format = CU_AD_FORMAT_UNSIGNED_INT16, .NumChannels = 1}, PLAIN, 16},
                {{.Width = 1 << 17, .Height = 64, .Format = CU_AD_FORMAT_SIGNED_INT16, .NumChannels = 1}, PLAIN, 16},
                {{.Width = 1 << 17, .Height = 64, .Format = CU_AD_FORMAT_HALF, .NumChannels = 2}, PLAIN, 32},
                {{.Width = 1 << 14,
                  .Height = 16,
                  .Depth = 6,
                  .Format = CU_AD_FORMAT_FLOAT,
                  .NumChannels = 4,
                  .Flags = CUDA_ARRAY3D_LAYERED},
                 PLAIN,
                 24},
                {{.Width = 512,
                  .Height = 512,
                  .Depth = 6,
                  .Format = CU_AD_FORMAT_FLOAT,
                  .NumChannels = 4,
                  .Flags = CUDA_ARRAY3D_CUBEMAP},
                 PLAIN,
                 24},
                {{.Width = 512, .Height = 512, .Depth = 6, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4}, PLAIN, 32},
                /* More than one whole block of each kind. */
                {{.Width = 1 << 13, .Height = 264, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4}, PLAIN, 48},
                {{.Width = 1024, .Height = 72, .Depth = 17, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4}, PLAIN, 36},
                /* The layers of a lower level are as many, the slices half of them. */
                {{.Width = 4096,
                  .Height = 128,
                  .Depth = 8,
                  .Format = CU_AD_FORMAT_FLOAT,
                  .NumChannels = 1,
                  .Flags = CUDA_ARRAY3D_LAYERED},
                 2,
                 20},
                {{.Width = 1024, .Height = 256, .Depth = 16, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1}, 2, 18},
                {{.Width = 4096, .Height = 256, .Depth = 1, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1}, 2, 6},
                {{.Width = 4096, .Height = 128, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1}, 0, 2},
                {{.Width = 4096, .Height = 128, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1}, 9, 4},
        };

        for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
                const CUDA_ARRAY3D_DESCRIPTOR *shape = &arrays[i].shape;
                struct figures before, now;
                CUmipmappedArray levels;
                CUarray array;
                bool told = look(&before);

                if (arrays[i].levels == PLAIN)
                        GR_MUST(cuArray3DCreate(&array, shape));
                else
                        GR_MUST(cuMipmappedArrayCreate(&levels, shape, (unsigned)arrays[i].levels));
                if (told && look(&now) && own_figure())
                        gt_check(now.accounted - before.accounted == (double)arrays[i].mib * MIB &&
                                         (!gt.simulated || now.on_card - before.on_card <= (double)arrays[i].mib * MIB),
                                 "an array that fills its tiles",
                                 "no. %zu, %d levels: %+.1f MiB accounted of %u, %+.1f on the card", i,
                                 arrays[i].levels, (now.accounted - before.accounted) / MIB, arrays[i].mib,
                                 (now.on_card - before.on_card) / MIB);
                if (arrays[i].levels == PLAIN)
                        GR_MUST(cuArrayDestroy(array));
                else
                        GR_MUST(cuMipmappedArrayDestroy(levels));
        }
}

/* Small pieces of managed memory count in steps of 64 KiB, others in whole pages, so all of these as 2 MiB. */
void managed_sizes(void)
{
        static const struct {
                size_t bytes;
                int count;
        } pieces[] = {{1, 32}, {64 * KIB, 32}, {64 * KIB + 1, 16}, {MIB, 2}, {MIB + 1, 1}, {2 * MIB, 1}};

        for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++) {
                uint64_t managed[32];
                struct figures before, now;
                bool told = look(&before);

                for (int k = 0; k < pieces[i].count; k++)
                        GR_MUST(get_managed(pieces[i].bytes, &managed[k]));
                if (told && look(&now))
                        gt_check(now.accounted - before.accounted == 2. * MIB, "managed memory of a size",
                                 "%d of %zu bytes: %+.3f MiB accounted", pieces[i].count, pieces[i].bytes,
                                 (now.accounted - before.accounted) / MIB);
                for (int k = 0; k < pieces[i].count; k++)
                        GR_MUST(cuMemFree(managed[k]));
        }
}

/* What a trim of the program's returns is not counted from then on. */
void trimmed_pool(void)
{
        struct gpureclaim_status before, after = {0};
        CUdeviceptr ptr;
        bool told;

        GR_MUST(cuMemAllocFromPoolAsync(&ptr, 4 * GT_PAGE, explicit_pool, stream));
        GR_MUST(cuMemFreeAsync(ptr, stream));
        GR_MUST(cuCtxSynchronize());
        available();
        if (!ask(&before))
                return;
        GR_MUST(cuMemPoolTrimTo(explicit_pool, 0));
        told = ask(&after);
        gt_check(told && after.reserved_bytes + 4 * GT_PAGE <= before.reserved_bytes, "a pool that was trimmed",
                 "%.1f MiB accounted, %.1f before", gt_mib(after.reserved_bytes), gt_mib(before.reserved_bytes));
}
