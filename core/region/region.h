/*
 * The region: what the processes of one user (and one group) on one GPU know of each other, in shared memory.
 *
 * It is a wire format (fixed-width fields, magic, version, size; offsets held by a test) in a segment that a file of
 * mode 0600 inside a folder of mode 0700 names (region_file.h), one per group, GPU and version of the layout. It is
 * advice between processes: one that cannot open it works alone, and what is read from it is checked as if an enemy
 * had written it.
 *
 * No lock lies in it that a dead process could keep. A slot is claimed by one compare-and-swap of its owner word, which
 * names process, start time and pid namespace; a slot whose owner is gone is freed the same way by whoever looks. The
 * group's use is no counter but the sum of the owners' accounts, so a dead process's share goes with its slot, once.
 * An account names the claim of the slot that it belongs to, so that one who lost the slot does not charge the next.
 *
 * Functions return 0 or -errno and touch ret_ outputs only on success. Any thread may call them, but for open, join,
 * leave and close. No clock here: time, waiting and the look at other processes come through a table.
 */
#ifndef GR_REGION_H
#define GR_REGION_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "account/figures.h"

#define GR_REGION_MAGIC      UINT64_C(0x6e6f696765727267) /* "grregion" in the file */
#define GR_REGION_VERSION    5
#define GR_REGION_SLOTS      512
#define GR_REGION_NAME_BYTES 32  /* of a process, NUL included */
#define GR_GROUP_NAME_BYTES  64  /* of a group, NUL included */
#define GR_REGION_FILE_BYTES 160 /* of a region's file name */
#define GR_REGION_PATH_BYTES 4096

/* In a slot's orders: what others want of the process. */
#define GR_ORDER_LIMIT     1u /* take new_limit as the hard limit */
#define GR_ORDER_THRESHOLD 2u /* take new_threshold as the release threshold */
#define GR_ORDER_REFRESH   4u /* look at the card and publish */

/* One process. Every word is atomic and right by itself; nothing is consistent across words. */
struct gr_slot {
        _Atomic uint32_t request; /* askers count it up and wake it */
        _Atomic uint32_t answer;  /* the request that was last served; woken by the owner */
        _Atomic uint32_t orders;
        _Atomic uint32_t level; /* highest rung asked for; 0: neighbours' own */
        _Atomic uint64_t want_bytes;
        _Atomic uint64_t given_bytes; /* ever, modulo 2^64 */
        _Atomic uint64_t new_limit;
        _Atomic uint64_t new_threshold;
        _Atomic uint64_t heartbeat_ns; /* 0: just claimed; moves while a request is worked on, too */
        _Atomic uint64_t active_ns;    /* when figures last changed */
        _Atomic uint64_t start_ticks;
        _Atomic uint64_t pid_namespace;
        _Atomic uint32_t pid;
        _Atomic uint32_t share;
        _Atomic uint64_t reserved;
        _Atomic uint64_t name[GR_REGION_NAME_BYTES / 8];
        _Atomic uint64_t figures[GR_SHARED_FIGURES];
        uint64_t padding[20 - GR_REGION_NAME_BYTES / 8 - GR_SHARED_FIGURES]; /* to 256 bytes */
};

struct gr_region_map {
        _Atomic uint64_t magic; /* written last; 0 in a file that nobody has set up yet */
        _Atomic uint32_t version;
        _Atomic uint32_t slot_count;
        _Atomic uint32_t slot_bytes;
        _Atomic uint32_t reserved;
        _Atomic uint64_t size_bytes;
        _Atomic uint64_t cookie; /* the file has it, too */
        uint64_t padding[3];
        _Atomic uint64_t owners[GR_REGION_SLOTS]; /* 0: free */
        /* Number of the slot's claim << 48 | bytes charged, signed; means nothing where the owner is 0. */
        _Atomic uint64_t accounts[GR_REGION_SLOTS];
        struct gr_slot slots[GR_REGION_SLOTS];
};

struct gr_identity {
        uint32_t pid;
        uint64_t start_ticks;   /* field 22 of /proc/PID/stat */
        uint64_t pid_namespace; /* its inode */
};

