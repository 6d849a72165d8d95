/*
 * Memory of another process opened here, and memory of this one that others may know: every answer must be the driver's
 * own, nothing of it is charged here or cached, and under the library what is open is told.
 *
 *   imports [--limit=SIZE] [--plain-exporter]     the limit in force; the other process without what is preloaded
 *
 * Lines that begin with ~ are about the library, or figures; all others must be the same natively and under it. Exit
 * status 1 when a check failed.
 */
#include "gputest.h"

#include "gpureclaim.h"
#include "peer_process.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES (64 * MIB) /* whole pages, so that nothing else lies in what is opened */

enum kind { LEGACY, MAPPED };
enum { WORDS_THERE = 1000, WORDS_HERE = 2000 };

static char exporter_mode[] = "as-exporter";

/* To the exporter: make such memory; then, with whatever number, look at it and free it. */
struct order {
        uint32_t kind;
};

struct offer {
        CUresult result;
        CUipcMemHandle handle; /* LEGACY; MAPPED comes with a descriptor */
};

struct verdict {
        uint32_t wrong;
        int64_t cached_bytes; /* by how much its cache grew with the free */
};

static struct gt gt;
static gpureclaim_status_function *status_of; /* NULL: native */
static int other;                             /* socket to the other process */
static size_t limit;

static struct gpureclaim_status status(void)
{
        struct gpureclaim_status now = {.struct_bytes = sizeof now};

        if (status_of && status_of(gt.device, &now) != 0)
                gt_die("imports: no status");
        return now;
}

/* Of the library only. */
#define FIGURE(good, name, ...)                                                                                        \
        do {                                                                                                           \
                if (status_of) {                                                                                       \
                        printf("~ ");                                                                                  \
                        gt_check(good, name, __VA_ARGS__);                                                             \
                }                                                                                                      \
        } while (0)

static void imported(const char *name, size_t bytes)
{
        size_t now = status().imported_bytes;

        FIGURE(now == bytes, name, "%.1f MiB told as imported, %.1f MiB open", gt_mib(now), gt_mib(bytes));
}

static void answer_from_other(void *data, size_t bytes, int *ret_fd)
{
        if (!peer_receive(other, data, bytes, ret_fd))
                gt_die("imports: no answer from the other process");
}

static void fill(CUdeviceptr p, uint32_t value)
{
        GR_MUST(cuMemsetD32(p, value, BYTES / 4));
        GR_MUST(cuCtxSynchronize());
}

static CUresult create(CUmemGenericAllocationHandle *ret)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};

        return cuMemCreate(ret, BYTES, &prop, 0);
}

static CUdeviceptr map(CUmemGenericAllocationHandle handle)
{
        CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUdeviceptr p;

        GR_MUST(cuMemAddressReserve(&p, BYTES, 0, 0, 0));
        GR_MUST(cuMemMap(p, BYTES, 0, handle, 0));
        GR_MUST(cuMemSetAccess(p, BYTES, &access, 1));
        return p;
}

static void unmap(CUdeviceptr p)
{
        GR_MUST(cuMemUnmap(p, BYTES));
        GR_MUST(cuMemAddressFree(p, BYTES));
}

