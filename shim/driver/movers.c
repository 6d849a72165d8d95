#include "driver/movers.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/log.h"
#include "driver/mapped_memory.h"
#include "driver/real.h"
#include "system/host_memory.h"
#include "system/mapped_file.h"
#include "system/workers.h"

#define MOVERS_MAX   14 /* threads that copy; that many nearly fill the link (docs/measurements.md, sleep-copies) */
#define BUFFER_BYTES ((size_t)8 << 20) /* of pinned memory; each mover has two, one of which is in flight */
#define MOVERS_NS    UINT64_C(100000)  /* between two looks whether the movers are done */

/* Constant once set up; most_movers is so though processors come and go, as the pinned memory stays. */
static const struct gr_path *folder;
static bool (*is_wanted)(void);
static unsigned most_movers;

struct gr_lock gr_sleep_lock = GR_LOCK_INIT(GR_RANK_SLEEP);

/* The pinned memory of the movers. It goes with the context that it was allocated in. */
static struct {
        struct gr_context *context; /* NULL: there is none yet */
        uint32_t number;            /* of the context, as its structure may have another owner by now */
        char *buffers[MOVERS_MAX];
        unsigned count;
} ring GR_GUARDED_BY(gr_sleep_lock);

/* Memory that moves, shared by the movers. */
struct job {
        struct gr_context *context;
        struct gr_memory **memories;
        size_t count;
        bool out;
        _Atomic uint64_t host_bytes; /* room for what goes out; what finds none goes into files */
        CUstream stream;
        char *const *buffers;  /* of each mover */
        unsigned buffer_count; /* movers after these copy without */
        _Atomic size_t next;
        _Atomic unsigned movers, running;
        _Atomic uint64_t moved_bytes;
        _Atomic uint64_t fileless_bytes; /* found no room in a file, for this reason: */
        _Atomic int fileless_errno;
        _Atomic int result; /* the first error */
};

/* One mover's. */
struct mover {
        struct job *job;
        char *buffers[2]; /* NULL: none */
        CUevent events[2];
        bool pending[2];
};

void gr_movers_init(const struct gr_path *files, bool (*stops)(void))
{
        long processors = sysconf(_SC_NPROCESSORS_ONLN);

        most_movers = processors < 1 ? 1 : processors > MOVERS_MAX ? MOVERS_MAX : (unsigned)processors;
        folder = files;
        is_wanted = stops;
}

/* Waits until the copy from or to the buffer is done. */
static CUresult await_buffer(struct mover *mover, int buffer)
{
        CUresult result = mover->pending[buffer] ? gr_real.cuEventSynchronize(mover->events[buffer]) : CUDA_SUCCESS;

        mover->pending[buffer] = false;
        return result;
}

/* Copies a chunk to host memory or back, through the buffer. in_file: host is a file's memory. */
static CUresult copy_chunk(struct mover *mover, int buffer, CUdeviceptr ptr, char *host, size_t bytes, bool in_file)
{
        CUstream stream = mover->job->stream;
        char *between = mover->buffers[buffer];
        CUresult result = await_buffer(mover, buffer);

        gr_operations_callbacks->going_on(); /* or the process that asked for it takes this one for hung */
        if (result == CUDA_SUCCESS && mover->job->out && !in_file && !gr_host_may_take(bytes))
                result = CUDA_ERROR_OUT_OF_MEMORY;
        if (result != CUDA_SUCCESS)
                return result;
        if (!between) {
                result = mover->job->out ? gr_real.cuMemcpyDtoHAsync_v2(host, ptr, bytes, stream)
                                         : gr_real.cuMemcpyHtoDAsync_v2(ptr, host, bytes, stream);
                return result == CUDA_SUCCESS ? gr_real.cuStreamSynchronize(stream) : result;
        }
        if (!mover->job->out)
                memcpy(between, host, bytes);
        result = mover->job->out ? gr_real.cuMemcpyDtoHAsync_v2(between, ptr, bytes, stream)
                                 : gr_real.cuMemcpyHtoDAsync_v2(ptr, between, bytes, stream);
        if (result == CUDA_SUCCESS)
                result = gr_real.cuEventRecord(mover->events[buffer], stream);
        mover->pending[buffer] = result == CUDA_SUCCESS;
        return result;
}

/* Takes from the buffer what has come from the device. */
static CUresult fetch_buffer(struct mover *mover, int buffer, char *host, size_t bytes)
{
        CUresult result = await_buffer(mover, buffer);

        if (result == CUDA_SUCCESS && mover->buffers[buffer])
                memcpy(host, mover->buffers[buffer], bytes);
        return result;
}

