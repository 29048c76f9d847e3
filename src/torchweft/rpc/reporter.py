"""Reports what one worker does, to observers and to files.

Threads note what they wait for (``Reactor.waiting``), and which call they run. Stacks tell the line
of the program. A thread may go on meanwhile, so a reported wait may just have ended.

The timer thread notices a wait that takes long, and a thread of the reactor writes the file, so
that threads of the program need not run. The worker that waits tells all others: the one that it
waits for, through others perhaps, may wait for none itself.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import math
import os
import queue
import resource
import signal
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from torchweft import knobs
from torchweft.engine.protocol.calls import ServedCall as Served
from torchweft.engine.protocol.observing import (
    CALL,
    SHUTDOWN,
    NumberRow,
    NumberTable,
    Wait,
    call_key,
    reference_key,
)
from torchweft.engine.protocol.registration import HOST
from torchweft.engine.wire.frames import Frame, encode_frame
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker import current as current_agent
from torchweft.engine.worker.agent import Slot
from torchweft.engine.worker.calls import PendingCall
from torchweft.engine.worker.peers import Peer
from torchweft.errors import ConfigurationError, NotInitialized, WorkerLost
from torchweft.files import replacing
from torchweft.reports import (
    DETAIL,
    FILE_SUFFIX,
    METRICS,
    REPORT,
    WHO,
    Event,
    HeldReference,
    Identity,
    Member,
    OpenCall,
    Report,
    ServedCall,
    Thread,
    Traffic,
    encode,
)
from torchweft.rpc.counting import LEASE_S, METRICS_LEASE_S, Counting
from torchweft.rpc.observed import (
    TELLERS,
    Teller,
    function_of,
    health_of,
    inwards,
    is_own,
    lines,
    served_by,
    source_of,
    stacks_of,
    thread_frames,
    write_stacks_on_signal,
)
from torchweft.rpc.serving import Call, key_of
from torchweft.rpc.watching import name_of
from torchweft.rpc.worker import Worker

_LIBRARIES = tuple(
    os.path.dirname(module.__file__ or "") + os.sep for module in (os, torch) if module.__file__
)
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_LOCKING = {threading.__file__, queue.__file__}
_WAIT_ALL = torch.futures.wait_all.__code__


def threads(worker: Worker, *, with_frames: bool) -> Iterator[Thread]:
    """Yields the threads and coroutines of a worker; not the calling thread."""
    has_source = not worker.agent.me.registration.is_strict
    notes = worker.agent.reactor.notes.copy()
    serving = worker.serving.copy()
    for each in thread_frames():
        code = list(each.frames)
        own = bool(code) and not each.is_main and not any(map(_is_of_program, code))
        call = serving.get(each.ident)
        note = notes.get(each.ident, _no_note)()
        parts = _in_wait_all(worker, each.stack, call) if note is None else note.parts()
        yield Thread(
            name=each.name,
            is_idle=not code,
            is_own=own,
            is_main=each.is_main,
            serves="" if call is None or call.has_ended else key_of(call),
            waits=tuple(_told(worker, parts)),
            needs_any=bool(parts) and (note is None or note.needs_any),
            is_at_lock=bool(code) and not own and _is_at_lock(each.stack[-1]),
            place=_place(code),
            frames=lines(code, has_source) if with_frames else (),
        )
    for name, stack in worker.coroutines.frames():
        code = inwards(stack)
        told = lines(code, has_source) if with_frames else ()
        yield Thread(name, False, False, False, "", (), False, _place(code), told)


def _no_note() -> None:
    """Stands for the note of a thread that has none."""


def _in_wait_all(
    worker: Worker, stack: Sequence[FrameType], parent: Served | None
) -> list[PendingCall]:
    """Returns calls any of which a thread may wait for that has noted nothing.

    PyTorch's ``wait_all`` blocks in C++ for futures that it tells nobody. So the thread may wait
    for any of the calls that were made where it is.
    """
    if not any(frame.f_code is _WAIT_ALL for frame in stack):
        return []
    return [call for call in worker.agent.calls.all() if call.parent is parent]


def _told(worker: Worker, parts: Iterable[PendingCall | Wait]) -> Iterator[Wait]:
    name = worker.agent.info.name
    for part in parts:
        if isinstance(part, Wait):
            yield part
        elif part.number:
            key, function = call_key(name, part.number), name_of(part.function)
            yield Wait(CALL, key, part.elapsed_s, function, (part.worker_name,))


# The program's line


def _place(frames: Sequence[FrameType]) -> str:
    """Returns the innermost line of the program; else that of Weft or of a library."""
    program = list(filter(_is_of_program, frames))
    for frame in [*program[-1:], *frames[-1:]]:
        return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def _is_of_program(frame: FrameType) -> bool:
    return not is_own(frame) and not _is_library(frame)


def _is_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if path.startswith(_LIBRARIES[1:]):
        return True
    return path.startswith((_LIBRARIES[0], "<frozen")) and _INSTALLED not in path


def _is_at_lock(frame: FrameType) -> bool:
    """Whether a thread waits for a lock, an event or a queue, as far as its last frame tells."""
    if frame.f_code.co_filename in _LOCKING:
        return True
    if is_own(frame):
        return False
    source = source_of(frame)  # Told to nobody, so a strict worker looks as well.
    return source.startswith("with ") or ".acquire(" in source


_MOST_CALLS = 500
"""Open calls, and served ones, that a report names; the oldest."""
_MOST_REFERENCES = 50
_MOST_MEASURED = 2000
_PAGE_BYTES = resource.getpagesize()


_GROUP_DIGITS = 8


def group_of(token: str) -> str:
    """Returns the name of a group for people, which does not tell its token."""
    return hashlib.sha256(b"weft group " + token.encode()).hexdigest()[:_GROUP_DIGITS]


class Reporter:
    """Makes the reports of one worker, answers its observers, and writes files. Thread-safe.

    Args:
        worker: The worker.
        group: The name of its group.

    Attributes:
        counting: Counts its calls while it is observed.
        dumps: Writes the files.
    """

    def __init__(self, worker: Worker, group: str) -> None:
        self._worker = worker
        self._agent = worker.agent
        self._group = group
        self.counting = Counting(worker)
        self.dumps = Dumps(worker, self, group)
        receiver = worker.agent.receiver
        receiver.on(Kind.DUMP, self._on_dump, inline=True)
        receiver.on(Kind.STACKS, self._on_stacks, inline=True)
        write_stacks_on_signal()

    def answer(self, question: str) -> bytes:
        """Returns the answer to an observer; raises ProtocolError if there is no such question."""
        if question == WHO:
            return encode(self.identity())
        if question in (REPORT, DETAIL, METRICS):
            return encode(self.observed(question))
        # By its name: it is of a layer above, and imported only where it is asked for.
        answer: bytes = importlib.import_module("torchweft.observe.examining").answer(question)
        return answer

    def observed(self, question: str) -> Report:
        """Returns a report, and has calls counted until the next one is due."""
        self.counting.extend(METRICS_LEASE_S if question == METRICS else LEASE_S)
        return self.report(question)

    def dump_soon(self, reason: str, is_wanted: bool = False) -> None:
        """Has a thread of the worker write the report to a file. Safe in a signal handler."""
        self._agent.reactor.submit(self.dumps.try_to_write, reason, is_wanted)

    def _on_dump(self, peer: Peer, _: Frame) -> None:
        self.dump_soon(f"worker {peer.name!r} waits for long")

    def _on_stacks(self, peer: Peer, frame: Frame) -> None:
        # An urgent task, so that it runs at any load; not here, as sending may block.
        self._agent.reactor.submit(self._tell_stacks, peer, frame)

    def _tell_stacks(self, peer: Peer, frame: Frame) -> None:
        try:
            told = stacks_of(self._worker)
        except Exception as error:
            self._worker.reply_error(peer, frame.id, error)
        else:
            self._worker.reply(peer, frame.id, told, 0)

    def identity(self) -> Identity:
        """Returns who this worker is, and which others it knows."""
        me = self._agent.me
        members = [self._member(peer) for peer in self._agent.members.known()]
        members.sort(key=lambda member: member.rank)
        return Identity(
            worker=me.name,
            rank=me.info.id,
            host=str(me.registration.facts.get(HOST, "")),
            pid=os.getpid(),
            group=self._group,
            program=me.registration.main,
            members=tuple(members),
        )

    def _member(self, peer: Peer) -> Member:
        found = health_of(self._agent, peer)
        cause = found.error.cause if found.error is not None else ""
        host = str(peer.registration.facts.get(HOST, ""))
        addresses = tuple(peer.registration.addresses)
        return Member(peer.name, peer.info.id, peer.id, host, addresses, found.state.value, cause)

    def report(self, question: str = REPORT) -> Report:
        """Returns the report.

        Args:
            question: ``DETAIL`` for stacks and references as well, ``METRICS`` for numbers alone:
                without calls and threads.
        """
        worker, reactor = self._worker, self._agent.reactor
        counts = worker.references.counts()
        in_detail, shows_calls = question == DETAIL, question != METRICS
        return Report(
            identity=self.identity(),
            clock_s=time.monotonic(),
            time=time.time(),
            cpu_s=time.process_time(),
            memory_bytes=_memory_bytes(),
            counted_since_s=self.counting.since_s,
            slots=reactor.limit,
            running=reactor.running,
            queued=len(reactor.tasks),
            traffic=tuple(self._traffic()),
            functions=self.counting.counts(),
            made=tuple(self._made()) if shows_calls else (),
            served=tuple(self._served()) if shows_calls else (),
            threads=tuple(threads(worker, with_frames=in_detail)) if shows_calls else (),
            owned=counts["owned"],
            held=counts["held"],
            references=tuple(self._references()) if in_detail else (),
            contexts=len(worker.contexts.ids()),
            passes=worker.engine.count_passes(),
            events=tuple(self._events()) if in_detail else (),
            numbers=_numbers_of(list(self._agent.slots[TELLERS].values())),
            in_flight=len(self._agent.calls),
            serving=len(served_by(worker)),
        )

    def _traffic(self) -> Iterable[Traffic]:
        present = {peer.name for peer in self._agent.members.present()}
        found: dict[str, Traffic] = {}
        for peer in list(self._agent.peers.values()):
            link = peer.link
            if peer.is_self or link is None or peer.name not in present:
                continue
            # A worker that came back under its name is another peer: both are counted together.
            before = found.get(peer.name, Traffic(peer.name, 0, 0, {}))
            moved = Counter(before.by_channel)
            moved.update({name: count for name, count in peer.moved.copy().items() if count})
            sent, received = link.bytes_sent, link.bytes_received
            found[peer.name] = Traffic(
                peer.name, before.sent + sent, before.received + received, dict(moved)
            )
        return found.values()

    def _made(self) -> Iterable[OpenCall]:
        calls = sorted(self._agent.calls.all(), key=lambda call: call.started_s)
        return [self._open_call(call) for call in calls[:_MOST_CALLS]]

    def _open_call(self, call: PendingCall) -> OpenCall:
        key = call_key(self._agent.info.name, call.number)
        parent = call.parent
        parent_key = "" if parent is None else key_of(parent)
        name = name_of(call.function)
        return OpenCall(key, call.worker_name, name, call.elapsed_s, parent_key)

    def _served(self) -> Iterable[ServedCall]:
        return [self._served_call(call) for call in served_by(self._worker)[:_MOST_CALLS]]

    def _served_call(self, call: Served) -> ServedCall:
        makes = awaits = ""
        if isinstance(call, Call):
            if getattr(call, "owned", None) is not None:
                makes = reference_key(call.reference)
            awaited = getattr(call, "awaited", None)
            if awaited is not None and not awaited.is_ready:
                reference = self._worker.references.reference_of(awaited)
                awaits = "" if reference is None else reference_key(reference)
        return ServedCall(
            key=key_of(call),
            caller=call.peer.name,
            function=function_of(call),
            age_s=time.monotonic() - call.arrived_s,
            has_begun=call.frame is None,
            makes=makes,
            awaits=awaits,
        )

    def _references(self) -> Iterable[HeldReference]:
        keeper, peers = self._worker.references, self._agent.peers
        owned, held = keeper.inventory()
        measured = [
            (_size_of(value.value), reference)
            for reference, value in list(owned.items())[:_MOST_MEASURED]
        ]
        measured.sort(key=lambda pair: -pair[0])
        pairs = [*measured[:_MOST_REFERENCES], *((0, each) for each in held[:_MOST_REFERENCES])]
        return [
            HeldReference(
                reference_key(each), peers[each.owner].name, keeper.site(each), size_bytes
            )
            for size_bytes, each in pairs
        ]

    def _events(self) -> Iterable[Event]:
        now_s = time.monotonic()
        return [Event(now_s - at_s, text) for at_s, text in self._agent.events.all()]


def _memory_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _size_of(value: object) -> int:
    """Returns the bytes of the tensors in a value: a tensor, a module, or a plain container."""
    if isinstance(value, torch.Tensor):
        return value.nbytes if value.layout is torch.strided else 0
    if isinstance(value, torch.nn.Module):
        return _size_of_module(value, set())
    parts: list[object] = []
    if type(value) is dict:
        parts = list(value.copy().values())
    elif type(value) is list or type(value) is tuple:
        parts = list(value)
    return sum([_size_of(each) for each in parts if isinstance(each, torch.Tensor)])


def _size_of_module(module: torch.nn.Module, seen: set[int]) -> int:
    """Returns the bytes of a module's tensors in this process; those in ``seen`` are counted."""
    size_bytes = 0
    held = vars(module)  # A remote module refuses to be asked for its parameters.
    for each in (*held.get("_parameters", {}).values(), *held.get("_buffers", {}).values()):
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            size_bytes += each.nbytes
    return size_bytes + sum(
        [
            _size_of_module(each, seen)
            for each in held.get("_modules", {}).values()
            if each is not None
        ]
    )


