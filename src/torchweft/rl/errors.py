"""Errors of reinforcement learning: parts that do not fit together, or that are lost.

::

    ConfigurationError
    ├── SpacesMismatch                  an observer's environments have other spaces
    ├── UnservedSpace                   a space has no one shape and dtype, such as a dict
    ├── ProgramMismatch                 an observer runs another version of the program
    ├── WrongActions                    an agent returned actions that do not fit
    ├── WrongObservations               observations do not fit the policy, or one another
    ├── NoObservers (RuntimeError)      all observers are left out; names them and the causes
    ├── TooStale (RuntimeError)         all trajectories of a round were refused as too old
    └── ReplayError                     a replay buffer cannot do as asked
        ├── ColumnsMismatch             rows have other columns than those that are stored
        ├── NotEnough (LookupError)     fewer rows are stored than must be sampled
        └── BadPriority                 a priority is negative or not finite
    WorkerLost
    └── AgentLost                       the agent's worker was lost; its observers follow another
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torchweft.errors import ConfigurationError, WorkerLost


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class SpacesMismatch(ConfigurationError):
    """The environments of an observer have other spaces than those of the first; it is left out.

    Attributes:
        observer: Name of the observer.
        expected: The spaces of the first observer, as text.
        found: Those of this one.
    """

    observer: str = ""
    expected: str = ""
    found: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class UnservedSpace(ConfigurationError):
    """A space of an environment has no one shape and numeric dtype; the observer is left out.

    Attributes:
        observer: Name of the observer.
        kind: Which space: ``"observation"`` or ``"action"``.
        space: The space, as text.
    """

    observer: str = ""
    kind: str = ""
    space: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class ProgramMismatch(ConfigurationError):
    """An observer runs another version of the program; it is left out.

    Attributes:
        observer: Name of the observer.
        expected: The version of the learner.
        found: That of the observer.
    """

    observer: str = ""
    expected: str = ""
    found: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class WrongActions(ConfigurationError):
    """An agent returned actions of a wrong shape; the environments did not step.

    Attributes:
        observer: Name of the observer that asked.
        expected: Shape of the actions of its environments.
        found: The shape that was returned.
    """

    observer: str = ""
    expected: tuple[int, ...] = ()
    found: tuple[int, ...] = ()


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class WrongObservations(ConfigurationError):
    """Observations have a shape that a policy does not take, or differ; others are unaffected.

    Attributes:
        observer: Name of the observer that asked.
        expected: Shape of an observation.
        found: The shape that came.
        environments: Numbers of the first few environments that asked.
    """

    observer: str = ""
    expected: tuple[int, ...] = ()
    found: tuple[int, ...] = ()
    environments: tuple[int, ...] = ()


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class NoObservers(ConfigurationError, RuntimeError):
    """No observer takes part any more.

    Attributes:
        causes: By observer, why it was left out.
    """

    causes: dict[str, str] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class TooStale(ConfigurationError, RuntimeError):
    """All trajectories were too old, until the time was up: the policy changes too fast.

    Attributes:
        most_stale: How many updates were allowed since the oldest action of a trajectory.
        refused: How many trajectories were refused in this round.
    """

    most_stale: int = 0
    refused: int = 0


class AgentLost(WorkerLost):
    """The worker of the agent, or of the publisher that policies follow, was lost.

    The observers keep their environments: make the agent anew and have them ``follow`` it.
    """


class ReplayError(ConfigurationError):
    """A replay buffer cannot do as asked; its rows stay as they are."""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class ColumnsMismatch(ReplayError):
    """Rows have other columns, dtypes or shapes than those that are stored.

    Attributes:
        column: The first column that differs.
        expected: Its dtype and shape of a row, as text; empty if there is no such column.
        found: Those that came.
    """

    column: str = ""
    expected: str = ""
    found: str = ""


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class NotEnough(ReplayError, LookupError):
    """Fewer rows are stored than were to be sampled.

    Attributes:
        stored: How many rows there are.
        wanted: How many must be there.
    """

    stored: int = 0
    wanted: int = 0


@dataclass(kw_only=True, eq=False, repr=False, match_args=False)
class BadPriority(ReplayError):
    """A priority is negative, not finite, or missing.

    Attributes:
        position: Its position among the priorities that came.
    """

    position: int = 0
