/*
 * The debug aids: GPURECLAIM_FILL, GPURECLAIM_GUARD and GPURECLAIM_QUARANTINE. A layer above the pool, which watches
 * the blocks that the program allocates while no capture is open. A block may have a red zone behind it, which the pool
 * takes for a part of the block, and a freed one may be kept in a queue before the pool gets it.
 *
 * What is written and read here, and in which order with the program's work:
 * - Everything is done on the library's own stream of the block's context, and the host waits for it. That stream is
 *   non-blocking, so it waits for no work of the program.
 * - A free waits for the GPU first, as the driver's own free does: no work uses the block afterwards. Only then is it
 *   checked and filled. The pool gets it as idle (gr_pool_free_idle), so that its next owner needs no fence or barrier.
 *   A program that hangs here also hangs without the library.
 * - An allocation is filled before the program knows the address, so before its first use on any stream. Earlier users
 *   are done: the pool gave an idle block or fresh memory. Exceptions are blocks that were not watched as they were
 *   freed: in a capture, or in stream order. For one of these the pool may have laid a barrier. The fill comes behind
 *   it, as all later work of the context does, and the host waits for both.
 * - The fill itself needs room on the GPU. A program whose kernel takes the whole GPU until the host has allocated
 *   something hangs; it also would at any copy.
 * - While a capture is open, to wait for the GPU may break it, and the memory belongs to a graph: such blocks are left
 *   alone. A free in stream order must not wait: the red zone is checked as it is, and the block is left alone.
 * - At the end of a context or of the process nothing is waited for: what is found then was written by finished work.
 *   Other threads may free meanwhile; a free of the very block that is being read waits for the read.
 * - An exported block is checked but neither filled nor kept: another process may still have it open.
 */
#ifndef GR_DEBUG_H
#define GR_DEBUG_H

#include "shim.h"

struct gr_debug_block; /* one that is watched */

/* Once, in the process that uses CUDA. Whether one of the options asks for this. All below is called only then. */
bool gr_debug_init(void);

/*
 * As gr_pool_alloc, for a block that is watched from then on. No capture is open. Where memory is short there is no red
 * zone.
 */
int gr_debug_alloc(struct gr_context *context, size_t bytes, uint64_t *ret_ptr);

/* The pool gave the program this block of bytes and, behind these, zone_bytes: fills it, and watches it. */
void gr_debug_watch(struct gr_context *context, CUdeviceptr ptr, size_t bytes, size_t zone_bytes);

/*
 * Before the program frees ptr. True: the free is over, with *ret_rc. False: the pool has to free it. Where *ret_block
 * is set gr_debug_free_end follows, with the result. in_order: in the order of a stream.
 */
bool gr_debug_free(CUdeviceptr ptr, bool in_order, struct gr_debug_block **ret_block, int *ret_rc);
void gr_debug_free_end(struct gr_debug_block *block, int rc);

/* What the ledger says of the block at ptr becomes what the program may see: no red zone, and nothing kept. */
void gr_debug_correct(CUdeviceptr ptr, struct gr_block_info *info);

/* Checks all blocks of the context, or of all contexts for NULL, and waits for nothing. */
void gr_debug_check(struct gr_context *context);

/* The context has ended, and its memory with it: forgets its blocks. */
void gr_debug_context_gone(struct gr_context *context);

#endif
