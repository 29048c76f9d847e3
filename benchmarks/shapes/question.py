"""The rows and targets of the benchmark of shapes: each shape is one row."""

from __future__ import annotations

from benchmarks.frame import TORCH, WEFT, Form, Question, Row, Side, times_faster

SHAPES = {
    "nothing": "nothing",
    "number": "an integer",
    "text": "a short text",
    "text 10k": "a text of 10,000 characters",
    "bytes": "1 KiB of bytes",
    "tensor": "a tensor of 2 elements",
    "two tensors": "two tensors of 16 elements",
    "integers": "a tensor of 64 integers",
    "leaf": "a tensor that requires grad",
    "parameter": "a parameter",
    "same twice": "the same tensor twice",
    "two views": "two views of one storage",
    "transposed": "a transposed tensor",
    "strided": "every second column of a tensor",
    "keywords": "tensors as keyword arguments",
    "numbers": "a list of 50 numbers",
    "settings": "a nested dict of settings",
    "sixteen": "a list of 16 tensors",
    "hundred": "a list of 100 tensors",
    "dict": "a dict of 8 tensors",
    "batch": "a batch: two tensors and a list of texts",
    "samples": "a list of 8 dicts of a tensor and a number",
    "observation": "a tuple of a tensor, a reward, a flag and a dict",
    "namedtuple": "a namedtuple of tensors",
    "dataclass": "a dataclass of a tensor and numbers",
    "object": "an object of a class of the program",
    "enum": "a member of an enumeration",
    "set": "a set of 10 texts",
    "path": "a path",
    "torch values": "a dtype, a device and a size",
    "array": "a numpy array of 64 elements",
    "scalar": "a numpy scalar",
    "state_dict": "the state_dict of a small model",
    "module": "a small module",
    "sparse": "a sparse tensor",
    "quantized": "a quantized tensor",
    "error": "an error",
    "operator": "torch.add on a tensor",
    "4 KiB": "a tensor of 4 KiB",
    "20 KiB": "a tensor of 20 KiB",
    "64 KiB": "a tensor of 64 KiB",
    "256 KiB": "a tensor of 256 KiB",
    "1 MiB": "a tensor of 1 MiB",
    "async": "rpc_async().wait(), a tensor",
    "remote": "remote().to_here(), a tensor",
    "reference": "an RRef of the callee as argument",
    "own reference": "an RRef of the caller as argument",
    "proxy": "rref.rpc_sync().method(tensor)",
    "remote module": "RemoteModule(tensor)",
    "forward": "a call in an autograd context",
    "backward": "a backward pass over one hop",
    "training step": "a step of one remote module: forward, backward, optimizer",
    "flight": "2,000 calls in flight, a tensor each",
}

CALLS = 500
"""In a row, in a round: each side takes tens of milliseconds, as a part of a program would."""
OTHER = {"1 MiB": 100, "256 KiB": 200, "flight": 4000, "training step": 150}
LEAST = 4.0
"""Demanded of every shape."""
FLIGHT = 6.0
"""Demanded of calls in flight."""


def _row(name: str, title: str) -> Row:
    factor = FLIGHT if name == "flight" else LEAST
    return Row(
        name,
        title,
        operations=OTHER.get(name, CALLS),
        targets=(times_faster(factor),),
        is_short=True,
        warm_up=2000 if name == "flight" else 20,
    )


QUESTION = Question(
    "benchmarks.shapes",
    "Calls of many shapes",
    tuple(_row(name, title) for name, title in SHAPES.items()),
    sides=tuple(Side(side.name, runner="forked", api=side.api) for side in (TORCH, WEFT)),
    about="A program forks its workers; its functions are defined in the script. Each shape goes "
    "to the callee and comes back.",
    full=Form(rounds=10, placements=("a core each", "not pinned")),
    short=Form(rounds=3, scale=0.5, placements=("not pinned",)),
    mean=8.0,
)
