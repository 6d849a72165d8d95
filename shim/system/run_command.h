/*
 * Runs the gpureclaim command that was installed with the library, for what only another process can find out. The
 * program does not notice: the command is no child of the process, so no signal comes and no wait sees it; it has none
 * of the process's descriptors, and ends with the process. Linux only; no CUDA.
 */
#ifndef GR_RUN_COMMAND_H
#define GR_RUN_COMMAND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Finds the command, and keeps the environment for it, without LD_PRELOAD. Called once, while the library is set up, as
 * the program may change its folder and its environment later.
 */
void gr_run_command_find(void);

/* Whether it was found. */
bool gr_run_command_is_there(void);

/*
 * Keeps what the command's file has in memory, some 300 KiB, if that has not been done: from now on this is what runs
 * if the file is removed or replaced, as by an upgrade. (A descriptor would be one that the program does not know.)
 * Where it cannot be kept, or run from memory, it is what the file has then. One thread at a time, as below; errno is
 * kept.
 */
void gr_run_command_keep(void);

/*
 * Runs it with these arguments, of which the first one is its name, and waits for the first line that it prints, which
 * goes to ret without the line's end. meanwhile is called every now and then, and must not care which process calls it.
 * 0 or -errno; -ETIMEDOUT: no line came within most_ns; -ENODATA: it ended without. One thread at a time; errno is
 * kept.
 */
int gr_run_command(const char *const *arguments, char *ret, size_t bytes, uint64_t most_ns, void (*meanwhile)(void));

#endif
