"""Finds the part of an object that cannot be sent, and says what to do about it.

Pickle names the type that it failed on, not its location. When packing has failed, the parts of the
object are tried one by one, then the parts of the failing part, and so on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import io
import multiprocessing.process
import queue
import socket
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchweft.errors import SerializationError

_DEPTH_LIMIT = 30
_SHOWN_LENGTH = 60

_Pack = Callable[[object], object]

_LOCK = (
    "a lock works within one process only: leave it out in __getstate__, or leave its owner "
    "where it is and send a remote reference to it"
)
_LIST = "send what it yields, as a list"
_FUTURE = "wait for it and send its value"
_RETURNED_FUTURE = (
    f"{_FUTURE}, or mark the function that returns it by rpc.functions.async_execution"
)

_ADVICE: tuple[tuple[tuple[type, ...], str], ...] = (
    ((type(threading.Lock()), type(threading.RLock())), _LOCK),
    ((threading.Condition, threading.Event, threading.Semaphore, threading.Barrier), _LOCK),
    ((queue.Queue, queue.SimpleQueue), "send what is in it as a list"),
    ((types.GeneratorType,), f"{_LIST}, or have torchweft.rpc.stream send it"),
    ((types.AsyncGeneratorType,), _LIST),
    ((types.CoroutineType,), "send the function and its arguments, and await it there"),
    ((asyncio.Future, concurrent.futures.Future), _FUTURE),
    ((torch.futures.Future,), _RETURNED_FUTURE),
    ((io.IOBase,), "send its path or its content"),
    ((socket.socket,), "send its address, and connect on the other worker"),
    ((threading.Thread, multiprocessing.process.BaseProcess), "it belongs to one process"),
    ((weakref.ReferenceType,), "send the object itself"),
    ((types.FrameType, types.TracebackType), "send its text, see traceback.format_exception"),
)

# By name, because PyTorch does not import these modules; a program with such an object has.
_ADVICE_BY_NAME = {
    "torch._subclasses.fake_tensor.FakeTensor": "send a tensor on the device 'meta'",
    "sqlite3.Connection": "send its path, and open it on the other worker",
}

_GENERAL_ADVICE = (
    "give its type a __getstate__ that leaves out what cannot travel, or leave it on its worker "
    "and send a remote reference to it"
)


def diagnose(value: object, error: Exception, pack: _Pack) -> SerializationError:
    """Returns the error that says which part of ``value`` cannot be sent.

    Args:
        value: The object that could not be packed.
        error: The error that packing it raised.
        pack: Packs a part by itself, or raises.
    """
    path, culprit, reason = _find(value, error, pack)
    kind = type(culprit)
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    if _is_too_deep(reason):
        return SerializationError(
            f"{path} ({name}) cannot be sent: it is nested too deeply; send it as a flat list"
        )
    advice = _advice(culprit)
    if advice is None:
        advice = "" if isinstance(reason, SerializationError) else _GENERAL_ADVICE
    text = f"{path} ({name}) cannot be sent: {str(reason) or type(reason).__name__}"
    return SerializationError(f"{text}; {advice}" if advice else text)


def _advice(culprit: object) -> str | None:
    for kinds, text in _ADVICE:
        if isinstance(culprit, kinds):
            return text
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(culprit).__mro__)
    return next((_ADVICE_BY_NAME[name] for name in names if name in _ADVICE_BY_NAME), None)


def _refuses(culprit: object, error: Exception) -> bool:
    """Whether the type says itself that its objects are not sent."""
    is_own = type(culprit).__reduce__ is not object.__reduce__
    return is_own and isinstance(error, SerializationError)


def _is_too_deep(error: Exception) -> bool:
    # cloudpickle raises its own error from a RecursionError.
    return isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)


def _find(value: object, error: Exception, pack: _Pack) -> tuple[str, object, Exception]:
    names = _call_parts(value)
    path = "" if names else "value"
    culprit, reason, seen = value, error, {id(value)}
    if _advice(value) is not None:
        return path, culprit, reason  # Its parts would tell no more.
    parts = iter(names or _parts(value))
    for _ in range(_DEPTH_LIMIT):
        try:
            found = _first_failing(parts, seen, pack)
        except Exception:
            break  # the object cannot be inspected: name its container
        if found is None:
            break
        step, culprit, reason = found
        path, parts = path + step, _parts(culprit)
        if _is_too_deep(reason) or _advice(culprit) is not None or _refuses(culprit, reason):
            break  # its parts would tell no more
    return path or "value", culprit, reason


def _first_failing(
    parts: Iterator[tuple[str, object]], seen: set[int], pack: _Pack
) -> tuple[str, object, Exception] | None:
    for step, part in parts:
        if id(part) in seen:
            continue
        seen.add(id(part))
        try:
            pack(part)
        except Exception as error:
            return step, part, error
    return None


def _call_parts(value: object) -> list[tuple[str, object]]:
    """Names the parts of a call: arguments, and the function behind them if it goes by value."""
    if type(value) is not tuple or len(value) not in (2, 3) or not isinstance(value[1], dict):
        return []
    is_call = isinstance(value[0], (tuple, list)) and all(map(callable, value[2:]))
    return list(zip(("args", "kwargs", "function"), value, strict=False)) if is_call else []


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        yield from ((f"[{_shown(key)}]", part) for key, part in list(value.items()))
        yield from ((f" key {_shown(key)}", key) for key in list(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", part) for name, part in zip(value._fields, value, strict=False))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f" element {_shown(part)}", part) for part in value)
    elif isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
    elif isinstance(value, types.MethodType):
        yield ".__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _captured(value)
    if not isinstance(value, (type, types.ModuleType, types.FunctionType)):
        yield from _attributes(value)


def _captured(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Names the objects that a function sent by value takes along."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f" variable {name!r}", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield f" global {name!r}", function.__globals__[name]
    yield " defaults", function.__defaults__


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    attributes = getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):
        for group in ("_modules", "_parameters", "_buffers"):
            yield from ((f".{name}", part) for name, part in attributes[group].items())
    yield from ((f".{name}", part) for name, part in list(attributes.items()))
    yield from ((f".{name}", part) for name, part in slots_of(value))


def slots_of(value: object) -> Iterator[tuple[str, object]]:
    """Yields the names and contents of an object's slots that have one."""
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."
