"""Modules that contain remote modules: what of them is in this process."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torchweft.nn.remote_module import RemoteModule


def local_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yields a module and its submodules, each once, without remote modules."""
    seen: set[int] = set()
    todo = [module]
    while todo:
        each = todo.pop()
        if id(each) not in seen and not isinstance(each, RemoteModule):
            seen.add(id(each))
            yield each
            todo += reversed(list(each.children()))


def local_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a module that are in this process, each once.

    ``parameters()`` of a module that contains a ``RemoteModule`` raises, since it would leave some
    out. This returns those of the local parts, in the order in which ``parameters()`` would.

    Args:
        module: Any module.

    Example::

        references = [
            *model.encoder.remote_parameters(),
            *map(torchweft.RRef, torchweft.nn.local_parameters(model)),
        ]
        optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.1)
    """
    parameters: dict[int, nn.Parameter] = {}
    for each in local_modules(module):
        for parameter in each.parameters(recurse=False):
            parameters.setdefault(id(parameter), parameter)
    return list(parameters.values())
