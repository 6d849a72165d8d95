/* Devices, their properties, peers, and the words for error codes. */
#include "runtime.h"

#include <string.h>

cudaError_t cudaGetDeviceCount(int *count)
{
        RT_EARLY(cuDeviceGetCount(count));
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
        RT_EARLY(cuDeviceGetAttribute(value, (CUdevice_attribute)attribute, device));
}

static int get_attribute(CUdevice_attribute which, int device)
{
        int value = 0;

        rt_driver.cuDeviceGetAttribute(&value, which, device);
        return value;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
        cudaError_t rc = rt_load();

        if (rc != cudaSuccess)
                return rc;
        if (!p)
                return rt_failed(cudaErrorInvalidValue);
        memset(p, 0, sizeof *p);
        rc = rt_result(rt_driver.cuDeviceGetName(p->name, sizeof p->name, device));
        if (rc != cudaSuccess)
                return rc;
        rt_driver.cuDeviceGetUuid((CUuuid *)&p->uuid, device);
        rt_driver.cuDeviceTotalMem(&p->totalGlobalMem, device);
        p->major = get_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device);
        p->minor = get_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device);
        p->multiProcessorCount = get_attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
        p->warpSize = get_attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE, device);
        p->maxThreadsPerBlock = get_attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, device);
        p->maxThreadsPerMultiProcessor = get_attribute(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device);
        p->maxBlocksPerMultiProcessor = get_attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, device);
        p->maxThreadsDim[0] = get_attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, device);
        p->maxThreadsDim[1] = get_attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, device);
        p->maxThreadsDim[2] = get_attribute(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, device);
        p->maxGridSize[0] = get_attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, device);
        p->maxGridSize[1] = get_attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, device);
        p->maxGridSize[2] = get_attribute(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, device);
        p->sharedMemPerBlock = (size_t)get_attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, device);
        p->regsPerBlock = get_attribute(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, device);
        p->totalConstMem = (size_t)get_attribute(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, device);
        p->textureAlignment = (size_t)get_attribute(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, device);
        p->memPitch = (size_t)get_attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH, device);
        p->l2CacheSize = get_attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, device);
        p->memoryBusWidth = get_attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, device);
        p->unifiedAddressing = get_attribute(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, device);
        p->managedMemory = get_attribute(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, device);
        p->concurrentManagedAccess = get_attribute(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, device);
        p->concurrentKernels = get_attribute(CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, device);
        p->canMapHostMemory = get_attribute(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, device);
        p->asyncEngineCount = get_attribute(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, device);
        p->streamPrioritiesSupported = get_attribute(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, device);
        p->memoryPoolsSupported = get_attribute(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, device);
        p->cooperativeLaunch = get_attribute(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, device);
        p->pciBusID = get_attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, device);
        return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device)
{
        RT_EARLY(cuDeviceGetPCIBusId(text, length, device));
}

cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text)
{
        RT_EARLY(cuDeviceGetByPCIBusId(device, text));
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
        RT(cuCtxGetStreamPriorityRange(least, greatest));
}

cudaError_t cudaDeviceGetLimit(size_t *value, enum cudaLimit limit)
{
        RT(cuCtxGetLimit(value, (CUlimit)limit));
}

cudaError_t cudaDeviceSetLimit(enum cudaLimit limit, size_t value)
{
        RT(cuCtxSetLimit((CUlimit)limit, value));
}

cudaError_t cudaSetDeviceFlags(unsigned flags)
{
        int device;
        cudaError_t rc = cudaGetDevice(&device);

        return rc != cudaSuccess ? rc
                                 : rt_result(rt_driver.cuDevicePrimaryCtxSetFlags(device, flags & CU_CTX_FLAGS_MASK));
}

cudaError_t cudaGetDeviceFlags(unsigned *flags)
{
        RT(cuCtxGetFlags(flags));
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
        RT_EARLY(cuDeviceCanAccessPeer(can, device, peer));
}

static cudaError_t with_peer(int peer, unsigned flags, int enable)
{
        CUcontext ctx;
        cudaError_t rc = rt_enter();

        if (rc != cudaSuccess)
                return rc;
        rc = rt_result(rt_driver.cuDevicePrimaryCtxRetain(&ctx, peer));
        if (rc != cudaSuccess)
                return rc;
        return rt_result(enable ? rt_driver.cuCtxEnablePeerAccess(ctx, flags) : rt_driver.cuCtxDisablePeerAccess(ctx));
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
        return with_peer(peer, flags, 1);
}

cudaError_t cudaDeviceDisablePeerAccess(int peer)
{
        return with_peer(peer, 0, 0);
}

static const struct {
        cudaError_t code;
        const char *name, *words;
} errors[] = {
        {cudaSuccess, "cudaSuccess", "no error"},
        {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
        {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
        {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
        {cudaErrorCudartUnloading, "cudaErrorCudartUnloading", "driver shutting down"},
        {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
        {cudaErrorInvalidSymbol, "cudaErrorInvalidSymbol", "invalid device symbol"},
        {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
        {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
         "CUDA driver version is insufficient for CUDA runtime version"},
        {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
        {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
        {cudaErrorDeviceUninitialized, "cudaErrorDeviceUninitialized", "invalid device context"},
        {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
        {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
        {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
        {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
        {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
        {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
        {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
        {cudaErrorContextIsDestroyed, "cudaErrorContextIsDestroyed", "context is destroyed"},
        {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
        {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
        {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
         "operation not permitted when stream is capturing"},
        {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
         "operation failed due to a previous error during capture"},
        {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
        {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
         "dependency created on uncaptured work in another stream"},
        {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
         "operation would make the legacy stream depend on a capturing blocking stream"},
        {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const char *cudaGetErrorName(cudaError_t code)
{
        for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
                if (errors[i].code == code)
                        return errors[i].name;
        }
        return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t code)
{
        for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
                if (errors[i].code == code)
                        return errors[i].words;
        }
        return "unrecognized error code";
}
