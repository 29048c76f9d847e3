"""Decides whether a thread spins for a moment before it sleeps.

Waking a thread on another core takes longer than a whole small call: 20-50 us on a small virtual
machine, against 1 us for a look at the socket. A spinning thread finds the answer at once if the
other side runs on a core of its own. Otherwise spinning keeps the other side from running. No
figure of the machine distinguishes the two cases reliably, so the decision follows its own
success. Each failure doubles the rest, the time in which waits go straight to sleep; a success
lets the next wait spin. The rest is bounded, so that at worst half a percent of the time is spent
spinning, and spinning that has become worthwhile is noticed within a few calls.

A wait may fail because it was the first one after a pause. So the rest ends early if waits follow
each other so quickly that each would have found its data while spinning. If the next one fails all
the same, both sides share a core: from then on a rest takes its time, until a wait succeeds.

Both sides may share a core although another one is idle: Linux wakes a thread where it ran last,
and moves it only if two threads of one core are ready to run at once. So a thread that has spun for
longer than a small call takes offers its core to others in between. If they take the offer, both
sides stay ready to run, and the system soon separates them. Until then, and where it cannot, the
next waits offer the core at once, which is as fast as to sleep and to be woken. A program that
computes takes an offer for milliseconds: then the thread offers nothing for a while. The system
takes some milliseconds to separate threads, a whole block of calls. So on a machine of two cores, a
thread whose offer was taken moves to the other one itself if no further thread is ready to run.
With more cores, the system looks for an idle one when it wakes a thread, and a thread cannot tell
which one is idle.

Between the messages of a training step the other side computes for some hundred microseconds. A
thread that has spun in vain for the usual moment continues for several times as long, if no
thread on the machine waits for a core meanwhile.
"""

from __future__ import annotations

import os
from _thread import get_ident
from os import sched_yield
from time import monotonic

from torchweft import knobs
from torchweft.probe import leave_core, running_threads
from torchweft.runtime import interrupts

_SHORTEST_REST = 10
_LONGEST_REST = 200
"""Rests, as multiples of the time spun in vain."""
_QUICK_WAITS = 3
"""So many waits in a row, each begun within a spin's time of the one before, end a rest."""
_ALONE_S = 30e-6
"""How long a thread spins before it offers its core to others: a small call takes less."""
_SWITCH_S = 5e-6
"""An offer that takes longer was taken."""
_FOREIGN_S = 1e-3
"""An offer that takes longer was probably taken by another program than the peer."""
_KEEP_S = 1.0
"""For how long a thread offers nothing after that."""
_MOVE_S = 0.02
"""The least time between two moves to another core."""
_LOOK_S = 0.0005
"""The least time from a look that found the other core busy to the next look."""
_LOAD_AGE_S = 0.005
"""How long a look at the load of the machine counts; it takes as long as 20 looks at a socket."""


class Spinning:
    """Decides for one kind of wait on one connection whether to spin; learns from the outcome."""

    __slots__ = (
        "_asked_s",
        "_cores",
        "_has_free_core",
        "_load_until_s",
        "_may_end_rest",
        "_moves_from_s",
        "_quick_waits",
        "_rest",
        "_rests_until_s",
        "alone_s",
        "keeps_core_until_s",
        "long_spin_s",
        "spin_s",
    )

    def __init__(self) -> None:
        self._cores = os.cpu_count() or 1
        self.spin_s = knobs.SPIN_S.get() if self._cores > 1 else 0.0
        self.long_spin_s = max(knobs.LONG_SPIN_S.get(), self.spin_s)
        self.alone_s = _ALONE_S
        self.keeps_core_until_s = 0.0
        self._rest = _SHORTEST_REST
        self._rests_until_s = 0.0
        self._asked_s = 0.0
        self._quick_waits = 0
        self._may_end_rest = True
        self._has_free_core = False
        self._load_until_s = 0.0
        self._moves_from_s = 0.0

    def is_worthwhile(self) -> bool:
        """Whether the wait that begins now is to spin first."""
        if self.spin_s <= 0.0:
            return False
        now_s = monotonic()
        return now_s >= self._rests_until_s or (self._may_end_rest and self._ends_rest(now_s))

    def _ends_rest(self, now_s: float) -> bool:
        """Whether the last waits were so short that this one ends the rest."""
        is_quick = now_s - self._asked_s < self.spin_s
        self._asked_s = now_s
        self._quick_waits = self._quick_waits + 1 if is_quick else 0
        if self._quick_waits < _QUICK_WAITS:
            return False
        self._may_end_rest, self._quick_waits, self._rests_until_s = False, 0, now_s
        return True

    def begin(self) -> Look:
        """Returns a ``Look`` that begins now."""
        return Look(self)

    def succeeded(self) -> None:
        """Notes that the awaited data arrived while spinning."""
        self._rest = _SHORTEST_REST
        self._may_end_rest = True

    def leave_core(self, now_s: float) -> None:
        """Moves the thread to the other one of two cores if that is free.

        Not the main thread: a signal handler could interrupt the move.
        """
        if now_s < self._moves_from_s or self._cores != 2 or get_ident() == interrupts.main_id:
            return
        is_other_free = 0 < running_threads() <= 2
        self._moves_from_s = now_s + (_MOVE_S if is_other_free else _LOOK_S)
        if is_other_free:
            leave_core()

    def may_go_on(self, now_s: float) -> bool:
        """Whether to spin for ``long_spin_s`` if ``spin_s`` was not enough."""
        if self.long_spin_s <= self.spin_s:
            return False
        if now_s >= self._load_until_s:
            self._has_free_core = 0 < running_threads() <= self._cores
            self._load_until_s = now_s + _LOAD_AGE_S
        return self._has_free_core

    def failed(self, spun_s: float) -> None:
        """Notes that the thread spun for ``spun_s`` in vain and has to sleep."""
        self._rests_until_s = monotonic() + self._rest * spun_s
        self._rest = min(2 * self._rest, _LONGEST_REST)


class Look:
    """One period of spinning; the thread asks after each look whether to continue."""

    __slots__ = ("_began_s", "_is_usual", "_limit_s", "_offers_from_s", "_spinning")

    def __init__(self, spinning: Spinning) -> None:
        self._spinning = spinning
        self._began_s = monotonic()
        self._limit_s = self._began_s + spinning.spin_s
        self._offers_from_s = self._began_s + spinning.alone_s
        self._is_usual = True
        spinning.alone_s = _ALONE_S  # Unless an offer is taken this time, too.

    def goes_on(self) -> bool:
        """Whether to look once more; if not, the spinning has failed."""
        now_s = monotonic()
        if now_s < self._limit_s:
            keeps = now_s < self._offers_from_s or now_s < self._spinning.keeps_core_until_s
            return keeps or self._offer_core(now_s)
        if not (self._is_usual and self._spinning.may_go_on(now_s)):
            self._spinning.failed(now_s - self._began_s)
            return False
        self._is_usual, self._limit_s = False, self._began_s + self._spinning.long_spin_s
        return True

    def _offer_core(self, now_s: float) -> bool:
        """Lets other threads of this core run; returns whether to look once more."""
        sched_yield()
        taken_s = monotonic() - now_s
        if taken_s < _SWITCH_S:
            return True
        self._spinning.alone_s = 0.0
        if taken_s < _FOREIGN_S:
            self._spinning.leave_core(now_s)
            return True
        self._spinning.keeps_core_until_s = now_s + _KEEP_S
        self._spinning.failed(now_s - self._began_s)
        return False
