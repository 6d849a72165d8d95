/* GPURECLAIM_TRACE: the writer of the file that base/trace_file.h describes. */
#include "notes/trace.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/no_cancel.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "system/environment.h"
#include "system/mapped_file.h"
#include "system/messages.h"

#define BATCH_BYTES  (GR_TRACE_BATCH * sizeof(struct gr_trace_entry))
#define STEP         512  /* batches that the file grows by: 1 MiB */
#define LEFT_MAX     1024 /* parts of batches; what more threads leave is unused */
#define MAPPED_BYTES (sizeof(struct gr_trace_header) + (size_t)GR_TRACE_BATCHES_MAX * BATCH_BYTES)

/* The unused part of a batch. */
struct part {
        struct gr_trace_entry *next, *end;
        uint64_t batch;
};

/* What a thread writes to. */
static _Thread_local struct {
        struct part part;
        uint32_t thread; /* its number in the system; 0: not asked yet */
        bool missed;     /* the thread's present request is no hit: the driver or the ladder was needed */
} own __attribute__((tls_model("initial-exec")));

static struct gr_trace_header *header; /* mapped, with the batches behind it, until the process ends */
static _Atomic uint64_t batches, ring; /* not read from the header: other processes may write to the file */
static uint64_t begin_ns;

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_TRACE); /* held while the file grows, also across write */
static struct gr_mapped_file file GR_GUARDED_BY(lock);
static struct part left[LEFT_MAX] GR_GUARDED_BY(lock); /* by threads that have ended, for those that begin */
static unsigned left_count GR_GUARDED_BY(lock);
static pthread_key_t thread_key; /* set in threads that have a part: leave_part */
static bool thread_key_made;

/*
 * Writes zeroes at the end of the file, for STEP more batches. A page of a mapping that the disk has no room for would
 * end the program (SIGBUS), and so would a size that only ftruncate had set. In large pieces, as the system then has
 * larger parts of the file in memory, and less to do when the program first writes there (docs/measurements.md,
 * trace-cost). A file above the process's size limit would end it (SIGXFSZ). 0 or -errno.
 */
GR_HELD(lock) static int extend_file(uint64_t present)
{
        static char zeroes[256 << 10];
        uint64_t at = sizeof(*header) + present * BATCH_BYTES, end = at + STEP * BATCH_BYTES;
        int fd = gr_mapped_file_open(&file), rc = 0;
        struct rlimit most;

        gr_assert_locked(&lock);
        if (fd < 0)
                return fd;
        if (getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur < end)
                rc = -EFBIG;
        while (!rc && at < end) {
                ssize_t written = pwrite(fd, zeroes, gr_min(end - at, sizeof(zeroes)), (off_t)at);

                if (written > 0)
                        at += (uint64_t)written;
                else if (written == 0 || errno != EINTR)
                        rc = written ? -errno : -EIO;
        }
        gr_message_end(fd);
        return rc;
}

/* Makes the file reach to this batch, if it may still grow. */
static __attribute__((noinline)) void grow_file(uint64_t batch)
{
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        gr_lock(&lock);
        while (batch >= batches && batches < ring) {
                int rc = extend_file(batches);

                if (rc == 0) {
                        batches += STEP;
                        continue;
                }
                gr_log(GR_LOG_WARN, "GPURECLAIM_TRACE: %s cannot grow beyond %llu MiB, its oldest part is lost: %s",
                       file.path.text, (unsigned long long)(batches * BATCH_BYTES >> 20),
                       rc == -ESTALE ? "another file has its name" : strerror(-rc));
                ring = batches;
                header->ring = ring;
        }
        gr_unlock(&lock);
}

/*
 * Whether another thread may soon reuse the batch of this one, which has written so little that others are half the
 * file ahead of it.
 */
static bool is_behind(void)
{
        return atomic_load_explicit(&header->claimed, memory_order_relaxed) - own.part.batch >
               atomic_load_explicit(&batches, memory_order_relaxed) / 2;
}

/* The thread ends. If it goes on all the same, it begins anew. */
static void leave_part(void *ignored)
{
        GR_NO_CANCEL;

        (void)ignored;
        /* In a child after fork a thread of the parent may have the lock for ever. */
        if (header->pid != (uint64_t)getpid())
                return;
        gr_lock(&lock);
        if (own.part.next < own.part.end && left_count < LEFT_MAX)
                left[left_count++] = own.part;
        gr_unlock(&lock);
        own.part = (struct part){0};
        own.thread = 0;
}

/*
 * Whether the thread, which begins, has the rest of another one's batch now. Not later, when it has a batch behind it:
 * what it writes lies in the order of its places.
 */
static __attribute__((noinline)) bool take_left(void)
{
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;
        bool taken = false;

        own.thread = (uint32_t)syscall(SYS_gettid);
        if (!thread_key_made || pthread_setspecific(thread_key, &own) != 0)
                return false;
        gr_lock(&lock);
        while (!taken && left_count > 0) {
                own.part = left[--left_count];
                taken = !is_behind();
        }
        gr_unlock(&lock);
        return taken;
}

