/* gpureclaim status: who uses which GPU, and how much. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "base/log.h"
#include "base/size.h"
#include "command.h"
#include "gpus.h"

#define WATCH_US 1000000

static void print_member(const struct gpu *gpu, const struct gr_member *member)
{
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES];
        uint64_t figures[GR_FIGURE_COUNT], total;

        member_figures(gpu, member, figures);
        total = figures[GR_FIGURE_device_total];
        printf("  %u %s%s: reserved %.2f%% of the GPU (%s of %s), ", member->identity.pid, member->name,
               member->same_namespace ? "" : " (of another pid namespace)",
               total ? 100.0 * (double)member->reserved_bytes / (double)total : 0.0,
               gr_size_format(member->reserved_bytes, a, sizeof(a)), gr_size_format(total, b, sizeof(b)));
        if (figures[GR_FIGURE_waiting])
                printf("waiting for %s\n", gr_size_format(figures[GR_FIGURE_waiting], a, sizeof(a)));
        else
                printf("no allocation or free for %.1f s\n", member_idle_s(gpu, member));
        gr_figures_text(figures, gr_sink_file, stdout);
}

/* Whether these are two groups on one GPU; such groups are neighbours in the list. */
static bool same_gpu(const struct gpu *gpu, const struct gpu *other)
{
        return strcmp(gpu->uuid, other->uuid) == 0;
}

/* Prints what holds for a GPU, of which this is the first group. */
static void print_gpu(const struct gpu *gpu)
{
        char title[sizeof(gpu->uuid) + 8];
        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES], c[GR_SIZE_TEXT_BYTES];

        snprintf(title, sizeof(title), "GPU %s", gpu->uuid);
        puts(heading(title));
        if (gpu->total_bytes)
                printf("  memory: %s of %s used, %s not counted here (contexts, other programs)\n",
                       gr_size_format(gpu->used_bytes, a, sizeof(a)), gr_size_format(gpu->total_bytes, b, sizeof(b)),
                       gr_size_format(gpu_others_bytes(gpu), c, sizeof(c)));
        else
                printf("  memory: unknown\n");
}

/* Prints the processes on a GPU that are in none of its groups, of which this is one. */
static void print_others(const struct gpu *gpu)
{
        char size[GR_SIZE_TEXT_BYTES];

        for (size_t i = 0; i < gpu->use_count; i++) {
                bool member = false;

                for (size_t j = 0; j < gpu->all_count && !member; j++)
                        member = same_gpu(&gpu->all[j], gpu) && gpu_has_member(&gpu->all[j], gpu->uses[i].pid);
                if (!member)
                        printf("  %u (in no group of yours): %s\n", gpu->uses[i].pid,
                               gpu->uses[i].bytes == GR_SIZE_NONE
                                       ? "unknown"
                                       : gr_size_format(gpu->uses[i].bytes, size, sizeof(size)));
        }
}

static void write_member(struct gr_json *json, const struct gpu *gpu, const struct gr_member *member)
{
        uint64_t figures[GR_FIGURE_COUNT];

        gr_json_object(json, NULL);
        gr_json_number(json, "pid", "%u", member->identity.pid);
        gr_json_string(json, "name", member->name);
        gr_json_bool(json, "same_pid_namespace", member->same_namespace);
        gr_json_number(json, "share", "%u", member->share);
        member_figures(gpu, member, figures);
        gr_figure_json(json, GR_FIGURE_reserved, figures[GR_FIGURE_reserved]);
        for (enum gr_figure i = 0; i < GR_SHARED_FIGURES; i++)
                if (gr_figure_table[i].kind != GR_FIGURE_KIND_DEVICE) /* the GPU has these: gpu_total_bytes */
                        gr_figure_json(json, i, figures[i]);
        gr_json_number(json, "idle_s", "%.3f", member_idle_s(gpu, member));
        gr_json_close(json);
}

static void write_gpu(struct gr_json *json, const struct gpu *gpu)
{
        bool known = gpu->total_bytes > 0;

        gr_json_object(json, NULL);
        gr_json_string(json, "uuid", gpu->uuid);
        gr_json_string(json, "group", gpu->group);
        gr_json_number(json, "uid", "%lu", (unsigned long)gpu->region.user);
        gr_json_bytes(json, "gpu_total_bytes", known ? gpu->total_bytes : UINT64_MAX);
        gr_json_bytes(json, "gpu_used_bytes", known ? gpu->used_bytes : UINT64_MAX);
        gr_json_bytes(json, "foreign_bytes", known ? gpu_others_bytes(gpu) : UINT64_MAX);
        gr_json_array(json, "processes");
        for (size_t i = 0; i < gpu->count; i++)
                write_member(json, gpu, &gpu->members[i]);
        gr_json_close(json);
        gr_json_array(json, "others");
        for (size_t i = 0; i < gpu->use_count; i++) {
                if (gpu_has_member(gpu, gpu->uses[i].pid))
                        continue;
                gr_json_object(json, NULL);
                gr_json_number(json, "pid", "%u", gpu->uses[i].pid);
                gr_json_bytes(json, "used_bytes", gpu->uses[i].bytes);
                gr_json_close(json);
        }
        gr_json_close(json);
        gr_json_close(json);
}

