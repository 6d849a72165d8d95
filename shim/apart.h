/*
 * Threads for reclaimables: each call runs on an idle one, or on a new one where all are busy or hang. One stays for
 * the next call, the others end. They take no signals, and none is there before the first call.
 *
 * No CUDA here: prepare, which may be NULL, is called once on each new thread.
 */
#ifndef GR_APART_H
#define GR_APART_H

#include <stdbool.h>

/* Before the first call; process-wide. */
void gr_apart_init(void (*prepare)(void));

/* Has a thread call work(arg) soon; false where none can be had, or after gr_apart_stop. */
bool gr_apart_call(void (*work)(void *arg), void *arg);

/* No call is begun from here on; those that run are not waited for. */
void gr_apart_stop(void);

/* Starts a detached thread that takes none of the signals the program waits for. False where there is none to be had.
 */
bool gr_thread_start(void *(*run)(void *arg), void *arg);

#endif
