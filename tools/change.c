/* gpureclaim limit, threshold, reclaim: what running processes are told. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/size.h"
#include "cards.h"
#include "command.h"
#include "reclaim/ladder_levels.h"

/* 0: not a pid. */
static unsigned parse_pid(const char *text)
{
        char *end;
        unsigned long pid = strtoul(text, &end, 10);

        return *text >= '0' && *text <= '9' && !*end && pid < 1u << 22 ? (unsigned)pid : 0;
}

/* Complains and returns the exit status where there is nobody. */
static int open_all(const char *command, struct card **ret_cards, size_t *ret_count)
{
        size_t other;
        int rc = cards_open(ret_cards, ret_count, &other);

        if (rc)
                complain("%s: the regions cannot be read: %s", command, strerror(-rc));
        return rc ? EXIT_FAILURE : EXIT_SUCCESS;
}

static const char *failure(int rc)
{
        return rc == -ESRCH ? "it ended" : "it does not answer (stopped, or hung)";
}

static int change_one(const char *command, struct card *card, struct gr_member *member, const char *text)
{
        bool limit = strcmp(command, "limit") == 0;
        struct gr_request request = {.orders = limit ? GR_ORDER_LIMIT : GR_ORDER_THRESHOLD};
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], c[GR_SIZE_TEXT_BYTES];
        uint64_t bytes, given, live;
        int rc;

        if (!size_argument(command, text, member->figures[GR_FIGURE_card_total], &bytes))
                return STATUS_USAGE;
        if (limit && bytes == 0) {
                complain("limit: %s: out of range (above 0)", text);
                return STATUS_USAGE;
        }
        request.new_limit = request.new_threshold = bytes;
        rc = card_request(card, member, &request, &given);
        if (rc) {
                complain("%s: process %u: %s", command, member->identity.pid, failure(rc));
                return EXIT_FAILURE;
        }
        gr_region_read(&card->region, member->slot, member);
        live = member->figures[GR_FIGURE_live];
        printf("%u %s: %s now %s; %s live, %s cached\n", member->identity.pid, member->name,
               limit ? "hard limit" : "release threshold", gr_size_format(bytes, a, sizeof(a)),
               gr_size_format(live, b, sizeof(b)), gr_size_format(member->figures[GR_FIGURE_cached], c, sizeof(c)));
        if (limit && bytes < live)
                printf("  More than that is in use: the limit bites on the next allocation.\n");
        return EXIT_SUCCESS;
}

static int change(int argc, char **argv)
{
        static const char *const known[] = {"--help"};
        int status = EXIT_SUCCESS;
        struct card *cards;
        size_t count, found = 0;
        unsigned pid;

        for (int i = 1; i < argc; i++) {
                if (help_wanted(argv[0], argv[i]))
                        return EXIT_SUCCESS;
                if (strncmp(argv[i], "--", 2) == 0)
                        return unknown_flag(argv[0], argv[i], known, 1);
        }
        if (argc != 3) {
                complain("%s: needs a process id and a size", argv[0]);
                return STATUS_USAGE;
        }
        pid = parse_pid(argv[1]);
        if (!pid) {
                complain("%s: %s: not a process id", argv[0], argv[1]);
                return STATUS_USAGE;
        }
        if (!size_argument(argv[0], argv[2], 0, &(uint64_t){0}))
                return STATUS_USAGE;
        status = open_all(argv[0], &cards, &count);
        for (size_t i = 0; i < count && status == EXIT_SUCCESS; i++)
                for (size_t j = 0; j < cards[i].count && status == EXIT_SUCCESS; j++)
                        if (cards[i].members[j].same_namespace && cards[i].members[j].identity.pid == pid) {
                                found++;
                                status = change_one(argv[0], &cards[i], &cards[i].members[j], argv[2]);
                        }
        if (status == EXIT_SUCCESS && found == 0) {
                complain("%s: process %u does not run under gpureclaim", argv[0], pid);
                return EXIT_FAILURE;
        }
        return status;
}

int command_limit(int argc, char **argv)
{
        return change(argc, argv);
}

int command_threshold(int argc, char **argv)
{
        return change(argc, argv);
}

/* The rungs that a process can be asked for. -1: none of them. */
static int parse_level(const char *text)
{
        static const char *const words[] = {
#define WORD(id, word) word,
                GR_LEVELS(WORD)
#undef WORD
        };

        for (int i = GR_LEVEL_PURGE; i <= GR_LEVEL_DROP; i++)
                if (strcmp(words[i], text) == 0)
                        return i;
        return -1;
}

static int reclaim_from(struct card *card, const struct gr_member *member, int level)
{
        const struct gr_request request = {.want_bytes = UINT64_C(1) << 50, .level = (uint32_t)level};
        char a[GR_SIZE_TEXT_BYTES];
        uint64_t given;
        int rc = card_request(card, member, &request, &given);

        if (rc) {
                complain("reclaim: process %u: %s", member->identity.pid, failure(rc));
                return EXIT_FAILURE;
        }
        printf("%u %s: %s came back\n", member->identity.pid, member->name, gr_size_format(given, a, sizeof(a)));
        return EXIT_SUCCESS;
}

int command_reclaim(int argc, char **argv)
{
        static const char *const known[] = {"--all", "--level", "--help"};
        int level = GR_LEVEL_TRIM, status;
        bool all = false;
        struct card *cards;
        size_t count, found = 0;
        unsigned pid = 0;

        for (int i = 1; i < argc; i++) {
                if (help_wanted("reclaim", argv[i]))
                        return EXIT_SUCCESS;
                if (strcmp(argv[i], "--all") == 0) {
                        all = true;
                } else if (strcmp(argv[i], "--level") == 0) {
                        level = i + 1 < argc ? parse_level(argv[++i]) : -1;
                        if (level < 0) {
                                complain("reclaim: --level needs purge, trim, driver, sync or drop");
                                return STATUS_USAGE;
                        }
                } else if (argv[i][0] == '-') {
                        return unknown_flag("reclaim", argv[i], known, 3);
                } else if (pid || !(pid = parse_pid(argv[i]))) {
                        complain("reclaim: %s: not a process id", argv[i]);
                        return STATUS_USAGE;
                }
        }
        if (all == (pid != 0)) {
                complain("reclaim: needs a process id or --all");
                return STATUS_USAGE;
        }
        status = open_all("reclaim", &cards, &count);
        for (size_t i = 0; i < count; i++)
                for (size_t j = 0; j < cards[i].count; j++) {
                        struct gr_member *member = &cards[i].members[j];

                        if (!all && !(member->same_namespace && member->identity.pid == pid))
                                continue;
                        found++;
                        if (reclaim_from(&cards[i], member, level) != EXIT_SUCCESS)
                                status = EXIT_FAILURE;
                }
        if (status == EXIT_SUCCESS && found == 0 && pid) {
                complain("reclaim: process %u does not run under gpureclaim", pid);
                return EXIT_FAILURE;
        }
        return status;
}
