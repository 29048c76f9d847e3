"""Tracebacks for users: the frames of their own program, and each worker's frames once.

An error that travels carries a *place* for each worker that it passed: a note with the worker's
name and the frames of the program there. Python prints notes below the error itself. Before 3.11
Python does not, so there the places are the last cause as well (``RemoteTraceback``).

Weft's own frames are left out, unless ``WEFT_TRACEBACKS`` is ``full``. An error raised by Weft
itself that is not a ``WeftError`` is a bug, and keeps all frames.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

from torchweft import knobs
from torchweft.errors import WeftError

P = ParamSpec("P")
T = TypeVar("T")
# Importing exceptiongroup makes Python print notes; anyio, trio and pytest depend on it.
PRINTS_NOTES = sys.version_info >= (3, 11) or "exceptiongroup" in sys.modules

_PACKAGE = __name__.partition(".")[0]
_PLACE = 'On worker "'
_HEADING = "Traceback (most recent call last):"
_FULL = "full"
_INDENT = " " * 4
_FRAME_WITHOUT_LINE = re.compile(
    rf'^  File "(.+)", line (\d+), in .*$(?!\n{_INDENT})', re.MULTILINE
)
_TEXT_LIMIT = 200_000
_FEW_FRAMES = 8
_TEXTS_LIMIT = 256
_texts: dict[tuple[CodeType, int], str] = {}
"""The texts of frames, by the code and the place in it."""
# They call functions of the program: an error raised in such a frame comes from the call itself.
_CALLERS = frozenset(f"{_PACKAGE}.rpc.{name}" for name in ("serving", "coroutines"))


class RemoteTraceback(Exception):
    """Carries the places of an error as its last cause, where Python prints no notes."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


def places_of(error: BaseException) -> list[str]:
    """Returns the places where other workers raised and passed on an error, the first one first."""
    return [note for note in _notes(error) if note.startswith(_PLACE)]


def notes_with_place(error: BaseException, worker: str) -> list[str]:
    """Returns the notes of an error, with its place on this worker if it has one."""
    texts, frames = _notes(error), _frames_text(error)
    if frames:
        texts.append(f'{_PLACE}{worker}":\n{frames}')
    elif not places_of(error):
        texts.append(f'{_PLACE}{worker}"')
    return texts


def with_lines_from_here(note: str) -> str:
    """Returns a note, with lines of code that only this process has: those of a notebook's cells.

    The functions of a cell go to other workers by value, without their text.
    """
    if not note.startswith(_PLACE):
        return note
    return _FRAME_WITHOUT_LINE.sub(_with_line_from_here, note)


def _with_line_from_here(frame: re.Match[str]) -> str:
    """Returns a frame, with its line unless that is of a file, or unknown."""
    file = frame[1]
    if file not in linecache.cache or os.path.exists(file):
        return frame[0]
    line = linecache.getline(file, int(frame[2])).strip()
    return f"{frame[0]}\n{_INDENT}{line}" if line else frame[0]


def shorten(error: BaseException) -> None:
    """Removes Weft's own frames from the tracebacks of an error, its causes and its contexts.

    From Python 3.11 on, a function that catches an error, shortens it and raises it again by a bare
    ``raise`` does not appear in the traceback itself.
    """
    if knobs.TRACEBACKS.get() == _FULL:
        return
    seen: set[int] = set()
    part: BaseException | None = error
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        if part.__traceback__ is not None and not _is_bug(part):
            trace = _joined(_users(_entries(part.__traceback__)))
            BaseException.with_traceback(part, trace)  # works on errors that refuse attributes, too
        part = part.__cause__ or (None if part.__suppress_context__ else part.__context__)


