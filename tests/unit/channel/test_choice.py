from __future__ import annotations

import dataclasses
import json
import logging
import os
from typing import Any

import pytest

from tests.unit.channel.processes import dead_pid
from torchweft import knobs
from torchweft.channel import rdma
from torchweft.channel.choice import UNTRIED, Capabilities, Channels, choose, describe
from torchweft.channel.cma import Nonce, find_obstacle
from torchweft.channel.table import ChannelKind
from torchweft.errors import ConfigurationError, ProtocolError

INLINE, STREAM, CMA, SHM, STRIPED, CUDA_IPC, RDMA = ChannelKind
MIB = 1 << 20

_nonce = Nonce()
_obstacle = find_obstacle(os.getpid(), _nonce.address, _nonce.value)
needs_cma = pytest.mark.skipif(bool(_obstacle), reason=f"no cma here: {_obstacle}")


@pytest.fixture
def ours() -> Capabilities:
    return describe(Nonce())


@pytest.fixture
def theirs() -> Capabilities:
    return describe(_nonce)


def _receive_obstacle(ours: Capabilities, theirs: Capabilities) -> str:
    return choose(ours, theirs, "ps").verdict()["cma"]


def _with_facts(capabilities: Capabilities, **facts: Any) -> Capabilities:
    changed = dataclasses.replace(capabilities.facts, **facts)
    return dataclasses.replace(capabilities, facts=changed)


def test_capabilities_survive_json(ours: Capabilities) -> None:
    assert Capabilities.from_json(json.loads(json.dumps(ours.as_json()))) == ours


@pytest.mark.parametrize(
    "change",
    [
        {"nonce_address": "1"},
        {"nonce_address": -1},
        {"nonce_address": 1 << 64},
        {"nonce": 5},
        {"cma_obstacle": None},
        {"facts": {}},
        {"facts": None},
    ],
)
def test_malformed_capabilities_are_refused(ours: Capabilities, change: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        Capabilities.from_json(ours.as_json() | change)


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(ProtocolError):
        Capabilities.from_json(["nonce"])


@needs_cma
def test_a_peer_of_the_same_host_and_user_is_pulled_from(
    ours: Capabilities, theirs: Capabilities
) -> None:
    channels = choose(ours, theirs, "ps")
    assert channels.verdict()["cma"] == ""
    assert channels.source_pid() == theirs.facts.pid


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"boot_id": "another", "hostname": "node7"}, r"another host \(node7\)"),
        ({"boot_id": ""}, "another host"),
        ({"pid_namespace": 1}, "another process namespace"),
        ({"uid": 12345}, "as user 12345"),
    ],
)
def test_facts_that_rule_it_out_are_named(
    ours: Capabilities, theirs: Capabilities, facts: dict[str, object], reason: str
) -> None:
    channels = choose(ours, _with_facts(theirs, **facts), "ps")
    with pytest.raises(ProtocolError, match=reason):
        channels.source_pid()


def test_facts_unknown_on_both_sides_are_not_equal(
    ours: Capabilities, theirs: Capabilities
) -> None:
    for facts in ({"boot_id": ""}, {"pid_namespace": 0}):
        assert _receive_obstacle(_with_facts(ours, **facts), _with_facts(theirs, **facts))


def test_a_side_that_cannot_says_why(ours: Capabilities, theirs: Capabilities) -> None:
    cannot = dataclasses.replace(ours, cma_obstacle="no such function")
    assert _receive_obstacle(cannot, theirs) == "no such function"
    assert "switched off" in _receive_obstacle(describe(None), theirs)
    assert "does not offer" in _receive_obstacle(ours, describe(None))


def test_the_proof_decides(ours: Capabilities, theirs: Capabilities) -> None:
    other_value = dataclasses.replace(theirs, nonce="00" * 16)
    gone = _with_facts(theirs, pid=dead_pid())
    malformed = dataclasses.replace(theirs, nonce="zz")
    assert all(_receive_obstacle(ours, each) for each in (other_value, gone, malformed))


def test_sizes_decide_once_the_peer_has_confirmed() -> None:
    channels = Channels("ps", 1, {CMA: ""})
    assert channels.channel_for(64 * MIB) is STREAM
    channels.confirm({"cma": ""})
    inline, pulled = knobs.INLINE_LIMIT_BYTES.get(), knobs.CMA_FROM_BYTES.get()
    expected = {0: INLINE, inline: INLINE, inline + 1: STREAM, pulled - 1: STREAM, pulled: CMA}
    assert {size: channels.channel_for(size) for size in expected} == expected
    obstacles = channels.obstacles()
    assert {kind for kind, obstacle in obstacles.items() if not obstacle} == {INLINE, STREAM, CMA}
    assert "not confirmed" in obstacles[ChannelKind.SHM]


