/* gpureclaim limit, threshold, reclaim, sleep: orders to running processes. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/ladder_rungs.h"
#include "base/options.h"
#include "base/size.h"
#include "command.h"
#include "gpus.h"
#include "system/platform.h"

#define SLEEP_NS       UINT64_C(10000000000) /* how long a busy process is asked again and again */
#define SLEEP_PAUSE_US 20000

unsigned parse_pid(const char *text)
{
        char *end;
        unsigned long pid = strtoul(text, &end, 10);

        return *text >= '0' && *text <= '9' && !*end && pid < 1u << 22 ? (unsigned)pid : 0;
}

/* Opens all GPUs. EXIT_SUCCESS, or the exit status for the error, which it has printed. */
static int open_all(const char *command, struct gpu **ret_gpus, size_t *ret_count)
{
        size_t other;
        int rc = gpus_open(true, ret_gpus, ret_count, &other);

        if (rc)
                gpus_unread(command, strerror(-rc));
        return rc ? EXIT_FAILURE : EXIT_SUCCESS;
}

static int not_there(const char *command, unsigned pid)
{
        complain("%s: process %u does not run under gpureclaim, or is not yours", command, pid);
        return EXIT_FAILURE;
}

static int change_one(const char *command, struct gpu *gpu, struct gr_member *member, const char *text)
{
        bool limit = strcmp(command, "limit") == 0;
        struct gr_request request = {.orders = limit ? GR_ORDER_LIMIT : GR_ORDER_THRESHOLD};
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], c[GR_SIZE_TEXT_BYTES];
        uint64_t bytes, given, live, total;
        int rc;

        if (!size_argument(command, text, member->figures[GR_FIGURE_device_total], &bytes))
                return STATUS_USAGE;
        if (limit && bytes < (uint64_t)gr_option_table[GR_OPTION_HARD_LIMIT].min) {
                complain("limit: %s: out of range (from 2MiB)", text);
                return STATUS_USAGE;
        }
        request.new_limit = request.new_threshold = bytes;
        rc = gpu_request(gpu, member, &request, &given);
        if (rc) {
                complain("%s: process %u: %s", command, member->identity.pid, gpu_request_failure(rc));
                return EXIT_FAILURE;
        }
        gr_region_read(&gpu->region, member->slot, member);
        live = member->figures[GR_FIGURE_live];
        total = member->figures[GR_FIGURE_device_total];
        printf("%u %s: %s now %s; %s live, %s cached\n", member->identity.pid, member->name,
               limit ? "hard limit" : "release threshold", gr_size_format(bytes, a, sizeof(a)),
               gr_size_format(live, b, sizeof(b)), gr_size_format(member->figures[GR_FIGURE_cached], c, sizeof(c)));
        if (limit && bytes < live)
                printf("  The program has more than that: it keeps it, and its next allocation fails.\n");
        if (limit && bytes != GR_SIZE_NONE && total > 0 && bytes > total)
                printf("  The GPU has %s: that limits nothing.\n", gr_size_format(total, a, sizeof(a)));
        return EXIT_SUCCESS;
}

static int change_process(const struct arguments *arguments)
{
        const char *command = arguments->command, *size = arguments->rest[1];
        struct gpu *gpus;
        size_t count, found = 0;
        unsigned pid;
        int status;

        if (arguments->count != 2) {
                if (arguments->count > 2)
                        complain("%s: %s: takes one process id and one size", command, arguments->rest[2]);
                else
                        complain("%s: needs a process id and a size, such as gpureclaim %s 1234 4GiB", command,
                                 command);
                return STATUS_USAGE;
        }
        pid = parse_pid(arguments->rest[0]);
        if (!pid) {
                complain("%s: %s: not a process id", command, arguments->rest[0]);
                return STATUS_USAGE;
        }
        if (!size_argument(command, size, 0, &(uint64_t){0}))
                return STATUS_USAGE;
        status = open_all(command, &gpus, &count);
        for (size_t i = 0; i < count && status == EXIT_SUCCESS; i++)
                for (size_t j = 0; j < gpus[i].count && status == EXIT_SUCCESS; j++)
                        if (gpus[i].members[j].same_namespace && gpus[i].members[j].identity.pid == pid) {
                                found++;
                                status = change_one(command, &gpus[i], &gpus[i].members[j], size);
                        }
        if (status == EXIT_SUCCESS && found == 0)
                status = not_there(command, pid);
        return status;
}

