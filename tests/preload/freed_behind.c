/*
 * Memory that is freed behind the library's back, by a plug-in that calls the driver itself, and an address that the
 * driver then gives out again in another way: each kind of memory that comes to lie there must be told, used and freed
 * as it is, and no later allocation may be handed that address. Every line must be the same natively and under the
 * library.
 *
 *   freed_behind PLUGIN           blocks
 *   freed_behind PLUGIN handles   of mapped memory, under a limit that has room for a few
 *   freed_behind PLUGIN graphs    executable ones, under a limit that has room for one
 */
#define __CUDA_API_VERSION_INTERNAL /* the per-thread forms, too */
#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"

#define BLOCK (16 * MIB) /* what is freed */
#define OTHER (6 * MIB)  /* what comes to lie there */
#define TRIES 64
static int (*behind_free)(CUdeviceptr);
static int (*behind_free_host)(void *);
static int (*behind_release_handle)(CUmemGenericAllocationHandle);
static int (*behind_destroy_exec)(CUgraphExec);
static CUmemoryPool pool;
static CUgraph graph;
static void *host_memory;
static CUipcMemHandle shared, translated; /* another process's memory, of pool kinds bins and auto */

static CUdeviceptr get_device(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAlloc_v2(&ptr, BLOCK));
        return ptr;
}

static CUdeviceptr get_host(void)
{
        void *ptr;

        GR_MUST(cuMemAllocHost_v2(&ptr, BLOCK));
        return (CUdeviceptr)(uintptr_t)ptr;
}

static int free_device(CUdeviceptr ptr)
{
        return (int)cuMemFree_v2(ptr);
}

static CUdeviceptr get_async(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAllocAsync(&ptr, OTHER, NULL));
        return ptr;
}

static CUdeviceptr get_async_ptsz(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAllocAsync_ptsz(&ptr, OTHER, NULL));
        GR_MUST(cuStreamSynchronize_ptsz(NULL));
        return ptr;
}

static CUdeviceptr get_from_pool(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAllocFromPoolAsync(&ptr, OTHER, pool, NULL));
        return ptr;
}

static CUdeviceptr get_from_pool_ptsz(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAllocFromPoolAsync_ptsz(&ptr, OTHER, pool, NULL));
        GR_MUST(cuStreamSynchronize_ptsz(NULL));
        return ptr;
}

static CUdeviceptr get_managed(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuMemAllocManaged(&ptr, OTHER, CU_MEM_ATTACH_GLOBAL));
        return ptr;
}

static CUdeviceptr get_mapped(void)
{
        CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE};
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = here};
        CUmemAccessDesc access = {.location = here, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUmemGenericAllocationHandle handle;
        CUdeviceptr ptr;

        GR_MUST(cuMemAddressReserve(&ptr, OTHER, 0, 0, 0));
        GR_MUST(cuMemCreate(&handle, OTHER, &prop, 0));
        GR_MUST(cuMemMap(ptr, OTHER, 0, handle, 0));
        GR_MUST(cuMemRelease(handle));
        GR_MUST(cuMemSetAccess(ptr, OTHER, &access, 1));
        return ptr;
}

static int free_mapped(CUdeviceptr ptr)
{
        int wrong = (int)cuMemFree_v2(ptr);

        GR_MUST(cuMemUnmap(ptr, OTHER));
        GR_MUST(cuMemAddressFree(ptr, OTHER));
        return wrong;
}

static CUDA_MEM_ALLOC_NODE_PARAMS node_params(void)
{
        return (CUDA_MEM_ALLOC_NODE_PARAMS){
                .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}},
                .bytesize = OTHER};
}

static CUdeviceptr get_node(void)
{
        CUDA_MEM_ALLOC_NODE_PARAMS params = node_params();
        CUgraphNode node;

        GR_MUST(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params));
        return params.dptr;
}

static CUgraphNodeParams any_params(void)
{
        CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};

        params.alloc.poolProps = node_params().poolProps;
        params.alloc.bytesize = OTHER;
        return params;
}

