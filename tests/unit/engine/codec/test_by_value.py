"""Functions and classes by value in pickles, whose code may travel beside them."""

from __future__ import annotations

import sys
import types
from typing import Any, cast

import pytest

from torchweft.engine.codec.objects import pack, unpack

# Readers that refuse functions by value


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
