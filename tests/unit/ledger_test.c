#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "alloc/pool.h"
#include "cache/ledger.h"
#include "check.h"
#include "core.h"
#include "short_of_memory.h"

#define BASE    UINT64_C(0x7f0000000000)
#define THREADS 8
#define ROUNDS  20000
#define SLOTS   64 /* addresses per thread */

static struct gr_ledger ledger;

/* The ledger asks nothing of contexts but their arenas, and these have none. */
static struct gr_context *name_of(int i)
{
        static struct gr_context names[THREADS];

        return &names[i];
}

static struct gr_block *block_new(uint64_t ptr, size_t bytes, struct gr_context *context)
{
        struct gr_block *block = gr_block_new();

        block->ptr = ptr;
        block->capacity_bytes = bytes;
        block->requested_bytes = bytes - 1;
        block->context = context;
        block->state = GR_BLOCK_CACHED;
        return block;
}

/* As gr_block_add and gr_block_claim, where there are no arenas. */
static int enter(struct gr_block *block, struct gr_block **ret_stale)
{
        struct gr_context *quiesced = NULL;
        int rc = gr_ledger_add(&ledger, block, &quiesced, ret_stale);

        return rc == -EAGAIN ? gr_ledger_add(&ledger, block, &quiesced, ret_stale) : rc;
}

static int claim(uint64_t ptr, struct gr_block **ret_block)
{
        struct gr_arena *home;

        return gr_ledger_claim(&ledger, ptr, ret_block, &home);
}

static void add(struct gr_block *block)
{
        struct gr_block *stale = block;

        GR_CHECK_EQ(enter(block, &stale), 0);
        GR_CHECK(stale == NULL);
}

static bool hand_out(struct gr_block *block, size_t requested_bytes)
{
        return gr_ledger_hand_out(block, requested_bytes);
}

static void test_life(void)
{
        struct gr_block *block = block_new(BASE, 4096, name_of(0)), *got = NULL;
        struct gr_block_info info;

        gr_ledger_init(&ledger);
        GR_CHECK_EQ(claim(BASE, &got), -ENOENT);
        GR_CHECK_EQ(gr_ledger_find(&ledger, BASE, &info), -ENOENT);
        add(block);

        /* Cached: known, but nothing that the program may free or export. */
        GR_CHECK_EQ(claim(BASE, &got), -EALREADY);
        GR_CHECK(got == NULL);
        GR_CHECK_EQ(gr_ledger_mark_exported(&ledger, BASE), -ENOENT);
        GR_CHECK_EQ(gr_ledger_find(&ledger, BASE, &info), 0);
        GR_CHECK(!info.live);

        GR_CHECK(hand_out(block, 1000));
        GR_CHECK_EQ(gr_ledger_find(&ledger, BASE, &info), 0);
        GR_CHECK(info.live && !info.exported && info.context == name_of(0));
        GR_CHECK_EQ(info.requested_bytes, 1000);
        GR_CHECK_EQ(info.capacity_bytes, 4096);
        GR_CHECK_EQ(gr_ledger_find(&ledger, BASE + 512, &info), -ENOENT); /* not its first byte */

        GR_CHECK_EQ(gr_ledger_mark_exported(&ledger, BASE), 0);
        GR_CHECK_EQ(gr_ledger_find(&ledger, BASE, &info), 0);
        GR_CHECK(info.exported);

        GR_CHECK_EQ(claim(BASE, &got), 0);
        GR_CHECK(got == block);
        got = NULL;
        GR_CHECK_EQ(claim(BASE, &got), -EALREADY);
        GR_CHECK(got == NULL);

        gr_ledger_remove(&ledger, block);
        GR_CHECK_EQ(claim(BASE, &got), -ENOENT);
        gr_block_delete(block);
        gr_ledger_destroy(&ledger);
}

