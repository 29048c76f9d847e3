"""The observers of a learner: in this process, in threads, or on workers.

Rules of the file:

- An observer makes one trajectory at a time, and begins the next one only when the learner has
  taken the last. So at most one trajectory of each observer waits: the learner slows them down.
- An observer is *ready* (may begin), *busy*, *late* (busy beyond the time limit), or *lost* (its
  worker died, or it failed). Nobody waits for those that are late or lost. A late one takes part
  again when its trajectory comes, a lost one when ``replace`` or ``take_back`` made it anew.
- The loss of the agent is no fault of the observers that it leaves without an answer: they are
  ready again, and go on when they ``follow`` another.
- Results come from any thread into one queue; everything else happens in the learner's thread.
"""

from __future__ import annotations

import copy
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from torchweft.arguments import checked_int, wrong_type
from torchweft.closing import Closing
from torchweft.engine.threads import device_streams
from torchweft.engine.threads.device_streams import Mark
from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.rl.agent import Agent, RemotePolicy
from torchweft.rl.environments import Environments
from torchweft.rl.errors import AgentLost, NoObservers, ProgramMismatch, SpacesMismatch, TooStale
from torchweft.rl.following import FollowingPolicy
from torchweft.rl.observer import Introduction, Observer
from torchweft.rl.places import Here, InThread, OnWorker, Place
from torchweft.rl.policies import Policy
from torchweft.rl.programs import program_of
from torchweft.rl.trajectories import Collected, Trajectory
from torchweft.rpc import RRef
from torchweft.rpc.futures import ignore_errors

READY, BUSY, LATE, LOST = "ready", "busy", "late", "lost"


