"""Answers the calls that one worker serves: results and errors."""

from __future__ import annotations

import logging
from asyncio import CancelledError
from collections.abc import Callable, Sequence
from typing import Any

from torchweft.errors import NotInitialized, SerializationError
from torchweft.protocol.sessions import Outgoing
from torchweft.rpc.encoding import Encoder
from torchweft.rpc.requests import reply_by_tables
from torchweft.serialize.exceptions import pack_error
from torchweft.serialize.objects import Packed
from torchweft.threads.reports import log_exception
from torchweft.wire.frames import encode_frame
from torchweft.wire.messages import (
    ERROR_REPLY,
    HandedReference,
    Kind,
    encode_reply,
)
from torchweft.worker.agent import Agent
from torchweft.worker.peers import Peer
from torchweft.worker.tensor_messages import LocalMessage, TensorMessages, local_frame

_log = logging.getLogger("torchweft")


class Replies:
    """Sends the outcomes of served calls to their callers.

    Args:
        agent: The worker's agent.
        encoder: Encodes results.
        tensor_messages: Encodes tensors that do not stand in their message.
    """

    def __init__(self, agent: Agent, encoder: Encoder, tensor_messages: TensorMessages) -> None:
        self._agent = agent
        self._encoder = encoder
        self._tensor_messages = tensor_messages
        self.has_left = False
        """Whether this process has left its group, though it may still serve for a moment."""
        self.on_failure: Callable[[Peer, BaseException], None] | None = None
        """Called with the caller and the error of every call that failed here."""

    def reply(self, peer: Peer, number: int, result: Any, context_id: int) -> None:
        """Sends the result of a call, or an error if the result cannot be serialized."""
        handed: Sequence[HandedReference] = ()
        message_id = 0
        try:
            payload, tensors, externals, inlined = self._encoder.packed_result(peer, result)
            if context_id or inlined is None or inlined[1]:
                context_id, message_id = self._encoder.record_send(context_id, tensors, peer, True)
            if externals:
                handed = self._encoder.hand_on(externals, peer)
            if inlined is not None:
                control = encode_reply(context_id, message_id, handed, payload, inlined[0])
                (answer,) = encode_frame(Kind.REPLY, 0, number, control)
            else:
                packed = Packed(payload, tensors, list(externals))
                message = reply_by_tables(
                    self._tensor_messages, peer, number, context_id, message_id, packed, handed
                )
        except BaseException as error:  # The result's own code may even exit.
            self._encoder.take_back(peer, handed, message_id)
            self.reply_error(peer, number, error)
            return
        try:
            if inlined is not None:
                self._agent.sender.answer(peer, answer)
            else:
                self._agent.sender.send(peer, message)
        except (ConnectionError, NotInitialized):
            self._encoder.take_back(peer, handed, message_id)
            _log.debug("the result of call %d goes nowhere: one of the two has left", number)
        except BaseException as error:
            self._encoder.take_back(peer, handed, message_id)
            self.reply_error(peer, number, error)

    def reply_error(self, peer: Peer, number: int, error: BaseException) -> None:
        """Sends the error of a call."""
        if self.has_left and isinstance(error, (NotInitialized, CancelledError)):
            return  # The caller is told soon that this worker is lost.
        self.note_failure(peer, error)
        payload = self.pack_error(peer, error)
        message: Outgoing
        if peer.is_self:
            local = LocalMessage((0, 0, (), 0, 0), payload, (), ())
            message = local_frame(Kind.REPLY, ERROR_REPLY, number, local)
        else:
            try:
                control = encode_reply(0, 0, (), payload)
            except SerializationError as too_large:
                too_large.__context__ = None  # The error that is too large.
                control = encode_reply(0, 0, (), self.pack_error(peer, too_large))
            message = encode_frame(Kind.REPLY, ERROR_REPLY, number, control)
        try:
            self._agent.sender.send(peer, message)
        except (ConnectionError, NotInitialized):
            _log.debug("the error of call %d goes nowhere: caller or this worker has left", number)

    def pack_error(self, peer: Peer, error: BaseException) -> bytes:
        """Packs an error in a form that ``peer`` can read."""
        return pack_error(
            error,
            self._agent.info.name,
            main_by_name=peer.main_by_name,
            is_plain=peer.registration.is_strict and not peer.is_self,
        )

    def note_failure(self, peer: Peer, error: BaseException) -> None:
        """Passes the error of a call to ``on_failure``; never raises."""
        if self.on_failure is not None:
            try:
                self.on_failure(peer, error)
            except BaseException:  # Showing the error runs its own code.
                log_exception("the error of a call of worker %r could not be shown", peer.name)
