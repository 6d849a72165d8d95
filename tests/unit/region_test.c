/* The region: its layout, who may open it, and what its members do to each other, with scripted peers and time. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <malloc.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "region/region.h"
#include "region/region_file.h"

static char dir[64];
static uint64_t now_ns = 1000000000;
static enum gr_process_state peers[64] = {0}; /* by pid; start time 1000 + pid */

static _Atomic unsigned looks; /* at other processes */

static uint64_t fake_now(void)
{
        return now_ns;
}

static enum gr_process_state fake_peer(uint32_t pid, uint64_t *ret_start)
{
        *ret_start = 1000 + pid;
        looks++;
        return pid < 64 ? peers[pid] : GR_PROCESS_GONE;
}

/* The nth call of this function of the system from now on fails, once, with this error. */
static struct {
        const char *call;
        int nth, error;
} failure, next_failure;

static bool fails(const char *call)
{
        if (!failure.call || strcmp(failure.call, call) != 0 || --failure.nth > 0)
                return false;
        errno = failure.error;
        failure = next_failure;
        next_failure.call = NULL;
        return true;
}

static void fail(const char *call, int nth, int error)
{
        failure.call = call;
        failure.nth = nth;
        failure.error = error;
}

/* What other processes do at such a moment, once. */
static void (*at_lock)(void), (*at_pause)(void), (*at_wait)(void);

static void meanwhile(void (**what)(void))
{
        void (*act)(void) = *what;

        if (!act)
                return; /* nothing is written: several threads may come here at a time */
        *what = NULL;
        act();
}

static bool file_is_zero; /* of what is opened the file gets the descriptor 0, and not the folder */

