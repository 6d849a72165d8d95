/* What a program is told when it asks the driver about memory that the library has made. */
#include "api.h"

#include <dlfcn.h>

unsigned long (*call_count)(const char *symbol);

void find_call_count(void)
{
        *(void **)&call_count = dlsym(RTLD_DEFAULT, "grSimCallCount");
        if (!call_count)
                gt_die("not the simulated device");
}

/* What a program asks about a block leaves it to be cached. Of what is cached, ranges too, it is told nothing. */
void test_questions(void)
{
        static const size_t bytes = 4 * MIB;
        CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
        CUmemorytype type;
        unsigned rdma = 2;
        int device_rdma;
        size_t range;
        void *values[] = {&type, &range};
        CUmemGenericAllocationHandle handle;
        CUdeviceptr live, freed, base;
        unsigned long calls;
        CUcontext context;

        find_call_count();
        gt_open(&gt);
        live = allocate(bytes);
        freed = allocate(bytes);
        GR_MUST(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, freed));
        GR_MUST(cuPointerGetAttributes(2, attributes, values, freed + 1));
        GR_CHECK_EQ(range, bytes);
        GR_CHECK(cuPointerGetAttribute(&context, (CUpointer_attribute)4711, live) != CUDA_SUCCESS);
        GR_MUST(cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, live));
        GR_CHECK(context == gt.ctx);
        GR_CHECK_EQ(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)live), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuDeviceGetAttribute(&device_rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
                                     gt.device));
        GR_MUST(cuPointerGetAttribute(&rdma, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, live));
        GR_CHECK_EQ(rdma, (unsigned)device_rdma);
        GR_MUST(cuMemFree(freed));
        GR_CHECK_EQ(status().cached_bytes, bytes);
        for (size_t at = 0; at < bytes; at += bytes / 4) {
                GR_MUST(cuMemGetAddressRange(&base, &range, live + at));
                GR_CHECK_EQ(base, live);
                GR_CHECK_EQ(cuMemGetAddressRange(&base, &range, freed + at), CUDA_ERROR_NOT_FOUND);
                GR_MUST(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, live + at));
                GR_CHECK_EQ(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, freed + at),
                            CUDA_ERROR_INVALID_VALUE);
                /* Of an address that it does not know the driver says nothing here, and no error. */
                range = 1;
                GR_MUST(cuPointerGetAttributes(2, attributes, values, freed + at));
                GR_CHECK_EQ(range, 0);
        }
        /* About a first byte, which most questions are about, the driver is asked once. */
        calls = call_count("cuPointerGetAttribute");
        GR_MUST(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, live));
        GR_CHECK_EQ(call_count("cuPointerGetAttribute"), calls + 1);
        GR_CHECK(cuIpcGetMemHandle(NULL, live) != CUDA_SUCCESS); /* nobody has got one */
        attributes[1] = (CUpointer_attribute)4711;
        GR_CHECK(cuPointerGetAttributes(2, attributes, values, live) != CUDA_SUCCESS);
        GR_MUST(cuMemFree(live));
        GR_CHECK_EQ(status().cached_bytes, 2 * bytes);
}

/*
 * A width of rows is remembered once the driver has told its pitch, and not when it was refused; for elements of
 * another size the driver is asked anew.
 */
void test_widths(void)
{
        unsigned long calls;
        size_t pitch, told;
        CUdeviceptr ptr;

        enum { KNOWN = 2 * 3, REMEMBERED = 4096, WIDTHS = REMEMBERED + 100 };

        find_call_count();
        gt_open(&gt);
        GR_CHECK_EQ(cuMemAllocPitch(&ptr, &pitch, 1000, (size_t)1 << 29, 4), CUDA_ERROR_OUT_OF_MEMORY);
        for (unsigned k = 0; k < KNOWN; k++) {
                size_t width = k % 2 ? 1000 : 1;
                unsigned element = 4u << k / 2;

                calls = call_count("cuMemAllocPitch_v2");
                for (int i = 0; i < 3; i++) {
                        GR_MUST(cuMemAllocPitch(&ptr, &told, width, 4096, element));
                        pitch = i ? pitch : told;
                        GR_CHECK_EQ(told, pitch);
                        GR_CHECK_EQ(status().cached_bytes, 0); /* from the second one on it is the cached block */
                        GR_MUST(cuMemFree(ptr));
                        GR_MUST(cuCtxSynchronize());
                        GR_CHECK(status().cached_bytes > 0);
                }
                GR_CHECK_EQ(call_count("cuMemAllocPitch_v2"), calls + 1);
                reclaim(gt.device, "trim", 0);
        }
        /* No more of them than that are remembered; for the rest the driver is asked each time. */
        for (int round = 0; round < 2; round++) {
                calls = call_count("cuMemAllocPitch_v2");
                for (size_t width = 1001; width <= 1000 + WIDTHS; width++) {
                        GR_MUST(cuMemAllocPitch(&ptr, &pitch, width, 1, 4));
                        GR_CHECK_EQ(pitch, (width + 511) / 512 * 512);
                        GR_MUST(cuMemFree(ptr));
                }
                calls = call_count("cuMemAllocPitch_v2") - calls;
                GR_CHECK_EQ(calls, round ? WIDTHS - (REMEMBERED - KNOWN) : WIDTHS);
        }
}

