#include "pool.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include <utlist.h>

#define QUARANTINE_BYTES    (UINT64_C(256) << 20) /* with many streams: below it rather fresh memory than a barrier */
#define STUCK_NS            UINT64_C(50000000) /* none passed for so long: a kernel runs on, and no barrier behind it */
#define BLOCK_BYTES         112 /* with what the C library puts before it two cache lines, so that no two share one */
#define RELEASE_BATCH       64
#define RELEASE_BATCH_BYTES (UINT64_C(256) << 20) /* the driver is held up for 0.3 ms by so much */
#define VISIT_LOOK_NS       UINT64_C(20000)
#define VISIT_MOST_NS       UINT64_C(1000000000) /* a context that ends waits no longer for its visitors */
#define IDLE_BATCH_BYTES    (UINT64_C(64) << 20) /* where there is no hurry: 0.1 ms */

void gr_core_init(struct gr_core *core, const struct gr_driver *driver, const struct gr_config *config)
{
        memset(core, 0, sizeof(*core));
        core->driver = driver;
        core->config = *config;
        gr_ledger_init(&core->ledger);
        gr_foreign_init(&core->foreign);
        gr_gate_init(&core->gate);
        gr_registry_init(&core->registry);
        gr_lock_init(&core->contexts_lock, GR_RANK_CONTEXTS);
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                gr_budget_init(&core->devices[i], i);
        gr_budget_init(&core->host, -1);
        gr_pinned_init(core);
}

static void context_init(struct gr_context *context, struct gr_core *core, int device)
{
        context->core = core;
        context->device = &core->devices[device];
        gr_fence_init(context);
        gr_lock_init(&context->spilled.lock, GR_RANK_SPILLED);
        gr_arena_init(&context->first_arena, context, 0);
        atomic_init(&context->arenas[0], &context->first_arena);
        atomic_init(&context->arena_count, 1);
        gr_split_init(context);
}

static void context_fini(struct gr_context *context)
{
        for (unsigned i = 1; i < GR_SHARDS; i++)
                free(gr_arena_at(context, i));
        gr_lock_destroy(&context->spilled.lock);
        gr_split_destroy(context);
        gr_fence_destroy(context);
}

void gr_core_destroy(struct gr_core *core)
{
        struct gr_context *context, *next;

        for (context = core->contexts; context; context = next) {
                next = context->next;
                context_fini(context);
                free(context);
        }
        for (int i = 0; i < GR_DEVICES_MAX; i++)
                gr_budget_destroy(&core->devices[i]);
        gr_budget_destroy(&core->host);
        gr_pinned_destroy(core);
        gr_ledger_destroy(&core->ledger);
        gr_foreign_destroy(&core->foreign);
        gr_gate_destroy(&core->gate);
        gr_registry_destroy(&core->registry);
        gr_lock_destroy(&core->contexts_lock);
}

static struct gr_context *find_locked(struct gr_core *core, void *handle)
{
        for (struct gr_context *context = core->contexts; context; context = context->next)
                if (context->alive && context->handle == handle)
                        return context;
        return NULL;
}

struct gr_context *gr_context_find(struct gr_core *core, void *handle)
{
        struct gr_context *context;

        gr_lock(&core->contexts_lock);
        context = find_locked(core, handle);
        gr_unlock(&core->contexts_lock);
        return context;
}

static bool reach_each_other(struct gr_context *other, void *arg)
{
        struct gr_context *context = arg;

        if (other != context) {
                gr_fence_add_reach(context, other);
                gr_fence_add_reach(other, context);
        }
        return true;
}

struct gr_context *gr_context_add(struct gr_core *core, void *handle, int device)
{
        struct gr_context *context, *dead = NULL;
        bool added = false;

        gr_lock(&core->contexts_lock);
        context = find_locked(core, handle);
        if (context)
                goto out;
        for (context = core->contexts; context && !dead; context = context->next)
                if (!context->alive && context->device->ordinal == device)
                        dead = context;
        context = dead; /* empty since it was dropped */
        if (!context) {
                context = aligned_alloc(64, sizeof(*context));
                if (!context)
                        goto out;
                memset(context, 0, sizeof(*context));
                context_init(context, core, device);
                context->next = core->contexts;
                core->contexts = context;
        }
        context->handle = handle;
        context->alive = true;
        added = true;
out:
        gr_unlock(&core->contexts_lock);
        if (added) {
                gr_core_each_context(core, device, reach_each_other, context);
                gr_pinned_join(context);
        }
        return context;
}

