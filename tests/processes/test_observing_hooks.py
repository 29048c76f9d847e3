"""The hooks of ``torchweft.extending`` for tools that observe, in a group of two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes.functions import options
from torchweft import extending, reports, rpc
from torchweft.ids import ReferenceId
from torchweft.launch import Nursery


class Counts(extending.Watcher):
    """Notes what it is told."""

    hears_messages = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, bool]] = []
        self.created: list[int] = []
        self.sent_kinds: list[str] = []
        self.received_kinds: list[str] = []

    def call_ends(self, call: extending.OutgoingCall) -> None:
        self.calls.append((self.names.name_of(call.function), call.has_failed))

    def creation_sent(self, call: extending.OutgoingCall, reference: ReferenceId) -> None:
        self.created.append(reference.number)

    def sending(self, worker: int, notes: Sequence[tuple[Any, ...]]) -> Any:
        self.sent_kinds += [extending.Message.noted(note).kind for note in notes]

    def received(self, worker: int, note: tuple[Any, ...]) -> None:
        self.received_kinds.append(extending.Message.noted(note).kind)


def test_a_watcher_hears_of_calls_and_messages_until_it_ends(nursery: Nursery) -> None:
    with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=options()):
        counts = Counts()
        end = extending.watch(counts)
        assert rpc.rpc_sync("worker0", max, args=(1, 2)) == 2
        with pytest.raises(TypeError):
            rpc.rpc_sync("worker0", torch.zeros, args=("no size",))
        reference = rpc.remote("worker0", torch.ones, args=(2,))
        assert reference.to_here().sum() == 2
        end()
        rpc.rpc_sync("worker0", max, args=(1, 2))
        assert counts.calls[:2] == [("builtins.max", False), ("torch.zeros", True)]
        assert len(counts.created) == 1
        assert counts.sent_kinds.count("call") == 4
        assert "reply" in counts.received_kinds


def test_what_a_worker_tells_of_itself(nursery: Nursery) -> None:
    ended = []
    with torchweft.cluster(workers=1, nursery=nursery, rpc_backend_options=options()):
        rpc.rpc_sync("worker0", max, args=(1, 2))
        extending.on_leave(lambda: ended.append("left"))
        forget = extending.on_leave(lambda: ended.append("forgotten"))
        forget()
        forget()
        own = extending.own_report(reports.REPORT)
        assert own.worker == "driver"
        assert [each.name for each in own.identity.members] == ["driver", "worker0"]
        route = extending.route_to("worker0")
        assert route.is_one_host
        assert route.own_address == ""
        assert route.inline_bytes > 0
        secret, tls = extending.credentials()
        address = own.identity.members[1].addresses[0]
        asked = reports.decode(reports.Identity, reports.ask(address, reports.WHO, secret, tls, 20))
        assert asked.worker == "worker0"
        assert not ended
    assert ended == ["left"]
