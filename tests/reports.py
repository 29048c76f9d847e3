"""Makes reports for tests of what follows from them."""

from __future__ import annotations

from typing import Any

from torchweft.engine.protocol.observing import CALL, GATHERING, Wait, call_key
from torchweft.reports import Identity, Member, OpenCall, Report, ServedCall, Thread

LONG_S = 30.0


def thread(name: str = "MainThread", **others: Any) -> Thread:
    fields: dict[str, Any] = {
        "is_idle": False,
        "is_own": False,
        "is_main": name == "MainThread",
        "serves": "",
        "waits": (),
        "is_at_lock": False,
        "place": f"{name}.py:1 in run",
        "frames": (),
    }
    return Thread(name, **{**fields, **others})


def calling(caller: str, number: int, callee: str, age_s: float = LONG_S) -> Wait:
    return Wait(CALL, call_key(caller, number), age_s, "work", (callee,))


def gathering(*workers: str, number: int = 0, age_s: float = LONG_S) -> Wait:
    return Wait(GATHERING, f"barrier {number} of {' '.join(workers)}", age_s, "barrier", workers)


def served(caller: str, number: int, **others: Any) -> ServedCall:
    fields: dict[str, Any] = {
        "function": "program.work",
        "age_s": LONG_S,
        "has_begun": True,
        "makes": "",
        "awaits": "",
    }
    return ServedCall(call_key(caller, number), caller, **{**fields, **others})


def made(caller: str, number: int, callee: str, parent: str = "") -> OpenCall:
    return OpenCall(call_key(caller, number), callee, "program.work", LONG_S, parent)


def member(name: str, rank: int = 0) -> Member:
    return Member(name, rank, rank, "here", (f"unix:@{name}",), "connected", "")


def report(name: str, *threads: Thread, **others: Any) -> Report:
    members = others.pop("members", (member(name),))
    identity = Identity(name, 0, "here", 1, "cafe", "program", members)
    fields: dict[str, Any] = {
        "clock_s": 100.0,
        "time": 1000.0,
        "cpu_s": 1.0,
        "memory_bytes": 1 << 20,
        "counted_since_s": -1.0,
        "slots": 16,
        "running": 0,
        "queued": 0,
        "traffic": (),
        "functions": (),
        "made": (),
        "served": (),
        "owned": 0,
        "held": 0,
        "references": (),
        "contexts": 0,
        "passes": 0,
        "events": (),
        "in_flight": len(others.get("made", ())),
        "serving": len(others.get("served", ())),
    }
    return Report(identity=identity, threads=threads, **{**fields, **others})
