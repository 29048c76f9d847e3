"""References as handles of objects: equality, attributes, and what a handle says of itself."""

from __future__ import annotations

import asyncio
import gc
import re
import time
import uuid
from typing import Any

import pytest
import torch
from torch import nn

from tests.contract.processes import functions
from tests.contract.processes.functions import wait_until
from tests.contract.processes.listening import heard, listen
from torchweft import rpc
from torchweft.errors import CallTimeout, MethodNotFound

pytestmark = [pytest.mark.keeps("threads", "descriptors"), pytest.mark.usefixtures("group")]


class Account:
    """An object with methods, a property, and attributes of its own."""

    bank = "weft"

    def __init__(self, balance: int) -> None:
        self.balance = balance
        self.double = lambda: 2 * self.balance

    @property
    def is_empty(self) -> bool:
        return self.balance == 0

    def add(self, amount: int) -> int:
        self.balance += amount
        return self.balance

    async def add_soon(self, amount: int) -> int:
        return self.add(amount)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.register_buffer("scale", torch.tensor([2.0]))
        nn.init.ones_(self.layer.weight)


def same(reference: rpc.RRef[Any]) -> rpc.RRef[Any]:
    return reference


def found_in(held: dict[rpc.RRef[Any], int], reference: rpc.RRef[Any]) -> int | None:
    return held.get(reference)


def test_references_to_one_value_are_equal_wherever_they_have_travelled() -> None:
    first, other = (rpc.remote("worker0", Account, args=(1,)) for _ in range(2))
    for worker in ("worker0", "worker1", "driver"):
        again = rpc.rpc_sync(worker, same, args=(first,))
        assert (again == first, hash(again) == hash(first), again != other) == (True, True, True)
        assert rpc.rpc_sync(worker, found_in, args=({first: 7, other: 8}, again)) == 7
    own = rpc.RRef(Account(1))
    assert rpc.rpc_sync("worker1", same, args=(own,)) == own != rpc.RRef(own.local_value())
    assert first != 1
    assert {first, again} == {again}


def test_an_attribute_that_is_no_method_is_read() -> None:
    account = rpc.remote("worker0", Account, args=(3,))
    assert account.rpc_sync().balance == 3
    account.rpc_sync().add(4)
    assert (account.rpc_sync().balance, account.rpc_sync().bank) == (7, "weft")
    assert account.rpc_sync().is_empty is False
    with pytest.raises(MethodNotFound, match="no attribute 'balanse'"):
        _ = account.rpc_sync().balanse  # type: ignore[attr-defined]
    assert rpc.remote("driver", Account, args=(0,)).rpc_sync().is_empty is True


def test_an_attribute_that_is_called_is_a_method() -> None:
    account = rpc.remote("worker0", Account, args=(3,))
    for _ in range(2):
        assert account.rpc_sync().double() == 6
    assert account.rpc_async().double().wait() == 6
    assert account.remote().double().to_here() == 6
    net = rpc.remote("worker1", Net)
    x = torch.ones(1, 2)
    assert net.rpc_sync().layer(x).item() == 2.0
    assert net.rpc_sync().scale.tolist() == [2.0]


def test_what_stands_for_a_method_is_never_taken_for_a_value() -> None:
    account = rpc.remote("worker0", Account, args=(3,))
    travelled = rpc.rpc_sync("worker1", rpc.remote, args=("worker0", Account, (3,)))
    for name in (
        travelled.rpc_sync().balance,
        travelled.rpc_async().balance,
        account.rpc_async().balance,
        account.rpc_sync().add,
    ):
        for wrong in (bool, lambda each: each == 3, lambda each: each > 1, int, list):
            with pytest.raises(TypeError, match="stands for a method here, which is to be called"):
                wrong(name)
        assert "method" in repr(name)
    assert travelled.rpc_sync().add(1) == 4
    read = rpc.rpc_sync("worker0", lambda each: each.local_value().balance, (travelled,))
    assert read == 4


class Late:
    """An object whose constructor waits, on the event loop."""

    def __init__(self, value: int) -> None:
        self.value = value

    def get(self) -> int:
        return self.value


async def made_late(gate: str, value: int) -> Late:
    return Late(await rpc.rpc_async("worker1", functions.pass_gate, args=(gate, value)))


class Connected(Late):
    async def __init__(self, value: int) -> None:  # type: ignore[misc]
        await asyncio.sleep(0)
        if value < 0:
            raise LookupError("no connection")
        super().__init__(value)


async def value_of(reference: rpc.RRef[Any]) -> Any:
    found = await reference
    return getattr(found, "value", found)


