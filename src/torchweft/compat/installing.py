"""Replaces ``torch.distributed.rpc`` and related modules by Weft's, and restores PyTorch's.

A module that is already loaded is replaced in ``sys.modules`` and in its parent package; a module
that is not is redirected when it is imported. PyTorch's own modules that took a name from a
replaced module at import are given Weft's.

TorchScript's compiler, which knows PyTorch's references as a type of its own, is left alone.

The Python processes that this one starts install the replacement too. However a process is
started, it gets an environment. A folder put first on ``PYTHONPATH`` holds a ``sitecustomize.py``,
which Python runs at startup; see that file.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from torchweft.errors import AlreadyInitialized, ConfigurationError

# The modules that are replaced, and the imports of those not loaded yet

MODULES = {
    "torch._C._distributed_rpc": "torchweft.compat.rpc",
    "torch._C._distributed_autograd": "torchweft.compat.autograd",
    "torch.distributed.rpc": "torchweft.compat.rpc",
    "torch.distributed.rpc.api": "torchweft.compat.rpc.api",
    "torch.distributed.rpc.backend_registry": "torchweft.compat.rpc.backend_registry",
    "torch.distributed.rpc.constants": "torchweft.compat.rpc.constants",
    "torch.distributed.rpc.functions": "torchweft.compat.rpc.functions",
    "torch.distributed.rpc.internal": "torchweft.compat.rpc.internal",
    "torch.distributed.rpc.options": "torchweft.compat.rpc.options",
    "torch.distributed.rpc.rref_proxy": "torchweft.compat.rpc.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler": (
        "torchweft.compat.rpc.server_process_global_profiler"
    ),
    "torch.distributed.rpc._utils": "torchweft.compat.rpc._utils",
    "torch.distributed.autograd": "torchweft.compat.autograd",
    "torch.distributed.optim.optimizer": "torchweft.compat.optimizer",
    "torch.distributed.nn.api.remote_module": "torchweft.compat.remote_module",
}
"""PyTorch's modules and their replacements."""

ROOTS = ("torch.distributed.rpc.", "torch.distributed.autograd.")
"""Prefixes of Weft's modules: a folder of Weft's must not be searched under PyTorch's name."""


