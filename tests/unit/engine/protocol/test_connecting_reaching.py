from __future__ import annotations

import errno
from typing import Any

import pytest

from tests.tables import cases
from torchweft.engine.protocol.connecting import Failure, Means, Reaching, failure_of
from torchweft.engine.protocol.registration import HOST, NETWORK
from torchweft.errors import ConfigurationError, ProtocolError, TlsError

HERE = {HOST: "one", NETWORK: "net:1"}
ELSEWHERE = {HOST: "two", NETWORK: "net:2"}
ALL = Means(has_secret=True, has_tls=False, uses_unix=True)


@cases(
    ("outcomes", "others", "failure"),
    [
        ([], HERE, Failure.REFUSED),
        ([Failure.GONE], HERE, Failure.GONE),
        ([Failure.GONE, Failure.GONE], HERE, Failure.GONE),
        ([Failure.GONE], ELSEWHERE, Failure.REFUSED),
        ([Failure.GONE], {}, Failure.REFUSED),
        ([Failure.GONE, Failure.REFUSED], HERE, Failure.REFUSED),
        ([Failure.REFUSED], HERE, Failure.REFUSED),
        ([Failure.GONE, Failure.BROKEN], HERE, Failure.BROKEN),
    ],
)
def test_what_failed_addresses_mean(
    outcomes: list[Failure], others: dict[str, Any], failure: Failure
) -> None:
    reaching = Reaching(HERE, others, ALL)
    for outcome in outcomes:
        reaching.failed("tcp:x:1", outcome, "why")
    assert reaching.failure is failure
    assert failure_of(reaching.error()) is failure


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), Failure.GONE),
        (FileNotFoundError(errno.ENOENT, "no such file"), Failure.BROKEN),
        (ConnectionError("no answer"), Failure.BROKEN),
        (ConfigurationError("malformed"), Failure.REFUSED),
    ],
    ids=lambda each: type(each).__name__,
)
def test_after_an_error_of_one_address_the_next_is_dialled(
    error: Exception, failure: Failure
) -> None:
    reaching = Reaching(HERE, HERE, ALL)
    assert reaching.goes_on_after("tcp:x:1", error)
    assert reaching.failure is failure
    shown = "its process has ended" if failure is Failure.GONE else "tcp:x:1: "
    assert reaching.cause.startswith(shown)


@pytest.mark.parametrize("error", [TimeoutError(), ProtocolError("noise"), TlsError("no trust")])
def test_a_listener_that_is_silent_or_speaks_nonsense_ends_the_attempt(error: Exception) -> None:
    assert not Reaching(HERE, HERE, ALL).goes_on_after("tcp:x:1", error)


def test_the_cause_advises_what_makes_another_host_reachable() -> None:
    reaching = Reaching(HERE, ELSEWHERE, ALL)
    reaching.failed("tcp:x:1", Failure.BROKEN, "no route")
    assert "on host 'two', this worker on 'one': on each, set the variable" in reaching.cause
    assert "WEFT_LISTEN" in reaching.cause
    near = Reaching(HERE, HERE, ALL)
    near.failed("tcp:x:1", Failure.BROKEN, "no route")
    assert near.cause == "tcp:x:1: no route"


@cases(
    ("means", "is_secure", "is_far", "reason"),
    [
        (ALL, None, False, None),
        (ALL._replace(uses_unix=False), None, False, ""),
        (ALL, False, True, None),
        (ALL, True, True, "it is a worker with TLS, this one is without"),
        (ALL._replace(has_tls=True), True, True, None),
        (ALL._replace(has_tls=True), False, False, "it is a worker without TLS, this one is with"),
        (ALL._replace(has_tls=True), None, False, None),
        (ALL._replace(has_secret=False), False, False, None),
        (ALL._replace(has_secret=False), False, True, "without a secret, a worker connects to"),
        (ALL._replace(has_secret=False), None, False, None),
    ],
)
def test_which_addresses_are_dialled(
    means: Means, is_secure: bool | None, is_far: bool, reason: str | None
) -> None:
    reaching = Reaching({}, {}, means)
    assert reaching.may_dial("tcp:x:1", is_secure, is_far=is_far) is (reason is None)
    if reason:
        assert reaching.failure is Failure.REFUSED
        assert reaching.cause.startswith(f"tcp:x:1: {reason}")
    else:  # A Unix socket that is not used is passed over in silence.
        assert reaching.cause == "none of its addresses can be reached from here"
