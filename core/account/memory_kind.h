/*
 * The ways to take memory that the pool does not serve, and the words for them in every output. All are charged to the
 * device but two: HOST has a budget of its own. IMPORTED is only reported, because its exporter is charged for it, and
 * to open it takes nothing from the device.
 */
#ifndef GR_MEMORY_KIND_H
#define GR_MEMORY_KIND_H

/* X(ID, name in JSON, words for people) */
#define GR_MEMORY_KINDS(X)                                                                                             \
        X(STREAM_ORDERED, "stream_ordered", "stream-ordered pools")                                                    \
        X(GRAPH, "graph", "graph memory")                                                                              \
        X(MAPPED, "mapped", "mapped memory")                                                                           \
        X(MANAGED, "managed", "managed memory")                                                                        \
        X(ARRAY, "array", "arrays")                                                                                    \
        X(DRIVER, "driver", "the driver's own memory")                                                                 \
        X(IMPORTED, "imported", "memory of others, imported")                                                          \
        X(HOST, "host", "pinned host memory")

enum gr_memory_kind {
#define GR_MEMORY_ENUMERATOR(id, name, words) GR_MEMORY_##id,
        GR_MEMORY_KINDS(GR_MEMORY_ENUMERATOR)
#undef GR_MEMORY_ENUMERATOR
                GR_MEMORY_KIND_COUNT
};

/* Whether memory of this kind is charged to its device, and not only reported. */
static inline int gr_memory_kind_is_charged(enum gr_memory_kind kind)
{
        return kind != GR_MEMORY_IMPORTED;
}

#endif
