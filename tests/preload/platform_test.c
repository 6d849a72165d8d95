/* What shim/system/platform.c says of this process and of others. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "system/platform.h"

static void fail(const char *what, long long found)
{
        fprintf(stderr, "platform: %s (%lld)\n", what, found);
        exit(1);
}

/* A process without standard input is known as well: the file that says so gets its number. */
static void identity_without_input(void)
{
        struct gr_identity self;
        int input = dup(STDIN_FILENO);

        close(STDIN_FILENO);
        errno = EIO;
        if (gr_platform_identity(&self) != 0 || self.pid != (uint32_t)getpid() || self.start_ticks == 0)
                fail("no identity without standard input", 0);
        if (fcntl(STDIN_FILENO, F_GETFD) >= 0)
                fail("a file is left open", STDIN_FILENO);
        if (input >= 0)
                dup2(input, STDIN_FILENO);
        close(input);
}

/* A process is known by when it started, to the tick, and as stopped while it is. */
static void peer_stopped(void)
{
        struct gr_identity self;
        uint64_t start = 0;
        char line[1024] = "", *field;
        enum gr_process_state peer;
        FILE *file = fopen("/proc/self/stat", "re");
        pid_t child = fork();

        if (child == 0) {
                raise(SIGSTOP);
                _exit(0);
        }
        if (child < 0 || waitpid(child, NULL, WUNTRACED) != child)
                fail("no child", errno);
        peer = gr_platform_process_state((uint32_t)child, &start);
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        if (peer != GR_PROCESS_STOPPED)
                fail("one that was stopped is not known as such", peer);
        /* "PID (NAME) STATE ...": the start is the 20th field, the state being the first. */
        field = file && fgets(line, sizeof(line), file) ? strrchr(line, ')') : NULL;
        for (int i = 0; field && i < 20; i++)
                field = strchr(field + 1, ' ');
        if (!field || gr_platform_identity(&self) != 0 || self.start_ticks != strtoull(field + 1, NULL, 10))
                fail("not the time at which this process started", (long long)self.start_ticks);
        if (file)
                fclose(file);
}

/* Where no file can be opened nothing is said of others but that they are gone, which the system knows by itself. */
static void peers_without_files(void)
{
        struct rlimit before = {0}, none;
        struct gr_identity self;
        uint64_t start = 4711;
        pid_t child = fork();

        if (child == 0)
                _exit(0);
        if (child < 0 || waitpid(child, NULL, 0) != child || getrlimit(RLIMIT_NOFILE, &before))
                fail("no child", errno);
        none = before;
        none.rlim_cur = 0;
        if (gr_platform_process_state((uint32_t)getpid(), &start) != GR_PROCESS_ALIVE || start == 4711)
                fail("this process is not known", (long long)start);
        start = 4711;
        if (setrlimit(RLIMIT_NOFILE, &none))
                fail("files cannot be forbidden", errno);
        if (gr_platform_process_state((uint32_t)getpid(), &start) != GR_PROCESS_UNKNOWN || start != 4711)
                fail("without files this process is known", (long long)start);
        if (gr_platform_process_state((uint32_t)child, &start) != GR_PROCESS_GONE ||
            gr_platform_process_state(0, &start) != GR_PROCESS_GONE ||
            gr_platform_process_state(UINT32_MAX, &start) != GR_PROCESS_GONE)
                fail("one that has ended is not gone", child);
        if (gr_platform_identity(&self) == 0)
                fail("without files there is an identity", self.pid);
        setrlimit(RLIMIT_NOFILE, &before);
}

int main(void)
{
        identity_without_input();
        peer_stopped();
        peers_without_files();
        return 0;
}
