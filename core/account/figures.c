#include "account/figures.h"

#include "account/budget.h"

const struct gr_figure_row gr_figure_table[GR_FIGURE_COUNT] = {
#define GR_FIGURE(name, nature, where, words, value) {#name "_bytes", words, GR_NATURE_##nature},
#include "account/figures.def"
#undef GR_FIGURE
};

void gr_device_figures(struct gr_device *device, uint64_t ret[GR_FIGURE_COUNT])
{
#define GR_FIGURE(name, nature, where, words, value) ret[GR_FIGURE_##name] = value;
#include "account/figures.def"
#undef GR_FIGURE
}

void gr_figure_json(struct gr_json *json, enum gr_figure figure, uint64_t bytes)
{
        const struct gr_figure_row *row = &gr_figure_table[figure];

        gr_json_bytes(json, row->json, row->nature == GR_NATURE_CARD && bytes == 0 ? UINT64_MAX : bytes);
}
