"""The plan of a model: places, bytes and its text; and what trainers must agree on."""

from __future__ import annotations

from typing import Any

import pytest

from torchweft.embedding import Copies, TableConfig
from torchweft.hybrid.placement import TrainerArguments, agree
from torchweft.hybrid.plan import Dense, TrainersDiffer, make_plan

CONFIGS = (TableConfig("tower/words", 10_000, 16), TableConfig("days", 7, 16, "none"))
DENSE = (
    Dense("head.weight", (1, 16), 64),
    Dense("head.bias", (1,), 4),
    Dense("tied.weight", (100, 16), 6400, "shared with 'decoder'"),
)


def plan(**options: Any) -> Any:
    touched = {"tower/words": 0.01, "days": 1.0}
    given = {"trainers": 2, "touched": touched, "places": {}, **options}
    return make_plan(CONFIGS, DENSE, ["a", "b"], **given)


def test_each_parameter_has_its_place_its_bytes_and_a_reason() -> None:
    found = plan()
    assert found.on_servers is not None
    assert [each.name for each in found.on_servers.configs] == ["tower/words"]
    assert [each.name for each in found.copied] == ["days"]
    assert found.step_bytes == {
        "tower.words.weight": 2 * 2 * 100 * (4 + 64),
        "days.weight": 2 * 7 * 64,
        "head.weight": 128,
        "head.bias": 8,
        "tied.weight": 12800,
    }
    lines = str(found).splitlines()
    titles = ["parameter", "shape", "place", "touched", "bytes/step", "all-gather", "reason"]
    assert lines[0].split() == titles
    assert lines[1].startswith("tower.words.weight  10,000 x 16  a, b ")
    assert lines[1].endswith("sparse: 27.2 kB of rows, 1.28 MB of an all-reduce")
    assert "replicas  100.00%" in lines[2]
    assert lines[3].endswith("shared with 'decoder'")
    assert lines[4].split()[:4] == ["2", "others", "replicas", "136"]
    assert lines[5] == "2 trainers; bytes of all of them, without headers"


def offer(**changes: Any) -> TrainerArguments:
    given: dict[str, Any] = {
        "configs": CONFIGS,
        "dense": DENSE,
        "touched": {"days": 0.2},
        "options": {"servers": ("a",), "places": {}, "replicas": (), "staleness": 0},
        "token": "x",
    }
    options = {**given.pop("options"), **changes.pop("options", {})}
    return TrainerArguments(**{**given, **changes, "options": options})


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"dense": DENSE[:1]}, "parameter 'head.bias'"),
        ({"dense": (*DENSE, Dense("more", (1,), 4))}, "parameter 'more'"),
        ({"configs": CONFIGS[:1]}, "table 'days'"),
        ({"options": {"servers": ("b",)}}, "servers"),
        ({"options": {"places": {"days": Copies()}}}, "places"),
        ({"options": {"replicas": ("head",)}}, "replicas"),
        ({"options": {"staleness": 2}}, "staleness"),
        ({"touched": {}}, "the tables of batches and touched"),
    ],
)
def test_trainers_that_differ_are_named_with_the_part(changes: Any, part: str) -> None:
    with pytest.raises(TrainersDiffer, match="'one' and 'three'") as raised:
        agree(["one", "two", "three"], [offer(), offer(), offer(**changes)])
    assert (raised.value.trainer, raised.value.part) == ("three", part)
