from __future__ import annotations

import pickle

import torch

from torchweft.rpc.functions import async_execution
from torchweft.rpc.serving import ASYNC_MARK


def plain(value: int) -> int:
    return value


@async_execution
def later(value: int, *, scale: int = 1) -> torch.futures.Future[int]:
    """Says so later."""
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(value * scale)
    return future


class Service:
    @staticmethod
    @async_execution
    def static(value: int) -> torch.futures.Future[int]:
        return later(value)

    @classmethod
    @async_execution
    def of_class(cls, value: int) -> torch.futures.Future[int]:
        return later(value)

    @async_execution
    def method(self, value: int) -> torch.futures.Future[int]:
        return later(value)


def test_the_mark_is_seen_on_every_kind_of_function() -> None:
    assert hasattr(later, ASYNC_MARK)
    assert hasattr(Service.static, ASYNC_MARK)
    assert hasattr(Service.of_class, ASYNC_MARK)
    assert hasattr(Service().method, ASYNC_MARK)
    assert not hasattr(plain, ASYNC_MARK)
    assert not hasattr(len, ASYNC_MARK)


def test_called_locally_it_returns_its_future() -> None:
    assert later(3, scale=2).wait() == 6
    assert Service.static(1).wait() == Service.of_class(1).wait() == Service().method(1).wait() == 1


def test_it_stays_what_it_was_by_name() -> None:
    assert later.__name__ == "later"
    assert later.__doc__ == "Says so later."
    assert pickle.loads(pickle.dumps(later)) is later
