/* gpureclaim status: who uses which card, and how much. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/size.h"
#include "cards.h"
#include "command.h"

static void print_member(const struct card *card, const struct gr_member *member)
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES];
        uint64_t figures[GR_FIGURE_COUNT], total;

        member_figures(card, member, figures);
        total = figures[GR_FIGURE_device_total];
        printf("  %u %s%s: effective use of the GPU %.2f%% (%s of %s), idle for %.1f s\n", member->identity.pid,
               member->name, member->same_namespace ? "" : " (of another pid namespace)",
               total ? 100.0 * (double)member->reserved_bytes / (double)total : 0.0,
               gr_size_format(member->reserved_bytes, a, sizeof(a)), gr_size_format(total, b, sizeof(b)),
               member_idle_s(card, member));
        gr_figures_text(figures, gr_sink_file, stdout);
        if (figures[GR_FIGURE_waiting])
                printf("    waiting for %s\n", gr_size_format(figures[GR_FIGURE_waiting], a, sizeof(a)));
}

static void print_card(const struct card *card)
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], c[GR_SIZE_TEXT_BYTES];

        printf("GPU %s, group %s\n", card->uuid, card->group);
        if (card->total_bytes)
                printf("  memory: %s of %s used, %s not counted here (contexts, other programs)\n",
                       gr_size_format(card->used_bytes, a, sizeof(a)), gr_size_format(card->total_bytes, b, sizeof(b)),
                       gr_size_format(card_others_bytes(card), c, sizeof(c)));
        else
                printf("  memory: unknown\n");
        for (size_t i = 0; i < card->count; i++)
                print_member(card, &card->members[i]);
        for (size_t i = 0; i < card->use_count; i++)
                if (!card_has_member(card, card->uses[i].pid))
                        printf("  %u (not of this group): %s\n", card->uses[i].pid,
                               card->uses[i].bytes == GR_SIZE_NONE ? "unknown"
                                                                   : gr_size_format(card->uses[i].bytes, a, sizeof(a)));
}

static void write_member(struct gr_json *json, const struct card *card, const struct gr_member *member)
{
        uint64_t figures[GR_FIGURE_COUNT];

        gr_json_object(json, NULL);
        gr_json_number(json, "pid", "%u", member->identity.pid);
        gr_json_string(json, "name", member->name);
        gr_json_bool(json, "same_pid_namespace", member->same_namespace);
        gr_json_number(json, "share", "%u", member->share);
        member_figures(card, member, figures);
        gr_figure_json(json, GR_FIGURE_reserved, figures[GR_FIGURE_reserved]);
        for (enum gr_figure i = 0; i < GR_SHARED_FIGURES; i++)
                if (gr_figure_table[i].kind != GR_FIGURE_KIND_DEVICE) /* the GPU has these: gpu_total_bytes */
                        gr_figure_json(json, i, figures[i]);
        gr_json_number(json, "idle_s", "%.3f", member_idle_s(card, member));
        gr_json_close(json);
}

static void write_card(struct gr_json *json, const struct card *card)
{
        bool known = card->total_bytes > 0;

        gr_json_object(json, NULL);
        gr_json_string(json, "uuid", card->uuid);
        gr_json_string(json, "group", card->group);
        gr_json_bytes(json, "gpu_total_bytes", known ? card->total_bytes : UINT64_MAX);
        gr_json_bytes(json, "gpu_used_bytes", known ? card->used_bytes : UINT64_MAX);
        gr_json_bytes(json, "foreign_bytes", known ? card_others_bytes(card) : UINT64_MAX);
        gr_json_array(json, "processes");
        for (size_t i = 0; i < card->count; i++)
                write_member(json, card, &card->members[i]);
        gr_json_close(json);
        gr_json_array(json, "others");
        for (size_t i = 0; i < card->use_count; i++) {
                if (card_has_member(card, card->uses[i].pid))
                        continue;
                gr_json_object(json, NULL);
                gr_json_number(json, "pid", "%u", card->uses[i].pid);
                gr_json_bytes(json, "used_bytes", card->uses[i].bytes);
                gr_json_close(json);
        }
        gr_json_close(json);
        gr_json_close(json);
}

static void print_json(const struct card *cards, size_t count, size_t other)
{
        struct gr_json json;

        gr_json_begin(&json, gr_sink_file, stdout, 4);
        gr_json_object(&json, NULL);
        gr_json_number(&json, "schema", "1");
        gr_json_count(&json, "other_files", other);
        gr_json_array(&json, "gpus");
        for (size_t i = 0; i < count; i++)
                write_card(&json, &cards[i]);
        gr_json_close(&json);
        gr_json_close(&json);
        gr_json_end(&json);
}

static void print_text(const struct card *cards, size_t count, size_t other)
{
        for (size_t i = 0; i < count; i++)
                print_card(&cards[i]);
        if (count == 0)
                printf("No process of yours runs under gpureclaim on a GPU here.\n");
        if (other > 0)
                printf("%zu files in the shared folder belong to another version of gpureclaim, or to something "
                       "else.\n",
                       other);
}

int command_status(const struct arguments *arguments)
{
        struct card *cards;
        size_t count, other;
        int rc = cards_open(&cards, &count, &other);

        if (rc) {
                complain("status: the shared memory cannot be read: %s", strerror(-rc));
                return EXIT_FAILURE;
        }
        for (size_t i = 0; i < count; i++)
                card_read(&cards[i], true);
        (flag_value(arguments, "json") ? print_json : print_text)(cards, count, other);
        return EXIT_SUCCESS;
}
