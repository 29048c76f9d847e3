"""Internals of PyTorch's RPC, on Weft, that PyTorch's own tests use and no program does.

``install`` adds them to ``torchweft.compat``: the back-end that injects faults, the messages of
autograd contexts as nodes of the graph, remote modules in TorchScript, and an event of the legacy
profiler for a type query.
"""

from __future__ import annotations

import torchweft.compat
from tests.conformance.shims import autograd, profiling
from torchweft.compat import installing

_MODULES = {
    "torch.distributed.rpc._testing": f"{__name__}.faulty_backend",
    "torch.distributed.nn.api.remote_module": f"{__name__}.remote_module",
}


def install() -> None:
    """Installs Weft in place of PyTorch's RPC, with everything that PyTorch's tests use.

    This holds for the rest of this process and its forked children.
    """
    installing.MODULES.update(_MODULES)
    torchweft.compat.install(in_children=False)
    autograd.install()
    profiling.install()
