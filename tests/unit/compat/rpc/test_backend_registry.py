from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch.distributed import HashStore

from torchweft.compat.rpc import backend_registry
from torchweft.compat.rpc.backend_registry import (
    Backend,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from torchweft.engine.worker import current
from torchweft.errors import WeftError
from torchweft.rpc.options import BackendOptions as RpcBackendOptions
from torchweft.rpc.options import TensorPipeRpcBackendOptions


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_registry, "BackendType", backend_registry.BackendType)


def make_options(rpc_timeout: float, init_method: str, **others: Any) -> Any:
    return rpc_timeout, init_method, others


def make_agent(**arguments: Any) -> Any:
    return arguments


def test_a_back_end_shows_its_name() -> None:
    member = backend_registry.BackendType.TENSORPIPE
    assert repr(member) == str(member) == "BackendType.TENSORPIPE"
    assert "BackendType.TENSORPIPE" in backend_registry.BackendType.__doc__
    assert pickle.loads(pickle.dumps(member)) is member


def test_a_registration_keeps_the_others() -> None:
    before = backend_registry.BackendType
    added = register_backend("MINE", make_options, make_agent)
    assert backend_registered("MINE")
    assert not backend_registered("mine")
    assert next(iter(backend_registry.BackendType)) is added
    assert [each.name for each in backend_registry.BackendType][1:] == [e.name for e in before]
    assert added is backend_registry.BackendType["MINE"]
    assert isinstance(before.TENSORPIPE, Backend)
    assert isinstance(added, Backend)
    assert not hasattr(before, "MINE")


def test_a_name_is_taken_once() -> None:
    register_backend("MINE", make_options, make_agent)
    with pytest.raises(RuntimeError, match=r"^RPC backend MINE: already registered$") as caught:
        register_backend("MINE", make_options, make_agent)
    assert isinstance(caught.value, WeftError)


def test_a_back_end_of_a_program_gets_what_is_passed() -> None:
    mine = register_backend("MINE", make_options, make_agent)
    assert construct_rpc_backend_options(mine) == (60.0, "env://", {})
    assert construct_rpc_backend_options(mine, 2, "tcp://", a=1) == (2, "tcp://", {"a": 1})
    arguments = {"store": 1, "name": "a", "rank": 0, "world_size": 2, "rpc_backend_options": 3}
    assert init_backend(mine, **arguments) == arguments


def test_options_of_weft() -> None:
    made = construct_rpc_backend_options(
        backend_registry.BackendType.TENSORPIPE,
        rpc_timeout=3,
        init_method="file:///x",
        num_worker_threads=2,
        _transports=["uv"],
        something_else=1,
    )
    assert type(made) is TensorPipeRpcBackendOptions
    assert (made.rpc_timeout, made.init_method, made.num_worker_threads) == (3, "file:///x", 2)
    assert made.ignored()


@pytest.mark.parametrize(
    ("store", "options", "message"),
    [
        (HashStore(), RpcBackendOptions(), "must be a `TensorPipeRpcBackendOptions`"),
        ("no store", TensorPipeRpcBackendOptions(), "`store` must be a torch.distributed.Store"),
    ],
)
def test_arguments_of_a_wrong_type_join_nothing(store: Any, options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        init_backend(
            backend_registry.BackendType.TENSORPIPE,
            store=store,
            name="alone",
            rank=0,
            world_size=1,
            rpc_backend_options=options,
        )
    assert not current.is_set()


def test_a_device_map_for_nobody_leaves_the_group_again() -> None:
    made = TensorPipeRpcBackendOptions(device_maps={"nobody": {"cuda:0": "cuda:0"}})
    with pytest.raises(ValueError, match=r"invalid target node names.*'nobody'"):
        init_backend(
            backend_registry.BackendType.TENSORPIPE,
            store=HashStore(),
            name="alone",
            rank=0,
            world_size=1,
            rpc_backend_options=made,
        )
    assert not current.is_set()
