"""Joining a group through a store that all its workers reach.

The machines here are generators: they yield requests to the store and to other workers, and are
sent the answers. Their shell has the store, the clock and the threads; see
``torchweft.agent.rendezvous.carry_out``. The error of a failed operation is thrown into the
generator.

*Closed*: every worker writes its registration; the leader collects them, checks them, and writes
one directory, or a refusal that says what is wrong. So all workers fail with the same reason, and
the store answers two requests per worker rather than one per pair.

*Open*: the store orders the newcomers, in one table with the ids of the workers that are there.
Each enters it last of all, reads the registrations of those before it, and introduces itself to
them. Of two that come at the same time, one reads the other's. Workers that have left or ended are
taken out of the table, with their keys: joining takes no longer because many came before.
"""

from __future__ import annotations

import dataclasses
import json
from bisect import bisect_right
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from torchweft.errors import (
    ConfigurationError,
    DuplicateName,
    RendezvousError,
    RendezvousTimeout,
)
from torchweft.ids import ID_LIMIT
from torchweft.protocol.connecting.actions import Failure
from torchweft.protocol.connecting.failures import failure_of
from torchweft.protocol.membership.registration import (
    FIRST_LATER_ID,
    LEADER,
    Directory,
    Registration,
    assemble,
    why_apart,
)

GRACE_S = 5.0
"""How much longer the others wait for the leader, which must tell them the missing ranks."""
READ_S = 0.5
"""How long the leader waits at most until all others have read the refusal."""
DIRECTORY = "directory"
"""The key of the leader's verdict: the directory of the group, or why there is none."""
PRESENT = "present"
"""The key of the table of an open group: the ids of the workers that are there, by arrival."""
_IDS = "ids"
"""The key of what ids were given: the ranks used, as ranges, and the last id of a later life."""
_OPEN, _CLOSED = "open", "closed"
_JOINED, _REFUSED = "joined", "refused"


class Set(NamedTuple):
    """A request: write a value. Answered with None."""

    key: str
    value: str | bytes


class Get(NamedTuple):
    """A request: read a key that is there. Answered with its value, as bytes."""

    key: str


class SetOnce(NamedTuple):
    """A request: write a value unless there is one. Answered with the resulting value."""

    key: str
    value: str


class Peek(NamedTuple):
    """A request: read a key that may be missing. Answered with its value as bytes, or None."""

    key: str


class Swap(NamedTuple):
    """A request: write a text if the key has another one. Answered with the resulting text.

    A missing key has the empty text. Such texts are not signed.
    """

    key: str
    expected: str
    desired: str


class Remove(NamedTuple):
    """A request: remove a key. Answered with None, also if it is not there."""

    key: str


class Check(NamedTuple):
    """A request: look for a key. Answered with whether it is there."""

    key: str


class Wait(NamedTuple):
    """A request: wait for a key, ``limit_s`` seconds at most. Answered with whether it is there.

    Attributes:
        awaited: All keys that the caller waits for in the end; if any, a long wait is reported.
    """

    key: str
    limit_s: float
    awaited: tuple[str, ...] = ()


class Introduce(NamedTuple):
    """A request: introduce this worker to others, all at the same time.

    Answered with one entry each, in order: None, or the error that shows its absence. A living
    worker with the name or rank of this worker raises DuplicateName instead.

    Attributes:
        others: The other workers.
        is_namesake: Whether they have the name or rank of this worker: it must not know them.
    """

    others: tuple[Registration, ...]
    is_namesake: bool = False


class NoteLeft(NamedTuple):
    """A request: take a worker that is gone out of the table of those that are there.

    Answered with None, even if that failed: later workers find out themselves.

    Attributes:
        worker: Its id.
        is_over: Whether its process has ended: it will not look at its fate any more.
    """

    worker: int
    is_over: bool


class Forget(NamedTuple):
    """A request: declare another worker lost. Answered with None."""

    other: Registration
    error: Exception


Request = Set | Get | SetOnce | Peek | Swap | Remove | Check | Wait | Introduce | NoteLeft | Forget
T = TypeVar("T")
Steps = Generator[Request, Any, T]


class Admission(NamedTuple):
    """A worker's place in an open group.

    Attributes:
        token: The token of this run; the key of connections is made of it.
        me: This worker's registration.
        earlier: The workers that came earlier and have not left, by id, the first first.
    """

    token: str
    me: Registration
    earlier: dict[int, Registration]


# Closed groups