int open(const char *path, int flags, ...)
{
        mode_t mode = 0;
        va_list rest;
        int fd, other;

        va_start(rest, flags);
        if (flags & O_CREAT)
                mode = va_arg(rest, mode_t);
        va_end(rest);
        if (fails("open"))
                return -1;
        fd = (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
        if (fd != 0 || !file_is_zero)
                return fd;
        other = fcntl(fd, F_DUPFD_CLOEXEC, 3);
        close(fd);
        return other;
}

int openat(int folder, const char *path, int flags, ...)
{
        mode_t mode = 0;
        va_list rest;
        int fd;

        va_start(rest, flags);
        if (flags & O_CREAT)
                mode = va_arg(rest, mode_t);
        va_end(rest);
        if (fails("openat"))
                return -1;
        fd = (int)syscall(SYS_openat, folder, path, flags, mode);
        if (fd <= 0 || !file_is_zero || fcntl(0, F_GETFD) >= 0 || dup2(fd, 0) < 0)
                return fd;
        close(fd);
        return 0;
}

int mkdir(const char *path, mode_t mode)
{
        return fails("mkdir") ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

int lstat(const char *path, struct stat *status)
{
        return fails("lstat") ? -1 : fstatat(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW);
}

ssize_t pread(int fd, void *buffer, size_t bytes, off_t at)
{
        return fails("pread") ? -1 : (ssize_t)syscall(SYS_pread64, fd, buffer, bytes, at);
}

ssize_t pwrite(int fd, const void *buffer, size_t bytes, off_t at)
{
        return fails("pwrite") ? -1 : (ssize_t)syscall(SYS_pwrite64, fd, buffer, bytes, at);
}

int ftruncate(int fd, off_t bytes)
{
        return fails("ftruncate") ? -1 : (int)syscall(SYS_ftruncate, fd, bytes);
}

static _Atomic unsigned pauses;

int usleep(useconds_t us)
{
        struct timespec time = {.tv_sec = us / 1000000, .tv_nsec = (long)(us % 1000000) * 1000};

        pauses++;
        meanwhile(&at_pause);
        return nanosleep(&time, NULL);
}

/* Segments have numbers from 0 on, which the machine may have given away already: this one is called 0. */
static bool first_segment;
static int segment_zero = -1;

int shmget(key_t key, size_t bytes, int flags)
{
        int id;

        if (fails("shmget"))
                return -1;
        id = (int)syscall(SYS_shmget, key, bytes, flags);
        if (id < 0 || !first_segment)
                return id;
        segment_zero = id;
        return 0;
}

int shmctl(int id, int command, struct shmid_ds *status)
{
        return (int)syscall(SYS_shmctl, id == 0 && segment_zero >= 0 ? segment_zero : id, command, status);
}

static int lock_error; /* what flock says instead of locking; 0: it locks */
static unsigned locks, shared_locks;

int flock(int fd, int how)
{
        locks++;
        GR_CHECK(fcntl(fd, F_GETFD) >= 0); /* it would be another one's by now */
        if (how & LOCK_SH)
                shared_locks++;
        if (how & (LOCK_SH | LOCK_EX))
                meanwhile(&at_lock);
        if (!lock_error)
                return (int)syscall(SYS_flock, fd, how);
        errno = lock_error;
        return -1;
}

static int attach_error; /* what shmat says; 0: it attaches */

void *shmat(int id, const void *at, int how)
{
        if (!attach_error)
                return (void *)syscall(SYS_shmat, id == 0 && segment_zero >= 0 ? segment_zero : id, at, how);
        errno = attach_error;
        return (void *)-1;
}

static struct gr_region *server; /* serves whenever somebody waits */
static uint64_t server_gives;
static uint64_t works_until_ns; /* before that it says that it works, and answers nothing */

static struct gr_region *prompt[2]; /* answer at once, whatever the server does */

static void answer(struct gr_region *region)
{
        struct gr_request request;
        uint64_t given;

        if (!region || !gr_region_take(region, &request))
                return;
        given = request.want_bytes < server_gives ? request.want_bytes : server_gives;
        server_gives -= given;
        gr_region_answer(region, &request, given);
}

static void serve(struct gr_region *region)
{
        if (region && now_ns < works_until_ns)
                gr_region_publish(region, NULL, false);
        else
                answer(region);
        answer(prompt[0]);
        answer(prompt[1]);
}

/* Time goes by only here. */
static void fake_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
        meanwhile(&at_wait);
        serve(server);
        for (uint64_t until = now_ns + timeout_ns; *word == seen && now_ns < until; serve(server))
                now_ns += until - now_ns < 1000000 ? until - now_ns : 1000000;
}

static _Atomic uint32_t *woken; /* the last */

static void fake_wake(_Atomic uint32_t *word)
{
        woken = word;
}

static const struct gr_region_ops ops = {fake_now, fake_peer, fake_wait, fake_wake};

static struct gr_identity identity(uint32_t pid)
{
        return (struct gr_identity){.pid = pid, .start_ticks = 1000 + pid, .pid_namespace = 4026531836};
}

static int open_as(struct gr_region *region, uint32_t pid, const char *file)
{
        struct gr_identity self = identity(pid);
        int rc;

        memset(region, 0xa5, sizeof(*region)); /* whatever was there before */
        rc = gr_region_open(region, &ops, &self, dir, file, true);
        GR_CHECK_EQ(region->slot, -1);
        return rc;
}

/* Into this slot, which is free; -1: into any. */
static struct gr_region *join_at(uint32_t pid, const char *file, int slot)
{
        struct gr_region *region = calloc(1, sizeof(*region));
        uint64_t before[GR_REGION_SLOTS];

        GR_CHECK_EQ(open_as(region, pid, file), 0);
        for (int i = 0; i < GR_REGION_SLOTS; i++) {
                before[i] = region->map->owners[i];
                if (slot >= 0 && i != slot && before[i] == 0)
                        region->map->owners[i] = 1; /* in a namespace where nobody sees whether it lives */
        }
        GR_CHECK_EQ(gr_region_join(region, "test", 1), 0);
        GR_CHECK(slot < 0 || region->slot == slot);
        for (int i = 0; i < GR_REGION_SLOTS && slot >= 0; i++)
                if (i != slot)
                        region->map->owners[i] = before[i];
        peers[pid] = GR_PROCESS_ALIVE;
        return region;
}

/* The first two are in the first slot and in the last one, where these are free. */
static struct gr_region *join_as(uint32_t pid, const char *file)
{
        int slot = pid == 1 ? 0 : pid == 2 ? GR_REGION_SLOTS - 1 : -1;
        struct gr_region look;

        GR_CHECK_EQ(open_as(&look, pid, file), 0);
        if (slot >= 0 && look.map->owners[slot] != 0)
                slot = -1;
        gr_region_close(&look);
        return join_at(pid, file, slot);
}

static void drop(struct gr_region *region)
{
        gr_region_leave(region);
        GR_CHECK_EQ(region->slot, -1);
        gr_region_close(region);
        GR_CHECK(region->slot == -1 && !region->map);
        free(region);
}

/* As kill -9 leaves it. */
static void die(struct gr_region *region)
{
        peers[region->self.pid] = GR_PROCESS_GONE;
        gr_region_close(region);
        free(region);
}

static unsigned used_slots(struct gr_region *region)
{
        unsigned count = 0;

        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                count += region->map->owners[i] != 0;
        return count;
}

static void test_layout(void)
{
#define AT(type, field, offset) GR_CHECK_EQ(offsetof(struct type, field), offset)
        AT(gr_region_map, magic, 0);
        AT(gr_region_map, version, 8);
        AT(gr_region_map, slot_count, 12);
        AT(gr_region_map, slot_bytes, 16);
        AT(gr_region_map, size_bytes, 24);
        AT(gr_region_map, cookie, 32);
        AT(gr_region_ticket, magic, 0);
        AT(gr_region_ticket, version, 8);
        AT(gr_region_ticket, segment, 12);
        AT(gr_region_ticket, ipc_namespace, 16);
        AT(gr_region_ticket, cookie, 24);
        AT(gr_region_ticket, check, 32);
        AT(gr_region_map, owners, 64);
        AT(gr_region_map, accounts, 64 + 4096);
        AT(gr_region_map, slots, 64 + 8192);
        GR_CHECK_EQ(sizeof(struct gr_region_map), 64 + 8192 + 512 * 256);
        AT(gr_slot, request, 0);
        AT(gr_slot, answer, 4);
        AT(gr_slot, orders, 8);
        AT(gr_slot, rung, 12);
        AT(gr_slot, want_bytes, 16);
        AT(gr_slot, given_bytes, 24);
        AT(gr_slot, new_limit, 32);
        AT(gr_slot, new_threshold, 40);
        AT(gr_slot, heartbeat_ns, 48);
        AT(gr_slot, active_ns, 56);
        AT(gr_slot, start_ticks, 64);
        AT(gr_slot, pid_namespace, 72);
        AT(gr_slot, pid, 80);
        AT(gr_slot, share, 84);
        AT(gr_slot, name, 96);
        AT(gr_slot, figures, 128);
#undef AT
        GR_CHECK_EQ(sizeof(struct gr_slot), 256);
        GR_CHECK_EQ(GR_FIGURE_card_total, 0);
        GR_CHECK_EQ(GR_FIGURE_card_free, 1);
        GR_CHECK_EQ(GR_FIGURE_hard_limit, 2);
        GR_CHECK_EQ(GR_FIGURE_release_threshold, 3);
        GR_CHECK_EQ(GR_FIGURE_group_limit, 4);
        GR_CHECK_EQ(GR_FIGURE_live, 5);
        GR_CHECK_EQ(GR_FIGURE_cached, 6);
        GR_CHECK_EQ(GR_FIGURE_peak_reserved, 7);
        GR_CHECK_EQ(GR_FIGURE_waiting, 8);
        GR_CHECK_EQ(GR_FIGURE_driver, 9);
        GR_CHECK_EQ(GR_FIGURE_imported, 10);
        GR_CHECK_EQ(GR_SHARED_FIGURES, 11);
}

static void test_names(void)
{
        static const uint8_t uuid[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff};
        char file[GR_REGION_FILE_BYTES], group[GR_GROUP_NAME_BYTES], text[37], longest[80];
        char other[GR_REGION_FILE_BYTES + 1];
        struct {
                char group[GR_GROUP_NAME_BYTES], behind;
        } room;

        GR_CHECK_EQ(gr_region_file_name("a-b.c", uuid, file, sizeof(file)), 0);
        GR_CHECK_STR(file, "a-b.c-00010203-0405-0607-0809-0a0b0c0d0eff.v5");
        GR_CHECK_EQ(gr_region_file_name("a-b.c", uuid, other, strlen(file) + 1), 0);
        GR_CHECK_EQ(gr_region_file_name("a-b.c", uuid, other, strlen(file)), -EINVAL);
        GR_CHECK_EQ(gr_region_parse_file_name(file, group, text), 0);
        GR_CHECK_STR(group, "a-b.c");
        GR_CHECK_STR(text, "00010203-0405-0607-0809-0a0b0c0d0eff");
        GR_CHECK_EQ(gr_region_file_name("g", uuid, file, sizeof(file)), 0); /* the shortest there is */
        GR_CHECK_EQ(gr_region_parse_file_name(file, group, text), 0);
        GR_CHECK_STR(group, "g");
        file[strlen(file) - 1] = '1';
        GR_CHECK_EQ(gr_region_parse_file_name(file, group, text), -EINVAL);
        GR_CHECK_EQ(gr_region_parse_file_name("x.v1", group, text), -EINVAL);
        GR_CHECK_EQ(gr_region_file_name("", uuid, file, sizeof(file)), -EINVAL);
        GR_CHECK_EQ(gr_region_file_name("../x", uuid, file, sizeof(file)), -EINVAL);
        GR_CHECK_EQ(gr_region_file_name("a/b", uuid, file, sizeof(file)), -EINVAL);
        GR_CHECK_EQ(gr_region_file_name("a b", uuid, file, sizeof(file)), -EINVAL);
        memset(longest, 'x', sizeof(longest));
        longest[GR_GROUP_NAME_BYTES] = '\0';
        GR_CHECK_EQ(gr_region_file_name(longest, uuid, file, sizeof(file)), -EINVAL);
        longest[GR_GROUP_NAME_BYTES - 1] = '\0';
        GR_CHECK_EQ(gr_region_file_name(longest, uuid, file, sizeof(file)), 0);
        GR_CHECK_EQ(gr_region_parse_file_name(file, group, text), 0);
        GR_CHECK_STR(group, longest);

        /* Files of others: a group whose name is too long or is none, and what is no UUID. */
        snprintf(other, sizeof(other), "x%s", file);
        room.behind = '!';
        GR_CHECK_EQ(gr_region_parse_file_name(other, room.group, text), -EINVAL);
        GR_CHECK_EQ(room.behind, '!');
        file[0] = '.';
        GR_CHECK_EQ(gr_region_parse_file_name(file, group, text), -EINVAL);
        GR_CHECK_EQ(gr_region_file_name("g", uuid, file, sizeof(file)), 0);
        file[1] = '_';
        GR_CHECK_EQ(gr_region_parse_file_name(file, group, text), -EINVAL);
        file[1] = '-';
        for (size_t i = 2; i < 38; i += 35) {
                char was = file[i];

                file[i] = 'g';
                GR_CHECK_EQ(gr_region_parse_file_name(file, group, text), -EINVAL);
                file[i] = was;
        }
}

static void put_file(const char *name, const void *bytes, size_t length)
{
        char path[256];
        int fd;

        snprintf(path, sizeof(path), "%s/%s", dir, name);
        unlink(path);
        fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        GR_CHECK(fd >= 0 && write(fd, bytes, length) == (ssize_t)length);
        close(fd);
}

static void test_hostile_files(void)
{
        static unsigned char garbage[sizeof(struct gr_region_map)];
        struct gr_region region, other;
        struct gr_identity self = identity(1);
        char path[256], target[256];

        for (size_t i = 0; i < sizeof(garbage); i++)
                garbage[i] = (unsigned char)(i * 2654435761u >> 13 | 1);
        put_file("garbage", garbage, sizeof(garbage));
        GR_CHECK_EQ(open_as(&region, 1, "garbage"), -EPROTO);
        put_file("short", garbage, 100);
        GR_CHECK_EQ(open_as(&region, 1, "short"), -EPROTO);

        /* A later layout under our name. */
        GR_CHECK_EQ(open_as(&region, 1, "later"), 0);
        region.map->version = GR_REGION_VERSION + 1;
        GR_CHECK_EQ(open_as(&other, 1, "later"), -EPROTO);
        gr_region_close(&region);

        snprintf(path, sizeof(path), "%s/link", dir);
        snprintf(target, sizeof(target), "%s/target", dir);
        GR_CHECK_EQ(symlink(target, path), 0);
        GR_CHECK_EQ(open_as(&region, 1, "link"), -EPERM);
        GR_CHECK(access(target, F_OK) != 0);

        put_file("open", "", 0);
        snprintf(path, sizeof(path), "%s/open", dir);
        chmod(path, 0666);
        GR_CHECK_EQ(open_as(&region, 1, "open"), -EPERM);

        put_file("hard", "", 0);
        snprintf(path, sizeof(path), "%s/hard", dir);
        snprintf(target, sizeof(target), "%s/hard2", dir);
        GR_CHECK_EQ(link(path, target), 0);
        GR_CHECK_EQ(open_as(&region, 1, "hard"), -EPERM);

        snprintf(path, sizeof(path), "%s/fifo", dir);
        GR_CHECK_EQ(mkfifo(path, 0600), 0);
        GR_CHECK_EQ(open_as(&region, 1, "fifo"), -EPERM);
        snprintf(path, sizeof(path), "%s/folder", dir);
        GR_CHECK_EQ(mkdir(path, 0700), 0);
        GR_CHECK(open_as(&region, 1, "folder") < 0);
        if (geteuid() == 0) {
                put_file("theirs", "", 0);
                snprintf(path, sizeof(path), "%s/theirs", dir);
                GR_CHECK_EQ(chown(path, 12345, 12345), 0);
                GR_CHECK_EQ(open_as(&region, 1, "theirs"), -EPERM);
        }
        GR_CHECK(open_as(&region, 1, "a/b") < 0);

        snprintf(path, sizeof(path), "%s/dirlink", dir);
        GR_CHECK_EQ(symlink(dir, path), 0);
        GR_CHECK_EQ(gr_region_open(&region, &ops, &self, path, "x", true), -EPERM);
        snprintf(path, sizeof(path), "%s/folder", dir);
        chmod(path, 0755);
        GR_CHECK_EQ(gr_region_open(&region, &ops, &self, path, "x", true), -EPERM);
        GR_CHECK_EQ(gr_region_open(&region, &ops, &self, "/proc/none", "x", true) < 0, 1);
        GR_CHECK_EQ(gr_region_open(&region, &ops, &self, dir, "absent", false), -ENOENT);
}

static void sign(struct gr_region_ticket *ticket)
{
        const unsigned char *bytes = (const unsigned char *)ticket;

        ticket->check = UINT64_C(0xcbf29ce484222325);
        for (size_t i = 0; i < offsetof(struct gr_region_ticket, check); i++)
                ticket->check = (ticket->check ^ bytes[i]) * UINT64_C(0x100000001b3);
}

static void write_ticket(const char *name, struct gr_region_ticket ticket)
{
        sign(&ticket);
        put_file(name, &ticket, sizeof(ticket));
}

/* The file may be cut, emptied or filled with anything at any time: nobody dies, and those who find it out meet anew.
 */
static void test_file_changes(void)
{
        static const size_t lengths[] = {0, 1, 39, 100, 200000};
        struct gr_region *one, *two;
        struct gr_member member;
        char path[256];

        snprintf(path, sizeof(path), "%s/cut", dir);
        for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
                one = join_as(1, "cut");
                two = join_as(2, "cut");
                GR_CHECK_EQ(truncate(path, 0), 0);
                GR_CHECK_EQ(truncate(path, (off_t)lengths[i]), 0);
                GR_CHECK_EQ(gr_region_read(one, (unsigned)two->slot, &member), 0);
                GR_CHECK_EQ(gr_region_reserve(two, GIB, 2 * GIB), 0);
                GR_CHECK_EQ(gr_region_sum(one, false), GIB);
                GR_CHECK(!gr_region_member(one) && !gr_region_member(two));
                if (lengths[i] == 0) {
                        gr_region_close(one);
                        gr_region_close(two);
                        GR_CHECK_EQ(open_as(one, 1, "cut"), 0);
                        GR_CHECK_EQ(gr_region_join(one, "test", 1), 0);
                        GR_CHECK_EQ(open_as(two, 2, "cut"), 0);
                        GR_CHECK_EQ(gr_region_join(two, "test", 1), 0);
                        GR_CHECK_EQ(used_slots(one), 2);
                } else {
                        struct gr_region three;

                        GR_CHECK_EQ(open_as(&three, 3, "cut"), -EPROTO);
                }
                die(two);
                die(one);
                unlink(path);
        }
        /* The last one was killed: what the file names is gone, and the next one makes it anew. */
        die(join_as(1, "cut"));
        GR_CHECK_EQ(access(path, F_OK), 0);
        one = calloc(1, sizeof(*one));
        GR_CHECK_EQ(gr_region_open(one, &ops, &(struct gr_identity){1, 1001, 4026531836}, dir, "cut", false), -ENOENT);
        free(one);
        one = join_as(1, "cut");
        GR_CHECK_EQ(used_slots(one), 1);
        drop(one);
}

static int held_lock = -1;

static void let_go_of_lock(void)
{
        close(held_lock);
        held_lock = -1;
}

