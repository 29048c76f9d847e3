"""Mistakes with references, gradients, optimizers and devices."""

from __future__ import annotations

from tests.contract.mistakes.mistake import Mistake, alone, in_cluster

_BEFORE = """
import time
from torchweft.optim import DistributedOptimizer


class Server:
    def __init__(self, size):
        self.weight = torch.ones(size, requires_grad=True)

    def loss(self, inputs):
        return (self.weight * inputs).sum()

    def train(self, seconds):
        time.sleep(seconds)


def make_slowly():
    time.sleep(2)


def fail():
    raise FileNotFoundError("no file of weights")
"""
_SERVER = """
server = rpc.remote("worker1", Server, args=(3,))
inputs = torch.ones(3, requires_grad=True)
"""

USING = (
    Mistake(
        "`to_here` of a value whose function raised",
        in_cluster(
            """
            weights = rpc.remote("worker1", fail)
            weights.to_here()  # <-
            """,
            _BEFORE,
        ),
        r"FileNotFoundError: ",
    ),
    Mistake(
        "A method that is spelt wrong",
        in_cluster(f"{_SERVER}\nserver.rpc_sync().los(inputs)  # <-", _BEFORE),
        r"(MethodNotFound|UnknownFunction): ",
    ),
    Mistake(
        "A method that takes longer than its limit",
        in_cluster(f"{_SERVER}\nserver.rpc_sync(timeout=1).train(2)  # <-", _BEFORE),
        r"CallTimeout: ",
    ),
    Mistake(
        "`to_here` before the value is made",
        in_cluster(
            """
            server = rpc.remote("worker1", make_slowly)
            server.to_here(timeout=1)  # <-
            """,
            _BEFORE,
        ),
        r"CallTimeout: ",
    ),
    Mistake(
        "`local_value` on another worker than the owner",
        in_cluster(f"{_SERVER}\nserver.local_value()  # <-", _BEFORE),
        r"NotOwner: ",
    ),
    Mistake(
        "A reference that is used after the shutdown",
        alone("reference = rpc.RRef(1)\nrpc.shutdown()\nreference.to_here()  # <-"),
        r"NotInitialized: |ReferenceGone: ",
        is_quick=True,
    ),
    Mistake(
        "A reference that is saved",
        alone('torch.save({"weights": rpc.RRef(1)}, "checkpoint.pt")  # <-'),
        r"SerializationError: ",
        is_quick=True,
    ),
    Mistake(
        "`backward` on a result that was obtained outside of a context",
        in_cluster(
            f"{_SERVER}\nloss = server.rpc_sync().loss(inputs)\nloss.backward()  # <-", _BEFORE
        ),
        r"AutogradError: |RuntimeError: ",
    ),
    Mistake(
        "Forward under `no_grad`",
        in_cluster(
            f"{_SERVER}\nwith autograd.context() as context_id:\n"
            "    with torch.no_grad():\n        loss = server.rpc_sync().loss(inputs)\n"
            "    autograd.backward(context_id, [loss])  # <-",
            _BEFORE,
        ),
        r"AutogradError: ",
    ),
    Mistake(
        "A context that is over",
        in_cluster(
            f"{_SERVER}\nwith autograd.context() as context_id:\n"
            "    loss = server.rpc_sync().loss(inputs)\n"
            "autograd.backward(context_id, [loss])  # <-",
            _BEFORE,
        ),
        r"AutogradError: ",
    ),
    Mistake(
        "The loss in place of a list of losses",
        alone(
            """
            loss = torch.ones(3, requires_grad=True).sum()
            with autograd.context() as context_id:
                autograd.backward(loss, context_id)  # <-
            """
        ),
        r"ArgumentTypeError: ",
        is_quick=True,
    ),
    Mistake(
        "Parameters in place of references to them",
        alone(
            """
            model = torch.nn.Linear(2, 2)
            weft.optim.DistributedOptimizer(torch.optim.SGD, model.parameters(), lr=0.1)  # <-
            """,
            "import torchweft.optim",
        ),
        r"ArgumentTypeError: ",
        is_quick=True,
    ),
    Mistake(
        "`step` without gradients",
        alone(
            """
            weight = rpc.RRef(torch.ones(3, requires_grad=True))
            optimizer = weft.optim.DistributedOptimizer(torch.optim.SGD, [weight], lr=0.1)
            with autograd.context() as context_id:
                optimizer.step(context_id)  # <-
            """,
            "import torchweft.optim",
        ),
        r"gradient",
        is_quick=True,
    ),
    Mistake(
        "A device that the worker does not have",
        in_cluster(
            """
            from torchweft.nn import RemoteModule
            RemoteModule("worker1/cuda:7", torch.nn.Linear, args=(2, 2))  # <-
            """
        ),
        r"Error: ",
    ),
    Mistake(
        "A map to a device that is not there",
        """
        from torchweft import rpc

        address = "tcp://127.0.0.1:0"
        options = rpc.TensorPipeRpcBackendOptions(init_method=address)
        options.set_device_map("trainer", {"cuda:0": "cuda:7"})  # <-
        rpc.init_rpc("trainer", rank=0, world_size=1, rpc_backend_options=options)
        """,
        r"Error: ",
        is_quick=True,
    ),
)
