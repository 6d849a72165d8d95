/*
 * Kernels of two processes that wait for each other in memory that both share. A kernel of the first process waits for
 * a word that the second one writes, once a later kernel of the first has written another word. Memory that the first
 * process frees and allocates in between must not put that later kernel behind the one that waits for it: a barrier
 * across all streams would, and both processes would stand still. Natively and under the shim the same lines.
 *
 *   cross_process_kernels [WAY...]     those ways to share memory whose name begins with WAY, or all of them
 *
 * Each way has two processes of its own, as the shim remembers that memory was shared. No kernel waits for longer than
 * some seconds, so that nothing hangs. Exit status 1 when a way stood still.
 */
#include "peer_process.h"
#include "stand_still.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SPIN_US = 20000, LONGEST_US = 5000000 };

static char other_mode[] = "as-other";

/* What both processes know of. */
struct shared {
        bool exported; /* from here */
        CUdeviceptr p;
        CUmemGenericAllocationHandle memory;
        CUmemoryPool pool;
};

struct offer {
        CUresult result;
        CUipcMemHandle handle;
        CUmemPoolPtrExportData pointer;
};

static CUresult export_legacy(struct shared *shared, struct offer *offer, int *ret_fd)
{
        (void)ret_fd;
        GR_MUST(cuMemAlloc(&shared->p, GT_PAGE));
        return cuIpcGetMemHandle(&offer->handle, shared->p);
}

