/*
 * The library's threads. They block all signals except those of faults.
 *
 * None of these threads may end while the process exits. A thread that ends runs the driver's destructors of its
 * thread-local data, and these crash if exit() shuts the driver down at the same time (docs/measurements.md,
 * thread-end-at-exit). So a thread either never ends, or is joined before the driver's exit handlers run.
 *
 * Workers, which run the calls of reclaimables, never end. Each call runs on an idle worker, or on a new one where all
 * are busy or hang. There is none before the first call. There is no CUDA in this file: `prepare` (NULL: nothing) is
 * called once on each new worker, and may use it. Any thread may call these functions.
 */
#ifndef GR_WORKERS_H
#define GR_WORKERS_H

#include <stdbool.h>
#include <stdint.h>

/* Sets prepare for the process; before the first gr_worker_call. */
void gr_worker_init(void (*prepare)(void));

/* Has a worker call work(arg) soon. False where no thread or no room can be had, or after gr_worker_stop. */
bool gr_worker_call(void (*work)(void *arg), void *arg);

/*
 * No call of a worker begins after this. Waits up to most_ns for calls that run; one that runs longer may still run
 * when the driver ends.
 */
void gr_worker_stop(uint64_t most_ns);

/* Starts a thread that ends by itself or when it is told. False where no thread can be had. */
bool gr_workers_start_thread(void *(*run)(void *arg), void *arg);

/* How many threads of the library there are: workers, and those of gr_workers_start_thread that have not ended. */
unsigned gr_workers_running(void);

/* Joins all threads of gr_workers_start_thread, waiting up to most_ns in all; they must have been told to end. */
void gr_workers_join_threads(uint64_t most_ns);

#endif