def drop_frames(error: BaseException) -> None:
    """Removes all frames from an error that a future is to keep, and from its causes.

    Frames lead back to the future, and the garbage collector does not look into PyTorch's futures:
    all objects of the frames would leak. Causes keep the frames of the program as a note.

    An error that this thread is handling is no cause, and is left as it is. It became the context
    because a thread in an ``except`` block of the program may read the answer of any call.
    """
    seen, rest = {id(error)}, [error]
    while rest:
        part = rest.pop()
        if part is not error:
            text = _frames_text(part)
            if text:
                # Some errors refuse attributes: those of frozen dataclasses, for instance.
                with contextlib.suppress(Exception):
                    part.__notes__ = [*_notes(part), f"{_HEADING}\n{text}"]  # type: ignore[attr-defined]
        BaseException.with_traceback(part, None)
        context = _attribute(part, "__context__")
        is_cause = context is None or context is _attribute(part, "__cause__")
        if not is_cause and _is_handled(context):
            BaseException.__setattr__(part, "__context__", None)
        for led in _led_by(part):
            if id(led) not in seen:
                seen.add(id(led))
                rest.append(led)


def _is_handled(error: BaseException) -> bool:
    """Whether a function of this thread that has not returned has caught an error."""
    trace = error.__traceback__
    stack = traceback.walk_stack(sys._getframe())
    return trace is not None and any(frame is trace.tb_frame for frame, _ in stack)


def without_own_frames(function: Callable[P, T]) -> Callable[P, T]:
    """Returns a function that does the same, but shortens the errors that it raises."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            shorten(error)
            raise

    return call


def _led_by(error: BaseException) -> list[BaseException]:
    """Returns an error's cause and context, even if Python does not show them."""
    led = _attribute(error, "__cause__"), _attribute(error, "__context__")
    return [part for part in led if part is not None]


def _frames_text(error: BaseException) -> str:
    try:
        entries = _entries(_attribute(error, "__traceback__"))
        if knobs.TRACEBACKS.get() != _FULL and not _is_bug(error):
            entries = _users(entries)
        if len(entries) <= _FEW_FRAMES:
            text = "".join(map(_entry_text, entries)).rstrip()
        else:  # Python folds frames that repeat.
            text = "".join(traceback.format_tb(_joined(entries))).rstrip()
    except BaseException:
        return "  (its traceback cannot be formatted)"
    if len(text) > _TEXT_LIMIT:
        half = _TEXT_LIMIT // 2
        left_out = f"[... {len(text) - 2 * half} characters left out ...]"
        text = f"{text[:half]}\n{left_out}\n{text[-half:]}"
    return text


def _entry_text(entry: TracebackType) -> str:
    """Returns the text of one frame; Python parses the line each time to underline a part of it."""
    key = entry.tb_frame.f_code, entry.tb_lasti
    text = _texts.get(key)
    if text is None:
        if len(_texts) >= _TEXTS_LIMIT:
            _texts.clear()
        text = _texts[key] = "".join(traceback.format_tb(entry, 1))
    return text


def _is_bug(error: BaseException) -> bool:
    """Whether Weft's own code raised an error that it should not."""
    entries = _entries(_attribute(error, "__traceback__"))
    if not entries or not _is_own(entries[-1].tb_frame):
        return False
    is_of_call = entries[-1].tb_frame.f_globals["__name__"] in _CALLERS
    return not (is_of_call or isinstance(error, WeftError) or places_of(error))


def _entries(first: TracebackType | None) -> list[TracebackType]:
    entries = []
    while first is not None:
        entries.append(first)
        first = first.tb_next
    return entries


def _users(entries: list[TracebackType]) -> list[TracebackType]:
    return [entry for entry in entries if not _is_own(entry.tb_frame)]


def _joined(entries: list[TracebackType]) -> TracebackType | None:
    following: TracebackType | None = None
    for entry in reversed(entries):
        # A signal handler may have raised where a function begins, which is on no line.
        line = entry.tb_lineno or entry.tb_frame.f_code.co_firstlineno
        following = TracebackType(following, entry.tb_frame, entry.tb_lasti, line)
    return following


def _notes(error: BaseException) -> list[str]:
    notes = _attribute(error, "__dict__").get("__notes__")
    return (
        [str.__str__(note) for note in notes if isinstance(note, str)]
        if isinstance(notes, list)
        else []
    )


def _attribute(error: BaseException, name: str) -> Any:
    """Returns an attribute, bypassing attribute access that the error's type defines."""
    return BaseException.__getattribute__(error, name)


def _is_own(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return isinstance(name, str) and (name == _PACKAGE or name.startswith(f"{_PACKAGE}."))
