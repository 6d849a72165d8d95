#!/usr/bin/env python3
"""The commands in README.md, CONTRIBUTING.md and some pages of docs/, run as they stand there.

Usage: guides_test.py GPURECLAIM SIM_FOLDER|- SHIM SOURCE_FOLDER [PAGE...]

Each section has a folder and a simulated GPU of its own; with "-" all use the real one. What is run:

    ```sh        by bash; each command must succeed. With PID in it, while the block before it runs
    ```python    under the library
    ```console   the commands after "$ "; they must print what follows, but for numbers and what "..." stands for
    ```yaml      Kubernetes' own types know each field; what the containers run, with the annotations, succeeds
    indented     the lines that begin with gpureclaim, where PID runs the first one and FILE is a trace; of scripts only
                 that they are there and know their flags

The programs are stand-ins that allocate as the text says. On a real GPU train.py and serve.py are programs of
tests/frameworks, and torch, jax and cupy the real ones, as far as they are installed. docker, srun and others run what
they are given. Kubernetes' types are those of its Python client; without that, manifests are left out. There is a line
of output for each section: "PAGE|SECTION|how many blocks, and of what|pass or FAIL".
"""

import importlib.util
import json
import os
import re
import signal
import site
import subprocess
import sys
import types
import urllib.request

from scene import Scene, until

try:
    import yaml
    from kubernetes.client import ApiClient
except ImportError:
    yaml = None

real = sys.argv[2] == "-"
command, sim, shim, source = map(os.path.abspath, sys.argv[1:5])
frameworks = [name for name in ("torch", "jax", "cupy") if real and importlib.util.find_spec(name)]
# Whether the libraries of gpureclaim serve are on this machine.
can_serve = subprocess.run([command, "serve", "--listen", "?"], stderr=subprocess.DEVNULL).returncode == 2

# It uses CUDA if, and only if, the library is there; and it stays as long as there is a file "stay".
PROGRAM = r"""#!/usr/bin/env python3
import ctypes, os, time

ctypes.CDLL(None).gpureclaim_version  # AttributeError: the library is not in this process
driver = ctypes.CDLL("libcuda.so.1")
context, kept = ctypes.c_void_p(), ctypes.c_uint64()

def must(result):
    if result:
        raise SystemExit(f"error {result}")

must(driver.cuInit(0))
must(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
must(driver.cuCtxSetCurrent(context))
must(driver.cuMemAlloc_v2(ctypes.byref(kept), ctypes.c_size_t(256 << 20)))
for i in range(5000):
    block = ctypes.c_uint64()
    must(driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t((1 + i % 3) << 20)))
    must(driver.cuMemFree_v2(block))
while os.path.exists("stay"):
    time.sleep(0.05)
must(driver.cuMemFree_v2(kept))
"""
# A program of tests/frameworks, whose memory then stays as above. After that its model must still work.
FRAMEWORK_PROGRAM = r"""#!/usr/bin/env python3
import ctypes, os, runpy, sys, time

ctypes.CDLL(None).gpureclaim_version
folder, *words = {words!r}
if any(name.startswith("XLA_") for name in os.environ) and "jax" in {frameworks!r}:
    os.environ.setdefault("XLA_PYTHON_CLIENT_ALLOCATOR", "default")
    words = ["jax_check.py"]
sys.path.insert(0, folder)
sys.argv = words
kept = runpy.run_path(os.path.join(folder, words[0]), run_name="__main__")
while os.path.exists("stay"):
    time.sleep(0.05)
if "step" in kept:
    kept["step"](128).item()
"""
# The words before the command that they run.
STAND_INS = {
    "jupyter": "python3 train.py",
    "pytest": "python3 train.py",
    "srun": '"$@"',
    "torchrun": 'python3 train.py & python3 train.py && wait $!',
    "setpriv": 'while [ "${1#--}" != "$1" ]; do shift; done; "$@"',
    "docker": 'while [ "$1" != my-image ]; do shift; done; shift; command=$(basename "$1"); shift; "$command" "$@"',
    "apptainer": 'exec docker "$@"',
}
# The command of each of the machines, all on this one.
TORCHRUN = r"""node() { python3 -m torch.distributed.run $(echo "$@" | sed s/first-machine/localhost/); }
case "$*" in
*--nnodes*) node "$@" & node "$@" && wait $! ;;
*) node "$@" ;;
esac
"""
CUPY_USE = "assert int(cupy.arange(1000).sum()) == 499500\n"
CUPY = "class cuda:\n    set_allocator = set_pinned_memory_allocator = staticmethod(lambda allocator: None)\n"


