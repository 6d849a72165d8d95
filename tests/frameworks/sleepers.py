#!/usr/bin/env python3
"""What can sleep (GPURECLAIM_SLEEP): unmodified programs of many kinds work, sleep at a pause, and go on.

    sleepers.py --command GPURECLAIM --library LIBRARY [--deep] [--size MIB] [--list] [KIND...]
    sleepers.py --command GPURECLAIM --library LIBRARY [--size MIB] [--count N] [--seed N] cycles

Each kind (default: all) runs natively and under the library at the same time. When the native one has ended, the
command puts the other to sleep, at each of its pauses. One line tells: yes, partly or no, what left and what stayed,
how long it took out and in, and whether both programs had the same results, bit for bit. A kind that lacks its
framework is skipped.

cycles: one program works at random, while N orders to sleep come at random moments. Every 50 orders, and at the end,
all that it has must be what it wrote.

With --deep the sleep of a kind is a deep one. Then the answer is deeply where the process has left the GPU; else the
line ends with the reason.

Exit status 1 when results differ, a program fails, or a kind whose answer is known gives another; 77 when all kinds
were skipped.
"""

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import queue
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib

from gpu_use import Gpu, find_cupy, find_jax, find_torch, skip

MIB = 2**20
SET_UP_S, WORK_S, SLEEP_S = 120, 30, 10
PAUSES = 2


def say(*words):
    print(*words, flush=True)


# Programs. Each is a generator: what it yields is a pause, with the other processes that are part of it; what it
# returns is its result, as text.


class Driver:
    """The CUDA driver, with the first GPU's primary context. The programs that use it need no framework."""

    def __init__(self):
        self._library = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        if self._library.cuInit(0) or self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0):
            skip("no device")
        self._context = context
        self.attach()

    def attach(self):
        """In each thread."""
        self.cuCtxSetCurrent(self._context)

    def __getattr__(self, name):
        function = getattr(self._library, name)

        def call(*words):
            # Integers are addresses, sizes and values: all are passed in whole registers.
            result = function(*(ctypes.c_size_t(word) if isinstance(word, int) else word for word in words))
            if result:
                raise SystemExit(f"{name} answered {result}")

        return call

    def alloc(self, size, function="cuMemAlloc_v2", *words):
        address = ctypes.c_size_t()
        getattr(self, function)(ctypes.byref(address), size, *words)
        return address.value

    def stream(self):
        stream = ctypes.c_void_p()
        self.cuStreamCreate(ctypes.byref(stream), 1)
        return stream

    def read(self, address, size):
        content = ctypes.create_string_buffer(size)
        self.cuMemcpyDtoH_v2(content, address, size)
        return content.raw

    def digest(self, blocks):
        value = 0
        for address, size in blocks:
            value = zlib.crc32(self.read(address, size), value)
        return f"{value:08x}"


