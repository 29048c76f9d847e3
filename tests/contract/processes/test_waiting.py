"""Waits for one future and for some of several, with a limit, by threads and by coroutines."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.contract.processes import functions
from tests.contract.processes.functions import LIMIT_S
from torchweft import rpc
from torchweft.errors import ArgumentTypeError, CallTimeout, ConfigurationError
from torchweft.launch import Cluster

pytestmark = pytest.mark.keeps("threads", "descriptors")
SHORT_S = 0.05


class Gate:
    """A call of worker 1 that ends when the test says so."""

    def __init__(self, value: int) -> None:
        self._name = uuid.uuid4().hex
        self.call = rpc.rpc_async("worker1", functions.pass_gate, args=(self._name, value))

    def open_soon(self) -> rpc.Future[None]:
        return rpc.rpc_async("worker1", functions.open_gate, args=(self._name,))

    def open(self) -> None:
        self.open_soon().wait()


def soon(value: int) -> rpc.Future[int]:
    return rpc.rpc_async("worker0", functions.soon, args=(value,))


@pytest.mark.parametrize(
    "wait",
    [
        lambda call: call.wait(timeout=SHORT_S),
        lambda call: call.wait(0),
        lambda call: call.result(timeout=SHORT_S),
    ],
)
def test_a_wait_may_end_before_its_call(group: Cluster, wait: Callable[[Any], Any]) -> None:
    gate = Gate(5)
    with pytest.raises(CallTimeout, match=r"pass_gate on worker 'worker1' .*the call goes on"):
        wait(gate.call)
    assert not gate.call.done()
    gate.open()
    assert gate.call.wait(timeout=LIMIT_S) == gate.call.result() == 5
    assert wait(gate.call) == 5


def test_a_limit_of_a_wait_in_a_function_is_at_most_its_caller_s(group: Cluster) -> None:
    began_s = time.monotonic()
    with pytest.raises(CallTimeout):
        rpc.rpc_sync("worker0", wait_for_a_gate, args=(LIMIT_S,), timeout=0.3)
    assert time.monotonic() - began_s < LIMIT_S / 2


def wait_for_a_gate(limit_s: float) -> None:
    Gate(0).call.wait(limit_s)


def test_errors_of_calls_are_raised_by_a_limited_wait(group: Cluster) -> None:
    failing = rpc.rpc_async("worker0", functions.fail, args=(KeyError("k"),))
    with pytest.raises(KeyError):
        failing.wait(LIMIT_S)
    with pytest.raises(KeyError):
        failing.result()


def test_some_of_several_are_waited_for(group: Cluster) -> None:
    gates = [Gate(0), Gate(1)]
    quick = [soon(2), rpc.rpc_async("worker0", functions.fail, args=(KeyError("k"),))]
    futures = [gates[0].call, *quick, gates[1].call]
    done, others = rpc.wait(futures, num_returns=2, timeout=LIMIT_S)
    assert (done, others) == (quick, [gates[0].call, gates[1].call])
    assert rpc.wait(others, timeout=SHORT_S) == ([], others)
    assert rpc.wait(others, timeout=0) == ([], others)
    gates[1].open()
    assert rpc.wait(others) == ([gates[1].call], [gates[0].call])
    assert rpc.wait(futures, num_returns=2) == (quick, others)  # no more than are asked for
    gates[0].open()
    assert rpc.wait(futures, num_returns=4) == (futures, [])
    with pytest.raises(KeyError):
        quick[1].wait()


def test_mistakes(group: Cluster) -> None:
    call = soon(1)
    for wrong in (0, 2, 1.0):
        with pytest.raises(ConfigurationError, match="num_returns"):
            rpc.wait([call], num_returns=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="pass several futures"):
        rpc.wait(call)  # type: ignore[type-var]
    with pytest.raises(ArgumentTypeError, match="what rpc_async returns"):
        rpc.as_completed([call]).add(1)  # type: ignore[arg-type]
    call.wait()


def test_the_next_piece_goes_to_whoever_is_free(group: Cluster) -> None:
    held, pieces, taken = Gate(-1), iter(range(6)), []
    running = rpc.as_completed([held.call, soon(next(pieces))])
    for future in running:
        taken.append(future.wait())
        piece = next(pieces, None)
        if piece is not None:
            running.add(soon(piece))
        elif not held.call.done():
            held.open()
    assert taken == [0, 1, 2, 3, 4, 5, -1]
    running.add(soon(7))
    assert [future.wait() for future in running] == [7]


def test_a_coroutine_takes_what_is_done_and_others_go_on(group: Cluster) -> None:
    assert asyncio.run(asyncio.wait_for(take_while_ticking(), LIMIT_S)) == [1, 2, 3, 4, 0]
    found = rpc.rpc_sync("worker0", take_while_ticking, timeout=LIMIT_S)
    assert found == [1, 2, 3, 4, 0]


async def take_while_ticking() -> list[int]:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.ensure_future(tick())
    gate, found = Gate(0), []
    running = rpc.as_completed([gate.call, soon(1), soon(2)])
    async for future in running:
        before = ticks
        found.append(await future)
        if found[-1] in (1, 2):
            running.add(soon(found[-1] + 2))
        if len(found) == 4:
            await gate.open_soon()
            assert ticks > before
    ticking.cancel()
    return [*sorted(found[:-1]), found[-1]]


def test_the_limit_of_as_completed_holds_in_a_coroutine(group: Cluster) -> None:
    gate = Gate(0)

    async def take() -> list[int]:
        return [await each async for each in rpc.as_completed([gate.call], timeout=SHORT_S)]

    with pytest.raises(CallTimeout, match="on 'worker1'"):
        asyncio.run(take())
    gate.open()
    assert gate.call.wait() == 0


def test_futures_of_torch_are_waited_for_as_well() -> None:
    made: list[torch.futures.Future[int]] = [torch.futures.Future() for _ in range(2)]
    assert rpc.wait(made, timeout=0) == ([], made)
    made[1].set_result(1)
    assert rpc.wait(made) == ([made[1]], [made[0]])
    assert next(rpc.as_completed(made)) is made[1]
    made[0].set_result(0)
