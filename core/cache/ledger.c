#include "cache/ledger.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "base/address_table.h"
#include "base/attributes.h"
#include "base/lock.h"
#include "base/size_class.h"
#include "context/context.h"

static struct gr_ledger_shard *shard_of(struct gr_ledger *ledger, uint64_t ptr)
{
        return &ledger->shards[gr_address_hash(ptr) >> (64 - GR_ADDRESS_CHOICE_BITS)];
}

/* The block at ptr, or NULL. Lock held. */
static struct gr_block *find_in_shard(const struct gr_ledger_shard *shard, uint64_t ptr)
{
        gr_assert_spin_locked(&shard->lock, GR_RANK_LEDGER);
        return gr_address_table_find(&shard->table, ptr);
}

/* Takes block out of the table; it must be in it. Lock held. */
static void take_out_of_table(struct gr_ledger_shard *shard, struct gr_block *block)
{
        struct gr_address_slot *slot = gr_address_table_slot(&shard->table, block->ptr);

        gr_assert_spin_locked(&shard->lock, GR_RANK_LEDGER);
        assert(slot && slot->value == block);
        gr_address_table_remove(&shard->table, slot);
}

void gr_ledger_init(struct gr_ledger *ledger)
{
        memset(ledger, 0, sizeof(*ledger));
}

void gr_ledger_destroy(struct gr_ledger *ledger)
{
        for (size_t i = 0; i < GR_LEDGER_SHARDS; i++) {
                struct gr_address_table *table = &ledger->shards[i].table;

                for (size_t j = 0; j < table->room; j++)
                        gr_block_delete(table->slots[j].value);
                gr_address_table_clear(table);
        }
}

/*
 * Takes the block at ptr out, if any, makes it GONE, and sets *ret_stale to it where it was LIVE, else to NULL. -EAGAIN
 * as gr_ledger_add says. Lock held.
 */
static int take_stale(struct gr_ledger_shard *shard, uint64_t ptr, struct gr_context **quiesced,
                      struct gr_block **ret_stale)
{
        struct gr_block *stale = find_in_shard(shard, ptr);

        gr_assert_spin_locked(&shard->lock, GR_RANK_LEDGER);
        if (stale && stale->context != *quiesced) {
                *quiesced = stale->context;
                return -EAGAIN;
        }
        if (stale) {
                uint16_t before;

                take_out_of_table(shard, stale);
                before = atomic_exchange(&stale->state, GR_BLOCK_GONE);
                assert(before >> GR_HOME_SHIFT == 0 && before != GR_BLOCK_GONE);
                if (before != GR_BLOCK_LIVE)
                        stale = NULL;
        }
        *ret_stale = stale;
        return 0;
}

GR_HOT_CODE int gr_ledger_add(struct gr_ledger *ledger, struct gr_block *block, struct gr_context **quiesced,
                              struct gr_block **ret_stale)
{
        struct gr_ledger_shard *shard = shard_of(ledger, block->ptr);
        int rc;

        assert(block->ptr != 0 && block->capacity_bytes > 0 && block->class < GR_CLASS_COUNT);
        assert(atomic_load(&block->state) == GR_BLOCK_CACHED || atomic_load(&block->state) == GR_BLOCK_LIVE);
        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        rc = take_stale(shard, block->ptr, quiesced, ret_stale);
        if (!rc && !gr_address_table_put(&shard->table, block->ptr, block))
                rc = -ENOMEM;
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        return rc;
}

int gr_ledger_forget(struct gr_ledger *ledger, uint64_t ptr, struct gr_context **quiesced, struct gr_block **ret_stale)
{
        struct gr_ledger_shard *shard = shard_of(ledger, ptr);
        struct gr_block *block;
        int rc = 0;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        block = find_in_shard(shard, ptr);
        if (block && !(block->flags & GR_BLOCK_RANGE))
                rc = take_stale(shard, ptr, quiesced, ret_stale);
        else
                *ret_stale = NULL;
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        return rc;
}

bool gr_ledger_remove(struct gr_ledger *ledger, struct gr_block *block)
{
        struct gr_ledger_shard *shard = shard_of(ledger, block->ptr);
        bool there;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        assert(atomic_load(&block->state) >> GR_HOME_SHIFT == 0);
        there = atomic_load(&block->state) != GR_BLOCK_GONE;
        if (there)
                take_out_of_table(shard, block);
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        return there;
}

GR_HOT_CODE enum gr_block_state gr_ledger_make_gone(struct gr_ledger *ledger, struct gr_block *block)
{
        struct gr_ledger_shard *shard = shard_of(ledger, block->ptr);
        enum gr_block_state before;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        if (atomic_load(&block->state) != GR_BLOCK_GONE)
                take_out_of_table(shard, block);
        /* Last: a thread that is handing it out sees that it is GONE, and frees it at once. */
        before = atomic_exchange(&block->state, GR_BLOCK_GONE);
        assert(before <= GR_BLOCK_GONE); /* it has no home */
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        return before;
}

/* The arena that a block's state names as its home; NULL: none. Ledger shard's lock held. */
static struct gr_arena *home_of(const struct gr_block *block)
{
        uint16_t state = atomic_load(&block->state);
        unsigned home = state >> GR_HOME_SHIFT;

