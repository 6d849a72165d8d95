#include "base/log.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/keep_errno.h"
#include "base/no_cancel.h"
#include "base/utf8.h"

#define PASSES_BITS 16
#define PASSES_MASK ((1ull << PASSES_BITS) - 1)

const char *const gr_log_words[] = {
#define WORD(id, word) word,
        GR_LOG_LEVELS(WORD)
#undef WORD
                NULL,
};

_Atomic int gr_log_threshold = GR_LOG_WARN;

static gr_log_sink *log_sink;
static void *log_sink_arg;

void gr_log_warn(const char *message, void *arg)
{
        (void)arg;
        gr_log(GR_LOG_WARN, "%s", message);
}

void gr_log_set_level(enum gr_log_level level)
{
        atomic_store_explicit(&gr_log_threshold, (int)level, memory_order_relaxed);
}

void gr_log_set_sink(gr_log_sink *sink, void *arg)
{
        log_sink = sink;
        log_sink_arg = arg;
}

/*
 * Waits up to wait_ms until fd takes bytes, then writes some, as write(2). Returns their number, -ETIMEDOUT or -errno.
 */
static ssize_t write_some(int fd, const void *bytes, size_t length, int wait_ms)
{
        struct pollfd ready = {.fd = fd, .events = POLLOUT};
        ssize_t written;
        int found;

        do
                found = poll(&ready, 1, wait_ms);
        while (found < 0 && errno == EINTR);
        if (found == 0)
                return -ETIMEDOUT;
        /* A pipe that is ready takes PIPE_BUF bytes without blocking, even where the descriptor is a blocking one. */
        written = write(fd, bytes, length < PIPE_BUF ? length : PIPE_BUF);
        if (written < 0)
                return errno == EINTR || errno == EAGAIN ? 0 : -errno;
        return written > 0 ? written : -EIO;
}

int gr_log_write(int fd, const void *bytes, size_t length, int wait_ms)
{
        const struct timespec at_once = {0};
        GR_KEEP_ERRNO;
        sigset_t raised, pending, before;
        int rc = 0, signal;
        GR_NO_CANCEL;

        sigemptyset(&raised);
        sigaddset(&raised, SIGPIPE);
        sigaddset(&raised, SIGXFSZ);
        pthread_sigmask(SIG_BLOCK, &raised, &before);
        sigemptyset(&pending);
        sigpending(&pending);
        while (length > 0 && !rc) {
                ssize_t written = write_some(fd, bytes, length, wait_ms);

                if (written < 0) {
                        rc = (int)written;
                } else {
                        bytes = (const char *)bytes + written;
                        length -= (size_t)written;
                }
        }
        /*
         * The failed write has raised the signal for this thread: remove it. A signal that was pending before belongs
         * to the program.
         */
        signal = rc == -EPIPE ? SIGPIPE : rc == -EFBIG ? SIGXFSZ : 0;
        if (signal && !sigismember(&pending, signal)) {
                sigemptyset(&raised);
                sigaddset(&raised, signal);
                sigtimedwait(&raised, NULL, &at_once); /* without a wait, no other signal interrupts it */
        }
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return rc;
}

/* After a line has waited a second and the reader took nothing, later lines do not wait, until one is written again. */
static void write_stderr(const char *line, size_t line_bytes)
{
        static _Atomic bool stuck;
        int wait_ms = atomic_load_explicit(&stuck, memory_order_relaxed) ? 0 : GR_WRITE_WAIT_MS;
        int rc = gr_log_write(STDERR_FILENO, line, line_bytes, wait_ms);

        atomic_store_explicit(&stuck, rc == -ETIMEDOUT, memory_order_relaxed);
}

/* How many of room bytes an snprintf that returned length has filled, without the NUL. */
static size_t filled_bytes(int length, size_t room)
{
        if (length < 0)
                return 0;
        return (size_t)length < room ? (size_t)length : room - 1;
}

/* Bytes of the printable character that text begins with; 0: a control character, or no UTF-8. */
static size_t printable_bytes(const char *text, size_t left)
{
        const unsigned char *byte = (const unsigned char *)text;
        size_t length = gr_utf8_bytes(text, left);

        if (length == 2 && byte[0] == 0xc2 && byte[1] < 0xa0)
                return 0; /* C1 control characters, which a terminal obeys like ESC */
        return byte[0] < ' ' || byte[0] == 0x7f ? 0 : length;
}

void gr_log_clean(char *text, size_t length)
{
        size_t i = 0;

        while (i < length) {
                size_t bytes = printable_bytes(text + i, length - i);

                if (bytes == 0)
                        text[i++] = ' ';
                i += bytes;
        }
}

void gr_log_emit(enum gr_log_level level, const char *format, ...)
{
        static const char cut[] = "...";
        GR_KEEP_ERRNO;
        char line[GR_LOG_LINE_BYTES];
        size_t length;
        va_list args;
        int wanted;

        length = filled_bytes(
                snprintf(line, sizeof(line), "gpureclaim: [%ld] %s: ", (long)getpid(), gr_log_words[level]),
                sizeof(line));
        va_start(args, format);
        errno = gr_kept_errno; /* for %m */
        wanted = vsnprintf(line + length, sizeof(line) - length, format, args);
        va_end(args);
        if (wanted >= 0 && (size_t)wanted >= sizeof(line) - length)
                memcpy(line + sizeof(line) - sizeof(cut), cut, sizeof(cut));
        length += filled_bytes(wanted, sizeof(line) - length);
        gr_log_clean(line, length);
        line[length++] = '\n'; /* over the terminating NUL */
        if (log_sink)
                log_sink(line, length, log_sink_arg);
        else
                write_stderr(line, length);
}

bool gr_log_ratelimit(struct gr_ratelimit *limit, uint64_t now_ns)
{
        const uint64_t window = (now_ns / limit->interval_ns) & (UINT64_MAX >> PASSES_BITS);
        uint64_t seen = atomic_load_explicit(&limit->state, memory_order_relaxed), next;

        do {
                if (seen >> PASSES_BITS != window) {
                        next = window << PASSES_BITS | 1;
                } else if ((seen & PASSES_MASK) < limit->burst && (seen & PASSES_MASK) < PASSES_MASK) {
                        next = seen + 1;
                } else {
                        atomic_fetch_add_explicit(&limit->suppressed, 1, memory_order_relaxed);
                        return false;
                }
        } while (!atomic_compare_exchange_weak_explicit(&limit->state, &seen, next, memory_order_relaxed,
                                                        memory_order_relaxed));
        return true;
}

uint64_t gr_log_ratelimit_take(struct gr_ratelimit *limit)
{
        return atomic_exchange_explicit(&limit->suppressed, 0, memory_order_relaxed);
}
