#!/usr/bin/env python3
"""scripts/run: its demonstration on the simulated device, and when it installs what is missing.

Usage: run_test.py SOURCE_FOLDER BUILD_FOLDER

It runs in a folder that has this build as its build/. Nothing is built or installed: ninja, apt-get and others are
stand-ins.
"""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile

source, build = sys.argv[1:]
failed = 0
tree = tempfile.mkdtemp(prefix="gr-run-")
usual_path = f"{tree}/stand-ins:{os.environ['PATH']}"
TOOLS = "bash cat dirname env grep head mkdir mktemp python3 rm sed sh tail tr true".split()


def check(good, what):
    global failed
    if not good:
        print("FAILED:", what, flush=True)
        failed += 1


def script(name, text):
    path = os.path.join(tree, "stand-ins", name)
    with open(path, "w") as file:
        file.write("#!/bin/sh\n" + text + "\n")
    os.chmod(path, 0o755)


def run(*arguments, answer=None, **settings):
    """What scripts/run prints, and its exit status; answer is typed at a terminal, else there is none."""
    environment = {name: value for name, value in os.environ.items() if name != "CI" and not name.startswith("GPUREC")}
    environment.update(CUDA_VISIBLE_DEVICES="-1", **settings)
    terminal, stdin = pty.openpty() if answer is not None else (None, subprocess.DEVNULL)
    program = subprocess.Popen(
        [os.path.join(tree, "scripts", "run"), *arguments],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if answer is None else stdin,
        env=environment,
        text=True,
    )
    if answer is not None:
        os.close(stdin)
        os.write(terminal, answer.encode() + b"\n")
    out = program.communicate(timeout=100)[0]
    if answer is not None:
        try:
            while True:
                out += os.read(terminal, 65536).decode()
        except OSError:
            pass  # the last program at the terminal has ended
        os.close(terminal)
    return program.returncode, out


def demonstration():
    status, out = run(PATH=usual_path)
    print(out)
    check(status == 0, f"the demonstration: exit status {status}")
    calls = re.findall(r"(\d+) allocations and frees by the driver", out)
    check(len(calls) == 2 and int(calls[0]) > 20 * int(calls[1]), "the loop is served from the cache")
    check("a round" not in out and "run --sim" in out, "no time is shown of a simulated device")
    check("without gpureclaim   CUDA_ERROR_OUT_OF_MEMORY\n" in out, "the second notebook, without the library")
    check("with gpureclaim      allocated\n" in out, "the second notebook, with the library")
    for part in ("failed: the hard limit is 1.000 GiB", "would help: a limit of", "limits: 1.000 GiB hard limit"):
        check(part in out, f'"{part}" is missing')
    cached, back = re.search(r"memory: (.*) cached", out), re.search(r"demo: (.*) came back", out)
    check(cached and back and cached[1] == back[1] != "0 B", "all that is cached comes back")
    with open(f"{source}/README.md") as file:
        shown = re.search(r"^\$ scripts/run.*\n((?:.*\n)*?)```", file.read(), re.M)[1]
    for line in shown.splitlines():
        check(line == "..." or re.sub(r"\d+", "N", line) in re.sub(r"\d+", "N", out), f"README.md shows: {line}")


def made():
    """What must be there for the demonstration, and then to be installed: ninja was asked for it."""
    with open(f"{tree}/made") as file:
        targets = file.read().split()[2:]
    asked = subprocess.run(["meson", "introspect", build, "--installed"], capture_output=True, text=True, check=True)
    installed = [file[len(build) + 1:] for file in json.loads(asked.stdout) if file.startswith(build + "/")]
    check("tools/gpureclaim" in installed, f"what is installed: {installed}")
    for target in ["tests/bench/demo"] + installed:
        check(target in targets or target.startswith("meson-private/"), f"{target} is not made: {targets}")


def asking():
    """With a PATH that lacks meson, and "apt-get" that notes what it should install."""
    for name in TOOLS:
        os.symlink(shutil.which(name), os.path.join(tree, "stand-ins", name))
    script("cc", "")
    script("apt-get", f'echo "$@" >>{tree}/installed')
    script("sudo", 'if [ "$1" = -n ]; then exit; fi; exec "$@"')
    os.makedirs(f"{tree}/cuda/include")
    open(f"{tree}/cuda/include/cuda.h", "w").close()
    for arguments, user, answer, ci, good in (
        ([], 1000, "", "", True),
        ([], 1000, "y", "", True),
        ([], 1000, "n", "", False),
        ([], 0, "n", "", False),
        (["--yes"], 1000, None, "", True),
        ([], 1000, None, "true", True),
        ([], 1000, None, "", False),
        ([], 0, None, "", True),
    ):
        script("id", f"echo {user}")
        status, out = run(*arguments, "--", "true", answer=answer, CI=ci, PATH=f"{tree}/stand-ins",
                          CUDA_HOME=f"{tree}/cuda")
        what = f"{arguments}, user {user}, answer {answer}, CI={ci}: {out}"
        installed = os.path.exists(f"{tree}/installed")
        check(installed == good and (status == 0) == good, what)
        if installed:
            with open(f"{tree}/installed") as file:
                check(" meson" in file.read(), f"meson is installed with {what}")
            os.remove(f"{tree}/installed")
        else:
            check("apt-get install meson" in out, f"how to install it is said with {what}")
    # Without cuda.h it needs pip, to fetch that.
    os.remove(f"{tree}/scripts")
    os.remove(f"{tree}/build")
    os.mkdir(f"{tree}/scripts")
    os.symlink(f"{source}/scripts/run", f"{tree}/scripts/run")
    script("../scripts/find-cuda-headers", "")
    os.remove(f"{tree}/stand-ins/python3")
    script("python3", "exit 1")
    status, out = run("--yes", PATH=f"{tree}/stand-ins")
    with open(f"{tree}/installed") as file:
        check(" python3-pip" in file.read() and status == 1 and "cuda.h was not found" in out, f"without pip: {out}")


try:
    os.symlink(build, f"{tree}/build")
    os.symlink(f"{source}/scripts", f"{tree}/scripts")
    os.mkdir(f"{tree}/stand-ins")
    script("ninja", f'echo "$@" >{tree}/made')
    demonstration()
    made()
    status, out = run("--", "sh", "-c", "echo $LD_PRELOAD", PATH=usual_path)
    check(status == 0 and "libgpureclaim.so" in out, f"a program of the user: {out}")
    check(run("--yess")[0] == 2, "an unknown argument")
    check("--yes" in run("--help")[1], "--help")
    asking()
finally:
    shutil.rmtree(tree)
sys.exit(1 if failed else 0)
