"""Shows people how a program's maps come along, and which worker holds them up.

`activity.py` gathers what maps tell, `stragglers.py` knows what is slow, `steps.py` knows how fast
the program's own loop goes, `wording.py` turns all of it into text; these are pure, with the time
as an argument or a clock. `terminal.py` and `showing.py` bring it before somebody's eyes.
"""

from __future__ import annotations

from torchweft.mapreduce.display.activity import WorkerShare
from torchweft.mapreduce.display.showing import progress
from torchweft.mapreduce.display.stragglers import Straggler

__all__ = ["Straggler", "WorkerShare", "progress"]
