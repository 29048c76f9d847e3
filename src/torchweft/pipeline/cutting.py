"""Stages of a model: its parts, the values between them, and checks that they fit each other."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from torchweft.arguments import checked_int, did_you_mean, kind_of, wrong_type
from torchweft.errors import ArgumentTypeError, ConfigurationError, WeftError
from torchweft.pipeline.copies import Tie
from torchweft.pipeline.errors import CutError, StageMismatch
from torchweft.pipeline.partition import Plan, Profile, balance
from torchweft.pipeline.partition.costs import aligned, bytes_text
from torchweft.pipeline.schedules import Table
from torchweft.pipeline.stage import StageRun
from torchweft.pipeline.step import cut_batch
from torchweft.pipeline.tracing import TracedStage
from torchweft.pipeline.wiring import BATCH, Packet, Wiring, describe, describe_packets, pick

StageSource = nn.Module | Callable[[], nn.Module]
"""A stage: a module, which is copied to its worker, or a function that makes it there."""


@dataclass(frozen=True)
class Stages:
    """A model as stages.

    Attributes:
        sources: The stages.
        wiring: The values between them.
        ties: Weights that several stages share.
        has_names: Whether the names of weights are unique in the model, as those of its parts are.
    """

    sources: tuple[StageSource, ...]
    wiring: Wiring
    ties: tuple[Tie, ...] = ()
    has_names: bool = False

    def __str__(self) -> str:
        """Returns an aligned table: each stage's parts, weights, and values that it takes."""
        rows = []
        for stage, source in enumerate(self.sources):
            counts = ["?", "?"]
            if isinstance(source, nn.Module):
                weights = list(source.parameters())
                if not any(map(is_lazy, weights)):
                    n_bytes = sum(each.numel() * each.element_size() for each in weights)
                    counts = [f"{sum(each.numel() for each in weights):,}", bytes_text(n_bytes)]
            rows.append([str(stage), _parts_text(source), *counts, self.wiring.text(stage)])
        header = ["stage", "parts", "weights", "bytes", "takes"]
        lines = [aligned(header, rows, left=["parts", "takes"])]
        for tie in self.ties:
            names = ", ".join(f"{name} of stage {stage}" for stage, name in tie)
            lines.append(f"tied: {names}")
        return "\n".join(lines)


def cut_sequential(model: nn.Sequential, cuts: Sequence[int | str]) -> Stages:
    """Cuts a ``Sequential`` before the children with these numbers or names.

    Weights that two parts share become ties. The children keep their names.

    Raises:
        CutError: A name is not a child's, or leads inside a child.
        ConfigurationError: The cuts do not rise, a part has no child, or two parts would update
            one buffer.
    """
    children = list(model._modules.items())
    bounds = [0, *(_number_of(model, cut) for cut in cuts), len(children)]
    if any(first >= second for first, second in itertools.pairwise(bounds)):
        raise ConfigurationError(
            f"the cuts {list(cuts)} do not cut {len(model)} layers into stages of at least one "
            f"layer; pass rising numbers from 1 to {len(model) - 1}, or names in their order"
        )
    parts = [
        nn.Sequential(OrderedDict(children[first:second]))
        for first, second in itertools.pairwise(bounds)
    ]
    for part in parts:
        part.training = model.training
    ties = find_ties(parts)
    return Stages(tuple(parts), Wiring.chain(len(parts), spreads=False), ties, has_names=True)


def _number_of(model: nn.Sequential, cut: int | str) -> int:
    """Returns the number of the child before which to cut."""
    if not isinstance(cut, str):
        return checked_int("a cut", cut)
    names = list(model._modules)
    if cut in names:
        return names.index(cut)
    child = cut.partition(".")[0]
    if child in names:
        kind = type(model._modules[child]).__name__
        raise CutError(
            f"the cut at {cut!r} is inside of the child {child!r}, a {kind}: it would be a cut "
            "through the block, which may have a residual connection. Cut before or after "
            f"{child!r}, or pass the name to cut_model, which sends the skip from stage to stage",
            module=cut,
        )
    raise CutError(f"the Sequential has no child {cut!r}{did_you_mean(cut, names)}", module=cut)


