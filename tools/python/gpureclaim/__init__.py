"""gpureclaim from Python: see how much device memory there is, get some back, and help when it is short.

Works in a process that has libgpureclaim.so preloaded, and needs nothing but this module. Sizes are bytes, devices are
CUDA's ordinals.

    import gpureclaim
    gpureclaim.status()                     # {'live_bytes': ..., 'cached_bytes': ..., ...}
    gpureclaim.reclaim(rung="sync")         # bytes that the system got back
    gpureclaim.set_limit(8 << 30)           # at most 8 GiB from now on
    gpureclaim.on_reclaim(my_cache.clear)   # called when an allocation finds no memory
    gpureclaim.torch()                      # the same for PyTorch's caches; also cupy() and jax()

`gpureclaim run` calls the last for a program that imports such a framework.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import inspect
import os
from typing import Any, Callable

__all__ = ["available", "cupy", "jax", "on_reclaim", "reclaim", "set_limit", "status", "torch", "version"]

RUNGS = ("purge", "trim", "driver", "sync", "drop")  # what reclaim takes, weakest first

_HOOK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)


class _Reclaimable(ctypes.Structure):  # struct gpureclaim_reclaimable
    _fields_ = [
        ("struct_bytes", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("purge", _HOOK),
        ("drop", _HOOK),
        ("arg", ctypes.c_void_p),
        ("limit_ms", ctypes.c_uint32),
        ("needs_lock", ctypes.c_uint32),
    ]


class _Status(ctypes.Structure):  # struct gpureclaim_status
    _fields_ = [("struct_bytes", ctypes.c_size_t)] + [
        (name, ctypes.c_uint64)
        for name in (
            "live_bytes",
            "cached_bytes",
            "reserved_bytes",
            "peak_live_bytes",
            "peak_reserved_bytes",
            "hard_limit_bytes",
            "soft_limit_bytes",
            "spilled_bytes",
            "device_total_bytes",
            "device_free_bytes",
            "driver_bytes",
            "imported_bytes",
            "graph_bytes",
            "executables",
            "executable_bytes",
        )
    ]


def _library() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)  # the process: the library is preloaded or not there at all
    try:
        library.gpureclaim_register.argtypes = [ctypes.POINTER(_Reclaimable), ctypes.POINTER(ctypes.c_uint64)]
        library.gpureclaim_unregister.argtypes = [ctypes.c_uint64]
        library.gpureclaim_reclaim.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint64]
        library.gpureclaim_reclaim.restype = ctypes.c_int64
        library.gpureclaim_set_limit.argtypes = [ctypes.c_int, ctypes.c_uint64]
        library.gpureclaim_status.argtypes = [ctypes.c_int, ctypes.POINTER(_Status)]
        library.gpureclaim_version.restype = ctypes.c_char_p
    except AttributeError:
        return None
    return library


_lib = _library()
_registered: dict[int, _Reclaimable] = {}  # id: what ctypes must not let go of


def available() -> bool:
    """Whether libgpureclaim.so is in this process."""
    return _lib is not None


def _need() -> ctypes.CDLL:
    if _lib is None:
        raise RuntimeError("libgpureclaim.so is not in this process: start it with LD_PRELOAD")
    return _lib


def _check(rc: int, what: str) -> int:
    if rc < 0:
        raise OSError(-rc, f"{what}: {os.strerror(-rc)}")
    return rc


def _unsigned(value: int, bits: int, what: str) -> int:
    """The value, which ctypes would take modulo 2**bits."""
    if not 0 <= value < 1 << bits:
        _check(-errno.EINVAL, what)
    return value


def version() -> str:
    return _need().gpureclaim_version().decode()


def status(device: int = 0) -> dict[str, int | None]:
    """What this process holds of a device, as a dict of bytes and one count; None where there is no limit, or a figure
    is not known."""
    result = _Status(struct_bytes=ctypes.sizeof(_Status))
    _check(_need().gpureclaim_status(device, ctypes.byref(result)), f"device {device}")
    values = {name: getattr(result, name) for name, _ in _Status._fields_[1:]}
    return {name: None if value == 2**64 - 1 else value for name, value in values.items()}


def reclaim(device: int = 0, rung: str = "sync", want_bytes: int = 0) -> int:
    """Gets memory back for others, by means up to rung, until it is want_bytes (0: all). Returns the bytes."""
    want = _unsigned(want_bytes, 64, f"reclaim {want_bytes} bytes")
    return _check(_need().gpureclaim_reclaim(device, rung.encode(), want), f"reclaim {rung} on device {device}")


def set_limit(limit_bytes: int | None, device: int = 0) -> None:
    """Sets the hard limit of this process on a device; None: no limit. The driver has to be initialised."""
    what = f"a limit of {limit_bytes} bytes on device {device}"
    value = 2**64 - 1 if limit_bytes is None else _unsigned(limit_bytes, 64, what)
    _check(_need().gpureclaim_set_limit(device, value), what)


def _hook(function: Callable[[int, int], Any] | None) -> Any:
    if function is None:
        return _HOOK()

    def call(_arg, device, want_bytes):
        _ = hook  # refers to itself, so that one that takes itself off is freed only after it has returned
        try:
            function(device, want_bytes)
        except Exception:  # the library names the hook; the program must not hear of it
            return errno.EIO
        return 0

    hook = _HOOK(call)
    return hook


def _adapted(function: Callable[..., Any] | None) -> Callable[[int, int], Any] | None:
    """Lets a hook take (device, want_bytes) or, where it needs no argument, nothing."""
    if function is None:
        return None
    try:
        inspect.signature(function).bind()
    except TypeError:
        return function
    except ValueError:  # a builtin that does not tell
        pass
    return lambda device, want_bytes: function()


def on_reclaim(purge: Callable[..., Any] | None = None, drop: Callable[..., Any] | None = None,
               name: str | None = None, limit_ms: int = 0) -> Callable[[], None]:
    """Has purge called when device memory is short, and drop when all else failed; either gets (device, want_bytes) or,
    where it needs no argument, nothing. They run on another thread, which an allocation waits for no longer than
    limit_ms (0: a second). Returns a function that takes them off again."""
    return _offer(purge, drop, name, limit_ms, needs_lock=False)


def _offer(purge: Callable[..., Any] | None, drop: Callable[..., Any] | None, name: str | None, limit_ms: int,
           needs_lock: bool = True) -> Callable[[], None]:
    """As on_reclaim. needs_lock: of struct gpureclaim_reclaimable."""
    lib = _need()
    entry = _Reclaimable(
        struct_bytes=ctypes.sizeof(_Reclaimable),
        name=(name or str(getattr(purge or drop, "__qualname__", "python"))).encode(),
        purge=_hook(_adapted(purge)),
        drop=_hook(_adapted(drop)),
        limit_ms=_unsigned(limit_ms, 32, f"on_reclaim with a limit of {limit_ms} ms"),
        needs_lock=needs_lock,
    )
    number = ctypes.c_uint64()
    _check(lib.gpureclaim_register(ctypes.byref(entry), ctypes.byref(number)), "on_reclaim")
    _registered[number.value] = entry

    def remove() -> None:
        # Else it is off already, or runs on; what it uses must stay, and the next call must not take it for gone.
        if lib.gpureclaim_unregister(number.value) == 0:
            _registered.pop(number.value, None)

    return remove


def torch(limit_ms: int = 200, collect: bool = True) -> Callable[[], None]:
    """Registers what PyTorch can give up: garbage, its cached blocks, and, where all else failed, the workspaces of
    cuBLAS and the plans of cuFFT. Without collect garbage is left alone, because collecting it runs finalizers of the
    program on another thread. It helps the others in the process (CuPy, JAX, the CUDA libraries); for PyTorch's own
    allocations these hooks come too late, as its allocator holds its lock, and it empties its cache by itself."""
    import gc

    import torch as pytorch

    def purge(device: int, want_bytes: int) -> None:
        if not pytorch.cuda.is_initialized():
            return
        before = pytorch.cuda.memory_reserved(device)
        pytorch.cuda.empty_cache()
        # Collecting stops every Python thread, for long in a large program: only where the cache does not suffice.
        if collect and before - pytorch.cuda.memory_reserved(device) < want_bytes and gc.collect():
            pytorch.cuda.empty_cache()

    def drop(device: int, want_bytes: int) -> None:
        if not pytorch.cuda.is_initialized():
            return
        clear = getattr(pytorch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        pytorch.backends.cuda.cufft_plan_cache[device].clear()
        purge(device, want_bytes)

    return _offer(purge, drop, "torch", limit_ms)


def cupy(limit_ms: int = 200) -> Callable[[], None]:
    """Registers the free blocks of CuPy's memory pools, of the device and of pinned memory."""
    import cupy as array_library

    def purge(device: int, want_bytes: int) -> None:
        with array_library.cuda.Device(device):  # its pool has blocks for each device
            array_library.get_default_memory_pool().free_all_blocks()
        array_library.get_default_pinned_memory_pool().free_all_blocks()

    return _offer(purge, None, "cupy", limit_ms)


def jax(limit_ms: int = 200) -> Callable[[], None]:
    """Registers what JAX has compiled, to be dropped where all else failed: it compiles again. The memory that its own
    allocator has cached cannot be given back."""
    import jax as tracer

    return _offer(None, tracer.clear_caches, "jax", limit_ms)


def register_framework(name: str) -> None:
    """For tools/python/run: what the program would call, but for what it might notice."""
    {"torch": lambda: torch(collect=False), "cupy": cupy, "jax": jax}[name]()


@atexit.register
def _remove_all() -> None:
    # A hook must not be called in an interpreter that is gone.
    for number in list(_registered):
        _need().gpureclaim_unregister(number)
