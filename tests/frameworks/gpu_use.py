"""What a process holds on the GPU, asked of NVML: under the shim cuMemGetInfo answers with the program's share. And
what the programs of this folder begin with."""

import contextlib
import ctypes
import os
import threading
import time


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


class Gpu:
    """Use of the first GPU that CUDA shows the process, in MiB, relative to the moment this object was made (before
    CUDA starts)."""

    def __init__(self):
        self._device = ctypes.c_void_p()
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
            known = self._nvml.nvmlInit_v2() == 0 and self._find(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
        except OSError:
            known = False
        if not known:
            self._nvml = None
        self._before = self._used()
        self.peak = 0.0

    def _find(self, visible):
        """NVML shows all GPUs, whatever CUDA does; it counts them by their place on the bus."""
        first = visible.split(",")[0].strip()
        if first.startswith("GPU-"):
            return self._nvml.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(self._device)) == 0
        number = int(first) if first.isdigit() else 0
        return self._nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(self._device)) == 0

    def _used(self):
        memory = _Memory()
        if not self._nvml or self._nvml.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory)) != 0:
            return None
        return memory.used / 2**20

    def free(self):
        """MiB of the whole GPU that nobody holds, or None when the GPU cannot be asked."""
        memory = _Memory()
        if not self._nvml or self._nvml.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory)) != 0:
            return None
        return memory.free / 2**20

    def settled_free(self):
        """The same once it no longer changes: what killed processes held comes back a moment later."""
        before = self.free()
        for _ in range(20):
            time.sleep(0.5)
            now = self.free()
            if now is None or before is None or abs(now - before) < 1:
                return now
            before = now
        return before

    def used(self):
        """MiB, or None when the GPU cannot be asked; remembers the highest answer as peak."""
        now = self._used()
        if now is None or self._before is None:
            return None
        self.peak = max(self.peak, now - self._before)
        return now - self._before

    @contextlib.contextmanager
    def watched(self, seen=None):
        """Looks all the time, from a thread, for the peaks between two calls of used(); not for what is timed. Appends
        (seconds, MiB) to a list."""
        stop = threading.Event()
        begin = time.perf_counter()

        def look():
            while not stop.wait(0.001):
                used = self.used()
                if seen is not None and used is not None:
                    seen.append((time.perf_counter() - begin, used))

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def skip(why):
    print("skipped:", why)
    raise SystemExit(77)


def find_torch():
    """PyTorch, where it is there and sees a CUDA device; else the program is skipped."""
    try:
        import torch
    except ImportError:
        skip("no PyTorch")
    if not torch.cuda.is_available():
        skip("PyTorch sees no CUDA device")
    return torch


def find_jax():
    """As find_torch, for JAX."""
    try:
        import jax
    except ImportError:
        skip("no JAX")
    try:
        jax.devices("gpu")
    except RuntimeError as error:
        skip(f"JAX sees no CUDA device: {error}")
    return jax


def find_cupy():
    """As find_torch, for CuPy."""
    try:
        import cupy
    except ImportError:
        skip("no CuPy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        skip(f"CuPy sees no CUDA device: {error}")
    return cupy
