/* Work that a thread submits. */
#ifndef GR_SUBMIT_H
#define GR_SUBMIT_H

#include "hooks/captures.h"
#include "shim.h"

/*
 * The calling thread is about to submit work to the stream: notes whether streams overlap, and work beside a capture.
 * No lock is held.
 */
void gr_submit_begin(CUstream stream, enum gr_null_stream null_stream);

#endif
