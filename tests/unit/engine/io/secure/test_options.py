from __future__ import annotations

import pickle

import pytest

from tests.certificates import Authority
from torchweft import knobs
from torchweft.engine.io.secure import TlsOptions
from torchweft.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for knob in (knobs.TLS_CERT, knobs.TLS_KEY, knobs.TLS_CA, knobs.TLS_MUTUAL, knobs.TLS_NAME):
        monkeypatch.delenv(knob.variable, raising=False)


def test_the_environment_says_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TLS_CERT", "mine.pem")
    monkeypatch.setenv("WEFT_TLS_CA", "ours.pem")
    assert TlsOptions.from_environment() == TlsOptions("mine.pem", "ours.pem")
    monkeypatch.setenv("WEFT_TLS_KEY", "mine.key")
    monkeypatch.setenv("WEFT_TLS_MUTUAL", "0")
    monkeypatch.setenv("WEFT_TLS_NAME", "trainer")
    assert TlsOptions.from_environment() == TlsOptions(
        "mine.pem", "ours.pem", "mine.key", mutual=False, name="trainer"
    )


@pytest.mark.parametrize(
    ("given", "missing"),
    [("CERT", "WEFT_TLS_CA"), ("CA", "WEFT_TLS_CERT"), ("KEY", "WEFT_TLS_CERT"), ("NAME", "CERT")],
)
def test_half_a_setting_is_no_plain_connection_but_an_error(
    monkeypatch: pytest.MonkeyPatch, given: str, missing: str
) -> None:
    monkeypatch.setenv(f"WEFT_TLS_{given}", "something")
    with pytest.raises(ConfigurationError, match=f"{missing} is not"):
        TlsOptions.from_environment()


def test_a_certificate_of_another_authority_is_noticed_before_anybody_connects(
    authority: Authority, stranger: Authority
) -> None:
    options = authority.options(ca=stranger.path)
    with pytest.raises(ConfigurationError, match="would not accept the certificate") as caught:
        options.check()
    assert options.certificate in str(caught.value)
    assert stranger.path in str(caught.value)


def test_options_travel_to_other_processes_and_work_there(authority: Authority) -> None:
    options = authority.options(name="127.0.0.1", mutual=False)
    options.check()  # Creates OpenSSL objects, which cannot be pickled.
    copy = pickle.loads(pickle.dumps(options))
    assert copy == options
    copy.check()
