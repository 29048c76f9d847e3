from __future__ import annotations

import contextlib
import functools
import socket
import sqlite3
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from tests.tables import cases
from torchweft.closing import Closing
from torchweft.engine.codec.objects import pack
from torchweft.errors import SerializationError


class Box:
    def __init__(self, content: object) -> None:
        self.content = content


class Slots:
    __slots__ = ("inner",)

    def __init__(self, inner: object) -> None:
        self.inner = inner


class Pair(NamedTuple):
    first: object
    second: object


LOCK = threading.Lock()


def failure(value: object) -> str:
    with pytest.raises(SerializationError) as caught:
        pack(value, main_by_name=True)
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is not None
    return str(caught.value)


def call(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return args, kwargs


def closure(captured: object) -> Any:
    return lambda: captured


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.layer.guard = LOCK  # type: ignore[assignment]


PATHS: list[tuple[Any, str]] = [
    (call({"x": Box(LOCK)}), "args[0]['x'].content"),
    (call(1, [2, (3, LOCK)]), "args[1][1][1]"),
    (call(key=Slots(LOCK)), "kwargs['key'].inner"),
    (call(Pair(1, [LOCK])), "args[0].second[0]"),
    (call(functools.partial(print, LOCK)), "args[0].args[0]"),
    (call(Box(LOCK).__init__), "args[0].__self__.content"),
    (call({LOCK}), "args[0] element"),
    (call({LOCK: 1}), "args[0] key"),
    (call(closure(LOCK)), "args[0] variable 'captured'"),
    (call(Net()), "args[0].layer.guard"),
    (((), {}, closure(Box(LOCK))), "function variable 'captured'.content"),
    ({"a": LOCK}, "value['a']"),
    (LOCK, "value"),
]


@cases(("value", "path"), PATHS)
def test_the_path_leads_to_the_culprit(value: object, path: str) -> None:
    text = failure(value)
    assert text.startswith(path)
    assert "(_thread.lock) cannot be sent" in text
    assert "lock works within one process" in text


def test_the_fix_is_named_where_it_is_known(tmp_path: Any) -> None:
    with (
        open(tmp_path / "file", "w") as file,
        socket.socket() as connection,
        contextlib.closing(sqlite3.connect(":memory:")) as database,
    ):
        culprits = {
            "as a list": (number for number in range(3)),
            "path or its content": file,
            "its address": connection,
            "one process": threading.Thread(),
            "its value": torch.futures.Future(),
            "open it on": database,
        }
        for advice, culprit in culprits.items():
            text = failure(call(0, culprit))
            assert text.startswith("args[1] ")
            assert advice in text
            text = failure(culprit)  # Its parts, such as a lock, are not named.
            assert text.startswith(f"value ({type(culprit).__module__}.".replace("builtins.", ""))
            assert advice in text


def test_an_object_that_refuses_is_named_and_not_its_parts() -> None:
    class Open(Closing):
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def close(self) -> None:
            pass

    text = failure(call(Box({"stream": Open()})))
    assert text.startswith("args[0].content['stream'] (")
    assert text.endswith("send rpc.RRef(...) of it, and call its methods there")
    assert "lock" not in text


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_cannot_be_sent_names_its_place() -> None:
    packed = torch.quantize_per_channel(
        torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint4x2
    )
    text = failure(call({"weights": packed}))
    assert text.startswith("args[0]['weights']")
    assert "dequantize()" in text
