"""The state of a worker's stages, by names that are unique in the pipeline.

A name leads to a weight or buffer, and to the state that the optimizer has of it: on any worker,
and in stages of any number. So state moves to other stages, and to and from snapshots, by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from torchweft.arguments import kind_of
from torchweft.errors import ConfigurationError
from torchweft.optim import states
from torchweft.pipeline import host
from torchweft.rpc import RRef, rpc_async

Options = dict[str, Any]
"""Hyper-parameters of an optimizer."""


class Where(NamedTuple):
    """A pipeline, as functions of this module find its state.

    Attributes:
        pipe: Number of the pipeline.
        has_names: Whether the names in a stage are unique in the pipeline; otherwise the number of
            the stage goes before them.
    """

    pipe: int
    has_names: bool


class Entry(NamedTuple):
    """The state under one name, on its way to another worker.

    Attributes:
        value: The weight, buffer or further state of a module.
        optimizer: The state that the optimizer has of the weight; None if there is none.
    """

    value: Any
    optimizer: dict[str, Any] | None


def _modules(where: Where) -> Iterator[tuple[str, nn.Module]]:
    """Yields this worker's stages, and the prefix of their names."""
    for number, stage in host.runner_of(where.pipe).stages.items():
        yield "" if where.has_names else f"{number}.", stage.module


def _named(where: Where) -> dict[str, Any]:
    """Returns weights, buffers and further state of this worker's stages; nothing is copied."""
    return {
        prefix + name: value
        for prefix, module in _modules(where)
        for name, value in module.state_dict(keep_vars=True).items()
    }


class Form(NamedTuple):
    """The shape of a weight or buffer, and the name of its type."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, value: Any) -> Form:
        """Returns the form of a tensor; that of other state is always the same."""
        if not isinstance(value, Tensor):
            return cls((), "")
        return cls(tuple(value.shape), str(value.dtype).removeprefix("torch."))


def forms(where: Where) -> dict[str, Form]:
    """Returns the names of this worker's weights and buffers, and their forms."""
    return {name: Form.of(value) for name, value in _named(where).items()}


def values(where: Where) -> dict[str, Any]:
    """Returns the weights and buffers of this worker's stages."""
    return {name: _detached(value) for name, value in _named(where).items()}


def gradients(where: Where) -> dict[str, Tensor | None]:
    """Returns the gradients of this worker's weights."""
    return {
        prefix + name: weight.grad
        for prefix, module in _modules(where)
        for name, weight in module.named_parameters()
    }


def squared_norms(where: Where) -> dict[str, float]:
    """Returns the squared norm of the gradient of each of this worker's weights that has one."""
    found = gradients(where)
    return {
        name: float(gradient.double().square().sum())
        for name, gradient in found.items()
        if gradient is not None
    }


def set_values(where: Where, state: Mapping[str, Any]) -> None:
    """Sets those of this worker's weights and buffers that are in ``state``."""
    for prefix, module in _modules(where):
        own = module.state_dict()
        changed = {name: state[prefix + name] for name in own if prefix + name in state}
        module.load_state_dict({**own, **changed})


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def weights_of(where: Where) -> dict[str, tuple[int, nn.Parameter]]:
    """Returns this worker's weights by name, each with the number of its stage."""
    return {
        prefix + name: (number, value)
        for (number, stage), (prefix, _) in zip(
            host.runner_of(where.pipe).stages.items(), _modules(where), strict=True
        )
        for name, value in stage.module.state_dict(keep_vars=True).items()
        if isinstance(value, nn.Parameter)
    }


def _weights(where: Where) -> dict[str, nn.Parameter]:
    return {name: weight for name, (_, weight) in weights_of(where).items()}


# The optimizer of this worker's weights


def optimizer_state(where: Where) -> dict[str, dict[str, Any]]:
    """Returns the state that this worker's optimizer has, by name of the weight."""
    optimizer = host.runner_of(where.pipe).optimizer
    if optimizer is None:
        return {}
    return {
        name: dict(optimizer.state[weight])
        for name, weight in _weights(where).items()
        if weight in optimizer.state
    }


def set_optimizer_state(where: Where, state: Mapping[str, dict[str, Any]]) -> None:
    """Replaces the state of this worker's optimizer, as far as it steps these weights."""
    _put_optimizer_state(where, {name: state.get(name) for name in _weights(where)})


