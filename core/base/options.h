/*
 * The options of the library, read once from the environment and a file. core/base/options.def is the only list of
 * them.
 *
 * Plain C without CUDA, locale, allocation, locks or global state; every function may be called from any thread.
 * Functions that can fail return 0 or -errno and touch their ret_ outputs only on success.
 */
#ifndef GR_OPTIONS_H
#define GR_OPTIONS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/log.h"
#include "base/size.h"

#define GR_OPTIONS_PREFIX    "GPURECLAIM_"
#define GR_PATH_BYTES        4096
#define GR_NAME_BYTES        64
#define GR_BYTE_NONE         (-1)
#define GR_FILE_BYTES        16384                /* room for a file of options */
#define GR_OPTION_TEXT_BYTES (GR_PATH_BYTES + 64) /* room for any text of gr_option_format */

#define GR_REUSE_MODES(X)                                                                                              \
        X(GR_REUSE_AUTO, "auto")                                                                                       \
        X(GR_REUSE_BARRIER, "barrier")                                                                                 \
        X(GR_REUSE_POLL, "poll")                                                                                       \
        X(GR_REUSE_SYNC, "sync")

#define GR_POOL_KINDS(X)                                                                                               \
        X(GR_POOL_BINS, "bins")                                                                                        \
        X(GR_POOL_SPLIT, "split")                                                                                      \
        X(GR_POOL_AUTO, "auto")                                                                                        \
        X(GR_POOL_NONE, "none")

/* Whether graphs may use each other's memory. */
#define GR_GRAPH_ARENAS(X)                                                                                             \
        X(GR_GRAPH_PRIVATE, "private")                                                                                 \
        X(GR_GRAPH_SHARED, "shared")

/* When live memory leaves the device. The option may also have a time after which it does so by itself. */
#define GR_SLEEP_MODES(X)                                                                                              \
        X(GR_SLEEP_OFF, "off")                                                                                         \
        X(GR_SLEEP_DEMAND, "demand")

#define GR_LIMIT_INCLUDES(X)                                                                                           \
        X(GR_INCLUDES_ALLOCATIONS, "allocations")                                                                      \
        X(GR_INCLUDES_PROCESS, "process")

#define GR_BACKTRACE_MODES(X)                                                                                          \
        X(GR_BACKTRACE_OFF, "off")                                                                                     \
        X(GR_BACKTRACE_SAMPLE, "sample")                                                                               \
        X(GR_BACKTRACE_FULL, "full")

#define GR_ENUMERATOR(id, word) id,
enum gr_reuse { GR_REUSE_MODES(GR_ENUMERATOR) };
enum gr_pool_kind { GR_POOL_KINDS(GR_ENUMERATOR) };
enum gr_graph_arena { GR_GRAPH_ARENAS(GR_ENUMERATOR) };
enum gr_sleep { GR_SLEEP_MODES(GR_ENUMERATOR) };
enum gr_backtrace { GR_BACKTRACE_MODES(GR_ENUMERATOR) };
enum gr_limit_includes { GR_LIMIT_INCLUDES(GR_ENUMERATOR) };
#undef GR_ENUMERATOR

/* Empty text: not set. */
struct gr_path {
        char text[GR_PATH_BYTES];
};

/* Letters, digits, '_', '-' and '.', not '.' first; never empty. */
struct gr_name {
        char text[GR_NAME_BYTES];
};

enum gr_option_id {
#define GR_OPTION(id, ...) GR_OPTION_##id,
#include "base/options.def"
#undef GR_OPTION
        GR_OPTION_COUNT
};

enum gr_option_kind {
        GR_KIND_SIZES, /* struct gr_size_list */
        GR_KIND_SIZE,  /* the same, with one size for all: of the host, not of devices */
        GR_KIND_ENUM,  /* an enum whose values index words */
        GR_KIND_BOOL,  /* bool */
        GR_KIND_PATH,  /* struct gr_path */
        GR_KIND_NAME,  /* struct gr_name */
        GR_KIND_INT,   /* int64_t */
        GR_KIND_BYTE,  /* int64_t; GR_BYTE_NONE for "none" */
        /* uint64_t, nanoseconds; where the option has words, also the index of one, and min is above all of these */
        GR_KIND_DURATION,
};

/* Where the value of an option comes from. */
#define GR_OPTION_SOURCES(X)                                                                                           \
        X(GR_FROM_DEFAULT, "default")                                                                                  \
        X(GR_FROM_FILE, "file")                                                                                        \
        X(GR_FROM_ENVIRONMENT, "environment")

#define GR_ENUMERATOR(id, word) id,
enum gr_option_source { GR_OPTION_SOURCES(GR_ENUMERATOR) };
#undef GR_ENUMERATOR

/* A file of options: lines NAME=VALUE, with the names of the variables. Lines may be empty or begin with '#'. */
struct gr_options_file {
        char path[GR_PATH_BYTES], text[GR_FILE_BYTES];
        int error; /* 0, or -errno: it could not be read */
};

