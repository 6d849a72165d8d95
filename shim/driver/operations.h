/* The driver as core/ calls it: the table of its functions, and its results as 0 or -errno. */
#ifndef GR_OPERATIONS_H
#define GR_OPERATIONS_H

#include <errno.h>

#include "shim.h"

extern struct gr_driver gr_driver;

/* This library's own stream in the context; NULL: it could not be made. */
CUstream gr_operations_stream(CUcontext context);

/* Functions that are called around calls of the driver. */
struct gr_operations_callbacks {
        void (*taking)(void);   /* memory is about to be taken */
        void (*taken)(void);    /* an allocation was served; its context is current */
        void (*going_on)(void); /* one call of many has returned: the thread makes progress (gr_neighbour_beat) */
};

/* What gr_operations_init was given. */
extern const struct gr_operations_callbacks *gr_operations_callbacks GR_HIDDEN;

/*
 * Fills gr_driver with what gr_real has, except what maps memory (mapped_memory.h) and the three functions for the
 * driver's own pools. callbacks must live as long as the process.
 */
void gr_operations_init(const struct gr_operations_callbacks *callbacks);

/*
 * Fill and read memory at once, on this library's stream in the context. Neither waits for work of the program, and
 * captures survive both. Used by the debug aids only. 0 or -errno.
 */
int gr_operations_fill(CUcontext context, uint64_t ptr, unsigned char byte, size_t bytes);
int gr_operations_read(CUcontext context, uint64_t ptr, void *to, size_t bytes);

/* The context has gone: forgets this library's stream in it. */
void gr_operations_context_gone(CUcontext context);

/* The driver's result as 0 or -errno for core/, and back. */
int gr_errno_of(CUresult result);
CUresult gr_result_of(int rc);

static inline CUresult gr_result(int rc)
{
        return __builtin_expect(rc == 0, 1) ? CUDA_SUCCESS : gr_result_of(rc);
}

/* As gr_errno_of, for allocations: NOT_READY is -ENOMEM, which makes the ladder try again. */
static inline int gr_errno_of_memory(CUresult result)
{
        return result == CUDA_ERROR_NOT_READY ? -ENOMEM : gr_errno_of(result);
}

/*
 * While the driver still finishes work of its own, it may answer NOT_READY to a call that it accepts a moment later
 * (seen with cuMemSetAccess). So such a call is repeated, a hundred times at most. False: repeat it. *tries: 0 before
 * the first call.
 */
bool gr_operations_is_final(CUresult result, unsigned *tries);

#define GR_ONCE_READY(result, call)                                                                                    \
        do {                                                                                                           \
                unsigned tries = 0;                                                                                    \
                                                                                                                       \
                do                                                                                                     \
                        (result) = (call);                                                                             \
                while (!gr_operations_is_final((result), &tries));                                                     \
        } while (0)

/* Makes context current; false where that fails, and then gr_operations_pop_context must not be called. */
bool gr_operations_push_context(void *context);
void gr_operations_pop_context(void);

/*
 * From relax until restore, calls of this thread do not disturb captures, and the driver does not refuse them because
 * of captures. Relax returns the mode to restore.
 */
CUstreamCaptureMode gr_operations_relax_captures(void);
void gr_operations_restore_captures(CUstreamCaptureMode mode);

/* The calling thread's mode; the strictest where the driver does not tell. */
CUstreamCaptureMode gr_operations_capture_mode(void);

/*
 * While a stream captures the driver refuses to allocate and to free, and breaks the capture (tests/gpu/facts,
 * capture). What the pool does is safe beside captures, as their memory has holds (core/alloc/graph_hold.h), so its
 * calls are relaxed. True: they were, and gr_operations_restore_captures has to follow. False: no capture is open, or
 * there is no pool.
 */
bool gr_operations_allow_in_captures(CUstreamCaptureMode *ret_mode);

#endif
