/*
 * The region: what the processes of one user (and one group) on one GPU know of each other, in shared memory.
 *
 *     /dev/shm/gpureclaim-UID/       folder, mode 0700 (GPURECLAIM_REGION_DIR)
 *       GROUP-UUID.v8                file, mode 0600: the id of a shared memory segment (region_file.h)
 *             |
 *             v
 *     +------------+---------------------+------------------------+--------+--------+-- ... --+----------+
 *     | magic,     | owners[512]         | accounts[512]          | slot 0 | slot 1 |         | slot 511 |
 *     | version,   | pid, start time,    | number of the claim,   |        |        |         |          |
 *     | sizes, ... | namespace; 0: free  | bytes charged          |        |        |         |          |
 *     +------------+---------------------+------------------------+--------+--------+-- ... --+----------+
 *         128 B       the owner of slot i     the account of slot i  320 B: heartbeat, figures, request and answer
 *
 * There is one for each group, GPU and version of the layout. The layout is a wire format: fixed-width fields, magic,
 * version and size, and a test that checks the offsets. The region is advice: a process that cannot open it works
 * alone, and what is read from it is checked as if an enemy had written it.
 *
 * It has no lock, as a process could die while it holds one. A process claims a slot by one compare-and-swap of the
 * owner word, and any process frees a slot whose owner is gone in the same way. What the group has charged is the sum
 * of the accounts of owned slots, not a counter of its own: so the charge of a dead process goes with its slot, exactly
 * once. An account also has the number of the claim that it belongs to, so that a process that has lost its slot does
 * not charge the next owner.
 *
 * Functions return 0 or -errno and touch ret_ outputs only on success. Any thread may call them, except open, join,
 * leave and close, which must run alone. Time, waiting and the state of other processes come through struct
 * gr_region_ops.
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
#define GR_REGION_VERSION    8
#define GR_REGION_SLOTS      512
#define GR_REGION_NAME_BYTES 32  /* of a process, NUL included */
#define GR_GROUP_NAME_BYTES  64  /* of a group, NUL included */
#define GR_REGION_FILE_BYTES 160 /* of a region's file name */
#define GR_REGION_PATH_BYTES 4096

/* Bits of a slot's orders: what another process, such as the command gpureclaim, asks of this one. */
#define GR_ORDER_LIMIT     1u /* take new_limit as the hard limit */
#define GR_ORDER_THRESHOLD 2u /* take new_threshold as the release threshold */
#define GR_ORDER_REFRESH   4u /* look at the device and publish */
/* Move the live memory to the host; want_bytes does not count for these. */
#define GR_ORDER_SLEEP       8u  /* if the process has no work now */
#define GR_ORDER_SLEEP_OFFER 16u /* if it is past the time from which it has offered that */
#define GR_ORDER_SLEEP_DEEP  32u /* with GR_ORDER_SLEEP: and the rest of the process leaves the GPU, too */

/* Why a process that was ordered to sleep deeply does not: one of these, or what the driver answered to a step. */
#define GR_DEEP_REASONS(X)                                                                                             \
        X(GR_DEEP_IS_OFF, "it may not sleep (GPURECLAIM_SLEEP)")                                                       \
        X(GR_DEEP_IS_OLD, "its driver has no checkpoints (they come with driver 570)")                                 \
        X(GR_DEEP_IS_ALONE, "the gpureclaim command does not lie beside the library, to look for room when it wakes")  \
        X(GR_DEEP_IS_BLIND, "gpureclaim status --room gave no answer; it asks NVML whether there is room to wake")     \
        X(GR_DEEP_IS_SHARED, "it shares memory, events or streams with other processes or with graphics")              \
        X(GR_DEEP_IS_UNKNOWN,                                                                                          \
          "it looked up a function of the driver that this version does not know, or very many of NVML")               \
        X(GR_DEEP_IS_LARGE, "the host has no room for what it has on the GPU (GPURECLAIM_SLEEP_HOST)")                 \
        X(GR_DEEP_IS_BUSY, "it was busy")                                                                              \
        X(GR_DEEP_IS_LOCKED, "something else has locked or checkpointed it")
#define GR_DEEP_REASON(id, words) id,
enum gr_deep_reason {
        GR_DEEP_NONE,
        GR_DEEP_REASONS(GR_DEEP_REASON) GR_DEEP_AT_LOCK = 1000,
        GR_DEEP_AT_CHECKPOINT = 2000
};
#undef GR_DEEP_REASON

/*
 * One process. Each word is atomic and valid by itself; two words read one after the other may be of different moments.
 */
