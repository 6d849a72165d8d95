#include "cache/arena.h"

#include <assert.h>

#include <utlist.h>

#include "account/budget.h"
#include "base/address_table.h"
#include "base/arith.h"
#include "base/attributes.h"
#include "base/lock.h"
#include "base/metadata.h"
#include "base/shard.h"
#include "base/size_class.h"
#include "base/thread.h"
#include "cache/ledger.h"
#include "cache/pool_kind.h"
#include "context/context.h"
#include "fence/fence.h"

#define PEAK_LOOK_HITS 64 /* hits between looks at the peak of live memory */
#define GENERATIONS    64 /* an arena takes so many of them at once */
/*
 * How much fastbins may hold in ranges above 1 MiB (gr_arena_fastbins_have_room); a share of 16 is a 16th of the peak
 * of live memory.
 */
#define FASTBIN_SHARE       64                  /* those of all arenas together */
#define FASTBIN_LEAST_BYTES (UINT64_C(2) << 20) /* those of one arena, in any case */
#define FASTBIN_ONE_SHARE   16                  /* one block in an arena, where several threads allocate */
#define FASTBIN_MOST_SHARE  2                   /* one block in an arena, if it is at least so much of the peak */

_Static_assert(offsetof(struct gr_block, kind) == GR_LINE_BYTES, "a hit needs one cache line of the block");
_Static_assert(offsetof(struct gr_arena, cached.next) == GR_LINE_BYTES, "and one of its arena");
_Static_assert(GR_SHARDS < UINT8_MAX && GR_CLASS_COUNT <= UINT8_MAX, "both have one byte in a block");

void gr_arena_init(struct gr_arena *arena, struct gr_context *context, unsigned shard)
{
        /* A keeper that is added twice would make the list of keepers a ring */
        assert(shard < GR_SHARDS && !arena->context);
        arena->context = context;
        arena->shard = shard;
        gr_budget_keep(context->device, &arena->cached);
        gr_fastbins_begin(&arena->fastbins, context->device);
}

static __attribute__((noinline)) struct gr_arena *make_own(struct gr_context *context, unsigned shard)
{
        struct gr_arena *arena, *none = NULL;

        arena = gr_metadata_alloc(sizeof(*arena));
        if (!arena)
                return context->first_arena;
        arena->context = context;
        arena->shard = shard;
        gr_arena_lock(arena); /* so that no thread of this shard puts a block into it before it is a keeper */
        if (atomic_compare_exchange_strong(&context->arenas[shard], &none, arena)) {
                gr_budget_keep(context->device, &arena->cached);
                gr_fastbins_begin(&arena->fastbins, context->device);
        }
        gr_arena_unlock(arena);
        if (none) { /* a thread of the same shard was faster */
                gr_metadata_free(arena, sizeof(*arena));
                return none;
        }
        if (atomic_fetch_add(&context->arena_count, 1) + 1 >= GR_SEGMENTS_MANY_ARENAS &&
            context->core->config.pool == GR_POOL_AUTO)
                atomic_store(&context->segments_least_bytes, GR_SMALL_MAX_BYTES);
        return arena;
}

struct gr_arena *gr_arena_own(struct gr_context *context)
{
        unsigned shard = gr_shard();
        struct gr_arena *arena = gr_arena_at(context, shard);

        return __builtin_expect(arena != NULL, 1) ? arena : make_own(context, shard);
}

static struct gr_block **recent_place(struct gr_arena *arena, uint64_t ptr)
{
        return &arena->recent[gr_address_hash(ptr) >> (64 - GR_RECENT_LOG2)];
}

/*
 * Prefetches the block that place points to. Loads after the lock begin only when the lock is taken, and the block is
 * mostly not in the processor's caches. The pointer is read without the lock, so it is only a hint.
 */
static inline __attribute__((no_sanitize("thread"))) void prefetch_block(struct gr_block **place)
{
        __builtin_prefetch(*(struct gr_block *volatile *)place, 1);
}