def test_a_reference_can_be_awaited() -> None:
    for owner in ("worker0", "driver"):
        number = rpc.remote(owner, int, args=(7,))
        assert asyncio.run(value_of(number)) == 7
        for worker in ("worker0", "worker1", "driver"):
            assert rpc.rpc_sync(worker, value_of, args=(number,)) == 7
        gate = uuid.uuid4().hex
        late = rpc.remote(owner, made_late, args=(gate, 8))
        call = rpc.rpc_async(owner, value_of, args=(late,))
        rpc.rpc_sync("worker1", functions.open_gate, args=(gate,))
        assert call.wait() == 8
        failing = rpc.remote(owner, Connected, args=(-1,))
        with pytest.raises(LookupError, match="no connection"):
            asyncio.run(value_of(failing))


def test_a_constructor_may_be_a_coroutine() -> None:
    for owner in ("worker0", "driver"):
        made = rpc.remote(owner, Connected, args=(3,))
        assert made.rpc_sync().get() == 3
        failing = rpc.remote(owner, Connected, args=(-1,))
        with pytest.raises(LookupError, match="no connection"):
            failing.rpc_sync().get()
    both = rpc.actors(["worker0", "worker1"], Connected, value=4)
    assert both.rpc_sync(Connected.get) == [4, 4]


class Keeper:
    """May hold a reference to itself, somewhere."""

    def __init__(self) -> None:
        self.held: dict[str, list[object]] = {}

    def keep(self, reference: rpc.RRef[Keeper]) -> None:
        self.held["references"] = [reference]

    def forget(self) -> None:
        self.held.clear()


def test_an_object_that_holds_a_reference_to_itself_is_named() -> None:
    rpc.rpc_sync("worker1", listen, args=(True,))
    try:
        keepers = [rpc.remote("worker1", Keeper) for _ in range(2)]
        for each in keepers:
            each.rpc_sync().keep(each)
        keepers[1].rpc_sync().forget()
        del each, keepers
        wait_until(
            lambda: bool(rpc.rpc_sync("worker1", heard, args=("reference to itself",))),
            lambda: "nothing was logged",
        )
        (text,) = rpc.rpc_sync("worker1", heard, args=("reference to itself",))
        assert "a Keeper, holds a reference to itself" in text
    finally:
        rpc.rpc_sync("worker1", listen, args=(False,))
        rpc.rpc_sync("worker1", drop_keepers)


def drop_keepers() -> None:
    gc.collect()
    for each in gc.get_objects():
        if isinstance(each, Keeper):
            each.forget()


def test_a_reference_says_what_it_refers_to() -> None:
    account = rpc.remote("worker0", Account, args=(3,))
    assert re.fullmatch(r"RRef\(\d+\.\d+ on 'worker0': Account\)", repr(account))
    assert re.fullmatch(r"RRef\(\d+\.\d+ on 'driver'\)", repr(rpc.RRef(1)))
    gate = uuid.uuid4().hex
    late = rpc.remote("driver", made_late, args=(gate, 8))
    assert repr(late).endswith("on 'driver', being made)")
    rpc.rpc_sync("worker1", functions.open_gate, args=(gate,))
    assert late.to_here().value == 8
    failing = rpc.remote("driver", Connected, args=(-1,))
    with pytest.raises(LookupError):
        failing.to_here()
    assert repr(failing).endswith("on 'driver': Connected, failed by LookupError)")


def test_an_attribute_cannot_be_set_by_a_proxy() -> None:
    account = rpc.remote("worker0", Account, args=(3,))
    with pytest.raises(AttributeError, match="call a method of the value that sets it"):
        account.rpc_sync().balance = 5
    assert account.rpc_sync().balance == 3


class Limited:
    """Has a method with a time limit of its own."""

    @rpc.functions.timeout(0.1)
    def wait(self, limit_s: float) -> str:
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s:
            if rpc.is_cancelled():
                return "cancelled"
            time.sleep(0.001)
        return "done"


def test_a_class_sets_the_limit_of_its_method() -> None:
    limited = rpc.remote("worker0", Limited)
    for call in (
        lambda: limited.rpc_sync().wait(20),
        lambda: limited.rpc_async().wait(20).wait(),
        lambda: rpc.on(limited).rpc_sync(Limited.wait, 20),
        lambda: rpc.actors(["worker1"], Limited).rpc_sync(Limited.wait, 20),
    ):
        began_s = time.monotonic()
        with pytest.raises(CallTimeout, match=r"\(100 ms\)"):
            call()
        assert time.monotonic() - began_s < 10
    assert limited.rpc_sync(timeout=20).wait(0.2) == "done"
    assert rpc.on(limited, timeout=20).rpc_sync(Limited.wait, 0.2) == "done"
