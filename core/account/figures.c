#include "account/figures.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "account/budget.h"
#include "base/size.h"

const struct gr_figure_row gr_figure_table[GR_FIGURE_COUNT] = {
#define GR_FIGURE(name, kind, where, words, help, value) {#name "_bytes", words, GR_FIGURE_KIND_##kind},
#define GR_FIGURE_NUMBER(name, kind, help, value)        {#name, NULL, GR_FIGURE_KIND_##kind},
#define GR_FIGURE_TIME(name, words, help, value)         {#name "_ns", words, GR_FIGURE_KIND_TIME},
#include "account/figures.def"
#undef GR_FIGURE_TIME
#undef GR_FIGURE_NUMBER
#undef GR_FIGURE
};

void gr_figures_of_device(struct gr_device *device, uint64_t ret[GR_FIGURE_COUNT])
{
#define GR_FIGURE(name, kind, where, words, help, value) ret[GR_FIGURE_##name] = value;
#define GR_FIGURE_NUMBER(name, kind, help, value)        ret[GR_FIGURE_##name] = value;
#define GR_FIGURE_TIME(name, words, help, value)         ret[GR_FIGURE_##name] = value;
#include "account/figures.def"
#undef GR_FIGURE_TIME
#undef GR_FIGURE_NUMBER
#undef GR_FIGURE
}

uint64_t gr_figure_told(enum gr_figure figure, uint64_t bytes)
{
        enum gr_figure_kind kind = gr_figure_table[figure].kind;

        return (kind == GR_FIGURE_KIND_DEVICE || kind == GR_FIGURE_KIND_TIME) && bytes == 0 ? UINT64_MAX : bytes;
}

void gr_figure_json(struct gr_json *json, enum gr_figure figure, uint64_t bytes)
{
        gr_json_bytes(json, gr_figure_table[figure].json, gr_figure_told(figure, bytes));
}

static void put_figures(const uint64_t *figures, enum gr_figure_kind kind, const char *label, gr_sink *sink, void *arg)
{
        char line[512], size[GR_SIZE_TEXT_BYTES];
        size_t begin = (size_t)snprintf(line, sizeof(line), "    %s:", label), length = begin;

        for (int i = 0; i < GR_FIGURE_COUNT && length < sizeof(line) - 64; i++) {
                const struct gr_figure_row *row = &gr_figure_table[i];

                if (row->kind != kind || !row->words || figures[i] == UINT64_MAX ||
                    (figures[i] == 0 && kind != GR_FIGURE_KIND_LIMIT))
                        continue;
                length += (size_t)snprintf(line + length, sizeof(line) - length, "%s %s %s", length > begin ? "," : "",
                                           gr_size_format(figures[i], size, sizeof(size)), row->words);
        }
        if (length == begin && kind == GR_FIGURE_KIND_BESIDE)
                return;
        length += (size_t)snprintf(line + length, sizeof(line) - length, "%s\n", length == begin ? " none" : "");
        sink(line, length, arg);
}

static void put_graphs(const uint64_t *figures, gr_sink *sink, void *arg)
{
        uint64_t bytes = figures[GR_FIGURE_graph];
        char line[128], size[GR_SIZE_TEXT_BYTES];
        int length;

        if (bytes == 0 || bytes == UINT64_MAX)
                return;
        length = snprintf(line, sizeof(line), "    %s: %s\n", gr_figure_table[GR_FIGURE_graph].words,
                          gr_size_format(bytes, size, sizeof(size)));
        sink(line, (size_t)length, arg);
}

/* The driver keeps the memory of destroyed executables for the next ones: there may be memory and no executable. */
static void put_executables(const uint64_t *figures, gr_sink *sink, void *arg)
{
        uint64_t count = figures[GR_FIGURE_executables], bytes = figures[GR_FIGURE_executable];
        char line[128], size[GR_SIZE_TEXT_BYTES];
        int length;

        if (count == UINT64_MAX || (count == 0 && (bytes == 0 || bytes == UINT64_MAX)))
                return;
        if (bytes == UINT64_MAX)
                length = snprintf(line, sizeof(line), "    executable graphs: %" PRIu64 ", memory not known\n", count);
        else
                length = snprintf(line, sizeof(line), "    executable graphs: %" PRIu64 ", about %s the driver's own\n",
                                  count, gr_size_format(bytes, size, sizeof(size)));
        sink(line, (size_t)length, arg);
}

static void put_times(const uint64_t *figures, gr_sink *sink, void *arg)
{
        char line[128];
        int length = 0;

        for (int i = 0; i < GR_FIGURE_COUNT; i++)
                if (gr_figure_table[i].kind == GR_FIGURE_KIND_TIME && figures[i] != 0 && figures[i] != UINT64_MAX)
                        length += snprintf(line + length, sizeof(line) - (size_t)length, "%s%s took %.3f s",
                                           length ? ", " : "    ", gr_figure_table[i].words, (double)figures[i] / 1e9);
        if (length == 0)
                return;
        length += snprintf(line + length, sizeof(line) - (size_t)length, "\n");
        sink(line, (size_t)length, arg);
}

void gr_figures_text(const uint64_t figures[GR_FIGURE_COUNT], gr_sink *sink, void *arg)
{
        put_figures(figures, GR_FIGURE_KIND_NOW, "memory", sink, arg);
        put_graphs(figures, sink, arg);
        put_figures(figures, GR_FIGURE_KIND_BESIDE, "beside it", sink, arg);
        put_times(figures, sink, arg);
        put_executables(figures, sink, arg);
        put_figures(figures, GR_FIGURE_KIND_PEAK, "peak", sink, arg);
        put_figures(figures, GR_FIGURE_KIND_LIMIT, "limits", sink, arg);
}
