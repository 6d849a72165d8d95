#include "notes/note.h"

#include "base/attributes.h"
#include "driver/operations.h"

_Atomic int gr_notes GR_HOT_DATA;

void gr_note_init(void)
{
        if (gr_trace_init())
                gr_notes |= GR_NOTES_TRACE;
        if (gr_origins_init())
                gr_notes |= GR_NOTES_ORIGINS;
        if (gr_debug_init())
                gr_notes |= GR_NOTES_DEBUG;
}

void gr_note_ending(void)
{
        if (gr_notes & GR_NOTES_DEBUG)
                gr_debug_check(NULL);
}

void gr_note_end(void)
{
        if (gr_notes & GR_NOTES_ORIGINS)
                gr_origins_end();
}

void gr_note_context_ending(struct gr_context *context)
{
        if (gr_notes & GR_NOTES_DEBUG)
                gr_debug_check(context);
}

void gr_note_context_gone(struct gr_context *context)
{
        if (gr_notes & GR_NOTES_ORIGINS)
                gr_origins_context_gone();
        if (gr_notes & GR_NOTES_DEBUG)
                gr_debug_context_gone(context);
}

void gr_note_before_alloc(void)
{
        if (gr_notes & GR_NOTES_TRACE)
                gr_trace_begin_alloc();
}

void gr_note_alloc(struct gr_context *context, CUdeviceptr ptr, size_t bytes, int rc)
{
        if ((gr_notes & GR_NOTES_ORIGINS) && !rc)
                gr_origins_add(ptr, bytes); /* first, as it may add the stack to the trace */
        if (gr_notes & GR_NOTES_TRACE)
                gr_trace_end_alloc(context, ptr, bytes, rc);
}

struct gr_note_free gr_note_before_free(CUdeviceptr ptr, bool in_order)
{
        struct gr_note_free before = {.before_ns = gr_notes & GR_NOTES_TRACE ? gr_driver.now_ns() : 0};

        if (gr_notes & GR_NOTES_ORIGINS)
                before.found = gr_origins_find(ptr);
        if (gr_notes & GR_NOTES_DEBUG)
                before.is_over = gr_debug_free(ptr, in_order, &before.watched, &before.rc);
        return before;
}

void gr_note_free(CUdeviceptr ptr, struct gr_note_free before, int rc)
{
        if (before.watched)
                gr_debug_free_end(before.watched, rc);
        if (rc)
                return;
        if (before.before_ns)
                gr_trace_free(ptr, before.before_ns);
        if (before.found.block)
                gr_origins_remove(ptr, before.found);
}