def join_closed(
    me: Registration, world_size: int, token: str, timeout_s: float, clock: Callable[[], float]
) -> Steps[Directory]:
    """Registers a worker; waits for the directory of the whole group and returns it.

    Args:
        me: The worker's registration; its id is its rank.
        world_size: Number of workers of the group.
        token: The token of the run, if this worker leads; 32 hexadecimal digits.
        timeout_s: How long to wait for all workers, in seconds.
        clock: Returns the time in seconds.

    Raises:
        RendezvousTimeout: A worker did not come; the error names it.
        DuplicateName: Two workers chose the same name.
        ConfigurationError: The device maps, or versions, of the workers do not fit together.
        RendezvousError: The leader was told another number of workers, or the group is open.
    """
    start_s = clock()
    yield Set(registration_key(me.id), me.encode())
    if me.id == LEADER:
        directory = yield from _lead(world_size, token, timeout_s, clock)
    else:
        directory = yield from _follow(me.id, world_size, timeout_s, clock)
    if not directory.refusal:
        _check_directory(directory, me, world_size)
        return directory
    if directory.missing:
        raise RendezvousTimeout(directory.refusal, directory.missing, clock() - start_s)
    if directory.has_duplicates:
        raise DuplicateName(directory.refusal)
    if directory.is_misconfigured:
        raise ConfigurationError(directory.refusal)
    raise RendezvousError(directory.refusal)


def _check_directory(directory: Directory, me: Registration, world_size: int) -> None:
    """Checks that a directory is of this run: a stranger may have stored that of another run."""
    if len(directory.workers) != world_size:
        raise RendezvousError(
            f"rank {LEADER} has a group of {len(directory.workers)} workers, this rank one of "
            f"{world_size}; give all the same world_size"
        )
    if directory.workers[me.id] != me:
        raise RendezvousError(
            f"the directory of the group does not have rank {me.id} as it registered: "
            "it is of another run, or two workers have this rank; give each its own, and each run "
            "a store without keys of an earlier one"
        )


def _lead(
    world_size: int, token: str, timeout_s: float, clock: Callable[[], float]
) -> Steps[Directory]:
    """Makes and writes the directory or the refusal; waits until a refusal is read."""
    mixed = yield from _make_closed()
    if mixed:
        directory = Directory("", (), refusal=mixed)
    else:
        try:
            directory = yield from _collect(world_size, token, timeout_s, clock)
        except RendezvousError as error:  # A registration is not signed.
            directory = Directory("", (), refusal=str(error))
        except GeneratorExit:
            raise
        except BaseException as error:  # Ctrl-C: the others have come for nothing.
            reason = f"rank {LEADER} was interrupted by {type(error).__name__} while it joined"
            yield Set(DIRECTORY, Directory("", (), refusal=reason, missing=(LEADER,)).encode())
            raise
    yield Set(DIRECTORY, directory.encode())
    if directory.refusal:
        # The store may end with the leader.
        end_s = clock() + READ_S
        for rank in range(1, world_size):
            if (yield from _is_there(registration_key(rank))):
                yield Wait(_told_key(rank), end_s - clock())
    return directory


def _collect(
    world_size: int, token: str, timeout_s: float, clock: Callable[[], float]
) -> Steps[Directory]:
    start_s = clock()
    registrations: dict[int, Registration] = {}
    keys = tuple(map(registration_key, range(world_size)))
    for rank, key in enumerate(keys):
        if (yield Wait(key, start_s + timeout_s - clock(), keys)):
            registrations[rank] = Registration.decode((yield Get(key)))
            apart = why_apart(registrations.values())
            if apart:
                return Directory("", (), refusal=apart)  # More workers would not change that.
    return assemble(registrations, world_size, token, clock() - start_s)


def _follow(
    rank: int, world_size: int, timeout_s: float, clock: Callable[[], float]
) -> Steps[Directory]:
    """Waits for the directory or the refusal."""
    start_s = clock()
    keys = tuple(map(registration_key, range(world_size)))
    is_written = yield Wait(DIRECTORY, timeout_s, keys)
    # Without a leader no directory can follow.
    if not is_written and (yield from _is_there(registration_key(LEADER))):
        is_written = yield Wait(DIRECTORY, GRACE_S)
    if is_written:
        directory = Directory.decode((yield Get(DIRECTORY)))
        if directory.refusal:
            yield Set(_told_key(rank), "")
        return directory
    elapsed_s = clock() - start_s
    missing = []
    for other, key in enumerate(keys):
        if not (yield from _is_there(key)):
            missing.append(other)
    if rank in missing:
        raise RendezvousTimeout(
            f"the rendezvous store does not answer any more after {elapsed_s:.1f} s; has the "
            f"worker that hosts it, which is rank {LEADER}, ended?",
            (LEADER,),
            elapsed_s,
        )
    missing = missing or [LEADER]
    raise RendezvousTimeout(
        f"the group of {world_size} workers was not complete within {elapsed_s:.1f} s; "
        f"missing: {', '.join(f'rank {other}' for other in missing)}",
        tuple(missing),
        elapsed_s,
    )


