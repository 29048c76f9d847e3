"""An observer: runs environments, asks a policy for actions, and keeps a trajectory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchweft.engine.codec.registry import rebuilds_plain
from torchweft.rl.environments import (
    Array,
    Environments,
    Group,
    Stepped,
    check_spaces,
    described,
)
from torchweft.rl.errors import WrongActions, WrongObservations
from torchweft.rl.following import FollowingPolicy
from torchweft.rl.policies import DECISIONS, NUMBER, STARTS, Decision, Policy
from torchweft.rl.programs import program_of
from torchweft.rl.trajectories import Collected, Episode, Trajectory
from torchweft.rpc import RRef, expose
from torchweft.rpc.current_call import check_types, refuse, serves_another_strictly


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
                half.begin(steps)
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
        refuse(f"make {make!r}", "gymnasium would import the module; register a function instead")


class _Half:
    """Environments that step together, and the part of a trajectory that they fill."""

    def __init__(self, group: Group, observer: str) -> None:
        self.group = group
        self.size = len(group.numbers)
        self.has_failed = True  # Episodes begin with the first trajectory.
        self._observer = observer
        self._who = np.zeros((self.size, 3), np.int64)
        self._who[:, NUMBER] = group.numbers
        self._observations: Array
        self._pending: Any = None
        self._rewards = np.zeros(self.size)
        self._lengths = np.zeros(self.size, np.int64)
        self._action_shape = (self.size, *(group.spaces[1].shape or ()))

    def begin(self, steps: int) -> None:
        """Begins a trajectory; the episodes go on, unless the last one failed."""
        if self.has_failed:
            with self._named():
                self._observations = self.group.reset()
            self._who[:, STARTS] = 1
            self._rewards[:] = 0
            self._lengths[:] = 0
            self.has_failed = False
        shape = (steps, self.size)
        self.observations = np.empty(
            (*shape, *self._observations.shape[1:]), self._observations.dtype
        )
        self.rewards = np.empty(shape, np.float32)
        self.terminated, self.truncated, self.valid, self.starts = np.empty((4, *shape), np.bool_)
        self.versions = np.empty(shape, np.int64)
        self.decisions: list[Decision] = []
        self.finals: list[tuple[int, int, Array]] = []
        self.episodes: list[tuple[int, Episode]] = []

    def ask(self, policy: Policy) -> None:
        """Asks for actions from the present observations."""
        observations = torch.from_numpy(self._observations)
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
        self.observations[step] = self._observations
        self.starts[step] = self._who[:, STARTS]
        self.versions[step] = decision.version
        self.decisions.append(decision)
        with self._named():
            found = self.group.step(decision.actions.numpy())
        self.rewards[step] = found.rewards
        self.terminated[step] = found.terminated
        self.truncated[step] = found.truncated
        self.valid[step] = ~found.is_reset
        for column, observation in found.finals.items():
            self.finals.append((step, column, observation))
        self._observations = found.observations
        self._who[:, DECISIONS] += 1
        self._count(step, found)

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
    def joined(name: str) -> Tensor:
        parts = [torch.from_numpy(getattr(half, name)) for half in halves]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def decided(part: Any) -> Tensor:
        parts = [torch.stack([part(each) for each in half.decisions]) for half in halves]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

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
    last = torch.cat([torch.from_numpy(half._observations) for half in halves])
    ends = torch.tensor([each[:2] for each in finals], dtype=torch.int64, device="cpu").reshape(
        -1, 2
    )
    final = last.new_empty((0, *last.shape[1:]))
    if finals:
        final = torch.from_numpy(np.stack([each[2] for each in finals]))
    return Trajectory(
        observer=observer,
        number=number,
        environments=torch.from_numpy(np.concatenate([half.group.numbers for half in halves])),
        observations=joined("observations"),
        actions=decided(lambda each: each.actions),
        rewards=joined("rewards"),
        terminated=joined("terminated"),
        truncated=joined("truncated"),
        valid=joined("valid"),
        starts=joined("starts"),
        versions=joined("versions"),
        outputs={
            name: decided(lambda each, name=name: each.outputs[name])
            for name in halves[0].decisions[0].outputs
        },
        last_observations=last,
        final_places=ends,
        final_observations=final,
        episodes=[episode for _, episode in episodes],
    )
