#include "cache/fastbin.h"

#include <assert.h>

struct gr_block *gr_fastbin_empty(struct gr_fastbins *fastbins)
{
        struct gr_block *all = NULL;

        if (fastbins->count == 0)
                return NULL;
        for (size_t i = 0; i < 1u << GR_FASTBIN_LISTS_LOG2; i++) {
                struct gr_fastbin_list *list = &fastbins->lists[i];

                assert(!list->first == !list->last);
                if (!list->first)
                        continue;
                list->last->next = all;
                all = list->first;
                *list = (struct gr_fastbin_list){0};
        }
        fastbins->count = 0;
        return all;
}
