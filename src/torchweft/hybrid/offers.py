"""What the trainers of a model were told: they compare it before anything is moved."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchweft.arguments import check_type, check_workers, did_you_mean
from torchweft.embedding import TableConfig, Wire
from torchweft.embedding.configs import Place
from torchweft.embedding.planner import Touched
from torchweft.errors import ArgumentTypeError
from torchweft.hybrid.errors import PlacementError, TrainersDiffer
from torchweft.hybrid.finding import Found, measure_shares
from torchweft.hybrid.plan import Dense, HybridPlan, make_plan


class Offer(NamedTuple):
    """What a trainer was told; all but the shares must be equal."""

    configs: tuple[TableConfig, ...]
    dense: tuple[Dense, ...]
    servers: tuple[str, ...]
    places: dict[str, Place]
    replicas: tuple[str, ...]
    touched: dict[str, float]
    options: dict[str, Any]
    token: str


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
    tables: Sequence[Found],
    servers: Sequence[str],
    batches: Iterable[Any] | None,
    touched: Mapping[str, float],
    places: Mapping[str, Place],
    replicas: Sequence[str],
    options: Mapping[str, Any],
) -> Offer:
    """Returns the checked arguments of this trainer."""
    placed = [each for each in tables if each.config is not None]
    _check_replicas(module, placed, replicas)
    shares = {path.replace(".", "/"): share for path, share in touched.items()}
    if batches is not None:
        shares = {**measure_shares(module, placed, batches), **shares}
    return Offer(
        tuple(each.config for each in placed if each.config is not None),
        tuple(_dense_parts(module, tables)),
        tuple(servers),
        {path.replace(".", "/"): place for path, place in places.items()},
        tuple(replicas),
        shares,
        dict(options),
        uuid.uuid4().hex,
    )


def agree(trainers: Sequence[str], offers: Sequence[Offer]) -> HybridPlan:
    """Returns the plan of all trainers, by the mean of their shares; pure.

    Raises:
        TrainersDiffer: They were told different things.
        PlacementError: A table is to go to servers, and none is named.
        PlanError: A table cannot be placed as requested.
    """
    first = offers[0]
    for trainer, other in zip(trainers, offers, strict=True):
        _check_same(trainer, other, trainers[0], first)
    means = {name: Touched.mean([each.touched[name] for each in offers]) for name in first.touched}
    return make_plan(
        first.configs,
        first.dense,
        first.servers,
        trainers=trainers,
        touched=means,
        places=first.places,
        wire=first.options.get("wire", Wire()),
    )


def _dense_parts(module: nn.Module, tables: Sequence[Found]) -> Iterator[Dense]:
    """Yields all parameters but the tables that may be placed."""
    placed = {id(each.table.weight) for each in tables if each.config is not None}
    kept = {id(each.table.weight): each.kept for each in tables if each.config is None}
    for name, each in module.named_parameters():
        if id(each) not in placed:
            yield Dense(name, tuple(each.shape), each.nbytes, kept.get(id(each), ""))


def _check_replicas(module: nn.Module, tables: Sequence[Found], replicas: Sequence[str]) -> None:
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


def _check_same(trainer: str, other: Offer, first: str, expected: Offer) -> None:
    mine, theirs = _named(expected), _named(other)
    for part in dict.fromkeys([*mine, *theirs]):
        if mine.get(part) != theirs.get(part):
            raise TrainersDiffer(
                f"trainers {first!r} and {trainer!r} have different models or arguments: {part} is "
                f"{mine.get(part)} at the first and {theirs.get(part)} at the other",
                trainer=trainer,
                part=part,
            )


def _named(offer: Offer) -> dict[str, Any]:
    """Returns what must be equal, by name."""
    found: dict[str, Any] = {
        f"parameter {each.name!r}": f"of shape {each.shape}" for each in offer.dense
    }
    found |= {f"table {each.name!r}": each for each in offer.configs}
    found |= {"servers": offer.servers, "places": offer.places, "replicas": offer.replicas}
    found |= offer.options
    found["the tables of batches and touched"] = sorted(offer.touched)
    return found
