/* Tells why a request failed after the whole ladder, and what would have made it succeed. */
#ifndef GR_OOM_REPORT_H
#define GR_OOM_REPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/ladder_rungs.h"

struct gr_context;

struct gr_oom_report {
        struct gr_context *context;
        uint64_t bytes;      /* asked for */
        uint64_t need_bytes; /* what the driver takes for that */
        bool limited;        /* a limit refused it, not the driver */
        const uint64_t *given_bytes, *ns;
        const unsigned *tries; /* of each rung, as the two above */
};

/*
 * Logs it in at most eight lines: as a warning where a limit refused it, else as information, because a full card is
 * nothing new to a program. At most three times in ten seconds. Asks the driver; no lock of core/ is held.
 */
void gr_oom_report(const struct gr_oom_report *report);

#endif
