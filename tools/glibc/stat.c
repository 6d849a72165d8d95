/* stat and its kin, which were no functions of the C library before glibc 2.33: its headers called these instead. */
#include <sys/stat.h>

#ifdef __x86_64__
#define VERSION 1 /* of struct stat */
#else
#define VERSION 0
#endif

int __xstat64(int version, const char *path, struct stat *about);
int __fxstat64(int version, int fd, struct stat *about);
int __lxstat64(int version, const char *path, struct stat *about);
int __fxstatat64(int version, int folder, const char *path, struct stat *about, int flags);

int stat(const char *path, struct stat *about)
{
        return __xstat64(VERSION, path, about);
}

int fstat(int fd, struct stat *about)
{
        return __fxstat64(VERSION, fd, about);
}

int lstat(const char *path, struct stat *about)
{
        return __lxstat64(VERSION, path, about);
}

int fstatat(int folder, const char *path, struct stat *about, int flags)
{
        return __fxstatat64(VERSION, folder, path, about, flags);
}