/*
 * Whether the context's arenas are not quiesced. Arena lock held. The load is sequentially consistent, because
 * gr_arenas_quiesce may have missed an arena that was made meanwhile.
 */
static bool may_hit(struct gr_context *context)
{
        gr_lock_rank_assert_held(GR_RANK_ARENA);
        return atomic_load(&context->arenas_quiesced) == 0;
}

/* The state of a block whose home is this arena. */
static inline uint16_t state_at_home(const struct gr_arena *arena)
{
        return (uint16_t)((arena->shard + 1) << GR_HOME_SHIFT | GR_BLOCK_LIVE);
}

/* Appends block to its bin. Arena lock held. */
static inline void put_in_bin(struct gr_arena *arena, struct gr_block *block)
{
        struct gr_bin *bin = &arena->bins[block->class];
        /* A local, as the compiler would load bin->blocks again after each store */
        struct gr_block *first = bin->blocks;

        gr_assert_spin_locked(&arena->lock, GR_RANK_ARENA);
        assert(!gr_block_is_live(block)); /* CACHED, or GONE by now */
        assert(block->context == arena->context && block->class == gr_class_of_block(block->capacity_bytes));
        assert(!(block->flags &
                 (GR_BLOCK_RANGE | GR_BLOCK_HOST | GR_BLOCK_SPILLED))); /* these have lists of their own */
        assert((gr_bin_count(bin) == 0) == (first == NULL));
        assert(!first || block->freed_epoch == 0 || first->prev->freed_epoch <= block->freed_epoch);
        DL_APPEND(first, block);
        bin->blocks = first;
        atomic_store_explicit(&bin->count, gr_bin_count(bin) + 1, memory_order_relaxed);
        bin->frees++;
        gr_cached_add(&arena->cached, (int64_t)gr_footprint_bytes(block->capacity_bytes));
}

/* Takes block out of bin, whose first block is first. Arena lock held. */
static inline void remove_from(struct gr_arena *arena, struct gr_bin *bin, struct gr_block *first,
                               struct gr_block *block)
{
        uint32_t count = gr_bin_count(bin) - 1;

        gr_assert_spin_locked(&arena->lock, GR_RANK_ARENA);
        assert(!gr_block_is_live(block));
        assert(bin == &arena->bins[block->class] && bin->low_water <= gr_bin_count(bin));
        DL_DELETE(first, block);
        assert((count == 0) == (first == NULL));
        bin->blocks = first;
        atomic_store_explicit(&bin->count, count, memory_order_relaxed);
        if (count < bin->low_water)
                bin->low_water = count;
        gr_cached_add(&arena->cached, -(int64_t)gr_footprint_bytes(block->capacity_bytes));
}

/*
 * Updates the peak of live memory. That reads a cache line of each arena which its hits write, so it is done less often
 * the more arenas there are. Arena lock held.
 */
static __attribute__((noinline)) void note_live(struct gr_arena *arena)
{
        unsigned arenas = atomic_load_explicit(&arena->context->arena_count, memory_order_relaxed);

        gr_assert_spin_locked(&arena->lock, GR_RANK_ARENA);
        gr_budget_update_peak(arena->context->device);
        arena->note_at = arena->hits + (uint64_t)PEAK_LOOK_HITS * arenas;
}

/* Counts a served request. Arena lock held. */
static inline void count_hit(struct gr_arena *arena)
{
        gr_assert_spin_locked(&arena->lock, GR_RANK_ARENA);
        if (__builtin_expect(++arena->hits >= arena->note_at, 0))
                note_live(arena);
}

/*
 * Counts bytes as freed now and returns the epoch of that. *ret_should_close: the arena has freed so much into the
 * epoch that it should be closed. Arena lock held.
 */
