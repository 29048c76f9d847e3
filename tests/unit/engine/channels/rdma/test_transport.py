"""The adapter of PyTorch's transports, with ends in this process: fake, and of the real backend."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.unit.engine.channels.fake_transport import FakeNetwork, random_bytes
from torchweft import knobs
from torchweft.engine.channels import rdma
from torchweft.engine.channels.memory import Slab
from torchweft.engine.channels.rdma import Endpoint, TransportFailed, own_obstacle
from torchweft.errors import ConfigurationError

LIMIT_S = 20.0

with knobs.RDMA.override("1"):
    _obstacle = own_obstacle()


def _ends(backend: str) -> tuple[Endpoint, Endpoint]:
    if backend == "real":
        if _obstacle:
            pytest.skip(f"no transport of PyTorch here: {_obstacle}")
        return rdma.open_endpoint(), rdma.open_endpoint()
    network = FakeNetwork()
    return network.open_endpoint(), network.open_endpoint()


@pytest.fixture(params=["fake", "real"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Endpoint, Endpoint]]:
    source, target = _ends(request.param)
    url = target.bind()
    target.connect(source.bind())
    source.connect(url)
    yield source, target
    target.close(LIMIT_S)
    source.close(LIMIT_S)
    assert not rdma._unclosed


def slab_of(content: memoryview) -> Slab:
    slab = Slab(content.nbytes)
    slab.memory[:] = content
    return slab


def read(ends: tuple[Endpoint, Endpoint], offered: bytes, size_bytes: int) -> memoryview:
    """Reads into memory twice as large."""
    _, target = ends
    slab = Slab(2 * size_bytes)
    own = target.register(slab)
    transfer = target.read(own, size_bytes, target.remote(offered), LIMIT_S)
    end_s = time.monotonic() + LIMIT_S
    while not transfer.query():
        assert time.monotonic() < end_s
    transfer.check()
    return slab.memory.data


@pytest.mark.parametrize("size_bytes", [1, 4096, 1 << 20, 5_000_001])
def test_the_start_of_memory_of_the_peer_is_read(
    ends: tuple[Endpoint, Endpoint], size_bytes: int
) -> None:
    source = ends[0]
    slab = slab_of(random_bytes(size_bytes + 100))
    description = source.register(slab).description
    assert read(ends, description, size_bytes)[:size_bytes] == slab.memory.data[:size_bytes]
    slab.memory[:] = random_bytes(size_bytes + 100)
    got = read(ends, description, size_bytes)
    assert got[:size_bytes] == slab.memory.data[:size_bytes]
    assert not any(got[size_bytes:])


def test_more_than_the_peer_has_registered_is_not_read(ends: tuple[Endpoint, Endpoint]) -> None:
    source = ends[0]
    slab = slab_of(random_bytes(1000))
    description = source.register(slab).description
    with pytest.raises(TransportFailed, match="beginning a transfer failed"):
        read(ends, description, 1001)


def test_a_description_without_sense_is_refused(ends: tuple[Endpoint, Endpoint]) -> None:
    with pytest.raises(TransportFailed, match="reading a description"):
        read(ends, b"no description", 10)


def test_a_closed_end_registers_nothing(ends: tuple[Endpoint, Endpoint]) -> None:
    ends[0].close(LIMIT_S)
    with pytest.raises(TransportFailed, match="closed"):
        ends[0].register(Slab(10))


def test_a_transfer_that_failed_raises_its_error() -> None:
    network = FakeNetwork()
    source, target = network.open_endpoint(), network.open_endpoint()
    target.connect(source.bind())
    slab = slab_of(random_bytes(10))
    description = source.register(slab).description
    network.fails = True
    with pytest.raises(TransportFailed, match="RuntimeError: the cable is out"):
        read((source, target), description, 10)


def test_memory_of_a_transfer_that_does_not_end_is_kept() -> None:
    network = FakeNetwork()
    source, target = network.open_endpoint(), network.open_endpoint()
    target.connect(source.bind())
    offered, into = slab_of(random_bytes(10)), Slab(10)
    description = source.register(offered).description
    own = target.register(into)
    network.stalls = True
    target.read(own, 10, target.remote(description), 0.0)
    target.close(0.0)
    target.close(0.0)
    [unclosed] = rdma._unclosed
    rdma._unclosed.clear()
    network.end_all()
    unclosed._transport.close()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("fake")
    made.available_transports = lambda: ("nixl",)  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib, "import_module", lambda name: made)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return made


@pytest.mark.parametrize("setting", ["auto", "1"])
def test_the_channel_needs_an_active_port_unless_it_is_forced(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str
) -> None:
    monkeypatch.setattr(rdma, "_DEVICES", tmp_path)
    without = "" if setting == "1" else rdma.NO_DEVICE
    with knobs.RDMA.override(setting):
        assert own_obstacle() == without
        port = tmp_path / "mlx5_0" / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text("1: DOWN\n")
        assert own_obstacle() == without
        (port / "state").write_text("4: ACTIVE\n")
        assert not own_obstacle()


def test_nothing_is_imported_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma, "_DEVICES", Path("/none"))

    def fail(name: str) -> ModuleType:
        raise AssertionError(name)

    monkeypatch.setattr(importlib, "import_module", fail)
    for setting in ("auto", "0"):
        with knobs.RDMA.override(setting):
            assert own_obstacle()


def _lacks_module(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch.distributed._transport", None)


def _lacks_transport(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    module.available_transports = tuple  # type: ignore[attr-defined]


def _lacks_package(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_lacks_module, "comes with 2.15"),
        (_lacks_transport, "no transport 'nixl'"),
        (_lacks_package, "package nixl is not installed"),
    ],
)
def test_an_obstacle_says_what_is_lacking(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[ModuleType, pytest.MonkeyPatch], None],
    text: str,
) -> None:
    change(module, monkeypatch)
    with knobs.RDMA.override("1"):
        assert text in own_obstacle()


def test_the_channel_can_be_switched_off() -> None:
    with knobs.RDMA.override("0"):
        assert own_obstacle() == "WEFT_RDMA=0 is set"
    with (
        knobs.RDMA.override("yes"),
        pytest.raises(ConfigurationError, match="set it to auto, 0 or 1"),
    ):
        own_obstacle()