_log = logging.getLogger("torchweft")

_LEAST_PAUSE_S = 5.0
"""Two files of one worker are at least so far apart, unless a signal asks."""
_LOOK_S = 1.0


class Dumps:
    """Writes the reports of one worker to files.

    Args:
        worker: The worker.
        reporter: Makes the reports.
        group: The name of the group.
    """

    def __init__(self, worker: Worker, reporter: Reporter, group: str) -> None:
        self._worker = worker
        self._agent = agent = worker.agent
        self._reporter = reporter
        self._group = group
        self._after_s = knobs.DUMP_AFTER_S.get() or math.inf
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._last_s = -math.inf
        if not math.isinf(self._after_s):
            agent.timers.add(self.tick)

    def folder(self) -> str:
        """Returns the folder for the files of the group, which is made now if it is missing.

        Raises:
            ConfigurationError: It cannot be made, or others can write into it.
        """
        chosen = knobs.DUMP_DIR.get()
        path = chosen or os.path.join(tempfile.gettempdir(), f"torchweft-{os.geteuid()}")
        try:
            os.makedirs(path, 0o700, exist_ok=True)
            if not chosen:
                _check_own(path)
                path = os.path.join(path, self._group)
                os.makedirs(path, 0o700, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"cannot make the folder {path!r}: {error.strerror}; set "
                f"{knobs.DUMP_DIR.variable} to one that this user can write to"
            ) from error
        return path

    def write(self, reason: str, *, is_wanted: bool = False) -> str:
        """Writes the report; returns the path of the file, or "" if there is a fresh one.

        Args:
            reason: Why, for the log.
            is_wanted: Whether a person asks, so that a fresh file is replaced as well.
        """
        with self._lock:
            now_s = time.monotonic()
            if now_s - self._last_s < _LEAST_PAUSE_S and not is_wanted:
                return ""
            self._last_s = now_s
            folder = self.folder()
            path = os.path.join(folder, self._agent.info.name.replace(":", "_") + FILE_SUFFIX)
            self._agent.events.note("wrote a report: %s", reason)
            data = encode(self._reporter.report(DETAIL))
            with replacing(path) as file:
                file.write(data)
        _log.warning(
            "worker %r wrote what it does to %s, as %s; torchweft explain %s",
            self._agent.info.name,
            path,
            reason,
            folder,
        )
        return path

    def try_to_write(self, reason: str, is_wanted: bool = False) -> None:
        """Writes the report as ``write`` does; logs an error."""
        try:
            self.write(reason, is_wanted=is_wanted)
        except (OSError, ConfigurationError) as error:
            name = self._agent.info.name
            _log.warning("worker %r could not write what it does: %s", name, error)

    # Long waits

    def tick(self, now_s: float) -> float:
        """Looks for waits that take too long; a job of the timers."""
        late = {
            key: text for key, age_s, text in _long_waits(self._worker) if age_s > self._after_s
        }
        news = late.keys() - self._told
        self._told = set(late)
        if news:
            self._agent.reactor.submit(self.try_to_write, late[min(news)], False)
            self._agent.reactor.submit(self._tell_others)
        return now_s + min(_LOOK_S, self._after_s)

    def _tell_others(self, _: object, __: object) -> None:
        for peer in self._agent.members.present():
            if not peer.is_self and peer.lost is None:
                try:
                    self._agent.sender.post(peer, encode_frame(Kind.DUMP, 0, 0, b""))
                except (WorkerLost, NotInitialized):
                    continue


