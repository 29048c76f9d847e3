"""The workers of a group: registrations, checked and assembled, and the lives that each knows.

Devices are named ``cpu`` and ``cuda:0``, as by torch. A worker registers its device maps only if it
has some, or a list of devices. It counts its CUDA devices only if one of these names such a device.

``docs/protocols/membership.md`` has the messages, the guarantees and the scenarios.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from torchweft.errors import (
    ConfigurationError,
    DuplicateName,
    ProtocolError,
    RendezvousError,
    RendezvousTimeout,
    WeftError,
)
from torchweft.ids import ID_LIMIT, WorkerInfo

DEVICES = "devices"
"""Fact: the device maps of a worker, its list of devices, and its number of CUDA devices."""

_NAME = re.compile(r"cpu|cuda:(0|[1-9][0-9]{0,2})")
_NAMED = 8
"""How many workers or devices an error names."""

_MOST = 1000
"""How many CUDA devices a worker may have."""

DeviceNames = dict[str, str]
"""A device map: the receiver's device for each device of the sender."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The settings of one worker for devices.

    Attributes:
        maps: Its device map for each worker that it calls, by name.
        listed: The CUDA devices that it may use; empty for all.
        count: The number of its CUDA devices; None if it has not counted them.
    """

    maps: dict[str, DeviceNames] = field(default_factory=dict)
    listed: tuple[str, ...] = ()
    count: int | None = None

    @property
    def names_cuda(self) -> bool:
        """Whether a map or the list names a CUDA device of this worker or another."""
        return bool(self.listed) or any(
            name != "cpu" for names in self.maps.values() for pair in names.items() for name in pair
        )

    def as_facts(self) -> dict[str, Any]:
        """Returns the facts to register; none if there are neither maps nor a list."""
        if not self.maps and not self.listed:
            return {}
        return {DEVICES: {"maps": self.maps, "listed": list(self.listed), "count": self.count}}

    @staticmethod
    def read(facts: Mapping[str, Any]) -> Devices:
        """Reads the facts of a registration.

        Raises:
            ValueError: They are malformed; or a KeyError, TypeError or AttributeError.
        """
        if DEVICES not in facts:
            return NO_DEVICES
        told = facts[DEVICES]
        maps, listed, count = told["maps"], tuple(told["listed"]), told["count"]
        names = [
            name
            for worker, each in maps.items()
            for pair in _checked(worker, each).items()
            for name in pair
        ]
        for name in (*names, *listed):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise ValueError(f"it has {name!r} where a device belongs")
        if count is not None and (type(count) is not int or not 0 <= count <= _MOST):
            raise ValueError(f"it has {count!r} CUDA devices")
        return Devices(maps, listed, count)


def _checked(worker: object, names: Any) -> DeviceNames:
    if not isinstance(worker, str) or not isinstance(names, dict):
        raise TypeError(f"it has {names!r} where a device map for {worker!r} belongs")
    return names


NO_DEVICES = Devices()
"""The settings of a worker that has none."""


def check_devices(workers: Mapping[str, Devices], *, is_open: bool) -> None:
    """Checks the settings of all workers of a group against each other.

    Workers are checked in their order, so the error is about the first. It begins as that of
    ``torch.distributed.rpc``.

    Args:
        workers: The settings by the name of the worker, in the order of their ranks.
        is_open: Whether workers may join later, so that maps may be for workers not there yet.

    Raises:
        ConfigurationError: The settings of a worker are invalid, or do not fit those of another.
    """
    for name, devices in workers.items():
        _check_list(name, devices)
    for name, devices in workers.items():
        unknown = sorted(devices.maps.keys() - workers.keys())
        if unknown and not is_open:
            raise ConfigurationError(
                f"Node {name} has invalid target node names in its device maps: "
                f"{_some(map(repr, unknown))}; the group has {_some(map(repr, sorted(workers)))}"
            )
        for to, names in devices.maps.items():
            _check_map(name, devices, to, names, workers.get(to, NO_DEVICES))


def _check_list(name: str, devices: Devices) -> None:
    if len(set(devices.listed)) < len(devices.listed):
        raise ConfigurationError(
            f"Node {name} has duplicated devices: {_some(devices.listed)}; name each once"
        )
    if not _are_there(devices.listed, devices.count):
        raise ConfigurationError(
            f"Node {name} has devices with invalid indices: {_some(devices.listed)}; "
            f"{_counted(name, devices)}"
        )


def _check_map(name: str, own: Devices, to: str, names: DeviceNames, theirs: Devices) -> None:
    shown = _some(f"{here} to {there}" for here, there in names.items())
    map_of = f"in its device map for {to} ({shown})"
    if len(set(names.values())) < len(names):
        raise ConfigurationError(
            f"Node {name} has duplicated target devices {map_of}; map each to a device of its own"
        )
    for kind, wanted, worker, devices in (
        ("source", names.keys(), name, own),
        ("target", names.values(), to, theirs),
    ):
        if devices.listed:
            if not _are_listed(wanted, devices.listed):
                raise ConfigurationError(
                    f"Node {name} has unexpected {kind} devices {map_of}; worker {worker!r} lists "
                    f"{_some(devices.listed)} as its devices"
                )
        elif not _are_there(wanted, devices.count):
            raise ConfigurationError(
                f"Node {name} has {kind} devices with invalid indices {map_of}; "
                f"{_counted(worker, devices)}"
            )


def _are_listed(names: Iterable[str], listed: Collection[str]) -> bool:
    return all(name == "cpu" or name in listed for name in names)


def _are_there(names: Iterable[str], count: int | None) -> bool:
    if count is None:
        return True
    return all(name == "cpu" or int(name.removeprefix("cuda:")) < count for name in names)


def _counted(worker: str, devices: Devices) -> str:
    if not devices.count:
        return f"worker {worker!r} has no CUDA device"
    return f"worker {worker!r} has {_some(f'cuda:{index}' for index in range(devices.count))}"


def _some(texts: Iterable[str]) -> str:
    first = list(itertools.islice(texts, _NAMED + 1))
    return ", ".join(first[:_NAMED]) + (", ..." if len(first) > _NAMED else "")


LEADER = 0
"""The rank that collects the registrations of a closed group, and leads its shutdown."""

STRICT = "strict"
"""Fact: whether the worker refuses pickles."""

HOST, NETWORK = "host", "network"
"""Facts of a worker: the host's name, for messages; an identifier of the network stack, empty if
unknown."""

IS_FAR, HAS_SECRET = "is_far", "has_secret"
"""Facts: whether other hosts can reach the worker, and whether it has a secret."""

VERSIONS, PYTHON = "versions", "Python"
"""Fact: the versions that a worker runs; and in it, the version of Python, like 3.11."""
REFUSES_VERSIONS = "refuses_versions"
"""Fact: whether the worker joins no group in which others have another minor version of torch."""
_VERSION_LIMIT = 32
_HOST_LIMIT = 64
"""How many characters of a host's name an error shows."""

