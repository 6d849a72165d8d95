/*
 * Allocation traces: files of GPURECLAIM_TRACE (base/trace_file.h), and RMM's replay logs. These are CSV with a header
 * that names the columns, of which Thread, Action, Pointer and Size are used, and Time where it is a number of
 * nanoseconds. Lines that begin with # are skipped.
 */
#ifndef GR_TRACE_H
#define GR_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account/memory_kind.h"
#include "base/counters.h"
#include "base/trace_file.h"

#define GR_TRACE_NO_STACK UINT32_MAX

struct gr_trace_op {
        uint64_t time_ns; /* since the first operation; 0 where the trace does not say */
        uint64_t ptr;
        uint64_t bytes;  /* of the allocation, also in its free */
        uint32_t thread; /* 0 and up, in the order of appearance */
        uint32_t slot;   /* the allocation: no two that live at one time have the same; below slot_count */
        uint32_t stack;  /* of the allocation, in the file of origins beside the trace; GR_TRACE_NO_STACK: not noted */
        uint8_t device;  /* 0 where the trace does not say */
        bool is_free, is_miss; /* is_miss: the driver was asked, or the ladder was climbed */
        uint8_t sample_log2;   /* the sampling size then is 1 << sample_log2; 0: each block is noted */
};

struct gr_trace {
        struct gr_trace_op *ops;
        size_t count;
        uint32_t slot_count, thread_count;
        uint64_t peak_live_bytes;
        uint64_t *thread_ids; /* by number: as the file has them */
        size_t skipped; /* lines: frees of what the trace never allocated, failed allocations, an unfinished last one */

        /* Only from a file of GPURECLAIM_TRACE. */
        struct gr_trace_header *header; /* its texts end and are printable; NULL: another file */
        bool begin_is_missing;
        /* Blocks that are left out, as they may have been freed in the missing part. */
        size_t doubtful_count;
        uint64_t doubtful_bytes;
        uint64_t first_ns; /* of the first operation, since the trace began */
        struct gr_trace_event {
                uint64_t time_ns; /* since the first operation; 0 before it */
                uint64_t address, bytes;
                uint32_t thread; /* as the file has it */
                uint16_t detail;
                uint8_t what, device;
        } * events; /* all that are neither operations nor steps of counters, in the order of time */
        size_t event_count;
        size_t counts[GR_ENTRY_COUNT]; /* entries */
        struct gr_counters counters;   /* their sums */
        uint64_t peak_reserved_bytes[GR_TRACE_DEVICES];
        struct gr_trace_kind {
                uint64_t peak_bytes, end_bytes;
        } kinds[GR_TRACE_DEVICES + 1][GR_MEMORY_KIND_COUNT]; /* of each device, the host last */
};

/*
 * Reads path into *ret, for gr_trace_free. 0 or -errno; -EINVAL: it is no trace, with the line in *ret_line;
 * -EPROTONOSUPPORT: a trace of another version.
 */
int gr_trace_read(const char *path, struct gr_trace *ret, size_t *ret_line);
void gr_trace_free(struct gr_trace *trace);

/* Makes words of a file's header, each with its NUL, one printable text with a NUL. They may be any bytes before. */
void gr_trace_make_text(char *text, size_t bytes);

#endif
