"""``RemoteHybridModel``: an embedding as a remote module, and a dense part under DDP.

The form of PyTorch's tutorial on combining DDP with RPC. Each trainer runs a distributed backward
pass of its own, and steps the embedding with its own gradients: the server does not wait for the
others. ``HybridModel`` does; prefer it where results are to be those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torchweft.arguments import kind_of
from torchweft.autograd import get_gradients, in_context
from torchweft.errors import ArgumentTypeError
from torchweft.hybrid.trainers import Trainers
from torchweft.nn import RemoteModule, local_modules
from torchweft.optim import DistributedOptimizer
from torchweft.optim.clipping import (
    check_norms,
    coefficient_of,
    measure_remotely,
    norm,
    norm_of,
    on_host,
    scale_remotely,
)
from torchweft.rpc import RRef


class RemoteHybridModel(nn.Module):
    """An embedding on a parameter server, and a dense module that the trainers replicate.

    ::

        model = RemoteHybridModel(remote_embedding, nn.Linear(16, 8))
        optimizer = model.optimizer(torch.optim.SGD, lr=0.05)
        for indices, offsets, target in batches:
            with torchweft.autograd.context() as context_id:
                loss = criterion(model(indices, offsets), target)
                torchweft.autograd.backward(context_id, [loss])
                optimizer.step(context_id)

    ``parameters()`` are those of the dense part alone. Not thread-safe.

    Args:
        embedding: The remote module, or a reference to a module on a server.
        dense: The dense part. It is put under ``DistributedDataParallel``, unless it contains
            modules that are already.
        device: Where the dense part is.
        process_group: The trainers; by default the default group. Without a group there is one
            trainer.
        ddp: Further arguments of ``DistributedDataParallel``.

    Raises:
        ArgumentTypeError: An argument is of a wrong type.
    """

    def __init__(
        self,
        embedding: RemoteModule | RRef[Any],
        dense: nn.Module,
        *,
        device: str | torch.device = "cpu",
        process_group: Any = None,
        **ddp: Any,
    ) -> None:
        super().__init__()
        if isinstance(embedding, RRef):
            embedding = RemoteModule.init_from_module_rref(
                f"rank:{embedding.owner().id}", embedding
            )
        if not isinstance(embedding, RemoteModule):
            raise ArgumentTypeError(
                f"embedding is {kind_of(embedding)}; pass a RemoteModule, or an RRef to a module"
            )
        if not isinstance(dense, nn.Module):
            raise ArgumentTypeError(f"dense is {kind_of(dense)}; pass an nn.Module")
        self._trainers = Trainers.of(process_group)
        self._embedding = [embedding]  # in a list: its parameters are not those of this worker
        self._remote: list[RRef[nn.Parameter]] = []
        self.device = torch.device(device)
        dense = dense.to(self.device)
        if len(self._trainers.names) > 1 and not any(_replicas_in(dense)):
            dense = DistributedDataParallel(dense, process_group=process_group, **ddp)
        self.dense = dense

    @property
    def embedding(self) -> RemoteModule:
        """The remote module."""
        return self._embedding[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the embedding with all arguments, and the dense part with its output. Blocks."""
        return self.dense(self.embedding.forward(*args, **kwargs).to(self.device))

    def parameter_rrefs(self) -> list[RRef[nn.Parameter]]:
        """Returns references to all parameters: those of the embedding first. Blocks."""
        local = [RRef(each) for each in self.dense.parameters() if each.requires_grad]
        return [*self._of_embedding(), *local]

    def optimizer(
        self, optimizer_class: type[Optimizer], *args: Any, **kwargs: Any
    ) -> DistributedOptimizer:
        """Returns a distributed optimizer of all parameters; see ``DistributedOptimizer``."""
        return DistributedOptimizer(optimizer_class, self.parameter_rrefs(), *args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves averaging to the next backward pass outside of this block, of all replicas."""
        with ExitStack() as stack:
            for each in _replicas_in(self.dense):
                stack.enter_context(each.no_sync())
            yield

    def clip_grad_norm_(
        self,
        context_id: int,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Scales the gradients of a context so that the joined batch's norm is limited. Blocks.

        The norm is that of the averages over trainers: of the dense part, which DDP has averaged,
        and of the embedding, whose server averages the gradients of all trainers to measure them.
        So all trainers scale by the same factor, and their replicas stay equal. All call it once,
        between the backward pass and the step, each with its own context.

        It takes one message to each server from the first trainer, and if the norm is too large,
        one from each trainer. Gradients do not travel.

        Args:
            context_id: The context of this trainer.
            max_norm: The largest total norm.
            norm_type: The p of the p-norm; ``math.inf`` for the largest absolute value.
            error_if_nonfinite: Whether to raise if the total is infinite or NaN.

        Returns:
            The total norm before scaling, a scalar on the CPU; the same for all trainers.

        Raises:
            ConfigurationError: ``max_norm`` is negative, or ``norm_type`` is not positive.
            OptimizerError: An owner failed, or the total is not finite, and that is an error.
            WorkerLost: An owner is lost.
        """
        max_norm, norm_type = check_norms(max_norm, norm_type)
        contexts = self._trainers.gather(lambda: context_id)
        found = get_gradients(context_id)
        local = [found[each] for each in self.dense.parameters() if each in found]
        references = self._of_embedding()

        def measured() -> Tensor:
            norms = measure_remotely(contexts, references, norm_type)
            norms += on_host([norm(each, norm_type) for each in local])
            return norm_of(norms, norm_type)

        with in_context(context_id):
            total = self._trainers.of_first(measured)
            factor = coefficient_of(total, max_norm, error_if_nonfinite=error_if_nonfinite)
            if factor is not None:
                for gradient in local:
                    gradient.mul_(factor.to(gradient.device, gradient.dtype))
                scale_remotely(context_id, references, factor)
        return total

    def _of_embedding(self) -> list[RRef[nn.Parameter]]:
        if not self._remote:
            self._remote = self.embedding.remote_parameters()
        return self._remote


def _replicas_in(module: nn.Module) -> Iterator[DistributedDataParallel]:
    return (each for each in local_modules(module) if isinstance(each, DistributedDataParallel))
