"""What the tests of the command share: a folder of their own, processes on the simulated device, and the command."""

import ctypes
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time

MIB = 2**20
sys.path.append("/usr/lib/python3/dist-packages")  # of Debian's packages, where another Python runs the tests


class Scene:
    """GPUs that processes share, under the library. Use as a context: what is left is ended and removed."""

    def __init__(self, command, sim, shim, devices=1, memory="1GiB"):
        self.folder = tempfile.mkdtemp(prefix="gr-scene-")
        self.command = command
        self.failed = 0
        self._processes = []
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("GPURECLAIM_")}
        self.environment.update(
            GPURECLAIM_REGION_DIR=os.path.join(self.folder, "region"),
            GRSIM_SHARED=os.path.join(self.folder, "gpu"),
            GRSIM_DEVICES=str(devices),
            GRSIM_MEMORY=memory,
        )
        for name in ("LD_PRELOAD", "CUDA_VISIBLE_DEVICES", "ASAN_OPTIONS", "HOME", "XDG_CONFIG_HOME"):
            self.environment.pop(name, None)
        self._under = dict(LD_LIBRARY_PATH=sim, LD_PRELOAD=shim)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._processes:
            process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, before=(), **environment):
        process = Process({**self.environment, **self._under, **environment}, before)
        self._processes.append(process)
        return process

    def run(self, *arguments, **environment):
        done = subprocess.run(
            [self.command, *arguments], env={**self.environment, **environment}, capture_output=True, text=True,
            timeout=60
        )
        return done.returncode, done.stdout, done.stderr

    def check(self, good, what):
        if not good:
            print("FAILED:", what, flush=True)
            self.failed += 1


class Process:
    """A program that allocates when told to."""

    def __init__(self, environment, before):
        self._process = subprocess.Popen(
            [*before, sys.executable, os.path.abspath(__file__)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.pid = self._process.pid

    def ask(self, *words):
        """"alloc DEVICE MIB", "free", "open DEVICE MIB" (another's memory) and "close" answer the driver's result,
        as "graph DEVICE" (makes one executable) and "capture DEVICE MIB" (frees memory in a capture) do, "total DEVICE"
        MiB."""
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def end(self):
        self._process.stdin.close()
        return self._process.wait(30)

    def kill(self):
        self._process.kill()
        self._process.wait()


def until(condition, seconds=10):
    """Whether condition becomes true within a time that suffices on a busy machine."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _program():
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    blocks, opened, contexts = [], [], {}

    def use(device):
        if device not in contexts:
            contexts[device] = ctypes.c_void_p()
            if driver.cuDevicePrimaryCtxRetain(ctypes.byref(contexts[device]), device):
                raise SystemExit("no such device")
        driver.cuCtxSetCurrent(contexts[device])

    for line in sys.stdin:
        word, *arguments = line.split()
        result = 0
        if word == "alloc":
            pointer = ctypes.c_uint64()
            use(int(arguments[0]))
            result = driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(arguments[1]) * MIB))
            if result == 0:
                blocks.append(pointer)
        elif word == "free":
            while blocks and result == 0:
                result = driver.cuMemFree_v2(blocks.pop())
        elif word == "open":
            use(int(arguments[0]))
            size = int(arguments[1]) * MIB
            file = os.memfd_create("memory of another interface")
            os.truncate(file, size)
            # CUDA_EXTERNAL_MEMORY_HANDLE_DESC: type (a descriptor), handle, size, flags and what is reserved
            description, memory = struct.pack("@iP8xQI68x", 1, file, size, 0), ctypes.c_void_p()
            result = driver.cuImportExternalMemory(ctypes.byref(memory), description)
            if result == 0:
                opened.append(memory)
        elif word == "close":
            while opened and result == 0:
                result = driver.cuDestroyExternalMemory(opened.pop())
        elif word == "graph":
            graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
            use(int(arguments[0]))
            result = driver.cuGraphCreate(ctypes.byref(graph), 0)
            if result == 0:
                result = driver.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        elif word == "capture":
            stream, pointer, graph = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
            use(int(arguments[0]))
            result = (
                driver.cuStreamCreate(ctypes.byref(stream), 0)
                or driver.cuStreamBeginCapture_v2(stream, 0)
                or driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(int(arguments[1]) * MIB))
                or driver.cuMemFree_v2(pointer)
                or driver.cuStreamEndCapture(stream, ctypes.byref(graph))
            )
        elif word == "total":
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            use(int(arguments[0]))
            driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
            result = total.value // MIB
        print(result, flush=True)


if __name__ == "__main__":
    _program()