void gr_core_each_context(struct gr_core *core, int device, bool (*visit)(struct gr_context *context, void *arg),
                          void *arg)
{
        struct gr_context *context;

        gr_lock(&core->contexts_lock);
        context = core->contexts;
        while (context) {
                bool wanted = context->alive && !context->ending && (device < 0 || context->device->ordinal == device),
                     more = true;

                if (wanted) {
                        context->visitors++;
                        gr_unlock(&core->contexts_lock);
                        more = visit(context, arg);
                        gr_lock(&core->contexts_lock);
                        context->visitors--;
                }
                context = more ? context->next : NULL; /* the list only grows, at its head */
        }
        gr_unlock(&core->contexts_lock);
}

void gr_block_uncharge(struct gr_block *block)
{
        if (block->split)
                return; /* its segment is charged, and released as a whole */
        if (block->flags & GR_BLOCK_HOST)
                gr_pinned_uncharge(block);
        else if (block->flags & GR_BLOCK_SPILLED)
                atomic_fetch_sub(&block->context->device->spilled_bytes, block->capacity_bytes);
        else
                gr_budget_release(block->context->device, block->ptr, block->capacity_bytes);
}

static void dropped(struct gr_block *block)
{
        gr_block_uncharge(block);
        free(block);
}

static bool forget_in(struct gr_context *context, void *arg)
{
        gr_fence_forget(context, arg);
        return true;
}

static bool forget_after_sync(struct gr_context *context, void *arg)
{
        struct gr_context *ending = arg;

        if (context != ending) {
                context->core->driver->context_sync(ending->handle);
                gr_fence_forget(context, ending);
        }
        return true;
}

/* Keeps visitors out and waits for those inside; for a bounded time, as one may wait for the thread that calls this. */
static void see_off(struct gr_context *context)
{
        struct gr_core *core = context->core;
        const struct gr_driver *driver = core->driver;
        uint64_t until_ns = driver->now_ns() + VISIT_MOST_NS;

        gr_lock(&core->contexts_lock);
        context->ending = true;
        while (context->visitors > 0 && driver->now_ns() < until_ns) {
                gr_unlock(&core->contexts_lock);
                driver->sleep_ns(VISIT_LOOK_NS);
                gr_lock(&core->contexts_lock);
        }
        gr_unlock(&core->contexts_lock);
}

void gr_context_stays(struct gr_context *context)
{
        gr_lock(&context->core->contexts_lock);
        context->ending = false;
        gr_unlock(&context->core->contexts_lock);
        gr_core_each_context(context->core, context->device->ordinal, reach_each_other, context);
        gr_pinned_join(context);
}

void gr_context_ending(struct gr_context *context)
{
        see_off(context);
        gr_core_each_context(context->core, -1, forget_after_sync, context);
        gr_pinned_ending(context);
}

void gr_context_drop(struct gr_context *context)
{
        struct gr_core *core = context->core;

        see_off(context);
        gr_core_each_context(core, -1, forget_in, context);
        gr_arenas_shut(context);
        gr_fence_reset(context);
        gr_split_drop(context);
        gr_ledger_drop_context(&core->ledger, context, dropped);
        gr_arenas_drop(context);
        gr_arenas_open(context);
        gr_spill_drop(context);
        gr_pinned_drop(context);
        atomic_store(&context->streams, 0);
        gr_lock(&core->contexts_lock);
        context->alive = context->ending = false; /* from now on it may serve for another context */
        gr_unlock(&core->contexts_lock);
}

struct gr_block *gr_pool_take(struct gr_context *context, size_t bytes, bool may_be_larger)
{
        unsigned own = gr_shard(), class = gr_class_of(bytes), last = class;
        size_t at_most = SIZE_MAX;
        struct gr_block *block = NULL;

