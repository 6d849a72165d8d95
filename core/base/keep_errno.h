/* Keeps errno as the program had it: a call into this library must not change it. */
#ifndef GR_KEEP_ERRNO_H
#define GR_KEEP_ERRNO_H

#include <errno.h>

static inline void gr_restore_errno(const int *kept)
{
        errno = *kept;
}

/* Saves errno here and restores it where the enclosing block is left; a value to return is computed before that. */
#define GR_KEEP_ERRNO __attribute__((cleanup(gr_restore_errno), unused)) const int gr_kept_errno = errno

#endif
