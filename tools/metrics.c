/* gpureclaim metrics: what status shows, for Prometheus. */
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "command.h"
#include "driver/nvml.h"
#include "gpus.h"
#include "metrics.h"

/* Of what there is one sample: of all, of each GPU, group on a GPU, process, or process of which only NVML tells. */
enum scope { SCOPE_ALL, SCOPE_GPU, SCOPE_GROUP, SCOPE_PROCESS, SCOPE_OTHER };

/* All that was found. */
struct found {
        struct gpu *gpus;
        size_t count, other_files;
};

/* What a sample is of. */
struct subject {
        const struct found *found;
        const struct gpu *gpu;
        const struct gr_member *member;
        const struct gr_nvml_use *use;
};

/* A metric is a gauge, or a counter where its name ends with _total; the unit is in its name. NAN: no sample. */
struct metric {
        enum scope scope;
        const char *name, *help;
        double (*value)(const struct subject *of, enum gr_figure figure);
        enum gr_figure figure;
};

static double bytes_or_none(uint64_t bytes)
{
        return bytes == UINT64_MAX ? NAN : (double)bytes;
}

static double figure_value(const struct subject *of, enum gr_figure figure)
{
        uint64_t figures[GR_FIGURE_COUNT];

        member_figures(of->gpu, of->member, figures);
        return bytes_or_none(gr_figure_told(figure, figures[figure]));
}

static double figure_seconds(const struct subject *of, enum gr_figure figure)
{
        return figure_value(of, figure) / 1e9;
}

#define VALUE(name, expression)                                                                                        \
        static double name(const struct subject *of, enum gr_figure figure)                                            \
        {                                                                                                              \
                (void)figure;                                                                                          \
                return expression;                                                                                     \
        }
VALUE(other_files, (double)of->found->other_files)
VALUE(gpu_total, of->gpu->total_bytes ? (double)of->gpu->total_bytes : NAN)
VALUE(gpu_used, of->gpu->total_bytes ? (double)of->gpu->used_bytes : NAN)
VALUE(foreign_bytes, of->gpu->total_bytes ? (double)gpu_others_bytes(of->gpu) : NAN)
VALUE(member_share, of->member->share)
VALUE(idle_seconds, member_idle_s(of->gpu, of->member))
VALUE(given_bytes, (double)of->member->given_bytes)
VALUE(other_used, bytes_or_none(of->use->bytes))

