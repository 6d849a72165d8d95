/* Functions of the shared runtime. */
#ifndef GR_RUNTIME_H
#define GR_RUNTIME_H

/* A tool observes the calls of the runtime: from this call on, none bypasses the runtime. by: its name in the log. */
void gr_runtime_watched(const char *by);

#endif
