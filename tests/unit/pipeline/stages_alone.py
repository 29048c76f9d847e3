"""Runs stages in this process, by their wiring alone: the reference for cuts."""

from __future__ import annotations

import pickle
from typing import Any

from torch import Tensor, nn

from torchweft.pipeline import BATCH, Stages


def sent(stages: Stages) -> list[nn.Module]:
    """Returns the stages as they arrive at their workers: each a copy of its own."""
    parts = [pickle.loads(pickle.dumps(source)) for source in stages.sources]
    assert all(isinstance(part, nn.Module) for part in parts)
    return parts


def run(stages: Stages, parts: list[nn.Module], batch: Any) -> Any:
    """Returns the output of the last stage."""
    outputs: dict[int, Any] = {BATCH: batch}
    for stage, takes in enumerate(stages.wiring.takes):
        args = [
            outputs[take.source] if take.key is None else outputs[take.source][take.key]
            for take in takes
        ]
        outputs[stage] = parts[stage](*args)
    return outputs[len(parts) - 1]


def gradients(stages: Stages, parts: list[nn.Module]) -> dict[str, Tensor | None]:
    """Returns the gradients by name; those of tied weights are added."""
    for tie in stages.ties:
        weights = [parts[stage].get_parameter(name) for stage, name in tie]
        found = [weight.grad for weight in weights if weight.grad is not None]
        total = sum(found) if found else None
        for weight in weights:
            weight.grad = total  # type: ignore[assignment]
    return {
        name: weight.grad
        for part in parts
        for name, weight in part.named_parameters(remove_duplicate=False)
    }


def compare(stages: Stages, model: nn.Module, batch: Any, expected: Any, loss: Any) -> None:
    """Compares output, gradients and state of the stages with those of the model.

    Args:
        stages: The stages.
        model: The model.
        batch: The batch for the stages.
        expected: The output of the model.
        loss: Makes a loss of an output.
    """
    parts = sent(stages)
    model.zero_grad()
    wanted, found = loss(expected), loss(run(stages, parts, batch))
    wanted.backward()
    found.backward()
    assert abs(found - wanted) < 1e-12
    by_name = gradients(stages, parts)
    for name, weight in model.named_parameters(remove_duplicate=False):
        gradient = by_name[name]
        if weight.grad is None:
            assert gradient is None, name
        else:
            assert gradient is not None, name
            assert (gradient - weight.grad).abs().max() < 1e-12, name
    keys = set().union(*(part.state_dict() for part in parts))
    assert keys == model.state_dict().keys()
