"""Makes the caches of PyTorch, CuPy and JAX reclaimable in a program that `gpureclaim run` starts.

`gpureclaim run` puts this folder first in PYTHONPATH, so each Python of the program runs this file as it starts. What
such a framework caches is registered once the program has imported the framework. The program sees nothing of it: no
framework is imported here, the folder leaves sys.path again, and the sitecustomize that this one hides runs as well.
`gpureclaim run --no-python` leaves it out.
"""

import sys


def _register(name):
    import importlib.util
    import os

    # Not by its name: the program may have a gpureclaim of its own.
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_gpureclaim_run.py")
    spec = importlib.util.spec_from_file_location("_gpureclaim_run", path)
    gpureclaim = importlib.util.module_from_spec(spec)
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # as _remove_cached
    try:
        spec.loader.exec_module(gpureclaim)
    finally:
        sys.dont_write_bytecode = before
    if gpureclaim.available():
        gpureclaim.register_framework(name)


class _Finder(object):
    """Finds what the others find, and has _register called when the import of a framework has ended."""

    def __init__(self, names):
        self.names = set(names)
        self.asking = set()  # (thread, name): another finder may ask all others as well, and so this one again

    def find_spec(self, name, path=None, target=None):
        if name not in self.names:
            return None
        import _thread

        asked = _thread.get_ident(), name
        if asked in self.asking:
            return None
        self.asking.add(asked)
        try:
            return self._find(name, path, target)
        finally:
            self.asking.discard(asked)

    def _find(self, name, path, target):
        for finder in sys.meta_path:
            if finder is self:
                continue
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find else None
            if spec is not None:
                self._watch(spec.loader)
                return spec
            # Up to Python 3.11 a finder may be of the older kind. Python asks it again for what it finds.
            find_module = None if find or sys.version_info >= (3, 12) else getattr(finder, "find_module", None)
            if find_module and find_module(name, path) is not None:
                return None
        return None

    def _watch(self, loader):
        execute = getattr(loader, "exec_module", None)
        # One of a zip file is the loader of all in it, and may be watched already.
        if execute is None or isinstance(loader, type) or getattr(execute, "watcher", None) is self:
            return

        def exec_module(module):
            execute(module)
            name = module.__name__
            if name not in self.names:
                return
            self.names.discard(name)
            if vars(loader).get("exec_module") is exec_module:
                del loader.exec_module
                if before is not None:
                    loader.exec_module = before
            try:
                _register(name)
            except Exception:  # it was to help the program, which runs without it as well
                pass

        exec_module.watcher = self
        before = getattr(loader, "__dict__", {}).get("exec_module")
        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass


def _run_hidden():
    """Runs the sitecustomize that the program would have had, in place of this one."""
    import importlib.machinery
    import importlib.util
    import os

    def is_ours(entry):
        try:
            return os.path.realpath(entry) == folder  # however it is spelled
        except OSError:  # a relative one, and the working directory is gone
            return False

    folder = os.path.realpath(os.path.dirname(__file__))
    sys.path[:] = [entry for entry in sys.path if not is_ours(entry)]
    spec = importlib.machinery.PathFinder.find_spec(__name__)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


def _remove_cached():
    """Removes what Python has just written beside this file, if it could: an uninstall would leave that there."""
    import os

    try:
        os.remove(__spec__.cached)
        os.rmdir(os.path.dirname(__spec__.cached))
    except (AttributeError, OSError, TypeError):
        pass


if sys.version_info >= (3, 6):
    _remove_cached()
    sys.meta_path.insert(0, _Finder(("torch", "cupy", "jax")))
    _run_hidden()
