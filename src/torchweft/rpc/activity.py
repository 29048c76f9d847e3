"""What the threads of a worker do: which call each serves, and what it waits for.

Threads note what they wait for (``Reactor.waiting``), and which call they run. Stacks tell the line
of the program. A thread may go on meanwhile, so a reported wait may just have ended.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType

import torch

from torchweft.agent.calls import PendingCall
from torchweft.protocol.calls import ServedCall
from torchweft.protocol.observing.keys import CALL, Wait, call_key
from torchweft.protocol.observing.report import Thread
from torchweft.rpc.completion import key_of
from torchweft.rpc.counting import name_of
from torchweft.rpc.frames import inwards, is_own, lines, source_of, thread_frames
from torchweft.rpc.worker import Worker
from torchweft.runtime.reactor import Awaited

_LIBRARIES = tuple(
    os.path.dirname(module.__file__ or "") + os.sep for module in (os, torch) if module.__file__
)
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_LOCKING = {threading.__file__, queue.__file__}
_WAIT_ALL = torch.futures.wait_all.__code__


def threads(worker: Worker, *, with_frames: bool) -> Iterator[Thread]:
    """Yields the threads and coroutines of a worker; not the calling thread."""
    has_source = not worker.agent.me.registration.is_strict
    awaited = worker.agent.reactor.awaited.copy()
    serving = worker.serving.copy()
    for each in thread_frames():
        code = list(each.frames)
        own = bool(code) and not each.is_main and not any(map(_is_of_program, code))
        call = serving.get(each.ident)
        waits_for = awaited.get(each.ident) or _in_wait_all(worker, each.stack, call)
        yield Thread(
            name=each.name,
            is_idle=not code,
            is_own=own,
            is_main=each.is_main,
            serves="" if call is None or call.has_ended else key_of(call),
            waits=tuple(_told(worker, waits_for.parts())),
            needs_any=waits_for.needs_any,
            is_at_lock=bool(code) and not own and _is_at_lock(each.stack[-1]),
            place=_place(code),
            frames=lines(code, has_source) if with_frames else (),
        )
    for name, stack in worker.coroutines.frames():
        code = inwards(stack)
        told = lines(code, has_source) if with_frames else ()
        yield Thread(name, False, False, False, "", (), False, _place(code), told)


def _in_wait_all(worker: Worker, stack: Sequence[FrameType], parent: ServedCall | None) -> Awaited:
    """Returns what a thread waits for that has noted nothing.

    PyTorch's ``wait_all`` blocks in C++ for futures that it tells nobody. So the thread may wait
    for any of the calls that were made where it is.
    """
    if not any(frame.f_code is _WAIT_ALL for frame in stack):
        return Awaited(list)
    calls = [call for call in worker.agent.calls.all() if call.parent is parent]
    return Awaited(lambda: calls, needs_any=True)


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
