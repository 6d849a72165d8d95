/* The rungs of the reclamation ladder, weakest first. What each does: alloc/ladder.h. */
#ifndef GR_LADDER_RUNGS_H
#define GR_LADDER_RUNGS_H

#define GR_RUNGS(X)                                                                                                    \
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

enum gr_rung {
#define GR_RUNG_ENUMERATOR(id, word) GR_RUNG_##id,
        GR_RUNGS(GR_RUNG_ENUMERATOR)
#undef GR_RUNG_ENUMERATOR
                GR_RUNG_COUNT
};

#endif
