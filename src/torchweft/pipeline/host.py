"""One worker's part of a pipeline, as the driver calls it.

The driver holds a reference to the ``Host`` of each worker. Weights, and the state that the
optimizer has of them, have names that are unique in the pipeline: so state moves to stages that are
cut in another way, and to and from snapshots, by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchweft import optim
from torchweft.arguments import kind_of
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.extending import device_mark, served_call
from torchweft.optim import states
from torchweft.optim.clipping import norm, on_host
from torchweft.optim.states import Options, copied_options
from torchweft.pipeline.groups import PipeGroup, Weight, WorkerOptimizer
from torchweft.pipeline.recording import Notes, WorkerNotes
from torchweft.pipeline.runner import START, Assignment, Runner, StartCommand
from torchweft.pipeline.streaming import ENTER, EnteringMinibatch, LossQueue, StreamRunner
from torchweft.probe import clock_id
from torchweft.rpc import OrderedFuture, RRef, functions

Inputs = Mapping[int, Mapping[int, Sequence[Any]]]
"""By stage and micro-batch, what the stage takes of the batch."""
Groups = Sequence[tuple[Options, Sequence[str]]]
"""For each parameter group its hyper-parameters, and the names of its weights on all workers."""


class Form(NamedTuple):
    """The shape of a weight or buffer, and the name of its type."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, value: Any) -> Form:
        """Returns the form of a tensor; that of other state is always the same."""
        if not isinstance(value, Tensor):
            return cls((), "")
        return cls(tuple(value.shape), str(value.dtype).removeprefix("torch."))


class Named(NamedTuple):
    """A weight, a buffer, or further state of a module.

    Attributes:
        stage: The stage that has it. Several stages of a worker may have copies of one weight.
        name: Its name in the pipeline.
        value: The parameter, the tensor or the further state; not a copy.
        owner: The module that has it.
    """

    stage: int
    name: str
    value: Any
    owner: nn.Module


