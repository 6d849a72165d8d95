/* Where the library and the simulated device are (paths.c). */
#ifndef GR_TOOL_PATHS_H
#define GR_TOOL_PATHS_H

#include <stddef.h>

/*
 * The folder of this program, absolute and without a slash at its end, from /proc/self/exe. 0 or -errno, buf untouched
 * on failure.
 */
int find_self_dir(char *buf, size_t buf_bytes);

/*
 * The absolute path of libgpureclaim.so: beside this program in a build folder or an installation (moved or not). 0, or
 * -ENOENT with buf untouched.
 */
int find_library(char *buf, size_t buf_bytes);

/* The folder that holds the simulated device's libcuda.so.1; as find_library. */
int find_sim_dir(char *buf, size_t buf_bytes);

/* The folder that holds the sitecustomize.py for programs in Python; as find_library. */
int find_python_dir(char *buf, size_t buf_bytes);

/*
 * Puts entry in front of the variable's list, separated by ':', unless it stands in it already. 0, -errno of setenv, or
 * -EINVAL where entry holds a blank or colon, which such a list cannot express.
 */
int prepend_environment(const char *variable, const char *entry);

#endif
