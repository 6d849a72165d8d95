/*
 * Runs a program written in lines, and prints what every line got: once natively and once preloaded, to be compared.
 *
 *   program [--race] [--own-frees] [--wide] [--limited] FILE
 *
 * A line is "THREAD VERB ARGUMENT...". An argument is a number, or an object: a letter for its kind and the number of
 * its slot (c context, s stream, e event, m memory, p pool, g graph, x executable graph). c0 is the primary context of
 * the first device, s0 the legacy stream and s1 the thread's own. A line whose objects are not there says "skip", so
 * that any part of a program is a program.
 *
 * "lend" starts the same program once more, as "program --partner SOCKET", which opens the memory, compares and writes.
 *
 * Lines run one after the other, each in its thread. With --race a thread waits only for earlier lines that have an
 * object in common with its own, and for those that must be alone.
 *
 * Every allocation has a home stream, in which all its work goes. What was last written is known, and is compared
 * there before the memory is freed, on "check", and at the end. --own-frees says that nobody takes care of frees beside
 * a capture: where a library would, the plain driver is asked in relaxed mode. --wide says that memory is mapped ahead
 * of requests, so that "most" is to ask for less. --limited says that managed memory counts as memory of the device.
 */
#include "gputest.h"
#include "peer_process.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 4, SLOTS = 48, ARGUMENTS = 5, DOORS = 7, RUNTIME_DOOR = 5, RESOLVED_DOOR, LEGACY = 0, OWN = 1 };
static const size_t ends_bytes = 64 * KIB; /* of a larger block only both ends are written and compared */

enum kind { DEVICE, MANAGED, HOST, POOLED, MAPPED, OF_GRAPH };

struct memory {
        bool live;
        enum kind kind;
        CUdeviceptr at;
        size_t bytes;
        int context, home, thread, capture;
        unsigned home_made;
        bool known;    /* what is in it */
        bool shared;   /* so that it is the driver's to free */
        unsigned made; /* after so many others */
        uint32_t value;
        CUmemGenericAllocationHandle handle;
};
struct context {
        CUcontext handle;
        CUdeviceptr different; /* counts words that were not what they should be */
        int device, attached;
        int retained; /* the primary one; a reset keeps how often */
        bool live;
};
struct stream {
        CUstream handle;
        int context, capture;
        unsigned made;
        bool live;
};
struct event {
        CUevent handle;
        int context, capture;
        bool live;
};
struct pool {
        CUmemoryPool handle;
        bool live;
};
/* What a launch writes: captured fills. */
struct fills {
        int count, memory[SLOTS];
        unsigned made[SLOTS];
        uint32_t value[SLOTS];
        bool last[SLOTS]; /* nothing else that is captured may come after it */
};
struct graph {
        CUgraph handle;
        CUgraphExec exec;
        int stream, context;
        struct fills fills;
        bool live;
};

static struct memory memories[SLOTS];
static struct context contexts[SLOTS];
static struct stream streams[SLOTS];
static struct event events[SLOTS];
static struct pool pools[SLOTS];
static struct graph graphs[SLOTS], execs[SLOTS];
static struct {
        struct fills fills;
        int stream, context;
        bool open, strict;
} captures[4096];

struct op;
struct verb {
        const char *name, *arguments; /* a letter for each: an object's, or i; in capitals: it may not be there */
        void (*run)(struct op *op);
        bool alone;
};
struct op {
        int line, thread;
        const struct verb *verb;
        long arg[ARGUMENTS];
        int after[ARGUMENTS + 2], n_after; /* with --race: lines to wait for */
        bool done;
};

static struct gt gt;
static struct op *ops;
static int n_ops, last_alone = -1, devices;
static bool race, own_frees, wide, limited;
static char *program_path;
static int n_captures = 1, open_captures, strict_captures; /* changed by lines that are alone */
static _Atomic unsigned n_made;
static _Thread_local int me;                             /* a number that no other thread has, nor had */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what is done, and the threads */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static const size_t context_bytes = GT_PAGE; /* of the simulated device */
static size_t total_bytes;
static size_t left_bytes;         /* of contexts that ended: what pools and mapped memory hold outlives them */
static _Atomic size_t late_bytes; /* freed in stream order; it may not have come to that yet */

__attribute__((format(printf, 2, 3))) static void say(const struct op *op, const char *format, ...)
{
        char text[256];
        va_list args;

        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        printf("%d %s: %s\n", op->line, op->verb->name, text);
}

static void say_code(const struct op *op, CUresult result)
{
        say(op, "%d", (int)result);
}

/* ---- the functions that a library takes over, by every door ---- */

#define DOOR_LIST(X)                                                                                                   \
        X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuMemAllocAsync) X(cuMemFreeAsync) X(cuMemAllocHost_v2) X(cuMemFreeHost)
static struct {
#define X(name) __typeof__(&(name)) name;
        DOOR_LIST(X)
#undef X
} doors[DOORS];

static CUresult(CUDAAPI *ctx_attach)(CUcontext *, unsigned), (CUDAAPI * ctx_detach)(CUcontext);

static void open_doors(void)
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

static void run_plug_in(struct op *op)
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
static long door_of(long door)
{
        CUcontext context = NULL;

        if (door == RUNTIME_DOOR && (cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context))
                return 0;
        return door < RUNTIME_DOOR || plugged ? door : 0;
}

/* ---- objects ---- */

static CUstream handle_of(int s)
{
        return s == LEGACY ? CU_STREAM_LEGACY : s == OWN ? CU_STREAM_PER_THREAD : streams[s].handle;
}

/* The per-thread door calls the thread's own stream 0. */
static CUstream handle_by(int s, long door)
{
        return s == LEGACY && door != 4 ? NULL : s == OWN && door == 4 ? NULL : handle_of(s);
}

static int capture_of(int s)
{
        return s > OWN ? streams[s].capture : 0;
}

static int current(void)
{
        CUcontext handle = NULL;

        if (cuCtxGetCurrent(&handle) == CUDA_SUCCESS && handle)
                for (int c = 0; c < SLOTS; c++)
                        if (contexts[c].live && contexts[c].handle == handle)
                                return c;
        return -1;
}

static int device_of(int context)
{
        return context >= 0 ? contexts[context].device : 0;
}

static bool enter(int context)
{
        return context >= 0 && contexts[context].live && cuCtxPushCurrent(contexts[context].handle) == CUDA_SUCCESS;
}

static void leave(void)
{
        GR_MUST(cuCtxPopCurrent(&(CUcontext){NULL}));
}

