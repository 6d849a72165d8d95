"""The Python module on the simulated device, with the driver called through ctypes."""

import ctypes
import functools
import gc
import os
import sys
import tempfile
import threading
import time
import types
import weakref

import gpureclaim

MIB = 1 << 20


def open_device():
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    assert cuda.cuCtxSetCurrent(context) == 0
    return cuda


def late():
    """A framework that is late, as the allocating thread holds its lock, is not named; another one is."""
    let_go = threading.Event()
    with tempfile.TemporaryFile("w+") as log:
        terminal = os.dup(2)
        os.dup2(log.fileno(), 2)
        sys.modules["jax"] = types.SimpleNamespace(clear_caches=let_go.wait)
        remove = [gpureclaim.jax(limit_ms=1), gpureclaim.on_reclaim(drop=let_go.wait, name="mine", limit_ms=1)]
        cuda = open_device()
        assert cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(300 * MIB)) == 2
        let_go.set()
        for each in remove:
            each()
        os.dup2(terminal, 2)
        log.seek(0)
        said = log.read()
    if "reclaimable mine: drop did not return in time" not in said or "jax" in said:
        sys.exit(said)


def by_other_ways():
    """Callables of all kinds get the device and the bytes, or nothing where they need no argument."""
    got = {}

    def wrapper(name):
        def decorate(function):
            @functools.wraps(function)
            def wrapped(*words, **more):
                got[name] = words
                return function(*words, **more)

            return wrapped

        return decorate

    class Cache:
        def __call__(self, device, want_bytes):
            got["object"] = device, want_bytes

        def clear(self, device, want_bytes):
            got["method"] = device, want_bytes

        def clear_all(self):
            got["method without"] = ()

    def tagged(tag, device, want_bytes):
        got[tag] = device, want_bytes

    def defaults(*words, generation=2, **more):
        got["all optional"] = words

    def generation(generation=2, verbose=False):
        got["defaults"] = generation, verbose

    filled = {"a": 1}
    functions = (
        wrapper("decorated")(lambda device, want_bytes: None),
        wrapper("decorated without")(lambda: None),
        Cache(),
        Cache().clear,
        Cache().clear_all,
        functools.partial(tagged, "partial"),
        functools.partial(tagged, "partial without", 0, 0),
        defaults,
        generation,
        filled.clear,  # a builtin
    )
    removes = [gpureclaim.on_reclaim(function) for function in functions]
    gpureclaim.reclaim(rung="purge")
    for remove in removes:
        remove()
    both = {"decorated", "object", "method", "partial"}
    assert {name for name, words in got.items() if len(words) == 2 and words[1] > 2**32} == both, got
    assert got["decorated without"] == got["method without"] == got["all optional"] == (), got
    assert got["defaults"] == (2, False) and "partial without" in got and not filled, got


def removed_meanwhile():
    """What a hook that runs uses stays: after a second remove, and where the hook has removed itself."""
    inside, may_end = threading.Event(), threading.Event()

    def lasting():
        inside.set()
        may_end.wait()

    remove = gpureclaim.on_reclaim(lasting, limit_ms=1)
    entry = weakref.ref(gpureclaim._registered[max(gpureclaim._registered)])
    gpureclaim.reclaim(rung="purge")
    inside.wait()
    # The first waits for the hook, and the second finds nothing.
    removes = [threading.Thread(target=remove) for _ in range(2)]
    for thread in removes:
        thread.start()
    while all(thread.is_alive() for thread in removes):
        time.sleep(0.01)
    gc.collect()
    assert entry() is not None
    may_end.set()
    for thread in removes:
        thread.join()

    def thunks():  # what the library calls
        gc.collect()
        return sum(type(each).__name__ == "CThunkObject" for each in gc.get_objects())

    def one_time():
        remove_one()
        counts.append(thunks())

    counts = [thunks()]
    remove_one = gpureclaim.on_reclaim(one_time, limit_ms=60000)
    gpureclaim.reclaim(rung="purge")
    counts.append(thunks())
    assert counts == [counts[0], counts[0] + 1, counts[0]], counts