/* Another process is about to make the region: it is waited for, and the memory is attached once. */
static void test_made_at_once(void)
{
        struct gr_identity self = identity(1);
        struct gr_region region;
        struct shmid_ds status;
        struct stat folder;
        char path[256];

        /* The folder as well; nobody else may look into it. */
        snprintf(path, sizeof(path), "%s/new", dir);
        GR_CHECK_EQ(gr_region_open(&region, &ops, &self, path, "made", false), -ENOENT);
        GR_CHECK_EQ(gr_region_open(&region, &ops, &self, path, "made", true), 0);
        gr_region_close(&region);
        GR_CHECK(stat(path, &folder) == 0 && (folder.st_mode & 0777) == 0700);

        snprintf(path, sizeof(path), "%s/made", dir);
        held_lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        GR_CHECK(held_lock >= 0 && flock(held_lock, LOCK_EX) == 0);
        at_pause = let_go_of_lock;
        GR_CHECK_EQ(open_as(&region, 1, "made"), 0);
        GR_CHECK(!at_pause);
        GR_CHECK(shmctl(region.segment, IPC_STAT, &status) == 0 && status.shm_nattch == 1);
        gr_region_close(&region);
        GR_CHECK(shmctl(region.segment, IPC_STAT, &status) != 0); /* gone with the last process */

        /* Where the file system has no locks that is said at once. */
        unlink(path);
        locks = 0;
        lock_error = ENOLCK;
        GR_CHECK_EQ(open_as(&region, 1, "made"), -ENOENT);
        GR_CHECK(locks <= 2); /* another unlocks */

        /* A lock to share is tried for a moment where that may help, the other one once. */
        locks = 0;
        GR_CHECK(!gr_region_file_lock(0, LOCK_SH));
        GR_CHECK_EQ(locks, 1);
        lock_error = EWOULDBLOCK;
        GR_CHECK(!gr_region_file_lock(0, LOCK_EX));
        GR_CHECK_EQ(locks, 2);
        GR_CHECK(!gr_region_file_lock(0, LOCK_SH));
        GR_CHECK(locks > 10);
        lock_error = 0;
}

/* The segment goes with its last process between a look at it and the use of it; or there is no room for it here. */
static void test_not_attached(void)
{
        struct gr_region *one = join_as(1, "late"), late;

        attach_error = EIDRM;
        GR_CHECK_EQ(gr_region_open(&late, &ops, &one->self, dir, "late", false), -ENOENT);
        attach_error = ENOMEM;
        GR_CHECK_EQ(gr_region_open(&late, &ops, &one->self, dir, "late", false), -ENOMEM);
        attach_error = 0;
        drop(one);
}

/* Who leaves after the file was replaced removes none of those who have joined since. */
static void test_leave_replaced(void)
{
        struct gr_region *one = join_as(1, "replaced"), *two;
        char path[256];

        snprintf(path, sizeof(path), "%s/replaced", dir);
        GR_CHECK_EQ(unlink(path), 0);
        two = join_as(2, "replaced");
        drop(one);
        GR_CHECK(gr_region_member(two) && access(path, F_OK) == 0);
        drop(two);
}

/* Growing a file past this limit is a signal. */
static void test_file_limit(void)
{
        struct rlimit before, none;
        struct gr_region region;

        GR_CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
        none = before;
        none.rlim_cur = 0;
        GR_CHECK_EQ(setrlimit(RLIMIT_FSIZE, &none), 0);
        GR_CHECK_EQ(open_as(&region, 1, "limited"), -EFBIG);
        GR_CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
}

/* Another user's segment that says it is ours, like the region but for the cookie; -1 where the test may not. */
static int foreign_segment(const struct gr_region_map *like, uint64_t cookie)
{
        int *id = mmap(NULL, sizeof(*id), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0), found;
        struct gr_region_map *map;
        struct shmid_ds status;
        pid_t child;

        if (geteuid() != 0 || id == MAP_FAILED)
                return -1;
        *id = -1;
        child = fork();
        if (child == 0) {
                if (setuid(65534) != 0)
                        _exit(0);
                *id = shmget(IPC_PRIVATE, sizeof(*map), IPC_CREAT | 0600);
                map = shmat(*id, NULL, 0);
                memcpy(map, like, offsetof(struct gr_region_map, owners));
                map->cookie = cookie;
                shmctl(*id, IPC_STAT, &status);
                status.shm_perm.uid = 0;
                _exit(shmctl(*id, IPC_SET, &status) != 0);
        }
        GR_CHECK(waitpid(child, &found, 0) == child && found == 0);
        found = *id;
        munmap(id, sizeof(*id));
        return found;
}

/* Tickets that are none of ours, with a right check. */
static void test_hostile_tickets(void)
{
        struct gr_region_ticket ticket = {.magic = GR_TICKET_MAGIC, .version = GR_REGION_VERSION, .cookie = 7};
        struct gr_region *one = join_as(1, "ticket");
        struct gr_region region;
        struct stat status;
        int id = shmget(IPC_PRIVATE, sizeof(struct gr_region_map), IPC_CREAT | 0600), small, accounted;
        struct shmid_ds segment;
        void *like;

        small = shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600);
        GR_CHECK(id >= 0 && small >= 0 && stat("/proc/self/ns/ipc", &status) == 0);
        ticket.ipc_namespace = status.st_ino + 1;
        ticket.segment = (uint32_t)id;
        write_ticket("theirs2", ticket);
        GR_CHECK_EQ(open_as(&region, 1, "theirs2"), -EXDEV);
        ticket.ipc_namespace = status.st_ino;
        /* The one that is too small begins as a region does. */
        like = shmat(small, NULL, 0);
        memcpy(like, (void *)one->map, offsetof(struct gr_region_map, owners));
        ((struct gr_region_map *)like)->cookie = ticket.cookie;
        shmdt(like);
        /* A segment of the right size that is none, one too small, one that is not there: made anew, they are left. */
        for (int i = 0; i < 3; i++) {
                ticket.segment = i == 0 ? (uint32_t)id : i == 1 ? (uint32_t)small : UINT32_MAX;
                write_ticket("anew", ticket);
                GR_CHECK_EQ(open_as(&region, 1, "anew"), 0);
                GR_CHECK(region.segment != (int)ticket.segment);
                gr_region_close(&region);
        }
        GR_CHECK(shmctl(id, IPC_STAT, &segment) == 0 && segment.shm_nattch == 0);
        /* A living region under a wrong cookie: not that one. */
        ticket.segment = (uint32_t)one->segment;
        write_ticket("anew", ticket);
        GR_CHECK_EQ(open_as(&region, 1, "anew"), 0);
        GR_CHECK(region.segment != one->segment);
        gr_region_close(&region);
        /* The right cookie, but made by somebody else, who may look into it. */
        accounted = foreign_segment(one->map, ticket.cookie);
        if (accounted >= 0) {
                ticket.segment = (uint32_t)accounted;
                write_ticket("anew", ticket);
                GR_CHECK_EQ(open_as(&region, 1, "anew"), 0);
                GR_CHECK(region.segment != accounted);
                gr_region_close(&region);
                shmctl(accounted, IPC_RMID, NULL);
        }
        ticket.version = GR_REGION_VERSION + 1;
        write_ticket("anew", ticket);
        GR_CHECK_EQ(open_as(&region, 1, "anew"), -EPROTO);
        ticket.version = GR_REGION_VERSION;
        ticket.magic++;
        write_ticket("anew", ticket);
        GR_CHECK_EQ(open_as(&region, 1, "anew"), -EPROTO);
        drop(one);
        shmctl(id, IPC_RMID, NULL);
        shmctl(small, IPC_RMID, NULL);
}

/* Valid magic, everything behind it anything. */
static void test_garbage_inside(void)
{
        struct gr_region *one = join_as(1, "inside");
        struct gr_member member;
        unsigned state = 1;

        for (size_t i = 64; i < sizeof(struct gr_region_map); i++) {
                state = state * 1664525u + 1013904223u;
                ((unsigned char *)one->map)[i] = (unsigned char)(state >> 24);
        }
        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                if (gr_region_read(one, i, &member) == 0) {
                        GR_CHECK(member.share >= 1 && member.share <= 1000);
                        GR_CHECK(strlen(member.name) < sizeof(member.name));
                        for (int j = 0; j < GR_SHARED_FIGURES; j++)
                                GR_CHECK(member.figures[j] == UINT64_MAX || member.figures[j] < UINT64_C(1) << 62);
                }
        gr_region_sum(one, false);
        gr_region_ask(one, MIB, 1000000, false);
        now_ns += UINT64_C(20000000000);
        gr_region_sweep(one);
        GR_CHECK_EQ(used_slots(one), 0);
        GR_CHECK(!gr_region_member(one));
        GR_CHECK_EQ(gr_region_reserve(one, 1, UINT64_MAX), -ENOTCONN);
        GR_CHECK_EQ(gr_region_join(one, "again", 1), 0);
        drop(one);
}

static void test_slots(void)
{
        struct gr_region *one = join_as(1, "slots"), *two = join_as(2, "slots"), *three;
        struct gr_member member;
        char path[256];

        GR_CHECK(one->slot != two->slot);
        GR_CHECK(gr_region_member(one) && gr_region_member(two));
        GR_CHECK_EQ(gr_region_read(one, (unsigned)two->slot, &member), 0);
        GR_CHECK_EQ(member.identity.pid, 2);
        GR_CHECK_EQ(member.identity.start_ticks, 1002);
        GR_CHECK_STR(member.name, "test");
        GR_CHECK(member.same_namespace);

        die(two);
        GR_CHECK_EQ(used_slots(one), 2);
        GR_CHECK_EQ(gr_region_sweep(one), 1);
        GR_CHECK_EQ(used_slots(one), 1);

        /* The same pid, started at another time. */
        two = join_as(2, "slots");
        three = calloc(1, sizeof(*three));
        GR_CHECK_EQ(gr_region_open(three, &ops, &(struct gr_identity){2, 77, 4026531836}, dir, "slots", true), 0);
        GR_CHECK_EQ(gr_region_join(three, "reused", 1), 0);
        GR_CHECK_EQ(gr_region_sweep(one), 1);
        GR_CHECK(gr_region_member(two) && !gr_region_member(three));
        gr_region_close(three);

        /* Of another pid namespace: only its heartbeat tells. */
        GR_CHECK_EQ(gr_region_open(three, &ops, &(struct gr_identity){9, 1, 4026531999}, dir, "slots", true), 0);
        GR_CHECK_EQ(gr_region_join(three, "container", 1), 0);
        now_ns += UINT64_C(9000000000);
        GR_CHECK_EQ(gr_region_sweep(one), 0);
        gr_region_publish(three, NULL, false);
        now_ns += UINT64_C(10000000000);
        GR_CHECK_EQ(gr_region_sweep(one), 0);
        three->map->slots[three->slot].heartbeat_ns = 0; /* it has just claimed the slot */
        GR_CHECK_EQ(gr_region_sweep(one), 0);
        gr_region_publish(three, NULL, false);
        now_ns += UINT64_C(10000000001);
        GR_CHECK_EQ(gr_region_sweep(one), 1);
        gr_region_close(three);
        free(three);

        /* Together they find the dead, each looking after the next one. */
        for (uint32_t pid = 3; pid < 20; pid++)
                die(join_as(pid, "slots"));
        GR_CHECK(used_slots(one) > 10);
        gr_region_look_after_next(one);
        gr_region_look_after_next(two);
        GR_CHECK_EQ(used_slots(one), 2);
        three = join_at(3, "slots", 100);
        die(join_at(4, "slots", 99));
        die(join_at(5, "slots", 101));
        gr_region_look_after_next(one);
        GR_CHECK_EQ(used_slots(one), 4); /* only as far as to the next one that lives */
        gr_region_look_after_next(three);
        GR_CHECK_EQ(used_slots(one), 3);
        drop(three);

        /* The last one closes the door; a file that was removed is noticed. */
        snprintf(path, sizeof(path), "%s/slots", dir);
        drop(two);
        GR_CHECK_EQ(access(path, F_OK), 0);
        unlink(path);
        GR_CHECK(!gr_region_member(one));
        GR_CHECK_EQ(gr_region_join(one, "test", 1), -ESTALE);
        gr_region_close(one);
        GR_CHECK_EQ(open_as(one, 1, "slots"), 0);
        GR_CHECK_EQ(gr_region_join(one, "test", 1), 0);
        drop(one);
        GR_CHECK(access(path, F_OK) != 0);
}

