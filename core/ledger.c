#include "ledger.h"

#include <errno.h>
#include <stdlib.h>

/* Fibonacci hashing: addresses are multiples of 512, so the low bits say little; the product's high bits mix all. */
static uint64_t mix(uint64_t ptr)
{
        return (ptr >> 9) * UINT64_C(0x9E3779B97F4A7C15);
}

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

void gr_ledger_init(struct gr_ledger *ledger)
{
        for (size_t i = 0; i < GR_LEDGER_SHARDS; i++) {
                gr_lock_init(&ledger->shards[i].lock, GR_RANK_LEDGER);
                ledger->shards[i].blocks = NULL;
        }
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
                gr_lock_destroy(&shard->lock);
        }
}

int gr_ledger_add(struct gr_ledger *ledger, struct gr_block *block, struct gr_block **ret_stale)
{
        uint64_t hash = mix(block->ptr);
        struct gr_ledger_shard *shard = shard_of(ledger, hash);
        struct gr_block *stale;
        bool added;

        gr_lock(&shard->lock);
        stale = find_locked(shard, hash, block->ptr);
        if (stale) {
                HASH_DELETE(hh, shard->blocks, stale);
                stale->state = GR_BLOCK_GONE;
        }
        HASH_ADD_BYHASHVALUE(hh, shard->blocks, ptr, sizeof(block->ptr), bucket_hash(hash), block);
        added = block->hh.tbl != NULL; /* uthash's sign that it ran out of memory */
        gr_unlock(&shard->lock);
        *ret_stale = stale;
        return added ? 0 : -ENOMEM;
}

void gr_ledger_remove(struct gr_ledger *ledger, struct gr_block *block)
{
        struct gr_ledger_shard *shard = shard_of(ledger, mix(block->ptr));

        gr_lock(&shard->lock);
        if (block->state != GR_BLOCK_GONE)
                HASH_DELETE(hh, shard->blocks, block);
        gr_unlock(&shard->lock);
}

int gr_ledger_claim(struct gr_ledger *ledger, uint64_t ptr, struct gr_block **ret_block)
{
        uint64_t hash = mix(ptr);
        struct gr_ledger_shard *shard = shard_of(ledger, hash);
        struct gr_block *block;
        int rc = 0;

        gr_lock(&shard->lock);
        block = find_locked(shard, hash, ptr);
        if (!block)
                rc = -ENOENT;
        else if (block->state != GR_BLOCK_LIVE)
                rc = -EALREADY;
        else
                block->state = GR_BLOCK_CACHED;
        gr_unlock(&shard->lock);
        if (!rc)
                *ret_block = block;
        return rc;
}

bool gr_ledger_hand_out(struct gr_ledger *ledger, struct gr_block *block, size_t requested_bytes)
{
        struct gr_ledger_shard *shard = shard_of(ledger, mix(block->ptr));
        bool usable;

        gr_lock(&shard->lock);
        usable = block->state != GR_BLOCK_GONE;
        if (usable) {
                block->state = GR_BLOCK_LIVE;
                block->requested_bytes = requested_bytes;
        }
        gr_unlock(&shard->lock);
        return usable;
}

int gr_ledger_find(struct gr_ledger *ledger, uint64_t ptr, struct gr_block_info *ret_info)
{
        uint64_t hash = mix(ptr);
        struct gr_ledger_shard *shard = shard_of(ledger, hash);
        struct gr_block *block;

        gr_lock(&shard->lock);
        block = find_locked(shard, hash, ptr);
        if (block)
                *ret_info = (struct gr_block_info){
                        .context = block->context,
                        .requested_bytes = block->requested_bytes,
                        .capacity_bytes = block->capacity_bytes,
                        .live = block->state == GR_BLOCK_LIVE,
                        .exported = block->flags & GR_BLOCK_EXPORTED,
                };
        gr_unlock(&shard->lock);
        return block ? 0 : -ENOENT;
}

int gr_ledger_mark_exported(struct gr_ledger *ledger, uint64_t ptr)
{
        uint64_t hash = mix(ptr);
        struct gr_ledger_shard *shard = shard_of(ledger, hash);
        struct gr_block *block;
        bool marked;

        gr_lock(&shard->lock);
        block = find_locked(shard, hash, ptr);
        marked = block && block->state == GR_BLOCK_LIVE;
        if (marked)
                block->flags |= GR_BLOCK_EXPORTED;
        gr_unlock(&shard->lock);
        return marked ? 0 : -ENOENT;
}

void gr_ledger_drop_context(struct gr_ledger *ledger, struct gr_context *context,
                            void (*dropped)(struct gr_block *block))
{
        for (size_t i = 0; i < GR_LEDGER_SHARDS; i++) {
                struct gr_ledger_shard *shard = &ledger->shards[i];
                struct gr_block *block, *tmp;

                gr_lock(&shard->lock);
                HASH_ITER (hh, shard->blocks, block, tmp) {
                        bool live;

                        if (block->context != context)
                                continue;
                        live = block->state == GR_BLOCK_LIVE;
                        HASH_DELETE(hh, shard->blocks, block);
                        block->state = GR_BLOCK_GONE;
                        if (live)
                                dropped(block);
                }
                gr_unlock(&shard->lock);
        }
}
