/* Whether the library can be loaded into a program (command.h). */
#include <elf.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "command.h"

#define SCRIPTS_MOST 4 /* how many interpreters one after the other are looked at */
#define OPEN_FLAGS   (O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY) /* a FIFO must not stop the command */

extern const ElfW(Ehdr) __ehdr_start __attribute__((visibility("hidden"))); /* of this program; by the linker */

/* Opens the file that execvp would run. Negative: there is none. */
static int open_program(const char *name)
{
        const char *folders = getenv("PATH"), *end;
        char path[PATH_MAX];

        if (strchr(name, '/'))
                return open(name, OPEN_FLAGS);
        for (folders = folders ? folders : "/bin:/usr/bin"; *folders; folders = end + (*end == ':')) {
                end = folders + strcspn(folders, ":");
                if (snprintf(path, sizeof(path), "%.*s/%s", end > folders ? (int)(end - folders) : 1,
                             end > folders ? folders : ".", name) < (int)sizeof(path) &&
                    access(path, X_OK) == 0)
                        return open(path, OPEN_FLAGS);
        }
        return -1;
}

/* The system's loader obeys LD_PRELOAD only where the program has no more rights than its caller. */
static bool has_more_rights(int fd)
{
        struct stat file;

        if (fstat(fd, &file) != 0)
                return false;
        return ((file.st_mode & S_ISUID) && file.st_uid != getuid()) ||
               ((file.st_mode & S_ISGID) && (file.st_mode & S_IXGRP) && file.st_gid != getgid()) ||
               (getuid() != 0 && fgetxattr(fd, "security.capability", NULL, 0) > 0);
}

/* Why the library cannot be loaded into an ELF file. NULL: it can, as far as can be seen. */
static const char *examine_elf(int fd, const ElfW(Ehdr) * header)
{
        char loader[PATH_MAX] = "";
        ElfW(Phdr) part;

        if (header->e_ident[EI_CLASS] != __ehdr_start.e_ident[EI_CLASS] || header->e_machine != __ehdr_start.e_machine)
                return "is for another kind of processor than the library";
        for (unsigned i = 0; i < header->e_phnum && !*loader; i++) {
                size_t at = header->e_phoff + (size_t)i * header->e_phentsize;

                if (pread(fd, &part, sizeof(part), (off_t)at) != sizeof(part))
                        return NULL;
                if (part.p_type == PT_INTERP && part.p_filesz < sizeof(loader) &&
                    pread(fd, loader, part.p_filesz, (off_t)part.p_offset) < 0)
                        return NULL;
        }
        if (!*loader)
                return "is linked statically";
        return strstr(loader, "musl") ? "uses the C library musl, and the library needs glibc" : NULL;
}

/* The program that runs a script with this first line, which is changed: what env(1) would run, where it is env. */
static const char *interpreter_of(char *line)
{
        char *word = strtok(line, " \t"), *base = word ? strrchr(word, '/') : NULL;

        while (base && strcmp(base, "/env") == 0 && (word = strtok(NULL, " \t")) && (*word == '-' || strchr(word, '=')))
                ;
        return word;
}

void say_if_not_loadable(const char *command, const char *program)
{
        char name[PATH_MAX];
        union {
                ElfW(Ehdr) header;
                char text[PATH_MAX];
        } begin;

        snprintf(name, sizeof(name), "%s", program);
        for (int i = 0; i < SCRIPTS_MOST; i++) {
                int fd = open_program(name);
                ssize_t length = fd < 0 ? -1 : read(fd, &begin, sizeof(begin) - 1);
                const char *reason = NULL, *next = NULL;

                if (length > 2 && memcmp(begin.text, "#!", 2) == 0) {
                        begin.text[length] = '\0';
                        begin.text[strcspn(begin.text, "\n")] = '\0';
                        next = interpreter_of(begin.text + 2);
                } else if (length >= (ssize_t)sizeof(begin.header) && memcmp(begin.text, ELFMAG, SELFMAG) == 0) {
                        reason = has_more_rights(fd) ? "has more rights than its caller"
                                                     : examine_elf(fd, &begin.header);
                }
                if (fd >= 0)
                        close(fd);
                if (reason)
                        complain("%s: warning: gpureclaim has no effect in %s itself: it %s", command, name, reason);
                if (!next)
                        return;
                snprintf(name, sizeof(name), "%s", next);
        }
}
