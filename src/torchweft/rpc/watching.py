"""What counters, traces and spans hear of the calls and backward passes of one worker.

A worker has a tuple of watchers, which is usually empty. Each step of a call looks whether there
are any, and tells them. A call that has begun before somebody watches has no notes, and is told of
without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchweft.agent.calls import PendingCall
from torchweft.autograd.passes import PassWatcher
from torchweft.ids import ReferenceId
from torchweft.protocol.calls import AnsweredCall


class Watcher(PassWatcher):
    """Is told of the calls of a worker, by any thread; does nothing unless a method is overridden.

    It may keep something with a call in ``call.notes``, under itself.
    """

    # Calls that this worker makes

    def call_begins(self, call: PendingCall) -> bytes:
        """Is told of a call before its request is encoded.

        Returns:
            The context of a span that the call carries; empty for none.
        """
        return b""

    def call_ends(self, call: PendingCall) -> None:
        """Is told of an outcome before those that wait for it go on."""

    def call_fails(self, call: PendingCall, error: BaseException) -> None:
        """Is told of a call that was not sent, or of an error that was read as its answer."""

    def creation_sent(self, call: PendingCall, reference: ReferenceId) -> None:
        """Is told of a call that makes a value. Nobody waits for its answer."""

    # Calls that it serves

    def serving_begins(self, call: AnsweredCall) -> None:
        """Is told of a call whose turn has come, or that is refused."""

    def serving_ends(self, call: AnsweredCall, error: BaseException | None) -> None:
        """Is told of the outcome of a served call before it is answered."""

    def served(self, call: AnsweredCall, error: BaseException | None) -> None:
        """Is told of a served call after it was answered."""


class Carrier(Watcher):
    """A watcher by whom calls carry contexts. A worker has one at most."""

    def around(self, call: AnsweredCall, run: Callable[[], Any]) -> Any:
        """Runs what serves a call, or a part of that, in the context of the call."""
        return run()

    def run_batch(self, calls: Sequence[Any], function: Any, run: Callable[[], Any]) -> Any:
        """Runs the function of a batch of calls; returns its result."""
        return run()

    def context_here(self) -> object:
        """Returns the context of this thread, for a call of a batched function by it."""
        return None
