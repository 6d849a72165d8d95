/*
 * Arrays and mipmapped arrays. The driver does not tell what memory one takes (cuArrayGetMemoryRequirements answers
 * for deferred arrays only), so it is computed. Texels lie in tiles of 64 bytes by 8 rows. Tiles lie in blocks: a
 * column of 1, 2, 4, 8 or 16 tiles, the first that holds all rows, else 16. An array with depth has columns of at most
 * 4 tiles, and its blocks are 1, 2, 4 or 8 slices deep.
 *
 *   row    = width * channels * channel bytes, rounded up to 64
 *   rows   = height rounded up to whole blocks
 *   slices = depth rounded up to whole blocks; the number of layers is not rounded
 *   bytes  = sum over the levels of row * rows * slices, rounded up to 64 KiB, above 1 MiB to 2 MiB
 *
 * Compared with a driver in docs/measurements.md, array-footprint. Sparse and deferred arrays take nothing by
 * themselves: memory that is mapped into them was charged when it was created.
 */
#include <assert.h>
#include <errno.h>

#include "base/no_cancel.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/context.h"

#define TILE_BYTES UINT64_C(64)
#define TILE_ROWS  UINT64_C(8)
#define MOST_TILES UINT64_C(16) /* in a block of an array without depth */
#define DEEP_TILES UINT64_C(4)  /* in a block of an array with depth */
#define MOST_DEEP  UINT64_C(8)  /* slices in a block of an array with depth */
#define STEP_BYTES (UINT64_C(64) << 10)

struct request {
        CUarray array;
        CUmipmappedArray mipmapped;
        const CUDA_ARRAY_DESCRIPTOR *flat;
        const CUDA_ARRAY3D_DESCRIPTOR *deep;
        unsigned int levels;
};

static uint64_t round_up(uint64_t value, uint64_t step)
{
        return (value + step - 1) / step * step;
}

static uint64_t at_least_one(uint64_t value)
{
        return value ? value : 1;
}

/* Bytes of one channel. For compressed formats, which have less, too much is counted. */
static uint64_t channel_bytes(CUarray_format format)
{
        switch (format) {
        case CU_AD_FORMAT_UNSIGNED_INT8:
        case CU_AD_FORMAT_SIGNED_INT8:
                return 1;
        case CU_AD_FORMAT_UNSIGNED_INT16:
        case CU_AD_FORMAT_SIGNED_INT16:
        case CU_AD_FORMAT_HALF:
                return 2;
        default:
                return 4;
        }
}

/* count rounded up to whole blocks. A block is the least power of two that holds them all, but not more than most. */
static uint64_t in_blocks(uint64_t count, uint64_t most)
{
        uint64_t block = 1;

        assert(count > 0 && (most & (most - 1)) == 0);
        while (block < most && block < count)
                block *= 2;
        return round_up(count, block);
}

/* Bytes that an array takes. 0 where it takes none itself, or the driver will refuse it: then it is not counted. */
static uint64_t array_footprint(const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned int levels)
{
        uint64_t width = shape->Width, height = shape->Height, depth = at_least_one(shape->Depth), bytes = 0;
        bool layered = shape->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);

        if (shape->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING) || width > UINT32_MAX ||
            height > UINT32_MAX || depth > UINT32_MAX || shape->NumChannels > 4)
                return 0;
        assert(levels > 0);
        for (unsigned int level = 0; level < levels && level < 32; level++) {
                uint64_t row =
                        round_up(at_least_one(width) * channel_bytes(shape->Format) * shape->NumChannels, TILE_BYTES);
                uint64_t tiles = round_up(at_least_one(height), TILE_ROWS) / TILE_ROWS, slices = depth, rows, size;
                bool deep = !layered && depth > 1;

                rows = height <= 1 ? 1 : in_blocks(tiles, deep ? DEEP_TILES : MOST_TILES) * TILE_ROWS;
                if (deep)
                        slices = in_blocks(depth, MOST_DEEP);
                if (__builtin_mul_overflow(row * rows, slices, &size) || size > GR_BLOCK_MAX_BYTES)
                        return 0;
                bytes += size;
                width /= 2;
                height /= 2;
                if (!layered)
                        depth = at_least_one(depth / 2);
        }
        return gr_footprint_bytes(round_up(bytes, STEP_BYTES));
}

static int create_flat(void *arg)
{
        struct request *request = arg;

        return gr_errno_of(gr_real.cuArrayCreate_v2(&request->array, request->flat));
}

static int create_deep(void *arg)
{
        struct request *request = arg;

        return gr_errno_of(gr_real.cuArray3DCreate_v2(&request->array, request->deep));
}

static int create_mipmapped(void *arg)
{
        struct request *request = arg;

        return gr_errno_of(gr_real.cuMipmappedArrayCreate(&request->mipmapped, request->deep, request->levels));
}