struct gr_slot {
        _Atomic uint32_t request; /* number of requests so far; a process that asks adds one and wakes the owner */
        /* Number of the request that was answered last; the owner wakes the processes that wait for it */
        _Atomic uint32_t answer;
        _Atomic uint32_t orders;
        _Atomic uint32_t rung; /* highest rung asked for; 0: the usual one between neighbours */
        _Atomic uint64_t want_bytes;
        _Atomic uint64_t given_bytes; /* given back for others since the claim, modulo 2^64 */
        _Atomic uint64_t new_limit;
        _Atomic uint64_t new_threshold;
        _Atomic uint64_t heartbeat_ns; /* 0: just claimed; also renewed while the owner works on a request */
        _Atomic uint64_t active_ns;    /* when figures last changed */
        _Atomic uint64_t start_ticks;
        _Atomic uint64_t pid_namespace;
        _Atomic uint32_t pid;
        _Atomic uint32_t share;
        _Atomic uint64_t sleep_from_ns; /* from when on others may put it to sleep; 0: they must not */
        _Atomic uint64_t name[GR_REGION_NAME_BYTES / 8];
        _Atomic uint64_t figures[GR_SHARED_FIGURES];
        uint64_t padding[27 - GR_REGION_NAME_BYTES / 8 - GR_SHARED_FIGURES]; /* to 320 bytes */
        _Atomic uint64_t deep_refusal; /* why it does not sleep deeply: enum gr_deep_reason, or a step and its result */
};

struct gr_region_map {
        _Atomic uint64_t magic; /* written last; 0: not set up yet */
        _Atomic uint32_t version;
        _Atomic uint32_t slot_count;
        _Atomic uint32_t slot_bytes;
        _Atomic uint32_t reserved;
        _Atomic uint64_t size_bytes;
        _Atomic uint64_t cookie; /* a random number that the file has, too */
        uint64_t padding[3];
        _Atomic uint64_t owners[GR_REGION_SLOTS]; /* 0: free */
        /* Number of the claim << 48 | bytes charged (signed, 48 bits). Without meaning while the owner is 0. */
        _Atomic uint64_t accounts[GR_REGION_SLOTS];
        struct gr_slot slots[GR_REGION_SLOTS];
};

struct gr_identity {
        uint32_t pid;
        uint64_t start_ticks;   /* field 22 of /proc/PID/stat */
        uint64_t pid_namespace; /* inode of /proc/PID/ns/pid */
};

enum gr_process_state {
        GR_PROCESS_GONE,
        GR_PROCESS_ALIVE,
        GR_PROCESS_STOPPED, /* by a signal, so it answers no request */
        GR_PROCESS_UNKNOWN, /* its state cannot be read */
};

struct gr_region_ops {
        uint64_t (*now_ns)(void); /* the same clock in all processes */
        /* The state of a process in the caller's pid namespace; *ret_start is set unless GONE or UNKNOWN. */
        enum gr_process_state (*process_state)(uint32_t pid, uint64_t *ret_start);
        /* As a futex: sleeps until wake, the timeout, or spuriously; returns at once where *word != seen. */
        void (*wait)(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns);
        void (*wake)(_Atomic uint32_t *word);
};

/* One process's view of a region. About 21 KiB; owned by the caller. */
struct gr_region {
        const struct gr_region_ops *ops;
        struct gr_region_map *map; /* shared; NULL when closed */
        struct gr_identity self;
        uint64_t token;   /* owner word of this process */
        _Atomic int slot; /* -1: not a member */
        uint64_t claim;   /* number of the claim, as in the slot's account */
        /* The sum of what was reserved and adjusted through this view, also while the process had no slot. */
        _Atomic uint64_t reserved_bytes;
        int64_t waiting_bytes; /* likewise, the sum of gr_region_waiting */
        bool hides_waiting;    /* gr_region_let_first: the others do not see it */
        dev_t device;
        ino_t inode;
        int segment; /* shmid; -1: the memory is in the file */
        uid_t user;  /* whose it is */
        bool is_copy;
        uint64_t cookie;
        char dir[GR_REGION_PATH_BYTES];
        char file[GR_REGION_FILE_BYTES];
        _Atomic uint64_t swept_ns; /* when gr_region_sweep last looked at all slots */
        /* By slot: the owner that did not answer in time, and the number of the request. */
        _Atomic uint64_t silent_owner[GR_REGION_SLOTS];
        _Atomic uint32_t silent_sequence[GR_REGION_SLOTS];
        uint64_t ahead[GR_REGION_SLOTS]; /* by slot: the owner that comes first (gr_region_let_first); 0: none */
};

/* A checked copy of a slot: figures are below 2^62 or UINT64_MAX, the name is printable. */
struct gr_member {
        unsigned slot;
        uint64_t owner;
        struct gr_identity identity;
        bool same_namespace; /* the caller is in the same pid namespace, so pid has a meaning for it */
        uint32_t share;
        uint64_t reserved_bytes;
        uint64_t heartbeat_ns, active_ns, sleep_from_ns, given_bytes, deep_refusal;
        char name[GR_REGION_NAME_BYTES];
        uint64_t figures[GR_SHARED_FIGURES];
};

