"""The launcher's part on another host: starts workers there, and ends them with the connection.

``python -m torchweft.launch.host_agent`` runs on each host, started by ``ssh`` or ``srun``. It
reads requests from standard input and writes events and the workers' output to standard output;
nothing is installed, and nothing listens. Shells and remote set-ups may print text before the agent
begins, so it first writes a mark. The first request brings the secret of the group. The agent puts
it into a private folder that is removed at the end; no argument list or log has it.

The workers are children of a nursery, as on the launcher's own host. They end when the agent ends,
however it ends, and the agent ends when its input does, or is silent for too long: a host whose
network is gone frees itself.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import selectors
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable

from torchweft import notice
from torchweft.errors import LaunchError
from torchweft.launch.control import READ_BYTES, Message, Unpacker, pack
from torchweft.launch.nursery import Nursery
from torchweft.launch.signals import watched_signals
from torchweft.launch.worker import HeldPort, WorkerSpec, compute_environment

MARK = b"torchweft host agent 1\n"
ALIVE_S = 5.0
"""Seconds between the messages by which launcher and agent show that they are there."""
SILENCE_S = 30.0
"""Seconds without a message after which the other side is gone, although nothing said so."""

_SECRET_NAME = "secret"
_NOTICE_NAME = "notice"


class _Agent:
    """The loop of one host's agent."""

    def __init__(self, source: int, sink: int) -> None:
        self._source = source
        self._sink = sink
        self._unpacker = Unpacker()
        self._selector = selectors.DefaultSelector()
        self._selector.register(source, selectors.EVENT_READ, self._receive)
        self._received: deque[Message] = deque()
        self._nursery: Nursery | None = None
        self._environment: dict[str, str] = {}
        self._notes = ""
        self._directory = ""
        self._port = HeldPort("")
        self._is_over = False
        self._heard_s = self._shown_s = time.monotonic()
        self._requests: dict[str, Callable[[Message], None]] = {
            "open": self._open,
            "port": self._reserve_port,
            "start": self._start,
            "stop": self._stop,
            "signal": self._signal,
            "notice": lambda request: self._notify(),
            "alive": lambda request: None,
        }

    def run(self) -> None:
        """Serves the launcher until its connection ends."""
        try:
            with watched_signals(self._selector, self._signalled):
                while not self._is_over:
                    self._turn()
        except BrokenPipeError:
            pass  # the launcher is gone
        finally:
            if self._nursery is not None:
                self._make(notice.ENDING)
                self._nursery.close()

    def _turn(self) -> None:
        for event, _ in self._selector.select(ALIVE_S):
            event.data()
        while self._received and not self._is_over:
            request = self._received.popleft()
            self._requests[request["request"]](request)
        if time.monotonic() - self._shown_s >= ALIVE_S:
            self._shown_s = time.monotonic()
            self._tell({"event": "alive"})
        self._is_over = self._is_over or self._is_forsaken()

    def _is_forsaken(self) -> bool:
        """Whether the launcher has been silent for so long that it must be gone."""
        return time.monotonic() - self._heard_s > SILENCE_S

    def _signalled(self, number: int) -> None:
        """Tells the launcher of a request to end; the launcher decides, unless it is gone."""
        if number == signal.SIGHUP:
            self._is_over = True
        else:
            self._notify()
            self._tell({"event": "signal", "number": number})

    def _notify(self) -> None:
        """Lets the workers see that this host will be given up."""
        self._make(_NOTICE_NAME)

    def _make(self, name: str) -> None:
        """Makes a file in the private folder, at which workers look."""
        with contextlib.suppress(OSError), open(os.path.join(self._notes, name), "w"):
            pass

    def _tell(self, message: Message) -> None:
        """Writes a message; a launcher that does not read must at least show that it is alive."""
        left = memoryview(pack(message))
        while left:
            if self._is_over or self._is_forsaken():
                raise BrokenPipeError
            heard, ready, _ = select.select([self._source], [self._sink], [], ALIVE_S)
            if ready:
                with contextlib.suppress(BlockingIOError):
                    left = left[os.write(self._sink, left) :]
            elif heard:
                self._receive()

    def _receive(self) -> None:
        try:
            data = os.read(self._source, READ_BYTES)
        except BlockingIOError:
            return
        self._heard_s = time.monotonic()
        self._is_over = self._is_over or not data
        self._received.extend(self._unpacker.feed(data))

    # Requests

    def _open(self, request: Message) -> None:
        directory = request["directory"]
        if not os.path.isdir(directory):
            self._refuse(f"there is no folder {directory!r}, where the run was started")
            return
        os.chdir(directory)
        self._directory = directory
        self._notes = tempfile.mkdtemp(prefix="weft-host-")
        path = os.path.join(self._notes, _SECRET_NAME)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(request["secret"])
        own = {
            "WEFT_SECRET_FILE": path,
            notice.VARIABLE: os.path.join(self._notes, _NOTICE_NAME),
        }
        base = {**os.environ, **request["environment"], **own}
        base.pop("WEFT_SECRET", None)
        self._environment = compute_environment(base, request["workers"])
        self._nursery = Nursery(preload=request["preload"], environment=self._environment)
        self._nursery.remove_at_end(self._notes)
        self._selector.register(self._nursery, selectors.EVENT_READ, self._forward_events)

    def _refuse(self, reason: str) -> None:
        self._tell({"event": "refused", "reason": reason})
        self._is_over = True

    def _reserve_port(self, request: Message) -> None:
        """Reserves a free port, and reports it."""
        self._tell({"event": "port", "number": self._port.take()})

    def _start(self, request: Message) -> None:
        with contextlib.suppress(FileNotFoundError):  # of a former life of the group
            os.unlink(os.path.join(self._notes, notice.ENDING))
        assert self._nursery is not None
        worker = WorkerSpec(
            request["name"],
            request["rank"],
            request["job"],
            {**self._environment, **request["environment"]},
            self._notes,
            self._directory,
        )
        self._nursery.start(request["key"], worker)

    def _stop(self, request: Message) -> None:
        if self._nursery is not None:
            if any(number == signal.SIGTERM for number, _ in request["ladder"]):
                self._make(notice.ENDING)
            self._nursery.stop(request["key"], request["ladder"])

    def _signal(self, request: Message) -> None:
        if self._nursery is not None:
            self._nursery.signal(request["keys"], request["number"])

    def _forward_events(self) -> None:
        assert self._nursery is not None
        try:
            events = self._nursery.receive()
        except LaunchError as error:
            self._refuse(str(error))
            return
        for event in events:
            if event["event"] == "output":
                self._tell({**event, "data": base64.b64encode(event["data"]).decode()})
            else:
                self._tell(event)


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of ``data``; blocks until it is written."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def main() -> None:
    """Serves one launcher over standard input and output."""
    # Ray blocks this signal in the processes that it starts, and workers inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Nothing else may write to the connection, or read from it.
    source, sink = os.dup(0), os.dup(1)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    with contextlib.suppress(BrokenPipeError):
        write_all(sink, MARK)
        os.set_blocking(sink, False)
        _Agent(source, sink).run()


if __name__ == "__main__":
    main()
