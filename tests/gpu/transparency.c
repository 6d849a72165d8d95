/*
 * What a program can see of the allocator besides speed: one "name: code value" line per question. Run it natively and
 * under the shim and compare: the two must be equal. Nothing printed depends on addresses, times or the size of the
 * card.
 */
#include "gputest.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static struct gt gt;

__attribute__((format(printf, 3, 4))) static void say(const char *name, CUresult code, const char *format, ...)
{
        va_list args;

        printf("%s: %d ", name, (int)code);
        va_start(args, format);
        vprintf(format, args);
        va_end(args);
        putchar('\n');
}

static CUdeviceptr block(size_t bytes)
{
        CUdeviceptr p;

        GR_MUST(cuMemAlloc(&p, bytes));
        return p;
}

static void before_init(void)
{
        CUdeviceptr p = 7;
        size_t a = 0, b = 0;
        CUresult code = cuMemAlloc(&p, 4096);

        say("alloc before cuInit", code, "out %s", p == 7 ? "unchanged" : "changed");
        say("free before cuInit", cuMemFree(0), "-");
        say("info before cuInit", cuMemGetInfo(&a, &b), "-");
}

static void odd_requests(void)
{
        static const struct {
                const char *name;
                size_t bytes;
        } sizes[] = {{"alloc 0 B", 0},
                     {"alloc 2^60 B", (size_t)1 << 60},
                     {"alloc the whole address space", SIZE_MAX},
                     {"alloc almost the whole address space", SIZE_MAX - 511}};

        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                CUdeviceptr p = 7;
                CUresult code = cuMemAlloc(&p, sizes[i].bytes);

                /* What a failing call leaves in the result is nobody's promise, but programs do look at it. */
                say(sizes[i].name, code, "out %s", p == 7 ? "unchanged" : p ? "set" : "zero");
        }
        say("alloc to NULL", cuMemAlloc(NULL, 4096), "-");
        say("free after the failures", cuMemFree(block(4096)), "-");
        say("info to NULL", cuMemGetInfo(NULL, NULL), "-");
}

static void odd_frees(void)
{
        static const size_t sizes[] = {4096, MIB, 3 * MIB, 64 * MIB};
        CUdeviceptr p, managed;
        void *pinned, *plain = malloc(4096);

        say("free NULL", cuMemFree(0), "-");
        say("free a malloc pointer", cuMemFree((CUdeviceptr)(uintptr_t)plain), "-");
        free(plain);
        say("free a nonsense pointer", cuMemFree(0x1234), "-");
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                p = block(sizes[i]);
                say("free interior", cuMemFree(p + 512), "%zu B", sizes[i]);
                say("free", cuMemFree(p), "%zu B", sizes[i]);
                say("free twice", cuMemFree(p), "%zu B", sizes[i]);
                say("free interior of freed", cuMemFree(p + 512), "%zu B", sizes[i]);
        }
        GR_MUST(cuMemAllocHost(&pinned, 4096));
        say("cuMemFree of pinned host memory", cuMemFree((CUdeviceptr)(uintptr_t)pinned), "-");
        say("cuMemFreeHost of it then", cuMemFreeHost(pinned), "-");
        GR_MUST(cuMemAllocManaged(&managed, MIB, CU_MEM_ATTACH_GLOBAL));
        say("free managed", cuMemFree(managed), "-");
}

static void ranges(void)
{
        static const size_t sizes[] = {1, 512, 1000, MIB - 1, MIB, MIB + 1, 3 * MIB + 5, 20 * MIB, 33 * MIB + 3};

        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                for (int round = 0; round < 2; round++) {
                        /* The second round asks for a little less, so that a pool hands out the same block again. */
                        size_t asked = sizes[i] - (sizes[i] > 1 ? (size_t)round : 0), bytes = 0;
                        CUdeviceptr p = block(asked), base = 0;
                        CUresult code = cuMemGetAddressRange(&base, &bytes, p);

                        say("range of the base", code, "asked %zu got %zu base %d", asked, bytes, base == p);
                        code = cuMemGetAddressRange(&base, &bytes, p + asked - 1);
                        say("range of the last byte", code, "asked %zu got %zu base %d", asked, bytes, base == p);
                        say("range, size only", cuMemGetAddressRange(NULL, &bytes, p), "%zu", bytes);
                        say("range, base only", cuMemGetAddressRange(&base, NULL, p), "%d", base == p);
                        GR_MUST(cuMemFree(p));
                        say("range of freed", cuMemGetAddressRange(&base, &bytes, p), "asked %zu", asked);
                }
        }
}

