"""A stream that a test waits on, for a display with a real thread."""

from __future__ import annotations

import io
import threading

from torchweft.progress import Work

WORKERS = ["worker0", "worker1"]
WAIT_S = 30.0
OFTEN_S = 0.002
NEVER_S = 1e6


class Watched(io.StringIO):
    """A stream that lets a test wait until a text is written."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = threading.Condition()

    def write(self, text: str) -> int:
        with self._changed:
            self._changed.notify_all()
            return super().write(text)

    def await_text(self, text: str) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: text in self.getvalue(), WAIT_S)
        assert came, f"{text!r} is not in {self.getvalue()!r}"


def run_job(work: Work, job_id: int, slow_s: float = 0.1) -> None:
    work.begun(job_id, "inner", 2, WORKERS)
    for part, seconds in ((0, 0.1), (1, slow_s)):
        work.started(job_id, part, WORKERS[part])
        work.ended(job_id, part, WORKERS[part], seconds)
    work.done(job_id, None)
