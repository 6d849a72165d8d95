/*
 * Every way a program can touch device memory: the rows of the safety proof (safety.c). A row is an operation that
 * writes a pattern, and the stream it goes to.
 */
#ifndef GR_TEST_SAFETY_ACCESS_H
#define GR_TEST_SAFETY_ACCESS_H

#include "gputest.h"

/* Values 1 (the earlier write) and 2 (the later one); some operations can only write bytes or half words of it. */
enum { EARLIER = 1, LATER = 2, TAGS = 3 };

enum place {
        NO_STREAM, /* a synchronous call */
        LEGACY,
        PER_THREAD,
        NON_BLOCKING,
        BLOCKING,
        FRESH,  /* non-blocking, created only now */
        URGENT, /* the same with the highest priority */
        JOINED, /* half of the work on one stream, half on another that waits for its event */
        GREEN,  /* a stream of a green context */
        SAME,   /* the very stream the earlier work was given to */
};

/*
 * What the operations work with. Sources hold the pattern of each tag; those of tag 0 are scratch space for readers.
 * All buffers are SPAN bytes.
 */
struct scene {
        struct gt gt;
        size_t span;
        CUstream slow; /* of the earlier work */
        CUstream non_blocking, second, blocking;
        struct gt_green green; /* all zero: there are none */
        CUdeviceptr source[TAGS];
        void *pinned[TAGS], *pageable[TAGS];
        CUcontext other_ctx; /* another context of the same device, or NULL */
        CUstream other_stream;
        CUdevice peer;      /* valid when peer_ctx is set */
        CUcontext peer_ctx; /* of a second device that can reach the first, or NULL */
        CUstream peer_stream;
        CUfunction peer_fill;
        CUdeviceptr peer_source[TAGS];
        CUgraphExec ready_graph; /* captured before the block was freed; fills READY_AT with LATER */
        CUdeviceptr ready_at;
};

/*
 * Writes TAG to [p, p + bytes), bytes being a multiple of 4096 and at most the scene's span. On a stream the call may
 * return before the write is done; the stream is always valid. CUDA_ERROR_NOT_FOUND or CUDA_ERROR_NOT_SUPPORTED: this
 * driver or device cannot do it, and nothing was done.
 */
typedef CUresult (*access_fn)(const struct scene *scene, CUstream stream, CUdeviceptr p, size_t bytes, uint32_t tag);

struct access {
        const char *name;
        access_fn write;
        enum place place;
        bool other_thread;
        bool ends_only;     /* writes the first and the last word only */
        unsigned bytes_per; /* width of the repeated value: 1, 2 or 4 */
        bool later_only;    /* waits for its own completion, or otherwise cannot be the earlier, unfinished access */
};

extern const struct access accesses[];
extern const size_t access_count;

/* Buffers and streams; SPAN is a multiple of 4096. */
void scene_open(struct scene *ret, size_t span);
/*
 * The stream of a row, made now if the row asks for a new one. CUDA_ERROR_NOT_SUPPORTED where there is none; after use
 * it goes back through scene_stream_done, which destroys the new ones and leaves the others alone.
 */
CUresult scene_stream(const struct scene *scene, enum place place, CUstream *ret);
void scene_stream_done(enum place place, CUstream stream);
/*
 * Carries the row out, on another thread where it says so; with SPIN_US the stream is first kept busy for so long, by
 * the thread that then makes the access.
 */
CUresult access_run(const struct scene *scene, const struct access *access, CUstream stream, CUdeviceptr p,
                    size_t bytes, uint32_t tag, uint64_t spin_us);
/* The word that the row leaves for a tag. */
uint32_t access_word(const struct access *access, uint32_t tag);
/* True when a result means that the row does not exist here. */
bool access_missing(CUresult result);

#endif
