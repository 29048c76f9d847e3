"""Finds the tables in a module, and has all trainers agree on where they go."""

from __future__ import annotations

import functools
import inspect
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from torchweft.arguments import check_type, check_workers, did_you_mean
from torchweft.embedding import Dynamic, TableConfig, Wire
from torchweft.embedding.inputs import parts_of
from torchweft.embedding.planner import Touched
from torchweft.errors import ArgumentTypeError
from torchweft.hybrid.plan import Dense, HybridPlan, PlacementError, TrainersDiffer, make_plan

TABLE_TYPES = (nn.Embedding, nn.EmbeddingBag)
_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class FoundTable:
    """A table of a module.

    Attributes:
        path: Its path in the module, such as ``"tower.words"``.
        table: The embedding.
        config: Its description; the name has ``/`` in place of dots.
        kept: Why it stays with the trainers as a part of the dense parameters; empty if it need
            not.
    """

    path: str
    table: nn.Embedding | nn.EmbeddingBag
    config: TableConfig | None
    kept: str = ""

    @property
    def name(self) -> str:
        """Name of the table; empty if it is kept."""
        return "" if self.config is None else self.config.name


def find_tables(
    module: nn.Module,
    named: Iterable[str] = (),
    dynamic: Mapping[str, Dynamic] | None = None,
) -> list[FoundTable]:
    """Returns the tables of a module: those with ``sparse=True``, and those that are named.

    Args:
        module: The module.
        named: Paths of embeddings that the program places itself.
        dynamic: Those with dynamic ids, by path.

    Raises:
        PlacementError: The module has no such table, a named one cannot be placed, or a table
            changes rows while it is looked up.
    """
    if isinstance(module, TABLE_TYPES):
        raise PlacementError("the module is itself a table; pass a module that contains it")
    dynamic = dynamic or {}
    wanted = dict.fromkeys([*named, *dynamic])
    users = _users_of_weights(module)
    embeddings = {path: each for path, each in module.named_modules() if type(each) in TABLE_TYPES}
    for path in wanted:
        if path not in embeddings:
            hint = did_you_mean(path, embeddings)
            argument = "dynamic" if path in dynamic else "places"
            raise PlacementError(
                f"{argument} names {path!r}, which is no nn.Embedding or nn.EmbeddingBag of the "
                f"module{hint}",
                parameter=path,
            )
    found = []
    for path, table in embeddings.items():
        if table.sparse or path in wanted:
            kept = _reason_to_keep(path, table, users)
            if kept and path in wanted:
                raise PlacementError(f"{path!r} cannot be placed: {kept}", parameter=path)
            config = None if kept else config_of(path, table, dynamic.get(path))
            found.append(FoundTable(path, table, config, kept))
    if not found:
        raise PlacementError(
            "the module has no nn.Embedding or nn.EmbeddingBag with sparse=True: name those to "
            f"place, by places={{...}}; it has {list(embeddings) or 'none'}"
        )
    return found


def config_of(path: str, table: Any, dynamic: Dynamic | None = None) -> TableConfig:
    """Returns the description of a table."""
    pooling: Any = table.mode if isinstance(table, nn.EmbeddingBag) else "none"
    return TableConfig(
        path.replace(".", "/"),
        table.num_embeddings,
        table.embedding_dim,
        pooling,
        table.weight.dtype,
        padding_idx=table.padding_idx,
        dynamic=dynamic,
    )


def _users_of_weights(module: nn.Module) -> dict[int, list[str]]:
    """Returns the paths of the modules that have each parameter, by its identity."""
    users: dict[int, list[str]] = {}
    for path, each in module.named_modules():
        for parameter in each._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(path)
    return users


def _reason_to_keep(path: str, table: Any, users: Mapping[int, list[str]]) -> str:
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(table, option):
            raise PlacementError(
                f"{path!r} has {option}, which depends on the batch of one trainer, so trainers "
                "would not compute what one process does; make it without",
                parameter=path,
            )
    if "weight" not in table._parameters:
        return "its weight is computed from other parameters"
    others = [each for each in users.get(id(table.weight), []) if each != path]
    if others:
        return f"shared with {', '.join(map(repr, others))}"
    if not table.weight.requires_grad:
        return "it is frozen"
    if table.weight._backward_hooks or table.weight._post_accumulate_grad_hooks:
        return "its weight has hooks"
    if table.weight.dtype not in _DTYPES:
        return f"rows on servers have no {table.weight.dtype}"
    return ""


