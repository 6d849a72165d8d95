/* What the parts of contexts.c share. All use the current context, unless they say another. */
#ifndef GR_TEST_CONTEXTS_H
#define GR_TEST_CONTEXTS_H

#include "check.h"
#include "use_blocks.h"

#include <cuda.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SMALL_BLOCK (MIB / 4)

/* A new context, which is current then. */
CUcontext create(void);
/* Allocates, writes, reads, frees, some of it several times: whether memory is what it should be in this context. */
void work(const char *where);
/* What the first device has given out; 0 on a real one. */
size_t used(void);
/* Not until it is refused: a driver that refuses none would go on for ever. */
void release_all(CUresult (*release)(CUdevice));

/* What is current changes while there is one context only, whose pool each thread remembers. */
typedef CUresult push_function(CUcontext);
typedef CUresult pop_function(CUcontext *);
void alone(push_function *push, pop_function *pop);

/* The function of this exported name, as a program built years ago has it; false where the driver has none. */
bool old_symbol(const char *name, void *ret_function);

/* Modes, and parts of them. */
void contexts_old(void);
void contexts_of_graphics(void);
void contexts_that_wait(void);
void contexts_captures(void);
/* A key that was not made is another one's. */
void contexts_keys(void);

#endif
