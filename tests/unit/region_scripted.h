/*
 * What the tests of the region share: other processes that live as long as the test says, a time that only waits move,
 * and functions of the system that fail when they are told to, or let other processes act in the middle.
 */
#ifndef GR_TEST_REGION_SCRIPTED_H
#define GR_TEST_REGION_SCRIPTED_H

#include "check.h"
#include "region/region.h"
#include "region/region_file.h"

/* A fresh folder for the files of the regions. The end checks that no descriptor was lost, removes the folder, and is
 * the exit status of the program. */
extern char dir[64];
void region_begin(void);
int region_end(void);

extern const struct gr_region_ops ops; /* on the time and the processes below */
extern uint64_t now_ns;
extern enum gr_process_state peers[64]; /* by pid; start time 1000 + pid */
extern _Atomic unsigned looks;          /* at other processes */
extern _Atomic uint32_t *woken;         /* the last */

/* The nth call of this function of the system from now on fails, once, with this error; then the next one counts. */
struct region_failure {
        const char *call;
        int nth, error;
};
extern struct region_failure failure, next_failure;
void fail(const char *call, int nth, int error);

/* What other processes do at such a moment, once. */
extern void (*at_lock)(void), (*at_pause)(void), (*at_wait)(void);

extern bool file_is_zero; /* of what is opened the file gets the descriptor 0, and not the folder */
extern int lock_error;    /* what flock says instead of locking; 0: it locks */
extern int attach_error;  /* what shmat says; 0: it attaches */
extern unsigned locks, shared_locks;
extern _Atomic unsigned pauses;

/* Segments have numbers from 0 on, which the machine may have given away already: this one is called 0. */
extern bool first_segment;
extern int segment_zero;

extern struct gr_region *server;    /* serves whenever somebody waits */
extern struct gr_region *prompt[2]; /* answer at once, whatever the server does */
extern uint64_t server_gives;       /* bytes, to all who ask */
extern uint64_t sleeper_gives;      /* bytes, each one that is put to sleep */
extern uint32_t sleepers[8];        /* their pids, in turn */
extern unsigned sleeper_count;
extern uint64_t works_until_ns; /* before that the server says that it works, and answers nothing */
void serve(struct gr_region *region);

struct gr_identity identity(uint32_t pid);

/* As this process. The result of gr_region_open, which must not make a member of it. */
int open_as(struct gr_region *region, uint32_t pid, const char *file);

/* A new member, into this slot, which is free; -1: into any. */
struct gr_region *join_at(uint32_t pid, const char *file, int slot);

/* The first two are in the first slot and in the last one, where these are free. */
struct gr_region *join_as(uint32_t pid, const char *file);

/* The member leaves; or it is as kill -9 leaves it. The structure is freed. */
void drop(struct gr_region *region);
void die(struct gr_region *region);

unsigned used_slots(struct gr_region *region);

/* Put this in the place of a file; a ticket gets its check. */
void put_file(const char *name, const void *bytes, size_t length);
void sign(struct gr_region_ticket *ticket);
void write_ticket(const char *name, struct gr_region_ticket ticket);

#endif
