"""Installs the replacement in a process whose ``PYTHONPATH`` says so.

Python runs this file at startup. Importing torch here would cost every process a second, even if
it never needs torch. So this only waits for ``import torch``, and installs when that has returned.

Interpreters other than the one that Weft is installed in may find this file as well: it needs
only Python 3.7.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # for typing's own, every process would import typing
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any


class InstallAfterTorch:
    """A finder that finds no new modules, and installs the replacement after ``import torch``.

    Weft imports torch too, and installing imports most of Weft. So if a module of Weft's imports
    torch, that module has to be complete as well. Imports of both are watched, and the last to end
    installs. Concurrent imports of several threads form one such group.
    """

    def __init__(self) -> None:
        self._executing: list[str] = []  # append and remove are atomic
        self._has_torch = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Returns the other finders' spec for torch or a Weft module, and watches its import."""
        if fullname != "torch" and not fullname.startswith("torchweft."):
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else []
        for finder in others:
            spec = (
                finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            )
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    self._watch(spec.loader)
                return spec
        return None

    def _watch(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            name = module.__name__
            vars(loader).pop("exec_module", None)  # the module keeps its loader
            self._executing.append(name)
            try:
                execute(module)
                self._has_torch = self._has_torch or name == "torch"
            finally:
                self._executing.remove(name)
                if self._has_torch and not self._executing:
                    self._install()

        loader.exec_module = exec_module

    def _install(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            install()


def install() -> None:
    """Installs the replacement; warns if Weft cannot be found."""
    try:
        import torchweft.compat
    except ModuleNotFoundError as error:
        if error.name not in ("torchweft", "torchweft.compat"):
            raise
        import warnings

        warnings.warn(
            "the process that started this one has Weft in the place of torch.distributed.rpc, but "
            f"{sys.executable} cannot import torchweft: here torch.distributed.rpc is PyTorch's",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    torchweft.compat.install()


def arm() -> None:
    """Installs the replacement as soon as torch has been imported, which may be now."""
    if "torch" in sys.modules:
        install()
    else:
        sys.meta_path.insert(0, InstallAfterTorch())


def give_way() -> None:
    """Runs the ``sitecustomize.py`` that this file hides, as if this file did not exist.

    Raises:
        ImportError: No file is hidden: Python then continues as usual.
    """
    folder = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    del sys.modules["sitecustomize"]
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401


if __name__ == "sitecustomize":
    arm()
    give_way()
