/* Work that a thread submits. */
#ifndef GR_SUBMIT_H
#define GR_SUBMIT_H

#include "shim.h"

/*
 * The calling thread is about to submit work to the stream: notes whether streams overlap, and work beside a capture.
 * null_is_own: as for gr_capture_on. No lock is held.
 */
void gr_submit_begin(CUstream stream, bool null_is_own);

#endif