        if (atomic_load_explicit(&context->fence.broken, memory_order_relaxed))
                return NULL;
        if (gr_split_active(&context->split)) {
                block = gr_split_take(context, bytes, may_be_larger);
                if (block)
                        return block; /* else what bins hold: from before the move, or sized by the driver */
        }
        if (may_be_larger) {
                /* Under pressure a block of up to twice the size is better than a failure or a stall. */
                at_most = bytes < 512 ? 1024 : 2 * bytes;
                last = gr_class_of(at_most < GR_BLOCK_MAX_BYTES ? at_most : GR_BLOCK_MAX_BYTES);
        } else if (class >= GR_CLASS_EXACT) {
                at_most = bytes + bytes / 8;
                if (at_most < gr_footprint_bytes(bytes))
                        at_most = gr_footprint_bytes(bytes);
                last = gr_class_of(at_most < GR_BLOCK_MAX_BYTES ? at_most : GR_BLOCK_MAX_BYTES);
        }
        for (unsigned i = 0; i < GR_SHARDS && !block; i++) {
                struct gr_arena *arena = gr_arena_at(context, (own + i) % GR_SHARDS);

                if (arena)
                        block = gr_arena_take(arena, class, last, bytes, at_most);
        }
        return block;
}

int gr_pool_fresh(struct gr_context *context, size_t bytes, gr_pool_allocate *allocate, void *arg,
                  struct gr_block **ret_block)
{
        struct gr_core *core = context->core;
        struct gr_device *device = context->device;
        size_t capacity = allocate ? bytes : gr_class_block_bytes(bytes);
        struct gr_block *block, *stale;
        uint64_t reserved, ptr;
        int rc;

        if (!allocate) {
                gr_split_consider(context, bytes);
                if (gr_split_active(&context->split))
                        return gr_split_grow(context, bytes, ret_block);
        }
        rc = gr_budget_reserve(device, capacity, &reserved);
        if (rc) {
                gr_count(core, GR_STAT_limit_hits, 1);
                return rc;
        }
        block = NULL;
        if (posix_memalign((void **)&block, GR_LINE_BYTES, BLOCK_BYTES)) {
                gr_budget_cancel(device, reserved);
                return -ENOMEM;
        }
        memset(block, 0, sizeof(*block));
        rc = allocate ? allocate(arg, &ptr, &capacity) : core->driver->mem_alloc(context->handle, capacity, &ptr);
        if (rc) {
                gr_budget_cancel(device, reserved);
                free(block);
                return rc;
        }
        gr_count(core, GR_STAT_driver_allocs, 1);
        rc = gr_budget_commit(device, ptr, capacity, reserved);
        if (rc)
                goto give_back;
        block->ptr = ptr;
        block->capacity_bytes = capacity;
        block->requested_bytes = bytes;
        block->context = context;
        block->class = (uint8_t)gr_class_of_block(capacity);
        block->state = GR_BLOCK_CACHED;
        rc = gr_ledger_add(&core->ledger, block, &stale);
        if (stale)
                dropped(stale);
        if (rc) {
                gr_budget_release(device, ptr, capacity);
                goto give_back;
        }
        gr_budget_note_live(device);
        gr_early_note(context);
        *ret_block = block;
        return 0;

give_back:
        if (core->driver->mem_release(context->handle, &ptr, 1, &(size_t){0}))
                core->driver->mem_free(ptr);
        free(block);
        return rc;
}

/* Whether no block of the class waits for its fence. */
static bool class_empty(struct gr_context *context, unsigned class)
{
        for (unsigned i = 0; i < GR_SHARDS; i++) {
                struct gr_arena *arena = gr_arena_at(context, i);

                if (arena && gr_bin_count(&arena->bins[class]) > 0)
                        return false;
        }
        return true;
}

bool gr_pool_barrier_is_cheap(struct gr_context *context)
{
        enum gr_reuse reuse = context->core->config.reuse;

        return reuse == GR_REUSE_BARRIER || (reuse == GR_REUSE_AUTO && gr_fence_reach(context) == 1 &&
                                             atomic_load_explicit(&context->streams, memory_order_relaxed) == 0);
}

bool gr_pool_barrier_is_safe(struct gr_context *context)
{
        return context->core->config.reuse == GR_REUSE_AUTO && gr_fence_reach(context) == 1 &&
               !atomic_load_explicit(&context->core->waits_for_others, memory_order_relaxed) &&
               gr_fence_stuck_ns(context) < STUCK_NS;
}

/*
 * A block behind a barrier that costs nothing but its call, or that another thread lays at this moment; NULL. The
 * thread's own bin comes before what is ready in those of others: one barrier readies them all, while a look at each
 * other's bins has all threads wait for all.
 */
static struct gr_block *take_behind_barrier(struct gr_context *context, size_t bytes)
{
        struct gr_arena *arena = gr_arena_own(context);
        unsigned class = gr_class_of(bytes);
        struct gr_block *block = gr_arena_take(arena, class, class, bytes, SIZE_MAX);