static void print_json(const struct gpu *gpus, size_t count, size_t other)
{
        struct gr_json json;

        gr_json_begin(&json, gr_sink_file, stdout, 4);
        gr_json_object(&json, NULL);
        gr_json_number(&json, "schema", "1");
        gr_json_count(&json, "other_files", other);
        gr_json_array(&json, "gpus");
        for (size_t i = 0; i < count; i++)
                write_gpu(&json, &gpus[i]);
        gr_json_close(&json);
        gr_json_close(&json);
        gr_json_end(&json);
}

static void print_text(const struct gpu *gpus, size_t count, size_t other)
{
        char folder[GR_REGION_PATH_BYTES], user[72];
        bool by_default;
        int rc;

        for (size_t i = 0; i < count; i++) {
                if (i == 0 || !same_gpu(&gpus[i - 1], &gpus[i]))
                        print_gpu(&gpus[i]);
                printf("  group %s%s:\n", gpus[i].group, gpu_of_user(&gpus[i], user));
                for (size_t j = 0; j < gpus[i].count; j++)
                        print_member(&gpus[i], &gpus[i].members[j]);
                if (i + 1 == count || !same_gpu(&gpus[i + 1], &gpus[i]))
                        print_others(&gpus[i]);
        }
        if (count == 0)
                printf("No process of yours runs under gpureclaim on a GPU here.\n");
        if (count == 0 && gpus_folder(folder, &by_default) == 0 && !by_default && access(folder, X_OK) != 0) {
                rc = errno;
                gr_log_clean(folder, strlen(folder));
                printf("GPURECLAIM_REGION_DIR=%s: %s\n", folder, strerror(rc));
        }
        if (other > 0 && gpus_folder(folder, &by_default) == 0) {
                gr_log_clean(folder, strlen(folder));
                printf("Files in %s of other users, containers or versions of gpureclaim, or of something else: %zu\n",
                       folder, other);
        }
}

static int print_status(bool json)
{
        struct gpu *gpus;
        size_t count, other;
        int rc = gpus_open(true, &gpus, &count, &other);

        if (rc) {
                gpus_unread("status", strerror(-rc));
                return EXIT_FAILURE;
        }
        for (size_t i = 0; i < count; i++)
                gpu_read(&gpus[i], true);
        (json ? print_json : print_text)(gpus, count, other);
        gpus_close(gpus, count);
        return EXIT_SUCCESS;
}

/*
 * For a process that is about to come back from a deep sleep (shim/driver/deep_sleep.c), in which NVML does not answer:
 * a line with what is free on each GPU, and what the process holds there, or 0. wanted: its number and the UUIDs.
 */
static int print_room(const char *wanted)
{
        char line[64 * 2 * 21 + 1] = "", *uuid, *rest = NULL, *words = strdup(wanted);
        unsigned long pid = words && (uuid = strtok_r(words, ",", &rest)) ? strtoul(uuid, NULL, 10) : 0;
        struct gr_nvml_memory memory;
        uint64_t held;
        void *device;

        while (words && (uuid = strtok_r(NULL, ",", &rest))) {
                size_t length = strlen(line);

                if (gr_nvml_device(uuid, &device) != 0 || gr_nvml_memory(device, &memory) != 0)
                        return EXIT_FAILURE;
                if (gr_nvml_process(device, (uint32_t)pid, &held) != 0)
                        held = 0;
                snprintf(line + length, sizeof(line) - length, "%llu %llu ", memory.free, (unsigned long long)held);
        }
        puts(line);
        return EXIT_SUCCESS;
}

int command_status(const struct arguments *arguments)
{
        const char *terminal = getenv("TERM");
        bool clears = isatty(STDOUT_FILENO) && terminal && strcmp(terminal, "dumb") != 0;

        if (flag_value(arguments, "room"))
                return print_room(flag_value(arguments, "room"));
        if (!flag_value(arguments, "watch"))
                return print_status(flag_value(arguments, "json"));
        for (;;) { /* until a signal ends it, or nobody reads any more */
                if (clears)
                        fputs("\033[H\033[2J", stdout);
                if (print_status(flag_value(arguments, "json")) != EXIT_SUCCESS)
                        return EXIT_FAILURE;
                if (!clears)
                        putchar('\n');
                if (fflush(stdout) != 0)
                        return EXIT_FAILURE;
                usleep(WATCH_US);
        }
}
