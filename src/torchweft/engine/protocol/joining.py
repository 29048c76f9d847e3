"""Joining a group through a store that all its workers reach.

The machines here are generators: they yield requests to the store and to other workers, and are
sent the answers. Their shell has the store, the clock and the threads; see
``torchweft.engine.worker.rendezvous.carry_out``. The error of a failed operation is thrown into the
generator.

All keys of a group have its token, a random number, so that keys of another run do not count.

*Closed*: the leader begins a *round* by writing its token. Every worker writes its registration;
the leader collects them, checks them, and writes one directory, or a refusal that says what is
wrong. So all workers fail with the same reason, and the store answers a few requests per worker
rather than one per pair. A store may outlive the workers, such as that in torchrun's agent, and a
process may join several groups at one store. So a worker may find a round that is over: one that
this process has been in, or whose verdict came before its registration. It then waits for the next
round; each leader notes the round that follows the one it has found. All these waits are for keys,
without polling. The number of restarts would not tell rounds apart: each agent of torchrun counts
only the failures of its own workers.

*Open*: the store orders the newcomers, in one table with the ids of the workers that are there.
Each enters it, reads the registrations of those before it, and introduces itself to them. Of two
that come at the same time, one reads the other's. Workers that have left or ended are taken out of
the table, with their keys: joining takes no longer because many came before. So nobody writes a key
before it is in the table: if it is killed next, nobody would know of its key. It enters the table
with its registration, which stays there until a later newcomer sees the key.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, NamedTuple, TypeVar

from torchweft.engine.protocol.connecting import Failure, failure_of
from torchweft.engine.protocol.registration import (
    LEADER,
    Directory,
    Registration,
    assemble,
    why_apart,
)
from torchweft.errors import (
    ConfigurationError,
    DuplicateName,
    RendezvousError,
    RendezvousTimeout,
    WeftError,
)
from torchweft.ids import ID_LIMIT

GRACE_S = 5.0
"""How much longer the others wait for the leader, which must tell them the missing ranks."""
READ_S = 0.5
"""How long the leader waits at most until all others have read the refusal."""
ROUND = "round"
"""The key of the token of a closed group's latest round."""
PRESENT = "present"
"""The key of the table of an open group: the workers that are there, by arrival."""
KIND = "kind"
"""The key of the kind of a group."""
_OPEN, _CLOSED = "open", "closed"
_JOINED, _REFUSED = "joined", "refused"


class Ask(NamedTuple):
    """A request: perform an operation of the store. Answered with its result.

    Attributes:
        operation: The name of a method of ``SignedStore``.
        key: The key.
        values: The further arguments of the method.
    """

    operation: str
    key: str
    values: tuple[str | bytes, ...] = ()


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


class Forget(NamedTuple):
    """A request: declare another worker lost. Answered with None."""

    other: Registration
    error: Exception


