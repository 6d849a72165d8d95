/*
 * The log of the library, written line by line, and rate limits for its lines.
 *
 * Every function may be called from any thread, takes no lock, allocates nothing and keeps errno. Formatting uses
 * vsnprintf on a stack buffer, so a signal handler should log only with plain %s, %d and %u.
 */
#ifndef GR_LOG_H
#define GR_LOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The levels, each including those before it, and their words in GPURECLAIM_LOG and in the lines. */
#define GR_LOG_LEVELS(X)                                                                                               \
        X(GR_LOG_SILENT, "silent")                                                                                     \
        X(GR_LOG_ERROR, "error")                                                                                       \
        X(GR_LOG_WARN, "warn")                                                                                         \
        X(GR_LOG_INFO, "info")                                                                                         \
        X(GR_LOG_DEBUG, "debug")

enum gr_log_level {
#define GR_LOG_ENUMERATOR(id, word) id,
        GR_LOG_LEVELS(GR_LOG_ENUMERATOR)
#undef GR_LOG_ENUMERATOR
};

/* The words by level, NULL-terminated. */
extern const char *const gr_log_words[];

/* Longest line with its newline; a longer one is cut and ends in "...". */
#define GR_LOG_LINE_BYTES 1024

/* Takes one whole line, newline included, not NUL-terminated. May be called from several threads at once. */
typedef void gr_log_sink(const char *line, size_t line_bytes, void *arg);

/* The level in force; GR_LOG_WARN until gr_log_set_level. Read only through gr_log_enabled. */
extern _Atomic int gr_log_threshold;

static inline bool gr_log_enabled(enum gr_log_level level)
{
        return level != GR_LOG_SILENT && (int)level <= atomic_load_explicit(&gr_log_threshold, memory_order_relaxed);
}

/*
 * Writes "gpureclaim: [pid] warn: <message>\n" with one write to standard error, or hands it to the sink. The arguments
 * are evaluated only where the level is on. Control characters in the message become blanks, so that it stays one line.
 * A line that cannot be written is lost (gr_log_write).
 */
#define gr_log(level, ...)                                                                                             \
        do {                                                                                                           \
                if (gr_log_enabled(level))                                                                             \
                        gr_log_emit((level), __VA_ARGS__);                                                             \
        } while (0)

#define GR_WRITE_WAIT_MS 1000

/*
 * Writes all of bytes to fd without harm to the program: it gets no SIGPIPE or SIGXFSZ, a thread with a cancellation
 * pending does not end inside, and each wait for a slow reader lasts at most wait_ms. 0, or -errno (-ETIMEDOUT: the
 * reader took nothing in that time) after a part may have been written. Keeps errno.
 */
int gr_log_write(int fd, const void *bytes, size_t length, int wait_ms);

/* Replaces each byte that is not part of printable UTF-8 by a blank; C1 control characters count as not printable. */
void gr_log_clean(char *text, size_t length);

/* gr_log without the check of the level. */
void gr_log_emit(enum gr_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Logs message as a warning: a gr_options_warn (options.h). */
void gr_log_warn(const char *message, void *arg);

/* Sets the level in force. */
void gr_log_set_level(enum gr_log_level level);

/* Sends all later lines to sink, or back to standard error with NULL. For tests: no other thread may be logging. */
void gr_log_set_sink(gr_log_sink *sink, void *arg);

/* At most burst passes in each window of interval_ns; zero the state by static initialisation. */
struct gr_ratelimit {
        uint64_t interval_ns;        /* above 0 */
        uint32_t burst;              /* 1 to 65535 */
        _Atomic uint64_t state;      /* window number << 16 | passes in it */
        _Atomic uint64_t suppressed; /* refused since the last gr_log_ratelimit_take */
};

#define GR_RATELIMIT_INIT(burst_count, window_ns)                                                                      \
        {                                                                                                              \
                .interval_ns = (window_ns), .burst = (burst_count)                                                     \
        }

/* Whether the caller may log at now_ns (any monotonic clock); a refusal is counted. */
bool gr_log_ratelimit(struct gr_ratelimit *limit, uint64_t now_ns);

/* How often gr_log_ratelimit refused since the last call: for "(12 more like this)". */
uint64_t gr_log_ratelimit_take(struct gr_ratelimit *limit);

#endif
