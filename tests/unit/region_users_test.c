/*
 * Regions of several users: what root reads of another user's region, and the folders of others.
 */
#include <errno.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "region_scripted.h"

#define OTHER 65534

/* Publishes a figure for both regions each time it is told to, as another user; then cuts the second one's file. */
static void be_other_user(int told, int done)
{
        const struct gr_region_ticket apart = {.magic = GR_TICKET_MAGIC, .version = GR_REGION_VERSION};
        struct gr_region *regions[2];
        uint64_t figures[GR_SHARED_FIGURES] = {0};
        char path[256];

        if (setgid(OTHER) != 0 || setuid(OTHER) != 0)
                _exit(1);
        regions[0] = join_as(2, "segment");
        write_ticket("in-file", apart); /* of another IPC namespace, so that the memory goes into the file */
        regions[1] = join_as(2, "in-file");
        while (read(told, &figures[GR_FIGURE_live], sizeof(figures[0])) == sizeof(figures[0])) {
                for (int i = 0; i < 2; i++)
                        gr_region_publish(regions[i], figures, true);
                snprintf(path, sizeof(path), "%s/in-file", dir);
                if (figures[GR_FIGURE_live] == 0 && truncate(path, sizeof(struct gr_region_ticket)) != 0)
                        _exit(1);
                if (write(done, "", 1) != 1)
                        _exit(1);
        }
        _exit(0);
}

static uint64_t live_of(struct gr_region *region)
{
        struct gr_member member = {0};

        for (unsigned i = 0; i < GR_REGION_SLOTS; i++)
                if (gr_region_read(region, i, &member) == 0 && member.identity.pid == 2)
                        return member.figures[GR_FIGURE_live];
        return UINT64_MAX;
}

static void tell(int to, int from, uint64_t live)
{
        char done;

        GR_CHECK(write(to, &live, sizeof(live)) == sizeof(live) && read(from, &done, 1) == 1);
}

