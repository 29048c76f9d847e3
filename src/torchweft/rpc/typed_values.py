"""The caller's knowledge of a referenced value: its class, and so its methods.

``remote(worker, Model, ...)`` names the class of the value. A method that such a value cannot
have is refused at once. A name that is not in the class may still be an attribute of the object,
set by ``__init__`` or by any other method. So a name counts as missing only if no method of the
class can set it.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from torch import nn

from torchweft.errors import MethodNotFound
from torchweft.rpc.handles import Handle

_ANSWERS = frozenset("__getattr__ __getattribute__ __setattr__".split())
"""Methods of a class that may make any name an attribute."""
_SETS = _ANSWERS | frozenset("__dict__ add_module register_module setattr vars".split())
"""Names by which a method can set attributes that its code does not name."""
_WITHOUT_OWN = (object, nn.Module)
"""Classes whose own methods set no callable attributes, except through the names above."""


def known_type(reference: Handle) -> type | None:
    """Returns the class of the value behind a reference, where this worker knows it."""
    made_by: type | None = getattr(reference, "value_type", None)
    return made_by


def check_method(reference: Handle, name: str) -> None:
    """Raises MethodNotFound if the value is known to have no such method."""
    value_type = known_type(reference)
    if value_type is None or hasattr(value_type, name):
        return
    if not is_made_plainly(value_type) or may_set(value_type, name):
        return
    text = f"{value_type.__qualname__!r} object has no attribute {name!r}: value of {reference!r}"
    close = difflib.get_close_matches(name, methods_of(value_type), 1)
    raise MethodNotFound(f"{text}; did you mean {close[0]!r}?" if close else text)


def is_made_plainly(value_type: type) -> bool:
    """Whether calling a class is just ``object.__new__`` and its ``__init__``."""
    new: Any = value_type.__new__
    return type(value_type).__call__ is type.__call__ and new is object.__new__


def methods_of(value_type: type) -> list[str]:
    """Returns the names of the public methods of a class."""
    return [
        name
        for name in dir(value_type)
        if not name.startswith("_") and callable(getattr(value_type, name, None))
    ]


@functools.lru_cache(maxsize=256)
def may_set(value_type: type, name: str) -> bool:
    """Whether methods of a class may give its objects an attribute of that name."""
    for base in value_type.__mro__:
        if base in _WITHOUT_OWN:
            continue
        held = vars(base)
        declared = {*_slots(held), *held.get("__annotations__", ())}
        if name in declared or not _ANSWERS.isdisjoint(held):
            return True
        for code in _codes_of(held.values()):
            used = code.co_names
            # A constant may be the name of an annotation, or an argument of setattr elsewhere.
            if name in used or name in code.co_consts or not _SETS.isdisjoint(used):
                return True
    return False


def _slots(held: Mapping[str, Any]) -> tuple[str, ...]:
    slots = held.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _codes_of(attributes: Any) -> Iterator[CodeType]:
    """Yields the code of all functions among the attributes of a class, with nested code."""
    todo = list(attributes)
    while todo:
        each = todo.pop()
        if isinstance(each, CodeType):
            yield each
            todo += [part for part in each.co_consts if isinstance(part, CodeType)]
        elif isinstance(each, property):
            todo += [each.fget, each.fset]
        else:
            held = [getattr(each, name, None) for name in ("__code__", "__func__", "__wrapped__")]
            todo += [part for part in held if part is not None]
