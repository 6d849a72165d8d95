/*
 * The trace: what GPURECLAIM_TRACE writes, and how any part of the library adds to it.
 *
 * The file is a header and then entries of 32 bytes, little endian, in batches. The process maps it, so that what is
 * written stays when the process is killed. A thread takes a batch by adding 1 to `claimed`, and fills it; what it has
 * not filled when it ends, a thread that begins later may fill. An entry is there as soon as its head is not 0, which
 * is written last. Batches lie in the order in which they were taken, entries of several threads are put in order by
 * their time. When the file cannot grow, the oldest batches are used again: `claimed` goes on, and batch n lies at
 * place n % ring.
 */
#ifndef GR_TRACE_FILE_H
#define GR_TRACE_FILE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/attributes.h"

#define GR_TRACE_MAGIC       "GRTRACE" /* with its NUL */
#define GR_TRACE_SUFFIX      ".trace"  /* as gpureclaim record names it */
#define GR_TRACE_VERSION     5         /* another one with each change of what follows, of counters, rungs or kinds */
#define GR_TRACE_BATCH       64        /* entries */
#define GR_TRACE_DEVICES     16        /* that have a name in the header */
#define GR_TRACE_BATCHES_MAX (1 << 19) /* 1 GiB */

enum gr_entry {
        GR_ENTRY_NONE,          /* not written yet */
        GR_ENTRY_HIT,           /* an allocation at address, served without the driver */
        GR_ENTRY_MISS,          /* the same, where the driver was asked or the ladder was climbed */
        GR_ENTRY_FREE,          /* the time is taken before the free, as the address may be used again at once */
        GR_ENTRY_REFUSED,       /* an allocation of bytes that failed */
        GR_ENTRY_COUNTER,       /* the counter `detail` (base/counters.def) grew by bytes */
        GR_ENTRY_RUNG,          /* the rung `detail` of the ladder ran for `address` ns and gave bytes */
        GR_ENTRY_RESERVED,      /* bytes: the device's reserved memory, of the pool and of all charged kinds */
        GR_ENTRY_KIND,          /* the device has bytes of memory of the kind `detail` (account/memory_kind.h) */
        GR_ENTRY_LIMIT,         /* the hard limit (detail 0) or the release threshold (1) is bytes from now on */
        GR_ENTRY_CAPTURE_BEGIN, /* address: its number in the process */
        GR_ENTRY_CAPTURE_END,
        /*
         * Comes before the entry of the allocation at address, by the same thread, where origins are noted as well.
         * bytes: the number of its stack's record in the file of origins (base/origins_file.h). detail: 0 where each
         * block is noted; else the sampling size is 1 << detail.
         */
        GR_ENTRY_STACK,
        /*
         * Of a context on the device bytes are in quarantine: an epoch is usable, or closed while all work is in order,
         * or a request found nothing in the cache. In the last case they are 0 where that was for no lack of a barrier.
         */
        GR_ENTRY_QUARANTINE,
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
        _Atomic uint64_t claimed, ring;
        char devices[GR_TRACE_DEVICES][64]; /* their names; "": none */
        char command[1024];                 /* words, each with its NUL */
        char rest[1992];
};

_Static_assert(sizeof(struct gr_trace_entry) == 32 && sizeof(struct gr_trace_header) == 4096, "as files have it");

/* Adds an entry to the trace; NULL: there is none. detail: below 65536. */
typedef void gr_trace_sink(enum gr_entry what, int device, unsigned detail, uint64_t address, uint64_t bytes);
extern gr_trace_sink *_Atomic gr_trace_to GR_HIDDEN;

static inline void gr_trace_add(enum gr_entry what, int device, unsigned detail, uint64_t address, uint64_t bytes)
{
        gr_trace_sink *sink = atomic_load_explicit(&gr_trace_to, memory_order_acquire);

        if (__builtin_expect(sink != NULL, 0))
                sink(what, device, detail, address, bytes);
}

#endif
