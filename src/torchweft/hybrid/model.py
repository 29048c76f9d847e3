"""``HybridModel``: one call places the parameters of a model on servers and trainers."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _BufferCommHookLocation

from torchweft import checkpoint
from torchweft.arguments import UNSET_RPC_TIMEOUT, kind_of, limit_of
from torchweft.checkpoint import Snapshot, parts
from torchweft.embedding import Cache, Dynamic, Jagged, Rule, Tables, Wire
from torchweft.embedding.client import Aggregate
from torchweft.embedding.configs import Place
from torchweft.embedding.requests import StackRequest
from torchweft.embedding.tables import check_options, check_types
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.hybrid import clipping
from torchweft.hybrid.optimizer import (
    Copied,
    CopiesOptimizer,
    DenseFactory,
    HybridOptimizer,
    make_dense,
)
from torchweft.hybrid.passes import BatchStream, ModelPasses
from torchweft.hybrid.placement import (
    FoundTable,
    TrainerArguments,
    agree,
    check_arguments,
    find_tables,
    make_offer,
)
from torchweft.hybrid.trainers import Hook, Reductions, Trainers, check_hook, name_of
from torchweft.optim.states import Moved
from torchweft.rpc import get_worker_info

# What takes the places of modules

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
        passes: The passes of the model, which look the table up.
    """

    def __init__(
        self, name: str, table: nn.Embedding | nn.EmbeddingBag, passes: ModelPasses
    ) -> None:
        super().__init__()
        self.name = name
        for setting in table.__constants__:
            setattr(self, setting, getattr(table, setting))
        self.shape = tuple(table.weight.shape)
        self.includes_last = bool(getattr(table, "include_last_offset", False))
        self._passes = passes
        self.train(table.training)
        # What the program has hung on the module stays: hooks see the same calls.
        for hooks in _HOOKS:
            setattr(self, hooks, getattr(table, hooks))

    @property
    def weft_saved_by(self) -> str:
        """What a ``state_dict`` lacks, and how that is saved; for ``torchweft.checkpoint``."""
        return self._passes.saved_by

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


def replace_tables(module: nn.Module, tables: Sequence[FoundTable], passes: ModelPasses) -> None:
    """Puts remote tables in the places of modules, in each place where a module occurs."""
    remote = {id(each.table): RemoteTable(each.name, each.table, passes) for each in tables}
    for _, parent in list(module.named_modules()):
        for name, child in parent._modules.items():
            if id(child) in remote:
                parent._modules[name] = remote[id(child)]


