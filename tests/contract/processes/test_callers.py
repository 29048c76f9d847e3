"""What a function knows of its call, and a program of its calls that failed unseen."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.processes.functions import wait_until
from torchweft import rpc
from torchweft.errors import CallCancelled

pytestmark = [pytest.mark.keeps("threads", "descriptors"), pytest.mark.usefixtures("group")]


class Asked:
    """Says who asks, by each kind of method."""

    def plain(self) -> str:
        return rpc.caller().name

    async def later(self) -> str:
        await asyncio.sleep(0)
        return await asyncio.ensure_future(self._in_a_task())

    async def _in_a_task(self) -> str:
        return rpc.caller().name

    def values(self):  # type: ignore[no-untyped-def]
        yield rpc.caller().name


def ask(asked: rpc.RRef[Asked]) -> list[str]:
    (streamed,) = rpc.stream(asked, Asked.values)
    return [asked.rpc_sync().plain(), rpc.on(asked).rpc_sync(Asked.later), streamed]


def test_a_function_knows_who_calls() -> None:
    asked = rpc.remote("worker0", Asked)
    for name in ("worker0", "worker1", "driver"):
        assert rpc.rpc_sync(name, ask, args=(asked,)) == [name] * 3
    assert rpc.caller() == rpc.get_worker_info()
    assert rpc.rpc_sync("worker1", ask_within_another, args=(asked,)) == ["driver", "worker1"]


def ask_within_another(asked: rpc.RRef[Asked]) -> list[str]:
    first = rpc.caller().name
    return [first, asked.rpc_sync().plain()]


def fail(text: str) -> None:
    raise LookupError(text)


@pytest.mark.parametrize("to", ["worker1", "driver"])
def test_the_program_is_told_of_errors_that_nobody_looked_at(to: str) -> None:
    seen: list[BaseException] = []
    remove = rpc.on_unseen_error(seen.append)
    broken = rpc.on_unseen_error(lambda _: fail("callback"))
    rpc.rpc_async(to, fail, args=("by rpc_async",))
    rpc.remote(to, fail, args=("by remote",))
    looked_at = rpc.rpc_async(to, fail, args=("looked at",))
    with pytest.raises(LookupError):
        looked_at.wait()
    given_up = rpc.rpc_async(to, asyncio.sleep, args=(60,))
    given_up.cancel()
    with pytest.raises(CallCancelled):
        given_up.wait()
    del looked_at, given_up
    wait_until(lambda: len(seen) >= 2, lambda: str(seen))
    remove()
    broken()
    assert sorted(str(each) for each in seen) == ["by remote", "by rpc_async"]
    assert {type(each) for each in seen} == {LookupError}
    heard: list[BaseException] = []
    last = rpc.on_unseen_error(heard.append)
    rpc.rpc_async(to, fail, args=("again",))
    wait_until(lambda: bool(heard), lambda: "not told")
    last()
    assert len(seen) == 2