static inline uint64_t note_freed(struct gr_arena *arena, struct gr_fence *fence, uint64_t bytes,
                                  bool *ret_should_close)
{
        uint64_t epoch = gr_fence_note_freed_into(fence, arena->shard, bytes);
        uint64_t before = arena->open_epoch == epoch ? arena->open_bytes : 0;

        gr_assert_spin_locked(&arena->lock, GR_RANK_ARENA);
        assert(bytes > 0 && epoch >= arena->open_epoch);
        arena->open_epoch = epoch;
        arena->open_bytes = before + bytes;
        *ret_should_close =
                __builtin_expect(arena->open_bytes / GR_FENCE_CLOSE_BYTES != before / GR_FENCE_CLOSE_BYTES, 0) &&
                arena->open_bytes >= gr_fence_close_bytes(fence); /* checked once for each GR_FENCE_CLOSE_BYTES */
        if (*ret_should_close)
                arena->open_bytes = 0; /* else each free would ask again while a capture keeps the epoch open */
        return epoch;
}

/* Whether the fast path may hand out block, which is in a bin or fastbin. Arena lock held. */
static inline bool may_hand_out(const struct gr_block *block, struct gr_context *context, struct gr_fence *fence)
{
        gr_lock_rank_assert_held(GR_RANK_ARENA);
        return __builtin_expect(gr_fence_usable(fence, block->freed_epoch), 1) && may_hit(context) &&
               atomic_load_explicit(&block->state, memory_order_relaxed) == GR_BLOCK_CACHED &&
               !gr_fence_is_broken(fence);
}

/* Hands a block that may_hand_out allows, in no list, to the program, with this arena as its home. Arena lock held. */
static inline uint64_t hand_out_at_home(struct gr_arena *arena, struct gr_block *block, uint32_t generation,
                                        size_t bytes)
{
        uint64_t ptr = block->ptr;
        struct gr_block **place = recent_place(arena, ptr);

        gr_assert_spin_locked(&arena->lock, GR_RANK_ARENA);
        assert(atomic_load(&block->state) == GR_BLOCK_CACHED);
        assert(!*place || atomic_load(&(*place)->state) == state_at_home(arena));
        assert(block->context == arena->context && bytes > 0 && bytes <= block->capacity_bytes);
        if (*place)
                atomic_store_explicit(&(*place)->state, GR_BLOCK_LIVE, memory_order_release);
        *place = block;
        gr_block_set_generation(block, generation);
        atomic_store_explicit(&block->requested_bytes, bytes, memory_order_relaxed);
        atomic_store_explicit(&block->state, state_at_home(arena), memory_order_release);
        count_hit(arena);
        return ptr;
}

/* Remembers the arena of the thread's last hit: the fast path of the thread's frees looks there. */
static inline void remember_arena(struct gr_arena *own)
{
        if (gr_thread.hit_arena != own)
                gr_thread.hit_arena = own;
}

/* The generation of the next range that this arena hands out; no other arena has the same. Arena lock held. */
static uint32_t next_generation(struct gr_arena *arena)
{
        gr_assert_spin_locked(&arena->lock, GR_RANK_ARENA);
        if (arena->generation % GENERATIONS == 0) /* all that it took are used up */
                arena->generation = atomic_fetch_add(&arena->context->generations, GENERATIONS);
        return ++arena->generation;
}

uint64_t gr_arena_fastbins_most(struct gr_arena *arena)
{
        struct gr_context *context = arena->context;
        uint64_t peak = atomic_load_explicit(&context->device->peak_live_bytes, memory_order_relaxed);

        return gr_max(peak / FASTBIN_SHARE / atomic_load_explicit(&context->arena_count, memory_order_relaxed),
                      FASTBIN_LEAST_BYTES);
}

bool gr_arena_fastbins_have_room(struct gr_arena *arena, uint64_t bytes)
{
        struct gr_context *context = arena->context;
        uint64_t large = gr_fastbins_large_bytes(&arena->fastbins);
        uint64_t peak = atomic_load_explicit(&context->device->peak_live_bytes, memory_order_relaxed);
        unsigned arenas = atomic_load_explicit(&context->arena_count, memory_order_relaxed);

        if (gr_is_small(bytes))
                return true;
        if (large == 0 && (bytes >= peak / FASTBIN_MOST_SHARE || (arenas > 1 && bytes <= peak / FASTBIN_ONE_SHARE)))
                return true;
        return large + bytes <= gr_arena_fastbins_most(arena);
}

