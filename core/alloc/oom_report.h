/*
 * Tells why a request failed after the whole ladder, and what would have made it succeed; and what is known when a
 * kernel failed.
 */
#ifndef GR_OOM_REPORT_H
#define GR_OOM_REPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/attributes.h"
#include "base/ladder_rungs.h"

struct gr_context;

struct gr_oom_report {
        struct gr_context *context;
        uint64_t bytes;              /* asked for */
        uint64_t need_bytes;         /* what the driver takes for that */
        bool block;                  /* the pool was asked for it; else the driver, and bytes may be a guess */
        bool limited;                /* a limit refused it, not the driver */
        uint64_t begin_ns;           /* of the climb */
        const uint64_t *given_bytes; /* by rung */
        const unsigned *tries;       /* by rung */
};

/* Where the program allocated memory that it has, or has freed. */
#define GR_OOM_ORIGINS 3
struct gr_oom_origin {
        double bytes, blocks;
        char where[192];
        double freed_s; /* since the newest of these was freed; 0: they are live */
};

/*
 * Writes the origins of most of a device's live memory, the largest first, and returns how many. *ret_estimated: by a
 * sample. Waits for nothing. NULL: nobody notes origins.
 */
typedef unsigned gr_oom_find_origins(int device, struct gr_oom_origin ret[GR_OOM_ORIGINS], bool *ret_estimated);
extern gr_oom_find_origins *_Atomic gr_oom_origins GR_HIDDEN;

/* The same of what the program has freed last, on any device, the newest first. */
extern gr_oom_find_origins *_Atomic gr_oom_freed GR_HIDDEN;

/*
 * Logs it in at most eight lines: as a warning where a limit refused it, else as information, because a full device is
 * nothing new to a program. At most three times in ten seconds. Asks the driver; no lock of core/ is held.
 */
void gr_oom_report(const struct gr_oom_report *report);

/* CUDA's errors of kernels that went wrong by themselves. Every later call answers with the same. */
#define GR_ERROR_ILLEGAL_ADDRESS 700
#define GR_ERROR_HARDWARE_STACK  714
#define GR_ERROR_LAUNCH_FAILED   719

static inline bool gr_error_is_of_kernel(int error)
{
        return error == GR_ERROR_ILLEGAL_ADDRESS ||
               (error >= GR_ERROR_HARDWARE_STACK && error <= GR_ERROR_LAUNCH_FAILED);
}

/*
 * Logs in at most eight lines that a kernel failed in the context: the error, which is one of these, the call of the
 * program that answered it, and what the process has. As a warning where the program's user asked for origins, else at
 * level info: many programs fail a kernel on purpose. Asks the driver nothing; no lock of core/ is held.
 */
void gr_kernel_report(struct gr_context *context, int error, const char *call);

#endif
