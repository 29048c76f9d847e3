"""What a worker holds of collections, without workers: their losses are told by the test."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from torchweft.embedding import named
from torchweft.embedding.named import Named
from torchweft.errors import ArgumentTypeError, ConfigurationError, WorkerLost


class Shards:
    """A part that notes the losses that it is told."""

    def __init__(self) -> None:
        self.uses: Counter[int] = Counter()
        self.lost: list[str] = []

    def worker_lost(self, error: WorkerLost) -> None:
        self.lost.append(error.worker)


class Losses:
    """In place of the agent: those who are told of lost workers, and who calls."""

    def __init__(self) -> None:
        self.told: list[Callable[[WorkerLost], None]] = []
        self.caller = SimpleNamespace(id=1, name="trainer1")

    def listen(self, call: Callable[[WorkerLost], None]) -> Callable[[], None]:
        self.told.append(call)
        return lambda: self.told.remove(call)

    def tell(self, worker: str) -> None:
        for call in list(self.told):
            call(WorkerLost(worker, worker=worker))


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> Losses:
    found = Losses()
    monkeypatch.setattr(named, "on_worker_lost", found.listen)
    monkeypatch.setattr(named, "get_worker_info", lambda: SimpleNamespace(name="ps0"))
    monkeypatch.setattr(named, "caller", lambda: found.caller)
    return found


@pytest.fixture
def registry(losses: Losses) -> Named[Shards]:
    return Named("has no", "they were closed")


def use(registry: Named[Shards], *, fits: bool = True) -> tuple[Shards, bool]:
    return registry.use("words", Shards, lambda _: fits)


def test_all_users_of_a_name_have_one_part(registry: Named[Shards]) -> None:
    first, is_fit = use(registry)
    assert is_fit
    assert use(registry) == (first, True)
    assert registry.find("words") is first
    assert first.uses == {1: 2}
    other, _ = registry.use("others", Shards, lambda _: True)
    assert other is not first


def test_a_user_that_does_not_fit_is_not_counted(registry: Named[Shards]) -> None:
    first, _ = use(registry)
    assert use(registry, fits=False) == (first, False)
    assert first.uses == {1: 1}
    registry.release("words")
    with pytest.raises(ConfigurationError):
        registry.find("words")


def test_a_name_is_free_after_its_last_use(registry: Named[Shards]) -> None:
    first, _ = use(registry)
    use(registry)
    registry.release("words")
    assert registry.find("words") is first
    registry.release("words")
    with pytest.raises(
        ConfigurationError, match="'ps0' has no tables under the name 'words'; they were closed"
    ):
        registry.find("words")
    with pytest.raises(ConfigurationError):
        registry.release("words")
    second, _ = use(registry)
    assert second is not first
    assert second.uses == {1: 1}


def test_a_worker_ends_only_its_own_uses(registry: Named[Shards], losses: Losses) -> None:
    first, _ = use(registry)
    losses.caller = SimpleNamespace(id=2, name="liar")
    with pytest.raises(ConfigurationError, match=r"'liar' does not use tables 'words' on .* 'ps0'"):
        registry.release("words")
    use(registry)
    registry.release("words")
    assert first.uses == {1: 1}
    assert registry.find("words") is first


def test_a_part_lives_as_long_as_its_users_and_is_told_of_losses(
    registry: Named[Shards], losses: Losses
) -> None:
    part, _ = use(registry)
    use(registry)
    assert len(losses.told) == 1
    losses.tell("worker1")
    assert part.lost == ["worker1"]
    del part
    gc.collect()
    assert not losses.told  # Nobody holds it: the registry does not.
    with pytest.raises(ConfigurationError):
        registry.find("words")


@pytest.mark.parametrize("name", [b"words", None, 3])
def test_names_are_text(registry: Named[Shards], name: object) -> None:
    with pytest.raises(ArgumentTypeError):
        registry.use(name, Shards, lambda _: True)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError):
        registry.find(name)  # type: ignore[arg-type]
