from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import HashStore

from torchweft.engine.worker.rendezvous import SignedStore
from torchweft.errors import RendezvousError
from torchweft.secret import Secret

SECRET = Secret(b"the secret of the group")
OTHER = Secret(b"the secret of another group")
VALUE = b'{"name": "worker1"}'


@pytest.fixture
def plain() -> HashStore:
    return HashStore()


@pytest.mark.parametrize("secret", [SECRET, None])
def test_what_one_writes_another_reads(plain: HashStore, secret: Secret | None) -> None:
    SignedStore(plain, secret).set("key", VALUE)
    reader = SignedStore(plain, secret)
    reader.wait(["key"], timedelta(seconds=1))
    assert reader.has("key")
    assert reader.get("key") == VALUE


def test_what_a_stranger_writes_is_refused(plain: HashStore) -> None:
    store = SignedStore(plain, SECRET)
    store.set("key", VALUE)
    signed = plain.get("key")
    forged = [VALUE, b"", b"signed:", b"signed:" + b"0" * 64 + VALUE, b"signed:" + b"x" * 200]
    forged += [signed[:-1], signed + b" ", signed.replace(b"worker1", b"worker2"), b"\xff" * 99]
    for content in forged:
        plain.set("key", content)
        with pytest.raises(RendezvousError, match=r"'key' was not written with the secret"):
            store.get("key")
        if content:  # An empty value counts as missing, and may be set.
            with pytest.raises(RendezvousError, match="WEFT_SECRET_FILE"):
                store.set_once("key", "mine")
    plain.set("key", signed)
    assert store.get("key") == VALUE


def test_every_bit_is_signed(plain: HashStore) -> None:
    store = SignedStore(plain, SECRET)
    store.set("key", VALUE)
    signed = plain.get("key")
    for place in range(len(signed)):
        changed = bytearray(signed)
        changed[place] ^= 1
        plain.set("key", bytes(changed))
        with pytest.raises(RendezvousError):
            store.get("key")


def test_a_value_is_good_under_its_own_key_only(plain: HashStore) -> None:
    store = SignedStore(plain, SECRET)
    store.set("worker/1", VALUE)
    plain.set("worker/2", plain.get("worker/1"))
    with pytest.raises(RendezvousError):
        store.get("worker/2")


@pytest.mark.parametrize(
    ("writer", "reader", "told"),
    [
        (OTHER, SECRET, "another secret or none"),
        (None, SECRET, "another secret or none"),
        (SECRET, None, "this worker has none"),
    ],
)
def test_secrets_that_differ_are_noticed(
    plain: HashStore, writer: Secret | None, reader: Secret | None, told: str
) -> None:
    SignedStore(plain, writer).set("worker/1", VALUE)
    with pytest.raises(RendezvousError, match=told):
        SignedStore(plain, reader).get("worker/1")
