"""The training: a table whose rows two workers share, a model on a third, a scale at the trainer.

Every step does what a real program would: calls with gradients in both directions, also from
workers that are called, an unused result, references that are made, handed on and dropped, a
tensor large enough for a channel of its own, and a step of every owner's optimizer.

The sums do not depend on the order in which messages come: no gradient has more than two parts.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import time
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch

# The first optimizer of a process imports this; import it once, not in every worker.
import torch._dynamo
from torch import Tensor, nn

import torchweft.autograd
from tests.faults import points
from tests.faults.plan import HEAD, LEFT, RIGHT, STEPS, TRAINER
from torchweft import rpc
from torchweft.autograd.engine import current_engine
from torchweft.errors import WorkerLost
from torchweft.nn import RemoteModule
from torchweft.optim import DistributedOptimizer
from torchweft.rpc.worker import current_worker

ROWS, WIDTH = 12, 8
LARGE = 1 << 14
LOOKED_UP = 6
CENSUS_LIMIT_S = 10.0
_POLL_S = 0.01


class Value:
    """A value that references refer to; its living instances are counted."""

    alive: ClassVar[weakref.WeakSet[Value]] = weakref.WeakSet()

    def __init__(self, content: Tensor) -> None:
        self.content = content
        Value.alive.add(self)

    def times(self, factor: float) -> Tensor:
        return self.content * factor


class Shard:
    """The even or the odd rows of a table."""

    def __init__(self, seed: int) -> None:
        chance = torch.Generator().manual_seed(seed)
        self.rows = nn.Parameter(_random(ROWS, WIDTH, chance=chance))

    def look_up(self, rows: Tensor) -> Tensor:
        points.reach("serving")
        found: Tensor = self.rows[rows]
        return found

    def parameter(self) -> rpc.RRef[nn.Parameter]:
        return rpc.RRef(self.rows)


class Head(nn.Module):
    """The module that follows the table."""

    def __init__(self) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(3)
        self.mix = nn.Parameter(_random(WIDTH, WIDTH, chance=chance))
        self.out = nn.Parameter(_random(WIDTH, chance=chance))

    def forward(self, left: Tensor, right: rpc.RRef[Tensor], wide: Tensor) -> tuple[Tensor, Tensor]:
        points.reach("serving")
        points.reach("taking over")
        mixed = torch.tanh((left + right.to_here()) @ self.mix)
        # The answer is not used: the pass must discover whether gradients come from there.
        rpc.rpc_sync(RIGHT, twice, args=(mixed,))
        squares: Tensor = (wide * wide).mean(dim=1)
        return (mixed @ self.out).tanh(), squares


class Stepper(torch.optim.SGD):
    """An optimizer in whose step a fault may strike."""

    def step(self, closure: Any = None) -> Any:
        points.reach("optimizer")
        return super().step(closure)


def _random(*shape: int, chance: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=chance, dtype=torch.float64)


def make_value(content: Tensor) -> Value:
    return Value(content)


def use(reference: rpc.RRef[Value], factor: float) -> Tensor:
    """Uses a value that another worker has."""
    points.reach("serving")
    points.reach("taking over")
    product: Tensor = reference.rpc_sync().times(factor)
    return product


def fetch_back(reference: rpc.RRef[Tensor]) -> Tensor:
    """Fetches a value of the caller, and makes the caller compute something, too."""
    points.reach("taking over")
    result: Tensor = rpc.rpc_sync(TRAINER, twice, args=(reference.to_here(),))
    return result


def twice(value: Tensor) -> Tensor:
    points.reach("serving")
    return 2 * value


class Training:
    """The trainer's side."""

    def __init__(self) -> None:
        self.left, self.right = (
            rpc.remote(owner, Shard, args=(seed,)) for seed, owner in enumerate((LEFT, RIGHT))
        )
        self.head = RemoteModule(HEAD, Head)
        chance = torch.Generator().manual_seed(4)
        self.scale = nn.Parameter(_random(WIDTH, 1, chance=chance))
        self.large = _random(WIDTH, LARGE, chance=chance)
        self.parameters = [
            self.left.rpc_sync().parameter(),
            self.right.rpc_sync().parameter(),
            *self.head.remote_parameters(),
            rpc.RRef(self.scale),
        ]
        self.optimizer = DistributedOptimizer(Stepper, self.parameters, lr=0.05)
        self.digest = hashlib.sha256()

    def run(self, note_step: Callable[[int], None]) -> str:
        """Trains; returns a digest of the results.

        Args:
            note_step: Called with the number of each step before it.
        """
        chance = torch.Generator().manual_seed(5)
        for number in range(1, STEPS + 1):
            note_step(number)
            self._step(chance)
            self._use_references(number)
        for parameter in self.parameters:
            self._note(parameter.to_here())
        return self.digest.hexdigest()

    def _step(self, chance: torch.Generator) -> None:
        rows = torch.randint(ROWS, (3, LOOKED_UP), generator=chance)
        with torchweft.autograd.context() as context_id:
            left = self.left.rpc_async().look_up(rows[0])
            right = self.right.remote().look_up(rows[1])
            # No gradient ever comes for this.
            unused = self.left.rpc_sync().look_up(rows[2])
            sum(unused * 2)
            mixed, squares = self.head(left.wait(), right, self.scale * self.large)
            loss = (mixed - 0.5).square().sum() + squares.sum()
            torchweft.autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        self._note(loss)

    def _use_references(self, number: int) -> None:
        made = rpc.remote(LEFT, make_value, args=(torch.full((3,), float(number)),))
        points.reach("handing on")
        uses = [rpc.rpc_async(to, use, args=(made, number)) for to in (RIGHT, HEAD)]
        own = rpc.RRef(torch.full((2,), float(number)))
        self._note(rpc.rpc_sync(RIGHT, fetch_back, args=(own,)))
        for used in uses:
            self._note(used.wait())

    def _note(self, value: Tensor) -> None:
        self.digest.update(value.detach().numpy().tobytes())


def count_here() -> dict[str, int]:
    """Returns how many values and references this worker has."""
    gc.collect()
    counts = current_worker().references.counts()
    engine = current_engine()
    of_autograd = {
        "contexts": len(engine.contexts.ids()),
        "passes": len(engine.passes.parts),
        "led": len(engine.passes.led),
    }
    return {**counts, **of_autograd, "alive": len(Value.alive)}


def await_none_left() -> dict[str, dict[str, int]]:
    """Waits until no present worker has any values or references; returns the rest."""
    deadline_s = time.monotonic() + CENSUS_LIMIT_S
    while True:
        counts: dict[str, dict[str, int]] = {}
        for info in rpc.get_worker_infos():
            with contextlib.suppress(WorkerLost):
                counts[info.name] = rpc.rpc_sync(info, count_here)
        left = {name: count for name, count in counts.items() if any(count.values())}
        if not left or time.monotonic() > deadline_s:
            return left
        time.sleep(_POLL_S)
