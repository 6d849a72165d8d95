/* The origins of GPURECLAIM_BACKTRACE: which blocks the program has, and which stack allocated each. */
#ifndef GR_ORIGINS_H
#define GR_ORIGINS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Makes the file, if the option asks for it. Called once, in the process that uses CUDA. Returns whether it exists. */
bool gr_origins_init(void);

/* The process exits: removes the file, unless the program's user named it. */
void gr_origins_end(void);

/* The program has been given this block. */
void gr_origins_add(uint64_t address, size_t bytes);

/*
 * Called before and after a free. The block is found before it, since the address may be used again at once, and
 * removed once the free has succeeded. block 0: the block was not noted.
 */
struct gr_origins_found {
        uint32_t block;
        uint64_t time_ns;
};
struct gr_origins_found gr_origins_find(uint64_t address);
void gr_origins_remove(uint64_t address, struct gr_origins_found found);

/* The number of the stack that allocated the block; 0: not noted. The number stays valid when the block is removed. */
uint32_t gr_origins_stack(uint64_t address);

/*
 * Writes the stack's innermost places in one line, as many as have room; nothing for 0. Where it has functions of
 * Python, only these. buf_bytes > 0.
 */
void gr_origins_text(uint32_t stack, char *buf, size_t buf_bytes);

/* A context has ended, and its memory with it: removes the blocks that the pool does not know any more. */
void gr_origins_context_gone(void);

#endif
