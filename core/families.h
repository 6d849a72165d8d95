/*
 * The ways to take memory that the pool does not serve, and the words for them in every output. What each is charged
 * to: device memory but for HOST, which has a budget of its own, and IMPORTED, which is in its exporter's account: it
 * is told and charged to nobody here, as opening it takes nothing from the card.
 */
#ifndef GR_FAMILIES_H
#define GR_FAMILIES_H

/* GR_FAMILY(ID, name in JSON, words for people) */
#define GR_FAMILIES(X)                                                                                                 \
        X(ASYNC, "stream_ordered", "stream-ordered pools")                                                             \
        X(GRAPH, "graph", "graph memory")                                                                              \
        X(MAPPED, "mapped", "mapped memory")                                                                           \
        X(MANAGED, "managed", "managed memory")                                                                        \
        X(ARRAY, "array", "arrays")                                                                                    \
        X(DRIVER, "driver", "the driver's own memory")                                                                 \
        X(IMPORTED, "imported", "memory of others, imported")                                                          \
        X(HOST, "host", "pinned host memory")

enum gr_family {
#define GR_FAMILY_ENUMERATOR(id, name, words) GR_FAMILY_##id,
        GR_FAMILIES(GR_FAMILY_ENUMERATOR)
#undef GR_FAMILY_ENUMERATOR
                GR_FAMILY_COUNT
};

static inline int gr_family_charged(enum gr_family family)
{
        return family != GR_FAMILY_IMPORTED;
}

#endif