def main():
    if not gpureclaim.available():
        sys.exit("the library is not preloaded")
    calls = []
    held = []
    cuda = ctypes.CDLL("libcuda.so.1")
    free = cuda.cuMemFree_v2
    free.argtypes = [ctypes.c_uint64]

    def give_up(device, want_bytes):
        calls.append((device, want_bytes))
        while held:
            assert free(held.pop()) == 0

    def broken():
        calls.append("broken")
        raise ValueError("on purpose")

    remove = gpureclaim.on_reclaim(give_up, name="cache")  # before there is a driver
    remove_broken = gpureclaim.on_reclaim(broken)
    try:
        gpureclaim.status(0)
        sys.exit("a status of a device that nobody used")
    except OSError:
        pass
    open_device()

    def allocate(size):
        ptr = ctypes.c_uint64()
        rc = cuda.cuMemAlloc_v2(ctypes.byref(ptr), ctypes.c_size_t(size))
        return ptr.value if rc == 0 else None

    held.append(allocate(200 * MIB))
    status = gpureclaim.status()
    assert status["live_bytes"] == 200 * MIB, status
    assert status["executables"] == 0 and status["executable_bytes"] == 0, status
    assert status["hard_limit_bytes"] == 256 * MIB and status["soft_limit_bytes"] is None, status
    block = allocate(200 * MIB)  # only what the hook gives up makes room
    assert block and not held
    assert calls[0][0] == 0 and calls[0][1] > 0 and "broken" in calls, calls
    assert free(block) == 0
    assert gpureclaim.status()["cached_bytes"] == 200 * MIB
    assert gpureclaim.reclaim() == 200 * MIB
    assert gpureclaim.status()["cached_bytes"] == 0
    try:
        gpureclaim.reclaim(rung="everything")
        sys.exit("an unknown rung was taken")
    except OSError:
        pass
    gpureclaim.set_limit(400 * MIB)
    assert gpureclaim.status()["hard_limit_bytes"] == 400 * MIB
    block = allocate(300 * MIB)
    assert block and free(block) == 0 and gpureclaim.status()["cached_bytes"] == 300 * MIB
    gpureclaim.set_limit(200 * MIB)  # a thread trims the cache
    while gpureclaim.status()["cached_bytes"] > 200 * MIB:
        time.sleep(0.01)
    assert allocate(300 * MIB) is None
    for function, wrong in (
        (gpureclaim.set_limit, dict(limit_bytes=MIB)),
        (gpureclaim.set_limit, dict(limit_bytes=400 * MIB, device=7)),
        (gpureclaim.set_limit, dict(limit_bytes=400 * MIB, device=-1)),
        (gpureclaim.set_limit, dict(limit_bytes=-1)),
        (gpureclaim.set_limit, dict(limit_bytes=2**64 + 400 * MIB)),
        (gpureclaim.reclaim, dict(want_bytes=-1)),
        (gpureclaim.reclaim, dict(want_bytes=2**64)),
        (gpureclaim.on_reclaim, dict(purge=give_up, limit_ms=-1)),
        (gpureclaim.on_reclaim, dict(purge=give_up, limit_ms=2**32)),
    ):
        try:
            function(**wrong)
            sys.exit(f"{function.__name__} took {wrong}")
        except OSError:
            pass
    assert gpureclaim.status()["hard_limit_bytes"] == 200 * MIB
    by_other_ways()
    removed_meanwhile()
    gpureclaim.set_limit(None)
    assert gpureclaim.status()["hard_limit_bytes"] is None
    remove()
    remove_broken()
    remove()  # twice does no harm
    before = len(calls)
    gpureclaim.reclaim(rung="purge")
    assert len(calls) == before
    gpureclaim.on_reclaim(drop=give_up)  # left for the interpreter's end
    print("ok", gpureclaim.version())


late() if "late" in sys.argv else main()
