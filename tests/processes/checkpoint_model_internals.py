"""Functions that read internals; ``checkpoint_model.py`` in the contract has the others."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.contract.processes.checkpoint_model import last_file
from tests.contract.processes.functions import pass_gate
from torchweft import rpc
from torchweft.checkpoint import files, owners
from torchweft.checkpoint.owners import HeldPart


def count_held() -> int:
    """Returns how many parts this worker holds for a driver."""
    parts = [each for each in gc.get_objects() if isinstance(each, HeldPart)]
    return sum(each._held is not None for each in parts)


_kept: list[Any] = []


def have_held(worker: str) -> None:
    """Has another worker copy its part of a state, and hold it for this worker."""
    _kept.append(rpc.rpc_sync(worker, owners.capture, ({}, True)))


def write_when_let(gate: str) -> None:
    """Makes this worker's next write of a part wait until a gate opens."""
    real = files.write_part

    def waiting(path: str, content: Any) -> Any:
        files.write_part = real
        pass_gate(gate).wait()
        return real(path, content)

    files.write_part = waiting


def saved_numbers(directory: Path) -> tuple[float, float]:
    """Returns the numbers of a ``Pair`` in the last snapshot, as any tool reads them."""
    first = load_file(last_file(directory, "1-worker0.pt"))["first"]
    second = load_file(last_file(directory, "2-worker1.pt"))["second"]
    return float(first), float(second)
