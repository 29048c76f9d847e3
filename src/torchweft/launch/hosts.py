"""The nurseries of several hosts, as one.

An agent on each host runs a nursery, and is connected with this process by a *link*: the standard
input, output and error of a command such as ``ssh``, or of an actor of Ray. ``HostNurseries`` has
the methods of one nursery. So a run over hosts is followed, restarted, reported and ended by the
code that follows local workers.

A thread for each host reads the agent's messages, and queues the events. Two more threads keep the
last lines of the agent's standard error, and show the agent that this process is there.
"""

from __future__ import annotations

import base64
import contextlib
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torchweft.errors import HostError, ProtocolError
from torchweft.launch.control import READ_BYTES, Ladder, Message, Unpacker, pack
from torchweft.launch.host_agent import ALIVE_S, MARK, SILENCE_S, write_all
from torchweft.launch.worker import WorkerSpec

END_LIMIT_S = 8.0
_TOLD_LINES = 5
_LOOK_S = 0.1
"""Seconds after which a thread that waits for room looks whether it is to end."""
_MOST_OUTPUTS = 64
"""Pieces of output that may be queued; then the hosts wait, as at a full pipe."""


class Link(Protocol):
    """Carries bytes to and from one agent.

    One thread calls ``receive``, one ``said``, and any ``send``; they all end with the agent.
    """

    @property
    def address(self) -> str:
        """The address of the host, if it is known only once the agent runs; otherwise empty."""

    def send(self, data: bytes) -> None:
        """Writes to the agent; raises OSError or ValueError if the agent is gone."""

    def receive(self) -> bytes:
        """Blocks until the agent has written; returns nothing at the end."""

    def said(self) -> Iterator[bytes]:
        """Blocks for each next line of the agent's standard error."""

    def why_silent(self) -> str:
        """Returns why the agent has not answered yet; empty if that is unknown."""

    def why_ended(self) -> str:
        """Returns how the link failed, after ``receive`` has returned nothing; empty if not."""

    def finish_sending(self) -> None:
        """Ends the agent's input, and so the agent; does not wait for it."""

    def end(self, *, is_open: bool, limit_s: float) -> None:
        """Waits for the end of the agent, and ends the link by force after ``limit_s``.

        Args:
            is_open: Whether the agent has answered; otherwise there is no need to wait.
            limit_s: Seconds to wait.
        """

    def close(self) -> None:
        """Releases what the link holds, after its threads have ended."""


class CommandLink:
    """A command of this host, such as ``ssh``, that connects with the agent.

    A command may not notice that the other machine is gone: ``srun`` waits until SLURM says so. The
    agent writes now and then, so its silence is the end.

    Args:
        command: The command and its arguments.
        silence_s: Seconds without a byte after which an agent that has written before is lost.

    Raises:
        FileNotFoundError: There is no such command here.
    """

    address = ""

    def __init__(self, command: tuple[str, ...], silence_s: float = SILENCE_S) -> None:
        self._name, self._silence_s = command[0], silence_s
        self._has_spoken = self._is_silent = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._stderr = self._process.stderr
        os.set_blocking(self._stdin.fileno(), True)

    def send(self, data: bytes) -> None:
        """Writes to the agent; raises OSError or ValueError if the agent is gone."""
        write_all(self._stdin.fileno(), data)

    def receive(self) -> bytes:
        """Blocks until the agent has written; returns nothing at the end, or after a silence."""
        # The launcher limits the first wait.
        limit_s = self._silence_s if self._has_spoken else None
        if not select.select([self._stdout], [], [], limit_s)[0]:
            self._is_silent = True
            self._process.kill()
            return b""
        self._has_spoken = True
        return os.read(self._stdout.fileno(), READ_BYTES)

    def said(self) -> Iterator[bytes]:
        """Blocks for each next line of the command's standard error."""
        return iter(self._stderr)

    def why_silent(self) -> str:
        """Returns nothing: the command explains itself when it ends."""
        return ""

    def why_ended(self) -> str:
        """Returns the command's exit code; waits for a moment, as the command ends at once."""
        if self._is_silent:
            return f"nothing was heard of it for {self._silence_s:g} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        return f"{self._name} ended with exit code {code}" if code else ""

    def finish_sending(self) -> None:
        """Ends the agent's input, and so the agent; does not wait for it."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    def end(self, *, is_open: bool, limit_s: float) -> None:
        """Waits for the end of the command, and kills it after ``limit_s``."""
        if not is_open:
            self._process.terminate()  # it may still try to connect
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Closes the pipes."""
        self._stdout.close()
        self._stderr.close()


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


