"""The launcher's connection with the agent of one other host.

A thread reads the agent's frames: it writes the workers' output into the pipes that the supervisor
reads, and passes the events on. Two more threads keep the last lines of the agent's standard
error, and show the agent that this process is there.
"""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torchweft.errors import HostError, ProtocolError
from torchweft.launch.control import Message
from torchweft.launch.framing import ALIVE_S, MARK, READ_BYTES, Unpacker, pack
from torchweft.launch.host_link import CommandLink, Link
from torchweft.launch.worker import WorkerSpec

END_LIMIT_S = 8.0
_TOLD_LINES = 5
_LOOK_S = 0.1
"""Seconds after which a thread that waits for a full pipe looks whether it is to end."""

Forward = Callable[[Message], None]


@dataclass(frozen=True)
class Host:
    """A host on which workers start.

    Attributes:
        name: Its name, for messages.
        address: The address at which the other hosts reach it.
        workers: How many workers start there.
        command: Starts the agent there, with its standard input and output connected.
        timeout_s: Seconds within which the agent must answer.
        connect: Starts the agent in another way than by a command; may be called again once the
            agent is lost.
    """

    name: str
    address: str
    workers: int
    command: tuple[str, ...] = ()
    timeout_s: float = 30.0
    connect: Callable[[], Link] | None = None


