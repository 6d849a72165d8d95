#include "system/run_command.h"

#include <assert.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/keep_errno.h"
#include "base/no_cancel.h"
#include "system/messages.h"
#include "system/platform.h"

#define NAME        "gpureclaim"
#define STACK_BYTES 16384
#define POLL_MS     100
#define FILES_MOST  65536 /* where the kernel is older than close_range */

#ifndef MFD_EXEC
#define MFD_EXEC 0x0010u
#endif

static char path[PATH_MAX]; /* of the command; "": not found. This and environment: constant once set up */
static char **environment;
static char *content;          /* of its file, when that was kept; NULL: it was not */
static struct stat content_of; /* what the file was then */

/* One run of the command. */
struct run {
        const char *const *arguments;
        char *ret;
        size_t bytes, length;
        uint64_t until_ns;
        void (*meanwhile)(void);
        int ends[2]; /* of the pipe for what it prints */
        int result;
};

/* The environment without LD_PRELOAD. NULL: there is no room. */
static char **copy_environment(void)
{
        size_t count = 0, kept = 0;
        char **copy;

        while (environ && environ[count])
                count++;
        copy = calloc(count + 1, sizeof(*copy));
        for (size_t i = 0; copy && i < count; i++) {
                if (strncmp(environ[i], "LD_PRELOAD=", 11) == 0)
                        continue;
                copy[kept] = strdup(environ[i]);
                if (!copy[kept++])
                        return NULL;
        }
        return copy;
}

void gr_run_command_find(void)
{
        static const char *const places[] = {"../tools/" NAME, GR_BINDIR_FROM_LIBDIR "/" NAME};
        char library[PATH_MAX];
        GR_KEEP_ERRNO;
        Dl_info info;

        if (!dladdr((void *)gr_run_command_find, &info) || !info.dli_fname || !realpath(info.dli_fname, library))
                return;
        *strrchr(library, '/') = '\0';
        environment = copy_environment();
        for (size_t i = 0; i < sizeof(places) / sizeof(places[0]) && environment && !path[0]; i++)
                if ((size_t)snprintf(path, sizeof(path), "%s/%s", library, places[i]) >= sizeof(path) ||
                    access(path, X_OK) != 0)
                        path[0] = '\0';
}

bool gr_run_command_is_there(void)
{
        return path[0] != '\0';
}

/* What is in the file as it is now, which *ret says. NULL: it cannot be read, or has changed meanwhile. */
static char *read_file(struct stat *ret)
{
        int fd = gr_message_begin(open(path, O_RDONLY | O_CLOEXEC));
        char *bytes = fd >= 0 && fstat(fd, ret) == 0 ? malloc((size_t)ret->st_size + 1) : NULL;
        ssize_t got = 1;
        off_t length = 0;

        for (; bytes && got > 0 && length <= ret->st_size; length += got > 0 ? got : 0)
                got = read(fd, bytes + length, (size_t)(ret->st_size + 1 - length));
        if (fd >= 0)
                gr_message_end(fd);
        if (bytes && (got < 0 || length != ret->st_size)) {
                free(bytes);
                bytes = NULL;
        }
        return bytes;
}

void gr_run_command_keep(void)
{
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        if (!content)
                content = read_file(&content_of);
}

/* Whether the file is no longer what it was when it was kept, or may not be run any more. */
static bool has_changed(void)
{
        struct stat now;

        return content &&
               (stat(path, &now) != 0 || now.st_dev != content_of.st_dev || now.st_ino != content_of.st_ino ||
                now.st_ctim.tv_sec != content_of.st_ctim.tv_sec || now.st_ctim.tv_nsec != content_of.st_ctim.tv_nsec);
}

/* A file in memory with the content; -1: there is none. */
static int open_content(void)
{
        int fd = memfd_create(NAME, MFD_EXEC);

        if (fd < 0) /* Linux before 6.3 has no such flag, and needs none */
                fd = memfd_create(NAME, 0);
        for (off_t done = 0; fd >= 0 && done < content_of.st_size;) {
                ssize_t wrote = write(fd, content + done, (size_t)(content_of.st_size - done));

                if (wrote <= 0)
                        return -1;
                done += wrote;
        }
        return fd;
}

