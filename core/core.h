/*
 * The core: everything of one process. It makes the parts of core/ and of each context, and tells them when a context
 * comes, ends and has gone. This header is for those above core/, and includes all that they need.
 *
 *   struct gr_core
 *     +-- struct gr_device         its budget (account/) and the ladder's lock
 *     +-- struct gr_ledger         each block by its address (cache/)
 *     +-- struct gr_context
 *           +-- struct gr_fence    its epochs and their events (fence/)
 *           +-- struct gr_arena    one for each shard (cache/)
 *           |     +-- struct gr_bin        the cached blocks of a size class, oldest first
 *           |     +-- struct gr_fastbins   the same of ranges, by exact size, with pool kind auto
 *           |     +-- recent               the live blocks whose home it is
 *           +-- struct gr_segments  pool kinds split and auto (segment/)
 *                 +-- struct gr_segment    addresses with extents of memory (struct gr_page)
 *                       +-- struct gr_range      what they are cut into; a used one is a block (segments_serve.h)
 *
 * The folders, from the bottom up: base/ is what any program has; context/ lists the contexts; account/ knows sizes and
 * limits; region/ is what processes share; fence/ says when freed memory may be used again; cache/ serves cached
 * memory, host/ pinned memory, segment/ mapped memory; reclaim/ gives memory back; alloc/ is an allocation and a free
 * of the program, composed of these. core/meson.build has the order of the files.
 */
#ifndef GR_CORE_H
#define GR_CORE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "account/accounted.h"
#include "account/budget.h"
#include "account/pressure.h"
#include "alloc/charge.h"
#include "alloc/graph_hold.h"
#include "alloc/ladder.h"
#include "alloc/pinned_alloc.h"
#include "base/driver.h"
#include "base/lock.h"
#include "base/options.h"
#include "base/shard.h"
#include "base/size_class.h"
#include "cache/arena.h"
#include "cache/ledger.h"
#include "cache/pool_kind.h"
#include "cache/preallocate.h"
#include "context/capture_gate.h"
#include "context/context.h"
#include "fence/fence.h"
#include "fence/fence_wait.h"
#include "host/pinned.h"
#include "host/spill.h"
#include "reclaim/decay.h"
#include "reclaim/proactive.h"
#include "reclaim/reclaimable.h"
#include "reclaim/rung.h"
#include "segment/segments_serve.h"
#include "segment/segments_trim.h"
#include "stats.h"

/*
 * All parts of the core in one structure, for the caller that makes a core. The files of core/ do not need it: struct
 * gr_core has a pointer to each part.
 */
struct gr_parts {
        struct gr_ledger ledger;
        struct gr_accounted_ledger accounted;
        struct gr_device devices[GR_DEVICES_MAX];
        struct gr_device host;
        struct gr_pinned pinned;
        struct gr_fence process_fence;
        struct gr_registry registry;
        struct gr_proactive proactive;
};

/* Initialises core and parts, whatever they contained. Both must stay valid until gr_core_destroy. */
void gr_core_init(struct gr_core *core, struct gr_parts *parts, const struct gr_driver *driver,
                  const struct gr_config *config);

/* Frees what the core allocated, not the driver's memory. No other thread may use the core meanwhile or later. */
void gr_core_destroy(struct gr_core *core);

/*
 * As gr_context_find, adding it where it is new; device is its device's ordinal. Contexts of one device can reach each
 * other's blocks by copies, so the fences of each cover all. NULL: out of memory.
 */
struct gr_context *gr_core_context_add(struct gr_core *core, void *handle, int device);

/*
 * The context is about to be destroyed. Waits for the threads that give back or look at its memory: a call of the
 * driver while the context ends would crash in the driver (docs/measurements.md, context-end). Waits for the context's
 * work too, and takes it out of all fences, so that none asks the driver about it later. The wait also covers what
 * other contexts free until it is destroyed, as long as the program submits nothing more to it. gr_core_context_gone or
 * gr_core_context_stays follows.
 */
void gr_core_context_ending(struct gr_context *context);

/*
 * The context was not destroyed: the fences of all contexts cover it again. Those on other devices do so whether or not
 * it can reach their blocks, as which of them did is forgotten, and the driver keeps its peer access.
 */
void gr_core_context_stays(struct gr_context *context);

/* The driver has destroyed the context and its memory: forgets both, without a call of the driver. */
void gr_core_context_gone(struct gr_context *context);

/*
 * Called before the program gets to submit work that may run beside work which was submitted before it: from then on a
 * freed block is handed out again only when its fence allows it. Work submitted after the call waits for what may still
 * use blocks that were handed out before. gr_core_note_overlap also sets streams_overlap.
 */
void gr_core_end_order(struct gr_core *core);
void gr_core_note_overlap(struct gr_core *core);

/*
 * Called before work of the context `by` writes to memory of other devices (a bit for each) without peer access, as
 * copies can: from now on that work waits for what may still use blocks of these devices that were handed out before.
 */
void gr_core_reach(struct gr_core *core, uint64_t devices, struct gr_context *by);

/*
 * Called before a graph of the program gets work on these devices, or work that writes to them, as kernels of a peer
 * may. Whoever launches a graph reaches all of them (gr_core_reach).
 */
void gr_core_note_graph(struct gr_core *core, uint64_t devices);

/*
 * Called before the driver gets work that waits for others: ends the order, sets waits_for_others, and returns once no
 * barrier is being laid by a thread that has not seen it. Closes the open epochs, as events recorded later would come
 * behind that work.
 */
void gr_core_will_wait(struct gr_core *core);

/*
 * As gr_core_will_wait, for work that the program itself gives to a stream. gr_core_stream_waits follows each
 * gr_core_stream_will_wait once the driver has that work; until then it is not known whether the wait is over.
 */
void gr_core_stream_will_wait(struct gr_core *core);
void gr_core_stream_waits(struct gr_core *core);

/* Called before a capture begins: closes the open epochs, as none can be closed until it ends. */
void gr_core_will_capture(struct gr_core *core);

#endif