/*
 * The fast path: gr_arena_alloc and gr_arena_free, and what else only they need. A hit takes one lock, the arena's, and
 * looks nothing up. Of the block it needs the first cache line; of the arena the first, the bin's and one of recent[];
 * of the fence one, and for a free its counter's.
 *
 * It is left for the slow path where the thread's arena has not been made, the fence is broken, or
 * - an allocation: the bin or fastbin is empty; its oldest block is not usable yet, too small or GONE; the class is one
 *   of several sizes (from GR_CLASS_EXACT on); the arenas are quiesced;
 * - a free: the arena of the thread's last hit does not remember the block; the block has another flag, such as
 *   EXPORTED; the fastbins are full; the fence does not cover all contexts; the thread bypasses the cache; each free
 *   waits for the GPU (GR_REUSE_SYNC).
 */

/* As gr_arena_alloc, for a request that segments serve. */
GR_HOT_CODE static __attribute__((noinline)) uint64_t alloc_from_fastbin(struct gr_context *context, size_t bytes)
{
        struct gr_arena *arena = gr_arena_at(context, gr_shard());
        struct gr_block *block;
        uint64_t ptr = 0;

        if (!arena || !gr_fastbins_may_have(&arena->fastbins, bytes))
                return 0;
        gr_arena_lock(arena);
        block = gr_fastbin_find(&arena->fastbins, gr_range_bytes(bytes));
        if (block && may_hand_out(block, context, context->fence)) {
                gr_fastbin_leave(&arena->fastbins, block);
                ptr = hand_out_at_home(arena, block, next_generation(arena), bytes);
                remember_arena(arena);
        }
        gr_arena_unlock(arena);
        return ptr;
}

GR_HOT_CODE uint64_t gr_arena_alloc(struct gr_context *context, size_t bytes)
{
        struct gr_block *block;
        struct gr_fence *fence;
        struct gr_arena *arena;
        struct gr_bin *bin;
        uint64_t ptr = 0;
        unsigned class;

        if (__builtin_expect(gr_pool_kind_segments_serve(context, bytes), 0))
                return alloc_from_fastbin(context, bytes);
        class = gr_class_of(bytes);
        arena = gr_arena_at(context, gr_shard());
        if (__builtin_expect(!arena || class >= GR_CLASS_EXACT, 0))
                return 0;
        bin = &arena->bins[class];
        fence = context->fence;
        __builtin_prefetch(fence);
        prefetch_block(&bin->blocks);
        gr_arena_lock(arena);
        block = bin->blocks;
        if (__builtin_expect(block && block->capacity_bytes >= bytes && may_hand_out(block, context, fence), 1)) {
                remove_from(arena, bin, block, block);
                bin->hits++;
                ptr = hand_out_at_home(arena, block, gr_block_next_generation(block), bytes);
                remember_arena(arena);
        }
        gr_arena_unlock(arena);
        return ptr;
}

/*
 * As gr_arena_free, for a block whose home is this arena and whose flags are these. False: there is no such block.
 * Inlined: it is a third of the cost of an allocation and its free.
 */
static inline __attribute__((always_inline)) bool take_back(struct gr_arena *arena, uint64_t ptr, uint8_t flags,
                                                            bool *ret_should_close)
{
        struct gr_context *context = arena->context;
        struct gr_fence *fence = context->fence;
        struct gr_block *block, **place = recent_place(arena, ptr);

        __builtin_prefetch(context->device);
        __builtin_prefetch(fence);
        __builtin_prefetch(&fence->arena_freed_bytes.shards[arena->shard], 1);
        prefetch_block(place);
        gr_arena_lock(arena);
        block = *place;
        if (__builtin_expect(
                    !block || block->ptr != ptr || atomic_load_explicit(&block->flags, memory_order_relaxed) != flags ||
                            gr_fence_is_broken(fence) || gr_fence_overflow(fence) || gr_thread.bypass_until_ns ||
                            (flags == GR_BLOCK_RANGE && !gr_arena_fastbins_have_room(arena, block->capacity_bytes)),
                    0)) {
                gr_arena_unlock(arena);
                return false;
        }
        assert(atomic_load(&block->state) == state_at_home(arena));
        *place = NULL;
        block->freed_epoch = note_freed(arena, fence, block->capacity_bytes, ret_should_close);
        atomic_store_explicit(&block->state, GR_BLOCK_CACHED, memory_order_release);
        if (flags == GR_BLOCK_RANGE)
                gr_fastbin_take_back(&arena->fastbins, block);
        else
                put_in_bin(arena, block);
        gr_arena_unlock(arena);
        return true;
}