static void test_full(void)
{
        struct gr_region *one = join_as(1, "full"), *two = calloc(1, sizeof(*two));
        uint64_t accounted = UINT64_C(1) << 40 | 7;

        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                if ((int)i != one->slot) {
                        one->map->owners[i] = accounted;
                        one->map->slots[i].heartbeat_ns = now_ns;
                }
        GR_CHECK_EQ(open_as(two, 2, "full"), 0);
        GR_CHECK_EQ(gr_region_join(two, "late", 1), -ENOSPC);
        GR_CHECK_EQ(two->slot, -1);
        /* Whichever slot is the only free one is found; one of a process that is gone is free. */
        peers[9] = GR_PROCESS_GONE;
        for (int i = 1; i < GR_REGION_SLOTS; i++) {
                uint64_t word = one->map->owners[i];

                one->map->owners[i] = i % 2 ? 0 : (one->token & ~UINT64_C(0x3fffff)) | 9;
                GR_CHECK_EQ(gr_region_join(two, "late", 1), 0);
                GR_CHECK_EQ(two->slot, i);
                gr_region_leave(two);
                GR_CHECK_EQ(used_slots(one), GR_REGION_SLOTS - 1);
                one->map->owners[i] = word;
        }
        now_ns += UINT64_C(11000000000);
        GR_CHECK_EQ(gr_region_join(two, "late", 1), 0);
        drop(two);
        drop(one);
}

static void test_accounts(void)
{
        struct gr_region *one = join_as(1, "accounts"), *two = join_as(2, "accounts");

        GR_CHECK_EQ(gr_region_reserve(one, 3 * GIB, 4 * GIB), 0);
        GR_CHECK_EQ(gr_region_reserve(two, 2 * GIB, 4 * GIB), -EDQUOT);
        GR_CHECK_EQ(gr_region_sum(one, false), 3 * GIB);
        GR_CHECK_EQ(gr_region_reserve(two, GIB, 4 * GIB), 0);
        GR_CHECK_EQ(gr_region_sum(one, true), GIB);
        gr_region_adjust(one, -(int64_t)GIB);
        GR_CHECK_EQ(gr_region_sum(two, false), 3 * GIB);

        /* A dead one's share is there again, and only once: also for those who looked at the same time. */
        die(one);
        GR_CHECK_EQ(gr_region_reserve(two, 3 * GIB, 4 * GIB), 0);
        GR_CHECK_EQ(gr_region_sum(two, false), 4 * GIB);
        GR_CHECK_EQ(gr_region_reserve(two, 1, 4 * GIB), -EDQUOT);
        die(join_at(3, "accounts", 100));
        one = join_as(1, "accounts"); /* looks at nobody, as there was a free slot */
        GR_CHECK_EQ(used_slots(one), 3);
        GR_CHECK_EQ(gr_region_sum(one, false), 4 * GIB);
        drop(two);
        GR_CHECK_EQ(gr_region_sum(one, false), 0);
        drop(one);
}

/* Another process takes the slot of one that it thinks gone, and that is about to charge its account once more. */
static struct gr_region *loser, *taker;

static void wait_and_lose(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
        int slot = loser->slot;

        (void)word;
        (void)seen;
        (void)timeout_ns;
        for (int i = 0; i < GR_REGION_SLOTS; i++)
                loser->map->owners[i] = i == slot ? 0 : 1; /* the only free one */
        taker = join_as(3, "lost");
        GR_CHECK_EQ(taker->slot, slot);
}

static void test_lost_slot(void)
{
        struct gr_region_ops losing = ops;
        struct gr_region *dead, *again;

        losing.wait = wait_and_lose;
        loser = join_as(1, "lost");
        GR_CHECK_EQ(gr_region_reserve(loser, GIB, 4 * GIB), 0);
        dead = join_as(2, "lost");
        GR_CHECK_EQ(gr_region_reserve(dead, 3 * GIB, 4 * GIB), 0);
        die(dead);
        loser->ops = &losing;
        GR_CHECK_EQ(gr_region_reserve(loser, 2 * GIB, 4 * GIB), -ENOTCONN);
        loser->ops = &ops;
        for (int i = 0; i < GR_REGION_SLOTS; i++)
                if (i != taker->slot)
                        taker->map->owners[i] = 0;
        GR_CHECK_EQ(gr_region_sum(taker, false), 0);

        /* What is charged or given back meanwhile goes to the next membership, with what was charged before. */
        gr_region_adjust(loser, 512 * (int64_t)MIB);
        gr_region_adjust(loser, -256 * (int64_t)MIB);
        GR_CHECK_EQ(gr_region_sum(taker, false), 0);
        again = join_as(1, "lost");
        gr_region_carry(again, loser);
        GR_CHECK_EQ(gr_region_sum(taker, true), GIB + 256 * MIB);
        gr_region_close(loser);
        free(loser);

        /* A view that is late, of the same process. */
        loser = again;
        again->map->owners[again->slot] = 0;
        again = join_as(1, "lost");
        GR_CHECK_EQ(again->slot, loser->slot);
        gr_region_adjust(loser, GIB);
        GR_CHECK_EQ(gr_region_sum(taker, true), 0);
        gr_region_carry(again, loser);
        GR_CHECK_EQ(gr_region_sum(taker, true), 2 * GIB + 256 * MIB);
        gr_region_adjust(again, -(int64_t)(2 * GIB + 256 * MIB));
        GR_CHECK_EQ(gr_region_sum(taker, false), 0);
        gr_region_adjust(again, -(int64_t)MIB); /* a release counts before its charge */
        GR_CHECK_EQ(gr_region_sum(taker, false), 0);
        gr_region_adjust(again, (int64_t)MIB);
        GR_CHECK_EQ(gr_region_sum(taker, false), 0);
        gr_region_close(loser);
        free(loser);
        drop(again);
        drop(taker);
}

/* Where no folder is named: ours, also where others have put something in its place, and always the same one. */
static void test_find_dir(void)
{
        char base[80], first[160], taken[170], found[GR_REGION_PATH_BYTES], again[GR_REGION_PATH_BYTES], tiny[20];
        struct stat status;

        snprintf(base, sizeof(base), "%s/base", dir);
        snprintf(first, sizeof(first), "%s/gpureclaim-%lu", base, (unsigned long)geteuid());
        GR_CHECK_EQ(gr_region_find_dir(base, true, found, sizeof(found)), -ENOENT);
        GR_CHECK_EQ(mkdir(base, 0700), 0);
        GR_CHECK_EQ(gr_region_find_dir(base, false, found, sizeof(found)), -ENOENT);
        GR_CHECK_EQ(gr_region_find_dir(base, true, tiny, sizeof(tiny)), -ENAMETOOLONG);
        /* There must be room for the longest name that there may be in base. */
        GR_CHECK_EQ(gr_region_find_dir(base, true, found, strlen(base) + 1 + NAME_MAX), -ENAMETOOLONG);
        GR_CHECK_EQ(gr_region_find_dir(base, false, found, strlen(base) + 1 + NAME_MAX + 1), -ENOENT);
        GR_CHECK_EQ(gr_region_find_dir(base, true, found, sizeof(found)), 0);
        GR_CHECK_STR(found, first);
        GR_CHECK(stat(found, &status) == 0 && (status.st_mode & 07777) == 0700);
        GR_CHECK_EQ(gr_region_find_dir(base, false, found, sizeof(found)), 0);
        GR_CHECK_STR(found, first);

        /* A folder that others can write to, a link, a file, and, where the test may, another user's. */
        for (int kind = 0; kind < 4; kind++) {
                GR_CHECK_EQ(rmdir(first), 0);
                if (kind == 0)
                        GR_CHECK(mkdir(first, 0700) == 0 && chmod(first, 0770) == 0);
                else if (kind == 1)
                        GR_CHECK_EQ(symlink(base, first), 0);
                else if (kind == 2)
                        GR_CHECK_EQ(mknod(first, S_IFREG | 0600, 0), 0);
                else if (geteuid() == 0)
                        GR_CHECK(mkdir(first, 0700) == 0 && chown(first, 65534, 65534) == 0);
                else
                        GR_CHECK_EQ(mkdir(first, 0755), 0);
                /* None of these is ours either, though its name begins so. */
                snprintf(taken, sizeof(taken), "%s-0", first);
                GR_CHECK_EQ(rename(first, taken), 0);
                GR_CHECK_EQ(gr_region_find_dir(base, false, found, sizeof(found)), -ENOENT);
                GR_CHECK_EQ(rename(taken, first), 0);
                snprintf(taken, sizeof(taken), "%s1", first); /* another user's name */
                GR_CHECK_EQ(mkdir(taken, 0700), 0);
                GR_CHECK_EQ(gr_region_find_dir(base, false, found, sizeof(found)), -ENOENT);
                GR_CHECK_EQ(gr_region_find_dir(base, true, found, sizeof(found)), 0);
                GR_CHECK(strncmp(found, first, strlen(first)) == 0 && found[strlen(first)] == '-');
                GR_CHECK(stat(found, &status) == 0 && (status.st_mode & 07777) == 0700);
                GR_CHECK_EQ(gr_region_find_dir(base, true, again, sizeof(again)), 0);
                GR_CHECK_STR(again, found);
                /* Of two the first by name, whichever was made first. */
                snprintf(again, sizeof(again), "%s-", first);
                GR_CHECK_EQ(mkdir(again, 0700), 0);
                GR_CHECK_EQ(gr_region_find_dir(base, true, again, sizeof(again)), 0);
                GR_CHECK_EQ(strlen(again), strlen(first) + 1);
                GR_CHECK_EQ(rmdir(again), 0);
                /* The name is free again: nobody goes there while the others are elsewhere. */
                GR_CHECK_EQ(remove(first), 0);
                GR_CHECK_EQ(gr_region_find_dir(base, true, again, sizeof(again)), 0);
                GR_CHECK_STR(again, found);
                GR_CHECK_EQ(rmdir(found), 0);
                GR_CHECK_EQ(rmdir(taken), 0);
                GR_CHECK_EQ(gr_region_find_dir(base, true, found, sizeof(found)), 0);
                GR_CHECK_STR(found, first);
        }
        GR_CHECK_EQ(rmdir(first), 0);
        GR_CHECK_EQ(rmdir(base), 0);
}

static void check_segment_gone(int id)
{
        struct shmid_ds status;

        GR_CHECK(shmctl(id, IPC_STAT, &status) != 0);
}

