/* Random traffic from many threads, each block checked by the device itself before it is freed. */
#ifndef GR_TEST_SAFETY_SOAK_H
#define GR_TEST_SAFETY_SOAK_H

#include "gputest.h"

struct soak {
        double seconds;
        uint64_t seed;
        int threads, streams;
        bool may_refuse; /* an allocation may be refused with room to spare */
        size_t touched;  /* bytes at the front of each block that are written and checked */
};

/*
 * True when no block was found changed, none was refused with a quarter of the memory to spare (unless that may be),
 * and no call failed for another reason; prints one line either way.
 */
bool soak_run(const struct gt *gt, const struct soak *settings);

#endif
