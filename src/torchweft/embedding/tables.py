"""``Tables``: embedding tables on servers, as a module."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchweft.arguments import check_type, check_workers, kind_of, limit_of
from torchweft.checkpoint import Snapshot
from torchweft.embedding import snapshots
from torchweft.embedding.cache import Cache
from torchweft.embedding.client import Aggregate, Client, Pushes, groups_of, hosts_of
from torchweft.embedding.configs import TableConfig
from torchweft.embedding.dynamic import Occupancy, check_capacity
from torchweft.embedding.errors import BadIds, PlanError
from torchweft.embedding.initial import fill
from torchweft.embedding.inputs import Flat
from torchweft.embedding.layout import Held, pieces_of
from torchweft.embedding.lookup import Pull, Reader, RowStream
from torchweft.embedding.optimizer import TablesOptimizer
from torchweft.embedding.planner import Plan
from torchweft.embedding.requests import StackRequest, Traffic
from torchweft.embedding.rows import Wire
from torchweft.embedding.rules import Rule
from torchweft.embedding.server import Options
from torchweft.errors import ConfigurationError, SerializationError
from torchweft.extending import is_open_group
from torchweft.ids import WorkerInfo
from torchweft.rpc import UNSET_RPC_TIMEOUT, get_worker_info

B = TypeVar("B")
T = TypeVar("T")
_WAIT_S = 60.0


class Tables(nn.Module):
    """Embedding tables on servers, and copies of those that the plan gives each trainer.

    Each trainer makes one with equal arguments. The first one makes the rows on the servers. They
    live until all trainers have called ``close`` or are gone. A worker that is no trainer may make
    one to read.

    A step is ordinary::

        tables = Tables(plan, trainers=["trainer0", "trainer1"])
        optimizer = tables.optimizer(Adagrad(lr=0.05))
        for users, items, target in batches:
            optimizer.zero_grad()
            out = tables({"user": users, "item": items})
            loss = criterion(model(out["user"], out["item"]), target)
            loss.backward()
            optimizer.step()

    Copies are in ``parameters()``: step them with a local optimizer, and average their gradients by
    ``DistributedDataParallel``. Not thread-safe.

    Args:
        plan: The tables and where they are; see ``plan_tables``.
        name: Name of the collection; others on the same servers have other names.
        trainers: Names of the workers that train, in the order in which their gradients are summed;
            by default this worker.
        staleness: The steps by which a trainer may be ahead of the slowest one; 0 for the
            synchronous mode, None for the asynchronous mode, in which pushes are applied as they
            come.
        reduction: Whether the gradients of a step are averaged over trainers, or summed. In the
            asynchronous mode each push is a step of its own.
        seed: Seed of the initial values.
        timeout: Seconds for each pull and step; 0 for no limit. A step waits for other trainers.
        cache: Which rows this trainer keeps between lookups, for at most ``staleness`` steps; by
            default none. Trainers may differ in it.
        wire: The form of rows and gradients in messages; by default that of the tables.
        aggregate: Which trainers share pulls, and sum their gradients before they go to the
            servers: ``"host"`` for those of each host, or lists of their names; by default none.
            The first of a group works for all of it. Not for the asynchronous mode.

    Raises:
        TablesMismatch: Another trainer has made the collection with other arguments.
        ConfigurationError: An argument cannot work, or there is a cache beside dynamic tables.
        ArgumentTypeError: An argument is of a wrong type.
        UnknownWorker: There is no such server; or no such trainer, in a group that none can join.
        WorkerLost: A server is lost.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        name: str = "tables",
        trainers: Sequence[str] | None = None,
        staleness: int | None = 0,
        reduction: Literal["mean", "sum"] = "mean",
        seed: int = 0,
        timeout: float = UNSET_RPC_TIMEOUT,
        cache: Cache | None = None,
        wire: Wire = Wire(),  # noqa: B008  # immutable
        aggregate: Aggregate = None,
    ) -> None:
        super().__init__()
        check_type(plan, Plan, "plan", "what plan_tables returns")
        if trainers is not None:
            check_workers(trainers, "trainers")
        check_types(name=name, seed=seed, cache=cache, wire=wire)
        me = get_worker_info().name
        self.plan = plan
        self.name = name
        self.trainers = (me,) if trainers is None else tuple(trainers)
        check_options(self.trainers, staleness, reduction)
        if not is_open_group():  # In an open group a trainer may join later.
            for each in self.trainers:
                get_worker_info(each)
        if cache is not None:
            _check_cache(cache, plan, staleness, is_trainer=me in self.trainers)
        self._wire = wire
        self._cache = cache
        averages = reduction == "mean"
        hosts = hosts_of(self.trainers) if aggregate == "host" else {}
        groups = groups_of(aggregate, self.trainers, staleness, hosts)
        limit_s = limit_of(timeout, _WAIT_S)
        self._options = Options(plan.layout, self.trainers, staleness, averages, seed, wire, groups)
        self.copies = _copies_of(plan, seed)
        self._client = Client(name, self._options, 0.0 if math.isinf(limit_s) else limit_s)
        self.reader = self._made_reader(None)
        """Looks up rows; for ``torchweft.hybrid``."""
        self._moves = 0
        self._has_rows_beside = False
        self._optimizer: TablesOptimizer | None = None

    def _made_reader(self, before: Reader | None) -> Reader:
        return Reader(self._client, self.plan, self._wire, self._cache, self._look_up_copy, before)

    @property
    def servers(self) -> Mapping[str, WorkerInfo]:
        """The workers that have rows now, by name."""
        return self._client.servers

    @property
    def bound(self) -> int | None:
        """The steps by which a trainer may be ahead; None in the asynchronous mode."""
        return self._client.staleness

    @property
    def timeout_s(self) -> float:
        """The limit of each pull and step in seconds; 0 for none."""
        return self._client.timeout_s

    # Lookups

    def forward(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Looks up ids of one or several tables. Blocks; one call to each server.

        Args:
            inputs: By table: a tensor of ids, of any shape without pooling, or ``(bags, length)``;
                ``Jagged`` with offsets; or a nested tensor with the layout ``torch.jagged``.

        Returns:
            By table: ``(bags, dim)``, or ``(*ids.shape, dim)`` without pooling, as
            ``nn.EmbeddingBag`` and ``nn.Embedding``.

        Raises:
            BadIds: Ids or weights are of a wrong type or shape, or a name is of no table.
            BadOffsets: Offsets do not begin at 0, do not rise, or go beyond the ids.
            IdOutOfRange: A table has no row for an id.
            WorkerLost: A server is lost.
            CallTimeout: A server did not answer in time.
        """
        return self.reader.look_up(inputs)

    def stream(
        self,
        batches: Iterable[B],
        ahead: int,
        inputs: Callable[[B], Mapping[str, Any]] = lambda batch: cast("Mapping[str, Any]", batch),
    ) -> RowStream[B]:
        """Returns batches in order, with the outputs of their lookups, pulled some batches ahead.

        ::

            with tables.stream(batches, 4, lambda batch: {"word": batch.words}) as stream:
                for batch, out in stream:
                    optimizer.zero_grad()
                    criterion(model(out["word"]), batch.target).backward()
                    optimizer.step()

        Waiting for a batch sends the pulls of those ahead, and blocks until its own rows are
        here. An error of ``batches``, or ids that cannot be used, end the stream as soon as they
        are drawn. Leaving the block cancels the pulls that are under way.

        Rows that were pulled ahead have the values of that time. The bound of the collection holds
        all the same: if they are older than ``staleness`` steps when they are needed, the servers
        are asked for those that have changed since. So with ``staleness=0`` the results are bit by
        bit those without a stream. With a cache, a row is pulled once for all drawn batches that
        need it, and only rows that are too old are pulled again. Streams are not aware of
        ``set_weights`` and ``restore``: open one afterwards.

        Args:
            batches: The batches of the program; at most ``ahead + 1`` are drawn and not yielded.
            ahead: How many batches are pulled before they are needed.
            inputs: Returns what to look up for a batch, as for ``forward``; by default the batch.

        Returns:
            An iterator of pairs of batch and outputs. It raises the errors of ``forward``.

        Raises:
            ConfigurationError: These tables are trained and have a cache, and ``ahead`` is more
                than ``staleness``: all rows would be pulled again.
        """
        self.check_ahead(ahead)

        def send(given: Mapping[str, Any], waiting: int) -> Pull:
            return self.reader.send([self.reader.flats(given)], waiting)

        return RowStream(batches, ahead, inputs, send)

    def check_ahead(self, ahead: int) -> None:
        """Checks that rows which are pulled some batches ahead can be young enough; see ``stream``.

        Raises:
            ConfigurationError: They cannot.
        """
        cache, staleness = self._cache, self._client.staleness
        if self._optimizer is None or cache is None:
            return
        if staleness is not None and ahead > staleness:
            raise ConfigurationError(
                f"tables {self.name!r} have staleness={staleness} and a cache, and rows that are "
                f"pulled {ahead} steps ahead are older; pass at most ahead={staleness}, or make "
                f"the tables with staleness={ahead}, or without a cache"
            )
        if staleness is None and cache.steps is not None and ahead > cache.steps:
            raise ConfigurationError(
                f"the cache of tables {self.name!r} has steps={cache.steps}, and rows that are "
                f"pulled {ahead} steps ahead are older; pass at most ahead={cache.steps}, or "
                f"Cache(steps={ahead})"
            )

    def _look_up_copy(self, config: TableConfig, flat: Flat) -> Tensor:
        """Returns the output of a copied table, on the device of its ids."""
        weight: Tensor = self.copies[config.name]
        ids = flat.ids.to(weight.device)
        if flat.offsets is None:
            found = functional.embedding(ids, weight, config.padding_idx)
            return found.view(*flat.shape, config.dim).to(flat.device)
        found = functional.embedding_bag(
            ids,
            weight,
            flat.offsets.to(weight.device),
            mode=config.pooling,
            per_sample_weights=None if flat.weights is None else flat.weights.to(weight.device),
        )
        return found.to(flat.device)

    def clear_cache(self) -> None:
        """Drops the rows that this trainer has cached, so that the next lookups pull them.

        Call it after another worker has set or restored rows. ``set_weights`` and ``restore`` do it
        for the worker that calls them.
        """
        self.reader.clear_cache()

    # Training

    def optimizer(self, rule: Rule) -> TablesOptimizer:
        """Returns the optimizer of the tables on servers; its state is beside the rows. Blocks.

        Every trainer calls it with the same rule.

        Args:
            rule: ``SGD``, ``Adagrad``, ``RowWiseAdagrad`` or ``SparseAdam`` of this package.

        Raises:
            TablesMismatch: Another trainer uses another one.
            PlanError: A table is cut by column, and the optimizer needs whole rows.
            ArgumentTypeError: It is no such rule.
            ConfigurationError: This worker is no trainer, or has called it before; or it has a
                cache, and with ``staleness=0`` no cached row is valid after a step.
            StepError: This worker has trained the collection before, and not all workers have
                closed it, so these tables would go on with its rows.
        """
        if self._client.trainer < 0:
            raise ConfigurationError(f"this worker is not among the trainers {self.trainers}")
        if self._optimizer is not None:
            raise ConfigurationError("these tables have an optimizer already")
        if self._cache is not None and self._client.staleness == 0:
            raise ConfigurationError(
                f"tables {self.name!r} have staleness=0, so no cached row is valid after a step; "
                "make them with a larger staleness, or without a cache"
            )
        snapshots.check_rule(rule, self.plan)
        self._client.check_begin()
        self._client.call_all("set_rule", rule)
        # A group sums before it rounds.
        touched, form = self.reader.touched, self._wire.pushed
        form = None if self._client.is_aggregated else form
        self._optimizer = TablesOptimizer(rule, touched, self._push, form)
        self.reader.is_trained = True
        return self._optimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of copies, and those of rows that were not pushed."""
        super().zero_grad(set_to_none)
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none)

    def _push(self, lr: float, pulled: Sequence[StackRequest], pushes: Pushes) -> None:
        check_capacity(self._options.layout, pushes, self._options.pushes)
        seen = min((each.version for each in pulled), default=0)
        versions = self._client.push(lr, seen, pushes)
        self.reader.note_pushed(pulled, versions)

    # Other places

    def reshard(self, plan: Plan) -> None:
        """Moves all rows and their state to the places of another plan, bit by bit. Blocks.

        All trainers call it between the same two steps, with equal plans; then training goes on.
        Servers count steps, versions and staleness anew, so the next snapshot is a full one. The
        collection has another ``name`` then, which workers that only read use from then on. Close
        streams before. If it fails, the rows are where they were.

        Args:
            plan: The same tables, at other places; the same ones are copies.

        Raises:
            PlanError: It has other tables or copies, or cuts a table by column, and the optimizer
                needs whole rows.
            ConfigurationError: This worker is no trainer, or has gradients that were not pushed; or
                another trainer could not do its part.
            TablesMismatch: Another trainer has another plan.
            CapacityError: The dynamic ids of a table do not fit on the servers of the plan.
            StepError: Not all trainers are between the same two steps.
            WorkerLost: A server or a trainer is lost.
        """
        check_type(plan, Plan, "plan", "what plan_tables returns")
        collection, client = self._collection(), self._client
        snapshots.check_move(collection, plan, has_gradients=bool(self.reader.touched))
        self._moves += 1  # Also if it fails: servers may have rows under the name for a while.
        options = self._options._replace(layout=plan.layout)
        base, _, _ = self.name.partition("@")

        def make() -> Client:
            return Client(f"{base}@{self._moves}", options, self.timeout_s)

        self._client = snapshots.moved(collection, make)
        self.plan, self._options, self.name = plan, options, self._client.name
        self.reader.forget()
        self.reader = self._made_reader(self.reader)
        client.close()

    # Rows

    @torch.no_grad()
    def weights(self, name: str) -> Tensor:
        """Returns a copy of a whole table, ``(rows, dim)``, on the CPU. Blocks.

        Raises:
            BadIds: There is no such table, or its ids are dynamic.
        """
        config = self._config(name, is_dynamic=False)
        if name in self.copies:
            return self.copied_values()[name]
        whole = torch.empty(config.rows, config.dim, dtype=config.dtype, device="cpu")
        for (_, server, rows, columns), *place in self._pieces(name):
            part = self._client.call("read", {server: tuple(place)})[server]
            whole[rows.start :: rows.step, columns.start : columns.stop] = part
        return whole

    @torch.no_grad()
    def set_weights(self, name: str, values: Tensor) -> None:
        """Sets all rows of a table; the optimizer's state stays. Blocks.

        Args:
            name: The table.
            values: ``(rows, dim)``, of the table's type.

        Raises:
            BadIds: There is no such table, its ids are dynamic, or the values do not fit; nothing
                was changed.
        """
        self._check_values(self._config(name, is_dynamic=False), values)
        if name in self.copies:
            self.copies[name].copy_(values)
        values = values.cpu()  # Servers keep rows in host memory.
        for (_, server, rows, columns), *place in self._pieces(name):
            part = values[rows.start :: rows.step, columns.start : columns.stop].contiguous()
            self._client.call("write", {server: (*place, part)})
        self.clear_cache()

    def _check_values(self, config: TableConfig, values: Tensor) -> None:
        if not isinstance(values, Tensor) or values.layout is not torch.strided or values.is_meta:
            found = kind_of(values)
            if isinstance(values, Tensor):
                found = f"a tensor of {values.layout} on {values.device}"
            raise BadIds(
                f"table {config.name!r} was given {found}; pass a dense tensor of its values",
                table=config.name,
            )
        shape = (config.rows, config.dim)
        if tuple(values.shape) != shape or values.dtype != config.dtype:
            pieces = self._pieces(config.name)
            servers = ", ".join(dict.fromkeys(each.piece.server for each in pieces))
            raise BadIds(
                f"table {config.name!r}{f' on {servers}' * bool(servers)} has {list(shape)} values "
                f"of {config.dtype}, and was given {list(values.shape)} of {values.dtype}",
                table=config.name,
                server=servers,
            )

    def _pieces(self, name: str) -> list[Held]:
        return [each for each in pieces_of(self.plan.layout) if each.piece.table == name]

    def rows(self, name: str) -> tuple[Tensor, Tensor]:
        """Returns copies of the ids of a dynamic table that have rows, and of these. Blocks.

        Returns:
            The ids, ``(n,)``, int64, rising; and their rows, ``(n, dim)``, on the CPU.

        Raises:
            BadIds: There is no such table, or its ids are not dynamic.
        """
        self._config(name, is_dynamic=True)
        parts = [each for own in self._client.call_all("rows", name).values() for each in own]
        ids, order = torch.sort(torch.cat([ids for ids, _ in parts]))
        return ids, torch.cat([rows for _, rows in parts])[order]

    def occupancy(self) -> dict[str, Occupancy]:
        """Returns how many ids of each dynamic table have rows, on all servers. Blocks."""
        return snapshots.occupancy(self._client)

    def _config(self, name: str, *, is_dynamic: bool) -> TableConfig:
        config = self.reader.checker(name).config
        if is_dynamic and config.dynamic is None:
            raise BadIds(
                f"the ids of table {name!r} are numbers of rows; read it by weights()", table=name
            )
        if not is_dynamic and config.dynamic is not None:
            raise BadIds(
                f"table {name!r} has dynamic ids, and so no rows of all ids; read those that it "
                "has by rows()",
                table=name,
            )
        return config

    # Snapshots

    def save(
        self,
        directory: str | os.PathLike[str],
        *,
        step: int,
        state: dict[str, Any] | None = None,
        keep: int | None = None,
        since: Snapshot | int | None = None,
    ) -> Snapshot:
        """Saves rows, the optimizer's state beside them, and further state. Blocks.

        One worker calls it, between two of its steps; each server writes its own rows. With
        ``staleness=0`` the other trainers need not wait, if the caller is a trainer. Otherwise no
        trainer may be in a step. Of random numbers, those of this worker are saved.

        Args:
            directory: Where snapshots are kept; see ``torchweft.checkpoint.save``.
            step: How many steps have been done.
            state: Further state of the program, such as the dense part and its optimizer; see
                ``torchweft.checkpoint.save``.
            keep: How many snapshots to keep, beside those that they follow; None for all.
            since: A snapshot of this directory, or its step, that these tables have saved or
                restored. Only the rows that changed since are written; state and copies as a whole.

        Raises:
            StepError: Servers are in the middle of a step, or a trainer has pushed meanwhile. There
                is no new snapshot.
            SnapshotNotFound: There is no snapshot of the step ``since``.
            BrokenChain: The rows of a server do not come from the snapshot ``since``.
            StateMismatch: It is of other tables or another optimizer.
            CheckpointError: A worker could not write its part.
            WorkerLost: A worker was lost. Earlier snapshots are unchanged.
        """
        with self._with_rows():
            return snapshots.save(self._collection(), directory, step, state, keep, since)

    def restore(
        self,
        directory: str | os.PathLike[str],
        *,
        state: dict[str, Any] | None = None,
        step: int | None = None,
    ) -> Snapshot:
        """Restores what ``save`` saved, also onto other servers or shards. Blocks.

        One worker calls it, when all trainers have set their optimizer, and before any looks up
        rows of the next step. Rows and state go by table, row and column. The other trainers keep
        their copies of tables and their learning rates: give them those of the caller, whose are
        restored.

        Args:
            directory: Where the snapshots are.
            state: Further state of the program, as it was saved; it is changed in place.
            step: The snapshot after this many steps; by default the last snapshot.

        Returns:
            The snapshot; its ``step`` is the number of steps that have been done.

        Raises:
            SnapshotNotFound: There is none.
            BrokenChain: A snapshot that it follows is not there, or is another one. Nothing is
                changed.
            StateMismatch: It is of other tables or another optimizer. Nothing is changed.
            StepError: Servers are in the middle of a step. Nothing is changed.
            WorkerLost: A worker was lost; restore again onto the others, in new tables.
        """
        with self._with_rows():
            snapshot = snapshots.restore(self._collection(), directory, state, step)
        self.clear_cache()
        return snapshot

    @contextmanager
    def _with_rows(self) -> Iterator[None]:
        """Runs a block that saves or restores the rows beside a module that looks them up."""
        self._has_rows_beside = True
        try:
            yield
        finally:
            self._has_rows_beside = False

    @property
    def weft_saved_by(self) -> str:
        """What a ``state_dict`` lacks, and how that is saved; for ``torchweft.checkpoint``."""
        if self._has_rows_beside or not self._client.is_open:
            return ""
        return (
            f"the rows on {', '.join(self.servers)}; save and restore by HybridModel.save or "
            "Tables.save, which take the rest as state={...}"
        )

    @property
    def lr(self) -> float | None:
        """The learning rate of the rows; None without an optimizer."""
        return None if self._optimizer is None else float(self._optimizer.param_groups[0]["lr"])

    def copied_values(self) -> dict[str, Tensor]:
        """Returns copies of the tables that each trainer has, on the CPU."""
        return {name: copy.detach().cpu().clone() for name, copy in self.copies.items()}

    @torch.no_grad()
    def take_over(self, lr: float | None, copies: Mapping[str, Tensor]) -> None:
        """Sets what ``restore`` leaves to the other trainers, as it is at the one that called it.

        Args:
            lr: The learning rate of the rows.
            copies: The values of the tables that each trainer has.
        """
        if self._optimizer is not None and lr is not None:
            self._optimizer.param_groups[0]["lr"] = lr
        for name, values in copies.items():
            self.copies[name].copy_(values)
        self.clear_cache()

    def agreed(self, action: Callable[[], T] | None, doing: str) -> T | None:
        """Does this trainer's part of something; see ``snapshots.agreed``."""
        return snapshots.agreed(self._client, action, doing)

    def _collection(self) -> snapshots.Collection:
        return snapshots.Collection(self._client, self.plan, self._optimizer, self.copies)

    def __reduce__(self) -> NoReturn:
        raise SerializationError(
            "Tables cannot be copied or sent: a copy would make steps of this trainer again, and "
            "close its rows; copy the dense part of the model alone, or keep save()"
        )

    # Figures

    def traffic(self) -> dict[str, Traffic]:
        """Returns what this trainer's lookups and pushes have moved, by table."""
        return self.reader.traffic()

    def staleness(self) -> dict[int, int]:
        """Returns how often each staleness was observed, on all servers and of all trainers.

        In the asynchronous mode it is counted in pushes, and at each push; else in steps, and at
        each pull.
        """
        total: dict[int, int] = {}
        for counts in self._client.call_all("staleness").values():
            for staleness, count in counts.items():
                total[staleness] = total.get(staleness, 0) + count
        return dict(sorted(total.items()))

    def close(self) -> None:
        """Releases the rows; they are dropped when all workers have closed the collection. Blocks.

        Raises:
            WorkerLost: A server is lost; the others have released the rows.
        """
        self.reader.forget()
        self.reader.touched.clear()
        self._client.close()


