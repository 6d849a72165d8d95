#include "system/host_memory.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/arith.h"
#include "base/keep_errno.h"
#include "base/no_cancel.h"

#define LOOK_BYTES (UINT64_C(64) << 20) /* a look takes less than a hundredth of the time in which so much is copied */

enum { TEXT_BYTES = 3072 }; /* the files have less, but for lines at the end that are not looked at */

/* Where a version of control groups has its files, and what they are called. */
static const struct version {
        const char *controller; /* in /proc/self/cgroup */
        const char *folder, *limit, *throttle, *used, *idle_files;
} versions[] = {
        {"", "/sys/fs/cgroup", "memory.max", "memory.high", "memory.current", "\ninactive_file "},
        {"memory", "/sys/fs/cgroup/memory", "memory.limit_in_bytes", NULL, "memory.usage_in_bytes",
         "\ntotal_inactive_file "},
};

static _Atomic uint64_t spare_bytes;  /* what has to stay */
static _Atomic uint64_t unseen_bytes; /* taken since the last look */

static bool read_text(const char *path, char text[TEXT_BYTES])
{
        size_t length = 0;
        ssize_t got = 0;
        int fd = open(path, O_RDONLY | O_CLOEXEC);

        if (fd < 0)
                return false;
        while (length < TEXT_BYTES - 1 && (got = read(fd, text + length, TEXT_BYTES - 1 - length)) > 0)
                length += (size_t)got;
        close(fd);
        text[length] = '\0';
        return length > 0;
}

/* The number behind the word; false: there is none. */
static bool find_number(const char *text, const char *word, uint64_t *ret)
{
        const char *at = strstr(text, word);

        return at && sscanf(at + strlen(word), "%" SCNu64, ret) == 1;
}

static bool read_number(const char *folder, const char *name, uint64_t *ret)
{
        char path[512], text[TEXT_BYTES];

        return snprintf(path, sizeof(path), "%s/%s", folder, name) < (int)sizeof(path) && read_text(path, text) &&
               sscanf(text, "%" SCNu64, ret) == 1; /* not "max" */
}

/* What the group in this folder has left before a process of it is ended, or slowed down. */
static uint64_t group_free_bytes(const struct version *version, const char *folder)
{
        uint64_t limit = UINT64_MAX, throttle = UINT64_MAX, used, idle = 0;
        char path[512], text[TEXT_BYTES];

        read_number(folder, version->limit, &limit);
        if (version->throttle)
                read_number(folder, version->throttle, &throttle);
        limit = gr_min(limit, throttle);
        if (limit == UINT64_MAX || !read_number(folder, version->used, &used))
                return UINT64_MAX;
        if (snprintf(path, sizeof(path), "%s/memory.stat", folder) < (int)sizeof(path) && read_text(path, text))
                find_number(text, version->idle_files, &idle);
        used -= gr_min(used, idle);
        return limit > used ? limit - used : 0;
}

/*
 * Of the group and all above it; path is changed. In a container it may be the host's, of which only the top is there.
 */
static uint64_t groups_free_bytes(const struct version *version, char *path)
{
        uint64_t least = UINT64_MAX;
        char folder[512];

        for (;;) {
                char *last = strrchr(path, '/');

                if (snprintf(folder, sizeof(folder), "%s%s", version->folder, path) < (int)sizeof(folder))
                        least = gr_min(least, group_free_bytes(version, folder));
                if (!last)
                        return least;
                *last = '\0';
        }
}

/* Of the groups in a line NUMBER:CONTROLLERS:PATH, which is changed. */
static uint64_t line_free_bytes(char *line)
{
        char *controllers, *controller, *path;

        strsep(&line, ":");
        controllers = strsep(&line, ":");
        path = strsep(&line, "\n");
        while (path && (controller = strsep(&controllers, ",")))
                for (size_t i = 0; i < sizeof(versions) / sizeof(versions[0]); i++)
                        if (strcmp(controller, versions[i].controller) == 0)
                                return groups_free_bytes(&versions[i], path);
        return UINT64_MAX;
}

/* Of all groups of the process. In nested containers the lines are long. */
static uint64_t all_groups_free_bytes(void)
{
        FILE *file = fopen("/proc/self/cgroup", "re");
        uint64_t least = UINT64_MAX;
        char *line = NULL;
        size_t room = 0;

        while (file && getline(&line, &room, file) > 0)
                least = gr_min(least, line_free_bytes(line));
        free(line);
        if (file)
                fclose(file);
        return least;
}

static uint64_t free_bytes(void)
{
        char text[TEXT_BYTES];
        uint64_t least = UINT64_MAX, kib;
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;

        if (read_text("/proc/meminfo", text) && find_number(text, "MemAvailable:", &kib))
                least = kib * 1024;
        return gr_min(least, all_groups_free_bytes());
}

uint64_t gr_host_begin_taking(void)
{
        uint64_t left = free_bytes();

        atomic_store(&spare_bytes, left == UINT64_MAX ? 0 : left / 8);
        atomic_store(&unseen_bytes, 0);
        return left - left / 8;
}

bool gr_host_may_take(uint64_t bytes)
{
        if (atomic_fetch_add(&unseen_bytes, bytes) + bytes < LOOK_BYTES)
                return true;
        atomic_store(&unseen_bytes, 0);
        return free_bytes() >= atomic_load(&spare_bytes);
}
