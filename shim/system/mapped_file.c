#include "system/mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statfs.h>
#include <time.h>
#include <unistd.h>

#include "system/environment.h"
#include "system/messages.h"
#include "system/platform.h"

#define FILE_TIME_NS  10000000 /* a file's time may be so much too early */
#define NS_PER_SECOND INT64_C(1000000000)

static int64_t clock_ns(clockid_t clock)
{
        struct timespec now;

        clock_gettime(clock, &now);
        return now.tv_sec * NS_PER_SECOND + now.tv_nsec;
}

/* Whether the file was written since the process began. exec keeps that time, as it keeps the process's id. */
static bool is_since_begin(const struct stat *file)
{
        int64_t written_ns = file->st_mtim.tv_sec * NS_PER_SECOND + file->st_mtim.tv_nsec + FILE_TIME_NS;
        int64_t ago_ns = clock_ns(CLOCK_REALTIME) - written_ns;
        struct gr_identity self;

        return gr_platform_identity(&self) == 0 &&
               (int64_t)self.start_ticks * (NS_PER_SECOND / sysconf(_SC_CLK_TCK)) <= clock_ns(CLOCK_BOOTTIME) - ago_ns;
}

/* Chooses the name. 0, -ENAMETOOLONG or -EEXIST. */
static int choose_path(struct gr_path *ret, const char *pattern, bool keep)
{
        struct gr_path last = {""};
        struct stat old;
        int rc;

        for (unsigned image = 1;; image++) {
                rc = gr_options_expand_path(pattern, getpid(), image, ret->text, sizeof(ret->text));
                if (rc)
                        return rc;
                gr_environment_make_absolute(ret);
                if (lstat(ret->text, &old) != 0)
                        return 0;
                if (!S_ISREG(old.st_mode))
                        return -EEXIST;
                if (!keep || strcmp(ret->text, last.text) == 0 || !is_since_begin(&old))
                        return 0;
                last = *ret;
        }
}

int gr_mapped_file_create(struct gr_mapped_file *ret, const char *pattern, bool keep, mode_t mode)
{
        int rc = choose_path(&ret->path, pattern, keep), fd;

        if (rc)
                return rc;
        if (unlink(ret->path.text) != 0 && errno != ENOENT)
                return -errno;
        fd = gr_message_begin(open(ret->path.text, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode));
        if (fd < 0)
                return -errno;
        if (fstat(fd, &ret->made) == 0)
                return fd;
        rc = -errno;
        unlink(ret->path.text);
        gr_message_end(fd);
        return rc;
}

int gr_mapped_file_open(const struct gr_mapped_file *file)
{
        struct stat now;
        /* For reading as well: where the file system cannot reserve room, posix_fallocate reads what is there. */
        int fd = gr_message_begin(open(file->path.text, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));

        if (fd < 0)
                return -errno;
        if (fstat(fd, &now) == 0 && now.st_dev == file->made.st_dev && now.st_ino == file->made.st_ino)
                return fd;
        gr_message_end(fd);
        return -ESTALE;
}

int gr_mapped_file_reserve(int fd, size_t at, size_t bytes)
{
        struct rlimit most;
        int rc;

        if (getrlimit(RLIMIT_FSIZE, &most) == 0 && most.rlim_cur < at + bytes)
                return -EFBIG;
        do
                rc = posix_fallocate(fd, (off_t)at, (off_t)bytes);
        while (rc == EINTR);
        return -rc;
}

int gr_mapped_file_on_disk(struct gr_path *folder)
{
        struct statfs system;
        struct stat file;

        gr_environment_make_absolute(folder);
        if (stat(folder->text, &file) != 0 || access(folder->text, W_OK | X_OK) != 0 ||
            statfs(folder->text, &system) != 0)
                return -errno;
        if (!S_ISDIR(file.st_mode))
                return -ENOTDIR;
        return system.f_type != TMPFS_MAGIC && system.f_type != RAMFS_MAGIC;
}

/* A new file in folder that has no name. */
static int open_nameless(const struct gr_path *folder)
{
        static const char pattern[] = "/gpureclaim-XXXXXX";
        char path[sizeof(folder->text) + sizeof(pattern)];
        int fd = open(folder->text, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);

        if (fd >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT))
                return fd;
        stpcpy(stpcpy(path, folder->text), pattern); /* the file system knows no files without a name */
        fd = mkostemp(path, O_CLOEXEC);
        if (fd >= 0)
                unlink(path);
        return fd;
}

void *gr_mapped_file_memory(const struct gr_path *folder, size_t bytes)
{
        int fd = gr_message_begin(open_nameless(folder)), rc;
        void *memory = MAP_FAILED;

        if (fd < 0)
                return NULL;
        rc = -gr_mapped_file_reserve(fd, 0, bytes);
        if (rc == 0)
                memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        rc = rc == 0 && memory == MAP_FAILED ? errno : rc;
        gr_message_end(fd);
        if (rc) {
                errno = rc;
                return NULL;
        }
        madvise(memory, bytes, MADV_DONTFORK);
        return memory;
}

void gr_mapped_file_command(char *ret, size_t bytes)
{
        int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
        ssize_t ignored;

        memset(ret, 0, bytes);
        if (fd < 0)
                return;
        ignored = read(fd, ret, bytes - 1);
        (void)ignored;
        close(fd);
}