static CUdeviceptr get_any_node(void)
{
        CUgraphNodeParams params = any_params();
        CUgraphNode node;

        GR_MUST(cuGraphAddNode(&node, graph, NULL, 0, &params));
        return params.alloc.dptr;
}

static CUdeviceptr get_any_node_v2(void)
{
        CUgraphNodeParams params = any_params();
        CUgraphNode node;

        GR_MUST(cuGraphAddNode_v2(&node, graph, NULL, NULL, 0, &params));
        return params.alloc.dptr;
}

static CUdeviceptr get_captured(void)
{
        CUdeviceptr ptr;
        CUstream stream;
        CUgraph captured;

        GR_MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        GR_MUST(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        GR_MUST(cuMemAllocAsync(&ptr, OTHER, stream));
        GR_MUST(cuStreamEndCapture(stream, &captured));
        GR_MUST(cuStreamDestroy_v2(stream));
        return ptr;
}

/* What a graph allocates is nobody's before it runs. */
static int free_node(CUdeviceptr ptr)
{
        return (int)cuMemFree_v2(ptr);
}

static CUdeviceptr get_registered(void)
{
        GR_MUST(cuMemHostRegister_v2(host_memory, OTHER, 0));
        return (CUdeviceptr)(uintptr_t)host_memory;
}

static int free_registered(CUdeviceptr ptr)
{
        return (int)cuMemHostUnregister((void *)(uintptr_t)ptr);
}

/* Of a file, as another interface would export it. */
static CUdeviceptr get_mapped_buffer(void)
{
        CUDA_EXTERNAL_MEMORY_HANDLE_DESC memory = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
                                                   .handle.fd = memfd_create("behind", 0),
                                                   .size = OTHER};
        CUDA_EXTERNAL_MEMORY_BUFFER_DESC buffer = {.size = OTHER};
        CUexternalMemory external;
        CUdeviceptr ptr;

        if (memory.handle.fd < 0 || ftruncate(memory.handle.fd, (off_t)OTHER) != 0)
                exit(EXIT_FAILURE);
        GR_MUST(cuImportExternalMemory(&external, &memory));
        GR_MUST(cuExternalMemoryGetMappedBuffer(&ptr, external, &buffer));
        GR_MUST(cuDestroyExternalMemory(external));
        return ptr;
}

