/*
 * Arrays: they take memory and give it back, but store nothing. Texels lie in tiles of 64 bytes by 8 rows; arrays up to
 * 1 MiB share pages in steps of 64 KiB, others have pages of their own.
 */
#include "sim.h"

#include <stdlib.h>

#define MAGIC_ARRAY 0x61727279u
#define STEP_BYTES  ((size_t)64 << 10)
#define MOST_LEVELS 32

struct CUarray_st {
        uint32_t magic;
        int device;
        CUcontext ctx;
        size_t bytes; /* taken; 0 for a level, which belongs to its mipmapped array */
        CUDA_ARRAY3D_DESCRIPTOR shape;
        CUarray next;
};

struct CUmipmappedArray_st {
        struct CUarray_st whole;
        unsigned n_levels;
        struct CUarray_st level[MOST_LEVELS];
};

/* Guarded by sim_lock(). Structures of destroyed arrays stay, so that a stale handle is recognised. */
static size_t shared_bytes[SIM_MAX_DEVICES]; /* of arrays up to 1 MiB */
static CUarray arrays;

static size_t shared_pages(int device)
{
        return (shared_bytes[device] + SIM_PAGE_BYTES - 1) / SIM_PAGE_BYTES;
}

/* Lock held. */
static bool charge_bytes(int device, size_t bytes)
{
        size_t before = shared_pages(device), after;

        if (bytes > SIM_SMALL_BYTES)
                return sim_heap_charge(device, bytes);
        shared_bytes[device] += bytes;
        after = shared_pages(device);
        if (after > before && !sim_heap_charge(device, (after - before) * SIM_PAGE_BYTES)) {
                shared_bytes[device] -= bytes;
                return false;
        }
        return true;
}

/* Lock held. */
static void uncharge_bytes(int device, size_t bytes)
{
        size_t before = shared_pages(device);

        if (bytes > SIM_SMALL_BYTES) {
                sim_heap_uncharge(device, bytes);
                return;
        }
        shared_bytes[device] -= bytes;
        if (before > shared_pages(device))
                sim_heap_uncharge(device, (before - shared_pages(device)) * SIM_PAGE_BYTES);
}

/* Bytes of one texel, or 0 for a format not known here. */
static size_t texel_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
        if (shape->NumChannels != 1 && shape->NumChannels != 2 && shape->NumChannels != 4)
                return 0;
        switch (shape->Format) {
        case CU_AD_FORMAT_UNSIGNED_INT8:
        case CU_AD_FORMAT_SIGNED_INT8:
                return shape->NumChannels;
        case CU_AD_FORMAT_UNSIGNED_INT16:
        case CU_AD_FORMAT_SIGNED_INT16:
        case CU_AD_FORMAT_HALF:
                return (size_t)2 * shape->NumChannels;
        case CU_AD_FORMAT_UNSIGNED_INT32:
        case CU_AD_FORMAT_SIGNED_INT32:
        case CU_AD_FORMAT_FLOAT:
                return (size_t)4 * shape->NumChannels;
        default:
                return 0;
        }
}

static size_t blocks_of(size_t count, size_t most)
{
        size_t block = 1;

        while (block < most && block < count)
                block *= 2;
        return (count + block - 1) / block * block;
}

static bool is_layered(const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
        return shape->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
}

/* Tiles lie in blocks: up to 16 on top of each other, or 4 in each of up to 8 slices; fewer if that holds all tiles. */
static size_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
        size_t row = (shape->Width * texel_bytes(shape) + 63) / 64 * 64, slices = shape->Depth ? shape->Depth : 1;
        size_t tiles = (shape->Height + 7) / 8;
        bool deep = slices > 1 && !is_layered(shape);

        return row * (shape->Height > 1 ? 8 * blocks_of(tiles, deep ? 4 : 16) : 1) *
               (deep ? blocks_of(slices, 8) : slices);
}

static CUresult check_shape(const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
        const size_t most = 1 << 17;

        return shape->Width && shape->Width <= most && shape->Height <= most && shape->Depth <= most &&
                               texel_bytes(shape)
                       ? CUDA_SUCCESS
                       : CUDA_ERROR_INVALID_VALUE;
}

/* Charges array, whose shape is set, and adds it to the list. Lock held. */
static CUresult add_array(CUarray array, size_t bytes)
{
        CUcontext ctx;
        CUresult rc = sim_current(&ctx);

        if (rc == CUDA_SUCCESS)
                rc = sim_capture_unsafe();
        if (rc != CUDA_SUCCESS)
                return rc;
        bytes = bytes > SIM_SMALL_BYTES ? bytes : (bytes + STEP_BYTES - 1) / STEP_BYTES * STEP_BYTES;
        if (!charge_bytes(ctx->device, bytes))
                return CUDA_ERROR_OUT_OF_MEMORY;
        array->magic = MAGIC_ARRAY;
        array->device = ctx->device;
        array->ctx = ctx;
        array->bytes = bytes;
        array->next = arrays;
        arrays = array;
        return CUDA_SUCCESS;
}

