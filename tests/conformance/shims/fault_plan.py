"""The plan of injected faults: kinds of messages, and how often or how long each is held back.

The kinds have the names of PyTorch's messages; ``faults`` describes their meaning.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch

from torchweft.engine.protocol.references import Drop, Handed, Hold, Message
from torchweft.errors import ConfigurationError

CALLS = {
    False: ("PYTHON_CALL", "PYTHON_REMOTE_CALL", "PYTHON_RREF_FETCH_CALL"),
    True: ("SCRIPT_CALL", "SCRIPT_REMOTE_CALL", "SCRIPT_RREF_FETCH_CALL"),
}
"""By whether the function is one of PyTorch's or TorchScript: its call, creation and fetch."""
COUNTING: dict[type[Message], str] = {
    Hold: "RREF_FORK_REQUEST",
    Handed: "RREF_CHILD_ACCEPT",
    Drop: "RREF_USER_DELETE",
}
CLEANUP = "CLEANUP_AUTOGRAD_CONTEXT_REQ"
NAMES = (*CALLS[False], *CALLS[True], *COUNTING.values(), CLEANUP)
"""The kinds of messages that can have faults."""


class Plan:
    """Which messages have faults. Thread-safe.

    Args:
        to_fail: Kinds whose first sends fail.
        to_delay: Seconds by which to delay each kind.
        fail_sends: How many sends of each message fail. A call with the same function and
            arguments as an earlier one counts as the same message.

    Raises:
        ConfigurationError: A kind is unknown, or a number is not possible.
    """

    def __init__(
        self, to_fail: Sequence[str], to_delay: Mapping[str, float], fail_sends: int
    ) -> None:
        unknown = [name for name in (*to_fail, *to_delay) if name not in NAMES]
        if unknown:
            raise ConfigurationError(
                f"messages {', '.join(map(repr, unknown))} cannot have faults; "
                f"there are {', '.join(NAMES)}"
            )
        if fail_sends < 0 or any(not delay_s >= 0 for delay_s in to_delay.values()):
            raise ConfigurationError("num_fail_sends and the delays of messages must be 0 or more")
        self._to_fail = frozenset(to_fail)
        self._to_delay = dict(to_delay)
        self._fail_sends = fail_sends
        self._failed: dict[tuple[object, ...], int] = {}
        self._lock = threading.Lock()

    def concerns(self, name: str) -> bool:
        """Whether messages of a kind have any fault."""
        return name in self._to_fail or bool(self.delay_s(name))

    def delay_s(self, name: str) -> float:
        """Returns the seconds by which to delay a message."""
        return self._to_delay.get(name, 0.0)

    def takes(self, name: str, *key: object) -> bool:
        """Counts one send of the message that ``key`` names; returns whether it is to fail."""
        if name not in self._to_fail:
            return False
        message = (name, *key)
        with self._lock:
            count = self._failed.get(message, 0)
            if count >= self._fail_sends:
                return False
            self._failed[message] = count + 1
        return True


def is_scripted(function: object) -> bool:
    """Returns whether PyTorch would send a function as an operator or TorchScript, not Python."""
    if isinstance(function, torch.jit.ScriptFunction):
        return True
    return torch.jit._builtins._find_builtin(function) is not None  # type: ignore[no-untyped-call]
