"""The methods that a value is known to lack, tested without any worker."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn

from tests.tables import cases
from tests.unit.optim.references import Held, reference
from torchweft.errors import MethodNotFound
from torchweft.rpc.proxies import Proxy, check_method


class Plain:
    annotated: Any

    def __init__(self) -> None:
        self.set_first = print

    @property
    def shown(self) -> object:
        return self

    @shown.setter
    def shown(self, value: Any) -> None:
        self.set_by_property = value

    @staticmethod
    def attach(other: Plain) -> None:
        other.set_by_static = print

    @functools.lru_cache  # noqa: B019
    def cached(self) -> None:
        self.set_by_wrapped = print

    def nested(self) -> None:
        def inner() -> None:
            self.set_by_nested = print

        inner()

    def loss(self) -> float:
        return 0.0

    def _private(self) -> None: ...


class Derived(Plain, abc.ABC):
    def more(self) -> None: ...


class Slotted:
    __slots__ = ("callback",)


@dataclasses.dataclass
class Data:
    function: Any


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


class Setting:
    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class Updating:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Answering:
    def __getattr__(self, name: str) -> Any:
        return print


class Switching:
    def __new__(cls) -> Any:
        return Plain()


class Meta(type):
    def __call__(cls) -> Any:
        return Plain()


class OfMeta(metaclass=Meta): ...


def to(value_type: type) -> Held:
    made: Any = reference(0, 1)
    made.value_type = value_type
    return made  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("value_type", "name"),
    [
        (Plain, "los"),
        (Derived, "set_secnd"),
        (Slotted, "callbak"),
        (Data, "functio"),
        (Model, "forwrad"),
        (nn.Linear, "zero_gad"),
        (object, "anything"),
    ],
)
def test_a_method_that_cannot_be_there_is_refused(value_type: type, name: str) -> None:
    with pytest.raises(
        MethodNotFound, match=f"'{value_type.__name__}' object has no attribute '{name}'"
    ):
        check_method(to(value_type), name)
    for way in ("sync", "async", "remote"):
        assert not hasattr(Proxy(to(value_type), way, 0), name)


@cases(
    ("value_type", "name"),
    [
        *[(Plain, name) for name in ("loss", "_private", "annotated", "set_first", "shown")],
        *[(Plain, f"set_by_{how}") for how in ("property", "static", "wrapped", "nested")],
        (Derived, "set_first"),
        (Derived, "loss"),
        (Slotted, "callback"),
        (Data, "function"),
        (Model, "layer"),
        (Model, "forward"),
        (nn.Sequential, "anything"),
        *[(kind, "anything") for kind in (Setting, Updating, Answering, Switching, OfMeta)],
        (torch.Tensor, "anything"),
        (dict, "anything"),
    ],
)
def test_a_method_that_may_be_there_is_asked_for(value_type: type, name: str) -> None:
    check_method(to(value_type), name)
    assert hasattr(Proxy(to(value_type), "async", 0), name)
