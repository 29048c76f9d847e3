"""The parts that a worker holds between two calls of a driver: copied or read parts."""

from __future__ import annotations

import threading
from typing import Any

from torchweft.agent.agent import Agent
from torchweft.agent.current import current
from torchweft.agent.peers import Peer
from torchweft.agent.slots import Slot
from torchweft.errors import CheckpointError


class StagedParts:
    """The parts that a worker holds for drivers, by ticket. Thread-safe.

    The parts of a lost driver are dropped: no other worker would ask for them.
    """

    def __init__(self, agent: Agent) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[int, Any]] = {}
        agent.on_lost(self._drop_of)

    def __len__(self) -> int:
        return len(self._parts)

    def keep(self, ticket: str, driver: int, part: Any) -> None:
        """Holds a part for a driver, given by id, until the part is taken out or dropped."""
        with self._lock:
            self._parts[ticket] = driver, part

    def take_out(self, ticket: str) -> Any:
        """Returns a part, and stops holding it.

        Raises:
            CheckpointError: No part is held: the driver gave up, or was considered lost.
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
        """Drops a part if it is held."""
        with self._lock:
            self._parts.pop(ticket, None)

    def _drop_of(self, driver: Peer) -> None:
        with self._lock:
            lost = [ticket for ticket, (who, _) in self._parts.items() if who == driver.id]
            for ticket in lost:
                del self._parts[ticket]


def staged_parts() -> StagedParts:
    """Returns the parts that this worker holds."""
    return current().slots[_HELD]


_HELD = Slot(lambda: StagedParts(current()))
