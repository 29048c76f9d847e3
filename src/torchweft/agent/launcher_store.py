"""The rendezvous store that a launcher keeps for workers which join and leave.

A store in a worker ends with that worker. PyTorch's file store has a flaw if processes are killed:
a half-written record makes every later reader spin, without a time limit. So the launcher keeps the
keys, see ``torchweft.launch.store_server``. Each operation is one request datagram and one reply
datagram, which are received whole or not at all.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

# PyTorch's own types leave these out, as a build may lack them.
from torch.distributed import Store  # type: ignore[attr-defined]

SCHEME = "unix"
_LOOK_AGAIN_S = 0.02
_ANSWER_BYTES = 1 << 18

_opened: dict[str, LauncherStore] = {}
"""Open stores by name: a PyTorch store that wraps one keeps only its C++ half alive."""


def open_launcher_store(name: str, timeout_s: float) -> LauncherStore:
    """Returns the store of the launcher whose socket is called ``name``.

    Args:
        name: The name that the launcher told its workers.
        timeout_s: How long to wait for one answer, or for the value of a key.
    """
    store = _opened[name] = LauncherStore(name, timeout_s)
    return store


class LauncherStore(Store):
    """Asks the launcher for keys and values; thread-safe. Made by ``open_launcher_store``."""

    def __init__(self, name: str, timeout_s: float) -> None:
        super().__init__()
        self._name = name
        self._timeout_s = timeout_s

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        """Returns the value of a key; waits until the key is there."""
        self.wait([key], timedelta(seconds=self._timeout_s))
        return _bytes(self._ask("get", key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return _bytes(self._ask("compare_set", key, _text(expected), _text(desired)))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits until all keys are there.

        Raises:
            RuntimeError: The keys did not come in time, or the launcher is gone.
        """
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline_s = time.monotonic() + limit_s
        while not self.check(keys):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise RuntimeError(f"{', '.join(keys)} did not come within {limit_s:.1f} s")
            time.sleep(min(_LOOK_AGAIN_S, left_s))

    def _ask(self, *request: object) -> Any:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            asking.settimeout(self._timeout_s if self._timeout_s < math.inf else None)
            asking.bind("")  # the kernel assigns an address for the answer
            try:
                asking.connect(f"\0{self._name}")
                asking.send(json.dumps(request).encode())
                answer = json.loads(asking.recv(_ANSWER_BYTES))
            except OSError as error:
                raise RuntimeError(
                    f"the launcher, which hosts the rendezvous store, does not answer: {error}; "
                    "has 'torchweft run' ended?"
                ) from error
        if "problem" in answer:
            raise RuntimeError(f"the launcher refuses {request[0]}: {answer['problem']}")
        return answer["value"]


# JSON has no bytes; in Latin-1 each character stands for one byte.
def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")