class _Seat:
    """One observer, as the learner sees it."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.place: Place | None = None
        self.state = LOST
        self.cause: BaseException | None = None
        self.generation = 0
        """How often the observer has been made; results of former ones do not count."""
        self.since_s = 0.0
        self.agent_number = 0
        """Which agent, of those that were followed one after the other, the trajectory is of."""


class Observers(Closing):
    """Makes observers, and collects their trajectories. For one thread at a time; closes itself.

    Args:
        where: ``"process"`` (one after the other, for debugging), ``"threads"``, or the names of
            workers, one for each observer.
        environments: What each observer runs.
        agent: What they ask for actions: an agent of this process, or a reference to one. For
            observers with policies of their own, any picklable ``Policy``.
        count: How many observers there are, in this process or in threads.
        steps: How many steps of each environment a trajectory has.
        time_limit_s: How long the learner waits for an observer, in seconds.
        most_stale: If given, a trajectory is refused if the agent's policy has had more updates
            than this since the oldest of its actions.
        full_batches: Whether the agent waits, for a short time, for the calls of all observers.
        by_reference_bytes: Larger trajectories stay at their observer until they are taken; those
            that are refused never move.

    Attributes:
        refused: How many trajectories were refused as too old.
        staleness: How many trajectories were taken at each staleness: updates of the policy since
            the oldest of their actions.

    Raises:
        ConfigurationError: ``where`` or a number makes no sense.
        NoObservers: No observer could be made.
    """

    def __init__(
        self,
        where: str | Sequence[str],
        environments: Environments,
        agent: Agent | RRef[Agent] | Policy,
        *,
        count: int = 1,
        steps: int = 32,
        time_limit_s: float = 30.0,
        most_stale: int | None = None,
        full_batches: bool = True,
        by_reference_bytes: int = 1 << 20,
    ) -> None:
        _check_place(where)
        if not isinstance(environments, Environments):
            raise wrong_type("environments", environments, "pass rl.Environments(...)")
        _check_numbers(count, steps, time_limit_s, most_stale)
        _check_agent(agent)
        self.refused = 0
        self.staleness: dict[int, int] = {}
        self._where = where
        self._environments = environments
        self._agent = agent
        self._agent_number = 0
        self._agent_lost: AgentLost | None = None
        self._steps = steps
        self._time_limit_s = time_limit_s
        self._most_stale = most_stale
        self._full_batches = full_batches
        self._by_reference_bytes = by_reference_bytes
        self._expected = 0
        self._is_closed = False
        self._program = program_of(environments.make, self._agent)
        self._spaces: tuple[str, str] | None = None
        self._introduced: dict[int, Introduction] | None = None
        self._done: queue.SimpleQueue[tuple[int, int, Any, BaseException | None, Mark | None]]
        self._done = queue.SimpleQueue()
        names = [f"observer{k}" for k in range(count)] if isinstance(where, str) else where
        self._seats = [_Seat(number, name) for number, name in enumerate(names)]
        try:
            self._open(self._seats)
            self._check_any()
        except BaseException:
            self.close()
            raise

    # What the learner sees

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def names(self) -> list[str]:
        """Names of all observers; those on workers have the names of the workers."""
        return [seat.name for seat in self._seats]

    @property
    def left_out(self) -> dict[str, BaseException | None]:
        """The observers that do not take part: the error of each, or None if it is only late."""
        return {seat.name: seat.cause for seat in self._seats if seat.state in (LATE, LOST)}

    def round(self) -> list[Trajectory]:
        """Collects a trajectory of each observer; blocks until all are there, or the time is up.

        All actions are of one version of the policy, if the learner learns between the rounds.
        Those of observers that were late in an earlier round are among the trajectories. If all are
        refused as too old, the observers make new ones, until the time is up.

        Returns:
            The trajectories in the order of the observers, without those that are late or lost; at
            least one.

        Raises:
            AgentLost: The agent's worker was lost, and the round with it; see ``follow``.
            NoObservers: No trajectory has come, and all observers are late or lost.
            TooStale: All trajectories were refused as too old, until the time was up.
        """
        before = self.refused
        deadline_s = time.monotonic() + self._time_limit_s
        while not (found := self._collected()):
            self._check_any()
            if self.refused > before and time.monotonic() > deadline_s:
                raise _too_stale(self._most_stale or 0, self.refused - before)
        return [found[number] for number in sorted(found)]

    def _collected(self) -> dict[int, Trajectory]:
        self._expected = 0  # The agent awaits all again, also those that it has given up.
        self._start_ready()
        found: dict[int, Trajectory] = {}
        while any(seat.state == BUSY for seat in self._seats):
            self._take(found)
            self._check_agent()
        while not self._done.empty():
            self._take(found)
        return found

    def stream(self) -> Iterator[Trajectory]:
        """Yields trajectories as they come, without end; each observer begins its next meanwhile.

        Raises:
            AgentLost: The agent's worker was lost; raised by the iterator. After ``follow``, begin
                another stream.
            NoObservers: All observers are late or lost; raised by the iterator.
        """
        while True:
            self._start_ready()
            found: dict[int, Trajectory] = {}
            self._take(found)
            self._check_agent()
            if found:
                self._start_ready()
                yield from found.values()
            elif not any(seat.state in (READY, BUSY) for seat in self._seats):
                self._check_any()

    # Failures

    def replace(self, number: int, worker: str | None = None) -> None:
        """Makes an observer anew: its environments begin again, with their seeds.

        Args:
            number: Its place among the observers.
            worker: The new worker; by default the worker that has the name of the former now.

        Raises:
            ConfigurationError: There is no such observer.
            Exception: It could not be made; it stays left out.
        """
        self._check_open()
        if not 0 <= number < len(self._seats):
            raise ConfigurationError(f"observer {number} of {len(self._seats)} does not exist")
        seat = self._seats[number]
        if worker is not None:
            seat.name = worker
        self._close([seat])
        self._open([seat])
        if seat.cause is not None:
            raise seat.cause

    def follow(self, agent: Agent | RRef[Agent] | Policy) -> None:
        """Has all observers ask another agent, for instance after ``AgentLost``.

        Their environments stay. Trajectories that are under way are dropped; an observer whose
        trajectory has failed begins new episodes. Blocks until the observers know the agent, at
        most for the time limit; those that do not answer are left out.

        Args:
            agent: As for the constructor.
        """
        self._check_open()
        _check_agent(agent)
        self._agent, self._agent_lost = agent, None
        self._program = program_of(self._environments.make, agent)
        self._agent_number += 1
        self._expected = 0
        while any(seat.state == BUSY for seat in self._seats):
            self._take({})
        told: queue.SimpleQueue[tuple[_Seat, BaseException | None]] = queue.SimpleQueue()
        for seat in self._seats:
            if seat.place is not None and seat.state != LOST:
                seat.place.start(
                    "follow",
                    (self._policy(),),
                    lambda _, error, seat=seat: told.put((seat, error)),  # type: ignore[misc]
                )
        # Those that are late may hang: they are told, but nobody waits for them.
        untold = {seat for seat in self._seats if seat.state == READY}
        deadline_s = time.monotonic() + self._time_limit_s
        while untold:
            try:
                seat, error = told.get(timeout=max(deadline_s - time.monotonic(), 0.001))
            except queue.Empty:
                break
            untold.discard(seat)
            if error is not None:
                self._lose(seat, error)
        for seat in untold:
            self._lose(seat, _late(seat, self._time_limit_s))

    def take_back(self) -> list[str]:
        """Tries to make all lost observers anew; returns the names of those that take part again.

        For an open group, where a launcher restarts workers under their names. Blocks for at most
        the time limit.
        """
        self._check_open()
        lost = [seat for seat in self._seats if seat.state == LOST]
        self._close(lost)
        self._open(lost)
        return [seat.name for seat in lost if seat.state == READY]

    def close(self) -> None:
        """Closes all observers; does not wait for those on workers."""
        self._is_closed = True
        places = [seat.place for seat in self._seats]
        self._close(self._seats)
        for place in places:
            if isinstance(place, InThread):
                place.join(self._time_limit_s)
        self._forget(self._seats, waits=False)

    # Making observers

    def _open(self, seats: Sequence[_Seat]) -> None:
        for seat in seats:
            seat.generation += 1
            seat.cause = None
            try:
                seat.place = self._placed(seat)
            except Exception as error:
                self._lose(seat, error)
            else:
                self._start(seat, "introduce", ())
        introduced = self._introduced = {}
        try:
            while any(seat.state == BUSY for seat in seats):
                self._take({})
        finally:
            self._introduced = None
        # In their order, so that the same observer is left out in each run.
        for number in sorted(introduced):
            self._meet(self._seats[number], introduced[number])
        for seat in seats:
            if seat.state == LATE:
                self._lose(seat, _late(seat, self._time_limit_s))

    def _placed(self, seat: _Seat) -> Place:
        args = (seat.number, self._environments, self._policy(), seat.name)
        if isinstance(self._where, str):
            place = Here(lambda: Observer(*args, self._by_reference_bytes))
            if self._where == "process":
                return place
            return InThread(lambda: Observer(*args, self._by_reference_bytes), seat.name)
        return OnWorker(seat.name, *args, self._by_reference_bytes)

    def _policy(self) -> Policy:
        agent = self._agent
        if isinstance(agent, Agent):
            if isinstance(self._where, str):
                return agent
            agent = RRef(agent)
        if isinstance(agent, RRef):
            return RemotePolicy(agent, self._time_limit_s)
        return agent

    def _meet(self, seat: _Seat, found: Introduction) -> None:
        """Compares what an observer runs with the others; one that differs is left out."""
        if not self._program:  # The learner itself has no gymnasium.
            self._program = found.program
        if found.program != self._program:
            self._lose(seat, _other_program(seat.name, self._program, found.program))
            return
        spaces = found.observations, found.actions
        if self._spaces is None:
            self._spaces = spaces
        if spaces != self._spaces:
            self._lose(seat, _other_spaces(seat.name, self._spaces, spaces))

    # Results

    def _start_ready(self) -> None:
        self._check_open()
        self._check_agent()
        ready = [seat for seat in self._seats if seat.state == READY]
        is_alone = isinstance(self._where, str) and self._where == "process"
        active = len(ready) + sum(seat.state == BUSY for seat in self._seats)
        self._expect(1 if is_alone else active)
        self._check_agent()
        for seat in ready:
            self._start(seat, "collect", (self._steps, not isinstance(self._where, str)))

    def _start(self, seat: _Seat, method: str, args: tuple[Any, ...]) -> None:
        assert seat.place is not None
        seat.state, seat.since_s = BUSY, time.monotonic()
        seat.agent_number = self._agent_number
        number, generation = seat.number, seat.generation

        def done(result: Any, error: BaseException | None) -> None:
            mark = device_streams.mark() if device_streams.HAS_CUDA else None
            self._done.put((number, generation, result, error, mark))

        seat.place.start(method, args, done)

    def _take(self, found: dict[int, Trajectory]) -> None:
        """Takes one result, or notes who is late; blocks until either."""
        now_s = time.monotonic()
        busy = [seat for seat in self._seats if seat.state == BUSY]
        first_s = min((seat.since_s for seat in busy), default=now_s)
        try:
            taken = self._done.get(timeout=max(first_s + self._time_limit_s - now_s, 0.001))
        except queue.Empty:
            now_s = time.monotonic()
            for seat in busy:
                if now_s >= seat.since_s + self._time_limit_s:
                    seat.state = LATE
            self._expect_active()
            return
        number, generation, result, error, mark = taken
        device_streams.use(mark, result)
        seat = self._seats[number]
        if generation != seat.generation:
            return
        seat.state = READY
        if error is not None:
            if isinstance(error, WorkerLost) and self._is_by_agent(seat, error):
                return
            self._lose(seat, error)
        elif isinstance(result, Introduction):
            if self._introduced is None:  # It is late.
                self._meet(seat, result)
            else:
                self._introduced[number] = result
        elif isinstance(result, Collected):
            self._receive(seat, result, found)

    def _receive(self, seat: _Seat, sent: Collected, found: dict[int, Trajectory]) -> None:
        if seat.agent_number != self._agent_number:
            return  # It was chosen by a former agent.
        version = self._version()
        if version is None:
            return
        staleness = version - sent.oldest
        if self._most_stale is not None and staleness > self._most_stale:
            self.refused += 1
            return
        try:
            found[seat.number] = sent.fetch(self._time_limit_s)
        except Exception as error:
            self._lose(seat, error)
        else:
            self.staleness[staleness] = self.staleness.get(staleness, 0) + 1

    def _version(self) -> int | None:
        """Returns the version of the agent's policy; None if the agent is lost."""
        agent: Any = self._agent
        try:
            if isinstance(agent, RRef):
                version: int = agent.rpc_sync(self._time_limit_s).get_version()
                return version
            return int(getattr(agent, "version", 0))
        except WorkerLost as error:
            self._note_agent_lost(error)
            return None

    def _is_by_agent(self, seat: _Seat, error: WorkerLost) -> bool:
        """Whether an observer failed as it had lost its agent; notes the loss."""
        if seat.agent_number != self._agent_number:
            return error.worker != seat.name
        if isinstance(self._where, str) or error.worker != seat.name:
            agent = (
                self._agent.publisher if isinstance(self._agent, FollowingPolicy) else self._agent
            )
            if isinstance(agent, RRef) and agent.owner_name() == error.worker:
                self._note_agent_lost(error)
                return True
        return False

    def _note_agent_lost(self, error: WorkerLost) -> None:
        if self._agent_lost is None:
            self._agent_lost = AgentLost(
                f"worker {error.worker!r} was lost, and the agent of the observers with it. They "
                f"keep their environments: make the agent anew, for instance from a snapshot, and "
                f"call follow(agent). {error}",
                worker=error.worker,
                since=error.since,
                cause=error.cause,
            )
            self._agent_lost.__cause__ = error

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError("these observers are closed; make others for further steps")

    def _check_agent(self) -> None:
        if self._agent_lost is not None:
            raise copy.copy(self._agent_lost)

    def _lose(self, seat: _Seat, cause: BaseException) -> None:
        seat.state, seat.cause = LOST, cause
        self._expect_active()
        self._forget([seat])

    def _forget(self, seats: Sequence[_Seat], waits: bool = True) -> None:
        """Drops the recurrent states of environments that are gone, if they can be reached."""
        numbers = np.concatenate([self._environments.numbers(seat.number) for seat in seats])
        agent: Any = self._agent
        if not isinstance(agent, RRef):
            if hasattr(agent, "forget"):
                agent.forget(torch.from_numpy(numbers))
            return
        if self._agent_lost is not None:
            return
        try:
            told = agent.rpc_async(self._time_limit_s).forget(torch.from_numpy(numbers))
            ignore_errors(told)
            if waits:  # An observer that is made anew has the same numbers.
                told.wait()
        except WorkerLost as error:
            self._note_agent_lost(error)
        except Exception:
            pass  # The states take memory, and do no harm.

    def _close(self, seats: Sequence[_Seat]) -> None:
        for seat in seats:
            if seat.place is not None:
                seat.place.close()
            seat.place, seat.state = None, LOST
            seat.generation += 1

    def _expect_active(self) -> None:
        """Batches wait no longer for observers that are late or lost."""
        active = sum(seat.state in (READY, BUSY) for seat in self._seats)
        self._expect(min(active, self._expected))

    def _expect(self, count: int) -> None:
        count = max(count, 1) if self._full_batches else 1
        if count == self._expected:
            return
        self._expected = count
        if isinstance(self._agent, Agent):
            self._agent.expect(count)
        elif isinstance(self._agent, RRef):
            try:
                self._agent.rpc_sync(self._time_limit_s).expect(count)
            except WorkerLost as error:
                self._note_agent_lost(error)

    def _check_any(self) -> None:
        if any(seat.state in (READY, BUSY) for seat in self._seats):
            return
        errors = {seat.name: seat.cause or _late(seat, self._time_limit_s) for seat in self._seats}
        causes = {name: f"{type(error).__name__}: {error}" for name, error in errors.items()}
        listed = "; ".join(f"{name}: {cause}" for name, cause in causes.items())
        raise NoObservers(
            f"no observer takes part any more. Make them anew with replace or take_back. {listed}",
            causes=causes,
        ) from next(iter(errors.values()))


