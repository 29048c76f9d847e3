"""Whether a worker still takes part in its group."""

from __future__ import annotations

from torchweft.agent.peers import Peer
from torchweft.errors import NotInitialized


class Lifetime:
    """The two steps by which one worker ends; neither is undone.

    Args:
        name: The worker's name.

    Attributes:
        is_leaving: Whether the group is leaving, so that the end of a connection is not a loss.
        is_closed: Whether the worker has shut down.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.is_leaving = False
        self.is_closed = False

    def check_open(self) -> None:
        """Raises NotInitialized where the worker has shut down."""
        if self.is_closed:
            raise NotInitialized(
                f"worker {self._name!r} has shut down; call init_rpc to join a group again"
            )

    def error_of(self, peer: Peer) -> Exception:
        """Returns the error for a message that can no longer be sent to ``peer``."""
        if peer.lost is not None:
            return peer.lost_error()
        return NotInitialized(
            f"worker {self._name!r} is shutting down; the call to {peer.name!r} was not made"
        )
