"""The launcher's side of the nursery: starts it, requests workers, receives what becomes of them.

A source of workers, the nursery of this host or those of other hosts, tells events in order:

===========  ===========================================================================
event        fields, beside the ``key`` that the worker was started with
===========  ===========================================================================
``started``  ``pid``
``failed``   ``reason``: the worker cannot be started
``output``   ``stream``: ``out`` or ``err``; ``data``: bytes, empty at the end of the stream
``ended``    ``exit_code``; ``is_memory_kill``, which may be None; or ``loss`` of its host
===========  ===========================================================================

The output that a worker has written comes before the news of its end. Processes that it leaves
behind may write more afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torchweft import standard_streams
from torchweft.closing import Closing
from torchweft.errors import LaunchError
from torchweft.launch.control import READ_BYTES, ControlSocket, Ladder, Message
from torchweft.launch.report import describe_exit
from torchweft.launch.worker import WorkerSpec, compute_environment

WARM_MODULES = ("torch", "torchweft.rpc", "torchweft.extending")
"""Modules that workers need and that take long to import."""

END_LIMIT_S = 6.0

# The launcher's path is set first, so that the nursery runs the same Weft as the launcher. The
# path that the interpreter made is passed on for workers that run a script. With -c, the
# interpreter puts the current directory first, which a script does not have.
_BOOT = """\
import sys
from json import loads
own_path = sys.path[0 if getattr(sys.flags, "safe_path", False) else 1 :]
sys.path[:] = loads(sys.argv[1])
from torchweft.launch.nursery_process import main
main(own_path)
"""


class WorkerSource(Protocol):
    """Starts workers and reports their output and ends: one nursery, or those of other hosts."""

    def fileno(self) -> int:
        """Returns the descriptor that is readable when there are events."""

    def is_ready(self) -> bool:
        """Whether workers can be started; does not wait. Raises LaunchError if never again."""

    def start(self, key: str, worker: WorkerSpec) -> None:
        """Asks for a worker; does not wait for it."""

    def stop(self, key: str | None, ladder: Ladder) -> None:
        """Has one worker, or all workers, signalled until they end; does not wait for that."""

    def signal(self, keys: Sequence[str], number: int) -> None:
        """Has a signal sent to workers that run, and not to the processes that they started."""

    def remove_at_end(self, directory: str) -> None:
        """Has a directory of this host removed at the end, also if this process is killed."""

    def receive(self) -> list[Message]:
        """Returns the next events; raises LaunchError if the workers are lost."""

    def drop_output(self) -> None:
        """Reads no more output of the workers that were started so far."""

    def end(self) -> None:
        """Ends all workers, and waits; the last events can still be read."""

    def close(self) -> None:
        """Ends all workers and closes the connections; idempotent."""


class _Pipe(NamedTuple):
    """The reading end of an output stream of a worker."""

    descriptor: int
    key: str
    stream: str


class Nursery(Closing):
    """A helper process that forks workers. They end with it, and it ends with this process.

    Make a nursery yourself to start several clusters in succession from the same warm process::

        with Nursery() as nursery:
            with torchweft.cluster(2, nursery=nursery):
                ...
            with torchweft.cluster(8, nursery=nursery):  # starts in milliseconds
                ...

    Args:
        preload: Modules that the nursery imports, so that the workers need not.
        environment: Its environment; by default that of this process. Workers have their own
            environments, but libraries that read variables at import read this one.
    """

    def __init__(
        self,
        *,
        preload: Sequence[str] = WARM_MODULES,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        standard_streams.reserve_descriptors()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                _command(theirs.fileno(), preload),
                env=compute_environment(os.environ, 1)
                if environment is None
                else dict(environment),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._control = ControlSocket(ours)
        self._is_lost = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._control, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        """The nursery's process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Returns the descriptor that is readable when there are events."""
        return self._selector.fileno()

    def is_ready(self) -> bool:
        """Whether workers can be started: always, if the nursery lives."""
        return True

    def start(self, key: str, worker: WorkerSpec) -> None:
        """Asks for a worker; does not wait for it."""
        request: Message = {
            "request": "start",
            "key": key,
            "job": worker.job,
            "environment": dict(worker.environment),
            "directory": worker.directory,
            "notes": worker.notes,
        }
        writing = [self._open_pipe(key, stream) for stream in ("out", "err")]
        try:
            self._control.send(request, writing)
        except OSError:
            raise self._lost() from None
        finally:
            for descriptor in writing:
                os.close(descriptor)

    def stop(self, key: str | None, ladder: Ladder) -> None:
        """Has one worker, or all workers, signalled until they end; does not wait for that."""
        with contextlib.suppress(OSError):  # without a nursery there are no workers
            self._control.send({"request": "stop", "key": key, "ladder": list(ladder)})

    def signal(self, keys: Sequence[str], number: int) -> None:
        """Has a signal sent to workers that run, and not to the processes that they started."""
        with contextlib.suppress(OSError):  # without a nursery there are no workers
            self._control.send({"request": "signal", "keys": list(keys), "number": number})

    def remove_at_end(self, directory: str) -> None:
        """Has the nursery remove a directory when it ends, also if this process is killed."""
        with contextlib.suppress(OSError):
            self._control.send({"request": "remove at end", "directory": directory})

    def receive(self) -> list[Message]:
        """Returns the next events; blocks unless the descriptor is readable.

        Raises:
            LaunchError: The nursery is gone, and so are its workers.
        """
        events: list[Message] = []
        messages: list[Message] = []
        for ready, _ in self._selector.select():
            if ready.data is not None:
                self._read(ready.data, events)
                continue
            try:
                messages = self._control.receive()
            except (EOFError, OSError):
                if self._is_lost:
                    raise self._lost() from None
                self._is_lost = True  # once more, so that the output that was read is not lost
        for message in messages:
            if message["event"] == "ended":
                for pipe in self._pipes(message["key"]):
                    while self._read(pipe, events):
                        pass
            events.append(message)
        return events

    def drop_output(self) -> None:
        """Reads no more output of the workers that were started so far."""
        for pipe in self._pipes():
            self._close_pipe(pipe)

    def end(self) -> None:
        """Ends all workers and the nursery, and waits; its last events can still be read."""
        self._control.finish_sending()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel then kills the workers
            self._process.wait()

    def close(self) -> None:
        """Ends the nursery and closes the connection; idempotent."""
        self.end()
        self.drop_output()
        self._selector.close()
        self._control.close()

    def __repr__(self) -> str:
        state = "running" if self._process.poll() is None else "ended"
        return f"<Nursery (pid {self.pid}), {state}>"

    def _open_pipe(self, key: str, stream: str) -> int:
        """Opens a pipe for a stream of a worker; returns its writing end."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        self._selector.register(reading, selectors.EVENT_READ, _Pipe(reading, key, stream))
        return writing

    def _pipes(self, key: str | None = None) -> list[_Pipe]:
        entries = self._selector.get_map() or {}  # none once it is closed
        pipes = [entry.data for entry in entries.values() if entry.data is not None]
        return [pipe for pipe in pipes if key in (None, pipe.key)]

    def _read(self, pipe: _Pipe, events: list[Message]) -> bool:
        """Reads output once; returns whether there may be more to read now."""
        try:
            data = os.read(pipe.descriptor, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._close_pipe(pipe)
        events.append({"event": "output", "key": pipe.key, "stream": pipe.stream, "data": data})
        return bool(data)

    def _close_pipe(self, pipe: _Pipe) -> None:
        self._selector.unregister(pipe.descriptor)
        os.close(pipe.descriptor)

    def _lost(self) -> LaunchError:
        self.end()
        ending = describe_exit(self._process.returncode)
        return LaunchError(
            f"the process that starts the workers (pid {self.pid}) {ending}; "
            "its standard error says why",
            exit_code=self._process.returncode,
        )


def _command(connection: int, preload: Sequence[str]) -> list[str]:
    return [
        sys.executable,
        *_interpreter_flags(),
        "-c",
        _BOOT,
        json.dumps(sys.path),
        str(connection),
        str(os.getpid()),
        " ".join(preload),
    ]


def _interpreter_flags() -> list[str]:
    """Returns the flags that this interpreter was started with, to start another with them."""
    # multiprocessing and test.support use this too; no public function returns the same list.
    return list(vars(subprocess)["_args_from_interpreter_flags"]())