        if (!block && gr_fence_barrier_for(context, gr_arena_oldest_epoch(arena, class)) == 0)
                block = gr_arena_take(arena, class, class, bytes, SIZE_MAX);
        return block ? block : gr_pool_take(context, bytes, false); /* its blocks were taken; or a capture is on */
}

/* Whether the calling thread's own bin has blocks of one size for the request, none of which is usable. */
static bool own_waiting(struct gr_context *context, size_t bytes)
{
        unsigned class = gr_class_of(bytes);

        return class < GR_CLASS_EXACT && !gr_split_active(&context->split) &&
               gr_bin_count(&gr_arena_own(context)->bins[class]) > 0;
}

/* The epoch that, once usable, gives the calling thread a block for the request; UINT64_MAX: more than that has a say.
 */
static uint64_t own_oldest(struct gr_context *context, size_t bytes)
{
        uint64_t epoch =
                own_waiting(context, bytes) ? gr_arena_oldest_epoch(gr_arena_own(context), gr_class_of(bytes)) : 0;

        return epoch ? epoch : UINT64_MAX;
}

/*
 * A quarantined block made usable where that is worth it, or NULL: then fresh memory is better. A barrier costs half a
 * microsecond and, with several streams, their overlap; and a kernel that runs on and on, waiting for later work, must
 * not find a barrier in front of that work: with several streams none is laid behind an epoch that does not pass.
 */
static struct gr_block *take_fenced(struct gr_context *context, size_t bytes)
{
        enum gr_reuse reuse = context->core->config.reuse;
        bool barrier;
        struct gr_block *block;

        if (gr_split_active(&context->split)) {
                if (!gr_split_waiting(&context->split) && class_empty(context, gr_class_of(bytes)))
                        return NULL;
        } else if (class_empty(context, gr_class_of(bytes)) ||
                   (reuse == GR_REUSE_AUTO && gr_spare_take(context, bytes))) {
                return NULL;
        }
        if (gr_pool_barrier_is_cheap(context)) {
                barrier = true;
        } else {
                uint64_t bound = gr_budget_live(context->device) / 4;

                gr_fence_look_for(context, own_oldest(context, bytes));
                block = gr_pool_take(context, bytes, false);
                if (block)
                        return block;
                if (bound < QUARANTINE_BYTES)
                        bound = QUARANTINE_BYTES;
                barrier = gr_fence_quarantine_bytes(&context->fence) > bound && gr_pool_barrier_is_safe(context) &&
                          (!gr_split_active(&context->split) || gr_split_would_help(context, bytes));
        }
        if (!barrier || gr_fence_barrier(context))
                return NULL;
        return gr_pool_take(context, bytes, false);
}

/* Hands block to the program; false where it went with its context meanwhile. */
static bool hand_out(struct gr_block *block, size_t bytes, uint64_t *ret_ptr)
{
        uint64_t ptr = block->ptr;

        /* Nobody else has the block now. */
        atomic_store_explicit(&block->handouts, atomic_load_explicit(&block->handouts, memory_order_relaxed) + 1,
                              memory_order_relaxed);
        if (!gr_ledger_hand_out(block, bytes)) {
                gr_block_uncharge(block);
                free(block);
                return false;
        }
        *ret_ptr = ptr;
        return true;
}

static int alloc(struct gr_context *context, size_t bytes, gr_pool_allocate *allocate, void *arg, uint64_t *ret_ptr)
{
        struct gr_block *block = NULL;
        int rc;

        if (bytes > GR_BLOCK_MAX_BYTES)
                return -E2BIG;
        if (!allocate && context->core->config.pool != GR_POOL_NONE) {
                if (own_waiting(context, bytes) && gr_pool_barrier_is_cheap(context) &&
                    !atomic_load_explicit(&context->fence.broken, memory_order_relaxed)) {
                        if (context->core->config.reuse != GR_REUSE_AUTO || !gr_spare_take(context, bytes))
                                block = take_behind_barrier(context, bytes);
                } else {
                        block = gr_pool_take(context, bytes, false);
                        if (!block)
                                block = take_fenced(context, bytes);
                }
        }
        if (!block) {
                rc = gr_pool_fresh(context, bytes, allocate, arg, &block);
                if (rc == -ENOMEM || rc == -EDQUOT)
                        rc = gr_ladder_climb(context, bytes, allocate, arg, rc, &block);
                if (rc)
                        return rc;
        }
        return hand_out(block, bytes, ret_ptr) ? 0 : -ENOMEM;
}

