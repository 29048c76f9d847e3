"""The norm of the joined batch's gradient: of rows on servers, and of what each trainer has.

A trainer has the gradients of the rows that its own batch uses. The norm is that of their average
over all trainers, and rows that several trainers have used must be summed before they are squared.
So each trainer sends its gradients to the servers of the rows. A server waits for all trainers,
sums, and answers with one number. The gradients stay with the trainers, which scale them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchweft.embedding.client import wait_for
from torchweft.embedding.requests import StackRequest
from torchweft.embedding.rows import Part, summed
from torchweft.embedding.server import host_of
from torchweft.errors import CallTimeout, ConfigurationError, WorkerLost
from torchweft.extending import (
    PerWorker,
    check_caller,
    check_types,
    device_mark,
)
from torchweft.optim.clipping import norm, norm_of
from torchweft.rpc import OrderedFuture, functions, get_worker_info, on_worker_lost, rpc_async

Key = tuple[str, str, int]
"""Name of the tables, a token of this run, and how many norms were measured before."""
Stacks = dict[int, list[Part]]
"""Gradients of rows of one server, by stack."""
_ROWS = 1 << 16
"""Rows that are summed at a time."""


def norm_of_mean(stacks: Sequence[Stacks], divisor: int, norm_type: float) -> Tensor:
    """Returns the norm of the averaged gradients of rows; pure.

    Args:
        stacks: Of each trainer, in their order.
        divisor: Number of trainers; 1 for the norm of their sum.
        norm_type: The p of the p-norm.
    """
    norms = []
    for number in sorted({number for each in stacks for number in each}):
        parts = [part for each in stacks for part in each.get(number, [])]
        norms += [norm(values / divisor, norm_type) for _, values in summed(parts, _ROWS)]
    return norm_of(norms, norm_type)


def stacks_by_server(leaves: Sequence[tuple[StackRequest, Tensor]]) -> dict[str, Stacks]:
    """Returns by server what the gradients of lookups would push."""
    found: dict[str, Stacks] = {}
    for pulled, gradient in sorted(leaves, key=lambda each: each[0].place):
        for server, part in pulled.pushes(gradient).items():
            found.setdefault(server, {}).setdefault(pulled.number, []).append(part)
    return found


def measure_rows(
    key: Key,
    trainers: Sequence[str],
    servers: Mapping[str, Any],
    leaves: Sequence[tuple[StackRequest, Tensor]],
    norm_type: float,
    timeout_s: float,
    *,
    averages: bool,
) -> list[Tensor]:
    """Returns the norms of the averaged gradients of rows, one for each server. Blocks.

    Args:
        key: The round.
        trainers: Names of all trainers.
        servers: The servers, by name.
        leaves: The lookups of this trainer, with their gradients.
        norm_type: The p of the p-norm.
        timeout_s: Limit of each call.
        averages: Whether gradients are averaged over trainers, rather than summed.

    Raises:
        WorkerLost: A server or another trainer is lost.
        CallTimeout: Another trainer did not measure in time.
    """
    parts = stacks_by_server(leaves)
    if len(trainers) == 1:
        return [norm_of_mean([each], 1, norm_type) for _, each in sorted(parts.items())]
    me = list(trainers).index(get_worker_info().name)
    given = {
        info: (key, me, norm_type, averages, parts.get(name, {})) for name, info in servers.items()
    }
    try:
        answers = wait_for(
            {
                info.name: rpc_async(info, measure, own, timeout=timeout_s)
                for info, own in given.items()
            }
        )
    except CallTimeout as error:
        raise CallTimeout(
            f"the norm of the gradients of tables {key[0]!r} needs all trainers, "
            f"{', '.join(map(repr, trainers))}; each calls clip_grad_norm_ once a step: {error}",
            worker=error.worker,
            call=error.call,
            elapsed_s=error.elapsed_s,
        ) from error
    return [answers[name] for name in sorted(answers)]


# Servers


class _Round:
    """The gradients of one step, until all trainers have sent theirs.

    Args:
        trainers: Names of the trainers.
        forget: Ends the wait for lost workers.
    """

    def __init__(self, trainers: Sequence[str], forget: Callable[[], None]) -> None:
        self.trainers = trainers
        self.forget = forget
        self.stacks: dict[int, Stacks] = {}
        self.marks: list[Callable[..., None]] = []
        self.futures: list[torch.futures.Future[Tensor]] = []

    def fail(self, error: Exception) -> None:
        """Answers all calls with an error."""
        for future in self.futures:
            future.set_exception(error)  # type: ignore[arg-type]


_ByKey = dict[Key, _Round]
_OPEN: PerWorker[_ByKey] = PerWorker(dict)
_lock = threading.Lock()


@functions.async_execution
def measure(
    key: Key,
    trainer: int,
    norm_type: float,
    averages: bool,
    stacks: Stacks,
) -> torch.futures.Future[Tensor]:
    """Takes the gradients of a trainer; answered with the norm when all have sent theirs.

    Raises:
        InputError: The gradients do not fit the rows of this server.
        ConfigurationError: It has no such tables, or there is no such trainer.
        NotAllowed: The caller is not that trainer.
    """
    check_types(key=(key, tuple), trainer=(trainer, int), stacks=(stacks, dict))
    check_types(norm_type=(norm_type, (int, float)))
    tables = host_of(key[0])
    trainers = tables.options.trainers
    if not 0 <= trainer < len(trainers):
        raise ConfigurationError(f"trainer {trainer} of {len(trainers)} does not exist")
    what = f"measure gradients as trainer {trainer} of tables {key[0]!r}"
    check_caller(trainers[trainer : trainer + 1], what)
    stacks = tables.checked(stacks)
    future: OrderedFuture[Tensor] = OrderedFuture()
    rounds = _OPEN.get()
    with _lock:
        if key not in rounds:
            _drop_stale(rounds, key)
            # Within the lock, which the callback takes on another thread: else a round that is
            # complete by now would leave its callback behind.
            forget = on_worker_lost(lambda error: _fail(rounds, key, error))
            rounds[key] = _Round(trainers, forget)
        found = rounds[key]
        found.stacks[trainer] = stacks
        found.marks.append(device_mark())
        found.futures.append(future)
        if len(found.stacks) < len(trainers):
            return future
        del rounds[key]
    found.forget()
    for mark in found.marks:
        mark(found.stacks)
    try:
        ordered = [found.stacks[place] for place in range(len(trainers))]
        total = norm_of_mean(ordered, len(trainers) if averages else 1, norm_type)
    except Exception as error:
        found.fail(error)
    else:
        for each in found.futures:
            each.set_result(total)
    return future


def _drop_stale(rounds: _ByKey, key: Key) -> None:
    """Drops the rounds of the same tables for which some trainer never came."""
    for stale in [each for each in rounds if each[0] == key[0]]:
        rounds.pop(stale).forget()


def _fail(rounds: _ByKey, key: Key, error: WorkerLost) -> None:
    """Fails a round that waits for a lost worker."""
    with _lock:
        found = rounds.get(key)
        if found is None or error.worker not in found.trainers:
            return
        del rounds[key]
    found.forget()
    found.fail(error)
