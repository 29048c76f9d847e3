"""Pickles at a worker with an allow-list: any bytes make values and do nothing else.

This module is the only one on the list. An audit hook of the interpreter watches for other actions
meanwhile, and stops them; the contents of the module must stay unchanged.
"""

from __future__ import annotations

import builtins
import codecs
import functools
import importlib
import operator
import os
import pickle
import warnings
from collections import OrderedDict, deque
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.auditing import add_hook
from tests.fuzz.target import Target
from torchweft.engine.codec.objects import Packed, pack, register_external
from torchweft.engine.codec.reading import AllowList, make_reader
from torchweft.errors import CallTimeout, WeftError

_DEEDS = ("exec", "compile", "import", "open", "os.", "subprocess.", "socket.", "ctypes.")
_DEEDS += ("shutil.", "marshal.", "pickle.", "sys.", "builtins.input", "tempfile.", "mmap.")


class Thing:
    """A class on the list."""

    limit = 7

    def __init__(self, value: object = None) -> None:
        self.value = value


class Stateful:
    """A class on the list with a method that pickles call."""

    def __setstate__(self, state: object) -> None:
        self.state = state


def make(*arguments: object) -> tuple[object, ...]:
    """A function on the list."""
    return arguments


@register_external
class _Reference:
    """An object that is taken out of pickles, as references are."""


_EXTERNALS = (_Reference(), _Reference())
_reader = make_reader((__name__,), False, "worker0")
_deeds: list[str] = []


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if event.startswith(_DEEDS):
        _deeds.append(f"{event}{arguments!r}"[:200])
        raise PermissionError(event)


# Printing a warning opens the source file that it refers to.
warnings.filterwarnings("ignore", "Using a non-tuple sequence for multidimensional indexing")
_watching = add_hook(_watch)
for _encoding in ("raw_unicode_escape", "latin-1", "ascii", "utf-8"):
    codecs.lookup(_encoding)  # The first pickle in an old protocol would import it.


def _tensors() -> list[Tensor]:
    return [torch.zeros(3), torch.zeros(2, 2), torch.zeros(1)]


def _state() -> tuple[object, ...]:
    functions: tuple[Any, ...] = (make, Thing.__init__, Stateful.__setstate__)
    return (
        *(_content(kind) for kind in (Thing, Stateful)),
        [(each.__code__, each.__defaults__, dict(vars(each))) for each in functions],
        (make.__globals__ is globals(), len(vars(builtins)), type(_reader), type(AllowList)),
        dict(vars(_EXTERNALS[0])),
    )


def _content(kind: type) -> dict[str, object]:
    # Pickling an object notes the names of its slots in its class.
    return {name: value for name, value in vars(kind).items() if name != "__slotnames__"}


_BEFORE = _state()


def run(data: bytes) -> Exception | None:
    """Reads a pickle, and drops the result."""
    refusal: Exception | None = None
    tensors = _tensors()
    with _watching():
        try:
            _reader.unpack(data, tensors, _EXTERNALS)
        except WeftError as error:
            refusal = error
    done, _deeds[:] = list(_deeds), []
    assert not done, f"a pickle did this: {done}"
    assert _state() == _BEFORE, "a pickle has changed what it names"
    return refusal


class _Reduced:
    """Pickles as a given call."""

    def __init__(self, *reduced: Any) -> None:
        self._reduced = reduced

    def __reduce__(self) -> Any:
        return self._reduced


_HOSTILE: tuple[tuple[Any, ...], ...] = (
    (os.system, ("true",)),
    (eval, ("1",)),
    (getattr, (Thing, "limit")),
    (setattr, (Thing, "limit", 8)),
    (importlib.import_module, ("this",)),
    (functools.partial, (print,)),
    (operator.attrgetter("limit"), (Thing,)),
    (make, (), {"limit": 8}),
    (Thing, (), (None, {"limit": 8})),
    (Stateful, (), {"state": 1}),
)


def _seeds_of_weft() -> list[Packed]:
    values: list[Any] = [
        (None, 1, 2.5, "text", b"bytes", [1, (2,)], {"key": {3}}, 1 << 100),
        [torch.zeros(2), {"t": torch.nn.Parameter(torch.zeros(2))}],
        (Thing(Thing()), Stateful(), Thing, make, bytearray(b"array")),
        (*_EXTERNALS, ValueError("no"), CallTimeout("late", worker="w", call="c", elapsed_s=1.0)),
        (OrderedDict(a=1), deque([1]), torch.Size([2]), torch.float32, range(3)),
    ]
    return [pack(value, main_by_name=True) for value in values]


def seeds() -> list[bytes]:
    """Returns honest pickles and attacks, in several protocols."""
    build = pickle.dumps(Thing)[:-1] + pickle.dumps({"limit": 8})[2:-1] + b"b."
    hostile = [
        pickle.dumps([_Reduced(*reduced)], protocol) for reduced in _HOSTILE for protocol in (2, 4)
    ]
    texts = [
        b"cos\nsystem\n(S'true'\ntR.",
        f"c{__name__}\nos.system\n(S'true'\ntR.".encode(),
        f"c{__name__}\nThing.__init__.__globals__\n.".encode(),
        f"(i{__name__}\nThing\n.".encode(),
    ]
    honest = [packed.payload for packed in _seeds_of_weft()]
    return honest + hostile + texts + [build, *_functions()]


def _functions() -> list[bytes]:
    """Returns pickles of functions by value, which are refused whatever is on the list."""
    return [pack([lambda: 1], main_by_name=True).payload]


def _words() -> tuple[bytes, ...]:
    names = ["os", "system", "builtins", "eval", "getattr", "Thing", "make", "Stateful", __name__]
    names += [
        "torchweft",
        "make",
        "fill",
        "code",
        "__globals__",
        "__class__",
        "__setstate__",
        "__init__",
        "limit",
        "os.system",
    ]
    short = [b"\x8c" + bytes([len(name)]) + name.encode() for name in names]
    codes = [bytes([code]) for code in b"()[]}lqrtRbiocNQaehsudp0\x81\x92\x93\x94\x82\x85\x86\x87"]
    return (*short, *codes, b"\x96" + bytes(5), b"\x96\x03" + bytes(7))


TARGET = Target("allowed_pickles", run, seeds, words=_words(), length_limit=1024)
