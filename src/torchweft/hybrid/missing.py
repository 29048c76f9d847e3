"""Says which trainers a collective of a hybrid model waits for.

A process group names nobody. So each trainer counts the collectives of its models, and a trainer
that has waited too long asks the others how many they have begun.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence

from torchweft.errors import CallTimeout, WeftError
from torchweft.rpc import Future, get_worker_info, rpc_async
from torchweft.rpc.current_call import check_types

_ASK_S = 5.0
"""How long the other trainers have to say how many collectives they have begun."""


class Turns:
    """The collectives that this trainer has begun for one model.

    Args:
        token: Names the model; the same on all trainers, and no other model's.
        name: The model's name.
        trainers: Names of the trainers.
        limit_s: How long a collective may wait, in seconds; infinity for no limit but that of the
            process group.
    """

    def __init__(self, token: str, name: str, trainers: Sequence[str], limit_s: float) -> None:
        self.limit_s = limit_s
        self._token = token
        self._name = name
        self._others = [each for each in trainers if each != get_worker_info().name]
        self._begun = 0
        _open[token] = self

    @property
    def begun(self) -> int:
        """How many collectives this trainer has begun."""
        return self._begun

    def begin(self) -> float:
        """Counts one more collective; returns when it began, by ``time.monotonic``."""
        self._begun += 1
        return time.monotonic()

    def close(self) -> None:
        """Notes that this trainer takes part in no further collective."""
        _open.pop(self._token, None)

    def missing(self, what: str, began_s: float) -> CallTimeout:
        """Returns the error of a collective that has waited too long. Blocks for some seconds.

        Args:
            what: The collective, as a subject.
            began_s: When it began, by ``time.monotonic``.
        """
        elapsed_s = time.monotonic() - began_s
        states = self._ask()
        behind = {name: state for name, state in states.items() if state}
        told = ", and ".join(f"{name!r}, which {state}" for name, state in behind.items())
        if not behind:
            told = ", ".join(map(repr, states)) + ", all of which take part in it as well"
        return CallTimeout(
            f"{what} of hybrid model {self._name!r} has waited {elapsed_s:.0f} s for the trainers "
            f"{told}: all trainers make the same number of steps, so give each as many batches, or "
            "pass a larger HybridModel(timeout=) if one is only slow",
            worker=next(iter(behind or states), ""),
            call=what,
            elapsed_s=elapsed_s,
        )

    def _ask(self) -> dict[str, str]:
        """Returns why each other trainer is missing, by name; empty text if it is not."""
        calls: dict[str, Future[int | None]] = {}
        states: dict[str, str] = {}
        for name in self._others:
            try:
                calls[name] = rpc_async(name, begun_for, args=(self._token,), timeout=_ASK_S)
            except WeftError as error:
                states[name] = f"cannot be asked ({error})"
        for name, call in calls.items():
            try:
                states[name] = self._state(call.wait())
            except WeftError as error:
                states[name] = f"does not answer ({error})"
        return states

    def _state(self, begun: int | None) -> str:
        if begun is None:
            return "has closed the model"
        return f"is {self._begun - begun} behind" if begun < self._begun else ""


def is_timeout(error: BaseException | None) -> bool:
    """Whether a process group has raised an error as its own time was up."""
    return error is not None and "imed out" in str(error)


_open: weakref.WeakValueDictionary[str, Turns] = weakref.WeakValueDictionary()


def begun_for(token: str) -> int | None:
    """Returns how many collectives this trainer has begun for a model; None if it is closed."""
    check_types(token=(token, str))
    turns = _open.get(token)
    return None if turns is None else turns.begun