int gr_pool_alloc(struct gr_context *context, size_t bytes, uint64_t *ret_ptr)
{
        uint64_t ptr = bytes <= GR_BLOCK_MAX_BYTES ? gr_arena_alloc(context, bytes) : 0;

        if (__builtin_expect(ptr != 0, 1)) {
                *ret_ptr = ptr;
                return 0;
        }
        return alloc(context, bytes, NULL, NULL, ret_ptr);
}

int gr_pool_alloc_slow(struct gr_context *context, size_t bytes, uint64_t *ret_ptr)
{
        return alloc(context, bytes, NULL, NULL, ret_ptr);
}

int gr_pool_alloc_by(struct gr_context *context, size_t expected_bytes, gr_pool_allocate *allocate, void *arg,
                     uint64_t *ret_ptr)
{
        return alloc(context, expected_bytes, allocate, arg, ret_ptr);
}

static bool bypassed(struct gr_core *core, struct gr_device *device)
{
        uint64_t until = atomic_load_explicit(&device->bypass_until_ns, memory_order_relaxed);

        if (!until)
                return false;
        if (core->driver->now_ns() < until)
                return true;
        atomic_compare_exchange_strong(&device->bypass_until_ns, &until, 0);
        return false;
}

/* As the driver would have done it, waiting included. Where that fails the program still has the block. */
static int free_by_driver(struct gr_core *core, struct gr_block *block)
{
        struct gr_block *stale;
        bool there;
        int rc;

        /* Out of the ledger first: as soon as the driver has it, another thread may get the same address. */
        there = gr_ledger_remove(&core->ledger, block);
        rc = there ? core->driver->mem_free(block->ptr) : 0;
        if (rc) {
                atomic_store(&block->state, GR_BLOCK_LIVE);
                if (gr_ledger_add(&core->ledger, block, &stale))
                        free(block);
                free(stale);
                return rc;
        }
        if (there)
                gr_count(core, GR_STAT_driver_frees, 1);
        gr_budget_release(block->context->device, block->ptr, block->capacity_bytes);
        free(block);
        return 0;
}

/* After something was cached: the helper has excess to give back, or must begin to count the time. */
static void wake_if_needed(struct gr_core *core, struct gr_device *device)
{
        if (core->wake && (gr_budget_excess(device) > 0 || (core->config.decay_ns && !atomic_load(&core->decay_armed))))
                core->wake(core);
}

/* As gr_pool_free goes on, for a range of a segment: it can go back to the driver only with its whole segment. */
static int free_split(struct gr_core *core, struct gr_block *block)
{
        struct gr_context *context = block->context;
        struct gr_fence *fence = &context->fence;
        bool never = block->flags & GR_BLOCK_EXPORTED || fence->reach_overflow ||
                     atomic_load_explicit(&fence->broken, memory_order_relaxed);
        bool by_driver = never || bypassed(core, context->device), much = false;
        uint64_t epoch = GR_SPLIT_NEVER;
        int rc;

        if (!never) {
                rc = core->config.reuse == GR_REUSE_SYNC ? gr_fence_sync(context) : -EBUSY;
                if (!rc)
                        epoch = 0;
                else if (rc == -EBUSY)
                        epoch = gr_fence_freed(fence, block->capacity_bytes);
                else
                        by_driver = true;
        }
        rc = gr_split_put(block, epoch, by_driver, &much);
        if (!rc && much)
                gr_fence_close(context);
        wake_if_needed(core, context->device);
        return rc;
}

/* After a block went into a bin. much: the epoch is to be closed. */
static int freed(struct gr_context *context, bool much)
{
        /* An epoch left open would come to cover work that starts only later. */
        if (__builtin_expect(much, 0))
                gr_fence_close_soon(context);
        wake_if_needed(context->core, context->device);
        return 0;
}

/* As gr_pool_free goes on, for host memory. */
static int free_host(struct gr_core *core, struct gr_block *block)
{
        if (block->flags & GR_BLOCK_SPILLED) {
                gr_spill_free(block);
                if (core->wake)
                        core->wake(core);
                return 0;
        }
        /* Pinned memory is freed by another call; what the driver thinks of this one, it says. */
        if (!gr_ledger_hand_out(block, block->requested_bytes))
                dropped(block);
        return -ENOENT;
}

