from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from torchweft.compat.installing import MOST_NAMED, describe_holders


def make_module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(content)
    return module


def make_stock() -> ModuleType:
    def rpc_sync() -> None: ...

    rpc_sync.__module__ = "stock.rpc"
    return make_module("stock.rpc", rpc_sync=rpc_sync, sys=sys, print=print, TIMEOUT=60.0)


class Stock:
    """Keeps the fake module out of this module's globals, where it would also be found."""

    rpc = make_stock()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    def load(name: str, **content: Any) -> None:
        monkeypatch.setitem(sys.modules, name, make_module(name, **content))

    return load


def test_modules_that_hold_the_module_or_what_it_defines_are_named(program: Any) -> None:
    program("first", rpc=Stock.rpc, call=Stock.rpc.rpc_sync)
    program("second.part", rpc_sync=Stock.rpc.rpc_sync)
    assert describe_holders([Stock.rpc]) == "first (call, rpc), second.part (rpc_sync)"


def test_a_module_of_two_names_is_named_once(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    program("first", rpc=Stock.rpc)
    monkeypatch.setitem(sys.modules, "second", sys.modules["first"])
    assert describe_holders([Stock.rpc]) == "first (rpc)"


def test_what_the_module_only_imports_tells_nothing(program: Any) -> None:
    program("first", sys=sys, print=print, TIMEOUT=60.0)
    assert describe_holders([Stock.rpc]) == ""


def test_pytorchs_modules_are_none_of_the_program_but_its_tests_are(program: Any) -> None:
    for name in ("torch.made_up", "torchweft.made_up", "json.made_up", "_remote_module_made_up"):
        program(name, rpc=Stock.rpc)
    assert describe_holders([Stock.rpc]) == ""
    program("torch.testing.made_up", rpc=Stock.rpc)
    assert describe_holders([Stock.rpc]) == "torch.testing.made_up (rpc)"


def test_the_message_has_an_end(program: Any) -> None:
    for number in range(MOST_NAMED + 3):
        program(f"part{number}", rpc=Stock.rpc)
    assert describe_holders([Stock.rpc]).endswith(f"part{MOST_NAMED - 1} (rpc) and 3 more")


def test_a_module_that_waits_for_its_first_use_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Waiting(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} was looked at")

    monkeypatch.setitem(sys.modules, "waiting", Waiting("waiting"))
    monkeypatch.setitem(sys.modules, "no module at all", object())  # type: ignore[arg-type]
    assert describe_holders([Stock.rpc]) == ""


def test_what_only_says_that_it_is_a_module_is_passed_over(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pretender:
        __slots__ = ()
        __class__ = ModuleType  # type: ignore[assignment]

    monkeypatch.setitem(sys.modules, "pretender", Pretender())
    program("first", rpc=Stock.rpc)
    assert describe_holders([Stock.rpc]) == "first (rpc)"
