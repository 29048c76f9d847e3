from __future__ import annotations

from benchmarks.frame import Question, Row, Side

ECHO = Side("echo", runner="raw")
ALONE = Side("alone", runner="alone", environment={"EXAMPLE": "set"})
BROKEN = Side("broken", runner="alone")

ASK = Row("ask", "asking", 6, ours="echo", torch="alone", limit="alone", warm_up=1)
END = Row("end", "ending", 1, ours="echo", limit="broken", warm_up=0)
ENVIRONMENT = Row("environment", "environment", 1, ours="alone")
PAIR = Row("pair", "in a pair", 4, ours="echo", torch="alone", work="ask", size=2, warm_up=0)
SAME = Row("same", "same numbers", 2, ours="echo", torch="alone", work="ask", check="close")
OTHER = Row("other", "other numbers", 2, ours="echo", torch="alone", work="ask", check="far")

QUESTION = Question(
    "tests.tools.benchmarks.example",
    "Example",
    (ASK, END, ENVIRONMENT, PAIR, SAME, OTHER),
    sides=(ECHO, ALONE, BROKEN),
    size=3,
)