class _Events:
    """What the threads of all hosts tell, for the thread that receives."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._room = threading.Semaphore(_MOST_OUTPUTS)
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def fileno(self) -> int:
        return self._wake_read.fileno()

    def put(self, event: Message) -> None:
        self._queue.put(event)
        self.wake()

    def put_output(self, event: Message, is_ending: Callable[[], bool]) -> None:
        """Queues a piece of output once there is room; drops it if its host is ended first."""
        while not self._room.acquire(timeout=_LOOK_S):
            if is_ending():
                return
        self.put(event)

    def wake(self) -> None:
        """Makes the descriptor readable."""
        with contextlib.suppress(OSError):  # full, so that it is readable; or closed
            self._wake_write.send(b"!")

    def take(self) -> Iterator[Message]:
        """Yields the queued events."""
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(READ_BYTES)
        while not self._queue.empty():
            event = self._queue.get()
            if event["event"] == "output":
                self._room.release()
            yield event

    def close(self) -> None:
        self._wake_read.close()
        self._wake_write.close()


class HostConnection:
    """The connection with one host's agent.

    Args:
        host: The host.
        request: The first request to the agent.
        events: Takes each event, from a thread of this connection.

    Raises:
        HostError: The command that connects is missing here.
    """

    def __init__(self, host: Host, request: Message, events: _Events) -> None:
        self.host = host
        self._events = events
        self._answers: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._is_ending = self.has_opened = False
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

    def is_ready(self) -> bool:
        """Whether the agent has answered; does not wait.

        Raises:
            HostError: It will not answer, or has not in time.
        """
        is_late = time.monotonic() - self._began_s > self.host.timeout_s
        if not self.has_opened and (is_late or not self._answers.empty()):
            self.await_opened()
        return self.has_opened

    def await_opened(self) -> None:
        """Blocks until the agent answers; its answer is the port."""
        limit_s = self._began_s + self.host.timeout_s - time.monotonic()
        self._first_port = self._await_port(limit_s)
        self.has_opened = True

    def reserve_port(self) -> int:
        """Returns a port of the host that is free, and stays bound there."""
        port, self._first_port = self._first_port, None
        if port is None:
            self.send({"request": "port"})
            port = self._await_port(self.host.timeout_s)
        return port

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
        self._link.end(is_open=self.has_opened, limit_s=END_LIMIT_S)
        self._has_ended.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(END_LIMIT_S)
        self._link.close()

    def _await_port(self, limit_s: float) -> int:
        try:
            answer = self._answers.get(timeout=max(limit_s, 0.0))
        except queue.Empty:
            silence = f"cannot be reached: no answer within {self.host.timeout_s:g} s"
            raise self.error(self._link.why_silent() or silence) from None
        if answer["event"] != "port":
            raise self.error(answer["reason"])
        port: int = answer["number"]
        return port

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
            self._events.put(lost)

    def _skip_to_mark(self) -> bytes:
        """Returns what follows the mark; empty if the stream ends before it."""
        seen = b""
        while MARK not in seen:
            data = self._link.receive()
            if not data:
                return b""
            seen = seen[-READ_BYTES:] + data
        # The first message is often still to come.
        return seen.partition(MARK)[2] or self._link.receive()

    def _take(self, message: Message) -> str:
        """Handles one message; returns why the agent ends, if the message says so."""
        kind = message["event"]
        if kind == "output":
            data = base64.b64decode(message["data"])
            self._events.put_output({**message, "data": data}, lambda: self._is_ending)
        elif kind == "port":
            self._answers.put(message)
        elif kind == "refused":
            return str(message["reason"])
        elif kind == "signal":
            self._events.put({**message, "host": self.host.name})
        elif kind != "alive":
            self._events.put(message)
        return ""

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


class HostNurseries:
    """The nurseries of several hosts, as one.

    Args:
        hosts: The hosts.
        placed: The host of each worker, by name.
        preload: Modules that each nursery imports.
        environment: Variables for all workers, added to those of their host.
        on_signal: Called, in the thread that receives, if a signal has asked an agent to end. By
            default the host counts as lost.

    Attributes:
        replaces_lost: Whether a host that is lost during the run is asked for again. Its workers
            count as killed, and ``is_ready`` tells when they can be restarted.
        is_short: Whether a lost host has not come back in time.

    Raises:
        HostError: A host cannot be reached, or cannot start workers; names it.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        placed: Mapping[str, Host],
        *,
        preload: Sequence[str] = (),
        environment: Mapping[str, str],
        on_signal: Callable[[], object] | None = None,
    ) -> None:
        self._placed = placed
        self._on_signal = on_signal
        self._events = _Events()
        self._agents: dict[str, HostConnection] = {}
        self._of_key: dict[str, HostConnection] = {}
        self._failure: HostError | None = None
        self.secret = secrets.token_hex(32)
        self.replaces_lost = self.is_short = False
        self._opening: Message = {
            "request": "open",
            "directory": os.getcwd(),
            "environment": dict(environment),
            "preload": list(preload),
            "secret": self.secret,
        }
        try:
            for host in hosts:
                self._agents[host.name] = HostConnection(host, self._opening, self._events)
            for agent in self._agents.values():
                agent.await_opened()
        except BaseException:
            self.close()
            raise

    def reserve_port(self, host: Host) -> int:
        """Returns a port of a host that no other program is given meanwhile."""
        return self._agents[host.name].reserve_port()

    def address_of(self, host: Host) -> str:
        """Returns the address at which the other hosts reach a host now."""
        return self._agents[host.name].address

    def is_ready(self) -> bool:
        """Whether all hosts can start workers, also those that were lost; does not wait.

        Raises:
            HostError: A lost host is not replaced in time.
        """
        try:
            return all(agent.is_ready() for agent in self._agents.values())
        except HostError:
            self.is_short = True
            raise

    def fileno(self) -> int:
        """Returns the descriptor that is readable when there are events."""
        return self._events.fileno()

    def start(self, key: str, worker: WorkerSpec) -> None:
        """Asks for a worker; does not wait for it."""
        agent = self._of_key[key] = self._agents[self._placed[worker.name].name]
        agent.send(
            {
                "request": "start",
                "key": key,
                "name": worker.name,
                "rank": worker.rank,
                "job": worker.job,
                "environment": dict(worker.environment),
            }
        )

    def stop(self, key: str | None, ladder: Ladder) -> None:
        """Has one worker, or all workers, signalled until they end; does not wait for that."""
        found = self._of_key.values() if key is None else [self._of_key.get(key)]
        for agent in {each for each in found if each is not None}:
            agent.send({"request": "stop", "key": key, "ladder": list(ladder)})

    def signal(self, keys: Sequence[str], number: int) -> None:
        """Has a signal sent to workers that run, and not to the processes that they started."""
        for agent in {self._of_key[key] for key in keys if key in self._of_key}:
            agent.send({"request": "signal", "keys": list(keys), "number": number})

    def notify(self) -> None:
        """Lets the workers know that their hosts will be given up soon."""
        for agent in self._agents.values():
            agent.send({"request": "notice"})

    def remove_at_end(self, directory: str) -> None:
        """Does nothing: the folder is one of this host, and its owner removes it."""

    def receive(self) -> list[Message]:
        """Returns the next events.

        Raises:
            HostError: A host is lost, and so are its workers, and it cannot be replaced.
        """
        events: list[Message] = []
        if self._failure is None:
            events = self._next_events()
        if self._failure is not None and not events:
            raise self._failure
        return events

    def drop_output(self) -> None:
        """Does nothing: output that comes later is of no worker that is still followed."""

    def end(self) -> None:
        """Ends all workers and agents, and waits for them."""
        for agent in self._agents.values():
            agent.finish_sending()
        for agent in self._agents.values():
            agent.end()

    def close(self) -> None:
        """Ends the agents and closes the connections; idempotent."""
        self.end()
        self._events.close()

    def _next_events(self) -> list[Message]:
        events: list[Message] = []
        for event in self._events.take():
            if event["event"] == "signal" and self._on_signal is not None:
                self._on_signal()
            elif event["event"] in ("lost", "signal"):
                try:
                    events += self._lose(event)
                except HostError as error:
                    self._failure = error
                    self._events.wake()  # for the next time: the events before it count
                    break
            else:
                if event["event"] in ("ended", "failed"):
                    self._of_key.pop(event["key"], None)
                events.append(event)
        return events

    def _lose(self, event: Message) -> list[Message]:
        """Asks for a lost host again; returns the ends of its workers, and of their output."""
        lost = self._agents[event["host"]]
        error = lost.error(event.get("reason") or "was asked to end by a signal")
        if not (self.replaces_lost and lost.has_opened):
            self.is_short = self.replaces_lost
            raise error
        keys = [key for key, agent in self._of_key.items() if agent is lost]
        for key in keys:
            del self._of_key[key]
        lost.finish_sending()
        lost.end()
        self._agents[lost.host.name] = HostConnection(lost.host, self._opening, self._events)
        no_more: Message = {"event": "output", "data": b""}
        ending: Message = {"event": "ended", "exit_code": -signal.SIGKILL, "loss": str(error)}
        streams = [{**no_more, "key": key, "stream": each} for key in keys for each in _STREAMS]
        return [*streams, *({**ending, "key": key} for key in keys)]


_STREAMS = ("out", "err")
