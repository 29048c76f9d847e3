"""Modules that look up rows on servers in place of embeddings, and tables that stay copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from torchweft.embedding import Jagged
from torchweft.errors import ConfigurationError
from torchweft.hybrid.finding import Found, ids_of
from torchweft.hybrid.passes import Passes
from torchweft.hybrid.reductions import Reductions

_HOOKS: Final = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
"""Where ``nn.Module`` keeps the hooks of its calls."""


class RemoteTable(nn.Module):
    """Takes the place of an ``nn.Embedding`` or ``nn.EmbeddingBag`` whose rows are on servers.

    Its call has the arguments of the module that it replaces, and it has the settings of that
    module as attributes, such as ``embedding_dim``. It has no parameters. An error in the ids is
    that of ``torchweft.embedding.Tables.forward``.

    Args:
        name: Name of the table.
        table: The module that it replaces.
    """

    def __init__(self, name: str, table: nn.Embedding | nn.EmbeddingBag) -> None:
        super().__init__()
        self.name = name
        for setting in table.__constants__:
            setattr(self, setting, getattr(table, setting))
        self.shape = tuple(table.weight.shape)
        self.includes_last = bool(getattr(table, "include_last_offset", False))
        self._passes: Passes | None = None
        self.train(table.training)
        # What the program has hung on the module stays: hooks see the same calls.
        for hooks in _HOOKS:
            setattr(self, hooks, getattr(table, hooks))

    def connect(self, passes: Passes) -> None:
        """Sets the passes of the model, which look the table up."""
        self._passes = passes

    @property
    def weft_saved_by(self) -> str:
        """What a ``state_dict`` lacks, and how that is saved; for ``torchweft.checkpoint``."""
        return "" if self._passes is None else self._passes.saved_by

    def requires_grad_(self, requires_grad: bool = True) -> RemoteTable:
        """Refuses to freeze the rows, which are no parameters.

        Raises:
            ConfigurationError: ``requires_grad`` is False.
        """
        if not requires_grad:
            raise ConfigurationError(
                f"the rows of {self.name!r} are on servers, and each lookup with gradients trains "
                "them; to leave them as they are, look them up under torch.no_grad()"
            )
        return self

    def forward(
        self,
        input: Any,  # the name that nn.EmbeddingBag has for it
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Looks up ids; see ``nn.Embedding`` and ``nn.EmbeddingBag``. Blocks."""
        assert self._passes is not None
        given = Jagged(input, offsets, per_sample_weights, self.includes_last)
        return self._passes.look_up(self.name, given)

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"the weight of {self.name!r} is on servers, and the model uses it by itself; keep "
                "the table with the trainers: places={...: Copies()}"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """Returns the size, for the text of the model."""
        rows, dim = self.shape
        return f"{self.name!r}, {rows}, {dim}, on servers"


class Copied:
    """A table that each trainer has, with dense gradients; knows which rows were used.

    Args:
        found: The table; its gradients become dense.
    """

    def __init__(self, found: Found) -> None:
        self.name = found.name
        self.parameter = cast("nn.Parameter", found.table.weight)
        self.used = torch.zeros(len(self.parameter), dtype=torch.bool, device="cpu")
        """The rows that have had a gradient of this trainer since the last step."""
        found.table.sparse = False
        found.table.register_forward_hook(self._watch, with_kwargs=True)

    def _watch(self, table: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        if output.requires_grad:
            ids = ids_of(table, args, kwargs)
            output.register_hook(lambda _: self._note(ids))  # type: ignore[no-untyped-call]

    def _note(self, ids: Tensor) -> None:
        self.used[ids.cpu()] = True


def replace_tables(module: nn.Module, tables: list[Found]) -> list[RemoteTable]:
    """Puts remote tables in the places of modules, in each place where a module occurs."""
    remote = {id(each.table): RemoteTable(each.name, each.table) for each in tables}
    for _, parent in list(module.named_modules()):
        for name, child in parent._modules.items():
            if id(child) in remote:
                parent._modules[name] = remote[id(child)]
    return list(remote.values())


def replicate(
    module: nn.Module, names: list[str], reductions: Reductions, **options: Any
) -> tuple[nn.Module, list[Any]]:
    """Puts modules under ``DistributedDataParallel``.

    Args:
        module: The model.
        names: The paths of those of its modules that are replicated, or none for all of it.
        reductions: Reduces their gradients.
        options: Further arguments of ``DistributedDataParallel``.

    Returns:
        The module to call, and the replicas. A module without trained parameters is none.
    """
    if not names:
        if not any(each.requires_grad for each in module.parameters()):
            return module, []
        whole = _replica(module, reductions, options)
        return whole, [whole]
    found = []
    for name in names:
        parent, _, last = name.rpartition(".")
        replica = _replica(module.get_submodule(name), reductions, options)
        module.get_submodule(parent)._modules[last] = replica
        found.append(replica)
    return module, found


def dissolve(module: nn.Module, names: Iterable[str]) -> None:
    """Takes modules of a model out of ``DistributedDataParallel``."""
    for name in names:
        parent, _, last = name.rpartition(".")
        replica = module.get_submodule(name)
        if isinstance(replica, DistributedDataParallel):
            module.get_submodule(parent)._modules[last] = replica.module


def _replica(
    module: nn.Module, reductions: Reductions, options: Mapping[str, Any]
) -> DistributedDataParallel:
    replica = DistributedDataParallel(module, **options)
    # A function without annotations: DDP refuses those that are text.
    replica.register_comm_hook(reductions, lambda state, bucket: state.reduce(bucket))
    buffers = list(module.buffers())
    if all(each.device.type == "cpu" and each.layout is torch.strided for each in buffers):
        replica._register_buffer_comm_hook(
            reductions,
            lambda state, buffers: state.broadcast(buffers),
            _BufferCommHookLocation.PRE_FORWARD,
        )
    return replica
