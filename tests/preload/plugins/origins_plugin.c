/* A library with a planted leak. Built twice, with two names for PLANT, so that the two differ in nothing else. */
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>

int work(void);
int work_in_thread(void);

static __attribute__((noinline)) int PLANT(void)
{
        CUdeviceptr ptr;
        CUresult result = cuMemAlloc(&ptr, 1 << 20);

        return result == CUDA_SUCCESS && ptr ? 0 : 1;
}

__attribute__((visibility("default"))) int work(void)
{
        int failed = PLANT();

        return failed + (failed > 0);
}

/* What the program has to do while it loads this. */
__attribute__((constructor)) static void loading(void)
{
        void (*while_loading)(void) = (void (*)(void))dlsym(RTLD_DEFAULT, "origins_loading");

        if (while_loading)
                while_loading();
}

static void *run(void *context)
{
        return cuCtxSetCurrent(context) != CUDA_SUCCESS || work() ? context : NULL;
}

/* In a thread that no interpreter knows. */
__attribute__((visibility("default"))) int work_in_thread(void)
{
        CUcontext context;
        pthread_t thread;
        void *failed = NULL;

        if (cuCtxGetCurrent(&context) != CUDA_SUCCESS || pthread_create(&thread, NULL, run, context) != 0)
                return 1;
        pthread_join(thread, &failed);
        return failed != NULL;
}
