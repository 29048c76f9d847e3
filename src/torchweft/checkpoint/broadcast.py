"""Calls several workers at the same time, within one deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchweft import knobs
from torchweft.agent.current import current
from torchweft.errors import CallTimeout, CheckpointError, WeftError, WorkerLost
from torchweft.rpc import rpc_async
from torchweft.rpc.lives import info_of


class Deadline:
    """The deadline of a save or restore.

    Args:
        timeout_s: Seconds from now; 0 for no limit, negative for the default.
    """

    def __init__(self, timeout_s: float) -> None:
        if timeout_s < 0:
            timeout_s = knobs.CHECKPOINT_TIMEOUT_S.get()
        self.timeout_s = timeout_s
        self._end_s = time.monotonic() + timeout_s if timeout_s else math.inf

    def left_s(self) -> float:
        """Returns the remaining seconds as the timeout of a call: 0 for no limit.

        Raises:
            CallTimeout: The deadline has passed.
        """
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise CallTimeout(
                f"the snapshot was not done within its {self.timeout_s:.1f} s; pass a longer "
                f"timeout, or set {knobs.CHECKPOINT_TIMEOUT_S.variable}",
                elapsed_s=self.timeout_s,
            )
        return 0.0 if math.isinf(left_s) else left_s


class Failure(NamedTuple):
    """A failed call: the name of the worker, and the error."""

    worker: str
    error: Exception


def ask_all(
    function: Callable[..., Any],
    arguments: Mapping[int, tuple[Any, ...]],
    deadline: Deadline,
    here: Callable[[], Any] | None = None,
) -> tuple[dict[int, Any], list[Failure]]:
    """Calls a function on several workers at the same time, and waits for all of them.

    Args:
        function: The function to call.
        arguments: The arguments, by id of the worker; this worker is not among them.
        deadline: The deadline of the calls.
        here: Called on this worker at the same time.

    Returns:
        The results by id, and the failures.
    """
    agent = current()
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    waits: dict[int, Callable[[], Any]] = {}
    for worker, args in arguments.items():
        try:
            call = rpc_async(info_of(worker), function, args, timeout=deadline.left_s())
        except Exception as error:
            failures.append(Failure(agent.peers[worker].name, error))
        else:
            waits[worker] = call.wait
    if here is not None:
        waits = {agent.me.id: here, **waits}
    for worker, wait in waits.items():
        try:
            results[worker] = wait()
        except Exception as error:
            failures.append(Failure(agent.peers[worker].name, error))
    return results, failures


def raise_first(what: str, failures: list[Failure], directory: str, step: int | None) -> None:
    """Raises an error if there are failures.

    A lost worker, and then a timeout, goes before other errors, since it calls for a recovery of
    the group. An error of Weft is raised unchanged.

    Args:
        what: The failed operation, for the message.
        failures: The workers and their errors.
        directory: Where the snapshots are.
        step: The step of the snapshot.

    Raises:
        CheckpointError: Names all these workers; its cause is the first error.
    """
    if not failures:
        return
    first = min(failures, key=lambda failure: _urgency(failure.error))
    if isinstance(first.error, WeftError):
        raise first.error
    each = "; and ".join(
        f"on worker {failure.worker!r}: {type(failure.error).__name__}: {failure.error}"
        for failure in [first, *(failure for failure in failures if failure is not first)]
    )
    raise CheckpointError(
        f"{what} failed {each}", directory=directory, step=step, worker=first.worker
    ) from first.error


def _urgency(error: Exception) -> int:
    if isinstance(error, WorkerLost):
        return 0
    if isinstance(error, CallTimeout):
        return 1
    return 2 if isinstance(error, WeftError) else 3
