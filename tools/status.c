/* gpureclaim status: who uses which card, and how much. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

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
                       gr_size_format(figures[GR_FIGURE_peak], c, sizeof(c)));
                if (driver != GR_SIZE_NONE)
                        printf("; the driver's own %s", gr_size_format(driver, a, sizeof(a)));
                if (figures[GR_FIGURE_imported])
                        printf("; imported from others %s", gr_size_format(figures[GR_FIGURE_imported], a, sizeof(a)));
                printf("\n    limit %s, threshold %s, idle for %.1f s",
                       gr_size_format(figures[GR_FIGURE_limit], a, sizeof(a)),
                       gr_size_format(figures[GR_FIGURE_threshold], b, sizeof(b)), member_idle_s(card, member));
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

static void print_json_bytes(const char *name, uint64_t bytes)
{
        if (bytes == GR_SIZE_NONE)
                printf(", \"%s_bytes\": null", name);
        else
                printf(", \"%s_bytes\": %" PRIu64, name, bytes);
}

static void print_json_card(const struct card *card)
{
        printf("{\"uuid\": \"%s\", \"group\": \"%s\"", card->uuid, card->group);
        print_json_bytes("card_total", card->total_bytes ? card->total_bytes : GR_SIZE_NONE);
        print_json_bytes("card_used", card->total_bytes ? card->used_bytes : GR_SIZE_NONE);
        print_json_bytes("foreign", card->total_bytes ? card_others_bytes(card) : GR_SIZE_NONE);
        printf(", \"processes\": [");
        for (size_t i = 0; i < card->count; i++) {
                const struct gr_member *member = &card->members[i];
                uint64_t figures[GR_FIGURE_COUNT];

                memcpy(figures, member->figures, sizeof(figures));
                printf("%s\n    {\"pid\": %u, \"name\": ", i > 0 ? "," : "", member->identity.pid);
                print_json_string(member->name);
                printf(", \"same_pid_namespace\": %s, \"share\": %u", member->same_namespace ? "true" : "false",
                       member->share);
                print_json_bytes("reserved", member->reserved_bytes);
                figures[GR_FIGURE_driver] = member_driver_bytes(card, member);
                if (figures[GR_FIGURE_card_free] == 0) /* it has not asked yet */
                        figures[GR_FIGURE_card_free] = GR_SIZE_NONE;
#define PRINT(name) print_json_bytes(#name, figures[GR_FIGURE_##name]);
                GR_FIGURES(PRINT)
#undef PRINT
                printf(", \"idle_s\": %.3f}", member_idle_s(card, member));
        }
        printf("], \"others\": [");
        for (size_t i = 0, printed = 0; i < card->use_count; i++)
                if (!card_has_member(card, card->uses[i].pid)) {
                        printf("%s{\"pid\": %u", printed++ > 0 ? ", " : "", card->uses[i].pid);
                        print_json_bytes("used", card->uses[i].bytes);
                        putchar('}');
                }
        printf("]}");
}

int command_status(int argc, char **argv)
{
        static const char *const known[] = {"--json", "--help"};
        struct card *cards;
        size_t count, other;
        bool json = false;
        int rc;

        for (int i = 1; i < argc; i++) {
                if (help_wanted("status", argv[i]))
                        return EXIT_SUCCESS;
                if (strcmp(argv[i], "--json") == 0) {
                        json = true;
                } else if (argv[i][0] == '-') {
                        return unknown_flag("status", argv[i], known, 2);
                } else {
                        complain("status: %s: takes flags only", argv[i]);
                        return STATUS_USAGE;
                }
        }
        rc = cards_open(&cards, &count, &other);
        if (rc) {
                complain("status: the regions cannot be read: %s", strerror(-rc));
                return EXIT_FAILURE;
        }
        if (json)
                printf("{\"schema\": 1, \"other_files\": %zu, \"gpus\": [", other);
        for (size_t i = 0; i < count; i++) {
                card_read(&cards[i], true);
                if (json) {
                        printf("%s\n  ", i > 0 ? "," : "");
                        print_json_card(&cards[i]);
                } else {
                        print_card(&cards[i]);
                }
        }
        if (json)
                printf("\n]}\n");
        else if (count == 0)
                printf("No process of yours runs under gpureclaim on a GPU here.\n");
        if (!json && other > 0)
                printf("%zu more files are of another version of gpureclaim, or no regions.\n", other);
        return EXIT_SUCCESS;
}