# Raised by malformed JSON, an unexpected shape, or endless nesting.
_NONSENSE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Registration:
    """A worker's description of itself when it joins.

    Attributes:
        name: Its name, unique in the group.
        id: Its id in the protocols; in a closed group its rank.
        addresses: Where it listens, best first.
        main: The identity of its ``__main__``, or empty if no other worker can have the same.
        facts: Its channels' capabilities, whether it reads pickles, and its device maps.
        later_rank: Its rank if that is not its id, as in most open groups.
    """

    name: str
    id: int
    addresses: tuple[str, ...]
    main: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    later_rank: int | None = None

    @property
    def rank(self) -> int:
        """Its rank, the number that programs use."""
        return self.id if self.later_rank is None else self.later_rank

    @property
    def is_strict(self) -> bool:
        """Whether it refuses pickles."""
        return self.facts.get(STRICT) is True

    @property
    def devices(self) -> Devices:
        """Its device maps, and its list and number of CUDA devices."""
        return Devices.read(self.facts)

    @property
    def info(self) -> WorkerInfo:
        """The public part."""
        return WorkerInfo(self.name, self.rank)

    def as_json(self) -> dict[str, Any]:
        """Returns a JSON-compatible form; ``decode`` reads it."""
        return asdict(self)

    def encode(self) -> bytes:
        """Returns the registration as JSON."""
        return json.dumps(self.as_json()).encode()

    @staticmethod
    def decode(data: bytes | dict[str, Any]) -> Registration:
        """Reads the output of ``encode``; raises ProtocolError if it is malformed."""
        try:
            fields = data if isinstance(data, dict) else json.loads(data)
            registration = Registration(**{**fields, "addresses": tuple(fields["addresses"])})
            _check(registration.name, str)
            _check_number(registration.id)
            _check_all(registration.addresses, str)
            _check(registration.main, str)
            _check(registration.facts, dict)
            Devices.read(registration.facts)
            if registration.later_rank is not None:
                _check_number(registration.later_rank)
            return registration
        except _NONSENSE as error:
            raise ProtocolError(f"a worker's registration is malformed: {error}") from error


