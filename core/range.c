#include "range.h"

#include <stdlib.h>

#include "class.h"
#include "split.h"

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
        free(after);
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
        struct gr_range *rest = calloc(1, sizeof(*rest));

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
