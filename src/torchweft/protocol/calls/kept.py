"""Calls that are kept until there is a first connection to their callee."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol

from torchweft.protocol.calls.client import Action, Call, CallClient
from torchweft.protocol.connecting import Outgoing, Unsent


class Request(Protocol):
    """The request that opens a call."""

    def message(self, number: int) -> Outgoing:
        """Returns the frame, given the number of the call."""

    def take_back(self) -> None:
        """Takes back what the frame hands on (references, graph records): it is not sent."""


class SimpleRequest:
    """A request that hands nothing on.

    Args:
        message: Makes the frame, given the number of the call.
    """

    def __init__(self, message: Callable[[int], Outgoing]) -> None:
        self.message = message

    def take_back(self) -> None:
        """Does nothing."""


class KeptCall(Unsent, Generic[Call]):
    """The request of a call, which is sent once there is a connection, unless the call has ended.

    Args:
        client: Has the call, by ``keep``.
        call: The call.
        request: Its request.
        act: Carries out actions of ``client``.
    """

    def __init__(
        self,
        client: CallClient[Call],
        call: Call,
        request: Request,
        act: Callable[[list[Action[Call]]], None],
    ) -> None:
        self._client = client
        self._call = call
        self._request = request
        self._act = act

    def make(self) -> Outgoing:
        """Returns the request; raises CallCancelled if the call has ended."""
        self._client.sending(self._call)
        return self._request.message(self._call.number)

    def is_wanted(self) -> bool:
        """Whether the call is open."""
        return self._client.has(self._call.number)

    def drop(self, error: Exception | None) -> None:
        """Takes the request back, and ends the call with ``error``; None if it has ended."""
        self._request.take_back()
        if error is not None:
            self._act(self._client.not_sent(self._call, error))
