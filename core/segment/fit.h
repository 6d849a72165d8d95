/*
 * Where in the free ranges of segments a block is placed. The segments' lock is held.
 */
#ifndef GR_FIT_H
#define GR_FIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "segment/range.h"

/*
 * Among the smallest free ranges that gr_range_best would look at, the range and the place *ret_at in it where a block
 * opens the fewest pages. To open a page is to use part of a wholly free one, which can then be neither moved nor given
 * back. In an expandable segment for large blocks, a block that opens a page begins at its start if that opens no more
 * pages, so that fewer pages are shared. Of equal places it is one that needs no barrier. NULL: none.
 */
struct gr_range *gr_fit_find(const struct gr_free_lists *lists, size_t bytes, uint64_t last_epoch, uint64_t most_bytes,
                             uint64_t *ret_at);

/*
 * Whether a block of bytes at `at`, which lies in range, would open an extent that is large for it, where that is to be
 * avoided (gr_extents_stay_small): its first or last byte lies in such an extent, of which nothing is used.
 */
bool gr_fit_opens_large(const struct gr_range *range, uint64_t at, size_t bytes);

#endif
