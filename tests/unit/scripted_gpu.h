/*
 * What the scripted GPU is made of: scripted.c has its time, contexts and streams; scripted_memory.c its memory, and
 * what the program has of that. Operations of the driver take the lock (enter); the rest is called with it held.
 */
#ifndef GR_TEST_SCRIPTED_GPU_H
#define GR_TEST_SCRIPTED_GPU_H

#include <pthread.h>

#include "base/hash.h"
#include "scripted.h"

#define PAGE         ((uint64_t)2 << 20)
#define PAGES        (1u << 14)
#define BASE         SG_BASE
#define AREA_PAGES   (2 * PAGES) /* of addresses, in each reservation */
#define AREAS        8u
#define SLOT         512u
#define SLOTS        (unsigned)(PAGE / SLOT)
#define SMALL_MAX    (PAGE / 2)
#define CONTEXTS_MAX 256
#define LOG_BYTES    8192
#define INVALID      gr_driver_error(1)
#define LIVE         UINT64_MAX /* instead of a time: the program has it */

struct context {
        bool alive;
        int device;
        uint64_t tail_ns[SG_STREAMS]; /* where the stream's work ends */
        uint64_t barrier_ns;          /* work submitted now starts no earlier */
};

struct event {
        struct context *context;
        struct event *next;
        uint64_t done_ns;
        bool alive;
};

struct allocation {
        UT_hash_handle hh;
        uint64_t ptr; /* key */
        size_t bytes;
        struct context *context;
};

/* What the program has. */
struct block {
        UT_hash_handle hh;
        uint64_t ptr; /* key */
        size_t bytes;
        uint64_t former_ns; /* when the work of all former owners has ended */
        uint64_t own_ns;    /* and that of this one */
};

/* When the last work on a page of memory ends, or LIVE: the later one of what is said of the page and of the slot. */
struct page_use {
        uint64_t last_ns;
        uint64_t *slots; /* NULL: blocks had it as a whole */
};

/* A page of addresses that memory can be mapped behind. */
struct address {
        unsigned page;    /* behind it, plus 1; 0: none */
        unsigned used;    /* blocks in it that the program has */
        uint64_t last_ns; /* when the last work on what was freed in it ends */
};

struct slab {
        unsigned used;
        int device;
        uint8_t slots[SLOTS];
};

struct fault {
        unsigned skip, count;
        int rc;
};

extern struct scripted_gpu {
        pthread_mutex_t lock;
        uint64_t now_ns, tick_ns;
        bool by_hand;
        uint64_t gpu_ns, lazy_ns; /* by hand: how far the GPU is, and how much further each question lets it get */
        uint64_t capacity_bytes;
        uint64_t used_bytes[SG_DEVICES], others_bytes[SG_DEVICES], cache_bytes[SG_DEVICES];
        struct context contexts[CONTEXTS_MAX];
        unsigned context_count;
        struct event *events;
        struct allocation *allocations;
        struct block *blocks;
        struct page_use uses[PAGES];
        uint8_t pages[PAGES]; /* 0 free, 1 the first one of an allocation, 2 a later one */
        uint8_t cards[PAGES]; /* of mapped memory: the device */
        uint8_t refs[PAGES];  /* how many mappings of the page there are, and one for its handle */
        struct address addresses[AREAS * AREA_PAGES];
        unsigned areas, reserved, handles;
        bool area_used[AREAS];
        struct slab *slabs[PAGES];
        struct fault faults[SG_OP_COUNT];
        unsigned calls[SG_OP_COUNT];
        int captures;
        uint64_t misuses;
        char log[LOG_BYTES];
        size_t log_bytes;
} sg;

__attribute__((format(printf, 1, 2))) void misuse(const char *format, ...);
void check_context(const struct context *context, const char *what);

/* The planned error, or 0. */
int count(enum sg_op op);
/* Enters the operation with the lock held; the planned error, or 0. */
int enter(enum sg_op op);
int leave(int rc);

static inline uint64_t later(uint64_t a, uint64_t b)
{
        return a > b ? a : b;
}

static inline uint64_t work_end(const struct context *context)
{
        uint64_t end = 0;

        for (unsigned i = 0; i < SG_STREAMS; i++)
                end = later(end, context->tail_ns[i]);
        return end;
}

/* How far the GPU is, and that it gets as far. */
static inline uint64_t gpu_ns(void)
{
        return sg.by_hand ? sg.gpu_ns : sg.now_ns;
}

static inline void gpu_reach(uint64_t ns)
{
        uint64_t *clock = sg.by_hand ? &sg.gpu_ns : &sg.now_ns;

        *clock = later(*clock, ns);
}

struct block *find_block(uint64_t ptr);
/* Frees all that is noted of memory; sg_reset clears the rest, and needs no lock. */
void memory_forget(void);
/* The context has gone, and its memory with it. */
void memory_context_gone(struct context *context);

/* The driver's operations. */
int mem_alloc(void *handle, size_t bytes, uint64_t *ret_ptr);
int mem_free(uint64_t ptr);
int mem_release(void *handle, const uint64_t *ptrs, size_t count, size_t *ret_done);
int mem_reserve(void *handle, size_t bytes, uint64_t *ret_ptr);
void mem_unreserve(uint64_t ptr, size_t bytes);
int mem_map(void *handle, int device, uint64_t ptr, size_t bytes, uint64_t *memory);
int mem_unmap(void *handle, uint64_t ptr, size_t bytes, uint64_t memory);
int mem_info(void *handle, uint64_t *ret_free_bytes, uint64_t *ret_total_bytes);

#endif