/* Of a call that natively may be made in relaxed mode only, while a capture of another mode is open. */
static CUstreamCaptureMode relax(bool wanted)
{
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;

        if (wanted && strict_captures)
                cuThreadExchangeStreamCaptureMode(&mode);
        return mode;
}

static void tighten(CUstreamCaptureMode mode)
{
        if (mode != CU_STREAM_CAPTURE_MODE_RELAXED)
                cuThreadExchangeStreamCaptureMode(&mode);
}

/* The context of a memory's home stream is to be current. */
static CUresult put(struct memory *m, uint32_t value, long us)
{
        size_t words = m->bytes / 4, part = m->bytes > 2 * ends_bytes ? ends_bytes / 4 : words;
        CUstream stream = handle_of(m->home);
        CUresult result = CUDA_SUCCESS;

        if (us < 0)
                result = cuMemsetD32Async(m->at, value, part, stream);
        else if (us == 0)
                result = gt_fill(&gt, stream, m->at, value, part);
        else
                result = gt_late_fill(&gt, stream, m->at, value, part, (uint64_t)us);
        if (result == CUDA_SUCCESS && part < words)
                result = cuMemsetD32Async(m->at + (words - part) * 4, value, part, stream);
        return result;
}

/* Whether work on a memory can be given to its home stream by this thread now. */
static bool at_home(const struct memory *m)
{
        return m->bytes >= 4 &&
               (m->home <= OWN || (streams[m->home].live && streams[m->home].context == m->context &&
                                   streams[m->home].made == m->home_made)) &&
               m->context >= 0 && contexts[m->context].live && (m->home != OWN || m->thread == me);
}

/* In stream order, without waiting. */
static void look(struct memory *m)
{
        size_t words = m->bytes / 4, part = m->bytes > 2 * ends_bytes ? ends_bytes / 4 : words;

        if (!m->known || !at_home(m) || capture_of(m->home) || !contexts[m->context].different || !enter(m->context))
                return;
        gt_count_diff(&gt, handle_of(m->home), m->at, m->value, part, contexts[m->context].different);
        if (part < words)
                gt_count_diff(&gt, handle_of(m->home), m->at + (words - part) * 4, m->value, part,
                              contexts[m->context].different);
        leave();
}

static unsigned different_in(int c)
{
        unsigned count = 0;

        if (!open_captures && contexts[c].different && enter(c)) {
                if (cuMemcpyDtoH(&count, contexts[c].different, sizeof count) != CUDA_SUCCESS)
                        count = 0;
                leave();
        }
        return count;
}

static void lose_capture(int capture)
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

static void lose_context(int c)
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

static void new_context(int c, CUcontext handle, int device)
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

static struct memory *new_memory(struct op *op, enum kind kind, size_t bytes, int home)
{
        struct memory *m = &memories[op->arg[0]];

        *m = (struct memory){.kind = kind,
                             .bytes = bytes,
                             .home = home,
                             .context = current(),
                             .thread = me,
                             .made = ++n_made,
                             .home_made = streams[home].made};
        return m;
}

/* Of the device, in pages, small ones apart; *ret_asked in bytes. */
static size_t live_bytes(int device, size_t *ret_small, size_t *ret_asked)
{
        size_t live = 0, small = 0, asked = 0;

        for (int i = 0; i < SLOTS; i++) {
                struct memory *m = &memories[i];

                if (!m->live || m->kind == HOST || m->kind == MANAGED || m->kind == OF_GRAPH ||
                    device_of(m->context) != device)
                        continue;
                if (m->bytes > MIB)
                        live += gt_pages(m->bytes);
                else
                        small += m->bytes;
                asked += m->bytes;
        }
        *ret_small = small;
        *ret_asked = asked;
        return live;
}

/* Of managed memory what counts as the device's. */
static size_t managed_bytes(int device)
{
        size_t bytes = 0;

        for (int i = 0; limited && i < SLOTS; i++)
                if (memories[i].live && memories[i].kind == MANAGED && device_of(memories[i].context) == device)
                        bytes += memories[i].bytes > MIB ? gt_pages(memories[i].bytes) : memories[i].bytes;
        return bytes;
}

/* Where the device is nearly full somebody may be refused: how full it is, as the program knows it. */
static const char *room(const struct memory *m)
{
        static _Thread_local char text[160];
        size_t small, asked, live, others = 0;
        int device = device_of(m->context);

        if (race || m->kind == HOST || (m->kind == MANAGED && !limited) || m->kind == OF_GRAPH)
                return "";
        live = live_bytes(device, &small, &asked);
        for (int c = 0; c < SLOTS; c++)
                others += contexts[c].live && contexts[c].device == device ? context_bytes : 0;
        others += managed_bytes(device) + left_bytes;
        if (open_captures) /* pools hold what was freed in stream order until the host waits, which it may not now */
                others += late_bytes;
        snprintf(text, sizeof text, ", asked %zu live %zu small %zu others %zu of %zu", m->bytes >> 10, live >> 10,
                 small >> 10, others >> 10, total_bytes >> 10);
        return text;
}

static void made(struct op *op, struct memory *m, CUresult result)
{
        const char *full = room(m);

        m->live = result == CUDA_SUCCESS;
        say(op, "%d%s%s", (int)result, m->live && m->at % 512 ? ", not on 512 bytes" : "", full);
}

/* ---- verbs: contexts ---- */

static void run_context(struct op *op)
{
        CUcontext handle;
        CUresult result;

        result = cuCtxCreate(&handle, NULL, 0, (CUdevice)op->arg[1]);
        if (result == CUDA_SUCCESS)
                new_context((int)op->arg[0], handle, (int)op->arg[1]);
        say_code(op, result);
}

static void run_use(struct op *op)
{
        say_code(op, cuCtxSetCurrent(contexts[op->arg[0]].handle));
}

static void run_destroy(struct op *op)
{
        struct context *c = &contexts[op->arg[0]];
        unsigned different = 0;
        CUresult result;

        if (op->arg[1])
                different = different_in((int)op->arg[0]);
        result = cuCtxDestroy(c->handle);
        if (result == CUDA_SUCCESS)
                lose_context((int)op->arg[0]);
        say(op, "%d, %u different", (int)result, different);
}

static void run_attach(struct op *op)
{
        struct context *c = &contexts[op->arg[0]];
        CUcontext handle = NULL;
        CUresult result;

        if (!enter((int)op->arg[0])) {
                say(op, "skip");
                return;
        }
        result = ctx_attach(&handle, 0);
        leave();
        c->attached += result == CUDA_SUCCESS;
        say(op, "%d, that one %d", (int)result, handle == c->handle);
}