int command_limit(const struct arguments *arguments)
{
        return change_process(arguments);
}

int command_threshold(const struct arguments *arguments)
{
        return change_process(arguments);
}

/* A rung that a process can be asked for; -1: none of them. */
static int parse_rung(const char *text)
{
        static const char *const words[] = {
#define WORD(id, word) word,
                GR_RUNGS(WORD)
#undef WORD
        };

        for (int i = GR_RUNG_PURGE; i <= GR_RUNG_DROP; i++)
                if (strcmp(words[i], text) == 0)
                        return i;
        return -1;
}

static int reclaim_from(struct gpu *gpu, const struct gr_member *member, int rung)
{
        const struct gr_request request = {.want_bytes = UINT64_C(1) << 50, .rung = (uint32_t)rung};
        char a[GR_SIZE_TEXT_BYTES];
        uint64_t given;
        int rc = gpu_request(gpu, member, &request, &given);

        if (rc) {
                complain("reclaim: process %u: %s", member->identity.pid, gpu_request_failure(rc));
                return EXIT_FAILURE;
        }
        printf("%u %s: %s came back\n", member->identity.pid, member->name, gr_size_format(given, a, sizeof(a)));
        return EXIT_SUCCESS;
}

int command_reclaim(const struct arguments *arguments)
{
        const char *text = flag_value(arguments, "rung");
        int rung = text ? parse_rung(text) : GR_RUNG_TRIM, status;
        bool all = flag_value(arguments, "all");
        struct gpu *gpus;
        size_t count, found = 0;
        unsigned pid = 0;

        if (rung < 0) {
                complain("reclaim: --rung %s: not understood (expected purge, trim, driver, sync or drop)", text);
                return STATUS_USAGE;
        }
        if (arguments->count != !all) {
                if (arguments->count > 1)
                        complain("reclaim: %s: takes one process id", arguments->rest[1]);
                else
                        complain("reclaim: needs a process id or --all, and not both");
                return STATUS_USAGE;
        }
        if (!all && !(pid = parse_pid(arguments->rest[0]))) {
                complain("reclaim: %s: not a process id", arguments->rest[0]);
                return STATUS_USAGE;
        }
        status = open_all("reclaim", &gpus, &count);
        for (size_t i = 0; i < count; i++)
                for (size_t j = 0; j < gpus[i].count; j++) {
                        struct gr_member *member = &gpus[i].members[j];

                        if (all ? gpus[i].user[0] != '\0' : !(member->same_namespace && member->identity.pid == pid))
                                continue;
                        found++;
                        if (reclaim_from(&gpus[i], member, rung) != EXIT_SUCCESS)
                                status = EXIT_FAILURE;
                }
        if (status == EXIT_SUCCESS && found == 0 && pid)
                status = not_there("reclaim", pid);
        return status;
}

/* Why a process does not sleep deeply. */
static const char *refusal_text(uint64_t reason, char *text, size_t bytes)
{
#define WORDS(id, words) [id] = (words),
        static const char *const words[] = {GR_DEEP_REASONS(WORDS)};
#undef WORDS

        if (reason < sizeof(words) / sizeof(words[0]) && words[reason])
                return words[reason];
        snprintf(text, bytes, "the driver's cuCheckpointProcess%s answered %u",
                 reason < GR_DEEP_AT_CHECKPOINT ? "Lock" : "Checkpoint", (unsigned)(reason % GR_DEEP_AT_LOCK));
        return text;
}

/* Whether it may sleep deeply in a moment. */
static bool may_change(uint64_t reason)
{
        return reason == GR_DEEP_IS_BUSY || reason / GR_DEEP_AT_LOCK == 1;
}

/*
 * Asks one process until it sleeps, or the time is up; with deep until it sleeps deeply, or says why it does not.
 * *ret_bytes: what is asleep of it on this GPU.
 */