static void close_all_above(int last)
{
        long most = sysconf(_SC_OPEN_MAX);

#ifdef SYS_close_range
        if (syscall(SYS_close_range, last + 1, ~0U, 0) == 0)
                return;
#endif
        for (int fd = last + 1; fd < (most < FILES_MOST ? most : FILES_MOST); fd++)
                close(fd);
}

/* The process that becomes the command. Until then it has the memory of this one, whose thread waits meanwhile. */
static int become_command(void *arg)
{
        const struct run *run = arg;
        int null = open("/dev/null", O_RDWR);

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (null < 0 || dup2(run->ends[1], STDOUT_FILENO) < 0 || dup2(null, STDIN_FILENO) < 0 ||
            dup2(null, STDERR_FILENO) < 0)
                _exit(EXIT_FAILURE);
        close_all_above(STDERR_FILENO);
        if (has_changed())
                fexecve(open_content(), (char *const *)run->arguments, environment);
        execve(path, (char *const *)run->arguments, environment);
        _exit(EXIT_FAILURE);
}

/* Reads what the command has printed. False: there is no more to come, or to be wanted. */
static bool read_more(struct run *run)
{
        ssize_t got = read(run->ends[0], run->ret + run->length, run->bytes - run->length);
        char *end;

        if (got <= 0)
                return false;
        end = memchr(run->ret + run->length, '\n', (size_t)got);
        run->length += (size_t)got;
        if (end) {
                *end = '\0';
                run->result = 0;
        }
        return !end && run->length < run->bytes;
}

/*
 * The command's parent: a process that has the memory and the descriptors of this one and ends without a signal, so no
 * wait of the program sees it. (The command itself cannot be such a child, as execve has it end with SIGCHLD.) The
 * thread that has made it waits meanwhile, so it uses what is that thread's.
 */
static int watch_command(void *arg)
{
        static char stack[STACK_BYTES] __attribute__((aligned(16)));
        static const uint64_t by_default[4]; /* a struct sigaction of the kernel */
        struct run *run = arg;
        bool more = true;
        pid_t pid;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        /*
         * Or its number might be another process's before it is killed below. By the system call, as something in this
         * memory may note what the program sets.
         */
        syscall(SYS_rt_sigaction, SIGCHLD, by_default, NULL, sizeof(uint64_t));
        pid = clone(become_command, stack + sizeof(stack), CLONE_VM | CLONE_VFORK | SIGCHLD, run);
        if (pid < 0) {
                run->result = -errno;
                _exit(EXIT_FAILURE);
        }
        gr_message_end(run->ends[1]);
        run->ends[1] = -1;
        run->result = -ENODATA;
        while (more) {
                struct pollfd pollfd = {.fd = run->ends[0], .events = POLLIN};
                int ready = poll(&pollfd, 1, POLL_MS);

                run->meanwhile();
                if (ready > 0) {
                        more = read_more(run);
                } else if (gr_platform_now_ns() >= run->until_ns) {
                        run->result = -ETIMEDOUT;
                        more = false;
                }
        }
        kill(pid, SIGKILL);
        waitpid(pid, NULL, __WALL);
        _exit(EXIT_SUCCESS);
}

int gr_run_command(const char *const *arguments, char *ret, size_t bytes, uint64_t most_ns, void (*meanwhile)(void))
{
        static char stack[STACK_BYTES] __attribute__((aligned(16)));
        struct run run = {.arguments = arguments,
                          .ret = ret,
                          .bytes = bytes,
                          .until_ns = gr_platform_now_ns() + most_ns,
                          .meanwhile = meanwhile,
                          .result = -ECHILD};
        sigset_t all, before;
        pid_t pid;
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        assert(arguments && ret && bytes > 0 && meanwhile);
        if (!path[0])
                return -ENOENT;
        if (pipe2(run.ends, O_CLOEXEC) != 0)
                return -errno;
        for (int i = 0; i < 2; i++)
                run.ends[i] = gr_message_begin(run.ends[i]);
        /* The program's handlers must not run in a process that it does not know. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        pid = run.ends[0] < 0 || run.ends[1] < 0
                      ? -1
                      : clone(watch_command, stack + sizeof(stack), CLONE_VM | CLONE_VFORK | CLONE_FILES, &run);
        if (pid < 0)
                run.result = -errno;
        else
                waitpid(pid, NULL, __WCLONE);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        for (int i = 0; i < 2; i++)
                if (run.ends[i] >= 0)
                        gr_message_end(run.ends[i]);
        return run.result;
}
