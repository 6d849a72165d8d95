/*
 * Where the region lies: the memory, and the file by which processes find it. For region.c alone; see region.h.
 *
 * The memory is a System V segment, not the file: if a mapped file is truncated, every process that reads it is killed
 * by SIGBUS, and a segment cannot be truncated. The segment is marked for removal as soon as it exists, so it goes with
 * the last process that is attached to it, however that one ends. The file only holds the segment's number.
 *
 * Only processes of one IPC namespace can attach a segment. Where one of another finds the file, as in a container, it
 * puts the memory into the file itself, behind the ticket; the members notice, and join there. From then on the file
 * must not be truncated.
 */
#ifndef GR_REGION_FILE_H
#define GR_REGION_FILE_H

#include "region/region.h"

/* The file's content. `check` tells a good file from one that is half written or something else. */
struct gr_region_ticket {
        uint64_t magic;
        uint32_t version;
        uint32_t segment;       /* shmid; GR_TICKET_IN_FILE: the memory is in this file, at GR_TICKET_OFFSET */
        uint64_t ipc_namespace; /* inode of the IPC namespace in which the shmid is valid */
        uint64_t cookie;        /* also in the segment, as the kernel gives the same number to another segment later */
        uint64_t check;         /* a hash of the fields before */
};

#define GR_TICKET_MAGIC   UINT64_C(0x74656b6369747267) /* "grticket" in the file */
#define GR_TICKET_IN_FILE UINT32_MAX
#define GR_TICKET_OFFSET  65536 /* a multiple of every page size */

/* Attaches the memory as gr_region_open says; dir and file of region are set. */
int gr_region_file_attach(struct gr_region *region, bool create);
void gr_region_file_detach(struct gr_region *region);

/*
 * Opens the file that others find now, to lock it. *ret_same: it leads to this region. Returns a descriptor that the
 * caller closes, or -1, and *ret_same is unchanged.
 */
int gr_region_file_open(struct gr_region *region, bool *ret_same);

/* Whether the file that others find leads to this region. */
bool gr_region_file_same(struct gr_region *region);

/* Opens the region's folder; the caller closes it. Negative: there is none, or it is not private to the user. */
int gr_region_file_dir(struct gr_region *region);

/*
 * Takes LOCK_SH with a few tries or LOCK_EX with one. False: another process holds it, or errno tells the error. The
 * kernel drops such a lock when its holder dies.
 */
bool gr_region_file_lock(int fd, int kind);

/*
 * Unlocks and closes. Closing alone is not enough: a child forked meanwhile has the descriptor and would keep the lock.
 */
void gr_region_file_close(int fd);

#endif
