"""Runs one plan: forks the workers, injects the plan's faults, and waits for the workers' ends.

This process imports and forks; it never computes or starts a thread, because forked workers would
inherit locks that are never released.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults import hosts
from tests.faults.board import Board
from tests.faults.plan import (
    CABLE,
    CUT,
    CUTS,
    KILL,
    MOST_CUTS,
    PARTITION,
    STALL,
    STOP,
    Fault,
    Plan,
)
from tests.faults.worker import LIMIT_S, Place, Report, work
from tests.leaks import find_leaks, take_state
from tests.processes.cutting import CuttingNetwork
from torchweft.engine.io.secure import TlsOptions

KILL_LIMIT_S = LIMIT_S + 5.0
_POLL_S = 0.002


@dataclass
class Ending:
    """How one worker ended: its exit code, negative for a signal, and its report."""

    exit_code: int | None = None
    ended_s: float = 0.0
    report: Report | None = None


@dataclass
class Outcome:
    """How a run went.

    Attributes:
        endings: The endings of all workers, by name.
        struck_s: When each fault struck, by its place in the plan; None where it did not.
        took_s: How long it took.
        left: The resources that it left in this process.
    """

    endings: dict[str, Ending]
    struck_s: list[float | None] = field(default_factory=list)
    took_s: float = 0.0
    left: list[str] = field(default_factory=list)

    @property
    def has_struck(self) -> bool:
        """Whether any fault did strike."""
        return any(struck_s is not None for struck_s in self.struck_s)


def run(plan: Plan, tls: TlsOptions, folder: Path) -> Outcome:
    """Runs a plan; blocks until all of it is over.

    Args:
        plan: The plan.
        tls: The TLS options of secure runs.
        folder: The folder for the workers' files.
    """
    before = take_state()
    begin_s = time.monotonic()
    outcome = _Run(plan, tls, folder).run()
    outcome.took_s = time.monotonic() - begin_s
    outcome.left = find_leaks(before)
    return outcome


class _Run:
    def __init__(self, plan: Plan, tls: TlsOptions, folder: Path) -> None:
        self._plan = plan
        self._tls = tls
        self._folder = folder
        self._board = Board()
        self._network: CuttingNetwork | None = None
        self._pids: dict[str, int] = {}
        self._commands: dict[str, int] = {}
        self._reports: dict[str, int] = {}
        self._endings = {name: Ending() for name in plan.ranks}
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._parted: set[int] = set()
        self._is_over = False

    def run(self) -> Outcome:
        with self._surroundings():
            for name in self._plan.ranks:
                self._fork(name)
            self._wait()
            self._is_over = True
        struck = [self._board.struck_s(number) for number in range(len(self._plan.faults))]
        self._board.close()
        return Outcome(self._endings, struck)

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Sets up what the workers need; at the end removes it, and the remaining workers."""
        plan = self._plan
        stores = tempfile.mkdtemp(dir=self._folder)
        if plan.has_store_server:
            # Not one of the ephemeral ports.
            self._store = f"tcp://127.0.0.1:{20_000 + plan.number % 10_000}"
        else:
            self._store = f"file://{stores}/store"
        if plan.network == CUT:
            has_cuts = any(fault.kind == CUTS for fault in plan.faults)
            self._network = CuttingNetwork(
                plan.number, plan.cut_bytes, MOST_CUTS if has_cuts else 0
            )
        try:
            yield
        finally:
            for pid in self._pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for descriptor in [*self._commands.values(), *self._reports.values()]:
                os.close(descriptor)
            for _, undo in self._due:
                undo()
            for rank in self._parted:
                hosts.plug_in(rank)
            if self._network is not None:
                cuts = self._network.close()["cuts"]
                for number, fault in enumerate(plan.faults):
                    if fault.kind == CUTS and cuts:
                        self._board.strike(number)
            shutil.rmtree(stores)

    def _fork(self, name: str) -> None:
        commands, to_worker = os.pipe()
        from_worker, report = os.pipe()
        pid = os.fork()
        if not pid:
            self._become(name, commands, report)
        os.close(commands)
        os.close(report)
        self._pids[name], self._commands[name] = pid, to_worker
        self._reports[name] = from_worker

    def _become(self, name: str, commands: int, report: int) -> None:
        try:
            log = os.open(self._folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for standard in (1, 2):
                os.dup2(log, standard)
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor not in (commands, report):
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            port = 0 if self._network is None else self._network.port
            work(
                self._plan,
                Place(name, self._store, self._board, port, self._tls, commands, report),
            )
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    # Waiting

    def _wait(self) -> None:
        limit_s = time.monotonic() + KILL_LIMIT_S
        waiting = [
            (number, fault)
            for number, fault in enumerate(self._plan.faults)
            if not fault.point and fault.kind != CUTS
        ]
        said: dict[str, bytes] = dict.fromkeys(self._plan.ranks, b"")
        for descriptor in self._reports.values():
            os.set_blocking(descriptor, False)
        while self._pids and time.monotonic() < limit_s:
            for each in list(waiting):
                if self._board.step >= each[1].step:
                    waiting.remove(each)
                    self._later(each[1].delay_s, lambda each=each: self._inject(*each))  # type: ignore[misc]
            self._do_what_is_due()
            for name, descriptor in self._reports.items():
                said[name] += _read(descriptor)
            self._reap()
            time.sleep(_POLL_S)
        for name, text in said.items():
            text += _read(self._reports[name])
            if text:
                self._endings[name].report = pickle.loads(text)

    def _reap(self) -> None:
        for name, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[name]
                self._endings[name].exit_code = os.waitstatus_to_exitcode(status)
                self._endings[name].ended_s = time.monotonic()

    def _later(self, delay_s: float, do: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + delay_s, do))

    def _do_what_is_due(self) -> None:
        now_s = time.monotonic()
        for each in [each for each in self._due if each[0] <= now_s]:
            self._due.remove(each)
            each[1]()

    # Faults

    def _inject(self, number: int, fault: Fault) -> None:
        pid = self._pids.get(fault.victim)
        if self._is_over or pid is None:
            return
        self._board.strike(number)
        rank = self._plan.ranks[fault.victim]
        if fault.kind == KILL:
            os.kill(pid, signal.SIGKILL)
        elif fault.kind == PARTITION:
            hosts.unplug(rank)
            self._parted.add(rank)
        elif fault.kind == CABLE:
            hosts.unplug(rank)
            self._later(fault.seconds, lambda: self._plug_in(rank))
        elif fault.kind == STOP:
            os.kill(pid, signal.SIGSTOP)
            self._later(fault.seconds, lambda: self._continue(fault.victim))
        elif fault.kind == STALL:
            assert self._network is not None
            network = self._network._process.pid
            os.kill(network, signal.SIGSTOP)
            self._later(fault.seconds, lambda: os.kill(network, signal.SIGCONT))
        else:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._commands[fault.victim], f"{fault.kind} {fault.seconds}\n".encode())

    def _plug_in(self, rank: int) -> None:
        if rank not in self._parted:
            hosts.plug_in(rank)

    def _continue(self, victim: str) -> None:
        pid = self._pids.get(victim)
        if pid is not None:
            os.kill(pid, signal.SIGCONT)


def _read(descriptor: int) -> bytes:
    parts = []
    with contextlib.suppress(BlockingIOError):
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    return b"".join(parts)
