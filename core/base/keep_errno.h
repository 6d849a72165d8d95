/* errno as the program had it: what it calls of this library must not change it. */
#ifndef GR_KEEP_ERRNO_H
#define GR_KEEP_ERRNO_H

#include <errno.h>

static inline void gr_restore_errno(const int *kept)
{
        errno = *kept;
}

/* From here on, errno has its present value again wherever the block is left, after the value of a return. */
#define GR_KEEP_ERRNO __attribute__((cleanup(gr_restore_errno), unused)) const int gr_kept_errno = errno

#endif
