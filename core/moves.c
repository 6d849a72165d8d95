#include "moves.h"

#include <utlist.h>

#include "core.h"
#include "log.h"
#include "pages.h"

#define MOVE_BATCH 64

static void ghost_enter(struct gr_split *split, struct gr_range *range, uint64_t epoch)
{
        struct gr_block *block = &range->block;

        range->state = GR_RANGE_GHOST;
        block->freed_epoch = epoch;
        DL_APPEND(split->ghosts, block);
}

/* An extent of at most most_bytes inside the smallest free range that has one. */
static struct gr_range *movable(struct gr_range *root, uint64_t most_bytes, uint64_t *ret_at, uint64_t *ret_bytes)
{
        struct gr_range *found;
        uint64_t at, end;

        if (!root)
                return NULL;
        if (root->block.capacity_bytes >= GR_PAGE_BYTES) {
                found = movable(root->left, most_bytes, ret_at, ret_bytes);
                if (found)
                        return found;
                end = gr_range_end(root);
                at = root->segment->pages ? gr_page_up(root->block.ptr) : end;
                while (at < end) {
                        const struct gr_page *extent = gr_extent_at(root->segment, at);
                        uint64_t begin = gr_extent_ptr(root->segment, extent);

                        *ret_at = begin;
                        *ret_bytes = gr_extent_bytes(extent);
                        if (begin >= at && begin + *ret_bytes <= end && *ret_bytes <= most_bytes)
                                return root;
                        at = begin + *ret_bytes;
                }
        }
        return movable(root->right, most_bytes, ret_at, ret_bytes);
}

struct move {
        struct gr_range *from; /* busy, one extent */
        uint64_t to;
};

/*
 * Chooses extents to move behind the holes of a busy range. Their memory is free, so whatever is submitted from now on
 * runs after the work that may still use it, under whatever address.
 */
static unsigned moves_choose(struct gr_split *split, const struct gr_range *range, struct move *moves)
{
        const struct gr_segment *heap = range->segment;
        uint64_t at = gr_page_down(range->block.ptr), end = gr_range_end(range), stop = at;
        unsigned count = 0;

        while (at < end && count < MOVE_BATCH) {
                struct gr_range *from;
                uint64_t from_at, bytes;

                while (stop < end && !gr_page_is_mapped(gr_page_at(heap, stop)))
                        stop += GR_PAGE_BYTES;
                from = NULL;
                for (int tree = GR_TREE_SMALL; tree <= GR_TREE_LARGE && !from && stop > at; tree++)
                        from = movable(split->trees[tree], stop - at, &from_at, &bytes);
                from = from ? gr_range_isolate(split, from, from_at, bytes) : NULL;
                if (from) {
                        moves[count++] = (struct move){.from = from, .to = at};
                        at += bytes;
                        continue;
                }
                while (stop < end && gr_page_is_mapped(gr_page_at(heap, stop)))
                        stop += GR_PAGE_BYTES;
                at = stop;
        }
        return count;
}

static uint64_t move_bytes(const struct move *move)
{
        return gr_extent_bytes(gr_page_at(move->from->segment, move->from->block.ptr));
}

/*
 * Maps the extents a second time, in this heap, as far as the driver does. Their old addresses stay mapped until the
 * last work there has passed. Returns how many moved. Lock not held.
 */
static unsigned move_all(struct gr_context *context, struct gr_segment *heap, struct move *moves, unsigned count)
{
        const struct gr_driver *driver = context->core->driver;
        unsigned mapped = 0, done = 0;

        for (; mapped < count; mapped++) {
                struct move *move = &moves[mapped];
                uint64_t handle = gr_page_at(move->from->segment, move->from->block.ptr)->handle;

                if (driver->mem_map(context->handle, context->device->ordinal, move->to, move_bytes(move), &handle))
                        break;
        }
        while (done < mapped) { /* those side by side at once */
                uint64_t first = move_bytes(&moves[done]), bytes = first;

                for (unsigned i = done + 1; i < mapped && moves[i].to == moves[done].to + bytes; i++)
                        bytes += move_bytes(&moves[i]);
                if (gr_extents_open(context, moves[done].to, first, &bytes))
                        break;
                for (; bytes > 0; done++)
                        bytes -= move_bytes(&moves[done]);
        }
        for (unsigned i = done; i < mapped; i++)
                driver->mem_unmap(context->handle, moves[i].to, move_bytes(&moves[i]), GR_NO_HANDLE);
        for (unsigned i = 0; i < done; i++) {
                struct gr_page *old = gr_page_at(moves[i].from->segment, moves[i].from->block.ptr),
                               *extent = gr_page_at(heap, moves[i].to);
                uint32_t pages = old->pages;

                *extent = (struct gr_page){.handle = old->handle, .freed_epoch = old->freed_epoch, .pages = pages};
                for (uint32_t j = 1; j < pages; j++)
                        extent[j].back = j;
                for (uint32_t j = 0; j < pages; j++)
                        old[j] = (struct gr_page){0};
                old->ghost = pages;
        }
        return done;
}

