"""Lists the PyTorch modules that Weft replaces, and redirects their imports to Weft's."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

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
