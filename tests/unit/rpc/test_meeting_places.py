"""The first host of the compact lists that SLURM writes."""

from __future__ import annotations

import pytest

from torchweft.rpc.options import first_of


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("n[01-03,7]", "n01"),
        ("n[098-101]-ib,x", "n098-ib"),
        ("r[1-2]c[3,5]", "r1c3"),
        ("127.0.0.[2-3]", "127.0.0.2"),
    ],
)
def test_lists(text: str, host: str) -> None:
    assert first_of(text) == host