Request = Ask | Wait | Introduce | Forget
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
    me: Registration,
    world_size: int,
    token: str,
    timeout_s: float,
    clock: Callable[[], float],
    over: deque[str],
    *,
    is_kept: bool = False,
) -> Steps[Directory]:
    """Registers a worker; waits for the directory of the whole group and returns it.

    Args:
        me: The worker's registration; its id is its rank.
        world_size: Number of workers of the group.
        token: The token of the run, if this worker leads; 32 hexadecimal digits.
        timeout_s: How long to wait for all workers, in seconds.
        clock: Returns the time in seconds.
        over: The tokens of the rounds that this process has been in, the latest last; gets that of
            this one with its verdict.
        is_kept: Whether the store keeps groups of former lives of these workers, as torchrun's.

    Raises:
        RendezvousTimeout: A worker did not come; the error names it.
        DuplicateName: Two workers chose the same name.
        ConfigurationError: The device maps, or versions, of the workers do not fit together.
        RendezvousError: The leader was told another number of workers, or the group is open.
    """
    start_s = clock()
    yield Ask("set", arrival_key(me.id), ("",))
    if me.id == LEADER:
        directory = yield from _lead(me, world_size, token, timeout_s, clock, over)
    else:
        directory = yield from _follow(me, world_size, timeout_s, clock, over, is_kept=is_kept)
    if directory.refusal:
        raise directory.error(clock() - start_s)
    _check_directory(directory, me, world_size)
    return directory


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
    me: Registration,
    world_size: int,
    token: str,
    timeout_s: float,
    clock: Callable[[], float],
    over: deque[str],
) -> Steps[Directory]:
    """Makes and writes the directory or the refusal; waits until a refusal is read."""
    start_s = clock()
    yield Ask("set", worker_key(me.id, token), (me.encode(),))
    try:
        yield from _begin_round(token, over)
        yield from _make_closed()
        directory = yield from _collect(world_size, token, start_s, timeout_s, clock)
    except (RendezvousError, ConfigurationError) as error:
        directory = Directory.refused(error)
    except GeneratorExit:
        raise
    except BaseException as error:  # Ctrl-C: the others have come for nothing.
        reason = f"rank {LEADER} was interrupted by {type(error).__name__} while it joined"
        interrupted = RendezvousTimeout(reason, (LEADER,))
        over.append(token)
        yield Ask("set", directory_key(token), (Directory.refused(interrupted).encode(),))
        raise
    over.append(token)
    yield Ask("set", directory_key(token), (directory.encode(),))
    if directory.refusal:
        # The store may end with the leader.
        end_s = clock() + READ_S
        for rank in range(1, world_size):
            if (yield from _is_there(worker_key(rank, token))):
                yield Wait(_told_key(rank, token), end_s - clock())
    return directory


def _begin_round(token: str, over: deque[str]) -> Steps[None]:
    """Begins a round, and calls workers that wait in earlier ones into it."""
    # A file may have been made anew since: then its workers wait in the round of this process.
    earlier = {*list(over)[-1:]}
    if (yield Ask("has", ROUND)):
        earlier.add((yield Ask("glance", ROUND)))
    yield Ask("set", ROUND, (token,))
    for each in earlier:
        yield Ask("set", _next_key(each), (token,))
        if not (yield Ask("has", directory_key(each))):  # Its leader has ended before the verdict.
            yield Ask("set", directory_key(each), (Directory(each, ()).encode(),))


def _collect(
    world_size: int, token: str, start_s: float, timeout_s: float, clock: Callable[[], float]
) -> Steps[Directory]:
    """Returns the directory of the group; raises the error that says why there is none."""
    registrations: dict[int, Registration] = {}
    keys = tuple(worker_key(rank, token) for rank in range(world_size))
    for rank, key in enumerate(keys):
        if (yield Wait(key, start_s + timeout_s - clock(), keys)):
            registrations[rank] = Registration.decode((yield Ask("get", key)))
            apart = why_apart(registrations.values())
            if apart:
                raise RendezvousError(apart)  # More workers would not change that.
    return assemble(registrations, world_size, token, clock() - start_s)


def _follow(
    me: Registration,
    world_size: int,
    timeout_s: float,
    clock: Callable[[], float],
    over: deque[str],
    *,
    is_kept: bool,
) -> Steps[Directory]:
    """Registers in each round, and waits for the directory or the refusal of one that goes on."""
    start_s = clock()
    end_s = start_s + timeout_s
    arrivals = tuple(map(arrival_key, range(world_size)))
    directory: Directory | None = None
    key = ROUND
    while (yield Wait(key, end_s - clock(), arrivals)):
        # A worker without the secret must register, too: only then does the leader hear of it.
        token = yield Ask("glance", key)
        key = _next_key(token)
        is_late = yield Ask("has", directory_key(token))
        yield Ask("set", worker_key(me.id, token), (me.encode(),))
        if not (yield Wait(directory_key(token), end_s + GRACE_S - clock(), arrivals)):
            break
        directory = Directory.decode((yield Ask("get", directory_key(token))))
        is_over = not (directory.refusal or directory.workers) or token in over
        if is_late and not is_over:
            is_over = bool(directory.missing) if directory.refusal else is_kept
        if not is_over:
            over.append(token)
            if directory.refusal:
                yield Ask("set", _told_key(me.id, token), ("",))
            return directory
    if directory is not None and directory.missing:
        return directory  # Why the latest round was in vain; no other one has begun.
    elapsed_s = clock() - start_s
    missing = []
    for other, arrival in enumerate(arrivals):
        if not (yield from _is_there(arrival)):
            missing.append(other)
    if me.id in missing:
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
        return bool((yield Ask("has", key)))
    except RendezvousTimeout:
        raise
    except (RuntimeError, ValueError):
        return False


