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
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchweft import rpc
from torchweft.arguments import checked_int, wrong_type
from torchweft.closing import Closing
from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.extending import device_mark, ignore_errors, served_streams
from torchweft.rl.agent import Agent, FollowingPolicy, RemotePolicy
from torchweft.rl.environments import Environments
from torchweft.rl.errors import AgentLost, NoObservers, ProgramMismatch, SpacesMismatch, TooStale
from torchweft.rl.observer import Introduction, Observer, program_of
from torchweft.rl.policies import Policy
from torchweft.rl.trajectories import Collected, Trajectory
from torchweft.rpc import RRef

READY, BUSY, LATE, LOST = "ready", "busy", "late", "lost"
Done = Callable[[Any, BaseException | None], None]
"""Called with the result of a method, or with its error."""


# Where an observer runs. Each place calls the methods of its observer one after the other


class _Here:
    """An observer in this thread, for debugging: a method runs while it is started.

    Args:
        args: Those of the ``Observer``.
    """

    def __init__(self, *args: Any) -> None:
        self._args = args
        self._observer: Observer | None = None

    def start(self, method: str, args: tuple[Any, ...], done: Done) -> None:
        """Calls a method; ``done`` is called when it has ended, maybe at once."""
        try:
            if self._observer is None:
                self._observer = Observer(*self._args)
            result = getattr(self._observer, method)(*args)
        except Exception as error:
            done(None, error)
        else:
            done(result, None)

    def close(self) -> None:
        """Closes the observer, as far as it can be reached; does not wait for a method."""
        if self._observer is not None:
            self._observer.close()


