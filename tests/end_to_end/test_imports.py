"""Checks what ``import torchweft.rpc`` imports, for which each worker process pays."""

from __future__ import annotations

import subprocess
import sys

from tests.tables import cases

MOST_MODULES = 200
"""Of Weft. Each costs 0.1 to 0.5 ms of processor time; a module for few programs can wait."""

ASK = """
import sys
import torch, torch.distributed.rpc
before = set(sys.modules)
import torchweft.rpc
print(*sorted(set(sys.modules) - before))
"""


def imported_by(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    return set(done.stdout.split())


def test_modules_for_few_programs_are_not_imported_with_rpc() -> None:
    names = imported_by(ASK)
    ours = {name for name in names if name.startswith("torchweft")}
    assert len(ours) <= MOST_MODULES, sorted(ours)
    parts = "checkpoint embedding hybrid launch mapreduce observe pipeline rl weights".split()
    later = [f"torchweft.{part}" for part in parts]
    later += ["torchweft.rpc.batching", "torchweft.rpc.stacking"]
    assert not [name for name in ours if name.startswith(tuple(later))]
    heavy = {"asyncio", "multiprocessing.pool", "rich", "ssl", "torch._dynamo", "urllib.request"}
    assert not names & heavy


@cases(
    "statement",
    """
    from torchweft import *; from torchweft.rpc.functions import *; rpc_sync, optim, batched
    import torchweft; torchweft.rpc.functions.batched; torchweft.rpc_sync; torchweft.errors
    import torchweft.rpc.batching; from torchweft.rpc import functions; functions.batched
    """.strip().splitlines(),
)
def test_names_are_imported_when_first_used(statement: str) -> None:
    imported_by(statement.strip())