static const struct metric metrics[] = {
        {SCOPE_ALL, "other_files", "files of another version, or of something else, in GPURECLAIM_REGION_DIR",
         other_files},
        {SCOPE_GPU, "gpu_memory_bytes", "memory of the GPU", gpu_total},
        {SCOPE_GPU, "gpu_memory_used_bytes", "memory of the GPU that is in use, by anybody", gpu_used},
        {SCOPE_GROUP, "group_foreign_bytes", "used memory of the GPU that is not reserved by the group", foreign_bytes},
#define GR_FIGURE(name, kind, where, words, help, value)                                                               \
        {SCOPE_PROCESS, "process_" #name "_bytes", help, figure_value, GR_FIGURE_##name},
#define GR_FIGURE_NUMBER(name, kind, help, value)                                                                      \
        {SCOPE_PROCESS, "process_" #name, help, figure_value, GR_FIGURE_##name},
#define GR_FIGURE_TIME(name, words, help, value)                                                                       \
        {SCOPE_PROCESS, "process_" #name "_seconds", help, figure_seconds, GR_FIGURE_##name},
#include "account/figures.def"
#undef GR_FIGURE_TIME
#undef GR_FIGURE_NUMBER
#undef GR_FIGURE
        {SCOPE_PROCESS, "process_share", "share of the process (GPURECLAIM_SHARE)", member_share},
        {SCOPE_PROCESS, "process_idle_seconds", "since the process last did something with its memory", idle_seconds},
        {SCOPE_PROCESS, "process_given_bytes_total", "memory given back for other processes, cached or asleep",
         given_bytes},
        {SCOPE_OTHER, "other_process_used_bytes", "used by a process that is not of the group", other_used},
};

static void put_label(FILE *file, const char *name, const char *value)
{
        fprintf(file, ",%s=\"", name);
        /* No line ends: a region's names are printable. */
        for (; *value; value++)
                fprintf(file, "%s%c", strchr("\\\"", *value) ? "\\" : "", *value);
        putc('"', file);
}

static void put_sample(FILE *file, const struct metric *metric, const struct subject *of)
{
        double value = metric->value(of, metric->figure);
        int index = of->gpu ? of->gpu->index : -1;

        if (isnan(value))
                return;
        fprintf(file, "gpureclaim_%s", metric->name);
        if (of->gpu)
                fprintf(file, "{uuid=\"%s\"", of->gpu->uuid);
        if (index >= 0)
                fprintf(file, ",gpu=\"%d\"", index);
        if (metric->scope >= SCOPE_GROUP)
                put_label(file, "group", of->gpu->group);
        if (metric->scope >= SCOPE_GROUP && of->gpu->user[0])
                put_label(file, "user", of->gpu->user);
        if (of->member) {
                /* Processes of two containers may have the same pid. */
                fprintf(file, ",pid=\"%u\",pid_namespace=\"%llu\"", of->member->identity.pid,
                        (unsigned long long)of->member->identity.pid_namespace);
                put_label(file, "command", of->member->name);
        }
        if (of->use)
                fprintf(file, ",pid=\"%u\"", of->use->pid);
        fprintf(file, "%s %.15g\n", of->gpu ? "}" : "", value);
}

/* One of several groups on a GPU speaks for it. */
static bool speaks_for_gpu(const struct found *found, size_t i)
{
        for (size_t j = 0; j < found->count; j++)
                if (j != i && strcmp(found->gpus[j].uuid, found->gpus[i].uuid) == 0 && found->gpus[j].total_bytes &&
                    (j < i || !found->gpus[i].total_bytes))
                        return false;
        return true;
}

/* NVML may list a process for each part of a GPU; no series may be there twice. */
static bool is_listed_before(const struct gpu *gpu, size_t use)
{
        for (size_t i = 0; i < use; i++)
                if (gpu->uses[i].pid == gpu->uses[use].pid)
                        return true;
        return false;
}

static void put_samples(FILE *file, const struct metric *metric, const struct found *found)
{
        if (metric->scope == SCOPE_ALL)
                put_sample(file, metric, &(struct subject){found});
        for (size_t i = 0; metric->scope != SCOPE_ALL && i < found->count; i++) {
                const struct gpu *gpu = &found->gpus[i];

                if (metric->scope == SCOPE_GROUP || (metric->scope == SCOPE_GPU && speaks_for_gpu(found, i)))
                        put_sample(file, metric, &(struct subject){found, gpu});
                for (size_t j = 0; metric->scope == SCOPE_PROCESS && j < gpu->count; j++)
                        put_sample(file, metric, &(struct subject){found, gpu, &gpu->members[j]});
                for (size_t j = 0; metric->scope == SCOPE_OTHER && j < gpu->use_count; j++)
                        if (!gpu_has_member(gpu, gpu->uses[j].pid) && !is_listed_before(gpu, j))
                                put_sample(file, metric, &(struct subject){found, gpu, .use = &gpu->uses[j]});
        }
}

static bool ends_with(const char *text, size_t length, const char *end)
{
        return length >= strlen(end) && memcmp(text + length - strlen(end), end, strlen(end)) == 0;
}

static void put_metric(FILE *file, bool open_metrics, const struct metric *metric, const struct found *found)
{
        static const char total[] = "_total";
        size_t length = strlen(metric->name);
        bool counter = ends_with(metric->name, length, total);
        /* In OpenMetrics only the samples of a counter have the suffix, in Prometheus' format its type has it too. */
        size_t family = length - (counter ? strlen(total) : 0);
        int shown = (int)(open_metrics ? family : length);
        const char *unit = ends_with(metric->name, family, "_bytes")     ? "bytes"
                           : ends_with(metric->name, family, "_seconds") ? "seconds"
                                                                         : NULL;

        fprintf(file, "# HELP gpureclaim_%.*s %c%s.\n", shown, metric->name, metric->help[0] - 'a' + 'A',
                metric->help + 1);
        fprintf(file, "# TYPE gpureclaim_%.*s %s\n", shown, metric->name, counter ? "counter" : "gauge");
        if (open_metrics && unit)
                fprintf(file, "# UNIT gpureclaim_%.*s %s\n", shown, metric->name, unit);
        put_samples(file, metric, found);
}

/* Whether each process has a metric of the figure: not if it is the GPU's, nor if the region lacks it. */
static bool is_told(enum gr_figure figure)
{
        return figure == GR_FIGURE_reserved ||
               (figure < GR_SHARED_FIGURES && gr_figure_table[figure].kind != GR_FIGURE_KIND_DEVICE);
}

const char *make_metrics(bool open_metrics, char **ret_page, size_t *ret_length)
{
        struct found found;
        FILE *file;
        int rc = gpus_open(true, &found.gpus, &found.count, &found.other_files);

        if (rc)
                return strerror(-rc);
        file = open_memstream(ret_page, ret_length);
        for (size_t i = 0; i < found.count; i++)
                gpu_read(&found.gpus[i], true);
        for (size_t i = 0; file && i < sizeof(metrics) / sizeof(metrics[0]); i++)
                if (metrics[i].value != figure_value || is_told(metrics[i].figure))
                        put_metric(file, open_metrics, &metrics[i], &found);
        if (file && open_metrics)
                fputs("# EOF\n", file);
        rc = !file;
        if (file && fclose(file) != 0)
                rc = 1;
        gpus_close(found.gpus, found.count);
        return rc ? strerror(ENOMEM) : NULL;
}

/* 0 or -errno. */
static int replace_file(const char *path, const char *page, size_t length)
{
        char *name;
        int error = 0, fd = begin_file(path, &name);
        FILE *file = fd >= 0 ? fdopen(fd, "w") : NULL;

        if (fd < 0)
                return fd;
        if (!file || fwrite(page, 1, length, file) != length || fflush(file) != 0)
                error = errno;
        if (file)
                fclose(file);
        return end_file(path, name, error);
}

int command_metrics(const struct arguments *arguments)
{
        const char *path = flag_value(arguments, "output"), *wrong;
        size_t length;
        char *page;
        int error;

        wrong = make_metrics(!flag_value(arguments, "prometheus"), &page, &length);
        if (wrong) {
                gpus_unread("metrics", wrong);
                return EXIT_FAILURE;
        }
        if (!path || strcmp(path, "-") == 0) {
                fwrite(page, 1, length, stdout);
                return EXIT_SUCCESS;
        }
        error = replace_file(path, page, length);
        if (error)
                complain("metrics: %s: %s", path, error == -EINVAL ? "not a regular file" : strerror(-error));
        return error ? EXIT_FAILURE : EXIT_SUCCESS;
}