class Host:
    """Runs the stages of one worker. Its end, when no reference is left, ends their thread.

    Args:
        assignment: What the worker runs.
    """

    def __init__(self, assignment: Assignment) -> None:
        make = Runner if assignment.endless is None else StreamRunner
        self._runner: Runner | None = make(assignment)
        self._group_numbers: list[int] = []  # of the groups of the optimizer, in the pipeline
        self._finalize = weakref.finalize(self, self._runner.close)

    @property
    def _running(self) -> Runner:
        if self._runner is None:
            raise ArgumentTypeError("there is no such pipeline on this worker; it was closed")
        return self._runner

    def close(self) -> None:
        """Ends the thread; the last reference releases the stages."""
        # Else a step that comes before that reference has gone would never be answered.
        self._runner = None
        self._finalize()

    # Steps and runs

    @functions.async_execution
    def start(
        self,
        step: int,
        is_training: bool,
        zero_grad: bool | None,
        inputs: Inputs,
        targets: Mapping[int, Any],
        reports: RRef[LossQueue] | None = None,
    ) -> torch.futures.Future[Any]:
        """Runs the worker's row once; answered when it is done."""
        done: OrderedFuture[Any] = OrderedFuture()
        here = device_mark(), served_call()
        given = (step, is_training, zero_grad, inputs, targets, reports, done, *here)
        self._running.put(step, START, StartCommand(*given))
        return done

    def abort(self, step: int) -> None:
        """Ends a step that failed on another worker."""
        if self._runner is not None:
            self._runner.put(step, (), None)

    def enter(self, run: int, minibatch: int, inputs: Inputs, targets: Mapping[int, Any]) -> None:
        """Lets a minibatch enter an asynchronous pipeline.

        Args:
            run: Number of the run.
            minibatch: Its number, counted from 0.
            inputs: What this worker's stages take of it.
            targets: Its target, if this worker runs the last stage for it.
        """
        entry = EnteringMinibatch(True, inputs, targets, device_mark())
        self._running.put(run, (ENTER, 0, 0, minibatch), entry)

    def finish(self, run: int, n_minibatches: int) -> None:
        """Says that no more minibatches will enter."""
        self._running.put(
            run, (ENTER, 0, 0, n_minibatches), EnteringMinibatch(False, {}, {}, device_mark())
        )

    # Modes and measurements

    def set_mode(self, is_training: bool) -> None:
        """Sets the mode of the stages."""
        for stage in self._running.stages.values():
            stage.module.train(is_training)

    def peak_held(self) -> int:
        """Returns the most micro-batches whose activations were held in the last step."""
        return self._running.peak_held

    def versions_held(self) -> int:
        """Returns the most versions of the weights that were held at once in the last run."""
        return self._running.peak_versions

    def start_recording(self) -> None:
        """Notes from now on when actions begin and end."""
        self._running.notes = Notes()

    def stop_recording(self) -> WorkerNotes:
        """Ends the recording; returns the notes."""
        runner = self._running
        notes, runner.notes = runner.notes or Notes(), None
        return WorkerNotes(clock_id(), notes.steps)

    # Weights that exist more than once

    def values_of_copies(self, group: int) -> list[Tensor]:
        """Returns the weights of the first member of a group of copies, which this worker holds."""
        copies = self._running.assignment.copies
        member = copies.groups[group][0]
        module = self._running.stages[member.stage].module
        return [each.detach() for each in copies.weights(member, module)]

    def set_copies(self, group: int, values: Sequence[Tensor]) -> None:
        """Sets the weights of this worker's members of a group of copies."""
        with torch.no_grad():
            for weights in self._running.own_copies(group).values():
                for weight, value in zip(weights, values, strict=True):
                    weight.copy_(value)

    # Gradients

    def norms(self, norm_type: float) -> Tensor:
        """Returns the norms of the gradients, each weight once in the pipeline."""
        copies, me = self._running.assignment.copies, self._running.assignment.worker
        found = [
            norm(weight.grad.detach().double(), norm_type)
            for number, stage in self._running.stages.items()
            for name, weight in stage.module.named_parameters()
            if weight.grad is not None and copies.is_first(me, number, name)
        ]
        return torch.stack(on_host(found)) if found else torch.empty(0, dtype=torch.float64)

    def scale_gradients(self, factor: float) -> None:
        """Multiplies the gradients with a factor."""
        for stage in self._running.stages.values():
            for weight in stage.parameters():
                if weight.grad is not None:
                    weight.grad.mul_(factor)

    def gradients(self) -> dict[str, Tensor | None]:
        """Returns the gradients of the weights."""
        return {
            prefix + name: weight.grad
            for _, prefix, module in self._modules()
            for name, weight in module.named_parameters()
        }

    def squared_norms(self) -> dict[str, float]:
        """Returns the squared norm of the gradient of each weight that has one."""
        return {
            name: float(gradient.double().square().sum())
            for name, gradient in self.gradients().items()
            if gradient is not None
        }

    # State by name

    def _modules(self) -> Iterator[tuple[int, str, nn.Module]]:
        """Yields the number of each stage, the prefix of its names, and its module."""
        runner = self._running
        for number, stage in runner.stages.items():
            yield number, "" if runner.assignment.has_names else f"{number}.", stage.module

    def _named(self) -> Iterator[Named]:
        """Yields weights, buffers and further state of all stages."""
        for number, prefix, module in self._modules():
            for name, value in module.state_dict(keep_vars=True).items():
                owner = module.get_submodule(name.rpartition(".")[0])
                yield Named(number, prefix + name, value, owner)

    def _weights(self) -> list[Named]:
        return [each for each in self._named() if isinstance(each.value, nn.Parameter)]

    def forms(self) -> list[tuple[int, str, Form]]:
        """Returns the stage, the name and the form of each weight and buffer."""
        return [(each.stage, each.name, Form.of(each.value)) for each in self._named()]

    def values(self) -> dict[str, Any]:
        """Returns the weights and buffers."""
        return {each.name: _detached(each.value) for each in self._named()}

    def set_values(self, state: Mapping[str, Any]) -> None:
        """Sets those of the weights and buffers that are in ``state``."""
        for _, prefix, module in self._modules():
            own = module.state_dict()
            changed = {name: state[prefix + name] for name in own if prefix + name in state}
            module.load_state_dict({**own, **changed})

    def references(
        self, places: Sequence[tuple[int, str]]
    ) -> tuple[dict[str, RRef[Any]], dict[str, RRef[WeightState]]]:
        """Returns references to some of the state, by name, for ``torchweft.checkpoint``.

        Args:
            places: The stages and names.

        Returns:
            The weights, buffers and further state; and the optimizer's state of each weight that it
            steps.
        """
        found = {(each.stage, each.name): each for each in self._named()}
        optimizer, stepped = self._running.optimizer, self._stepped()
        values: dict[str, RRef[Any]] = {}
        states_of: dict[str, RRef[WeightState]] = {}
        for stage, name in places:
            _, _, value, owner = found[stage, name]
            if not isinstance(value, Tensor):
                values[name] = RRef(FurtherState(owner))
                continue
            values[name] = RRef(value.detach())
            if optimizer is not None and value in stepped:
                states_of[name] = RRef(WeightState(optimizer, value))
        return values, states_of

    # The optimizer

    def make_optimizer(
        self, make: Callable[..., Optimizer], options: Options
    ) -> WorkerOptimizer | None:
        """Makes the optimizer of the weights; returns None if there are no weights.

        Raises:
            ArgumentTypeError: ``make`` returned no optimizer.
            ConfigurationError: The optimizer needs a closure, or steps something else.
        """
        runner = self._running
        runner.optimizer, self._group_numbers = None, []
        weights = [weight for stage in runner.stages.values() for weight in stage.parameters()]
        if not weights:
            return None
        optimizer = make(weights, **options)
        if not isinstance(optimizer, Optimizer):
            raise ArgumentTypeError(
                f"optimizer_class returned {kind_of(optimizer)}; it returns an optimizer, as a "
                "class of torch.optim does"
            )
        kind = type(optimizer)
        if states.needs_closure(kind):
            raise ConfigurationError(
                f"{kind.__name__} evaluates the model anew within a step, by a closure, and needs "
                "all weights in one place; use an optimizer that steps with given gradients"
            )
        found = self._described()
        groups = []
        for group in optimizer.param_groups:
            _check_known(group["params"], found)
            described = [each for weight in group["params"] for each in found[weight]]
            groups.append(PipeGroup(_options(group), described))
        runner.optimizer, self._group_numbers = optimizer, list(range(len(groups)))
        return WorkerOptimizer(states.lineage(kind), copied_options(optimizer.defaults), groups)

    def _described(self) -> dict[Tensor, list[Weight]]:
        """Returns each weight with its descriptions: one for each of its names."""
        found: dict[Tensor, list[Weight]] = {}
        for place, (stage, name, value, _) in enumerate(self._weights()):
            form = Form.of(value)
            described = Weight(stage, place, name, form.shape, form.dtype)
            found.setdefault(value, []).append(described)
        return found

    def arrange(self, groups: Groups) -> None:
        """Puts the weights into the groups of the pipeline, with their hyper-parameters."""
        optimizer = self._running.optimizer
        if optimizer is None:
            return
        own: dict[str, list[Tensor]] = {}
        for each in self._weights():
            own.setdefault(each.name, []).append(each.value)
        present = {frozenset(group["params"]): group for group in optimizer.param_groups}
        arranged, self._group_numbers = [], []
        for number, (options, names) in enumerate(groups):
            weights = list(dict.fromkeys(each for name in names for each in own.get(name, ())))
            if not weights:
                continue
            group = present.get(frozenset(weights), {"params": weights})
            group.update(options)
            arranged.append(group)
            self._group_numbers.append(number)
        optimizer.param_groups[:] = arranged

    def _groups(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields the groups of the optimizer, each after its number in the pipeline."""
        optimizer = self._running.optimizer
        if optimizer is not None:
            yield from zip(self._group_numbers, optimizer.param_groups, strict=True)

    def options(self) -> dict[int, Options]:
        """Returns the hyper-parameters of the groups, by their number in the pipeline."""
        return {number: _options(group) for number, group in self._groups()}

    def step(self, changes: Mapping[int, Options], zero_grad: bool | None) -> None:
        """Steps the optimizer, after changes of its hyper-parameters.

        Args:
            changes: The changed hyper-parameters, by the number of their group.
            zero_grad: Whether the gradients become None first, or zeros; None: they stay.
        """
        if changes:
            for number, group in self._groups():
                group.update(changes.get(number, {}))
        if zero_grad is not None:
            self.zero_grad(zero_grad)
        if self._running.optimizer is not None:
            optim.step_optimizer(self._running.optimizer)

    def zero_grad(self, set_to_none: bool) -> None:
        """Drops the gradients that the optimizer steps with."""
        self._running.zero_grad(set_to_none)

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Returns the state that the optimizer has, by name of the weight."""
        optimizer = self._running.optimizer
        if optimizer is None:
            return {}
        known = optimizer.state
        return {
            each.name: dict(known[each.value]) for each in self._weights() if each.value in known
        }

    def misfits(self, state: Mapping[str, Any]) -> list[str]:
        """Returns the differences because of which the optimizer cannot load a state."""
        optimizer = self._running.optimizer
        if optimizer is None:
            return []
        kind, known = type(optimizer), self.optimizer_state()
        return [
            text
            for _, name, weight, _ in self._weights()
            if name in state
            for text in states.misfits(name, weight.shape, state[name], kind, known.get(name))
        ]

    def load_optimizer(self, groups: Groups, state: Mapping[str, Any]) -> None:
        """Replaces the groups and the state of the optimizer."""
        self.arrange(groups)
        optimizer, stepped = self._running.optimizer, self._stepped()
        for each in self._weights():
            if optimizer is not None and each.value in stepped:
                WeightState(optimizer, each.value).put(state.get(each.name) or {})

    def _stepped(self) -> set[Tensor]:
        """Returns the weights that the optimizer steps."""
        return {weight for _, group in self._groups() for weight in group["params"]}


def set_up(assignment: Assignment) -> RRef[Host]:
    """Makes the stages of this worker, and the thread that runs them."""
    return RRef(Host(assignment))


class WeightState:
    """What an optimizer knows of one weight, in the form that snapshots save and restore.

    Args:
        optimizer: The optimizer.
        weight: The weight.
    """

    def __init__(self, optimizer: Optimizer, weight: Tensor) -> None:
        self._optimizer = optimizer
        self._weight = weight

    def _present(self) -> dict[str, Any]:
        return dict(self._optimizer.state.get(self._weight, {}))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state, empty before the first step, and the lineage of the class."""
        return {"classes": states.lineage(type(self._optimizer)), "state": self._present()}

    def weft_differences(self, path: str, saved: Mapping[str, Any]) -> list[str]:
        """Returns the differences that prevent loading what ``state_dict`` of another returned."""
        kind = type(self._optimizer)
        classes = states.lineage(kind)
        if not states.fits_class(saved["classes"], classes):
            return [f"{path} is of the class {saved['classes'][0]} there and {classes[0]} here"]
        shape, present = self._weight.shape, self._present()
        return list(states.misfits(path, shape, saved["state"], kind, present))

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Loads what ``state_dict`` of another returned."""
        self.put(saved["state"])

    def put(self, state: Mapping[str, Any]) -> None:
        """Replaces the state."""
        self._optimizer.state.pop(self._weight, None)
        if state:
            placed = states.placed(self._optimizer, self._weight, state)
            self._optimizer.state[self._weight] = placed


class FurtherState:
    """The further state of a module, in the form that snapshots save and restore.

    Args:
        module: The module, which has ``get_extra_state`` and ``set_extra_state``.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        """Returns the state."""
        return {"state": self._module.get_extra_state()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Loads what ``state_dict`` of another returned."""
        self._module.set_extra_state(saved["state"])


def _check_known(weights: Sequence[Tensor], found: Mapping[Tensor, object]) -> None:
    for weight in weights:
        if weight not in found:
            raise ConfigurationError(
                f"the optimizer steps a tensor of shape {tuple(weight.shape)} that is no weight of "
                "this worker's stages; make it of the weights that its function is called with"
            )


def _options(group: Mapping[str, Any]) -> Options:
    return copied_options({key: value for key, value in group.items() if key != "params"})


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
