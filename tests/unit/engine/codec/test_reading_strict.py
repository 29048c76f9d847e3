"""Tests the names that a strict worker accepts: registered functions and declared methods."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import pytest
import torch

from tests.tables import cases
from tests.unit.engine.codec import admitted
from torchweft.engine.codec import registry
from torchweft.engine.codec.functions import name_of
from torchweft.engine.codec.reading import StrictNames
from torchweft.engine.codec.registry import Callables
from torchweft.errors import ArgumentTypeError, NotAllowed
from torchweft.rpc import expose, register


@register
def registered(value: int) -> int:
    return value + 1


def other(value: int) -> int:
    return value


class Base:
    def __init__(self) -> None:
        self.closed = other

    @expose
    def open(self) -> str:
        return "open"

    @expose
    def overridden(self) -> str:
        return "base"

    def closed(self) -> str:
        return "closed"

    @staticmethod
    @expose
    def static(value: int) -> int:
        return value

    @expose
    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    @expose
    def __call__(self) -> str:
        return "called"

    @expose
    async def later(self) -> int:
        return 1

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("the value was asked")


class Derived(Base):
    def overridden(self) -> str:
        return "derived"


class Again(Derived):
    @expose
    def overridden(self) -> str:
        return "again"


NAMES = StrictNames([torch.add, admitted.Model.make], "ps")


def test_what_the_program_or_the_worker_has_registered_is_found() -> None:
    assert NAMES.resolve(b"tests.unit.engine.codec.test_reading_strict:registered") is registered
    name = name_of(torch.add, main_by_name=True)
    assert name is not None
    assert NAMES.resolve(name) is NAMES.resolve_value(name) is torch.add
    assert NAMES.resolve(b"tests.unit.engine.codec.admitted:Model.make")(3).value == 3
    NAMES.check_called(registered)
    NAMES.check_called(torch.add)


@cases(
    "name",
    [
        b"tests.unit.engine.codec.test_reading_strict:other",
        b"tests.unit.engine.codec.test_reading_strict:registered.__globals__",
        b"tests.unit.engine.codec.admitted:Model",
        b"os:system",
        b"torch:mul",
        b"torchweft.errors:_rebuild_with_fields",
        b"torchweft.engine.codec.registry:register",
        b"",
        b"\xff:\xfe",
    ],
)
def test_nothing_else_is(name: bytes) -> None:
    for find in (NAMES.resolve, NAMES.resolve_value):
        with pytest.raises(NotAllowed, match=r"'ps' is strict .*rpc\.register"):
            find(name)


def test_a_module_that_is_not_imported_is_named() -> None:
    for find in (NAMES.resolve, NAMES.resolve_value):
        with pytest.raises(NotAllowed, match=r"not imported there.* import jobs\.later in that"):
            find(b"jobs.later:square")


@pytest.mark.parametrize("package", registry.REGISTERED_TOGETHER)
def test_packages_whose_callables_are_registered_together(package: str) -> None:
    assert importlib.import_module(package).CALLABLES
    with pytest.raises(
        NotAllowed, match=rf"{package} needs .*\(\*{package}\.CALLABLES, \."
    ) as caught:
        NAMES.resolve(f"{package}.owner:write".encode())
    assert "import" not in str(caught.value)


def test_errors_are_values_and_are_not_called() -> None:
    found = NAMES.resolve_value(b"torchweft.errors:NotAllowed")
    assert found is NotAllowed
    assert NAMES.find_global("builtins", "KeyError") is KeyError
    for kind in (NotAllowed, KeyError):
        with pytest.raises(NotAllowed):
            NAMES.check_called(kind)
    with pytest.raises(NotAllowed):
        NAMES.resolve(b"builtins:KeyError")
    for path in ("_rebuild_with_fields", "NotAllowed.__init__", "annotations"):
        with pytest.raises(NotAllowed):
            NAMES.find_global("torchweft.errors", path)


def test_entry_points_of_weft_are_called_and_are_no_values() -> None:
    name = b"torchweft.rpc.serving:fetch"
    assert callable(NAMES.resolve(name))
    with pytest.raises(NotAllowed):
        NAMES.resolve_value(name)
    with pytest.raises(NotAllowed):
        NAMES.resolve(b"torchweft.compat.rpc.references:when_made")


def test_a_new_definition_takes_the_place_of_the_old_one() -> None:
    table = Callables()

    def made(value: int) -> Any:
        def inner() -> int:
            return value

        inner.__module__, inner.__qualname__ = __name__, "nowhere"
        return inner

    first, second = made(1), made(2)
    table.add(first)
    table.add(second)
    assert table.find(f"{__name__}:nowhere".encode()) is second
    assert table.has(second)
    assert not table.has(first)


@pytest.mark.parametrize(
    "function", [lambda: 1, functools.partial(other, 1), Base().open, 3, "os:system", torch.ones(1)]
)
def test_what_has_no_name_is_not_registered(function: Any) -> None:
    with pytest.raises(ArgumentTypeError):
        register(function)

    def local() -> None: ...

    with pytest.raises(ArgumentTypeError, match="top level"):
        register(local)


def test_declared_methods_are_called() -> None:
    value = Base()
    assert NAMES.method_of(value, "open")() == "open"
    assert NAMES.method_of(value, "static")(3) == 3
    assert NAMES.method_of(value, "of_class")() == "Base"
    assert NAMES.method_of(value, "__call__")() == "called"
    assert NAMES.method_of(Derived(), "open")() == "open"
    assert NAMES.method_of(Derived(), "of_class")() == "Derived"
    assert NAMES.method_of(Again(), "overridden")() == "again"


@cases(
    "name", ["closed", "nothing", "__init__", "__class__", "__dict__", "__getattr__", "", "open.x"]
)
def test_other_methods_are_not(name: str) -> None:
    with pytest.raises(NotAllowed, match=r"rpc\.expose"):
        NAMES.method_of(Base(), name)


def test_a_method_that_overrides_a_declared_one_is_declared_itself() -> None:
    with pytest.raises(NotAllowed, match="Derived overrides it"):
        NAMES.method_of(Derived(), "overridden")


def test_a_class_behind_a_reference_and_values_of_others_have_no_methods() -> None:
    for value, name in ((Base, "of_class"), (torch.ones(1), "fill_"), ([], "append")):
        with pytest.raises(NotAllowed):
            NAMES.method_of(value, name)
    instance: Any = Base()
    vars(instance)["extra"] = registered
    with pytest.raises(NotAllowed):
        NAMES.method_of(instance, "extra")
    vars(instance)["open"] = other
    assert NAMES.method_of(instance, "open")() == "open"


def test_a_wrapper_does_not_take_the_declaration_along() -> None:
    class Wrapped:
        @torch.no_grad()
        @expose
        def run(self) -> None: ...

    assert not registry.is_exposed(vars(Wrapped)["run"])
    with pytest.raises(NotAllowed):
        NAMES.method_of(Wrapped(), "run")


def test_what_cannot_be_declared_is_refused_where_it_stands() -> None:
    with pytest.raises(ArgumentTypeError, match="outside of any class"):
        expose(other)
    with pytest.raises(ArgumentTypeError, match="a property"):

        class WithProperty:
            @expose  # type: ignore[prop-decorator]
            @property
            def value(self) -> int:
                return 1

    for name in ("_hidden", "__init__", "__getattr__", "__reduce__"):
        with pytest.raises(ArgumentTypeError, match="leading underscore"):
            type("Made", (), {name: expose(_method(name))})


def _method(name: str) -> Any:
    def function(self: Any) -> None: ...

    function.__name__, function.__qualname__ = name, f"Made.{name}"
    return function