def _make_closed() -> Steps[None]:
    """Marks the group of a store as closed; raises RendezvousError if it is open."""
    # Not with SetOnce: stores for closed groups only need not support it.
    if (yield Ask("has", KIND)) and (yield Ask("get", KIND)).decode() == _OPEN:
        raise _mixed(_OPEN)
    yield Ask("set", KIND, (_CLOSED,))


def _mixed(there: str) -> RendezvousError:
    """Returns the error of a worker whose group is of another kind than that of its store."""
    return RendezvousError(
        "RPC group mixes statically and dynamically initialized members which is not supported: "
        f"this group is {there}; pass the same world_size to all its workers, or to none"
    )


def arrival_key(rank: int) -> str:
    """Returns the key that tells that a rank has come, whether or not a round has begun."""
    return f"arrived/{rank}"


def worker_key(rank: int, token: str) -> str:
    """Returns the key of the registration of a worker of a closed group."""
    return f"worker/{rank}/{token}"


def directory_key(token: str) -> str:
    """Returns the key of the leader's verdict: the directory of the group, or why there is none."""
    return f"directory/{token}"


def _next_key(token: str) -> str:
    return f"next/{token}"


def _told_key(rank: int, token: str) -> str:
    return f"told/{rank}/{token}"


# Open groups


class _Table(NamedTuple):
    """The table of an open group.

    Attributes:
        last: The last id that a worker has got; -1 if there was no worker yet.
        present: The workers that are there, by id, in the order of their arrival; each with its
            registration as ``Sign`` made it, or None if that has a key of its own.
    """

    last: int
    present: dict[int, str | None]

    def encode(self) -> str:
        """Returns the text of the store."""
        entries = [worker if own is None else [worker, own] for worker, own in self.present.items()]
        return json.dumps([self.last, *entries])

    @staticmethod
    def decode(text: str) -> _Table:
        """Reads the output of ``encode``; the empty text is that of a new store.

        Raises:
            RendezvousError: It is malformed.
        """
        if not text:
            return _Table(-1, {})
        try:
            last, *entries = json.loads(text)
            pairs: list[Any] = [
                each if isinstance(each, list) else [each, None] for each in entries
            ]
            present: dict[int, str | None] = dict(pairs)
            is_sound = all(type(each) is int and -1 <= each < ID_LIMIT for each in (last, *present))
            if is_sound and all(own is None or isinstance(own, str) for own in present.values()):
                return _Table(last, present)
        except (ValueError, TypeError, RecursionError):
            pass
        raise RendezvousError(
            f"the rendezvous store's value of {PRESENT!r} is malformed: a stranger, or another "
            "version of Weft, has written it; give each group a store, or an address, of its own"
        )

    def without(self, worker: int) -> _Table:
        """Returns the table without one of the workers."""
        return self._replace(present={w: own for w, own in self.present.items() if w != worker})


def join_open(me: Registration, token: str) -> Steps[Admission]:
    """Registers a worker, which listens already; returns it and the earlier workers.

    Args:
        me: The worker's registration; its id is taken for its rank.
        token: The token of the run if this worker is the first; 32 hexadecimal digits.

    Raises:
        RendezvousError: The group is a closed one, or its table is malformed.
        ConfigurationError: The group has had too many workers.
    """
    if (yield Ask("set_once", KIND, (_OPEN,))).decode() != _OPEN:
        raise _mixed(_CLOSED)
    token = (yield Ask("set_once", "token", (token,))).decode()
    me, before, read = yield from _enter(me, token)
    yield Ask("set", member_key(me.id, token), (me.encode(),))
    earlier: dict[int, Registration] = {}
    for worker, own in before.items():
        if own is not None:
            found = yield Ask("verify", member_key(worker, token), (own,))
        else:
            found = read.get(worker) or (yield Ask("peek", member_key(worker, token)))
        if found is not None:
            earlier[worker] = Registration.decode(found)
        else:  # It has left meanwhile, or was killed while it left.
            yield from _note_left(worker, token, is_over=False)
    return Admission(token, me, earlier)