static void run_detach(struct op *op)
{
        struct context *c = &contexts[op->arg[0]];
        CUresult result = ctx_detach(c->handle);

        if (result == CUDA_SUCCESS && c->attached-- == 0)
                lose_context((int)op->arg[0]);
        say_code(op, result);
}

static void run_retain(struct op *op)
{
        CUcontext handle;
        CUresult result = cuDevicePrimaryCtxRetain(&handle, 0);

        contexts[0].retained += result == CUDA_SUCCESS;
        if (result == CUDA_SUCCESS && !contexts[0].live)
                new_context(0, handle, 0);
        say_code(op, result);
}

static void run_release(struct op *op)
{
        CUresult result = cuDevicePrimaryCtxRelease(0);

        if (result == CUDA_SUCCESS && --contexts[0].retained == 0)
                lose_context(0);
        say_code(op, result);
}

static void run_reset(struct op *op)
{
        CUresult result = cuDevicePrimaryCtxReset(0);

        if (result == CUDA_SUCCESS)
                lose_context(0);
        say_code(op, result);
}

static void run_sync(struct op *op)
{
        CUresult result = cuCtxSynchronize();

        if (result == CUDA_SUCCESS)
                late_bytes = 0;
        say_code(op, result);
}

/* ---- verbs: memory ---- */

static void run_alloc(struct op *op)
{
        struct memory *m = new_memory(op, DEVICE, (size_t)op->arg[1], (int)op->arg[2]);
        CUstreamCaptureMode mode = relax(true);
        CUresult result = doors[door_of(op->arg[3])].cuMemAlloc_v2(&m->at, m->bytes);

        tighten(mode);
        made(op, m, result);
}

static void run_pitch(struct op *op)
{
        struct memory *m = new_memory(op, DEVICE, 0, (int)op->arg[3]);
        CUstreamCaptureMode mode = relax(true);
        size_t pitch = 0;
        CUresult result = cuMemAllocPitch(&m->at, &pitch, (size_t)op->arg[1], (size_t)op->arg[2], 4);

        tighten(mode);
        m->bytes = pitch * (size_t)op->arg[2];
        made(op, m, result);
}

static void run_managed(struct op *op)
{
        struct memory *m = new_memory(op, MANAGED, (size_t)op->arg[1], (int)op->arg[2]);

        made(op, m, cuMemAllocManaged(&m->at, m->bytes, CU_MEM_ATTACH_GLOBAL));
}

static void run_host(struct op *op)
{
        struct memory *m = new_memory(op, HOST, (size_t)op->arg[1], (int)op->arg[2]);
        CUstreamCaptureMode mode = relax(true);
        void *at = NULL;
        CUresult result = op->arg[3] ? cuMemHostAlloc(&at, m->bytes, CU_MEMHOSTALLOC_PORTABLE)
                                     : doors[door_of(op->arg[4])].cuMemAllocHost_v2(&at, m->bytes);

        tighten(mode);
        m->at = (CUdeviceptr)(uintptr_t)at;
        made(op, m, result);
}

static void run_async(struct op *op)
{
        struct memory *m = new_memory(op, POOLED, (size_t)op->arg[1], (int)op->arg[2]);
        int s = (int)op->arg[2], p = (int)op->arg[4];
        CUresult result;

        if (s > OWN)
                m->context = streams[s].context;
        m->capture = capture_of(s);
        if (m->capture)
                m->kind = OF_GRAPH;
        if (p && device_of(m->context) == 0)
                result = pools[p].live ? cuMemAllocFromPoolAsync(&m->at, m->bytes, pools[p].handle, handle_of(s))
                                       : CUDA_ERROR_UNKNOWN;
        else
                result = doors[door_of(op->arg[3])].cuMemAllocAsync(&m->at, m->bytes, handle_by(s, op->arg[3]));
        made(op, m, result);
}