def blocks(text):
    """(section, language, lines) of each block of code."""
    section = ""
    for match in re.finditer(r"^## (.*)\n|^```(\w*)\n((?:.*\n)*?)```$|((?:^    .*\n)+)", text, re.M):
        heading, language, fenced, indented = match.groups()
        if heading:
            section = heading
        elif indented:
            lines = [line[4:] for line in indented.splitlines()]
            yield section, "indented", [line for line in lines if line.startswith(("gpureclaim ", "scripts/", ".ci/"))]
        else:
            yield section, language, fenced.splitlines()


def mask(line):
    line = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", line)
    line = re.sub(r"\d+(\.\d+)? [KMGT]?i?B", "SIZE", line)
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?", "N", line)).strip()


class Section:
    """The folder of a section, where its blocks run one after the other."""

    def __init__(self, scene, page, name):
        self._scene = scene
        self._where = f"{page}, {name}"
        self._folder = os.path.join(scene.folder, "section")
        self._environment = {
            **scene.environment,
            **{name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH") if name in os.environ},
            **({} if real else {"LD_LIBRARY_PATH": sim}),
            "HOME": self._folder,
            "PYTHONUSERBASE": site.getuserbase(),
            "PATH": f"{self._folder}/bin:{os.path.dirname(command)}:{os.environ['PATH']}",
            "PYTHONPATH": f"{self._folder}:{source}/tools/python:{os.environ.get('PYTHONPATH', '')}".rstrip(":"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SLURM_JOB_ID": "1",
            "SLURM_JOB_UID": str(os.getuid()),
            "SLURM_JOB_GID": str(os.getgid()),
            "SLURM_SHARDS_ON_NODE": "3",
        }
        os.makedirs(f"{self._folder}/bin")
        for file in ("app", "train.py", "serve.py"):
            self._write(file, PROGRAM)
        for file, words in STAND_INS.items():
            self._write(f"bin/{file}", f"#!/bin/sh\n{words}\n")
        if "torch" in frameworks:
            self._write("bin/torchrun", f"#!/bin/sh\n{TORCHRUN}")
            for file, words in (("train.py", ["train.py", "--steps", "20"]),
                                ("serve.py", ["graph_shapes.py", "--check", "--sizes", "16", "--repeat", "0"])):
                words = [f"{source}/tests/frameworks", *words]
                self._write(file, FRAMEWORK_PROGRAM.format(words=words, frameworks=frameworks))
        else:
            self._write("torch.py", "")
        if "cupy" not in frameworks:
            self._write("cupy.py", CUPY)
        self._before = None  # the block that a block with PID runs beside

    def _write(self, file, text):
        with open(os.path.join(self._folder, file), "w", encoding="utf-8") as made:
            made.write(text)
        os.chmod(made.name, 0o755)

    def _start(self, words, settings={}):
        return subprocess.Popen(
            words, cwd=self._folder, env={**self._environment, **settings}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def _end(self, program, what):
        try:
            out = program.communicate(timeout=200 if real else 60)[0]
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            out = program.communicate()[0] + "(did not end)"
        self._scene.check(program.returncode == 0, f"{self._where}: {what}\n{out}")
        return out

    def _shell(self, text):
        return self._start(["bash", "-euo", "pipefail", "-c", text])

    def _pid(self):
        """The process under the library, once there is one."""
        found = []

        def look():
            found[:] = re.findall(r"^  (\d+) .*: reserved ", self._scene.run("status")[1], re.M)
            return found

        self._scene.check(until(look, 30), f"{self._where}: no process to be found")
        return found[0] if found else "0"

    def block(self, language, lines):
        """False: nothing of it is to be run."""
        if language == "sh":
            self.shell("\n".join(lines))
        elif language == "python":
            self.python("\n".join(lines))
        elif language == "indented":
            self.lines(lines)
        elif language == "yaml" and yaml:
            self.manifest("\n".join(lines))
        elif language == "console" and "$ scripts/run" not in lines[0]:  # that is in the test "run"
            self.console(lines)
        else:
            return False
        return True

    def shell(self, text):
        if not re.search(r"\bPID\b", text):
            self._end(self._shell(text), text)
            self._before = text
            return
        if not self._before:
            self._scene.check(False, f"{self._where}: nothing runs beside {text}")
            return
        self._write("stay", "")
        running = self._shell(self._before)
        self._end(self._shell(re.sub(r"\bPID\b", self._pid(), text)), text)
        os.remove(os.path.join(self._folder, "stay"))
        self._end(running, self._before)

    def manifest(self, text):
        written = yaml.safe_load(text)
        kind = "V1" + written["kind"]
        read = ApiClient().deserialize(types.SimpleNamespace(data=json.dumps(written)), kind)
        kept = ApiClient().sanitize_for_serialization(read)
        self._scene.check(kept == written, f"{self._where}: {kind} has other fields: {kept}, written: {written}")
        pod = written if kind == "V1Pod" else written["spec"]["template"]
        for container in pod["spec"]["containers"]:
            command_line = [re.sub("^/opt/gpureclaim/bin/", "", word) for word in container["command"]]
            settings = {}
            for setting in container["env"]:
                path = setting.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
                noted = re.fullmatch(r"metadata\.annotations\['(.*)'\]", path)
                settings[setting["name"]] = pod["metadata"]["annotations"][noted[1]] if noted else setting["value"]
            if "serve" in command_line:
                self._serve([re.sub(":[0-9]+$", ":0", word) for word in command_line], settings)
            else:
                self._end(self._start(command_line, settings), " ".join(command_line))

    def _serve(self, words, settings):
        if not can_serve:
            return
        server = self._start(words, settings)
        said = server.stdout.readline()
        address = re.search("http://.*/metrics", said)
        self._scene.check(address, f"{self._where}: {words} tells no address: {said}")
        if address:
            with urllib.request.urlopen(address[0], timeout=30) as page:
                self._scene.check(b"gpureclaim_" in page.read(), f"{self._where}: {words} tells nothing")
            server.send_signal(signal.SIGTERM)
        self._end(server, " ".join(words))

    def lines(self, lines):
        self._environment["GPURECLAIM_BACKTRACE"] = "sample"
        for line in lines:
            words = line.split("#")[0].split()
            if words[0] != "gpureclaim":
                with open(f"{source}/{words[0]}", encoding="utf-8") as script:
                    known = script.read()
                missing = [word for word in words[1:] if word.startswith("-") and word not in known]
                self._scene.check(os.access(script.name, os.X_OK) and not missing, f"{self._where}: {line}")
                continue
            if words[1] == "serve":
                self._serve([re.sub(":[0-9]+$", ":0", word) for word in words], {})
                continue
            line = line.replace("/var/lib/node_exporter/", "")
            self.shell(re.sub(r"\bFILE\b", "gpureclaim.*.trace", line))
            self._before = lines[0]

    def python(self, text):
        self._write("cell.py", f"{text}\n{CUPY_USE if 'cupy' in frameworks else ''}")
        self._end(self._start([command, "run", "--", sys.executable, "cell.py"]), text)

    def console(self, lines):
        while lines:
            line = lines.pop(0)
            shown = []
            while lines and not lines[0].startswith("$ "):
                shown.append(lines.pop(0))
            out = self._end(self._shell(line.removeprefix("$ ")), line)
            want = "".join("(.*\n)*" if part == "..." else re.escape(mask(part)) + "\n" for part in shown)
            got = "".join(mask(part) + "\n" for part in out.splitlines())
            self._scene.check(re.fullmatch(want, got), f"{self._where}: {line} prints\n{out}")


def run_page(page):
    with open(os.path.join(source, page), encoding="utf-8") as file:
        found = list(blocks(file.read()))
    failed = 0
    whose = ", ".join(frameworks) or "stand-ins"
    for section in dict.fromkeys(name for name, _, lines in found if lines):
        with Scene(command, sim, shim, memory="80GiB") as scene:
            place = Section(scene, page, section)
            ran = sum(place.block(language, lines) for name, language, lines in found if name == section and lines)
        failed += scene.failed
        if ran:
            print(f"{page}|{section}|{ran} blocks, {whose}|{'FAIL' if scene.failed else 'pass'}", flush=True)
    return failed


pages = sys.argv[5:] or ["README.md", "docs/guides.md", "docs/metrics.md", "docs/troubleshooting.md"]
if not real and not sys.argv[5:]:
    pages.append("CONTRIBUTING.md")
if not yaml:
    print("no kubernetes here (Debian: python3-kubernetes): the manifests in docs/guides.md are left out", flush=True)
sys.exit(1 if sum(map(run_page, pages)) else 0)
