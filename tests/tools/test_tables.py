from __future__ import annotations

from pathlib import Path

import pytest

from tests.tables import cases

tried: list[tuple[int, Path]] = []


def test_the_case_that_fails_is_named() -> None:
    @cases(("left", "right"), [(1, 1), (1, 2), (3, 3)])
    def compare(left: int, right: int) -> None:
        assert left == right

    with pytest.raises(AssertionError, match=r"case 1 fails, with {'left': 1, 'right': 2}"):
        compare()


def test_a_case_that_raises_nothing_fails() -> None:
    @cases("value", ["1", "x"])
    def refuse(value: str) -> None:
        with pytest.raises(ValueError):
            int(value)

    with pytest.raises(AssertionError, match="case 0 fails"):
        refuse()


@cases("number", range(3))
def test_every_case_is_tried_with_the_fixtures(number: int, tmp_path: Path) -> None:
    tried.append((number, tmp_path))
    assert tried == [(before, tmp_path) for before in range(number + 1)]