static void attribute(const char *when, CUdeviceptr p, CUdeviceptr base)
{
        CUdeviceptr start = 0, device_pointer = 0;
        size_t size = 0;
        unsigned type = 0, managed = 7;
        int ordinal = -7;
        CUcontext ctx = NULL;
        CUresult code;

        code = cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p);
        say("attribute RANGE_START_ADDR", code, "%s %d", when, start == base);
        code = cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p);
        say("attribute RANGE_SIZE", code, "%s %zu", when, size);
        code = cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p);
        say("attribute MEMORY_TYPE", code, "%s %u", when, type);
        code = cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, p);
        say("attribute CONTEXT", code, "%s %d", when, ctx == gt.ctx);
        code = cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p);
        say("attribute DEVICE_ORDINAL", code, "%s %d", when, ordinal);
        code = cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, p);
        say("attribute IS_MANAGED", code, "%s %u", when, managed);
        code = cuPointerGetAttribute(&device_pointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, p);
        say("attribute DEVICE_POINTER", code, "%s %d", when, device_pointer == p);
}

/* The plural call answers for freed pointers too, with empty values instead of an error. */
static void attributes(const char *when, CUdeviceptr p, CUdeviceptr base)
{
        CUpointer_attribute names[] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                       CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_CONTEXT};
        CUdeviceptr start = 7;
        size_t size = 7;
        unsigned type = 7;
        CUcontext ctx = NULL;
        void *values[] = {&start, &size, &type, &ctx};
        CUresult code = cuPointerGetAttributes(4, names, values, p);

        say("attributes", code, "%s start %s size %zu type %u context %s", when,
            start == base ? "base"
            : start       ? "other"
                          : "none",
            size, type,
            ctx == gt.ctx ? "ours"
            : ctx         ? "other"
                          : "none");
}

