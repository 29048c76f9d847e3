"""Functions and classes by value in pickles, whose code may travel beside them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import types
from typing import Any, cast

import pytest
import torch

from tests.unit.engine.codec.trips import object_trip
from torchweft.engine.codec.objects import pack, unpack


def test_functions_that_share_globals_share_them_after_the_trip() -> None:
    namespace: dict[str, Any] = {"__name__": "made", "total": 1}
    exec("def add():\n global total\n total += 1\ndef get(): return total", namespace)
    add, get = object_trip([namespace["add"], namespace["get"]])
    add()
    assert get() == 2
    assert namespace["total"] == 1


def test_a_function_and_its_method_that_refer_to_each_other() -> None:
    class Local:
        """Refers to the function that refers to it."""

        def method(self) -> Any:
            return function

        def parent(self) -> Any:
            return super().__repr__()

    def function() -> type[Local]:
        return Local

    arrived = object_trip(function)
    assert arrived()().method() is arrived
    assert "Local" in arrived()().parent()
    assert arrived().__doc__ == Local.__doc__


def test_a_function_that_refers_to_a_module_without_an_import() -> None:
    """An extension written in C has it as an attribute, and no import finds it."""
    decorate: Any = torch.autograd.function.once_differentiable
    function = decorate(lambda ctx, gradient: gradient)
    assert "torch._C._functions" not in sys.modules
    assert object_trip(function).__globals__["_functions"] is torch._C._functions  # type: ignore[attr-defined]


def test_tensors_and_functions_are_one_object_each_in_a_pickle() -> None:
    tensor = torch.ones(2)
    function = lambda: tensor  # noqa: E731
    packed = pack([function, tensor, (function,)], main_by_name=True)
    assert len(packed.tensors) == 1
    arrived: Any = unpack(packed.payload, packed.tensors, [])
    assert arrived[0]() is arrived[1] is tensor
    assert arrived[2][0] is arrived[0]


# Readers that refuse functions by value


def test_enumerations_and_dataclasses_of_a_function_travel() -> None:
    class Colour(enum.Enum):
        RED = 1

        def double(self) -> int:
            return 2 * self.value

    @dataclasses.dataclass
    class Point:
        x: int
        colour: Colour = Colour.RED

        @property
        def doubled(self) -> int:
            return 2 * self.x

        @classmethod
        def origin(cls) -> Any:
            return cls(0)

    arrived = object_trip([Point(3), Colour.RED, Point])
    assert (arrived[0].x, arrived[0].doubled, arrived[0].colour.double()) == (3, 6, 2)
    assert arrived[1] is arrived[0].colour
    assert arrived[2].origin() == arrived[2](0)


MAIN = """
import functools
from typing import Callable, NewType, ParamSpec, TypeVar, TypedDict

P = ParamSpec("P")
T = TypeVar("T")
Id = NewType("Id", int)
Row = TypedDict("Row", {"id": Id})

class Weighted(Row, total=False):
    weight: float

def timed(function: Callable[P, T]) -> Callable[P, T]:
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)
    return call

@timed
def follow(row: Weighted) -> Id:
    return Id(row["id"] + 1)

@functools.lru_cache(maxsize=4)
def fibonacci(n: int) -> int:
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

@functools.singledispatch
def show(value: object) -> str:
    return "object"

@show.register
def _(value: list) -> str:
    return " ".join(map(show, value))

class Model:
    @functools.cached_property
    def size(self) -> int:
        return 3

    @functools.cache
    def scaled(self, factor: int) -> int:
        return self.size * factor
"""


def test_the_tools_of_the_standard_library_in_a_main_program_go_by_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    main: Any = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    exec(MAIN, vars(main))
    wanted = main.follow, main.fibonacci, main.show, main.Model, [main.T, main.Id, main.Weighted]
    packed = [pack(value, main_by_name=False) for value in wanted]
    vars(main).clear()  # The receiver's program defines none of these.
    follow, fibonacci, show, model, kinds = cast(
        "Any", [unpack(each.payload, [], []) for each in packed]
    )
    assert follow({"id": 4}) == 5
    assert fibonacci(20) == 6765
    assert fibonacci.cache_info().maxsize == 4
    assert show([1, [2, 3]]) == "object object object"
    assert model().scaled(4) == 12
    assert kinds[1](7) == 7
    assert kinds[2].__required_keys__ == {"id"}
    assert kinds[2].__optional_keys__ == {"weight"}


def test_cached_functions_that_are_local_travel() -> None:
    cached = functools.lru_cache(lambda value: value + 1)
    arrived = object_trip([cached, cached])
    assert arrived[0](1) == 2
    assert arrived[1].cache_info().currsize == 1