/* The other process. */
static int export_for_others(void)
{
        struct order order;
        int fd = -1, none;

        while (peer_receive(other, &order, sizeof order, &none)) {
                CUmemGenericAllocationHandle memory = 0;
                struct verdict verdict = {0};
                struct offer offer = {0};
                CUdeviceptr p = 0;

                if (order.kind == LEGACY) {
                        GR_MUST(cuMemAlloc(&p, BYTES));
                        offer.result = cuIpcGetMemHandle(&offer.handle, p);
                } else {
                        offer.result = create(&memory);
                        if (offer.result == CUDA_SUCCESS) {
                                p = map(memory);
                                offer.result = cuMemExportToShareableHandle(
                                        &fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
                        }
                }
                if (p)
                        fill(p, WORDS_THERE);
                peer_send(other, &offer, sizeof offer, offer.result == CUDA_SUCCESS ? fd : -1);
                if (fd >= 0)
                        close(fd);
                fd = -1;
                if (!peer_receive(other, &order, sizeof order, &none))
                        return EXIT_FAILURE;
                verdict.cached_bytes = -(int64_t)status().cached_bytes;
                if (p)
                        verdict.wrong = gt_wrong_words(p, BYTES, WORDS_HERE);
                if (p && order.kind == LEGACY)
                        GR_MUST(cuMemFree(p));
                else if (p)
                        unmap(p);
                if (memory)
                        GR_MUST(cuMemRelease(memory));
                verdict.cached_bytes += (int64_t)status().cached_bytes;
                peer_send(other, &verdict, sizeof verdict, -1);
        }
        gt_close(&gt);
        return EXIT_SUCCESS;
}

/* What the driver says of an address of memory that was opened, and of one inside. */
static void answers(const char *name, CUdeviceptr p)
{
        for (size_t offset = 0; offset < BYTES; offset += BYTES / 2 + 4096) {
                CUdeviceptr base = 0, start = 0;
                size_t size = 0, range = 0;
                unsigned type = 0, managed = 9;
                int ordinal = -1;
                CUresult codes[6] = {cuMemGetAddressRange(&base, &size, p + offset),
                                     cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p + offset),
                                     cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p + offset),
                                     cuPointerGetAttribute(&range, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p + offset),
                                     cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, p + offset),
                                     cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p + offset)};

                printf("%s, %zu MiB in: codes", name, offset / MIB);
                for (int i = 0; i < 6; i++)
                        printf(" %d", (int)codes[i]);
                printf(", size %zu %zu, first byte %d %d, type %u, managed %u, device %d\n", size, range, base == p,
                       start == p, type, managed, ordinal);
        }
}

/* Asks the other process for memory; the code it got. */
static CUresult ask(enum kind kind, struct offer *ret_offer, int *ret_fd)
{
        struct order order = {kind};

        peer_send(other, &order, sizeof order, -1);
        answer_from_other(ret_offer, sizeof *ret_offer, ret_fd);
        return ret_offer->result;
}

/* The process's own, so that what is opened beside it would pass the limit if it counted. */
static CUdeviceptr own;

static void hold(void)
{
        if (limit)
                GR_MUST(cuMemAlloc(&own, limit - BYTES / 2));
}

static void let_go(void)
{
        if (limit)
                GR_MUST(cuMemFree(own));
}

/* It looks at what this one wrote, and frees it. */
static void finish(const char *name, enum kind kind, bool written)
{
        struct order order = {kind};
        struct verdict verdict;
        int none;

        peer_send(other, &order, sizeof order, -1);
        answer_from_other(&verdict, sizeof verdict, &none);
        if (written)
                printf("%s: %u words wrong there\n", name, verdict.wrong);
        printf("~ ");
        gt_check(verdict.cached_bytes <= 0, name, "the exporter's cache grew by %.1f MiB with its free",
                 (double)verdict.cached_bytes / (double)MIB);
}

/* Opening takes nothing from the card: where this is not so here, whoever counts by NVML must know. */
static void footprint_moved(const char *name, size_t before)
{
        size_t after;

        if (gt_footprint(&gt, &after))
                printf("~ %s: the process's figure moved by %.1f MiB (%s)\n", name, gt_mib(after) - gt_mib(before),
                       gt_footprint_source(&gt));
}

