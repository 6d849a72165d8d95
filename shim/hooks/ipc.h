/* Memory and events that are shared with other processes or interfaces. */
#ifndef GR_IPC_H
#define GR_IPC_H

#include <stdbool.h>

/*
 * Called when memory or an event begins to be shared with other processes or interfaces: kernels may wait for what
 * those write, and streams for what they do, so no barrier is laid from now on.
 */
void gr_ipc_begin_sharing(void);

/* Marks a descriptor for memory of this process, before the program gets it, so that an import can recognise it. */
void gr_ipc_mark(int fd);

/* Whether the descriptor, or one that it is a copy of, was marked by this process. */
bool gr_ipc_is_own(int fd);

#endif
