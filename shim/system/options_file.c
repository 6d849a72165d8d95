#include "system/options_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/keep_errno.h"
#include "base/no_cancel.h"

extern char **environ;

static const char *read_environment(const char *name)
{
        return secure_getenv(name);
}

/* Where the file is that no variable names. False: nowhere. */
static bool find_default(char path[GR_PATH_BYTES])
{
        const char *folder = read_environment("XDG_CONFIG_HOME"), *inner = "";

        if (!folder || folder[0] != '/') { /* the rule of XDG: a relative path does not count */
                folder = read_environment("HOME");
                inner = "/.config";
        }
        return folder && folder[0] == '/' &&
               snprintf(path, GR_PATH_BYTES, "%s%s/gpureclaim/config", folder, inner) < GR_PATH_BYTES;
}

/*
 * Whether the file may be used: a pipe gives its text to one process only, and a file that the user did not name must
 * be the user's, as HOME may be another's, as it can be with sudo. 0 or -errno.
 */
static int check_file(int fd, bool is_named)
{
        struct stat file;

        if (fstat(fd, &file) != 0)
                return -errno;
        if (S_ISFIFO(file.st_mode))
                return -ESPIPE;
        return is_named || ((file.st_uid == geteuid() || file.st_uid == 0) && !(file.st_mode & S_IWOTH)) ? 0 : -EPERM;
}

/* 0 or -errno. */
static int read_text(int fd, char text[GR_FILE_BYTES])
{
        size_t used = 0;
        ssize_t got;

        do {
                got = read(fd, text + used, GR_FILE_BYTES - used);
                used += got > 0 ? (size_t)got : 0;
        } while ((got > 0 && used < GR_FILE_BYTES) || (got < 0 && errno == EINTR));
        if (got < 0)
                return -errno;
        if (used == GR_FILE_BYTES)
                return -EFBIG;
        text[used] = '\0';
        return strlen(text) == used ? 0 : -EILSEQ;
}

/* Reads the file, if there is one or should be. False: neither. */
static bool read_file(struct gr_options_file *file)
{
        const char *named = read_environment(gr_option_table[GR_OPTION_CONFIG].env);
        const bool is_named = named && *named;
        int fd;

        *file->text = '\0';
        if (is_named)
                snprintf(file->path, sizeof(file->path), "%s", named);
        else if (!find_default(file->path))
                return false;
        fd = open(file->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* a FIFO must not stop the program */
        file->error = fd < 0 ? -errno : 0;
        if (fd >= 0)
                file->error = check_file(fd, is_named);
        if (file->error == 0)
                file->error = read_text(fd, file->text);
        if (fd >= 0)
                close(fd);
        if (is_named)
                return true;
        /* Whoever may not search the folder has no file there: HOME is another's, as in a container with a user. */
        return file->error != -ENOENT && file->error != -ENOTDIR &&
               (file->error != -EACCES || access(file->path, F_OK) == 0);
}

int gr_options_read(struct gr_options *ret, gr_options_warn *warn, void *warn_arg)
{
        static struct gr_options_file file;
        static char *nothing[] = {NULL};
        GR_KEEP_ERRNO;
        GR_NO_CANCEL;
        bool is_there = read_file(&file);

        gr_options_load(ret, read_environment, getauxval(AT_SECURE) ? nothing : environ, is_there ? &file : NULL, warn,
                        warn_arg);
        return is_there ? file.error : 0;
}
