from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed import HashStore

from torchweft.engine.worker import rendezvous

LIMIT_S = 20.0


def agreed(store: Any, size: int, timeout_s: float = LIMIT_S) -> set[str]:
    with ThreadPoolExecutor(size) as pool:
        life = pool.map(lambda rank: rendezvous.agree(store, rank, size, timeout_s), range(size))
        return set(life)


def test_each_life_has_a_round_of_its_own() -> None:
    store = HashStore()
    lives = [agreed(store, size) for size in (3, 3, 1, 4)]
    assert all(len(life) == 1 for life in lives)
    assert len(set.union(*lives)) == 4


def test_a_round_that_was_never_complete_is_left() -> None:
    store = HashStore()
    rendezvous.agree(store, 0, 3, 0.01)  # Its others never came, and it ended.
    assert len(agreed(store, 3)) == 1


def test_an_answer_of_a_former_life_confirms_nothing() -> None:
    store = HashStore()
    agreed(store, 2)
    with ThreadPoolExecutor(1) as pool:
        early = pool.submit(rendezvous.agree, store, 1, 2, LIMIT_S)
        assert rendezvous.agree(store, 0, 2, LIMIT_S) == early.result(LIMIT_S)


def test_without_the_others_a_round_is_not_confirmed() -> None:
    store = HashStore()
    name = rendezvous.agree(store, 0, 2, 0.05)
    assert not store.check([f"{name}/confirmed"])
    assert rendezvous.agree(HashStore(), 1, 2, 0.05)
