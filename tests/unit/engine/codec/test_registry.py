"""Tests which functions and classes of Weft messages may name, and the imports for them."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

import torchweft
from tests.marked import names_of
from tests.tables import cases
from torchweft.engine.codec import registry
from torchweft.engine.codec.functions import resolve
from torchweft.engine.codec.registry import Mark
from torchweft.errors import ConfigurationError

CALLERS = {
    "Led",
    "Ways",
    "_ask",
    "_asked",
    "_call",
    "_named",
    "call",
    "call_all",
    "call_and_wait",
    "call_async",
    "call_servers",
    "call_to",
    "create",
    "gather",
    "remote",
    "rpc_async",
    "rpc_sync",
    "use",
    "run_on_owners",
    "start",
    "start_call",
    "start_calls",
}
"""Names of callables that have another worker run one of their arguments."""

_MAY_SEND = re.compile(rf'\b({"|".join(sorted(CALLERS))})\(|b["\']torchweft\.')

BY_THEMSELVES = (
    "torchweft.checkpoint.",
    "torchweft.embedding.",
    "torchweft.hybrid.",
    "torchweft.observe.doctor.",
    "torchweft.pipeline.",
    "torchweft.rl.",
    "torchweft.testing:",
    "torchweft.weights.",
)
"""Their functions read and remove files, measure, or take modules or tables of the program, so a
worker that takes part must list them itself."""

LISTED = ("checkpoint", "embedding", "hybrid", "rl", "weights")
"""Those of them that list what a strict worker names, in ``CALLABLES``; the others send modules."""

NOT_RUN = (
    "torchweft.__main__",
    "torchweft.compat.__main__",
    "torchweft.compat.bootstrap.sitecustomize",
)


def modules() -> Iterator[Any]:
    for found in pkgutil.walk_packages(torchweft.__path__, "torchweft."):
        if not found.name.endswith("__main__") and found.name not in NOT_RUN:
            yield importlib.import_module(found.name)


@functools.cache
def functions_sent() -> list[tuple[str, str]]:
    """Returns the functions that Weft's code has other workers call, with the file of the call."""
    sent = []
    for module in modules():
        path = module.__file__
        if not path.endswith(".py"):
            continue  # The native twin calls what it is given.
        with open(path, encoding="utf-8") as file:
            text = file.read()
        if not _MAY_SEND.search(text):
            continue  # without parsing it
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and _is_own_name(node.value):
                sent.append((node.value.decode(), path))
            if not isinstance(node, ast.Call):
                continue
            caller = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if caller not in CALLERS:
                continue
            for argument in node.args:
                found = value_of(argument, module)
                if isinstance(found, FunctionType) and found.__module__.startswith("torchweft."):
                    sent.append((f"{found.__module__}:{found.__qualname__}", path))
    return sent


def _is_own_name(value: object) -> bool:
    return isinstance(value, bytes) and value.startswith(b"torchweft.") and b":" in value


def value_of(expression: ast.expr, module: Any) -> Any:
    """Returns the value of a name, dotted or not, in a module; None for other expressions."""
    if isinstance(expression, ast.Name):
        return vars(module).get(expression.id)
    if isinstance(expression, ast.Attribute):
        return getattr(value_of(expression.value, module), expression.attr, None)
    return None


MARKS = {name: mark for name, mark in vars(registry).items() if isinstance(mark, Mark)}
ENTRY_POINTS = names_of(registry.remotely_callable, registry.remotely_callable_unless_strict)


def test_every_function_that_weft_has_others_call_is_marked_and_no_other_is() -> None:
    sent = {}
    for name, path in functions_sent():
        if not name.startswith(BY_THEMSELVES):
            sent[name] = path
    missing = {name: path for name, path in sent.items() if name not in ENTRY_POINTS}
    assert not missing, "mark them with torchweft.engine.codec.registry.remotely_callable"
    assert not ENTRY_POINTS - sent.keys(), "nothing in Weft calls these"


def test_what_others_call_of_a_package_is_in_its_list() -> None:
    listed = {
        f"{each.__module__}:{each.__qualname__}"
        for name in LISTED
        for each in importlib.import_module(f"torchweft.{name}").CALLABLES
    }
    packages = tuple(f"torchweft.{name}." for name in LISTED)
    sent = {name for name, _ in functions_sent() if name.startswith(packages)}
    assert {"torchweft.embedding.server:set_up", "torchweft.weights.publisher:announce"} <= sent
    assert not sent - listed, "add them to CALLABLES of their package"
    functions = {name for name in listed if isinstance(resolve(name.encode()), FunctionType)}
    functions -= {name for name in functions if name.startswith("torchweft.checkpoint.gate:")}
    assert not functions - sent, "nothing in Weft calls these"


def test_every_name_leads_to_what_is_defined_there() -> None:
    for name in names_of(*MARKS.values()):
        found: Any = resolve(name.encode())
        assert f"{found.__module__}:{found.__qualname__}" == name


def test_a_strict_worker_refuses_the_entry_points_of_compat_only() -> None:
    refused = names_of(registry.remotely_callable_unless_strict)
    assert all(name.startswith("torchweft.compat.") for name in refused), (
        "have it check its arguments, by types, and mark it with remotely_callable"
    )
    for name in names_of(registry.remotely_callable, registry.rebuilds_plain):
        assert not name.startswith("torchweft.compat.")


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_a_mark_lists_no_module_without_one(mark: Mark) -> None:
    assert {name.partition(":")[0] for name in names_of(mark)} == mark.modules


def test_a_mark_in_a_module_that_is_not_listed_is_refused() -> None:
    def function() -> None: ...

    mark = Mark("torchweft.errors")
    with pytest.raises(ConfigurationError, match=r"function may not be marked .*not on the list"):
        mark(function)
    assert not mark.has(f"{__name__}:{function.__qualname__}")


@cases(
    "name",
    [
        "torchweft.rpc.serving:method_of",
        "torchweft.rpc.serving:fetch.__globals__",
        "torchweft.rpc.serving:",
        "torchweft.rpc.serving",
        "torchweft.rpc.joining:shutdown",
        "torchweft.engine.codec.registry:remotely_callable",
        "",
        ":",
    ],
)
def test_a_name_without_a_mark_has_none(name: str) -> None:
    assert not any(mark.has(name) for mark in MARKS.values())


def test_every_safe_name_is_a_class_or_makes_a_value() -> None:
    for name in registry.SAFE:
        found = resolve(name.encode())
        assert isinstance(found, type) or found in (Ellipsis, NotImplemented), name


@cases(
    "name", ["eval", "exec", "open", "getattr", "setattr", "__import__", "compile", "type", "print"]
)
def test_what_does_more_than_make_a_value_is_not_safe(name: str) -> None:
    assert f"builtins:{name}" not in registry.SAFE
    assert not registry.is_error(f"builtins:{name}")


def test_only_names_of_operators_and_calls_may_have_two_underscores() -> None:
    assert {"__call__", "__getitem__", "__len__", "__iadd__"} <= registry.USUAL_DUNDERS
    for name in ("reduce", "class", "dict", "getattribute", "setattr", "init", "subclasses"):
        assert f"__{name}__" not in registry.USUAL_DUNDERS
