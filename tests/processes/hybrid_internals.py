"""Functions that read internals; ``hybrid_functions.py`` in the contract has the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.contract.processes.hybrid_functions import (
    DENSE,
    RULES,
    _kill,
    _open,
    draw,
    loss_of,
    make_net,
)
from torchweft.embedding import (
    RowWise,
)
from torchweft.hybrid import HybridModel, HybridOptimizer, init_process_group, recover


def measure_alone(timeout_s: float | None = None) -> None:
    """Clips without the other trainers."""
    opened = _open["model"]
    if timeout_s is not None:
        opened.model._timeout_s = timeout_s
    opened.optimizer.clip_grad_norm_(1.0)


def train_with_recovery(
    me: int,
    trainers: Sequence[str],
    servers: Sequence[str],
    directory: str,
    steps: int,
    killed: str = "",
    at: str = "",
) -> tuple[dict[str, Tensor], list[tuple[int, float]], int]:
    """Trains by ``recover``; returns the state, each step that was made, and how often it opened.

    Args:
        killed: The server that the first trainer kills in step 4: between the passes, or while
            the other trainer has pushed and waits.
        at: ``"pass"``, ``"push"``, ``"error"`` for a step that raises an error of its own, or
            nothing.
    """
    made: list[tuple[int, float]] = []
    opened = []

    def open_model() -> tuple[Any, ...]:
        if len(trainers) > 1:
            init_process_group(trainers)
        places = {name: RowWise(*servers) for name in ("words", "tower.users", "days")}
        model = HybridModel(
            make_net(), servers, places=places, timeout=20, find_unused_parameters=True
        )
        opened.append(model)
        return model, model.optimizer(RULES["adam"], DENSE["adam"])

    def step(number: int, model: HybridModel, optimizer: HybridOptimizer) -> None:
        is_last_act = number == 4 and len(opened) == 1 and me == 0
        optimizer.zero_grad()
        loss = loss_of(model, draw(me, number))
        if is_last_act and at == "pass":
            _kill(killed)
        if is_last_act and at == "error":
            raise ValueError("a mistake of the program")
        loss.backward()  # type: ignore[no-untyped-call]
        if is_last_act and at == "push":
            host = model.tables._client._hosts.references[killed]  # type: ignore[union-attr]
            while host.rpc_sync().missing() != [trainers[0]]:
                pass
            _kill(killed)
        optimizer.step()
        made.append((number, loss.item()))

    model, _ = recover(open_model, step, steps=steps, directory=directory, every=3, patience_s=30.0)
    state = model.full_state_dict()
    if len(trainers) > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    model.close()
    return state, made, len(opened)
