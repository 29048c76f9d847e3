from __future__ import annotations

from typing import Any, cast

import pytest

from torchweft.errors import ConfigurationError
from torchweft.launch import cluster, terms
from torchweft.launch.console import Console
from torchweft.launch.run import Order, run_here
from torchweft.launch.terms import Terms

NAMES = ["ps", "trainer"]


def test_a_variable_that_is_unknown_is_refused_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WEFT_RPC_TIMEOUT", "5")
    with pytest.raises(ConfigurationError, match="did you mean 'WEFT_RPC_TIMEOUT_S'"):
        cluster(workers=2)
    with pytest.raises(ConfigurationError, match="did you mean 'WEFT_RPC_TIMEOUT_S'"):
        run_here(Order(["a"], {}, cast(Console, None)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": ""}, "'' is no name for a worker"),
        ({"name": "worker1"}, "'worker1' names both the caller and a worker"),
        ({"env": {"WEFT_LISTENS": "0"}}, "environment variable WEFT_LISTENS is unknown to Weft"),
        ({"env": {"worker1": {"WEFT_TLS_MUTUAL": "no"}}}, "environment variable WEFT_TLS_MUTUAL"),
        ({"env": {"worker1": {"WEFT_INTERNAL": "SPINS=0"}}}, ".*WEFT_INTERNAL sets SPINS, which"),
        ({"threads": 0}, "threads is 0; it must be at least 1"),
        ({"leave_timeout": 0}, "leave_timeout is 0; it must be more than 0 seconds"),
        ({"env": {"worker9": {}}}, "env names worker 'worker9', and there is none; the workers"),
        ({"devices": ["cpu"] * 3}, "devices names 3 devices for 2 workers"),
        ({"devices": "gpu"}, "devices has 'gpu'; a device is 'cpu', 'cuda' or one like 'cuda:0'"),
        ({"devices": "cuda"}, "devices has 'cuda', but PyTorch finds 0 CUDA devices here"),
        ({"devices": ["cpu", "cuda:1"]}, "devices has 'cuda:1', but PyTorch finds 0 CUDA devices"),
    ],
)
def test_values_that_cannot_work_are_refused(
    arguments: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terms, "_cuda_count", lambda: 0)
    with pytest.raises(ConfigurationError, match=f"^{message}"):
        cluster(workers=2, **arguments)


def test_variables_are_of_all_workers_or_of_some() -> None:
    everybody = Terms(NAMES, env={"A": "1", "OMP_NUM_THREADS": "5"}, threads=3)
    assert everybody.environment({"A": "0", "B": "0"}) == {
        "A": "1",
        "B": "0",
        "OMP_NUM_THREADS": "5",
    }
    some = Terms(NAMES, env={"ps": {"A": "1"}}, threads=3)
    assert some.environment({"A": "0"}) == {"A": "0", "OMP_NUM_THREADS": "3"}
    assert some.environment_of("ps", {"A": "0"}, 0)["A"] == "1"
    assert some.environment_of("trainer", {"A": "0"}, 0)["A"] == "0"


def test_each_worker_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terms, "_cuda_count", lambda: 2)
    names = ["a", "b", "c"]
    assert [Terms(names, devices="cuda").device_of(name) for name in names] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    mixed = Terms(names, devices=["cpu", "cuda:1", "cuda"])
    assert [mixed.environment_of(name, {}, 0)["WEFT_DEVICE"] for name in names] == [
        "cpu",
        "cuda:1",
        "cuda:0",
    ]
    assert Terms(names).device_of("a") == ""
    assert "WEFT_DEVICE" not in Terms(names).environment_of("a", {}, 0)
