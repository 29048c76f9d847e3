from __future__ import annotations

import pytest
import torch

from torchweft.serialize import names
from torchweft.serialize.functions import resolve


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