int gr_pool_free(struct gr_core *core, uint64_t ptr)
{
        struct gr_context *context;
        struct gr_fence *fence;
        struct gr_block *block;
        bool much = false;
        int rc;

        context = gr_arena_free(core, ptr, &much);
        if (__builtin_expect(context != NULL, 1))
                return freed(context, much);
        rc = gr_ledger_claim(&core->ledger, ptr, &block);
        if (rc == -ENOENT && gr_split_find(core, ptr, &(struct gr_split_place){0}) == 0)
                return -EALREADY; /* inside a segment of ours, which the driver must not be asked to free */
        if (rc)
                return rc;
        context = block->context;
        fence = &context->fence;
        if (block->flags & (GR_BLOCK_SPILLED | GR_BLOCK_HOST))
                return free_host(core, block);
        if (block->split)
                return free_split(core, block);
        if (block->flags & GR_BLOCK_EXPORTED || core->config.pool == GR_POOL_NONE ||
            atomic_load_explicit(&fence->broken, memory_order_relaxed) || gr_fence_overflow(fence) ||
            bypassed(core, context->device))
                return free_by_driver(core, block);

        rc = core->config.reuse == GR_REUSE_SYNC ? gr_fence_sync(context) : -EBUSY;
        if (rc && rc != -EBUSY)
                return free_by_driver(core, block);
        gr_arena_put(context, block, rc == 0, &much);
        return freed(context, much);
}

/*
 * Takes idle blocks out of the bins of class, oldest first, until their footprint reaches want_bytes or one batch; none
 * that would take it beyond most_bytes.
 */
static size_t collect(struct gr_context *context, unsigned class, uint64_t at_least, uint64_t want_bytes,
                      uint64_t most_bytes, struct gr_block **blocks, size_t room)
{
        uint64_t bytes = 0;
        size_t count = 0;

        for (unsigned i = 0; i < GR_SHARDS; i++) {
                struct gr_arena *arena = gr_arena_at(context, i);
                struct gr_block *block, *tmp;

                if (!arena || gr_bin_count(&arena->bins[class]) == 0)
                        continue;
                gr_arena_lock(arena);
                DL_FOREACH_SAFE (arena->bins[class].blocks, block, tmp) {
                        uint64_t footprint = gr_footprint_bytes(block->capacity_bytes);

                        if (count == room || bytes >= want_bytes || bytes >= RELEASE_BATCH_BYTES)
                                break;
                        if (footprint < at_least || footprint > most_bytes - bytes ||
                            !gr_fence_idle(&context->fence, block->freed_epoch))
                                continue;
                        gr_bin_remove(arena, &arena->bins[class], block);
                        blocks[count++] = block;
                        bytes += footprint;
                }
                gr_arena_unlock(arena);
        }
        return count;
}

/* Gives blocks, in no bin, back to the driver. Returns the bytes that the device got back. */
static uint64_t release(struct gr_context *context, struct gr_block **blocks, size_t count)
{
        struct gr_core *core = context->core;
        uint64_t ptrs[RELEASE_BATCH] = {0}, bytes = 0;
        size_t done = 0, gone = 0; /* those whose context took their memory along */

        for (size_t i = 0, left = 0; i < count; i++) {
                struct gr_block *block = blocks[i];

                if (gr_ledger_remove(&core->ledger, block)) {
                        blocks[left] = block;
                        ptrs[left++] = block->ptr;
                } else {
                        gr_budget_release(context->device, block->ptr, block->capacity_bytes);
                        free(block);
                        gone++;
                }
        }
        count -= gone;
        if (count == 0)
                return 0;
        if (core->driver->mem_release(context->handle, ptrs, count, &done) == 0)
                done = count;
        gr_count(core, GR_STAT_released_blocks, done);
        for (size_t i = 0; i < count; i++) {
                bool back = i < done;

                if (!back && core->driver->mem_free(ptrs[i]) == 0) {
                        gr_count(core, GR_STAT_driver_frees, 1);
                        back = true;
                }
                /* What the driver refuses to take back stays charged: it still holds the memory. */
                if (back)
                        bytes += gr_budget_release(context->device, ptrs[i], blocks[i]->capacity_bytes);
                free(blocks[i]);
        }
        gr_count(core, GR_STAT_released_bytes, bytes);
        return bytes;
}

