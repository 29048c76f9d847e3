"""Decides which version of some weights is kept, sent, fetched and taken over.

See ``docs/protocols/weights.md``. Both machines know versions, not their bytes. Rules of the file:

- A version is named by its publisher and a number. So versions of a publisher that was started
  again are not mistaken for those of its former life.
- A publisher never refuses: it sends the newest version, as a delta only where it keeps the base.
- A subscriber has one version in use, at most one that is ready, and at most one fetch at a time.
- A version is ready when all of its bytes are there and checked; ``took`` is the only event that
  changes the version in use.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from torchweft.extending import rebuilds_plain


@rebuilds_plain
class Version(NamedTuple):
    """The name of a version.

    Attributes:
        publisher: Number of one life of the publisher, drawn at random.
        number: Counts the versions of this publisher, from 1 or a number that it was given.
    """

    publisher: int
    number: int


@rebuilds_plain
class Offer(NamedTuple):
    """The version that a subscriber is sent.

    Attributes:
        version: The version.
        base: The version of the subscriber to which the delta applies; None for whole weights.
    """

    version: Version
    base: Version | None


class Offers:
    """The versions of one publisher. Not thread-safe.

    Args:
        publisher: Number of this life of the publisher.
        after: The first version has the number after this.
        bases: How many older versions are kept, for deltas.

    Attributes:
        number: That of the newest version.
    """

    def __init__(self, publisher: int, after: int, bases: int) -> None:
        self._publisher = publisher
        self.number = after
        self._bases = bases
        self._kept: deque[int] = deque()
        self._is_base = False

    @property
    def newest(self) -> Version | None:
        """The newest version; None before the first."""
        return Version(self._publisher, self._kept[-1]) if self._kept else None

    @property
    def kept(self) -> tuple[int, ...]:
        """The numbers of the versions whose bytes are kept, oldest first."""
        return tuple(self._kept)

    def published(self) -> Version:
        """A new version is whole; it is the newest from now on."""
        if self._kept and not self._is_base:
            self._kept.pop()
        while len(self._kept) > self._bases:
            self._kept.popleft()
        self.number += 1
        self._kept.append(self.number)
        self._is_base = False
        return Version(self._publisher, self.number)

    def fetched(self, have: Version | None, *, is_shared: bool) -> Offer | None:
        """A subscriber asks for the newest version; None if there is none, or none but its own.

        Args:
            have: The version that the subscriber has.
            is_shared: Whether its worker maps the memory of the versions.
        """
        newest = self.newest
        if newest is None or newest == have:
            return None
        if is_shared:
            return Offer(newest, None)
        # The subscriber will have it, and deltas against it will be worth their memory.
        self._is_base = bool(self._bases)
        kept = [Version(self._publisher, number) for number in self._kept]
        return Offer(newest, have if have in kept else None)


class Following:
    """The versions of one subscriber. Not thread-safe.

    An event returns whether the publisher is to be asked for its newest version now.

    Attributes:
        current: The version in use; None before the first.
        ready: A version that is whole and may be taken over.
    """

    def __init__(self) -> None:
        self.current: Version | None = None
        self.ready: Version | None = None
        self._publisher = 0
        self._announced: dict[int, int] = {}
        """By publisher, the newest number that was announced and has not arrived."""
        self._asked_for = 0
        self._is_fetching = False
        self._is_shared = False
        self._is_whole_due = False

    @property
    def have(self) -> Version | None:
        """The version against which a delta may be sent."""
        return None if self._is_whole_due or self.ready is not None else self.current

    @property
    def is_fetch_due(self) -> bool:
        """Whether the publisher is to be asked for its newest version now."""
        is_announced = self._announced.get(self._publisher, 0) > 0
        if self._is_fetching or not (is_announced or self._is_whole_due):
            return False
        # Further bytes that may never be used are worth their way only where none are copied.
        return self.ready is None or self._is_shared

    def announced(self, version: Version) -> bool:
        """A publisher has a version. Announcements may come late, or before ``followed``."""
        number = max(self._announced.get(version.publisher, 0), version.number)
        self._announced[version.publisher] = number
        return self.is_fetch_due

    def followed(self, publisher: int) -> bool:
        """This publisher is asked from now on; answers of another one are dropped."""
        self._publisher = publisher
        self._announced = {publisher: self._announced.get(publisher, 0)}
        self._is_fetching = self._is_whole_due = False
        return self.is_fetch_due

    def fetching(self) -> None:
        """The publisher has been asked."""
        self._is_fetching = True
        self._asked_for = self._announced.get(self._publisher, 0)

    def arrived(self, offer: Offer | None, *, is_shared: bool) -> bool:
        """The answer has come; returns whether its bytes may be used."""
        self._is_shared = is_shared
        if offer is None:
            # Nothing newer was there; an announcement may have overtaken this answer.
            self._forget_announced(self._asked_for)
            self._is_whole_due = self._is_fetching = False
            return False
        if offer.base is not None and offer.base != self.have:
            self._is_fetching = False
            self._is_whole_due = True
            return False
        return True  # The fetch is over when they are checked.

    def checked(self, version: Version, *, is_good: bool) -> bool:
        """All bytes of a version that arrived are in place; a delta may have proven wrong."""
        self._is_fetching = False
        self._is_whole_due = not is_good
        if is_good:
            self.ready = version
            self._forget_announced(version.number)
        return self.is_fetch_due

    def _forget_announced(self, number: int) -> None:
        if self._announced.get(self._publisher, 0) <= number:
            self._announced.pop(self._publisher, None)

    def failed(self) -> None:
        """The question had no answer: its publisher is lost, or the call failed.

        Its subscriber looks at ``is_fetch_due`` when it has told its user.
        """
        self._is_fetching = False

    def took(self) -> bool:
        """The version that was ready is in use, and the former no more."""
        assert self.ready is not None
        self.current, self.ready = self.ready, None
        return self.is_fetch_due
