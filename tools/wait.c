/* gpureclaim wait: start a program when the card has room for it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/size.h"
#include "cards.h"
#include "command.h"
#include "process/platform.h"

#define PAUSE_US 200000

/*
 * What a program under the library could get on the card: what is free, and what the others have cached, for that they
 * give. false: nobody uses the card under the library, and the driver's management library does not tell.
 */
static bool room(const char *device, uint64_t *ret_bytes)
{
        uint64_t free_bytes = 0, total = 0, cached = 0;
        unsigned long index = strtoul(device, NULL, 10);
        struct card *cards = NULL;
        size_t count, other;
        char uuid[37] = "";
        bool known = card_free(device, &free_bytes, uuid) == 0;

        if (cards_open(&cards, &count, &other) != 0)
                count = 0;
        for (size_t i = 0; i < count; i++) {
                if (known ? strcmp(cards[i].uuid, uuid) != 0 : i != index)
                        continue;
                if (!known)
                        card_read(&cards[i], true);
                total = cards[i].total_bytes;
                if (!known && total)
                        free_bytes = total - cards[i].used_bytes;
                for (size_t j = 0; j < cards[i].count; j++)
                        cached += cards[i].members[j].figures[GR_FIGURE_cached];
        }
        cards_close(cards, count);
        *ret_bytes = free_bytes + cached;
        return known || total > 0;
}

int command_wait(int argc, char **argv)
{
        static const char *const known[] = {"--free", "--device", "--timeout", "--help"};
        uint64_t want = 0, have, timeout_ns = UINT64_MAX, begin = gr_system_now_ns();
        const char *device = getenv("CUDA_VISIBLE_DEVICES");
        char first[96] = "0";
        bool wanted = false;
        int i = 1;

        /* The program's own first device, unless told otherwise. */
        if (device && device[0] && strcspn(device, ",") < sizeof(first))
                snprintf(first, sizeof(first), "%.*s", (int)strcspn(device, ","), device);
        device = first;

        while (i < argc && argv[i][0] == '-') {
                if (help_wanted("wait", argv[i]))
                        return EXIT_SUCCESS;
                if (strcmp(argv[i], "--") == 0) {
                        i++;
                        break;
                }
                if (strcmp(argv[i], "--free") != 0 && strcmp(argv[i], "--device") != 0 &&
                    strcmp(argv[i], "--timeout") != 0)
                        return unknown_flag("wait", argv[i], known, 4);
                if (i + 1 >= argc) {
                        complain("wait: %s needs a value", argv[i]);
                        return STATUS_USAGE;
                }
                if (argv[i][2] == 'f') {
                        if (!size_argument("wait", argv[i + 1], 0, &want))
                                return STATUS_USAGE;
                        wanted = want > 0 && want != GR_SIZE_NONE;
                } else if (argv[i][2] == 'd') {
                        device = argv[i + 1];
                        if (strspn(device, "0123456789") != strlen(device) && strncmp(device, "GPU-", 4) != 0 &&
                            strncmp(device, "MIG-", 4) != 0) {
                                complain("wait: --device %s: neither a number nor GPU-... or MIG-...", device);
                                return STATUS_USAGE;
                        }
                } else if (gr_duration_parse(argv[i + 1], &timeout_ns) != 0) {
                        complain("wait: --timeout %s: not understood (expected a time such as 90s)", argv[i + 1]);
                        return STATUS_USAGE;
                }
                i += 2;
        }
        if (!wanted || i >= argc) {
                complain("wait: needs --free SIZE in bytes and a program after --");
                return STATUS_USAGE;
        }
        while (room(device, &have) && have < want) {
                if (gr_system_now_ns() - begin >= timeout_ns) {
                        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES];

                        complain("wait: only %s of %s are to be had, and the time is up",
                                 gr_size_format(have, a, sizeof(a)), gr_size_format(want, b, sizeof(b)));
                        return EXIT_FAILURE;
                }
                usleep(PAUSE_US);
        }
        execvp(argv[i], argv + i);
        complain("wait: %s: %s", argv[i], strerror(errno));
        return errno == ENOENT ? STATUS_NOT_FOUND : STATUS_NOT_EXECUTABLE;
}