static int sleep_one(struct gpu *gpu, struct gr_member *member, bool deep, uint64_t until_ns, uint64_t *ret_bytes)
{
        const struct gr_request request = {.orders = deep ? GR_ORDER_SLEEP | GR_ORDER_SLEEP_DEEP : GR_ORDER_SLEEP};
        bool begun = false; /* it obeys an order of before, and so does not answer this one */
        uint64_t given;
        int rc;

        for (;;) {
                rc = gpu_request(gpu, member, &request, &given);
                begun |= rc == -EALREADY;
                if (rc == -ESRCH || gr_region_read(&gpu->region, member->slot, member) != 0)
                        return -ESRCH;
                *ret_bytes = member->figures[GR_FIGURE_asleep];
                if (rc == 0 && (member->figures[GR_FIGURE_asleep_deep] > 0 || (*ret_bytes > 0 && !deep) ||
                                (member->figures[GR_FIGURE_live] == 0 && !(deep && member->deep_refusal))))
                        return 0;
                if (rc == 0 && deep && member->deep_refusal && !may_change(member->deep_refusal))
                        return -EPERM;
                if (gr_platform_now_ns() >= until_ns)
                        return begun ? -EALREADY : rc ? rc : -EBUSY;
                usleep(SLEEP_PAUSE_US);
        }
}

int command_sleep(const struct arguments *arguments)
{
        const char *timeout = flag_value(arguments, "timeout");
        uint64_t timeout_ns = SLEEP_NS, until_ns, bytes = 0, more;
        char text[GR_SIZE_TEXT_BYTES], more_text[GR_SIZE_TEXT_BYTES], why[80];
        bool deep = flag_value(arguments, "deep");
        struct gpu *gpus;
        size_t count, found = 0;
        unsigned pid = 0;
        int status, rc;

        if (timeout && gr_duration_parse(timeout, &timeout_ns) != 0) {
                complain("sleep: --timeout %s: not understood (expected a time such as 90s)", timeout);
                return STATUS_USAGE;
        }
        if (arguments->count != 1) {
                if (arguments->count > 1)
                        complain("sleep: %s: takes one process id", arguments->rest[1]);
                else
                        complain("sleep: needs a process id");
                return STATUS_USAGE;
        }
        if (!(pid = parse_pid(arguments->rest[0]))) {
                complain("sleep: %s: not a process id", arguments->rest[0]);
                return STATUS_USAGE;
        }
        status = open_all("sleep", &gpus, &count);
        until_ns = gr_platform_now_ns() + timeout_ns;
        for (size_t i = 0; i < count; i++)
                for (size_t j = 0; j < gpus[i].count; j++) {
                        struct gr_member *member = &gpus[i].members[j];

                        if (!member->same_namespace || member->identity.pid != pid)
                                continue;
                        found++;
                        rc = sleep_one(&gpus[i], member, deep, until_ns, &bytes);
                        if (rc == 0) {
                                more = member->figures[GR_FIGURE_asleep_deep];
                                printf("%u %s: %s asleep%s%s%s\n", pid, member->name,
                                       gr_size_format(bytes, text, sizeof(text)), more ? ", deeply: " : "",
                                       more ? gr_size_format(more, more_text, sizeof(more_text)) : "",
                                       more ? " more off the GPU" : "");
                                continue;
                        }
                        if (deep && (rc == -EPERM || rc == -EBUSY) && member->deep_refusal)
                                complain("sleep: process %u: it %s: %s", pid,
                                         bytes > 0 ? "sleeps, but not deeply" : "does not sleep deeply",
                                         refusal_text(member->deep_refusal, why, sizeof(why)));
                        else if (rc == -EALREADY)
                                complain("sleep: process %u: it has begun, and is not done in time: %s asleep so far "
                                         "(gpureclaim status)",
                                         pid, gr_size_format(bytes, text, sizeof(text)));
                        else if (rc == -EBUSY)
                                complain("sleep: process %u: it was busy all the time, has no memory that can leave "
                                         "the GPU, may not sleep (GPURECLAIM_SLEEP in docs/options.md), or the host "
                                         "has no room (GPURECLAIM_SLEEP_HOST, GPURECLAIM_SLEEP_DIR)",
                                         pid);
                        else
                                complain("sleep: process %u: %s", pid, gpu_request_failure(rc));
                        status = EXIT_FAILURE;
                }
        if (status == EXIT_SUCCESS && found == 0)
                status = not_there("sleep", pid);
        return status;
}
