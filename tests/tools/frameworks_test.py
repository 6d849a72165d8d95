#!/usr/bin/env python3
"""Programs that gpureclaim run starts, in which a framework caches device memory: it gives that up when memory is
short, and the program sees nothing of how. The frameworks are stand-ins of the same names.

Usage: frameworks_test.py GPURECLAIM
"""

import os
import subprocess
import sys
import tempfile

command = sys.argv[1]

DRIVER = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
cuda.cuCtxSetCurrent(context)

def allocate(mib):
    pointer = ctypes.c_uint64()
    return pointer if cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(mib << 20)) == 0 else None
"""

TORCH = """
from driver import allocate, cuda as driver
held = [allocate(200)]

class cuda:
    def is_initialized():
        return True
    def memory_reserved(device):
        return 200 << 20 if held else 0
    def empty_cache():
        while held:
            driver.cuMemFree_v2(held.pop())
"""

CUPY = """
from driver import allocate, cuda as driver
held = [allocate(200)]

class cuda:
    class Device:
        def __init__(self, number):
            assert number == 0
        def __enter__(self):
            pass
        def __exit__(self, *_):
            pass

class get_default_memory_pool:
    def free_all_blocks(self):
        while held:
            driver.cuMemFree_v2(held.pop())

class get_default_pinned_memory_pool:
    def free_all_blocks(self):
        pass
"""

JAX = """
from driver import allocate, cuda as driver
held = [allocate(200)]

def clear_caches():
    while held:
        driver.cuMemFree_v2(held.pop())
"""

# The program: {0} is the framework. What it could notice is in what it prints.
PROGRAM = """
import importlib.util, sys
before = {{"ctypes", "{0}", "_gpureclaim_run"}} & set(sys.modules)
importlib.util.find_spec("{0}")  # as libraries do to see whether the framework is there
import {0}
from driver import allocate
loader = type({0}.__spec__.loader).__name__, sorted(vars({0}.__spec__.loader))
ours = [entry for entry in sys.path if entry.endswith("run")]
print(allocate(200) is not None, sorted(before), ours, *loader)
"""

SEEN = "[] [] SourceFileLoader ['name', 'path']"
folder = tempfile.TemporaryDirectory()
failed = 0


def write(name, text):
    path = os.path.join(folder.name, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
    return path


def environment(**more):
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith("GPURECLAIM_") and name not in ("LD_PRELOAD", "PYTHONPATH", "ASAN_OPTIONS")}
    return {**kept, "XDG_CONFIG_HOME": folder.name, **more}


def run(program, *flags, python=(), **variables):
    """What the program printed."""
    done = subprocess.run(
        [command, "run", "--sim", "--limit", "256MiB", "--log", "error", *flags, "--", sys.executable, "-B", *python,
         program],
        env=environment(**variables), capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr).strip()


def check(what, got, want):
    global failed
    if got != want:
        print(f"FAILED: {what}: {got!r}, not {want!r}", flush=True)
        failed = 1


write("driver.py", DRIVER)
for name, text in ("torch", TORCH), ("cupy", CUPY), ("jax", JAX):
    write(f"{name}.py", text)
    program = write(f"uses_{name}.py", PROGRAM.format(name))
    check(f"{name}", run(program), f"True {SEEN}")
    check(f"{name}, switched off", run(program, "--no-python"), f"False {SEEN}")
    check(f"{name}, Python without the environment", run(program, python=["-E"]), f"False {SEEN}")
    # A module of the program's own with the name of ours is another one.
    write("own/gpureclaim.py", "raise SystemExit('the wrong gpureclaim')")
    beside = run(program, PYTHONPATH=os.path.join(folder.name, "own"))
    check(f"{name}, beside another gpureclaim", beside, f"True {SEEN}")

# Two programs that between them do not fit: what the framework of the first has cached, the second gets.
waits = write("waits.py", "import torch\nprint('cached', flush=True)\ninput()\n")
needs = write("needs.py", "from driver import allocate\nprint(allocate(200) is not None)\n")
for flag, fits in ("--python", "True"), ("--no-python", "False"):
    with tempfile.TemporaryDirectory() as shared:
        gpu = {**environment(), "GRSIM_SHARED": os.path.join(shared, "gpu"), "GRSIM_MEMORY": "300MiB",
               "GPURECLAIM_REGION_DIR": os.path.join(shared, "region")}
        first = subprocess.Popen([command, "run", "--sim", flag, "--", sys.executable, "-B", waits], env=gpu,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        first.stdout.readline()
        second = subprocess.run([command, "run", "--sim", "--log", "silent", "--", sys.executable, "-B", needs],
                                env=gpu, capture_output=True, text=True, timeout=60)
        check(f"two programs, {flag}", second.stdout.strip() + second.stderr, fits)
        first.communicate("\n", timeout=60)

# The program's own sitecustomize runs, once, under its name; what it raises ends as it does without us.
theirs = os.path.dirname(write("theirs/sitecustomize.py", "import sys\nprint('theirs', __name__, __file__)\n"))
program = write("plain.py", "import sys\nprint(sys.modules['sitecustomize'].__file__, sys.path[1:2])\n")
path = os.path.join(theirs, "sitecustomize.py")
check("their sitecustomize", run(program, PYTHONPATH=theirs),
      f"theirs sitecustomize {path}\n{path} {[theirs]}")
hook = run(write("hook.py", "import os\nprint(os.environ['PYTHONPATH'])\n"))
done = subprocess.run([command, "run", "--sim", "--", sys.executable, os.path.join(folder.name, "uses_torch.py")],
                      env=environment(PYTHONDONTWRITEBYTECODE=""), capture_output=True, text=True, timeout=60)
check("what Python leaves in the folder of the hook", (done.returncode, os.path.exists(f"{hook}/__pycache__")),
      (0, False))
other = os.path.join(folder.name, "other")
os.symlink(hook, other)
check("the folder of the hook, by another name as well", run(program, PYTHONPATH=f"{other}:{theirs}"),
      f"theirs sitecustomize {path}\n{path} {[theirs]}")
write("theirs/sitecustomize.py", "raise ValueError('on purpose')\n")
with_us, without = (run(program, flag, PYTHONPATH=theirs) for flag in ("--python", "--no-python"))
check("their sitecustomize fails", with_us.count("ValueError: on purpose"), without.count("ValueError: on purpose"))

# Where the working directory is gone, a relative folder cannot be compared. Python 3.11 and above do not start there.
program = write("relative.py", """
import os, sys, tempfile
os.chdir(tempfile.mkdtemp())
os.rmdir(os.getcwd())
sys.path[:] = [""] + os.environ["PYTHONPATH"].split(":")
import importlib.util
import sitecustomize
before = list(sys.path)
exec(open(sitecustomize.__file__).read(), dict(vars(sitecustomize)))
print(before[:1] + before[2:] == sys.path)
""")
check("a working directory that is gone", run(program), "True")

# A framework that cannot be imported fails as ever, also when it is tried again; a child process has the hook, too.
write("broken/torch.py", "raise ImportError('no CUDA')\n")
program = write("broken/program.py", """
for _ in range(2):
    try:
        import torch
    except ImportError as error:
        print(error)
