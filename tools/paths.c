/* Where the library and the simulated device are, in a build folder or an installation (paths.h). */
#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "paths.h"

#define LIBRARY     "libgpureclaim.so"
#define SIM_LIBRARY "libcuda.so.1"
#define PYTHON_FILE "sitecustomize.py"

int find_self_dir(char *buf, size_t buf_bytes)
{
        char path[PATH_MAX];
        ssize_t length;
        char *slash;

        length = readlink("/proc/self/exe", path, sizeof(path) - 1);
        if (length < 0)
                return -errno;
        path[length] = '\0';
        slash = strrchr(path, '/');
        if (!slash)
                return -ENOENT;
        *slash = '\0';
        if (strlen(path) >= buf_bytes)
                return -ENAMETOOLONG;
        memcpy(buf, path, strlen(path) + 1);
        return 0;
}

/*
 * Finds the first readable file that matches pattern. A relative pattern begins at the folder of this program; special
 * characters in the folder's own name are escaped.
 */
static int find_file(const char *self_dir, const char *pattern, char *buf, size_t buf_bytes)
{
        char full[3 * PATH_MAX], real[PATH_MAX];
        size_t used = 0, i;
        int rc = -ENOENT;
        glob_t found;

        for (; pattern[0] != '/' && *self_dir && used < 2 * PATH_MAX; self_dir++) {
                if (strchr("*?[\\", *self_dir))
                        full[used++] = '\\';
                full[used++] = *self_dir;
        }
        snprintf(full + used, sizeof(full) - used, "%s%s", used > 0 ? "/" : "", pattern);
        if (glob(full, 0, NULL, &found) != 0)
                return -ENOENT;
        for (i = 0; i < found.gl_pathc && rc < 0; i++) {
                if (access(found.gl_pathv[i], R_OK) != 0 || !realpath(found.gl_pathv[i], real))
                        continue;
                if (strlen(real) >= buf_bytes)
                        continue;
                memcpy(buf, real, strlen(real) + 1);
                rc = 0;
        }
        globfree(&found);
        return rc;
}

static int find_first(const char *const *patterns, char *buf, size_t buf_bytes)
{
        char self_dir[PATH_MAX];
        int rc;

        rc = find_self_dir(self_dir, sizeof(self_dir));
        if (rc < 0)
                return rc;
        for (; *patterns; patterns++)
                if (find_file(self_dir, *patterns, buf, buf_bytes) == 0)
                        return 0;
        return -ENOENT;
}

int find_library(char *buf, size_t buf_bytes)
{
        static const char *const patterns[] = {
                "../shim/" LIBRARY,    GR_LIBDIR_FROM_BINDIR "/" LIBRARY,
                "../lib*/" LIBRARY,    "../lib*/*/" LIBRARY,
                GR_LIBDIR "/" LIBRARY, NULL,
        };

        return find_first(patterns, buf, buf_bytes);
}

/* The folder of the first file that is found. */
static int find_folder(const char *const *patterns, char *buf, size_t buf_bytes)
{
        char path[PATH_MAX];
        char *slash;
        int rc = find_first(patterns, path, sizeof(path));

        if (rc < 0)
                return rc;
        slash = strrchr(path, '/');
        *slash = '\0';
        if (strlen(path) >= buf_bytes)
                return -ENOENT;
        memcpy(buf, path, strlen(path) + 1);
        return 0;
}

int find_python_dir(char *buf, size_t buf_bytes)
{
        static const char *const patterns[] = {
                "python/run/" PYTHON_FILE,
                GR_DATADIR_FROM_BINDIR "/gpureclaim/run/" PYTHON_FILE,
                "../share/gpureclaim/run/" PYTHON_FILE,
                NULL,
        };

        return find_folder(patterns, buf, buf_bytes);
}

int find_sim_dir(char *buf, size_t buf_bytes)
{
        static const char *const patterns[] = {
                "sim/" SIM_LIBRARY,
                GR_LIBDIR_FROM_BINDIR "/gpureclaim/sim/" SIM_LIBRARY,
                "../lib*/gpureclaim/sim/" SIM_LIBRARY,
                "../lib*/*/gpureclaim/sim/" SIM_LIBRARY,
                GR_LIBDIR "/gpureclaim/sim/" SIM_LIBRARY,
                NULL,
        };

        return find_folder(patterns, buf, buf_bytes);
}

static bool list_has(const char *list, const char *entry)
{
        const size_t length = strlen(entry);
        size_t item;

        for (; *list; list += item + (list[item] != '\0')) {
                item = strcspn(list, ": ");
                if (item == length && memcmp(list, entry, length) == 0)
                        return true;
        }
        return false;
}

int prepend_environment(const char *variable, const char *entry)
{
        const char *before = getenv(variable);
        char *joined;
        int rc = 0;

        if (strpbrk(entry, ": ;\t\n"))
                return -EINVAL;
        if (!before || !*before)
                return setenv(variable, entry, 1) == 0 ? 0 : -errno;
        if (list_has(before, entry))
                return 0;
        if (asprintf(&joined, "%s:%s", entry, before) < 0)
                return -ENOMEM;
        if (setenv(variable, joined, 1) != 0)
                rc = -errno;
        free(joined);
        return rc;
}