def cut_evenly(model: nn.Sequential, n_stages: int, profile: Profile | None = None) -> Stages:
    """Cuts a ``Sequential`` into stages whose largest one is as small as possible.

    Args:
        model: The model.
        n_stages: How many stages.
        profile: The measured layers, whose times are balanced; by default numbers of weights are.

    Raises:
        ConfigurationError: It has fewer children than stages, or the profile is of another model.
    """
    if len(model) < n_stages:
        raise ConfigurationError(
            f"a Sequential of {len(model)} layers cannot be cut into {n_stages} stages; pass fewer "
            "workers, or a model with more layers"
        )
    if profile is None:
        weights = [sum(each.numel() for each in child.parameters()) for child in model]
        return cut_sequential(model, balance(weights, n_stages))
    _check_layers("profile", len(profile.layers), model)
    return cut_sequential(model, balance(profile, n_stages))


def cut_by_plan(model: nn.Sequential, plan: Plan, table: Table | None = None) -> Stages:
    """Cuts a ``Sequential`` into the stages of a plan.

    Args:
        model: The model that the plan is for; each of its children is a layer.
        plan: The plan. The first worker of the pipeline is the first of the plan's stages.
        table: The schedule's table, ``schedule.table(n_workers)``; needed if a stage of the plan
            has several workers.

    Raises:
        ConfigurationError: The plan is for another number of layers, or the table does not have
            the plan's stages and workers.
    """
    _check_layers("plan", plan.n_layers, model)
    planned = [stage.replicas for stage in plan.stages]
    if table is None:
        if max(planned) > 1:
            raise ConfigurationError(
                f"the plan {plan.shape} has stages with several workers; pass the table of a "
                f"schedule that has them: Schedule1F1B(..., replicas={tuple(planned)}).table("
                f"{sum(planned)})"
            )
    else:
        held = [len(table.replicas(stage)) for stage in range(table.n_stages)]
        if held != planned:
            raise ConfigurationError(
                f"the plan {plan.shape} has {planned} workers by stage, and the table "
                f"{table.name!r} has {held}; pass the schedule replicas={tuple(planned)}, or a "
                "plan for its workers"
            )
    return cut_sequential(model, [stage.layers.start for stage in plan.stages[1:]])


def _check_layers(name: str, n_layers: int, model: nn.Sequential) -> None:
    if not isinstance(model, nn.Sequential):
        raise wrong_type("model", model, "pass the nn.Sequential whose children are the layers")
    if n_layers != len(model):
        raise ConfigurationError(
            f"the {name} has {n_layers} layers, and the model {len(model)}; pass the {name} of "
            "this model"
        )


def stages_of(model: object, n_stages: int, wiring: Wiring | None, ties: Iterable[Tie]) -> Stages:
    """Returns the stages that a program passed.

    Args:
        model: A ``Sequential``, which is cut evenly; ``Stages``; or a sequence with a module, or a
            function that makes one, for each stage.
        n_stages: How many stages the schedule has.
        wiring: The values between the stages of a sequence; by default a chain.
        ties: Weights that stages of a sequence share, besides those found.

    Raises:
        ArgumentTypeError: It is nothing of that kind.
        ConfigurationError: The number of stages is another one.
    """
    if isinstance(model, nn.Sequential) and wiring is None:
        model = cut_evenly(model, n_stages)
    if not isinstance(model, Stages):
        model = _listed(model, wiring, tuple(ties))
    found = len(model.sources)
    if found != n_stages or len(model.wiring.takes) != n_stages:
        raise ConfigurationError(
            f"the schedule has {n_stages} stages on these workers, and there are {found} stages "
            f"with arguments for {len(model.wiring.takes)}; pass one stage for each"
        )
    return model


