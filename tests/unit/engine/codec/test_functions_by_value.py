from __future__ import annotations

import asyncio
import gc
import importlib
import linecache
import math
import os.path
import pickle
import sys
import textwrap
import threading
import types
import weakref
import xml.dom
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.interpreters import frees_functions
from tests.unit.engine.codec import importable
from torchweft.engine.codec import by_value
from torchweft.engine.codec.by_value import Code, load, take_apart
from torchweft.engine.codec.objects import pack, unpack

counter = 10
ATTRIBUTES = ("__name__", "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__")


def apart(function: Any) -> tuple[Code, list[Any]]:
    parts = take_apart(function)
    assert parts is not None
    return parts


def bind(code: Code, captured: list[Any]) -> Any:
    """Makes a function of its code and the captured values."""
    loaded = load(code)
    function = loaded.make({})
    loaded.fill(function, captured)
    return function


def bound(function: Any, *args: Any) -> tuple[Any, tuple[Any, ...]]:
    """Takes a function apart, and makes another one of the parts, as a receiver does."""
    code, captured = apart(function)
    return bind(Code(code.content), captured), args


def whole(value: Any) -> Any:
    packed = pack(value, main_by_name=True)
    return unpack(packed.payload, packed.tensors, packed.externals)


WAYS: dict[str, Callable[[Any], Any]] = {
    "in parts": lambda function: bound(function)[0],
    "whole": whole,
}


@pytest.fixture(params=WAYS)
def trip(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return WAYS[request.param]


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
def test_a_function_arrives_as_cloudpickle_sends_it(kind: str, trip: Callable[[Any], Any]) -> None:
    function, args = programs()[kind]
    expected = pickle.loads(cloudpickle.dumps(function))
    arrived = trip(function)
    assert arrived(*args) == function(*args) == expected(*args)
    for name in (*ATTRIBUTES, "__annotations__"):
        assert getattr(arrived, name) == getattr(expected, name), name
    if trip is not WAYS["in parts"]:  # Attributes go in a pickle.
        assert vars(arrived).keys() == vars(expected).keys()
    hidden = {"__builtins__"}
    assert arrived.__globals__.keys() - hidden == expected.__globals__.keys() - hidden


def test_its_code_is_loaded_once_and_its_functions_are_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)  # Else each has a copy.
    code, captured = apart(lambda value: value + counter)
    kept = Code(code.content)
    first, second = bind(kept, captured), bind(kept, captured)
    assert first is not second
    assert first.__code__ is second.__code__
    assert first.__globals__ is not second.__globals__


# Sound: nothing that may change is remembered


def test_changed_cells_globals_and_defaults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    number = 1

    def function(factor: int = 2) -> int:
        return number * factor + counter

    first = apart(function)[0]
    assert bound(function)[0]() == 12
    number = 5
    assert bound(function)[0]() == 20
    function.__defaults__ = (10,)
    assert bound(function)[0]() == 60
    monkeypatch.setitem(globals(), "counter", 0)
    assert bound(function)[0]() == 50
    assert apart(function)[0] is first  # All with the same code.


def test_another_code_object_under_the_same_id_is_another_one() -> None:
    for value in range(50):
        namespace: dict[str, Any] = {"__name__": "made"}
        exec(f"def function(): return {value}", namespace)
        assert bound(namespace["function"])[0]() == value
        namespace.clear()


def test_equal_code_has_equal_bytes() -> None:
    contents = set()
    for _ in range(3):
        namespace: dict[str, Any] = {"__name__": "made"}
        exec("def function(x): return [x, 'a', (1, 2.5)]", namespace)
        function = namespace["function"]
        contents.add(apart(function)[0].content)
        contents.add(apart(bound(function)[0])[0].content)
    assert len(contents) == 1


@pytest.mark.parametrize(
    "change",
    [
        "function.__name__ = 'other'",
        "function.__qualname__ = 'other'",
        "function.__doc__ = 'other'",
        "function.__module__ = 'other'",
        "function.__defaults__ = (1, 2)",
        "function.__kwdefaults__ = {'key': 1}",
        "function.__annotations__ = {'first': int}",
        "namespace['__name__'] = 'other'",
        "namespace['__file__'] = 'other'",
        "namespace['module'] = 3",
        "namespace['len'] = max",
        "del namespace['variable']",
        "namespace['variable'] = math",
        "function.__code__ = (lambda first, second=0, *, key=0: None).__code__",
    ],
)
def test_a_change_of_what_the_code_says_is_seen(change: str) -> None:
    namespace: dict[str, Any] = {"__name__": "made", "module": math, "variable": 1}
    source = "def function(first=0, second=0, *, key=0): return variable, module, len"
    exec(source, namespace)
    function = namespace["function"]
    before = apart(function)[0]
    assert apart(function)[0] is before
    exec(change, {"function": function, "namespace": namespace, "math": math})
    code = apart(function)[0]
    assert code.content != before.content or "efaults" in change
    expected = pickle.loads(cloudpickle.dumps(function))
    arrived = bound(function)[0]
    for name in (*ATTRIBUTES, "__annotations__"):
        assert getattr(arrived, name) == getattr(expected, name), name
    for name in ("__name__", "__file__", "variable", "module", "len"):
        assert arrived.__globals__.get(name) == expected.__globals__.get(name), name


