"""How a worker gets into an open group and out of it, through a store that all of them reach.

The store only orders those who come and says who they are; see ``docs/protocols/membership.md``.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import time
from datetime import timedelta
from typing import Any, NamedTuple

from torchweft.agent.bounded_store import BoundedStore
from torchweft.agent.rendezvous import make_open
from torchweft.errors import ConfigurationError, RendezvousError, RendezvousTimeout, WeftError
from torchweft.protocol.membership import FIRST_LATER_ID, ID_LIMIT, Registration

_log = logging.getLogger("torchweft")

_UNWRITTEN_S = 2.0
"""How long one that came earlier may take from taking its place to saying who it is."""


class Admission(NamedTuple):
    """This worker's place in an open group.

    Attributes:
        token: What names this run; see ``Protection``.
        me: This worker's registration.
        place: Its place in the order of those who came.
        earlier: Those who came earlier and have not left, by place.
    """

    token: str
    me: Registration
    place: int
    earlier: dict[int, Registration]


def enter(store: Any, registration: Registration, timeout_s: float) -> Admission:
    """Registers this worker, which listens already; returns who was there before.

    Args:
        store: A store with keys of this group only, each of whose operations ends in time.
        registration: This worker's own; its id is taken for its rank.
        timeout_s: How long all of it may take, in seconds.

    Raises:
        RendezvousError: The group is a closed one, or the store is broken.
        RendezvousTimeout: The store does not answer.
        ConfigurationError: The rank is too high, or the group has had too many workers.
    """
    if registration.rank >= FIRST_LATER_ID:
        raise ConfigurationError(
            f"rank {registration.rank} is too high for a group without world_size; "
            f"it must be below {FIRST_LATER_ID}"
        )
    deadline_s = time.monotonic() + timeout_s
    try:
        make_open(store)
        token = store.compare_set("token", "", secrets.token_hex(16)).decode()
        me = _with_id(store, registration)
        place = store.add("members", 1)
        store.set(_member(place, token), me.encode())
        earlier = {}
        for other in range(1, place):
            if not store.check([_left(other)]):
                found = _read(store, other, token, deadline_s)
                if found is not None:
                    earlier[other] = found
    except WeftError:
        raise
    except (RuntimeError, OSError) as error:
        if time.monotonic() < deadline_s:
            raise RendezvousError(f"the rendezvous store does not work: {error}") from error
        raise RendezvousTimeout(
            f"the rendezvous store did not answer within {timeout_s:.1f} s: {error}",
            elapsed_s=timeout_s,
        ) from error
    return Admission(token, me, place, earlier)


def note_left(store: Any, place: int) -> None:
    """Tells those who come later that the worker of a place is not there any more.

    Waits for the store for a moment at most.
    """
    try:
        BoundedStore(store, 0.0).set(_left(place), "1")
    except (RuntimeError, OSError) as error:
        _log.debug("the store could not be told that place %d is empty: %s", place, error)


def _with_id(store: Any, registration: Registration) -> Registration:
    rank = registration.rank
    if store.add(f"lives/{rank}", 1) == 1:
        return registration
    worker = FIRST_LATER_ID - 1 + store.add("later", 1)
    if worker >= ID_LIMIT:
        raise ConfigurationError(
            f"workers have come back to this group {ID_LIMIT - FIRST_LATER_ID} times, which is "
            "all it can count; start a new group"
        )
    return dataclasses.replace(registration, id=worker, later_rank=rank)


def _read(store: Any, place: int, token: str, deadline_s: float) -> Registration | None:
    """Returns who took a place; None where it died before it could say."""
    limit_s = min(_UNWRITTEN_S, max(deadline_s - time.monotonic(), 0.01))
    try:
        store.wait([_member(place, token)], timedelta(seconds=limit_s))
    except RendezvousTimeout:
        raise  # The store itself does not answer.
    except (RuntimeError, ValueError):
        _log.warning("whoever joined the group as number %d never said who it is", place)
        return None
    return Registration.decode(store.get(_member(place, token)))


def _member(place: int, token: str) -> str:
    # What was written, and perhaps signed, in another run counts for nothing in this one.
    return f"member/{place}/{token}"


def _left(place: int) -> str:
    return f"left/{place}"