_REFUSALS: dict[str, Callable[[str], WeftError]] = {
    kind.__name__: kind
    for kind in (RendezvousError, RendezvousTimeout, DuplicateName, ConfigurationError)
}
"""The errors of a group that could not be formed, by the name in its directory."""


@dataclass(frozen=True, slots=True)
class Directory:
    """All workers of a group, or why there is none.

    Attributes:
        token: The token of this run; the key of connections is made of it.
        workers: One registration per rank, in order; empty if there is no group.
        refusal: Why there is no group. Empty if there is one, or if a later round has begun.
        kind: The name of the error that each worker raises for the refusal.
        missing: Ranks that never came, if that is the reason.
    """

    token: str
    workers: tuple[Registration, ...]
    refusal: str = ""
    kind: str = ""
    missing: tuple[int, ...] = ()

    @staticmethod
    def refused(error: RendezvousError | ConfigurationError) -> Directory:
        """Returns the verdict that there is no group, because of an error."""
        missing = error.missing if isinstance(error, RendezvousTimeout) else ()
        return Directory("", (), str(error), type(error).__name__, missing)

    def error(self, elapsed_s: float) -> WeftError:
        """Returns the error of a refusal; ``elapsed_s`` is how long this worker has waited."""
        if self.missing:
            return RendezvousTimeout(self.refusal, self.missing, elapsed_s)
        return _REFUSALS.get(self.kind, RendezvousError)(self.refusal)

    def encode(self) -> bytes:
        """Returns the directory as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Directory:
        """Reads the output of ``encode``; raises ProtocolError if it is malformed."""
        try:
            fields = json.loads(data)
            workers = tuple(Registration.decode(worker) for worker in fields.pop("workers"))
            missing = tuple(fields.pop("missing"))
            directory = Directory(workers=workers, missing=missing, **fields)
            _check_all((directory.token, directory.refusal, directory.kind), str)
            _check_all(missing, int)
            return directory
        except _NONSENSE as error:
            raise ProtocolError(f"the group's directory is malformed: {error}") from error


def _check(value: object, wanted: type) -> None:
    if type(value) is not wanted:
        raise TypeError(f"it has {value!r} where a {wanted.__name__} belongs")


def _check_all(values: Iterable[object], wanted: type) -> None:
    for value in values:
        _check(value, wanted)


def _check_number(value: int) -> None:
    _check(value, int)
    if value < 0:
        raise ValueError(f"no worker has the number {value}")


def assemble(
    registrations: dict[int, Registration], world_size: int, token: str, waited_s: float
) -> Directory:
    """Returns the group of the given workers.

    Raises:
        RendezvousTimeout: Ranks are missing.
        DuplicateName: Two workers chose the same name.
        ConfigurationError: The device maps, or versions, of the workers do not fit together.
    """
    missing = tuple(rank for rank in range(world_size) if rank not in registrations)
    if missing:
        came = ", ".join(f"{r.name!r} (rank {r.id})" for r in registrations.values()) or "nobody"
        raise RendezvousTimeout(
            f"{_ranks(missing)} of {world_size} did not join within {waited_s:.1f} s; "
            f"came: {came}. Start every rank, with the same init method and world size",
            missing,
            waited_s,
        )
    by_name: dict[str, int] = {}
    for rank in range(world_size):
        name = registrations[rank].name
        if name in by_name:
            raise DuplicateName(
                f"worker name {name!r} is not unique: ranks {by_name[name]} and {rank} "
                f"both call themselves {name!r}; give every worker its own name"
            )
        by_name[name] = rank
    workers = tuple(registrations[rank] for rank in range(world_size))
    check_devices({each.name: each.devices for each in workers}, is_open=False)
    check_versions(workers)
    return Directory(token, workers)


def why_apart(registrations: Iterable[Registration]) -> str:
    """Returns why some workers cannot reach each other, and the remedy, or an empty string."""
    known = [each for each in registrations if _network(each)]
    near = [each for each in known if not each.facts.get(IS_FAR)]
    if not near or len({_network(each) for each in known}) == 1:
        return ""
    other = next(each for each in known if _network(each) != _network(near[0]))
    if all(each.facts.get(HAS_SECRET) is True for each in near):
        shown = ", ".join(map(_placed, near[:_NAMED])) + (", ..." if len(near) > _NAMED else "")
        return (
            f"worker {_placed(other)} is on another host than some that listen on loopback only: "
            f"{shown}. Set WEFT_LISTEN on each of their hosts to its address in the network, or "
            "pass listen=..."
        )
    return (
        f"worker {_placed(near[0])} and worker {_placed(other)} are on different hosts, or in "
        "containers with networks of their own. Between hosts, only workers that share a secret "
        "connect, so that no stranger can run anything on them:\n"
        "    torchweft secret new weft.secret        # once; copy the file to every host\n"
        "    export WEFT_SECRET_FILE=weft.secret     # on every host, before the program starts"
    )


def versions_of(registration: Registration) -> dict[str, str]:
    """Returns the versions of Python, torch and Weft that a worker has told."""
    told = registration.facts.get(VERSIONS)
    if not isinstance(told, dict):
        return {}
    return {
        name: told[name][:_VERSION_LIMIT]
        for name in (PYTHON, "torch", "Weft")
        if isinstance(told.get(name), str)
    }


def differences(me: Registration, other: Registration) -> str:
    """Returns the versions in which another worker differs, or an empty string."""
    mine, theirs = versions_of(me), versions_of(other)
    return ", ".join(
        f"{name} {theirs[name]} (here {mine[name]})"
        for name in mine
        if name in theirs and _public(theirs[name]) != _public(mine[name])
    )


def check_versions(workers: Sequence[Registration]) -> None:
    """Checks that workers run one minor version of torch, if one of them asks for that.

    Raises:
        ConfigurationError: Two of them do not; names them, their hosts and versions.
    """
    places: dict[tuple[str, ...], Registration] = {}
    for each in workers:
        version = versions_of(each).get("torch")
        if version:
            places.setdefault(tuple(version.split(".")[:2]), each)
    if len(places) < 2 or not any(each.facts.get(REFUSES_VERSIONS) is True for each in workers):
        return
    found = list(places.values())[:_NAMED]
    told = ", ".join(
        f"torch {versions_of(each)['torch']} on worker {_placed(each)}" for each in found
    )
    raise ConfigurationError(
        f"the workers run different versions of torch: {told}. Install one version on all hosts, "
        f"for instance: pip install torch=={_public(versions_of(found[0])['torch'])}. Workers that "
        "only exchange tensors may work together nevertheless: give all of them the option "
        "other_versions='warn'"
    )


def why_not_by_value(me: Registration, other: Registration) -> str:
    """Returns why functions cannot travel by value between two workers, or an empty string.

    The bytecode of functions differs between minor versions of Python.
    """
    mine, theirs = versions_of(me).get(PYTHON, ""), versions_of(other).get(PYTHON, "")
    if not mine or not theirs or mine == theirs:
        return ""
    return (
        f"worker {other.name!r} runs Python {theirs}, this one {mine}: functions do not travel by "
        "value between them"
    )


def _public(version: str) -> str:
    # Builds of one version for different devices work together.
    return version.partition("+")[0]


def _network(registration: Registration) -> str:
    network = registration.facts.get(NETWORK)
    return network if isinstance(network, str) else ""


def _placed(registration: Registration) -> str:
    told = registration.facts.get(HOST)
    host = told[:_HOST_LIMIT] if isinstance(told, str) else "unknown"
    return f"{registration.name!r} (rank {registration.rank}, host {host})"


def _ranks(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(str(rank) for rank in ranks[:16]) + (", ..." if len(ranks) > 16 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


ENDED_LIMIT = 256
"""How many lives that are over a worker of an open group remembers, except for their ids."""


# The lives that one worker knows, and the names that programs use.


class Life(Protocol):
    """The part of a worker that the roster needs."""

    @property
    def registration(self) -> Registration:
        """The worker's registration."""

    @property
    def is_over(self) -> bool:
        """Whether the worker is lost or has left."""