/* The driver gives an address out again that the ledger still knows: the old block is none any more. */
static void test_stale(void)
{
        struct gr_block *old = block_new(BASE, 4096, name_of(0)), *fresh = block_new(BASE, 8192, name_of(1));
        struct gr_context *quiesced = NULL;
        struct gr_block *stale = NULL;
        struct gr_block_info info;

        gr_ledger_init(&ledger);
        add(old);
        GR_CHECK(hand_out(old, 4000));
        GR_CHECK_EQ(gr_ledger_add(&ledger, fresh, &quiesced, &stale), -EAGAIN);
        GR_CHECK(quiesced == name_of(0) && !stale && old->state == GR_BLOCK_LIVE);
        GR_CHECK_EQ(gr_ledger_add(&ledger, fresh, &quiesced, &stale), 0);
        GR_CHECK(stale == old);
        GR_CHECK_EQ(old->state, GR_BLOCK_GONE);
        GR_CHECK(!hand_out(old, 1));
        gr_ledger_remove(&ledger, old); /* must leave its successor alone */
        GR_CHECK_EQ(gr_ledger_make_gone(&ledger, old), GR_BLOCK_GONE);
        GR_CHECK_EQ(gr_ledger_find(&ledger, BASE, &info), 0);
        GR_CHECK_EQ(info.capacity_bytes, 8192);
        gr_block_delete(old);

        /* One that was cached stays its bin's, where it is found out later. */
        old = fresh;
        fresh = block_new(BASE, 1024, name_of(0));
        add(fresh);
        GR_CHECK_EQ(old->state, GR_BLOCK_GONE);
        GR_CHECK(!gr_ledger_remove(&ledger, old));
        GR_CHECK(!hand_out(old, 1));
        GR_CHECK_EQ(gr_ledger_find(&ledger, BASE, &info), 0);
        GR_CHECK_EQ(info.capacity_bytes, 1024);
        gr_block_delete(old);
        gr_ledger_destroy(&ledger); /* frees fresh */
}

static unsigned dropped_blocks;

static void count_dropped(struct gr_block *block)
{
        GR_CHECK_EQ(block->state, GR_BLOCK_GONE);
        dropped_blocks++;
        gr_block_delete(block);
}

/* Squares, as the hashes of some lie close together: then entries of the table move up where one is removed. */
static uint64_t at(unsigned i)
{
        return BASE + UINT64_C(512) * i * i;
}

static void test_drop_context(void)
{
        enum { COUNT = 3000 };
        static struct gr_block *blocks[COUNT];
        struct gr_block_info info;
        struct gr_block *got;

        gr_ledger_init(&ledger);
        for (unsigned i = 0; i < COUNT; i++) {
                blocks[i] = block_new(at(i), 512, name_of(i % 2));
                add(blocks[i]);
                if (i % 4 < 2)
                        GR_CHECK(hand_out(blocks[i], 100));
        }
        gr_ledger_context_gone(&ledger, name_of(0), count_dropped);
        GR_CHECK_EQ(dropped_blocks, COUNT / 4); /* the live half of the context's half */
        for (unsigned i = 0; i < COUNT; i++) {
                int rc = gr_ledger_find(&ledger, at(i), &info);

                GR_CHECK_EQ(rc, i % 2 == 0 ? -ENOENT : 0);
                if (i % 4 == 2) { /* cached ones stay their bin's, but are good for nothing */
                        GR_CHECK_EQ(blocks[i]->state, GR_BLOCK_GONE);
                        GR_CHECK(!hand_out(blocks[i], 100));
                        gr_ledger_remove(&ledger, blocks[i]);
                        gr_block_delete(blocks[i]);
                }
        }
        GR_CHECK_EQ(claim(at(1), &got), 0);
        gr_ledger_destroy(&ledger);
}

static int thread_failures[THREADS];

/* Each thread has addresses of its own, in the same shards as those of the others. */
static void *hammer(void *arg)
{
        int me = *(int *)arg;
        int *failures = &thread_failures[me];
        uint64_t seed = 88172645463325252u + (uint64_t)me;
        struct gr_block *blocks[SLOTS] = {NULL}, *block, *stale;

        for (unsigned i = 0; i < ROUNDS; i++) {
                unsigned slot;
                uint64_t ptr;

                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                slot = seed % SLOTS;
                ptr = BASE + (slot * THREADS + (unsigned)me) * 512;
                if (!blocks[slot]) {
                        blocks[slot] = block_new(ptr, 512, name_of(me));
                        *failures += enter(blocks[slot], &stale) != 0 || stale;
                        *failures += !hand_out(blocks[slot], 200);
                } else if (claim(ptr, &block) == 0) {
                        *failures += block != blocks[slot];
                        gr_ledger_remove(&ledger, block);
                        gr_block_delete(block);
                        blocks[slot] = NULL;
                } else {
                        ++*failures;
                }
        }
        for (unsigned slot = 0; slot < SLOTS; slot++) {
                struct gr_block_info info;
                int rc = gr_ledger_find(&ledger, BASE + (slot * THREADS + (unsigned)me) * 512, &info);

                *failures += rc != (blocks[slot] ? 0 : -ENOENT);
        }
        return NULL;
}

static _Atomic unsigned claimed;

