#include "range.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "class.h"
#include "core.h"

#define FIT_LOOK  8   /* ranges that are weighed for a request */
#define KEPT_MOST 256 /* structures */

static size_t page_of(const struct gr_segment *segment, uint64_t ptr)
{
        return (ptr - segment->ptr) >> GR_PAGE_SHIFT;
}

struct gr_range *gr_range_at(const struct gr_segment *segment, uint64_t ptr)
{
        struct gr_range *range = segment->first;

        if (segment->begins) {
                size_t page = page_of(segment, ptr);

                while (!segment->begins[page] || segment->begins[page]->block.ptr > ptr)
                        page--; /* the first range begins with the first page */
                range = segment->begins[page];
        }
        while (ptr >= gr_range_end(range))
                range = range->after;
        return range;
}

/* The treap: a heap by priority, which a hash of the address gives, and so balanced whatever the order of calls. */

static bool comes_before(const struct gr_range *a, size_t bytes, uint64_t ptr)
{
        return a->block.capacity_bytes != bytes ? a->block.capacity_bytes < bytes : a->block.ptr < ptr;
}

static void tree_insert(struct gr_range **root, struct gr_range *range)
{
        struct gr_range **link = root, *rest, **less, **more;
        size_t bytes = range->block.capacity_bytes;
        uint64_t ptr = range->block.ptr;

        range->priority = (uint32_t)((ptr / GR_SPLIT_UNIT_BYTES * UINT64_C(0x9E3779B97F4A7C15)) >> 32);
        while (*link && (*link)->priority >= range->priority)
                link = comes_before(*link, bytes, ptr) ? &(*link)->right : &(*link)->left;
        /* The subtree that it displaces is cut in two along its place. */
        rest = *link;
        *link = range;
        less = &range->left;
        more = &range->right;
        while (rest) {
                if (comes_before(rest, bytes, ptr)) {
                        *less = rest;
                        less = &rest->right;
                        rest = rest->right;
                } else {
                        *more = rest;
                        more = &rest->left;
                        rest = rest->left;
                }
        }
        *less = NULL;
        *more = NULL;
}

static void tree_remove(struct gr_range **root, struct gr_range *range)
{
        struct gr_range **link = root, *left = range->left, *right = range->right;

        while (*link != range)
                link = comes_before(*link, range->block.capacity_bytes, range->block.ptr) ? &(*link)->right
                                                                                          : &(*link)->left;
        while (left && right) {
                if (left->priority >= right->priority) {
                        *link = left;
                        link = &left->right;
                        left = left->right;
                } else {
                        *link = right;
                        link = &right->left;
                        right = right->left;
                }
        }
        *link = left ? left : right;
}

struct gr_range *gr_range_best(struct gr_range *root, size_t bytes)
{
        struct gr_range *best = NULL;

        while (root) {
                if (root->block.capacity_bytes >= bytes) {
                        best = root;
                        root = root->left;
                } else {
                        root = root->right;
                }
        }
        return best;
}

/* How many pages nothing else is in lie behind [ptr, ptr + bytes), inside of a free range. */
static size_t pages_opened(const struct gr_range *range, uint64_t ptr, size_t bytes)
{
        uint64_t first = (range->block.ptr + GR_PAGE_BYTES - 1) >> GR_PAGE_SHIFT,
                 end = gr_range_end(range) >> GR_PAGE_SHIFT;
        uint64_t from = ptr >> GR_PAGE_SHIFT, to = (ptr + bytes + GR_PAGE_BYTES - 1) >> GR_PAGE_SHIFT;

        first = from > first ? from : first;
        end = to < end ? to : end;
        return end > first ? end - first : 0;
}

struct fit {
        struct gr_range *range;
        uint64_t at;
        size_t opened;
        unsigned looked_at;
};

static void weigh(struct gr_range *range, uint64_t at, size_t bytes, struct fit *fit)
{
        size_t opened;

        if (at + bytes > gr_range_end(range))
                return;
        opened = pages_opened(range, at, bytes);
        if (opened >= fit->opened)
                return;
        fit->range = range;
        fit->at = at;
        fit->opened = opened;
}

static void fit_in(struct gr_range *range, size_t bytes, struct fit *fit)
{
        uint64_t ptr;

        if (!range || fit->looked_at >= FIT_LOOK || fit->opened == 0)
                return;
        if (range->block.capacity_bytes < bytes) {
                fit_in(range->right, bytes, fit);
                return;
        }
        fit_in(range->left, bytes, fit);
        if (fit->looked_at++ >= FIT_LOOK)
                return;
        ptr = range->block.ptr;
        if (range->segment->pages && !range->segment->small)
                weigh(range, gr_round_up(ptr, GR_PAGE_BYTES), bytes, fit);
        weigh(range, ptr, bytes, fit);
        weigh(range, gr_range_end(range) - bytes, bytes, fit);
        fit_in(range->right, bytes, fit);
}

