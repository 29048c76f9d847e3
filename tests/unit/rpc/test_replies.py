"""Tests that both twins answer a call with the same bytes."""

from __future__ import annotations

import functools
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import examples
from tests.unit.rpc.results import VALUES
from torchweft.engine.codec.objects import pack
from torchweft.engine.codec.values import no_home
from torchweft.engine.wire.messages import ERROR_REPLY, NO_GRAD, Kind
from torchweft.native import native, reason
from torchweft.rpc import worker
from torchweft.rpc.codec import Encoder
from torchweft.rpc.worker import Worker

PACK = functools.partial(pack, main_by_name=True)
LIMIT = 4
"""How many tensors a message may have in these tests."""


class _Sent:
    """Stands in for the agent, and keeps the answers."""

    def __init__(self) -> None:
        self.sender: Any = self
        self.answers: list[bytes] = []
        self.info = mock.Mock()
        self.info.name = "callee"

    def answer(self, peer: object, part: bytes) -> None:
        self.answers.append(part)

    def send(self, peer: object, message: Any) -> None:
        self.answers.append(b"".join(message))


def answer_by(twin: Any, result: object, context_id: int = 0) -> tuple[bytes, int]:
    """Returns the answer of one twin, and how many steps the usual way in C took."""
    sent = _Sent()
    encoder = Encoder.__new__(Encoder)
    encoder._tensor_limit = LIMIT
    encoder._arrivals = mock.Mock(keeps_graphs=False)
    peer = mock.Mock(is_self=False, main_by_name=True, receiver=1, lost=None)
    peer.name, peer.pack, peer.pickle = "caller", PACK, functools.partial(PACK, needs_pickle=True)
    peer.device_maps.moves_host_of_answers = False
    peer.registration.is_strict = False
    counted = None if twin is None else mock.Mock(wraps=twin)
    answering: Any = Worker.__new__(Worker)
    answering.agent, answering.encoder, answering._tensor_limit = sent, encoder, LIMIT
    answering.has_left, answering.on_failure = False, None
    with mock.patch.object(worker, "native", counted):
        answering.reply(peer, 1 << 40, result, context_id)
    (answer,) = sent.answers
    return answer, 0 if counted is None else counted.encode_result.call_count


@pytest.fixture(scope="module", autouse=True)
def _twin() -> None:
    if native is None:
        pytest.skip(reason)


@settings(max_examples=examples(100))
@given(VALUES, st.sampled_from([0, NO_GRAD]))
def test_both_twins_make_the_same_answer(result: object, context_id: int) -> None:
    answer, steps = answer_by(native, result, context_id)
    assert answer == answer_by(None, result, context_id)[0]
    assert steps == 1


_named = torch.ones(2)
_named.note = "an attribute"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "result", [[torch.ones(1) for _ in range(LIMIT + 1)], [threading.Lock()]], ids=["many", "lock"]
)
def test_what_cannot_be_sent_is_an_error_for_the_caller_either_way(result: object) -> None:
    for twin in (native, None):
        assert answer_by(twin, result)[0][:2] == bytes([Kind.REPLY, ERROR_REPLY])


def test_the_step_in_c_gives_up_where_it_has_to() -> None:
    assert native is not None
    for result in ([torch.ones(1) for _ in range(LIMIT + 1)], torch.ones(1, requires_grad=True)):
        assert native.encode_result(1, 0, result, True, LIMIT, no_home) is None
    assert native.encode_result(1, 0, [object()], True, LIMIT, no_home) is False
    with pytest.raises(TypeError):
        native.encode_result(1, 0, None)  # type: ignore[call-arg]
