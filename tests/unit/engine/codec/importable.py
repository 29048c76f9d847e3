"""Functions, classes and scripted functions that the tests send by name."""

from __future__ import annotations

import functools
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # scripting is deprecated, but still supported

    @torch.jit.script
    def scripted(x: Tensor) -> Tensor:
        return x + 1

    def plain(x: Tensor) -> Tensor:
        return x + 2

    renamed = torch.jit.script(plain)


@functools.lru_cache
def cached(x: int) -> int:
    return x


def decorate(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


@decorate
def decorated(x: int) -> int:
    return x


class Base:
    @classmethod
    def make(cls) -> type[Base]:
        return cls

    @staticmethod
    def double(x: int) -> int:
        return 2 * x

    def method(self) -> str:
        return type(self).__name__

    class Inner:
        pass


class Derived(Base):
    pass


def nameless(function: Any) -> Any:
    def replaced(self: Any) -> Any:
        return function(self)

    return replaced


class Renamed(Base):
    """Pickle would find no method, or another one, under the names of these functions."""

    def method(self) -> str:
        return "another one"

    @nameless
    def decorated(self) -> str:
        return "decorated"

    def __private(self) -> str:
        return "private"

    def methods(self) -> list[Any]:
        return [super().method, self.decorated, self.__private]


class Unhashable:
    """An unhashable callable that claims to equal everything."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True

    def __call__(self) -> str:
        return "called"


class Pair(NamedTuple):
    x: Tensor
    y: int