        gr_lock_rank_assert_held(GR_RANK_LEDGER);
        assert(home <= GR_SHARDS && (home == 0 || (state & ((1u << GR_HOME_SHIFT) - 1)) == GR_BLOCK_LIVE));
        return home > 0 ? atomic_load(&block->context->arenas[home - 1]) : NULL;
}

GR_HOT_CODE int gr_ledger_claim(struct gr_ledger *ledger, uint64_t ptr, struct gr_block **ret_block,
                                struct gr_arena **ret_home)
{
        struct gr_ledger_shard *shard = shard_of(ledger, ptr);
        struct gr_block *block;
        int rc = 0;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        block = find_in_shard(shard, ptr);
        if (block)
                __builtin_prefetch(&block->hold); /* which the caller reads next, while the state is on its way */
        if (!block) {
                rc = -ENOENT;
        } else if ((*ret_home = home_of(block))) {
                rc = -EBUSY;
        } else if (!atomic_compare_exchange_strong(&block->state, &(uint16_t){GR_BLOCK_LIVE}, GR_BLOCK_CACHED)) {
                rc = -EALREADY;
        }
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        if (!rc)
                *ret_block = block;
        return rc;
}

bool gr_ledger_hand_out(struct gr_block *block, size_t requested_bytes)
{
        assert(requested_bytes > 0 && requested_bytes <= block->capacity_bytes);
        assert(!gr_block_is_live(block)); /* the program has it already */
        atomic_store_explicit(&block->requested_bytes, requested_bytes, memory_order_relaxed);
        return atomic_compare_exchange_strong(&block->state, &(uint16_t){GR_BLOCK_CACHED}, GR_BLOCK_LIVE);
}

int gr_ledger_find(struct gr_ledger *ledger, uint64_t ptr, struct gr_block_info *ret_info)
{
        struct gr_ledger_shard *shard = shard_of(ledger, ptr);
        struct gr_block *block;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        block = find_in_shard(shard, ptr);
        if (block)
                *ret_info = (struct gr_block_info){
                        .context = block->context,
                        .requested_bytes = block->requested_bytes,
                        .capacity_bytes = block->capacity_bytes,
                        .generation = atomic_load_explicit(&block->generation, memory_order_relaxed),
                        .live = gr_block_is_live(block),
                        .exported = block->flags & GR_BLOCK_EXPORTED,
                        .spilled = block->flags & GR_BLOCK_SPILLED,
                        .host = block->flags & GR_BLOCK_HOST,
                        .is_range = block->flags & GR_BLOCK_RANGE,
                        .sync = block->flags & GR_BLOCK_SYNC,
                        .kind = block->kind,
                };
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        return block ? 0 : -ENOENT;
}

void gr_ledger_count_live(struct gr_ledger *ledger, int device, uint64_t *counts, uint64_t *bytes)
{
        for (size_t i = 0; i < GR_LEDGER_SHARDS; i++) {
                struct gr_ledger_shard *shard = &ledger->shards[i];

                gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
                for (size_t j = 0; j < shard->table.room; j++) {
                        const struct gr_block *block = shard->table.slots[j].value;

                        if (!block || !gr_block_is_live(block) || block->flags & (GR_BLOCK_SPILLED | GR_BLOCK_HOST) ||
                            block->context->ordinal != device)
                                continue;
                        counts[block->class]++;
                        bytes[block->class] += block->flags & GR_BLOCK_RANGE
                                                       ? block->capacity_bytes
                                                       : gr_footprint_bytes(block->capacity_bytes);
                }
                gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        }
}

static int set_flag(struct gr_ledger *ledger, uint64_t ptr, enum gr_block_flags flag, bool on)
{
        struct gr_ledger_shard *shard = shard_of(ledger, ptr);
        struct gr_block *block;
        bool live;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        block = find_in_shard(shard, ptr);
        live = block && gr_block_is_live(block);
        if (live)
                block->flags = on ? block->flags | flag : block->flags & ~flag;
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        return live ? 0 : -ENOENT;
}

int gr_ledger_mark_exported(struct gr_ledger *ledger, uint64_t ptr)
{
        return set_flag(ledger, ptr, GR_BLOCK_EXPORTED, true);
}

int gr_ledger_set_sync(struct gr_ledger *ledger, uint64_t ptr, bool sync)
{
        return set_flag(ledger, ptr, GR_BLOCK_SYNC, sync);
}

void gr_ledger_context_gone(struct gr_ledger *ledger, struct gr_context *context, void (*gone)(struct gr_block *block))
{
        for (size_t i = 0; i < GR_LEDGER_SHARDS; i++) {
                struct gr_ledger_shard *shard = &ledger->shards[i];
                struct gr_block *block, *tmp, *live = NULL;
                uint16_t before;

                gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
                for (size_t j = 0; j < shard->table.room;) {
                        block = shard->table.slots[j].value;
                        if (!block || block->context != context) {
                                j++;
                                continue;
                        }
                        /* Another one may move up into the slot. */
                        gr_address_table_remove(&shard->table, &shard->table.slots[j]);
                        before = atomic_exchange(&block->state, GR_BLOCK_GONE);
                        assert(before >> GR_HOME_SHIFT == 0); /* the arenas are quiesced */
                        if (before == GR_BLOCK_LIVE) {
                                block->next = live; /* it is in no bin */
                                live = block;
                        }
                }
                gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
                for (; live; live = tmp) {
                        tmp = live->next;
                        gone(live);
                }
        }
}
