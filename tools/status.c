/* gpureclaim status: who uses which card, and how much. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/size.h"
#include "cards.h"
#include "command.h"

static void print_card(const struct card *card)
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], c[GR_SIZE_TEXT_BYTES];

        printf("GPU %s, group %s\n", card->uuid, card->group);
        if (card->total_bytes)
                printf("  card: %s of %s used, %s not counted here (contexts, other programs)\n",
                       gr_size_format(card->used_bytes, a, sizeof(a)), gr_size_format(card->total_bytes, b, sizeof(b)),
                       gr_size_format(card_others_bytes(card), c, sizeof(c)));
        else
                printf("  card: unknown\n");
        for (size_t i = 0; i < card->count; i++) {
                const struct gr_member *member = &card->members[i];
                const uint64_t *figures = member->figures;
                uint64_t driver = member_driver_bytes(card, member);

                printf("  %u %s%s: effective use of the card %.2f%% (%s of %s)\n", member->identity.pid, member->name,
                       member->same_namespace ? "" : " (of another pid namespace)",
                       figures[GR_FIGURE_card_total]
                               ? 100.0 * (double)member->reserved_bytes / (double)figures[GR_FIGURE_card_total]
                               : 0.0,
                       gr_size_format(member->reserved_bytes, a, sizeof(a)),
                       gr_size_format(figures[GR_FIGURE_card_total], b, sizeof(b)));
                printf("    pool: %s live, %s cached, peak %s", gr_size_format(figures[GR_FIGURE_live], a, sizeof(a)),
                       gr_size_format(figures[GR_FIGURE_cached], b, sizeof(b)),
                       gr_size_format(figures[GR_FIGURE_peak_reserved], c, sizeof(c)));
                if (driver != GR_SIZE_NONE)
                        printf("; the driver's own %s", gr_size_format(driver, a, sizeof(a)));
                if (figures[GR_FIGURE_imported])
                        printf("; imported from others %s", gr_size_format(figures[GR_FIGURE_imported], a, sizeof(a)));
                printf("\n    limit %s, threshold %s, idle for %.1f s",
                       gr_size_format(figures[GR_FIGURE_hard_limit], a, sizeof(a)),
                       gr_size_format(figures[GR_FIGURE_release_threshold], b, sizeof(b)), member_idle_s(card, member));
                if (figures[GR_FIGURE_group_limit] != GR_SIZE_NONE)
                        printf(", group limit %s", gr_size_format(figures[GR_FIGURE_group_limit], a, sizeof(a)));
                if (figures[GR_FIGURE_waiting])
                        printf(", waiting for %s", gr_size_format(figures[GR_FIGURE_waiting], a, sizeof(a)));
                putchar('\n');
        }
        for (size_t i = 0; i < card->use_count; i++)
                if (!card_has_member(card, card->uses[i].pid))
                        printf("  %u (not of this group): %s\n", card->uses[i].pid,
                               card->uses[i].bytes == GR_SIZE_NONE ? "unknown"
                                                                   : gr_size_format(card->uses[i].bytes, a, sizeof(a)));
}

static void write_member(struct gr_json *json, const struct card *card, const struct gr_member *member)
{
        gr_json_object(json, NULL);
        gr_json_number(json, "pid", "%u", member->identity.pid);
        gr_json_string(json, "name", member->name);
        gr_json_bool(json, "same_pid_namespace", member->same_namespace);
        gr_json_number(json, "share", "%u", member->share);
        gr_json_bytes(json, "reserved_bytes", member->reserved_bytes);
        for (enum gr_figure i = 0; i < GR_SHARED_FIGURES; i++)
                gr_figure_json(json, i, i == GR_FIGURE_driver ? member_driver_bytes(card, member) : member->figures[i]);
        gr_json_number(json, "idle_s", "%.3f", member_idle_s(card, member));
        gr_json_close(json);
}

static void write_card(struct gr_json *json, const struct card *card)
{
        bool known = card->total_bytes > 0;

        gr_json_object(json, NULL);
        gr_json_string(json, "uuid", card->uuid);
        gr_json_string(json, "group", card->group);
        gr_json_bytes(json, "card_total_bytes", known ? card->total_bytes : UINT64_MAX);
        gr_json_bytes(json, "card_used_bytes", known ? card->used_bytes : UINT64_MAX);
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

        gr_json_begin(&json, print_piece, NULL, 4);
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
                printf("%zu more files are of another version of gpureclaim, or no regions.\n", other);
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