class HostConnection:
    """The connection with one host's agent.

    Args:
        host: The host.
        request: The first request to the agent.
        post: Takes each event, in a thread of this connection.

    Raises:
        HostError: The command that connects is missing here.
    """

    def __init__(self, host: Host, request: Message, post: Forward) -> None:
        self.host = host
        self._post = post
        self._outputs: dict[tuple[str, str], int] = {}
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._is_ending = self._is_open = False
        self._first_port: int | None = None
        self._said: list[str] = []
        self._began_s = time.monotonic()
        try:
            self._link = CommandLink(host.command) if host.connect is None else host.connect()
        except FileNotFoundError:
            raise HostError(
                f"there is no command {host.command[0]!r} here, by which workers start on host "
                f"{host.name!r}; install it, or put it on the PATH",
                host=host.name,
            ) from None
        self._threads = [
            threading.Thread(target=target, name=f"weft-host-{host.name}", daemon=True)
            for target in (self._read_errors, self._read, self._show_alive)
        ]
        self._has_ended = threading.Event()
        self.send({**request, "workers": host.workers})
        self.send({"request": "port"})
        for thread in self._threads:
            thread.start()

    # Called by the launcher's thread

    @property
    def address(self) -> str:
        """The address at which the other hosts reach this one; final once the agent answers."""
        return self._link.address or self.host.address

    @property
    def has_opened(self) -> bool:
        """Whether the agent has answered."""
        return self._is_open

    def is_ready(self) -> bool:
        """Whether the agent has answered; does not wait.

        Raises:
            HostError: It will not answer, or has not in time.
        """
        is_late = time.monotonic() - self._began_s > self.host.timeout_s
        if not self._is_open and (is_late or not self._answers.empty()):
            self.await_opened()
        return self._is_open

    def await_opened(self) -> None:
        """Blocks until the agent answers; its answer is the port."""
        answer = self._answer(self._began_s + self.host.timeout_s - time.monotonic())
        self._first_port = answer["number"]
        self._is_open = True

    def reserve_port(self) -> int:
        """Returns a port of the host that is free, and stays bound there."""
        port, self._first_port = self._first_port, None
        if port is None:
            self.send({"request": "port"})
            port = self._answer(self.host.timeout_s)["number"]
        return port

    def start(self, key: str, worker: WorkerSpec, stdout: int, stderr: int) -> None:
        """Asks for a worker, whose output is written to copies of the two descriptors."""
        for stream, descriptor in (("out", stdout), ("err", stderr)):
            self._outputs[key, stream] = os.dup(descriptor)
            os.set_blocking(descriptor, False)  # the reading thread must not wait for ever
        request: Message = {
            "request": "start",
            "key": key,
            "name": worker.name,
            "rank": worker.rank,
            "job": worker.job,
            "environment": dict(worker.environment),
        }
        self.send(request)

    def send(self, message: Message) -> None:
        """Sends a request; does nothing if the agent is gone."""
        with self._sending, contextlib.suppress(OSError, ValueError):  # the reader reports its end
            self._link.send(pack(message))

    def error(self, reason: str) -> HostError:
        """Returns an error about this host, with what the command or agent said."""
        said = f"; it said: {' / '.join(self._said[-_TOLD_LINES:])}" if self._said else ""
        return HostError(f"host {self.host.name!r} {reason}{said}", host=self.host.name)

    def finish_sending(self) -> None:
        """Ends the agent's input, and so the agent; does not wait for it."""
        self._is_ending = True
        with self._sending:
            self._link.finish_sending()

    def end(self) -> None:
        """Waits for the end of the agent, ends its link if need be, and closes all."""
        self._link.end(is_open=self._is_open, limit_s=END_LIMIT_S)
        self._has_ended.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(END_LIMIT_S)
        self._link.close()
        for descriptor in self._outputs.values():
            os.close(descriptor)
        self._outputs.clear()

    def _answer(self, limit_s: float) -> Message:
        try:
            answer = self._answers.get(timeout=max(limit_s, 0.0))
        except queue.Empty:
            silence = f"cannot be reached: no answer within {self.host.timeout_s:g} s"
            raise self.error(self._link.why_silent() or silence) from None
        if answer["event"] != "port":
            raise self.error(answer["reason"])
        return answer

    # The threads

    def _read(self) -> None:
        reason = ""
        try:
            rest = self._skip_to_mark()
            reason = "was lost: its agent ended" if rest else ""
            unpacker = Unpacker()
            while rest:
                for message in unpacker.feed(rest):
                    reason = self._take(message) or reason
                rest = self._link.receive()
            reason = reason if self._is_ending else self._why_ended(reason)
        except (OSError, ProtocolError, ValueError) as error:
            reason = f"sent nonsense: {error}"
        if not self._is_ending:
            lost: Message = {"event": "lost", "host": self.host.name, "reason": reason}
            self._answers.put(lost)
            self._post(lost)

    def _skip_to_mark(self) -> bytes:
        """Returns what follows the mark; empty if the stream ends before it."""
        seen = b""
        while MARK not in seen:
            data = self._link.receive()
            if not data:
                return b""
            seen = seen[-READ_BYTES:] + data
        # The first frame is often still to come.
        return seen.partition(MARK)[2] or self._link.receive()

    def _take(self, message: Message) -> str:
        """Handles one frame; returns why the agent ends, if the frame says so."""
        kind = message["event"]
        if kind == "output":
            self._write_output(message)
        elif kind == "port":
            self._answers.put(message)
        elif kind == "refused":
            return str(message["reason"])
        elif kind == "signal":
            self._post({**message, "host": self.host.name})
        elif kind == "alive":
            pass
        else:
            self._post({**message, "is_far": True})
        return ""

    def _write_output(self, message: Message) -> None:
        place = (message["key"], message["stream"])
        data = base64.b64decode(message["data"])
        descriptor = self._outputs.get(place)
        if descriptor is None:
            return
        with contextlib.suppress(OSError):  # the supervisor reads no more
            self._write(descriptor, data)
        if not data:
            del self._outputs[place]
            os.close(descriptor)

    def _write(self, descriptor: int, data: bytes) -> None:
        left = memoryview(data)
        while left and not self._is_ending:  # at the end, the supervisor may read no more
            _, ready, _ = select.select([], [descriptor], [], _LOOK_S)
            if ready:
                left = left[os.write(descriptor, left) :]

    def _why_ended(self, reason: str) -> str:
        # ssh and srun explain themselves on standard error, and end at once.
        ending = self._link.why_ended()
        self._threads[0].join(1.0)
        if reason:
            return f"{reason} ({ending})" if ending else reason
        return f"cannot be reached: {ending or 'its agent ended'}"

    def _read_errors(self) -> None:
        for line in self._link.said():
            text = line.decode(errors="replace").strip()
            if text:
                self._said.append(text)
                del self._said[:-_TOLD_LINES]

    def _show_alive(self) -> None:
        while not self._has_ended.wait(ALIVE_S):
            self.send({"request": "alive"})
