/*
 * Queries about memory. The answers show the program its share of the device and the sizes that it asked for, and
 * nothing of what is cached. For a freed pointer the driver answers as for one that never existed
 * (docs/measurements.md, no-pointer).
 */
#include "hooks/query.h"

#include <assert.h>
#include <errno.h>
#include <unistd.h>

#include "base/no_cancel.h"
#include "device/device.h"
#include "device/overhead.h"
#include "driver/mapped_memory.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "driver/sleep.h"
#include "hooks/context.h"
#include "hooks/ipc.h"
#include "hooks/segment_export.h"
#include "hooks/segment_import.h"
#include "hooks/stream_ordered.h"
#include "notes/note.h"
#include "system/environment.h"

#define INFO_TRIES    500 /* while memory is going back to the driver; the last may count some of it twice */
#define INFO_PAUSE_NS UINT64_C(50000)

int gr_query_block_at(CUdeviceptr ptr, CUdeviceptr *ret_base, struct gr_block_info *ret_info)
{
        CUdeviceptr base = ptr;
        struct gr_segment_import import;
        struct gr_segments_place place;

        /*
         * Most queries are about the first byte of a block. For other addresses the context's segments know the range,
         * and the driver knows the allocation.
         */
        if (gr_ledger_find(gr_core.ledger, ptr, ret_info) != 0) {
                if (gr_segments_find(&gr_core, ptr, &place) == 0) {
                        if (!place.live || gr_ledger_find(gr_core.ledger, place.base_ptr, ret_info) != 0)
                                *ret_info = (struct gr_block_info){.is_range = true};
                        else if (gr_notes_watch())
                                gr_debug_correct(place.base_ptr, ret_info);
                        assert(place.base_ptr <= ptr);
                        *ret_base = place.base_ptr;
                        return 0;
                }
                if (gr_segment_import_find(ptr, &import) == 0) {
                        *ret_info = (struct gr_block_info){.context = gr_context_known(import.context),
                                                           .requested_bytes = import.bytes,
                                                           .live = true,
                                                           .is_range = true};
                        *ret_base = import.base;
                        return ret_info->context ? 0 : -ENOENT;
                }
                if (gr_real.cuPointerGetAttribute(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, ptr) != CUDA_SUCCESS ||
                    gr_ledger_find(gr_core.ledger, base, ret_info) != 0)
                        return -ENOENT;
        }
        if (gr_notes_watch())
                gr_debug_correct(base, ret_info);
        *ret_base = base;
        return 0;
}

/* Whether ptr, inside a block of the pool, is memory that the program has. */
static bool is_live(CUdeviceptr ptr, CUdeviceptr base, const struct gr_block_info *info)
{
        return info->live && ptr - base < info->requested_bytes;
}

/* Something beside the library relies on the memory of the block from now on. */
static void mark_block_exported(CUdeviceptr block, const struct gr_block_info *info)
{
        GR_KEEP_ERRNO;

        gr_ledger_mark_exported(gr_core.ledger, block);
        if (info->context) /* a kernel may still use what was here before; it may wait for the program, too */
                gr_fence_wait_handed_out(info->context->fence, gr_driver.now_ns() + GR_SYNC_NS);
        if (gr_sleep_is_on())
                gr_mapped_stay(block, info->requested_bytes);
}

static void mark_exported(CUdeviceptr ptr)
{
        struct gr_block_info info;
        CUdeviceptr base;

        gr_ipc_begin_sharing();
        if (gr_query_block_at(ptr, &base, &info) == 0)
                mark_block_exported(base, &info);
}

CUdeviceptr gr_query_unless_cached(CUdeviceptr ptr)
{
        struct gr_block_info info;
        CUdeviceptr base;

        return gr_shim_ready() && gr_query_block_at(ptr, &base, &info) == 0 && !is_live(ptr, base, &info)
                       ? GR_NO_POINTER
                       : ptr;
}

