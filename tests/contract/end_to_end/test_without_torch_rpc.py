"""Weft trains where ``torch.distributed.rpc`` and its related modules cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKING = Path(__file__).parent / "without_torch_rpc"
EXAMPLE = Path(__file__).parents[3] / "examples" / "language_model" / "train.py"


def run_blocked(folder: Path, *arguments: str) -> tuple[str, list[list[str]]]:
    """Runs a program whose processes block PyTorch's RPC when they import torch.

    Returns:
        Its output, and the words of each line that its processes recorded.
    """
    record = folder / "record"
    path = os.pathsep.join(filter(None, [str(BLOCKING), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "WEFT_TEST_RECORD": str(record)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, [line.split() for line in record.read_text().splitlines()]


def test_the_demonstration_trains(tmp_path: Path) -> None:
    quick = [
        "--epochs",
        "1",
        "--batch",
        "32",
        "--embedding",
        "16",
        "--hidden",
        "16",
        "--trainers",
        "1",
    ]
    out, lines = run_blocked(tmp_path, str(EXAMPLE), *quick, "--out", str(tmp_path))
    assert "perplexity, unigram model" in out
    # The driver, and the nursery, from which the workers fork once its RPC is blocked.
    assert [what for what, *_ in lines] == ["blocked", "blocked"], lines


WEFT = """
from torchweft import autograd, rpc
from torchweft.rpc import RpcBackendOptions as Options
"""
COMPAT = """
import torchweft.compat
torchweft.compat.install()
import torch.distributed.autograd as autograd
import torch.distributed.rpc as rpc
from torch.distributed.rpc import TensorPipeRpcBackendOptions as Options
"""
PROGRAM = """
import sys
import torch
IMPORTS
from torchweft import nn, optim


def make_weight():
    return torch.full((2, 2), 0.5, requires_grad=True)


def apply(weight, x):
    return weight.local_value() @ x


def work(rank, world_size, init_method):
    options = Options(init_method=init_method)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        train()
    rpc.shutdown()


def train():
    assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1)).tolist() == [2, 2]
    assert rpc.rpc_async("worker1", divmod, args=(7, 2)).wait() == (3, 1)
    weight = rpc.remote("worker1", make_weight)
    assert weight.to_here().sum() == 2
    layer = nn.RemoteModule("worker1/cpu", torch.nn.Linear, args=(2, 1))
    optimizer = optim.DistributedOptimizer(
        torch.optim.SGD, [weight, *layer.remote_parameters()], lr=0.05
    )
    losses = []
    for _ in range(5):
        with autograd.context() as context:
            hidden = rpc.rpc_sync("worker1", apply, args=(weight, torch.ones(2, 3)))
            loss = (layer(hidden.T) - 1).square().mean()
            autograd.backward(context, [loss])
            assert autograd.get_gradients(context) == {}
            optimizer.step(context)
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2, losses
    print("trained with", rpc.__name__)


if __name__ == "__main__":
    import multiprocessing
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=work, args=(1, 2, sys.argv[1]))
    other.start()
    work(0, 2, sys.argv[1])
    other.join()
    sys.exit(other.exitcode)
"""


@pytest.mark.parametrize(
    ("imports", "module"),
    [(WEFT, "torchweft.rpc"), (COMPAT, "torchweft.compat.rpc")],
    ids=["torchweft", "torchweft.compat"],
)
def test_a_program_that_uses_all_parts_trains(tmp_path: Path, imports: str, module: str) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM.replace("IMPORTS", imports))
    out, lines = run_blocked(tmp_path, str(script), f"file://{tmp_path / 'store'}")
    assert out == f"trained with {module}\n"
    assert [what for what, *_ in lines] == ["blocked", "blocked"], lines


TOUCHES = {
    "import torch.distributed.rpc": "import",
    "import torch.distributed.rpc.api": "import",
    "from torch.distributed.nn import RemoteModule": "import",
    "from torch._C._distributed_rpc import PyRRef": "placeholder",
    "torch.distributed.rpc": "attribute",
    "torch._C._distributed_autograd": "attribute",
    "torch.nn.parallel.distributed.RRef(1)": "call",
    "torch.nn.parallel.distributed.RRef.to_here(None)": "call",
    "torch._jit_internal.PyRRef(1)": "call",
    "held()": "call",
}


def test_what_touches_it_all_the_same_fails_and_is_recorded(tmp_path: Path) -> None:
    program = "import sys, torch, torch.nn.parallel.distributed, torch._jit_internal\n"
    # A method of a class that a module took earlier, as PyTorch's own modules do.
    program += "held = torch.nn.parallel.distributed.RRef.rpc_sync\n"
    for code in TOUCHES:
        program += f"try:\n    {code}\nexcept (ImportError, AttributeError, RuntimeError): pass\n"
        program += f"else: sys.exit({code!r} + ' did not fail')\n"
    _, lines = run_blocked(tmp_path, "-c", program)
    assert lines[0][0] == "blocked"
    assert [how for what, how, *_ in lines if what == "touched"] == list(TOUCHES.values())
