"""Checks the imports up to the first step, and that steps equal PyTorch's bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_optimizers_step_as_pytorch_steps_them_without_its_compiler() -> None:
    assert "as PyTorch's:" in run("-m", "tests.end_to_end.without_compiler")


UNTIL_THE_FIRST_STEP = """
import sys
import torch, torch.distributed.rpc
before = set(sys.modules)
from torchweft import autograd, nn, optim, rpc
added = sorted(name for name in set(sys.modules) - before if not name.startswith("torchweft"))
rpc.init_rpc("alone", rank=0, world_size=1,
             rpc_backend_options=rpc.RpcBackendOptions(init_method="file://" + sys.argv[1]))
weight = torch.nn.Parameter(torch.ones(2))
optimizer = optim.DistributedOptimizer(torch.optim.SGD, [rpc.RRef(weight)], lr=0.5)
with autograd.context() as context_id:
    autograd.backward(context_id, [(weight * 2).sum()])
    optimizer.step(context_id)
assert weight.tolist() == [0, 0], weight
assert "torch._dynamo" not in sys.modules
rpc.shutdown()
print(*added)
"""


def test_a_program_imports_little_until_its_first_step(tmp_path: Path) -> None:
    added = run("-c", UNTIL_THE_FIRST_STEP, str(tmp_path / "store")).split()
    # Needed by Weft and not by PyTorch. Weft imports everything else on first use.
    needed = {"cloudpickle", "faulthandler", "hmac", "ipaddress", "resource", "secrets", "numpy"}
    assert {name.partition(".")[0] for name in added} <= needed, added
