/*
 * Facts about the driver that the library leans on, asked of the driver itself: one "name: value" line each.
 * To be run natively. It checks nothing; a surprising line is a reason to look at the design again.
 */
#include "gputest.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BLOCKS = 2000, SPIN_US = 20000 };

static struct gt gt;

static size_t used_bytes(void)
{
        size_t available, total;

        GT_MUST(cuMemGetInfo(&available, &total));
        return total - available;
}

struct block {
        CUdeviceptr at;
        size_t bytes;
};

static int by_address(const void *a, const void *b)
{
        const struct block *x = a, *y = b;

        return (x->at > y->at) - (x->at < y->at);
}

/* How many 2 MiB pages the blocks that are still there touch; *RET_CROSSING counts blocks that lie on two. */
static size_t distinct_pages(const struct block *blocks, size_t count, size_t *ret_crossing)
{
        struct block sorted[BLOCKS];
        CUdeviceptr last = 0;
        size_t n = 0, pages = 0;

        *ret_crossing = 0;
        for (size_t i = 0; i < count; i++)
                if (blocks[i].at)
                        sorted[n++] = blocks[i];
        qsort(sorted, n, sizeof sorted[0], by_address);
        for (size_t i = 0; i < n; i++) {
                CUdeviceptr first = sorted[i].at >> 21, end = (sorted[i].at + sorted[i].bytes - 1) >> 21;

                *ret_crossing += end != first;
                for (CUdeviceptr page = first; page <= end; page++) {
                        pages += page != last;
                        last = page;
                }
        }
        return pages;
}

/* Does use follow the set of distinct pages under small blocks, both ways? */
static void slabs(void)
{
        static struct block blocks[BLOCKS];
        uint64_t seed = 12345;
        size_t before = used_bytes(), crossing, pages, most_over = 0, most_under = 0, steps = 0;

        for (size_t i = 0; i < BLOCKS; i++) {
                blocks[i].bytes = 1 + gt_random(&seed) % (size_t)(i % 2 ? GT_MIB : 16 * GT_KIB);
                GT_MUST(cuMemAlloc(&blocks[i].at, blocks[i].bytes));
                if (i % 250 == 249) {
                        pages = distinct_pages(blocks, BLOCKS, &crossing);
                        printf("slab: %zu small blocks, pages touched: %zu, pages used: %.2f, blocks on two pages: "
                               "%zu\n",
                               i + 1, pages, (double)(used_bytes() - before) / (double)GT_PAGE, crossing);
                }
        }
        for (size_t left = BLOCKS; left > 0; left--) {
                size_t i = gt_random(&seed) % BLOCKS, used;

                while (!blocks[i].at)
                        i = (i + 1) % BLOCKS;
                GT_MUST(cuMemFree(blocks[i].at));
                blocks[i].at = 0;
                if (left % 20 != 1)
                        continue;
                steps++;
                pages = distinct_pages(blocks, BLOCKS, &crossing);
                used = used_bytes() > before ? (used_bytes() - before) / GT_PAGE : 0;
                if (used > pages && used - pages > most_over)
                        most_over = used - pages;
                if (pages > used && pages - used > most_under)
                        most_under = pages - used;
        }
        printf("slab: while freeing in random order, looked at %zu times, most pages used beyond those touched: %zu\n",
               steps, most_over);
        printf("slab: most pages touched beyond those used: %zu\n", most_under);
        printf("slab: used after the last free, relative to before: %.2f pages\n",
               ((double)used_bytes() - (double)before) / (double)GT_PAGE);
}

static void busy(CUstream stream)
{
        GT_MUST(gt_spin(&gt, stream, SPIN_US));
}

/* Prints how long CALL made the host wait and whether STREAM was still at work afterwards. */
#define TIMED(name, stream, call)                                                                                      \
        do {                                                                                                           \
                double begin_ = gt_now_us();                                                                           \
                CUresult result_ = (call);                                                                             \
                double took_ = gt_now_us() - begin_;                                                                   \
                printf("%s: result %d, %.0f us, the other stream still busy: %s\n", name, (int)result_, took_,         \
                       cuStreamQuery(stream) == CUDA_ERROR_NOT_READY ? "yes" : "no");                                  \
        } while (0)