/* While one buffer is on its way the processor works on the other. CUDA_ERROR_NOT_READY: the sleep has to stop. */
static CUresult copy_memory(struct mover *mover, const struct gr_memory *memory, char *host, bool in_file)
{
        bool out = mover->job->out;
        CUresult result = CUDA_SUCCESS, end;
        size_t at, last = 0;
        int buffer = 0;

        for (at = 0; at < memory->bytes && result == CUDA_SUCCESS; at += BUFFER_BYTES, buffer ^= 1) {
                result = out && is_wanted() ? CUDA_ERROR_NOT_READY
                                            : copy_chunk(mover, buffer, memory->ptr + at, host + at,
                                                         gr_min(BUFFER_BYTES, memory->bytes - at), in_file);
                if (result == CUDA_SUCCESS && out && at > 0)
                        result = fetch_buffer(mover, buffer ^ 1, host + last, BUFFER_BYTES);
                last = at;
        }
        if (result == CUDA_SUCCESS && out)
                result = fetch_buffer(mover, buffer ^ 1, host + last, memory->bytes - last);
        for (buffer = 0; buffer < 2; buffer++) { /* also after an error: the buffers and events serve again */
                end = await_buffer(mover, buffer);
                result = result == CUDA_SUCCESS ? end : result;
        }
        return result;
}

/* Host memory for a copy that goes out. NULL: there is none. */
static char *take_host(size_t bytes)
{
        char *host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

        if (host == MAP_FAILED)
                return NULL;
        madvise(host, bytes, MADV_HUGEPAGE);
        madvise(host, bytes, MADV_DONTFORK); /* a child has no use for it */
        return host;
}

/* Takes from the room for what goes out. */
static bool has_room(_Atomic uint64_t *room, uint64_t bytes)
{
        uint64_t left = atomic_load(room);

        while (left >= bytes)
                if (atomic_compare_exchange_weak(room, &left, left - bytes))
                        return true;
        return false;
}

/* What has room neither in host memory nor in a file stays, and is no error. */
static CUresult move_out(struct mover *mover, struct gr_memory *memory)
{
        bool in_file = !has_room(&mover->job->host_bytes, memory->bytes);
        char *host = in_file ? gr_mapped_file_memory(folder, memory->bytes) : take_host(memory->bytes);
        CUresult result;

        if (!host && in_file) {
                atomic_store(&mover->job->fileless_errno, errno);
                atomic_fetch_add(&mover->job->fileless_bytes, memory->bytes);
        }
        if (!host)
                return in_file ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        result = copy_memory(mover, memory, host, in_file);
        if (result == CUDA_SUCCESS)
                result = gr_mapped_leave(memory, host, in_file);
        if (result == CUDA_SUCCESS)
                atomic_fetch_add(&mover->job->moved_bytes, memory->bytes);
        else
                munmap(host, memory->bytes);
        return result;
}

static CUresult move_in(struct mover *mover, struct gr_memory *memory)
{
        CUresult result = gr_mapped_map_again(memory);

        if (result != CUDA_SUCCESS)
                return result;
        result = copy_memory(mover, memory, memory->host, memory->in_file);
        if (result == CUDA_SUCCESS) {
                atomic_fetch_add(&mover->job->moved_bytes, memory->bytes);
                gr_mapped_arrived(memory);
        } else {
                gr_mapped_give_up(memory, true);
        }
        return result;
}

