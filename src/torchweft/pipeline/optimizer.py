"""The optimizer of a pipeline, as its driver sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch.optim import Optimizer

from torchweft.errors import ConfigurationError, SerializationError
from torchweft.optim import states
from torchweft.optim.states import Options, changed_options, check_members, copied_options
from torchweft.pipeline import groups as grouping
from torchweft.pipeline.deployment import Deployment
from torchweft.pipeline.groups import PipeGroup, Weight, WorkerOptimizer
from torchweft.pipeline.host import Host
from torchweft.pipeline.step import Dropping


class PipeWeight:
    """A weight of a pipeline in the groups of its optimizer; its values are on a worker.

    Attributes:
        name: Its name in ``Pipe.state_dict``.
        shape: Its shape.
    """

    def __init__(self, described: Weight) -> None:
        self.name = described.name
        self.shape = described.shape

    @property
    def grad(self) -> NoReturn:
        """Is not here.

        Raises:
            ConfigurationError: Always; names the calls that reach it.
        """
        raise ConfigurationError(
            f"the gradient of {self.name!r} is on the worker of its stage; clip gradients by "
            "pipe.clip_grad_norm_(max_norm), read them by pipe.gradients(), drop them by "
            "optimizer.zero_grad()"
        )

    @grad.setter
    def grad(self, value: object) -> NoReturn:
        raise ConfigurationError(
            f"the gradient of {self.name!r} is on the worker of its stage, and cannot be set here"
        )

    def __repr__(self) -> str:
        return f"PipeWeight({self.name!r}, {self.shape})"


class PipeOptimizer(states.Unscalable, Optimizer):
    """The optimizers of a pipeline's workers, one for the weights of each; ``Pipe.optimizer``.

    ``param_groups`` has the groups of all workers, joined: a group of the pipeline is the groups of
    the workers with its settings. Their hyper-parameters may be changed at any time, also by the
    schedulers of ``torch.optim.lr_scheduler``: the next step tells the workers. A weight stays in
    its group when it moves. Hooks run on the driver. Not thread-safe.

    Args:
        deployment: Returns the stages as they are placed now.
        dropping: Whether gradients are to be dropped before they are used again.
        optimizer_class: Called on each worker with its weights and ``options``.
        options: Keyword arguments of the optimizer.
    """

    def __init__(
        self,
        deployment: Callable[[], Deployment],
        dropping: Dropping,
        optimizer_class: Callable[..., Optimizer],
        options: Options,
    ) -> None:
        self._deployment = deployment
        self._dropping = dropping
        self._recipe = (optimizer_class, options)
        self._is_replaced = False
        self._is_base_ready = False
        super().__init__([{"params": []}], {})
        self._is_base_ready = True
        self.state = states.elsewhere("on the worker of its stage; read it by state_dict()")
        made = self._make(deployment())
        first = next((each for each in made if each is not None), None)
        self.classes: list[str] = [] if first is None else first.classes
        if first is not None:
            self.defaults.update(first.defaults)
        self._groups: list[PipeGroup] = []
        self._members: list[tuple[PipeWeight, ...]] = []
        self._told: list[Options] = []
        found = grouping.joined(_parts(made)) or [PipeGroup({}, [])]
        self._made = [copied_options(each.options) for each in found]
        self._arrange(deployment(), found)
        self.adopt(found)

    def _make(self, deployment: Deployment) -> list[WorkerOptimizer | None]:
        """Makes the optimizers of all workers; returns their groups."""
        return deployment.call_all(Host.make_optimizer, *self._recipe)

    def _arrange(self, deployment: Deployment, found: Sequence[PipeGroup]) -> None:
        deployment.call_all(Host.arrange, _as_arranged(found))

    def replace(self) -> None:
        """Notes that the pipeline has another optimizer now."""
        self._is_replaced = True

    def _placed(self) -> Deployment:
        if self._is_replaced:
            raise ConfigurationError(
                "this pipeline has got another optimizer since, and a pipeline has one; make one "
                "optimizer, with a parameter group for each kind of weights"
            )
        return self._deployment()

    def groups(self) -> list[PipeGroup]:
        """Returns the present groups."""
        check_members([group["params"] for group in self.param_groups], self._members)
        pairs = zip(self.param_groups, self._groups, strict=True)
        return [PipeGroup(_without_weights(group), known.weights) for group, known in pairs]

    def follow(self) -> list[PipeGroup]:
        """Takes over hyper-parameters that the workers' optimizers changed; returns the groups.

        Some classes count steps in their groups, or estimate a learning rate there.

        Raises:
            ConfigurationError: Workers have come to different values.
        """
        changed: dict[tuple[int, str], tuple[str, Any]] = {}
        placed = self._placed()
        for worker, found in zip(placed.workers, placed.call_all(Host.options), strict=True):
            for number, options in found.items():
                for key, value in changed_options(options, self._told[number]).items():
                    first, other = changed.setdefault((number, key), (worker, value))
                    if not grouping.is_same({key: other}, {key: value}):
                        raise ConfigurationError(
                            f"the optimizers of {first!r} and {worker!r} have changed {key!r} of "
                            f"parameter group {number}, each in another way: {other!r} and "
                            f"{value!r}; use a class that keeps what it learns of a weight in the "
                            "weight's state"
                        )
        mine = self._changes()
        for (number, key), (_, value) in changed.items():
            self._told[number][key] = value
            if key not in mine.get(number, {}):
                self.param_groups[number].update(copied_options({key: value}))
        return self.groups()

    # Moves

    def move(self, deployment: Deployment) -> list[PipeGroup]:
        """Makes the optimizers of other workers; returns the groups, which ``adopt`` takes over."""
        found = grouping.rejoined(_parts(self._make(deployment)), self.groups(), self._made)
        self._arrange(deployment, found)
        return found

    def adopt(self, found: Sequence[PipeGroup]) -> None:
        """Takes over groups, which the workers have already."""
        for group in found[len(self._made) :]:
            self._made.append(copied_options(group.options))
        self._groups = list(found)
        self._told = [copied_options(each.options) for each in found]
        present = [*self.param_groups, *({} for _ in found)]
        self.param_groups[:] = present[: len(found)]  # The program may hold these dicts.
        for shown, group in zip(self.param_groups, found, strict=True):
            options = copied_options(group.options)
            shown.clear()
            shown.update({"params": [PipeWeight(each) for each in group.weights]}, **options)
        self._members = [tuple(shown["params"]) for shown in self.param_groups]

    def restore(self, deployment: Deployment, found: Sequence[PipeGroup]) -> None:
        """Takes over groups, and tells the workers."""
        self._arrange(deployment, found)
        self.adopt(found)

    # The interface of torch.optim

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuses further weights: the optimizer has all that the stages train.

        Raises:
            ConfigurationError: Always.
        """
        if self._is_base_ready:  # The base class requires an empty group.
            raise ConfigurationError(
                "a PipeOptimizer has all weights of the stages; set requires_grad of those that "
                "are not to be trained, and make groups in the function that makes the optimizer "
                "of a worker"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the optimizer's weights: before anything uses them again.

        Args:
            set_to_none: Whether they become None, so that a step leaves these weights as they are;
                otherwise zeros, with which momentum and weight decay move weights.

        Raises:
            ConfigurationError: The pipeline has another optimizer by now.
        """
        self._placed()
        self._dropping.want(bool(set_to_none))

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Steps the optimizer of each worker; blocks until all are done.

        Args:
            closure: Not supported.

        Raises:
            ConfigurationError: There is a closure, or the pipeline has another optimizer by now.
            WorkerLost: A worker was lost; some of the others have made the step.
        """
        if closure is not None:
            raise ConfigurationError("a PipeOptimizer takes no closure; call pipe.step before it")
        placed = self._placed()
        changes = self._changes()
        zero_grad = self._dropping.take()
        try:
            placed.call_all(Host.step, changes, zero_grad)
        except BaseException:
            self._dropping.want(zero_grad)
            raise
        for number, changed in changes.items():
            self._told[number].update(changed)

    def _changes(self) -> dict[int, Options]:
        """Returns the hyper-parameters that the workers do not have yet, by group."""
        pairs = enumerate(zip(self.groups(), self._told, strict=True))
        found = {number: changed_options(group.options, told) for number, (group, told) in pairs}
        return {number: changed for number, changed in found.items() if changed}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of each weight by its name, copied to the driver, and the groups.

        The names are those of ``Pipe.state_dict``. Of copies of a weight it returns one's state.
        Beside ``state`` and ``param_groups`` it has ``parameters``, the shape and type of each
        weight, and ``classes``, the names of the optimizer's class and of those it derives from.
        """
        return states.saved_with_hooks(self, self._state_dict)

    def _state_dict(self) -> dict[str, Any]:
        state = self._placed().gathered(Host.optimizer_state)
        groups = self.follow()
        return {
            "state": state,
            "param_groups": grouping.saved_groups(groups),
            "parameters": {
                each.name: {"shape": each.shape, "dtype": each.dtype}
                for group in groups
                for each in group.weights
            },
            "classes": list(self.classes),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a ``state_dict`` of this class; the stages may be cut in another way.

        The state keeps its types.

        Raises:
            ConfigurationError: It is no state of such an optimizer, or of another class, or of
                weights with other names, shapes or types. Nothing is changed.
        """
        states.loaded_with_hooks(self, state_dict, self._load_state_dict)

    def _load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        placed, present = self._placed(), self.groups()
        saved, state = _read(state_dict)
        problems = self._problems(state_dict, saved, state, present)
        if not problems:
            of_workers = placed.call_all(Host.misfits, state)
            problems = [text for each in of_workers for text in each]
        if problems:
            raise _misfit(problems)
        found = grouping.restored_groups(saved, present)
        placed.call_all(Host.load_optimizer, _as_arranged(found), state)
        self.adopt(found)

    def weft_differences(self, path: str, state: Any) -> list[str]:
        """Returns why this optimizer cannot have a saved state; for ``torchweft.checkpoint``."""
        saved, found = _read(state)
        return [f"{path}: {text}" for text in self._problems(state, saved, found, self.groups())]

    def _problems(
        self,
        state_dict: Mapping[str, Any],
        saved: Sequence[Mapping[str, Any]],
        state: Mapping[str, Any],
        present: Sequence[PipeGroup],
    ) -> list[str]:
        problems = []
        classes = list(state_dict.get("classes", ()))
        if not states.fits_class(classes, self.classes):
            problems.append(f"it is of the class {classes[0]}, and this one {self.classes[0]}")
        elif not classes:
            other = states.classes_by_options(saved, [each.options for each in present])
            problems += [other] if other else []
        problems += grouping.differences(saved, present)
        own = {each.name: each for group in present for each in group.weights}
        unknown = sorted(state.keys() - own.keys())
        if unknown:
            problems.append(f"it has a state of {unknown}, which are no weights of this one")
        for name, parameter in dict(state_dict.get("parameters", {})).items():
            here = own.get(name)
            there = tuple(parameter["shape"]), parameter["dtype"]
            if here is not None and there != (here.shape, here.dtype):
                problems.append(
                    f"{name} is {there[1]}{list(there[0])} there and "
                    f"{here.dtype}{list(here.shape)} here"
                )
        return problems

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            "a PipeOptimizer cannot be copied or sent; keep its state_dict(), or Pipe.save"
        )

    def __repr__(self) -> str:
        kind = getattr(self._recipe[0], "__name__", repr(self._recipe[0]))
        return f"PipeOptimizer of {kind} on {', '.join(map(repr, self._deployment().workers))}"


