"""Functions that read internals; ``checkpoint_model.py`` in the contract has the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.contract.processes.checkpoint_model import last_file
from tests.contract.processes.functions import pass_gate
from torchweft.checkpoint import files
from torchweft.checkpoint.parts import staged_parts


def count_held() -> int:
    return len(staged_parts())


def write_when_let(gate: str) -> None:
    """Makes this worker's next write of a part wait until a gate opens."""
    real = files.write_part

    def waiting(path: str, content: Any) -> Any:
        files.write_part = real
        pass_gate(gate).wait()
        return real(path, content)

    files.write_part = waiting


def saved_numbers(directory: Path) -> tuple[float, float]:
    first = files.read_part(str(last_file(directory, "1-worker0.pt")))["items"]["first"]["state"]
    second = files.read_part(str(last_file(directory, "2-worker1.pt")))["items"]["second"]["state"]
    return float(first), float(second)
