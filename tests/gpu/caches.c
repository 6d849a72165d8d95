/*
 * What the driver keeps after a program is done with it, and which call gives it back: by cuMemGetInfo, before and
 * after, natively. One "name: held -> back" line each; it checks nothing. core/reclaim/ladder.h says which of these are
 * rungs.
 *
 * Then managed memory: what it costs, whether the driver can say what of it lies on the device, and which state a block
 * still has that is handed out a second time.
 */
#include "gputest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MODULES = 32, GRAPHS = 128, NODES = 8, STREAMS = 64, MANAGED_ROUNDS = 50 };

#define POOL_BYTES  (256 * GT_MIB)
#define STACK_BYTES ((size_t)16 << 10)

#define KERNEL_HEAD ".version 7.0\n.target sm_70\n.address_size 64\n"

/* Needs 16 KiB of local memory in every thread that the card can hold. */
static const char deep_ptx[] =
        KERNEL_HEAD ".visible .entry gr_deep(.param .u64 out, .param .u32 at, .param .u32 from) {\n"
                    "  .local .align 16 .b8 room[16384];\n"
                    "  .reg .b32 %a, %b, %v;\n"
                    "  .reg .b64 %o, %l, %p, %q;\n"
                    "  ld.param.u64 %o, [out];\n"
                    "  ld.param.u32 %a, [at];\n"
                    "  ld.param.u32 %b, [from];\n"
                    "  mov.u64 %l, room;\n"
                    "  cvt.u64.u32 %p, %a;\n"
                    "  cvt.u64.u32 %q, %b;\n"
                    "  add.u64 %p, %p, %l;\n"
                    "  add.u64 %q, %q, %l;\n"
                    "  st.local.u32 [%p], %a;\n"
                    "  ld.local.u32 %v, [%q];\n"
                    "  st.global.u32 [%o], %v;\n"
                    "  ret;\n"
                    "}\n";

static const char large_ptx[] = KERNEL_HEAD ".visible .global .align 4 .b8 large[67108864];\n"
                                            ".visible .entry gr_nothing() { ret; }\n";

static struct gt gt;

static double used_mib(void)
{
        size_t available, total;

        GT_MUST(cuMemGetInfo(&available, &total));
        return (double)(total - available) / (double)GT_MIB;
}

/* What a step added to the card's use, or took off it, since the last call. */
static double changed_mib(void)
{
        static double before;
        double now = used_mib(), changed = now - before;

        before = now;
        return changed;
}

static void say(const char *name, double held_mib, const char *call, double back_mib, double us)
{
        printf("%s: held %.1f MiB; %s gives back %.1f MiB in %.0f us\n", name, held_mib, call, back_mib, us);
}

