/* Allocation and free: what the pool serves. */
#ifndef GR_HOOKS_MEMORY_H
#define GR_HOOKS_MEMORY_H

#include "alloc/pool.h"
#include "driver/real.h"
#include "hooks/captures.h"
#include "notes/note.h"

/*
 * gr_memory_alloc gives the program a block of the pool, gr_memory_free takes one back; both are noted. 0 or -errno;
 * errno is kept. bytes: from 1 to GR_BLOCK_MAX_BYTES. -ENOENT from a free: not a block of the pool. Where the free
 * fails, the block is unchanged.
 *
 * The inline functions are the fast path; the slow path is in memory.c. It is called for an allocation if the fast path
 * has found nothing, or was skipped because a capture is open or allocations are noted. freed: what gr_pool_free_fast
 * set, or all zero if it was skipped because frees are noted. (gr_memory_alloc does not call gr_pool_alloc, because the
 * slow path here has steps of its own before that of the pool.)
 */
int gr_memory_alloc_slow(struct gr_context *context, size_t bytes, CUdeviceptr *ret_ptr);
int gr_memory_free_slow(CUdeviceptr ptr, struct gr_begun_free freed);

static inline int gr_memory_alloc(struct gr_context *context, size_t bytes, CUdeviceptr *ret_ptr)
{
        /* Does not touch errno; the slow path may */
        uint64_t ptr = gr_captures_are_open() || gr_notes_are_on() ? 0 : gr_pool_alloc_fast(context, bytes);

        if (__builtin_expect(!ptr, 0))
                return gr_memory_alloc_slow(context, bytes, ret_ptr);
        *ret_ptr = ptr;
        return 0;
}

static inline int gr_memory_free(CUdeviceptr ptr)
{
        struct gr_begun_free freed = {0};

        if (__builtin_expect(!gr_notes_are_on(), 1) && gr_pool_free_fast(&gr_core, ptr, &freed))
                return 0;
        return gr_memory_free_slow(ptr, freed);
}

/*
 * Set while this thread's runtime passes a request to the driver that the pool has refused already: the pool's -errno.
 * Else 0.
 */
extern _Thread_local __attribute__((tls_model("initial-exec"))) int gr_memory_runtime_refused;

#endif
