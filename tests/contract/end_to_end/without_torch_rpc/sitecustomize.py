"""Blocks PyTorch's RPC in every Python process that has this folder on its path.

Right after ``import torch``, before the importing program continues, the modules can no longer be
imported or reached from their packages. Calls through modules and classes held earlier raise.
Each process that blocks RPC, and each such use, becomes a line of the file that
``WEFT_TEST_RECORD`` names.
"""

from __future__ import annotations

import os
import sys
import traceback
from types import ModuleType
from typing import Any

PACKAGES = (
    "torch.distributed.rpc",
    "torch.distributed.autograd",
    "torch.distributed.optim",
    "torch.distributed.nn",
    "torch._C._distributed_rpc",
    "torch._C._distributed_autograd",
)


def record(*words: object) -> None:
    with open(os.environ["WEFT_TEST_RECORD"], "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


class BlockAfterTorch:
    """A finder that finds no modules itself: it blocks RPC when torch has been imported."""

    is_blocking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if self.is_blocking and is_blocked(name):
            note("import", name)
            raise ModuleNotFoundError(f"import of {name} is blocked", name=name)
        if self.is_blocking or name != "torch":
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (f.find_spec(name, path, target) for f in others)))
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.is_blocking = True
            block()

        spec.loader.exec_module = exec_module
        return spec


def is_blocked(name: str) -> bool:
    return f"{name}.".startswith(tuple(f"{package}." for package in PACKAGES))


def note(how: str, name: str) -> bool:
    """Records a use, unless PyTorch itself is the user; returns whether it recorded one."""
    frames = [frame for frame, _ in traceback.walk_stack(None)]
    names = [frame.f_globals.get("__name__", "") for frame in frames]
    user = next(n for n in names if n != __name__ and not n.startswith("importlib"))
    if user.startswith("torch."):
        return False
    record("touched", how, name, user)
    return True


class Placeholder(ModuleType):
    """A module that can be imported, but not used.

    PyTorch's own modules get one if they take a blocked module for later use.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # the import machinery asks for optional attributes
        record("touched", "placeholder", f"{self.__name__}.{name}")
        raise RuntimeError(f"{self.__name__}.{name} was used")


def block() -> None:
    loaded = [name for name in sys.modules if is_blocked(name)]
    for module in [sys.modules.pop(name) for name in loaded]:
        trap(module)
    for package in PACKAGES:
        parent, _, child = package.rpartition(".")
        vars(sys.modules[parent]).pop(child, None)
        if parent == "torch._C":  # not a package, so the finder is not asked
            sys.modules[package] = Placeholder(package)
    for parent in {package.rpartition(".")[0] for package in PACKAGES}:
        hide(sys.modules[parent])
    record("blocked", os.getpid(), len(loaded))


def hide(parent: ModuleType) -> None:
    """Records each use of a blocked module as an attribute of its package."""
    assert "__getattr__" not in vars(parent)

    def missing(name: str) -> Any:
        whole = f"{parent.__name__}.{name}"
        if is_blocked(whole) and not note("attribute", whole):
            return Placeholder(whole)
        raise AttributeError(f"module {parent.__name__!r} has no attribute {name!r}")

    vars(parent)["__getattr__"] = missing


def trap(module: ModuleType) -> None:
    """Makes all functions of a module, and all methods of its classes, record and raise."""
    for name, value in list(vars(module).items()):
        home = getattr(value, "__module__", None)
        if isinstance(value, type) and home and is_blocked(home):
            for attribute, method in list(vars(value).items()):
                if callable(method) and attribute not in ("__new__", "__class__", "__dict__"):
                    replace(value, attribute)
        elif callable(value) and home and is_blocked(home):
            replace(module, name)


def replace(holder: Any, name: str) -> None:
    def touched(*args: Any, **kwargs: Any) -> Any:
        record("touched", "call", f"{holder.__name__}.{name}")
        raise RuntimeError(f"PyTorch's {holder.__name__}.{name} was called")

    setattr(holder, name, touched)


if "WEFT_TEST_RECORD" in os.environ:
    sys.meta_path.insert(0, BlockAfterTorch())
