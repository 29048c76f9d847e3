"""What the threads of a worker do: which call each serves, and what it waits for.

The functions in which Weft blocks have the call, gathering, pass or value in a local variable. So
the frames of a thread tell what it waits for, and waiting itself costs nothing. The thread may go
on while its frames are read, so a reported wait may just have ended.
"""

from __future__ import annotations

import dis
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import torch

from torchweft.agent.calls import PendingCall
from torchweft.agent.open_calls import OpenCalls
from torchweft.autograd.led_pass import LedPass
from torchweft.protocol.calls import ServedCall
from torchweft.protocol.observing.keys import call_key, reference_key
from torchweft.protocol.observing.report import (
    CALL,
    GATHERING,
    MESSAGE,
    PASS,
    SHUTDOWN,
    VALUE,
    Thread,
    Wait,
)
from torchweft.rpc import fan_out, serving
from torchweft.rpc.collective import Gatherings
from torchweft.rpc.completion import key_of, proceed
from torchweft.rpc.counting import name_of
from torchweft.rpc.frames import inwards, is_own, lines, source_of, thread_frames
from torchweft.rpc.futures import Future
from torchweft.rpc.gathering import Key, Led
from torchweft.rpc.leaving import Leaving
from torchweft.rpc.merging import Merged
from torchweft.rpc.rref import RRef
from torchweft.rpc.worker import Worker

Locals = Mapping[str, Any]
_Waits = Callable[[Worker, Locals], Sequence[Wait]]

_LIBRARIES = tuple(
    os.path.dirname(module.__file__ or "") + os.sep for module in (os, torch) if module.__file__
)
_INSTALLED = f"{os.sep}site-packages{os.sep}"
_LOCKING = {threading.__file__, queue.__file__}
_ENTERS = {"SETUP_WITH", "BEFORE_WITH"}
"""Instructions that call ``__enter__``."""


def threads(worker: Worker, *, with_frames: bool) -> Iterator[Thread]:
    """Yields the threads and coroutines of a worker; not the calling thread."""
    has_source = not worker.agent.me.registration.is_strict
    for each in thread_frames():
        code = list(each.frames)
        own = bool(code) and not each.is_main and not any(map(_is_of_program, code))
        yield Thread(
            name=each.name,
            is_idle=not code,
            is_own=own,
            is_main=each.is_main,
            serves=_served_by(worker, each.stack),
            waits=tuple(_waits_of(worker, each.stack)),
            needs_any=any(frame.f_code in _FOR_ANY for frame in each.stack),
            is_at_lock=bool(code) and not own and _is_at_lock(each.stack[-1], has_source),
            place=_place(code),
            frames=lines(code, has_source) if with_frames else (),
        )
    for name, stack in worker.coroutines.frames():
        code = inwards(stack)
        told = lines(code, has_source) if with_frames else ()
        yield Thread(name, False, False, False, "", (), False, _place(code), told)


def _served_by(worker: Worker, stack: Sequence[FrameType]) -> str:
    for frame in reversed(stack):
        call_in = _SERVING.get(frame.f_code)
        if call_in is not None:
            call = call_in(frame.f_locals)
            if isinstance(call, ServedCall) and call.peer.id in worker.agent.peers:
                return key_of(call)
    return ""


def _waits_of(worker: Worker, stack: Sequence[FrameType]) -> Sequence[Wait]:
    for frame in reversed(stack):
        tell = _WAITING.get(frame.f_code)
        if tell is not None:
            try:
                return tell(worker, frame.f_locals)
            except (KeyError, AttributeError, TypeError):
                return ()  # The frame has just begun or ended.
    return ()


def _for_call(worker: Worker, found: Locals) -> Sequence[Wait]:
    return _for_calls(worker, [found["call"]])


def _for_futures(worker: Worker, found: Locals) -> Sequence[Wait]:
    futures = [each for each in found["futures"] if isinstance(each, Future) and not each.done()]
    return _for_calls(worker, [each._call for each in futures])


def _for_pending(worker: Worker, found: Locals) -> Sequence[Wait]:
    return _for_futures(worker, {"futures": list(found["pending"].values())})


def _for_streams(worker: Worker, found: Locals) -> Sequence[Wait]:
    pulled = [each._pulled for each in found["self"].streams]
    return _for_futures(worker, {"futures": [each[0] for each in pulled if each]})


def _for_calls(worker: Worker, calls: Sequence[PendingCall]) -> Sequence[Wait]:
    name = worker.agent.info.name
    return [
        Wait(
            CALL,
            call_key(name, call.number),
            call.elapsed_s,
            name_of(call.function),
            (call.worker_name,),
        )
        for call in calls
        if call.number and not call.is_done
    ]