def _listed(model: object, wiring: Wiring | None, ties: tuple[Tie, ...]) -> Stages:
    if not isinstance(model, Sequence) or isinstance(model, str):
        raise ArgumentTypeError(
            f"stages is {kind_of(model)}; pass a Sequential, or a list with a module, or a "
            "function that makes one, for each stage"
        )
    for each in model:
        if not callable(each):
            raise ArgumentTypeError(
                f"a stage is {kind_of(each)}; pass a module, or a function that makes one"
            )
    parts = [each if isinstance(each, nn.Module) else None for each in model]
    found = find_ties(parts)
    wiring = wiring or Wiring.chain(len(model), spreads=True)
    return Stages(tuple(model), wiring, tuple(dict.fromkeys((*found, *ties))))


def find_ties(parts: Sequence[nn.Module | None]) -> tuple[Tie, ...]:
    """Returns the weights that several of these modules share.

    Each stage has its own copy of a shared buffer, so a buffer that stages update cannot be shared.

    Raises:
        ConfigurationError: Two stages would update one buffer.
    """
    _check_buffers(parts)
    places: dict[int, list[tuple[int, str]]] = {}
    for stage, part in enumerate(parts):
        if part is not None:
            for name, weight in part.named_parameters():
                places.setdefault(id(weight), []).append((stage, name))
    return tuple(tuple(found) for found in places.values() if len(found) > 1)


def _check_buffers(parts: Sequence[nn.Module | None]) -> None:
    """Refuses a normalization with running statistics that is in several stages."""
    places: dict[int, tuple[int, str]] = {}
    for stage, part in enumerate(parts):
        for name, module in part.named_modules() if part is not None else ():
            if not (isinstance(module, _NormBase) and module.training):
                continue
            if not isinstance(module.running_mean, Tensor):
                continue
            other, other_name = places.setdefault(id(module.running_mean), (stage, name))
            if other != stage:
                raise ConfigurationError(
                    f"stages {other} and {stage} share the running statistics of "
                    f"{other_name!r} and {name!r}, and each would update its own copy; give each "
                    "stage its own normalization, or set eval() on it"
                )


def _parts_text(source: StageSource) -> str:
    """Returns the parts of a stage: the names of the modules that it runs."""
    if not isinstance(source, nn.Module):
        return f"{getattr(source, '__qualname__', type(source).__name__)}()"
    if isinstance(source, nn.Sequential):
        return ", ".join(source._modules)
    if isinstance(source, TracedStage):
        return ", ".join(source.part_names) or "(no module)"
    return type(source).__name__


# Checks before anything is placed: runs the stages without computing

_UNKNOWN = "unknown"
_NO_NUMPY = "not supported for tensor subclasses"
_UNDECIDED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)


def check_stages(stages: Stages, example_batch: Any, n_microbatches: int = 1) -> tuple[str, ...]:
    """Runs one micro-batch through all stages without computing, and compares the shapes.

    No memory is needed for weights or activations, and the stages stay as they are. A stage that a
    function makes is not run; nor is one whose shapes depend on values; nor are those that take
    their outputs.

    Args:
        stages: The stages.
        example_batch: A batch as ``Pipe.step`` takes it.
        n_microbatches: How many micro-batches it is cut into.

    Returns:
        For each stage, the types and shapes of its output; ``"unknown"`` if it was not run.

    Raises:
        StageMismatch: A stage cannot take the values that it gets; names it, and their shapes.
        ConfigurationError: The batch cannot be cut evenly, or a stage changes a buffer of which
            another stage has a copy.
    """
    batch = cut_batch(example_batch, n_microbatches)[0]
    return tuple(
        _UNKNOWN if output is None else describe(output[0]) for output in _outputs(stages, batch)
    )


def check_like_model(
    stages: Stages, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], batch: Any
) -> None:
    """Compares types and shapes of the last stage's output with those of the model's output.

    Args:
        stages: The stages.
        model: The model that was cut into them.
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        batch: The same arguments as the batch of a pipeline.

    Raises:
        CutError: They differ.
        StageMismatch: A stage cannot take the values that it gets.
    """
    found = _outputs(stages, batch)[-1]
    with _faking() as mode:
        fake_args, fake_kwargs = _faked(mode, (tuple(args), dict(kwargs)))
        try:
            expected = describe(_Copy(model, mode)(*fake_args, **fake_kwargs))
        except _UNDECIDED:
            return
    if found is not None and describe(found[0]) != expected:
        raise CutError(
            f"the stages return {describe(found[0])}, and the model {expected}: a module with a "
            "cut inside has control flow that tracing cannot follow, such as isinstance; cut "
            "before or after that module"
        )


