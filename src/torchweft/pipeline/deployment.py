"""The stages of a pipeline on their workers, as the driver sees them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn

from torchweft.arguments import check_workers, wrong_type
from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.extending import ignore_errors, this_worker
from torchweft.free_threading import shared_count
from torchweft.pipeline.copies import Copies, find_copies
from torchweft.pipeline.cutting import Stages
from torchweft.pipeline.host import Form, Host, set_up
from torchweft.pipeline.minibatches import (
    blame,
    check_endless,
    check_updates,
    short_table,
)
from torchweft.pipeline.runner import Assignment, Settings
from torchweft.pipeline.schedules import SchedulePipeDream, Table, check
from torchweft.pipeline.wiring import BATCH, Take, pick
from torchweft.rpc import Future, RRef, as_completed, get_worker_info, on, rpc_async

_END_S = 5.0
_numbers = shared_count(1)


class Schedules(Protocol):
    """Anything that has a table for a number of workers."""

    def table(self, n_workers: int, /) -> Table:
        """Returns the table."""


class Layout(NamedTuple):
    """Which worker is to hold which stages; made before any worker is called.

    Attributes:
        workers: The names of the workers, by row.
        table: The table; of an asynchronous schedule a short one.
        endless: The schedule, if it is asynchronous.
    """

    workers: tuple[str, ...]
    table: Table
    endless: SchedulePipeDream | None

    @classmethod
    def of(cls, workers: Sequence[str], schedule: Schedules) -> Layout:
        """Returns the layout of a schedule on workers.

        Raises:
            ArgumentTypeError: One of them is of a wrong type.
            ConfigurationError: A worker is named twice, or the schedule cannot have their number.
        """
        check_workers(workers, "workers")
        if isinstance(schedule, type) or not callable(getattr(schedule, "table", None)):
            shown = schedule.__name__ if isinstance(schedule, type) else "Schedule1F1B"
            raise wrong_type("schedule", schedule, f"pass a schedule, such as {shown}(8)")
        names = tuple(workers)
        if len(set(names)) != len(names) or not names:
            raise ConfigurationError(
                f"workers is {list(workers)}; name each worker of the pipeline once"
            )
        if isinstance(schedule, SchedulePipeDream):
            return cls(names, short_table(schedule, len(names)), schedule)
        return cls(names, schedule.table(len(names)), None)


class Dropping:
    """Whether the gradients are to be dropped before they are used again, and how."""

    def __init__(self) -> None:
        self._set_to_none: bool | None = None

    def want(self, set_to_none: bool | None) -> None:
        """Has them dropped; a gradient that is None does not become zeros."""
        if set_to_none is not None and not self._set_to_none:
            self._set_to_none = set_to_none

    def take(self) -> bool | None:
        """Returns whether they become None, or zeros; None: they stay. Then it has been done."""
        found, self._set_to_none = self._set_to_none, None
        return found


class Held(NamedTuple):
    """The holders of one name.

    Attributes:
        form: The shape and type of the weight or buffer.
        rows: The rows of the workers that hold it.
    """

    form: Form
    rows: list[int]


class Deployment:
    """The stages of one pipeline on their workers. Not thread-safe.

    Args:
        layout: Which worker is to hold which stages.
        stages: The stages.
        settings: The settings.

    Raises:
        ConfigurationError: The stages do not fit the layout.
        UnknownWorker: There is no such worker.
        PipelineError: A stage could not be made.

    Attributes:
        infos: The workers, by row.
        hosts: Their hosts, by row; empty after ``close``.
        step: Number of the last step or run.
    """

    def __init__(self, layout: Layout, stages: Stages, settings: Settings) -> None:
        self.workers, self.table, self.endless = layout
        self.stages = stages
        check_updates(self.table, bool(self.endless), settings.maker)
        check(self.table, stages.wiring.edges)
        if self.endless:
            check_endless(self.endless, len(self.workers), stages, settings.checkpoint)
        self.infos = [get_worker_info(name) for name in self.workers]
        self.step = 0
        self._settings = settings
        self._seats = self.table.seats
        self._takes = self._batch_takes()
        self.hosts: list[RRef[Host]] = []
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def _batch_takes(self) -> list[list[tuple[int, int, tuple[Take, ...]]]]:
        """Returns, for each worker, which of its stages take what of which micro-batch."""
        found: list[list[tuple[int, int, tuple[Take, ...]]]] = [[] for _ in self.workers]
        for (stage, microbatch), row in self._seats.items():
            takes = self.stages.wiring.taken(stage, BATCH)
            if takes:
                found[row].append((stage, microbatch, takes))
        return found

    def _set_up(self) -> None:
        copies = find_copies(self.table, self.stages.ties)
        number = (this_worker().id << 32) | next(_numbers)
        futures = [self._place(row, number, copies) for row in range(len(self.workers))]
        try:
            self.hosts = [future.wait() for future in futures]
        except BaseException:
            _cancel(futures)
            raise
        self._equalize(copies)
        if self._settings.maker is not None:
            self.call_all(Host.make_optimizer, self._settings.maker, {})

    def _place(self, row: int, number: int, copies: Copies) -> Future[RRef[Host]]:
        """Has a worker make its stages, and the thread that runs them."""
        info, settings = self.infos[row], self._settings
        sources = {stage: self.stages.sources[stage] for stage in self.table.stages_of(row)}
        if info.name == this_worker().name:
            sources = copy.deepcopy(sources)  # Another worker gets copies as well.
        assignment = Assignment(
            pipe=number,
            worker=row,
            workers=self.workers,
            table=self.table,
            wiring=self.stages.wiring,
            stages=sources,
            copies=copies,
            driver=this_worker().name,
            has_names=self.stages.has_names,
            endless=self.endless,
            settings=settings,
        )
        return rpc_async(info, set_up, args=(assignment,), timeout=settings.answer_s)

    def _equalize(self, copies: Copies) -> None:
        """Gives all copies of a weight the value of the first, where each worker made its own."""
        for number, members in enumerate(copies.groups):
            made = [self.stages.sources[member.stage] for member in members]
            if all(isinstance(each, nn.Module) for each in made):
                continue
            first, *others = copies.workers(number)
            values = on(self.hosts[first]).rpc_sync(Host.values_of_copies, number)
            for worker in (first, *others):
                on(self.hosts[worker]).rpc_sync(Host.set_copies, number, values)

    # Calls

    def call_all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a method of all hosts; returns the results by row."""
        return self.call_each(method, [args] * len(self.workers))

    def call_each(self, method: Callable[..., Any], args: Iterable[Sequence[Any]]) -> list[Any]:
        """Calls a method of all hosts, with arguments for each; returns the results by row.

        Raises:
            ConfigurationError: The pipeline was closed.
        """
        limit_s = self._settings.answer_s
        futures = [
            on(host, limit_s).rpc_async(method, *given)
            for host, given in zip(self.open_hosts(), args, strict=True)
        ]
        try:
            return [future.wait() for future in futures]
        except BaseException:  # One failed, or Ctrl-C
            _cancel(futures)
            raise

    def open_hosts(self) -> list[RRef[Host]]:
        """Returns the hosts.

        Raises:
            ConfigurationError: The pipeline was closed.
        """
        if not self.hosts:
            raise ConfigurationError("the pipeline cannot be used any more: it was closed")
        return self.hosts

    def gathered(self, method: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        """Calls a method of all hosts; returns copies of all that they return.

        Of replicas it has the first.
        """
        found: dict[str, Any] = {}
        me = this_worker().name
        for worker, each in zip(self.workers, self.call_all(method), strict=True):
            # This process has got what it changes in the next step, and not copies.
            own = copy.deepcopy(each) if worker == me else each
            found |= own | found
        return found

    def run_once(
        self,
        is_training: bool,
        zero_grad: bool | None,
        batches: Sequence[Any],
        targets: Sequence[Any],
    ) -> list[Any]:
        """Runs all rows once; returns the results of the workers that have one.

        Args:
            is_training: Whether to run backwards as well.
            zero_grad: Whether gradients become None first, or zeros; None: they stay.
            batches: The micro-batches.
            targets: Their targets, for training.
        """
        hosts = self.open_hosts()
        self.step += 1
        last, seats = self.table.n_stages - 1, self._seats
        futures: list[Future[Any]] = []
        failures: list[Exception] = []
        for row, host in enumerate(hosts):
            inputs: dict[int, dict[int, list[Any]]] = {}
            for stage, number, takes in self._takes[row]:
                batch = batches[number]
                picked = [batch if take.key is None else pick(batch, take, stage) for take in takes]
                inputs.setdefault(stage, {})[number] = picked
            own = {at: each for at, each in enumerate(targets) if seats[last, at] == row}
            try:
                args = (self.step, is_training, zero_grad, inputs, own)
                futures.append(host.rpc_async(0).start(*args))
            except Exception as error:
                failures.append(error)
                self._abort()
                break
        return [result for result in self._results(futures, failures) if result is not None]

    def _results(self, futures: list[Future[Any]], failures: list[Exception]) -> list[Any]:
        """Waits for all workers; if one fails, ends the step on the others and raises its error."""
        try:
            for future in as_completed(futures):
                try:
                    future.wait()
                except Exception as error:
                    if not failures:
                        self._abort()
                    failures.append(error)
        except BaseException:  # Ctrl-C
            self._abort()
            _cancel(futures)
            raise
        if not failures:
            return [future.wait() for future in futures]
        # The others failed because of the first, unless it was told to end by one of them.
        failures.sort(key=blame)
        raise failures[0]

    def _abort(self) -> None:
        for host in self.hosts:
            with contextlib.suppress(WorkerLost):
                ignore_errors(on(host, _END_S).rpc_async(Host.abort, self.step))

    def close(self) -> None:
        """Ends the pipeline on all workers, and releases its stages; passes over lost workers."""
        hosts, self.hosts = self.hosts, []
        for host in hosts:
            with contextlib.suppress(WorkerLost, TimeoutError):
                on(host, _END_S).rpc_sync(Host.close)

    # State by name

    def held(self) -> dict[str, Held]:
        """Returns the names of all weights and buffers, with their holders."""
        found: dict[str, Held] = {}
        for row, its in enumerate(self.call_all(Host.forms)):
            for name, form in its.items():
                found.setdefault(name, Held(form, [])).rows.append(row)
        return found

    def move_from(self, old: Deployment) -> None:
        """Gives the stages the state of those of another deployment; worker to worker. Blocks.

        Args:
            old: Has the weights, the buffers and the state of the optimizers; it is not changed.

        Raises:
            ConfigurationError: They are not of the same model.
        """
        sources = old.held()
        targets = self.held()
        check_same(_forms(sources), _forms(targets))
        places: list[dict[int, list[str]]] = [{} for _ in self.workers]
        for name, held in targets.items():
            holders = sources[name].rows
            for row in held.rows:
                # From itself, if it can, else from the first holder.
                own = [each for each in holders if old.workers[each] == self.workers[row]]
                places[row].setdefault((own or holders)[0], []).append(name)
        self._adopt(old, places)

    def spread(self) -> None:
        """Gives all replicas of a stage the state of the first."""
        places: list[dict[int, list[str]]] = [{} for _ in self.workers]
        for name, (_, (first, *others)) in self.held().items():
            for row in others:
                places[row].setdefault(first, []).append(name)
        if any(places):
            self._adopt(self, places)

    def _adopt(self, origin: Deployment, places: Iterable[Mapping[int, list[str]]]) -> None:
        limit_s = self._settings.answer_s
        asked = [[(origin.hosts[row], names) for row, names in each.items()] for each in places]
        self.call_each(Host.adopt, [(each, limit_s) for each in asked])

    def references(self) -> dict[str, Any]:
        """Returns references to the state of all stages, as a tree for ``torchweft.checkpoint``.

        Of replicas it has the first; after restoring, ``spread`` gives its state to the others.
        """
        firsts: list[list[str]] = [[] for _ in self.workers]
        for name, held in self.held().items():
            firsts[held.rows[0]].append(name)
        tree: dict[str, Any] = {"weights": {}, "optimizer": {}}
        for each in self.call_each(Host.references, [(names,) for names in firsts]):
            tree["weights"].update(each.values)
            tree["optimizer"].update(each.optimizer)
        return {key: entries for key, entries in tree.items() if entries}


def check_same(old: Mapping[str, Form], new: Mapping[str, Form]) -> None:
    """Compares the names, shapes and types of two states.

    Raises:
        ConfigurationError: They differ; names the differences.
    """
    if old.keys() != new.keys():
        missing, extra = sorted(new.keys() - old.keys()), sorted(old.keys() - new.keys())
        raise ConfigurationError(
            f"the state is of another model: missing {missing}, unexpected {extra}"
        )
    for name, here in new.items():
        there = old[name]
        if there.shape != here.shape:
            raise ConfigurationError(
                f"the state is of another model: {name} has shape {list(there.shape)} there and "
                f"{list(here.shape)} here"
            )
        if there.dtype != here.dtype:
            raise ConfigurationError(
                f"the state is of another model: {name} has type {there.dtype} there and "
                f"{here.dtype} here; convert one of them"
            )


def _forms(held: Mapping[str, Held]) -> dict[str, Form]:
    return {name: each.form for name, each in held.items()}


def _cancel(futures: Iterable[Future[Any]]) -> None:
    """Gives up calls, so that their later errors are not reported as never looked at."""
    for future in futures:
        future.cancel()