/* Replaces the driver's figures by the program's share. */
static void show_share(struct gr_context *context, size_t *free_bytes, size_t *total_bytes)
{
        uint64_t share_free, share_total;

        gr_stream_ordered_refresh(context->device);
        if (gr_overhead_counted())
                gr_overhead_look(context->device, GR_OVERHEAD_AGE_NS);
        gr_segments_trim_merge_and_collect(&gr_core, context->device);
        gr_budget_share(context->device, gr_pool_slab_bytes(&gr_core, context->device), *free_bytes, *total_bytes,
                        &share_free, &share_total);
        *free_bytes = share_free;
        *total_bytes = share_total;
}

GR_EXPORT CUresult CUDAAPI cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
        GR_PASS_GATE;
        struct gr_context *context = NULL;
        GR_KEEP_ERRNO;

        if (gr_shim_ready() && free_bytes && total_bytes)
                context = gr_context_current();
        /* Memory that is going back counts as cached until that is done: it would be counted twice, so try again. */
        for (unsigned tries = 0;; tries++) {
                uint64_t ended = context ? gr_budget_returns_ended(context->device) : 0;
                CUresult result;

                if (context)
                        gr_pool_collect(&gr_core);
                result = GR_REAL(cuMemGetInfo_v2, free_bytes, total_bytes);

                if (result != CUDA_SUCCESS || !context)
                        return result;
                show_share(context, free_bytes, total_bytes);
                if (gr_budget_returns_begun(context->device) != ended && tries < INFO_TRIES) {
                        gr_driver.sleep_ns(INFO_PAUSE_NS);
                        continue;
                }
                return result;
        }
}

GR_EXPORT CUresult CUDAAPI cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
        GR_PASS_DEEP;
        CUresult result = GR_REAL(cuDeviceTotalMem_v2, bytes, dev);
        struct gr_device *device;

        if (result != CUDA_SUCCESS || !gr_shim_ready())
                return result;
        device = gr_device_get(dev);
        if (device)
                *bytes = gr_budget_total(device, *bytes);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuDeviceTotalMem(unsigned int *bytes, CUdevice dev)
{
        GR_PASS_DEEP;
        CUresult result = GR_REAL(cuDeviceTotalMem, bytes, dev);
        struct gr_device *device;

        if (result != CUDA_SUCCESS || !gr_shim_ready())
                return result;
        device = gr_device_get(dev);
        if (device)
                *bytes = (unsigned int)gr_budget_total(device, *bytes);
        return result;
}

/* As gr_query_block_at, by the driver's address range, for pointers whose attributes tell nothing. */
static bool block_of(CUdeviceptr ptr, CUdeviceptr *ret_base, struct gr_block_info *ret_info)
{
        if (GR_REAL(cuMemGetAddressRange_v2, ret_base, NULL, ptr) != CUDA_SUCCESS ||
            gr_ledger_find(gr_core.ledger, *ret_base, ret_info) != 0)
                return false;
        if (gr_notes_watch())
                gr_debug_correct(*ret_base, ret_info);
        return true;
}

GR_EXPORT CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr dptr)
{
        GR_PASS_GATE;
        struct gr_block_info info;
        CUdeviceptr block;
        CUresult result;

        if (!gr_shim_ready() || (gr_query_block_at(dptr, &block, &info) != 0 && !block_of(dptr, &block, &info)))
                return GR_REAL(cuMemGetAddressRange_v2, base, size, dptr);
        if (!is_live(dptr, block, &info))
                return GR_REAL(cuMemGetAddressRange_v2, base, size, GR_NO_POINTER);
        result = GR_REAL(cuMemGetAddressRange_v2, base, size, dptr);
        /* The driver knows no allocation there, but the pool does. Other errors, as without a context, are returned. */
        if ((result == CUDA_ERROR_NOT_FOUND || result == CUDA_ERROR_INVALID_VALUE) && gr_real.cuMemGetAddressRange_v2 &&
            (info.spilled || info.is_range))
                result = CUDA_SUCCESS;
        if (result == CUDA_SUCCESS && size)
                *size = info.requested_bytes;
        if (result == CUDA_SUCCESS && base)
                *base = block;
        return result;
}

