"""Policies: what chooses actions, with states and random numbers by environment.

The result of a matrix product depends on the size of the batch: another size runs another kernel,
which adds in another order. It also depends on the place of a row, as what is left over by vector
instructions at the end is computed in another way. For one size and one place, it does not depend
on the other rows (measured with float32 layers on CPUs; a test checks it). So a policy may run
every forward pass with a fixed number of rows, filled up with zeros, in which each environment has
its own place. Then its decisions are the same bits however calls were gathered.

For the same reason each environment has random numbers of its own, from a generator without state.
They depend on its number and on how many decisions it has had, and on nothing else. So they are the
same in any batch, in any process, and after a restart.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchweft.arguments import kind_of, wrong_type
from torchweft.errors import ArgumentTypeError, ConfigurationError
from torchweft.extending import rebuilds_plain
from torchweft.rl.errors import WrongActions, WrongObservations

# Random numbers by environment

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def uniform(environments: Tensor, decisions: Tensor, count: int = 1) -> Tensor:
    """Returns numbers in [0, 1), the same for the same environment and decision. Thread-safe.

    The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), started from the number of the environment, at the position of the decision.

    Args:
        environments: Numbers of environments, int64 ``(batch,)``.
        decisions: How many decisions each has had before, int64 ``(batch,)``.
        count: How many numbers a decision takes; always the same in a program.

    Returns:
        float64 ``(batch, count)``.
    """
    start = _mixed(_words(environments) * _GAMMA + _GAMMA)
    positions = _words(decisions)[:, None] * np.uint64(count) + np.arange(1, count + 1, dtype="u8")
    words = _mixed(start[:, None] + positions * _GAMMA)
    return torch.from_numpy((words >> np.uint64(11)) * _UNIT)


def _words(numbers: Tensor) -> NDArray[np.uint64]:
    words: NDArray[Any] = numbers.cpu().numpy()
    return words.astype(np.uint64)


def categorical(logits: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """Samples actions by the inverse of the cumulative probabilities.

    Args:
        logits: ``(batch, actions)``, on any device.
        draws: Numbers in [0, 1), ``(batch, 1)``, on any device.

    Returns:
        Actions, int64 ``(batch,)``, and their log-probabilities ``(batch,)``.

    Raises:
        ConfigurationError: ``draws`` or ``logits`` has another shape.
    """
    _check("categorical", "logits", logits, draws, 1)
    logs = logits.log_softmax(dim=1)
    below = logs.double().exp().cumsum(dim=1)
    # Rounding may leave the last sum below a draw: that is of the last action which may be chosen.
    is_before = (below[:, :-1] <= draws.to(logits.device)) & (below[:, :-1] < below[:, -1:])
    actions = is_before.sum(dim=1)
    return actions, logs.gather(1, actions[:, None]).squeeze(1)


def epsilon_greedy(scores: Tensor, draws: Tensor, epsilon: float) -> Tensor:
    """Returns the best actions, or with a probability random ones.

    Args:
        scores: ``(batch, actions)``, on any device.
        draws: Numbers in [0, 1), ``(batch, 2)``, on any device.
        epsilon: The probability of a random action.

    Returns:
        Actions, int64 ``(batch,)``.

    Raises:
        ConfigurationError: ``draws`` or ``scores`` has another shape.
    """
    _check("epsilon_greedy", "scores", scores, draws, 2)
    draws = draws.to(scores.device)
    guesses = (draws[:, 1] * scores.shape[1]).long()
    return torch.where(draws[:, 0] < epsilon, guesses, scores.argmax(dim=1))


def _check(function: str, name: str, given: Tensor, draws: Tensor, count: int) -> None:
    if given.ndim != 2 or draws.shape != (len(given), count):
        raise ConfigurationError(
            f"{function} was given {name} of shape {list(given.shape)} and draws of shape "
            f"{list(draws.shape)}; they must be (batch, actions) and (batch, {count}). Make the "
            f"policy with draws={count}, or pass {count} of its columns"
        )


# Policies

NUMBER, DECISIONS, STARTS = range(3)
"""Columns of the environments that ask: number, decisions before this, whether an episode starts.
"""


Given = tuple[Tensor, Tensor, Tensor]
"""What ``decide`` is given: observations, random numbers and states, a row for each environment."""
Made = tuple[Tensor, dict[str, Tensor], Tensor]
"""What ``decide`` returns: actions, further outputs and states, a row for each environment."""


@rebuilds_plain
class Decision(NamedTuple):
    """The answer to environments that ask for actions.

    Attributes:
        actions: ``(n, ...)``, a row for each environment.
        version: Version of the policy that chose them.
        outputs: Further rows to keep with the trajectory, such as log-probabilities.
    """

    actions: Tensor
    version: int
    outputs: dict[str, Tensor]

    def on_host(self) -> Decision:
        """Returns the decision on the CPU, where environments are."""
        outputs = {name: each.cpu() for name, each in self.outputs.items()}
        return Decision(self.actions.cpu(), self.version, outputs)


class Policy(Protocol):
    """What an observer asks: an agent on another worker, or a copy of a policy beside it."""

    def act(self, observations: Tensor, environments: Tensor) -> Decision:
        """Chooses actions.

        Args:
            observations: ``(n, ...)``, a row for each environment.
            environments: int64 ``(n, 3)``: number, decisions before this, whether an episode
                starts. States of recurrent policies are kept by number.
        """


class LocalPolicy:
    """A network that chooses actions in this process; subclasses say how, in ``decide``.

    Thread-safe. States of recurrent policies stay here, by environment; an environment that begins
    an episode begins with zeros.

    Args:
        network: The network. It is not copied.
        observation_shape: Shape of an observation.
        draws: How many random numbers a decision takes.
        rows: If positive, every forward pass has this many rows, filled up with zeros: decisions
            do not depend on which environments ask together. An environment has the row of its
            number, modulo ``rows``; those of one row need a pass each.
        state_size: Values of the recurrent state of an environment; 0 for none.

    Attributes:
        network: The network.
        version: How many updates the network has had.
        forwards: How many forward passes there were.
        decisions: How many actions were chosen.
    """

    def __init__(
        self,
        network: nn.Module,
        observation_shape: tuple[int, ...],
        *,
        draws: int = 1,
        rows: int = 0,
        state_size: int = 0,
    ) -> None:
        if draws < 0 or rows < 0 or state_size < 0:
            raise ConfigurationError(
                f"draws={draws}, rows={rows}, state_size={state_size}: pass 0 or more"
            )
        self.network = network
        self.version = 0
        self.forwards = 0
        self.decisions = 0
        if not isinstance(observation_shape, (tuple, list)):
            raise wrong_type("observation_shape", observation_shape, "pass a tuple, such as (4,)")
        self._shape = tuple(observation_shape)
        self._draws = draws
        self._rows = rows
        self._state_size = state_size
        self._states: dict[int, Tensor] = {}
        self._lock = threading.RLock()

    def decide(self, observations: Tensor, draws: Tensor, states: Tensor) -> Made:
        """Chooses actions; runs without gradients. To be overridden.

        The arguments are on the CPU. The results may be on any device.

        Args:
            observations: ``(rows, ...)``.
            draws: Random numbers in [0, 1), float64 ``(rows, draws)``.
            states: ``(rows, state_size)``.

        Returns:
            Actions ``(rows, ...)``, further outputs by name, each ``(rows, ...)``, and new states
            ``(rows, state_size)``.
        """
        raise NotImplementedError(f"{type(self).__qualname__} must define decide")

    def act(self, observations: Tensor, environments: Tensor) -> Decision:
        """Chooses actions; see ``Policy``.

        Raises:
            WrongObservations: Observations have another shape than the policy takes, or there is
                not one for each environment.
            WrongActions: ``decide`` did not return a row for each observation.
        """
        self._check(observations, environments)
        numbers = environments[:, NUMBER]
        draws = uniform(numbers, environments[:, DECISIONS], self._draws)
        with self._lock, torch.no_grad():
            given = observations, draws, self._states_of(environments)
            made = (
                self._in_rows(given, numbers % self._rows) if self._rows else self._forward(given)
            )
            self.decisions += len(observations)
            actions, outputs, states = made
            if self._state_size:
                self._states.update(zip(numbers.tolist(), states.cpu().unbind(), strict=True))
            return Decision(actions, self.version, outputs).on_host()

    def _check(self, observations: Tensor, environments: Tensor) -> None:
        expected = (len(environments), *self._shape)
        if tuple(observations.shape) != expected:
            numbers = tuple(environments[:4, NUMBER].tolist())
            raise WrongObservations(
                f"environments {', '.join(map(str, numbers))} ... sent observations of shape "
                f"{list(observations.shape)}; the policy takes {list(expected)}",
                expected=expected,
                found=tuple(observations.shape),
                environments=numbers,
            )

    def _states_of(self, environments: Tensor) -> Tensor:
        if not self._state_size:
            return environments.new_zeros((len(environments), 0), dtype=torch.float32)
        zeros = torch.zeros(self._state_size, device="cpu")
        return torch.stack(
            [
                zeros if starts else self._states.get(number, zeros)
                for number, _, starts in environments.tolist()
            ]
        )

    def _in_rows(self, given: Given, rows: Tensor) -> Made:
        """Runs the network for each in its row; those of one row come one after the other."""
        listed = rows.tolist()
        if listed == list(range(self._rows)):
            return self._forward(given)
        if len(set(listed)) == len(listed):
            return self._in_own_rows(given, rows)
        turns = _turns(listed)
        made = [
            self._in_own_rows((given[0][turn], given[1][turn], given[2][turn]), rows[turn])
            for turn in turns
        ]
        return _chosen(_joined(made), torch.argsort(torch.cat(turns)))

    def _in_own_rows(self, given: Given, rows: Tensor) -> Made:
        if len(rows) == self._rows:
            sources = torch.argsort(rows)
        else:
            given = _with_zeros(given[0]), _with_zeros(given[1]), _with_zeros(given[2])
            sources = torch.full((self._rows,), len(rows), device="cpu")
            sources[rows] = torch.arange(len(rows), device="cpu")
        observations, draws, states = (each.index_select(0, sources) for each in given)
        return _chosen(self._forward((observations, draws, states)), rows)

    def _forward(self, given: Given) -> Made:
        self.forwards += 1
        made = self.decide(*given)
        if (
            not isinstance(made, (tuple, list))
            or len(made) != 3
            or not isinstance(made[1], Mapping)
        ):
            raise ArgumentTypeError(
                f"{type(self).__qualname__}.decide must return a tuple: actions, a dict of further "
                f"outputs, and states; it returned {_told(made)}"
            )
        actions, outputs, states = made
        _check_rows(len(given[0]), actions, outputs, states)
        return actions, outputs, states

    @contextlib.contextmanager
    def updating(self) -> Iterator[nn.Module]:
        """Holds decisions back while weights change; the version is one higher afterwards.

        Example::

            with policy.updating():
                optimizer.step()
        """
        with self._lock:
            yield self.network
            self.version += 1

    def load(self, weights: Mapping[str, Any], version: int) -> None:
        """Takes weights of a version, between two decisions. They are copied."""
        with self._lock:
            self.network.load_state_dict(weights)
            self.version = version

    def forget(self, environments: Tensor) -> None:
        """Drops the states of environments, by number, int64 ``(n,)``."""
        with self._lock:
            for number in environments.tolist():
                self._states.pop(number, None)

    def state_dict(self) -> dict[str, Any]:
        """Returns weights, version, counts and recurrent states, for a snapshot."""
        with self._lock:
            return {
                "network": dict(self.network.state_dict()),
                "version": self.version,
                "forwards": self.forwards,
                "decisions": self.decisions,
                "states": {str(number): state for number, state in self._states.items()},
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state of a snapshot."""
        with self._lock:
            self.load(state["network"], state["version"])
            self.forwards, self.decisions = state["forwards"], state["decisions"]
            self._states = {int(number): each for number, each in state["states"].items()}


