"""Tests plans made by hand, and plans as text."""

from __future__ import annotations

from typing import Any

import pytest

from torchweft.pipeline.partition import (
    Cluster,
    DoesNotFit,
    LayerProfile,
    PartitionError,
    Plan,
    Profile,
    plan,
)

PROFILE = Profile(
    tuple(LayerProfile(f"{n}:Linear", 0.01, 0.02, 2**20, 2**21, 2**20, 512, 2.0) for n in range(6)),
    batch_size=8,
)


def test_stages_by_hand() -> None:
    made = Plan.manual([3, 5], [2, 1, 1], n_layers=8)
    assert made.shape == "2-1-1"
    assert [stage.layers for stage in made.stages] == [range(3), range(3, 5), range(5, 8)]
    assert [stage.workers for stage in made.stages] == [range(2), range(2, 3), range(3, 4)]
    assert (made.cuts, made.replicas) == ((3, 5), (2, 1, 1))
    assert (made.n_layers, made.n_workers) == (8, 4)
    assert made.step_seconds is made.slowest is made.utilisation is None
    assert str(made).splitlines() == [
        "Plan 2-1-1: 8 layers as 3 stages on 4 workers",
        "",
        "stage  layers  workers",
        "    0  0-2     0-1",
        "    1  3-4     2",
        "    2  5-7     3",
    ]


def test_a_plan_by_hand_predicts_what_the_planner_would() -> None:
    cluster = Cluster(4, bandwidth=1e8, memory_bytes=2**30)
    options: dict[str, Any] = {"schedule": "gpipe", "n_microbatches": 12}
    made = plan(PROFILE, cluster, **options)
    assert Plan.manual(made.cuts, made.replicas, PROFILE, cluster, **options) == made


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cuts": [3]}, "neither a profile nor n_layers is given"),
        ({"cuts": [3], "n_layers": 0}, "n_layers=0: a model needs at least one layer"),
        ({"cuts": [3], "n_layers": 7, "profile": PROFILE}, "n_layers=7, but the profile has 6"),
        ({"cuts": [0], "n_layers": 8}, "cut 0 is 0; .* of stage 1 must be from 1 to 7"),
        ({"cuts": [3, 8], "n_layers": 8}, "cut 1 is 8; .* from 1 to 7, as there are 8 layers"),
        ({"cuts": [5, 3], "n_layers": 8}, "stage 1 would have the layers from 5 to before 3; cuts"),
        ({"cuts": [3, 3], "n_layers": 8}, r"stage 1 .* cuts must rise, but are \[3, 3\]"),
        (
            {"cuts": [3], "replicas": [1], "n_layers": 8},
            "replicas has 1 numbers, but the 1 cuts make 2 stages",
        ),
        ({"cuts": [3], "replicas": [1, 0], "n_layers": 8}, "stage 1 has 0 replicas"),
        (
            {"cuts": [3], "replicas": [2, 2], "n_layers": 8, "cluster": Cluster(3, 1.0)},
            r"replicas \[2, 2\] add up to 4 workers, but the cluster has 3",
        ),
        ({"cuts": [3], "profile": PROFILE}, "schedule '1f1b' needs n_microbatches"),
        (
            {"cuts": [3], "replicas": [3, 1], "profile": PROFILE, "n_microbatches": 2},
            "layers 0-2 cannot be a stage with 3 replicas: each replica needs one of the 2",
        ),
    ],
)
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PartitionError, match=message):
        Plan.manual(**arguments)


def test_a_stage_that_does_not_fit_is_named() -> None:
    cluster = Cluster(2, 1e9, memory_bytes=25 * 2**20)
    with pytest.raises(DoesNotFit, match=r"^stage 0 \(layers 0-3 0:Linear … 3:Linear\) does") as e:
        Plan.manual([4], None, PROFILE, cluster, n_microbatches=4)
    needed = 4 * (4 * 2**20 + 512) + 2 * 4 * 2**21
    assert (e.value.first_layer, e.value.last_layer) == (0, 3)
    assert (e.value.needed_bytes, e.value.limit_bytes) == (needed, 25 * 2**20)
    enough = Cluster(2, 1e9, memory_bytes=needed)
    assert Plan.manual([4], None, PROFILE, enough, n_microbatches=4).cuts == (4,)


def test_text_of_a_synchronous_plan() -> None:
    cluster = Cluster(4, 1e8, memory_bytes=2**27)
    made = Plan.manual([4], [3, 1], PROFILE, cluster, n_microbatches=12)
    head, table = str(made).split("\n\n")
    assert head.splitlines() == [
        "Plan 3-1: 6 layers as 2 stages on 4 workers",
        "1f1b, a step is 12 micro-batches of 8: 861 ms",
        "limited by the compute of stage 1; workers compute 63% of the time",
        "load: time of a step beyond its first micro-batch, if the stage were the slowest",
    ]
    titles, first, second = (line.split() for line in table.splitlines())
    assert titles[:5] == ["stage", "layers", "workers", "compute", "exchange"]
    assert first[:5] == ["0", "0-3", "0:Linear", "…", "3:Linear"]
    assert " ".join(first[5:]) == ("0-2 120 ms 168 ms 21.0 ms 528 ms compute 2 1 32.0 MiB 128 MiB")
    assert " ".join(second[5:]) == "3 60.0 ms 0 0 660 ms compute 1 1 12.0 MiB 128 MiB"
