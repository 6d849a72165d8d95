#include "notes/debug.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utlist.h>

#include "alloc/pool.h"
#include "base/hash.h"
#include "base/log.h"
#include "driver/operations.h"
#include "driver/real.h"
#include "fence/fence.h"
#include "fence/fence_wait.h"
#include "notes/origins.h"
#include "reclaim/reclaimable.h"
#include "system/environment.h"

#define ZONE_BYTES   ((size_t)512) /* the least of a red zone; its end is a multiple of this */
#define ZONE_BYTE    0xbd
#define KEPT_BYTE    0xdd                /* where GPURECLAIM_FILL names none */
#define CHECK_BYTES  ((size_t)256 << 10) /* read at a time */
#define TEXT_BYTES   640
#define READ_LOOK_NS ((uint64_t)20000) /* between two looks at whether a read is over */

enum state {
        LIVE,    /* the program has it */
        LEAVING, /* a thread frees it, or gives it to the pool: it has the entry, too */
        KEPT,    /* freed by the program, and in its device's queue */
        READ,    /* LIVE or KEPT; its memory and its entry stay until check_block has read it */
};

struct gr_debug_block {
        UT_hash_handle hh;
        CUdeviceptr ptr;            /* key */
        size_t bytes, zone_bytes;   /* what the program asked for; what is behind that, 0: no red zone */
        struct gr_context *context; /* it may be another one's structure by now, with another number */
        uint32_t context_number;
        uint64_t allocated_ns, freed_ns;
        uint32_t thread, stack; /* that allocated it; the stack is set when it is freed */
        enum state state;
        bool is_reported;
        struct gr_debug_block *prev, *next; /* in the queue */
};

/* Held for looks at the table and the queues only. */
static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_DEBUG);
static struct gr_debug_block *blocks GR_GUARDED_BY(lock);
static struct {
        struct gr_debug_block *first; /* freed first */
        uint64_t bytes;
} kept[GR_DEVICES_MAX] GR_GUARDED_BY(lock);

/* Whether the block's context still is. */
static bool is_of(const struct gr_debug_block *block, const struct gr_context *context)
{
        return block->context == context && block->context_number == atomic_load(&context->number);
}

/* What is done with a block while its context cannot end. */
struct visit {
        struct gr_debug_block *block;
        void (*act)(struct visit *visit);
        const char *when;         /* for a report */
        bool exported;            /* of a free of the program, as what follows */
        bool done, waited, keeps; /* set: act was called, the GPU waited for, the block goes into the queue */
        int rc;                   /* of the pool */
};

static bool act_if_there(struct gr_context *context, void *arg)
{
        struct visit *visit = arg;

        if (!is_of(visit->block, context))
                return true;
        visit->act(visit);
        visit->done = true;
        return false;
}

/* Does nothing where the context is about to end, or has. */
static void act_in_context(struct visit *visit)
{
        gr_context_each(&gr_core, visit->block->context->ordinal, act_if_there, visit);
}

GR_HELD(lock) static struct gr_debug_block *watched_at(CUdeviceptr ptr)
{
        struct gr_debug_block *block;

        gr_assert_locked(&lock);
        HASH_FIND(hh, blocks, &ptr, sizeof(ptr), block);
        return block;
}

/* Lock held. Leaves it for a moment. What it guards may be another one now. */
GR_HELD(lock) static void await_read(void)
{
        gr_assert_locked(&lock);
        gr_unlock(&lock);
        gr_driver.sleep_ns(READ_LOOK_NS);
        gr_lock(&lock);
}

/* As watched_at, but the lock is left while the block is READ. */
GR_HELD(lock) static struct gr_debug_block *settled_at(CUdeviceptr ptr)
{
        struct gr_debug_block *block;

        while ((block = watched_at(ptr)) && block->state == READ)
                await_read();
        return block;
}

/* Lock held. The block is KEPT. */
GR_HELD(lock) static void leave_queue(struct gr_debug_block *block)
{
        int device = block->context->ordinal;

        gr_assert_locked(&lock);
        DL_DELETE(kept[device].first, block);
        kept[device].bytes -= block->bytes + block->zone_bytes;
}

/* Lock held. No other thread is about to free the block. */
GR_HELD(lock) static void stop_watching(struct gr_debug_block *block)
{
        gr_assert_locked(&lock);
        if (block->state == KEPT)
                leave_queue(block);
        HASH_DEL(blocks, block);
}

