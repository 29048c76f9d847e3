"""Several environments that step together, with seeds and ends of episodes by environment.

Rules of the file:

- Environment ``e`` is reset with the seed ``seed + e`` once, at the beginning, and then continues
  its own generator. A native vector environment has one generator, seeded by its first number.
- An episode ends by *termination* (the task is over: nothing follows) or by *truncation* (a limit
  of time: its last observation has a value). The last observation is kept in both cases.
- Single environments are reset within the step that ends an episode: the next observation is that
  of the new episode. A native vector environment with the rule ``NEXT_STEP`` of gymnasium resets in
  the step after, and ignores the action: this step is marked as not valid, and is not counted.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchweft.arguments import checked_int, kind_of, wrong_type
from torchweft.errors import ConfigurationError
from torchweft.extending import log_exception, rebuilds_plain
from torchweft.rl.errors import UnservedSpace, WrongObservations

Array = NDArray[Any]


@rebuilds_plain
@dataclass(frozen=True)
class Environments:
    """What environments each observer runs. Can be pickled if ``make`` can.

    Attributes:
        make: Makes an environment: a name that gymnasium knows, or a function without arguments; of
            a native vector environment, with their number.
        count: How many environments each observer runs.
        seed: Seed of the first environment of the first observer; the others follow.
        halves: With 2, one half of the environments steps while the policy is asked about the
            other; ``count`` must be even.
        vectorized: Whether ``make`` makes native vector environments, such as those of
            ``gymnasium.make_vec(name, vectorization_mode="vector_entry_point")``.
    """

    make: str | Callable[..., Any]
    count: int = 1
    seed: int = 0
    halves: int = 1
    vectorized: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.make, str) or callable(self.make)):
            raise wrong_type("make", self.make, "pass the name of environments, or a function")
        for name in ("count", "seed", "halves"):
            checked_int(name, getattr(self, name))
        if self.halves not in (1, 2) or self.count < 1 or self.count % self.halves:
            raise ConfigurationError(
                f"count={self.count}, halves={self.halves}: pass at least one environment, and "
                "halves=1 or, with an even number of environments, halves=2"
            )

    def numbers(self, place: int) -> Array:
        """Returns the numbers of the environments of an observer, int64 ``(count,)``."""
        first = self.seed + place * self.count
        return np.arange(first, first + self.count)

    def group(self, place: int, half: int) -> Group:
        """Makes one half of the environments of an observer."""
        size = self.count // self.halves
        first = int(self.numbers(place)[half * size])
        if self.vectorized:
            return _Native(self._made(size), first, size)
        return _List([self._made() for _ in range(size)], first)

    def _made(self, size: int = 0) -> Any:
        if callable(self.make):
            return self.make(size) if size else self.make()
        try:
            import gymnasium
        except ImportError as error:
            raise ConfigurationError(
                "environments by name need gymnasium: pip install 'torchweft[rl]'"
            ) from error
        if not size:
            return gymnasium.make(self.make)
        return gymnasium.make_vec(self.make, size, vectorization_mode="vector_entry_point")


def check_spaces(spaces: tuple[Any, Any], observer: str) -> None:
    """Raises UnservedSpace unless observations and actions are arrays of numbers of one shape."""
    for kind, space in zip(("observation", "action"), spaces, strict=True):
        dtype = getattr(space, "dtype", np.float32)
        if getattr(space, "shape", None) is None or np.dtype(dtype).kind not in "biuf":
            text = described(space)
            raise UnservedSpace(
                f"observer {observer!r}: the {kind} space of its environments is {text}. Served "
                "are spaces of one shape and a numeric dtype: Box, Discrete, MultiDiscrete and "
                "MultiBinary; gymnasium.wrappers.FlattenObservation makes a Box of other "
                "observations",
                observer=observer,
                kind=kind,
                space=text,
            )


def described(space: Any) -> str:
    """Returns a text that tells spaces apart, without the space itself, which is no plain value."""
    text = repr(space)
    if text == object.__repr__(space):  # It has an address.
        text = f"{type(space).__qualname__}({getattr(space, 'shape', '')})"
    bounds = [getattr(space, name) for name in ("low", "high") if hasattr(space, name)]
    if bounds:  # Their text is rounded, and long ones are cut.
        text += f" bounds {zlib.crc32(b''.join(np.asarray(each).tobytes() for each in bounds)):08x}"
    return text


class Stepped(NamedTuple):
    """What a step gave; all arrays have a row for each environment.

    Attributes:
        observations: From which the next actions are chosen.
        rewards: float32.
        terminated: Whether the task is over.
        truncated: Whether a limit was reached.
        is_reset: Whether this step was the reset of a native environment: no step at all.
        finals: By environment, the last observation of an episode that has ended in this step; not
            of native environments, whose next observation it is.
    """

    observations: Array
    rewards: Array
    terminated: Array
    truncated: Array
    is_reset: Array
    finals: dict[int, Array]


_RESET = "reset", 2, "observation and info"
_STEP = "step", 5, "observation, reward, terminated, truncated and info"
"""Methods of environments, with the number and the names of what they return."""


def _parts(found: Any, of: tuple[str, int, str], number: int) -> Any:
    """Returns the result of a method of an environment, if it has gymnasium's parts."""
    method, count, parts = of
    if not isinstance(found, (tuple, list)) or len(found) != count:
        is_several = isinstance(found, (tuple, list))
        text = f"{len(found)} values" if is_several else kind_of(found)
        raise ConfigurationError(
            f"{method} of environment {number} returned {text}; it must return {parts}, as in "
            "gymnasium"
        )
    return found


