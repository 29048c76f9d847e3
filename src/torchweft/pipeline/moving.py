"""Moves the state of a pipeline's stages to other workers, and to and from snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torchweft.errors import ConfigurationError
from torchweft.pipeline import weights
from torchweft.pipeline.deployment import Deployment
from torchweft.pipeline.groups import Group
from torchweft.pipeline.optimizer import SavedGroups

Places = dict[str, list[str]]
"""By worker, the names whose state is asked of it."""


Forms = Mapping[str, weights.Form]
"""The shape and type of each weight and buffer, by name."""


class _Held(NamedTuple):
    """The holders of one name.

    Attributes:
        form: The shape and type of the weight or buffer.
        workers: The workers that hold it, in the order of the table's rows.
    """

    form: weights.Form
    workers: list[str]


def _held(deployment: Deployment) -> dict[str, _Held]:
    found: dict[str, _Held] = {}
    for worker, its in zip(deployment.workers, deployment.call_named(weights.forms), strict=True):
        for name, form in its.items():
            found.setdefault(name, _Held(form, [])).workers.append(worker)
    return found


def forms(deployment: Deployment) -> Forms:
    """Returns the names of all weights and buffers, with their shapes and types."""
    return _forms(_held(deployment))


def _forms(held: dict[str, _Held]) -> Forms:
    return {name: each.form for name, each in held.items()}


def move(old: Deployment, new: Deployment, limit_s: float) -> None:
    """Gives the stages of a deployment the state of those of another; worker to worker. Blocks.

    Args:
        old: Has the state; it is not changed.
        new: Gets the weights, the buffers and the state of the optimizers.
        limit_s: How long to wait for each worker.

    Raises:
        ConfigurationError: They are not of the same model.
    """
    sources, targets = _held(old), _held(new)
    check_same(_forms(sources), _forms(targets))
    _adopt(new, old.where, [_nearest(worker, sources, targets) for worker in new.workers], limit_s)


def spread(deployment: Deployment, limit_s: float) -> None:
    """Gives all replicas of a stage the state of the first."""
    held = _held(deployment)
    places: list[Places] = []
    for worker in deployment.workers:
        found: Places = {}
        for name, (_, (first, *others)) in held.items():
            if worker in others:
                found.setdefault(first, []).append(name)
        places.append(found)
    if any(places):
        _adopt(deployment, deployment.where, places, limit_s)


def _nearest(worker: str, sources: dict[str, _Held], targets: dict[str, _Held]) -> Places:
    """Returns where a worker gets its state: from itself, if it can, else from the first holder."""
    places: Places = {}
    for name, held in targets.items():
        if worker in held.workers:
            holders = sources[name].workers
            places.setdefault(worker if worker in holders else holders[0], []).append(name)
    return places


def _adopt(
    deployment: Deployment, origin: weights.Where, places: Sequence[Places], limit_s: float
) -> None:
    where = deployment.where
    deployment.call_each(weights.adopt, [(where, origin, each, limit_s) for each in places])


def check_same(old: Forms, new: Forms) -> None:
    """Compares the names, shapes and types of two states.

    Raises:
        ConfigurationError: They differ; names the differences.
    """
    if old.keys() != new.keys():
        missing, extra = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
        raise ConfigurationError(
            f"the state is of another model: missing {missing}, unexpected {extra}"
        )
    for name, here in new.items():
        there = old[name]
        if there.shape != here.shape:
            raise ConfigurationError(
                f"the state is of another model: {name} has shape {list(there.shape)} there and "
                f"{list(here.shape)} here"
            )
        if there.dtype != here.dtype:
            raise ConfigurationError(
                f"the state is of another model: {name} has type {there.dtype} there and "
                f"{here.dtype} here; convert one of them"
            )


def references(deployment: Deployment) -> dict[str, Any]:
    """Returns references to the state of all stages, as a tree for ``torchweft.checkpoint``.

    Of replicas it has the first; after restoring, ``spread`` gives its state to the others.
    """
    firsts: dict[str, list[str]] = {worker: [] for worker in deployment.workers}
    for name, held in _held(deployment).items():
        firsts[held.workers[0]].append(name)
    found = deployment.call_each(
        weights.references, [(deployment.where, names) for names in firsts.values()]
    )
    tree: dict[str, Any] = {"weights": {}, "optimizer": {}}
    for each in found:
        tree["weights"].update(each.values)
        tree["optimizer"].update(each.optimizer)
    return {key: entries for key, entries in tree.items() if entries}


def tree(
    deployment: Deployment, groups: list[Group] | None, state: dict[str, Any] | None
) -> tuple[dict[str, Any], SavedGroups]:
    """Returns all that a snapshot holds; and of that, the optimizer's groups.

    Args:
        deployment: The stages.
        groups: The groups of the optimizer; None if there is none.
        state: Further state of the program.
    """
    saved = SavedGroups(groups or [])
    found: dict[str, Any] = {"pipe": references(deployment)}
    if groups is not None:
        found["groups"] = saved
    return {**found, "program": {} if state is None else state}, saved
