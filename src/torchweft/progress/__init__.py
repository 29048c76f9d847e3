"""Shows the progress of long work and the workers that delay it: one display for all applications.

An application reports events to ``Display.work``: a job starts, its parts start and end on workers,
a worker is lost, the job ends. `work.py` derives the state from the events, and estimates the rate
of the program's own loop; `display.py` shows it, with rich or as lines of a log.
"""

from __future__ import annotations

from torchweft.progress.display import Display, Nouns
from torchweft.progress.work import Straggler, Work, WorkerShare

__all__ = ["Display", "Nouns", "Straggler", "Work", "WorkerShare"]