def _number(reward: Any, number: int) -> float:
    """Returns a reward as a number: NumPy would take None for NaN."""
    try:
        return float(np.asarray(reward).item())
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"step of environment {number} returned as reward {kind_of(reward)}; it must be a "
            "number"
        ) from error


class _List:
    """Environments for single use, one after the other.

    Attributes:
        numbers: Number of each, int64.
        spaces: Observation space and action space of one environment.
    """

    def __init__(self, environments: list[Any], first: int) -> None:
        self._environments = environments
        self.numbers = np.arange(first, first + len(environments))
        one = environments[0]
        self.spaces = one.observation_space, one.action_space
        self._dtype = getattr(one.observation_space, "dtype", None)

    def reset(self) -> Array:
        """Begins all episodes, by the seeds; returns the observations."""
        return self._stacked(
            [
                _parts(environment.reset(seed=int(number)), _RESET, int(number))[0]
                for environment, number in zip(self._environments, self.numbers, strict=True)
            ]
        )

    def _stacked(self, observations: list[Any]) -> Array:
        try:
            return np.stack(observations).astype(self._dtype, copy=False)
        except ValueError as error:
            raise self._explained(observations) or error from None

    def _explained(self, observations: list[Any]) -> WrongObservations | None:
        """Returns an error that names the first environment that differs from its space."""
        expected = tuple(self.spaces[0].shape or ())
        for number, each in zip(self.numbers.tolist(), observations, strict=True):
            found = np.shape(each)
            if found != expected:
                return WrongObservations(
                    f"environment {number} returned an observation of shape {list(found)}; its "
                    f"space has {list(expected)}",
                    expected=expected,
                    found=found,
                    environments=(number,),
                )
        return None

    def step(self, actions: Array) -> Stepped:
        """Takes a step in each."""
        observations, finals = [], {}
        size = len(self._environments)
        rewards = np.empty(size, np.float32)
        terminated, truncated = np.empty(size, np.bool_), np.empty(size, np.bool_)
        for place, environment in enumerate(self._environments):
            action = actions[place]
            found = environment.step(action if action.ndim else action.item())
            found = _parts(found, _STEP, self.numbers[place])
            observation, reward, terminated[place], truncated[place], _ = found
            rewards[place] = _number(reward, self.numbers[place])
            if terminated[place] or truncated[place]:
                # A copy, as some environments return the same array again and again.
                finals[place] = np.array(observation, self._dtype)
                observation, _ = _parts(environment.reset(), _RESET, self.numbers[place])
            observations.append(observation)
        is_reset = np.zeros(size, np.bool_)
        return Stepped(
            self._stacked(observations), rewards, terminated, truncated, is_reset, finals
        )

    def close(self) -> None:
        """Closes them; logs the errors of those that cannot be closed."""
        for environment in self._environments:
            _close(environment)


class _Native:
    """A native vector environment; as ``_List``."""

    def __init__(self, environment: Any, first: int, size: int) -> None:
        found = getattr(environment, "num_envs", None)
        if found != size:
            raise ConfigurationError(
                f"{environment} has {'no number' if found is None else found} of environments "
                f"(num_envs); the function was asked for a native vector of {size}"
            )
        mode = str(getattr(environment, "metadata", {}).get("autoreset_mode", ""))
        if not mode.lower().replace("_", "").endswith("nextstep"):
            raise ConfigurationError(
                f"{environment} has the autoreset mode {mode or 'unknown'!r}; a native vector "
                "environment must have gymnasium's NEXT_STEP"
            )
        self._environment = environment
        self.numbers = np.arange(first, first + size)
        self.spaces = environment.single_observation_space, environment.single_action_space
        self._has_ended = np.zeros(size, np.bool_)

    def reset(self) -> Array:
        self._has_ended[:] = False
        return np.array(self._environment.reset(seed=int(self.numbers[0]))[0])  # As in ``step``.

    def step(self, actions: Array) -> Stepped:
        observations, rewards, terminated, truncated, _ = self._environment.step(actions)
        # Copies: some environments return the same arrays again and again.
        ends = np.array(terminated, np.bool_), np.array(truncated, np.bool_)
        is_reset, self._has_ended = self._has_ended, ends[0] | ends[1]
        return Stepped(np.array(observations), np.array(rewards, np.float32), *ends, is_reset, {})

    def close(self) -> None:
        _close(self._environment)


Group = _List | _Native
"""Environments that step together."""


def _close(environment: Any) -> None:
    """Closes an environment; one that fails does not keep the others open."""
    try:
        environment.close()
    except Exception:
        log_exception("%s failed when it was closed", environment)
