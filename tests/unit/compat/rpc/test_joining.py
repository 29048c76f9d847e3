from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.distributed_c10d import Store

from torchweft.compat import rpc
from torchweft.compat.rpc import api, backend_registry
from torchweft.errors import AlreadyInitialized, ArgumentTypeError
from torchweft.rpc.options import BackendOptions as RpcBackendOptions
from torchweft.rpc.options import TensorPipeRpcBackendOptions


class Options(RpcBackendOptions):
    pass


class Agent:
    """Stands in for a worker's agent."""


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_registry, "BackendType", backend_registry.BackendType)
    monkeypatch.setattr(api, "_agent", None)


def method(folder: Path) -> str:
    return f"file://{folder / 'store'}"


def register(**seen: Any) -> dict[str, Any]:
    """Registers back-end ``OTHER``, which joins no group; returns a dict of its call arguments."""

    def join(store: Store, **arguments: Any) -> Agent:
        assert isinstance(store, Store)
        seen.update(arguments)
        return Agent()

    rpc.register_backend("OTHER", lambda _, method: Options(), join)
    return seen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "TENSORPIPE"}, "Argument backend must be a member of BackendType"),
        ({"rpc_backend_options": {}}, "must be an instance of RpcBackendOptions, not a dict"),
        ({"rpc_backend_options": Options()}, "Could not infer backend for options"),
    ],
)
def test_arguments_of_a_wrong_type(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message) as caught:
        rpc.init_rpc("alone", rank=0, world_size=1, **arguments)
    assert isinstance(caught.value, ArgumentTypeError)


@pytest.mark.parametrize(
    ("name", "value"),
    [("name", 5), ("rank", 0.0), ("world_size", "1"), ("rpc_backend_options", None)],
)
def test_the_inner_function_checks_each_argument(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {
        "store": backend_registry.Store(),
        "name": "alone",
        "rank": 0,
        "world_size": 1,
        "rpc_backend_options": TensorPipeRpcBackendOptions(),
    }
    with pytest.raises(RuntimeError, match=f"Argument {value} must be of type .* but got type"):
        rpc._init_rpc_backend(**{**arguments, name: value})


def test_a_back_end_of_a_program_gets_the_arguments_by_name(tmp_path: Path) -> None:
    seen = register()
    options = Options(init_method=method(tmp_path))
    rpc.init_rpc("alone", rpc.BackendType.OTHER, 0, 1, options)
    assert seen == {"name": "alone", "rank": 0, "world_size": 1, "rpc_backend_options": options}
    assert isinstance(rpc._get_current_rpc_agent(), Agent)


def test_the_back_end_is_inferred_from_its_options(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = register()
    rpc.register_backend("NEEDS_MORE", lambda *_, needed: Options(), lambda **_: None)
    options = Options(init_method=method(tmp_path))
    with caplog.at_level(logging.WARNING, "torchweft"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    assert seen["rpc_backend_options"] is options
    assert "pass backend=BackendType.OTHER to say so" in caplog.text


def test_an_older_enumeration_still_names_its_back_ends(tmp_path: Path) -> None:
    seen = register()
    other = rpc.BackendType.OTHER
    rpc.register_backend("LATER", lambda *_: None, lambda **_: None)
    rpc.init_rpc("alone", other, 0, 1, Options(init_method=method(tmp_path)))
    assert seen["name"] == "alone"


def test_a_worker_joins_once_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_agent", Agent())
    for join in (
        rpc.init_rpc,
        lambda *rest: rpc._init_rpc_backend(rest[1], Store(), *rest[:1], *rest[2:]),
    ):
        with pytest.raises(RuntimeError, match="is already initialized") as caught:
            join("alone", rpc.BackendType.TENSORPIPE, 0, 1, TensorPipeRpcBackendOptions())
        assert isinstance(caught.value, AlreadyInitialized)
    assert not list(tmp_path.iterdir())


def test_a_worker_of_weft_with_no_time_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = TensorPipeRpcBackendOptions(init_method=method(tmp_path), rpc_timeout=0)
    with caplog.at_level(logging.WARNING, "torchweft"):
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
    try:
        assert "pass backend=" not in caplog.text
        assert rpc.rpc_sync("alone", len, ([1, 2],)) == 2
        assert isinstance(rpc._get_current_rpc_agent(), rpc.TensorPipeAgent)
    finally:
        rpc.shutdown()
