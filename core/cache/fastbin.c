#include "cache/fastbin.h"

#include <assert.h>

#define FIRST_LARGE (GR_FASTBIN_LISTS / 2)

/* Bytes of blocks that were taken out are on the device's own account from now on. */
static void now_of_device(struct gr_fastbins *fastbins, struct gr_device *device, uint64_t bytes)
{
        gr_budget_cache(device, bytes); /* before they are taken off below, or they would count as live in between */
        gr_cached_add(&fastbins->cached, -(int64_t)bytes);
}

struct gr_block *gr_fastbins_empty(struct gr_fastbins *fastbins, struct gr_device *device)
{
        uint64_t bytes = gr_fastbins_bytes(fastbins);
        struct gr_block *all = NULL;

        gr_lock_rank_assert_held(GR_RANK_ARENA);
        if (fastbins->count == 0)
                return NULL;
        for (size_t word = 0; word < sizeof(fastbins->filled) / sizeof(fastbins->filled[0]); word++) {
                for (uint64_t filled = fastbins->filled[word]; filled; filled &= filled - 1) {
                        struct gr_fastbin_list *list = &fastbins->lists[word * 64 + (size_t)__builtin_ctzll(filled)];

                        assert(list->first && list->last);
                        list->last->next = all;
                        all = list->first;
                        *list = (struct gr_fastbin_list){0};
                }
                fastbins->filled[word] = 0;
        }
        fastbins->count = 0;
        atomic_store_explicit(&fastbins->large_bytes, 0, memory_order_relaxed);
        now_of_device(fastbins, device, bytes);
        return all;
}

/* The first list of large blocks that is not empty, from index on and around. There is one. */
static unsigned next_filled(const struct gr_fastbins *fastbins, unsigned index)
{
        unsigned word = index / 64;
        uint64_t filled = fastbins->filled[word] & UINT64_MAX << index % 64;

        while (!filled) {
                if (++word == GR_FASTBIN_LISTS / 64)
                        word = FIRST_LARGE / 64;
                filled = fastbins->filled[word];
        }
        return word * 64 + (unsigned)__builtin_ctzll(filled);
}

struct gr_block *gr_fastbins_evict(struct gr_fastbins *fastbins, struct gr_device *device, uint64_t keep_bytes)
{
        uint64_t bytes = gr_fastbins_large_bytes(fastbins), taken = 0;
        unsigned index = FIRST_LARGE + fastbins->next;
        struct gr_block *all = NULL;

        gr_lock_rank_assert_held(GR_RANK_ARENA);
        for (; bytes - taken > keep_bytes; index = FIRST_LARGE + (index + 1) % FIRST_LARGE) {
                struct gr_fastbin_list *list;
                struct gr_block *block;

                index = next_filled(fastbins, index);
                list = &fastbins->lists[index];
                block = list->first;
                list->first = block->next;
                *(block->next ? &block->next->prev : &list->last) = NULL;
                if (!list->first)
                        fastbins->filled[index / 64] &= ~(UINT64_C(1) << index % 64);
                block->next = all;
                all = block;
                taken += block->capacity_bytes;
                fastbins->count--;
        }
        fastbins->next = index - FIRST_LARGE;
        atomic_store_explicit(&fastbins->large_bytes, bytes - taken, memory_order_relaxed);
        now_of_device(fastbins, device, taken);
        return all;
}