@contextlib.contextmanager
def _faking() -> Iterator[FakeTensorMode]:
    """Runs operations without computing; keeps torch from logging those that fail."""
    log = logging.getLogger(fake_tensor.__name__)
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad():
            yield mode
    finally:
        log.disabled = before


class _Copy(nn.Module):
    """Runs a module with weights and buffers that are not real; the module stays as it is."""

    def __init__(self, module: nn.Module, mode: FakeTensorMode) -> None:
        super().__init__()
        self._module = (module,)  # In a tuple: its weights are not those of this module.
        self._state: dict[str, Tensor] = {
            name: mode.from_tensor(each)
            for name, each in (
                *module.named_parameters(remove_duplicate=False),
                *module.named_buffers(remove_duplicate=False),
            )
        }
        self._versions = {name: each._version for name, each in self._state.items()}
        self.outputs: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module; keeps the output."""
        output = functional_call(self._module[0], self._state, args, kwargs)
        self.outputs.append(output)
        return output

    def updated(self) -> list[Tensor]:
        """Returns the buffers of the module whose copies a run has changed in place."""
        buffers = self._module[0].named_buffers()
        return [each for name, each in buffers if self._state[name]._version > self._versions[name]]


def _faked(mode: FakeTensorMode, value: Any) -> Any:
    return _pytree.tree_map_only(Tensor, mode.from_tensor, value)


def _outputs(stages: Stages, batch: Any) -> list[tuple[Any] | None]:
    """Returns each stage's output, in a tuple; None where it is not known."""
    packets: dict[tuple[int, int], Packet] = {}
    found: list[tuple[Any] | None] = []
    with _faking() as mode:
        batch = _faked(mode, batch)
        for stage, source in enumerate(stages.sources):
            taken = {each: packets.get((each, stage)) for each in stages.wiring.sources(stage)}
            given = {each: packet for each, packet in taken.items() if packet is not None}
            if not isinstance(source, nn.Module) or len(given) < len(taken):
                found.append(None)
                continue
            if takes := stages.wiring.taken(stage, BATCH):
                given[BATCH] = Packet(0, None, [pick(batch, take, stage) for take in takes])
            copy = _Copy(source, mode)
            run = StageRun(stage, copy, stages.wiring, None, lambda _: False)
            outgoing = _run(run, given)
            _check_updates(stages, stage, copy)
            found.append(None if outgoing is None else (copy.outputs[0],))
            for consumer, packet in (outgoing or {}).items():
                packets[stage, consumer] = packet
    return found


def _check_updates(stages: Stages, stage: int, copy: _Copy) -> None:
    """Refuses a stage that changes a buffer of which another stage has a copy.

    Raises:
        ConfigurationError: It does.
    """
    for buffer in copy.updated():
        places = [
            (number, name)
            for number, source in enumerate(stages.sources)
            if isinstance(source, nn.Module)
            for name, each in source.named_buffers()
            if each is buffer
        ]
        others = [number for number, _ in places if number != stage]
        if others:
            raise ConfigurationError(
                f"stage {stage} changes the buffer {dict(places)[stage]!r}, of which stage "
                f"{others[0]} has a copy of its own; let one stage alone use it"
            )


def _run(run: StageRun, given: Mapping[int, Packet]) -> dict[int, Packet] | None:
    """Returns the values that a stage sends; None if its shapes depend on values."""
    try:
        return run.forward(0, given)[0]
    except WeftError:
        raise
    except _UNDECIDED:
        return None
    except Exception as error:
        if _NO_NUMPY in str(error):
            return None
        taken = describe_packets(given)
        raise StageMismatch(
            f"stage {run.stage} cannot take {taken}: {type(error).__name__}: {error}",
            stage=run.stage,
        ) from error
