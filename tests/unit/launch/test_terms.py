from __future__ import annotations

from typing import Any, cast

import pytest

from tests.tables import cases
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.launch import cluster, terms
from torchweft.launch.console import Console
from torchweft.launch.run import Order, run_here
from torchweft.launch.terms import Terms

NAMES = ["ps", "trainer"]


@cases(
    ("arguments", "message"),
    [
        ({"workers": "2"}, "workers is '2', a str; pass an integer"),
        ({"names": "ab"}, "names is 'ab', a str; pass a list: names="),
        ({"names": [1, 2]}, "a name of names= is 1, an int; pass a str"),
        ({"workers": 1, "name": 3}, "name is 3, an int"),
        ({"workers": 1, "restarts": "1"}, "restarts is '1', a str; pass restarts=2"),
        ({"workers": 1, "nursery": 3}, "nursery is 3, an int; pass a torchweft.launch.Nursery"),
        ({"workers": 1, "rpc_backend_options": {}}, "rpc_backend_options is a dict; pass"),
        ({"workers": 1, "setup": 3}, "setup is 3, an int; pass a function without arguments"),
        ({"workers": 1, "seed": "0"}, "seed is '0', a str"),
        ({"workers": 1, "threads": 1.5}, "threads is 1.5, a float; pass an integer"),
        ({"workers": 1, "leave_timeout": "1"}, "leave_timeout is '1', a str; pass a number"),
        ({"workers": 1, "metrics": 1.5}, "metrics is 1.5, a float; pass metrics="),
        ({"workers": 1, "env": "A=1"}, "env is 'A=1', a str; pass env="),
        ({"workers": 1, "env": {"A": 1}}, r"env\['A'\] is 1, an int; pass '1'"),
        ({"workers": 1, "env": {"worker0": {"A": 1}}}, r"env\['worker0'\]\['A'\] is 1, an int"),
        ({"workers": 1, "devices": 0}, "devices is 0, an int; pass devices="),
        ({"workers": 1, "devices": [0]}, "a device of devices= is 0, an int; pass 'cuda:0'"),
    ],
)
def test_arguments_of_a_wrong_type_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^{message}"):
        cluster(**arguments)


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


def test_a_worker_has_what_a_run_gives_it() -> None:
    mine = {"WORLD_SIZE": "7", "RANK": "4", "HOME": "/"}
    assert Terms(NAMES).environment_of("trainer", mine, 2) == {
        "HOME": "/",
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "WEFT_WORKER_NAME": "trainer",
        "WEFT_RESTART_COUNT": "2",
        "TORCHELASTIC_RESTART_COUNT": "2",
    }
    assert "WORLD_SIZE" not in Terms(NAMES, restarts=1).environment_of("ps", mine, 0)


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
