"""Answers the questions of observers; see ``docs/protocols/observing.md``."""

from __future__ import annotations

from torchweft.agent.agent import Agent
from torchweft.errors import ProtocolError
from torchweft.protocol.observing.facts import FACTS, MEASURE, encode_facts
from torchweft.protocol.observing.report import (
    DETAIL,
    METRICS,
    REPORT,
    WHO,
    Identity,
    Report,
    encode,
)
from torchweft.rpc.counting import LEASE_S, METRICS_LEASE_S, Counting
from torchweft.rpc.examining import facts_of, measured_for_observer
from torchweft.rpc.reporting import Reporter


class Observers:
    """Answers the observers of one worker. Thread-safe.

    Args:
        agent: The worker's agent.
        reporter: Makes the reports.
        counting: Counts the worker's calls while it is observed.

    Attributes:
        counting: The argument.
    """

    def __init__(self, agent: Agent, reporter: Reporter, counting: Counting) -> None:
        self._agent = agent
        self._reporter = reporter
        self.counting = counting

    def answer(self, question: str) -> bytes:
        """Returns the answer to a question; raises ProtocolError if there is no such question."""
        if question == WHO:
            return encode(self.identity())
        if question == FACTS:
            return encode_facts(facts_of(self._agent)).encode()
        if question.startswith(MEASURE):
            callee = question.removeprefix(MEASURE)
            return encode_facts(measured_for_observer(self._agent, callee)).encode()
        if question not in (REPORT, DETAIL, METRICS):
            raise ProtocolError(f"an observer asks {question!r}")
        return encode(self.report(question))

    def report(self, question: str) -> Report:
        """Returns a report, and has calls counted until the next one is due."""
        self.counting.extend(METRICS_LEASE_S if question == METRICS else LEASE_S)
        return self._reporter.report(question)

    def identity(self) -> Identity:
        """Returns who this worker is, and which others it knows."""
        return self._reporter.identity()
