"""Device maps in groups of real workers, which register them; no worker needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.open_workers import OpenWorkers
from torchweft import rpc
from torchweft.engine.worker.current import current, is_set
from torchweft.errors import ConfigurationError

pytestmark = pytest.mark.timeout(60)

NAMES = ("a", "b", "c")
FREE = {"a": {"cpu": "cpu"}}
Maps = dict[str, dict[str, str]]


def join(name: str, world_size: int | None, path: str, maps: Maps) -> None:
    options = rpc.RpcBackendOptions(
        init_method=f"file://{path}", init_timeout=15.0, rpc_timeout=15.0, device_maps=maps
    )
    rank = NAMES.index(name)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)


def known_maps() -> dict[str, tuple[bool, bool]]:
    """Returns, for each worker, whether this one has a map for it, and the other way round."""
    found = {}
    for peer in current().members.present():
        maps = peer.device_maps
        found[peer.name] = (maps._forward is not None, maps._back is not None)
    return found


def double(to: str) -> list[float]:
    doubled: list[float] = rpc.rpc_sync(to, torch.mul, args=(torch.ones(2), 2)).tolist()
    return doubled


def is_member() -> bool:
    return is_set()


def leave() -> None:
    rpc.shutdown()


@pytest.fixture
def workers(warm: OpenWorkers) -> Iterator[OpenWorkers]:
    for name in NAMES:
        warm.do(name, is_member)
    yield warm
    for name in NAMES:
        warm.kill(name)


@pytest.mark.parametrize("world_size", [3, None], ids=["closed", "open"])
def test_each_worker_knows_the_maps_of_the_others(
    workers: OpenWorkers, tmp_path: Path, world_size: int | None
) -> None:
    maps = {"a": {"b": {"cpu": "cpu"}, "a": {}}, "b": {}, "c": FREE}
    for name in NAMES:
        workers.begin(name, join, name, world_size, str(tmp_path / "store"), maps[name])
        if world_size is None:
            workers.result(name)
    if world_size is not None:
        for name in NAMES:
            workers.result(name)
    nothing, both = (False, False), (True, True)
    assert workers.do("a", known_maps) == {"a": both, "b": (True, False), "c": (False, True)}
    assert workers.do("b", known_maps) == {"a": (False, True), "b": nothing, "c": nothing}
    assert workers.do("c", known_maps) == {"a": (True, False), "b": nothing, "c": nothing}
    assert workers.do("c", double, "a") == workers.do("a", double, "a") == [2.0, 2.0]
    for name in NAMES:
        workers.begin(name, leave)
    for name in NAMES:
        workers.result(name)


def test_maps_that_do_not_fit_end_the_joining_of_all_workers_alike(
    workers: OpenWorkers, tmp_path: Path
) -> None:
    wrong = {"c": {"cuda:99": "cpu"}}
    for name, maps in zip(NAMES, (FREE, wrong, wrong), strict=True):
        workers.begin(name, join, name, 3, str(tmp_path / "store"), maps)
    for name in NAMES:
        with pytest.raises(ConfigurationError, match="Node b has source devices with invalid"):
            workers.result(name)
        assert not workers.do(name, is_member)


def test_a_newcomer_whose_maps_do_not_fit_is_refused(workers: OpenWorkers, tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    workers.do("a", join, "a", None, path, {"b": {"cpu": "cuda:99"}})
    with pytest.raises(ConfigurationError, match="Node a has target devices with invalid indices"):
        workers.do("b", join, "b", None, path, {"a": {"cuda:0": "cpu"}})
    assert not workers.do("b", is_member)
    # The others work on, also with a worker of that name that comes later.
    workers.do("c", join, "c", None, path, FREE)
    assert workers.do("c", double, "a") == [2.0, 2.0]
    workers.do("b", join, "b", None, path, {})
    assert workers.do("b", double, "c") == [2.0, 2.0]