def test_the_best_confirmed_way_is_taken_and_then_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = (knobs.SHM_FROM_BYTES, 100_000), (knobs.CMA_FROM_BYTES, 200_000)
    with limits[0][0].override(limits[0][1]), limits[1][0].override(limits[1][1]):
        channels = Channels("ps", 1)
    channels.confirm({"shm": "", "cma": ""})
    assert [channels.channel_for(size) for size in (99_999, 100_000, MIB)] == [STREAM, SHM, SHM]
    assert [channels.next_best(SHM, size) for size in (199_999, 200_000)] == [STREAM, CMA]
    assert channels.next_best(CMA, MIB) is STREAM
    channels.disable(SHM, "out of order")
    assert [channels.channel_for(size) for size in (100_000, MIB)] == [STREAM, CMA]
    assert "by shm, but by cma: out of order" in caplog.text


def test_a_verdict_changes_only_what_it_names() -> None:
    channels = Channels("ps", 1)
    channels.confirm({"cma": ""})
    channels.confirm({"shm": "", "a way of a later version": ""})
    assert channels.channel_for(64 * MIB) is SHM
    channels.confirm({"shm": "gone"})
    assert channels.channel_for(64 * MIB) is CMA


def test_what_the_peer_cannot_receive_is_not_sent() -> None:
    channels = Channels("ps", 1, {CMA: ""})
    channels.confirm({"cma": "not permitted"})
    assert channels.channel_for(64 * MIB) is STREAM
    assert channels.obstacles()[CMA] == "not permitted"


def test_what_cannot_be_received_may_still_be_sent() -> None:
    channels = Channels("ps", 1, {CMA: "not permitted here"})
    channels.confirm({"cma": ""})
    assert channels.channel_for(64 * MIB) is CMA
    assert channels.verdict() == {"cma": "not permitted here"}


@pytest.mark.parametrize("verdict", [None, {"cma": 0}, "cma"])
def test_what_is_no_verdict_is_refused(verdict: object) -> None:
    with pytest.raises(ProtocolError):
        Channels("ps", 1, {CMA: ""}).confirm(verdict)


def test_disabling_warns_once_and_lasts(caplog: pytest.LogCaptureFixture) -> None:
    channels = Channels("trainer3", 1)
    channels.confirm({"cma": ""})
    with caplog.at_level(logging.WARNING):
        channels.disable(CMA, "Operation not permitted")
        channels.disable(CMA, "once more")
    channels.confirm({"cma": ""})
    assert channels.channel_for(64 * MIB) is STREAM
    assert channels.obstacles()[CMA] == "Operation not permitted"
    [record] = caplog.records
    for part in ("trainer3", "cma", "stream", "Operation not permitted"):
        assert part in record.getMessage()


@pytest.mark.parametrize("kind", [INLINE, STREAM])
def test_the_last_resort_cannot_be_disabled(kind: ChannelKind) -> None:
    with pytest.raises(ConfigurationError):
        Channels("ps", 1, {CMA: ""}).disable(kind, "slow")


def _rdma_verdict(
    ours: Capabilities, theirs: Capabilities, obstacle: str = "", peer_obstacle: str = ""
) -> str:
    ours = dataclasses.replace(ours, rdma_obstacle=obstacle)
    theirs = dataclasses.replace(theirs, rdma_obstacle=peer_obstacle)
    return choose(ours, theirs, "ps").verdict()["rdma"]


def test_rdma_is_for_other_hosts_unless_it_is_forced(
    ours: Capabilities, theirs: Capabilities
) -> None:
    elsewhere = _with_facts(theirs, boot_id="another")
    assert not _rdma_verdict(ours, elsewhere)
    assert _rdma_verdict(ours, elsewhere, "no device") == "no device"
    assert _rdma_verdict(ours, elsewhere, "", "no device") == "of the peer: no device"
    assert _rdma_verdict(ours, theirs) == "the peer is on this host"
    with knobs.RDMA.override("1"):
        assert not _rdma_verdict(ours, theirs)


def test_this_process_says_why_it_has_no_rdma() -> None:
    with knobs.RDMA.override("0"):
        assert describe(None).rdma_obstacle == "WEFT_RDMA=0 is set"
        assert describe(None).rdma_obstacle == rdma.own_obstacle()


def test_rdma_is_tried_before_it_counts_as_used() -> None:
    channels = Channels("ps", 1)
    channels.confirm({"rdma": "", "striped": ""})
    assert channels.channel_for(MIB) == RDMA
    assert channels.channel_for(MIB - 1) == STREAM
    assert channels.next_best(RDMA, 4 * MIB) == STRIPED
    assert channels.obstacles()[RDMA] == UNTRIED
    channels.prove(RDMA)
    channels.confirm({"rdma": ""})
    assert channels.obstacles()[RDMA] == ""
    channels.disable(RDMA, "the cable is out")
    channels.prove(RDMA)
    assert channels.obstacles()[RDMA] == "the cable is out"
    assert channels.channel_for(4 * MIB) == STRIPED
