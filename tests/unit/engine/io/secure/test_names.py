from __future__ import annotations

import pytest

from torchweft.engine.io.secure.options import check_name


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["trainer.example"], ""),
        ([], ""),
        (["other.example", "trainer.example"], "trainer.example"),
        (["Trainer.Example"], "trainer.example."),
        (["10.0.0.1"], "10.0.0.1"),
        (["FE80:0:0:0:0:0:0:1"], "fe80::1"),
    ],
)
def test_the_name_is_among_those_of_the_certificate(names: list[str], expected: str) -> None:
    check_name(names, expected)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], "trainer.example"),
        (["*.example"], "trainer.example"),
        (["trainer.example.evil.example"], "trainer.example"),
        (["10.0.0.10"], "10.0.0.1"),
        (["example"], "trainer.example"),
    ],
)
def test_any_other_name_is_refused(names: list[str], expected: str) -> None:
    with pytest.raises(ValueError, match=f"not to '{expected}'"):
        check_name(names, expected)