/* A program without a standard input, or with one that it has closed, has the descriptor 0 to give. */
static void test_descriptor_zero(void)
{
        char base[96], found[GR_REGION_PATH_BYTES], path[256];
        int kept = fcntl(0, F_DUPFD_CLOEXEC, 3), other;

        snprintf(path, sizeof(path), "%s/zero", dir);
        snprintf(base, sizeof(base), "%s/zero-base", dir);
        GR_CHECK_EQ(mkdir(base, 0700), 0);
        for (int i = 0; i < 2; i++) {
                struct gr_region *one, *two;

                close(0);
                file_is_zero = i == 1;
                one = join_as(1, "zero");
                two = join_as(2, "zero");
                GR_CHECK(gr_region_member(one) && gr_region_member(two));
                GR_CHECK_EQ(used_slots(one), 2);
                drop(two);
                GR_CHECK_EQ(access(path, F_OK), 0);
                other = open(path, O_RDWR | O_CLOEXEC);
                if (other == 0) {
                        other = fcntl(0, F_DUPFD_CLOEXEC, 3);
                        close(0);
                }
                GR_CHECK_EQ(flock(other, LOCK_SH), 0); /* somebody joins */
                drop(one);
                close(other);
                GR_CHECK_EQ(access(path, F_OK), 0);
                one = join_as(1, "zero");
                GR_CHECK_EQ(truncate(path, 1), 0);
                GR_CHECK(!gr_region_member(one));
                drop(one);
                GR_CHECK_EQ(unlink(path), 0);
                drop(join_as(1, "zero"));
                GR_CHECK(access(path, F_OK) != 0);
                GR_CHECK_EQ(gr_region_find_dir(base, true, found, sizeof(found)), 0);
                GR_CHECK_EQ(gr_region_find_dir(base, true, found, sizeof(found)), 0);
                GR_CHECK_EQ(rmdir(found), 0);
                file_is_zero = false;
                GR_CHECK(fcntl(0, F_GETFD) < 0);
                if (dup2(kept, 0) != 0)
                        abort();
        }
        close(kept);
        GR_CHECK_EQ(rmdir(base), 0);
}

/* What can fail when a region is made: said as what it is, and the next one makes it. */
static void test_not_made(void)
{
        static const struct {
                const char *call;
                int nth, error, rc;
        } failures[] = {
                {"open", 1, EMFILE, -EMFILE},   {"openat", 1, EMFILE, -EMFILE}, {"shmget", 1, ENOSPC, -ENOSPC},
                {"pwrite", 1, ENOSPC, -ENOSPC}, {"pwrite", 1, EDQUOT, -ENOSPC}, {"pwrite", 1, EIO, -EIO},
                {"pread", 1, EIO, -EIO},
        };
        struct gr_region region, other;
        struct rlimit before, least;
        char path[256], sub[GR_REGION_PATH_BYTES + 1], name[GR_REGION_FILE_BYTES + 1];
        struct gr_identity self = identity(1);
        struct stat status;

        snprintf(path, sizeof(path), "%s/unmade", dir);
        for (size_t i = 0; i < sizeof(failures) / sizeof(failures[0]); i++) {
                fail(failures[i].call, failures[i].nth, failures[i].error);
                GR_CHECK_EQ(open_as(&region, 1, "unmade"), failures[i].rc);
                GR_CHECK(!failure.call && !region.map);
                if (stat(path, &status) == 0)
                        GR_CHECK_EQ(status.st_size, 0);
                GR_CHECK_EQ(open_as(&region, 1, "unmade"), 0);
                gr_region_close(&region);
                GR_CHECK_EQ(unlink(path), 0);
        }
        attach_error = ENOMEM;
        GR_CHECK_EQ(open_as(&region, 1, "unmade"), -ENOMEM);
        attach_error = 0;
        fail("ftruncate", 1, EIO);
        next_failure = failure;
        fail("pwrite", 1, ENOSPC); /* so the file may hold anything */
        GR_CHECK_EQ(open_as(&region, 1, "unmade"), -EIO);
        GR_CHECK(!failure.call);

        /* No segment is left of one whose number could not be written, nor where the file cannot be emptied again. */
        first_segment = true;
        fail("pwrite", 1, EIO);
        GR_CHECK_EQ(open_as(&region, 1, "unmade"), -EIO);
        check_segment_gone(0);
        first_segment = false;
        segment_zero = -1;
        GR_CHECK_EQ(setrlimit(RLIMIT_FSIZE, &(struct rlimit){0, RLIM_INFINITY}), 0);
        GR_CHECK_EQ(open_as(&region, 1, "unmade"), -EFBIG);
        GR_CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
        least = before;
        least.rlim_cur = sizeof(struct gr_region_ticket);
        GR_CHECK_EQ(setrlimit(RLIMIT_FSIZE, &least), 0);
        GR_CHECK_EQ(open_as(&region, 1, "unmade"), 0); /* there is just enough room */
        before.rlim_cur = before.rlim_max;
        GR_CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
        gr_region_close(&region);
        unlink(path);

        /* The very first segment of a machine has the number 0. Two regions are told apart by more than their number. */
        first_segment = true;
        GR_CHECK_EQ(open_as(&region, 1, "unmade"), 0);
        first_segment = false;
        GR_CHECK_EQ(region.segment, 0);
        GR_CHECK_EQ(open_as(&other, 2, "unmade"), 0);
        GR_CHECK(other.segment == 0 && other.cookie == region.cookie && region.cookie != 0);
        gr_region_close(&other);
        gr_region_close(&region);
        segment_zero = -1;
        unlink(path);

        /* Names that are too long, and a folder below a file. */
        memset(sub, 'x', sizeof(sub));
        sub[sizeof(sub) - 1] = '\0';
        GR_CHECK_EQ(gr_region_open(&region, &ops, &self, sub, "x", true), -ENAMETOOLONG);
        memset(name, 'x', sizeof(name));
        name[GR_REGION_FILE_BYTES] = '\0';
        GR_CHECK_EQ(open_as(&region, 1, name), -ENAMETOOLONG);
        GR_CHECK_EQ(open_as(&region, 1, "a/b"), -ENAMETOOLONG);
        put_file("plain", "", 0);
        snprintf(sub, sizeof(sub), "%s/plain/sub", dir);
        GR_CHECK_EQ(gr_region_open(&region, &ops, &self, sub, "x", true), -ENOTDIR);
}

static struct gr_region beside;

static void make_beside(void)
{
        GR_CHECK_EQ(open_as(&beside, 2, "meanwhile"), 0);
}

static void make_beside_and_lock(void)
{
        char path[256];

        close(held_lock);
        make_beside();
        snprintf(path, sizeof(path), "%s/meanwhile", dir);
        held_lock = open(path, O_RDWR | O_CLOEXEC);
        GR_CHECK_EQ(flock(held_lock, LOCK_EX), 0);
}

static void replace_file(void)
{
        put_file("meanwhile", "", 0);
}

static void hold_lock(int how)
{
        char path[256];

        snprintf(path, sizeof(path), "%s/meanwhile", dir);
        held_lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        GR_CHECK(held_lock >= 0 && flock(held_lock, how) == 0);
}

/* What another process does between two steps of this one. */
static void test_meanwhile(void)
{
        struct gr_region *one, *two, region;
        char path[256];

        snprintf(path, sizeof(path), "%s/meanwhile", dir);
        /* It makes the region before this one has the lock, or while this one waits for it and never gets it. */
        for (int i = 0; i < 2; i++) {
                if (i == 0) {
                        at_lock = make_beside;
                } else {
                        hold_lock(LOCK_EX);
                        at_pause = make_beside_and_lock;
                }
                GR_CHECK_EQ(open_as(&region, 1, "meanwhile"), 0);
                GR_CHECK(!at_lock && !at_pause);
                GR_CHECK(region.segment == beside.segment && region.map != beside.map);
                gr_region_close(&region);
                gr_region_close(&beside);
                if (held_lock >= 0)
                        let_go_of_lock();
                GR_CHECK_EQ(unlink(path), 0);
        }

        /* It leaves and removes the file just before this one joins: that would join what nobody finds. */
        shared_locks = 0;
        one = join_as(1, "meanwhile");
        GR_CHECK(shared_locks > 0);
        GR_CHECK_EQ(open_as(&region, 2, "meanwhile"), 0);
        at_lock = replace_file;
        GR_CHECK_EQ(gr_region_join(&region, "test", 1), -ESTALE);
        GR_CHECK(!at_lock && region.slot == -1);
        GR_CHECK_EQ(used_slots(one), 1);
        gr_region_close(&region);
        die(one);
        unlink(path);

        /* It leaves while this one joins: this one waits for a moment, and for the end of that. */
        one = join_as(1, "meanwhile");
        hold_lock(LOCK_EX);
        at_pause = let_go_of_lock;
        two = join_as(2, "meanwhile");
        GR_CHECK(!at_pause);

        /* While another joins, the file stays; and one who has left has nothing more to say. */
        drop(two);
        hold_lock(LOCK_SH);
        gr_region_leave(one);
        GR_CHECK_EQ(access(path, F_OK), 0);
        let_go_of_lock();
        GR_CHECK_EQ(used_slots(one), 0);
        gr_region_leave(one);
        GR_CHECK_EQ(access(path, F_OK), 0);
        gr_region_close(one);
        free(one);
        unlink(path);
}

/* Where the file cannot be looked at it is as it was, unless it is known to be another one. */
static void test_not_looked_at(void)
{
        struct gr_region *one = join_as(1, "look");
        struct gr_region_ticket ticket;
        char path[256], moved[256];
        uint64_t before = one->cookie;
        int fd;

        snprintf(path, sizeof(path), "%s/look", dir);
        snprintf(moved, sizeof(moved), "%s/look-moved", dir);
        GR_CHECK(gr_region_member(one));
        fail("lstat", 1, EACCES);
        GR_CHECK(gr_region_member(one) && !failure.call);
        fail("open", 1, EMFILE);
        GR_CHECK(gr_region_member(one) && !failure.call);
        fail("openat", 1, EMFILE);
        GR_CHECK(gr_region_member(one) && !failure.call);
        fail("pread", 1, EIO);
        GR_CHECK(gr_region_member(one) && !failure.call);
        fail("open", 1, EMFILE);
        GR_CHECK_EQ(gr_region_join(one, "test", 1), -ESTALE);

        /* Another segment under the same number of the region, or the other way round. */
        fd = open(path, O_RDWR | O_CLOEXEC);
        GR_CHECK_EQ(pread(fd, &ticket, sizeof(ticket), 0), (ssize_t)sizeof(ticket));
        for (int i = 0; i < 2; i++) {
                struct gr_region_ticket other = ticket;

                if (i == 0)
                        other.segment++;
                else
                        other.cookie++;
                sign(&other);
                GR_CHECK_EQ(pwrite(fd, &other, sizeof(other), 0), (ssize_t)sizeof(other));
                GR_CHECK(!gr_region_member(one));
        }
        GR_CHECK_EQ(pwrite(fd, &ticket, sizeof(ticket), 0), (ssize_t)sizeof(ticket));
        close(fd);
        GR_CHECK(gr_region_member(one) && one->cookie == before);

        /* Replaced, and no descriptor to look into it with. */
        GR_CHECK_EQ(rename(path, moved), 0);
        put_file("look", "", 0);
        fail("open", 1, EMFILE);
        GR_CHECK(!gr_region_member(one));
        failure.call = NULL;
        GR_CHECK_EQ(rename(moved, path), 0);
        drop(one);
        GR_CHECK(access(path, F_OK) != 0);
}

static _Atomic uint64_t *claimed_heartbeat;
static uint64_t seen_heartbeat;

static uint64_t now_at_claim(void)
{
        seen_heartbeat = *claimed_heartbeat;
        return now_ns;
}

