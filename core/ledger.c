#include "ledger.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "pool.h"

static struct gr_ledger_shard *shard_of(struct gr_ledger *ledger, uint64_t hash)
{
        return &ledger->shards[hash >> 58];
}

static unsigned bucket_hash(uint64_t hash)
{
        return (unsigned)(hash >> 26);
}

static struct gr_block *find_locked(struct gr_ledger_shard *shard, uint64_t hash, uint64_t ptr)
{
        struct gr_block *block;

        HASH_FIND_BYHASHVALUE(hh, shard->blocks, &ptr, sizeof(ptr), bucket_hash(hash), block);
        return block;
}

static bool is_live(struct gr_block *block)
{
        return (atomic_load(&block->state) & ((1u << GR_HOME_SHIFT) - 1)) == GR_BLOCK_LIVE;
}

void gr_ledger_init(struct gr_ledger *ledger)
{
        memset(ledger, 0, sizeof(*ledger));
}

void gr_ledger_destroy(struct gr_ledger *ledger)
{
        for (size_t i = 0; i < GR_LEDGER_SHARDS; i++) {
                struct gr_ledger_shard *shard = &ledger->shards[i];
                struct gr_block *block, *tmp;

                HASH_ITER (hh, shard->blocks, block, tmp) {
                        HASH_DELETE(hh, shard->blocks, block);
                        free(block);
                }
        }
}

int gr_ledger_add(struct gr_ledger *ledger, struct gr_block *block, struct gr_block **ret_stale)
{
        uint64_t hash = gr_ledger_mix(block->ptr);
        struct gr_ledger_shard *shard = shard_of(ledger, hash);
        struct gr_context *shut = NULL; /* none of its blocks has a home or gets one */
        struct gr_block *stale;
        bool added;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        while ((stale = find_locked(shard, hash, block->ptr)) && stale->context != shut && !stale->split) {
                struct gr_context *context = stale->context;

                /* It may be among an arena's recent blocks, or on its way there. */
                gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
                if (shut)
                        gr_arenas_open(shut);
                gr_arenas_shut(context);
                shut = context;
                gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        }
        if (stale) {
                HASH_DELETE(hh, shard->blocks, stale);
                if (atomic_exchange(&stale->state, GR_BLOCK_GONE) != GR_BLOCK_LIVE)
                        stale = NULL;
        }
        HASH_ADD_BYHASHVALUE(hh, shard->blocks, ptr, sizeof(block->ptr), bucket_hash(hash), block);
        added = block->hh.tbl != NULL; /* uthash's sign that it ran out of memory */
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        if (shut)
                gr_arenas_open(shut);
        *ret_stale = stale;
        return added ? 0 : -ENOMEM;
}

bool gr_ledger_remove(struct gr_ledger *ledger, struct gr_block *block)
{
        struct gr_ledger_shard *shard = shard_of(ledger, gr_ledger_mix(block->ptr));
        bool there;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        there = atomic_load(&block->state) != GR_BLOCK_GONE;
        if (there)
                HASH_DELETE(hh, shard->blocks, block);
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        return there;
}

enum gr_block_state gr_ledger_drop(struct gr_ledger *ledger, struct gr_block *block)
{
        struct gr_ledger_shard *shard = shard_of(ledger, gr_ledger_mix(block->ptr));
        enum gr_block_state before;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        before = atomic_exchange(&block->state, GR_BLOCK_GONE);
        if (before != GR_BLOCK_GONE)
                HASH_DELETE(hh, shard->blocks, block);
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        return before;
}

