/* How programs find functions of the simulated driver: cuGetProcAddress; and the texts of its error codes. */
#include "sim.h"

#include <string.h>

const struct sim_entry sim_entries[SIM_SYMBOLS] = {
#define SIM_EXPORT(name, version, symbol) {#name, #symbol, version, false, (void *)symbol},
#define SIM_EXPORT_PT(name, version, pt_version, symbol, suffix)                                                       \
        {#name, #symbol, version, false, (void *)symbol},                                                              \
                {#name, #symbol #suffix, pt_version, true, (void *)symbol##suffix},
#include "exports.def"
#undef SIM_EXPORT
#undef SIM_EXPORT_PT
};

/* The newest variant not newer than asked; with per_thread the newest per-thread one wins if there is any. */
static const struct sim_entry *find_entry(const char *name, int version, bool per_thread, bool *ret_known)
{
        const struct sim_entry *plain = NULL, *threaded = NULL;

        *ret_known = false;
        if (sim_symbol_missing(name))
                return NULL;
        for (size_t i = 0; i < SIM_SYMBOLS; i++) {
                const struct sim_entry *e = &sim_entries[i];

                if (strcmp(e->name, name) != 0)
                        continue;
                *ret_known = true;
                if (e->version > version)
                        continue;
                if (!e->per_thread && (!plain || e->version > plain->version))
                        plain = e;
                if (e->per_thread && (!threaded || e->version > threaded->version))
                        threaded = e;
        }
        return per_thread && threaded ? threaded : plain;
}

static CUresult look_up(const char *name, void **function, int version, cuuint64_t flags,
                        CUdriverProcAddressQueryResult *status)
{
        const cuuint64_t both = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
        const struct sim_entry *entry;
        bool known;

        if (!name || !function || version <= 0 || version > SIM_DRIVER || (flags & ~both) || (flags & both) == both)
                return CUDA_ERROR_INVALID_VALUE;
        entry = find_entry(name, version, flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, &known);
        *function = entry ? entry->function : NULL;
        if (status)
                *status = entry   ? CU_GET_PROC_ADDRESS_SUCCESS
                          : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
                                  : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        /* A caller that passes no status gets an error code instead. */
        return entry || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* The first version has no status; the header declares both with the second one's parameters under one name. */
SIM_API cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                            CUdriverProcAddressQueryResult *symbolStatus)
{
        SIM_ENTER_AS(cuGetProcAddress_v2, true);
        return look_up(symbol, pfn, cudaVersion, flags, symbolStatus);
}

SIM_API cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
        SIM_ENTER_AS(cuGetProcAddress, true);
        return look_up(symbol, pfn, cudaVersion, flags, NULL);
}

SIM_API cuGetExportTable(const void **table, const CUuuid *id)
{
        SIM_ENTER_AS(cuGetExportTable, true);
        if (!table || !id)
                return CUDA_ERROR_INVALID_VALUE;
        *table = NULL;
        return CUDA_ERROR_NOT_FOUND;
}

SIM_API cuSimNewest(void)
{
        SIM_ENTER_AS(cuSimNewest, true);
        return CUDA_SUCCESS;
}

SIM_API cuDriverGetVersion(int *version)
{
        SIM_ENTER_AS(cuDriverGetVersion, true);
        if (!version)
                return CUDA_ERROR_INVALID_VALUE;
        *version = SIM_DRIVER;
        return CUDA_SUCCESS;
}

struct error_words {
        CUresult code;
        const char *name, *words;
};

#define ERROR(code, words)                                                                                             \
        {                                                                                                              \
                code, #code, words                                                                                     \
        }
static const struct error_words error_words[] = {
        ERROR(CUDA_SUCCESS, "no error"),
        ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
        ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
        ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
        ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
        ERROR(CUDA_ERROR_STUB_LIBRARY, "CUDA driver is a stub library"),
        ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
        ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
        ERROR(CUDA_ERROR_INVALID_IMAGE, "device kernel image is invalid"),
        ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
        ERROR(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
        ERROR(CUDA_ERROR_UNMAP_FAILED, "unmapping of buffer object failed"),
        ERROR(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped"),
        ERROR(CUDA_ERROR_NOT_MAPPED, "resource not mapped"),
        ERROR(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "peer access is not supported between these two devices"),
        ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
        ERROR(CUDA_ERROR_ILLEGAL_STATE, "the operation cannot be performed in the present state"),
        ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
        ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
        ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
        ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
        ERROR(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
        ERROR(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "cannot set while device is active in this process"),
        ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
        ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"),
        ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "pointer does not correspond to a registered memory region"),
        ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
        ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
        ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
        ERROR(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized"),
        ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"),
        ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"),
        ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE, "operation would result in a merge of separate capture sequences"),
        ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "capture was not initiated in this stream"),
        ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
        ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "dependency created on uncaptured work in another stream"),
        ERROR(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
              "operation would make the legacy stream depend on a capturing blocking stream"),
        ERROR(CUDA_ERROR_CAPTURED_EVENT, "operation not permitted on an event last recorded in a capturing stream"),
        ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
              "attempt to terminate a thread-local capture sequence from another thread"),
        ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};

static CUresult find_words(CUresult code, const char **ret_text, bool name)
{
        if (!ret_text)
                return CUDA_ERROR_INVALID_VALUE;
        for (size_t i = 0; i < sizeof error_words / sizeof *error_words; i++) {
                if (error_words[i].code == code) {
                        *ret_text = name ? error_words[i].name : error_words[i].words;
                        return CUDA_SUCCESS;
                }
        }
        *ret_text = NULL;
        return CUDA_ERROR_INVALID_VALUE;
}

SIM_API cuGetErrorName(CUresult error, const char **text)
{
        SIM_ENTER_AS(cuGetErrorName, true);
        return find_words(error, text, true);
}

SIM_API cuGetErrorString(CUresult error, const char **text)
{
        SIM_ENTER_AS(cuGetErrorString, true);
        return find_words(error, text, false);
}