/* Who claims a slot takes over nothing of its last owner. */
static void test_claim(void)
{
        struct gr_region_ops looking = ops;
        struct gr_region *one = join_as(1, "claim"), *two = calloc(1, sizeof(*two));
        char name[64] = "a name of more than thirty-one characters";
        struct {
                struct gr_member member;
                uint64_t behind;
        } room = {.behind = 4711};
        struct gr_request request;
        struct gr_member member;
        struct gr_slot *slot;

        GR_CHECK_EQ(open_as(two, 2, "claim"), 0);
        for (int i = 1; i < GR_REGION_SLOTS; i++) {
                memset(&two->map->slots[i], 5, sizeof(*slot));
                two->map->slots[i].rung = 3;
                two->map->accounts[i] = UINT64_C(0x0505050505050505);
                two->map->owners[i] = i < GR_REGION_SLOTS - 1;
        }
        slot = &two->map->slots[GR_REGION_SLOTS - 1];
        looking.now_ns = now_at_claim;
        claimed_heartbeat = &slot->heartbeat_ns;
        two->ops = &looking;
        seen_heartbeat = 1;
        now_ns += 3;
        GR_CHECK_EQ(gr_region_join(two, name, 1000), 0);
        two->ops = &ops;
        GR_CHECK_EQ(two->slot, GR_REGION_SLOTS - 1);
        GR_CHECK_EQ(seen_heartbeat, 0); /* it had none until all was written */
        for (int i = 1; i < GR_REGION_SLOTS - 1; i++)
                two->map->owners[i] = 0;
        GR_CHECK(!gr_region_take(two, &request));
        GR_CHECK_EQ(gr_region_read(one, GR_REGION_SLOTS - 1, &member), 0);
        GR_CHECK_EQ(gr_region_read(one, GR_REGION_SLOTS, &member), -ENOENT);
        GR_CHECK(gr_region_read(one, GR_REGION_SLOTS - 1, &room.member) == 0 && room.behind == 4711);
        GR_CHECK_EQ(member.slot, GR_REGION_SLOTS - 1);
        GR_CHECK_EQ(member.owner, two->token);
        GR_CHECK_EQ(slot->pid, 2);
        GR_CHECK_EQ(member.identity.start_ticks, 1002);
        GR_CHECK_EQ(member.identity.pid_namespace, two->self.pid_namespace);
        GR_CHECK_EQ(member.share, 1000);
        GR_CHECK_EQ(member.reserved_bytes, 0);
        GR_CHECK_EQ(member.heartbeat_ns, now_ns);
        GR_CHECK_EQ(member.active_ns, now_ns);
        GR_CHECK_EQ(slot->name[GR_REGION_NAME_BYTES / 8 - 1] >> 56, 0);
        name[GR_REGION_NAME_BYTES - 1] = '\0';
        GR_CHECK_STR(member.name, name);
        for (int i = 0; i < GR_SHARED_FIGURES; i++)
                GR_CHECK_EQ(member.figures[i], i == GR_FIGURE_driver ? UINT64_MAX : 0);
        gr_region_request(one, GR_REGION_SLOTS - 1, &(struct gr_request){0});
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK(request.orders == 0 && request.rung == 0 && request.want_bytes == 0);
        gr_region_answer(two, &request, 0);

        /* What is in a slot is read with care: a share that may divide, names that may be shown. */
        slot->share = 0;
        GR_CHECK(gr_region_read(one, GR_REGION_SLOTS - 1, &member) == 0 && member.share == 1);
        slot->share = 1001;
        GR_CHECK(gr_region_read(one, GR_REGION_SLOTS - 1, &member) == 0 && member.share == 1);
        slot->figures[0] = UINT64_C(1) << 62;
        slot->figures[1] = (UINT64_C(1) << 62) - 1;
        memcpy(name, "a b\x1f\x7e\x7f\xc3", 8);
        memcpy((void *)slot->name, name, 8);
        GR_CHECK_EQ(gr_region_read(one, GR_REGION_SLOTS - 1, &member), 0);
        GR_CHECK_EQ(member.figures[0], 0);
        GR_CHECK_EQ(member.figures[1], (UINT64_C(1) << 62) - 1);
        GR_CHECK_STR(member.name, "a b?~??");
        drop(two);
        two = calloc(1, sizeof(*two));
        GR_CHECK_EQ(open_as(two, 2, "claim"), 0);
        GR_CHECK_EQ(gr_region_join(two, "", 1), 0);
        GR_CHECK_EQ(gr_region_read(one, (unsigned)two->slot, &member), 0);
        GR_CHECK_STR(member.name, "");
        drop(two);
        drop(one);
}

static void test_publish(void)
{
        struct gr_region *one = join_as(1, "publish"), *two = join_as(2, "publish");
        uint64_t figures[GR_SHARED_FIGURES], joined = now_ns;
        struct gr_member member;

        for (uint64_t i = 0; i < GR_SHARED_FIGURES; i++)
                figures[i] = 100 + i;
        gr_region_waiting(one, 7);
        for (int changed = 0; changed < 2; changed++) {
                now_ns += 5;
                gr_region_publish(one, figures, changed);
                GR_CHECK_EQ(gr_region_read(two, 0, &member), 0);
                GR_CHECK_EQ(member.heartbeat_ns, now_ns);
                GR_CHECK_EQ(member.active_ns, changed ? now_ns : joined);
        }
        for (uint64_t i = 0; i < GR_SHARED_FIGURES; i++)
                GR_CHECK_EQ(member.figures[i], i == GR_FIGURE_waiting ? 7 : 100 + i);
        /* What a process that is gone was waiting for, nobody waits for any more. */
        GR_CHECK(gr_region_awaited(two));
        die(one);
        gr_region_sweep(two);
        GR_CHECK(!gr_region_awaited(two));
        drop(two);
}

/* A process that is no member, or no longer, changes nothing of the region. */
static void test_no_slot(void)
{
        static struct gr_region_map before;
        struct gr_region *one = join_at(1, "none", 200), *lost = join_as(2, "none"), *dead = join_at(3, "none", 0);
        uint64_t figures[GR_SHARED_FIGURES] = {1, 2, 3};
        struct gr_request request = {.sequence = 4711};
        struct gr_region never;

        GR_CHECK_EQ(open_as(&never, 4, "none"), 0);
        gr_region_waiting(one, MIB); /* so that whoever looks has somebody to see */
        peers[3] = GR_PROCESS_GONE;
        one->map->owners[lost->slot] = identity(9).pid; /* another one's by now */
        gr_region_request(one, (unsigned)lost->slot, &(struct gr_request){.want_bytes = GIB});
        memcpy(&before, (void *)one->map, sizeof(before));
        for (int i = 0; i < 2; i++) {
                struct gr_region *none = i ? lost : &never;

                gr_region_publish(none, figures, true);
                gr_region_look_after_next(none);
                gr_region_adjust(none, (int64_t)GIB);
                GR_CHECK_EQ(gr_region_reserve(none, GIB, UINT64_MAX), -ENOTCONN);
                GR_CHECK(!gr_region_take(none, &request));
                GR_CHECK(!gr_region_member(none));
        }
        gr_region_waiting(&never, (int64_t)GIB);
        gr_region_wake_self(&never);
        gr_region_answer(&never, &request, GIB);
        GR_CHECK_EQ(gr_region_seen(&never), 0);
        gr_region_wait(&never, 0, 5);
        GR_CHECK_EQ(gr_region_ask(&never, GIB, 100, false), 0);
        gr_region_leave(&never);
        GR_CHECK_EQ(memcmp(&before, (void *)one->map, sizeof(before)), 0);
        gr_region_close(&never);
        one->map->owners[lost->slot] = 0;
        gr_region_close(lost);
        free(lost);
        die(dead);
        drop(one);
}

/* Two threads of one process charge and release its account at once: no byte is lost. */
#define CHARGES 3000000

static pthread_barrier_t together;

static void *charge(void *arg)
{
        pthread_barrier_wait(&together);
        for (int i = 0; i < CHARGES; i++)
                gr_region_adjust(arg, 4096);
        return NULL;
}

static void test_two_threads(void)
{
        struct gr_region *one = join_as(1, "threads");
        pthread_t thread;

        pthread_barrier_init(&together, NULL, 2);
        pthread_create(&thread, NULL, charge, one);
        charge(one);
        pthread_join(thread, NULL);
        GR_CHECK_EQ(gr_region_sum(one, false), (uint64_t)2 * CHARGES * 4096);
        pthread_barrier_destroy(&together);
        drop(one);
}

/* Behind the last owner lies the first account, which is no owner, whatever it holds. */
static void test_behind_owners(void)
{
        struct gr_region *one = join_as(1, "behind"), *two = join_as(2, "behind");
        struct gr_region *nine = join_as(9, "behind");
        uint64_t token = nine->token;
        char path[256];

        drop(nine);
        snprintf(path, sizeof(path), "%s/behind", dir);
        one->map->accounts[0] = token;
        peers[9] = GR_PROCESS_GONE;
        gr_region_request(two, 0, &(struct gr_request){0});
        GR_CHECK_EQ(gr_region_sweep(one), 0);
        GR_CHECK_EQ(gr_region_sum(one, true), 0);
        GR_CHECK_EQ(one->map->accounts[0], token);
        /* The first slot is looked at, too. */
        one->map->owners[0] = token;
        gr_region_waiting(two, MIB);
        gr_region_sweep(two);
        one->map->owners[0] = token;
        one->map->slots[0].heartbeat_ns = 0;
        GR_CHECK_EQ(gr_region_sweep_again(two), 1);
        GR_CHECK_EQ(one->map->accounts[0], token);
        peers[9] = GR_PROCESS_ALIVE;
        gr_region_close(one);
        free(one);
        drop(two);
        GR_CHECK(access(path, F_OK) != 0);
        peers[9] = GR_PROCESS_GONE;
}

static unsigned refusals;

/* Each time that this process waits, another one has died that still had all of the limit. */
static void die_once_more(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
        struct gr_region *full = join_at(3, "tries", 200);

        (void)word, (void)seen, (void)timeout_ns;
        refusals++;
        gr_region_adjust(full, (int64_t)GIB);
        die(full);
}

/* The tries have an end. */
static void test_tries(void)
{
        struct gr_region_ops dying = ops;
        struct gr_region *one = join_as(1, "tries");

        dying.wait = die_once_more;
        one->ops = &dying;
        die_once_more(NULL, 0, 0);
        GR_CHECK_EQ(gr_region_reserve(one, MIB, GIB), -EDQUOT);
        GR_CHECK(refusals > 2);
        one->ops = &ops;
        GR_CHECK_EQ(gr_region_sweep(one), 1);
        GR_CHECK_EQ(gr_region_sum(one, false), 0);
        drop(one);
}

static char wanted_dir[160];
static int base_lock = -1;

static void make_wanted_dir(void)
{
        GR_CHECK_EQ(mkdir(wanted_dir, 0700), 0);
        close(base_lock);
}

