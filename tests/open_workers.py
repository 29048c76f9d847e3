"""Workers that join and leave one by one, each a process of its own that takes commands.

A warm process forks them; run as a program, this module is that process.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

from tests.leaks import find_leaks, take_state

PRELOAD = (
    "encodings.idna",
    "tests.groups",
    "tests.contract.processes.meta_gradient_functions",
    "torch.utils.serialization",
    "torchweft.mapreduce",
    "torchweft.rpc",
    # Versions of torch differ in their private modules.
    *filter(find_spec, ["torch.profiler._cupti_monitor"]),
)
"""Modules that a warm process imports, so that its workers, many of which need them, do not."""

LIMIT_S = 45.0
"""For any command to a worker; a slower command fails, also on a busy machine."""


class WarmProcess:
    """Forks workers, for one test after the other; ``close`` ends it and all of them."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._asked = itertools.count()

    def ask(self, *command: Any) -> Any:
        number = next(self._asked)
        self._connection.send((number, *command))
        while self._connection.poll(2 * LIMIT_S):
            answered, outcome = self._connection.recv()
            if answered == number:  # not the late answer to a command that was given up
                return outcome
        raise TimeoutError(f"no answer to {command}")

    def close(self) -> None:
        self._connection.close()
        self._process.wait(LIMIT_S)


class OpenWorkers:
    """Starts workers and makes them run functions; ``close`` kills those that are left.

    Args:
        process: Forks the workers. Those of other ``OpenWorkers`` may have the same names.
        modules: Modules that the process imports first, so that no worker has to.
    """

    _numbers = itertools.count()

    def __init__(self, process: WarmProcess, *modules: str) -> None:
        self._process = process
        self._number = next(self._numbers)
        process.ask("import", modules)

    def do(self, worker: str, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function in a worker's process, which is started if there is none; blocks."""
        self.begin(worker, function, *args)
        return self.result(worker)

    def begin(self, worker: str, function: Callable[..., Any], *args: Any) -> None:
        """Begins to run a function in a worker's process; ``result`` waits for it."""
        self._process.ask("begin", (self._number, worker), (function, args))

    def result(self, worker: str) -> Any:
        outcome = self._process.ask("result", (self._number, worker))
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def kill(self, worker: str) -> None:
        """Kills a worker's process, and forgets it."""
        self._process.ask("kill", (self._number, worker))

    def close(self) -> None:
        """Kills the workers that are left; raises an error if the warm process leaks anything."""
        leaks = self._process.ask("end", self._number)
        assert not leaks, leaks


class _Worker:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            ours.close()
            _work(Connection(theirs.detach()))
        theirs.close()
        self.connection = Connection(ours.detach())

    def result(self) -> Any:
        try:
            if not self.connection.poll(LIMIT_S):
                return TimeoutError("the worker takes too long")
            return self.connection.recv()
        except (EOFError, ConnectionError) as error:
            return ConnectionError(f"the worker died: {error}")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()


def _work(connection: Connection) -> None:
    """Runs the functions that it receives until the connection ends."""
    try:
        while True:
            function, args = connection.recv()
            try:
                outcome = function(*args)
            except Exception as error:
                traceback.print_exc()
                outcome = error
            try:
                pickle.dumps(outcome)
            except Exception as error:
                outcome = error
            connection.send(outcome)
    except EOFError:
        os._exit(0)


class _Workers:
    """All workers of the process, by the number of their ``OpenWorkers`` and their names."""

    def __init__(self) -> None:
        self._workers: dict[tuple[int, str], _Worker] = {}
        self._before = take_state()

    def __getitem__(self, key: tuple[int, str]) -> _Worker:
        if key not in self._workers:
            self._workers[key] = _Worker()
        return self._workers[key]

    def import_modules(self, names: Sequence[str]) -> None:
        missing = [name for name in names if name not in sys.modules]
        for name in missing:
            importlib.import_module(name)
        if missing:
            # The collectors of all workers would write to the pages of what is imported.
            gc.collect()
            gc.freeze()
        if missing and not self._workers:
            self._before = take_state()

    def kill(self, key: tuple[int, str]) -> None:
        if key in self._workers:
            self._workers.pop(key).kill()

    def end(self, number: int) -> list[str]:
        """Kills the workers of one ``OpenWorkers``; returns leaks, if no other worker is left."""
        for key in [key for key in self._workers if key[0] == number]:
            self.kill(key)
        return [] if self._workers else find_leaks(self._before)

    def end_all(self) -> None:
        for key in list(self._workers):
            self.kill(key)


def _serve(commands: Connection) -> None:
    workers = _Workers()
    workers.import_modules(PRELOAD)
    do: dict[str, Callable[..., Any]] = {
        "import": workers.import_modules,
        "begin": lambda key, told: workers[key].connection.send(told),
        "result": lambda key: workers[key].result(),
        "kill": workers.kill,
        "end": workers.end,
    }
    try:
        while True:
            number, what, *arguments = commands.recv()
            commands.send((number, do[what](*arguments)))
    except EOFError:
        workers.end_all()


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
