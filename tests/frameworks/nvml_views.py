"""NVML through ctypes, as Python's bindings have it: it says what cuMemGetInfo says.

    GPURECLAIM_NVML=1 GPURECLAIM_HARD_LIMIT=1GiB LD_PRELOAD=... python3 nvml_views.py --limit-mib=1024

Exit status 1 when it does not, 77 where there is no NVML.
"""

import argparse
import ctypes

from gpu_use import skip


class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class MemoryV2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint)]
    _fields_ += [(name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")]


def must(code, what):
    if code != 0:
        raise SystemExit(f"{what}: {code}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit-mib", type=int, required=True)
    limit = parser.parse_args().limit_mib << 20
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        skip("no NVML")
    cuda = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)  # a stand-in of NVML looks for the simulated device
    if nvml.nvmlInit_v2() != 0:
        skip("NVML does not start")

    uuid, context, pointer, gpu = (ctypes.c_ubyte * 16)(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
    must(cuda.cuInit(0), "cuInit")
    must(cuda.cuDeviceGetUuid_v2(uuid, 0), "cuDeviceGetUuid")
    must(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    must(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    digits = bytes(uuid).hex()
    text = "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
    must(nvml.nvmlDeviceGetHandleByUUID(text.encode(), ctypes.byref(gpu)), "nvmlDeviceGetHandleByUUID")

    failed = False
    for taken in (0, limit // 4):
        if taken:
            must(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(taken)), "cuMemAlloc")
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        first, second = Memory(), MemoryV2(version=ctypes.sizeof(MemoryV2) | 2 << 24)
        must(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
        must(nvml.nvmlDeviceGetMemoryInfo(gpu, ctypes.byref(first)), "nvmlDeviceGetMemoryInfo")
        must(nvml.nvmlDeviceGetMemoryInfo_v2(gpu, ctypes.byref(second)), "nvmlDeviceGetMemoryInfo_v2")
        used = f"{first.used >> 20} of {first.total >> 20} MiB used"
        print(f"{taken >> 20} MiB taken: {used}, {second.reserved} reserved")
        failed |= (first.total, first.free) != (limit, free.value) or (second.total, second.free) != (limit, free.value)
        failed |= first.used != limit - free.value or second.used != first.used or first.used < taken
    must(cuda.cuMemFree_v2(pointer), "cuMemFree")
    print("nvml_views: failed" if failed else "nvml_views: all held")
    raise SystemExit(failed)


main()
