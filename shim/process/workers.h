/*
 * Threads of ours. They take none of the signals that the program waits for; a fault's they do.
 *
 * No thread of ours may end while the process does: as it ends it runs the driver's destructors of what the driver kept
 * for it, and these do not go together with the driver's own end, which exit() runs (on an H200, driver 580, one in six
 * programs that exited while such a thread ended died of SIGSEGV, November 2026). So a thread either stays for good, or
 * is joined before the driver's handlers run.
 *
 * Threads for reclaimables stay: each call runs on an idle one, or on a new one where all are busy or hang. None is
 * there before the first call. No CUDA here: prepare, which may be NULL, is called once on each new thread.
 */
#ifndef GR_WORKERS_H
#define GR_WORKERS_H

#include <stdbool.h>
#include <stdint.h>

/* Before the first call; process-wide. */
void gr_worker_init(void (*prepare)(void));

/* Has a thread call work(arg) soon; false where none can be had, or after gr_worker_stop. */
bool gr_worker_call(void (*work)(void *arg), void *arg);

/* How many there are. */
unsigned gr_worker_threads(void);

/* No call is begun from here on. Waits most_ns for those that run: the others may meet the end of the driver. */
void gr_worker_stop(uint64_t most_ns);

/* Starts a thread that will end by itself or when told. False where there is none to be had. */
bool gr_thread_start(void *(*run)(void *arg), void *arg);

/* Waits until all threads of gr_thread_start are gone, most_ns in all; they must have been told to end. */
void gr_threads_join(uint64_t most_ns);

#endif
