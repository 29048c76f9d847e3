"""What others hear of a worker whose program ended by an exception, however it was started."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing

from tests.contract.processes.functions import wait_until
from tests.open_workers import OpenWorkers
from torchweft import rpc
from torchweft.errors import ShutdownError

# Run by the workers


def raise_error() -> None:
    raise KeyError("the cause")


def exit_with_status() -> None:
    sys.exit(3)


def exit_after_error() -> None:
    try:
        raise_error()
    except KeyError:
        sys.exit(1)


def exit_in_peace() -> None:
    sys.exit(0)


class Mute(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_mute() -> None:
    raise Mute


def join_and_end(index: int, path: str, end: Callable[[], None]) -> None:
    join("a", path)
    rpc.barrier(["a", "b"])
    end()


def join(name: str, path: str) -> None:
    options = rpc.RpcBackendOptions(init_method=f"file://{path}", rpc_timeout=20.0)
    rpc.init_rpc(name, rank="ab".index(name), world_size=2, rpc_backend_options=options)


def loss_of(way: str, path: str, end: Callable[[], None]) -> str:
    """Starts worker ``a``, which ends by ``end``; returns the error of the shutdown of ``b``."""
    children: Any
    if way == "Process":
        process = multiprocessing.get_context("fork").Process(
            target=join_and_end, args=(0, path, end)
        )
        process.start()
        children = [process]
    else:
        started = torch.multiprocessing.start_processes(
            join_and_end, (path, end), nprocs=1, join=False, start_method="fork"
        )
        assert started is not None
        children = started.processes
    join("b", path)
    rpc.barrier(["a", "b"])
    try:
        rpc.shutdown()
    except ShutdownError as error:
        return str(error)
    finally:
        for each in children:
            each.join()
    return "no error"


ENDINGS: tuple[tuple[Callable[[], None], str], ...] = (
    (raise_error, ": its program raised KeyError: 'the cause'; its process ended without"),
    (exit_after_error, ": its program raised KeyError: 'the cause'; its process ended without"),
    (raise_mute, ": its program raised Mute; its process ended without"),
    (exit_with_status, ": its program called sys.exit(3); its process ended without"),
    (exit_in_peace, ": its process ended without shutdown()"),
)


@pytest.mark.parametrize("way", ["Process", "mp.spawn"])
def test_the_exception_of_a_target_is_named(warm: OpenWorkers, tmp_path: Path, way: str) -> None:
    for number, (end, told) in enumerate(ENDINGS):
        try:
            text = warm.do("b", loss_of, way, str(tmp_path / f"store{number}"), end)
        finally:
            warm.kill("b")
        assert told in text, (end.__name__, text)


# A worker in code of its own, which calls nobody


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname} {record.getMessage()}")


_kept = Kept()


def join_passively(name: str, path: str) -> None:
    logging.getLogger("torchweft").addHandler(_kept)
    options = rpc.RpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(name, rank="abc".index(name), world_size=3, rpc_backend_options=options)


def losses() -> list[str]:
    return [each for each in _kept.texts if "is lost" in each]


def states() -> list[str]:
    return [each.state.value for each in rpc.health()]


@pytest.fixture
def passive(warm: OpenWorkers, tmp_path: Path) -> Iterator[OpenWorkers]:
    for name in "abc":
        warm.begin(name, join_passively, name, str(tmp_path / "store"))
    for name in "abc":
        warm.result(name)
    yield warm
    for name in "abc":
        warm.kill(name)


@pytest.mark.parametrize(("killed", "told"), [("a", "bc"), ("c", "a")])
def test_a_worker_that_calls_nobody_is_told_of_a_loss(
    passive: OpenWorkers, killed: str, told: str
) -> None:
    wait_until(
        lambda: passive.do("a", states) == ["this worker", "connected", "connected"],
        lambda: str(passive.do("a", states)),
    )
    passive.kill(killed)
    for name in told:
        wait_until(lambda each=name: bool(passive.do(each, losses)), lambda: "it is not told")  # type: ignore[misc]
        (text,) = passive.do(name, losses)
        assert text.startswith(f"WARNING worker '{killed}' (rank {'abc'.index(killed)}) is lost")


def test_a_worker_that_shuts_down_is_no_loss(passive: OpenWorkers) -> None:
    for name in "abc":
        passive.begin(name, rpc.shutdown)
    for name in "abc":
        passive.result(name)
        assert passive.do(name, losses) == []