enum gr_peer {
        GR_PEER_GONE,
        GR_PEER_ALIVE,
        GR_PEER_STOPPED, /* by a signal: it answers nothing */
        GR_PEER_UNKNOWN, /* cannot be told */
};

struct gr_region_ops {
        uint64_t (*now_ns)(void); /* the same clock in all processes */
        /* What became of a process of our own pid namespace; *ret_start is set unless GONE or UNKNOWN. */
        enum gr_peer (*peer)(uint32_t pid, uint64_t *ret_start);
        /* Sleeps until wake, a timeout, or for no reason; at once where *word is not seen. */
        void (*wait)(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns);
        void (*wake)(_Atomic uint32_t *word);
};

/* One process's view. About 17 KiB; owned by the caller. */
struct gr_region {
        const struct gr_region_ops *ops;
        struct gr_region_map *map; /* shared; NULL when closed */
        struct gr_identity self;
        uint64_t token;   /* owner word of this process */
        _Atomic int slot; /* -1: not a member */
        uint64_t claim;   /* of the slot, as in its account */
        /* Reserved and adjusted through this view, whether the slot was ours or not. */
        _Atomic uint64_t reserved_bytes;
        dev_t device;
        ino_t inode;
        int segment; /* shmid */
        uint64_t cookie;
        char dir[GR_REGION_PATH_BYTES];
        char file[GR_REGION_FILE_BYTES];
        _Atomic uint64_t swept_ns;                         /* when all were last looked at */
        _Atomic uint64_t silent_owner[GR_REGION_SLOTS];    /* did not answer in time, */
        _Atomic uint32_t silent_sequence[GR_REGION_SLOTS]; /* this request */
};

/* What a slot said, checked: figures below 2^62 or UINT64_MAX, the name printable. */
struct gr_member {
        unsigned slot;
        uint64_t owner;
        struct gr_identity identity;
        bool same_namespace; /* pid means something to us */
        uint32_t share;
        uint64_t reserved_bytes;
        uint64_t heartbeat_ns, active_ns, given_bytes;
        char name[GR_REGION_NAME_BYTES];
        uint64_t figures[GR_SHARED_FIGURES];
};

/* What others want of this process. */
struct gr_request {
        uint32_t sequence; /* for gr_region_answer */
        uint32_t orders, level;
        uint64_t want_bytes, new_limit, new_threshold;
};

/* Writes "GROUP-UUID.vVERSION"; -EINVAL for a name that is none: letters, digits, '_', '.', '-', no '.' first. */
int gr_region_file_name(const char *group, const uint8_t uuid[16], char *buf, size_t buf_bytes);

/* The other way: group (GR_GROUP_NAME_BYTES) and text of the UUID (37 bytes); -EINVAL for other files and versions. */
int gr_region_parse_file_name(const char *file, char *ret_group, char *ret_uuid);

/*
 * The folder where none is set: /dev/shm/gpureclaim-UID or, where another user has put something there, one of ours
 * whose name begins so. With create it is made where there is none. 0, -ENOENT or another -errno.
 */
int gr_region_default_dir(bool create, char *buf, size_t buf_bytes);

/* The same below another folder than /dev/shm. */
int gr_region_find_dir(const char *base, bool create, char *buf, size_t buf_bytes);

/*
 * Opens dir/file; with create it makes what is missing. -EPERM: folder or file are not the user's alone, or no folder
 * or file. -EPROTO: not a region, or of another layout. -EXDEV: of another IPC namespace. -ENOENT: no file, or nobody
 * has what it names any more. Region is closed on failure. No descriptor stays open.
 */
int gr_region_open(struct gr_region *region, const struct gr_region_ops *ops, const struct gr_identity *self,
                   const char *dir, const char *file, bool create);
void gr_region_close(struct gr_region *region);

/* Takes a slot. -ENOSPC: all are in use by the living. -ESTALE: the file went; open anew. Name may be any text. */
int gr_region_join(struct gr_region *region, const char *name, uint32_t share);

