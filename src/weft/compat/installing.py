"""Puts Weft in the place of ``torch.distributed.rpc`` and its kin, and PyTorch's back.

A module that is loaded already is replaced in ``sys.modules`` and in its parent package; one that
is not gets loaded from here when somebody imports it. Modules of PyTorch's own that took a name
from a replaced module when they were imported are given Weft's.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from weft.compat import children

MODULES = {
    "torch.distributed.rpc": "weft.compat.rpc",
    "torch.distributed.rpc._testing": "weft.compat.rpc._testing",
    "torch.distributed.rpc._testing.faulty_agent_backend_registry": (
        "weft.compat.rpc._testing.faulty_agent_backend_registry"
    ),
    "torch.distributed.rpc._utils": "weft.compat.rpc._utils",
    "torch.distributed.rpc.api": "weft.compat.rpc.api",
    "torch.distributed.rpc.backend_registry": "weft.compat.rpc.backend_registry",
    "torch.distributed.rpc.constants": "weft.compat.rpc.constants",
    "torch.distributed.rpc.functions": "weft.compat.rpc.functions",
    "torch.distributed.rpc.internal": "weft.compat.rpc.internal",
    "torch.distributed.rpc.options": "weft.compat.rpc.options",
    "torch.distributed.rpc.rref_proxy": "weft.compat.rpc.rref_proxy",
    "torch.distributed.rpc.server_process_global_profiler": (
        "weft.compat.rpc.server_process_global_profiler"
    ),
    "torch.distributed.autograd": "weft.compat.autograd",
    "torch.distributed.optim.optimizer": "weft.compat.optimizer",
    "torch.distributed.nn.api.remote_module": "weft.compat.remote_module",
}
"""PyTorch's modules, and what stands in their place."""

NAMES = (
    ("torch.distributed.optim", "DistributedOptimizer", "torch.distributed.optim.optimizer"),
    ("torch.distributed.nn", "RemoteModule", "torch.distributed.nn.api.remote_module"),
    ("torch.nn.parallel.distributed", "RRef", "torch.distributed.rpc"),
    ("torch.distributed._shard.sharded_tensor.api", "rpc", ""),
)
"""Modules that keep a name of a replaced one: the module, the name, and whose name it is."""


class _Redirect(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads Weft's module when one of ``MODULES`` is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in MODULES:
            return None
        return importlib.util.spec_from_loader(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return importlib.import_module(MODULES[spec.name])

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the module has been executed under its own name."""


_redirect = _Redirect()
_originals: dict[str, ModuleType] = {}


def is_installed() -> bool:
    """Whether ``torch.distributed.rpc`` is Weft in this process."""
    return _redirect in sys.meta_path


def install(*, in_children: bool = True) -> None:
    """Makes ``torch.distributed.rpc`` and what belongs to it Weft. Does nothing the second time.

    Call it before the program imports ``torch.distributed.rpc``: a name that a module of the
    program has taken from there already stays what it was.

    Args:
        in_children: Whether Python processes that this one starts do the same, through their
            environment. Forked ones always do.
    """
    if is_installed():
        return
    import torch.distributed  # Loads torch.distributed.rpc as well.

    for name in MODULES:
        module = sys.modules.get(name)
        if module is not None:
            _originals[name] = module
            _place(name, importlib.import_module(MODULES[name]))
    sys.meta_path.insert(0, _redirect)
    _point_names(_replacement)
    if in_children:
        children.enable()


def uninstall() -> None:
    """Makes ``torch.distributed.rpc`` and what belongs to it PyTorch's again."""
    if not is_installed():
        return
    children.disable()
    sys.meta_path.remove(_redirect)
    for name in MODULES:
        if name in _originals:
            _place(name, _originals.pop(name))
        else:
            sys.modules.pop(name, None)
    _point_names(importlib.import_module)


def _replacement(name: str) -> ModuleType:
    return importlib.import_module(MODULES[name])


def _place(name: str, module: ModuleType) -> None:
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    setattr(sys.modules[parent], child, module)


def _point_names(find: Any) -> None:
    for holder_name, name, source in NAMES:
        holder = sys.modules.get(holder_name)
        if holder is None or not hasattr(holder, name):
            continue
        setattr(
            holder, name, getattr(find(source), name) if source else find("torch.distributed.rpc")
        )