/* Errors other than that of a name which others have are told, and nothing is made elsewhere. */
static void test_find_dir_fails(void)
{
        static const struct {
                const char *call;
                int nth, error;
        } failures[] = {{"open", 1, EMFILE}, {"open", 2, EMFILE}, {"mkdir", 1, ENOSPC}};
        char base[80], found[GR_REGION_PATH_BYTES], again[GR_REGION_PATH_BYTES];
        int rc;

        snprintf(base, sizeof(base), "%s/fails", dir);
        snprintf(wanted_dir, sizeof(wanted_dir), "%s/gpureclaim-%lu", base, (unsigned long)geteuid());
        GR_CHECK_EQ(mkdir(base, 0700), 0);
        for (size_t i = 0; i < sizeof(failures) / sizeof(failures[0]); i++) {
                fail(failures[i].call, failures[i].nth, failures[i].error);
                GR_CHECK_EQ(gr_region_find_dir(base, true, found, sizeof(found)), -failures[i].error);
                GR_CHECK(!failure.call);
                GR_CHECK_EQ(gr_region_find_dir(base, false, found, sizeof(found)), -ENOENT);
        }

        /* Another process of this user makes it, and has the lock: it is waited for, and its folder taken. */
        base_lock = open(base, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        GR_CHECK(base_lock >= 0 && flock(base_lock, LOCK_EX) == 0);
        at_pause = make_wanted_dir;
        memset(found, 'x', sizeof(found) - 1);
        GR_CHECK_EQ(gr_region_find_dir(base, true, found, sizeof(found)), 0);
        GR_CHECK(!at_pause);
        GR_CHECK_STR(found, wanted_dir);
        GR_CHECK_EQ(rmdir(found), 0);

        /* A lock that is free is taken once. */
        locks = 0;
        pauses = 0;
        GR_CHECK_EQ(gr_region_find_dir(base, true, found, sizeof(found)), 0);
        GR_CHECK(locks <= 2 && pauses == 0);
        GR_CHECK_EQ(rmdir(wanted_dir), 0);
        GR_CHECK_EQ(rmdir(base), 0);

        memset(again, 'y', sizeof(again) - 1);
        rc = gr_region_default_dir(false, again, sizeof(again));
        memset(found, 'x', sizeof(found) - 1);
        GR_CHECK_EQ(gr_region_find_dir("/dev/shm", false, found, sizeof(found)), rc);
        if (rc == 0)
                GR_CHECK_STR(again, found);
}

#define RACERS 4
#define ROUNDS 2000

static struct gr_region *racers[RACERS];
static _Atomic uint64_t held, most, served;

static void quick_wait(_Atomic uint32_t *word, uint32_t seen, uint64_t timeout_ns)
{
        (void)word;
        (void)seen;
        usleep((useconds_t)(timeout_ns / 1000));
}

static void *race(void *arg)
{
        struct gr_region *region = arg;

        for (int i = 0; i < ROUNDS; i++) {
                uint64_t now, seen;

                if (gr_region_reserve(region, GIB, 2 * GIB) != 0)
                        continue;
                now = atomic_fetch_add(&held, GIB) + GIB;
                seen = atomic_load(&most);
                while (seen < now && !atomic_compare_exchange_weak(&most, &seen, now))
                        ;
                atomic_fetch_add(&served, 1);
                atomic_fetch_sub(&held, GIB);
                gr_region_adjust(region, -(int64_t)GIB);
        }
        return NULL;
}

static void test_race(void)
{
        static struct gr_region_ops quick_ops;
        pthread_t threads[RACERS];

        quick_ops = ops;
        quick_ops.wait = quick_wait;
        for (uint32_t i = 0; i < RACERS; i++) {
                racers[i] = join_as(i + 1, "race");
                racers[i]->ops = &quick_ops;
        }
        for (int i = 0; i < RACERS; i++)
                pthread_create(&threads[i], NULL, race, racers[i]);
        for (int i = 0; i < RACERS; i++)
                pthread_join(threads[i], NULL);
        GR_CHECK(most <= 2 * GIB);
        GR_CHECK(served > ROUNDS);
        GR_CHECK_EQ(gr_region_sum(racers[0], false), 0);
        for (int i = 0; i < RACERS; i++)
                drop(racers[i]);
}

static void publish_cached(struct gr_region *region, uint64_t cached, uint64_t active_ns)
{
        uint64_t figures[GR_SHARED_FIGURES] = {[GR_FIGURE_cached] = cached};

        gr_region_publish(region, figures, false);
        region->map->slots[region->slot].active_ns = active_ns;
}

static _Atomic uint32_t *asked[2];
static uint32_t asked_before;

static void both_are_asked(void)
{
        GR_CHECK_EQ(*asked[0] + *asked[1], asked_before + 2);
}

static struct gr_region *liar;
static uint64_t lie_bytes;

static void lie(void)
{
        struct gr_request request;

        GR_CHECK(gr_region_take(liar, &request));
        gr_region_answer(liar, &request, lie_bytes);
}

static void test_ask(void)
{
        struct gr_region *one = join_as(1, "ask"), *two = join_as(2, "ask"), *three = join_as(3, "ask");
        struct gr_request request;
        uint64_t begin;
        uint32_t seen;
        size_t heap;

        /* Who answers: the one with more cached, and only that one is woken. */
        now_ns += UINT64_C(5000000000);
        publish_cached(two, GIB, 0);
        publish_cached(three, 3 * GIB, 0);
        server = three;
        server_gives = 8 * GIB;
        GR_CHECK_EQ(gr_region_ask(one, 2 * GIB, 100000000, false), 2 * GIB);
        GR_CHECK(!gr_region_take(two, &request));

        /* Of equals the one that has been quiet for longer. */
        for (int i = 0; i < 2; i++) {
                struct gr_region *quiet = i ? two : three, *busy = i ? three : two;

                publish_cached(quiet, GIB, 100);
                publish_cached(busy, GIB, 200);
                server = quiet;
                GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), GIB);
                GR_CHECK(!gr_region_take(busy, &request));
        }
        publish_cached(two, GIB, 0);
        publish_cached(three, 3 * GIB, 0);

        /* Its share makes it the later one; and the busy come after the idle. */
        three->map->slots[three->slot].share = 4;
        server = two;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), GIB);
        GR_CHECK(!gr_region_take(three, &request));
        three->map->slots[three->slot].share = 1;
        for (int i = 0; i < 2; i++) {
                struct gr_region *idle = i ? two : three, *busy = i ? three : two;

                publish_cached(idle, GIB, 0);
                publish_cached(busy, 3 * GIB, now_ns);
                server = idle;
                GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), GIB);
                GR_CHECK(!gr_region_take(busy, &request));
        }
        three->map->slots[three->slot].share = 4;

        /* Whoever asks again and again leaves out those who say that they have nothing, and costs no time. */
        publish_cached(two, 0, 0);
        publish_cached(three, 0, 0);
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, true), 0);
        GR_CHECK_EQ(now_ns - begin, 0);
        GR_CHECK(!gr_region_take(two, &request) && !gr_region_take(three, &request));
        publish_cached(three, GIB, 0);
        server = three;
        server_gives = GIB;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, true), GIB);
        GR_CHECK(!gr_region_take(two, &request));

        /* Nothing is asked for nothing, or in no time; a byte, or a nanosecond, is something. */
        GR_CHECK_EQ(gr_region_ask(one, 0, 100000000, false), 0);
        GR_CHECK_EQ(gr_region_ask(one, GIB, 0, false), 0);
        GR_CHECK(!gr_region_take(two, &request) && !gr_region_take(three, &request));
        publish_cached(three, GIB, 0);
        server_gives = GIB;
        heap = mallinfo2().uordblks;
        GR_CHECK_EQ(gr_region_ask(one, 1, 100000000, true), 1);
        GR_CHECK_EQ(mallinfo2().uordblks, heap);
        GR_CHECK_EQ(gr_region_ask(one, GIB / 2, 1, true), GIB / 2);

        /* Who has cached memory comes first, busy as it may be; of a busy one the clock may be wrong. */
        for (int i = 0; i < 2; i++) {
                struct gr_region *first = i ? two : three, *last = i ? three : two;

                publish_cached(first, GIB, now_ns);
                publish_cached(last, 0, 0);
                server = first;
                server_gives = GIB;
                GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), GIB);
                GR_CHECK(!gr_region_take(last, &request));
                publish_cached(first, GIB, now_ns - UINT64_C(1000000000)); /* just long enough to be idle */
                publish_cached(last, 9 * GIB, now_ns + UINT64_C(1000000000));
                server_gives = GIB;
                GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), GIB);
                GR_CHECK(!gr_region_take(last, &request));
        }

        /* Where one is not enough, they are asked at once, before anybody is waited for. */
        publish_cached(two, GIB, 0);
        publish_cached(three, GIB, 0);
        asked[0] = &two->map->slots[two->slot].request;
        asked[1] = &three->map->slots[three->slot].request;
        asked_before = *asked[0] + *asked[1];
        at_wait = both_are_asked;
        server = three;
        server_gives = GIB;
        seen = gr_region_seen(one);
        GR_CHECK_EQ(gr_region_ask(one, 3 * GIB, 100000000, true), GIB);
        GR_CHECK(!at_wait);
        GR_CHECK_EQ(gr_region_seen(one), seen); /* nobody else */
        serve(two);

        /* The one in the first slot is asked, too. */
        publish_cached(one, GIB, 0);
        publish_cached(three, 0, 0);
        server = one;
        server_gives = GIB;
        GR_CHECK_EQ(gr_region_ask(two, GIB, 100000000, true), GIB);
        publish_cached(one, 0, 0);

        /* Who says that it gave more than there is has given nothing. */
        publish_cached(two, GIB, 0);
        server = NULL;
        liar = two;
        for (int i = 0; i < 2; i++) {
                lie_bytes = (UINT64_C(1) << 50) + (uint64_t)i;
                at_wait = lie;
                GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, true), i ? 0 : lie_bytes);
                GR_CHECK(!at_wait);
        }

        /* While one waits the others know; what began in a lost slot does not end below nothing. */
        GR_CHECK(!gr_region_awaited(one) && !gr_region_awaited(two));
        gr_region_waiting(one, (int64_t)GIB);
        GR_CHECK(!gr_region_awaited(one) && gr_region_awaited(two));
        GR_CHECK_EQ(one->map->slots[one->slot].figures[GR_FIGURE_waiting], GIB);
        gr_region_waiting(one, -(int64_t)GIB);
        gr_region_waiting(one, -(int64_t)GIB);
        GR_CHECK(!gr_region_awaited(two));

        /* Nobody answers: the deadline, once; after that no time at all, until the answer. */
        server = NULL;
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), 0);
        GR_CHECK(now_ns - begin > 50000000 && now_ns - begin <= 100000000);
        begin = now_ns;
        gr_region_ask(one, GIB, 100000000, false);
        gr_region_ask(one, GIB, 100000000, false);
        GR_CHECK(now_ns - begin <= 100000000);
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), 0);
        GR_CHECK_EQ(now_ns - begin, 0);
        publish_cached(three, GIB, 0);
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), 0);
        GR_CHECK_EQ(now_ns - begin, 0);
        server_gives = 2 * GIB;
        serve(two);
        serve(three);
        server = three;
        server_gives = GIB;
        publish_cached(three, GIB, 0);
        GR_CHECK(gr_region_ask(one, GIB, 100000000, false) > 0);

        /* Stopped ones are not asked. */
        now_ns++;
        publish_cached(two, 0, 0);
        publish_cached(three, 9 * GIB, 0);
        peers[2] = peers[3] = GR_PROCESS_STOPPED;
        two->map->slots[two->slot].request = two->map->slots[two->slot].answer = UINT32_C(0x80000005);
        asked_before = gr_region_seen(two) + gr_region_seen(three);
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), 0);
        GR_CHECK_EQ(now_ns - begin, 0);
        GR_CHECK_EQ(gr_region_seen(two) + gr_region_seen(three), asked_before);
        peers[2] = peers[3] = GR_PROCESS_ALIVE;
        GR_CHECK_EQ(one->map->slots[one->slot].figures[GR_FIGURE_waiting], 0);

        /* One that died keeps nobody. */
        die(two);
        GR_CHECK_EQ(gr_region_ask(one, GIB, 100000000, false), 0);
        GR_CHECK_EQ(used_slots(one), 2);
        server = NULL;
        drop(three);
        drop(one);
}

