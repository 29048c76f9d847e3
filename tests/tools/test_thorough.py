from __future__ import annotations

import pytest

from tests import thorough


@pytest.mark.parametrize(
    ("of", "seeds", "tried"), [(1, 600, 100), (10, 60, 100), (60, 10, 17), (1000, 1, 1)]
)
def test_a_run_tries_its_share(
    monkeypatch: pytest.MonkeyPatch, of: int, seeds: int, tried: int
) -> None:
    monkeypatch.setattr(thorough, "SHARE", of)
    assert thorough.share(600) == seeds
    assert thorough.examples(100) == tried
    assert sum(map(len, thorough.lots(600, 50))) == seeds


def test_make_check_tries_all_combinations_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values, others = ["a", "b", ("c", "d")], [1, 2]
    everything = [("a", 1), ("a", 2), ("b", 1), ("b", 2), ("c", "d", 1), ("c", "d", 2)]
    for of, is_whole in ((1, True), (10, True), (60, False)):
        monkeypatch.setattr(thorough, "SHARE", of)
        found = thorough.spread(values, others, all_from=thorough.CHECKED)
        assert found == (everything if is_whole else [("a", 1), ("b", 2), ("c", "d", 1)])
    monkeypatch.setattr(thorough, "SHARE", thorough.CHECKED)
    assert len(thorough.spread(values, others)) == 3


@pytest.mark.parametrize(("of", "distance"), [(1, 7), (10, 7), (60, 42)])
def test_steps_are_skipped_in_make_test_only(
    monkeypatch: pytest.MonkeyPatch, of: int, distance: int
) -> None:
    monkeypatch.setattr(thorough, "SHARE", of)
    assert thorough.every(7) == distance