/* As gr_arena_free, for a range that arena, which may be NULL, remembers. */
GR_HOT_CODE static __attribute__((noinline)) struct gr_context *
take_back_range(struct gr_core *core, struct gr_arena *arena, uint64_t ptr, bool *ret_should_close)
{
        if (core->config.pool != GR_POOL_AUTO || core->config.reuse == GR_REUSE_SYNC || !arena ||
            !gr_pool_kind_has_segments(arena->context))
                return NULL;
        return take_back(arena, ptr, GR_BLOCK_RANGE, ret_should_close) ? arena->context : NULL;
}

GR_HOT_CODE struct gr_context *gr_arena_free(struct gr_core *core, uint64_t ptr, bool *ret_should_close)
{
        struct gr_arena *arena = gr_thread.hit_arena;

        if (__builtin_expect(gr_pool_kind_in_expandable(core, ptr), 0))
                return take_back_range(core, arena, ptr, ret_should_close);
        if (__builtin_expect(core->config.reuse == GR_REUSE_SYNC || !arena, 0))
                return NULL;
        if (__builtin_expect(take_back(arena, ptr, 0, ret_should_close), 1))
                return arena->context;
        /* It may be a range all the same, of a segment that is not one of the two newest. */
        return take_back_range(core, arena, ptr, ret_should_close);
}

/* The slow path. */

GR_HOT_CODE bool gr_arena_free_at_home(struct gr_core *core, struct gr_arena *home, uint64_t ptr,
                                       bool *ret_should_close)
{
        return (core->config.reuse != GR_REUSE_SYNC && take_back(home, ptr, 0, ret_should_close)) ||
               take_back_range(core, home, ptr, ret_should_close);
}

GR_HOT_CODE struct gr_block *gr_arena_claim(struct gr_core *core, uint64_t ptr)
{
        struct gr_arena *arena = gr_thread.hit_arena;
        struct gr_block *block, **place;

        if (!arena || !gr_pool_kind_in_expandable(core, ptr))
                return NULL;
        place = recent_place(arena, ptr);
        gr_arena_lock(arena);
        block = *place;
        if (block && block->ptr == ptr) {
                assert(atomic_load(&block->state) == state_at_home(arena));
                *place = NULL;
                atomic_store_explicit(&block->state, GR_BLOCK_CACHED, memory_order_release);
        } else {
                block = NULL;
        }
        gr_arena_unlock(arena);
        return block;
}

GR_HOT_CODE uint64_t gr_arena_adopt(struct gr_arena *arena, struct gr_block *block, size_t bytes)
{
        struct gr_context *context = arena->context;
        uint64_t ptr = 0;

        if (context->core->config.pool != GR_POOL_AUTO || block->flags != GR_BLOCK_RANGE)
                return 0;
        gr_arena_lock(arena);
        if (may_hit(context) && atomic_load(&block->state) == GR_BLOCK_CACHED &&
            !atomic_load(&context->fastbins_closed))
                ptr = hand_out_at_home(arena, block, next_generation(arena), bytes);
        gr_arena_unlock(arena);
        remember_arena(arena);
        return ptr;
}

uint32_t gr_arena_generation(struct gr_context *context)
{
        struct gr_arena *arena = gr_arena_own(context);
        uint32_t generation;

        gr_arena_lock(arena);
        generation = next_generation(arena);
        gr_arena_unlock(arena);
        return generation;
}

struct gr_block *gr_arena_take_fastbin(struct gr_arena *arena, size_t bytes)
{
        struct gr_block *block;

