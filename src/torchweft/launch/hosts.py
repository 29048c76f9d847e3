"""The nurseries of several hosts, as one.

``HostNurseries`` has the methods of one nursery. So a run over hosts is followed, restarted,
reported and ended by the code that follows local workers.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

from torchweft.errors import HostError
from torchweft.launch.control import Ladder, Message
from torchweft.launch.framing import READ_BYTES
from torchweft.launch.host_connection import Host, HostConnection
from torchweft.launch.worker import WorkerSpec


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
        self._events: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._agents: dict[str, HostConnection] = {}
        self._of_key: dict[str, HostConnection] = {}
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
                self._agents[host.name] = HostConnection(host, self._opening, self._post)
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
        return self._wake_read.fileno()

    def start(self, key: str, worker: WorkerSpec, stdout: int, stderr: int) -> None:
        """Asks for a worker that writes to the two descriptors; does not wait for it."""
        agent = self._of_key[key] = self._agents[self._placed[worker.name].name]
        agent.start(key, worker, stdout, stderr)

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
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(READ_BYTES)
        events: list[Message] = []
        while not self._events.empty():
            event = self._events.get()
            if event["event"] == "signal" and self._on_signal is not None:
                self._on_signal()
            elif event["event"] in ("lost", "signal"):
                events += self._lose(event)
            else:
                if event["event"] in ("ended", "failed"):
                    self._of_key.pop(event["key"], None)
                events.append(event)
        return events

    def _lose(self, event: Message) -> list[Message]:
        """Asks for a lost host again; returns the ends of its workers."""
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
        self._agents[lost.host.name] = HostConnection(lost.host, self._opening, self._post)
        ending: Message = {"event": "ended", "exit_code": -signal.SIGKILL, "loss": str(error)}
        return [{**ending, "key": key, "is_far": True} for key in keys]

    def end(self) -> None:
        """Ends all workers and agents, and waits for them."""
        for agent in self._agents.values():
            agent.finish_sending()
        for agent in self._agents.values():
            agent.end()

    def close(self) -> None:
        """Ends the agents and closes the connections; idempotent."""
        self.end()
        self._wake_read.close()
        self._wake_write.close()

    def _post(self, event: Message) -> None:
        self._events.put(event)
        with contextlib.suppress(OSError):  # full, so that it is readable; or closed
            self._wake_write.send(b"!")
