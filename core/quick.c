#include "quick.h"

struct gr_block *gr_quick_empty(struct gr_quick *quick)
{
        struct gr_block *all = NULL;

        if (quick->count == 0)
                return NULL;
        for (size_t i = 0; i < 1u << GR_QUICK_LISTS_LOG2; i++) {
                struct gr_quick_list *list = &quick->lists[i];

                if (!list->first)
                        continue;
                list->last->next = all;
                all = list->first;
                *list = (struct gr_quick_list){0};
        }
        quick->count = 0;
        return all;
}