/* Lock held, may be left. Enters the block, or deletes it where there is no room: then it is not watched. */
GR_HELD(lock) static void start_watching(struct gr_debug_block *block)
{
        struct gr_debug_block *stale = settled_at(block->ptr);

        if (stale && stale->state == LEAVING) { /* its thread deletes it */
                free(block);
                return;
        }
        if (stale) { /* it went without the library's knowledge */
                stop_watching(stale);
                free(stale);
        }
        HASH_ADD(hh, blocks, ptr, sizeof(block->ptr), block);
        if (!block->hh.tbl)
                free(block);
}

static unsigned char freed_byte(void)
{
        return gr_options.fill == GR_BYTE_NONE ? KEPT_BYTE : (unsigned char)gr_options.fill;
}

/* Reports bytes that are not what was written there. The caller has made sure that nothing is reported twice. */
static void report_damage(const struct gr_debug_block *block, size_t changed, size_t first, const char *when)
{
        uint64_t now_ns = gr_driver.now_ns();
        bool is_freed = block->freed_ns != 0;
        char text[TEXT_BYTES], freed[48] = "";

        gr_origins_text(block->stack ? block->stack : gr_origins_stack(block->ptr), text, sizeof(text));
        if (is_freed)
                snprintf(freed, sizeof(freed), ", freed %.3f s ago", (double)(now_ns - block->freed_ns) / 1e9);
        gr_log(GR_LOG_WARN,
               "%s: %zu %s a %sblock of %zu bytes at 0x%llx, the first at +%zu; found %s; allocated %.3f s ago by "
               "thread %u%s%s%s",
               is_freed ? "GPURECLAIM_QUARANTINE" : "GPURECLAIM_GUARD", changed,
               is_freed ? "bytes were written to" : "bytes were written behind", is_freed ? "freed " : "", block->bytes,
               (unsigned long long)block->ptr, first, when, (double)(now_ns - block->allocated_ns) / 1e9, block->thread,
               freed, text[0] ? ": " : "", text);
        gr_count(&gr_core, GR_COUNTER_debug_reports, 1);
}

/* Compares the memory from offset on with what was written there. Returns how many bytes differ; *ret_first: where. */
static size_t count_changed(const struct gr_debug_block *block, size_t offset, size_t bytes, unsigned char byte,
                            size_t *ret_first)
{
        size_t room = gr_min(bytes, CHECK_BYTES), changed = 0;
        unsigned char *copy = malloc(room);

        for (size_t at = 0; copy && at < bytes; at += room) {
                size_t part = gr_min(room, bytes - at);

                if (gr_operations_read(block->context->handle, block->ptr + offset + at, copy, part) != 0)
                        break;
                if (copy[0] == byte && memcmp(copy, copy + 1, part - 1) == 0) /* all are the same */
                        continue;
                for (size_t i = 0; i < part; i++)
                        if (copy[i] != byte && changed++ == 0)
                                *ret_first = offset + at + i;
        }
        free(copy);
        return changed;
}

/* What was written to the block that must not be; 0: nothing. */
static size_t damage_to(const struct gr_debug_block *block, size_t *ret_first)
{
        if (block->freed_ns)
                return count_changed(block, 0, block->bytes + block->zone_bytes, freed_byte(), ret_first);
        return block->zone_bytes ? count_changed(block, block->bytes, block->zone_bytes, ZONE_BYTE, ret_first) : 0;
}

static void check_watched(struct visit *visit)
{
        size_t first = 0, changed = visit->block->is_reported ? 0 : damage_to(visit->block, &first);

        if (changed)
                report_damage(visit->block, changed, first, visit->when);
}

/* Out of the table first: as soon as the pool has it, another thread may get the same address. */
static void check_and_give_back(struct visit *visit)
{
        check_watched(visit);
        gr_lock(&lock);
        stop_watching(visit->block);
        gr_unlock(&lock);
        (void)gr_pool_free_idle(&gr_core, visit->block->ptr); /* no call of the program could tell that it failed */
}

/* Gives the blocks that were freed first to the pool until the device's queue has most_bytes. */
static void shorten_queue(int device, uint64_t most_bytes, const char *when)
{
        for (;;) {
                struct visit visit = {.act = check_and_give_back, .when = when};
                struct gr_debug_block *block;

                gr_lock(&lock);
                while ((block = kept[device].bytes > most_bytes ? kept[device].first : NULL) && block->state == READ)
                        await_read();
                if (block) {
                        leave_queue(block);
                        block->state = LEAVING;
                }
                gr_unlock(&lock);
                if (!block)
                        return;
                visit.block = block;
                act_in_context(&visit);
                if (!visit.done) { /* it goes with its context */
                        gr_lock(&lock);
                        stop_watching(block);
                        gr_unlock(&lock);
                }
                free(block);
        }
}