/* Corrects a successful answer about a live block of the pool. */
static void correct_answer(void *data, CUpointer_attribute attribute, CUdeviceptr block,
                           const struct gr_block_info *info)
{
        assert(info->live); /* the caller has checked it */
        if (attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE && data)
                *(size_t *)data = info->requested_bytes;
        /*
         * The driver gives each allocation a number of its own. Here each use of a block gets one, also where blocks
         * lie in one piece of mapped memory. A block that lies in several pieces has the number of the first.
         */
        if (attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID && data && info->is_range)
                (void)gr_real.cuPointerGetAttribute(data, attribute, block);
        if (attribute == CU_POINTER_ATTRIBUTE_BUFFER_ID && data && info->generation > 1)
                *(unsigned long long *)data |= (unsigned long long)(info->generation - 1) << 40;
        if (info->is_range && attribute == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR && data)
                *(CUdeviceptr *)data = block;
        if (info->is_range && attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE && data)
                *(int *)data = info->generation > 0; /* 0: it is memory of another process */
        if (info->sync && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS && data)
                *(unsigned *)data = 1;
        if (info->is_range && attribute == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES && data)
                *(unsigned long long *)data = 0;
        if (info->is_range && attribute == CU_POINTER_ATTRIBUTE_CONTEXT && data) /* mapped memory has none */
                *(CUcontext *)data = info->context->handle;
        /* With this token another device can access the memory. */
        if (attribute == CU_POINTER_ATTRIBUTE_P2P_TOKENS)
                mark_block_exported(block, info);
}

GR_EXPORT CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
        GR_PASS_GATE;
        struct gr_block_info info;
        CUdeviceptr block;
        CUresult result;

        if (!gr_shim_ready() || gr_query_block_at(ptr, &block, &info) != 0)
                return GR_REAL(cuPointerGetAttribute, data, attribute, ptr);
        if (!is_live(ptr, block, &info))
                return GR_REAL(cuPointerGetAttribute, data, attribute, GR_NO_POINTER);
        result = GR_REAL(cuPointerGetAttribute, data, attribute, ptr);
        if (result != CUDA_SUCCESS && info.is_range && attribute == CU_POINTER_ATTRIBUTE_CONTEXT && data)
                result = CUDA_SUCCESS;
        if (result == CUDA_SUCCESS)
                correct_answer(data, attribute, block, &info);
        return result;
}

GR_EXPORT CUresult CUDAAPI cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                                  CUdeviceptr ptr)
{
        GR_PASS_GATE;
        struct gr_block_info info;
        CUdeviceptr block;
        CUresult result;
        bool live;

        if (!gr_shim_ready() || gr_query_block_at(ptr, &block, &info) != 0)
                return GR_REAL(cuPointerGetAttributes, count, attributes, data, ptr);
        live = is_live(ptr, block, &info);
        result = GR_REAL(cuPointerGetAttributes, count, attributes, data, live ? ptr : GR_NO_POINTER);
        for (unsigned int i = 0; result == CUDA_SUCCESS && i < count; i++)
                if (live)
                        correct_answer(data[i], attributes[i], block, &info);
                else if (attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER && data[i])
                        *(CUdeviceptr *)data[i] = ptr; /* the driver takes what it does not know for host memory */
        return result;
}

/*
 * Sets or clears CU_POINTER_ATTRIBUTE_SYNC_MEMOPS of a block that lies in a segment. The driver refuses it for mapped
 * memory. So the flag CU_CTX_SYNC_MEMOPS of the block's context is set instead: it has the same effect on the memory of
 * the whole context. It is never cleared, as other blocks may need it.
 */