        gr_arena_lock(arena);
        block = gr_fastbin_find(&arena->fastbins, gr_range_bytes(bytes));
        if (block && may_hand_out(block, arena->context, arena->context->fence)) {
                gr_fastbin_leave(&arena->fastbins, block);
                count_hit(arena);
        } else {
                block = NULL;
        }
        gr_arena_unlock(arena);
        return block;
}

uint64_t gr_arena_fastbin_epoch(struct gr_arena *arena, size_t bytes)
{
        struct gr_block *block;
        uint64_t epoch;

        if (gr_fence_is_in_order(arena->context->fence) || gr_fastbins_bytes(&arena->fastbins) == 0 ||
            !gr_fastbins_may_have(&arena->fastbins, bytes))
                return 0;
        gr_arena_lock(arena);
        block = gr_fastbin_find(&arena->fastbins, gr_range_bytes(bytes));
        epoch = block ? block->freed_epoch : 0;
        gr_arena_unlock(arena);
        return epoch;
}

void gr_arena_enter_fastbin(struct gr_arena *arena, struct gr_block *block)
{
        gr_arena_lock(arena);
        gr_fastbin_enter(&arena->fastbins, block);
        gr_arena_unlock(arena);
}

GR_HOT_CODE struct gr_block *gr_arena_empty_fastbins(struct gr_arena *arena)
{
        struct gr_block *blocks;

        if (gr_fastbins_bytes(&arena->fastbins) == 0)
                return NULL;
        gr_arena_lock(arena);
        blocks = gr_fastbins_empty(&arena->fastbins, arena->context->device);
        gr_arena_unlock(arena);
        return blocks;
}

GR_HOT_CODE struct gr_block *gr_arena_evict_fastbins(struct gr_arena *arena, uint64_t keep_bytes)
{
        struct gr_block *blocks;

        gr_arena_lock(arena);
        blocks = gr_fastbins_evict(&arena->fastbins, arena->context->device, keep_bytes);
        gr_arena_unlock(arena);
        return blocks;
}

void gr_arena_put(struct gr_context *context, struct gr_block *block, bool synced, bool *ret_should_close)
{
        struct gr_arena *arena = gr_arena_own(context);

        assert(atomic_load(&block->state) >> GR_HOME_SHIFT == 0); /* claimed: no arena remembers it */
        gr_arena_lock(arena);
        /* After a sync no work uses the block; epoch 0 has always passed. */
        block->freed_epoch = synced ? 0 : note_freed(arena, context->fence, block->capacity_bytes, ret_should_close);
        put_in_bin(arena, block);
        gr_arena_unlock(arena);
}

void gr_arena_bin_remove(struct gr_arena *arena, struct gr_bin *bin, struct gr_block *block)
{
        remove_from(arena, bin, bin->blocks, block);
}

/*
 * The smallest usable block of the bin with at_least to at_most bytes; the oldest where the class has one size. Arena
 * lock held.
 */
static struct gr_block *best_usable(struct gr_arena *arena, struct gr_bin *bin, unsigned class, size_t at_least,
                                    size_t at_most)
{
        struct gr_block *block, *found = NULL;

        gr_assert_spin_locked(&arena->lock, GR_RANK_ARENA);
        DL_FOREACH (bin->blocks, block) {
                if (!gr_fence_usable(arena->context->fence, block->freed_epoch)) {
                        if (class < GR_CLASS_EXACT)
                                break; /* those behind it were freed later */
                        continue;
                }
                if (block->capacity_bytes < at_least || block->capacity_bytes > at_most)
                        continue;
                if (!found || block->capacity_bytes < found->capacity_bytes)
                        found = block;
                if (class < GR_CLASS_EXACT)
                        break;
        }
        return found;
}

struct gr_block *gr_arena_take(struct gr_arena *arena, unsigned class, unsigned last, size_t at_least, size_t at_most)
{
        struct gr_block *block = NULL;