struct gr_range *gr_range_fit(struct gr_range *root, size_t bytes, uint64_t *ret_at)
{
        struct fit fit = {.opened = SIZE_MAX};

        fit_in(root, bytes, &fit);
        *ret_at = fit.at;
        return fit.range;
}

static struct gr_range **tree_of(struct gr_split *split, const struct gr_range *range)
{
        const struct gr_segment *segment = range->segment;

        if (segment->small)
                return &split->trees[GR_TREE_SMALL];
        return &split->trees[!segment->pages && range->block.capacity_bytes == segment->bytes ? GR_TREE_WHOLE
                                                                                              : GR_TREE_LARGE];
}

void gr_range_enter(struct gr_split *split, struct gr_range *range)
{
        range->state = GR_RANGE_FREE;
        tree_insert(tree_of(split, range), range);
        split->free_count++;
}

void gr_range_leave(struct gr_split *split, struct gr_range *range)
{
        tree_remove(tree_of(split, range), range);
        split->free_count--;
}

/* A range's structure, all zero, from those kept or from the C library; NULL: out of memory. */
static struct gr_range *structure_take(struct gr_split *split)
{
        struct gr_range *range = split->kept;

        if (!range)
                return calloc(1, sizeof(*range));
        split->kept = range->after;
        split->kept_count--;
        memset(range, 0, sizeof(*range));
        return range;
}

static void structure_give(struct gr_split *split, struct gr_range *range)
{
        if (split->kept_count >= KEPT_MOST) {
                free(range);
                return;
        }
        range->after = split->kept;
        split->kept = range;
        split->kept_count++;
}

void gr_range_forget_kept(struct gr_split *split)
{
        struct gr_range *range;

        while ((range = split->kept)) {
                split->kept = range->after;
                free(range);
        }
        split->kept_count = 0;
}

void gr_range_swallow(struct gr_range *range, struct gr_range *after)
{
        if (after->segment->begins) {
                size_t page = page_of(after->segment, after->block.ptr);
                struct gr_range *next = after->after;

                if (after->segment->begins[page] == after)
                        after->segment->begins[page] =
                                next && page_of(after->segment, next->block.ptr) == page ? next : NULL;
        }
        range->block.capacity_bytes += after->block.capacity_bytes;
        if (after->block.freed_epoch > range->block.freed_epoch)
                range->block.freed_epoch = after->block.freed_epoch;
        range->after = after->after;
        if (range->after)
                range->after->before = range;
        structure_give(&range->block.context->split, after);
}

void gr_range_free(struct gr_split *split, struct gr_range *range)
{
        if (range->after && range->after->state == GR_RANGE_FREE) {
                gr_range_leave(split, range->after);
                gr_range_swallow(range, range->after);
        }
        if (range->before && range->before->state == GR_RANGE_FREE) {
                range = range->before;
                gr_range_leave(split, range);
                gr_range_swallow(range, range->after);
        }
        gr_range_enter(split, range);
}

struct gr_range *gr_range_cut(struct gr_range *range, size_t bytes)
{
        struct gr_range *rest = structure_take(&range->block.context->split);

        if (!rest)
                return NULL;
        rest->block.ptr = range->block.ptr + bytes;
        rest->block.capacity_bytes = range->block.capacity_bytes - bytes;
        rest->block.freed_epoch = range->block.freed_epoch;
        rest->block.context = range->block.context;
        rest->block.split = true;
        rest->segment = range->segment;
        rest->state = range->state;
        rest->before = range;
        rest->after = range->after;
        if (rest->after)
                rest->after->before = rest;
        range->after = rest;
        range->block.capacity_bytes = bytes;
        if (rest->segment->begins) {
                struct gr_range **begins = &rest->segment->begins[page_of(rest->segment, rest->block.ptr)];

                if (!*begins || (*begins)->block.ptr > rest->block.ptr)
                        *begins = rest;
        }
        return rest;
}

struct gr_range *gr_range_isolate(struct gr_split *split, struct gr_range *range, uint64_t at, uint64_t bytes)
{
        struct gr_range *rest;

        gr_range_leave(split, range);
        if (at > range->block.ptr) {
                rest = gr_range_cut(range, at - range->block.ptr);
                gr_range_enter(split, range);
                if (!rest)
                        return NULL;
                range = rest;
        }
        if (gr_range_end(range) > at + bytes) {
                rest = gr_range_cut(range, bytes);
                if (!rest) {
                        gr_range_free(split, range);
                        return NULL;
                }
                gr_range_enter(split, rest);
        }
        range->state = GR_RANGE_BUSY;
        return range;
}
