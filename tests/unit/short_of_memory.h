/* The C library has no memory for the pool's own structures. For one source file of a test. */
#ifndef GR_SHORT_OF_MEMORY_H
#define GR_SHORT_OF_MEMORY_H

#include <stdbool.h>
#include <stdlib.h>

#include "base/metadata.h"

static bool short_of_memory;

/* In place of the C library's, from which structures get theirs. */
void *aligned_alloc(size_t alignment, size_t bytes)
{
        void *ptr = NULL;

        return short_of_memory || posix_memalign(&ptr, alignment, bytes) ? NULL : ptr;
}

struct piece {
        struct piece *next;
        size_t bytes;
};

static struct piece *taken_pieces;

static inline void take_pieces(size_t bytes)
{
        struct piece *piece;

        while ((piece = gr_metadata_alloc(bytes))) {
                *piece = (struct piece){taken_pieces, bytes};
                taken_pieces = piece;
        }
}

/* From now on there is none for a structure of so many bytes, nor where it could be cut from. */
static inline void memory_runs_out(size_t structure_bytes)
{
        short_of_memory = true;
        for (size_t bytes = 1 << 16; bytes > structure_bytes; bytes /= 2)
                take_pieces(bytes);
        take_pieces(structure_bytes);
}

static inline void memory_is_back(void)
{
        short_of_memory = false;
        for (struct piece *next; taken_pieces; taken_pieces = next) {
                next = taken_pieces->next;
                gr_metadata_free(taken_pieces, taken_pieces->bytes);
        }
}

#endif
