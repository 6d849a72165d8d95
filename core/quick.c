#include "quick.h"

#include <utlist.h>

#include "ledger.h"

#define LOOK 8 /* blocks of other sizes that are passed by */

static size_t list_of(size_t bytes)
{
        return gr_ledger_mix(bytes) >> (64 - GR_QUICK_LISTS_LOG2);
}

struct gr_block *gr_quick_find(const struct gr_quick *quick, size_t bytes)
{
        struct gr_block *block = quick->lists[list_of(bytes)];

        for (unsigned passed = 0; block && block->capacity_bytes != bytes; block = block->next)
                if (++passed == LOOK)
                        return NULL;
        return block;
}

void gr_quick_enter(struct gr_quick *quick, struct gr_block *block)
{
        struct gr_block **list = &quick->lists[list_of(block->capacity_bytes)];

        DL_APPEND(*list, block);
        quick->count++;
        gr_cached_add(&quick->cached, (int64_t)block->capacity_bytes);
}

void gr_quick_leave(struct gr_quick *quick, struct gr_block *block)
{
        struct gr_block **list = &quick->lists[list_of(block->capacity_bytes)];

        DL_DELETE(*list, block);
        quick->count--;
        gr_cached_add(&quick->cached, -(int64_t)block->capacity_bytes);
}

struct gr_block *gr_quick_empty(struct gr_quick *quick)
{
        struct gr_block *all = NULL;

        if (quick->count == 0)
                return NULL;
        for (size_t i = 0; i < 1u << GR_QUICK_LISTS_LOG2; i++) {
                DL_CONCAT(all, quick->lists[i]);
                quick->lists[i] = NULL;
        }
        quick->count = 0;
        return all;
}