/* About 17 KiB: keep it in static storage. The fields are final once gr_options_load has returned. */
struct gr_options {
#define GR_OPTION(id, field, ctype, ...) ctype field;
#include "base/options.def"
#undef GR_OPTION
        enum gr_option_source source[GR_OPTION_COUNT];
        bool bad[GR_OPTION_COUNT]; /* the environment or the file has a value that cannot be used */
        _Atomic uint64_t above_device[GR_OPTION_COUNT]; /* bit d: gr_options_resolve has warned for device d */
};

/* One row of the table. Everything in it lives as long as the program. */
struct gr_option {
        const char *name; /* the field's */
        const char *env;
        const char *flag; /* of `gpureclaim run`; NULL for none */
        const char *group;
        const char *help;
        const char *default_text; /* "" for a path that is not set */
        const char *const *words; /* of GR_KIND_ENUM and of some GR_KIND_DURATION, NULL-terminated; else NULL */
        enum gr_option_kind kind;
        int64_t min, max;
        size_t offset; /* of the field in struct gr_options */
};

extern const struct gr_option gr_option_table[GR_OPTION_COUNT];
extern const char *const gr_options_source_words[];
extern const char *const gr_options_reuse_words[];
extern const char *const gr_options_pool_words[];
extern const char *const gr_options_graph_arena_words[];
extern const char *const gr_options_sleep_words[];
extern const char *const gr_options_turn_words[];
extern const char *const gr_options_backtrace_words[];
extern const char *const gr_options_limit_includes_words[];

/* Takes one message without newline, valid during the call only. */
typedef void gr_options_warn(const char *message, void *arg);

/*
 * Fills *ret. get returns a variable's value or NULL, as getenv does; its strings are not kept. An empty value counts
 * as unset. What no variable sets comes from file_or_null, whose text is changed meanwhile. warn is called once for
 * each bad value, with what is used instead, and once for each variable of environ_or_null (NULL-terminated
 * "NAME=value") that begins with GPURECLAIM_ and is no option, and for each such line of the file. All fields of *ret
 * are final before the first warning, so that warn may use ret->log. warn may be NULL. -EINVAL for a NULL ret or get.
 */
int gr_options_load(struct gr_options *ret, const char *(*get)(const char *name), char **environ_or_null,
                    struct gr_options_file *file_or_null, gr_options_warn *warn, void *warn_arg);

/*
 * Bytes that a GR_KIND_SIZES option means for a device with total_bytes of memory, GR_SIZE_NONE for none. A value
 * above the device gives the device's total and one warning per option and device, however often this is called.
 */
uint64_t gr_options_resolve(struct gr_options *options, enum gr_option_id id, int device, uint64_t total_bytes,
                            gr_options_warn *warn, void *warn_arg);

/*
 * Parses text as a value of option into *ret_value, which has the type of the option's field (see enum gr_option_kind).
 * -EINVAL: not such a value. -ERANGE: outside min to max, or outside the range of its type. -ENAMETOOLONG: a path above
 * GR_PATH_BYTES - 1, a name above GR_NAME_BYTES - 1.
 */
int gr_option_parse(const struct gr_option *option, const char *text, void *ret_value);

/* What an error of gr_option_parse means, in words: "out of range", "too long", "not understood". */
const char *gr_option_reason(int rc);

/* The word that this value of a GR_KIND_DURATION option means; NULL: it is a time. */
const char *gr_option_word(const struct gr_option *option, uint64_t value);

/* Where options holds the value of row id. */
const void *gr_option_value(const struct gr_options *options, enum gr_option_id id);

/* Describes the values that option takes: "auto|barrier|poll|sync", "size above 0, or 1-100 %, ...". Returns buf. */
const char *gr_option_values(const struct gr_option *option, char *buf, size_t buf_bytes);

/* Writes the value of row id for people; "none" for an empty path. Returns buf, always terminated. */
const char *gr_option_format(const struct gr_options *options, enum gr_option_id id, char *buf, size_t buf_bytes);

/*
 * Hands out the effective configuration, one line per option without newline: variable, value, (source).
 */
void gr_options_dump(const struct gr_options *options, void (*line)(const char *text, void *arg), void *arg);

/*
 * Writes pattern with %p replaced by pid and %% by %, anything else as it stands. image: above 1 it stands behind pid,
 * as in 123-2. -ENAMETOOLONG where it does not fit, buf untouched.
 */
int gr_options_expand_path(const char *pattern, pid_t pid, unsigned image, char *buf, size_t buf_bytes);

/*
 * The candidate that text most likely meant; NULL: none is near enough. candidates has count entries, which may be
 * NULL. Near: at most a third of text's length in insertions, deletions, substitutions and swaps.
 */
const char *gr_options_nearest(const char *text, const char *const *candidates, size_t count);

#endif
