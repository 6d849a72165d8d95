/*
 * Deep sleep: after the memory of the pool has left the device (sleep.h), the driver's checkpoint takes the rest of the
 * process away, too: contexts, code, graphs, and memory that bypasses the pool. The process does that to itself, and
 * restores itself: nobody else has to live for it.
 *
 * While it lasts nearly every call of the driver waits until the process is unlocked, some crash, and few return at
 * once (docs/measurements.md, checkpoints). So the gate stands in front of all of them then, and the library's own
 * threads leave the driver alone (GR_OWN_CALLS).
 *
 * A restore that fails loses the process: the driver does not repeat it. So there is no deep sleep where one would fail
 * (gr_deep_never), and no restore before there is room.
 */
#ifndef GR_DEEP_SLEEP_H
#define GR_DEEP_SLEEP_H

#include <stdbool.h>
#include <stdint.h>

#include "region/region.h"
#include "shim.h"

/* From now on the process does not sleep deeply. Any thread may call it. */
void gr_deep_never(enum gr_deep_reason reason);

/*
 * Takes the process off its devices. The gate is shut, nobody is inside, and no GPU work is pending; host_bytes: the
 * most host memory that it may take; is_wanted: whether a call waits at the gate, so that it must not begin. 0, or why
 * it did not: then all is as before. It is called, as what follows, by one thread at a time.
 */
uint64_t gr_deep_begin(uint64_t host_bytes, bool (*is_wanted)(void));

/*
 * Brings it back, once there is room; asks neighbours for some, and waits for it until until_ns, or until *stop. After
 * an error the process is as it was, as far as the driver leaves it so.
 */
CUresult gr_deep_end(uint64_t until_ns, const _Atomic bool *stop);

/* Whether no one has locked or checkpointed this process. */
bool gr_deep_is_running(void);

#endif
