"""Replaces ``torch.distributed.rpc`` and related modules by Weft's, and restores PyTorch's.

A module that is already loaded is replaced in ``sys.modules`` and in its parent package; a module
that is not is redirected when it is imported. PyTorch's own modules that took a name from a
replaced module at import are given Weft's.

TorchScript's compiler, which knows PyTorch's references as a type of its own, is left alone.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from types import ModuleType

from torchweft.compat import children, stale
from torchweft.compat.redirecting import MODULES, Redirect
from torchweft.errors import AlreadyInitialized

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
        holders = stale.describe_holders(sys.modules[n] for n in MODULES if n in sys.modules)
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
    from torchweft.agent import current
    from torchweft.autograd.leaf_hooks import enable_leaf_hooks
    from torchweft.autograd.zeros import enable_zeros
    from torchweft.compat import waiting

    with _lock:
        if not is_installed():
            return
        if current.is_set():
            raise AlreadyInitialized(
                f"torchweft.compat cannot be uninstalled while this process is worker "
                f"{current.current().info.name!r}: call rpc.shutdown() first"
            )
        waiting.uninstall()
        enable_leaf_hooks(False)
        enable_zeros(False)
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
        children.enable()
    _reaches_children = in_children
    for name, ours in MODULES.items():
        if name in sys.modules:
            _originals[name] = sys.modules[name]
            _place(name, sys.modules[ours])
    sys.meta_path.insert(0, _redirect)


def _put_back() -> None:
    global _reaches_children
    if _reaches_children:
        children.disable()
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
