"""Observers see what a group does, without taking part in it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweft
from tests.command_line import said_by
from tests.contract.processes import deadlocks
from tests.contract.processes.functions import options, wait_until
from tests.contract.processes.observers import ANSWER_S, OPEN, group_of
from torchweft import rpc
from torchweft.cli.top import FAILURE_STATUS
from torchweft.engine.io import addresses
from torchweft.engine.io.handshake import Greeting, Handshake
from torchweft.engine.protocol.connecting import OBSERVER, Hello, Purpose
from torchweft.engine.wire.messages import Kind
from torchweft.engine.worker.current import current
from torchweft.errors import ObserveError
from torchweft.launch import Cluster, Nursery
from torchweft.observe import rates
from torchweft.observe.group import Answers, find
from torchweft.reports import DETAIL, Report, ask
from torchweft.rpc.counting import LEASE_S
from torchweft.rpc.node import current_node
from torchweft.secret import key_of_observers


def of_worker(answers: Answers, name: str) -> Report:
    return next(report for report in answers.reports if report.worker == name)


# What an observer is told


def echo(value: Any) -> Any:
    return value


def fail() -> None:
    raise ValueError("on purpose")


def is_counting() -> bool:
    return current_node().reporter.counting.since_s >= 0


@pytest.fixture(scope="module")
def trio(nursery: Nursery) -> Iterator[Cluster]:
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=options()) as group:
        yield group


@pytest.mark.keeps("threads", "descriptors")
def test_an_observer_counts_the_calls_of_both_sides(trio: Cluster) -> None:
    group = group_of(trio)
    assert group.workers == ["driver", "worker0", "worker1"]
    assert not rpc.rpc_sync("worker0", is_counting)
    before = {each.worker: each for each in group.ask(ANSWER_S).reports}
    for _ in range(50):
        rpc.rpc_sync("worker0", echo, args=(1,))
    for call in [rpc.rpc_async("worker0", echo, args=(2,)) for _ in range(10)]:
        call.wait()
    with pytest.raises(ValueError, match="on purpose"):
        rpc.rpc_sync("worker0", fail)
    kept = rpc.remote("worker0", echo, args=(torch.ones(1000),))
    assert kept.to_here().sum() == 1000
    assert rpc.rpc_sync("worker0", lambda: 7) == 7
    answers = group.ask(ANSWER_S, DETAIL)
    found = rates.functions(answers.reports, before)
    counted = {(each.function, each.direction): (each.calls, each.errors) for each in found}
    name = f"{__name__}.echo"
    assert counted[name, "out"] == counted[name, "in"] == (61, 0)
    assert counted[f"{__name__}.fail", "out"] == counted[f"{__name__}.fail", "in"] == (1, 1)
    assert counted["to_here of a reference", "out"] == (1, 0)
    (echoed,) = [each for each in found if (each.function, each.direction) == (name, "in")]
    assert 0 < echoed.p50_s <= echoed.p99_s < ANSWER_S
    owner = of_worker(answers, "worker0")
    assert [each.size_bytes for each in owner.references] == [4000]
    assert (owner.owned, of_worker(answers, "driver").held) == (1, 1)
    (mine,) = of_worker(answers, "driver").references
    assert mine.made_at.startswith(f"{__file__}:")
    del kept


def test_an_observer_changes_nothing_in_the_group(trio: Cluster) -> None:
    agent = current()
    for info in rpc.get_worker_infos():
        rpc.rpc_sync(info, str, args=(1,))  # Connections that the group makes by itself are there.

    def known() -> object:
        return list(agent.peers), rpc.get_worker_infos(), len(agent.links.all())

    before = known()
    for _ in range(3):
        assert len(group_of(trio).ask(ANSWER_S).reports) == 3
    assert known() == before


def test_calls_are_counted_no_longer_than_they_are_watched(trio: Cluster) -> None:
    group_of(trio).ask(ANSWER_S)
    node = current_node()
    assert node.reporter.counting.since_s >= 0
    assert node.worker.watchers == (node.reporter.counting,)
    node.reporter.counting.tick(time.monotonic() + LEASE_S + 1.0)
    assert node.reporter.counting.since_s < 0
    assert not node.worker.watchers


def test_an_open_call_is_told_with_its_line(trio: Cluster, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    call = rpc.rpc_async("worker0", deadlocks.read, args=(str(tmp_path / "pipe"),))
    group = group_of(trio)
    found: list[Report] = []

    def is_running() -> bool:
        found[:] = [of_worker(group.ask(ANSWER_S), "worker0")]
        return any(thread.serves for thread in found[0].threads)

    wait_until(is_running, lambda: str(found[0].served))
    (running,) = [thread for thread in found[0].threads if thread.serves]
    assert running.place == deadlocks.line_of("waits for a writer") + "read"
    (served,) = found[0].served
    assert (served.key, served.caller, served.has_begun) == (running.serves, "driver", True)
    assert served.function == "tests.contract.processes.deadlocks.read"
    (tmp_path / "pipe").write_bytes(b"")
    call.wait()


def test_the_command_shows_the_group(trio: Cluster) -> None:
    pid = str(trio.pids["worker0"])
    status, out, _ = said_by("top", pid, "--once", "--interval", "0.1")
    assert status == 0
    assert out.startswith("group ")
    assert [line.split()[0] for line in out.splitlines()[2:6]] == [
        "worker", "driver", "worker0", "worker1",
    ]  # fmt: skip
    status, out, _ = said_by("top", pid, "--json", "--interval", "0.1", "--worker", "worker1")
    told = json.loads(out)
    assert (status, told["report"]["identity"]["pid"]) == (0, trio.pids["worker1"])
    status, out, _ = said_by("top", pid, "--waits")
    assert (status, out) == (0, "no thread of 3 workers has waited for long for another worker\n")


def test_the_command_says_what_is_wrong(trio: Cluster) -> None:
    status, _, err = said_by("top", "no-such-group")
    assert status == FAILURE_STATUS
    assert "there is no group 'no-such-group' on this host" in err
    status, _, err = said_by("top", str(trio.pids["worker0"]), "--worker", "worker7")
    assert status == FAILURE_STATUS
    assert "the group has no worker 'worker7'; it has driver, worker0, worker1" in err
    status, _, err = said_by("top", "--interval", "0")
    assert status == 2
    assert "--interval is 0.0; it is at least 0.1 s" in err


# Who may observe


def test_the_key_of_the_group_opens_no_door_for_observers(trio: Cluster) -> None:
    agent = current()
    address = rpc_address_of("worker0")
    connection = addresses.dial(addresses.parse(address), ANSWER_S)
    with connection:
        handshake = Handshake.dial(connection, agent._connector.key, time.monotonic() + ANSWER_S)
        facts = Hello(Purpose.OBSERVE, question="report").facts()
        handshake.send(Kind.HELLO, Greeting(OBSERVER, facts=facts))
        with pytest.raises(ConnectionError):
            handshake.receive(Kind.WELCOME)
    with addresses.dial(addresses.parse(address), ANSWER_S) as connection:
        key = key_of_observers(None)
        handshake = Handshake.dial(connection, key, time.monotonic() + ANSWER_S)
        facts = Hello(Purpose.LINK, agent.peers[1].id).facts()
        handshake.send(Kind.HELLO, Greeting(0, facts=facts))
        with pytest.raises(ConnectionError):
            handshake.receive(Kind.WELCOME)
    assert rpc.rpc_sync("worker0", echo, args=(1,)) == 1


def rpc_address_of(worker: str) -> str:
    return current().find(worker).registration.addresses[0]


def test_an_unknown_question_is_not_answered(trio: Cluster) -> None:
    with pytest.raises(ConnectionError):
        ask(rpc_address_of("worker0"), "anything", *OPEN, ANSWER_S)
    assert json.loads(ask(rpc_address_of("worker0"), "who", *OPEN, ANSWER_S))["worker"] == "worker0"


def test_where_no_worker_listens_the_error_says_so() -> None:
    with pytest.raises(ObserveError, match=r"the worker at tcp:127\.0\.0\.1:1 cannot be asked"):
        find("tcp:127.0.0.1:1", OPEN)
