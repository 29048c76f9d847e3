"""Follows a cluster's shutdown: reports the workers it waits for and, at the end, stuck workers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torchweft.launch.report import describe_duration

if TYPE_CHECKING:
    from torchweft.engine.threads.reports import Lacking
    from torchweft.rpc import WorkerStacks

SAY_S = 5.0
"""Seconds between reports of the workers that a shutdown waits for."""

ANSWER_S = 4.0
"""Seconds that a worker has to report what it is doing: it may compute, on a busy host."""


class LeaveWatch:
    """Follows the shutdown of a group from one of its workers.

    Args:
        say: Writes one message of the launcher.
        limit_s: How long leaving may take, in seconds.

    Attributes:
        deadline_s: When the time is up, by ``time.monotonic``.
        stuck: After a shutdown that ran out of time: the activity of each unfinished worker, by
            name; None for a worker that did not report it.
    """

    def __init__(self, say: Callable[[str], None], limit_s: float) -> None:
        self._say = say
        self._began_s = time.monotonic()
        self.limit_s = limit_s
        self.deadline_s = self._began_s + limit_s
        self.stuck: dict[str, WorkerStacks | None] = {}

    @contextlib.contextmanager
    def following(self, lacking: Callable[[], Lacking]) -> Iterator[None]:
        """Reports at intervals, within the ``with`` block, the workers that it waits for."""
        is_over = threading.Event()
        thread = threading.Thread(
            target=self._say_again, args=(is_over, lacking), name="weft-cluster-leaving"
        )
        thread.start()
        try:
            yield
            if time.monotonic() >= self.deadline_s:
                self.stuck = _doings(lacking())
        finally:
            is_over.set()
            thread.join()

    def left_s(self) -> float:
        """Returns the time left, in seconds."""
        return max(self.deadline_s - time.monotonic(), 0.0)

    def say_waiting(self, for_whom: str) -> None:
        """Reports what leaving waits for, and how long it has waited."""
        waited_s = time.monotonic() - self._began_s
        self._say(f"still leaving the cluster after {describe_duration(waited_s)}: {for_whom}")

    def stuck_text(self) -> str:
        """Describes what the stuck workers were doing."""
        return "; ".join(_doing_text(name, doing) for name, doing in self.stuck.items())

    def _say_again(self, is_over: threading.Event, lacking: Callable[[], Lacking]) -> None:
        while not is_over.wait(SAY_S):
            now = lacking()
            doings = _doings(now)
            if is_over.is_set():
                return
            shown = [_doing_text(name, doing) for name, doing in doings.items()]
            self.say_waiting("; ".join(shown) or now.text)


def _doings(lacking: Lacking) -> dict[str, WorkerStacks | None]:
    """Returns what the workers are doing that hold up the shutdown.

    A lacking worker that answers and serves no call only waits for another worker, so it is not
    to blame. If no lacking worker is to blame, all workers are asked.
    """
    from torchweft.engine.worker.current import current
    from torchweft.rpc.observed import ask_all
    from torchweft.rpc.worker import WORKER

    agent = current()
    told: dict[str, WorkerStacks | None] = {}
    for peers in ([agent.find(name) for name in lacking.workers], agent.members.present()):
        missing = [peer for peer in peers if peer.name not in told]
        told |= ask_all(agent.slots[WORKER], missing, ANSWER_S)
        to_blame = {name: doing for name, doing in told.items() if doing is None or doing.calls}
        if to_blame:
            return to_blame
    return {name: told[name] for name in lacking.workers}


def _doing_text(name: str, doing: WorkerStacks | None) -> str:
    if doing is None:
        return f"worker {name!r} does not say what it is doing"
    if not doing.calls:
        return f"worker {name!r} has not finished"
    return f"worker {name!r} runs {' and '.join(map(str, doing.calls))}"
