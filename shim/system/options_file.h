/* The options of the process, from its environment and the user's file: for the library and the command. */
#ifndef GR_OPTIONS_FILE_H
#define GR_OPTIONS_FILE_H

#include "base/options.h"

/*
 * As gr_options_load for the process. The file is that of GPURECLAIM_CONFIG, else gpureclaim/config in XDG_CONFIG_HOME
 * or in ~/.config, where there is one. A program with more rights than its caller (set-uid) must obey neither the
 * caller's environment nor a file that this names, so it gets the defaults. Keeps errno; one thread at a time. 0, or
 * -errno: the file cannot be read.
 */
int gr_options_read(struct gr_options *ret, gr_options_warn *warn, void *warn_arg);

#endif
