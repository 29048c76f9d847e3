"""Installs the replacement in a process that was told so by its ``PYTHONPATH``.

Python runs this when it starts. Importing torch here would cost every process a second, those too
that never need it; so this only waits for ``import torch``, and installs when that has returned.

Other interpreters than the one that Weft is installed in may find this file as well: it needs
nothing but Python 3.7.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing's own would have that module imported by every process
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any


class InstallAfterTorch:
    """A finder that finds nothing new, and installs the replacement when torch has been imported.

    Weft imports torch too, and installing imports most of Weft. So where torch is imported by a
    module of Weft's, that one has to be complete as well: imports of both are watched, and the last
    to end installs. Imports of several threads at once are one such group.
    """

    def __init__(self) -> None:
        self._executing: list[str] = []  # appended to and removed from: each is atomic
        self._has_torch = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Returns what the other finders find; watches it where it is torch's or Weft's."""
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
            vars(loader).pop("exec_module", None)  # the loader is kept, as the module's
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
    """Installs the replacement; says so where Weft is not to be found."""
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
    """Runs the ``sitecustomize.py`` that this one hides, as if this one were not there.

    Raises:
        ImportError: There is none: Python then goes on as it always does.
    """
    folder = os.path.dirname(__file__)
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    del sys.modules["sitecustomize"]
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401


if __name__ == "sitecustomize":
    arm()
    give_way()
