/* Allocations, what they take, what addresses answer; host memory; and which calls wait for work. */
#include "facts.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Takes that many of a size, says how many pages of the card went, gives all back. */
static void takes(const char *name, size_t bytes, size_t count)
{
        CUdeviceptr p[64];
        size_t before = pages_used(), taken;

        for (size_t i = 0; i < count; i++)
                p[i] = block(bytes);
        taken = pages_used() - before;
        for (size_t i = 0; i < count; i++)
                GR_MUST(cuMemFree(p[i]));
        fact(name, "%zu pages, then %zu", taken, pages_used() - before);
}

static void range(const char *name, CUdeviceptr base, CUdeviceptr at)
{
        CUdeviceptr start = 0;
        size_t bytes = 0;
        CUresult result = cuMemGetAddressRange(&start, &bytes, at);

        if (result == CUDA_SUCCESS)
                fact(name, "begins %s, %zu B", start == base ? "there" : "elsewhere", bytes);
        else
                fact_code(name, result);
}

static void sizes(void)
{
        CUdeviceptr p = 0, q = 0;
        size_t pitch = 0;
        bool aligned = true;

        fact_code("cuMemAlloc of 0 bytes", cuMemAlloc(&p, 0));
        fact_code("cuMemAlloc into NULL", cuMemAlloc(NULL, 1));
        fact_code("cuMemAlloc of the whole address space", cuMemAlloc(&p, SIZE_MAX));
        fact_code("cuMemAlloc of 2^50 bytes", cuMemAlloc(&p, (size_t)1 << 50));
        for (size_t i = 0; i < 20; i++) {
                p = block(1 + i * 100);
                q = block(1);
                aligned &= p % 512 == 0 && q % 512 == 0;
                GR_MUST(cuMemFree(q));
                GR_MUST(cuMemFree(p));
        }
        fact_yes("small blocks lie on 512 bytes", aligned);
        fact_changed(true);
        takes("64 blocks of 1 byte", 1, 64);
        takes("64 blocks of 32 KiB", 32 * KIB, 64);
        takes("2 blocks of 1 MiB", MIB, 2);
        takes("a block of 1 MiB and 1 byte", MIB + 1, 1);
        takes("a block of 2 MiB", 2 * MIB, 1);
        takes("a block of 2 MiB and 1 byte", 2 * MIB + 1, 1);
        takes("a block of 33 MiB", 33 * MIB, 1);
        fact_changed(false);
        fact_code("cuMemAllocPitch of 0 rows", cuMemAllocPitch(&p, &pitch, 100, 0, 4));
        fact_code("cuMemAllocPitch with elements of 3 bytes", cuMemAllocPitch(&p, &pitch, 100, 4, 3));
        GR_MUST(cuMemAllocPitch(&p, &pitch, 100, 4, 4));
        fact("pitch of 100 bytes", "%zu", pitch);
        range("range of 100 bytes by 4 with a pitch", p, p + 1);
        GR_MUST(cuMemFree(p));
}

static void frees(void)
{
        CUdeviceptr p = block(4 * MIB), q = block(1000), managed;
        void *pinned, *plain = malloc(4096);

        fact_code("cuMemFree of 0", cuMemFree(0));
        fact_code("cuMemFree of malloc's memory", cuMemFree((CUdeviceptr)(uintptr_t)plain));
        fact_code("cuMemFree inside a large block", cuMemFree(p + 512));
        fact_code("cuMemFree inside a small block", cuMemFree(q + 512));
        fact_code("cuMemsetD8 of such a block afterwards", cuMemsetD8(p, 1, 4 * MIB));
        fact_code("cuMemFreeHost of device memory", cuMemFreeHost((void *)(uintptr_t)p));
        fact_code("cuMemHostUnregister of device memory", cuMemHostUnregister((void *)(uintptr_t)p));
        range("range inside of 4 MiB", p, p + MIB);
        range("range of the last byte of 1000", q, q + 999);
        range("range of byte 1000 of 1000", q, q + 1000);
        range("range of malloc's memory", q, (CUdeviceptr)(uintptr_t)plain);
        fact_code("cuMemFree", cuMemFree(p));
        fact_code("cuMemFree once more", cuMemFree(p));
        fact_code("cuMemFreeAsync of freed memory", cuMemFreeAsync(p, NULL));
        range("range of freed memory", p, p);
        fact_code("cuMemFree", cuMemFree(q));
        fact_code("cuMemFree once more, a small block", cuMemFree(q));
        GR_MUST(cuMemAllocHost(&pinned, 4096));
        fact_code("cuMemFree of pinned memory", cuMemFree((CUdeviceptr)(uintptr_t)pinned));
        fact_code("cuMemFreeHost", cuMemFreeHost(pinned));
        fact_code("cuMemFreeHost once more", cuMemFreeHost(pinned));
        fact_code("cuMemFreeHost of NULL", cuMemFreeHost(NULL));
        fact_code("cuMemFreeHost of malloc's memory", cuMemFreeHost(plain));
        fact_code("cuMemAllocManaged with no flags", cuMemAllocManaged(&managed, MIB, 0));
        fact_code("cuMemAllocManaged of 0 bytes", cuMemAllocManaged(&managed, 0, CU_MEM_ATTACH_GLOBAL));
        GR_MUST(cuMemAllocManaged(&managed, MIB, CU_MEM_ATTACH_GLOBAL));
        range("range of managed memory", managed, managed + 5);
        fact_code("cuMemFreeHost of managed memory", cuMemFreeHost((void *)(uintptr_t)managed));
        fact_code("cuMemFreeAsync of managed memory", cuMemFreeAsync(managed, NULL));
        GR_MUST(cuCtxSynchronize());
        range("range of managed memory after that", managed, managed);
        fact_code("cuMemFree of managed memory then", cuMemFree(managed));
        free(plain);
}

