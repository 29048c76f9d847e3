"""Checks before anything is placed that stages fit each other: runs them without computing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils import _pytree

from torchweft.errors import ConfigurationError, WeftError
from torchweft.pipeline.cutting import Stages
from torchweft.pipeline.errors import CutError, StageMismatch
from torchweft.pipeline.stage import StageRun
from torchweft.pipeline.step import cut_batch
from torchweft.pipeline.wiring import BATCH, Packet, describe, pick

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
        raise StageMismatch(
            f"stage {run.stage} cannot take {_shown(given)}: {type(error).__name__}: {error}",
            stage=run.stage,
        ) from error


def _shown(given: Mapping[int, Packet]) -> str:
    return " and ".join(
        f"{', '.join(map(describe, packet.leaves))} from "
        f"{'the batch' if source == BATCH else f'stage {source}'}"
        for source, packet in given.items()
    )