/* Each allocation has an identity of its own, also where it comes to lie on a freed one. */
static void buffer_ids(void)
{
        enum { TIMES = 8 };
        unsigned long long ids[TIMES] = {0};
        int same = 0;
        CUdeviceptr p;

        for (int i = 0; i < TIMES; i++) {
                p = block(3 * MIB);
                GR_MUST(cuPointerGetAttribute(&ids[i], CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
                GR_MUST(cuMemFree(p));
                for (int k = 0; k < i; k++)
                        same += ids[k] == ids[i];
        }
        say("BUFFER_ID", CUDA_SUCCESS, "%d of %d times one seen before", same, TIMES);
}

static void pointer_attributes(void)
{
        static const size_t sizes[] = {1000, 3 * MIB + 5};
        CUdeviceptr one = block(200000), other = block(200000), large = block(9 * MIB);
        unsigned long long ids[4] = {0};
        CUdeviceptr at[] = {one, other, large, large + 8 * MIB};

        for (int i = 0; i < 4; i++)
                GR_MUST(cuPointerGetAttribute(&ids[i], CU_POINTER_ATTRIBUTE_BUFFER_ID, at[i]));
        say("numbers of blocks", CUDA_SUCCESS, "of two different: %d, in one the same: %d", ids[0] != ids[1],
            ids[2] == ids[3]);
        GR_MUST(cuMemFree(large));
        GR_MUST(cuMemFree(one));
        GR_MUST(cuMemFree(other));

        for (size_t i = 0; i < 2; i++) {
                CUdeviceptr p = block(sizes[i]);
                unsigned yes = 1, now = 0;

                attribute("live", p, p);
                attribute("interior", p + 600, p);
                attributes("live", p, p);
                attributes("interior", p + 600, p);
                say("set SYNC_MEMOPS", cuPointerSetAttribute(&yes, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p), "-");
                GR_MUST(cuMemFree(p));
                attribute("freed", p, p);
                attributes("freed", p, p);
                p = block(sizes[i]);
                say("SYNC_MEMOPS of the next block", cuPointerGetAttribute(&now, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p),
                    "%d", now != 0);
                GR_MUST(cuMemFree(p));
        }
}

static void shapes(void)
{
        static const size_t widths[] = {1, 4, 100, 511, 512, 513, 1000, 1024, 4095, 65537};
        CUdeviceptr p;
        uint64_t seed = 99;
        int misaligned = 0;

        for (size_t i = 0; i < sizeof widths / sizeof widths[0]; i++) {
                size_t pitch = 0, bytes = 0;
                CUresult code = cuMemAllocPitch(&p, &pitch, widths[i], 10, 4);

                say("pitch", code, "width %zu pitch %zu aligned %d", widths[i], pitch, p % 512 == 0);
                code = cuMemGetAddressRange(NULL, &bytes, p);
                say("range of a pitched block", code, "width %zu bytes %zu", widths[i], bytes);
                GR_MUST(cuMemFree(p));
        }
        for (unsigned element = 0; element < 20; element++) {
                size_t pitch = 0;
                CUresult code = cuMemAllocPitch(&p, &pitch, 100, 10, element);

                say("pitch for elements of", code, "%u B: %zu", element, pitch);
                if (code == CUDA_SUCCESS)
                        GR_MUST(cuMemFree(p));
        }
        {
                size_t pitch = 0;

                say("pitch, no width", cuMemAllocPitch(&p, &pitch, 0, 10, 4), "-");
                say("pitch, no height", cuMemAllocPitch(&p, &pitch, 100, 0, 4), "-");
                say("pitch to NULL", cuMemAllocPitch(&p, NULL, 100, 10, 4), "-");
        }
        for (int i = 0; i < 300; i++) {
                p = block(1 + gt_random(&seed) % (4 * MIB));
                misaligned += p % 512 != 0;
                GR_MUST(cuMemFree(p));
        }
        say("blocks not aligned to 512 B", CUDA_SUCCESS, "%d of 300", misaligned);
}

static void amounts(void)
{
        size_t before, after, total, card;
        CUdeviceptr p;

        GR_MUST(cuDeviceTotalMem(&card, gt.device));
        GR_MUST(cuMemGetInfo(&before, &total));
        say("cuDeviceTotalMem", CUDA_SUCCESS, "at least what cuMemGetInfo calls total: %d", card >= total);
        p = block(256 * MIB);
        GR_MUST(cuMemGetInfo(&after, &total));
        say("free memory", CUDA_SUCCESS, "within the total: %d, after 256 MiB less by %zu MiB", after <= total,
            (before - after) / MIB);
        GR_MUST(cuMemFree(p));
        GR_MUST(cuMemGetInfo(&after, &total));
        say("free memory", CUDA_SUCCESS, "after freeing, as before: %d", after == before);
}

struct job {
        bool attach;
        CUdeviceptr p;
        CUresult alloc, release;
};

static void *elsewhere(void *argument)
{
        struct job *job = argument;
        CUdeviceptr p;

        if (job->attach)
                gt_attach(&gt);
        job->alloc = cuMemAlloc(&p, 4096);
        if (job->alloc == CUDA_SUCCESS)
                GR_MUST(cuMemFree(p));
        job->release = cuMemFree(job->p);
        return NULL;
}

static struct job in_thread(bool attach, CUdeviceptr p)
{
        struct job job = {.attach = attach, .p = p};
        pthread_t thread;

        if (pthread_create(&thread, NULL, elsewhere, &job) || pthread_join(thread, NULL))
                gt_die("no thread");
        return job;
}

/* An allocation in whatever context is current, and whether that is the expected one. */
static void where(const char *what, CUcontext expected)
{
        CUcontext owner = NULL;
        CUdeviceptr p = 0;
        CUresult result = cuMemAlloc(&p, 4096);

        if (result == CUDA_SUCCESS) {
                GR_MUST(cuPointerGetAttribute(&owner, CU_POINTER_ATTRIBUTE_CONTEXT, p));
                GR_MUST(cuMemFree(p));
        }
        say(what, result, "in the expected context %d", owner == expected);
}

static void threads_and_contexts(void)
{
        __typeof__(&cuCtxCreate) create = GT_OPTIONAL(cuCtxCreate);
        struct job job = in_thread(true, block(4096));
        CUcontext other, popped;
        CUdeviceptr p, q;
        CUstream stream = gt_stream();

        say("another thread", job.alloc, "allocates, frees ours with %d", (int)job.release);
        job = in_thread(false, block(4096));
        say("another thread without a context", job.alloc, "allocates, frees ours with %d", (int)job.release);

        GR_MUST(cuCtxPopCurrent(&popped));
        where("alloc without a context", NULL);
        GR_MUST(cuCtxPushCurrent(popped));
        where("alloc in the context pushed again", popped);
        GR_MUST(cuCtxSetCurrent(NULL));
        where("alloc with the context set to none", NULL);
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        where("alloc with the context set again", gt.ctx);
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        where("alloc with the same context set", gt.ctx);

        p = block(3 * MIB);
        say("cuMemFreeAsync of a cuMemAlloc block", cuMemFreeAsync(p, stream), "-");
        GR_MUST(cuStreamSynchronize(stream));
        say("cuMemFree of it then", cuMemFree(p), "-");
        GR_MUST(cuMemAllocAsync(&p, 3 * MIB, stream));
        GR_MUST(cuStreamSynchronize(stream));
        say("cuMemFree of a cuMemAllocAsync block", cuMemFree(p), "-");
        GR_MUST(cuStreamDestroy(stream));

        if (!create || create(&other, NULL, 0, gt.device) != CUDA_SUCCESS) {
                say("second context", CUDA_ERROR_NOT_SUPPORTED, "-");
                return;
        }
        where("alloc in a second context", other);
        GR_MUST(cuCtxPushCurrent(gt.ctx));
        where("alloc in the first, pushed above it", gt.ctx);
        GR_MUST(cuCtxPopCurrent(&popped));
        where("alloc in the second below it", other);
        p = block(4096);
        q = block(MIB);
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        where("alloc in the first, set", gt.ctx);
        say("free of another context's block", cuMemFree(p), "-");
        GR_MUST(cuCtxSetCurrent(other));
        p = block(3 * MIB);
        GR_MUST(cuCtxDestroy(other));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        say("free after its context is gone", cuMemFree(p), "-");
        say("free of a small block after its context is gone", cuMemFree(q), "-");
        say("range after its context is gone", cuMemGetAddressRange(NULL, NULL, p), "-");
        p = block(3 * MIB);
        say("alloc and free after that", cuMemFree(p), "-");
}

static void sharing(void)
{
        CUipcMemHandle handle;
        CUdeviceptr p = block(4 * MIB);

        say("cuIpcGetMemHandle", cuIpcGetMemHandle(&handle, p), "-");
        say("free of an exported block", cuMemFree(p), "-");
        say("free of it twice", cuMemFree(p), "-");
        say("cuIpcGetMemHandle of freed", cuIpcGetMemHandle(&handle, p), "-");
}

static CUresult host_handle_of(CUdeviceptr p, size_t bytes)
{
        __typeof__(&cuMemGetHandleForAddressRange) get = GT_OPTIONAL(cuMemGetHandleForAddressRange);
        int fd = -1;
        CUresult code = get ? get(&fd, p, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) : CUDA_ERROR_NOT_SUPPORTED;

        if (fd >= 0)
                close(fd);
        return code;
}

/* What calls for mapped, managed, pooled and host memory say of memory from cuMemAlloc; all of it in whole pages. */
static void other_memory_calls(const char *when, CUdeviceptr p, size_t bytes)
{
        __typeof__(&cuMemRangeGetAttribute) range_get = GT_OPTIONAL(cuMemRangeGetAttribute);
        __typeof__(&cuStreamAttachMemAsync) attach = GT_OPTIONAL(cuStreamAttachMemAsync);
        CUmemLocation where = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = gt.device};
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = where};
        CUmemAccessDesc access = {.location = where, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUmemGenericAllocationHandle made, retained;
        CUmemPoolPtrExportData exported;
        CUstream stream = gt_stream();
        unsigned long long flags = 7;
        CUresult code;
        unsigned value = 0;
        int read_mostly = 0;

        code = cuMemGetAccess(&flags, &where, p);
        say("cuMemGetAccess", code, "%s %zu flags %llu", when, bytes, flags);
        flags = 7;
        code = cuMemGetAccess(&flags, &where, p + 512);
        say("cuMemGetAccess inside", code, "%s %zu flags %llu", when, bytes, flags);
        say("cuMemSetAccess", cuMemSetAccess(p, bytes, &access, 1), "%s %zu", when, bytes);
        say("cuMemSetAccess of a page", cuMemSetAccess(p, GT_PAGE, &access, 1), "%s %zu", when, bytes);
        GR_MUST(cuMemCreate(&made, GT_PAGE, &prop, 0));
        say("cuMemMap", cuMemMap(p, GT_PAGE, 0, made, 0), "%s %zu", when, bytes);
        GR_MUST(cuMemRelease(made));
        say("cuMemUnmap", cuMemUnmap(p, bytes), "%s %zu", when, bytes);
        say("cuMemUnmap of a page", cuMemUnmap(p, GT_PAGE), "%s %zu", when, bytes);
        say("cuMemAddressFree", cuMemAddressFree(p, bytes), "%s %zu", when, bytes);
        say("cuMemRetainAllocationHandle", cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)p), "%s %zu", when,
            bytes);
        say("cuMemAdvise", cuMemAdvise_v2(p, bytes, CU_MEM_ADVISE_SET_READ_MOSTLY, where), "%s %zu", when, bytes);
        say("cuMemPrefetchAsync", cuMemPrefetchAsync_v2(p, bytes, where, 0, stream), "%s %zu", when, bytes);
        say("cuMemRangeGetAttribute",
            range_get ? range_get(&read_mostly, sizeof read_mostly, CU_MEM_RANGE_ATTRIBUTE_READ_MOSTLY, p, bytes)
                      : CUDA_ERROR_NOT_SUPPORTED,
            "%s %zu: %d", when, bytes, read_mostly);
        say("cuStreamAttachMemAsync", attach ? attach(stream, p, 0, CU_MEM_ATTACH_SINGLE) : CUDA_ERROR_NOT_SUPPORTED,
            "%s %zu", when, bytes);
        say("cuMemPoolExportPointer", cuMemPoolExportPointer(&exported, p), "%s %zu", when, bytes);
        say("cuMemHostGetFlags", cuMemHostGetFlags(&value, (void *)(uintptr_t)p), "%s %zu", when, bytes);
        say("cuMemHostUnregister", cuMemHostUnregister((void *)(uintptr_t)p), "%s %zu", when, bytes);
        say("a handle for more than a block", host_handle_of(p, bytes + GT_PAGE), "%s %zu", when, bytes);
        if (strcmp(when, "freed") == 0) /* a live block would be exported for good */
                say("a handle for a block", host_handle_of(p, bytes), "%s %zu", when, bytes);
        GR_MUST(cuStreamDestroy(stream));
}