static void legacy(void)
{
        const char *name = "IPC handle";
        size_t live = status().live_bytes, footprint = 0;
        CUdeviceptr p = 0, again = 0;
        struct offer offer;
        CUresult result;
        int none;

        if (ask(LEGACY, &offer, &none) != CUDA_SUCCESS) {
                printf("%s: not to be had here (%s)\n", name, gt_result_name(offer.result));
                finish(name, LEGACY, false);
                return;
        }
        gt_footprint(&gt, &footprint);
        result = cuIpcOpenMemHandle(&p, offer.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        printf("%s: opened %d\n", name, (int)result);
        if (result != CUDA_SUCCESS) {
                finish(name, LEGACY, false);
                return;
        }
        imported(name, BYTES);
        footprint_moved(name, footprint);
        FIGURE(status().live_bytes == live, name, "%.1f MiB charged for it",
               gt_mib(status().live_bytes) - gt_mib(live));
        answers(name, p);
        result = cuIpcOpenMemHandle(&again, offer.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
        printf("%s: opened again %d, at the same address %d\n", name, (int)result, again == p);
        if (result == CUDA_SUCCESS) {
                unsigned long long id;
                /* Without the driver's number for it nobody knows that it is still open. */
                bool told = cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p) == CUDA_SUCCESS;

                imported("opened again", again == p ? BYTES : 2 * BYTES);
                printf("%s: closed once %d\n", name, (int)cuIpcCloseMemHandle(again));
                imported("closed once", told ? BYTES : 0);
        }
        printf("%s: %u words wrong here\n", name, gt_wrong_words(p, BYTES, WORDS_THERE));
        fill(p, WORDS_HERE);
        printf("%s: closed inside %d", name, (int)cuIpcCloseMemHandle(p + 4096));
        printf(", closed %d", (int)cuIpcCloseMemHandle(p));
        printf(", again %d\n", (int)cuIpcCloseMemHandle(p));
        imported("closed", 0);
        finish(name, LEGACY, true);

        /* A free of such an address is a mistake: the driver's code, and nothing of it in our cache. */
        if (ask(LEGACY, &offer, &none) == CUDA_SUCCESS &&
            cuIpcOpenMemHandle(&p, offer.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == CUDA_SUCCESS) {
                size_t cached = status().cached_bytes;

                fill(p, WORDS_HERE);
                result = cuMemFree(p);
                printf("%s: cuMemFree %d", name, (int)result);
                printf(", then closed %d\n", (int)cuIpcCloseMemHandle(p));
                FIGURE(status().cached_bytes == cached, name, "%.1f MiB cached by that free",
                       gt_mib(status().cached_bytes) - gt_mib(cached));
                imported("freed by mistake", 0);
        }
        finish(name, LEGACY, true);
}

static void mapped(void)
{
        const char *name = "mapped memory";
        size_t live = status().live_bytes, footprint = 0;
        CUmemGenericAllocationHandle memory, retained;
        struct offer offer;
        CUresult result;
        CUdeviceptr p;
        int fd;

        if (ask(MAPPED, &offer, &fd) != CUDA_SUCCESS) {
                printf("%s: not to be had here (%s)\n", name, gt_result_name(offer.result));
                finish(name, MAPPED, false);
                return;
        }
        gt_footprint(&gt, &footprint);
        result =
                cuMemImportFromShareableHandle(&memory, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        printf("%s: imported %d\n", name, (int)result);
        close(fd);
        if (result != CUDA_SUCCESS) {
                finish(name, MAPPED, false);
                return;
        }
        p = map(memory);
        imported(name, BYTES);
        footprint_moved(name, footprint);
        FIGURE(status().live_bytes == live, name, "%.1f MiB charged for it",
               gt_mib(status().live_bytes) - gt_mib(live));
        answers(name, p);
        printf("%s: cuMemFree %d\n", name, (int)cuMemFree(p));
        printf("%s: %u words wrong here\n", name, gt_wrong_words(p, BYTES, WORDS_THERE));
        fill(p, WORDS_HERE);
        GR_MUST(cuMemRelease(memory));
        imported("released, still mapped", BYTES);
        result = cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)p);
        printf("%s: retained %d\n", name, (int)result);
        unmap(p);
        if (result == CUDA_SUCCESS)
                GR_MUST(cuMemRelease(retained));
        imported("unmapped and released", 0);
        finish(name, MAPPED, true);
}

static CUresult export(CUmemGenericAllocationHandle memory, int *ret_fd)
{
        return cuMemExportToShareableHandle(ret_fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

/* Released, and still mapped when it is imported; beside it memory of its size that was not exported. */
static void own_while_mapped(void)
{
        const char *name = "own memory imported while it is mapped";
        CUmemGenericAllocationHandle beside, memory, again;
        size_t live = status().live_bytes;
        CUdeviceptr block, p, q;
        CUresult result;
        int fd;

        if (create(&beside) != CUDA_SUCCESS)
                return;
        GR_MUST(create(&memory));
        block = map(beside);
        p = map(memory);
        GR_MUST(cuMemRelease(beside));
        result = export(memory, &fd);
        printf("%s: exported %d\n", name, (int)result);
        GR_MUST(cuMemRelease(memory));
        if (result == CUDA_SUCCESS) {
                result = cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd,
                                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
                close(fd);
                printf("%s: imported %d\n", name, (int)result);
        }
        if (result == CUDA_SUCCESS) {
                q = map(again);
                imported(name, 0);
                FIGURE(status().live_bytes == live + 2 * BYTES, name, "%.1f MiB charged",
                       gt_mib(status().live_bytes) - gt_mib(live));
                unmap(block);
                FIGURE(status().live_bytes == live + BYTES, name, "%.1f MiB charged without the other one",
                       gt_mib(status().live_bytes) - gt_mib(live));
                unmap(p);
                FIGURE(status().live_bytes == live + BYTES, name, "%.1f MiB charged for the import alone",
                       gt_mib(status().live_bytes) - gt_mib(live));
                unmap(q);
                GR_MUST(cuMemRelease(again));
        } else {
                unmap(p);
                unmap(block);
        }
        FIGURE(status().live_bytes == live, name, "%.1f MiB charged when all of it was released",
               gt_mib(status().live_bytes) - gt_mib(live));
}

/* The process's own memory back under whatever handle: in its account once. */
static void own_again(void)
{
        const char *name = "own memory imported";
        CUmemGenericAllocationHandle memory, again;
        size_t live = status().live_bytes;
        CUdeviceptr p, q;
        CUresult result;
        int fd;

        if (create(&memory) != CUDA_SUCCESS)
                return;
        result = cuMemExportToShareableHandle(&fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        printf("%s: exported %d\n", name, (int)result);
        if (result == CUDA_SUCCESS) {
                result = cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd,
                                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
                close(fd);
                printf("%s: imported %d, the same handle %d\n", name, (int)result,
                       result == CUDA_SUCCESS && again == memory);
        }
        if (result == CUDA_SUCCESS) {
                q = map(again); /* while nothing but the handle holds the memory */
                imported(name, 0);
                FIGURE(status().live_bytes == live + BYTES, name, "%.1f MiB charged with the import mapped alone",
                       gt_mib(status().live_bytes) - gt_mib(live));
                p = map(memory);
                FIGURE(status().live_bytes == live + BYTES, name, "%.1f MiB charged",
                       gt_mib(status().live_bytes) - gt_mib(live));
                fill(p, 77);
                printf("%s: %u words wrong through the other mapping\n", name, gt_wrong_words(q, BYTES, 77));
                /* The handle it was created with goes first: what came in by import holds it. */
                unmap(p);
                GR_MUST(cuMemRelease(memory));
                memory = 0;
                GR_MUST(cuMemRelease(again));
                FIGURE(status().live_bytes == live + BYTES, name, "%.1f MiB charged while the import is mapped",
                       gt_mib(status().live_bytes) - gt_mib(live));
                unmap(q);
        }
        if (memory)
                GR_MUST(cuMemRelease(memory));
        FIGURE(status().live_bytes == live, name, "%.1f MiB charged when all of it was released",
               gt_mib(status().live_bytes) - gt_mib(live));
}

/* Held by nothing but a descriptor for a moment, then imported twice: one memory, charged once. */
static void own_by_descriptor(void)
{
        const char *name = "own memory by its descriptor";
        CUmemGenericAllocationHandle memory, handles[2];
        size_t live = status().live_bytes;
        CUdeviceptr mapped[2], twice[2];
        CUresult result;
        int fd, count = 0;

        if (create(&memory) != CUDA_SUCCESS)
                return;
        result = cuMemExportToShareableHandle(&fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        GR_MUST(cuMemRelease(memory));
        printf("%s: exported %d\n", name, (int)result);
        if (result != CUDA_SUCCESS)
                return;
        for (; count < 2; count++) {
                result = cuMemImportFromShareableHandle(&handles[count], (void *)(intptr_t)fd,
                                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
                printf("%s: imported %d\n", name, (int)result);
                if (result != CUDA_SUCCESS)
                        break;
                mapped[count] = map(handles[count]);
                twice[count] = map(handles[count]);
                FIGURE(status().live_bytes == live + BYTES, name, "%.1f MiB charged for %d mappings",
                       gt_mib(status().live_bytes) - gt_mib(live), count + 1);
                imported(name, 0);
        }
        close(fd);
        while (count--) {
                unmap(mapped[count]);
                unmap(twice[count]);
                GR_MUST(cuMemRelease(handles[count]));
        }
        FIGURE(status().live_bytes == live, name, "%.1f MiB charged when all of it was released",
               gt_mib(status().live_bytes) - gt_mib(live));
}

/* Other interfaces' memory. Without one at hand, a descriptor of the other process's mapped memory stands for it. */
static void external(void)
{
        const char *name = "external memory";
        __typeof__(&cuImportExternalMemory) import = GT_OPTIONAL(cuImportExternalMemory);
        __typeof__(&cuExternalMemoryGetMappedBuffer) get = GT_OPTIONAL(cuExternalMemoryGetMappedBuffer);
        __typeof__(&cuDestroyExternalMemory) destroy = GT_OPTIONAL(cuDestroyExternalMemory);
        CUDA_EXTERNAL_MEMORY_HANDLE_DESC descriptor = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .size = BYTES};
        CUDA_EXTERNAL_MEMORY_BUFFER_DESC whole = {.size = BYTES}, half = {.offset = BYTES / 2, .size = BYTES / 2};
        size_t cached, live = status().live_bytes;
        CUexternalMemory memory;
        struct offer offer;
        CUdeviceptr p, q;
        CUresult result;
        int fd;

        if (!import || !get || !destroy || ask(MAPPED, &offer, &fd) != CUDA_SUCCESS) {
                printf("%s: not to be had here\n", name);
                if (import && get && destroy)
                        finish(name, MAPPED, false);
                return;
        }
        descriptor.handle.fd = fd;
        result = import(&memory, &descriptor);
        printf("%s: imported %d\n", name, (int)result);
        if (result != CUDA_SUCCESS) {
                printf("%s: this driver takes no mapped memory for it, so the rest is skipped\n", name);
                close(fd);
                finish(name, MAPPED, false);
                return;
        }
        imported(name, BYTES);
        result = get(&p, memory, &whole);
        printf("%s: a buffer of it %d\n", name, (int)result);
        if (result == CUDA_SUCCESS) {
                answers(name, p);
                printf("%s: %u words wrong here\n", name, gt_wrong_words(p, BYTES, WORDS_THERE));
                fill(p, WORDS_HERE);
                result = get(&q, memory, &half);
                printf("%s: half of it %d\n", name, (int)result);
                imported("two buffers of it", BYTES);
                cached = status().cached_bytes;
                if (result == CUDA_SUCCESS)
                        printf("%s: half freed %d\n", name, (int)cuMemFree(q));
                printf("%s: freed inside %d", name, (int)cuMemFree(p + 4096));
                printf(", freed %d", (int)cuMemFree(p));
                printf(", again %d\n", (int)cuMemFree(p));
                FIGURE(status().cached_bytes == cached, name, "%.1f MiB cached by the frees",
                       gt_mib(status().cached_bytes) - gt_mib(cached));
        }
        FIGURE(status().live_bytes == live, name, "%.1f MiB charged", gt_mib(status().live_bytes) - gt_mib(live));
        printf("%s: destroyed %d\n", name, (int)destroy(memory));
        imported("destroyed", 0);
        finish(name, MAPPED, result == CUDA_SUCCESS);
}

static int dma_buf = -1;

static CUresult nothing(CUdeviceptr p)
{
        (void)p;
        return CUDA_SUCCESS;
}

static CUresult as_dma_buf(CUdeviceptr p)
{
        __typeof__(&cuMemGetHandleForAddressRange) get = GT_OPTIONAL(cuMemGetHandleForAddressRange);

        return get ? get(&dma_buf, p, BYTES, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) : CUDA_ERROR_NOT_FOUND;
}

static CUresult tokens(CUdeviceptr p)
{
        CUDA_POINTER_ATTRIBUTE_P2P_TOKENS found;

        return cuPointerGetAttribute(&found, CU_POINTER_ATTRIBUTE_P2P_TOKENS, p);
}

static CUresult tokens_among_others(CUdeviceptr p)
{
        CUDA_POINTER_ATTRIBUTE_P2P_TOKENS found;
        CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_P2P_TOKENS};
        unsigned type;
        void *data[] = {&type, &found};

        return cuPointerGetAttributes(2, attributes, data, p);
}

static CUresult sync_memops(CUdeviceptr p)
{
        unsigned yes = 1;

        return cuPointerSetAttribute(&yes, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p);
}

/* Blocks that somebody outside may know never come out of the cache again. */
static void outside(void)
{
        static const struct {
                const char *name;
                CUresult (*tell)(CUdeviceptr p);
                bool cached;
        } ways[] = {
                {"told to nobody", nothing, true}, /* so that the others mean something */
                {"dma-buf descriptor", as_dma_buf, false},
                {"P2P tokens", tokens, false},
                {"P2P tokens among others", tokens_among_others, false},
                {"SYNC_MEMOPS", sync_memops, false},
        };

        for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
                uint64_t cached = status().cached_bytes;
                CUdeviceptr p;
                CUresult result;
                int64_t grown;

                GR_MUST(cuMemAlloc(&p, BYTES));
                cached = status().cached_bytes;
                fill(p, 5);
                result = ways[i].tell(p);
                printf("%s: %d\n", ways[i].name, (int)result);
                GR_MUST(cuMemFree(p));
                grown = (int64_t)(status().cached_bytes - cached);
                if (result == CUDA_SUCCESS)
                        FIGURE(ways[i].cached ? grown > 0 : grown <= 0, ways[i].name,
                               "the cache grew by %.1f MiB with its free", (double)grown / (double)MIB);
                else
                        printf("~ %s: not to be had here (%s)\n", ways[i].name, gt_result_name(result));
        }
        if (dma_buf >= 0)
                close(dma_buf);
}

int main(int argc, char **argv)
{
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_status");
        bool exporter = argc == 3 && !strcmp(argv[1], exporter_mode), plain = false;
        int ended = 0;
        CUdeviceptr p;
        pid_t pid = 0;

        if (!exporter)
                GT_OPTIONS(argc, argv, "[--limit=SIZE] [--plain-exporter]", GT_OPTION("limit", limit),
                           GT_OPTION("plain-exporter", plain));
        memcpy(&status_of, &found, sizeof status_of);
        if (!exporter)
                pid = peer_start(argv[0], exporter_mode, plain, &other);
        else
                other = atoi(argv[2]);
        gt_open(&gt);
        GR_MUST(cuMemAlloc(&p, 2 * MIB)); /* there is a status from now on */
        GR_MUST(cuMemFree(p));
        if (exporter)
                return export_for_others();
        hold();
        legacy();
        mapped();
        external();
        let_go();
        own_again();
        own_while_mapped();
        own_by_descriptor();
        outside();
        close(other);
        waitpid(pid, &ended, 0);
        printf("the other process: exit %d\n", WIFEXITED(ended) ? WEXITSTATUS(ended) : -1);
        gt_close(&gt);
        return GR_CHECK_RESULT();
}