/* Holds NAME against what CALL gives back; the measure before CALL is the last one. */
#define GIVES(name, held, call)                                                                                        \
        do {                                                                                                           \
                double held_ = (held), begin_ = gt_now_us();                                                           \
                CUresult result_ = (call);                                                                             \
                double us_ = gt_now_us() - begin_;                                                                     \
                if (result_ == CUDA_SUCCESS)                                                                           \
                        say(name, held_, #call, 0 - changed_mib(), us_);                                               \
                else                                                                                                   \
                        printf("%s: %s returned %s\n", name, #call, gt_result_name(result_));                          \
        } while (0)

/* Allocates from the pool and frees, with a threshold that keeps everything. Returns what the card still has to hold.
 */
static double fill_pool(CUmemoryPool pool, bool current)
{
        cuuint64_t keep = UINT64_MAX;
        CUstream stream = gt_stream();
        CUdeviceptr p;

        GT_MUST(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
        changed_mib();
        if (current)
                GT_MUST(cuMemAllocAsync(&p, POOL_BYTES, stream));
        else
                GT_MUST(cuMemAllocFromPoolAsync(&p, POOL_BYTES, pool, stream));
        GT_MUST(cuMemFreeAsync(p, stream));
        GT_MUST(cuStreamSynchronize(stream));
        GT_MUST(cuStreamDestroy(stream));
        return changed_mib();
}

static void pools(void)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
        CUmemoryPool by_default, own;

        GT_MUST(cuDeviceGetDefaultMemPool(&by_default, gt.device));
        GIVES("default pool", fill_pool(by_default, false), cuMemPoolTrimTo(by_default, 0));
        GT_MUST(cuMemPoolCreate(&own, &props));
        GIVES("explicit pool", fill_pool(own, false), cuMemPoolTrimTo(own, 0));
        GT_MUST(cuDeviceSetMemPool(gt.device, own));
        GIVES("current pool", fill_pool(own, true), cuMemPoolTrimTo(own, 0));
        GT_MUST(cuDeviceSetMemPool(gt.device, by_default));
        GIVES("explicit pool, destroyed", fill_pool(own, false), cuMemPoolDestroy(own));
}

/* A graph with memory nodes, captured. */
static CUgraphExec memory_graph(CUstream stream)
{
        CUgraphExec exec;
        CUgraph graph;
        CUdeviceptr p;

        GT_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GT_MUST(cuMemAllocAsync(&p, POOL_BYTES, stream));
        GT_MUST(gt_fill(&gt, stream, p, 1, 1024));
        GT_MUST(cuMemFreeAsync(p, stream));
        GT_MUST(cuStreamEndCapture(stream, &graph));
        GT_MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
        GT_MUST(cuGraphDestroy(graph));
        return exec;
}

static CUgraphExec kernel_graph(CUstream stream, CUdeviceptr p)
{
        CUgraphExec exec;
        CUgraph graph;

        GT_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        for (int i = 0; i < NODES; i++)
                GT_MUST(gt_fill(&gt, stream, p, 1, 1024));
        GT_MUST(cuStreamEndCapture(stream, &graph));
        GT_MUST(cuGraphInstantiateWithFlags(&exec, graph, 0));
        GT_MUST(cuGraphDestroy(graph));
        return exec;
}

static CUresult destroy_all(CUgraphExec *execs)
{
        CUresult result = CUDA_SUCCESS;

        for (int i = 0; i < GRAPHS && result == CUDA_SUCCESS; i++)
                result = cuGraphExecDestroy(execs[i]);
        return result;
}

static void graph_memory(void)
{
        __typeof__(&cuDeviceGraphMemTrim) trim = GT_OPTIONAL(cuDeviceGraphMemTrim);
        CUstream stream = gt_stream();
        CUgraphExec exec;

        changed_mib();
        exec = memory_graph(stream);
        GT_MUST(cuGraphLaunch(exec, stream));
        GT_MUST(cuStreamSynchronize(stream));
        if (trim) {
                GIVES("graph with memory nodes, idle", changed_mib(), trim(gt.device));
                GT_MUST(cuGraphLaunch(exec, stream));
                GT_MUST(cuStreamSynchronize(stream));
        }
        GIVES("graph with memory nodes", changed_mib(), cuGraphExecDestroy(exec));
        if (trim)
                GIVES("graph with memory nodes, destroyed", 0, trim(gt.device));
        GT_MUST(cuStreamDestroy(stream));
}

static void graph_executables(void)
{
        __typeof__(&cuDeviceGraphMemTrim) trim = GT_OPTIONAL(cuDeviceGraphMemTrim);
        CUstream stream = gt_stream();
        CUgraphExec execs[GRAPHS];
        CUdeviceptr p;

        GT_MUST(cuMemAlloc(&p, 4096));
        changed_mib();
        for (int i = 0; i < GRAPHS; i++) {
                execs[i] = kernel_graph(stream, p);
                GT_MUST(cuGraphLaunch(execs[i], stream));
        }
        GT_MUST(cuStreamSynchronize(stream));
        GIVES("128 graphs of 8 kernels", changed_mib(), destroy_all(execs));
        if (trim)
                GIVES("128 graphs of 8 kernels, destroyed", 0, trim(gt.device));
        GT_MUST(cuMemFree(p));
        GT_MUST(cuStreamDestroy(stream));
}

static void limits(void)
{
        static const struct {
                const char *name;
                CUlimit limit;
                size_t bytes;
        } rows[] = {{"stack, 16 KiB a thread", CU_LIMIT_STACK_SIZE, STACK_BYTES},
                    {"printf FIFO, 64 MiB", CU_LIMIT_PRINTF_FIFO_SIZE, 64 * GT_MIB},
                    {"device-side malloc heap, 256 MiB", CU_LIMIT_MALLOC_HEAP_SIZE, 256 * GT_MIB}};

        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
                size_t before;
                CUresult result;

                GT_MUST(cuCtxGetLimit(&before, rows[i].limit));
                changed_mib();
                result = cuCtxSetLimit(rows[i].limit, rows[i].bytes);
                if (result != CUDA_SUCCESS) {
                        printf("%s: cuCtxSetLimit returned %s\n", rows[i].name, gt_result_name(result));
                        continue;
                }
                GT_MUST(gt_spin(&gt, NULL, 1));
                GT_MUST(cuCtxSynchronize());
                GIVES(rows[i].name, changed_mib(), cuCtxSetLimit(rows[i].limit, before));
                GT_MUST(gt_spin(&gt, NULL, 1));
                GIVES("  and with the next launch", 0, cuCtxSynchronize());
        }
}

static void local_memory(void)
{
        CUdeviceptr out;
        CUmodule module;
        CUfunction deep;
        unsigned at = 64, from = 128;
        void *args[] = {&out, &at, &from};

        GT_MUST(cuMemAlloc(&out, 4));
        GT_MUST(cuModuleLoadData(&module, deep_ptx));
        GT_MUST(cuModuleGetFunction(&deep, module, "gr_deep"));
        changed_mib();
        GT_MUST(cuLaunchKernel(deep, 1, 1, 1, 32, 1, 1, 0, NULL, args, NULL));
        GT_MUST(cuCtxSynchronize());
        GIVES("local memory of a kernel, 16 KiB a thread", changed_mib(), gt_spin(&gt, NULL, 1));
        GIVES("local memory, kernel done", 0, cuCtxSynchronize());
        GIVES("local memory, kernel unloaded", 0, cuModuleUnload(module));
        /* Setting the limit, even to what it is, has the driver size local memory anew. */
        GIVES("local memory, limit set again", 0, cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 1024));
        GT_MUST(gt_spin(&gt, NULL, 1));
        GIVES("  and with the next launch", 0, cuCtxSynchronize());
        GT_MUST(cuMemFree(out));
}

