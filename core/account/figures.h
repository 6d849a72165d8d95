/*
 * The figures of a device, by their names. account/figures.def is the only list of them.
 *
 * While other threads work each figure is right by itself, but two of them may be of different moments. No function
 * here calls the driver or takes a lock.
 */
#ifndef GR_FIGURES_H
#define GR_FIGURES_H

#include <stdint.h>

#include "base/json.h"

struct gr_device;

enum gr_figure {
#define GR_FIGURE(name, ...)        GR_FIGURE_##name,
#define GR_FIGURE_NUMBER(name, ...) GR_FIGURE_##name,
#define GR_FIGURE_TIME(name, ...)   GR_FIGURE_##name,
#include "account/figures.def"
#undef GR_FIGURE_TIME
#undef GR_FIGURE_NUMBER
#undef GR_FIGURE
        GR_FIGURE_COUNT,
        GR_SHARED_FIGURES = GR_FIGURE_asleep_deep + 1, /* how many figures, from the first on, the region has */
};

/* What kind of amount a figure is (account/figures.def). In the text, all figures of one kind stand on one line. */
enum gr_figure_kind {
        GR_FIGURE_KIND_NOW,
        GR_FIGURE_KIND_GRAPHS,
        GR_FIGURE_KIND_BESIDE,
        GR_FIGURE_KIND_EXECUTABLES,
        GR_FIGURE_KIND_PEAK,
        GR_FIGURE_KIND_LIMIT,
        GR_FIGURE_KIND_DEVICE,
        GR_FIGURE_KIND_TIME
};

struct gr_figure_row {
        const char *json;  /* its name in JSON */
        const char *words; /* beside the size or the time in the text; NULL: the text does not have it */
        enum gr_figure_kind kind;
};

extern const struct gr_figure_row gr_figure_table[GR_FIGURE_COUNT];

/* Reads all figures of the device. */
void gr_figures_of_device(struct gr_device *device, uint64_t ret[GR_FIGURE_COUNT]);

/* The figure as it is told to others: UINT64_MAX if it is not known, has not happened, or there is no limit. */
uint64_t gr_figure_told(enum gr_figure figure, uint64_t bytes);

/* Adds one figure to a JSON object; null if it is UINT64_MAX as told. */
void gr_figure_json(struct gr_json *json, enum gr_figure figure, uint64_t bytes);

/* Writes the figures that have words, and a value worth telling, as text: one line for each kind. */
void gr_figures_text(const uint64_t figures[GR_FIGURE_COUNT], gr_sink *sink, void *arg);

#endif
