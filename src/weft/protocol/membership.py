"""Who belongs to a group: the registrations of all workers, checked and put together."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from weft.errors import ProtocolError
from weft.ids import WorkerInfo

FIRST_LATER_ID = 1 << 14
"""In an open group: ids below are those of the first lives of ranks."""
ID_LIMIT = 1 << 15

STRICT = "strict"
"""The fact that a worker reads no pickles."""

# What comes of JSON that is none, or of another shape, or nested without end.
_NONSENSE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


@dataclass(frozen=True, slots=True)
class Registration:
    """What a worker tells the group when it joins.

    Attributes:
        name: Its name, unique in the group.
        id: What the protocols name it by; in a closed group its rank.
        addresses: Where it listens, best first.
        main: What its ``__main__`` is, or empty where no other worker can have the same.
        facts: What its channels can do, and whether it reads pickles.
        later_rank: Its rank where that is not its id: in an open group, once the rank was used.
    """

    name: str
    id: int
    addresses: tuple[str, ...]
    main: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    later_rank: int | None = None

    @property
    def rank(self) -> int:
        """Its number for programs."""
        return self.id if self.later_rank is None else self.later_rank

    @property
    def is_strict(self) -> bool:
        """Whether it reads no pickles."""
        return self.facts.get(STRICT) is True

    @property
    def info(self) -> WorkerInfo:
        """The public part."""
        return WorkerInfo(self.name, self.rank)

    def as_json(self) -> dict[str, Any]:
        """Returns what JSON can hold; ``decode`` reads it."""
        return asdict(self)

    def encode(self) -> bytes:
        """Returns the registration as JSON."""
        return json.dumps(self.as_json()).encode()

    @staticmethod
    def decode(data: bytes | dict[str, Any]) -> Registration:
        """Reads what ``encode`` wrote; raises ProtocolError where it makes no sense."""
        try:
            fields = data if isinstance(data, dict) else json.loads(data)
            registration = Registration(**{**fields, "addresses": tuple(fields["addresses"])})
            _check(registration.name, str)
            _check_number(registration.id)
            _check_all(registration.addresses, str)
            _check(registration.main, str)
            _check(registration.facts, dict)
            if registration.later_rank is not None:
                _check_number(registration.later_rank)
            return registration
        except _NONSENSE as error:
            raise ProtocolError(f"a worker's registration makes no sense: {error}") from error


@dataclass(frozen=True, slots=True)
class Directory:
    """All workers of a group.

    Attributes:
        token: What names this run: the key of connections is made of it.
        workers: One registration a rank, in order.
        refusal: Why there is no group, where there is none; empty otherwise.
        missing: Ranks that never came, where that is the reason.
        has_duplicates: Whether two workers chose the same name, where that is the reason.
    """

    token: str
    workers: tuple[Registration, ...]
    refusal: str = ""
    missing: tuple[int, ...] = ()
    has_duplicates: bool = False

    def encode(self) -> bytes:
        """Returns the directory as JSON."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(data: bytes) -> Directory:
        """Reads what ``encode`` wrote; raises ProtocolError where it makes no sense."""
        try:
            fields = json.loads(data)
            workers = tuple(Registration.decode(worker) for worker in fields.pop("workers"))
            missing = tuple(fields.pop("missing"))
            directory = Directory(workers=workers, missing=missing, **fields)
            _check_all((directory.token, directory.refusal), str)
            _check_all(missing, int)
            _check(directory.has_duplicates, bool)
            return directory
        except _NONSENSE as error:
            raise ProtocolError(f"the directory of the group makes no sense: {error}") from error


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
    """Puts a group together out of those who came, or says why there is none."""
    missing = tuple(rank for rank in range(world_size) if rank not in registrations)
    if missing:
        came = ", ".join(f"{r.name!r} (rank {r.id})" for r in registrations.values()) or "nobody"
        return Directory(
            token,
            (),
            refusal=f"{_ranks(missing)} of {world_size} did not join within {waited_s:.1f} s; "
            f"came: {came}. Start every rank, with the same init method and world size",
            missing=missing,
        )
    by_name: dict[str, int] = {}
    for rank in range(world_size):
        name = registrations[rank].name
        if name in by_name:
            return Directory(
                token,
                (),
                refusal=f"worker name {name!r} is not unique: ranks {by_name[name]} and {rank} "
                f"both call themselves {name!r}; give every worker its own name",
                has_duplicates=True,
            )
        by_name[name] = rank
    return Directory(token, tuple(registrations[rank] for rank in range(world_size)))


def _ranks(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(str(rank) for rank in ranks[:16]) + (", ..." if len(ranks) > 16 else "")
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