def test_functions_of_one_code_that_differ_in_their_names_are_all_remembered() -> None:
    def decorated(name: str) -> Any:
        def wrapper() -> str:
            return name

        wrapper.__name__ = name
        return wrapper

    functions = [decorated(name) for name in ("a", "b", "c")]
    codes = [apart(function)[0] for function in functions]
    assert [apart(function)[0] for function in functions] == codes
    assert [bound(function)[0].__name__ for function in functions] == ["a", "b", "c"]


def test_a_submodule_that_is_imported_later_is_imported_by_the_receiver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "xml.dom.minidom", raising=False)
    monkeypatch.delattr(xml.dom, "minidom", raising=False)
    function = lambda: xml.dom.minidom.parseString  # noqa: E731
    before = apart(function)[0]
    importlib.import_module("xml.dom.minidom")
    content = apart(function)[0].content
    assert content != before.content
    monkeypatch.delitem(sys.modules, "xml.dom.minidom")
    load(Code(content))
    assert "xml.dom.minidom" in sys.modules


def test_captured_values_are_new_in_each_call() -> None:
    seen, count = [1], 0

    def function() -> Any:
        nonlocal count
        count += 1
        seen.append(count)
        function.calls = getattr(function, "calls", 0) + 1  # type: ignore[attr-defined]
        return seen, count, function.calls  # type: ignore[attr-defined]

    for _ in range(2):
        assert whole(function)() == ([1, 1], 1, 1)
    assert (seen, count) == ([1], 0)


def test_coroutines_and_tracebacks_are_those_of_the_original() -> None:
    async def later(value: int) -> int:
        await asyncio.sleep(0)
        return value

    assert asyncio.run(whole(later)(3)) == 3

    def fails() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here") as caught:
        bound(fails)[0]()
    last = caught.traceback[-1]
    assert str(last.path) == __file__
    assert 'raise ValueError("here")' in linecache.getline(__file__, last.lineno + 1)


# What cannot be taken apart stays with cloudpickle


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
def test_an_unusual_function_is_not_taken_apart_and_travels(kind: str) -> None:
    function = unusual()[kind]
    assert take_apart(function) is None
    arrived: Any = whole(function)
    assert arrived() == function()
    assert arrived.__doc__ == function.__doc__


def test_a_module_that_goes_by_value_is_not_taken_for_one_with_a_name() -> None:
    function = lambda: importable.Base  # noqa: E731
    assert take_apart(function) is not None
    cloudpickle.register_pickle_by_value(importable)
    try:
        assert take_apart(function) is None
    finally:
        cloudpickle.unregister_pickle_by_value(importable)
    assert take_apart(function) is not None


def test_a_module_that_the_receiver_lacks_is_an_error_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("only_here")
    monkeypatch.setitem(sys.modules, "only_here", module)
    code, captured = apart(lambda: module)
    monkeypatch.delitem(sys.modules, "only_here")
    kept = Code(code.content)
    for _ in range(2):
        with pytest.raises(ImportError, match="No module named 'only_here'"):
            load(kept)
    monkeypatch.setitem(sys.modules, "only_here", module)
    assert bind(kept, captured)() is module


# Memory


@frees_functions
def test_a_code_object_that_ends_is_forgotten() -> None:
    namespace: dict[str, Any] = {"__name__": "made"}
    exec("def function(): return 1", namespace)
    function = namespace.pop("function")
    apart(function)
    reference, count = weakref.ref(function.__code__), len(by_value._known)
    assert function.__code__ in by_value._known
    del function
    gc.collect()
    assert reference() is None
    assert len(by_value._known) < count


def test_many_threads_take_functions_apart_that_change_shape() -> None:
    def function() -> Any:
        return function.__name__

    failures: list[object] = []

    def work(name: str) -> None:
        own = types.FunctionType(
            function.__code__, {"__name__": name}, name, None, function.__closure__
        )
        for _ in range(300):
            arrived = bound(own)[0]
            if (arrived.__name__, arrived.__globals__["__name__"]) != (name, name):
                failures.append(arrived)

    threads = [threading.Thread(target=work, args=(f"name{place}",)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


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
@given(sources(), st.sampled_from(sorted(WAYS)))
def test_random_functions_arrive_as_cloudpickle_sends_them(source: str, way: str) -> None:
    namespace: dict[str, Any] = {"__name__": "made_up", "__file__": "made_up.py"}
    exec(textwrap.dedent(source), namespace)
    function = namespace["function"]
    expected = pickle.loads(cloudpickle.dumps(function))
    if way == "in parts" and vars(function):
        way = "whole"  # Attributes go in a pickle.
    for _ in range(2):
        arrived = WAYS[way](function)
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
