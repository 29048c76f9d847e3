"""Calls several workers at the same time, and gathers their answers.

The caller holds the references behind a step while the call runs. So calls name values by address,
which is three numbers and needs no reference counting. ``RRef`` arguments would be counted anew in
every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torchweft.errors import CallTimeout, OptimizerError, WorkerLost
from torchweft.rpc import UNSET_RPC_TIMEOUT, RRef, rpc_async, rpc_sync
from torchweft.rpc.current_call import reference_in
from torchweft.rpc.health import info_of
from torchweft.rpc.worker import current_worker
from torchweft.threads import device_streams
from torchweft.worker.current import current

Address = tuple[int, int, int]
Arguments = tuple[Any, ...]


class Failure(NamedTuple):
    """The error of a failed call, and the rank of the worker where it was raised."""

    owner: int
    error: Exception


def address_of(reference: RRef[Any]) -> Address:
    """Returns the address of the value behind a reference on its owner."""
    creator, owner, number = reference.id
    return creator, owner, number


def value_at(address: Address) -> Any:
    """Returns a value of this worker; None while it is still being made.

    Raises:
        ReferenceGone: The value was released.
    """
    found = current_worker().references.value_of(reference_in(address))
    if found.mark is not None:
        device_streams.use(found.mark, found.value)
    return found.value


def run_on_owners(
    function: Callable[..., Any],
    arguments: Mapping[int, Arguments],
    here: Callable[[], Any] | None = None,
    timeout_s: Callable[[], float] = lambda: UNSET_RPC_TIMEOUT,
) -> tuple[dict[int, Any], list[Failure]]:
    """Runs ``function`` on several workers at the same time, and waits for all of them.

    Args:
        function: The function; on this worker it is called directly, in this thread.
        arguments: The arguments by the rank of the worker.
        here: Called on this worker at the same time, if this worker is not among ``arguments``.
        timeout_s: Returns the timeout of each call when it begins; its error is that of the call.

    Returns:
        The results by rank, and the failures by increasing rank.
    """
    me = current().me.id
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    waits: dict[int, Callable[[], Any]] = {}
    if me in arguments:
        here = functools.partial(function, *arguments[me])
    if here is not None:
        waits[me] = here
    is_only_call = here is None and len(arguments) == 1
    for owner, args in arguments.items():
        if owner == me:
            continue
        try:
            to, timeout = info_of(owner), timeout_s()
            if is_only_call:
                # A caller that waits in ``rpc_sync`` is woken sooner than a waiter on a future.
                waits[owner] = functools.partial(rpc_sync, to, function, args, timeout=timeout)
            else:
                waits[owner] = rpc_async(to, function, args, timeout=timeout).wait
        except Exception as error:
            failures.append(Failure(owner, error))
    for owner, wait in waits.items():
        try:
            results[owner] = wait()
        except Exception as error:
            failures.append(Failure(owner, error))
    return results, sorted(failures, key=lambda failure: failure.owner)


def raise_failures(what: str, failures: list[Failure]) -> None:
    """Raises one error for all of ``failures``, if there are any.

    If one of them is a ``WorkerLost`` or ``CallTimeout``, so is the raised error: these call for a
    recovery of the group rather than a change of the program.

    Args:
        what: The failed action, for the message.
        failures: The failures.

    Raises:
        OptimizerError: Names all the workers; its cause is the first error.
        WorkerLost: As above.
        CallTimeout: As above.
    """
    if not failures:
        return
    first = next(
        (each for each in failures if isinstance(each.error, (WorkerLost, CallTimeout))),
        failures[0],
    )
    others = [failure for failure in failures if failure is not first]
    message = f"{what} failed {described([first, *others])}"
    error = first.error
    if isinstance(error, (WorkerLost, CallTimeout)):
        raise type(error)(message, **_fields_of(error)) from error
    names = tuple(name_of(failure.owner) for failure in others)
    raise OptimizerError(message, worker=name_of(first.owner), others=names) from error


def _fields_of(error: WorkerLost | CallTimeout) -> dict[str, Any]:
    is_lost = isinstance(error, WorkerLost)
    names = ("worker", "since", "cause") if is_lost else ("worker", "call", "elapsed_s")
    return {name: getattr(error, name) for name in names}


def described(failures: Iterable[Failure]) -> str:
    """Returns a text with the workers and errors of all failures."""
    return "; and ".join(
        f"on worker {name_of(owner)!r}: {type(error).__name__}: {error}"
        for owner, error in failures
    )


def name_of(owner: int) -> str:
    """Returns the name of the worker with rank ``owner``."""
    return current().peers[owner].name