/* Memory is short. */
static int purge_kept(void *arg, int device, uint64_t want_bytes)
{
        (void)arg;
        (void)want_bytes;
        shorten_queue(device, 0, "as memory was short");
        return 0;
}

bool gr_debug_init(void)
{
        static struct gr_reclaimable quarantine = {.name = "quarantine", .purge = purge_kept};
        const struct gr_size_list *most = &gr_options.quarantine;
        bool keeps = most->device_mask || most->all.is_percent || most->all.bytes != GR_SIZE_NONE;

        if (keeps)
                /* If this fails, the ladder cannot use the quarantine's memory. */
                (void)gr_reclaimable_register(&gr_core, &quarantine);
        if (!keeps && !gr_options.guard && gr_options.fill == GR_BYTE_NONE)
                return false;
        gr_core_end_order(&gr_core); /* what fills and reads blocks runs beside the program's work */
        return true;
}

void gr_debug_watch(struct gr_context *context, CUdeviceptr ptr, size_t bytes, size_t zone_bytes)
{
        struct gr_debug_block *block = calloc(1, sizeof(*block));

        if (gr_options.fill != GR_BYTE_NONE)
                (void)gr_operations_fill(context->handle, ptr, (unsigned char)gr_options.fill, bytes);
        if (!block)
                return;
        if (zone_bytes && gr_operations_fill(context->handle, ptr + bytes, ZONE_BYTE, zone_bytes) != 0)
                block->is_reported = true; /* it cannot be checked */
        block->ptr = ptr;
        block->bytes = bytes;
        block->zone_bytes = zone_bytes;
        block->context = context;
        block->context_number = atomic_load(&context->number);
        block->allocated_ns = gr_driver.now_ns();
        block->thread = (uint32_t)syscall(SYS_gettid);
        gr_lock(&lock);
        start_watching(block);
        gr_unlock(&lock);
}

int gr_debug_alloc(struct gr_context *context, size_t bytes, uint64_t *ret_ptr)
{
        size_t zone_bytes = gr_options.guard ? 2 * ZONE_BYTES - 1 - (bytes + ZONE_BYTES - 1) % ZONE_BYTES : 0;
        int rc = zone_bytes ? gr_pool_alloc_optional(context, bytes + zone_bytes, ret_ptr) : -ENOMEM;

        if (rc == -ENOMEM || rc == -EDQUOT || rc == -E2BIG) {
                zone_bytes = 0;
                rc = gr_pool_alloc(context, bytes, ret_ptr);
        }
        if (!rc)
                gr_debug_watch(context, *ret_ptr, bytes, zone_bytes);
        return rc;
}

/* The block at ptr as the pool has it, if the program has it still. */
static bool pool_has_live(CUdeviceptr ptr, struct gr_block_info *ret_info)
{
        return gr_ledger_find(gr_core.ledger, ptr, ret_info) == 0 && ret_info->live;
}

/*
 * Waits for the GPU and checks the block. Then it goes into the queue or to the pool. Where nothing can be waited for,
 * neither is done.
 */
static void check_and_free(struct visit *visit)
{
        struct gr_debug_block *block = visit->block;
        struct gr_fence *fence = block->context->fence;
        struct gr_device *device = block->context->device;
        int ordinal = block->context->ordinal;
        uint64_t whole_bytes = block->bytes + block->zone_bytes;
        uint64_t most_bytes = gr_options_resolve(&gr_options, GR_OPTION_QUARANTINE, ordinal,
                                                 atomic_load(&device->total_bytes), NULL, NULL);
        bool keeps = most_bytes != GR_SIZE_NONE && whole_bytes <= most_bytes && !visit->exported;
        bool fills = keeps || (gr_options.fill != GR_BYTE_NONE && !visit->exported);

        if (gr_fence_overflow(fence) || gr_fence_is_broken(fence) || gr_fence_sync(fence) != 0)
                return;
        visit->waited = true;
        check_watched(visit);
        if (fills && gr_operations_fill(block->context->handle, block->ptr, freed_byte(), whole_bytes) != 0)
                keeps = false;
        block->stack = gr_origins_stack(block->ptr);
        gr_lock(&lock);
        if (keeps) {
                visit->keeps = true;
                block->freed_ns = gr_driver.now_ns();
                block->is_reported = false;
                block->state = KEPT;
                DL_APPEND(kept[ordinal].first, block);
                kept[ordinal].bytes += whole_bytes;
        } else {
                stop_watching(block);
        }
        gr_unlock(&lock);
        if (keeps)
                shorten_queue(ordinal, most_bytes, "when it left the quarantine");
        else
                visit->rc = gr_pool_free_idle(&gr_core, block->ptr);
}