/* Moves one memory after the other until all are moved or one fails. */
static void move_one_by_one(struct job *job)
{
        struct mover mover = {.job = job};
        unsigned index = atomic_fetch_add(&job->movers, 1);
        CUresult result = gr_real.cuCtxPushCurrent_v2(job->context->handle);
        CUcontext context;

        if (result == CUDA_SUCCESS) {
                for (int i = 0; i < 2; i++) {
                        result = gr_real.cuEventCreate(&mover.events[i],
                                                       CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
                        if (result != CUDA_SUCCESS)
                                mover.events[i] = NULL;
                        else if (index < job->buffer_count)
                                mover.buffers[i] = job->buffers[index] + (size_t)i * BUFFER_BYTES;
                }
                result = CUDA_SUCCESS; /* without an event the buffer is not used */
                while (result == CUDA_SUCCESS && atomic_load(&job->result) == CUDA_SUCCESS) {
                        size_t next = atomic_fetch_add(&job->next, 1);

                        if (next >= job->count)
                                break;
                        result =
                                job->out ? move_out(&mover, job->memories[next]) : move_in(&mover, job->memories[next]);
                }
                for (int i = 0; i < 2; i++)
                        if (mover.events[i])
                                gr_real.cuEventDestroy_v2(mover.events[i]);
                gr_real.cuCtxPopCurrent_v2(&context);
        }
        if (result != CUDA_SUCCESS)
                atomic_compare_exchange_strong(&job->result, &(int){CUDA_SUCCESS}, (int)result);
}

static void *mover_main(void *arg)
{
        struct job *job = arg;

        gr_operations_relax_captures();
        move_one_by_one(job);
        atomic_fetch_sub(&job->running, 1);
        return NULL;
}

/* Moves what the job has, by as many threads as there are buffers for. */
static void move_all(struct job *job)
{
        for (unsigned i = 1; i < job->buffer_count && i < job->count; i++) {
                atomic_fetch_add(&job->running, 1);
                if (!gr_workers_start_thread(mover_main, job)) {
                        atomic_fetch_sub(&job->running, 1);
                        break;
                }
        }
        move_one_by_one(job);
        while (atomic_load(&job->running) > 0) {
                gr_operations_callbacks->going_on();
                gr_driver.sleep_ns(MOVERS_NS);
        }
}

/* Moves all with the pinned memory, in a visit of its context, which cannot end meanwhile. */
GR_NOT_CHECKED static bool move_with_ring(struct gr_context *context, void *arg)
{
        struct job *job = arg;

        gr_assert_locked(&gr_sleep_lock);
        if (context != ring.context || atomic_load(&context->number) != ring.number)
                return true;
        job->buffers = ring.buffers;
        job->buffer_count = ring.count;
        move_all(job);
        return false;
}

/*
 * Takes pinned memory in the context, for good, as pinning takes long: for one mover after the other, so that whoever
 * asked for the sleep sees that it goes on. There may be less than for all, or none.
 */
GR_HELD(gr_sleep_lock) static void make_ring(struct gr_context *context)
{
        void *buffers;

        gr_assert_locked(&gr_sleep_lock);
        ring.context = context;
        ring.number = atomic_load(&context->number);
        for (ring.count = 0; ring.count < most_movers && gr_real.cuMemHostAlloc; ring.count++) {
                if (gr_real.cuMemHostAlloc(&buffers, 2 * BUFFER_BYTES, CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS)
                        break;
                ring.buffers[ring.count] = buffers;
                gr_operations_callbacks->going_on();
        }
        if (ring.count == 0)
                ring.context = NULL;
}

GR_HELD(gr_sleep_lock)
uint64_t gr_movers_move(struct gr_context *context, bool out, struct gr_memory **memories, size_t count,
                        uint64_t host_bytes, CUresult *ret_result)
{
        struct job job = {
                .context = context, .out = out, .memories = memories, .count = count, .host_bytes = host_bytes};
        CUcontext popped;

        gr_assert_locked(&gr_sleep_lock);
        *ret_result = CUDA_SUCCESS;
        if (count == 0)
                return 0;
        *ret_result = gr_real.cuCtxPushCurrent_v2(context->handle);
        if (*ret_result != CUDA_SUCCESS)
                return 0;
        job.stream = gr_operations_stream(context->handle);
        if (job.stream)
                gr_context_each(&gr_core, -1, move_with_ring, &job);
        else
                atomic_store(&job.result, CUDA_ERROR_INVALID_CONTEXT);
        if (job.stream && !job.buffers) { /* there is none yet, or its context ends */
                make_ring(context);
                job.buffers = ring.buffers;
                job.buffer_count = ring.count;
                move_all(&job);
        }
        gr_real.cuCtxPopCurrent_v2(&popped);
        if (job.fileless_bytes > 0)
                gr_log(GR_LOG_INFO, "GPURECLAIM_SLEEP_DIR: %s: %s; %" PRIu64 " MiB stay on the device", folder->text,
                       strerror(job.fileless_errno), job.fileless_bytes >> 20);
        *ret_result = (CUresult)atomic_load(&job.result);
        return atomic_load(&job.moved_bytes);
}

GR_HELD(gr_sleep_lock) uint64_t gr_movers_pinned_bytes(void)
{
        bool has_ring = ring.context && atomic_load(&ring.context->number) == ring.number;

        gr_assert_locked(&gr_sleep_lock);
        return has_ring ? 0 : most_movers * 2 * BUFFER_BYTES;
}