class SavedGroups:
    """The groups of an optimizer, in the form that snapshots save and restore.

    Args:
        groups: The groups.
    """

    def __init__(self, groups: Sequence[PipeGroup]) -> None:
        self.groups = list(groups)

    def state_dict(self) -> dict[str, Any]:
        """Returns the groups as plain data."""
        return {"groups": grouping.saved_groups(self.groups)}

    def weft_differences(self, path: str, state: Mapping[str, Any]) -> list[str]:
        """Returns why saved groups are not those of this optimizer."""
        found = grouping.differences(state["groups"], self.groups)
        return [f"{path} has {each}" for each in found]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over saved groups."""
        self.groups = grouping.restored_groups(state["groups"], self.groups)


def _parts(made: Iterable[WorkerOptimizer | None]) -> list[list[PipeGroup]]:
    return [each.groups for each in made if each is not None]


def _as_arranged(found: Iterable[PipeGroup]) -> list[tuple[Options, list[str]]]:
    return [(each.options, each.names) for each in found]


def _without_weights(group: Mapping[str, Any]) -> Options:
    return {key: value for key, value in group.items() if key != "params"}


def _read(state_dict: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns the groups and the state of a ``state_dict``.

    Raises:
        ConfigurationError: It is none of a pipeline's optimizer.
    """
    try:
        saved, state = list(state_dict["param_groups"]), dict(state_dict["state"])
        names = [*state, *(name for group in saved for name in group["params"])]
        if any(not isinstance(name, str) for name in names):
            raise ValueError("its weights have no names")
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"this is no state_dict of a PipeOptimizer ({error}); load what its state_dict() "
            "returned"
        ) from error
    return saved, state


_NAMED = 4
"""How many differences a message names."""


def _misfit(problems: Sequence[str]) -> ConfigurationError:
    more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
    return ConfigurationError(
        f"the optimizer's state is of another pipeline: {'; '.join(problems[:_NAMED])}{more}. "
        "Nothing was loaded; load what the state_dict() of an optimizer of the same class and "
        "model returned"
    )
