/* What the command asks of libgpureclaim.so, without hooking anything: as a library that the loader took but that
 * fails. */
#include <stddef.h>

const char *gpureclaim_version(void);
const char *const *gpureclaim_hooked_symbols(void);

const char *gpureclaim_version(void)
{
        return "fake";
}

const char *const *gpureclaim_hooked_symbols(void)
{
        static const char *const symbols[] = {"cuInit", "cuNotInThisDriver", "cuOld_v2_ptsz", "cuOld_v3_ptsz", NULL};

        return symbols;
}