/* Gives the slot back, and removes the file where that was the last one. */
void gr_region_leave(struct gr_region *region);

/* Whether the slot is still ours and the file still the one that others find. If not: open and join anew. */
bool gr_region_member(struct gr_region *region);

/* Frees the slots of processes that are gone. Returns how many. */
unsigned gr_region_sweep(struct gr_region *region);

/*
 * As sweep, for whoever does it again and again: while this process waits for memory, those with a recent heartbeat
 * are looked at twice a second only.
 */
unsigned gr_region_sweep_again(struct gr_region *region);

/*
 * As sweep, but only from our slot to the next living member's: when all do it now and then, every slot of a dead one
 * is found, at a cost that does not grow with their number.
 */
void gr_region_look_after_next(struct gr_region *region);

/* Says that this process lives, and, where figures is not NULL, what it has. changed: it has just been active. */
void gr_region_publish(struct gr_region *region, const uint64_t figures[GR_SHARED_FIGURES], bool changed);

/* -ENOENT where the slot is free. */
int gr_region_read(struct gr_region *region, unsigned slot, struct gr_member *ret);

/*
 * Charges bytes to this process unless all members together would then have more than limit_bytes. -EDQUOT. Two that
 * race for the last bytes may for a moment both be refused, never both be served; a few tries are made. -ENOTCONN: no
 * member, or no longer.
 */
int gr_region_reserve(struct gr_region *region, uint64_t bytes, uint64_t limit_bytes);

/* Charges or gives back without asking; while the process is no member, to be carried to its next membership. */
void gr_region_adjust(struct gr_region *region, int64_t bytes);

/* Charges the new membership with all that was charged through the old one, which is not to be used at the time. */
void gr_region_carry(struct gr_region *region, struct gr_region *old);

/*
 * What all members have charged; without_self: but for this process. For a moment too much while one is being refused.
 */
uint64_t gr_region_sum(struct gr_region *region, bool without_self);

/* This process serves: waits until somebody wants something, at most timeout_ns. seen: *region's request word before.
 */
uint32_t gr_region_seen(struct gr_region *region);
void gr_region_wait(struct gr_region *region, uint32_t seen, uint64_t timeout_ns);
void gr_region_wake_self(struct gr_region *region);

/* Whether somebody wants something; takes it. To be answered. */
bool gr_region_take(struct gr_region *region, struct gr_request *ret);
void gr_region_answer(struct gr_region *region, const struct gr_request *request, uint64_t given_bytes);

/* This process asks: puts the request (sequence aside) to a slot and returns its number. */
uint32_t gr_region_request(struct gr_region *region, unsigned slot, const struct gr_request *request);

/* How long is waited, on the clock of ops. */
struct gr_patience {
        uint64_t begin_ns;    /* when it was asked */
        uint64_t quiet_ns;    /* longest without a heartbeat since then, or at all where it waits for memory itself */
        uint64_t deadline_ns; /* and in all */
};

/* True when answered; false when patience is at an end, or the owner is another one by now. */
bool gr_region_await(struct gr_region *region, unsigned slot, uint64_t owner, uint32_t sequence,
                     const struct gr_patience *patience);

/*
 * Asks neighbours for want_bytes, idle ones with the most cached for their share first. Those that give no sign of life
 * cost quiet_ns together; those that are at work on it are waited for, until GR_REGION_ASK_NS (or quiet_ns, where that
 * is more) after the call. Returns what they say they gave. One that did not answer is not asked again until it has.
 * cached_only: those are left out that say they have nothing; for whoever asks again and again, as being asked is work.
 */
#define GR_REGION_ASK_NS UINT64_C(2000000000)
uint64_t gr_region_ask(struct gr_region *region, uint64_t want_bytes, uint64_t quiet_ns, bool cached_only);

/* What an allocation of this process is short of begins (bytes) or ceases (-bytes) to count as waited for. */
void gr_region_waiting(struct gr_region *region, int64_t bytes);

/* Whether another member waits for memory: then what is cached should be told soon. */
bool gr_region_awaited(struct gr_region *region);

#endif
