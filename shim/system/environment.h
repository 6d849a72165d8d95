/* The options of the process. */
#ifndef GR_ENVIRONMENT_H
#define GR_ENVIRONMENT_H

#include "base/options.h"

extern struct gr_options gr_options;

/* Reads the options, at the first call only. Called before the first warning, so that warnings obey them. */
void gr_environment_read(void);

/* Makes a path absolute, unless it would be too long, because the program may change its working directory later. */
void gr_environment_make_absolute(struct gr_path *path);

#endif
