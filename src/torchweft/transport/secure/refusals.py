"""Turns TLS failures into messages that name the cause and a remedy."""

from __future__ import annotations

import ssl

from torchweft.errors import TlsError

_ALERT = "_ALERT_"

_PLAIN = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST"})
_OLD = frozenset(
    {
        "UNSUPPORTED_PROTOCOL",
        "TLSV1_ALERT_PROTOCOL_VERSION",
        "VERSION_TOO_LOW",
        "NO_PROTOCOLS_AVAILABLE",
    }
)

SAME_AUTHORITY = "the certificates of all workers must be signed by the authorities in WEFT_TLS_CA"
BOTH_SIDES = "set up TLS on every worker, or on none"
ENDED_HERE = "this side has ended the TLS connection"
_NEW_ENOUGH = "Weft speaks TLS 1.3 only; OpenSSL has it from 1.1.1 on"
_BRING_ONE = "give every worker a certificate (WEFT_TLS_CERT), or set WEFT_TLS_MUTUAL=0"


def refusal(error: ssl.SSLError, peer: str) -> TlsError:
    """Returns the error for a failed handshake."""
    reason, advice = _explain(error)
    return tls_error(peer, reason, advice)


def tls_error(peer: str, reason: str, advice: str) -> TlsError:
    """Returns the error for a handshake that failed for ``reason``."""
    return TlsError(f"no TLS connection with {peer}: {reason}; {advice}", peer=peer, reason=reason)


def broken(error: ssl.SSLError) -> ConnectionError:
    """Returns the error for a failure of an established connection."""
    reason = _reason_of(error)
    if reason == "PROTOCOL_IS_SHUTDOWN":
        return BrokenPipeError(ENDED_HERE)
    if _ALERT in reason:
        return ConnectionResetError(f"the other side ended TLS: {_plain_words(error)}")
    return ConnectionResetError(
        f"what arrived is not what the other side encrypted: {_plain_words(error)}"
    )


def _explain(error: ssl.SSLError) -> tuple[str, str]:
    reason = _reason_of(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = f"this side does not trust its certificate: {error.verify_message}"
        return problem, SAME_AUTHORITY
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "it has shown no certificate", _BRING_ONE
    if reason in _OLD:
        return "it speaks no TLS that is new enough", _NEW_ENOUGH
    if reason in _PLAIN:
        return "it does not speak TLS", BOTH_SIDES
    if _ALERT in reason:
        return f"it refused: {_plain_words(error)}", SAME_AUTHORITY
    return _plain_words(error), BOTH_SIDES


def _reason_of(error: ssl.SSLError) -> str:
    """Returns OpenSSL's name for the failure; empty if it has none."""
    return getattr(error, "reason", None) or ""


def _plain_words(error: ssl.SSLError) -> str:
    """Returns ``unknown ca`` for ``TLSV1_ALERT_UNKNOWN_CA``."""
    reason = _reason_of(error)
    return reason.rpartition(_ALERT)[2].replace("_", " ").lower() if reason else str(error)
