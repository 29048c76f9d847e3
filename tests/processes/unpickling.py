"""Detects any unpickling in a worker, by whatever function."""

from __future__ import annotations

import contextlib
import pickle
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import cloudpickle
import torch

_READERS: tuple[Any, ...] = (pickle.load, pickle.loads, cloudpickle.load, cloudpickle.loads)
_READERS += (torch.load, pickle.Unpickler)

_seen: list[str] = []
_replaced: list[tuple[Any, str, Any]] = []
_MISSING = object()


class _Watching(pickle.Unpickler):
    """Stands in for the ``Unpickler`` written in C, whose methods cannot be replaced."""


def _note(*_: object, **__: object) -> Any:
    _seen.append("".join(traceback.format_stack(limit=12)))
    raise RuntimeError("something was unpickled")


def watch() -> int:
    """Records and prevents all unpickling from now on; returns how many names it replaced."""
    _seen.clear()
    for kind in {pickle._Unpickler, *_subclasses(pickle.Unpickler)}:  # type: ignore[attr-defined]
        _replace(kind, "load", _note)
    for module in list(sys.modules.values()):
        for name, value in _contents(module):
            for reader in _READERS:
                if value is reader:
                    _replace(module, name, _Watching if reader is pickle.Unpickler else _note)
    return len(_replaced)


def unwatch() -> int:
    """Restores everything; returns how often something was unpickled."""
    for owner, name, before in reversed(_replaced):
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
    _replaced.clear()
    return len(_seen)


def seen() -> list[str]:
    """Returns the stacks that unpickled something."""
    return list(_seen)


def largest_bytes() -> int:
    """Returns the peak memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _subclasses(kind: type) -> Iterator[type]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _contents(module: ModuleType) -> list[tuple[str, Any]]:
    with contextlib.suppress(Exception):  # some of torch's entries are not modules
        return list(vars(module).items())
    return []


def _replace(owner: Any, name: str, value: Callable[..., Any] | type) -> None:
    _replaced.append((owner, name, vars(owner).get(name, _MISSING)))
    setattr(owner, name, value)
