"""Programs with planted leaks (origins_test.sh). origins.py MODE [LIBRARY]: what MODE is, it says at its end."""

import ctypes
import os
import signal
import sys
import threading

cuda = ctypes.CDLL("libcuda.so.1")  # whose functions are called without the interpreter's lock
held = ctypes.PyDLL("libcuda.so.1")  # and with it
context = ctypes.c_void_p()


def check(result):
    if result:
        raise RuntimeError(f"error {result}")


check(cuda.cuInit(0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))


def allocate(size, library=cuda):
    ptr = ctypes.c_uint64()
    check(library.cuMemAlloc_v2(ctypes.byref(ptr), ctypes.c_size_t(size)))
    return ptr


def free(ptr):
    check(cuda.cuMemFree_v2(ptr))


class Model:
    def step(self):
        return allocate(1 << 20)  # the line of step


def größe():
    return allocate(2 << 20)


def generator():
    yield allocate(3000, held)


def leaks():
    """Keeps ten blocks from Model.step, two from a function that is not ASCII, one from a generator; then is killed."""
    for _ in range(100):
        free(allocate(1000))
    for _ in range(10):
        Model().step()
    for _ in range(2):
        größe()
    next(generator())


def refused():
    """As leaks, and is refused 64 GiB before it is killed."""
    leaks()
    try:
        allocate(1 << 36)
    except RuntimeError:
        pass


def overrun():
    """Writes behind a block of Model.step and frees it, below functions with long names."""
    scope = {"step": Model().step}
    names = ["x" * 700, "y" * 700]
    for inner, outer in zip(["step", *names], names):
        exec(compile(f"def {outer}():\n    return {inner}()", "long.py", "exec"), scope)
    ptr = scope[names[-1]]()
    check(cuda.cuMemsetD8_v2(ctypes.c_uint64(ptr.value + (1 << 20)), 7, ctypes.c_size_t(4)))
    free(ptr)


def made():
    """Functions that come and go at one address, each with a leak of its own."""
    for i in range(40):
        name = f"leak{i:02}"
        scope = {"allocate": allocate}
        exec(compile(f"def {name}():\n    allocate(5000)\n{name}()", f"{name}.py", "exec"), scope)
        scope.clear()


def threads():
    """Threads that allocate at once, and one that is not Python's."""

    def keep():
        check(cuda.cuCtxSetCurrent(context))
        for _ in range(200):
            free(allocate(4096))
        allocate(4096)

    all_of = [threading.Thread(target=keep) for _ in range(4)]
    for thread in all_of:
        thread.start()
    for thread in all_of:
        thread.join()
    check(ctypes.CDLL(sys.argv[2]).work_in_thread())


def ends():
    """The interpreter ends while other threads allocate."""

    def busy():
        cuda.cuCtxSetCurrent(context)
        while True:
            free(allocate(4096))

    for _ in range(4):
        threading.Thread(target=busy, daemon=True).start()
    threading.Event().wait(0.2)


globals()[sys.argv[1]]()
if sys.argv[1] != "ends":
    os.kill(os.getpid(), signal.SIGKILL)
