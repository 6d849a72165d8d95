/* gpureclaim wait: start a program once the GPU has room for it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/size.h"
#include "command.h"
#include "gpus.h"
#include "system/options_file.h"
#include "system/platform.h"

#define PAUSE_US 200000

/*
 * What a program with the library could get on the GPU: what is free, and what other processes of its group have
 * cached, which they give back when asked. False: not known, because NVML is missing, and no process with the library
 * uses the GPU, or it is named by a number that could be another one's.
 */
static bool find_room(const char *gpu, const char *group, uint64_t *ret_bytes)
{
        uint64_t free_bytes = 0, total = 0, cached = 0;
        struct gpu *gpus = NULL;
        size_t count, other;
        char uuid[37] = "-"; /* or the beginning of it; "-": not known */
        bool known = gpu_read_free(gpu, &free_bytes, uuid) == 0;

        if (gpus_open(false, &gpus, &count, &other) != 0)
                count = 0;
        if (uuid[0] == '-' && strlen(gpu) > 4) /* "GPU-..." */
                snprintf(uuid, sizeof(uuid), "%s", gpu + 4);
        else if (uuid[0] == '-' && count > 0 && !strcmp(gpu, "0") && !strcmp(gpus[0].uuid, gpus[count - 1].uuid))
                memcpy(uuid, gpus[0].uuid, sizeof(uuid)); /* the only one in use */
        for (size_t i = 0; i < count; i++) {
                if (strncmp(gpus[i].uuid, uuid, strlen(uuid)) != 0)
                        continue;
                if (!known)
                        gpu_read(&gpus[i], true);
                total = gpus[i].total_bytes;
                if (!known && total)
                        free_bytes = total - gpus[i].used_bytes;
                for (size_t j = 0; !strcmp(gpus[i].group, group) && j < gpus[i].count; j++)
                        cached += gpus[i].members[j].figures[GR_FIGURE_cached];
        }
        gpus_close(gpus, count);
        *ret_bytes = free_bytes + cached;
        return known || total > 0;
}

/* The GPU that is device 0 for the program. */
static const char *first_gpu(void)
{
        static char first[96] = "0";
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");

        if (visible && visible[0] && strcspn(visible, ",") < sizeof(first))
                snprintf(first, sizeof(first), "%.*s", (int)strcspn(visible, ","), visible);
        return first;
}

int command_wait(const struct arguments *arguments)
{
        const char *free_text = flag_value(arguments, "free"), *gpu = flag_value(arguments, "gpu");
        const char *timeout = flag_value(arguments, "timeout");
        char uuid[37];
        uint64_t have, timeout_ns = UINT64_MAX, begin = gr_platform_now_ns();
        static struct gr_options options;
        struct gr_size want;
        bool known;

        if (!free_text) {
                complain("wait: needs --free SIZE");
                return STATUS_USAGE;
        }
        if (gr_size_parse(free_text, &want) != 0 || want.is_percent || want.bytes == 0 || want.bytes == GR_SIZE_NONE) {
                complain("wait: --free %s: not understood (expected a size such as 20GiB or 512MB)", free_text);
                return STATUS_USAGE;
        }
        if (gpu && strspn(gpu, "0123456789") != strlen(gpu) && strncmp(gpu, "GPU-", 4) != 0 &&
            strncmp(gpu, "MIG-", 4) != 0) {
                complain("wait: --gpu %s: not understood (expected a number, GPU-... or MIG-...)", gpu);
                return STATUS_USAGE;
        }
        if (timeout && gr_duration_parse(timeout, &timeout_ns) != 0) {
                complain("wait: --timeout %s: not understood (expected a time such as 90s)", timeout);
                return STATUS_USAGE;
        }
        if (gpu && gpu_read_free(gpu, &have, uuid) == -ENODEV) {
                complain("wait: --gpu %s: no such GPU", gpu);
                return STATUS_USAGE;
        }
        if (!gpu)
                gpu = first_gpu();
        gr_options_read(&options, NULL, NULL);
        while ((known = find_room(gpu, options.group.text, &have)) && have < want.bytes) {
                if (gr_platform_now_ns() - begin >= timeout_ns) {
                        char a[GR_SIZE_TEXT_BYTES], b[GR_SIZE_TEXT_BYTES];

                        complain("wait: the time is up, and only %s of %s are free or cached",
                                 gr_size_format(have, a, sizeof(a)), gr_size_format(want.bytes, b, sizeof(b)));
                        return STATUS_TIME_IS_UP;
                }
                usleep(PAUSE_US);
        }
        if (!known)
                complain("wait: it is not known what is free on GPU %s: starts at once", gpu);
        return become("wait", arguments->rest);
}
