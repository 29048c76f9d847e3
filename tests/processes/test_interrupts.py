"""Ctrl-C while a program holds handles: it ends the program wherever the main thread is."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from tests.open_workers import OpenWorkers
from torchweft import rpc

WAIT_S = 30.0


class Finalized:
    """Is interrupted in its finalizer."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def be_interrupted(path: str) -> str:
    """Waits as the only worker of a group; returns what ended the wait."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = rpc.RpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc("only", rank=0, rpc_backend_options=options)
    try:
        Finalized()
        threading.Event().wait(WAIT_S)
        return "nothing"
    except KeyboardInterrupt:
        return "an interrupt"
    finally:
        rpc.shutdown(graceful=False)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_interrupt_that_a_finalizer_swallows_comes_again(
    warm: OpenWorkers, tmp_path: Path
) -> None:
    assert warm.do("only", be_interrupted, f"{tmp_path}/store") == "an interrupt"