static void run_map(struct op *op)
{
        struct memory *m = new_memory(op, MAPPED, (size_t)op->arg[1] * GT_PAGE, (int)op->arg[2]);
        CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                    .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
        CUmemAccessDesc access = {.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        CUresult created, mapped = CUDA_SUCCESS, set = CUDA_SUCCESS;

        prop.location.id = device_of(m->context);
        access.location = prop.location;
        created = cuMemCreate(&m->handle, m->bytes, &prop, 0);
        if (created == CUDA_SUCCESS) {
                GR_MUST(cuMemAddressReserve(&m->at, m->bytes, 0, 0, 0));
                mapped = cuMemMap(m->at, m->bytes, 0, m->handle, 0);
                set = cuMemSetAccess(m->at, m->bytes, &access, 1);
                if (op->arg[3]) {
                        GR_MUST(cuMemRelease(m->handle));
                        m->handle = 0;
                }
        }
        say(op, "%d %d %d%s", (int)created, (int)mapped, (int)set, room(m));
        m->live = created == CUDA_SUCCESS && mapped == CUDA_SUCCESS && set == CUDA_SUCCESS;
}

/* What a stream is to come after before it frees memory whose home is another. False: the driver forbids it now. */
static bool order(const struct memory *m, int s)
{
        bool ordered = false;
        CUevent event;

        if (m->home == s || !at_home(m) || capture_of(m->home) || capture_of(s) || !enter(m->context))
                return true;
        if (cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS) {
                ordered = cuEventRecord(event, handle_of(m->home)) == CUDA_SUCCESS &&
                          cuStreamWaitEvent(handle_of(s), event, 0) == CUDA_SUCCESS;
                cuEventDestroy(event);
        }
        leave();
        return ordered;
}

static CUresult unmap(struct memory *m)
{
        CUresult result = cuMemUnmap(m->at, m->bytes);

        if (result != CUDA_SUCCESS)
                return result;
        if (m->handle)
                GR_MUST(cuMemRelease(m->handle));
        GR_MUST(cuMemAddressFree(m->at, m->bytes));
        return CUDA_SUCCESS;
}

static CUresult give_back(struct memory *m, long door)
{
        CUstreamCaptureMode mode;
        CUresult result;

        door = door_of(door);
        switch (m->kind) {
        case HOST:
                mode = relax(own_frees);
                result = doors[door].cuMemFreeHost((void *)(uintptr_t)m->at);
                tighten(mode);
                return result;
        case MAPPED:
        case POOLED:
                /* Neither waits for work. */
                if (open_captures || !enter(m->context))
                        return CUDA_ERROR_UNKNOWN;
                result = at_home(m) ? cuStreamSynchronize(handle_of(m->home)) : cuCtxSynchronize();
                leave();
                if (result != CUDA_SUCCESS)
                        return result;
                return m->kind == MAPPED ? unmap(m) : doors[door].cuMemFree_v2(m->at);
        case DEVICE:
                mode = relax(own_frees);
                result = doors[door].cuMemFree_v2(m->at);
                tighten(mode);
                return result;
        default:
                return doors[door].cuMemFree_v2(m->at);
        }
}

static void run_free(struct op *op)
{
        struct memory *m = &memories[op->arg[0]];
        CUresult result, inside = CUDA_SUCCESS, twice = CUDA_SUCCESS;

        if (m->kind == OF_GRAPH || (m->shared && strict_captures)) {
                say(op, "skip");
                return;
        }
        look(m);
        if (op->arg[2] == 2 && m->kind == DEVICE && m->bytes > 512 && !strict_captures)
                inside = doors[door_of(op->arg[1])].cuMemFree_v2(m->at + 512);
        result = give_back(m, op->arg[1]);
        m->live = result != CUDA_SUCCESS;
        /* Nobody else may get the address in between. */
        if (op->arg[2] == 1 && result == CUDA_SUCCESS && m->kind != MAPPED && !race && !strict_captures)
                twice = give_back(m, op->arg[1]);
        say(op, "%d %d %d", (int)result, (int)inside, (int)twice);
}

static void run_free_async(struct op *op)
{
        struct memory *m = &memories[op->arg[0]];
        int s = (int)op->arg[1];
        CUresult result, twice = CUDA_SUCCESS;
        CUstreamCaptureMode mode;

        if ((m->shared && strict_captures) || (m->kind != POOLED && m->kind != DEVICE && m->kind != OF_GRAPH) ||
            (capture_of(s) != 0) != (m->kind == OF_GRAPH) || (m->kind == OF_GRAPH && capture_of(s) != m->capture) ||
            (m->kind != OF_GRAPH && (m->home != s || s == OWN) && (!at_home(m) || capture_of(m->home))) ||
            m->context != (s > OWN ? streams[s].context : current())) {
                say(op, "skip");
                return;
        }
        look(m);
        if (!order(m, s)) {
                say(op, "skip");
                return;
        }
        mode = relax(own_frees && m->kind == DEVICE);
        result = doors[door_of(op->arg[2])].cuMemFreeAsync(m->at, handle_by(s, op->arg[2]));
        tighten(mode);
        if (op->arg[3] == 1 && result == CUDA_SUCCESS && m->kind != OF_GRAPH && !race && !strict_captures)
                twice = doors[door_of(op->arg[2])].cuMemFreeAsync(m->at, handle_by(s, op->arg[2]));
        m->live = result != CUDA_SUCCESS;
        if (!m->live && m->kind != OF_GRAPH) /* a pool may be destroyed already */
                late_bytes += gt_pages(m->bytes);
        say(op, "%d %d", (int)result, (int)twice);
}

static void run_fill(struct op *op)
{
        struct memory *m = &memories[op->arg[0]];
        uint32_t value = (uint32_t)op->line * 2654435761u | 1;
        int capture = capture_of(m->home);
        CUresult result;

        if (!at_home(m) || (m->kind == OF_GRAPH && capture != m->capture) ||
            (capture && captures[capture].fills.count == SLOTS) || !enter(m->context)) {
                say(op, "skip");
                return;
        }
        result = put(m, value, op->arg[1]);
        leave();
        if (!capture) {
                m->known = result == CUDA_SUCCESS;
                m->value = value;
        } else if (m->kind != OF_GRAPH) {
                struct fills *fills = &captures[capture].fills;

                fills->memory[fills->count] = (int)op->arg[0];
                fills->made[fills->count] = m->made;
                fills->last[fills->count] = captures[capture].stream == m->home && result == CUDA_SUCCESS;
                fills->value[fills->count++] = value;
        }
        say_code(op, result);
}

/* From the second to the first, in the first one's home. */
static void run_copy(struct op *op)
{
        struct memory *to = &memories[op->arg[0]], *from = &memories[op->arg[1]];
        CUresult result;

        if (to == from || !at_home(to) || !at_home(from) || capture_of(to->home) || capture_of(from->home) ||
            to->bytes > from->bytes || to->bytes > 2 * ends_bytes ||
            (from->bytes > 2 * ends_bytes && to->bytes > ends_bytes) || to->context != from->context ||
            to->kind == OF_GRAPH || from->kind == OF_GRAPH) {
                say(op, "skip");
                return;
        }
        if (!order(from, to->home) || !enter(to->context)) {
                say(op, "skip");
                return;
        }
        result = cuMemcpyDtoDAsync(to->at, from->at, to->bytes / 4 * 4, handle_of(to->home));
        leave();
        /* What comes next in the other's home may change it. */
        order(to, from->home);
        to->known = result == CUDA_SUCCESS && from->known;
        to->value = from->value;
        say_code(op, result);
}

static const char *checked(struct memory *m)
{
        size_t words = m->bytes / 4;
        uint32_t seen[2] = {0};
        CUresult result;

        if (!m->known || !at_home(m) || capture_of(m->home) || m->kind == OF_GRAPH)
                return "unknown";
        look(m);
        if (!enter(m->context))
                return "unknown";
        result = cuStreamSynchronize(handle_of(m->home));
        if (result == CUDA_SUCCESS) {
                GR_MUST(cuMemcpyDtoHAsync(&seen[0], m->at, 4, handle_of(m->home)));
                GR_MUST(cuMemcpyDtoHAsync(&seen[1], m->at + (words - 1) * 4, 4, handle_of(m->home)));
                GR_MUST(cuStreamSynchronize(handle_of(m->home)));
        }
        leave();
        return result != CUDA_SUCCESS ? "refused" : seen[0] == m->value && seen[1] == m->value ? "right" : "WRONG";
}

static void run_check(struct op *op)
{
        say(op, "%s", checked(&memories[op->arg[0]]));
}

static void run_range(struct op *op)
{
        struct memory *m = &memories[op->arg[0]];
        CUdeviceptr base = 0, inside = m->at + (m->bytes ? (size_t)op->arg[1] % m->bytes : 0);
        unsigned type = 7, managed = 7;
        CUresult range, attribute;
        CUcontext context = NULL;
        size_t bytes = 0;

        range = cuMemGetAddressRange(&base, &bytes, inside);
        attribute = cuPointerGetAttribute(&context, CU_POINTER_ATTRIBUTE_CONTEXT, inside);
        cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside);
        cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, inside);
        say(op, "%d base %d size %zu, %d context %d, type %u managed %u", (int)range, base == m->at, bytes,
            (int)attribute, m->context >= 0 && context == contexts[m->context].handle, type, managed);
}

