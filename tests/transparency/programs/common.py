"""For every script here: skipping, and a checksum that does not hide a single changed bit."""

import os
import pathlib
import sys
import warnings
import zlib

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "frameworks"))

from gpu_use import find_cupy, find_jax, find_torch, skip  # noqa: E402, F401

# cuBLAS and PyTorch choose the same kernels on every run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What packages say about each other's versions is not the GPU's doing.
warnings.filterwarnings("ignore")


def bits(*arrays):
    """A checksum over the bytes of NumPy arrays, CUDA tensors or anything NumPy can read."""
    import numpy

    sum = 0
    for array in arrays:
        if hasattr(array, "detach"):
            array = array.detach().cpu()
            array = array.float().numpy() if str(array.dtype) == "torch.bfloat16" else array.numpy()
        elif hasattr(array, "get"):
            array = array.get()
        sum = zlib.crc32(numpy.ascontiguousarray(array).tobytes(), sum)
    return f"{sum:08x}"


def check(what, good):
    """Prints the answer; a wrong one ends the script with status 1."""
    print(f"{what}: {'ok' if good else 'WRONG'}")
    if not good:
        raise SystemExit(1)


def torch_with_gpu():
    """The module, set up to repeat itself exactly; skips the script without a GPU."""
    torch = find_torch()
    torch.manual_seed(7)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    return torch


def numba_with_gpu():
    """numba.cuda. Numba may be older than NumPy and name what that has dropped; nothing here calls it."""
    try:
        import numpy
    except ImportError:
        skip("no NumPy")
    for old, new in (("row_stack", "vstack"), ("in1d", "isin"), ("trapz", "trapezoid")):
        if not hasattr(numpy, old):
            setattr(numpy, old, getattr(numpy, new))
    try:
        from numba import cuda
    except ImportError:
        skip("no Numba")
    if not cuda.is_available():
        skip("Numba sees no GPU")
    return cuda