/* Does an event recorded for RECORDED cover work on STREAM? */
static void recorded_covers(const char *name, CUcontext recorded, CUstream stream)
{
        __typeof__(&cuCtxRecordEvent) record = GT_OPTIONAL(cuCtxRecordEvent);
        CUevent event;
        CUresult result, query;

        if (!record) {
                printf("%s: no cuCtxRecordEvent\n", name);
                return;
        }
        GT_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        busy(stream);
        result = record(recorded, event);
        query = cuEventQuery(event);
        printf("%s: record %d, covers the stream: %s\n", name, (int)result,
               query == CUDA_ERROR_NOT_READY ? "yes" : "no");
        GT_MUST(cuCtxSynchronize());
        GT_MUST(cuStreamSynchronize(stream));
        GT_MUST(cuEventDestroy(event));
}

/* Does a wait laid on WAITING hold back later work on STREAM? */
static void wait_holds(const char *name, CUcontext waiting, CUstream stream)
{
        __typeof__(&cuCtxRecordEvent) record = GT_OPTIONAL(cuCtxRecordEvent);
        __typeof__(&cuCtxWaitEvent) wait = GT_OPTIONAL(cuCtxWaitEvent);
        CUstream slow = gt_stream();
        CUevent event;
        CUresult recorded, waited;
        double begin;

        if (!record || !wait) {
                printf("%s: no cuCtxWaitEvent\n", name);
                return;
        }
        GT_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        busy(slow);
        recorded = record(gt.ctx, event);
        waited = wait(waiting, event);
        begin = gt_now_us();
        GT_MUST(gt_spin(&gt, stream, 1));
        GT_MUST(cuStreamSynchronize(stream));
        printf("%s: record %d, wait %d, later work held back: %s\n", name, (int)recorded, (int)waited,
               gt_now_us() - begin > SPIN_US / 2.0 ? "yes" : "no");
        GT_MUST(cuCtxSynchronize());
        GT_MUST(cuEventDestroy(event));
        GT_MUST(cuStreamDestroy(slow));
}