int gr_ledger_claim(struct gr_ledger *ledger, uint64_t ptr, struct gr_block **ret_block)
{
        uint64_t hash = gr_ledger_mix(ptr);
        struct gr_ledger_shard *shard = shard_of(ledger, hash);
        struct gr_block *block;
        uint16_t state;
        int rc = 0;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        while ((block = find_locked(shard, hash, ptr)) && (state = atomic_load(&block->state)) >> GR_HOME_SHIFT != 0) {
                struct gr_arena *home = gr_arena_at(block->context, (state >> GR_HOME_SHIFT) - 1u);

                gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
                gr_arena_forget(home, ptr);
                gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        }
        if (!block)
                rc = -ENOENT;
        else if (!atomic_compare_exchange_strong(&block->state, &(uint16_t){GR_BLOCK_LIVE}, GR_BLOCK_CACHED))
                rc = -EALREADY;
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        if (!rc)
                *ret_block = block;
        return rc;
}

bool gr_ledger_hand_out(struct gr_block *block, size_t requested_bytes)
{
        atomic_store_explicit(&block->requested_bytes, requested_bytes, memory_order_relaxed);
        return atomic_compare_exchange_strong(&block->state, &(uint16_t){GR_BLOCK_CACHED}, GR_BLOCK_LIVE);
}

int gr_ledger_find(struct gr_ledger *ledger, uint64_t ptr, struct gr_block_info *ret_info)
{
        uint64_t hash = gr_ledger_mix(ptr);
        struct gr_ledger_shard *shard = shard_of(ledger, hash);
        struct gr_block *block;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        block = find_locked(shard, hash, ptr);
        if (block)
                *ret_info = (struct gr_block_info){
                        .context = block->context,
                        .requested_bytes = block->requested_bytes,
                        .capacity_bytes = block->capacity_bytes,
                        .handouts = atomic_load_explicit(&block->handouts, memory_order_relaxed),
                        .live = is_live(block),
                        .exported = block->flags & GR_BLOCK_EXPORTED,
                        .spilled = block->flags & GR_BLOCK_SPILLED,
                        .host = block->flags & GR_BLOCK_HOST,
                        .split = block->split,
                        .kind = block->kind,
                };
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        return block ? 0 : -ENOENT;
}

void gr_ledger_count_live(struct gr_ledger *ledger, int device, uint64_t *counts, uint64_t *bytes)
{
        for (size_t i = 0; i < GR_LEDGER_SHARDS; i++) {
                struct gr_ledger_shard *shard = &ledger->shards[i];
                struct gr_block *block, *tmp;

                gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
                HASH_ITER (hh, shard->blocks, block, tmp) {
                        if (!is_live(block) || block->flags & (GR_BLOCK_SPILLED | GR_BLOCK_HOST) ||
                            block->context->device->ordinal != device)
                                continue;
                        counts[block->class]++;
                        bytes[block->class] += gr_footprint_bytes(block->capacity_bytes);
                }
                gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        }
}

int gr_ledger_mark_exported(struct gr_ledger *ledger, uint64_t ptr)
{
        uint64_t hash = gr_ledger_mix(ptr);
        struct gr_ledger_shard *shard = shard_of(ledger, hash);
        struct gr_block *block;
        bool marked;

        gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
        block = find_locked(shard, hash, ptr);
        marked = block && is_live(block);
        if (marked)
                block->flags |= GR_BLOCK_EXPORTED;
        gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
        return marked ? 0 : -ENOENT;
}

void gr_ledger_drop_context(struct gr_ledger *ledger, struct gr_context *context,
                            void (*dropped)(struct gr_block *block))
{
        for (size_t i = 0; i < GR_LEDGER_SHARDS; i++) {
                struct gr_ledger_shard *shard = &ledger->shards[i];
                struct gr_block *block, *tmp, *live = NULL;

                gr_spin_lock(&shard->lock, GR_RANK_LEDGER);
                HASH_ITER (hh, shard->blocks, block, tmp) {
                        if (block->context != context)
                                continue;
                        HASH_DELETE(hh, shard->blocks, block);
                        if (atomic_exchange(&block->state, GR_BLOCK_GONE) == GR_BLOCK_LIVE) {
                                block->next = live; /* it is in no bin */
                                live = block;
                        }
                }
                gr_spin_unlock(&shard->lock, GR_RANK_LEDGER);
                for (; live; live = tmp) {
                        tmp = live->next;
                        dropped(live);
                }
        }
}