        assert(last < GR_CLASS_COUNT && at_least <= at_most);
        for (; class <= last && !block; class ++) {
                struct gr_bin *bin = &arena->bins[class];

                if (gr_bin_count(bin) == 0)
                        continue;
                gr_arena_lock(arena);
                block = best_usable(arena, bin, class, at_least, at_most);
                if (block) {
                        gr_arena_bin_remove(arena, bin, block);
                        bin->hits++;
                        count_hit(arena);
                }
                gr_arena_unlock(arena);
        }
        return block;
}

uint64_t gr_arena_oldest_epoch(struct gr_arena *arena, unsigned class)
{
        uint64_t epoch;

        assert(class < GR_CLASS_EXACT); /* in larger classes the oldest block may not fit */
        gr_arena_lock(arena);
        epoch = arena->bins[class].blocks ? arena->bins[class].blocks->freed_epoch : 0;
        gr_arena_unlock(arena);
        return epoch;
}

size_t gr_arena_move(struct gr_arena *from, struct gr_arena *to, unsigned class, size_t count, uint64_t last_epoch)
{
        struct gr_device *device = from->context->device;
        struct gr_bin *bin = &from->bins[class];
        struct gr_block *moved = NULL, *block;
        uint64_t bytes = 0;
        size_t done = 0;

        assert(from != to && from->context == to->context && class < GR_CLASS_EXACT);
        if (gr_bin_count(bin) == 0)
                return 0;
        gr_arena_lock(from);
        if (bin->blocks && bin->blocks->prev->freed_epoch <= last_epoch)
                for (; (block = bin->blocks) && done < count; done++) {
                        gr_arena_bin_remove(from, bin, block);
                        /* Else it would count as live in between */
                        gr_budget_cache(device, gr_footprint_bytes(block->capacity_bytes));
                        bytes += gr_footprint_bytes(block->capacity_bytes);
                        DL_APPEND(moved, block);
                }
        gr_arena_unlock(from);
        if (done == 0)
                return 0;
        bin = &to->bins[class];
        gr_arena_lock(to);
        assert((gr_bin_count(bin) == 0) == (bin->blocks == NULL));
        DL_CONCAT(moved, bin->blocks);
        bin->blocks = moved;
        atomic_store_explicit(&bin->count, gr_bin_count(bin) + (uint32_t)done, memory_order_relaxed);
        gr_cached_add(&to->cached, (int64_t)bytes);
        gr_arena_unlock(to);
        gr_budget_pass_grant(device, &from->cached, &to->cached, bytes);
        gr_budget_uncache(device, bytes);
        return done;
}

void gr_arena_forget(struct gr_arena *arena, uint64_t ptr)
{
        struct gr_block **place = recent_place(arena, ptr);

        gr_arena_lock(arena);
        if (*place && (*place)->ptr == ptr) {
                assert(atomic_load(&(*place)->state) == state_at_home(arena));
                atomic_store(&(*place)->state, GR_BLOCK_LIVE);
                *place = NULL;
        }
        gr_arena_unlock(arena);
}

void gr_arenas_quiesce(struct gr_context *context)
{
        atomic_fetch_add(&context->arenas_quiesced, 1);
        for (unsigned i = 0; i < GR_SHARDS; i++) {
                struct gr_arena *arena = atomic_load(&context->arenas[i]); /* sequentially consistent: see may_hit */

                if (!arena)
                        continue;
                gr_arena_lock(arena);
                for (size_t j = 0; j < 1u << GR_RECENT_LOG2; j++) {
                        struct gr_block *block = arena->recent[j];

                        assert(!block || atomic_load(&block->state) == state_at_home(arena));
                        assert(!block || &arena->recent[j] == recent_place(arena, block->ptr));
                        if (block)
                                atomic_store(&block->state, GR_BLOCK_LIVE);
                        arena->recent[j] = NULL;
                }
                gr_arena_unlock(arena);
        }
}

void gr_arenas_resume(struct gr_context *context)
{
        unsigned before = atomic_fetch_sub(&context->arenas_quiesced, 1);

        assert(before > 0); /* each resume follows a quiesce */
        (void)before;
}
