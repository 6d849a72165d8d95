#include "quick.h"

#include "ledger.h"

#define LOOK 8 /* blocks of other sizes that are passed by */

static size_t list_of(size_t bytes)
{
        return gr_ledger_mix(bytes) >> (64 - GR_QUICK_LISTS_LOG2);
}

GR_OFTEN struct gr_block *gr_quick_find(const struct gr_quick *quick, size_t bytes)
{
        struct gr_block *block = quick->lists[list_of(bytes)].first;

        for (unsigned passed = 0; block && block->capacity_bytes != bytes; block = block->next)
                if (++passed == LOOK)
                        return NULL;
        return block;
}

GR_OFTEN void gr_quick_enter(struct gr_quick *quick, struct gr_block *block)
{
        struct gr_quick_list *list = &quick->lists[list_of(block->capacity_bytes)];

        block->prev = list->last;
        block->next = NULL;
        *(list->last ? &list->last->next : &list->first) = block;
        list->last = block;
        quick->count++;
        gr_cached_add(&quick->cached, (int64_t)block->capacity_bytes);
}

GR_OFTEN void gr_quick_leave(struct gr_quick *quick, struct gr_block *block)
{
        struct gr_quick_list *list = &quick->lists[list_of(block->capacity_bytes)];

        *(block->prev ? &block->prev->next : &list->first) = block->next;
        *(block->next ? &block->next->prev : &list->last) = block->prev;
        quick->count--;
        gr_cached_add(&quick->cached, -(int64_t)block->capacity_bytes);
}

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