def _check_place(where: str | Sequence[str]) -> None:
    if isinstance(where, str) and where not in ("process", "threads"):
        raise ConfigurationError(
            f"where={where!r}: pass 'process', 'threads', or a list of workers"
        )
    if not where:
        raise ConfigurationError("where names no workers: pass one for each observer")


def _check_numbers(count: int, steps: int, time_limit_s: float, most_stale: int | None) -> None:
    for name, number in (("count", count), ("steps", steps), ("most_stale", most_stale or 0)):
        checked_int(name, number)
    if steps < 1 or count < 1 or not time_limit_s > 0 or (most_stale or 0) < 0:
        raise ConfigurationError(
            f"count={count}, steps={steps}, time_limit_s={time_limit_s}, "
            f"most_stale={most_stale}: pass 1 or more, a positive time, and 0 or more, or None"
        )


def _check_agent(agent: Any) -> None:
    if not isinstance(agent, RRef) and not callable(getattr(agent, "act", None)):
        raise ConfigurationError(
            f"agent is a {type(agent).__name__}, which observers cannot ask: pass an Agent, a "
            "reference to one, or a policy with the method act"
        )


def _too_stale(most_stale: int, refused: int) -> TooStale:
    return TooStale(
        f"all {refused} trajectories of a round were refused: the policy had more than most_stale="
        f"{most_stale} updates since the oldest of their actions. Update it less often while "
        "observers act, take fewer steps, or allow for older trajectories",
        most_stale=most_stale,
        refused=refused,
    )


def _late(seat: _Seat, limit_s: float) -> TimeoutError:
    return TimeoutError(f"observer {seat.name!r} did not answer within {limit_s:g} s")


def _other_program(observer: str, expected: str, found: str) -> ProgramMismatch:
    return ProgramMismatch(
        f"observer {observer!r} makes its environments and its policy by version {found}, the "
        f"learner has version {expected}; restart the worker with the program of the learner",
        observer=observer,
        expected=expected,
        found=found,
    )


def _other_spaces(
    observer: str, expected: tuple[str, str], found: tuple[str, str]
) -> SpacesMismatch:
    texts = [f"observations {each[0]}, actions {each[1]}" for each in (expected, found)]
    return SpacesMismatch(
        f"the environments of observer {observer!r} have {texts[1]}; those of the others have "
        f"{texts[0]}",
        observer=observer,
        expected=texts[0],
        found=texts[1],
    )
