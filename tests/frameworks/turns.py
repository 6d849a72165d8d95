"""Steps that are timed by tens, each ten when another process says so: scripts/bench lets programs work in turns."""

import ctypes
import sys
import time


def add_options(parser):
    parser.add_argument("--turns", action="store_true",
                        help="wait for a line of input before each ten steps, and time each ten")
    parser.add_argument("--times", metavar="LIBRARY",
                        help="with --turns: tell the time in PyTorch's allocator, too (torch_times.c)")


class Turns:
    """To be made before the first ten steps; ends the program where LIBRARY cannot be used."""

    def __init__(self, synchronize, library=None):
        self._synchronize = synchronize
        self._library = ctypes.CDLL(library) if library else None
        if library:
            self._library.torch_times_begin.restype = ctypes.c_char_p
            why = self._library.torch_times_begin()
            if why:
                sys.exit(f"--times: {why.decode()}")

    def _in_allocator(self):
        """Seconds in PyTorch's allocator so far."""
        times = (ctypes.c_uint64 * 5)()
        if self._library:
            self._library.torch_times_read(times)
            if times[4]:
                sys.exit(f"--times: {times[4]} allocations are not as expected")
        return (times[1] + times[3]) / 1e9

    def take(self, step, count):
        """COUNT steps, ten for each line of input; prints what each ten took. Ends early with the input."""
        for _ in range(count // 10):
            print("ready", flush=True)
            if not sys.stdin.readline():
                return
            begin, before = time.perf_counter(), self._in_allocator()
            for _ in range(10):
                step()
            self._synchronize()
            print(f"turn {time.perf_counter() - begin:.6f} {self._in_allocator() - before:.6f}", flush=True)