static void run_share(struct op *op)
{
        struct memory *m = &memories[op->arg[0]];
        CUipcMemHandle handle;

        CUresult result = cuIpcGetMemHandle(&handle, m->at);

        m->shared = true;
        say_code(op, result);
}

/* What all pools of the device hold; others than the default ones are the first device's. */
static size_t reserved_bytes(int device)
{
        CUstreamCaptureMode mode = relax(true);
        cuuint64_t bytes = 0, sum = 0;
        CUmemoryPool pool;

        GR_MUST(cuDeviceGetDefaultMemPool(&pool, device));
        for (int i = 0; i < (device ? 1 : SLOTS); i++) {
                if (i > 0 && !pools[i].live)
                        continue;
                GR_MUST(cuMemPoolGetAttribute(i ? pools[i].handle : pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
                                              &bytes));
                sum += bytes;
        }
        tighten(mode);
        return sum;
}

static void run_info(struct op *op)
{
        int device = device_of(current());
        size_t available = 0, total = 0, small, asked, live = live_bytes(device, &small, &asked);
        CUresult result = cuMemGetInfo(&available, &total);

        say(op, "%d free %zu of %zu, live %zu small %zu asked %zu, pools %zu, managed %zu, late %zu", (int)result,
            available >> 10, total >> 10, live >> 10, small >> 10, asked >> 10, reserved_bytes(device) >> 10,
            managed_bytes(device) >> 10, late_bytes >> 10);
}

/* One block of so many hundredths of what must be there besides what is live. */
static void run_most(struct op *op)
{
        int device = device_of(current());
        size_t small, asked, live = live_bytes(device, &small, &asked), others = 16 * MIB, want;
        CUdeviceptr p;
        CUresult result, freed = CUDA_SUCCESS;

        for (int c = 0; c < SLOTS; c++)
                others += contexts[c].live && contexts[c].device == device ? context_bytes + GT_PAGE : 0;
        others += managed_bytes(device) + left_bytes + (open_captures ? late_bytes : 0);
        /* A block may be an eighth larger than was asked for, a small one twice as large; with --wide it may lie in a
         * mapping for more. */
        live += (wide ? live : live / 8) + 2 * small;
        if (live + others > total_bytes || strict_captures) {
                say(op, "skip");
                return;
        }
        want = (total_bytes - live - others) / 100 * (size_t)op->arg[0] / GT_PAGE * GT_PAGE;
        result = cuMemAlloc(&p, want);
        if (result == CUDA_SUCCESS)
                freed = cuMemFree(p);
        say(op, "%d %d", (int)result, (int)freed);
}

/* ---- another process ---- */

struct lent {
        CUipcMemHandle handle;
        size_t bytes;
        uint32_t expected, written;
};
struct returned {
        int opened, right, closed;
};

