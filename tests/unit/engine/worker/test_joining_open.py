from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from torchweft.engine.protocol import joining
from torchweft.engine.protocol.joining import Admission
from torchweft.engine.protocol.registration import Registration
from torchweft.engine.worker.rendezvous import SignedStore, enter, note_left, open_store
from torchweft.errors import ConfigurationError, RendezvousError, RendezvousTimeout
from torchweft.secret import Secret

LIMIT_S = 10.0


def signed(store: Any) -> SignedStore:
    return SignedStore(store, None)


_numbers = itertools.count()


def newcomer(name: str, rank: int) -> Registration:
    """Returns the registration of a worker, which has an address of its own."""
    return Registration(name, rank, (f"unix:@{next(_numbers)}",))


def come(store: Any, name: str, rank: int) -> Admission:
    return enter(signed(store), newcomer(name, rank), LIMIT_S)


class CountingStore:
    """Counts the operations of a store."""

    def __init__(self, store: Any) -> None:
        self.store, self.count = store, 0

    def __getattr__(self, name: str) -> Any:
        self.count += 1
        return getattr(self.store, name)


@pytest.mark.keeps("threads", "descriptors")  # of PyTorch's stores
@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_joining_and_the_store_do_not_grow_with_those_who_came_before(
    kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "store"
    store: Any
    if kind == "tcp":
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    elif kind == "hash":
        store = HashStore()
    else:
        store = open_store(f"file://{path}", 0, None, LIMIT_S)
    prefixed = PrefixStore("weft/0", store)
    come(prefixed, "server", 0)
    counts, sizes = [], []
    for number in range(80):
        # Half of the ranks come again.
        counted = CountingStore(prefixed)
        admission = come(counted, f"client{number}", 1 + number % 40)
        assert list(admission.earlier) == [0]
        counts.append(counted.count)
        note_left(prefixed, admission.me.id, admission.token)
        sizes.append(Path(f"{path}.open").stat().st_size if kind == "file" else store.num_keys())
    assert max(counts[-10:]) <= max(counts[:10])
    digits = 20 if kind == "file" else 0
    assert max(sizes[-10:]) <= max(sizes[:10]) + digits


@pytest.mark.parametrize(
    "text",
    ["?", "{}", "[]", "[-2]", "[[]]", "[1e9]", "[" * 100_000, "[70000]", "[0, [0]]", "[0, [0, 1]]"],
)
def test_a_malformed_table_is_refused(text: str) -> None:
    store = HashStore()
    store.set("present", text)
    with pytest.raises(RendezvousError, match="value of 'present' is malformed"):
        come(store, "a", 0)


class DyingStore:
    """Ends the life of its user before a change of a key.

    Args:
        store: Does the other operations.
        key: The beginning of the key.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def set(self, key: str, value: str) -> None:
        if key.startswith(self._key):
            raise EOFError
        self._store.set(key, value)


@pytest.mark.parametrize("secret", [None, Secret(b"known to all of the group")])
def test_one_that_died_before_it_wrote_its_key_is_seen_and_leaves_nothing(
    secret: Secret | None,
) -> None:
    store = HashStore()
    sizes = []
    for _ in range(3):
        dying = SignedStore(DyingStore(store, "member"), secret)
        with pytest.raises(EOFError):
            enter(dying, newcomer("a", 1), LIMIT_S)
        admission = enter(SignedStore(store, secret), newcomer("b", 2), LIMIT_S)
        (dead,) = admission.earlier.values()
        assert dead.name == "a"
        for each in (dead, admission.me):
            note_left(store, each.id, admission.token)
        sizes.append((store.num_keys(), len(store.get("present"))))
    assert len(set(sizes)) == 1


def test_lives_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(joining, "ID_LIMIT", 2)
    for _ in range(2):
        come(store, "a", 0)
    with pytest.raises(ConfigurationError, match="start a new group"):
        come(store, "a", 0)


class BrokenStore:
    """A store whose server has gone."""

    def compare_set(self, *_: object) -> bytes:
        raise RuntimeError("connection reset")

    set = check = wait = compare_set


def test_a_store_that_does_not_answer() -> None:
    with pytest.raises(RendezvousTimeout, match=r"store did not answer.*connection reset"):
        enter(signed(BrokenStore()), Registration("a", 0, ()), 0.0)
    with pytest.raises(RendezvousError, match="connection reset"):
        enter(signed(BrokenStore()), Registration("a", 0, ()), LIMIT_S)
    note_left(BrokenStore(), 1, "")
