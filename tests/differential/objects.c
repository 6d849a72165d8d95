/* The objects of a program, the doors to the driver, and what is lost with a context or a capture. */
#include "program.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct gt gt;
int n_captures = 1, open_captures, strict_captures;
_Atomic unsigned n_made;
_Thread_local int me;
size_t total_bytes, left_bytes;
_Atomic size_t late_bytes;
struct memory memories[SLOTS];
struct context contexts[SLOTS];
struct stream streams[SLOTS];
struct event events[SLOTS];
struct pool pools[SLOTS];
struct graph graphs[SLOTS], execs[SLOTS];
struct capture captures[CAPTURES];

void say(const struct op *op, const char *format, ...)
{
        char text[256];
        va_list args;

        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        printf("%d %s: %s\n", op->line, op->verb->name, text);
}

void say_code(const struct op *op, CUresult result)
{
        say(op, "%d", (int)result);
}

/* ---- the functions that a library takes over, by every door ---- */

struct doors doors[DOORS];
CUresult(CUDAAPI *ctx_attach)(CUcontext *, unsigned), (CUDAAPI * ctx_detach)(CUcontext);

void open_doors(void)
{
        void *driver = dlopen("libcuda.so.1", RTLD_NOW), *found;
        char name[64];

        found = dlsym(RTLD_DEFAULT, "cuCtxAttach"); /* the header calls these deprecated */
        memcpy(&ctx_attach, &found, sizeof found);
        found = dlsym(RTLD_DEFAULT, "cuCtxDetach");
        memcpy(&ctx_detach, &found, sizeof found);
#define X(symbol)                                                                                                      \
        doors[0].symbol = (symbol);                                                                                    \
        found = dlsym(RTLD_DEFAULT, #symbol);                                                                          \
        memcpy(&doors[1].symbol, &found, sizeof found);                                                                \
        found = dlsym(driver, #symbol);                                                                                \
        memcpy(&doors[2].symbol, &found, sizeof found);                                                                \
        snprintf(name, sizeof name, "%s", #symbol);                                                                    \
        if (strstr(name, "_v2"))                                                                                       \
                *strstr(name, "_v2") = '\0';                                                                           \
        GR_MUST(cuGetProcAddress(name, &found, CUDA_VERSION, CU_GET_PROC_ADDRESS_LEGACY_STREAM, NULL));                \
        memcpy(&doors[3].symbol, &found, sizeof found);                                                                \
        GR_MUST(cuGetProcAddress(name, &found, CUDA_VERSION, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, NULL));    \
        memcpy(&doors[4].symbol, &found, sizeof found);
        DOOR_LIST(X)
#undef X
}

/* Two more doors, once there is a plug-in; until then the linker's. Its runtime takes whatever is current, and makes
 * the primary context current where nothing is. */
static bool plugged;

void run_plug_in(struct op *op)
{
        void *plug_in, *(*resolve)(const char *), *found;
        char path[4096];
        ssize_t length = readlink("/proc/self/exe", path, sizeof path - 16);
        char name[64];

        if (length < 0)
                gt_die("program: where is it?");
        path[length] = '\0';
        strcpy(strrchr(path, '/') + 1, "plug_in.so");
        plug_in = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (!plug_in)
                gt_die("program: %s", dlerror());
        found = dlsym(plug_in, "plug_in_resolve");
        memcpy(&resolve, &found, sizeof found);
#define X(symbol, function)                                                                                            \
        found = dlsym(plug_in, "plug_in_" #function);                                                                  \
        memcpy(&doors[RUNTIME_DOOR].symbol, &found, sizeof found);                                                     \
        snprintf(name, sizeof name, "%s", #symbol);                                                                    \
        if (strstr(name, "_v2"))                                                                                       \
                *strstr(name, "_v2") = '\0';                                                                           \
        found = resolve(name);                                                                                         \
        if (!found)                                                                                                    \
                gt_die("program: no %s", name);                                                                        \
        memcpy(&doors[RESOLVED_DOOR].symbol, &found, sizeof found);
        X(cuMemAlloc_v2, alloc)
        X(cuMemFree_v2, free)
        X(cuMemAllocAsync, alloc_async)
        X(cuMemFreeAsync, free_async)
        X(cuMemAllocHost_v2, alloc_host)
        X(cuMemFreeHost, free_host)
#undef X
        plugged = true;
        say(op, "loaded");
}

/* The one that the line names, if it is open. */
long door_of(long door)
{
        CUcontext context = NULL;

        if (door == RUNTIME_DOOR && (cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context))
                return 0;
        return door < RUNTIME_DOOR || plugged ? door : 0;
}

/* ---- objects ---- */

CUstream handle_of(int s)
{
        return s == LEGACY ? CU_STREAM_LEGACY : s == OWN ? CU_STREAM_PER_THREAD : streams[s].handle;
}

/* The per-thread door calls the thread's own stream 0. */
CUstream handle_by(int s, long door)
{
        return s == LEGACY && door != 4 ? NULL : s == OWN && door == 4 ? NULL : handle_of(s);
}

int capture_of(int s)
{
        return s > OWN ? streams[s].capture : 0;
}

int current(void)
{
        CUcontext handle = NULL;

        if (cuCtxGetCurrent(&handle) == CUDA_SUCCESS && handle)
                for (int c = 0; c < SLOTS; c++)
                        if (contexts[c].live && contexts[c].handle == handle)
                                return c;
        return -1;
}

int device_of(int context)
{
        return context >= 0 ? contexts[context].device : 0;
}

bool enter(int context)
{
        return context >= 0 && contexts[context].live && cuCtxPushCurrent(contexts[context].handle) == CUDA_SUCCESS;
}

void leave(void)
{
        GR_MUST(cuCtxPopCurrent(&(CUcontext){NULL}));
}

/* Of a call that natively may be made in relaxed mode only, while a capture of another mode is open. */
CUstreamCaptureMode relax(bool wanted)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

        if (wanted && strict_captures)
                cuThreadExchangeStreamCaptureMode(&mode);
        return mode;
}

void tighten(CUstreamCaptureMode mode)
{
        if (mode != CU_STREAM_CAPTURE_MODE_RELAXED)
                cuThreadExchangeStreamCaptureMode(&mode);
}

unsigned different_in(int c)
{
        unsigned count = 0;

        if (!open_captures && contexts[c].different && enter(c)) {
                if (cuMemcpyDtoH(&count, contexts[c].different, sizeof count) != CUDA_SUCCESS)
                        count = 0;
                leave();
        }
        return count;
}

void lose_capture(int capture)
{
        if (!capture)
                return;
        open_captures -= captures[capture].open;
        strict_captures -= captures[capture].open && captures[capture].strict;
        captures[capture].open = false;
        for (int i = 0; i < SLOTS; i++)
                if (streams[i].capture == capture)
                        streams[i].capture = 0;
        for (int i = 0; i < SLOTS; i++)
                if (memories[i].live && memories[i].kind == OF_GRAPH && memories[i].capture == capture)
                        memories[i].live = false;
}

void lose_context(int c)
{
        contexts[c].live = false;
        for (int i = 0; i < SLOTS; i++) {
                if (memories[i].live && memories[i].context == c) {
                        if (memories[i].kind == POOLED || memories[i].kind == MAPPED)
                                left_bytes += gt_pages(memories[i].bytes);
                        memories[i].live = false;
                }
                if (streams[i].live && streams[i].context == c) {
                        lose_capture(streams[i].capture);
                        streams[i].live = false;
                }
                if (events[i].context == c)
                        events[i].live = false;
                if (execs[i].context == c)
                        execs[i].live = false;
                if (graphs[i].context == c)
                        graphs[i].live = false;
        }
}

void new_context(int c, CUcontext handle, int device)
{
        contexts[c] =
                (struct context){.handle = handle, .live = true, .device = device, .retained = contexts[c].retained};
        if (enter(c)) {
                CUstreamCaptureMode mode = relax(true);

                if (cuMemAlloc(&contexts[c].different, 512) != CUDA_SUCCESS ||
                    cuMemsetD8(contexts[c].different, 0, 512) != CUDA_SUCCESS)
                        contexts[c].different = 0;
                tighten(mode);
                leave();
        }
}