static void attributes(void)
{
        CUdeviceptr p = block(1000), managed;
        unsigned long long id = 0, again = 0;
        unsigned value = 7;
        CUcontext ctx = NULL;
        void *out[] = {&ctx, &value}, *plain = malloc(16), *pinned;
        CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_CONTEXT, CU_POINTER_ATTRIBUTE_MEMORY_TYPE};

        GR_MUST(cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, p));
        fact_yes("an address knows its context", ctx == gt.ctx);
        fact_code("attribute of malloc's memory",
                  cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, (CUdeviceptr)(uintptr_t)plain));
        fact_code("attributes of malloc's memory",
                  cuPointerGetAttributes(2, names, out, (CUdeviceptr)(uintptr_t)plain));
        fact("context and type of malloc's memory", "%s, %u", ctx ? "some" : "none", value);
        fact_code("attribute 0", cuPointerGetAttribute(&value, (CUpointer_attribute)0, p));
        GR_MUST(cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
        GR_MUST(cuMemFree(p));
        fact_code("attribute of freed memory", cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, p));
        fact_code("attributes of freed memory", cuPointerGetAttributes(2, names, out, p));
        fact("context and type of freed memory", "%s, %u", ctx ? "some" : "none", value);
        p = block(1000);
        GR_MUST(cuPointerGetAttribute(&again, CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
        fact_yes("two blocks have two buffer numbers", id != again);
        fact_code("SYNC_MEMOPS of a block", cuPointerSetAttribute(&(unsigned){1}, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p));
        fact_code("attribute that cannot be set", cuPointerSetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
        GR_MUST(cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, p));
        fact_yes("cuMemAlloc's memory can be shared by legacy IPC", value);
        GR_MUST(cuMemAllocManaged(&managed, MIB, CU_MEM_ATTACH_GLOBAL));
        GR_MUST(cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, managed));
        fact_yes("managed memory can be shared by legacy IPC", value);
        GR_MUST(cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, managed));
        fact("type of managed memory", "%u", value);
        GR_MUST(cuMemFree(managed));
        GR_MUST(cuMemAllocHost(&pinned, 4096));
        GR_MUST(cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)pinned));
        fact("type of pinned memory", "%u", value);
        range("range of pinned memory", (CUdeviceptr)(uintptr_t)pinned, (CUdeviceptr)(uintptr_t)pinned + 100);
        GR_MUST(cuMemFreeHost(pinned));
        GR_MUST(cuMemFree(p));
        free(plain);
}

static void accesses(void)
{
        CUdeviceptr p = block(4096);
        uint32_t value = 0;

        fact_code("cuMemsetD8 of 0 bytes", cuMemsetD8(p, 1, 0));
        fact_code("cuMemsetD8 of 0 bytes at 0", cuMemsetD8(0, 1, 0));
        fact_code("cuMemsetD32 off its alignment", cuMemsetD32(p + 1, 1, 1));
        fact_code("cuMemcpyDtoH of 0 bytes", cuMemcpyDtoH(&value, p, 0));
        fact_code("cuMemcpyDtoH into NULL", cuMemcpyDtoH(NULL, p, 4));
        fact_code("cuMemcpyDtoH from 0", cuMemcpyDtoH(&value, 0, 4));
        GR_MUST(cuMemFree(p));
}

void facts_memory(void)
{
        sizes();
        frees();
        attributes();
        accesses();
}