/* Root reads a copy of what another user has, and changes nothing there unless it opens the memory itself. */
static void test_other_user(void)
{
        static const char *const files[] = {"segment", "in-file"};
        struct gr_identity self = identity(1);
        struct gr_region copies[2], later, itself;
        int to[2], from[2], status;
        char name[256];
        uid_t users[4];
        pid_t child;

        if (geteuid() != 0) {
                printf("not root: other users' regions were not read\n");
                return;
        }
        GR_CHECK(pipe(to) == 0 && pipe(from) == 0 && chown(dir, OTHER, OTHER) == 0);
        child = fork();
        if (child == 0) {
                close(to[1]);
                be_other_user(to[0], from[1]);
        }
        close(to[0]);
        close(from[1]);
        tell(to[1], from[0], 5);
        for (int i = 0; i < 2; i++) {
                GR_CHECK_EQ(gr_region_open(&later, &ops, &self, dir, files[i], false), -EPERM);
                GR_CHECK_EQ(gr_region_open_of(&later, &ops, &self, OTHER - 1, dir, files[i], true), -EPERM);
                GR_CHECK_EQ(gr_region_open_of(&copies[i], &ops, &self, OTHER, dir, files[i], true), 0);
                GR_CHECK_EQ(live_of(&copies[i]), 5);
                GR_CHECK_EQ(copies[i].segment == -1, i == 1);
        }
        tell(to[1], from[0], 6);
        for (int i = 0; i < 2; i++) {
                GR_CHECK_EQ(live_of(&copies[i]), 5);
                GR_CHECK_EQ(gr_region_open_of(&itself, &ops, &self, OTHER, dir, files[i], false), 0);
                peers[2] = GR_PROCESS_GONE;
                for (unsigned slot = 0; slot < GR_REGION_SLOTS; slot++)
                        GR_CHECK_EQ(gr_region_is_gone(&itself, slot), atomic_load(&itself.map->owners[slot]) != 0);
                GR_CHECK(!gr_region_is_gone(&itself, GR_REGION_SLOTS));
                peers[2] = GR_PROCESS_ALIVE;
                gr_region_sweep(&copies[i]); /* nothing: it lives */
                memset(copies[i].map, 0, sizeof(*copies[i].map));
                GR_CHECK_EQ(live_of(&itself), 6);
                tell(to[1], from[0], 7);
                GR_CHECK_EQ(live_of(&itself), 7);
                tell(to[1], from[0], 6);
                gr_region_close(&itself);
                gr_region_close(&copies[i]);
                GR_CHECK_EQ(gr_region_open_of(&copies[i], &ops, &self, OTHER, dir, files[i], true), 0);
        }
        tell(to[1], from[0], 0);
        GR_CHECK_EQ(live_of(&copies[1]), 6); /* if it were the file, that would end this process */
        GR_CHECK_EQ(gr_region_open_of(&later, &ops, &self, OTHER, dir, files[1], true), -ENOENT);
        close(to[1]);
        close(from[0]);
        GR_CHECK(waitpid(child, &status, 0) == child && status == 0);
        GR_CHECK_EQ(gr_region_open_of(&later, &ops, &self, OTHER, dir, files[0], true), -ENOENT);

        /* What is not what the other user's library has made. */
        snprintf(name, sizeof(name), "%s/other-link", dir);
        GR_CHECK(symlink("segment", name) == 0 && lchown(name, OTHER, OTHER) == 0);
        GR_CHECK_EQ(gr_region_open_of(&later, &ops, &self, OTHER, dir, "other-link", true), -EPERM);
        snprintf(name, sizeof(name), "%s/other-fifo", dir);
        GR_CHECK(mkfifo(name, 0600) == 0 && chown(name, OTHER, OTHER) == 0);
        GR_CHECK_EQ(gr_region_open_of(&later, &ops, &self, OTHER, dir, "other-fifo", true), -EPERM);
        snprintf(name, sizeof(name), "%s/ours", dir);
        GR_CHECK_EQ(mknod(name, S_IFREG | 0600, 0), 0);
        GR_CHECK_EQ(gr_region_open_of(&later, &ops, &self, OTHER, dir, "ours", true), -EPERM);
        GR_CHECK_EQ(chown(dir, 0, 0), 0);
        GR_CHECK_EQ(gr_region_open_of(&later, &ops, &self, OTHER, dir, "segment", true), -EPERM);
        for (int i = 0; i < 2; i++)
                gr_region_close(&copies[i]);

        /* The folders of others: each user once, and none that says it is another one's. */
        snprintf(name, sizeof(name), "%s/gpureclaim-%d-x", dir, OTHER);
        GR_CHECK(mkdir(name, 0700) == 0 && chown(name, OTHER, OTHER) == 0);
        snprintf(name, sizeof(name), "%s/gpureclaim-%d", dir, OTHER);
        GR_CHECK(mkdir(name, 0700) == 0);
        snprintf(name, sizeof(name), "%s/gpureclaim-%d", dir, OTHER - 1);
        GR_CHECK(mkdir(name, 0700) == 0 && chown(name, OTHER, OTHER) == 0);
        snprintf(name, sizeof(name), "%s/gpureclaim-0", dir);
        GR_CHECK(mkdir(name, 0700) == 0);
        GR_CHECK_EQ(gr_region_users(dir, users, 0), 0);
        GR_CHECK_EQ(gr_region_users(dir, users, 4), 1);
        GR_CHECK_EQ(users[0], OTHER);
        GR_CHECK_EQ(gr_region_find_dir_of(dir, OTHER, later.dir, sizeof(later.dir)), 0);
        snprintf(name, sizeof(name), "%s/gpureclaim-%d-x", dir, OTHER);
        GR_CHECK_STR(later.dir, name);
        GR_CHECK_EQ(gr_region_find_dir_of(dir, OTHER - 1, later.dir, sizeof(later.dir)), -ENOENT);
        for (const char *const *left = (const char *const[]){"0", "65533", "65534", "65534-x", NULL}; *left; left++) {
                snprintf(name, sizeof(name), "%s/gpureclaim-%s", dir, *left);
                GR_CHECK_EQ(rmdir(name), 0);
        }
}

int main(void)
{
        region_begin();
        test_other_user();
        return region_end();
}
