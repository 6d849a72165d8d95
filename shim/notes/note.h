/*
 * What is noted of the program's allocations and frees: in the trace (notes/trace.h), as origins (notes/origins.h), and
 * by the debug aids (notes/debug.h). Where nothing of that is asked for, a call costs a test of gr_notes.
 */
#ifndef GR_NOTE_H
#define GR_NOTE_H

#include "notes/debug.h"
#include "notes/origins.h"
#include "notes/trace.h"

enum { GR_NOTES_TRACE = 1, GR_NOTES_ORIGINS = 2, GR_NOTES_DEBUG = 4 };
extern _Atomic int gr_notes GR_HIDDEN;

static inline bool gr_notes_are_on(void)
{
        return __builtin_expect(atomic_load_explicit(&gr_notes, memory_order_relaxed) != 0, 0);
}

/* Opens the files that the options name, if any. Called once, in the process that uses CUDA. */
void gr_note_init(void);

/* Whether the debug aids watch new blocks. */
static inline bool gr_notes_watch(void)
{
        return __builtin_expect((atomic_load_explicit(&gr_notes, memory_order_relaxed) & GR_NOTES_DEBUG) != 0, 0);
}

/* The process exits: called before its figures are written, and afterwards. */
void gr_note_ending(void);
void gr_note_end(void);

/* Called before a context ends, and after it has ended. */
void gr_note_context_ending(struct gr_context *context);
void gr_note_context_gone(struct gr_context *context);

/* Called before and after each allocation of the program. rc: its result. */
void gr_note_before_alloc(void);
void gr_note_alloc(struct gr_context *context, CUdeviceptr ptr, size_t bytes, int rc);

/*
 * Called before and after each free. rc: its result; unless 0, nothing was freed. in_order: it is a free in the order
 * of a stream. is_over: the debug aids have already freed the block or refused the free, with the result in `rc`.
 */
struct gr_note_free {
        uint64_t before_ns;
        struct gr_origins_found found;
        struct gr_debug_block *watched;
        bool is_over;
        int rc;
};
struct gr_note_free gr_note_before_free(CUdeviceptr ptr, bool in_order);
void gr_note_free(CUdeviceptr ptr, struct gr_note_free before, int rc);

#endif
