/*
 * Files that the process maps.
 *
 * One that others read is opened anew each time it grows, so that no descriptor stays
 * open: the program may close all descriptors, and its children would inherit it. No descriptor has the number of a
 * standard stream, to which the program may print. The caller closes the descriptors by gr_message_end.
 */
#ifndef GR_MAPPED_FILE_H
#define GR_MAPPED_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

#include "base/options.h"

struct gr_mapped_file {
        struct gr_path path; /* absolute, where that is not too long */
        struct stat made;
};

/*
 * Makes a new file in place of an old one. The old one is not shortened, because a process that has mapped it would end
 * with SIGBUS. pattern: for gr_options_expand_path; mode: as open takes it. keep: what this process wrote before exec
 * stays, if the pattern has the process's id, and the new file's name says which image of the process it is of. Returns
 * a descriptor or -errno, and then leaves no file behind; -EEXIST: what has the name is not a regular file.
 */
int gr_mapped_file_create(struct gr_mapped_file *ret, const char *pattern, bool keep, mode_t mode);

/* Opens the file again. Returns a descriptor or -errno; -ESTALE: another file has its name by now. */
int gr_mapped_file_open(const struct gr_mapped_file *file);

/*
 * Reserves room on the disk: a page of the mapping without it would end the program (SIGBUS). A file above the
 * process's size limit would end it in posix_fallocate (SIGXFSZ). 0 or -errno.
 */
int gr_mapped_file_reserve(int fd, size_t at, size_t bytes);

/* Makes folder absolute. Returns whether files in it are on a disk, or -errno. */
int gr_mapped_file_on_disk(struct gr_path *folder);

/*
 * Memory of bytes, zeroed, that the system can write to a disk: a file without a name in folder, which is gone when it
 * is unmapped. All of its room on the disk is reserved. A child does not have it. NULL: errno says why.
 */
void *gr_mapped_file_memory(const struct gr_path *folder, size_t bytes);

/* Writes the program's command line, each word with its NUL, and fills the rest with zeroes. bytes: above 0. */
void gr_mapped_file_command(char *ret, size_t bytes);

#endif
