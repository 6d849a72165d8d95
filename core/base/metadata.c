#include "base/metadata.h"

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/attributes.h"
#include "base/lock.h"

#define CHUNK_BYTES ((size_t)2 << 20)   /* a huge page */
#define PIECE_MOST  ((size_t)512 << 10) /* larger ones, such as big tables, are the C library's, and are freed */

/* The link in a freed piece; also in the first cache line of each chunk. */
struct piece {
        struct piece *next;
};

static struct gr_lock lock = GR_LOCK_INIT(GR_RANK_METADATA);
/* The newest first; older ones stay listed for leak checkers. */
static struct piece *chunks GR_GUARDED_BY(lock);
static size_t chunk_used GR_GUARDED_BY(lock) = CHUNK_BYTES;                     /* bytes used in the newest chunk */
static struct piece *freed[PIECE_MOST / GR_LINE_BYTES + 1] GR_GUARDED_BY(lock); /* by size, in cache lines */

_Static_assert(PIECE_MOST < CHUNK_BYTES - GR_LINE_BYTES, "a new chunk has room for every piece");
_Static_assert(sizeof(struct piece) <= GR_LINE_BYTES, "a freed piece has room for its link");

static size_t lines_of(size_t bytes)
{
        return (bytes + GR_LINE_BYTES - 1) / GR_LINE_BYTES;
}

/* Begins a new chunk; the rest of the one before stays unused. Lock held. */
GR_HELD(lock) static bool chunk_take(void)
{
        struct piece *chunk = aligned_alloc(CHUNK_BYTES, CHUNK_BYTES);

        gr_assert_locked(&lock);
        if (!chunk)
                return false;
        madvise(chunk, CHUNK_BYTES, MADV_HUGEPAGE); /* without huge pages this fails, and small pages serve */
        chunk->next = chunks;
        chunks = chunk;
        chunk_used = GR_LINE_BYTES;
        return true;
}

static void *piece_take(size_t lines)
{
        struct piece *piece = NULL;

        gr_lock(&lock);
        if (freed[lines]) {
                piece = freed[lines];
                freed[lines] = piece->next;
        } else if (chunk_used + lines * GR_LINE_BYTES <= CHUNK_BYTES || chunk_take()) {
                piece = (struct piece *)((char *)chunks + chunk_used);
                chunk_used += lines * GR_LINE_BYTES;
        }
        gr_unlock(&lock);
        return piece;
}

void *gr_metadata_alloc(size_t bytes)
{
        size_t lines = lines_of(bytes);
        void *piece;

        assert(bytes > 0); /* a piece of 0 bytes would have the address of the next one */
        piece = GR_METADATA_IN_CHUNKS && bytes <= PIECE_MOST ? piece_take(lines)
                                                             : aligned_alloc(GR_LINE_BYTES, lines * GR_LINE_BYTES);

        return piece ? memset(piece, 0, bytes) : NULL;
}

void gr_metadata_free(void *ptr, size_t bytes)
{
        struct piece *piece = ptr;

        if (!GR_METADATA_IN_CHUNKS || bytes > PIECE_MOST) {
                free(ptr);
        } else if (piece) {
                assert((uintptr_t)ptr % GR_LINE_BYTES == 0); /* else it was not allocated here */
                gr_lock(&lock);
                assert(freed[lines_of(bytes)] != piece); /* freed twice */
                piece->next = freed[lines_of(bytes)];
                freed[lines_of(bytes)] = piece;
                gr_unlock(&lock);
        }
}
