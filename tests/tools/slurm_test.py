#!/usr/bin/env python3
"""The scripts of the guide to Slurm, on a cluster of this machine alone: the job, its TaskProlog and its Epilog.

Usage: slurm_test.py GPURECLAIM SIM_FOLDER SHIM SOURCE_FOLDER

It needs root, and of Debian's packages slurm-wlm and munge; where these are missing it is skipped.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

from scene import until

command, sim, shim, source = map(os.path.abspath, sys.argv[1:])
TASK = r"""
import ctypes, glob, os, time

driver = ctypes.CDLL("libcuda.so.1")
context, count = ctypes.c_void_p(), 0
if driver.cuInit(0) or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) or driver.cuCtxSetCurrent(context):
    raise SystemExit("no device")
while driver.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(64 << 20)) == 0:
    count += 1
    time.sleep(0.01)
with open("told." + os.environ["SLURM_PROCID"], "w") as file:
    file.write(str(count * 64))
while os.path.exists("stay") or len(glob.glob("told.*")) < int(os.environ["SLURM_NTASKS"]):
    time.sleep(0.05)
"""
failed = 0


def check(good, what):
    global failed
    if not good:
        print("FAILED:", what, flush=True)
        failed += 1


def skip(why):
    print(why)
    raise SystemExit(77)


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Cluster:
    """Slurm's two daemons and munge, with all that they keep in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("GPURECLAIM_")}
        self.environment.update(
            SLURM_CONF=f"{folder}/slurm.conf",
            PATH=f"{os.path.dirname(command)}:{os.environ['PATH']}",
            LD_LIBRARY_PATH=f"{sim}:{os.path.dirname(shim)}",
            GRSIM_SHARED=f"{folder}/gpu",
            GRSIM_MEMORY="8GiB",
        )
        self.environment.pop("LD_PRELOAD", None)
        self._daemons = []

    def write(self, file, text, mode=0o644):
        path = os.path.join(self.folder, file)
        with open(path, "w", encoding="utf-8") as made:
            made.write(text)
        os.chmod(path, mode)
        return path

    def start(self, *words):
        with open(f"{self.folder}/{words[0]}.log", "w", encoding="utf-8") as log:
            self._daemons.append(subprocess.Popen(words, env=self.environment, stdout=log, stderr=log))

    def stop(self):
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(60)

    def ask(self, *words):
        return subprocess.run(words, env=self.environment, cwd=self.folder, capture_output=True, text=True).stdout

    def run(self, *words):
        """Runs a job, and returns its number and how much each of its tasks got."""
        self.clear()
        out = self.ask("sbatch", "--parsable", "--wait", "-o", "out", *words)
        with open(f"{self.folder}/out", encoding="utf-8") as file:
            print(file.read())
        return out.strip(), self.told()

    def told(self):
        found = []
        for file in os.listdir(self.folder):
            if file.startswith("told."):
                with open(f"{self.folder}/{file}", encoding="utf-8") as one:
                    found.append(int(one.read() or 0))
        return found

    def clear(self):
        for file in os.listdir(self.folder):
            if file.startswith("told."):
                os.remove(f"{self.folder}/{file}")


def set_up(cluster):
    node = socket.gethostname().split(".")[0]
    ports = free_ports(2)
    folder = cluster.folder
    prolog, epilog = (cluster.write(name, text, 0o755) for name, text in zip(("prolog", "epilog"), scripts[1:]))
    os.mkdir(f"{folder}/state")
    cluster.write("gres.conf", f"NodeName={node} Name=gpu File=/dev/null\nNodeName={node} Name=shard Count=8\n")
    # A job's number is in the name of its group, which is that of all of the user's processes on this machine.
    cluster.write("slurm.conf", f"""
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
MpiDefault=none
GresTypes=gpu,shard
FirstJobId={100000 + os.getpid()}
TaskProlog={prolog}
Epilog={epilog}
NodeName={node} NodeAddr=127.0.0.1 CPUs=8 RealMemory=1000 Gres=gpu:1,shard:8
PartitionName=all Nodes=ALL Default=YES
""")
    with open(f"{folder}/munge.key", "wb") as key:
        key.write(os.urandom(128))
    os.chmod(f"{folder}/munge.key", 0o600)
    cluster.start("munged", "--foreground", "--force", f"--key-file={folder}/munge.key",
                  f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid", f"--seed-file={folder}/seed",
                  f"--log-file={folder}/munge.log")
    if not until(lambda: os.path.exists(f"{folder}/munge.socket")):
        skip("munged does not start here")
    cluster.start("slurmctld", "-D")
    cluster.start("slurmd", "-D")
    if not until(lambda: cluster.ask("sinfo", "-h", "-o", "%t").strip() == "idle", 60):
        for name in ("slurmctld", "slurmd"):
            with open(f"{folder}/{name}.log", encoding="utf-8") as log:
                print(log.read())
        skip("Slurm does not start here")


def left_of(job):
    folder = f"/dev/shm/gpureclaim-{os.getuid()}"
    return [file for file in os.listdir(folder) if file.startswith(f"job-{job}-")] if os.path.isdir(folder) else []


def jobs(cluster):
    """8 GiB, of which the job of the guide gets 90 percent, and a job with three parts 36 percent."""
    job, got = cluster.run(cluster.write("job", scripts[0], 0o755))
    check(len(got) == 4 and 7372 - 4 * 64 <= sum(got) <= 7372 and max(got) <= 4096, f"the job of the guide: {got}")
    check(job and left_of(job) == [], f"it leaves {left_of(job)}")
    parts = ("--gres=shard:3", "--ntasks=2", "--wrap", "srun python3 train.py")
    job, got = cluster.run(*parts)
    check(len(got) == 2 and 2949 - 2 * 64 <= sum(got) <= 2949, f"a job with parts of a GPU: {got}")
    cluster.clear()
    stay = cluster.write("stay", "")
    job = cluster.ask("sbatch", "--parsable", *parts).strip()
    check(until(lambda: len(cluster.told()) == 2, 60), "a job that is to be cancelled")
    check(len(left_of(job)) == 1, f"what it has while it runs: {left_of(job)}")
    cluster.ask("scancel", job)
    check(until(lambda: cluster.ask("squeue", "-h") == "", 60), "the job goes on")
    check(left_of(job) == [], f"cancelled, it leaves {left_of(job)}")
    os.remove(stay)


for tool in ("munged", "slurmctld", "slurmd", "srun"):
    if not shutil.which(tool, path=os.environ["PATH"] + ":/usr/sbin"):
        skip(f"no {tool} here")
if os.getuid() != 0:
    skip("Slurm's daemons need root")
os.environ["PATH"] += ":/usr/sbin"
with open(f"{source}/docs/guides.md", encoding="utf-8") as guides:
    section = re.search(r"^## Slurm\n(.*?)^## ", guides.read(), re.M | re.S)[1]
scripts = re.findall(r"^```sh\n(.*?)^```", section, re.M | re.S)
with tempfile.TemporaryDirectory(dir=os.environ.get("GR_TEST_FOLDER", os.getcwd()), prefix="slurm-") as made:
    os.chmod(made, 0o755)
    one = Cluster(made)
    one.write("train.py", TASK)
    try:
        set_up(one)
        jobs(one)
    finally:
        one.stop()
raise SystemExit(1 if failed else 0)
