"""What a worker tells of itself, made when somebody first asks.

Most workers are never observed, so ``torchweft.rpc`` does not import the modules for it. A thread
that may wait imports them: not the reader of a connection, and not a signal handler.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import threading
from types import FrameType
from typing import Any

from torchweft import knobs
from torchweft.errors import NotInitialized
from torchweft.rpc.worker import Worker
from torchweft.wire.frames import Frame
from torchweft.wire.messages import Kind
from torchweft.worker import current as current_agent
from torchweft.worker.agent import Slot
from torchweft.worker.peers import Peer

_GROUP_DIGITS = 8


def group_of(token: str) -> str:
    """Returns the name of a group for people, which does not tell its token."""
    return hashlib.sha256(b"weft group " + token.encode()).hexdigest()[:_GROUP_DIGITS]


class Observed:
    """Has one worker observed. Thread-safe.

    Args:
        worker: The worker.
        group: The name of its group.
    """

    def __init__(self, worker: Worker, group: str) -> None:
        self._worker = worker
        self._group = group
        self._lock = threading.RLock()
        self._reports: tuple[Any, Any] | None = None
        worker.agent.receiver.on(Kind.DUMP, self._on_dump, inline=True)
        if knobs.COUNTERS.get() or knobs.DUMP_AFTER_S.get():
            self._reporting()  # It has work before anybody asks.

    @property
    def reporter(self) -> Any:
        """The ``Reporter`` of ``torchweft.observe.reporting``, which answers observers."""
        return self._reporting()[0]

    def _reporting(self) -> tuple[Any, Any]:
        with self._lock:
            if self._reports is None:
                # By its name: it is of a layer above, and imported only where it is asked for.
                reporting = importlib.import_module("torchweft.observe.reporting")
                self._reports = reporting.reporting_of(self._worker, self._group)
            return self._reports

    def answer(self, question: str) -> bytes:
        """Returns the answer to a question; raises ProtocolError if there is no such question."""
        answer: bytes = self.reporter.answer(question)
        return answer

    def dump_soon(self, reason: str, is_wanted: bool = False) -> None:
        """Has a thread of the worker write the report to a file. Safe in a signal handler."""
        self._worker.agent.reactor.submit(self._dump, reason, is_wanted)

    def _dump(self, reason: str, is_wanted: bool) -> None:
        self._reporting()[1].try_to_write(reason, is_wanted)

    def _on_dump(self, peer: Peer, _: Frame) -> None:
        self.dump_soon(f"worker {peer.name!r} waits for long")


OBSERVED: Slot[Observed] = Slot()


# The signal


def answer_signal() -> None:
    """Makes the worker of this process write what it does on ``SIGQUIT``; idempotent.

    A handler that the program has set stays. A shell that starts a job in the background has it
    ignore the signal, which does not count as a handler. Only the main thread can set one; in other
    threads this does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN):
        _former.append(signal.signal(signal.SIGQUIT, _on_signal))


_former: list[Any] = []
"""The effects that the signal had before."""


def _on_signal(number: int, frame: FrameType | None) -> None:
    try:
        agent = current_agent.current()
    except NotInitialized:
        # The process is no worker any more, so the signal has its usual effect.
        signal.signal(number, _former[-1])
        os.kill(os.getpid(), number)
        return
    agent.slots[OBSERVED].dump_soon("SIGQUIT asks for it", True)
