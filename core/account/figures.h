/*
 * The figures of a device, by their names. account/figures.def is the only list of them.
 *
 * Each is right by itself, while other threads work: their sums need not be. No call asks the driver.
 */
#ifndef GR_FIGURES_H
#define GR_FIGURES_H

#include <stdint.h>

#include "base/json.h"

struct gr_device;

enum gr_figure {
#define GR_FIGURE(name, ...) GR_FIGURE_##name,
#include "account/figures.def"
#undef GR_FIGURE
        GR_FIGURE_COUNT,
        GR_SHARED_FIGURES = GR_FIGURE_imported + 1, /* so many of them, the first, are in the region */
};

enum gr_nature { GR_NATURE_LEVEL, GR_NATURE_BESIDE, GR_NATURE_PEAK, GR_NATURE_LIMIT, GR_NATURE_CARD };

struct gr_figure_row {
        const char *json;  /* its name there */
        const char *words; /* what it is, behind the size; NULL: not in the text */
        enum gr_nature nature;
};

extern const struct gr_figure_row gr_figure_table[GR_FIGURE_COUNT];

/* All of them, as they are now. */
void gr_device_figures(struct gr_device *device, uint64_t ret[GR_FIGURE_COUNT]);

/* Writes one of them into an object; null where it is not known, or no limit. */
void gr_figure_json(struct gr_json *json, enum gr_figure figure, uint64_t bytes);

/* Writes lines for people: the figures that have words and say something, those of one nature side by side. */
void gr_figures_text(const uint64_t figures[GR_FIGURE_COUNT], gr_sink *sink, void *arg);

#endif
