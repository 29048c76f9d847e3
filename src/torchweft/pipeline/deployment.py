"""The stages of a pipeline on their workers, as the driver sees them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import nn

from torchweft import checkpoint
from torchweft.arguments import check_workers, wrong_type
from torchweft.errors import ConfigurationError, WorkerLost
from torchweft.extending import this_worker
from torchweft.free_threading import shared_count
from torchweft.pipeline.copies import WeightCopies, find_copies
from torchweft.pipeline.cutting import Stages
from torchweft.pipeline.host import Form, Host, set_up
from torchweft.pipeline.minibatches import check_endless, check_updates, short_table
from torchweft.pipeline.runner import Assignment, Settings
from torchweft.pipeline.schedules import SchedulePipeDream, Table, check
from torchweft.pipeline.step import END_S, StepDriver, cancel
from torchweft.rpc import Future, RRef, get_worker_info, on, rpc_async

_numbers = shared_count(1)


class Schedules(Protocol):
    """Anything that has a table for a number of workers."""

    def table(self, n_workers: int, /) -> Table:
        """Returns the table."""


def lay_out(
    workers: Sequence[str], schedule: Schedules
) -> tuple[tuple[str, ...], Table, SchedulePipeDream | None]:
    """Decides which worker holds which stages; calls no worker.

    Returns:
        The names of the workers, by row; the table, of an asynchronous schedule a short one; and
        the schedule, if it is asynchronous.

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
        return names, short_table(schedule, len(names)), schedule
    return names, schedule.table(len(names)), None


class Holders(NamedTuple):
    """The holders of one name.

    Attributes:
        form: The shape and type of the weight or buffer.
        places: The row of the worker, and the stage, of each copy.
    """

    form: Form
    places: list[tuple[int, int]]


class Deployment:
    """The stages of one pipeline on their workers. Not thread-safe.

    Args:
        workers: The names of the workers, by row.
        table: The table; of an asynchronous schedule a short one.
        endless: The schedule, if it is asynchronous.
        stages: The stages.
        settings: The settings.

    Raises:
        ConfigurationError: The stages do not fit the table.
        UnknownWorker: There is no such worker.
        PipelineError: A stage could not be made.

    Attributes:
        infos: The workers, by row.
        hosts: Their hosts, by row; empty after ``close``.
        steps: Runs steps on them.
    """

    def __init__(
        self,
        workers: tuple[str, ...],
        table: Table,
        endless: SchedulePipeDream | None,
        stages: Stages,
        settings: Settings,
    ) -> None:
        self.workers, self.table, self.endless, self.stages = workers, table, endless, stages
        check_updates(self.table, bool(self.endless), settings.maker)
        check(self.table, stages.wiring.edges)
        if self.endless:
            check_endless(self.endless, len(self.workers), stages, settings.checkpoint)
        self.infos = [get_worker_info(name) for name in self.workers]
        self._settings = settings
        self.hosts: list[RRef[Host]] = []
        self.steps = StepDriver(self.hosts, self.table, stages.wiring)
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    def _set_up(self) -> None:
        copies = find_copies(self.table, self.stages.ties)
        number = (this_worker().id << 32) | next(_numbers)
        futures = [self._place(row, number, copies) for row in range(len(self.workers))]
        self.hosts.extend(_results(futures))
        self._equalize(copies)
        if self._settings.maker is not None:
            self.call_all(Host.make_optimizer, self._settings.maker, {})

    def _place(self, row: int, number: int, copies: WeightCopies) -> Future[RRef[Host]]:
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

    def _equalize(self, copies: WeightCopies) -> None:
        """Gives all copies of a weight the value of the first, where each worker made its own."""
        for number, members in enumerate(copies.groups):
            made = [self.stages.sources[member.stage] for member in members]
            if all(isinstance(each, nn.Module) for each in made):
                continue
            first, *others = copies.workers(number)
            values = on(self.hosts[first]).rpc_sync(Host.values_of_copies, number)
            for worker in (first, *others):
                on(self.hosts[worker]).rpc_sync(Host.set_copies, number, values)

    def call_all(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls a method of all hosts; returns the results by row.

        Raises:
            ConfigurationError: The pipeline was closed.
        """
        return self._call_each(method, [args] * len(self.workers))

    def _call_each(self, method: Callable[..., Any], args: Iterable[Sequence[Any]]) -> list[Any]:
        """Calls a method of all hosts, with arguments for each; returns the results by row."""
        limit_s = self._settings.answer_s
        hosts = self.steps.open_hosts()
        return _results(
            [
                on(host, limit_s).rpc_async(method, *given)
                for host, given in zip(hosts, args, strict=True)
            ]
        )

    def close(self) -> None:
        """Ends the pipeline on all workers, and releases its stages; passes over lost workers."""
        hosts = self.hosts.copy()
        self.hosts.clear()
        for host in hosts:
            with contextlib.suppress(WorkerLost, TimeoutError):
                on(host, END_S).rpc_sync(Host.close)

    # State by name

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

    def _held(self) -> dict[str, Holders]:
        """Returns the names of all weights, buffers and further state, with their holders."""
        found: dict[str, Holders] = {}
        for row, its in enumerate(self.call_all(Host.forms)):
            for stage, name, form in its:
                found.setdefault(name, Holders(form, [])).places.append((row, stage))
        return found

    def forms(self) -> dict[str, Form]:
        """Returns the shape and type of each weight and buffer."""
        return {name: held.form for name, held in self._held().items()}

    def references(self) -> dict[str, Any]:
        """Returns references to the state of all stages, as a tree for ``torchweft.checkpoint``.

        Of several copies it has the first; ``spread`` gives its state to the others.
        """
        return self._tree({name: held.places[0] for name, held in self._held().items()})

    def _tree(self, places: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
        wanted: list[list[tuple[int, str]]] = [[] for _ in self.workers]
        for name, (row, stage) in places.items():
            wanted[row].append((stage, name))
        tree: dict[str, Any] = {"weights": {}, "optimizer": {}}
        for values, optimizer in self._call_each(Host.references, [(each,) for each in wanted]):
            tree["weights"].update(values)
            tree["optimizer"].update(optimizer)
        return {key: entries for key, entries in tree.items() if entries}

    def move_from(self, old: Deployment) -> None:
        """Gives the stages the state of those of another deployment; worker to worker. Blocks.

        Args:
            old: Has the weights, the buffers and the state of the optimizers; it is not changed.

        Raises:
            ConfigurationError: They are not of the same model.
        """
        check_same(old.forms(), self.forms())
        self._copy(old.references(), self.references())
        self.spread()

    def spread(self) -> None:
        """Gives all copies of a weight or buffer, and the optimizers, the state of the first."""
        held = self._held()
        for place in range(1, max((len(each.places) for each in held.values()), default=0)):
            copied = {name: each for name, each in held.items() if len(each.places) > place}
            self._copy(
                self._tree({name: each.places[0] for name, each in copied.items()}),
                self._tree({name: each.places[place] for name, each in copied.items()}),
            )

    def _copy(self, source: dict[str, Any], target: dict[str, Any]) -> None:
        """Copies state; an optimizer may have none of a weight that was not trained there."""
        limit_s = self._settings.answer_s
        checkpoint.copy_state(source, target, strict=False, timeout=limit_s)


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


def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    try:
        return [future.wait() for future in futures]
    except BaseException:  # One failed, or Ctrl-C
        cancel(futures)
        raise
