"""Random programs over three workers, drawn as plain data, for real workers and for one process.

A program is a body of steps. A body computes with a list of values, preferably recent ones, and
may call other workers, which run bodies of their own. ``Site`` runs bodies. Real workers and their
model in one process differ only in how a value gets from one worker to another.

Concurrent calls do not touch the hidden states of workers, because their order is undefined.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchweft
from tests.random_steps import NAMES, OPERATIONS, Compute, Remember, Use, at, computed
from torchweft import rpc
from torchweft.errors import AutogradError

WORKERS = 3
Gradients = dict[tuple[int, str], Tensor]


# The parts of a program, beside those of ``random_steps``.


class Touch(NamedTuple):
    """Changes in place an argument that came from another worker, and adds a hook to it."""

    place: int


class Call(NamedTuple):
    """Has a worker run a body, and adds its results, or (``remote``) a reference to one."""

    to: int
    way: str
    body: Body
    arguments: tuple[int, ...]


class FanOut(NamedTuple):
    """Makes concurrent calls, and adds the results of all."""

    calls: tuple[Call, ...]


Step = Compute | Use | Remember | Touch | Call | FanOut


class Body(NamedTuple):
    """Steps, and how many of the last values are the results."""

    steps: tuple[Step, ...]
    results: int


class Program(NamedTuple):
    """A forward pass on one worker, and the number of backward passes from its results."""

    seed: int
    leader: int
    body: Body
    passes: int


class Generator:
    """Draws programs."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._seed = seed

    def program(self) -> Program:
        """Returns the program of the seed."""
        chance = self._chance
        leader = chance.choice([0, 0, 0, 1])
        steps = tuple(self._step(leader, 2, True) for _ in range(chance.randint(5, 9)))
        passes = chance.choice([1] * 7 + [2])
        return Program(self._seed, leader, Body(steps, chance.choice([1, 2, 3, 5])), passes)

    def _step(self, worker: int, depth: int, may_remember: bool) -> Step:
        chance = self._chance
        if depth and chance.random() < 0.5:
            if chance.random() < 0.8:
                return self._call(worker, depth, may_remember)
            calls = (self._call(worker, depth, False) for _ in range(chance.choice([2, 3])))
            return FanOut(tuple(calls))
        kind = chance.random()
        if may_remember and kind < 0.4:
            return Remember(self._late())
        if kind < 0.5:
            return Use(chance.choice(NAMES))
        return Compute(chance.choice((*OPERATIONS, "kept")), self._late(), self._late() + 1)

    def _call(self, worker: int, depth: int, may_remember: bool) -> Call:
        chance = self._chance
        to = chance.choice([other for other in range(WORKERS) if other != worker] * 4 + [worker])
        way = chance.choice(["sync", "sync", "sync", "remote"])
        # The caller goes on while the value of a reference is made.
        may_remember = may_remember and way == "sync"
        steps = [
            self._step(to, depth - 1, may_remember) for _ in range(chance.choice([0, 1, 2, 2, 3]))
        ]
        if to != worker and chance.random() < 0.3:
            steps.insert(0, Touch(chance.choice([0, 1])))
        arguments = tuple(self._late() for _ in range(chance.choice([1, 2, 3])))
        return Call(to, way, Body(tuple(steps), chance.choice([1, 1, 2])), arguments)

    def _late(self) -> int:
        return int(self._chance.random() ** 2 * 6)


def random_program(seed: int) -> Program:
    """Returns the program of a seed; always the same."""
    return Generator(seed).program()


# Running programs

_kind: dict[str, Any] = {"device": "cpu", "dtype": torch.float64}


def use(device: torch.device | str, dtype: torch.dtype) -> None:
    """Makes the parameters of this process anew, on a device and of a type."""
    _kind.update(device=device, dtype=dtype)
    _parameters.clear()


