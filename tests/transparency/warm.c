/*
 * libgpureclaim-warm.so, for tests only: the library's own objects, and a start in which its pool is full already. A
 * program that is compared with its native run shows little where no request of its own comes from the cache; here, as
 * soon as a context is known, the pool gets blocks of many sizes that were written to and freed, so that it serves the
 * program's first requests, with memory that is not zero.
 *
 * GR_TEST_WARM=dirty does something else, as a control: nothing is put into the pool, but what the driver hands out is
 * written to before the program has it. A program that differs then as well, with GPURECLAIM_POOL=none, leans on fresh
 * memory being zero, which CUDA does not promise. GR_TEST_WARM_MIB=N bounds what a context's pool gets.
 *
 * Calls of the library are wrapped by the linker. The program must not notice: no context becomes or stays current, no
 * work is put on the program's streams, nothing is done while a capture is on, errno is kept, and what was taken from
 * the driver for the start does not count among the program's requests.
 */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "driver/operations.h"
#include "driver/real.h"
#include "hooks/context.h"
#include "hooks/query.h"

#define PATTERN    0x7ff8deadu /* not a number, as float and as double; a large one as an integer */
#define MOST_BYTES (UINT64_C(2) << 30)
#define PART       16         /* of what is free */
#define WAIT_NS    1000000000 /* for the pattern: a kernel that runs on may have all of the card */
#define BLOCKS_MAX 1024

struct gr_context *__real_gr_core_context_add(struct gr_core *core, void *handle, int device);
struct gr_context *__wrap_gr_core_context_add(struct gr_core *core, void *handle, int device);
void __real_gr_operations_init(const struct gr_operations_callbacks *callbacks);
void __wrap_gr_operations_init(const struct gr_operations_callbacks *callbacks);
int __real_gr_pool_alloc_by(struct gr_context *context, size_t expected_bytes, gr_source_allocate *allocate, void *arg,
                            uint64_t *ret_ptr);
int __wrap_gr_pool_alloc_by(struct gr_context *context, size_t expected_bytes, gr_source_allocate *allocate, void *arg,
                            uint64_t *ret_ptr);

static int (*real_mem_alloc)(void *context, size_t bytes, uint64_t *ret_ptr);

static bool control(void)
{
        const char *word = getenv("GR_TEST_WARM");

        return word && strcmp(word, "dirty") == 0;
}

static uint64_t most_bytes(void)
{
        const char *mib = getenv("GR_TEST_WARM_MIB");

        return mib ? strtoull(mib, NULL, 10) << 20 : MOST_BYTES;
}

/* The driver's function of this name; the list of hooks has not all that is needed here. */
static void *driver_function(const char *name)
{
        CUdriverProcAddressQueryResult found;
        void *function = NULL;

        if (gr_real.cuGetProcAddress_v2)
                gr_real.cuGetProcAddress_v2(name, &function, 12000, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &found);
        return function;
}