def _long_waits(worker: Worker) -> Iterator[tuple[str, float, str]]:
    """Yields the key, the age and a description of each wait of a thread for other workers.

    A wait in ``shutdown`` is as long as other workers have work, and is left out.
    """
    for thread in threads(worker, with_frames=False):
        for wait in thread.waits:
            if wait.kind != SHUTDOWN:
                text = f"thread {thread.name} has waited {wait.age_s:.1f} s for {wait.name}"
                yield f"{wait.kind} {wait.key}", wait.age_s, text


def _check_own(path: str) -> None:
    """Raises ConfigurationError if others could have put a folder there, or write into it."""
    status = os.stat(path, follow_symlinks=False)
    is_sound = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_sound or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigurationError(
            f"{path!r} is no folder of this user alone; set {knobs.DUMP_DIR.variable} to one"
        )


def _numbers_of(tellers: Sequence[Teller]) -> tuple[NumberTable, ...]:
    """Returns what components of a worker tell, tables of one title joined."""
    tables: dict[tuple[str, tuple[str, ...]], list[NumberRow]] = {}
    for teller in tellers:
        try:
            table = teller()
        except Exception as error:  # A report must not fail because of a part of it.
            row = NumberRow((f"{type(error).__name__}: {error}",), {}, {})
            table = NumberTable("numbers that could not be told", ("error",), (row,))
        tables.setdefault((table.title, table.labels), []).extend(table.rows)
    return tuple([NumberTable(*key, tuple(rows)) for key, rows in tables.items()])


REPORTER: Slot[Reporter] = Slot()


# The signal


def write_report_on_signal() -> None:
    """Makes the worker of this process write what it does on ``SIGQUIT``; idempotent.

    A handler that the program has set stays. A shell that starts a job in the background has it
    ignore the signal, which does not count as a handler. Only the main thread can set one; in other
    threads this does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN):
        _former.append(signal.signal(signal.SIGQUIT, _on_signal))


_former: list[Any] = []
"""The effects that the signal had before."""


def _on_signal(number: int, frame: FrameType | None) -> None:
    try:
        agent = current_agent.current()
    except NotInitialized:
        # The process is no worker any more, so the signal has its usual effect.
        signal.signal(number, _former[-1])
        os.kill(os.getpid(), number)
        return
    agent.slots[REPORTER].dump_soon("SIGQUIT asks for it", True)
