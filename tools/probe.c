/* gpureclaim doctor: what the driver and the preloaded library say, each in a process of its own (doctor.h). */
#include <ctype.h>
#include <cuda.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/size.h"
#include "command.h"
#include "doctor.h"

#define DRIVER "libcuda.so.1"

/* Room for the names of all hooked symbols. */
#define NAMES_BYTES 8000

#define NAME_BYTES     64
#define VERSIONS_AHEAD 5 /* how many newer versions of a function are looked for */

/* The functions that the probes call, looked up by name: this program must start without a driver, too. */
struct driver {
        void *handle;
        CUresult (*init)(unsigned flags);
        CUresult (*version)(int *ret);
        CUresult (*error_name)(CUresult code, const char **ret);
        CUresult (*device_count)(int *ret);
        CUresult (*device)(CUdevice *ret, int ordinal);
        CUresult (*device_name)(char *ret, int length, CUdevice device);
        CUresult (*device_memory)(size_t *ret, CUdevice device);
};

/* Uses memcpy, as ISO C does not convert pointers to objects into pointers to functions. */
static bool find_function(void *handle, const char *name, void *ret_function)
{
        void *found = dlsym(handle, name);

        memcpy(ret_function, &found, sizeof(found));
        if (!found)
                doctor_say("driver", "fail", "%s lacks %s", DRIVER, name);
        return found != NULL;
}

static bool open_driver(struct driver *driver)
{
        driver->handle = dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL);
        if (!driver->handle) {
                doctor_say("driver", "fail", "%s", dlerror());
                return false;
        }
        return find_function(driver->handle, "cuInit", &driver->init) &&
               find_function(driver->handle, "cuDriverGetVersion", &driver->version) &&
               find_function(driver->handle, "cuGetErrorName", &driver->error_name) &&
               find_function(driver->handle, "cuDeviceGetCount", &driver->device_count) &&
               find_function(driver->handle, "cuDeviceGet", &driver->device) &&
               find_function(driver->handle, "cuDeviceGetName", &driver->device_name) &&
               find_function(driver->handle, "cuDeviceTotalMem_v2", &driver->device_memory);
}

static const char *advice_for(CUresult code)
{
        switch (code) {
        case CUDA_ERROR_NO_DEVICE:
                return "no GPU is visible";
        case CUDA_ERROR_STUB_LIBRARY:
                return "this is the toolkit's stub for linking, not a driver";
        case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
                return "library and kernel module are of different versions; restart after an upgrade";
        case CUDA_ERROR_SYSTEM_NOT_READY:
                return "the system is not ready; on NVSwitch machines the fabric manager must run";
        case CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE:
                return "the compatibility package does not support this GPU";
        case CUDA_ERROR_OPERATING_SYSTEM:
                return "the operating system refused; often permissions on /dev/nvidia*";
        default:
                return "see the driver's documentation";
        }
}

static bool driver_ok(const struct driver *driver, const char *call, CUresult code)
{
        const char *name = NULL;

        if (code == CUDA_SUCCESS)
                return true;
        driver->error_name(code, &name);
        doctor_say("driver", "fail", "%s: %s (%d): %s", call, name ? name : "unknown error", (int)code,
                   advice_for(code));
        return false;
}

static bool say_devices(const struct driver *driver)
{
        char topic[24], name[256], size[GR_SIZE_TEXT_BYTES];
        size_t total_bytes;
        CUdevice device;
        int count, i;

        if (!driver_ok(driver, "cuDeviceGetCount", driver->device_count(&count)))
                return false;
        for (i = 0; i < count; i++) {
                if (!driver_ok(driver, "cuDeviceGet", driver->device(&device, i)) ||
                    !driver_ok(driver, "cuDeviceGetName", driver->device_name(name, sizeof(name), device)) ||
                    !driver_ok(driver, "cuDeviceTotalMem", driver->device_memory(&total_bytes, device)))
                        return false;
                snprintf(topic, sizeof(topic), "GPU %d", i);
                doctor_say(topic, "ok", "%s, %s", name, gr_size_format(total_bytes, size, sizeof(size)));
        }
        if (count == 0)
                doctor_say("driver", "fail", "no GPU is visible");
        return count > 0;
}

