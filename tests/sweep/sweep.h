/*
 * The fault sweep: what its program is made of. sweep.c runs scenes in processes of their own, each with one fault, and
 * judges them; scenes.c lists the scenes, which are in scenes_*.c; libc.c stands in for the functions of the C library
 * that the library calls.
 */
#ifndef GR_TEST_SWEEP_H
#define GR_TEST_SWEEP_H

#include <cuda.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "check.h"

enum sweep_symbol {
#define SIM_EXPORT(name, version, symbol)                        SWEEP_##symbol,
#define SIM_EXPORT_PT(name, version, pt_version, symbol, suffix) SWEEP_##symbol, SWEEP_##symbol##suffix,
#include "../../tools/sim/exports.def"
#undef SIM_EXPORT
#undef SIM_EXPORT_PT
        SWEEP_SYMBOLS
};

/* Functions of the C library that fail, where the library calls them, by returning `failed` with an errno. */
#define SWEEP_FUNCTIONS(X)                                                                                             \
        X(malloc)                                                                                                      \
        X(calloc)                                                                                                      \
        X(realloc)                                                                                                     \
        X(aligned_alloc)                                                                                               \
        X(pthread_create)                                                                                              \
        X(open)                                                                                                        \
        X(openat)                                                                                                      \
        X(mkdir)                                                                                                       \
        X(stat)                                                                                                        \
        X(lstat)                                                                                                       \
        X(fstat)                                                                                                       \
        X(flock)                                                                                                       \
        X(fcntl)                                                                                                       \
        X(ftruncate)                                                                                                   \
        X(read)                                                                                                        \
        X(pread)                                                                                                       \
        X(write)                                                                                                       \
        X(pwrite)                                                                                                      \
        X(unlinkat)                                                                                                    \
        X(kill)                                                                                                        \
        X(madvise)                                                                                                     \
        X(shmget)                                                                                                      \
        X(shmat)                                                                                                       \
        X(shmctl)                                                                                                      \
        X(syscall)                                                                                                     \
        X(dlopen)                                                                                                      \
        X(getrandom)                                                                                                   \
        X(socket)                                                                                                      \
        X(bind)                                                                                                        \
        X(listen)                                                                                                      \
        X(accept4)                                                                                                     \
        X(connect)                                                                                                     \
        X(getsockopt)                                                                                                  \
        X(setsockopt)                                                                                                  \
        X(poll)                                                                                                        \
        X(sendmsg)                                                                                                     \
        X(recvmsg)

enum sweep_function {
#define FUNCTION(name) SWEEP_CALL_##name,
        SWEEP_FUNCTIONS(FUNCTION)
#undef FUNCTION
                SWEEP_CALLS
};

#define SWEEP_ERRNO  999  /* what functions of the C library leave when the library called them, faults or not */
#define SWEEP_SHORT  1000 /* instead of an errno: half of it is read or written */
#define SWEEP_ERRORS 8
#define SWEEP_TEXT   160

/* What a process says of its run, in memory that it shares with whoever judges. */
struct sweep_report {
        atomic_ulong calls[SWEEP_CALLS];      /* of the library to the C library, those at its end among them */
        unsigned long symbols[SWEEP_SYMBOLS]; /* calls of the driver until the scene was over */
        atomic_bool refused;                  /* the C library's fault happened */
        struct {
                char call[48];
                int code;
                bool twice; /* the same call failed again, without a fault */
        } errors[SWEEP_ERRORS];
        atomic_uint error_count;
        char wrong[SWEEP_TEXT];         /* a fact that is not as it must be; empty: none */
        bool unhelped;                  /* by the other process */
        bool over;                      /* the scene came to its end */
        size_t free_bytes, total_bytes; /* once everything is freed, as the program is told */
        unsigned blocks;                /* that could be had then, until memory was short */
        uint64_t live_bytes;            /* by the library's own figures then; 0 natively */
        size_t used_bytes;              /* of the card, once the context was gone */
        unsigned lines;                 /* and entries of the files that the library wrote; seen by the judge */
};

extern struct sweep_report *sweep_report;

/* One fault of the C library for this process; nth counts from 1, 0: none. */
extern struct sweep_plan {
        enum sweep_function function;
        unsigned long nth;
        int error; /* an errno, or SWEEP_SHORT */
} sweep_plan;

extern bool sweep_beside; /* other threads take memory meanwhile: what is free says nothing */

/* The addresses of the library; both 0 where it is not loaded. */
void sweep_find_library(void);
bool sweep_has_library(void);

/* With the exported symbol that cuda.h makes of a name. */
#define SWEEP_STRING(...)  SWEEP_STRING_(__VA_ARGS__)
#define SWEEP_STRING_(...) #__VA_ARGS__

/* A call that has to succeed, and to keep errno. One that fails is told, and tried again: a fault comes only once. */
#define TRY(call)                                                                                                      \
        do {                                                                                                           \
                CUresult try_result;                                                                                   \
                                                                                                                       \
                errno = 0;                                                                                             \
                try_result = (call);                                                                                   \
                if (errno == SWEEP_ERRNO)                                                                              \
                        sweep_wrong("%s changed errno", SWEEP_STRING(call));                                           \
                if (try_result != CUDA_SUCCESS) {                                                                      \
                        sweep_error(SWEEP_STRING(call), try_result, false);                                            \
                        try_result = (call);                                                                           \
                        if (try_result != CUDA_SUCCESS)                                                                \
                                sweep_error(SWEEP_STRING(call), try_result, true);                                     \
                }                                                                                                      \
        } while (0)
/* Ends the process where it failed twice. */
void sweep_error(const char *call, CUresult result, bool twice);
/* Tells a fact that is not as it must be; the first one stays. */
void sweep_wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));

struct sweep_scene {
        const char *name;
        void (*run)(void);
        const char *settings[8]; /* NAME=VALUE, NULL ends; FOLDER in a value stands for a folder of this run */
        bool any_pool;           /* worth a run with each kind of pool */
        bool helped;             /* by another process; without it there may be less memory */
        bool keeps;              /* without memory for structures, a block of a graph is kept for good */
};

extern const struct sweep_scene sweep_scenes[];
extern const size_t sweep_scene_count;

/* Once a scene has freed everything: whether all memory can be had, and the figures. */
void sweep_finish(void);

#endif
