/* The rungs of the reclamation ladder, weakest first. What each does: alloc/ladder.h. */
#ifndef GR_LADDER_LEVELS_H
#define GR_LADDER_LEVELS_H

#define GR_LEVELS(X)                                                                                                   \
        X(READY, "ready")                                                                                              \
        X(FENCE, "fence")                                                                                              \
        X(PURGE, "purge")                                                                                              \
        X(TRIM, "trim")                                                                                                \
        X(DRIVER, "driver")                                                                                            \
        X(SYNC, "sync")                                                                                                \
        X(DROP, "drop")                                                                                                \
        X(NEIGHBOUR, "neighbour")                                                                                      \
        X(WAIT, "wait")                                                                                                \
        X(SPILL, "spill")                                                                                              \
        X(FAIL, "fail")

enum gr_level {
#define GR_LEVEL_ENUMERATOR(id, word) GR_LEVEL_##id,
        GR_LEVELS(GR_LEVEL_ENUMERATOR)
#undef GR_LEVEL_ENUMERATOR
                GR_LEVEL_COUNT
};

#endif
