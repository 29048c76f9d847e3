"""An observer: runs environments, asks a policy for actions, and keeps a trajectory."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.errors import NotAllowed
from torchweft.extending import check_types, rebuilds_plain, serves_another_strictly
from torchweft.rl.agent import FollowingPolicy
from torchweft.rl.environments import (
    Array,
    Environments,
    Group,
    Stepped,
    check_spaces,
    described,
)
from torchweft.rl.errors import WrongActions, WrongObservations
from torchweft.rl.policies import DECISIONS, NUMBER, STARTS, Decision, Policy
from torchweft.rl.trajectories import Collected, Episode, Trajectory
from torchweft.rpc import RRef, expose, get_worker_info


@rebuilds_plain
class Introduction(NamedTuple):
    """What an observer says about itself.

    Attributes:
        name: Its name.
        program: Version of the program that makes its environments and its policy.
        observations: Description of the observation space of one environment.
        actions: That of its action space.
    """

    name: str
    program: str
    observations: str
    actions: str


class Observer:
    """Runs the environments of one place. For one thread at a time.

    Args:
        place: Place among the observers, from 0; with the seed, it numbers the environments.
        environments: Its environments.
        policy: What it asks for actions. If it has a method ``begin`` with the arguments of ``act``
            which returns a future, one half of the environments steps meanwhile.
        name: Its name in trajectories and messages.
        by_reference_bytes: Larger trajectories stay here until they are pulled.
    """

    def __init__(
        self,
        place: int,
        environments: Environments,
        policy: Policy,
        name: str = "",
        by_reference_bytes: int = 1 << 20,
    ) -> None:
        check_types(place=(place, int), environments=(environments, Environments), name=(name, str))
        _check_made(environments.make)
        self._name = name or f"observer{place}"
        self._policy = policy
        self._by_reference_bytes = by_reference_bytes
        self._program = program_of(environments.make, policy)
        groups = [environments.group(place, half) for half in range(environments.halves)]
        check_spaces(groups[0].spaces, self._name)
        self._halves = [_Half(group, self._name) for group in groups]
        self._made = 0

    @expose
    def introduce(self) -> Introduction:
        """Says which environments it runs, and by which program."""
        return Introduction(
            self._name, self._program, *map(described, self._halves[0].group.spaces)
        )

    @expose
    def observe(self, steps: int) -> Trajectory:
        """Takes steps in all environments; blocks until they are done.

        The actions of all of them are asked for within this call. Episodes go on in the next call.

        Raises:
            WrongActions: The policy did not return an action for each environment.
            WrongObservations: The policy does not take observations of their shape, or they differ
                among the environments.
            Exception: The policy or an environment failed. The next call begins new episodes.
        """
        try:
            if isinstance(self._policy, FollowingPolicy):
                self._policy.begin_trajectory()
            for half in self._halves:
                half.begin()
                half.ask(self._policy)
            for step in range(steps):
                for half in self._halves:
                    half.step(step)
                    if step + 1 < steps:
                        half.ask(self._policy)
        except BaseException:
            for half in self._halves:
                half.has_failed = True
            raise
        made = _trajectory(self._name, self._made, self._halves)
        self._made += 1
        return made

    @expose
    def collect(self, steps: int, may_stay: bool = True) -> Collected:
        """Does the same; a large trajectory stays here, and a reference to it is returned."""
        made = self.observe(steps)
        size_bytes = made.size_bytes
        held: Any = made
        if may_stay and size_bytes > self._by_reference_bytes:
            held = RRef(made)
        return Collected(int(made.versions.min()), size_bytes, held)

    @expose
    def follow(self, policy: Policy) -> None:
        """From the next step on asks another policy; the environments stay."""
        former, self._policy = self._policy, policy
        if isinstance(former, FollowingPolicy):
            former.close()

    @expose
    def close(self) -> None:
        """Closes the environments; ends what a copy of a policy follows."""
        for half in self._halves:
            half.group.close()
        if isinstance(self._policy, FollowingPolicy):
            self._policy.close()


def _check_made(make: Any) -> None:
    if isinstance(make, str) and ":" in make and serves_another_strictly():
        name, what = get_worker_info().name, f"make {make!r}"
        raise NotAllowed(
            f"worker {name!r} is strict and does not {what}: gymnasium would import the module; "
            "register a function instead",
            worker=name,
            refused=what,
        )


class _Half:
    """Environments that step together, and their steps since the trajectory began."""

    def __init__(self, group: Group, observer: str) -> None:
        self.group = group
        self.size = len(group.numbers)
        self.has_failed = True  # Episodes begin with the first trajectory.
        self.observations: Array
        self._observer = observer
        self._who = np.zeros((self.size, 3), np.int64)
        self._who[:, NUMBER] = group.numbers
        self._pending: Any = None
        self._rewards = np.zeros(self.size)
        self._lengths = np.zeros(self.size, np.int64)
        self._action_shape = (self.size, *(group.spaces[1].shape or ()))

    def begin(self) -> None:
        """Begins a trajectory; the episodes go on, unless the last one failed."""
        if self.has_failed:
            with self._named():
                self.observations = self.group.reset()
            self._who[:, STARTS] = 1
            self._rewards[:] = 0
            self._lengths[:] = 0
            self.has_failed = False
        self._taken: list[tuple[Array, Array, Decision, Stepped]] = []
        self.finals: list[tuple[int, int, Array]] = []
        self.episodes: list[tuple[int, Episode]] = []

    def ask(self, policy: Policy) -> None:
        """Asks for actions from the present observations."""
        observations = torch.from_numpy(self.observations)
        who = torch.from_numpy(self._who.copy())
        begin = getattr(policy, "begin", None)
        with self._named():
            self._pending = (begin or policy.act)(observations, who)

    def step(self, step: int) -> None:
        """Waits for the actions, and takes a step in each environment."""
        pending, self._pending = self._pending, None
        with self._named():
            decision = pending if isinstance(pending, Decision) else pending.wait()
            decision = decision.on_host()
        self._check(decision)
        with self._named():
            found = self.group.step(decision.actions.numpy())
        self._taken.append((self.observations, self._who[:, STARTS] > 0, decision, found))
        self.finals += [(step, column, each) for column, each in found.finals.items()]
        self.observations = found.observations
        self._who[:, DECISIONS] += 1
        self._count(step, found)

    def columns(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the steps by field of a trajectory, and the outputs of the policy; time first."""
        observations, starts, decisions, found = zip(*self._taken, strict=True)
        kind = observations[0].dtype
        arrays = {
            "observations": [each.astype(kind, copy=False) for each in observations],
            "rewards": [each.rewards for each in found],
            "terminated": [each.terminated for each in found],
            "truncated": [each.truncated for each in found],
            "valid": [~each.is_reset for each in found],
            "starts": starts,
            "versions": [np.full(self.size, each.version, np.int64) for each in decisions],
        }
        fields = {name: torch.from_numpy(np.stack(steps)) for name, steps in arrays.items()}
        fields["actions"] = torch.stack([each.actions for each in decisions])
        outputs = {
            name: torch.stack([each.outputs[name] for each in decisions])
            for name in decisions[0].outputs
        }
        return fields, outputs

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Names the observer in an error of the policy or of environments, which do not know it."""
        try:
            yield
        except (WrongActions, WrongObservations) as error:
            if error.observer:
                raise
            named = copy.copy(error)  # Callers of one batch may have the same error.
            named.observer = self._observer
            named.args = (f"observer {self._observer!r}: {error}",)
            raise named.with_traceback(error.__traceback__) from error.__cause__

    def _check(self, decision: Decision) -> None:
        shape = tuple(decision.actions.shape)
        if shape != self._action_shape:
            raise WrongActions(
                f"observer {self._observer!r} asked for actions of {self.size} environments, of "
                f"shape {list(self._action_shape)}; the policy returned {list(shape)}",
                observer=self._observer,
                expected=self._action_shape,
                found=shape,
            )

    def _count(self, step: int, found: Stepped) -> None:
        """Adds a step to the episodes, and notes those that have ended."""
        self._rewards += found.rewards
        self._lengths += ~found.is_reset
        ended = found.terminated | found.truncated
        # After the end of an episode, a native environment is still to be reset.
        is_next = ended if found.finals or not ended.any() else np.zeros_like(ended)
        self._who[:, STARTS] = is_next | found.is_reset
        if ended.any():
            for column in np.flatnonzero(ended).tolist():
                number = int(self.group.numbers[column])
                reward, steps = float(self._rewards[column]), int(self._lengths[column])
                self.episodes.append((step, Episode(number, reward, steps)))
            self._rewards[ended] = 0.0
            self._lengths[ended] = 0


def _trajectory(observer: str, number: int, halves: list[_Half]) -> Trajectory:
    fields, outputs = zip(*(half.columns() for half in halves), strict=True)
    size = halves[0].size
    # In the order of steps and environments, as if there were no halves.
    finals = sorted(
        (
            (step, column + place * size, observation)
            for place, half in enumerate(halves)
            for step, column, observation in half.finals
        ),
        key=lambda final: final[:2],
    )
    episodes = sorted(pair for half in halves for pair in half.episodes)
    last = torch.cat([torch.from_numpy(half.observations) for half in halves])
    places = torch.tensor([each[:2] for each in finals], dtype=torch.int64, device="cpu")
    final = last.new_empty((0, *last.shape[1:]))
    if finals:
        final = torch.from_numpy(np.stack([each[2] for each in finals]))
    return Trajectory(
        observer=observer,
        number=number,
        environments=torch.from_numpy(np.concatenate([half.group.numbers for half in halves])),
        outputs=_side_by_side(outputs),
        last_observations=last,
        final_places=places.reshape(-1, 2),
        final_observations=final,
        episodes=[episode for _, episode in episodes],
        **_side_by_side(fields),
    )


def _side_by_side(parts: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([each[name] for each in parts], dim=1) for name in parts[0]}


# Versions of programs: whether two processes have loaded the same code

_PLAIN = (int, float, str, bytes, bool, type(None))


def program_of(make: str | Callable[..., Any], asked: Any = None) -> str:
    """Returns the version of the code that makes environments, as this process has loaded it.

    That of a function is a digest of its module. It changes with the code of functions and methods
    of the module, and with its plain constants; it does not with comments. Of a partial function, a
    method, an object, or a function that wraps another, all these modules count. A function of the
    main program travels by value, so it has the same version everywhere. A name has the version of
    gymnasium.

    Args:
        make: The function, or the name of environments.
        asked: What observers ask. The function that makes a ``FollowingPolicy`` counts as well.

    Returns:
        The version; empty for a name if this process has no gymnasium.
    """
    found = _version_of_name(make) if isinstance(make, str) else _digest(make)
    if found and isinstance(asked, FollowingPolicy):
        found += f", policy {_digest(asked.make)}"
    return found


def _version_of_name(name: str) -> str:
    try:
        return f"{name} of gymnasium {metadata.version('gymnasium')}"
    except metadata.PackageNotFoundError:
        return ""


def _digest(function: Callable[..., Any]) -> str:
    names = sorted({name for name in _modules(function, set()) if name in sys.modules})
    names = [name for name in names if name not in ("__main__", "builtins")]
    if not names:
        return "by value"
    digest = hashlib.sha256()
    for name in names:
        for part in _parts(vars(sys.modules[name]), name, set()):
            digest.update(part.encode())
    return digest.hexdigest()[:12]


def _modules(made: Any, seen: set[int]) -> Iterator[str]:
    """Yields the modules of a callable, and of the callables in it."""
    if id(made) in seen or not callable(made):
        return
    seen.add(id(made))
    within = [getattr(made, "__wrapped__", None)]
    if isinstance(made, functools.partial):
        within += [made.func, *made.args, *made.keywords.values()]
    elif inspect.ismethod(made):
        owner = made.__self__
        within += [made.__func__, owner if inspect.isclass(owner) else type(owner)]
    elif inspect.isclass(made) or inspect.isfunction(made):
        if "<" not in made.__qualname__:  # Others travel by value.
            yield made.__module__
        if inspect.isfunction(made):
            if hasattr(made, "__wrapped__"):  # It has the name and the module of the wrapped one.
                yield made.__globals__.get("__name__", "")
            within += _closure(made)
    else:
        within.append(type(made))
    for each in within:
        yield from _modules(each, seen)


def _closure(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # It is empty so far.
            yield cell.cell_contents


def _parts(namespace: Any, module: str, seen: set[type]) -> Iterator[str]:
    for name in sorted(namespace):
        value = namespace[name]
        value = getattr(value, "__func__", value)
        if inspect.isfunction(value) and value.__module__ == module:
            yield name
            yield from _code(value.__code__)
        elif inspect.isclass(value) and value.__module__ == module:
            yield name
            if value not in seen:
                seen.add(value)
                yield from _parts(vars(value), module, seen)
        elif _is_plain(value) and not name.startswith("__"):
            yield f"{name}={value!r}"


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _code(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)
