"""Errors of calls that a program never looks at are logged once, at the caller."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

import torchweft
from tests.contract.processes import functions
from tests.contract.processes.functions import Accumulator, options, wait_until
from torchweft import rpc
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors")


def fail(text: str) -> None:
    raise LookupError(text)


def fail_later(text: str, delay_s: float) -> None:
    time.sleep(delay_s)
    raise LookupError(text)


def forget(text: str) -> None:
    rpc.rpc_async("worker0", fail, args=(text,))


class Listener(logging.Handler):
    """Keeps the log texts of the worker that it is made on."""

    texts: ClassVar[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


_listener = Listener()


def begin_to_listen() -> None:
    logging.getLogger("torchweft").addHandler(_listener)


def heard() -> list[str]:
    return _listener.texts


def end_listening() -> None:
    logging.getLogger("torchweft").removeHandler(_listener)


def look_at(reference: rpc.RRef[Any]) -> str:
    try:
        reference.to_here()
    except LookupError as error:
        return str(error)
    return "nothing"


def records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    found = [record for record in caplog.records if "never" in record.getMessage()]
    assert all(record.name == "torchweft" for record in found)
    return found


def texts(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [logging.Formatter().format(record) for record in records(caplog)]


def no_more_than(caplog: pytest.LogCaptureFixture, count: int) -> list[str]:
    """Logs a marker, and returns the texts logged without it: ``count`` at most."""
    gc.collect()
    rpc.rpc_async("worker1", fail, args=("marker",))
    rpc.remote("worker1", fail, args=("marker",))

    def has_marker() -> bool:
        return sum("marker" in text for text in texts(caplog)) >= 2

    wait_until(has_marker, lambda: str(texts(caplog)))
    found = [text for text in texts(caplog) if "marker" not in text]
    assert len(found) <= count, found
    return found


# First in the file: the other tests share a group.
def test_what_is_still_unseen_is_logged_at_shutdown(
    nursery: Nursery, caplog: pytest.LogCaptureFixture
) -> None:
    with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=options()):
        call = rpc.rpc_async("worker0", fail, args=("kept call",))
        value = rpc.remote("worker0", fail, args=("kept reference",))
        wait_until(call.done, lambda: "the call has not ended")
        assert not records(caplog)
    found = texts(caplog)
    assert sum("kept call" in text for text in found) == 1, found
    assert sum("kept reference" in text for text in found) == 1, found
    del call, value
    gc.collect()
    assert texts(caplog) == found


@pytest.mark.parametrize("to", ["worker1", "driver"])
@pytest.mark.parametrize("way", [rpc.rpc_async, rpc.remote])
def test_a_call_that_nobody_waits_for(
    group: Cluster, caplog: pytest.LogCaptureFixture, to: str, way: Any
) -> None:
    way(to, fail, args=("lost in the void",))
    wait_until(lambda: bool(records(caplog)), lambda: "nothing was logged")
    (text,) = no_more_than(caplog, 1)
    assert records(caplog)[0].levelno == logging.ERROR
    assert f"on worker {to!r}" in text
    assert "LookupError: lost in the void" in text
    assert "in fail" in text, "the traceback of the function"


def test_a_value_whose_reference_is_dropped_while_it_is_made(
    group: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    rpc.remote("worker1", fail_later, args=("late", 0.2))
    wait_until(lambda: bool(records(caplog)), lambda: "nothing was logged")
    (text,) = no_more_than(caplog, 1)
    assert "LookupError: late" in text


def test_many_calls_that_fail_in_the_same_way_are_one_line(
    group: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    calls = [rpc.rpc_async("worker1", fail, args=("alike",)) for _ in range(20)]
    wait_until(lambda: all(call.done() for call in calls), lambda: "calls have not ended")
    calls.clear()
    wait_until(lambda: bool(records(caplog)), lambda: "nothing was logged")
    found = no_more_than(caplog, 20)
    counted = sum(
        int(text.partition(" times)")[0].rpartition("(")[2]) if " times)" in text else 1
        for text in found
    )
    assert counted == 20


def wait(call: rpc.Future[None]) -> None:
    with pytest.raises(LookupError):
        call.wait()


def take(call: rpc.Future[None]) -> None:
    wait_until(call.done, lambda: "the call has not ended")
    with pytest.raises(LookupError):
        call.value()


def then(call: rpc.Future[None]) -> None:
    called: list[object] = []
    call.then(called.append)
    wait_until(lambda: bool(called), lambda: "not called")


def call_back(call: rpc.Future[None]) -> None:
    called: list[object] = []
    call.add_done_callback(called.append)
    wait_until(lambda: bool(called), lambda: "not called")


def call_back_when_done(call: rpc.Future[None]) -> None:
    wait_until(call.done, lambda: "the call has not ended")
    call_back(call)


def collect(call: rpc.Future[None]) -> None:
    with pytest.raises(LookupError):
        torch.futures.collect_all([call]).wait()


def wait_for_all(call: rpc.Future[None]) -> None:
    with pytest.raises(LookupError):
        torch.futures.wait_all([call])


def await_it(call: rpc.Future[None]) -> None:
    async def waiting() -> None:
        await call

    with pytest.raises(LookupError):
        asyncio.run(waiting())


def give_up(call: rpc.Future[None]) -> None:
    call.cancel()


@pytest.mark.parametrize(
    "look",
    [wait, take, then, call_back, call_back_when_done, collect, wait_for_all, await_it, give_up],
)
def test_an_error_that_somebody_looks_at_is_not_logged(
    group: Cluster, caplog: pytest.LogCaptureFixture, look: Callable[[Any], None]
) -> None:
    look(rpc.rpc_async("worker1", fail, args=("seen",)))
    no_more_than(caplog, 0)


def test_a_reference_that_somebody_uses_is_not_logged(
    group: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    for to in ("worker1", "driver"):
        with pytest.raises(LookupError):
            rpc.remote(to, fail, args=("fetched",)).to_here()
        with pytest.raises(LookupError):
            rpc.remote(to, fail, args=("called",)).rpc_sync().anything()
        reference = rpc.remote(to, fail, args=("handed on",))
        assert rpc.rpc_sync("worker0", look_at, args=(reference,)) == "handed on"
        del reference
    no_more_than(caplog, 0)


def test_what_goes_well_is_not_logged(group: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    rpc.rpc_async("worker1", functions.name_here)
    rpc.remote("worker1", Accumulator, args=(1.0,))
    no_more_than(caplog, 0)


def test_each_worker_logs_its_own_calls(group: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    rpc.rpc_sync("worker1", begin_to_listen)
    try:
        rpc.rpc_sync("worker1", forget, args=("not the driver's",))
        wait_until(lambda: bool(rpc.rpc_sync("worker1", heard)), lambda: "nothing was logged")
        assert "not the driver's" in rpc.rpc_sync("worker1", heard)[0]
    finally:
        rpc.rpc_sync("worker1", end_listening)
    no_more_than(caplog, 0)