uint64_t gr_pool_trim(struct gr_context *context, uint64_t want_bytes)
{
        struct gr_block *blocks[RELEASE_BATCH];
        uint64_t back = 0;

        if (want_bytes == 0)
                return 0;
        gr_returns_begin(context->device);
        if (want_bytes <= GR_BLOCK_MAX_BYTES / 2) {
                /* One block that suffices, unless it is far too large. */
                unsigned last = gr_class_of(2 * want_bytes);

                for (unsigned class = gr_class_of(want_bytes); class <= last; class ++)
                        if (collect(context, class, want_bytes, 1, UINT64_MAX, blocks, 1) > 0) {
                                back = release(context, blocks, 1);
                                break;
                        }
        }
        for (unsigned class = GR_CLASS_COUNT; class -- > 0 && back < want_bytes;) {
                size_t count;

                do {
                        count = collect(context, class, 0, want_bytes - back, UINT64_MAX, blocks, RELEASE_BATCH);
                        if (count > 0)
                                back += release(context, blocks, count);
                } while (count > 0 && back < want_bytes);
        }
        if (back < want_bytes)
                back += gr_split_trim(context, want_bytes - back);
        if (back > 0)
                gr_spare_returned(context->core, UINT64_MAX); /* they went first or soon will */
        gr_returns_end(context->device, back);
        return back;
}

uint64_t gr_pool_release(struct gr_context *context, unsigned class, uint64_t most_bytes)
{
        struct gr_block *blocks[RELEASE_BATCH];
        uint64_t bytes = 0;
        size_t count;

        gr_returns_begin(context->device);
        if (class == GR_CLASS_COUNT) {
                bytes = gr_split_release(context, most_bytes);
                goto out;
        }
        count = collect(context, class, 0, most_bytes < IDLE_BATCH_BYTES ? most_bytes : IDLE_BATCH_BYTES, most_bytes,
                        blocks, RELEASE_BATCH);
        for (size_t i = 0; i < count; i++)
                bytes += gr_footprint_bytes(blocks[i]->capacity_bytes);
        if (count > 0) {
                release(context, blocks, count);
                gr_spare_returned(context->core, bytes);
        }
out:
        gr_returns_end(context->device, bytes);
        return bytes;
}

/* Blocks of a class below GR_CLASS_EXACT are of one size, but for a few that the driver sized. */
uint64_t gr_pool_unneeded(struct gr_context *context, unsigned class)
{
        uint64_t bytes = 0;

        if (class == GR_CLASS_COUNT)
                return gr_split_unneeded(context);
        for (unsigned i = 0; i < GR_SHARDS; i++) {
                struct gr_arena *arena = gr_arena_at(context, i);
                struct gr_block *block;
                struct gr_bin *bin;
                uint32_t left;

                if (!arena || (gr_bin_count(&arena->bins[class]) == 0 && arena->bins[class].low_count == 0))
                        continue;
                bin = &arena->bins[class];
                gr_arena_lock(arena);
                left = bin->low_count;
                bin->low_count = gr_bin_count(bin);
                if (class < GR_CLASS_EXACT && bin->blocks)
                        bytes += left * (uint64_t)gr_footprint_bytes(bin->blocks->capacity_bytes);
                else
                        for (block = bin->blocks; block && left > 0; block = block->next, left--)
                                bytes += gr_footprint_bytes(block->capacity_bytes);
                gr_arena_unlock(arena);
        }
        return bytes;
}

bool gr_pool_empty(struct gr_context *context)
{
        for (unsigned class = 0; class < GR_CLASS_COUNT; class ++)
                if (!class_empty(context, class))
                        return false;
        return gr_split_empty(context);
}

static bool maintain_one(struct gr_context *context, void *arg)
{
        bool *waiting = arg;
        uint64_t excess = gr_budget_excess(context->device);

        *waiting |= gr_spill_collect(context);
        if (excess == 0 || atomic_load(&context->fence.broken))
                return true;
        if (gr_fence_close(context) == -ENOTSUP)
                gr_fence_sync(context); /* an older driver: this thread waits, no one else */
        gr_fence_poll(context);
        gr_pool_trim(context, excess);
        if (gr_budget_excess(context->device) > 0 && gr_fence_waiting(context))
                *waiting = true;
        return true;
}

bool gr_core_maintain(struct gr_core *core)
{
        bool waiting = false;

        gr_core_each_context(core, -1, maintain_one, &waiting);
        return waiting;
}
