/* Ways to get memory, and what the card and the library say of it. gt_open and a stream first. */
#ifndef GR_TEST_LIMIT_KINDS_MEMORY_H
#define GR_TEST_LIMIT_KINDS_MEMORY_H

#include "gputest.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

extern struct gt gt;
extern CUstream stream;
extern CUmemoryPool explicit_pool;
/*
 * Of CUDA 13: the device's default one of managed memory, one of managed memory that has no place, and the host's
 * default one.
 */
extern CUmemoryPool newer_pools[3];
/* False where the driver has none. */
bool find_newer_pools(void);

/* One way to get memory. Handles are whatever its free wants. */
struct memory_kind {
        const char *name;
        CUresult (*get)(size_t bytes, uint64_t *ret_handle);
        CUresult (*put)(size_t bytes, uint64_t handle);
        bool on_demand; /* the card gives it only where it is touched */
        bool host;
};

enum { MEMORY_KINDS = 18, MEMORY_KINDS_NEWER = 3 }; /* the last ones are of newer_pools */
extern const struct memory_kind memory_kinds[MEMORY_KINDS];
extern int kind_count; /* that the driver has */

CUresult get_device(size_t bytes, uint64_t *ret);
CUresult put_device(size_t bytes, uint64_t handle);
CUresult get_async(size_t bytes, uint64_t *ret);
CUresult put_async(size_t bytes, uint64_t handle);
CUresult get_host_pool(size_t bytes, uint64_t *ret);
CUresult get_created(size_t bytes, uint64_t *ret);
CUresult put_created(size_t bytes, uint64_t handle);
CUresult get_mapped(size_t bytes, uint64_t *ret);
CUresult put_mapped(size_t bytes, uint64_t handle);
CUresult get_managed(size_t bytes, uint64_t *ret);
CUresult get_host(size_t bytes, uint64_t *ret);
CUresult put_host(size_t bytes, uint64_t handle);

/* What the card says this process holds, and what the library accounts; in bytes, and not of two moments. */
struct figures {
        double on_card, accounted;
};
/* False where one of the two cannot be had. */
bool look(struct figures *ret);
/* Whether nobody else's memory is in the card's figure. */
bool own_figure(void);
size_t available(void);

/* limit_kinds_sizes.c: what is accounted of a size and shape. odd_arrays fills the card. */
void odd_arrays(void);
void even_arrays(void);
void managed_sizes(void);
void trimmed_pool(void);

#endif