/* All attributes of a pointer whose answers no other part asks for. Few of the answers for blocks are documented. */
static void other_attributes(const char *when, CUdeviceptr p, CUdeviceptr base)
{
        static const struct {
                const char *name;
                int attribute; /* by number, as older headers lack some */
                bool address;
        } asked[] = {{"HOST_POINTER", 4, true},
                     {"SYNC_MEMOPS", 6, false},
                     {"IS_LEGACY_CUDA_IPC_CAPABLE", 10, false},
                     {"MAPPED", 13, false},
                     {"ALLOWED_HANDLE_TYPES", 14, false},
                     {"IS_GPU_DIRECT_RDMA_CAPABLE", 15, false},
                     {"ACCESS_FLAGS", 16, false},
                     {"MEMPOOL_HANDLE", 17, true},
                     {"~ MAPPING_SIZE", 18, false},
                     {"~ MAPPING_BASE_ADDR", 19, true},
                     {"~ IS_HW_DECOMPRESS_CAPABLE", 21, false}};

        for (size_t i = 0; i < sizeof asked / sizeof asked[0]; i++) {
                CUpointer_attribute attribute = (CUpointer_attribute)asked[i].attribute;
                unsigned long long one = 0, several = 0;
                void *values[] = {&several};
                CUresult code = cuPointerGetAttribute(&one, attribute, p),
                         plural = cuPointerGetAttributes(1, &attribute, values, p);

                if (asked[i].address)
                        say(asked[i].name, code, "%s %s, of several %d %s", when,
                            !one          ? "none"
                            : one == base ? "base"
                                          : "other",
                            (int)plural,
                            !several          ? "none"
                            : several == base ? "base"
                                              : "other");
                else
                        say(asked[i].name, code, "%s %llu, of several %d %llu", when, one, (int)plural, several);
        }
}