static void *claim_all(void *arg)
{
        struct gr_block *block;

        (void)arg;
        for (unsigned i = 0; i < ROUNDS; i++)
                if (claim(BASE + i * 512, &block) == 0)
                        claimed++;
        return NULL;
}

static void test_threads(void)
{
        pthread_t threads[THREADS];
        int ids[THREADS];

        gr_ledger_init(&ledger);
        for (int i = 0; i < THREADS; i++) {
                ids[i] = i;
                pthread_create(&threads[i], NULL, hammer, &ids[i]);
        }
        for (int i = 0; i < THREADS; i++) {
                pthread_join(threads[i], NULL);
                GR_CHECK_EQ(thread_failures[i], 0);
        }
        gr_ledger_destroy(&ledger);

        /* All free the same blocks: each block has one who may. */
        gr_ledger_init(&ledger);
        for (unsigned i = 0; i < ROUNDS; i++) {
                struct gr_block *block = block_new(BASE + i * 512, 512, name_of(0));

                add(block);
                hand_out(block, 1);
        }
        for (int i = 0; i < THREADS; i++)
                pthread_create(&threads[i], NULL, claim_all, NULL);
        for (int i = 0; i < THREADS; i++)
                pthread_join(threads[i], NULL);
        GR_CHECK_EQ(claimed, ROUNDS);
        gr_ledger_destroy(&ledger);
}

/* What the program has of the device's own memory, by class. */
static void test_count_live(void)
{
        static uint64_t counts[GR_CLASS_COUNT], bytes[GR_CLASS_COUNT], all;
        uint64_t ptr = BASE;

        gr_ledger_init(&ledger);
        for (int i = 0; i < 2; i++)
                name_of(i)->ordinal = i;
        for (unsigned flags = 0; flags <= (GR_BLOCK_EXPORTED | GR_BLOCK_SPILLED | GR_BLOCK_HOST); flags++)
                for (int live = 0; live < 2; live++)
                        for (int device = 0; device < 2; device++, ptr += UINT64_C(1) << 24) {
                                struct gr_block *block = block_new(ptr, 4096, name_of(device));

                                block->flags = (uint8_t)flags;
                                block->class = (uint8_t)(3 + flags);
                                add(block);
                                if (live)
                                        GR_CHECK(hand_out(block, 1));
                        }
        gr_ledger_count_live(&ledger, 1, counts, bytes);
        for (unsigned class = 0; class < GR_CLASS_COUNT; class ++)
                all += counts[class];
        GR_CHECK_EQ(all, 2);
        GR_CHECK(counts[3] == 1 && bytes[3] == 4096);
        GR_CHECK(counts[3 + GR_BLOCK_EXPORTED] == 1 && bytes[3 + GR_BLOCK_EXPORTED] == 4096);
        gr_ledger_destroy(&ledger);
}

/* Without memory for a larger table one is filled up to its last slot but one, where looks end. */
static void test_no_memory(void)
{
        enum { ROOM = 16, MORE = 2 * ROOM * sizeof(struct gr_address_slot) };
        struct gr_block *blocks[ROOM], *stale;
        struct gr_block_info info;
        uint64_t ptr = BASE;

        gr_ledger_init(&ledger);
        for (unsigned i = 0; i < ROOM; ptr += 512)
                if (gr_address_hash(ptr) >> 58 == gr_address_hash(BASE) >> 58)
                        blocks[i++] = block_new(ptr, 512, name_of(0));
        add(blocks[0]);
        memory_runs_out(MORE);
        for (unsigned i = 1; i < ROOM - 1; i++)
                add(blocks[i]);
        alarm(20); /* or a look may go on for ever */
        GR_CHECK_EQ(enter(blocks[ROOM - 1], &stale), -ENOMEM);
        GR_CHECK_EQ(gr_ledger_find(&ledger, blocks[ROOM - 1]->ptr, &info), -ENOENT);
        alarm(0);
        memory_is_back();
        add(blocks[ROOM - 1]);
        for (unsigned i = 0; i < ROOM; i++)
                GR_CHECK_EQ(gr_ledger_find(&ledger, blocks[i]->ptr, &info), 0);
        gr_ledger_destroy(&ledger);
}

