/*
 * Harness of the programs that use the CUDA driver directly.
 *
 * Everything here is for test programs: what cannot go on prints one line on stderr and ends the program, gt_die with
 * status 1; a missing device ends it with status 77 (skipped). Sizes are in bytes unless a name says words (of 4
 * bytes), times in microseconds unless a name says otherwise. Functions may be called from any thread that has the
 * context current.
 */
#ifndef GR_TEST_GPUTEST_H
#define GR_TEST_GPUTEST_H

#include "check.h"

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GT_SKIPPED 77
/* What the driver hands out above 1 MiB is made of pages of this size. */
#define GT_PAGE (2 * MIB)

struct gt {
        CUdevice device;
        CUcontext ctx; /* the device's primary context, current in the thread that called gt_open */
        CUmodule module;
        CUfunction fill, spin, late_fill, copy, count_diff, await;
        bool simulated; /* the driver is the stand-in of tools/sim */
        /* What the process held on the card once the context and kernels were there; 0 where it is not known. */
        size_t context_bytes;
};

/* Whether the driver is the stand-in; may be asked before gt_open. */
bool gt_simulated(void);
/* Initialises CUDA, takes the first device's primary context and loads the kernels. */
void gt_open(struct gt *ret);
/* Loads the kernels into whichever context is current. */
void gt_load_kernels(CUmodule *ret);
/* Makes the context current in another thread. */
void gt_attach(const struct gt *gt);
/* Synchronises and gives the context back. */
void gt_close(struct gt *gt);

/* Ends the program with status 1 and a message. */
void gt_die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
/* The exit status of a process that waitpid says this of; ends the program where a signal ended that one. */
int gt_status(const char *name, int ended);
/* CUDA's own name of a result, or "?". Never NULL; the string is static. */
const char *gt_result_name(CUresult result);

double gt_now_us(void);
void gt_sleep_us(double us);

/* A driver function that older drivers (or a simulated one) may lack: NULL when they do. */
#define GT_OPTIONAL(function) ((__typeof__(&(function)))gt_lookup(#function))
void (*gt_lookup(const char *name))(void);
/* The one of this name in a version of CUDA, as in its cuda.h or in newer.h. */
void (*gt_lookup_of(const char *name, int version))(void);

/* One launch each; the kernels of kernels.h. P, SRC, DST and COUNT are device addresses. */
CUresult gt_fill(const struct gt *gt, CUstream stream, CUdeviceptr p, uint32_t value, uint64_t words);
CUresult gt_spin(const struct gt *gt, CUstream stream, uint64_t us);
CUresult gt_late_fill(const struct gt *gt, CUstream stream, CUdeviceptr p, uint32_t value, uint64_t words, uint64_t us);
CUresult gt_copy(const struct gt *gt, CUstream stream, CUdeviceptr dst, CUdeviceptr src, uint64_t words);
CUresult gt_count_diff(const struct gt *gt, CUstream stream, CUdeviceptr p, uint32_t value, uint64_t words,
                       CUdeviceptr count);
/* How many of the first, middle and last word of so many bytes are not value. */
uint32_t gt_wrong_words(CUdeviceptr p, size_t bytes, uint32_t value);
/* Until the word at p is at least value, whoever writes it; no longer than us. */
CUresult gt_await(const struct gt *gt, CUstream stream, CUdeviceptr p, uint32_t value, uint64_t us);
/* Blocks of a launch: few, so that a waiting kernel leaves most of the card to those that should overtake it. */
#define GT_GRID  16
#define GT_BLOCK 256

/* A non-blocking stream; ends the program when there is none to be had. */
CUstream gt_stream(void);

/* What cuGraphInstantiate makes of a graph, which is destroyed then. */
CUgraphExec gt_executable(CUgraph graph);

/* A green context with a part of the card to itself, and a stream of it. False where there are none. */
struct gt_green {
        CUgreenCtx green;
        CUcontext ctx; /* to make it current */
        CUstream stream;
};
bool gt_green_open(CUdevice device, struct gt_green *ret);
void gt_green_close(struct gt_green *green);

/*
 * Memory that the process really holds on the card, whatever cuMemGetInfo tells it: the simulated device's own count,
 * or NVML's (the process's entry; without one, use of the whole card since gt_open). False when neither can be asked.
 */
bool gt_footprint(const struct gt *gt, size_t *ret_bytes);
/* What all processes hold on the card. False when it cannot be asked. */
bool gt_card_used(const struct gt *gt, size_t *ret_bytes);
/*
 * What the processes of this one's process group hold, so that nobody else's use of the card counts. False where NVML
 * lists none of them. By one thread.
 */
bool gt_group_used(size_t *ret_bytes);
/* Where gt_footprint's figure comes from, in words. */
const char *gt_footprint_source(const struct gt *gt);
/* Called by gt_open before the context exists; by others only where they never call gt_open. Needs gt->device. */
void gt_footprint_open(const struct gt *gt);

/* One line, "ok" or "FAILED", the name and what was seen; the latter counts as a failed check. One thread at a time. */
void gt_check(bool good, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));
double gt_mib(size_t bytes);

/* "64MiB", "2GiB", "4096" or "3KiB" to bytes; ends the program when it is neither. */
size_t gt_parse_size(const char *text);

/*
 * Reads "--name=value" into variables: GT_OPTIONS(argc, argv, "[--limit=SIZE]", GT_OPTION("limit", limit), ...) is the
 * index of the first other argument. A size_t is read as gt_parse_size does, a bool is a flag. Ends the program with
 * that usage where an option is unknown.
 */
enum gt_option_type { GT_FLAG, GT_SIZE, GT_INT, GT_UNSIGNED, GT_DOUBLE, GT_TEXT };
struct gt_option {
        const char *name; /* NULL ends */
        enum gt_option_type type;
        void *variable;
};
/* The formatter would break the lines of _Generic anywhere. */
/* clang-format off */
#define GT_OPTION(name, variable)                                                                                      \
        {                                                                                                              \
                name,                                                                                                  \
                _Generic((variable), bool: GT_FLAG, size_t: GT_SIZE, int: GT_INT, unsigned: GT_UNSIGNED,               \
                         double: GT_DOUBLE, const char *: GT_TEXT),                                                    \
                &(variable)                                                                                            \
        }
/* clang-format on */
#define GT_OPTIONS(argc, argv, usage, ...)                                                                             \
        gt_options(argc, argv, usage, (const struct gt_option[]){__VA_ARGS__, {NULL, GT_FLAG, NULL}})
int gt_options(int argc, char **argv, const char *usage, const struct gt_option *options);
/* How many bytes of the card an allocation of SIZE above 1 MiB takes. */
size_t gt_pages(size_t size);

/*
 * The main function of a program with many ways, of which the library remembers what it saw: with no argument each is
 * tried in a process of its own, with a name only that one, by its index. The exit status: of the one; of all that one
 * failed, or that each was skipped.
 */
int gt_ways(int argc, char **argv, size_t count, const char *(*name)(size_t way), int (*attempt)(size_t way));

/* Xorshift: the same seed gives the same numbers on every machine. *STATE must not be 0. */
uint64_t gt_random(uint64_t *state);

#endif