def new_parameters(worker: int) -> dict[str, Tensor]:
    """Returns the parameters of a worker, the same in every process."""
    return {name: _parameter(worker, name) for name in ("state", *NAMES)}


def _parameter(worker: int, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{worker} {name}".encode()))
    drawn = torch.randn(3, generator=generator, dtype=torch.float64)
    return torch.nn.Parameter(drawn.to(**_kind))


class Site:
    """A worker as bodies see it."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self.parameters = parameters
        self.state = parameters["state"] * 1

    def fetch(self, value: Any) -> Tensor:
        """Returns the tensor that a value is, or refers to."""
        raise NotImplementedError

    def call(self, calls: Sequence[Call], arguments: list[list[Any]]) -> list[list[Any]]:
        """Makes calls, concurrently if there are several."""
        raise NotImplementedError

    def run(self, body: Body, arguments: Sequence[Any]) -> list[Any]:
        """Runs a body; its first value is a parameter of this worker."""
        values: list[Any] = [self.parameters["w"] * 2, *arguments]
        for step in body.steps:
            values += self._results_of(step, values, arguments)
        return values[-body.results :]

    def _results_of(self, step: Step, values: list[Any], arguments: Sequence[Any]) -> list[Any]:
        if isinstance(step, Use):
            return [self.parameters[step.name]]
        if isinstance(step, Touch):
            _touch(arguments[step.place % len(arguments)])
            return []
        if isinstance(step, Remember):
            fed = self.fetch(at(values, step.value))
            self.state = torch.tanh(self.state * self.parameters["v"] + fed)
            return [self.state]
        if isinstance(step, Compute):
            return [self._compute(step, values)]
        calls = step.calls if isinstance(step, FanOut) else (step,)
        outcomes = self.call(calls, [_arguments_of(call, values) for call in calls])
        return [result for results in outcomes for result in results]

    def _compute(self, step: Compute, values: list[Any]) -> Tensor:
        first, second = (self.fetch(at(values, age)) for age in (step.first, step.second))
        result = computed(step.operation, first, second, self.parameters["w"])
        if step.operation == "hooked":
            # Not linear, so the result is right only if the hook gets the whole gradient.
            result.register_hook(lambda gradient: gradient.clamp(-0.3, 0.3))
        if step.operation == "kept":
            result.retain_grad()
        return result


def _arguments_of(call: Call, values: list[Any]) -> list[Any]:
    chosen = [at(values, age) for age in call.arguments]
    if not any(isinstance(step, Touch) for step in call.body.steps):
        return chosen
    # An argument that is changed in place must not be another argument too, but may share memory
    # with one.
    fresh = [value * 1 if isinstance(value, Tensor) else value for value in chosen]
    return fresh + [value.view(3) for value in fresh[:1] if isinstance(value, Tensor)]


def _touch(argument: Any) -> None:
    if isinstance(argument, Tensor):
        argument.mul_(0.7)
        argument.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5) * 2)


# Real workers

_parameters: dict[str, Tensor] = {}
_sites: dict[int, RealSite] = {}


class RealSite(Site):
    """This worker, in one run of one program."""

    def __init__(self, run_number: int) -> None:
        if not _parameters:
            _parameters.update(new_parameters(rpc.get_worker_info().id))
        super().__init__(_parameters)
        self._run_number = run_number

    def fetch(self, value: Any) -> Tensor:
        return value if isinstance(value, Tensor) else value.to_here()

    def call(self, calls: Sequence[Call], arguments: list[list[Any]]) -> list[list[Any]]:
        if len(calls) == 1 and calls[0].way == "sync":
            (call,) = calls
            return [rpc.rpc_sync(call.to, serve, (self._run_number, call.body, arguments[0]))]
        started = [self._start(*each) for each in zip(calls, arguments, strict=True)]
        return [[each] if isinstance(each, rpc.RRef) else each.wait() for each in started]

    def _start(self, call: Call, arguments: list[Any]) -> Any:
        everything = (self._run_number, call.body, arguments)
        if call.way == "remote":
            return rpc.remote(call.to, serve_one, everything)
        return rpc.rpc_async(call.to, serve, everything)


def begin(run_number: int) -> None:
    """Forgets the states of earlier runs."""
    _sites.clear()
    _sites[run_number] = RealSite(run_number)


def serve(run_number: int, body: Body, arguments: list[Any]) -> list[Any]:
    """Runs a body here."""
    return _sites[run_number].run(body, arguments)


def serve_one(run_number: int, body: Body, arguments: list[Any]) -> Tensor:
    """Runs a body here and returns its last result."""
    site = _sites[run_number]
    return site.fetch(site.run(body, arguments)[-1])


def gradients_here(context_id: int) -> dict[str, Tensor]:
    """Returns the gradients of this worker's parameters; empty if it did not take part."""
    try:
        gradients = torchweft.autograd.get_gradients(context_id)
    except AutogradError:
        return {}
    return {name: gradients[tensor] for name, tensor in _parameters.items() if tensor in gradients}


def lead(program: Program, mode: Any, run_number: int) -> Gradients:
    """Runs a program with this worker as its leader."""
    with torchweft.autograd.context() as context_id:
        begin_everywhere(run_number)
        results = serve(run_number, program.body, [])
        roots = [_sites[run_number].fetch(result).sum() for result in results]
        for remaining in reversed(range(program.passes)):
            torchweft.autograd.backward(context_id, roots, retain_graph=remaining > 0, mode=mode)
        return {
            (worker, name): gradient
            for worker in range(WORKERS)
            for name, gradient in rpc.rpc_sync(worker, gradients_here, (context_id,)).items()
        }


def begin_everywhere(run_number: int) -> None:
    """Begins a run on all workers; the states are made within the context."""
    for future in [rpc.rpc_async(worker, begin, (run_number,)) for worker in range(WORKERS)]:
        future.wait()


def run_on_workers(program: Program, mode: str, run_number: int) -> Gradients:
    """Returns the gradients that a program leaves on the workers of the group."""
    return rpc.rpc_sync(program.leader, lead, (program, mode, run_number))


# The model in one process


class ModelReference(NamedTuple):
    owner: int
    value: Tensor


class ModelSite(Site):
    """A worker that shares its process with the others."""

    def __init__(self, sites: list[ModelSite]) -> None:
        super().__init__(new_parameters(len(sites)))
        self._worker = len(sites)
        self._sites = sites

    def fetch(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value
        return value.value if value.owner == self._worker else value.value.clone()

    def call(self, calls: Sequence[Call], arguments: list[list[Any]]) -> list[list[Any]]:
        return [self._call(*each) for each in zip(calls, arguments, strict=True)]

    def _call(self, call: Call, arguments: list[Any]) -> list[Any]:
        callee = self._sites[call.to]
        results = callee.run(call.body, self._moved(call.to, arguments))
        if call.way == "remote":
            return [ModelReference(call.to, callee.fetch(results[-1]))]
        return self._moved(call.to, results)

    def _moved(self, other: int, values: list[Any]) -> list[Any]:
        """Returns values as the receiver gets them: copies, unless a worker calls itself."""
        if other == self._worker:
            return values
        return [value.clone() if isinstance(value, Tensor) else value for value in values]


def run_in_one_process(program: Program) -> Gradients:
    """Returns the gradients that plain autograd computes for a program."""
    sites: list[ModelSite] = []
    for _ in range(WORKERS):
        sites.append(ModelSite(sites))
    leader = sites[program.leader]
    roots = [leader.fetch(result).sum() for result in leader.run(program.body, [])]
    for _ in range(program.passes):
        torch.autograd.backward(roots, retain_graph=True)
    return {
        (worker, name): parameter.grad
        for worker, site in enumerate(sites)
        for name, parameter in site.parameters.items()
        if parameter.grad is not None
    }
