#!/usr/bin/env python3
"""gpureclaim status and wait: GPUs, who uses them, and what the driver's management library says.

Usage: gpus_test.py GPURECLAIM SIM_FOLDER SHIM FAKE_NVML
"""

import ctypes
import glob
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

from scene import MIB, Scene, until

command, sim, shim, fake = sys.argv[1:]
OTHER_NAMESPACE = 1 << 22  # in the word of an owner (core/region/region.c)
OWNERS_OFFSET = 64  # in the memory that processes share (core/region/region.h)
FIRST, SECOND = "GPU-11111111-2222-3333-4444-555555555555", "GPU-66666666-7777-8888-9999-aaaaaaaaaaaa"


def status(scene, **environment):
    code, out, error = scene.run("status", "--json", **environment)
    scene.check(code == 0 and error == "", f"status --json: {code} {error}")
    return json.loads(out)["gpus"]


def orders(scene):
    """Two processes that count the GPUs differently meet at the same ones; without a common GPU they do not."""
    one = scene.start(CUDA_VISIBLE_DEVICES="0,1")
    other = scene.start(CUDA_VISIBLE_DEVICES="1,0")
    apart = scene.start(CUDA_VISIBLE_DEVICES="1")
    scene.check(one.ask("alloc", 0, 600) == 0 and one.ask("free") == 0, "the first cannot work")
    scene.check(other.ask("alloc", 0, 100) == 0, "its first GPU is the other one")
    gpus = status(scene)
    scene.check(len(gpus) == 2, f"two GPUs: {gpus}")
    scene.check(apart.ask("alloc", 0, 200) == 0, "a process that sees the second GPU only")
    beside = [sorted(process["pid"] for process in gpu["processes"]) for gpu in status(scene)]
    scene.check(sorted([[one.pid], sorted([other.pid, apart.pid])]) == sorted(beside), f"who is where: {beside}")
    # The second GPU of the other process is the first one's first: what is cached there is given.
    scene.check(other.ask("alloc", 1, 900) == 0, "a neighbour's cache on a GPU counted differently")
    scene.check(apart.ask("alloc", 0, 900) == 2, "more than its GPU has left")
    totals = sorted(gpu["gpu_used_bytes"] // MIB for gpu in status(scene))
    # What the neighbour had cached went as far as was needed, or all of it.
    scene.check(totals[0] == 300 and 900 <= totals[1] <= 1024, f"what is used: {totals}")
    for process in (one, other, apart):
        scene.check(process.end() == 0, "a process ended badly")
    scene.check(status(scene) == [], "nobody is left")


def who_has_it(scene):
    """The explanation of an allocation that failed on a full GPU names the three others that have most."""
    others = {size: scene.start() for size in (50, 300, 100, 200)}
    for size, process in others.items():
        scene.check(process.ask("alloc", 0, size) == 0, "another process cannot work")
    said = os.path.join(scene.folder, "said")
    last = scene.start(before=("sh", "-c", f'exec "$@" 2>{said}', "sh"), GPURECLAIM_LOG="info")
    scene.check(last.ask("alloc", 0, 600) == 2, "more than the GPU has left")
    names = ", ".join(rf"\S+ {others[size].pid} has {size}\.000 MiB" for size in (300, 200, 100))
    with open(said, encoding="utf-8") as file:
        text = file.read()
    scene.check(re.search(rf"others and the driver \S+ MiB \({names}\); ", text), f"who has the memory: {text}")
    for process in (last, *others.values()):
        process.end()


def nvml_env(scene, text):
    path = os.path.join(scene.folder, "nvml")
    with open(path + ".new", "w", encoding="ascii") as file:
        file.write(text)
    os.rename(path + ".new", path)
    return {"FAKE_NVML": path, "LD_LIBRARY_PATH": os.path.join(scene.folder, "lib")}


def what_is_not_ours(scene):
    """The GPU's figures come from the management library; the members' charges are ours, the rest is not."""
    process = scene.start()
    process.ask("alloc", 0, 100)
    process.ask("alloc", 0, 50)
    process.ask("free")
    process.ask("alloc", 0, 50)
    uuid = status(scene)[0]["uuid"]
    nvml = nvml_env(scene, f"GPU-{uuid} 1024 400\n")
    gpu = status(scene, **nvml)[0]
    figures = [gpu[name] // MIB for name in ("gpu_total_bytes", "gpu_used_bytes", "foreign_bytes")]
    scene.check(figures == [1024, 400, 250], f"total, used and not ours: {figures}")
    twice = [name for name in gpu["processes"][0] if name.startswith("device_")]
    scene.check(twice == [], f"a process tells what its GPU has told: {twice}")

    def cached():
        found = status(scene, **nvml)[0]["processes"][0]
        return found["live_bytes"] == 50 * MIB and found["cached_bytes"] == 100 * MIB

    scene.check(until(cached), "live and cached bytes are told")
    code, out, _ = scene.run("status", **nvml)
    scene.check(code == 0 and "400.000 MiB of 1.000 GiB used, 250.000 MiB not counted here" in out, f"in words: {out}")
    sentence = ": reserved 14.65% of the GPU (150.000 MiB of 1.000 GiB), no allocation or free for "
    scene.check(sentence in out, f"the sentence: {out}")
    scene.check("driver's own" not in out, f"the driver's own is not known: {out}")
    scene.check("imported" not in out, f"nothing is imported: {out}")
    # Others' memory is told beside what is charged.
    scene.check(process.ask("open", 0, 64) == 0, "another's memory can be opened")

    def imported(mib):
        found = status(scene, **nvml)[0]["processes"][0]
        return found["imported_bytes"] == mib * MIB and found["reserved_bytes"] == 150 * MIB

    scene.check(until(lambda: imported(64)), f"what is imported is told: {status(scene, **nvml)}")
    code, out, _ = scene.run("status", **nvml)
    words = "beside it: 64.000 MiB imported from other processes\n    peak: 150.000 MiB reserved\n    limits: none\n"
    scene.check(words in out, f"imported, in words: {out}")
    scene.check(process.ask("close") == 0 and until(lambda: imported(0)), "and gone")
    # Executable graphs have a line of their own; in this process nobody knows what the driver took for them.
    scene.check("executable" not in out, f"there are no executable graphs: {out}")
    scene.check(process.ask("graph", 0) == 0 and process.ask("graph", 0) == 0, "graphs can be made executable")

    def executables(*wanted):
        found = status(scene, **nvml)
        return found and [found[0]["processes"][0][name] for name in ("executables", "executable_bytes")] == [*wanted]

    told = until(lambda: executables(2, None) or executables(2, 0))
    scene.check(told, f"executable graphs are told: {status(scene, **nvml)}")
    code, out, _ = scene.run("status", **nvml)
    # Measured only where NVML was loaded, on another thread, before the second one was made.
    lines = [f"\n    executable graphs: 2, {words}\n" for words in ("memory not known", "about 0 B the driver's own")]
    scene.check(any(line in out for line in lines), f"executable graphs, in words: {out}")
    # Nor is there a line of what the program freed and a graph uses, until there is some.
    scene.check("in use by graphs" not in out, f"graphs use nothing yet: {out}")
    scene.check(process.ask("capture", 0, 2) == 0, "memory can be freed in a capture")

    def in_use(mib):
        return status(scene, **nvml)[0]["processes"][0]["graph_bytes"] == mib * MIB

    scene.check(until(lambda: in_use(2)), f"what a graph uses is told: {status(scene, **nvml)}")
    code, out, _ = scene.run("status", **nvml)
    scene.check("\n    freed, in use by graphs: 2.000 MiB\n" in out, f"in use by a graph, in words: {out}")
    # Who is there by the management library's list, which does not fit into its first try; 40 MiB are the context's.
    listing = os.path.join(scene.folder, "processes")
    with open(listing, "w", encoding="ascii") as file:
        file.write(f"{process.pid} 192\n4000001 77\n4000002 -1\n" + "".join(f"{4000100 + i} 1\n" for i in range(150)))
    nvml["FAKE_NVML_PROCESSES"] = listing
    gpu = status(scene, **nvml)[0]
    scene.check(gpu["processes"][0]["driver_bytes"] == 40 * MIB, f"the driver's own: {gpu['processes']}")
    others = {other["pid"]: other["used_bytes"] for other in gpu["others"]}
    scene.check(len(others) == 152 and others[4000001] == 77 * MIB, f"the others: {others}")
    scene.check(others[4000002] is None and process.pid not in others, f"the others: {others}")
    code, out, _ = scene.run("status", **nvml)
    scene.check("beside it: 40.000 MiB the driver's own\n" in out, f"the driver's own: {out}")
    for words in ("4000001 (in no group of yours): 77.000 MiB", "4000002 (in no group of yours): unknown"):
        scene.check(words in out, f"{words}: {out}")
    # 624 MiB are free and 100 more to be had; a process that is switched off is none.
    scene.check(scene.run("wait", "--free", "724MiB", "--", "true", **nvml)[0] == 0, "wait counts the cache")
    for device in ("9", "GPU-12345678"):
        wrong = scene.run("wait", "--free", "1MiB", "--gpu", device, "--", "echo", "started", **nvml)
        scene.check(wrong[:2] == (2, "") and f"--gpu {device}: no such GPU" in wrong[2], f"no such device: {wrong}")
    late = scene.run("wait", "--free", "725MiB", "--timeout", "0", "--", "true", **nvml)
    scene.check(late[0] == 124 and "the time is up" in late[2], f"wait beyond it: {late}")
    process.end()
    keeper = scene.start(GPURECLAIM_NEIGHBOUR="0")
    keeper.ask("alloc", 0, 100)
    keeper.ask("free")
    late = scene.run("wait", "--free", "725MiB", "--timeout", "0", "--", "true", **nvml)
    scene.check(late[0] == 124, "one that is switched off is not counted")
    scene.check(status(scene) == [], f"one that is switched off is not seen: {status(scene)}")
    keeper.end()
    # One that looks itself says it to those who cannot.
    looker = scene.start(GPURECLAIM_LIMIT_INCLUDES="process",
                         **{**nvml, "LD_LIBRARY_PATH": f"{scene.folder}/lib:{sim}"})
    with open(listing, "w", encoding="ascii") as file:
        file.write(f"{looker.pid} 40\n")
    looker.ask("total", 0)

    def told():
        found = status(scene)
        return found and found[0]["processes"][0]["driver_bytes"] == 40 * MIB

    scene.check(until(told), f"a member's own figure: {status(scene)}")
    scene.check(looker.ask("graph", 0) == 0 and until(lambda: executables(1, 0)), f"and its graphs: {status(scene)}")
    code, out, _ = scene.run("status")
    words = "beside it: 40.000 MiB the driver's own\n    executable graphs: 1, about 0 B the driver's own\n"
    scene.check(words in out, f"its graphs, in words: {out}")
    looker.end()


def groups(scene):
    """What another group of the user has is no memory of others. The GPU that both are on is told once."""
    one, other = (scene.start(GPURECLAIM_GROUP=group, GPURECLAIM_DECAY="0") for group in ("default", "other"))
    one.ask("alloc", 0, 100)
    other.ask("alloc", 0, 200)
    foreign = [(gpu["group"], gpu["gpu_used_bytes"] // MIB, gpu["foreign_bytes"]) for gpu in status(scene)]
    scene.check(foreign == [("default", 300, 0), ("other", 300, 0)], f"two groups: {foreign}")
    nvml = nvml_env(scene, f"GPU-{status(scene)[0]['uuid']} 1024 400\n")
    nvml["FAKE_NVML_PROCESSES"] = os.path.join(scene.folder, "processes")
    with open(nvml["FAKE_NVML_PROCESSES"], "w", encoding="ascii") as file:
        file.write(f"{one.pid} 100\n{other.pid} 200\n4000001 77\n")
    _, out, _ = scene.run("status", **nvml)
    heads = re.findall(r"^GPU|^  memory: .* used, .*MiB not|^  group .*:|^  \d+ \(.*|^  \d+", out, re.M)
    words = ["GPU", "  memory: 400.000 MiB of 1.000 GiB used, 100.000 MiB not", "  group default:", f"  {one.pid}",
             "  group other:", f"  {other.pid}", "  4000001 (in no group of yours): 77.000 MiB"]
    scene.check(heads == words, f"two groups, in words: {out}")
    # 724 MiB are free; only the processes of one's own group give what they cache. Without the management library, too.
    uuid = f"GPU-{status(scene)[0]['uuid']}"
    nvml_env(scene, f"{uuid} 1024 300\n")
    scene.check(one.ask("free") == 0 and other.ask("free") == 0, "both cache")

    def fits(size, *flags, **environment):
        return scene.run("wait", "--free", f"{size}MiB", "--timeout", "0", *flags, "--", "true", **environment)[::2]

    scene.check(until(lambda: fits(824) == (0, "")), "the group's cache counts")
    for environment in ({}, nvml):
        scene.check(fits(824, **environment) == (0, "") and fits(825, **environment)[0] == 124, "one group's cache")
        scene.check(until(lambda: fits(924, GPURECLAIM_GROUP="other", **environment) == (0, "")) and
                    fits(925, GPURECLAIM_GROUP="other", **environment)[0] == 124, "the other group's cache")
    scene.check(fits(824, "--gpu", uuid[:12]) == (0, "") and fits(825, "--gpu", uuid)[0] == 124, "by UUID alone")
    for name in ("1", "GPU-0"):
        said = fits(2000, "--gpu", name)
        scene.check(said[0] == 0 and f"not known what is free on GPU {name}" in said[1], f"not in use: {said}")
    one.end()
    other.end()


def which_gpu(scene):
    """wait looks at the GPU that the program will use."""
    nvml = nvml_env(scene, f"{FIRST} 1000 900\n{SECOND} 1000 100\n")

    def fits(*flags, **environment):
        return scene.run("wait", "--free", "500MiB", "--timeout", "0", *flags, "--", "true", **nvml, **environment)[0]

    scene.check(fits() == 124, "the first one is full")
    scene.check(fits("--gpu", "1") == 0, "--gpu 1 is not")
    scene.check(fits("--gpu", SECOND) == 0 and fits("--gpu", FIRST) == 124, "by UUID")
    scene.check(fits("--gpu", "GPU-6666") == 0, "by the beginning of one")
    scene.check(fits(CUDA_VISIBLE_DEVICES="1,0") == 0, "the first visible one")
    scene.check(fits(CUDA_VISIBLE_DEVICES=SECOND) == 0, "the first visible one, by UUID")
    scene.check(fits("--gpu", "0", CUDA_VISIBLE_DEVICES="1") == 124, "a flag goes before the variable")
    scene.check(fits("--gpu", "second") == 2, "not a GPU's name")
    scene.check(fits("--gpu", "7") == 2, "a GPU that is not there")
    # Room that comes while it waits.
    waiting = subprocess.Popen(
        [command, "wait", "--free", "500MiB", "--", "echo", "started"],
        env={**scene.environment, **nvml},
        stdout=subprocess.PIPE,
        text=True,
    )
    time.sleep(0.5)
    scene.check(waiting.poll() is None, "it waits")
    nvml_env(scene, f"{FIRST} 1000 400\n")
    scene.check(waiting.communicate(timeout=30)[0] == "started\n" and waiting.returncode == 0, "it starts the program")
    code, out, _ = scene.run("wait", "--free", "500MiB", "--", "echo", "started")
    scene.check((code, out) == (0, "started\n"), "nobody can tell what is free: it starts at once")


def containers(scene):
    """A process of another pid namespace is seen and asked; its pid means nothing here."""
    if subprocess.run(["unshare", "-rpf", "true"], capture_output=True, check=False).returncode:
        print("no pid namespaces here", flush=True)
        return
    inside = scene.start(before=("unshare", "-rpf", "--kill-child"))
    scene.check(inside.ask("alloc", 0, 300) == 0 and inside.ask("free") == 0, "it cannot work")

    def seen():
        found = status(scene)
        return found and found[0]["processes"][0]["cached_bytes"] == 300 * MIB

    scene.check(until(seen), "it is seen")
    process = status(scene)[0]["processes"][0]
    scene.check(not process["same_pid_namespace"], f"as one of another namespace: {process}")
    number = str(process["pid"])
    code, _, error = scene.run("limit", number, "1MiB")
    scene.check(code == 1 and "does not run under gpureclaim" in error, f"its pid is not one of ours: {error}")
    code, out, _ = scene.run("reclaim", "--all")
    scene.check(code == 0 and "300.000 MiB came back" in out, f"it gives: {out}")
    inside.end()


def waiting(scene):
    """A process whose allocation waits is not idle, however long that takes."""
    other, process = scene.start(), scene.start(GPURECLAIM_WAIT="60s")
    scene.check(other.ask("alloc", 0, 900) == 0 and process.ask("alloc", 0, 100) == 0, "both have memory")
    asking = threading.Thread(target=lambda: scene.check(process.ask("alloc", 0, 500) == 0, "it gets its memory"))
    asking.start()
    line = f"  {process.pid} python3: reserved 9.77% of the GPU (100.000 MiB of 1.000 GiB), waiting for 500.000 MiB\n"
    scene.check(until(lambda: line in scene.run("status")[1]), f"it waits: {scene.run('status')[1]}")
    idle = [one["idle_s"] for one in status(scene)[0]["processes"] if one["pid"] == process.pid]
    scene.check(idle == [0], f"it is not idle: {idle}")
    other.ask("free")
    asking.join()
    scene.check(until(lambda: "waiting" not in scene.run("status")[1]), "it waits no more")
    for one in (other, process):
        one.end()


def one_run(scene):
    """The processes of one run on the simulated device share it, also if the first of them has ended."""
    text = f"""
import os, subprocess, sys
sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
from scene import Process
one, two = Process(os.environ, ()), Process(os.environ, ())
print(one.ask("alloc", 0, 600), two.ask("alloc", 0, 600), two.ask("alloc", 0, 300), flush=True)
subprocess.run([{command!r}, "status", "--json"])
subprocess.Popen(["sh", "-c", f"while [ -e /proc/{{os.getpid()}}/fd/0 ]; do sleep 0.1; done; echo alloc 0 900 |"
                  f"{{sys.executable}} {{sys.modules['scene'].__file__}}"])
one.kill(), two.kill()
"""
    del scene.environment["GRSIM_SHARED"]
    code, out, error = scene.run("run", "--sim", "--", sys.executable, "-c", text)
    first, *rest, last = out.splitlines()
    gpus = json.loads("\n".join(rest))["gpus"]
    scene.check(code == 0 and first == "0 2 0" and len(gpus) == 1 and len(gpus[0]["processes"]) == 2, f"shared: {out}")
    scene.check(last == "0" and "GRSIM_SHARED: cannot use" in error, f"later: {last} {error}")


def watch(scene):
    """status --watch prints again and again, without control characters where no terminal is."""
    process = scene.start()
    process.ask("alloc", 0, 100)
    shown = subprocess.Popen([scene.command, "status", "--watch"], env=scene.environment, stdout=subprocess.PIPE,
                             text=True)
    lines = iter(shown.stdout.readline, "")
    first = next(line for line in lines if "MiB live" in line)
    scene.check("100.000 MiB live" in first, f"watched: {first}")
    process.ask("free")
    then = next((line for line in lines if "MiB cached" in line), "")
    scene.check("100.000 MiB cached" in then and "\x1b" not in then, f"watched on: {then}")
    shown.kill()
    shown.wait()
    process.end()


def files(scene):
    """Files that are no regions of this version are counted, not touched; those whose processes died are nothing."""
    process = scene.start()
    process.ask("alloc", 0, 10)
    region = scene.environment["GPURECLAIM_REGION_DIR"]
    (name,) = os.listdir(region)
    os.chmod(region, 0o700)
    for stranger in (name[:-1] + "9", "letter", "b" + name):
        with open(os.path.join(region, stranger), "w", encoding="ascii") as file:
            file.write("not a region")
        os.chmod(os.path.join(region, stranger), 0o600)
    code, out, _ = scene.run("status")
    words = f"Files in {region} of other users, containers or versions of gpureclaim, or of something else: 3\n"
    scene.check(code == 0 and words in out, f"strangers: {out}")
    process.kill()
    code, out, _ = scene.run("status")
    scene.check("No process of yours" in out and words in out, f"after a kill: {out}")
    scene.check(len(os.listdir(region)) == 4, "status removes nothing")
    process = scene.start()
    scene.check(process.ask("alloc", 0, 10) == 0 and len(status(scene)) == 1, "a killed one's file is used again")
    process.end()


def owners_of(path):
    """The words of the slots in the memory that processes share, one for each process."""
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    with open(path, "rb") as file:
        memory = libc.shmat(struct.unpack_from("I", file.read(), 12)[0], None, 0)
    return (ctypes.c_uint64 * 512).from_address(memory + OWNERS_OFFSET)


def crowded(scene):
    """Where a group has no more room for a process, that is said, and it works alone."""
    one = scene.start()
    scene.check(one.ask("alloc", 0, 10) == 0, "the first cannot work")
    (path,) = glob.glob(os.path.join(scene.environment["GPURECLAIM_REGION_DIR"], "*"))
    owners = owners_of(path)
    before = [*owners]
    owners[:] = [max(before)] * len(before)
    said = os.path.join(scene.folder, "said")
    late = scene.start(before=("sh", "-c", f'exec "$@" 2>{said}', "sh"))
    scene.check(late.ask("alloc", 0, 10) == 0, "the last one cannot work")
    with open(said, encoding="utf-8") as file:
        text = file.read()
    words = "device 0: other processes cannot be seen (GPURECLAIM_REGION_DIR="
    scene.check(words in text and ": too many processes of the group use the GPU)" in text, f"crowded: {text}")
    owners[:] = before
    for process in (one, late):
        scene.check(process.end() == 0, "a process ended badly")


def all_users(scene):
    """Root sees the processes of all users, told apart, and may give them orders; another user sees only its own."""
    other = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    if os.geteuid() != 0 or subprocess.run([*other, "true"], capture_output=True, check=False).returncode:
        print("not root, or no setpriv: other users' processes were not looked at", flush=True)
        return
    default = {"GPURECLAIM_REGION_DIR": "", "GPURECLAIM_GROUP": f"gr-test-{os.getpid()}", "GPURECLAIM_DECAY": "0"}
    os.chmod(scene.folder, 0o711)
    one = scene.start(**default)
    one.ask("alloc", 0, 100)
    os.chmod(scene.environment["GRSIM_SHARED"], 0o666)
    theirs = scene.start(before=other, **default)
    scene.check(theirs.ask("alloc", 0, 60) == 0 and theirs.ask("alloc", 0, 40) == 0 and theirs.ask("free") == 0,
                "another user's process cannot work")
    stranger = subprocess.run(["getent", "passwd", "65534"], capture_output=True, text=True, check=False).stdout
    stranger = stranger.split(":")[0] or "65534"

    def of_group():
        return [gpu for gpu in status(scene, **default) if gpu["group"] == default["GPURECLAIM_GROUP"]]

    def seen():
        return [(gpu["uid"], *[(process["pid"], process["live_bytes"] // MIB, process["cached_bytes"] // MIB)
                               for process in gpu["processes"]]) for gpu in of_group()]

    wanted = [(0, (one.pid, 100, 0)), (65534, (theirs.pid, 0, 100))]
    scene.check(until(lambda: seen() == wanted), f"all users: {seen()}")
    _, out, _ = scene.run("status", **default)
    for user, process in (("root", one), (stranger, theirs)):
        words = f"  group {default['GPURECLAIM_GROUP']} of {user}:\n  {process.pid} "
        scene.check(words in out, f"all users, in words: {out}")
    _, out, _ = scene.run("top", "--once", **default)
    row = re.search(rf"^ *{theirs.pid} .*s  {stranger:10} \S", out, re.M)
    scene.check("IDLE  USER       COMMAND" in out and row and f"of {stranger}: " in out, f"top: {out}")
    _, out, _ = scene.run("metrics", **default)
    labels = rf'user="{stranger}",pid="{theirs.pid}"'
    scene.check(re.search(rf"cached_bytes{{[^}}]*,{labels},[^}}]*}} {100 * MIB}$", out, re.M) and
                re.search(rf'live_bytes{{[^}}]*"gr-test-{os.getpid()}",pid="{one.pid}",', out), f"metrics: {out}")
    # The other user: no change, whatever the name of the folder.
    for folder in (default, {"GPURECLAIM_REGION_DIR": "/dev/shm/gpureclaim-0"}):
        said = subprocess.run([*other, command, "status", "--json"], env={**scene.environment, **default, **folder},
                              capture_output=True, text=True, check=False).stdout
        pids = [process["pid"] for gpu in json.loads(said or '{"gpus": []}')["gpus"] for process in gpu["processes"]]
        scene.check(pids == ([theirs.pid] if folder is default else []), f"another user sees {pids}")
    # An order goes to the process that is named only.
    code, out, error = scene.run("limit", str(theirs.pid), "200MiB", **default)
    scene.check(code == 0 and f"{theirs.pid} python3: hard limit now 200.000 MiB" in out, f"an order: {out} {error}")
    scene.check(theirs.ask("total", 0) == 200 and one.ask("total", 0) == 1024, "whom the limit holds for")
    code, out, error = scene.run("reclaim", str(theirs.pid), **default)
    scene.check(code == 0 and "100.000 MiB came back" in out, f"memory comes back: {out} {error}")
    code, out, error = scene.run("sleep", "--timeout", "0", str(theirs.pid), **default)
    scene.check((code, out) in ((0, f"{theirs.pid} python3: 0 B asleep\n"), (1, "")), f"sleep: {out}")
    # Who puts another user's process into a slot of his own does not get its orders.
    owners = []
    for user in (0, 65534):
        (path,) = glob.glob(f"/dev/shm/gpureclaim-{user}*/{default['GPURECLAIM_GROUP']}-*")
        owners.append(owners_of(path))
    free = [*owners[1]].index(0)
    owners[1][free] = next(owner for owner in owners[0] if owner)
    scene.check([user for user, *_ in seen()] == [0, 65534] and len(seen()[1]) == 2, f"a process of another: {seen()}")
    owners[1][free] = 0
    # Of another user's slots and files only so many are looked at, as he may have made up any number of them. A slot
    # whose owner has another pid namespace cannot be told from a process.
    made_up = [slot for slot in range(512) if not owners[1][slot]]
    token = next(owner for owner in owners[1] if owner)
    for slot in made_up:
        owners[1][slot] = token ^ OTHER_NAMESPACE ^ (slot + 1)
    counts = [len(gpu["processes"]) for gpu in of_group() if gpu["uid"] == 65534]
    scene.check(counts == [64], f"of 512 processes of another user there are {counts}")
    for slot in made_up:
        owners[1][slot] = 0
    many = os.path.join(scene.folder, "many")
    os.mkdir(many, 0o700)
    os.chown(many, 65534, 65534)
    for i in range(40):
        copy = os.path.join(many, os.path.basename(path).replace("gr-test", f"gr-{i}-test", 1))
        shutil.copy2(path, copy)
        os.chown(copy, 65534, 65534)
    count = len(status(scene, GPURECLAIM_REGION_DIR=many))
    scene.check(count == 16, f"of 40 files of another user there are {count}")
    named = {**default, "GPURECLAIM_REGION_DIR": os.path.dirname(path)}
    _, out, error = scene.run("status", **named)
    scene.check(f"  {theirs.pid} " in out and not error, f"another user's folder, named: {out} {error}")
    said = scene.run("reclaim", "--all", **named)
    scene.check(said == (0, "", ""), f"all of root's own are none: {said}")
    # A process in another IPC namespace puts the memory into the file, which its user may cut short during an order.
    apart = scene.start(before=("unshare", "-i", *other), **default)
    scene.check(apart.ask("alloc", 0, 30) == 0, "a process of another IPC namespace cannot work")
    scene.check(until(lambda: len(seen()) == 2 and (apart.pid, 30, 0) in seen()[1]), f"in the file: {seen()}")
    os.kill(apart.pid, signal.SIGSTOP)
    order = subprocess.Popen([command, "limit", str(apart.pid), "200MiB"], env={**scene.environment, **default},
                             stderr=subprocess.PIPE, text=True)

    def has_file():
        with open(f"/proc/{order.pid}/maps", encoding="ascii") as maps:
            return path in maps.read()

    scene.check(until(has_file), "the order is not given")
    os.truncate(path, 40)
    error = order.communicate()[1]
    scene.check(order.returncode == 1 and "has taken its shared memory away" in error, f"cut short: {error}")
    apart.kill()
    theirs.kill()
    scene.check(one.end() == 0 and seen() == [], f"nobody is left: {seen()}")
    os.remove(path)


failed = 0
for test, devices in ((orders, 2), (who_has_it, 1), (what_is_not_ours, 1), (groups, 1), (which_gpu, 1),
                      (containers, 1), (waiting, 1), (one_run, 1), (watch, 1), (files, 1), (crowded, 1),
                      (all_users, 1)):
    with Scene(command, sim, shim, devices) as scene:
        os.mkdir(os.path.join(scene.folder, "lib"))
        shutil.copy(fake, os.path.join(scene.folder, "lib", "libnvidia-ml.so.1"))
        test(scene)
        failed += scene.failed
raise SystemExit(1 if failed else 0)
