"""Sends the code of functions by value to peers, and keeps theirs: the shell of ``kept_code``."""

from __future__ import annotations

from collections.abc import Sequence

from torchweft import knobs
from torchweft.agent.agent import Agent
from torchweft.agent.peers import Peer
from torchweft.errors import ProtocolError
from torchweft.protocol.kept_code import SentCode
from torchweft.runtime.interrupts import acquire
from torchweft.serialize.by_value import Code
from torchweft.wire.frames import Frame, encode_frame
from torchweft.wire.messages import MAX_CODES, Kind, decode_code, encode_code


class CodeKeeper:
    """Sends code to the peers of one worker, and keeps theirs. Thread-safe.

    Args:
        agent: The worker's agent.
        is_strict: Whether the worker reads no code, and turns away a worker that sends some.
    """

    def __init__(self, agent: Agent, *, is_strict: bool) -> None:
        self._agent = agent
        self._limit_bytes = knobs.CODE_LIMIT_BYTES.get()
        self._most = min(knobs.CODE_LIMIT.get() // 4, MAX_CODES)
        if not is_strict:
            agent.receiver.on(Kind.CODE, self._on_code, inline=True)

    def lend(self, peer: Peer, codes: Sequence[Code]) -> list[SentCode] | None:
        """Has a peer keep codes, and returns their entries; never blocks.

        The caller holds the entries until a message that names them is sent, or queued in order.

        Returns:
            The entries in order; None if the peer cannot keep one of the codes now.

        Raises:
            WorkerLost: The peer is lost.
            NotInitialized: This worker has shut down.
        """
        if len(codes) > self._most:
            return None  # It would evict too much else.
        entries = []
        for code in codes:
            entry = peer.sent_codes.get(code.digest)
            if entry is None:
                entry = self._send(peer, code)
            if entry is None:
                return None
            entries.append(entry)
        return entries

    def _send(self, peer: Peer, code: Code) -> SentCode | None:
        # Do not wait for the lock: a finalizer of the program may call from within this thread.
        is_mine: list[bool] = []
        try:
            if not acquire(peer.code_lock, is_mine, blocking=False):
                return None
            entry = peer.sent_codes.get(code.digest)
            if entry is not None:
                return entry  # Race: another thread has sent it meanwhile.
            offer = peer.sent_codes.offer(code.size_bytes)
            if offer is None:
                return None
            control = encode_code(offer.entry.number, offer.forgotten, code.content)
            self._agent.sender.send(peer, encode_frame(Kind.CODE, 0, 0, control), may_block=False)
            peer.sent_codes.sent(code.digest, offer)
            return offer.entry
        finally:
            if any(is_mine):
                peer.code_lock.release()

    def _on_code(self, peer: Peer, frame: Frame) -> None:
        if len(frame.control) > 2 * self._limit_bytes:  # Before it is copied.
            raise ProtocolError(f"a message with code has {len(frame.control)} bytes")
        number, forgotten, content = decode_code(frame.control)
        peer.kept_codes.keep(number, forgotten, Code(content))

    def peer_lost(self, peer: Peer) -> None:
        """Drops the code of a lost worker, and the table of the code that it kept."""
        peer.sent_codes.close()
        peer.kept_codes.close()
