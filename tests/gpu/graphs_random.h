/* Random graphs whose memory was allocated in their captures, beside random traffic of other memory. */
#ifndef GR_TEST_GRAPHS_RANDOM_H
#define GR_TEST_GRAPHS_RANDOM_H

#include "gputest.h"

/*
 * How many words were not what they should be; prints what it did, and more about the first wrong words of graphs.
 * relaxed: captures in which memory is the program's own affair. one_at_a_time: no two graphs run at once. Once in a
 * process.
 */
uint64_t graphs_random(const struct gt *gt, double seconds, unsigned seed, int threads, bool relaxed,
                       bool one_at_a_time);

#endif