def _for_led(worker: Worker, found: Locals) -> Sequence[Wait]:
    return _for_gathering(worker, found["key"], found["gathering"])


def _for_gathering(worker: Worker, key: Key, gathering: Any) -> Sequence[Wait]:
    peers = worker.agent.peers
    names = tuple(peers[each].name for each in key.workers)
    text = f"{key.kind} {key.number} of {' '.join(names)}"
    return [Wait(GATHERING, text, time.monotonic() - gathering.began_s, key.kind, names)]


def _for_pass(worker: Worker, found: Locals) -> Sequence[Wait]:
    led, peers = found["self"], worker.agent.peers
    lacking = led.awaited()
    since_s = min(led.waits_since_s, time.monotonic())
    names = tuple(peers[each].name for each in sorted(lacking))
    age_s = time.monotonic() - since_s
    return [Wait(PASS, str(led.pass_id), age_s, "a backward pass", names)] if names else []


def _for_value(worker: Worker, found: Locals) -> Sequence[Wait]:
    age_s = time.monotonic() - found["began_s"]
    owner = worker.agent.info.name
    name = reference_key(found["self"].id)
    return [Wait(VALUE, name, age_s, name, (owner,))]


def _for_shutdown(worker: Worker, found: Locals) -> Sequence[Wait]:
    lacking = found["self"].lacking()
    age_s = time.monotonic() - found["began_s"]
    return [Wait(SHUTDOWN, "", age_s, "shutdown", lacking.workers)]


def _code(function: Any) -> CodeType:
    code: CodeType = getattr(function, "__wrapped__", function).__code__
    return code


def _in_call(found: Locals) -> object:
    return found.get("call")


_SERVING: dict[CodeType, Callable[[Locals], object]] = {
    _code(serving._serve): _in_call,
    _code(proceed): _in_call,
}
"""Functions that run a served call, and where it is among their local variables."""

_WAITING: dict[CodeType, _Waits] = {
    _code(OpenCalls.ask_and_wait): _for_call,
    _code(OpenCalls.wait): _for_call,
    _code(torch.futures.wait_all): _for_futures,
    _code(fan_out._yielded): _for_pending,
    _code(Merged._next_number): _for_streams,
    _code(Led.gather): _for_led,
    _code(Gatherings._follow): _for_led,
    _code(LedPass._lead): _for_pass,
    _code(RRef._wait_for_value): _for_value,
    _code(Leaving.wait): _for_shutdown,
}
"""Functions in which threads wait for other workers, and what their local variables tell."""


_FOR_ANY = {_code(fan_out._yielded), _code(Merged._next_number)}
"""Those of them that go on with any of what they wait for."""


def tell_served(function: Callable[..., Any], call_in: Callable[[Locals], object]) -> None:
    """Has threads in a function told as those that run a call of another worker.

    Args:
        function: Runs the call, in a thread of its own.
        call_in: Returns the ``ServedCall``, by the local variables of the function, or None.
    """
    _SERVING[_code(function)] = call_in


def tell_messages(
    function: Callable[..., Any], awaited: Callable[[Locals], tuple[str, str, float]]
) -> None:
    """Has threads in a function told as waiting for a message of another worker.

    Args:
        function: Blocks until the message has come.
        awaited: Returns the sender, what it sends, and since when the thread waits, by the local
            variables of the function; raises KeyError while it does not wait.
    """

    def tell(_: Worker, found: Locals) -> Sequence[Wait]:
        sender, what, began_s = awaited(found)
        return [Wait(MESSAGE, "", time.monotonic() - began_s, what, (sender,))]

    _WAITING[_code(function)] = tell


def tell_waits(function: Callable[..., Any], futures_in: Callable[[Locals], Sequence[Any]]) -> None:
    """Has threads in a function told as waiting for calls, all of which they need.

    Args:
        function: Blocks until the calls have ended.
        futures_in: Returns their futures, by the local variables of the function. Does not block.
    """
    _WAITING[_code(function)] = lambda worker, found: _for_futures(
        worker, {"futures": futures_in(found)}
    )


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


def _is_at_lock(frame: FrameType, has_source: bool) -> bool:
    """Whether a thread waits for a lock, an event or a queue, as far as its last frame tells."""
    code = frame.f_code
    if code.co_filename in _LOCKING:
        return True
    if is_own(frame):
        return False
    if frame.f_lasti >= 0 and dis.opname[code.co_code[frame.f_lasti]] in _ENTERS:
        return True
    source = source_of(frame) if has_source else ""
    return source.startswith("with ") or ".acquire(" in source
