"""A side of the comparison: two processes that live through the run and stand still in between.

An idle torch RPC process keeps its threads polling and burns half a core, which would be charged
to whoever is measured meanwhile. So a side is stopped by SIGSTOP except while it is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Round:
    """What one side did in one round of one work.

    Attributes:
        seconds: Of each call; where calls overlap, of each batch, divided by its calls.
        cpu_s: CPU time of both processes for a call.
    """

    seconds: list[float]
    cpu_s: float


class Side:
    """Two worker processes, and orders to the caller among them."""

    def __init__(self, api: str, caller: subprocess.Popen[str], callee: subprocess.Popen[str]):
        self.api = api
        self._caller = caller
        self._callee = callee
        self.works = set(self._read_answer())

    def measure(self, work: str, calls: int, warm_up: int) -> Round:
        """Wakes both processes, has ``calls`` calls made, and puts them to sleep again."""
        order = {"work": work, "calls": calls, "warm_up": warm_up, "callee": self._callee.pid}
        with self._awake():
            assert self._caller.stdin is not None
            print(json.dumps(order), file=self._caller.stdin, flush=True)
            answer = self._read_answer()
        return Round(**answer)

    def sleep(self) -> None:
        """Stops both processes."""
        self._signal(signal.SIGSTOP)

    def stop(self) -> None:
        """Ends both processes, by force where they don't end by themselves."""
        self._signal(signal.SIGCONT)
        assert self._caller.stdin is not None
        self._caller.stdin.close()
        for process in (self._caller, self._callee):
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                print(f"{self.api}: a process did not shut down and is killed", file=sys.stderr)
                process.kill()
                process.wait()
        assert self._caller.stdout is not None
        self._caller.stdout.close()

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.sleep()

    def _signal(self, number: signal.Signals) -> None:
        for process in (self._caller, self._callee):
            if process.poll() is None:
                process.send_signal(number)

    def _read_answer(self) -> Any:
        assert self._caller.stdout is not None
        line = self._caller.stdout.readline()
        if not line:
            raise RuntimeError(f"the caller of side {self.api} has ended; its errors are above")
        return json.loads(line)


@contextlib.contextmanager
def started_side(api: str, cores: tuple[set[int], set[int]]) -> Iterator[Side]:
    """Starts the caller and the callee of ``api`` on their cores, and stops them at the end."""
    with contextlib.ExitStack() as ends:
        settings: tuple[list[str], list[str]]
        descriptors: list[int] = []
        if api == "raw":
            pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            descriptors = [ends.enter_context(end).fileno() for end in pair]
            settings = ([f"--descriptor={descriptors[0]}"], [f"--descriptor={descriptors[1]}"])
        else:
            port = f"--port={_free_port()}"
            settings = ([port], [port])
        callee = _start(api, "callee", cores[1], settings[1], descriptors[1:])
        caller = _start(api, "caller", cores[0], settings[0], descriptors[:1])
        ends.close()  # or the callee never sees the end of its socket
    try:
        side = Side(api, caller, callee)
    except BaseException:
        for process in (caller, callee):
            process.kill()
            process.wait()
        raise
    side.sleep()
    try:
        yield side
    finally:
        side.stop()


def _start(
    api: str, role: str, cores: set[int], settings: list[str], descriptors: list[int]
) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.calls.worker",
        f"--api={api}",
        f"--role={role}",
    ]
    command += [f"--cores={','.join(map(str, sorted(cores)))}", *settings]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE if role == "caller" else subprocess.DEVNULL,
        stdout=subprocess.PIPE if role == "caller" else subprocess.DEVNULL,
        pass_fds=descriptors,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def _free_port() -> int:
    """Returns a port that was free a moment ago; both processes of a side must know it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