/* Whoever is at work on it is waited for, within bounds; no sign of life, or one that is none, costs the wait once. */
static void test_patience(void)
{
        const uint64_t ms = 1000000, quiet = 100 * ms;
        struct gr_region *one = join_as(1, "patience"), *two = join_as(2, "patience"), *three = join_as(3, "patience");
        struct gr_region *four;
        struct gr_request request;
        uint64_t begin = now_ns;

        /* Both are asked at once; the one that works gives, and what the silent one costs is within that time. */
        publish_cached(two, 0, 0);
        publish_cached(three, 0, 0);
        server = two;
        server_gives = GIB;
        works_until_ns = now_ns + 400 * ms;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), GIB);
        GR_CHECK(now_ns - begin >= 400 * ms && now_ns - begin < 500 * ms);
        serve(three);

        /* Without end: until the bound, and no time more before it has answered. */
        begin = now_ns;
        server_gives = GIB;
        works_until_ns = UINT64_MAX;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), 0);
        GR_CHECK_EQ(now_ns - begin, GR_REGION_ASK_NS);
        serve(three);
        die(three);
        begin = now_ns;
        gr_region_publish(two, NULL, false);
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), 0);
        GR_CHECK_EQ(now_ns - begin, 0);
        works_until_ns = 0;
        serve(two);

        /* One that works without end leaves half of the time to those after it; so do those that are silent. */
        three = join_as(3, "patience");
        publish_cached(two, 2 * GIB, 0);
        publish_cached(three, GIB, 0);
        server = two;
        prompt[0] = three;
        server_gives = GIB;
        works_until_ns = UINT64_MAX;
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, true), GIB);
        GR_CHECK_EQ(now_ns - begin, GR_REGION_ASK_NS / 2);
        works_until_ns = 0;
        serve(two);
        prompt[0] = server = NULL;
        publish_cached(two, 3 * GIB, 0);
        publish_cached(three, 2 * GIB, 0);
        four = join_as(4, "patience");
        publish_cached(four, GIB, 0);
        GR_CHECK_EQ(gr_region_ask(one, GIB, 2, true), 0);
        GR_CHECK(gr_region_take(two, &request) && gr_region_take(three, &request) && !gr_region_take(four, &request));
        for (int i = 0; i < 2; i++) {
                prompt[i] = i ? three : two;
                gr_region_answer(prompt[i], &(struct gr_request){.sequence = gr_region_seen(prompt[i])}, 0);
        }

        /* Those that answer at once, and give nothing, leave all of it to the last one. */
        server_gives = 0;
        begin = now_ns;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, true), 0);
        GR_CHECK_EQ(now_ns - begin, quiet);
        prompt[0] = prompt[1] = NULL;
        drop(four);
        drop(three);
        server = two;

        /* It dies, as far as can be seen, in the middle of the work. */
        begin = now_ns;
        works_until_ns = now_ns + 50 * ms;
        server_gives = 0;
        two->map->slots[two->slot].figures[GR_FIGURE_waiting] = 0;
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), 0);
        GR_CHECK(now_ns - begin < 2 * quiet);
        serve(two);

        /* One that waits for memory itself gets no more than the wait, whatever it says. */
        begin = now_ns;
        works_until_ns = UINT64_MAX;
        gr_region_waiting(two, MIB);
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), 0);
        GR_CHECK_EQ(now_ns - begin, quiet);
        gr_region_waiting(two, -(int64_t)MIB);
        works_until_ns = 0;
        serve(two);

        /* A heartbeat from the future is none. */
        server = NULL;
        begin = now_ns;
        two->map->slots[two->slot].heartbeat_ns = now_ns + UINT64_C(5000000000);
        GR_CHECK_EQ(gr_region_ask(one, GIB, quiet, false), 0);
        GR_CHECK_EQ(now_ns - begin, quiet);
        drop(two);
        drop(one);
}

/* Whoever waits for memory looks again and again: at other processes only now and then, and at the silent ones. */
static void test_sweep_again(void)
{
        struct gr_region *one = join_as(1, "again"), *two = join_as(2, "again"), *three = join_as(3, "again");

        gr_region_waiting(one, MIB);
        gr_region_sweep(one);
        looks = 0;
        for (int i = 0; i < 5; i++)
                GR_CHECK_EQ(gr_region_ask(one, GIB, 1, true), 0);
        GR_CHECK_EQ(gr_region_reserve(one, 2, 1), -EDQUOT);
        GR_CHECK_EQ(looks, 0);
        die(two);
        GR_CHECK_EQ(gr_region_sweep_again(one), 0);
        now_ns += UINT64_C(500000000);
        GR_CHECK_EQ(gr_region_sweep_again(one), 1);
        die(three);
        now_ns += UINT64_C(499000000);
        GR_CHECK_EQ(gr_region_sweep_again(one), 0);
        /* Silent for a second, and the last look at all less than half a second ago. */
        one->swept_ns = now_ns += UINT64_C(1000000);
        GR_CHECK_EQ(gr_region_sweep_again(one), 1);
        gr_region_waiting(one, -(int64_t)MIB);
        die(join_as(2, "again"));
        GR_CHECK_EQ(gr_region_sweep_again(one), 1);
        drop(one);
}

static void test_orders(void)
{
        struct gr_region *one = join_as(1, "orders"), *two = join_as(2, "orders");
        struct gr_request request;
        struct gr_patience patience;
        uint64_t begin;
        uint32_t sequence, seen;

        /* What has been seen is waited behind, and no longer than until something comes or one wakes itself. */
        seen = gr_region_seen(two);
        begin = now_ns;
        gr_region_wait(two, seen, 5000000);
        GR_CHECK_EQ(now_ns - begin, 5000000);
        gr_region_wake_self(two);
        GR_CHECK(woken == &two->map->slots[two->slot].request);
        GR_CHECK_EQ(gr_region_seen(two), seen + 1);
        gr_region_wait(two, seen, 5000000);
        GR_CHECK_EQ(now_ns - begin, 5000000);
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK(!request.orders && !request.want_bytes && !request.rung);
        gr_region_answer(two, &request, 0);
        GR_CHECK(woken == &two->map->slots[two->slot].answer);

        GR_CHECK(!gr_region_take(two, &request));
        sequence = gr_region_request(one, (unsigned)two->slot,
                                     &(struct gr_request){.orders = GR_ORDER_LIMIT, .new_limit = 5 * GIB});
        gr_region_request(one, (unsigned)two->slot, &(struct gr_request){.want_bytes = GIB});
        gr_region_request(one, (unsigned)two->slot, &(struct gr_request){.want_bytes = GIB, .rung = 3});
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK_EQ(request.orders, GR_ORDER_LIMIT);
        GR_CHECK_EQ(request.new_limit, 5 * GIB);
        GR_CHECK_EQ(request.want_bytes, 2 * GIB);
        GR_CHECK_EQ(request.rung, 3);
        GR_CHECK_EQ(request.new_threshold, 0);
        patience = (struct gr_patience){now_ns, 10, now_ns + 10};
        GR_CHECK(!gr_region_await(one, (unsigned)two->slot, two->token, sequence, &patience));
        gr_region_answer(two, &request, 7);
        GR_CHECK(gr_region_await(one, (unsigned)two->slot, two->token, sequence, &patience));
        GR_CHECK(!gr_region_take(two, &request));
        /* A huge wish is no overflow. */
        gr_region_request(one, (unsigned)two->slot, &(struct gr_request){.want_bytes = UINT64_MAX, .rung = UINT32_MAX});
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK(request.want_bytes <= UINT64_C(1) << 50);
        GR_CHECK_EQ(request.rung, 0);
        gr_region_answer(two, &request, 0);

        /* Each order with its own value, and none of it comes again. */
        gr_region_request(one, (unsigned)two->slot,
                          &(struct gr_request){
                                  .orders = GR_ORDER_THRESHOLD, .new_limit = 1, .new_threshold = 3 * GIB, .rung = 32});
        GR_CHECK(woken == &one->map->slots[two->slot].request);
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK_EQ(request.orders, GR_ORDER_THRESHOLD);
        GR_CHECK_EQ(request.new_threshold, 3 * GIB);
        GR_CHECK_EQ(request.new_limit, 5 * GIB);
        GR_CHECK_EQ(request.rung, 32);
        gr_region_answer(two, &request, 0);
        gr_region_request(one, (unsigned)two->slot,
                          &(struct gr_request){.orders = GR_ORDER_LIMIT, .new_limit = 6 * GIB, .new_threshold = 1});
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK_EQ(request.new_threshold, 3 * GIB);
        GR_CHECK_EQ(request.new_limit, 6 * GIB);
        gr_region_answer(two, &request, 0);
        gr_region_request(one, (unsigned)two->slot, &(struct gr_request){.rung = 33});
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK(request.orders == 0 && request.rung == 0 && request.want_bytes == 0);
        gr_region_answer(two, &request, 0);
        gr_region_wake_self(two);
        GR_CHECK(gr_region_take(two, &request));
        GR_CHECK_EQ(request.rung, 0);
        drop(two);
        drop(one);
}

static unsigned descriptors(void)
{
        unsigned count = 0;

        for (int fd = 0; fd < 256; fd++)
                count += fcntl(fd, F_GETFD) >= 0;
        return count;
}

int main(void)
{
        unsigned before = descriptors();
        char command[96];

        strcpy(dir, "/tmp/gr-region-XXXXXX");
        if (!mkdtemp(dir))
                return 1;
        test_layout();
        test_names();
        test_hostile_files();
        test_file_changes();
        test_made_at_once();
        test_not_attached();
        test_descriptor_zero();
        test_not_made();
        test_meanwhile();
        test_not_looked_at();
        test_claim();
        test_publish();
        test_no_slot();
        test_two_threads();
        test_tries();
        test_behind_owners();
        test_leave_replaced();
        test_file_limit();
        test_hostile_tickets();
        test_garbage_inside();
        test_slots();
        test_full();
        test_accounts();
        test_find_dir();
        test_find_dir_fails();
        test_lost_slot();
        test_race();
        test_ask();
        test_patience();
        test_sweep_again();
        test_orders();
        GR_CHECK_EQ(descriptors(), before); /* none was lost */
        snprintf(command, sizeof(command), "rm -rf %s", dir);
        return system(command) != 0 || GR_CHECK_RESULT();
}
