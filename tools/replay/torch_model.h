/*
 * The rules of PyTorch's caching allocator, as far as they decide how much memory it reserves: a model to stand beside
 * our pools without a GPU. Requests are rounded to 512 B; up to 1 MiB they come from segments of 2 MiB, up to 10 MiB
 * from segments of 20 MiB, above from segments of their own, a multiple of 2 MiB. Best fit; blocks split where the rest
 * is at least 512 B (small) or above 1 MiB (large), and merge with free neighbours at once. One stream, nothing fails,
 * so nothing is ever given back. With expandable set, there is one segment of each kind that grows by 2 MiB or 20 MiB
 * steps.
 */
#ifndef GR_TORCH_MODEL_H
#define GR_TORCH_MODEL_H

#include <stdbool.h>
#include <stdint.h>

struct gr_trace;

/* Returns the peak of reserved bytes; *ret_segments how often it asked the driver. 0: out of memory. */
uint64_t gr_torch_model(const struct gr_trace *trace, bool expandable, uint64_t *ret_segments);

#endif