/* The structures of all that is left serve others, and so do the tables. */
static void test_destroy(void)
{
        enum { MANY = 500 };
        static struct gr_block *blocks[MANY], *again[MANY];
        void *tables[GR_LEDGER_SHARDS], *table;
        unsigned count = 0;
        size_t bytes;

        gr_ledger_init(&ledger);
        for (unsigned i = 0; i < MANY; i++) {
                blocks[i] = block_new(BASE + i * 512, 512, name_of(0));
                add(blocks[i]);
        }
        table = ledger.shards[0].table.slots;
        bytes = ledger.shards[0].table.room * sizeof(*ledger.shards[0].table.slots);
        GR_CHECK(table != NULL);
        gr_ledger_destroy(&ledger);
        for (int i = 0; i < GR_LEDGER_SHARDS; i++) {
                tables[i] = gr_metadata_alloc(bytes);
                count += tables[i] == table;
        }
        GR_CHECK(count == 1 || !GR_METADATA_IN_CHUNKS);
        for (int i = 0; i < GR_LEDGER_SHARDS; i++)
                gr_metadata_free(tables[i], bytes);
        count = 0;
        for (unsigned i = 0; i < MANY; i++) {
                again[i] = gr_block_new();
                for (unsigned k = 0; k < MANY; k++)
                        count += again[i] == blocks[k];
        }
        GR_CHECK(count == MANY || !GR_METADATA_IN_CHUNKS); /* else the sanitizer tells what is lost */
        for (unsigned i = 0; i < MANY; i++)
                gr_block_delete(again[i]);
}

/* What is done with the ledger, each in a thread that has to wait for a shard. */
enum deed { ADD, FORGET, REMOVE, DROP, CLAIM, FIND, COUNT_LIVE, MARK_EXPORTED, DROP_CONTEXT, DEEDS };

struct waiter {
        enum deed deed;
        struct gr_block *block;
        _Atomic bool begun, done;
};

static void *do_deed(void *arg)
{
        static uint64_t counts[GR_CLASS_COUNT], bytes[GR_CLASS_COUNT];
        struct waiter *waiter = arg;
        struct gr_block *block = waiter->block, *other;
        struct gr_context *context = NULL;
        struct gr_block_info info;

        atomic_store(&waiter->begun, true);
        switch (waiter->deed) {
        case ADD:
                GR_CHECK_EQ(enter(block_new(BASE + 512, 512, name_of(0)), &other), 0);
                break;
        case FORGET:
                GR_CHECK_EQ(gr_ledger_forget(&ledger, BASE + 512, &context, &other), 0);
                break;
        case REMOVE:
                GR_CHECK(gr_ledger_remove(&ledger, block));
                break;
        case DROP:
                GR_CHECK_EQ(gr_ledger_make_gone(&ledger, block), GR_BLOCK_LIVE);
                break;
        case CLAIM:
                GR_CHECK_EQ(claim(BASE, &other), 0);
                break;
        case FIND:
                GR_CHECK_EQ(gr_ledger_find(&ledger, BASE, &info), 0);
                break;
        case COUNT_LIVE:
                gr_ledger_count_live(&ledger, 0, counts, bytes);
                break;
        case MARK_EXPORTED:
                GR_CHECK_EQ(gr_ledger_mark_exported(&ledger, BASE), 0);
                break;
        case DROP_CONTEXT:
        case DEEDS:
                gr_ledger_context_gone(&ledger, name_of(0), count_dropped);
                break;
        }
        atomic_store(&waiter->done, true);
        return NULL;
}

/* Nobody reads or changes a shard that another thread is at. */
static void test_locked(void)
{
        for (enum deed deed = 0; deed < DEEDS; deed++) {
                struct waiter waiter = {.deed = deed, .block = block_new(BASE, 4096, name_of(0))};
                pthread_t thread;

                gr_ledger_init(&ledger);
                add(waiter.block);
                GR_CHECK(hand_out(waiter.block, 1));
                for (int i = 0; i < GR_LEDGER_SHARDS; i++)
                        atomic_store(&ledger.shards[i].lock.taken, 1);
                GR_CHECK_EQ(pthread_create(&thread, NULL, do_deed, &waiter), 0);
                while (!atomic_load(&waiter.begun))
                        usleep(100);
                usleep(2000);
                GR_CHECK(!atomic_load(&waiter.done));
                for (int i = 0; i < GR_LEDGER_SHARDS; i++)
                        atomic_store(&ledger.shards[i].lock.taken, 0);
                pthread_join(thread, NULL);
                if (deed == REMOVE || deed == DROP)
                        gr_block_delete(waiter.block);
                gr_ledger_destroy(&ledger);
        }
}

int main(void)
{
        test_life();
        test_stale();
        test_drop_context();
        test_threads();
        test_locked();
        test_count_live();
        test_destroy();
        test_no_memory();
        return GR_CHECK_RESULT();
}
