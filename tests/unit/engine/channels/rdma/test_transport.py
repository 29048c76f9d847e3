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
from torchweft.engine.channels.channel import Entry
from torchweft.engine.channels.memory import BufferPool
from torchweft.engine.channels.rdma import SLAB, TransportFailed, Way, own_obstacle
from torchweft.errors import ConfigurationError, ProtocolError

LIMIT_S = 20.0

with knobs.RDMA.override("1"):
    _obstacle = own_obstacle()


def _way(network: FakeNetwork) -> Way:
    return Way(network.open_transport(), BufferPool(1 << 24))


def _ends(backend: str) -> tuple[Way, Way]:
    if backend == "real":
        if _obstacle:
            pytest.skip(f"no transport of PyTorch here: {_obstacle}")
        pools = BufferPool(1 << 24), BufferPool(1 << 24)
        return Way(rdma.open_transport(), pools[0]), Way(rdma.open_transport(), pools[1])
    network = FakeNetwork()
    return _way(network), _way(network)


@pytest.fixture(params=["fake", "real"])
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Way, Way]]:
    source, target = _ends(request.param)
    url = target.bind()
    target.connect(source.bind())
    source.connect(url)
    yield source, target
    target.close(LIMIT_S)
    source.close(LIMIT_S)
    assert not rdma._unclosed


def read(ends: tuple[Way, Way], content: bytes, size_bytes: int) -> memoryview:
    """Reads into memory twice as large."""
    _, target = ends
    memory, own = target.lease(2 * size_bytes)
    memory[:] = bytes(2 * size_bytes)
    transfer = target.read(Entry(6, size_bytes, content), own, LIMIT_S)
    end_s = time.monotonic() + LIMIT_S
    while not transfer.query():
        assert time.monotonic() < end_s
    transfer.check()
    return memory


@pytest.mark.parametrize("size_bytes", [1, 4096, 1 << 20, 5_000_001])
def test_the_start_of_memory_of_the_peer_is_read(ends: tuple[Way, Way], size_bytes: int) -> None:
    memory, own = ends[0].lease(size_bytes + 100)
    for _ in range(2):
        memory[:] = random_bytes(size_bytes + 100)
        got = read(ends, own.content, size_bytes)
        assert got[:size_bytes] == memory[:size_bytes]
        assert not any(got[size_bytes:])


def test_more_than_the_peer_has_registered_is_not_read(ends: tuple[Way, Way]) -> None:
    own = ends[0].lease(1000)[1]
    with pytest.raises(ProtocolError, match="a slab which has"):
        read(ends, own.content, 1 << 20)
    larger = SLAB.pack(1 << 20) + own.content[SLAB.size :]
    with pytest.raises(TransportFailed, match="beginning a transfer failed"):
        read(ends, larger, 1 << 20)


def test_a_description_without_sense_is_refused(ends: tuple[Way, Way]) -> None:
    with pytest.raises(TransportFailed, match="reading a description"):
        read(ends, SLAB.pack(10) + b"no description", 10)


def test_a_closed_end_registers_nothing(ends: tuple[Way, Way]) -> None:
    ends[0].close(LIMIT_S)
    with pytest.raises(TransportFailed, match="closed"):
        ends[0].lease(10)


def test_a_transfer_that_failed_raises_its_error() -> None:
    network = FakeNetwork()
    source, target = _way(network), _way(network)
    target.connect(source.bind())
    content = source.lease(10)[1].content
    network.fails = True
    with pytest.raises(TransportFailed, match="RuntimeError: the cable is out"):
        read((source, target), content, 10)


def test_memory_of_a_transfer_that_does_not_end_is_kept() -> None:
    network = FakeNetwork()
    source, target = _way(network), _way(network)
    target.connect(source.bind())
    content, (_, own) = source.lease(10)[1].content, target.lease(10)
    network.stalls = True
    target.read(Entry(6, 10, content), own, 0.0)
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
