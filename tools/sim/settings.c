/* Settings from the environment: devices, memory, and what else struct sim_config has. */
#include "sim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static pthread_once_t read_once = PTHREAD_ONCE_INIT;
static struct sim_config config = {.devices = 1, .memory_bytes = (size_t)4 << 30, .pitch_bytes = 512};

void sim_complain(const char *variable, const char *value)
{
        fprintf(stderr, "sim: %s: cannot use '%s', ignored\n", variable, value);
}

static bool read_size(const char *text, size_t *ret_bytes)
{
        static const struct {
                const char *word;
                unsigned shift;
        } units[] = {{"", 0}, {"B", 0}, {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
        char *end;
        unsigned long long n;

        errno = 0;
        n = strtoull(text, &end, 10);
        if (end == text || errno || *text == '-')
                return false;
        while (*end == ' ')
                end++;
        for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
                if (strcasecmp(end, units[i].word) == 0 && n <= SIZE_MAX >> units[i].shift) {
                        *ret_bytes = (size_t)n << units[i].shift;
                        return true;
                }
        }
        return false;
}

/* Whether this descriptor of a process is the file that gpureclaim run --sim has made for all of its processes. */
static bool is_of_run(const char *path)
{
        static const char file[] = "/memfd:gpureclaim-sim";
        char link[sizeof file];

        return readlink(path, link, sizeof link) >= (ssize_t)(sizeof file - 1) &&
               memcmp(link, file, sizeof file - 1) == 0;
}

static bool read_lack(char *word)
{
        char *end;
        long attribute = strtol(word, &end, 10);

        if (*end || attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX)
                return false;
        config.lacks[attribute] = true;
        return true;
}

void sim_read_list(const char *variable, bool (*read_word)(char *))
{
        const char *value = getenv(variable);
        char word[256];

        while (value && *value) {
                size_t length = strcspn(value, ",");

                if (length >= sizeof word) {
                        sim_complain(variable, value);
                        return;
                }
                memcpy(word, value, length);
                word[length] = '\0';
                if (length && !read_word(word)) {
                        memcpy(word, value, length);
                        sim_complain(variable, word);
                }
                value += length + (value[length] == ',');
        }
}

/* As the driver does: a list of numbers, which ends before the first entry that is invalid or there already. */
static void read_visible(const char *text)
{
        int count = 0, gpus = config.devices;

        for (int i = 0; i < gpus; i++)
                config.physical[i] = i;
        if (!text)
                return;
        while (count < gpus) {
                char *end;
                long gpu = strtol(text, &end, 10);
                bool again = false;

                for (int i = 0; i < count; i++)
                        again |= config.physical[i] == gpu;
                if (end == text || gpu < 0 || gpu >= gpus || again)
                        break;
                config.physical[count++] = (int)gpu;
                if (*end != ',')
                        break;
                text = end + 1;
        }
        config.devices = count;
}

static void read_own(const char *variable, size_t *ret_bytes)
{
        const char *value = getenv(variable);

        if (value && !read_size(value, ret_bytes))
                sim_complain(variable, value);
}

static void read_environment(void)
{
        const char *value = getenv("GRSIM_DEVICES");
        size_t bytes;

        if (value) {
                long n = strtol(value, NULL, 10);

                if (n >= 0 && n <= SIM_MAX_DEVICES && *value)
                        config.devices = (int)n;
                else
                        sim_complain("GRSIM_DEVICES", value);
        }
        read_visible(getenv("CUDA_VISIBLE_DEVICES"));
        value = getenv("GRSIM_MEMORY");
        if (value) {
                if (read_size(value, &bytes) && bytes >= SIM_PAGE_BYTES)
                        config.memory_bytes = bytes / SIM_PAGE_BYTES * SIM_PAGE_BYTES;
                else
                        sim_complain("GRSIM_MEMORY", value);
        }
        read_own("GRSIM_CONTEXT", &config.context_bytes);
        read_own("GRSIM_MODULE", &config.module_bytes);
        read_own("GRSIM_EXECUTABLE", &config.executable_bytes);
        value = getenv("GRSIM_PITCH");
        if (value) {
                if (read_size(value, &bytes) && bytes > 0)
                        config.pitch_bytes = bytes;
                else
                        sim_complain("GRSIM_PITCH", value);
        }
        value = getenv("GRSIM_RDMA");
        config.rdma = value && strcmp(value, "1") == 0;
        value = getenv("GRSIM_SHARED");
        if (value && strncmp(value, "/proc/", 6) == 0 && !is_of_run(value))
                sim_complain("GRSIM_SHARED", value); /* that program has ended, or closed the file */
        else if (value && *value)
                config.shared = strdup(value);
        sim_read_list("GRSIM_LACKS", read_lack);
        sim_read_faults();
}

const struct sim_config *sim_config(void)
{
        pthread_once(&read_once, read_environment);
        return &config;
}