/* Opens what it is lent, compares both ends and writes others. */
static int be_partner(int socket)
{
        struct lent lent;
        int fd;

        gt_open(&gt);
        while (peer_receive(socket, &lent, sizeof lent, &fd)) {
                struct returned returned = {.closed = -1};
                size_t words = lent.bytes / 4, part = ends_bytes / 4;
                uint32_t seen[2] = {0};
                CUdeviceptr at;

                returned.opened = (int)cuIpcOpenMemHandle(&at, lent.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
                if (returned.opened == CUDA_SUCCESS) {
                        GR_MUST(cuMemcpyDtoH(&seen[0], at, 4));
                        GR_MUST(cuMemcpyDtoH(&seen[1], at + (words - 1) * 4, 4));
                        returned.right = seen[0] == lent.expected && seen[1] == lent.expected;
                        GR_MUST(cuMemsetD32(at, lent.written, part));
                        GR_MUST(cuMemsetD32(at + (words - part) * 4, lent.written, part));
                        GR_MUST(cuCtxSynchronize());
                        returned.closed = (int)cuIpcCloseMemHandle(at);
                }
                peer_send(socket, &returned, sizeof returned, -1);
        }
        return EXIT_SUCCESS;
}

/* The memory goes to the other process and comes back with what that one wrote. */
static void run_lend(struct op *op)
{
        static char mode[] = "--partner";
        static int socket = -1;
        struct memory *m = &memories[op->arg[0]];
        struct lent lent = {.bytes = m->bytes, .expected = m->value, .written = (uint32_t)op->line * 2654435761u | 1};
        struct returned returned = {0};
        CUresult result;
        int fd;

        if (m->kind != DEVICE || !m->known || m->bytes <= 2 * MIB || !at_home(m) || open_captures ||
            device_of(m->context) || !enter(m->context)) {
                say(op, "skip");
                return;
        }
        GR_MUST(cuStreamSynchronize(handle_of(m->home)));
        result = cuIpcGetMemHandle(&lent.handle, m->at);
        leave();
        m->shared = true;
        if (result == CUDA_SUCCESS) {
                if (socket < 0)
                        peer_start(program_path, mode, false, &socket);
                peer_send(socket, &lent, sizeof lent, -1);
                if (!peer_receive(socket, &returned, sizeof returned, &fd))
                        gt_die("program: the other process ended");
                if (returned.opened == CUDA_SUCCESS)
                        m->value = lent.written;
        }
        if (result != CUDA_SUCCESS)
                say_code(op, result);
        else
                say(op, "0, opened %d, %s, closed %d", returned.opened, returned.right ? "right" : "WRONG",
                    returned.closed);
}

/* ---- verbs: streams, events, captures ---- */

static void run_stream(struct op *op)
{
        struct stream *s = &streams[op->arg[0]];
        CUresult result;

        *s = (struct stream){.context = current(), .made = ++n_made};
        result = cuStreamCreate(&s->handle, (unsigned)op->arg[1]);
        s->live = result == CUDA_SUCCESS;
        say_code(op, result);
}

static void run_stream_destroy(struct op *op)
{
        struct stream *s = &streams[op->arg[0]];
        int capture = s->capture;
        CUresult result = cuStreamDestroy(s->handle);

        if (result == CUDA_SUCCESS) {
                s->live = false;
                s->capture = 0;
                if (capture && captures[capture].stream == op->arg[0])
                        lose_capture(capture);
        }
        say_code(op, result);
}

static void run_stream_sync(struct op *op)
{
        say_code(op, cuStreamSynchronize(handle_of((int)op->arg[0])));
}

static void run_stream_query(struct op *op)
{
        say_code(op, cuStreamQuery(handle_of((int)op->arg[0])));
}

static void run_spin(struct op *op)
{
        int s = (int)op->arg[0];
        bool elsewhere = s > OWN && enter(streams[s].context);

        say_code(op, gt_spin(&gt, handle_of(s), (uint64_t)op->arg[1]));
        if (elsewhere)
                leave();
}

static void run_capturing(struct op *op)
{
        CUstreamCaptureStatus status = 7;
        CUresult result = cuStreamIsCapturing(handle_of((int)op->arg[0]), &status);

        say(op, "%d %d", (int)result, (int)status);
}

static void run_event(struct op *op)
{
        struct event *e = &events[op->arg[0]];
        CUresult result;

        *e = (struct event){.context = current()};
        result = cuEventCreate(&e->handle, CU_EVENT_DISABLE_TIMING);
        e->live = result == CUDA_SUCCESS;
        say_code(op, result);
}

static void run_event_destroy(struct op *op)
{
        CUresult result = cuEventDestroy(events[op->arg[0]].handle);

        events[op->arg[0]].live = result != CUDA_SUCCESS;
        say_code(op, result);
}

static void run_record(struct op *op)
{
        CUresult result = cuEventRecord(events[op->arg[0]].handle, handle_of((int)op->arg[1]));

        if (result == CUDA_SUCCESS)
                events[op->arg[0]].capture = capture_of((int)op->arg[1]);
        say_code(op, result);
}

static void run_wait(struct op *op)
{
        int s = (int)op->arg[0], capture = events[op->arg[1]].capture;
        CUresult result = cuStreamWaitEvent(handle_of(s), events[op->arg[1]].handle, 0);

        if (result == CUDA_SUCCESS && s > OWN && captures[capture].open && !streams[s].capture)
                streams[s].capture = capture;
        say_code(op, result);
}

static void run_event_sync(struct op *op)
{
        say_code(op, cuEventSynchronize(events[op->arg[0]].handle));
}

static void run_event_query(struct op *op)
{
        say_code(op, cuEventQuery(events[op->arg[0]].handle));
}

static void run_begin(struct op *op)
{
        int s = (int)op->arg[0];
        CUresult result = cuStreamBeginCapture(handle_of(s), (CUstreamCaptureMode)op->arg[1]);

        if (result == CUDA_SUCCESS) {
                int capture = n_captures++;

                captures[capture].open = true;
                captures[capture].stream = s;
                captures[capture].context = streams[s].context;
                captures[capture].strict = op->arg[1] != CU_STREAM_CAPTURE_MODE_RELAXED;
                strict_captures += captures[capture].strict;
                open_captures++;
                streams[s].capture = capture;
        }
        say_code(op, result);
}

static void run_end(struct op *op)
{
        struct stream *s = &streams[op->arg[0]];
        struct graph *g = &graphs[op->arg[1]];
        int capture = s->capture;
        CUgraph handle = NULL;
        CUresult result;

        /* What the graph allocated it frees: the first stream has to know of it all, and a fork may not. */
        for (int i = 0; capture && i < SLOTS; i++)
                if (memories[i].live && memories[i].kind == OF_GRAPH && memories[i].capture == capture) {
                        cuMemFreeAsync(memories[i].at, handle_of(memories[i].home));
                        memories[i].live = false;
                }
        result = cuStreamEndCapture(s->handle, &handle);
        if (g->live)
                GR_MUST(cuGraphDestroy(g->handle));
        *g = (struct graph){.handle = handle, .live = handle != NULL, .stream = (int)op->arg[0], .context = s->context};
        if (capture)
                g->fills = captures[capture].fills;
        if (result != CUDA_ERROR_STREAM_CAPTURE_UNMATCHED)
                lose_capture(capture);
        say(op, "%d%s", (int)result, handle ? ", a graph" : "");
}

static void run_mode(struct op *op)
{
        CUstreamCaptureMode mode = (CUstreamCaptureMode)op->arg[0];
        CUresult result = cuThreadExchangeStreamCaptureMode(&mode);

        say(op, "%d %d", (int)result, (int)mode);
}

static void run_instantiate(struct op *op)
{
        struct graph *x = &execs[op->arg[0]], *g = &graphs[op->arg[1]];
        CUresult result;

        if (x->live)
                GR_MUST(cuGraphExecDestroy(x->exec));
        *x = *g;
        result = cuGraphInstantiate(&x->exec, g->handle, (unsigned long long)op->arg[2]);
        x->live = result == CUDA_SUCCESS;
        say_code(op, result);
}

static void run_launch(struct op *op)
{
        struct graph *x = &execs[op->arg[0]];
        CUresult result;

        for (int i = 0; i < x->fills.count; i++)
                if (!memories[x->fills.memory[i]].live || memories[x->fills.memory[i]].made != x->fills.made[i])
                        x->live = false;
        if (!x->live || !streams[x->stream].live || streams[x->stream].context != x->context || capture_of(x->stream) ||
            !enter(x->context)) {
                say(op, "skip");
                return;
        }
        result = cuGraphLaunch(x->exec, handle_of(x->stream));
        leave();
        for (int i = 0; result == CUDA_SUCCESS && i < x->fills.count; i++) {
                memories[x->fills.memory[i]].known = x->fills.last[i];
                memories[x->fills.memory[i]].value = x->fills.value[i];
        }
        say_code(op, result);
}

static void run_graph_destroy(struct op *op)
{
        CUresult result = cuGraphDestroy(graphs[op->arg[0]].handle);

        graphs[op->arg[0]].live = result != CUDA_SUCCESS;
        say_code(op, result);
}

static void run_exec_destroy(struct op *op)
{
        CUresult result = cuGraphExecDestroy(execs[op->arg[0]].exec);

        execs[op->arg[0]].live = result != CUDA_SUCCESS;
        say_code(op, result);
}

/* Only what has no launch going on is trimmed, so that all must have ended. */
static void run_graph_trim(struct op *op)
{
        if (open_captures) {
                say(op, "skip");
                return;
        }
        for (int c = 0; c < SLOTS; c++)
                if (enter(c)) {
                        cuCtxSynchronize();
                        leave();
                }
        say_code(op, cuDeviceGraphMemTrim(0));
}

/* ---- verbs: pools ---- */

static void run_pool(struct op *op)
{
        struct pool *p = &pools[op->arg[0]];
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE},
                                .maxSize = (size_t)op->arg[1]};
        CUresult result = cuMemPoolCreate(&p->handle, &props);

        p->live = result == CUDA_SUCCESS;
        say_code(op, result);
}

static void run_pool_destroy(struct op *op)
{
        CUresult result = cuMemPoolDestroy(pools[op->arg[0]].handle);

        pools[op->arg[0]].live = result != CUDA_SUCCESS;
        say_code(op, result);
}

static void run_pool_trim(struct op *op)
{
        say_code(op, cuMemPoolTrimTo(pools[op->arg[0]].handle, (size_t)op->arg[1]));
}

