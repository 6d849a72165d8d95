/*
 * GPURECLAIM_TRACE: each allocation and free of the program becomes a line of CSV, in the columns of RMM's replay logs,
 * so that the replayer of RMM can read it as well as the one of this project. Pointer is hexadecimal, Time is in
 * nanoseconds since the file was opened.
 */
#include "hooks/trace.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/log.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "system/environment.h"

#define BUFFER_BYTES 65536
#define LINE_BYTES   128 /* no line is longer */

GR_HOT_DATA _Atomic bool gr_trace_on;

int gr_trace_open_report(const char *option, const char *path)
{
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0666);

        if (fd < 0)
                gr_log(GR_LOG_WARN, "%s: cannot write %s: %s", option, path,
                       errno == ENXIO ? "no process reads from it" : strerror(errno));
        if (fd >= 0 && fd <= STDERR_FILENO) { /* a closed standard stream: what the program prints would land here */
                int above = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);

                if (above < 0)
                        gr_log(GR_LOG_WARN, "%s: cannot write %s: %s", option, path, strerror(errno));
                close(fd);
                fd = above;
        }
        return fd;
}

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_TRACE); /* held across write */
static char buffer[BUFFER_BYTES] GR_GUARDED_BY(lock);
static size_t used GR_GUARDED_BY(lock);
static int fd GR_GUARDED_BY(lock) = -1;
static struct stat file GR_GUARDED_BY(lock); /* the file that was opened as fd */
static uint64_t begin_ns GR_GUARDED_BY(lock);

/* Lock held. A program that closes all descriptors, as daemons do, may have reused the number of fd. */
GR_HELD(lock) static bool is_open(void)
{
        struct stat now;

        gr_assert_locked(&lock);
        return fstat(fd, &now) == 0 && now.st_dev == file.st_dev && now.st_ino == file.st_ino;
}

/* Lock held. Writes the buffer. Where that fails, the trace ends. */
GR_HELD(lock) static void flush(void)
{
        int rc = is_open() ? gr_log_write(fd, buffer, used, GR_WRITE_WAIT_MS) : -EBADF;

        gr_assert_locked(&lock);
        assert(fd >= 0 && used <= BUFFER_BYTES);
        if (rc) {
                gr_log(GR_LOG_WARN, "GPURECLAIM_TRACE: writing failed, the trace ends here: %s", strerror(-rc));
                atomic_store(&gr_trace_on, false);
        }
        used = 0;
}

/* At the start of the process, when no other thread is here. */
GR_NOT_CHECKED void gr_trace_init(void)
{
        static const char header[] = "Thread,Time,Action,Pointer,Size,Stream\n";
        char path[GR_PATH_BYTES];

        if (!gr_options.trace.text[0] ||
            gr_options_expand_path(gr_options.trace.text, getpid(), path, sizeof(path)) != 0)
                return;
        assert(fd < 0); /* opened once */
        fd = gr_trace_open_report("GPURECLAIM_TRACE", path);
        if (fd < 0)
                return;
        (void)fstat(fd, &file); /* where this fails, is_open fails too, and the trace ends */
        memcpy(buffer, header, sizeof(header) - 1);
        used = sizeof(header) - 1;
        begin_ns = gr_driver.now_ns();
        atomic_store(&gr_trace_on, true);
}

void gr_trace_end(void)
{
        gr_lock(&lock);
        if (atomic_exchange(&gr_trace_on, false)) {
                flush();
                if (is_open())
                        close(fd);
        }
        gr_unlock(&lock);
}

static void note(const char *action, CUdeviceptr ptr, size_t bytes)
{
        static _Thread_local long thread __attribute__((tls_model("initial-exec")));
        GR_KEEP_ERRNO;

        if (!thread)
                thread = syscall(SYS_gettid);
        gr_lock(&lock);
        if (atomic_load(&gr_trace_on)) {
                if (used + LINE_BYTES > BUFFER_BYTES)
                        flush();
                assert(used + LINE_BYTES <= BUFFER_BYTES);
                used += (size_t)snprintf(buffer + used, LINE_BYTES, "%ld,%" PRIu64 ",%s,0x%llx,%zu,0x0\n", thread,
                                         gr_driver.now_ns() - begin_ns, action, (unsigned long long)ptr, bytes);
        }
        gr_unlock(&lock);
}

void gr_trace_alloc(CUdeviceptr ptr, size_t bytes)
{
        note("allocate", ptr, bytes);
}

void gr_trace_free(CUdeviceptr ptr)
{
        struct gr_block_info info;

        if (gr_ledger_find(gr_core.ledger, ptr, &info) == 0 && info.live)
                note("free", ptr, info.requested_bytes);
}