def _enter(
    me: Registration, token: str
) -> Steps[tuple[Registration, dict[int, str | None], dict[int, bytes]]]:
    """Enters a worker in the table of those that are there.

    Returns:
        Its registration with an id that is unique to this life of the worker; those that came
        before, as in the table; and the registrations of some of them.
    """
    text, read = "", dict[int, bytes]()
    while True:
        table = _Table.decode(text)
        for worker, own in table.present.items():
            if own is not None and worker not in read:
                found = yield Ask("peek", member_key(worker, token))
                if found is not None:
                    read[worker] = found
        before = {worker: None if worker in read else own for worker, own in table.present.items()}
        me = _with_id(me, table.last + 1)
        own = yield Ask("sign", member_key(me.id, token), (me.encode(),))
        desired = _Table(me.id, {**before, me.id: own}).encode()
        text = yield Ask("swap", PRESENT, (text, desired))
        if text == desired:  # No other worker writes this text: it has this one's addresses.
            return me, before, read


def _with_id(me: Registration, worker: int) -> Registration:
    """Returns a registration with another id, and the same rank."""
    if worker >= ID_LIMIT:
        raise ConfigurationError(
            f"{ID_LIMIT} workers have joined this group, which is all that it can count; start a "
            "new group"
        )
    return dataclasses.replace(me, id=worker, later_rank=None if worker == me.rank else me.rank)


def leave_open(worker: int, token: str, *, is_over: bool = True) -> Steps[None]:
    """Removes the keys of a worker that is gone, and takes it out of the table.

    A newcomer that finds a worker without its key goes on with that. So nothing stays if the
    process that runs this is killed.

    Args:
        worker: Its id.
        token: The token of the run.
        is_over: Whether its process has ended: it will not look at its fate any more.
    """
    yield Ask("remove", member_key(worker, token))
    if is_over:
        yield Ask("remove", _fate_key(worker))
    text = yield Ask("swap", PRESENT, ("", _Table(-1, {}).encode()))
    while worker in (table := _Table.decode(text)).present:
        text = yield Ask("swap", PRESENT, (text, table.without(worker).encode()))


def _note_left(worker: int, token: str, *, is_over: bool) -> Steps[None]:
    """Does ``leave_open`` for another worker; later newcomers find out if the store fails."""
    with contextlib.suppress(RuntimeError, OSError, WeftError):
        yield from leave_open(worker, token, is_over=is_over)


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
            is_over = failure_of(error) is Failure.GONE
            yield from _note_left(earlier.id, admission.token, is_over=is_over)
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
                    yield from _note_left(other.id, admission.token, is_over=True)
        others = {}
        for worker, other in later.items():
            has_living = any(_are_namesakes(other, member) for member in members)
            if has_living and (yield from _is_refused(worker)):
                yield from _note_left(worker, admission.token, is_over=False)
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
    if (yield Ask("set_once", _fate_key(worker), (_JOINED,))).decode() != _JOINED:
        raise DuplicateName(
            "another worker of this name or rank was alive while this one joined; if it has ended "
            "since, start this one again"
        )


def _is_refused(worker: int) -> Steps[bool]:
    """Refuses a worker whose former life lives; returns False if it joined after that died."""
    return bool((yield Ask("set_once", _fate_key(worker), (_REFUSED,))).decode() == _REFUSED)


def member_key(worker: int, token: str) -> str:
    """Returns the key of the registration of a worker of an open group."""
    return f"member/{worker}/{token}"


def _fate_key(worker: int) -> str:
    return f"fate/{worker}"
