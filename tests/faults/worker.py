"""One worker of a run: joins, trains or serves, leaves, and reports how it went."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import logging
import os
import pickle
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.faults import hosts, maps, model, points
from tests.faults.board import Board
from tests.faults.plan import CUT, HOSTS, TRAINER, UNIX, Plan
from tests.internal import overridden
from tests.leaks import find_leaks, take_state
from tests.processes import cutting
from torchweft import rpc
from torchweft.engine.channels.stripes import Stripes
from torchweft.engine.io.secure import TlsOptions
from torchweft.engine.worker.current import current, is_set
from torchweft.errors import RendezvousError, WeftError
from torchweft.secret import Secret

LIMIT_S = 45.0
"""After this time a worker dumps the tracebacks of its threads, and ends."""

INIT_LIMIT_S = 3.0
_SECRET = b"of the runs with random faults"


@dataclass(frozen=True)
class Complaint:
    """An error that ended an operation.

    Attributes:
        type_name: Its type.
        text: Its message.
        is_typed: Whether it is one of Weft's errors.
        names: The workers that it or its causes name in their fields.
        is_memory: Whether it, or a cause of it, is a lack of memory.
    """

    type_name: str
    text: str
    is_typed: bool
    names: tuple[str, ...]
    is_memory: bool


@dataclass
class Report:
    """The outcome of one worker."""

    errors: list[Complaint] = field(default_factory=list)
    result: str = ""
    trained_s: float = 0.0
    ended_s: float = 0.0
    left: dict[str, dict[str, int]] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Place:
    """The parameters of one worker besides the plan.

    Attributes:
        name: Its name.
        store: Where the workers find each other.
        board: Shared by all workers.
        port: The port of the process that breaks connections; 0 for none.
        tls: The TLS options of secure runs.
        commands: The descriptor that the injector's commands come from; owned.
        report: The descriptor that the report goes to; owned.
    """

    name: str
    store: str
    board: Board
    port: int
    tls: TlsOptions | None
    commands: int
    report: int


def work(plan: Plan, place: Place) -> None:
    """Runs a worker in this process, which was forked for it, and ends the process."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    report = Report()
    try:
        _prepare(plan, place, report)
        _live(plan, place, report)
    except BaseException as error:
        logging.getLogger(__name__).exception("the worker's own program failed")
        report.noise.append(f"own program: {error!r}")
    with os.fdopen(place.report, "wb") as stream:
        pickle.dump(report, stream)
    os._exit(0)


def _prepare(plan: Plan, place: Place, report: Report) -> None:
    constants = {"STRIPED_FROM_BYTES": 1 << 19}
    if plan.network != UNIX:
        constants |= {"UNIX_SOCKETS": 0, "CMA_FROM_BYTES": 1 << 60}
    if plan.network != UNIX or not plan.shares_memory:
        os.environ["WEFT_SHM_LIMIT_BYTES"] = "0"
    if plan.program is not None:
        constants["FAN_OUT"] = plan.program.fan_out
        maps.prepare(plan.program)
    os.environ.update(overridden(**constants))
    if plan.network == CUT:
        cutting.dial_through(place.port)
    if plan.network == HOSTS:
        hosts.dial_from(plan.ranks[place.name])
    for number, fault in enumerate(plan.faults):
        if fault.victim == place.name and fault.point:
            points.arm(fault, number, place.board)
    _listen_for_noise(report)
    threading.Thread(target=_obey, args=(place.commands,), name="faults", daemon=True).start()
    # Use torch once, so that what its first use creates exists before anything is counted.
    torch.autograd.backward(torch.ones(4, requires_grad=True).sum())
    TCPStore("127.0.0.1", 0, is_master=True)


def _live(plan: Plan, place: Place, report: Report) -> None:
    before = take_state()
    is_in = _attempt(report, _join, plan, place)
    if is_in and place.name == TRAINER:
        _attempt(report, _train, plan, place, report)
        report.trained_s = time.monotonic()
        # Without a leader the others leave at once, and cannot be asked.
        if not any(plan.leader in error.names for error in report.errors):
            _attempt(report, _count_left, report)
    _attempt(report, rpc.shutdown)
    report.ended_s = time.monotonic()
    report.leaks = find_leaks(before)
    if report.leaks:
        faulthandler.dump_traceback()
    gc.collect()
    if model.Value.alive:
        report.leaks.append(f"{len(model.Value.alive)} values")
    if not any(plan.leader in error.names for error in report.errors):
        report.leaks += maps.left_behind()


