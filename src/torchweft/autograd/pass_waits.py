"""Whom backward passes wait for: in reports, and in the error of their time limit."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial

from torchweft.autograd.pass_state import LedPassState, PassState
from torchweft.errors import BackwardTimeout
from torchweft.protocol.observing.keys import PASS, Wait
from torchweft.threads.reports import OpenWait, names_of
from torchweft.worker.agent import Agent


class PassWaits:
    """The waits of one worker's parts of passes. Thread-safe.

    Args:
        agent: The worker's agent.
        timeout_s: How long a pass may wait.
    """

    def __init__(self, agent: Agent, timeout_s: float) -> None:
        self._agent = agent
        self._timeout_s = timeout_s

    def open_in(self, states: Iterable[PassState]) -> list[OpenWait]:
        """Returns those of some passes in which this worker waits for other workers."""
        return [
            OpenWait(
                ("backward", state.pass_id), state.waits_since_s, partial(self._text_of, state)
            )
            for state in states
            if self._awaited_in(state)
        ]

    def shown(self, led: LedPassState) -> list[Wait]:
        """Returns what the thread that leads a pass waits for; nothing if it is not for others."""
        names = self._names_awaited(led)
        if led.outcome is not None or not names:
            return []
        now_s = time.monotonic()
        age_s = now_s - min(led.waits_since_s, now_s)
        return [Wait(PASS, str(led.pass_id), age_s, "a backward pass", names)]

    def _awaited_in(self, state: PassState) -> set[int]:
        if isinstance(state, LedPassState):
            return state.driver.awaited_workers() - {self._agent.me.id}
        return set() if state.awaited is None else {state.awaited}

    def _names_awaited(self, state: PassState) -> tuple[str, ...]:
        return tuple([self._agent.peers[each].name for each in sorted(self._awaited_in(state))])

    def _text_of(self, state: PassState) -> str:
        return f"in a backward pass for {names_of(self._names_awaited(state))}"

    def timeout_error(self, state: PassState) -> BackwardTimeout:
        """Returns the error of a pass that has waited too long; it names the workers."""
        missing = self._names_awaited(state)
        whom = "another thread of this worker"
        if missing:
            whom = f"{names_of(missing)}, or for workers that were called from there,"
        return BackwardTimeout(
            f"a backward pass has waited {self._timeout_s:g} s (WEFT_BACKWARD_TIMEOUT_S) for "
            f"{whom} and has ended; raise the variable if a pass may take longer",
            worker=missing[0] if missing else "",
            operation="waiting for the pass",
            missing=missing,
        )