def _is_there(key: str) -> Steps[bool]:
    """Returns whether a key is there; in a store that has ended, no key is."""
    try:
        return bool((yield Check(key)))
    except RendezvousTimeout:
        raise
    except (RuntimeError, ValueError):
        return False


def _make_closed() -> Steps[str]:
    """Marks the group of a store as closed; returns why it cannot, or an empty string."""
    # Not with SetOnce: stores for closed groups only need not support it.
    if (yield Check("kind")) and (yield Get("kind")).decode() == _OPEN:
        return _mixed(_OPEN)
    yield Set("kind", _CLOSED)
    return ""


def _mixed(there: str) -> str:
    return (
        "RPC group mixes statically and dynamically initialized members which is not supported: "
        f"this group is {there}; pass the same world_size to all its workers, or to none"
    )


def registration_key(rank: int) -> str:
    """Returns the key of a rank's registration in a closed group."""
    return f"worker/{rank}"


def _told_key(rank: int) -> str:
    return f"told/{rank}"


# Open groups


def join_open(me: Registration, token: str) -> Steps[Admission]:
    """Registers a worker, which listens already; returns it and the earlier workers.

    Args:
        me: The worker's registration; its id is taken for its rank.
        token: The token of the run if this worker is the first; 32 hexadecimal digits.

    Raises:
        RendezvousError: The group is a closed one, or its table is malformed.
        ConfigurationError: The rank is too high, or the group has had too many workers.
    """
    if me.rank >= FIRST_LATER_ID:
        raise ConfigurationError(
            f"rank {me.rank} is too high for a group without world_size; "
            f"it must be below {FIRST_LATER_ID}"
        )
    if (yield SetOnce("kind", _OPEN)).decode() != _OPEN:
        raise RendezvousError(_mixed(_CLOSED))
    own, token = token, (yield SetOnce("token", token)).decode()
    me = yield from _with_id(me, own)
    yield Set(member_key(me.id, token), me.encode())
    earlier: dict[int, Registration] = {}
    for other in (yield from _enter(me.id)):
        found = yield Peek(member_key(other, token))
        if found is not None:  # Else it has left meanwhile.
            earlier[other] = Registration.decode(found)
    return Admission(token, me, earlier)


def _enter(worker: int) -> Steps[list[int]]:
    """Enters a worker in the table of those that are there; returns those that came before."""
    text = yield Swap(PRESENT, "", json.dumps([worker]))
    while True:
        present = _numbers_in(PRESENT, text)
        if worker in present:
            return present[: present.index(worker)]
        text = yield Swap(PRESENT, text, json.dumps([*present, worker]))


def leave_open(worker: int, token: str, *, is_over: bool = True) -> Steps[None]:
    """Takes a worker out of the table of those that are there, and removes its keys.

    Args:
        worker: Its id.
        token: The token of the run.
        is_over: As for ``NoteLeft``.
    """
    text = yield Swap(PRESENT, "", "[]")
    while worker in (present := _numbers_in(PRESENT, text)):
        text = yield Swap(PRESENT, text, json.dumps([each for each in present if each != worker]))
    yield Remove(member_key(worker, token))
    if is_over:
        yield Remove(_fate_key(worker))


def _numbers_in(key: str, text: str) -> list[int]:
    """Returns the numbers in a text of the store.

    Raises:
        RendezvousError: They are no ids.
    """
    try:
        found = json.loads(text)
        if (
            isinstance(found, list)
            and len(found) <= ID_LIMIT
            and all(type(each) is int and 0 <= each <= ID_LIMIT for each in found)
        ):
            return found
    except (ValueError, RecursionError):
        pass
    raise RendezvousError(
        f"the rendezvous store's value of {key!r} is malformed: a stranger, or another version of "
        "Weft, has written it; give each group a store, or an address, of its own"
    )