L = TypeVar("L", bound=Life)


class _Lives(dict[int, L]):
    """Lives by id; ``recall`` makes those that are missing."""

    def __init__(self, recall: Callable[[int], L]) -> None:
        self._recall = recall

    def __missing__(self, worker: int) -> L:
        return self._recall(worker)


class Roster(Generic[L]):
    """The members of a group by id, which names one life, and by the names that programs use.

    Lost workers are still found by name, so that calls to them raise WorkerLost, until another life
    takes the name. Departed workers are not. Of the lives of an open group that are over, with a
    name or without, the latest ``ENDED_LIMIT`` stay in the tables. Of earlier ones only the ids
    stay, as a group may live long.
    Lookups in the tables are thread-safe; all other methods are not.

    Args:
        me: This worker.
        others: All other workers known so far.
        recall: Makes an ended life for an id that is not in ``by_id``.
        is_open: Whether workers may join and leave later.

    Attributes:
        by_id: The lives that this worker knows, also the latest of those that are over.
        by_name: The lives that programs find by name.
        by_rank: The lives that programs find by rank.
    """

    def __init__(
        self, me: L, others: Iterable[L], recall: Callable[[int], L], *, is_open: bool
    ) -> None:
        self.is_open = is_open
        self.by_id: dict[int, L] = _Lives(recall)
        self.by_name: dict[str, L] = {}
        self.by_rank: dict[int, L] = {}
        self._me = me
        self._introduced: set[int] = set()
        self._former: dict[int, L] = {}
        """In an open group, the lives in the tables that are over, or have no name any more, the
        earliest first."""
        self._forgotten: set[int] = set()
        self._recalled: set[int] = set()
        """Ids in the tables of lives that this worker knows from others' messages alone. Whoever
        joins with such an id is a new life all the same."""
        for life in (me, *others):
            self.admit(life)

    def arrival(self, registration: Registration) -> tuple[L | None, tuple[L, ...]]:
        """Looks up the life of a registration; a new life is to be given to ``admit``.

        Returns:
            The known life with this id, or None for a new life; and the former lives with the name
            or rank of a new life, which are over.

        Raises:
            ProtocolError: The group is closed, or there is no such id.
            DuplicateName: The registration has the name or rank of this worker.
        """
        known = self.by_id.get(registration.id)
        if known is not None and registration.id not in self._recalled:
            return known, ()
        if not self.is_open or not 0 <= registration.id < ID_LIMIT:
            raise ProtocolError(f"there is no worker of id {registration.id}")
        former = self._namesakes(registration)
        if self._me in former:
            me = self._me.registration
            raise DuplicateName(f"worker {me.name!r} (rank {me.rank}) lives")
        return None, former

    def _namesakes(self, registration: Registration) -> tuple[L, ...]:
        of_name = self.by_name.get(registration.name)
        of_rank = self.by_rank.get(registration.rank)
        found = (of_name,) if of_name is of_rank else (of_name, of_rank)
        return tuple(life for life in found if life is not None)

    def is_replaced(self, registration: Registration) -> bool:
        """Returns whether a later life of its name or rank has introduced itself meanwhile.

        For registrations read from the store: the life is then over, since the later life asked it
        and got no answer.
        """
        return any(
            life.registration.id in self._introduced
            for life in self._namesakes(registration)
            if life.registration.id != registration.id
        )

    def admit(self, life: L, *, is_introduced: bool = False) -> None:
        """Adds a new life in place of former lives of its name or rank.

        Args:
            life: The life.
            is_introduced: Whether the life itself said that it has joined.
        """
        registration = life.registration
        if is_introduced:
            self._introduced.add(registration.id)
        for former in self._namesakes(registration):
            self.retire(former)
        if registration.id in self._recalled:
            self._recalled.remove(registration.id)
            del self._former[registration.id]
        self.by_id[registration.id] = life
        self.by_name[registration.name] = life
        self.by_rank[registration.rank] = life

    def may_have_been(self, worker: int) -> bool:
        """Returns whether an id may be of a life that this worker never knew."""
        return self.is_open and 0 <= worker < ID_LIMIT

    def lose(self, life: L) -> None:
        """Notes that a life is lost; in an open group, the earliest of many are forgotten."""
        if self.is_open and self.by_id.get(life.registration.id) is life:
            self._former.setdefault(life.registration.id, life)
            self._forget_earliest()

    def retire(self, life: L) -> None:
        """Stops a life that leaves, or is over, from being found by name or rank."""
        self._take_name(life)
        self._former.setdefault(life.registration.id, life)
        self._forget_earliest()

    def _take_name(self, life: L) -> None:
        registration = life.registration
        self._introduced.discard(registration.id)
        if self.by_name.get(registration.name) is life:
            del self.by_name[registration.name]
        if self.by_rank.get(registration.rank) is life:
            del self.by_rank[registration.rank]

    def _forget_earliest(self) -> None:
        # A life that was replaced may be declared lost much later than its successors, or never.
        over = [worker for worker, life in self._former.items() if life.is_over]
        for worker in over[:-ENDED_LIMIT]:
            self._take_name(self._former.pop(worker))
            self.by_id.pop(worker, None)
            if worker in self._recalled:
                self._recalled.remove(worker)
            else:
                self._forgotten.add(worker)

    def former(self, name: str, rank: int) -> L | None:
        """Returns the latest life of a name and rank that is not found by them any more, if any."""
        for life in reversed(self._former.values()):
            if (life.registration.name, life.registration.rank) == (name, rank):
                return life
        return None

    def remember(self, life: L) -> None:
        """Adds a life that is over, of which others spoke, so that it is found by its id."""
        if not self.is_forgotten(life.registration.id):
            self._recalled.add(life.registration.id)
        self.by_id[life.registration.id] = self._former[life.registration.id] = life
        self._forget_earliest()

    def is_forgotten(self, worker: int) -> bool:
        """Returns whether an id is of a life that is over and not in the tables any more."""
        return worker in self._forgotten and worker not in self.by_id