def _attempt(report: Report, function: Any, *args: Any) -> bool:
    """Calls a function; notes its error, and returns whether it succeeded."""
    try:
        function(*args)
    except Exception as error:
        report.errors.append(_describe(error))
        return False
    return True


def _join(plan: Plan, place: Place) -> None:
    rank = plan.ranks[place.name]
    options = rpc.RpcBackendOptions(
        init_method=place.store,
        init_timeout=INIT_LIMIT_S,
        num_worker_threads=4 if plan.program is None else plan.program.threads,
        rpc_timeout=LIMIT_S,
        detection_time=plan.detection_s,
        reconnect_time=plan.reconnect_s,
        listen=hosts.address_of(rank) if plan.network == HOSTS else "127.0.0.1",
        secret=Secret(_SECRET) if plan.network == HOSTS else None,
        tls=place.tls if plan.is_secure else None,
    )
    rpc.init_rpc(place.name, rank=rank, world_size=len(plan.ranks), rpc_backend_options=options)


def _train(plan: Plan, place: Place, report: Report) -> None:
    def note(step: int) -> None:
        place.board.step = step

    training = model.Training() if plan.program is None else maps.Training()
    report.result = training.run(note)


def _count_left(report: Report) -> None:
    report.left = model.await_none_left()


def _describe(error: BaseException) -> Complaint:
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    names: list[str] = []
    for each in chain:
        names += [str(name) for name in getattr(each, "missing", ())]
        names += [getattr(each, "worker", "") or ""]
        if isinstance(each, RendezvousError):
            names += re.findall(r"\brank (\d+)", str(each))
    return Complaint(
        type(error).__name__,
        str(error),
        isinstance(error, WeftError),
        tuple(filter(None, names)),
        any(isinstance(each, MemoryError) for each in chain),
    )


# Faults that the injector commands


def _obey(commands: int) -> None:
    """Carries out the injector's commands until the injector ends."""
    with os.fdopen(commands) as stream:
        for line in stream:
            kind, seconds = line.split()
            _DEEDS[kind](float(seconds))


def _hold(seconds: float) -> None:
    """Holds the interpreter lock for a while; checks for signals or deadlines wait, too."""
    libc: Any = ctypes.PyDLL(None)
    libc.usleep(int(seconds * 1e6))


def _break_data(_: float) -> None:
    """Breaks a connection for large tensors, if there is one."""
    if not is_set():
        return  # The training has ended meanwhile.
    for peer in list(current().peers.values()):
        data = peer.kept.get(Stripes.name)
        sending = None if data is None else data.sending
        if sending is not None:
            sending.connections[-1]._socket.shutdown(socket.SHUT_RDWR)


_DEEDS: dict[str, Callable[[float], object]] = {
    "hold": _hold,
    "data": _break_data,
    "exit": lambda _: os._exit(points.EXIT_CODE),
}


# Messages that must not occur


def _listen_for_noise(report: Report) -> None:
    class Noise(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if record.funcName == "_log_unseen":
                return  # A call that the fault ended after training had given it up.
            if record.levelno >= logging.ERROR or "was not released" in text:
                report.noise.append(text)

    log = logging.getLogger("torchweft")
    log.addHandler(Noise())
    log.setLevel(logging.INFO)
    detailed = logging.StreamHandler(sys.stderr)
    detailed.setFormatter(logging.Formatter("%(relativeCreated)d %(threadName)s %(message)s"))
    log.addHandler(detailed)

    def note(of: str, then: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def hook(args: Any) -> Any:
            report.noise.append(f"{of}: {args.exc_value!r}")
            return then(args)

        return hook

    sys.unraisablehook = note("not raised", sys.unraisablehook)
    threading.excepthook = note("in a thread", threading.excepthook)
