/* Devices and their properties. */
#include "grsim.h"
#include "sim.h"

#include <stdio.h>
#include <string.h>

bool sim_setup(void)
{
        if (!sim_heap_setup(sim_config()))
                return false;
        if (sim_config()->shared)
                sim_shared_setup(sim_config()->shared);
        sim_pool_setup(sim_config());
        return true;
}

CUresult sim_device_check(CUdevice device)
{
        return device >= 0 && device < sim_config()->devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

SIM_API cuDeviceGet(CUdevice *device, int ordinal)
{
        SIM_ENTER(cuDeviceGet);
        if (!device)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(ordinal) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        *device = ordinal;
        return CUDA_SUCCESS;
}

SIM_API cuDeviceGetCount(int *count)
{
        SIM_ENTER(cuDeviceGetCount);
        if (!count)
                return CUDA_ERROR_INVALID_VALUE;
        *count = sim_config()->devices;
        return CUDA_SUCCESS;
}

SIM_API cuDeviceGetName(char *name, int length, CUdevice device)
{
        SIM_ENTER(cuDeviceGetName);
        if (!name || length <= 0)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        snprintf(name, (size_t)length, "Simulated device");
        return CUDA_SUCCESS;
}

__attribute__((visibility("default"))) void grSimUuid(int gpu, unsigned char ret[16])
{
        /* Processes that name the same file share a GPU, so its UUID comes from the file; else from the process. */
        uint64_t hash = sim_shared_gpu(sim_config()->shared);

        memset(ret, 0, 16);
        memcpy(ret, "simgpu", 6);
        memcpy(ret + 6, &hash, sizeof hash);
        ret[15] = (unsigned char)gpu;
}

static CUresult get_uuid(CUuuid *uuid, CUdevice device)
{
        if (!uuid)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        grSimUuid(sim_config()->physical[device], (unsigned char *)uuid->bytes);
        return CUDA_SUCCESS;
}

SIM_API cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
        SIM_ENTER(cuDeviceGetUuid);
        return get_uuid(uuid, device);
}

SIM_API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
        SIM_ENTER(cuDeviceGetUuid_v2);
        return get_uuid(uuid, device);
}

/* The form of programs from before CUDA 3.2; cuda.h gives its name to the newer one. */
#undef cuDeviceTotalMem
SIM_API cuDeviceTotalMem(unsigned *bytes, CUdevice device)
{
        size_t all;
        CUresult rc;

        SIM_ENTER(cuDeviceTotalMem);
        rc = bytes ? cuDeviceTotalMem_v2(&all, device) : CUDA_ERROR_INVALID_VALUE;
        if (rc == CUDA_SUCCESS)
                *bytes = all < UINT32_MAX ? (unsigned)all : UINT32_MAX;
        return rc;
}

SIM_API cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
        SIM_ENTER(cuDeviceTotalMem_v2);
        if (!bytes)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        *bytes = sim_config()->memory_bytes;
        return CUDA_SUCCESS;
}

static const struct {
        CUdevice_attribute attribute;
        int value;
} attributes[] = {
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 0x7fffffff},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
        {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
        {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
        {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 0x7fffffff},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
        {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1000000},
        {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
        {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
        {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
        {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 1000000},
        {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 512},
        {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 1 << 20},
        {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, SIM_RESIDENT_THREADS},
        {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
        {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
        {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
        {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
        {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
        {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
        {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
        {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
        {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
        {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
};

SIM_API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
        SIM_ENTER(cuDeviceGetAttribute);
        if (!value || attribute <= 0 || attribute >= CU_DEVICE_ATTRIBUTE_MAX)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        /* Attributes without a value below are 0: the device lacks the feature. */
        *value = attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? device + 1 : 0;
        if (attribute == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
                *value = sim_config()->rdma;
        for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
                if (attributes[i].attribute == attribute && !sim_config()->lacks[attribute])
                        *value = attributes[i].value;
        }
        return CUDA_SUCCESS;
}

SIM_API cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
        SIM_ENTER(cuDeviceComputeCapability);
        if (!major || !minor)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        *major = 9;
        *minor = 0;
        return CUDA_SUCCESS;
}

SIM_API cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
        SIM_ENTER(cuDeviceGetPCIBusId);
        if (!text || length < 13)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        snprintf(text, (size_t)length, "0000:%02X:00.0", (unsigned)device + 1);
        return CUDA_SUCCESS;
}

SIM_API cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
        unsigned bus;

        SIM_ENTER(cuDeviceGetByPCIBusId);
        if (!device || !text || sscanf(text, "%*x:%x:", &bus) != 1)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check((int)bus - 1) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        *device = (int)bus - 1;
        return CUDA_SUCCESS;
}

SIM_API cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
        SIM_ENTER(cuDeviceCanAccessPeer);
        if (!can)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS || sim_device_check(peer) != CUDA_SUCCESS)
                return CUDA_ERROR_INVALID_DEVICE;
        *can = device != peer;
        return CUDA_SUCCESS;
}

SIM_API cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice device, CUdevice peer)
{
        SIM_ENTER(cuDeviceGetP2PAttribute);
        if (!value)
                return CUDA_ERROR_INVALID_VALUE;
        if (sim_device_check(device) != CUDA_SUCCESS || sim_device_check(peer) != CUDA_SUCCESS || device == peer)
                return CUDA_ERROR_INVALID_DEVICE;
        *value = attribute == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED ||
                 attribute == CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        return CUDA_SUCCESS;
}