/* Takes another batch for this thread, or a part of one. */
static void claim_batch(void)
{
        uint64_t batch;

        if (!own.thread && take_left())
                return;
        batch = atomic_fetch_add_explicit(&header->claimed, 1, memory_order_relaxed);
        if (batch >= batches)
                grow_file(batch);
        own.part.batch = batch;
        own.part.next = (struct gr_trace_entry *)(header + 1) + batch % ring * GR_TRACE_BATCH;
        own.part.end = own.part.next + GR_TRACE_BATCH;
        if (batch >= ring)
                memset(own.part.next, 0, BATCH_BYTES); /* so that no entry mixes old and new contents */
}

static void write_at(uint64_t now_ns, enum gr_entry what, int device, unsigned detail, uint64_t address, uint64_t bytes)
{
        struct gr_trace_entry *entry;

        if (__builtin_expect(own.part.next == own.part.end || is_behind(), 0))
                claim_batch();
        entry = own.part.next++;
        entry->time_ns = now_ns - begin_ns;
        entry->address = address;
        entry->bytes = bytes;
        atomic_store_explicit(&entry->head,
                              own.thread | (uint64_t)what << 32 | (uint64_t)(uint8_t)device << 40 |
                                      (uint64_t)detail << 48,
                              memory_order_release);
}

/* For gr_trace_to. */
static void add_entry(enum gr_entry what, int device, unsigned detail, uint64_t address, uint64_t bytes)
{
        if (what == GR_ENTRY_RUNG ||
            (what == GR_ENTRY_COUNTER && (detail == GR_COUNTER_driver_allocs || detail == GR_COUNTER_remapped_bytes)))
                own.missed = true;
        write_at(gr_driver.now_ns(), what, device, detail, address, bytes);
}

void gr_trace_begin_alloc(void)
{
        own.missed = false;
}

void gr_trace_end_alloc(struct gr_context *context, CUdeviceptr ptr, size_t bytes, int rc)
{
        add_entry(rc           ? GR_ENTRY_REFUSED
                  : own.missed ? GR_ENTRY_MISS
                               : GR_ENTRY_HIT,
                  context->device->ordinal, 0, ptr, bytes);
}

void gr_trace_free(CUdeviceptr ptr, uint64_t before_ns)
{
        write_at(before_ns, GR_ENTRY_FREE, GR_ENTRY_NO_DEVICE, 0, ptr, 0);
}

/* 0 or -errno. */
GR_HELD(lock) static int create_trace(void)
{
        struct gr_trace_header first = {.magic = GR_TRACE_MAGIC,
                                        .version = GR_TRACE_VERSION,
                                        .header_bytes = sizeof(first),
                                        .entry_bytes = sizeof(struct gr_trace_entry),
                                        .batch_entries = GR_TRACE_BATCH,
                                        .pid = (uint64_t)getpid(),
                                        .ring = GR_TRACE_BATCHES_MAX};
        struct timespec now;
        int fd = gr_mapped_file_create(&file, gr_options.trace.text, true, 0666), rc;

        if (fd < 0)
                return fd;
        clock_gettime(CLOCK_REALTIME, &now);
        begin_ns = gr_driver.now_ns();
        first.began_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
        gr_mapped_file_command(first.command, sizeof(first.command));
        rc = gr_log_write(fd, &first, sizeof(first), GR_WRITE_WAIT_MS);
        if (!rc)
                rc = extend_file(0);
        if (!rc) {
                void *mapped = mmap(NULL, MAPPED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

                if (mapped == MAP_FAILED)
                        rc = -errno;
                else
                        header = mapped;
        }
        if (rc && rc != -ESTALE) /* -ESTALE: the file of this name is another process's by now */
                unlink(file.path.text);
        gr_message_end(fd);
        return rc;
}

bool gr_trace_init(void)
{
        int rc;

        if (!gr_options.trace.text[0])
                return false;
        gr_lock(&lock);
        assert(!header); /* opened once */
        rc = create_trace();
        if (rc)
                gr_log(GR_LOG_WARN, "GPURECLAIM_TRACE: cannot write %s: %s", file.path.text,
                       rc == -EEXIST ? "it is no regular file" : strerror(-rc));
        gr_unlock(&lock);
        if (rc)
                return false;
        for (int i = 0; i < GR_TRACE_DEVICES && gr_real.cuDeviceGetName; i++)
                if (gr_real.cuDeviceGetName(header->devices[i], sizeof(header->devices[i]), i) != CUDA_SUCCESS)
                        break;
        thread_key_made = pthread_key_create(&thread_key, leave_part) == 0;
        batches = STEP;
        ring = GR_TRACE_BATCHES_MAX;
        atomic_store(&gr_trace_to, add_entry);
        return true;
}
