from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest
import torch

import torchweft
from torchweft.serialize import names
from torchweft.serialize.functions import resolve

CALLERS = {
    "Led",
    "Ways",
    "_ask",
    "call_async",
    "call_to",
    "create",
    "remote",
    "rpc_async",
    "rpc_sync",
    "run_on_owners",
    "start",
}
"""What has another worker run one of its arguments."""

BY_THEMSELVES = ("torchweft.checkpoint.",)
"""They read and remove files, so they need an entry: a worker that takes part names them."""

NOT_RUN = (
    "torchweft.__main__",
    "torchweft.compat.__main__",
    "torchweft.compat.bootstrap.sitecustomize",
)


def modules() -> Iterator[Any]:
    for found in pkgutil.walk_packages(torchweft.__path__, "torchweft."):
        if not found.name.endswith("__main__") and found.name not in NOT_RUN:
            yield importlib.import_module(found.name)


def functions_sent() -> Iterator[tuple[str, str]]:
    """Yields the functions of Weft that its code has other workers call, and where it does."""
    for module in modules():
        path = module.__file__
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and _is_own_name(node.value):
                yield node.value.decode(), path
            if not isinstance(node, ast.Call):
                continue
            caller = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            if caller not in CALLERS:
                continue
            for argument in node.args:
                found = value_of(argument, module)
                if isinstance(found, FunctionType) and found.__module__.startswith("torchweft."):
                    yield f"{found.__module__}:{found.__qualname__}", path


def _is_own_name(value: object) -> bool:
    return isinstance(value, bytes) and value.startswith(b"torchweft.") and b":" in value


def value_of(expression: ast.expr, module: Any) -> Any:
    """Returns what a name, dotted or not, means in a module; None for all else."""
    if isinstance(expression, ast.Name):
        return vars(module).get(expression.id)
    if isinstance(expression, ast.Attribute):
        return getattr(value_of(expression.value, module), expression.attr, None)
    return None


def test_every_function_that_weft_has_others_call_is_on_the_list_and_no_other_is() -> None:
    sent = {}
    for name, path in functions_sent():
        if not name.startswith(BY_THEMSELVES):
            sent[name] = path
    missing = {name: path for name, path in sent.items() if name not in names.ENTRY_POINTS}
    assert not missing, "add them to torchweft.serialize.names.ENTRY_POINTS"
    assert not names.ENTRY_POINTS - sent.keys(), "nothing in Weft calls these"


LISTED = sorted(
    names.ENTRY_POINTS | names.REBUILDERS_OF_PICKLES | names.SCRIPT_LOADERS | names.METHOD_NAMES
)


@pytest.mark.parametrize("name", LISTED)
def test_every_name_leads_to_what_is_defined_there(name: str) -> None:
    found: Any = resolve(name.encode())
    assert f"{found.__module__}:{found.__qualname__}" == name


def test_what_a_strict_worker_runs_for_others_is_chosen_among_the_entry_points() -> None:
    left_out = names.ENTRY_POINTS - names.STRICT_ENTRY_POINTS
    assert not names.STRICT_ENTRY_POINTS - names.ENTRY_POINTS
    assert all(name.startswith("torchweft.compat.") for name in left_out), (
        "check what it is given, by types, and list it in names.STRICT_ENTRY_POINTS"
    )


@pytest.mark.parametrize("name", sorted(names.SAFE))
def test_every_safe_name_is_a_class_or_makes_a_value(name: str) -> None:
    found = resolve(name.encode())
    assert isinstance(found, type) or found in (Ellipsis, NotImplemented)


@pytest.mark.parametrize(
    "name", ["eval", "exec", "open", "getattr", "setattr", "__import__", "compile", "type", "print"]
)
def test_what_does_more_than_make_a_value_is_not_safe(name: str) -> None:
    assert f"builtins:{name}" not in names.SAFE
    assert not names.is_error(f"builtins:{name}")


def test_errors_are_the_built_in_ones_that_do_not_end_a_process() -> None:
    assert names.is_error("builtins:ValueError")
    assert not names.is_error("builtins:SystemExit")
    assert not names.is_error("builtins:KeyboardInterrupt")
    assert not names.is_error("my_program:ValueError")


def test_operators_are_what_computes() -> None:
    assert names.is_operator(torch.add)
    assert names.is_operator(torch.conv2d)
    for other in (torch.load, torch.save, torch.from_file, torch.compile, torch.set_num_threads):
        assert not names.is_operator(other)


def test_only_names_of_operators_and_calls_may_have_two_underscores() -> None:
    assert {"__call__", "__getitem__", "__len__", "__iadd__"} <= names.USUAL_DUNDERS
    for name in ("reduce", "class", "dict", "getattribute", "setattr", "init", "subclasses"):
        assert f"__{name}__" not in names.USUAL_DUNDERS