/* The pattern into so many blocks, by a stream of our own; whether it is there. The context is current. */
static bool fill(const uint64_t *ptrs, const size_t *bytes, size_t count)
{
        __typeof__(cuMemsetD32Async) *set = driver_function("cuMemsetD32Async");
        __typeof__(cuStreamQuery) *query = driver_function("cuStreamQuery");
        uint64_t until_ns = gr_driver.now_ns() + WAIT_NS;
        CUresult result = CUDA_SUCCESS;
        CUstream stream;

        if (!set || !query || gr_real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
                return false;
        for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
                result = set(ptrs[i], PATTERN, bytes[i] / 4, stream);
        while (result == CUDA_SUCCESS && (result = query(stream)) == CUDA_ERROR_NOT_READY &&
               gr_driver.now_ns() < until_ns) {
                gr_driver.sleep_ns(20000);
                result = CUDA_SUCCESS;
        }
        gr_real.cuStreamDestroy_v2(stream); /* what is left of its work is done all the same */
        return result == CUDA_SUCCESS;
}

/* Takes a block of each class in turn while room lasts, and then again: most often of the small ones. */
static size_t take(struct gr_context *context, uint64_t room_bytes, uint64_t *ptrs, size_t *bytes)
{
        static const struct {
                unsigned first, end, times;
        } passes[] = {{0, GR_CLASS_SMALL, 8},
                      {GR_CLASS_SMALL, GR_CLASS_EXACT, 2},
                      {GR_CLASS_EXACT, GR_CLASS_EXACT + 8, 1},       /* to 64 MiB */
                      {GR_CLASS_EXACT + 8, GR_CLASS_EXACT + 40, 1}}; /* to 1 GiB */
        const size_t pass_count = sizeof(passes) / sizeof(passes[0]);
        size_t count = 0;

        for (size_t turn = 0; turn < passes[0].times; turn++) {
                for (size_t pass = 0; pass < pass_count && turn < passes[pass].times; pass++) {
                        /* Of the largest only one in eight, where a doubling ends. */
                        unsigned step = passes[pass].first > GR_CLASS_EXACT ? 8 : 1;

                        for (unsigned class = passes[pass].first + step - 1; class < passes[pass].end; class += step) {
                                size_t size = gr_class_bytes(class);

                                if (gr_footprint_bytes(size) > room_bytes || count == BLOCKS_MAX)
                                        break;
                                if (gr_pool_alloc(context, size, &ptrs[count]))
                                        return count;
                                room_bytes -= gr_footprint_bytes(size);
                                bytes[count++] = size;
                        }
                }
        }
        return count;
}

/* Requests that the context's pool served. Nobody else uses the context yet. */
static uint64_t served(struct gr_context *context)
{
        uint64_t sum = context->segments->hits;

        for (unsigned i = 0; i < GR_SHARDS; i++) {
                struct gr_arena *arena = gr_arena_at(context, i);

                sum += arena ? arena->fastbins.hits : 0;
                for (size_t class = 0; arena && class < GR_CLASS_COUNT; class ++)
                        sum += arena->bins[class].hits;
        }
        return sum;
}

/* The context is current, and no capture is on. */
static void warm(struct gr_context *context)
{
        _Atomic uint64_t *taken = &context->core->counters.counts[GR_COUNTER_fresh_allocs];
        uint64_t before = atomic_load(taken), hits = served(context), free_bytes, total_bytes, room_bytes, charged,
                 hard;
        uint64_t *ptrs = malloc(BLOCKS_MAX * sizeof(*ptrs));
        size_t *bytes = malloc(BLOCKS_MAX * sizeof(*bytes));
        size_t count = 0;

        if (ptrs && bytes && gr_driver.mem_info(context->handle, &free_bytes, &total_bytes) == 0) {
                charged = atomic_load(&context->device->reserved_bytes);
                hard = atomic_load(&context->device->hard_bytes);
                room_bytes = gr_min(free_bytes, hard > charged ? hard - charged : 0) / PART;
                count = take(context, gr_min(room_bytes, most_bytes()), ptrs, bytes);
                fill(ptrs, bytes, count);
        }
        for (size_t i = 0; i < count; i++)
                gr_pool_free(context->core, ptrs[i]);
        gr_fence_close(context->fence);
        gr_fence_wait_oldest(context->fence, gr_driver.now_ns() + WAIT_NS / 10);
        atomic_fetch_sub(taken, atomic_load(taken) - before);
        gr_lock(&context->segments->lock);
        context->segments->hits -= served(context) - hits;
        gr_unlock(&context->segments->lock);
        free(ptrs);
        free(bytes);
}

/* Calls what needs the context current and captures undisturbed. */
static void enter_and_warm(struct gr_context *context, CUcontext handle)
{
        CUstreamCaptureMode mode;

        if (gr_gate_is_open(&context->core->gate) || gr_real.cuCtxPushCurrent_v2(handle) != CUDA_SUCCESS)
                return;
        mode = gr_operations_relax_captures();
        warm(context);
        gr_operations_restore_captures(mode);
        gr_real.cuCtxPopCurrent_v2(&handle);
        gr_thread.current_version = 0;
}

struct gr_context *__wrap_gr_core_context_add(struct gr_core *core, void *handle, int device)
{
        static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
        struct gr_context *context;
        int saved_errno = errno;
        bool known;

        pthread_mutex_lock(&lock); /* one thread finds it new */
        known = gr_context_find(core, handle) != NULL;
        context = __real_gr_core_context_add(core, handle, device);
        pthread_mutex_unlock(&lock);
        if (context && !known && core->config.pool != GR_POOL_NONE && !control())
                enter_and_warm(context, handle);
        errno = saved_errno;
        return context;
}

static void dirty(uint64_t ptr, size_t bytes)
{
        int saved_errno = errno;
        CUstreamCaptureMode mode;

        if (!gr_gate_is_open(&gr_core.gate)) {
                mode = gr_operations_relax_captures();
                fill(&ptr, &bytes, 1);
                gr_operations_restore_captures(mode);
        }
        errno = saved_errno;
}

static int dirty_mem_alloc(void *context, size_t bytes, uint64_t *ret_ptr)
{
        int rc = real_mem_alloc(context, bytes, ret_ptr);

        if (!rc)
                dirty(*ret_ptr, bytes);
        return rc;
}

void __wrap_gr_operations_init(const struct gr_operations_callbacks *callbacks)
{
        __real_gr_operations_init(callbacks);
        real_mem_alloc = gr_driver.mem_alloc;
        if (control())
                gr_driver.mem_alloc = dirty_mem_alloc;
}

/* What another call of the driver's sized: pitched memory, the first time. */
int __wrap_gr_pool_alloc_by(struct gr_context *context, size_t expected_bytes, gr_source_allocate *allocate, void *arg,
                            uint64_t *ret_ptr)
{
        int rc = __real_gr_pool_alloc_by(context, expected_bytes, allocate, arg, ret_ptr);
        struct gr_block_info info;
        CUdeviceptr base;

        if (!rc && control() && gr_query_block_at(*ret_ptr, &base, &info) == 0)
                dirty(base, info.requested_bytes);
        return rc;
}
