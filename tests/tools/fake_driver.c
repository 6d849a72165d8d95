/* A driver for the doctor to look at. FAKE_DRIVER says how it behaves: empty, "no-device" or "crash". */
#include <stdlib.h>
#include <string.h>

int cuInit(unsigned flags);
int cuDriverGetVersion(int *ret);
int cuGetErrorName(int code, const char **ret);
int cuDeviceGetCount(int *ret);
int cuDeviceGet(int *ret, int ordinal);
int cuDeviceGetName(char *ret, int length, int device);
int cuDeviceTotalMem_v2(size_t *ret, int device);

/* Of versions newer and older than those that the library knows. */
int cuInit_v3(void);
int cuOld_ptsz(void);
int cuOld_v4(void);
int cuOld_v5_ptsz(void);

static int behaves(const char *how)
{
        const char *wanted = getenv("FAKE_DRIVER");

        return wanted && strcmp(wanted, how) == 0;
}

int cuInit(unsigned flags)
{
        (void)flags;
        if (behaves("crash"))
                abort();
        return behaves("no-device") ? 100 : 0;
}

int cuInit_v3(void)
{
        return 0;
}

int cuOld_ptsz(void)
{
        return 0;
}

int cuOld_v4(void)
{
        return 0;
}

int cuOld_v5_ptsz(void)
{
        return 0;
}

int cuDriverGetVersion(int *ret)
{
        *ret = 12040;
        return 0;
}

int cuGetErrorName(int code, const char **ret)
{
        *ret = code == 100 ? "CUDA_ERROR_NO_DEVICE" : "CUDA_SUCCESS";
        return 0;
}

int cuDeviceGetCount(int *ret)
{
        *ret = 2;
        return 0;
}

int cuDeviceGet(int *ret, int ordinal)
{
        *ret = ordinal;
        return 0;
}

int cuDeviceGetName(char *ret, int length, int device)
{
        if (length < 16)
                return 1;
        strcpy(ret, "Fake device A");
        ret[12] = (char)(ret[12] + device);
        return 0;
}

int cuDeviceTotalMem_v2(size_t *ret, int device)
{
        *ret = ((size_t)device + 1) << 30;
        return 0;
}
