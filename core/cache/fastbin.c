#include "cache/fastbin.h"

#include <assert.h>

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
        /* Added before it is taken off below, or it would count as live in between */
        gr_budget_cache(device, bytes);
        gr_cached_add(&fastbins->cached, -(int64_t)bytes);
        return all;
}
