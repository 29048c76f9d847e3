"""Shows how long work proceeds, and which worker delays it: one display for all applications.

An application tells ``Display.work`` its events: a job starts, its parts start and end on workers,
a worker is lost, the job ends. `work.py` keeps the state that follows from them, `steps.py` the
rate of the program's own loop, and `wording.py` makes text of both. `display.py` shows the text, as
lines of a log or, by `live.py`, with rich.
"""

from __future__ import annotations

from torchweft.progress.display import Display
from torchweft.progress.wording import Nouns
from torchweft.progress.work import Straggler, Work, WorkerShare

__all__ = ["Display", "Nouns", "Straggler", "Work", "WorkerShare"]
