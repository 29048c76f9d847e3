"""The launcher's side of the nursery: starts it, requests workers, receives how they end."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from torchweft import standard_streams
from torchweft.closing import Closing
from torchweft.errors import LaunchError
from torchweft.launch.control import ControlSocket, Ladder, Message
from torchweft.launch.report import describe_exit
from torchweft.launch.worker import WorkerSpec, compute_environment

WARM_MODULES = ("torch", "torchweft.rpc")
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
    """Starts workers and reports their ends: a nursery of this host, or those of other hosts."""

    def fileno(self) -> int:
        """Returns the descriptor that is readable when there are events."""

    def is_ready(self) -> bool:
        """Whether workers can be started; does not wait. Raises LaunchError if never again."""

    def start(self, key: str, worker: WorkerSpec, stdout: int, stderr: int) -> None:
        """Asks for a worker that writes to the two descriptors; does not wait for it."""

    def stop(self, key: str | None, ladder: Ladder) -> None:
        """Has one worker, or all workers, signalled until they end; does not wait for that."""

    def signal(self, keys: Sequence[str], number: int) -> None:
        """Has a signal sent to workers that run, and not to the processes that they started."""

    def remove_at_end(self, directory: str) -> None:
        """Has a directory of this host removed at the end, also if this process is killed."""

    def receive(self) -> list[Message]:
        """Returns the next events; raises LaunchError if the workers are lost."""

    def end(self) -> None:
        """Ends all workers, and waits; the last events can still be read."""

    def close(self) -> None:
        """Ends all workers and closes the connections; idempotent."""


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

    @property
    def pid(self) -> int:
        """The nursery's process id."""
        return self._process.pid

    def fileno(self) -> int:
        """Returns the descriptor that is readable when there are events."""
        return self._control.fileno()

    def is_ready(self) -> bool:
        """Whether workers can be started: always, if the nursery lives."""
        return True

    def start(self, key: str, worker: WorkerSpec, stdout: int, stderr: int) -> None:
        """Asks for a worker that writes to the two descriptors; does not wait for it."""
        request: Message = {
            "request": "start",
            "key": key,
            "job": worker.job,
            "environment": dict(worker.environment),
            "directory": worker.directory,
            "notes": worker.notes,
        }
        try:
            self._control.send(request, [stdout, stderr])
        except OSError:
            raise self._lost() from None

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
        """Returns the next events; blocks until there are some.

        Raises:
            LaunchError: The nursery is gone, and so are its workers.
        """
        try:
            return self._control.receive()
        except (EOFError, OSError):
            raise self._lost() from None

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
        self._control.close()

    def __repr__(self) -> str:
        state = "running" if self._process.poll() is None else "ended"
        return f"<Nursery (pid {self.pid}), {state}>"

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
