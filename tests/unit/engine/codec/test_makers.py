"""Tests objects that travel as the call that makes them, and those that are left to pickle."""

from __future__ import annotations

import abc
import dataclasses
import datetime
import decimal
import enum
import fractions
import sys
import types
import uuid
from collections import Counter, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tables import cases
from tests.unit.engine.codec.trips import object_trip, tensor_trip
from torchweft.engine.codec import makers, values
from torchweft.engine.codec.objects import unpack
from torchweft.engine.codec.reading import make_reader
from torchweft.errors import NotAllowed, ProtocolError, SerializationError
from torchweft.native import native

pytestmark = pytest.mark.usefixtures("twin")

T = TypeVar("T")


@dataclasses.dataclass
class Sample:
    image: Any
    label: int = 0


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str


class Held(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Held({self.value!r})"


class Slotted:
    __slots__ = ("__own", "a")

    def __init__(self, a: Any = None) -> None:
        self.a = a

    def __repr__(self) -> str:
        return f"Slotted({self.a!r}, {hasattr(self, '_Slotted__own')})"


class SlottedBelow(Slotted):
    __slots__ = ("b",)

    def __init__(self, a: Any, b: Any) -> None:
        super().__init__(a)
        self.b = b

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"{super().__repr__()}, {self.b!r}"


class Shape(abc.ABC):
    @abc.abstractmethod
    def __repr__(self) -> str: ...


class Square(Shape):
    def __repr__(self) -> str:
        return f"Square({vars(self)})"


class Point(NamedTuple):
    x: Any
    y: Any = 0


Pair = namedtuple("Pair", "first second")


class Color(enum.Enum):
    RED = 1
    CRIMSON = 1  # noqa: PIE796
    GREEN = "g"


class Level(enum.IntEnum):
    LOW = 1

    @property
    def name(self) -> str:  # type: ignore[override]
        raise RuntimeError("a name of the program's own")


class Access(enum.Flag):
    READ = 1
    WRITE = 2


def made_of(value: Any) -> bytes | None:
    """Returns the payload of a value that goes without pickle."""
    return values.encode(value, [], 1)


UTC = datetime.timezone.utc
MADE = [
    Sample(torch.arange(3.0)),
    Sample([Sample(1), Sample(2)]),
    Frozen("a"),
    Held({"a": [1]}),
    Slotted(),
    SlottedBelow([1], torch.ones(2)),
    Square(),
    Point(torch.ones(2), "y"),
    Pair(1, (2,)),
    Color.RED,
    Color.CRIMSON,
    Level.LOW,
    Access.WRITE,
    bytearray(b"abc"),
    range(1, 9, 2),
    slice(1, None),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {}),
    Counter("abca"),
    deque([1, 2], maxlen=2),
    decimal.Decimal("-0.10"),
    decimal.Decimal("sNaN"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=1 << 100),
    datetime.date(2026, 1, 31),
    datetime.time(1, 2, 3, 4, fold=1),
    datetime.datetime(2026, 1, 31, 1, fold=1, tzinfo=datetime.timezone(-datetime.timedelta(1) / 2)),
    datetime.timedelta(-1, 2, 3),
    UTC,
    datetime.timezone(datetime.timedelta(hours=1), "one"),
    PurePosixPath("/a/b"),
    np.arange(6.0).reshape(2, 3),
    np.float32(1.5),
]


def told(value: Any) -> str:
    """Returns a text that differs for values that differ, also in their types."""
    kind, state = type(value), getattr(value, "__dict__", None)
    return (
        f"{kind.__name__} {value!r} {state!r}"
        if kind.__repr__ is not object.__repr__
        else (f"{kind.__name__} {state!r}")
    )


@cases("value", MADE)
def test_objects_of_the_usual_kinds_need_no_pickle(value: Any) -> None:
    for given in (value, [value, torch.ones(1)], {"key": (value, 5)}):
        tensors: list[Tensor] = []
        payload = values.encode(given, tensors, 1)
        assert payload is not None
        if native is not None:
            assert payload == native.encode_values(given, [], 1, values.no_home)
        for read in (unpack, make_reader([__name__], False, "ps").unpack):
            arrived = read(payload, tensor_trip(*tensors), ())
            assert told(arrived) == told(given)
    fold = getattr(value, "fold", 0)
    assert getattr(object_trip([value])[0], "fold", 0) == fold


def test_many_objects_are_left_to_pickle_which_names_their_class_once() -> None:
    some = [Point(number) for number in range(values._MOST_MADE + 1)]
    assert made_of(some[1:]) is not None
    assert made_of(some) is None
    assert object_trip(some) == some


# What pickle treats in another way than the default is left to it