static CUresult create_charged(struct gr_context *context, uint64_t bytes, gr_charge_allocate *create,
                               struct request *request)
{
        GR_KEEP_ERRNO;
        int rc;
        GR_NO_CANCEL;

        assert(context && bytes > 0 && !request->array && !request->mipmapped);
        rc = gr_charge_accounted(&gr_core, context->device, context, GR_MEMORY_ARRAY, bytes, create, request);

        if (rc == 0) {
                assert(!request->array != !request->mipmapped); /* just one of them was made */
                rc = gr_accounted_add(
                        gr_core.accounted, context->device, GR_MEMORY_ARRAY,
                        (uint64_t)(uintptr_t)(request->array ? (void *)request->array : (void *)request->mipmapped),
                        context->handle, bytes);
                if (rc && request->array)
                        GR_REAL(cuArrayDestroy, request->array);
                else if (rc)
                        GR_REAL(cuMipmappedArrayDestroy, request->mipmapped);
        }
        return gr_result(rc);
}

GR_EXPORT CUresult CUDAAPI cuArrayCreate_v2(CUarray *handle, const CUDA_ARRAY_DESCRIPTOR *descriptor)
{
        GR_PASS_DEEP;
        struct request request = {.flat = descriptor};
        struct gr_context *context = NULL;
        uint64_t bytes = 0;
        CUresult result;

        if (gr_shim_ready() && gr_real.cuArrayCreate_v2 && handle && descriptor) {
                const CUDA_ARRAY3D_DESCRIPTOR shape = {.Width = descriptor->Width,
                                                       .Height = descriptor->Height,
                                                       .Format = descriptor->Format,
                                                       .NumChannels = descriptor->NumChannels};

                bytes = array_footprint(&shape, 1);
                context = gr_context_current();
        }
        if (!context || !bytes)
                return GR_REAL(cuArrayCreate_v2, handle, descriptor);
        result = create_charged(context, bytes, create_flat, &request);
        if (result == CUDA_SUCCESS)
                *handle = request.array;
        return result;
}

GR_EXPORT CUresult CUDAAPI cuArray3DCreate_v2(CUarray *handle, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
        GR_PASS_DEEP;
        struct request request = {.deep = descriptor};
        struct gr_context *context = NULL;
        uint64_t bytes = 0;
        CUresult result;

        if (gr_shim_ready() && gr_real.cuArray3DCreate_v2 && handle && descriptor) {
                bytes = array_footprint(descriptor, 1);
                context = gr_context_current();
        }
        if (!context || !bytes)
                return GR_REAL(cuArray3DCreate_v2, handle, descriptor);
        result = create_charged(context, bytes, create_deep, &request);
        if (result == CUDA_SUCCESS)
                *handle = request.array;
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMipmappedArrayCreate(CUmipmappedArray *handle, const CUDA_ARRAY3D_DESCRIPTOR *descriptor,
                                                  unsigned int levels)
{
        GR_PASS_DEEP;
        struct request request = {.deep = descriptor, .levels = levels};
        struct gr_context *context = NULL;
        uint64_t bytes = 0;
        CUresult result;

        if (gr_shim_ready() && gr_real.cuMipmappedArrayCreate && handle && descriptor) {
                bytes = array_footprint(descriptor, levels ? levels : 1);
                context = gr_context_current();
        }
        if (!context || !bytes)
                return GR_REAL(cuMipmappedArrayCreate, handle, descriptor, levels);
        result = create_charged(context, bytes, create_mipmapped, &request);
        if (result == CUDA_SUCCESS)
                *handle = request.mipmapped;
        return result;
}

GR_EXPORT CUresult CUDAAPI cuArrayDestroy(CUarray array)
{
        GR_PASS_DEEP;
        struct gr_accounted *entry = NULL;
        CUresult result;
        GR_NO_CANCEL;

        if (gr_shim_ready() && array)
                entry = gr_accounted_free_begin(gr_core.accounted, GR_MEMORY_ARRAY, (uint64_t)(uintptr_t)array);
        result = GR_REAL(cuArrayDestroy, array);
        gr_accounted_free_end(gr_core.accounted, entry, result == CUDA_SUCCESS);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuMipmappedArrayDestroy(CUmipmappedArray mipmapped)
{
        GR_PASS_DEEP;
        struct gr_accounted *entry = NULL;
        CUresult result;
        GR_NO_CANCEL;

        if (gr_shim_ready() && mipmapped)
                entry = gr_accounted_free_begin(gr_core.accounted, GR_MEMORY_ARRAY, (uint64_t)(uintptr_t)mipmapped);
        result = GR_REAL(cuMipmappedArrayDestroy, mipmapped);
        gr_accounted_free_end(gr_core.accounted, entry, result == CUDA_SUCCESS);
        return result;
}