def fill(driver, blocks, seed):
    """Each page of each block with another word."""
    for number, (address, size) in enumerate(blocks):
        for at in range(0, size, 2 * MIB):
            driver.cuMemsetD32_v2(address + at, seed * 7919 + number * 1009 + at // MIB, min(size - at, 2 * MIB) // 4)
    driver.cuCtxSynchronize()


def take(driver, size):
    """Blocks of 1 MiB and more, each a bit larger than the one before, of so much together."""
    blocks, each = [], MIB
    while size >= each:
        blocks.append((driver.alloc(each), each))
        size -= each
        each += max(each // 4 // 4096 * 4096, 4096)
    return blocks


def plain(size):
    driver = Driver()
    blocks = take(driver, size)
    fill(driver, blocks, 1)
    for i in range(PAUSES):
        yield
        address, bytes_ = blocks[i]
        driver.cuMemsetD32_v2(address, i, bytes_ // 4)
    return driver.digest(blocks)


def threads(size):
    """Four threads with a stream each fill, copy, allocate and free at random."""
    driver = Driver()
    results = [None] * 4
    barrier = threading.Barrier(5)

    def work(number):
        choose = random.Random(number)
        driver.attach()
        stream = driver.stream()
        blocks = take(driver, size // 4)
        for _ in range(PAUSES + 1):
            for _ in range(200):
                at = choose.randrange(len(blocks))
                address, bytes_ = blocks[at]
                action = choose.randrange(4)
                if action == 0:
                    driver.cuStreamSynchronize(stream)
                    driver.cuMemFree_v2(address)
                    blocks[at] = (driver.alloc(bytes_), bytes_)
                    driver.cuMemsetD32Async(blocks[at][0], choose.randrange(2**32), bytes_ // 4, stream)
                elif action == 1:
                    other, other_bytes = choose.choice(blocks)
                    if other != address:
                        driver.cuMemcpyDtoDAsync_v2(address, other, min(bytes_, other_bytes), stream)
                else:
                    driver.cuMemsetD32Async(address, choose.randrange(2**32), bytes_ // 8, stream)
            driver.cuStreamSynchronize(stream)
            barrier.wait()
            barrier.wait()
        results[number] = driver.digest(blocks)

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)

    fill(driver, [(driver.alloc(MIB), MIB)], 0)
    workers = [threading.Thread(target=guarded, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for i in range(PAUSES + 1):
        barrier.wait()
        if i < PAUSES:
            yield
        barrier.wait()
    for worker in workers:
        worker.join()
    return " ".join(results)


def pinned(size):
    """Copies between device memory and host memory of both kinds, which the program writes while it sleeps."""
    driver = Driver()
    host = size // 8 // 4096 * 4096
    own = ctypes.c_void_p()
    driver.cuMemHostAlloc(ctypes.byref(own), host, 0)
    mapping = mmap.mmap(-1, host)
    registered = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    driver.cuMemHostRegister_v2(registered, host, 0)
    blocks, stream = [(driver.alloc(host), host) for _ in range(8)], driver.stream()
    fill(driver, blocks, 2)
    for i in range(PAUSES):
        yield
        ctypes.memset(own, 17 + i, host)
        ctypes.memset(registered, 71 + i, host)
        driver.cuMemcpyHtoDAsync_v2(blocks[2 * i][0], own.value, host, stream)
        driver.cuMemcpyHtoDAsync_v2(blocks[2 * i + 1][0], registered, host, stream)
        driver.cuMemcpyDtoHAsync_v2(registered, blocks[4 + i][0], host, stream)
        driver.cuStreamSynchronize(stream)
        say("#", f"{zlib.crc32(mapping):08x}")
    return driver.digest(blocks) + f" {zlib.crc32(mapping):08x}"


def beside(size):
    """A half in memory that cannot leave: stream-ordered and managed."""
    driver = Driver()
    blocks = take(driver, size // 2)
    quarter = size // 4
    stream = driver.stream()
    blocks.append((driver.alloc(quarter, "cuMemAllocAsync", stream), quarter))
    driver.cuStreamSynchronize(stream)
    blocks.append((driver.alloc(quarter, "cuMemAllocManaged", 1), quarter))
    fill(driver, blocks, 4)
    for _ in range(PAUSES):
        yield
        fill(driver, blocks[:1], 5)
    return driver.digest(blocks)


def exported(size):
    """Another process has the last block open and reads it all the time."""
    driver = Driver()
    blocks = take(driver, size)
    fill(driver, blocks, 3)
    address, bytes_ = blocks[-1]
    handle = ctypes.create_string_buffer(64)
    driver.cuIpcGetMemHandle(handle, address)
    reader = subprocess.Popen([sys.executable, __file__, "--import", handle.raw.hex(), str(bytes_)],
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if reader.stdout.readline().strip() != "ready":
        raise SystemExit("the block cannot be opened by another process")
    for _ in range(PAUSES):
        yield
        fill(driver, blocks[:1], 3)
    seen, _ = reader.communicate("\n")
    return f"{driver.digest(blocks)} {seen.strip()}"


class Handle(ctypes.Structure):
    _fields_ = [("words", ctypes.c_char * 64)]


def read_import(handle, size):
    driver = Driver()
    address = ctypes.c_size_t()
    driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), Handle.from_buffer_copy(bytes.fromhex(handle)), 1)
    first = driver.digest([(address.value, size)])
    say("ready")
    changed = 0
    while not select.select([sys.stdin], [], [], 0.05)[0]:
        changed += driver.digest([(address.value, size)]) != first
    say(first, changed)


def torch_digest(*tensors):
    value = 0
    for tensor in tensors:
        value = zlib.crc32(tensor.detach().cpu().contiguous().numpy(), value)
    return f"{value:08x}"


def exact_torch():
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch = find_torch()
    torch.manual_seed(1234)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    for choose in ("enable_flash_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"):
        getattr(torch.backends.cuda, choose)(False)
    return torch


def trained(torch, model, shape, steps):
    """Trains, with pauses; what they return and the losses are the result."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    losses = []
    for i in range(PAUSES + 1):
        for _ in range(steps):
            x = torch.randn(*shape, device="cuda")
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.cuda.synchronize()
        if i < PAUSES:
            yield
    return torch_digest(torch.stack(losses), *model.parameters())


def torch_eager(size):
    """By default 100 million parameters: with those of the optimizer 1.6 GiB, and as much for activations."""
    torch = exact_torch()
    width = max(64, int((size / 2**31) ** 0.5 * 1024) // 64 * 64)
    layer = torch.nn.TransformerEncoderLayer(width, nhead=8, dim_feedforward=4 * width, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, num_layers=8).cuda()
    return (yield from trained(torch, model, (16, 256, width), 10))


def multilayer(torch, size, layers=4):
    width = max(64, int((size / 2**31) ** 0.5 * 4096) // 64 * 64)
    parts = [part for _ in range(layers) for part in (torch.nn.Linear(width, width), torch.nn.GELU())]
    return torch.nn.Sequential(*parts).cuda(), width


def torch_compile(size):
    torch = exact_torch()
    model, width = multilayer(torch, size)
    return (yield from trained(torch, torch.compile(model), (width, width), 10))


def torch_graphs(size):
    """A graph for each of some batches, whose temporaries make up the most."""
    torch = exact_torch()
    model, width = multilayer(torch, size)
    graphs, results = [], []
    with torch.no_grad():
        for rows in (width // 2, width, 2 * width):
            x = torch.randn(rows, width, device="cuda")
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                model(x)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = model(x)
            graphs.append((graph, x, out))
        for i in range(PAUSES + 1):
            for graph, x, out in graphs:
                graph.replay()
                results.append(torch_digest(out))
                x.copy_(out)
            torch.cuda.synchronize()
            if i < PAUSES:
                yield
    return " ".join(results)


def torch_libraries(size):
    """What asks for workspaces: convolutions (cuDNN), products (cuBLAS), transforms (cuFFT), factors (cuSOLVER)."""
    torch = exact_torch()
    n = max(64, int((size / 2**31) ** 0.5 * 4096) // 64 * 64)
    image = torch.randn(32, 64, n // 16, n // 16, device="cuda")
    filters = torch.randn(64, 64, 3, 3, device="cuda") * 0.05
    square = torch.randn(n, n, device="cuda")
    kept = [torch.randn(n, n, device="cuda") for _ in range(size // (8 * n * n))]
    for i in range(PAUSES + 1):
        image = torch.tanh(torch.nn.functional.conv2d(image, filters, padding=1))
        square = torch.tanh(square @ kept[i])
        wave = torch.fft.irfft(torch.fft.rfft(square), n=n)
        few = square[:512, :512]
        factor = torch.linalg.cholesky(few @ few.T + 1000 * torch.eye(few.shape[0], device="cuda"))
        torch.cuda.synchronize()
        if i < PAUSES:
            yield
    return torch_digest(image, square, wave, factor, *kept)


def torch_exported(size):
    """A tensor that another process has open and sums up all the time."""
    torch = exact_torch()
    context = torch.multiprocessing.get_context("spawn")
    tensors = [torch.randint(0, 1000, (size // 8 // 4,), dtype=torch.int32, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    ours, theirs = context.Pipe()
    reader = context.Process(target=sum_tensor, args=(theirs, tensors[0]), daemon=True)
    reader.start()
    if not ours.poll(SET_UP_S):
        raise SystemExit("the other process is not there in time")
    first = ours.recv()
    for _ in range(PAUSES):
        yield
        tensors[1] += 1
        torch.cuda.synchronize()
    ours.send("end")
    changed = ours.recv()
    reader.join()
    return f"{torch_digest(*tensors)} {first} {changed}"


def sum_tensor(connection, tensor):
    first, changed = tensor.sum().item(), 0
    connection.send(first)
    while not connection.poll(0.05):
        changed += tensor.sum().item() != first
    connection.send(changed)


def nccl(size):
    """Two processes with a GPU each, whose tensors are summed."""
    torch = exact_torch()
    if torch.cuda.device_count() < 2:
        skip("fewer than two GPUs")
    import torch.distributed as dist

    rank = int(os.environ.get("SLEEPERS_RANK", "0"))
    other = None
    if rank == 0:
        folder = tempfile.TemporaryDirectory(prefix="sleepers-nccl-")
        store = os.path.join(folder.name, "store")
        other = subprocess.Popen([sys.executable, *sys.argv], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                                 env={**os.environ, "SLEEPERS_RANK": "1", "SLEEPERS_STORE": store}, text=True)
    else:
        store = os.environ["SLEEPERS_STORE"]
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    tensors = [torch.randint(0, 1000, (size // 8 // 4,), dtype=torch.int32, device="cuda") for _ in range(8)]
    for i in range(PAUSES + 1):
        for tensor in tensors[:3]:
            dist.all_reduce(tensor)
            tensor %= 1000003
        dist.barrier()
        torch.cuda.synchronize()
        if i < PAUSES:
            yield [other.pid] if other else []
            if other:
                other.stdin.write("\n")
                other.stdin.flush()
    result = torch_digest(*tensors)
    dist.destroy_process_group()
    if other and other.wait():
        raise SystemExit(f"the other process ended with status {other.returncode}")
    return result


def jax(size):
    """Integers, so that any way to multiply has the same result."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".06")
    jax = find_jax()
    import jax.numpy as jnp
    import numpy

    n = max(64, int((size / 2**31) ** 0.5 * 4096) // 64 * 64)
    first = (numpy.arange(n * n, dtype=numpy.float32) * 7 % 3).reshape(n, n)
    arrays = [jax.device_put(numpy.roll(first, i)) for i in range(24)]
    step = jax.jit(lambda a, b: jnp.mod(a @ b, 3))
    for i in range(PAUSES + 1):
        arrays = [step(a, b) for a, b in zip(arrays, arrays[1:] + arrays[:1])]
        jax.block_until_ready(arrays)
        if i < PAUSES:
            yield
    value = 0
    for array in arrays:
        value = zlib.crc32(numpy.ascontiguousarray(array), value)
    return f"{value:08x}"


def cupy(size):
    """Integers, and with cuBLAS a handle that has a workspace of its own."""
    cupy = find_cupy()
    import numpy

    n = max(64, int((size / 2**31) ** 0.5 * 4096) // 64 * 64)
    arrays = [cupy.roll(cupy.arange(n * n, dtype=cupy.float32) * 7 % 3, i).reshape(n, n) for i in range(24)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    cupy.cuda.Device().synchronize()
    for i in range(PAUSES + 1):
        before = list(arrays)
        for at in range(len(arrays)):
            with streams[at % 4]:
                arrays[at] = (before[at] @ before[at - 1]) % 3
        cupy.cuda.Device().synchronize()
        order = cupy.sort(arrays[i].ravel())
        cupy.cuda.Device().synchronize()
        if i < PAUSES:
            yield
    value = 0
    for array in [*arrays, order]:
        value = zlib.crc32(numpy.ascontiguousarray(cupy.asnumpy(array)), value)
    return f"{value:08x}"


# NAME: (program, the answer where it is known, settings of the program under the library)
KINDS = {
    "plain": (plain, "yes", {}),
    "threads": (threads, "yes", {}),
    "pinned": (pinned, "yes", {}),
    "exported": (exported, "partly", {}),
    "beside": (beside, "partly", {}),
    "torch": (torch_eager, "yes", {}),
    "torch-uncached": (torch_eager, None, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    "torch-expandable": (torch_eager, None, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "torch-async": (torch_eager, None, {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
    "torch-compile": (torch_compile, None, {}),
    "torch-graphs": (torch_graphs, None, {}),
    "torch-graphs-shared": (torch_graphs, None,
                            {"GPURECLAIM_GRAPH_ARENA": "shared", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}),
    "torch-libraries": (torch_libraries, None, {}),
    "torch-exported": (torch_exported, None, {}),
    "nccl": (nccl, None, {}),
    "jax": (jax, None, {}),
    "jax-platform": (jax, None, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}),
    "cupy": (cupy, None, {}),
}


def run_program(kind, size):
    program = KINDS[kind][0](size)
    while True:
        try:
            say("pause", *(next(program) or []))
        except StopIteration as end:
            say("result", end.value)
            return
        sys.stdin.readline()


class Worker:
    """Works at random on blocks of pieces, each filled with one word, of which it knows which one."""

    PIECE = 65536

    def __init__(self, size, seed):
        self._driver = Driver()
        self._random = random.Random(seed)
        self._blocks = []
        while size >= self.PIECE:
            pieces = min(self._random.choice((1, 3, 16, 48, 160, 512)), size // self.PIECE)
            self._blocks.append(self._new(pieces))
            size -= pieces * self.PIECE

    def _new(self, pieces):
        address, word = self._driver.alloc(pieces * self.PIECE), self._random.randrange(2**32)
        self._driver.cuMemsetD32_v2(address, word, pieces * self.PIECE // 4)
        return address, [word] * pieces

    def _some(self):
        address, words = block = self._random.choice(self._blocks)
        at = self._random.randrange(len(words))
        return block, at, self._random.randint(1, len(words) - at)

    def act(self):
        (address, words), at, count = self._some()
        action = self._random.randrange(8)
        if action == 0:
            self._driver.cuMemFree_v2(address)
            number = next(i for i, block in enumerate(self._blocks) if block[0] == address)
            self._blocks[number] = self._new(len(words))
        elif action < 3:
            (other, others), there, most = self._some()
            count = min(count, most)
            if other != address:
                self._driver.cuMemcpyDtoD_v2(address + at * self.PIECE, other + there * self.PIECE,
                                             count * self.PIECE)
                words[at:at + count] = others[there:there + count]
        elif action < 5:
            word = self._random.randrange(2**32)
            self._driver.cuMemsetD32_v2(address + at * self.PIECE, word, count * self.PIECE // 4)
            words[at:at + count] = [word] * count
        else:
            return self._wrong(address, words, at, min(count, 16))
        return 0

    def _wrong(self, address, words, at, count):
        """How many pieces are not what was written."""
        content = self._driver.read(address + at * self.PIECE, count * self.PIECE)
        wanted = [word.to_bytes(4, "little") * (self.PIECE // 4) for word in words[at:at + count]]
        if content == b"".join(wanted):
            return 0
        pieces = [content[i * self.PIECE:(i + 1) * self.PIECE] for i in range(count)]
        return sum(a != b for a, b in zip(pieces, wanted))

    def wrong(self):
        return sum(self._wrong(address, words, 0, len(words)) for address, words in self._blocks)


def run_cycles(size, seed):
    """Works, and stands still now and then, until the input ends; for a line of input looks at all it has."""
    worker, choose = Worker(size, seed), random.Random(seed + 1)
    acts = wrong = 0
    say("ready")
    while True:
        for _ in range(choose.choice((1, 1, 5, 30))):
            wrong += worker.act()
            acts += 1
        if select.select([sys.stdin], [], [], choose.choice((0, 0.002, 0.01, 0.04)))[0]:
            line = sys.stdin.readline()
            say(acts, wrong + worker.wrong())
            if not line:
                return


# What starts the programs and puts them to sleep.


class Failure(Exception):
    pass


class Skipped(Exception):
    pass


class Program:
    """A process of this file. Use as a context: it and its children are ended then."""

    def __init__(self, words, environment):
        self._complaints = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen([sys.executable, __file__, *map(str, words)], env=environment, text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints,
                                         start_new_session=True)
        self.pid = self._process.pid
        self._lines, self._last = queue.Queue(), []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.stdout:
            self._lines.put(line.split())
        self._lines.put(None)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _fail(self, why):
        self._complaints.seek(0)
        text = self._complaints.read().splitlines()[-8:]
        raise Failure(" / ".join([why, *(" ".join(words) for words in self._last[-3:]), *text]))

    def answer(self, seconds):
        """The words of the next line, but for those that begin with #."""
        end = time.monotonic() + seconds
        while True:
            try:
                words = self._lines.get(timeout=max(0, end - time.monotonic()))
            except queue.Empty:
                self._fail(f"no answer in {seconds} s")
            if words is None:
                status = self._process.wait()
                if status == 77:
                    raise Skipped(" ".join(self._last[-1][1:]) if self._last else "")
                self._fail(f"ended with status {status}")
            self._last.append(words)
            if words and words[0] in ("#", "skipped:"):
                continue
            return words

    def go_on(self):
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def end(self, seconds=WORK_S):
        """Ends its input; the words that it says then."""
        self._process.stdin.close()
        return self.answer(seconds)


class Field:
    """Programs under the library, in a group of their own, and the command."""

    def __init__(self, options):
        self._command, self._deep = options.command, ["--deep"] if options.deep else []
        self._folder = tempfile.TemporaryDirectory(prefix="sleepers-")
        self.native = {name: value for name, value in os.environ.items()
                       if not name.startswith("GPURECLAIM_") and name != "LD_PRELOAD"}
        if "GRSIM_SHARED" not in os.environ:
            self.native["GRSIM_SHARED"] = os.path.join(self._folder.name, "gpu")  # of the simulated device
        self.native["GPURECLAIM_REGION_DIR"] = os.path.join(self._folder.name, "region")
        os.mkdir(self.native["GPURECLAIM_REGION_DIR"], 0o700)
        self.preloaded = {**self.native, "LD_PRELOAD": options.shim, "GPURECLAIM_SLEEP": "demand",
                          "GPURECLAIM_SLEEP_HOST": "80%"}

    def command(self, *words):
        return subprocess.run([self._command, *map(str, words)], env=self.native, capture_output=True, text=True,
                              timeout=SLEEP_S + 30)

    def sleep(self, pid, seconds=SLEEP_S):
        """What the command complained of; empty: the process is asleep."""
        done = self.command("sleep", *self._deep, "--timeout", f"{round(1000 * seconds)}ms", pid)
        return "" if done.returncode == 0 else (done.stderr + done.stdout).strip() or f"status {done.returncode}"

    def figures(self, pids):
        """What status tells of these processes, summed up; of times the longest."""
        figures = {}
        status = json.loads(self.command("status", "--json").stdout)
        for gpu in status["gpus"]:
            for member in gpu["processes"]:
                for name, value in member.items() if member["pid"] in pids else ():
                    if name.endswith("_bytes") and value is not None:
                        figures[name[:-6]] = figures.get(name[:-6], 0) + value
                    elif name.endswith("_ns") and value is not None:
                        figures[name] = max(figures.get(name, 0), value)
        return figures


def mib(value):
    return f"{value / MIB:.0f} MiB"


def one_sleep(field, gpu, pids):
    """Puts the processes to sleep; what they had, what left, and what the card and status say."""
    card = gpu.free()
    before = field.figures(pids)
    complaints = " / ".join(filter(None, (field.sleep(pid) for pid in pids)))
    after = field.figures(pids)
    deep = after.get("asleep_deep", 0)
    left = after.get("asleep", 0) + deep
    stayed = 0 if deep else after.get("reserved", 0)
    card_now = gpu.free()
    return {
        "before": before, "after": after, "left": left, "stayed": stayed, "deep": deep, "complaints": complaints,
        "card": None if card is None else card_now - card, "out": after.get("last_sleep_ns", 0) / 1e9,
    }


def tell(kind, sleeps, same):
    least = min(sleeps, key=lambda sleep: sleep["left"])
    left, stayed, after = least["left"], least["stayed"], least["after"]
    # In any program pages stay that are cached, or of which something small is used.
    few = stayed - after.get("cached", 0) <= max((left + stayed) / 32, 8 * MIB)
    answer = "deeply" if least["deep"] else "no" if left == 0 else "yes" if few else "partly"
    why = [f"live {mib(max(0, after.get('live', 0) - left))}"]
    why += [f"{name} {mib(after[name])}" for name in ("cached", "graph", "imported") if after.get(name)]
    parts = [f"{mib(left)} left", f"{mib(stayed)} stayed ({', '.join(why)})", f"driver {mib(after.get('driver', 0))}"]
    if least["card"] is not None:
        parts.append(f"card {least['card']:.0f} MiB")
    times = [" ".join(f"{sleep[name]:.2f}" for sleep in sleeps) for name in ("out", "in", "call")]
    parts.append(f"out {times[0]} s, in {times[1]} s, with work {times[2]} s")
    parts.append("results the same" if same else "RESULTS DIFFER")
    parts += sorted({sleep["complaints"] for sleep in sleeps if sleep["complaints"]})
    say(f"{kind}: {answer}; " + "; ".join(parts))
    return answer


def try_kind(field, kind, size):
    _, known, settings = KINDS[kind]
    gpu = Gpu()
    words = ["--run", kind, "--size", size // MIB]
    # The native one must not run beside what is asleep, as it would look for room there.
    with Program(words, field.native) as native, Program(words, {**field.preloaded, **settings}) as ours:
        wanted = native.answer(SET_UP_S)
        while wanted[0] == "pause":
            native.go_on()
            wanted = native.answer(WORK_S)
        with contextlib.suppress(subprocess.TimeoutExpired):
            native._process.wait(10)
        got, sleeps = ours.answer(SET_UP_S), []
        while got[0] == "pause":
            pids = [ours.pid, *map(int, got[1:])]
            sleeps.append(one_sleep(field, gpu, pids))
            begin = time.monotonic()
            ours.go_on()
            got = ours.answer(WORK_S)
            sleeps[-1]["call"] = time.monotonic() - begin
            sleeps[-1]["in"] = field.figures(pids).get("last_wake_ns", 0) / 1e9
    if wanted[0] != "result" or got[0] != "result" or len(sleeps) != PAUSES:
        raise Failure(f"said {' '.join(got)}, natively {' '.join(wanted)}")
    answer = tell(kind, sleeps, wanted == got)
    if answer == "deeply" and known != "partly":
        known = answer
    if known and answer != known:
        say(f"{kind}: {known} was expected")
    return wanted == got and answer == (known or answer)


def table(options):
    field, passed, skipped = Field(options), 0, 0
    kinds = options.kinds or list(KINDS)
    for kind in kinds:
        begin = time.monotonic()
        try:
            passed += try_kind(field, kind, options.size * MIB)
        except Skipped as why:
            skipped += 1
            say(f"{kind}: skipped: {why}")
        except (Failure, subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
            say(f"{kind}: FAILED: {error}")
        say(f"# {kind}_s {time.monotonic() - begin:.1f}")
    if skipped == len(kinds):
        return 77
    return 0 if passed + skipped == len(kinds) else 1


def cycles(options):
    options.deep = False  # it never pauses for long enough
    field, choose = Field(options), random.Random(options.seed)
    slept = refused = wrong = acts = 0
    outs, ins, longest = [], [], 0
    with Program(["--run", "cycles", "--size", options.size, "--seed", options.seed], field.preloaded) as worker:
        worker.answer(SET_UP_S)
        for i in range(options.count):
            time.sleep(choose.choice((0, 0.003, 0.02, 0.08)))
            complaint = field.sleep(worker.pid, 2)
            slept += not complaint
            refused += bool(complaint)
            if i % 50 == 49:
                begin = time.monotonic()
                worker.go_on()
                acts, wrong = map(int, worker.answer(WORK_S))
                longest = max(longest, time.monotonic() - begin)
                figures = field.figures([worker.pid])
                outs.append(figures.get("last_sleep_ns", 0) / 1e9)
                ins.append(figures.get("last_wake_ns", 0) / 1e9)
                if wrong:
                    break
        acts, wrong = map(int, worker.end())
    say("# cycles", slept)
    say("# refused", refused)
    say("# acts", acts)
    say("# changed", wrong)
    say("# longest_check_s", f"{longest:.2f}")
    for name, times in ("out_s", outs), ("in_s", ins):
        if times:
            say(f"# {name}", f"{sorted(times)[len(times) // 2]:.3f}")
    return 1 if wrong or slept < options.count // 2 else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--command")
    parser.add_argument("--library", dest="shim")
    parser.add_argument("--size", type=int, help="MiB of each program, default: 3072; of cycles 1024")
    parser.add_argument("--deep", action="store_true")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--list", action="store_true", help="only the names of the kinds")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    parser.add_argument("--import", nargs=2, dest="handle", help=argparse.SUPPRESS)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    options = parser.parse_args()
    mode = options.run or (options.kinds or [""])[0]
    options.size = options.size or (1024 if mode == "cycles" else 3072)
    unknown = set(options.kinds) - set(KINDS) - {"cycles"}
    if unknown or ("cycles" in options.kinds and len(options.kinds) > 1):
        parser.error(f"no such kind, or cycles beside others: {' '.join(unknown) or 'cycles'}")
    if options.list:
        say(*KINDS)
        return 0
    if options.handle:
        read_import(options.handle[0], int(options.handle[1]))
        return 0
    if options.run:
        if options.run == "cycles":
            run_cycles(options.size * MIB, options.seed)
        else:
            run_program(options.run, options.size * MIB)
        return 0
    if not options.command or not options.shim:
        parser.error("needs --command and --library")
    try:
        return (cycles if mode == "cycles" else table)(options)
    except (Failure, Skipped) as error:
        say(error)
        return 77 if isinstance(error, Skipped) else 1


if __name__ == "__main__":
    sys.exit(main())
