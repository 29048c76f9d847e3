from __future__ import annotations

import pytest

from torchweft.errors import ConfigurationError
from torchweft.rpc.placement import expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("n[01-03,7]", ["n01", "n02", "n03", "n7"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]-ib,x", ["n098-ib", "n099-ib", "n100-ib", "n101-ib", "x"]),
        ("r[1-2]c[3,5]", ["r1c3", "r1c5", "r2c3", "r2c5"]),
        ("127.0.0.[2-3]", ["127.0.0.2", "127.0.0.3"]),
    ],
)
def test_lists(text: str, hosts: list[str]) -> None:
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "n[1-", "n1-2]", "n[]", "n[2-1]", "n[a-b]", "n[[1]]", "n[0-99999999]"]
)
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ConfigurationError, match="is no list of hosts"):
        expand(text)


def test_a_list_without_end() -> None:
    with pytest.raises(ConfigurationError, match="names over"):
        expand("[0-999][0-999]")
