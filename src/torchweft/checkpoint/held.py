"""What a worker holds between two calls of a driver: a part that was taken, or read."""

from __future__ import annotations

import threading
from typing import Any

from torchweft.agent.agent import Agent
from torchweft.agent.current import current
from torchweft.agent.peers import Peer
from torchweft.agent.slots import Slot
from torchweft.errors import CheckpointError


class HeldParts:
    """The parts that a worker holds for drivers, by the ticket that each was given. Thread-safe.

    What a lost driver had taken is dropped: nobody else would ask for it.
    """

    def __init__(self, agent: Agent) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[int, Any]] = {}
        agent.on_lost(self._drop_of)

    def __len__(self) -> int:
        return len(self._parts)

    def keep(self, ticket: str, driver: int, part: Any) -> None:
        """Holds a part for the driver of an id, until it is taken out or dropped."""
        with self._lock:
            self._parts[ticket] = driver, part

    def take_out(self, ticket: str) -> Any:
        """Returns a part, which is held no more.

        Raises:
            CheckpointError: There is none: the driver has given up, or was taken for lost.
        """
        with self._lock:
            found = self._parts.pop(ticket, None)
        if found is None:
            raise CheckpointError(
                f"worker {current().info.name!r} holds nothing for this snapshot any more; the "
                "driver has given it up, or was lost for a moment: begin again"
            )
        return found[1]

    def drop(self, ticket: str) -> None:
        """Holds a part no more, if it is held."""
        with self._lock:
            self._parts.pop(ticket, None)

    def _drop_of(self, driver: Peer) -> None:
        with self._lock:
            lost = [ticket for ticket, (who, _) in self._parts.items() if who == driver.id]
            for ticket in lost:
                del self._parts[ticket]


def held_parts() -> HeldParts:
    """Returns what this worker holds."""
    return current().slots[_HELD]


_HELD = Slot(lambda: HeldParts(current()))