static void say_fences(const struct driver *driver)
{
        if (dlsym(driver->handle, "cuCtxRecordEvent") && dlsym(driver->handle, "cuCtxWaitEvent"))
                doctor_say("fences", "ok", "cuCtxRecordEvent and cuCtxWaitEvent are there: reuse is fenced on the GPU");
        else
                doctor_say("fences", "note",
                           "no cuCtxRecordEvent (CUDA 12.5 and later): the context is synchronised "
                           "before freed memory is reused");
}

int probe_driver(void)
{
        struct driver driver;
        Dl_info where;
        int version = 0;

        if (!open_driver(&driver) || !driver_ok(&driver, "cuDriverGetVersion", driver.version(&version)))
                return EXIT_FAILURE;
        doctor_say("driver", "ok", "%s, CUDA %d.%d%s",
                   dladdr(dlsym(driver.handle, "cuInit"), &where) ? where.dli_fname : DRIVER, version / 1000,
                   version % 1000 / 10, dlsym(driver.handle, "grSimVersion") ? ", the simulated device" : "");
        if (!driver_ok(&driver, "cuInit", driver.init(0)) || !say_devices(&driver))
                return EXIT_FAILURE;
        say_fences(&driver);
        return EXIT_SUCCESS;
}

int count_gpus(const char *folder)
{
        CUresult (*init)(unsigned flags), (*device_count)(int *ret);
        int status, count = 0;
        pid_t pid = fork();

        if (pid == 0) {
                char path[PATH_MAX + sizeof(DRIVER)];
                void *handle, *found[2] = {NULL};

                snprintf(path, sizeof(path), "%s%s%s", folder ? folder : "", folder ? "/" : "", DRIVER);
                handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
                if (handle) {
                        found[0] = dlsym(handle, "cuInit");
                        found[1] = dlsym(handle, "cuDeviceGetCount");
                }
                memcpy(&init, &found[0], sizeof(init)); /* as in find_function */
                memcpy(&device_count, &found[1], sizeof(device_count));
                _exit(init && device_count && init(0) == CUDA_SUCCESS && device_count(&count) == CUDA_SUCCESS ? count
                                                                                                              : 0);
        }
        return pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

/* The names of one kind of symbol. */
struct names {
        char text[NAMES_BYTES];
        size_t length;
        size_t count;
};

static void names_add(struct names *names, const char *name)
{
        const int added = snprintf(names->text + names->length, sizeof(names->text) - names->length, " %s", name);

        names->count++;
        names->length += (size_t)added;
        if (names->length >= sizeof(names->text))
                names->length = sizeof(names->text) - 1;
}

static void say_names(const char *state, const struct names *names, const char *what)
{
        doctor_say("hooks", state, "%zu %s:", names->count, what);
        print_wrapped(16, names->text + 1); /* below what doctor_say has said */
}

static bool lies_in(void *address, const void *base)
{
        Dl_info where;

        return dladdr(address, &where) && where.dli_fbase == base;
}

/* The parts of a symbol's name: base, "_vN" except for version 1, and "_ptsz" or "_ptds" or nothing. */
struct versioned {
        char base[NAME_BYTES];
        long version;
        const char *form;
};

static struct versioned split_name(const char *symbol)
{
        struct versioned name = {.version = 1};
        const char *end = symbol + strlen(symbol), *v = end;

        name.form = end;
        if (end - symbol > 5 && (strcmp(end - 5, "_ptsz") == 0 || strcmp(end - 5, "_ptds") == 0))
                name.form = end = v = end - 5;
        while (v > symbol && isdigit((unsigned char)v[-1]))
                v--;
        if (v < end && v - symbol > 2 && v[-1] == 'v' && v[-2] == '_') {
                name.version = strtol(v, NULL, 10);
                end = v - 2;
        }
        snprintf(name.base, sizeof(name.base), "%.*s", (int)(end - symbol), symbol);
        return name;
}

static bool is_listed(const char *const *symbols, const char *name)
{
        for (; *symbols; symbols++)
                if (strcmp(*symbols, name) == 0)
                        return true;
        return false;
}

/* Adds the newer versions of a symbol that the driver has and the library does not know. */
static void find_newer(void *handle, const char *const *symbols, const char *symbol, struct names *newer)
{
        const struct versioned name = split_name(symbol);
        char later[2 * NAME_BYTES];

        for (long version = name.version + 1; version <= name.version + VERSIONS_AHEAD; version++) {
                snprintf(later, sizeof(later), "%s_v%ld%s", name.base, version, name.form);
                if (is_listed(symbols, later))
                        return; /* a listed symbol has a search of its own, for the versions after it */
                if (dlsym(handle, later))
                        names_add(newer, later);
        }
}

/* Looks up each hooked symbol as a program does, and tells which ones are the library's. */
static int say_hooks(const char *const *symbols, const void *library_base, bool name_symbols)
{
        static struct names taken, missed, absent, newer;
        const char *const *all = symbols;
        void *handle = dlopen(DRIVER, RTLD_NOW | RTLD_LOCAL);
        void *found;

        if (!handle) {
                doctor_say("hooks", "note", "without a driver there is nothing to hook");
                return EXIT_FAILURE;
        }
        for (; *symbols; symbols++) {
                found = dlsym(handle, *symbols);
                if (!found)
                        names_add(&absent, *symbols);
                else if (lies_in(found, library_base))
                        names_add(&taken, *symbols);
                else
                        names_add(&missed, *symbols);
                find_newer(handle, all, *symbols, &newer);
        }
        if (newer.count > 0)
                say_names("note", &newer, "newer than this library, neither served nor counted");
        if (absent.count > 0)
                say_names("note", &absent, "not in this driver");
        if (missed.count > 0) {
                say_names("fail", &missed, "not taken over");
                return EXIT_FAILURE;
        }
        if (taken.count == 0) {
                doctor_say("hooks", "fail", "none of the driver's symbols is taken over");
                return EXIT_FAILURE;
        }
        if (name_symbols)
                say_names("ok", &taken, "symbols would be taken over");
        else
                doctor_say("hooks", "ok", "%zu symbols would be taken over", taken.count);
        return EXIT_SUCCESS;
}

int probe_library(const char *library, bool name_symbols)
{
        const char *const *(*hooked_symbols)(void) = NULL;
        const char *(*version)(void) = NULL;
        void *found = dlsym(RTLD_DEFAULT, "gpureclaim_version");
        Dl_info where;

        if (!found) {
                /* The loader left it out; dlopen says why. */
                if (!dlopen(library, RTLD_NOW | RTLD_LOCAL))
                        doctor_say("library", "fail", "%s", dlerror());
                else
                        doctor_say("library", "fail", "%s: not preloaded", library);
                return EXIT_FAILURE;
        }
        memcpy(&version, &found, sizeof(found));
        if (!dladdr(found, &where)) {
                doctor_say("library", "fail", "%s: cannot tell where it was loaded", library);
                return EXIT_FAILURE;
        }
        doctor_say("library", "ok", "%s, version %s", where.dli_fname, version());
        found = dlsym(RTLD_DEFAULT, "gpureclaim_hooked_symbols");
        if (!found) {
                doctor_say("library", "fail", "%s does not name its symbols", where.dli_fname);
                return EXIT_FAILURE;
        }
        memcpy(&hooked_symbols, &found, sizeof(found));
        return say_hooks(hooked_symbols(), where.dli_fbase, name_symbols);
}