static CUresult set_sync(CUdeviceptr block, const struct gr_block_info *info, bool sync)
{
        CUcontext context = info->context->handle;
        CUresult result;
        unsigned flags;

        if (!gr_real.cuCtxGetFlags || !gr_real.cuCtxSetFlags)
                return CUDA_ERROR_NOT_SUPPORTED;
        result = sync ? gr_real.cuCtxPushCurrent_v2(context) : CUDA_SUCCESS;
        if (sync && result == CUDA_SUCCESS) {
                result = gr_real.cuCtxGetFlags(&flags);
                if (result == CUDA_SUCCESS && !(flags & CU_CTX_SYNC_MEMOPS))
                        result = gr_real.cuCtxSetFlags(flags | CU_CTX_SYNC_MEMOPS);
                gr_real.cuCtxPopCurrent_v2(&context);
        }
        if (result == CUDA_SUCCESS)
                gr_ledger_set_sync(gr_core.ledger, block, sync);
        return result;
}

/* An attribute (SYNC_MEMOPS, set for GPUDirect RDMA) stays with the memory, so the block is not reused afterwards. */
GR_EXPORT CUresult CUDAAPI cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
        GR_PASS_GATE;
        GR_NO_CANCEL; /* the block must not be reused */
        CUresult result = GR_REAL(cuPointerSetAttribute, value, attribute, gr_query_unless_cached(ptr));
        struct gr_block_info info;
        CUdeviceptr block;

        /* The driver gives this answer for mapped memory, whatever the attribute. */
        if (result == CUDA_ERROR_NOT_SUPPORTED && gr_shim_ready() && gr_query_block_at(ptr, &block, &info) == 0 &&
            info.is_range)
                result = attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
                                 ? set_sync(block, &info, *(const unsigned *)value)
                                 : CUDA_ERROR_INVALID_VALUE;
        if (result == CUDA_SUCCESS && gr_shim_ready())
                mark_exported(ptr);
        return result;
}

/*
 * A handle stands for a whole allocation, which the importer gets from its first byte on. So a block of a segment gets
 * a handle of the library's own (segment_export.h).
 */
GR_EXPORT CUresult CUDAAPI cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr dptr)
{
        GR_PASS_GATE;
        struct gr_segment_import import;
        struct gr_block_info info;
        CUdeviceptr block;
        CUresult result;
        GR_NO_CANCEL; /* as in cuPointerSetAttribute */

        if (gr_shim_ready() && gr_real.cuIpcGetMemHandle && gr_options.pool != GR_POOL_BINS &&
            gr_query_block_at(dptr, &block, &info) == 0 && info.is_range) {
                GR_KEEP_ERRNO;

                if (!handle || !is_live(dptr, block, &info) || gr_segment_import_find(dptr, &import) == 0)
                        return CUDA_ERROR_INVALID_VALUE;
                mark_exported(block);
                return gr_segment_export(block, &info, handle) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        }
        result = GR_REAL(cuIpcGetMemHandle, handle, gr_query_unless_cached(dptr));
        if (result == CUDA_SUCCESS && gr_shim_ready())
                mark_exported(dptr);
        return result;
}

/*
 * A block of a segment, which is larger than a page of the host, need not begin or end with one. Programs export the
 * pages around it: the block is then the one in their middle. The driver does not know the block, so it is asked about
 * no allocation where the range has more pages than that.
 */
GR_EXPORT CUresult CUDAAPI cuMemGetHandleForAddressRange(void *handle, CUdeviceptr dptr, size_t size,
                                                         CUmemRangeHandleType type, unsigned long long flags)
{
        GR_PASS_GATE;
        GR_NO_CANCEL; /* as in cuPointerSetAttribute */
        CUdeviceptr page = (CUdeviceptr)getpagesize(), block = dptr + size / 2, ptr, base;
        struct gr_block_info info;
        CUresult result;

        if (gr_shim_ready() && gr_query_block_at(block, &base, &info) == 0 && info.is_range) {
                bool fits = info.live && dptr + page > base && dptr + size < base + info.requested_bytes + page;

                ptr = fits ? dptr : GR_NO_POINTER;
        } else {
                block = dptr;
                ptr = gr_query_unless_cached(dptr);
        }
        result = GR_REAL(cuMemGetHandleForAddressRange, handle, ptr, size, type, flags);
        if (result == CUDA_SUCCESS && gr_shim_ready()) {
                mark_exported(block);
                if (type == CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)
                        gr_ipc_mark(*(int *)handle);
        }
        return result;
}