""")
check("a framework that is broken", run(program), "no CUDA\nno CUDA")
# Finders of the program's own: one that asks all others, and so ours, which must not ask it again; one of the kind of
# Python 3.11 and before; and one whose loader is the same each time.
program = write("asks.py", """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        others = [finder for finder in sys.meta_path if finder is not self and name == "torch"]
        return next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
sys.meta_path.insert(0, Finder())
import torch
from driver import allocate
print(allocate(200) is not None)
""")
check("a finder that asks the others", run(program), "True")
program = write("older.py", """
import sys, types
class Older:
    def find_module(self, name, path=None):
        return self if name == "torch" else None
    def load_module(self, name):
        sys.modules[name] = types.ModuleType("theirs")
        return sys.modules[name]
sys.meta_path.insert(-1, Older())
import torch
print(torch.__name__)
""")
older = run(program, "--no-python", python=["-W", "ignore"])
check("a finder of the older kind", run(program, python=["-W", "ignore"]), older)
program = write("archive.py", f"""
import importlib.util, sys, zipfile
with zipfile.ZipFile({folder.name!r} + "/zipped", "w") as archive:
    archive.write({folder.name!r} + "/torch.py", "torch.py")
sys.path.insert(0, archive.filename)
for _ in range(2000):
    importlib.util.find_spec("torch")
import torch
print("zipped" in torch.__file__, "exec_module" in getattr(torch.__loader__, "__dict__", ()))
""")
check("a framework in a zip file, found often", run(program), "True False")

program = write("child.py", f"""
import os, subprocess, sys
subprocess.run([sys.executable, "-B", os.path.join({folder.name!r}, "uses_torch.py")])
""")
check("a child process", run(program), f"True {SEEN}")
sys.exit(failed)
