from __future__ import annotations

import json

import pytest

from torchweft.checkpoint.snapshots import (
    BadManifest,
    Item,
    Manifest,
    Parameter,
    Part,
    read_manifest,
)

MANIFEST = Manifest(
    step=3,
    written="2030-01-01T00:00:00+00:00",
    driver="driver",
    workers=["driver", "ps"],
    parts=[
        Part("driver", 0, "0-driver.pt", 10, "ab", True),
        Part("ps", 1, "1-ps.pt", 20, "cd", False),
    ],
    items={"model": Item("module", "ps")},
    optimizers={"optimizer": [Parameter("model:weight", 0, (2, 3), "ps")]},
    random=["ps"],
    versions={"weft": "0"},
)


def test_it_comes_back() -> None:
    assert read_manifest(MANIFEST.to_bytes()) == MANIFEST
    part = MANIFEST.part_of("ps")
    assert (part.size_bytes, part.sha256) == (20, "cd")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (MANIFEST.to_bytes().replace(b'"step": 3', b'"step": 4'), "SHA-256"),
        (MANIFEST.to_bytes()[:-5], "no manifest"),
        (b"", "no manifest"),
        (b"[]", "no manifest"),
        (b"\xff\xfe", "no manifest"),
        (b'{"format": 1, "snapshot": {}}', "no manifest"),
        (MANIFEST.to_bytes().replace(b'"format": 1', b'"format": 2'), "version 2"),
    ],
    ids=["changed", "cut", "empty", "list", "bytes", "no hash", "version"],
)
def test_another_one_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(BadManifest, match=problem):
        read_manifest(data)


def test_a_person_can_read_it() -> None:
    content = json.loads(MANIFEST.to_bytes())["snapshot"]
    assert content["optimizers"]["optimizer"][0]["shape"] == [2, 3]
    assert content["parts"][1]["file"] == "1-ps.pt"


def test_deep_nesting_and_endless_numbers_are_no_manifest() -> None:
    for data in (b"[" * 1_000_000, b"9" * 100_000, b'{"format": 1e999, "snapshot": {}}'):
        with pytest.raises(BadManifest):
            read_manifest(data)