uint64_t gr_moves_make(struct gr_context *context, struct gr_range *range, uint64_t hole_bytes)
{
        struct gr_split *split = &context->split;
        struct move moves[MOVE_BATCH];
        unsigned count, done;

        if (atomic_load(&split->moves_refused))
                return hole_bytes;
        gr_lock(&split->lock);
        gr_split_drain(context);
        count = moves_choose(split, range, moves);
        gr_unlock(&split->lock);
        done = move_all(context, range->segment, moves, count);
        if (done < count && !atomic_exchange(&split->moves_refused, true))
                gr_log(GR_LOG_INFO, "the driver maps no memory twice: free memory waits until it is idle");
        gr_lock(&split->lock);
        for (unsigned i = 0; i < count; i++) {
                struct gr_range *from = moves[i].from;

                if (i < done) {
                        hole_bytes -= from->block.capacity_bytes;
                        gr_count(context->core, GR_STAT_moved_bytes, from->block.capacity_bytes);
                        ghost_enter(split, from, gr_page_at(range->segment, moves[i].to)->freed_epoch);
                } else {
                        gr_pages_settle(split, from, GR_RANGE_FREE);
                }
        }
        gr_unlock(&split->lock);
        return hole_bytes;
}

static bool is_idle_ghost(struct gr_context *context, const struct gr_range *range)
{
        return range && range->state == GR_RANGE_GHOST && gr_fence_idle(&context->fence, range->block.freed_epoch);
}

/* The idle ghosts side by side with this one, itself included, as one busy range. */
static struct gr_range *ghosts_join(struct gr_context *context, struct gr_range *range)
{
        struct gr_split *split = &context->split;
        struct gr_block *block;

        while (is_idle_ghost(context, range->before))
                range = range->before;
        block = &range->block;
        DL_DELETE(split->ghosts, block);
        range->state = GR_RANGE_BUSY;
        while (is_idle_ghost(context, range->after)) {
                block = &range->after->block;
                DL_DELETE(split->ghosts, block);
                gr_range_swallow(range, range->after);
        }
        return range;
}

/* At once, which costs as much as one; one by one where the driver does not. False: some of these addresses are lost.
 * Lock not held. */
static bool ghosts_unmap(struct gr_context *context, struct gr_range *range)
{
        const struct gr_driver *driver = context->core->driver;
        uint64_t at = range->block.ptr, end = gr_range_end(range), bytes;
        bool at_once = driver->mem_unmap(context->handle, at, end - at, GR_NO_HANDLE) == 0, lost = false;

        for (; at < end; at += bytes) {
                struct gr_page *page = gr_page_at(range->segment, at);

                bytes = (uint64_t)page->ghost << GR_PAGE_SHIFT;
                if (at_once || driver->mem_unmap(context->handle, at, bytes, GR_NO_HANDLE) == 0)
                        page->ghost = 0;
                else
                        lost = true;
        }
        return !lost;
}

void gr_moves_reap(struct gr_context *context)
{
        struct gr_split *split = &context->split;

        /* They moved in any order, but the oldest is idle first or soon. */
        while (split->ghosts && is_idle_ghost(context, gr_range_of(split->ghosts))) {
                struct gr_range *range = ghosts_join(context, gr_range_of(split->ghosts));
                bool gone;

                split->busy++;
                gr_unlock(&split->lock);
                gone = ghosts_unmap(context, range);
                gr_lock(&split->lock);
                split->busy--;
                if (gone)
                        gr_pages_settle(split, range, GR_RANGE_FREE);
        }
}
