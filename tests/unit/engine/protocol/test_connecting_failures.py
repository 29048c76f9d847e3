from __future__ import annotations

import pytest

from tests.tables import cases
from torchweft.engine.protocol.connecting import (
    CROSSED,
    TAKEN,
    Crossed,
    Failure,
    Gone,
    HandshakeTimeout,
    Refused,
    Taken,
    check_welcome,
    failure_of,
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
