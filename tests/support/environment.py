#!/usr/bin/env python3
"""Says in one line what a test or a measurement ran on: the cards and their driver, its CUDA version, the packages, the
day. tests/bench/bench_report.py makes tables of such lines."""

import collections
import ctypes
import importlib.metadata
import subprocess
import sys
import time

PACKAGES = ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x", "jax", "numba", "numba-cuda")


def cards():
    try:
        said = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        said = []
    counts = collections.Counter(line.replace(", ", ", driver ") for line in said)
    return " and ".join(f"{count} x {card}" if count > 1 else card for card, count in counts.items()) or "card unknown"


def cuda():
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return []
    except (OSError, AttributeError):
        return []
    return [f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"]


def packages():
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def environment(simulated, *processor):
    """PROCESSOR: what to say of it, where times are measured."""
    card = "no card: the simulated device" if simulated else cards()
    return "; ".join([card, *cuda(), *processor, *packages(), time.strftime("%Y-%m-%d", time.gmtime())])


if __name__ == "__main__":
    print(environment(sys.argv[1:] == ["--simulated"]))
