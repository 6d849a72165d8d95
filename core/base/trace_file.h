/*
 * The trace: what GPURECLAIM_TRACE writes, and how any part of the library adds to it.
 *
 * The file is a header and then entries of 32 bytes, little endian, in batches. The process maps it, so that what is
 * written stays when the process is killed. A thread takes a batch by adding 1 to `claimed`, and fills it. An entry is
 * there as soon as its head is not 0, which is written last. Batches lie in the order in which they were taken, entries
 * of several threads are put in order by their time. When the file cannot grow, the oldest batches are used again:
 * `claimed` goes on, and batch n lies at place n % ring.
 */
#ifndef GR_TRACE_FILE_H
#define GR_TRACE_FILE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/attributes.h"

#define GR_TRACE_MAGIC       "GRTRACE" /* with its NUL */
#define GR_TRACE_VERSION     1         /* another one with each change of what follows, of the counters or the rungs */
#define GR_TRACE_BATCH       64        /* entries */
#define GR_TRACE_BATCHES_MAX (1 << 19) /* 1 GiB */

/* X(ID, what its fields mean) */
#define GR_ENTRIES(X)                                                                                                  \
        X(NONE, "none: not written yet")                                                                               \
        X(HIT, "an allocation at address, served without the driver")                                                  \
        X(MISS, "an allocation at address, for which the driver was asked")                                            \
        X(FREE, "a free of address; its time is before it, as the address may be used again at once")                  \
        X(REFUSED, "an allocation that failed")                                                                        \
        X(COUNTER, "the counter `detail` (base/counters.def) grew by bytes")                                           \
        X(RUNG, "the rung `detail` (base/ladder_rungs.h) ran for address ns and gave bytes")                           \
        X(LIMIT, "the hard limit of the device is bytes from now on")                                                  \
        X(CAPTURE_BEGIN, "a capture began")                                                                            \
        X(CAPTURE_END, "a capture ended")

enum gr_entry {
#define GR_ENTRY_ENUMERATOR(id, meaning) GR_ENTRY_##id,
        GR_ENTRIES(GR_ENTRY_ENUMERATOR)
#undef GR_ENTRY_ENUMERATOR
                GR_ENTRY_COUNT
};

#define GR_ENTRY_NO_DEVICE 255

struct gr_trace_entry {
        uint64_t time_ns; /* since the trace began */
        uint64_t address, bytes;
        _Atomic uint64_t head; /* thread | enum gr_entry << 32 | device << 40 | detail << 48 */
};

struct gr_trace_header {
        char magic[8];
        uint32_t version, header_bytes, entry_bytes, batch_entries;
        uint64_t pid, began_ns; /* by the clock of the day, since 1970 */
        _Atomic uint64_t claimed, batches, ring;
        char command[1024]; /* words, each with its NUL */
        char rest[3008];
};

_Static_assert(sizeof(struct gr_trace_entry) == 32 && sizeof(struct gr_trace_header) == 4096, "as files have it");

/* Adds an entry to the trace; NULL: there is none. detail: below 65536. */
typedef void gr_trace_sink(enum gr_entry what, int device, unsigned detail, uint64_t address, uint64_t bytes);
extern gr_trace_sink *_Atomic gr_trace_to GR_HIDDEN;

static inline bool gr_trace_is_on(void)
{
        return __builtin_expect(atomic_load_explicit(&gr_trace_to, memory_order_relaxed) != NULL, 0);
}

static inline void gr_trace_add(enum gr_entry what, int device, unsigned detail, uint64_t address, uint64_t bytes)
{
        gr_trace_sink *sink = atomic_load_explicit(&gr_trace_to, memory_order_acquire);

        if (__builtin_expect(sink != NULL, 0))
                sink(what, device, detail, address, bytes);
}

#endif