static CUresult create_array(CUarray *ret_array, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
        CUresult rc = check_shape(shape);
        CUarray array;

        if (rc != CUDA_SUCCESS)
                return rc;
        array = calloc(1, sizeof *array);
        if (!array)
                return CUDA_ERROR_OUT_OF_MEMORY;
        array->shape = *shape;
        sim_lock();
        rc = add_array(array, level_bytes(shape));
        sim_unlock();
        if (rc == CUDA_SUCCESS)
                *ret_array = array;
        else
                free(array);
        return rc;
}

/* Uncharges and removes the array. Not called for a level, which goes with its mipmapped array. Lock held. */
static void end_array(CUarray array)
{
        uncharge_bytes(array->device, array->bytes);
        array->magic = 0;
}

void sim_arrays_forget_context(CUcontext ctx)
{
        for (CUarray array = arrays; array; array = array->next) {
                if (array->magic == MAGIC_ARRAY && array->ctx == ctx)
                        end_array(array);
        }
}

SIM_API cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *flat)
{
        CUDA_ARRAY3D_DESCRIPTOR shape = {0};

        SIM_ENTER(cuArrayCreate_v2);
        if (!array || !flat)
                return CUDA_ERROR_INVALID_VALUE;
        shape.Width = flat->Width;
        shape.Height = flat->Height;
        shape.Format = flat->Format;
        shape.NumChannels = flat->NumChannels;
        return create_array(array, &shape);
}

SIM_API cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
        SIM_ENTER(cuArray3DCreate_v2);
        return array && shape ? create_array(array, shape) : CUDA_ERROR_INVALID_VALUE;
}

SIM_API cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *flat, CUarray array)
{
        SIM_ENTER(cuArrayGetDescriptor_v2);
        if (!flat || !array || array->magic != MAGIC_ARRAY)
                return CUDA_ERROR_INVALID_VALUE;
        *flat = (CUDA_ARRAY_DESCRIPTOR){.Width = array->shape.Width,
                                        .Height = array->shape.Height,
                                        .Format = array->shape.Format,
                                        .NumChannels = array->shape.NumChannels};
        return CUDA_SUCCESS;
}

SIM_API cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *shape, CUarray array)
{
        SIM_ENTER(cuArray3DGetDescriptor_v2);
        if (!shape || !array || array->magic != MAGIC_ARRAY)
                return CUDA_ERROR_INVALID_VALUE;
        *shape = array->shape;
        return CUDA_SUCCESS;
}

SIM_API cuArrayDestroy(CUarray array)
{
        CUresult rc = CUDA_ERROR_INVALID_HANDLE;

        SIM_ENTER(cuArrayDestroy);
        sim_lock();
        if (array && array->magic == MAGIC_ARRAY && array->bytes) {
                end_array(array);
                rc = CUDA_SUCCESS;
        }
        sim_unlock();
        return rc;
}

static size_t half_length(size_t length)
{
        return length > 1 ? length / 2 : length;
}

SIM_API cuMipmappedArrayCreate(CUmipmappedArray *ret_array, const CUDA_ARRAY3D_DESCRIPTOR *shape, unsigned n_levels)
{
        CUDA_ARRAY3D_DESCRIPTOR at;
        CUmipmappedArray array;
        size_t bytes = 0;
        CUresult rc;

        SIM_ENTER(cuMipmappedArrayCreate);
        if (!ret_array || !shape || check_shape(shape) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_VALUE;
        array = calloc(1, sizeof *array);
        if (!array)
                return CUDA_ERROR_OUT_OF_MEMORY;
        array->whole.shape = at = *shape;
        do {
                array->level[array->n_levels++] = (struct CUarray_st){.magic = MAGIC_ARRAY, .shape = at};
                bytes += level_bytes(&at);
                at.Width = half_length(at.Width);
                at.Height = half_length(at.Height);
                if (!is_layered(&at))
                        at.Depth = half_length(at.Depth);
        } while (array->n_levels < n_levels && array->n_levels < MOST_LEVELS);
        sim_lock();
        rc = add_array(&array->whole, bytes);
        sim_unlock();
        if (rc == CUDA_SUCCESS)
                *ret_array = array;
        else
                free(array);
        return rc;
}

SIM_API cuMipmappedArrayGetLevel(CUarray *level, CUmipmappedArray array, unsigned i)
{
        SIM_ENTER(cuMipmappedArrayGetLevel);
        if (!level || !array || array->whole.magic != MAGIC_ARRAY || i >= array->n_levels)
                return CUDA_ERROR_INVALID_VALUE;
        *level = &array->level[i];
        return CUDA_SUCCESS;
}

SIM_API cuMipmappedArrayDestroy(CUmipmappedArray array)
{
        CUresult rc = CUDA_ERROR_INVALID_HANDLE;

        SIM_ENTER(cuMipmappedArrayDestroy);
        sim_lock();
        if (array && array->whole.magic == MAGIC_ARRAY) {
                end_array(&array->whole);
                for (unsigned i = 0; i < array->n_levels; i++)
                        array->level[i].magic = 0;
                rc = CUDA_SUCCESS;
        }
        sim_unlock();
        return rc;
}
