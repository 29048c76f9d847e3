"""A running group is examined from one of its workers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchweft
from tests.command_line import said_by
from tests.contract.processes.embedding_functions import end_process
from tests.contract.processes.hosts import network
from tests.far_workers import far_workers
from tests.open_workers import OpenWorkers
from torchweft import rpc
from torchweft.errors import WorkerLost
from torchweft.launch import Nursery
from torchweft.observe.doctor import Finding, Level, examine

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")


def set_torch_version(version: str) -> None:
    torch.__version__ = version  # type: ignore[assignment]


PATIENCE_S = 10.0
"""How long workers have to answer; those that answer are not waited for."""


def findings_of(timeout: float) -> list[Finding]:
    return list(examine(timeout).findings)


def test_a_blocked_port_is_named(warm: OpenWorkers, tmp_path: Path) -> None:
    settings = {"WEFT_CONNECT_TIMEOUT_S": "3"}
    with (
        network(3) as hosts,
        far_workers(warm, hosts, tmp_path, settings, detection_time=1.0) as workers,
    ):
        for one, other in ((1, 2), (2, 1)):
            hosts[one].mute(hosts[other])
        found = workers.do("worker0", findings_of, PATIENCE_S)
    pairs = {each.where: each for each in found if each.check == "pair"}
    blocked = {"worker1 -> worker2", "worker2 -> worker1"}
    assert {where for where, each in pairs.items() if each.level is Level.ERROR} == blocked
    for where in blocked:
        assert "cannot be called: " in pairs[where].text
        assert "firewall" in pairs[where].fix
    # An interface of a namespace tells the speed that its driver has been told, or none.
    assert "eth0" in pairs["worker0 -> worker1"].text


def test_another_torch_and_a_worker_that_cannot_be_called_are_named(nursery: Nursery) -> None:
    with torchweft.cluster(workers=2, nursery=nursery, check=False):
        pairs = [each for each in examine().findings if each.check == "pair"]
        assert len(pairs) == 6
        assert {each.level for each in pairs} == {Level.GOOD}
        rpc.rpc_sync("worker0", set_torch_version, ("2.0.0",))
        (error,) = [each for each in examine().findings if each.level is Level.ERROR]
        assert error.check == "versions"
        assert "2.0 on worker0" in error.text
        with pytest.raises(WorkerLost):
            rpc.rpc_sync("worker1", end_process)
        errors = [each for each in examine().findings if each.level is Level.ERROR]
        assert [each.where for each in errors if each.check == "worker"] == ["worker1"]
        assert "WorkerLost" in errors[0].text


# From outside


def test_mistakes_of_attaching_are_told() -> None:
    for arguments, told in (
        (("--group", "x", "--on", "local"), "--on and -n start workers"),
        (("--pairs", "3"), "--pairs is for a running group: add --group"),
        (("--group", "x", "--pairs", "-1"), "--pairs is -1; it is at least 0"),
    ):
        status, _, err = said_by("doctor", *arguments)
        assert (status, told in err) == (2, True), err
    status, _, err = said_by("doctor", "--group", "no-such-group")
    assert status == 1
    assert "torchweft doctor: there is no group 'no-such-group' on this host" in err