class Redirect(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Weft's module when one of ``MODULES`` is imported.

    The import returns the same module object that ``torchweft.compat`` has, not a second copy of
    the file. The module keeps its own name and spec, so its functions are pickled by that name.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns a spec for a module that Weft replaces, and None for any other."""
        if fullname in MODULES:
            return importlib.util.spec_from_loader(fullname, self)
        if fullname.startswith(ROOTS):
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: torchweft.compat, which stands in for its package "
                "here, has none",
                name=fullname,
            )
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Puts Weft's module into ``sys.modules``, from which the import returns it."""
        sys.modules[module.__name__] = importlib.import_module(MODULES[module.__name__])


# The replacement

RPC = "torch.distributed.rpc"

NAMES = (
    ("torch.nn.parallel.distributed", RPC, "RRef"),  # looks for tensors in what a module returns
    ("torch.distributed.optim", "torch.distributed.optim.optimizer", "DistributedOptimizer"),
    ("torch.distributed.nn", "torch.distributed.nn.api.remote_module", "RemoteModule"),
    ("torch.distributed._shard.sharded_tensor.api", "torch.distributed", "rpc"),
    ("torch.distributed._shard.sharded_tensor.utils", "torch.distributed", "rpc"),
)
"""PyTorch modules that hold a replaced name: the holder, the name's module, and the name."""

# A process has one sys.modules, so the replacement is process-wide state as well.
_lock = threading.Lock()
_redirect = Redirect()
_originals: dict[str, ModuleType] = {}
_reaches_children = False


def is_installed() -> bool:
    """Whether ``torch.distributed.rpc`` is Weft in this process."""
    return _redirect in sys.meta_path


def install(*, in_children: bool = True) -> None:
    """Replaces ``torch.distributed.rpc`` by Weft in this process.

    Also replaces ``torch.distributed.autograd``, ``torch.distributed.optim.DistributedOptimizer``
    and ``torch.distributed.nn.RemoteModule``. Call it before the program imports any of them:
    names that a module has already taken stay PyTorch's, and a warning lists such modules. Does
    nothing if Weft is already installed. May be called in any thread.

    Args:
        in_children: Whether Python processes that this one starts from now on do the same, however
            they are started. ``PYTHONPATH`` tells them, so this excludes processes started with an
            environment without it, or by ``python -I``, ``-E`` or ``-S``. A forked process is a
            copy, so there Weft is always installed.

    Raises:
        AlreadyInitialized: This process is currently a worker of PyTorch's RPC.
    """
    if is_installed():
        return
    # Not at the top: torch is imported when it is needed, see torchweft.compat.bootstrap. Not under
    # the lock either: an importing thread may wait for a thread that installs.
    import torch.distributed  # noqa: F401 (which imports torch.distributed.rpc as well)

    from torchweft.compat import waiting

    for name in MODULES:
        if name in sys.modules:
            importlib.import_module(MODULES[name])
    with _lock:
        if is_installed():
            return
        _check_stock_is_idle()
        holders = describe_holders(sys.modules[n] for n in MODULES if n in sys.modules)
        _replace(in_children)
        waiting.install()
    _point_names()
    if holders:
        warnings.warn(
            f"torchweft.compat.install() came after modules had taken names from {RPC} and its "
            f"kin; they still mean PyTorch's: {holders}. Call it before those modules are "
            "imported, or start the program with python -m torchweft.compat",
            RuntimeWarning,
            stacklevel=2,
        )


def uninstall() -> None:
    """Restores PyTorch's ``torch.distributed.rpc`` and the other names that ``install`` replaced.

    Does nothing if Weft is not installed. Processes started from now on are no longer told to
    install it, if they were.

    Raises:
        AlreadyInitialized: This process is currently a worker of Weft.
    """
    if not is_installed():
        return
    from torchweft.compat import waiting
    from torchweft.extending import is_worker
    from torchweft.rpc import get_worker_info

    with _lock:
        if not is_installed():
            return
        if is_worker():
            raise AlreadyInitialized(
                f"torchweft.compat cannot be uninstalled while this process is worker "
                f"{get_worker_info().name!r}: call rpc.shutdown() first"
            )
        waiting.uninstall()
        _put_back()
    # PyTorch modules in NAMES that were first loaded meanwhile need PyTorch's names as well.
    _point_names()


def _check_stock_is_idle() -> None:
    # A torch that was built without RPC has the module, but not the function.
    is_worker = getattr(sys.modules.get(RPC), "_is_current_rpc_agent_set", None)
    if is_worker is not None and is_worker():
        raise AlreadyInitialized(
            f"this process is a worker of {RPC} at present, so Weft cannot take its place: call "
            "torchweft.compat.install() before init_rpc(), or after shutdown()"
        )


def _replace(in_children: bool) -> None:
    global _reaches_children
    if in_children:
        enable_in_children()
    _reaches_children = in_children
    for name, ours in MODULES.items():
        if name in sys.modules:
            _originals[name] = sys.modules[name]
            _place(name, sys.modules[ours])
    sys.meta_path.insert(0, _redirect)


def _put_back() -> None:
    global _reaches_children
    if _reaches_children:
        disable_in_children()
    _reaches_children = False
    sys.meta_path.remove(_redirect)
    for name in MODULES:
        if name in _originals:
            _place(name, _originals.pop(name))
        elif sys.modules.pop(name, None) is not None:
            _forget(name)


def _place(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent not in MODULES:  # the replaced parent already has its submodules
        setattr(sys.modules[parent], child, module)


def _forget(name: str) -> None:
    parent, _, child = name.rpartition(".")
    if parent not in MODULES:
        vars(sys.modules[parent]).pop(child, None)


def _point_names() -> None:
    for holder_name, source, name in NAMES:
        holder = sys.modules.get(holder_name)
        if holder is not None and hasattr(holder, name):
            setattr(holder, name, getattr(importlib.import_module(source), name))


# Processes that this one starts

VARIABLE = "PYTHONPATH"

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")
"""Where the ``sitecustomize.py`` is."""


def enable_in_children() -> None:
    """Changes the environment, unless this process or its parent has done so already.

    Raises:
        ConfigurationError: The folder's name cannot be in ``PYTHONPATH``.
    """
    if os.pathsep in FOLDER:
        raise ConfigurationError(
            f"{FOLDER} cannot be in {VARIABLE}, where {os.pathsep!r} stands between two folders: "
            "use torchweft.compat.install(in_children=False), and call it in every process"
        )
    before = os.environ.get(VARIABLE)
    if FOLDER not in _folders(before):
        # An empty entry would mean the current folder.
        os.environ[VARIABLE] = os.pathsep.join([FOLDER, before]) if before else FOLDER


def disable_in_children() -> None:
    """Restores the environment; changes that other code has made meanwhile stay."""
    now = os.environ.get(VARIABLE)
    others = [entry for entry in _folders(now) if entry != FOLDER]
    if others == _folders(now):
        return
    if others:
        os.environ[VARIABLE] = os.pathsep.join(others)
    else:
        del os.environ[VARIABLE]


def _folders(value: str | None) -> list[str]:
    return (value or "").split(os.pathsep)


# Modules of the program that took names from PyTorch's modules too early

_OWN = ("torch", "torchweft")
"""Packages whose modules do not belong to the program, and are not searched."""

_TESTS = "torch.testing."
"""Prefix of modules in ``_OWN`` that count as programs: PyTorch's tests of RPC are there."""

_GENERATED = "_remote_module_"
"""Prefix of the names of the modules that PyTorch generates for its remote modules."""

_EXTENSIONS = ("torch._C._distributed_rpc", "torch._C._distributed_autograd")
"""Extension modules that define many names of the replaced modules."""

MOST_NAMED = 8
"""The most modules that a message names."""


def describe_holders(replaced: Iterable[ModuleType]) -> str:
    """Says which modules of the program hold a replaced module, or an object that it defines.

    Makes one pass over the globals of all modules except the standard library's and PyTorch's:
    about a millisecond. Names held in other places, in a class or a closure, are not found.

    Returns:
        For instance ``"__main__ (rpc), trainer (RRef, rpc_sync)"``; empty if there are none.
    """
    stock = {id(thing) for module in replaced for thing in _defined_by(module)}
    found = [
        f"{name} ({', '.join(held)})"
        for name, content in _program_modules()
        if (held := sorted(key for key, value in content.items() if id(value) in stock))
    ]
    more = len(found) - MOST_NAMED
    return ", ".join(found[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _defined_by(module: ModuleType) -> Iterator[Any]:
    yield module
    homes = (module.__name__, *_EXTENSIONS)
    for value in vars(module).values():
        # An object that the module merely imports, such as `threading`, does not count: any module
        # may hold it.
        if callable(value) and getattr(value, "__module__", None) in homes:
            yield value


def _program_modules() -> Iterator[tuple[str, Mapping[str, Any]]]:
    seen = set()
    for name, module in list(sys.modules.items()):
        if id(module) in seen:  # multiprocessing gives __main__ a second name
            continue
        seen.add(id(module))
        package = name.partition(".")[0]
        if package in sys.stdlib_module_names and name != "__main__":
            continue
        if (package in _OWN and not name.startswith(_TESTS)) or name.startswith(_GENERATED):
            continue
        # Check the type itself: cffi libraries claim to be modules, but have no dictionary.
        if issubclass(type(module), ModuleType):
            # Not by attribute access, which would load a lazily imported module.
            yield name, dict(object.__getattribute__(module, "__dict__"))
