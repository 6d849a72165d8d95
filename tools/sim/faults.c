/*
 * The first step of each call: its count, the trace, delays, faults and missing entry points. Also cuInit, misuse, and
 * what tests ask.
 */
#include "grsim.h"
#include "sim.h"

#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_FAULTS   64
#define MAX_MISSING  32
#define NAME_BYTES   64
#define MAX_REPORTS  32 /* of misuse, on stderr */
#define COUNT_SHARDS 16

struct fault {
        enum sim_symbol symbol;
        unsigned long first, last; /* calls, counted from 1 */
        CUresult code;
};

static struct fault faults[MAX_FAULTS];
static size_t n_faults;
static char missing[MAX_MISSING][NAME_BYTES];
static size_t n_missing;
static uint64_t delay_ns[SIM_SYMBOLS];
/*
 * Counts of calls. Threads are spread over the shards, to avoid contention for one cache line. If faults are set only
 * the first shard is used, as a fault counts the calls of all threads.
 */
static struct {
        atomic_ulong of[SIM_SYMBOLS];
} calls[COUNT_SHARDS] __attribute__((aligned(64)));
static atomic_uint counted_threads;
static _Thread_local unsigned count_shard; /* + 1; 0: none yet */
static atomic_ulong misuses;
static int trace_fd = -1;
static atomic_bool initialized, forked, ended;
_Thread_local bool sim_in_callback;
static _Thread_local unsigned depth; /* calls of this thread, each inside the one before */

/* Calls `set` for the exported symbol named word or, if there is none, for every variant of that name. */
static bool for_symbols(const char *word, void (*set)(enum sim_symbol, const void *), const void *arg)
{
        bool any = false;

        for (size_t i = 0; i < SIM_SYMBOLS; i++) {
                if (strcmp(sim_entries[i].symbol, word) == 0) {
                        set((enum sim_symbol)i, arg);
                        return true;
                }
        }
        for (size_t i = 0; i < SIM_SYMBOLS; i++) {
                if (strcmp(sim_entries[i].name, word) == 0) {
                        set((enum sim_symbol)i, arg);
                        any = true;
                }
        }
        return any;
}

static void add_fault(enum sim_symbol symbol, const void *arg)
{
        if (n_faults < MAX_FAULTS) {
                faults[n_faults] = *(const struct fault *)arg;
                faults[n_faults++].symbol = symbol;
        }
}

/* symbol:N=code, symbol:N+=code (the Nth and all after it), symbol:*=code */
static bool read_fault(char *word)
{
        struct fault fault = {.first = 1, .last = ULONG_MAX};
        char *colon = strchr(word, ':'), *equals = strchr(word, '='), *end;
        unsigned long code;

        if (!colon || !equals || equals < colon)
                return false;
        *colon = *equals = '\0';
        if (strcmp(colon + 1, "*") != 0) {
                fault.first = strtoul(colon + 1, &end, 10);
                if (end == colon + 1 || fault.first == 0 || (*end && strcmp(end, "+") != 0))
                        return false;
                if (!*end)
                        fault.last = fault.first;
        }
        code = strtoul(equals + 1, &end, 10);
        if (end == equals + 1 || *end || code > 999)
                return false;
        fault.code = (CUresult)code;
        return for_symbols(word, add_fault, &fault);
}

static void set_delay(enum sim_symbol symbol, const void *arg)
{
        delay_ns[symbol] = *(const uint64_t *)arg;
}

static bool read_delay(char *word)
{
        char *equals = strchr(word, '='), *end;
        unsigned long n;
        uint64_t ns;

        if (!equals)
                return false;
        *equals = '\0';
        n = strtoul(equals + 1, &end, 10);
        if (end == equals + 1)
                return false;
        if (strcmp(end, "ns") == 0)
                ns = n;
        else if (strcmp(end, "us") == 0)
                ns = n * 1000u;
        else if (strcmp(end, "ms") == 0)
                ns = n * 1000000u;
        else
                return false;
        return for_symbols(word, set_delay, &ns);
}

static bool read_missing(char *word)
{
        if (n_missing == MAX_MISSING || strlen(word) >= NAME_BYTES)
                return false;
        memcpy(missing[n_missing++], word, strlen(word) + 1);
        return true;
}

/* In a child after fork the workers are gone and the locks unusable. If nothing was set up before, it starts afresh. */
static void after_fork(void)
{
        if (atomic_load(&initialized))
                atomic_store(&forked, true);
}

