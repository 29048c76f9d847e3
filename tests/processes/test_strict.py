"""Tests that read internals; the file of this name in ``tests/contract`` has the others."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchweft
from tests.contract.processes import attacks, functions
from tests.contract.processes.functions import options
from tests.contract.processes.test_strict import CALLABLES, LARGE
from tests.open_workers import OpenWorkers
from tests.processes import attacks_internals
from torchweft import rpc
from torchweft.engine.codec.tracebacks import places_of
from torchweft.errors import ArgumentTypeError, NotAllowed, RemoteError, SerializationError
from torchweft.launch import Cluster, Nursery
from torchweft.nn import RemoteModule, owner

pytestmark = pytest.mark.keeps("threads", "descriptors", "shared memory")


@pytest.fixture(scope="module")
def shared_group(nursery: Nursery) -> Iterator[Cluster]:
    strict = options(strict=True, callables=CALLABLES)  # type: ignore[arg-type]
    with torchweft.cluster(workers=2, nursery=nursery, rpc_backend_options=strict) as group:
        yield group


def test_errors(group: Cluster) -> None:
    with pytest.raises(ValueError, match="outer") as caught:
        rpc.rpc_sync("worker0", functions.fail_with_cause)
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in fail_with_cause" in places_of(caught.value.__cause__)[0]
    with pytest.raises(RemoteError, match="code 7: seven") as caught:
        rpc.rpc_sync("worker0", functions.fail_oddly)
    assert caught.value.type_name.endswith("OddError")
    assert caught.value.code == 7  # type: ignore[attr-defined]
    assert "in fail_oddly" in places_of(caught.value)[0]
    with pytest.raises(ArithmeticError, match="nobody else has my type"):
        rpc.rpc_sync("worker0", functions.fail_locally_defined)
    assert rpc.rpc_sync("worker0", functions.name_here) == "worker0"


def test_a_pickle_that_comes_nevertheless(group: Cluster, tmp_path: Path) -> None:
    target = tmp_path / "was_here"
    for value in (attacks.Payload(str(target)), [1, 2], {"large": torch.ones(LARGE)}):
        with pytest.raises(NotAllowed, match="'worker0' is strict and was sent a pickle"):
            attacks_internals.send_pickle("worker0", value)
    assert not target.exists()
    assert rpc.rpc_sync("worker0", functions.name_here) == "worker0"


@pytest.mark.parametrize(
    "name",
    [
        b"os:system",
        b"this:d",
        b"builtins:eval",
        b"builtins:dict",
        b"numpy:ndarray",
        b"torch:mul",
        b"torch:Tensor",
        b"torch:ops.aten.add",
        b"tests.contract.processes.attacks:system",
        b"tests.contract.processes.attacks:Payload",
        b"tests.contract.processes.attacks:Counter.add",
        b"tests.contract.processes.attacks:Counter.__init__",
        b"tests.contract.processes.functions:nothing",
        b"torchweft.compat.rpc.internal:run_pickled",
        b"torchweft.compat.rpc.references:_rref_typeof_on_owner",
        b"torchweft.checkpoint.owners:discard",
        b"torchweft.rpc.joining:shutdown",
        b"torchweft.errors:NotAllowed",
    ],
    ids=bytes.decode,
)
def test_names_that_are_not_registered(group: Cluster, name: bytes) -> None:
    for kwargs in ({}, {"key": 1}):  # simple values, and containers
        with pytest.raises(
            NotAllowed, match=r"'worker0' is strict.*(rpc\.register|CALLABLES)"
        ) as caught:
            attacks_internals.call_named("worker0", name, (1,), kwargs)
        assert caught.value.worker == "worker0"
    assert not rpc.rpc_sync("worker0", attacks.is_imported, args=("this",))


def test_only_declared_methods_are_called(group: Cluster) -> None:
    counter = rpc.remote("worker0", attacks.Counter, args=(1,))
    assert counter.rpc_sync().add(2) == 3
    assert counter.remote()(2).to_here() == 5
    for name in ("double", "_reset", "__init__", "__class__", "__len__", "__dict__", "nothing"):
        with pytest.raises(NotAllowed, match=r"rpc\.expose"):
            counter.rpc_async()._call(name).wait()
    for value in (torch.ones(2), [1], "text"):
        reference = rpc.remote("worker0", functions.identity, args=(value,))
        with pytest.raises(NotAllowed, match="declares no such method"):
            reference.rpc_sync().__len__()
        with pytest.raises(NotAllowed, match="declares no such method"):
            reference.rpc_sync().fill_(1)


def test_modules_that_a_remote_module_has_made_and_others(group: Cluster) -> None:
    made = RemoteModule("worker0", attacks.Model)
    other = RemoteModule.from_module_rref(rpc.remote("worker0", attacks.Model))
    rows = torch.tensor([1])
    assert made(rows).shape == (1, 2)
    assert len(made.remote_parameters()) == 3
    for attack in (
        lambda: other(rows),
        lambda: other.forward_async(rows).wait(),
        lambda: other.then(torch.add, 1)(rows),
        lambda: made.then(other.module_rref)(rows),
        lambda: made.then(torch.mul, 1)(rows),
        lambda: made.apply(torch.mul),
        lambda: other.requires_grad_(False),
        lambda: other.remote_parameters(),
        lambda: other.train(),
        lambda: other.state_dict(),
        lambda: made.get_module_rref().rpc_sync().forward(rows),
        lambda: RemoteModule("worker0", torch.nn.Linear, args=(1, 1)),
    ):
        with pytest.raises(NotAllowed):
            attack()
    with pytest.raises(SerializationError, match="convert the local parts alone"):
        torch.nn.Sequential(made).double()
    with pytest.raises(ArgumentTypeError, match=r"key .* is a int, not a str"):
        rpc.rpc_sync("worker0", owner.load_state, args=(made.module_rref, {1: rows}))
    with pytest.raises(ArgumentTypeError, match="not to a module"):
        rpc.rpc_sync("worker0", owner.state, args=(rpc.remote("worker0", attacks.Counter), ""))


def join(name: str, rank: int, method: str, strict: bool) -> None:
    chosen = rpc.RpcBackendOptions(
        init_method=method,
        rpc_timeout=20.0,
        strict=strict,
        callables=CALLABLES if strict else (),
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=chosen)


def exchange(to: str, target: str) -> list[Any]:
    """Makes calls of all kinds from a worker that trusts its group; returns their outcomes."""
    outcomes: list[Any] = [rpc.rpc_sync(to, functions.identity, args=([1, torch.ones(2)],))[0]]
    for call in (
        functools.partial(rpc.rpc_sync, to, functions.identity, (attacks.Counter(),)),
        functools.partial(attacks_internals.send_pickle, to, attacks.Payload(target)),
        functools.partial(rpc.rpc_sync, to, functions.fail_oddly),
    ):
        try:
            outcomes.append(call())
        except Exception as error:
            outcomes.append(type(error).__name__)
    # A strict worker may send any value to a worker that is not strict.
    outcomes.append(rpc.rpc_sync(to, attacks.make_counter, (7,)).total)
    outcomes.append(os.path.exists(target))
    return outcomes


def leave() -> None:
    rpc.shutdown()


@pytest.mark.keeps("threads", "descriptors", "shared memory", "processes")
def test_others_know_which_worker_is_strict(warm: OpenWorkers, tmp_path: Path) -> None:
    workers = warm
    method, target = f"file://{tmp_path / 'store'}", str(tmp_path / "was_here")
    try:
        workers.begin("strict", join, "strict", 0, method, True)
        workers.begin("open", join, "open", 1, method, False)
        for name in ("strict", "open"):
            workers.result(name)
        outcomes = workers.do("open", exchange, "strict", target)
        assert outcomes == [1, "SerializationError", "NotAllowed", "OddError", 7, False]
        for name in ("strict", "open"):
            workers.begin(name, leave)
        for name in ("strict", "open"):
            workers.result(name)
    finally:
        for name in ("strict", "open"):
            workers.kill(name)