static CUresult unload_all(CUmodule *modules)
{
        CUresult result = CUDA_SUCCESS;

        for (int i = 0; i < MODULES && result == CUDA_SUCCESS; i++)
                result = cuModuleUnload(modules[i]);
        return result;
}

static void code(void)
{
        __typeof__(&cuLibraryLoadData) load = GT_OPTIONAL(cuLibraryLoadData);
        __typeof__(&cuLibraryUnload) unload = GT_OPTIONAL(cuLibraryUnload);
        __typeof__(&cuLibraryGetGlobal) get_global = GT_OPTIONAL(cuLibraryGetGlobal);
        CUmodule modules[MODULES], large;
        CUlibrary library;
        CUdeviceptr at;
        size_t bytes;

        changed_mib();
        for (int i = 0; i < MODULES; i++) {
                CUfunction function;

                gt_load_kernels(&modules[i]);
                GT_MUST(cuModuleGetFunction(&function, modules[i], "gr_fill"));
        }
        GIVES("32 modules of five kernels", changed_mib(), unload_all(modules));
        if (gt.simulated)
                return;
        GT_MUST(cuModuleLoadData(&large, large_ptx));
        GIVES("module with a variable of 64 MiB", changed_mib(), cuModuleUnload(large));
        if (!load || !unload || !get_global)
                return;
        GT_MUST(load(&library, large_ptx, NULL, NULL, 0, NULL, NULL, 0));
        GT_MUST(get_global(&at, &bytes, library, "large"));
        GIVES("library with a variable of 64 MiB", changed_mib(), unload(library));
}

static void rest(void)
{
        __typeof__(&cuCtxResetPersistingL2Cache) reset = GT_OPTIONAL(cuCtxResetPersistingL2Cache);
        CUstream streams[STREAMS];

        changed_mib();
        for (int i = 0; i < STREAMS; i++) {
                streams[i] = gt_stream();
                GT_MUST(gt_spin(&gt, streams[i], 1));
        }
        GT_MUST(cuCtxSynchronize());
        printf("64 streams: held %.1f MiB", changed_mib());
        for (int i = 0; i < STREAMS; i++)
                GT_MUST(cuStreamDestroy(streams[i]));
        printf("; cuStreamDestroy of all gives back %.1f MiB\n", 0 - changed_mib());
        if (reset)
                GIVES("persisting L2", 0, reset());
}

#if CUDA_VERSION >= 13000
#define PLACE_DEVICE              ((CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device})
#define PREFETCH(p, bytes, place) prefetch(p, bytes, place, 0, NULL)
#else
#define PLACE_DEVICE              gt.device
#define PREFETCH(p, bytes, place) prefetch(p, bytes, place, NULL)
#endif

static int range_attribute(CUdeviceptr p, size_t bytes, CUmem_range_attribute attribute)
{
        __typeof__(&cuMemRangeGetAttribute) ask = GT_OPTIONAL(cuMemRangeGetAttribute);
        int value = -100;

        if (!ask || ask(&value, sizeof value, attribute, p, bytes) != CUDA_SUCCESS)
                return -101;
        return value;
}

static void tell_state(const char *when, CUdeviceptr p, size_t bytes)
{
        printf("managed, %s: preferred location %d, read mostly %d, last prefetch %d, card %+.1f MiB\n", when,
               range_attribute(p, bytes, CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION),
               range_attribute(p, bytes, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY),
               range_attribute(p, bytes, CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION), changed_mib());
}