static void run_pool_keep(struct op *op)
{
        cuuint64_t threshold = (cuuint64_t)op->arg[1];

        say_code(op, cuMemPoolSetAttribute(pools[op->arg[0]].handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
}

static void run_pool_used(struct op *op)
{
        cuuint64_t used = 0;
        CUresult result = cuMemPoolGetAttribute(pools[op->arg[0]].handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &used);

        say(op, "%d %llu", (int)result, (unsigned long long)used);
}

static void run_pool_current(struct op *op)
{
        CUmemoryPool pool = pools[op->arg[0]].handle;

        if (op->arg[0] == 0)
                GR_MUST(cuDeviceGetDefaultMemPool(&pool, 0));
        say_code(op, cuDeviceSetMemPool(0, pool));
}

static const struct verb verbs[] = {
        {"plug-in", "", run_plug_in, true},
        {"context", "Ci", run_context, true},
        {"use", "C", run_use, false},
        {"destroy", "ci", run_destroy, true},
        {"attach", "c", run_attach, true},
        {"detach", "c", run_detach, true},
        {"retain", "", run_retain, true},
        {"release", "", run_release, true},
        {"reset", "", run_reset, true},
        {"sync", "", run_sync, true},
        {"alloc", "Misi", run_alloc, false},
        {"pitch", "Miis", run_pitch, false},
        {"managed", "Mis", run_managed, false},
        {"host", "Misii", run_host, false},
        {"async", "MisiP", run_async, false},
        {"map", "Misi", run_map, false},
        {"free", "mii", run_free, false},
        {"free-async", "msii", run_free_async, false},
        {"fill", "mi", run_fill, false},
        {"copy", "mm", run_copy, false},
        {"check", "m", run_check, false},
        {"range", "mi", run_range, false},
        {"share", "m", run_share, false},
        {"lend", "m", run_lend, true},
        {"info", "", run_info, true},
        {"most", "i", run_most, true},
        {"stream", "Si", run_stream, false},
        {"stream-destroy", "s", run_stream_destroy, true},
        {"stream-sync", "s", run_stream_sync, false},
        {"stream-query", "s", run_stream_query, false},
        {"spin", "si", run_spin, false},
        {"capturing", "s", run_capturing, false},
        {"event", "E", run_event, false},
        {"event-destroy", "e", run_event_destroy, false},
        {"record", "es", run_record, false},
        {"wait", "se", run_wait, false},
        {"event-sync", "e", run_event_sync, false},
        {"event-query", "e", run_event_query, false},
        {"begin", "si", run_begin, true},
        {"end", "sG", run_end, true},
        {"mode", "i", run_mode, true},
        {"instantiate", "Xgi", run_instantiate, true},
        {"launch", "x", run_launch, true},
        {"graph-destroy", "g", run_graph_destroy, true},
        {"exec-destroy", "x", run_exec_destroy, true},
        {"graph-trim", "", run_graph_trim, true},
        {"pool", "Pi", run_pool, true},
        {"pool-destroy", "p", run_pool_destroy, true},
        {"pool-trim", "pi", run_pool_trim, false},
        {"pool-keep", "pi", run_pool_keep, false},
        {"pool-used", "p", run_pool_used, true}, /* a free counts, and its line does not name the pool */
        {"pool-current", "P", run_pool_current, true},
        {"exit", "", NULL, true},
};

/* ---- running ---- */

/* Whether an object that the line needs is there. A slot that is to be filled must be empty. */
static bool there(char letter, long slot)
{
        switch (letter) {
        case 'c':
                return contexts[slot].live;
        case 's':
                return slot <= OWN || streams[slot].live;
        case 'e':
                return events[slot].live;
        case 'm':
                return memories[slot].live;
        case 'p':
                return pools[slot].live;
        case 'g':
                return graphs[slot].live;
        case 'x':
                return execs[slot].live;
        case 'M':
                return !memories[slot].live;
        case 'S':
                return slot > OWN && !streams[slot].live;
        case 'E':
                return !events[slot].live;
        default:
                return true;
        }
}

static void perform(struct op *op)
{
        /* A context that ended may still be current, and used so; one that never was has no handle. */
        bool can = op->verb->run != run_use || contexts[op->arg[0]].handle;

        can &= op->verb->run != run_context || !contexts[op->arg[0]].live;
        can &= op->verb->run != run_destroy || op->arg[0] > 0;
        can &= op->verb->run != run_instantiate || !execs[op->arg[0]].live || !strict_captures;
        can &= op->verb->run != run_release || contexts[0].live;
        can &= op->verb->run != run_pool || !pools[op->arg[0]].live;
        can &= op->verb->run != run_pool_current || op->arg[0] == 0 || pools[op->arg[0]].live;
        can &= op->verb->run != run_begin || (op->arg[0] > OWN && !streams[op->arg[0]].capture && n_captures < 4096);
        can &= op->verb->run != run_end || (op->arg[0] > OWN && streams[op->arg[0]].capture);
        for (int i = 0; op->verb->arguments[i]; i++)
                can = can && there(op->verb->arguments[i], op->arg[i]);
        if (can)
                op->verb->run(op);
        else
                say(op, "skip");
}

static void await(const struct op *op)
{
        pthread_mutex_lock(&lock);
        for (int i = 0; i < op->n_after; i++)
                while (!ops[op->after[i]].done)
                        pthread_cond_wait(&changed, &lock);
        for (int i = 0; op->verb->alone && i < op->line; i++)
                while (!ops[i].done)
                        pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
}

static void finish(struct op *op)
{
        pthread_mutex_lock(&lock);
        op->done = true;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
}

static struct worker {
        pthread_t thread, before;
        int number, next;
        bool succeeds;
} workers[THREADS];

static _Atomic int n_threads;
static pthread_barrier_t begun; /* or a context may have ended before a thread has made it current */

static void *work(void *argument)
{
        struct worker *w = argument;

        me = ++n_threads;
        if (w->succeeds)
                pthread_join(w->before, NULL);
        if (contexts[0].live)
                GR_MUST(cuCtxSetCurrent(contexts[0].handle));
        if (w->succeeds) {
                w->succeeds = false;
                say(&ops[w->next], "done");
                finish(&ops[w->next++]);
        } else {
                pthread_barrier_wait(&begun);
        }
        for (; w->next < n_ops; w->next++) {
                struct op *op = &ops[w->next];

                if (op->thread != w->number)
                        continue;
                await(op);
                if (!op->verb->run) {
                        w->before = pthread_self();
                        w->succeeds = true;
                        pthread_mutex_lock(&lock);
                        if (pthread_create(&w->thread, NULL, work, w) != 0)
                                gt_die("program: no thread");
                        pthread_mutex_unlock(&lock);
                        return NULL;
                }
                perform(op);
                finish(op);
        }
        return NULL;
}

/* What each line has to wait for when it need not wait for all. */
static void depend(struct op *op)
{
        static int last[128][SLOTS], set;

        if (!set++)
                memset(last, -1, sizeof last);
        if (last_alone >= 0)
                op->after[op->n_after++] = last_alone;
        for (int i = 0; op->verb->arguments[i]; i++) {
                int letter = op->verb->arguments[i] | 0x20, slot = (int)op->arg[i];

                if (letter == 'i')
                        continue;
                if (last[letter][slot] >= 0 && last[letter][slot] != op->line)
                        op->after[op->n_after++] = last[letter][slot];
                last[letter][slot] = op->line;
        }
        if (op->verb->alone)
                last_alone = op->line;
}

static bool parse(char *line, struct op *op)
{
        char *word = strtok(line, " \n");

        if (!word || word[0] == '#')
                return false;
        op->thread = atoi(word);
        word = strtok(NULL, " \n");
        for (size_t i = 0; word && i < sizeof verbs / sizeof verbs[0]; i++)
                if (!strcmp(verbs[i].name, word))
                        op->verb = &verbs[i];
        if (!op->verb || op->thread < 0 || op->thread >= THREADS)
                gt_die("program: line %d: no verb", op->line);
        for (int i = 0; op->verb->arguments[i]; i++) {
                int letter = op->verb->arguments[i] | 0x20;

                word = strtok(NULL, " \n");
                if (!word || (letter != 'i' && word[0] != letter))
                        gt_die("program: line %d: %s expects %s", op->line, op->verb->name, op->verb->arguments);
                op->arg[i] = atol(word + (letter != 'i'));
                if (letter != 'i' && (op->arg[i] < 0 || op->arg[i] >= SLOTS))
                        gt_die("program: line %d: no such slot", op->line);
        }
        return true;
}

static void read_program(const char *path)
{
        FILE *file = fopen(path, "r");
        char line[256];

        if (!file)
                gt_die("program: no %s", path);
        while (fgets(line, sizeof line, file)) {
                ops = realloc(ops, (size_t)(n_ops + 1) * sizeof *ops);
                if (!ops)
                        gt_die("program: out of memory");
                ops[n_ops] = (struct op){.line = n_ops};
                if (!parse(line, &ops[n_ops]))
                        continue;
                if (race)
                        depend(&ops[n_ops]);
                else if (n_ops > 0)
                        ops[n_ops].after[ops[n_ops].n_after++] = n_ops - 1;
                n_ops++;
        }
        fclose(file);
}

/* What is left: right or not, and then given back. */
static void close_program(void)
{
        static const struct verb end = {"left", "", NULL, true};
        struct op op = {.line = n_ops, .verb = &end};
        size_t available = 0, total = 0;
        unsigned different = 0;

        for (int i = 0; i < SLOTS; i++)
                if (streams[i].live && streams[i].capture) {
                        GR_MUST(cuStreamDestroy(streams[i].handle));
                        lose_capture(captures[streams[i].capture].stream == i ? streams[i].capture : 0);
                        streams[i].live = false;
                }
        for (int i = 0; i < SLOTS; i++) {
                struct memory *m = &memories[i];
                const char *what;

                if (!m->live)
                        continue;
                if (m->home == OWN)
                        m->known = false; /* that thread is gone */
                what = checked(m);
                if (!enter(m->context))
                        continue;
                say(&op, "m%d %s, freed %d", i, what, (int)give_back(m, 0));
                leave();
                m->live = false;
        }
        for (int c = 0; c < SLOTS; c++)
                if (contexts[c].live)
                        different += different_in(c);
        say(&op, "%u different", different);
        for (int c = 1; c < SLOTS; c++)
                if (contexts[c].live)
                        say(&op, "c%d %d", c, (int)cuCtxDestroy(contexts[c].handle)), lose_context(c);
        if (!contexts[0].live)
                run_retain(&op);
        GR_MUST(cuCtxSetCurrent(contexts[0].handle));
        say(&op, "synchronised %d", (int)cuCtxSynchronize());
        for (int i = 0; i < SLOTS; i++)
                if (pools[i].live)
                        GR_MUST(cuMemPoolDestroy(pools[i].handle));
        for (int device = 0; device < devices; device++) {
                GR_MUST(cuDevicePrimaryCtxRetain(&contexts[0].handle, device));
                GR_MUST(cuCtxSetCurrent(contexts[0].handle));
                contexts[0].device = device;
                GR_MUST(cuMemGetInfo(&available, &total));
                say(&op, "free %zu of %zu", available >> 10, total >> 10);
                op.arg[0] = 98;
                run_most(&op);
        }
}

int main(int argc, char **argv)
{
        const char *path = NULL;

        if (argc == 3 && !strcmp(argv[1], "--partner"))
                return be_partner(atoi(argv[2]));
        program_path = argv[0];
        for (int i = 1; i < argc; i++) {
                if (!strcmp(argv[i], "--race"))
                        race = true;
                else if (!strcmp(argv[i], "--own-frees"))
                        own_frees = true;
                else if (!strcmp(argv[i], "--wide"))
                        wide = true;
                else if (!strcmp(argv[i], "--limited"))
                        limited = true;
                else
                        path = argv[i];
        }
        if (!path)
                gt_die("usage: program [--race] [--own-frees] [--wide] [--limited] FILE");
        alarm(60);
        GR_MUST(cuInit(0));
        GR_MUST(cuDeviceTotalMem(&total_bytes, 0));
        gt_open(&gt);
        GR_MUST(cuDeviceGetCount(&devices));
        open_doors();
        read_program(path);
        contexts[0].retained = 1;
        new_context(0, gt.ctx, 0);
        pthread_barrier_init(&begun, NULL, THREADS);
        for (int t = 0; t < THREADS; t++) {
                workers[t].number = t;
                pthread_mutex_lock(&lock);
                if (pthread_create(&workers[t].thread, NULL, work, &workers[t]) != 0)
                        gt_die("program: no thread");
                pthread_mutex_unlock(&lock);
        }
        pthread_mutex_lock(&lock);
        for (int i = 0; i < n_ops; i++)
                while (!ops[i].done)
                        pthread_cond_wait(&changed, &lock);
        pthread_mutex_unlock(&lock);
        for (int t = 0; t < THREADS; t++)
                pthread_join(workers[t].thread, NULL);
        close_program();
        return EXIT_SUCCESS;
}
