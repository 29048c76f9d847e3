"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.processes.test_tensors_in_messages import facts, facts_of, tensors
from torchweft import autograd, rpc
from torchweft.engine.worker.current import current
from torchweft.errors import SerializationError
from torchweft.launch import Cluster
from torchweft.rpc.worker import WORKER

pytestmark = pytest.mark.keeps("threads", "descriptors")

LARGE = torch.zeros(1 << 17)
"""Beside it, all tensors of a message go by tables."""


def back(*args: Any, **kwargs: Any) -> Any:
    return [*args, *kwargs.values()]


WAYS: dict[str, Callable[[dict[str, Tensor]], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "by position": lambda given: (tuple(given.values()), {}),
    "by keyword": lambda given: ((), {name.replace(" ", "_"): it for name, it in given.items()}),
    "in a list": lambda given: (([*given.values()],), {}),
    "in a dict": lambda given: ((1, {"all": given, "text": "x"}), {}),
    "among others": lambda given: ((None, given["plain"], "text", given["leaf"], 2.5), {}),
}

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "outside": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "in a context": autograd.context,
}


@pytest.fixture
def was_inline() -> Callable[[], bool]:
    """Tells whether all tensors since it was last asked have stood in their messages."""
    messages, by_tables = current().slots[WORKER].tensor_messages, list[int]()
    encode = messages.encode

    def noted(*args: Any) -> Any:
        by_tables.append(1)
        return encode(*args)

    messages.encode = noted  # type: ignore[method-assign]

    def ask() -> bool:
        found = not by_tables
        by_tables.clear()
        return found

    return ask


@pytest.mark.parametrize("function", [facts_of, back])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_they_arrive_as_by_tables(
    group: Cluster, way: str, mode: str, function: Any, was_inline: Callable[[], bool]
) -> None:
    given = tensors()
    with MODES[mode]():
        args, kwargs = WAYS[way](given)
        inline = rpc.rpc_sync("worker0", function, args, kwargs)
        assert was_inline()
        by_tables = rpc.rpc_sync("worker0", function, (*args, LARGE), kwargs)
        assert not was_inline()
        del by_tables[len(args)]
        assert facts(inline) == facts(by_tables)
    expected = facts([*args, kwargs] if function is facts_of else back(*args, **kwargs))
    assert picked(facts(inline)) == picked(expected)


def picked(found: Any) -> Any:
    """Returns those facts that are the same at the sender."""
    if isinstance(found, dict):
        names = ("dtype", "shape", "values") if "dtype" in found else found
        return {name: picked(found[name]) for name in names}
    return [picked(each) for each in found] if isinstance(found, list) else found


def test_views_and_one_tensor_in_two_places_stay_what_they_are(
    group: Cluster, was_inline: Callable[[], bool]
) -> None:
    base = torch.zeros(6)
    whole, row = rpc.rpc_sync("worker0", back, (base, base[:3]))
    assert was_inline()
    row.fill_(1)
    assert whole.tolist() == [1, 1, 1, 0, 0, 0]
    first, second = rpc.rpc_sync("worker0", back, ([base], {"again": base}))
    assert first[0] is second["again"]
    one, other, again = rpc.rpc_sync("worker0", back, (base, 1, base))
    assert one is again
    leaf, same = rpc.rpc_sync("worker0", back, (leaf := torch.ones(2, requires_grad=True), leaf))
    assert leaf is same
    assert other == 1


def test_more_than_the_limit_are_refused_on_either_side(
    group: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = current().slots[WORKER]
    many = [torch.ones(1) for _ in range(3)]
    monkeypatch.setattr(worker.encoder, "_tensor_limit", 2)
    monkeypatch.setattr(worker.decoder, "_tensor_limit", 2)
    with pytest.raises(SerializationError, match="this worker sends at most 2"):
        rpc.rpc_sync("worker0", back, (many,))
    with pytest.raises(SerializationError, match="accepts at most 2"):
        rpc.rpc_sync("worker0", many_ones, (3,))
    assert len(rpc.rpc_sync("worker0", many_ones, (2,))) == 2


def many_ones(count: int) -> list[Tensor]:
    return [torch.ones(1) for _ in range(count)]
