"""Calls through a program's own pickler, and reducers that it registers with the usual one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.futures import Future

from tests.contract.processes import functions
from torchweft import rpc
from torchweft.compat.rpc import api
from torchweft.compat.rpc.internal import PythonUDF, _InternalRPCPickler
from torchweft.errors import SerializationError

pytestmark = pytest.mark.keeps("threads", "descriptors")
Call = Callable[..., Any]

CALLS: dict[str, Call] = {
    "sync": api.rpc_sync,
    "async": lambda *args, **kwargs: api.rpc_async(*args, **kwargs).wait(),
    "remote": lambda *args, **kwargs: api.remote(*args, **kwargs).to_here(),
}


@pytest.fixture(params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    return CALLS[request.param]


class Sealed:
    """Can be pickled only by a registered reducer."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> str:
        raise TypeError("sealed")


def reduce_sealed(sealed: Sealed) -> tuple[Any, ...]:
    return Sealed, (sealed.value,)


def opened(sealed: Sealed, *, plus: Any = 0) -> Any:
    return sealed.value + plus


def fetched(sealed: Sealed) -> Any:
    return sealed.value.to_here()


@rpc.async_execution
def opened_later(sealed: Sealed) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(sealed.value)
    return future


async def opened_in_a_loop(sealed: Sealed) -> Any:
    return sealed.value


def failing(sealed: Sealed) -> None:
    raise LookupError(sealed.value)


async def failing_in_a_loop(sealed: Sealed) -> None:
    raise LookupError(sealed.value)


class Pickler(_InternalRPCPickler):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[PythonUDF] = []
        self._register_reducer(Sealed, reduce_sealed)

    def serialize(self, obj: Any) -> tuple[bytes, list[torch.Tensor]]:
        self.seen.append(obj)
        return super().serialize(obj)


@pytest.fixture
def pickler() -> Iterator[Pickler]:
    made = Pickler()
    with api._use_rpc_pickler(made):
        yield made


@pytest.mark.usefixtures("group")
def test_a_call_goes_by_the_pickler_in_use(call: Call, pickler: Pickler) -> None:
    assert call("worker0", opened, (Sealed(4),), {"plus": 3}) == 7
    ((function, args, kwargs),) = pickler.seen
    assert (function, args[0].value, kwargs) == (opened, 4, {"plus": 3})
    assert torch.equal(call("worker0", opened, [Sealed(torch.ones(2))]), torch.ones(2))
    assert call("driver", opened, (Sealed(5),)) == 5
    assert call("worker0", functions.name_here) == "worker0"
    assert len(pickler.seen) == 4


@pytest.mark.usefixtures("group", "pickler")
def test_each_kind_of_function_runs_as_usual(call: Call) -> None:
    for function in (opened_later, opened_in_a_loop):
        assert call("worker1", function, (Sealed("value"),)) == "value"
    for function in (failing, failing_in_a_loop):
        with pytest.raises(LookupError, match="what happened"):
            call("worker1", function, (Sealed("what happened"),))


@pytest.mark.usefixtures("group")
def test_references_in_the_arguments_are_counted(call: Call, pickler: Pickler) -> None:
    # The fixture ``group`` checks that no worker keeps any of them.
    for owner in ("driver", "worker0", "worker1"):
        reference = rpc.remote(owner, functions.identity, (owner,))
        assert call("worker0", fetched, (Sealed(reference),)) == owner
        del reference
        pickler.seen.clear()


@pytest.mark.usefixtures("group")
def test_without_it_the_usual_pickler_is_back(call: Call, pickler: Pickler) -> None:
    with api._use_rpc_pickler(Pickler()):
        assert call("worker0", opened, (Sealed(4),)) == 4
    with pytest.raises(SerializationError, match="sealed"):
        call("worker0", opened, (Sealed(4),))
    assert not pickler.seen