static void as_other_memory(void)
{
        static const size_t sizes[] = {4096, 4 * MIB, 64 * MIB};
        CUpointer_attribute block_id = (CUpointer_attribute)20; /* CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID */
        CUdeviceptr one = block(4 * MIB), other = block(4 * MIB);
        unsigned long long id = 0, id_of_other = 0;
        CUresult code = cuPointerGetAttribute(&id, block_id, one);

        say("~ MEMORY_BLOCK_ID of two blocks", code, "%d: the same: %d",
            (int)cuPointerGetAttribute(&id_of_other, block_id, other), id == id_of_other);
        GR_MUST(cuMemFree(other));
        GR_MUST(cuMemFree(one));
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
                size_t pages = sizes[i] < GT_PAGE ? GT_PAGE : sizes[i];
                CUdeviceptr p = block(sizes[i]);

                other_memory_calls("live", p, pages);
                other_attributes("live", p, p);
                other_attributes("interior", p + 512, p);
                GR_MUST(cuMemsetD8(p, 1, sizes[i])); /* none of this took the memory away */
                GR_MUST(cuCtxSynchronize());
                GR_MUST(cuMemFree(p));
                other_memory_calls("freed", p, pages);
                other_attributes("freed", p, p);
        }
}

/* No size makes a freed block, or what stood around it, reserved addresses that the program could give back. */
static void reserved_addresses(void)
{
        CUdeviceptr p = block(4 * MIB), q;
        size_t total, freed = 0;

        GR_MUST(cuDeviceTotalMem(&total, gt.device));
        GR_MUST(cuMemFree(p));
        say("alloc more than the card", cuMemAlloc(&q, total + 1), "-"); /* nothing is left in a cache */
        for (size_t bytes = GT_PAGE; bytes <= 4 * total; bytes += GT_PAGE)
                freed += cuMemAddressFree(p, bytes) == CUDA_SUCCESS;
        say("cuMemAddressFree of any size", CUDA_SUCCESS, "%zu times", freed);
}

