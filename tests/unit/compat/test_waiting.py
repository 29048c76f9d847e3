"""Tests that waiting for several futures ends with the first failure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from torchweft.compat import waiting

stock = (torch.futures.wait_all, torch.futures.collect_all)


@pytest.fixture
def futures() -> Iterator[list[torch.futures.Future[Any]]]:
    made: list[torch.futures.Future[Any]] = [torch.futures.Future() for _ in range(3)]
    yield made
    for future in made:
        if not future.done():
            future.set_result(None)


def test_values_of_all(futures: list[torch.futures.Future[Any]]) -> None:
    collected = waiting.collect_all(futures)
    for number, future in enumerate(futures):
        assert not collected.done()
        future.set_result(number)
    assert [future.wait() for future in collected.wait()] == [0, 1, 2]
    assert waiting.wait_all(futures) == [0, 1, 2]
    assert waiting.wait_all(future for future in futures) == [0, 1, 2]
    assert len(waiting.collect_all(future for future in futures).wait()) == len(futures)
    assert waiting.wait_all([]) == []


def test_the_first_failure_ends_it(futures: list[torch.futures.Future[Any]]) -> None:
    collected = waiting.collect_all(futures)
    futures[1].set_exception(KeyError("first"))  # type: ignore[arg-type]
    assert collected.done()
    futures[2].set_exception(ValueError("second"))  # type: ignore[arg-type]
    for wait in (collected.wait, lambda: waiting.wait_all(futures)):
        with pytest.raises(KeyError, match="first"):
            wait()
    futures[0].set_result(1)
    with pytest.raises(KeyError, match="first"):
        waiting.wait_all(futures)


def test_futures_that_were_not_made_in_python(futures: list[torch.futures.Future[Any]]) -> None:
    def fail(_: object) -> None:
        raise ValueError("here")

    failing = futures[0].then(fail)
    fine = futures[0].then(lambda done: done.value() + 1)
    futures[0].set_result(1)
    assert waiting.wait_all([fine]) == [2]
    assert waiting.wait_all([fine, futures[0]]) == [2, 1]
    for mixed in ([failing], [futures[1], failing]):
        with pytest.raises(RuntimeError, match="here"):
            waiting.wait_all(mixed)


def test_installing() -> None:
    waiting.install()
    try:
        assert torch.futures.wait_all is waiting.wait_all
        assert torch.futures.collect_all is waiting.collect_all
    finally:
        waiting.uninstall()
    assert (torch.futures.wait_all, torch.futures.collect_all) == stock