class _InThread(_Here):
    """An observer in a thread of its own."""

    def __init__(self, name: str, *args: Any) -> None:
        super().__init__(*args)
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams = served_streams()
        # A daemon: an environment that hangs must not keep the program from ending.
        self._thread = threading.Thread(target=self._run, name=f"weft-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._todo.get()) is not None:
            work()
        super().close()

    def start(self, method: str, args: tuple[Any, ...], done: Done) -> None:
        """Has the thread run a method."""
        work = functools.partial(super().start, method, args, done)
        self._todo.put(self._streams.carried(work))

    def close(self) -> None:
        """Ends the thread after the method that it runs."""
        self._todo.put(None)

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread."""
        self._thread.join(timeout_s)


class _OnWorker:
    """An observer on a worker."""

    def __init__(self, worker: str, *args: Any) -> None:
        self._observer = rpc.remote(worker, Observer, args)

    def start(self, method: str, args: tuple[Any, ...], done: Done) -> None:
        """Calls a method on the worker, without a limit of time."""

        def ended(future: rpc.Future[Any]) -> None:
            try:
                result = future.value()
            except Exception as error:
                done(None, error)
            else:
                done(result, None)

        try:
            future = getattr(self._observer.rpc_async(timeout=0), method)(*args)
        except Exception as error:
            done(None, error)  # The worker is known to be lost.
        else:
            future.add_done_callback(ended)

    def close(self) -> None:
        """Has the worker close the observer, unless it is lost."""
        self.start("close", (), lambda result, error: None)


# The agent, and the observers


class _Asked:
    """What the observers ask, as the learner sees it: an agent here or on a worker, or a policy.

    Args:
        agent: As for ``Observers``.
        limit_s: Limit of each call, in seconds.
        full_batches: As for ``Observers``.

    Attributes:
        lost: The loss of the agent; None while it lives.
        expected: For how many calls the agent waits; 0 if it is to be told anew.
    """

    def __init__(self, agent: Any, limit_s: float, *, full_batches: bool) -> None:
        if not isinstance(agent, RRef) and not callable(getattr(agent, "act", None)):
            raise ConfigurationError(
                f"agent is a {type(agent).__name__}, which observers cannot ask: pass an Agent, a "
                "reference to one, or a policy with the method act"
            )
        self.agent = agent
        self.lost: AgentLost | None = None
        self.expected = 0
        self._limit_s = limit_s
        self._full_batches = full_batches

    def policy(self, *, is_here: bool) -> Policy:
        """Returns what an observer in this process, or on a worker, asks."""
        agent = self.agent
        if isinstance(agent, Agent) and not is_here:
            agent = RRef(agent)
        return RemotePolicy(agent, self._limit_s) if isinstance(agent, RRef) else agent

    def version(self) -> int | None:
        """Returns the version of the policy; None if the agent is lost."""
        try:
            if isinstance(self.agent, RRef):
                return int(self.agent.rpc_sync(self._limit_s).get_version())
            return int(getattr(self.agent, "version", 0))
        except WorkerLost as error:
            self.note_loss(error)
            return None

    def expect(self, count: int) -> None:
        """Has the batches of the agent wait for so many calls."""
        count = max(count, 1) if self._full_batches else 1
        if count == self.expected:
            return
        self.expected = count
        if isinstance(self.agent, Agent):
            self.agent.expect(count)
        elif isinstance(self.agent, RRef):
            try:
                self.agent.rpc_sync(self._limit_s).expect(count)
            except WorkerLost as error:
                self.note_loss(error)

    def forget(self, environments: Tensor, *, waits: bool) -> None:
        """Drops the recurrent states of environments that are gone, if they can be reached."""
        if not isinstance(self.agent, RRef):
            if hasattr(self.agent, "forget"):
                self.agent.forget(environments)
        elif self.lost is None:
            try:
                told = self.agent.rpc_async(self._limit_s).forget(environments)
                ignore_errors(told)
                if waits:  # An observer that is made anew has the same numbers.
                    told.wait()
            except WorkerLost as error:
                self.note_loss(error)
            except Exception:
                pass  # The states take memory, and do no harm.

    def is_on(self, worker: str) -> bool:
        """Whether the agent, or the publisher that policies follow, is on this worker."""
        agent = self.agent
        reference = agent.publisher if isinstance(agent, FollowingPolicy) else agent
        return isinstance(reference, RRef) and reference.owner_name() == worker

    def note_loss(self, error: WorkerLost) -> None:
        """Notes that the worker of the agent is lost."""
        if self.lost is None:
            self.lost = AgentLost(
                f"worker {error.worker!r} was lost, and the agent of the observers with it. They "
                f"keep their environments: make the agent anew, for instance from a snapshot, and "
                f"call follow(agent). {error}",
                worker=error.worker,
                since=error.since,
                cause=error.cause,
            )
            self.lost.__cause__ = error

    def check(self) -> None:
        """Raises AgentLost if the agent is lost."""
        if self.lost is not None:
            raise copy.copy(self.lost)


class _Seat:
    """One observer, as the learner sees it."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.place: _Here | _OnWorker | None = None
        self.state = LOST
        self.cause: BaseException | None = None
        self.generation = 0
        """How often the observer has been made; results of former ones do not count."""
        self.since_s = 0.0
        self.asked: _Asked | None = None
        """The agent that its trajectory is of."""


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
        if isinstance(where, str) and where not in ("process", "threads"):
            raise ConfigurationError(
                f"where={where!r}: pass 'process', 'threads', or a list of workers"
            )
        if not where:
            raise ConfigurationError("where names no workers: pass one for each observer")
        if not isinstance(environments, Environments):
            raise wrong_type("environments", environments, "pass rl.Environments(...)")
        for name, number in (("count", count), ("steps", steps), ("most_stale", most_stale or 0)):
            checked_int(name, number)
        if steps < 1 or count < 1 or not time_limit_s > 0 or (most_stale or 0) < 0:
            raise ConfigurationError(
                f"count={count}, steps={steps}, time_limit_s={time_limit_s}, "
                f"most_stale={most_stale}: pass 1 or more, a positive time, and 0 or more, or None"
            )
        self.refused = 0
        self.staleness: dict[int, int] = {}
        self._where = where
        self._is_here = isinstance(where, str)
        self._environments = environments
        self._steps = steps
        self._time_limit_s = time_limit_s
        self._most_stale = most_stale
        self._full_batches = full_batches
        self._by_reference_bytes = by_reference_bytes
        self._is_closed = False
        self._ask(agent)
        self._spaces: tuple[str, str] | None = None
        self._done: queue.SimpleQueue[
            tuple[_Seat, int, Any, BaseException | None, Callable[..., None]]
        ]
        self._done = queue.SimpleQueue()
        names = [f"observer{k}" for k in range(count)] if isinstance(where, str) else where
        self._seats = [_Seat(number, name) for number, name in enumerate(names)]
        try:
            self._open(self._seats)
            self._check_any()
        except BaseException:
            self.close()
            raise

    def _ask(self, agent: Agent | RRef[Agent] | Policy) -> None:
        """Sets what the observers ask from now on."""
        self._asked = _Asked(agent, self._time_limit_s, full_batches=self._full_batches)
        self._program = program_of(self._environments.make, agent)

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
                refused = self.refused - before
                raise TooStale(
                    f"all {refused} trajectories of a round were refused: the policy had more than "
                    f"most_stale={self._most_stale} updates since the oldest of their actions. "
                    "Update it less often while observers act, take fewer steps, or allow for "
                    "older trajectories",
                    most_stale=self._most_stale or 0,
                    refused=refused,
                )
        return [found[number] for number in sorted(found)]

    def _collected(self) -> dict[int, Trajectory]:
        self._asked.expected = 0  # The agent awaits all again, also those that it has given up.
        self._start_ready()
        found: dict[int, Trajectory] = {}
        while self._are_any(BUSY):
            self._take(found)
            self._asked.check()
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
            self._asked.check()
            if found:
                self._start_ready()
                yield from found.values()
            elif not self._are_any(READY, BUSY):
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
        self._ask(agent)
        while self._are_any(BUSY):
            self._next()
        told: queue.SimpleQueue[tuple[_Seat, BaseException | None]] = queue.SimpleQueue()
        for seat in self._seats:
            if seat.place is not None and seat.state != LOST:
                seat.place.start(
                    "follow",
                    (self._asked.policy(is_here=self._is_here),),
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
            self._lose(seat, self._late(seat))

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
            if isinstance(place, _InThread):
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
        introduced: dict[int, Introduction] = {}
        while any(seat.state == BUSY for seat in seats):
            taken = self._next()
            if taken is not None and isinstance(taken[1], Introduction):
                introduced[taken[0].number] = taken[1]
        # In their order, so that the same observer is left out in each run.
        for number in sorted(introduced):
            self._meet(self._seats[number], introduced[number])
        for seat in seats:
            if seat.state == LATE:
                self._lose(seat, self._late(seat))

    def _placed(self, seat: _Seat) -> _Here | _OnWorker:
        policy = self._asked.policy(is_here=self._is_here)
        args = (seat.number, self._environments, policy, seat.name, self._by_reference_bytes)
        if not self._is_here:
            return _OnWorker(seat.name, *args)
        return _Here(*args) if self._where == "process" else _InThread(seat.name, *args)

    def _close(self, seats: Sequence[_Seat]) -> None:
        for seat in seats:
            if seat.place is not None:
                seat.place.close()
            seat.place, seat.state = None, LOST
            seat.generation += 1

    def _meet(self, seat: _Seat, found: Introduction) -> None:
        """Compares what an observer runs with the others; one that differs is left out."""
        if not self._program:  # The learner itself has no gymnasium.
            self._program = found.program
        spaces = found.observations, found.actions
        if found.program != self._program:
            mismatch = ProgramMismatch(
                f"observer {seat.name!r} makes its environments and its policy by version "
                f"{found.program}, the learner has version {self._program}; restart the worker "
                "with the program of the learner",
                observer=seat.name,
                expected=self._program,
                found=found.program,
            )
            self._lose(seat, mismatch)
            return
        if self._spaces is None:
            self._spaces = spaces
        if spaces != self._spaces:
            own, others = (
                f"observations {each[0]}, actions {each[1]}" for each in (spaces, self._spaces)
            )
            error = SpacesMismatch(
                f"the environments of observer {seat.name!r} have {own}; those of the others have "
                f"{others}",
                observer=seat.name,
                expected=others,
                found=own,
            )
            self._lose(seat, error)

    # Results

    def _start_ready(self) -> None:
        self._check_open()
        self._asked.check()
        is_alone = self._where == "process"
        self._asked.expect(1 if is_alone else self._count_active())
        self._asked.check()
        for seat in self._seats:
            if seat.state == READY:
                self._start(seat, "collect", (self._steps, not self._is_here))

    def _start(self, seat: _Seat, method: str, args: tuple[Any, ...]) -> None:
        assert seat.place is not None
        seat.state, seat.since_s, seat.asked = BUSY, time.monotonic(), self._asked
        generation = seat.generation

        def done(result: Any, error: BaseException | None) -> None:
            self._done.put((seat, generation, result, error, device_mark()))

        seat.place.start(method, args, done)

    def _next(self) -> tuple[_Seat, Any] | None:
        """Waits for a result, and returns it with its observer.

        Returns None, and changes the states of observers, if one is late or has failed.
        """
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
            return None
        seat, generation, result, error, mark = taken
        mark(result)
        if generation != seat.generation:
            return None
        seat.state = READY
        if error is None:
            return seat, result
        if not (isinstance(error, WorkerLost) and self._is_by_agent(seat, error)):
            self._lose(seat, error)
        return None

    def _is_by_agent(self, seat: _Seat, error: WorkerLost) -> bool:
        """Whether an observer failed as it had lost its agent; notes the loss."""
        if seat.asked is not self._asked:
            return error.worker != seat.name
        if not self._is_here and error.worker == seat.name:
            return False
        if self._asked.is_on(error.worker or ""):
            self._asked.note_loss(error)
            return True
        return False

    def _take(self, found: dict[int, Trajectory]) -> None:
        """Takes one result, or notes who is late; blocks until either."""
        taken = self._next()
        if taken is None:
            return
        seat, result = taken
        if isinstance(result, Introduction):  # It is late.
            self._meet(seat, result)
        elif isinstance(result, Collected):
            self._receive(seat, result, found)

    def _receive(self, seat: _Seat, sent: Collected, found: dict[int, Trajectory]) -> None:
        if seat.asked is not self._asked:
            return  # It was chosen by a former agent.
        version = self._asked.version()
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

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigurationError("these observers are closed; make others for further steps")

    def _lose(self, seat: _Seat, cause: BaseException) -> None:
        seat.state, seat.cause = LOST, cause
        self._expect_active()
        self._forget([seat], waits=True)

    def _forget(self, seats: Sequence[_Seat], *, waits: bool) -> None:
        numbers = np.concatenate([self._environments.numbers(seat.number) for seat in seats])
        self._asked.forget(torch.from_numpy(numbers), waits=waits)

    def _are_any(self, *states: str) -> bool:
        return any(seat.state in states for seat in self._seats)

    def _count_active(self) -> int:
        return sum(seat.state in (READY, BUSY) for seat in self._seats)

    def _expect_active(self) -> None:
        """Batches wait no longer for observers that are late or lost."""
        self._asked.expect(min(self._count_active(), self._asked.expected))

    def _late(self, seat: _Seat) -> TimeoutError:
        return TimeoutError(
            f"observer {seat.name!r} did not answer within {self._time_limit_s:g} s"
        )

    def _check_any(self) -> None:
        if self._are_any(READY, BUSY):
            return
        errors = {seat.name: seat.cause or self._late(seat) for seat in self._seats}
        causes = {name: f"{type(error).__name__}: {error}" for name, error in errors.items()}
        listed = "; ".join(f"{name}: {cause}" for name, cause in causes.items())
        raise NoObservers(
            f"no observer takes part any more. Make them anew with replace or take_back. {listed}",
            causes=causes,
        ) from next(iter(errors.values()))
