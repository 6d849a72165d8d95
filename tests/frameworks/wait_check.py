#!/usr/bin/env python3
"""Whether `gpureclaim wait` starts a program when there is room, neither before nor much later, and takes no memory
itself.

    wait_check.py GPURECLAIM

A process of its own holds most of the GPU for some seconds. Exit status 1 when a check failed, 77 without a GPU.
"""

import ctypes
import subprocess
import sys
import time

from gpu_use import Gpu, skip

HOLD_S = 3
MIB = 2**20


def hold(mib):
    driver = ctypes.CDLL("libcuda.so.1")
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    if driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0):
        raise SystemExit("no device")
    driver.cuCtxSetCurrent(context)
    if driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(mib * MIB)):
        raise SystemExit("no memory")
    print("held", flush=True)
    time.sleep(HOLD_S)


if len(sys.argv) == 3 and sys.argv[1] == "hold":
    hold(int(sys.argv[2]))
    raise SystemExit(0)

command = sys.argv[1]
gpu = Gpu()
free = gpu.settled_free()
if free is None:
    skip("the GPU cannot be asked")
held = int(free * 0.75)
failed = 0


def check(good, what):
    global failed
    print("ok    " if good else "FAILED", what)
    failed += not good


holder = subprocess.Popen([sys.executable, __file__, "hold", str(held)], stdout=subprocess.PIPE, text=True)
if holder.stdout.readline().strip() != "held":
    skip("nothing to wait for")
before = gpu.free()
want = int(before) + held // 2
waiting = subprocess.Popen([command, "wait", "--free", f"{want}MiB", "--", "true"])
time.sleep(1)
check(waiting.poll() is None, f"it waits while {before:.0f} MiB of the {want} wanted are free")
check(before - gpu.free() < 16, f"waiting takes no memory: {before - gpu.free():.0f} MiB")
late = subprocess.run([command, "wait", "--free", f"{want}MiB", "--timeout", "200ms", "--", "true"])
check(late.returncode == 124, f"with a time that is up: status {late.returncode}")
holder.wait()
ended = time.monotonic()
status = waiting.wait(30)
check(status == 0, f"the program was started: status {status}")
print(f"# started {time.monotonic() - ended:.2f} s after the holder's end")
raise SystemExit(1 if failed else 0)