/* What one process asks of another. */
struct gr_request {
        uint32_t sequence; /* for gr_region_answer */
        uint32_t orders, rung;
        uint64_t want_bytes, new_limit, new_threshold;
};

/*
 * Writes "GROUP-UUID.vVERSION". -EINVAL: group has other characters than letters, digits, '_', '.' and '-', or begins
 * with '.', or buf is too small.
 */
int gr_region_file_name(const char *group, const uint8_t uuid[16], char *buf, size_t buf_bytes);

/*
 * The reverse: takes a file name apart into group (GR_GROUP_NAME_BYTES) and text of the UUID (37 bytes). -EINVAL for
 * files of other kinds and versions.
 */
int gr_region_parse_file_name(const char *file, char *ret_group, char *ret_uuid);

/*
 * The default folder: /dev/shm/gpureclaim-UID or, if another user has taken that name, a folder of this user whose name
 * begins with it. With create it is made if there is none. 0, -ENOENT or another -errno.
 */
int gr_region_default_dir(bool create, char *buf, size_t buf_bytes);

/* As gr_region_default_dir, below the folder base in place of /dev/shm. */
int gr_region_find_dir(const char *base, bool create, char *buf, size_t buf_bytes);

/* For root: finds the folder of another user below base, as gr_region_find_dir does for that user. */
int gr_region_find_dir_of(const char *base, uid_t user, char *buf, size_t buf_bytes);

/* The users other than this one who have such a folder below base, each once. Returns how many, up to most. */
size_t gr_region_users(const char *base, uid_t *ret_users, size_t most);

/*
 * Opens dir/file; with create it makes what is missing. -EPERM: folder or file belong to another user, can be used by
 * others, or are of another type. -EPROTO: not a region, or of another layout. -EXDEV: without create, of another IPC
 * namespace.
 * -ENOENT: no file, or the memory that it names has gone with its last process. On failure the region is closed. No
 * descriptor stays open.
 */
int gr_region_open(struct gr_region *region, const struct gr_region_ops *ops, const struct gr_identity *self,
                   const char *dir, const char *file, bool create);
void gr_region_close(struct gr_region *region);

/*
 * For root: opens the region of another user, who may have written anything there. as_copy: region->map is a copy of
 * this moment, so that nothing of the other user's is written, and nothing that the user does to it meanwhile does harm
 * here. Else it is the memory itself, for a request; where the user cuts the file short then, SIGBUS comes. For the
 * rest as gr_region_open without create.
 */
int gr_region_open_of(struct gr_region *region, const struct gr_region_ops *ops, const struct gr_identity *self,
                      uid_t user, const char *dir, const char *file, bool as_copy);

/*
 * Claims a slot. -EUSERS: living processes have all of them. -ESTALE: the file is gone; close the region and open it
 * anew. name: any text, cut to GR_REGION_NAME_BYTES - 1; share: 1 to 1000. The region is open, and the process has no
 * slot in it.
 */
int gr_region_join(struct gr_region *region, const char *name, uint32_t share);

/* Frees the slot, and removes the file if no other slot is in use. */
void gr_region_leave(struct gr_region *region);

/*
 * Whether this process still has its slot, and others still find this region by the file. If not: open and join anew.
 */
bool gr_region_member(struct gr_region *region);

/* Frees the slots of processes that are gone. Returns how many. */
unsigned gr_region_sweep(struct gr_region *region);

/*
 * As gr_region_sweep, cheaper when called often: while this process waits for memory, processes with a recent heartbeat
 * are checked only twice a second.
 */
unsigned gr_region_sweep_again(struct gr_region *region);

/*
 * As gr_region_sweep, but only from this process's slot to that of the next living member. If all members call it now
 * and then, all slots of dead processes are found, at a cost that does not grow with the number of members.
 */
void gr_region_look_after_next(struct gr_region *region);

/*
 * Renews the heartbeat and, unless figures is NULL, publishes them. changed: the process has been active since the last
 * call. Does nothing without a slot.
 */
void gr_region_publish(struct gr_region *region, const uint64_t figures[GR_SHARED_FIGURES], bool changed);

/* Publishes from when on others may put this process to sleep, on the clock of ops; 0: they must not. */
void gr_region_offer_sleep(struct gr_region *region, uint64_t from_ns);

/* Whether the process that had a slot is gone. Frees nothing. False for a slot that is free or out of range. */
bool gr_region_is_gone(struct gr_region *region, unsigned slot);

/* Publishes why this process does not sleep deeply although it was ordered to; 0: it does, or was not. */
void gr_region_refuse_deep(struct gr_region *region, uint64_t reason);

/* Copies what the owner of a slot publishes, checked. -ENOENT: the slot is free, or slot is out of range. */
int gr_region_read(struct gr_region *region, unsigned slot, struct gr_member *ret);

