/* cuGetProcAddress gives the variant the real driver gives, and what it gives is what the library exports. */
#include "simtest.h"

#include "grsim.h"

#include <dlfcn.h>
#include <string.h>

static const struct {
        const char *name;
        int version;
        cuuint64_t flags;
        const char *symbol; /* NULL: nothing */
        CUdriverProcAddressQueryResult status;
} cases[] = {
        {"cuInit", 2000, 0, "cuInit", 0},
        {"cuGetProcAddress", 11030, 0, "cuGetProcAddress", 0},
        {"cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2", 0},
        {"cuMemAlloc", 3020, 0, "cuMemAlloc_v2", 0},
        {"cuMemAlloc", 13000, 2, "cuMemAlloc_v2", 0},
        {"cuMemcpy", 4000, 0, "cuMemcpy", 0},
        {"cuMemcpy", 4000, 2, "cuMemcpy", 0},
        {"cuMemcpy", 7000, 2, "cuMemcpy_ptds", 0},
        {"cuMemcpyHtoD", 7000, 2, "cuMemcpyHtoD_v2_ptds", 0},
        {"cuMemcpyHtoD", 7000, 1, "cuMemcpyHtoD_v2", 0},
        {"cuLaunchKernel", 4000, 0, "cuLaunchKernel", 0},
        {"cuLaunchKernel", 12000, 2, "cuLaunchKernel_ptsz", 0},
        {"cuMemFreeAsync", 11020, 2, "cuMemFreeAsync_ptsz", 0},
        {"cuStreamBeginCapture", 10000, 0, "cuStreamBeginCapture", 0},
        {"cuStreamBeginCapture", 10010, 0, "cuStreamBeginCapture_v2", 0},
        {"cuStreamBeginCapture", 13000, 2, "cuStreamBeginCapture_v2_ptsz", 0},
        {"cuStreamGetCaptureInfo", 11030, 0, "cuStreamGetCaptureInfo_v2", 0},
        {"cuStreamGetCaptureInfo", 12030, 0, "cuStreamGetCaptureInfo_v3", 0},
        {"cuCtxSynchronize", 2000, 0, "cuCtxSynchronize", 0},
        {"cuCtxSynchronize", 13000, 0, "cuCtxSynchronize_v2", 0},
        {"cuCtxCreate", 3020, 0, "cuCtxCreate_v2", 0},
        {"cuCtxCreate", 12050, 0, "cuCtxCreate_v4", 0},
        {"cuLaunchHostFunc", 13000, 0, "cuLaunchHostFunc", 0},
        {"cuLaunchHostFunc", 13020, 2, "cuLaunchHostFunc_v2_ptsz", 0},
        {"cuGraphAddNode", 13040, 0, "cuGraphAddNode_v3", 0},
        {"cuCtxRecordEvent", 12050, 0, "cuCtxRecordEvent", 0},
        {"cuCtxRecordEvent", 12040, 0, NULL, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT},
        {"cuMemAllocAsync", 11010, 0, NULL, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT},
        {"cuGLInit", 13000, 0, NULL, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND},
        {"cuMemAlloc_v2", 13000, 0, NULL, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND},
};

static void test_cases(void)
{
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
                CUdriverProcAddressQueryResult status = 77;
                void *found = (void *)1, *want = cases[i].symbol ? dlsym(RTLD_DEFAULT, cases[i].symbol) : NULL;

                GR_MUST(cuGetProcAddress(cases[i].name, &found, cases[i].version, cases[i].flags, &status));
                if (found != want || status != cases[i].status) {
                        fprintf(stderr, "%s %d flags %d: not %s, or status %d\n", cases[i].name, cases[i].version,
                                (int)cases[i].flags, cases[i].symbol ? cases[i].symbol : "nothing", (int)status);
                        gr_check_failures++;
                }
        }
}

static void test_errors(void)
{
        typedef CUresult (*first_version)(const char *, void **, int, cuuint64_t);
        first_version first;
        const char *text;
        const void *table;
        CUuuid id = {{0}};
        void *p;

        GR_CHECK_EQ(cuGetProcAddress(NULL, &p, 13000, 0, NULL), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGetProcAddress("cuInit", NULL, 13000, 0, NULL), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGetProcAddress("cuInit", &p, 13000, 3, NULL), CUDA_ERROR_INVALID_VALUE);
        GR_CHECK_EQ(cuGetProcAddress("cuNothing", &p, 13000, 0, NULL), CUDA_ERROR_NOT_FOUND);
        *(void **)&first = dlsym(RTLD_DEFAULT, "cuGetProcAddress");
        GR_CHECK(first != NULL);
        GR_MUST(first("cuInit", &p, 13000, 0));
        GR_CHECK_EQ(cuGetExportTable(&table, &id), CUDA_ERROR_NOT_FOUND);
        GR_MUST(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
        GR_CHECK(strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY") == 0);
        GR_MUST(cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
        GR_CHECK(strcmp(text, "out of memory") == 0);
        GR_CHECK_EQ(cuGetErrorName((CUresult)12345, &text), CUDA_ERROR_INVALID_VALUE);
}

int main(void)
{
        GR_CHECK(dlsym(RTLD_DEFAULT, "grSimVersion") == (const void *)grSimVersion);
        GR_CHECK(dlsym(RTLD_DEFAULT, "sim_enter") == NULL);
        test_cases();
        test_errors();
        return GR_CHECK_RESULT();
}