void facts_host(void)
{
        void *p, *q, *plain = mmap(NULL, 4 * GT_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        size_t before;
        unsigned flags = 7;
        CUdeviceptr d, managed;

        fact_code("cuMemAllocHost of 0 bytes", cuMemAllocHost(&p, 0));
        fact_code("cuMemHostAlloc with unknown flags", cuMemHostAlloc(&p, 4096, 0x100));
        before = pages_used();
        GR_MUST(cuMemHostAlloc(&p, 16 * MIB, 0));
        fact_yes("pinned memory takes memory of the card", pages_used() > before);
        GR_MUST(cuMemHostGetFlags(&flags, p));
        fact("flags of cuMemHostAlloc with none", "%u", flags);
        fact_code("device pointer", cuMemHostGetDevicePointer(&d, p, 0));
        fact_yes("device pointer is the pointer", d == (CUdeviceptr)(uintptr_t)p);
        fact_code("cuMemHostUnregister of cuMemHostAlloc's", cuMemHostUnregister(p));
        fact_code("cuMemHostRegister of cuMemHostAlloc's", cuMemHostRegister(p, 4096, 0));
        fact_code("cuMemFreeHost inside", cuMemFreeHost((char *)p + 4096));
        GR_MUST(cuMemFreeHost(p));
        fact_code("device pointer of freed memory", cuMemHostGetDevicePointer(&d, p, 0));
        fact_code("flags of malloc's memory", cuMemHostGetFlags(&flags, plain));
        fact_code("cuMemHostRegister", cuMemHostRegister(plain, GT_PAGE, 0));
        fact_code("cuMemHostRegister once more", cuMemHostRegister(plain, GT_PAGE, 0));
        fact_code("cuMemHostRegister of a part of it", cuMemHostRegister((char *)plain + 4096, 4096, 0));
        fact_code("cuMemHostRegister over its end", cuMemHostRegister((char *)plain + GT_PAGE / 2, GT_PAGE, 0));
        fact_code("cuMemFreeHost of registered memory", cuMemFreeHost(plain));
        fact_code("cuMemFree of registered memory", cuMemFree((CUdeviceptr)(uintptr_t)plain));
        fact_code("cuMemHostUnregister inside", cuMemHostUnregister((char *)plain + 4096));
        fact_code("cuMemHostUnregister", cuMemHostUnregister(plain));
        fact_code("cuMemHostUnregister once more", cuMemHostUnregister(plain));
        fact_code("cuMemHostRegister of NULL", cuMemHostRegister(NULL, 4096, 0));
        fact_code("cuMemHostRegister of 0 bytes", cuMemHostRegister(plain, 0, 0));
        GR_MUST(cuMemAllocHost(&p, 100));
        GR_MUST(cuMemAllocHost(&q, 100));
        fact_yes("two small pinned blocks lie on 512 bytes", (uintptr_t)p % 512 == 0 && (uintptr_t)q % 512 == 0);
        GR_MUST(cuMemFreeHost(p));
        GR_MUST(cuMemFreeHost(q));
        before = pages_used();
        GR_MUST(cuMemAllocManaged(&managed, 16 * MIB, CU_MEM_ATTACH_GLOBAL));
        fact_yes("managed memory takes memory of the card when made", pages_used() >= before + 8);
        GR_MUST(cuMemsetD8(managed, 1, 16 * MIB));
        GR_MUST(cuCtxSynchronize());
        fact_yes("managed memory takes memory of the card when the card wrote it", pages_used() >= before + 8);
        GR_MUST(cuMemFree(managed));
        fact_yes("that is back once it is freed", pages_used() < before + 8);
}

/* The calls run while another stream of the context is at work. */
void facts_waits(void)
{
        CUstream busy = stream_of(CU_STREAM_NON_BLOCKING), other = stream_of(CU_STREAM_NON_BLOCKING), gone;
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
        CUmemAccessDesc access = {.location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUmemPoolProps pool_props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = prop.location};
        CUmemGenericAllocationHandle memory;
        CUdeviceptr p, small = block(64), large = block(64 * MIB), pooled, managed, reserved;
        void *pinned, *plain = mmap(NULL, GT_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        uint32_t word = 0;
        size_t available, total;
        CUipcMemHandle ipc;
        CUmemoryPool pool, standard;
        CUgraphExec exec;
        CUgraph graph;
        CUevent event;

        GR_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        GR_MUST(cuDeviceGetDefaultMemPool(&standard, gt.device));
        FACT_WAITS("cuMemAlloc", busy, cuMemAlloc(&p, 8 * MIB));
        fact_changed(true);
        FACT_WAITS("cuMemFree", busy, cuMemFree(p));
        FACT_WAITS("cuMemFree of a small block", busy, cuMemFree(small));
        fact_changed(false);
        FACT_WAITS("cuMemFree of 0", busy, cuMemFree(0));
        FACT_WAITS("cuMemFree that fails", busy, cuMemFree(large + 512));
        FACT_WAITS("cuMemFreeAsync of cuMemAlloc's memory", busy, cuMemFreeAsync(large, other));
        FACT_WAITS("cuStreamSynchronize of that stream", busy, cuStreamSynchronize(other));
        FACT_WAITS("cuMemGetInfo", busy, cuMemGetInfo(&available, &total));
        FACT_WAITS("cuMemAllocAsync", busy, cuMemAllocAsync(&pooled, MIB, other));
        FACT_WAITS("cuMemFreeAsync", busy, cuMemFreeAsync(pooled, other));
        GR_MUST(cuMemAllocAsync(&pooled, MIB, other));
        GR_MUST(cuStreamSynchronize(other));
        FACT_WAITS("cuMemFree of a pool's memory", busy, cuMemFree(pooled));
        FACT_WAITS("cuMemPoolTrimTo", busy, cuMemPoolTrimTo(standard, 0));
        FACT_WAITS("cuMemPoolCreate", busy, cuMemPoolCreate(&pool, &pool_props));
        FACT_WAITS("cuMemPoolDestroy", busy, cuMemPoolDestroy(pool));
        FACT_WAITS("cuMemAllocManaged", busy, cuMemAllocManaged(&managed, MIB, CU_MEM_ATTACH_GLOBAL));
        FACT_WAITS("cuMemFree of managed memory", busy, cuMemFree(managed));
        fact_changed(true);
        FACT_WAITS("cuMemHostAlloc", busy, cuMemHostAlloc(&pinned, MIB, 0));
        FACT_WAITS("cuMemFreeHost", busy, cuMemFreeHost(pinned));
        fact_changed(false);
        FACT_WAITS("cuMemHostRegister", busy, cuMemHostRegister(plain, GT_PAGE, 0));
        FACT_WAITS("cuMemHostUnregister", busy, cuMemHostUnregister(plain));
        FACT_WAITS("cuMemCreate", busy, cuMemCreate(&memory, GT_PAGE, &prop, 0));
        FACT_WAITS("cuMemAddressReserve", busy, cuMemAddressReserve(&reserved, GT_PAGE, 0, 0, 0));
        FACT_WAITS("cuMemMap", busy, cuMemMap(reserved, GT_PAGE, 0, memory, 0));
        FACT_WAITS("cuMemSetAccess", busy, cuMemSetAccess(reserved, GT_PAGE, &access, 1));
        FACT_WAITS("cuMemUnmap", busy, cuMemUnmap(reserved, GT_PAGE));
        FACT_WAITS("cuMemRelease", busy, cuMemRelease(memory));
        FACT_WAITS("cuMemAddressFree", busy, cuMemAddressFree(reserved, GT_PAGE));
        p = block(4 * MIB);
        fact_changed(true);
        FACT_WAITS("cuIpcGetMemHandle", busy, cuIpcGetMemHandle(&ipc, p));
        fact_changed(false);
        FACT_WAITS("cuMemcpyDtoH, pageable", busy, cuMemcpyDtoH(&word, p, sizeof word));
        FACT_WAITS("cuMemcpyHtoD, pageable", busy, cuMemcpyHtoD(p, &word, sizeof word));
        FACT_WAITS("cuMemcpyDtoD", busy, cuMemcpyDtoD(p, p + MIB, 4096));
        FACT_WAITS("cuMemsetD8", busy, cuMemsetD8(p, 1, 4096));
        GR_MUST(cuMemFree(p));
        FACT_WAITS("cuStreamCreate", busy, cuStreamCreate(&gone, CU_STREAM_NON_BLOCKING));
        FACT_WAITS("cuEventRecord", busy, cuEventRecord(event, busy));
        hold(gone);
        GR_MUST(cuEventRecord(event, gone));
        GR_MUST(cuStreamWaitEvent(busy, event, 0));
        fact_waited("cuStreamDestroy of a busy stream", busy, cuStreamDestroy(gone));
        hold(busy);
        GR_MUST(cuEventRecord(event, busy));
        fact_waited("cuEventDestroy of a pending event", busy, cuEventDestroy(event));
        GR_MUST(cuGraphCreate(&graph, 0));
        FACT_WAITS("cuGraphInstantiate", busy, cuGraphInstantiate(&exec, graph, 0));
        FACT_WAITS("cuGraphLaunch in another stream", busy, cuGraphLaunch(exec, other));
        FACT_WAITS("cuGraphExecDestroy", busy, cuGraphExecDestroy(exec));
        FACT_WAITS("cuDeviceGraphMemTrim", busy, cuDeviceGraphMemTrim(gt.device));
        GR_MUST(cuGraphDestroy(graph));
        FACT_WAITS("cuStreamSynchronize of the legacy stream", busy, cuStreamSynchronize(NULL));
        FACT_WAITS("cuCtxSynchronize", busy, cuCtxSynchronize());
}