static CUresult open_legacy(struct shared *shared, const struct offer *offer, int fd)
{
        (void)fd;
        return cuIpcOpenMemHandle(&shared->p, offer->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

static void close_legacy(struct shared *shared)
{
        if (shared->exported)
                GR_MUST(cuMemFree(shared->p));
        else
                GR_MUST(cuIpcCloseMemHandle(shared->p));
}

static void map(struct shared *shared)
{
        CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

        GR_MUST(cuMemAddressReserve(&shared->p, GT_PAGE, 0, 0, 0));
        GR_MUST(cuMemMap(shared->p, GT_PAGE, 0, shared->memory, 0));
        GR_MUST(cuMemSetAccess(shared->p, GT_PAGE, &access, 1));
}

static CUresult export_mapped(struct shared *shared, struct offer *offer, int *ret_fd)
{
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
        CUresult result = cuMemCreate(&shared->memory, GT_PAGE, &prop, 0);

        (void)offer;
        if (result != CUDA_SUCCESS)
                return result;
        map(shared);
        return cuMemExportToShareableHandle(ret_fd, shared->memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

static CUresult open_mapped(struct shared *shared, const struct offer *offer, int fd)
{
        CUresult result = cuMemImportFromShareableHandle(&shared->memory, (void *)(intptr_t)fd,
                                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

        (void)offer;
        if (result == CUDA_SUCCESS)
                map(shared);
        return result;
}

static void close_mapped(struct shared *shared)
{
        GR_MUST(cuMemUnmap(shared->p, GT_PAGE));
        GR_MUST(cuMemAddressFree(shared->p, GT_PAGE));
        GR_MUST(cuMemRelease(shared->memory));
}

static CUresult export_pool(struct shared *shared, struct offer *offer, int *ret_fd)
{
        __typeof__(&cuMemPoolExportToShareableHandle) export_all = GT_OPTIONAL(cuMemPoolExportToShareableHandle);
        __typeof__(&cuMemPoolExportPointer) export_one = GT_OPTIONAL(cuMemPoolExportPointer);
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
        CUresult result;

        if (!export_all || !export_one)
                return CUDA_ERROR_NOT_SUPPORTED;
        result = cuMemPoolCreate(&shared->pool, &props);
        if (result == CUDA_SUCCESS)
                result = cuMemAllocFromPoolAsync(&shared->p, GT_PAGE, shared->pool, NULL);
        if (result == CUDA_SUCCESS)
                result = cuCtxSynchronize();
        if (result == CUDA_SUCCESS)
                result = export_all(ret_fd, shared->pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        if (result == CUDA_SUCCESS)
                result = export_one(&offer->pointer, shared->p);
        return result;
}

static CUresult open_pool(struct shared *shared, const struct offer *offer, int fd)
{
        __typeof__(&cuMemPoolImportFromShareableHandle) import_all = GT_OPTIONAL(cuMemPoolImportFromShareableHandle);
        __typeof__(&cuMemPoolImportPointer) import_one = GT_OPTIONAL(cuMemPoolImportPointer);
        CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUmemPoolPtrExportData pointer = offer->pointer;
        CUresult result;

        if (!import_all || !import_one)
                return CUDA_ERROR_NOT_SUPPORTED;
        result = import_all(&shared->pool, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        if (result == CUDA_SUCCESS)
                result = cuMemPoolSetAccess(shared->pool, &access, 1);
        if (result == CUDA_SUCCESS)
                result = import_one(&shared->p, shared->pool, &pointer);
        return result;
}

static void close_pool(struct shared *shared)
{
        GR_MUST(cuMemFree(shared->p));
        GR_MUST(cuMemPoolDestroy(shared->pool));
}

static const struct way {
        const char *name;
        CUresult (*export_it)(struct shared *shared, struct offer *offer, int *ret_fd);
        CUresult (*open_it)(struct shared *shared, const struct offer *offer, int fd);
        void (*close_it)(struct shared *shared);
        bool exports; /* the process that frees and allocates; the other one then opens */
} ways[] = {
        {"IPC handle, exported", export_legacy, open_legacy, close_legacy, true},
        {"IPC handle, opened", export_legacy, open_legacy, close_legacy, false},
        {"mapped, exported", export_mapped, open_mapped, close_mapped, true},
        {"mapped, imported", export_mapped, open_mapped, close_mapped, false},
        {"pool, exported", export_pool, open_pool, close_pool, true},
        {"pool, imported", export_pool, open_pool, close_pool, false},
};
enum { WAYS = sizeof ways / sizeof *ways };

static CUdeviceptr asked(const struct shared *shared)
{
        return shared->p;
}

static CUdeviceptr answered(const struct shared *shared)
{
        return shared->p + 4096;
}

/* One process makes the memory, the other opens it. What did not work, and CUDA_SUCCESS, is the same in both. */
static CUresult share(const struct way *way, bool exports, int other, struct shared *shared)
{
        struct offer offer = {0}, answer;
        int fd = -1, none;

        shared->exported = exports;
        if (exports) {
                offer.result = way->export_it(shared, &offer, &fd);
                if (offer.result == CUDA_SUCCESS) {
                        GR_MUST(cuMemsetD32(shared->p, 0, GT_PAGE / 4));
                        GR_MUST(cuCtxSynchronize());
                }
                peer_send(other, &offer, sizeof offer, fd);
        } else if (!peer_receive(other, &offer, sizeof offer, &fd)) {
                gt_die("cross_process_kernels: the other process is gone");
        } else if (offer.result == CUDA_SUCCESS) {
                offer.result = way->open_it(shared, &offer, fd);
        }
        if (fd >= 0)
                close(fd);
        /* Whether the opening worked, from the one to the other. */
        if (!exports)
                peer_send(other, &offer, sizeof offer, -1);
        else if (!peer_receive(other, &answer, sizeof answer, &none))
                gt_die("cross_process_kernels: the other process is gone");
        return exports ? answer.result : offer.result;
}

/* The other process: its kernels answer once they are asked. */
static int answer(int other)
{
        struct shared shared = {0};
        CUstream stream;
        uint32_t number;
        int none;

        gt_open(&gt);
        if (!peer_receive(other, &number, sizeof number, &none) || number >= WAYS)
                return EXIT_FAILURE;
        stream = gt_stream();
        if (share(&ways[number], !ways[number].exports, other, &shared) == CUDA_SUCCESS) {
                GR_MUST(gt_await(&gt, stream, asked(&shared), 1, 2 * LONGEST_US));
                GR_MUST(gt_fill(&gt, stream, answered(&shared), 1, 1));
                if (!peer_receive(other, &number, sizeof number, &none))
                        return EXIT_FAILURE;
                GR_MUST(cuStreamSynchronize(stream));
                ways[number].close_it(&shared);
        }
        gt_close(&gt);
        return EXIT_SUCCESS;
}

static bool goes_round(const struct shared *shared)
{
        CUstream busy = gt_stream(), held = gt_stream();
        bool went_on;

        allocate();
        fill(busy);
        GR_MUST(gt_await(&gt, held, answered(shared), 0, 1)); /* loads the kernel */
        GR_MUST(cuCtxSynchronize());
        GR_MUST(gt_spin(&gt, busy, SPIN_US));
        fill(busy);
        release();
        GR_MUST(gt_await(&gt, held, answered(shared), 1, LONGEST_US));
        allocate();
        fill(busy);
        GR_MUST(gt_fill(&gt, busy, asked(shared), 1, 1));
        went_on = ends(busy) && ends(held);
        GR_MUST(cuCtxSynchronize());
        release();
        GR_MUST(cuStreamDestroy(busy));
        GR_MUST(cuStreamDestroy(held));
        return went_on;
}

static int try_way(char *program, uint32_t number)
{
        const struct way *way = &ways[number];
        struct shared shared = {0};
        bool went_on = true;
        CUresult result;
        int other, ended;
        pid_t pid = peer_start(program, other_mode, false, &other);

        gt_open(&gt);
        peer_send(other, &number, sizeof number, -1);
        result = share(way, way->exports, other, &shared);
        if (result != CUDA_SUCCESS) {
                printf("%s: not to be had here (%s)\n", way->name, gt_result_name(result));
        } else {
                went_on = goes_round(&shared);
                printf("%s: the other stream %s\n", way->name, went_on ? "went on" : "stood still");
                if (!way->exports)
                        way->close_it(&shared);
                peer_send(other, &number, sizeof number, -1);
        }
        waitpid(pid, &ended, 0);
        if (result == CUDA_SUCCESS && way->exports)
                way->close_it(&shared);
        printf("%s: the other process: exit %d\n", way->name, WIFEXITED(ended) ? WEXITSTATUS(ended) : -1);
        gt_close(&gt);
        return went_on ? EXIT_SUCCESS : EXIT_FAILURE;
}

static bool wanted(const char *name, int count, char **prefixes)
{
        for (int i = 0; i < count; i++)
                if (!strncmp(name, prefixes[i], strlen(prefixes[i])))
                        return true;
        return count == 0;
}

int main(int argc, char **argv)
{
        int status = EXIT_SUCCESS, other, ended;

        if (argc == 3 && !strcmp(argv[1], other_mode))
                return answer(atoi(argv[2]));
        for (uint32_t i = 0; argc == 3 && i < WAYS; i++)
                if (!strcmp(argv[1], ways[i].name))
                        return try_way(argv[0], i);
        for (uint32_t i = 0; i < WAYS; i++) {
                char name[32];

                if (!wanted(ways[i].name, argc - 1, argv + 1))
                        continue;
                snprintf(name, sizeof name, "%s", ways[i].name);
                waitpid(peer_start(argv[0], name, false, &other), &ended, 0);
                close(other);
                ended = gt_status(name, ended);
                if (ended == GT_SKIPPED)
                        return GT_SKIPPED;
                if (ended != EXIT_SUCCESS)
                        status = EXIT_FAILURE;
        }
        return status;
}
