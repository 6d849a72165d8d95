/*
 * JSON, written piece by piece: commas, brackets and escapes are placed here, so that no caller has to.
 *
 *   gr_json_begin(&json, sink, arg, 0);
 *   gr_json_object(&json, NULL);
 *   gr_json_number(&json, "pid", "%d", pid);     -> {"pid":7,"names":["a"]}
 *   gr_json_array(&json, "names");
 *   gr_json_string(&json, NULL, "a");
 *   gr_json_close(&json);
 *   gr_json_close(&json);
 *   gr_json_end(&json);
 *
 * name: of the entry in its object; NULL in an array and for the outermost value. Nothing is allocated; a writer
 * belongs to one thread at a time.
 */
#ifndef GR_JSON_H
#define GR_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define GR_JSON_DEPTH 16 /* most objects and arrays inside each other */

/* Takes a piece of text, not NUL-terminated. */
typedef void gr_sink(const char *text, size_t length, void *arg);

/* A sink: writes to the FILE that arg is. */
static inline void gr_sink_file(const char *text, size_t length, void *arg)
{
        fwrite(text, 1, length, arg);
}

struct gr_json {
        gr_sink *sink;
        void *arg;
        unsigned lines, depth;
        bool filled; /* the innermost object or array has an entry */
        char closing[GR_JSON_DEPTH];
        size_t length; /* of the text below, which is not written yet */
        char text[256];
};

/*
 * Entries of objects and arrays down to a depth of lines stand on lines of their own, for people; the rest follows on
 * the same line. 0: no blanks at all.
 */
void gr_json_begin(struct gr_json *json, gr_sink *sink, void *arg, unsigned lines);

/* Ends the text with a newline and writes what is still buffered. All objects and arrays must be closed. */
void gr_json_end(struct gr_json *json);

void gr_json_object(struct gr_json *json, const char *name);
void gr_json_array(struct gr_json *json, const char *name);
void gr_json_close(struct gr_json *json);

void gr_json_string(struct gr_json *json, const char *name, const char *text);
void gr_json_bool(struct gr_json *json, const char *name, bool value);
void gr_json_null(struct gr_json *json, const char *name);

void gr_json_count(struct gr_json *json, const char *name, uint64_t count);

/* UINT64_MAX, which stands for no limit and for what is not known, becomes null. */
void gr_json_bytes(struct gr_json *json, const char *name, uint64_t bytes);

/* Adds a number, formatted as by printf: a valid JSON number of less than 64 bytes. */
__attribute__((format(printf, 3, 4))) void gr_json_number(struct gr_json *json, const char *name, const char *format,
                                                          ...);

#endif
