"""Finds the part of an object that cannot be sent, and says what to do about it.

Pickle names the type that it failed on, not its location. When packing has failed, the parts of the
object are tried one by one, then the parts of the failing part, and so on.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.errors import SerializationError

_DEPTH_LIMIT = 30
_SHOWN_LENGTH = 60

_Pack = Callable[[object], object]
_Part = tuple[str, object]
"""The step to a part of an object, as it is written behind the object, and the part."""

_LOCK = (
    "a lock works within one process only: leave it out in __getstate__, or leave its owner "
    "where it is and send a remote reference to it"
)
_LIST = "send what it yields, as a list"
_FUTURE = "wait for it and send its value"
_PROCESS = "it belongs to one process"
_TRACE = "send its text, see traceback.format_exception"

_ADVICE = {
    **dict.fromkeys(("_thread.lock", "_thread.RLock", "threading._RLock"), _LOCK),
    **dict.fromkeys(("threading.Condition", "threading.Event", "threading.Semaphore"), _LOCK),
    "threading.Barrier": _LOCK,
    **dict.fromkeys(("queue.Queue", "_queue.SimpleQueue"), "send what is in it as a list"),
    "generator": f"{_LIST}, or have torchweft.rpc.stream send it",
    "async_generator": _LIST,
    "coroutine": "send the function and its arguments, and await it there",
    **dict.fromkeys(("_asyncio.Future", "concurrent.futures._base.Future"), _FUTURE),
    "torch.jit.Future": (  # The name of torch.futures.Future.
        f"{_FUTURE}, or mark the function that returns it by rpc.functions.async_execution"
    ),
    "_io._IOBase": "send its path or its content",
    "socket.socket": "send its address, and connect on the other worker",
    **dict.fromkeys(("threading.Thread", "multiprocessing.process.BaseProcess"), _PROCESS),
    **dict.fromkeys(("weakref", "weakref.ReferenceType"), "send the object itself"),
    **dict.fromkeys(("frame", "traceback"), _TRACE),
    "torch._subclasses.fake_tensor.FakeTensor": "send a tensor on the device 'meta'",
    "sqlite3.Connection": "send its path, and open it on the other worker",
}
"""What to do about objects of a class, by the name of the class."""

_GENERAL_ADVICE = (
    "give its type a __getstate__ that leaves out what cannot travel, or leave it on its worker "
    "and send a remote reference to it"
)

_MEMBERS: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    types.MethodType: ("__self__",),
}


def diagnose(value: object, error: Exception, pack: _Pack) -> SerializationError:
    """Returns the error that says which part of ``value`` cannot be sent.

    Args:
        value: The object that could not be packed.
        error: The error that packing it raised.
        pack: Packs a part by itself, or raises.
    """
    path, culprit, reason = _find(value, error, pack)
    name = _name(type(culprit))
    if _is_too_deep(reason):
        return SerializationError(
            f"{path} ({name}) cannot be sent: it is nested too deeply; send it as a flat list"
        )
    advice = _advice(culprit)
    if advice is None:
        advice = "" if isinstance(reason, SerializationError) else _GENERAL_ADVICE
    text = f"{path} ({name}) cannot be sent: {str(reason) or type(reason).__name__}"
    return SerializationError(f"{text}; {advice}" if advice else text)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def _advice(culprit: object) -> str | None:
    names = map(_name, type(culprit).__mro__)
    return next((_ADVICE[name] for name in names if name in _ADVICE), None)


def _is_too_deep(error: Exception) -> bool:
    # cloudpickle raises its own error from a RecursionError.
    return isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError)


def _is_named(culprit: object, reason: Exception) -> bool:
    """Whether the parts of a culprit would tell no more, as where its type refuses by itself."""
    is_own = type(culprit).__reduce__ is not object.__reduce__
    refuses = is_own and isinstance(reason, SerializationError)
    return refuses or _is_too_deep(reason) or _advice(culprit) is not None


def _find(value: object, error: Exception, pack: _Pack) -> tuple[str, object, Exception]:
    call_parts = _call_parts(value)
    path, parts = ("", iter(call_parts)) if call_parts else ("value", _parts(value))
    culprit, reason, seen = value, error, {id(value)}
    for depth in range(_DEPTH_LIMIT):
        if (depth or not call_parts) and _is_named(culprit, reason):
            break
        try:
            step, culprit, reason = next(_failing(parts, seen, pack))
        except Exception as failure:
            if is_of_handler(failure):
                raise
            break  # All parts can be sent, or the object cannot be inspected: name the container.
        path, parts = path + step, _parts(culprit)
    return path or "value", culprit, reason


def _failing(
    parts: Iterator[_Part], seen: set[int], pack: _Pack
) -> Iterator[tuple[str, object, Exception]]:
    for step, part in parts:
        if id(part) not in seen:
            seen.add(id(part))
            try:
                pack(part)
            except Exception as error:
                if is_of_handler(error):
                    raise
                yield step, part, error


def _call_parts(value: object) -> list[_Part]:
    """Names the parts of a call: arguments, and the function behind them if it goes by value."""
    if type(value) is not tuple or len(value) not in (2, 3) or not isinstance(value[1], dict):
        return []
    is_call = isinstance(value[0], (tuple, list)) and all(map(callable, value[2:]))
    return list(zip(("args", "kwargs", "function"), value, strict=False)) if is_call else []


def _parts(value: Any) -> Iterator[_Part]:
    if isinstance(value, Mapping):
        yield from ((f"[{_shown(key)}]", part) for key, part in list(value.items()))
        yield from ((f" key {_shown(key)}", key) for key in list(value))
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", part) for name, part in zip(value._fields, value, strict=False))
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f" element {_shown(part)}", part) for part in value)
    elif isinstance(value, types.FunctionType):
        captured = inspect.getclosurevars(value)
        yield from ((f" variable {name!r}", part) for name, part in captured.nonlocals.items())
        yield from ((f" global {name!r}", part) for name, part in captured.globals.items())
        yield " defaults", value.__defaults__
    for name in _MEMBERS.get(type(value), ()):
        yield f".{name}", getattr(value, name)
    if not isinstance(value, (type, types.ModuleType, types.FunctionType)):
        yield from _attributes(value)


def _attributes(value: object) -> Iterator[_Part]:
    attributes = getattr(value, "__dict__", {})
    if isinstance(value, torch.nn.Module):
        for group in ("_modules", "_parameters", "_buffers"):
            yield from ((f".{name}", part) for name, part in attributes[group].items())
    yield from ((f".{name}", part) for name, part in list(attributes.items()))
    yield from ((f".{name}", part) for name, part in slots_of(value))


def slots_of(value: object) -> Iterator[_Part]:
    """Yields the names and contents of an object's slots that have one."""
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        if is_of_handler(error):
            raise
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_LENGTH else f"{text[:_SHOWN_LENGTH]}..."