def _put_optimizer_state(where: Where, state: Mapping[str, dict[str, Any] | None]) -> None:
    """Replaces, or drops if None, the optimizer's state of some weights."""
    optimizer = host.runner_of(where.pipe).optimizer
    if optimizer is None:
        return
    stepped = _stepped(optimizer)
    for name, weight in _weights(where).items():
        if name in state and weight in stepped:
            WeightState(optimizer, weight).put(state[name] or {})


def _stepped(optimizer: Optimizer) -> set[Tensor]:
    return {weight for group in optimizer.param_groups for weight in group["params"]}


class WeightState:
    """What an optimizer knows of one weight, in the form that snapshots save and restore.

    Args:
        optimizer: The optimizer.
        weight: The weight.
    """

    def __init__(self, optimizer: Optimizer, weight: Tensor) -> None:
        self._optimizer = optimizer
        self._weight = weight

    def _present(self) -> dict[str, Any]:
        return dict(self._optimizer.state.get(self._weight, {}))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, empty before the first step, and the lineage of the class."""
        return {"classes": states.lineage(type(self._optimizer)), "state": self._present()}

    def weft_differences(self, path: str, saved: Mapping[str, Any]) -> list[str]:
        """Returns the differences that prevent loading what ``state_dict`` of another returned."""
        kind = type(self._optimizer)
        classes = states.lineage(kind)
        if not states.fits_class(saved["classes"], classes):
            return [f"{path} is of the class {saved['classes'][0]} there and {classes[0]} here"]
        shape, present = self._weight.shape, self._present()
        return list(states.misfits(path, shape, saved["state"], kind, present))

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Loads what ``state_dict`` of another returned."""
        self.put(saved["state"])

    def put(self, state: Mapping[str, Any]) -> None:
        """Replaces the state."""
        self._optimizer.state.pop(self._weight, None)
        if state:
            placed = states.placed(self._optimizer, self._weight, state)
            self._optimizer.state[self._weight] = placed


class References(NamedTuple):
    """References to a worker's state, for a snapshot.

    Attributes:
        values: By name, its weights and buffers.
        optimizer: By name of the weight, a ``WeightState``.
    """

    values: dict[str, RRef[Any]]
    optimizer: dict[str, RRef[WeightState]]


def references(where: Where, names: Sequence[str]) -> References:
    """Returns references to some of this worker's weights and buffers.

    Raises:
        ConfigurationError: A module has further state, which is no tensor.
    """
    found, weights = _named(where), _weights(where)
    for name in names:
        if not isinstance(found[name], Tensor):
            raise ConfigurationError(
                f"{name!r} is {kind_of(found[name])}, further state of a module, which a snapshot "
                "of a pipeline cannot hold; keep it in a buffer, or in the program's own state"
            )
    optimizer = host.runner_of(where.pipe).optimizer
    stepped = _stepped(optimizer) if optimizer is not None else set()
    return References(
        {name: RRef(found[name].detach()) for name in names},
        {
            name: RRef(WeightState(optimizer, weights[name]))
            for name in names
            if optimizer is not None and weights.get(name) in stepped
        },
    )


# From one worker to another


def entries(where: Where, names: Sequence[str]) -> dict[str, Entry]:
    """Returns the state under these names."""
    found, optimizer = _named(where), optimizer_state(where)
    return {name: Entry(_detached(found[name]), optimizer.get(name)) for name in names}


def adopt(where: Where, origin: Where, places: Mapping[str, Sequence[str]], limit_s: float) -> None:
    """Takes over the state of weights and buffers of this worker from other workers.

    Args:
        where: The pipeline of this worker's stages.
        origin: The pipeline that has the state; may be the same, for copies. What this worker
            changes must not be asked of it meanwhile.
        places: The names to ask each worker for.
        limit_s: How long to wait for each answer.
    """
    futures = [
        rpc_async(worker, entries, args=(origin, list(names)), timeout=limit_s)
        for worker, names in places.items()
    ]
    found = {name: entry for future in futures for name, entry in future.wait().items()}
    set_values(where, {name: entry.value for name, entry in found.items()})
    _put_optimizer_state(where, {name: entry.optimizer for name, entry in found.items()})
