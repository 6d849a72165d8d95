/* The options of this process. */
#include "system/environment.h"

#include <limits.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "system/options_file.h"

struct gr_options gr_options;

static void log_warning(const char *message, void *arg)
{
        gr_log_set_level(gr_options.log); /* all options are read before the first warning comes */
        gr_log_warn(message, arg);
}

void gr_environment_make_absolute(struct gr_path *path)
{
        size_t length = strlen(path->text);
        char folder[PATH_MAX];

        if (length == 0 || path->text[0] == '/' || !getcwd(folder, sizeof(folder)) ||
            strlen(folder) + 1 + length >= sizeof(path->text))
                return;
        memmove(path->text + strlen(folder) + 1, path->text, length + 1);
        memcpy(path->text, folder, strlen(folder));
        path->text[strlen(folder)] = '/';
}

static void load_options(void)
{
        gr_options_read(&gr_options, log_warning, NULL);
        gr_environment_make_absolute(&gr_options.region_dir);
        gr_log_set_level(gr_options.log);
}

void gr_environment_read(void)
{
        static pthread_once_t once = PTHREAD_ONCE_INIT;

        pthread_once(&once, load_options);
}
