from __future__ import annotations

import importlib
import math
import os.path
import pickle
import sys
import textwrap
import types
import xml.dom
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.codec import importable
from torchweft.engine.codec.by_value import state_of
from torchweft.engine.codec.objects import pack, unpack

counter = 10
ATTRIBUTES = ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__")


def whole(value: Any) -> Any:
    packed = pack(value, main_by_name=True)
    return unpack(packed.payload, packed.tensors, packed.externals)


def programs() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Functions of many kinds, and arguments for them."""
    number, text, module = 3, "text", math
    local_lambda = lambda value: value + 1  # noqa: E731

    def annotated(value: int, *others: str, key: float = 1.5, **more: Any) -> tuple[Any, ...]:
        """Has everything that a signature may have."""
        return value, others, key, more

    def defaults(value: Any, a: Any = 1, b: Any = ("x", None)) -> Any:
        return value, a, b

    def generator(value: int) -> Any:
        yield from range(value)

    def nested(value: int) -> Any:
        def inner(more: int) -> int:
            return more + number + counter

        return inner(value)

    def recursive(value: int) -> int:
        return value * recursive(value - 1) if value else 1

    def with_attributes(value: int) -> Any:
        return value, with_attributes.mark  # type: ignore[attr-defined]

    with_attributes.mark = [1]  # type: ignore[attr-defined]

    def renamed(value: int) -> int:
        return value

    renamed.__name__, renamed.__qualname__, renamed.__doc__ = "other", "some.other", "Says more."

    return {
        "lambda": (lambda value: value + 1, (1,)),
        "cell": (lambda value: value + number, (1,)),
        "two cells": (lambda value: (value, text, number), (1,)),
        "global": (lambda value: value + counter, (1,)),
        "module in a global": (lambda value: math.floor(value), (1.5,)),
        "module in a cell": (lambda value: module.ceil(value), (1.5,)),
        "submodule": (lambda value: os.path.join(value, "x"), ("a",)),
        "torch": (lambda value: torch.nn.functional.relu(torch.tensor(value)).item(), (-1,)),
        "built-in": (lambda value: sorted(value), ([2, 1],)),
        "named function": (lambda value: importable.Base.double(value), (2,)),
        "local function": (lambda value: local_lambda(value), (1,)),
        "annotated": (annotated, (1, "b")),
        "defaults": (defaults, (1,)),
        "generator": (lambda value: list(generator(value)), (3,)),
        "nested": (nested, (1,)),
        "recursive": (recursive, (5,)),
        "attributes": (with_attributes, (1,)),
        "renamed": (renamed, (1,)),
        "decorated": (importable.decorate(lambda value: value * 2), (4,)),
        "list": (lambda value: [value, [number]], (1,)),
    }


@pytest.mark.parametrize("kind", programs())
def test_a_function_arrives_as_cloudpickle_sends_it(kind: str) -> None:
    function, args = programs()[kind]
    expected = pickle.loads(cloudpickle.dumps(function))
    arrived: Any = whole(function)
    assert arrived(*args) == function(*args) == expected(*args)
    for name in (*ATTRIBUTES, "__annotations__"):
        assert getattr(arrived, name) == getattr(expected, name), name
    assert vars(arrived).keys() == vars(expected).keys()
    hidden = {"__builtins__"}
    assert arrived.__globals__.keys() - hidden == expected.__globals__.keys() - hidden


def test_submodules_that_code_uses_are_found_once_they_are_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "xml.dom.minidom", raising=False)
    monkeypatch.delattr(xml.dom, "minidom", raising=False)
    function: Any = lambda: xml.dom.minidom.parseString  # noqa: E731
    assert state_of(function)[1]["_cloudpickle_submodules"] == [xml.dom]
    importlib.import_module("xml.dom.minidom")
    packed = pack(function, main_by_name=True)
    monkeypatch.delitem(sys.modules, "xml.dom.minidom")
    unpack(packed.payload, [], [])
    assert "xml.dom.minidom" in sys.modules


def unusual() -> dict[str, Any]:
    def documented() -> int:
        return 1

    documented.__doc__ = b"bytes"  # type: ignore[assignment]

    def homeless() -> int:
        return 1

    homeless.__module__ = None  # type: ignore[assignment]

    def odd() -> Any:
        return "constant"

    consts = tuple(
        importable.Base if value == "constant" else value for value in odd.__code__.co_consts
    )
    odd.__code__ = odd.__code__.replace(co_consts=consts)

    def empty() -> Any:
        return 1 if True else later

    if empty() == 2:
        later = 1  # An empty cell at the time of sending.
    module = types.ModuleType("made_up")
    dynamic = lambda: module.__name__  # noqa: E731
    return {
        "docstring of bytes": documented,
        "no module": homeless,
        "a constant that is a class": odd,
        "an empty cell": empty,
        "a module without a name": dynamic,
    }


@pytest.mark.parametrize("kind", unusual())
def test_an_unusual_function_travels(kind: str) -> None:
    function = unusual()[kind]
    arrived: Any = whole(function)
    assert arrived() == function()
    assert arrived.__doc__ == function.__doc__


# Random functions


@st.composite
def sources(draw: st.DrawFn) -> str:
    """A program that defines ``function``, of random parts, and functions that it refers to."""
    constants = st.sampled_from(["1", "-2.5", "'x'", "b'y'", "None", "(1, 'a')", "[1]", "{'k': 2}"])
    lines = [f"g{place} = {draw(constants)}" for place in range(draw(st.integers(0, 2)))]
    globals_ = [line.split()[0] for line in lines]
    lines += ["import math", "def helper(x):\n    global calls\n    calls = 1\n    return [x]"]
    lines.append("def make():")
    cells = [f"c{place}" for place in range(draw(st.integers(0, 2)))]
    lines += [f"    {cell} = {draw(constants)}" for cell in cells]
    parts = draw(
        st.lists(
            st.sampled_from(
                [*globals_, *cells, "a", "k", "len('ab')", "math.pi", "helper(a)", "rest", "more"]
                + ["(lambda: (a, k))()", "[a for _ in range(2)]"]
                + (["(lambda x: (x, c0))(a)"] if cells else [])
            ),
            min_size=1,
        )
    )
    default = draw(st.one_of(st.none(), constants))
    key_default = draw(st.one_of(st.none(), constants))
    note = draw(st.sampled_from(["", ": int", ": 'text'", ": list[int]"]))
    a = f"a{note}" + (f" = {default}" if default else "")
    k = f"k{draw(st.sampled_from(['', ': str']))}" + (f" = {key_default}" if key_default else "")
    document = draw(st.sampled_from(["", '        "Documented."']))
    lines += [f"    def function({a}, *rest, {k}, **more):", document]
    lines.append(f"        return ({', '.join(parts)},)")
    if draw(st.booleans()):
        lines.append(f"    function.attribute = {draw(constants)}")
    if draw(st.booleans()):
        lines.append("    function.__qualname__ = 'Another.name'")
    lines += ["    return function", "function = make()"]
    if draw(st.booleans()):
        lines.append("function = (lambda inner: lambda *a, **k: inner(*a, **k))(function)")
    return "\n".join(filter(None, lines))


@settings(max_examples=80, deadline=None)
@given(sources())
def test_random_functions_arrive_as_cloudpickle_sends_them(source: str) -> None:
    namespace: dict[str, Any] = {"__name__": "made_up", "__file__": "made_up.py"}
    exec(textwrap.dedent(source), namespace)
    function = namespace["function"]
    expected = pickle.loads(cloudpickle.dumps(function))
    for _ in range(2):
        arrived: Any = whole(function)
        for name in (*ATTRIBUTES, "__annotations__"):
            assert getattr(arrived, name) == getattr(expected, name), name
        assert vars(arrived) == vars(expected)
        args: Any
        for args, keywords in (((1,), {"k": 2}), ((1, 2), {"k": 3, "z": 4}), ((), {})):
            results = []
            for each in (function, expected, arrived):
                try:
                    results.append(each(*args, **keywords))
                except TypeError as error:
                    results.append(str(error).split("(")[-1])
            assert results[0] == results[1] == results[2]
