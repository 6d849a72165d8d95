/*
 * Size classes: which blocks can serve which requests.
 *
 *     request          classes                 lost in a block (internal fragmentation)
 *     up to 4 KiB      every 512 B             up to 511 B
 *     up to 1 MiB      four per doubling       up to 25 %; the driver packs these blocks into slabs of 2 MiB
 *     up to 32 MiB     every 2 MiB             nothing: the driver takes whole pages of 2 MiB anyway
 *     above            eight per doubling      up to 12.5 %: a block has the pages of its first request, and a later
 *                                              request gets the best fit within the class
 */
#ifndef GR_SIZE_CLASS_H
#define GR_SIZE_CLASS_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/arith.h"

#define GR_SMALL_MAX_BYTES ((size_t)1 << 20) /* the driver packs blocks up to here into slabs */
#define GR_PAGE_BYTES      ((size_t)2 << 20) /* what the driver takes above, and the size of a slab */
#define GR_PAGE_SHIFT      21                /* of GR_PAGE_BYTES */
#define GR_BLOCK_MAX_BYTES ((size_t)1 << 40) /* larger requests have no class, and go to the driver */

#define GR_CLASS_TINY  8                                /* 512 B to 4 KiB, every 512 B */
#define GR_CLASS_SMALL (GR_CLASS_TINY + 8 * 4)          /* to 1 MiB */
#define GR_CLASS_EXACT (GR_CLASS_SMALL + 16)            /* to 32 MiB: every block of a class has the same size */
#define GR_CLASS_COUNT (GR_CLASS_EXACT + (40 - 25) * 8) /* to GR_BLOCK_MAX_BYTES */

#define GR_SEGMENTS_UNIT_BYTES ((size_t)512) /* of ranges up to 1 MiB */

#ifdef __aarch64__
#define GR_HOST_PAGE_BYTES ((size_t)64 << 10) /* the largest that kernels are built with */
#else
#define GR_HOST_PAGE_BYTES ((size_t)4 << 10)
#endif

_Static_assert(GR_PAGE_BYTES == (size_t)1 << GR_PAGE_SHIFT, "a shift finds the page");
_Static_assert(GR_SMALL_MAX_BYTES < GR_PAGE_BYTES, "a block of a slab fits in it");

/*
 * The index of the class of bytes among classes that begin above 1 << from_log2 and divide each doubling into
 * 1 << steps_log2 equal steps. bytes > 1 << from_log2.
 */
static inline unsigned gr_class_geometric(size_t bytes, unsigned from_log2, unsigned steps_log2)
{
        size_t last = bytes - 1;
        unsigned top = 63u - (unsigned)__builtin_clzll((unsigned long long)last);
        size_t step = (last >> (top - steps_log2)) & (((size_t)1 << steps_log2) - 1);

        return ((top - from_log2) << steps_log2) + (unsigned)step;
}

/* The class that serves a request; 0 < bytes <= GR_BLOCK_MAX_BYTES. */
static inline unsigned gr_class_of(size_t bytes)
{
        assert(bytes > 0 && bytes <= GR_BLOCK_MAX_BYTES);
        if (__builtin_expect(bytes > 4096 && bytes <= GR_SMALL_MAX_BYTES, 1))
                return GR_CLASS_TINY + gr_class_geometric(bytes, 12, 2);
        if (bytes <= 4096)
                return (unsigned)((bytes - 1) / 512);
        if (bytes <= 16 * GR_PAGE_BYTES)
                return GR_CLASS_SMALL + (unsigned)((bytes - 1) >> GR_PAGE_SHIFT);
        return GR_CLASS_EXACT + gr_class_geometric(bytes, 25, 3);
}

/* The largest request of the class. */
size_t gr_class_bytes(unsigned class);

/* The class of a block, which can serve all its requests, or above 32 MiB some of them; capacity_bytes >= 512. */
unsigned gr_class_of_block(size_t capacity_bytes);

/* How much to ask the driver for: up to 1 MiB what serves every request of the class, above it whole pages. */
size_t gr_class_block_bytes(size_t request_bytes);

/* What a block takes from the device: whole pages above 1 MiB; below, its share of a slab. */
static inline size_t gr_footprint_bytes(size_t capacity_bytes)
{
        if (capacity_bytes <= GR_SMALL_MAX_BYTES)
                return capacity_bytes;
        return gr_round_up(capacity_bytes, GR_PAGE_BYTES);
}

/* Whether the driver packs blocks of this size into slabs. */
static inline bool gr_is_small(size_t capacity_bytes)
{
        return capacity_bytes <= GR_SMALL_MAX_BYTES;
}

/*
 * What the sizes and addresses of ranges are multiples of. Large ones are whole pages of the host, as other devices can
 * be given nothing else (dma-buf), and natively all memory above 1 MiB begins at a page.
 */
static inline size_t gr_range_unit(bool small)
{
        return small ? GR_SEGMENTS_UNIT_BYTES : GR_HOST_PAGE_BYTES;
}

/* The size of the range that serves a request. */
static inline size_t gr_range_bytes(size_t bytes)
{
        return gr_round_up(bytes, gr_range_unit(gr_is_small(bytes)));
}

/* What the host takes for so many bytes of pinned memory: whole pages. */
static inline uint64_t gr_pinned_footprint(uint64_t bytes)
{
        return gr_round_up(bytes, UINT64_C(4) << 10);
}

#endif
