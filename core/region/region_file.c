#include "region/region_file.h"

#include <assert.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <unistd.h>

#define DIR_NAME   "gpureclaim-" /* and the number of the user */
#define LOCK_TRIES 20
/* Tries until another process has made the region: two separate ones would each grant the whole limit */
#define MAKE_TRIES    400
#define LOCK_PAUSE_US 500

_Static_assert(sizeof(struct gr_slot) == 320, "wire format");
_Static_assert(sizeof(struct gr_region_ticket) == 40, "wire format");

static bool name_ok(const char *name, size_t most)
{
        size_t length = strlen(name);

        if (length == 0 || length >= most || name[0] == '.')
                return false;
        for (; *name; name++)
                if (!isascii((unsigned char)*name) || (!isalnum((unsigned char)*name) && !strchr("_.-", *name)))
                        return false;
        return true;
}

int gr_region_file_name(const char *group, const uint8_t uuid[16], char *buf, size_t buf_bytes)
{
        char text[37];
        size_t at = 0;
        int length;

        if (!name_ok(group, GR_GROUP_NAME_BYTES))
                return -EINVAL;
        for (size_t i = 0; i < 16; i++)
                at += (size_t)snprintf(text + at, sizeof(text) - at,
                                       i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", uuid[i]);
        length = snprintf(buf, buf_bytes, "%s-%s.v%d", group, text, GR_REGION_VERSION);
        return (size_t)length < buf_bytes ? 0 : -EINVAL;
}

int gr_region_parse_file_name(const char *file, char *ret_group, char *ret_uuid)
{
        char suffix[16];
        size_t length = strlen(file), tail;

        tail = (size_t)snprintf(suffix, sizeof(suffix), ".v%d", GR_REGION_VERSION);
        if (length < tail + 38 || strcmp(file + length - tail, suffix) != 0 || file[length - tail - 37] != '-' ||
            length - tail - 37 >= GR_GROUP_NAME_BYTES)
                return -EINVAL;
        for (size_t i = 0; i < 36; i++)
                if (!strchr("0123456789abcdef-", file[length - tail - 36 + i]))
                        return -EINVAL;
        memcpy(ret_group, file, length - tail - 37);
        ret_group[length - tail - 37] = '\0';
        memcpy(ret_uuid, file + length - tail - 36, 36);
        ret_uuid[36] = '\0';
        return name_ok(ret_group, GR_GROUP_NAME_BYTES) ? 0 : -EINVAL;
}

/* Owned by this user and closed to all others. */
static bool private_to(uid_t user, const struct stat *status)
{
        return status->st_uid == user && (status->st_mode & 077) == 0;
}

static int open_dir(const char *dir, bool create, uid_t user)
{
        struct stat status;
        int fd;

        if (create && mkdir(dir, 0700) != 0 && errno != EEXIST)
                return -errno;
        fd = open(dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0)
                return errno == ELOOP || errno == ENOTDIR ? -EPERM : -errno;
        if (fstat(fd, &status) != 0 || !private_to(user, &status)) {
                close(fd);
                return -EPERM;
        }
        return fd;
}

/* Finds a user's folder where another one has taken the usual name; of several the first by name. 0 or -errno. */
static int find_beside(const char *base, uid_t user, const char *name, char *buf, size_t buf_bytes)
{
        struct dirent *entry;
        char found[sizeof(entry->d_name)] = "";
        struct stat status;
        DIR *list;

        list = opendir(base);
        if (!list)
                return -errno;
        while ((entry = readdir(list)))
                if (strncmp(entry->d_name, name, strlen(name)) == 0 && entry->d_name[strlen(name)] == '-' &&
                    (!found[0] || strcmp(entry->d_name, found) < 0) &&
                    fstatat(dirfd(list), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(status.st_mode) &&
                    private_to(user, &status))
                        strcpy(found, entry->d_name);
        closedir(list);
        if (!found[0])
                return -ENOENT;
        snprintf(buf, buf_bytes, "%s/%s", base, found);
        return 0;
}

/* Finds a user's folder of this name. 0; -ENOENT: there is none; or another -errno. */
static int find_dir(const char *base, uid_t user, const char *name, char *buf, size_t buf_bytes)
{
        int fd;

        snprintf(buf, buf_bytes, "%s/%s", base, name);
        fd = open_dir(buf, false, user);
        if (fd >= 0)
                close(fd);
        else if (fd == -EPERM || fd == -EACCES || fd == -ENOENT)
                return find_beside(base, user, name, buf, buf_bytes);
        return fd < 0 ? fd : 0;
}

static int make_dir(const char *base, const char *name, char *buf, size_t buf_bytes)
{
        snprintf(buf, buf_bytes, "%s/%s", base, name);
        if (mkdir(buf, 0700) == 0)
                return 0;
        if (errno != EEXIST)
                return -errno;
        snprintf(buf, buf_bytes, "%s/%s-XXXXXX", base, name);
        return mkdtemp(buf) ? 0 : -errno;
}

int gr_region_find_dir_of(const char *base, uid_t user, char *buf, size_t buf_bytes)
{
        char name[32];

        snprintf(name, sizeof(name), DIR_NAME "%lu", (unsigned long)user);
        if (strlen(base) + 1 + NAME_MAX >= buf_bytes)
                return -ENAMETOOLONG;
        return find_dir(base, user, name, buf, buf_bytes);
}

size_t gr_region_users(const char *base, uid_t *ret_users, size_t most)
{
        struct dirent *entry;
        struct stat status;
        size_t count = 0, i;
        DIR *list;

        list = opendir(base);
        while (list && count < most && (entry = readdir(list))) {
                if (strncmp(entry->d_name, DIR_NAME, strlen(DIR_NAME)) != 0 ||
                    fstatat(dirfd(list), entry->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0 ||
                    strtoul(entry->d_name + strlen(DIR_NAME), NULL, 10) != status.st_uid || status.st_uid == geteuid())
                        continue;
                for (i = 0; i < count && ret_users[i] != status.st_uid; i++)
                        ;
                ret_users[i] = status.st_uid;
                count += i == count;
        }
        if (list)
                closedir(list);
        return count;
}

int gr_region_find_dir(const char *base, bool create, char *buf, size_t buf_bytes)
{
        char name[32];
        int rc, fd;

        rc = gr_region_find_dir_of(base, geteuid(), buf, buf_bytes);
        if (rc != -ENOENT || !create)
                return rc;
        /*
         * If two processes start together, only one makes the folder. Any user can hold this lock, so after some tries
         * this goes on without it.
         */
        fd = open(base, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0)
                return -errno;
        for (int i = 0; i < LOCK_TRIES && !gr_region_file_lock(fd, LOCK_EX); i++)
                usleep(LOCK_PAUSE_US);
        rc = gr_region_find_dir_of(base, geteuid(), buf, buf_bytes);
        if (rc == -ENOENT) {
                snprintf(name, sizeof(name), DIR_NAME "%lu", (unsigned long)geteuid());
                rc = make_dir(base, name, buf, buf_bytes);
        }
        gr_region_file_close(fd);
        return rc;
}

int gr_region_default_dir(bool create, char *buf, size_t buf_bytes)
{
        return gr_region_find_dir("/dev/shm", create, buf, buf_bytes);
}

/*
 * As openat, but not in place of a standard stream that the program has closed, as its output would go into the file.
 * Meanwhile descriptors of the folder, to which nothing can be written, take these places; dir_fd may be the first.
 */
static int open_off_streams(int dir_fd, const char *file, int flags)
{
        int held[STDERR_FILENO + 1], count = 0, fd, error;

        while (dir_fd <= STDERR_FILENO && count <= STDERR_FILENO &&
               (held[count] = fcntl(dir_fd, F_DUPFD_CLOEXEC, 0)) >= 0)
                if (held[count++] > STDERR_FILENO)
                        break;
        fd = openat(dir_fd, file, flags, 0600);
        error = errno;
        while (count > 0)
                close(held[--count]);
        errno = error;
        return fd;
}

static int open_file(int dir_fd, const char *file, bool create, uid_t user, struct stat *ret_status)
{
        int fd = open_off_streams(dir_fd, file,
                                  O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | (create ? O_CREAT : 0));

        if (fd < 0)
                return errno == ELOOP || errno == EISDIR ? -EPERM : -errno;
        if (fstat(fd, ret_status) != 0 || !S_ISREG(ret_status->st_mode) || ret_status->st_nlink > 1 ||
            !private_to(user, ret_status)) {
                close(fd);
                return -EPERM;
        }
        return fd;
}

/* The tries are limited, as the holder may be a stopped process. */
bool gr_region_file_lock(int fd, int kind)
{
        assert(fd >= 0 && (kind == LOCK_SH || kind == LOCK_EX));
        for (int i = 0; i < LOCK_TRIES; i++) {
                if (flock(fd, kind | LOCK_NB) == 0)
                        return true;
                if (kind == LOCK_EX || (errno != EWOULDBLOCK && errno != EINTR))
                        return false;
                usleep(LOCK_PAUSE_US);
        }
        return false;
}

void gr_region_file_close(int fd)
{
        assert(fd >= 0);
        flock(fd, LOCK_UN);
        close(fd);
}

static void set_up_map(struct gr_region_map *map, uint64_t cookie)
{
        atomic_store(&map->version, GR_REGION_VERSION);
        atomic_store(&map->slot_count, GR_REGION_SLOTS);
        atomic_store(&map->slot_bytes, sizeof(struct gr_slot));
        atomic_store(&map->size_bytes, sizeof(struct gr_region_map));
        atomic_store(&map->cookie, cookie);
        atomic_store(&map->magic, GR_REGION_MAGIC);
}

static bool layout_ok(struct gr_region_map *map)
{
        return atomic_load(&map->magic) == GR_REGION_MAGIC && atomic_load(&map->version) == GR_REGION_VERSION &&
               atomic_load(&map->slot_count) == GR_REGION_SLOTS &&
               atomic_load(&map->slot_bytes) == sizeof(struct gr_slot) &&
               atomic_load(&map->size_bytes) == sizeof(struct gr_region_map);
}

static uint64_t ipc_namespace(void)
{
        struct stat status;

        return stat("/proc/self/ns/ipc", &status) == 0 ? status.st_ino : 0;
}

static uint64_t check_of(const struct gr_region_ticket *ticket)
{
        const unsigned char *bytes = (const unsigned char *)ticket;
        uint64_t hash = UINT64_C(0xcbf29ce484222325);

        for (size_t i = 0; i < offsetof(struct gr_region_ticket, check); i++)
                hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
        return hash;
}

/* Reads the file. -ENOENT: it is empty; -EPROTO: it holds something else; -EIO: it cannot be read. */
static int read_ticket(int fd, struct gr_region_ticket *ret)
{
        struct gr_region_ticket ticket;
        ssize_t length = pread(fd, &ticket, sizeof(ticket), 0);

        if (length < 0)
                return -EIO;
        if (length == 0)
                return -ENOENT;
        if (length != sizeof(ticket) || ticket.magic != GR_TICKET_MAGIC || ticket.check != check_of(&ticket) ||
            ticket.version != GR_REGION_VERSION)
                return -EPROTO;
        *ret = ticket;
        return 0;
}

/*
 * A private copy of what lies in a file at this offset, or MAP_FAILED. By a call of the system, which fails where an
 * access would end the process: the file may be cut short at any time.
 */
static void *copy_memory(int fd, off_t offset)
{
        struct gr_region_map *copy =
                mmap(NULL, sizeof(*copy), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

        if (copy == MAP_FAILED || (fd >= 0 && pread(fd, copy, sizeof(*copy), offset) == (ssize_t)sizeof(*copy)))
                return copy;
        munmap(copy, sizeof(*copy));
        errno = ENOENT;
        return MAP_FAILED;
}

/* The same of an attached segment, which may have no memory behind its addresses. Detaches it. */
static void *copy_segment(const struct gr_region_map *map)
{
        int own_memory = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
        void *copy = copy_memory(own_memory, (off_t)(uintptr_t)map);

        if (own_memory >= 0)
                close(own_memory);
        shmdt(map);
        return copy;
}

static void *map_file(int fd)
{
        return mmap(NULL, sizeof(struct gr_region_map), PROT_READ | PROT_WRITE, MAP_SHARED, fd, GR_TICKET_OFFSET);
}

void gr_region_file_detach(struct gr_region *region)
{
        assert(region->map);
        munmap(region->map, sizeof(*region->map)); /* detaches a segment, too */
        region->map = NULL;
}

/* Checked before attaching: the number may have been given to another segment, of any user. */
static bool segment_ok(int segment, uid_t user)
{
        struct shmid_ds status;

        return shmctl(segment, IPC_STAT, &status) == 0 && status.shm_segsz == sizeof(struct gr_region_map) &&
               status.shm_perm.uid == user && status.shm_perm.cuid == user && (status.shm_perm.mode & 0777) == 0600;
}

/* -ENOENT: the segment has gone with its last process, or the file is too short for the memory. */
static int attach_segment(struct gr_region *region, int fd, const struct gr_region_ticket *ticket)
{
        int segment = (int)ticket->segment;
        struct gr_region_map *map;
        struct stat status;

        assert(!region->map); /* a second one would never be detached */
        if (ticket->segment == GR_TICKET_IN_FILE) {
                if (fstat(fd, &status) != 0 || status.st_size < (off_t)(GR_TICKET_OFFSET + sizeof(*map)))
                        return -ENOENT;
                map = region->is_copy ? copy_memory(fd, GR_TICKET_OFFSET) : map_file(fd);
                if (map == MAP_FAILED)
                        return -errno;
        } else {
                if (ticket->ipc_namespace != ipc_namespace())
                        return -EXDEV;
                if (!segment_ok(segment, region->user))
                        return -ENOENT;
                map = shmat(segment, NULL, region->is_copy ? SHM_RDONLY : 0);
                if (map != (void *)-1 && region->is_copy)
                        map = copy_segment(map);
                if (map == (void *)-1)
                        return errno == EINVAL || errno == EIDRM || errno == EACCES ? -ENOENT : -errno;
        }
        if (atomic_load(&map->cookie) != ticket->cookie || !layout_ok(map)) {
                int rc = atomic_load(&map->magic) == GR_REGION_MAGIC && atomic_load(&map->cookie) == ticket->cookie
                                 ? -EPROTO
                                 : -ENOENT;

                munmap(map, sizeof(*map));
                return rc;
        }
        region->map = map;
        region->segment = segment;
        region->cookie = ticket->cookie;
        return 0;
}

/* Makes the memory and writes the file, whose lock is held. */
static int make_segment(struct gr_region *region, int fd, bool in_file)
{
        struct gr_region_ticket ticket = {.magic = GR_TICKET_MAGIC, .version = GR_REGION_VERSION};
        struct gr_region_map *map;
        struct rlimit most;
        int id = (int)GR_TICKET_IN_FILE, rc;

        assert(!region->map);
        /* A write beyond the process's limit on file sizes would raise SIGXFSZ. */
        if (getrlimit(RLIMIT_FSIZE, &most) == 0 &&
            most.rlim_cur < (in_file ? GR_TICKET_OFFSET + sizeof(*map) : sizeof(ticket)))
                return -EFBIG;
        if (in_file) {
                /* All of it at once: where the file system is full later on, a process that reads it must not die. */
                do
                        rc = posix_fallocate(fd, 0, GR_TICKET_OFFSET + sizeof(*map));
                while (rc == EINTR); /* tmpfs stops at a signal of the program */
                if (rc)
                        return -rc;
                map = map_file(fd);
        } else {
                id = shmget(IPC_PRIVATE, sizeof(*map), IPC_CREAT | 0600);
                if (id < 0)
                        return -errno;
                map = shmat(id, NULL, 0);
                shmctl(id, IPC_RMID, NULL); /* removed with its last process; until then Linux lets others attach */
        }
        if (map == MAP_FAILED)
                return -ENOMEM;
        if (in_file)
                memset(map, 0, sizeof(*map)); /* of an earlier region */
        ticket.segment = (uint32_t)id;
        ticket.ipc_namespace = ipc_namespace();
        ticket.cookie = region->ops->now_ns() ^ region->token << 20 ^ (uint64_t)id << 40;
        ticket.check = check_of(&ticket);
        set_up_map(map, ticket.cookie);
        if (pwrite(fd, &ticket, sizeof(ticket), 0) != sizeof(ticket)) {
                rc = errno == ENOSPC || errno == EDQUOT ? -ENOSPC : -EIO;
                if (!in_file && ftruncate(fd, 0) != 0)
                        rc = -EIO;
                munmap(map, sizeof(*map));
                return rc;
        }
        region->map = map;
        region->segment = id;
        region->cookie = ticket.cookie;
        return 0;
}

int gr_region_file_attach(struct gr_region *region, bool create)
{
        struct gr_region_ticket ticket;
        struct stat status;
        int dir_fd, fd, rc;

        assert(!region->map && region->ops);
        dir_fd = open_dir(region->dir, create, region->user);
        if (dir_fd < 0)
                return dir_fd;
        fd = open_file(dir_fd, region->file, create, region->user, &status);
        close(dir_fd);
        if (fd < 0)
                return fd;
        region->device = status.st_dev;
        region->inode = status.st_ino;
        rc = read_ticket(fd, &ticket);
        if (rc == 0)
                rc = attach_segment(region, fd, &ticket);
        for (int i = 0; create && (rc == -ENOENT || rc == -EXDEV) && i < MAKE_TRIES; i++) {
                /* One process makes it while the others wait; the tries are limited, as that process may be stopped. */
                if (gr_region_file_lock(fd, LOCK_EX)) {
                        rc = read_ticket(fd, &ticket);
                        if (rc == 0)
                                rc = attach_segment(region, fd, &ticket);
                        if (rc == -ENOENT || rc == -EXDEV)
                                rc = make_segment(region, fd, rc == -EXDEV);
                        break;
                }
                if (errno != EWOULDBLOCK && errno != EINTR)
                        break;
                usleep(LOCK_PAUSE_US);
                rc = read_ticket(fd, &ticket);
                if (rc == 0)
                        rc = attach_segment(region, fd, &ticket);
        }
        gr_region_file_close(fd);
        return rc;
}

int gr_region_file_dir(struct gr_region *region)
{
        return open_dir(region->dir, false, region->user);
}

int gr_region_file_open(struct gr_region *region, bool *ret_same)
{
        struct gr_region_ticket ticket;
        struct stat status;
        int dir_fd = open_dir(region->dir, false, region->user), fd, rc;

        if (dir_fd < 0)
                return -1;
        fd = open_file(dir_fd, region->file, false, region->user, &status);
        close(dir_fd);
        if (fd < 0)
                return -1;
        rc = read_ticket(fd, &ticket);
        *ret_same =
                status.st_dev == region->device && status.st_ino == region->inode &&
                (rc == -EIO || (rc == 0 && (int)ticket.segment == region->segment && ticket.cookie == region->cookie));
        return fd;
}

bool gr_region_file_same(struct gr_region *region)
{
        char path[GR_REGION_PATH_BYTES + GR_REGION_FILE_BYTES];
        struct stat status;
        bool same;
        int fd;

        snprintf(path, sizeof(path), "%s/%s", region->dir, region->file);
        if (lstat(path, &status) != 0)
                return errno != ENOENT; /* other errors do not mean that the file has changed */
        if (status.st_dev != region->device || status.st_ino != region->inode)
                return false;
        fd = gr_region_file_open(region, &same);
        if (fd < 0)
                return true; /* for example out of descriptors: to join again without need would take a second slot */
        close(fd);
        return same;
}
