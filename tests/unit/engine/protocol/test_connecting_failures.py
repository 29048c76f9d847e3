from __future__ import annotations

import pytest

from tests.tables import cases
from torchweft.engine.protocol.connecting import (
    CROSSED,
    TAKEN,
    Busy,
    Crossed,
    Dial,
    Done,
    Failure,
    Gone,
    HandshakeTimeout,
    Lose,
    Refused,
    Step,
    Taken,
    Terms,
    Wait,
    check_welcome,
    failure_of,
    no_connection,
)
from torchweft.errors import ConfigurationError, ProtocolError, TlsError


@cases(
    ("error", "failure"),
    [
        (Gone(), Failure.GONE),
        (Crossed(), Failure.CROSSED),
        (Refused(), Failure.REFUSED),
        (Taken(), Failure.REFUSED),
        (ProtocolError(), Failure.REFUSED),
        (TlsError("no trust"), Failure.REFUSED),
        (ConfigurationError(), Failure.REFUSED),
        (HandshakeTimeout(), Failure.BUSY),
        (TimeoutError(), Failure.BUSY),
        (ConnectionRefusedError(), Failure.BROKEN),
        (ConnectionResetError(), Failure.BROKEN),
        (OSError(), Failure.BROKEN),
    ],
)
def test_an_error_has_a_meaning(error: Exception, failure: Failure) -> None:
    assert failure_of(error) is failure


@pytest.mark.parametrize(
    ("refusal", "kind", "failure"),
    [
        (CROSSED, Crossed, Failure.CROSSED),
        (TAKEN, Taken, Failure.REFUSED),
        ("it is gone", Refused, Failure.REFUSED),
    ],
)
def test_a_refusal_is_an_error(refusal: str, kind: type[Exception], failure: Failure) -> None:
    with pytest.raises(kind) as caught:
        check_welcome(refusal)
    assert type(caught.value) is kind
    assert failure_of(caught.value) is failure


def test_the_reason_of_a_refusal_is_shown_and_no_refusal_is_no_error() -> None:
    check_welcome("")
    with pytest.raises(Refused, match="turned away: it is gone"):
        check_welcome("it is gone")


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (Lose("it is dead", Failure.GONE), "it is dead"),
        (Lose("no route"), "no connection to worker 'b' at tcp:x:1, tcp:y:2: no route"),
        (Lose("no", Failure.REFUSED), "no connection to worker 'b' at tcp:x:1, tcp:y:2: no"),
        (Wait(1.0), "it is not wanted any more"),
        (Dial(Terms("a", True, 1), 1.0), "it is not wanted any more"),
        (Done(), "it is not wanted any more"),
        (Busy("it is busy"), "it is not wanted any more"),
    ],
)
def test_the_error_of_the_last_step(step: Step, text: str) -> None:
    assert str(no_connection("b", ["tcp:x:1", "tcp:y:2"], step)) == text


def test_a_worker_without_an_address_cannot_be_connected_to() -> None:
    error = no_connection("b", [], Lose("none", Failure.REFUSED))
    assert str(error) == "no connection to worker 'b' at no address: none"
