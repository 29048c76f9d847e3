from __future__ import annotations

import dataclasses

from torchweft.checkpoint.reading import (
    Needs,
    assign_parameters,
    compare_classes,
    compare_parameters,
    compare_paths,
)
from torchweft.checkpoint.snapshots import Item, Manifest, Parameter

SAVED = [
    Parameter("a:w", 0, (2,), "first"),
    Parameter("a:b", 0, (1,), "first"),
    Parameter("b:w", 1, (3,), "second"),
]


def manifest(items: list[str], optimizers: list[str]) -> Manifest:
    return Manifest(
        step=0,
        written="",
        driver="driver",
        workers=[],
        parts=[],
        items={path: Item("module", "first") for path in items},
        optimizers=dict.fromkeys(optimizers, SAVED),
        random=[],
        versions={},
    )


def test_entries_on_one_side_only_are_named() -> None:
    found = compare_paths(manifest(["a", "b"], ["o"]), {"a", "c", "o"}, {"p"})
    assert found.missing == ["c", "p"]
    assert found.unexpected == ["b"]
    assert found.differing == [
        "o is a distributed optimizer in the snapshot and something else here"
    ]
    assert not any(compare_paths(manifest(["a"], ["o"]), {"a"}, {"o"}))


def test_optimizers_fit_whose_classes_derive_from_one_another() -> None:
    saved = dataclasses.replace(manifest([], []), classes={"a": ["Adam"], "b": ["AdamW", "Adam"]})
    assert compare_classes(saved, {"a": ["AdamW", "Adam"], "b": ["Adam"], "c": ["SGD"]}) == []
    assert compare_classes(saved, {"a": ["SGD"], "b": ["NAdam"]}) == [
        "a is of the class Adam in the snapshot and SGD here",
        "b is of the class AdamW in the snapshot and NAdam here",
    ]
    assert compare_classes(manifest([], []), {"a": ["SGD"]}) == []  # written by a former version


def test_parameters_are_found_by_name_in_whatever_order() -> None:
    here = {2: ("a:w", (2,)), 0: ("b:w", (3,)), 1: ("a:b", (1,))}
    assert not any(compare_parameters("o", SAVED, [1, 0, 0], here))


def test_parameters_that_differ_are_named() -> None:
    here = {0: ("a:w", (9,)), 1: ("b:w", (3,)), 2: ("c:w", (1,))}
    found = compare_parameters("o", SAVED, [0, 0, 1], here)
    assert found.missing == ["o: parameter c:w"]
    assert found.unexpected == ["o: parameter a:b"]
    assert found.differing == [
        "o: parameter a:w has shape (2,) in the snapshot and (9,) here",
        "o: parameter b:w is in group 1 in the snapshot and in group 0 here",
    ]
    groups = compare_parameters("o", SAVED, [0, 0, 0], here)
    assert groups.differing == ["o has 2 parameter groups in the snapshot and 1 here"]


def test_needs_say_who_wrote_what() -> None:
    needs = Needs()
    needs.item("first", "a")
    needs.random("second")
    assign_parameters("o", SAVED, {"o": {5: ("b:w", (3,)), 6: ("a:b", (1,)), 7: ("x", ())}}, needs)
    assert needs.by_writer == {
        "first": (["a"], {"o": {"a:b": 6}}, False),
        "second": ([], {"o": {"b:w": 5}}, True),
    }