/*
 * Charges bytes to this process unless all members together would then have more than limit_bytes (-EDQUOT). Of two
 * that race for the last bytes at most one is served; both may be refused, so a few tries are made. -ENOTCONN: this
 * process is no member, or no longer.
 */
int gr_region_reserve(struct gr_region *region, uint64_t bytes, uint64_t limit_bytes);

/* Changes the account, also beyond the limit. While the process is no member this is kept for gr_region_carry. */
void gr_region_adjust(struct gr_region *region, int64_t bytes);

/*
 * Charges the new membership with all that was charged through the old one, and publishes what is waited for. Those
 * that come first (gr_region_let_first) still do, if they are members already. No thread may change any of this in old
 * meanwhile.
 */
void gr_region_carry(struct gr_region *region, struct gr_region *old);

/*
 * What all members have charged; with without_self all but this process. Too high for a moment while a member tries a
 * charge that is then refused.
 */
uint64_t gr_region_sum(struct gr_region *region, bool without_self);

/*
 * For the thread that answers requests. gr_region_seen reads the number of requests so far. gr_region_wait waits until
 * that is not `seen`, at most timeout_ns; gr_region_wake_self ends such a wait early.
 */
uint32_t gr_region_seen(struct gr_region *region);
void gr_region_wait(struct gr_region *region, uint32_t seen, uint64_t timeout_ns);
void gr_region_wake_self(struct gr_region *region);

/*
 * Takes the request that waits in this process's slot. False: there is none. After true, gr_region_answer must follow.
 */
bool gr_region_take(struct gr_region *region, struct gr_request *ret);
void gr_region_answer(struct gr_region *region, const struct gr_request *request, uint64_t given_bytes);

/* Adds a request (all but its sequence) to another process's slot, and returns its number. */
uint32_t gr_region_request(struct gr_region *region, unsigned slot, const struct gr_request *request);

/*
 * Takes back a request that was not answered in time. False: the other process has taken it, or a part, and will finish
 * it when it runs again. An order that another process has replaced meanwhile stays.
 */
bool gr_region_withdraw(struct gr_region *region, unsigned slot, const struct gr_request *request);

/* How long to wait for an answer, on the clock of ops. */
struct gr_patience {
        uint64_t begin_ns; /* when the request was made */
        uint64_t quiet_ns; /* longest time without a heartbeat; in all, if the other process waits for memory itself */
        uint64_t deadline_ns; /* the end in any case */
};

/* Waits for the answer to a request. False: none came in time, or the slot has another owner by now. */
bool gr_region_await(struct gr_region *region, unsigned slot, uint64_t owner, uint32_t sequence,
                     const struct gr_patience *patience);

/*
 * Asks neighbours for want_bytes: those with cached memory first, among them the idle ones, and then those with the
 * most for their share. Those that give no sign of life are waited for quiet_ns, all together; those whose heartbeat
 * goes on until max(GR_REGION_ASK_NS, quiet_ns) after the call. Returns the bytes that they say they gave. A process
 * that did not answer is not asked again until it has. cached_only leaves out those that publish no cached memory: an
 * answer costs the neighbour work, so a caller that asks repeatedly sets it. (docs/measurements.md, neighbour-answers,
 * has how long an answer may take.)
 *
 * If that is not enough, neighbours that have offered it are put to sleep, one after the other, the earliest offer
 * first, until it is. None is, and no further one, if all that the rest have is less than what is still missing: they
 * would sleep in vain.
 */
#define GR_REGION_ASK_NS UINT64_C(10000000000)
uint64_t gr_region_ask(struct gr_region *region, uint64_t want_bytes, uint64_t quiet_ns, bool cached_only);

/*
 * Adds bytes to what this process publishes as waited for, when an allocation is short of them; -bytes takes them off.
 * While the process is no member this is kept for gr_region_carry. By one thread at a time, as what follows.
 */
void gr_region_waiting(struct gr_region *region, int64_t bytes);

/*
 * Whether this process waits for memory, and comes before all others that do. Of two that wait for each other's memory
 * one has to give.
 */
bool gr_region_waits_first(struct gr_region *region);

/*
 * For a process that gives up its memory to have it back later: notes who waits for memory now. Until gr_region_return
 * the others do not see that it waits itself, or two would let each other first. gr_region_is_let_first: how many of
 * those noted have waited ever since. If all that come back let those have it first that wait already, each is passed
 * by each other one at most once. All by one thread at a time.
 */
void gr_region_let_first(struct gr_region *region);
unsigned gr_region_is_let_first(struct gr_region *region);
void gr_region_return(struct gr_region *region);

/* Whether another member waits for memory: then this process should soon publish how much it has cached. */
bool gr_region_awaited(struct gr_region *region);

#endif