def _put(module: nn.Module, path: str, part: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    module.get_submodule(parent)._modules[name] = part


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


# The model

B = TypeVar("B")
_WAIT_S = 60.0
_COLLECTIVE_S = 270.0
"""How long a collective waits by default: less than the process group, which names nobody."""


class HybridModel(nn.Module):
    """A model with sparse tables on servers, and all else replicated by DDP. Blocks.

    The tables are the ``nn.EmbeddingBag`` and ``nn.Embedding`` with ``sparse=True`` anywhere in the
    module. Each goes to the servers if rows cost less than an all-reduce of all of it. All trainers
    make the model, with equal arguments, as ranks of a process group. The weights are those of the
    first. A step is ordinary, and changes all parameters as one process with the joined batch
    would, if the loss is a mean and all trainers have batches of one size::

        model = HybridModel(module, ["server0", "server1"], batches=[first_batch])
        optimizer = model.optimizer(Adagrad(lr=0.05), lambda dense: torch.optim.Adam(dense))
        for batch, target in batches:
            optimizer.zero_grad()
            criterion(model(batch), target).backward()
            optimizer.step()

    Not thread-safe.

    Args:
        module: The model; it is changed in place, and used only through this one.
        servers: Names of the workers that hold rows.
        batches: Some batches, to measure the share of rows that a step touches: tuples with the
            arguments of the module, or single arguments. The shares of all trainers are averaged.
        touched: The shares, by path of a table, where they are known already.
        places: The places of tables, by path, such as ``{"tower.words": RowWise("server0")}``;
            ``Copies()`` for an all-reduce. Embeddings that are not sparse can be placed so, too.
        replicas: Paths of the modules that are each put under a ``DistributedDataParallel`` of
            their own; by default there is one for the whole model.
        name: Name of the tables on the servers; other models there have other names.
        process_group: The trainers; by default the default group, and this worker alone if there
            is none.
        staleness: The steps of the slowest trainer that pulled rows may lack; None for the
            asynchronous mode of rows. See ``torchweft.embedding.Tables``.
        reduction: Whether the gradients of a step are averaged over trainers, or summed: those of
            all parameters, wherever they are.
        dynamic: Tables whose ids are any int64, by path; they go to servers. The number of rows of
            the module is their capacity, and its weights are not used.
        cache: Which rows this trainer keeps between lookups; by default none. Trainers may differ
            in it.
        wire: The form of rows and gradients in messages; by default that of the tables.
        seed: Seed of the initial values of dynamic tables.
        aggregate: Which trainers share pulls and sum their gradients of rows before these go to
            the servers: ``"host"``, or lists of names. See ``torchweft.embedding.Tables``.
        timeout: Seconds for each pull and step, by default 60, and for each collective on the CPU,
            by default 270 or the limit of the process group; 0 for no limit but that one.
        comm_hook: Reduces the gradients of dense parameters and copies in place of an all-reduce:
            a function of a state and a bucket, as for ``register_comm_hook`` of
            ``DistributedDataParallel``, which takes no second one. Its future has the mean of the
            gradients over the trainers, or their sum with ``reduction="sum"``. All trainers pass
            the same hook. It is not called if there is one trainer.
        comm_state: The first argument of the hook, such as a ``PowerSGDState``. Not for several
            ``replicas``.
        ddp: Further arguments of ``DistributedDataParallel``.

    Raises:
        PlacementError: A parameter cannot be placed so. Nothing was moved.
        ArgumentTypeError: An argument is of a wrong type. Nothing was moved.
        ConfigurationError: An option cannot work. Nothing was moved.
        TrainersDiffer: Another trainer has other parameters or arguments. Nothing was moved.
        PlanError: A table cannot be cut so, or a share is none.
        UnknownWorker: There is no such server.
        WorkerLost: A server is lost.
    """

    def __init__(
        self,
        module: nn.Module,
        servers: Sequence[str],
        *,
        batches: Iterable[Any] | None = None,
        touched: Mapping[str, float] | None = None,
        places: Mapping[str, Place] | None = None,
        replicas: Sequence[str] = (),
        name: str = "hybrid",
        process_group: Any = None,
        staleness: int | None = 0,
        reduction: Literal["mean", "sum"] = "mean",
        dynamic: Mapping[str, Dynamic] | None = None,
        cache: Cache | None = None,
        wire: Wire = Wire(),  # noqa: B008  # immutable
        seed: int = 0,
        aggregate: Aggregate = None,
        timeout: float = UNSET_RPC_TIMEOUT,
        comm_hook: Hook | None = None,
        comm_state: Any = None,
        **ddp: Any,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise ArgumentTypeError(f"module is {kind_of(module)}; pass an nn.Module")
        self._trainers = Trainers.of(process_group)
        tables: list[FoundTable] = []
        options: dict[str, Any] = {
            "staleness": staleness,
            "reduction": reduction,
            "wire": wire,
            "seed": seed,
            "aggregate": aggregate,
        }

        def offer() -> TrainerArguments:
            check_options(self._trainers.names, staleness, reduction)
            check_arguments(
                servers=servers, places=places, touched=touched, dynamic=dynamic, ddp=ddp
            )
            check_types(name=name, seed=seed, cache=cache, wire=wire)
            check_hook(comm_hook, comm_state, replicas)
            tables.extend(find_tables(module, places or {}, dynamic))
            compared = {
                "servers": tuple(servers),
                "places": {path.replace(".", "/"): each for path, each in (places or {}).items()},
                "replicas": tuple(replicas),
                **options,
                "comm_hook": None if comm_hook is None else name_of(comm_hook),
            }
            return make_offer(module, tables, batches, touched or {}, compared)

        names = self._trainers.names
        offers = self._trainers.gather(offer)
        self.plan = agree(names, offers)
        self.name = name
        self.staleness = staleness
        self._token, self._rounds = offers[0].token, 0
        self._optimizer: HybridOptimizer | None = None
        self._replicas_at = tuple(replicas)
        self._timeout_s = limit_of(timeout, _WAIT_S)
        self._reductions: Reductions | None = None
        self.tables: Tables | None = None
        self._passes: ModelPasses | None = None
        self._moved = Moved(
            "rows are on servers: make the optimizer by HybridModel.optimizer(rows, "
            "dense), and clip gradients by its clip_grad_norm_(max_norm)"
        )
        moved = self._to_servers(tables, timeout=timeout, cache=cache, **options)
        table_of = {id(each.table): each.name for each in moved}
        self._paths = {
            path: table_of[id(each)]
            for path, each in module.named_modules(remove_duplicate=False)
            if id(each) in table_of
        }
        self._averages = reduction == "mean"
        self._module = [module]  # in a list: it is registered below, as it is called
        self._copies = self._keep(module, tables, moved)
        self._dense = _dense_parameters(module, self._copies)
        if moved:
            self._moved.add_beside(self._dense.values())
        self.called = module
        self._replicas: list[DistributedDataParallel] = []
        if len(names) > 1:
            self._reductions = Reductions(
                self._trainers,
                self._token,
                name,
                self.servers,
                limit_of(timeout, _COLLECTIVE_S),
                averages=self._averages,
                hook=comm_hook,
                state=comm_state,
            )
            self._replicate(module, {"process_group": process_group, **ddp})
        if self._passes is not None:
            # Of the module itself: DDP may have moved its arguments to a device.
            module.register_forward_pre_hook(self._passes.begin, with_kwargs=True)

    def _to_servers(self, tables: Sequence[FoundTable], **options: Any) -> list[FoundTable]:
        """Makes the tables of the plan on servers, and fills them; returns those moved there."""
        placed = self.plan.on_servers
        if placed is None:
            return []
        self.tables = Tables(placed, name=self.name, trainers=self.trainers, **options)
        there = {each.name for each in placed.configs}
        moved = [each for each in tables if each.name in there]
        self._trainers.of_first(partial(_fill, self.tables, moved))
        self._moved.add(each.table.weight for each in moved)
        self._passes = ModelPasses(self.tables)
        return moved

    def _replicate(self, module: nn.Module, options: Mapping[str, Any]) -> None:
        """Puts the dense part under ``DistributedDataParallel``; one without weights is left."""
        assert self._reductions is not None
        for path in self._replicas_at:
            replica = _replica(module.get_submodule(path), self._reductions, options)
            self._replicas.append(replica)
            _put(module, path, replica)
        if not self._replicas_at and any(each.requires_grad for each in module.parameters()):
            self.called = _replica(module, self._reductions, options)
            self._replicas.append(self.called)

    def _keep(
        self, module: nn.Module, tables: Sequence[FoundTable], moved: Sequence[FoundTable]
    ) -> list[Copied]:
        """Takes moved tables out of the module; returns those that stay."""
        for each in tables:
            each.table.sparse = False  # Their gradients are all-reduced as a whole.
        if self._passes is not None:
            replace_tables(module, moved, self._passes)
        return [Copied(each) for each in tables if each.config is not None and each not in moved]

    @property
    def trainers(self) -> tuple[str, ...]:
        """Names of the trainers, in the order of their ranks."""
        return self._trainers.names

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the workers that have rows."""
        return () if self.tables is None else tuple(self.tables.servers)

    @property
    def module(self) -> nn.Module:
        """The module, without the tables on servers."""
        return self._module[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module. Blocks; a backward pass does so, too.

        The rows of all tables are pulled before it begins, by one call to each server, as far as
        ids, offsets and weights are arguments of the module or slices of these. (Which argument is
        whose is known from the pass before.) Each other lookup is a call of its own.
        """
        if self._passes is None:
            return self.called(*args, **kwargs)
        with self._passes.running():
            return self.called(*args, **kwargs)

    def stream(
        self,
        batches: Iterable[B],
        ahead: int,
        arguments: Callable[[B], Any] = lambda batch: batch,
    ) -> BatchStream[B]:
        """Returns batches in order, whose rows are pulled some batches ahead.

        ::

            with model.stream(batches, 4, lambda batch: batch[0]) as stream:
                for given, target in stream:
                    optimizer.zero_grad()
                    criterion(model(given), target).backward()
                    optimizer.step()

        Each batch is passed to the model before the next one is drawn. Rows are pulled ahead for
        those lookups that ``forward`` pulls before it begins, and from the second batch on. The
        limits are those of ``torchweft.embedding.Tables.stream``.

        Args:
            batches: The batches of the program; at most ``ahead + 1`` are drawn and not yielded.
            ahead: How many batches are pulled before they are needed.
            arguments: Returns the arguments of the model for a batch: a tuple of them, or a single
                one; by default the batch.

        Returns:
            An iterator of batches.

        Raises:
            ConfigurationError: No table is on servers, or ``ahead`` is more than the rows may be
                old.
        """
        if self._passes is None:
            raise ConfigurationError(
                "no table of this model is on servers, so there are no rows to pull ahead"
            )
        return self._passes.stream(batches, ahead, arguments)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients, as ``zero_grad`` of the optimizer does: those of rows as well."""
        super().zero_grad(set_to_none)
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leaves averaging to the next backward pass outside of this block, of all replicas.

        The gradients of rows add up, too. Forward and backward passes are both in the block.
        """
        with ExitStack() as stack:
            for each in self._replicas:
                stack.enter_context(each.no_sync())
            yield

    def optimizer(self, rows: Rule, dense: DenseFactory) -> HybridOptimizer:
        """Returns the optimizer of all parameters. Blocks; every trainer calls it once.

        Args:
            rows: The optimizer of the tables, wherever they are: ``SGD``, ``Adagrad``,
                ``RowWiseAdagrad`` or ``SparseAdam`` of ``torchweft.embedding``.
            dense: Returns the optimizer of the dense parameters, which it is given as a list. It is
                not called if there are none.

        Raises:
            TablesMismatch: Another trainer uses another rule.
            PlanError: A table is cut by column, and the rule needs whole rows.
            ArgumentTypeError: An argument is of a wrong type.
            PlacementError: ``dense`` returns an optimizer of other parameters.
            ConfigurationError: The model has an optimizer already.
        """
        if self._optimizer is not None:
            raise ConfigurationError("this model has an optimizer already")
        if not isinstance(rows, Rule):
            raise ArgumentTypeError(
                f"rows is {kind_of(rows)}; pass a rule of torchweft.embedding, such as Adagrad()"
            )
        of_dense = make_dense(dense, self._dense)
        of_copies = None
        if self._copies:
            of_copies = CopiesOptimizer(self._copies, rows, self._join_maximum)
        of_rows = None if self.tables is None else self.tables.optimizer(rows)
        self._optimizer = HybridOptimizer(of_rows, of_copies, of_dense, self._measure)
        return self._optimizer

    def _join_maximum(self, tensor: Tensor) -> None:
        """Replaces a tensor by the maximum of all trainers, element by element. Blocks."""
        if self._reductions is not None:
            self._reductions.join_maximum(tensor)

    def _measure(
        self, leaves: Sequence[tuple[StackRequest, Tensor]], norm_type: float
    ) -> list[Tensor]:
        if self.tables is None:
            return []
        self._rounds += 1
        return clipping.measure_rows(
            (self.tables.name, self._token, self._rounds),
            self._trainers.names,
            self.tables.servers,
            leaves,
            norm_type,
            0.0 if math.isinf(self._timeout_s) else self._timeout_s,
            averages=self._averages,
        )

    # Weights and snapshots

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """Returns the state of the module as it was before it was placed. Blocks.

        It has the rows of all tables, on the CPU, so it must fit into the memory of this worker. In
        place of the weight of a dynamic table it has ``ids`` and ``rows``: those that exist.
        """
        state: dict[str, Any] = dict(self.module.state_dict())
        for path in self._replicas_at:
            begin, replaced = f"{path}.", f"{path}.module."
            state = {
                begin + key.removeprefix(replaced) if key.startswith(replaced) else key: value
                for key, value in state.items()
            }
        for path, name in self._paths.items():
            assert self.tables is not None
            if self.tables.reader.checker(name).config.dynamic is None:
                state[f"{path}.weight"] = self.tables.weights(name)
            else:
                state[f"{path}.ids"], state[f"{path}.rows"] = self.tables.rows(name)
        return state

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        state: dict[str, Any] | None = None,
        keep: int | None = None,
        since: Snapshot | int | None = None,
    ) -> Snapshot | None:
        """Saves rows, dense part and optimizers after one step, in one snapshot. Blocks.

        All trainers may call it, between the same two steps; the first one saves, and the others
        go on: their next step waits for it. Each server writes its own rows.

        Args:
            directory: Where snapshots are kept; see ``torchweft.checkpoint.save``.
            step: How many steps have been done.
            state: Further state of the program, such as schedulers; see
                ``torchweft.checkpoint.save``. It is that of the first trainer.
            keep: How many snapshots to keep, beside those that they follow; None for all.
            since: A snapshot of this directory, or its step, that this model has saved or restored.
                Of the rows on servers, only those that changed since are written.

        Returns:
            The snapshot; None on other trainers than the first.

        Raises:
            BrokenChain: The rows of a server do not come from ``since``.
            CheckpointError: A worker could not write its part.
            WorkerLost: A worker was lost. Earlier snapshots are unchanged.
        """
        if not self._trainers.is_first:
            return None
        whole = self._tree(state)
        if self.tables is not None:
            return self.tables.save(directory, step=step, state=whole, keep=keep, since=since)
        given: dict[str, Any] = {"keep": keep, "random_states": [get_worker_info().name]}
        return checkpoint.save(directory, {"program": whole}, step=step, **given)

    def restore(
        self,
        directory: str | os.PathLike[str],
        *,
        state: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> int:
        """Restores what ``save`` saved, also onto other servers. Blocks; all trainers call it.

        The first trainer reads the snapshot, and sends the others their part. The same tables must
        be on servers: pass ``places`` if the plan could be another one.

        Args:
            directory: Where the snapshots are.
            state: Further state of the program, as it was saved; changed in place on all trainers.
            step: The snapshot after this many steps; by default the last snapshot.

        Returns:
            The number of steps that have been done.

        Raises:
            SnapshotNotFound: There is none.
            BrokenChain: A snapshot that it follows is not there.
            StateMismatch: It is of another model, placement or optimizer. Nothing is changed.
            WorkerLost: A worker was lost; restore again, in a new model on the others.
        """
        whole = self._tree(state)

        def read() -> Any:
            if self.tables is not None:
                found = self.tables.restore(directory, state=whole, step=step)
            else:
                found = checkpoint.restore(directory, {"program": whole}, step=step)
            return found.step, parts.take_local(whole)

        done, values = self._trainers.of_first(read)
        if not self._trainers.is_first:
            parts.put_local(whole, values)
        return int(done)

    def _tree(self, state: dict[str, Any] | None) -> dict[str, Any]:
        """Returns all state that each trainer has."""
        own = {} if self._optimizer is None else {"optimizer": self._optimizer}
        return {"model": self.module, **own, "program": {} if state is None else state}

    def close(self) -> None:
        """Releases the rows on servers; they are dropped when all trainers have. Blocks.

        The module is no longer under ``DistributedDataParallel``, so that nothing here keeps the
        process group.

        Raises:
            WorkerLost: A server is lost; the others have released the rows.
        """
        self._moved.close()
        self.called = self.module
        for path, replica in zip(self._replicas_at, self._replicas, strict=False):
            _put(self.module, path, replica.module)
        self._replicas.clear()
        if self._reductions is not None:
            self._reductions.close()
        if self.tables is not None:
            self.tables.close()


def _fill(tables: Tables, moved: Sequence[FoundTable]) -> None:
    """Moves the weights of the first trainer to the servers."""
    for each in moved:
        if each.config is not None and each.config.dynamic is None:
            tables.set_weights(each.name, each.table.weight.detach().cpu())


def _dense_parameters(module: nn.Module, copies: Sequence[Copied]) -> dict[str, nn.Parameter]:
    tables = {id(each.parameter) for each in copies}
    return {
        name: each
        for name, each in module.named_parameters()
        if id(each) not in tables and each.requires_grad
    }
