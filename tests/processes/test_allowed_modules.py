"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import torchweft
from tests.contract.processes import attacks
from tests.contract.processes.functions import options
from tests.contract.processes.test_allowed_modules import ALLOWED, all_work
from tests.processes import attacks_internals
from torchweft import rpc
from torchweft.errors import NotAllowed
from torchweft.launch import Cluster, Nursery

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")


@pytest.fixture(scope="module")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    restricted = options(allowed_modules=ALLOWED)  # type: ignore[arg-type]
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=restricted) as group:
        yield group


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A file that must not appear."""
    path = tmp_path / "was_here"
    yield str(path)
    assert not path.exists()


NAMES = [
    b"os:system",
    b"posix:system",
    b"tests.contract.processes.attacks:os.system",
    b"tests.contract.processes.attacks:system",
    b"tests.contract.processes.functions:sys.exit",
    b"torch:os.system",
    b"torch.utils.collect_env:run",
    b"torch:hub.load",
    b"tests.contract.processes.attacks:Payload.__init__.__globals__.get",
    b"builtins:eval",
    b"builtins:__import__",
    b"subprocess:check_call",
    b"torchweft.compat.rpc.internal:run_pickled",
    b"torchweft.rpc.joining:shutdown",
]


@pytest.mark.parametrize("name", NAMES, ids=bytes.decode)
def test_a_name_that_leads_elsewhere(group: Cluster, mark: str, name: bytes) -> None:
    for kwargs in ({}, {"key": 1}):  # a value, and a pickle
        with pytest.raises(NotAllowed) as caught:
            attacks_internals.call_named("worker0", name, (f"touch {mark}",), kwargs)
        assert caught.value.worker == "worker0"
        assert "allowed_modules" in str(caught.value)
    all_work()


def test_a_module_that_is_not_allowed_is_not_imported(group: Cluster) -> None:
    for kwargs in ({}, {"key": 1}):
        with pytest.raises(NotAllowed):
            attacks_internals.call_named("worker0", b"this:d", (), kwargs)
    assert not rpc.rpc_sync("worker0", attacks.is_imported, args=("this",))
    assert rpc.rpc_sync("worker0", attacks.is_imported, args=("os",))


@pytest.mark.parametrize(
    "name", ["_reset", "__class__", "__init__", "__dict__", "__getattribute__", "__reduce__"]
)
def test_methods_that_are_not_for_others(group: Cluster, name: str) -> None:
    counter = rpc.remote("worker0", attacks.Counter, args=(1,))
    with pytest.raises(NotAllowed) as caught:
        counter.rpc_sync()._call(name)
    assert caught.value.worker == "worker0"
    assert counter.rpc_sync().add(0) == 1


def test_one_s_own_references_and_calls_are_not_restricted(group: Cluster) -> None:
    mine = rpc.RRef(attacks.Counter(1))
    mine.rpc_sync()._reset()
    assert rpc.rpc_sync("driver", os.path.basename, args=("a/b",)) == "b"
    assert rpc.rpc_sync("driver", lambda: 3) == 3
