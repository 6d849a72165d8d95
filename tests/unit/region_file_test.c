/*
 * The region's file: its name and its folder, who may open it, what others put in its place or do to it meanwhile, and
 * what can fail when a region is made.
 */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "region_scripted.h"

static void test_names(void)
{
        static const uint8_t uuid[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 0xff};
        char file[GR_REGION_FILE_BYTES], group[GR_GROUP_NAME_BYTES], text[37], longest[80];
        char other[GR_REGION_FILE_BYTES + 1];
        struct {
                char group[GR_GROUP_NAME_BYTES], behind;
        } room;

        GR_CHECK_EQ(gr_region_file_name("a-b.c", uuid, file, sizeof(file)), 0);
        GR_CHECK_STR(file, "a-b.c-00010203-0405-0607-0809-0a0b0c0d0eff.v8");
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

/* The file may be cut, emptied or filled with anything at any time: nobody dies, and who finds it out meets anew. */
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
                GR_CHECK(region.map && region.segment != (int)ticket.segment);
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

/* Processes of two IPC namespaces, which no segment serves: the file has the memory itself. */
static void test_in_file(void)
{
        static const struct {
                const char *call;
                int error, rc;
        } failures[] = {{"posix_fallocate", ENOSPC, -ENOSPC},
                        {"mmap", ENODEV, -ENOMEM},
                        {"pwrite", ENOSPC, -ENOSPC},
                        {"pwrite", EIO, -EIO}};
        struct gr_region_ticket ticket = {.magic = GR_TICKET_MAGIC, .version = GR_REGION_VERSION, .ipc_namespace = 1};
        struct gr_identity self = identity(1);
        struct gr_region region, *one, *two;
        struct rlimit before, least;
        unsigned owned = 0;
        char path[256], rest[4096];
        void *map;
        int fd;

        write_ticket("apart", ticket);
        for (size_t i = 0; i < sizeof(failures) / sizeof(failures[0]); i++) {
                fail(failures[i].call, 1, failures[i].error);
                GR_CHECK_EQ(open_as(&region, 1, "apart"), failures[i].rc);
                GR_CHECK(!failure.call && !region.map);
        }
        GR_CHECK_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
        least = before;
        least.rlim_cur = GR_TICKET_OFFSET + sizeof(struct gr_region_map) - 1;
        GR_CHECK_EQ(setrlimit(RLIMIT_FSIZE, &least), 0);
        GR_CHECK_EQ(open_as(&region, 1, "apart"), -EFBIG);
        least.rlim_cur++;
        GR_CHECK_EQ(setrlimit(RLIMIT_FSIZE, &least), 0);
        /* Who only looks changes nothing, whatever has failed before. */
        GR_CHECK_EQ(gr_region_open(&region, &ops, &self, dir, "apart", false), -EXDEV);
        /* What is behind the ticket is of no region. */
        snprintf(path, sizeof(path), "%s/apart", dir);
        fd = open(path, O_WRONLY | O_CLOEXEC);
        memset(rest, 0xff, sizeof(rest));
        GR_CHECK(pwrite(fd, rest, sizeof(rest), GR_TICKET_OFFSET + offsetof(struct gr_region_map, owners)) > 0);
        close(fd);
        fail("posix_fallocate", 1, EINTR); /* a signal of the program */
        one = join_as(1, "apart");
        two = join_as(2, "apart");
        GR_CHECK_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
        GR_CHECK(one->segment == -1 && two->segment == -1 && one->map != two->map);
        for (int i = 0; i < GR_REGION_SLOTS; i++)
                owned += atomic_load(&one->map->owners[i]) != 0;
        GR_CHECK_EQ(owned, 2);
        gr_region_adjust(one, 5);
        gr_region_adjust(two, 6);
        GR_CHECK(gr_region_sum(one, false) == 11 && gr_region_sum(two, false) == 11);
        GR_CHECK(gr_region_member(one) && gr_region_member(two));
        drop(one);
        fail("mmap", 1, EAGAIN);
        GR_CHECK_EQ(gr_region_open(&region, &ops, &self, dir, "apart", false), -EAGAIN);
        GR_CHECK_EQ(gr_region_open(&region, &ops, &self, dir, "apart", false), 0);
        GR_CHECK_EQ(gr_region_sum(&region, false), 6);
        map = region.map;
        gr_region_close(&region);
        GR_CHECK(!region.map && mincore(map, 1, (unsigned char *)rest) != 0);
        drop(two);
        GR_CHECK(access(path, F_OK) != 0);
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

/* What a program prints to a standard stream that it has closed must not land in the file. */
static void test_closed_streams(void)
{
        struct gr_region *one = join_as(1, "streams");
        int kept[3], file;
        bool same = false;

        for (int closed = 0; closed < 8; closed++) {
                for (int i = 0; i < 3; i++)
                        kept[i] = fcntl(i, F_DUPFD_CLOEXEC, 3);
                for (int i = 0; i < 3; i++)
                        if (closed >> i & 1)
                                close(i);
                file = gr_region_file_open(one, &same);
                gr_region_file_close(file);
                for (int i = 0; i < 3; i++) {
                        dup2(kept[i], i);
                        close(kept[i]);
                }
                GR_CHECK(same && file > STDERR_FILENO);
        }
        drop(one);
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

        /* The first segment of a machine has the number 0. Two regions are told apart by more than their number. */
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

int main(void)
{
        region_begin();
        test_names();
        test_hostile_files();
        test_file_changes();
        test_made_at_once();
        test_not_attached();
        test_closed_streams();
        test_descriptor_zero();
        test_not_made();
        test_meanwhile();
        test_not_looked_at();
        test_leave_replaced();
        test_file_limit();
        test_hostile_tickets();
        test_in_file();
        test_find_dir();
        test_find_dir_fails();
        return region_end();
}