bool gr_debug_free(CUdeviceptr ptr, bool in_order, struct gr_debug_block **ret_block, int *ret_rc)
{
        struct visit visit = {0};
        struct gr_block_info info;
        bool is_freed;

        gr_lock(&lock);
        visit.block = settled_at(ptr);
        is_freed = visit.block && visit.block->state != LIVE;
        if (visit.block && !is_freed)
                visit.block->state = LEAVING;
        gr_unlock(&lock);
        if (!visit.block)
                return false;
        *ret_rc = -EALREADY;
        if (is_freed)
                return pool_has_live(ptr, &info); /* else the pool knows nothing of it any more */
        visit.act = in_order ? check_watched : check_and_free;
        visit.when = in_order ? "when it was freed in stream order" : "when it was freed";
        if (pool_has_live(ptr, &info) && (in_order || !gr_gate_is_open(&gr_core.gate))) {
                visit.exported = info.exported;
                act_in_context(&visit);
        }
        *ret_rc = visit.rc;
        if (visit.keeps) /* another thread may have deleted the block by now */
                return true;
        if (!visit.waited) {
                gr_lock(&lock);
                stop_watching(visit.block);
                gr_unlock(&lock);
        }
        *ret_block = visit.block;
        return visit.waited;
}

void gr_debug_free_end(struct gr_debug_block *block, int rc)
{
        if (!rc || rc == -ENOENT) {
                free(block);
                return;
        }
        block->state = LIVE;
        gr_lock(&lock);
        start_watching(block);
        gr_unlock(&lock);
}

void gr_debug_correct(CUdeviceptr ptr, struct gr_block_info *info)
{
        struct gr_debug_block *block;

        gr_lock(&lock);
        block = watched_at(ptr);
        if (block && block->bytes + block->zone_bytes == info->requested_bytes) {
                info->requested_bytes = block->bytes;
                info->live &= block->freed_ns == 0;
        }
        gr_unlock(&lock);
}

/* Checks the block at ptr, unless another thread does, or frees it. Nothing can give its memory back meanwhile. */
static void check_block(struct gr_context *context, CUdeviceptr ptr, const char *when)
{
        struct gr_debug_block *block, copy;
        size_t first = 0, changed;

        gr_lock(&lock);
        block = watched_at(ptr);
        if (!block || !is_of(block, context) || block->is_reported || block->state == LEAVING || block->state == READ) {
                gr_unlock(&lock);
                return;
        }
        copy = *block;
        block->state = READ;
        gr_unlock(&lock);
        changed = damage_to(&copy, &first);
        gr_lock(&lock);
        block->state = copy.state;
        block->is_reported = changed > 0;
        gr_unlock(&lock);
        if (changed)
                report_damage(&copy, changed, first, when);
}

/* Checks the blocks of a context, arg or, where that is NULL, of each. */
static bool check_context(struct gr_context *context, void *arg)
{
        struct gr_debug_block *block, *tmp;
        CUdeviceptr *ptrs;
        size_t count = 0;

        if (arg && arg != context)
                return true;
        gr_lock(&lock);
        ptrs = calloc(HASH_COUNT(blocks) + 1, sizeof(*ptrs));
        HASH_ITER (hh, blocks, block, tmp)
                if (ptrs && is_of(block, context))
                        ptrs[count++] = block->ptr;
        gr_unlock(&lock);
        for (size_t i = 0; i < count; i++)
                check_block(context, ptrs[i], arg ? "as its context ended" : "as the process ended");
        free(ptrs);
        return !arg;
}

void gr_debug_check(struct gr_context *context)
{
        gr_context_each(&gr_core, -1, check_context, context);
}

void gr_debug_context_gone(struct gr_context *context)
{
        struct gr_debug_block *block, *tmp;

        gr_lock(&lock);
        HASH_ITER (hh, blocks, block, tmp)
                if (block->context == context && !is_of(block, context) && block->state != LEAVING) {
                        stop_watching(block);
                        free(block);
                }
        gr_unlock(&lock);
}