static void green(void)
{
        __typeof__(&cuDeviceGetDevResource) resource = GT_OPTIONAL(cuDeviceGetDevResource);
        __typeof__(&cuDevSmResourceSplitByCount) split = GT_OPTIONAL(cuDevSmResourceSplitByCount);
        __typeof__(&cuDevResourceGenerateDesc) describe = GT_OPTIONAL(cuDevResourceGenerateDesc);
        __typeof__(&cuGreenCtxCreate) create = GT_OPTIONAL(cuGreenCtxCreate);
        __typeof__(&cuGreenCtxStreamCreate) stream_create = GT_OPTIONAL(cuGreenCtxStreamCreate);
        __typeof__(&cuCtxFromGreenCtx) from_green = GT_OPTIONAL(cuCtxFromGreenCtx);
        CUdevResource all, part;
        CUdevResourceDesc description;
        CUgreenCtx context;
        CUcontext as_context;
        CUstream stream;
        CUdeviceptr p;
        unsigned groups = 1;

        if (!resource || !split || !describe || !create || !stream_create || !from_green ||
            resource(gt.device, &all, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS) {
                printf("green context: not available\n");
                return;
        }
        GT_MUST(split(&part, &groups, &all, NULL, 0, 16));
        GT_MUST(describe(&description, &part, 1));
        GT_MUST(create(&context, description, gt.device, CU_GREEN_CTX_DEFAULT_STREAM));
        GT_MUST(stream_create(&stream, context, CU_STREAM_NON_BLOCKING, 0));
        GT_MUST(from_green(&as_context, context));
        GT_MUST(gt_spin(&gt, stream, 1));
        GT_MUST(cuStreamSynchronize(stream));

        recorded_covers("green context: cuCtxRecordEvent on the primary context", gt.ctx, stream);
        recorded_covers("green context: cuCtxRecordEvent on the green context", as_context, stream);
        wait_holds("green context: cuCtxWaitEvent on the primary context", gt.ctx, stream);
        wait_holds("green context: cuCtxWaitEvent on the green context", as_context, stream);
        GT_MUST(cuMemAlloc(&p, 4 * GT_MIB));
        busy(stream);
        TIMED("green context: cuMemFree of the primary context's block while a green stream works", stream,
              cuMemFree(p));
        GT_MUST(cuStreamSynchronize(stream));
}

/* A second, ordinary context of the same device. */
static void second_context(void)
{
        __typeof__(&cuCtxCreate) create = GT_OPTIONAL(cuCtxCreate);
        CUcontext other;
        CUstream stream;
        CUdeviceptr p, theirs;

        if (!create || create(&other, NULL, 0, gt.device) != CUDA_SUCCESS) {
                printf("second context: not available\n");
                return;
        }
        stream = gt_stream();
        GT_MUST(cuMemAlloc(&theirs, 64 * GT_MIB));
        GT_MUST(cuCtxSetCurrent(gt.ctx));
        GT_MUST(cuMemAlloc(&p, 64 * GT_MIB));
        GT_MUST(cuCtxSetCurrent(other));
        /* Copies need no module in the second context: enough of them keep its stream busy for a while. */
        for (int i = 0; i < 2000; i++)
                GT_MUST(cuMemcpyDtoDAsync(theirs, theirs + 32 * GT_MIB, 32 * GT_MIB, stream));
        GT_MUST(cuCtxSetCurrent(gt.ctx));
        TIMED("second context: cuMemFree of the primary context's block while the other context works", stream,
              cuMemFree(p));
        GT_MUST(cuStreamSynchronize(stream));
        GT_MUST(cuCtxDestroy(other));
        GT_MUST(cuCtxSetCurrent(gt.ctx));
}

/* Is the path that gives memory back without a stall held up by a barrier that was laid before? */
static void give_back(void)
{
        __typeof__(&cuCtxRecordEvent) record = GT_OPTIONAL(cuCtxRecordEvent);
        __typeof__(&cuCtxWaitEvent) wait = GT_OPTIONAL(cuCtxWaitEvent);
        CUstream slow = gt_stream(), private = gt_stream();
        CUdeviceptr p[3];
        CUevent event;
        size_t used;

        for (int i = 0; i < 3; i++)
                GT_MUST(cuMemAlloc(&p[i], 64 * GT_MIB));
        busy(slow);
        GT_MUST(cuMemFreeAsync(p[0], private));
        TIMED("give back: first cuMemFreeAsync and synchronise, kernel running", slow, cuStreamSynchronize(private));
        GT_MUST(cuCtxSynchronize());
        busy(slow);
        used = used_bytes();
        GT_MUST(cuMemFreeAsync(p[1], private));
        TIMED("give back: second cuMemFreeAsync and synchronise, kernel running", slow, cuStreamSynchronize(private));
        printf("give back: returned meanwhile: %.1f MiB\n", ((double)used - (double)used_bytes()) / (double)GT_MIB);
        GT_MUST(cuCtxSynchronize());
        if (!record || !wait)
                return;
        GT_MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        busy(slow);
        GT_MUST(record(gt.ctx, event));
        GT_MUST(wait(gt.ctx, event));
        GT_MUST(cuMemFreeAsync(p[2], private));
        TIMED("give back: the same behind a barrier", slow, cuStreamSynchronize(private));
        GT_MUST(cuCtxSynchronize());
}

static CUstream private_stream;
static CUdeviceptr spare;
static CUevent passed;

/* What a helper thread may do while another thread captures: each must leave the capture whole. */
static void *meddle(void *step)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        CUresult result = CUDA_SUCCESS;

        gt_attach(&gt);
        GT_MUST(cuThreadExchangeStreamCaptureMode(&mode));
        switch (*(int *)step) {
        case 0:
                result = cuEventQuery(passed);
                break;
        case 1:
                result = cuMemFreeAsync(spare, private_stream);
                break;
        case 2:
                result = cuStreamSynchronize(private_stream);
                break;
        case 3:
                result = cuMemAlloc(&spare, 4 * GT_MIB);
                break;
        default:
                result = cuMemFree(spare);
        }
        *(int *)step = (int)result;
        return NULL;
}

static void beside_a_capture(void)
{
        static const char *const steps[] = {"cuEventQuery", "cuMemFreeAsync", "cuStreamSynchronize", "cuMemAlloc",
                                            "cuMemFree"};
        CUstream stream = gt_stream();

        private_stream = gt_stream();
        GT_MUST(cuMemAlloc(&spare, 4 * GT_MIB));
        GT_MUST(cuEventCreate(&passed, CU_EVENT_DISABLE_TIMING));
        GT_MUST(cuEventRecord(passed, private_stream));
        GT_MUST(cuCtxSynchronize());
        for (int i = 0; i < 5; i++) {
                pthread_t thread;
                CUgraph graph = NULL;
                CUresult end;
                int step = i;

                GT_MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
                GT_MUST(gt_spin(&gt, stream, 1));
                if (pthread_create(&thread, NULL, meddle, &step) || pthread_join(thread, NULL))
                        gt_die("no thread");
                end = cuStreamEndCapture(stream, &graph);
                printf("beside a global capture, relaxed thread: %s returned %d, the capture ended with %d\n", steps[i],
                       step, (int)end);
                if (graph)
                        GT_MUST(cuGraphDestroy(graph));
        }
}

