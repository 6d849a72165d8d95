/*
 * Where the region lies: the file that leads to it, and the memory itself. For region.c alone; see region.h.
 *
 * The memory is a System V segment, not the file: whoever truncates a mapped file kills those who look into it next,
 * and a segment cannot be truncated. It is marked for removal as soon as it is there, so it goes with the last process
 * that has it, however that one ends. The file, which nobody maps, names it.
 */
#ifndef GR_REGION_FILE_H
#define GR_REGION_FILE_H

#include "region/region.h"

/* The file's content; "check" makes one that is half written, or none, known. */
struct gr_region_ticket {
        uint64_t magic;
        uint32_t version;
        uint32_t segment;       /* shmid */
        uint64_t ipc_namespace; /* its inode: the number means something there only */
        uint64_t cookie;        /* also in the segment: numbers come back */
        uint64_t check;         /* of what stands before */
};

#define GR_TICKET_MAGIC UINT64_C(0x74656b6369747267) /* "grticket" in the file */

/* As gr_region_open says; region has its paths. */
int gr_region_file_attach(struct gr_region *region, bool create);

/* The file as others find it now, for a lock; -1. *ret_same: it leads to this region. The caller closes it. */
int gr_region_file_open(struct gr_region *region, bool *ret_same);

/* Whether the file that others find leads to this region. */
bool gr_region_file_same(struct gr_region *region);

/* The region's folder; the caller closes it. Negative where it is not there or not the user's alone. */
int gr_region_file_dir(struct gr_region *region);

/* LOCK_SH, tried for a moment, or LOCK_EX, tried once. The kernel drops such a lock with its holder. */
bool gr_region_file_lock(int fd, int kind);

/* Unlocks first: a child of a fork meanwhile has the descriptor, too, and would keep the lock. */
void gr_region_file_close(int fd);

#endif
