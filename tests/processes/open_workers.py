"""Workers that join and leave one by one, each a process of its own, told what to do one by one.

A warm process forks them; run as a program, this is that process.
"""

from __future__ import annotations

import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LIMIT_S = 20.0


class OpenWorkers:
    """Starts workers and has them run functions; ends all that is left at ``close``.

    Args:
        modules: What the warm process imports, so that no worker has to.
    """

    def __init__(self, *modules: str) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())

    def do(self, worker: str, function: Callable[..., Any], *args: Any) -> Any:
        """Runs a function in a worker's process, which is started if there is none; blocks."""
        self.begin(worker, function, *args)
        return self.result(worker)

    def begin(self, worker: str, function: Callable[..., Any], *args: Any) -> None:
        """Begins to run a function in a worker's process; ``result`` waits for it."""
        self._ask("begin", worker, (function, args))

    def result(self, worker: str) -> Any:
        outcome = self._ask("result", worker, None)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def kill(self, worker: str) -> None:
        """Kills a worker's process, and forgets it."""
        self._ask("kill", worker, None)

    def _ask(self, *command: Any) -> Any:
        self._connection.send(command)
        if not self._connection.poll(2 * LIMIT_S):
            raise TimeoutError(f"no answer to {command}")
        return self._connection.recv()

    def close(self) -> None:
        self._connection.close()
        self._process.wait(LIMIT_S)


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
        except EOFError as error:
            return ConnectionError(f"the worker died: {error}")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.connection.close()


def _work(connection: Connection) -> None:
    """Runs what it is told until nobody tells it anything."""
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


def _serve(commands: Connection) -> None:
    import torchweft.rpc  # noqa: F401  # The workers have it from here.

    workers: dict[str, _Worker] = {}
    try:
        while True:
            what, name, argument = commands.recv()
            if name not in workers:
                workers[name] = _Worker()
            worker = workers[name]
            if what == "kill":
                workers.pop(name).kill()
                commands.send(None)
            elif what == "begin":
                worker.connection.send(argument)
                commands.send(None)
            else:
                commands.send(worker.result())
    except EOFError:
        for worker in workers.values():
            worker.kill()


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    _serve(Connection(int(sys.argv[1])))
