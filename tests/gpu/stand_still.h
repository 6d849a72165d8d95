/* Blocks that a stream uses before and after they are freed, and whether it goes on or stands still. */
#ifndef GR_TEST_STAND_STILL_H
#define GR_TEST_STAND_STILL_H

#include "gputest.h"

enum { COUNT = 8, PATIENCE_US = 3000000 };
#define BYTES (64 * MIB)

extern struct gt gt; /* to be opened first */
extern CUdeviceptr blocks[COUNT];

/* All of BYTES but the last, which is so small that no fence is laid for it before it is needed. */
void allocate(void);
void release(void);
/* Writes to each of them, in the stream. */
void fill(CUstream stream);
/* Whether the stream's work ended before patience did. */
bool ends(CUstream stream);

#endif