def _told(made: Any) -> str:
    if not isinstance(made, (tuple, list)):
        return kind_of(made)
    return f"{kind_of(made)} of {', '.join(map(kind_of, made)) or 'nothing'}"


def _check_rows(rows: int, actions: Tensor, outputs: dict[str, Tensor], states: Tensor) -> None:
    for name, each in {"actions": actions, **outputs, "states": states}.items():
        if not isinstance(each, Tensor):
            raise wrong_type(f"{name} of decide", each, f"return a tensor with {rows} rows")
        if not each.ndim or len(each) != rows:
            raise WrongActions(
                f"decide was given {rows} rows of observations and returned {name} of shape "
                f"{list(each.shape)}; the first dimension must be {rows}",
                expected=(rows, *each.shape[1:]),
                found=tuple(each.shape),
            )


def _turns(rows: list[int]) -> list[Tensor]:
    """Returns who takes part in each forward pass, by place, so that rows differ within a pass."""
    turns: list[list[int]] = []
    seen: dict[int, int] = {}
    for place, row in enumerate(rows):
        turn = seen[row] = seen.get(row, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(place)
    return [torch.tensor(each, device="cpu") for each in turns]


def _with_zeros(tensor: Tensor) -> Tensor:
    """Returns a tensor with one more row of zeros."""
    return torch.cat([tensor, tensor.new_zeros((1, *tensor.shape[1:]))])


def _joined(made: list[Made]) -> Made:
    outputs = {name: torch.cat([each[1][name] for each in made]) for name in made[0][1]}
    return torch.cat([each[0] for each in made]), outputs, torch.cat([each[2] for each in made])


def _chosen(made: Made, rows: Tensor) -> Made:
    actions, outputs, states = made
    return actions[rows], {name: each[rows] for name, each in outputs.items()}, states[rows]
