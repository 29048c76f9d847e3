from __future__ import annotations

import ssl

import pytest

from torchweft.engine.io.secure.connection import broken, refusal


def ssl_error(reason: str) -> ssl.SSLError:
    error = ssl.SSLError(1, f"[SSL: {reason}]")
    error.reason = reason
    return error


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("WRONG_VERSION_NUMBER", "it does not speak TLS; set up TLS on every worker, or on none"),
        ("UNSUPPORTED_PROTOCOL", "it speaks no TLS that is new enough; Weft speaks TLS 1.3 only"),
        ("TLSV1_ALERT_UNKNOWN_CA", "it refused: unknown ca; the certificates of all workers"),
        ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "it has shown no certificate; give every worker"),
        ("BAD_EXTENSION", "bad extension; "),
    ],
)
def test_a_refusal_says_what_is_wrong_and_what_would_help(reason: str, told: str) -> None:
    error = refusal(ssl_error(reason), "10.0.0.1:4000")
    assert str(error).startswith(f"no TLS connection with 10.0.0.1:4000: {told}")
    assert error.peer == "10.0.0.1:4000"
    assert told.startswith(error.reason)


@pytest.mark.parametrize(
    ("reason", "kind", "told"),
    [
        ("PROTOCOL_IS_SHUTDOWN", BrokenPipeError, "this side has ended"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", ConnectionResetError, "certificate required"),
        ("DECRYPTION_FAILED_OR_BAD_RECORD_MAC", ConnectionResetError, "not what the other side"),
    ],
)
def test_a_broken_connection_is_a_connection_error(
    reason: str, kind: type[Exception], told: str
) -> None:
    error = broken(ssl_error(reason))
    assert type(error) is kind
    assert told in str(error)
