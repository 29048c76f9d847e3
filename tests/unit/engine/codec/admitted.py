"""A module that the tests put on an allow-list, with the contents that such modules may have."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import threading
from os import system
from typing import Any

import torch

GREETING = "hello"
changed: list[str] = []
settings = {"debug": False}


def add(first: Any, second: Any) -> Any:
    return first + second


def _private(value: Any) -> Any:
    return value


@functools.lru_cache
def cached(value: int) -> int:
    return value + 1


half = functools.partial(add, 0.5)
run_anything = functools.partial(os.system)
draw = random.Random(0).random
operator = torch.ops.aten.add


class Model:
    factor = 2
    run = os.system

    def __init__(self, value: int = 0) -> None:
        self.value = value
        self.hook = add

    def scale(self, by: int) -> int:
        return self.value * by

    def _hidden(self) -> int:
        return self.value

    def __call__(self, by: int) -> int:
        return self.scale(by)

    def __len__(self) -> int:
        return self.value

    @classmethod
    def make(cls, value: int) -> Model:
        return cls(value)

    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    @property
    def escape(self) -> Any:
        return system

    def catch(self) -> None:
        self.bad_hook = system

    class Inner:
        @staticmethod
        def name() -> str:
            return "inner"


class Worker(threading.Thread):
    """Inherits methods from a module that is not on the list."""

    def mine(self) -> int:
        return 1


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs)  # type: ignore[no-any-return]


class Odd(ValueError):
    """An error of an allowed module."""


def process() -> Any:
    return subprocess.Popen
