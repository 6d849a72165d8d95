#include "torch_model.h"

#include <stdlib.h>

#include "trace.h"

#define MIB         (UINT64_C(1) << 20)
#define SMALL_BYTES MIB

struct piece {
        struct piece *before, *after; /* by address, in one segment */
        struct piece *list_before, *list_after;
        uint64_t address, bytes;
        bool used, small;
};

struct model {
        struct piece *free_lists[2];
        struct piece *tails[2]; /* expandable: the last piece of the growing segment of each kind */
        uint64_t next_address, reserved_bytes, segments;
        bool expandable, failed;
};

static void list_add(struct model *model, struct piece *piece)
{
        struct piece **head = &model->free_lists[piece->small];

        piece->list_before = NULL;
        piece->list_after = *head;
        if (*head)
                (*head)->list_before = piece;
        *head = piece;
}

static void list_remove(struct model *model, struct piece *piece)
{
        if (piece->list_after)
                piece->list_after->list_before = piece->list_before;
        if (piece->list_before)
                piece->list_before->list_after = piece->list_after;
        else
                model->free_lists[piece->small] = piece->list_after;
}

static struct piece *best_fit(struct model *model, uint64_t bytes, bool small)
{
        struct piece *best = NULL;

        for (struct piece *piece = model->free_lists[small]; piece; piece = piece->list_after)
                if (piece->bytes >= bytes && (!best || piece->bytes < best->bytes ||
                                              (piece->bytes == best->bytes && piece->address < best->address)))
                        best = piece;
        return best;
}

static struct piece *new_segment(struct model *model, uint64_t bytes, bool small)
{
        struct piece *piece = calloc(1, sizeof(*piece));

        if (!piece) {
                model->failed = true;
                return NULL;
        }
        piece->address = model->next_address;
        piece->bytes = bytes;
        piece->small = small;
        model->next_address += bytes;
        model->reserved_bytes += bytes;
        model->segments++;
        return piece;
}

/* Grows the segment of this kind until it ends with a free piece of at least bytes. */
static struct piece *expand_segment(struct model *model, uint64_t bytes, bool small)
{
        struct piece *tail = model->tails[small];
        uint64_t step = small ? 2 * MIB : 20 * MIB;
        uint64_t have = tail && !tail->used ? tail->bytes : 0;
        uint64_t more = (bytes - have + step - 1) / step * step;
        struct piece *piece;

        if (have > 0) {
                list_remove(model, tail);
                tail->bytes += more;
                model->reserved_bytes += more;
                model->segments += more / step;
                return tail;
        }
        piece = new_segment(model, more, small);
        if (!piece)
                return NULL;
        model->segments += more / step - 1;
        piece->before = tail;
        if (tail) {
                tail->after = piece;
                piece->address = tail->address + tail->bytes;
        } else {
                piece->address = small ? 0 : UINT64_C(1) << 50;
        }
        model->tails[small] = piece;
        return piece;
}

static struct piece *piece_alloc(struct model *model, uint64_t bytes)
{
        uint64_t rounded = (bytes + 511) / 512 * 512;
        bool small = rounded <= SMALL_BYTES;
        struct piece *piece = best_fit(model, rounded, small), *rest;
        uint64_t left;

        if (piece)
                list_remove(model, piece);
        else if (model->expandable)
                piece = expand_segment(model, rounded, small);
        else if (small)
                piece = new_segment(model, 2 * MIB, true);
        else if (rounded < 10 * MIB)
                piece = new_segment(model, 20 * MIB, false);
        else
                piece = new_segment(model, (rounded + 2 * MIB - 1) / (2 * MIB) * (2 * MIB), false);
        if (!piece)
                return NULL;
        piece->used = true;
        left = piece->bytes - rounded;
        if (small || model->expandable ? left < 512 : left <= SMALL_BYTES)
                return piece;
        rest = calloc(1, sizeof(*rest));
        if (!rest) {
                model->failed = true;
                return piece;
        }
        rest->address = piece->address + rounded;
        rest->bytes = left;
        rest->small = small;
        rest->before = piece;
        rest->after = piece->after;
        if (rest->after)
                rest->after->before = rest;
        piece->after = rest;
        piece->bytes = rounded;
        if (model->tails[small] == piece)
                model->tails[small] = rest;
        list_add(model, rest);
        return piece;
}

static void merge_pieces(struct model *model, struct piece *piece, struct piece *after)
{
        piece->bytes += after->bytes;
        piece->after = after->after;
        if (piece->after)
                piece->after->before = piece;
        if (model->tails[piece->small] == after)
                model->tails[piece->small] = piece;
        free(after);
}

static void piece_free(struct model *model, struct piece *piece)
{
        piece->used = false;
        if (piece->after && !piece->after->used) {
                list_remove(model, piece->after);
                merge_pieces(model, piece, piece->after);
        }
        if (piece->before && !piece->before->used) {
                piece = piece->before;
                list_remove(model, piece);
                merge_pieces(model, piece, piece->after);
        }
        list_add(model, piece);
}

uint64_t gr_torch_model(const struct gr_trace *trace, bool expandable, uint64_t *ret_segments)
{
        struct model model = {.expandable = expandable};
        struct piece **pieces = calloc(trace->slot_count, sizeof(struct piece *));

        /* The pieces are not freed: this is for a tool that ends soon. */
        for (size_t i = 0; pieces && i < trace->count && !model.failed; i++) {
                const struct gr_trace_op *op = &trace->ops[i];

                if (op->is_free)
                        piece_free(&model, pieces[op->slot]);
                else
                        pieces[op->slot] = piece_alloc(&model, op->bytes);
        }
        model.failed |= !pieces;
        free(pieces);
        *ret_segments = model.segments;
        return model.failed ? 0 : model.reserved_bytes;
}
