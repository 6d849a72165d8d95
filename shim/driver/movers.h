/*
 * Movers: threads that copy memory that falls asleep to host memory or files, and back to the device when it wakes
 * (sleep.h). They copy through pinned memory of their own, which they keep until the process ends.
 */
#ifndef GR_MOVERS_H
#define GR_MOVERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver/mapped_memory.h"

/* Held while the process goes to sleep, and while it wakes; also across calls of the driver. */
extern struct gr_lock gr_sleep_lock GR_HIDDEN;

/*
 * Called once, while the library is set up. folder: of files for what has no room in host memory; NULL: that stays on
 * the device. is_wanted: whether what moves out should stop, as the program wants it; any mover calls it.
 */
void gr_movers_init(const struct gr_path *folder, bool (*is_wanted)(void));

/* How much pinned memory the next move takes beside what it moves, as there is none yet. gr_sleep_lock is held. */
uint64_t gr_movers_pinned_bytes(void);

/*
 * Moves count memories of the context's device, all of them between gr_mapped_begin_move and gr_mapped_end_move: out,
 * or in, after gr_mapped_create_again. Out: up to host_bytes go to host memory, the rest to files; what has no room
 * there either stays, and is no error. gr_sleep_lock is held; the context cannot end meanwhile. Returns the bytes that
 * were moved; *ret_result: the first error, after which the rest is where it was, and CUDA_ERROR_NOT_READY where the
 * program wanted its memory.
 */
uint64_t gr_movers_move(struct gr_context *context, bool out, struct gr_memory **memories, size_t count,
                        uint64_t host_bytes, CUresult *ret_result);

#endif
