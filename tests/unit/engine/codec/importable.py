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
