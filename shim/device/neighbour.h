/* Other processes on the device that use this library. */
#ifndef GR_NEIGHBOUR_H
#define GR_NEIGHBOUR_H

#include <stdbool.h>
#include <stdint.h>

#include "driver/real.h"

/*
 * Makes charges of the device count for the group. Called once for each device, before anything is charged to it, with
 * total_bytes known.
 */
void gr_neighbour_begin(struct gr_device *device);

/*
 * The device is about to be used: joins the group's region, at the first call only. Where that fails, the process works
 * alone.
 */
void gr_neighbour_join(CUdevice dev);

/* Whether the device's region has been joined. */
bool gr_neighbour_joined(const struct gr_device *device);

/* Called before memory is taken from the driver: now and then tries to start threads that could not be started. */
void gr_neighbour_retry(void);

/* At the end of the process: waits briefly for the threads that serve neighbours, and leaves the regions. */
void gr_neighbour_leave(void);

/* Called in a child after fork: forgets the regions, which are the parent's. */
void gr_neighbour_forget(void);

/*
 * In a thread that serves neighbours: shows the asking process that the work goes on, and what the process has by now.
 * No effect in other threads.
 */
void gr_neighbour_beat(void);

/* For gr_core.ask_neighbours. */
uint64_t gr_neighbour_ask(struct gr_core *core, struct gr_device *device, uint64_t want_bytes);

/*
 * The bytes that the group has reserved on the device with this UUID (text without a prefix). For a process that is no
 * member. 0: not known.
 */
uint64_t gr_neighbour_sum(const char *uuid);

/* For gr_core.wait_for_neighbours. */
void gr_neighbour_wait(struct gr_device *device, int64_t bytes);

/* For gr_core.let_first. */
unsigned gr_neighbour_let_first(struct gr_device *device, enum gr_let_first what);

/* For gr_core.may_give. */
bool gr_neighbour_may_give(struct gr_device *device, uint64_t bytes);

#endif