static CUdeviceptr get_opened(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuIpcOpenMemHandle_v2(&ptr, shared, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        return ptr;
}

static CUdeviceptr get_translated(void)
{
        CUdeviceptr ptr;

        GR_MUST(cuIpcOpenMemHandle_v2(&ptr, translated, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
        return ptr;
}

static int close_opened(CUdeviceptr ptr)
{
        return (int)cuIpcCloseMemHandle(ptr);
}

/* Another process, which shares memory until its standard input ends. pool_kind: under the library. */
static void begin_neighbour(const char *pool_kind, CUipcMemHandle *ret)
{
        CUcontext context;
        CUdeviceptr ptr;
        int in[2], out[2];
        char end;

        if (pipe(in) != 0 || pipe(out) != 0)
                exit(EXIT_FAILURE);
        if (fork() == 0) {
                close(in[1]);
                setenv("GPURECLAIM_POOL", pool_kind, 1);
                GR_MUST(cuInit(0));
                GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
                GR_MUST(cuCtxSetCurrent(context));
                GR_MUST(cuMemAlloc_v2(&ptr, OTHER));
                GR_MUST(cuIpcGetMemHandle(ret, ptr));
                if (write(out[1], ret, sizeof(*ret)) == sizeof(*ret) && read(in[0], &end, 1) == 0)
                        exit(EXIT_SUCCESS);
                exit(EXIT_FAILURE);
        }
        close(in[0]);
        close(out[1]);
        if (read(out[0], ret, sizeof(*ret)) != sizeof(*ret))
                exit(EXIT_FAILURE);
}

static const struct kind {
        const char *name;
        bool host; /* the driver takes its addresses where host memory lies */
        CUdeviceptr (*get)(void);
        int (*free)(CUdeviceptr ptr);
} kinds[] = {
        {"cuMemAllocAsync", false, get_async, free_device},
        {"cuMemAllocAsync_ptsz", false, get_async_ptsz, free_device},
        {"cuMemAllocFromPoolAsync", false, get_from_pool, free_device},
        {"cuMemAllocFromPoolAsync_ptsz", false, get_from_pool_ptsz, free_device},
        {"cuMemAllocManaged", true, get_managed, free_device},
        {"cuMemMap", true, get_mapped, free_mapped},
        {"cuGraphAddMemAllocNode", true, get_node, free_node},
        {"cuGraphAddNode", true, get_any_node, free_node},
        {"cuGraphAddNode_v2", true, get_any_node_v2, free_node},
        {"captured", true, get_captured, free_node},
        {"cuExternalMemoryGetMappedBuffer", true, get_mapped_buffer, free_device},
        {"cuIpcOpenMemHandle", true, get_opened, close_opened},
        {"cuIpcOpenMemHandle, translated", true, get_translated, close_opened},
        {"cuMemHostRegister", true, get_registered, free_registered},
};

/* Of a block of the library's that was freed behind its back, what is there now. */
static void come_again(const struct kind *kind)
{
        CUdeviceptr block = kind->host ? get_host() : get_device(), got[TRIES], base = 0;
        size_t bytes = 0, count = 0;
        uint32_t word = 0;
        CUresult result;

        if ((kind->host ? behind_free_host((void *)(uintptr_t)block) : behind_free(block)) != 0)
                exit(EXIT_FAILURE);
        if (kind->get == get_registered) {
                host_memory = mmap((void *)(uintptr_t)block, OTHER, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
                if (host_memory == MAP_FAILED)
                        exit(EXIT_FAILURE);
        }
        do {
                got[count] = kind->get();
        } while (got[count++] != block && count < TRIES);
        if (got[count - 1] != block) {
                fprintf(stderr, "%s: the address did not come again, so nothing was tested\n", kind->name);
                exit(EXIT_FAILURE);
        }
        result = cuMemGetAddressRange_v2(&base, &bytes, block);
        printf("%s: range %d", kind->name, (int)result);
        if (result == CUDA_SUCCESS)
                printf(", begins %s, %zu MiB", base == block ? "there" : "elsewhere", bytes / MIB);
        printf(", of the host: %d", (int)cuMemFreeHost((void *)(uintptr_t)block));
        while (count > 0)
                printf(", freed %d", kind->free(got[--count]));
        GR_MUST(cuCtxSynchronize());
        printf(", freed once more %d\n", kind->free == free_mapped ? 1 : kind->free(block));
        if (kind->get == get_registered)
                munmap(host_memory, OTHER);

        /* What is allocated now is all there. */
        for (int i = 0; i < 4; i++) {
                got[i] = i % 2 ? get_host() : get_device();
                GR_MUST(cuMemsetD32_v2(got[i], (unsigned)i + 1, BLOCK / 4));
        }
        for (int i = 0; i < 4; i++) {
                GR_MUST(cuMemcpyDtoH_v2(&word, got[i] + BLOCK - 4, 4));
                printf("%s%u", i ? " " : "afterwards: ", word);
                GR_MUST(i % 2 ? cuMemFreeHost((void *)(uintptr_t)got[i]) : cuMemFree_v2(got[i]));
        }
        printf("\n");
}

/* Handles that come again after a release behind the library: what they stood for before is charged no more. */
static void handles_come_again(void)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
        CUmemGenericAllocationHandle handle, before = 0;
        int again = 0;

        for (int i = 0; i < TRIES; i++) {
                CUresult result = cuMemCreate(&handle, BLOCK, &prop, 0);

                if (result != CUDA_SUCCESS)
                        printf("handle %d: %d\n", i, (int)result);
                if (result != CUDA_SUCCESS || behind_release_handle(handle) != 0)
                        break;
                again += handle == before;
                before = handle;
        }
        if (again < TRIES / 2) {
                fprintf(stderr, "%d handles came again, so nothing was tested\n", again);
                exit(EXIT_FAILURE);
        }
        GR_MUST(cuMemCreate(&handle, BLOCK, &prop, 0));
        printf("the next one: %d", (int)cuMemRelease(handle));
        printf(", once more %d\n", (int)cuMemRelease(handle));
}

/* A graph that gets the handle of one destroyed behind the library is not taken to need what that one allocated. */
static void graphs_come_again(void)
{
        CUDA_MEM_ALLOC_NODE_PARAMS params = node_params();
        CUdeviceptr blocks[2];
        CUgraphExec first, second;
        CUgraphNode node;
        CUgraph empty;

        params.bytesize = 5 * BLOCK;
        GR_MUST(cuGraphCreate(&graph, 0));
        GR_MUST(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &params));
        GR_MUST(cuGraphAddMemFreeNode(&node, graph, &node, 1, params.dptr));
        GR_MUST(cuGraphCreate(&empty, 0));
        GR_MUST(cuGraphInstantiateWithFlags(&first, graph, 0));
        if (behind_destroy_exec(first) != 0)
                exit(EXIT_FAILURE);
        GR_MUST(cuGraphInstantiateWithFlags(&second, empty, 0));
        if (second != first) {
                fprintf(stderr, "the handle did not come again, so nothing was tested\n");
                exit(EXIT_FAILURE);
        }
        for (int i = 0; i < 2; i++)
                blocks[i] = get_device();
        printf("launched: %d\n", (int)cuGraphLaunch(second, NULL));
        for (int i = 0; i < 2; i++)
                GR_MUST(cuMemFree_v2(blocks[i]));
        GR_MUST(cuGraphExecDestroy(second));
}

static void *find(void *plugin, const char *name)
{
        void *found = dlsym(plugin, name);

        if (!found)
                exit(EXIT_FAILURE);
        return found;
}

int main(int argc, char **argv)
{
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
        void *plugin = argc >= 2 ? dlopen(argv[1], RTLD_NOW | RTLD_DEEPBIND) : NULL, *found;
        size_t before, after, total;
        CUcontext context;

        if (!plugin) {
                fprintf(stderr, "usage: freed_behind PLUGIN [handles|graphs]\n");
                return 2;
        }
        found = find(plugin, "behind_free");
        memcpy(&behind_free, &found, sizeof(found));
        found = find(plugin, "behind_free_host");
        memcpy(&behind_free_host, &found, sizeof(found));
        found = find(plugin, "behind_release_handle");
        memcpy(&behind_release_handle, &found, sizeof(found));
        found = find(plugin, "behind_destroy_exec");
        memcpy(&behind_destroy_exec, &found, sizeof(found));
        if (argc == 2) {
                begin_neighbour("bins", &shared);
                begin_neighbour("auto", &translated);
        }
        GR_MUST(cuInit(0));
        GR_MUST(cuDevicePrimaryCtxRetain(&context, 0));
        GR_MUST(cuCtxSetCurrent(context));
        if (argc > 2) {
                if (strcmp(argv[2], "graphs") == 0)
                        graphs_come_again();
                else
                        handles_come_again();
                return EXIT_SUCCESS;
        }
        GR_MUST(cuMemPoolCreate(&pool, &props));
        GR_MUST(cuGraphCreate(&graph, 0));
        GR_MUST(cuMemGetInfo_v2(&before, &total));
        for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
                come_again(&kinds[i]);
        GR_MUST(cuMemPoolDestroy(pool));
        GR_MUST(cuCtxSynchronize());
        GR_MUST(cuMemGetInfo_v2(&after, &total));
        printf("%zu MiB of the card are used afterwards\n", (before - after) / MIB);
        return EXIT_SUCCESS;
}
