/*
 * Allocation traces in the format of RMM's replay logs: CSV with a header that names the columns, of which Thread,
 * Action, Pointer and Size are used, and Time where it is a number of nanoseconds. Lines that begin with # are skipped.
 */
#ifndef GR_TRACE_H
#define GR_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct gr_trace_op {
        uint64_t time_ns; /* since the first operation; 0 where the trace does not say */
        uint64_t bytes;   /* of the allocation, also in its free */
        uint32_t thread;  /* 0 and up, in the order of appearance */
        uint32_t slot;    /* the allocation: no two that live at one time have the same; below slot_count */
        bool is_free;
};

struct gr_trace {
        struct gr_trace_op *ops;
        size_t count;
        uint32_t slot_count, thread_count;
        uint64_t peak_live_bytes;
        size_t skipped; /* lines: frees of what the trace never allocated, failed allocations, an unfinished last one */
};

/*
 * Reads path into *ret, whose ops the caller frees. 0 or -errno; -EINVAL: not such a file, with the line in *ret_line.
 */
int gr_trace_read(const char *path, struct gr_trace *ret, size_t *ret_line);

#endif