def ids_of(table: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Returns the ids that a call of an embedding looks up, without those of padding."""
    given = args[0] if args else kwargs["input"]
    ids: Tensor = (parts_of(given)[0] if given.is_nested else given).reshape(-1)
    padding = table.padding_idx
    return ids if padding is None else ids[ids != padding]


def measure_shares(
    module: nn.Module, tables: Iterable[FoundTable], batches: Iterable[Any]
) -> dict[str, Touched]:
    """Returns the mean share of its rows that a batch touches, by the name of the table.

    Also how many ids it looks up, in how many bags.

    Runs the module on each batch: in evaluation mode, without gradients; random numbers are drawn
    apart.

    Args:
        module: The module.
        tables: Its tables.
        batches: Arguments of the module: a tuple of them, or a single argument.

    Raises:
        PlacementError: There is no batch.
    """
    placed = [(each.config, each.table) for each in tables if each.config is not None]
    counts = {config.name: _Counts() for config, _ in placed}
    batch_count = 0
    with torch.no_grad(), torch.random.fork_rng(), _evaluating(module), ExitStack() as hooks:
        for config, table in placed:
            note = functools.partial(_note, counts[config.name], is_dynamic=bool(config.dynamic))
            hooks.enter_context(table.register_forward_pre_hook(note, with_kwargs=True))
        for batch in batches:
            module(*batch if isinstance(batch, tuple) else (batch,))
            batch_count += 1
            for count in counts.values():
                count.end_batch()
    if not batch_count:
        raise PlacementError("there is no batch to count rows in; pass some, or touched={...}")
    return {
        config.name: counts[config.name].touched(batch_count, config.rows) for config, _ in placed
    }


class _Counts:
    """What batches look up in a table."""

    def __init__(self) -> None:
        self.rows = self.ids = self.bags = 0
        self.of_batch: list[Tensor] = []

    def end_batch(self) -> None:
        """Counts the ids of a batch, and the different rows among them."""
        if self.of_batch:
            joined = torch.cat(self.of_batch)
            self.rows += int(torch.unique(joined).numel())
            self.ids += len(joined)
            self.of_batch.clear()

    def touched(self, batches: int, rows: int) -> Touched:
        """Returns the means over the batches, for a table of so many rows."""
        # A dynamic table may be full before a batch is at its end.
        share = min(1.0, self.rows / batches / rows)
        return Touched(share, self.ids / batches, self.bags / batches)


def _note(counts: _Counts, table: Any, args: Any, kwargs: Any, *, is_dynamic: bool) -> Any:
    """Counts a call of an embedding; a hook before its forward pass."""
    counts.of_batch.append(ids_of(table, args, kwargs).cpu())
    if isinstance(table, nn.EmbeddingBag):
        given = args[0] if args else kwargs["input"]
        offsets = args[1] if len(args) > 1 else kwargs.get("offsets")
        if given.is_nested or offsets is None:
            counts.bags += int(given.shape[0])
        else:
            counts.bags += len(offsets) - int(table.include_last_offset)
    return _within(table, args, kwargs) if is_dynamic else None


def _within(table: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the arguments of a call with other ids, which the module has rows for."""
    if args:
        return (args[0] % table.num_embeddings, *args[1:]), kwargs
    return args, {**kwargs, "input": kwargs["input"] % table.num_embeddings}


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, was_training in modes:
            each.training = was_training


# What the trainers were told, which they compare before anything is moved


class TrainerArguments(NamedTuple):
    """What a trainer was told.

    Attributes:
        configs: The tables.
        dense: All other parameters.
        options: The arguments that must be equal, by name.
        touched: The share of its rows that a batch touches, by table; averaged over the trainers.
        token: Names the model, if this is the first trainer.
    """

    configs: tuple[TableConfig, ...]
    dense: tuple[Dense, ...]
    options: dict[str, Any]
    touched: dict[str, float]
    token: str

    def parts(self) -> dict[str, Any]:
        """Returns what must be equal, by name."""
        return {
            **{f"parameter {each.name!r}": f"of shape {each.shape}" for each in self.dense},
            **{f"table {each.name!r}": each for each in self.configs},
            **self.options,
            "the tables of batches and touched": sorted(self.touched),
        }


def check_arguments(
    *, servers: Any, places: Any, touched: Any, dynamic: Any, ddp: Mapping[str, Any]
) -> None:
    """Checks the types of arguments of ``HybridModel``, and the names of further ones.

    Raises:
        ArgumentTypeError: One is of a wrong type, or ``DistributedDataParallel`` has no such one.
    """
    check_workers(servers, "servers")
    by_path = {"places": places, "touched": touched, "dynamic": dynamic}
    for name, value in by_path.items():
        if value is not None:
            check_type(value, Mapping, name, f"a dict by path, such as {name}={{'words': ...}}")
    known = [*inspect.signature(DistributedDataParallel.__init__).parameters][2:]
    for name in ddp:
        if name not in known:
            raise ArgumentTypeError(
                f"{name!r} is no argument of HybridModel or DistributedDataParallel"
                f"{did_you_mean(name, [*known, *by_path])}"
            )


def make_offer(
    module: nn.Module,
    tables: Sequence[FoundTable],
    batches: Iterable[Any] | None,
    touched: Mapping[str, float],
    options: Mapping[str, Any],
) -> TrainerArguments:
    """Returns the checked arguments of this trainer."""
    placed = [each for each in tables if each.config is not None]
    _check_replicas(module, placed, options["replicas"])
    shares = {path.replace(".", "/"): share for path, share in touched.items()}
    if batches is not None:
        shares = {**measure_shares(module, placed, batches), **shares}
    configs = tuple(each.config for each in placed if each.config is not None)
    dense = tuple(_dense_parts(module, tables))
    return TrainerArguments(configs, dense, dict(options), shares, uuid.uuid4().hex)


def agree(trainers: Sequence[str], offers: Sequence[TrainerArguments]) -> HybridPlan:
    """Returns the plan of all trainers, by the mean of their shares; pure.

    Raises:
        TrainersDiffer: They were told different things.
        PlacementError: A table is to go to servers, and none is named.
        PlanError: A table cannot be placed as requested.
    """
    first = offers[0]
    ours = first.parts()
    for trainer, other in zip(trainers, offers, strict=True):
        theirs = other.parts()
        for part in dict.fromkeys([*ours, *theirs]):
            if ours.get(part) != theirs.get(part):
                raise TrainersDiffer(
                    f"trainers {trainers[0]!r} and {trainer!r} have different models or arguments: "
                    f"{part} is {ours.get(part)} at the first and {theirs.get(part)} at the other",
                    trainer=trainer,
                    part=part,
                )
    return make_plan(
        first.configs,
        first.dense,
        first.options["servers"],
        trainers=trainers,
        touched={
            name: Touched.mean([each.touched[name] for each in offers]) for name in first.touched
        },
        places=first.options["places"],
        wire=first.options.get("wire", Wire()),
    )


def _dense_parts(module: nn.Module, tables: Sequence[FoundTable]) -> Iterator[Dense]:
    """Yields all parameters but the tables that may be placed."""
    placed = {id(each.table.weight) for each in tables if each.config is not None}
    kept = {id(each.table.weight): each.kept for each in tables if each.config is None}
    for name, each in module.named_parameters():
        if id(each) not in placed:
            yield Dense(name, tuple(each.shape), each.nbytes, kept.get(id(each), ""))


def _check_replicas(
    module: nn.Module, tables: Sequence[FoundTable], replicas: Sequence[str]
) -> None:
    """Checks that each trained parameter is in one of the replicated modules."""
    if not replicas:
        return
    paths = dict(module.named_modules())
    for path in replicas:
        if not path or path not in paths:
            raise PlacementError(
                f"replicas names {path!r}, which is no module of the model", parameter=path
            )
    placed = {id(each.table.weight) for each in tables}
    for name, each in module.named_parameters():
        inside = [path for path in replicas if name.startswith(f"{path}.")]
        if each.requires_grad and id(each) not in placed and len(inside) != 1:
            where = "no module" if not inside else " and ".join(map(repr, inside))
            raise PlacementError(
                f"parameter {name!r} is in {where} of replicas={list(replicas)}; each trained "
                "parameter is in exactly one",
                parameter=name,
            )
