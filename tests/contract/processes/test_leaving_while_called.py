"""A group leaves although its workers still call back for contexts that have ended."""

from __future__ import annotations

import time

import torch
from torch import Tensor

import torchweft
from tests.contract.processes.functions import options
from torchweft import autograd, rpc
from torchweft.launch import Nursery

LEAVE_TIMEOUT_S = 20.0
ROUNDS = 150
"""So many met a wait that could miss its own answer in two of three runs."""

weights = torch.nn.Parameter(torch.ones(3))


def weighted(*values: Tensor) -> Tensor:
    return weights * 1


def first(value: Tensor | rpc.RRef[Tensor], *others: object) -> Tensor:
    return value if isinstance(value, Tensor) else value.to_here()


def call_back(caller: str, left: Tensor, right: Tensor) -> Tensor:
    """Calls the caller several times at once, with references among the arguments."""
    made = rpc.remote(caller, weighted, (left, right))
    product = made.to_here() * rpc.rpc_async(caller, first, (right,)).wait()
    answers = [
        rpc.rpc_async(caller, first, (made, left)),
        rpc.rpc_async(caller, first, (product, made)),
    ]
    return sum((answer.wait() for answer in answers), torch.zeros(3)) * product


def test_a_group_leaves_while_its_workers_still_call_back(nursery: Nursery) -> None:
    with torchweft.cluster(
        workers=2,
        nursery=nursery,
        leave_timeout=LEAVE_TIMEOUT_S,
        rpc_backend_options=options(num_worker_threads=4),
    ) as group:
        for number in range(ROUNDS):
            with autograd.context() as context_id:
                left, right = weights * 2, weights * 3
                made = rpc.remote("worker0", call_back, (group.name, left, right))
                loss = rpc.rpc_sync("worker0", first, (left,)).sum()
                if number % 2:
                    autograd.backward(context_id, [loss])
            del made  # Its function still runs.
        begun_s = time.monotonic()
    assert time.monotonic() - begun_s < LEAVE_TIMEOUT_S / 2
