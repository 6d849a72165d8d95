/* The rungs of the reclamation ladder, weakest first. What each does: alloc/ladder.h. */
#ifndef GR_LADDER_RUNGS_H
#define GR_LADDER_RUNGS_H

/* X(ID, word in options and statistics, what it got back, after a size) */
#define GR_RUNGS(X)                                                                                                    \
        X(READY, "ready", "by a larger cached block")                                                                  \
        X(FENCE, "fence", "of freed memory that the GPU had done with")                                                \
        X(PURGE, "purge", "of idle memory of the program's other caches")                                              \
        X(TRIM, "trim", "of cached memory")                                                                            \
        X(DRIVER, "driver", "of the driver's own pools")                                                               \
        X(SYNC, "sync", "of cached memory after a wait for the GPU")                                                   \
        X(DROP, "drop", "of what the program's other caches can build again")                                          \
        X(NEIGHBOUR, "neighbour", "from the caches of other processes")                                                \
        X(WAIT, "wait", "by a wait for others")                                                                        \
        X(SPILL, "spill", "of host memory")                                                                            \
        X(FAIL, "fail", "")

enum gr_rung {
#define GR_RUNG_ENUMERATOR(id, word, got) GR_RUNG_##id,
        GR_RUNGS(GR_RUNG_ENUMERATOR)
#undef GR_RUNG_ENUMERATOR
                GR_RUNG_COUNT
};

#endif
