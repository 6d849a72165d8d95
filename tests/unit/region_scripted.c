#include "region_scripted.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

char dir[64];
uint64_t now_ns = 1000000000;
enum gr_process_state peers[64];
_Atomic unsigned looks;

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

struct region_failure failure, next_failure;

static bool fails(const char *call)
{
        if (!failure.call || strcmp(failure.call, call) != 0 || --failure.nth > 0)
                return false;
        errno = failure.error;
        failure = next_failure;
        next_failure.call = NULL;
        return true;
}

void fail(const char *call, int nth, int error)
{
        failure.call = call;
        failure.nth = nth;
        failure.error = error;
}

void (*at_lock)(void), (*at_pause)(void), (*at_wait)(void);

static void meanwhile(void (**what)(void))
{
        void (*act)(void) = *what;

        if (!act)
                return; /* nothing is written: several threads may come here at a time */
        *what = NULL;
        act();
}

bool file_is_zero;

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

void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
        return fails("mmap") ? MAP_FAILED : (void *)syscall(SYS_mmap, at, bytes, protection, flags, fd, offset);
}

int posix_fallocate(int fd, off_t at, off_t bytes)
{
        return fails("posix_fallocate") || syscall(SYS_fallocate, fd, 0, at, bytes) ? errno : 0;
}

int ftruncate(int fd, off_t bytes)
{
        return fails("ftruncate") ? -1 : (int)syscall(SYS_ftruncate, fd, bytes);
}

_Atomic unsigned pauses;

int usleep(useconds_t us)
{
        struct timespec time = {.tv_sec = us / 1000000, .tv_nsec = (long)(us % 1000000) * 1000};

        pauses++;
        meanwhile(&at_pause);
        return nanosleep(&time, NULL);
}

bool first_segment;
int segment_zero = -1;

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

int lock_error;
unsigned locks, shared_locks;

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

int attach_error;

void *shmat(int id, const void *at, int how)
{
        if (!attach_error)
                return (void *)syscall(SYS_shmat, id == 0 && segment_zero >= 0 ? segment_zero : id, at, how);
        errno = attach_error;
        return (void *)-1;
}

struct gr_region *server, *prompt[2];
uint64_t server_gives, sleeper_gives, works_until_ns;
uint32_t sleepers[8];
unsigned sleeper_count;

static void answer(struct gr_region *region)
{
        struct gr_request request;
        uint64_t given;

        if (!region || !gr_region_take(region, &request))
                return;
        given = request.want_bytes < server_gives ? request.want_bytes : server_gives;
        server_gives -= given;
        if (request.orders & GR_ORDER_SLEEP_OFFER) {
                sleepers[sleeper_count++ % 8] = region->self.pid;
                given += sleeper_gives;
        }
        gr_region_answer(region, &request, given);
}

void serve(struct gr_region *region)
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

_Atomic uint32_t *woken;

static void fake_wake(_Atomic uint32_t *word)
{
        woken = word;
}

const struct gr_region_ops ops = {fake_now, fake_peer, fake_wait, fake_wake};

struct gr_identity identity(uint32_t pid)
{
        return (struct gr_identity){.pid = pid, .start_ticks = 1000 + pid, .pid_namespace = 4026531836};
}

int open_as(struct gr_region *region, uint32_t pid, const char *file)
{
        struct gr_identity self = identity(pid);
        int rc;

        memset(region, 0xa5, sizeof(*region)); /* whatever was there before */
        rc = gr_region_open(region, &ops, &self, dir, file, true);
        GR_CHECK_EQ(region->slot, -1);
        return rc;
}

struct gr_region *join_at(uint32_t pid, const char *file, int slot)
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

struct gr_region *join_as(uint32_t pid, const char *file)
{
        int slot = pid == 1 ? 0 : pid == 2 ? GR_REGION_SLOTS - 1 : -1;
        struct gr_region look;

        GR_CHECK_EQ(open_as(&look, pid, file), 0);
        if (slot >= 0 && look.map->owners[slot] != 0)
                slot = -1;
        gr_region_close(&look);
        return join_at(pid, file, slot);
}

void drop(struct gr_region *region)
{
        gr_region_leave(region);
        GR_CHECK_EQ(region->slot, -1);
        gr_region_close(region);
        GR_CHECK(region->slot == -1 && !region->map);
        free(region);
}

void die(struct gr_region *region)
{
        peers[region->self.pid] = GR_PROCESS_GONE;
        gr_region_close(region);
        free(region);
}

unsigned used_slots(struct gr_region *region)
{
        unsigned count = 0;

        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                count += region->map->owners[i] != 0;
        return count;
}

static unsigned before; /* descriptors, when the program began */

static unsigned descriptors(void)
{
        unsigned count = 0;

        for (int fd = 0; fd < 256; fd++)
                count += fcntl(fd, F_GETFD) >= 0;
        return count;
}

void region_begin(void)
{
        before = descriptors();
        strcpy(dir, "/tmp/gr-region-XXXXXX");
        if (!mkdtemp(dir))
                exit(1);
}

int region_end(void)
{
        char command[96];

        GR_CHECK_EQ(descriptors(), before); /* none was lost */
        snprintf(command, sizeof(command), "rm -rf %s", dir);
        return system(command) != 0 || GR_CHECK_RESULT();
}

void put_file(const char *name, const void *bytes, size_t length)
{
        char path[256];
        int fd;

        snprintf(path, sizeof(path), "%s/%s", dir, name);
        unlink(path);
        fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        GR_CHECK(fd >= 0 && write(fd, bytes, length) == (ssize_t)length);
        close(fd);
}

void sign(struct gr_region_ticket *ticket)
{
        const unsigned char *bytes = (const unsigned char *)ticket;

        ticket->check = UINT64_C(0xcbf29ce484222325);
        for (size_t i = 0; i < offsetof(struct gr_region_ticket, check); i++)
                ticket->check = (ticket->check ^ bytes[i]) * UINT64_C(0x100000001b3);
}

void write_ticket(const char *name, struct gr_region_ticket ticket)
{
        sign(&ticket);
        put_file(name, &ticket, sizeof(ticket));
}
