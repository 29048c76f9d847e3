"""Calls several workers at the same time, and gathers their answers.

The caller holds the references behind a step while the call runs. So calls name values by address,
which is three numbers and needs no reference counting. ``RRef`` arguments would be counted anew in
every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from torchweft.agent.current import current
from torchweft.errors import CallTimeout, OptimizerError, WorkerLost
from torchweft.rpc import RRef, rpc_async, rpc_sync
from torchweft.rpc.lives import info_of
from torchweft.rpc.strictness import reference_in
from torchweft.rpc.worker import current_worker

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
    keeper = current_worker().references
    return keeper.value_of(reference_in(address)).value


def run_on_owners(
    function: Callable[..., Any], arguments: Mapping[int, Arguments]
) -> tuple[dict[int, Any], list[Failure]]:
    """Runs ``function`` on several workers at the same time, and waits for all of them.

    Args:
        function: The function; on this worker it is called directly, in this thread.
        arguments: The arguments by the rank of the worker.

    Returns:
        The results by rank, and the failures by increasing rank.
    """
    me = current().me.id
    waits: dict[int, Callable[[], Any]] = {}
    if len(arguments) == 1 and me not in arguments:
        # A caller that waits in ``rpc_sync`` is woken sooner than a waiter on a future.
        ((only, args),) = arguments.items()
        waits[only] = lambda: rpc_sync(info_of(only), function, args)
    else:
        waits = {
            owner: _started(owner, function, args)
            for owner, args in arguments.items()
            if owner != me
        }
        if me in arguments:
            waits = {me: lambda: function(*arguments[me]), **waits}
    return _gather(waits)


def _started(owner: int, function: Callable[..., Any], args: Arguments) -> Callable[[], Any]:
    try:
        return rpc_async(info_of(owner), function, args).wait
    except Exception as error:
        failure = error

    def fail() -> NoReturn:
        raise failure

    return fail


def _gather(waits: Mapping[int, Callable[[], Any]]) -> tuple[dict[int, Any], list[Failure]]:
    results: dict[int, Any] = {}
    failures: list[Failure] = []
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
    message = f"{what} failed {'; and '.join(map(_describe, [first, *others]))}"
    error = first.error
    if isinstance(error, (WorkerLost, CallTimeout)):
        raise type(error)(message, **_fields_of(error)) from error
    names = tuple(name_of(failure.owner) for failure in others)
    raise OptimizerError(message, worker=name_of(first.owner), others=names) from error


def _fields_of(error: WorkerLost | CallTimeout) -> dict[str, Any]:
    is_lost = isinstance(error, WorkerLost)
    names = ("worker", "since", "cause") if is_lost else ("worker", "call", "elapsed_s")
    return {name: getattr(error, name) for name in names}


def _describe(failure: Failure) -> str:
    error = failure.error
    return f"on worker {name_of(failure.owner)!r}: {type(error).__name__}: {error}"


def name_of(owner: int) -> str:
    """Returns the name of the worker with rank ``owner``."""
    return current().peers[owner].name
