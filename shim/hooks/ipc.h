/* Memory that is shared with other processes or interfaces. */
#ifndef GR_IPC_H
#define GR_IPC_H

#include <stdbool.h>

/* Memory is shared with other processes or interfaces from this call on: kernels may wait for what those write. */
void gr_ipc_memory_shared(void);

/* Marks a descriptor for memory of this process, before the program gets it, so that an import can recognise it. */
void gr_ipc_mark(int fd);

/* Whether such a descriptor, or a copy of it, stands for memory of this process. */
bool gr_ipc_is_own(int fd);

#endif
