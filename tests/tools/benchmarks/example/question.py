from __future__ import annotations

from benchmarks.frame import Question, Row, Side

ECHO = Side("echo", runner="raw")
ALONE = Side("alone", runner="alone")
BROKEN = Side("broken", runner="alone")

ASK = Row("ask", "asking", 6, ours="echo", torch="alone", limit="alone", warm_up=1)
END = Row("end", "ending", 1, ours="echo", limit="broken", warm_up=0)

QUESTION = Question(
    "tests.tools.benchmarks.example",
    "Example",
    (ASK, END),
    sides=(ECHO, ALONE, BROKEN),
    size=3,
)