/* No more of it than a sliver of what is free: oversubscribed it can hang a card. */
static void managed(void)
{
        __typeof__(&cuMemAdvise) advise = GT_OPTIONAL(cuMemAdvise);
        __typeof__(&cuMemPrefetchAsync) prefetch = GT_OPTIONAL(cuMemPrefetchAsync);
        __typeof__(&cuStreamAttachMemAsync) attach = GT_OPTIONAL(cuStreamAttachMemAsync);
        const size_t sizes[] = {64 * GT_KIB, GT_MIB, 64 * GT_MIB};
        const size_t bytes = 64 * GT_MIB;
        CUstream stream = gt_stream();
        CUdeviceptr p;

        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                double alloc_us = 0, free_us = 0, reset_us = 0, begin;

                for (int round = 0; round < MANAGED_ROUNDS; round++) {
                        begin = gt_now_us();
                        GT_MUST(cuMemAllocManaged(&p, sizes[i], CU_MEM_ATTACH_GLOBAL));
                        alloc_us += gt_now_us() - begin;
                        memset((void *)p, 1, sizes[i]);
                        if (advise && attach) {
                                begin = gt_now_us();
                                (void)advise(p, sizes[i], CU_MEM_ADVISE_UNSET_READ_MOSTLY, PLACE_DEVICE);
                                (void)advise(p, sizes[i], CU_MEM_ADVISE_UNSET_PREFERRED_LOCATION, PLACE_DEVICE);
                                (void)advise(p, sizes[i], CU_MEM_ADVISE_UNSET_ACCESSED_BY, PLACE_DEVICE);
                                (void)attach(NULL, p, 0, CU_MEM_ATTACH_GLOBAL);
                                GT_MUST(cuStreamSynchronize(NULL));
                                reset_us += gt_now_us() - begin;
                        }
                        begin = gt_now_us();
                        GT_MUST(cuMemFree(p));
                        free_us += gt_now_us() - begin;
                }
                printf("managed, %zu KiB: alloc %.1f us, free %.1f us; resetting advice and attachment instead: %.1f "
                       "us\n",
                       sizes[i] / GT_KIB, alloc_us / MANAGED_ROUNDS, free_us / MANAGED_ROUNDS,
                       reset_us / MANAGED_ROUNDS);
        }
        if (!advise || !prefetch || !attach || gt.simulated)
                return; /* simulated pages do not move */

        changed_mib();
        GT_MUST(cuMemAllocManaged(&p, bytes, CU_MEM_ATTACH_GLOBAL));
        tell_state("new", p, bytes);
        memset((void *)p, 1, bytes);
        tell_state("written by the host", p, bytes);
        GT_MUST(gt_fill(&gt, stream, p, 2, bytes / 4));
        GT_MUST(cuStreamSynchronize(stream));
        tell_state("written by a kernel", p, bytes);
        if (*(volatile unsigned *)p != 2)
                gt_die("managed memory does not hold what was written");
        memset((void *)p, 3, bytes);
        tell_state("written by the host again", p, bytes);
        if (PREFETCH(p, bytes, PLACE_DEVICE) == CUDA_SUCCESS) {
                GT_MUST(cuCtxSynchronize());
                tell_state("prefetched to the device", p, bytes);
                memset((void *)p, 4, bytes);
                tell_state("written by the host after that", p, bytes);
        }
        if (advise(p, bytes, CU_MEM_ADVISE_SET_PREFERRED_LOCATION, PLACE_DEVICE) == CUDA_SUCCESS &&
            advise(p, bytes, CU_MEM_ADVISE_SET_READ_MOSTLY, PLACE_DEVICE) == CUDA_SUCCESS)
                tell_state("advised", p, bytes);
        if (attach(stream, p, 0, CU_MEM_ATTACH_SINGLE) == CUDA_SUCCESS) {
                GT_MUST(cuStreamSynchronize(stream));
                tell_state("attached to one stream", p, bytes);
        }
        GT_MUST(cuMemFree(p));
        changed_mib();
        GT_MUST(cuMemAllocManaged(&p, bytes, CU_MEM_ATTACH_GLOBAL));
        tell_state("freed and allocated anew", p, bytes);
        GT_MUST(cuMemFree(p));
        GT_MUST(cuStreamDestroy(stream));
}

int main(void)
{
        gt_open(&gt);
        pools();
        if (!gt.simulated) /* which has no memory nodes, and reads no PTX */
                graph_memory();
        graph_executables();
        limits();
        if (!gt.simulated)
                local_memory();
        code();
        rest();
        managed();
        gt_close(&gt);
        return EXIT_SUCCESS;
}