class SlottedWithState:
    __slots__ = ("a",)

    def __getstate__(self) -> Any:
        return None, {}


class SlottedAgain(Slotted):
    __slots__ = ("a",)


class SlottedWithAttributes(Square):
    __slots__ = ("a",)


class WithState:
    def __getstate__(self) -> Any:
        return {"a": 1}


class SetsState:
    def __setstate__(self, state: Any) -> None:
        self.a = "set"


class Reduces:
    def __reduce__(self) -> Any:
        return int, (3,)


class ReducesAny:
    def __reduce_ex__(self, protocol: Any) -> Any:
        return int, (3,)


class Forwards:
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class New:
    def __new__(cls, *args: Any) -> Any:
        return super().__new__(cls)


class WithArguments(New):
    def __getnewargs__(self) -> Any:
        return (1,)


class Words(list):  # type: ignore[type-arg]
    pass


class OwnPoint(Point):
    """A named tuple with attributes."""


class ReducedPoint(NamedTuple):
    x: int

    def __reduce__(self) -> Any:
        return int, (self.x,)


class ByName(enum.Enum):
    A = 1

    def __reduce_ex__(self, protocol: Any) -> Any:
        return int, (7,)


class Inner:
    class Nested:
        pass


@cases(
    "value",
    [
        *(
            SlottedWithState(),
            SlottedAgain(),
            SlottedWithAttributes(),
            WithState(),
            SetsState(),
            Reduces(),
            ReducesAny(),
        ),
        *(Forwards(), New(), WithArguments(), Words([1]), OwnPoint(1), ReducedPoint(1), ByName.A),
        *(Inner.Nested(), object(), types.SimpleNamespace(a=1), ValueError("x"), torch.nn.ReLU()),
        *(Access.READ | Access.WRITE, np.array([None]), np.zeros(1, [("a", "i4")])),
        uuid.UUID(int=1, is_safe=uuid.SafeUUID.safe),
    ],
)
def test_other_objects_are_left_to_pickle(value: Any) -> None:
    assert made_of((value,)) is None


def test_classes_without_a_name_are_left_to_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local:
        pass

    former = Sample(1)
    assert made_of(Local()) is None
    for module in (None, ["list"]):
        assert made_of(type("Homeless", (), {"__module__": module})()) is None
    monkeypatch.setattr(sys.modules[__name__], "Sample", Local)  # As if it was loaded again.
    assert made_of(former) is None


# Readers


@cases("value", [Sample(1), Point(1), deque([1]), range(3)])
def test_a_strict_worker_is_sent_none_and_takes_none(value: Any) -> None:
    assert values.encode(value, [], 1 | makers.NO_MAKERS) is None
    payload = made_of(value)
    assert payload is not None
    strict = make_reader(None, True, "ps", [Sample, Point, deque])
    with pytest.raises(ProtocolError, match="an object made by"):
        strict.unpack(payload, (), ())


def test_an_allow_list_counts_for_classes_of_objects() -> None:
    for value in (Sample(1), Point(1), Color.RED):
        payload = made_of(value)
        assert payload is not None
        with pytest.raises(NotAllowed, match=__name__):
            make_reader(["json"], False, "ps").unpack(payload, (), ())


@cases(
    "call",
    [
        ("_instance", (len, {})),
        ("_instance", (SetsState, {})),
        ("_instance", (SlottedWithState, {})),
        ("_instance", (Tensor, {})),
        ("_instance", (Sample, 5)),
        ("_instance", ([], {})),
        ("_instance", (Sample,)),
        ("_record", (tuple, (1, 2))),
        ("_record", (Sample, (1, 2))),
        ("_record", (Point, [1, 2])),
        ("_record", (Point, (1, 2, 3))),
        ("_member", (Sample, "RED")),
        ("_member", (Color, 1)),
    ],
)
def test_false_parts_are_refused(call: tuple[str, tuple[Any, ...]]) -> None:
    name, arguments = call
    maker: Callable[..., Any] = getattr(makers, name)
    with pytest.raises(ProtocolError):
        values.decode(call_of(maker, arguments), (), ())


def test_a_member_that_the_receiver_lacks_is_named() -> None:
    with pytest.raises(SerializationError, match=r"Color.* has no member 'BLUE' on this worker"):
        values.decode(call_of(makers._member, (Color, "BLUE")), (), ())


def test_a_slot_that_the_receiver_lacks_is_named() -> None:
    with pytest.raises(SerializationError, match=r"Slotted.* has no slot 'b' on this worker"):
        values.decode(call_of(makers._instance, (Slotted, {"b": 1})), (), ())


def call_of(maker: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    first, rest = values._unfold_call(maker, arguments)
    payload = made_of(rest)
    assert payload is not None
    return bytes(first) + payload