static void describe(const char *what, int fd)
{
        char link[32], target[128];
        struct stat st;
        ssize_t length;

        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        length = readlink(link, target, sizeof target);
        if (length < 0 || fstat(fd, &st) != 0)
                return;
        printf("descriptor of %s: %.*s, mode %o, inode %ju on device %ju, owner %d\n", what, (int)length, target,
               st.st_mode, (uintmax_t)st.st_ino, (uintmax_t)st.st_dev, fcntl(fd, F_GETOWN));
}

static CUdeviceptr map(CUmemGenericAllocationHandle memory)
{
        CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUdeviceptr p;

        GT_MUST(cuMemAddressReserve(&p, 4 * GT_MIB, 0, 0, 0));
        GT_MUST(cuMemMap(p, 4 * GT_MIB, 0, memory, 0));
        GT_MUST(cuMemSetAccess(p, 4 * GT_MIB, &access, 1));
        return p;
}

static unsigned long long buffer_id(CUdeviceptr p)
{
        unsigned long long id = 0;

        GT_MUST(cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
        return id;
}

/* By what a process could know its own exported memory again, besides a mark on the descriptor. */
static void descriptors(void)
{
        static const char *const names[2] = {"mapped memory", "other mapped memory"};
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device}};
        __typeof__(&cuMemGetHandleForAddressRange) get = GT_OPTIONAL(cuMemGetHandleForAddressRange);
        CUmemGenericAllocationHandle memory[2], again;
        CUdeviceptr mapped, imported, p;
        int fd[2] = {-1, -1}, dma_buf = -1;

        for (int i = 0; i < 2; i++) {
                CUresult result = cuMemCreate(&memory[i], 4 * GT_MIB, &prop, 0);

                if (result == CUDA_SUCCESS)
                        result = cuMemExportToShareableHandle(&fd[i], memory[i],
                                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
                if (result != CUDA_SUCCESS) {
                        printf("descriptors: none (%s)\n", gt_result_name(result));
                        return;
                }
                describe(names[i], fd[i]);
        }
        if (cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd[0], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) ==
            CUDA_SUCCESS) {
                mapped = map(memory[0]);
                imported = map(again);
                printf("own memory imported: handle %s, buffer %s\n", again == memory[0] ? "the same" : "another",
                       buffer_id(mapped) == buffer_id(imported) ? "the same" : "another");
                GT_MUST(cuMemUnmap(mapped, 4 * GT_MIB));
                GT_MUST(cuMemUnmap(imported, 4 * GT_MIB));
                GT_MUST(cuMemAddressFree(mapped, 4 * GT_MIB));
                GT_MUST(cuMemAddressFree(imported, 4 * GT_MIB));
                GT_MUST(cuMemRelease(again));
        }
        for (int i = 0; i < 2; i++) {
                close(fd[i]);
                GT_MUST(cuMemRelease(memory[i]));
        }
        GT_MUST(cuMemAlloc(&p, 4 * GT_MIB));
        if (get && get(&dma_buf, p, 4 * GT_MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) == CUDA_SUCCESS) {
                describe("cuMemAlloc, dma-buf", dma_buf);
                close(dma_buf);
        }
        GT_MUST(cuMemFree(p));
}

int main(void)
{
        int version = 0;
        char name[128];

        gt_open(&gt);
        GT_MUST(cuDriverGetVersion(&version));
        GT_MUST(cuDeviceGetName(name, sizeof name, gt.device));
        printf("device: %s\n", name);
        printf("driver: %d\n", version);
        printf("footprint: %s\n", gt_footprint_source(&gt));
        printf("context: %.1f MiB\n", (double)gt.context_bytes / (double)GT_MIB);
        slabs();
        green();
        second_context();
        give_back();
        beside_a_capture();
        descriptors();
        gt_close(&gt);
        return 0;
}
