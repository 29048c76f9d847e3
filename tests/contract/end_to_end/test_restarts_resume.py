"""``torchweft run --restarts`` with a resumable loop: killed twice, and the result is the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.processes.weft_run import Start, finish, running

pytestmark = pytest.mark.timeout(120)

# No optimizer: for the first one, a process imports modules for seconds.
TRAINING = """
import json
import torch
from torchweft import autograd, checkpoint, rpc
from torchweft.nn import RemoteModule

LIFE = os.environ["WEFT_RESTART_COUNT"]
snapshots, result, *deaths = sys.argv[1:]

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.dropout = torch.nn.Dropout(0.3)
    def forward(self, inputs):
        return torch.tanh(self.dropout(self.linear(inputs)))

def descend(parameters, context_id):
    gradients = autograd.get_gradients(context_id)
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 0.1 * gradients[parameter]

def descend_there(module, context_id):
    descend(module.local_value().parameters(), context_id)

def train():
    torch.manual_seed(1)
    rpc.rpc_sync("owner", torch.manual_seed, args=(2,))
    layer, head = RemoteModule("owner", Layer), torch.nn.Linear(4, 1)
    state = {"layer": layer, "head": head, "losses": []}
    steps = checkpoint.resumable(8, snapshots, state, every=2, timeout=60)
    print("life", LIFE, "begins with step", steps.first_step)
    for step in steps:
        with autograd.context() as context_id:
            loss = head(layer(torch.randn(6, 4))).square().mean()
            autograd.backward(context_id, [loss])
            if f"owner:{LIFE}:{step}" in deaths:
                rpc.rpc_sync("owner", die)
            module = layer.get_module_rref()
            rpc.rpc_sync("owner", descend_there, args=(module, context_id))
            if f"driver:{LIFE}:{step}" in deaths:
                die()
            descend(head.parameters(), context_id)
        state["losses"].append(loss.item())
    weights = [
        tensor.tolist() for module in (layer, head) for tensor in module.state_dict().values()
    ]
    with open(result, "w") as file:
        json.dump({"losses": state["losses"], "weights": weights}, file)

rpc.init_rpc(rpc_backend_options=rpc.RpcBackendOptions(rpc_timeout=30))
if os.environ["RANK"] == "0":
    train()
rpc.shutdown(timeout=30)
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from running(tmp_path)


def train(start: Start, directory: Path, *deaths: str) -> tuple[list[str], dict[str, Any]]:
    """Trains to the end; returns where each life of the driver began, and the result."""
    directory.mkdir()
    process = start(
        TRAINING,
        *("--names", "driver,owner", "--restarts", "2", "--backoff", "0.05", "--warm"),
        count=2,
        arguments=(str(directory / "snapshots"), str(directory / "result"), *deaths),
    )
    status, out, err = finish(process, 60.0)
    assert status == 0, "\n".join(err)
    begun = [line.partition("] ")[2].strip() for line in out if " begins with step " in line]
    return begun, json.loads((directory / "result").read_text())


def test_training_that_is_killed_twice_ends_bit_identical(start: Start, tmp_path: Path) -> None:
    begun, expected = train(start, tmp_path / "whole")
    assert begun == ["life 0 begins with step 0"]
    begun, found = train(start, tmp_path / "killed", "driver:0:3", "owner:1:5")
    assert begun == [
        "life 0 begins with step 0",
        "life 1 begins with step 2",
        "life 2 begins with step 4",
    ]
    assert found == expected
    assert len(found["losses"]) == 8
