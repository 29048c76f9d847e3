"""The calls that a worker makes: the callee alone answers one."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.unit.engine.protocol.entries import Asked, answer
from torchweft.engine.protocol.calls import (
    CallClient,
)
from torchweft.errors import ProtocolError


@pytest.fixture
def client() -> CallClient[Asked]:
    return CallClient()


def sent(client: CallClient[Asked], *args: Any, **kwargs: Any) -> Asked:
    call = Asked(*args, **kwargs)
    client.add(call)
    return call


def test_only_the_callee_answers_a_call(client: CallClient[Asked]) -> None:
    call = sent(client)
    with pytest.raises(ProtocolError, match="was made to another worker"):
        client.answered(call.worker + 1, answer(call.number))
    assert call.frame is None
    assert client.answered(call.worker, answer(call.number)) is call
    assert client.expire(math.inf) == ([], math.inf)
    assert call.error is None
