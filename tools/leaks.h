/* Origins for people and in JSON, for report as well (leaks.c). */
#ifndef GR_TOOL_LEAKS_H
#define GR_TOOL_LEAKS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/json.h"
#include "origins.h"

/*
 * Prints the largest origins as gpureclaim leaks does. native: also the functions between those of Python, else a line
 * says how many these are. head: begins the first line; more: the command or flag that shows the other origins.
 */
void print_origins(const struct origins *origins, size_t shown, bool native, const char *head, const char *more);

/* A frame and the place in it in one line without unprintable characters: "function (file:line)", or what is known. */
void format_frame(const struct frame *frame, const struct place *place, char *text, size_t bytes);

/* Calls take for what gpureclaim leaks shows of the origin without --native, innermost first. */
void each_shown_place(const struct origin *origin,
                      void (*take)(void *arg, const struct frame *frame, const struct place *place), void *arg);

/* Writes all origins as members of the open JSON object. */
void write_origins(struct gr_json *json, const struct origins *origins);

#endif
