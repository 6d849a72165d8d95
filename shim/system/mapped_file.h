/*
 * A file that the process maps and that others read. It is opened anew each time it grows: nothing is left open for a
 * program that closes all descriptors, or for its children; nor is it a standard stream that the program has closed and
 * may print to. The caller closes the descriptors by gr_message_end.
 */
#ifndef GR_MAPPED_FILE_H
#define GR_MAPPED_FILE_H

#include <stddef.h>
#include <sys/stat.h>

#include "base/options.h"

struct gr_mapped_file {
        struct gr_path path; /* absolute, where that is not too long */
        struct stat made;
};

/*
 * Makes a new file: one that another process has mapped must not become shorter, as that process would end with SIGBUS.
 * pattern: for gr_options_expand_path; mode: as open takes it. Returns a descriptor or -errno; -EEXIST: something else
 * than a file has the name.
 */
int gr_mapped_file_create(struct gr_mapped_file *ret, const char *pattern, mode_t mode);

/* The file again; -ESTALE: its name is another file's. */
int gr_mapped_file_open(const struct gr_mapped_file *file);

/* The words of the program, each with its NUL; the rest of them zeroes. bytes: above 0. */
void gr_mapped_file_command(char *ret, size_t bytes);

#endif