def introduce(admission: Admission) -> Steps[None]:
    """Makes a newcomer and the earlier workers known to each other.

    An earlier worker with the newcomer's name or rank is asked first, alone. If it lives, no other
    worker must hear of the newcomer; if not, it is noted as left for later workers.

    Of several earlier workers with one name or rank, at most one is a member. That is the first, or
    a later one that has found the first dead. ``_confirm`` and ``_is_refused`` decide by one key of
    the store whether that later one joined before another worker found the first alive.

    Raises:
        DuplicateName: An earlier worker lives and has the newcomer's name or rank.
        RendezvousError: An earlier worker is on another host, and they cannot reach each other.
    """
    me, others = admission.me, dict[int, Registration]()
    for earlier in admission.earlier.values():
        if _are_namesakes(earlier, me):
            (error,) = yield Introduce((earlier,), is_namesake=True)
            yield NoteLeft(earlier.id, failure_of(error) is Failure.GONE)
        else:
            others[earlier.id] = earlier
    if len(others) < len(admission.earlier):
        yield from _confirm(me.id)
    apart = why_apart([me, *others.values()])
    if apart:
        raise RendezvousError(apart)
    members: list[Registration] = []
    while others:
        first, later = _first_of_each_name(others)
        # All at the same time: some may be on hosts that are gone, which do not even refuse.
        errors = yield Introduce(tuple(first.values()))
        for other, error in zip(first.values(), errors, strict=True):
            if error is None:
                members.append(other)
            else:
                yield Forget(other, error)
                if failure_of(error) is Failure.GONE:
                    yield NoteLeft(other.id, True)
        others = {}
        for worker, other in later.items():
            has_living = any(_are_namesakes(other, member) for member in members)
            if has_living and (yield from _is_refused(worker)):
                yield NoteLeft(worker, False)
            else:
                others[worker] = other


def _first_of_each_name(
    others: dict[int, Registration],
) -> tuple[dict[int, Registration], dict[int, Registration]]:
    """Returns the workers that are first of their name and rank, and the rest."""
    first: dict[int, Registration] = {}
    later: dict[int, Registration] = {}
    for worker, other in others.items():
        earlier = (*first.values(), *later.values())
        is_later = any(_are_namesakes(other, each) for each in earlier)
        (later if is_later else first)[worker] = other
    return first, later


def _are_namesakes(one: Registration, other: Registration) -> bool:
    return one.name == other.name or one.rank == other.rank


def _confirm(worker: int) -> Steps[None]:
    """Joins in place of former lives, unless a newcomer has found one of them alive."""
    if (yield SetOnce(_fate_key(worker), _JOINED)).decode() != _JOINED:
        raise DuplicateName(
            "another worker of this name or rank was alive while this one joined; if it has ended "
            "since, start this one again"
        )


def _is_refused(worker: int) -> Steps[bool]:
    """Refuses a worker whose former life lives; returns False if it joined after that died."""
    return bool((yield SetOnce(_fate_key(worker), _REFUSED)).decode() == _REFUSED)


def _with_id(me: Registration, own: str) -> Steps[Registration]:
    """Returns the registration with an id that is unique to this life of the worker.

    Args:
        me: The registration; its id is its rank.
        own: A text that no other worker has. It shows whose change of the store succeeded.
    """
    text = ""
    while True:
        last, *ranges = _numbers_in(_IDS, text.partition(" ")[2]) if text else [FIRST_LATER_ID - 1]
        is_first = not _is_in(me.rank, ranges)
        worker = me.rank if is_first else last + 1
        if not is_first and worker >= ID_LIMIT:
            raise ConfigurationError(
                f"workers have come back to this group {ID_LIMIT - FIRST_LATER_ID} times, which is "
                "all it can count; start a new group"
            )
        numbers = [last, *_with(me.rank, ranges)] if is_first else [worker, *ranges]
        desired = f"{own} {json.dumps(numbers)}"
        text = yield Swap(_IDS, text, desired)
        if text == desired:
            break
    if is_first:
        return me
    return dataclasses.replace(me, id=worker, later_rank=me.rank)


def _is_in(rank: int, ranges: list[int]) -> bool:
    """Whether a rank is in ranges, of which each has its first rank and the one after its last."""
    return bisect_right(ranges, rank) % 2 == 1


def _with(rank: int, ranges: list[int]) -> list[int]:
    """Returns ranges with one more rank, which is in none of them; adjacent ones are joined."""
    place = bisect_right(ranges, rank)
    bounds = [*ranges[:place], rank, rank + 1, *ranges[place:]]
    return [each for each in bounds if bounds.count(each) == 1]


def member_key(worker: int, token: str) -> str:
    """Returns the key of the registration of a worker of an open group."""
    # With the token, so that keys written and perhaps signed in another run do not count.
    return f"member/{worker}/{token}"


def _fate_key(worker: int) -> str:
    return f"fate/{worker}"