static void exits(void)
{
        CUdeviceptr held = block(4096);
        CUdeviceptr p = 0;
        int status = 0;
        pid_t child;

        fflush(stdout);
        child = fork();
        if (child == 0) {
                /* A child has no CUDA; what it must do is get an answer and leave by the ordinary door. */
                alarm(20);
                if (cuMemAlloc(&p, 4096) == CUDA_SUCCESS)
                        exit(1);
                if (cuMemFree(held) == CUDA_SUCCESS)
                        exit(2);
                exit(0);
        }
        if (child < 0 || waitpid(child, &status, 0) != child)
                gt_die("no child");
        say("forked child", CUDA_SUCCESS, "exit %d signal %d", WIFEXITED(status) ? WEXITSTATUS(status) : -1,
            WIFSIGNALED(status) ? WTERMSIG(status) : 0);
        say("free in the parent after it", cuMemFree(held), "-");

        p = block(3 * MIB);
        say("primary context reset", cuDevicePrimaryCtxReset(gt.device), "-");
        say("free after the reset", cuMemFree(p), "-");
        where("alloc in a context that was reset", gt.ctx);
        GR_MUST(cuDevicePrimaryCtxRetain(&gt.ctx, gt.device));
        GR_MUST(cuCtxSetCurrent(gt.ctx));
        p = block(3 * MIB);
        say("alloc and free after the reset", cuMemFree(p), "-");
        say("primary context release", cuDevicePrimaryCtxRelease(gt.device), "-");
}

int main(void)
{
        setvbuf(stdout, NULL, _IOLBF, 0);
        before_init();
        gt_open(&gt);
        reserved_addresses();
        odd_requests();
        odd_frees();
        ranges();
        pointer_attributes();
        buffer_ids();
        shapes();
        amounts();
        threads_and_contexts();
        sharing();
        as_other_memory();
        exits();
        return 0;
}
