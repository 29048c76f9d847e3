from __future__ import annotations

from torchweft.engine.worker.agent import Protection
from torchweft.secret import Secret

TOKEN = "0123456789abcdef"
OTHER_TOKEN = "fedcba9876543210"


def is_same(one: Secret, other: Secret) -> bool:
    return one.verify(other.sign(b"text"), b"text")


def test_without_a_secret_the_run_s_token_is_the_key() -> None:
    protection = Protection.of_run(TOKEN)
    assert not protection.has_secret
    assert protection.tls is None
    assert is_same(protection.key, Protection.of_run(TOKEN).key)
    assert not is_same(protection.key, Protection.of_run(OTHER_TOKEN).key)


def test_with_a_secret_the_token_alone_is_no_key() -> None:
    secret = Secret(b"known to all workers")
    protection = Protection.of_run(TOKEN, secret)
    assert protection.has_secret
    assert is_same(protection.key, Protection.of_run(TOKEN, secret).key)
    others = (
        Protection.of_run(TOKEN),
        Protection.of_run(OTHER_TOKEN, secret),
        Protection.of_run(TOKEN, Secret(b"known to nobody here")),
    )
    for other in others:
        assert not is_same(protection.key, other.key)
    # The secret itself is not the key either: a proof of one run is of no use in another.
    assert not is_same(protection.key, secret)