void sim_read_faults(void)
{
        const char *value = getenv("GRSIM_TRACE");

        if (value && *value) {
                trace_fd = open(value, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
                if (trace_fd < 0)
                        sim_complain("GRSIM_TRACE", value);
        }
        sim_read_list("GRSIM_FAULT", read_fault);
        sim_read_list("GRSIM_MISSING", read_missing);
        sim_read_list("GRSIM_LATENCY", read_delay);
        pthread_atfork(NULL, NULL, after_fork);
}

bool sim_symbol_missing(const char *name)
{
        sim_config();
        for (size_t i = 0; i < n_missing; i++) {
                if (strcmp(missing[i], name) == 0)
                        return true;
        }
        return false;
}

static void trace_call(enum sim_symbol symbol)
{
        char line[NAME_BYTES + 1];
        int n = snprintf(line, sizeof line, "%s\n", sim_entries[symbol].symbol);

        /* One write of one line: lines of threads and processes do not mix. */
        if (n > 0 && write(trace_fd, line, (size_t)n) < 0)
                trace_fd = -1;
}

/* Counts a call. Returns its number among the calls of the symbol, if faults are set. */
static unsigned long count_call(enum sim_symbol symbol)
{
        if (!count_shard)
                count_shard = n_faults ? 1 : atomic_fetch_add(&counted_threads, 1) % COUNT_SHARDS + 1;
        return atomic_fetch_add_explicit(&calls[count_shard - 1].of[symbol], 1, memory_order_relaxed) + 1;
}

CUresult sim_enter(enum sim_symbol symbol, bool early)
{
        unsigned long nth;

        depth++;
        sim_config();
        nth = count_call(symbol);
        if (trace_fd >= 0)
                trace_call(symbol);
        if (n_missing && sim_symbol_missing(sim_entries[symbol].name))
                return CUDA_ERROR_NOT_FOUND;
        if (delay_ns[symbol]) {
                uint64_t until = sim_now_ns() + delay_ns[symbol];

                /* A driver call keeps its thread busy; it does not sleep. */
                while (sim_now_ns() < until)
                        ;
        }
        for (size_t i = 0; i < n_faults; i++) {
                if (faults[i].symbol == symbol && nth >= faults[i].first && nth <= faults[i].last)
                        return faults[i].code;
        }
        if (!early && !atomic_load(&ended) && (!atomic_load(&initialized) || atomic_load(&forked)))
                return CUDA_ERROR_NOT_INITIALIZED;
        if (atomic_load(&ended) || atomic_load(&forked))
                return early ? CUDA_SUCCESS : CUDA_ERROR_DEINITIALIZED;
        if (sim_in_callback && !early)
                return CUDA_ERROR_NOT_PERMITTED;
        return depth == 1 ? sim_checkpoint_enter(symbol) : CUDA_SUCCESS;
}

void sim_leave(const enum sim_symbol *symbol)
{
        (void)symbol;
        if (--depth == 0)
                sim_checkpoint_leave();
}

/*
 * As in the real driver, calls fail once the process ends, instead of working on a device that is being shut down. Exit
 * handlers that the program registered before CUDA run after this one.
 */
static void note_end(void)
{
        atomic_store(&ended, true);
}

/* Once; what fails for lack of addresses is tried again by the next call. */
static CUresult begin_once(void)
{
        static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
        CUresult rc = CUDA_SUCCESS;

        pthread_mutex_lock(&lock);
        if (!atomic_load(&initialized) && !sim_setup()) {
                rc = CUDA_ERROR_OUT_OF_MEMORY;
        } else if (!atomic_load(&initialized)) {
                sim_vmm_begin();
                atexit(note_end);
                atomic_store(&initialized, true);
        }
        pthread_mutex_unlock(&lock);
        return rc;
}

SIM_API cuInit(unsigned flags)
{
        SIM_ENTER_AS(cuInit, true);
        if (flags)
                return CUDA_ERROR_INVALID_VALUE;
        if (atomic_load(&ended))
                return CUDA_ERROR_DEINITIALIZED;
        if (atomic_load(&forked))
                return CUDA_ERROR_NOT_INITIALIZED;
        if (sim_config()->devices == 0)
                return CUDA_ERROR_NO_DEVICE;
        return begin_once();
}

void sim_misuse(const char *format, ...)
{
        char text[256];
        va_list args;

        /* All are counted, but only the first MAX_REPORTS are printed. */
        if (atomic_fetch_add(&misuses, 1) >= MAX_REPORTS)
                return;
        va_start(args, format);
        vsnprintf(text, sizeof text, format, args);
        va_end(args);
        fprintf(stderr, "sim: misuse: %s\n", text);
}

/* For tests, found by dlsym. */

__attribute__((visibility("default"))) const char grSimVersion[] = "gpureclaim simulated device 1";

__attribute__((visibility("default"))) unsigned long grSimMisuseCount(void)
{
        return atomic_load(&misuses);
}

__attribute__((visibility("default"))) unsigned long grSimCallCount(const char *symbol)
{
        unsigned long sum = 0;

        for (size_t i = 0; i < SIM_SYMBOLS; i++)
                for (unsigned j = 0; j < COUNT_SHARDS && strcmp(sim_entries[i].symbol, symbol) == 0; j++)
                        sum += atomic_load(&calls[j].of[i]);
        return sum;
}

__attribute__((visibility("default"))) size_t grSimUsedBytes(int device)
{
        return atomic_load(&initialized) && device >= 0 && device < sim_config()->devices
                       ? sim_config()->memory_bytes - sim_heap_free_bytes(device)
                       : 0;
}

__attribute__((visibility("default"))) bool grSimProcess(int device, unsigned i, unsigned *ret_pid, size_t *ret_bytes)
{
        bool more = sim_shared_process(device, i, ret_pid, ret_bytes);

        *ret_bytes *= SIM_PAGE_BYTES;
        if (!more && i == 0) { /* this one alone */
                *ret_pid = (unsigned)getpid();
                *ret_bytes = grSimUsedBytes(device);
                return true;
        }
        return more;
}

__attribute__((visibility("default"))) void grSimTake(int device, size_t bytes)
{
        sim_heap_charge(device, bytes);
}
