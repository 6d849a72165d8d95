/* What the parts of process.c share. */
#ifndef GR_TEST_PROCESS_H
#define GR_TEST_PROCESS_H

#include "check.h"

#include <cuda.h>

#define BLOCK ((size_t)3 << 20)

extern CUcontext current_context; /* for threads that begin; set by the mode */

/* The first device's primary context, current then. */
void open_device(void);
/* Some traffic, so that there is a pool with blocks in it. */
void work(void);

/* Modes: each is the exit status. */
int cancel(void);
int cancel_first(void);
int cancel_last(void);
int threads_end(void);
int main_thread_ends(void);
int leaks(void);
int signals(void);
int helper_mask(void);
int helper_ends(void);

#endif