/*
 * Of pinned memory that the cache serves the flags are those of the request, whatever the driver says of the slab that
 * it lies in. Of other memory they are the driver's.
 */
void test_flags(void)
{
        static const unsigned asked[] = {0, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_WRITECOMBINED,
                                         CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_WRITECOMBINED};
        const unsigned mapped = CU_MEMHOSTALLOC_DEVICEMAP, slab = CU_MEMHOSTALLOC_WRITECOMBINED;
        static _Alignas(4096) char own[4096];
        void (*tell)(unsigned) = NULL;
        unsigned flags = 0;
        CUdeviceptr ptr;
        char *block;

        *(void **)&tell = dlsym(RTLD_DEFAULT, "grSimHostFlags");
        if (!tell)
                gt_die("not the simulated device");
        gt_open(&gt);
        tell(slab);
        for (int round = 0; round < 2; round++) /* new, and out of the cache */
                for (unsigned i = 0; i < sizeof(asked) / sizeof(asked[0]); i++) {
                        GR_MUST(cuMemHostAlloc((void **)&block, 64 * KIB, asked[i]));
                        GR_MUST(cuMemHostGetFlags(&flags, block));
                        GR_CHECK_EQ(flags, asked[i] | mapped);
                        GR_MUST(cuMemHostGetFlags(&flags, block + 4096));
                        GR_CHECK_EQ(flags, asked[i] | mapped);
                        GR_MUST(cuMemFreeHost(block));
                        flags = 4711;
                        GR_CHECK_EQ(cuMemHostGetFlags(&flags, block), CUDA_ERROR_INVALID_VALUE);
                        GR_CHECK_EQ(flags, 4711);
                }
        GR_MUST(cuMemAllocHost((void **)&block, 64 * KIB));
        GR_MUST(cuMemHostGetFlags(&flags, block));
        GR_CHECK_EQ(flags, slab | mapped);
        GR_MUST(cuMemFreeHost(block));
        ptr = allocate(64 * KIB);
        GR_CHECK_EQ(cuMemHostGetFlags(&flags, (void *)(uintptr_t)ptr), CUDA_ERROR_INVALID_VALUE);
        GR_MUST(cuMemFree(ptr));
        GR_CHECK_EQ(cuMemHostGetFlags(&flags, own), CUDA_ERROR_INVALID_VALUE);
}

/*
 * With a driver that tells no attributes, or knows no allocation where the library has one: the size of a block is the
 * one that was asked for, inside of it, too. Any other error is the program's to see.
 */
static void ask_for_range(CUresult expected)
{
        CUdeviceptr ptr, base = 0;
        size_t size = 0;

        gt_open(&gt);
        ptr = allocate(3 * MIB + 512);
        for (size_t at = 0; at <= MIB; at += MIB) {
                GR_CHECK_EQ(cuMemGetAddressRange(&base, &size, ptr + at), expected);
                GR_CHECK_EQ(base, expected == CUDA_SUCCESS ? ptr : 0);
                GR_CHECK_EQ(size, expected == CUDA_SUCCESS ? 3 * MIB + 512 : 0);
        }
        GR_MUST(cuMemFree(ptr));
}

void test_range(void)
{
        ask_for_range(CUDA_SUCCESS);
}

void test_range_error(void)
{
        ask_for_range(CUDA_ERROR_UNKNOWN);
}