def _copies_of(plan: Plan, seed: int) -> nn.ParameterDict:
    """Returns the tables of which each trainer has a copy, by name, with their initial values."""
    copies = nn.ParameterDict()
    for config in plan.copied:
        if hasattr(copies, config.name):
            raise PlanError(
                f"a copy of a table is a parameter, and none can be named {config.name!r}; give "
                "the table another name",
                table=config.name,
            )
        values = torch.empty(config.rows, config.dim, dtype=config.dtype, device="cpu")
        fill(values, config, range(config.rows), range(config.dim), seed)
        copies[config.name] = nn.Parameter(values)
    return copies


# Options


def check_types(*, name: Any, seed: Any, cache: Any, wire: Any) -> None:
    """Checks the types of options of ``Tables`` that a ``HybridModel`` has, too.

    Raises:
        ArgumentTypeError: One is of a wrong type.
    """
    check_type(name, str, "name", "a name of the tables")
    check_type(seed, int, "seed", "an integer")
    if cache is not None:
        check_type(cache, Cache, "cache", "a Cache, such as Cache(0.1), or None")
    check_type(wire, Wire, "wire", "a Wire, such as Wire('fp16', 'fp16')")


def check_options(trainers: Sequence[str], staleness: int | None, reduction: str) -> None:
    """Checks options of ``Tables``.

    Raises:
        ConfigurationError: One of them cannot work.
    """
    if not trainers or len(set(trainers)) < len(trainers):
        raise ConfigurationError(f"trainers is {list(trainers)}; name each trainer once")
    if staleness is not None and (type(staleness) is not int or staleness < 0):
        raise ConfigurationError(
            f"staleness is {staleness!r}; pass a number of steps, or None for the asynchronous mode"
        )
    if reduction not in ("mean", "sum"):
        raise ConfigurationError(f"reduction is {reduction!r}; use 'mean' or 'sum'")


def _check_cache(cache: Cache, plan: Plan, staleness: int | None, *, is_trainer: bool) -> None:
    """Checks that rows can be kept in a cache.

    Raises:
        ConfigurationError: They cannot.
    """
    if not is_trainer:
        raise ConfigurationError(
            "this worker is not among the trainers, so it has no steps after which cached rows are "
            "pulled again; make the tables without a cache"
        )
    if staleness is None and cache.steps is None:
        raise ConfigurationError(
            "in the asynchronous mode a cache needs a limit of its own, such as Cache(steps=8)"
        )
    if staleness is not None and cache.steps is not None:
        raise ConfigurationError(
            f"a cache has steps={cache.steps}, and the tables staleness={staleness}, which limits "
            "the cache; leave steps out"
        )
    for stack in plan.layout.stacks:
        if stack.is_dynamic:
            raise ConfigurationError(
                f"table {stack.members[0].config.name!r} has dynamic ids, and a cache finds "
                "rows by numbers; make the tables without a cache, or dynamic tables apart"
            )
